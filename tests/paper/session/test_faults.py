"""Real `paper` processes that are killed, whose exchange breaks as it is told.

What holds is judged by `paperoracle`, which reads the files and imports nothing of the package.
"""

import collections
import contextlib
import hashlib
import json
import os
import pathlib
import random
import re
import signal
import sqlite3
import subprocess
import sys

import paperoracle
import papertape
import pytest
from fake_venue import CANARY

from nca_trader.paper.journal.journal import KINDS

HERE = pathlib.Path(__file__).parents[1]
# Written by other commands than the session's, or only where it halts, see below.
ELSEWHERE = {"resume", "halt"}
# On disk by one commit with `run_started`: after a kill behind that it is no new event.
ONE_COMMIT = "watched"
ENV = "max_gross = 1.0\nshort = true\n[costs]\ncommission = 5e-4\ninterest_lend = 0.02\n"
FAULTS = dict(seed=3, reset=0.1, lost=0.1, busy=0.1, reject=0.1, partial=0.2, repeat=0.5)


class Mortal:
    """Runs sessions in one folder after the other, and kills them."""

    def __init__(self, folder):
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        paths = [str(HERE.parent / "support"), str(HERE.parents[1])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        environment["PAPER_TAPE"] = str(folder)
        for name in ("APCA_API_SECRET_KEY", "ALERT_URL"):
            environment[name] = CANARY
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, str(HERE.parent / "support" / "papermortal.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=folder,
        )  # fmt: skip

    def run(self, journal, fatal=None, faults=FAULTS, code=None, env=None, more=()):
        """Run a session; return its exit code and what it said."""
        log = journal.with_suffix(".log")
        log.unlink(missing_ok=True)
        rule = f"{HERE.parent / 'support' / 'papertape.py'}:steps"
        argv = ["paper", "--strategy", rule, "--feed", "papertape:feed", "--journal", str(journal)]
        argv += ["--warmup", "8", "--env", str(self.folder / "env.toml")]
        argv += more
        task = {"argv": argv, "faults": faults, "fatal": fatal, "log": str(log), "env": env or {}}
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()
        found = int(self.process.stdout.readline())
        said = log.read_text()
        expected = -signal.SIGKILL if fatal is not None and code is None else code or 0
        assert found == expected, (fatal, said)
        # Journal, head, books, logs, and what the session printed.
        for file in journal.parent.glob(f"{journal.stem}*"):
            assert CANARY.encode() not in file.read_bytes(), file
        return said

    def verify(self, journal):
        """The exit code of the command that walks the chain."""
        task = {"argv": ["journal", "verify", str(journal)], "faults": {}, "fatal": None, "env": {}}
        self.process.stdin.write(json.dumps(task | {"log": os.devnull}) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

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


@pytest.mark.heavy
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
    kinds = [kind for kind in mortal.kinds[which] if (when, kind) != ("after", ONE_COMMIT)]
    converges(mortal, journal, whole, [f"{when}:{kind}" for kind in kinds])


@pytest.mark.heavy
def test_a_kill_between_the_exchanges_commit_and_the_journals_is_survived(mortal, journal, whole):
    """The order is in the books, and the journal knows only that it was sent: no second one."""
    for number in (1, 2, 5):
        mortal.run(journal, f"accepted:{number}")
        told = paperoracle.check(journal, pending=True)
        last = [e[5].partition("#")[0] for e in told if e[4] == "order_sent"][-1]
        assert last not in {e[5] for e in told if e[4] == "order_ack"}
        assert last in {order[0] for order in paperoracle.books(journal)[2]}
    converges(mortal, journal, whole, [])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_twenty_kills_at_any_call_are_survived(mortal, journal, whole, seed):
    """At the n-th call of the journal or of the exchange; `make soak` runs all: 200 kills."""
    drawn = random.Random(seed)
    converges(mortal, journal, whole, [drawn.randrange(1, 160) for _ in range(20)])


@pytest.mark.heavy
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


@pytest.mark.heavy
def test_a_live_session_says_how_it_does_and_ends_with_its_table(mortal, journal, whole):
    """Printed by the process itself; the table's costs are added up again from bars and fills."""
    said = mortal.run(journal)
    told = paperoracle.check(journal)
    assert re.search(rf"^paper +{sum(e[4] == 'bar' for e in told)} bars  equity \d", said, re.M)
    costs, waiting = 0.0, []
    for *_, kind, _, body in told:
        if kind == "fill":
            waiting.append(body)
        elif kind == "bar":
            for fill in waiting:  # ordered at the close before, filled at this open
                costs += fill["commission"]
                costs += fill["units"] * (fill["price"] - body[fill["symbol"]][0])
            waiting = []
    row = re.search(r"costs paid +([\d,.]+) +0\.00$", said, re.M)
    assert not waiting and costs > 100
    assert float(row[1].replace(",", "")) == pytest.approx(costs, abs=0.01)
    assert "buy and hold" in said and f"nca-trader dashboard --journal {journal}" in said


def halts(told):
    return [event[6]["code"] for event in told if event[4] == "halt"]


@pytest.mark.heavy
def test_an_exchange_that_dies_halts_the_session_and_nothing_more_is_sent(mortal, journal):
    said = mortal.run(journal, [250, "exchange"], code=3)
    assert "venue-unreachable" in said and "Traceback" not in said
    told = paperoracle.check(journal, pending=True)
    assert halts(told) == ["venue-unreachable"]
    assert "trading was halted" in mortal.run(journal, code=3)


@pytest.mark.heavy
def test_a_position_that_moved_by_hand_halts_also_if_the_halt_is_killed(mortal, journal):
    mortal.run(journal, "after:fill")
    mortal.run(journal, [60, "TERM"], code=130)
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


@pytest.mark.heavy
def test_a_loss_that_halts_is_a_halt_also_if_the_process_dies_on_the_way(mortal, journal):
    """The halt is committed with the bar that it is of: a restart must not count from there."""
    limit = ["--limit=max_drawdown=0.01"]
    mortal.run(journal, "before:halt", more=limit)
    before = halts(paperoracle.check(journal, pending=True))
    said = mortal.run(journal, code=3, more=limit)
    told = paperoracle.check(journal, pending=True)
    assert before == [] and halts(told) == ["max-drawdown"] and "max-drawdown" in said
    equity = [e[6]["equity"] for e in told if e[4] == "snapshot"]
    # The bar at which it died is missed by the restart; it halts at the first that it decides at.
    assert all(x / max(equity[: i + 1]) > 0.99 for i, x in enumerate(equity[:-1]))
    assert equity[-1] / max(equity) <= 0.99


def pages(journal):
    """Byte offsets of the journal's text in its file, page by page."""
    data = journal.read_bytes()
    return [data.index(b'"target"', start) for start in range(0, len(data), 4096)
            if b'"target"' in data[start : start + 4096]]  # fmt: skip


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("damage", "words"),
    [("a flipped bit", "from a copy"), ("a cut log", "are lost"), ("an older copy", "are lost")],
)
def test_a_journal_damaged_between_two_sessions_is_refused_and_nothing_is_sent(
    mortal, journal, damage, words
):
    """A session is killed, its file is damaged, and the next process refuses with exit code 4."""
    log = pathlib.Path(f"{journal}-wal")
    mortal.run(journal, [120, "TERM"], code=130)  # an orderly end, so that all is in the file
    copy = journal.read_bytes()
    mortal.run(journal, [160, "TERM" if damage == "a flipped bit" else "KILL"],
               code=130 if damage == "a flipped bit" else None)  # fmt: skip
    if damage == "a flipped bit":
        data = bytearray(journal.read_bytes())
        data[pages(journal)[-1] + 4] ^= 1
        journal.write_bytes(data)
    elif damage == "a cut log":
        assert log.stat().st_size > 8192
        os.truncate(log, log.stat().st_size // 2)
    else:
        log.unlink()
        journal.write_bytes(copy)
    orders = len(paperoracle.books(journal)[2])
    said = mortal.run(journal, code=4)
    assert "Traceback" not in said and words in said and re.search(r"seq \d+", said)
    assert len(paperoracle.books(journal)[2]) == orders
    assert mortal.verify(journal) == 4


@pytest.mark.heavy
def test_every_kind_of_event_has_a_fail_point(mortal, whole):
    """A new kind needs a scenario above, or a place among those that other commands write."""
    found = set(mortal.kinds["frequent"]) | set(mortal.kinds["rare"])
    assert found == KINDS - ELSEWHERE


@pytest.mark.slow
def test_an_exchange_that_accepts_and_never_answers(mortal, journal):
    """Which orders meet a silence follows from their ids."""
    mortal.run(journal, faults={"seed": 3, "mute": 0.4})
    told = paperoracle.check(journal)

    def silent(name):
        drawn = hashlib.sha256(f"3:submit:{name}#1".encode()).digest()[:6]
        return int.from_bytes(drawn) < 0.4 * 2**48

    sent = {e[5].partition("#")[0] for e in told if e[4] == "order_sent"}
    expected = {name for name in sent if silent(name)}
    unclear = {e[5].partition("#")[0]: e[6]["reason"] for e in told if e[4] == "order_ambiguous"}
    assert unclear == dict.fromkeys(expected, "timeout") and expected
    found = {e[5] for e in told if e[4] == "order_ack" and e[6].get("by") == "look-up"}
    assert found == expected
