"""What is promised to be on disk is there before anybody hears of it."""

import contextlib
import os

import pytest

from nca_trader.machine import write_atomically, write_once
from nca_trader.paper.feeds.fetch import _append
from nca_trader.paper.journal.journal import Journal
from nca_trader.paper.venues.exchange import Exchange


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
