"""Synthetic markets by name with the best that can be earned there; this is `nca.synthetic`."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from nca_trader.markets import MARKETS, SyntheticMarket, Task
from nca_trader.markets import market as unsolved
from nca_trader.markets.market import Coupled, draw
from nca_trader.optimum.optima.coupled import solve_coupled
from nca_trader.optimum.optima.switching import solve, threshold_policy

__all__ = ["MARKETS", "SyntheticMarket", "Task", "make", "market", "solved"]

M = TypeVar("M", bound=SyntheticMarket)


def market(name: str, **parameters: Any) -> SyntheticMarket:
    """Return the market called `name` and its optimum without drawing a path.

    Args:
      name: a key of `MARKETS`.
      **parameters: those of `MARKETS[name]`, whose docstring describes them.

    Raises:
      ConfigError: no such market or parameter, or a parameter out of range.

    Example:
      >>> market("martingale").optimum
      0.0
    """
    return solved(unsolved(name, **parameters))


def make(name: str, *, num_bars: int = 100_000, seed: int = 0, **parameters: Any) -> Task:
    """Draw a synthetic market.

    Args:
      name: a key of `MARKETS`.
      num_bars: N, at least 2.
      seed: of the draw.
      **parameters: those of `MARKETS[name]`.

    Returns:
      A `Task`: `.bars`, `.costs`, `.optimum` (the best average reward per step),
      `.optimal_policy`, and the other attributes of `SyntheticMarket`.

    Raises:
      ConfigError: no such market or parameter, or a value out of range.

    Example:
      >>> task = make("ou", phi=0.95, cost=0.0, num_bars=50)
      >>> len(task.bars), round(task.optimum, 6)
      (50, 0.001278)
    """
    return draw(market(name, **parameters), num_bars, seed)


def solved(market: M) -> M:
    """Return a market, or a draw of one, with its optimum and its optimal policy.

    Example:
      >>> ou = unsolved("ou", phi=0.95, cost=0.0)
      >>> ou.optimum, round(solved(ou).optimum, 6)
      (None, 0.001278)
    """
    if market.problem is None:
        return market
    if isinstance(market.problem, Coupled):
        gain, policy = solve_coupled(market.problem)
        return dataclasses.replace(market, optimum=gain, optimal_policy=policy)
    rule = solve(market.problem)
    return dataclasses.replace(
        market,
        # Its assets are independent of each other, and their optima add up.
        optimum=market.num_assets * rule.gain,
        optimal_policy=threshold_policy(rule.cuts, rule.signals),
        details={"cuts": rule.cuts, "signals": rule.signals},
    )
