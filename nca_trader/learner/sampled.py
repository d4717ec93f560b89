"""Learning from what sampled accounts met: generalised advantages, or group-relative ones."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from nca_trader.agents.policy import Params, Policy
from nca_trader.envs.trading import Market, TradingEnv
from nca_trader.learner.advantages import gae, group_advantages
from nca_trader.learner.ppo import Loss, Old, ppo_loss
from nca_trader.learner.replay import Stored, revalued
from nca_trader.learner.rollout import Draw, Method, Rollout, Segments, collect, encode_span
from nca_trader.mesh import DATA
from nca_trader.numerics import cumsum32
from nca_trader.presets import LearnerConfig


def sampled(env: TradingEnv, policy: Policy, config: LearnerConfig, reward_scale: float) -> Method:
    """The method of `learner.advantages` "gae" and "group".

    Args:
      reward_scale: factor that makes the values' targets of order one.
    """

    def gather(
        params: Params, market: Market, segments: Segments, draw: Draw
    ) -> tuple[Segments, tuple[Rollout, Array, Array | None], dict[str, Array]]:
        segments, rollout = collect(env, policy, config, params, market, segments, draw)
        advantage, value_target = estimate(config, rollout, reward_scale)
        metrics = rollout_metrics(rollout, value_target)
        return segments, (_learnt(rollout), advantage, value_target), metrics

    def again(params: Params, average: Params, market: Market, item: Stored) -> Any:
        rollout, advantage, value_target = revalue(params, average, market, item)
        return _learnt(rollout), standardised(advantage), value_target

    drop = env.config.drop_bars
    lose = functools.partial(rollout_loss, policy, config, drop)
    revalue = functools.partial(revalued, policy, config, drop, reward_scale)
    return Method(gather, lambda params, market, items: lose(params, market, *items), again)


def _learnt(rollout: Rollout) -> Rollout:
    """Without what comes after the last step: not learnt from, it need not be gathered."""
    return rollout._replace(bootstrap=rollout.span.index)


def estimate(
    config: LearnerConfig, rollout: Rollout, reward_scale: float
) -> tuple[Array, Array | None]:
    """Advantages `[S, L, E]`, and the values' targets; None where there is no critic.

    Those of "gae" are normalised over all devices, those of "group" within their segment.
    """
    reward = reward_scale * rollout.reward
    if config.advantages == "group":
        return jax.vmap(group_advantages)(reward, rollout.discount), None
    next_value = jnp.concatenate([rollout.value[:, 1:], rollout.bootstrap[:, None]], axis=1)
    mixing = jnp.full_like(rollout.reward, config.gae_lambda)
    over_time = jax.vmap(jax.vmap(gae, in_axes=1, out_axes=1))
    advantage = over_time(reward, rollout.discount, rollout.value, next_value, mixing)
    value_target = advantage + rollout.value
    return standardised(advantage), value_target


def standardised(advantage: Array) -> Array:
    """`advantage` with mean 0 and deviation 1 over all devices."""
    mean = jax.lax.pmean(advantage.mean(), DATA)
    variance = jax.lax.pmean(((advantage - mean) ** 2).mean(), DATA)
    return (advantage - mean) / (jnp.sqrt(variance) + 1e-8)


def rollout_loss(
    policy: Policy,
    config: LearnerConfig,
    drop_rate: float,
    params: Params,
    market: Market,
    rollout: Rollout,
    advantage: Array,
    value_target: Array | None,
) -> Loss:
    """The loss over whole segments, encoded anew.

    Args:
      drop_rate: chance that a bar is dropped, as in `EnvConfig.drop_bars`. rollout: of M
        segments. advantage: `[M, L, E]`, normalised. value_target: `[M, L, E]`, or None.
    """
    length = config.segment_length
    cells = encode_span(policy, params, market, rollout.span, length, drop_rate)
    logits, value = policy.act(params, cells[:, :, None], rollout.seen)
    decide = policy.distribution
    log_prob, entropy = decide.log_prob(logits, rollout.action), decide.entropy(logits)
    old = Old(rollout.log_prob, advantage, rollout.value, value_target)
    return ppo_loss(config, old, log_prob, entropy, value)


def rollout_metrics(rollout: Rollout, value_target: Array | None) -> dict[str, Array]:
    """What the rollout itself says: reward a step, trading, and how much the values explain."""
    changed = (rollout.action[:, 1:] != rollout.action[:, :-1]).mean()
    metrics = {
        "reward": jax.lax.pmean(rollout.reward.mean(), DATA),
        "drawdown": jax.lax.pmean(deepest_fall(rollout.reward).mean(), DATA),
        "action_changes": jax.lax.pmean(changed, DATA),
    }
    if value_target is not None:
        metrics["explained_variance"] = explained_variance(rollout.value, value_target)
    return metrics


def deepest_fall(reward: Array) -> Array:
    """`[S, E]` how far the running sum of `reward` `[S, L, E]` fell below its peak or 0."""
    curve = cumsum32(reward, axis=1)
    peak = jnp.maximum(jax.lax.cummax(curve, axis=1), 0.0)
    return (peak - curve).max(axis=1)


def explained_variance(value: Array, target: Array) -> Array:
    """`[]` `1 - var(target - value) / var(target)` over all devices."""
    error = target - value
    center, center_error = jax.lax.pmean((target.mean(), error.mean()), DATA)
    spread, missed = jax.lax.pmean(
        (((target - center) ** 2).mean(), ((error - center_error) ** 2).mean()), DATA
    )
    return 1.0 - missed / jnp.maximum(spread, 1e-12)
