"""What a mesh collects to learn from is what one device collects: bars, actions, advantages.

Learning itself is left out, so that little is compiled; it is in test_split_parameters.py.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from ledger import random_bars

from nca_trader import TradingEnv, make_learner, make_mesh, make_policy
from nca_trader.learner import update
from nca_trader.learner.layout import Layout
from nca_trader.mesh import BATCH
from nca_trader.presets import MeshConfig, PolicyConfig

pytestmark = pytest.mark.usefixtures("quick_compile")

AGENT = dataclasses.replace(
    tiny.AGENT,
    policy=PolicyConfig(kind="mlp", hidden=4, window=2),
    # One account a segment: of several, advantages have the mean 0 on every bar.
    learner=dataclasses.replace(tiny.AGENT.learner, segment_length=4, envs_per_segment=1),
)
DEVICES = 8


def only_collected(lose, config, optimizer, params, opt_state, batch, *others):
    """In the place of `learn`: moves nothing, and tells what would have been learnt from."""
    rollout, advantage, _ = batch
    told = {"index": rollout.span.index, "action": rollout.action, "advantage": advantage}
    whole = functools.partial(jax.lax.all_gather, axis_name=BATCH, tiled=True, to="invarying")
    return params, opt_state, jax.tree.map(whole, told)


def collected(devices, updates=1, deterministic=False):
    """Accounts after so many updates, and what the last of them would have learnt from."""
    agent = dataclasses.replace(
        AGENT, mesh=MeshConfig(devices=devices, deterministic=deterministic)
    )
    env = TradingEnv(random_bars(np.random.default_rng(0), 90, 2, missing=0.05), tiny.ENV)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(update, "learn", only_collected)
        learner = make_learner(env, make_policy(agent, env.spec), agent, make_mesh(devices))
        state = learner.init(jax.random.key(0))
        for _ in range(updates):
            state, metrics = learner.step(state)
    return jax.device_get((state.segments.episode.account, metrics))


collected_once = functools.cache(collected)


def test_a_mesh_collects_what_one_device_does():
    _, want = collected_once(1)
    _, got = collected_once(DEVICES)
    np.testing.assert_array_equal(got["index"], want["index"])
    np.testing.assert_array_equal(got["action"], want["action"])
    np.testing.assert_allclose(got["advantage"], want["advantage"], rtol=1e-5, atol=1e-6)
    # Of the whole batch the mean is 0 and the deviation 1, and no part's are.
    parts = got["advantage"].reshape(DEVICES, -1)
    np.testing.assert_allclose((parts.mean(), parts.std()), (0.0, 1.0), atol=1e-5)
    assert np.abs(parts.mean(1)).max() > 0.1 and np.abs(parts.std(1) - 1.0).max() > 0.1


def test_keys_that_every_part_shares_are_noticed(monkeypatch):
    _, want = collected_once(1)
    index = jax.lax.axis_index
    monkeypatch.setattr(jax.lax, "axis_index", lambda name: 0 * index(name))
    _, got = collected(DEVICES)
    assert len(set(got["index"])) == 1 < len(set(want["index"]))
    assert (got["action"] != want["action"]).mean() > 0.2


@pytest.mark.parametrize("name", ["mean", "variance"])
def test_a_statistic_of_one_part_in_the_place_of_all_is_noticed(monkeypatch, name):
    _, want = collected_once(1)
    of_all = Layout.of_all

    def of_own(self, figures):
        every, own = of_all(self, figures), figures["advantage"]._asdict()
        return every | {"advantage": every["advantage"]._replace(**{name: own[name]})}

    monkeypatch.setattr(Layout, "of_all", of_own)
    _, got = collected(DEVICES)
    np.testing.assert_array_equal(got["action"], want["action"])
    assert np.abs(got["advantage"] - want["advantage"]).max() > 0.1


def test_a_deterministic_mesh_collects_the_same_bits_on_1_2_4_and_8_devices():
    want = collected(1, 3, True)
    assert jnp.abs(want[0].weight).max() > 0.1  # accounts that hold something
    for devices in (2, 4, 8):
        jax.tree.map(np.testing.assert_array_equal, collected(devices, 3, True), want)
