"""How agents that train together may differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from nca_trader.config.ranges import between, refuse, strict, whole, without_effect


@strict
@dataclasses.dataclass(frozen=True, kw_only=True)
class PopulationConfig:
    """How the `num_seeds` agents of a run differ, and how the worst follow the best.

    Attributes:
      learning_rate, entropy_coef, clip_epsilon, gae_lambda, discount: (low, high) from which each
        agent draws its own, evenly in its log (gae_lambda, discount: in the log of 1 - x); "none"
        takes the agent's.
      every: updates between two exploits, when the worst agents go on as copies of the best;
        0 lets each agent go its own way.
      share: of the agents that are replaced. perturb: factor by which a copy's hyper-parameters
        are multiplied or divided, within their ranges.
    """

    learning_rate: tuple[float, ...] | None = None
    entropy_coef: tuple[float, ...] | None = None
    clip_epsilon: tuple[float, ...] | None = None
    gae_lambda: tuple[float, ...] | None = None
    discount: tuple[float, ...] | None = None
    every: int = 0
    share: float = 0.25
    perturb: float = 1.2

    def __post_init__(self):
        problems = [
            *whole(self, 0, "every"),
            *between(self, "(0, 0.5]", "share"),
            *between(self, "(1, inf)", "perturb"),
        ]
        for name in ("learning_rate", "entropy_coef", "clip_epsilon", "gae_lambda", "discount"):
            ends = getattr(self, name)
            most = float("inf") if name in ("learning_rate", "entropy_coef") else 1.0
            if ends is not None and not (len(ends) == 2 and 0.0 < ends[0] <= ends[1] < most):
                problems.append(
                    f"{name}={ends} is not a range of numbers between 0 and {most}; give "
                    "(low, high)."
                )
        refuse(problems, without_effect(self))

    @staticmethod
    def idle(given: Any) -> Iterator[tuple[str, str]]:
        """Fields without effect given the values `given`, and what they need."""
        if given.every == 0:
            yield "share", "every of at least 1"
            yield "perturb", "every of at least 1"

    @property
    def ranged(self) -> bool:
        """Whether agents differ in more than their seeds."""
        ends = (self.learning_rate, self.entropy_coef, self.clip_epsilon, self.gae_lambda)
        return any((*ends, self.discount))
