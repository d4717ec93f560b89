"""An Alpaca paper account as a venue, on alpaca-py: US stocks. There is no live mode."""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from nca_trader.errors import ConfigError, NcaTraderError, extra
from nca_trader.paper.venue import (
    LATEST,
    Activity,
    Answer,
    CashFlow,
    Fill,
    Holdings,
    Instrument,
    OrderState,
    Outcome,
    Ticket,
    Unreachable,
)

with extra("alpaca-py is not installed; pip install alpaca-py."):
    with warnings.catch_warnings():  # it imports the old client of `websockets`
        warnings.simplefilter("ignore", DeprecationWarning)
        from alpaca.common.exceptions import APIError
        from alpaca.trading.client import TradingClient
        from alpaca.trading.enums import OrderSide, TimeInForce
        from alpaca.trading.requests import MarketOrderRequest, StopOrderRequest
    from requests import RequestException

    from nca_trader.paper.venues.net import (
        LIMITED,
        REFUSED,
        TIMEOUT,
        GuardedSession,
        Keys,
        check_url,
        read_keys,
    )

ORDER_HOSTS = frozenset({"paper-api.alpaca.markets"})
KEY, SECRET = "APCA_API_KEY_ID", "APCA_API_SECRET_KEY"
URL = "APCA_API_BASE_URL"
PAGE, ORDERS = 100, 500  # the most that one answer lists
NOT_FOUND = "404"  # an Alpaca code begins with its status
FOR_GOOD = ("40310", "422")  # too little money or too few shares; an impossible symbol or size
LIVE = "AK"  # a live account's key begins so, a paper account's with PK
STATUS = {
    "filled": "filled",
    "canceled": "cancelled",
    "replaced": "cancelled",
    "expired": "expired",
    "rejected": "rejected",
    "done_for_day": "working",
}
FLOWS = {"DIV": "dividend", "INT": "interest", "FEE": "fee", "CFE": "fee", "MFE": "fee"}
TRADES = ("FILL",)
# What reading an answer raises that is JSON and not what it should be.
SHAPES = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


def paper_keys() -> Keys:
    """Return the keys of a paper account, of the environment or a file.

    Raises:
      ConfigError: they are missing, or those of a live account.
    """
    keys = read_keys(KEY, SECRET)
    if keys.key.startswith(LIVE):
        raise ConfigError(f"{KEY} is of a live account; create keys of a paper account (PK...).")
    return keys


def guarded(client: Any, session: GuardedSession) -> Any:
    """Make a client of alpaca-py send through `session`, and never send a request again.

    Its own retries repeat a POST on 429 and 504: one order would become two.
    """
    # A private attribute, as alpaca-py offers no other way; tests fail if it is renamed.
    client._session.close()
    client._session, client._retry = session, 0
    return client


def nanoseconds(text: str) -> int:
    """Return nanoseconds since 1970 UTC of an ISO time; a date is its midnight."""
    stamp = pd.Timestamp(text)
    stamp = stamp.tz_localize("UTC") if stamp.tzinfo is None else stamp
    return stamp.as_unit("ns").value


def iso(ns: int) -> str:
    """Return an ISO time with its nanoseconds, which alpaca-py's dates do not have."""
    return pd.Timestamp(ns, tz="UTC").isoformat().replace("+00:00", "Z")


@contextlib.contextmanager
def shaped() -> Iterator[None]:
    """Raise `Unreachable` where an answer has another shape than Alpaca's."""
    try:
        yield
    except NcaTraderError:
        raise
    except SHAPES:
        raise Unreachable("unreadable-body") from None


def number(text: Any) -> float:
    """Return a number of an answer.

    Raises:
      TypeError, ValueError: it is none, or not finite.
    """
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{value} is not a number of money or units")
    return value


class AlpacaVenue:
    """A `Venue`: a paper account at Alpaca.

    Answers are read as they are sent and not through alpaca-py's models, which refuse a value that
    they do not know: an accepted order would look like a broken answer.

    Args:
      symbols: US stocks that are traded.
      url: the host; the variable APCA_API_BASE_URL, or Alpaca's paper host, where it is None.
      fractional: trade parts of a share. A position then never goes below 0, since Alpaca sells
        no part of a share short.
      timeout: seconds of a call.

    Raises:
      ConfigError: a key is missing. HostError: the host is not one of paper trading.
    """

    name = "alpaca-paper"

    def __init__(
        self,
        symbols: Sequence[str],
        *,
        url: str | None = None,
        fractional: bool = False,
        timeout: float = TIMEOUT,
    ):
        pairs = [symbol for symbol in symbols if "/" in symbol]
        if pairs:
            raise ConfigError(f"{', '.join(pairs)}: alpaca trades stocks here; give coins to ccxt.")
        url = (url or os.environ.get(URL) or "https://paper-api.alpaca.markets").rstrip("/")
        check_url(url, ORDER_HOSTS)
        self._keys = paper_keys()
        key, secret = self._keys.key, self._keys.secret
        client = TradingClient(key, secret, paper=True, raw_data=True, url_override=url)
        # Every request passes the list of hosts again, whatever the client was given.
        self._session = GuardedSession(ORDER_HOSTS, timeout=timeout)
        self._client = guarded(client, self._session)
        self._fractional = fractional
        self._client_ids: dict[str, str] = {}  # by Alpaca's id

    @shaped()
    def instrument(self, symbol: str) -> Instrument:
        """Return how `symbol` trades: whole shares, unless the account trades parts."""
        asset = self._read(f"/assets/{symbol}")
        if not asset.get("tradable", False):
            raise ConfigError(f"{symbol}: Alpaca does not trade it; choose another symbol.")
        if self._fractional and asset.get("fractionable"):
            return Instrument(symbol, 1e-9, 0.01, 1.0, shortable=False)
        shortable = bool(asset.get("shortable") and asset.get("easy_to_borrow", True))
        return Instrument(symbol, 1.0, 0.01, 0.0, shortable)

    def submit(self, ticket: Ticket) -> Answer:
        """Send an order for the day; a stop of whole shares rests until it is cancelled."""
        # Alpaca takes nine decimals of a share.
        units = round(abs(ticket.units), 9)
        whole = units == int(units)
        common = {
            "symbol": ticket.symbol,
            "qty": int(units) if whole else units,
            "side": OrderSide.BUY if ticket.units > 0.0 else OrderSide.SELL,
            "client_order_id": ticket.client_id,
        }
        if ticket.stop is None:
            order = MarketOrderRequest(**common, time_in_force=TimeInForce.DAY)
        else:
            # Alpaca keeps a stop of parts of a share for one day at most.
            force = TimeInForce.GTC if whole else TimeInForce.DAY
            order = StopOrderRequest(**common, time_in_force=force, stop_price=ticket.stop)
        self._session.forget()
        try:
            answer: Any = self._client.submit_order(order)
        except (APIError, RequestException, ValueError) as error:
            return self._unsure(ticket.client_id, error)
        # The order may be there: only a look-up under its id can tell.
        if not isinstance(answer, dict) or answer.get("client_order_id") != ticket.client_id:
            return Answer(Outcome.AMBIGUOUS, "unreadable-body")
        self._client_ids[str(answer.get("id"))] = ticket.client_id
        return Answer(Outcome.ACCEPTED)

    def cancel(self, client_id: str) -> Answer:
        """Withdraw an order."""
        try:
            order = self.look_up(client_id)
        except Unreachable as error:
            return Answer(Outcome.AMBIGUOUS, error.reason)
        if order is None:
            return Answer(Outcome.REJECTED, "unknown-order")
        try:
            self._client.cancel_order_by_id(order.venue_id)
        except (APIError, RequestException, ValueError):
            status = self._session.status
            if status in LIMITED:
                return Answer(Outcome.BUSY, "rate-limit", self._session.retry_after)
            # It is gone or has ended, which a look-up will show.
            if status in (404, 422):
                return Answer(Outcome.REJECTED, "not-cancellable")
            return Answer(Outcome.AMBIGUOUS, self._session.reason())
        return Answer(Outcome.ACCEPTED)

    @shaped()
    def look_up(self, client_id: str) -> OrderState | None:
        """Return an order; None where Alpaca itself, and not a proxy, says that it has none."""
        path = "/orders:by_client_order_id"
        order = self._read(path, {"client_order_id": client_id}, missing=True)
        if order is None:
            return None
        state = self._state(order)
        if state.client_id != client_id:  # of another order, which says nothing of this one
            raise Unreachable("unreadable-body")
        return state

    @shaped()
    def working(self) -> list[OrderState]:
        """Return every open order of the account."""
        found: dict[str, OrderState] = {}
        after = 0
        while True:
            page = self._read(
                "/orders",
                {"status": "open", "limit": ORDERS, "direction": "asc", "after": iso(after)},
            )
            # By id, since two answers overlap by the orders of one moment.
            fresh = {str(order["id"]): self._state(order) for order in page}
            new = fresh.keys() - found.keys()
            found |= fresh
            if len(page) < ORDERS:
                return list(found.values())
            if not new:  # more of one moment than an answer holds
                raise Unreachable("too-many-orders")
            # `after` leaves its own moment out, so the last moment is asked for again.
            after = nanoseconds(page[-1]["submitted_at"]) - 1

    @shaped()
    def activity(self, since: int) -> Activity:
        """Return fills and cash flows from the day of `since` on, each once."""
        day = pd.Timestamp(since, tz="UTC").floor("D")  # a dividend has a date without a time
        query = {"after": iso(day.value - 1), "direction": "asc", "page_size": PAGE}
        found: dict[str, dict[str, Any]] = {}
        while True:
            page = self._read("/account/activities", query)
            found |= {str(item.get("id", item)): item for item in page}
            if len(page) < PAGE:
                break
            query["page_token"] = page[-1]["id"]
        items = [self._item(*pair) for pair in found.items()]
        return Activity(
            [item for item in items if isinstance(item, Fill) and item.ts >= since],
            [item for item in items if isinstance(item, CashFlow) and item.ts >= day.value],
        )

    @shaped()
    def holdings(self) -> Holdings:
        """Return cash and positions of one moment."""
        cash = self._cash()
        for _ in range(3):
            positions, before = self._read("/positions"), cash
            cash = self._cash()
            if cash == before:  # no fill fell between the two answers
                units = {item["symbol"]: number(item["qty"]) for item in positions}
                return Holdings(cash, units)
        raise Unreachable("moving", "cash changed between three answers")

    @shaped()
    def now(self) -> int:
        """Return Alpaca's clock."""
        return nanoseconds(self._read("/clock")["timestamp"])

    def close(self) -> None:
        """End the connections."""
        self._session.close()

    def _cash(self) -> float:
        return number(self._read("/account")["cash"])

    def _read(self, path: str, query: dict[str, Any] | None = None, missing: bool = False) -> Any:
        """Return an answer of Alpaca; with `missing`, None for one that is not found."""
        self._session.forget()
        try:
            answer = self._client.get(path, query)
            if isinstance(answer, dict | list):
                return answer
        except (APIError, RequestException, ValueError) as error:
            code, message = _said(error)
            # A proxy's 404 has no code of Alpaca's, and proves nothing of the order.
            if missing and self._session.status == 404 and code.startswith(NOT_FOUND):
                return None
            detail = self._keys.redact(message)
            raise Unreachable(self._session.reason(), detail) from None
        raise Unreachable("unreadable-body")

    def _unsure(self, client_id: str, error: Exception) -> Answer:
        """Return the class of an answer that is not an acceptance."""
        session = self._session
        reason, status, wait = session.reason(), session.status, session.retry_after
        if status in LIMITED and not session.fault:
            return Answer(Outcome.BUSY, "rate-limit", wait)
        code, message = _said(error)
        # Anything but a plain refusal leaves it open whether the order was taken.
        if status not in REFUSED or session.fault or not code:
            return Answer(Outcome.AMBIGUOUS, reason)
        try:
            found = self.look_up(client_id)
        except Unreachable:
            return Answer(Outcome.AMBIGUOUS, reason)
        if found is not None:  # the id is a duplicate: the first one counts
            return Answer(Outcome.ACCEPTED, "duplicate-id")
        said = self._keys.redact(f"{reason}: {code} {message}")
        return Answer(Outcome.REJECTED, said, final=code.startswith(FOR_GOOD))

    def _state(self, order: dict[str, Any]) -> OrderState:
        sign = 1.0 if order["side"] == "buy" else -1.0
        self._client_ids[str(order["id"])] = order["client_order_id"]
        return OrderState(
            order["client_order_id"],
            order["symbol"],
            sign * number(order.get("qty") or 0.0),  # one by money has no quantity
            sign * number(order.get("filled_qty") or 0.0),
            STATUS.get(order["status"], "working"),
            str(order["id"]),
        )

    def _item(self, name: str, item: dict[str, Any]) -> Fill | CashFlow | None:
        """Return an activity; one that cannot be read is a fill that no session books."""
        try:
            return self._fill(item) if item["activity_type"] in TRADES else _flow(item)
        except SHAPES:
            return Fill("", name, "", math.nan, math.nan, math.nan, LATEST)

    def _fill(self, item: dict[str, Any]) -> Fill:
        order = item["order_id"]
        if order not in self._client_ids:  # of an order that another process sent
            known = self._read(f"/orders/{order}", missing=True)
            self._client_ids[order] = "" if known is None else self._state(known).client_id
        sign = 1.0 if item["side"] == "buy" else -1.0
        return Fill(
            self._client_ids[order],
            item["id"],
            item["symbol"],
            sign * number(item["qty"]),
            number(item["price"]),
            0.0,  # Alpaca takes no commission; regulatory fees are activities of their own
            nanoseconds(item["transaction_time"]),
        )


open_venue = AlpacaVenue


def _flow(item: dict[str, Any]) -> CashFlow | None:
    """Return the money that an activity moved; None for a fill or one that moved none."""
    amount = number(item.get("net_amount") or 0.0)
    if item["activity_type"] in TRADES or amount == 0.0:
        return None
    kind = FLOWS.get(item["activity_type"][:3], "other")
    ts = nanoseconds(item.get("transaction_time") or item["date"])
    return CashFlow(item["id"], kind, amount, ts, item.get("symbol") or "")


def _said(error: Exception) -> tuple[str, str]:
    """Return code and message of Alpaca's answer; "" where it is not one of Alpaca's."""
    try:
        return str(getattr(error, "code", "")), str(getattr(error, "message", ""))
    except (ValueError, KeyError, TypeError):
        return "", ""
