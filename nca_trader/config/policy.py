"""What a policy may be: what encodes bars, how wide and deep it is, and the readout."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from nca_trader.config.ranges import between, one_of, refuse, strict, whole, without_effect

KINDS = ("nca", "mlp", "gru")
# The fields that not every kind has.
KINDS_WITH = {
    "hidden": ("nca", "mlp"),
    "window": ("mlp", "gru"),
    **dict.fromkeys(("steps", "dilations", "leak", "fire_rate", "remat"), ("nca",)),
    **dict.fromkeys(("neighbours", "num_neighbours"), ("nca",)),
}
NEIGHBOURS = ("none", "ring", "nearest", "all")
# Far above what trains; a mistyped or damaged number would take all memory or never end.
MAX_STEPS, MAX_WIDTH = 1024, 1 << 16
MAX_NEIGHBOURS = 16  # that an environment ranks for each asset


@strict
@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """What encodes bars into cells, and the readout.

    Attributes:
      kind: "nca", the neural cellular automaton; "mlp", a perceptron over the last `window` bars
        of an asset (1 is no history); "gru", a gated recurrent unit over them. A field that a kind
        does not have must be left at its default.
      channels: C, state channels of a cell. hidden: H, width of the hidden layer; of the
        perceptron it may be 0, no such layer; the recurrent unit has none.
      window: bars that "mlp" and "gru" see: their receptive field.
      steps: K, updates of every cell. dilations: bars between taps at step 1, 2, ...; repeated
        if K is longer. The receptive field is 1 + 2 * sum(dilations over K steps) bars. Both are
        of the automaton.
      neighbours: of the automaton, what a cell sees of other assets: "none"; "ring", the one
        before and the one after; "nearest", the `num_neighbours` most correlated ones over the
        training bars, each with its own weights; "all", the mean.
      leak: of the automaton, fraction of its state that a cell forgets a step; it bounds the
        state by 1 / leak.
      fire_rate: of the automaton, share of cell updates that take place in training, drawn by
        bar, asset and step, and divided by it; 1 is all. Backtest and paper make every update.
      remat: of the automaton, what of the forward pass is computed again for the gradient, to
        save memory: "none"; "step", all but the states between steps; "every:n", all but the
        states between blocks of n steps; "dots", all but the results of matrix products.
      feature_clip: features are clipped to plus or minus this before the first layer.
      head_hidden: width of the readout's hidden layer.
    """

    kind: str = "nca"
    channels: int = 16
    hidden: int = 64
    window: int = 63
    steps: int = 5
    dilations: tuple[int, ...] = (1, 2, 4, 8, 16)
    neighbours: str = "none"
    num_neighbours: int = 2
    leak: float = 0.1
    fire_rate: float = 1.0
    remat: str = "none"
    feature_clip: float = 5.0
    head_hidden: int = 32

    def __post_init__(self):
        counts = ("channels", "window", "num_neighbours", "head_hidden")
        problems = [
            *one_of(self, "kind", KINDS),
            *whole(self, 1, *counts, most=MAX_WIDTH),
            *whole(self, 0 if self.kind == "mlp" else 1, "hidden", most=MAX_WIDTH),
            *whole(self, 1, "steps", most=MAX_STEPS),
            *one_of(self, "neighbours", NEIGHBOURS),
            *between(self, "(0, 1]", "leak", "fire_rate"),
            *between(self, "(0, inf)", "feature_clip"),
            *without_effect(self),
        ]
        if not problems and self.num_neighbours > MAX_NEIGHBOURS:
            problems.append(
                f"num_neighbours={self.num_neighbours} is above {MAX_NEIGHBOURS}, which is how "
                "many are ranked; give fewer, or neighbours='all'."
            )
        if not self.dilations or any(type(d) is not int or d < 1 for d in self.dilations):
            problems.append(
                f"dilations={self.dilations} must be one or more whole numbers of at least 1."
            )
        elif max(self.dilations) > MAX_WIDTH:
            problems.append(
                f"dilations={self.dilations} hold {max(self.dilations)}; give at most {MAX_WIDTH}."
            )
        if not re.fullmatch(r"none|step|every:[1-9]\d*|dots", str(self.remat)):
            problems.append(
                f"remat={self.remat!r} is not known; it may be 'none', 'step', 'every:n' with n "
                "of at least 1, or 'dots'."
            )
        refuse(problems)

    @staticmethod
    def idle(given: Any) -> Iterator[tuple[str, str]]:
        """Fields without effect given the values `given`, and what they need."""
        if given.kind not in KINDS:
            return
        for name, kinds in KINDS_WITH.items():
            if given.kind not in kinds:
                yield name, f"kind={' or '.join(map(repr, kinds))}"
        if given.kind == "nca" and given.neighbours in {*NEIGHBOURS} - {"nearest"}:
            yield "num_neighbours", "neighbours='nearest'"
