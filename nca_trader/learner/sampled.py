"""Learning from what sampled accounts met: generalised advantages, or group-relative ones."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from nca_trader.agents.policy import Params, Policy
from nca_trader.config import LearnerConfig
from nca_trader.envs.trading import Market, TradingEnv
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
from nca_trader.learner.rollout import Draw, Method, Rollout, Segments, collect, encode_span
from nca_trader.numerics import cumsum32

Batch = tuple[Rollout, Array, Array | None]  # and advantages, and the values' targets
Figures = dict[str, Any]  # arrays and `Moments`


def sampled(env: TradingEnv, policy: Policy, config: LearnerConfig) -> Method:
    """The method of `learner.advantages` "gae" and "group"."""

    def gather(
        params: Params, market: Market, segments: Segments, draw: Draw
    ) -> tuple[Segments, Batch, Figures]:
        segments, rollout = collect(env, policy, config, params, market, segments, draw)
        scale = reward_scale(env, market, config)
        advantage, value_target = estimate(config, rollout, scale)
        figures = rollout_figures(rollout, advantage, value_target)
        return segments, (_learnt(rollout), advantage, value_target), figures

    def again(
        params: Params, average: Params, market: Market, item: Stored, scales: Any
    ) -> tuple[Batch, Figures]:
        rollout, advantage, value_target = revalue(params, average, market, item, scales)
        advantage = against_others(advantage)
        figures = {"advantage": moments(advantage)}
        return (_learnt(rollout), advantage, value_target), figures

    drop = env.config.feature_dropout
    lose = functools.partial(rollout_loss, policy, config, drop)
    revalue = functools.partial(revalued, env, policy, config)
    settle = functools.partial(settled, config)
    return Method(gather, settle, lambda params, market, items: lose(params, market, *items), again)


def _learnt(rollout: Rollout) -> Rollout:
    """Without what comes after the last step: not learnt from, it need not be gathered."""
    return rollout._replace(bootstrap=rollout.span.index)


def estimate(config: LearnerConfig, rollout: Rollout, scale: Array) -> tuple[Array, Array | None]:
    """Advantages `[S, L, E]`, and the values' targets; None where there is no critic.

    Those of "group" are normalised within their segment, those of "gae" not yet.

    Args:
      scale: `[]` factor that makes the values' targets of order one.
    """
    reward = scale * rollout.reward
    if config.advantages == "group":
        return jax.vmap(group_advantages)(reward, rollout.discount), None
    next_value = jnp.concatenate([rollout.value[:, 1:], rollout.bootstrap[:, None]], axis=1)
    mixing = jnp.full_like(rollout.reward, config.gae_lambda)
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


def settled(
    config: LearnerConfig, batch: Batch, figures: Figures
) -> tuple[Batch, dict[str, Array]]:
    """The batch with advantages of mean 0 and deviation 1 over all devices, and its metrics.

    Those of "group" stay: they are normalised within their segment.

    Args:
      figures: of all parts of the whole batch, `[P]` each, from `rollout_figures`.
    """
    rollout, advantage, value_target = batch
    if config.advantages != "group":
        all_of = figures["advantage"].pooled()
        advantage = normalised(advantage - all_of.mean, all_of.variance)
    plain = {name: x.mean() for name, x in figures.items() if not isinstance(x, Moments)}
    if "error" in figures:
        spread, missed = figures["target"].pooled().variance, figures["error"].pooled().variance
        plain["explained_variance"] = 1.0 - missed / jnp.maximum(spread, 1e-12)
    return (rollout, advantage, value_target), plain


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
      drop_rate: chance that a bar is dropped, as in `EnvConfig.feature_dropout`. rollout: of M
        segments. advantage: `[M, L, E]`, normalised. value_target: `[M, L, E]`, or None.
    """
    length = config.segment_length
    cells = encode_span(policy, params, market, rollout.span, length, drop_rate)
    logits, value = policy.act(params, cells[:, :, None], rollout.seen)
    decide = policy.distribution
    log_prob, entropy = decide.log_prob(logits, rollout.action), decide.entropy(logits)
    old = Old(rollout.log_prob, advantage, rollout.value, value_target)
    return ppo_loss(config, old, log_prob, entropy, value)


def rollout_figures(rollout: Rollout, advantage: Array, value_target: Array | None) -> Figures:
    """What the rollout itself says: reward a step, trading, and how much the values explain."""
    changed = rollout.action[:, 1:] != rollout.action[:, :-1]
    figures: Figures = {
        "reward": rollout.reward.mean(),
        "drawdown": deepest_fall(rollout.reward).mean(),
        "action_changes": changed.mean(dtype=rollout.reward.dtype),
    }
    if value_target is not None:
        figures["advantage"] = moments(advantage)
        figures["target"] = moments(value_target)
        figures["error"] = moments(value_target - rollout.value)
    return figures


def deepest_fall(reward: Array) -> Array:
    """`[S, E]` how far the running sum of `reward` `[S, L, E]` fell below its peak or 0."""
    curve = cumsum32(reward, axis=1)
    peak = jnp.maximum(jax.lax.cummax(curve, axis=1), 0.0)
    return (peak - curve).max(axis=1)
