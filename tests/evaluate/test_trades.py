"""Trades, orders and their metrics against a ledger of cash and units that logs what it books."""

import collections
import csv
import gzip
import math
import time
import types

import ledger
import numpy as np
import pandas as pd
import pytest

from nca_trader.envs.account.state import Flows, Rules
from nca_trader.evaluate import trades
from nca_trader.evaluate.trades import REASONS
from nca_trader.types import Bars, Costs

Exit = collections.namedtuple("Exit", ("traded", "price", "reason"))

HOLDING = ("dividends", "interest", "borrow_fee", "funding", "ruin")
DEAR = Costs(
    commission=2e-3,
    slippage=1e-3,
    half_spread=5e-4,
    impact=0.05,
    fixed_fee=1.0,
    borrow_fee=0.02,
    interest_lend=0.03,
    interest_borrow=0.06,
    liquidation_fee=0.01,
)


class Logging(ledger.Ledger):
    """A ledger that logs every booking, and equity before the bookings of a moment."""

    def __init__(self, *args):
        super().__init__(*args)
        self.log, self.moment, self.bar = [], None, 0
        self.by_bar, self.equity_at = [], collections.defaultdict(dict)

    def at(self, moment, price):
        self.moment = moment
        self.equity_at[self.bar].setdefault(moment, self.equity(price))

    def book(self, i, units, price, paid, spread, impact, extra=0.0):
        before = self.went.copy()
        super().book(i, units, price, paid, spread, impact, extra)
        if units:
            cost = sum(before[x] - self.went[x] for x in trades.TRADING_COSTS)
            self.log.append((self.bar, self.moment, i, units, price, cost))


def lived(monkeypatch, bars, targets, costs, rules):
    """Runs the logging ledger; returns it, with equity and its trace."""
    books = []

    class Here(Logging):
        def __init__(self, *args):
            super().__init__(*args)
            books.append(self)

        def margin(self, price, present, volume, quoted):
            self.at("open" if price is bars_open[self.bar] else "close", price)
            super().margin(price, present, volume, quoted)

        def fill(self, price, present, volume, quoted):
            self.at("open" if price is bars_open[self.bar] else "close", price)
            super().fill(price, present, volume, quoted)

        def order(self, target):
            super().order(target)
            # With fills at the next open nothing follows in this bar.
            self.by_bar.append(self.went.copy())
            self.bar += 1

    # One array object per bar, so that a price says which moment it is of.
    bars_open = list(bars.open)
    view = _Rows(bars, bars_open)
    monkeypatch.setattr(ledger, "Ledger", Here)
    equity, weights, book = ledger.live(view, targets, costs, rules)
    shape = bars.close.shape
    traded = {moment: np.zeros(shape) for moment in ("open", "close")}
    for bar, moment, i, units, price, _ in book.log:
        traded[moment][bar, i] += units * price / book.equity_at[bar][moment]
    names = Flows._fields[:-1]  # without costs of one's own
    went = np.array([[so_far[name] for name in names] for so_far in book.by_bar])
    went = np.diff(went, axis=0, prepend=0.0) / book.start
    return book, equity, trace(equity, weights, traded["open"], traded["close"], Flows(*went.T))


def trace(equity, weights, at_open, at_close=None, flows=None, left=None):
    """What a backtest records, as far as trades need it."""
    if flows is None:
        flows = Flows(*np.zeros((len(Flows._fields) - 1, len(equity))))
    if at_close is None:
        at_close = np.zeros_like(at_open)
    given = {"at_open": at_open, "at_close": at_close, "flows": flows, "left": left}
    return types.SimpleNamespace(log_equity=np.log(equity), weight=weights, **given)


class _Rows:
    """Bars whose rows of `open` are the same objects each time."""

    def __init__(self, bars, rows):
        self._bars, self.open = bars, rows

    def __getattr__(self, name):
        return getattr(self._bars, name)

    def __len__(self):
        return len(self._bars)


def round_trips(log, num_assets, last_close, start):
    """Round trips of the log, one unit of bookkeeping at a time."""
    done = []
    for asset in range(num_assets):
        trip, held = None, 0.0
        for bar, _, i, units, price, cost in log:
            if i != asset:
                continue
            parts = [units]
            if held * units < 0 and abs(units) > abs(held) * (1 + 1e-9):
                parts = [-held, units + held]
            for part in parts:
                if trip is None:
                    trip = {"asset": asset, "entry": bar, "side": np.sign(part), "in": 0.0}
                    trip |= {"in_money": 0.0, "out_money": 0.0, "cost": 0.0, "out": 0.0}
                way = "in" if part * trip["side"] > 0 else "out"
                trip[way] += abs(part)
                trip[f"{way}_money"] += abs(part) * price
                trip["cost"] += cost * abs(part / units)
                held += part
                if abs(held) < 1e-9 * trip["in"]:
                    trip["exit"], held = bar, 0.0
                    done.append(trip)
                    trip = None
        if trip is not None:
            trip["out_money"] += abs(held) * last_close[asset]
            trip["exit"] = None
            done.append(trip)
    for trip in done:
        gain = trip["side"] * (trip["out_money"] - trip["in_money"]) - trip["cost"]
        trip["pnl"] = gain / start
    return sorted(done, key=lambda trip: (trip["entry"], trip["asset"]))


CASES = {
    "long and short, no costs": (Costs(), Rules(), "flips", {}),
    "adds and partial closes, commission": (
        Costs(commission=1e-3),
        Rules(order="rebalance"),
        "steps",
        {},
    ),
    "every cost, several assets": (
        DEAR,
        Rules(order="rebalance", capital=1e5, borrow=True),
        "steps",
        {"rich": True},
    ),
    "lots and a margin that is called": (
        DEAR,
        Rules(borrow=True, maintenance_margin=0.3, capital=1e5, lot=1.0),
        "leverage",
        {"spread": 0.06},
    ),
    "delisting with a haircut": (
        Costs(commission=1e-3),
        Rules(delist_after=3, delist_haircut=0.4),
        "flips",
        {"rich": True},
    ),
    "bankruptcy": (Costs(commission=1e-3), Rules(borrow=True), "leverage", {"spread": 0.12}),
}


def drawn(kind, rng, length, assets):
    if kind == "flips":
        w = rng.choice([-0.3, 0.0, 0.3, np.nan], (length, assets), p=[0.1, 0.1, 0.1, 0.7])
    elif kind == "steps":
        w = rng.choice([-0.2, 0.0, 0.1, 0.3, np.nan], (length, assets), p=[0.1, 0.2, 0.2, 0.1, 0.4])
    else:
        w = rng.choice([-2.0, 0.0, 2.0, np.nan], (length, assets), p=[0.05, 0.02, 0.13, 0.8])
    return w


@pytest.mark.parametrize("case", CASES)
def test_trades_are_those_of_a_ledger_and_add_up_to_final_equity(case, monkeypatch):
    costs, rules, kind, market = CASES[case]
    rng = np.random.default_rng(len(case))
    draw = ledger.rich_bars if market.get("rich") else ledger.random_bars
    bars = draw(rng, 300, 3, **({"spread": market["spread"]} if "spread" in market else {}))
    targets = drawn(kind, rng, 300, 3)
    book, equity, found = lived(monkeypatch, bars, targets, costs, rules)
    fills = trades.fills_of(bars, found, costs, rules)
    table = trades.trade_table(fills, bars, rules)
    held = sum(float(getattr(found.flows, name).sum()) for name in HOLDING)
    assert table["pnl"].sum() + held == pytest.approx(equity[-1] - 1.0, abs=1e-11)
    assert len(table) > 5
    ended = {"delisting with a haircut": "delisted", "bankruptcy": "bankrupt"}.get(case)
    if ended is not None:  # the ledger does not book an end without a trade
        assert ended in set(table["reason"])
        return
    expected = round_trips(book.log, 3, bars.close[-1], book.start)
    assert len(table) == len(expected)
    for row, trip in zip(table.itertuples(), expected, strict=True):
        assert row.symbol == bars.symbols[trip["asset"]]
        assert row.entry == bars.index[trip["entry"]]
        assert (trip["exit"] is None) == (row.reason == "open") == pd.isna(row.exit)
        if trip["exit"] is not None:
            assert row.exit == bars.index[trip["exit"]]
        assert np.sign(row.size) == trip["side"]
        assert abs(row.size) == pytest.approx(trip["in"] * (rules.capital or 1) / book.start)
        assert row.entry_price == pytest.approx(trip["in_money"] / trip["in"], rel=1e-9)
        assert row.exit_price == pytest.approx(trip["out_money"] / trip["in"], rel=1e-9)
        assert row.pnl == pytest.approx(trip["pnl"], abs=1e-10)
        assert row.cost == pytest.approx(trip["cost"] / book.start, rel=1e-9, abs=1e-12)
    orders = trades.order_table(fills, bars, rules)
    assert len(orders) == len([line for line in book.log])
    assert orders["cost"].sum() == pytest.approx(table["cost"].sum(), rel=1e-9)
    assert orders["time"].is_monotonic_increasing


def hand_bars(open_, close):
    open_, close = (np.asarray(x, float)[:, None] for x in (open_, close))
    time = np.datetime64("2024-01-01", "ns") + np.arange(len(open_)) * np.timedelta64(1, "D")
    high, low = np.maximum(open_, close), np.minimum(open_, close)
    fields = {"open": open_, "high": high, "low": low, "close": close}
    return Bars(
        time=time,
        symbols=("A",),
        volume=np.full(open_.shape, 1000.0),
        present=np.ones(open_.shape, bool),
        **fields,
    )


def test_a_position_that_is_stopped_in_the_bar_of_its_entry_is_a_trade_of_its_own():
    bars = hand_bars([100, 100, 90, 95], [100, 94, 96, 99])
    # Bought with everything at the open of bar 1, stopped at 95 in the same bar; bought again at
    # the open of bar 2, and held.
    equity = np.array([1.0, 0.95, 0.95 * 96 / 90, 0.95 * 99 / 90])
    column = np.array([[0.0], [1.0], [1.0], [0.0]])
    exited = np.array([[0.0], [-1.0], [0.0], [0.0]])
    left = Exit(exited, np.where(exited != 0, 95.0, np.nan), (exited != 0).astype(np.int8))
    weights = np.array([[0.0], [0.0], [1.0], [1.0]])
    fills = trades.fills_of(bars, trace(equity, weights, column, left=left), Costs(), Rules())
    table = trades.trade_table(fills, bars, Rules())
    assert table["reason"].tolist() == ["stop", "open"]
    assert table["entry_price"].tolist() == [100.0, 90.0]
    assert table["exit_price"].tolist() == [95.0, 99.0]
    np.testing.assert_allclose(table["return"], [-0.05, 0.1], atol=1e-14)
    np.testing.assert_allclose(table["pnl"].sum(), equity[-1] - 1.0, atol=1e-14)
    assert table["bars"].tolist() == [0, 1] and pd.isna(table["exit"][1])
    orders = trades.order_table(fills, bars, Rules())
    assert orders["at"].tolist() == ["open", "inside", "open"]
    assert orders["side"].tolist() == ["buy", "sell", "buy"]
    # Sizes 0.01, 0.01 and 0.95 / 90 per 1 of the capital, volume 1,000, at most 1% of it.
    smallest = np.quantile([1000.0, 1000.0, 10.0 * 90 / 0.95], 0.05)
    assert trades.capacity(fills, bars) == pytest.approx(smallest, rel=1e-12)


def test_metrics_of_trades_by_hand():
    table = pd.DataFrame(
        {
            "pnl": [0.02, -0.01, 0.03, 0.0, 9.0],
            "return": [0.2, -0.1, 0.3, 0.0, 9.0],
            "bars": [1, 2, 3, 6, 99],
            "reason": ["target", "stop", "target", "target", "open"],
        }
    )
    found = trades.trade_metrics(table)
    assert found["trades"] == 5 and found["win_rate"] == 0.5
    assert found["profit_factor"] == pytest.approx(5.0)
    assert found["expectancy"] == pytest.approx(0.01)
    deviation = math.sqrt((0.01**2 + 0.02**2 + 0.02**2 + 0.01**2) / 3)
    assert found["sqn"] == pytest.approx(2.0 * 0.01 / deviation)
    assert found["average_trade"] == pytest.approx(0.1)
    assert (found["best_trade"], found["worst_trade"]) == (0.3, -0.1)
    assert found["trade_duration"] == 3.0
    nothing = trades.trade_metrics(table[:0])
    assert nothing.pop("trades") == 0.0 and all(math.isnan(x) for x in nothing.values())


def test_a_hundred_thousand_bars_with_thousands_of_trades_take_a_fraction_of_a_second():
    rng = np.random.default_rng(0)
    bars = ledger.random_bars(rng, 100_000, 1, spread=0.001, unit="m")
    side = np.repeat(rng.choice([-1.0, 0.0, 1.0], 5_000), 20)[:, None]
    change = np.diff(side, axis=0, prepend=0.0)
    found = trace(np.ones(100_000), side, change)
    begun = time.perf_counter()
    fills = trades.fills_of(bars, found, Costs(), Rules())
    table = trades.trade_table(fills, bars, Rules())
    spent = time.perf_counter() - begun
    assert len(table) > 2_000
    # About 0.05 s; a loop over bars would take seconds.
    assert spent < 1.0


def test_the_reasons_have_the_codes_of_the_trace():
    assert REASONS[:4] == ("target", "stop", "take profit", "trailing stop")


def engine_trades(shared, name):
    with gzip.open(shared / "expected" / f"{name}_trades.csv.gz", "rt") as file:
        return [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]


def test_trades_equal_those_of_backtesting_py(shared):
    """Of its file: sizes, bars and prices give equity by hand; its trades must come back."""
    theirs = engine_trades(shared, "bt_GOOG_sma10_20_longonly_nocost")
    with gzip.open(
        shared / "expected" / "bt_GOOG_sma10_20_longonly_nocost_equity.csv.gz", "rt"
    ) as file:
        equity = np.array([float(row["Equity"]) for row in csv.DictReader(file)]) / 10_000
    n = len(equity)
    open_, close, units = np.full(n, np.nan), np.full(n, np.nan), np.zeros(n + 1)
    for trade in theirs:
        entry, exit_ = int(trade["EntryBar"]), int(trade["ExitBar"])
        open_[entry], open_[exit_] = trade["EntryPrice"], trade["ExitPrice"]
        units[entry:exit_] = trade["Size"] / 10_000
        before = equity[entry - 1]
        held = slice(entry, exit_)
        close[held] = trade["EntryPrice"] + (equity[held] - before) / units[entry]
    units = units[:n]
    # Where nothing is held any price will do.
    close = pd.Series(close).ffill().bfill().to_numpy()
    open_ = np.where(np.isnan(open_), close, open_)
    bars = hand_bars(open_, close)
    change = np.diff(units, prepend=0.0)
    at_open = change * open_ / np.concatenate([[1.0], equity[:-1]])
    found = trace(equity, (units * close / equity)[:, None], at_open[:, None])
    fills = trades.fills_of(bars, found, Costs(), Rules())
    ours = trades.trade_table(fills, bars, Rules(capital=10_000.0))
    ours = ours[ours["reason"] != "open"].reset_index()
    assert len(ours) == len(theirs)
    for k, trade in enumerate(theirs):
        assert ours["entry"][k] == bars.index[int(trade["EntryBar"])]
        assert ours["exit"][k] == bars.index[int(trade["ExitBar"])]
        assert ours["size"][k] == pytest.approx(trade["Size"])
        assert ours["pnl"][k] * 10_000 == pytest.approx(trade["PnL"], abs=1e-6)
        assert ours["return"][k] == pytest.approx(trade["ReturnPct"], abs=1e-9)
