"""What is easier at the start of a run than at its end.

Plain policy optimisation on a market that is expensive to trade collapses into never trading:
at first every change of position costs more than it earns, and an agent that has stopped trading
sees no reason to begin. Costs that rise from little to true let it find its trades first.
"""

import jax.numpy as jnp
from jax import Array

from nca_trader.presets import CurriculumConfig


def cost_scale(config: CurriculumConfig, update: Array, num_updates: int) -> Array | None:
    """`[]` float32 factor on all costs in `update` of `num_updates`; None is no curriculum."""
    if config.costs_from == 1.0:
        return None
    done = update / max(config.costs_share * num_updates, 1.0)
    return config.costs_from + (1.0 - config.costs_from) * jnp.minimum(done, 1.0)
