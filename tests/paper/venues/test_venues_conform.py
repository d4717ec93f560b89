"""The suite that a user's own venue and feed pass is passed by ours, on their local servers."""

import time

import pytest
from fake_alpaca import FakeAlpaca
from fake_exchange import FakeExchange
from fake_venue import Made

from nca_trader.paper.feeds import alpaca_feed, ccxt_feed
from nca_trader.paper.venues import alpaca

check = pytest.importorskip("nca_trader.paper.check", reason="the suite is of another part")
MINUTE = 1_750_082_400  # 2025-06-16 14:00 UTC, in a session


pytestmark = pytest.mark.usefixtures("keys")


def test_an_alpaca_account():
    with FakeAlpaca(clock=time.time()) as fake:
        check.check_broker(alpaca.open_venue(["SPY"], url=fake.url), "SPY", 2.0).raise_if_failed()


def bars(step, scale=1):
    return {
        scale * (MINUTE + step * i): (100.0 + i % 9, 110.0, 90.0, 101.0 + i % 9, 5.0)
        for i in range(-700, 200)
    }


def test_an_alpaca_feed():
    with FakeAlpaca() as fake:
        fake.bars = {"SPY": bars(60)}
        feed = alpaca_feed.open_feed(
            ["SPY"], "1min", url=fake.url, stream_url="ws://127.0.0.1:9/v2/iex"
        )
        Made(feed, MINUTE + 1800.0)
        check.check_feed(feed).raise_if_failed()


def test_a_ccxt_feed():
    with FakeExchange() as fake:
        fake.klines["BTCUSDT"] = bars(3600, 1000)
        feed = ccxt_feed.open_feed("binance", ["BTC/USDT"], "1h", url=fake.url)
        clock = Made(feed, MINUTE + 1800.0)
        fake.clock = lambda: clock.time
        check.check_feed(feed).raise_if_failed()
