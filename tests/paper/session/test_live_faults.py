"""Faults under a live session: a venue's server that breaks, missing bars, both clock changes."""

import contextlib
import dataclasses
import datetime
import logging
import pathlib
import pickle
import sqlite3
import zoneinfo

import numpy as np
import pytest
from fake_alpaca import FakeAlpaca
from fake_venue import CANARY, KEY
from livedesk import SECOND, Room, Still, Telling

from nca_trader.data.bars import write_bars
from nca_trader.data.calendar import new_york
from nca_trader.errors import HaltError, NcaTraderError
from nca_trader.paper.feeds.venue_feed import Grid, Row, VenueFeed
from nca_trader.paper.journal.journal import Journal, read_events, verify
from nca_trader.paper.session.halts import resume
from nca_trader.paper.session.trade import open_session, paper_trade
from nca_trader.paper.venues.exchange import Exchange

NEW_YORK = zoneinfo.ZoneInfo("America/New_York")


pytestmark = pytest.mark.usefixtures("keys")


def codes(room, kind="risk"):
    return [body["code"] for body in room.bodies(kind)]


# --- a venue's own client library, and its server ---


# --- bars that do not come ---


def with_gap(bars, first, count):
    """The bars without those of the first asset from `first` on."""
    present = bars.present.copy()
    present[first : first + count, 0] = False
    fields = {}
    for name in ("open", "high", "low", "close", "volume"):
        values = getattr(bars, name).copy()
        before = 0.0 if name == "volume" else bars.close[first - 1, 0]
        values[first : first + count, 0] = before
        fields[name] = values
    return dataclasses.replace(bars, present=present, **fields)


def held_long(window, present, account):
    return np.array([[0.0, 0.0, 1.0]] * 2)


def test_a_missing_bar_is_traded_through_as_in_training(stage, tmp_path):
    """The last close is carried, the asset counts as absent, and the other one trades on."""
    room = Room(stage, tmp_path, stage.agent(delist_after=5))
    room.bars = with_gap(room.bars, 35, 4)
    room.trade()
    rows = [event.body for event in read_events(room.path, "bar")]
    assert sum(row["AAA"] is None for row in rows) == 4
    assert not room.bodies("halt") and room.kinds()["decision"] == 41


def test_a_position_without_bars_for_as_long_as_training_knows_halts(stage, tmp_path):
    room = Room(stage, tmp_path, stage.agent(delist_after=5, decide=held_long))
    room.bars = with_gap(room.bars, 35, 20)
    with pytest.raises(HaltError, match="bars-missing"):
        room.trade()
    (halt,) = room.bodies("halt")
    assert halt == {"code": "bars-missing", "detail": {"symbols": ["AAA"], "in_a_row": 5}}
    assert room.kinds()["bar"] == 10 + 5 + 15  # the fifth missing bar is the last
    sent = len(room.desk.submitted)
    with pytest.raises(HaltError, match="was halted"):
        room.trade()
    assert len(room.desk.submitted) == sent
    resume(room.path, "the listing comes back", room.tape().now())
    room.trade()
    assert room.kinds()["bar"] == 50


def test_a_halt_at_a_bar_that_was_missed_is_on_disk_before_anybody_hears_of_it(stage, tmp_path):
    """Nothing is decided at a missed bar, so its events may wait for a later commit."""
    room = Room(stage, tmp_path, stage.agent(delist_after=5, decide=held_long))
    room.bars = with_gap(room.bars, 30, 25)
    room.trade(5)
    room.miss(20)
    tape = room.tape()
    with Journal(room.path, tape.now) as journal:
        session = open_session(room.agent, tape, room.desk, journal, 1e5, clock=Still())
        with pytest.raises(HaltError, match="bars-missing"):
            session.trade()
        assert codes(room, "halt") == ["bars-missing"]  # as another process reads it


def test_the_simulated_exchange_pays_such_a_position_out_as_training_does(stage, tmp_path):
    agent = stage.agent(delist_after=5, delist_haircut=0.3, decide=held_long)
    room = Room(stage, tmp_path, agent)
    room.bars = with_gap(room.bars, 35, 20)
    room.desk = Exchange(tmp_path / "books", 1e5, agent.symbols, agent.rules)
    room.trade()
    (paid,) = [body for body in room.bodies("fill") if body["client_id"] == "delisted"]
    assert paid["price"] == pytest.approx(0.7 * room.bars.close[34, 0])
    assert not room.bodies("halt")
    row = next(e for e in read_events(room.path, "snapshot") if e.seq > 0 and
               e.ts_event >= room.bars.time[39].astype(int))  # fmt: skip
    assert row.body["weight"][0] == 0.0


# --- an agent that fails, and a page that hangs ---


def test_an_agent_that_raises_halts_and_goes_on_after_it_is_corrected(stage, tmp_path):
    calls = []

    def decide(window, present, account):
        calls.append(1)
        if len(calls) == 12:
            raise ZeroDivisionError("a feature\nof mine")
        return stage.momentum(window, present, account)

    room = Room(stage, tmp_path, stage.agent(decide=decide))
    with pytest.raises(HaltError, match=r"policy-error.*ZeroDivisionError") as caught:
        room.trade()
    assert "\n" not in str(caught.value) and room.kinds()["decision"] == 11
    sent = len(room.desk.submitted)
    with pytest.raises(HaltError, match="was halted"):
        room.trade()
    assert len(room.desk.submitted) == sent
    resume(room.path, "corrected it", room.tape().now())
    room.trade()
    # The bar at which it failed comes again, as no time has passed here, and is decided at.
    assert room.kinds()["bar"] == 50 and room.kinds()["decision"] == 41


def test_a_pickle_in_place_of_an_agent_is_refused_and_not_run(stage, tmp_path):
    class Explodes:
        def __reduce__(self):
            return (pathlib.Path.touch, (tmp_path / "it-ran",))

    write_bars(stage.bars(), tmp_path / "bars.csv")
    agent = tmp_path / "agent.nca"
    agent.write_bytes(pickle.dumps(Explodes()))
    with pytest.raises(NcaTraderError, match=r"agent\.nca") as caught:
        paper_trade(agent, f"replay:{tmp_path}/bars.csv", tmp_path / "paper.db")
    assert "\n" not in str(caught.value)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["agent.nca", "bars.csv"]


def test_a_page_that_hangs_while_it_reads_does_not_hold_up_a_session(stage, tmp_path):
    room = Room(stage, tmp_path)
    room.trade(5)
    page = sqlite3.connect(f"file:{room.path}?mode=ro", uri=True, isolation_level=None)
    with contextlib.closing(page):
        page.execute("BEGIN")
        (before,) = page.execute("SELECT count(*) FROM event").fetchone()
        room.trade()  # a snapshot of before stays open all the time
        assert page.execute("SELECT count(*) FROM event").fetchone() == (before,)
    assert room.kinds()["bar"] == 50 and verify(room.path).seq > before


# --- clocks ---


class World:
    """A source of half-hours of one stock, and a clock that the feed's waits move."""

    symbols, step, delay, settle = ("AAA",), 1800, 5.0, 30.0

    def __init__(self, rows, time):
        self.rows, self.time = rows, float(time)

    def now(self):
        return int(self.time * SECOND)

    def get(self, seconds):
        self.time += seconds

    def fetch(self, start, stop):
        last = min(stop, self.time) - self.step
        return [row for row in self.rows if start <= row.time <= last]

    def stream(self, post):
        raise AssertionError("half-hours make hours, and have no stream")

    def close(self):
        pass


@pytest.mark.parametrize("sunday", ["2024-03-10", "2024-11-03"])
def test_a_change_of_the_clock_is_crossed_on_time(stage, tmp_path, sunday):
    """Hours of New York's sessions from the Thursday before to the Tuesday after, by zoneinfo."""
    day = datetime.date.fromisoformat(sunday)
    weekdays = [day + datetime.timedelta(d) for d in range(-6, 3) if d not in (-1, 0)]
    halves, expected = [], []
    for date in weekdays:
        opened = datetime.datetime.combine(date, datetime.time(9, 30), NEW_YORK).timestamp()
        halves += [int(opened) + 1800 * i for i in range(13)]
        expected += [int(opened) + 3600 * i for i in range(7)]  # the last holds half an hour
    price = 100.0 + np.cumsum(np.sin(np.arange(len(halves))))
    rows = [Row("AAA", t, p, p + 1.0, p - 1.0, p + 0.5, 10.0)
            for t, p in zip(halves, price.tolist(), strict=True)]  # fmt: skip
    begin = expected[7 * 3] + 60  # on the Thursday, a minute after the open
    world = World(rows, begin)
    feed = VenueFeed(world, Grid(3600, new_york(2024, 2024)), clock=world, get=world.get)
    agent = stage.agent(
        symbols=("AAA",), targets=(0.0, 0.5), decide=lambda w, p, a: np.ones((1, 2))
    )
    room = Room(stage, tmp_path, agent)
    result = room.trade(tape=feed, until=expected[-1])
    known = [e.ts_event // SECOND for e in read_events(room.path, "bar")]
    live = [t for t in expected if begin < t + 3600]
    assert known[-len(live) :] == live and set(known) <= set(expected)
    assert np.diff(known).max() == 3600 * 24 * 3 - 6 * 3600 + (3600 if day.month == 11 else -3600)
    decided = [e.ts_event // SECOND for e in read_events(room.path, "decision")]
    assert set(live) <= set(decided) and result["decisions"] == len(decided)
    assert room.bodies("feed") == [] and room.bodies("halt") == []


def at_server(stage, tmp_path, symbols, fake, venue):
    def tell(now, prices):
        fake.clock, fake.prices = max(now / SECOND, fake.clock), prices

    room = Room(stage, tmp_path, stage.agent(symbols=symbols), desk=venue, num_bars=48)
    room.tape = lambda: Telling(room.bars, tmp_path / "tape", 20, tell=tell)
    return room


def agrees(room, orders, units):
    """One order of the venue for each of the journal's that arrived, and the same positions."""
    intents = {event.key: event.body for event in read_events(room.path, "order_intent")}
    assert len(orders) == len({name for name, _ in orders}) > 5
    for name, quantity in orders:  # an order without our id would have one of its own
        assert quantity == pytest.approx(abs(intents[name]["units"]), rel=1e-9)
    held = {}
    for body in room.bodies("fill"):
        held[body["symbol"]] = held.get(body["symbol"], 0.0) + body["units"]
    for symbol in room.bars.symbols:
        assert held.get(symbol, 0.0) == pytest.approx(units.get(symbol, 0.0), abs=1e-9)


def is_kept_secret(room, caplog):
    """The made-up key is in no file of the session, whatever the venue said, and in no log."""
    files = [path for path in room.folder.rglob("*") if path.is_file()]
    assert room.path in files and len(files) >= 4  # the tape, the journal, its head and its lock
    for path in files:
        data = path.read_bytes()
        assert CANARY.encode() not in data and KEY.encode() not in data, path
    assert CANARY not in caplog.text and KEY not in caplog.text


EVERY = [
    "504-after", "504-before", "500-after", "hang-after", "hang-before", "reset-after",
    "reset-before", "html-after", "drip", "redirect-before", "429-before", "403-before",
]  # fmt: skip


@pytest.mark.slow
def test_a_live_session_at_alpaca_meets_every_answer_and_orders_once(stage, tmp_path, caplog):
    from nca_trader.paper.venues import alpaca

    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.INFO, "charset_normalizer")
    symbols = ("SPY", "QQQ")
    with FakeAlpaca(clock=0.0, prices=dict.fromkeys(symbols, 100.0)) as fake:
        venue = alpaca.open_venue(symbols, url=fake.url, timeout=0.3)
        room = at_server(stage, tmp_path, symbols, fake, venue)
        fake.fail("POST", "/v2/orders", *EVERY)
        room.trade(20)
        fake.refuse = f"the key {CANARY} is not allowed"  # a server that repeats what it was sent
        room.trade(2)
        fake.refuse = ""
        room.trade()
        venue.close()
        assert fake.faults == []
        orders = [(name, float(order["qty"])) for name, order in fake.orders.items()]
        agrees(room, orders, fake.units)
    reasons = {body["reason"] for body in room.bodies("order_ambiguous")}
    assert reasons == {
        "http-504", "http-500", "http-403", "timeout", "connection", "unreadable-body", "redirected"
    }  # fmt: skip
    refused = [b.get("code", "") for b in room.bodies("order_terminal")]
    assert any("the key *** is not allowed" in code for code in refused)
    is_kept_secret(room, caplog)
