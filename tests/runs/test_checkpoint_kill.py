"""A process that is killed while it saves leaves every earlier checkpoint, and no wrong value."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from nca_trader.runs.checkpoint import Checkpoints

# Imports once, then forks a saver for each folder it is told: an import takes seconds, a save .1.
PARENT = """
import os, sys, warnings
warnings.simplefilter("ignore")
import pathlib, numpy as np
from nca_trader.runs.checkpoint import Checkpoints

def saver(path):
    with Checkpoints(pathlib.Path(path), keep=2) as checkpoints:
        for step in range(1, 1000):
            print("saving", step, os.getpid(), flush=True)
            rng = np.random.default_rng(step)
            checkpoints.save(step, {name: rng.normal(size=20_000) for name in "abc"})
            checkpoints.wait()
            print("saved", step, flush=True)

for line in sys.stdin:
    pid = os.fork()
    if not pid:
        saver(line.strip())
    os.waitpid(pid, 0)
    print("gone", flush=True)
"""


class Saver:
    """Saves until it is killed."""

    def __init__(self, root):
        self.process = subprocess.Popen(
            [sys.executable, "-c", PARENT],
            env={**os.environ, "PYTHONPATH": str(root), "PYTHONWARNINGS": "ignore"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def killed(self, path, rng):
        """Saves into `path` and is killed at a random time; the newest step that it said was saved.

        It saves a few times in peace; the time is then drawn over what one save takes, so that
        every stage of saving is met.
        """
        self.process.stdin.write(f"{path}\n")
        self.process.stdin.flush()
        peaceful, done, began, took = int(rng.integers(1, 4)), 0, 0.0, 0.0
        while True:
            word, *rest = self.process.stdout.readline().split()
            if word == "saved":
                done, took = int(rest[0]), time.monotonic() - began
            elif word == "saving":
                began = time.monotonic()
                if done >= peaceful:
                    time.sleep(took * rng.random())
                    os.kill(int(rest[1]), signal.SIGKILL)
                    peaceful = sys.maxsize  # it may have said more before it was killed
            elif word == "gone":
                return done
            else:
                raise AssertionError(word)


@pytest.fixture(scope="module")
def saver(root):
    made = Saver(root)
    yield made
    made.process.communicate("", timeout=500)


def check_kill(saver, path, seed):
    saved = saver.killed(path, np.random.default_rng(seed))
    with Checkpoints(path) as checkpoints:
        step, leaves = checkpoints.newest()
        assert step >= saved
        rng = np.random.default_rng(step)
        expected = {f"['{name}']": rng.normal(size=20_000) for name in "abc"}
        assert leaves.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_array_equal(leaves[name], value)
        checkpoints.save(step + 1, {"x": np.float32(seed)})  # what is left is in nobody's way
        assert checkpoints.newest()[1]["['x']"] == seed


@pytest.mark.heavy
def test_a_kill_while_saving_costs_what_was_being_saved_and_no_more(saver, tmp_path):
    for seed in range(3):
        check_kill(saver, tmp_path / str(seed), seed)


@pytest.mark.slow
def test_fifty_kills_while_saving_cost_what_was_being_saved_and_no_more(saver, tmp_path):
    for seed in range(100, 150):
        check_kill(saver, tmp_path / str(seed), seed)
