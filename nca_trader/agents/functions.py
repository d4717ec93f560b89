"""Targets of a function of bars; truncated histories show whether it looks ahead."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from nca_trader.config.ranges import described
from nca_trader.errors import ConfigError, out_of_memory, user_line
from nca_trader.types import Bars


def function_targets(bars: Bars, function: Callable[[Bars], Any], check: bool) -> Any:
    """Call a function of bars, and call it again on three truncated histories.

    Args:
      bars: that it decides on.
      function: `(bars) -> targets`, `[N]` or `[N, A]`, row t decided with bars up to t.
      check: False leaves the second part out.

    Returns:
      What the function returned for all bars.

    Raises:
      ConfigError: the function raises, or a target changes when later bars are removed. The message
        names the first such bar.
    """
    name = getattr(function, "__name__", type(function).__name__)
    found = _called(function, name, bars)
    if found is None or np.ndim(found) == 0:
        raise ConfigError(
            f"{name}: returns {described(found)} for {len(bars)} bars; return one row of weights "
            "per bar, [N] or [N, A], NaN for no order."
        )
    if not check or len(bars) < 4:
        return found
    whole = _as_rows(found)
    early, *others = _history_lengths(whole)
    # The first decision may have too little history for code that needs some; that is not a leak.
    try:
        _refuse_other_past(function, name, bars, whole, early)
    except ConfigError as error:
        if error.__cause__ is None:  # nothing was raised; the past is another
            raise
        others += [len(bars) // 3]
    for length in others:
        try:
            _refuse_other_past(function, name, bars, whole, length)
        except ConfigError as error:
            # A history that is too short to decide anything may be refused.
            if error.__cause__ is None or np.nan_to_num(whole[:length]).any():
                raise
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


def _refuse_other_past(
    function: Callable[[Bars], Any], name: str, bars: Bars, whole: np.ndarray, length: int
) -> None:
    """Refuse a function whose targets for the first `length` bars are not those of `whole`."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # of windows that a short history does not fill
        rows = _as_rows(_called(function, name, bars[:length]))
    if np.ndim(rows) == 0 or len(rows) != length or rows.shape[1:] != whole.shape[1:]:
        raise ConfigError(
            f"{name}: returns {rows.shape} for the first {length} of {len(bars)} bars and "
            f"{whole.shape} for all; return one row per bar, [N] or [N, A]."
        )
    other = ~np.isclose(rows, whole[:length], rtol=1e-9, atol=1e-12, equal_nan=True)
    if not other.any():
        return
    if not np.array_equal(_as_rows(_called(function, name, bars)), whole, equal_nan=True):
        raise ConfigError(
            f"{name}: returns other targets when it is called again with the same bars; give its "
            "random numbers a fixed seed, and keep nothing from one call to the next."
        )
    row = int(np.argmax(other.reshape(length, -1).any(1)))
    before, after = (np.ravel(x[row])[np.ravel(other[row])][0] for x in (whole, rows))
    raise ConfigError(
        f"{name}: looks ahead: its target at bar {row} ({bars.index[row]}) is {before:g} with all "
        f"bars and {after:g} with the first {length} of {len(bars)}; decide each row with bars up "
        "to it. nca.leakcheck shows which column leaks; check=False skips this."
    )


def _as_rows(found: Any) -> np.ndarray:
    try:
        return np.asarray(found, np.float64)
    except (TypeError, ValueError):
        return np.zeros(0)


def _called(function: Callable[[Bars], Any], name: str, bars: Bars) -> Any:
    try:
        return function(bars)
    except (Exception, SystemExit) as error:  # a script's function may call `sys.exit`
        if isinstance(error, Exception) and out_of_memory(error):
            raise
        said = " ".join(str(error).split())[:200] or "no message"
        where = user_line(error) or "in its code"
        raise ConfigError(
            f"{name}: raises {type(error).__name__} on bars {bars.index[0]} to {bars.index[-1]}, "
            f"{where}: {said.rstrip('.')}; correct the function."
        ) from error
