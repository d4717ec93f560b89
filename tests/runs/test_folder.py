"""One process trains into a run folder at a time; the next one names it and touches nothing."""

import contextlib
import errno
import os
import socket
import subprocess
import sys

import pytest
from tiny import AGENT

from nca_trader import machine
from nca_trader.cli import main
from nca_trader.cloud import CloudPath
from nca_trader.errors import RunError
from nca_trader.evaluate.backtest import backtest
from nca_trader.learner.train import steps_done, train
from nca_trader.runs.folder import training_in
from nca_trader.runs.manifest import Run

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


def test_a_train_within_training_is_refused_also_in_one_process(tiny, tmp_path):
    def again(row):
        with pytest.raises(RunError, match=f"process {os.getpid()} on .* trains there; wait"):
            train(tiny.env, AGENT, tmp_path / "run", seed=5)
        refused.append(row["update"])

    refused = []
    train(tiny.env, AGENT, tmp_path / "run", seed=5, report=again)
    assert refused == [1, 2]


def test_what_a_killed_process_left_in_a_new_folder_is_in_nobodys_way(tiny, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "train.lock").write_text("process 1 on \x1b[31melsewhere (a killed one)\n")
    train(tiny.env, AGENT, folder)
    assert steps_done(Run(folder)) == 256


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
