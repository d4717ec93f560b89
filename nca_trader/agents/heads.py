"""From a cell and an account to a decision: the policy head, and the meaning of its logits."""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from nca_trader.envs import rewards
from nca_trader.envs.account.state import Account
from nca_trader.envs.actions import to_target
from nca_trader.numerics import dot32, exp32, logprob32, sum32, wide
from nca_trader.types import EnvSpec


def num_account_features(spec: EnvSpec) -> int:
    """Return the number of account features per asset."""
    return 3 + (spec.base != "none") + rewards.num_shown(spec)


def account_features(spec: EnvSpec, account: Account) -> Array:
    """Return `[..., A, 3 + M]` float32 account features, the policy head's second input.

    For each asset the weight held and the weight last ordered, both in units of a full position,
    and the account's cash as a fraction of equity. Where positions have constant size, the weight
    held is the one ordered and cash is 0: an asset's features then depend on its last order alone.
    The target of the base rule follows where there is one, in the same unit, then the M numbers
    that the reward remembers, see `envs.rewards.memory_features`; most rewards remember none.

    Args:
      spec: of the environment.
      account: one, or several along leading axes.
    """
    if account.weight.ndim > 1:
        return jax.vmap(functools.partial(account_features, spec))(account)
    # In units of the largest weight, so the head sees numbers of order one in any environment.
    full: Any = spec.size
    if not isinstance(account.size, tuple):
        # 0 where a volatility is not known yet, and nothing is held then.
        full = full * jnp.where(account.size > 0.0, account.size, 1.0)
    ordered = account.ordered / full
    if spec.constant_size:
        held, cash = ordered, jnp.zeros_like(ordered)
    else:
        cash = jnp.broadcast_to(1.0 - account.held.sum(), account.held.shape)
        held = account.held / full
    kept = [
        jnp.broadcast_to(number, held.shape) for number in rewards.memory_features(spec, account)
    ]
    if spec.base != "none":  # not multiplied by sizes, unlike what is ordered
        kept = [account.base / spec.size, *kept]
    return jnp.stack([held, ordered, cash, *kept], axis=-1).astype(jnp.float32)


def _rows(w: Array, x: Array) -> Array:
    """Multiply `x` `[..., I]` by `w` `[I, O]` into `[O, ...]`: rows of decisions."""
    # Decisions are many and channels few. Gradients are products of long rows as well, which the
    # other order would transpose first: this one is 1.7 times as fast on a CPU.
    rows = jnp.moveaxis(x, -1, 0)
    return dot32(w.T, rows.reshape(rows.shape[0], -1)).reshape(-1, *rows.shape[1:])


class PolicyHead(nnx.Module):
    """The policy head in float32: one hidden layer, action logits per asset, one value.

    The last layers start near zero, so that the first policy is uniform and the first value 0. On a
    base rule the logits start at exactly 0: the first policy is that rule.
    """

    HIDDEN: ClassVar = {"cell": 1, "account": 1, "bias": 0, "logits": 0, "value": 0}

    def __init__(self, spec: EnvSpec, channels: int, hidden: int, rngs: nnx.Rngs):
        """Draw the parameters; every draw takes its own key from `rngs`."""
        normal = jax.nn.initializers.lecun_normal()
        # Near zero and not at zero: at zero no gradient would reach the hidden layer.
        small = jax.nn.initializers.normal(0.01)
        self.cell = nnx.Param(normal(rngs.params(), (channels, hidden)))
        self.account = nnx.Param(normal(rngs.params(), (num_account_features(spec), hidden)))
        self.bias = nnx.Param(jnp.zeros(hidden))
        logits = small(rngs.params(), (hidden, distribution(spec).outputs(spec)))
        self.logits = nnx.Param(logits if spec.base == "none" else jnp.zeros_like(logits))
        self.value = nnx.Param(small(rngs.params(), (hidden,)))
        self.value_bias = nnx.Param(jnp.zeros(()))

    def __call__(self, cells: Array, features: Array) -> tuple[Array, Array]:
        """Compute the logits and the value of a decision.

        Args:
          cells: `[..., A, C]` states of the bar's cells; axes of size 1 broadcast, so that
            accounts that share a bar share its cells.
          features: `[..., A, 3 + M]` of the same rank, from `account_features`.

        Returns:
          logits `[..., A, n]` and value `[...]`, the mean over assets.
        """
        read = jax.lax.platform_dependent(
            cells, features, tpu=self.channels_last, default=self.rows
        )
        # The value's weights are the last column, see `_last`.
        *logits, value = read
        return jnp.stack(logits, axis=-1), value.mean(-1) + self.value_bias[...]

    def rows(self, cells: Array, features: Array) -> list[Array]:
        """Return `[..., A]` arrays: each logit, then the value, computed by rows of decisions."""
        bias = self.bias[...].reshape(-1, *(1,) * (cells.ndim - 1))
        seen = _rows(self.cell[...], cells) + _rows(self.account[...], features) + bias
        hidden = jnp.tanh(seen).reshape(seen.shape[0], -1)
        return list(dot32(self._last().T, hidden).reshape(-1, *seen.shape[1:]))

    def channels_last(self, cells: Array, features: Array) -> list[Array]:
        """Return the same for a TPU, whose compiler transposes rows of decisions piece by piece."""
        seen = dot32(cells, self.cell[...]) + dot32(features, self.account[...])
        hidden = jnp.tanh(seen + self.bias[...].reshape(*(1,) * (cells.ndim - 1), -1))
        out = dot32(hidden, self._last())
        return [out[..., k] for k in range(out.shape[-1])]

    def _last(self) -> Array:
        # One product for logits and value.
        return jnp.concatenate([self.logits[...], self.value[...][:, None]], axis=1)


class Distribution(NamedTuple):
    """A distribution of actions given logits `[..., A, n]`; assets are independent.

    Attributes:
      outputs: `(spec) -> n`.
      noise: `(key, shape [..., A, n]) -> noise` for one draw.
      sample: `(logits, noise) -> action [..., A]`.
      mode: `(logits) -> action [..., A]`, the most probable.
      log_prob: `(logits, action) -> [...]`, summed over assets.
      entropy: `(logits) -> [...]` in nats, summed over assets.
      order: `(spec, action) -> [..., A]`, the action as the environment takes it.
    """

    outputs: Callable[[EnvSpec], int]
    noise: Callable[[Array, tuple[int, ...]], Array]
    sample: Callable[[Array, Array], Array]
    mode: Callable[[Array], Array]
    log_prob: Callable[[Array, Array], Array]
    entropy: Callable[[Array], Array]
    order: Callable[[EnvSpec, Array], Array]


def log_prob(logits: Array, action: Array) -> Array:
    """Return the `[...]` log-probability of the categorical actions `[..., A]`."""
    log_probs = logprob32(logits)
    # Selected, not gathered: the gradient of a gather is written one action at a time.
    chosen = action[..., None] == jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return sum32(jnp.where(chosen, log_probs, 0.0), (-1, -2))


def entropy(logits: Array) -> Array:
    """Return the `[...]` entropy of the categorical in nats, summed over assets."""
    log_probs = logprob32(logits)
    return -sum32(exp32(log_probs) * log_probs, (-1, -2))


def sample(logits: Array, gumbel: Array) -> Array:
    """Draw `[..., A]` int32 from the categorical, given Gumbel noise of the logits' shape."""
    # The Gumbel-max trick: the index of the largest sum is distributed as the softmax of the
    # logits.
    return jnp.argmax(logits + gumbel, axis=-1).astype(jnp.int32)


def greedy(logits: Array) -> Array:
    """Return the `[..., A]` int32 most probable action of each asset."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


CATEGORICAL = Distribution(
    outputs=lambda spec: spec.num_actions,
    noise=lambda key, shape: jax.random.gumbel(key, shape),
    sample=sample,
    mode=greedy,
    log_prob=log_prob,
    entropy=entropy,
    order=lambda spec, action: action,
)

# Of the action before squashing: standard deviations of 0.05 to 2.7.
LEAST_LOG_STD, MOST_LOG_STD = -3.0, 1.0


def _moments(logits: Array) -> tuple[Array, Array]:
    """Mean and logarithm of the standard deviation, `[..., A]`, before squashing."""
    logits = wide(logits)
    return logits[..., 0], jnp.clip(logits[..., 1], LEAST_LOG_STD, MOST_LOG_STD)


def sample_gaussian(logits: Array, normal: Array) -> Array:
    """Draw `[..., A]` from the Gaussian before squashing, given normal noise."""
    mean, log_std = _moments(logits)
    return mean + jnp.exp(log_std) * normal[..., 0]


def log_prob_gaussian(logits: Array, action: Array) -> Array:
    """Return the `[...]` log-probability of the action before squashing.

    The Jacobian of the squashing cancels in every ratio of probabilities.
    """
    mean, log_std = _moments(logits)
    z = (action - mean) * jnp.exp(-log_std)
    return (-0.5 * z**2 - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)


def entropy_gaussian(logits: Array) -> Array:
    """Return the `[...]` entropy of the action before squashing; after it has no closed form."""
    return (_moments(logits)[1] + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)


def squashed(spec: EnvSpec, action: Array) -> Array:
    """Squash actions into `[..., A]` numbers within `spec.action_bounds`."""
    low, high = spec.action_bounds
    # tanh reaches -1 and 1 only by rounding, and the bounds are themselves allowed weights.
    return low + (high - low) * 0.5 * (1.0 + jnp.tanh(action))


SQUASHED_GAUSSIAN = Distribution(
    outputs=lambda spec: 2,
    noise=lambda key, shape: jax.random.normal(key, shape),
    sample=sample_gaussian,
    mode=lambda logits: _moments(logits)[0],
    log_prob=log_prob_gaussian,
    entropy=entropy_gaussian,
    order=squashed,
)


def distribution(spec: EnvSpec) -> Distribution:
    """Return the distribution of actions in environments of this `spec`.

    Source of the squashed Gaussian: Haarnoja et al., Soft Actor-Critic (2018), appendix C.
    """
    return CATEGORICAL if spec.num_actions else SQUASHED_GAUSSIAN


def mean_order(targets: Sequence[Any], ensemble: str) -> Any:
    """Return the weights that S agents trade together: the mean m of their targets, or less.

    With "agreement" each asset's mean is multiplied by `m^2 / mean of squares`, which is
    `1 / (1 + (s / m)^2)` for agents whose orders have standard deviation s (ddof 0): 1 where all
    order the same, 1 / 2 where they spread as far as their mean, 0 where they cancel out.

    Args:
      targets: `[..., A]` weights of each agent.
      ensemble: "mean" or "agreement".

    Example:
      >>> import numpy as np
      >>> orders = [np.array([0.5, 1.0, 1.0]), np.array([0.5, 0.0, -1.0])]
      >>> mean_order(orders, "mean"), mean_order(orders, "agreement")
      (array([0.5, 0.5, 0. ]), array([0.5 , 0.25, 0.  ]))
    """
    # Sums in this order: backtests and live loops round alike.
    mean = functools.reduce(operator.add, targets) / len(targets)
    if ensemble == "mean" or len(targets) == 1:
        return mean
    squares = functools.reduce(operator.add, [target**2 for target in targets]) / len(targets)
    # If all orders are 0, their mean is 0 with any divisor.
    return mean * (mean**2 / (squares + (squares == 0.0)))


def best_target(spec: EnvSpec, logits: Array, account: Account, ensemble: str = "mean") -> Array:
    """Return the target weights of the most probable action, or of several agents together.

    Args:
      spec: of the environment.
      logits: `[A, n]` of an agent; `[A, S n]` of S agents, one after the other, see `mean_policy`.
      account: that they share, at the close of the decision.
      ensemble: how the orders, or on a base rule the tilts, of several agents become one, see
        `mean_order`.

    Returns:
      `[A]` target weights.
    """
    chosen = distribution(spec)
    width = chosen.outputs(spec)
    parts = [logits[..., i : i + width] for i in range(0, logits.shape[-1], width)]
    orders = [chosen.order(spec, chosen.mode(part)) for part in parts]
    if spec.base != "none":
        # Of the tilts and not of the targets: agents that disagree trade the base.
        return to_target(spec, mean_order(orders, ensemble), account.ordered, account.base)
    targets = [to_target(spec, order, account.ordered) for order in orders]
    return mean_order(targets, ensemble)
