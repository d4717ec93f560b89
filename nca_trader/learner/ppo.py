"""The clipped surrogate of proximal policy optimisation, for any policy and any kind of step."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from nca_trader.config import LearnerConfig
from nca_trader.learner.setup import Hyper
from nca_trader.numerics import exp32


class Loss(NamedTuple):
    """Terms of the loss, each `[]`, averaged over the minibatch."""

    loss: Array
    policy_loss: Array
    value_loss: Array
    entropy: Array
    approx_kl: Array
    clip_fraction: Array


class Old(NamedTuple):
    """What is known of the policy that acted, of one shape unless a mean says otherwise.

    log_prob: of the actions when they were taken. advantage: of them, normalised. value: of the
    states, as estimated then. value_target: what the values should have been; None: no critic.
    """

    log_prob: Array
    advantage: Array
    value: Array | None = None
    value_target: Array | None = None


def ppo_loss(
    config: LearnerConfig,
    hyper: Hyper,
    old: Old,
    log_prob: Array,
    entropy: Array,
    value: Array | None = None,
    over_actions: Callable[[Array], Array] = jnp.mean,
    over_states: Callable[[Array], Array] = jnp.mean,
) -> Loss:
    """Clipped surrogate, clipped value loss and entropy.

    `-E[min(rho A, clip(rho, 1 - eps, 1 + eps) A)]` with `rho = pi / pi_old`. A gradient at
    rho = 1 is the policy gradient. Where there are no targets, no values are learnt.
    Source: Schulman et al. 2017, "Proximal policy optimization algorithms", equations 7 and 9;
    the KL estimate is `E[rho - 1 - log rho]`, Schulman 2020, "Approximating KL divergence".

    Args:
      log_prob: of the same actions as `old.log_prob`, under the parameters to be learnt.
      entropy, value: of the same states as `old.value`.
      over_actions: the expectation under the old policy, of what has the shape of `log_prob`.
      over_states: likewise of what has the shape of `value`.
    """
    log_ratio = log_prob - old.log_prob
    ratio = exp32(log_ratio)
    eps = hyper.clip_epsilon
    clipped = jnp.clip(ratio, 1.0 - eps, 1.0 + eps)
    policy_loss = -over_actions(jnp.minimum(ratio * old.advantage, clipped * old.advantage))
    loss, value_loss = policy_loss, jnp.zeros_like(policy_loss)
    if value is not None and old.value is not None and old.value_target is not None:
        near = old.value + jnp.clip(value - old.value, -eps, eps)
        error = jnp.maximum((value - old.value_target) ** 2, (near - old.value_target) ** 2)
        value_loss = 0.5 * over_states(error)
        loss = loss + config.value_coef * value_loss
    entropy = over_states(entropy)
    return Loss(
        loss=loss - hyper.entropy_coef * entropy,
        policy_loss=policy_loss,
        value_loss=value_loss,
        entropy=entropy,
        approx_kl=over_actions(ratio - 1.0 - log_ratio),
        clip_fraction=over_actions((jnp.abs(ratio - 1.0) > eps).astype(ratio.dtype)),
    )
