"""Features of functions of past bars that Python calls, e.g. of TA-Lib.

A function sees the last bars of one asset and nothing else, in training, backtests and sessions
alike. It thus cannot look ahead, and its values are the same bits everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nca_trader.config.extensions import own_code
from nca_trader.config.ranges import describe, expect, nearest
from nca_trader.data.features import (
    SPAN,
    Feature,
    add,
    empty_average,
    keep_unless,
    make_feature,
    z_score,
)
from nca_trader.errors import ConfigError
from nca_trader.types import PRICES, Bar, Bars

COLUMNS = (*PRICES, "volume", "half_spread")
MOST = 8_192  # numbers of a window: jax copies 64 KiB at once, and larger arrays by a thread
SETTLED = 1e-3  # deviations: a value that older bars change by less has forgotten them
TRIED = 200  # rows of each asset at which that is looked at
FEW = 128  # bars, and twice all that a value depends on: these show what others do


def indicator(
    function: Callable[..., Any],
    *columns: str,
    lookback: int,
    raw: bool = False,
    **parameters: Any,
) -> Feature:
    """Make a feature of a function of the last bars of an asset, e.g. of TA-Lib.

    Args:
      function: takes a float64 array `[lookback]` of each column, oldest first, and `parameters`.
        It returns a number; or an array or Series `[lookback]`, whose last value counts.
      *columns: "open", "high", "low", "close", "volume" or "half_spread", in the function's order.
      lookback: the number of bars that it sees, the newest included. One with a long memory, e.g.
        an exponential average, takes several times its own period; `leakcheck` says how much a
        longer one would change.
      raw: whether the value is that of the function. Otherwise it is in standard deviations from
        its mean, both exponentially weighted, of the bars before, with a span of 60.
      **parameters: of the function.

    Returns:
      The feature. Of a bar that is missing it has the value 0.

    Raises:
      ConfigError: an unknown column; the function raises, returns another shape, or a value that is
        not finite. One that needs later bars, such as a centred window, has none for the newest.

    Example:
      >>> import nca_trader as nca
      >>> over_mean = nca.indicator(lambda x: x[-1] / x.mean() - 1.0, "close", lookback=20)
      >>> bars = nca.sample_bars("sp500")
      >>> nca.leakcheck(over_mean, bars, cases=10).ok, over_mean.warmup
      (True, 79)
    """
    expect("lookback", lookback, int, "a whole number of bars")
    if not callable(function):
        raise ConfigError(f"an indicator is of a function, not of {describe(function)}; give one.")
    if not columns:
        raise ConfigError("an indicator takes columns of bars; name them in order, e.g. 'close'.")
    most = MOST // len(columns)
    if lookback is True or not 1 <= lookback <= most:
        raise ConfigError(f"lookback = {lookback}: an indicator takes 1 to {most} bars here.")
    for name in columns:
        if name not in COLUMNS:
            hint = nearest(str(name), COLUMNS)
            raise ConfigError(f"unknown column {name!r}; {hint}it may be {', '.join(COLUMNS)}.")
    windows = Windows(function, columns, lookback, parameters)
    windows.try_out()

    # As bits: where jax calls Python from another thread it would round float64 to float32.
    def called(bits: Any, full: Any) -> np.ndarray:
        window = np.ascontiguousarray(bits).view(np.float64)[..., 0]
        return np.array([windows.value(window) if full else 0.0]).view(np.uint32)

    def update(state: Any, bar: Bar, count: Any, *given: Any) -> tuple[Any, Any]:
        window, past = state
        row = jnp.stack([jnp.asarray(windows.of(bar, name)) for name in columns])
        window = jnp.concatenate([window[:, 1:], row[:, None]], axis=1)
        full = bar.present & (count >= lookback - 1)
        if given:
            (x,) = given
        else:
            like = jax.ShapeDtypeStruct((2,), np.uint32)
            bits = jax.lax.bitcast_convert_type(window, jnp.uint32)
            # One asset after the other: on one core a larger array would wait without end.
            found = jax.pure_callback(called, like, bits, full, vmap_method="sequential")
            x = jax.lax.bitcast_convert_type(found, jnp.float64)
        # What is not finite must not stay in the average.
        past_after = keep_unless(full & jnp.isfinite(x), past, add(past, x))
        return (window, past_after), x if raw else z_score(past, x)

    def init() -> Any:
        return np.ones((len(columns), lookback)), empty_average()

    span = 0 if raw else SPAN
    return make_feature(init, update, lookback - 1 + span, column=windows, span=span)


class Windows:
    """A function of the last bars, called by Python for one bar after the other."""

    def __init__(
        self,
        function: Callable[..., Any],
        columns: tuple[str, ...],
        lookback: int,
        parameters: dict[str, Any],
    ):
        """Set what `indicator` takes."""
        self.function, self.columns = function, columns
        self.lookback, self.parameters = lookback, parameters
        self.name = getattr(function, "__name__", type(function).__name__)
        self.few = FEW + 2 * (lookback + SPAN)

    def of(self, bars: Any, name: str) -> Any:
        """Return a column of bars, or of one bar.

        Raises:
          ConfigError: they have no such column.
        """
        column = getattr(bars, name)
        if column is None:
            raise ConfigError(f"{self.name}: takes {name}, which the bars lack; give bars with it.")
        return column

    def value(self, window: np.ndarray) -> float:
        """Return the function's value of columns `[C, L]`."""
        with own_code(self.name):
            # Copies: a function that changes what it is given must not change other windows.
            found = np.asarray(self.function(*map(np.array, window), **self.parameters), np.float64)
        if found.shape not in ((), window.shape[1:]):
            raise ConfigError(
                f"{self.name}: returns the shape {found.shape} of {window.shape[1]} bars; return "
                "one number, or one for each bar."
            )
        return float(found if not found.ndim else found[-1])

    def try_out(self) -> None:
        """Call the function once, on drawn bars.

        Raises:
          ConfigError: see `indicator`.
        """
        rng = np.random.default_rng(0)
        close = 100.0 * np.exp(0.01 * rng.normal(size=self.lookback).cumsum())
        drawn: dict[str, np.ndarray] = dict.fromkeys(COLUMNS, close)
        drawn |= {"high": 1.01 * close, "low": close / 1.01}
        drawn |= {"volume": rng.lognormal(10.0, size=self.lookback), "half_spread": 1e-6 * close}
        found = self.value(np.stack([drawn[name] for name in self.columns]))
        if not np.isfinite(found):
            raise ConfigError(
                f"{self.name}: gives {found} for the newest of {self.lookback} bars; state a "
                "longer lookback. A centred window needs later bars, and cannot be a feature."
            )

    def __call__(self, bars: Bars) -> np.ndarray:
        """Return the values `[N, A]` float64 at every bar, 0 where there are too few before it.

        Raises:
          ConfigError: the function raises, or a value is not finite.
        """
        found = np.zeros(bars.close.shape)
        for row, a, window in self._windows(bars, self.lookback):
            found[row, a] = self.value(window)
            if not np.isfinite(found[row, a]):
                raise ConfigError(
                    f"{self.name}: gives {found[row, a]} at row {row} of {bars.symbols[a]} "
                    f"({bars.index[row]}); return a finite number, e.g. by np.nan_to_num."
                )
        return found

    def _windows(
        self, bars: Bars, length: int, rows: int | None = None
    ) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield row, asset and the columns `[C, length]` up to it: of all rows, or of `rows`."""
        for a in range(bars.num_assets):
            there = np.flatnonzero(bars.present[:, a])
            columns = np.stack([self.of(bars, name)[there, a] for name in self.columns])
            last = np.arange(length, len(there) + 1)
            step = 1 if rows is None else max(len(last) // rows, 1)
            for stop in last[::step]:
                yield int(there[stop - 1]), a, columns[:, stop - length : stop]

    def longer(self, bars: Bars) -> str:
        """Say how much twice the lookback would change the values; "" for hardly anything."""
        length, pairs = self.lookback, []
        for _, _, window in self._windows(bars, 2 * length, TRIED):
            pairs.append((self.value(window[:, length:]), self.value(window)))
        short, long = np.array(pairs or [(0.0, 0.0)]).T
        most = np.abs(long - short).max() / max(short.std(), 1e-300)
        if not most > SETTLED:
            return ""
        return (
            f"with twice its lookback of {length} bars a value of {self.name} differs by up to "
            f"{most:.2g} standard deviations; state a longer one, unless it is meant to forget"
        )
