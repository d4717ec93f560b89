"""What each part of a blend earned."""

from __future__ import annotations

import numpy as np
import pandas as pd

from nca_trader.agents.strategy import BlendPart
from nca_trader.evaluate.trades import BEFORE, REASONS, Fills
from nca_trader.types import Bars


def earned(
    bars: Bars,
    parts: tuple[BlendPart, ...],
    asked: np.ndarray,
    fills: Fills,
    units: np.ndarray,
    equity: np.ndarray,
    at_open: bool,
) -> pd.DataFrame:
    """Return `[N, P]` what the market gave to each part in each bar, in units of the capital.

    The units held in an asset are divided by what the parts wanted of it, `share_k target_k`, when
    an order for it last filled. Where these sum to 0, nothing is held and the parts hold against
    each other from the bar at which they were decided. A row sums to the account's market return:
    costs and income are the account's.

    Args:
      bars: N traded bars.
      parts: of the blend, P.
      asked: `[N, P, A]` what each ordered; NaN for nothing.
      fills: of the account.
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
    wanted = np.take_along_axis(wanted, _in_force(bars, wanted, fills)[:, None], axis=0)
    total = wanted.sum(1, keepdims=True)
    # Opposite targets that sum to 0 leave a rest of rounding.
    against = np.abs(total) <= 1e-12 * np.abs(wanted).sum(1, keepdims=True)
    # What could not be closed stays with those who held it.
    rows = np.arange(num_bars)[:, None]
    known = np.maximum.accumulate(np.where(against[:, 0], 0, rows), axis=0)[:, None]
    part_of = np.where(against, 0.0, wanted / np.where(against, 1.0, total))
    part_of = np.take_along_axis(part_of, known, axis=0)
    price = np.where(np.isnan(bars.close), 1.0, bars.close)
    changed = np.any(wanted != np.concatenate([wanted[:1] * np.nan, wanted[:-1]]), axis=1)
    since = np.maximum.accumulate(np.where(changed, rows, 0), axis=0)
    scale = equity[since] / np.take_along_axis(price, since, axis=0)
    opposite = np.where(against, wanted * scale[:, None], 0.0)
    last = np.concatenate([bars.open[:1], bars.close[:-1]])
    gap, body = np.nan_to_num(bars.open - last), np.nan_to_num(bars.close - bars.open)
    none = np.zeros((1, num_parts, num_assets))
    before, before_opposite = (np.concatenate([none, x[:-1]]) for x in (part_of, opposite))
    overnight = np.concatenate([none[:, 0], units[:-1]]) * gap
    intraday = _gained(bars, fills, units, gap + body) - overnight
    gained = before * overnight[:, None] + before_opposite * gap[:, None]
    gained += (part_of if at_open else before) * intraday[:, None]
    gained += (opposite if at_open else before_opposite) * body[:, None]
    return pd.DataFrame(gained.sum(2), bars.index, [part.name for part in parts])


def _in_force(bars: Bars, wanted: np.ndarray, fills: Fills) -> np.ndarray:
    """Return `[N, A]` the row of `wanted` `[N, P, A]` by which each asset is held at a close.

    An order that waits, or was too small, changes nothing. Parts that trade among each other send
    no order.
    """
    total = wanted.sum(1)
    ordered = np.zeros(total.shape, bool)
    target = (fills.reason == REASONS.index("target")) & (fills.moment != BEFORE)
    ordered[fills.row[target], fills.asset[target]] = True
    found, now = np.zeros(total.shape, int), np.zeros(total.shape[1], int)
    columns = np.arange(total.shape[1])
    for row in range(len(total)):
        size = np.abs(wanted[row]).sum(0) + np.abs(wanted[now, :, columns]).sum(1)
        same = np.abs(total[row] - total[now, columns]) <= 1e-12 * size
        now = np.where(ordered[row] | (same & bars.present[row]), row, now)
        found[row] = now
    return found


def _gained(bars: Bars, fills: Fills, units: np.ndarray, moved: np.ndarray) -> np.ndarray:
    """Return `[N, A]` what the market gave to the positions, of the capital.

    A bar's price change `moved` `[N, A]` on what was held before it; fills earn the rest of it.
    """
    gained = np.concatenate([np.zeros((1, bars.num_assets)), units[:-1]]) * moved
    # What ends before a bar, with its asset, earns nothing of it.
    row, asset = fills.row, fills.asset
    rest = np.where(fills.moment == BEFORE, moved[row, asset], bars.close[row, asset] - fills.price)
    np.add.at(gained, (row, asset), (fills.after - fills.before) * rest)
    return gained
