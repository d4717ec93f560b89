"""What the comparisons with other engines share: their cash, targets, costs, and orders to fill."""

import itertools

import numpy as np

from nca_trader.types import Costs

# Both engines have a smallest quantity, and the cash makes it small relative to every order.
# vectorbt takes amounts of money or units below 1e-12 for zero; backtesting.py trades whole units
# only.
VECTORBT_CASH = 1e6
BACKTESTING_CASH = 1e14

FILLS, ORDERS = ("next_open", "close"), ("on_change", "rebalance")
KINDS = ("positions", "weights", "leveraged")
COSTS = tuple(
    Costs(commission=commission, slippage=slippage)
    for commission, slippage in itertools.product((0.0, 5e-4), (0.0, 2e-4))
)


def drawn_targets(rng, kind, shape):
    """Targets of a kind: {-1, 0, 1}, or uniform in (-1, 1) or (-1.5, 1.5)."""
    if kind == "positions":
        return rng.integers(-1, 2, shape).astype(float)
    return {"weights": 1.0, "leveraged": 1.5}[kind] * rng.uniform(-1, 1, shape)


def orders_of(targets, order):
    """What an engine without the rule is given: NaN where "on_change" orders nothing."""
    if order == "rebalance":
        return targets
    before = np.concatenate([np.zeros_like(targets[:1]), targets[:-1]])
    return np.where(targets == before, np.nan, targets)


def at_next_open(orders):
    """Orders one row later, in the bar whose open fills them."""
    return np.concatenate([np.full_like(orders[:1], np.nan), orders[:-1]])
