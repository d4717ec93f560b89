"""Outputs of what decides on bars: one row per bar, and the rows of two runs compared.

`function_targets` is what a backtest asks of every function of bars. `leakcheck` and a walk-forward
compare with the same parts. `foresights` finds what no truncated history shows: a column whose
values themselves come from later bars.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from nca_trader.config.extensions import split_frame
from nca_trader.data.features import BUILT_IN, FEATURES
from nca_trader.data.indicators import Windows
from nca_trader.envs.account.exits import Order
from nca_trader.errors import BarError, ConfigError, user_line
from nca_trader.evaluate.lookahead.futures import equal
from nca_trader.markets.market import SOURCE
from nca_trader.strategies.targets import as_orders, call_function
from nca_trader.types import COLUMN, Bars

ROUNDING = 1e-9  # of weights that a backtest compares, as sums of other lengths may differ


def function_targets(bars: Bars, function: Callable[[Bars], Any], check: bool = True) -> Any:
    """Return the targets of a function of bars; call it again on three truncated histories.

    Args:
      bars: that it decides on.
      function: `(bars) -> targets`, `[N]` or `[N, A]`, row t decided with bars up to t.
      check: False leaves the second part out.

    Raises:
      ConfigError: a target changes when later bars are removed, and the message names its bar; or
        the function raises where it has decided before.
    """
    name = getattr(function, "__name__", type(function).__name__)
    found = call_function(bars, function)
    if not check or len(bars) < 4:
        return found
    try:
        whole = rows_of(found, bars)
    except NotRows:
        return found  # refused by `as_targets`, in words of a backtest
    lengths = _history_lengths(whole)
    for number, length in enumerate(lengths):
        short = bars[:length]
        try:
            # Warnings of windows that a short history does not fill.
            with warnings.catch_warnings(action="ignore"), np.errstate(all="ignore"):
                rows = rows_of(call_function(short, function), short, whole)
        except NotRows as error:
            raise ConfigError(f"{name}: with {length} of {len(bars)} bars {error}.") from None
        except ConfigError as error:
            # Code may refuse a history that is too short to decide anything, also that of its first
            # decision; this is not a leak.
            if error.__cause__ is None or (number and np.nan_to_num(whole[:length]).any()):
                raise
            if not number:
                lengths.append(len(bars) // 3)
            continue
        change = compare(whole, rows, length - 1, ROUNDING)
        if change is not None:
            refuse_chance(name, whole, rows_of(call_function(bars, function), bars))
            row = change.where[0]
            raise ConfigError(
                f"{name}: looks ahead: its target at bar {row} ({bars.index[row]}) is "
                f"{change.before:g} with all bars and {change.after:g} with the first {length} of "
                f"{len(bars)}; decide each row with bars up to it. nca.leakcheck shows which "
                "column leaks; check=False skips this."
            )
    return found


def _history_lengths(whole: np.ndarray) -> list[int]:
    """Return three numbers of bars, each less than all, after which targets `whole` are compared.

    A decision that used later bars shows best where these are missing: right after it. So the
    histories end with the first order, with a change of the target near two thirds, and one bar
    before the end.
    """
    rows = np.nan_to_num(whole).reshape(len(whole), -1)
    changed = (rows != 0.0) & (np.diff(rows, axis=0, prepend=0.0) != 0.0)
    ends, n = np.maximum(np.flatnonzero(changed.any(axis=1)) + 1, 2), len(whole)
    wanted = [n - 1, 2 * n // 3, n // 3]
    if ends.size:
        wanted = [ends[0], ends[np.abs(ends - 2 * n / 3).argmin()], *wanted]
    return sorted([*dict.fromkeys(int(length) for length in wanted if length < n)][:3])


class Found(NamedTuple):
    """A change of the output up to row t.

    Attributes:
      rows: that changed, ascending.
      largest: the largest finite change; NaN where every change is to or from NaN.
      where: index into the output of the first change.
      before: the value there on the bars as they are.
      after: the value there on the changed bars.
    """

    rows: np.ndarray
    largest: float
    where: tuple[int, ...]
    before: float
    after: float


class NotRows(Exception):
    """The output is not one row per bar."""


def rows_of(output: Any, bars: Bars, before: np.ndarray | None = None) -> np.ndarray:
    """Return an output as float64 `[N, ...]`; `before` is another, whose rows it is compared with.

    Raises:
      NotRows: it is not one row per bar.
    """
    if isinstance(output, Order):  # its target, then its levels
        rows_of(output.target, bars)
        try:
            orders = as_orders(output, bars, math.inf)
        except BarError as error:
            raise NotRows(f"it gives an Order that does not fit: {error}") from None
        fields = [x for x in orders if isinstance(x, np.ndarray)]
        return np.stack(np.broadcast_arrays(*fields), axis=-1)
    # Rows of other times would be compared with the wrong bars.
    index = getattr(output, "index", None)
    if isinstance(index, pd.DatetimeIndex) and len(index) == len(bars):
        # An index without a zone is taken as UTC, as that of bars is.
        there = index.tz_localize("UTC") if index.tz is None else index.tz_convert("UTC")
        if (there != bars.index).any():
            raise NotRows("its rows are not at the times of the bars; reindex by bars.index")
    try:
        values = np.asarray(output, np.float64)
    except (TypeError, ValueError):
        kind = type(output).__name__
        raise NotRows(f"it gives {kind}, not numbers, one row per bar") from None
    if not values.ndim or len(values) != len(bars):
        raise NotRows(f"it gives shape {values.shape}, not one row for each of {len(bars)} bars")
    if before is not None and values.shape[1:] != before.shape[1:]:
        raise NotRows(f"it gives shape {values.shape} there and {before.shape} before")
    return values


def refuse_chance(name: str, output: np.ndarray, again: np.ndarray) -> None:
    """Refuse a subject whose second output on the same bars differs from its first.

    Raises:
      ConfigError: it draws random numbers, or keeps something from call to call.
    """
    if output.shape != again.shape or not equal(output, again).all():
        raise ConfigError(
            f"{name}: gives other values when it is called again with the same bars, so nothing "
            "can be said of its past; give its random numbers a fixed seed, and keep nothing from "
            "one call to the next."
        )


def compare(before: np.ndarray, after: np.ndarray, t: int, tolerance: float) -> Found | None:
    """Compare the rows up to t of two outputs `[N, ...]`; None where they are equal."""
    before, after = before[: t + 1], after[: t + 1]
    with np.errstate(invalid="ignore"):
        change = np.abs(after - before)
        # False for NaN: from a number to NaN is a change, whatever the tolerance.
        rounding = change <= tolerance * np.maximum(1.0, np.abs(before))
    differs = ~(equal(before, after) | rounding)
    if not differs.any():
        return None
    # `argwhere` goes row by row, so this is in the earliest row that changed.
    where = tuple(int(i) for i in np.argwhere(differs)[0])
    largest = float(np.fmax.reduce(change[differs]))
    rows = np.unique(np.nonzero(differs)[0])
    return Found(rows, largest, where, float(before[where]), float(after[where]))


def described(error: Exception) -> str:
    """Describe an exception of the subject in one line, with the line of code it came from."""
    if isinstance(error, NotRows):
        return str(error)
    # Arrays of bars are read-only, so that code which changes them fails at its own line.
    if isinstance(error, ValueError) and "read-only" in str(error):
        return f"it writes into the bars at {user_line(error)}; let it copy them first"
    message = " ".join(str(error).split()) or "no message"
    if isinstance(error, ConfigError) and not user_line(error):
        return message.rstrip(".")  # of this package, which says what and where
    return f"it raises {type(error).__name__} at {user_line(error)}: {message[:200].rstrip('.')}"


KNOWING_T, KNOWING_R2 = 10.0, 0.2  # a value above both is taken to know the next return


def foresights(bars: Bars, values: Mapping[str, np.ndarray] = MappingProxyType({})) -> list[str]:
    """Return a warning for each own column, or other value, that explains the next bar's return.

    Each is tried as it is, over the close, and as its change: a later close as a level explains
    hardly anything. The returns are those that a decision can earn, close to close and open to
    open. What the bar's own return explains is taken out of them first.

    Args:
      bars: N bars of A assets. A market of this package is passed over: its states do predict.
      values: `[N]`, `[N, A]` or `[N, ...]` by name, next to the columns of the bars.
    """
    given = {f"{COLUMN}{name}": x for name, x in bars.columns.items()} | dict(values)
    if not given or bars.source.startswith(SOURCE):
        return []
    (n, a), found = bars.close.shape, []
    with np.errstate(all="ignore"):
        earned = {}
        for kind, price, at in (("close to close", bars.close, 0), ("open to open", bars.open, 1)):
            there = bars.present[at + 1 :] & bars.present[at : n - 1]
            known = np.where(there, price[at + 1 :] / price[at : n - 1] - 1.0, np.nan)
            earned[kind] = np.concatenate([known, np.full((n - len(known), a), np.nan)])
        own = np.nan_to_num(np.roll(earned["close to close"], 1, axis=0))
        for name, x in given.items():
            x = x.reshape(n, a if x.shape[1:2] == (a,) else 1, -1)
            before = np.concatenate([np.full_like(x[:1], np.nan), x[:-1]])
            forms = {
                "": x, ", over the close,": x / bars.close[..., None],
                ", as its change,": x - before, ", as its relative change,": x / before - 1.0,
            }  # fmt: skip
            fits = [
                (r2, abs(t), form, kind, symbol)
                for form, shown in forms.items()
                for kind, y in earned.items()
                for each in np.moveaxis(shown, -1, 0)
                for symbol, t, r2 in zip(bars.symbols, *explained(y, each, own), strict=True)
                if abs(t) > KNOWING_T and r2 > KNOWING_R2
            ]
            if fits:
                # Of equal fits the first, the value as it is.
                r2, t, form, kind, symbol = max(fits, key=lambda fit: round(fit[0], 2))
                size = f"{t:.3g}" if t < 1_000 else "over 1,000"
                found.append(
                    f"FORESIGHT: {name}{form} explains the next return of {symbol} ({kind}) with "
                    f"|t| = {size} and R2 = {r2:.2f}; check that row t holds what is known at bar "
                    "t's close, or shift it one bar later."
                )
    return found


def own_features(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of own features that may know more than bars up to their own.

    Not built-in ones, not columns, which are tried as they are, and not an `nca_trader.indicator`,
    which sees a window of prices alone.
    """
    bare = {name: split_frame(name)[1] for name in names}
    own = {k: v for k, v in bare.items() if v not in BUILT_IN and not v.startswith(COLUMN)}
    return tuple(k for k, v in own.items() if not isinstance(FEATURES[v].column, Windows))


def explained(y: np.ndarray, x: np.ndarray, own: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return what `x` adds in `y = a + b own + c x`: `[A]` t of c, and its part of y's variance.

    Args:
      y: `[N, A]`; rows in which it or `x` is NaN are left out.
      x: `[N, A]`, or `[N, 1]` of all assets.
      own: `[N, A]`.

    Source: MacKinnon and White, Some Heteroskedasticity-Consistent Covariance Matrix Estimators
    (1985): HC3, in which one outlier that meets another is not evidence.
    """
    rows = np.isfinite(x + y)
    count = rows.sum(axis=0)
    y, x, own = (np.where(rows, z, 0.0) for z in (y, x, own))
    y, x, own = (np.where(rows, z - z.sum(axis=0) / count, 0.0) for z in (y, x, own))
    free, total = 1.0 - 1.0 / count, (y * y).sum(axis=0)
    own = np.nan_to_num(own / np.sqrt((own * own).sum(axis=0)))
    y, x = (z - own * (own * z).sum(axis=0) for z in (y, x))
    x = x / np.sqrt((x * x).sum(axis=0))
    slope = (x * y).sum(axis=0)
    free = free - own * own - x * x
    # Errors of fits without their row; a row that alone decides the slope has no other fit.
    left_out = np.where(free > 1e-9, (y - slope * x) / free, np.inf)
    return slope / np.sqrt((x * x * left_out * left_out).sum(axis=0)), slope * slope / total
