"""Several agents in one program are the runs that each alone would be, until they meet."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny as tiny_experiment

from nca_trader import AgentConfig, ConfigError, make_learner, make_mesh
from nca_trader.config import PopulationConfig
from nca_trader.learner import population
from nca_trader.learner.population import Hyper
from nca_trader.learner.train import train
from nca_trader.learner.update import LearnerState
from nca_trader.runs import trials
from nca_trader.runs.checkpoint import Checkpoints

pytestmark = pytest.mark.usefixtures("quick_compile")

RANGES = PopulationConfig(
    learning_rate=(1e-3, 1e-1),
    entropy_coef=(1e-3, 1e-1),
    clip_epsilon=(0.1, 0.4),
    gae_lambda=(0.5, 0.99),
    discount=(0.5, 0.99),
    every=2,
    share=0.5,
)


@pytest.fixture(scope="module")
def members(stage):
    """State and metrics of three updates of two agents, over eight devices."""
    agent = dataclasses.replace(stage.agent, num_seeds=2)
    learner = make_learner(stage.env, stage.policy, agent, make_mesh(8))
    state = learner.init(jax.random.key(5))
    for _ in range(3):
        state, metrics = learner.step(state)
    return state, jax.device_get(metrics)


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


def test_members_differ_and_their_segments_are_split_over_the_devices(members):
    state, metrics = members
    assert metrics["loss"].shape == (2,) and metrics["loss"][0] != metrics["loss"][1]
    assert not np.allclose(*np.asarray(state.params["nca"]["taps"]))
    shards = state.segments.index.addressable_shards
    assert [shard.data.shape for shard in shards] == [(2, 2)] * 8
    assert len({shard.device for shard in shards}) == 8


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


@pytest.fixture(scope="module")
def varied(stage):
    """Two agents with hyper-parameters of their own, after two updates, and their metrics."""
    agent = dataclasses.replace(stage.agent, num_seeds=2, population=RANGES)
    learner = make_learner(stage.env, stage.policy, agent, make_mesh(1))
    state = learner.init(jax.random.key(5))
    for _ in range(2):
        state, metrics = learner.step(state)
    return state, jax.device_get(metrics)


@pytest.mark.slow
def test_a_member_is_the_agent_trained_alone_with_its_hyper_parameters(stage, varied):
    state, metrics = varied
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


def four(fitness, hyper=None):
    """A state of four agents that says in every leaf whose it is."""
    each = jnp.arange(4.0)
    hyper = Hyper(*(0.01 * jnp.ones(4) + 0.0 * each for _ in range(5))) if hyper is None else hyper
    state = LearnerState({"w": each[:, None] + jnp.zeros((4, 3))}, {"m": -each}, each, each, each)
    return state._replace(hyper=hyper), jnp.asarray(fitness)


def test_the_worst_go_on_as_bit_for_bit_copies_of_the_best():
    state, fitness = four([0.3, np.nan, 0.9, 0.1])
    parents = set()
    for seed in range(20):
        after, parent = population.exploit(RANGES, state, fitness, jax.random.key(seed))
        parent = np.asarray(parent)
        assert parent[0] == 0 and parent[2] == 2  # the best stay who they are
        assert parent[1] in (0, 2) and parent[3] in (0, 2)  # the worst, NaN first, do not
        parents.add(tuple(parent))
        np.testing.assert_array_equal(after.params["w"], np.asarray(state.params["w"])[parent])
        np.testing.assert_array_equal(
            after.opt_state["m"], np.asarray(state.opt_state["m"])[parent]
        )
        for name in ("key", "update", "segments"):  # each agent's own
            np.testing.assert_array_equal(getattr(after, name), getattr(state, name))
        again, _ = population.exploit(RANGES, state, fitness, jax.random.key(seed))
        jax.tree.map(np.testing.assert_array_equal, again, after)
    assert len(parents) == 4
    quarter = dataclasses.replace(RANGES, share=0.25)
    _, parent = population.exploit(quarter, state, fitness, jax.random.key(0))
    assert parent.tolist() == [0, 2, 2, 3]


def test_copies_explore_within_their_ranges_and_the_others_stay():
    config = dataclasses.replace(RANGES, gae_lambda=None)
    start = Hyper(*(jnp.full(4, x, jnp.float32) for x in (0.01, 0.1, 0.3, 0.9, 0.9)))
    state, fitness = four([1.0, 2.0, 3.0, 4.0], start)
    seen = {name: set() for name in Hyper._fields}
    for seed in range(20):
        after, _ = population.exploit(config, state, fitness, jax.random.key(seed))
        for name, value in after.hyper._asdict().items():
            np.testing.assert_array_equal(value[2:], getattr(start, name)[2:])
            seen[name] |= {round(float(v), 5) for v in value[:2]}
    assert seen["learning_rate"] == {0.012, round(0.01 / 1.2, 5)}
    assert seen["entropy_coef"] == {0.1, round(0.1 / 1.2, 5)}  # at the end of its range
    assert seen["clip_epsilon"] == {0.36, 0.25}
    assert seen["gae_lambda"] == {0.9}  # has no range
    assert seen["discount"] == {0.88, round(1 - 0.1 / 1.2, 5)}


def test_it_says_which_hyper_parameter_goes_with_fitness():
    rate = jnp.asarray([1e-4, 1e-3, 1e-2, 1e-1])
    same = jnp.full(4, 0.2)
    found = population.correlations(
        Hyper(rate, 1.0 / rate, same, same, 1.0 - rate), jnp.asarray([1.0, 2.0, 3.0, 4.0])
    )
    rounded = {name: round(float(value), 3) for name, value in found.items()}
    assert rounded == {
        "learning_rate": 1.0,
        "entropy_coef": -1.0,
        "clip_epsilon": 0.0,
        "gae_lambda": 0.0,
        "discount": 1.0,  # the further from 1, the fitter
    }


def test_a_population_is_refused_where_it_makes_no_sense():
    with pytest.raises(ConfigError, match="population is of several agents; give num_seeds"):
        AgentConfig(population=RANGES)
    for ends in ((0.2, 0.1), (0.1,), (0.1, 1.0), (0.0, 0.5)):
        with pytest.raises(ConfigError, match="clip_epsilon"):
            PopulationConfig(clip_epsilon=ends)


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    """`(name, steps, fitness) -> run` of a population of three that meets at every other update."""
    agent = dataclasses.replace(
        tiny_experiment.AGENT,
        num_seeds=3,
        population=PopulationConfig(learning_rate=(1e-3, 1e-1), every=2, share=0.4),
    )
    folder = tmp_path_factory.mktemp("population")

    def start(name, updates, fitness=None):
        steps = updates * tiny_experiment.STEPS_PER_UPDATE
        return train(tiny.env, agent, folder / name, steps=steps, fitness=fitness)

    return start


def leaves(run):
    with Checkpoints(run.path / "checkpoints") as checkpoints:
        return checkpoints.newest()[1]


@pytest.mark.slow
def test_a_population_trains_on_its_reward_and_resumes_to_the_same_end(trained):
    run = trained("straight", 5)
    rows = run.metrics()
    assert [row["update"] for row in rows if "parent" in row["seeds"]] == [2, 4]
    for first, second in (rows[0:2], rows[2:4]):
        score = np.mean([first["seeds"]["reward"], second["seeds"]["reward"]], axis=0)
        np.testing.assert_allclose(second["seeds"]["fitness"], score, rtol=1e-5, atol=1e-9)
        worst, best = int(score.argmin()), int(score.argmax())
        expected = [best if i == worst else i for i in range(3)]
        assert second["seeds"]["parent"] == expected
        assert -1.0 <= second["fitness_correlation"]["learning_rate"] <= 1.0
    rate, after = (np.array(row["seeds"]["learning_rate"]) for row in rows[1:3])
    ratio = after / rate[rows[1]["seeds"]["parent"]]
    assert sorted({round(float(r), 4) for r in ratio} - {1.0}) in ([1.2], [0.8333])
    assert all(row["steps_per_s"] > 0 for row in rows)
    assert rows[-1]["steps"] == 5 * 3 * tiny_experiment.STEPS_PER_UPDATE
    assert trials.count(run.root, "train") == 3  # every member is a trial
    trained("resumed", 3)  # between two exploits
    again = leaves(trained("resumed", 5))
    for name, leaf in leaves(run).items():
        np.testing.assert_array_equal(again[name], leaf, err_msg=name)


@pytest.mark.slow
def test_the_fitness_of_the_caller_decides(trained):
    run = trained("given", 2, fitness=lambda state: [0.0, 1.0, 2.0])
    assert run.metrics()[1]["seeds"]["parent"] == [2, 1, 2]
    found = leaves(run)
    copied = [name for name in found if name.startswith((".params", ".opt_state"))]
    assert len(copied) > 20
    for name in copied:
        np.testing.assert_array_equal(found[name][0], found[name][2])
        assert np.ndim(found[name][0]) == 0 or (found[name][1] != found[name][2]).any()
    with pytest.raises(ConfigError, match=r"fitness is of shape \[2\], but 3 agents train"):
        trained("wrong", 2, fitness=lambda state: [0.0, 1.0])
