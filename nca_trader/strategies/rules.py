"""Rule-based strategies, the baselines that agents are compared with.

A rule is a function of its parameters that returns a `Strategy`. Weights are shares of equity. Each
asset that has had a bar by then has an equal share, unless a rule says otherwise: which assets the
file lists later, and in which order its columns are, changes nothing. A missing bar changes
nothing, and a rule holds no position until it has seen enough bars. Parameters may be traced jax
numbers, so that a sweep runs a grid of them as one program.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from nca_trader.config.ranges import refuse, whole
from nca_trader.data.feature_sets import signed_ranks
from nca_trader.errors import ConfigError
from nca_trader.strategies import rolling
from nca_trader.strategies.rolling import Rolling
from nca_trader.strategies.strategy import Strategy, longest_memory
from nca_trader.types import Bar, Bars


def always_flat() -> Strategy:
    """Return the strategy that holds cash.

    Example:
      >>> always_flat().name
      'always flat'
    """
    return Strategy(
        lambda num_assets: (),
        lambda s, bar: (s, jnp.zeros_like(bar.close)),
        "always flat",
        memory=1,
    )


def buy_and_hold() -> Strategy:
    """Return the strategy that buys equal shares of the assets, and holds them.

    At an asset's first bar equity is divided again among the assets listed by then. Where positions
    are sized by volatility it buys when an asset first has a size, and at that one.

    Example:
      >>> buy_and_hold().name
      'buy and hold'
    """

    def act(listed: Array, bar: Bar) -> tuple[Array, Array]:
        more = (bar.present & ~listed).any()
        listed, shares = _divide(listed, bar)
        # NaN places no order: the position is left to drift with the market.
        return listed, jnp.where(more & listed, shares, jnp.nan)

    return Strategy(lambda num_assets: _none(num_assets), act, "buy and hold", memory=0)


def equal_weight() -> Strategy:
    """Return the strategy that holds equal shares of the assets listed so far, rebalanced.

    Example:
      >>> equal_weight().order
      'rebalance'
    """

    def act(listed: Array, bar: Bar) -> tuple[Array, Array]:
        return _divide(listed, bar)

    def init(num_assets: int) -> Array:
        return _none(num_assets)

    return Strategy(init, act, "equal weight", "rebalance", memory=1)


def volatility_hold(annual: Any = 0.15, span: float = 60.0, cap: float = 1.0) -> Strategy:
    """Return the strategy that holds each asset at a constant volatility per year.

    Args:
      annual: volatility of an asset held in full, e.g. 0.15; each has its share of it.
      span: of the estimate, in bars; see `Strategy.with_volatility`.
      cap: the largest factor.

    Example:
      >>> volatility_hold(0.1).name
      'hold, volatility 0.1'
    """
    hold = Strategy(
        lambda num_assets: _none(num_assets), lambda s, bar: _divide(s, bar), "hold", memory=1
    )
    return hold.with_volatility(annual, span, cap)


def half_and_half(lookback: Any = 252) -> Strategy:
    """Return the mean of `equal_weight` and `time_series_momentum`: half held, half trend.

    Both halves are divided by the assets listed so far.

    Args:
      lookback: bars of the trend.

    Raises:
      ConfigError: `lookback` is below 1.

    Example:
      >>> half_and_half(lookback=252).name
      'half equal weight, half time-series momentum 252'
    """
    hold, trend = equal_weight(), time_series_momentum(lookback)

    def init(num_assets: int) -> Any:
        return hold.init(num_assets), trend.init(num_assets)

    def act(state: Any, bar: Bar) -> tuple[Any, Array]:
        held, target = hold.act(state[0], bar)
        followed, other = trend.act(state[1], bar)
        return (held, followed), 0.5 * (target + other)

    return Strategy(init, act, f"half {hold.name}, half {trend.name}", memory=trend.memory)


def sma_cross(fast: Any = 10, slow: Any = 30) -> Strategy:
    """Return the moving-average cross: long an asset's share while the fast mean is the higher.

    Args:
      fast: closes of the fast mean.
      slow: closes of the slow mean, more than `fast`.

    Raises:
      ConfigError: a period below 1, or `fast` is not below `slow`.

    Example:
      >>> sma_cross(fast=10, slow=30).name
      'SMA cross 10/30'
    """
    _refuse_periods("sma_cross", fast=fast, slow=slow)
    if not (rolling.is_traced(fast) or rolling.is_traced(slow)) and not fast < slow:
        raise ConfigError(
            f"sma_cross: fast = {fast} is not below slow = {slow}; lower fast or raise slow."
        )
    periods = {f"fast SMA {_text(fast)}": fast, f"slow SMA {_text(slow)}": slow}
    indicators = {shown: rolling.mean(period) for shown, period in periods.items()}
    name = f"SMA cross {_text(fast)}/{_text(slow)}"
    return _of_closes(name, indicators, lambda bar, quick, steady: _long(quick > steady))


def tuned_sma(
    pairs: Sequence[tuple[int, int]] = ((5, 20), (10, 50), (20, 100), (50, 200)),
    every: int = 252,
    cost: float = 5e-4,
) -> Strategy:
    """Return an SMA cross whose periods are chosen at intervals, by their returns so far.

    Each asset follows the pair that has earned most so far, net of `cost`, chosen at every `every`
    bars. It is a walk-forward over an expanding history: a choice uses earlier bars only.

    Args:
      pairs: `(fast, slow)` closes.
      every: bars from one choice to the next; until the first the asset is not held.
      cost: of trading, as a fraction of the traded notional, that scores pay.

    Raises:
      ConfigError: no pairs, or periods as `sma_cross` refuses.

    Example:
      >>> tuned_sma(every=252).name
      'tuned SMA, 4 pairs, every 252'
    """
    if not pairs:
        raise ConfigError("tuned_sma: no pairs; give at least one, e.g. ((10, 50), (50, 200)).")
    _refuse_periods("tuned_sma", every=every)
    crosses = [sma_cross(fast, slow) for fast, slow in pairs]

    def init(num_assets: int) -> Any:
        none = jnp.zeros((len(pairs), num_assets))
        states = [cross.init(num_assets) for cross in crosses]
        count = jnp.zeros(num_assets, jnp.int32)
        # -1 stands for no choice yet.
        close = jnp.full(num_assets, jnp.nan)
        return states, none, none, close, count - 1, count, _none(num_assets)

    def act(state: Any, bar: Bar) -> tuple[Any, Array]:
        states, held, scores, close, chosen, seen, listed = state
        found = [cross.act(s, bar) for cross, s in zip(crosses, states, strict=True)]
        # Scores are of one asset's own equity, so they do not depend on the number of assets.
        new = jnp.where(jnp.stack([target for _, target in found]) > 0.0, 1.0, 0.0)
        known = bar.present & ~jnp.isnan(close)
        return_ = jnp.where(known, bar.close / close - 1.0, 0.0)
        paid = cost * jnp.where(known[None], jnp.abs(new - held), 0.0)
        scores = scores + jnp.log1p(held * return_[None] - paid)
        seen = seen + bar.present
        # Counted in the asset's own bars: an asset that is listed late gets its first choice later.
        due = bar.present & (seen % every == 0)
        best = jnp.argmax(scores, axis=0).astype(chosen.dtype)
        chosen = jnp.where(due, best, chosen)
        # A gather needs an index where nothing is chosen yet; the next line drops what it finds.
        followed = jnp.take_along_axis(new, jnp.maximum(chosen, 0)[None], axis=0)[0]
        listed, share = _divide(listed, bar)
        target = jnp.where(chosen < 0, 0.0, followed * share)
        close = jnp.where(bar.present, bar.close, close)
        return ([s for s, _ in found], new, scores, close, chosen, seen, listed), target

    return Strategy(init, act, f"tuned SMA, {len(pairs)} pairs, every {every}")


def momentum(lookback: Any = 50) -> Strategy:
    """Return momentum: long an asset's share while the close is above that of `lookback` bars ago.

    Args:
      lookback: bars.

    Raises:
      ConfigError: `lookback` is below 1.

    Example:
      >>> momentum(lookback=50).name
      'momentum 50'
    """
    _refuse_periods("momentum", lookback=lookback)
    past = {f"close {_text(lookback)} bars before": rolling.past(lookback)}
    name = f"momentum {_text(lookback)}"
    return _of_closes(name, past, lambda bar, before: _long(bar.close > before))


def time_series_momentum(lookback: Any = 252) -> Strategy:
    """Return trend following: long after a rise over `lookback` bars, short after a fall.

    Source: Moskowitz, Ooi and Pedersen, Time series momentum (2012). Scale it as they do with
    `.with_volatility(0.4)`.

    Args:
      lookback: bars.

    Raises:
      ConfigError: `lookback` is below 1.

    Example:
      >>> time_series_momentum(252).name
      'time-series momentum 252'
    """
    _refuse_periods("time_series_momentum", lookback=lookback)
    past = {f"close {_text(lookback)} bars before": rolling.past(lookback)}
    name = f"time-series momentum {_text(lookback)}"
    return _of_closes(name, past, lambda bar, before: jnp.sign(bar.close - before))


def cross_sectional_momentum(
    lookback: Any = 252, share: Any = None, weights: str = "top"
) -> Strategy:
    """Return the strategy that compares the assets' returns: it holds the best, or all by rank.

    With `sizing="volatility"` in the account, or `with_volatility`, each weight is that of an asset
    of one volatility.

    Source: Jegadeesh and Titman, Returns to buying winners and selling losers (1993); of ranks,
    Asness, Moskowitz and Pedersen, Value and momentum everywhere (2013).

    Args:
      lookback: bars over which returns are compared. An asset that misses as many bars in a row is
        compared again at its next one.
      share: of the assets with such a return, above 0 and at most 1, rounded down; at least one is
        held. Assets of equal returns that do not all fit divide what is left. None is 1/3.
      weights: "top" holds the best `share` of the assets in equal weights. "ranks" holds all with
        such a return, long or short in proportion to their signed rank, see `signed_ranks`; the
        sizes sum to 1. One asset alone has the rank 0.

    Raises:
      ConfigError: `lookback` is below 1, `share` is out of range or has no effect, other `weights`,
        or "top" with bars of one asset.

    Example:
      >>> cross_sectional_momentum(252).name
      'cross-sectional momentum 252'
      >>> cross_sectional_momentum(252, weights="ranks").name
      'cross-sectional momentum 252, ranks'
    """
    _refuse_periods("cross_sectional_momentum", lookback=lookback)
    if weights not in ("top", "ranks"):
        raise ConfigError(
            f"cross_sectional_momentum: weights = {weights!r}; give 'top' or 'ranks'."
        )
    if weights == "ranks" and share is not None:
        raise ConfigError(
            "cross_sectional_momentum: share has no effect with weights = 'ranks'; leave it out."
        )
    share = 1 / 3 if share is None else share
    number = not isinstance(share, bool | str)
    if not rolling.is_traced(share) and not (number and 0.0 < share <= 1.0):
        raise ConfigError(f"cross_sectional_momentum: share = {share}; give above 0 and up to 1.")
    past = rolling.past(lookback)

    def init(num_assets: int) -> Any:
        if num_assets < 2 and weights == "top":
            raise ConfigError("cross_sectional_momentum compares assets; give bars of several.")
        return past.init(num_assets), jnp.zeros(num_assets, jnp.int32)

    def choose(state: Any, bar: Bar) -> tuple[Any, Array]:
        closes, missing = state
        closes, before = past.update(closes, bar.close, bar.present)
        missing = jnp.where(bar.present, 0, missing + 1)
        state = closes, missing
        gone = jnp.isnan(before) | (missing >= lookback)
        return_ = jnp.where(gone, -jnp.inf, bar.close / before - 1.0)
        known = jnp.isfinite(return_)
        if weights == "ranks":
            rank = signed_ranks(jnp.where(known, return_, 0.0), known)
            # Whole numbers, so that no order of the assets changes a bit.
            return state, rank / jnp.maximum(jnp.abs(rank).sum(), 1)
        # By pairs: how many are held depends on the bar, and `top_k` needs a fixed number.
        higher = (return_[None, :] > return_[:, None]).sum(1)
        same = (return_[None, :] == return_[:, None]).sum(1)
        # 0.29 * 100 is less than 29 by rounding.
        most = jnp.maximum(jnp.floor(share * known.sum() * (1.0 + 1e-6)), 1.0)
        part = jnp.clip((most - higher) / same, 0.0, 1.0)
        return state, jnp.where(known, part / most, 0.0)

    name = f"cross-sectional momentum {_text(lookback)}{', ranks' * (weights == 'ranks')}"
    return Strategy(init, choose, name, memory=past.memory)


def mean_reversion(lookback: Any = 20, entry: Any = 1.0, leave: Any = 0.0) -> Strategy:
    """Return the strategy that trades against large deviations from a rolling mean.

    It is long below `mean - entry * deviation` and short above `mean + entry * deviation`, until
    the close comes back to within `leave` deviations.

    Args:
      lookback: closes of the mean and of the standard deviation, at least 2.
      entry: deviations, above `leave`.
      leave: deviations.

    Raises:
      ConfigError: `lookback` is below 2, or `leave` is not below `entry`.

    Example:
      >>> mean_reversion(20, entry=2.0).name
      'mean reversion 20, entry 2'
    """
    _refuse_periods("mean_reversion", least=2, lookback=lookback)
    if not (rolling.is_traced(entry) or rolling.is_traced(leave)) and not leave < entry:
        raise ConfigError(f"mean_reversion: leave = {leave} is not below entry = {entry}.")
    mean, deviation = rolling.mean(lookback), rolling.deviation(lookback)

    def init(num_assets: int) -> Any:
        width = deviation.init(num_assets)
        return mean.init(num_assets), width, jnp.zeros(num_assets), _none(num_assets)

    def act(state: Any, bar: Bar) -> tuple[Any, Array]:
        means, deviations, side, listed = state
        means, middle = mean.update(means, bar.close, bar.present)
        deviations, width = deviation.update(deviations, bar.close, bar.present)
        away = bar.close - middle
        # Comparisons with NaN are false: without enough closes the side stays 0.
        back = side * away >= -leave * width
        side = jnp.where(back, 0.0, side)
        side = jnp.where(away < -entry * width, 1.0, jnp.where(away > entry * width, -1.0, side))
        listed, share = _divide(listed, bar)
        return (means, deviations, side, listed), side * share

    def shown(bars: Bars) -> dict[str, Any]:
        found = rolling.over({"mean": mean, "width": deviation}, bars.close, bars.present)
        width = entry * found.pop("width")
        return found | {"short above": found["mean"] + width, "long below": found["mean"] - width}

    name = f"mean reversion {_text(lookback)}, entry {_text(entry)}"
    return Strategy(init, act, name, indicators=shown)


def breakout(lookback: Any = 55, leave: Any = 20, stop: Any = 0.1) -> Strategy:
    """Return the channel breakout: long above the highest high, out below the lowest low.

    Args:
      lookback: earlier bars whose highest high the close must exceed.
      leave: earlier bars whose lowest low closes the position.
      stop: fraction that a position may lose from its best price; None for no stop.

    Raises:
      ConfigError: a period below 1, or a stop that is not a fraction.

    Example:
      >>> breakout(55, 20).name
      'breakout 55/20, trailing stop 0.1'
    """
    _refuse_periods("breakout", lookback=lookback, leave=leave)
    highest, lowest = rolling.highest(lookback), rolling.lowest(leave)

    def init(num_assets: int) -> Any:
        none, side = jnp.full(num_assets, jnp.nan), jnp.zeros(num_assets)
        channel = highest.init(num_assets), lowest.init(num_assets)
        return *channel, none, none, side, _none(num_assets)

    def act(state: Any, bar: Bar) -> tuple[Any, Array]:
        highs, lows, ceiling, ground, side, listed = state
        # The channel of the bars before: a close cannot exceed its own bar's high.
        above, below = bar.close > ceiling, bar.close < ground
        side = jnp.where(bar.present & above, 1.0, jnp.where(bar.present & below, 0.0, side))
        highs, ceiling = highest.update(highs, bar.high, bar.present)
        lows, ground = lowest.update(lows, bar.low, bar.present)
        listed, share = _divide(listed, bar)
        return (highs, lows, ceiling, ground, side, listed), side * share

    def shown(bars: Bars) -> dict[str, Any]:
        # The channel of the bars before, which is what a close is compared with.
        ceiling = rolling.over({f"high of {_text(lookback)}": highest}, bars.high, bars.present)
        ground = rolling.over({f"low of {_text(leave)}": lowest}, bars.low, bars.present)
        none = np.full((1, bars.num_assets), np.nan)
        return {name: np.vstack([none, x[:-1]]) for name, x in (ceiling | ground).items()}

    name = f"breakout {_text(lookback)}/{_text(leave)}"
    found = Strategy(init, act, name, indicators=shown)
    return found if stop is None else found.with_trailing_stop(stop)


def random(seed: Any = 0, hold: Any = 10) -> Strategy:
    """Return the strategy that tosses a coin per asset: long or flat for `hold` bars.

    A toss follows from the seed, its number and the asset's close, so that neither other assets nor
    a restart changes it.

    Args:
      seed: of the tosses.
      hold: bars from toss to toss.

    Raises:
      ConfigError: `hold` is below 1.

    Example:
      >>> random(seed=3).name
      'random 3'
    """
    _refuse_periods("random", hold=hold)

    def init(num_assets: int) -> Any:
        last = jnp.full(num_assets, -1)
        return jnp.zeros((), jnp.int32), last, jnp.zeros(num_assets), _none(num_assets)

    def act(state: Any, bar: Bar) -> tuple[Any, Array]:
        row, last, side, listed = state
        number = row // hold
        key = jax.random.fold_in(jax.random.key(seed), number)
        # The bits of float32, since a sweep may run in it.
        bits = jax.lax.bitcast_convert_type(bar.close.astype(jnp.float32), jnp.uint32)
        coin = jax.vmap(lambda own: jax.random.bernoulli(jax.random.fold_in(key, own)))(bits)
        due = bar.present & (last < number)
        last = jnp.where(due, number, last).astype(last.dtype)
        side = jnp.where(due, coin, side)
        listed, share = _divide(listed, bar)
        return (row + 1, last, side, listed), side * share

    return Strategy(init, act, f"random {_text(seed)}")


def forecaster(lags: int = 5, threshold: Any = 0.0, span: Any = 2000) -> Strategy:
    """Return a supervised forecast with a threshold: a regression on past returns, refit each bar.

    The next return of an asset is predicted from its last `lags` returns by recursive least squares
    with exponential forgetting (Haykin, Adaptive Filter Theory, table 10.1). The asset is held long
    where the forecast is above `threshold`, short where it is below `-threshold`.

    Args:
      lags: returns that the forecast sees.
      threshold: a return per bar, e.g. the cost of a trade.
      span: bars, `2 / (span + 1)` the weight of the newest.

    Raises:
      ConfigError: `lags` or `span` is below 1.

    Example:
      >>> forecaster(lags=5, threshold=1e-4).name
      'forecaster 5, threshold 0.0001'
    """
    _refuse_periods("forecaster", lags=lags, span=span)
    size = lags + 1
    forget = 1.0 - 2.0 / (span + 1.0)
    unit = 100.0  # percent: the prior of coefficients of variance 1 is then a weak one

    def init(num_assets: int) -> Any:
        # The first input is always 1; its coefficient is the mean return.
        inputs = jnp.zeros((num_assets, size)).at[:, 0].set(1.0)
        inverse = jnp.broadcast_to(jnp.eye(size), (num_assets, size, size))
        close, seen = jnp.full(num_assets, jnp.nan), jnp.zeros(num_assets, jnp.int32)
        weights = jnp.zeros((num_assets, size))
        return inputs, weights, inverse, close, seen, _none(num_assets)

    def learn(x: Array, weights: Array, inverse: Array, return_: Array) -> tuple[Array, Array]:
        gain = inverse @ x / (forget + x @ inverse @ x)
        inverse = (inverse - jnp.outer(gain, x @ inverse)) / forget
        # Rounding makes it lose its symmetry, and then its stability.
        return weights + gain * (return_ - weights @ x), (inverse + inverse.T) / 2.0

    def act(state: Any, bar: Bar) -> tuple[Any, Array]:
        inputs, weights, inverse, close, seen, listed = state
        return_ = unit * (bar.close / close - 1.0)
        known = bar.present & ~jnp.isnan(return_)
        return_ = jnp.where(known, return_, 0.0)
        # The inputs are those of the close before, so they do not contain this return.
        learnt = jax.vmap(learn)(inputs, weights, inverse, return_)
        shifted = jnp.concatenate([inputs[:, :1], return_[:, None], inputs[:, 1:-1]], axis=1)
        ready = known & (seen >= lags)
        weights = jnp.where(ready[:, None], learnt[0], weights)
        inverse = jnp.where(ready[:, None, None], learnt[1], inverse)
        inputs = jnp.where(known[:, None], shifted, inputs)
        seen = seen + known
        forecast = (weights * inputs).sum(1) / unit
        side = jnp.sign(forecast) * (jnp.abs(forecast) > threshold)
        close = jnp.where(bar.present, bar.close, close)
        # With fewer than ten returns per coefficient a forecast is noise.
        listed, share = _divide(listed, bar)
        target = jnp.where(seen >= 10 * size, side * share, 0.0)
        return (inputs, weights, inverse, close, seen, listed), target

    return Strategy(init, act, f"forecaster {lags}, threshold {_text(threshold)}")


def _of_closes(
    name: str, indicators: Mapping[str, Rolling], signal: Callable[..., Array]
) -> Strategy:
    """Return the strategy `signal(bar, *values)` times an asset's share; flat before its values."""

    def init(num_assets: int) -> Any:
        states = tuple(indicator.init(num_assets) for indicator in indicators.values())
        return states, _none(num_assets)

    def act(state: Any, bar: Bar) -> tuple[Any, Array]:
        states, listed = state
        found = [
            indicator.update(s, bar.close, bar.present)
            for indicator, s in zip(indicators.values(), states, strict=True)
        ]
        values = [value for _, value in found]
        ready = ~jnp.isnan(sum(values))
        listed, share = _divide(listed, bar)
        target = jnp.where(ready, signal(bar, *values) * share, 0.0)
        return (tuple(s for s, _ in found), listed), target

    def shown(bars: Bars) -> dict[str, Any]:
        return rolling.over(indicators, bars.close, bars.present)

    memory = longest_memory(indicator.memory for indicator in indicators.values())
    return Strategy(init, act, name, indicators=shown, memory=memory)


def _none(num_assets: int) -> Array:
    """Return the state of `_divide` before the first bar."""
    return jnp.zeros(num_assets, bool)


def _divide(listed: Array, bar: Bar) -> tuple[Array, Array]:
    """Return which assets are listed by now `[A]`, and an equal share of equity for each of them.

    Later listings are not known yet.
    """
    listed = listed | bar.present
    return listed, jnp.where(listed, jnp.ones_like(bar.close), 0.0) / jnp.maximum(listed.sum(), 1)


def _refuse_periods(rule: str, least: int = 1, **periods: Any) -> None:
    """Refuse periods that are not whole numbers of at least `least`; who traces one checks it."""
    known = {name: value for name, value in periods.items() if not rolling.is_traced(value)}
    problems = whole(types.SimpleNamespace(**known), least, *known)
    refuse(f"{rule}: {problem}" for problem in problems)


def _text(value: Any) -> str:
    """Write a parameter; a traced one has no value yet."""
    return "..." if rolling.is_traced(value) else f"{value:g}"


def _long(condition: Array) -> Array:
    return jnp.where(condition, 1.0, 0.0)
