"""Real `paper` processes that are killed, whose exchange is another process.

What holds is judged by `paperoracle`, which reads the files and imports nothing of the package.
"""

import collections
import contextlib
import json
import os
import pathlib
import random
import signal
import sqlite3
import subprocess
import sys

import paperoracle
import papertape
import pytest
from sleeveledger import Ledger

from nca_trader.paper.journal import KINDS

HERE = pathlib.Path(__file__).parent
# Written by other commands than the session's, or only where it halts, see below.
ELSEWHERE = {"resume", "halt"}
OF_SLEEVES = {"cross", "allocation"}  # the last test here has sleeves
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

    def run(self, journal, fatal=None, broker=FAULTS, code=None, env=None, sleeves=False):
        """Run a session; return its exit code and what it said."""
        log = journal.with_suffix(".log")
        log.unlink(missing_ok=True)
        rule = f"{HERE.parent / 'papertape.py'}:steps"
        what = ["--sleeves", str(self.folder / "sleeves.toml")] if sleeves else ["--strategy", rule]
        argv = ["paper", *what, "--feed", "papertape:feed", "--journal", str(journal)]
        argv += ["--broker", broker, "--warmup", "8", "--env", str(self.folder / "env.toml")]
        task = {"argv": argv, "fatal": fatal, "log": str(log), "env": env or {}}
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()
        found = int(self.process.stdout.readline())
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
    assert {e[4] for e in told} == KINDS - ELSEWHERE - OF_SLEEVES, (
        "the scenario must make every kind of event"
    )
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


@pytest.mark.parametrize(
    ("which", "when"),
    [
        ("frequent", "before"),
        ("rare", "after"),
        pytest.param("frequent", "after", marks=pytest.mark.slow),
        pytest.param("rare", "before", marks=pytest.mark.slow),
    ],
)
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


@pytest.mark.parametrize("what", ["TERM", pytest.param("TERM twice", marks=pytest.mark.slow)])
def test_a_signal_ends_the_session_with_130_and_a_later_one_goes_on(mortal, journal, whole, what):
    said = mortal.run(journal, [200, what], code=130)
    assert "Traceback" not in said and "once more stops at once" in said
    told = paperoracle.check(journal, pending=True)
    assert (told[-1][4] == "run_ended") == (what == "TERM")
    mortal.run(journal)
    paperoracle.check(journal)
    assert comparable(journal) == whole


@pytest.mark.slow
def test_the_same_decisions_under_any_time_zone(mortal, journal, whole):
    mortal.run(journal, env={"TZ": "America/New_York"})
    assert comparable(journal) == whole


def halts(told):
    return [event[6]["code"] for event in told if event[4] == "halt"]


def test_an_exchange_that_dies_halts_the_session_and_nothing_more_is_sent(mortal, journal):
    said = mortal.run(journal, [250, "exchange"], code=3)
    assert "venue-unreachable" in said and "Traceback" not in said
    told = paperoracle.check(journal, pending=True)
    assert halts(told) == ["venue-unreachable"]
    assert "trading was halted" in mortal.run(journal, code=3)


def test_a_position_that_moved_by_hand_halts_also_if_the_halt_is_killed(mortal, journal):
    mortal.run(journal, "after:fill")
    mortal.run(journal, [60, "TERM"], code=130)  # its exchange ends with it
    with contextlib.closing(sqlite3.connect(f"{journal}.books")) as books:
        (text,) = books.execute("SELECT value FROM state").fetchone()
        state = json.loads(text)
        state["units"][0] += 3.0
        books.execute("UPDATE state SET value = ?", (json.dumps(state),))
        books.commit()
    before = len(paperoracle.books(journal)[2])
    mortal.run(journal, "before:halt")
    assert halts(paperoracle.check(journal, pending=True)) == []
    mortal.run(journal, "after:halt")
    assert halts(paperoracle.check(journal, pending=True)) == ["position-differs"]
    assert "position-differs" in mortal.run(journal, code=3)
    assert len(paperoracle.books(journal)[2]) == before


def test_every_kind_of_event_has_a_fail_point(mortal, whole):
    """A new kind needs a scenario above, or a place among those that other commands write."""
    found = set(mortal.kinds["frequent"]) | set(mortal.kinds["rare"])
    assert found == KINDS - ELSEWHERE - OF_SLEEVES


@pytest.mark.slow
def test_an_exchange_that_accepts_and_never_answers(mortal, journal):
    """Each silence costs the client its whole timeout."""
    mortal.run(journal, broker="simulated:seed=3,mute=0.3")
    told = paperoracle.check(journal)
    assert sum(e[4] == "order_ambiguous" for e in told) > 3


SLEEVES = """
[steps]
share = 0.5
strategy = "{tape}:steps"
on_halt = "flatten"
limits = {{ max_drawdown = 0.02 }}

[against]
share = 0.3
strategy = "{tape}:against"

[trend]
share = 0.2
strategy = "sma_cross"
params = {{ fast = 2, slow = 6 }}
"""


@pytest.mark.parametrize("when", ["before", pytest.param("after", marks=pytest.mark.slow)])
def test_an_account_of_sleeves_that_is_killed_ends_as_one_that_was_not(mortal, tmp_path, when):
    """A real session whose exchange is another process, killed at the kinds that sleeves add."""
    text = SLEEVES.format(tape=HERE.parent / "papertape.py")
    (mortal.folder / "sleeves.toml").write_text(text)
    ends = []
    for name, kinds in (("whole", ()), ("cut", sorted(OF_SLEEVES))):
        journal = mortal.rewind(tmp_path / f"{name}.db")
        for kind in kinds:
            mortal.run(journal, f"{when}:{kind}", sleeves=True)
        said = mortal.run(journal, sleeves=True)
        told = paperoracle.check(journal)
        assert {e[4] for e in told} >= OF_SLEEVES
        assert "steps" in said and "halted: max-drawdown" in said
        ledger = Ledger(journal)
        assert ledger.worst < 1e-9 and ledger.crossed
        own = {name: round(cash, 6) for name, cash in ledger.own_cash.items()}
        ends.append((comparable(journal), own, ledger.own_units))
    assert ends[0] == ends[1]
