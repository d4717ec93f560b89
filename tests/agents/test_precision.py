"""Precision presets: what is refused and why; bfloat16 cells; sums that stay float32."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import random_params

from nca_trader import AgentConfig, ConfigError, load_agent, make_policy
from nca_trader.config import PolicyConfig, PrecisionConfig
from nca_trader.types import EnvSpec

SPEC = EnvSpec(symbols=("A", "B"), features=("x", "y"), targets=(-0.5, 0.0, 0.5), warmup=0)
F32, BF16 = PrecisionConfig(), PrecisionConfig(matmul="bfloat16")
COMPUTE = PrecisionConfig(matmul="bfloat16", compute="bfloat16")
KINDS = ("nca", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gru", "mlp")))


def policy_of(kind, precision):
    given = {
        "nca": {"hidden": 6, "neighbours": "ring", "steps": 2, "dilations": (1, 2)},
        "mlp": {"hidden": 6, "window": 4},
        "gru": {"window": 4},
    }
    config = PolicyConfig(kind=kind, channels=4, head_hidden=5, **given[kind])
    return make_policy(AgentConfig(policy=config, precision=precision), SPEC)


def bars(length):
    rng = np.random.default_rng(1)
    return rng.normal(size=(length, 2, 2)).astype("f4"), rng.random((length, 2)) > 0.1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"matmul": "float16"}, r"matmul='float16' ends at 65,504 .* take 'bfloat16'"),
        ({"compute": "float16"}, r"gradients leave that range, and the loss is not scaled"),
        ({"params": "float16"}, r"params='float16'"),
        ({"params": "bfloat16"}, r"would lose updates below 1/256 of a weight, .* take 'float32'"),
        ({"compute": "bfloat16"}, r"take matmul='bfloat16' with it"),
        ({"matmul": "bf16"}, "matmul"),
    ],
)
def test_what_would_lose_digits_is_refused_with_the_reason(changes, reason):
    with pytest.raises(ConfigError, match=reason):
        dataclasses.replace(F32, **changes)
    with pytest.raises(ConfigError, match=reason):
        load_agent("nano", [f"precision.{name}={value}" for name, value in changes.items()])


@pytest.mark.parametrize("kind", KINDS)
def test_lattice_and_stream_agree_in_bfloat16_and_give_float32(kind):
    exact, policy = policy_of(kind, F32), policy_of(kind, COMPUTE)
    params, (x, present) = random_params(policy), bars(12)
    cells, wanted = (
        np.asarray(jax.jit(each.encode)(params, x[None], present[None])[0])
        for each in (policy, exact)
    )
    assert cells.dtype == np.float32
    # 8 bits of a number are right to 1/256; a few steps of them to a few times that.
    assert 1e-4 < np.abs(cells - wanted).max() < 0.05
    state, stream = policy.begin(), jax.jit(policy.stream)
    for row in range(len(x)):
        state, newest = stream(params, state, x[row], present[row])
    assert newest.dtype == np.float32
    np.testing.assert_allclose(newest, cells[-1], atol=0.03)


@pytest.mark.heavy
@pytest.mark.parametrize("kind", KINDS[:2])
def test_cells_are_kept_in_bfloat16_where_compute_says_so(kind):
    """Op by op: compiled whole, XLA may drop a rounding."""
    for precision, kept in ((BF16, False), (COMPUTE, True)):
        policy = policy_of(kind, precision)
        params, (x, present) = random_params(policy), bars(6)
        cells = policy.encode(params, x[None], present[None])
        assert bool((cells == cells.astype(jnp.bfloat16).astype(jnp.float32)).all()) == kept


@pytest.mark.heavy
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_that_sum_over_thousands_of_cells_keep_their_digits(kind):
    """In bfloat16 such a sum is 75 % off after 4,096 terms, 11 % after 512."""
    policies = [policy_of(kind, precision) for precision in (F32, COMPUTE)]
    params, (x, present) = random_params(policies[0]), bars(2000)

    def gradient(policy):
        def loss(params):
            return policy.encode(params, x[None], present[None]).sum()

        return jax.jit(jax.grad(loss))(params)[kind]

    exact, rounded = map(gradient, policies)
    for name, leaf in rounded.items():
        assert leaf.dtype == jnp.float32, name
        error = np.linalg.norm(leaf - exact[name]) / np.linalg.norm(exact[name])
        assert error < 0.03, (name, error)
