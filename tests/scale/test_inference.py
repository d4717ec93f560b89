"""Decisions over a mesh are those of one device: batches of windows, and histories along time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nca_trader import ConfigError, make_mesh, make_policy
from nca_trader.config import AgentConfig, PolicyConfig
from nca_trader.config.ranges import switched
from nca_trader.scale.hlo import read_module, runs
from nca_trader.scale.inference import history_over, windows_over
from nca_trader.types import EnvSpec

SMALL = PolicyConfig(channels=4, hidden=8, steps=3, dilations=(1, 2), head_hidden=8)


def made(kind="nca", features=3, assets=2, **changes):
    """A policy, and parameters of which none is zero."""
    spec = EnvSpec(
        symbols=tuple(f"S{n}" for n in range(assets)),
        features=tuple(f"f{n}" for n in range(features)),
        targets=(-1.0, 0.0, 1.0),
        warmup=0,
    )
    own = {"neighbours": "ring"} if kind == "nca" else {"window": 6}
    config = switched(SMALL, kind=kind, **own, **changes)
    policy = make_policy(AgentConfig(policy=config), spec)
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(policy.init, jax.random.key(0))
    params = jax.tree.map(lambda s: (0.4 * rng.normal(size=s.shape)).astype("f4"), shapes)
    return policy, params


def bars(batch, length, assets, features):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(batch, length, assets, features)).astype("f4")
    return x, rng.random((batch, length, assets)) > 0.1


def one_device(policy, params, x, present, seen):
    cells = jax.jit(policy.encode)(params, x, present)
    return policy.act(params, cells[:, -1], seen)


@pytest.mark.parametrize(
    ("kind", "axes"), [("nca", (2, 2, 2)), ("mlp", (8, 1, 1)), ("gru", (1, 4, 2))]
)
def test_a_batch_of_windows_is_decided_as_on_one_device(kind, axes):
    policy, params = made(kind)
    x, present = bars(16, policy.receptive_field, 2, 3)
    seen = np.random.default_rng(2).normal(size=(16, 2, 3)).astype("f4")
    logits, value = windows_over(policy, make_mesh(*axes))(params, x, present, seen)
    assert logits.shape == (16, 2, 3) and value.shape == (16,)
    parts = [shard.data.shape[0] for shard in logits.addressable_shards]
    assert parts == [16 // (axes[0] * axes[1])] * 8
    want = one_device(policy, params, x, present, seen)
    np.testing.assert_allclose(logits, want[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(value, want[1], rtol=1e-5, atol=1e-6)


def test_2048_windows_of_60_bars_and_20_features_are_one_call():
    policy, params = made(features=20, assets=1)
    x, present = bars(2048, 60, 1, 20)
    seen = np.zeros((2048, 1, 3), "f4")
    logits, value = windows_over(policy, make_mesh(8))(params, x, present, seen)
    assert logits.sharding.shard_shape(logits.shape) == (256, 1, 3)
    want = one_device(policy, params, x, present, seen)
    np.testing.assert_allclose(logits, want[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(value, want[1], rtol=1e-5, atol=1e-6)


@functools.cache
def history(kind):
    policy, params = made(kind)
    halo = policy.receptive_field - 1
    x, present = bars(2, 8 * (halo + 2), 2, 3)
    return policy, params, x, present, jax.jit(policy.encode)(params, x, present)


@pytest.mark.parametrize(("kind", "devices"), [("nca", 8), ("nca", 2), ("mlp", 8), ("gru", 8)])
def test_a_history_split_along_time_has_the_cells_of_the_whole(kind, devices):
    policy, params, x, present, want = history(kind)
    cells = history_over(policy, make_mesh(devices))(params, x, present)
    assert cells.sharding.shard_shape(cells.shape)[1] == x.shape[1] // devices
    np.testing.assert_allclose(cells, want, rtol=1e-5, atol=1e-6)


def test_halos_cross_devices_once():
    policy, params, x, present, _ = history("nca")
    jitted = history_over(policy, make_mesh(8)).__closure__
    (program,) = (cell.cell_contents for cell in jitted if hasattr(cell.cell_contents, "lower"))
    text = program.lower(params, x, present).compile().as_text()
    kinds = ("collective-permute", "all-reduce", "all-gather", "all-to-all", "reduce-scatter")
    found = [run.instruction.opcode.removesuffix("-start") for run in runs(read_module(text))]
    assert [kind for kind in found if kind in kinds] == ["collective-permute"]


@pytest.mark.parametrize("length", [8 * 7, 8 * 12 + 1])
def test_a_history_that_is_too_short_or_does_not_divide_is_refused(length):
    policy, params = made()
    encode = history_over(policy, make_mesh(8))
    with pytest.raises(ConfigError, match=f"{length} bars over 8 devices: .* the 8 that .* 64 on"):
        encode(params, *(jnp.asarray(a) for a in bars(1, length, 2, 3)))
