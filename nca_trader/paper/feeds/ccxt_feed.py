"""Bars of spot markets through ccxt, from an exchange's public REST interface, without keys."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from nca_trader.errors import ConfigError, extra
from nca_trader.paper.feeds.venue_feed import Grid, Row, VenueFeed, seconds_of
from nca_trader.paper.venue import Unreachable

with extra("ccxt is not installed; pip install ccxt."):
    import ccxt
    from requests import RequestException

    from nca_trader.paper.venues.net import SILENT, TIMEOUT, GuardedSession, check_url, is_loopback

URL = "NCA_TRADER_CCXT_URL"  # a server of this machine in place of the exchange
HOUR = 3600
# Where ccxt does not know what an exchange gives:
PAGE = 1000  # bars of one answer
SKIPPED = 100  # bars to go on by after an empty answer
FAULTS = (ccxt.BaseError, RequestException, ValueError, KeyError, TypeError, AttributeError)


def hosts_of(urls: Any, hostname: str | None) -> frozenset[str]:
    """Return the hosts among ccxt's URLs of an exchange: a text, or a dict of dicts."""
    if isinstance(urls, dict):
        return frozenset().union(*(hosts_of(value, hostname) for value in urls.values()))
    host = str(urls or "").replace("{hostname}", hostname or "").partition("://")[2]
    return frozenset({host.partition("/")[0].partition(":")[0]} - {""})


def open_client(
    exchange: str, *, url: str | None = None, timeout: float = TIMEOUT
) -> tuple[Any, GuardedSession]:
    """Return a ccxt client of spot markets that only reads, and the session that it sends through.

    Args:
      exchange: ccxt's name, e.g. "binance".
      url: a server of this machine in place of the exchange's public hosts.
      timeout: seconds of a call.

    Raises:
      ConfigError: no such exchange. HostError: `url` is another machine.
    """
    if exchange not in ccxt.exchanges:
        raise ConfigError(f"ccxt has no exchange {exchange!r}; give e.g. binance.")
    options = {"fetchMarkets": {"types": ["spot"]}, "maxRetriesOnFailure": 0}
    client = getattr(ccxt, exchange)(
        {
            "timeout": int(1000 * timeout),
            "options": options | {"defaultType": "spot", "fetchCurrencies": False},
        }
    )
    client.has["fetchCurrencies"] = False  # signed, and at production hosts only
    hosts = hosts_of(client.urls.get("api"), client.hostname)
    url = url or os.environ.get(URL)
    if url:
        check_url(url, ())
        client.urls["api"] = _replaced(client.urls["api"], url.rstrip("/"))
        client.enableRateLimit = not is_loopback(url.partition("://")[2].partition(":")[0])
    session = GuardedSession(() if url else hosts, read_only=True, timeout=timeout)
    session.trust_env = False  # as ccxt sets its own
    client.session.close()
    client.session = session
    client.logger = SILENT  # at level DEBUG it writes every answer
    return client, session


def _replaced(urls: Any, url: str) -> Any:
    if isinstance(urls, dict):
        return {name: _replaced(value, url) for name, value in urls.items()}
    return url + "/" + str(urls).partition("://")[2].partition("/")[2] if urls else urls


def loaded(call: Callable[[], Any], session: GuardedSession) -> Any:
    """Return what a call of ccxt returns.

    Raises:
      Unreachable: it fails.
    """
    session.forget()
    try:
        answer = call()
    except FAULTS as error:
        limited = isinstance(error, ccxt.DDoSProtection | ccxt.RateLimitExceeded)
        reason = "rate-limit" if limited and not session.fault else session.reason()
        # What the exchange says, where it says it as JSON.
        json = session.body.lstrip()[:1] == "{" and session.status != 200
        raise Unreachable(reason, session.body[:200] if json else "") from None
    if answer is None:
        raise Unreachable("unreadable-body")
    return answer


def open_source(
    exchange: str,
    symbols: Sequence[str],
    every: str,
    *,
    url: str | None = None,
    timeout: float = TIMEOUT,
) -> CcxtSource:
    """Return an exchange's closed bars, of the run's length or of its longest divisor there.

    Args:
      exchange: ccxt's name, e.g. "binance".
      symbols: spot markets, e.g. "BTC/USDT".
      every: the run's length of a bar, e.g. "1h".
      url: a server of this machine in place of the exchange; else NCA_TRADER_CCXT_URL.
      timeout: seconds of a call.

    Raises:
      ConfigError: an unknown exchange, symbol or length. Unreachable: no list of markets.
    """
    period = seconds_of(every)
    client, session = open_client(exchange, url=url, timeout=timeout)
    if not client.has.get("fetchOHLCV"):
        raise ConfigError(f"{exchange} has no bars; choose another exchange.")
    steps = {client.parse_timeframe(name): name for name in client.timeframes or ()}
    fits = [step for step in steps if step <= period and period % step == 0]
    if not fits:
        raise ConfigError(f"bars of {every}: {exchange} has none that fit in; give 1h or 1d.")
    markets = loaded(client.load_markets, session)
    for symbol in symbols:
        if symbol not in markets or not markets[symbol].get("spot"):
            raise ConfigError(f"{symbol}: no spot market of {exchange}; write e.g. BTC/USDT.")
    for step in sorted(map(int, fits), reverse=True):
        source = CcxtSource(tuple(symbols), step, steps[step], client, session)
        if step <= HOUR or source.is_on_grid():
            return source
    raise ConfigError(f"bars of {every}: {exchange} begins them at no hour of UTC; give 1h.")


def grid_of(every: str) -> Grid:
    """Return the opens of bars of a length."""
    return Grid(seconds_of(every))


def open_feed(exchange: str, symbols: Sequence[str], every: str, **options: Any) -> VenueFeed:
    """Return live bars of spot markets, round the clock from midnight UTC.

    Args:
      exchange: ccxt's name, e.g. "binance".
      symbols: spot markets, e.g. "BTC/USDT".
      every: length of a bar, e.g. "1h".
      **options: those of `open_source`.
    """
    source = open_source(exchange, symbols, every, **options)
    return VenueFeed(source, grid_of(every))


class CcxtSource:
    """A `Source`: an exchange's closed bars, one symbol after the other."""

    delay, settle = 1.0, 15.0

    def __init__(
        self, symbols: tuple[str, ...], step: int, name: str, client: Any, session: GuardedSession
    ):
        self.symbols, self.step = symbols, step
        self._name, self._client, self._session = name, client, session
        known = ((client.features or {}).get("spot") or {}).get("fetchOHLCV") or {}
        self._most = known.get("limit")

    def is_on_grid(self) -> bool:
        """Return whether the newest bars count from midnight UTC: some days begin elsewhere."""
        return all(row.time % self.step == 0 for row in self._page(self.symbols[0], None, 3))

    def fetch(self, start: int, stop: int) -> list[Row]:
        """Return the bars that open at or after `start` and end by `stop`, all pages of them."""
        rows: list[Row] = []
        for symbol in self.symbols:
            since = start
            while since + self.step <= stop:
                page = self._page(symbol, since, self._most or PAGE)
                rows += [row for row in page if since <= row.time <= stop - self.step]
                if page and page[-1].time >= since:
                    since = page[-1].time + self.step
                else:  # many exchanges answer for a span, which may lie before the first trade
                    since += self.step * (self._most or SKIPPED)
        return rows

    def _page(self, symbol: str, since: int | None, count: int) -> list[Row]:
        begin = None if since is None else 1000 * since
        found = loaded(
            lambda: self._client.fetch_ohlcv(symbol, self._name, begin, count), self._session
        )
        try:
            return [
                Row(symbol, int(t) // 1000, *map(float, values), dividend=0.0)
                for t, *values in found
            ]
        except (TypeError, ValueError):
            raise Unreachable("unreadable-body") from None

    def stream(self, post: Callable[[Row], None]) -> None:
        """Do nothing: bars are asked for a second after they close."""

    def close(self) -> None:
        """End the connections."""
        self._session.close()
