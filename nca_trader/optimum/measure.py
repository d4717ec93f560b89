"""How much of a known optimum an agent reaches, compared with the optimal policy on the same bars.

An agent takes its most probable action along pieces of a path that it was not trained on, all of
them in one scan. Its reward is the market's own account of the positions that it ordered. The
optimal policy runs along the same pieces, so the luck of the path cancels.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from nca_trader.agents.policy import Params, Policy, decide
from nca_trader.envs.account.state import open_account
from nca_trader.envs.actions import to_target
from nca_trader.envs.market import Dynamics, Market
from nca_trader.envs.rewards import begin_account
from nca_trader.envs.trading import Episode, TradingEnv, transition
from nca_trader.errors import BarError, ConfigError
from nca_trader.evaluate.simulate import encode
from nca_trader.markets import Task
from nca_trader.optimum.optima.synthetic import solved

# Bars of a piece. The account begins flat, which no account of the agent's is for long: the first
# bars, in which that is forgotten, do not count.
WARM, COUNTED = 256, 1024
CELLS = 2**18  # bars times assets of an evaluation's path
GROUP = 32  # pieces that are run at once


class Earnings(NamedTuple):
    """What positions earned on a path, in the unit of the market's optimum.

    Attributes:
      fraction: of what the optimal policy earned on the path, so that cash has 0 and that policy 1;
        NaN where the optimum is 0 or that policy earned nothing, minus infinity of a bankrupt
        account.
      error: standard error of the fraction, as that of a ratio of two means.
      earned: with the noise of returns removed, not compared with anything.
      earned_error: standard error of `earned`.
      excess: what the returns as drawn gave, over what they gave the optimal policy. A policy that
        sees the past only has no excess in the long run.
      excess_error: standard error of `excess`.
      turnover: mean of the sum of |position - previous| per step.
    """

    fraction: float
    error: float
    earned: float
    earned_error: float
    excess: float
    excess_error: float
    turnover: float

    @property
    def looks_ahead(self) -> bool:
        """Whether more was earned than is possible, by 3 standard errors."""
        # Of the next return the excess is large, of later states the fraction. The 1e-9 is for
        # paths without noise, where both numbers are rounding; the ends of a path are worth 2e-4.
        return (
            self.excess > 3 * self.excess_error + 1e-9 or self.fraction > 1 + 3 * self.error + 1e-3
        )

    @property
    def bankrupt(self) -> bool:
        """Whether some account lost all that it had."""
        return self.fraction == -math.inf


def evaluation_bars(num_assets: int) -> int:
    """Return the bars of a path to evaluate on: fewer where each has many assets."""
    return CELLS // num_assets


def pieces(num_bars: int, first: int) -> np.ndarray:
    """Cut a path that is decided on from row `first` into pieces.

    Returns:
      `[P, WARM + COUNTED]` rows. The counted part of a piece begins where that of the one before
      ends.

    Raises:
      BarError: fewer bars than 8 pieces need, which are too few for a standard error.
    """
    # The last row has no next bar to earn on.
    count = (num_bars - 1 - first - WARM) // COUNTED
    if count < 8:
        raise BarError(
            f"{num_bars} bars are {max(count, 0)} pieces of {COUNTED} to evaluate on; give "
            f"{first + 1 + WARM + 8 * COUNTED} or more."
        )
    return first + rows_of(count)


def rows_of(count: int) -> np.ndarray:
    """Return `[count, WARM + COUNTED]` rows of the pieces of a path, from 0."""
    return COUNTED * np.arange(count)[:, None] + np.arange(WARM + COUNTED)


def reached_by(
    env: TradingEnv, policy: Policy, params: Params, most: int | None = None
) -> Earnings:
    """Evaluate the greedy agent in `env`, an environment of a task's bars.

    Args:
      env: the environment.
      policy: of the agent.
      params: of the agent.
      most: pieces to evaluate on, from the first; None is all.

    Raises:
      ConfigError: no optimum is known for the environment's bars.
      BarError: too few bars.
    """
    task = solved(env.task) if env.task else None
    if task is None or task.optimum is None:
        raise ConfigError(
            f"{env.bars.source or 'bars'}: no optimum is known; give an environment of a "
            "synthetic market that has one, e.g. ou_mid."
        )
    rows = pieces(len(env), policy.first_decision)[:most]
    return earnings_of(task, rows, greedy_positions(env, policy, params, rows))


def greedy_positions(
    env: TradingEnv, policy: Policy, params: Params, rows: np.ndarray
) -> np.ndarray:
    """Return `[P, L, A]` float64 weights that the most probable actions order.

    Args:
      env: an environment of the path.
      policy: of the agent.
      params: of the agent.
      rows: `[P, L]` consecutive rows of bars, at whose closes the agent orders; each of the P
        accounts begins flat.
    """
    groups = [rows[at : at + GROUP] for at in range(0, len(rows), GROUP)]
    # One shape for all groups, so one compilation: shorter ones are filled up.
    span, ordered = 1 + max(map(np.ptp, groups)), []
    for group in groups:
        start = min(group.min(), len(env) - span)
        seen = slice(start + span)
        cells = encode(policy, params, env.features[seen], env.bars.present[seen], start)
        filled = np.pad(group, ((0, GROUP - len(group)), (0, 0)), mode="edge")
        given = (jnp.asarray(cells), start, jnp.asarray(filled))
        found = _scan_pieces(policy, params, env.market, *given)
        ordered.append(np.asarray(found, np.float64)[: len(group)])
    return np.concatenate(ordered)


@functools.partial(jax.jit, static_argnums=0)
def _scan_pieces(
    policy: Policy, params: Params, market: Market, cells: Array, start: int, rows: Array
) -> Array:
    """Run the environment's own transitions along pieces; `cells` `[N, A, C]` from row `start`."""
    spec, distribution = policy.spec, policy.distribution
    dynamics = market.dynamics._replace(spec=spec)

    def one(episode: Episode, row: Array) -> tuple[Episode, Array]:
        logits = decide(policy, params, cells[row - start], episode.account).logits
        action = distribution.order(spec, distribution.mode(logits))
        now, following = (market.legs_at(at) for at in (row, row + 1))
        after, _ = transition(dynamics, episode, action, now, following)
        return after, ordered_by(dynamics, episode, action)

    def step(episodes: Episode, row: Array) -> tuple[Episode, Array]:
        return jax.vmap(one)(episodes, row)

    ordered = jax.lax.scan(step, flat_episodes(dynamics, len(rows)), rows.T)[1]
    return jnp.moveaxis(ordered, 0, 1)


def ordered_by(dynamics: Dynamics, episode: Episode, action: Array) -> Array:
    """Return the weights `[A]` that an action orders; 0 of an account that is bankrupt already.

    The order that makes it bankrupt counts, which the account afterwards does not show.
    """
    account = episode.account
    target = to_target(dynamics.spec, action, account.ordered, account.base)
    return jnp.where(account.bankrupt, account.ordered, target)


def flat_episodes(dynamics: Dynamics, count: int) -> Episode:
    """Return the episodes of `count` accounts that begin flat."""

    def begin(weight: Array) -> Episode:
        return Episode(begin_account(dynamics.spec, open_account(weight, dynamics.rules)))

    return jax.vmap(begin)(jnp.zeros((count, dynamics.spec.num_assets)))


def optimal_positions(task: Task, rows: np.ndarray) -> np.ndarray:
    """Return `[P, L, A]` positions of the optimal policy at the closes of `rows`, from flat."""
    if task.optimal_policy is None:
        raise ConfigError(f"{task.name}: no optimal policy is known.")
    position, held = np.zeros((len(rows), task.num_assets)), []
    for row in rows.T:
        # Row by row, since it depends on what is held.
        position = task.optimal_policy(task.states[row], position)
        held.append(position)
    return np.stack(held, axis=1)


@np.errstate(divide="ignore", invalid="ignore")  # of a bankrupt account
def earnings_of(task: Task, rows: np.ndarray, positions: np.ndarray) -> Earnings:
    """Compare positions with the optimal ones on the same path.

    A position earns `pay` on the next bar. From it `a (r - E[r | state])` is subtracted, whose mean
    is 0 for any policy that sees the past only. What remains is E[pay | state] if `pay` is linear
    in r. The fraction is the ratio of the two means over the path. Standard errors are those of the
    means of pieces; of the ratio, and of a score that is not a mean, e.g. the logarithm of one, to
    the first order.

    Args:
      task: the market.
      rows: `[P, L]` of the pieces.
      positions: `[P, L, A]` weights ordered at their closes.
    """
    if task.expected_return is None:
        raise ConfigError(f"{task.name}: no expected return is known.")
    counted = rows[:, WARM:]
    noise = task.returns[counted + 1] - task.expected_return(task.states[counted])
    paid, noises = [], []
    for weights in map(task.held, (positions, optimal_positions(task, rows))):
        pay = np.asarray(task.pay(_shifted(weights), weights, task.returns[rows + 1]))
        # Not finite where all is lost, or more; an account that is gone before it counts, is gone.
        lost = ~np.isfinite(pay).all(axis=1, keepdims=True)
        paid.append(np.where(lost, -np.inf, pay[:, WARM:]))
        noises.append((weights[:, WARM:] * noise).sum(-1))
    raw, raw_best = paid
    # Noise is in units of the score, and pay may be a function of it: `merton` scores a logarithm
    # of the mean of what it pays.
    slope = _slope(task, raw_best.mean())
    quiet, quiet_best = (pay - noise / slope for pay, noise in zip(paid, noises, strict=True))
    ours, best = task.score(quiet.mean()), task.score(quiet_best.mean())
    # Both policies ran on the same path, so its luck cancels; cash, which earns 0, is 0 on each.
    known = bool(task.optimum) and best > 0.0
    fraction = ours / best if known else math.nan
    if task.optimum and ours == -math.inf:
        fraction = -math.inf
    apart = _slope(task, quiet.mean()) * quiet - fraction * slope * quiet_best
    return Earnings(
        fraction=fraction,
        error=_error(apart) / best if known else math.nan,
        earned=ours,
        earned_error=abs(slope) * _error(quiet),
        # This number keeps the noise, because only there does an agent show that sees the next
        # return.
        excess=slope * float((raw - raw_best).mean()),
        excess_error=abs(slope) * _error(raw - raw_best),
        turnover=float(np.abs(positions - _shifted(positions)).sum(-1)[:, WARM:].mean()),
    )


def _slope(task: Task, mean_pay: float) -> float:
    """Return the derivative of the score by a mean, by a central difference: it is any function."""
    step = 1e-6 * max(abs(mean_pay), 1e-3)
    return (task.score(mean_pay + step) - task.score(mean_pay - step)) / (2 * step)


def _shifted(positions: np.ndarray) -> np.ndarray:
    """Return the positions of the bar before, 0 before the first."""
    return np.concatenate([np.zeros_like(positions[:, :1]), positions[:, :-1]], axis=1)


def _error(x: np.ndarray) -> float:
    """Compute the standard error of the mean of `[P, L]` from its P independent pieces."""
    return float(x.mean(axis=1).std(ddof=1) / len(x) ** 0.5)
