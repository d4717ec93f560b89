"""Targets as users give them: checked against the bars before anything is traded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from nca_trader.errors import BarError
from nca_trader.types import Bars


def as_targets(targets: Any, bars: Bars) -> np.ndarray:
    """Targets as `[N, A]` float64; refuses what does not fit or is infinite."""
    _refuse_other_labels(targets, bars)
    try:
        array = np.asarray(targets, np.float64)
    except (TypeError, ValueError) as error:
        raise BarError(
            f"targets are not numbers ({error}); give weights, NaN for no order."
        ) from None
    if array.ndim == 1 and bars.num_assets == 1:
        array = array[:, None]
    expected = (len(bars), bars.num_assets)
    if array.shape != expected:
        one = "; for one asset of them, pass bars.select(SYMBOL)" if array.ndim == 1 else ""
        raise BarError(
            f"targets have shape {np.shape(targets)}, but the bars have [N, A] = {expected} "
            f"({', '.join(bars.symbols)}){one}."
        )
    if np.isinf(array).any():
        row = int(np.argwhere(np.isinf(array))[0, 0])
        raise BarError(f"targets row {row} is infinite; a weight is a finite fraction of equity.")
    return array


def _refuse_other_labels(targets: Any, bars: Bars) -> None:
    """Refuses a frame or series whose rows or columns are named, and not as those of the bars."""
    if isinstance(targets, pd.DataFrame) and not isinstance(targets.columns, pd.RangeIndex):
        if tuple(targets.columns) != bars.symbols:
            raise BarError(
                f"targets have the columns {', '.join(map(str, targets.columns))}, but the bars "
                f"are {', '.join(bars.symbols)}; give the columns in this order."
            )
    index = targets.index if isinstance(targets, pd.DataFrame | pd.Series) else None
    if isinstance(index, pd.DatetimeIndex) and len(index) == len(bars):
        there = index.tz_localize("UTC") if index.tz is None else index.tz_convert("UTC")
        if (there != bars.index).any():
            row = int(np.argmax(there != bars.index))
            raise BarError(
                f"targets row {row} is of {index[row]}, but the bar there of {bars.time[row]}; "
                "reindex the targets by bars.index."
            )


def in_force(targets: np.ndarray, first: int) -> np.ndarray:
    """Puts what was last ordered before row `first` at it: a span begins in that position."""
    if first == 0:
        return targets
    held = pd.DataFrame(targets[: first + 1]).ffill().to_numpy()[-1]
    return np.vstack([targets[:first], held[None], targets[first + 1 :]])
