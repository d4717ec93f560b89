"""Fire masks: an update learns through the very mask that its rollout was collected through."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from nca_trader import make_learner, make_policy


@pytest.mark.slow
def test_learning_sees_the_mask_that_collecting_saw(stage):
    # One minibatch of everything, so that the policy learnt from is the one that acted.
    policy = dataclasses.replace(stage.agent.policy, fire_rate=0.5)
    learn = dataclasses.replace(stage.agent.learner, num_epochs=1, num_minibatches=1)
    firing = dataclasses.replace(stage.agent, policy=policy, learner=learn)
    policy = make_policy(firing, stage.env.spec)
    learner = make_learner(stage.env, policy, firing)
    state = learner.init(jax.random.key(0))
    # At first the rule hands its input on, whatever the mask: parameters that use it.
    state = state._replace(params=jax.tree.map(jnp.array, stage.params))
    for _ in range(2):
        state, metrics = learner.step(state)
        assert abs(float(metrics["approx_kl"])) < 1e-8 and float(metrics["clip_fraction"]) == 0.0
