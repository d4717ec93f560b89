"""The ledger of trials counts every one, whoever writes at the same time."""

import os
import subprocess
import sys

import pytest

from nca_trader.errors import StateError
from nca_trader.runs import trials

WRITER = """
import pathlib, sys
from nca_trader.runs import trials
for i in range(40):
    trials.record(pathlib.Path(sys.argv[1]), {"kind": "test", "run": sys.argv[2], "data": str(i)})
"""


def entry(**changes):
    return {"kind": "train", "run": "a", "data": "d1", "trials": 3} | changes


def test_processes_that_write_at_once_lose_no_entry(tmp_path, root):
    env = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", WRITER, str(tmp_path / "runs")]
    writers = [subprocess.Popen([*command, f"w{i}"], env=env) for i in range(4)]
    assert [writer.wait(timeout=500) for writer in writers] == [0] * 4
    found = [(e["run"], e["data"]) for e in trials.entries(tmp_path / "runs")]
    assert sorted(found) == sorted((f"w{i}", str(j)) for i in range(4) for j in range(40))
    # Of one writer, in the order in which it wrote.
    assert [data for run, data in found if run == "w0"] == [str(j) for j in range(40)]


def test_agents_and_looks_are_counted_apart_and_by_data(tmp_path):
    for one in (
        entry(),
        entry(data="d2", trials=5),
        entry(kind="test", trials=1),
        {"kind": "test", "run": "b", "data": "d2"},
    ):
        trials.record(tmp_path, one)
    assert trials.count(tmp_path, "train") == 8
    assert trials.count(tmp_path, "train", "d2") == 5
    assert trials.count(tmp_path, "train", "elsewhere") == 0
    assert trials.count(tmp_path, "test") == 2
    assert trials.count(tmp_path, "test", "d1") == 1


def test_no_ledger_is_a_count_of_none(tmp_path):
    assert trials.entries(tmp_path) == [] and trials.count(tmp_path, "train") == 0
    assert not (tmp_path / trials.FILE).exists()


@pytest.mark.parametrize("line", ['{"kind": "tr', "17", "[]", '{"kind": "train", "run": "a"}', ""])
def test_a_damaged_line_is_refused_by_its_number(tmp_path, line):
    trials.record(tmp_path, entry())
    with open(tmp_path / trials.FILE, "a") as file:
        file.write(line + "\n")
    trials.record(tmp_path, entry())
    with pytest.raises(StateError, match=r"trials.jsonl line 2: .*Restore the file"):
        trials.count(tmp_path, "train")


def test_a_ledger_that_cannot_be_written_is_said_in_one_line(tmp_path):
    (tmp_path / trials.FILE).mkdir()
    with pytest.raises(StateError, match=r"trials.jsonl: .* cannot be written .*Is a directory"):
        trials.record(tmp_path, entry())
