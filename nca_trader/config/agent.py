"""Schema of an agent: its policy, where it runs, and how these and its learning must agree."""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Iterator
from typing import Any, ClassVar

from nca_trader.config.extensions import check_known, origin_of, terms_of
from nca_trader.config.learning import CurriculumConfig, LearnerConfig, OptimizerConfig
from nca_trader.config.ranges import (
    between,
    multiple,
    one_of,
    refuse,
    whole,
    without_effect,
)
from nca_trader.config.strict import strict

ENSEMBLES = ("mean", "agreement")
KINDS = ("nca", "mlp", "gru")
# The fields that only some kinds of policy have.
KINDS_WITH = {
    "hidden": ("nca", "mlp"),
    "window": ("mlp", "gru"),
    **dict.fromkeys(("steps", "dilations", "leak", "fire_rate", "remat"), ("nca",)),
    **dict.fromkeys(("neighbours", "num_neighbours"), ("nca",)),
}
NEIGHBOURS = ("none", "ring", "nearest", "all")
# The rules of `nca_trader.strategies.rules`, by name.
RULES = (
    *("always_flat", "breakout", "buy_and_hold", "cross_sectional_momentum", "equal_weight"),
    *("forecaster", "half_and_half", "mean_reversion", "momentum", "random", "sma_cross"),
    *("time_series_momentum", "tuned_sma", "volatility_hold"),
)
# Far above what trains: a mistyped or damaged number would take all memory or never end.
MAX_STEPS, MAX_WIDTH = 1024, 1 << 16
MAX_AGENTS = 4096  # of a run, whose file may hold any number
MAX_NEIGHBOURS = 16  # that an environment ranks for each asset
LEAST_SEEDS = 3  # of a demo and a walk-forward: one agent does not show how much a seed matters


@strict
@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """The encoder, which turns bars into cells, and the policy head.

    Attributes:
      kind: "nca", the neural cellular automaton; "mlp", a feed-forward network over the last
        `window` bars of an asset (1 shows it the newest bar only); "gru", a gated recurrent unit
        over them. A field that a kind does not have must be left at its default. "module:name" is
        your own encoder, see `nca_trader.agents.encoder`.
      channels: C, state channels of a cell. hidden: H, width of the hidden layer. An MLP may have
        0, no hidden layer; a GRU has none.
      window: bars that "mlp" and "gru" see: their receptive field.
      steps: K, updates of every cell. dilations: bars between taps at step 1, 2, ...; repeated
        if K is longer. The receptive field is 1 + 2 * sum(dilations over K steps) bars. Both are
        of the NCA.
      neighbours: of the NCA, what a cell sees of other assets: "none"; "ring", the previous and
        the next one; "nearest", the `num_neighbours` whose returns, up to five bars earlier,
        correlate most with its own over the training bars, each with its own weights; "all", the
        mean.
      leak: of the NCA, fraction of its state that a cell forgets per step; it bounds the state by
        1 / leak.
      fire_rate: of the NCA, share of cell updates that take place in training, drawn by bar,
        asset and step, and divided by it; 1 is all. Backtest and paper make every update.
      remat: of the NCA, what of the forward pass is computed again for the gradient, to save
        memory: "none"; "step", all but the states between steps; "every:n", all but the states
        between blocks of n steps; "dots", all but the results of matrix products.
      feature_clip: features are clipped to plus or minus this before the first layer.
      head_hidden: width of the policy head's hidden layer.
      base: "none", or the rule that the policy stands on: a rule's name, also with values as in
        "half_and_half(lookback=500)"; "module:name", your own strategy; or a sum of rules, as in
        "2/3 * half_and_half + 1/3 * momentum". What is ordered is the rule's target and a tilt, see
        `nca_trader.agents.base`. Needs `actions = "weights"`.
      tilt_limit: of a tilt, in full positions.
      tilt_penalty: price of a tilt in each bar, in units of the reward: `tilt_penalty` times the
        size of a full position times the sum of the squared tilts, each in [-1, 1].
    """

    OWN: ClassVar = {"kind": "policies", "base": "strategies"}  # may name your own code

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
    base: str = "none"
    tilt_limit: float = 0.5
    tilt_penalty: float = 0.0

    def __post_init__(self):
        # Of a rule's name with values, the name is checked here, and the values where it is called.
        named = [name for _, name in terms_of(str(self.base))]
        bare = [
            types.SimpleNamespace(base=name.partition("(")[0])
            for name in named
            if origin_of("strategies", name) is None
        ]
        some = ("none", *RULES) if named == [self.base] else RULES
        sums = [name.base for name in bare if "*" in name.base]
        bare = [] if sums else bare
        counts = ("channels", "window", "num_neighbours", "head_hidden")
        problems = [
            *check_known(self, "kind", "policies", KINDS),
            *whole(self, 1, *counts, most=MAX_WIDTH),
            *whole(self, 0 if self.kind == "mlp" else 1, "hidden", most=MAX_WIDTH),
            *whole(self, 1, "steps", most=MAX_STEPS),
            *one_of(self, "neighbours", NEIGHBOURS),
            *between(self, "(0, 1]", "leak", "fire_rate"),
            *between(self, "(0, inf)", "feature_clip"),
            *(x for each in bare for x in check_known(each, "base", "strategies", some)),
            *(f"base={x!r}: write a sum as '0.5 * RULE + -0.5 * RULE'." for x in sums),
            *between(self, "(0, 2]", "tilt_limit"),
            *between(self, "[0, inf)", "tilt_penalty"),
            *without_effect(self),
        ]
        # A comparison with a text would raise a TypeError, so only where the types are right.
        if not problems and self.num_neighbours > MAX_NEIGHBOURS:
            problems.append(
                f"num_neighbours={self.num_neighbours} is above {MAX_NEIGHBOURS}, which is how "
                "many are ranked; give fewer, or neighbours='all'."
            )
        # By type: True is an int, and 1.0 cannot be a shift.
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
        """Yield each field without effect given the values `given`, and what it needs."""
        if given.base == "none":
            yield from ((name, "base=a rule") for name in ("tilt_limit", "tilt_penalty"))
        if given.kind not in KINDS:
            return  # what your own kind reads is seen where its policy is made
        for name, kinds in KINDS_WITH.items():
            if given.kind not in kinds:
                yield name, f"kind={' or '.join(map(repr, kinds))}"
        if given.kind == "nca" and given.neighbours in {*NEIGHBOURS} - {"nearest"}:
            yield "num_neighbours", "neighbours='nearest'"


# The hyper-parameters that agents of a population may draw, and where their ranges end. Those that
# change the shape of an array are not among them: all agents train in one program.
RANGED = {
    "learning_rate": float("inf"),
    "entropy_coef": float("inf"),
    "clip_epsilon": 1.0,
    "gae_lambda": 1.0,
    "discount": 1.0,
}


def num_slots(num_assets: int, config: PolicyConfig) -> int:
    """Return how many neighbours have weights of their own; a ring of two has one."""
    # No slot shows the asset itself, so there are at most as many slots as other assets.
    if config.neighbours == "nearest":
        return min(config.num_neighbours, num_assets - 1)
    # "all" shows one mean, whatever the number of assets.
    return min({"none": 0, "ring": 2, "all": 1}[config.neighbours], num_assets - 1)


@strict
@dataclasses.dataclass(frozen=True, kw_only=True)
class PopulationConfig:
    """How the `num_seeds` agents of a run differ.

    Attributes:
      learning_rate, entropy_coef, clip_epsilon, gae_lambda, discount: (low, high) from which each
        agent draws its own, evenly in its log (gae_lambda, discount: in the log of 1 - x); "none"
        takes the agent's. Those that `learner.advantages` does not use are refused.
    """

    learning_rate: tuple[float, ...] | None = None
    entropy_coef: tuple[float, ...] | None = None
    clip_epsilon: tuple[float, ...] | None = None
    gae_lambda: tuple[float, ...] | None = None
    discount: tuple[float, ...] | None = None

    def __post_init__(self):
        problems = []
        # Ends are above 0 and below `most`, because values are drawn in the log of x or of 1 - x.
        for name, most in RANGED.items():
            ends = getattr(self, name)
            if ends is not None and not (len(ends) == 2 and 0.0 < ends[0] <= ends[1] < most):
                problems.append(
                    f"{name}={ends} is not a range of numbers between 0 and {most}; give "
                    "(low, high)."
                )
        refuse(problems)

    @property
    def ranged(self) -> bool:
        """Whether agents differ in more than their seeds."""
        return any(getattr(self, name) for name in RANGED)


@strict
@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """What the encoder computes in bfloat16; parameters, sums, policy head and losses are float32.

    The usual presets: f32 is all "float32"; bf16 has `matmul = "bfloat16"`; float32 parameters
    with bfloat16 compute has `compute = "bfloat16"` as well. See docs/concepts/precision.md.

    Attributes:
      matmul: "float32" or "bfloat16", of the operands of matrix products; they sum in float32.
      compute: "float32" or "bfloat16", of the cells between products; "bfloat16" takes a matmul
        of "bfloat16".
      params: "float32", of the parameters as they are learnt and saved.
    """

    matmul: str = "float32"
    compute: str = "float32"
    params: str = "float32"

    def __post_init__(self):
        for name in ("matmul", "compute", "params"):
            if getattr(self, name) == "float16":
                refuse(
                    f"{name}='float16' ends at 65,504 and at 6e-8: gradients leave that range, "
                    "and the loss is not scaled to keep them there; take 'bfloat16', whose range "
                    "is float32's."
                )
        # Refused in words of its own, since other packages take it.
        if self.params == "bfloat16":
            refuse(
                "params='bfloat16' would lose updates below 1/256 of a weight, unless float32 "
                "values were kept as well, and then it saves nothing; take 'float32'."
            )
        refuse(
            one_of(self, "matmul", ("float32", "bfloat16")),
            one_of(self, "compute", ("float32", "bfloat16")),
            one_of(self, "params", ("float32",)),
        )
        if self.compute == "bfloat16" and self.matmul == "float32":
            refuse(
                "compute='bfloat16' rounds what products of matmul='float32' would read; take "
                "matmul='bfloat16' with it."
            )


@strict
@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """The devices of a run, as a mesh of axes (data, fsdp, model).

    Attributes:
      devices: all of them; None is data * fsdp * model. By itself it is the size of `data`.
      data: parts of a batch whose devices share nothing else; None is what `devices` leaves.
      fsdp: devices that share parameters and optimiser state as well, a part kept by each.
      model: devices that share the width of hidden layers.
      deterministic: a seed ends in the same bits on any number of devices, at the price of more
        traffic and smaller products; `data` alone. Without it the end is the same to rounding.
    """

    devices: int | None = None
    data: int | None = None
    fsdp: int = 1
    model: int = 1
    deterministic: bool = False

    def __post_init__(self):
        refuse(whole(self, 1, "devices", "data", "fsdp", "model"))
        inner = self.fsdp * self.model
        # `devices` and `data` may both be given if they agree.
        if self.devices is not None and self.devices != (self.data or 1) * inner:
            if self.data is not None:
                refuse(
                    f"devices={self.devices}, but data * fsdp * model = {self.data * inner}; give "
                    "one of devices and data."
                )
            refuse(multiple("devices", self.devices, "fsdp * model", inner))
        # Sums over the other axes are made by collectives, whose order the compiler chooses.
        if self.deterministic and inner > 1:
            refuse(
                f"deterministic=true is of the data axis alone, but fsdp={self.fsdp} and "
                f"model={self.model}; set both to 1, or leave it out."
            )

    @property
    def axes(self) -> tuple[int, int, int]:
        """The sizes of data, fsdp and model."""
        inner = self.fsdp * self.model
        # What fsdp and model leave of the devices is data.
        return self.data or (self.devices or inner) // inner, self.fsdp, self.model


@strict
@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When a run saves its state, and when it rolls back to it.

    Attributes:
      every: updates between checkpoints. every_seconds: seconds between them, whichever comes
        first; 0 is never, of either. One is also saved at the end, and when asked to stop. A
        checkpoint takes about 0.1 s of one core, while training goes on.
      keep: newest checkpoints that stay.
      max_skips: updates dropped in a row (their gradients were not finite) after which the run
        rolls back to its newest checkpoint, with another key; NaN in parameters does so at once.
      max_rollbacks: times that it rolls back to the same checkpoint before it gives up.
    """

    every: int = 0
    every_seconds: float = 30.0
    keep: int = 3
    max_skips: int = 5
    max_rollbacks: int = 3

    def __post_init__(self):
        refuse(
            whole(self, 1, "keep", "max_skips"),
            whole(self, 0, "every", "max_rollbacks"),
            between(self, "[0, inf)", "every_seconds"),
        )


@strict
@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectionConfig:
    """How a run that is given a selection span finds the update at which to stop.

    Attributes:
      scores: how often in a whole run the mean agent is scored on the span, evenly.
      patience: scores in a row without a better one after which training ends. At least `scores`
        never ends it early.
    """

    scores: int = 20
    patience: int = 6

    def __post_init__(self):
        refuse(whole(self, 1, "scores", "patience"))


@strict
@dataclasses.dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """An agent: its policy and how it learns. `num_seeds` agents train in one program.

    Attributes:
      num_seeds: S agents that differ in their seed; what they order together is traded.
      ensemble: how: "mean", the mean m of their target weights; "agreement", of two agents or
        more, the mean times `m^2 / mean of squares`, by asset, so that it is smaller the more they
        disagree.
      policy: the network that encodes bars, and its head.
      learner: the size of an update, the estimator of advantages, and the weights of the loss.
      optimizer: AdamW, its schedule, and the clip of gradients.
      curriculum: costs and volatility that grow to their true size in training.
      population: ranges from which each of the S agents draws its hyper-parameters.
      precision: data types of products, activations and parameters.
      mesh: devices, and how parameters and batches lie on them.
      checkpoint: how often to save, and when to return to an earlier state.
      selection: scores on a selection span, see `train(select=...)`.

    Example:
      >>> import dataclasses
      >>> agent = AgentConfig(policy=PolicyConfig(channels=32))
      >>> dataclasses.replace(agent, num_seeds=4).policy.channels
      32
    """

    num_seeds: int = 1
    ensemble: str = "mean"
    policy: PolicyConfig = PolicyConfig()
    learner: LearnerConfig = LearnerConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    population: PopulationConfig = PopulationConfig()
    precision: PrecisionConfig = PrecisionConfig()
    mesh: MeshConfig = MeshConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    selection: SelectionConfig = SelectionConfig()

    def __post_init__(self):
        refuse(
            whole(self, 1, "num_seeds", most=MAX_AGENTS),
            one_of(self, "ensemble", ENSEMBLES),
            without_effect(self),
        )
        # A rule of two tables, so neither can check it by itself.
        if self.learner.replay_slots and not self.optimizer.ema_decay:
            refuse(
                "learner.replay_slots needs an average of the parameters to bootstrap values; "
                "give optimizer.ema_decay, e.g. 0.99."
            )
        data, fsdp, _ = self.mesh.axes
        name = "mesh.devices" if self.mesh.model * fsdp == 1 else "mesh's data * fsdp"
        # The batch is split over data and fsdp; `model` splits layers.
        shards = self.learner.logical_shards
        refuse(multiple("learner.logical_shards", shards, name, data * fsdp))

    @staticmethod
    def idle(given: Any) -> Iterator[tuple[str, str]]:
        """Yield each field without effect given the values `given`, and what it needs."""
        learner = {name: f"learner.{needs}" for name, needs in LearnerConfig.idle(given.learner)}
        several = "num_seeds of 2 or more"
        idle = dict.fromkeys(RANGED, several) if given.num_seeds == 1 else learner
        if given.num_seeds == 1:
            yield "ensemble", several
        yield from ((f"population.{name}", idle[name]) for name in RANGED if name in idle)
        if not given.learner.replay_slots:  # nothing else reads the average
            yield "optimizer.ema_decay", "learner.replay_slots"


def alone(agent: AgentConfig) -> AgentConfig:
    """Return the agent as one of its seeds trains by itself, outside their ensemble."""
    return dataclasses.replace(agent, num_seeds=1, ensemble="mean")
