"""A halt halts: whatever a session waits for, it hears a halt and a stop at once.

Also that no wait is longer than what it is for: an order, a cancellation, the end of a session.
"""

import os
import random
import signal
import threading
import time

import numpy as np
import pytest
from fake_alpaca import FakeAlpaca
from livedesk import BAR, BEGIN, CLOSED, SECOND, Desk, Still, Table, Telling

from nca_trader.errors import HaltError
from nca_trader.paper import clock
from nca_trader.paper.clock import PATIENCE, TICK, Caller, Waits
from nca_trader.paper.journal.halting import request_halt
from nca_trader.paper.journal.journal import Journal, read_events
from nca_trader.paper.session.halts import Halt
from nca_trader.paper.session.trade import open_session
from nca_trader.paper.venue import Answer, Outcome, Ticket

SYMBOLS = tuple(f"S{i:02d}" for i in range(50))
WAYS = ("file", "SIGUSR1", "stop")


class Flips:
    """Every symbol long and short in turn, so that each bar replaces orders of all."""

    long = False

    def __call__(self, window, present, account):
        self.long = not self.long
        return np.tile([0.0, 0.0, 1.0] if self.long else [1.0, 0.0, 0.0], (len(SYMBOLS), 1))


class Asked:
    """Somebody who wants the session to end; says when, and what had been sent by then."""

    def __init__(self, way, path, desk):
        self.way, self.path, self.desk, self.stopped, self.sent = way, path, desk, False, None

    def __call__(self):
        self.sent = len(self.desk.submitted)
        if self.way == "file":
            request_halt(self.path, "now")
        elif self.way == "stop":
            self.stopped = True
        else:
            os.kill(os.getpid(), signal.SIGUSR1)

    def heard(self):
        """Whether the journal says so, as another process reads it."""
        kind = "run_ended" if self.way == "stop" else "halt"
        return any(True for _ in read_events(self.path, kind))


class Ticking(Still):
    """A clock at whose n-th wait somebody asks; `done` is how long was waited after that."""

    def __init__(self, asked=None, at=None):
        super().__init__()
        self.asked, self.at, self.since = asked, at, None

    def sleep(self, seconds):
        if len(self.each) == self.at:
            self.asked()
            self.since = self.waited
        super().sleep(seconds)

    @property
    def after(self):
        return self.waited - self.since


def traded(stage, folder, venue, desk, clock, asked=None, num_bars=4):
    """Trade fifty symbols; return the error that ended the session, if one did."""
    bars = stage.bars(num_bars=BEGIN + num_bars, symbols=SYMBOLS)
    agent = stage.agent(symbols=SYMBOLS, targets=(-0.01, 0.0, 0.01), decide=Flips())
    tape = Telling(bars, folder / "tape", BEGIN, tell=desk.tell)
    with Journal(folder / "paper.db", tape.now) as journal:
        session = open_session(agent, tape, venue, journal, 1e5, warmup=10, clock=clock)
        with session.switch.listening():
            try:
                session.trade(lambda: asked is not None and asked.stopped)
            except HaltError as error:
                return error
    return None


def drawn(first, last, seed, some=2):
    """Some moments between two, and these."""
    between = range(first, last + 1)
    return sorted({first, last, *random.Random(seed).sample(between, min(len(between), some))})


SCRIPTS = {
    "busy for an hour": dict(script=["busy"] * 400),
    "lost": dict(script=["lost", None] * 200),
    "cancellations stay pending": dict(script=["rests"] * 400, cancelling=False),
}


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.few(2)
def test_no_wait_keeps_a_halt_or_a_stop_from_being_heard(stage, tmp_path, name):
    """Property: at any wait for a time; counted in the session's own seconds."""

    def desk_of():
        desk = Desk(script=SCRIPTS[name]["script"])
        desk.cancelling = SCRIPTS[name].get("cancelling", True)
        return desk

    (tmp_path / "whole").mkdir()
    desk, whole = desk_of(), Ticking()
    # At three bars in a row of which every order is too old a session halts by itself.
    bars = 1 if name == "busy for an hour" else 4
    assert traded(stage, tmp_path / "whole", desk, desk, whole, num_bars=bars) is None
    assert max(whole.each) <= TICK + 1e-9 and len(whole.each) > 30
    moments = drawn(1, len(whole.each) - 1, seed=0)
    for at, way in zip(moments, WAYS * 9, strict=False):
        folder = tmp_path / str(at)
        folder.mkdir()
        desk = desk_of()
        asked = Asked(way, folder / "paper.db", desk)
        ticking = Ticking(asked, at)
        error = traded(stage, folder, desk, desk, ticking, asked, num_bars=bars)
        assert ticking.after <= 1.0 and asked.heard()
        assert (error is None) == (way == "stop")
        assert len(desk.submitted) == asked.sent


def test_a_history_that_does_not_come_keeps_no_halt_from_being_heard(stage, tmp_path):
    desk = Desk()
    asked = Asked("file", tmp_path / "paper.db", desk)
    over = threading.Event()

    class Slow(Telling):
        def history(self, count):
            asked()
            over.wait(0.5)
            return super().history(count)

    bars = stage.bars(num_bars=30)
    tape = Slow(bars, tmp_path / "tape", BEGIN, tell=desk.tell)
    with Journal(tmp_path / "paper.db", tape.now) as journal:
        session = open_session(stage.agent(), tape, desk, journal, 1e5, warmup=10, clock=Still())
        with pytest.raises(HaltError, match="reason now"):
            session.trade()
    over.set()
    assert not any(True for _ in read_events(tmp_path / "paper.db", "bar"))


class Dripping(FakeAlpaca):
    """From one call on every answer comes byte by byte, as slowly as a client allows."""

    def __init__(self, path, **more):
        self.path, self.asked, self.submitted, self.dripping = path, None, (), False
        super().__init__(**more)

    def tell(self, now, prices):
        self.clock, self.prices = max(now / SECOND, self.clock), prices

    def _fault(self, method, path):
        if (method, path) == self.path or (method, path[: len(self.path[1])]) == self.path:
            if not self.dripping and self.asked is not None and len(self.orders) > 2:
                self.dripping = True
                threading.Timer(0.2, self.asked).start()
        return "drip" if self.dripping else ""


@pytest.mark.parametrize(
    ("path", "way"),
    [
        (("POST", "/v2/orders"), "file"),
        (("GET", "/v2/positions"), "stop"),
        (("GET", "/v2/account/activities"), "file"),
        (("GET", "/v2/orders:by_client_order_id"), "file"),
    ],
)
@pytest.mark.few(2)
def test_an_answer_that_drips_holds_up_the_end_of_a_session_once(
    stage, tmp_path, monkeypatch, keys, path, way
):
    """The request under way and the cancellations after it end within one time, not one each."""
    from nca_trader.paper.venues import alpaca

    monkeypatch.setattr(clock, "EXIT", 1.2)
    prices = dict.fromkeys(SYMBOLS, 100.0)
    with Dripping(path, clock=0.0, prices=prices) as fake:
        fake.resting = True
        fake.asked = asked = Asked(way, tmp_path / "paper.db", fake)
        venue, begun = alpaca.open_venue(SYMBOLS, url=fake.url, timeout=1.2), []
        note = asked.__class__.__call__
        monkeypatch.setattr(
            Asked, "__call__", lambda self: (note(self), begun.append(time.monotonic()))
        )
        heard = threading.Thread(target=lambda: heard_at(asked, begun), daemon=True)
        heard.start()
        error = traded(stage, tmp_path, venue, fake, Still(), asked)
        took = time.monotonic() - begun[0]
        heard.join(5.0)
        venue.close()
    assert (error is None) == (way == "stop") and asked.heard()
    assert took < 2.0 and begun[1] - begun[0] < 1.0


def heard_at(asked, begun):
    """Note when the journal says that the session has heard."""
    while not begun or not asked.heard():
        time.sleep(0.02)
    begun.append(time.monotonic())


def test_the_end_awaits_the_request_under_way_but_not_for_ever(monkeypatch):
    monkeypatch.setattr(clock, "EXIT", 0.1)
    over, asked = threading.Event(), iter([False, False, True])

    def heard():
        if next(asked, False):
            raise Halt("asked")

    waits = Waits(clock.Clock(), heard)
    with pytest.raises(Halt):
        waits.call(over.wait, 30.0)
    begun = time.monotonic()
    waits.close()
    assert 0.1 <= time.monotonic() - begun < 5.0
    over.set()


def test_an_error_of_a_call_comes_to_the_one_who_waits():
    caller = Caller("test")
    caller.start(lambda: 1 // 0)
    assert caller.done(5.0)
    with pytest.raises(ZeroDivisionError):
        caller.result()
    caller.close()


def intend(table, symbols=SYMBOLS, bar=BAR):
    return [table.order(symbol, bar=bar) for symbol in symbols]


@pytest.fixture
def table(tmp_path):
    made = Table(tmp_path / "paper.db", SYMBOLS)
    made.router.start(CLOSED)
    yield made
    made.close()


@pytest.mark.parametrize("asked", [3600.0, 259_200.0, float("nan"), float("inf"), -1.0])
def test_no_wait_outlasts_the_order_that_it_is_for(table, asked):
    """Whatever a venue says when to come back, fifty orders end within the life of one."""
    table.desk.submit = lambda ticket: (
        table.desk.submitted.append(ticket) or Answer(Outcome.BUSY, "rate-limit", asked)
    )
    intend(table)
    table.router.deliver(CLOSED)
    assert table.clock.waited <= PATIENCE.age + 1e-6
    assert [b["reason"] for b in table.bodies("order_terminal")] == ["too-old"] * 50
    # A ban is one of the account's: no other order is sent into it.
    assert (len(table.desk.submitted) == 1) == (asked in (3600.0, 259_200.0))


def test_a_ban_is_over_when_the_venue_says(table):
    answers = iter([Answer(Outcome.BUSY, "rate-limit", 90.0)])
    accept = table.desk.submit
    table.desk.submit = lambda ticket: next(answers, None) or accept(ticket)
    intend(table, SYMBOLS[:2])
    table.router.deliver(CLOSED)
    assert table.clock.waited == 0.0 and table.desk.placed == []
    table.clock.waited = 61.0
    sent = intend(table, SYMBOLS[:1], BAR + 60)
    table.router.deliver(CLOSED)
    assert table.clock.waited == pytest.approx(90.0) and table.desk.placed == sent


@pytest.mark.parametrize(
    "header", ["3600", "nan", "inf", "-1", "soon", "Thu, 26 Nov 2026 07:00:00 GMT"]
)
def test_what_a_venue_says_of_its_return_is_a_number_of_seconds(keys, header):
    from nca_trader.paper.venues import alpaca

    with FakeAlpaca() as fake:
        fake.retry_after = header
        venue = alpaca.open_venue(["SPY"], url=fake.url)
        fake.fail("POST", "/v2/orders", "429-before")
        answer = venue.submit(Ticket("nca-1", "SPY", 1.0))
        assert answer.outcome is Outcome.BUSY
        assert answer.retry_after == (3600.0 if header == "3600" else 0.0)
        venue.close()


def test_fifty_orders_are_cancelled_at_once_and_waited_for_once(table):
    table.desk.script = ["rests"] * 50
    names = intend(table)
    table.router.deliver(CLOSED)
    table.desk.cancelling, table.desk.calls = False, []
    begun = table.clock.waited
    table.router.withdraw(names, CLOSED)
    assert table.clock.waited - begun <= PATIENCE.looks + PATIENCE.last
    first = table.desk.calls.index("activity")
    assert table.desk.calls[:first] == ["cancel"] * 50 and table.desk.calls.count("cancel") == 50
    assert len(table.router.held) == 50
    # The next bar asks again, and waits no more for these.
    table.desk.cancelling, begun = True, table.clock.waited
    table.router.withdraw([], CLOSED)
    table.router.sync(CLOSED)
    assert table.clock.waited == begun and not table.router.held
    assert {b["reason"] for b in table.bodies("order_terminal")} == {"cancelled"}


def test_a_cancellation_that_was_not_heard_is_said_again(table):
    table.desk.script = ["rests"] * 2
    names = intend(table, SYMBOLS[:2])
    table.router.deliver(CLOSED)
    cancel, deaf = table.desk.cancel, [True, True]
    table.desk.cancel = lambda name: (
        Answer(Outcome.AMBIGUOUS, "timeout") if deaf and deaf.pop() else cancel(name)
    )
    table.router.withdraw(names, CLOSED)
    assert [b["reason"] for b in table.bodies("order_terminal")] == ["cancelled"] * 2


def test_a_resume_cancels_all_before_it_waits(table):
    table.desk.script = ["rests"] * 50
    intend(table)
    table.router.deliver(CLOSED)
    table.desk.cancelling, table.desk.calls = False, []
    table.router.ledger.since = None  # as after `resume`
    begun = table.clock.waited
    with pytest.raises(Halt, match="not-cancelled"):
        table.router.start(CLOSED)
    assert table.clock.waited - begun <= PATIENCE.looks + PATIENCE.last
    assert table.desk.calls[:51] == ["cancel"] * 50 + ["look_up"]


class Far:
    """A desk behind a network: at one of its calls somebody asks, and the call does not return."""

    def __init__(self, desk, asked=None, at=None):
        self.desk, self.asked, self.at, self.calls, self.took = desk, asked, at, 0, None

    def __getattr__(self, name):
        if name == "quote":
            raise AttributeError(name)
        there = getattr(self.desk, name)
        if not callable(there):
            return there

        def call(*args):
            self.calls += 1
            if self.calls == self.at:
                self.asked()
                begun = time.monotonic()
                # As a request that takes up to ten seconds: here as long as it is not journalled.
                while not self.asked.heard() and time.monotonic() - begun < 8.0:
                    time.sleep(0.01)
                self.took = time.monotonic() - begun
            return there(*args)

        return call


@pytest.mark.heavy
@pytest.mark.parametrize("way", WAYS)
def test_no_call_of_a_venue_keeps_a_halt_or_a_stop_from_being_heard(stage, tmp_path, way):
    """Property: at any call of a session, and with fifty symbols there are hundreds."""
    (tmp_path / "whole").mkdir()
    whole = Far(Desk())
    assert traded(stage, tmp_path / "whole", whole, whole.desk, Still()) is None
    assert whole.calls > 300 and len(whole.desk.submitted) > 100
    # Before the first bar a session that is stopped has nothing to write.
    first = 1 if way != "stop" else len(SYMBOLS) + 15
    for at in drawn(first, whole.calls, seed=WAYS.index(way), some=5):
        folder = tmp_path / str(at)
        folder.mkdir()
        desk = Desk()
        asked = Asked(way, folder / "paper.db", desk)
        far = Far(desk, asked, at)
        error = traded(stage, folder, far, desk, Still(), asked)
        assert far.took < 1.0 and asked.heard(), at
        assert (error is None) == (way == "stop")
        # At most the order whose request was under way.
        assert len(desk.submitted) - asked.sent <= 1, at
