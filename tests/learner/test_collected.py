"""What a mesh collects is what one device collects: keys, statistics, and on request every bit.

Each program is as much of an update as the test is about; whole ones are in test_meshes.py.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from drawn import random_bars
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from nca_trader import TradingEnv, make_learner, make_mesh, make_policy
from nca_trader.config import LearnerConfig, MeshConfig, PolicyConfig
from nca_trader.learner import update
from nca_trader.learner.layout import EVERYWHERE, Layout
from nca_trader.learner.ppo import AgentSetup, moments
from nca_trader.learner.rollout import Algorithm
from nca_trader.learner.sampled import normalize
from nca_trader.parallel.mesh import BATCH

pytestmark = pytest.mark.usefixtures("quick_compile")

AGENT = dataclasses.replace(
    tiny.AGENT,
    policy=PolicyConfig(kind="mlp", hidden=4, window=2),
    learner=dataclasses.replace(tiny.AGENT.learner, segment_length=4, envs_per_segment=2),
)


@functools.cache
def environment():
    return TradingEnv(random_bars(np.random.default_rng(0), 90, 2, missing=0.05), tiny.ENV)


def everything(lose, config, optimizer, params, opt_state, batch, *others):
    """In the place of `learn`: moves nothing, and tells what would have been learnt from."""
    whole = functools.partial(jax.lax.all_gather, axis_name=BATCH, tiled=True, to="invarying")
    told = {str(n): leaf for n, leaf in enumerate(jax.tree.leaves(batch))}
    return params, opt_state, jax.tree.map(whole, told)


def collected(devices, updates=1, deterministic=False):
    """Accounts after so many updates of parameters 0, and the last one's metrics and batch."""
    config = MeshConfig(devices=devices, deterministic=deterministic)
    agent, env = dataclasses.replace(AGENT, mesh=config), environment()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(update, "learn", everything)
        mesh = make_mesh(devices)
        learner = make_learner(env, make_policy(agent, env.spec), agent, mesh)
        shapes = jax.eval_shape(learner.init, jax.random.key(0))._replace(key=None)
        state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
        # Segments that have no bars left are drawn.
        state = jax.device_put(state._replace(key=jax.random.key(0)), NamedSharding(mesh, P()))
        parts = jax.device_put(state.segments, NamedSharding(mesh, P(BATCH)))
        state = state._replace(segments=parts)
        for _ in range(updates):
            state, metrics = learner.step(state)
    return jax.device_get((state.segments.episode.account, metrics))


@functools.cache
def collected_by_one():
    return collected(1, 3, True)


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.slow
def test_a_deterministic_mesh_collects_the_same_bits_as_one_device(devices):
    want = collected_by_one()
    assert (want[0].weight != np.round(want[0].weight)).mean() > 0.2  # what is held has moved
    jax.tree.map(np.testing.assert_array_equal, collected(devices, 3, True), want)


def drawn(devices, monkeypatch):
    """`[S]` where each segment starts, and a number that its key draws."""

    def collect(setup, params, market, segments, draw):
        batch = segments.index, jax.vmap(jax.random.bits)(draw.keys)
        return segments, batch, {"none": jnp.float32(0.0) * segments.index.sum()}

    algorithm = Algorithm(
        lambda env: None, collect, lambda setup, batch, found: (batch, {}), lambda *args: None
    )
    monkeypatch.setitem(update.ALGORITHMS.builtin, "gae", algorithm)
    _, metrics = collected(devices)
    return metrics["0"], metrics["1"]


@pytest.mark.heavy
def test_a_key_that_all_devices_share_is_noticed(monkeypatch):
    index = jax.lax.axis_index
    monkeypatch.setattr(jax.lax, "axis_index", lambda name: 0 * index(name))
    starts, numbers = drawn(8, monkeypatch)
    assert len(np.unique(starts, axis=0)) == len(np.unique(numbers, axis=0)) == 1
    # Where the segments of one device start, and so, bit for bit, those of eight.
    assert len(set(collected_by_one()[1]["0"])) > 4


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


@pytest.mark.parametrize("name", ["mean", "variance"])
def test_a_statistic_of_a_devices_own_part_is_noticed(monkeypatch, name):
    of_all = Layout.of_all

    def of_own(self, figures):
        every, own = of_all(self, figures)["advantage"], figures["advantage"]
        return {"advantage": every._replace(**{name: getattr(own, name)})}

    monkeypatch.setattr(Layout, "of_all", of_own)
    assert np.abs(normalised(8) - normalised(1)).max() > 0.1
