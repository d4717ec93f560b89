"""`bench policy` on a few bars: its rows are there and mean what they say."""

import argparse
import json

import pytest

from nca_trader.cli import bench, bench_policy
from nca_trader.presets import AgentConfig, PolicyConfig

TINY = AgentConfig(policy=PolicyConfig(channels=4, hidden=6, steps=2, dilations=(1, 2)))


@pytest.fixture
def rows(monkeypatch):
    monkeypatch.setattr(bench, "ROUNDS", 1)
    monkeypatch.setattr(bench, "SECONDS", 0.0)
    monkeypatch.setattr("nca_trader.agents.presets.load_agent", lambda name: TINY)
    monkeypatch.setattr(bench_policy, "REMAT", ("step",))
    args = argparse.Namespace(agent="tiny", peers=None)
    return list(bench_policy.bench_policy(args, segments=2, length=8, bars=5))


def test_the_rows_are_there_and_can_be_written(rows):
    names = [row["name"] for row in rows]
    assert names == [
        "tiny windows, forward",
        "tiny lattice of 8 bars, forward",
        "tiny lattice of 32 bars, forward",
        "tiny lattice, forward and backward",
        "tiny remat step, forward and backward",
        "tiny stream and readout, a bar a call",
    ]
    assert all(row["steps_per_s"] > 0.0 and row["retraces"] == 0 for row in rows)
    for lattice in rows[1:3]:
        assert lattice["ratio"] == lattice["steps_per_s"] / rows[0]["steps_per_s"]
    assert all(row["temp_mb"] > 0.0 for row in rows[:5])
    assert 0.0 < rows[5]["p50_us"] <= rows[5]["p99_us"]
    assert all(json.dumps(row) for row in rows)
