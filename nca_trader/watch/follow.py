"""A run's metrics.jsonl and a paper session's journal, followed while others write them."""

from __future__ import annotations

import io
import logging
import os
import pathlib
import sqlite3
from typing import IO, Any

from nca_trader.cloud import CloudPath, Place
from nca_trader.config.records import read_json
from nca_trader.errors import StateError, StoreError
from nca_trader.paper.reading import read_events
from nca_trader.runs.lines import Lines
from nca_trader.runs.records import row_of

TAIL = 256  # bytes before the place read up to, which must still be there
NANOSECONDS = 1_000_000_000
log = logging.getLogger(__name__)


class Rows:
    """The rows of a file of JSON lines that grows.

    A last line without its end is still being written and is left for the next look. A file that
    was replaced, or whose rows were taken back (a run that went back to a checkpoint), is read
    again from its beginning.

    Attributes:
      newest: the last row, {} before there is one. count: rows in the file. restarts: how often it
        was read again.
    """

    def __init__(self, path: Place):
        """Reads nothing yet; the file need not be there."""
        self.path = path
        self._lines = Lines(path)
        self.newest: dict[str, Any] = {}
        self.count = self.restarts = 0
        self._at, self._tail = 0, b""

    def poll(self) -> list[dict[str, Any]]:
        """The rows that came since the last look; after a restart, all that are there."""
        try:
            file = self._open()
        except FileNotFoundError:  # not begun, or between two names
            return []
        except StoreError as error:
            log.warning("%s", error)
            return []
        with file:
            if self._is_another(file):
                self.restarts += 1
                self.newest, self.count, self._at, self._tail = {}, 0, 0, b""
            file.seek(self._at)
            whole = file.read().rpartition(b"\n")
        text = whole[0] + whole[1]
        self._at += len(text)
        self._tail = (self._tail + text)[-TAIL:]
        rows = [row for line in text.splitlines() if (row := self._row(line)) is not None]
        self.count += len(rows)
        self.newest = rows[-1] if rows else self.newest
        return rows

    def written(self) -> float | None:
        """When the file was last written, in seconds since 1970; None where it is not there."""
        return self._lines.modified()

    def _open(self) -> IO[bytes]:
        if isinstance(self.path, CloudPath):
            return io.BytesIO(self._lines.read())
        return open(self.path, "rb")

    def _is_another(self, file: IO[bytes]) -> bool:
        """Whether what was read is no longer the beginning of the file."""
        if not self._at:
            return False
        if file.seek(0, os.SEEK_END) < self._at:
            return True
        file.seek(self._at - len(self._tail))
        # A file of another name that holds what was read, and more, need not be read again.
        return file.read(len(self._tail)) != self._tail

    def _row(self, line: bytes) -> dict[str, Any] | None:
        try:
            return row_of(read_json(line, str(self.path)), str(self.path))
        except StateError:
            log.warning("%s: a line that is no JSON object is passed over", self.path)
            return None


class Paper:
    """What a paper session's journal says of it now."""

    def __init__(self, path: pathlib.Path):
        """Reads nothing yet; the journal need not be there."""
        self.path = path
        self._seq = 0
        self._peak = 1.0
        self._figures: dict[str, float] = {}
        self._seen_at: float | None = None

    def poll(self, now: float) -> dict[str, float]:
        """Its figures at `now`, in seconds since 1970; {} before there is a bar.

        paper_equity is a multiple of the capital, paper_drawdown the part that it is below its
        peak, paper_feed_age_seconds the time since a bar came in.
        """
        try:
            events = list(read_events(self.path, after=self._seq)) if self.path.exists() else []
        except (StateError, sqlite3.Error) as error:  # being made, or copied over
            log.warning("%s: not read at this look (%s)", self.path, error)
            events = []
        for event in events:
            self._take(event)
        if self._seen_at is None:
            return {}
        return self._figures | {"paper_feed_age_seconds": now - self._seen_at}

    def _take(self, event: Any) -> None:
        self._seq = event.seq
        figures = self._figures
        figures["paper_events"] = float(event.seq)
        if event.kind == "bar":
            self._seen_at = event.ts_recv / NANOSECONDS
            figures["paper_bars"] = figures.get("paper_bars", 0.0) + 1.0
        elif event.kind == "fill":
            figures["paper_fills"] = figures.get("paper_fills", 0.0) + 1.0
        elif event.kind in ("halt", "resume"):
            figures["paper_halted"] = float(event.kind == "halt")
        elif event.kind == "snapshot":
            equity = float(event.body["equity"])
            self._peak = max(self._peak, equity)
            figures |= {"paper_equity": equity, "paper_drawdown": 1.0 - equity / self._peak}
