"""What a session came to, next to buying and holding: a table read from its journal alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nca_trader.evaluate import metrics
from nca_trader.paper.journal import read_events
from nca_trader.types import bars_per_year

OPEN, CLOSE = 0, 3  # places in a journal's bar
DAY = np.timedelta64(1, "D")


class Row(NamedTuple):
    """One column of the table: returns as fractions; turnover in equities per year; costs in money.

    Sharpe ratio and turnover are per year, and NaN for a session shorter than a day. Source of the
    metrics: `nca_trader.evaluate.metrics`.
    """

    total_return: float
    sharpe: float
    max_drawdown: float
    turnover: float
    costs: float


class SleeveRow(NamedTuple):
    """One sleeve of an account. share: of the capital. halted: the code of its halt, or None."""

    name: str
    share: float
    total_return: float
    sharpe: float
    max_drawdown: float
    value: float
    halted: str | None


class Summary(NamedTuple):
    """A session and buying and holding over the same bars.

    session, hold: the two columns. orders, fills, rejected, risks: events of the journal. bars:
    decided at. sleeves: those of the account.
    """

    session: Row
    hold: Row
    bars: int
    orders: int
    fills: int
    rejected: int
    risks: int
    sleeves: tuple[SleeveRow, ...] = ()

    def __str__(self) -> str:
        """Return the table."""
        names = ("return", "Sharpe ratio", "largest drawdown", "turnover per year", "costs paid")
        formats = ("{:+.2%}", "{:.2f}", "{:.2%}", "{:.2f}", "{:,.2f}")
        lines = [f"  {'':<18}{'session':>14}{'buy and hold':>14}"]
        for name, how, *values in zip(names, formats, self.session, self.hold, strict=True):
            cells = ("-" if math.isnan(value) else how.format(value) for value in values)
            lines.append(f"  {name:<18}" + "".join(f"{cell:>14}" for cell in cells))
        counts = f"{self.orders:,} orders, {self.fills:,} fills, {self.rejected:,} rejected bars"
        lines.append(f"  {counts}, {self.risks:,} risk events; {self.bars:,} bars")
        return "\n".join([*lines, *self._sleeves()])

    def _sleeves(self) -> list[str]:
        if not self.sleeves:
            return []
        names = ("share", "return", "Sharpe", "drawdown", "value")
        lines = [f"  {'sleeve':<18}" + "".join(f"{name:>12}" for name in names)]
        for row in self.sleeves:
            sharpe = "-" if math.isnan(row.sharpe) else f"{row.sharpe:.2f}"
            cells = (f"{row.share:.2%}", f"{row.total_return:+.2%}", sharpe)
            cells += (f"{row.max_drawdown:.2%}", f"{row.value:,.2f}")
            halted = "" if row.halted is None else f"  halted: {row.halted}"
            lines.append(f"  {row.name:<18}" + "".join(f"{cell:>12}" for cell in cells) + halted)
        return lines

    @property
    def body(self) -> dict[str, Any]:
        """The table for JSON."""
        rows = {"session": self.session._asdict(), "hold": self.hold._asdict()}
        return self._asdict() | rows | {"sleeves": [row._asdict() for row in self.sleeves]}


def summarise(journal: str | Path) -> Summary | None:
    """Compare a session with buy and hold, from its journal; None before the first decision.

    Buying and holding spreads the capital evenly over the assets that have a price where the first
    order fills, pays nothing, and never trades again. Costs are commissions, and how much worse
    fills were than the bar's price at which a backtest fills them; cash paid for holding is not
    among them. A fill of a live session has its venue's time, and belongs to the bar that was next
    when the journal got it.
    """
    started, counts = None, {"order_intent": 0, "fill": 0, "bar_rejected": 0, "risk": 0}
    fills: dict[int, list[dict[str, Any]]] = {}
    waiting: list[dict[str, Any]] = []  # fills whose bar is not there yet
    prices: dict[int, dict[str, list[float] | None]] = {}
    equity: dict[int, float] = {}
    worth: dict[int, float] = {}
    sleeves: list[dict[str, Any]] = []
    for event in read_events(journal):
        if event.kind in counts:
            counts[event.kind] += 1
        if event.kind == "run_started":
            started = event.body
        elif event.kind == "bar":
            prices[event.ts_event] = event.body
            if waiting:
                fills[event.ts_event], waiting = waiting, []
        elif event.kind == "snapshot":
            equity[event.ts_event] = event.body["equity"]
            worth[event.ts_event] = event.body["value"]
            sleeves.append(event.body.get("sleeves", {}))
        elif event.kind == "fill" and started is not None and "venue" in started:
            waiting.append(event.body)
        elif event.kind == "fill":
            fills.setdefault(event.ts_event, []).append(event.body)
    if started is None or not equity:
        return None
    at_close, live = started["rules"]["fill"] == "close", "venue" in started
    begun = next(iter(equity))
    hold, traded, costs, amount = [], [], 0.0, 0.0
    bought: dict[str, float] | None = None
    close: dict[str, float] = {}
    for ts in sorted(prices):
        seen = {symbol: row for symbol, row in prices[ts].items() if row is not None}
        # At the moment at which the session's own first order filled, so that both begin alike.
        price = {symbol: row[CLOSE if at_close else OPEN] for symbol, row in seen.items()}
        if bought is None and (ts >= begun if at_close else ts > begun):
            bought = close | price
        # What a live session ordered at a close and filled there is in the journal with this bar.
        market = dict(close) if at_close and live else close | price
        close |= {symbol: row[CLOSE] for symbol, row in seen.items()}
        paid, moved = _paid(fills.get(ts, ()), market)
        costs, amount = costs + paid, amount + moved
        if ts in equity:
            grown = [close[symbol] / paid for symbol, paid in (bought or {}).items()]
            hold.append(sum(grown) / len(grown) if grown else 1.0)
            # Of the worth at that bar: money of a year ago was another share of the account.
            traded.append(amount / worth[ts])
            amount = 0.0
    paid, moved = _paid(waiting, close)  # the next bar has not come
    costs, traded[-1] = costs + paid, traded[-1] + (amount + moved) / list(worth.values())[-1]
    times = np.array(sorted(equity), "datetime64[ns]")
    # Minutes scaled to a year give Sharpe ratios of several hundred.
    per_year = bars_per_year(times) if times[-1] - times[0] >= DAY else math.nan
    turnover = float(np.sum(traded)) / len(equity) * per_year
    kinds = ("order_intent", "fill", "bar_rejected", "risk")
    orders, filled, rejected, risks = (counts[kind] for kind in kinds)
    session = _row(np.array(list(equity.values())), per_year, turnover, costs)
    # It trades once its whole worth, which is a turnover of 1 over the session.
    held = _row(np.array(hold), per_year, per_year / len(hold), 0.0)
    rows = tuple(
        _sleeve(name, body["share"], [each[name] for each in sleeves], per_year)
        for name, body in started.get("sleeves", {}).items()
    )
    return Summary(session, held, len(equity), orders, filled, rejected, risks, rows)


def _sleeve(name: str, share: float, bodies: list[dict[str, Any]], per_year: float) -> SleeveRow:
    row = _row(np.array([body["equity"] for body in bodies]), per_year, 0.0, 0.0)
    last = bodies[-1]
    found = (row.total_return, row.sharpe, row.max_drawdown, last["value"], last["halted"])
    return SleeveRow(name, share, *found)


def _paid(fills: Iterable[dict[str, Any]], market: dict[str, float]) -> tuple[float, float]:
    """Return what fills cost against the market's prices, and the money that they moved."""
    costs = amount = 0.0
    for fill in fills:
        price = market.get(fill["symbol"], fill["price"])
        costs += fill["commission"] + fill["units"] * (fill["price"] - price)
        amount += abs(fill["units"]) * price
    return costs, amount


def _row(equity: np.ndarray, per_year: float, turnover: float, costs: float) -> Row:
    returns = metrics.simple_returns(equity)
    found = (metrics.total_return(returns), metrics.sharpe(returns, per_year))
    return Row(*found, metrics.max_drawdown(returns), turnover, costs)
