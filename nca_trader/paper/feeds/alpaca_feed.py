"""Bars of US stocks from Alpaca: history by REST, minutes by REST and WebSocket, on alpaca-py."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from nca_trader.data.calendar import SESSIONS, Sessions
from nca_trader.errors import ConfigError
from nca_trader.paper.feeds.venue_feed import (
    DAY_SECONDS,
    Grid,
    Row,
    VenueFeed,
    pause_after,
    seconds_of,
)
from nca_trader.paper.venue import Unreachable
from nca_trader.paper.venues.alpaca import SHAPES, guarded, nanoseconds, paper_keys
from nca_trader.paper.venues.net import SILENT, TIMEOUT, GuardedSession, check_url

with warnings.catch_warnings():  # it imports the old client of `websockets`
    warnings.simplefilter("ignore", DeprecationWarning)
    from alpaca.common.exceptions import APIError
    from alpaca.data.enums import Adjustment, DataFeed
    from alpaca.data.historical.stock import StockHistoricalDataClient
    from alpaca.data.live.stock import StockDataStream
    from alpaca.data.requests import StockBarsRequest
    from alpaca.data.timeframe import TimeFrame, TimeFrameUnit
from requests import RequestException

DATA_HOSTS = frozenset({"data.alpaca.markets"})
STREAM_HOSTS = frozenset({"stream.data.alpaca.markets"})
DATA_URL, STREAM_URL = "APCA_API_DATA_URL", "APCA_API_STREAM_URL"
MINUTE = 60
QUIET = 120.0  # seconds without a message after which a stream is opened again, at least


def grid_of(every: str, sessions: Sessions | None = None) -> Grid:
    """Return the opens of bars of a length in sessions; None: New York's hours."""
    return Grid(seconds_of(every), sessions or SESSIONS["new_york"])


def open_feed(
    symbols: Sequence[str], every: str, *, sessions: Sessions | None = None, **options: Any
) -> VenueFeed:
    """Return live bars of US stocks, of New York's sessions.

    Bars of a day are Alpaca's own, given at 00:00 UTC after the session. Others are made of the
    minutes within the sessions, in history and live alike.

    Args:
      symbols: US stocks.
      every: length of a bar, e.g. "1d", "5min".
      sessions: when to trade; None: New York's hours.
      **options: those of `AlpacaSource`.
    """
    source = AlpacaSource(symbols, every, **options)
    return VenueFeed(source, grid_of(every, sessions))


class AlpacaSource:
    """A `Source`: Alpaca's closed days, or the minutes that make bars of other lengths.

    Prices are adjusted for splits up to today.

    Args:
      symbols: US stocks.
      every: the run's length of a bar, e.g. "1d", "5min".
      feed: "iex", or "sip" with a subscription.
      url: REST host; else APCA_API_DATA_URL, or Alpaca's.
      stream_url: WebSocket; else APCA_API_STREAM_URL, or Alpaca's.
      timeout: seconds of a call.

    Raises:
      ConfigError: no keys, or another feed. HostError: a URL of another host.
    """

    def __init__(
        self,
        symbols: Sequence[str],
        every: str,
        *,
        feed: str = "iex",
        url: str | None = None,
        stream_url: str | None = None,
        timeout: float = TIMEOUT,
    ):
        period = seconds_of(every)
        if feed not in ("iex", "sip"):
            raise ConfigError(f"feed {feed!r} is unknown; there are iex and sip.")
        if period % MINUTE or not period:
            raise ConfigError(f"bars of {every}: Alpaca's shortest bar is 1min; give a multiple.")
        self._keys = paper_keys()
        url = (url or os.environ.get(DATA_URL) or "https://data.alpaca.markets").rstrip("/")
        check_url(url, DATA_HOSTS)
        stream = stream_url or os.environ.get(STREAM_URL)
        self._stream_url = stream or f"wss://stream.data.alpaca.markets/v2/{feed}"
        check_url(self._stream_url, STREAM_HOSTS, ("wss", "ws"))
        key, secret = self._keys.key, self._keys.secret
        client = StockHistoricalDataClient(key, secret, raw_data=True, url_override=url)
        self._session = GuardedSession(DATA_HOSTS, read_only=True, timeout=timeout)
        self._client: Any = guarded(client, self._session)
        self._feed = feed
        # Other lengths are made of minutes, on the grid of the session.
        self.symbols, self.step = tuple(symbols), period if period == DAY_SECONDS else MINUTE
        # A day may be corrected after the close, so it settles later than a minute.
        self.delay, self.settle = (5.0, 30.0) if self.step == MINUTE else (60.0, 1800.0)
        self._streaming: _Streaming | None = None

    def fetch(self, start: int, stop: int) -> list[Row]:
        """Return the bars that open at or after `start` and end by `stop`, all pages of them."""
        if stop - self.step < start:
            return []
        daily = self.step == DAY_SECONDS
        # A day opens at its New York midnight, hours after the date's 00:00 UTC.
        end = stop - (1 if daily else self.step)
        request = StockBarsRequest(
            symbol_or_symbols=list(self.symbols),
            timeframe=TimeFrame(1, TimeFrameUnit("Day" if daily else "Min")),
            start=datetime.datetime.fromtimestamp(start, datetime.UTC),
            end=datetime.datetime.fromtimestamp(end, datetime.UTC),
            adjustment=Adjustment.SPLIT,
            feed=DataFeed(self._feed),
        )
        self._session.forget()
        try:
            found: Any = self._client.get_stock_bars(request)
            rows = [_row(symbol, bar, daily) for symbol, bars in found.items() for bar in bars]
        except (APIError, RequestException, *SHAPES):
            detail = self._keys.redact(self._session.body) if self._session.status != 200 else ""
            raise Unreachable(self._session.reason(), detail) from None
        # An answer may begin before what was asked for.
        return [row for row in rows if start <= row.time <= stop - self.step]

    def stream(self, post: Callable[[Row], None]) -> None:
        """Post minutes as they close; days have no stream of closed bars."""
        if self.step == MINUTE and self._streaming is None:
            self._streaming = _Streaming(self, post)

    def close(self) -> None:
        """End the stream and the connections."""
        if self._streaming is not None:
            self._streaming.close()
        self._session.close()


open_source = AlpacaSource


def _row(symbol: str, bar: dict[str, Any], daily: bool) -> Row:
    time = bar["t"]
    seconds = nanoseconds(time) // 10**9 if isinstance(time, str) else int(time.seconds)
    if daily:
        seconds = seconds // DAY_SECONDS * DAY_SECONDS
    return Row(symbol, seconds, *(float(bar[name]) for name in ("o", "h", "l", "c", "v")))


class _Guarded(StockDataStream):
    """The stream, which sends its keys to the host that was asked for and to no other."""

    async def _auth(self) -> None:
        # The client of `websockets` follows redirects, and alpaca-py would send the keys there.
        asked = self._endpoint.partition("://")[2].partition("/")[0]
        if self._ws is None or self._ws.request_headers["Host"] != asked:
            raise ValueError("redirected to another host")
        await super()._auth()


class _Streaming:
    """Runs the stream in a thread until it is closed; alpaca-py connects again by itself."""

    def __init__(self, source: AlpacaSource, post: Callable[[Row], None]):
        keys = source._keys
        self._stream = _Guarded(
            keys.key,
            keys.secret,
            raw_data=True,
            feed=DataFeed(source._feed),
            # At level DEBUG the client of `websockets` logs each frame, and so the keys.
            websocket_params={"ping_interval": 10, "ping_timeout": 30, "logger": SILENT},
            url_override=source._stream_url,
            data_timeout=max(QUIET, 2.0 * source.step),
        )

        self._stream._reconnect_delay = lambda retries: pause_after(retries, source.symbols)

        async def take(bar: Any) -> None:
            with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
                # A message of another shape is left out: the next request has the bar.
                post(_row(bar["S"], bar, daily=False))

        self._stream.subscribe_bars(take, *source.symbols)
        # A minute is sent again where late trades changed it.
        self._stream.subscribe_updated_bars(take, *source.symbols)
        # Its warnings would otherwise go to stderr, with tracebacks.
        logging.getLogger("alpaca").addHandler(logging.NullHandler())
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="alpaca-stream")
        self._thread.start()

    def close(self) -> None:
        """End the connection and the thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended by itself
            self._loop.call_soon_threadsafe(lambda: self._task and self._task.cancel())
        # Not longer: a connection that hangs must not keep a session from ending.
        self._thread.join(1.0)

    def _run(self) -> None:
        async def run() -> None:
            self._task = asyncio.current_task()
            try:
                await self._stream._run_forever()
            except asyncio.CancelledError:
                pass
            finally:
                await self._stream.close()

        self._loop.run_until_complete(run())
        self._loop.close()
