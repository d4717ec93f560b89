"""The rules that an agent has to beat: what it would be replaced by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from nca_trader.agents import rules
from nca_trader.agents.strategy import Strategy
from nca_trader.types import Bar

MATCHED = "exposure-matched hold"
LONGEST = 2000  # bars of the trend that is a baseline: its memory is a window of so many


def year_of(bars_per_year: float, known: int) -> int:
    """Return how many bars the trend of a year looks back.

    Args:
      bars_per_year: P.
      known: bars before the first that is traded; the trend is at most as long.
    """
    return max(2, min(round(bars_per_year), known, LONGEST))


def baseline_rules(year: int, sized: bool = False) -> dict[str, Strategy]:
    """Return the baselines by name.

    Args:
      year: bars that the trend looks back, see `year_of`.
      sized: whether the account sizes positions by volatility. Buy and hold then has a target of
        volatility, and the rule that sets one itself is left out: it would be scaled twice.

    Example:
      >>> list(baseline_rules(252))[:2]
      ['buy and hold', 'hold, volatility 0.15']
    """
    hold, trend = rules.buy_and_hold(), rules.time_series_momentum(year)
    found = (
        hold,
        *(() if sized else (rules.volatility_hold(),)),
        trend,
        half_and_half(rules.equal_weight(), trend),
        rules.sma_cross(50, 200),
        rules.always_flat(),
    )
    return {rule.name: rule for rule in found}


def constant_exposure(targets: Sequence[float]) -> Strategy:
    """Return the strategy that holds the exposure that an agent had on average: its timing is gone.

    Args:
      targets: of each asset. Where other assets are traded, each gets their mean.

    Example:
      >>> constant_exposure((0.3, 0.1)).name
      'exposure-matched hold'
    """
    own = np.asarray(targets, np.float64)

    def act(state: Any, bar: Bar) -> Any:
        num_assets = bar.close.shape[0]
        every = own if len(own) == num_assets else np.full(num_assets, own.mean())
        return state, jnp.asarray(every)

    return Strategy(lambda num_assets: (), act, MATCHED)


def half_and_half(one: Strategy, other: Strategy) -> Strategy:
    """Return the strategy that orders the mean of two targets."""

    def act(state: Any, bar: Bar) -> Any:
        first, order = one.decide(state[0], bar, None)
        second, more = other.decide(state[1], bar, None)
        # The last target that was given counts where a rule orders nothing now.
        held = (
            jnp.where(jnp.isnan(asked.target), before, asked.target * asked.size)
            for asked, before in ((order, state[2]), (more, state[3]))
        )
        held = tuple(held)
        return (first, second, *held), 0.5 * (held[0] + held[1])

    def init(num_assets: int) -> Any:
        none = jnp.zeros(num_assets)
        return one.init(num_assets), other.init(num_assets), none, none

    return Strategy(init, act, f"half {one.name}, half {other.name}")
