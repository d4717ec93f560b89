"""Features as online updates: a batch and a live loop see the same values.

A feature is `init() -> state` and `update(state, bar) -> state, value`, written for one asset in
float64; a state is a pytree of numpy arrays. Its batch form is the scan of its update. Look-ahead
thus cannot be written, and the live loop sees training's numbers bit for bit. Every value is
normalised by the past alone: by statistics of the bars before it, or by an indicator's own
definition, which includes the bar. `feature_sets` puts several together.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from nca_trader.config.extensions import own_code, split_comparison, split_frame
from nca_trader.config.ranges import describe
from nca_trader.config.registry import Registry
from nca_trader.errors import ConfigError, argument
from nca_trader.numerics import float64_on_cpu
from nca_trader.types import COLUMN, Bar, Bars, Tensor

SPAN = 60  # bars: span of every average that normalises, 2 / (SPAN + 1) the newest bar's weight
LEAST = 1e-12  # a scale at or below it means that prices did not move, and gives 0


class Average(NamedTuple):
    """Exponentially weighted mean and variance, all `[]`; weights sum to 1 from the first value.

    `mean` and `variance` are pandas' `ewm(span=..., adjust=True)` mean and var(bias=True).
    """

    weight: Tensor
    mean: Tensor
    variance: Tensor


def empty_average() -> Average:
    """Return the average before any value."""
    return Average(np.zeros(()), np.zeros(()), np.zeros(()))


def add(average: Average, x: Array, span: float = SPAN) -> Average:
    """Return the average after one more value `x` `[]`.

    With keep = 1 - 2 / (span + 1):  W' = keep W + 1;  m' = m + (x - m) / W';
    v' = (1 - 1 / W') (v + (x - m)^2 / W').
    Source: West, Updating mean and variance estimates, CACM 22 (1979), decayed weights.
    """
    weight = (1.0 - 2.0 / (span + 1.0)) * average.weight + 1.0
    step = (x - average.mean) / weight
    variance = (1.0 - 1.0 / weight) * (average.variance + step * (x - average.mean))
    return Average(weight, average.mean + step, variance)


def bars_to_forget(span: float, precision: float = 2.0**-52) -> int:
    """Return after how many values the older ones weigh less than `precision` in an EW mean.

    Example:
      >>> bars_to_forget(60)
      1082
    """
    keep = 1.0 - 2.0 / (span + 1.0)
    return math.ceil(math.log(precision) / math.log(keep)) if keep > 0.0 else 1


def z_score(past: Average, x: Array) -> Array:
    """Return `x` `[]` in standard deviations of the past from the past's mean."""
    return ratio(x - past.mean, jnp.sqrt(past.variance))


def wilder(mean: Array, x: Array, count: Array, period: int = 14) -> Array:
    """Return Wilder's average after value number `count` (from 1): a plain mean up to `period`.

    A' = A + (x - A) / min(count, period). Source: Wilder, New Concepts in Technical Trading
    Systems (1978).
    """
    return mean + (x - mean) / jnp.minimum(count, period)


def ratio(a: Array, b: Array, least: Tensor | float = LEAST) -> Array:
    """Return `a / b`, and 0 where the scale `b` is at or below `least`."""
    usable = b > least
    return jnp.where(usable, a / jnp.where(usable, b, 1.0), 0.0)


def keep_unless(condition: Tensor, old: Any, new: Any) -> Any:
    """Return `new` where `condition` `[]` holds, else `old`, over two equal pytrees."""
    return jax.tree.map(lambda a, b: jnp.where(condition, b, a), old, new)


def shift(window: Tensor, x: Tensor) -> Array:
    """Return the window `[W]`, oldest first, after one more value."""
    return jnp.concatenate([window[1:], x[None]])


class Closes(NamedTuple):
    """Recent closes `[W]`, oldest first, and the EW mean of squared one-bar log-returns."""

    window: Tensor
    squares: Average


def empty_closes(window: int) -> Closes:
    """Return the state before any bar, which will keep `window` closes."""
    return Closes(np.ones(window), empty_average())


def advance(past: Closes, bar: Bar, count: Array) -> tuple[Closes, Array]:
    """Return the closes up to `bar`, and the volatility per bar `[]` of the bars before it.

    sigma_{t-1} = sqrt(EW mean of r^2), r = log(close_t / close_{t-1}), mean return taken as 0.
    Source: RiskMetrics Technical Document (1996), section 5.2, with span SPAN.
    """
    r = jnp.log(bar.close / past.window[-1])
    squares = keep_unless(count > 0, past.squares, add(past.squares, r * r))
    return Closes(shift(past.window, bar.close), squares), jnp.sqrt(past.squares.mean)


class Feature(NamedTuple):
    """A feature of one asset.

    Attributes:
      init: `() -> state`, a pytree of numpy arrays.
      update: `(state, bar) -> state, value`; `bar` has scalar fields, `value` is `[]` float64 and
        finite. A bar that is not `present` leaves the state as it was and has value 0.
      warmup: number of present bars before the value is meaningful; it is 0 until then.
      column: `(bars) -> [N, A]` float64, of all bars at once what `update` else asks Python for at
        each; it then takes that value as a third argument. None for a feature in jax alone.
      memory: number of present bars on which the value depends; 0 where it is not stated.
      known: `(state, bar) -> []` bool, whether the value is meaningful, `state` being that after
        the bar. Features that compare assets need it.
    """

    init: Callable[[], Any]
    update: Callable[..., tuple[Any, Array]]
    warmup: int
    column: Callable[[Bars], np.ndarray] | None = None
    memory: int = 0
    known: Callable[[Any, Bar], Any] | None = None


def make_feature(
    init: Callable[[], Any],
    update: Callable[..., tuple[Any, Array]],
    warmup: int,
    counts: Callable[[Bar], Tensor] = lambda bar: bar.present,
    column: Callable[[Bars], np.ndarray] | None = None,
    span: float = 0.0,
) -> Feature:
    """Make a feature from an update that need not handle missing bars and the warm-up.

    Args:
      init: `() -> state`.
      update: `(state, bar, count) -> state, value`, called for counted bars; `count` is their
        number before this one. At the first bar (0) the state is the one from `init`.
      warmup: counted bars before the value is meaningful.
      counts: whether a bar counts.
      column: see `Feature`; `update` takes its value of the bar as a fourth argument.
      span: the longest of its averages. Beyond the warm-up the feature remembers the bars that
        weigh more than float32's rounding in it.
    """

    def guarded(state: Any, bar: Bar, *given: Array) -> tuple[Any, Array]:
        count, inner = state
        seen = counts(bar)
        # A scan has no branches: the update runs for every bar, and its result is masked.
        new, value = update(inner, bar, count, *given)
        new = keep_unless(seen, inner, new)
        value = jnp.where(seen & (count >= warmup), value, 0.0)
        return (count + seen, new), value

    def known(state: Any, bar: Bar) -> Any:
        return counts(bar) & (state[0] > warmup)

    memory = warmup + 1 + (bars_to_forget(span, 2.0**-24) if span else 0)
    return Feature(lambda: (np.zeros((), np.int64), init()), guarded, warmup, column, memory, known)


DAY = 86_400  # seconds
YEAR = 365.2425 * DAY  # seconds, the mean Gregorian year
LEVEL_SPAN = 4096  # bars: span of the average that a level is measured from


def log_return(horizon: int) -> Feature:
    """log(close_t / close_{t-h}) / (sigma_{t-1} sqrt(h)), h = `horizon` bars."""

    def update(past, bar, count):
        r = jnp.log(bar.close / past.window[0])
        past, sigma = advance(past, bar, count)
        return past, ratio(r, sigma * np.sqrt(horizon))

    return make_feature(lambda: empty_closes(horizon), update, max(SPAN, horizon), span=SPAN)


def volatility_ratio(fast: int = 10, slow: int = SPAN) -> Feature:
    """log(sigma_fast / sigma_slow), both up to t, with spans `fast` and `slow`."""

    def update(state, bar, count):
        close, *averages = state
        r = jnp.log(bar.close / close)
        added = [add(a, r * r, span) for a, span in zip(averages, (fast, slow), strict=True)]
        averages = keep_unless(count > 0, averages, added)
        short, long = (a.mean for a in averages)
        moved = (short > LEAST**2) & (long > LEAST**2)
        squared = jnp.where(moved, short, 1.0) / jnp.where(moved, long, 1.0)
        return (bar.close, *averages), 0.5 * jnp.log(squared)

    def init():
        return np.ones(()), empty_average(), empty_average()

    return make_feature(init, update, warmup=slow, span=slow)


def cost_in_vol() -> Feature:
    """log(100 (1e-4 + half_spread_t) / sigma_{t-1}): a trade's cost in percent of volatility.

    `half_spread` is what the bars quote, and 0 without a quote. 1e-4 stands for commission and
    slippage, which are the same for all assets and are not in the bars. Without quotes the feature
    says only how volatile an asset is.
    """

    def update(past, bar, count):
        past, sigma = advance(past, bar, count)
        quoted = 0.0 if bar.half_spread is None else jnp.nan_to_num(bar.half_spread)
        moved = sigma > LEAST
        part = (1e-4 + quoted) / jnp.where(moved, sigma, 1.0)
        return past, jnp.where(moved, jnp.log(100.0 * part), 0.0)

    return make_feature(lambda: empty_closes(1), update, warmup=SPAN, span=SPAN)


def rsi(period: int = 14) -> Feature:
    """Wilder's RSI / 50 - 1 = (G - L) / (G + L), in [-1, 1]; 0 where the price did not move.

    G, L: Wilder averages of max(d, 0) and max(-d, 0), d = close_t - close_{t-1}.
    """

    def update(state, bar, count):
        close, gain, loss = state
        # The first bar has no close before it.
        d = jnp.where(count > 0, bar.close - close, 0.0)
        n = jnp.maximum(count, 1)
        gain = wilder(gain, jnp.maximum(d, 0.0), n, period)
        loss = wilder(loss, jnp.maximum(-d, 0.0), n, period)
        # LEAST would depend on the price's unit here; any positive sum is a scale.
        return (bar.close, gain, loss), ratio(gain - loss, gain + loss, least=0.0)

    # Wilder's average is one of span 2 n - 1.
    first = np.ones(()), np.zeros(()), np.zeros(())
    return make_feature(lambda: first, update, warmup=period, span=2 * period - 1)


def macd(fast: int = 12, slow: int = 26) -> Feature:
    """MACD line over price and past volatility: (EMA_fast - EMA_slow) / (close_t sigma_{t-1}).

    Source: Appel, Technical Analysis (2005); EMAs of span 12 and 26, bias-corrected at the start.
    """

    def update(state, bar, count):
        past, *averages = state
        past, sigma = advance(past, bar, count)
        averages = [add(a, bar.close, s) for a, s in zip(averages, (fast, slow), strict=True)]
        line = averages[0].mean - averages[1].mean
        return (past, *averages), ratio(line / bar.close, sigma)

    def init():
        return empty_closes(1), empty_average(), empty_average()

    return make_feature(init, update, warmup=SPAN, span=max(SPAN, slow))


def trend(fast: int, slow: int, spans: tuple[int, int] = (63, 252)) -> Feature:
    """y_t / deviation(y)_{t-1}, where y = (EMA_fast - EMA_slow) / deviation(close), both up to t.

    The EMAs give the newest bar a weight of 1 / `fast` and 1 / `slow`. Deviations are EW, of
    `spans`. Source: Baz et al., Dissecting Investment Strategies in the Cross Section and Time
    Series (2015). There both deviations are of rolling windows of 63 and 252 bars, the second up to
    t. Their response function, which weakens extreme trends, is left to the policy.
    """

    def update(state, bar, count):
        *averages, price, past = state
        # A span of 2 n - 1 has the weight 1 / n.
        pairs = zip(averages, (fast, slow), strict=True)
        averages = [add(a, bar.close, 2 * n - 1) for a, n in pairs]
        price = add(price, bar.close, spans[0])
        line = averages[0].mean - averages[1].mean
        # Over the close, so that the test for "did not move" has no unit.
        y = ratio(line / bar.close, jnp.sqrt(price.variance) / bar.close)
        # The deviation of few prices is too small; quotients by it would stay in the average.
        grown = keep_unless(count >= spans[0], past, add(past, y, spans[1]))
        return (*averages, price, grown), ratio(y, jnp.sqrt(past.variance))

    # An average of what averages made of a price remembers what both do.
    span = spans[1] + max(spans[0], 2 * slow - 1)
    return make_feature(lambda: (empty_average(),) * 4, update, warmup=spans[1], span=span)


def atr(period: int = 14) -> Feature:
    """Wilder's ATR / close, z-scored by its own EW mean and deviation up to t-1.

    True range: max(high, close_{t-1}) - min(low, close_{t-1}).
    """

    def update(state, bar, count):
        close, atr, past = state
        # The first true range is the bar's own.
        close = jnp.where(count > 0, close, bar.close)
        true_range = jnp.maximum(bar.high, close) - jnp.minimum(bar.low, close)
        atr = wilder(atr, true_range, count + 1, period)
        x = atr / bar.close
        grown = keep_unless(count >= period, past, add(past, x))
        return (bar.close, atr, grown), z_score(past, x)

    def init():
        return np.ones(()), np.zeros(()), empty_average()

    return make_feature(init, update, warmup=period + SPAN, span=SPAN + 2 * period)


def bollinger(window: int = 20) -> Feature:
    """(close_t - mean) / (2 deviations) over the last `window` closes, t included.

    1 is the upper band, -1 the lower. Source: Bollinger, Bollinger on Bollinger Bands (2001).
    """

    def update(closes, bar, count):
        closes = shift(closes, bar.close)
        u = closes / bar.close  # relative, so that the test for "did not move" has no unit
        mean = jnp.mean(u)
        return closes, ratio(1.0 - mean, 2.0 * jnp.sqrt(jnp.mean((u - mean) ** 2)))

    return make_feature(lambda: np.ones(window), update, warmup=window - 1)


def has_volume(bar: Bar) -> Tensor:
    """Return whether a bar has a volume."""
    return bar.present & (bar.volume > 0)  # False for NaN


def level(
    value: Callable[[Bar], Tensor], counts: Callable[[Bar], Tensor], span: int = LEVEL_SPAN
) -> Feature:
    """log(x_t), z-scored by the EW mean and deviation of its counted values up to t-1.

    Of LEVEL_SPAN it is for what returns to a level of its own: a spread, a rate, turnover. Most
    prices do not. Over all of a price's past a path has one or two excursions, which an agent would
    memorise; the span prevents that.
    """

    def update(past, bar, count):
        x = jnp.log(jnp.where(counts(bar), value(bar), 1.0))
        return add(past, x, span), z_score(past, x)

    return make_feature(empty_average, update, warmup=SPAN, counts=counts, span=span)


def return_level(span: int = LEVEL_SPAN) -> Feature:
    """log(close_t / close_{t-1}), z-scored by its EW mean and deviation up to t-1.

    The span is long, so its size shows a volatility that moves. `return_1` divides by a recent one.
    """

    def update(state, bar, count):
        close, past = state
        r = jnp.log(bar.close / close)
        added = keep_unless(count > 0, past, add(past, r, span))
        return (bar.close, added), z_score(past, r)

    return make_feature(lambda: (np.ones(()), empty_average()), update, warmup=SPAN, span=span)


def bar_range() -> Feature:
    """x_t over the EW mean of x up to t-1, less 1; x = (high - low) / close."""

    def update(past, bar, count):
        x = (bar.high - bar.low) / bar.close
        return add(past, x), ratio(x - past.mean, past.mean)

    return make_feature(empty_average, update, warmup=SPAN, span=SPAN)


def drawdown(window: int = SPAN) -> Feature:
    """log(close_t / highest close of the last `window` bars) / (sigma_{t-1} sqrt(window)), <= 0.

    The high is rolling, as a running one would show a peak of years ago.
    """

    def update(past, bar, count):
        past, sigma = advance(past, bar, count)
        depth = jnp.log(bar.close / jnp.max(past.window))
        return past, ratio(depth, sigma * np.sqrt(window))

    return make_feature(lambda: empty_closes(window), update, warmup=window, span=SPAN)


def calendar_wave(phase: Callable[[Array], Array], wave: Callable[[Array], Array]) -> Feature:
    """wave(2 pi phase) of the bar's open in UTC; `phase` maps seconds since 1970 to [0, 1)."""

    def update(state, bar, count):
        return state, wave(2.0 * np.pi * phase(bar.time))

    return make_feature(lambda: (), update, warmup=0)


def refuse_absent(features: Iterable[str], columns: Iterable[str], where: str) -> None:
    """Refuse features of columns of your own that bars lack.

    Args:
      features: their names; others are left alone.
      columns: names of those that there are.
      where: whose bars, for the message.

    Raises:
      ConfigError: in one line, the first column and those that there are.
    """
    there = tuple(columns)
    for feature in features:
        _, found, rest = feature.partition(COLUMN)
        name = rest.partition(":")[0]
        if found and name not in there:
            known = f"there are {', '.join(there)}" if there else "there are none"
            raise ConfigError(
                f"feature {feature}: {where} no column {name!r}; {known}. Give it by "
                f"{argument('extra')}."
            )


def column(text: str) -> Feature | None:
    """Return the feature of a column of your own; None where a name is not one's.

    "column:NAME" is z-scored by the mean and the deviation of its past values, with the weights of
    LEVEL_SPAN. "column:NAME:raw" is the number. Both are 0 before the first value.
    """
    if not text.startswith(COLUMN):
        return None
    name, colon, how = text.removeprefix(COLUMN).partition(":")
    if colon and how != "raw":
        raise ConfigError(f"feature {text}: give {COLUMN}{name} or {COLUMN}{name}:raw.")

    def value(bar: Bar) -> Tensor:
        refuse_absent((text,), bar.columns or (), "the bars have")
        return (bar.columns or {})[name]

    def known(bar: Bar) -> Tensor:
        return bar.present & jnp.isfinite(value(bar))

    def raw(state: tuple[()], bar: Bar, count: Array) -> tuple[tuple[()], Array]:
        return state, jnp.asarray(value(bar))

    def scored(past: Average, bar: Bar, count: Array) -> tuple[Average, Array]:
        x = jnp.where(known(bar), value(bar), 0.0)
        return add(past, x, LEVEL_SPAN), z_score(past, x)

    if how:
        return make_feature(lambda: (), raw, warmup=0, counts=known)
    return make_feature(empty_average, scored, warmup=SPAN, counts=known, span=LEVEL_SPAN)


PHASES: dict[str, Callable[[Array], Array]] = {
    # 1970-01-01 was a Thursday; Monday has phase 0.
    "day_of_week": lambda time: (time // DAY + 3) % 7 / 7.0,
    # 1 January has phase 0, give or take a day or two.
    "day_of_year": lambda time: (time % YEAR) / YEAR,
    "time_of_day": lambda time: (time % DAY) / float(DAY),
}
BUILT_IN: dict[str, Feature] = {
    **{f"return_{h}": log_return(h) for h in (1, 5, 20, 21, 60, 63, 126, 252)},
    "volatility_ratio": volatility_ratio(),
    "volatility_ratio_252": volatility_ratio(21, 252),
    "cost_in_vol": cost_in_vol(),
    "rsi": rsi(),
    "macd": macd(),
    **{f"trend_{n}_{3 * n}": trend(n, 3 * n) for n in (8, 16, 32)},
    "atr": atr(),
    "bollinger": bollinger(),
    "volume": level(lambda bar: bar.volume, has_volume, span=SPAN),
    "price_level": level(lambda bar: bar.close, lambda bar: bar.present),
    "volume_level": level(lambda bar: bar.volume, has_volume),
    "return_level": return_level(),
    "range": bar_range(),
    "drawdown": drawdown(),
    **{
        f"{name}_{wave.__name__}": calendar_wave(phase, wave)
        for name, phase in PHASES.items()
        for wave in (jnp.sin, jnp.cos)
    },
}


def own_feature(value: Any, name: str) -> Feature:
    """Return the feature that your own code gives, once it has the shapes and types of one.

    Args:
      value: a `Feature`, or a function without arguments that returns one.
      name: of it, for messages.

    Raises:
      ConfigError: it isn't one, or its update cannot be scanned.
    """
    if callable(value) and not isinstance(value, Feature):
        with own_code(name):
            value = value()
    if not isinstance(value, Feature):
        raise ConfigError(
            f"{name}: is {describe(value)}; give a Feature, e.g. of make_feature, or a function "
            "that returns one."
        )
    # With quotes and dividends: a feature may need them, and `update` says so where they lack.
    types = dict.fromkeys(Bar._fields, np.float64) | {"time": np.int64, "present": bool}
    fields: Any = {field: jax.ShapeDtypeStruct((), kind) for field, kind in types.items()}
    # It may read columns of any name, which its bars have.
    fields["columns"] = collections.defaultdict(lambda: np.zeros(()))
    bar = Bar(**fields)
    with float64_on_cpu(), own_code(name):
        state = value.init()
        after, given = jax.eval_shape(value.update, state, bar)
        same = jax.tree.structure(state) == jax.tree.structure(after)
        pairs = zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=False)
        if not same or any(np.shape(x) != y.shape or x.dtype != y.dtype for x, y in pairs):
            raise ConfigError(
                f"{name}: a bar changes the structure, a shape or a type of its state; return the "
                "state as `init` gives it."
            )
    if given.shape != () or given.dtype != np.float64:
        raise ConfigError(
            f"{name}: its value is {given.dtype}{given.shape}; return one float64 number per bar."
        )
    return value


FEATURES: Registry[Feature] = Registry("features", BUILT_IN, own_feature, column)


def refuse_unknown(names: tuple[str, ...]) -> None:
    """Refuse names that are unknown or listed twice.

    Raises:
      ConfigError: in one line, the first.
    """
    for name in names:
        (how, rest), (frame, bare) = split_comparison(name), split_frame(name)
        if inner := split_comparison(bare)[0]:
            say = "a comparison is of a feature alone" if how else f"{inner!r} comes first"
            right = f"{inner}:{frame}{':' * bool(frame)}{split_frame(bare)[1]}"
            raise ConfigError(f"feature {name!r}: {say}; give {right!r}.")
        if FEATURES[bare].known is None and how:  # an unknown one is refused
            raise ConfigError(
                f"feature {name!r}: {rest!r} does not say from which bar on its value is known; "
                "make it with make_feature."
            )
        if frame and bare.startswith(COLUMN):
            say = f"feature {name!r}: a column has no time frame of its own; give {bare!r}."
            raise ConfigError(say)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"feature {twice!r} is listed twice; list it once.")
