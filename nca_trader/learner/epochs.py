"""Epochs of minibatches over a batch of items: which loss, and what an item is, others say.

Runs inside `shard_map` over the axes of the batch. An item is what a minibatch never splits: a
segment of bars for the trader, one step where steps are learnt from alone.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from nca_trader.config import LearnerConfig
from nca_trader.learner.layout import EVERYWHERE, Layout, mean_in_order, one_by_one
from nca_trader.learner.ppo import Loss
from nca_trader.parallel.mesh import BATCH

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
    micro_batches: int = 1,
    layout: Layout = EVERYWHERE,
) -> tuple[Params, Any, dict[str, Array]]:
    """Takes `num_epochs` times `num_minibatches` gradient steps of `lose` on `batch`.

    With `max_kl`, the first minibatch on which the policy is further than that from the one that
    acted, and all after it, move nothing: `kl_stopped` counts them.

    Args:
      lose: `(params, items) -> Loss`, a mean over the items. batch: pytree of `[N, ...]`, this
        device's N items, of `logical_shards` over all devices. key: of the shuffling, the same
        on every device. micro_batches: pieces in which a minibatch's gradient is summed.
      layout: of the parameters on the mesh.

    Returns:
      Parameters, optimiser state and the losses' mean over the minibatches that were computed.
    """
    local = config.logical_shards // jax.lax.axis_size(BATCH)
    shard = jax.lax.axis_index(BATCH) * local + jnp.arange(local)
    each = jax.tree.leaves(batch)[0].shape[0] // local
    data = jax.tree.map(lambda a: a.reshape(local, each, *a.shape[1:]), batch)

    def compute(params: Params, opt_state: Any, piece: Array) -> Any:
        items = jax.tree.map(lambda a: jax.vmap(lambda rows, at: rows[at])(a, piece), data)
        gradient, loss = gradient_of(lose, params, items, micro_batches, layout)
        metrics = loss._asdict() | {"grad_norm": layout.norm(gradient)}

        def move() -> Any:
            updates, moved = optimizer.update(gradient, opt_state, params)
            return optax.apply_updates(params, updates), moved

        if config.max_kl is None:
            return (*move(), jnp.bool_(True)), metrics
        near = ~(loss.approx_kl > config.max_kl)  # one that is no number is the guard's affair
        return (*jax.lax.cond(near, move, lambda: (params, opt_state)), near), metrics

    def minibatch(carry: Any, piece: Array) -> Any:
        params, opt_state, going = carry
        if config.max_kl is None:
            carry, metrics = compute(params, opt_state, piece)
        else:
            shapes = jax.eval_shape(lambda: compute(params, opt_state, piece)[1])
            nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
            carry, metrics = jax.lax.cond(
                going, lambda: compute(params, opt_state, piece), lambda: (carry, nothing)
            )
        return carry, (metrics, going, carry[-1])

    def epoch(carry: Any, epoch_key: Array) -> Any:
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(epoch_key, shard)
        # Not vmap: a TPU's compiler takes four times as long over a sort of several rows.
        order = jax.lax.map(lambda k: jax.random.permutation(k, each), keys)
        pieces = order.reshape(local, config.num_minibatches, -1)
        return jax.lax.scan(minibatch, carry, jnp.moveaxis(pieces, 1, 0))

    carry = (params, opt_state, jnp.bool_(True))
    (params, opt_state, _), (metrics, computed, moved) = jax.lax.scan(
        epoch, carry, jax.random.split(key, config.num_epochs)
    )
    metrics = jax.tree.map(lambda m: m.sum() / computed.sum(), metrics)
    return params, opt_state, metrics | {"kl_stopped": (~moved).sum()}


def gradient_of(
    lose: Lose, params: Params, items: Any, micro_batches: int = 1, layout: Layout = EVERYWHERE
) -> tuple[Params, Loss]:
    """The gradient of the mean loss over all devices' items, and the loss's terms.

    Each device sums its own pieces' gradients, in float32, before they are averaged over devices:
    of parameters marked as varying, the gradient is the device's own.

    Args:
      items: pytree of `[G, M, ...]`, this device's G logical shards of M items. Of a deterministic
        layout the gradient of each shard is computed by itself.
    """
    own = layout.own(params)

    def one(items: Any) -> tuple[Params, Loss]:
        def objective(params: Params) -> tuple[Array, Loss]:
            loss = lose(params, items)
            return loss.loss, loss

        return jax.grad(objective, has_aux=True)(own)

    def add(total: Params, piece: Any) -> tuple[Params, Loss]:
        gradient, loss = one(piece)
        return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, gradient), loss

    def in_pieces(items: Any) -> tuple[Params, Loss]:
        if micro_batches == 1:
            return one(items)
        pieces = jax.tree.map(lambda a: a.reshape(micro_batches, -1, *a.shape[1:]), items)
        zero = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.promote_types(p, jnp.float32)), own)
        total, losses = jax.lax.scan(add, zero, pieces)
        gradient = jax.tree.map(lambda t, p: (t / micro_batches).astype(p.dtype), total, own)
        return gradient, jax.tree.map(jnp.mean, losses)

    if layout.deterministic:
        return mean_in_order(one_by_one(in_pieces, items))
    items = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), items)
    return layout.mean(*in_pieces(items))
