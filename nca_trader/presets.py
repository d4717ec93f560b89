"""Experiments as data: TOML files to frozen dataclasses, and back.

An experiment is env x agent x data. `EnvConfig` and `AgentConfig` hold the first two; every
field has its default and its range here. `nca_trader.toml` reads and writes them;
`nca_trader.envs.presets.load_env` and `nca_trader.agents.presets.load_agent` know them by name.
"""

from __future__ import annotations

import dataclasses

from nca_trader.ranges import between, divides, multiple, one_of, refuse, whole
from nca_trader.types import Costs

DEFAULT_FEATURES = (
    "return_1",
    "return_5",
    "return_20",
    "return_60",
    "volatility_ratio",
    "rsi",
    "macd",
    "atr",
    "bollinger",
    "volume",
    "range",
    "drawdown",
    "day_of_week_sin",
    "day_of_week_cos",
    "day_of_year_sin",
    "day_of_year_cos",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvConfig:
    """One trading environment: what is seen, what may be done, what it costs.

    Attributes:
      features: names from `nca_trader.data.features.FEATURES`, in order.
      fill: "next_open" fills at the open of the bar after the decision; "close" at the close
        that was seen, which no one can trade in life, so reports say so.
      order: "on_change" trades when the ordered target changes; "rebalance" every bar.
      short: True gives the actions short, flat, long; False gives flat, long.
      size: the weight that long means in each asset; None is 1 / number of assets.
      max_gross: cap on the sum of absolute target weights; None is no cap.
      costs: commission and slippage as fractions.
      episode_bars: bars of an episode, a multiple of the learner's segment; None is one segment.
      random_start: draw the account's first weight from the actions; False starts flat.
      ruin_floor: equity, as a fraction of the start's, at or below which an account is ruined.
    """

    features: tuple[str, ...] = DEFAULT_FEATURES
    fill: str = "next_open"
    order: str = "on_change"
    short: bool = True
    size: float | None = None
    max_gross: float | None = 1.0
    costs: Costs = Costs()
    episode_bars: int | None = None
    random_start: bool = True
    ruin_floor: float = 1e-3

    def __post_init__(self):
        problems = [
            *one_of(self, "fill", ("next_open", "close")),
            *one_of(self, "order", ("on_change", "rebalance")),
            *between(self, "(0, 1)", "ruin_floor"),
        ]
        repeated = sorted({name for name in self.features if self.features.count(name) > 1})
        if repeated:
            problems.append(f"features={repeated} are named twice; name each feature once.")
        if not self.features:
            problems.append('features=() is empty; name at least one, e.g. "return_1".')
        for name in ("size", "max_gross"):
            if getattr(self, name) is not None:
                problems += between(self, "(0, inf)", name)
        if self.episode_bars is not None:
            problems += whole(self, 2, "episode_bars")
        refuse(problems)
        if self.size is not None and self.max_gross is not None and self.size > self.max_gross:
            refuse([f"size={self.size} is above max_gross={self.max_gross}; raise max_gross."])


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """The neural cellular automaton.

    Attributes:
      channels: C, state channels of a cell. hidden: H, width of the rule.
      steps: K, updates of every cell. dilations: bars between taps at step 1, 2, ...; repeated
        if K is longer. The receptive field is 1 + 2 * sum(dilations over K steps) bars.
      neighbours: what a cell sees of other assets: "none", "ring" (left and right), "all" (mean).
      leak: fraction of its state a cell forgets a step; bounds the state by 1 / leak.
      feature_clip: features are clipped to plus or minus this before the first layer.
      head_hidden: width of the readout's hidden layer.
    """

    kind: str = "nca"
    channels: int = 16
    hidden: int = 64
    steps: int = 5
    dilations: tuple[int, ...] = (1, 2, 4, 8, 16)
    neighbours: str = "none"
    leak: float = 0.1
    feature_clip: float = 5.0
    head_hidden: int = 32

    def __post_init__(self):
        problems = [
            *one_of(self, "kind", ("nca",)),
            *whole(self, 1, "channels", "hidden", "steps", "head_hidden"),
            *one_of(self, "neighbours", ("none", "ring", "all")),
            *between(self, "(0, 1]", "leak"),
            *between(self, "(0, inf)", "feature_clip"),
        ]
        if not self.dilations or any(type(d) is not int or d < 1 for d in self.dilations):
            problems.append(
                f"dilations={self.dilations} must be one or more whole numbers of at least 1."
            )
        refuse(problems)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """Proximal policy optimisation over segments of bars.

    Attributes:
      steps: environment steps of the whole run, rounded up to whole updates.
      num_segments: segments of one update, over all devices.
      segment_length: L, decisions along a segment. envs_per_segment: E, accounts on a segment.
      logical_shards: groups within which minibatches are drawn, so that a seed means the same
        run on any number of devices; a multiple of the device count.
      num_epochs, num_minibatches: passes over an update's data, and pieces of each pass.
      discount: gamma. gae_lambda: lambda. clip_epsilon: the ratio is clipped to
        1 +- it, the value to its old one +- it, in units of the targets' spread.
      value_coef, entropy_coef: weights in the loss.
    """

    steps: int = 2_000_000
    num_segments: int = 64
    segment_length: int = 128
    envs_per_segment: int = 4
    logical_shards: int = 8
    num_epochs: int = 4
    num_minibatches: int = 4
    discount: float = 0.99
    gae_lambda: float = 0.95
    clip_epsilon: float = 0.2
    value_coef: float = 0.5
    entropy_coef: float = 0.01

    def __post_init__(self):
        counts = ("num_segments", "segment_length", "envs_per_segment", "logical_shards")
        refuse(
            whole(self, 1, *counts, "num_epochs", "num_minibatches"),
            between(self, "(0, 1]", "discount"),
            between(self, "[0, 1]", "gae_lambda"),
            between(self, "(0, 1)", "clip_epsilon"),
            between(self, "[0, inf)", "value_coef", "entropy_coef"),
        )
        refuse(multiple("num_segments", self.num_segments, "logical_shards", self.logical_shards))
        # Minibatches are drawn within a logical shard, so that no segment crosses devices.
        each = self.num_segments // self.logical_shards
        of = "num_segments / logical_shards"
        refuse(divides("num_minibatches", self.num_minibatches, of, each))


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW behind a global-norm clip, and its learning-rate schedule.

    Attributes:
      learning_rate: peak. schedule: "constant", "linear" or "cosine", down to 0 at the run's end.
      warmup_updates: gradient steps of linear warm-up from 0.
      b1, b2, eps, weight_decay: AdamW's; decay is off for biases.
      max_grad_norm: cap on the norm of the whole gradient, over all devices.
    """

    learning_rate: float = 1e-3
    schedule: str = "constant"
    warmup_updates: int = 20
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-5
    weight_decay: float = 1e-4
    max_grad_norm: float = 0.5

    def __post_init__(self):
        refuse(
            one_of(self, "schedule", ("constant", "linear", "cosine")),
            whole(self, 0, "warmup_updates"),
            between(self, "(0, inf)", "learning_rate", "eps", "max_grad_norm"),
            between(self, "[0, 1)", "b1", "b2"),
            between(self, "[0, inf)", "weight_decay"),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Attributes: matmul: "float32" or "bfloat16" operands of the rule's matrix products."""

    matmul: str = "float32"

    def __post_init__(self):
        refuse(one_of(self, "matmul", ("float32", "bfloat16")))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Attributes: devices: devices of the `data` axis; one device is a mesh of one."""

    devices: int = 1

    def __post_init__(self):
        refuse(whole(self, 1, "devices"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Attributes: every: updates between checkpoints. keep: newest checkpoints that stay."""

    every: int = 10
    keep: int = 3

    def __post_init__(self):
        refuse(whole(self, 1, "every", "keep"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """An agent: its policy and how it learns. `num_seeds` agents train in one program."""

    num_seeds: int = 1
    policy: PolicyConfig = PolicyConfig()
    learner: LearnerConfig = LearnerConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    precision: PrecisionConfig = PrecisionConfig()
    mesh: MeshConfig = MeshConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    def __post_init__(self):
        refuse(whole(self, 1, "num_seeds"))
        shards, devices = self.learner.logical_shards, self.mesh.devices
        refuse(multiple("learner.logical_shards", shards, "mesh.devices", devices))
