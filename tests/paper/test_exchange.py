"""The simulated exchange against sums worked by hand, its faults, and its process."""

import contextlib
import json
import os
import pathlib
import signal
import sqlite3
import time

import pytest
from livedesk import SECOND

from nca_trader.envs.account.state import Rules
from nca_trader.errors import ConfigError
from nca_trader.paper.exchange import Exchange, Faults, parse_faults
from nca_trader.paper.exchange_process import RemoteExchange, start_exchange
from nca_trader.paper.venue import Outcome, Ticket, Unreachable
from nca_trader.types import Costs

COSTS = Costs(commission=5e-4, slippage=2e-4)
DAY = 86_400


def told(exchange, day, open_=50.0, close=50.0, other=20.0):
    rows = {"A": [open_, max(open_, close), min(open_, close), close, 1e6]}
    rows["B"] = None if other is None else [other] * 4 + [1e6]
    exchange.quote(day * DAY, (day + 1) * DAY * SECOND, rows)


@pytest.fixture
def make(tmp_path):
    made = []

    def of(name="books", capital=1000.0, costs=COSTS, **more):
        made.append(Exchange(tmp_path / name, capital, costs, ("A", "B"), **more))
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
    exchange = make(costs=Costs(), rules=Rules(borrow=True, maintenance_margin=0.5))
    told(exchange, 1)
    exchange.submit(Ticket("held", "A", 30.0))
    told(exchange, 2)
    exchange.submit(Ticket("waits", "B", 1.0))
    told(exchange, 3, open_=30.0, close=30.0)
    assert exchange.holdings() == (400.0, {}) and exchange.working() == []
    assert exchange.look_up("waits").status == "cancelled"


def test_with_fills_at_the_close_an_order_fills_at_once(make):
    exchange = make(rules=Rules(fill="close"))
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
    exchange = make(rules=Rules(fill="close"))
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


def test_faults_come_as_often_as_they_are_asked_for_and_repeat(make):
    faults = Faults(seed=4, reject=0.1, busy=0.2, lost=0.1, mute=0.1)
    seen = []
    for name in ("one", "two"):
        exchange = make(name, faults=faults)
        told(exchange, 1)
        answers = [exchange.submit(Ticket(f"o{i}", "A", 0.01)) for i in range(300)]
        seen.append([(a.outcome, a.reason) for a in answers])
        accepted = [exchange.look_up(f"o{i}") is not None for i in range(300)]
        for (outcome, reason), there in zip(seen[-1], accepted, strict=True):
            assert there == (outcome is Outcome.ACCEPTED or reason == "mute")
    assert seen[0] == seen[1]
    for reason, share in (("fault", 0.1), ("rate-limit", 0.18), ("lost", 0.09), ("mute", 0.09)):
        assert sum(r == reason for _, r in seen[0]) == pytest.approx(300 * share, abs=18)


def test_parts_and_repeats(make):
    exchange = make(faults=Faults(partial=1.0, repeat=1.0))
    told(exchange, 1)
    exchange.submit(Ticket("one", "A", 4.0))
    told(exchange, 2)
    assert exchange.look_up("one")[3:5] == (2.0, "working")
    told(exchange, 3)
    fills = exchange.activity(0).fills
    assert [f.units for f in fills] == [2.0, 2.0, 2.0, 2.0]
    assert len({f.execution_id for f in fills}) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mut=1", "unknown fault 'mut'; did you mean 'mute'"),
        ("mute=2", "mute=2 is not a number from 0 to 1"),
        ("mute=x", "mute=x is not a number"),
        ("mute=nan", "mute=nan is not a number"),
        ("seed=1.5", "seed=1.5 is not a number"),
    ],
)
def test_a_wrong_fault_is_said_in_one_line(text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        parse_faults(text)
    assert "\n" not in str(caught.value)


def alive(pid):
    try:
        os.kill(pid, 0)
        return not pathlib.Path(f"/proc/{pid}/stat").read_text().split(") ")[1].startswith("Z")
    except (OSError, IndexError):
        return False


def test_a_process_is_used_again_replaced_and_ended(tmp_path):
    """One start costs seconds, so this test tells the whole life of the process."""
    journal = tmp_path / "a long name of a folder" / ("x" * 150 + ".db")
    journal.parent.mkdir()

    made = []

    def start(costs=COSTS, **more):
        made.append(start_exchange(journal, 1000.0, costs, ("A", "B"), timeout=20.0, **more))
        return made[-1]

    one = start()
    told(one, 1)
    assert one.submit(Ticket("one", "A", 4.0)).outcome is Outcome.ACCEPTED
    pid = one.greet()["pid"]
    assert os.getsid(pid) == pid  # a Ctrl-C at the session's terminal is not for the exchange
    # The session is killed: its connection ends, and the next one finds the process.
    one.disconnect()
    two = start()
    assert two.greet()["pid"] == pid and two.working()[0].client_id == "one"
    assert two.instrument("A").symbol == "A" and two.look_up("none") is None
    assert os.stat(f"{journal}.books").st_mode & 0o777 == 0o600
    # A new journal at the same place is another session's.
    with pytest.raises(ConfigError, match="orders of an earlier session whose journal is gone"):
        start(fresh=True)
    # It is killed too: its books are in the file.
    three = start()
    os.kill(three.greet()["pid"], signal.SIGKILL)
    assert three.submit(Ticket("two", "A", 1.0)).outcome is Outcome.AMBIGUOUS
    with pytest.raises(Unreachable, match="connection"):
        three.holdings()
    # Stopped, it does not answer; with other costs it is another exchange.
    four = start()
    stuck = four.greet()["pid"]
    assert [order.client_id for order in four.working()] == ["one"]
    os.kill(stuck, signal.SIGSTOP)
    mute = RemoteExchange(
        json.loads(pathlib.Path(f"{journal}.exchange").read_text())["socket"], 0.2
    )
    begun = time.monotonic()
    assert mute.submit(Ticket("three", "A", 1.0))[:2] == (Outcome.AMBIGUOUS, "timeout")
    assert time.monotonic() - begun < 5.0
    os.kill(stuck, signal.SIGCONT)
    five = start(Costs())
    assert five.greet()["pid"] != stuck and not alive(stuck)
    told(five, 2)
    assert five.activity(0).fills[0].commission == 0.0
    five.close()
    for connection in made:
        connection.disconnect()
        if connection.process is not None:
            connection.process.wait(20)
    with contextlib.closing(sqlite3.connect(f"{journal}.books")) as books:
        fills = books.execute("SELECT client_id FROM fills ORDER BY seq").fetchall()
    # Its socket had taken the third order before it stopped: an order without an answer is there.
    assert fills == [("one",), ("three",)]
