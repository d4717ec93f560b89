"""Each commit, look-up and wait for the disk is needed: without it a named test fails.

`REMOVED` takes each of them out of a copy of the package. A fast test keeps the list complete;
the slow one runs the named test on each copy, which must fail.
"""

import contextlib
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from nca_trader.machine import write_atomically, write_once
from nca_trader.paper.feeds.fetch import _append
from nca_trader.paper.journal.journal import Journal
from nca_trader.paper.venues.exchange import Exchange

ROOT = pathlib.Path(__file__).parents[3]


@pytest.fixture
def order(monkeypatch):
    """The order in which the system is asked to write, to wait for the disk, and to name a file."""
    seen = []

    def watch(name, real):
        def call(*args):
            seen.append(name)
            return real(*args)

        monkeypatch.setattr(os, name, call)

    for name in ("pwrite", "fdatasync", "fsync", "replace", "link"):
        watch(name, getattr(os, name))
    return seen


def test_a_commit_is_announced_on_disk_before_the_database_makes_it(tmp_path, order):
    with Journal(tmp_path / "paper.db", lambda: 0) as journal:
        journal._db.set_trace_callback(lambda sql: order.append(sql.split()[0]))
        order.clear()
        journal.record("run", "bar", "1", {}, 0)
        assert [x for x in order if x in ("pwrite", "fdatasync", "COMMIT")] == [
            "pwrite", "fdatasync", "COMMIT", "pwrite"
        ]  # fmt: skip


@pytest.mark.parametrize(("write", "named"), [(write_atomically, "replace"), (write_once, "link")])
def test_a_file_is_on_disk_before_it_gets_its_name(tmp_path, order, write, named):
    write(tmp_path / "file", "text")
    assert order == ["fsync", named] and (tmp_path / "file").read_text() == "text"


def test_what_a_download_counts_as_done_is_on_disk(tmp_path, order):
    _append(tmp_path / "file", ["a", "b"])
    assert order == ["fsync"] and (tmp_path / "file").read_text() == "a\nb\n"


def test_the_exchanges_books_wait_for_the_disk_as_the_journal_does(tmp_path):
    with contextlib.closing(Exchange(tmp_path / "books", 1.0, ("A",))) as exchange:
        assert exchange._file._db.execute("PRAGMA synchronous").fetchone() == (2,)


ROUTER, JOURNAL = "paper/session/test_router.py", "paper/journal/test_journal.py"
ALPACA = "paper/venues/test_alpaca.py"
KILL = "paper/session/test_kill_switch.py"
HERE = "paper/journal/test_durability.py"
EVENTS, LOOP = "paper/journal/journal.py", "paper/session/loop.py"
BOOKS, THERE = "paper/venues/exchange_file.py", "paper/venues/alpaca.py"

# (file of nca_trader, line, what stands there instead, file and name of the test that fails)
REMOVED = [
    (EVENTS, 'self._db.execute("COMMIT")\n                self._waiting = 0',
     "self._waiting = 0", JOURNAL, "what_is_committed_is_on_disk_while_the_journal_is_open"),
    (EVENTS, 'self._db.execute("COMMIT")\n\n    def _read', "\n    def _read", JOURNAL,
     "a_new_journal_is_a_journal_before_its_first_event"),
    (EVENTS, "with self._opened:\n            self.commit()",
     "with self._opened:\n            pass", JOURNAL,
     "deferred_events_are_committed_after_256_and_at_the_end"),
    (EVENTS, "self._waiting >= DEFERRED_EVENTS:\n                self.commit()",
     "self._waiting >= DEFERRED_EVENTS:\n                pass", JOURNAL,
     "what_is_committed_is_on_disk_while_the_journal_is_open"),
    (EVENTS, "self._write_head(self._committed, self._head)", "pass", HERE,
     "a_commit_is_announced_on_disk_before_the_database_makes_it"),
    (EVENTS, "self._write_head(self._head, self._head, wait=False)", "pass", HERE,
     "a_commit_is_announced_on_disk_before_the_database_makes_it"),
    (EVENTS, "self._head_file.write(done, after, wait)", "pass", HERE,
     "a_commit_is_announced_on_disk_before_the_database_makes_it"),
    ("paper/journal/chain.py", "os.fdatasync(self._descriptor)", "pass", HERE,
     "a_commit_is_announced_on_disk_before_the_database_makes_it"),
    (EVENTS, 'SYNCHRONOUS = "FULL"', 'SYNCHRONOUS = "NORMAL"', JOURNAL,
     "a_commit_is_as_durable_as_sqlite_can_make_it"),
    (LOOP, "self._journal.commit()  # a deferred halt", "pass  # a deferred halt",
     KILL, "a_halt_of_a_batch_is_on_disk_before_anybody_hears_of_it"),
    (LOOP, "halt.body, now)\n        self._journal.commit()", "halt.body, now)", KILL,
     "a_request_in_a_batch_is_on_disk_before_anybody_hears_of_it"),
    (BOOKS, 'self._db.execute("COMMIT")', "pass", "paper/venues/test_exchange.py",
     "books_outlive_the_object"),
    (BOOKS, '_db.execute("PRAGMA synchronous = FULL")',
     '_db.execute("PRAGMA synchronous = NORMAL")', HERE,
     "the_exchanges_books_wait_for_the_disk_as_the_journal_does"),
    ("paper/venues/exchange.py", "if self.look_up(ticket.client_id) is not None:", "if False:",
     "paper/venues/test_exchange.py", "the_same_id_twice_is_one_order"),
    ("paper/venues/exchange.py", "if self.look_up(client_id) is None:", "if False:",
     "paper/venues/test_exchange.py", "an_order_that_was_never_sent_cannot_be_withdrawn"),
    ("paper/session/router.py", "state = self.venue.look_up(name)\n            except",
     "state = None\n            except", ROUTER, "a_duplicate_id_is_success_by_look_up"),
    ("paper/session/router.py", "state = self.venue.look_up(name) if name in sent else None",
     "state = None", ROUTER,
     "after_a_person_lifts_a_halt_orders_are_withdrawn_and_the_books_taken_over"),
    ("paper/session/router.py", "state = self.venue.look_up(name)\n        if state is None:",
     "state = None\n        if state is None:", ROUTER,
     "an_order_that_ended_at_the_venue_ends_here"),
    (THERE, "order = self.look_up(client_id)", "order = None", ALPACA, "cancelling"),
    (THERE, "found = self.look_up(client_id)", "found = None", ALPACA,
     "a_duplicate_id_is_success"),
    ("paper/feeds/fetch.py", "os.fsync(file.fileno())", "pass", HERE,
     "what_a_download_counts_as_done_is_on_disk"),
    ("machine.py", "os.fsync(file.fileno())  # before the", "pass  # before the", HERE,
     "a_file_is_on_disk_before_it_gets_its_name"),
    ("machine.py", "os.fsync(file.fileno())\n        os.link", "os.link", HERE,
     "a_file_is_on_disk_before_it_gets_its_name"),
]  # fmt: skip
CALLS = re.compile(
    r"\.commit\(\)|\"COMMIT\"|\.look_up\(|os\.f(data)?sync\(|\._write_head\("
    r"|_head_file\.write\(|synchronous = FULL|SYNCHRONOUS = "
)
# The suite that judges a user's venue looks up as well, and is judged by its own tests.
FILES = [p for p in (ROOT / "nca_trader" / "paper").rglob("*.py") if p.name != "check.py"]


def test_no_commit_look_up_or_wait_for_the_disk_is_left_out():
    found = {}
    for path in [*FILES, ROOT / "nca_trader" / "machine.py"]:
        count = len(CALLS.findall(path.read_text()))
        if count:
            found[path.relative_to(ROOT / "nca_trader").as_posix()] = count
    listed = {}
    for file, text, *_ in REMOVED:
        assert (ROOT / "nca_trader" / file).read_text().count(text) == 1, (file, text)
        listed[file] = listed.get(file, 0) + len(CALLS.findall(text))
    assert found == listed


@pytest.mark.slow
@pytest.mark.parametrize(("file", "text", "instead", "where", "name"), REMOVED)
def test_without_it_the_named_test_fails(tmp_path, file, text, instead, where, name):
    for part in ("tests", "pyproject.toml"):
        (tmp_path / part).symlink_to(ROOT / part)
    shutil.copytree(ROOT / "nca_trader", tmp_path / "nca_trader")
    path = tmp_path / "nca_trader" / file
    path.write_text(path.read_text().replace(text, instead))
    command = [sys.executable, "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider"]
    command += [f"{tmp_path}/tests/{where}", "-k", f"test_{name}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 1 and f"{where}::test_{name}" in done.stdout, done.stdout[-2000:]
