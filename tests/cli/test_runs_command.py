"""`trials` and `runs`: what was tried is listed, runs are compared and removed."""

import pytest

from nca_trader.errors import ConfigError, RunError
from nca_trader.machine import take_lock
from nca_trader.runs.listing import remove_run, runs_in


def test_a_run_and_each_evaluation_of_it_is_a_line_of_the_trials(own, command):
    for _ in range(2):
        assert command("backtest", "--run", own.path, "--data", own.data).code == 0
    said = command("trials", own.runs, "--json")
    assert said.code == 0, said.err
    assert [entry["kind"] for entry in said.json["trials"]] == ["train", "test", "test"]
    assert said.json["markets"]["S0"] == {"agents": 1, "evaluations": 2}
    assert "S1: 1 agents and rules tried, 2 evaluations" in said.out


def test_a_folder_without_trials_or_without_runs_says_so(tmp_path, command):
    assert "no trial was recorded" in command("trials", tmp_path).out
    assert command("runs", "list", tmp_path).out == "nothing there\n"
    for args in (("trials",), ("runs", "list")):
        said = command(*args, tmp_path / "missing")
        assert said.code == 2 and "no such folder" in said.err


def test_runs_are_listed_with_what_they_were_trained_on_and_a_damaged_one_as_such(own, command):
    damaged = own.runs / "damaged"
    damaged.mkdir()
    (damaged / "run.json").write_text("{")
    said = command("runs", "list", own.runs, "--json")
    assert said.code == 0, said.err
    rows = {row["run"]: row for row in said.json["runs"]}
    assert rows["tiny"]["symbols"] == "S0, S1" and rows["tiny"]["steps"] == 256
    data = own.run.manifest.data
    assert [rows["tiny"][name] for name in ("first", "last")] == [data.first[:10], data.last[:10]]
    assert rows["tiny"]["fault"] == "" and "run.json" in rows["damaged"]["fault"]
    assert "damaged" in said.err and "tiny" in said.out
    assert runs_in(own.runs).loc["tiny", "seeds"] == 1


def test_a_run_is_removed_only_when_asked_and_when_nobody_trains_there(own, command, monkeypatch):
    said = command("runs", "rm", own.path)
    assert said.code == 2 and "--yes" in said.err and own.path.exists()
    held = take_lock(own.path / "train.lock")
    with pytest.raises(RunError, match="trains there"):
        remove_run(own.path)
    import os

    os.close(held)
    said = command("runs", "rm", own.path, "--yes", "--json")
    assert said.code == 0 and not own.path.exists(), said.err
    # What was tried stays counted.
    assert len(command("trials", own.runs, "--json").json["trials"]) == 1
    assert command("runs", "rm", own.path, "--yes").code == 2
    assert command("runs", "rm", own.runs, "--yes").code == 2 and own.runs.exists()
    with pytest.raises(ConfigError, match="object store"):
        remove_run("gs://bucket/run")
