"""A text that only grows, a line at a time: a file, or parts of it in an object store.

Nothing can be appended to an object. So the text is cut into parts of a megabyte, objects
`NAME/000000`, `NAME/000001` and so on, of which the last is written anew as it grows: every few
seconds, and before a checkpoint says that what leads to it is stored.
"""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Callable

from nca_trader.cloud import CloudPath, Place, Version, together
from nca_trader.disk import write_atomically

PART = 1 << 20  # bytes from which on the next line begins another part
SECONDS = 10.0  # between two writes of what came in between


class Lines:
    """The lines of a text at a place; one process at most may write.

    Lines end with a line feed. In a store they are there for others once they are flushed.
    """

    def __init__(self, path: Place, clock: Callable[[], float] = time.monotonic):
        """Reads nothing yet; the text need not be there. clock: seconds."""
        self.path = path
        self._clock = clock
        self._known: dict[str, tuple[Version, bytes]] = {}
        # The part that is being written, None before the first line, and when it was stored.
        self._part: bytes | None = None
        self._number, self._stored, self._at = 0, 0, clock()

    def append(self, line: str) -> None:
        """Adds one line, given without its end."""
        text = line.encode() + b"\n"
        if isinstance(self.path, pathlib.Path):
            with open(self.path, "ab") as file:
                file.write(text)
            return
        if self._part is None:
            self._load()
        elif len(self._part) >= PART:
            self.flush()
            self._part, self._number, self._stored = b"", self._number + 1, 0
        self._part = (self._part or b"") + text
        if self._clock() - self._at >= SECONDS:
            self.flush()

    def flush(self) -> None:
        """Returns once every line is stored."""
        if self._part is not None and len(self._part) > self._stored:
            write_atomically(self.path / _name(self._number), self._part)
            self._stored, self._at = len(self._part), self._clock()

    def read(self) -> bytes:
        """The whole text, with what was appended here; b"" where it is not there."""
        self.flush()
        if isinstance(self.path, CloudPath):
            return b"".join(self._parts(self.path).values())
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            return b""

    def modified(self) -> float | None:
        """When it was last stored, in seconds since 1970; None where it is not there."""
        if isinstance(self.path, CloudPath):
            return max((part.modified for part in self.path.below().values()), default=None)
        try:
            return os.stat(self.path).st_mtime
        except FileNotFoundError:
            return None

    def cut(self, count: int) -> None:
        """Leaves the first `count` lines."""
        lines = self.read().splitlines(keepends=True)
        if isinstance(self.path, pathlib.Path):
            if len(lines) > count:
                write_atomically(self.path, b"".join(lines[:count]))
            return
        # From the end, so that what is left is a beginning wherever this is stopped.
        for name, part in reversed(self._parts(self.path).items()):
            own = part.splitlines(keepends=True)
            first = len(lines) - len(own)
            lines = lines[:first]
            if first + len(own) <= count:
                break
            if first >= count:
                (self.path / name).unlink()
            else:
                write_atomically(self.path / name, b"".join(own[: count - first]))
        self._part = None

    def _load(self) -> None:
        """Takes up the last part where another process, or a cut, left it."""
        parts = list(self._parts(self.path).values()) if isinstance(self.path, CloudPath) else []
        self._number, self._part = (len(parts) - 1, parts[-1]) if parts else (0, b"")
        self._stored = len(self._part)

    def _parts(self, path: CloudPath) -> dict[str, bytes]:
        """Every part by name, in order; only those are fetched that are new or have grown."""
        versions = path.below()
        changed = [
            name
            for name, version in versions.items()
            if name not in self._known or self._known[name][0].tag != version.tag
        ]
        for name, (content, version) in zip(
            changed, together(lambda name: (path / name).read(), changed), strict=True
        ):
            self._known[name] = (version, content)
        self._known = {name: self._known[name] for name in versions}
        return {name: content for name, (_, content) in self._known.items()}


def _name(number: int) -> str:
    return f"{number:06d}"
