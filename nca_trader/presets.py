"""Experiments as data: TOML files to frozen dataclasses, and back.

An experiment is env x agent x data. `EnvConfig` and `AgentConfig` hold the first two; every
field has its default and its range here. `nca_trader.toml` reads and writes them;
`nca_trader.envs.presets.load_env` and `nca_trader.agents.presets.load_agent` know them by name.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

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


MAX_NEIGHBOURS = 16  # that an environment ranks for each asset
REWARDS = ("log_return", "pnl", "differential_sharpe", "drawdown", "mean_variance", "crra")


def limit_problems(rules: Any) -> Iterator[str]:
    """What is wrong with the trading limits of an `EnvConfig`, or of an account's rules."""
    for name in ("max_gross", "max_net", "capital", "maintenance_margin", "max_participation"):
        if getattr(rules, name) is not None:
            high = "1]" if name in ("maintenance_margin", "max_participation") else "inf)"
            yield from between(rules, f"(0, {high}", name)
    yield from between(rules, "[0, inf)", "lot", "tick", "min_notional")
    yield from between(rules, "[0, 1]", "delist_haircut")
    if rules.delist_after is not None:
        yield from whole(rules, 1, "delist_after")


def capital_problems(rules: Any, costs: Costs) -> Iterator[str]:
    """Names what needs to know how much money is traded, where `capital` is not given."""
    if rules.capital is not None:
        return
    names = [name for name in ("lot", "tick", "min_notional") if getattr(rules, name)]
    names += ["max_participation"] * (rules.max_participation is not None)
    names += [f"costs.{name}" for name in ("fixed_fee", "impact") if getattr(costs, name)]
    if names:
        yield f"capital=None, but {', '.join(names)} need money; give capital, e.g. 100000."


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
      actions: "direction" orders short, flat or long; "orders" sells, holds or buys, which moves
        the last ordered target one step; "weights" orders any weight up to `size`.
      reward: of a step: "log_return" of equity; "pnl", `a r - c |da| - q/2 da^2 - k/2 a^2` of the
        ordered weight a, where c is commission + slippage + half_spread; "differential_sharpe";
        "drawdown"; "mean_variance"; "crra". See `nca_trader.envs.rewards` for each.
      pnl_returns: r of "pnl", "log" or "simple".
      risk_aversion: k of "pnl" and "mean_variance", the relative risk aversion of "crra".
      quadratic_cost: q of "pnl".
      drawdown_penalty: of "drawdown", a bar, times how far the log of equity is below its peak.
      sharpe_decay: of "differential_sharpe", the weight of a new bar in its moving moments.
      max_gross, max_net: caps on the sum of absolute target weights and on the absolute sum of
        them; the whole target is scaled to them; None is no cap.
      borrow: True lets buys exceed cash; False cuts them.
      maintenance_margin: equity below this fraction of the gross position closes all positions;
        None is no margin call.
      costs: what trading and holding cost.
      capital: money at the start; None where no size in money matters.
      lot, tick, min_notional: units and prices are multiples, orders are worth at least; 0 is off.
      max_participation: share of a bar's volume that a fill may take; None is no limit.
      delist_after: bars missing in a row after which an asset is gone, and its position closed
        at the last price less `delist_haircut`; None is never.
      episode_bars: bars of an episode, a multiple of the learner's segment; None is one segment.
      random_start: draw the account's first weight from the actions; False starts flat.
      random_costs: (low, high) factor by which an episode's costs are drawn, evenly in its log;
        None trades at `costs`.
      drop_bars: chance that a bar is neither seen nor filled in during an episode.
      ruin_floor: equity, as a fraction of the start's, at or below which an account is ruined.
      market: a synthetic market that is drawn where no bars are given, by name and parameters,
        e.g. "ou(phi=0.95, cost=0.005)"; "" for real bars. Its state is observed beside the
        features unless `market_state` is False. market_bars: how many bars are drawn.
    """

    features: tuple[str, ...] = DEFAULT_FEATURES
    fill: str = "next_open"
    order: str = "on_change"
    short: bool = True
    size: float | None = None
    actions: str = "direction"
    reward: str = "log_return"
    pnl_returns: str = "log"
    risk_aversion: float = 0.0
    quadratic_cost: float = 0.0
    drawdown_penalty: float = 0.01
    sharpe_decay: float = 0.01
    max_gross: float | None = 1.0
    max_net: float | None = None
    borrow: bool = False
    maintenance_margin: float | None = None
    costs: Costs = Costs()
    capital: float | None = None
    lot: float = 0.0
    tick: float = 0.0
    min_notional: float = 0.0
    max_participation: float | None = None
    delist_after: int | None = None
    delist_haircut: float = 0.0
    episode_bars: int | None = None
    random_start: bool = True
    random_costs: tuple[float, float] | None = None
    drop_bars: float = 0.0
    ruin_floor: float = 1e-3
    market: str = ""
    market_state: bool = True
    market_bars: int = 100_000

    def __post_init__(self):
        problems = [
            *one_of(self, "fill", ("next_open", "close")),
            *one_of(self, "order", ("on_change", "rebalance")),
            *one_of(self, "actions", ("direction", "orders", "weights")),
            *one_of(self, "reward", REWARDS),
            *one_of(self, "pnl_returns", ("log", "simple")),
            *between(self, "(0, 1)", "ruin_floor", "sharpe_decay"),
            *between(self, "[0, 1)", "drop_bars"),
            *between(self, "[0, inf)", "risk_aversion", "quadratic_cost", "drawdown_penalty"),
            *limit_problems(self),
            *capital_problems(self, self.costs),
        ]
        if self.random_costs is not None:
            low, high = self.random_costs
            if not 0.0 < low <= high < float("inf"):
                problems.append(
                    f"random_costs={self.random_costs} is not a range of factors above 0; give "
                    "(low, high), e.g. (0.5, 2.0)."
                )
        problems += whole(self, 2, "market_bars")
        repeated = sorted({name for name in self.features if self.features.count(name) > 1})
        if repeated:
            problems.append(f"features={repeated} are named twice; name each feature once.")
        if not self.features and not (self.market and self.market_state):
            problems.append('features=() is empty; name at least one, e.g. "return_1".')
        if self.size is not None:
            problems += between(self, "(0, inf)", "size")
        if self.episode_bars is not None:
            problems += whole(self, 2, "episode_bars")
        refuse(problems)
        if self.size is not None and self.max_gross is not None and self.size > self.max_gross:
            refuse([f"size={self.size} is above max_gross={self.max_gross}; raise max_gross."])


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """What encodes bars into cells, and the readout.

    Attributes:
      kind: "nca", the neural cellular automaton; "mlp", a perceptron over the last `window` bars
        of an asset (1 is no history); "gru", a gated recurrent unit over them. What is said below
        to be of the automaton must be left at its default for the others.
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
        counts = ("channels", "window", "steps", "num_neighbours", "head_hidden")
        problems = [
            *one_of(self, "kind", ("nca", "mlp", "gru")),
            *whole(self, 1, *counts),
            *whole(self, 0 if self.kind == "mlp" else 1, "hidden"),
            *one_of(self, "neighbours", ("none", "ring", "nearest", "all")),
            *between(self, "(0, 1]", "leak", "fire_rate"),
            *between(self, "(0, inf)", "feature_clip"),
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
        if not re.fullmatch(r"none|step|every:[1-9]\d*|dots", str(self.remat)):
            problems.append(
                f"remat={self.remat!r} is not known; it may be 'none', 'step', 'every:n' with n "
                "of at least 1, 'dots'."
            )
        if self.kind in ("mlp", "gru"):
            for name in ("neighbours", "fire_rate", "remat"):
                value, default = getattr(self, name), getattr(PolicyConfig, name)
                if value != default:
                    problems.append(
                        f"{name}={value!r} is of the automaton, and kind={self.kind!r} has "
                        f"none; leave it at {default!r}."
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
      advantages: "gae"; "group": no critic, the accounts that share a segment are each other's
        baseline; "exact": every position and action is enumerated, where the account has finitely
        many states. See `nca_trader.learner.advantages` and `nca_trader.learner.exact`.
      shard_updates: updates on one shard, where data are shards larger than memory, before the
        next takes its place; None: until as many bars were drawn as the longest shard has.
      replay_slots: earlier rollouts that are kept on the device; each update learns from one of
        them as well, corrected by V-trace. 0 is off; else at least 2, one being written. Needs
        "gae", and `optimizer.ema_decay`, whose average bootstraps their values.
      num_epochs, num_minibatches: passes over an update's data, and pieces of each pass.
      micro_batches: pieces in which a minibatch's gradient is summed; more take less memory, with
        the same result. memory_gb: what a device has for an update and all that it holds: agents,
        market, replay. Where the compiled program needs more, fewer agents of a population move at
        once, then `micro_batches` is doubled, until it fits; a replay ring that leaves no room is
        refused. None is what the device reports; a CPU reports nothing, and is not bounded.
      max_kl: KL divergence from the policy that acted, over all devices, beyond which the rest of
        an update's minibatches is left out; None is never.
      discount: gamma. gae_lambda: lambda. clip_epsilon: the ratio is clipped to
        1 +- it, the value to its old one +- it, in units of the targets' spread.
      value_coef, entropy_coef: weights in the loss.
    """

    steps: int = 2_000_000
    num_segments: int = 64
    segment_length: int = 128
    envs_per_segment: int = 4
    logical_shards: int = 8
    advantages: str = "gae"
    shard_updates: int | None = None
    replay_slots: int = 0
    num_epochs: int = 4
    num_minibatches: int = 4
    micro_batches: int = 1
    memory_gb: float | None = None
    max_kl: float | None = None
    discount: float = 0.99
    gae_lambda: float = 0.95
    clip_epsilon: float = 0.2
    value_coef: float = 0.5
    entropy_coef: float = 0.01

    def __post_init__(self):
        counts = ("num_segments", "segment_length", "envs_per_segment", "logical_shards")
        refuse(
            whole(self, 1, *counts, "num_epochs", "num_minibatches", "micro_batches"),
            one_of(self, "advantages", ("gae", "group", "exact")),
            whole(self, 0, "replay_slots"),
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
        if self.replay_slots == 1:
            refuse(["replay_slots=1: a slot is read while another is written; give 2 or more."])
        if self.replay_slots and self.advantages != "gae":
            refuse(
                [
                    f"replay_slots={self.replay_slots} corrects sampled advantages of values, and "
                    f"advantages={self.advantages!r} has none; take 'gae', or replay_slots=0."
                ]
            )
        if self.shard_updates is not None:
            refuse(whole(self, 1, "shard_updates"))
        given = [n for n in ("memory_gb", "max_kl") if getattr(self, n) is not None]
        refuse(between(self, "(0, inf)", *given))
        if self.advantages == "group" and self.envs_per_segment < 2:
            refuse(
                [
                    "advantages='group' compares accounts on one segment, but envs_per_segment=1; "
                    "give at least 2, or take 'gae'."
                ]
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW behind a global-norm clip, and its learning-rate schedule.

    Attributes:
      learning_rate: peak. schedule: "constant"; "linear" or "cosine", down to 0 at the run's end;
        "sgdr", which falls to 0 and starts again, in periods that double.
      first_period: gradient steps of the first period of "sgdr". After p periods it has made
        `first_period (2^p - 1)` steps since its warm-up; a run is best ended there, at rate 0.
      warmup_updates: gradient steps of linear warm-up, the last of them at the peak.
      b1, b2, eps, weight_decay: AdamW's; decay is off for biases.
      max_grad_norm: cap on the norm of the whole gradient, over all devices.
      base_width: a matrix with more than so many inputs learns at `learning_rate base_width /
        inputs`, so that a rate tuned on a narrow agent holds for a wide one. 0 is off, and the
        default: the presets' rates were tuned for their own widths.
      ema_decay: of a moving average of the parameters, e.g. 0.999; 0 is off. It bootstraps the
        values of replayed rollouts; evaluation uses the parameters themselves.
    """

    learning_rate: float = 1e-3
    schedule: str = "constant"
    first_period: int = 1000
    warmup_updates: int = 20
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-5
    weight_decay: float = 1e-4
    max_grad_norm: float = 0.5
    base_width: int = 0
    ema_decay: float = 0.0

    def __post_init__(self):
        refuse(
            one_of(self, "schedule", ("constant", "linear", "cosine", "sgdr")),
            whole(self, 0, "warmup_updates", "base_width"),
            whole(self, 1, "first_period"),
            between(self, "(0, inf)", "learning_rate", "eps", "max_grad_norm"),
            between(self, "[0, 1)", "b1", "b2", "ema_decay"),
            between(self, "[0, inf)", "weight_decay"),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CurriculumConfig:
    """What is easier at the start of a run than at its end.

    Attributes:
      costs_from: factor on all costs in the first update; it rises in a straight line to 1, the
        true costs. 1 is no curriculum. costs_share: share of the run's updates that this takes.
      volatility_from: factor on the log-returns that accounts live through in the first update;
        it goes in a straight line to 1, the true prices. Above 1 what there is to earn stands out
        against costs; below 1 accounts are ruined less. Features are of the true prices
        throughout. volatility_share: share of the run's updates that this takes.
    """

    costs_from: float = 1.0
    costs_share: float = 0.5
    volatility_from: float = 1.0
    volatility_share: float = 0.5

    def __post_init__(self):
        refuse(
            between(self, "[0, 1]", "costs_from"),
            between(self, "(0, inf)", "volatility_from"),
            between(self, "(0, 1]", "costs_share", "volatility_share"),
        )


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
        refuse(problems)

    @property
    def ranged(self) -> bool:
        """Whether agents differ in more than their seeds."""
        ends = (self.learning_rate, self.entropy_coef, self.clip_epsilon, self.gae_lambda)
        return any((*ends, self.discount))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """What of the encoder may be of bfloat16; parameters, sums, readout and losses are float32.

    The usual presets: f32 is all "float32"; bf16 has `matmul = "bfloat16"`; float32 parameters
    with bfloat16 compute has `compute = "bfloat16"` as well. See docs/precision.md.

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
                    [
                        f"{name}='float16' ends at 65,504 and at 6e-8: gradients leave that range, "
                        "and the loss is not scaled to keep them there; take 'bfloat16', whose "
                        "range is float32's."
                    ]
                )
        if self.params == "bfloat16":
            refuse(
                [
                    "params='bfloat16' would lose updates below 1/256 of a weight, unless float32 "
                    "values were kept beside, and then it saves nothing; take 'float32'."
                ]
            )
        refuse(
            one_of(self, "matmul", ("float32", "bfloat16")),
            one_of(self, "compute", ("float32", "bfloat16")),
            one_of(self, "params", ("float32",)),
        )
        if self.compute == "bfloat16" and self.matmul == "float32":
            refuse(
                [
                    "compute='bfloat16' rounds what products of matmul='float32' would read; take "
                    "matmul='bfloat16' with it."
                ]
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """The devices that a run is spread over, as a mesh of axes (data, fsdp, model).

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
        given = [name for name in ("devices", "data") if getattr(self, name) is not None]
        refuse(whole(self, 1, *given, "fsdp", "model"))
        inner = self.fsdp * self.model
        if self.devices is not None and self.devices != (self.data or 1) * inner:
            if self.data is not None:
                refuse(
                    [
                        f"devices={self.devices}, but data * fsdp * model = {self.data * inner}; "
                        "give one of devices and data."
                    ]
                )
            refuse(multiple("devices", self.devices, "fsdp * model", inner))
        if self.deterministic and inner > 1:
            refuse(
                [
                    f"deterministic=true is of the data axis alone, but fsdp={self.fsdp} and "
                    f"model={self.model}; set both to 1, or leave it out."
                ]
            )

    @property
    def axes(self) -> tuple[int, int, int]:
        """The sizes of data, fsdp and model."""
        inner = self.fsdp * self.model
        return self.data or (self.devices or inner) // inner, self.fsdp, self.model


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What is kept of a run, and when it goes back to it.

    Attributes:
      every: updates between checkpoints. every_seconds: seconds between them, whichever comes
        first; 0 is never, of either. One is also saved at the end, and when asked to stop. A
        checkpoint takes about 0.1 s of one core, beside the training.
      keep: newest checkpoints that stay.
      max_skips: updates dropped in a row (their gradients were not finite) after which the run
        goes back to its newest checkpoint, with another key; NaN in parameters does so at once.
      max_rollbacks: times that it goes back to the same checkpoint before it gives up.
    """

    every: int = 0
    every_seconds: float = 30.0
    keep: int = 3
    max_skips: int = 5
    max_rollbacks: int = 3

    def __post_init__(self):
        refuse(whole(self, 1, "keep", "max_skips"), whole(self, 0, "every", "max_rollbacks"))
        refuse(between(self, "[0, inf)", "every_seconds"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """An agent: its policy and how it learns. `num_seeds` agents train in one program."""

    num_seeds: int = 1
    policy: PolicyConfig = PolicyConfig()
    learner: LearnerConfig = LearnerConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    population: PopulationConfig = PopulationConfig()
    precision: PrecisionConfig = PrecisionConfig()
    mesh: MeshConfig = MeshConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    def __post_init__(self):
        refuse(whole(self, 1, "num_seeds"))
        if (self.population.ranged or self.population.every) and self.num_seeds < 2:
            refuse(["population is of several agents; give num_seeds, e.g. 8."])
        if self.learner.replay_slots and not self.optimizer.ema_decay:
            refuse(
                [
                    "learner.replay_slots needs an average of the parameters to bootstrap values; "
                    "give optimizer.ema_decay, e.g. 0.99."
                ]
            )
        data, fsdp, model = self.mesh.axes
        name = "mesh.devices" if fsdp * model == 1 else "mesh's data * fsdp"
        shards = self.learner.logical_shards
        refuse(multiple("learner.logical_shards", shards, name, data * fsdp))
