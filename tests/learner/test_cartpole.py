"""The learner's own surrogate, estimates, epochs and optimiser balance a pole with an MLP."""

import cartpole
import jax.numpy as jnp
import numpy as np
import pytest

# 16 seeds of other good implementations, same sizes: median and worst environment steps until
# the mean of the newest episodes is 195, and 475.
MEDIAN, WORST = {195: 20_000, 475: 166_000}, {195: 33_000, 475: 195_000}


@pytest.mark.heavy
def test_the_poles_motion_solves_its_equations():
    """Lagrange's two equations of cart and pole, solved as a linear system."""
    rng = np.random.default_rng(0)
    state = rng.uniform(-1, 1, (cartpole.ENVS, 4)) * [2.0, 2.0, 0.2, 2.0]
    action = rng.integers(0, 2, cartpole.ENVS)
    pole = cartpole.Pole(jnp.asarray(state, "f4"), jnp.zeros(cartpole.ENVS, jnp.int32))
    after, fallen, cut = cartpole.step(pole, action)
    length, cart, mass, gravity, push = 0.5, 1.0, 0.1, 9.8, 10.0
    for i, (x, speed, angle, spin) in enumerate(state):
        matrix = [
            [cart + mass, mass * length * np.cos(angle)],
            [mass * length * np.cos(angle), 4 / 3 * mass * length**2],
        ]
        force = push if action[i] else -push
        right = [
            force + mass * length * spin**2 * np.sin(angle),
            mass * gravity * length * np.sin(angle),
        ]
        pull, turn = np.linalg.solve(matrix, right)
        expected = [x + 0.02 * speed, speed + 0.02 * pull, angle + 0.02 * spin, spin + 0.02 * turn]
        np.testing.assert_allclose(after.state[i], expected, rtol=1e-4, atol=1e-5)
        assert fallen[i] == (abs(expected[0]) > 2.4 or abs(expected[2]) > 0.2094395) and not cut[i]


@pytest.mark.slow
def test_sixteen_seeds_balance_as_fast_as_others():
    lengths = [cartpole.train(seed, updates=100) for seed in range(16)]
    for least in MEDIAN:
        steps = [cartpole.steps_until(each, least) for each in lengths]
        assert np.median(steps) <= MEDIAN[least] and max(steps) <= WORST[least]
