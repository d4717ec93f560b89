"""Cycles, products, traffic and collectives of programs whose cost is counted by hand."""

import importlib.util
import pathlib

import numpy as np
import pytest
import tpu_programs as known

from nca_trader.scale.hlo import Collective, cost_of, part_of, read_module
from nca_trader.scale.plan import wire_seconds

SAMPLES = pathlib.Path(__file__).parent / "samples"


def cost(name, devices=4):
    return cost_of(read_module((SAMPLES / f"{name}.hlo").read_text()), devices)


def test_products_in_loops_are_counted_as_often_as_they_run():
    each = 2 * known.ROWS * known.WIDTH * known.WIDTH
    assert cost("nested_scan").flops == known.OUTER * known.INNER * each


def test_a_causal_convolution_counts_no_padding():
    met = sum(known.BARS - tap * known.DILATION for tap in range(known.TAPS))
    assert cost("causal_convolution").flops == 2 * known.CELLS * met * known.WIDTH**2


def test_collectives_are_counted_with_their_loops():
    each = known.ROWS * known.WIDTH * 2  # bytes of bfloat16
    assert cost("nested_scan").collectives == {
        "all-reduce": Collective(known.OUTER, known.OUTER * each, ("bf16",), 4)
    }


def test_a_scan_reads_its_array_once_and_not_once_a_step():
    traffic = cost("running_sum").hbm_bytes
    read, written = 4 * np.prod(known.BIG), 4 * np.prod(known.BIG[1:])
    assert traffic == pytest.approx(read + written, rel=1e-4)


def test_cycles_are_those_of_each_instruction_as_often_as_it_runs():
    text = (SAMPLES / "causal_convolution.hlo").read_text()
    assert cost("causal_convolution").cycles == 5904
    dearer = text.replace('"estimated_cycles":"5904"', '"estimated_cycles":"6000"')
    assert cost_of(read_module(dearer), 4).parts["collect: accounts"].cycles == 6000


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("jit(iterate)/shard_map/collect/while/body/add", "collect: accounts"),
        ("jit(iterate)/shard_map/collect/encode/cond/branch_0_fun/dot", "collect: encoder"),
        ("jit(iterate)/shard_map/learn/while/body/jvp()/encode/dot", "learn: encoder forward"),
        ("jit(f)/learn/while/body/transpose(jvp(encode))/dot", "learn: encoder backward"),
        ("jit(f)/learn/while/body/transpose(jvp())/mul", "learn: loss backward"),
        ("jit(f)/learn/while/body/sqrt", "learn: update"),
        ("jit(f)/vmap(replay)/cond/branch_1_fun/add", "replay: update"),
        ("jit(f)/shard_map/gather", "other"),
        ("jit(learning)/recollected", "other"),
        ("", "other"),
    ],
)
def test_a_path_says_what_an_instruction_is_part_of(path, part):
    assert part_of(path) == part


def test_a_ring_sends_what_its_steps_send():
    """Simulated: n devices in a ring pass pieces of their bytes to the next, step by step."""
    n, size, rate = 8, 8_000, 1e3
    piece = size / n
    scattered = sum(piece for _ in range(n - 1))  # reduce-scatter: n - 1 steps of a piece
    gathered = sum(piece for _ in range(n - 1))
    of = {kind: Collective(1, size, ("f32",), n) for kind in ("all-reduce", "reduce-scatter")}
    assert wire_seconds("all-reduce", of["all-reduce"], rate) == (scattered + gathered) / rate
    assert wire_seconds("reduce-scatter", of["reduce-scatter"], rate) == scattered / rate
    whole = sum(size for _ in range(n - 1))  # all-gather: everyone's bytes pass by
    assert wire_seconds("all-gather", Collective(1, size, ("f32",), n), rate) == whole / rate
    alone = Collective(1, size, ("f32",), 1)
    assert wire_seconds("all-reduce", alone, rate) == 0.0


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="the extra tpu-plan is not installed"
)
def test_the_installed_compiler_gives_programs_of_the_same_cost(environment):
    for name, program in known.compiled().items():
        fresh, kept = cost_of(read_module(program.as_text()), 4), cost(name)
        assert fresh.flops == kept.flops and fresh.collectives == kept.collectives, name
