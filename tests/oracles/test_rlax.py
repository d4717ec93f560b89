"""Advantages against rlax's, fed with the same boundaries in its own terms."""

import importlib.util
import warnings

import pytest

if importlib.util.find_spec("rlax") is None:
    pytest.skip("rlax is not installed here", allow_module_level=True)

import numpy as np

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # what its dependencies ask of jax
    import rlax

from nca_trader.learner.ppo import gae, vtrace

GAMMA, LAMBDA, LENGTH = 0.97, 0.9, 300


@pytest.mark.parametrize("seed", range(3))
def test_gae_is_rlaxs_through_ruin_and_through_data_that_ran_out(seed):
    rng = np.random.default_rng(seed)
    reward, value, final = rng.normal(size=(3, LENGTH)).astype(np.float32)
    last = np.float32(rng.normal())
    ended = rng.random(LENGTH) < 0.1
    terminated = ended & (rng.random(LENGTH) < 0.5)
    truncated = ended & ~terminated
    assert terminated.any() and truncated.any()
    after = np.append(value[1:], last)
    ours = gae(
        reward,
        GAMMA * (1.0 - terminated),
        value,
        np.where(truncated, final, after),
        np.where(truncated, 0.0, LAMBDA),
    )
    # rlax knows one kind of end: what a truncated episode is still worth is put into its reward.
    theirs = rlax.truncated_generalized_advantage_estimation(
        reward + GAMMA * truncated * final,
        (GAMMA * (1.0 - ended)).astype(np.float32),
        LAMBDA,
        np.append(value, last),
    )
    np.testing.assert_allclose(ours, theirs, atol=4e-6 * np.abs(theirs).max())


@pytest.mark.parametrize("seed", range(3))
def test_vtrace_is_rlaxs(seed):
    rng = np.random.default_rng(seed)
    reward, log_rho = rng.normal(size=(2, LENGTH)).astype(np.float32)
    value = rng.normal(size=LENGTH + 1).astype(np.float32)
    discount = (GAMMA * (rng.random(LENGTH) > 0.1)).astype(np.float32)
    mixing = np.full(LENGTH, LAMBDA, np.float32)
    advantage, target = vtrace(reward, discount, value[:-1], value[1:], mixing, log_rho)
    theirs = rlax.vtrace_td_error_and_advantage(
        value[:-1], value[1:], reward, discount, np.exp(log_rho), LAMBDA
    )
    np.testing.assert_allclose(advantage, theirs.pg_advantage, atol=2e-5)
    np.testing.assert_allclose(target, theirs.errors + value[:-1], atol=2e-5)
