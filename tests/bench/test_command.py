"""`python -m benchmarks`: its options, its rows, and that a wheel is without it."""

import json
import sys
import zipfile

import jax
import pytest
from hatchling.builders.wheel import WheelBuilder

from benchmarks import env as bench_env
from benchmarks import timing
from benchmarks.__main__ import main

KEYS = (
    "bench name envs envs_per_segment steps_per_s compile_s first_call_s peak_rss_mb retraces peer "
    "ratio device"
)


@pytest.fixture
def cached():
    """Restores the compile cache, which a measurement turns off."""
    before = jax.config.jax_enable_compilation_cache
    yield
    jax.config.update("jax_enable_compilation_cache", before)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["all", "--agent", "nope"], "'nope' is not a preset in agents/"),
        (["ppo", "--agent", "nano"], "--agent nano has no effect on `ppo`; leave it out, or run"),
        (["policy", "--envs", "8"], "--envs 8 has no effect on `policy`"),
    ],
)
def test_what_has_no_effect_is_refused_before_it_measures(words, says, capsys):
    assert main(words) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("benchmarks: ") and says in said.err
    assert len(said.err.splitlines()) == 1


def test_each_row_is_an_object_on_a_line(monkeypatch, capsys, cached):
    monkeypatch.setattr(timing, "SECONDS", 0.0)

    def measured(*_):
        return timing.measure("x", jax.jit(lambda carry: carry + 1), 0, 1)

    for part in ("_index", "_one_env", "_vector_env"):
        monkeypatch.setattr(bench_env, part, measured)
    assert main(["env", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 4 and all(set(KEYS.split()) <= set(row) for row in rows)
    assert {row["bench"] for row in rows} == {"env"}


def test_an_interpreter_without_peers_is_named(monkeypatch, capsys, cached):
    for part in ("_index", "_one_env", "_vector_env"):
        monkeypatch.setattr(bench_env, part, lambda *_: {"name": "x", "steps_per_s": 2.0})
    assert main(["env", "--peers", sys.executable + "x"]) == 2
    assert "cannot be run (No such file or directory)" in capsys.readouterr().err


@pytest.mark.slow
def test_a_wheel_has_no_benchmarks(tmp_path, root):
    (wheel,) = WheelBuilder(str(root)).build(directory=str(tmp_path), versions=["standard"])
    names = zipfile.ZipFile(wheel).namelist()
    assert "nca_trader/cli/command.py" in names
    assert not [name for name in names if "benchmarks" in name]
