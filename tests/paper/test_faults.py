"""Real `paper` processes that are killed, whose exchange is another process.

What holds is judged by `paperoracle`, which reads the files and imports nothing of the package.
"""

import collections
import json
import os
import pathlib
import random
import signal
import subprocess
import sys

import paperoracle
import papertape
import pytest

from nca_trader.paper.journal import KINDS

HERE = pathlib.Path(__file__).parent
# Written by other commands than the session's, or only where it halts, see below.
ELSEWHERE = {"resume", "halt"}
ENV = "max_gross = 1.0\nshort = true\n[costs]\ncommission = 5e-4\ninterest_lend = 0.02\n"
FAULTS = "simulated:seed=3,reset=0.1,lost=0.1,busy=0.1,reject=0.1,partial=0.2,repeat=0.5"


class Mortal:
    """Runs sessions in one folder after the other, and kills them."""

    def __init__(self, folder):
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        paths = [str(HERE.parent), str(HERE.parents[1])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        environment["PAPER_TAPE"] = str(folder)
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, str(HERE.parent / "papermortal.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=folder,
        )  # fmt: skip

    def run(self, journal, fatal=None, broker=FAULTS, code=None):
        """Run a session; return its exit code and what it said."""
        log = journal.with_suffix(".log")
        log.unlink(missing_ok=True)
        rule = f"{HERE.parent / 'papertape.py'}:steps"
        argv = ["paper", "--strategy", rule, "--feed", "papertape:feed", "--journal", str(journal)]
        argv += ["--broker", broker, "--warmup", "8", "--env", str(self.folder / "env.toml")]
        self.process.stdin.write(json.dumps({"argv": argv, "fatal": fatal, "log": str(log)}) + "\n")
        self.process.stdin.flush()
        found = int(self.process.stdout.readline().split()[0])
        said = log.read_text()
        expected = -signal.SIGKILL if fatal is not None and code is None else code or 0
        assert found == expected, (fatal, said)
        return said

    def rewind(self, journal):
        """Begin with the tape's first place, for another journal."""
        (self.folder / "tape").unlink(missing_ok=True)
        return journal

    def close(self):
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def mortal(stage, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tape")
    (folder / "env.toml").write_text(ENV)
    notices = {"38": [["stale", "no bar for two days"], ["reconnected", "again"]]}
    papertape.save(stage.bars(num_bars=46, seed=5), folder, bad=[36], notices=notices)
    made = Mortal(folder)
    yield made
    made.close()


@pytest.fixture(scope="module")
def whole(mortal):
    """What a session that nobody killed ends with, under the same faults of the exchange."""
    journal = mortal.rewind(mortal.folder / "whole.db")
    mortal.run(journal)
    told = paperoracle.check(journal)
    assert {e[4] for e in told} == KINDS - ELSEWHERE, "the scenario must make every kind of event"
    counts = collections.Counter(e[4] for e in told)
    last = {e[4]: e[0] for e in told}
    # Two sessions, each killed at all of its kinds: frequent ones soon come again, and rare ones
    # have their turns in the order of their last events.
    mortal.kinds = {
        "frequent": [kind for kind in sorted(counts) if counts[kind] > 8],
        "rare": sorted((k for k in counts if counts[k] <= 8), key=lambda kind: last[kind]),
    }
    return comparable(journal)


def comparable(journal):
    found = paperoracle.outcome(journal)
    found["cash"] = round(found["cash"], 6)
    return found


@pytest.fixture
def journal(mortal, tmp_path):
    return mortal.rewind(tmp_path / "paper.db")


def converges(mortal, journal, whole, fatal):
    for point in fatal:
        mortal.run(journal, point)
        if journal.exists() and pathlib.Path(f"{journal}.books").exists():
            paperoracle.check(journal, pending=True)
    mortal.run(journal)
    paperoracle.check(journal)
    assert comparable(journal) == whole


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("which", ["frequent", "rare"])
def test_a_kill_at_each_kind_of_event_is_survived(mortal, journal, whole, which, when):
    """Each process dies before or after the first new event of the next kind."""
    converges(mortal, journal, whole, [f"{when}:{kind}" for kind in mortal.kinds[which]])


def test_a_dozen_kills_at_any_call_are_survived(mortal, journal, whole):
    """At the n-th call of the journal or of the exchange, before or after it."""
    drawn = random.Random(7)
    converges(mortal, journal, whole, [drawn.randrange(1, 160) for _ in range(12)])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_twenty_kills_at_any_call_are_survived(mortal, journal, whole, seed):
    """`make soak` runs all: 200 kills."""
    drawn = random.Random(seed)
    converges(mortal, journal, whole, [drawn.randrange(1, 140) for _ in range(20)])
