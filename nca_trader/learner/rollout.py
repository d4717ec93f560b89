"""Rollouts: accounts that live along segments of bars under the policy of the moment.

A segment is encoded once on the causal lattice; then its accounts are scanned bar by bar through
the readout and the environment's own transition.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from nca_trader.agents.heads import account_features
from nca_trader.agents.nca import Fire
from nca_trader.agents.policy import Params, Policy
from nca_trader.config import LearnerConfig
from nca_trader.envs.account.legs import Legs
from nca_trader.envs.trading import (
    Episode,
    Market,
    TradingEnv,
    begin,
    begin_dropout,
    kept,
    transition,
)
from nca_trader.learner.curriculum import moved
from nca_trader.learner.ppo import Loss
from nca_trader.types import EnvSpec, Tensor


class Segments(NamedTuple):
    """Where the environments stand between updates: S segments with E accounts on each.

    index: `[S]` int32 bar of the next decision. left: `[S]` int32 decisions left of the episode.
    drop: `[S]` which bars are dropped, or None. episode: `[S, E, ...]`.
    """

    index: Array
    left: Array
    drop: Array | None
    episode: Episode


class Span(NamedTuple):
    """Which bars of the market an update's segments are; what is seen there is gathered anew.

    index: `[S]` int32 bar of the first decision. drop: `[S]`, as in `Segments`. fire: `[S]` seeds
    of which updates of cells take place, where not all do: collecting and learning draw the same.
    """

    index: Array
    drop: Array | None
    fire: Array | None = None


class Draw(NamedTuple):
    """What an update draws and meets, beside its segments.

    keys: `[S]` one a segment. fresh: `[S, E]` episodes that take the place of ruined ones.
    cost_scale, volatility_scale: `[]` factors on all costs and log-returns, or None.
    """

    keys: Array
    fresh: Episode
    cost_scale: Array | None = None
    volatility_scale: Array | None = None


class Begun(NamedTuple):
    """How accounts began, `[S, E]` episodes: what they do then follows from the bars and actions.

    episode: at the first bar. fresh: what takes the place of those that are ruined.
    """

    episode: Episode
    fresh: Episode


class Method(NamedTuple):
    """How experience is made and what is learnt from it; see `sampled` and `exact`.

    gather: `(params, market, segments, draw) -> (segments after, batch, figures)`, the batch a
      pytree of `[S, ...]`, the figures one of `[]`, means over these segments alone.
    settle: `(batch, figures) -> (batch, metrics)`, what is learnt from by figures `[P]` of all the
      equal parts of the whole batch. lose: `(params, market, items of the batch) -> Loss`.
    again: `(params, their average, market, item of the replay ring, factors on costs and on
      log-returns now) -> (batch, figures)`, or None where nothing old can be learnt from.
    """

    gather: Callable[[Params, Market, Segments, Draw], tuple[Segments, Any, Any]]
    settle: Callable[[Any, Any], tuple[Any, dict[str, Array]]]
    lose: Callable[[Params, Market, Any], Loss]
    again: Callable[[Params, Params, Market, Any, Any], tuple[Any, Any]] | None = None


class Rollout(NamedTuple):
    """What E sampled accounts met on each segment.

    span: of the segments. seen: `[S, L, E, A, 3 + M]` account features. action: `[S, L, E, A]`.
    log_prob, value, reward, discount: `[S, L, E]`. bootstrap: `[S, E]` value of the observation
      after the last step.
    """

    span: Span
    seen: Array
    action: Array
    log_prob: Array
    value: Array
    reward: Array
    discount: Array
    bootstrap: Array


def gather_segment(
    market: Market, span: Span, halo: int, length: int, drop_rate: float = 0.0
) -> tuple[Array, Array]:
    """Features `[S, halo + length, A, F]` and presence of the bars from `span.index - halo` on.

    Features and presence of bars that the span drops are 0.
    """
    rows = span.index[:, None] - halo + jnp.arange(halo + length)[None]
    x, present = market.features[rows], market.legs.present[rows]
    if span.drop is None:
        return x, present
    there = kept(drop_rate, span.drop[:, None], rows, present.shape[-1])
    return jnp.where(there[..., None], x, 0.0), present & there


def encode_span(
    policy: Policy, params: Params, market: Market, span: Span, length: int, drop_rate: float
) -> Array:
    """Cells `[S, length, A, C]` of the bars from `span.index` on, each with all its past."""
    halo = policy.receptive_field - 1
    x, present = gather_segment(market, span, halo, length, drop_rate)
    fire = None if span.fire is None else Fire(span.fire, span.index - halo)
    return jax.named_scope("encode")(policy.encode)(params, x, present, fire, halo)


def span_of(policy: Policy, segments: Segments, draw: Draw) -> Span:
    """The bars of the segments as this update sees them."""
    if policy.fire_rate == 1.0:
        return Span(segments.index, segments.drop)
    # Beside the segment's own key, which draws the actions.
    seeds = jax.vmap(lambda key: jax.random.bits(jax.random.fold_in(key, 1), (), jnp.uint32))
    return Span(segments.index, segments.drop, seeds(draw.keys))


def begin_segments(
    env: TradingEnv,
    config: LearnerConfig,
    first: int,
    segments: Segments,
    keys: Array,
    rows: int | Tensor,
) -> tuple[Segments, Episode]:
    """Draws a new start and new accounts where an episode is over.

    Args:
      first: the earliest bar at which a decision may be taken.
      keys: `[S]` one key a segment. rows: `[]` bars of the market.

    Returns:
      The segments, and fresh episodes `[S, E]` that take the place of ruined ones.
    """
    length = config.segment_length
    episode = env.config.episode_bars or length
    last = rows - 1 - length

    def draw(key: Array) -> tuple[Array, Array | None, Episode]:
        start_key, account_key = jax.random.split(key)
        start = jax.random.randint(start_key, (), first, last + 1, dtype=jnp.int32)
        each = jax.random.split(account_key, config.envs_per_segment)
        fresh = jax.vmap(functools.partial(begin, env.dynamics))(each)
        drop = begin_dropout(env.dynamics, jax.random.fold_in(start_key, 1))
        return start, drop, fresh

    start, drop, fresh = jax.vmap(draw)(keys)
    over = (segments.left < length) | (segments.index > last)
    index = jnp.where(over, start, segments.index)
    left = jnp.where(over, episode, segments.left)
    if drop is not None and segments.drop is not None:
        drop = jnp.where(over, drop, segments.drop)
    return Segments(index, left, drop, select(over[:, None], fresh, segments.episode)), fresh


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
    draw: Draw,
) -> tuple[Segments, Rollout]:
    """Lives through `segment_length` bars on every segment."""
    length, spec = config.segment_length, policy.spec
    span = span_of(policy, segments, draw)
    cells = encode_span(policy, params, market, span, length + 1, env.config.feature_dropout)
    cells = jnp.moveaxis(cells, 1, 0)
    decide = policy.distribution
    shape = (length, config.envs_per_segment, spec.num_assets, decide.outputs(spec))
    noise = jax.vmap(lambda key: decide.noise(key, shape), out_axes=1)(draw.keys)
    now, following, see, live = accounts_on(env, spec, market, span, length, draw)

    def step(episode: Episode, xs):
        cells_t, noise_t, now_t, following_t = xs
        seen = see(episode)
        logits, value = policy.act(params, cells_t[:, None], seen)
        action = decide.sample(logits, noise_t)
        order = decide.order(spec, action)
        episode, reward, ruined = live(episode, order, now_t, following_t)
        discount = config.discount * (1.0 - ruined)
        return episode, (seen, action, decide.log_prob(logits, action), value, reward, discount)

    episode, steps = jax.lax.scan(step, segments.episode, (cells[:-1], noise, now, following))
    _, bootstrap = policy.act(params, cells[-1][:, None], see(episode))
    steps = [jnp.moveaxis(leaf, 0, 1) for leaf in steps]
    rollout = Rollout._make([span, *steps, bootstrap])
    return advanced(segments, length, episode), rollout


def accounts_on(
    env: TradingEnv, spec: EnvSpec, market: Market, span: Span, length: int, draw: Draw
) -> tuple[Legs, Legs, Callable[[Episode], Array], Callable[..., tuple[Episode, Array, Array]]]:
    """What accounts meet on `length` bars of a span, and how they move there.

    Returns:
      The legs `[L, S, ...]` of each bar and of the one after it; `see`, an episode's account
      features; and `live(episode, order, now, following) -> (episode, reward, ruined)` for `[S, E]`
      episodes, in which a fresh episode takes the place of a ruined one.
    """
    rows = span.index[None] + jnp.arange(length + 1)[:, None]
    legs = moved(market.legs_at(rows), draw.volatility_scale)
    now = jax.tree.map(lambda a: a[:-1], legs)
    following = jax.tree.map(lambda a: a[1:], legs)
    see = jax.vmap(jax.vmap(lambda episode: account_features(spec, episode.account)))

    def move(episode: Episode, order: Array, now: Legs, following: Legs) -> tuple[Episode, Array]:
        drawn = episode.cost_scale
        priced = episode._replace(cost_scale=times(drawn, draw.cost_scale))
        after, reward = transition(market.dynamics, priced, order, now, following)
        return after._replace(cost_scale=drawn), reward

    each = jax.vmap(jax.vmap(move, in_axes=(0, 0, None, None)))

    def live(
        episode: Episode, order: Array, now: Legs, following: Legs
    ) -> tuple[Episode, Array, Array]:
        episode, reward = each(episode, order, now, following)
        ruined = episode.account.ruined
        return select(ruined, draw.fresh, episode), reward, ruined

    return now, following, see, live


def relive(
    env: TradingEnv,
    policy: Policy,
    market: Market,
    span: Span,
    begun: Episode,
    action: Array,
    draw: Draw,
) -> tuple[Array, Array, Array, Array]:
    """What accounts see and earn that repeat `action` `[S, L, E, A]` from where they began.

    Returns:
      `seen`, `reward` and `ruined` as of `collect`, and the account features `[S, E, A, 3 + M]`
      after the last step.
    """
    now, following, see, live = accounts_on(env, policy.spec, market, span, action.shape[1], draw)
    decide = policy.distribution

    def step(episode: Episode, xs: Any) -> tuple[Episode, Any]:
        action, *legs = xs
        seen = see(episode)
        episode, reward, ruined = live(episode, decide.order(policy.spec, action), *legs)
        return episode, (seen, reward, ruined)

    actions = jnp.moveaxis(action, 1, 0)
    episode, steps = jax.lax.scan(step, begun, (actions, now, following))
    seen, reward, ruined = (jnp.moveaxis(leaf, 0, 1) for leaf in steps)
    return seen, reward, ruined, see(episode)


def advanced(segments: Segments, length: int, episode: Episode) -> Segments:
    """The segments `length` bars on, where their accounts stand as `episode` says."""
    index, left = segments.index + length, segments.left - length
    return Segments(index, left, segments.drop, episode)


def times(drawn: Array | None, scale: Array | None) -> Array | None:
    """The product of two factors, None being 1."""
    if drawn is None or scale is None:
        return drawn if scale is None else scale
    return drawn * scale
