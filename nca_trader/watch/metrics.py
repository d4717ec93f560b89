"""The metrics that rules may name, and their Prometheus exporter."""

from __future__ import annotations

import contextlib
import io
import math
import pathlib
import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from nca_trader.cloud import Place
from nca_trader.errors import ConfigError, RunError, StateError, StoreError, argument, extra, logger
from nca_trader.paper.journal.tally import Paper
from nca_trader.runs.folder import Lines, read_rows
from nca_trader.watch.alerts import LABEL

TAIL = 256  # bytes before the position that was read to; they must not have changed
PREFIX = "nca_trader_"
SILENT = 5.0  # seconds that a client of the exporter may do nothing
log = logger(__name__)


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
        self._line = 1  # the number of the next line

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
        found = read_rows(lines, self.path, first=self._line)
        rows = [row for row in found if row is not None]
        self._line += len(lines)
        self._at, self._tail = start + end, text[max(end - TAIL, 0) : end]
        self.count += len(rows)
        self.newest = rows[-1] if rows else self.newest
        return rows

    def written(self) -> float | None:
        """Return when the file was last written, in seconds since 1970, None if it is missing."""
        return self._lines.modified()


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
    with extra(
        f"{argument('prometheus')} needs prometheus_client, which is not installed; "
        "pip install prometheus-client."
    ):
        from prometheus_client import CollectorRegistry, start_http_server
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
    # Each connection has a thread, which waits without end for what a client does not send or read.
    server.RequestHandlerClass.timeout = SILENT  # pyright: ignore[reportFunctionMemberAccess]
    server.socket.listen(128)  # its own queue is of five
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
