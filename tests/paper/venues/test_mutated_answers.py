"""A venue's answers changed at random: a session goes on, or halts and `resume` leads on.

What a venue has booked stays changed for ever: a fill or a payment. What it says of the moment is
right again after the first refusal, as only the venue can correct that.
"""

import copy
import functools
import math
import random

import pytest
from fake_alpaca import FakeAlpaca
from livedesk import SECOND, Desk, Room, Telling

from nca_trader.errors import HaltError, NcaTraderError
from nca_trader.paper.journal.journal import read_events, verify
from nca_trader.paper.journal.ledger import Ledger
from nca_trader.paper.session.halts import resume
from nca_trader.paper.venue import Activity, CashFlow

BARS, ATTEMPTS = 30, 6
YEAR_1, YEAR_9999 = -62_135_596_800 * SECOND, 253_402_300_799 * SECOND
ODD = (
    math.nan, math.inf, -math.inf, 1e308, -1e308, 1e-320, 0.0, -5.0, 1e15, 10**400, 2**63, 7,
    YEAR_1, YEAR_9999, None, "", "x", "nan", "ZZZ", "\ud800", True, (), {},
)  # fmt: skip
METHODS = ("instrument", "look_up", "working", "activity", "holdings", "now", "submit", "cancel")

pytestmark = pytest.mark.usefixtures("keys")


def changed(draw, item):
    """An item with one field changed; or something else in its place."""
    if draw.random() < 0.1 or not hasattr(item, "_replace"):
        return draw.choice(ODD)
    field = draw.choice(item._fields)
    value, odd = getattr(item, field), draw.choice(ODD)
    if isinstance(value, dict):  # of positions
        return item._replace(**{field: {**value, draw.choice(["AAA", "ZZZ", None]): odd}})
    if isinstance(value, float | int) and draw.random() < 0.3:
        odd = draw.choice([value * 1.1, -value, value + SECOND, value * 1e6])
    return item._replace(**{field: odd})


class Odd:
    """A desk whose answers of one method are changed from a call on.

    here: whether it is a venue of this process, which gets the bars.
    """

    def __init__(self, desk, draw, method, begin, here):
        self.desk, self.draw, self.method, self.begin, self.here = desk, draw, method, begin, here
        self.armed, self.calls, self.records = True, 0, {}

    def __getattr__(self, name):
        if name == "quote" and not self.here:
            raise AttributeError(name)
        there = getattr(self.desk, name)
        return functools.partial(self.ask, there) if name == self.method else there

    def books(self, symbols):
        return self.desk.cash, [self.desk.units.get(symbol, 0.0) for symbol in symbols]

    def ask(self, there, *args):
        answer, self.calls = there(*args), self.calls + 1
        if self.calls < self.begin:
            return answer
        if self.method == "activity":
            return self.booked(answer)
        if not self.armed:
            return answer
        if isinstance(answer, list):
            return [changed(self.draw, item) for item in answer] or self.draw.choice(ODD)
        return changed(self.draw, answer)

    def booked(self, answer):
        """One fill and one payment are other ones from now on, or come twice under their id."""
        draw, found = self.draw, []
        for items in answer:
            items = list(items)
            for place in range(len(items) - 1, -1, -1):
                key = items[place][0], items[place][1]
                if len(self.records) < 2 and key not in self.records and draw.random() < 0.5:
                    twice = [items[place]] * (draw.random() < 0.3)
                    self.records[key] = [changed(draw, items[place]), *twice]
                items[place : place + 1] = self.records.get(key, [items[place]])
            found.append(items)
        return Activity(*found)


def leads_on(room, venue):
    """Start the session until it comes to its end twice; return what stopped it on the way.

    The second time it compares what it did at its last bar with the venue's books.
    """
    stops, ended = [], 0
    for _ in range(ATTEMPTS):
        try:
            result = room.trade()
        except HaltError as error:
            assert list(read_events(room.path))[-1].kind == "halt" and error.exit_code == 3
            resume(room.path, "looked at it", room.tape().now())
            stops.append(str(error))
        except NcaTraderError as error:
            assert error.exit_code in (1, 2, 4)
            stops.append(str(error))
        else:
            ended += 1
            if ended == 1:
                continue
            verify(room.path)
            assert result["bars"] == 10 + BARS - 20
            books = Ledger(read_events(room.path)).books(room.bars.symbols)
            cash, units = venue.books(room.bars.symbols)
            assert books.units.tolist() == pytest.approx(units, rel=1e-9)
            assert books.cash == pytest.approx(cash, abs=0.5)  # cents of each fill
            return stops
        ended = 0
        assert "\n" not in stops[-1] and stops[-1].isprintable()
        assert any(word in stops[-1] for word in ("resume", "again", "choose")), stops[-1]
        venue.armed = False
    raise AssertionError(f"no command leads on: {stops}")


def at_desk(stage, folder, seed):
    """A session at a desk with changed answers; what stopped it."""
    draw, desk = random.Random(seed), Desk(script=["rests"] * (seed % 3))
    begin, here, again = draw.randint(1, 12), draw.random() < 0.5, draw.random() < 0.5
    venue = Odd(desk, draw, METHODS[seed % len(METHODS)], begin, here)
    room = Room(stage, folder, desk=venue, num_bars=BARS)

    def tell(now, prices):
        desk.tell(now, prices)
        if now >= room.bars.time[23].astype(int) and not desk.flows:
            desk.flows.append(CashFlow("d1", "dividend", 12.34, now, "AAA"))
            desk.cash += 12.34

    room.tape = lambda: Telling(room.bars, folder / "tape", 20, tell=tell)
    if again:
        venue.begin = 10**9
        room.trade(5)
        venue.begin = 0
    return leads_on(room, venue)


def other(**fields):
    """A change of the last fill; of a payment where it has an amount."""

    def change(desk):
        items = desk.flows if "amount" in fields else desk.fills
        items[-1] = items[-1]._replace(**fields)

    return change


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("payment-changed", other(amount=10.34)),
        ("payment-unusable", other(amount=1e308)),
        ("fill-unusable", other(price=1e308)),
        ("fill-unusable", other(price=-1.0)),
        ("fill-changed", other(price=99.0)),
        ("fill-changed", other(units=-1.0)),
        ("fill-changed", other(symbol="ZZZ")),
        ("fill-unusable", other(ts=2**62 * 3)),
    ],
)
@pytest.mark.few(9)
def test_what_a_venue_booked_and_changes_halts_and_resume_passes_over_it(
    stage, tmp_path, code, change, again
):
    """The venue's books are taken over, whatever it lists from now on; also at a restart."""
    room = Room(stage, tmp_path, num_bars=BARS)
    paid = CashFlow("d1", "dividend", 12.34, room.tape().now(), "AAA")

    def tell(now, prices):
        room.desk.tell(now, prices)
        if not room.desk.flows and len(room.desk.fills) > 2:
            room.desk.flows.append(paid._replace(ts=now))
            room.desk.cash += 12.34
        elif not again and (tmp_path / "tape").read_text() == "25":
            change(room.desk)

    room.tape = lambda: Telling(room.bars, tmp_path / "tape", 20, tell=tell)
    room.trade(5 if again else 4)
    if again:
        change(room.desk)
    with pytest.raises(HaltError, match=rf"halted .*, {code} \(id ") as caught:
        room.trade()
    assert "\n" not in str(caught.value)
    with pytest.raises(HaltError, match="was halted"):
        room.trade()
    resume(room.path, "asked the broker", room.tape().now())
    result = room.trade()
    assert room.trade()["bars"] == result["bars"] == 20 and room.kinds()["halt"] == 1
    books = Ledger(read_events(room.path)).books(room.bars.symbols)
    assert books.cash == pytest.approx(room.desk.cash, abs=0.5)


@pytest.mark.heavy
def test_no_answer_of_a_venue_leaves_a_session_without_a_way_on(stage, tmp_path):
    """Property: during a session and at its restart, in this process and behind a network."""
    stops = []
    for seed in range(80):
        stops += at_desk(stage, tmp_path / str(seed), seed)
    said = " ".join(stops)
    for code in ("fill-unusable", "fill-changed", "payment-changed", "unusable-answer"):
        assert code in said, code


JSON = (
    None, "", "x", "nan", "inf", "1e308", 1e308, "1e-320", "-5", 7, True, [], {}, [[]], {"a": 1},
    "0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "\ud800", 10**400,
)  # fmt: skip


PATHS = ("assets", "orders", "orders:by", "positions", "account", "clock", "account/activities")


def replaced(draw, found):
    """A JSON value with one of its parts gone, or another one."""
    inner = list(found) if isinstance(found, dict) else range(len(found))
    if not inner:
        return draw.choice(JSON)
    found, place = copy.copy(found), draw.choice(list(inner))
    if isinstance(found[place], dict | list):
        found[place] = replaced(draw, found[place])
    elif draw.random() < 0.3 and isinstance(found, dict):
        del found[place]
    else:
        found[place] = draw.choice(JSON)
    return found


class OddAlpaca(FakeAlpaca):
    """Alpaca, whose answers of one path are changed from a call on."""

    def __init__(self, draw, path, begin, **more):
        self.draw, self.path, self.begin = draw, f"/v2/{path}", begin
        self.armed, self.asked, self.records = True, 0, {}
        super().__init__(**more)

    def books(self, symbols):
        return self.cash, [self.units.get(symbol, 0.0) for symbol in symbols]

    def answer(self, *call):
        status, found = super().answer(*call)
        path = call[1]
        # The shorter ones begin longer ones.
        if not path.startswith(self.path) or path.removeprefix(self.path)[:2] in (":b", "/a"):
            return status, found
        self.asked += 1
        if self.asked < self.begin or status != 200:
            return status, found
        if path.endswith("activities"):
            for place, item in enumerate(found):
                if len(self.records) < 2 and self.draw.random() < 0.5:
                    self.records.setdefault(item["id"], replaced(self.draw, item))
                found[place] = self.records.get(item["id"], item)
        elif self.armed:
            found = self.draw.choice([replaced, lambda draw, _: draw.choice(JSON)])(
                self.draw, found
            )
        return status, found


def at_alpaca(stage, folder, seed):
    """A session at Alpaca with changed answers; what stopped it."""
    from nca_trader.paper.venues import alpaca

    draw, symbols = random.Random(seed), ("SPY", "QQQ")
    begin, again = draw.randint(1, 12), draw.random() < 0.5
    path = PATHS[seed % len(PATHS)]
    with OddAlpaca(draw, path, begin, clock=0.0, prices=dict.fromkeys(symbols, 100.0)) as fake:
        venue = alpaca.open_venue(symbols, url=fake.url, timeout=2.0)
        agent = stage.agent(symbols=symbols)
        room = Room(stage, folder, agent, desk=venue, num_bars=BARS)

        def tell(now, prices):
            fake.clock, fake.prices = max(now / SECOND, fake.clock), prices
            if fake.orders and not any(a["activity_type"] == "DIV" for a in fake.activities):
                fake.pay("DIV", 12.34, "SPY", str(room.bars.time[24])[:10])

        room.tape = lambda: Telling(room.bars, folder / "tape", 20, tell=tell)
        if again:
            fake.begin = 10**9
            room.trade(5)
            fake.begin = 0
        try:
            return leads_on(room, fake)
        finally:
            venue.close()


@pytest.mark.heavy
def test_no_answer_of_alpaca_leaves_a_session_without_a_way_on(stage, tmp_path):
    stops = []
    for seed in range(56):
        stops += at_alpaca(stage, tmp_path / str(seed), seed)
    said = " ".join(stops)
    for code in ("fill-unusable", "unreadable-body", "venue-unreachable"):
        assert code in said, code
