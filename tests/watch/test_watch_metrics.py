"""The figures of a run by name, and the same as Prometheus scrapes them."""

import contextlib
import json
import logging
import math
import os
import random
import socket
import time
import urllib.request

import pytest

from nca_trader.config.records import seal_record
from nca_trader.errors import ConfigError, RunError, StateError
from nca_trader.machine import write_atomically
from nca_trader.paper.journal.journal import Journal
from nca_trader.paper.journal.tally import Paper, Tally
from nca_trader.runs.folder import Lines
from nca_trader.watch import metrics
from nca_trader.watch.metrics import Collector, Rows, Watched, exporter, flat


def test_a_row_is_flattened_and_what_is_no_number_left_out():
    row = {
        "update": 3, "reward": 0.5, "loss": None, "note": "text", "ok": True,
        "seeds": {"reward": [0.25, None], "parent": [0, 1]},
        "fitness_correlation": {"learning_rate": 0.5},
    }  # fmt: skip
    found = flat(row)
    assert math.isnan(found.pop("loss")) and math.isnan(found.pop('seed_reward{seed="1"}'))
    assert found == {
        "update": 3.0, "reward": 0.5, "ok": 1.0, 'seed_reward{seed="0"}': 0.25,
        'seed_parent{seed="0"}': 0.0, 'seed_parent{seed="1"}': 1.0,
        "fitness_correlation_learning_rate": 0.5,
    }  # fmt: skip


def test_the_age_of_the_newest_row_grows_until_another_comes(tmp_path):
    import os

    now = [1000.0]
    path = tmp_path / "metrics.jsonl"
    watched = Watched(tmp_path, clock=lambda: now[0])
    assert watched.look() == {"rows": 0.0, "restarts": 0.0, "row_age_seconds": 0.0}
    now[0] = 1060.0  # a run that never begins stalls too
    assert watched.look()["row_age_seconds"] == 60.0
    path.write_text(line(1) + '{"upd')
    now[0] = 1100.0
    assert watched.look() == {"update": 1.0, "rows": 1.0, "restarts": 0.0, "row_age_seconds": 0.0}
    now[0] = 1130.0
    assert watched.look()["row_age_seconds"] == 30.0  # half a row is none
    # One who comes later knows the age from the file.
    os.utime(path, (1100.0, 1100.0))
    assert Watched(tmp_path, clock=lambda: now[0]).look()["row_age_seconds"] == 30.0


def test_a_run_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(RunError, match="no such folder"):
        Watched(tmp_path / "none")


def test_clients_that_hold_on_delay_no_scrape_and_are_let_go(monkeypatch):
    pytest.importorskip("prometheus_client", reason="needs the extra `prometheus`")
    monkeypatch.setattr(metrics, "SILENT", 2.0)
    with exporter("0", Collector("x")) as port, contextlib.ExitStack() as stack:
        held = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(300)
        ]
        for client in held:
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x")
        began = time.monotonic()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            assert answer.status == 200
        assert time.monotonic() - began < 2.0
        for client in held:
            client.settimeout(5.0)
            assert client.recv(100) == b""


def test_prometheus_scrapes_what_the_last_look_saw(monkeypatch):
    pytest.importorskip("prometheus_client", reason="needs the extra `prometheus`")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    collector = Collector('runs/"x"')
    with exporter("0", collector) as port:
        collector.samples = {
            "reward": 0.5, "loss": math.nan, 'seed_reward{seed="0"}': 1.0,
            'seed_reward{seed="1"}': -2.0,
        }  # fmt: skip
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
    said = [line for line in lines if not line.startswith("#")]
    run = 'run="runs/\\"x\\""'
    assert said == [
        f"nca_trader_reward{{{run}}} 0.5",
        f"nca_trader_loss{{{run}}} NaN",
        f'nca_trader_seed_reward{{{run},seed="0"}} 1.0',
        f'nca_trader_seed_reward{{{run},seed="1"}} -2.0',
    ]
    assert lines.count("# TYPE nca_trader_seed_reward gauge") == 1
    with pytest.raises(OSError, match="refused"):  # it has ended
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10)


def test_a_port_that_is_taken_is_one_line():
    pytest.importorskip("prometheus_client", reason="needs the extra `prometheus`")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StateError, match="give another port"):
            with exporter(str(port), Collector("x")):
                pass


@pytest.mark.parametrize("address", ["", "x", "70000", "host:"])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(ConfigError, match="give a port"):
        with exporter(address, Collector("x")):
            pass


NS = 1_000_000_000


def line(update, **more):
    return seal_record({"update": update} | more, indent=None)


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
            newest = json.loads(whole[-1])
            assert newest.pop("checksum") and rows.newest == newest


def test_a_damaged_line_is_left_out_with_a_warning_that_names_it(path, caplog):
    rows = Rows(path)
    append(path, line(1))
    assert updates(rows.poll()) == [1]
    append(path, "{nothing\n[1]\n" + line(2))
    with caplog.at_level(logging.WARNING):
        assert updates(rows.poll()) == [2] and rows.count == 2
    said = [record.getMessage() for record in caplog.records]
    assert all(text.endswith("The row is left out.") for text in said)
    assert [text.partition(": ")[0] for text in said] == [f"{path} line {n}" for n in (2, 3)]


def test_of_many_damaged_rows_the_first_ten_are_named(path, caplog):
    append(path, "{\n" * 35 + line(1))
    assert updates(Rows(path).poll()) == [1]
    assert [f"line {n}: " in said for n, said in enumerate(caplog.messages, 1)] == [True] * 10 + [
        False
    ]
    assert caplog.messages[10] == f"{path}: 25 more damaged rows are left out"


def test_a_journals_figures_are_those_of_its_events(tmp_path):
    path, clock = tmp_path / "journal.sqlite", [100 * NS]
    paper = Paper(path)
    paper.poll()
    assert paper.metrics(0.0) == {}
    with Journal(path, clock=lambda: clock[0]) as journal:
        for key, equity in enumerate((1.25, 1.0, 1.5), 1):
            clock[0] = (100 + key) * NS
            journal.record("r", "bar", str(key), {}, key * NS)
            journal.record("r", "snapshot", str(key), {"equity": equity}, key * NS)
            if key == 2:
                # A look on the way: the rest is read from there on.
                paper.poll()
                middle = paper.metrics(107.0)
        journal.record("r", "fill", "1", {}, 3 * NS)
        journal.record("r", "halt", "1", {}, 3 * NS)
        paper.poll()
        last = paper.metrics(110.0)
    assert middle == {
        "paper_events": 4.0,
        "paper_failed_bars": 0.0,
        "paper_bars": 2.0,
        "paper_equity": 1.0,
        "paper_drawdown": pytest.approx(0.2),
        "paper_feed_age_seconds": 5.0,
        "paper_running": 1.0,
    }
    assert last["paper_equity"] == 1.5 and last["paper_drawdown"] == 0.0
    assert last["paper_fills"] == 1.0 and last["paper_halted"] == 1.0
    assert last["paper_feed_age_seconds"] == 7.0 and last["paper_bars"] == 3.0


def test_each_poll_reads_only_what_is_new(path, monkeypatch):
    rows, read = Rows(path), []
    real = Lines.read

    def counted(self, start=0):
        read.append(len(text := real(self, start)))
        return text

    monkeypatch.setattr(Lines, "read", counted)
    for number in range(400):
        append(path, line(number, x=0.5))
        assert updates(rows.poll()) == [number]
    # The file has 400 rows of some 106 bytes; a poll reads one of them and the tail.
    assert len(read) == 400 and max(read) <= 256 + 110
    journal = path.with_name("j.db")
    paper, added, count = Paper(journal), [], write_session(journal, 1, 50)
    add = Tally.add
    monkeypatch.setattr(Tally, "add", lambda self, e: (added.append(e.seq), add(self, e)))
    paper.poll()
    paper.poll()
    assert added == [*range(1, count + 1)]


def write_session(path, first, last, equity=1.0):
    """Writes a bar and, at the end, a snapshot; the number of events."""
    with Journal(path, clock=lambda: last * NS) as journal:
        for key in range(first, last):
            journal.record("r", "bar", str(key), {}, key * NS)
        journal.record("r", "snapshot", str(last), {"equity": equity}, last * NS)
        return journal.head.seq


def replace(path, other):
    """Puts another journal in a journal's place."""
    for suffix in ("", ".head"):
        os.replace(f"{other}{suffix}", f"{path}{suffix}")


@pytest.mark.parametrize("length", [3, 20, 90])
def test_a_replaced_journal_is_followed_from_its_beginning(tmp_path, length):
    """Shorter, as long as and longer than the one before, at the same path."""
    path, other = tmp_path / "j.db", tmp_path / "k.db"
    write_session(path, 1, 20, equity=0.5)
    watched = Watched(None, path)
    assert watched.look()["paper_equity"] == 0.5
    write_session(other, 1, length, equity=1.25)
    replace(path, other)
    found = watched.look()
    assert (found["paper_equity"], found["paper_drawdown"]) == (1.25, 0.0)
    assert (found["paper_bars"], found["paper_events"]) == (length - 1, length)
    for suffix in ("", ".head"):
        os.remove(f"{path}{suffix}")
    assert watched.look() == {}
    write_session(path, 1, 5)
    assert watched.look()["paper_bars"] == 4
