"""Outputs of what decides on bars: one row per bar, and the rows of two runs compared.

`function_targets` is what a backtest asks of every function of bars. `leakcheck` and a walk-forward
compare with the same parts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from nca_trader.agents.targets import call_function
from nca_trader.errors import ConfigError, user_line
from nca_trader.evaluate.futures import equal
from nca_trader.types import Bars

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
