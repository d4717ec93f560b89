"""Other futures for the same past: bars that agree with given ones up to a row, and not after.

What is decided from the past alone is the same for all of them; `leakcheck` looks whether it is.
The bars that come out keep the conventions of `Bars` (high and low take in open and close, a
missing bar carries the last close), so that a function which may rely on them still runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from nca_trader.types import PRICES, Bars

# What is known of a bar at its open: that it is there, its open, and what was paid over the gap.
KNOWN_AT_OPEN = ("open", "present", "dividend")
# A fraction of price: from what rounding moves to what no limit on daily moves would allow.
NOISE = (1e-3, 0.03, 0.3)
JUMPS = (1.0, 1.0, 1.3, 1 / 1.3, 3.0, 1 / 3.0, 30.0, 1 / 30.0)
MISSING = (0.1, 0.5, 1.0)

Arrays = dict[str, np.ndarray]


class Future(NamedTuple):
    """Where a perturbation may write: rows from `first` on, of the assets that are True in `[A]`.

    first: the first row after the past. at_open: row `first - 1` is known as at its open, so that
    the rest of it belongs to the future.
    """

    first: int
    assets: np.ndarray
    at_open: bool = False

    def rows(self, name: str) -> slice:
        """The rows of column `name` that are not known yet."""
        early = self.at_open and name not in KNOWN_AT_OPEN
        return slice(self.first - early, None)


def _factors(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Factors of price: one jump for all, so that levels move, and noise, so that returns do."""
    return rng.choice(JUMPS) * np.exp(rng.choice(NOISE) * rng.normal(size=shape))


def _move(rng: np.random.Generator, arrays: Arrays, future: Future) -> None:
    """Everything: each bar's prices times a factor of its own, other volumes, at times holes."""
    factor = _factors(rng, arrays["close"].shape)
    for name in PRICES:
        _write(arrays, name, future, arrays[name] * factor)
    for name in sorted(arrays.keys() - {*PRICES, "present"}):
        _other(name)(rng, arrays, future)
    _take_in(arrays, future)
    if rng.random() < 0.25:
        _presence(rng, arrays, future)


def _within(name: str) -> Callable[[np.random.Generator, Arrays, Future], None]:
    """Another open or close between the bar's own low and high, and nothing else."""

    def change(rng: np.random.Generator, arrays: Arrays, future: Future) -> None:
        low, high = arrays["low"], arrays["high"]
        _write(arrays, name, future, low + rng.random(low.shape) * (high - low))

    return change


def _beyond(name: str) -> Callable[[np.random.Generator, Arrays, Future], None]:
    """A higher high or a lower low."""

    def change(rng: np.random.Generator, arrays: Arrays, future: Future) -> None:
        wider = np.exp(rng.choice(NOISE) * np.abs(rng.normal(size=arrays[name].shape)))
        # Away from the other prices, also where they are negative.
        away = np.abs(arrays[name]) * (wider - 1.0)
        _write(arrays, name, future, arrays[name] + (away if name == "high" else -away))

    return change


def _other(name: str) -> Callable[[np.random.Generator, Arrays, Future], None]:
    """Another volume, spread, dividend or funding rate, zero now and then."""

    def change(rng: np.random.Generator, arrays: Arrays, future: Future) -> None:
        old = arrays[name]
        size = np.where(np.isfinite(old) & (old != 0), old, 1.0 if name == "volume" else 1e-3)
        new = size * np.exp(rng.normal(size=old.shape)) * (rng.random(old.shape) > 0.05)
        _write(arrays, name, future, new)

    return change


def _presence(rng: np.random.Generator, arrays: Arrays, future: Future) -> None:
    """Bars that go missing, now and then all of them: halts, gaps, a delisting."""
    present = arrays["present"]
    _write(arrays, "present", future, present & (rng.random(present.shape) >= rng.choice(MISSING)))


def _reorder(rng: np.random.Generator, arrays: Arrays, future: Future) -> None:
    """The same bars in another order: what a sum or a mean over all of them does not see."""
    count = len(arrays["close"]) - future.first
    order = future.first + rng.permutation(count)
    for name, values in arrays.items():
        new = values.copy()
        new[future.first :] = values[order]
        _write(arrays, name, future, new)


COLUMNS: dict[str, Callable[[np.random.Generator, Arrays, Future], None]] = {
    "open": _within("open"),
    "high": _beyond("high"),
    "low": _beyond("low"),
    "close": _within("close"),
    "volume": _other("volume"),
    "half_spread": _other("half_spread"),
    "dividend": _other("dividend"),
    "funding": _other("funding"),
    "present": _presence,
}


def changed(rng: np.random.Generator, bars: Bars, kind: str, future: Future) -> Bars:
    """`bars` with another future: kind is "all", "order", or a column's name, see `COLUMNS`."""
    arrays = arrays_of(bars)
    ways = {"all": _move, "order": _reorder, **COLUMNS}
    ways[kind](rng, arrays, future)
    _carry(arrays, future)
    return dataclasses.replace(bars, **arrays)


def arrays_of(bars: Bars) -> Arrays:
    """Copies of the arrays `[N, A]` of the bars, by name."""
    return {name: getattr(bars, name).copy() for name in bars.fields}


def without(bars: Bars, first: int, stop: int) -> Bars:
    """The bars but for the rows `first <= row < stop`."""
    kept = np.r_[0:first, stop : len(bars)]
    arrays = {name: getattr(bars, name)[kept] for name in bars.fields}
    return dataclasses.replace(bars, time=bars.time[kept], **arrays)


def longer(rng: np.random.Generator, bars: Bars, count: int) -> Bars:
    """The bars and `count` more, copies of earlier ones at prices that go on from the last."""
    step = np.median(np.diff(bars.time)) if len(bars) > 1 else np.timedelta64(1, "D")
    time = np.concatenate([bars.time, bars.time[-1] + step * np.arange(1, count + 1)])
    rows = np.concatenate([np.arange(len(bars)), rng.integers(0, len(bars), count)])
    arrays = {name: getattr(bars, name)[rows] for name in bars.fields}
    with np.errstate(invalid="ignore", divide="ignore"):
        scale = bars.close[-1] / arrays["close"] * _factors(rng, (len(rows), bars.num_assets))
    scale = np.where(np.isfinite(scale), scale, 1.0)
    for name in PRICES:
        arrays[name][len(bars) :] *= scale[len(bars) :]
    _carry(arrays, Future(len(bars), np.ones(bars.num_assets, bool)))
    return dataclasses.replace(bars, time=time, **arrays)


def holed(rng: np.random.Generator, bars: Bars, rate: float = 0.05) -> Bars:
    """The bars with some more missing: what fills holes from behind shows itself only there."""
    arrays = arrays_of(bars)
    arrays["present"] &= rng.random(bars.present.shape) >= rate
    arrays["present"][0] = bars.present[0]
    _carry(arrays, Future(1, np.ones(bars.num_assets, bool)))
    return dataclasses.replace(bars, **arrays)


def _write(arrays: Arrays, name: str, future: Future, new: np.ndarray) -> None:
    rows = future.rows(name)
    arrays[name][rows, future.assets] = new[rows][:, future.assets]


def _take_in(arrays: Arrays, future: Future) -> None:
    """High and low take in open and close again, where an open had to stay as it was."""
    highest = np.maximum(arrays["high"], np.maximum(arrays["open"], arrays["close"]))
    lowest = np.minimum(arrays["low"], np.minimum(arrays["open"], arrays["close"]))
    _write(arrays, "high", future, highest)
    _write(arrays, "low", future, lowest)


def _carry(arrays: Arrays, future: Future) -> None:
    """Missing bars of the future take the last close before them as prices, and volume 0."""
    present = arrays["present"]
    row = np.arange(len(present))[:, None]
    last = np.maximum.accumulate(np.where(present, row, -1), axis=0)
    carried = np.take_along_axis(arrays["close"], np.maximum(last, 0), axis=0)
    carried = np.where(last >= 0, carried, np.nan)
    for name in (*PRICES, "volume"):
        fill = np.zeros_like(carried) if name == "volume" else carried
        _write(arrays, name, future, np.where(present, arrays[name], fill))
