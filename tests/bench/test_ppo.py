"""`python -m benchmarks ppo` on a tiny agent: its rows are there and mean what they say."""

import argparse
import json
import sys

import pytest

from benchmarks import ppo as bench_ppo
from benchmarks import timing
from nca_trader.agents.policy import make_policy
from nca_trader.config import AgentConfig, LearnerConfig, PolicyConfig
from nca_trader.errors import ConfigError

POLICY = PolicyConfig(channels=4, hidden=6, steps=2, dilations=(1, 2), head_hidden=4)
TINY = AgentConfig(policy=POLICY, learner=LearnerConfig())


@pytest.mark.slow
def test_the_rows_are_there_and_can_be_written(monkeypatch):
    monkeypatch.setattr(timing, "ROUNDS", 1)
    monkeypatch.setattr(timing, "SECONDS", 0.0)
    monkeypatch.setattr(bench_ppo, "_settings", lambda: iter([("tiny", TINY, 2, 8, 2, ())]))
    monkeypatch.setattr(bench_ppo, "SEGMENTS", 64)
    (row,) = bench_ppo.rows(argparse.Namespace(peers=None))
    assert row["name"] == "tiny, 7 bars, 2 env/segment of 8, 2 micro-batches, 8 devices"
    assert row["envs"] == 128 and row["envs_per_segment"] == 2 and row["retraces"] == 0
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


PEER = """
import sys
from benchmarks.peers import clock

def main(envs: int = 1, seconds: float = 1.0, fails: int = 0) -> dict:
    "A peer whose every slice is one call."
    calls = []
    def call():
        calls.append(1)
        if len(calls) > fails > 0:
            raise ValueError("no such market")
    rate = clock.steps_per_second(call, 10, seconds)
    return {"peer": "fake", "version": "1", "steps_per_s": rate, "calls": len(calls)}

clock.run(main)
"""


@pytest.fixture
def fake_peer(monkeypatch, root, tmp_path):
    """A program that times itself as the peers do."""
    script = tmp_path / "peer.py"
    script.write_text(PEER)
    monkeypatch.setenv("PYTHONPATH", str(root))

    def words(python, module, options):
        given = {"seconds": 1e-9} | options
        return [python, str(script), *(f"--{name}={value}" for name, value in given.items())]

    monkeypatch.setattr(timing, "_words", words)


def test_a_peer_is_timed_once_for_each_of_our_rounds(fake_peer):
    for rounds in (1, 7):
        peer = timing.Peer(sys.executable, "fake", {})
        for _ in range(rounds):
            peer.round()
        said = peer.result()
        # One call warms up, then one a slice: never fewer than the median is of.
        assert said["calls"] == 1 + max(rounds, 5) and said["peer"] == "fake 1"


def test_a_peer_that_fails_is_named_with_its_reason(fake_peer):
    with pytest.raises(ConfigError, match=r"fake failed \(ValueError: no such market\); run"):
        peer = timing.Peer(sys.executable, "fake", {"fails": 2})
        peer.round()
        peer.result()


def test_the_first_rows_are_like_for_like():
    first, second, *_ = bench_ppo._settings()
    for name, _, each, _, _, rivals in (first, second):
        assert name == "nano" and each == 1
        assert rivals[0] == bench_ppo.REJAX
        assert all(options["envs"] == bench_ppo.SEGMENTS for _, options in rivals)
    assert first[5][1] == bench_ppo.SB3 and (first[4], second[4]) == (1, bench_ppo.PIECES)
