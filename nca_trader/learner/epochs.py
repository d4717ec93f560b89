"""Epochs of minibatches over a batch of items: which loss, and what an item is, others say.

Runs inside `shard_map` over the data axis. An item is what a minibatch never splits: a segment
of bars for the trader, one step where steps are learnt from alone.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from nca_trader.learner.ppo import Loss
from nca_trader.mesh import DATA
from nca_trader.presets import LearnerConfig

Params = Any
Lose = Callable[[Params, Any], Loss]


def learn(
    lose: Lose,
    config: LearnerConfig,
    optimizer: optax.GradientTransformation,
    params: Params,
    opt_state: Any,
    batch: Any,
    key: Array,
) -> tuple[Params, Any, dict[str, Array]]:
    """Takes `num_epochs` times `num_minibatches` gradient steps of `lose` on `batch`.

    Args:
      lose: `(params, items) -> Loss`, a mean over the items. batch: pytree of `[N, ...]`, this
        device's N items, `logical_shards` over all devices. key: of the shuffling, the same on
        every device.

    Returns:
      Parameters, optimiser state and the losses' mean over the minibatches.
    """
    local = config.logical_shards // jax.lax.axis_size(DATA)
    shard = jax.lax.axis_index(DATA) * local + jnp.arange(local)
    each = jax.tree.leaves(batch)[0].shape[0] // local
    data = jax.tree.map(lambda a: a.reshape(local, each, *a.shape[1:]), batch)

    def minibatch(carry: Any, piece: Array) -> Any:
        params, opt_state = carry
        items = jax.tree.map(
            lambda a: jax.vmap(lambda rows, at: rows[at])(a, piece).reshape(-1, *a.shape[2:]),
            data,
        )

        def objective(params: Params) -> tuple[Array, Loss]:
            loss = jax.lax.pmean(lose(params, items), DATA)
            return loss.loss, loss

        # The mean over devices stands inside the gradient: outside, it would be N times too big.
        gradient, loss = jax.grad(objective, has_aux=True)(params)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        metrics = loss._asdict() | {"grad_norm": optax.tree.norm(gradient)}
        return (optax.apply_updates(params, updates), opt_state), metrics

    def epoch(carry: Any, epoch_key: Array) -> Any:
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(epoch_key, shard)
        order = jax.vmap(lambda k: jax.random.permutation(k, each))(keys)
        pieces = order.reshape(local, config.num_minibatches, -1)
        return jax.lax.scan(minibatch, carry, jnp.moveaxis(pieces, 1, 0))

    (params, opt_state), metrics = jax.lax.scan(
        epoch, (params, opt_state), jax.random.split(key, config.num_epochs)
    )
    return params, opt_state, jax.tree.map(jnp.mean, metrics)
