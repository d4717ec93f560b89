"""Live bars: closed ones only, in order, with gaps, corrections, drops, silence and stale data."""

import inspect
import itertools
import re
import time

import numpy as np
import pytest

import nca_trader as nca
from nca_trader.data.calendar import new_york
from nca_trader.paper.feeds import venue_feed
from nca_trader.paper.feeds.feed import NOTICES, Notice
from nca_trader.paper.feeds.venue_feed import Grid, Row, VenueFeed, bars_of
from nca_trader.paper.venue import Unreachable

START = 1_750_000_020  # seconds, a whole minute
NEW_YORK = new_york(2024, 2025)


class World:
    """A clock, and a venue whose bars appear `lag` seconds after they close."""

    def __init__(self, symbols=("A", "B"), step=60, delay=2.0, settle=10.0, lag=1.0):
        self.symbols, self.step, self.delay, self.settle = symbols, step, delay, settle
        self.time, self.lag, self.down, self.asked = float(START), lag, set(), []
        self.rows, self.streamed, self.post, self.closed = {}, [], None, False

    # The clock.
    def now(self):
        return int(self.time * 1e9)

    # The source.
    def fetch(self, start, stop):
        self.asked.append((self.time, start, stop))
        if any(low <= self.time < high for low, high in self.down):
            raise Unreachable("timeout")
        seen = [row for row in self.rows.values() if row.time + self.step + self.lag <= self.time]
        return [row for row in seen if start <= row.time <= stop - self.step]

    def stream(self, post):
        self.post = post

    def close(self):
        self.closed = True

    # The wait of the feed.
    def get(self, seconds):
        ahead = [item for item in self.streamed if item[0] <= self.time + seconds]
        if ahead:
            item = min(ahead)
            self.streamed.remove(item)
            self.time = max(self.time, item[0])
            return item[1]
        self.time += seconds
        return None

    def trade(self, minutes, symbols=None, price=100.0):
        for i in minutes:
            for symbol in symbols or self.symbols:
                t = START + self.step * i
                p = price + i
                self.rows[symbol, t] = Row(symbol, t, p, p + 1.0, p - 1.0, p + 0.5, 10.0 + i)

    def feed(self, period=None, sessions=None, **options):
        grid = Grid(period or self.step, *([sessions] if sessions else []))
        return VenueFeed(self, grid, clock=self, get=self.get, **options)

    def until(self, feed, seconds):
        """What the feed gives until the clock is there: (seconds after the start, what)."""
        found = []
        for item in feed:
            if self.time > START + seconds:
                feed.close()
                break
            found.append((self.time - START, item))
        return found


def bars(found):
    return [(int(item.time[0]) - START) // 60 for _, item in found if not isinstance(item, Notice)]


def codes(found):
    return [item.code for _, item in found if isinstance(item, Notice)]


def test_check_feed_accepts_every_notice_of_the_feed(monkeypatch):
    found = re.findall(r'Notice\("(\w+)"', inspect.getsource(venue_feed))
    assert set(found) == set(NOTICES) and len(found) == len(NOTICES)
    world = World()
    world.trade(range(-9, 60))
    del world.rows["A", START], world.rows["B", START]
    world.down = {(START + 130, START + 400)}  # unreachable, then stale and reconnected
    late = world.rows["A", START + 60]
    world.streamed = [
        (START + 20, late._replace(time=START)),  # not over
        (START + 900, late._replace(volume=1.0)),  # of a bar that was given
    ]
    feed, seen = world.feed(), []

    def heard(items):
        for item in items:
            seen.append((0.0, item))
            yield item

    monkeypatch.setattr(
        VenueFeed, "__iter__", lambda self, own=VenueFeed.__iter__: heard(own(self))
    )
    report = nca.check_feed(feed, count=20, history=10)
    assert not report.faults, report
    assert set(codes(seen)) == set(NOTICES) - {"late"}


def test_a_bar_comes_once_it_is_closed_and_its_values_are_the_venues():
    world = World()
    world.trade(range(60))
    found = world.until(world.feed(), 300)
    assert bars(found) == [0, 1, 2, 3]
    assert all(at >= 60 * (i + 1) for i, (at, _) in enumerate(found))
    assert [at - 60 * (i + 1) for i, (at, _) in enumerate(found)] == [2.0] * 4
    bar = found[2][1]
    assert bar.open.tolist() == [102.0, 102.0] and bar.high.tolist() == [103.0, 103.0]
    assert bar.low.tolist() == [101.0] * 2 and bar.close.tolist() == [102.5] * 2
    assert bar.volume.tolist() == [12.0] * 2 and bar.present.all()
    assert bar.open.dtype == np.float64 and bar.time.dtype == np.int64


def test_history_ends_where_the_live_bars_begin():
    world = World()
    world.trade(range(-500, 60))
    feed = world.feed()
    past = feed.history(100)
    assert len(past) == 100 and past.symbols == ("A", "B")
    last = int(past.time[-1].astype("datetime64[s]").astype(np.int64))
    assert last == START - 120  # the bar before the start has closed, but has not appeared yet
    assert bars(world.until(feed, 200)) == [-1, 0, 1, 2]


def test_a_missing_symbol_is_waited_for_and_then_repeats_its_last_close():
    world = World(settle=10.0)
    world.trade(range(60), ["A"])
    world.trade([0, 2], ["B"])
    found = world.until(world.feed(), 200)
    assert bars(found) == [0, 1, 2]
    at, bar = found[1]
    assert at >= 120 + world.settle  # it could still have come
    assert bar.present.tolist() == [True, False]
    assert bar.close.tolist() == [101.5, 100.5] and bar.open[1] == 100.5 and bar.volume[1] == 0.0


def test_a_missing_bar_of_all_is_a_gap():
    world = World()
    world.trade([0, 2, 3])
    found = world.until(world.feed(), 260)
    assert bars(found) == [0, 2, 3] and codes(found) == ["gap"]


def test_an_outage_makes_the_feed_stale_and_every_bar_comes_after_it_in_order():
    world = World()
    world.trade(range(60))
    world.down = {(START + 130, START + 400)}
    found = world.until(world.feed(), 600)
    assert bars(found) == list(range(9))
    assert codes(found) == ["unreachable", "stale", "reconnected"]
    stale = next(at for at, item in found if item == item and getattr(item, "code", "") == "stale")
    assert 240 <= stale < 240 + 31  # two bars without data, and the wait between two looks
    # While it catches up the feed is stale: only the newest bar follows "reconnected".
    kinds = [item.code if isinstance(item, Notice) else "bar" for _, item in found]
    where = kinds.index("reconnected")
    at = found[where][0]
    newest = int(at // 60) - 1
    assert (int(found[where + 1][1].time[0]) - START) // 60 == newest
    waits = np.diff([at for at, _, _ in world.asked if START + 130 <= at < START + 400])
    assert waits.min() >= 1.0 and waits.max() <= 30.0 and waits[-1] > waits[0]
    assert len(set(np.round(waits, 6))) == len(waits)  # with jitter


def test_a_second_outage_is_said_again_and_old_bars_are_forgotten(monkeypatch):
    monkeypatch.setattr(venue_feed, "REMEMBERED", 3)
    world = World()
    world.trade(range(60))
    world.down = {(START + 130, START + 190), (START + 310, START + 370)}
    feed = world.feed()
    assert codes(world.until(feed, 600)) == ["unreachable"] * 2
    assert len(feed._rows) <= 4


def test_the_jitter_comes_from_the_symbols():
    def asked():
        world = World()
        world.trade(range(60))
        world.down = {(START, START + 500)}
        world.until(world.feed(), 600)
        return world.asked

    assert asked() == asked()
    assert venue_feed.pause_after(5, ("A",)) != venue_feed.pause_after(5, ("B",))


def test_a_stream_gives_bars_early_and_the_list_of_bars_fills_what_it_loses():
    world = World(delay=5.0, settle=30.0)
    world.trade(range(60))
    for (_, t), row in world.rows.items():
        minute = (t - START) // 60
        if minute not in (2, 3):  # dropped, or mute but open
            world.streamed.append((t + 60 + 0.2, row))
    found = world.until(world.feed(), 400)
    assert bars(found) == [0, 1, 2, 3, 4, 5] and codes(found) == []
    late = [at - 60 * (i + 1) for i, (at, _) in enumerate(found)]
    assert late == pytest.approx([0.2, 0.2, 5.0, 5.0, 0.2, 0.2], abs=1e-6)


def test_duplicates_are_dropped_and_corrections_and_late_bars_are_said():
    world = World(delay=5.0)
    world.trade(range(60))
    for (_, t), row in world.rows.items():
        world.streamed.append((t + 60.2, row))
        world.streamed.append((t + 60.4, row))  # the same again
    a = world.rows["A", START]
    world.rows["A", START] = a._replace(close=99.75)
    world.streamed.append((START + 90.0, a._replace(close=99.75)))
    unfinished = world.rows["A", START + 180]
    world.streamed.append((START + 100.0, unfinished))
    found = world.until(world.feed(), 300)
    assert bars(found) == [0, 1, 2, 3]
    assert codes(found) == ["correction", "unfinished"]
    said = next(i.detail for _, i in found if isinstance(i, Notice) and i.code == "correction")
    assert said.startswith("A 2025-06-15 15:07 UTC: close 100.5 is now 99.75")
    world = World()  # of a venue without a stream the list says it, at the next bar
    world.trade(range(60))
    feed = iter(world.feed())
    next(feed)
    world.rows["A", START] = world.rows["A", START]._replace(close=99.75)
    assert next(feed).code == "correction"
    world = World()
    world.trade(range(60))
    del world.rows["B", START + 60]
    world.streamed.append((START + 150.0, Row("B", START + 60, 1.0, 1.0, 1.0, 1.0, 1.0)))
    assert "late" in codes(world.until(world.feed(), 300))


def test_minutes_make_longer_bars_live_as_in_history():
    world = World(step=60)
    world.trade(range(-2000, 120))
    feed = world.feed(period=300)
    past = feed.history(50)
    found = world.until(feed, 1500)
    live = bars_of(world.rows.values(), Grid(300), ("A", "B"))
    opens = live.time.astype("datetime64[s]").astype(np.int64)
    for _, bar in found:
        row = int(np.searchsorted(opens, bar.time[0]))
        for name in ("open", "high", "low", "close", "volume"):
            assert getattr(bar, name).tolist() == getattr(live, name)[row].tolist()
    whole = {int(t): i for i, t in enumerate(opens)}
    first = whole[int(past.time[0].astype("datetime64[s]").astype(np.int64))]
    assert (past.close == live.close[first : first + len(past)]).all()
    assert world.post is None  # parts of a bar do not come from a stream


def test_a_five_minute_bar_by_hand():
    rows = [Row("A", 600 + 60 * i, o, h, low, c, v) for i, (o, h, low, c, v) in enumerate(
        [(10, 12, 9, 11, 1), (11, 11, 8, 9, 2), (9, 15, 9, 14, 4)])]  # fmt: skip
    bars = bars_of(rows, Grid(300), ("A",))
    assert bars.time.astype("datetime64[s]").astype(int).tolist() == [600]
    found = [getattr(bars, name).item() for name in ("open", "high", "low", "close", "volume")]
    assert found == [10, 15, 8, 14, 7]
    for place, field in itertools.product(range(3), ("open", "high", "low", "close")):
        broken = [*rows]
        broken[place] = rows[place]._replace(**{field: float("nan")})
        assert np.isnan(bars_of(broken, Grid(300), ("A",)).high).all()


def test_a_missing_bar_repeats_the_close_before_it():
    rows = [Row("A", t, 1, 1, 1, c, 2) for t, c in ((300, 5), (360, 6), (900, 7))]
    rows += [Row("B", t, 1, 1, 1, 9, 2) for t in (600, 1200)]
    bars = bars_of(rows[::-1], Grid(300), ("A", "B"), before=np.array([3.0, 4.0]))
    assert bars.close.tolist() == [[6, 4], [6, 9], [7, 9], [7, 9]]
    assert bars.present.tolist() == [[True, False], [False, True], [True, False], [False, True]]
    assert bars.volume.tolist() == [[4, 0], [0, 2], [2, 0], [0, 2]]
    assert len(bars_of([], Grid(300), ("A", "B"))) == 0


def utc(text):
    return int(np.datetime64(text, "s").astype(np.int64))


def test_bars_of_sessions_count_from_the_open_in_both_halves_of_the_year():
    grid = Grid(3600, NEW_YORK)
    for day, opens, count in [("2024-03-08", "14:30", 7), ("2024-03-11", "13:30", 7),
                              ("2024-11-29", "14:30", 4)]:  # fmt: skip
        start = utc(day)
        found = grid.expected(start, start + 86_400).tolist()
        assert found == [utc(f"{day}T{opens}") + 3600 * i for i in range(count)]
    assert grid.expected(utc("2024-03-09"), utc("2024-03-11")).tolist() == []
    friday = utc("2024-03-08T20:30")
    assert grid.following(friday) == utc("2024-03-11T13:30")
    assert grid.opens(np.array([utc("2024-03-08T14:29"), utc("2024-03-08T15:29")])).tolist() == [
        -1,
        utc("2024-03-08T14:30"),
    ]


def test_days_are_named_by_their_date_and_holidays_are_not_expected():
    grid = Grid(86_400, NEW_YORK)
    found = grid.expected(utc("2024-12-20"), utc("2024-12-28"))
    assert found.tolist() == [utc(f"2024-12-{d}") for d in (23, 24, 26, 27)]


def test_no_bar_is_missed_and_none_is_stale_over_night_and_weekend():
    world = World(symbols=("A",), step=86_400, delay=60.0, settle=1800.0)
    start = utc("2024-07-02")
    world.time = float(start)
    for day in ("2024-07-02", "2024-07-03", "2024-07-05", "2024-07-08", "2024-07-09"):
        world.rows["A", utc(day)] = Row("A", utc(day), 1.0, 1.0, 1.0, 1.0, 1.0)
    found = world.until(world.feed(sessions=NEW_YORK), utc("2024-07-09T12:00") - START)
    days = [str(np.datetime64(int(bar.time[0]), "s"))[:10] for _, bar in found]
    assert days == ["2024-07-02", "2024-07-03", "2024-07-05", "2024-07-08"]


def test_closing_ends_a_feed_that_waits_on_real_clocks():
    world = World()
    feed = VenueFeed(world, Grid(60))
    import threading

    ended = threading.Thread(target=lambda: list(feed))
    ended.start()
    time.sleep(0.05)
    feed.close()
    ended.join(2.0)
    assert not ended.is_alive() and world.closed
