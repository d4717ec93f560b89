"""`bench ppo` on a tiny agent: its rows are there and mean what they say."""

import argparse
import json

import pytest

from nca_trader.agents.policy import make_policy
from nca_trader.cli import bench, bench_ppo
from nca_trader.presets import AgentConfig, LearnerConfig, PolicyConfig

POLICY = PolicyConfig(channels=4, hidden=6, steps=2, dilations=(1, 2), head_hidden=4)
TINY = AgentConfig(policy=POLICY, learner=LearnerConfig())


def test_the_rows_are_there_and_can_be_written(monkeypatch):
    monkeypatch.setattr(bench, "ROUNDS", 1)
    monkeypatch.setattr(bench, "SECONDS", 0.0)
    monkeypatch.setattr(bench_ppo, "_settings", lambda: iter([("tiny", TINY, 2, ())]))
    monkeypatch.setattr(bench_ppo, "SEGMENTS", 32)
    monkeypatch.setattr(bench_ppo, "LENGTH", 8)
    (row,) = bench_ppo.bench_ppo(argparse.Namespace(peers=None))
    assert row["name"] == "tiny, 7 bars, 2 env/segment, 8 devices"
    assert row["envs"] == 64 and row["envs_per_segment"] == 2 and row["retraces"] == 0
    assert row["steps_per_s"] > 0.0 and 0.0 < row["matmul_share"] < 1.0
    assert json.dumps(row)


def test_an_updates_operations_are_those_of_its_matrix_products():
    env = bench_ppo.environment()
    policy = make_policy(TINY, env.spec)
    learn = LearnerConfig(num_segments=8, segment_length=16, num_epochs=2, num_minibatches=1)
    # Of 6 bars that are only seen the first step leaves out 2, and the second 4 more.
    entered, stepped = 8 * 22, 8 * (20 + 16)
    widths = env.spec.num_features + 1
    embed, inject, taps, update = widths * 4, 4 * 6, 3 * 4 * 6, 6 * 4
    products = 2 * (entered * (embed + inject) + stepped * (taps + update))
    assert bench_ppo._update_flops(policy, learn) == pytest.approx(products * (1 + 3 * 2), rel=0.2)
