"""Trackers show training as it goes on, in a program of their own: `train --track`.

A tracker is three functions, see `Tracker`. `Tracking` calls them in a thread, so that a tracker
that is slow or fails never delays or ends training. Its library is imported when it is named. A
package of its own offers one as an entry point of the group `nca_trader.trackers`: a name, and
what makes the tracker of the text after the colon.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from nca_trader.cloud import CloudPath, Place, local
from nca_trader.config.extensions import installed_points, own_code
from nca_trader.config.ranges import describe, nearest
from nca_trader.config.records import finite, plain
from nca_trader.errors import ConfigError, argument, extra, logger, printable, system_errors
from nca_trader.machine import Worker, refuse_links_in, write_atomically
from nca_trader.runs.manifest import Run

CLOSING = 10.0  # seconds that the end of training waits for what was handed over
log = logger(__name__)


class Tracked(NamedTuple):
    """What is tracked: a run, a walk-forward or a search.

    name: of it. folder: where it is kept; None where nothing is. config: resolved, for a run
    `{"env": {...}, "agent": {...}, "seed": ...}`.
    """

    name: str
    folder: Place | None
    config: Mapping[str, Any]


class Tracker(Protocol):
    """What shows a run. Each function may take its time, and may raise anything."""

    def start(self, subject: Tracked, step: int) -> None:
        """Open what shows `subject`; a resumed one goes on in the same place.

        Args:
          subject: what is tracked.
          step: environment steps that the run has done, folds or trials. Metrics of later steps,
            from before it was killed, are void.
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

    def finish(self, results: Mapping[str, float]) -> None:
        """End: training is done, was stopped, or failed.

        Args:
          results: of the whole, e.g. "selection/score" or "test/sharpe"; {} where there are none.
        """
        ...


class TensorBoard:
    """Writes TensorBoard's event files.

    Args:
      options: the folder for TensorBoard; the run is a folder of its name there. "" is the folder
        `tensorboard` in that of the run, or in the working directory where nothing is kept.

    Raises:
      ConfigError: tensorboardX is not installed; the folder is a URL or cannot be made.
    """

    def __init__(self, options: str = ""):
        with extra(
            f"{argument('track')} tensorboard needs tensorboardX, which is not installed; "
            "pip install tensorboardX."
        ):
            from tensorboardX import SummaryWriter  # pyright: ignore
        self._make: Any = SummaryWriter
        self._root = local(options, "what TensorBoard reads") if options else None
        if self._root is not None:
            remedy = f"name another folder in {argument('track')} tensorboard:DIR"
            with system_errors(ConfigError, f"{options}: cannot be made", remedy):
                self._root.mkdir(parents=True, exist_ok=True)
        self._last = -1

    def start(self, subject: Tracked, step: int) -> None:
        """Open a new event file in the run's folder, and show the configuration as text."""
        if self._root is None:
            kept = subject.folder or local(".", "")
            self._folder = local(kept, "what TensorBoard reads") / "tensorboard"
        else:
            self._folder = self._root / subject.name
        self._folder.mkdir(parents=True, exist_ok=True)
        self._open(step + 1)
        self._last = step
        # TensorBoard shows Markdown, in which indented lines are code.
        text = json.dumps(finite(plain(subject.config)), indent=1, default=str)
        shown = "".join(f"    {line}\n" for line in text.splitlines())
        self._writer.add_text("config", shown, step)
        self._writer.flush()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write every metric."""
        if step <= self._last:
            self._writer.close()
            self._open(step)
        for name, number in metrics.items():
            self._writer.add_scalar(name, number, step)
        self._writer.flush()
        self._last = step

    def finish(self, results: Mapping[str, float]) -> None:
        """Write the results at the last step, and close the file."""
        for name, number in results.items():
            self._writer.add_scalar(name, number, self._last)
        self._writer.close()

    def _open(self, step: int) -> None:
        """Begin a file, which takes back what files before it have of `step` and later."""
        # The library names a file by the second, and two of one second would be one. TensorBoard
        # reads files by the order of their names.
        suffix = f".{time.time_ns()}"
        self._writer = self._make(str(self._folder), purge_step=step, filename_suffix=suffix)


class WeightsAndBiases:
    """Sends to Weights & Biases, or with WANDB_MODE=offline keeps for `wandb sync`.

    A run's folder keeps the id, by which a resumed run goes on in the same one. Rows of updates
    that were lost with a killed process, or rolled back, stay: the service takes none back. The
    axis of all charts is `env_steps`.

    Args:
      options: PROJECT or ENTITY/PROJECT; "" is the project `nca_trader`.

    Raises:
      ConfigError: wandb is not installed; more than one slash.
    """

    ID = "wandb.id"

    def __init__(self, options: str = ""):
        with extra(
            f"{argument('track')} wandb needs wandb, which is not installed; pip install wandb."
        ):
            import wandb  # pyright: ignore
        entity, _, project = options.rpartition("/")
        if "/" in entity:
            raise ConfigError(f"{argument('track', f'wandb:{options}')}: give ENTITY/PROJECT.")
        self._wandb, self._entity, self._project = wandb, entity or None, project or "nca_trader"
        self._run: Any = None

    def start(self, subject: Tracked, step: int) -> None:
        """Open the run of the folder's id, or a new one."""
        name, place = uuid.uuid4().hex[:12], None
        if (kept := subject.folder) is not None:
            file = kept / self.ID
            if file.is_file():
                name = file.read_text().strip()
            else:
                write_atomically(file, name)
            place = None if isinstance(kept, CloudPath) else str(kept)
        self._run = self._wandb.init(
            entity=self._entity,
            project=self._project,
            id=name,
            name=subject.name,
            resume="allow",
            config=finite(plain(subject.config)),
            dir=place,
            settings=self._wandb.Settings(silent=True),
        )
        self._run.define_metric("*", step_metric="env_steps")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send a row."""
        self._run.log({**metrics, "env_steps": step})

    def finish(self, results: Mapping[str, float]) -> None:
        """Write the results into the run's summary, and end it."""
        self._run.summary.update(dict(results))
        self._run.finish()


# Each is called with what stands after the colon.
TRACKERS: dict[str, Callable[[str], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}


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
                f"track = {describe(named)}: has no {', '.join(missing)}; give a name or an "
                "object like `nca_trader.runs.trackers.Tracker`."
            )
        return named
    kind, _, options = named.partition(":")
    if kind in TRACKERS:
        return TRACKERS[kind](options)
    others = installed_points("trackers")
    if kind not in others:
        known = [*TRACKERS, *others]
        raise ConfigError(
            f"{argument('track', named)} is not known; {nearest(kind, known)}Known: "
            f"{', '.join(known)}."
        )
    with own_code(f"{argument('track')} {kind}"):
        return tracker_of(others[kind].load()(options))


class Tracking:
    """Calls a tracker in a thread of its own; the first failure is a warning, the rest are quiet.

    Args:
      tracker: what shows the run; None shows nothing.
      subject: what is tracked.
      step: environment steps that it has done.

    Attributes:
      results: of the whole, handed over at the end; numbers that are not finite are left out.
    """

    def __init__(self, tracker: Tracker | None, subject: Tracked, step: int = 0):
        self._tracker, self._subject, self._warned = tracker, subject, False
        self.results: dict[str, Any] = {}
        self._worker: Worker[tuple[Any, ...]] | None = None
        if tracker is not None:
            refuse_links_in(subject.folder)
            self._worker = Worker("tracker", self._take, self._lost)
            self._worker.put(("start", subject, step))

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """Hand over a row of metrics, e.g. of metrics.jsonl."""
        if self._worker is not None:
            self._worker.put(("log", step, numbers_of(row)))

    def close(self) -> None:
        """End the tracker; waits a while for what was handed over."""
        if self._worker is None:
            return
        self._worker.put(("finish", numbers_of(self.results)))
        if not self._worker.close(CLOSING):
            self._lost(("finish",), f"not done in {CLOSING:g} s")

    def _take(self, call: tuple[Any, ...]) -> None:
        getattr(self._tracker, call[0])(*call[1:])

    def _lost(self, call: tuple[Any, ...], why: object) -> None:
        if not self._warned:
            self._warned = True
            subject = self._subject
            log.warning(
                "%s: the tracker %s failed (%s: %s); the work goes on, and its files have every "
                "row", subject.folder or subject.name, type(self._tracker).__name__, call[0],
                printable(why) or type(why).__name__,
            )  # fmt: skip


def subject_of(run: Run) -> Tracked:
    """Return a run as what is tracked."""
    config = {"env": run.env_config, "agent": run.agent_config, "seed": run.manifest.seed}
    return Tracked(run.path.resolve().name, run.path, plain(config))


def track_results(track: str | Tracker | None, run: Run, kind: str, found: Any) -> None:
    """Show results of a run that was trained before, e.g. of its test span.

    Args:
      track: as in `nca.train`.
      run: the run; they are shown at its last step.
      kind: what the names of the results begin with, e.g. "test".
      found: the results, a mapping such as `Result.metrics` or a dataclass.

    Example:
      >>> track_results("tensorboard", run, "test", result.metrics)  # doctest: +SKIP
    """
    tracker, rows = tracker_of(track), run.metrics()
    steps = rows[-1]["steps"] if rows else 0
    with contextlib.closing(Tracking(tracker, subject_of(run), steps)) as tracked:
        tracked.results = named(kind, found)


def named(kind: str, found: Any) -> dict[str, Any]:
    """Return the fields of a dataclass or a mapping as they are tracked, e.g. "test/sharpe"."""
    fields = vars(found) if dataclasses.is_dataclass(found) else found
    return {f"{kind}/{name}": value for name, value in fields.items()}


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
        if isinstance(value, int | float | np.number | np.bool) and math.isfinite(value)
    }
