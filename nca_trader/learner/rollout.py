"""Rollouts: accounts simulated along segments of bars under the current policy.

The policy encodes all bars of a segment at once. A scan over the bars then runs the policy head and
the environment's transition for each account of the segment.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from nca_trader.agents.heads import account_features
from nca_trader.agents.nca import Fire
from nca_trader.agents.policy import Params, Policy, decide
from nca_trader.envs.account.state import BarReturns
from nca_trader.envs.market import Dynamics, Market
from nca_trader.envs.trading import Episode, TradingEnv, begin, begin_dropout, keep_mask, transition
from nca_trader.errors import ConfigError
from nca_trader.learner.ppo import AgentSetup, Loss


class Segments(NamedTuple):
    """The environments between two updates: S segments with E accounts on each.

    Attributes:
      index: `[S]` int32 bar of the next decision.
      left: `[S]` int32 decisions left of the episode.
      drop: `[S]` seeds of the bars that are dropped, or None.
      episode: `[S, E, ...]` the accounts.
    """

    index: Array
    left: Array
    drop: Array | None
    episode: Episode


class Span(NamedTuple):
    """The bars of the market that an update's segments cover; features are gathered each time.

    Attributes:
      index: `[S]` int32 bar of the first decision.
      drop: `[S]`, as in `Segments`.
      fire: `[S]` seeds of the mask of cell updates, or None where all take place. Collecting and
        learning use the same mask.
    """

    index: Array
    drop: Array | None
    fire: Array | None = None


class Draw(NamedTuple):
    """Per-update keys, replacement episodes and curriculum scales.

    Attributes:
      keys: `[S]`, one per segment.
      fresh: `[S, E]` episodes that replace bankrupt ones.
      cost_scale: `[]` factor on all costs, or None.
      volatility_scale: `[]` factor on all log-returns, or None.
    """

    keys: Array
    fresh: Episode
    cost_scale: Array | None = None
    volatility_scale: Array | None = None


class Begun(NamedTuple):
    """First states of accounts; the later ones follow from the bars and the actions.

    Attributes:
      episode: `[S, E]` at the first bar.
      fresh: `[S, E]` replacements of bankrupt ones.
    """

    episode: Episode
    fresh: Episode


class Algorithm(NamedTuple):
    """The parts in which estimators of advantages differ; `update` calls them in this order.

    Attributes:
      check: `(env) -> None`, raises ConfigError where the algorithm does not apply.
      collect: `(setup, params, market, segments, draw) -> (segments after, batch, statistics)`.
        The batch is a pytree of `[S, ...]`; statistics are `[]`, means over these segments alone.
      normalize: `(setup, batch, statistics) -> (batch, metrics)`, from the statistics `[P]` of all
        P equal parts of the whole batch.
      loss: `(setup, params, market, items of the batch) -> Loss`.
      replay: `(setup, params, their average, market, item of the ring, current factors on costs
        and log-returns) -> (batch, statistics)`; None where an algorithm cannot learn from old
        rollouts.
    """

    check: Callable[[TradingEnv], None]
    collect: Callable[[AgentSetup, Params, Market, Segments, Draw], tuple[Segments, Any, Any]]
    normalize: Callable[[AgentSetup, Any, Any], tuple[Any, dict[str, Array]]]
    loss: Callable[[AgentSetup, Params, Market, Any], Loss]
    replay: Callable[[AgentSetup, Params, Params, Market, Any, Any], tuple[Any, Any]] | None = None


def refuse_obstacles(what: str, obstacles: Iterable[str]) -> None:
    """Refuse an environment for what an estimator does, `what`, with all that stands against it."""
    if said := "; ".join(obstacles):
        raise ConfigError(
            f"learner.advantages = {what}, but {said}; change this in the environment, or take "
            "'gae'."
        )


def mean_statistics(
    setup: AgentSetup, batch: Any, statistics: dict[str, Array]
) -> tuple[Any, dict[str, Array]]:
    """Average the statistics and leave the batch as it is, where no advantage is normalised."""
    del setup
    return batch, {name: value.mean() for name, value in statistics.items()}


class Rollout(NamedTuple):
    """Observations, actions and rewards of E sampled accounts on each segment.

    Attributes:
      span: bars of the segments.
      seen: `[S, L, E, A, 3 + M]` account features.
      action: `[S, L, E, A]`.
      log_prob, value, reward, discount: `[S, L, E]`.
      bootstrap: `[S, E]` value of the observation after the last step.
    """

    span: Span
    seen: Array
    action: Array
    log_prob: Array
    value: Array
    reward: Array
    discount: Array
    bootstrap: Array


def gather_segment(market: Market, span: Span, halo: int, length: int) -> tuple[Array, Array]:
    """Features `[S, halo + length, A, F]` and presence of the bars from `span.index - halo` on.

    Features and presence of bars that the span drops are 0.
    """
    rows = span.index[:, None] - halo + jnp.arange(halo + length)[None]
    x, present = market.features[rows], market.legs.present[rows]
    if span.drop is None:
        return x, present
    rate = market.dynamics.config.feature_dropout
    # The mask is a hash of seed and row, so collecting and learning hide the same bars.
    there = keep_mask(rate, span.drop[:, None], rows, present.shape[-1])
    return jnp.where(there[..., None], x, 0.0), present & there


def encode_span(
    policy: Policy, params: Params, market: Market, span: Span, length: int, parts: int = 1
) -> Array:
    """Cells `[S, length, A, C]` of the bars from `span.index` on, each with all its past.

    With several `parts` of the segments, one is encoded after another: all at once would leave a
    CPU's cache.
    """
    if parts > 1:
        cut = jax.tree.map(lambda a: a.reshape(parts, -1, *a.shape[1:]), span)
        cells = jax.lax.map(lambda part: encode_span(policy, params, market, part, length), cut)
        return cells.reshape(-1, *cells.shape[2:])
    # The bars before a segment that its own cells see; their cells are not returned.
    halo = policy.receptive_field - 1
    x, present = gather_segment(market, span, halo, length)
    fire = None if span.fire is None else Fire(span.fire, span.index - halo)
    return jax.named_scope("encode")(policy.encode)(params, x, present, fire, halo)


def span_of(policy: Policy, segments: Segments, draw: Draw) -> Span:
    """Return the bars of the segments as this update sees them."""
    if policy.fire_rate == 1.0:
        return Span(segments.index, segments.drop)
    # The segment's own key draws the actions, so the mask needs another one.
    seeds = jax.vmap(lambda key: jax.random.bits(jax.random.fold_in(key, 1), (), jnp.uint32))
    return Span(segments.index, segments.drop, seeds(draw.keys))


def begin_segments(
    setup: AgentSetup, market: Market, segments: Segments, keys: Array
) -> tuple[Segments, Episode]:
    """Draw a new start and new accounts where an episode is over.

    Args:
      setup: the policy's receptive field and the lengths.
      market: the bars to start on.
      segments: the environments after the last update.
      keys: `[S]`, one per segment.

    Returns:
      The segments, and fresh episodes `[S, E]` that replace bankrupt ones.
    """
    config, dynamics = setup.config, market.dynamics
    length = config.segment_length
    episode = dynamics.config.episode_bars or length
    # The reward of the last decision needs one more bar after it.
    last = market.num_bars - 1 - length

    def draw(key: Array) -> tuple[Array, Array | None, Episode]:
        start_key, account_key = jax.random.split(key)
        # Before it, a feature of the receptive field is not defined.
        first = setup.policy.first_decision
        start = jax.random.randint(start_key, (), first, last + 1, dtype=jnp.int32)
        each = jax.random.split(account_key, config.envs_per_segment)
        opening = market.legs_at(start)
        fresh = jax.vmap(lambda key: begin(dynamics, key, opening))(each)
        return start, begin_dropout(dynamics, jax.random.fold_in(start_key, 1)), fresh

    start, drop, fresh = jax.vmap(draw)(keys)
    # An episode never ends inside a segment, so `left` is a multiple of `length`; bars may run out
    # earlier.
    over = (segments.left < length) | (segments.index > last)
    index = jnp.where(over, start, segments.index)
    left = jnp.where(over, episode, segments.left)
    if drop is not None and segments.drop is not None:
        drop = jnp.where(over, drop, segments.drop)
    return Segments(index, left, drop, select(over[:, None], fresh, segments.episode)), fresh


def select(condition: Array, yes: Episode, no: Episode) -> Episode:
    """Select `yes` where `condition` holds, else `no`; its axes are the first of every leaf."""

    def leaf(a: Array, b: Array) -> Array:
        shape = condition.shape + (1,) * (a.ndim - condition.ndim)
        return jnp.where(condition.reshape(shape), a, b)

    return jax.tree.map(leaf, yes, no)


def roll_out(
    setup: AgentSetup, params: Params, market: Market, segments: Segments, draw: Draw
) -> tuple[Segments, Rollout]:
    """Simulate every account over `segment_length` bars, with actions drawn from the policy."""
    policy, config, hyper = setup
    length, spec, distribution = config.segment_length, policy.spec, policy.distribution
    span = span_of(policy, segments, draw)
    # One cell more than decisions, for the bootstrapped value after the last.
    cells = encode_span(policy, params, market, span, length + 1, config.micro_batches)
    cells = jnp.moveaxis(cells, 1, 0)
    shape = (length, config.envs_per_segment, spec.num_assets, distribution.outputs(spec))
    # One key per segment: its actions are the same on any mesh.
    noise = jax.vmap(lambda key: distribution.noise(key, shape), out_axes=1)(draw.keys)
    now, following, move = accounts_on(market, span, length, draw)

    def step(episode: Episode, xs):
        cells_t, noise_t, now_t, following_t = xs
        seen, logits, value = decide(policy, params, cells_t[:, None], episode.account)
        action = distribution.sample(logits, noise_t)
        order = distribution.order(spec, action)
        episode, reward, bankrupt = move(episode, order, now_t, following_t)
        # Nothing follows a bankruptcy. The end of a segment keeps its discount: its value is
        # bootstrapped.
        discount = hyper.discount * (1.0 - bankrupt)
        log_prob = distribution.log_prob(logits, action)
        return episode, (seen, action, log_prob, value, reward, discount)

    episode, steps = jax.lax.scan(step, segments.episode, (cells[:-1], noise, now, following))
    bootstrap = decide(policy, params, cells[-1][:, None], episode.account).value
    steps = [jnp.moveaxis(leaf, 0, 1) for leaf in steps]
    rollout = Rollout._make([span, *steps, bootstrap])
    return advance(segments, length, episode), rollout


def accounts_on(
    market: Market, span: Span, length: int, draw: Draw
) -> tuple[BarReturns, BarReturns, Callable[..., tuple[Episode, Array, Array]]]:
    """Return the functions that simulate accounts on `length` bars of a span.

    Returns:
      The returns `[L, S, ...]` of each bar, and of the bar after it; and `move(episode, order, now,
      following) -> (episode, reward, bankrupt)` for `[S, E]` episodes, in which a fresh episode
      replaces a bankrupt one.
    """
    dynamics = market.dynamics
    rows = span.index[None] + jnp.arange(length + 1)[:, None]
    legs = scale_returns(market.legs_at(rows), draw.volatility_scale)
    now = jax.tree.map(lambda a: a[:-1], legs)
    following = jax.tree.map(lambda a: a[1:], legs)
    one = functools.partial(transition_at_costs, dynamics)
    each = jax.vmap(jax.vmap(one, in_axes=(0, 0, None, None, None)), in_axes=(0, 0, 0, 0, None))

    def move(
        episode: Episode, order: Array, now: BarReturns, following: BarReturns
    ) -> tuple[Episode, Array, Array]:
        episode, reward = each(episode, order, now, following, draw.cost_scale)
        bankrupt = episode.account.bankrupt
        # After the reward is computed, so the step that bankrupts an account still has its own.
        return select(bankrupt, draw.fresh, episode), reward, bankrupt

    return now, following, move


def transition_at_costs(
    dynamics: Dynamics,
    episode: Episode,
    order: Array,
    now: BarReturns,
    following: BarReturns,
    scale: Array | None,
) -> tuple[Episode, Array]:
    """Call `transition` with all costs multiplied by the curriculum's `scale`; None is 1."""
    drawn = episode.cost_scale
    # The curriculum's factor is for this step only; the episode keeps the factor that it drew.
    priced = episode._replace(cost_scale=times(drawn, scale))
    after, reward = transition(dynamics, priced, order, now, following)
    return after._replace(cost_scale=drawn), reward


def repeat(
    policy: Policy, market: Market, span: Span, begun: Episode, action: Array, draw: Draw
) -> tuple[Array, Array, Array, Array]:
    """Repeat actions `[S, L, E, A]` from where the accounts began.

    Returns:
      `seen`, `reward` and `bankrupt` as of `roll_out`, and the account features `[S, E, A, 3 + M]`
      after the last step.
    """
    now, following, move = accounts_on(market, span, action.shape[1], draw)
    see = functools.partial(account_features, policy.spec)
    distribution = policy.distribution

    def step(episode: Episode, xs: Any) -> tuple[Episode, Any]:
        action, *legs = xs
        seen = see(episode.account)
        episode, reward, bankrupt = move(episode, distribution.order(policy.spec, action), *legs)
        return episode, (seen, reward, bankrupt)

    actions = jnp.moveaxis(action, 1, 0)
    episode, steps = jax.lax.scan(step, begun, (actions, now, following))
    seen, reward, bankrupt = (jnp.moveaxis(leaf, 0, 1) for leaf in steps)
    return seen, reward, bankrupt, see(episode.account)


def advance(segments: Segments, length: int, episode: Episode) -> Segments:
    """Return the segments `length` bars later, with their accounts as in `episode`."""
    index, left = segments.index + length, segments.left - length
    return Segments(index, left, segments.drop, episode)


def times(drawn: Array | None, scale: Array | None) -> Array | None:
    """Return the product of two factors, None being 1."""
    if drawn is None or scale is None:
        return drawn if scale is None else scale
    return drawn * scale


def scale_returns(legs: BarReturns, scale: Array | None) -> BarReturns:
    """Return the market's returns with every log-return multiplied by `scale`; None is 1.

    Both returns r of a bar become `(1 + r)^scale - 1`. These are the returns of prices
    `P^scale`, whose volatility is `scale` times as high.
    Prices in money, which lots and fees are measured in, and payments in cash do not change.
    """
    if scale is None:
        return legs
    # `log1p` and `expm1` keep the digits of small returns, which `log(1 + x)` rounds away.
    both = (legs.overnight, legs.intraday)
    overnight, intraday = (jnp.expm1(scale * jnp.log1p(r)) for r in both)
    return legs._replace(overnight=overnight, intraday=intraday)
