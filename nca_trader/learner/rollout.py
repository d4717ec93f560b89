"""Rollouts: accounts that live along segments of bars under the policy of the moment.

A segment is encoded once on the causal lattice; then its accounts are scanned bar by bar through
the readout and the environment's own transition.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from nca_trader.agents.heads import account_features, log_prob, sample
from nca_trader.agents.policy import Params, Policy
from nca_trader.envs.account import Account
from nca_trader.envs.trading import Market, TradingEnv, transition
from nca_trader.presets import LearnerConfig


class Segments(NamedTuple):
    """Where the environments stand between updates: S segments with E accounts on each.

    index: `[S]` int32 bar of the next decision. left: `[S]` int32 decisions left of the episode.
    account: `[S, E, ...]`.
    """

    index: Array
    left: Array
    account: Account


class Rollout(NamedTuple):
    """What an update learns from; windows are gathered again from `index` when needed.

    index: `[S]` int32 bar of the first decision. seen: `[S, L, E, A, 3]` account features.
    action: `[S, L, E, A]` int32. log_prob, value, reward, discount: `[S, L, E]`.
    bootstrap: `[S, E]` value of the observation after the last step.
    """

    index: Array
    seen: Array
    action: Array
    log_prob: Array
    value: Array
    reward: Array
    discount: Array
    bootstrap: Array


def gather_segment(market: Market, index: Array, halo: int, length: int) -> tuple[Array, Array]:
    """Features `[S, halo + length, A, F]` and presence of the bars from `index - halo` on."""
    rows = index[:, None] - halo + jnp.arange(halo + length)[None]
    return market.features[rows], market.legs.present[rows]


def begin_segments(
    env: TradingEnv, config: LearnerConfig, first: int, segments: Segments, keys: Array
) -> tuple[Segments, Account]:
    """Draws a new start and new accounts where an episode is over.

    Args:
      first: the earliest bar at which a decision may be taken.
      keys: `[S]` one key a segment.

    Returns:
      The segments, and fresh accounts `[S, E]` that take the place of ruined ones.
    """
    length = config.segment_length
    episode = env.config.episode_bars or length
    last = len(env) - 1 - length

    def draw(key: Array) -> tuple[Array, Account]:
        start_key, account_key = jax.random.split(key)
        start = jax.random.randint(start_key, (), first, last + 1)
        return start, jax.vmap(env.begin)(jax.random.split(account_key, config.envs_per_segment))

    start, fresh = jax.vmap(draw)(keys)
    over = (segments.left < length) | (segments.index > last)
    index = jnp.where(over, start, segments.index)
    left = jnp.where(over, episode, segments.left)
    account = select(over[:, None], fresh, segments.account)
    return Segments(index, left, account), fresh


def select(condition: Array, yes: Account, no: Account) -> Account:
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
    fresh: Account,
    keys: Array,
) -> tuple[Segments, Rollout]:
    """Lives through `segment_length` bars on every segment; `keys` `[S]` draw the actions."""
    length, halo = config.segment_length, policy.receptive_field - 1
    x, present = gather_segment(market, segments.index, halo, length + 1)
    cells = jnp.moveaxis(policy.encode(params, x, present)[:, halo:], 1, 0)
    shape = (length, config.envs_per_segment, policy.spec.num_assets, policy.spec.num_actions)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, shape), out_axes=1)(keys)
    rows = segments.index[None] + jnp.arange(length + 1)[:, None]
    legs = jax.tree.map(lambda a: a[rows], market.legs)
    now = jax.tree.map(lambda a: a[:-1], legs)
    following = jax.tree.map(lambda a: a[1:], legs)
    see = jax.vmap(jax.vmap(lambda account: account_features(account, policy.size)))
    targets = jnp.asarray(env.targets)

    def move(account, target, now, following):
        return transition(account, target, now, following, env.costs, env.rules)

    move = jax.vmap(jax.vmap(move, in_axes=(0, 0, None, None)))

    def step(account: Account, xs):
        cells_t, noise_t, now_t, following_t = xs
        seen = see(account)
        logits, value = policy.act(params, cells_t[:, None], seen)
        action = sample(logits, noise_t)
        account, reward = move(account, targets[action], now_t, following_t)
        discount = config.discount * (1.0 - account.ruined)
        account = select(account.ruined, fresh, account)
        return account, (seen, action, log_prob(logits, action), value, reward, discount)

    account, steps = jax.lax.scan(step, segments.account, (cells[:-1], noise, now, following))
    _, bootstrap = policy.act(params, cells[-1][:, None], see(account))
    steps = [jnp.moveaxis(leaf, 0, 1) for leaf in steps]
    index, left = segments.index + length, segments.left - length
    return Segments(index, left, account), Rollout._make([segments.index, *steps, bootstrap])
