"""Costs and limits on paper: the broker's books, the account and the backtest say the same."""

import numpy as np
import pytest
from drawn import rich_bars

from nca_trader import Costs, backtest
from nca_trader.paper.journal.journal import read_events

CAPITAL = 1e5
SIZED = dict(lot=1.0, tick=0.05, min_notional=500.0, max_participation=0.2)
TRADING = Costs(commission=5e-4, slippage=2e-4, half_spread=3e-4, impact=0.02, fixed_fee=1.0)
HOLDING = Costs(
    commission=5e-4, borrow_fee=0.5, interest_lend=0.2, interest_borrow=0.7, funding=0.4,
    liquidation_fee=0.01,
)  # fmt: skip


def of_a_bank(events):
    """Equity at every bar by its time, from fills, payments and closes alone."""
    fills, paid = {}, {}
    for event in events:  # a bar's fills come after the bar itself
        if event.kind == "fill":
            fills.setdefault(event.ts_event, []).append(event.body)
        elif event.kind == "cash":
            paid[event.ts_event] = event.body["amount"]
    cash, units, close, equity = CAPITAL, {}, {}, {}
    for event in events:
        if event.kind != "bar":
            continue
        for fill in fills.get(event.ts_event, ()):
            cash -= fill["units"] * fill["price"] + fill["commission"]
            units[fill["symbol"]] = units.get(fill["symbol"], 0.0) + fill["units"]
        cash += paid.get(event.ts_event, 0.0)
        close |= {symbol: row[3] for symbol, row in event.body.items() if row is not None}
        value = cash + sum(held * close[symbol] for symbol, held in units.items())
        equity[event.ts_event] = value / CAPITAL
    return equity


CASES = {
    "lots, ticks, a least order and a share of the volume": (TRADING, SIZED, 1.0),
    "the same at the close, rebalanced": (
        TRADING, dict(fill="close", order="rebalance") | SIZED, 1.0,
    ),
    "holding, dividends, funding, a delisting": (
        HOLDING, dict(delist_after=4, delist_haircut=0.3), 1.0,
    ),
    "margin and borrowed money": (
        HOLDING, dict(borrow=True, maintenance_margin=0.3, max_gross=np.inf, max_net=2.5), 3.0,
    ),
    "margin at the close": (
        HOLDING, dict(borrow=True, maintenance_margin=0.3, max_gross=np.inf, fill="close"), 3.0,
    ),
}  # fmt: skip


@pytest.mark.heavy
@pytest.mark.parametrize("case", CASES)
@pytest.mark.few(2)
def test_paper_is_the_backtest_under_every_limit(tmp_path, stage, case):
    """A session halts where its books differ from the account by 1e-9: so three agree here."""
    costs, limits, size = CASES[case]
    limits = dict(max_gross=1.0, capital=CAPITAL) | limits
    bars = rich_bars(np.random.default_rng(8), 150, 2, missing=0.15)
    agent = stage.agent(
        symbols=bars.symbols, costs=costs, targets=(-0.5 * size, 0.0, 0.6 * size), **limits
    )
    path = tmp_path / "paper.db"
    result = stage.replay(path, bars, agent, capital=CAPITAL)
    assert result["fills"] > 15
    begin = stage.first_decision
    rules = {"order": "on_change", "start": str(bars.time[begin]), **limits}
    expected = backtest(bars, stage.decided(path, bars), costs, **rules)
    events = list(read_events(path))
    snapshots = [event.body["equity"] for event in events if event.kind == "snapshot"]
    np.testing.assert_allclose(snapshots, expected.equity, rtol=1e-12)
    # From fills, payments and closes alone, as a bank would count.
    counted = of_a_bank(events)
    times = [event.ts_event for event in events if event.kind == "snapshot"]
    np.testing.assert_allclose([counted[t] for t in times], expected.equity, rtol=1e-9)
    went = expected.costs.amount
    if "margin" in case:
        assert went["liquidation"] < 0 and went["interest"] != 0
    elif "delisting" in case:
        assert all(went[item] != 0 for item in ("dividends", "delisting", "funding", "borrow_fee"))
    else:
        assert all(went[item] < 0 for item in ("fixed_fee", "impact", "spread", "slippage"))
        fills = [event.body for event in events if event.kind == "fill"]
        assert all(fill["units"] == round(fill["units"]) for fill in fills)
        ticks = np.array([fill["price"] / 0.05 for fill in fills])
        np.testing.assert_allclose(ticks, np.round(ticks), atol=1e-6)
        assert all(abs(f["units"] * f["price"]) > 450.0 for f in fills)
