"""The journal of a paper session: bars, decisions, orders and fills in an append-only hash chain.

One SQLite file (WAL, synchronous=FULL). Next to it are `FILE.head`, the (seq, hash) of the last
commit, and `FILE.lock`, held by the process that writes. SQLite does not notice bit rot, and drops
the end of a truncated write-ahead log in silence: the chain shows the first, the head file the
second.

The journal has no clock: both times of an event come from its caller.
"""

from __future__ import annotations

import contextlib
import decimal
import hashlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nca_trader.cloud import local
from nca_trader.config.records import difference, read_json, record
from nca_trader.errors import ConfigError, StateError
from nca_trader.machine import HeldError, take_lock

KINDS = frozenset(
    "run_started bar bar_rejected feed decision risk order_intent order_sent order_ack "
    "order_ambiguous fill cash order_terminal recon halt resume snapshot run_ended".split()
)
GENESIS = "0" * 64  # the hash before the first event
HEAD_SLOT = 512  # bytes, a disk's sector: what is written whole or not at all
DEFERRED_EVENTS = 256  # most events that a kill may take back; none of them led to an order
APPLICATION_ID = 0x6E636174  # "ncat" in the SQLite header: this file is a journal and no other
LEAST_PAGE = 512  # bytes, of a SQLite file
SCHEMA = """
CREATE TABLE event(
  seq INTEGER PRIMARY KEY, run TEXT NOT NULL, ts_event INTEGER NOT NULL, ts_recv INTEGER NOT NULL,
  kind TEXT NOT NULL, key TEXT NOT NULL, body TEXT NOT NULL,
  prev_hash TEXT NOT NULL, hash TEXT NOT NULL, UNIQUE(run, kind, key)) STRICT
"""
COLUMNS = "seq, run, ts_event, ts_recv, kind, key, body, prev_hash, hash"
SYNCHRONOUS = "FULL"  # a commit survives a power cut; NORMAL survives a kill only


class Head(NamedTuple):
    """The end of the chain. seq: events so far. hash: of the last one, hexadecimal."""

    seq: int
    hash: str


class Event(NamedTuple):
    """One row. ts_event, ts_recv: nanoseconds since 1970 UTC. body: the parsed JSON object."""

    seq: int
    run: str
    ts_event: int
    ts_recv: int
    kind: str
    key: str
    body: dict[str, Any]


def canonical(value: Any) -> str:
    """Return the one JSON text of `value`: sorted keys, no spaces, shortest exact floats.

    Raises:
      ValueError: a NaN or an infinity.
      TypeError: a type that JSON does not have. A `decimal.Decimal` is written as a string; a
        numpy array must be a list first.

    >>> canonical({"b": 0.1, "a": [1, None]})
    '{"a":[1,null],"b":0.1}'
    """

    def as_string(value: Any) -> str:
        if isinstance(value, decimal.Decimal):
            return str(value)
        raise TypeError(f"a journal body holds JSON types and Decimal, not {type(value).__name__}.")

    # One text for one value, because hashes are of texts. NaN is not JSON, so it is refused.
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), allow_nan=False, default=as_string
    )


class Journal:
    """An open journal whose only writer is this process. Use it as a context manager.

    Args:
      path: the SQLite file, created with mode 0600 where it does not exist.
      clock: nanoseconds since 1970 UTC for `ts_recv`; a replay passes its feed's own time, so
        that two replays give the same chain.

    Raises:
      StateError: another process writes here, or the file is damaged or cannot be written.
    """

    def __init__(self, path: str | Path, clock: Callable[[], int]):
        self.path = local(path, "a journal")
        self._clock = clock
        self._in_block = False
        self._waiting = 0
        lock = _sibling(self.path, ".lock")
        try:
            self._lock = take_lock(lock)  # the kernel releases it when the process ends
        except HeldError as holder:
            raise StateError(
                f"{self.path}: {holder} is writing to this journal; stop it or name another file."
            ) from None
        except FileNotFoundError:
            raise ConfigError(
                f"{self.path.parent}: there is no such folder for the journal."
            ) from None
        except OSError as error:
            raise StateError(f"{lock}: cannot be locked ({error.strerror}).") from error
        try:
            with _as_state_error(self.path):
                # Made here, since SQLite would take its mode from the umask.
                with contextlib.suppress(FileExistsError):
                    os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
                # Transactions begin and end here and not in Python's module: isolation_level=None.
                self._db = sqlite3.connect(self.path, isolation_level=None, timeout=5.0)
                try:
                    _refuse_other_files(self.path, self._db)
                    # With a write-ahead log readers, such as `watch`, do not block the session.
                    self._db.execute("PRAGMA journal_mode = WAL")
                    self._db.execute(f"PRAGMA synchronous = {SYNCHRONOUS}")
                    if not self._db.execute("SELECT 1 FROM sqlite_schema").fetchone():
                        self._db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                        self._db.execute(SCHEMA)
                except BaseException:
                    self._db.close()
                    raise
            self._head = self._committed = _checked_head(self.path, self._db)
            with _as_state_error(self.path):
                self._head_file = os.open(
                    _sibling(self.path, ".head"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
                )
                # Before any event, so that a missing head file always means loss; and both
                # slots, so that neither is older than what has just been verified.
                for self._slot in (0, 1):
                    self._write_head()
        except BaseException:
            os.close(self._lock)
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def close(self) -> None:
        """Commit deferred transactions, and let another process write."""
        try:
            self.commit()
        finally:
            self._db.close()
            os.close(self._head_file)
            os.close(self._lock)

    def commit(self) -> None:
        """Write deferred transactions to disk."""
        if not self._db.in_transaction:
            return
        # The database first: a head file ahead of it would look like a lost end.
        with _as_state_error(self.path):
            self._db.execute("COMMIT")
            self._waiting = 0
            if self._head != self._committed:
                self._committed = self._head
                self._write_head()

    @property
    def head(self) -> Head:
        """The last event recorded, committed or not."""
        return self._head

    @contextlib.contextmanager
    def transaction(self, durable: bool = True) -> Iterator[None]:
        """Commit all events recorded inside at once, or none of them.

        Args:
          durable: False lets the commit wait for a later durable one, or for 256 events. Only for
            events that a resumed session repeats and that do not lead to an order.
        """
        if self._in_block:
            raise RuntimeError("a journal transaction is open already; they do not nest.")
        with _as_state_error(self.path):
            # A deferred transaction is still open; this block's events go into it.
            if not self._db.in_transaction:
                self._db.execute("BEGIN IMMEDIATE")
        self._in_block = True
        try:
            yield
            if durable or self._waiting >= DEFERRED_EVENTS:
                self.commit()
        except BaseException:
            # A failed commit has rolled back by itself in some of SQLite's errors only.
            if self._db.in_transaction:
                with contextlib.suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
            # The rollback takes deferred events with it, so the chain goes back to the last commit.
            self._head, self._waiting = self._committed, 0
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
          StateError: (run, kind, key) is there with another body: this run does not repeat what
            the journal says happened.
        """
        if kind not in KINDS:
            raise ValueError(f"journal kind {kind!r} is none of {', '.join(sorted(KINDS))}.")
        if not self._in_block:
            with self.transaction():
                return self.record(run, kind, key, body, ts_event)
        text = canonical(body)
        with _as_state_error(self.path):
            known = self._db.execute(
                "SELECT seq, ts_event, body FROM event WHERE run = ? AND kind = ? AND key = ?",
                (run, kind, key),
            ).fetchone()
            if known is None:
                prev, fields = self._head.hash, (run, ts_event, self._clock(), kind, key, text)
                seq = self._head.seq + 1
                link = _link_of(prev, seq, *fields)
                self._db.execute(
                    f"INSERT INTO event({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (seq, *fields, prev, link),
                )
                self._head = Head(seq, link)
                self._waiting += 1
                return True
        seq, known_ts, known_text = known
        # `ts_recv` is not compared: a session that resumes receives its bars at another time.
        if (known_ts, known_text) != (ts_event, text):
            there = read_json(known_text, f"{self.path} seq {seq}")
            differs = difference(there, json.loads(text)) or ("", known_ts, ts_event)
            raise StateError(
                f"{self.path}: diverged at seq {seq}, {kind} {key}: {differs[0] or 'its time'} is "
                f"{differs[1]!r} there and {differs[2]!r} now; the bars or the run folder are not "
                "those it was written with: restore them or name another journal."
            )
        return False

    def events(self, kind: str | None = None) -> Iterator[Event]:
        """Yield the events so far in order, of one kind or of all."""
        yield from _events_of(self._db, kind)

    def _write_head(self) -> None:
        """Write the slot that does not hold the last head: half a write leaves that one good.

        Two slots and one fdatasync cost a third of a new file, its fsync and a rename.
        """
        self._slot = 1 - self._slot
        slot = _head_text(self._head).encode().ljust(HEAD_SLOT - 1) + b"\n"
        os.pwrite(self._head_file, slot, self._slot * HEAD_SLOT)
        os.fdatasync(self._head_file)


def verify(path: str | Path) -> Head:
    """Check a journal from its first event to its head file, changing nothing.

    Raises:
      ConfigError: there is no such file.
      StateError: damage; the message names the first event that does not hold.
    """
    path = Path(path)
    with contextlib.closing(_connect_reader(path)) as db:
        return _checked_head(path, db)


def read_events(path: str | Path, kind: str | None = None, after: int = 0) -> Iterator[Event]:
    """Yield the events of a journal above seq `after`, of one kind or of all, read-only."""
    path = Path(path)
    with contextlib.closing(_connect_reader(path)) as db, _as_state_error(path):
        _refuse_other_files(path, db)
        yield from _events_of(db, kind, after)


def _connect_reader(path: Path) -> sqlite3.Connection:
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such journal; check the path.")
    # Without a write-ahead log nobody is writing, and an immutable open leaves no file behind.
    mode = "mode=ro" if _sibling(path, "-wal").exists() else "immutable=1"
    with _as_state_error(path):
        return sqlite3.connect(f"{path.resolve().as_uri()}?{mode}", uri=True)


def _events_of(db: sqlite3.Connection, kind: str | None, after: int = 0) -> Iterator[Event]:
    where, values = ("", (after,)) if kind is None else (" AND kind = ?", (after, kind))
    for row in db.execute(f"SELECT {COLUMNS} FROM event WHERE seq > ?{where} ORDER BY seq", values):
        seq, run, ts_event, ts_recv, name, key, text, *_ = row
        body = record(dict[str, Any], read_json(text, f"journal seq {seq}"), f"journal seq {seq}")
        yield Event(seq, run, ts_event, ts_recv, name, key, body)


def _checked_head(path: Path, db: sqlite3.Connection) -> Head:
    """Walk the chain and compare its end with the head file; return it if both agree."""
    _refuse_other_files(path, db)
    try:
        # SQLite's own check finds damage of its pages that reads of the table alone may not touch.
        quick = db.execute("PRAGMA quick_check(1)").fetchone()[0]
        complaint = "" if quick == "ok" else f" (SQLite: {quick})"
    except sqlite3.DatabaseError as error:
        complaint = f" (SQLite: {error})"
    kept, head, whole = _read_head(path), Head(0, GENESIS), False
    try:
        table = db.execute("SELECT 1 FROM sqlite_schema WHERE name = 'event'").fetchone()
        rows = db.execute(f"SELECT {COLUMNS} FROM event ORDER BY seq") if table else ()
        for seq, *fields, prev, link in rows:
            if seq != head.seq + 1 or prev != head.hash or link != _link_of(prev, seq, *fields):
                break
            head = Head(seq, link)
            # A chain that was written again from its start holds in itself; only this shows it.
            if kept is not None and kept.seq == seq and kept.hash != link:
                raise StateError(
                    f"{path}: damaged at seq {seq}: the head file has another hash for it; the "
                    "journal or its head file was exchanged: restore both from a copy."
                )
        else:
            whole = True
    except (sqlite3.Error, ValueError, TypeError) as error:
        complaint = complaint or f" ({error})"
    if not whole:
        raise StateError(
            f"{path}: damaged at seq {head.seq + 1}: the hash chain does not hold there{complaint};"
            " restore the file from a copy."
        )
    if complaint:
        raise StateError(
            f"{path}: the database is damaged, though its {head.seq} events read well{complaint}; "
            "restore the file from a copy."
        )
    if kept is None and head.seq > 0:
        raise StateError(
            f"{path}: holds {head.seq} events and its head file {_sibling(path, '.head').name} is "
            "missing or empty, so a lost end would not show; restore the head file from a copy."
        )
    if kept is not None and kept.seq > head.seq:
        raise StateError(
            f"{path}: ends at seq {head.seq} and its head file says {kept.seq}: seq "
            f"{head.seq + 1} is lost; restore the journal and its -wal file from a copy, or name "
            "another journal."
        )
    return head


def _read_head(path: Path) -> Head | None:
    """Return the newer of the head file's two slots; None where the file is missing or empty."""
    target = _sibling(path, ".head")
    data = target.read_bytes() if target.exists() else b""
    if not data.strip(b"\0"):  # a kill, or a power cut, between its making and its first head
        return None
    heads = []
    for start in (0, HEAD_SLOT):
        fields = data[start : start + HEAD_SLOT].decode("ascii", errors="replace").split()
        if len(fields) == 3 and fields[0].isdigit():
            head = Head(int(fields[0]), fields[1])
            # A slot that a power cut tore has another checksum.
            heads += [head] if _head_text(head).split() == fields else []
    if not heads:
        raise StateError(f"{target}: is not readable as a head file; restore it from a copy.")
    return max(heads)


def _head_text(head: Head) -> str:
    """Return the text of a slot of the head file: seq, hash and a checksum of the two."""
    text = f"{head.seq} {head.hash}"
    return f"{text} {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _link_of(prev_hash: str, *fields: Any) -> str:
    """Return the hash of an event with these fields, in the order of `COLUMNS`."""
    return hashlib.sha256(canonical([prev_hash, *fields]).encode()).hexdigest()


def _sibling(path: Path, suffix: str) -> Path:
    """Return the file that belongs to the journal at `path`, e.g. of suffix ".head"."""
    return path.with_name(path.name + suffix)


def _refuse_other_files(path: Path, db: sqlite3.Connection) -> None:
    """Raise StateError where the file is not a journal, before anything is written to it."""
    # SQLite takes less than a page for an empty database. The file is not opened to look at it:
    # closing it would release SQLite's own lock.
    if 0 < path.stat().st_size < LEAST_PAGE:
        raise StateError(
            f"{path}: is not a readable journal ({path.stat().st_size} bytes are not a database); "
            "restore it from a copy or name another file."
        )
    try:
        known = db.execute("PRAGMA application_id").fetchone()[0]
        tables = db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
    except sqlite3.DatabaseError as error:
        raise StateError(
            f"{path}: is not a readable journal ({error}); restore it from a copy or name another "
            "file."
        ) from error
    if known != APPLICATION_ID and (known or tables):
        raise StateError(f"{path}: is another program's database; name another file.")


@contextlib.contextmanager
def _as_state_error(path: Path) -> Iterator[None]:
    """Raise the errors of SQLite and of the disk as StateError, with the remedy."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        remedy = "free space or correct the permissions, then give the same command again"
        if "not a database" in str(error) or "malformed" in str(error):
            remedy = "restore it from a copy or name another file"
        raise StateError(f"{path}: the journal failed ({error}); {remedy}.") from error
    except OSError as error:
        raise StateError(
            f"{path}: the journal cannot be written ({error.strerror}); repair that, then give the "
            "same command again."
        ) from error
