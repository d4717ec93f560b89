"""Exact advantages: every position and every action of an account at every bar, unsampled.

An agent's actions never change the bars. If an account's future depends only on which of P
positions it has, a segment of L bars is a known Markov decision process of L P states: rewards,
transitions and the policy's probabilities are known in each. Action values follow by recursion
from the last bar backwards, and state probabilities from the first bar forwards.

    Q(t, p, a) = r(t, p, a) + gamma V(t + 1, p'(p, a))      V(t, p) = sum_a pi(a | t, p) Q(t, p, a)
    d(t + 1, q) = sum_{p, a: p'(p, a) = q} d(t, p) pi(a | t, p)
    loss = -sum_{t, p} d(t, p) sum_a pi_old(a | t, p) min(rho A, clip(rho) A)        A = Q - V

The loss is the expectation of the sampled surrogate over actions, so its gradient at rho = 1 is
that of the expected return. V is 0 after the last bar, without a critic: one was tried there, and
learning it slowed the policy down until it never traded on ou_mid. Accounts cannot go bankrupt.

Each asset is an account of its own. Where a cap cuts the weights of all assets together, r is the
reward of all assets, averaged over what the other assets hold and do. That is exact too: an asset's
policy sees its own position alone, so on given bars the positions are independent of each other.
Source of the all-actions gradient: Sutton et al. 2000, "Policy gradient methods for reinforcement
learning with function approximation", theorem 1.
"""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from nca_trader.agents.heads import account_features
from nca_trader.agents.policy import Params, Policy
from nca_trader.envs.account.fills import cap
from nca_trader.envs.account.state import FILLED, WHOLE, Account, BarReturns, open_account
from nca_trader.envs.account.step import on_bar
from nca_trader.envs.actions import to_target
from nca_trader.envs.market import Dynamics, Market
from nca_trader.envs.trading import Episode, TradingEnv, transition
from nca_trader.learner.ppo import AgentSetup, Loss, Old, horizon, ppo_loss, reward_scale
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
    span_of,
)
from nca_trader.numerics import einsum32, logprob32
from nca_trader.types import EnvSpec

MOST_JOINT = 10_000  # moves of all assets together, where a cap couples them


class Enumeration(NamedTuple):
    """All states and actions of each segment.

    Attributes:
      span: bars of the segments.
      seen: `[S, L, A, P, 1, 3]` features of an account in each state.
      occupancy: `[S, L, A, P]` probability of each state; sums to 1 over P.
      log_prob, advantage: `[S, L, A, P, n]` of each action, when they were collected.
    """

    span: Span
    seen: Array
    occupancy: Array
    log_prob: Array
    advantage: Array


def collect(
    setup: AgentSetup, params: Params, market: Market, segments: Segments, draw: Draw
) -> tuple[Segments, Enumeration, dict[str, Array]]:
    """Enumerate the rewards of every action in every state; see `Algorithm.collect`."""
    policy, config, hyper = setup
    length, dynamics = config.segment_length, market.dynamics
    span = span_of(policy, segments, draw)
    seen, reward = enumerate_segments(market, span, length, draw)
    cells = encode_span(policy, params, market, span, length, config.micro_batches)
    log_prob, leads = read_states(policy, params, cells, seen), leads_to(dynamics.spec)
    pi = jnp.exp(log_prob)
    occupancy, last = occupancies(start_of(dynamics.spec, segments.episode), pi, leads)
    if coupled(dynamics):
        reward = shared_rewards(dynamics, reward, occupancy, pi, leads)
    q = action_values(reward, pi, leads, hyper.discount)
    # The factors scale the advantage only: the expected reward in the metrics stays in the
    # environment's own units.
    scale = reward_scale(setup, market) * advantage_scale(setup)
    advantage = scale * (q - (pi * q).sum(-1, keepdims=True))
    batch = Enumeration(span, seen, occupancy, log_prob, advantage)
    episode = reopened(dynamics.spec, segments.episode, last, draw.keys)
    metrics = expected_metrics(batch, reward, leads)
    if coupled(dynamics):  # each asset has the reward of all
        metrics["reward"] /= dynamics.spec.num_assets
    return advance(segments, length, episode), batch, metrics


def loss(setup: AgentSetup, params: Params, market: Market, items: Enumeration) -> Loss:
    """Compute the clipped surrogate's mean over states and actions; see `Algorithm.loss`."""
    policy, config, hyper = setup
    cells = encode_span(policy, params, market, items.span, config.segment_length)
    log_prob = read_states(policy, params, cells, items.seen)
    # The policy that acted is constant in the gradient: only the ratio depends on `params`.
    weight = items.occupancy[..., None] * jnp.exp(items.log_prob)
    # Sums over assets: so are the log-probability and the entropy of a joint action.
    return ppo_loss(
        config,
        hyper,
        Old(items.log_prob, items.advantage),
        log_prob,
        entropy=-(jnp.exp(log_prob) * log_prob).sum(-1),
        over_actions=lambda x: (weight * x).sum((2, 3, 4)).mean(),
        over_states=lambda x: (items.occupancy * x).sum((2, 3)).mean(),
    )


def advantage_scale(setup: AgentSetup) -> Any:
    """Return the factor that generalised advantages get by normalisation in pure noise.

    With it an entropy bonus weighs the same for both estimators. Exact advantages are not divided
    by their own deviation: it falls as the policy improves, the quotient then drowns the bonus,
    and the policy freezes early.
    """
    length, hyper = setup.config.segment_length, setup.hyper
    noise = horizon(hyper.discount * hyper.gae_lambda, length)
    return (horizon(hyper.discount, length) / noise) ** 0.5


def enumerate_segments(market: Market, span: Span, length: int, draw: Draw) -> tuple[Array, Array]:
    """Compute account features of each state, and each action's reward by the environment's step.

    Each asset is an account of its own. At the first bar of a segment accounts hold exactly one of
    the positions. At later bars the weight has drifted for one bar, where positions drift. Where a
    cap couples assets, rewards are of moves from each weight that it may leave an asset to each.

    Args:
      market: the bars and the environment's settings.
      span: bars of the segments.
      length: L, bars of a segment.
      draw: the curriculum's factors on costs and log-returns; its keys are not used.

    Returns:
      Account features `[S, L, A, P, 1, 3]`, and rewards `[S, L, A, P, n]`; of coupled assets
      `[S, L, A, m, m]`, by the numbers of `levels_of`.
    """
    _, spec, rules = dynamics = market.dynamics
    positions, actions = jnp.asarray(spec.targets, jnp.float32), jnp.arange(spec.num_actions)
    # One bar more than decisions: the last reward is that of the bar after the last decision.
    rows = span.index[:, None] + jnp.arange(length + 1)[None]
    legs = scale_returns(market.legs_at(rows), draw.volatility_scale)
    years = legs.years
    if years is not None:  # the only leg without an axis of assets
        years = jnp.broadcast_to(years[..., None], legs.present.shape)
    legs = jax.tree.map(lambda leg: leg[..., None], legs._replace(years=None))
    legs = legs._replace(years=years)
    spans = (slice(None, -1), slice(1, None))
    now, following = (jax.tree.map(lambda a, s=s: a[:, s], legs) for s in spans)
    # Adds an axis of one asset, because the environment's step takes `[A]`.
    begun = jax.vmap(open_account)(positions[:, None])
    shape = (len(span.index), length, spec.num_assets)
    accounts = jax.tree.map(lambda a: jnp.broadcast_to(a, shape + a.shape), begun)

    def held(account: Account, legs: BarReturns) -> Account:
        """Move an account through the bar that fills its position."""
        # Orders that fill at the close are filled before this bar begins; others wait for its open.
        pending = jnp.full_like(account.pending, WHOLE if rules.fill == "next_open" else FILLED)
        return on_bar(account._replace(pending=pending), legs, rules)[0]

    def earned(account: Account, now: BarReturns, following: BarReturns, action: Array) -> Array:
        episode = Episode(account, draw.cost_scale)
        return transition(dynamics, episode, action[None], now, following)[1]

    if not spec.constant_size:
        each = jax.vmap(jax.vmap(jax.vmap(jax.vmap(held, (0, None)))))
        later = each(accounts, now)
        accounts = jax.tree.map(
            # Only the first bar of a segment has positions that have not drifted.
            lambda first, a: jnp.concatenate([first[:, :1], a[:, 1:]], axis=1),
            accounts,
            later,
        )
    seen = account_features(spec, accounts)
    if coupled(dynamics):
        dynamics = dynamics._replace(spec=dataclasses.replace(spec, actions="weights"))
        actions = jnp.asarray(levels_of(market.dynamics)[0])
        begun = jax.vmap(open_account)(actions[:, None])
        accounts = jax.tree.map(lambda a: jnp.broadcast_to(a, shape + a.shape), begun)
    # `vmap` from the inside out: actions, positions, then segments, bars and assets.
    each = jax.vmap(jax.vmap(earned, (None, None, None, 0)), (0, None, None, None))
    for _ in shape:
        each = jax.vmap(each, (0, 0, 0, None))
    return seen, each(accounts, now, following, actions)


def coupled(dynamics: Dynamics) -> bool:
    """Return whether a cap cuts full positions in all assets, which ties them to each other."""
    _, spec, rules = dynamics
    gross = spec.size * spec.num_assets
    return gross > min(rules.max_gross, rules.max_net) * (1 + 1e-9)


def levels_of(dynamics: Dynamics) -> tuple[np.ndarray, np.ndarray]:
    """Return the m weights that a cap may leave of an asset's position, rising.

    Returns:
      `[m]` float32, and the number of each asset's weight `[P, ..., P, A]` in every position of
      all assets together.
    """
    spec = dynamics.spec
    targets = np.asarray(spec.targets, np.float32)
    every = np.stack(np.meshgrid(*[targets] * spec.num_assets, indexing="ij"), axis=-1)
    with jax.ensure_compile_time_eval():
        cut = jax.vmap(lambda position: cap(position, dynamics.rules))
        levels, number = np.unique(cut(every.reshape(-1, spec.num_assets)), return_inverse=True)
    return levels, number.reshape(every.shape)


def shared_rewards(
    dynamics: Dynamics, reward: Array, occupancy: Array, pi: Array, leads: Array
) -> Array:
    """Compute rewards `[S, L, A, P, n]` of all assets together, over what the other assets do.

    Args:
      dynamics: of the market.
      reward: `[S, L, A, m, m]` of `enumerate_segments`.
      occupancy: `[S, L, A, P]` probability of each position.
      pi: `[S, L, A, P, n]` probability of each action.
      leads: `[P, n, P]` transitions, from `leads_to`.
    """
    levels, number = levels_of(dynamics)
    joint, assets = number.shape[:-1], number.shape[-1]
    among = jax.nn.one_hot(number.reshape(-1, assets), len(levels))
    letters = string.ascii_letters
    axes = [f"Z{letters[i]}{letters[assets + i]}" for i in range(assets)]

    def of_bar(bar: tuple[Array, Array]) -> Array:
        each, moves = bar  # [S, A, m, m], [S, A, P, P]
        # Products with zeros and ones: XLA would look a table up again for each mean.
        both = einsum32("sikm,pik,qim->spq", each, among, among)
        both = both.reshape(-1, *joint, *joint)

        def mean(asset: int) -> Array:
            others = [i for i in range(assets) if i != asset]
            words = ",".join([f"Z{letters[: 2 * assets]}", *(axes[i] for i in others)])
            return einsum32(f"{words}->{axes[asset]}", both, *(moves[:, i] for i in others))

        return jnp.stack([mean(asset) for asset in range(assets)], axis=1)

    # Bar by bar, as all moves of all bars would not fit.
    moves = einsum32("slip,slipa,paq->lsipq", occupancy, pi, leads)
    found = jax.lax.map(of_bar, (jnp.moveaxis(reward, 1, 0), moves))
    return einsum32("lsipq,paq->slipa", found, leads)


def read_states(policy: Policy, params: Params, cells: Array, seen: Array) -> Array:
    """Log-probabilities `[S, L, A, P, n]` of each asset's actions in each of its states.

    Args:
      policy: its `act` is evaluated.
      params: parameters of the policy.
      cells: `[S, L, A, C]` encoded bars.
      seen: `[S, L, A, P, 1, 3]` account features of each state.
    """
    logits, _ = policy.act(params, cells[:, :, :, None, None], seen)
    return logprob32(logits[..., 0, :])


def leads_to(spec: EnvSpec) -> Array:
    """Transitions `[P, n, P]`: 1 where an action at a position leads to the last axis' position."""
    positions = jnp.asarray(spec.targets, jnp.float32)
    actions = jnp.arange(spec.num_actions)
    ordered = to_target(spec, actions[None], positions[:, None])
    shape = (len(positions), len(actions), len(positions))
    ordered = jnp.broadcast_to(ordered, shape[:2])[..., None]
    # Exact equality is safe: targets are 0 and +-size in float32, and steps between them exact.
    return (ordered == positions[None, None]).astype(jnp.float32)


def action_values(reward: Array, pi: Array, leads: Array, discount: float | Array) -> Array:
    """Compute action values `Q` `[S, L, A, P, n]`, by recursion from the last bar backwards.

    Args:
      reward: `[S, L, A, P, n]` reward of each action.
      pi: `[S, L, A, P, n]` probability of each action.
      leads: `[P, n, P]` transitions, from `leads_to`.
      discount: per bar.
    """
    # The carry of a scan keeps its type, and it becomes that of the sum with `pi`.
    reward = reward.astype(jnp.promote_types(reward.dtype, pi.dtype))

    def backward(later: Array, xs: tuple[Array, Array]) -> tuple[Array, Array]:
        reward_t, pi_t = xs
        q = reward_t + discount * einsum32("paq,siq->sipa", leads, later)
        return (pi_t * q).sum(-1), q

    xs = (jnp.moveaxis(reward, 1, 0), jnp.moveaxis(pi, 1, 0))
    # V is 0 after the last bar, see the module's docstring.
    nothing = jnp.zeros_like(reward[:, 0, ..., 0])
    return jnp.moveaxis(jax.lax.scan(backward, nothing, xs, reverse=True)[1], 0, 1)


def occupancies(start: Array, pi: Array, leads: Array) -> tuple[Array, Array]:
    """Compute state probabilities: `[S, L, A, P]`, and `[S, A, P]` after the last step.

    Args:
      start: `[S, A, P]` probabilities at the first bar.
      pi: `[S, L, A, P, n]` probability of each action.
      leads: `[P, n, P]` transitions, from `leads_to`.
    """

    def forward(now: Array, pi_t: Array) -> tuple[Array, Array]:
        return einsum32("sip,sipa,paq->siq", now, pi_t, leads), now

    last, occupancy = jax.lax.scan(forward, start, jnp.moveaxis(pi, 1, 0))
    return jnp.moveaxis(occupancy, 0, 1), last


def start_of(spec: EnvSpec, episode: Episode) -> Array:
    """Share `[S, A, P]` of a segment's E accounts that is at each position."""
    positions = jnp.asarray(spec.targets, jnp.float32)
    nearest = jnp.abs(jnp.subtract.outer(episode.account.ordered, positions)).argmin(-1)
    return jax.nn.one_hot(nearest, len(positions)).mean(1)


def reopened(spec: EnvSpec, episode: Episode, last: Array, keys: Array) -> Episode:
    """Open accounts `[S, E]` at positions drawn from the probabilities `last` `[S, A, P]`."""
    count = episode.account.ordered.shape[1]

    def draw(key: Array, probability: Array) -> Array:
        shape = (count, *probability.shape[:1])
        return jax.random.categorical(key, jnp.log(probability), shape=shape)

    weight = jnp.asarray(spec.targets, jnp.float32)[jax.vmap(draw)(keys, last)]
    return episode._replace(account=jax.vmap(jax.vmap(open_account))(weight))


def expected_metrics(batch: Enumeration, reward: Array, leads: Array) -> dict[str, Array]:
    """Compute the expected reward per step, and how often an asset's position changes."""
    pi = jnp.exp(batch.log_prob)
    # The diagonal of the transitions is 1 where an action leads back to its own position.
    elsewhere = 1.0 - einsum32("pap->pa", leads)
    changes = einsum32("slipa,pa->slip", pi, elsewhere)

    def each_asset(x: Array) -> Array:
        return (batch.occupancy * x).sum(-1).mean((0, 1))

    return {
        "reward": each_asset((pi * reward).sum(-1)).sum(),
        "action_changes": each_asset(changes).mean(),
    }


def check_finite(env: TradingEnv) -> None:
    """Validate that an account of `env` has no more states than its positions.

    Raises:
      ConfigError: one line with every setting that prevents it.
    """
    refuse_obstacles("'exact' enumerates the states of an account", obstacles(env))


def obstacles(env: TradingEnv) -> Iterator[str]:
    """Yield each setting that gives an account more states than its positions."""
    config, costs, spec = env.config, env.costs, env.spec
    if config.actions not in ("direction", "orders"):
        yield f"actions = '{config.actions}' may order any weight (take 'direction' or 'orders')"
    if env.spec.base != "none":
        yield f"policy.base = {env.spec.base!r} moves positions by itself (take 'none')"
    if config.sizing != "fixed":
        yield f"sizing = {config.sizing!r} moves the weights of a position (take 'fixed')"
    if config.dead_band:
        yield "dead_band remembers the last order (leave it out)"
    if spec.memory:
        yield f"reward = '{config.reward}' remembers the past (take 'pnl')"
    elif config.reward not in ("pnl", "log_return"):
        yield f"reward = '{config.reward}' is not enumerated (take 'pnl' or 'log_return')"
    if config.random_costs is not None:
        yield "random_costs differ by account (leave them out)"
    if config.maintenance_margin is not None:
        yield "maintenance_margin closes positions by equity (leave it out)"
    if config.delist_after is not None:
        yield "delist_after closes positions (leave it out)"
    cut = f"weights of {spec.size * spec.num_assets:g} in all are cut"
    joint = len(spec.targets) ** (2 * spec.num_assets) if coupled(env.market.dynamics) else 0
    if joint and config.reward != "pnl":
        yield f"{cut} (set max_gross, max_net or size)"
    elif joint > MOST_JOINT:
        yield f"{cut}, and have {joint:,} moves together (give fewer assets, or set max_gross)"
    if config.reward != "log_return":
        return
    # A position of constant size is what was ordered. With log-returns the weight drifts, and has
    # to follow from the last bar and order alone.
    if spec.num_assets > 1:
        yield "log-returns of several assets do not add up (take reward = 'pnl')"
    if config.order != "rebalance":
        yield "order = 'on_change' lets weights drift (take 'rebalance', or reward = 'pnl')"
    names = ("commission", "slippage", "half_spread", "impact", "fixed_fee", "own")
    paid = [f"costs.{name}" for name in names if getattr(costs, name)]
    paid += ["a quoted half_spread"] * (env.market.legs.half_spread is not None)
    paid += ["tick"] * bool(config.tick)
    if paid:
        yield f"{', '.join(paid)} let the weight held depend on those before (take reward = 'pnl')"
    if env.rules.sized:
        yield "lot, min_notional or max_participation change what is filled (leave them out)"
    if not env.bars.present.all():
        yield "orders do not fill in bars that are missing (take reward = 'pnl')"
    if spec.size > 1.0 and not config.borrow:
        yield f"a weight of {spec.size:g} is cut to the cash (set borrow or size)"


EXACT = Algorithm(check_finite, collect, mean_statistics, loss)
