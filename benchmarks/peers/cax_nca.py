"""CAX's neural cellular automaton in one dimension: as many cells, channels, units and steps.

As CAX's own one-dimensional example builds it: perception is a depthwise convolution of width 3,
of 3 kernels a channel, so that it can tell a cell from each neighbour as our taps do; the update
is residual, by a perceptron with the hidden layer. `fused` perceives by one dense convolution
into the hidden layer instead: what our rule multiplies, in CAX's parts, and faster than its own.
"""

import jax
import jax.numpy as jnp
from cax.core import ComplexSystem
from cax.core.perceive import ConvPerceive
from cax.core.update import ResidualUpdate
from flax import nnx

from benchmarks.peers.clock import row, run, steps_per_second


class Automaton(ComplexSystem):
    """As in CAX's own examples: perceive, then update."""

    def __init__(self, channels: int, hidden: int, fused: bool, rngs: nnx.Rngs):
        """Draws the parameters."""
        if fused:
            self.perceive = ConvPerceive(
                channels, hidden, kernel_size=(3,), activation_fn=nnx.relu, rngs=rngs
            )
            self.update = ResidualUpdate(1, channels, hidden, (), rngs=rngs)
        else:
            self.perceive = ConvPerceive(
                channels, 3 * channels, kernel_size=(3,), feature_group_count=channels, rngs=rngs
            )
            self.update = ResidualUpdate(1, channels, 3 * channels, (hidden,), rngs=rngs)

    def _step(self, state, input=None, *, sow=False):
        return self.update(state, self.perceive(state), input)


def main(
    segments: int = 16,
    bars: int = 190,
    channels: int = 16,
    hidden: int = 64,
    updates: int = 5,
    fused: int = 0,
    backward: int = 0,
    seconds: float = 3.0,
) -> dict[str, object]:
    """Cells a second, every one updated `updates` times; with `backward`, and differentiated."""
    automaton = Automaton(channels, hidden, bool(fused), nnx.Rngs(0))
    state = jax.random.normal(jax.random.key(0), (segments, bars, channels))

    def loss(automaton):
        return (automaton(state, num_steps=updates) ** 2).mean()

    @nnx.jit
    def step(automaton):
        if backward:
            wanted = nnx.DiffState(0, nnx.Param)
            gradient = nnx.grad(loss, argnums=wanted)(automaton)
            # All but nothing: a residual rule of many updates blows up when its weights move.
            moved = jax.tree.map(
                lambda p, g: p - 1e-30 * g, nnx.state(automaton, nnx.Param), gradient
            )
            nnx.update(automaton, moved)
            return jnp.zeros(())
        return loss(automaton)

    def call() -> None:
        jax.block_until_ready(step(automaton))
        jax.block_until_ready(nnx.state(automaton, nnx.Param))

    rate = steps_per_second(call, segments * bars, seconds)
    assert jnp.isfinite(loss(automaton))
    return row("CAX", "cax", segments, rate, jax=jax.__version__)


if __name__ == "__main__":
    run(main)
