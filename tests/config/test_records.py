"""Damaged JSON and TOML of ours: one line that names the file, never a traceback."""

import json

import numpy as np
import pytest

from nca_trader.config import EnvConfig
from nca_trader.config.records import open_record, seal_record
from nca_trader.data.shards import MANIFEST, open_shards, write_shards
from nca_trader.envs import load_env
from nca_trader.errors import ConfigError, RunError, StateError
from nca_trader.markets import task_of
from nca_trader.runs import exported, trials
from nca_trader.runs.exported import (
    Coding,
    Exported,
    compact,
    read_tensors,
    write_exported,
    write_tensors,
)
from nca_trader.runs.manifest import Run
from nca_trader.watch.alerts import read_rules

DEEP, LONG = "[" * 100_000, "1" * 5_000
RULE = "[[rule]]\nname = 'n'\nmetric = 'm'\ncomparison = '>'\nthreshold = 1"
VALUES = (None, True, 7, -1, 1.5, "x", "", [], {}, [1], ["x"], {"x": 1}, [[]], 10**30)


def paths_in(value, path=()):
    """The path of every value inside a JSON value."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*path, key)
        if isinstance(inner, dict | list):
            yield from paths_in(inner, (*path, key))


def replaced(value, path, change):
    """A copy in which `change(parent, key)` was done at `path`."""
    copy = json.loads(json.dumps(value))
    parent = copy
    for key in path[:-1]:
        parent = parent[key]
    change(parent, path[-1])
    return copy


def damaged(value, rng, number):
    """Copies with one value of another type, one key missing, or one key misspelt."""
    paths = list(paths_in(value))
    for _ in range(number):
        path = paths[rng.integers(len(paths))]
        kind = rng.integers(3)
        if kind == 0:
            wrong = VALUES[rng.integers(len(VALUES))]
            yield replaced(value, path, lambda parent, key, w=wrong: parent.__setitem__(key, w))
        elif kind == 1:
            yield replaced(value, path, lambda parent, key: parent.pop(key))
        elif isinstance(path[-1], str):
            yield replaced(
                value, path, lambda parent, key: parent.update({key[:-1] + "Q": parent.pop(key)})
            )


def read_or_one_line(read, *errors):
    """Reads, or fails in one line by one of `errors`; anything else is a fault of ours."""
    try:
        read()
    except errors as error:
        assert "\n" not in str(error) and len(str(error)) < 1000, str(error)
        return str(error)
    return None


@pytest.fixture
def mine(tiny, tmp_path):
    copy = tiny.copy(tmp_path / "t")
    copy.run.write_json("selection.json", {"selected": 0, "sharpe": [0.5]})
    return copy


@pytest.mark.parametrize("name", ["run.json", "selection.json"])
def test_every_changed_byte_of_a_sealed_file_is_seen(mine, name):
    file = mine.path / name
    content = file.read_bytes()
    rng = np.random.default_rng(0)
    for at in rng.integers(len(content), size=24):
        changed = bytearray(content)
        changed[at] ^= 1 << rng.integers(7)
        with pytest.raises((StateError, RunError)) as info:
            file.write_bytes(changed)
            Run(mine.path)
        assert "\n" not in str(info.value) and name in str(info.value)
    for end in rng.integers(len(content) - 1, size=8):
        file.write_bytes(content[:end])
        with pytest.raises(StateError, match=name):
            Run(mine.path)
    file.write_bytes(content)
    assert Run(mine.path).selected == 0


def test_targets_and_the_selected_agent_cannot_be_edited(mine):
    for name, was, now in (("run.json", "0.5", "0.7"), ("selection.json", "selected", "seLected")):
        file = mine.path / name
        text = file.read_text()
        assert was in text
        file.write_text(text.replace(was, now))
        with pytest.raises(StateError, match=rf"{name}: changed since it was written"):
            Run(mine.path)
        file.write_text(text)


@pytest.mark.heavy
def test_wrong_types_and_keys_of_a_run_are_one_line(mine):
    rng = np.random.default_rng(5)
    for name in ("run.json", "selection.json"):
        file = mine.path / name
        value = open_record(file.read_bytes(), name)[0]
        for wrong in damaged(value, rng, 150):
            file.write_text(seal_record(wrong))
            read_or_one_line(lambda: Run(mine.path), StateError, RunError)
        file.write_text(seal_record(value))


def test_wrong_types_and_keys_of_metrics_trials_and_shards_are_one_line(mine, tmp_path):
    rng = np.random.default_rng(1)
    metrics, ledger = mine.path / "metrics.jsonl", mine.runs / trials.FILE
    for file, read in (
        (metrics, lambda: mine.run.metrics()),
        (ledger, lambda: trials.entries(mine.runs)),
    ):
        row = open_record(file.read_bytes().splitlines(keepends=True)[0], file.name)[0]
        for wrong in damaged(row, rng, 24):
            file.write_text(seal_record(wrong, indent=None))
            read_or_one_line(read, StateError)
    write_shards([mine.bars], tmp_path / "shards")
    file = tmp_path / "shards" / MANIFEST
    manifest = open_record(file.read_bytes(), MANIFEST)[0]
    for wrong in damaged(manifest, rng, 32):
        file.write_text(seal_record(wrong))
        read_or_one_line(lambda: open_shards(tmp_path / "shards"), StateError, ValueError)


def test_wrong_types_and_keys_of_an_exported_file_are_one_line(tiny, tmp_path):
    rng = np.random.default_rng(2)
    run, env, path = tiny.run, tiny.env, tmp_path / "agent.nca"
    write_exported(path, run, compact(run, run.params(), Coding(), env.features, env.bars.present))
    tensors, about = read_tensors(path, exported.KIND, exported.VERSION)
    for name in ("manifest", "coding", "steps"):
        value = json.loads(about[name])
        for wrong in [*damaged(value, rng, 16)] if value else [[], 7, {"x": "y"}]:
            changed = about | {name: json.dumps(wrong)}
            write_tensors(path, tensors, changed, exported.KIND, exported.VERSION)
            read_or_one_line(lambda: Exported(path), StateError, RunError, ConfigError)
    with pytest.raises(StateError, match="header cannot be read"):  # an emoji is a whole pair
        write_tensors(
            path, tensors, about | {"signature": "\ud800"}, exported.KIND, exported.VERSION
        )
        Exported(path)
    write_tensors(path, tensors, about | {"note": "\U0001f600"}, exported.KIND, exported.VERSION)
    assert read_tensors(path, exported.KIND, exported.VERSION)[1]["note"] == "\U0001f600"
    for name in exported.TEXTS:
        changed = {key: text for key, text in about.items() if key != name}
        write_tensors(path, tensors, changed, exported.KIND, exported.VERSION)
        with pytest.raises(StateError, match=name):
            Exported(path)


HALF = '{"name": "\\ud800"}'  # of a pair of surrogates, which no file can hold as text
TORN = [DEEP, '{"a":' * 100_000, LONG, "", "{", "nul", "\x00", "NaN", HALF]


@pytest.mark.parametrize("text", TORN)
def test_no_depth_and_no_number_of_digits_ends_in_a_traceback(mine, tmp_path, text, caplog):
    (tmp_path / "shards").mkdir()
    for file, read in (
        (mine.path / "run.json", lambda: Run(mine.path)),
        (mine.path / "selection.json", lambda: Run(mine.path)),
        (mine.path / "metrics.jsonl", lambda: mine.run.metrics()),
        (mine.runs / trials.FILE, lambda: trials.entries(mine.runs)),
        (tmp_path / "shards" / MANIFEST, lambda: open_shards(tmp_path / "shards")),
    ):
        before = file.read_bytes() if file.exists() else b""
        file.write_text(text + "\n")
        said = read_or_one_line(read, StateError)
        # A damaged row of metrics is named and left out; other files are refused.
        said = said or caplog.messages.pop()
        assert file.name in said and "\n" not in said
        file.write_bytes(before)


@pytest.mark.parametrize(
    "text",
    [
        f"features = {DEEP}",
        f"size = {LONG}",
        f"size = 0x{'f' * 5_000}",
        f"market_bars = {'9' * 30}",
        f"{'a.' * 5_000}a = 1",
        f"size = {'[' * 300}1{']' * 300}",
        '"a\\nb" = 1',
    ],
)
def test_a_toml_file_of_a_user_is_refused_in_one_line(tmp_path, text):
    file = tmp_path / "env.toml"
    file.write_text(text)
    assert read_or_one_line(lambda: load_env(file), ConfigError) is not None
    assert read_or_one_line(lambda: load_env("kelly", [text]), ConfigError) is not None
    (tmp_path / "rules.toml").write_text(f"{RULE}\n{text}")
    assert read_or_one_line(lambda: read_rules(tmp_path / "rules.toml"), ConfigError) is not None


@pytest.mark.parametrize(
    "given", [DEEP, f"phi={LONG}", f"phi=0x{'f' * 5_000}", "phi=[[1]]", "phi='x'", "phi=true"]
)
def test_a_market_in_a_toml_file_is_refused_in_one_line(given):
    config = EnvConfig(market=f"ou({given})", market_bars=100)
    read_or_one_line(lambda: task_of(config), ConfigError)
