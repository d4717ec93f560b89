"""The split of a traced update, against one made tick by tick and against a hand count."""

import numpy as np
import pytest

from nca_trader.scale.hlo import read_module
from nca_trader.scale.profile import HOST, Interval, Op, coarse, ops_of, split

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
        Interval(0, 4, A),
        Interval(2, 5, B),
        Interval(5, 9, LOOP),
        Interval(7, 8, A),
        Interval(20, 30, B),
    ]
    found = split(intervals, 1, 12)
    assert found == {"a": 1 + 1 + 1, "b": 1 + 1, "loop": 2 + 1, HOST: 3}


def test_inside_two_loops_the_inner_one_has_the_time():
    outer, inner = Op("outer", True), Op("inner", True)
    found = split([Interval(0, 10, outer), Interval(4, 6, inner)], 0, 10)
    assert found == {"outer": 8, "inner": 2, HOST: 0}


@pytest.mark.parametrize("seed", range(5))
def test_a_split_is_what_a_clock_of_ticks_finds_and_sums_to_the_whole(seed):
    rng = np.random.default_rng(seed)
    intervals = []
    for _ in range(40):
        begin, length = rng.integers(0, 100), rng.integers(1, 15)
        intervals.append(Interval(begin, begin + length, (A, B)[rng.integers(2)]))
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
