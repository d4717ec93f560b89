"""Learning from what sampled accounts met: generalised advantages, or group-relative ones."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from nca_trader.agents.policy import Params
from nca_trader.envs.market import Market
from nca_trader.learner.advantages import (
    Moments,
    gae,
    group_advantages,
    moments,
    normalised,
    reward_scale,
)
from nca_trader.learner.ppo import Loss, Old, ppo_loss
from nca_trader.learner.replay import Stored, revalued
from nca_trader.learner.rollout import Algorithm, Draw, Rollout, Segments, encode_span, roll_out
from nca_trader.learner.setup import Setup
from nca_trader.numerics import cumsum32

Batch = tuple[Rollout, Array, Array | None]  # and advantages, and the values' targets
Statistics = dict[str, Any]  # arrays and `Moments`


def collect(
    setup: Setup, params: Params, market: Market, segments: Segments, draw: Draw
) -> tuple[Segments, Batch, Statistics]:
    """Samples a rollout and estimates the advantage of every action; see `Algorithm`."""
    segments, rollout = roll_out(setup, params, market, segments, draw)
    advantage, value_target = estimate(setup, rollout, reward_scale(setup, market))
    statistics = rollout_statistics(rollout, advantage, value_target)
    return segments, (_learnt(rollout), advantage, value_target), statistics


def replay(
    setup: Setup, params: Params, average: Params, market: Market, item: Stored, scales: Any
) -> tuple[Batch, Statistics]:
    """Estimates the advantages of a stored rollout's actions anew; see `Algorithm`."""
    rollout, advantage, value_target = revalued(setup, params, average, market, item, scales)
    advantage = against_others(advantage)
    return (_learnt(rollout), advantage, value_target), {"advantage": moments(advantage)}


def _learnt(rollout: Rollout) -> Rollout:
    """Drops what comes after the last step: it is not learnt from and need not be gathered."""
    return rollout._replace(bootstrap=rollout.span.index)


def estimate(setup: Setup, rollout: Rollout, scale: Array) -> tuple[Array, Array | None]:
    """Advantages `[S, L, E]`, and the values' targets; None where there is no critic.

    Those of "group" are normalised within their segment, those of "gae" not yet.

    Args:
      scale: `[]` factor that makes the values' targets of order one.
    """
    reward = scale * rollout.reward
    if setup.config.advantages == "group":
        return jax.vmap(group_advantages)(reward, rollout.discount), None
    next_value = jnp.concatenate([rollout.value[:, 1:], rollout.bootstrap[:, None]], axis=1)
    mixing = jnp.full_like(rollout.reward, setup.hyper.gae_lambda)
    over_time = jax.vmap(jax.vmap(gae, in_axes=1, out_axes=1))
    advantage = over_time(reward, rollout.discount, rollout.value, next_value, mixing)
    value_target = advantage + rollout.value
    return against_others(advantage), value_target


def against_others(advantage: Array) -> Array:
    """`advantage` `[S, L, E]` less its mean over the accounts that share a bar.

    What the bars did to all of them is no merit of an action, and bars are the same whatever is
    done, so that the others' mean is a fair baseline. Source: Mao et al. 2019, "Variance reduction
    for reinforcement learning in input-driven environments", theorem 1.
    """
    if advantage.shape[-1] == 1:
        return advantage
    return advantage - advantage.mean(axis=-1, keepdims=True)


def normalize(setup: Setup, batch: Batch, statistics: Statistics) -> tuple[Batch, dict[str, Array]]:
    """Gives advantages mean 0 and deviation 1 over all devices; see `Algorithm`.

    Those of "group" stay: they are normalised within their segment.
    """
    rollout, advantage, value_target = batch
    if setup.config.advantages != "group":
        all_of = statistics["advantage"].pooled()
        advantage = normalised(advantage - all_of.mean, all_of.variance)
    plain = {name: x.mean() for name, x in statistics.items() if not isinstance(x, Moments)}
    if "error" in statistics:
        spread, missed = (statistics[name].pooled().variance for name in ("target", "error"))
        plain["explained_variance"] = 1.0 - missed / jnp.maximum(spread, 1e-12)
    return (rollout, advantage, value_target), plain


def loss(setup: Setup, params: Params, market: Market, items: Batch) -> Loss:
    """The clipped surrogate over whole segments, encoded anew; see `Algorithm`."""
    rollout, advantage, value_target = items
    policy, config, hyper = setup
    cells = encode_span(policy, params, market, rollout.span, config.segment_length)
    logits, value = policy.act(params, cells[:, :, None], rollout.seen)
    decide = policy.distribution
    log_prob, entropy = decide.log_prob(logits, rollout.action), decide.entropy(logits)
    old = Old(rollout.log_prob, advantage, rollout.value, value_target)
    return ppo_loss(config, hyper, old, log_prob, entropy, value)


def rollout_statistics(
    rollout: Rollout, advantage: Array, value_target: Array | None
) -> Statistics:
    """What the rollout itself says: reward a step, trading, and how much the values explain."""
    changed = rollout.action[:, 1:] != rollout.action[:, :-1]
    statistics: Statistics = {
        "reward": rollout.reward.mean(),
        "drawdown": deepest_fall(rollout.reward).mean(),
        "action_changes": changed.mean(dtype=rollout.reward.dtype),
    }
    if value_target is not None:
        statistics["advantage"] = moments(advantage)
        statistics["target"] = moments(value_target)
        statistics["error"] = moments(value_target - rollout.value)
    return statistics


def deepest_fall(reward: Array) -> Array:
    """`[S, E]` how far the running sum of `reward` `[S, L, E]` fell below its peak or 0."""
    curve = cumsum32(reward, axis=1)
    peak = jnp.maximum(jax.lax.cummax(curve, axis=1), 0.0)
    return (peak - curve).max(axis=1)


SAMPLED = Algorithm(lambda env: None, collect, normalize, loss, replay)
