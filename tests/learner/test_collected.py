"""Advantages are normalised by the statistics of all devices; whole updates: test_meshes.py."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from nca_trader import make_mesh
from nca_trader.config import LearnerConfig
from nca_trader.learner.layout import EVERYWHERE
from nca_trader.learner.ppo import AgentSetup, moments
from nca_trader.learner.sampled import normalize
from nca_trader.parallel.mesh import BATCH

pytestmark = pytest.mark.usefixtures("quick_compile")


ADVANTAGES = np.random.default_rng(0).normal(np.arange(8.0)[:, None, None], 2.0, (8, 4, 1))


def normalised(devices):
    """Advantages `[8, 4, 1]` as they are learnt from."""

    def one(advantage):
        figures = EVERYWHERE.of_all(
            jax.tree.map(lambda x: x[None], {"advantage": moments(advantage)})
        )
        setup = AgentSetup(None, LearnerConfig(), None)
        return normalize(setup, (None, advantage, None), figures)[0][1]

    mapped = jax.shard_map(one, mesh=make_mesh(devices), in_specs=P(BATCH), out_specs=P(BATCH))
    return np.asarray(jax.jit(mapped)(ADVANTAGES.astype("f4")))


def test_advantages_are_normalised_by_the_whole_batch():
    want = (ADVANTAGES - ADVANTAGES.mean()) / ADVANTAGES.std()
    for devices in (1, 8):
        np.testing.assert_allclose(normalised(devices), want, rtol=1e-5, atol=1e-5)
