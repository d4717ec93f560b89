"""Compares a paper session with its backtest, and with buying and holding, from files alone.

The backtest's table is in the run folder, the journal anywhere. Equity is compared twice: as the
journal's snapshots have it, and as a plain sum of cash and units from the journal's fills and
closing prices, which shares no code with the account of either side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from nca_trader.errors import RunError, StateError
from nca_trader.evaluate import metrics
from nca_trader.paper.journal.journal import read_events, verify
from nca_trader.paper.journal.tally import Tally
from nca_trader.runs.folder import read_table
from nca_trader.runs.manifest import Run
from nca_trader.types import bars_per_year

DAY = np.timedelta64(1, "D")
TABLE = "backtest.parquet"
# Relative. Equity was the same bit for bit in every session measured, but nothing promises that the
# compiler fuses products and sums alike in an account alone and in a scan: docs/concepts/parity.md.
EQUITY_TOLERANCE = 1e-12
# Orders of `actions = "weights"` follow the logits continuously, and so round as they do; equity
# follows the orders. A choice among targets is the same or another.
WEIGHT_TOLERANCE = 1e-5  # absolute
WEIGHTS_EQUITY_TOLERANCE = 1e-6
LEDGER_TOLERANCE = 1e-9  # relative, the sum of fills against the backtest
LOGIT_TOLERANCE = 1e-3  # a window and a lattice differ by f32 rounding, about 1e-6


class Parity(NamedTuple):
    """The result of a comparison.

    bars: compared. orders, fills: in the journal. decisions_differ: bars with another target.
    first_difference: time of the first bar that differs, or "". equity_off: greatest relative
    difference of the snapshots; ledger_off: of the ledger of fills; logits_off: greatest
    absolute difference. missing: bars that one side has and the other lacks. continuous: whether
    orders are weights and not a choice among targets, so that they agree within rounding.
    """

    bars: int
    orders: int
    fills: int
    missing: int
    decisions_differ: int
    first_difference: str
    equity_off: float
    ledger_off: float
    logits_off: float
    continuous: bool = False

    @property
    def ok(self) -> bool:
        """Whether bars, decisions and equity are the same, and fills add up to that equity."""
        return (
            self.bars > 0
            and self.missing == 0
            and self.decisions_differ == 0
            and self.equity_off
            <= (WEIGHTS_EQUITY_TOLERANCE if self.continuous else EQUITY_TOLERANCE)
            and self.ledger_off <= LEDGER_TOLERANCE + (self.equity_off if self.continuous else 0.0)
            and self.logits_off <= LOGIT_TOLERANCE
        )

    @property
    def sentence(self) -> str:
        """The result in words."""
        verdict = "agree" if self.ok else "DO NOT AGREE"
        where = f", first at {self.first_difference}" if self.first_difference else ""
        quiet = "" if self.fills else " Nothing was traded, so no fill and no cost was compared."
        return (
            f"Backtest and paper replay {verdict} over {self.bars} bars, {self.orders} orders and "
            f"{self.fills} fills: {self.missing} bars on one side only, {self.decisions_differ} "
            f"decisions differ{where}; equity is off by {self.equity_off:.1e} at most, by "
            f"{self.ledger_off:.1e} from the fills alone, logits by {self.logits_off:.1e}.{quiet}"
        )


def compare(run_dir: str | Path, journal: str | Path) -> Parity:
    """Compare the backtest of a run folder with a journal.

    Args:
      run_dir: the run folder, with its backtest's table.
      journal: the journal's SQLite file.

    Raises:
      RunError: the folder has no backtest table, or one of other symbols.
      StateError: the journal is damaged, or holds no decision.
    """
    verify(journal)  # numbers of a damaged journal would agree or differ for no reason
    # From the disk on both sides: two values in memory could be one object.
    paper, tally = _paper_table(journal)
    table = _read_table(Path(run_dir) / TABLE, tally.symbols)
    names = [f"target:{s}" for s in tally.symbols]
    # Before paper's first decision, rows without a decision in the backtest either are not missing.
    idle = table[names].isna().all(axis=1)
    table = table.loc[~idle | (table.index >= paper.index[0])]
    both = table.index.intersection(paper.index)
    left, right = (side.loc[both, names].to_numpy(float) for side in (table, paper))
    # A target is NaN where nothing was ordered, on both sides.
    continuous = Run(run_dir, force_agent=True, allow_code=None).spec.num_actions == 0
    near = np.abs(left - right) <= (WEIGHT_TOLERANCE if continuous else 0.0)
    differs = ~(near | (np.isnan(left) & np.isnan(right))).all(axis=1)
    logits = [name for name in table.columns if str(name).startswith("logits:")]
    # A side without logits differs by infinity: a missing column must not pass for equal.
    kept = set(logits) <= set(paper.columns)
    off = table.loc[both, logits] - paper.loc[both, logits] if kept else np.array([np.inf])
    equity = table.loc[both, "equity"]
    return Parity(
        bars=len(both),
        orders=tally.counts["order_intent"],
        fills=tally.counts["fill"],
        missing=len(table.index.symmetric_difference(paper.index)),
        decisions_differ=int(differs.sum()),
        first_difference=str(both[int(differs.argmax())]) if differs.any() else "",
        equity_off=_greatest((paper.loc[both, "equity"] - equity) / equity),
        ledger_off=_greatest((paper.loc[both, "ledger"] - equity) / equity),
        logits_off=_greatest(off),
        continuous=continuous,
    )


def _read_table(path: Path, symbols: Sequence[str]) -> pd.DataFrame:
    if not path.is_file():
        raise RunError(f"{path}: there is no backtest to compare with; run the backtest first.")
    table = read_table(path)
    table = table.set_index("time") if "time" in table.columns else table
    missing = [s for s in symbols if f"target:{s}" not in table.columns]
    if missing or "equity" not in table.columns:
        raise RunError(f"{path}: has no column equity or target:{' target:'.join(missing)}.")
    index = pd.DatetimeIndex(table.index)
    # Parquet may store either; both sides are compared in nanoseconds and UTC.
    index = index.tz_localize("UTC") if index.tz is None else index.tz_convert("UTC")
    return table.set_axis(index.as_unit("ns"), axis=0)


def _paper_table(journal: str | Path) -> tuple[pd.DataFrame, Tally]:
    """Return the journal's decisions and equities by bar, columns named as the backtest's."""
    rows: dict[int, dict[str, Any]] = {}
    tally = Tally()
    for event in read_events(journal):
        tally.add(event)
        row = rows.setdefault(event.ts_event, {})
        if event.kind == "decision":
            for symbol, target, logits in zip(
                tally.symbols, event.body["target"], event.body["logits"], strict=True
            ):
                row[f"target:{symbol}"] = np.nan if target is None else target
                for i, value in enumerate(logits):
                    row[f"logits:{symbol}:{i}"] = np.nan if value is None else value
        elif event.kind == "snapshot":
            held = {symbol: units for symbol, units in tally.units.items() if units}
            worth = tally.cash + sum(tally.closes[symbol] * n for symbol, n in held.items())
            row |= {"equity": event.body["equity"], "ledger": worth / tally.started["capital"]}
    if tally.unread:
        raise StateError(f"{journal}: {tally.unread} events cannot be read; restore a copy.")
    if not tally.decision:
        raise StateError(f"{journal}: holds no decision; replay more bars into it.")
    table = pd.DataFrame.from_dict({ts: r for ts, r in rows.items() if "equity" in r}, "index")
    time = pd.to_datetime(table.index, unit="ns", utc=True).as_unit("ns")
    return table.set_axis(time, axis=0), tally


def _greatest(off: Any) -> float:
    """Return the greatest absolute value; infinity where one is NaN, 0 where there is none."""
    return float(np.nan_to_num(np.abs(np.asarray(off, float)), nan=np.inf).max(initial=0.0))


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
    costs, traded = tally.totals
    session = _row(tally.equity, per_year, traded / bars * per_year, costs)
    # It trades once its whole worth, which is a turnover of 1 over the session.
    held = _row(tally.hold, per_year, per_year / bars, 0.0)
    kinds = ("order_intent", "fill", "bar_rejected", "risk")
    orders, fills, rejected, risks = (tally.counts[kind] for kind in kinds)
    return Summary(session, held, bars, orders, fills, rejected, risks)


def _row(equity: Sequence[float], per_year: float, turnover: float, costs: float) -> Column:
    returns = metrics.simple_returns(np.array(equity))
    found = (metrics.total_return(returns), metrics.sharpe(returns, per_year))
    return Column(*found, metrics.max_drawdown(returns), turnover, costs)
