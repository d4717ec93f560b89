"""The figures that are exported and that rules may name, and their Prometheus exporter."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import pathlib
import re
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any

from nca_trader.cloud import CloudPath, Place
from nca_trader.config.records import read_json
from nca_trader.errors import ConfigError, RunError, StateError, StoreError, argument
from nca_trader.paper.journal import read_events
from nca_trader.runs.folder import Lines
from nca_trader.runs.manifest import row_of

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


PREFIX = "nca_trader_"
SEED = re.compile(r'(\w+)\{seed="(\d+)"\}')


class Watched:
    """A run, a journal, or both.

    Attributes:
      name: of the run folder, or of the journal. rows: of metrics.jsonl, None without a run.
    """

    def __init__(
        self,
        run: Place | None,
        journal: pathlib.Path | None = None,
        clock: Callable[[], float] = time.time,
    ):
        """Reads nothing yet.

        Args:
          clock: seconds since 1970.

        Raises:
          RunError: the run folder is not there; one without a row yet is waited for.
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

    def look(self) -> dict[str, float]:
        """All figures now, by name; one that is null in a row (not finite) is NaN."""
        now = self._clock()
        found: dict[str, float] = {}
        if self.rows is not None:
            if self._row_at is None:
                self._row_at = self._last_written(now)
                self.rows.poll()
            elif self.rows.poll():
                self._row_at = now
            found |= flat(self.rows.newest)
            found |= {
                "rows": float(self.rows.count),
                "restarts": float(self.rows.restarts),
                "row_age_seconds": max(now - self._row_at, 0.0),
            }
        return found | (self._paper.poll(now) if self._paper else {})

    def _last_written(self, now: float) -> float:
        assert self.rows is not None
        written = self.rows.written()
        return now if written is None else written


def flat(row: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a row by name; those of several seeds as `seed_NAME{seed="i"}`."""
    found: dict[str, float] = {}
    for name, value in row.items():
        if name == "seeds" and isinstance(value, dict):
            for each, numbers in value.items():
                for seed, number in enumerate(numbers):
                    found[f'seed_{each}{{seed="{seed}"}}'] = _number(number)
        elif isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}_")
        elif value is None or isinstance(value, int | float):
            found[prefix + name] = _number(value)
    return found


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


class Collector:
    """The last look, as prometheus_client asks for it."""

    def __init__(self, run: str):
        """run: the value of every metric's label "run"."""
        self._run = run
        self.samples: dict[str, float] = {}

    def collect(self) -> Iterable[Any]:
        """A gauge a name, `nca_trader_` before it; labels: run, and seed where agents differ."""
        from prometheus_client.core import GaugeMetricFamily

        families: dict[str, Any] = {}
        for key, value in self.samples.items():
            match = SEED.fullmatch(key)
            name = PREFIX + re.sub(r"\W", "_", match[1] if match else key)
            labels = ["run", "seed"] if match else ["run"]
            if name not in families:
                about = f"{name}, see docs/guides/watch.md"
                families[name] = GaugeMetricFamily(name, about, None, labels)
            families[name].add_metric([self._run, match[2]] if match else [self._run], value)
        return families.values()


@contextlib.contextmanager
def exporter(address: str, collector: Collector) -> Iterator[int]:
    """Serves the metrics on `[HOST:]PORT` until it ends; gives the port.

    Raises:
      ConfigError: no such address, or prometheus_client is not installed.
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
            "pip install 'nca-trader[prometheus]'."
        ) from None
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)  # pyright: ignore[reportArgumentType]
    try:
        # Of this machine alone unless a host is given: figures of a strategy are no one else's.
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
