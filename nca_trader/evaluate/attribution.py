"""What each part of a blend earned."""

from __future__ import annotations

import numpy as np
import pandas as pd

from nca_trader.agents.strategy import Part
from nca_trader.types import Bars


def earned(
    bars: Bars,
    parts: tuple[Part, ...],
    asked: np.ndarray,
    units: np.ndarray,
    equity: np.ndarray,
    at_open: bool,
) -> pd.DataFrame:
    """Return `[N, P]` what the market gave to each part in each bar, in units of the capital.

    The units held in an asset are divided by what the parts want of it, `share_k target_k`. Where
    these sum to 0, nothing is held and the parts hold against each other from the bar at which they
    were decided. A row sums to the account's market return: costs and income are the account's.

    Args:
      bars: N traded bars.
      parts: of the blend, P.
      asked: `[N, P, A]` what each ordered; NaN for nothing.
      units: `[N, A]` held at each close, of a capital of 1.
      equity: `[N]`.
      at_open: whether orders fill at the next open, and not at their close.
    """
    shares = np.array([part.share for part in parts], np.float64)
    num_bars, num_parts, num_assets = asked.shape
    flat = pd.DataFrame(asked.reshape(num_bars, -1)).ffill().fillna(0.0).to_numpy()
    wanted = flat.reshape(asked.shape) * shares[:, None]
    if at_open:  # what is held at a close was ordered at the one before
        wanted = np.concatenate([np.zeros((1, num_parts, num_assets)), wanted[:-1]])
    total = wanted.sum(1, keepdims=True)
    # Opposite targets that sum to 0 leave a rest of rounding.
    against = np.abs(total) <= 1e-12 * np.abs(wanted).sum(1, keepdims=True)
    part_of = np.where(against, 0.0, wanted / np.where(against, 1.0, total))
    held = part_of * units[:, None]
    price = np.where(np.isnan(bars.close), 1.0, bars.close)
    changed = np.any(wanted != np.concatenate([wanted[:1] * np.nan, wanted[:-1]]), axis=1)
    since = np.maximum.accumulate(np.where(changed, np.arange(num_bars)[:, None], 0), axis=0)
    scale = equity[since] / np.take_along_axis(price, since, axis=0)
    held = np.where(against, wanted * scale[:, None], held)
    before = np.concatenate([np.zeros((1, num_parts, num_assets)), held[:-1]])
    last = np.concatenate([bars.open[:1], bars.close[:-1]])
    gap, body = np.nan_to_num(bars.open - last), np.nan_to_num(bars.close - bars.open)
    gained = before * gap[:, None] + (held if at_open else before) * body[:, None]
    return pd.DataFrame(gained.sum(2), bars.index, [part.name for part in parts])
