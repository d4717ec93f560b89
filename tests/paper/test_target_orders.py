"""Orders in weights at the simulated exchange: a ledger worked by hand, and what none may break."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nca_trader.envs.account.state import Quote, Rules
from nca_trader.errors import ConfigError
from nca_trader.paper.exchange import Exchange
from nca_trader.paper.venue import Order, client_id
from nca_trader.types import Bar, Costs

COSTS = Costs(commission=5e-4, slippage=2e-4)
HERE = Quote(np.array([True, True]))


def order(symbol, weight, buy_only=False):
    return Order(f"id-{symbol}-{weight}", symbol, weight, buy_only)


def broker_of(capital=1000.0, costs=COSTS, symbols=("A", "B"), **options):
    return Exchange(None, capital, costs, symbols, **options)


def test_a_buy_by_hand():
    """Half of 1000 at price 50 is 10 units, paid 50.01 each, 5 bp of 500.1 on top."""
    broker = broker_of()
    broker.work([order("A", 0.5)])
    (fill,) = broker.advance(np.array([50.0, 20.0]), HERE, 3_000_000_000)
    assert fill.units == pytest.approx(10.0, rel=1e-15)
    assert fill.price == pytest.approx(50.01, rel=1e-15)
    assert fill.commission == pytest.approx(0.25005, rel=1e-15)
    assert fill.execution_id == "id-A-0.5@3"
    cash, units = broker.position()
    assert cash == pytest.approx(1000 - 500.1 - 0.25005, rel=1e-15)
    np.testing.assert_allclose(units, [10.0, 0.0], rtol=1e-15)


def test_a_short_sale_by_hand():
    """-0.3 of 1000 at 20: 15 units, each brings 19.996, 5 bp of 299.94 is taken off."""
    broker = broker_of()
    broker.work([order("B", -0.3)])
    (fill,) = broker.advance(np.array([50.0, 20.0]), HERE, 0)
    cash, units = broker.position()
    assert (fill.units, units[1]) == (pytest.approx(-15.0), pytest.approx(-15.0))
    assert cash == pytest.approx(1000 + 299.94 - 0.14997, rel=1e-15)


def test_where_cash_binds_both_buys_are_cut_by_one_factor():
    """1 + 1 of 1000 wanted: 2000 (1.0002)(1.0005) needed, so each gets 500/(1.0002 * 1.0005)."""
    broker = broker_of()
    broker.work([order("A", 1.0), order("B", 1.0)])
    broker.advance(np.array([50.0, 20.0]), HERE, 0)
    cash, units = broker.position()
    each = 500.0 / (1.0002 * 1.0005)
    np.testing.assert_allclose(units, [each / 50.0, each / 20.0], rtol=1e-13)
    assert 0.0 <= cash < 1e-10


def test_a_sale_pays_for_the_buy_of_the_same_moment():
    broker = broker_of(costs=Costs())
    broker.work([order("B", 1.0)])
    broker.advance(np.array([50.0, 20.0]), HERE, 0)
    broker.work([order("A", 1.0), order("B", 0.0)])
    fills = broker.advance(np.array([50.0, 20.0]), HERE, 1)
    assert [f.symbol for f in fills] == ["B", "A"]  # the sale first
    np.testing.assert_allclose(broker.position().units, [20.0, 0.0], atol=1e-12)


def test_with_borrowing_nothing_is_cut():
    broker = broker_of(rules=Rules(borrow=True))
    broker.work([order("A", 1.5)])
    broker.advance(np.array([50.0, 20.0]), HERE, 0)
    cash, units = broker.position()
    assert units[0] == pytest.approx(30.0)
    assert cash < -500.0


@pytest.mark.parametrize("path", [None, "books"])
def test_fills_are_kept_in_a_file_and_not_in_memory(tmp_path, path):
    """A replay of years would keep all of them; it takes them from `quote` and `work`."""
    where = None if path is None else tmp_path / path
    exchange = Exchange(where, 1000.0, Costs(interest_lend=0.1), ("A",), Rules(fill="close"))
    made = []
    for day in range(1, 4):
        price, here = np.full(1, 50.0 + day), np.ones(1, bool)
        bar = Bar(np.array([day * 86_400]), *[price] * 5, present=here)
        made += exchange.quote(bar, day * 86_400 * 10**9).fills
        made += exchange.work([order("A", 0.25 * day)])[1]
    kept = exchange.activity(0)
    assert len(made) == 3
    assert (kept.fills, len(kept.flows)) == (([], 0) if path is None else (made, 2))
    exchange.close()


def test_a_missing_bar_fills_nothing_and_the_order_goes_on_working():
    broker = broker_of(costs=Costs())
    broker.work([order("A", 0.5), order("B", 0.5)])
    (fill,) = broker.advance(np.array([np.nan, 20.0]), Quote(np.array([False, True])), 0)
    assert fill.symbol == "B"
    broker.work([order("A", 0.5)])
    (fill,) = broker.advance(np.array([50.0, 20.0]), HERE, 1)
    assert fill.symbol == "A"
    assert fill.units == pytest.approx(10.0)


def test_what_is_left_of_a_cut_order_never_sells():
    broker = broker_of(costs=Costs())
    broker.work([order("A", 0.5)])
    broker.advance(np.array([50.0, 20.0]), HERE, 0)
    broker.work([order("A", 0.2, buy_only=True)])
    assert broker.advance(np.array([50.0, 20.0]), HERE, 1) == []
    broker.work([order("A", 0.2)])
    assert broker.advance(np.array([50.0, 20.0]), HERE, 2)[0].units == pytest.approx(-6.0)


def test_an_order_that_is_withdrawn_does_not_fill():
    broker = broker_of()
    assert broker.work([order("A", 0.5)])[0] == ["id-A-0.5"]
    assert broker.work([order("A", 0.5)])[0] == []  # the same id twice is one order
    assert broker.work([])[0] == []
    assert broker.advance(np.array([50.0, 20.0]), HERE, 0) == []


def test_nothing_to_trade_makes_no_fill():
    broker = broker_of()
    broker.work([order("A", 0.0)])
    assert broker.advance(np.array([50.0, 20.0]), HERE, 0) == []


@pytest.mark.parametrize(("weight", "units"), [(0.5, 7.0), (-0.5, -7.0), (0.06, 0.0)])
def test_a_lot_rounds_towards_zero(weight, units):
    """0.5 of 1000 at 70 is 7.14 units, 0.06 is 0.86 of one."""
    broker = broker_of(costs=Costs(), rules=Rules(lot=1.0))
    broker.work([order("A", weight)])
    broker.advance(np.array([70.0, 20.0]), HERE, 0)
    assert broker.position().units[0] == units


def test_an_order_for_an_unknown_symbol_or_two_for_one_are_refused():
    for orders in ([order("C", 0.5)], [order("A", 0.5), order("A", 0.1)]):
        with pytest.raises(ConfigError, match="one order for each of A, B"):
            broker_of().work(orders)


@pytest.mark.parametrize("capital", [0.0, -1.0, np.nan, np.inf])
def test_capital_must_be_money(capital):
    with pytest.raises(ConfigError, match="capital"):
        broker_of(capital=capital)


days = st.lists(
    st.tuples(
        st.lists(st.floats(0.5, 2.0), min_size=3, max_size=3),  # price moves
        st.lists(st.booleans(), min_size=3, max_size=3),  # present
        st.lists(st.one_of(st.none(), st.floats(0.0, 1.0)), min_size=3, max_size=3),  # targets
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(days, st.floats(0.0, 0.02), st.floats(0.0, 0.02))
def test_long_only_books_stay_in_cash_and_lose_exactly_the_costs(days, f, s):
    """At the price of a fill, worth before less worth after is slippage and commission."""
    names = ("A", "B", "C")
    broker = Exchange(None, 1e6, Costs(commission=f, slippage=s), names)
    price = np.array([10.0, 100.0, 0.01])
    cash, units = broker.position()
    for moves, present, targets in days:
        price = price * np.array(moves)
        broker.work([order(n, w) for n, w in zip(names, targets, strict=True) if w is not None])
        before = cash + units @ price
        fills = broker.advance(price, Quote(np.array(present)), 0)
        paid = 0.0
        for fill in fills:
            i = names.index(fill.symbol)
            assert present[i] and targets[i] is not None
            paid += abs(fill.units) * abs(fill.price - price[i]) + fill.commission
            cash -= fill.units * fill.price + fill.commission
            units[i] += fill.units
        book = broker.position()
        assert book.cash >= 0.0
        assert book.cash == pytest.approx(cash, abs=1e-6)
        np.testing.assert_array_equal(book.units, units)  # the fills tell all
        assert (book.units * price >= -1e-6).all()
        assert cash + units @ price == pytest.approx(before - paid, rel=1e-12)
        cash = book.cash


@settings(max_examples=100, deadline=None)
@given(days, st.floats(1.5, 1e9))
def test_books_scale_with_capital(days, scale):
    """Twice the money trades twice the units: fractions of equity have no scale."""
    names = ("A", "B", "C")
    one, many = (Exchange(None, c, COSTS, names) for c in (1.0, scale))
    price = np.array([10.0, 100.0, 0.01])
    for moves, present, targets in days:
        price = price * np.array(moves)
        for broker in (one, many):
            broker.work([order(n, w) for n, w in zip(names, targets, strict=True) if w is not None])
            broker.advance(price, Quote(np.array(present)), 0)
    np.testing.assert_allclose(
        many.position().units, one.position().units * scale, rtol=1e-6, atol=1e-9 * scale
    )


def test_client_ids_are_short_plain_and_told_apart():
    symbols = [
        "SPY",
        "BTC/USDT",
        "BTC-USDT",
        "A-VERY-LONG-SYMBOL-NAME-1",
        "A-VERY-LONG-SYMBOL-NAME-2",
    ]
    ids = [client_id("0123456789abcdef", 1_700_000_000, s) for s in symbols]
    assert ids[0] == "nca-01234567-1700000000-SPY-0"
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[A-Za-z0-9-_]{1,36}", i) for i in ids)
    assert ids == [client_id("0123456789abcdef", 1_700_000_000, s) for s in symbols]
    assert client_id("0123456789abcdef", 1_700_000_000, "SPY", leg=1) != ids[0]
