"""Fire masks: an update learns through the very mask that its rollout was collected through."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nca_trader import make_learner, make_policy
from nca_trader.agents.policy import Fire


@pytest.fixture(scope="module")
def firing(stage):
    """One minibatch of everything, so that the policy learnt from is the one that acted."""
    policy = dataclasses.replace(stage.agent.policy, fire_rate=0.5)
    learn = dataclasses.replace(stage.agent.learner, num_epochs=1, num_minibatches=1)
    return dataclasses.replace(stage.agent, policy=policy, learner=learn)


@pytest.mark.slow
def test_learning_sees_the_mask_that_collecting_saw(stage, firing):
    policy = make_policy(firing, stage.env.spec)
    learner = make_learner(stage.env, policy, firing)
    state = learner.init(jax.random.key(0))
    # At first the rule hands its input on, whatever the mask: parameters that use it.
    state = state._replace(params=jax.tree.map(jnp.array, stage.params))
    for _ in range(2):
        state, metrics = learner.step(state)
        assert abs(float(metrics["approx_kl"])) < 1e-8 and float(metrics["clip_fraction"]) == 0.0


@pytest.mark.heavy
def test_another_seed_would_be_another_policy(stage, firing):
    policy = make_policy(firing, stage.env.spec)
    x, present = stage.env.features[None, 20:60], stage.env.bars.present[None, 20:60]

    def cells(seed):
        fire = Fire(jnp.full(1, seed, jnp.uint32), jnp.full(1, 20))
        return np.asarray(policy.encode(stage.params, jnp.asarray(x), jnp.asarray(present), fire))

    assert np.abs(cells(1) - cells(2)).max() > 0.1
    np.testing.assert_array_equal(cells(1), cells(1))
