"""The broker's side: a seam that any venue can stand behind, and the simulated one.

The simulated broker keeps its own books, cash and units in float64, and knows nothing of the
scale-free account. A session holds the two against each other after every bar, so each checks
the other's arithmetic.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from nca_trader.errors import ConfigError
from nca_trader.types import Costs

MAX_CLIENT_ID = 36  # what Alpaca and the exchanges behind ccxt all accept
DUST = 1e-12  # a trade smaller than this fraction of equity is rounding, and makes no fill


class Order(NamedTuple):
    """A target weight for one symbol, working until the session withdraws it.

    client_id: ours, the same at every resend. weight: signed fraction of equity at the fill.
    buy_only: what cash left undone of an earlier fill; it never sells.
    """

    client_id: str
    symbol: str
    weight: float
    buy_only: bool = False


class Fill(NamedTuple):
    """One execution.

    units: signed, bought above 0. price: what was paid a unit, slippage within it.
    commission: in money. ts: nanoseconds since 1970 UTC of the bar that filled it.
    """

    client_id: str
    execution_id: str
    symbol: str
    units: float
    price: float
    commission: float
    ts: int


class Position(NamedTuple):
    """What the broker says we have. cash: money. units: `[A]` float64, signed."""

    cash: float
    units: np.ndarray


class Broker(Protocol):
    """A venue. The session says which orders should be working; the venue does the rest.

    remembers: True where orders and positions outlive this process. What such a venue answers
    is committed at once; what a simulation answers comes out again when its bars do.
    """

    remembers: bool

    def work(self, orders: Sequence[Order]) -> list[str]:
        """Makes `orders` the whole set that works: new ids are sent, absent ones withdrawn.

        Returns:
          The client ids that were new and are accepted. Calling it twice changes nothing.
        """
        ...

    def advance(self, price: np.ndarray, present: np.ndarray, ts: int) -> list[Fill]:
        """The executions up to this moment, at which the market's price `[A]` is `price`."""
        ...

    def position(self) -> Position:
        """Cash and units as the venue has them."""
        ...


class SimulatedBroker:
    """Fills market orders at the price it is told, less slippage and commission.

    Sells fill first. Where cash does not pay for the buys, every buy is cut by one factor. An
    asset whose bar is missing fills nothing. Cash is never negative unless `borrow`.

    Args:
      capital: cash at the start, in money.
      costs: fractions, as everywhere. symbols: `A` names, the order of every array.
      lot: units are rounded towards zero to a multiple of this; 0 is no rounding.
      borrow: True lets buys exceed cash.
    """

    remembers = False

    def __init__(
        self,
        capital: float,
        costs: Costs,
        symbols: Sequence[str],
        lot: float = 0.0,
        borrow: bool = False,
    ):
        if not (np.isfinite(capital) and capital > 0.0):
            raise ConfigError(f"capital = {capital} is not a sum of money above 0; give more.")
        if not (np.isfinite(lot) and lot >= 0.0):
            raise ConfigError(f"lot = {lot} is not a number of units; 0 trades any fraction.")
        self._costs, self._symbols = costs, tuple(symbols)
        self._lot, self._borrow = lot, borrow
        self._cash = float(capital)
        self._units = np.zeros(len(self._symbols))
        self._working: dict[str, Order] = {}

    def work(self, orders: Sequence[Order]) -> list[str]:
        """Makes `orders` the whole working set; one order a symbol."""
        wanted = {order.symbol: order for order in orders}
        unknown = sorted(set(wanted) - set(self._symbols))
        if unknown or len(wanted) != len(orders):
            raise ConfigError(
                f"orders for {', '.join(o.symbol for o in orders)}: the broker takes one order "
                f"for each of {', '.join(self._symbols)}."
            )
        known = {order.client_id for order in self._working.values()}
        self._working = wanted
        return [order.client_id for order in orders if order.client_id not in known]

    def advance(self, price: np.ndarray, present: np.ndarray, ts: int) -> list[Fill]:
        """Fills the working orders of assets that are `present` `[A]` at `price` `[A]`."""
        active = np.array([s in self._working for s in self._symbols]) & present
        if not active.any():
            return []
        units = self._sizes(np.where(np.isnan(price), 0.0, price), active)
        # Sells come first, so that their cash is there when the buys are paid.
        sells_first = np.argsort(units > 0.0, kind="stable").tolist()
        sizes, prices = units.tolist(), price.tolist()
        return [self._book(i, sizes[i], prices[i], ts) for i in sells_first if sizes[i] != 0.0]

    def position(self) -> Position:
        """Cash and units now."""
        return Position(self._cash, self._units.copy())

    def _sizes(self, price: np.ndarray, active: np.ndarray) -> np.ndarray:
        """`[A]` signed units to trade at `price` before slippage."""
        s, f = self._costs.slippage, self._costs.commission
        equity = self._cash + float((self._units * price).sum())
        orders = [self._working.get(symbol) for symbol in self._symbols]
        target = np.array([order.weight if order else 0.0 for order in orders])
        buy_only = np.array([bool(order and order.buy_only) for order in orders])
        notional = np.where(active, target * equity - self._units * price, 0.0)
        notional[buy_only & (notional < 0.0)] = 0.0
        buys = np.maximum(notional, 0.0)
        cost = buys.sum() * (1 + s) * (1 + f)
        cash = self._cash - np.minimum(notional, 0.0).sum() * (1 - s) * (1 - f)
        if not self._borrow and cost > cash:
            # Shaded by a few ulps, so that the sum of the payments cannot round above the cash.
            cut = max(cash, 0.0) / cost * (1.0 - 4e-16 * (4 + len(buys)))
            notional = np.where(notional > 0.0, cut * notional, notional)
        notional[np.abs(notional) < DUST * abs(equity)] = 0.0
        units = np.divide(notional, price, out=np.zeros_like(price), where=notional != 0.0)
        return np.trunc(units / self._lot) * self._lot if self._lot else units

    def _book(self, index: int, units: float, price: float, ts: int) -> Fill:
        """Enters one execution of signed `units` into the books."""
        s, f = self._costs.slippage, self._costs.commission
        paid = price * (1 + s) if units > 0.0 else price * (1 - s)
        commission = abs(units) * paid * f
        self._cash -= units * paid + commission
        self._units[index] += units
        symbol = self._symbols[index]
        order = self._working[symbol]
        execution_id = f"{order.client_id}@{ts // 1_000_000_000}"
        return Fill(order.client_id, execution_id, symbol, units, paid, commission, ts)


def client_id(run: str, seconds: int, symbol: str, leg: int = 0) -> str:
    """The id of an order, the same whenever it is asked for: `nca-{run8}-{bar}-{symbol}-{leg}`.

    At most 36 of `[A-Za-z0-9-_]`. A symbol with other characters, or too long, keeps its first
    letters and gets six digits of its hash.

    Args:
      run: the session's hash. seconds: the bar's open since 1970 UTC. leg: 0 for the first order
        of this symbol at this bar.
    """
    head, tail = f"nca-{run[:8]}-{seconds}-", f"-{leg}"
    room = MAX_CLIENT_ID - len(head) - len(tail)
    name = re.sub(r"[^A-Za-z0-9]", "", symbol)
    if name != symbol or len(name) > room:
        name = name[: room - 6] + hashlib.sha256(symbol.encode()).hexdigest()[:6]
    return head + name + tail
