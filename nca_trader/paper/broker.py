"""The cash, units and fills of the simulated exchange.

They are float64 and do not use the scale-free account. A replay compares the two at every bar, so
that each checks the other's arithmetic.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from nca_trader.envs.account.state import Legs, Quote, Rules, executable, worsening
from nca_trader.errors import ConfigError
from nca_trader.paper.venue import MAX_CLIENT_ID, Fill
from nca_trader.types import Costs, Tensor

SECOND = 1_000_000_000  # in nanoseconds
DUST = 1e-12  # a trade smaller than this fraction of equity is rounding, and makes no fill


class Order(NamedTuple):
    """A target weight for one symbol, working until the session withdraws it.

    client_id: ours, the same at every resend. weight: signed fraction of equity at the fill.
    buy_only: the rest of an earlier buy that cash cut; it never sells.
    """

    client_id: str
    symbol: str
    weight: float
    buy_only: bool = False


class Activity(NamedTuple):
    """What happened at a broker.

    fills: in order. cash: money paid in (out, below 0) other than by fills: dividends, interest,
    borrow fees and funding.
    """

    fills: list[Fill]
    cash: float = 0.0


class Position(NamedTuple):
    """What an account holds at a broker. cash: money. units: `[A]` float64, signed."""

    cash: float
    units: np.ndarray


def valued(units: np.ndarray, price: np.ndarray) -> np.ndarray:
    """Return `[A]` what positions are worth in money.

    0 units of an asset without a price yet are worth 0, and not NaN.

    >>> valued(np.array([2.0, 0.0]), np.array([10.0, np.nan]))
    array([20.,  0.])
    """
    return np.where(units == 0.0, 0.0, units * price)


class SimulatedBroker:
    """Fills market orders at a given price, less what a venue takes.

    Sells fill first. Where cash does not pay for the buys, every buy is cut by one factor. An
    asset whose bar is missing fills nothing. Cash is never negative unless `rules.borrow`.
    Between fills it pays and charges what holding costs, and closes what margin does not carry.

    Args:
      capital: cash at the start, in money.
      costs: what trading and holding cost.
      symbols: `A` names, the order of every array.
      rules: of the account: lots, ticks, margin and the like; `capital` replaces theirs.

    >>> broker = SimulatedBroker(1000.0, Costs(commission=0.01), ["X"])
    >>> broker.work([Order("a", "X", 0.5)])
    ['a']
    >>> quote = Quote(present=np.array([True]))
    >>> fill, = broker.advance(np.array([10.0]), quote, ts=0)
    >>> fill.units, fill.commission
    (50.0, 5.0)
    """

    def __init__(
        self, capital: float, costs: Costs, symbols: Sequence[str], rules: Rules = Rules()
    ):
        if not (np.isfinite(capital) and capital > 0.0):
            raise ConfigError(f"capital = {capital} is not a sum of money above 0; give more.")
        self._costs, self._symbols, self._rules = costs, tuple(symbols), rules
        self._cash = float(capital)
        self._units = np.zeros(len(self._symbols))
        self._last = np.zeros(len(self._symbols))  # the last prices that anything was worth
        self._opened = self._last  # the last opens
        self._working: dict[str, Order] = {}

    def work(self, orders: Sequence[Order]) -> list[str]:
        """Make `orders` the whole working set; one order per symbol."""
        wanted = {order.symbol: order for order in orders}
        # A target is of the whole position, so two of them for one symbol contradict each other.
        unknown = sorted(set(wanted) - set(self._symbols))
        if unknown or len(wanted) != len(orders):
            raise ConfigError(
                f"orders for {', '.join(o.symbol for o in orders)}: the broker takes one order "
                f"for each of {', '.join(self._symbols)}."
            )
        # By id: a resend of the same orders sends nothing.
        known = {order.client_id for order in self._working.values()}
        self._working = wanted
        return [order.client_id for order in orders if order.client_id not in known]

    def open(self, price: np.ndarray, legs: Legs, ts: int) -> Activity:
        """Settle dividends, holding charges, delistings, a margin call, and the working orders.

        Charges for time are taken before the positions change: here where orders fill at the
        open, else at the close.
        """
        fills, paid, self._opened = [], 0.0, np.nan_to_num(price)
        if legs.dividend is not None:
            # `legs.dividend` is a fraction of the last close, so units at that close give money.
            paid += self._pay(float((self._units * self._last * legs.dividend).sum()))
        haircut = 1.0 - self._rules.delist_haircut
        if self._rules.fill == "next_open" and legs.years is not None:
            worth = np.nan_to_num(price)
            if legs.delisted is not None:
                # The charge is on what the position is worth after the haircut, as in the account.
                worth = np.where(legs.delisted, self._last * haircut, worth)
            paid += self._pay(self._held(worth, legs.years))
        if legs.delisted is not None:
            gone = np.asarray(legs.delisted)
            for i in np.flatnonzero(gone & (self._units != 0.0)).tolist():
                units, symbol = -self._units.item(i), self._symbols[i]
                value = self._last.item(i) * haircut
                self._cash -= units * value
                name = f"delisted-{symbol}@{ts // SECOND}"
                fills.append(Fill("delisted", name, symbol, units, value, 0.0, ts))
            self._units[gone] = 0.0
        # As in `account.step.on_bar`: a margin call comes before the fills, and withdraws orders.
        fills += self._margin_call(price, legs.at_open, ts, "open")
        if self._rules.fill == "next_open":
            fills += self.advance(price, legs.at_open, ts)
        return Activity(fills, paid)

    def close(self, price: np.ndarray, legs: Legs, ts: int) -> Activity:
        """Settle a margin call in the bar, what is charged at its close, and a call there."""
        fills = self._call_inside(legs, ts)
        # A dividend or a delisting in the next bar is a fraction of this close.
        self._last, paid = np.nan_to_num(price), 0.0
        if self._rules.fill == "close" and legs.years is not None:
            paid += self._pay(self._held(self._last, legs.years))
        if legs.funding is not None:
            paid += self._pay(-float((legs.funding * self._units * self._last).sum()))
        return Activity(fills + self._margin_call(price, legs.at_close, ts, "close"), paid)

    def advance(self, price: np.ndarray, quote: Quote, ts: int) -> list[Fill]:
        """Fill the working orders of assets that are present, at `price` `[A]`."""
        wanted = self.wanted(price, quote)
        if wanted is None:
            return []
        # A target is a fraction of equity before any of these fills: none of them sizes another.
        return self.execute(wanted, self._names(), price, quote, ts)

    def wanted(self, price: np.ndarray, quote: Quote) -> np.ndarray | None:
        """Return `[A]` units that the working orders ask for at `price` `[A]`; None without any."""
        # The first orders of a session may fill at a close that `close` was not called for.
        self._last = np.nan_to_num(price)
        if not self._working:
            return None
        # An asset without a bar has no price to fill at, so its order waits.
        active = np.array([s in self._working for s in self._symbols]) & quote.present
        if not active.any():
            return None
        orders = [self._working.get(symbol) for symbol in self._symbols]
        target = np.array([order.weight if order else 0.0 for order in orders])
        buy_only = np.array([bool(order and order.buy_only) for order in orders])
        known = np.where(np.isnan(price), 1.0, price)  # NaN before an asset's first bar
        equity = self._equity(known)
        notional = np.where(active, target * equity - self._units * known, 0.0)
        # Its target may be below what is held by now, as prices have moved.
        notional[buy_only & (notional < 0.0)] = 0.0
        notional[np.abs(notional) < DUST * abs(equity)] = 0.0
        return notional / known

    def execute(
        self, wanted: np.ndarray, names: list[str], price: np.ndarray, quote: Quote, ts: int
    ) -> list[Fill]:
        """Fill `wanted` units `[A]` at `price` `[A]`, as far as lots, volume and cash allow."""
        units, worse = self.sized(wanted, price, quote)
        return self.book(units, worse, names, price, ts)

    def sized(
        self, wanted: np.ndarray, price: np.ndarray, quote: Quote
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return `[A]` the units that can fill, and how much worse than `price` they do."""
        known = np.where(np.isnan(price), 1.0, price)
        units = self._taken(wanted, known, quote)
        worse = self._worse(units, known, quote)
        bought, sold = np.maximum(units, 0.0), np.maximum(-units, 0.0)
        f = self._costs.commission
        # The commission is charged on what is paid, slippage included.
        need = (bought * known * (1 + worse)).sum() * (1 + f)
        cash = self._cash + (sold * known * (1 - worse)).sum() * (1 - f)
        # Fees of every fill come first, so that the last one can be paid.
        cash = max(cash - self._costs.fixed_fee * np.count_nonzero(units), 0.0)
        if not self._rules.borrow and need > cash:
            # Shaded by a few ulps, so that the sum of the payments cannot round above the cash.
            cut = cash / need * (1.0 - 4e-16 * (4 + len(bought)))
            # Cut once more to lots, as a part of an order need not be whole lots.
            units = np.where(units > 0.0, self._taken(cut * units, known, quote), units)
        return units, worse

    def book(
        self, units: np.ndarray, worse: np.ndarray, names: list[str], price: np.ndarray, ts: int
    ) -> list[Fill]:
        """Fill `units` `[A]`, at prices that are `worse` than `price` by these fractions."""
        # Sells come first, so that their cash is there when the buys are paid.
        order = np.argsort(units > 0.0, kind="stable").tolist()
        fills = []
        for i in order:
            if units[i] != 0.0:
                name = names[i]
                fills.append(self._book(i, units.item(i), price.item(i), worse.item(i), name, ts))
        return fills

    def restore(self, cash: float, units: np.ndarray, last: np.ndarray) -> None:
        """Take over books of an earlier process: cash, units `[A]` and last closes `[A]`."""
        self._cash, self._units, self._last = cash, units.copy(), np.nan_to_num(last)

    def position(self) -> Position:
        """Return cash and units now."""
        return Position(self._cash, self._units.copy())  # the caller's copy does not follow fills

    def _names(self) -> list[str]:
        """Return the client id of each asset's working order, "" for none."""
        orders = [self._working.get(symbol) for symbol in self._symbols]
        return [order.client_id if order else "" for order in orders]

    def _pay(self, amount: float) -> float:
        """Add money paid in, or out below 0, to the cash; return it."""
        self._cash += amount
        return amount

    def _held(self, price: np.ndarray, years: Tensor) -> float:
        """Return interest less borrow fee and funding at `price` `[A]` for `years` of holding."""
        costs, cash, value = self._costs, self._cash, self._units * price
        owed = costs.interest_borrow * max(-cash, 0.0)
        owed += costs.borrow_fee * np.maximum(-value, 0.0).sum() + costs.funding * value.sum()
        earned = costs.interest_lend * max(cash, 0.0)
        return float(years * (earned - owed))

    def _equity(self, price: np.ndarray) -> float:
        return self._cash + float(valued(self._units, price).sum())

    def _worse(self, units: np.ndarray, price: np.ndarray, quote: Quote) -> np.ndarray:
        """Return `[A]` how much worse than `price` these trades fill, as a fraction of it."""
        # A NaN price is of an asset that is not there yet; nothing of it is held or traded.
        at, money = quote._replace(price=price), np.asarray(self._equity(price))
        worse = worsening(units, at, self._costs, self._rules.tick, money)[0]
        return np.broadcast_to(np.asarray(worse, np.float64), price.shape)

    def _taken(self, units: np.ndarray, price: np.ndarray, quote: Quote) -> np.ndarray:
        """Return `[A]` units that this venue takes: within the volume, in lots, worth an order."""
        return np.asarray(executable(units, quote._replace(price=price), self._rules)[0])

    def _call_inside(self, legs: Legs, ts: int) -> list[Fill]:
        """Close the positions where equity meets its margin on the way to the adverse prices.

        The whole way is that of `account.step`: all positions go from the open to the low, short
        ones to the high, at the same time.
        """
        margin, low, high = self._rules.maintenance_margin, legs.low, legs.high
        if margin is None or low is None or high is None:
            return []
        value = valued(self._units, self._opened)
        worst = np.where(value > 0.0, low, high)
        room = self._equity(self._opened) - margin * np.abs(value).sum()
        lost = -float((worst * (value - margin * np.abs(value))).sum())
        if not np.any(value) or lost < room:
            return []
        share = max(room / lost, 0.0) if lost > 0.0 else 0.0
        price = self._opened * (1.0 + share * worst)
        return self._margin_call(price, legs.at_open._replace(price=price), ts, "inside")

    def _margin_call(self, price: np.ndarray, quote: Quote, ts: int, moment: str) -> list[Fill]:
        """Close every position that is quoted, if equity is too small for the gross position."""
        margin = self._rules.maintenance_margin
        if margin is None:
            return []
        gross = float(np.abs(valued(self._units, price)).sum())
        # Inside a bar the price is where the margin is met, to rounding.
        if moment != "inside" and gross * margin <= self._equity(price):
            return []
        present = np.asarray(quote.present)
        # A fixed fee is not paid for what rounding left of a position that was closed.
        some = np.abs(valued(self._units, price)) > DUST * abs(self._equity(price))
        self._units[present & ~some] = 0.0
        closing = np.where(present & some, -self._units, 0.0)
        worse = self._worse(closing, np.where(np.isnan(price), 1.0, price), quote)
        fee = self._costs.liquidation_fee
        self._working = {}  # a call withdraws all orders, as in the account
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
        """Book one execution of signed `units`; `extra` is a fee as a fraction of notional."""
        paid = price * (1 + worse) if units > 0.0 else price * (1 - worse)
        commission = abs(units) * (paid * self._costs.commission + price * extra)
        commission += self._costs.fixed_fee
        self._cash -= units * paid + commission
        self._units[index] += units
        symbol = self._symbols[index]
        # The bar is part of the id: an order may fill in parts, over several bars.
        execution = f"{client}@{ts // SECOND}"
        return Fill(client, execution, symbol, units, paid, commission, ts)


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
