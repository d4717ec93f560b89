"""The exact optimum of assets that share a limit: a Markov decision process of few states.

A state is the market's and the position held, an action the next position; an action does not
change the market. Value iteration of the average reward,

    v(s, p) <- max_a [ pay(s, p, a) + sum_s' P(s, s') v(s', a) ],

bounds the optimum in each sweep between the least and the largest change of v.
Source: Puterman, Markov Decision Processes (1994), theorem 8.5.5 and section 8.5.4.
"""

from __future__ import annotations

import functools

import numpy as np

from nca_trader.markets.market import Coupled, Policy
from nca_trader.numerics import arrays
from nca_trader.types import Tensor

SWEEPS = 200_000
TINY = 1e-11  # relative distance of the bounds


@functools.lru_cache(maxsize=16)  # an environment is judged many times while an agent trains
def solve_coupled(problem: Coupled) -> tuple[float, Policy]:
    """Return the optimal average reward and a policy that attains it."""
    chain, pay, held = problem.chain, problem.pay, problem.held
    value, size = np.zeros(pay.shape[:2]), np.abs(pay).max()
    for _ in range(SWEEPS):
        worth = pay + (chain @ value)[:, None, :]
        change = worth.max(-1) - value
        low, high = change.min(), change.max()
        if high - low <= TINY * size:
            break
        # Half a step, so that a chain that is almost periodic settles too.
        value = value + change / 2 - change.mean() / 2
    else:
        raise ArithmeticError("value iteration did not settle; report the market's parameters.")
    best = held[worth.argmax(-1)]  # [n, P, A]
    assets = held.shape[1]
    # The state has one variable more than there are assets.
    bits, digits = (np.arange(n, dtype=np.int32)[::-1] for n in (assets + 1, assets))
    binary, ternary = 2**bits, 3**digits

    def policy(state: Tensor, position: Tensor) -> Tensor:
        xp = arrays(position)
        row = (state > 0).astype(np.int32) @ binary
        column = (xp.sign(position) + 1).astype(np.int32) @ ternary
        return xp.asarray(best, dtype=position.dtype)[row, column]

    return float(low + high) / 2, policy
