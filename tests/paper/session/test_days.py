"""Every feed, at each length of a bar, trades its newest bar and no older one.

The venues are local servers that list a bar as late as the real ones do; the clock is made up.
"""

import contextlib

import numpy as np
import pytest
from fake_alpaca import FakeAlpaca
from fake_exchange import FakeExchange
from fake_venue import Made
from livedesk import SECOND, Still

from nca_trader.paper.feeds import alpaca_feed, ccxt_feed
from nca_trader.paper.journal.journal import Journal, read_events
from nca_trader.paper.session.trade import open_session
from nca_trader.paper.venues.exchange import Exchange

DAY, MONDAY = 86_400, 1_750_032_000  # 2025-06-16 00:00 UTC
OPEN = MONDAY + 13 * 3600 + 1800  # New York's session of that day
STEPS = {"1s": 1, "1min": 60, "1h": 3600, "1d": DAY}

pytestmark = pytest.mark.usefixtures("keys")


def values(i):
    price = 100.0 + 9.0 * np.sin(0.7 * i)
    return (price, price + 1.0, price - 1.0, price + 0.5, 10.0)


def at_alpaca(stack, every, late, begin):
    fake = stack.enter_context(FakeAlpaca())
    days = [MONDAY + DAY * d for d in range(-40, 6)]
    days = [d for d in days if (d // DAY + 3) % 7 < 5]  # 1970-01-01 was a Thursday
    # A day is stamped with New York's midnight.
    fake.days = {"SPY": {d + 4 * 3600: values(d // DAY) for d in days}}
    fake.bars = {"SPY": {
        t: values(t // 60) for d in days for t in range(d + OPEN - MONDAY, d + 20 * 3600, 60)
    }}  # fmt: skip
    fake.late = late
    feed = alpaca_feed.open_feed(["SPY"], every, url=fake.url, stream_url="ws://127.0.0.1:9/v2/iex")
    return Made(feed, begin, lambda time: setattr(fake, "clock", time)), feed


def at_binance(stack, every, late, begin):
    fake = stack.enter_context(FakeExchange())
    step = STEPS[every]
    first = int(begin) // step - 60
    fake.klines["BTCUSDT"] = {1000 * step * i: values(i) for i in range(first, first + 90)}
    fake.late = late
    feed = ccxt_feed.open_feed("binance", ["BTC/USDT"], every, url=fake.url)
    return Made(feed, begin, lambda time: setattr(fake, "clock", lambda: time)), feed


# Of each: the venue, the length, how late a bar is listed, when the session begins, how many live
# bars it gets, and how long after its end a bar is given at most.
CASES = [
    (at_binance, "1s", 0.5, MONDAY + 0.25, 8, 1.1),
    (at_binance, "1min", 3.0, MONDAY + 20, 5, 5.0),
    (at_binance, "1h", 3.0, MONDAY + 1800, 5, 5.0),
    (at_binance, "1d", 10.0, MONDAY + 7 * 3600, 4, 12.0),
    (at_alpaca, "1min", 4.0, OPEN + 3600 + 20, 5, 6.0),
    (at_alpaca, "5min", 4.0, OPEN + 3600 + 20, 5, 6.0),
    (at_alpaca, "1h", 4.0, OPEN + 3600 + 20, 4, 6.0),
    (at_alpaca, "1d", 1200.0, MONDAY + 15 * 3600, 4, 1300.0),
]


@pytest.mark.heavy
@pytest.mark.parametrize(("venue", "every", "late", "begin", "count", "within"), CASES)
@pytest.mark.few(3)
def test_the_newest_bar_is_traded_on_and_no_older_one(
    stage, tmp_path, venue, every, late, begin, count, within
):
    given = {}
    with contextlib.ExitStack() as stack:
        clock, feed = venue(stack, every, late, float(begin))
        seen = []
        agent = stage.agent(
            symbols=feed.symbols, targets=(0.0, 0.4, 0.8),
            decide=lambda *_: seen.append(1) or np.eye(3)[[len(seen) % 3]],
        )  # fmt: skip
        books = Exchange(tmp_path / "books", 1e5, feed.symbols, agent.rules)
        path = tmp_path / "paper.db"
        stack.callback(books.close)
        with Journal(path, feed.now) as journal:
            session = open_session(agent, feed, books, journal, 1e5, warmup=12, clock=Still())

            def enough():
                if session.counts["decisions"]:
                    given.setdefault(session._state.last, clock.time)
                return len(given) > count or clock.time > begin + 20 * feed.period + 5 * DAY

            session.trade(enough)
    bars = [e.ts_event // SECOND for e in read_events(path, "bar")]
    decided = [e.ts_event // SECOND for e in read_events(path, "decision")]
    # The last bars of all, one after the other; of the history the newest alone.
    assert decided == bars[-len(decided) :] and len(decided) == len(given)
    sent = {e.body["bar"] for e in read_events(path, "order_intent")}
    assert sent == set(decided)
    assert [
        e.body for e in read_events(path, "order_terminal") if e.body["reason"] != "filled"
    ] == []
    assert any(True for _ in read_events(path, "fill"))
    live = {t: at for t, at in given.items() if t != decided[0]}
    assert len(live) == count
    for opened, at in live.items():
        assert late <= at - opened - feed.period <= within, (opened, at)
