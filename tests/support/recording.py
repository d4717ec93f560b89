"""An optimiser that remembers what it was given."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nca_trader.learner.optimizer import GuardState, make_optimizer


class Recorded(NamedTuple):
    """What the optimiser was given, summed, and the real optimiser's state."""

    gradients: Any
    inner: Any


def recording_optimizer(*args):
    """The real optimiser, which also keeps the sum of all gradients.

    Their sum is what plain SGD would have moved by: Adam hides a gradient that is N times too big.
    """
    real = make_optimizer(*args)

    def init(params):
        inner = real.init(params)
        return GuardState(inner.skipped, Recorded(jax.tree.map(jnp.zeros_like, params), inner))

    def step(gradient, state, params):
        updates, inner = real.update(gradient, state.inner.inner, params)
        total = jax.tree.map(jnp.add, state.inner.gradients, gradient)
        skipped = state.skipped + inner.skipped - state.inner.inner.skipped
        return updates, GuardState(skipped, Recorded(total, inner))

    return type(real)(init, step)


def distance(a, b):
    """Norm of the difference of two trees, relative to the norm of the second."""
    a, b = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(t)]).astype("f8") for t in (a, b))
    return np.linalg.norm(a - b) / np.linalg.norm(b)
