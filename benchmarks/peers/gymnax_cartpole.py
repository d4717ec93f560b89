"""gymnax CartPole under `vmap` and `scan`: random actions from a hash, keys of threefry.

The keys are what its `step` asks for, one an environment and step; threefry is the fast one on a
CPU (`unsafe_rbg` is 12 times slower there). rejax needs a gymnax below 1, so `make bench-peers`
puts the newest one into a folder of its own.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(sys.prefix) / "newest"))

import gymnax
import jax
import jax.numpy as jnp

from benchmarks.peers.clock import row, run, steps_per_second

LENGTH = 128


def main(envs: int = 4096, seconds: float = 5.0) -> dict[str, object]:
    """Steps a second, resets included, observations and rewards summed so that none is dropped."""
    env, params = gymnax.make("CartPole-v1")
    reset = jax.vmap(env.reset, (0, None))
    step = jax.vmap(env.step, (0, 0, 0, None))

    def one(carry, number):
        key, state, total = carry
        key, now = jax.random.split(key)
        cells = jnp.arange(envs, dtype=jnp.uint32)
        mixed = number * jnp.uint32(2654435761) + cells * jnp.uint32(2246822519)
        action = ((mixed ^ (mixed >> 15)) * jnp.uint32(2246822519) >> 16) % 2
        observation, state, reward, *_ = step(
            jax.random.split(now, envs), state, action.astype(jnp.int32), params
        )
        return (key, state, total + observation.sum() + reward.sum()), None

    many = jax.jit(lambda carry: jax.lax.scan(one, carry, jnp.arange(LENGTH, dtype=jnp.uint32))[0])
    key, first = jax.random.split(jax.random.key(0))
    _, state = reset(jax.random.split(first, envs), params)
    carry = (key, state, jnp.zeros(()))

    def call() -> None:
        nonlocal carry
        carry = jax.block_until_ready(many(carry))

    return row(
        "gymnax CartPole",
        "gymnax",
        envs,
        steps_per_second(call, envs * LENGTH, seconds),
        observation=[4],
        jax=jax.__version__,
        device=jax.devices()[0].device_kind,
    )


if __name__ == "__main__":
    run(main)
