"""Several agents in one program are the runs that each alone would be."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from nca_trader import AgentConfig, ConfigError, make_learner, make_mesh
from nca_trader.config import PopulationConfig
from nca_trader.learner import learner as population

pytestmark = pytest.mark.usefixtures("quick_compile")

RANGES = PopulationConfig(
    learning_rate=(1e-3, 1e-1),
    entropy_coef=(1e-3, 1e-1),
    clip_epsilon=(0.1, 0.4),
    gae_lambda=(0.5, 0.99),
    discount=(0.5, 0.99),
)


def test_agents_draw_their_hyper_parameters_evenly_in_the_log_of_their_range():
    config = AgentConfig(num_seeds=2, population=dataclasses.replace(RANGES, clip_epsilon=None))
    keys = jax.random.split(jax.random.key(0), 2000)
    drawn = jax.jit(jax.vmap(lambda key: population.draw_hyper(config, key)))(keys)
    rate = np.log(np.asarray(drawn.learning_rate))
    assert math.log(1e-3) <= rate.min() and rate.max() <= math.log(1e-1)
    assert rate.mean() == pytest.approx(math.log(1e-2), abs=0.1)
    far = np.log(1.0 - np.asarray(drawn.discount))
    assert far.mean() == pytest.approx(0.5 * (math.log(0.5) + math.log(0.01)), abs=0.1)
    assert far.min() >= math.log(0.01) - 1e-4 and far.max() <= math.log(0.5) + 1e-4
    np.testing.assert_array_equal(drawn.clip_epsilon, np.float32(0.2))  # the agent's own
    assert abs(np.corrcoef(rate, far)[0, 1]) < 0.1
    assert population.draw_hyper(AgentConfig(), keys[0]) is None


@pytest.mark.slow
def test_a_member_is_the_agent_trained_alone_with_its_hyper_parameters(stage):
    agent = dataclasses.replace(stage.agent, num_seeds=2, population=RANGES)
    learner = make_learner(stage.env, stage.policy, agent, make_mesh(1))
    state = learner.init(jax.random.key(5))
    for _ in range(2):
        state, metrics = learner.step(state)
    metrics = jax.device_get(metrics)
    own = {name: float(value[1]) for name, value in state.hyper._asdict().items()}
    rate = own.pop("learning_rate")
    assert 1e-3 <= rate <= 1e-1 and abs(rate - 1e-2) > 1e-4
    agent = dataclasses.replace(
        stage.agent,
        optimizer=dataclasses.replace(stage.agent.optimizer, learning_rate=rate),
        learner=dataclasses.replace(stage.agent.learner, **own),
    )
    learner = make_learner(stage.env, stage.policy, agent, make_mesh(1))
    alone = learner.init(jax.random.fold_in(jax.random.key(5), 1))
    for _ in range(2):
        alone, expected = learner.step(alone)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a)[1], b, rtol=1e-4, atol=1e-5),
        state.params,
        jax.device_get(alone.params),
    )
    got = {name: float(metrics[name][1]) for name in expected}
    assert got == pytest.approx({k: float(v) for k, v in expected.items()}, rel=1e-3, abs=1e-5)
    assert metrics["learning_rate"][1] == np.float32(rate)


def test_a_population_is_refused_where_it_makes_no_sense():
    with pytest.raises(ConfigError, match=r"population\.\w+=.* without num_seeds of 2 or more"):
        AgentConfig(population=RANGES)
    for ends in ((0.2, 0.1), (0.1,), (0.1, 1.0), (0.0, 0.5)):
        with pytest.raises(ConfigError, match="clip_epsilon"):
            PopulationConfig(clip_epsilon=ends)


@pytest.fixture(scope="module")
def members(stage):
    """State and metrics of three updates of two agents, split over eight devices."""
    agent = dataclasses.replace(stage.agent, num_seeds=2)
    learner = make_learner(stage.env, stage.policy, agent, make_mesh(8))
    state = learner.init(jax.random.key(5))
    for _ in range(3):
        state, metrics = learner.step(state)
    shards = state.segments.index.addressable_shards
    assert [shard.data.shape for shard in shards] == [(2, 2)] * 8
    assert metrics["loss"][0] != metrics["loss"][1]
    return state, jax.device_get(metrics)


@pytest.mark.heavy
@pytest.mark.parametrize("member", [0, 1])
def test_a_member_is_the_run_of_its_own_key(stage, members, member):
    learner = stage.learner(8)
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
