"""The clipped surrogate: what a minibatch of segments says about the parameters."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from nca_trader.agents.policy import Params, Policy
from nca_trader.envs.trading import Market
from nca_trader.learner.rollout import Rollout, gather_segment
from nca_trader.numerics import exp32
from nca_trader.presets import LearnerConfig


class Loss(NamedTuple):
    """Terms of the loss, each `[]`, averaged over the minibatch."""

    loss: Array
    policy_loss: Array
    value_loss: Array
    entropy: Array
    approx_kl: Array
    clip_fraction: Array


def ppo_loss(
    params: Params,
    policy: Policy,
    config: LearnerConfig,
    market: Market,
    rollout: Rollout,
    advantage: Array,
    value_target: Array,
    drop_rate: float = 0.0,
) -> Loss:
    """Clipped surrogate, clipped value loss and entropy, over whole segments encoded anew.

    `-E[min(rho A, clip(rho, 1 - eps, 1 + eps) A)]` with `rho = pi / pi_old`.
    Source: Schulman et al. 2017, "Proximal policy optimization algorithms", equations 7 and 9;
    the KL estimate is `E[rho - 1 - log rho]`, Schulman 2020, "Approximating KL divergence".

    Args:
      rollout: of M segments. advantage: `[M, L, E]`, normalised. value_target: `[M, L, E]`.
      drop_rate: chance that a bar is dropped, as in `EnvConfig.drop_bars`.
    """
    length, halo = config.segment_length, policy.receptive_field - 1
    x, present = gather_segment(market, rollout.index, halo, length, rollout.drop, drop_rate)
    cells = policy.encode(params, x, present)[:, halo:]
    logits, value = policy.act(params, cells[:, :, None], rollout.seen)
    log_ratio = policy.distribution.log_prob(logits, rollout.action) - rollout.log_prob
    ratio = exp32(log_ratio)
    eps = config.clip_epsilon
    clipped = jnp.clip(ratio, 1.0 - eps, 1.0 + eps)
    policy_loss = -jnp.minimum(ratio * advantage, clipped * advantage).mean()
    near = rollout.value + jnp.clip(value - rollout.value, -eps, eps)
    error = jnp.maximum((value - value_target) ** 2, (near - value_target) ** 2)
    value_loss = 0.5 * error.mean()
    entropy = policy.distribution.entropy(logits).mean()
    total = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy
    return Loss(
        loss=total,
        policy_loss=policy_loss,
        value_loss=value_loss,
        entropy=entropy,
        approx_kl=(ratio - 1.0 - log_ratio).mean(),
        clip_fraction=(jnp.abs(ratio - 1.0) > eps).mean(),
    )
