"""The exact optimum of markets whose best position in {-1, 0, 1} switches at thresholds.

It is found by dynamic programming of the average reward. An agent sees a state x, takes a
position a in {-1, 0, 1} and earns `a m(x) - c |a - a_prev|`, where `m(x)` is the next return's
mean; its actions do not change x. The position is the sum of two units `u` in {0, 1} less one.
Reward and cost add up over units, so one unit's problem solves all of it. With `D(x)` the value of
holding a unit rather than not, before any cost,

    D(x) = m(x) + E[ clip(D(x'), -c, c) | x ]            take the unit where D > c, drop it where
    average reward = 2 E_pi[ max(D(x) - c, 0) ] - E_pi[m(x)]     D < -c, and else leave it alone.

The second line is the unit's Bellman equation averaged over the stationary distribution pi of x.
Sources: Puterman, Markov Decision Processes (1994), sections 8.2 and 8.6 (average reward, policy
iteration); Atkinson, The Numerical Solution of Integral Equations (1997), chapter 4 (Nystroem).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from nca_trader.markets.market import Chain, MarkovProcess, Mean, Policy
from nca_trader.markets.switching import gauss_nodes, panels, stationary, transitions
from nca_trader.numerics import arrays
from nca_trader.types import Tensor

SWEEPS = 64  # of value iteration, before policy iteration
ROUNDS = 200  # of policy iteration
TINY = 1e-12  # relative: rounding
RARE = 1e-9  # probability per step that does not count
REFINEMENTS = 16  # of the kinks


class Switching(NamedTuple):
    """The optimal rule on a line.

    Attributes:
      gain: average reward per step.
      cuts: `[k]` states, ascending, at which the rule changes.
      signals: `[k + 1]` the position in each range: -1.0, 1.0, or 0.0 to keep the position held.
    """

    gain: float
    cuts: np.ndarray
    signals: np.ndarray


@functools.lru_cache(maxsize=16)  # an environment is judged many times while an agent trains
def solve(problem: Chain | MarkovProcess) -> Switching:
    """Return the optimal rule of a market's problem."""
    if isinstance(problem, MarkovProcess):
        return solve_line(problem)
    gain, signals = solve_chain(problem.chain, problem.mean, problem.cost)
    return Switching(gain, problem.cuts, signals)


def sides(value: np.ndarray, cost: float) -> np.ndarray:
    """Return 1.0 where a unit is taken, -1.0 where it is dropped, 0.0 where it is left alone."""
    return np.where(value > cost, 1.0, np.where(value < -cost, -1.0, 0.0))


def advantage(chain: np.ndarray, pi: np.ndarray, mean: np.ndarray, cost: float) -> np.ndarray:
    """Compute `[n]` D by policy iteration, for a chain `[n, n]` and mean returns `[n]`.

    `pi` `[n]` is the chain's stationary distribution.

    A policy is the side of each state. Its D solves a linear system over the states that are left
    alone, since D is clipped to plus or minus the cost in all others.
    """
    value = mean.copy()
    for _ in range(SWEEPS):  # damped, so that a periodic chain settles too
        value = (value + mean + chain @ np.clip(value, -cost, cost)) / 2
    side = sides(value, cost)
    for _ in range(ROUNDS):
        kept = side == 0.0
        if cost > 0 and pi @ ~kept < RARE:
            value, side = first_trades(chain, pi, mean, cost)
            if side is None:
                return value
            kept = side == 0.0
        held = cost * side
        known = mean + chain @ held
        inside = np.eye(int(kept.sum())) - chain[np.ix_(kept, kept)]
        # Only the states left alone are unknown.
        held[kept] = np.linalg.solve(inside, known[kept])
        value = mean + chain @ held
        better = sides(value, cost)
        # A state whose D is the cost up to rounding may change sides without end: it pays nothing.
        settled = np.abs(np.clip(value, -cost, cost) - held).max() <= TINY * np.abs(value).max()
        if settled or (better == side).all():
            return value
        side = better
    raise ArithmeticError("policy iteration did not settle; report the market's parameters.")


def first_trades(
    chain: np.ndarray, pi: np.ndarray, mean: np.ndarray, cost: float
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return D without trades, up to a constant, and sides `[n]` to start from.

    The sides are None where trading never pays, or almost never. Without trades D solves Poisson's
    equation `h = m - drift + P h`. It pays to trade if h spans more than two costs, or if returns
    drift. A span that is reached once in a billion steps does not count: its system is singular to
    rounding.
    """
    drift = float(pi @ mean)
    h = np.linalg.solve(np.eye(len(chain)) - chain + pi[None, :], mean - drift)
    h = h - (h.max() + h.min()) / 2
    drifts = abs(drift) > TINY * np.abs(mean).max()
    if not drifts and pi @ (np.abs(h) > cost) < RARE:
        return h, None
    side = np.zeros(len(chain))
    if not drifts or drift > 0:
        side[h.argmax()] = 1.0
    if not drifts or drift < 0:
        side[h.argmin()] = -1.0
    return h, side


def average_reward(pi: np.ndarray, mean: np.ndarray, value: np.ndarray, cost: float) -> float:
    """Compute the optimal average reward, from D `[n]` and the stationary distribution `[n]`."""
    return float(2.0 * pi @ np.maximum(value - cost, 0.0) - pi @ mean)


def solve_chain(chain: np.ndarray, mean: np.ndarray, cost: float) -> tuple[float, np.ndarray]:
    """Return the optimal average reward of a finite chain, and the side `[n]` of each state."""
    pi = stationary(chain)
    value = advantage(chain, pi, mean, cost)
    return average_reward(pi, mean, value, cost), sides(value, cost)


def solve_line(problem: MarkovProcess) -> Switching:
    """Solve for the optimal rule for a state on a line.

    D is smooth, but its clipped form, which is averaged, has kinks where D is plus or minus the
    cost. So Gauss's nodes lie on panels that end at the kinks, and kinks and D are refined in
    turn. The result has about twelve digits; an even grid gives four.
    """
    density, mean, low, high, width, cost, state = problem
    even = np.linspace(low, high, panels(low, high, width) + 1)
    cuts, gain = np.empty(0), np.inf
    for _ in range(REFINEMENTS):
        y, w = gauss_nodes(np.union1d(even, cuts))

        def step(at: np.ndarray, y: np.ndarray = y, w: np.ndarray = w) -> np.ndarray:
            return transitions(density, at, y, w)

        chain = step(y)
        pi = stationary(chain)
        value = advantage(chain, pi, mean(y), cost)
        held = np.clip(value, -cost, cost)

        def smooth(at: np.ndarray, held: np.ndarray = held, step: Mean = step) -> np.ndarray:
            return mean(at) + step(at) @ held

        last, gain = gain, average_reward(pi, mean(y), value, cost)
        before, cuts = cuts, crossings(smooth, y, value, cost)
        if len(before) == len(cuts) and np.all(np.abs(cuts - before) <= 1e-11 * (high - low)):
            break
    else:  # a kink at the end of the range may appear and vanish without an effect on the gain
        if abs(gain - last) > TINY * np.abs(mean(y)).max():
            raise ArithmeticError("the kinks did not settle; report the market's parameters.")
    # One point of each range gives its side.
    ends = np.concatenate([[low], cuts, [high]])
    signals = sides(smooth((ends[:-1] + ends[1:]) / 2), cost)
    # Cuts ascend in the state too, which may fall along the line.
    order = slice(None) if state(high) > state(low) else slice(None, None, -1)
    return Switching(gain, state(cuts)[order], signals[order])


def crossings(smooth: Mean, x: np.ndarray, value: np.ndarray, cost: float) -> np.ndarray:
    """Return the states, ascending, where D crosses plus or minus the cost, by bisection."""
    found = []
    for level in (-cost, cost):
        over = value > level
        at = np.flatnonzero(over[1:] != over[:-1])
        left, right, rising = x[at], x[at + 1], over[at + 1]
        for _ in range(60 if len(at) else 0):
            middle = (left + right) / 2
            beyond = (smooth(middle) > level) == rising
            left, right = np.where(beyond, left, middle), np.where(beyond, middle, right)
        found.append((left + right) / 2)
    return np.unique(np.concatenate(found))


def threshold_policy(cuts: np.ndarray, signals: np.ndarray) -> Policy:
    """Return the policy that holds the signal of the first state's range; 0 keeps the position."""

    def policy(state: Tensor, position: Tensor) -> Tensor:
        xp = arrays(state)
        rank = xp.searchsorted(xp.asarray(cuts, dtype=state.dtype), state)
        signal = xp.asarray(signals, dtype=position.dtype)[rank]
        return xp.where(signal == 0, position, signal)

    return policy
