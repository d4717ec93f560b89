"""Training into a folder: killed and resumed equals straight; and it learns what can be learnt.

The market: the sign of each bar's return is that of the bar before with probability .9, and every
return is 1 %. Who goes with the last bar earns .8 % a bar, before costs, of which there are none.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import tiny
from drawn import bars_of, random_bars
from untrained import leaves

from nca_trader import (
    Run,
    TradingEnv,
    backtest,
    make_policy,
    train,
    write_bars,
)
from nca_trader.cli import main
from nca_trader.config import (
    CheckpointConfig,
    CurriculumConfig,
    EnvConfig,
    LearnerConfig,
    OptimizerConfig,
    PopulationConfig,
)
from nca_trader.config.toml import to_toml
from nca_trader.errors import ConfigError, RunError
from nca_trader.learner import train as training
from nca_trader.learner.learner import make_learner
from nca_trader.learner.train import Intervals, planned_steps, steps_done
from nca_trader.learner.update import LearnerState
from nca_trader.runs import trials
from nca_trader.runs.checkpoint import flatten, unflatten

BEST = 0.008  # log-return a bar of the best policy
UPDATES, EVERY, PER_UPDATE = 100, 20, 16 * 8 * 2

ENV = EnvConfig(features=("return_1",), random_start=False)
AGENT = dataclasses.replace(
    tiny.AGENT,
    policy=dataclasses.replace(tiny.AGENT.policy, steps=1, dilations=(1,)),
    learner=LearnerConfig(
        steps=UPDATES * PER_UPDATE,
        num_segments=16,
        segment_length=8,
        envs_per_segment=2,
        num_epochs=2,
        num_minibatches=2,
        discount=0.9,
    ),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_updates=2),
    checkpoint=CheckpointConfig(every=EVERY, every_seconds=0.0),
)


def persistent_bars(seed, length=800):
    rng = np.random.default_rng(seed)
    sign = np.cumprod(np.where(rng.random(length) < 0.9, 1.0, -1.0))
    close = 100.0 * np.exp(np.cumsum(0.01 * sign))[:, None]
    open_ = np.vstack([[[100.0]], close[:-1]])
    return bars_of(close, open_, "2000-01-01", symbols=("WALK",), source="made here")


class Place:
    """A folder with the files of the experiment, and the command that trains in it."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "env.toml").write_text(to_toml(ENV))
        (folder / "agent.toml").write_text(to_toml(AGENT))
        self.env, self.agent = TradingEnv(persistent_bars(0), ENV), AGENT
        write_bars(persistent_bars(0), folder / "bars.parquet")

    def command(self, run, *more):
        options = {"env": "env.toml", "agent": "agent.toml", "data": "bars.parquet", "run": run}
        named = [[f"--{name}", str(self.folder / file)] for name, file in options.items()]
        return ["train", *sum(named, []), "--symbol", "WALK", "--seed", "3", *more]  # noqa: RUF017


def rows(run):
    """The metrics, but for how long they took."""
    return [{k: v for k, v in row.items() if k != "steps_per_s"} for row in run.metrics()]


def assert_same(run, other):
    (step, got), (other_step, expected) = leaves(run), leaves(other)
    assert step == other_step and got.keys() == expected.keys() and len(got) > 30
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)
    assert rows(run) == rows(other)


@pytest.fixture(scope="module")
def place(tmp_path_factory, quick_compile):
    """The experiment; runs of one agent in this process share a program, which is compiled once."""
    build, made = training.build_learner, {}

    def once(env, policy, agent):
        if agent not in made:
            made[agent] = build(env, policy, agent)
        return made[agent]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "build_learner", once)
        yield Place(tmp_path_factory.mktemp("experiment"))


@pytest.fixture(scope="module")
def straight(place):
    assert main(place.command("straight")) == 0
    return Run(place.folder / "straight")


def test_it_learns_to_go_with_a_market_that_persists(straight):
    reward = [row["reward"] for row in straight.metrics()]
    assert np.mean(reward[:5]) < 0.3 * BEST
    assert np.mean(reward[-20:]) > 0.8 * BEST
    # And acts on it, on bars that it never saw.
    bars = persistent_bars(1)
    result = backtest(bars, straight)
    decided = result.targets.to_numpy()[:-1, 0]
    sign = np.sign(bars.close - bars.open)[:-1, 0]
    made = ~np.isnan(decided)
    assert made.sum() > 700 and (decided == sign)[made].mean() > 0.95
    assert np.diff(result.log_equity)[made].mean() > 0.6 * BEST


def test_metrics_have_a_row_an_update(straight):
    found = straight.metrics()
    assert [row["update"] for row in found] == list(range(1, UPDATES + 1))
    assert [row["steps"] for row in found] == [PER_UPDATE * i for i in range(1, UPDATES + 1)]
    assert all(row["steps_per_s"] > 0 and "seeds" not in row for row in found)
    assert all(row["retraces"] == 0 for row in found)
    assert steps_done(straight) == planned_steps(straight.agent_config) == UPDATES * PER_UPDATE


@pytest.mark.heavy
def test_killed_and_resumed_is_the_run_that_was_never_killed(place, straight, root):
    command = [sys.executable, "-m", "nca_trader", *place.command("killed")]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    same = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    process = subprocess.Popen(command, cwd=root, env=same, **quiet)
    path = place.folder / "killed" / "metrics.jsonl"
    while process.poll() is None:
        # Before the second checkpoint is begun, the first one is on disk.
        if path.exists() and path.read_bytes().count(b"\n") > 2 * EVERY + 5:
            process.kill()
            break
        time.sleep(0.002)
    assert process.wait() == -signal.SIGKILL
    killed = Run(place.folder / "killed")
    there = path.read_bytes().count(b"\n")
    step, _ = leaves(killed)
    assert step % EVERY == 0 and step < there < UPDATES  # rows are there that must be cut
    assert main(place.command("killed")) == 0
    assert_same(killed, straight)


def test_stopped_on_request_it_is_saved_and_goes_on(place, straight):
    seen = []
    run = train(
        place.env,
        place.agent,
        place.folder / "stopped",
        seed=3,
        report=seen.append,
        stop=lambda: len(seen) == 7,
    )
    assert len(seen) == 7 and steps_done(run) == 7 * PER_UPDATE
    assert leaves(run)[0] == 7 and run.metrics() == seen
    # Rows of updates that no checkpoint has are cut, a torn last line with them.
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write(json.dumps(seen[0]) + "\n" + '{"update": 9, "st')
    again = []
    train(place.env, place.agent, run.path, seed=3, report=again.append)
    assert [row["update"] for row in again] == list(range(8, UPDATES + 1))
    assert_same(run, straight)


@pytest.mark.heavy
def test_a_damaged_checkpoint_costs_its_updates_and_no_more(place, straight):
    seen = []
    folder = place.folder / "damaged"
    stop = lambda: len(seen) in (3, 6)  # noqa: E731
    train(place.env, place.agent, folder, seed=3, report=seen.append, stop=stop)
    train(place.env, place.agent, folder, seed=3, report=seen.append, stop=stop)
    assert [row["update"] for row in seen] == [1, 2, 3, 4, 5, 6]
    for file in (folder / "checkpoints" / "6").rglob("*"):
        if file.is_file() and file.stat().st_size:
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    train(place.env, place.agent, folder, seed=3, report=seen.append)
    assert seen[6]["update"] == 4
    assert_same(Run(folder), straight)


def test_a_run_that_is_done_is_left_alone(place, straight):
    def contents():
        files = (file for file in straight.path.rglob("*") if file.is_file())
        return {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in files}

    before, seen = contents(), []
    train(place.env, place.agent, straight.path, seed=3, report=seen.append)
    assert seen == [] and contents() == before


@pytest.mark.heavy
def test_a_run_may_be_asked_to_go_further(place):
    folder = place.folder / "further"
    train(place.env, place.agent, folder, seed=3, steps=2 * PER_UPDATE)
    train(place.env, place.agent, folder, seed=3, steps=3 * PER_UPDATE - 1)
    assert steps_done(Run(folder)) == 3 * PER_UPDATE  # rounded up to whole updates
    straight_on = place.folder / "straight_on"
    train(place.env, place.agent, straight_on, seed=3, steps=3 * PER_UPDATE)
    assert_same(Run(folder), Run(straight_on))


def test_a_folder_of_something_else_is_refused_and_left_alone(place, straight, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="something else; choose another folder"):
        train(place.env, place.agent, tmp_path, seed=3)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(RunError, match="seed was 3 there and is 4 now"):
        train(place.env, place.agent, straight.path, seed=4)


@pytest.mark.parametrize(
    ("every", "seconds", "due"),
    [(4, 0.0, [4, 8, 12]), (0, 3.0, [3, 6, 9, 12]), (5, 3.0, [3, 5, 8, 10]), (0, 0.0, [])],
)
def test_checkpoints_are_due_after_updates_or_seconds_whichever_comes_first(every, seconds, due):
    now = 0.0  # an update takes a second
    intervals = Intervals(CheckpointConfig(every=every, every_seconds=seconds), lambda: now)
    found = []
    for done in range(1, 13):
        now += 1.0
        if intervals.due(done):
            found.append(done)
            intervals.saved()
    assert found == due


@pytest.mark.slow
def test_replay_average_curriculum_and_population_go_on_as_if_never_stopped(place):
    agent = dataclasses.replace(
        place.agent,
        num_seeds=2,
        population=PopulationConfig(learning_rate=(1e-3, 1e-1)),
        learner=dataclasses.replace(place.agent.learner, replay_slots=2, steps=12 * PER_UPDATE),
        optimizer=dataclasses.replace(place.agent.optimizer, ema_decay=0.9, schedule="cosine"),
        curriculum=CurriculumConfig(costs_from=0.0, volatility_from=2.0),
    )
    before = trials.count(place.folder, "train")
    runs = [train(place.env, agent, place.folder / "whole_replay")]
    assert trials.count(place.folder, "train") == before + 2  # every member is a trial
    seen = []
    halfway = {"report": seen.append, "stop": lambda: len(seen) == 3}
    train(place.env, agent, place.folder / "half_replay", **halfway)
    runs.append(train(place.env, agent, place.folder / "half_replay"))
    assert len(seen) == 3
    assert_same(*runs)
    rates = {tuple(row["seeds"]["learning_rate"]) for row in runs[0].metrics()}
    assert len(rates) == 1 and len({*rates.pop()}) == 2  # drawn once, each its own


@pytest.mark.slow
def test_a_curriculum_that_has_ended_stays_so_when_a_run_goes_on_for_longer(tmp_path):
    """Its course is that of the steps that the run began with: 4 updates, of which it takes 2."""
    agent = dataclasses.replace(
        tiny.AGENT, curriculum=CurriculumConfig(costs_from=0.0, volatility_from=2.0)
    )
    bars = random_bars(np.random.default_rng(0), tiny.TRAINING_ROWS, 2)
    env = TradingEnv(bars, tiny.ENV)
    for updates in (4, 5, 12):  # a total
        run = train(env, agent, tmp_path / "run", steps=updates * tiny.STEPS_PER_UPDATE)
    costs, moves = ([row[f"{n}_scale"] for row in run.metrics()] for n in ("cost", "volatility"))
    assert costs == [0.0, 0.5] + 10 * [1.0]
    assert moves == [2.0, 1.5] + 10 * [1.0]


@pytest.mark.parametrize("steps", [0, -5])
def test_no_steps_at_all_are_refused_and_nothing_is_written(place, steps):
    with pytest.raises(ConfigError, match="steps"):
        train(place.env, place.agent, place.folder / "none", steps=steps)
    assert not (place.folder / "none").exists()


@pytest.mark.heavy
def test_a_checkpoint_holds_all_that_training_carries(place):
    """With the config, an update is a function of this state and of the bars alone.

    The data cursor and the curriculum are functions of `update`; see `Markets` and `curriculum`.
    """
    agent = dataclasses.replace(
        place.agent,
        num_seeds=2,
        learner=dataclasses.replace(place.agent.learner, replay_slots=2),
        optimizer=dataclasses.replace(place.agent.optimizer, ema_decay=0.9),
        population=PopulationConfig(learning_rate=(1e-3, 1e-2)),
        curriculum=CurriculumConfig(costs_from=0.0),
    )
    learner = make_learner(place.env, make_policy(agent, place.env.spec), agent)

    saved = flatten(learner.init(jax.random.key(1)))
    fields = {name.split(".")[1].split("[")[0] for name in saved}
    assert fields == set(LearnerState._fields)
    assert {"params", "opt_state", "key", "update", "segments", "replay", "hyper"} == fields
    # Into a state of another seed, and back: nothing of the other is left.
    other = learner.init(jax.random.key(2))
    assert any((flatten(other)[name] != value).any() for name, value in saved.items())
    back = flatten(unflatten(other, saved))
    assert all(back[name].tobytes() == value.tobytes() for name, value in saved.items())
