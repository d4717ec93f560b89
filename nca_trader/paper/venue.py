"""The interface of a venue: an exchange or a broker whose books outlive the session.

An adapter of a broker implements `Venue`, and `paper.router` sends orders to it. Your own is named
`module:function` on the command line, and `nca.check_broker` tests it.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, get_origin, get_type_hints

import numpy as np

from nca_trader.config.records import Mismatch, convert
from nca_trader.errors import NcaTraderError, printable

LARGEST = 1e18  # of money, prices and units; beyond it sums lose all digits, or overflow
LATEST = 2**63  # nanoseconds
MAX_CLIENT_ID = 36  # what Alpaca and the exchanges behind ccxt all accept
MARGIN = "margin-"
BY_VENUE = (MARGIN, "delisted")  # how the ids of fills begin by which a venue closes positions


class Unreachable(NcaTraderError):
    """The venue gave no usable answer. `reason` is a stable code, e.g. "timeout"."""

    exit_code = 1

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason

    def with_remedy(self, remedy: str) -> Unreachable:
        """Return the error with what to do."""
        detail = str(self).removeprefix(self.reason).removeprefix(": ").rstrip(".")
        return Unreachable(self.reason, f"{detail}; {remedy}." if detail else f"{remedy}.")


class Instrument(NamedTuple):
    """How a symbol trades. Zero means no limit.

    lot: units trade in multiples of it. tick: prices are multiples of it, in money.
    min_notional: smallest order, in money. shortable: whether a position may be below 0.
    """

    symbol: str
    lot: float = 0.0
    tick: float = 0.0
    min_notional: float = 0.0
    shortable: bool = True


class Ticket(NamedTuple):
    """An order as it is sent.

    client_id: ours, the same at every resend. units: signed, bought above 0.
    stop: price of a resting stop order; None is a market order.
    """

    client_id: str
    symbol: str
    units: float
    stop: float | None = None


class TargetOrder(NamedTuple):
    """A target weight for one symbol, working until the session withdraws it.

    client_id: ours, the same at every resend. weight: signed fraction of equity at the fill.
    buy_only: the rest of an earlier buy that cash cut; it never sells.
    """

    client_id: str
    symbol: str
    weight: float
    buy_only: bool = False


class Outcome(enum.StrEnum):
    """What a venue's answer says about an order.

    BUSY: refused for now, so the same order may be sent again. AMBIGUOUS: the order may be at the
    venue or not; only `Venue.look_up` tells.
    """

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    BUSY = "busy"
    AMBIGUOUS = "ambiguous"


class Answer(NamedTuple):
    """The answer to an order.

    reason: a stable code. retry_after: seconds, of BUSY. final: of REJECTED, whether the order is
    refused for good, for lack of funds or for its symbol or size. Where it is not, the same target
    is ordered again at the next bar.
    """

    outcome: Outcome
    reason: str = ""
    retry_after: float = 0.0
    final: bool = False


class OrderState(NamedTuple):
    """An order as the venue has it.

    units, filled: signed. status: "working", "filled", "cancelled", "rejected" or "expired".
    """

    client_id: str
    symbol: str
    units: float
    filled: float
    status: str
    venue_id: str = ""


class Fill(NamedTuple):
    """One execution.

    units: signed, bought above 0. price: paid per unit, slippage included.
    commission: in money, every fee included. ts: nanoseconds since 1970 UTC of the bar.
    """

    client_id: str
    execution_id: str
    symbol: str
    units: float
    price: float
    commission: float
    ts: int


class CashFlow(NamedTuple):
    """Money paid in, or out below 0, other than by a fill.

    id: unique at the venue. kind: "interest", "borrow", "dividend", "funding", "fee" or "other".
    ts: nanoseconds since 1970 UTC. symbol: what it was paid for, "" for none.
    """

    id: str
    kind: str
    amount: float
    ts: int
    symbol: str = ""


class Activity(NamedTuple):
    """What happened at a venue, in any order."""

    fills: list[Fill]
    flows: list[CashFlow]


class Holdings(NamedTuple):
    """What an account holds. cash: money. units: by symbol, foreign ones too; 0 may be absent."""

    cash: float
    units: dict[str, float]


class Books(NamedTuple):
    """What an account holds of a session's assets. cash: money. units: `[A]` float64, signed."""

    cash: float
    units: np.ndarray


def value_of(units: np.ndarray, price: np.ndarray) -> np.ndarray:
    """Return `[A]` what positions are worth in money.

    0 units of an asset without a price yet are worth 0, and not NaN.

    >>> value_of(np.array([2.0, 0.0]), np.array([10.0, np.nan]))
    array([20.,  0.])
    """
    return np.where(units == 0.0, 0.0, units * price)


def client_id(run: str, seconds: int, symbol: str, leg: int = 0) -> str:
    """Return the id of an order, the same in every call: `nca-{run8}-{bar}-{symbol}-{leg}`.

    At most 36 of `[A-Za-z0-9-_]`. A symbol with other characters, or too long, keeps its first
    letters and gets six digits of its hash.

    Args:
      run: the session's hash.
      seconds: from 1970 UTC to the bar's open.
      symbol: of the asset.
      leg: 0 for the first order of this symbol at this bar.

    >>> client_id("0123456789abcdef", 1500000000, "BTC/USDT")
    'nca-01234567-1500000000-BTCU4d7eaa-0'
    """
    head, tail = f"nca-{run[:8]}-{seconds}-", f"-{leg}"
    room = MAX_CLIENT_ID - len(head) - len(tail)
    name = re.sub(r"[^A-Za-z0-9]", "", symbol)
    # The hash keeps apart what would otherwise be one name, such as "BTC/USDT" and "BTCUSDT".
    if name != symbol or len(name) > room:
        name = name[: room - 6] + hashlib.sha256(symbol.encode()).hexdigest()[:6]
    return head + name + tail


class Venue(Protocol):
    """An account at a broker. Calls come from one thread; every network call has a timeout.

    name: e.g. "alpaca-paper".

    `submit` and `cancel` never raise for the network's faults: they answer AMBIGUOUS. The other
    methods raise `Unreachable`.
    """

    name: str

    def instrument(self, symbol: str) -> Instrument:
        """Return how `symbol` trades."""
        ...

    def submit(self, ticket: Ticket) -> Answer:
        """Send an order. The same `client_id` twice is one order."""
        ...

    def cancel(self, client_id: str) -> Answer:
        """Withdraw an order; what it has filled stays."""
        ...

    def look_up(self, client_id: str) -> OrderState | None:
        """Return an order; None where the venue says that it never had it."""
        ...

    def working(self) -> list[OrderState]:
        """Return every open order of the account, foreign ones too."""
        ...

    def activity(self, since: int) -> Activity:
        """Return fills and cash flows at or after `since` (nanoseconds); repeats are allowed."""
        ...

    def holdings(self) -> Holdings:
        """Return cash and positions."""
        ...

    def now(self) -> int:
        """Return the venue's clock, nanoseconds since 1970 UTC."""
        ...

    def close(self) -> None:
        """End connections and threads."""
        ...


# What an answer, or each part of it, is. The parts of `activity` are looked at where they are
# booked: an unusable one stays in the venue's list, and must not hide the others without end.
ANSWERS: dict[str, Any] = {
    "instrument": Instrument, "submit": Answer, "cancel": Answer, "look_up": OrderState,
    "working": OrderState, "activity": Activity, "holdings": Holdings, "now": int,
}  # fmt: skip
PLAIN = (str, bool, int, float, dict[str, float])
_fields_of = functools.cache(get_type_hints)


def fault_of(item: Any, kind: Any) -> str:
    """Return what is wrong with a part of an answer, which should be a `kind`; "" for nothing."""
    if not isinstance(item, kind):
        return printable(f"{item!r:.80} where {kind.__name__} is expected")
    for name, hint in (_fields_of(kind) or {"now": kind}).items():
        value, kept = getattr(item, name, item), get_origin(hint) or hint
        try:
            # The declared type, as of a file's values.
            read = convert(value, hint) if hint in PLAIN else value
        except (Mismatch, OverflowError):
            read = None
        good = isinstance(read, kept)
        if good and hint in PLAIN and kind is not Answer:  # whose wait the router reads by itself
            limit = LATEST if hint is int else LARGEST
            for part in [*read, *read.values()] if isinstance(read, dict) else [read]:
                # NaN is below nothing, and half a letter cannot be stored.
                letters = isinstance(part, str) and part.isprintable()
                good &= letters or (isinstance(part, int | float) and abs(part) < limit)
        if not good:
            return printable(f"{name} is {value!r:.80}")
    return ""


class Awaited:
    """A venue whose answers come through `call`, which waits for them, and are usable.

    Args:
      venue: the account.
      call: `(method, *args) -> answer`.
    """

    def __init__(self, venue: Venue, call: Callable[..., Any]):
        self._venue, self._call, self.name = venue, call, venue.name

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return a method of the venue."""
        return functools.partial(self._ask, name, getattr(self._venue, name))

    def _ask(self, name: str, method: Callable[..., Any], *args: Any) -> Any:
        answer, kind = self._call(method, *args), ANSWERS.get(name)
        parts = answer if name == "working" and isinstance(answer, list) else [answer]
        if kind is None or (name == "look_up" and answer is None):
            return answer
        fault = next(filter(None, (fault_of(part, kind) for part in parts)), "")
        if fault and kind is not Answer:
            raise Unreachable("unusable-answer", f"{name}: {fault}")
        return Answer(Outcome.AMBIGUOUS, "unusable-answer") if fault else answer
