"""One account over all folds: targets row by row, or a strategy that switches at their edges."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jax import Array

from nca_trader.agents.strategy import Strategy
from nca_trader.envs.account.exits import Order
from nca_trader.evaluate.walkforward.refit import Fitted, Setup, candidate
from nca_trader.types import Bar, Bars

STEPS = 10  # between no position and the largest, of the weights that the baseline is chosen from


def targets_by_path(setup: Setup, fitted: list[Fitted]) -> list[np.ndarray]:
    """Return for each path the targets `[N, A]` of all rows, NaN outside of its test spans."""
    shape = (len(setup.bars), setup.bars.num_assets)
    found: dict[int, np.ndarray] = {}
    for fold, one in zip(setup.folds, fitted, strict=True):
        row = 0
        for (first, last), path in zip(fold.test, fold.paths, strict=True):
            targets = found.setdefault(path, np.full(shape, np.nan))
            targets[first:last] = one.targets[row : row + last - first]
            row += last - first
    return [found[path] for path in sorted(found)]


def switching_by_path(setup: Setup, fitted: list[Fitted]) -> list[Strategy]:
    """Return for each path the strategy that acts as each fold's own in its test span."""
    found: dict[int, list[tuple[int, Strategy]]] = {}
    for fold, one in zip(setup.folds, fitted, strict=True):
        for (first, _), path in zip(fold.test, fold.paths, strict=True):
            strategy = candidate(setup.subject, one.chosen)
            found.setdefault(path, []).append((first, strategy))
    return [switching(sorted(found[path], key=lambda part: part[0])) for path in sorted(found)]


def switching(parts: list[tuple[int, Strategy]]) -> Strategy:
    """Return the strategy that decides as the newest part whose first row has come.

    All parts see every bar, so each knows the history when its turn comes. The order in force is
    repeated there. The account, its entries and its stops pass from part to part.

    Args:
      parts: first row and strategy, by row; of one rule, so that their orders have the same fields.
    """
    firsts = jnp.array([first for first, _ in parts])
    strategies = [strategy for _, strategy in parts]

    def init(num_assets: int) -> Any:
        states = tuple(strategy.init(num_assets) for strategy in strategies)
        return jnp.zeros((), jnp.int32), states, jnp.full((len(parts), num_assets), jnp.nan)

    def act(state: Any, bar: Bar, portfolio: Any) -> tuple[Any, Order]:
        row, states, lasts = state
        decided = [s.decide(own, bar, portfolio) for s, own in zip(strategies, states, strict=True)]
        shape = bar.close.shape

        def stacked(*leaves: Any) -> Array:
            return jnp.stack([jnp.broadcast_to(leaf, shape) for leaf in leaves])

        orders = jax.tree.map(stacked, *[order for _, order in decided])
        lasts = jnp.where(jnp.isnan(orders.target), lasts, orders.target)
        turn = jnp.maximum(jnp.searchsorted(firsts, row, side="right") - 1, 0)
        order = jax.tree.map(lambda leaf: leaf[turn], orders)
        begins = (row == firsts).any()
        order = order._replace(target=jnp.where(begins, lasts[turn], order.target))
        return (row + 1, tuple(own for own, _ in decided), lasts), order

    # Without the portfolio where none of them sees it.
    taken = act if strategies[0].sees_portfolio else lambda s, bar: act(s, bar, None)
    return Strategy(init, taken, strategies[0].name, strategies[0].order)


def best_constant(bars: Bars, ordered: pd.DataFrame) -> np.ndarray:
    """Return the targets `[N, A]` of the baseline: one weight, equal in all assets, rebalanced.

    It is the one of highest log growth over all bars, before costs, known in hindsight: what a
    strategy has to beat to be worth its timing. It is between 0 and the most that was `ordered`,
    or 1, and may be short where the strategy ever was.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        returns = np.nan_to_num(bars.close[1:] / bars.close[:-1] - 1.0).mean(1)
    asked = np.nan_to_num(ordered.to_numpy())
    most = max(1.0, float(np.abs(asked).sum(1).max()))
    weights = np.linspace(-most if (asked < 0.0).any() else 0.0, most, 2 * STEPS + 1)
    # Below a loss of all equity, growth counts as the worst there is.
    growth = [np.log(np.maximum(1.0 + w * returns, 1e-12)).sum() for w in weights]
    best = weights[int(np.argmax(growth))]
    return np.full((len(bars), bars.num_assets), best / bars.num_assets)


def matched_hold(bars: Bars, weights: pd.DataFrame) -> np.ndarray:
    """Return the targets `[N, A]` of holding what an account held on average, rebalanced.

    It has the account's exposure to each asset and none of its timing.
    """
    return np.broadcast_to(weights.to_numpy().mean(0), bars.close.shape)
