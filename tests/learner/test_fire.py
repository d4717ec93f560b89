"""Fire masks: an update learns through the very mask that its rollout was collected through."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nca_trader import make_learner, make_policy
from nca_trader.agents.nca import Fire
from nca_trader.learner.rollout import Draw, Segments, encode_span, span_of


def test_the_mask_of_a_segment_is_that_of_its_bars_and_its_own_key(stage):
    settings = dataclasses.replace(stage.agent.policy, fire_rate=0.5)
    policy = make_policy(dataclasses.replace(stage.agent, policy=settings), stage.env.spec)
    market, params = stage.env.market, stage.params
    rows, keys = np.array([40, 90, 90]), jax.random.split(jax.random.key(0), 3)
    segments = Segments(jnp.asarray(rows), None, None, None)
    span = span_of(policy, segments, Draw(keys, None))
    cells = jax.jit(lambda: encode_span(policy, params, market, span, 8))()
    # Over all bars at once, where a bar's row is its place.
    x, present = (np.stack([y] * 3) for y in (stage.env.features, stage.env.bars.present))
    fire = Fire(span.fire, jnp.zeros(3, jnp.int32))
    whole = jax.jit(policy.encode)(params, x, present, fire)
    for s, row in enumerate(rows):
        np.testing.assert_allclose(cells[s], whole[s, row : row + 8], rtol=1e-5, atol=1e-6)
    assert abs(cells[1] - cells[2]).max() > 0.01


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
