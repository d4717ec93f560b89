"""Rolling indicators of strategies as online updates, for periods that may be traced.

`nca_trader.sweep` runs one program for a whole grid, in which a period is a traced number. A window
of that many closes would then be part of each combination's state. Here the state holds what all
periods share, e.g. the sums of all closes up to each of the latest bars, and a period selects an
entry of it. Under `jax.vmap` over periods that state stays one array, and a bar costs each
combination one lookup, for any period.

Sums are pairs of float64 (`numerics.pair_add`), so a rolling mean is the exact mean, rounded once.
Two means that are equal are therefore equal in floats, e.g. of a price that does not move, and a
cross of means has the same sign in a backtest and in a sweep.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from numpy.typing import ArrayLike

from nca_trader.data.features import add, bars_to_forget, empty_average
from nca_trader.errors import ConfigError
from nca_trader.numerics import (
    LEAST_BARS,
    MOST_ASSETS,
    as_one_kernel,
    float64_on_cpu,
    pair_add,
    put,
    two_sum,
)
from nca_trader.types import Tensor

_LONGEST: contextvars.ContextVar[int | None] = contextvars.ContextVar("longest", default=None)
# Periods that indicators were made with, see `longest_of`.
_MET: contextvars.ContextVar[list[int] | None] = contextvars.ContextVar("met", default=None)


class Rolling(NamedTuple):
    """An indicator of a series, asset by asset.

    Attributes:
      init: `(num_assets) -> state`, a pytree of arrays.
      update: `(state, x, present) -> (state, value)`, `[A]` each: the newest values, a mask of
        those that exist, and the indicator up to them. A value that does not exist changes
        nothing. The indicator is NaN until there are enough values.
      memory: the number of its last values that the indicator depends on; None where it is traced.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> indicator = mean(2)
      >>> x = jnp.array([[1.0], [3.0], [6.0]])
      >>> scan = lambda s, x: indicator.update(s, x, jnp.isfinite(x))
      >>> print(jax.lax.scan(scan, indicator.init(1), x)[1][:, 0])
      [nan 2.  4.5]
    """

    init: Callable[[int], Any]
    update: Callable[[Any, Tensor, Tensor], tuple[Any, Array]]
    memory: int | None
    UNCOUNTED = ("memory",)  # by `identity`: it decides nothing


def over(indicators: Mapping[str, Rolling], x: ArrayLike, present: ArrayLike) -> dict[str, Any]:
    """Compute each indicator of all values `x [N, A]`; return `[N, A]` by name.

    Args:
      indicators: by name.
      x: values.
      present: mask of those that exist.

    Example:
      >>> import numpy as np
      >>> over({"mean": mean(2)}, np.array([[1.0], [3.0]]), np.ones((2, 1), bool))["mean"][1]
      array([2.])
    """

    def step(states: Any, row: Any) -> tuple[Any, Any]:
        found = {name: indicators[name].update(states[name], *row) for name in indicators}
        states, values = ({name: each[i] for name, each in found.items()} for i in (0, 1))
        return states, values

    def scan(*rows: Array) -> dict[str, Array]:
        start = {name: each.init(rows[0].shape[1]) for name, each in indicators.items()}
        return jax.lax.scan(step, start, rows)[1]

    with float64_on_cpu():
        rows = jnp.asarray(x, jnp.float64), jnp.asarray(present, bool)
        small = len(rows[0]) >= LEAST_BARS and rows[0].shape[1] <= MOST_ASSETS
        found = jax.jit(as_one_kernel(scan) if small else scan)(*rows)
    return {name: np.asarray(values) for name, values in found.items()}


@contextlib.contextmanager
def periods_up_to(longest: int) -> Iterator[None]:
    """Let traced periods be at most `longest` bars inside the block; a sweep knows its grid."""
    # A context variable and no global: sweeps run in threads.
    token = _LONGEST.set(longest)
    try:
        yield
    finally:
        _LONGEST.reset(token)


def longest_of(make: Iterable[Callable[[], Any]]) -> int:
    """Return the longest period of the indicators that functions make, at least 1."""
    token = _MET.set(met := [1])
    try:
        for one in make:
            one()
            met[:] = [max(met)]
    finally:
        _MET.reset(token)
    return met[0]


def is_traced(value: Any) -> bool:
    """Return whether `value` is known only when a program runs, as a parameter of a sweep is."""
    return isinstance(value, Tracer)


def longest(period: Any) -> int:
    """Return the number of bars that a window must hold for `period`, which may be traced.

    Args:
      period: bars, a whole number of at least 0.

    Returns:
      The period itself; of a traced one the largest period of the sweep.

    Raises:
      ConfigError: the period is traced outside of a sweep, so its largest value is unknown.

    Example:
      >>> longest(30)
      30
    """
    if not is_traced(period):
        if (met := _MET.get()) is not None:
            met.append(int(period))
        return int(period)
    largest = _LONGEST.get()
    if largest is None:
        raise ConfigError(
            "a rolling period is traced, but its largest value is unknown; give a number, or trace "
            "inside `with nca_trader.strategies.rolling.periods_up_to(LARGEST)`."
        )
    return largest


class Window(NamedTuple):
    """The latest values of each asset, in a ring that is written in place.

    Value k of an asset, from 0, is in row k modulo R of R: a bar costs the same at any R.

    Attributes:
      rows: `[R, A]`.
      count: `[A]` int32, the values so far.
    """

    rows: Array
    count: Array


def _empty(length: Any, num_assets: int) -> Window:
    return Window(jnp.full((length, num_assets), jnp.nan), jnp.zeros(num_assets, jnp.int32))


def _at(rows: Array, number: Array) -> Array:
    """Return the entries `[..., A]` of the values of these numbers."""
    columns = jnp.broadcast_to(jnp.arange(rows.shape[1]), number.shape)
    return rows.at[number % len(rows), columns].get(mode="promise_in_bounds")


def _put(rows: Array, number: Array, x: Tensor, present: Tensor) -> Array:
    """Write `x` `[..., A]` as the values of these numbers, where present."""
    # Where it is not, what is there is written: a write with a condition would copy all rows.
    kept = jnp.where(jnp.broadcast_to(present, number.shape), x, _at(rows, number))
    return put(rows, number % len(rows), kept)


def past(bars_ago: Any) -> Rolling:
    """Return the value of `bars_ago` values before the newest; 0 is the newest itself.

    Args:
      bars_ago: a whole number of at least 0; it may be traced.
    """
    length = longest(bars_ago) + 1

    def init(num_assets: int) -> Window:
        return _empty(length, num_assets)

    def update(window: Window, x: Tensor, present: Tensor) -> tuple[Window, Array]:
        rows, count = window
        rows, count = _put(rows, count, x, present), count + present
        # A row that no value has reached is NaN.
        return Window(rows, count), _at(rows, count - 1 - bars_ago)

    return Rolling(init, update, length)


def highest(period: Any) -> Rolling:
    """Return the largest of the last `period` values.

    Args:
      period: a whole number of at least 1; it may be traced.
    """
    return _extreme(period, jnp.maximum)


def lowest(period: Any) -> Rolling:
    """Return the smallest of the last `period` values.

    Args:
      period: a whole number of at least 1; it may be traced.
    """
    return _extreme(period, jnp.minimum)


def _extreme(period: Any, larger: Callable[[Array, Array], Array]) -> Rolling:
    """Return a rolling extreme, by the function of two values that it repeats.

    A level has the extremes of 2^j values up to each of the latest 2^j, in a ring. Its newest and
    its oldest make the newest of the next level, and two of a level, which may overlap, cover any
    window of 2^j to 2^(j+1) values. So a bar costs the logarithm of the longest period.
    """
    length = longest(period)

    def init(num_assets: int) -> Window:
        return _empty(_sizes(length).sum(), num_assets)

    def update(window: Window, x: Tensor, present: Tensor) -> tuple[Window, Array]:
        rows, count = window
        sizes = _sizes(len(rows))
        written = _row(sizes[:, None], count[None])
        new = [jnp.asarray(x)]
        for oldest in _at(rows, written)[:-1]:
            # NaN stands for too few values; both functions return it where either argument is.
            new.append(larger(new[-1], oldest))
        rows, count = _put(rows, written, jnp.stack(new), present), count + present
        size = jnp.left_shift(1, 31 - jax.lax.clz(jnp.asarray(period, jnp.int32)))
        newest, oldest = (_at(rows, _row(size, count - 1 - ago)) for ago in (0, period - size))
        return Window(rows, count), larger(newest, oldest)

    return Rolling(init, update, length)


def _sizes(length: int) -> np.ndarray:
    """Return the sizes of the levels of an extreme of so many values, 1, 2, 4 and so on."""
    return 2 ** np.arange(length.bit_length(), dtype=np.int32)


def _row(size: Any, number: Array) -> Array:
    """Return the row of a value in the level of a size, which follows the smaller ones."""
    return size - 1 + (number & (size - 1))


class RunningSums(NamedTuple):
    """The sum of all values, and those up to each of the latest, as pairs of floats in rings.

    Attributes:
      high: `[R, A]`, the sum of the first k values in row k modulo R.
      low: `[R, A]`, what its rounding left.
      total: `[A]` twice, the sum of all. (Read from the rings, it would make each bar copy them.)
      count: `[A]` int32, the values so far.
    """

    high: Array
    low: Array
    total: tuple[Array, Array]
    count: Array


def _empty_sums(length: int, num_assets: int) -> RunningSums:
    rows, none = jnp.zeros((length + 1, num_assets)), jnp.zeros(num_assets)
    return RunningSums(rows, rows, (none, none), jnp.zeros(num_assets, jnp.int32))


def _added(sums: RunningSums, high: Array, low: Array, present: Tensor) -> RunningSums:
    """Return the sums after one more value, the pair `(high, low)` `[A]`."""
    before, rest = sums.total
    new = pair_add(before, rest + low, high)
    number = sums.count + 1
    high, low = (_put(rows, number, x, present) for rows, x in zip(sums[:2], new, strict=True))
    total = jnp.where(present, new[0], before), jnp.where(present, new[1], rest)
    return RunningSums(high, low, total, sums.count + present)


def _latest(sums: RunningSums, period: Any) -> tuple[Array, Array]:
    """Return the sum of the last `period` values as a pair of floats."""
    before, rest = (_at(rows, sums.count - period) for rows in sums[:2])
    # The high parts may be far larger than their difference, whose digits the low parts hold.
    total, error = two_sum(sums.total[0], -before)
    return two_sum(total, error + (sums.total[1] - rest))


def mean(period: Any) -> Rolling:
    """Return the mean of the last `period` values, rounded once from the exact mean.

    Args:
      period: a whole number of at least 1 and below 2^24; it may be traced.
    """
    length = longest(period)

    def update(sums: RunningSums, x: Tensor, present: Tensor) -> tuple[RunningSums, Array]:
        x = jnp.where(present, x, 0.0)
        sums = _added(sums, x, jnp.zeros_like(x), present)
        quotient, rest = _quotient(_latest(sums, period), period)
        return sums, jnp.where(sums.count >= period, quotient + rest, jnp.nan)

    return Rolling(lambda num_assets: _empty_sums(length, num_assets), update, length)


def deviation(period: Any) -> Rolling:
    """Return the standard deviation (ddof = 1) of the last `period` values.

    `sqrt((sum x^2 - m sum x) / (n - 1))` with m the mean, in pairs of floats: in plain float64 the
    difference of the two sums would lose the digits of a price that hardly moves.

    Args:
      period: a whole number of at least 2 and below 2^24; it may be traced.
    """
    length = longest(period)

    def update(state: tuple[RunningSums, RunningSums], x: Tensor, present: Tensor):
        sums, squares = state
        x = jnp.where(present, x, 0.0)
        sums = _added(sums, x, jnp.zeros_like(x), present)
        squares = _added(squares, *_product(x, x), present)
        total = _latest(sums, period)
        quotient, rest = _quotient(total, period)
        high, low = _product(quotient, total[0])
        low = low + quotient * total[1] + rest * total[0]
        of_squares = _latest(squares, period)
        scatter = (of_squares[0] - high) + (of_squares[1] - low)
        # Equal values leave a difference of rounding errors, of either sign.
        variance = jnp.maximum(scatter, 0.0) / (period - 1)
        return (sums, squares), jnp.where(sums.count >= period, jnp.sqrt(variance), jnp.nan)

    def init(num_assets: int) -> tuple[RunningSums, RunningSums]:
        return _empty_sums(length, num_assets), _empty_sums(length, num_assets)

    return Rolling(init, update, length)


def ew_mean(span: Any) -> Rolling:
    """Return the exponentially weighted mean, pandas' `ewm(span).mean()`.

    Args:
      span: bars, at least 1, `2 / (span + 1)` the newest value's weight; it may be traced.
    """
    return _weighted(span, "mean")


def ew_variance(span: Any) -> Rolling:
    """Return the exponentially weighted variance, pandas' `ewm(span).var(bias=True)`.

    Args:
      span: bars, at least 1, `2 / (span + 1)` the newest value's weight; it may be traced.
    """
    return _weighted(span, "variance")


def _weighted(span: Any, name: str) -> Rolling:
    def init(num_assets: int) -> Any:
        return jax.tree.map(lambda x: jnp.full(num_assets, x), empty_average())

    def update(average: Any, x: Tensor, present: Tensor) -> tuple[Any, Array]:
        new = add(average, jnp.asarray(x), span)
        average = jax.tree.map(lambda a, b: jnp.where(present, b, a), average, new)
        return average, jnp.where(average.weight > 0.0, getattr(average, name), jnp.nan)

    return Rolling(init, update, None if is_traced(span) else bars_to_forget(span))


def _split(x: Array) -> tuple[Array, Array]:
    """Return two floats of at most 26 and 27 bits, whose sum is `x`."""
    # By bits: Dekker's product with 2^27 + 1 overflows for large numbers, and this does not.
    upper = jax.lax.reduce_precision(x, exponent_bits=11, mantissa_bits=25)
    return upper, x - upper


def _product(a: Array, b: Array) -> tuple[Array, Array]:
    """Return `a * b` as a rounded product and its rounding error.

    Source: Dekker, A floating-point technique for extending the available precision (1971). Each
    partial product is exact, so it does not matter whether the compiler fuses it with an addition.
    """
    product, (a1, a2), (b1, b2) = a * b, _split(a), _split(b)
    return product, ((a1 * b1 - product) + a1 * b2 + a2 * b1) + a2 * b2


def _quotient(total: tuple[Array, Array], divisor: Any) -> tuple[Array, Array]:
    """Return a pair of floats divided by a whole number below 2^24, as a quotient and a rest."""
    quotient = total[0] / divisor
    upper, lower = _split(quotient)
    # What the rounded quotient leaves of the total, exactly.
    left = ((total[0] - upper * divisor) - lower * divisor) + total[1]
    return quotient, left / divisor
