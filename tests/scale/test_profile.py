"""`profile` on a tiny perceptron: identities of its figures and a hand count, no speeds."""

import dataclasses
import gzip
import json

import jax
import numpy as np
import pytest
from drawn import random_bars
from tiny import AGENT, ENV

from nca_trader.config import PolicyConfig
from nca_trader.envs.trading import TradingEnv
from nca_trader.learner.train import planned_steps, train
from nca_trader.scale import profile as profiling
from nca_trader.scale.chips import (
    CHIPS,
    KINDS,
    Rates,
    matmul_flops_per_s,
    memory_bytes_per_s,
    rates_of,
)
from nca_trader.scale.hlo import read_module
from nca_trader.scale.profile import (
    HOST,
    Execution,
    Op,
    Profiler,
    bound,
    coarse,
    ops_of,
    profile,
    split,
)
from nca_trader.scale.words import profile_lines

C, H, READ = 8, 16, 32  # widths of the perceptron and of its readout
POLICY = PolicyConfig(kind="mlp", window=1, channels=C, hidden=H, head_hidden=READ)
MLP = dataclasses.replace(AGENT, policy=POLICY)
PEAK = Rates(1e9, 1e12, "made up")


@pytest.fixture(scope="module")
def env():
    return TradingEnv(random_bars(np.random.default_rng(0), 120, 2), ENV)


@pytest.fixture(scope="module")
def watched(env, tmp_path_factory):
    """The profiler of six updates, two of them traced, and the run."""
    folder = tmp_path_factory.mktemp("profile")
    watch = Profiler(folder / "trace", 2)
    run = train(env, MLP, folder / "run", steps=6 * planned_steps(MLP, 1), report=watch)
    return watch, run


@pytest.fixture(scope="module")
def found(env, watched):
    watch, run = watched
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiling, "rates_of", lambda device, dtype: PEAK)
        return profile(env, run.agent_config, watch)


@pytest.mark.slow
def test_products_are_those_counted_by_hand_and_rates_are_of_the_seconds(env, found):
    """A gradient is of the weights everywhere, and of the inputs but for the first layer's."""
    learn, spec = MLP.learner, env.spec
    steps = learn.num_segments * learn.segment_length
    bars = steps + learn.num_segments  # the value after the last step needs one bar more
    first, second = (spec.num_features + 1) * H, H * C
    readout = (C + 3) * READ, READ * (spec.num_actions + 1)
    collected = bars * (first + second) + bars * sum(readout)
    forward = steps * (first + second + sum(readout))
    backward = steps * (first + 2 * second + (2 * C + 3) * READ + 2 * readout[1])
    assert found["flops"] == 2 * spec.num_assets * (collected + forward + backward)
    assert found["loops_of_unknown_length"] == 0
    # Rates are the counts over the seconds.
    assert found["flops_per_s"] == pytest.approx(found["flops"] / found["update_s"])
    assert found["flops_share"] == pytest.approx(found["flops_per_s"] / PEAK.flops)
    assert found["steps_per_update"] == MLP.learner.num_segments * MLP.learner.segment_length
    assert found["steps_per_s"] == pytest.approx(found["steps_per_update"] / found["update_s"])
    low, high = found["update_quartiles_s"]
    assert 0.0 < low <= found["update_s"] <= high
    memory = found["memory"]  # the compiler's, where the device says nothing
    assert memory["needed"] >= memory["arguments"] + memory["temporaries"] > 0
    assert memory["peak"] is None and memory["limit"] is None
    page = "\n".join(profile_lines(found))
    for said in (*found["fine_parts"], "tensorboard --logdir", "ui.perfetto"):
        assert said in page
    assert f"bound     {found['bound']}: " in page and json.dumps(found)


@pytest.mark.slow
def test_the_parts_of_an_update_sum_to_it_and_none_is_missing(found):
    parts = found["parts"]
    assert sum(parts.values()) == pytest.approx(found["update_s"])
    assert sum(found["fine_parts"].values()) == pytest.approx(found["update_s"])
    assert min(parts.values()) >= 0.0
    assert parts["collect"] > 0.0 and parts["learn"] > 0.0 and parts["host"] > 0.0
    assert parts["replay"] == 0.0  # this agent has none
    assert found["updates_traced"] == 2
    assert {name.partition(":")[0] for name in found["fine_parts"]} <= set(parts)


@pytest.mark.slow
def test_the_first_update_is_neither_traced_nor_timed(watched, found):
    watch, run = watched
    assert len(run.metrics()) == 6 and (len(watch.traced), len(watch.timed)) == (2, 3)
    assert found["updates_timed"] == 3 and found["update_s"] == sorted(watch.timed)[1]
    # An update lasts at least as long as its program, which metrics.jsonl times alone.
    programs = [row["steps_per_s"] for row in run.metrics()[3:]]
    assert all(
        seconds >= found["steps_per_update"] / rate
        for seconds, rate in zip(watch.timed, programs, strict=True)
    )


@pytest.mark.slow
def test_the_trace_opens_in_tensorboard_and_perfetto(found):
    """Both files parse, and both have the updates and the program's operations."""
    with gzip.open(found["trace"]["perfetto"]) as file:
        events = json.load(file)["traceEvents"]
    names = [event.get("name", "") for event in events if event.get("ph") == "X"]
    assert names.count("update") == 2
    assert sum(name.startswith(("dot", "copy", "while")) for name in names) > 10
    (plane,) = [
        plane
        for plane in jax.profiler.ProfileData.from_file(found["trace"]["xplane"]).planes
        if plane.name == "/host:CPU"
    ]
    assert sum(event.name == "update" for line in plane.lines for event in line.events) == 2
    assert found["operations_traced"] > 10


@pytest.mark.slow
def test_a_run_of_two_updates_is_described_by_its_traced_one(env, tmp_path):
    watch = Profiler(tmp_path / "trace", 3)
    run = train(env, MLP, tmp_path / "run", steps=2 * planned_steps(MLP, 1), report=watch)
    watch.close()
    found = profile(env, run.agent_config, watch)
    assert (found["updates_traced"], found["updates_timed"]) == (1, 0)
    assert found["update_s"] == watch.traced[0] and found["trace_slowdown"] is None
    assert "as traced, since no update came after" in "\n".join(profile_lines(found))


def test_without_a_second_update_there_is_nothing_to_say(env, tmp_path):
    assert profile(env, MLP, Profiler(tmp_path, 3)) is None


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ((0.9, 0.2, 0.05), "compute"),
        ((0.9, 0.2, 0.5), "host"),
        ((0.4, 0.6, 0.0), "memory"),
        ((0.4, None, 0.0), "compute"),
        ((0.1, 0.6, 0.0), "memory"),
        ((0.1, 0.1, 0.1), "dispatch"),
        ((0.1, None, 0.1), "dispatch"),
    ],
)
def test_the_bound_is_what_fills_the_time(shares, expected):
    assert bound(*shares)[0] == expected


class Chip:
    """A device that is in the table."""

    platform = "tpu"
    device_kind = "TPU v5 lite"


def test_a_chip_in_the_table_is_not_measured():
    found = rates_of(Chip, "bfloat16")
    assert (found.flops, found.bytes) == (197e12, 819e9) and "v5e" in found.source
    found = rates_of(Chip, "float32")
    assert (found.flops, found.bytes) == (197e12 / 6, 819e9) and "6 passes" in found.source
    assert set(KINDS.values()) == set(CHIPS)


def test_another_device_is_measured():
    """A product of 8 x 8 matrices a second is 1,024 operations, at any speed."""
    assert matmul_flops_per_s(size=8, repeats=3) > 0.0
    assert memory_bytes_per_s(size=64, repeats=3) > 0.0


A, B, LOOP = Op("a", False), Op("b", False), Op("loop", True)
TEXT = """HloModule jit_iterate

%body (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %copy.1 = f32[4]{0} copy(%p)
}

%condition (p: f32[4]) -> pred[] {
  %p = f32[4]{0} parameter(0)
  ROOT %yes = pred[] constant(true)
}

%never (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %negate.9 = f32[4]{0} negate(%p), metadata={op_name="jit(iterate)/replay/neg"}
}

%always (p: f32[4]) -> f32[4] {
  ROOT %p = f32[4]{0} parameter(0)
}

ENTRY %main (x: f32[4], which: pred[]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %which = pred[] parameter(1)
  %while.1 = f32[4]{0} while(%x), condition=%condition, body=%body, metadata={op_name="jit(iterate)/collect/while"}
  %either = f32[4]{0} conditional(%which, %while.1, %while.1), true_computation=%always, false_computation=%never, metadata={op_name="jit(iterate)/replay/cond"}
  ROOT %add.2 = f32[4]{0} add(%either, %x), metadata={op_name="jit(iterate)/add"}
}
"""  # noqa: E501


def test_operations_have_the_part_that_their_path_or_their_loop_says():
    ops = ops_of(read_module(TEXT))
    assert ops["while.1"] == Op("collect: accounts", True)
    assert ops["copy.1"] == Op("collect: accounts", False)  # without a path of its own
    assert ops["negate.9"] == Op("replay: update", False)  # of a branch not counted as run
    assert ops["either"].control and ops["add.2"] == Op("other", False)


def test_a_split_by_hand():
    """0 a 2 a+b 4 b 5 loop 7 a 8 loop 9 nothing 10, seen from 1 to 12."""
    intervals = [
        Execution(0, 4, A),
        Execution(2, 5, B),
        Execution(5, 9, LOOP),
        Execution(7, 8, A),
        Execution(20, 30, B),
    ]
    found = split(intervals, 1, 12)
    assert found == {"a": 1 + 1 + 1, "b": 1 + 1, "loop": 2 + 1, HOST: 3}


def test_inside_two_loops_the_inner_one_has_the_time():
    outer, inner = Op("outer", True), Op("inner", True)
    found = split([Execution(0, 10, outer), Execution(4, 6, inner)], 0, 10)
    assert found == {"outer": 8, "inner": 2, HOST: 0}


@pytest.mark.parametrize("seed", range(5))
def test_a_split_is_what_a_clock_of_ticks_finds_and_sums_to_the_whole(seed):
    rng = np.random.default_rng(seed)
    intervals = []
    for _ in range(40):
        begin, length = rng.integers(0, 100), rng.integers(1, 15)
        intervals.append(Execution(begin, begin + length, (A, B)[rng.integers(2)]))
    begin, end = 10, 90
    expected = {"a": 0.0, "b": 0.0, HOST: 0.0}
    for tick in range(begin, end):
        now = [each.op.part for each in intervals if each.begin <= tick < each.end]
        for part in now or [HOST]:
            expected[part] += 1 / max(len(now), 1)
    found = split(intervals, begin, end)
    assert sum(found.values()) == pytest.approx(end - begin)
    assert found == pytest.approx(expected)


def test_parts_are_added_up_by_what_they_are_of():
    found = coarse({"learn: encoder forward": 1.0, "learn: update": 2.0, HOST: 4.0})
    assert found == {"collect": 0.0, "learn": 3.0, "replay": 0.0, "other": 0.0, HOST: 4.0}
