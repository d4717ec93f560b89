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

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from nca_trader.envs.account.costs import Trade, own_rates
from nca_trader.envs.account.state import Flows, Quote, Rules, bars_missing, worsening
from nca_trader.evaluate import metrics
from nca_trader.evaluate.simulate import Trace
from nca_trader.numerics import float64_on_cpu
from nca_trader.types import SECONDS_PER_YEAR, Bars, Costs

TRADING_COSTS = ("commission", "fixed_fee", "slippage", "spread", "impact", "liquidation")
# Why a fill happened. The first five are the codes of `Exit.reason`.
REASONS = (
    "target",
    "stop",
    "take profit",
    "trailing stop",
    "liquidated",
    "delisted",
    "bankrupt",
)
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


def fills_of(bars: Bars, trace: Trace, costs: Costs, rules: Rules) -> Fills:
    """Find every fill of a backtest.

    Args:
      bars: the N bars that were traded.
      trace: of the account over these bars.
      costs: of the account; they divide the cost of a bar among its fills.
      rules: of the account.
    """
    flows, equity = trace.flows, np.exp(np.asarray(trace.log_equity))
    held = units_held(bars, equity, np.asarray(trace.weight))
    # An account begins flat.
    held_before = np.vstack([np.zeros((1, bars.num_assets)), held[:-1]])
    at_open, at_close = np.asarray(trace.at_open), np.asarray(trace.at_close)
    none = np.zeros(at_open.shape)
    exited, exit_price, exit_reason = none, none, none.astype(np.int8)
    if trace.left is not None:
        exited, exit_price, exit_reason = trace.left[:3]
    forced = (none, none) if trace.forced is None else trace.forced
    broke = equity <= rules.floor * (1.0 + 1e-9)
    # Only the bar of the bankruptcy: nothing is held after it.
    broke &= ~np.concatenate([[False], broke[:-1]])
    any_trade = np.any([x != 0 for x in (at_open, exited, at_close, *forced)], axis=0)
    # A position that ended without a trade was delisted.
    delisted = bars_missing(bars.present) == (rules.delist_after or -1)
    gone = (held_before != 0) & (held == 0) & ~any_trade & (delisted | ~broke[:, None])
    lost = broke[:, None] & ((held_before != 0) | any_trade) & ~delisted
    found = {
        BEFORE: gone,
        CALLED_AT_OPEN: forced[0] != 0,
        AT_OPEN: at_open != 0,
        INSIDE: exited != 0,
        CALLED_AT_CLOSE: forced[1] != 0,
        AT_CLOSE: at_close != 0,
        AFTER: lost,
    }
    # Few bars have a fill, so the rest of the work is on these rows alone.
    rows = np.flatnonzero((gone | any_trade | lost).any(axis=1))
    found = {moment: here[rows] for moment, here in found.items()}
    # A delisted asset is closed at its last price less the haircut, without a trade.
    written_off = _before_gap(bars, rows) * (1.0 - rules.delist_haircut)
    prices = {
        BEFORE: written_off,
        CALLED_AT_OPEN: bars.open[rows],
        AT_OPEN: bars.open[rows],
        INSIDE: exit_price[rows],
        CALLED_AT_CLOSE: bars.close[rows],
        AT_CLOSE: bars.close[rows],
        AFTER: _price_of_bankruptcy(bars, held_before, trace, costs, rules, rows),
    }
    reasons = {
        BEFORE: DELISTED,
        CALLED_AT_OPEN: LIQUIDATED,
        AT_OPEN: 0,
        INSIDE: exit_reason[rows],
        CALLED_AT_CLOSE: LIQUIDATED,
        AT_CLOSE: 0,
        AFTER: BANKRUPT,
    }
    parts = []
    for moment, here in found.items():
        k, asset = np.nonzero(here)
        reason = np.broadcast_to(reasons[moment], here.shape)[k, asset]
        parts.append((asset, rows[k], np.full(k.size, moment), prices[moment][k, asset], reason))
    asset, row, moment, price, reason = (np.concatenate(x) for x in zip(*parts, strict=True))
    # The last key counts most: by asset, then by time.
    order = np.lexsort((moment, row, asset))
    asset, row, moment, price, reason = (x[order] for x in (asset, row, moment, price, reason))
    begun = _equity_at_open(bars, equity, held_before, flows, costs, rules, row)
    with np.errstate(invalid="ignore"):
        bought = at_open[row, asset] * begun / bars.open[row, asset]
    after = _units_after(asset, row, moment, held, bought)
    # What was held before a fill is what the fill before it left, of the same asset.
    same = np.concatenate([[False], asset[1:] == asset[:-1]])[: asset.size]
    before = np.where(same, np.concatenate([[0.0], after[:-1]])[: asset.size], 0.0)
    # A rebalance of nothing: the dust that a closed position leaves is traded and stays dust.
    some = before != after
    fills = Fills(asset, row, moment, price, before, after, np.zeros(row.size), reason)
    fills = Fills(*(values[some] for values in fills))
    return fills._replace(cost=_cost_of_each(fills, bars, flows, costs, rules, begun[some]))


def _before_gap(bars: Bars, rows: np.ndarray) -> np.ndarray:
    """Return `[K, A]` the closes before `rows` `[K]`; the first bar's own open before that."""
    return np.where((rows > 0)[:, None], bars.close[rows - 1], bars.open[rows])


def _price_of_bankruptcy(
    bars: Bars, held: np.ndarray, trace: Trace, costs: Costs, rules: Rules, rows: np.ndarray
) -> np.ndarray:
    """Return `[K, A]` the prices that end an account which is bankrupt in one of `rows` `[K]`."""
    equity = np.exp(np.asarray(trace.log_equity))
    begun = _equity_at_open(bars, equity, held, trace.flows, costs, rules, rows)
    # An account that the opening bankrupts does not see the close.
    at_open = begun * (1.0 - np.asarray(trace.cost)[rows]) <= rules.floor
    end = bars.close[rows]
    if trace.left is not None:  # on the way to its level
        level = np.asarray(trace.left.price)[rows]
        end = np.where(np.isnan(level), end, level)
    return np.where(at_open[:, None], bars.open[rows], end)


def _equity_at_open(
    bars: Bars,
    equity: np.ndarray,
    held: np.ndarray,
    flows: Flows,
    costs: Costs,
    rules: Rules,
    rows: np.ndarray,
) -> np.ndarray:
    """Return `[K]` equity before the trades at the opens of `rows` `[K]`.

    It is that of the close before, and what happened since.
    """

    def paid(*names: str) -> np.ndarray:
        return sum((np.asarray(getattr(flows, x))[rows] for x in names), np.zeros(rows.size))

    gained = np.nansum(held[rows] * (bars.open[rows] - _before_gap(bars, rows)), axis=1)
    gained += paid("dividends", "delisting")
    if rules.fill == "next_open":
        # What time costs is charged before the fill, the bars' own funding at the close.
        gained += paid("interest", "borrow_fee")
        seconds = np.diff(bars.time, prepend=bars.time[:1]) / np.timedelta64(1, "s")
        years = seconds[rows] / SECONDS_PER_YEAR
        value = np.nansum(held[rows] * bars.open[rows], axis=1) + paid("delisting")
        gained -= years * costs.funding * value
    return np.where(rows > 0, equity[rows - 1], 1.0) + gained


def _units_after(
    asset: np.ndarray, row: np.ndarray, moment: np.ndarray, held: np.ndarray, bought: np.ndarray
) -> np.ndarray:
    """Return `[K]` the units held after each fill, which are sorted by asset and time.

    Args:
      asset: of each fill.
      row: of each fill.
      moment: of each fill.
      held: `[N, A]` units at each close.
      bought: `[K]` units that were traded at the open of the fill's bar.
    """
    after = held[row, asset]
    # An order alone leaves a position.
    after[(moment != AT_OPEN) & (moment != AT_CLOSE)] = 0.0
    # Of several fills in one bar the last one leaves what is held at the close. What an earlier
    # fill at the open leaves follows from its size.
    followed = np.zeros(row.size, bool)
    followed[:-1] = (row[1:] == row[:-1]) & (asset[1:] == asset[:-1])
    k = np.flatnonzero(followed & (moment == AT_OPEN))
    t, i = row[k], asset[k]
    start, change = np.where(t > 0, held[t - 1, i], 0.0), bought[k]
    # The trade that closes a position leaves rounding and no position.
    dust = np.abs(start + change) <= 1e-9 * np.maximum(np.abs(start), np.abs(change))
    after[k] = np.where(dust, 0.0, start + change)
    return after


def _cost_of_each(
    fills: Fills, bars: Bars, flows: Flows, costs: Costs, rules: Rules, begun: np.ndarray
) -> np.ndarray:
    """Divide the cost of trading of each bar among its fills, `[K]`; `begun` is equity before.

    A bar's cost is divided in proportion to what the fills cost by themselves. They differ where
    cash cut a buy: its impact is that of the whole order.
    """
    units, row, asset = fills.after - fills.before, fills.row, fills.asset
    charged = [np.asarray(getattr(flows, name)) for name in TRADING_COSTS]
    # Flows are what the account received, so what it paid is below 0.
    total = -np.sum([paid[row] for paid in (*charged, *flows.own)], axis=0)
    money = rules.capital is not None
    quoted = bars.half_spread
    quote = Quote(
        present=np.ones(row.size, bool),
        price=fills.price,
        volume=np.nan_to_num(bars.volume[row, asset]) if money else None,
        half_spread=None if quoted is None else np.nan_to_num(quoted[row, asset]),
    )
    # Costs of the user's own see all assets at once, and are added below.
    listed = dataclasses.replace(costs, own=None, own_scale=None)
    worse = worsening(units * (rules.capital or 1.0), quote, listed, rules.tick)[0]
    if costs.own:
        worse = worse + _own_of_each(fills, bars, costs, rules, begun)
    size = np.abs(units) * fills.price
    own = size * (worse + costs.commission * (1.0 + np.sign(units) * worse))
    # Without a capital a fee in money has no size as a fraction, and none is charged.
    own += costs.fixed_fee / (rules.capital or math.inf)
    own += np.where(fills.reason == LIQUIDATED, costs.liquidation_fee * size, 0.0)
    # Nothing is charged for a position that ends without a trade.
    own = np.where(np.isin(fills.moment, (BEFORE, AFTER)), 0.0, own)
    bar = np.bincount(row, own, minlength=len(bars))
    with np.errstate(invalid="ignore", divide="ignore"):
        share = own / bar[row]
    return np.where(bar[row] > 0.0, share * total, 0.0)


def _own_of_each(
    fills: Fills, bars: Bars, costs: Costs, rules: Rules, begun: np.ndarray
) -> np.ndarray:
    """Return `[K]` your own costs of each fill by itself, as a fraction of its price."""
    k, row = np.arange(fills.row.size), fills.row
    traded, price = np.zeros((2, k.size, bars.num_assets))
    traded[k, fills.asset] = (fills.after - fills.before) * fills.price / begun
    # Assets that did not trade in this fill are shown at their open.
    price[:] = np.nan_to_num(bars.open[row], nan=1.0)
    price[k, fills.asset] = fills.price
    quoted = np.zeros_like(price) if bars.half_spread is None else bars.half_spread[row]
    money = None if rules.capital is None else rules.capital * begun
    trade = Trade(traded, price, np.nan_to_num(bars.volume[row]), np.nan_to_num(quoted), money)
    with float64_on_cpu():
        rates = jax.vmap(lambda one: sum(own_rates(one, costs)))(jax.tree.map(jnp.asarray, trade))
    return np.asarray(rates)[k, fills.asset]


def order_table(fills: Fills, bars: Bars, rules: Rules) -> pd.DataFrame:
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


def trade_table(fills: Fills, bars: Bars, rules: Rules) -> pd.DataFrame:
    """Return one row per trade, in order of entry.

    Columns: `symbol`; `entry`, `exit` times of the bars (NaT while it is open); `entry_price`,
    `exit_price`, averages over its fills, the last close for what is still held; `size`, units
    entered in all, negative for a short; `cost`, `pnl` net of it, as fractions of the capital;
    `return`, `pnl` over the money entered; `duration`; `bars`, held; `reason` of the exit, "open"
    for a trade that has not ended. Units are as in `order_table`.
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
    # What is still held counts at the last close, which is a price and no trade.
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
        "return": pnl / entered_money,
        "duration": left_at - entered_at,
        "bars": last - entry,
        "reason": reason,
    }
    order = np.lexsort((asset, entry))
    columns = {name: values[order] for name, values in columns.items()}
    for name in ("entry", "exit"):
        columns[name] = pd.DatetimeIndex(columns[name], tz="UTC")
    return pd.DataFrame(columns, copy=False)


def no_trades() -> pd.DataFrame:
    """Return the table of trades without a row."""
    columns = "symbol entry exit entry_price exit_price size cost pnl return duration bars reason"
    return pd.DataFrame(columns=columns.split())


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
