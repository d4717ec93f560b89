"""Learning from derivatives of an account's rewards with respect to the weights it orders.

An agent's actions never change the bars, and an account is a differentiable function of the
weights that it orders. So the gradient of the rewards along a segment is known action by action:
nothing is sampled, and no critic adds a bias.

    J = sum_t r_t,    r_t = r(s_t, a_t),    s_{t+1} = s(s_t, a_t),    a_t = pi(bars up to t, s_t)
    dJ = sum_t (dr_t/da_t + lambda_{t+1} ds_{t+1}/da_t) dpi_t
    lambda_t = gamma (dr_t/ds_t + lambda_{t+1} ds_{t+1}/ds_t), the total derivative along pi

Rewards have kinks, and there the derivative is one of those around it. That of the cost of an order
of nothing is 0, or that of buying or of selling where rounding leaves an order. At the edge of a
cap or of the no-borrow cut it is that of the branch that was computed, or the mean of both. A
target that equals the last one orders nothing with `order = "on_change"`, and has the derivative of
that.
An account that goes bankrupt passes no derivative on, so that the gradient would not know what led
to it: training ends there, see `refuse_bankrupt`.

With `objective = "sharpe"` J is the Sharpe ratio m / s of the accounts' simple returns R, with m
and s^2 their mean and variance over all bars, accounts and devices. At m and s it has the gradient
of the sum of a R - b R^2 / 2, with a = (1 + m^2 / s^2) / s and b = m / s^3. So `collect` measures m
and s, and one step of one minibatch follows the gradient, exactly where `discount` is 1.

`pi` is the most probable action; its spread is not learnt. Rewards after a segment's last bar
count as 0, as with exact advantages.
Source: Heess et al. 2015, "Learning continuous control policies by stochastic value gradients",
equations 5 and 6, of a known model.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from nca_trader.agents.policy import Params, decide
from nca_trader.envs.account.costs import Trade, has_slope
from nca_trader.envs.account.state import log_return
from nca_trader.envs.actions import tilt_price
from nca_trader.envs.market import Market
from nca_trader.envs.trading import Episode, TradingEnv
from nca_trader.errors import ConfigError
from nca_trader.learner.ppo import AdvantageMoments, AgentSetup, Loss, moments, reward_scale
from nca_trader.learner.rollout import (
    Algorithm,
    Draw,
    Segments,
    Span,
    advance,
    encode_span,
    mean_statistics,
    refuse_obstacles,
    scale_returns,
    select,
    span_of,
    transition_at_costs,
)
from nca_trader.learner.sampled import deepest_fall

# Fraction of its first equity at which an account may end: so low that hardly any reaches it. One
# that does ends training, see `refuse_bankrupt`.
MOST_FLOOR = 1e-2
# Of returns in a bar: below it they are rounding, or no account trades.
LEAST_VARIANCE = 1e-12
# In the rows of metrics.jsonl, the share of decisions after which an account was bankrupt.
BANKRUPT = "bankrupt"


class Starts(NamedTuple):
    """Starts of the accounts of each segment, `[S, ...]`.

    Attributes:
      span: bars of the segments.
      episode: `[S, E]` at the first decision.
      fresh: `[S, E]` replacements of bankrupt ones.
      cost_scale, volatility_scale: `[S]` factors of the curriculum, or None.
      pooled: `[S]` each, the moments of all returns, with `objective = "sharpe"`; else None.
    """

    span: Span
    episode: Episode
    fresh: Episode
    cost_scale: Array | None
    volatility_scale: Array | None
    pooled: AdvantageMoments | None = None


def collect(
    setup: AgentSetup, params: Params, market: Market, segments: Segments, draw: Draw
) -> tuple[Segments, Starts, dict[str, Array]]:
    """Simulate the most probable actions and store the starts; see `Algorithm.collect`."""
    count = segments.index.shape[:1]
    scales = (
        None if scale is None else jnp.broadcast_to(scale, count)
        # The curriculum's factors become rows of the batch: minibatches take rows of every leaf,
        # and `[]` has none.
        for scale in (draw.cost_scale, draw.volatility_scale)
    )
    cost, volatility = scales
    span = span_of(setup.policy, segments, draw)
    starts = Starts(span, segments.episode, draw.fresh, cost, volatility)
    episode, reward, bankrupt = simulate(setup, params, market, starts)
    statistics: dict[str, Any] = {
        "reward": reward.mean(),
        "drawdown": deepest_fall(reward).mean(),
        BANKRUPT: bankrupt.mean(),
    }
    if setup.config.objective == "sharpe":
        statistics["pooled"] = moments(reward)
    return advance(segments, setup.config.segment_length, episode), starts, statistics


def pool(
    setup: AgentSetup, starts: Starts, statistics: dict[str, Any]
) -> tuple[Starts, dict[str, Array]]:
    """Give every segment the moments of all returns; see `Algorithm.normalize`."""
    if (parts := statistics.pop("pooled", None)) is None:
        return mean_statistics(setup, starts, statistics)
    pooled = parts.pooled()
    starts, metrics = mean_statistics(setup, starts, statistics)
    count = starts.span.index.shape
    starts = starts._replace(pooled=jax.tree.map(lambda x: jnp.broadcast_to(x, count), pooled))
    ratio = pooled.mean / jnp.sqrt(jnp.maximum(pooled.variance, LEAST_VARIANCE))
    return starts, metrics | {"pooled_sharpe": ratio}


def sharpe_loss(returns: Array, pooled: AdvantageMoments) -> Array:
    """Return minus the Sharpe ratio of all returns, linearised at their moments `pooled`.

    Its value at those moments is minus the ratio, and so is its gradient.

    Args:
      returns: of some accounts, any shape.
      pooled: of the returns of all accounts, `[]` each.
    """
    mean, variance = pooled.mean, jnp.maximum(pooled.variance, LEAST_VARIANCE)
    deviation = jnp.sqrt(variance)
    # The derivatives of the ratio by the first and the second moment of the returns.
    first, second = (1.0 + mean**2 / variance) / deviation, mean / (variance * deviation)
    change = first * (returns - mean) - 0.5 * second * (returns**2 - (mean**2 + variance))
    return -(mean / deviation + change.mean())


def loss(setup: AgentSetup, params: Params, market: Market, items: Starts) -> Loss:
    """Return minus the objective, differentiable; see `Algorithm.loss`."""
    _, reward, _ = simulate(setup, params, market, items)
    if items.pooled is not None:
        value = sharpe_loss(reward, jax.tree.map(lambda x: x[0], items.pooled))
    else:
        value = -reward_scale(setup, market) * reward.mean()
    # There is no critic, entropy or ratio to report.
    none = jnp.zeros_like(value)
    return Loss(value, value, none, none, none, none)


def simulate(
    setup: AgentSetup, params: Params, market: Market, starts: Starts
) -> tuple[Episode, Array, Array]:
    """Simulate accounts with the most probable actions.

    Derivatives of later rewards are discounted by `discount` per bar.

    Returns:
      The episodes `[S, E]` at the end, rewards `[S, L, E]`, and `[L, S, E]` whether an account went
      bankrupt. With `objective = "sharpe"` simple returns take the place of rewards.
    """
    policy, config, hyper = setup
    length, spec, distribution = config.segment_length, policy.spec, policy.distribution
    cells = encode_span(policy, params, market, starts.span, length)
    # One bar more than decisions: the last reward is that of the bar after the last decision.
    rows = starts.span.index[:, None] + jnp.arange(length + 1)[None]
    legs = market.legs_at(rows)
    if starts.volatility_scale is not None:
        legs = scale_returns(legs, starts.volatility_scale[:, None, None])
    # A scan runs over the first axis, here the bars.
    cells, legs = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), (cells, legs))
    now, following = (jax.tree.map(lambda a, s=s: a[s], legs) for s in (slice(-1), slice(1, None)))

    move = functools.partial(transition_at_costs, market.dynamics)
    move = jax.vmap(jax.vmap(move, in_axes=(0, 0, None, None, None)))

    def step(episode: Episode, xs):
        cells_t, now_t, following_t = xs
        logits = decide(policy, params, cells_t[:, None], episode.account).logits
        action = distribution.order(spec, distribution.mode(logits))
        before = episode.account
        episode, reward = move(episode, action, now_t, following_t, starts.cost_scale)
        if config.objective == "sharpe":
            earned = jnp.expm1(log_return(before, episode.account))
            reward = earned - tilt_price(spec, action)
        # A bankrupt account is replaced, and no derivative passes from its successor to its orders.
        bankrupt = episode.account.bankrupt
        episode = select(bankrupt, starts.fresh, episode)
        # Only the derivative is discounted; the account passed to the next bar is unchanged.
        return discounted(episode, hyper.discount), (reward, bankrupt)

    episode, (reward, bankrupt) = jax.lax.scan(step, starts.episode, (cells, now, following))
    return episode, jnp.moveaxis(reward, 0, 1), bankrupt


def discounted(episode: Episode, discount: float | Array) -> Episode:
    """Return the same episode with its derivatives multiplied by `discount`."""

    def leaf(x: Array) -> Array:
        # Flags and counters of an account have no derivative.
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        # The difference is exactly 0, so the value does not change; its derivative is `discount`.
        return jax.lax.stop_gradient(x) + discount * (x - jax.lax.stop_gradient(x))

    return jax.tree.map(leaf, episode)


def check_smooth(env: TradingEnv) -> None:
    """Validate that rewards of `env` are differentiable in the weights ordered.

    Raises:
      ConfigError: one line with every setting that prevents it.
    """
    refuse_obstacles("'pathwise' follows derivatives of what is ordered", obstacles(env))


def obstacles(env: TradingEnv) -> Iterator[str]:
    """Yield each setting that makes rewards jump, or stay constant, as an order changes."""
    config, costs = env.config, env.costs
    if config.actions != "weights":
        yield f"actions = '{config.actions}' may jump (take 'weights')"
    if env.rules.sized:
        yield "lot, min_notional or max_participation round or cut what is filled (leave them out)"
    if config.dead_band:
        yield "dead_band leaves small orders out (leave it out)"
    if config.tick:
        yield "tick rounds prices (leave it out)"
    if costs.fixed_fee:
        yield "costs.fixed_fee is the same for orders of any size (leave it out)"
    if costs.impact:
        yield "costs.impact rises infinitely fast from an order of nothing (leave it out)"
    if costs.own and not has_slope(_trade_of(env), costs):
        yield f"costs.own = {list(costs.own)} has no finite derivative (leave it out)"
    if config.ruin_floor > MOST_FLOOR:
        yield f"ruin_floor = {config.ruin_floor:g} ends accounts at once (give {MOST_FLOOR:g})"
    if config.maintenance_margin is not None:
        yield "maintenance_margin closes positions at once (leave it out)"


def _trade_of(env: TradingEnv) -> Trade:
    """Return a trade in the last bar."""
    legs = jax.tree.map(lambda leg: jnp.asarray(leg[-1]), env.market.legs)
    quoted = jnp.zeros_like(legs.overnight) if legs.half_spread is None else legs.half_spread
    money = jnp.asarray(env.rules.capital) if env.rules.capital else None
    return Trade(legs.overnight, legs.open, legs.volume, quoted, money)


def refuse_bankrupt(row: dict[str, Any]) -> None:
    """Refuse to learn on from an update in which an account went bankrupt.

    Args:
      row: of metrics.jsonl; those of other estimators count no bankrupt accounts.

    Raises:
      ConfigError: one did.
    """
    if row.get(BANKRUPT):
        raise ConfigError(
            f"learner.advantages = 'pathwise': an account went bankrupt in update {row['update']}, "
            "and no derivative leads to that; let positions be smaller (size, max_gross or "
            "volatility_target), lower random_costs or ruin_floor, or take 'gae'."
        )


PATHWISE = Algorithm(check_smooth, collect, pool, loss)
