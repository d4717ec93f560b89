"""The rules that an agent has to beat: what it would be replaced by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from nca_trader.strategies import rules
from nca_trader.strategies.strategy import Strategy
from nca_trader.types import Bar

MATCHED = "exposure-matched hold"
LONGEST_TREND = 2000  # bars of the trend that is a baseline: its memory is a window of so many


def year_of(bars_per_year: float, known: int) -> int:
    """Return how many bars the trend of a year looks back.

    Args:
      bars_per_year: P.
      known: bars before the first that is traded; the trend is at most as long.
    """
    return max(2, min(round(bars_per_year), known, LONGEST_TREND))


def baseline_rules(
    year: int, sized: bool = False, base: Strategy | None = None
) -> dict[str, Strategy]:
    """Return the baselines by name.

    Args:
      year: bars that the trend looks back, see `year_of`.
      sized: whether the account sizes positions by volatility. Equal weight then has a constant
        volatility, and takes the place of the rule that sets one itself: it would be scaled twice.
      base: of an agent that tilts it, which is one of them then.

    Example:
      >>> list(baseline_rules(252))[:2]
      ['buy and hold', 'hold, volatility 0.15']
    """
    found = (
        rules.buy_and_hold(),
        rules.equal_weight() if sized else rules.volatility_hold(),
        rules.time_series_momentum(year),
        rules.half_and_half(year),
        rules.sma_cross(50, 200),
        rules.always_flat(),
    )
    return {rule.name: rule for rule in (*found, *filter(None, [base]))}


def constant_exposure(targets: Sequence[float]) -> Strategy:
    """Return the strategy that holds the exposure that an agent had on average: its timing is gone.

    It is a control and no baseline: the average is of the span that is judged, so that nothing
    could have traded it.

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
