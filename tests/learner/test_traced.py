"""A step that an earlier process traced is the step itself, to the bit; settings have their own."""

import dataclasses

import jax
import numpy as np
import pytest
from drawn import random_bars

from nca_trader import AgentConfig, EnvConfig, TradingEnv, make_learner, make_mesh, make_policy
from nca_trader.config import LearnerConfig, OptimizerConfig, PolicyConfig, PopulationConfig
from nca_trader.learner import learner as learners
from nca_trader.learner import programs

pytestmark = pytest.mark.usefixtures("quick_compile")

BARS = random_bars(np.random.default_rng(0), 60, 2)
ENV = EnvConfig(features=("bollinger",))
LEARNER = LearnerConfig(
    num_segments=8, segment_length=4, envs_per_segment=2, num_epochs=1, num_minibatches=1
)
AGENT = AgentConfig(
    policy=PolicyConfig(channels=4, hidden=8, steps=1, dilations=(1,), head_hidden=4),
    learner=LEARNER,
)


def altered(ema_decay=0.0, **changes):
    learner = dataclasses.replace(LEARNER, **changes)
    optimizer = OptimizerConfig(ema_decay=ema_decay)
    return dataclasses.replace(AGENT, learner=learner, optimizer=optimizer)


@pytest.fixture
def traced(tmp_path, monkeypatch):
    """Traces of an update so far, as a list that grows; programs are kept in `tmp_path`."""
    found, update = [], learners.update

    def counting(*args):
        found.append(args)
        return update(*args)

    monkeypatch.setattr(learners, "update", counting)
    monkeypatch.setenv("NCA_TRADER_PROGRAMS", str(tmp_path / "traced"))
    return found


def trained(agent=AGENT, config=ENV, devices=1, policy=None):
    """The state after two updates, on the host."""
    env = TradingEnv(BARS, config)
    mesh = make_mesh(data=devices)
    learner = make_learner(env, policy or make_policy(agent, env.spec), agent, mesh)
    state = learner.init(jax.random.key(0))
    for _ in range(2):
        state, metrics = learner.step(state)
    return jax.device_get((state._replace(key=jax.random.key_data(state.key)), metrics))


@pytest.mark.parametrize(
    ("agent", "config", "devices"),
    [
        pytest.param(AGENT, ENV, 2, marks=pytest.mark.heavy),
        pytest.param(altered(0.9, replay_slots=2), ENV, 1, marks=pytest.mark.heavy),
        pytest.param(
            altered(advantages="exact"),
            dataclasses.replace(ENV, reward="pnl"),
            2,
            marks=pytest.mark.heavy,
        ),
        pytest.param(
            dataclasses.replace(AGENT, num_seeds=2, population=PopulationConfig()),
            ENV,
            8,
            marks=pytest.mark.heavy,
        ),
    ],
    ids=("gae", "replay", "exact", "population"),
)
def test_the_next_process_traces_nothing_and_learns_the_same_to_the_bit(
    traced, monkeypatch, agent, config, devices
):
    first, count = trained(agent, config, devices), len(traced)
    again = trained(agent, config, devices)
    assert count > 0 and len(traced) == count
    monkeypatch.delenv("NCA_TRADER_PROGRAMS")
    alone = trained(agent, config, devices)
    assert len(traced) > count
    for found in (first, again):
        jax.tree.map(np.testing.assert_array_equal, found, alone)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """The file of a program, and what it learnt."""
    folder = tmp_path_factory.mktemp("kept")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NCA_TRADER_PROGRAMS", str(folder))
        first = trained()
    (file,) = folder.iterdir()
    return file, first


def test_a_program_is_of_its_settings_but_not_of_the_length_of_a_run(traced, kept, monkeypatch):
    folder = kept[0].parent
    monkeypatch.setenv("NCA_TRADER_PROGRAMS", str(folder))
    # Read and not traced, it learns the same.
    jax.tree.map(np.testing.assert_array_equal, kept[1], trained(altered(steps=10_000)))
    assert not traced and list(folder.iterdir()) == [kept[0]]
    trained(altered(discount=0.5))
    assert traced and len(list(folder.iterdir())) == 2


def test_a_changed_source_is_another_program(traced, tmp_path, kept, monkeypatch):
    monkeypatch.setattr(programs, "PACKAGE", tmp_path)
    source, digest = tmp_path / "rule.py", programs._digest_code.__wrapped__
    source.write_text("GAIN = 1.0\n")
    before = digest()
    source.write_text("GAIN = 2.0\n")
    assert digest() != before
    monkeypatch.setenv("NCA_TRADER_PROGRAMS", str(kept[0].parent))
    monkeypatch.setattr(programs, "_digest_code", digest)
    trained()
    assert traced


def test_a_flipped_bit_is_traced_again(traced, tmp_path, kept):
    content = bytearray(kept[0].read_bytes())
    content[len(content) // 2] ^= 1
    file = tmp_path / "traced" / kept[0].name
    file.parent.mkdir()
    file.write_bytes(content)
    jax.tree.map(np.testing.assert_array_equal, kept[1], trained())
    assert traced and file.read_bytes() != content


def test_a_policy_of_a_user_is_traced_by_each_process(traced, tmp_path):
    policy = make_policy(AGENT, TradingEnv(BARS, ENV).spec)
    trained(policy=policy._replace(fire_rate=0.5))
    assert traced and not (tmp_path / "traced").exists()


@pytest.mark.heavy
def test_a_reward_of_a_user_is_traced_too_and_a_folder_that_takes_nothing_ends_no_run(
    traced, tmp_path, monkeypatch
):
    own = tmp_path / "own.py"
    own.write_text("def reward(config, spec, step):\n    return step.log_return\n")
    trained(config=dataclasses.replace(ENV, reward=f"{own}:reward"))
    assert traced and not (tmp_path / "traced").exists()
    monkeypatch.setenv("NCA_TRADER_PROGRAMS", str(own / "no folder"))
    trained()
