"""Learning from what sampled accounts met: generalised advantages, or group-relative ones."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array

from nca_trader.agents.policy import Params, Policy
from nca_trader.envs.trading import Market, TradingEnv
from nca_trader.learner.advantages import gae, group_advantages
from nca_trader.learner.ppo import Loss, Old, ppo_loss
from nca_trader.learner.rollout import Draw, Method, Rollout, Segments, collect, encode_span
from nca_trader.mesh import DATA
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
        # The bootstrap is not learnt from: dropped here, it need not be gathered.
        rollout = rollout._replace(bootstrap=rollout.span.index)
        return segments, (rollout, advantage, value_target), metrics

    lose = functools.partial(rollout_loss, policy, config, env.config.drop_bars)
    return Method(gather, lambda params, market, items: lose(params, market, *items))


def estimate(
    config: LearnerConfig, rollout: Rollout, reward_scale: float
) -> tuple[Array, Array | None]:
    """Advantages `[S, L, E]`, and the values' targets; None where there is no critic.

    Those of "gae" are normalised over all devices, those of "group" within their segment. Before,
    the mean over the accounts that share a bar is taken from each: what the bars did to all of
    them is no merit of an action, and bars are the same whatever is done, so that the others'
    mean is a fair baseline. Source: Mao et al. 2019, "Variance reduction for reinforcement
    learning in input-driven environments", theorem 1.
    """
    reward = reward_scale * rollout.reward
    if config.advantages == "group":
        return jax.vmap(group_advantages)(reward, rollout.discount), None
    next_value = jnp.concatenate([rollout.value[:, 1:], rollout.bootstrap[:, None]], axis=1)
    mixing = jnp.full_like(rollout.reward, config.gae_lambda)
    over_time = jax.vmap(jax.vmap(gae, in_axes=1, out_axes=1))
    advantage = over_time(reward, rollout.discount, rollout.value, next_value, mixing)
    value_target = advantage + rollout.value
    if config.envs_per_segment > 1:
        advantage -= advantage.mean(axis=-1, keepdims=True)
    mean = jax.lax.pmean(advantage.mean(), DATA)
    variance = jax.lax.pmean(((advantage - mean) ** 2).mean(), DATA)
    return (advantage - mean) / (jnp.sqrt(variance) + 1e-8), value_target


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
        "action_changes": jax.lax.pmean(changed, DATA),
    }
    if value_target is not None:
        metrics["explained_variance"] = explained_variance(rollout.value, value_target)
    return metrics


def explained_variance(value: Array, target: Array) -> Array:
    """`[]` `1 - var(target - value) / var(target)` over all devices."""
    error = target - value
    center, center_error = jax.lax.pmean((target.mean(), error.mean()), DATA)
    spread, missed = jax.lax.pmean(
        (((target - center) ** 2).mean(), ((error - center_error) ** 2).mean()), DATA
    )
    return 1.0 - missed / jnp.maximum(spread, 1e-12)
