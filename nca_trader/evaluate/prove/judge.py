"""How much of a known optimum an agent reaches, held against what is best on the same bars.

An agent takes its most probable action along pieces of a path that it was not trained on, all of
them in one scan. What it earns is the market's own account of the positions it ordered, and the
optimal policy is sent along the same pieces: what the path gives to both is no merit.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from nca_trader.agents.heads import account_features
from nca_trader.agents.policy import Params, Policy
from nca_trader.data.synthetic import Task
from nca_trader.envs.account.state import open_account
from nca_trader.envs.market import Market
from nca_trader.envs.rewards import begun
from nca_trader.envs.trading import Episode, TradingEnv, transition
from nca_trader.errors import BarError, ConfigError
from nca_trader.evaluate.backtest import encode

WARM, COUNTED = 256, 1024  # bars of a piece: those in which it forgets that it began flat, the rest
CELLS = 2**18  # bars times assets of an evaluation's path


class Reached(NamedTuple):
    """What positions earned on a path, in the unit of the market's optimum.

    fraction: of the optimum; NaN where the optimum is 0. error: its standard error.
    earned: with the noise of returns taken out, not compared with anything; earned_error.
    excess: of the returns as they came, over what the optimal policy earned of them;
      excess_error. Nobody who sees the past alone has an excess in the long run.
    turnover: mean of the sum of |position - previous| a step.
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
        """Whether more was earned than can be, by 3 standard errors."""
        return self.excess > 3 * self.excess_error + 1e-9


def evaluation_bars(num_assets: int) -> int:
    """Bars of a path to evaluate on: fewer where each has many assets."""
    return CELLS // num_assets


def pieces(num_bars: int, first: int) -> np.ndarray:
    """`[P, WARM + COUNTED]` rows of the pieces of a path that is decided on from row `first`.

    What counts of one piece begins where the one before ends.

    Raises:
      BarError: too few bars for 8 pieces, fewer than a standard error can be had of.
    """
    count = (num_bars - 1 - first - WARM) // COUNTED
    if count < 8:
        raise BarError(
            f"{num_bars} bars are {max(count, 0)} pieces of {COUNTED} to evaluate on; give "
            f"{first + 1 + WARM + 8 * COUNTED} or more."
        )
    return first + COUNTED * np.arange(count)[:, None] + np.arange(WARM + COUNTED)


def reached_by(env: TradingEnv, policy: Policy, params: Params) -> Reached:
    """What the greedy agent reaches in `env`, which is one of a task's bars.

    Raises:
      ConfigError: the environment's bars are of no known optimum. BarError: they are too few.
    """
    task = env.task
    if task is None or task.optimum is None:
        raise ConfigError(
            f"{env.bars.source or 'bars'}: no optimum is known; give an environment of a "
            "synthetic market that has one, e.g. ou_mid."
        )
    rows = pieces(len(env), policy.first_decision)
    return judge(task, rows, greedy_positions(env, policy, params, rows))


def greedy_positions(
    env: TradingEnv,
    policy: Policy,
    params: Params,
    rows: np.ndarray,
    cells: np.ndarray | None = None,
) -> np.ndarray:
    """`[P, L, A]` float64 weights that the most probable actions order at the closes of `rows`.

    Args:
      rows: `[P, L]` consecutive rows of bars; each of the P accounts begins flat.
      cells: `[N, A, C]` of all bars, where they are not those of the bars as they are.
    """
    if cells is None:
        cells = encode(policy, params, env.features, env.bars.present)
    ordered = _scan_pieces(policy, params, env.market, jnp.asarray(cells), jnp.asarray(rows))
    return np.asarray(ordered, np.float64)


@functools.partial(jax.jit, static_argnums=0)
def _scan_pieces(
    policy: Policy, params: Params, market: Market, cells: Array, rows: Array
) -> Array:
    """The environment's own transitions along every piece at once; `cells` `[N, A, C]`."""
    spec, decide = policy.spec, policy.distribution
    dynamics = market.dynamics._replace(spec=spec)

    def one(episode: Episode, row: Array) -> Episode:
        seen = account_features(policy.spec, episode.account)
        logits, _ = policy.act(params, cells[row], seen)
        action = decide.order(spec, decide.mode(logits))
        now, following = (market.legs_at(at) for at in (row, row + 1))
        return transition(dynamics, episode, action, now, following)[0]

    def step(episodes: Episode, row: Array) -> tuple[Episode, Array]:
        episodes = jax.vmap(one)(episodes, row)
        return episodes, episodes.account.ordered

    def begin(_: Array) -> Episode:
        return Episode(begun(spec, open_account(jnp.zeros(spec.num_assets))))

    ordered = jax.lax.scan(step, jax.vmap(begin)(rows[:, 0]), rows.T)[1]
    return jnp.moveaxis(ordered, 0, 1)


def optimal_positions(task: Task, rows: np.ndarray) -> np.ndarray:
    """`[P, L, A]` what the optimal policy holds at the closes of `rows` `[P, L]`, from flat."""
    if task.optimal_policy is None:
        raise ConfigError(f"{task.name}: no optimal policy is known.")
    position, held = np.zeros((len(rows), task.num_assets)), []
    for row in rows.T:
        position = task.optimal_policy(task.states[row], position)
        held.append(position)
    return np.stack(held, axis=1)


def judge(task: Task, rows: np.ndarray, positions: np.ndarray) -> Reached:
    """Holds positions `[P, L, A]`, ordered at the closes of `rows` `[P, L]`, against the best.

    A position earns `pay` on the next bar. From it `a (r - E[r | state])` is taken: its mean is 0
    for whoever sees the past alone, and where `pay` is linear in r what remains is
    E[pay | state]. Standard errors are those of the means of pieces, which hardly overlap in
    anything; that of a score which is no mean, e.g. a logarithm of one, is by its slope.
    """
    best = optimal_positions(task, rows)
    raw, raw_best = _pay(task, rows, positions), _pay(task, rows, best)
    slope = _slope(task, raw_best.mean())
    # Where pay is no return of equity but a function of one, neither is its noise.
    quiet = raw - _noise(task, rows, positions) / slope
    quiet_best = raw_best - _noise(task, rows, best) / slope
    optimum = float(task.optimum or 0.0)
    gap = task.score(quiet.mean()) - task.score(quiet_best.mean())
    before = np.concatenate([np.zeros_like(positions[:, :1]), positions[:, :-1]], axis=1)
    return Reached(
        fraction=1.0 + gap / optimum if optimum else math.nan,
        error=abs(slope) * _error(quiet - quiet_best) / optimum if optimum else math.nan,
        earned=task.score(quiet.mean()),
        earned_error=abs(slope) * _error(quiet),
        excess=slope * float((raw - raw_best).mean()),
        excess_error=abs(slope) * _error(raw - raw_best),
        turnover=float(np.abs(positions - before).sum(-1)[:, WARM:].mean()),
    )


def _pay(task: Task, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """`[P, COUNTED]` what the market pays."""
    before, held = positions[:, WARM - 1 : -1], positions[:, WARM:]
    return np.asarray(task.pay(before, held, task.returns[rows[:, WARM:] + 1]))


def _noise(task: Task, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """`[P, COUNTED]` what positions made of the part of returns that the state does not tell."""
    if task.expected_return is None:
        raise ConfigError(f"{task.name}: no expected return is known.")
    held, at = positions[:, WARM:], rows[:, WARM:]
    return (held * (task.returns[at + 1] - task.expected_return(task.states[at]))).sum(-1)


def _error(x: np.ndarray) -> float:
    """The standard error of the mean of `[P, L]`, pieces being independent of each other."""
    return float(x.mean(axis=1).std(ddof=1) / len(x) ** 0.5)


def _slope(task: Task, mean_pay: float) -> float:
    """How fast the score rises with the mean of what is paid."""
    step = 1e-6 * max(abs(mean_pay), 1e-3)
    return (task.score(mean_pay + step) - task.score(mean_pay - step)) / (2 * step)
