"""Orders at a venue: each has effect once, and books that differ stop everything."""

import collections

import numpy as np
import pytest
from livedesk import CLOSED, RUN, SECOND, Desk, Table

from nca_trader.paper.journal.journal import read_events
from nca_trader.paper.session.halts import Halt
from nca_trader.paper.session.router import OVERLAP, tickets
from nca_trader.paper.venue import (
    Activity,
    Answer,
    Books,
    CashFlow,
    Instrument,
    OrderState,
    Outcome,
    TargetOrder,
    Ticket,
    Unreachable,
)
from nca_trader.types import Costs

HOUR, DAY = 3600 * SECOND, 86_400 * SECOND
UNCLEAR = Answer(Outcome.AMBIGUOUS, "timeout")


@pytest.fixture
def table(path):
    made = Table(path, ("A", "B"))
    yield made
    made.close()


def test_an_order_is_in_the_journal_before_each_step(table):
    seen = []
    submit = table.desk.submit

    def watching(ticket):
        seen.extend(table.kinds())
        return submit(ticket)

    table.desk.submit = watching
    table.deliver()
    assert seen == ["order_intent", "order_sent"]
    table.router.sync(CLOSED)
    assert table.kinds() == ["order_intent", "order_sent", "order_ack", "order_terminal"]
    assert table.bodies("order_terminal") == [{"reason": "filled", "filled": 10.0}]
    assert table.router.books().units.tolist() == [10.0, 0.0]


@pytest.mark.parametrize(
    ("script", "submissions", "end"),
    [
        (["mute"], 1, "filled"),  # accepted, and the answer was lost
        (["lost"], 2, "filled"),  # lost before it arrived: the same id again
        (["lost", "lost", "mute"], 3, "filled"),
        (["busy", "busy"], 3, "filled"),
        (["reject"], 1, "rejected"),
        (["lost", "reject"], 2, "rejected"),
    ],
)
def test_every_class_of_answer_makes_one_order_or_none(table, script, submissions, end):
    table.desk.script = script
    name = table.deliver()
    table.router.sync(CLOSED)
    assert [t.client_id for t in table.desk.submitted] == [name] * submissions
    assert len({(t.client_id, t.units) for t in table.desk.submitted}) == 1
    assert len(table.desk.placed) == (end == "filled")
    assert [b["reason"] for b in table.bodies("order_terminal")] == [end]
    assert table.kinds().count("order_sent") == submissions
    assert not table.router.ledger.open


def test_a_duplicate_id_is_success_by_look_up(table):
    """The venue has the first one; the resend is refused as a duplicate."""
    table.desk.script = ["mute"]
    table.desk.look_up, look_up = lambda name: None, table.desk.look_up
    sleep = table.clock.sleep

    def later(seconds):
        sleep(seconds)
        if len(table.desk.submitted) == 2:
            table.desk.look_up = look_up

    submit = table.desk.submit

    def answered(ticket):
        answer = submit(ticket)
        if len(table.desk.submitted) == 2:
            table.desk.look_up = look_up
        return answer

    table.desk.submit, table.clock.sleep = answered, later
    table.deliver()
    table.router.sync(CLOSED)
    assert len(table.desk.placed) == 1 and len(table.desk.submitted) == 2
    assert [b["reason"] for b in table.bodies("order_terminal")] == ["filled"]


def test_busy_waits_as_long_as_the_venue_says_and_ends_with_the_decision(table):
    table.desk.script = ["busy"] * 100
    table.deliver()
    assert table.bodies("order_terminal") == [{"reason": "too-old", "filled": 0.0}]
    assert 60.0 <= table.clock.waited <= 120.0
    assert table.desk.placed == [] and len(table.desk.submitted) < 15
    assert min(table.clock.each) >= 3.0  # as the desk asks; ours would be half a second at first


def test_a_halt_that_is_asked_for_while_the_venue_is_busy_sends_nothing_more(path):
    asked = iter([False, False, True])

    def refuse():
        if next(asked):
            raise Halt("asked")

    table = Table(path, ("A", "B"), refuse=refuse)
    table.desk.script = ["busy"] * 3
    with pytest.raises(Halt, match="asked"):
        table.deliver()
    assert len(table.desk.submitted) == 2
    table.close()


def test_a_decision_that_is_too_old_sends_nothing(table):
    table.router.start(CLOSED)
    table.order()
    table.clock.waited = 61.0
    table.router.deliver(CLOSED)
    assert table.desk.submitted == []
    assert [b["reason"] for b in table.bodies("order_terminal")] == ["too-old"]


def test_look_ups_that_fail_hold_the_symbol_and_no_other(table):
    table.desk.script = ["mute"]
    table.router.start(CLOSED)
    first = table.order("A")
    submit = table.desk.submit

    def then_down(ticket):
        answer = submit(ticket)
        table.desk.down = 10**6
        return answer

    table.desk.submit = then_down
    table.router._deliver(table.router.ledger.open[first], CLOSED)
    table.desk.submit, table.desk.down = submit, 0
    assert table.router.held == {"A": first}
    assert table.bodies("risk") == [
        {"code": "symbol-held", "symbol": "A", "client_id": first, "reason": "timeout"}
    ]
    table.clock.waited = 0.0
    for bar in (1_000_060, 1_000_120):  # what is not sent does not end the wait for the first
        table.order("A", 5.0, f"nca-01234567-{bar}-A-0")
        table.router.deliver(CLOSED)
    table.order("B", 5.0)
    table.router.deliver(CLOSED)
    assert [t.symbol for t in table.desk.submitted] == ["A", "B"]
    # The venue answers again: the order is found, and the symbol trades.
    table.router.sync(CLOSED)
    assert table.router.held == {}
    assert table.router.books().units.tolist() == [10.0, 5.0]


def test_an_order_that_is_found_working_frees_its_symbol(table):
    table.desk.script = ["rests"]
    table.router.start(CLOSED)
    first = table.order("A")
    submit = table.desk.submit
    table.desk.submit = lambda ticket: submit(ticket) and UNCLEAR
    table.desk.down = 10**6
    table.router.deliver(CLOSED)
    assert table.router.held == {"A": first}
    table.desk.down = 0
    table.router.sync(CLOSED)
    assert table.router.held == {} and first in table.router.ledger.open


def test_an_order_that_the_venue_kept_as_rejected_never_worked(table):
    """Its answer was lost, and a look-up gives it with that status."""
    table.desk.script = ["rests"]
    submit = table.desk.submit

    def refused(ticket):
        submit(ticket)
        table.desk.orders[ticket.client_id][2] = "rejected"
        return UNCLEAR

    table.desk.submit = refused
    table.deliver()
    kinds = ["order_intent", "order_sent", "order_ambiguous", "order_terminal"]
    assert table.kinds() == kinds
    assert table.bodies("order_terminal")[0]["reason"] == "rejected"


@pytest.mark.parametrize("stage", ["intent", "sent", "accepted", "filled"])
def test_the_next_process_finishes_what_a_killed_one_began(path, stage):
    table = Table(path, ("A", "B"))
    table.router.start(CLOSED)
    name = table.order()
    if stage != "intent":
        table.journal.record(RUN, "order_sent", f"{name}#0", {}, CLOSED)
    if stage in ("accepted", "filled"):
        if stage == "accepted":
            table.desk.script = ["rests"]
        table.desk.submit(Ticket(name, "A", 10.0))
    table.again()
    table.router.start(CLOSED)
    assert table.desk.placed == [name]
    if stage == "accepted":
        table.desk.execute(name, 10.0)
    assert table.router.sync(CLOSED).units.tolist() == [10.0, 0.0]
    assert table.kinds()[-1] == "order_terminal"
    table.close()


def test_a_process_that_starts_late_does_not_send_what_never_left(path):
    table = Table(path, ("A", "B"))
    table.router.start(CLOSED)
    name = table.order()
    table.journal.record(RUN, "order_sent", f"{name}#0", {}, CLOSED)
    table.order("B")
    table.again()
    table.clock.waited = 3600.0
    table.router.start(CLOSED)
    assert table.desk.submitted == []
    ends = {e.key: e.body["reason"] for e in read_events(path, "order_terminal")}
    assert sorted(ends.values()) == ["never-arrived", "too-old"]
    table.close()


def test_fills_in_parts_out_of_order_and_twice_count_once(table):
    table.desk.script = ["rests"]
    name = table.deliver()
    for part in (2.0, 3.0, 5.0):
        table.desk.execute(name, part)
    table.desk.fills = [table.desk.fills[i] for i in (2, 0, 1, 0, 2)]
    table.router.take(CLOSED)
    table.router.take(CLOSED, 0)
    table.router.sync(CLOSED)
    assert len(table.bodies("fill")) == 3
    assert table.router.books().units[0] == 10.0
    assert table.router.books().cash == pytest.approx(table.desk.cash, abs=1e-9)


def test_a_fill_before_the_answer_is_the_answer(table):
    table.router.start(CLOSED)
    name = table.order()
    table.journal.record(RUN, "order_sent", f"{name}#0", {}, CLOSED)
    table.router.ledger.apply("order_sent", f"{name}#0", {})
    table.desk.submit(Ticket(name, "A", 10.0))
    table.router.take(CLOSED)
    assert table.bodies("order_ack") == [{"by": "fill"}]
    assert table.kinds()[-1] == "order_terminal"


def halted(table, code):
    with pytest.raises(Halt) as caught:
        table.router.sync(CLOSED)
    assert caught.value.code == code
    return caught.value.detail


def test_more_fills_than_ordered_halt(table):
    name = table.deliver()
    table.desk.book(name, "A", 1.0, 10.0)
    assert halted(table, "overfilled")["filled"] == 11.0
    assert len(table.bodies("fill")) == 2  # what happened is written, whatever it means


def test_a_fill_of_another_symbol_than_its_orders_halts(table):
    table.desk.script = ["rests"]
    name = table.deliver()
    table.desk.book(name, "B", 4.0, 20.0)
    halted(table, "overfilled")


def test_what_happened_before_the_books_were_taken_over_is_in_them(table):
    """A venue may list more than was asked for."""
    table.desk.book("by-hand", "A", 3.0, 10.0)
    table.desk.flows.append(CashFlow("old", "fee", -50.0, CLOSED - 1, "A"))
    table.desk.cash -= 50.0
    table.desk.fills[0] = table.desk.fills[0]._replace(ts=CLOSED - 1)
    table.desk.activity = lambda since: Activity(list(table.desk.fills), list(table.desk.flows))
    table.router.start(CLOSED)
    assert table.router.sync(CLOSED) == (table.desk.cash, pytest.approx([3.0, 0.0]))
    assert table.bodies("fill") == table.bodies("cash") == []


def test_an_execution_that_changes_halts(table):
    table.deliver()
    table.router.sync(CLOSED)
    table.desk.fills[0] = table.desk.fills[0]._replace(units=9.0)
    halted(table, "fill-changed")


def test_a_fill_of_somebody_else_in_our_symbol_halts_and_in_another_does_not(table):
    table.router.start(CLOSED)
    table.desk.book("by-hand", "ZZZ", 3.0, 7.0)
    assert table.router.sync(CLOSED).units.tolist() == [0.0, 0.0]
    assert table.router.books().cash == table.desk.cash
    table.desk.book("by-hand", "A", 3.0, 10.0)
    assert halted(table, "foreign-fill") == {"symbol": "A", "units": 3.0}


def test_a_position_that_no_fill_explains_halts_and_shows_both(table):
    table.deliver()
    table.desk.units["A"] += 2.0
    assert halted(table, "position-differs") == {"A": {"venue": 12.0, "journal": 10.0}}


def test_cash_that_nothing_explains_halts_and_a_payment_explains_it(table):
    table.router.start(CLOSED)
    table.desk.cash -= 50.0
    assert "cash" in halted(table, "cash-differs")
    table.desk.flows.append(CashFlow("f1", "fee", -50.0, CLOSED, "A"))
    table.router.sync(CLOSED)
    table.router.sync(CLOSED)
    assert [b["amount"] for b in table.bodies("cash")] == [-50.0]


@pytest.mark.parametrize("again", [False, True])
def test_a_payment_dated_the_day_of_the_start_is_booked_once(path, again):
    """Its date is a midnight before the start; only its listing tells whether it is in the cash.

    So also where the books are taken over again, after a `resume`.
    """
    table, midnight, day = Table(path, ("A", "B")), CLOSED // DAY * DAY, DAY
    flows = table.desk.flows

    def pay(name, amount, ts):
        flows.append(CashFlow(name, "dividend", amount, ts, "A"))
        table.desk.cash += amount

    pay("early", 30.0, midnight)
    table.router.start(CLOSED)
    if again:
        pay("between", 9.0, midnight)
        table.journal.record(RUN, "resume", "1", {"reason": "looked"}, CLOSED)
        table.again()
        table.router.start(CLOSED)
    pay("today", 20.0, midnight)
    pay("fee", -3.0, midnight - 2 * day)  # of the day before yesterday, listed now
    for _ in range(2):
        assert table.router.sync(CLOSED).cash == pytest.approx(table.desk.cash, abs=1e-9)
    assert [b["amount"] for b in table.bodies("cash")] == [20.0, -3.0]
    table.close()


def test_books_are_not_taken_over_while_a_payment_comes(table):
    holdings = table.desk.holdings

    def paid():
        table.desk.flows.append(CashFlow("d", "dividend", 5.0, CLOSED, "A"))
        return holdings()

    table.desk.holdings = paid
    with pytest.raises(Unreachable, match="moving"):
        table.router.start(CLOSED)
    assert table.router.ledger.since is None


def test_a_withdrawal_reads_the_fills_since_the_last_that_it_knows(table):
    table.desk.script = ["rests", "rests"]
    table.deliver("B")
    name = table.order("A")
    table.router.deliver(CLOSED)
    table.desk.clock = CLOSED + 5 * HOUR
    table.desk.execute(name.replace("-A-", "-B-"), 1.0)
    table.router.take(CLOSED)
    since, inner = [], table.desk.activity
    table.desk.activity = lambda start: since.append(start) or inner(start)
    table.router.withdraw([name], CLOSED)
    assert since == [CLOSED + 5 * HOUR - OVERLAP]


def test_cents_of_rounding_do_not_halt(table):
    for i in range(20):
        table.router.start(CLOSED)
        table.order(name=f"nca-01234567-{i}-A-0")
        table.router.deliver(CLOSED)
        table.desk.cash += 0.004
        table.router.sync(CLOSED)


def test_a_fill_that_is_listed_late_is_waited_for(table):
    """The position moves first; the fill appears two looks later."""
    table.router.start(CLOSED)
    table.desk.listing = False
    table.order()
    table.router.deliver(CLOSED)
    sleep = table.clock.sleep

    def appear(seconds):
        sleep(seconds)
        if table.clock.waited > 1.0:
            table.desk.fills, table.desk.late = table.desk.fills + table.desk.late, []

    table.clock.sleep = appear
    assert table.router.sync(CLOSED).units.tolist() == [10.0, 0.0]


def test_an_order_that_ended_waits_for_its_fills_before_it_ends_here(table):
    table.router.start(CLOSED)
    table.desk.listing = False
    name = table.order()
    table.router.deliver(CLOSED)
    table.desk.units["A"] = 0.0  # neither position nor fill is listed, but the order says filled
    table.desk.cash = 1e5
    assert halted(table, "fills-missing") == {name: {"venue": 10.0, "journal": 0.0}}
    assert "order_terminal" not in table.kinds()


def test_a_working_order_is_kept_while_fills_do_not_explain_the_position(table):
    """NautilusTrader #5000: reconciliation closed such an order, and its later fills were lost."""
    table.desk.script = ["rests"]
    name = table.deliver()
    table.desk.units["A"] = 4.0
    halted(table, "position-differs")
    assert name in table.router.ledger.open
    assert "cancel" not in table.desk.calls and "order_terminal" not in table.kinds()


def test_reconciling_twice_changes_nothing(table):
    """NautilusTrader #3878."""
    table.desk.foreign = [OrderState("web-7", "A", 5.0, 0.0, "working", "v7")]
    table.desk.units["ZZZ"] = 3.0
    table.deliver()
    table.router.sync(CLOSED)
    head = table.journal.head
    for _ in range(3):
        table.router.sync(CLOSED)
    table.again()
    table.router.start(CLOSED)
    assert table.journal.head == head


def test_foreign_orders_are_listed_and_untouched(table):
    table.desk.foreign = [OrderState("web-7", "A", 5.0, 0.0, "working", "v7")]
    table.router.start(CLOSED)
    found = [b for b in table.bodies("recon") if b["code"] == "foreign"]
    assert found[0]["orders"] == [["web-7", "A", 5.0, 0.0, "working", "v7"]]
    table.desk.foreign = []
    table.router.sync(CLOSED)
    assert [b["orders"] for b in table.bodies("recon") if b["code"] == "foreign"][1] == []
    assert "cancel" not in table.desk.calls and table.desk.submitted == []


def test_an_order_of_ours_that_the_journal_lost_is_adopted(table):
    """The journal is a restored copy; the venue still works an order of this session."""
    table.router.start(CLOSED)
    name = f"{table.router.prefix}999-A-0"
    table.desk.script = ["rests"]
    table.desk.submit(Ticket(name, "A", 5.0))
    table.router.sync(CLOSED)
    table.desk.execute(name, 5.0)
    assert table.router.sync(CLOSED).units[0] == 5.0
    assert table.kinds() == ["order_intent", "order_ack", "order_terminal"]


@pytest.mark.parametrize("status", ["cancelled", "expired"])
def test_an_order_that_ended_at_the_venue_ends_here(table, status):
    table.desk.script = ["rests"]
    name = table.deliver()
    table.desk.execute(name, 4.0)
    table.desk.orders[name][2] = status
    table.router.sync(CLOSED)
    assert table.bodies("order_terminal") == [{"reason": status, "filled": 4.0}]


def test_an_acknowledged_order_that_the_venue_denies_halts(table):
    table.desk.script = ["rests"]
    name = table.deliver()
    del table.desk.orders[name]
    assert halted(table, "order-lost") == {"client_id": name}


def test_positions_older_than_the_fills_are_adopted_at_the_first_start_and_halt_later(path):
    """A venue lists fills of some days only; units that none explains must not be traded on."""
    desk = Desk()
    desk.units = {"A": 7.0}
    table = Table(path, ("A", "B"), desk)
    table.router.start(CLOSED)
    assert table.router.books().units.tolist() == [7.0, 0.0]
    table.again()
    desk.units["A"] = 9.0  # its fill is no longer listed
    with pytest.raises(Halt, match="position-differs"):
        table.router.start(CLOSED)
    table.router.adopt(CLOSED + 1, "a person looked")
    table.again()
    table.router.start(CLOSED)
    assert table.router.books().units.tolist() == [9.0, 0.0]
    table.close()


def test_after_a_person_lifts_a_halt_orders_are_withdrawn_and_the_books_taken_over(path):
    table = Table(path, ("A", "B"))
    table.desk.script = ["rests", "rests"]
    names = [table.deliver(), table.deliver("B")]
    table.desk.execute(names[0], 4.0)
    table.desk.fills = []  # and its fill is never listed
    halted(table, "position-differs")
    table.journal.record(RUN, "resume", "1", {"reason": "looked at the account"}, CLOSED)
    table.again()
    table.desk.cancelling = False  # what still works could fill after the books are taken over
    with pytest.raises(Halt, match="not-cancelled"):
        table.router.start(CLOSED)
    table.desk.cancelling = True
    table.router.start(CLOSED)
    ends = table.bodies("order_terminal")
    assert [(end["reason"], end["venue"]) for end in ends] == [("abandoned", 4.0), ("abandoned", 0)]
    assert table.router.books().units.tolist() == [4.0, 0.0]
    assert table.router.books().cash == table.desk.cash
    assert not table.router.ledger.open
    assert {order[2] for order in table.desk.orders.values()} == {"cancelled"}
    table.close()


def test_a_replaced_order_ends_before_its_size_counts(table):
    table.desk.script = ["rests"]
    name = table.deliver()
    table.desk.execute(name, 4.0)
    table.router.withdraw([name], CLOSED)
    assert table.router.books().units[0] == 4.0
    assert table.bodies("order_terminal")[0]["reason"] == "cancelled"


def test_an_order_that_cannot_be_cancelled_holds_its_symbol(table):
    table.desk.script = ["rests"]
    name = table.deliver()
    table.desk.cancelling = False
    table.router.withdraw([name], CLOSED)
    assert table.router.held == {"A": name}


def test_a_venue_that_does_not_answer_is_not_taken_for_an_empty_one(table):
    table.desk.down = 1
    with pytest.raises(Unreachable, match="timeout"):
        table.router.start(CLOSED)
    assert table.router.ledger.since is None


def test_waits_are_not_all_alike(path):
    """Sessions that fail together must not come back together."""
    waits = collections.Counter()
    for i in range(20):
        table = Table(path.with_name(f"{i}.db"), ("A", "B"))
        table.desk.script = ["lost"]
        table.deliver(name=f"nca-01234567-{i}-A-0")
        waits[round(table.clock.waited, 3)] += 1
        table.close()
    assert len(waits) > 10


def sized(weights, cash, units, close=(10.0, 20.0), borrow=False, costs=Costs(), **instrument):
    orders = [TargetOrder(f"id{i}", "AB"[i], w) for i, w in enumerate(weights) if w is not None]
    stocks = {s: Instrument(s, **instrument) for s in "AB"}
    books = Books(cash, np.array(units, float))
    return tickets(orders, books, np.array(close), "AB", stocks, costs, borrow)


def test_sizes_by_hand():
    """1000 in all: half in A at 10 is 50 units; 0.3 in B at 20 is 15, of which 5 are held."""
    made, refused = sized([0.5, 0.3], 900.0, [0.0, 5.0])
    assert [(t.symbol, t.units) for t in made] == [("A", 50.0), ("B", 10.0)] and refused == []


def test_sales_come_first_and_pay_for_buys():
    made, _ = sized([1.0, 0.0], 0.0, [0.0, 50.0])
    assert [(t.symbol, t.units) for t in made] == [("B", -50.0), ("A", 100.0)]


def test_buys_that_cash_does_not_pay_for_are_cut_by_one_factor():
    """2 x 1000 wanted of 1000: each gets 500 / 1.01 with a commission of 1%."""
    made, _ = sized([1.0, 1.0], 1000.0, [0.0, 0.0], costs=Costs(commission=0.01))
    assert made[0].units == pytest.approx(50.0 / 1.01) and made[1].units == pytest.approx(25 / 1.01)
    made, _ = sized([1.0, 1.0], 1000.0, [0.0, 0.0], borrow=True)
    assert [t.units for t in made] == [100.0, 50.0]


def test_lots_round_towards_zero_and_add_no_digits():
    made, _ = sized([0.29999, -0.15], 1.0, [0.0, 0.0], (1.0, 1.0), lot=0.1)
    assert {t.symbol: t.units for t in made} == {"A": 0.2, "B": -0.1}
    made, _ = sized([0.3], 1.0, [0.0, 0.0], (1.0, 1.0), lot=0.1)
    assert made[0].units == 0.3


def test_what_cannot_be_sent_says_why():
    assert sized([0.5, None], 100.0, [0.0, 0.0], min_notional=60.0)[1] == [("id0", "too-small")]
    assert sized([0.5], 100.0, [0.0, 0.0], (np.nan, 20.0))[1] == [("id0", "no-price")]
    made, refused = sized([-0.5], 900.0, [10.0, 0.0], shortable=False)
    assert made[0].units == -10.0 and refused == [("id0", "not-shortable")]
