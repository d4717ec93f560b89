"""What the TPU compiler makes of the automaton's rule: near the floor, and on the chip."""

import dataclasses
import functools
import importlib.util
import math
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import random_bars
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tiny import ENV

from nca_trader.agents import load_agent, nca
from nca_trader.agents.policy import make_policy
from nca_trader.envs.trading import TradingEnv
from nca_trader.scale.chips import slice_of
from nca_trader.scale.compiled import devices_of
from nca_trader.scale.hlo import Module, cost_of, flops_of, read_module, runs
from nca_trader.types import EnvSpec

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="the extra tpu-plan is not installed"
)
HERE = slice_of("v5e:2x2")
WIDTH = 128


class Core(NamedTuple):
    """A compiled encoder. over: cycles of its steps over the floor of the matrix units.

    inside: bytes that its steps make in main memory, but for what the program returns.
    temporaries: bytes of main memory. hbm: bytes read there and written.
    """

    over: float
    inside: int
    temporaries: int
    hbm: int
    module: Module


def compiled(batch, length, gradient=False, **changes):
    """The encoder of `base`, one asset, for one chip.

    Forward it decides at each window's last bar; a gradient, by the parameters, is of all cells.
    """
    agent = load_agent("base")
    changes.setdefault("steps", len(changes.get("dilations", agent.policy.dilations)))
    agent = dataclasses.replace(agent, policy=dataclasses.replace(agent.policy, **changes))
    env = TradingEnv(random_bars(np.random.default_rng(0), 120, 1), ENV)
    policy = make_policy(agent, env.spec)
    mesh = Mesh(np.array(devices_of(HERE)[:1]), ("data",), axis_types=(AxisType.Auto,))
    like = functools.partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, P()))
    shapes = jax.eval_shape(policy.init, jax.random.key(0))
    params = jax.tree.map(lambda a: like(a.shape, a.dtype), shapes)
    seen = like((batch, length, 1, env.spec.num_features), jnp.float32)
    there = like((batch, length, 1), jnp.bool_)
    cells = like((length, batch, WIDTH), jnp.float32)  # as a rollout reads them, bar by bar

    def encode(params, x, present):
        return policy.encode(params, x, present)[:, :, 0].swapaxes(0, 1)

    def backward(params, x, present, of_cells):
        return jax.vjp(lambda params: encode(params, x, present), params)[1](of_cells)

    def forward(params, x, present):
        return encode(params, x, present)[-1]

    function, args = (backward, (cells,)) if gradient else (forward, ())
    program = jax.jit(function).lower(params, seen, there, *args).compile()
    return measured(read_module(program.as_text()), program.memory_analysis())


def measured(module, memory):
    cycles = flops = inside = 0
    for run in runs(module):
        each, final = run.instruction, module.computations[module.entry] is run.computation
        if not re.search(r"\bstep\b", run.path) or each.opcode in ("while", "tuple"):
            continue
        cycles += run.times * each.cycles
        flops += run.times * flops_of(module, each, run.computation)
        if each.cycles and not (final and each.is_root):
            inside += run.times * sum(s.bytes for s in each.shapes if s.space == 0)
    return Core(
        over=cycles * HERE.of.flops_per_cycle / flops if flops else math.nan,
        inside=inside,
        temporaries=memory.temp_size_in_bytes,
        hbm=cost_of(module, 1).hbm_bytes,
        module=module,
    )


@pytest.mark.slow
def test_the_rule_runs_within_1_4_of_the_floor_and_its_state_stays_on_the_chip(environment):
    batch, length = 32, 384
    found = compiled(batch, length)
    assert found.over <= 1.4
    cells = 4 * batch * length * WIDTH
    # Features and weights come in, a window's last cell goes out: no state is ever written there.
    assert found.inside == 0 and found.temporaries == 0
    assert found.hbm < 0.1 * cells


@pytest.mark.slow
def test_a_large_batch_is_encoded_in_parts_that_stay_on_the_chip(environment, monkeypatch):
    batch, length, changes = 2048, 60, {"dilations": (1, 16)}
    parts = nca.num_chunks((batch, length, 1), WIDTH)
    found = compiled(batch, length, **changes)
    loops = [r for r in runs(found.module) if r.instruction.opcode == "while"]
    assert parts == 8 and len(loops) == 1
    cells = 4 * batch * length * WIDTH
    assert found.hbm < 1.3 * cells
    monkeypatch.setattr(nca, "CHUNK_BYTES", 2**40)
    whole = compiled(batch, length, **changes)
    assert whole.over > 1.5 * found.over and whole.hbm > 2 * found.hbm


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "step", "dots"])
def test_what_a_gradient_keeps_in_main_memory_is_next_to_nothing(environment, remat):
    """In parts, whatever `remat` says; at once, 1,024 windows keep three arrays of all cells."""
    batch, length = 1024, 60
    assert nca.num_chunks((batch, length, 1), WIDTH) == 4
    found = compiled(batch, length, dilations=(1, 16), gradient=True, remat=remat)
    assert found.temporaries < 0.1 * 4 * batch * length * WIDTH  # of one state of all cells


@pytest.mark.slow
def test_the_readout_of_several_accounts_and_assets_is_little_code(environment):
    """By rows of decisions, as on a CPU, it is 15 MB and takes the compiler ten times as long."""
    targets = (-1.0, 0.0, 1.0)
    spec = EnvSpec(symbols=("A", "B"), features=("return_1",), targets=targets, warmup=0)
    policy = make_policy(load_agent("nano"), spec)
    mesh = Mesh(np.array(devices_of(HERE)[:1]), ("data",), axis_types=(AxisType.Auto,))
    like = functools.partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, P()))
    shapes = jax.eval_shape(policy.init, jax.random.key(0))
    params = jax.tree.map(lambda a: like(a.shape, a.dtype), shapes)
    cells = like((64, 128, 1, 2, 16), jnp.float32)
    seen = like((64, 128, 4, 2, 3), jnp.float32)
    done = jax.jit(policy.act).lower(params, cells, seen).compile()
    assert done.memory_analysis().generated_code_size_in_bytes < 2e6
