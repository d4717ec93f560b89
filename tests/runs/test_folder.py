"""One process trains into a run folder at a time; the next one names it and touches nothing."""

import contextlib
import errno
import os
import socket
import subprocess
import sys

import numpy as np
import pytest
from tiny import AGENT

from nca_trader import machine
from nca_trader.cli import main
from nca_trader.cloud import CloudPath, place
from nca_trader.config.records import seal_record
from nca_trader.errors import RunError, StoreError
from nca_trader.evaluate.backtest import backtest
from nca_trader.learner.train import steps_done, train
from nca_trader.runs import folder as module
from nca_trader.runs import trials
from nca_trader.runs.folder import Lines, training_in
from nca_trader.runs.manifest import Run
from nca_trader.watch.metrics import Rows


@pytest.mark.heavy
def test_a_train_within_training_is_refused_also_in_one_process(tiny, tmp_path):
    def again(row):
        with pytest.raises(RunError, match=f"process {os.getpid()} on .* trains there; wait"):
            train(tiny.env, AGENT, tmp_path / "run", seed=5)
        refused.append(row["update"])

    refused = []
    train(tiny.env, AGENT, tmp_path / "run", seed=5, report=again)
    assert refused == [1, 2]


def test_a_folder_that_cannot_be_locked_is_refused_in_one_line(tiny, tmp_path, capsys, monkeypatch):
    mine = tiny.copy(tmp_path / "mine")
    command = mine.train_command(mine.path)

    def refuse(file, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with monkeypatch.context() as patch:
        patch.setattr(machine.fcntl, "flock", refuse)
        assert main(command) == 4
    assert capsys.readouterr().err == (
        f"nca-trader train: {mine.path}/train.lock: cannot be locked (No locks available); "
        "choose another folder.\n"
    )


def test_a_run_in_a_store_is_locked_for_this_users_processes(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place = CloudPath("s3", "b", "runs/a")
    with training_in(place, {}):
        with pytest.raises(RunError, match=f"s3://b/runs/a: process {os.getpid()} on"):
            training_in(place, {}).__enter__()
        with training_in(CloudPath("s3", "b", "runs/other"), {}):
            pass
    with training_in(place, {}):
        assert len(list((tmp_path / "nca_trader" / "locks").iterdir())) == 1
    assert list((tmp_path / "nca_trader" / "locks").iterdir()) == []


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(module, "PART", 30)


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_a_file_and_its_parts_hold_the_same_lines_whatever_is_done(objects, tmp_path, small_parts):
    rng = np.random.default_rng(0)
    local, remote = tmp_path / "m.jsonl", place("s3://b/run/m.jsonl")
    both, wanted = [Lines(local), Lines(remote)], []
    for step in range(300):
        what = rng.choice(["append", "append", "append", "append", "cut", "reopen", "read"])
        if what == "append":
            wanted.append(f"line {step} " + "x" * int(rng.integers(0, 20)))
            for each in both:
                each.append(wanted[-1])
        elif what == "cut" and rng.random() < 0.4:
            keep = int(rng.integers(0, len(wanted) + 3))
            wanted = wanted[:keep]
            for each in both:
                each.cut(keep)
        elif what == "reopen":  # by another process, once this one has stored all
            for each in both:
                each.flush()
            both = [Lines(local), Lines(remote)]
        else:
            for each in both:
                assert each.read().decode() == "".join(f"{line}\n" for line in wanted)
    assert len(wanted) > 20 and len(list(remote.below())) > 5
    # What `cat` of all parts in the order of their names gives.
    parts = sorted(objects.below("run/m.jsonl"))
    assert b"".join(objects[f"run/m.jsonl/{part}"] for part in parts) == Lines(remote).read()


def test_lines_are_stored_every_ten_seconds_and_when_they_are_flushed(objects):
    clock = Clock()
    lines = Lines(place("s3://b/m"), clock)
    lines.append("1")
    clock.now = 9.9
    lines.append("2")
    assert not objects
    clock.now = 10.0
    lines.append("3")
    assert objects["m/000000"] == b"1\n2\n3\n"
    lines.append("4")
    lines.flush()
    lines.flush()
    assert objects["m/000000"] == b"1\n2\n3\n4\n" and len(objects.puts) == 2
    assert lines.modified() == objects.head("m/000000")["last_modified"].timestamp()
    assert Lines(place("s3://b/none")).modified() is None


def test_a_cut_that_is_stopped_anywhere_leaves_a_beginning(objects, small_parts):
    def written():
        objects.clear()
        lines = Lines(place("s3://b/m"))
        for number in range(40):
            lines.append(f"{number}")
        lines.flush()
        return lines.read()

    whole = written()
    assert len(objects) == 4
    for stop in range(5):
        assert written() == whole
        left = [stop]

        def fail(what, key, left=left):
            if what in ("put", "delete"):
                left[0] -= 1
                if left[0] < 0:
                    raise RuntimeError("gone")

        objects.before = fail
        try:
            Lines(place("s3://b/m")).cut(5)
        except StoreError:
            assert stop < 4
        else:
            assert stop == 4
        objects.before = lambda what, key: None
        found = Lines(place("s3://b/m")).read()
        assert whole.startswith(found) and len(found) >= 10
        Lines(place("s3://b/m")).cut(5)
        assert Lines(place("s3://b/m")).read() == b"0\n1\n2\n3\n4\n"


def test_what_follows_a_run_in_a_store_reads_only_what_has_grown(objects, small_parts, caplog):
    rows, lines = Rows(place("s3://b/m")), Lines(place("s3://b/m"))
    assert rows.poll() == [] and rows.written() is None
    for number in range(10):
        lines.append(seal_record({"update": number}, indent=None).removesuffix("\n"))
        lines.flush()
    assert [row["update"] for row in rows.poll()] == list(range(10))
    assert len(objects) > 3
    objects.gets.clear()
    assert rows.poll() == [] and not objects.gets
    lines.append(seal_record({"update": 10}, indent=None).removesuffix("\n"))
    lines.flush()
    assert rows.poll() == [{"update": 10}] and len(objects.gets) == 1
    lines.cut(3)
    assert [row["update"] for row in rows.poll()] == [0, 1, 2] and rows.restarts == 1

    def fail(what, key):
        raise RuntimeError("no route to host")

    objects.before = fail
    assert rows.poll() == [] and "no route to host" in caplog.text
    assert rows.newest == {"update": 2} and rows.restarts == 1


def test_each_entry_of_the_ledger_is_an_object_of_its_own(objects):
    root = place("gs://b/runs")
    assert trials.entries(root) == []
    entries = [trials.Entry(kind="train", run=f"r{n}", data="d", trials=n) for n in range(1, 6)]
    for entry in entries:
        trials.record(root, entry)
    trials.record(root, trials.Entry(kind="test", run="r1", data="e"))
    assert trials.entries(root)[:5] == entries and len(objects) == 6
    assert (trials.count(root, "train"), trials.count(root, "test")) == (15, 1)


# `nca-trader`, which waits after its first update until it is killed.
WAITING = """
import sys
from nca_trader.cli import main
from nca_trader.learner import train
due = train.Intervals.due

def waits(self, done):
    print("trained", done, flush=True)
    sys.stdin.read()
    return due(self, done)

train.Intervals.due = waits
main(sys.argv[1:])
"""


@contextlib.contextmanager
def training(root, command):
    """A process in the middle of training, killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING, *command],
        env={**os.environ, "PYTHONPATH": str(root)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        while (line := process.stdout.readline()) and not line.startswith("trained"):
            pass
        assert line, "the process ended"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_second_train_names_the_first_and_touches_nothing(tiny, tmp_path, root, capsys):
    mine = tiny.copy(tmp_path / "mine")
    done = len(mine.run.metrics())
    command = mine.train_command(mine.path, steps=512)  # goes on with the finished run
    with training(root, command) as first:
        before = mine.written()
        capsys.readouterr()
        assert main(command) == 2
        said = capsys.readouterr().err.splitlines()
        assert len(said) == 1
        assert f"{mine.path}: process {first.pid} on {socket.gethostname()} (" in said[0]
        assert f"--run={mine.path}" in said[0] and "choose another folder" in said[0]
        assert mine.written() == before
        # Readers need no lock; the row of the update that waits is written already.
        assert len(mine.run.metrics()) == done + 1
        assert backtest(mine.bars, Run(mine.path)).equity.iloc[-1] > 0.0
    train(mine.env, AGENT, mine.path, steps=512)  # the kill released it
    assert steps_done(mine.run) == 512
    assert not (mine.path / "train.lock").exists()


@pytest.mark.heavy
def test_what_a_killed_process_left_in_a_new_folder_is_in_nobodys_way(tiny, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "train.lock").write_text("process 1 on \x1b[31melsewhere (a killed one)\n")
    train(tiny.env, AGENT, folder)
    assert steps_done(Run(folder)) == 256
