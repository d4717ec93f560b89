"""The search for a batch, over compilers that are rules: what it finds, and how soon."""

import dataclasses

import pytest
from tiny import AGENT, ENV

from nca_trader.scale.chips import slice_of
from nca_trader.scale.compiled import Needs, Question
from nca_trader.scale.hlo import Part, ProgramCost
from nca_trader.scale.plan import MOST, largest_batch

V5E = slice_of("v5e-8")


def search(share, begin=8, unit=8, cycles=lambda n: 100_000 + 1_000 * n):
    """The last report, what was asked about memory, and what was compiled.

    n segments need `share(n)` of 10^9 bytes, and their code a tenth of it, which only a compilation
    counts.
    """
    learner = dataclasses.replace(
        AGENT.learner, num_segments=begin, logical_shards=unit, num_minibatches=1
    )
    agent = dataclasses.replace(AGENT, learner=learner)
    asked, built = [], []

    def answer_of(n, memory_only):
        needed = share(n)
        fits = needed is not None and needed <= 1.0
        whole = fits and not memory_only
        cost = ProgramCost({"other": Part(cycles(n), 0)}, {}, 0) if whole else None
        needed = None if needed is None else int(needed * 1e9) + whole * 10**8
        kinds = {"code": 10**8} if whole else {}
        return Needs(fits, 1e9, needed, kinds, cost, 0, 7, 9, n * 16, 1.0)

    def ask(question):
        segments = question.agent.learner.num_segments
        before = asked if question.memory_only else built
        assert segments % unit == 0 and segments not in before
        before.append(segments)
        return answer_of(segments, question.memory_only)

    question = Question(ENV, agent, None, V5E)
    found = None
    for found in largest_batch(ask, question, answer_of(begin, False)):
        tried = {begin, *asked, *built}
        assert [each["num_segments"] for each in found["tries"]] == sorted(tried)
    assert len(asked) <= MOST and len(built) <= 2
    return found, asked, built


@pytest.mark.parametrize("unit", [1, 8, 64])
@pytest.mark.parametrize("most", [1, 2, 3, 7, 16, 17, 100, 1_000, 5_000, 100_000])
@pytest.mark.parametrize("empty", [0.001, 0.01, 0.3])
def test_bytes_on_a_line_are_found_to_a_sixteenth(most, unit, empty):
    def share(n):
        return empty + (1 - empty) * n / (most * unit)

    found, *_ = search(share, begin=unit, unit=unit)
    largest = found["largest"]["num_segments"]
    assert 0 < largest <= most * unit and largest % unit == 0
    # Within a sixteenth, of the segments or of the memory, or the next is one too many.
    assert share(largest) >= 15 / 16 or share(largest + max(unit, largest / 16)) > 1.0


def test_two_batches_predict_the_largest_and_the_third_verifies():
    found, asked, built = search(lambda n: 0.01 + 1e-4 * n, begin=8, cycles=lambda n: 10**9 + n)
    # 8 segments need 0.0108: a line through 0 has 31 / 32 of the memory at 717, a line through
    # both at 9,587.5. A 32nd of the first is 2.8 times 8, of the second 37 times: so multiples of
    # 2 and of 32 times 8. Nothing is gained by a smaller batch where the cycles are the same.
    assert asked == [704, 9_472] and built == [24]
    assert found["largest"]["num_segments"] == 9_472
    assert found["largest"]["hbm_bytes_per_chip"] == pytest.approx(0.9572e9)
    # A rate that grows with the segments has 95% at 95% of them, 8,998.4.
    assert found["efficient"]["num_segments"] == 9_216
    assert found["efficient"]["hbm_bytes_per_chip"] == pytest.approx(0.9316e9)


SHAPES = {
    "a jump": lambda n: 0.3 if n <= 5_000 else 2.0,
    "a jump whose bytes nobody says": lambda n: 0.3 if n <= 5_000 else None,
    "a square": lambda n: (n / 5_000) ** 2,
    "a root": lambda n: (n / 5_000) ** 0.25,
    "nothing at first": lambda n: max(1e-4, (n - 4_000) / 1_000),
    "all at first": lambda n: 0.9 + 0.1 * n / 5_000,
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("begin", [8, 800, 4_800, 40_000])
def test_bytes_on_no_line_end_after_as_few_with_what_fits(shape, begin):
    found, asked, built = search(SHAPES[shape], begin=begin)
    fits = [n for n in (begin, *asked, *built) if (SHAPES[shape](n) or 2.0) <= 1.0]
    assert found["largest"]["num_segments"] == max(fits)
    assert SHAPES[shape](found["efficient"]["num_segments"]) <= 1.0


@pytest.mark.parametrize("begin", [8, 80])
def test_where_nothing_fits_the_least_is_the_last_try(begin):
    found, asked, _ = search(lambda n: 1.5 + n, begin=begin)
    assert asked == [] if begin == 8 else asked == [8]
    assert found["largest"] is None and found["efficient"] is None


@pytest.mark.parametrize(("overhead", "lowest"), [(0, 8), (100, 1_888), (10, 192)])
def test_the_fewest_as_fast_have_95_percent_of_the_rate_of_the_largest(overhead, lowest):
    # n / (n + overhead) of the best rate; of 96,256 segments that is as good as 1.
    found, _, built = search(
        lambda n: 1e-9 + n / 1e5, cycles=lambda n: 1_000_000 * (n + overhead), begin=8
    )
    assert built == [24]
    efficient, largest = found["efficient"], found["largest"]
    n, most = efficient["num_segments"], largest["num_segments"]
    assert n == lowest and most == 96_256
    rate = [size / (size + overhead) for size in (n, most)]
    assert efficient["steps_per_s"] / largest["steps_per_s"] == pytest.approx(rate[0] / rate[1])
    assert rate[0] >= 0.95 * rate[1]
    fewer = n - max(8, n // 32)
    assert n == 8 or fewer / (fewer + overhead) < 0.95 * rate[1]


def test_nothing_follows_from_cycles_that_do_not_grow():
    found, _, built = search(lambda n: n / 40_000, cycles=lambda n: 10**6 - n)
    assert found["efficient"] is None and built == [24]
    assert found["largest"] is not None and found["largest"]["steps_per_s"] is None


def test_cycles_that_grow_faster_than_the_batch_leave_it_as_it_is():
    found, *_ = search(lambda n: n / 40_000, begin=512, cycles=lambda n: 10_000 * n**2)
    assert found["efficient"]["num_segments"] == 512
