"""The tables of a journal, the chain of hashes over their rows, and the examination of both.

What chain and head file prove is in docs/concepts/journal.md.
"""

from __future__ import annotations

import contextlib
import decimal
import fcntl
import functools
import hashlib
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from nca_trader.config.records import read_json, record
from nca_trader.errors import ConfigError, StateError
from nca_trader.paper.clock import Clock

APPLICATION_ID = 0x6E636174  # "ncat" in the SQLite header: this file is a journal and no other
GENESIS = "0" * 64  # the hash before the first event
HEAD_SLOT = 512  # bytes, a disk's sector: what is written whole or not at all
SLOTS = 3
LEAST_PAGE = 512  # bytes, of a SQLite file
# Run and kind are the same in most rows, so a row has their number. The hash before a row's own is
# that of the row above it, and is not stored again.
SCHEMA = (
    "CREATE TABLE series(id INTEGER PRIMARY KEY, run TEXT NOT NULL, kind TEXT NOT NULL, "
    "UNIQUE(run, kind)) STRICT",
    "CREATE TABLE event(seq INTEGER PRIMARY KEY, series INTEGER NOT NULL, "
    "ts_event INTEGER NOT NULL, ts_recv INTEGER NOT NULL, key TEXT NOT NULL, body TEXT NOT NULL, "
    "hash BLOB NOT NULL, UNIQUE(series, key)) STRICT",
)
ROWS = (
    "SELECT seq, run, ts_event, ts_recv, kind, key, body, hash "
    "FROM event LEFT JOIN series ON id = series"
)


class Event(NamedTuple):
    """One row. ts_event, ts_recv: nanoseconds since 1970 UTC. body: the parsed JSON object."""

    seq: int
    run: str
    ts_event: int
    ts_recv: int
    kind: str
    key: str
    body: dict[str, Any]


class Examined(NamedTuple):
    """What an examination found.

    head: the last event up to which the chain holds. fault: what is wrong and the remedy, "" where
    nothing is.
    """

    head: Head
    fault: str


def _as_string(value: Any) -> str:
    if isinstance(value, decimal.Decimal):
        return str(value)
    raise TypeError(f"a journal body holds JSON types and Decimal, not {type(value).__name__}.")


# Made once: `json.dumps` makes an encoder for each call, which took most of the time of a walk.
_encode = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), allow_nan=False, check_circular=False, default=_as_string
).encode


def canonical(value: Any) -> str:
    """Return the one JSON text of `value`: sorted keys, no spaces, shortest exact floats.

    Raises:
      ValueError: a NaN or an infinity.
      TypeError: a type that JSON does not have. A `decimal.Decimal` is written as a string; a
        numpy array must be a list first.

    >>> canonical({"b": 0.1, "a": [1, None]})
    '{"a":[1,null],"b":0.1}'
    """
    # Hashes are of texts, so that one value must have one text. NaN is not JSON.
    return _encode(value)


def link_of(prev_hash: str, *fields: Any) -> str:
    """Return the hash of an event: its fields are seq, run, ts_event, ts_recv, kind, key, body."""
    return hashlib.sha256(_encode([prev_hash, *fields]).encode()).hexdigest()


def connect_reader(path: Path) -> sqlite3.Connection:
    """Open a journal to read it, leaving no file behind.

    Raises:
      ConfigError: there is no such file.
      StateError: it is not a journal.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such journal; check the path.")
    # Without a write-ahead log there is no writer, and an immutable open leaves no file behind.
    mode = "mode=ro" if sibling(path, "-wal").exists() else "immutable=1"
    with as_state_error(path):
        db = sqlite3.connect(f"{path.resolve().as_uri()}?{mode}", uri=True, isolation_level=None)
    try:
        # Before anything is read: what a stranger's schema calls is not run.
        db.execute("PRAGMA trusted_schema = OFF")
        refuse_other_files(path, db)
    except BaseException:
        db.close()
        raise
    return db


def refuse_other_tables(path: Path, db: sqlite3.Connection) -> None:
    """Raise StateError where the database holds anything but a journal's tables."""
    if fault := _schema(db)[1]:
        raise StateError(f"{path}: {fault}")


def events_of(db: sqlite3.Connection, kind: str | None = None, after: int = 0) -> Iterator[Event]:
    """Yield the events above seq `after`, of one kind or of all."""
    if not _schema(db)[0]:  # killed before its tables were made
        return
    # The plus keeps SQLite from an index by kind, whose rows would need a sort by seq.
    where, values = ("", (after,)) if kind is None else (" AND +kind = ?", (after, kind))
    for row in db.execute(f"{ROWS} WHERE seq > ?{where} ORDER BY seq", values):
        seq, run, ts_event, ts_recv, name, key, text, _ = row
        body = record(dict[str, Any], read_json(text, f"journal seq {seq}"), f"journal seq {seq}")
        yield Event(seq, run, ts_event, ts_recv, name, key, body)


class Follower:
    """Reads a journal that grows: each poll reads only what is new.

    Args:
      path: the journal; it need not exist yet.
    """

    def __init__(self, path: Path):
        self.path = path
        self._seq, self._hash = 0, None  # of the last event that was read

    def poll(self) -> tuple[list[Event], bool]:
        """Return the events since the last poll, and whether they are those of another journal.

        Where the journal was replaced, or is gone, what was read before is void, and the events are
        all that the new one has.

        Raises:
          StateError: it is not a journal, or cannot be read.
        """
        if not self.path.is_file():
            replaced, self._seq = self._seq > 0, 0
            return [], replaced
        with contextlib.closing(connect_reader(self.path)) as db, as_state_error(self.path):
            refuse_other_tables(self.path, db)
            if not _schema(db)[0]:
                replaced, self._seq = self._seq > 0, 0
                return [], replaced
            db.execute("BEGIN")  # one view for all that is read
            replaced = self._seq > 0 and self._hash_of(db, self._seq) != self._hash
            # An inode says nothing: a file that is made in the place of another may get the same.
            events = list(events_of(db, after=0 if replaced else self._seq))
            self._seq = events[-1].seq if events else 0 if replaced else self._seq
            self._hash = self._hash_of(db, self._seq) if self._seq else None
        return events, replaced

    @staticmethod
    def _hash_of(db: sqlite3.Connection, seq: int) -> bytes | None:
        row = db.execute("SELECT hash FROM event WHERE seq = ?", (seq,)).fetchone()
        return row and row[0]


def examine(path: Path, db: sqlite3.Connection) -> Examined:
    """Walk the chain and compare its end with the head file, in one view of the database."""
    with as_state_error(path):
        for _ in range(100):
            mark = read_mark(path)
            db.execute("BEGIN")
            try:
                db.execute("SELECT 1 FROM sqlite_schema").fetchone()  # from here the view is fixed
                # A session that is writing may have committed in between: then look again.
                if read_mark(path) == mark:
                    return _examine(path, db, mark)
            finally:
                db.execute("ROLLBACK")
    raise StateError(f"{path}: is being written too fast to be verified; try again.")


def refuse_fault(path: Path, found: Examined) -> None:
    """Raise the fault of an examination as StateError."""
    if found.fault:
        raise StateError(f"{path}: {found.fault}")


def _examine(path: Path, db: sqlite3.Connection, mark: Mark | None) -> Examined:
    made, fault = _schema(db)
    if not made and fault:
        return Examined(Head(0, GENESIS), fault)
    with contextlib.suppress(sqlite3.DatabaseError):  # said below, with the seq
        # The whole check: an index that misses a row would let an event be recorded twice.
        checked = db.execute("PRAGMA integrity_check(1)").fetchone()[0]
        if checked != "ok":
            fault = fault or _DAMAGED.format(f" (SQLite: {checked})")
    done = None if mark is None else mark.done
    head, passed, damaged, why = Head(0, GENESIS), {0: GENESIS}, False, ""
    rows: Iterable = ()  # killed before its tables were made
    if made:
        rows = db.execute(f"{ROWS} ORDER BY seq")
    # The only two ends that the head file knows; other hashes need not be kept.
    wanted = set() if mark is None else {mark.done.seq, mark.after.seq}
    # The fields of a walk's row, bound once: this loop is all of a verification's time.
    encode, sha256 = _encode, hashlib.sha256
    try:
        count, link = 0, GENESIS
        for seq, *fields, stored in rows:
            found = sha256(encode([link, seq, *fields]).encode())
            if seq != count + 1 or stored != found.digest():
                damaged = True
                break
            count, link = seq, found.hexdigest()
            if seq in wanted:
                passed[seq] = link
        head = Head(count, link)
    except (sqlite3.Error, ValueError, TypeError) as error:
        head, damaged, why = Head(count, link), True, f" ({error})"
    if done is not None and done.seq in passed and passed[done.seq] != done.hash:
        # A chain that was written again from its start holds in itself; only this shows it.
        fault = (
            f"damaged at seq {done.seq}: the head file has another hash for it; the journal or its "
            "head file was exchanged: restore both from a copy."
        )
    elif damaged:
        fault = (
            f"damaged at seq {head.seq + 1}: the hash chain does not hold there{why}; {_RESTORE}"
        )
    elif done is None and head.seq > 0:
        fault = (
            f"holds {head.seq} events and its head file {path.name}.head is missing or empty, so a "
            "lost end would not show; restore the head file from a copy, or name another journal."
        )
    elif done is not None and done.seq > head.seq:
        fault = (
            f"ends at seq {head.seq} and its head file says {done.seq}: seq {head.seq + 1} is "
            "lost; restore the journal and its -wal file from a copy, or name another journal."
        )
    elif mark is not None and head not in (mark.done, mark.after):
        # Of the commit under way all rows are there or none.
        ends = [end for end in (mark.after, mark.done) if passed.get(end.seq) == end.hash]
        fault = (
            f"has {head.seq - ends[0].seq} rows after seq {ends[0].seq} that no commit wrote: its "
            f"head file ends there; {_RESTORE}"
        )
    if made and not fault:
        unused = db.execute(
            "SELECT count(*) FROM series WHERE id NOT IN (SELECT series FROM event)"
        )
        if spare := unused.fetchone()[0]:
            fault = f"has {spare} rows of run and kind that no event is of; {_RESTORE}"
    return Examined(head, fault)


_RESTORE = "restore the file from a copy, or name another journal."
_DAMAGED = f"the database is damaged{{}}; {_RESTORE}"


_STORED = "SELECT type, name, tbl_name, sql FROM sqlite_schema"


@functools.cache
def _schema_rows() -> list[tuple]:
    """Return what SQLite stores for the tables of a journal."""
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        for statement in SCHEMA:
            db.execute(statement)
        return db.execute(_STORED).fetchall()


def _schema(db: sqlite3.Connection) -> tuple[bool, str]:
    """Return whether the journal's tables are made, and what is wrong with what is there."""
    try:
        stored = db.execute(_STORED).fetchall()
    except sqlite3.DatabaseError as error:
        return False, _DAMAGED.format(f" (SQLite: {error})")
    if not stored:  # killed before its tables were made
        return False, ""
    ours = _schema_rows()
    if not set(ours) <= set(stored):
        # The hash before a row's own was a column of its own.
        if any(name == "event" and "prev_hash TEXT" in (sql or "") for _, name, _, sql in stored):
            return False, (
                "is of a format that this version does not read; nca-trader 0.2.0 reads it, and "
                "its `journal salvage` copies it into a journal that this version continues."
            )
        return False, f"its tables are not a journal's; {_RESTORE}"
    extra = [f"{kind} {name}" for kind, name, *rest in stored if (kind, name, *rest) not in ours]
    return True, f"holds what no journal has ({', '.join(extra)}); {_RESTORE}" if extra else ""


def refuse_other_files(path: Path, db: sqlite3.Connection) -> None:
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
def as_state_error(path: Path) -> Iterator[None]:
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


class Head(NamedTuple):
    """The end of the chain. seq: events so far. hash: of the last one, hexadecimal."""

    seq: int
    hash: str


class Mark(NamedTuple):
    """What the head file says.

    count: of its writes. done: the last commit. after: the end of the commit that was under way;
    `done` where there was none.
    """

    count: int
    done: Head
    after: Head

    @property
    def text(self) -> str:
        """The slot's text, with a checksum: a slot that a power cut tore has another."""
        return _summed(f"{self.count} {self.done.seq} {self.done.hash} {self.after.seq} "
                       f"{self.after.hash}")  # fmt: skip


def sibling(path: Path, suffix: str) -> Path:
    """Return the file that belongs to the journal at `path`, e.g. of suffix ".head"."""
    return path.with_name(path.name + suffix)


def writing(path: Path) -> bool:
    """Return whether a process has the journal at `path` open to write."""
    try:
        descriptor = os.open(sibling(path, ".head"), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)


def _summed(text: str) -> str:
    return f"{text} {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def read_mark(path: Path) -> Mark | None:
    """Return the newest good slot of the head file; None where the file is missing or empty."""
    target = sibling(path, ".head")
    try:
        data = target.read_bytes()
    except FileNotFoundError:
        return None
    if not data.strip(b"\0"):  # a kill, or a power cut, between its making and its first head
        return None
    marks = []
    for start in range(0, SLOTS * HEAD_SLOT, HEAD_SLOT):
        fields = data[start : start + HEAD_SLOT].decode("ascii", errors="replace").split()
        # A slot that a power cut tore has another checksum, and is passed over.
        if len(fields) != 6 or _summed(" ".join(fields[:-1])).split() != fields:
            continue
        count, seq, link, later, then, _ = fields
        if all(text.isdigit() for text in (count, seq, later)):
            marks.append(Mark(int(count), Head(int(seq), link), Head(int(later), then)))
    if not marks:
        raise StateError(f"{target}: is not readable as a head file; restore it from a copy.")
    # By count and not by place: the slots are written in turn.
    return max(marks, key=lambda mark: mark.count)


class HeadFile:
    """The open head file of the one process that writes, which also holds a lock on it.

    A commit is announced here before the database makes it, and confirmed after. So whatever a
    kill or a power cut leaves, the database ends at one of two known hashes.

    Three slots: the confirmation is not waited for, so that the two last writes may be torn; the
    third is on disk, and is an announcement that the database already follows.
    """

    def __init__(self, path: Path):
        self.path = sibling(path, ".head")
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._count = 0

    def lock(self) -> None:
        """Take the lock, which stays where somebody deletes the journal's .lock file.

        Raises:
          BlockingIOError: another process, or another journal of this one, has it.
        """
        for tried in range(10):
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:  # `writing` holds it for some microseconds
                if tried == 9:
                    raise
                Clock().sleep(0.02)

    def begin(self, path: Path, done: Head) -> None:
        """Write every slot: none of them is older than what has just been verified."""
        mark = read_mark(path)
        self._count = 0 if mark is None else mark.count
        for _ in range(SLOTS):
            self.write(done, done)

    def write(self, done: Head, after: Head, wait: bool = True) -> None:
        """Write the oldest slot. done: the last commit. after: the end of the next one."""
        self._count += 1
        slot = Mark(self._count, done, after).text.encode().ljust(HEAD_SLOT - 1) + b"\n"
        # At its place, in one call: a slot is smaller than a block of the disk.
        os.pwrite(self._descriptor, slot, self._count % SLOTS * HEAD_SLOT)
        if wait:
            os.fdatasync(self._descriptor)

    def close(self) -> None:
        """Close the file, and so release the lock."""
        os.close(self._descriptor)
