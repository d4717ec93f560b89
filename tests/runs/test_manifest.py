"""A run folder says what was done, and goes on with nothing else."""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import pathlib

import jax
import numpy as np
import pytest
from drawn import random_bars
from tiny import AGENT, ENV
from untrained import State

from nca_trader import machine
from nca_trader.config import CheckpointConfig, EnvConfig, MeshConfig
from nca_trader.config.records import seal_record
from nca_trader.envs.trading import TradingEnv
from nca_trader.errors import ConfigError, RunError, StateError
from nca_trader.evaluate.backtest import backtest
from nca_trader.learner.train import steps_done, train
from nca_trader.machine import write_atomically
from nca_trader.runs import trials
from nca_trader.runs.checkpoint import Checkpoints, flatten
from nca_trader.runs.exported import Coding, compact, read_run, write_exported
from nca_trader.runs.listing import compare_runs, runs_in
from nca_trader.runs.manifest import Run, Selection
from nca_trader.runs.opening import open_run
from nca_trader.runs.trials import data_record
from nca_trader.types import EnvSpec
from nca_trader.watch.metrics import Rows


@pytest.fixture(scope="module")
def env(tiny):
    return tiny.env


def learner(**changes):
    return dataclasses.replace(AGENT, learner=dataclasses.replace(AGENT.learner, **changes))


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_configuration_reads_back_equal(env, tmp_path):
    made = open_run(env, AGENT, tmp_path / "r", seed=4)
    again = Run(tmp_path / "r")
    assert made.env_config == again.env_config == ENV
    assert made.agent_config == again.agent_config == AGENT
    assert again.spec == env.spec and again.name == "r" and again.manifest.seed == 4


def test_the_manifest_says_with_what_it_was_done(tiny):
    manifest, bars = tiny.run.manifest, tiny.env.bars
    assert manifest.data.sha256 == bars.digest()
    assert manifest.data.last == str(bars.time[-1]) and manifest.data.rows == 200
    for name in ("jax", "orbax-checkpoint", "numpy"):
        assert manifest.versions[name] == importlib.metadata.version(name)


def test_the_same_experiment_opens_again_and_counts_as_one_trial(env, tmp_path):
    agent = dataclasses.replace(AGENT, num_seeds=3)
    for _ in range(2):
        open_run(env, agent, tmp_path / "r", seed=0)
    assert trials.count(tmp_path, "train", data_record(env.bars)) == 3
    assert len(trials.entries(tmp_path)) == 1


OTHER_COSTS = dataclasses.replace(ENV, costs=dataclasses.replace(ENV.costs, commission=1e-3))
OTHERS = {
    "agent.policy.channels": lambda bars: (
        TradingEnv(bars, ENV),
        dataclasses.replace(AGENT, policy=dataclasses.replace(AGENT.policy, channels=5)),
        0,
    ),
    "agent.learner.discount": lambda bars: (TradingEnv(bars, ENV), learner(discount=0.9), 0),
    "agent.num_seeds": lambda bars: (
        TradingEnv(bars, ENV),
        dataclasses.replace(AGENT, num_seeds=2),
        0,
    ),
    "env.costs.commission": lambda bars: (TradingEnv(bars, OTHER_COSTS), AGENT, 0),
    "seed": lambda bars: (TradingEnv(bars, ENV), AGENT, 1),
    "data rows": lambda bars: (TradingEnv(bars[:-1], ENV), AGENT, 0),
    "data symbols": lambda bars: (
        TradingEnv(dataclasses.replace(bars, symbols=("S0", "X")), ENV),
        AGENT,
        0,
    ),
    "data sha256": lambda bars: (
        TradingEnv(dataclasses.replace(bars, volume=bars.volume + 1), ENV),
        AGENT,
        0,
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_experiment_is_refused_by_what_differs(tiny, tmp_path, name):
    mine = tiny.copy(tmp_path / "t")
    before = mine.written()
    env, agent, seed = OTHERS[name](tiny.env.bars)
    with pytest.raises(RunError, match=rf"something else: {name} was .* there and is .* now"):
        open_run(env, agent, mine.path, seed)
    assert mine.written() == before


def test_more_steps_are_another_experiment_where_the_schedule_hangs_on_them(env, tmp_path):
    def falling(agent):
        optimizer = dataclasses.replace(agent.optimizer, schedule="linear")
        return dataclasses.replace(agent, optimizer=optimizer)

    open_run(env, falling(AGENT), tmp_path / "r", seed=0)
    with pytest.raises(RunError, match=r"agent.learner.steps was 256 there and is 999 now"):
        open_run(env, falling(learner(steps=999)), tmp_path / "r", seed=0)


def test_a_folder_of_something_else_is_left_alone(env, tmp_path):
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter.txt").write_text("years of work")
    with pytest.raises(RunError, match="thesis: holds files of something else"):
        open_run(env, AGENT, folder, seed=0)
    assert [path.name for path in tmp_path.rglob("*")] == ["thesis", "chapter.txt"]


@pytest.mark.parametrize("written", range(3))
def test_a_run_that_a_kill_stopped_half_made_is_made_by_the_same_command(
    env, tmp_path, monkeypatch, written
):
    class Killed(BaseException):
        pass

    left, write, folder = iter(range(written)), os.replace, tmp_path / "r"

    def replace(*paths):
        if next(left, None) is None:
            raise Killed
        write(*paths)

    with monkeypatch.context() as patch, contextlib.suppress(Killed):
        patch.setattr(machine.os, "replace", replace)
        open_run(env, AGENT, folder, seed=0)
    names = ("env.toml", "agent.toml", "run.json")
    left = {*names[:written], f"{names[written]}.part"}
    assert {path.name for path in folder.iterdir()} == left
    if written:  # for another run what is there may be a user's own configuration
        with pytest.raises(RunError, match="holds files of something else"):
            open_run(TradingEnv(env.bars, EnvConfig()), AGENT, folder, seed=0)
    assert open_run(env, AGENT, folder, seed=0).spec == env.spec
    assert not list(folder.glob("*.part"))


def test_a_file_in_place_of_the_folder_is_left_alone(env, tmp_path):
    (tmp_path / "r").write_text("mine")
    with pytest.raises(RunError, match="is a file; choose another folder"):
        open_run(env, AGENT, tmp_path / "r", seed=0)
    assert files(tmp_path) == {tmp_path / "r": b"mine"}


def test_an_empty_folder_becomes_the_run(env, tmp_path, monkeypatch):
    (tmp_path / "r").mkdir()
    monkeypatch.chdir(tmp_path / "r")
    run = open_run(env, AGENT, pathlib.Path("."), seed=0)
    assert run.name == "r" and trials.count(tmp_path, "train") == 1


def test_a_folder_that_is_no_run_says_how_to_make_one(tmp_path):
    with pytest.raises(RunError, match=r"not a run folder .* `nca-trader train`"):
        Run(tmp_path)


def test_a_run_without_checkpoints_says_how_it_began(env, tmp_path):
    run = open_run(env, AGENT, tmp_path / "r", seed=0)
    with pytest.raises(RunError, match="no checkpoint yet; by its record it was begun with"):
        run.params()
    assert files(run.path).keys() == {run.path / n for n in ("run.json", "env.toml", "agent.toml")}
    assert run.metrics() == [] and run.selection is None and run.selected == 0


@pytest.mark.parametrize(
    ("name", "text", "error", "says"),
    [
        ("run.json", "{", StateError, "run.json: not JSON"),
        ("run.json", "[]", StateError, r"run.json: \[\] where an object is expected"),
        ("run.json", seal_record({"format": 5}), StateError, "run.json: has no 'name'"),
        ("run.json", '{"format": 5}', StateError, "run.json: has no 'name'"),
        ("run.json", '{"format": 4}', RunError, "format 4, this version reads 5; use the version"),
        ("run.json", '{"format": 99}', RunError, "run.json: format 99, this version reads 5"),
        ("run.json", b"\xff\xfe", StateError, "run.json: not JSON"),
        ("selection.json", "nonsense", StateError, "selection.json: not JSON"),
        ("selection.json", '{"selected": 0}', StateError, "selection.json: has no 'checksum'"),
        ("selection.json", seal_record({"selected": 3}), RunError, "has no agent 3; it trained 1"),
        ("selection.json", seal_record({"seLected": 0}), StateError, "did you mean 'selected'"),
        (
            "selection.json",
            seal_record({"selected": "0"}),
            StateError,
            "a whole number or null is expected",
        ),
        ("agent.toml", None, RunError, "agent.toml: is missing"),
        ("env.toml", "", RunError, "env.toml: was changed after the run was made"),
    ],
)
def test_a_damaged_run_folder_names_the_file(tiny, tmp_path, name, text, error, says):
    file = tiny.copy(tmp_path / "t").path / name
    if text is None:
        file.unlink()
    else:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(error, match=says) as info:
        Run(file.parent)
    assert "\n" not in str(info.value) and str(file.parent) in str(info.value)


@pytest.fixture
def four(tiny, tmp_path):
    """A run of four rows, the third a short one with seeds and a null."""
    run = tiny.copy(tmp_path / "four").run
    rows = run.metrics()
    assert [row["update"] for row in rows] == [1, 2]
    run.append({"update": 3, "steps": 384, "loss": None, "seeds": {"reward": [0.25, None]}})
    run.append(rows[1] | {"update": 4, "steps": 512})
    return run


def test_a_row_is_json_for_any_reader_and_shows_no_checksum_to_ours(four):
    lines = four.lines.path.read_text().splitlines()
    raw = [json.loads(line) for line in lines]
    assert [row["update"] for row in raw] == [1, 2, 3, 4] and all("loss" in row for row in raw)
    for line, row in zip(lines, raw, strict=True):
        blank = line.replace(row["checksum"], "0" * 64) + "\n"
        assert hashlib.sha256(blank.encode()).hexdigest() == row.pop("checksum")
    assert four.metrics() == raw == Rows(four.lines.path).poll()


@pytest.mark.parametrize(("number", "every"), [(2, 13), (3, 4)])
def test_a_flipped_bit_of_a_row_is_named_and_only_that_row_is_left_out(four, number, every, caplog):
    rows, path = four.metrics(), four.lines.path
    content = path.read_bytes()
    lines = content.splitlines(keepends=True)
    start, size = len(b"".join(lines[: number - 1])), len(lines[number - 1])
    for at in [*range(start, start + size, every), start + size - 1]:
        # Without its end, a row and the next are one line.
        lost = {number, number + 1} if at == start + size - 1 else {number}
        wanted = [row for row in rows if row["update"] not in lost]
        for bit in range(8):
            changed = bytearray(content)
            changed[at] ^= 1 << bit
            path.write_bytes(changed)
            for read in (four.metrics, Rows(path).poll) if at % 5 == 0 else (four.metrics,):
                caplog.clear()
                assert read() == wanted, (at, bit)
                assert f"{path} line {number}: " in caplog.messages[0], (at, bit)


def test_a_row_without_its_checksum_is_damaged(four, caplog):
    rows, path = four.metrics(), four.lines.path
    content = path.read_text()
    stripped = [json.dumps(row) + "\n" for row in rows]
    path.write_text("".join([stripped[0], *content.splitlines(keepends=True)[1:]]))
    assert Run(four.path).metrics() == rows[1:] == Rows(path).poll()
    named = f"{path} line 1: has no 'checksum'; restore it from a copy. The row is left out."
    assert caplog.messages == [named, named]
    path.write_text("".join(stripped))
    assert Run(four.path).metrics() == [] == Rows(path).poll()


def test_what_compares_lists_and_watches_runs_works_on_the_rows_that_are_whole(four, tiny, caplog):
    path = four.lines.path
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(b"1", b"2", 1)
    path.write_bytes(b"".join(lines))
    table = compare_runs([tiny.path, four.path])
    assert list(table.loc["last update"]) == [2, 4] and "last checksum" not in table.index
    listed = runs_in(four.path.parent).loc[four.path.name]
    assert listed["fault"] == "" and listed["steps"] == 512
    followed = Rows(path).poll()
    assert [row["update"] for row in followed] == [1, 3, 4]
    assert not any("checksum" in row for row in followed)
    assert len(caplog.messages) == 3 and len({*caplog.messages}) == 1


def in_two(line):
    """A row in which a byte became an end."""
    return line[:40] + b"\n" + line[41:]


DAMAGE = {
    "none": lambda lines: lines,
    "a digit": lambda lines: [*lines[:2], lines[2].replace(b": ", b": 1", 1), *lines[3:]],
    "in two": lambda lines: [*lines[:2], in_two(lines[2]), *lines[3:]],
    "a return": lambda lines: [*lines[:2], in_two(lines[2]).replace(b"\n", b"\r", 1), *lines[3:]],
    "no end": lambda lines: [*lines[:2], lines[2][:-1] + b"J", *lines[3:]],
    "no end of all": lambda lines: [*lines[:-1], lines[-1][:-1] + b"J"],
    "torn": lambda lines: [*lines, lines[-1][:30]],
    "torn at its end": lambda lines: [*lines[:-1], lines[-1][:-1]],
}
LOST = {"none": {}, "torn": {}, "no end": {3, 4}, "no end of all": {5}, "torn at its end": {5}}


@pytest.mark.parametrize("done", range(6))
@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.few(16)
def test_a_resumed_run_keeps_the_rows_of_its_updates_whatever_is_damaged(four, name, done):
    four.append(four.metrics()[-1] | {"update": 5})
    rows, path = four.metrics(), four.lines.path
    path.write_bytes(b"".join(DAMAGE[name](path.read_bytes().splitlines(keepends=True))))
    four.cut(done)
    four.append(rows[-1] | {"update": done + 1})
    kept = [n for n in range(1, done + 1) if n not in LOST.get(name, {3})]
    assert [row["update"] for row in four.metrics()] == [*kept, done + 1]


def test_rows_that_were_appended_out_of_order_are_cut(four):
    rows = four.metrics()
    four.append(rows[0])
    four.cut(4)
    assert four.metrics() == rows


def save_seeds(env, path, num_seeds):
    """A run of several agents whose parameters say whose they are."""
    run = open_run(env, dataclasses.replace(AGENT, num_seeds=num_seeds), path, seed=0)
    params = run.each.init(jax.random.key(0))
    of_all = jax.tree.map(lambda x: np.stack([x + np.float32(i) for i in range(num_seeds)]), params)
    with Checkpoints(path / "checkpoints") as checkpoints:
        checkpoints.save(1, State(of_all))
    return run, params


def test_each_seed_has_its_own_parameters(env, tmp_path):
    run, params = save_seeds(env, tmp_path / "r", 3)
    for i in range(3):
        expected = flatten(jax.tree.map(lambda x, i=i: x + np.float32(i), params))
        found = flatten(Run(run.path, seed=i).params())
        assert found.keys() == expected.keys()
        assert all((found[name] == expected[name]).all() for name in found)
    with pytest.raises(RunError, match="has no agent 3; it trained 3"):
        Run(run.path, seed=3)


def test_the_selected_seed_acts(env, tmp_path):
    run, params = save_seeds(env, tmp_path / "r", 3)
    run.write_json("selection.json", {"selected": 2, "sharpe": [0.5, None, 1.25]})
    again = Run(run.path)
    assert again.described == (
        "agent 2 (Sharpe ratio 1.25) of 3, selected; "
        "the others: 0 (Sharpe ratio 0.50), 1 (no trade)"
    )
    asked = Run(run.path, seed=1)
    assert asked.described.startswith("agent 1 (no trade) of 3, as asked for; the others: 0")
    assert again.selected == 2
    bias = params["head"]["bias"]
    assert (again.params()["head"]["bias"] == bias + np.float32(2)).all()
    assert (Run(run.path, seed=0).params()["head"]["bias"] == bias).all()


def test_the_mean_of_several_agents_acts_where_none_was_selected(env, tmp_path):
    run, params = save_seeds(env, tmp_path / "r", 3)
    assert run.selected is None and run.num_acting == 3 and run.described == "the mean of 3 agents"
    bias = params["head"]["bias"]
    for i, one in enumerate(run.params()["head"]["bias"]):
        assert (one == bias + np.float32(i)).all()
    result = backtest(env.bars, run)
    assert result.logits.shape[-1] == 3 * run.policy.distribution.outputs(run.spec)
    run.write_json("selection.json", Selection(sharpe=[0.5, None, 1.25]))
    assert run.described == (
        "the mean of 3 agents; each: 0 (Sharpe ratio 0.50), 1 (no trade), 2 (Sharpe ratio 1.25)"
    )
    assert Run(run.path, seed=1).selected == 1


def test_an_exported_file_names_the_agent_that_it_holds(env, tmp_path):
    run, params = save_seeds(env, tmp_path / "r", 3)
    path, second = tmp_path / "agent.nca", Run(run.path, seed=1)
    write_exported(
        path, second, compact(second, second.params(), Coding(bits=16), env.features, None)
    )
    held = read_run(path)
    assert held.selected == 1 and read_run(path, seed=1).selected == 1
    assert held.described == "agent 1 of 3, as asked for; the others: 0, 2"
    bias = params["head"]["bias"] + np.float32(1)
    np.testing.assert_allclose(held.params()["head"]["bias"], bias)
    with pytest.raises(ConfigError, match=r"seed=2: .*agent.nca holds agent 1 alone"):
        read_run(path, seed=2)


@pytest.mark.parametrize("call", ["replace", "fsync"])
def test_a_full_disk_leaves_the_file_as_it_was(tmp_path, monkeypatch, call):
    def full(*args):
        raise OSError(28, "No space left on device")

    file = tmp_path / "selection.json"
    write_atomically(file, "before")
    monkeypatch.setattr(f"os.{call}", full)
    with pytest.raises(StateError, match=r"selection.json: cannot be written \(No space left"):
        write_atomically(file, "after " * 1000)
    assert files(tmp_path) == {file: b"before"}


def test_the_bars_of_another_file_are_the_same_data_if_they_are_equal(env, tmp_path):
    open_run(env, AGENT, tmp_path / "r", seed=0)
    bars = random_bars(np.random.default_rng(0), 260, 2)[:200]
    assert bars.source != env.bars.source
    open_run(TradingEnv(bars, ENV), AGENT, tmp_path / "r", seed=0)


def test_the_manifest_is_written_last(env, tmp_path, monkeypatch):
    def fail(root, entry):
        raise StateError("no ledger")

    monkeypatch.setattr("nca_trader.runs.trials.record", fail)
    with pytest.raises(StateError, match="no ledger"):
        open_run(env, AGENT, tmp_path / "r", seed=0)
    assert not (tmp_path / "r" / "run.json").exists()
    assert (tmp_path / "r" / "agent.toml").exists()


def rewrite(path, change):
    """run.json with `change` made to it, sealed again."""
    manifest = json.loads(path.read_text())
    del manifest["checksum"]
    change(manifest)
    path.write_text(seal_record(manifest))


SPECS = {
    "unknown": lambda spec: spec.update(colour="red"),
    "missing": lambda spec: spec.pop("warmup"),
    "type": lambda spec: spec.update(targets=["0.5"]),
    "null": lambda spec: spec.update(warmup=None),
}


@pytest.mark.parametrize("name", SPECS)
def test_a_spec_with_a_wrong_key_or_type_is_refused(tmp_path, env, name):
    run = open_run(env, AGENT, tmp_path / "r", seed=0)
    rewrite(run.path / "run.json", lambda manifest: SPECS[name](manifest["spec"]))
    with pytest.raises(StateError, match=r"run.json: spec: .*; restore it from a copy") as info:
        Run(run.path)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("field", dataclasses.fields(EnvSpec), ids=lambda field: field.name)
def test_every_field_of_a_spec_comes_back(tmp_path, env, field):
    others = {bool: True, int: 7, float: 1.25e-4, str: "orders"}
    value = {"choices": 3, "limits": (0.5, 1.5)}.get(field.name, getattr(env.spec, field.name))
    other = others.get(type(value))
    if other is None:  # a tuple; limits are always two
        other = (*value[::-1], *value[: field.name != "limits"])
    assert other != value
    env = TradingEnv(env.bars, ENV)
    spec = dataclasses.replace(env.spec, **{field.name: other})
    env.market = dataclasses.replace(env.market, dynamics=env.dynamics._replace(spec=spec))
    run = open_run(env, AGENT, tmp_path / "r", seed=0)
    # Its base is what the agent's own file says: consent to load code is asked for that.
    expected = dataclasses.replace(env.spec, base="none")
    assert Run(run.path).spec == expected and (expected == env.spec) == (field.name != "base")


@pytest.mark.slow
def test_more_steps_and_other_checkpoints_are_the_same_experiment(tiny, tmp_path, env):
    mine = tiny.copy(tmp_path / "t")
    agent = dataclasses.replace(
        AGENT, checkpoint=CheckpointConfig(every=7, keep=1), mesh=MeshConfig(devices=2)
    )
    run = train(env, agent, mine.path, steps=300)
    assert steps_done(tiny.run) == 256 and steps_done(run) == 384
    assert run.metrics()[:2] == tiny.run.metrics()
    assert trials.count(mine.runs, "train") == 1
