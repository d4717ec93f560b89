"""The result of one agent on one market, as the row of `--json` and as a line of a table."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nca_trader.config.records import finite
from nca_trader.envs import FROZEN
from nca_trader.machine import cores, make_directory
from nca_trader.optimum.measure import Earnings
from nca_trader.runs.folder import Lines, now

# The fraction of the optimum to reach. The nano preset does with every seed.
DEFAULT_BAR = 0.95
BARS = dict.fromkeys(FROZEN, DEFAULT_BAR) | {
    "ou_log": 0.98,
    "sine": 0.99,
    "martingale": 0.0,  # there is nothing to earn: the agent must hardly trade
}
# What the optimal policy reaches on the best linear estimate of the state from a bar's features,
# where an average hides part of it. Elsewhere the state follows from the bars so far.
OBSERVED = {
    "ou_mid": 0.995, "ou_log": 0.996, "ou_expensive": 0.996, "ar1_weak": 0.999,
    "garleanu_pedersen": 0.995, "factor_panel": 0.979,
}  # fmt: skip
MOST_TURNOVER = 0.01  # per step, where nothing can be earned
# In addition to the fraction: of agents that lack something, and of ones that learn nothing.
WITHOUT = ("untrained", "no_history", "no_neighbours", "cash", "random", "constant")
NOTHING = Earnings(*[math.nan] * 7)
PACKAGES = ("nca_trader", "jax")

Row = dict[str, Any]


class Point(NamedTuple):
    """A point of a curve.

    Attributes:
      seconds: of training.
      steps: environment steps done; None where they are not known.
      reached: by then.
    """

    seconds: float
    steps: int | None
    reached: Earnings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """The result of one seed of the agent on one market.

    Attributes:
      market: name of the environment.
      seed: of the market's draws, and of the agent where it was trained here.
      curve: from the untrained agent on; the last point counts. Between these two, points are of
        the first `measure.GROUP` pieces of the path. Of an agent from outside the only point,
        whose seconds are NaN.
      controls: curves by name, see `WITHOUT`; those of a market are trained once, with the first
        seed.
      entry: of the agent: kind, name, library, version and digest.
      given: of an agent from outside, whether its seed was given, and so known to it.
      reason: why the agent cannot play this market; "" where it can.
    """

    market: str
    seed: int | None
    curve: list[Point]
    controls: dict[str, list[Point]] = dataclasses.field(default_factory=dict)
    entry: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    given: bool | None = None
    reason: str = ""

    @property
    def bar(self) -> float:
        """The fraction to reach."""
        return BARS.get(self.market, DEFAULT_BAR)

    @property
    def reached(self) -> Earnings:
        """The result of the trained agent."""
        return self.curve[-1].reached

    @property
    def earns(self) -> bool:
        """Whether the market has something to earn; if not, the agent must hardly trade."""
        return not math.isnan(self.reached.fraction)

    @property
    def trained(self) -> bool:
        """Whether the agent was trained here, and has a curve."""
        return not math.isnan(self.curve[-1].seconds)

    @property
    def without(self) -> dict[str, float | None]:
        """Fractions of the untrained agent and of the controls; None where not applicable."""
        untrained = {"untrained": self.curve[:1]} if self.trained else {}
        curves = {**untrained, **self.controls}
        return {
            name: finite(curves[name][-1].reached.fraction) if name in curves else None
            for name in WITHOUT
        }

    @property
    def observed(self) -> float | None:
        """The fraction of the best rule on the observation; None where nothing is to be earned."""
        return OBSERVED.get(self.market, 1.0) if self.market in FROZEN and self.bar else None

    @property
    def complaint(self) -> str:
        """The reason why the bar is missed; "" where it is reached."""
        if self.reason:
            return f"n/a: {self.reason}"
        reached, without = self.reached, self.without
        # The bar has to require training: with its optimum in the middle of the allowed range,
        # `merton` was passed by untrained agents.
        agents = {"untrained": "the untrained agent", "random": "a random agent"}
        agents["constant"] = "a position that never changes"
        for name, what in agents.items():
            fraction = without[name]
            if fraction is not None and fraction >= self.bar:
                return f"void: {what} reaches the bar"
        if reached.looks_ahead:
            return "earns more than is possible: it looks ahead"
        if reached.bankrupt:
            return "goes bankrupt"
        if not self.earns:
            too_much = reached.turnover >= MOST_TURNOVER
            return f"trades {reached.turnover:.3f} per step" if too_much else ""
        return "" if reached.fraction >= self.bar else "below the bar"

    @property
    def passed(self) -> bool:
        """Whether the bar is reached, and no more is earned than is possible."""
        return not self.complaint

    @property
    def seconds_to_bar(self) -> float | None:
        """Seconds of training after which the bar was first reached; None if it was not."""
        over = (p.seconds for p in self.curve if p.reached.fraction >= self.bar)
        return finite(next(over, math.nan))

    def row(self) -> dict[str, Any]:
        """Return the row of `--json`; fraction is None where there is nothing to earn."""
        last, reached = self.curve[-1], self.reached
        return finite(
            {
                "market": self.market,
                "fraction": reached.fraction,
                **self.without,
                "observed": self.observed,
                "bar": self.bar,
                "passed": self.passed,
                "steps": last.steps,
                "seconds": last.seconds,
                "seed": self.seed,
                "error": reached.error,
                "seconds_to_bar": self.seconds_to_bar,
                "turnover": reached.turnover,
                "complaint": self.complaint,
                "seed_given": self.given,
                "entry": dict(self.entry),
                "digest": FROZEN.get(self.market),
                "curve": [
                    [p.steps, p.seconds, p.reached.fraction, p.reached.error] for p in self.curve
                ],
            }
        )

    def __str__(self) -> str:
        """Return the result in one line of a table."""
        last, reached, when = self.curve[-1], self.reached, self.seconds_to_bar
        if self.reason:
            return f"{self.market:<18} {self.complaint}"
        found = f"trades {reached.turnover:.4f} per step, bar {MOST_TURNOVER:g}"
        if self.earns and not reached.bankrupt:
            found = f"{reached.fraction:z7.1%} +-{reached.error:.1%}, bar {self.bar:.0%}"
        parts = [f"{self.market:<18} seed {self.seed:<7} {found:<30}"]
        if self.trained:
            soon = "" if when is None else f", bar after {when:.1f} s"
            steps = (last.steps or 0) / 1e6
            parts.append(f"{steps:5.2f} M steps {last.seconds:6.1f} s{soon:<20}")
        parts.append(self.complaint or "ok")
        known = {"best observed": self.observed, **self.without}
        known = {name: fraction for name, fraction in known.items() if fraction is not None}
        parts += [f"  {name} {fraction:z.1%}" for name, fraction in known.items()]
        return " ".join(parts)


def about() -> Row:
    """Return what a row says of where it was made: the date, the machine and versions."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = next(iter(names), platform.processor() or platform.machine())
    return {
        "date": now(),
        "machine": f"{processor}, {cores()} cores",
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
    }


def rows_of(proofs: Sequence[Score], agent: str, controls: bool = True) -> list[Row]:
    """Return a row for each proof of an agent of this name, then one for each market's controls."""
    named = [(agent, proof) for proof in proofs]
    # The proofs of a market share its controls.
    for proof in {proof.market: proof for proof in reversed(proofs)}.values() if controls else ():
        for name, curve in proof.controls.items():
            named.append((name, dataclasses.replace(proof, curve=curve, controls={})))
    return [{"name": name} | proof.row() | about() for name, proof in named]


def add_rows(path: str | os.PathLike[str], rows: Sequence[Row]) -> None:
    """Add rows to a file in .jsonl, which is made where it is not there.

    Raises:
      StateError: it cannot be written there.
    """
    path = Path(path)
    make_directory(path.parent)
    for row in rows:
        Lines(path).append(json.dumps(row))
