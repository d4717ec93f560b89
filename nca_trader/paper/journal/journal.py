"""The journal of a paper session: bars, decisions, orders and fills in an append-only hash chain.

One SQLite file (WAL, synchronous=FULL). Next to it are `FILE.head`, the (seq, hash) of the last
commit, and `FILE.lock`, which names the process that writes. SQLite does not notice bit rot, and
drops the end of a truncated write-ahead log in silence: the chain shows the first, the head file
the second. `nca_trader.paper.journal.chain` has the format.

The journal has no clock: both times of an event come from its caller.
"""

from __future__ import annotations

import contextlib
import json
import operator
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nca_trader.cloud import local
from nca_trader.config.records import difference, read_json
from nca_trader.errors import ConfigError, StateError
from nca_trader.machine import HeldError, refuse_link, take_lock
from nca_trader.paper.journal.chain import (
    APPLICATION_ID,
    GENESIS,
    SCHEMA,
    Event,
    Head,
    HeadFile,
    as_state_error,
    canonical,
    connect_reader,
    events_of,
    examine,
    has_tables,
    link_of,
    refuse_other_files,
    sibling,
)

__all__ = ["GENESIS", "KINDS", "Event", "Head", "Journal", "canonical", "read_events", "verify"]

KINDS = frozenset(
    "run_started bar bar_rejected feed decision risk order_intent order_sent order_ack "
    "order_ambiguous fill cash order_terminal recon halt resume snapshot "
    "run_ended watched".split()
)
FILES = ("-wal", "-shm", "-journal", ".head", ".lock", ".books")  # next to it, and SQLite's own
DEFERRED_EVENTS = 256  # most events that a kill may take back; none of them led to an order
SYNCHRONOUS = "FULL"  # a commit survives a power cut; NORMAL survives a kill only
LONGEST = 2**63  # nanoseconds, of a signed integer of 64 bits: the years 1677 to 2262


class Diverged(StateError):
    """A session does not repeat its journal. difference: the event and its place, in words."""

    def __init__(self, path: Path, difference: str):
        super().__init__(
            f"{path}: diverged at {difference}; the bars or the run folder are not those it was "
            "written with: restore them or name another journal."
        )
        self.difference = difference


class Journal(contextlib.AbstractContextManager["Journal"]):
    """An open journal whose only writer is this process. Use it as a context manager.

    Args:
      path: the SQLite file, created with mode 0600 where it does not exist.
      clock: nanoseconds since 1970 UTC for `ts_recv`; a replay passes its feed's own time, so
        that two replays give the same chain.
      batch: whether every commit waits for 256 events: for a replay whose orders leave this process
        never, so that what a kill takes back the next session repeats.

    Raises:
      StateError: another process writes here, or the file is damaged, of an earlier version, or
        cannot be written.
    """

    def __init__(self, path: str | Path, clock: Callable[[], int], batch: bool = False):
        self.path = local(path, "a journal")
        self._clock, self._batch = clock, batch
        self._in_block = False
        self._waiting = 0
        refuse_link(self.path, *FILES)
        lock = sibling(self.path, ".lock")
        with contextlib.ExitStack() as opened:
            try:
                self._lock = take_lock(lock)  # the kernel releases it when the process ends
            except HeldError as holder:
                raise self._held(str(holder)) from None
            except FileNotFoundError:
                raise ConfigError(
                    f"{self.path.parent}: there is no such folder for the journal."
                ) from None
            except OSError as error:
                raise StateError(f"{lock}: cannot be locked ({error.strerror}).") from error
            # Each of these is undone, the last one first, if a later one fails.
            opened.callback(os.close, self._lock)
            with as_state_error(self.path):
                # Made here, since SQLite would take its mode from the umask.
                with contextlib.suppress(FileExistsError):
                    os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
                # Transactions begin and end here and not in Python's module: isolation_level=None.
                self._db = sqlite3.connect(self.path, isolation_level=None, timeout=5.0)
                opened.callback(self._db.close)
                refuse_other_files(self.path, self._db)
                self._head_file = self._locked_head_file()
                opened.callback(self._head_file.close)
                # With a write-ahead log readers, such as `watch`, do not block the session.
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.execute(f"PRAGMA synchronous = {SYNCHRONOUS}")
            # Before anything is written: to go on after damage would hide it.
            self._head = self._committed = examine(self.path, self._db)
            with as_state_error(self.path):
                if not self._db.execute("SELECT 1 FROM sqlite_schema").fetchone():
                    self._make_tables()
                self._series = self._read_series()
                # Before any event, so that a missing head file always means loss.
                self._head_file.begin(self.path, self._committed)
                self._files = {
                    file: (status.st_dev, status.st_ino)
                    for file in (self.path, sibling(self.path, "-wal"), self._head_file.path)
                    for status in [os.stat(file)]
                }
            # Nothing failed, so all of it stays open until `close`.
            self._opened = opened.pop_all()

    def __exit__(self, *exception) -> None:
        self.close()

    def close(self) -> None:
        """Commit deferred transactions, and let another process write."""
        with self._opened:
            self.commit()

    def commit(self) -> None:
        """Write deferred transactions to disk.

        Raises:
          StateError: it failed, or the files at the journal's path are not those that were written.
        """
        if self._db.in_transaction:
            with as_state_error(self.path):
                # Announced, committed, confirmed: see `HeadFile`.
                if self._head != self._committed:
                    self._write_head(self._committed, self._head)
                self._db.execute("COMMIT")
                self._waiting = 0
                if self._head != self._committed:
                    self._committed = self._head
                    self._write_head(self._head, self._head, wait=False)
        self._check_files()

    def now(self) -> int:
        """Return the time that an event recorded now would get as `ts_recv`."""
        return self._clock()

    @property
    def head(self) -> Head:
        """The last event recorded, committed or not."""
        return self._head

    @property
    def durability(self) -> str:
        """What a commit survives, in words."""
        many = f"of {DEFERRED_EVENTS} events" if self._batch else "per bar, before its orders"
        return f"synchronous={SYNCHRONOUS}, one commit {many}"

    @contextlib.contextmanager
    def transaction(self, durable: bool = True) -> Iterator[None]:
        """Commit all events recorded inside at once, or none of them.

        Args:
          durable: False lets the commit wait for a later durable one, or for 256 events. Only for
            events that a resumed session repeats and that do not lead to an order.
        """
        if self._in_block:
            raise RuntimeError("a journal transaction is open already; they do not nest.")
        # A deferred transaction is still open; this block's events go into it.
        if not self._db.in_transaction:
            with as_state_error(self.path):
                self._db.execute("BEGIN IMMEDIATE")
        self._in_block = True
        try:
            yield
            if (durable and not self._batch) or self._waiting >= DEFERRED_EVENTS:
                self.commit()
        except BaseException:
            # A failed commit has rolled back by itself in some of SQLite's errors only.
            if self._db.in_transaction:
                with contextlib.suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
            # The rollback takes deferred events with it, so the chain goes back to the last commit.
            self._head, self._waiting = self._committed, 0
            with contextlib.suppress(sqlite3.Error):
                self._series = self._read_series()
            raise
        finally:
            self._in_block = False

    def record(self, run: str, kind: str, key: str, body: Mapping[str, Any], ts_event: int) -> bool:
        """Append an event, unless the same one is there already.

        Args:
          run: the session's hash.
          kind: one of `KINDS`.
          key: of the event; run, kind and key are unique together.
          body: what happened, in JSON types.
          ts_event: nanoseconds since 1970 UTC.

        Returns:
          True if the event was added, False if it was there with the same body and time.

        Raises:
          Diverged: (run, kind, key) is there with another body: this run does not repeat what
            the journal says happened.
          StateError: a time is outside the years 1677 to 2262.
        """
        if kind not in KINDS:
            raise ValueError(f"journal kind {kind!r} is none of {', '.join(sorted(KINDS))}.")
        if not self._in_block:
            with self.transaction():
                return self.record(run, kind, key, body, ts_event)
        text = canonical(body)
        ts_event = self._time(ts_event, kind, key)
        ts_recv = self._time(self._clock(), kind, key)
        seq = self._head.seq + 1
        link = link_of(self._head.hash, seq, run, ts_event, ts_recv, kind, key, text)
        with as_state_error(self.path):
            series = self._series.get((run, kind))
            if series is None:
                series = len(self._series) + 1
                self._db.execute("INSERT INTO series VALUES (?, ?, ?)", (series, run, kind))
                self._series[run, kind] = series
            # The index says whether it is there: to ask first would be two statements for each
            # event.
            added = self._db.execute(
                "INSERT INTO event VALUES (?, ?, ?, ?, ?, ?, ?) "
                "ON CONFLICT(series, key) DO NOTHING",
                (seq, series, ts_event, ts_recv, key, text, link.digest()),
            ).rowcount
            if added:
                self._head = Head(seq, link.hexdigest())
                self._waiting += 1
                return True
            seq, known_ts, known_text = self._db.execute(
                "SELECT seq, ts_event, body FROM event WHERE series = ? AND key = ?", (series, key)
            ).fetchone()
        # `ts_recv` is not compared: a session that resumes receives its bars at another time.
        if (known_ts, known_text) != (ts_event, text):
            there = read_json(known_text, f"{self.path} seq {seq}")
            differs = difference(there, json.loads(text)) or ("", known_ts, ts_event)
            raise Diverged(
                self.path,
                f"seq {seq}, {kind} {key}: {differs[0] or 'its time'} is {differs[1]!r} there and "
                f"{differs[2]!r} now",
            )
        return False

    def body(self, run: str, kind: str, key: str) -> dict[str, Any] | None:
        """Return the body of an event of this journal; None where there is none."""
        series = self._series.get((run, kind))
        with as_state_error(self.path):
            found = self._db.execute(
                "SELECT body FROM event WHERE series = ? AND key = ?", (series, key)
            ).fetchone()
        return None if found is None else read_json(found[0], f"{self.path} {kind} {key}")

    def events(self, kind: str | None = None) -> Iterator[Event]:
        """Yield the events so far in order, of one kind or of all."""
        yield from events_of(self._db, kind)

    def _held(self, holder: str) -> StateError:
        return StateError(
            f"{self.path}: {holder} is writing to this journal; stop it or name another file."
        )

    def _locked_head_file(self) -> HeadFile:
        file = HeadFile(self.path)
        try:
            file.lock()
        except BlockingIOError:
            file.close()
            raise self._held("another process") from None
        return file

    def _make_tables(self) -> None:
        """Make the tables in one transaction: all of them or none."""
        self._db.execute("BEGIN IMMEDIATE")
        self._db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        for statement in SCHEMA:
            self._db.execute(statement)
        self._db.execute("COMMIT")

    def _read_series(self) -> dict[tuple[str, str], int]:
        return {(run, kind): i for i, run, kind in self._db.execute("SELECT * FROM series")}

    def _write_head(self, done: Head, after: Head, wait: bool = True) -> None:
        self._head_file.write(done, after, wait)

    def _check_files(self) -> None:
        """Raise StateError if another file, or none, has the name of one that is written."""
        for file, written in self._files.items():
            try:
                status = os.stat(file)
                there = (status.st_dev, status.st_ino)
            except OSError:
                there = None
            if there != written:
                raise StateError(
                    f"{file}: was deleted or replaced while this session wrote to it, so that its "
                    "last events are in no file of that name; restore it from a copy, or name "
                    "another journal."
                )

    def _time(self, value: int, kind: str, key: str) -> int:
        """Return a time as SQLite can hold it."""
        value = operator.index(value)  # numpy's integers are not bound
        if not -LONGEST <= value < LONGEST:
            raise StateError(
                f"{self.path}: the time of {kind} {key} is {value} ns since 1970, outside the "
                "years 1677 to 2262; correct the feed's clock or its bars."
            )
        return value


def verify(path: str | Path) -> Head:
    """Check a journal from its first event to its head file, changing nothing.

    Raises:
      ConfigError: there is no such file.
      StateError: damage; the message names the first event that does not hold.
    """
    path = Path(path)
    with contextlib.closing(connect_reader(path)) as db:
        return examine(path, db)


def read_events(path: str | Path, kind: str | None = None, after: int = 0) -> Iterator[Event]:
    """Yield the events of a journal above seq `after`, of one kind or of all, read-only.

    Raises:
      StateError: it is not a journal, or holds other tables than one.
    """
    path = Path(path)
    with contextlib.closing(connect_reader(path)) as db, as_state_error(path):
        if has_tables(path, db):
            yield from events_of(db, kind, after)
