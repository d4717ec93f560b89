"""From a cell and an account to a decision: the readout, and its categorical distribution."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from nca_trader.envs.account import Account
from nca_trader.types import EnvSpec

ACCOUNT_FEATURES = 3


def account_features(account: Account, size: float) -> Array:
    """`[A, 3]` float32 what the readout sees of an account.

    For each asset the weight held and the weight last ordered, both in units of `size` (what a
    long position means), and the account's cash as a fraction of equity.
    """
    held = account.weight + account.weight_low
    cash = jnp.broadcast_to(1.0 - held.sum(), held.shape)
    return jnp.stack([held / size, account.ordered / size, cash], axis=-1).astype(jnp.float32)


class Head(nnx.Module):
    """A small float32 readout: one hidden layer, action logits per asset, one value.

    The last layers start near zero, so that the first policy is uniform and the first value 0.
    """

    def __init__(self, spec: EnvSpec, channels: int, hidden: int, rngs: nnx.Rngs):
        """Draws the parameters; every draw takes its own key from `rngs`."""
        normal = jax.nn.initializers.lecun_normal()
        small = jax.nn.initializers.normal(0.01)
        self.cell = nnx.Param(normal(rngs.params(), (channels, hidden)))
        self.account = nnx.Param(normal(rngs.params(), (ACCOUNT_FEATURES, hidden)))
        self.bias = nnx.Param(jnp.zeros(hidden))
        self.logits = nnx.Param(small(rngs.params(), (hidden, spec.num_actions)))
        self.value = nnx.Param(small(rngs.params(), (hidden,)))
        self.value_bias = nnx.Param(jnp.zeros(()))

    def __call__(self, cells: Array, features: Array) -> tuple[Array, Array]:
        """Reads out a decision.

        Args:
          cells: `[..., A, C]` states of the bar's cells; axes of size 1 broadcast, so that
            accounts that share a bar share its cells.
          features: `[..., A, 3]` of the same rank, from `account_features`.

        Returns:
          logits `[..., A, n]` and value `[...]`, the mean over assets.
        """
        bias = self.bias[...].reshape((1,) * (cells.ndim - 1) + self.bias[...].shape)
        hidden = jnp.tanh(cells @ self.cell[...] + features @ self.account[...] + bias)
        value = (hidden @ self.value[...]).mean(-1) + self.value_bias[...]
        return hidden @ self.logits[...], value


def log_prob(logits: Array, action: Array) -> Array:
    """`[...]` log-probability of `action` `[..., A]`: assets decide independently, so a sum."""
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return jnp.take_along_axis(log_probs, action[..., None], axis=-1)[..., 0].sum(-1)


def entropy(logits: Array) -> Array:
    """`[...]` entropy in nats, summed over assets."""
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -(jnp.exp(log_probs) * log_probs).sum((-1, -2))


def sample(logits: Array, gumbel: Array) -> Array:
    """`[..., A]` int32 a draw from the categorical, from Gumbel noise of the logits' shape."""
    return jnp.argmax(logits + gumbel, axis=-1).astype(jnp.int32)
