"""`python -m benchmarks env`: what its accounts can be split into."""

import argparse

import jax
import pytest

from benchmarks import env as bench_env
from nca_trader.errors import ConfigError


def test_fewer_accounts_than_devices_are_refused():
    least = len(jax.devices())
    for envs in (-8, 0, least - 1):
        with pytest.raises(ConfigError, match=f"--envs {envs}: give at least {least}"):
            bench_env._index(envs, 0)


def test_accounts_that_fill_no_whole_blocks_are_refused():
    envs = 2 * len(jax.devices()) * bench_env.BLOCK
    with pytest.raises(ConfigError, match=f"--envs={envs + 1} is not a multiple .* {envs}"):
        bench_env._index(envs + 1, 0)


@pytest.mark.parametrize("peers", [None, "python"])
def test_every_row_says_what_each_side_materialises(monkeypatch, peers):
    row = {"name": "x", "steps_per_s": 2.0}
    for part in ("_index", "_one_env", "_vector_env"):
        monkeypatch.setattr(bench_env, part, lambda *_: dict(row))
    theirs = {"peer": "p 1", "steps_per_s": 1.0}
    monkeypatch.setattr(bench_env, "measured_by", lambda *_: theirs)
    rows = list(bench_env.rows(argparse.Namespace(envs=8, peers=peers)))
    assert len(rows) == (7 if peers else 4)
    assert all(row["ours"] for row in rows) and all(row.get("theirs") for row in rows if peers)
