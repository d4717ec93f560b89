"""Fills, orders and round trips of a backtest, from what it traded in each bar.

An account is scale-free: its trace has weights and fractions of equity. Here they become units and
money per 1 of the capital. A trade is one round trip of one asset: it begins where the asset is
flat, and ends where it is flat again or changes sides. What is added or partly closed in between
belongs to it, at average prices. A fill that changes sides closes one trade and opens another.

The prices are those of the bars; slippage, spread and impact are costs. So the `pnl` of all trades,
plus what holding paid and charged (dividends, interest, borrow fees, funding, and losses forgiven
below the floor), is the final equity less 1.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pandas as pd

from nca_trader.config import AccountConfig
from nca_trader.envs.account.effects import AT_OPEN as BROKE_AT_OPEN
from nca_trader.envs.account.effects import INSIDE as BROKE_INSIDE
from nca_trader.evaluate import metrics
from nca_trader.evaluate.simulate import Trace
from nca_trader.strategies.strategy import BlendPart
from nca_trader.types import Bars

TRADING_COSTS = ("commission", "fixed_fee", "slippage", "spread", "impact", "liquidation")
# Why a fill happened. The first five are the codes of `AccountFill.reason`.
REASONS = (
    "target",
    "stop",
    "take profit",
    "trailing stop",
    "liquidated",
    "delisted",
    "bankrupt",
)
BY_LEVEL = REASONS[1:4]
LIQUIDATED, DELISTED, BANKRUPT = (REASONS.index(x) for x in ("liquidated", "delisted", "bankrupt"))
OPEN = "open"  # the reason of a trade that has not ended
# Of a bar, in order. A margin call comes before the orders of its moment.
MOMENTS = ("before", "open", "open", "inside", "close", "close", "after")
BEFORE, CALLED_AT_OPEN, AT_OPEN, INSIDE, CALLED_AT_CLOSE, AT_CLOSE, AFTER = range(7)
PARTICIPATION = 0.01  # of a bar's volume, that `capacity` is stated for
WITHIN = 0.95  # share of fills that stay below it


class Fills(NamedTuple):
    """K fills, sorted by asset and time; `[K]` each.

    Attributes:
      asset: column of the asset.
      row: of the bar.
      moment: of the bar, an index into `MOMENTS`.
      price: of the bar at that moment.
      before: units held before, per 1 of the capital; negative for a short position.
      after: units held after.
      cost: of the fill, as a fraction of the capital.
      reason: an index into `REASONS`.
    """

    asset: np.ndarray
    row: np.ndarray
    moment: np.ndarray
    price: np.ndarray
    before: np.ndarray
    after: np.ndarray
    cost: np.ndarray
    reason: np.ndarray


def units_held(bars: Bars, equity: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Compute the units `[N, A]` held at each close, per 1 of the capital; 0 where flat.

    Args:
      bars: the N bars that were traded.
      equity: `[N]` at each close, 1 before the first bar.
      weights: `[N, A]` held at each close.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        units = weights * equity[:, None] / bars.close
    # Before an asset's first bar its price is NaN, and nothing can be held.
    return np.where(metrics.positions(weights) != 0, units, 0.0)


def fills_in(bars: Bars, trace: Trace, rules: AccountConfig) -> Fills:
    """List what an account did as fills in units.

    Args:
      bars: the N bars that were traded.
      trace: of the account over these bars.
      rules: of the account.
    """
    effects, num_assets = trace.effects, bars.num_assets
    inside = bars.close
    if effects.inside is not None:
        reached = np.asarray(effects.inside.price)
        inside = np.where(np.isnan(reached), bars.close, reached)
    # Fractions of the start's equity, at the close before each bar.
    begun = np.concatenate([[1.0], np.exp(trace.log_equity[:-1])])
    parts = []
    for moment, fill, prices in (
        (CALLED_AT_OPEN, effects.called_at_open, bars.open),
        (AT_OPEN, effects.at_open, bars.open),
        (INSIDE, effects.inside, inside),
        (CALLED_AT_CLOSE, effects.called_at_close, bars.close),
        (AT_CLOSE, effects.at_close, bars.close),
    ):
        if fill is not None:
            # Less is rounding, e.g. of a buy for which there was no cash, and no order.
            some = np.flatnonzero(np.abs(fill.traded) > metrics.NO_WEIGHT)
            row, asset = np.divmod(some, num_assets)
            equity, price = begun[row] * (1.0 + fill.growth[row]), prices[row, asset]
            left = fill.left[row, asset]
            after = np.where(metrics.positions(left) != 0, left * equity / price, 0.0)
            reason = 0 if fill.reason is None else fill.reason[row, asset]
            if moment in (CALLED_AT_OPEN, CALLED_AT_CLOSE):
                reason = LIQUIDATED
            parts.append((asset, row, moment, price, after, fill.cost[row, asset] * equity, reason))
    if effects.gone is not None:
        # A delisted asset is paid out at its last price less the haircut, without a trade.
        row, asset = np.nonzero(effects.gone)
        price = bars.close[row - 1, asset] * (1.0 - rules.delist_haircut)
        parts.append((asset, row, BEFORE, price, 0.0, 0.0, DELISTED))
    for row in np.flatnonzero(effects.broke):
        price = {BROKE_AT_OPEN: bars.open, BROKE_INSIDE: inside}.get(effects.broke[row], bars.close)
        parts.append((np.arange(num_assets), row, AFTER, price[row], 0.0, 0.0, BANKRUPT))
    whole = [np.broadcast_arrays(*part) for part in parts]
    asset, row, moment, price, after, cost, reason = map(np.concatenate, zip(*whole, strict=True))
    # The last key counts most: by asset, then by time.
    order = np.lexsort((moment, row, asset))
    asset, after = asset[order], after[order]
    # What was held before a fill is what the fill before it left, of the same asset.
    before = np.concatenate([[0.0], after[:-1]])[: asset.size]
    before[1:][asset[1:] != asset[:-1]] = 0.0
    fills = Fills(
        asset, row[order], moment[order], price[order], before, after, cost[order], reason[order]
    )
    # Only a position that was held can end.
    return Fills(*(values[before != after] for values in fills))


def order_table(fills: Fills, bars: Bars, rules: AccountConfig) -> pd.DataFrame:
    """Return one row per fill of an order, in order of time.

    Columns: `time` of the bar, `symbol`, `side` ("buy" or "sell"), `at` ("open", "inside" or
    "close" of the bar), `size` in units, `price`, `notional` and `cost` as fractions of the
    capital, `reason`. Units are those of `rules.capital`, or of a capital of 1 without one.
    """
    # A delisting and a bankruptcy end positions without an order.
    kept = np.flatnonzero(~np.isin(fills.moment, (BEFORE, AFTER)))
    kept = kept[np.lexsort((fills.asset[kept], fills.moment[kept], fills.row[kept]))]
    f = Fills(*(values[kept] for values in fills))
    units = f.after - f.before
    return pd.DataFrame(
        {
            "time": bars.index[f.row],
            "symbol": np.array(bars.symbols, object)[f.asset],
            "side": np.where(units > 0, "buy", "sell"),
            "at": np.array(MOMENTS, object)[f.moment],
            "size": np.abs(units) * (rules.capital or 1.0),
            "price": f.price,
            "notional": np.abs(units) * f.price,
            "cost": f.cost,
            "reason": np.array(REASONS, object)[f.reason],
        }
    )


def trade_table(fills: Fills, bars: Bars, rules: AccountConfig) -> pd.DataFrame:
    """Return one row per trade, in order of entry.

    Columns: `symbol`; `entry`, `exit` times of the bars (NaT while it is open); `entry_price`,
    `exit_price`, averages over all units that entered and left, the last close for what is still
    held; `size`, units entered in all, negative for a short; `cost`, `pnl` net of it, as fractions
    of the capital; `return`, `pnl` over the largest notional held after a fill of the trade;
    `duration`; `bars`, held; `reason` of the exit, "open" for a trade that has not ended. Units are
    as in `order_table`.

    `pnl` is `size (exit_price - entry_price)`, over the capital, less `cost`. A position that is
    adjusted often has entered many times what it ever held.
    """
    units = fills.after - fills.before
    # From long to short in one fill, or the other way.
    flips = fills.before * fills.after < 0
    starts = (fills.after != 0) & ((fills.before == 0) | flips)
    count = int(starts.sum())
    # The number of the trade that each fill belongs to, or that it opens.
    own = np.cumsum(starts) - 1
    shrinks = np.abs(fills.after) < np.abs(fills.before)
    closing = np.where(flips, -fills.before, np.where(shrinks, units, 0.0))
    opening = units - closing
    # The part of a fill that closes belongs to the trade before, where the fill opens one as well.
    closed = own - starts

    def total(trade: np.ndarray, values: np.ndarray, where: np.ndarray) -> np.ndarray:
        return np.bincount(trade[where], values[where], minlength=count)

    opens, closes = opening != 0, closing != 0
    entered = total(own, np.abs(opening), opens)
    entered_money = total(own, np.abs(opening) * fills.price, opens)
    largest = np.zeros(count)
    holds = fills.after != 0
    np.maximum.at(largest, own[holds], (np.abs(fills.after) * fills.price)[holds])
    left = total(closed, np.abs(closing), closes)
    left_money = total(closed, np.abs(closing) * fills.price, closes)
    # What a fill cost is divided between the trade that it ends and the one that it begins.
    part = np.abs(closing) / np.abs(units)
    cost = total(own, fills.cost * (1.0 - part), opens) + total(closed, fills.cost * part, closes)
    first = np.flatnonzero(starts)
    asset, side = fills.asset[first], np.sign(fills.after[first])
    entry, last = fills.row[first], np.full(count, len(bars) - 1)
    reason = np.full(count, OPEN, object)
    ends = np.flatnonzero(closes & ((fills.after == 0) | flips))
    last[closed[ends]] = fills.row[ends]
    reason[closed[ends]] = np.array(REASONS, object)[fills.reason[ends]]
    still = reason == OPEN
    held = np.where(still, entered - left, 0.0)
    # An open position is valued at the last close, without a trade.
    out = left_money + held * bars.close[-1, asset] if count else left_money
    pnl = side * (out - entered_money) - cost
    entered_at, left_at = bars.time[entry], bars.time[last]
    columns = {
        "symbol": np.array(bars.symbols, object)[asset],
        "entry": entered_at,
        "exit": np.where(still, np.datetime64("NaT", "ns"), left_at),
        "entry_price": entered_money / entered,
        "exit_price": out / entered,
        "size": side * entered * (rules.capital or 1.0),
        "cost": cost,
        "pnl": pnl,
        "return": pnl / largest,
        "duration": left_at - entered_at,
        "bars": last - entry,
        "reason": reason,
    }
    order = np.lexsort((asset, entry))
    columns = {name: values[order] for name, values in columns.items()}
    for name in ("entry", "exit"):
        columns[name] = pd.DatetimeIndex(columns[name], tz="UTC")
    return pd.DataFrame(columns, copy=False)


def trade_metrics(trades: pd.DataFrame) -> dict[str, float]:
    """Compute the metrics of trades that have ended; NaN where there is none.

    Args:
      trades: as `trade_table` returns.

    Returns:
      trades: how many, with those still open. win_rate: share with a `pnl` above 0.
      profit_factor: gains over losses, sums of `pnl`; NaN without a loss. expectancy: mean `pnl`,
      a fraction of the capital. average_trade, best_trade, worst_trade: of `return`. sqn:
      `sqrt(n) mean(pnl) / std(pnl, ddof=1)`, the system quality number (Tharp 2006).
      trade_duration: mean number of bars.
    """
    ended = (trades["reason"] != OPEN).to_numpy()
    pnl, returns, held = (trades[x].to_numpy()[ended] for x in ("pnl", "return", "bars"))
    n = len(pnl)
    gains, losses = pnl[pnl > 0].sum(), -pnl[pnl < 0].sum()
    deviation = pnl.std(ddof=1) if n > 1 else 0.0
    return {
        "trades": float(len(trades)),
        **metrics.of_trades(n, (pnl > 0).sum(), gains, losses),
        "sqn": float(math.sqrt(n) * pnl.mean() / deviation) if deviation > 0 else math.nan,
        "average_trade": float(returns.mean()) if n else math.nan,
        "best_trade": float(returns.max()) if n else math.nan,
        "worst_trade": float(returns.min()) if n else math.nan,
        "trade_duration": float(held.mean()) if n else math.nan,
    }


def capacity(fills: Fills, bars: Bars, participation: float = PARTICIPATION) -> float:
    """Compute the capital at which 95% of the fills take at most a share of their bar's volume.

    `quantile_5%(participation * volume / units)`, units per 1 of the capital; in the currency of
    the prices.

    Args:
      fills: of the backtest.
      bars: the N bars that were traded. A bar whose volume is NaN is left out.
      participation: share of a bar's volume that a fill may take.

    Returns:
      NaN without fills, and where no volume is known.
    """
    kept = ~np.isin(fills.moment, (BEFORE, AFTER))
    units = np.abs(fills.after - fills.before)[kept]
    largest = participation * bars.volume[fills.row[kept], fills.asset[kept]] / units
    largest = largest[~np.isnan(largest)]
    return float(np.quantile(largest, 1.0 - WITHIN)) if largest.size else math.nan


def part_earnings(
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
