"""A simulated exchange: a venue of this process, whose books are a SQLite file or in memory.

It fills as `SimulatedBroker` does, whose code it runs: at the next bar's open, or at the close
that it has seen last. As at any venue, what it has answered is on disk before the session's
journal hears of it; a session that is killed in between finds it there.

A live session sends it units, as to any venue. A replay sends target weights, which are sized
where they fill, as a backtest does.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nca_trader.config.records import loads
from nca_trader.envs.account.state import Quote, Rules, next_legs
from nca_trader.errors import ConfigError, StateError
from nca_trader.paper.broker import Order, Position, SimulatedBroker
from nca_trader.paper.gate import bar_body, bar_of, completed
from nca_trader.paper.venue import (
    Activity,
    Answer,
    CashFlow,
    Fill,
    Holdings,
    Instrument,
    OrderState,
    Outcome,
    Ticket,
)
from nca_trader.types import Bar, Costs

SCHEMA = """
CREATE TABLE IF NOT EXISTS state(name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS orders(
  seq INTEGER PRIMARY KEY, client_id TEXT UNIQUE NOT NULL, symbol TEXT NOT NULL,
  units REAL NOT NULL, filled REAL NOT NULL, status TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS fills(
  seq INTEGER PRIMARY KEY, client_id TEXT NOT NULL, execution_id TEXT UNIQUE NOT NULL,
  symbol TEXT NOT NULL, units REAL NOT NULL, price REAL NOT NULL, commission REAL NOT NULL,
  ts INTEGER NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS flows(
  seq INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, kind TEXT NOT NULL, amount REAL NOT NULL,
  ts INTEGER NOT NULL, symbol TEXT NOT NULL) STRICT;
CREATE INDEX IF NOT EXISTS fill_times ON fills(ts);
CREATE INDEX IF NOT EXISTS order_status ON orders(status);
"""


class _Books(SimulatedBroker):
    """Cash and positions, which fill the exchange's orders where a session's would fill."""

    def __init__(self, exchange: Exchange, *args: Any):
        super().__init__(*args)
        self._exchange = exchange

    def advance(self, price: np.ndarray, quote: Quote, ts: int) -> list[Fill]:
        """Fill the orders in weights and those in units at `price` `[A]`."""
        return super().advance(price, quote, ts) + self._exchange.match(price, quote, ts)

    def _margin_call(self, price: np.ndarray, quote: Quote, ts: int, moment: str) -> list[Fill]:
        fills = super()._margin_call(price, quote, ts, moment)
        if fills:  # a call withdraws all orders
            self._exchange.withdraw()
        return fills


class Exchange:
    """A `SimulatedVenue`. Whatever it has answered is in its file.

    Args:
      path: the SQLite file, made with mode 0600 where it does not exist. None keeps the books in
        memory, for a replay.
      capital: cash at the start.
      costs: what trading and holding cost.
      symbols: `A` names.
      rules: of the account, as in `SimulatedBroker`.

    Raises:
      ConfigError: the file holds the books of other symbols or another capital.
      StateError: the file cannot be used.
    """

    name = "simulated"

    def __init__(
        self,
        path: str | Path | None,
        capital: float,
        costs: Costs,
        symbols: Sequence[str],
        rules: Rules = Rules(),
    ):
        self._symbols, self._costs, self._rules = tuple(symbols), costs, rules
        self._books = _Books(self, capital, costs, self._symbols, rules)
        self.path = None if path is None else Path(path)
        self._at_close: Quote | None = None  # what an order at the last close can fill at
        # A replay may begin before 1970.
        none, clock = [None] * len(self._symbols), 0 if path is not None else -(2**62)
        about = {"symbols": list(self._symbols), "capital": float(capital)}
        self._state: dict[str, Any] = {
            **about, "cash": float(capital), "units": [0.0] * len(none), "clock": clock,
            "time": None, "missing": [0] * len(none), "close": none, "rows": None,
        }  # fmt: skip
        try:
            if self.path is not None:
                # Made here, because SQLite would give it the mode of the user's umask.
                with contextlib.suppress(FileExistsError):
                    os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
            self._db = sqlite3.connect(self.path or ":memory:", isolation_level=None)
            # A dashboard may read the books while they are written.
            self._db.execute("PRAGMA journal_mode = WAL")
            # As at a real venue, what was accepted is still there after a power cut.
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.executescript(SCHEMA)
            found = self._db.execute("SELECT value FROM state WHERE name = 'books'").fetchone()
        except (sqlite3.Error, OSError) as error:
            raise StateError(
                f"{self.path}: the exchange's books cannot be used ({error}); restore the file, or "
                "name another journal."
            ) from error
        try:
            kept = loads(found[0]) if found else self._state
            if not (isinstance(kept, dict) and self._state.keys() <= kept.keys()):
                raise ValueError("entries are missing")
            close = np.array(kept["close"], float)
            cash, units = float(kept["cash"]), np.array(kept["units"], float)
            self._missing = np.array(kept["missing"], int)
            if not (np.isfinite(cash) and np.isfinite(units).all()):
                raise ValueError("cash or units are not finite")
        except (TypeError, ValueError) as error:
            raise StateError(
                f"{self.path}: the exchange's books are damaged ({error}); restore the file, or "
                "name another journal."
            ) from error
        if {name: kept[name] for name in about} != about:
            raise ConfigError(
                f"{self.path}: holds the books of {', '.join(kept['symbols'])} and "
                f"{kept['capital']:,.2f} at the start; name another journal."
            )
        self._state, self._close = kept, close
        self._books.restore(cash, units, close)
        self._bar: Bar | None = None  # the last one
        if kept["rows"] is not None:
            bar = bar_of(kept["rows"], self._symbols, kept["time"])
            self._bar = completed(bar, close)
            # Of its returns nothing is known any more, and no order needs them.
            none = np.zeros(len(close), int)
            self._at_close = next_legs(close, self._bar, 0, none, costs, rules).at_close
        # Whether an order in units was ever sent here.
        self.used = self._db.execute("SELECT 1 FROM orders LIMIT 1").fetchone() is not None
        with self._transaction():
            pass

    def instrument(self, symbol: str) -> Instrument:
        """Return the lots and the least order of the account's rules."""
        return Instrument(symbol, self._rules.lot, self._rules.tick, self._rules.min_notional)

    def quote(self, bar: Any, now: int) -> Activity:
        """Fill at the open of a bar that is newer than the last, and charge what holding costs.

        Returns:
          The fills and payments of this bar.
        """
        # A session that was restarted sends bars again; of those only the time counts.
        last, time = self._state["time"], int(bar.time[0])
        if last is not None and time <= last:
            if now > self._state["clock"]:
                self._state["clock"] = now
            return Activity([], [])
        seconds = 0 if last is None else time - last
        gone = ~bar.present & np.isfinite(self._close)
        missing = np.where(gone, self._missing + 1, 0)
        # The account's own returns and charges, so that both sides charge alike.
        legs = next_legs(self._close, bar, seconds, missing, self._costs, self._rules)
        with self._transaction():
            self._state |= {"clock": max(now, self._state["clock"]), "time": time}
            # The clock of a venue never goes back, whatever the feed says.
            now = self._state["clock"]
            at_open = self._books.open(bar.open, legs, now)
            at_close = self._books.close(bar.close, legs, now)
            fills, flows = at_open.fills + at_close.fills, []
            for moment, paid in (("open", at_open.cash), ("close", at_close.cash)):
                if paid:
                    flows.append(CashFlow(f"{moment}@{time}", "other", paid, now))
            self._close, self._at_close = bar.close, legs.at_close
            if self._rules.fill == "close":  # an order that met a missing bar waits for this one
                fills += self.match(bar.close, legs.at_close, now)
            self._list(fills, flows)
            # An order at this close comes after the bar, and fills by what is kept here.
            self._missing, self._bar = missing, bar
        return Activity(fills, flows)

    def work(self, orders: Sequence[Order]) -> tuple[list[str], list[Fill]]:
        """Make target weights the whole set of such orders, each sized where it fills.

        Returns:
          The client ids that are new, and the fills at this close where orders fill there.
        """
        accepted, fills = self._books.work(orders), []
        if self._rules.fill == "close" and self._at_close is not None:
            with self._transaction():
                fills = self._books.advance(self._close, self._at_close, self._state["clock"])
                self._list(fills)
        return accepted, fills

    def submit(self, ticket: Ticket) -> Answer:
        """Accept an order; the same id twice is refused."""
        if self.look_up(ticket.client_id) is not None:
            return Answer(Outcome.REJECTED, "duplicate-id")
        if why := self._refusal(ticket):
            return Answer(Outcome.REJECTED, why, final=True)
        self.used = True
        with self._transaction():
            self._db.execute(
                "INSERT INTO orders(client_id, symbol, units, filled, status) "
                "VALUES (?, ?, ?, 0.0, 'working')",
                (ticket.client_id, ticket.symbol, ticket.units),
            )
            if self._rules.fill == "close" and self._at_close is not None:
                self._list(self.match(self._close, self._at_close, self._state["clock"]))
        return Answer(Outcome.ACCEPTED)

    def cancel(self, client_id: str) -> Answer:
        """Withdraw an order, if it still works."""
        if self.look_up(client_id) is None:
            return Answer(Outcome.REJECTED, "unknown-order")
        with self._transaction():
            self._db.execute(
                "UPDATE orders SET status = 'cancelled' WHERE client_id = ? AND status = 'working'",
                (client_id,),
            )
        return Answer(Outcome.ACCEPTED)

    def look_up(self, client_id: str) -> OrderState | None:
        """Return an order; None if it was never accepted."""
        return next(iter(self._orders("client_id = ?", client_id)), None)

    def working(self) -> list[OrderState]:
        """Return every open order."""
        return self._orders("status = ?", "working")

    def activity(self, since: int) -> Activity:
        """Return fills and payments at or after `since`."""
        names = "client_id, execution_id, symbol, units, price, commission, ts"
        rows = self._db.execute(f"SELECT {names} FROM fills WHERE ts >= ? ORDER BY seq", (since,))
        fills = [Fill(*row) for row in rows]
        query = "SELECT id, kind, amount, ts, symbol FROM flows WHERE ts >= ? ORDER BY seq"
        return Activity(fills, [CashFlow(*row) for row in self._db.execute(query, (since,))])

    def holdings(self) -> Holdings:
        """Return cash and units."""
        cash, units = self._books.position()
        held = zip(self._symbols, units.tolist(), strict=True)
        return Holdings(cash, {symbol: n for symbol, n in held if n})

    def position(self) -> Position:
        """Return cash and units `[A]`."""
        return self._books.position()

    def now(self) -> int:
        """Return the time of the last quote."""
        return self._state["clock"]

    def close(self) -> None:
        """Close the file."""
        self._db.close()

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
            made = self._books.execute(wanted, names, price, quote, ts)
            fills += made
            done = {fill.client_id: fill.units for fill in made}
            for i, order in enumerate(orders):
                if order is not None and quote.present[i]:
                    self._after(order, done.get(order.client_id, 0.0))
        return fills

    def withdraw(self) -> None:
        """Cancel every open order."""
        self._db.execute("UPDATE orders SET status = 'cancelled' WHERE status = 'working'")

    def _after(self, order: OrderState, filled: float) -> None:
        """Note what an order has filled; what cash or lots did not allow is cancelled."""
        # Exactly 0 where nothing was cut, as the fill is this very difference.
        rest = order.units - order.filled - filled
        # What a used-up volume held back is filled later.
        waits = self._rules.max_participation is not None
        status = "filled" if rest == 0.0 else "working" if waits else "cancelled"
        self._db.execute(
            "UPDATE orders SET filled = ?, status = ? WHERE client_id = ?",
            (order.units - rest, status, order.client_id),
        )

    def _refusal(self, ticket: Ticket) -> str:
        if ticket.symbol not in self._symbols:
            return "unknown-symbol"
        if not np.isfinite(ticket.units) or ticket.units == 0.0:
            return "bad-size"
        return "" if ticket.stop is None else "stop-orders-are-not-supported"

    def _list(self, fills: Sequence[Fill], flows: Sequence[CashFlow] = ()) -> None:
        if not (fills or flows):
            return
        self._db.executemany(
            "INSERT INTO fills(client_id, execution_id, symbol, units, price, commission, ts) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            fills,
        )
        self._db.executemany(
            "INSERT INTO flows(id, kind, amount, ts, symbol) VALUES (?, ?, ?, ?, ?)", flows
        )

    def _orders(self, where: str, value: str) -> list[OrderState]:
        rows = self._db.execute(
            "SELECT client_id, symbol, units, filled, status, seq FROM orders "
            f"WHERE {where} ORDER BY seq",
            (value,),
        )
        return [OrderState(*row[:5], venue_id=str(row[5])) for row in rows]

    @contextlib.contextmanager
    def _transaction(self):
        """Write what happens inside, and the books after it, at once or not at all."""
        if self.path is None:  # books in memory have nothing to recover
            yield
            return
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._save()
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def _save(self) -> None:
        cash, units = self._books.position()
        self._state |= {
            "cash": cash,
            "units": units.tolist(),
            "missing": self._missing.tolist(),
            "close": [None if np.isnan(x) else x for x in self._close.tolist()],
            "rows": None if self._bar is None else bar_body(self._bar, self._symbols),
        }
        self._db.execute(
            "INSERT OR REPLACE INTO state VALUES ('books', ?)", (json.dumps(self._state),)
        )
