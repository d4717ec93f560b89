"""Spot markets on ccxt: an account at an exchange's test host as a venue, and public bars.

Bars come from an exchange's public REST interface, without keys. There is no live mode.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from typing import Any

import numpy as np

from nca_trader.config.reading import parse_step
from nca_trader.errors import ConfigError
from nca_trader.paper.venue import (
    Activity,
    Answer,
    Fill,
    Holdings,
    Instrument,
    OrderState,
    Outcome,
    Ticket,
    Unreachable,
)
from nca_trader.paper.venue_feed import Grid, Row, VenueFeed

try:
    import ccxt
    from requests import RequestException

    from nca_trader.paper.net import (
        REFUSED,
        TIMEOUT,
        GuardedSession,
        Keys,
        check_url,
        is_loopback,
        read_keys,
    )
except ImportError:
    raise ConfigError("ccxt is not installed; pip install ccxt.") from None

URL = "NCA_TRADER_CCXT_URL"  # a server of this machine in place of the exchange
MILLION = 1_000_000  # nanoseconds per millisecond
HOUR = 3600
# Trades of one answer, and bars of one where ccxt does not know what an exchange gives.
PAGE = 1000
SKIPPED = 100  # bars to go on by after an empty answer, likewise
FAULTS = (ccxt.BaseError, RequestException, ValueError, KeyError, TypeError, AttributeError)
# The exchanges whose look-up by client id and codes the tests know.
EXCHANGES = ("binance",)
STATUS = {
    "open": "working",
    "closed": "filled",
    "canceled": "cancelled",
    "expired": "expired",
    "rejected": "rejected",
}
_SILENT = logging.getLogger("nca_trader.paper.silent")
_SILENT.disabled = True


def open_venue(
    exchange: str, symbols: Sequence[str], *, url: str | None = None, timeout: float = TIMEOUT
) -> CcxtVenue:
    """Return a spot account at an exchange's test host.

    The variables CCXT_API_KEY and CCXT_SECRET hold the keys of the test account.

    Args:
      exchange: "binance".
      symbols: of spot markets with one quote currency, e.g. "BTC/USDT".
      url: a server of this machine in place of the test host; else NCA_TRADER_CCXT_URL.
      timeout: seconds of a call.

    Raises:
      ConfigError: another exchange; a symbol without a spot market; no keys.
      Unreachable: the exchange does not list its markets.
    """
    if exchange not in EXCHANGES:
        known = ", ".join(f"ccxt:{name}" for name in EXCHANGES)
        raise ConfigError(
            f"orders at {exchange!r} are not in this version; give {known}, simulated, or a venue "
            "of your own, module:name."
        )
    keys = read_keys("CCXT_API_KEY", "CCXT_SECRET")
    client, session = open_client(exchange, url=url, keys=keys, timeout=timeout)
    markets = loaded(client.load_markets, session, keys)
    check_symbols(exchange, markets, symbols)
    # One account has one cash, whatever its symbols are priced in.
    quotes = {markets[symbol]["quote"] for symbol in symbols}
    if len(quotes) != 1:
        raise ConfigError(
            f"{', '.join(symbols)}: cash would be {' and '.join(sorted(quotes))}; give symbols "
            "with one quote currency."
        )
    # ccxt raises otherwise: all symbols at once cost more of the exchange's rate limit.
    client.options["warnOnFetchOpenOrdersWithoutSymbol"] = False
    return CcxtVenue(client, session, keys, symbols, quotes.pop())


def check_symbols(exchange: str, markets: dict[str, Any], symbols: Iterable[str]) -> None:
    """Check that every symbol names a spot market.

    Raises:
      ConfigError: one is not.
    """
    for symbol in symbols:
        if symbol not in markets or not markets[symbol].get("spot"):
            raise ConfigError(f"{symbol}: no spot market of {exchange}; write e.g. BTC/USDT.")


class CcxtVenue:
    """A `Venue`: a spot account at an exchange's test host. `open_venue` makes one."""

    def __init__(
        self, client: Any, session: GuardedSession, keys: Keys, symbols: Sequence[str], quote: str
    ):
        self.name = f"{client.id}-test"
        self._client, self._session, self._keys = client, session, keys
        self._symbols, self._quote = tuple(symbols), quote
        self._symbol_of: dict[str, str] = {}  # by client id
        self._client_ids: dict[tuple[str, str], str] = {}  # by symbol and the exchange's id

    def instrument(self, symbol: str) -> Instrument:
        """Return how `symbol` trades; a spot position never goes below 0."""
        market = self._client.market(symbol)
        precision, limits = market["precision"], market["limits"]
        return Instrument(
            symbol,
            float(precision.get("amount") or 0.0),
            float(precision.get("price") or 0.0),
            float((limits.get("cost") or {}).get("min") or 0.0),
            shortable=False,
        )

    def submit(self, ticket: Ticket) -> Answer:
        """Send an order, unless its id is at the exchange already.

        Binance takes an id again once its order has ended, so it is looked up before each sending.
        """
        if ticket.symbol not in self._symbols:
            return Answer(Outcome.REJECTED, "unknown-symbol")
        units = abs(ticket.units)
        lot = self.instrument(ticket.symbol).lot
        if lot:  # as a decimal: ccxt cuts what is beyond the lot, and 0.29999999 to 0.2
            count = round(units / lot)
            if abs(units - count * lot) > 1e-6 * lot:
                return Answer(Outcome.REJECTED, "not-a-multiple-of-the-lot")
            units = float(count * Decimal(str(lot)))
        # Before the order is sent: if no answer comes, the look-up knows where to ask.
        self._symbol_of[ticket.client_id] = ticket.symbol
        try:
            if self._found(ticket.client_id, ticket.symbol) is not None:
                return Answer(Outcome.ACCEPTED, "duplicate-id")
        except Unreachable as error:
            return self._unanswered(error.reason)
        params: dict[str, Any] = {"clientOrderId": ticket.client_id}
        if ticket.stop is not None:
            params["stopLossPrice"] = ticket.stop
        side = "buy" if ticket.units > 0.0 else "sell"
        self._session.forget()
        try:
            order = self._client.create_order(ticket.symbol, "market", side, units, None, params)
        except FAULTS as error:
            return self._unsure(ticket, error)
        if order.get("clientOrderId") != ticket.client_id:
            return Answer(Outcome.AMBIGUOUS, "unreadable-body")
        return Answer(Outcome.ACCEPTED)

    def cancel(self, client_id: str) -> Answer:
        """Withdraw an order."""
        try:
            order = self.look_up(client_id)
        except Unreachable as error:
            return self._unanswered(error.reason)
        if order is None:
            return Answer(Outcome.REJECTED, "unknown-order")
        self._session.forget()
        try:
            self._client.cancel_order(order.venue_id, order.symbol)
        except ccxt.OrderNotFound:  # it ended since
            return Answer(Outcome.REJECTED, "not-cancellable")
        except FAULTS as error:
            return self._unanswered(reason_of(error, self._session))
        return Answer(Outcome.ACCEPTED)

    def look_up(self, client_id: str) -> OrderState | None:
        """Return an order; None where the exchange has it in none of the symbols."""
        known = self._symbol_of.get(client_id)
        # After a restart nothing is remembered, and each symbol is asked.
        for symbol in self._symbols if known is None else (known,):
            order = self._found(client_id, symbol)
            if order is not None:
                return order
        return None

    def working(self) -> list[OrderState]:
        """Return every open order of the account."""
        return [self._state(order) for order in self._read(self._client.fetch_open_orders)]

    def activity(self, since: int) -> Activity:
        """Return the fills of the symbols from `since` on; a spot account has no other payments."""
        fills = []
        for symbol in self._symbols:
            # ccxt counts milliseconds, so one page may repeat trades of the last.
            start, seen = since // MILLION, set()
            while True:
                page = self._read(
                    lambda s=symbol, t=start: self._client.fetch_my_trades(s, t, PAGE)
                )
                fresh = [trade for trade in page if trade["id"] not in seen]
                fills += [self._fill(symbol, trade) for trade in fresh]
                seen |= {trade["id"] for trade in fresh}
                if len(page) < PAGE:
                    break
                if not fresh:
                    raise Unreachable("too-many-trades")
                # From the last trade's own moment, which may hold more than one.
                start = page[-1]["timestamp"]
        return Activity([fill for fill in fills if fill.ts >= since], [])

    def holdings(self) -> Holdings:
        """Return cash and coins; a coin that no symbol trades has its own name."""
        # Free and used together: a working order reserves money and does not spend it.
        totals = self._read(self._client.fetch_balance)["total"]
        names = {str(self._client.market(symbol)["base"]): symbol for symbol in self._symbols}
        units = {
            names.get(coin, str(coin)): float(total)
            for coin, total in totals.items()
            if total and coin != self._quote
        }
        return Holdings(float(totals.get(self._quote) or 0.0), units)

    def now(self) -> int:
        """Return the exchange's clock."""
        return int(self._read(self._client.fetch_time)) * MILLION

    def close(self) -> None:
        """End the connections."""
        self._session.close()

    def _read(self, call: Callable[[], Any], missing: bool = False) -> Any:
        return loaded(call, self._session, self._keys, missing)

    def _found(self, client_id: str, symbol: str) -> OrderState | None:
        """Return an order of one symbol; None where the exchange says that there is none."""
        params = {"clientOrderId": client_id}
        order = self._read(lambda: self._client.fetch_order(None, symbol, params), missing=True)
        # Another order in the answer is a fault of the exchange, and no state of ours.
        if order is not None and order["clientOrderId"] != client_id:
            raise Unreachable("unreadable-body")
        return None if order is None else self._state(order)

    def _unanswered(self, reason: str) -> Answer:
        if reason == "rate-limit":
            return Answer(Outcome.BUSY, reason, self._session.retry_after)
        return Answer(Outcome.AMBIGUOUS, reason)

    def _unsure(self, ticket: Ticket, error: Exception) -> Answer:
        """Return the class of an answer that is not an acceptance."""
        session = self._session
        reason, wait = reason_of(error, session), session.retry_after
        words = said(session, self._keys)
        if reason == "rate-limit":
            return Answer(Outcome.BUSY, reason, wait)
        # Of the kind OperationFailed are also codes such as -1007, "execution status unknown".
        unclear = isinstance(error, ccxt.OperationFailed) or not isinstance(error, ccxt.BaseError)
        if unclear or session.status not in REFUSED or session.fault or not words:
            return Answer(Outcome.AMBIGUOUS, reason)
        # -2010 is a duplicate id as well as a lack of funds: only the look-up tells.
        try:
            found = self._found(ticket.client_id, ticket.symbol)
        except Unreachable:
            return Answer(Outcome.AMBIGUOUS, reason)
        if found is not None:
            return Answer(Outcome.ACCEPTED, "duplicate-id")
        return Answer(Outcome.REJECTED, f"{reason}: {words}")

    def _state(self, order: dict[str, Any]) -> OrderState:
        self._note(order)
        symbol, sign = order["symbol"], 1.0 if order["side"] == "buy" else -1.0
        filled = sign * float(order["filled"] or 0.0)
        if filled > 0.0 and symbol in self._symbols:
            # What the account received, as its fills say it: less than the exchange's count.
            trades = self._read(lambda: self._client.fetch_order_trades(order["id"], symbol))
            filled = sum(self._booked(symbol, trade)[0] for trade in trades)
        return OrderState(
            str(order["clientOrderId"]),
            symbol,
            sign * float(order["amount"] or 0.0),
            filled,
            STATUS.get(order["status"], "working"),
            str(order["id"]),
        )

    def _note(self, order: dict[str, Any]) -> None:
        """Remember the symbol of an order, and both its ids."""
        name, symbol = str(order["clientOrderId"]), order["symbol"]
        if symbol in self._symbols:
            self._symbol_of[name] = symbol
        self._client_ids[symbol, str(order["id"])] = name

    def _fill(self, symbol: str, trade: dict[str, Any]) -> Fill:
        order = str(trade["order"])
        if (symbol, order) not in self._client_ids:
            self._note(self._read(lambda: self._client.fetch_order(order, symbol)))
        units, commission = self._booked(symbol, trade)
        execution = f"{symbol}-{trade['id']}"  # Binance counts trades for each symbol
        ts = int(trade["timestamp"]) * MILLION
        name = self._client_ids[symbol, order]
        return Fill(name, execution, symbol, units, float(trade["price"]), commission, ts)

    def _booked(self, symbol: str, trade: dict[str, Any]) -> tuple[float, float]:
        """Return the units and the commission with which a trade changes the account.

        The fee of a buy is taken from the coins. Fewer are received, and the price of the missing
        ones is the commission: cash and units both agree with the exchange's.
        """
        sign = 1.0 if trade["side"] == "buy" else -1.0
        units, price = sign * float(trade["amount"]), float(trade["price"])
        # A fee in a third coin, e.g. BNB, moves neither the cash nor the position.
        fee, coin = float(trade["fee"]["cost"] or 0.0), trade["fee"]["currency"]
        if coin == self._client.market(symbol)["base"]:
            return units - fee, fee * price
        return units, fee if coin == self._quote else 0.0


def hosts_of(urls: Any, hostname: str | None) -> frozenset[str]:
    """Return the hosts among ccxt's URLs of an exchange: a text, or a dict of dicts."""
    if isinstance(urls, dict):
        return frozenset().union(*(hosts_of(value, hostname) for value in urls.values()))
    host = str(urls or "").replace("{hostname}", hostname or "").partition("://")[2]
    return frozenset({host.partition("/")[0].partition(":")[0]} - {""})


def open_client(
    exchange: str,
    *,
    url: str | None = None,
    keys: Keys | None = None,
    timeout: float = TIMEOUT,
) -> tuple[Any, GuardedSession]:
    """Return a ccxt client of spot markets, and the session that it sends through.

    Args:
      exchange: ccxt's name, e.g. "binance".
      url: a server of this machine in place of the exchange's.
      keys: of its test host, which is then the only host. Without keys the client reads the
        exchange's public market data, and nothing else.
      timeout: seconds of a call.

    Raises:
      ConfigError: no such exchange; it has no test host. HostError: `url` is another machine.
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
    public = hosts_of(client.urls.get("api"), client.hostname)
    hosts = public
    if keys is not None:
        # A host that takes real orders stays out, even where ccxt lists it as a test host.
        hosts = hosts_of(client.urls.get("test"), client.hostname) - public
        if not hosts:
            raise ConfigError(f"{exchange} has no test host of its own; orders can't go there.")
        client.set_sandbox_mode(True)
        client.apiKey, client.secret = keys.key, keys.secret
    url = url or os.environ.get(URL)
    if url:
        check_url(url, ())
        client.urls["api"] = _replaced(client.urls["api"], url.rstrip("/"))
        client.enableRateLimit = not is_loopback(url.partition("://")[2].partition(":")[0])
    session = GuardedSession(() if url else hosts, read_only=keys is None, timeout=timeout)
    session.trust_env = False  # as ccxt sets its own
    client.session.close()
    client.session = session
    client.logger = _SILENT  # at level DEBUG it writes headers, and so the key
    return client, session


def _replaced(urls: Any, url: str) -> Any:
    if isinstance(urls, dict):
        return {name: _replaced(value, url) for name, value in urls.items()}
    return url + "/" + str(urls).partition("://")[2].partition("/")[2] if urls else urls


def loaded(
    call: Callable[[], Any],
    session: GuardedSession,
    keys: Keys | None = None,
    missing: bool = False,
) -> Any:
    """Return what a call of ccxt returns; with `missing`, None for an order that is not there.

    Raises:
      Unreachable: it fails; the message has no URL, which would hold a signature.
    """
    session.forget()
    try:
        answer = call()
    except FAULTS as error:
        if missing and isinstance(error, ccxt.OrderNotFound):
            return None
        raise Unreachable(reason_of(error, session), said(session, keys)) from None
    if answer is None:  # a field that is not there, e.g. of the clock
        raise Unreachable("unreadable-body")
    return answer


def reason_of(error: Exception, session: GuardedSession) -> str:
    """Return the stable code of a failed call."""
    if session.fault:
        return session.fault
    if isinstance(error, ccxt.InvalidNonce):
        return "clock-skew"
    if isinstance(error, ccxt.DDoSProtection | ccxt.RateLimitExceeded):
        return "rate-limit"
    return session.reason()


def said(session: GuardedSession, keys: Keys | None) -> str:
    """Return what the exchange says, where it says it as JSON."""
    text = session.body if session.body.lstrip()[:1] == "{" and session.status != 200 else ""
    return keys.redact(text) if keys else text[:200]


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
    length = parse_step(every)
    period = int(length / np.timedelta64(1, "s")) if length is not None else 0
    client, session = open_client(exchange, url=url, timeout=timeout)
    if not client.has.get("fetchOHLCV"):
        raise ConfigError(f"{exchange} has no bars; choose another exchange.")
    steps = {client.parse_timeframe(name): name for name in client.timeframes or ()}
    fits = [step for step in steps if step <= period and period % step == 0]
    if not fits:
        raise ConfigError(f"bars of {every}: {exchange} has none that fit in; give 1h or 1d.")
    check_symbols(exchange, loaded(client.load_markets, session), symbols)
    for step in sorted(map(int, fits), reverse=True):
        source = CcxtSource(tuple(symbols), step, steps[step], client, session)
        if step <= HOUR or source.is_on_grid():
            return source
    raise ConfigError(f"bars of {every}: {exchange} begins them at no hour of UTC; give 1h.")


def open_feed(exchange: str, symbols: Sequence[str], every: str, **options: Any) -> VenueFeed:
    """Return live bars of spot markets, round the clock from midnight UTC.

    Args:
      exchange: ccxt's name, e.g. "binance".
      symbols: spot markets, e.g. "BTC/USDT".
      every: length of a bar, e.g. "1h".
      **options: those of `open_source`.
    """
    source = open_source(exchange, symbols, every, **options)
    length = parse_step(every)
    assert length is not None
    return VenueFeed(source, Grid(int(length / np.timedelta64(1, "s"))))


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
            return [Row(symbol, int(t) // 1000, *map(float, values)) for t, *values in found]
        except (TypeError, ValueError):
            raise Unreachable("unreadable-body") from None

    def stream(self, post: Callable[[Row], None]) -> None:
        """Do nothing: bars are asked for a second after they close."""

    def close(self) -> None:
        """End the connections."""
        self._session.close()
