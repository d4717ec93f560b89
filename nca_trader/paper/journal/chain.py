"""The tables of a journal, the chain of hashes over their rows, and the examination of both.

What chain and head file prove is in docs/concepts/journal.md.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from nca_trader.config.records import read_json, record
from nca_trader.errors import ConfigError, StateError, printable
from nca_trader.machine import locked
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


# Made once: `json.dumps` makes an encoder for each call, which took most of the time of a walk.
_encode = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), allow_nan=False, check_circular=False
).encode
_quote = json.encoder.encode_basestring_ascii  # as the encoder writes a string


def canonical(value: Any) -> str:
    """Return the one JSON text of `value`: sorted keys, no spaces, shortest exact floats.

    Raises:
      ValueError: a NaN or an infinity.
      TypeError: a type that JSON does not have; a numpy array must be a list first.

    >>> canonical({"b": 0.1, "a": [1, None]})
    '{"a":[1,null],"b":0.1}'
    """
    # Hashes are of texts, so that one value must have one text. NaN is not JSON.
    return _encode(value)


def link_of(
    before: str, seq: int, run: str, ts_event: int, ts_recv: int, kind: str, key: str, body: str
) -> Any:
    """Return the SHA-256 of an event: of the JSON list of these fields, with the hash before it."""
    # Written out, which takes a third of the encoder's time: a walk does nothing else.
    names, text = f"{_quote(kind)},{_quote(key)}", _quote(body)
    fields = f'["{before}",{seq},{_quote(run)},{ts_event},{ts_recv},{names},{text}]'
    return hashlib.sha256(fields.encode())


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


def events_of(db: sqlite3.Connection, kind: str | None = None, after: int = 0) -> Iterator[Event]:
    """Yield the events above seq `after`, of one kind or of all."""
    # The plus keeps SQLite from an index by kind, whose rows would need a sort by seq.
    where, values = ("", (after,)) if kind is None else (" AND +kind = ?", (after, kind))
    for row in db.execute(f"{ROWS} WHERE seq > ?{where} ORDER BY seq", values):
        seq, run, ts_event, ts_recv, name, key, text, _ = row
        body = record(dict[str, Any], read_json(text, f"journal seq {seq}"), f"journal seq {seq}")
        yield Event(seq, run, ts_event, ts_recv, name, key, body)


def examine(path: Path, db: sqlite3.Connection) -> Head:
    """Return the end of the chain, once the whole chain and the head file hold.

    Raises:
      StateError: they do not; the message names the first event that does not hold.
    """
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


def _examine(path: Path, db: sqlite3.Connection, mark: Mark | None) -> Head:
    made, fault = has_tables(path, db), ""
    with contextlib.suppress(sqlite3.DatabaseError):  # the walk names its seq
        # The whole check: an index that misses a row would let an event be recorded twice.
        checked = db.execute("PRAGMA integrity_check(1)").fetchone()[0]
        fault = "" if checked == "ok" else _DAMAGED.format(f" (SQLite: {checked})")
    head, passed, broken = _walked(db if made else None, mark)
    fault = _disagreement(head, passed, broken, mark, path) or fault
    if made and not fault:
        unused = db.execute(
            "SELECT count(*) FROM series WHERE id NOT IN (SELECT series FROM event)"
        )
        if spare := unused.fetchone()[0]:
            fault = f"has {spare} rows of run and kind that no event is of; {_RESTORE}"
    if fault:
        raise StateError(f"{path}: {fault}")
    return head


def _walked(
    db: sqlite3.Connection | None, mark: Mark | None
) -> tuple[Head, dict[int, str], str | None]:
    """Walk the chain; None is a journal without tables.

    Returns:
      Where it holds to; the hashes at the ends that a head file knows, by seq; and what SQLite or a
      parser said of the rows beyond, None without any.
    """
    count, link, passed = 0, GENESIS, {0: GENESIS}
    # The only two ends that the head file knows; other hashes need not be kept.
    wanted = set() if mark is None else {mark.done.seq, mark.after.seq}
    try:
        for seq, *fields, stored in db.execute(f"{ROWS} ORDER BY seq") if db else ():
            found = link_of(link, seq, *fields)
            if seq != count + 1 or stored != found.digest():
                return Head(count, link), passed, ""
            count, link = seq, found.hexdigest()
            if seq in wanted:
                passed[seq] = link
    except (sqlite3.Error, ValueError, TypeError) as error:
        return Head(count, link), passed, f" ({error})"
    return Head(count, link), passed, None


def _disagreement(
    head: Head, passed: dict[int, str], broken: str | None, mark: Mark | None, path: Path
) -> str:
    """Return what is wrong with a chain and its head file; "" where both hold."""
    seq = head.seq
    # A chain that was written again from its start holds in itself; only this shows it.
    if mark is not None and passed.get(mark.done.seq, mark.done.hash) != mark.done.hash:
        return (
            f"damaged at seq {mark.done.seq}: the head file has another hash for it; the journal "
            "or its head file was exchanged: restore both from a copy."
        )
    if broken is not None:
        return f"damaged at seq {seq + 1}: the hash chain does not hold there{broken}; {_RESTORE}"
    if mark is None:
        lost = (
            f"holds {seq} events and its head file {path.name}.head is missing or empty, so a lost "
            "end would not show; restore the head file from a copy, or name another journal."
        )
        return lost if seq else ""
    if head in (mark.done, mark.after):
        return ""
    # Of the commit under way all rows are there or none.
    return (
        f"ends at seq {seq} and its head file says {mark.done.seq}: rows from seq "
        f"{min(seq, mark.done.seq) + 1} on are lost, or no commit wrote them; restore the journal, "
        "its -wal and its head file from a copy, or name another journal."
    )


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


def has_tables(path: Path, db: sqlite3.Connection) -> bool:
    """Return whether the journal's tables are made; a kill may have come before.

    Raises:
      StateError: other tables are there, or it cannot be read.
    """
    try:
        stored = db.execute(_STORED).fetchall()
    except sqlite3.DatabaseError as error:
        raise StateError(f"{path}: {_DAMAGED.format(f' (SQLite: {error})')}") from None
    # The hash before a row's own was a column of its own.
    if any(name == "event" and "prev_hash TEXT" in (sql or "") for _, name, _, sql in stored):
        raise StateError(
            f"{path}: is of a format that this version does not read; nca-trader 0.2.0 reads it. "
            "Name another journal."
        )
    # A trigger or a view of a stranger's as well: it would run as rows are written or read.
    if stored and set(stored) != set(_schema_rows()):
        raise StateError(f"{path}: its tables are not a journal's, or not alone; {_RESTORE}")
    return bool(stored)


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


def writer_of(path: Path) -> str:
    """Return which process has the journal at `path` open to write; "" where none has."""
    # Whatever lies in the folder: a link is not followed, and a pipe is not waited for.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with open(os.open(sibling(path, ".head"), flags), "rb") as head:
            if locked(head.fileno(), shared=True):
                return ""
    except OSError:
        return ""
    # The other lock is only read: to try it would keep a session from starting just then.
    with contextlib.suppress(OSError):
        with open(os.open(sibling(path, ".lock"), flags), errors="replace") as file:
            return printable(file.read(200).partition(" (")[0])
    return "a process without a lock file"


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
        for _ in range(250):
            if locked(self._descriptor):
                return
            # Several `writer_of` may share it in turn. A process that writes shares it with none.
            if not locked(self._descriptor, shared=True):
                break
            Clock().sleep(0.02)
        raise BlockingIOError(f"{self.path} is locked")

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
