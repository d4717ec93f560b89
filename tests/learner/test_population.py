"""Several seeds in one program are the runs that each alone would be."""

import dataclasses

import jax
import numpy as np
import pytest

from nca_trader import make_learner, make_mesh


@pytest.fixture(scope="module")
def members(stage):
    """State and metrics of three updates of two agents, over two devices."""
    agent = dataclasses.replace(stage.agent, num_seeds=2)
    learner = make_learner(stage.env, stage.policy, agent, make_mesh(2))
    state = learner.init(jax.random.key(5))
    for _ in range(3):
        state, metrics = learner.step(state)
    return state, jax.device_get(metrics)


@pytest.mark.parametrize("member", [0, 1])
def test_a_member_is_the_run_of_its_own_key(stage, members, member):
    learner = stage.learner(2)
    state = learner.init(jax.random.fold_in(jax.random.key(5), member))
    for _ in range(3):
        state, metrics = learner.step(state)
    for name in ("params", "segments"):
        got = jax.tree.map(lambda leaf: np.asarray(leaf)[member], getattr(members[0], name))
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
            got,
            jax.device_get(getattr(state, name)),
        )
    assert {k: float(v[member]) for k, v in members[1].items()} == pytest.approx(
        {k: float(v) for k, v in metrics.items()}, rel=1e-3, abs=1e-5
    )


def test_members_differ_and_their_segments_are_split_over_the_devices(members):
    state, metrics = members
    assert metrics["loss"].shape == (2,) and metrics["loss"][0] != metrics["loss"][1]
    assert not np.allclose(*np.asarray(state.params["nca"]["taps"]))
    shards = state.segments.index.addressable_shards
    assert [shard.data.shape for shard in shards] == [(2, 8), (2, 8)]
    assert len({shard.device for shard in shards}) == 2
