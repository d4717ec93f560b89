"""The head file of a journal: where the chain of its events ends, and who writes.

Its text is the last commit, and the one that is under way.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from pathlib import Path
from typing import NamedTuple

from nca_trader.errors import StateError
from nca_trader.paper.clock import Clock

GENESIS = "0" * 64  # the hash before the first event
HEAD_SLOT = 512  # bytes, a disk's sector: what is written whole or not at all
SLOTS = 3


class Head(NamedTuple):
    """The end of the chain. seq: events so far. hash: of the last one, hexadecimal."""

    seq: int
    hash: str


class Mark(NamedTuple):
    """What the head file says.

    count: of its writes. done: the last commit. after: the end of the commit that was under way;
    `done` where there was none, None in an old file, which does not say.
    """

    count: int
    done: Head
    after: Head | None

    @property
    def text(self) -> str:
        """The slot's text, with a checksum: a slot that a power cut tore has another."""
        assert self.after is not None
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
        if len(fields) not in (3, 6) or _summed(" ".join(fields[:-1])).split() != fields:
            continue
        numbers = [text for text in fields[:-1] if len(text) != 64]
        if not all(text.isdigit() for text in numbers):
            continue
        if len(fields) == 3:  # an old file: seq and hash
            head = Head(int(fields[0]), fields[1])
            marks.append(Mark(head.seq, head, None))
        else:
            count, seq, link, later, then = fields[:-1]
            marks.append(Mark(int(count), Head(int(seq), link), Head(int(later), then)))
    if not marks:
        raise StateError(f"{target}: is not readable as a head file; restore it from a copy.")
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
        os.pwrite(self._descriptor, slot, self._count % SLOTS * HEAD_SLOT)
        if wait:
            os.fdatasync(self._descriptor)

    def close(self) -> None:
        """Close the file, and so release the lock."""
        os.close(self._descriptor)
