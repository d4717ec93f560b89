"""Rollouts: accounts that live along segments of bars under the policy of the moment.

A segment is encoded once on the causal lattice; then its accounts are scanned bar by bar through
the readout and the environment's own transition.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from nca_trader.agents.heads import account_features
from nca_trader.agents.policy import Params, Policy
from nca_trader.envs.trading import (
    Episode,
    Market,
    TradingEnv,
    kept,
    take_legs,
    transition,
)
from nca_trader.numerics import cumsum32
from nca_trader.presets import LearnerConfig


class Segments(NamedTuple):
    """Where the environments stand between updates: S segments with E accounts on each.

    index: `[S]` int32 bar of the next decision. left: `[S]` int32 decisions left of the episode.
    drop: `[S]` which bars are dropped, or None. episode: `[S, E, ...]`.
    """

    index: Array
    left: Array
    drop: Array | None
    episode: Episode


class Rollout(NamedTuple):
    """What an update learns from; windows are gathered again from `index` when needed.

    index: `[S]` int32 bar of the first decision. drop: `[S]`, as in `Segments`.
    seen: `[S, L, E, A, 3]` account features. action: `[S, L, E, A]`.
    log_prob, value, reward, discount: `[S, L, E]`. bootstrap: `[S, E]` value of the observation
      after the last step.
    """

    index: Array
    drop: Array | None
    seen: Array
    action: Array
    log_prob: Array
    value: Array
    reward: Array
    discount: Array
    bootstrap: Array


def gather_segment(
    market: Market,
    index: Array,
    halo: int,
    length: int,
    drop: Array | None = None,
    drop_rate: float = 0.0,
) -> tuple[Array, Array]:
    """Features `[S, halo + length, A, F]` and presence of the bars from `index - halo` on.

    Args:
      drop: `[S]` seeds of the bars that are dropped; their features and presence are 0.
    """
    rows = index[:, None] - halo + jnp.arange(halo + length)[None]
    x, present = market.features[rows], market.legs.present[rows]
    if drop is None:
        return x, present
    there = kept(drop_rate, drop[:, None], rows, present.shape[-1])
    return jnp.where(there[..., None], x, 0.0), present & there


def begin_segments(
    env: TradingEnv, config: LearnerConfig, first: int, segments: Segments, keys: Array
) -> tuple[Segments, Episode]:
    """Draws a new start and new accounts where an episode is over.

    Args:
      first: the earliest bar at which a decision may be taken.
      keys: `[S]` one key a segment.

    Returns:
      The segments, and fresh episodes `[S, E]` that take the place of ruined ones.
    """
    length = config.segment_length
    episode = env.config.episode_bars or length
    last = len(env) - 1 - length

    def draw(key: Array) -> tuple[Array, Array | None, Episode]:
        start_key, account_key = jax.random.split(key)
        start = jax.random.randint(start_key, (), first, last + 1)
        each = jax.random.split(account_key, config.envs_per_segment)
        return start, env.begin_drops(jax.random.fold_in(start_key, 1)), jax.vmap(env.begin)(each)

    start, drop, fresh = jax.vmap(draw)(keys)
    over = (segments.left < length) | (segments.index > last)
    index = jnp.where(over, start, segments.index)
    left = jnp.where(over, episode, segments.left)
    if drop is not None and segments.drop is not None:
        drop = jnp.where(over, drop, segments.drop)
    return Segments(index, left, drop, select(over[:, None], fresh, segments.episode)), fresh


def deepest_fall(reward: Array) -> Array:
    """`[S, E]` how far the running sum of `reward` `[S, L, E]` fell below its peak or 0."""
    curve = cumsum32(reward, axis=1)
    peak = jnp.maximum(jax.lax.cummax(curve, axis=1), 0.0)
    return (peak - curve).max(axis=1)


def select(condition: Array, yes: Episode, no: Episode) -> Episode:
    """`yes` where `condition` holds, its axes being the leading axes of every leaf."""

    def leaf(a: Array, b: Array) -> Array:
        shape = condition.shape + (1,) * (a.ndim - condition.ndim)
        return jnp.where(condition.reshape(shape), a, b)

    return jax.tree.map(leaf, yes, no)


def collect(
    env: TradingEnv,
    policy: Policy,
    config: LearnerConfig,
    params: Params,
    market: Market,
    segments: Segments,
    fresh: Episode,
    keys: Array,
) -> tuple[Segments, Rollout]:
    """Lives through `segment_length` bars on every segment; `keys` `[S]` draw the actions."""
    length, halo = config.segment_length, policy.receptive_field - 1
    drop, spec = segments.drop, policy.spec
    x, present = gather_segment(
        market, segments.index, halo, length + 1, drop, env.config.drop_bars
    )
    cells = jnp.moveaxis(policy.encode(params, x, present)[:, halo:], 1, 0)
    decide = policy.distribution
    shape = (length, config.envs_per_segment, spec.num_assets, decide.outputs(spec))
    noise = jax.vmap(lambda key: decide.noise(key, shape), out_axes=1)(keys)
    rows = segments.index[None] + jnp.arange(length + 1)[:, None]
    legs = take_legs(env.config, market, rows, drop)
    now = jax.tree.map(lambda a: a[:-1], legs)
    following = jax.tree.map(lambda a: a[1:], legs)
    see = jax.vmap(jax.vmap(lambda episode: account_features(episode.account, policy.size)))

    def move(episode, action, now, following):
        return transition(env.config, spec, env.rules, episode, action, now, following)

    move = jax.vmap(jax.vmap(move, in_axes=(0, 0, None, None)))

    def step(episode: Episode, xs):
        cells_t, noise_t, now_t, following_t = xs
        seen = see(episode)
        logits, value = policy.act(params, cells_t[:, None], seen)
        action = decide.sample(logits, noise_t)
        episode, reward = move(episode, decide.order(spec, action), now_t, following_t)
        ruined = episode.account.ruined
        discount = config.discount * (1.0 - ruined)
        episode = select(ruined, fresh, episode)
        return episode, (seen, action, decide.log_prob(logits, action), value, reward, discount)

    episode, steps = jax.lax.scan(step, segments.episode, (cells[:-1], noise, now, following))
    _, bootstrap = policy.act(params, cells[-1][:, None], see(episode))
    steps = [jnp.moveaxis(leaf, 0, 1) for leaf in steps]
    index, left = segments.index + length, segments.left - length
    rollout = Rollout._make([segments.index, drop, *steps, bootstrap])
    return Segments(index, left, drop, episode), rollout
