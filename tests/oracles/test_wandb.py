"""`--track wandb`, offline: what W&B's own file holds is every row of the run.

The file is read by the format that W&B publishes, not by its library: LevelDB's log of protocol
buffers.
"""

import json
import os
import struct
import subprocess
import sys

import pytest
import tiny as experiment

import nca_trader as nca

pb = pytest.importorskip("wandb.proto.wandb_internal_pb2")
BLOCK, HEADER = 32_768, 7


def records_of(path):
    """Every record of a .wandb file, in order."""
    data, at, parts = path.read_bytes(), HEADER, []
    assert data[:4] == b":W&B"
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:  # what is left of a block holds no header
            at += BLOCK - at % BLOCK
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + HEADER])
        parts.append(data[at + HEADER : at + HEADER + length])
        at += HEADER + length
        if kind in (1, 4):  # whole, or the last part
            record = pb.Record()
            record.ParseFromString(b"".join(parts))
            parts = []
            yield record


def kept(folder):
    """Id, configuration, rows and summary of each file below a run's folder, oldest first."""
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        name, config, rows, summary = "", {}, [], {}
        for record in records_of(path):
            if record.WhichOneof("record_type") == "run":
                name = record.run.run_id
                items = record.run.config.update
                config |= {item.key: json.loads(item.value_json) for item in items}
            for item in record.summary.update:
                summary["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
            if items := record.history.item:
                pairs = (("/".join(i.nested_key) or i.key, i.value_json) for i in items)
                rows.append({key: json.loads(value) for key, value in pairs})
        yield name, config, rows, summary


TRAIN = """
import pathlib, sys
import tiny as experiment
import nca_trader as nca
from nca_trader.runs.trackers import track_results
path, steps = pathlib.Path(sys.argv[1]), int(sys.argv[2])
made = experiment.Tiny(path)
run = nca.train(made.env, experiment.AGENT, path / "runs" / "kept", steps=steps, track="wandb:mine")
track_results("wandb:mine", run, "test", {"sharpe": 0.5, "beta": float("nan")})
"""


def test_a_run_and_its_resumption_are_one_run_with_every_row(tiny, tmp_path, root):
    there = tiny.copy(tmp_path / "there")
    places = {
        "PYTHONPATH": os.pathsep.join([str(root), str(root / "tests" / "support")]),
        "HOME": str(tmp_path),
    }
    environment = {**os.environ, **places, "WANDB_MODE": "offline"}
    for steps in (256, 512):
        words = [sys.executable, "-c", TRAIN, str(there.folder), str(steps)]
        subprocess.run(words, env=environment, check=True, cwd=tmp_path)
    run = nca.Run(there.runs / "kept")
    found = list(kept(run.path))
    (name,) = {name for name, *_ in found}
    assert name == (run.path / "wandb.id").read_text()
    rows = [row for _, _, rows, _ in found for row in rows]
    expected = {row["steps"]: row for row in run.metrics()}
    assert [row["env_steps"] for row in rows] == list(expected) and len(rows) == 4
    for row in rows:
        one = expected[row["env_steps"]]
        for key in ("reward", "loss", "entropy", "update"):
            assert row[key] == pytest.approx(one[key], rel=1e-12)
    config = found[0][1]
    assert config["agent"]["policy"]["channels"] == experiment.AGENT.policy.channels
    assert config["seed"] == 0
    assert found[-1][3]["test/sharpe"] == 0.5 and "test/beta" not in found[-1][3]
