"""A session killed at any call goes on to the very journal of one that was not."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from nca_trader.paper.journal.journal import read_events, verify

CHILD = """
import importlib.util, itertools, os, signal, sys
spec = importlib.util.spec_from_file_location("stage", sys.argv[1])
stage = importlib.util.module_from_spec(spec)
sys.modules["stage"] = stage
spec.loader.exec_module(stage)
from nca_trader.paper.venues.exchange import Exchange
from nca_trader.paper.journal.journal import Journal

calls, fatal = itertools.count(1), int(sys.argv[3])

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
stage.replay(sys.argv[2], stage.make_bars(missing=0.2), stage.make_agent())
"""


def run(path, fatal):
    stage = pathlib.Path(__file__).parents[1] / "conftest.py"
    command = [sys.executable, "-c", CHILD, str(stage), str(path), str(fatal)]
    environment = {**os.environ, "PYTHONPATH": f"{stage.parents[1]}/support"}
    return subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)


def killed_then_finished(stage, digest, tmp_path, moments):
    path, whole = tmp_path / "paper.db", tmp_path / "whole.db"
    bars, agent = stage.bars(missing=0.2), stage.agent()
    seen = []
    for fatal in moments:
        done = run(path, fatal)
        assert done.returncode == -signal.SIGKILL, done.stderr
        seen.append(verify(path).seq)  # never damaged, whatever the moment
    assert seen == sorted(seen)
    result = stage.replay(path, bars, agent)
    assert result == stage.replay(whole, bars, agent)
    assert digest(path) == digest(whole)
    intents = [event.key for event in read_events(path, "order_intent")]
    assert len(intents) == len(set(intents)) > 20


def test_a_killed_session_ends_as_if_it_had_not_been(stage, digest, tmp_path):
    killed_then_finished(stage, digest, tmp_path, [401, 930])


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 12))
def test_a_kill_at_any_call_is_survived(stage, digest, tmp_path, first):
    """Neighbouring calls: before and after an append, a commit, a head, a word to the broker."""
    killed_then_finished(stage, digest, tmp_path, [1 + first, 500 + first])
