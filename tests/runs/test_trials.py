"""The ledger of trials counts every one, whoever writes at the same time."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import nca_trader as nca
from nca_trader.config.records import plain
from nca_trader.data.bars import sample_bars
from nca_trader.errors import StateError
from nca_trader.runs import trials

WRITER = """
import pathlib, sys
from nca_trader.runs import trials
for i in range(40):
    entry = trials.Entry(kind="test", run=sys.argv[2], data=str(i))
    trials.record(pathlib.Path(sys.argv[1]), entry)
"""


def entry(**changes):
    """As an older version wrote it, which had the digest alone."""
    return trials.Entry(**{"kind": "train", "run": "a", "data": "d1", "trials": 3} | changes)


@pytest.mark.heavy
def test_processes_that_write_at_once_lose_no_entry(tmp_path, root):
    env = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", WRITER, str(tmp_path / "runs")]
    writers = [subprocess.Popen([*command, f"w{i}"], env=env) for i in range(3)]
    assert [writer.wait(timeout=500) for writer in writers] == [0] * 3
    found = [(e.run, e.data) for e in trials.entries(tmp_path / "runs")]
    assert sorted(found) == sorted((f"w{i}", str(j)) for i in range(3) for j in range(40))
    # Of one writer, in the order in which it wrote.
    assert [data for run, data in found if run == "w0"] == [str(j) for j in range(40)]


def data(symbols="AB", first="2013-01-01", last="2018-12-31", sha256="d", source="a.csv"):
    """A manifest's record of bars, as far as a count reads it."""
    span = {"symbols": list(symbols), "first": first, "last": last, "source": source}
    return trials.DataRecord(**span, sha256=sha256, note="", rows=9)


def trained(number, **changes):
    return trials.entry_of("train", "a", data(**changes), trials=number)


def look(**changes):
    return trials.entry_of("test", "a", data(**changes))


def test_agents_and_looks_are_counted_apart(tmp_path):
    for one in (
        entry(),
        trained(5),
        look(),
        trials.Entry(kind="test", run="b", data="d2"),
    ):
        trials.record(tmp_path, one)
    assert (trials.count(tmp_path, "train"), trials.count(tmp_path, "test")) == (8, 2)
    assert trials.count(tmp_path, "train", data()) == 5
    # An older version wrote the digest alone.
    assert trials.count(tmp_path, "train", data(symbols="X", sha256="d1")) == 3
    assert trials.count(tmp_path, "test", data(sha256="d2")) == 2


LOOKS = [
    ({}, 1),
    ({"sha256": "another file"}, 1),  # one more bar is no new test span
    ({"symbols": "BC"}, 1),
    ({"symbols": "CD"}, 0),
    ({"first": "2018-12-31", "last": "2025-01-01"}, 1),
    ({"first": "2000-01-01T00:00:00", "last": "2013-01-01T00:00:00.000000000"}, 1),
    ({"first": "2019-01-01", "last": "2025-01-01"}, 0),
    ({"source": "synthetic ou, seed 1"}, 0),
]


@pytest.mark.parametrize(("changes", "expected"), LOOKS)
def test_a_look_counts_for_its_symbols_in_years_that_overlap(tmp_path, changes, expected):
    trials.record(tmp_path, look())
    assert trials.count(tmp_path, "test", data(**changes)) == expected


def test_agents_of_other_markets_are_no_trials_of_this_one(tmp_path):
    trials.record(tmp_path, trained(3, symbols="CD"))
    trials.record(tmp_path, trained(2, first="2005-01-01", last="2010-01-01"))
    assert trials.count(tmp_path, "train", data()) == 2
    draw = {"source": "synthetic ou, seed 1"}
    trials.record(tmp_path, trained(7, **draw))
    assert trials.count(tmp_path, "train", data(**draw)) == 7
    assert trials.count(tmp_path, "train", data(source="synthetic ou, seed 2")) == 0


def test_no_ledger_is_a_count_of_none(tmp_path):
    assert trials.entries(tmp_path) == [] and trials.count(tmp_path, "train") == 0
    assert not (tmp_path / trials.FILE).exists()


@pytest.mark.parametrize("line", ['{"kind": "tr', "17", "[]", '{"kind": "train", "run": "a"}', ""])
def test_a_damaged_line_is_refused_by_its_number(tmp_path, line):
    trials.record(tmp_path, entry())
    with open(tmp_path / trials.FILE, "a") as file:
        file.write(line + "\n")
    trials.record(tmp_path, entry())
    with pytest.raises(StateError, match=r"trials.jsonl line 2: .*Restore the file"):
        trials.count(tmp_path, "train")


def test_a_flipped_byte_is_refused_by_its_line_and_a_line_without_a_checksum_is_read(tmp_path):
    file = tmp_path / trials.FILE
    file.write_text(json.dumps(plain(entry(run="old"))) + "\n")
    trials.record(tmp_path, look())
    written = file.read_bytes()
    assert [e.run for e in trials.entries(tmp_path)] == ["old", "a"]
    start = written.index(b"\n") + 1
    for at in range(start, len(written)):
        changed = bytearray(written)
        changed[at] ^= 1
        file.write_bytes(changed)
        with pytest.raises(StateError, match=r"trials.jsonl line 2: [^\n]*Restore the file[^\n]*$"):
            trials.entries(tmp_path)


def test_a_ledger_that_cannot_be_written_is_said_in_one_line(tmp_path):
    (tmp_path / trials.FILE).mkdir()
    with pytest.raises(StateError, match=r"trials.jsonl: .* cannot be written .*Is a directory"):
        trials.record(tmp_path, entry())


def test_the_log_is_a_table_for_python(tmp_path):
    assert nca.trials(tmp_path).empty
    for run in ("a", "b"):
        trials.record(tmp_path, entry(run=run))
    table = nca.trials(tmp_path)
    assert list(table["run"]) == ["a", "b"] and list(table["trials"]) == [3, 3]


def test_a_digest_tells_orders_apart_and_nothing_else():
    """Row by row in plain Python: a sum of two mixed numbers for each bar and asset."""
    low = high = 0

    def mixed(x):
        x = (x ^ x >> 16) * 0x7FEB352D % 2**32
        x = (x ^ x >> 15) * 0x846CA68B % 2**32
        return x ^ x >> 16

    orders = np.array([[np.nan, 0.5], [0.0, -0.25], [1.0, 0.5]])
    for k, order in enumerate(orders.ravel()):
        bits = int(np.float32(order).view(np.uint32))
        bits = 0 if np.isnan(order) else bits or 0x80000000
        low += mixed(bits ^ mixed(k))
        high += mixed((mixed(bits ^ mixed(k)) + mixed(k)) % 2**32)
    ours = trials.digest_of_targets(orders)
    assert ours == (high % 2**32) << 32 | low % 2**32
    negative = np.where(orders == 0.0, -0.0, orders)
    assert trials.digest_of_targets(negative) == ours
    assert trials.digest_of_targets(orders * (1.0 + 1e-12)) == ours
    stopped = np.zeros(orders.shape, np.int32)
    assert trials.digest_of_targets(orders, 0, stopped) == ours
    stopped[1, 1] = 1
    others = [orders + 1e-6, orders[::-1], orders[:, ::-1], np.nan_to_num(orders), orders[:2]]
    digests = [trials.digest_of_targets(x) for x in others]
    digests += [trials.digest_of_targets(orders, 1), trials.digest_of_targets(orders, 0, stopped)]
    assert len({*digests, ours}) == len(others) + 3


def test_rules_that_are_known_are_not_counted_again_and_their_spread_never_shrinks(tmp_path):
    bars = sample_bars("sp500")[-100:]
    rng = np.random.default_rng(0)
    counted = []

    def tried(digests, ratios, folder=tmp_path, of=bars):
        one = trials.count_rules(
            folder, "sweep x", of, np.array(digests, np.uint64), np.array(ratios)
        )
        counted.append(one.variance)
        return one.number, one.new

    wide = rng.normal(0.0, 0.6, 40)
    assert tried(range(40), wide) == (40, 40)
    assert counted[-1] == pytest.approx(np.var(wide, ddof=1))
    # Alike, and around the best; one of them is there twice, and three were there before.
    near = np.full(30, wide.max()) + 0.01 * rng.standard_normal(30)
    assert tried([*range(37, 66), 65], near) == (66, 26)
    assert tried([99], [np.nan]) == (67, 1) and counted[-1] >= counted[0]
    assert tried(range(40), wide) == (67, 0)
    # On other bars they are other trials, of the same market.
    assert tried(range(3), [9.0, -9.0, 0.0], of=bars[:-1]) == (70, 3)
    # Luck alone gives independent trials a variance of 1, and worse rules are no luck.
    assert counted[-1] == 1.0 and tried([1, 1], [5.0, 5.0], folder=None) == (1, 1)
    assert counted[-1] == 1.0
    log = nca.trials(tmp_path)
    assert list(log["trials"]) == [40, 26, 1, 3] and "targets" not in log
