"""`python -m benchmarks policy` on a few bars: its rows are there and mean what they say."""

import argparse
import json

import numpy as np
import pytest

from benchmarks import policy as bench_policy
from benchmarks import timing
from nca_trader.config import AgentConfig, PolicyConfig
from nca_trader.envs import load_env
from nca_trader.envs.market import spec_of

TINY = AgentConfig(policy=PolicyConfig(channels=4, hidden=6, steps=2, dilations=(1, 2)))


@pytest.fixture
def rows(monkeypatch):
    monkeypatch.setattr(timing, "ROUNDS", 1)
    monkeypatch.setattr(timing, "SECONDS", 0.0)
    monkeypatch.setattr("nca_trader.agents.load_agent", lambda name: TINY)
    monkeypatch.setattr(bench_policy, "REMAT", ("step",))
    args = argparse.Namespace(agent="tiny", peers=None)
    return list(bench_policy.rows(args, segments=2, length=8, bars=5))


@pytest.mark.slow
def test_the_rows_are_there_and_can_be_written(rows):
    names = [row["name"] for row in rows]
    assert names == [
        "tiny windows, forward",
        "tiny windows cut to the last cell, forward",
        *["tiny lattice of 8 bars, forward"] * 2,
        *["tiny lattice of 32 bars, forward"] * 2,
        "tiny lattice, forward and backward",
        "tiny remat step, forward and backward",
        "tiny stream and policy head, one bar per call",
    ]
    assert all(row["steps_per_s"] > 0.0 and row["retraces"] == 0 for row in rows)
    for lattice, windows in zip(rows[2:6], rows[:2] * 2, strict=True):
        assert lattice["ratio"] == lattice["steps_per_s"] / windows["steps_per_s"]
    assert [row["peer"] for row in rows[2:6]] == ["windows", "cut windows"] * 2
    assert all(row["temp_mb"] > 0.0 for row in rows[:-1])
    assert 0.0 < rows[-1]["p50_us"] <= rows[-1]["p99_us"]
    assert all(json.dumps(row) for row in rows)


@pytest.mark.parametrize("halo", [0, 6])
@pytest.mark.slow
def test_windows_and_lattice_are_timed_on_the_same_cells(halo):
    spec = spec_of(load_env("index_daily"), ("SP500", "NASDAQ"))
    case = bench_policy._Case(TINY, spec, 2, 8)
    assert case.policy.receptive_field == 7
    windows = case.loss_of_windows(case.params, halo)
    np.testing.assert_allclose(windows, case.loss(case.params), rtol=1e-5)
