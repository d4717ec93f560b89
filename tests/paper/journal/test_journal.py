"""The journal keeps what it was given, and says so when it could not."""

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import sqlite3
import stat
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nca_trader.errors import ConfigError, StateError
from nca_trader.paper.journal.journal import (
    GENESIS,
    Head,
    Journal,
    canonical,
    read_events,
    verify,
)
from nca_trader.paper.session.halts import refuse_no_journal, resume
from nca_trader.paper.venues.exchange_file import ExchangeFile


def clock():
    return 7


def write(path, count=20):
    with Journal(path, clock) as journal:
        for i in range(count):
            journal.record("run", "bar", str(i), {"close": 100.0 + i / 3}, i)
        return journal.head


def edit(path, sql, *values):
    """Changes the file behind the journal's back, as bit rot or a hand would."""
    db = sqlite3.connect(path)
    with db:
        db.execute(sql, values)
    db.close()


def test_events_come_back_in_order_and_verify(path):
    head = write(path)
    assert verify(path) == head
    events = list(read_events(path))
    assert [e.seq for e in events] == list(range(1, 21))
    assert [e.body["close"] for e in events] == [100.0 + i / 3 for i in range(20)]
    assert [(e.ts_event, e.ts_recv) for e in events] == [(i, 7) for i in range(20)]


@settings(max_examples=20)
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_float64_comes_back_bit_for_bit(value):
    back = json.loads(canonical({"x": value}))["x"]
    assert np.float64(back).tobytes() == np.float64(value).tobytes()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_refused(path, value):
    with Journal(path, clock) as journal:
        with pytest.raises(ValueError):
            journal.record("run", "bar", "1", {"x": value}, 0)
        assert journal.head == Head(0, GENESIS)


def test_canonical_json_is_one_text_for_one_value():
    assert canonical({"b": 1, "a": [0.1, None]}) == '{"a":[0.1,null],"b":1}'
    with pytest.raises(TypeError, match="ndarray"):
        canonical({"a": np.zeros(2)})


def test_the_chain_is_the_hash_of_each_event_and_the_hash_before(path):
    """A second derivation of every link, from the raw rows."""
    write(path, 5)
    db = sqlite3.connect(path)
    previous = "0" * 64
    rows = db.execute(
        "SELECT seq, run, ts_event, ts_recv, kind, key, body, lower(hex(hash)) "
        "FROM event JOIN series ON id = series ORDER BY seq"
    )
    for *fields, link in rows.fetchall():
        text = json.dumps([previous, *fields], separators=(",", ":"))
        assert hashlib.sha256(text.encode()).hexdigest() == link
        previous = link
    db.close()


def test_the_same_event_again_is_no_event(path):
    with Journal(path, clock) as journal:
        assert journal.record("run", "bar", "1", {"a": 1, "b": 2.0}, 5) is True
        head = journal.head
        assert journal.record("run", "bar", "1", {"b": 2.0, "a": 1}, 5) is False
        assert journal.head == head


@pytest.mark.parametrize(
    ("body", "ts", "named"),
    [
        ({"a": [1, {"b": 3.0}]}, 5, r"a\[1\]\.b is 2\.0 there and 3\.0 now"),
        ({"a": [1, {"b": 2.0}]}, 6, "time"),
        ({"a": [1, {"b": 2.0}], "c": 1}, 5, "c is None there and 1 now"),
    ],
)
def test_another_body_under_the_same_key_is_a_divergence(path, body, ts, named):
    with Journal(path, clock) as journal:
        journal.record("run", "bar", "1", {"a": [1, {"b": 2.0}]}, 5)
        head = journal.head
        with pytest.raises(StateError, match=f"diverged at seq 1, bar 1: .*{named}"):
            journal.record("run", "bar", "1", body, ts)
        assert journal.head == head
    assert verify(path) == head


def test_the_same_key_of_another_kind_or_run_is_another_event(path):
    with Journal(path, clock) as journal:
        journal.record("one", "bar", "1", {}, 0)
        journal.record("one", "fill", "1", {}, 0)
        journal.record("two", "bar", "1", {}, 0)
        assert journal.head.seq == 3


def test_an_unknown_kind_is_refused(path):
    with Journal(path, clock) as journal, pytest.raises(ValueError, match="order_intent"):
        journal.record("run", "order", "1", {}, 0)


def test_a_transaction_commits_all_or_nothing(path):
    with Journal(path, clock) as journal:
        with journal.transaction():
            journal.record("run", "bar", "1", {}, 0)
            journal.record("run", "decision", "1", {}, 0)
        kept = journal.head
        with pytest.raises(RuntimeError, match="stop"), journal.transaction():
            journal.record("run", "bar", "2", {}, 0)
            journal.record("run", "risk", "2", {}, 0)  # the first of its kind
            raise RuntimeError("stop")
        assert journal.head == kept
        journal.record("run", "halt", "3", {}, 0)
        journal.record("run", "risk", "3", {}, 0)
        journal.record("run", "bar", "3", {}, 0)
    kinds = [(e.kind, e.key) for e in read_events(path)][2:]
    assert kinds == [("halt", "3"), ("risk", "3"), ("bar", "3")]
    assert verify(path).seq == 5


def test_a_deferred_transaction_is_on_disk_with_the_next_durable_one(path):
    with Journal(path, clock) as journal:
        with journal.transaction(durable=False):
            journal.record("run", "bar", "1", {}, 0)
        assert verify(path).seq == 0
        with journal.transaction(durable=False):
            journal.record("run", "bar", "2", {}, 0)
        with journal.transaction():
            journal.record("run", "bar", "3", {}, 0)
        assert verify(path).seq == 3


def test_deferred_events_are_committed_after_256_and_at_the_end(path):
    with Journal(path, clock) as journal:
        for i in range(300):
            with journal.transaction(durable=False):
                journal.record("run", "bar", str(i), {}, 0)
        assert verify(path).seq == 256
    assert verify(path).seq == 300


def test_transactions_do_not_nest(path):
    with Journal(path, clock) as journal, journal.transaction():
        with pytest.raises(RuntimeError, match="nest"), journal.transaction():
            pass


def test_what_is_committed_is_on_disk_while_the_journal_is_open(path):
    with Journal(path, clock) as journal:
        journal.record("run", "bar", "1", {}, 0)
        assert verify(path) == journal.head
        head = path.with_name("paper.db.head").read_text()
        assert f"1 {journal.head.hash} 1 {journal.head.hash}" in head


@pytest.mark.parametrize(
    ("column", "value"),
    [("body", '{"close":1.0}'), ("ts_event", 999), ("key", "x"), ("hash", b"f" * 32)],
)
@pytest.mark.parametrize("seq", [1, 7, 20])
def test_a_changed_event_is_named(path, column, value, seq):
    write(path)
    edit(path, f"UPDATE event SET {column} = ? WHERE seq = ?", value, seq)
    with pytest.raises(StateError, match=f"damaged at seq {seq}: "):
        verify(path)
    with pytest.raises(StateError, match=f"damaged at seq {seq}: "):
        Journal(path, clock)


def test_a_deleted_event_is_named(path):
    write(path)
    edit(path, "DELETE FROM event WHERE seq = 9")
    with pytest.raises(StateError, match="damaged at seq 9: "):
        verify(path)


def test_a_lost_end_is_seen_by_the_head_file(path):
    write(path)
    edit(path, "DELETE FROM event WHERE seq > 17")
    with pytest.raises(StateError, match="head file says 20: rows from seq 18"):
        verify(path)


def test_a_cut_write_ahead_log_is_seen(path, tmp_path):
    """SQLite itself opens such a copy without a word, the last transactions gone."""
    copy = tmp_path / "copy"
    copy.mkdir()
    with Journal(path, clock) as journal:
        for i in range(50):
            journal.record("run", "bar", str(i), {"close": 1.0}, i)
        for file in tmp_path.glob("paper.db*"):
            shutil.copy(file, copy)
    wal = copy / "paper.db-wal"
    assert verify(copy / "paper.db").seq == 50
    os.truncate(wal, wal.stat().st_size // 2)
    with pytest.raises(StateError, match="head file says 50"):
        verify(copy / "paper.db")


def test_a_journal_rewritten_with_a_good_chain_is_not_the_one_of_the_head_file(path):
    write(path)
    other = path.with_name("other.db")
    with Journal(other, clock) as journal:
        for i in range(25):
            journal.record("run", "bar", str(i), {"close": 200.0}, i)
    shutil.copy(other, path)
    with pytest.raises(StateError, match="damaged at seq 20: the head file has another hash"):
        verify(path)


class Killed(BaseException):
    """The process ends here."""


def cut_off(path, monkeypatch, at, rows=3, begun=2):
    """Leaves the files as a kill does: before the announced commit (0), or after it (1)."""
    write(path, begun)
    journal = Journal(path, clock)
    write_head, calls = journal._head_file.write, []

    def dying(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise Killed
        write_head(*args, **kwargs)
        if at == 0:
            raise Killed

    monkeypatch.setattr(journal._head_file, "write", dying)
    with pytest.raises(Killed), journal.transaction():
        for i in range(rows):
            journal.record("run", "bar", f"new {i}", {}, i)
    journal._opened.close()  # what the kernel does
    return begun + rows * at


@pytest.mark.parametrize("at", [0, 1])
def test_a_kill_around_a_commit_leaves_all_of_it_or_nothing(path, monkeypatch, at):
    reached = cut_off(path, monkeypatch, at)
    assert verify(path).seq == reached
    with Journal(path, clock) as journal:
        journal.record("run", "bar", "later", {}, 0)
    assert verify(path).seq == reached + 1


@pytest.mark.parametrize("at", [0, 1])
def test_a_part_of_the_commit_under_way_is_refused(path, monkeypatch, at):
    """A commit of three rows after a head of two: with one or two of them no kill is to blame."""
    reached = cut_off(path, monkeypatch, at)
    if at:
        edit(path, "DELETE FROM event WHERE seq = 5")
    else:
        append(path, reached)
    with pytest.raises(StateError, match=r"head file says 2: rows from seq 3 .* no commit"):
        verify(path)


def append(path, last, count=1):
    """Adds rows with good hashes at the end, as one does who knows the format."""
    db = sqlite3.connect(path)
    (previous,) = db.execute("SELECT hex(hash) FROM event WHERE seq = ?", (last,)).fetchone()
    previous = previous.lower()
    with db:
        for seq in range(last + 1, last + 1 + count):
            text = json.dumps(
                [previous, seq, "run", 5, 5, "bar", f"added {seq}", "{}"], separators=(",", ":")
            )
            previous = hashlib.sha256(text.encode()).hexdigest()
            db.execute(
                "INSERT INTO event VALUES (?, 1, 5, 5, ?, '{}', ?)",
                (seq, f"added {seq}", bytes.fromhex(previous)),
            )
    db.close()


@pytest.mark.parametrize("count", [1, 2, 300])
def test_rows_beyond_the_head_file_are_refused(path, count):
    write(path)
    append(path, 20, count)
    with pytest.raises(StateError, match=f"ends at seq {20 + count} .* 20: rows from seq 21"):
        verify(path)
    with pytest.raises(StateError, match="no commit wrote"):
        Journal(path, clock)


def test_a_failed_commit_that_was_announced_is_followed_by_another(path, monkeypatch):
    """The announcement that came to nothing is older than the next one, though it says more."""
    with Journal(path, clock) as journal:
        journal.record("run", "bar", "0", {}, 0)
        journal._write_head(journal.head, Head(200, "e" * 64))  # of a commit that failed
        write_head = journal._head_file.write

        def dying(done, after, wait=True):
            if not wait:
                raise Killed
            write_head(done, after, wait)

        monkeypatch.setattr(journal._head_file, "write", dying)
        with pytest.raises(Killed):
            journal.record("run", "bar", "1", {}, 0)
        monkeypatch.undo()
        assert verify(path).seq == 2


ADDED = [
    "CREATE TRIGGER t AFTER INSERT ON event BEGIN DELETE FROM event WHERE seq = 1; END",
    "CREATE VIEW v AS SELECT 1",
    "CREATE TABLE more(x)",
    "CREATE INDEX i ON event(ts_recv)",
    "ANALYZE",
]


@pytest.mark.parametrize("sql", ADDED)
def test_what_is_added_to_the_schema_is_refused(path, sql):
    write(path)
    edit(path, sql)
    for attempt in (verify, lambda p: Journal(p, clock)):
        with pytest.raises(StateError, match="tables are not a journal's"):
            attempt(path)


@pytest.mark.parametrize(
    "sql",
    [
        ("ALTER TABLE event RENAME TO e2", "CREATE VIEW event AS SELECT * FROM e2"),
        ("ALTER TABLE event ADD COLUMN more TEXT",),
        ("ALTER TABLE event RENAME COLUMN body TO text",),
        ("DROP TABLE series",),
    ],
)
def test_other_tables_in_place_of_the_journals_are_refused(path, sql):
    write(path)
    for statement in sql:
        edit(path, statement)
    for attempt in (verify, lambda p: Journal(p, clock)):
        with pytest.raises(StateError, match="tables are not a journal's"):
            attempt(path)
    with pytest.raises(StateError, match="tables are not a journal's"):
        list(read_events(path))


@pytest.mark.parametrize(
    ("sql", "says"),
    [
        ("UPDATE series SET kind = 'fill'", "damaged at seq 1: "),
        ("UPDATE series SET run = 'other'", "damaged at seq 1: "),
        ("INSERT INTO series VALUES (2, 'run', 'halt')", "1 rows of run and kind that no event"),
    ],
)
def test_a_changed_name_of_a_run_or_kind_is_seen(path, sql, says):
    write(path)
    edit(path, sql)
    with pytest.raises(StateError, match=says):
        verify(path)


def test_an_index_that_misses_a_row_is_seen(path):
    """Through it an event would be recorded twice. SQLite's quick check does not look there."""
    write(path)
    sound = path.read_bytes()
    edit(path, "UPDATE event SET key = 'zzzzz' WHERE seq = 7")
    changed = path.read_bytes()
    path.write_bytes(sound)
    db = sqlite3.connect(path)
    page = db.execute(
        "SELECT rootpage FROM sqlite_schema WHERE name = 'sqlite_autoindex_event_1'"
    ).fetchone()[0]
    db.close()
    size = 4096
    path.write_bytes(
        sound[: (page - 1) * size] + changed[(page - 1) * size : page * size] + sound[page * size :]
    )
    with pytest.raises(StateError, match="database is damaged"):
        verify(path)


@pytest.mark.parametrize("suffix", ["", "-wal", ".head"])
@pytest.mark.parametrize("what", ["unlinked", "replaced", "moved"])
def test_a_file_that_is_lost_during_a_session_stops_it(path, suffix, what):
    journal = Journal(path, clock)
    journal.record("run", "bar", "1", {}, 0)
    file = path.with_name(path.name + suffix)
    data = file.read_bytes()
    file.rename(path.with_name("aside"))
    if what == "unlinked":
        path.with_name("aside").unlink()
    if what == "replaced":
        file.write_bytes(data)
    for _ in range(2):  # and it stays so
        with pytest.raises(StateError, match=f"{file.name}: was deleted or replaced"):
            journal.record("run", "bar", "2", {}, 0)
    with pytest.raises(StateError, match="was deleted or replaced"):
        journal.close()


def test_without_the_lock_file_a_second_writer_is_still_refused(path):
    with Journal(path, clock) as journal:
        journal.record("run", "bar", "1", {}, 0)
        path.with_name("paper.db.lock").unlink()
        with pytest.raises(StateError, match="another process is writing"):
            Journal(path, clock)
        journal.record("run", "bar", "2", {}, 0)
    with Journal(path, clock) as journal:
        assert journal.head.seq == 2


@pytest.mark.parametrize("time", [2**63, -(2**63) - 1, 10**30])
def test_a_time_outside_the_years_of_64_bits_is_refused_in_one_line(path, time):
    with Journal(path, clock) as journal:
        with pytest.raises(StateError, match="outside the years 1677 to 2262") as error:
            journal.record("run", "bar", "1", {}, time)
        assert len(str(error.value).splitlines()) == 1
        journal._clock = lambda: time
        with pytest.raises(StateError, match="outside the years"):
            journal.record("run", "bar", "1", {}, 0)
        journal._clock = lambda: np.int64(7)
        assert journal.record("run", "bar", "1", {}, np.int64(2**63 - 1))
    assert verify(path).seq == 1


OLD = """
CREATE TABLE event(
  seq INTEGER PRIMARY KEY, run TEXT NOT NULL, ts_event INTEGER NOT NULL, ts_recv INTEGER NOT NULL,
  kind TEXT NOT NULL, key TEXT NOT NULL, body TEXT NOT NULL,
  prev_hash TEXT NOT NULL, hash TEXT NOT NULL, UNIQUE(run, kind, key)) STRICT
"""


def test_a_journal_of_an_earlier_format_is_refused_and_the_version_that_reads_it_named(path):
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA application_id = {0x6E636174}")
    db.execute(OLD)
    db.commit()
    db.close()
    for read in (verify, lambda path: list(read_events(path)), lambda path: Journal(path, clock)):
        with pytest.raises(StateError, match=r"nca-trader 0\.2\.0 reads it") as error:
            read(path)
        assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("torn", [0, 1, 30, 80])
def test_writes_of_the_head_file_that_are_not_on_disk_may_be_torn(path, last, torn):
    """`last` 0: a power cut while a commit was announced, with the confirmation before it; 1: while
    one was confirmed, whose announcement is on disk."""
    for count in range(17, 20):  # so that each slot is the last one once
        file = path.with_name("paper.db.head")
        with Journal(path, clock) as journal:
            for i in range(count):
                journal.record("run", "bar", str(i), {}, i)
            if not last:  # announced, and not committed
                journal._write_head(journal.head, Head(99, "f" * 64))
            data = bytearray(file.read_bytes())
            assert len(data) == 1536
            order = sorted(range(3), key=lambda k: int(data[k * 512 : k * 512 + 9].split()[0]))
            for slot in order[1 + last :]:
                data[slot * 512 + torn : (slot + 1) * 512] = bytes(512 - torn)
            file.write_bytes(data)
            assert verify(path) == journal.head
        assert verify(path).seq == count


@pytest.mark.parametrize(
    ("data", "message"),
    [(bytes(1024), "missing or empty"), (b"", "missing or empty"), (b"\0x" * 512, "not readable")],
)
def test_a_head_file_with_no_good_slot_is_refused(path, data, message):
    write(path)
    path.with_name("paper.db.head").write_bytes(data)
    with pytest.raises(StateError, match=message):
        verify(path)


@pytest.mark.parametrize("data", [b"", bytes(512)])
def test_a_head_file_that_never_got_its_first_head_is_a_new_journal(path, data):
    path.with_name("paper.db.head").write_bytes(data)
    assert verify_after(path) == 1


def verify_after(path):
    with Journal(path, clock) as journal:
        journal.record("run", "bar", "0", {}, 0)
    return verify(path).seq


def test_a_missing_head_file_is_refused(path):
    write(path)
    path.with_name("paper.db.head").unlink()
    with pytest.raises(StateError, match=r"paper\.db\.head is missing"):
        verify(path)


def test_a_file_of_zeros_inside_is_damage_and_no_traceback(path):
    write(path, 400)
    data = bytearray(path.read_bytes())
    data[4096 * 3 : 4096 * 5] = bytes(8192)
    path.write_bytes(data)
    with pytest.raises(StateError):
        verify(path)
    with pytest.raises(StateError):
        Journal(path, clock)


def test_another_file_is_not_taken_for_a_journal(path):
    for text in ("time,close\n" * 1000, "x"):  # SQLite takes the short one for a new database
        path.write_text(text)
        for attempt in (verify, lambda p: Journal(p, clock)):
            with pytest.raises(StateError, match="not a readable journal"):
                attempt(path)
        assert path.read_text() == text


def test_another_programs_database_is_left_as_it_was(path):
    edit(path, "CREATE TABLE theirs(x)")
    before = path.read_bytes()
    for attempt in (verify, lambda p: Journal(p, clock)):
        with pytest.raises(StateError, match="another program's database"):
            attempt(path)
    assert path.read_bytes() == before


def test_a_missing_journal_or_folder_is_bad_input(tmp_path):
    with pytest.raises(ConfigError, match="no such journal"):
        verify(tmp_path / "none.db")
    with pytest.raises(ConfigError, match="no such folder"):
        Journal(tmp_path / "none" / "paper.db", clock)


def test_a_journal_that_was_deleted_is_not_begun_again_in_silence(path):
    write(path)
    path.unlink()
    with pytest.raises(StateError, match="head file says 20"):
        Journal(path, clock)


def test_verify_changes_nothing_in_the_folder(path, tmp_path):
    write(path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    verify(path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_new_journal_is_a_journal_before_its_first_event(path):
    """A page may look at once, and a copy that is made now is one as well."""
    with Journal(path, clock):
        assert list(read_events(path)) == [] and verify(path).seq == 0
        with contextlib.closing(sqlite3.connect(path)) as other:
            tables = other.execute("SELECT count(*) FROM sqlite_schema WHERE type = 'table'")
            assert tables.fetchone() == (2,)


def test_only_the_owner_can_read_it(path, tmp_path):
    with Journal(path, clock) as journal:
        journal.record("run", "bar", "1", {}, 0)
        modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir()}
    assert set(modes) >= {"paper.db", "paper.db-wal", "paper.db.head", "paper.db.lock"}
    assert set(modes.values()) == {0o600}


def test_the_other_process_is_named(path):
    code = (
        "import sys; from nca_trader.paper.journal.journal import Journal\n"
        "journal = Journal(sys.argv[1], lambda: 0)\n"
        "print('open', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert other.stdout.readline() == "open\n"
        with pytest.raises(StateError, match=f"process {other.pid} on .* is writing"):
            Journal(path, clock)
    finally:
        other.kill()
        other.communicate()
    with Journal(path, clock) as journal:  # the kernel gave the lock back
        assert journal.head.seq == 0


def test_a_full_disk_is_said_and_what_was_committed_stays(path):
    with Journal(path, clock) as journal:
        journal.record("run", "bar", "0", {}, 0)
        pages = journal._db.execute("PRAGMA page_count").fetchone()[0]
        journal._db.execute(f"PRAGMA max_page_count = {pages + 1}")
        with pytest.raises(StateError, match=r"full.*free space"):
            for i in range(1, 100):
                journal.record("run", "bar", str(i), {"text": "x" * 1000}, 0)
        reached = journal.head
        assert verify(path) == reached
        journal._db.execute("PRAGMA max_page_count = 100000")
        journal.record("run", "bar", "after", {}, 0)  # space was freed: it goes on
        assert journal.head.seq == reached.seq + 1
    assert verify(path).seq == reached.seq + 1


def test_a_commit_is_as_durable_as_sqlite_can_make_it(path):
    with Journal(path, clock) as journal:
        assert journal._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert journal._db.execute("PRAGMA synchronous").fetchone() == (2,)


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("suffix", ["", "-wal", "-shm", "-journal", ".head", ".lock", ".books"])
def test_no_file_is_written_through_a_link(tmp_path, suffix, there):
    path, target = tmp_path / "a" / "paper.db", tmp_path / "elsewhere"
    path.parent.mkdir()
    if there:
        with Journal(tmp_path / "whole.db", lambda: 0):
            pass
        target.write_bytes((tmp_path / "whole.db").read_bytes() if not suffix else b"")
    before = target.read_bytes() if there else None
    link = path.with_name(path.name + suffix)
    link.symlink_to(target)
    calls = [lambda: Journal(path, lambda: 0)]
    if suffix in ("", "-wal", "-shm", "-journal"):
        calls.append(lambda: ExchangeFile(path))
    if there and not suffix:  # its halt file would be next to the link, where no session looks
        calls += [lambda: refuse_no_journal(path), lambda: resume(path, "x", 0)]
    for call in calls:
        with pytest.raises(ConfigError, match=f"{re.escape(str(link))}: is a link; remove it"):
            call()
    assert list(path.parent.iterdir()) == [link]
    assert target.exists() == there and (not there or target.read_bytes() == before)
