"""The figures that are exported and that rules may name, and their Prometheus exporter."""

from __future__ import annotations

import contextlib
import math
import pathlib
import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from nca_trader.cloud import Place
from nca_trader.errors import ConfigError, RunError, StateError, argument
from nca_trader.watch.follow import Paper, Rows

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
