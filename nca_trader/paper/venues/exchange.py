"""A simulated exchange: a venue of this process, whose books are a SQLite file or in memory.

Orders fill at the next bar's open, or at the close that it has seen last. A live session sends it
units, as to any venue, and finds its books in a file: as at any venue, what it has answered is on
disk before the session's journal hears of it, and a session that is killed in between finds it
there. A replay sends target weights, which are sized where they fill, as a backtest does.

Cash and units are float64 and do not use the scale-free account. A replay compares the two at
every bar, so that each checks the other's arithmetic.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nca_trader.config import AccountConfig
from nca_trader.config.account import PLAIN
from nca_trader.config.records import loads
from nca_trader.envs.account.state import BarReturns, Quote, executable, next_legs, worsening
from nca_trader.errors import ConfigError, StateError
from nca_trader.paper.clock import NANOSECONDS
from nca_trader.paper.journal.bars import bar_body, bar_of, complete
from nca_trader.paper.venue import (
    Activity,
    Answer,
    Books,
    CashFlow,
    Fill,
    Holdings,
    Instrument,
    OrderState,
    Outcome,
    TargetOrder,
    Ticket,
    value_of,
)
from nca_trader.paper.venues.exchange_file import ExchangeFile
from nca_trader.types import Bar, Tensor

DUST = 1e-12  # a trade smaller than this fraction of equity is rounding, and makes no fill


class Exchange:
    """A simulated venue, which the session tells each bar. What it has answered is in its file.

    Sells fill first. Where cash does not pay for the buys, every buy is cut by one factor. An
    asset whose bar is missing fills nothing. Cash is never negative unless `rules.borrow`.
    Between fills it pays and charges what holding costs, and closes what margin does not carry.

    Args:
      path: the SQLite file, made with mode 0600 where it does not exist. None keeps the books in
        memory, for a replay, and no fill or payment once it has been returned.
      capital: cash at the start, in money.
      symbols: `A` names, the order of every array.
      rules: of the account: costs, lots, ticks, margin and the like; `capital` replaces theirs.

    Raises:
      ConfigError: the file holds the books of other symbols or another capital.
      StateError: the file cannot be used.

    >>> import dataclasses
    >>> from nca_trader.types import Costs
    >>> rules = dataclasses.replace(PLAIN, costs=Costs(commission=0.01))
    >>> exchange = Exchange(None, 1000.0, ["X"], rules)
    >>> exchange.work([TargetOrder("a", "X", 0.5)])
    (['a'], [])
    >>> quote = Quote(present=np.array([True]))
    >>> fill, = exchange.advance(np.array([10.0]), quote, ts=0)
    >>> fill.units, fill.commission
    (50.0, 5.0)
    """

    name = "simulated"

    def __init__(
        self,
        path: str | Path | None,
        capital: float,
        symbols: Sequence[str],
        rules: AccountConfig = PLAIN,
    ):
        if not (np.isfinite(capital) and capital > 0.0):
            raise ConfigError(f"capital = {capital} is not a sum of money above 0; give more.")
        self.path = None if path is None else Path(path)
        self._symbols, self._rules = tuple(symbols), rules
        self._about = {"symbols": list(self._symbols), "capital": float(capital)}
        self._targets: dict[str, TargetOrder] = {}  # the orders in weights, by symbol
        self._cash, self._units = float(capital), np.zeros(len(self._symbols))
        self._bar: Bar | None = None  # the last one
        self._close = np.full(len(self._symbols), np.nan)
        self._opened = self._close  # the last opens
        self._at_close: Quote | None = None  # what an order at the last close can fill at
        self._missing = np.zeros(len(self._symbols), int)
        # A replay may begin before 1970.
        self._clock = -(2**62) if path is None else 0
        self._file = ExchangeFile(self.path)
        if (kept := self._file.books()) is not None:
            self._restore(kept)
        # Whether an order in units was ever sent here.
        self.used = self._file.has_orders()
        with self._file.transaction(self._books):
            pass

    def instrument(self, symbol: str) -> Instrument:
        """Return the lots and the least order of the account's rules."""
        return Instrument(symbol, self._rules.lot, self._rules.tick, self._rules.min_notional)

    def quote(self, bar: Any, now: int) -> Activity:
        """Fill at the open of a bar that is newer than the last, and charge what holding costs.

        Returns:
          The fills and payments of this bar.
        """
        # A session that was restarted sends bars again; of those only the time counts. The clock
        # of a venue never goes back, whatever the feed says.
        self._clock = max(now, self._clock)
        time = int(bar.time[0])
        last = time if self._bar is None else int(self._bar.time[0])
        if self._bar is not None and time <= last:
            return Activity([], [])
        gone = ~bar.present & np.isfinite(self._close)
        missing = np.where(gone, self._missing + 1, 0)
        # The account's own returns and charges, so that both sides charge alike.
        legs = next_legs(self._close, bar, time - last, missing, self._rules)
        with self._file.transaction(self._books):
            fills, at_open = self._fill_open(bar.open, legs)
            more, at_close = self._fill_close(bar.close, legs)
            flows = [
                CashFlow(f"{moment}@{time}", "other", paid, self._clock)
                for moment, paid in (("open", at_open), ("close", at_close))
                if paid
            ]
            self._file.add(fills + more, flows)
            # An order at this close comes after the bar, and fills by what is kept here.
            self._missing, self._bar, self._at_close = missing, bar, legs.at_close
        return Activity(fills + more, flows)

    def work(self, orders: Sequence[TargetOrder]) -> tuple[list[str], list[Fill]]:
        """Make target weights the whole set of such orders, one per symbol.

        Each is sized where it fills.

        Returns:
          The client ids that are new, and the fills at this close where orders fill there.
        """
        wanted = {order.symbol: order for order in orders}
        # A target is of the whole position, so two of them for one symbol contradict each other.
        unknown = sorted(set(wanted) - set(self._symbols))
        if unknown or len(wanted) != len(orders):
            raise ConfigError(
                f"orders for {', '.join(o.symbol for o in orders)}: the exchange takes one order "
                f"for each of {', '.join(self._symbols)}."
            )
        # By id: a resend of the same orders sends nothing.
        known = {order.client_id for order in self._targets.values()}
        self._targets, fills = wanted, []
        if self._rules.fill == "close" and self._at_close is not None:
            with self._file.transaction(self._books):
                fills = self.advance(self._close, self._at_close, self._clock)
                self._file.add(fills)
        return [order.client_id for order in orders if order.client_id not in known], fills

    def submit(self, ticket: Ticket) -> Answer:
        """Accept an order; the same id twice is refused."""
        if self.look_up(ticket.client_id) is not None:
            return Answer(Outcome.REJECTED, "duplicate-id")
        if why := self._refusal(ticket):
            return Answer(Outcome.REJECTED, why, final=True)
        self.used = True
        with self._file.transaction(self._books):
            self._file.accept(ticket)
            if self._rules.fill == "close" and self._at_close is not None:
                self._file.add(self.match(self._close, self._at_close, self._clock))
        return Answer(Outcome.ACCEPTED)

    def cancel(self, client_id: str) -> Answer:
        """Withdraw an order, if it still works."""
        if self.look_up(client_id) is None:
            return Answer(Outcome.REJECTED, "unknown-order")
        with self._file.transaction(self._books):
            self._file.cancel(client_id)
        return Answer(Outcome.ACCEPTED)

    def look_up(self, client_id: str) -> OrderState | None:
        """Return an order; None if it was never accepted."""
        return self._file.order(client_id)

    def working(self) -> list[OrderState]:
        """Return every open order."""
        return self._file.working()

    def activity(self, since: int) -> Activity:
        """Return fills and payments at or after `since`."""
        return self._file.activity(since)

    def holdings(self) -> Holdings:
        """Return cash and units."""
        held = zip(self._symbols, self._units.tolist(), strict=True)
        return Holdings(self._cash, {symbol: n for symbol, n in held if n})

    def position(self) -> Books:
        """Return cash and units `[A]`."""
        return Books(self._cash, self._units.copy())  # the caller's copy does not follow fills

    def now(self) -> int:
        """Return the time of the last quote."""
        return self._clock

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def advance(self, price: np.ndarray, quote: Quote, ts: int) -> list[Fill]:
        """Fill the working orders of assets that are present, at `price` `[A]`."""
        return self._fill_targets(price, quote, ts) + self.match(price, quote, ts)

    def match(self, price: np.ndarray, quote: Quote, ts: int) -> list[Fill]:
        """Fill the open orders at `price` `[A]`, the oldest of each symbol first."""
        fills: list[Fill] = []
        waiting = self.working() if self.used else []
        while waiting:
            # One order per symbol and round: books take one number per asset.
            first = {order.symbol: order for order in reversed(waiting)}
            waiting = [order for order in waiting if first[order.symbol] is not order]
            orders = [first.get(symbol) for symbol in self._symbols]
            wanted = np.array([0.0 if o is None else o.units - o.filled for o in orders])
            names = ["" if order is None else order.client_id for order in orders]
            wanted = np.where(quote.present, wanted, 0.0)
            made = self._execute(wanted, names, price, quote, ts)
            fills += made
            done = {fill.client_id: fill.units for fill in made}
            for i, order in enumerate(orders):
                if order is not None and quote.present[i]:
                    self._after(order, done.get(order.client_id, 0.0))
        return fills

    def _fill_open(self, price: np.ndarray, legs: BarReturns) -> tuple[list[Fill], float]:
        """Settle dividends, holding charges, delistings, a margin call, and the working orders.

        Charges for time are taken before the positions change: here where orders fill at the
        open, else at the close. Returns the fills, and the money paid in or out.
        """
        fills, paid, self._opened = [], 0.0, price
        if legs.dividend is not None:
            # `legs.dividend` is a fraction of the last close, so units at that close give money.
            paid += self._pay(float((value_of(self._units, self._close) * legs.dividend).sum()))
        haircut = 1.0 - self._rules.delist_haircut
        if self._rules.fill == "next_open" and legs.years is not None:
            worth = price
            if legs.delisted is not None:
                # The charge is on what the position is worth after the haircut, as in the account.
                worth = np.where(legs.delisted, self._close * haircut, price)
            paid += self._pay(self._held(worth, legs.years))
        if legs.delisted is not None:
            gone = np.asarray(legs.delisted)
            for i in np.flatnonzero(gone & (self._units != 0.0)).tolist():
                units, symbol = -self._units.item(i), self._symbols[i]
                value = self._close.item(i) * haircut
                self._cash -= units * value
                name = f"delisted-{symbol}@{self._clock // NANOSECONDS}"
                fills.append(Fill("delisted", name, symbol, units, value, 0.0, self._clock))
            self._units[gone] = 0.0
        # As in `account.step.on_bar`: a margin call comes before the fills, and withdraws orders.
        fills += self._margin_call(price, legs.at_open, "open")
        if self._rules.fill == "next_open":
            fills += self.advance(price, legs.at_open, self._clock)
        return fills, paid

    def _fill_close(self, price: np.ndarray, legs: BarReturns) -> tuple[list[Fill], float]:
        """Settle a margin call in the bar, what is charged at its close, and a call there."""
        fills, paid = self._call_inside(legs), 0.0
        # A dividend or a delisting in the next bar is a fraction of this close.
        self._close = price
        if self._rules.fill == "close" and legs.years is not None:
            paid += self._pay(self._held(price, legs.years))
        if legs.funding is not None:
            paid += self._pay(-float((legs.funding * value_of(self._units, price)).sum()))
        fills += self._margin_call(price, legs.at_close, "close")
        if self._rules.fill == "close":  # an order that met a missing bar waits for this one
            fills += self.match(price, legs.at_close, self._clock)
        return fills, paid

    def _fill_targets(self, price: np.ndarray, quote: Quote, ts: int) -> list[Fill]:
        """Fill the orders in weights, each a fraction of equity before any of these fills."""
        if not self._targets:
            return []
        # An asset without a bar has no price to fill at, so its order waits.
        active = np.array([s in self._targets for s in self._symbols]) & quote.present
        if not active.any():
            return []
        orders = [self._targets.get(symbol) for symbol in self._symbols]
        target = np.array([order.weight if order else 0.0 for order in orders])
        buy_only = np.array([bool(order and order.buy_only) for order in orders])
        known = np.where(np.isnan(price), 1.0, price)  # NaN before an asset's first bar
        equity = self._equity(known)
        notional = np.where(active, target * equity - self._units * known, 0.0)
        # Its target may be below what is held by now, as prices have moved.
        notional[buy_only & (notional < 0.0)] = 0.0
        notional[np.abs(notional) < DUST * abs(equity)] = 0.0
        names = [order.client_id if order else "" for order in orders]
        return self._execute(notional / known, names, price, quote, ts)

    def _execute(
        self, wanted: np.ndarray, names: list[str], price: np.ndarray, quote: Quote, ts: int
    ) -> list[Fill]:
        """Fill `wanted` units `[A]` at `price` `[A]`, as far as lots, volume and cash allow."""
        known = np.where(np.isnan(price), 1.0, price)
        units = self._taken(wanted, known, quote)
        worse = self._worse(units, known, quote)
        bought, sold = np.maximum(units, 0.0), np.maximum(-units, 0.0)
        f = self._rules.costs.commission
        # The commission is charged on what is paid, slippage included.
        need = (bought * known * (1 + worse)).sum() * (1 + f)
        cash = self._cash + (sold * known * (1 - worse)).sum() * (1 - f)
        # Fees of every fill come first, so that the last one can be paid.
        cash = max(cash - self._rules.costs.fixed_fee * np.count_nonzero(units), 0.0)
        if not self._rules.borrow and need > cash:
            # Shaded by a few ulps, so that the sum of the payments cannot round above the cash.
            cut = cash / need * (1.0 - 4e-16 * (4 + len(bought)))
            # Cut once more to lots, as a part of an order need not be whole lots.
            units = np.where(units > 0.0, self._taken(cut * units, known, quote), units)
        # Sells come first, so that their cash is there when the buys are paid.
        order = np.argsort(units > 0.0, kind="stable").tolist()
        return [
            self._book(i, units.item(i), price.item(i), worse.item(i), names[i], ts)
            for i in order
            if units[i] != 0.0
        ]

    def _after(self, order: OrderState, filled: float) -> None:
        """Note what an order has filled; what cash or lots did not allow is cancelled."""
        # Exactly 0 where nothing was cut, as the fill is this very difference.
        rest = order.units - order.filled - filled
        # What a used-up volume held back is filled later.
        waits = self._rules.max_participation < math.inf
        status = "filled" if rest == 0.0 else "working" if waits else "cancelled"
        self._file.update(order.client_id, order.units - rest, status)

    def _pay(self, amount: float) -> float:
        """Add money paid in, or out below 0, to the cash; return it."""
        self._cash += amount
        return amount

    def _held(self, price: np.ndarray, years: Tensor) -> float:
        """Return interest less borrow fee and funding at `price` `[A]` for `years` of holding."""
        costs, cash, value = self._rules.costs, self._cash, value_of(self._units, price)
        owed = costs.interest_borrow * max(-cash, 0.0)
        owed += costs.borrow_fee * np.maximum(-value, 0.0).sum() + costs.funding * value.sum()
        earned = costs.interest_lend * max(cash, 0.0)
        return float(years * (earned - owed))

    def _equity(self, price: np.ndarray) -> float:
        return self._cash + float(value_of(self._units, price).sum())

    def _worse(self, units: np.ndarray, price: np.ndarray, quote: Quote) -> np.ndarray:
        """Return `[A]` how much worse than `price` these trades fill, as a fraction of it."""
        # A NaN price is of an asset that is not there yet; nothing of it is held or traded.
        at, money = quote._replace(price=price), np.asarray(self._equity(price))
        worse = worsening(units, at, self._rules, money)[0]
        return np.broadcast_to(np.asarray(worse, np.float64), price.shape)

    def _taken(self, units: np.ndarray, price: np.ndarray, quote: Quote) -> np.ndarray:
        """Return `[A]` units that this venue takes: within the volume, in lots, worth an order."""
        return np.asarray(executable(units, quote._replace(price=price), self._rules)[0])

    def _call_inside(self, legs: BarReturns) -> list[Fill]:
        """Close the positions where equity meets its margin on the way to the adverse prices.

        The whole way is that of `account.step`: all positions go from the open to the low, short
        ones to the high, at the same time.
        """
        margin, low, high = self._rules.maintenance_margin, legs.low, legs.high
        if not margin or low is None or high is None:
            return []
        value = value_of(self._units, self._opened)
        worst = np.where(value > 0.0, low, high)
        room = self._equity(self._opened) - margin * np.abs(value).sum()
        lost = -float((worst * (value - margin * np.abs(value))).sum())
        if not np.any(value) or lost < room:
            return []
        share = max(room / lost, 0.0) if lost > 0.0 else 0.0
        price = self._opened * (1.0 + share * worst)
        return self._margin_call(price, legs.at_open._replace(price=price), "inside")

    def _margin_call(self, price: np.ndarray, quote: Quote, moment: str) -> list[Fill]:
        """Close every position that is quoted, if equity is too small for the gross position."""
        margin = self._rules.maintenance_margin
        if not margin:
            return []
        gross = float(np.abs(value_of(self._units, price)).sum())
        # Inside a bar the price is where the margin is met, to rounding.
        if moment != "inside" and gross * margin <= self._equity(price):
            return []
        present = np.asarray(quote.present)
        # A fixed fee is not paid for what rounding left of a position that was closed.
        some = np.abs(value_of(self._units, price)) > DUST * abs(self._equity(price))
        self._units[present & ~some] = 0.0
        closing = np.where(present & some, -self._units, 0.0)
        worse = self._worse(closing, np.where(np.isnan(price), 1.0, price), quote)
        fee = self._rules.costs.liquidation_fee
        self._targets = {}  # a call withdraws all orders, as in the account
        fills = [
            self._book(
                i,
                closing.item(i),
                price.item(i),
                worse.item(i),
                f"margin-{moment}-{self._symbols[i]}",
                self._clock,
                fee,
            )
            for i in np.flatnonzero(closing).tolist()
        ]
        if fills:
            self._file.cancel_all()
        return fills

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
        commission = abs(units) * (paid * self._rules.costs.commission + price * extra)
        commission += self._rules.costs.fixed_fee
        self._cash -= units * paid + commission
        self._units[index] += units
        symbol = self._symbols[index]
        # The bar is part of the id: an order may fill in parts, over several bars.
        execution = f"{client}@{ts // NANOSECONDS}"
        return Fill(client, execution, symbol, units, paid, commission, ts)

    def _refusal(self, ticket: Ticket) -> str:
        if ticket.symbol not in self._symbols:
            return "unknown-symbol"
        if not np.isfinite(ticket.units) or ticket.units == 0.0:
            return "bad-size"
        return "" if ticket.stop is None else "stop-orders-are-not-supported"

    def _restore(self, text: str) -> None:
        """Take over the books of a file, as `_books` gave them."""
        try:
            kept = loads(text)
            self._cash, self._units = float(kept["cash"]), np.array(kept["units"], float)
            if not (np.isfinite(self._cash) and np.isfinite(self._units).all()):
                raise ValueError("cash or units are not finite")
            close, time, rows = np.array(kept["close"], float), kept["time"], kept["rows"]
            self._missing, self._clock = np.array(kept["missing"], int), int(kept["clock"])
            about = {name: kept[name] for name in self._about}
        except (TypeError, ValueError, KeyError) as error:
            raise StateError(
                f"{self.path}: the exchange's books are damaged ({error}); restore the file, or "
                "name another journal."
            ) from error
        if about != self._about:
            raise ConfigError(
                f"{self.path}: holds the books of {', '.join(kept['symbols'])} and "
                f"{kept['capital']:,.2f} at the start; name another journal."
            )
        self._close = close
        if rows is not None:
            self._bar = complete(bar_of(rows, self._symbols, time), close)
            # Of its returns nothing is known any more, and no order needs them.
            none = np.zeros(len(close), int)
            legs = next_legs(close, self._bar, 0, none, self._rules)
            self._at_close = legs.at_close

    def _books(self) -> str:
        """Return all that the exchange knows besides its orders, as JSON."""
        bar = self._bar
        books = {
            **self._about,
            "cash": self._cash,
            "units": self._units.tolist(),
            "clock": self._clock,
            "time": None if bar is None else int(bar.time[0]),
            "missing": self._missing.tolist(),
            "close": [None if np.isnan(x) else x for x in self._close.tolist()],
            "rows": None if bar is None else bar_body(bar, self._symbols),
        }
        return json.dumps(books)
