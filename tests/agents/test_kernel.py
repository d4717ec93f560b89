"""The kernel of a gradient, interpreted: its values beside those of the same steps through XLA."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from nca_trader import make_mesh
from nca_trader.agents import kernel
from nca_trader.agents.lattice import CHANNELS_LAST
from nca_trader.agents.nca import NCA
from nca_trader.errors import ConfigError
from nca_trader.presets import AgentConfig, MeshConfig, PolicyConfig, PrecisionConfig
from nca_trader.types import EnvSpec

CONFIG = PolicyConfig(channels=4, hidden=6, steps=4, dilations=(1, 2, 8))
FAST = {"xla_backend_optimization_level": 0}


class Case(NamedTuple):
    """bars, batch, assets, halo. steps, dilations: of the rule."""

    bars: int
    batch: int
    assets: int
    halo: int
    steps: int
    dilations: tuple[int, ...]


CASES = {
    "whole chunks and tiles": Case(64, 8, 1, 0, 3, (1, 2, 8)),
    "two assets, neither whole": Case(45, 5, 2, 0, 2, (3, 1)),
    "a halo that all steps cut": Case(75, 3, 3, 24, 4, (1, 2, 8)),
    "a halo wider than what is seen": Case(70, 9, 1, 30, 2, (1, 2)),
    "fewer bars than a dilation": Case(5, 2, 1, 0, 3, (1, 2, 8)),
    "one step": Case(40, 2, 1, 2, 1, (1,)),
}


def gradients(case, remat, matmul="float32", seed=0):
    """The loss by every parameter and by the features, and the cells."""
    rng = np.random.default_rng(seed)
    symbols = tuple("ABC"[: case.assets])
    spec = EnvSpec(symbols=symbols, features=("rsi", "macd"), targets=(0.0, 1.0), warmup=0)
    config = dataclasses.replace(CONFIG, steps=case.steps, dilations=case.dilations, remat=remat)
    precision = PrecisionConfig(matmul=matmul)
    module = nnx.eval_shape(lambda: NCA(spec, config, precision, nnx.Rngs(0)))
    graph, state = nnx.split(module)
    # No parameter is zero: an untrained rule changes nothing and would hide a fault.
    params = jax.tree.map(lambda leaf: jnp.asarray(0.5 * rng.normal(size=leaf.shape)), state)
    x = jnp.asarray(rng.normal(size=(case.batch, case.bars, case.assets, 2)), jnp.float32)
    present = jnp.asarray(rng.random(x.shape[:3]) < 0.9)
    weight = jnp.asarray(rng.normal(size=(case.batch, case.bars - case.halo, case.assets, 4)))

    reached = []
    by_kernel = kernel.gradient

    @functools.partial(jax.jit, compiler_options=FAST)
    def run(params, x):
        def lose(params, x):
            encode = nnx.merge(graph, params).encode
            cells = encode(CHANNELS_LAST, x, present, None, case.halo)
            return (weight * cells).sum(), cells

        return jax.grad(lose, argnums=(0, 1), has_aux=True)(params, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "gradient", lambda *a, **k: reached.append(1) or by_kernel(*a, **k))
        found = jax.tree.leaves(run(params, x))
    assert bool(reached) == (remat == "kernel")
    return found


def furthest(got, expected):
    """The largest difference of two arrays over the largest entry."""
    return np.abs(got - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize("case", CASES)
def test_the_kernel_s_gradient_is_that_of_the_steps(case):
    got, expected = (gradients(CASES[case], remat) for remat in ("kernel", "none"))
    assert len(got) == 8  # six parameters, the features, the cells
    assert max(map(furthest, got, expected)) < 1e-5


def test_with_bfloat16_products_it_differs_by_their_rounding_alone():
    """On a CPU XLA's form keeps slopes in float32; on a TPU it rounds them, as the kernel does."""
    case = CASES["a halo that all steps cut"]
    got, expected = (gradients(case, remat, "bfloat16") for remat in ("kernel", "none"))
    exact = gradients(case, "none")
    rounding = max(map(furthest, expected, exact))
    assert 1e-4 < rounding
    assert max(map(furthest, got, expected)) < 2 * rounding
    # Its own products are rounded: of a gradient, beside that of its own products in float32.
    assert min(map(furthest, got[:6], gradients(case, "kernel")[:6])) > 1e-4


def test_on_several_devices_gradients_of_the_weights_are_summed(monkeypatch):
    """Cells lie on two devices, weights on both: as in a learner's step.

    jax interprets no kernel there; what each device makes of its own cells is XLA's gradient here.
    """
    plan = kernel.Plan((1, 2), (0, 0, 0), 0.1, "float32")
    rng = np.random.default_rng(0)
    drawn = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    rule = kernel.Rule(drawn(12, 6), drawn(6, 4), drawn(4))
    cells = (drawn(9, 1, 4, 4), jnp.ones((9, 1, 4, 1)), drawn(9, 1, 4, 6))
    mesh = make_mesh(2)

    def forward(rule, state, mask, injected):
        for dilation in plan.dilations:
            seen = CHANNELS_LAST.taps(rule.taps, state, dilation, [], "float32", 0)
            change = CHANNELS_LAST.dense(rule.update, jax.nn.relu(seen + injected), "float32")
            state = 0.9 * state + jnp.tanh(change + CHANNELS_LAST.column(rule.bias))
        return state

    def gradient(_, rule, state, injected, slope, interpret=False):
        mask, *rows = (x[:, None] for x in (state, state, injected, slope))
        back = jax.vjp(lambda *args: forward(args[0], args[1], mask, args[2]), rule, *rows[:2])[1]
        of_rule, *of_rows = back(rows[2])
        return of_rule, *(x[:, 0] for x in of_rows)

    monkeypatch.setattr(kernel, "gradient", gradient)
    batch = P(None, None, mesh.axis_names)

    def lose(run, *args):
        return (run(*args) ** 2).sum()

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), *[batch] * 3), out_specs=P())
    def on_each(*args):
        steps = functools.partial(kernel.steps, plan, forward)
        return jax.grad(lambda rule: jax.lax.psum(lose(steps, rule, *args[1:]), mesh.axis_names))(
            args[0]
        )

    expected = jax.jit(jax.grad(functools.partial(lose, forward)))(rule, *cells)
    for a, b in zip(jax.jit(on_each)(rule, *cells), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_what_it_does_not_know_is_refused():
    for change in ({"neighbours": "ring"}, {"fire_rate": 0.5}):
        with pytest.raises(ConfigError, match="remat='kernel' knows no neighbours"):
            dataclasses.replace(CONFIG, remat="kernel", **change)
    policy = dataclasses.replace(CONFIG, remat="kernel")
    rounded = PrecisionConfig(matmul="bfloat16", compute="bfloat16")
    with pytest.raises(ConfigError, match=r"keeps cells in float32; give precision\.compute"):
        AgentConfig(policy=policy, precision=rounded)
    with pytest.raises(ConfigError, match=r"whole hidden layer on a chip; give mesh\.model = 1"):
        AgentConfig(policy=policy, mesh=MeshConfig(devices=2, model=2))


def test_a_block_that_no_chip_holds_is_refused_when_a_gradient_is_taken():
    plan = kernel.Plan((1,), (0, 0), 0.1, "float32")
    like = jax.ShapeDtypeStruct
    shapes = [(100_000, 1, 8, 16), (100_000, 1, 8, 1), (100_000, 1, 8, 64)]
    rule = kernel.Rule(*(like(shape, jnp.float32) for shape in ((48, 64), (64, 16), (16,))))
    cells = [like(shape, jnp.float32) for shape in shapes]
    run = functools.partial(kernel.steps, plan, lambda rule, state, mask, injected: state)
    assert jax.eval_shape(run, rule, *cells).shape == shapes[0]  # as a backtest does
    with pytest.raises(ConfigError, match=r"8 rows of 100000 bars, .* 58 MiB are the most; g"):
        jax.eval_shape(jax.grad(lambda *args: run(*args).sum()), rule, *cells)


def test_no_chunk_reads_a_state_that_no_chunk_computed():
    """What lies there, memory of whatever ran before, may be NaN, and 0 times NaN is NaN."""
    plan = kernel.Plan((1, 8, 32), (0, 2, 18, 82), 0.1, "float32")
    # Of the result bar 82 on is asked for, chunk 2. The step before reaches 64 bars further back
    # than bar 64, where that chunk begins; so to the beginning.
    assert kernel.first_chunks(plan, 0) == [0, 0, 2]
    assert kernel.first_chunks(plan, 20) == [0, 1, 3]  # bar 102 is in chunk 3; 96 - 64 = 32
    for early in range(32):
        firsts = kernel.first_chunks(plan, early)
        for k, dilation in list(enumerate(plan.dilations))[1:]:
            reached = firsts[k] * kernel.BARS - 2 * dilation
            assert max(reached, 0) >= firsts[k - 1] * kernel.BARS
        assert all(
            32 * n <= early + first for n, first in zip(firsts, plan.firsts[1:], strict=True)
        )


@pytest.mark.parametrize(
    ("channels", "hidden", "steps", "bars", "dtype", "mebibytes"),
    [
        (16, 64, 5, 704, "float32", 65.5),
        (16, 64, 5, 1_024, "float32", 94.0),
        (32, 128, 5, 704, "float32", 65.1),
    ],
)
def test_a_block_takes_what_the_compiler_says(channels, hidden, steps, bars, dtype, mebibytes):
    """What libtpu 0.0.51 refused for a v5p, in its own words; narrow rows fill whole lanes."""
    plan = kernel.Plan(tuple(2**k for k in range(steps)), (), 0.1, dtype)
    counted = kernel.block_bytes(plan, bars, channels, hidden) / 2**20
    assert counted > kernel.MOST_BYTES / 2**20
    assert counted == pytest.approx(mebibytes, rel=0.05)
