"""One iteration of PPO on one device's share of the segments: collect, estimate, learn.

Randomness belongs to the segment and not to the device: a key is folded with the segment's
global number, and minibatches are drawn within a fixed number of logical shards. So a seed means
the same run on any mesh, to rounding; on a deterministic one to the bit, since there each logical
shard is computed by itself, and means over them are taken in the order of their numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from nca_trader.agents.policy import Params, Policy
from nca_trader.config import AgentConfig, LearnerConfig
from nca_trader.envs.trading import Market, TradingEnv
from nca_trader.errors import ConfigError
from nca_trader.learner.curriculum import cost_scale, volatility_scale
from nca_trader.learner.epochs import learn
from nca_trader.learner.exact import exact
from nca_trader.learner.layout import Layout, by_runs
from nca_trader.learner.optimizer import (
    averaged,
    learning_rate,
    make_optimizer,
    whole_or_nothing,
)
from nca_trader.learner.pathwise import pathwise
from nca_trader.learner.population import Hyper
from nca_trader.learner.replay import Ring, add, can_sample, sample, stored
from nca_trader.learner.rollout import Begun, Draw, Method, Segments, begin_segments
from nca_trader.learner.sampled import sampled
from nca_trader.parallel.mesh import BATCH

Metrics = dict[str, Array]
METHODS = {"gae": sampled, "group": sampled, "exact": exact, "pathwise": pathwise}


class LearnerState(NamedTuple):
    """All that training carries: with it and the config, a run goes on exactly.

    params, opt_state: each device its part, as `learner.layout` says. key: the run's key, never
      changed: draws fold in `update`. update: `[]` int32 updates done. segments: split as a batch.
    replay: earlier rollouts, their segments split likewise; None where none are kept.
    hyper: what this agent learns with, where that is not the config's.
    """

    params: Params
    opt_state: Any
    key: Array
    update: Array
    segments: Segments
    replay: Ring | None = None
    hyper: Hyper | None = None


class Parts(NamedTuple):
    """What an iteration is made of; `num_updates` of them are planned."""

    env: TradingEnv
    policy: Policy
    layout: Layout
    num_updates: int
    config: AgentConfig
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    method: Method


def make_parts(
    env: TradingEnv, policy: Policy, layout: Layout, num_updates: int, config: AgentConfig
) -> Parts:
    """The optimiser, its schedule and the estimator of advantages that `config` asks for."""
    shape = config.learner
    total = gradient_steps(shape, num_updates)
    return Parts(
        env,
        policy,
        layout,
        num_updates,
        config,
        make_optimizer(config.optimizer, total, layout),
        learning_rate(config.optimizer, total),
        METHODS[shape.advantages](env, policy, shape),
    )


def gradient_steps(config: LearnerConfig, num_updates: int) -> int:
    """Gradient steps of a run of `num_updates`: with replay every update but the first takes twice.

    The first finds the ring empty. Steps that a guard or `max_kl` leaves out are counted here, and
    the schedule stands still in them.
    """
    replayed = num_updates - 1 if config.replay_slots else 0
    return (num_updates + replayed) * config.num_epochs * config.num_minibatches


def collect_and_learn(
    parts: Parts, micro_batches: int, state: LearnerState, market: Market
) -> tuple[LearnerState, Metrics]:
    """The state after an iteration, and its figures; runs inside `shard_map`."""
    env, policy, layout, num_updates, config, optimizer, schedule, method = parts
    key = jax.random.fold_in(state.key, state.update)
    start_key, action_key, shuffle_key, replay_key = jax.random.split(key, 4)
    count = state.segments.index.shape[0]
    number = jax.lax.axis_index(BATCH) * count + jnp.arange(count)
    fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    course = (config.curriculum, state.update, num_updates)
    scales = (cost_scale(*course), volatility_scale(*course))
    runs = layout.runs(config.learner.logical_shards)

    def gather(segments: Segments, start_keys: Array, keys: Array) -> Any:
        rows = len(env) if market.rows is None else market.rows
        begin = (env, config.learner, policy.first_decision, segments, start_keys, rows)
        begun, fresh = begin_segments(*begin)
        draw = Draw(keys, fresh, *scales)
        *rows, figures = method.gather(params, market, begun, draw)
        # What replay needs is carried no further where there is none.
        return (*rows, None if state.replay is None else Begun(begun.episode, fresh)), figures

    # Names for profiles and plans: what an instruction is part of.
    with jax.named_scope("collect"):
        params = layout.gathered(state.params)
        (segments, batch, begun), figures = by_runs(
            gather, runs, state.segments, fold(start_key, number), fold(action_key, number)
        )
        batch, metrics = method.settle(batch, layout.of_all(figures))
    params, opt_state, losses = jax.named_scope("learn")(learn)(
        lambda params, items: method.lose(params, market, items),
        config.learner,
        optimizer,
        state.params,
        state.opt_state,
        batch,
        shuffle_key,
        micro_batches,
        layout,
    )
    ring = state.replay
    if ring is not None:
        params, opt_state = jax.named_scope("replay")(_learn_again)(
            method,
            config.learner,
            optimizer,
            layout,
            (params, opt_state),
            market,
            ring,
            scales,
            replay_key,
            micro_batches,
        )
        ring = add(ring, stored(batch[0], begun))
    skipped = opt_state.skipped - state.opt_state.skipped
    before = (state.params, state.opt_state)
    params, opt_state = whole_or_nothing(before, (params, opt_state))
    metrics |= losses | {"skipped": skipped, "param_norm": layout.norm(params)}
    names = ("cost_scale", "volatility_scale")
    metrics |= {k: v for k, v in zip(names, scales, strict=True) if v is not None}
    metrics |= {
        "lr": jnp.asarray(schedule(_steps(opt_state))),
        "micro_batches": jnp.int32(micro_batches),
    }
    state = state._replace(params=params, opt_state=opt_state, segments=segments, replay=ring)
    return state._replace(update=state.update + 1), metrics


def _learn_again(
    method: Method,
    config: LearnerConfig,
    optimizer: optax.GradientTransformation,
    layout: Layout,
    learnt: tuple[Params, Any],
    market: Market,
    ring: Ring,
    scales: tuple[Array | None, Array | None],
    key: Array,
    micro_batches: int,
) -> tuple[Params, Any]:
    """Learns from a rollout of the ring as from a fresh one, if there is one; `learnt` of it."""
    if method.again is None:
        raise ConfigError("learner.replay_slots: this method cannot learn from old rollouts.")
    revisit = method.again
    sample_key, shuffle_key = jax.random.split(key)

    def again(learnt: tuple[Params, Any]) -> tuple[Params, Any]:
        params, opt_state = learnt
        both = layout.gathered(params), layout.gathered(averaged(opt_state))
        once = lambda item: revisit(*both, market, item, scales)  # noqa: E731
        runs = layout.runs(config.logical_shards)
        batch, figures = by_runs(once, runs, sample(ring, sample_key))
        batch, _ = method.settle(batch, layout.of_all(figures))
        lose = lambda params, items: method.lose(params, market, items)  # noqa: E731
        args = (config, optimizer, params, opt_state, batch, shuffle_key, micro_batches, layout)
        return learn(lose, *args)[:2]

    return jax.lax.cond(can_sample(ring), again, lambda learnt: learnt, learnt)


def _steps(opt_state: Any) -> Array:
    """`[]` gradient steps behind the learning-rate schedule; one that was skipped is none."""

    def of_schedule(path: Any, value: Any) -> bool:
        del value
        return getattr(path[-1], "tuple_name", "") == "ScaleByScheduleState"

    return optax.tree.get(opt_state, "count", filtering=of_schedule)
