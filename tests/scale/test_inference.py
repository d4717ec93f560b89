"""Inference over a mesh, as docs/guides/devices.md shows it, decides as one device does."""

import jax
import numpy as np
import pytest
from drawn import random_params
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from nca_trader import make_mesh, make_policy
from nca_trader.config import AgentConfig, PolicyConfig
from nca_trader.config.ranges import switch
from nca_trader.scale.hlo import COLLECTIVES, read_module, runs
from nca_trader.types import EnvSpec

SMALL = PolicyConfig(channels=4, hidden=8, steps=2, dilations=(1, 2), head_hidden=8)


def made(kind, batch, length):
    """A policy, parameters that are not zero, and bars [B, T, A, F] with some missing."""
    spec = EnvSpec(symbols=("X", "Y"), features=("a", "b", "c"), targets=(-1.0, 0.0, 1.0), warmup=0)
    own = {"neighbours": "ring"} if kind == "nca" else {"window": 6}
    policy = make_policy(AgentConfig(policy=switch(SMALL, kind=kind, **own)), spec)
    params, rng = random_params(policy, 0, 0.4), np.random.default_rng(1)
    length = length or policy.receptive_field
    x = rng.normal(size=(batch, length, 2, 3)).astype("f4")
    return policy, params, x, rng.random((batch, length, 2)) > 0.1


@pytest.mark.parametrize("kind", ["nca", "mlp", "gru"])
@pytest.mark.few(1)
def test_a_batch_of_windows_is_decided_as_on_one_device(kind):
    policy, params, x, present = made(kind, batch=16, length=None)
    account = np.random.default_rng(2).normal(size=(16, 2, 3)).astype("f4")

    def decide(params, x, present, account):
        return policy.act(params, policy.encode(params, x, present)[:, -1], account)

    batch = P("data")
    decide_over = jax.jit(
        jax.shard_map(
            decide, mesh=make_mesh(8), in_specs=(P(), batch, batch, batch), out_specs=batch
        )
    )
    found = decide_over(params, x, present, account)
    assert found[0].sharding.shard_shape(found[0].shape) == (2, 2, 3)
    for got, want in zip(found, jax.jit(decide)(params, x, present, account), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["nca", "mlp", "gru"])
@pytest.mark.few(1)
def test_a_history_split_along_time_has_the_cells_of_the_whole(kind):
    policy, params, x, present = made(kind, batch=2, length=8 * 32)
    time = NamedSharding(make_mesh(8), P(None, "data"))
    split = jax.device_put((x, present), time)
    encode = jax.jit(policy.encode, out_shardings=time)
    np.testing.assert_allclose(
        encode(params, *split), jax.jit(policy.encode)(params, x, present), rtol=1e-5, atol=1e-6
    )
    if kind == "nca":  # devices exchange the bars and cells at their borders, and no history
        module = read_module(str(encode.lower(params, *split).compile().as_text()))
        moved = [run.instruction for run in runs(module) if run.instruction.opcode in COLLECTIVES]
        assert {each.opcode for each in moved} == {"collective-permute"}
        assert all(shape.bytes < x.nbytes // 8 for each in moved for shape in each.shapes)
