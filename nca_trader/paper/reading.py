"""Reading a journal: its events, and whether all of them are there as they were written."""

from __future__ import annotations

import contextlib
import decimal
import hashlib
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from nca_trader.config.ranges import expect
from nca_trader.config.records import read_json, record
from nca_trader.errors import ConfigError, StateError, argument

GENESIS = "0" * 64
HEAD_SLOT = 512  # bytes, a disk's sector: what is written whole or not at all


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
    """The one JSON text of `value`: sorted keys, no spaces, shortest floats that read back equal.

    Raises:
      ValueError: a NaN or an infinity. TypeError: a type that JSON does not have; a
        `decimal.Decimal` is written as a string, a numpy array must be a list first.
    """
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), allow_nan=False, default=_decimal_as_string
    )


def _decimal_as_string(value: Any) -> str:
    if isinstance(value, decimal.Decimal):
        return str(value)
    raise TypeError(f"a journal body holds JSON types and Decimal, not {type(value).__name__}.")


def link_of(prev_hash: str, *fields: Any) -> str:
    """The hash of an event with these fields, in the order of its columns, after `prev_hash`."""
    return hashlib.sha256(canonical([prev_hash, *fields]).encode()).hexdigest()


def read_head(path: Path) -> Head | None:
    """The newer of the head file's two slots; None where the file is missing or still empty."""
    target = beside(path, ".head")
    try:
        data = target.read_bytes()
    except FileNotFoundError:
        return None
    if not data.strip(b"\0"):  # a kill, or a power cut, between its making and its first head
        return None
    slots = [_parse_slot(data[i * HEAD_SLOT : (i + 1) * HEAD_SLOT]) for i in (0, 1)]
    heads = [head for head in slots if head is not None]
    if not heads:
        raise StateError(f"{target}: is not readable as a head file; restore it from a copy.")
    return max(heads)


def _parse_slot(data: bytes) -> Head | None:
    """The head in one slot; None if it is empty or was torn by a power cut."""
    fields = data.decode("ascii", errors="replace").split()
    if len(fields) != 3 or not fields[0].isdigit():
        return None
    head = Head(int(fields[0]), fields[1])
    return head if head_text(head).split() == fields else None


def head_text(head: Head) -> str:
    """What a slot of the head file holds: seq, hash and a checksum of the two."""
    text = f"{head.seq} {head.hash}"
    return f"{text} {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def beside(path: Path, suffix: str) -> Path:
    """The file that belongs to the journal at `path`, e.g. of suffix ".head"."""
    return path.with_name(path.name + suffix)


APPLICATION_ID = 0x6E636174  # "ncat" in the SQLite header: this file is a journal and no other
LEAST_PAGE = 512  # bytes, of a SQLite file
COLUMNS = "seq, run, ts_event, ts_recv, kind, key, body, prev_hash, hash"


def replayed(feed: str, broker: str = "simulated") -> str:
    """Returns the bar file that `feed` replays.

    Raises:
      ConfigError: a feed or a broker that this version does not have.
    """
    expect("feed", feed, str, "replay:FILE, FILE a bar file")
    if broker != "simulated":
        raise ConfigError(f"{argument('broker', broker)} is not in this version; simulated is.")
    kind, _, file = feed.partition(":")
    if kind in ("alpaca", "ccxt"):
        raise ConfigError(
            f"{argument('feed', feed)}: {kind} is not in this version; replay:FILE is."
        )
    if kind != "replay" or not file:
        raise ConfigError(
            f"{argument('feed', feed)} is not a feed; give replay:FILE, FILE a bar file."
        )
    return file


def verify(path: str | Path) -> Head:
    """Check a journal from its first event to its head file, changing nothing.

    Raises:
      ConfigError: there is no such file.
      StateError: damage; names the first event that does not hold.
    """
    path = Path(path)
    with contextlib.closing(_connect_reader(path)) as db:
        return checked_head(path, db)


def read_events(path: str | Path, kind: str | None = None, after: int = 0) -> Iterator[Event]:
    """The events of a journal in order, of one kind or of all, over a read-only connection.

    Those up to seq `after` are left out.
    """
    path = Path(path)
    with contextlib.closing(_connect_reader(path)) as db, as_state_error(path):
        refuse_other_files(path, db)
        yield from events_of(db, kind, after)


def events_of(db: sqlite3.Connection, kind: str | None, after: int = 0) -> Iterator[Event]:
    """The events above seq `after` in order, of one kind or of all."""
    where, values = ("", (after,)) if kind is None else (" AND kind = ?", (after, kind))
    for row in db.execute(f"SELECT {COLUMNS} FROM event WHERE seq > ?{where} ORDER BY seq", values):
        seq, run, ts_event, ts_recv, name, key, text, *_ = row
        body = record(dict[str, Any], read_json(text, f"journal seq {seq}"), f"journal seq {seq}")
        yield Event(seq, run, ts_event, ts_recv, name, key, body)


def checked_head(path: Path, db: sqlite3.Connection) -> Head:
    """Walk the chain, then hold it against the head file; the end of the chain if both agree."""
    refuse_other_files(path, db)
    try:
        quick = db.execute("PRAGMA quick_check(1)").fetchone()[0]
        complaint = "" if quick == "ok" else f" (SQLite: {quick})"
    except sqlite3.DatabaseError as error:
        complaint = f" (SQLite: {error})"
    kept = read_head(path)
    head = _walk(path, db, kept, complaint)
    if complaint:
        raise StateError(
            f"{path}: the database is damaged, though its {head.seq} events read well{complaint}; "
            "restore the file from a copy."
        )
    if kept is None and head.seq > 0:
        raise StateError(
            f"{path}: holds {head.seq} events and its head file {beside(path, '.head').name} is "
            "missing or empty, so a lost end would not show; restore the head file from a copy."
        )
    if kept is not None and kept.seq > head.seq:
        raise StateError(
            f"{path}: ends at seq {head.seq} and its head file says {kept.seq}: seq "
            f"{head.seq + 1} is lost; restore the journal and its -wal file from a copy, or name "
            "another journal."
        )
    return head


def refuse_other_files(path: Path, db: sqlite3.Connection) -> None:
    """Raises StateError where the file is no journal, before anything is written to it."""
    # SQLite takes less than a page for an empty database. It is not opened here to be looked at:
    # closing it would let go of SQLite's own lock.
    if 0 < path.stat().st_size < LEAST_PAGE:
        raise StateError(
            f"{path}: is not a readable journal ({path.stat().st_size} bytes are no database); "
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


def _walk(path: Path, db: sqlite3.Connection, kept: Head | None, complaint: str) -> Head:
    head = Head(0, GENESIS)
    try:
        if not db.execute("SELECT 1 FROM sqlite_schema WHERE name = 'event'").fetchone():
            return head
        for seq, *fields, prev, link in db.execute(f"SELECT {COLUMNS} FROM event ORDER BY seq"):
            if seq != head.seq + 1 or prev != head.hash or link != link_of(prev, seq, *fields):
                break
            head = Head(seq, link)
            if kept is not None and kept.seq == seq and kept.hash != link:
                raise StateError(
                    f"{path}: damaged at seq {seq}: the head file has another hash for it; the "
                    "journal or its head file was exchanged: restore both from a copy."
                )
        else:
            return head
    except (sqlite3.Error, ValueError, TypeError) as error:
        complaint = complaint or f" ({error})"
    raise StateError(
        f"{path}: damaged at seq {head.seq + 1}: the hash chain does not hold there{complaint}; "
        "restore the file from a copy."
    )


def _connect_reader(path: Path) -> sqlite3.Connection:
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such journal; check the path.")
    # Without a write-ahead log nobody is writing, and an immutable open leaves no file behind.
    mode = "mode=ro" if beside(path, "-wal").exists() else "immutable=1"
    with as_state_error(path):
        return sqlite3.connect(f"{path.resolve().as_uri()}?{mode}", uri=True)


@contextlib.contextmanager
def as_state_error(path: Path) -> Iterator[None]:
    """SQLite's and the disk's errors as StateError, with what mends them."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        remedy = "free space or mend the permissions, then give the same command again"
        if "not a database" in str(error) or "malformed" in str(error):
            remedy = "restore it from a copy or name another file"
        raise StateError(f"{path}: the journal failed ({error}); {remedy}.") from error
    except OSError as error:
        raise StateError(
            f"{path}: the journal cannot be written ({error.strerror}); mend that, then give the "
            "same command again."
        ) from error
