"""The formulas of PPO: hyper-parameters, estimates of advantages, and the clipped loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import Array

from nca_trader.agents.policy import Policy
from nca_trader.config import AgentConfig, LearnerConfig
from nca_trader.envs.market import Market
from nca_trader.envs.rewards import SCHEMES
from nca_trader.numerics import arrays, exp32, wide


class Hyper(NamedTuple):
    """Hyper-parameters that may differ between the agents of a population.

    Each is a number of the config, or a `[]` float32 of one agent (`[M]` of M agents).
    """

    learning_rate: float | Array
    entropy_coef: float | Array
    clip_epsilon: float | Array
    gae_lambda: float | Array
    discount: float | Array


def hyper_of(config: AgentConfig) -> Hyper:
    """Return the config's own hyper-parameters."""
    learner = config.learner
    return Hyper(
        learning_rate=config.optimizer.learning_rate,
        entropy_coef=learner.entropy_coef,
        clip_epsilon=learner.clip_epsilon,
        gae_lambda=learner.gae_lambda,
        discount=learner.discount,
    )


class AgentSetup(NamedTuple):
    """Policy, settings and hyper-parameters of an agent; static except a population's `hyper`."""

    policy: Policy
    config: LearnerConfig
    hyper: Hyper


def setup_of(policy: Policy, config: AgentConfig) -> AgentSetup:
    """Return the setup of an agent with the config's own hyper-parameters."""
    return AgentSetup(policy, config.learner, hyper_of(config))


def horizon(decay: Any, length: int) -> Any:
    """Effective number of `length` steps over which noise discounted by `decay` adds up.

    `sum_k decay^2k = 1 / (1 - decay^2)`, so noise of deviation s sums to s sqrt(horizon). The
    result is a number, or an array if `decay` is one.
    """
    # The maximum keeps it finite at a decay of 1: `length` steps are all there are.
    return 1.0 / arrays(decay).maximum(1.0 - decay**2, 1.0 / length)


def reward_scale(setup: AgentSetup, market: Market) -> Any:
    """Factor on rewards that gives the value targets a spread of about one in any market.

    Rewards of spread s have discounted sums of spread `s / sqrt(1 - gamma^2)`. With larger targets
    the error of the values would dominate the policy's gradient in the norm clip, and the targets
    would fall outside the band of the value clip.
    """
    # Computed from the argument: as a constant of the program, another draw of the same market
    # would compile it again.
    config, spec, _ = market.dynamics
    size: Any = SCHEMES[config.reward].unit
    if size is None:  # the reward of a full position in every asset
        size = market.volatility * (spec.num_assets * spec.bounds[1])
    length = setup.config.segment_length
    scale = 1.0 / (size * horizon(setup.hyper.discount, length) ** 0.5)
    # Where prices never move, rewards are costs alone, and any scale is right.
    return jnp.where(market.volatility > 0.0, scale, 1.0)


# Smaller deviations may be rounding: returns are of order one (`reward_scale`), and float32 sums of
# a few hundred of them are right to about 1e-6.
ROUNDING = 1e-4


def normalised(relative: Array, variance: Array, size: Array | float = 1.0) -> Array:
    """Divide by the standard deviation with a floor: `x / sqrt(variance + (1e-4 size)^2)`.

    The floor keeps the advantages of accounts that all did the same near 0. Divided by their own
    deviation, rounding errors would be of order one.

    Args:
      relative: numbers of mean 0.
      variance: `[]` their variance.
      size: of the returns that were compared.
    """
    return relative / jnp.sqrt(variance + (ROUNDING * jnp.maximum(size, 1.0)) ** 2)


class AdvantageMoments(NamedTuple):
    """Mean and variance of numbers, `[]`, or of each of P equal parts, `[P]`."""

    mean: Array
    variance: Array

    def pooled(self) -> AdvantageMoments:
        """Moments of all parts: the variance within them plus that between them."""
        mean = self.mean.mean()
        return AdvantageMoments(mean, (self.variance + (self.mean - mean) ** 2).mean())


def moments(x: Array) -> AdvantageMoments:
    """Return the moments of all entries of `x`."""
    mean = x.mean()
    return AdvantageMoments(mean, ((x - mean) ** 2).mean())


def gae(r_t: Array, discount_t: Array, v_tm1: Array, v_t: Array, lambda_t: Array) -> Array:
    """Generalised advantage estimates: `A_{t-1} = delta_t + discount_t lambda_t A_t`.

    `delta_t = r_t + discount_t v_t - v_tm1`. The two kinds of boundary are two arguments. At a
    bankruptcy `discount_t` is 0: nothing follows. Where data ran out `lambda_t` is 0 and the
    discount stays: `v_t` is bootstrapped and no advantage leaks in from the next episode.
    Source: Schulman et al. 2016, "High-dimensional continuous control", equation 16.

    Args:
      r_t: `[T]` reward that followed the action at t - 1.
      discount_t: `[T]` discount of what comes after that reward.
      v_tm1: `[T]` value of the observation that the action was taken in.
      v_t: `[T]` value of the observation that followed it, before any reset.
      lambda_t: `[T]` in [0, 1]; 0 is one-step, 1 is Monte Carlo.

    Returns:
      `[T]` float32 at least, whatever the inputs: the sum runs over the whole rollout.
    """
    # Widened first: in bfloat16 each step of the recursion would be rounded to 8 bits.
    args = [wide(jnp.asarray(x)) for x in (r_t, discount_t, v_tm1, v_t, lambda_t)]
    chex.assert_rank(args, 1)
    chex.assert_equal_shape(args)
    r_t, discount_t, v_tm1, v_t, lambda_t = args
    delta_t = r_t + discount_t * v_t - v_tm1

    def backward(later: Array, xs: tuple[Array, Array]) -> tuple[Array, Array]:
        delta, decay = xs
        advantage = delta + decay * later
        return advantage, advantage

    # The carry starts from the data, so that it has their sharding type under shard_map.
    last = jnp.zeros_like(delta_t[0])
    _, advantages = jax.lax.scan(backward, last, (delta_t, discount_t * lambda_t), reverse=True)
    return advantages


def group_advantages(r_t: Array, discount_t: Array) -> Array:
    """Returns-to-go relative to the other accounts on the segment, without a critic.

    `A_e = (G_e - mean_e G) / std`, with `G_t = r_t + discount_t G_{t+1}` up to the segment's end.
    Accounts on the same bars differ by their actions alone, so the effect of the bars cancels at
    each bar. The deviation is that of the whole group, over bars and accounts, because one bar has
    too few accounts; `normalised` gives it a floor.
    Source: Shao et al. 2024, "DeepSeekMath", section 4.1.3 (group-relative, process supervision: a
    step is judged by what follows it).

    Args:
      r_t: `[L, E]` reward after each step of E accounts.
      discount_t: `[L, E]` as in `gae`.

    Returns:
      `[L, E]` float32 at least, of mean 0 at each bar.
    """
    r_t, discount_t = (wide(jnp.asarray(x)) for x in (r_t, discount_t))
    chex.assert_equal_shape([r_t, discount_t])

    def backward(later: Array, xs: tuple[Array, Array]) -> tuple[Array, Array]:
        reward, discount = xs
        to_go = reward + discount * later
        return to_go, to_go

    _, to_go = jax.lax.scan(backward, jnp.zeros_like(r_t[0]), (r_t, discount_t), reverse=True)
    # Axis 1 is the accounts: they are compared at the same bar.
    relative = to_go - to_go.mean(axis=1, keepdims=True)
    return normalised(relative, (relative**2).mean(), jnp.sqrt((to_go**2).mean()))


class Loss(NamedTuple):
    """Terms of the loss, each `[]`, averaged over the minibatch."""

    loss: Array
    policy_loss: Array
    value_loss: Array
    entropy: Array
    approx_kl: Array
    clip_fraction: Array


class Old(NamedTuple):
    """Data of the policy that acted.

    Attributes:
      log_prob: log-probabilities of the actions when they were taken.
      advantage: normalised advantages of the actions.
      value: values of the states as estimated then; None without a critic.
      value_target: regression targets of the values; None without a critic.
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
    """Return the clipped surrogate, the clipped value loss and the entropy.

    `-E[min(rho A, clip(rho, 1 - eps, 1 + eps) A)]` with `rho = pi / pi_old`. The gradient at
    rho = 1 is the policy gradient. Without targets no values are learnt.
    Source: Schulman et al. 2017, "Proximal policy optimization algorithms", equations 7 and 9;
    the KL estimate is `E[rho - 1 - log rho]`, Schulman 2020, "Approximating KL divergence".

    Args:
      config: `value_coef` weighs the value loss.
      hyper: `clip_epsilon` and `entropy_coef` are used.
      old: data of the policy that acted.
      log_prob: of the same actions as `old.log_prob`, under the parameters to be learnt.
      entropy: of the policy in the same states as `old.value`, in nats.
      value: of the same states as `old.value`; None without a critic.
      over_actions: takes the expectation under the old policy of an array like `log_prob`.
      over_states: takes the expectation over states of an array like `value`.
    """
    log_ratio = log_prob - old.log_prob
    ratio = exp32(log_ratio)
    eps = hyper.clip_epsilon
    clipped = jnp.clip(ratio, 1.0 - eps, 1.0 + eps)
    policy_loss = -over_actions(jnp.minimum(ratio * old.advantage, clipped * old.advantage))
    loss, value_loss = policy_loss, jnp.zeros_like(policy_loss)
    if value is not None and old.value is not None and old.value_target is not None:
        # The same epsilon serves ratios and values, because the targets' spread is about one, see
        # `reward_scale`.
        near = old.value + jnp.clip(value - old.value, -eps, eps)
        # The larger of the two errors is taken, as the surrogate takes the worse of its two terms.
        error = jnp.maximum((value - old.value_target) ** 2, (near - old.value_target) ** 2)
        value_loss = 0.5 * over_states(error)
        loss = loss + config.value_coef * value_loss
    entropy = over_states(entropy)
    return Loss(
        loss=loss - hyper.entropy_coef * entropy,
        policy_loss=policy_loss,
        value_loss=value_loss,
        entropy=entropy,
        # Never negative, unlike the mean of -log_ratio, and of lower variance.
        approx_kl=over_actions(ratio - 1.0 - log_ratio),
        clip_fraction=over_actions((jnp.abs(ratio - 1.0) > eps).astype(ratio.dtype)),
    )


def vtrace(
    r_t: Array, discount_t: Array, v_tm1: Array, v_t: Array, lambda_t: Array, log_rho_tm1: Array
) -> tuple[Array, Array]:
    """V-trace advantages and value targets, for actions of another policy mu.

    With rho = pi / mu:  `delta_t = min(1, rho_{t-1}) (r_t + discount_t v_t - v_{t-1})`,
    `e_{t-1} = delta_t + discount_t lambda_t min(1, rho_{t-1}) e_t`; the target is `v_{t-1} +
    e_{t-1}`, the advantage `min(1, rho_{t-1}) (r_t + discount_t (v_t + lambda_t e_t) - v_{t-1})`.
    Where mu is pi both are those of `gae`, with its two kinds of boundary.
    Source: Espeholt et al. 2018, "IMPALA", equation 1 and section 4.2, remark 2 for lambda.

    Args:
      r_t: `[T]` reward, as in `gae`.
      discount_t: `[T]` discount, as in `gae`.
      v_tm1: `[T]` value before the action, as in `gae`.
      v_t: `[T]` value after it, as in `gae`.
      lambda_t: `[T]` in [0, 1], as in `gae`.
      log_rho_tm1: `[T]` log of pi / mu of the action at t - 1.

    Returns:
      Advantage and value target, `[T]` float32 at least.
    """
    args = (r_t, discount_t, v_tm1, v_t, lambda_t, log_rho_tm1)
    args = [wide(jnp.asarray(x)) for x in args]
    chex.assert_rank(args, 1)
    chex.assert_equal_shape(args)
    r_t, discount_t, v_tm1, v_t, lambda_t, log_rho_tm1 = args
    # V-trace's rho-bar and c-bar are both 1.
    rho = jnp.minimum(1.0, exp32(log_rho_tm1))
    delta_t = rho * (r_t + discount_t * v_t - v_tm1)

    def backward(later: Array, xs: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        delta, decay = xs
        # Both are needed: the value's target uses e_{t-1}, and the advantage e_t.
        return delta + decay * later, (delta + decay * later, later)

    last = jnp.zeros_like(delta_t[0])
    decay_t = discount_t * lambda_t * rho
    _, (error_tm1, error_t) = jax.lax.scan(backward, last, (delta_t, decay_t), reverse=True)
    advantage = rho * (r_t + discount_t * (v_t + lambda_t * error_t) - v_tm1)
    return advantage, v_tm1 + error_tm1
