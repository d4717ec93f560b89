"""GAE against a double sum over episodes, and against five faults that others shipped.

Advantages of a group against their formula in float64, and against what is rounding alone.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nca_trader.config import LearnerConfig
from nca_trader.learner import sampled
from nca_trader.learner.ppo import AdvantageMoments, AgentSetup, gae, group_advantages, moments

GAMMA, LAMBDA, T = 0.97, 0.9, 300


class Trajectory:
    """Episodes end by ruin, or far more often because the data ran out."""

    def __init__(self, seed=0):
        rng = np.random.default_rng(seed)
        self.reward = rng.normal(size=T)
        self.value = 5.0 * rng.normal(size=T + 1)  # of the observation at each step, after resets
        self.final = 5.0 * rng.normal(size=T)  # of the final observation, where an episode ends
        self.terminated = rng.random(T) < 0.03
        self.truncated = ~self.terminated & (rng.random(T) < 0.08)

    @property
    def ended(self):
        return self.terminated | self.truncated

    @property
    def following(self):
        """Value of what followed each step, before any reset."""
        return np.where(self.ended, self.final, self.value[1:])


def advantages(reward, terminated, truncated, value, following):
    """The estimates from the two kinds of end, as a learner feeds them."""
    return np.asarray(
        jax.jit(gae)(
            reward,
            GAMMA * (1.0 - terminated),
            value,
            following,
            LAMBDA * (1.0 - truncated),
        )
    )


def double_sum(x):
    """`A_t = sum_l (gamma lambda)^l delta_{t+l}`, summed up to the end of t's own episode."""
    bootstrap = np.where(x.terminated, 0.0, x.following)
    delta = x.reward + GAMMA * bootstrap - x.value[:-1]
    result = np.zeros(T)
    for t in range(T):
        for later in range(t, T):
            result[t] += (GAMMA * LAMBDA) ** (later - t) * delta[later]
            if x.ended[later]:
                break
    return result


def test_gae_equals_a_double_sum_over_episodes():
    for seed in range(3):
        x = Trajectory(seed)
        assert x.terminated.sum() > 3 and x.truncated.sum() > 10
        got = advantages(x.reward, x.terminated, x.truncated, x.value[:-1], x.following)
        np.testing.assert_allclose(got, double_sum(x), rtol=1e-4, atol=1e-4)


def test_sums_run_in_float32_whatever_came_in():
    half = [jnp.asarray(x, jnp.bfloat16) for x in np.random.default_rng(5).random((5, 400))]
    assert gae(*half).dtype == jnp.float32
    np.testing.assert_array_equal(gae(*half), gae(*(x.astype(jnp.float32) for x in half)))


def test_sequences_of_different_length_are_refused():
    with pytest.raises(AssertionError):
        gae(np.zeros(4), np.zeros(4), np.zeros(4), np.zeros(5), np.zeros(4))


def returns_to_go(r, discount):
    return np.array([sum(discount**k * x for k, x in enumerate(r[t:])) for t in range(len(r))])


@pytest.mark.parametrize("size", [1e-2, 1.0, 1e3])
@pytest.mark.parametrize("accounts", [2, 5])
def test_a_group_is_its_formula_where_accounts_differ_and_nothing_where_rounding_does(
    accounts, size
):
    """Accounts that all do the same earn the same; what float32 makes of that is no advantage."""
    rng = np.random.default_rng(accounts)
    shape, discount = (128, accounts), 0.99
    of_bars = np.repeat(size * rng.normal(size=(128, 1)), accounts, axis=1)
    args = np.float32(of_bars), np.full(shape, discount, np.float32)
    rounded = np.float32(of_bars * (1.0 + 6e-8 * rng.choice([-1, 0, 1], size=shape)))
    for same in (args[0], rounded):
        assert np.asarray(group_advantages(same, args[1])).std() < 0.02
    # As little as a thousandth of what the bars did counts in full.
    own = np.float32(of_bars + max(size, 1.0) * 2e-3 * rng.normal(size=shape))
    to_go = returns_to_go(own.astype("f8"), discount)
    relative = to_go - to_go.mean(axis=1, keepdims=True)
    expected = relative / np.sqrt((relative**2).mean())
    np.testing.assert_allclose(group_advantages(own, args[1]), expected, rtol=0.02, atol=0.02)


def test_generalised_advantages_that_are_rounding_are_not_blown_up_either():
    rng = np.random.default_rng(0)
    for size, low, high in ((3e-7, 0.0, 0.02), (0.02, 0.99, 1.01)):
        advantage = jnp.asarray(size * rng.normal(size=(4, 16, 3)), jnp.float32)
        parts = AdvantageMoments(*(x[None] for x in moments(advantage)))
        setup = AgentSetup(None, LearnerConfig(), None)
        batch = (None, advantage, None)
        (_, normalised, _), _ = sampled.normalize(setup, batch, {"advantage": parts})
        assert low <= float(normalised.std()) <= high
