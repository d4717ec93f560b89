"""`bench env`: what its accounts can be split into."""

import jax
import pytest

from nca_trader.cli import bench_env
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
