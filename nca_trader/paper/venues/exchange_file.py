"""The SQLite file of a simulated exchange: its orders, fills, payments and books.

Nothing else speaks SQL to it. Books in memory are the same file without a name.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from nca_trader.errors import StateError
from nca_trader.machine import refuse_link
from nca_trader.paper.venue import Activity, CashFlow, Fill, OrderState, Ticket

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


class ExchangeFile:
    """An open file, made with mode 0600 where it does not exist.

    Args:
      path: the file; None keeps everything in memory.

    Raises:
      StateError: the file cannot be used.
    """

    def __init__(self, path: Path | None):
        self._path = path
        with self._as_state_error():
            if path is not None:
                refuse_link(path, "-wal", "-shm", "-journal")
                # Made here, because SQLite would give it the mode of the user's umask.
                with contextlib.suppress(FileExistsError):
                    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
            self._db = sqlite3.connect(path or ":memory:", isolation_level=None)
            # A dashboard may read the books while they are written.
            self._db.execute("PRAGMA journal_mode = WAL")
            # As at a real venue, what was accepted is still there after a power cut.
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.executescript(SCHEMA)

    @contextlib.contextmanager
    def transaction(self, books: Callable[[], str]) -> Iterator[None]:
        """Write what happens inside, and `books()` after it, at once or not at all."""
        if self._path is None:  # nothing to recover
            yield
            return
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("INSERT OR REPLACE INTO state VALUES ('books', ?)", (books(),))
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def books(self) -> str | None:
        """Return the books of the last transaction; None in a new file."""
        with self._as_state_error():
            found = self._db.execute("SELECT value FROM state WHERE name = 'books'").fetchone()
        return found[0] if found else None

    def accept(self, ticket: Ticket) -> None:
        """Add an order that works."""
        self._db.execute(
            "INSERT INTO orders(client_id, symbol, units, filled, status) "
            "VALUES (?, ?, ?, 0.0, 'working')",
            (ticket.client_id, ticket.symbol, ticket.units),
        )

    def update(self, client_id: str, filled: float, status: str) -> None:
        """Set what an order has filled so far, and its status."""
        self._db.execute(
            "UPDATE orders SET filled = ?, status = ? WHERE client_id = ?",
            (filled, status, client_id),
        )

    def cancel(self, client_id: str) -> None:
        """Cancel an order, if it still works."""
        self._db.execute(
            "UPDATE orders SET status = 'cancelled' WHERE client_id = ? AND status = 'working'",
            (client_id,),
        )

    def cancel_all(self) -> None:
        """Cancel every order that works."""
        self._db.execute("UPDATE orders SET status = 'cancelled' WHERE status = 'working'")

    def has_orders(self) -> bool:
        """Return whether an order was ever accepted."""
        return self._db.execute("SELECT 1 FROM orders LIMIT 1").fetchone() is not None

    def order(self, client_id: str) -> OrderState | None:
        """Return an order; None if it was never accepted."""
        return next(iter(self._orders("client_id = ?", client_id)), None)

    def working(self) -> list[OrderState]:
        """Return every order that works, the oldest first."""
        return self._orders("status = ?", "working")

    def _orders(self, where: str, value: str) -> list[OrderState]:
        rows = self._db.execute(
            "SELECT client_id, symbol, units, filled, status, seq FROM orders "
            f"WHERE {where} ORDER BY seq",
            (value,),
        )
        return [OrderState(*row[:5], venue_id=str(row[5])) for row in rows]

    def add(self, fills: Sequence[Fill], flows: Sequence[CashFlow] = ()) -> None:
        """Add fills and payments. In memory they are not kept: a long replay would fill it."""
        if self._path is None:
            return
        self._db.executemany(
            "INSERT INTO fills(client_id, execution_id, symbol, units, price, commission, ts) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            fills,
        )
        self._db.executemany(
            "INSERT INTO flows(id, kind, amount, ts, symbol) VALUES (?, ?, ?, ?, ?)", flows
        )

    def activity(self, since: int) -> Activity:
        """Return fills and payments at or after `since`, in nanoseconds since 1970 UTC."""
        names = "client_id, execution_id, symbol, units, price, commission, ts"
        rows = self._db.execute(f"SELECT {names} FROM fills WHERE ts >= ? ORDER BY seq", (since,))
        fills = [Fill(*row) for row in rows]
        query = "SELECT id, kind, amount, ts, symbol FROM flows WHERE ts >= ? ORDER BY seq"
        return Activity(fills, [CashFlow(*row) for row in self._db.execute(query, (since,))])

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    @contextlib.contextmanager
    def _as_state_error(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise StateError(
                f"{self._path}: the exchange's books cannot be used ({error}); restore the file, "
                "or name another journal."
            ) from error
