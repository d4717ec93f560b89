"""Learning from sampled rollouts: fresh ones, and old ones from a ring on the device.

The ring stores where accounts began and their actions. Everything else is computed again: bars do
not depend on actions, and an account follows from the bars and its actions. So an old rollout has
the rewards it would have today, after a curriculum has moved costs and prices. The ring is
double-buffered: `sample` never reads the slot that is written next, so an update may write that
slot while it learns from another.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from nca_trader.agents.policy import Params
from nca_trader.config import ranges
from nca_trader.envs.account.costs import examine
from nca_trader.envs.market import Market
from nca_trader.errors import ConfigError
from nca_trader.learner.ppo import (
    AdvantageMoments,
    AgentSetup,
    Loss,
    Old,
    gae,
    group_advantages,
    moments,
    normalised,
    ppo_loss,
    reward_scale,
    vtrace,
)
from nca_trader.learner.rollout import (
    Algorithm,
    Begun,
    Draw,
    Rollout,
    Segments,
    Span,
    encode_span,
    repeat,
    roll_out,
)
from nca_trader.numerics import cumsum32
from nca_trader.parallel.mesh import BATCH

GB = 10**9  # bytes


class Ring(NamedTuple):
    """A ring buffer of R slots.

    Attributes:
      data: pytree of `[R, ...]`, one rollout per slot.
      next: `[]` int32 slot that `add` writes.
      size: `[]` int32 number of slots that have been written.
    """

    data: Any
    next: Array
    size: Array


def init(like: Any, slots: int) -> Ring:
    """Return an empty ring of `slots` items of the shapes and types of `like`.

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
    """Return the ring with `item` in place of the oldest."""
    slots = _slots(ring)
    data = jax.tree.map(lambda a, b: a.at[ring.next].set(b), ring.data, item)
    return Ring(data, (ring.next + 1) % slots, jnp.minimum(ring.size + 1, slots))


def can_sample(ring: Ring) -> Array:
    """Return `[]` bool, whether a slot can be read."""
    return _readable(ring) > 0


def sample(ring: Ring, key: Array) -> Any:
    """Draw one of the readable items uniformly.

    Raises:
      ConfigError: there is none yet. Inside jit nothing can be raised: use `can_sample`.
    """
    if not isinstance(ring.size, jax.core.Tracer) and not can_sample(ring):
        raise ConfigError("the replay ring is empty; add a rollout before sampling one.")
    # At least 1, for the bounds of the draw: inside jit an empty ring is not refused.
    age = jax.random.randint(key, (), 0, jnp.maximum(_readable(ring), 1))
    slot = (ring.next - 1 - age) % _slots(ring)
    return jax.tree.map(lambda a: a[slot], ring.data)


def _slots(ring: Ring) -> int:
    return jax.tree.leaves(ring.data)[0].shape[0]


def _readable(ring: Ring) -> Array:
    # In a full ring the oldest slot is the next to be written, so it is not read.
    return ring.size - (ring.size == _slots(ring))


def ring_spec(slots: int) -> Any:
    """Partitions of a ring on the mesh: the segments of a slot are split like a batch."""
    return Ring._make([P(None, BATCH), P(), P()]) if slots else P()


class Stored(NamedTuple):
    """The part of a `Rollout` that a ring stores."""

    span: Span
    begun: Begun
    action: Array
    log_prob: Array


def store_rollout(rollout: Rollout, begun: Begun) -> Stored:
    """Return the part of `rollout` to store, whose accounts began as `begun`."""
    return Stored(rollout.span, begun, rollout.action, rollout.log_prob)


def begin_ring(setup: AgentSetup, market: Market, params: Params, segments: Segments) -> Ring:
    """Return an empty ring of `replay_slots` rollouts on `segments`."""

    def one(params: Params, segments: Segments) -> Stored:
        keys = jnp.broadcast_to(jax.random.key(0), segments.index.shape)
        draw = Draw(keys, segments.episode)
        rollout = roll_out(setup, params, market, segments, draw)[1]
        return store_rollout(rollout, Begun(segments.episode, segments.episode))

    # Shapes alone: nothing is simulated here.
    return init(jax.eval_shape(one, params, segments), setup.config.replay_slots)


def transitions_per_gb(item: Stored) -> int:
    """Return how many transitions fit into 10^9 bytes; one is one account at one bar.

    Args:
      item: arrays, or their shapes.
    """
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(item))
    return GB * item.log_prob.size // held


def describe_ring(ring: Ring) -> str:
    """Describe the capacity of a ring in one line."""
    transitions = ring.data.log_prob.size
    per_gb = transitions_per_gb(ring.data)
    return (
        f"replay: {transitions:,} transitions in {transitions / per_gb * 1e3:.3g} MB, "
        f"{per_gb / 1e6:.3g} million per GB"
    )


def revalued(
    setup: AgentSetup,
    params: Params,
    target: Params,
    market: Market,
    item: Stored,
    scales: tuple[Array | None, Array | None] = (None, None),
) -> tuple[Rollout, Array, Array]:
    """Evaluate an old rollout under the current parameters, costs and prices.

    The actions are simulated again. Log-probabilities and values become those of `params`, which
    the surrogate measures its ratio from, and `vtrace` corrects advantages for the policy that
    acted. The ratios stay exact where accounts differ from the stored ones: an account is a
    function of its actions, so the stored probability is that of the same sequence of actions.

    Args:
      setup: policy, settings and hyper-parameters.
      params: the current parameters.
      target: an average of the parameters; it bootstraps the value after the last step only.
      market: the bars.
      item: the old rollout.
      scales: the curriculum's factors on costs and on log-returns now.

    Returns:
      The rollout, its advantages and value targets.
    """
    policy, config, hyper = setup
    length = config.segment_length
    draw = Draw(item.span.index, item.begun.fresh, *scales)  # the keys draw nothing here
    begun, action = item.begun.episode, item.action
    seen, reward, bankrupt, last = repeat(policy, market, item.span, begun, action, draw)
    discount = hyper.discount * (1.0 - bankrupt)
    cells = encode_span(policy, params, market, item.span, length)
    # The new axis is that of accounts: those that share a bar share its cells.
    logits, value = policy.act(params, cells[:, :, None], seen)
    log_prob = policy.distribution.log_prob(logits, action)
    # The bar after the last decision, encoded with the averaged parameters.
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


Batch = tuple[Rollout, Array, Array | None]  # and advantages, and the values' targets
Statistics = dict[str, Any]  # arrays and `AdvantageMoments`


def collect(
    setup: AgentSetup,
    params: Params,
    market: Market,
    segments: Segments,
    draw: Draw,
    estimator: Callable[..., Array] = gae,
) -> tuple[Segments, Batch, Statistics]:
    """Sample a rollout and estimate its advantages; see `Algorithm.collect`."""
    segments, rollout = roll_out(setup, params, market, segments, draw)
    scale = reward_scale(setup, market)
    advantage, value_target = estimate(setup, rollout, scale, estimator)
    statistics = rollout_statistics(rollout, advantage, value_target)
    return segments, (_learnt(rollout), advantage, value_target), statistics


def replay(
    setup: AgentSetup, params: Params, average: Params, market: Market, item: Stored, scales: Any
) -> tuple[Batch, Statistics]:
    """Estimate the advantages of a stored rollout; see `Algorithm.replay`."""
    rollout, advantage, value_target = revalued(setup, params, average, market, item, scales)
    advantage = against_others(advantage)
    return (_learnt(rollout), advantage, value_target), {"advantage": moments(advantage)}


def _learnt(rollout: Rollout) -> Rollout:
    """Drop what follows the last step, which no minibatch needs to gather."""
    # Any small leaf with the axis of segments, since minibatches take rows of every leaf.
    return rollout._replace(bootstrap=rollout.span.index)


def estimate(
    setup: AgentSetup, rollout: Rollout, scale: Array, estimator: Callable[..., Array] = gae
) -> tuple[Array, Array | None]:
    """Return advantages `[S, L, E]` and value targets; None without a critic.

    Those of "group" are normalised within their segment, the others not yet.

    Args:
      setup: the method and its hyper-parameters.
      rollout: what the accounts did on each segment.
      scale: `[]` factor that makes the values' targets of order one.
      estimator: `gae`, or a function with its arguments.
    """
    reward = scale * rollout.reward
    if setup.config.advantages == "group":
        return jax.vmap(group_advantages)(reward, rollout.discount), None
    next_value = jnp.concatenate([rollout.value[:, 1:], rollout.bootstrap[:, None]], axis=1)
    mixing = jnp.full_like(rollout.reward, setup.hyper.gae_lambda)
    over_time = jax.vmap(jax.vmap(estimator, in_axes=1, out_axes=1))
    advantage = over_time(reward, rollout.discount, rollout.value, next_value, mixing)
    value_target = advantage + rollout.value
    return against_others(advantage), value_target


def against_others(advantage: Array) -> Array:
    """Subtract from `advantage` `[S, L, E]` its mean over the accounts that share a bar.

    The bars do not depend on the actions, so the mean over accounts is an unbiased baseline for
    what the bars did to all of them. Source: Mao et al. 2019, "Variance reduction
    for reinforcement learning in input-driven environments", theorem 1.
    """
    # With a single account, its advantage less the mean would always be 0.
    if advantage.shape[-1] == 1:
        return advantage
    return advantage - advantage.mean(axis=-1, keepdims=True)


def normalize(
    setup: AgentSetup, batch: Batch, statistics: Statistics
) -> tuple[Batch, dict[str, Array]]:
    """Normalise advantages over all devices; see `Algorithm.normalize`.

    Those of "group" are normalised within their segment already.
    """
    rollout, advantage, value_target = batch
    if setup.config.advantages != "group":
        # The moments are of all devices and logical shards; those of one part would depend on the
        # mesh.
        all_of = statistics["advantage"].pooled()
        advantage = normalised(advantage - all_of.mean, all_of.variance)
    plain = {
        name: x.mean() for name, x in statistics.items() if not isinstance(x, AdvantageMoments)
    }
    if "error" in statistics:
        spread, missed = (statistics[name].pooled().variance for name in ("target", "error"))
        # The floor is for targets that are all equal.
        plain["explained_variance"] = 1.0 - missed / jnp.maximum(spread, 1e-12)
    return (rollout, advantage, value_target), plain


def loss(setup: AgentSetup, params: Params, market: Market, items: Batch) -> Loss:
    """Return the clipped surrogate over whole segments, encoded again; see `Algorithm.loss`."""
    rollout, advantage, value_target = items
    policy, config, hyper = setup
    cells = encode_span(policy, params, market, rollout.span, config.segment_length)
    logits, value = policy.act(params, cells[:, :, None], rollout.seen)
    distribution = policy.distribution
    log_prob = distribution.log_prob(logits, rollout.action)
    # The mean over assets: advantages have spread 1 whatever the number of assets, and an entropy
    # bonus summed over a hundred assets would outweigh them.
    entropy = distribution.entropy(logits) / logits.shape[-2]
    old = Old(rollout.log_prob, advantage, rollout.value, value_target)
    return ppo_loss(config, hyper, old, log_prob, entropy, value)


def rollout_statistics(
    rollout: Rollout, advantage: Array, value_target: Array | None
) -> Statistics:
    """Statistics of a rollout: reward per step, trading, and moments for explained variance."""
    changed = rollout.action[:, 1:] != rollout.action[:, :-1]
    statistics: Statistics = {
        "reward": rollout.reward.mean(),
        "drawdown": deepest_fall(rollout.reward).mean(),
        "action_changes": changed.mean(dtype=rollout.reward.dtype),
    }
    if value_target is not None:
        statistics["advantage"] = moments(advantage)
        statistics["target"] = moments(value_target)
        statistics["error"] = moments(value_target - rollout.value)
    return statistics


def deepest_fall(reward: Array) -> Array:
    """Return `[S, E]`, the largest fall of the sum of `reward` `[S, L, E]` from its peak or 0."""
    curve = cumsum32(reward, axis=1)
    # The curve starts at 0 before the first reward.
    peak = jnp.maximum(jax.lax.cummax(curve, axis=1), 0.0)
    return (peak - curve).max(axis=1)


SAMPLED = Algorithm(lambda env: None, collect, normalize, loss, replay)


def own_algorithm(value: Any, name: str) -> Algorithm:
    """Return `SAMPLED` with your own function in the place of `gae`; an `Algorithm` as it is.

    Args:
      value: `(r_t, discount_t, v_tm1, v_t, lambda_t) -> [T]`, `[T]` each, see `gae`.
      name: of it, for messages.

    Raises:
      ConfigError: it is neither, raises, or does not return `[T]`.
    """
    if isinstance(value, Algorithm):
        return value
    if not callable(value):
        raise ConfigError(
            f"{name}: is {ranges.describe(value)}; give a function with the arguments of "
            "nca_trader.learner.ppo.gae, or an Algorithm."
        )
    row = jax.ShapeDtypeStruct((3,), jnp.float32)
    examine(name, value, *[row] * 5, shapes=(row.shape,), returns="[3] of 3 steps")
    estimator: Any = value
    collected = functools.partial(collect, estimator=estimator)
    return SAMPLED._replace(collect=collected, replay=None)
