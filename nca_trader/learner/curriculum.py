"""What is easier at the start of a run than at its end.

Plain policy optimisation on a market that is expensive to trade collapses into never trading:
at first every change of position costs more than it earns, and an agent that has stopped trading
sees no reason to begin. Costs that rise from little to true let it find its trades first; so do
price moves that fall from large to true, where costs stay. Moves that rise from small to true
spare a leveraged account the ruin that would end its first episodes.
"""

import jax.numpy as jnp
from jax import Array

from nca_trader.config import CurriculumConfig
from nca_trader.envs.account.state import Legs


def cost_scale(config: CurriculumConfig, update: Array, num_updates: int) -> Array | None:
    """`[]` float32 factor on all costs in `update` of `num_updates`; None is no curriculum."""
    return _towards_one(config.costs_from, config.costs_share, update, num_updates)


def volatility_scale(config: CurriculumConfig, update: Array, num_updates: int) -> Array | None:
    """`[]` float32 factor on all log-returns in `update` of `num_updates`, or None likewise."""
    return _towards_one(config.volatility_from, config.volatility_share, update, num_updates)


def _towards_one(start: float, share: float, update: Array, num_updates: int) -> Array | None:
    if start == 1.0:
        return None
    done = update / max(share * num_updates, 1.0)
    return start + (1.0 - start) * jnp.minimum(done, 1.0)


def moved(legs: Legs, scale: Array | None) -> Legs:
    """The legs of a market whose every log-return is `scale` times this one's; None is 1.

    `gap' = (1 + gap)^scale - 1`, likewise the body: the legs of the prices `P^scale`, whose
    volatility is `scale` times as high. Prices in money, which lots and fees are measured in,
    and payments in cash stay what they are.
    """
    if scale is None:
        return legs
    gap, body = (jnp.expm1(scale * jnp.log1p(leg)) for leg in (legs.gap, legs.body))
    return legs._replace(gap=gap, body=body)
