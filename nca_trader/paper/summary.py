"""What a session came to, next to buying and holding: a table read from its journal alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nca_trader.evaluate import metrics
from nca_trader.paper.journal import read_events
from nca_trader.paper.tally import Tally
from nca_trader.types import bars_per_year

DAY = np.timedelta64(1, "D")


class Column(NamedTuple):
    """One column of the table: returns as fractions; turnover in equities per year; costs in money.

    Sharpe ratio and turnover are per year, and NaN for a session shorter than a day. Source of the
    metrics: `nca_trader.evaluate.metrics`.
    """

    total_return: float
    sharpe: float
    max_drawdown: float
    turnover: float
    costs: float


class Summary(NamedTuple):
    """A session and buying and holding over the same bars.

    session, hold: the two columns. orders, fills, rejected, risks: events of the journal. bars:
    decided at.
    """

    session: Column
    hold: Column
    bars: int
    orders: int
    fills: int
    rejected: int
    risks: int

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
        return "\n".join(lines)

    @property
    def body(self) -> dict[str, Any]:
        """The table for JSON."""
        rows = {"session": self.session._asdict(), "hold": self.hold._asdict()}
        return self._asdict() | rows


def summarise(journal: str | Path) -> Summary | None:
    """Compare a session with buy and hold, from its journal; None before the first decision.

    Buying and holding spreads the capital evenly over the assets that have a price where the first
    order fills, pays nothing, and never trades again. Costs are commissions, and how much worse
    fills were than the bar's price at which a backtest fills them; cash paid for holding is not
    among them. A fill of a live session has its venue's time, and belongs to the bar that was next
    when the journal got it.
    """
    tally = Tally(read_events(journal))
    if not tally.equity:
        return None
    times = np.array(tally.times).astype("datetime64[s]").astype("datetime64[ns]")
    # Minutes scaled to a year give Sharpe ratios of several hundred.
    per_year = bars_per_year(times) if times[-1] - times[0] >= DAY else math.nan
    bars = len(tally.equity)
    session = _row(tally.equity, per_year, tally.turnover_sum / bars * per_year, tally.costs_sum)
    # It trades once its whole worth, which is a turnover of 1 over the session.
    held = _row(tally.hold, per_year, per_year / bars, 0.0)
    kinds = ("order_intent", "fill", "bar_rejected", "risk")
    orders, fills, rejected, risks = (tally.counts[kind] for kind in kinds)
    return Summary(session, held, bars, orders, fills, rejected, risks)


def _row(equity: Sequence[float], per_year: float, turnover: float, costs: float) -> Column:
    returns = metrics.simple_returns(np.array(equity))
    found = (metrics.total_return(returns), metrics.sharpe(returns, per_year))
    return Column(*found, metrics.max_drawdown(returns), turnover, costs)
