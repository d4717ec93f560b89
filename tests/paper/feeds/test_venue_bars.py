"""Bars of Alpaca and of an exchange through their clients, against local servers."""

import json
import logging
import time

import numpy as np
import pytest
from fake_alpaca import FakeAlpaca, FakeStream
from fake_exchange import FakeExchange
from fake_okx import MOST, FakeOkx
from fake_venue import CANARY, KEY, Made

from nca_trader.cli import main
from nca_trader.errors import ConfigError
from nca_trader.paper.feeds import alpaca_feed, ccxt_feed
from nca_trader.paper.feeds.venue_feed import Row
from nca_trader.paper.venue import Unreachable
from nca_trader.paper.venues import net

MINUTE = 1_750_082_400 // 60 * 60  # 2025-06-16 14:00 UTC, a Monday with a session


pytestmark = pytest.mark.usefixtures("keys")


def walk(count, first=MINUTE, step=60, price=100.0):
    return {
        first + step * i: (price + i, price + i + 1, price + i - 1, price + i + 0.5, 10.0 + i)
        for i in range(count)
    }


@pytest.fixture
def fake():
    with FakeAlpaca() as fake:
        fake.bars = {"SPY": walk(50), "QQQ": walk(50, price=50.0)}
        yield fake


def test_minutes_of_many_pages_and_symbols(fake):
    fake.pages = 7
    source = alpaca_feed.open_source(["SPY", "QQQ"], "5min", url=fake.url)
    rows = source.fetch(MINUTE + 60, MINUTE + 600)
    assert len(rows) == 18 and len(set(rows)) == 18
    assert {row.time for row in rows} == {MINUTE + 60 * i for i in range(1, 10)}
    assert Row("SPY", MINUTE + 120, 102.0, 103.0, 101.0, 102.5, 12.0) in rows
    assert {call[2]["adjustment"] for call in fake.calls} == {"split"}
    assert source.fetch(MINUTE, MINUTE + 59) == []  # no unfinished bar
    assert len(source.fetch(MINUTE, MINUTE + 60)) == 2
    fake.deaf = True  # to the span: the bar that is not over comes as well
    assert len(source.fetch(MINUTE, MINUTE + 60)) == 2
    source.close()


def test_days_are_named_by_their_date(fake):
    day = 86_400
    monday = MINUTE // day * day
    fake.days = {"SPY": {monday + 4 * 3600 + i * day: (1, 2, 0.5, 1.5, 9) for i in range(3)}}
    source = alpaca_feed.open_source(["SPY"], "1d", url=fake.url)
    assert [row.time for row in source.fetch(monday, monday + 2 * day)] == [monday, monday + day]
    source.close()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("429", "http-429"), ("500", "http-500"), ("html", "unreadable-body"), ("hang-before",
      "timeout"), ("reset-before", "connection"), ("redirect", "redirected")],
)  # fmt: skip
def test_history_that_does_not_answer_is_unreachable_and_asked_once(fake, fault, reason):
    source = alpaca_feed.open_source(["SPY"], "1min", url=fake.url, timeout=0.3)
    fake.fail("GET", "/v2/stocks", fault)
    with pytest.raises(Unreachable) as caught:
        source.fetch(MINUTE, MINUTE + 600)
    assert caught.value.reason == reason
    assert fake.count("GET", "/v2/stocks") == 1
    assert len(source.fetch(MINUTE, MINUTE + 600)) == 10
    source.close()


def wait_for(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def test_the_stream_posts_bars_and_corrections_and_comes_back_after_a_drop(fake, caplog):
    caplog.set_level(logging.DEBUG)
    with FakeStream() as stream:
        source = alpaca_feed.open_source(["SPY"], "1min", url=fake.url, stream_url=stream.url)
        posted = []
        source.stream(posted.append)
        assert stream.subscribed.wait(5)
        assert stream.messages[0] == {"action": "auth", "key": KEY, "secret": CANARY}
        assert stream.messages[1]["bars"] == stream.messages[1]["updatedBars"] == ["SPY"]
        stream.send("b", "SPY", MINUTE, (1.0, 2.0, 0.5, 1.5, 9.0))
        stream.send("u", "SPY", MINUTE, (1.0, 2.0, 0.5, 1.75, 9.0))
        wait_for(lambda: len(posted) == 2)
        assert posted[0] == Row("SPY", MINUTE, 1.0, 2.0, 0.5, 1.5, 9.0)
        assert posted[1].close == 1.75
        source._streaming._stream._reconnect_delay = lambda retries: 0.01
        stream.drop()
        assert stream.subscribed.wait(5) and stream.connections == 2
        stream.send("b", "SPY", MINUTE + 60, (1.0, 2.0, 0.5, 1.5, 9.0))
        wait_for(lambda: len(posted) == 3)
        began = time.monotonic()
        source.close()
        assert time.monotonic() - began < 2.0
        assert not source._streaming._thread.is_alive()
    for word in (KEY, CANARY):
        assert word not in caplog.text
    # Frames are logged as hexadecimal digits, in which a search finds no key.
    assert not [record for record in caplog.records if record.name == "websockets.client"]


def test_a_mute_stream_is_opened_again(fake, monkeypatch):
    monkeypatch.setattr(alpaca_feed, "QUIET", 0.05)
    with FakeStream() as stream:
        source = alpaca_feed.open_source(["SPY"], "1min", url=fake.url, stream_url=stream.url)
        source.step = 0.02  # twice a bar is the least silence
        opened = alpaca_feed._Streaming(source, lambda row: None)
        opened._stream._reconnect_delay = lambda retries: 0.01
        wait_for(lambda: stream.connections >= 3)
        opened.close()
        source.close()


def test_a_stream_that_redirects_does_not_get_the_keys(fake):
    with FakeStream() as stream, FakeStream() as other:
        stream.redirect = other.url
        source = alpaca_feed.open_source(["SPY"], "1min", url=fake.url, stream_url=stream.url)
        source.stream(lambda row: None)
        wait_for(lambda: other.connections)
        time.sleep(0.1)
        source.close()
        assert other.messages == []


def test_waits_between_connections_grow_to_half_a_minute(fake):
    def waits(symbol):
        with FakeStream() as stream:
            source = alpaca_feed.open_source([symbol], "1min", url=fake.url, stream_url=stream.url)
            source.stream(lambda row: None)
            found = [source._streaming._stream._reconnect_delay(i) for i in range(1, 12)]
            source.close()
        return found

    found = waits("SPY")
    assert found == waits("SPY") != waits("QQQ")
    assert min(found) >= 1.0 and max(found) <= 30.0 and found[-1] >= 15.0


def test_live_minutes_from_stream_and_rest_end_to_end(fake, monkeypatch):
    """The whole feed on real threads: the clock alone is made up."""

    with FakeStream() as stream:
        feed = alpaca_feed.open_feed(["SPY", "QQQ"], "1min", url=fake.url, stream_url=stream.url)
        clock = Made(feed, MINUTE + 600.2)
        past = feed.history(5)
        assert past.close[:, 0].tolist() == [105.5 + i for i in range(5)]
        items = iter(feed)
        clock.time = MINUTE + 660.3

        def send_late(seconds):
            for symbol in ("SPY", "QQQ"):
                t = int(clock.time) // 60 * 60 - 60
                feed._messages.put(Row(symbol, t, *fake.bars[symbol][t]))
            return feed._messages.get(timeout=1)

        feed._get = send_late
        bar = next(items)
        assert int(bar.time[0]) == MINUTE + 600 and bar.close.tolist() == [110.5, 60.5]
        assert stream.subscribed.wait(5)
        feed._get = lambda seconds: None
        clock.time = MINUTE + 730.0  # nothing came by the stream
        bar = next(items)
        assert int(bar.time[0]) == MINUTE + 660 and bar.close.tolist() == [111.5, 61.5]
        feed.close()


def test_longer_bars_are_made_of_listed_minutes_and_no_stream_is_opened(fake):
    """Two bars of five minutes by hand; the minute that traded nothing has no bar in the list."""

    del fake.bars["SPY"][MINUTE + 720]
    with FakeStream() as stream:
        feed = alpaca_feed.open_feed(["SPY", "QQQ"], "5min", url=fake.url, stream_url=stream.url)
        clock = Made(feed, MINUTE + 600.2)
        assert feed.history(2).close[:, 0].tolist() == [104.5, 109.5]
        items = iter(feed)
        first, second = next(items), next(items)
        feed.close()
        assert stream.connections == 0
    assert int(first.time[0]) == MINUTE + 600 and 905.0 <= clock.time - MINUTE - 300 < 940.0
    values = [first.open, first.high, first.low, first.close, first.volume]
    # Of SPY the minutes 10, 11, 13 and 14; of QQQ all five.
    assert [v.tolist() for v in values] == [
        [110.0, 60.0], [115.0, 65.0], [109.0, 59.0], [114.5, 64.5],
        [20.0 + 21.0 + 23.0 + 24.0, 20.0 + 21.0 + 22.0 + 23.0 + 24.0],
    ]  # fmt: skip
    assert second.close.tolist() == [119.5, 69.5]


def test_hosts_of_market_data(monkeypatch):
    with pytest.raises(net.HostError, match="not called"):
        alpaca_feed.open_source(["SPY"], "1d", url="https://api.alpaca.markets")
    with pytest.raises(net.HostError, match="not called"):
        alpaca_feed.open_source(["SPY"], "1d", stream_url="wss://evil.example/v2/iex")
    with pytest.raises(net.HostError, match="not called"):
        alpaca_feed.open_source(["SPY"], "1d", stream_url="ws://stream.data.alpaca.markets/v2")
    with pytest.raises(ConfigError, match="iex and sip"):
        alpaca_feed.open_source(["SPY"], "1d", feed="otc")
    with pytest.raises(ConfigError, match="shortest bar is 1min"):
        alpaca_feed.open_source(["SPY"], "30s")
    source = alpaca_feed.open_source(["SPY"], "1d")
    assert source._session.hosts == {"data.alpaca.markets"} and source._session.read_only
    source.close()


# --- an exchange ---

HOUR = 1_750_082_400 // 3600 * 3600


@pytest.fixture
def exchange():
    with FakeExchange(clock=lambda: HOUR + 9.5 * 3600) as fake:
        for symbol, price in (("BTCUSDT", 50_000.0), ("ETHUSDT", 2_000.0)):
            bars = walk(10, HOUR, 3600, price)
            fake.klines[symbol] = {1000 * t: values for t, values in bars.items()}
        yield fake


def test_candles_of_many_pages_without_the_unfinished_one(exchange):
    exchange.kline_limit = 3
    source = ccxt_feed.open_source("binance", ["BTC/USDT", "ETH/USDT"], "1h", url=exchange.url)
    assert source.step == 3600
    rows = source.fetch(HOUR, HOUR + 9 * 3600 + 1800)
    assert [row.time for row in rows] == 2 * [HOUR + 3600 * i for i in range(9)]
    assert rows[1] == Row("BTC/USDT", HOUR + 3600, 50_001.0, 50_002.0, 50_000.0, 50_001.5, 11.0)
    assert not any("X-MBX-APIKEY" in call[4] for call in exchange.calls)
    source.close()


def test_an_exchange_is_asked_without_keys_and_only_by_get():
    client, session = ccxt_feed.open_client("binance")
    assert not client.apiKey and "api.binance.com" in session.hosts
    client.apiKey, client.secret = KEY, CANARY
    with pytest.raises(net.HostError, match="only GET"):
        client.private_post_order({"symbol": "BTCUSDT"})
    client.session.close()
    with pytest.raises(ConfigError, match="no exchange 'nasdaq'"):
        ccxt_feed.open_client("nasdaq")
    with pytest.raises(net.HostError, match="not called"):
        ccxt_feed.open_source("binance", ["BTC/USDT"], "1h", url="https://example.com")


def test_a_redirect_of_an_exchange_is_not_followed(exchange):
    source = ccxt_feed.open_source("binance", ["BTC/USDT"], "1h", url=exchange.url)
    with FakeExchange() as other:
        exchange.elsewhere = other.url
        exchange.fail("GET", "/api/v3/klines", "redirect")
        with pytest.raises(Unreachable, match="redirected"):
            source.fetch(HOUR, HOUR + 7200)
        assert other.calls == []
    source.close()


def test_lengths_that_an_exchange_does_not_have_are_made_of_shorter_ones(exchange):
    source = ccxt_feed.open_source("binance", ["BTC/USDT"], "3h", url=exchange.url)
    assert source.step == 3600
    with pytest.raises(ConfigError, match="no spot market"):
        ccxt_feed.open_source("binance", ["NO/USDT"], "1h", url=exchange.url)
    source.close()


def test_candles_that_do_not_come_are_unreachable(exchange):
    source = ccxt_feed.open_source("binance", ["BTC/USDT"], "1h", url=exchange.url, timeout=0.3)
    for fault in ("429", "500", "html", "hang-before", "reset-before"):
        exchange.fail("GET", "/api/v3/klines", fault)
        with pytest.raises(Unreachable):
            source.fetch(HOUR, HOUR + 7200)
    source.close()


# --- an exchange that answers for a span ---


@pytest.fixture
def okx(monkeypatch):
    """Hours of two coins; the second was listed 700 hours later and did not trade for 400."""
    with FakeOkx(clock=lambda: HOUR + 3600 * 2000 + 1800) as fake:
        monkeypatch.setenv("NCA_TRADER_CCXT_URL", fake.url)
        bars = walk(2001, HOUR, 3600)
        fake.hours = {"BTC-USDT": bars, "NEW-USDT": {
            t: values for t, values in bars.items()
            if t >= HOUR + 3600 * 700 and not HOUR + 3600 * 1000 <= t < HOUR + 3600 * 1400
        }}  # fmt: skip
        yield fake


def test_spans_without_a_trade_do_not_end_a_download(okx):
    """An answer without a bar is of its span alone: before a listing, and while nothing traded."""
    symbols = ["BTC/USDT", "NEW/USDT"]
    source = ccxt_feed.open_source("okx", symbols, "1h")
    rows = source.fetch(HOUR, HOUR + 3600 * 2000 + 1800)
    source.close()
    for symbol, name in zip(symbols, okx.hours, strict=True):
        found = [(row.time, tuple(row[2:7])) for row in rows if row.symbol == symbol]
        assert found == list(okx.hours[name].items())[:-1]  # the last is not over
    assert okx.count("GET", "/api/v5/market") < 2 * (2000 // MOST + 2) + 2
    assert all(call[0] == "GET" and "OK-ACCESS-KEY" not in call[4] for call in okx.calls)


def test_the_command_says_which_symbol_begins_later_than_asked(okx, tmp_path, capsys):
    words = ["data", "fetch", "ccxt:okx", "BTC/USDT,NEW/USDT", "--from", "2025-06-17", "--bar",
             "1h", "--to", "2025-07-20", "--out", str(tmp_path / "coins.csv")]  # fmt: skip
    assert main([*words, "--json"]) == 0
    printed = capsys.readouterr().out
    listed = str(np.datetime64(HOUR + 3600 * 700, "s"))[:10]
    assert f"NEW/USDT on {listed}: the venue gave nothing from 2025-06-17 until then" in printed
    assert json.loads(printed.splitlines()[-1])["late"] == {"NEW/USDT": listed}


@pytest.mark.parametrize(("hong_kong", "step"), [(False, 86_400), (True, 4 * 3600)])
def test_days_that_begin_elsewhere_are_made_of_shorter_bars(okx, hong_kong, step):
    """A day of Hong Kong named by UTC's date would close eight hours after its name says."""
    okx.only_hong_kong = hong_kong
    feed = ccxt_feed.open_feed("okx", ["BTC/USDT"], "1d")
    assert feed.source.step == step
    Made(feed, okx.clock())
    past = feed.history(3)
    feed.close()
    for i, opened in enumerate(past.time.astype("datetime64[s]").astype(np.int64).tolist()):
        hours = [okx.hours["BTC-USDT"][opened + 3600 * h] for h in range(24)]
        assert opened % 86_400 == 0
        assert (past.open[i, 0], past.close[i, 0]) == (hours[0][0], hours[-1][3])
        assert past.volume[i, 0] == sum(values[4] for values in hours)


def test_live_hours_of_a_second_exchange(okx):
    feed = ccxt_feed.open_feed("okx", ["BTC/USDT", "NEW/USDT"], "1h")
    Made(feed, float(HOUR + 3600 * 1500), lambda time: setattr(okx, "clock", lambda: time))
    past = feed.history(200)
    assert past.close[-1].tolist() == [1599.5, 1599.5] and past.present[:100, 1].sum() == 0
    items = iter(feed)
    for price in (1600.5, 1601.5, 1602.5):
        assert next(items).close.tolist() == [price, price]
    feed.close()
