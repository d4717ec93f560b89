"""A small file in a folder of ours takes no more memory than one of its size may."""

import dataclasses
import json
import shutil
import subprocess
import sys
import zipfile

import numpy as np
import orbax.checkpoint as ocp
import pandas as pd
import pytest
import tensorstore
from conftest import ROOT
from tiny import AGENT

import nca_trader as nca
from nca_trader import machine
from nca_trader.data.shards import write_shards
from nca_trader.errors import RunError, StateError
from nca_trader.paper.session.agents import usual_of
from nca_trader.runs.checkpoint import FILES, Checkpoints
from nca_trader.runs.folder import read_returns

BARS = nca.sample_bars("sp500")[:60]
BIAS = ".params['head']['bias']"


@pytest.fixture
def run(tiny, tmp_path):
    """With its newest checkpoint alone."""
    path = shutil.copytree(tiny.path, tmp_path / "run")
    shutil.rmtree(path / "checkpoints" / "1")
    return path


@pytest.fixture
def unread(monkeypatch):
    """No leaf may be unpacked."""

    def restore(*args, **kwargs):
        raise AssertionError("a leaf was unpacked")

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "restore", restore)


def with_leaves(run, change):
    """Write the run's newest checkpoint again, with other leaves and right checksums."""
    with Checkpoints(run / "checkpoints") as checkpoints:
        step, leaves = checkpoints.newest()
        checkpoints._write(step + 1, {k: change(k, v) for k, v in leaves.items()}, {})


def test_leaves_of_other_shapes_are_refused_before_they_are_unpacked(run, request):
    with_leaves(run, lambda k, v: np.zeros(1 << 14, np.float32) if k == BIAS else v)
    request.getfixturevalue("unread")
    with pytest.raises(RunError, match=r"bias'\] is float32\[16384\] there and float32\["):
        nca.Run(run).params()


def test_a_state_of_other_shapes_is_refused_before_it_is_unpacked(tiny, run, request):
    with_leaves(run, lambda k, v: np.zeros(1 << 14, v.dtype) if "opt_state" in k else v)
    nca.Run(run).params()  # whose leaves are the right ones, and all that is read
    request.getfixturevalue("unread")
    with pytest.raises(RunError, match=r"opt_state.* is \w+\[16384\] there and"):
        nca.train(tiny.env, AGENT, run)


def test_a_leaf_that_unpacks_to_more_than_its_shape_is_refused(run, unread, caplog):
    (folder,) = (run / "checkpoints").glob("[0-9]*")
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{folder}/leaves/"})
    store, key = store.result(), f"{BIAS}/.zarray"
    about = json.loads(store.read(key).result().value)
    store.write(key, json.dumps(about | {"chunks": [1 << 32]})).result()
    (folder / FILES).unlink()
    with pytest.raises(StateError, match="none of the checkpoints"):
        nca.Run(run).params()
    assert "a leaf unpacks to more than its shape" in caplog.text


@pytest.mark.parametrize(("packed", "most"), [(10, 100), (80, 160)])
def test_a_file_may_unpack_to_the_larger_of_two_bounds(monkeypatch, packed, most):
    monkeypatch.setattr(machine, "LARGE", 100)
    monkeypatch.setattr(machine, "PACKED", 2)
    machine.refuse_packed(most, packed)
    with pytest.raises(ValueError, match=f"{packed} bytes unpack to {most + 1}"):
        machine.refuse_packed(most + 1, packed)


def test_parameters_that_are_packed_too_well_are_refused(run, monkeypatch, caplog):
    with_leaves(run, lambda k, v: np.zeros_like(v))
    monkeypatch.setattr(machine, "LARGE", 0)
    monkeypatch.setattr(machine, "PACKED", 0.01)
    with pytest.raises(StateError, match="none of the checkpoints"):
        nca.Run(run).params()
    assert "bytes unpack to" in caplog.text


@pytest.fixture
def small(monkeypatch):
    """A file may unpack to few bytes, so that few are too many."""
    monkeypatch.setattr(machine, "LARGE", 1 << 20)


def constant(path, *names, rows=1 << 14, **more):
    table = pd.DataFrame(dict.fromkeys(names, np.full(rows, 0.5)) | more)
    table.to_parquet(path, compression="zstd")
    return path


def test_tables_of_a_run_are_bounded(run, small):
    many = [str(i) for i in range(64)]
    constant(run / "selection.parquet", *many)
    constant(run / "backtest.parquet", "turnover", "equity", *many)
    mine = nca.Run(run)
    for read in (read_returns, usual_of):
        with pytest.raises(StateError, match=r"parquet: cannot be read \([\d,]+ bytes unpack to 8"):
            read(mine)
    constant(run / "backtest.parquet", "equity", rows=100, turnover=["x" * 10_000] * 100)
    assert usual_of(mine).turnover is None  # texts are not read


def test_a_packed_shard_is_refused(tmp_path, small):
    shards = write_shards(BARS, tmp_path)
    (shard,) = shards
    file = tmp_path / shard.path
    constant(file, "time", "open", "high", "low", "close", "volume", rows=1 << 16)
    other = dataclasses.replace(shard, rows=1 << 16, sha256=machine.sha256_of(file))
    with pytest.raises(StateError, match=r"000000.parquet: is not a shard .*bytes unpack to"):
        shards.read(other)


def test_a_packed_part_of_stored_work_is_refused(tmp_path, small):
    def sweep():
        return nca.sweep(
            BARS, nca.rules.sma_cross, {"fast": [2, 3]}, resume=tmp_path / "s", trials=None
        )

    sweep()
    (part,) = (tmp_path / "s").glob("part-*.npz")
    good = part.read_bytes()
    np.savez_compressed(part, equity=np.zeros(1 << 24, bool))
    assert part.stat().st_size < 1 << 17
    with pytest.raises(StateError, match=r"not a part of a sweep \([\d,]+ bytes unpack to 16,7"):
        sweep()
    # A member whose header says more than it holds.
    with zipfile.ZipFile(part, "w") as archive, archive.open("equity.npy", "w") as file:
        head = {"descr": "<f8", "fortran_order": False, "shape": (1 << 44,)}
        np.lib.format.write_array_header_1_0(file, head)
    with pytest.raises(StateError, match=r"not a part of a sweep \("):
        sweep()
    part.write_bytes(good)
    assert len(sweep()) == 2


CHILD = """
import resource, sys, time
import nca_trader as nca
nca.Run(sys.argv[1]).each
before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
try:
    nca.Run(sys.argv[2]).params()
except nca.NcaTraderError as error:
    print(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20)
print(time.process_time() - begin)
"""


@pytest.mark.heavy
def test_a_run_that_unpacks_to_gigabytes_takes_no_memory(run, tiny):
    with_leaves(run, lambda k, v: np.zeros(3 << 28, np.float32) if k == BIAS else v)
    size = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
    assert size < 2 << 20
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tiny.path), str(run)],
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    said, grew, seconds = done.stdout.splitlines()
    assert "is float32[805306368] there" in said and float(grew) < 0.3 and float(seconds) < 10.0
