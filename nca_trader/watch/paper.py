"""A paper session as its journal shows it: the tally of its events, its metrics, why it halted."""

from __future__ import annotations

import contextlib
import pathlib
import sqlite3
from collections.abc import Mapping
from typing import Any

from nca_trader.errors import printable
from nca_trader.paper.chain import as_state_error, connect_reader, events_of, has_tables, writer_of
from nca_trader.paper.clock import NANOSECONDS
from nca_trader.paper.tally import Tally


class Paper:
    """A paper session by its journal, which grows; each poll reads only what is new.

    Attributes:
      path: of the journal, which need not exist yet.
      tally: of its events up to the last poll. A journal that replaces another has a tally of its
        own, and so has one that is made again.
    """

    def __init__(self, path: pathlib.Path):
        self.path, self.tally = path, Tally()
        self._hash: bytes | None = None  # of the last event that was read

    def poll(self) -> None:
        """Read what is new.

        Raises:
          StateError, ConfigError: it is not a journal, or cannot be read, e.g. as it is being made.
        """
        if not self.path.is_file():
            self._follow(None)
            return
        with contextlib.closing(connect_reader(self.path)) as db, as_state_error(self.path):
            self._follow(db if has_tables(self.path, db) else None)

    def _follow(self, db: sqlite3.Connection | None) -> None:
        """Take the events of a journal; None has none."""
        if db is not None:
            db.execute("BEGIN")  # one view for all that is read
        tally = self.tally
        # An inode says nothing: a file that is made in the place of another may get the same.
        if tally.seq and self._hash != _hash_at(db, tally.seq):
            tally = Tally()
        # All events or none: a damaged one among them must not leave half a tally.
        tally.add_all([] if db is None else list(events_of(db, after=tally.seq)))
        self.tally, self._hash = tally, _hash_at(db, tally.seq)

    def metrics(self, now: float) -> dict[str, float]:
        """Return the metrics at `now`, in seconds since 1970; {} before the first bar.

        paper_equity is a multiple of the capital, paper_drawdown the part that it is below its
        peak, paper_feed_age_seconds the time since the newest bar, paper_running 1 while a process
        writes the journal, paper_halted 1 while it is halted.
        """
        tally = self.tally
        if not tally.counts["bar"]:
            return {}
        found = {"paper_events": float(tally.seq)}
        found |= {f"paper_{k}s": float(tally.counts[k]) for k in ("bar", "fill") if tally.counts[k]}
        if tally.equity:
            found |= {"paper_equity": tally.equity[-1], "paper_drawdown": abs(tally.drawdown[-1])}
        if tally.halts:
            found["paper_halted"] = float(tally.halted is not None)
        age = now - tally.seen / NANOSECONDS
        running = float(bool(writer_of(self.path)))
        return found | {"paper_feed_age_seconds": age, "paper_running": running}

    @property
    def why(self) -> dict[str, str]:
        """The reasons for values, by metric."""
        halts = self.tally.halts
        return {"paper_halted": reason_of(halts[-1].body)} if halts else {}


def _hash_at(db: sqlite3.Connection | None, seq: int) -> bytes | None:
    rows = db.execute("SELECT hash FROM event WHERE seq = ?", (seq,)) if db else ()
    return next((row[0] for row in rows), None)


def reason_of(body: Mapping[str, Any]) -> str:
    """Return the reason of a halt, a resume or a limit in words, with its numbers.

    >>> reason_of({"code": "max-drawdown", "detail": {"loss": 0.123456}})
    'max-drawdown, loss 0.1235'
    """
    parts = [str(body[k]) for k in ("code", "limit", "reason") if body.get(k)]
    detail = body.get("detail") or ()
    if isinstance(detail, Mapping):
        for name, value in detail.items():
            parts.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
    elif detail:
        parts.append(str(detail))
    return printable(", ".join(parts)) or "no reason given"
