"""Temporary folders are gone at the end, and those of killed processes at the next call."""

import os
import signal
import subprocess
import sys

import pytest

from nca_trader import machine

HOLD = """
import sys
from nca_trader.machine import scratch
with scratch() as folder:
    (folder / "large").write_bytes(bytes(10))
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_a_folder_is_its_callers_alone_and_gone_at_the_end(here):
    with machine.scratch() as one, machine.scratch() as other:
        assert one != other and one.parent == here
        assert os.stat(one).st_mode & 0o077 == 0
        (one / "deep").mkdir()
        (one / "deep" / "file").write_text("x")
    assert list(here.iterdir()) == []
    with pytest.raises(KeyError), machine.scratch():
        raise KeyError
    assert list(here.iterdir()) == []


def test_what_a_killed_process_left_is_deleted_and_a_live_ones_is_not(here, root):
    command = [sys.executable, "-c", HOLD]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    killed, alive = (subprocess.Popen(command, cwd=root, text=True, **pipes) for _ in range(2))
    left, held = (here / process.stdout.readline().strip() for process in (killed, alive))
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert (left / "large").exists()
    with machine.scratch():
        assert not left.exists() and (held / "large").exists()
    alive.communicate("")
    assert alive.returncode == 0 and list(here.iterdir()) == []


def test_a_folder_that_is_taken_for_left_before_it_is_locked_is_made_again(here, monkeypatch):
    flock, taken = machine.fcntl.flock, []

    def late(file, how):
        if not taken:  # what another process does between the making and the locking
            taken.extend(here.iterdir())
            taken[0].rmdir()
        return flock(file, how)

    monkeypatch.setattr(machine.fcntl, "flock", late)
    with machine.scratch() as folder:
        assert folder.is_dir() and folder != taken[0]


def test_without_locks_nobody_elses_folder_is_touched(here, monkeypatch):
    with machine.scratch() as other:

        def refuse(file, how):
            raise OSError("no locks here")

        monkeypatch.setattr(machine.fcntl, "flock", refuse)
        with machine.scratch() as folder:
            assert folder.is_dir() and other.is_dir()
