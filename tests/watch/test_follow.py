"""A file of rows that others write is followed whatever they do to it; so is a journal."""

import json
import logging
import os
import random

import pytest

from nca_trader.machine import write_atomically
from nca_trader.paper.journal import Journal
from nca_trader.watch.metrics import Paper, Rows

NS = 1_000_000_000


def line(update, **more):
    return json.dumps({"update": update} | more) + "\n"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def append(path, text):
    with open(path, "a", encoding="utf-8") as file:
        file.write(text)


def updates(rows):
    return [row["update"] for row in rows]


def test_a_file_that_is_not_there_yet_is_waited_for(path):
    rows = Rows(path)
    assert rows.poll() == [] and rows.newest == {}
    append(path, line(1))
    assert updates(rows.poll()) == [1] and rows.restarts == 0


def test_a_row_that_is_being_written_is_neither_lost_nor_misread(path):
    rows, text = Rows(path), line(1, reward=0.125) + line(2, reward=-0.5)
    seen = []
    for letter in text:  # a look after every byte
        append(path, letter)
        seen += rows.poll()
    assert seen == [{"update": 1, "reward": 0.125}, {"update": 2, "reward": -0.5}]
    assert rows.count == 2 and rows.restarts == 0


def test_a_run_that_goes_back_to_a_checkpoint_is_followed_from_there(path):
    """`train` replaces the file by its first rows, then appends again."""
    rows = Rows(path)
    append(path, line(1) + line(2, reward=1.0) + line(3))
    rows.poll()
    write_atomically(path, line(1))
    assert updates(rows.poll()) == [1] and rows.count == 1
    append(path, line(2, reward=5.0))
    assert rows.poll() == [{"update": 2, "reward": 5.0}]
    assert (rows.count, rows.restarts, rows.newest["reward"]) == (2, 1, 5.0)


def test_a_run_that_went_back_and_is_longer_than_before_is_read_anew(path):
    rows = Rows(path)
    append(path, line(1) + line(2, reward=1.0))
    rows.poll()
    write_atomically(path, line(1) + line(2, reward=2.0) + line(3))
    assert updates(rows.poll()) == [1, 2, 3]
    assert rows.count == 3 and rows.restarts == 1


def test_the_same_rows_under_a_new_inode_are_not_told_twice(path):
    rows = Rows(path)
    append(path, line(1) + line(2))
    rows.poll()
    write_atomically(path, path.read_text() + line(3))
    assert updates(rows.poll()) == [3] and rows.restarts == 0


def test_a_file_that_is_removed_and_made_again_is_read_from_its_beginning(path):
    rows = Rows(path)
    append(path, line(1) + line(2))
    rows.poll()
    os.remove(path)
    assert rows.poll() == []
    append(path, line(7))
    assert updates(rows.poll()) == [7]


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_done_to_the_file_the_newest_row_is_its_last_whole_one(path, seed):
    rng, rows, text = random.Random(seed), Rows(path), ""
    for number in range(60):
        what = rng.random()
        if what < 0.6:
            text += line(number, x=rng.random())
        elif what < 0.8:
            text = "".join(text.splitlines(keepends=True)[: rng.randrange(1, 6)])
        else:
            text = line(number)
        cut = rng.randrange(1, 8) if rng.random() < 0.3 else 0
        write_atomically(path, text[: len(text) - cut] if len(text) > cut else text)
        rows.poll()
        whole = path.read_text().rpartition("\n")[0].splitlines()
        assert rows.count == len(whole)
        if whole:
            assert rows.newest == json.loads(whole[-1])


def test_a_damaged_line_is_passed_over_with_a_warning(path, caplog):
    rows = Rows(path)
    append(path, line(1) + "{nothing\n[1]\n" + line(2))
    with caplog.at_level(logging.WARNING):
        assert updates(rows.poll()) == [1, 2]
    assert sum("passed over" in record.getMessage() for record in caplog.records) == 2


def test_a_journals_figures_are_those_of_its_events(tmp_path):
    path, clock = tmp_path / "journal.sqlite", [100 * NS]
    paper = Paper(path)
    assert paper.poll(0.0) == {}
    with Journal(path, clock=lambda: clock[0]) as journal:
        for key, equity in enumerate((1.25, 1.0, 1.5), 1):
            clock[0] = (100 + key) * NS
            journal.record("r", "bar", str(key), {}, key * NS)
            journal.record("r", "snapshot", str(key), {"equity": equity}, key * NS)
            if key == 2:
                # A look on the way: the rest is read from there on.
                middle = paper.poll(107.0)
        journal.record("r", "fill", "1", {}, 3 * NS)
        journal.record("r", "halt", "1", {}, 3 * NS)
        last = paper.poll(110.0)
    assert middle == {
        "paper_events": 4.0,
        "paper_bars": 2.0,
        "paper_equity": 1.0,
        "paper_drawdown": pytest.approx(0.2),
        "paper_feed_age_seconds": 5.0,
    }
    assert last["paper_equity"] == 1.5 and last["paper_drawdown"] == 0.0
    assert last["paper_fills"] == 1.0 and last["paper_halted"] == 1.0
    assert last["paper_feed_age_seconds"] == 7.0 and last["paper_bars"] == 3.0
