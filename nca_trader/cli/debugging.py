"""Switches for finding a fault or a delay in what a command runs on the device."""

from __future__ import annotations

import argparse
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

SWITCHES = {  # option: the setting of jax, its value, what it does
    "debug-nans": ("jax_debug_nans", True, "stop at the operation that first makes a NaN; slow"),
    "debug-infs": ("jax_debug_infs", True, "the same for infinities; masks of -inf count"),
    "disable-jit": ("jax_disable_jit", True, "run operation by operation, as Python; very slow"),
    "log-compiles": ("jax_log_compiles", True, "log each program that is compiled"),
    "full-traceback": ("jax_traceback_filtering", "off", "show jax's own frames in tracebacks"),
}
STEP = "step"  # the learner's jitted function
Report = Callable[[dict[str, Any]], None]
log = logging.getLogger(__name__)


def add_debug_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the switches."""
    for option, (_, _, what) in SWITCHES.items():
        parser.add_argument(f"--{option}", action="store_true", help=what)
    parser.add_argument(
        "--show-sharding",
        action="store_true",
        help="after the first update, how each kind of array lies on the devices",
    )
    parser.add_argument(
        "--profile", type=int, metavar="N", help="trace N updates after the first, into RUN/profile"
    )


@contextlib.contextmanager
def debugged(args: argparse.Namespace, report: Report) -> Iterator[Report]:
    """Sets the switches, and gives `report` with what they do after each update.

    A learner that is compiled again after its first update is warned about.

    Raises:
      ConfigError: `--profile` is below 1.
    """
    import jax

    from nca_trader.errors import ConfigError

    if args.profile is not None and args.profile < 1:
        raise ConfigError(f"--profile {args.profile}: trace at least one update.")
    settings = {
        name: value
        for option, (name, value, _) in SWITCHES.items()
        if getattr(args, option.replace("-", "_"))
    }
    before = {name: getattr(jax.config, name) for name in settings}
    watch = Watch(args.profile or 0, f"{args.run_dir}/profile", args.show_sharding)
    jax.monitoring.register_event_duration_secs_listener(watch.heard)

    def after(row: dict[str, Any]) -> None:
        report(row)
        watch.updated(row["update"])

    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        yield after
    finally:
        watch.close()
        for name, value in before.items():
            jax.config.update(name, value)


class Watch:
    """Counts compilations of the learner, and traces some of its updates."""

    def __init__(self, profile: int, folder: str, show_sharding: bool):
        self._profile, self._folder, self._show = profile, folder, show_sharding
        self._updates = self._compiled = self.retraces = 0
        self._tracing = self._closed = False

    def heard(self, event: str, duration_secs: float, **facts: object) -> None:
        """Takes an event of jax."""
        name = str(facts.get("fun_name", "")).removeprefix("jit(").removesuffix(")")
        if event.endswith("/backend_compile_duration") and name == STEP and not self._closed:
            self._compiled += 1

    def updated(self, update: int) -> None:
        """Another update is done, number `update` of the run."""
        import jax

        self._updates += 1
        if self._updates > 1 and self._compiled:
            self.retraces += self._compiled
            say = "update %d compiled the learner again (%d times so far): a shape, a type or a "
            log.warning(say + "sharding changed; --log-compiles tells which", update, self.retraces)
        self._compiled = 0
        if self._updates == 1 and self._show:
            print("\n".join(placed()))
        if self._updates == 1 and self._profile:
            jax.profiler.start_trace(self._folder)
            self._tracing = True
        elif self._updates == 1 + self._profile:
            self._stop_trace()

    def close(self) -> None:
        """Ends a trace that is not full; counts no more, as jax keeps its listeners."""
        self._stop_trace()
        self._closed = True

    def _stop_trace(self) -> None:
        import jax

        if self._tracing:
            self._tracing = False
            jax.profiler.stop_trace()
            print(f"profile of the updates after the first: {self._folder}")


def placed() -> list[str]:
    """A line for each shape, type and sharding of the arrays that live on the devices."""
    import jax

    kinds = Counter(
        (array.nbytes, f"{array.dtype}{list(array.shape)}", str(array.sharding))
        for array in jax.live_arrays()
    )
    ordered = sorted(kinds.items(), reverse=True)
    return [f"{number} x {what}  {where}" for (_, what, where), number in ordered]
