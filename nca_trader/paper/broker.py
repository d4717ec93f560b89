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

from nca_trader.envs.account import state as cost_of
from nca_trader.envs.account.state import Legs, Quote, Rules
from nca_trader.errors import ConfigError
from nca_trader.types import Costs, Tensor

MAX_CLIENT_ID = 36  # what Alpaca and the exchanges behind ccxt all accept
SECOND = 1_000_000_000  # in nanoseconds
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
    commission: in money, every fee within it. ts: nanoseconds since 1970 UTC of the bar.
    """

    client_id: str
    execution_id: str
    symbol: str
    units: float
    price: float
    commission: float
    ts: int


class Activity(NamedTuple):
    """What happened at a broker. fills: in order. cash: money paid in (out, below 0) by no fill.

    That is dividends, interest, borrow fees and funding.
    """

    fills: list[Fill]
    cash: float = 0.0


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

    def open(self, price: np.ndarray, legs: Legs, ts: int) -> Activity:
        """What happened up to a bar's open, at which the market's price `[A]` is `price`."""
        ...

    def close(self, price: np.ndarray, legs: Legs, ts: int) -> Activity:
        """What happened up to a bar's close, without orders that were sent on seeing it."""
        ...

    def advance(self, price: np.ndarray, quote: Quote, ts: int) -> list[Fill]:
        """The executions of the working orders at a price `[A]` of now."""
        ...

    def position(self) -> Position:
        """Cash and units as the venue has them."""
        ...


class SimulatedBroker:
    """Fills market orders at the price it is told, less what a venue takes.

    Sells fill first. Where cash does not pay for the buys, every buy is cut by one factor. An
    asset whose bar is missing fills nothing. Cash is never negative unless `rules.borrow`.
    Between fills it pays and charges what holding costs, and closes what margin does not carry.

    Args:
      capital: cash at the start, in money.
      costs: as everywhere. symbols: `A` names, the order of every array.
      rules: of the account: lots, ticks, margin and the like; `capital` stands for theirs.
    """

    remembers = False

    def __init__(
        self, capital: float, costs: Costs, symbols: Sequence[str], rules: Rules = Rules()
    ):
        if not (np.isfinite(capital) and capital > 0.0):
            raise ConfigError(f"capital = {capital} is not a sum of money above 0; give more.")
        self._costs, self._symbols, self._rules = costs, tuple(symbols), rules
        self._cash = float(capital)
        self._units = np.zeros(len(self._symbols))
        self._last = np.zeros(len(self._symbols))  # the last prices that anything was worth
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

    def open(self, price: np.ndarray, legs: Legs, ts: int) -> Activity:
        """Dividends, holding charges, delistings, a margin call, and the orders that wait.

        Charges for time are taken before the positions change: here where orders fill at the
        open, else at the close.
        """
        fills, paid = [], 0.0
        if legs.dividend is not None:
            paid += self._pay(float((self._units * self._last * legs.dividend).sum()))
        haircut = 1.0 - self._rules.delist_haircut
        if self._rules.fill == "next_open" and legs.years is not None:
            worth = np.nan_to_num(price)
            if legs.delisted is not None:
                worth = np.where(legs.delisted, self._last * haircut, worth)
            paid += self._pay(self._held(worth, legs.years))
        if legs.delisted is not None:
            gone = np.flatnonzero(np.asarray(legs.delisted) & (self._units != 0.0))
            fills += [self._write_off(i, haircut, ts) for i in gone.tolist()]
            self._units[np.asarray(legs.delisted)] = 0.0
        fills += self._margin_call(price, legs.at_open, ts, "open")
        if self._rules.fill == "next_open":
            fills += self.advance(price, legs.at_open, ts)
        return Activity(fills, paid)

    def close(self, price: np.ndarray, legs: Legs, ts: int) -> Activity:
        """Holding charges where orders fill at the close, funding, and a margin call."""
        self._last, paid = np.nan_to_num(price), 0.0
        if self._rules.fill == "close" and legs.years is not None:
            paid += self._pay(self._held(self._last, legs.years))
        if legs.funding is not None:
            paid += self._pay(-float((legs.funding * self._units * self._last).sum()))
        return Activity(self._margin_call(price, legs.at_close, ts, "close"), paid)

    def advance(self, price: np.ndarray, quote: Quote, ts: int) -> list[Fill]:
        """Fills the working orders of assets that are present, at `price` `[A]`."""
        active = np.array([s in self._working for s in self._symbols]) & quote.present
        if not active.any():
            return []
        units, worse = self._sizes(np.where(np.isnan(price), 1.0, price), active, quote)
        # Sells come first, so that their cash is there when the buys are paid.
        order = np.argsort(units > 0.0, kind="stable").tolist()
        fills = []
        for i in order:
            if units[i] != 0.0:
                name = self._working[self._symbols[i]].client_id
                fills.append(self._book(i, units.item(i), price.item(i), worse.item(i), name, ts))
        return fills

    def position(self) -> Position:
        """Cash and units now."""
        return Position(self._cash, self._units.copy())

    def _pay(self, amount: float) -> float:
        """Enters money paid in, or out below 0; returns it."""
        self._cash += amount
        return amount

    def _held(self, price: np.ndarray, years: Tensor) -> float:
        """Interest less borrow fee and funding at `price` `[A]` for `years` of holding."""
        costs, cash, value = self._costs, self._cash, self._units * price
        owed = costs.interest_borrow * max(-cash, 0.0)
        owed += costs.borrow_fee * np.maximum(-value, 0.0).sum() + costs.funding * value.sum()
        earned = costs.interest_lend * max(cash, 0.0)
        return float(years * (earned - owed))

    def _equity(self, price: np.ndarray) -> float:
        return self._cash + float(np.where(self._units == 0.0, 0.0, self._units * price).sum())

    def _worse(self, units: np.ndarray, price: np.ndarray, quote: Quote) -> np.ndarray:
        """`[A]` how much worse than `price` these trades fill, as a fraction of it."""
        impacted = 0.0
        if quote.volume is not None:
            impacted = cost_of.impact(self._costs.impact, units, quote.volume)
        worse, _ = cost_of.worsening(self._costs, quote.half_spread, impacted)
        worse = np.broadcast_to(np.asarray(worse, np.float64), price.shape)
        if self._rules.tick:
            worse = cost_of.on_tick(price, worse, np.sign(units), self._rules.tick)
        return np.where(units < 0.0, np.minimum(worse, 1.0), worse)

    def _taken(self, units: np.ndarray, price: np.ndarray, quote: Quote) -> np.ndarray:
        """`[A]` units that this venue takes: within the volume, in lots, worth an order."""
        rules = self._rules
        if quote.volume is not None:
            allowed = cost_of.within_volume(units, quote.volume, rules.max_participation)
            units = np.asarray(allowed)
        units = np.asarray(cost_of.whole_lots(units, rules.lot))
        return np.asarray(cost_of.worth_sending(units, price, rules.min_notional))

    def _sizes(
        self, price: np.ndarray, active: np.ndarray, quote: Quote
    ) -> tuple[np.ndarray, np.ndarray]:
        """`[A]` signed units to trade at `price`, and how much worse than it they fill."""
        f, fee = self._costs.commission, self._costs.fixed_fee
        equity = self._equity(price)
        orders = [self._working.get(symbol) for symbol in self._symbols]
        target = np.array([order.weight if order else 0.0 for order in orders])
        buy_only = np.array([bool(order and order.buy_only) for order in orders])
        notional = np.where(active, target * equity - self._units * price, 0.0)
        notional[buy_only & (notional < 0.0)] = 0.0
        notional[np.abs(notional) < DUST * abs(equity)] = 0.0
        units = self._taken(notional / price, price, quote)
        worse = self._worse(units, price, quote)
        bought, sold = np.maximum(units, 0.0), np.maximum(-units, 0.0)
        need = (bought * price * (1 + worse)).sum() * (1 + f)
        cash = self._cash + (sold * price * (1 - worse)).sum() * (1 - f)
        cash = max(cash - fee * np.count_nonzero(units), 0.0)
        if not self._rules.borrow and need > cash:
            # Shaded by a few ulps, so that the sum of the payments cannot round above the cash.
            cut = cash / need * (1.0 - 4e-16 * (4 + len(bought)))
            units = np.where(units > 0.0, self._taken(cut * units, price, quote), units)
        return units, worse

    def _margin_call(self, price: np.ndarray, quote: Quote, ts: int, moment: str) -> list[Fill]:
        """Closes all that can be closed, where equity is too small for the gross position."""
        margin = self._rules.maintenance_margin
        gross = float(np.where(self._units == 0.0, 0.0, np.abs(self._units * price)).sum())
        if margin is None or gross * margin <= self._equity(price):
            return []
        closing = np.where(np.asarray(quote.present), -self._units, 0.0)
        worse = self._worse(closing, np.where(np.isnan(price), 1.0, price), quote)
        fee = self._costs.liquidation_fee
        self._working = {}
        return [
            self._book(
                i,
                closing.item(i),
                price.item(i),
                worse.item(i),
                f"margin-{moment}-{self._symbols[i]}",
                ts,
                fee,
            )
            for i in np.flatnonzero(closing).tolist()
        ]

    def _write_off(self, index: int, haircut: float, ts: int) -> Fill:
        """Pays out what is left of an asset that is gone."""
        units, paid = -float(self._units[index]), float(self._last[index]) * haircut
        self._cash -= units * paid
        self._units[index] = 0.0
        symbol = self._symbols[index]
        return Fill("delisted", f"delisted-{symbol}@{ts // SECOND}", symbol, units, paid, 0.0, ts)

    def _book(
        self,
        index: int,
        units: float,
        price: float,
        worse: float,
        client: str,
        ts: int,
        extra: float = 0.0,
    ) -> Fill:
        """Enters one execution of signed `units` into the books; `extra` is a fee on notional."""
        paid = price * (1 + worse) if units > 0.0 else price * (1 - worse)
        commission = abs(units) * (paid * self._costs.commission + price * extra)
        commission += self._costs.fixed_fee
        self._cash -= units * paid + commission
        self._units[index] += units
        symbol = self._symbols[index]
        execution = f"{client}@{ts // SECOND}"
        return Fill(client, execution, symbol, units, paid, commission, ts)


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
