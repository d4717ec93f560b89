"""How a journal's events are chained, and the file beside it that holds the chain's end."""

from __future__ import annotations

import decimal
import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from nca_trader.errors import StateError

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
