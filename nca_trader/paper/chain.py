"""The tables of a journal, the chain of hashes over their rows, and the examination of both.

What chain and head file prove is in docs/concepts/journal.md.
"""

from __future__ import annotations

import contextlib
import decimal
import functools
import hashlib
import json
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from nca_trader.config.records import read_json, record
from nca_trader.errors import ConfigError, StateError
from nca_trader.paper.head import GENESIS, Head, Mark, read_mark, sibling

APPLICATION_ID = 0x6E636174  # "ncat" in the SQLite header: this file is a journal and no other
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
    "SELECT seq, run, ts_event, ts_recv, kind, key, body, NULL, hash "
    "FROM event LEFT JOIN series ON id = series"
)
# Journals of an earlier format, which are read and verified but not continued.
OLD_SCHEMA = (
    "CREATE TABLE event(\n"
    "  seq INTEGER PRIMARY KEY, run TEXT NOT NULL, ts_event INTEGER NOT NULL, "
    "ts_recv INTEGER NOT NULL,\n"
    "  kind TEXT NOT NULL, key TEXT NOT NULL, body TEXT NOT NULL,\n"
    "  prev_hash TEXT NOT NULL, hash TEXT NOT NULL, UNIQUE(run, kind, key)) STRICT\n",
)
OLD_ROWS = "SELECT seq, run, ts_event, ts_recv, kind, key, body, prev_hash, hash FROM event"
OLD_AHEAD = 512  # rows of one commit: at most 255 deferred ones and those of a bar


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

    head: the last event up to which the chain holds and the head file does not contradict it.
    rows: in the table, or by the head file if that says more. fault: what is wrong and the remedy,
    "" where nothing is. old: whether the tables are those of an earlier version.
    """

    head: Head
    rows: int
    fault: str
    old: bool = False


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
    if fault := _schema_fault(db)[1]:
        raise StateError(f"{path}: {fault}")


def events_of(db: sqlite3.Connection, kind: str | None = None, after: int = 0) -> Iterator[Event]:
    """Yield the events above seq `after`, of one kind or of all."""
    old, _ = _schema_fault(db)
    if old is None:  # killed before its tables were made
        return
    rows = OLD_ROWS if old else ROWS
    where, values = ("", (after,)) if kind is None else (" AND +kind = ?", (after, kind))
    for row in db.execute(f"{rows} WHERE seq > ?{where} ORDER BY seq", values):
        seq, run, ts_event, ts_recv, name, key, text, *_ = row
        body = record(dict[str, Any], read_json(text, f"journal seq {seq}"), f"journal seq {seq}")
        yield Event(seq, run, ts_event, ts_recv, name, key, body)


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
    old, fault = _schema_fault(db)
    if old is None and fault:
        return Examined(Head(0, GENESIS), 0, fault)
    with contextlib.suppress(sqlite3.DatabaseError):  # said below, with the seq
        # The whole check: an index that misses a row would let an event be recorded twice.
        checked = db.execute("PRAGMA integrity_check(1)").fetchone()[0]
        if checked != "ok":
            fault = fault or _DAMAGED.format(f" (SQLite: {checked})")
    done = None if mark is None else mark.done
    head, passed, why = Head(0, GENESIS), {0: GENESIS}, ""
    rows: Iterable = ()  # killed before its tables were made
    if old is not None:
        rows = db.execute(f"{OLD_ROWS if old else ROWS} ORDER BY seq")
    wanted = set() if mark is None else {mark.done.seq, mark.after.seq if mark.after else 0}
    # The fields of a walk's row, bound once: this loop is all of a verification's time.
    encode, sha256 = _encode, hashlib.sha256
    try:
        count, link = 0, GENESIS
        for seq, *fields, prev, stored in rows:
            text = encode([link, seq, *fields])
            found = sha256(text.encode())
            kept = stored == (found.hexdigest() if old else found.digest())
            if seq != count + 1 or not kept or (old and prev != link):
                why = " "
                break
            count, link = seq, found.hexdigest()
            if seq in wanted:
                passed[seq] = link
        head = Head(count, link)
    except (sqlite3.Error, ValueError, TypeError) as error:
        head, why = Head(count, link), f" ({error})"
    total = max(head.seq, 0 if done is None else done.seq)
    with contextlib.suppress(sqlite3.Error):
        total = max(total, db.execute("SELECT count(*) FROM event").fetchone()[0])
    if done is not None and done.seq in passed and passed[done.seq] != done.hash:
        # A chain that was written again from its start holds in itself; only this shows it.
        fault = (
            f"damaged at seq {done.seq}: the head file has another hash for it; the journal or its "
            "head file was exchanged: restore both from a copy."
        )
        return Examined(Head(0, GENESIS), total, fault, bool(old))
    if why:
        fault = (
            f"damaged at seq {head.seq + 1}: the hash chain does not hold there{why.rstrip()}; "
            f"{_RESTORE}"
        )
    elif done is None and head.seq > 0:
        fault = (
            f"holds {head.seq} events and its head file {path.name}.head is missing or empty, so a "
            f"lost end would not show; restore the head file from a copy, {_OR_SALVAGE}"
        )
    elif done is not None and done.seq > head.seq:
        fault = (
            f"ends at seq {head.seq} and its head file says {done.seq}: seq {head.seq + 1} is "
            "lost; restore the journal and its -wal file from a copy, or name another journal."
        )
    elif mark is not None and not _allowed(head, mark):
        # Of the commit under way all rows are there or none.
        ends = [end for end in (mark.after, mark.done) if end and passed.get(end.seq) == end.hash]
        fault = (
            f"has {head.seq - ends[0].seq} rows after seq {ends[0].seq} that no commit wrote: its "
            f"head file ends there; {_RESTORE}"
        )
        head = ends[0]
    if old is False and not fault:
        unused = db.execute(
            "SELECT count(*) FROM series WHERE id NOT IN (SELECT series FROM event)"
        )
        if spare := unused.fetchone()[0]:
            fault = f"has {spare} rows of run and kind that no event is of; {_RESTORE}"
    return Examined(head, total, fault, bool(old))


_OR_SALVAGE = "or copy what holds with `nca-trader journal salvage`."
_RESTORE = f"restore the file from a copy, {_OR_SALVAGE}"
_DAMAGED = f"the database is damaged{{}}; {_RESTORE}"


def _allowed(head: Head, mark: Mark) -> bool:
    """Return whether a table may end at `head`: at the last commit, or at the one under way."""
    if mark.after is None:
        return head.seq - mark.done.seq <= OLD_AHEAD
    return head in (mark.done, mark.after)


@functools.cache
def _schema_rows(statements: tuple[str, ...]) -> list[tuple]:
    """Return what SQLite stores for these statements."""
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        for statement in statements:
            db.execute(statement)
        return sorted(db.execute(_STORED), key=repr)


_STORED = "SELECT type, name, tbl_name, sql FROM sqlite_schema"


def _schema_fault(db: sqlite3.Connection) -> tuple[bool | None, str]:
    """Return whether the tables are old ones (None: neither), and what else the database holds."""
    try:
        stored = db.execute(_STORED).fetchall()
    except sqlite3.DatabaseError as error:
        return None, _DAMAGED.format(f" (SQLite: {error})")
    if not stored:  # killed before its tables were made
        return None, ""
    for old, schema in ((False, SCHEMA), (True, OLD_SCHEMA)):
        ours = _schema_rows(schema)
        if set(ours) <= set(stored):
            extra = [
                f"{kind} {name}" for kind, name, *rest in stored if (kind, name, *rest) not in ours
            ]
            fault = f"holds what no journal has ({', '.join(extra)}); {_RESTORE}" if extra else ""
            return old, fault
    return None, f"its tables are not a journal's; {_RESTORE}"


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
