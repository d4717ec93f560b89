"""Schema of how an agent learns: its updates, its optimiser, and what is easier at the start."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

from nca_trader.config.extensions import check_known
from nca_trader.config.ranges import (
    between,
    divides,
    multiple,
    one_of,
    refuse,
    whole,
    without_effect,
)
from nca_trader.config.strict import strict

ADVANTAGES = ("gae", "group", "exact", "pathwise")


@strict
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
        many states; "pathwise": derivatives of what weights earn, no critic and no sampling. See
        `nca_trader.learner.ppo`, `.exact` and `.pathwise`. "module:name" is your own function in
        the place of `ppo.gae`, with its arguments.
      objective: of "pathwise": "reward", the mean reward; or "sharpe", the Sharpe ratio of the
        accounts' simple returns, pooled over all bars and accounts of an update, less the price of
        tilts. The environment's reward is then not used. Needs one epoch and one minibatch.
      shard_updates: updates on one shard, where data are shards larger than memory, before the
        next takes its place; None continues until as many bars were drawn as the longest shard has.
      replay_slots: earlier rollouts that are kept on the device; each update learns from one of
        them as well, corrected by V-trace. 0 is off; else at least 2, one being written. Needs
        "gae", and `optimizer.ema_decay`, whose average bootstraps their values.
      num_epochs, num_minibatches: passes over an update's data, and pieces of each pass.
      micro_batches: pieces in which a minibatch's gradient is summed and a rollout is encoded; more
        take less memory, with the same result. memory_gb: what a device has for an update and all
        that it holds: agents, market, replay. A compiled program that needs more is refused, with
        the number of micro-batches or replay slots that would fit. None is what the device
        reports; on a CPU, the memory that is free.
      target_kl: KL divergence from the policy that acted, over all devices, beyond which the
        rest of an update's minibatches is left out; None is never.
      discount: gamma. gae_lambda: lambda. clip_epsilon: the ratio is clipped to
        1 +- it, the value to its old one +- it, in units of the targets' spread.
      value_coef, entropy_coef: weights in the loss. The entropy is the mean over assets; with
        "exact", whose advantages are a sum over assets as well, it is the sum.
    """

    RENAMED: ClassVar = {"max_kl": "target_kl"}  # old keys of files, read with a warning
    OWN: ClassVar = {"advantages": "advantages"}  # may name your own code

    steps: int = 2_000_000
    num_segments: int = 64
    segment_length: int = 128
    envs_per_segment: int = 4
    logical_shards: int = 8
    advantages: str = "gae"
    objective: str = "reward"
    shard_updates: int | None = None
    replay_slots: int = 0
    num_epochs: int = 4
    num_minibatches: int = 4
    micro_batches: int = 1
    memory_gb: float | None = None
    target_kl: float | None = None
    discount: float = 0.99
    gae_lambda: float = 0.95
    clip_epsilon: float = 0.2
    value_coef: float = 0.5
    entropy_coef: float = 0.01

    def __post_init__(self):
        # In two calls: the second group compares fields, which only the first shows to be numbers.
        counts = ("steps", "num_segments", "segment_length", "envs_per_segment", "logical_shards")
        refuse(
            whole(self, 1, *counts, "num_epochs", "num_minibatches", "micro_batches"),
            whole(self, 1, "shard_updates"),
            between(self, "(0, inf)", "memory_gb", "target_kl"),
            check_known(self, "advantages", "advantages", ADVANTAGES),
            one_of(self, "objective", ("reward", "sharpe")),
            whole(self, 0, "replay_slots"),
            between(self, "(0, 1]", "discount"),
            between(self, "[0, 1]", "gae_lambda"),
            between(self, "(0, 1)", "clip_epsilon"),
            between(self, "[0, inf)", "value_coef", "entropy_coef"),
            without_effect(self),
        )
        refuse(multiple("num_segments", self.num_segments, "logical_shards", self.logical_shards))
        # Minibatches are drawn within a logical shard, so that no segment crosses devices.
        each = self.num_segments // self.logical_shards
        of = "num_segments / logical_shards"
        refuse(divides("num_minibatches", self.num_minibatches, of, each))
        if self.replay_slots == 1:
            refuse("replay_slots=1: a slot is read while another is written; give 2 or more.")
        # Its gradient is that of a sum at the pooled moments, which the first step moves.
        if self.objective == "sharpe" and (self.num_epochs, self.num_minibatches) != (1, 1):
            refuse(
                f"objective='sharpe' is exact for one pass over all accounts, but num_epochs="
                f"{self.num_epochs} and num_minibatches={self.num_minibatches}; set both to 1."
            )
        # V-trace corrects the ratios of sampled actions, which the others do not have.
        if self.replay_slots and self.advantages != "gae":
            refuse(
                f"replay_slots={self.replay_slots} corrects sampled advantages of values, and "
                f"advantages={self.advantages!r} has none; take 'gae', or replay_slots=0."
            )
        # One account is its own mean, so that every advantage would be 0.
        if self.advantages == "group" and self.envs_per_segment < 2:
            refuse(
                "advantages='group' compares accounts on one segment, but envs_per_segment=1; "
                "give at least 2, or take 'gae'."
            )

    @staticmethod
    def idle(given: Any) -> Iterator[tuple[str, str]]:
        """Yield each field without effect given the values `given`, and what it needs."""
        if given.advantages in ("group", "pathwise"):
            yield "gae_lambda", "advantages='gae' or 'exact'"
        if given.advantages in ("group", "exact", "pathwise"):  # these have no value loss
            yield "value_coef", "advantages='gae'"
        if given.advantages == "pathwise":  # draws no actions: no ratio, no entropy
            for name in ("clip_epsilon", "entropy_coef", "target_kl"):
                yield name, "advantages='gae', 'group' or 'exact'"
        else:
            yield "objective", "advantages='pathwise'"


@strict
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
        values of replayed rollouts, so it needs `learner.replay_slots`; evaluation uses the
        parameters themselves.
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
            without_effect(self),
        )

    @staticmethod
    def idle(given: Any) -> Iterator[tuple[str, str]]:
        """Yield each field without effect given the values `given`, and what it needs."""
        if given.schedule in ("constant", "linear", "cosine"):
            yield "first_period", "schedule='sgdr'"


@strict
@dataclasses.dataclass(frozen=True, kw_only=True)
class CurriculumConfig:
    """What is easier at the start of a run than at its end.

    Attributes:
      costs_from: factor on all costs in the first update; it rises in a straight line to 1, the
        true costs. 1 charges these from the start. costs_share: share of the run's updates that
        this takes.
      volatility_from: factor on the log-returns of accounts in the first update; it goes in a
        straight line to 1, the true prices. Above 1 gains stand out against costs; below 1 fewer
        accounts go bankrupt. Features are of the true prices throughout. volatility_share: share
        of the run's updates that this takes.
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
            without_effect(self),
        )

    @staticmethod
    def idle(given: Any) -> Iterator[tuple[str, str]]:
        """Yield each field without effect given the values `given`, and what it needs."""
        if given.costs_from == 1.0:
            yield "costs_share", "costs_from below 1"
        if given.volatility_from == 1.0:
            yield "volatility_share", "a volatility_from that is not 1"
