"""Decisions over a mesh: many windows at once, or one history that is too long for a device."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nca_trader.agents.policy import Params, Policy
from nca_trader.errors import ConfigError
from nca_trader.learner.layout import make_layout
from nca_trader.parallel.mesh import BATCH, DATA, FSDP, MODEL, replicated

Decide = Callable[[Params, Array, Array, Array], tuple[Array, Array]]


def windows_over(policy: Policy, mesh: Mesh) -> Decide:
    """Decisions from a batch of windows in one call, the batch split over the mesh.

    Parameters may come from anywhere, e.g. a checkpoint; they are laid out as in training.

    Returns:
      `(params, x [B, T, A, F], present [B, T, A], account_features [B, A, 3 + M]) -> (logits
      [B, A, n], value [B])`, jitted: of each window's last bar, as `policy.encode` and
      `policy.act` give them. T is at least the receptive field, for cells that see all of it; B a
      multiple of the mesh's data * fsdp.
    """
    layout = make_layout(policy, mesh)
    shapes = jax.eval_shape(policy.init, jax.random.key(0))

    def decide(params: Params, x: Array, present: Array, seen: Array) -> tuple[Array, Array]:
        whole = layout.gathered(params)
        last = policy.encode(whole, x, present, halo=x.shape[1] - 1)[:, 0]
        return policy.act(whole, last, seen)

    specs = (layout.specs(shapes, FSDP), *(P(BATCH),) * 3)
    mapped = jax.shard_map(
        decide, mesh=mesh, in_specs=specs, out_specs=P(BATCH), axis_names=layout.by_hand
    )
    placed = (layout.specs(shapes, FSDP, MODEL), *(P(BATCH),) * 3)
    return jax.jit(mapped, in_shardings=jax.tree.map(lambda s: NamedSharding(mesh, s), placed))


def history_over(policy: Policy, mesh: Mesh) -> Callable[[Params, Array, Array], Array]:
    """Cells of histories that are split along time: each device encodes its own bars.

    A cell sees RF bars and none later, so a device needs the RF - 1 bars before its own: they come
    from the device before it, in one exchange. The first device has none before: it encodes what
    it was sent behind its own bars, where nothing looks.

    Returns:
      `(params, x [B, T, A, F], present [B, T, A]) -> cells [B, T, A, C]`, jitted, those of
      `policy.encode`, split along T over the mesh's `data`.

    Raises:
      ConfigError: when called, if T does not divide, or a device's bars are fewer than RF - 1.
    """
    devices, halo = mesh.shape[DATA], policy.receptive_field - 1
    onwards = [(n, (n + 1) % devices) for n in range(devices)]

    def own(params: Params, x: Array, present: Array) -> Array:
        length = x.shape[1]
        bars = jnp.concatenate([x, present[..., None].astype(x.dtype)], axis=-1)
        before = jax.lax.ppermute(bars[:, length - halo :], DATA, onwards)
        first = jax.lax.axis_index(DATA) == 0
        bars = jnp.where(
            first,
            jnp.concatenate([bars, before], axis=1),
            jnp.concatenate([before, bars], axis=1),
        )
        cells = policy.encode(params, bars[..., :-1], bars[..., -1] > 0.0)
        return jnp.where(first, cells[:, :length], cells[:, halo:])

    over_time = P(None, DATA)
    mapped = jax.shard_map(
        own, mesh=mesh, in_specs=(P(), over_time, over_time), out_specs=over_time
    )
    placed = NamedSharding(mesh, over_time)
    jitted = jax.jit(mapped, in_shardings=(replicated(mesh), placed, placed))

    def encode(params: Params, x: Array, present: Array) -> Array:
        if x.shape[1] % devices or x.shape[1] // devices < halo:
            raise ConfigError(
                f"a history of {x.shape[1]} bars over {devices} devices: each needs as many, and "
                f"at least the {halo} that a cell sees before its own; give a multiple of "
                f"{devices} from {devices * halo} on, or a smaller mesh."
            )
        return jitted(params, x, present)

    return encode
