"""The metrics that rules may name, and their Prometheus exporter."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import pathlib
import re
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from nca_trader.cloud import Place
from nca_trader.errors import ConfigError, RunError, StateError, StoreError, argument, printable
from nca_trader.paper.chain import as_state_error, connect_reader, events_of, has_tables, writer_of
from nca_trader.paper.tally import NANOSECONDS, Tally
from nca_trader.runs.folder import Lines, read_rows, rows_checked
from nca_trader.watch.alerts import LABEL

TAIL = 256  # bytes before the position that was read to; they must not have changed
PREFIX = "nca_trader_"
log = logging.getLogger(__name__)


class Rows:
    """The rows of a file of JSON lines that grows.

    A last line without its end is still being written and is left for the next poll. A file that
    was replaced, or whose rows were taken back (a run that returned to a checkpoint), is read
    again from its beginning.

    Attributes:
      newest: the last row, {} before the first.
      count: rows in the file, without damaged ones.
      restarts: how often it was read again.
    """

    def __init__(self, path: Place):
        """Read nothing yet. The file need not exist."""
        self.path = path
        self._lines = Lines(path)
        self.newest: dict[str, Any] = {}
        self.count = self.restarts = 0
        self._at, self._tail = 0, b""  # the position that was read to, and what stands before it
        self._line, self._checked = 1, False  # the number of the next line

    def poll(self) -> list[dict[str, Any]]:
        """Return the rows since the last poll; after a restart, all rows."""
        start = self._at - len(self._tail)
        try:
            text = self._lines.read(start)
            if not text and self.written() is None:  # not begun, or between two names
                return []
            # What was read must still stand there. The file may have another inode: one that holds
            # what was read, and more, need not be read again.
            if not text.startswith(self._tail):
                self.restarts += 1
                self.newest, self.count, self._tail, start, self._line = {}, 0, b"", 0, 1
                text = self._lines.read()
        except StoreError as error:
            log.warning("%s", error)
            return []
        end = text.rfind(b"\n") + 1
        lines = io.BytesIO(text[len(self._tail) : end]).readlines()
        if lines and self._line == 1:  # run.json is there before the first row
            self._checked = rows_checked(self.path.parent)
        found = read_rows(lines, self.path, checked=self._checked, first=self._line)
        rows = [row for row in found if row is not None]
        self._line += len(lines)
        self._at, self._tail = start + end, text[max(end - TAIL, 0) : end]
        self.count += len(rows)
        self.newest = rows[-1] if rows else self.newest
        return rows

    def written(self) -> float | None:
        """Return when the file was last written, in seconds since 1970, None if it is missing."""
        return self._lines.modified()


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


class Watched:
    """A run, a journal, or both.

    Attributes:
      name: of the run folder, or of the journal.
      rows: of metrics.jsonl, None without a run.
    """

    def __init__(
        self,
        run: Place | None,
        journal: pathlib.Path | None = None,
        clock: Callable[[], float] = time.time,
    ):
        """Read nothing yet.

        Args:
          run: a run folder, or None. It may be without a row.
          journal: a journal, or None. It need not exist.
          clock: seconds since 1970.

        Raises:
          RunError: the run folder does not exist.
        """
        if run is not None and not run.is_dir():
            raise RunError(
                f"{run}: no such folder; give the {argument('run_dir')} of `nca-trader train`."
            )
        self.name = str(run or journal)
        self.rows = None if run is None else Rows(run / "metrics.jsonl")
        self._paper = None if journal is None else Paper(journal)
        self._clock = clock
        self._row_at: float | None = None

    @property
    def why(self) -> dict[str, str]:
        """The reasons for the newest values, by metric, where there are any."""
        return {} if self._paper is None else self._paper.why

    def look(self) -> dict[str, float]:
        """Return all metrics by name. One that is null in a row (not finite) is NaN."""
        now = self._clock()
        found: dict[str, float] = {}
        if self.rows is not None:
            # At the first look the newest row is as old as its file.
            written = self.rows.written() if self._row_at is None else None
            new = self.rows.poll()
            if self._row_at is None:
                self._row_at = now if written is None else written
            elif new:
                self._row_at = now
            # The newest row alone: rules and gauges are about the present.
            found |= flat(self.rows.newest)
            found |= {
                "rows": float(self.rows.count),
                "restarts": float(self.rows.restarts),
                # Another machine may have written the file, and its clock may be ahead.
                "row_age_seconds": max(now - self._row_at, 0.0),
            }
        if self._paper is not None:
            try:
                self._paper.poll()
            except (StateError, ConfigError) as error:  # being made, or copied over
                log.warning("%s: not read this time (%s)", self._paper.path, error)
            found |= self._paper.metrics(now)
        return found


def flat(row: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers of a row by name; those of several seeds are `seed_NAME{seed="i"}`.

    Example:
      >>> flat({"update": 3, "loss": None, "seeds": {"reward": [0.5, 1]}})
      {'update': 3.0, 'loss': nan, 'seed_reward{seed="0"}': 0.5, 'seed_reward{seed="1"}': 1.0}
    """
    found: dict[str, float] = {}
    for name, value in row.items():
        if name == "seeds" and isinstance(value, dict):
            for each, numbers in value.items():
                if isinstance(numbers, list):
                    seeds = {f'seed_{each}{{seed="{i}"}}': n for i, n in enumerate(numbers)}
                    found |= flat(seeds)
        elif isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}_")
        elif value is None or isinstance(value, int | float):
            found[prefix + name] = math.nan if value is None else float(value)
    return found


class Collector:
    """The samples of the last look, in the form that prometheus_client asks for."""

    def __init__(self, run: str):
        """Hold no sample yet. run: the value of every metric's label "run"."""
        self._run = run
        self.samples: dict[str, float] = {}

    def collect(self) -> Iterable[Any]:
        """Return a gauge per name, `nca_trader_` before it, with labels run and seed."""
        from prometheus_client.core import GaugeMetricFamily

        found: dict[str, list[tuple[dict[str, str], float]]] = {}
        for key, value in self.samples.items():
            match = LABEL.fullmatch(key)
            name = PREFIX + re.sub(r"\W", "_", match[1] if match else key)
            labels = {"run": self._run} | ({match[2]: match[3]} if match else {})
            found.setdefault(name, []).append((labels, value))
        for name, rows in found.items():
            # One family has the same labels in each row; "" is as if there were none.
            labels = list(dict.fromkeys(label for row, _ in rows for label in row))
            family = GaugeMetricFamily(name, f"{name}, see docs/guides/watch.md", None, labels)
            for row, value in rows:
                family.add_metric([row.get(label, "") for label in labels], value)
            yield family


@contextlib.contextmanager
def exporter(address: str, collector: Collector) -> Iterator[int]:
    """Serve the metrics on `[HOST:]PORT` until its end, and yield the port.

    Raises:
      ConfigError: not an address, or prometheus_client is not installed.
      StateError: the port is taken.
    """
    host, _, port = address.rpartition(":")
    if not port.isdigit() or not int(port) < 65536:
        raise ConfigError(
            f"{argument('prometheus', address)}: give a port, e.g. 9105, or HOST:PORT."
        )
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError:
        raise ConfigError(
            f"{argument('prometheus')} needs prometheus_client, which is not installed; "
            "pip install prometheus-client."
        ) from None
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)  # pyright: ignore[reportArgumentType]
    try:
        # Open to this machine only unless a host is given: a strategy's metrics are private.
        server, thread = start_http_server(int(port), host or "127.0.0.1", registry)
    except OSError as error:
        raise StateError(
            f"{argument('prometheus', address)}: cannot be listened on ({error.strerror}); "
            "give another port."
        ) from None
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
