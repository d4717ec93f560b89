"""A session killed at any call goes on to the very journal of one that was not."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from nca_trader.paper.journal.journal import read_events

CHILD = """
import importlib.util, itertools, os, signal, sys, warnings
warnings.filterwarnings("ignore", message=".*fork.*")
spec = importlib.util.spec_from_file_location("stage", sys.argv[1])
stage = importlib.util.module_from_spec(spec)
sys.modules["stage"] = stage
spec.loader.exec_module(stage)
from nca_trader.paper.journal.journal import Journal, verify
from nca_trader.paper.venues.exchange import Exchange

for fatal in map(int, sys.argv[3:]):  # imported once, and a process for each
    child = os.fork()
    if child == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), verify(sys.argv[2]).seq, flush=True)
else:
    sys.exit()
calls = itertools.count(1)

def mortal(cls, name):
    inner = getattr(cls, name)
    def call(*args, **kwargs):
        if next(calls) == fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        result = inner(*args, **kwargs)
        if next(calls) == fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    setattr(cls, name, call)

for name in ("record", "commit", "_write_head"):
    mortal(Journal, name)
for name in ("work", "quote"):
    mortal(Exchange, name)
stage.replay(sys.argv[2], stage.make_bars(120, missing=0.2), stage.make_agent())
"""


def around(first):
    """Neighbouring calls: before and after an append, a commit, a head, a word to the broker."""
    return pytest.param([1 + first, 500 + first], marks=pytest.mark.slow)


@pytest.mark.heavy
@pytest.mark.parametrize("moments", [[401, 930], *map(around, range(12))])
def test_a_killed_session_ends_as_if_it_had_not_been(stage, digest, tmp_path, moments):
    path, whole = tmp_path / "paper.db", tmp_path / "whole.db"
    bars, agent = stage.bars(120, missing=0.2), stage.agent()
    conftest = pathlib.Path(__file__).parents[1] / "conftest.py"
    command = [sys.executable, "-c", CHILD, *map(str, (conftest, path, *moments))]
    environment = {**os.environ, "PYTHONPATH": f"{conftest.parents[1]}/support"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)
    rows = [[*map(int, line.split())] for line in done.stdout.splitlines()]
    # Never damaged, whatever the moment.
    assert [code for code, _ in rows] == [-signal.SIGKILL] * len(moments), done.stderr
    assert rows == sorted(rows)
    result = stage.replay(path, bars, agent)
    assert result == stage.replay(whole, bars, agent)
    assert digest(path) == digest(whole)
    intents = [event.key for event in read_events(path, "order_intent")]
    assert len(intents) == len(set(intents)) > 20
