"""The simulated exchange against sums worked by hand."""

import contextlib
import json
import os
import sqlite3

import pytest
from livedesk import SECOND, bar_at
from made_up import rules_of

from nca_trader.errors import ConfigError, StateError
from nca_trader.paper.journal.bars import complete
from nca_trader.paper.session.trade import open_venue
from nca_trader.paper.venue import Outcome, Ticket
from nca_trader.paper.venues.exchange import Exchange
from nca_trader.types import Costs

COSTS = Costs(commission=5e-4, slippage=2e-4)
DAY = 86_400


def told(exchange, day, open_=50.0, close=50.0, other=20.0):
    first = [open_, max(open_, close), min(open_, close), close, 1e6]
    second = None if other is None else [other] * 4 + [1e6]
    bar = complete(bar_at(day * DAY, first, second), exchange._close)
    exchange.quote(bar, (day + 1) * DAY * SECOND)


@pytest.fixture
def make(tmp_path):
    made = []

    def of(capital=1000.0, costs=COSTS, **rules):
        made.append(Exchange(tmp_path / "books", capital, ("A", "B"), rules_of(costs, **rules)))
        return made[-1]

    yield of
    for exchange in made:
        exchange.close()


def test_a_buy_fills_at_the_next_open_by_hand(make):
    """Ten units at the open of 51, paid 51.0102 each, 5 bp of 510.102 on top."""
    exchange = make()
    told(exchange, 1)
    assert exchange.submit(Ticket("one", "A", 10.0)).outcome is Outcome.ACCEPTED
    assert exchange.activity(0).fills == [] and exchange.working()[0].status == "working"
    told(exchange, 2, open_=51.0, close=53.0)
    (fill,) = exchange.activity(0).fills
    assert (fill.client_id, fill.units) == ("one", 10.0)
    assert fill.price == pytest.approx(51.0102, rel=1e-15)
    assert fill.commission == pytest.approx(0.255051, rel=1e-15)
    assert fill.ts == 3 * DAY * SECOND
    cash, units = exchange.holdings()
    assert cash == pytest.approx(1000.0 - 510.102 - 0.255051, rel=1e-15) and units == {"A": 10.0}
    assert exchange.look_up("one").status == "filled" and exchange.working() == []


def test_a_margin_call_closes_what_is_held_and_withdraws_what_waits(make):
    """30 units bought for 1,500 with 1,000: at 30 each, 400 of equity is less than half of 900."""
    exchange = make(costs=Costs(), borrow=True, maintenance_margin=0.5)
    told(exchange, 1)
    exchange.submit(Ticket("held", "A", 30.0))
    told(exchange, 2)
    exchange.submit(Ticket("waits", "B", 1.0))
    told(exchange, 3, open_=30.0, close=30.0)
    assert exchange.holdings() == (400.0, {}) and exchange.working() == []
    assert exchange.look_up("waits").status == "cancelled"


def test_with_fills_at_the_close_an_order_fills_at_once(make):
    exchange = make(fill="close")
    told(exchange, 1, close=52.0)
    exchange.submit(Ticket("one", "A", 10.0))
    assert exchange.activity(0).fills[0].price == pytest.approx(52.0 * 1.0002, rel=1e-15)


def test_a_missing_bar_fills_nothing_and_the_order_waits(make):
    exchange = make()
    told(exchange, 1)
    exchange.submit(Ticket("one", "B", 3.0))
    told(exchange, 2, other=None)
    assert exchange.look_up("one").status == "working"
    told(exchange, 3)
    assert exchange.look_up("one").status == "filled"


def test_with_fills_at_the_close_too_an_order_waits_for_its_asset(make):
    exchange = make(fill="close")
    told(exchange, 1, other=None)
    exchange.submit(Ticket("one", "B", 3.0))
    assert exchange.look_up("one").status == "working"
    told(exchange, 2, other=21.0)
    assert exchange.activity(0).fills[0].price == pytest.approx(21.0 * 1.0002, rel=1e-15)


def test_what_cash_does_not_pay_for_is_cancelled(make):
    exchange = make(costs=Costs())
    told(exchange, 1)
    exchange.submit(Ticket("one", "A", 30.0))
    told(exchange, 2)
    state = exchange.look_up("one")
    assert (state.status, state.filled) == ("cancelled", pytest.approx(20.0))
    assert exchange.holdings().cash == pytest.approx(0.0, abs=1e-9)


def test_two_orders_of_a_symbol_fill_one_after_the_other(make):
    exchange = make()
    told(exchange, 1)
    for name, units in (("one", 4.0), ("two", -1.0), ("three", 2.0)):
        exchange.submit(Ticket(name, "A", units))
    exchange.cancel("three")
    told(exchange, 2)
    assert [(f.client_id, f.units) for f in exchange.activity(0).fills] == [
        ("one", 4.0), ("two", -1.0)
    ]  # fmt: skip
    assert exchange.look_up("three").status == "cancelled"


def test_a_bar_that_was_told_already_changes_nothing(make):
    exchange = make()
    told(exchange, 2)
    exchange.submit(Ticket("one", "A", 4.0))
    told(exchange, 2, open_=99.0)
    told(exchange, 1, open_=99.0)
    assert exchange.activity(0).fills == []


def test_interest_is_a_payment_of_its_own(make):
    """1000 at 3.65% for a day of 365.2425."""
    exchange = make(costs=Costs(interest_lend=0.0365))
    told(exchange, 1)
    told(exchange, 2)
    (flow,) = exchange.activity(0).flows
    assert flow.amount == pytest.approx(1000.0 * 0.0365 / 365.2425, rel=1e-12)
    assert exchange.holdings().cash == pytest.approx(1000.0 + flow.amount, rel=1e-15)


@pytest.mark.parametrize(
    ("ticket", "why"),
    [
        (Ticket("x", "C", 1.0), "unknown-symbol"),
        (Ticket("x", "A", 0.0), "bad-size"),
        (Ticket("x", "A", float("nan")), "bad-size"),
        (Ticket("x", "A", 1.0, 40.0), "stop-orders-are-not-supported"),
    ],
)
def test_an_impossible_order_is_rejected_with_a_code(make, ticket, why):
    exchange = make()
    assert exchange.submit(ticket)[:2] == (Outcome.REJECTED, why)
    assert exchange.look_up("x") is None


def test_an_order_that_was_never_sent_cannot_be_withdrawn(make):
    assert make().cancel("none")[:2] == (Outcome.REJECTED, "unknown-order")


def test_the_same_id_twice_is_one_order(make):
    exchange = make()
    told(exchange, 1)
    exchange.submit(Ticket("one", "A", 4.0))
    assert exchange.submit(Ticket("one", "A", 4.0))[:2] == (Outcome.REJECTED, "duplicate-id")
    assert len(exchange.working()) == 1


def test_books_outlive_the_object(make):
    exchange = make()
    told(exchange, 1)
    exchange.submit(Ticket("one", "A", 4.0))
    told(exchange, 2)
    exchange.submit(Ticket("two", "B", -2.0))
    before = exchange.holdings(), exchange.working(), exchange.activity(0), exchange.now()
    again = make()
    assert (again.holdings(), again.working(), again.activity(0), again.now()) == before
    told(again, 3)
    assert again.holdings().units == {"A": 4.0, "B": -2.0}
    with pytest.raises(ConfigError, match=r"holds the books of A, B and 1,000\.00 at the start"):
        make(capital=5.0)


def test_damaged_books_are_refused_in_one_line(make):
    made = make()
    whole = {"symbols": ["A", "B"], "capital": 1000.0, "units": [0.0, 0.0], "clock": 0}
    whole |= {"time": None, "missing": [0, 0], "close": [None, None], "rows": None}
    nan = json.dumps({**whole, "cash": float("nan")})
    for text in ("{not json", "[1]", "{}", json.dumps({**whole, "cash": None}), nan):
        with contextlib.closing(sqlite3.connect(made.path)) as books, books:
            books.execute("UPDATE state SET value = ?", (text,))
        with pytest.raises(StateError, match="the exchange's books are damaged"):
            make()


def test_its_books_lie_next_to_the_journal_and_belong_to_it(tmp_path):
    class Feed:
        symbols = ("A", "B")

    def opened(fresh):
        journal = tmp_path / "paper.db"
        return open_venue("simulated", Feed(), journal, fresh, 1000.0, rules_of(COSTS))

    one = opened(fresh=True)
    told(one, 1)
    one.submit(Ticket("one", "A", 4.0))
    assert os.stat(tmp_path / "paper.db.books").st_mode & 0o777 == 0o600
    # The session is killed, so nothing is closed; the next one finds what was answered.
    two = opened(fresh=False)
    assert [order.client_id for order in two.working()] == ["one"]
    for exchange in (one, two):
        exchange.close()
    with pytest.raises(ConfigError, match="orders of an earlier session whose journal is gone"):
        opened(fresh=True)
