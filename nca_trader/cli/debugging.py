"""Switches for finding a fault or a delay in what a command runs on the device."""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nca_trader.learner.programs import Compilations

SWITCHES = {  # option: the setting of jax, its value, what it does
    "debug-nans": ("jax_debug_nans", True, "stop at the first dropped update or NaN outside one"),
    "debug-infs": ("jax_debug_infs", True, "the same, for infinities outside an update too"),
    "disable-jit": ("jax_disable_jit", True, "run operation by operation, as Python; very slow"),
    "log-compiles": ("jax_log_compiles", True, "log each program that is compiled"),
    "full-traceback": ("jax_traceback_filtering", "off", "show jax's own frames in tracebacks"),
}
Report = Callable[[dict[str, Any]], None]


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
def debugged(args: argparse.Namespace, report: Report) -> Iterator[Watch]:
    """Sets the switches, and gives `report` with what they do after each update.

    Raises:
      ConfigError: `--profile` is below 1.
      CheckFailed: with `--debug-nans` or `--debug-infs`, an update was dropped.
    """
    import jax

    from nca_trader.cloud import local
    from nca_trader.errors import ConfigError
    from nca_trader.learner.programs import Compilations

    if args.profile is not None:
        local(args.run_dir, "the trace of --profile")
    if args.profile is not None and args.profile < 1:
        raise ConfigError(f"--profile {args.profile}: trace at least one update.")
    settings = {
        name: value
        for option, (name, value, _) in SWITCHES.items()
        if getattr(args, option.replace("-", "_"))
    }
    before = {name: getattr(jax.config, name) for name in settings}
    with Compilations() as compiled:
        folder = f"{args.run_dir}/profile"
        strict = args.debug_nans or args.debug_infs
        watch = Watch(report, compiled, args.profile or 0, folder, args.show_sharding, strict)
        try:
            for name, value in settings.items():
                jax.config.update(name, value)
            yield watch
        finally:
            watch.close()
            for name, value in before.items():
                jax.config.update(name, value)


class Watch:
    """Takes the row of each update: reports it, traces some, and knows what compiling cost."""

    def __init__(
        self,
        report: Report,
        compiled: Compilations,
        profile: int,
        folder: str,
        show_sharding: bool,
        strict: bool,
    ):
        self._report, self._compiled = report, compiled
        self._profile, self._folder, self._show = profile, folder, show_sharding
        self._strict = strict
        self.rates: list[float] = []
        self._tracing = False

    def __call__(self, row: dict[str, Any]) -> None:
        """Another update is done, of this `row` of metrics.

        Raises:
          CheckFailed: it was dropped, and `--debug-nans` or `--debug-infs` is on.
        """
        import jax

        from nca_trader.errors import CheckFailed
        from nca_trader.learner.train import dropped_line

        self._report(row)
        if self._strict and row["skipped"]:
            raise CheckFailed(f"{dropped_line(row)}.")
        self.rates.append(row["steps_per_s"])
        if len(self.rates) == 1 and self._show:
            print("\n".join(placed()))
        if len(self.rates) == 1 and self._profile:
            jax.profiler.start_trace(self._folder)
            self._tracing = True
        elif len(self.rates) == 1 + self._profile:
            self._stop_trace()

    @property
    def figures(self) -> dict[str, float]:
        """Of this process: seconds of compiling, programs, those from the cache on disk.

        first_over_steady: how much longer the first update took than the median of the others.
        """
        first, *rest = self.rates or [0.0]
        ratio = {"first_over_steady": statistics.median(rest) / first} if rest else {}
        done = self._compiled
        found = {"compile_s": done.seconds, "programs": done.count, "cache_hits": done.hits}
        return found | ratio

    def close(self) -> None:
        """Ends a trace that is not full."""
        self._stop_trace()

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


def compile_line(figures: dict[str, float]) -> str:
    """What a process spent on compiling, of `Watch.figures`."""
    ratio = figures.get("first_over_steady")
    return (
        f"compiled {figures['programs']} programs in {figures['compile_s']:.1f} s, "
        f"{figures['cache_hits']} of them from the cache"
        + (f"; the first update took {ratio:,.0f} times a later one" if ratio else "")
    )
