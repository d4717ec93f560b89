"""A text that grows, the same in a file and in parts in a store, wherever a writer is stopped."""

import json

import numpy as np
import pytest

from nca_trader.cloud import place
from nca_trader.errors import StoreError
from nca_trader.runs import folder as module
from nca_trader.runs import trials
from nca_trader.runs.folder import Lines
from nca_trader.watch.metrics import Rows


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(module, "PART", 30)


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_a_file_and_its_parts_hold_the_same_lines_whatever_is_done(objects, tmp_path, small_parts):
    rng = np.random.default_rng(0)
    local, remote = tmp_path / "m.jsonl", place("s3://b/run/m.jsonl")
    both, wanted = [Lines(local), Lines(remote)], []
    for step in range(300):
        what = rng.choice(["append", "append", "append", "append", "cut", "reopen", "read"])
        if what == "append":
            wanted.append(f"line {step} " + "x" * int(rng.integers(0, 20)))
            for each in both:
                each.append(wanted[-1])
        elif what == "cut" and rng.random() < 0.4:
            keep = int(rng.integers(0, len(wanted) + 3))
            wanted = wanted[:keep]
            for each in both:
                each.cut(keep)
        elif what == "reopen":  # by another process, once this one has stored all
            for each in both:
                each.flush()
            both = [Lines(local), Lines(remote)]
        else:
            for each in both:
                assert each.read().decode() == "".join(f"{line}\n" for line in wanted)
    assert len(wanted) > 20 and len(list(remote.below())) > 5
    # What `cat` of all parts in the order of their names gives.
    parts = sorted(objects.below("run/m.jsonl"))
    assert b"".join(objects[f"run/m.jsonl/{part}"] for part in parts) == Lines(remote).read()


def test_lines_are_stored_every_ten_seconds_and_when_they_are_flushed(objects):
    clock = Clock()
    lines = Lines(place("s3://b/m"), clock)
    lines.append("1")
    clock.now = 9.9
    lines.append("2")
    assert not objects
    clock.now = 10.0
    lines.append("3")
    assert objects["m/000000"] == b"1\n2\n3\n"
    lines.append("4")
    lines.flush()
    lines.flush()
    assert objects["m/000000"] == b"1\n2\n3\n4\n" and len(objects.puts) == 2
    assert lines.modified() == objects.head("m/000000")["last_modified"].timestamp()
    assert Lines(place("s3://b/none")).modified() is None


def test_a_cut_that_is_stopped_anywhere_leaves_a_beginning(objects, small_parts):
    def written():
        objects.clear()
        lines = Lines(place("s3://b/m"))
        for number in range(40):
            lines.append(f"{number}")
        lines.flush()
        return lines.read()

    whole = written()
    assert len(objects) == 4
    for stop in range(5):
        assert written() == whole
        left = [stop]

        def fail(what, key, left=left):
            if what in ("put", "delete"):
                left[0] -= 1
                if left[0] < 0:
                    raise RuntimeError("gone")

        objects.before = fail
        try:
            Lines(place("s3://b/m")).cut(5)
        except StoreError:
            assert stop < 4
        else:
            assert stop == 4
        objects.before = lambda what, key: None
        found = Lines(place("s3://b/m")).read()
        assert whole.startswith(found) and len(found) >= 10
        Lines(place("s3://b/m")).cut(5)
        assert Lines(place("s3://b/m")).read() == b"0\n1\n2\n3\n4\n"


def test_what_follows_a_run_in_a_store_reads_only_what_has_grown(objects, small_parts, caplog):
    rows, lines = Rows(place("s3://b/m")), Lines(place("s3://b/m"))
    assert rows.poll() == [] and rows.written() is None
    for number in range(10):
        lines.append(json.dumps({"update": number}))
        lines.flush()
    assert [row["update"] for row in rows.poll()] == list(range(10))
    assert len(objects) > 3
    objects.gets.clear()
    assert rows.poll() == [] and not objects.gets
    lines.append(json.dumps({"update": 10}))
    lines.flush()
    assert rows.poll() == [{"update": 10}] and len(objects.gets) == 1
    lines.cut(3)
    assert [row["update"] for row in rows.poll()] == [0, 1, 2] and rows.restarts == 1

    def fail(what, key):
        raise RuntimeError("no route to host")

    objects.before = fail
    assert rows.poll() == [] and "no route to host" in caplog.text
    assert rows.newest == {"update": 2} and rows.restarts == 1


def test_each_entry_of_the_ledger_is_an_object_of_its_own(objects):
    root = place("gs://b/runs")
    assert trials.entries(root) == []
    entries = [trials.Entry(kind="train", run=f"r{n}", data="d", trials=n) for n in range(1, 6)]
    for entry in entries:
        trials.record(root, entry)
    trials.record(root, trials.Entry(kind="test", run="r1", data="e"))
    assert trials.entries(root)[:5] == entries and len(objects) == 6
    assert (trials.count(root, "train"), trials.count(root, "test")) == (15, 1)
