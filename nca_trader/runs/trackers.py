"""Trackers show training as it goes on, in a program of their own: `train --track`.

A tracker is three functions, see `Tracker`. `Tracking` calls them in a thread, so that a tracker
that is slow or fails never delays or ends training. Its library is imported when it is named.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from nca_trader.cloud import local
from nca_trader.config.ranges import described, nearest
from nca_trader.config.records import finite, plain
from nca_trader.errors import ConfigError, argument, printable
from nca_trader.machine import Worker
from nca_trader.runs.manifest import Run

CLOSING = 10.0  # seconds that the end of training waits for what was handed over
log = logging.getLogger(__name__)


class Tracker(Protocol):
    """What shows a run. Each function may take its time, and may raise anything."""

    def start(self, config: Mapping[str, Any], run: Run, step: int) -> None:
        """Open what shows `run`; a resumed run goes on in the same place.

        Args:
          config: the resolved configuration, `{"env": {...}, "agent": {...}, "seed": ...}`.
          run: the run.
          step: environment steps that the run has done. Metrics of later steps, from before it was
            killed, are void.
        """
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the finite metrics of an update.

        Args:
          step: environment steps so far. Where it is not above the last one, the run was rolled
            back, and what was logged from `step` on is void.
          metrics: by name; of several seeds also "reward/seed_0" and so on.
        """
        ...

    def finish(self) -> None:
        """End: training is done, was stopped, or failed."""
        ...


class TensorBoard:
    """Writes TensorBoard's event files.

    Args:
      options: the folder for TensorBoard; the run is a folder of its name there. "" is the folder
        `tensorboard` in the run.

    Raises:
      ConfigError: tensorboardX is not installed; the folder is a URL or cannot be made.
    """

    def __init__(self, options: str = ""):
        try:
            from tensorboardX import event_file_writer, summary  # pyright: ignore
            from tensorboardX.proto import event_pb2  # pyright: ignore
        except ImportError:
            raise ConfigError(
                f"{argument('track')} tensorboard needs tensorboardX, which is not installed; "
                "pip install tensorboardX."
            ) from None
        self._files: Any = event_file_writer
        self._events: Any = event_pb2
        self._summaries: Any = summary
        self._root = local(options, "what TensorBoard reads") if options else None
        if self._root is not None:
            try:
                self._root.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"{options}: cannot be made ({error.strerror}); name another folder in "
                    f"{argument('track')} tensorboard:DIR."
                ) from None
        self._last = -1

    def start(self, config: Mapping[str, Any], run: Run, step: int) -> None:
        """Open a new event file in the run's folder, and show the configuration as text."""
        if self._root is None:
            self._folder = local(run.path, "what TensorBoard reads") / "tensorboard"
        else:
            self._folder = self._root / run.path.resolve().name
        self._folder.mkdir(parents=True, exist_ok=True)
        self._open(step + 1)
        # TensorBoard shows Markdown, in which indented lines are code.
        text = json.dumps(finite(plain(config)), indent=1, default=str)
        shown = "".join(f"    {line}\n" for line in text.splitlines())
        self._write(step, self._summaries.text("config", shown))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one event with every metric."""
        if step <= self._last:
            self._writer.close()
            self._open(step)
        value = self._summaries.Summary.Value
        values = [value(tag=name, simple_value=number) for name, number in metrics.items()]
        self._write(step, self._summaries.Summary(value=values))
        self._last = step

    def finish(self) -> None:
        """Close the file."""
        self._writer.close()

    def _open(self, step: int) -> None:
        """Begin a file, which takes back what files before it have of `step` and later."""
        # The library names a file by the second, and two of one second would be one. TensorBoard
        # reads files by the order of their names.
        suffix = f".{time.time_ns()}"
        self._writer = self._files.EventsWriter(str(self._folder / "events"), suffix)
        begins = self._events.SessionLog(status=self._events.SessionLog.START)
        self._write(step, session_log=begins)

    def _write(self, step: int, summary: Any = None, **fields: Any) -> None:
        event = self._events.Event(wall_time=time.time(), step=step, summary=summary, **fields)
        self._writer.write_event(event)
        self._writer.flush()


# Each is called with what stands after the colon.
TRACKERS: dict[str, Callable[[str], Tracker]] = {"tensorboard": TensorBoard}


def tracker_of(named: str | Tracker | None) -> Tracker | None:
    """Return the tracker that `--track` or `track=` names; None is none.

    Raises:
      ConfigError: it is not known, or what it needs is missing.
    """
    if named is None:
        return None
    if not isinstance(named, str):
        missing = [name for name in ("start", "log", "finish") if not hasattr(named, name)]
        if missing:
            raise ConfigError(
                f"track = {described(named)}: has no {', '.join(missing)}; give a name or an "
                "object like `nca_trader.runs.trackers.Tracker`."
            )
        return named
    kind, _, options = named.partition(":")
    if kind not in TRACKERS:
        raise ConfigError(
            f"{argument('track', named)} is not known; {nearest(kind, TRACKERS)}Known: "
            f"{', '.join(TRACKERS)}."
        )
    return TRACKERS[kind](options)


class _Call(NamedTuple):
    name: str
    args: tuple[Any, ...] = ()


class Tracking:
    """Calls a tracker in a thread of its own; the first failure is a warning, the rest are quiet.

    Args:
      tracker: what shows the run.
      run: the run.
      step: environment steps that it has done.
    """

    def __init__(self, tracker: Tracker, run: Run, step: int):
        self._tracker, self._run, self._warned = tracker, run, False
        config = {"env": run.env_config, "agent": run.agent_config, "seed": run.manifest.seed}
        self._worker: Worker[_Call] = Worker("tracker", self._take, self._lost)
        self._worker.put(_Call("start", (plain(config), run, step)))

    def log(self, row: Mapping[str, Any]) -> None:
        """Hand over a row of metrics.jsonl."""
        self._worker.put(_Call("log", (row["steps"], numbers_of(row))))

    def close(self) -> None:
        """End the tracker; waits a while for what was handed over."""
        self._worker.put(_Call("finish"))
        if not self._worker.close(CLOSING):
            self._lost(_Call("finish"), f"not done in {CLOSING:g} s")

    def _take(self, call: _Call) -> None:
        getattr(self._tracker, call.name)(*call.args)

    def _lost(self, call: _Call, why: object) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "%s: the tracker %s failed (%s: %s); training goes on, and metrics.jsonl has "
                "every row", self._run.path, type(self._tracker).__name__, call.name,
                printable(why) or type(why).__name__,
            )  # fmt: skip


@contextlib.contextmanager
def tracking(tracker: Tracker | None, run: Run, step: int) -> Iterator[Callable[[Any], None]]:
    """Yield a function that takes each row of metrics; it does nothing without a tracker."""
    if tracker is None:
        yield lambda row: None
        return
    with contextlib.closing(Tracking(tracker, run, step)) as tracked:
        yield tracked.log


def numbers_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a row, and of each seed.

    Example:
      >>> numbers_of({"steps": 8, "reward": 0.5, "loss": None, "seeds": {"reward": [0.25, 0.75]}})
      {'reward': 0.5, 'reward/seed_0': 0.25, 'reward/seed_1': 0.75}
    """
    found = {name: value for name, value in row.items() if name not in ("steps", "seeds")}
    for name, values in row.get("seeds", {}).items():
        found |= {f"{name}/seed_{i}": value for i, value in enumerate(values)}
    return {
        name: float(value)
        for name, value in found.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
