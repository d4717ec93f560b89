"""The books of an account's sleeves: who gets how much of each fill and payment.

What sleeves trade against each other crosses at the market's price, at no cost. The rest is one
order at the venue. Its fills go to the sleeves in proportion to what they still want, with their
price and their part of the commission. Each share is an `allocation` event of the journal, so the
sleeves' books are sums of these events.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nca_trader.envs.account.state import FILLED, WHOLE, Account, Legs, Quote, Rules
from nca_trader.paper.broker import Activity, Fill, Order, SimulatedBroker, valued
from nca_trader.paper.clock import NANOSECONDS
from nca_trader.paper.sleeve_core import Cut
from nca_trader.paper.sleeves import NET, Member
from nca_trader.types import Costs, Tensor


def split(wanted: np.ndarray, filled: float) -> tuple[np.ndarray, np.ndarray]:
    """Share one symbol's trades among sleeves.

    Args:
      wanted: `[K]` signed units.
      filled: units of their sum that the venue filled, or will.

    Returns:
      `[K]` units that cross between sleeves, whose sum is 0, and `[K]` units of the venue's.

    >>> crossed, venue = split(np.array([10.0, 5.0, -6.0]), 9.0)
    >>> crossed.tolist(), venue.tolist()
    ([4.0, 2.0, -6.0], [6.0, 3.0, 0.0])
    """
    # The direction of what reaches the venue; without a fill, of what would.
    side = -1.0 if (filled or wanted.sum()) < 0.0 else 1.0
    along = np.maximum(side * wanted, 0.0)
    against = np.minimum(side * wanted, 0.0)
    # The largest takes what rounding leaves, so that sums are those of the venue.
    total, largest = along.sum(), int(along.argmax())
    others = np.arange(len(wanted)) != largest
    venue = np.where(along > 0.0, along / max(total, 1e-300), 0.0) * filled
    venue[largest] = filled - venue[others].sum()
    # No more crosses than the smaller side wants.
    both = min(1.0, total / max(-against.sum(), 1e-300))
    crossed = side * both * against
    crossed += np.where(along > 0.0, along / max(total, 1e-300), 0.0) * -crossed.sum()
    crossed[largest] = -crossed[others].sum()
    # Without the sign of -0.0, which JSON would keep.
    return crossed + 0.0, venue


def shared(amount: float, weights: np.ndarray) -> np.ndarray:
    """Return `[K]` parts of `amount` in proportion to `weights` `[K]`, whose sum is `amount`."""
    total = weights.sum()
    # Equal parts where nobody has any: the sum must be the amount in any case.
    weights = weights / total if total else np.full(len(weights), 1.0 / len(weights))
    # It takes what rounding leaves, which is the smallest part of its own.
    largest = int(np.abs(weights).argmax())
    parts = weights * amount
    parts[largest] = amount - parts[np.arange(len(parts)) != largest].sum()
    return parts


class SleeveBroker(SimulatedBroker):
    """The books of one sleeve of a simulated account: `Pool` fills its orders.

    differs: whether the sleeve's account does not know what happened here. waits, dropped: `[A]`
    orders that wait for volume, and orders that ended short. called: whether a margin call of the
    account closed its positions. owed: what it paid for money and shares that it borrowed.
    """

    def __init__(self, capital: float, costs: Costs, symbols: Sequence[str], rules: Rules):
        super().__init__(capital, costs, symbols, rules)
        self.capital, self.owed = capital, 0.0
        self.forget()

    def forget(self) -> None:
        """Note that the account knows all that happened here."""
        self.differs = self.called = False
        self.waits = np.zeros(len(self._symbols), bool)
        self.dropped = np.zeros(len(self._symbols), bool)

    def advance(self, price: np.ndarray, quote: Quote, ts: int) -> list[Fill]:
        """Fill nothing: the account's pool does, for all sleeves at once."""
        return []

    def plan(self, price: np.ndarray, quote: Quote) -> tuple[np.ndarray, np.ndarray]:
        """Return `[A]` units that would fill if the sleeve were alone, and how much worse."""
        wanted = self.wanted(price, quote)
        if wanted is None:
            return np.zeros(len(self._symbols)), np.zeros(len(self._symbols))
        return self.sized(wanted, price, quote)

    def take(self, i: int, units: float, paid: float) -> None:
        """Book `units` of asset i that cost `paid` in money."""
        self._pay(-paid)
        self._units[i] += units

    def pay(self, amount: float) -> None:
        """Book a payment."""
        self._pay(amount)

    def value(self, close: np.ndarray) -> float:
        """Return cash and positions in money."""
        return self._equity(close)

    def _held(self, price: np.ndarray, years: Tensor) -> float:
        costs, value = self._costs, self._units * price
        owed = costs.interest_borrow * max(-self._cash, 0.0)
        self.owed += float(years * (owed + costs.borrow_fee * np.maximum(-value, 0.0).sum()))
        return super()._held(price, years)


class Pool(SimulatedBroker):
    """A simulated broker whose account several sleeves share.

    Args:
      capital: cash at the start.
      costs: of the account.
      symbols: `A` names.
      rules: of the account.
      members: the sleeves.
    """

    def __init__(
        self,
        capital: float,
        costs: Costs,
        symbols: Sequence[str],
        rules: Rules,
        members: Sequence[Member],
    ):
        super().__init__(capital, costs, symbols, rules)
        self.members, self._alone = tuple(members), len(members) == 1
        # The margin is the account's; a sleeve has its own where it is the whole account.
        own = rules if self._alone else rules._replace(maintenance_margin=None)
        self.books = [
            SleeveBroker(
                m.share * capital,
                costs,
                symbols,
                own._replace(capital=own.capital and m.share * own.capital),
            )
            for m in members
        ]
        self.staged: Sequence[Sequence[Order]] = [()] * len(self.books)
        self._found: list[tuple[str, dict[str, Any]]] = []

    def work(self, orders: Sequence[Order]) -> list[str]:
        """Make `orders` the whole set, and `staged` that of each sleeve."""
        for book, own in zip(self.books, self.staged, strict=True):
            book.work(own)
        return super().work(orders)

    def open(self, price: np.ndarray, legs: Legs, ts: int) -> Activity:
        """As `SimulatedBroker.open`."""
        before = [book.position().units for book in self.books]
        # Sleeves first: the account's own charges then show what netting saved.
        parts = [book.open(price, legs, ts) for book in self.books]
        found = super().open(price, legs, ts)
        for fill in found.fills:
            if fill.client_id == "delisted":  # each sleeve has booked its own
                i = self._symbols.index(fill.symbol)
                self._tell(fill, -np.array([units[i] for units in before]), None)
        self._relieve(found.cash, [part.cash for part in parts], f"open@{ts // NANOSECONDS}")
        return found

    def close(self, price: np.ndarray, legs: Legs, ts: int) -> Activity:
        """As `SimulatedBroker.close`."""
        parts = [book.close(price, legs, ts) for book in self.books]
        found = super().close(price, legs, ts)
        self._relieve(found.cash, [part.cash for part in parts], f"close@{ts // NANOSECONDS}")
        return found

    def advance(self, price: np.ndarray, quote: Quote, ts: int) -> list[Fill]:
        """Fill the net of what the sleeves' orders ask for at `price` `[A]`, and share it."""
        plans = [book.plan(price, quote) for book in self.books]
        wanted = np.array([units for units, _ in plans])
        if not wanted.any():
            return []
        alone = (wanted != 0.0).sum(0) <= 1
        net, names = wanted.sum(0), self._names()
        gross = np.abs(wanted).sum(0)
        # Orders that cancel out leave rounding, which must not become an order.
        net = np.where(~alone & (np.abs(net) <= NET * gross), 0.0, net)
        # What crosses at the close may not at the open, by less than the gap: nothing is sent.
        net = np.where([name == "" for name in names], 0.0, net)
        if alone.all():  # sized already, and a size twice is not the same to the last bit
            worse = np.where(wanted != 0.0, [w for _, w in plans], 0.0).sum(0)
        else:
            net, worse = self.sized(net, price, quote)
        fills = self.book(net, worse, names, price, ts)
        done = {fill.symbol: fill for fill in fills}
        for i in np.flatnonzero(gross).tolist():
            self._share(i, wanted[:, i], done.get(self._symbols[i]), float(price[i]), ts)
        return fills

    def correct(self, k: int, account: Account, close: np.ndarray, cut: Cut | None) -> Account:
        """Return sleeve k's account as its books are, where it cannot know what happened."""
        book, at = self.books[k], self.members[k].at
        # The usual case: its own account has followed each trade bit for bit.
        if not book.differs and cut is None:
            return account
        value, units = book.value(close), book.position().units
        weight = valued(units, close)[at] / value
        waits, dropped = book.waits[at], book.dropped[at]
        ordered = account.ordered
        if cut is not None:
            dropped = dropped | cut.less
            ordered = np.where(cut.retried, weight, ordered)
        pending = np.where(dropped, FILLED, np.where(waits, WHOLE, account.pending))
        if book.called:
            ordered, pending = np.zeros_like(ordered), np.full_like(pending, FILLED)
        equity, floor = value / book.capital, self._rules.floor
        book.forget()
        return account._replace(
            log_equity=np.float64(np.log(max(equity, floor))),
            log_equity_low=np.float64(0.0),
            weight=weight,
            weight_low=np.zeros_like(weight),
            ordered=ordered,
            pending=pending.astype(np.int8),
            ruined=np.asarray(equity <= floor),
        )

    def take_allocations(self) -> list[tuple[str, dict[str, Any]]]:
        """Return keys and bodies of what was shared since the last call."""
        found, self._found = self._found, []
        return found

    def _share(self, i: int, wanted: np.ndarray, fill: Fill | None, price: float, ts: int) -> None:
        """Share a fill of asset i, and cross the rest at `price`."""
        filled = 0.0 if fill is None else fill.units
        crossed, venue = split(wanted, filled)
        alone = bool(np.count_nonzero(wanted) == 1)
        fees = np.zeros(len(wanted))
        if fill is not None:
            fees = self._tell(fill, venue, venue / filled * fill.commission if filled else None)
        if crossed.any():
            symbol = self._symbols[i]
            body = {"symbol": symbol, "price": price, "units": self._by_name(crossed)}
            self._found.append((f"cross-{symbol}@{ts // NANOSECONDS}", body))
        for k, book in enumerate(self.books):
            paid = 0.0 if fill is None else venue.item(k) * fill.price + fees.item(k)
            if crossed[k]:
                paid += crossed.item(k) * price
            short = wanted[k] - venue[k] - crossed[k]
            if wanted[k]:
                book.take(i, venue.item(k) + crossed.item(k), paid)
                book.differs |= not alone or short != 0.0
            if abs(short) > NET * abs(wanted[k]):
                # With a limit on volume the rest stays in the market; without one cash was short.
                waits = self._rules.max_participation is not None
                (book.waits if waits else book.dropped)[i] = True

    def _tell(self, fill: Fill, units: np.ndarray, fees: np.ndarray | None) -> np.ndarray:
        """Note who has how much of a fill; return `[K]` their commissions."""
        fees = shared(fill.commission, np.abs(units)) if fees is None else fees
        body = {"symbol": fill.symbol, "price": fill.price, "units": self._by_name(units)}
        body["commission"] = self._by_name(fees)
        self._found.append((fill.execution_id, body))
        return fees

    def _margin_call(self, price: np.ndarray, quote: Quote, ts: int, moment: str) -> list[Fill]:
        """Close the account's positions; each sleeve's go with them."""
        before, units = self._units.copy(), np.array([b.position().units for b in self.books])
        fills = super()._margin_call(price, quote, ts, moment)
        for fill in fills:
            i = self._symbols.index(fill.symbol)
            if self._alone:  # its books have the same margin call
                self._tell(fill, np.array([fill.units]), None)
                continue
            parts = shared(fill.units, units[:, i] / before[i])
            fees = self._tell(fill, parts, None)
            for k, book in enumerate(self.books):
                book.take(i, parts.item(k), parts.item(k) * fill.price + fees.item(k))
        for book in [] if self._alone or not fills else self.books:
            book.work([])
            book.differs = book.called = True
        return fills

    def _relieve(self, amount: float, parts: Sequence[float], key: str) -> None:
        """Share a payment: each sleeve has its own part, and the rest goes to those that borrow.

        The account pays nothing for shares that one sleeve sold short and another one owns, or for
        money that one sleeve lacks and another one has.
        """
        owed = np.array([book.owed for book in self.books])
        rest, total = amount - sum(parts), np.array(parts)
        for book in self.books:
            book.owed = 0.0
        if len(parts) > 1 and abs(rest) > 1e-15 * sum(map(abs, parts)):
            # Those that borrowed paid for it by themselves, and get the difference back.
            more = shared(rest, owed)
            for book, relief in zip(self.books, more.tolist(), strict=True):
                book.pay(relief)
                book.differs |= abs(relief) > 1e-15 * abs(book.value(self._last))
            total = total + more
        if total.any():
            self._found.append((key, {"amount": self._by_name(total)}))

    def _by_name(self, values: np.ndarray) -> dict[str, float]:
        named = zip(self.members, values.tolist(), strict=True)
        return {member.name: value for member, value in named if value}
