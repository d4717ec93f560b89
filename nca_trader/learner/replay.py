"""Replay: a ring of rollouts on the device, and how an old one is learnt from.

What is stored is where accounts began and what they did. All else is computed anew: the bars do
not depend on what an agent did, and an account follows from the bars and its actions. So an old
rollout earns what it would earn today, where a curriculum has moved costs and prices since. The
ring is double-buffered: the slot that is written next is none of those that `sample` reads, so an
update may write it while it learns from another.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import chex
import jax
import jax.core
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from nca_trader.agents.policy import Params
from nca_trader.envs.market import Market
from nca_trader.errors import ConfigError
from nca_trader.learner.advantages import reward_scale
from nca_trader.learner.rollout import (
    Begun,
    Draw,
    Rollout,
    Segments,
    Span,
    encode_span,
    repeat,
    roll_out,
)
from nca_trader.learner.setup import Setup
from nca_trader.numerics import exp32, wide
from nca_trader.parallel.mesh import BATCH

GB = 10**9  # bytes


class Ring(NamedTuple):
    """data: pytree of `[R, ...]`, one rollout a slot. next: `[]` int32 slot that `add` writes.

    size: `[]` int32 slots that have been written.
    """

    data: Any
    next: Array
    size: Array


def init(like: Any, slots: int) -> Ring:
    """An empty ring of `slots` items that look like `like` (arrays, or their shapes).

    Raises:
      ConfigError: fewer than two slots: one is read while another is written.
    """
    if slots < 2:
        raise ConfigError(
            f"replay_slots = {slots}: one slot is read while another is written; give at least 2."
        )
    zero = jnp.zeros((), jnp.int32)
    return Ring(jax.tree.map(lambda a: jnp.zeros((slots, *a.shape), a.dtype), like), zero, zero)


def add(ring: Ring, item: Any) -> Ring:
    """The ring with `item` in the place of the oldest."""
    slots = _slots(ring)
    data = jax.tree.map(lambda a, b: a.at[ring.next].set(b), ring.data, item)
    return Ring(data, (ring.next + 1) % slots, jnp.minimum(ring.size + 1, slots))


def can_sample(ring: Ring) -> Array:
    """`[]` bool, whether there is a slot to read."""
    return _readable(ring) > 0


def sample(ring: Ring, key: Array) -> Any:
    """One item, each that may be read as likely as another.

    Raises:
      ConfigError: there is none yet. Inside jit this cannot be raised: ask `can_sample`.
    """
    if not isinstance(ring.size, jax.core.Tracer) and not can_sample(ring):
        raise ConfigError("the replay ring is empty; add a rollout before sampling one.")
    age = jax.random.randint(key, (), 0, jnp.maximum(_readable(ring), 1))
    slot = (ring.next - 1 - age) % _slots(ring)
    return jax.tree.map(lambda a: a[slot], ring.data)


def _slots(ring: Ring) -> int:
    return jax.tree.leaves(ring.data)[0].shape[0]


def _readable(ring: Ring) -> Array:
    return ring.size - (ring.size == _slots(ring))


def ring_spec(slots: int) -> Any:
    """How a ring of rollouts lies on the mesh: every slot's segments split as a batch is."""
    return Ring._make([P(None, BATCH), P(), P()]) if slots else P()


class Stored(NamedTuple):
    """What a ring holds of a `Rollout`: actions, and their log-probabilities at the time."""

    span: Span
    begun: Begun
    action: Array
    log_prob: Array


def stored(rollout: Rollout, begun: Begun) -> Stored:
    """What is kept of `rollout`, whose accounts began as `begun`."""
    return Stored(rollout.span, begun, rollout.action, rollout.log_prob)


def begin_ring(setup: Setup, market: Market, params: Params, segments: Segments) -> Ring:
    """An empty ring of `replay_slots` rollouts such as `roll_out` makes on `segments`."""

    def one(params: Params, segments: Segments) -> Stored:
        keys = jnp.broadcast_to(jax.random.key(0), segments.index.shape)
        draw = Draw(keys, segments.episode)
        rollout = roll_out(setup, params, market, segments, draw)[1]
        return stored(rollout, Begun(segments.episode, segments.episode))

    return init(jax.eval_shape(one, params, segments), setup.config.replay_slots)


def transitions_per_gb(item: Stored) -> int:
    """How many transitions, one account's of one bar each, 10^9 bytes of ring hold.

    Args:
      item: of one slot (arrays, or their shapes).
    """
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(item))
    return GB * item.log_prob.size // held


def described(ring: Ring) -> str:
    """How much a ring of rollouts (or of their shapes) holds, in one line."""
    transitions = ring.data.log_prob.size
    per_gb = transitions_per_gb(ring.data)
    return (
        f"replay: {transitions:,} transitions in {transitions / per_gb * 1e3:.3g} MB, "
        f"{per_gb / 1e6:.3g} million a GB"
    )


def vtrace(
    r_t: Array, discount_t: Array, v_tm1: Array, v_t: Array, lambda_t: Array, log_rho_tm1: Array
) -> tuple[Array, Array]:
    """Advantages and value targets from actions of another policy, their ratios clipped at 1.

    With rho = pi / mu:  `delta_t = min(1, rho_{t-1}) (r_t + discount_t v_t - v_{t-1})`,
    `e_{t-1} = delta_t + discount_t lambda_t min(1, rho_{t-1}) e_t`; the target is `v_{t-1} +
    e_{t-1}`, the advantage `min(1, rho_{t-1}) (r_t + discount_t (v_t + lambda_t e_t) - v_{t-1})`.
    Where mu is pi both are those of `gae`, with its two kinds of boundary.
    Source: Espeholt et al. 2018, "IMPALA", equation 1 and section 4.2, remark 2 for lambda.

    Args:
      r_t, discount_t, v_tm1, v_t, lambda_t: `[T]`, as in `gae`.
      log_rho_tm1: `[T]` log of pi / mu of the action at t - 1.

    Returns:
      Advantage and value target, `[T]` float32 at least.
    """
    args = (r_t, discount_t, v_tm1, v_t, lambda_t, log_rho_tm1)
    args = [wide(jnp.asarray(x)) for x in args]
    chex.assert_rank(args, 1)
    chex.assert_equal_shape(args)
    r_t, discount_t, v_tm1, v_t, lambda_t, log_rho_tm1 = args
    rho = jnp.minimum(1.0, exp32(log_rho_tm1))
    delta_t = rho * (r_t + discount_t * v_t - v_tm1)

    def backward(later: Array, xs: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        delta, decay = xs
        return delta + decay * later, (delta + decay * later, later)

    last = jnp.zeros_like(delta_t[0])
    decay_t = discount_t * lambda_t * rho
    _, (error_tm1, error_t) = jax.lax.scan(backward, last, (delta_t, decay_t), reverse=True)
    advantage = rho * (r_t + discount_t * (v_t + lambda_t * error_t) - v_tm1)
    return advantage, v_tm1 + error_tm1


def revalued(
    setup: Setup,
    params: Params,
    target: Params,
    market: Market,
    item: Stored,
    scales: tuple[Array | None, Array | None] = (None, None),
) -> tuple[Rollout, Array, Array]:
    """An old rollout as it would be now: `(rollout, advantage, value target)`, to learn from.

    Its actions are taken again, at today's costs and prices. Its log-probabilities and values
    become those of `params`, from which the surrogate measures its ratio; what its actions are
    worth is corrected for the policy that took them by `vtrace`. The ratios stay exact where
    accounts come out differently: an account is a function of the actions before it, so the stored
    probability is that of the same sequence of actions.

    Args:
      target: an average of parameters; bootstraps the value after the last step and no more.
      scales: of the curriculum now, factors on costs and on log-returns.
    """
    policy, config, hyper = setup
    length = config.segment_length
    draw = Draw(item.span.index, item.begun.fresh, *scales)  # the keys draw nothing here
    begun, action = item.begun.episode, item.action
    seen, reward, ruined, last = repeat(policy, market, item.span, begun, action, draw)
    discount = hyper.discount * (1.0 - ruined)
    cells = encode_span(policy, params, market, item.span, length)
    logits, value = policy.act(params, cells[:, :, None], seen)
    log_prob = policy.distribution.log_prob(logits, action)
    after = item.span._replace(index=item.span.index + length)
    cells = encode_span(policy, target, market, after, 1)
    _, bootstrap = policy.act(target, cells, last)
    next_value = jnp.concatenate([value[:, 1:], bootstrap[:, None]], axis=1)
    advantage, value_target = jax.vmap(jax.vmap(vtrace, in_axes=1, out_axes=1))(
        reward_scale(setup, market) * reward,
        discount,
        value,
        next_value,
        jnp.full_like(reward, hyper.gae_lambda),
        log_prob - item.log_prob,
    )
    rollout = Rollout(item.span, seen, action, log_prob, value, reward, discount, bootstrap)
    return rollout, advantage, value_target
