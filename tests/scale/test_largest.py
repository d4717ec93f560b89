"""The search for a batch, over compilers that are rules: what it finds, and how soon."""

import dataclasses

import pytest
from tiny import AGENT, ENV

from nca_trader.scale.chips import slice_of
from nca_trader.scale.compiled import Needs, Question
from nca_trader.scale.hlo import Part, ProgramCost
from nca_trader.scale.plan import MOST, largest_batch, next_as_fast

V5E = slice_of("v5e-8")


def search(share, begin=8, unit=8, cycles=lambda n: 100_000 + 1_000 * n, known=True):
    """The last report, and what was asked, where n segments need `share(n)` of 10^9 bytes."""
    learner = dataclasses.replace(
        AGENT.learner, num_segments=begin, logical_shards=unit, num_minibatches=1
    )
    agent, asked = dataclasses.replace(AGENT, learner=learner), []

    def answer_of(n):
        needed = share(n)
        fits = needed is not None and needed <= 1.0
        cost = ProgramCost({"other": Part(cycles(n), 0)}, {}, 0) if fits else None
        needed = None if needed is None else int(needed * 1e9)
        return Needs(fits, 1e9, needed, {}, 1, cost, 0, 7, 9, n * 16, 1.0)

    def ask(question):
        assert not question.search
        asked.append(question.agent.learner.num_segments)
        assert asked[-1] % unit == 0 and len(asked) == len(set(asked))
        return answer_of(asked[-1])

    question = Question(ENV, agent, None, V5E)
    found = None
    for found in largest_batch(ask, question, answer_of(begin) if known else None):
        tried = [begin, *asked] if known else asked
        assert [each["num_segments"] for each in found["tries"]] == sorted(tried)
    assert len(asked) <= MOST
    return found, asked


@pytest.mark.parametrize("unit", [1, 8, 64])
@pytest.mark.parametrize("most", [1, 2, 3, 7, 16, 17, 100, 1_000, 5_000, 100_000])
@pytest.mark.parametrize("empty", [0.001, 0.01, 0.3])
def test_bytes_on_a_line_are_found_to_a_sixteenth(most, unit, empty):
    def share(n):
        return empty + (1 - empty) * n / (most * unit)

    found, _ = search(share, begin=unit, unit=unit)
    largest = found["largest"]["num_segments"]
    assert 0 < largest <= most * unit and largest % unit == 0
    # Within a sixteenth, of the segments or of the memory, or the next is one too many.
    assert share(largest) >= 15 / 16 or share(largest + max(unit, largest / 16)) > 1.0


def test_two_compilations_predict_and_the_third_verifies():
    found, asked = search(lambda n: 0.01 + 1e-4 * n, begin=8, cycles=lambda n: 10**9)
    # 8 segments need 0.0108: a line through 0 has 31 / 32 of the memory at 717, a line through
    # both at 9,587.5. Nothing is gained by a smaller batch where the cycles are the same for all.
    assert asked == [712, 9_584]
    assert found["largest"] == found["efficient"]
    assert found["largest"]["hbm_bytes_per_chip"] == pytest.approx(0.9684e9)


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
    found, asked = search(SHAPES[shape], begin=begin)
    fits = [n for n in (begin, *asked) if (SHAPES[shape](n) or 2.0) <= 1.0]
    assert found["largest"]["num_segments"] == max(fits)
    assert SHAPES[shape](found["efficient"]["num_segments"]) <= 1.0


@pytest.mark.parametrize("begin", [8, 80])
def test_where_nothing_fits_the_least_is_the_last_try(begin):
    found, asked = search(lambda n: 1.5 + n, begin=begin)
    assert asked == [] if begin == 8 else asked == [8]
    assert found["largest"] is None and found["efficient"] is None


@pytest.mark.parametrize(("overhead", "lowest"), [(0, 8), (100, 1_900), (10, 190)])
def test_the_fewest_as_fast_is_found_to_a_factor_of_two(overhead, lowest):
    # n / (n + overhead) of the best rate: 95% from 19 times the overhead on.
    found, _ = search(lambda n: 1e-9 + n / 1e5, cycles=lambda n: 1_000 * (n + overhead), begin=8)
    efficient = found["efficient"]["num_segments"]
    assert 0.9 * lowest <= efficient <= 2 * lowest


def test_a_rate_that_falls_again_is_the_best_where_it_was():
    assert next_as_fast({8: 8.0, 512: 512.0, 40_000: 312.0}, 8) == 0
    found, _ = search(lambda n: n / 40_000, begin=512, cycles=lambda n: n**2)
    assert found["efficient"]["num_segments"] == 512


def test_what_was_cut_into_micro_batches_is_asked_again():
    assert search(lambda n: n / 1e4, begin=8, known=False)[1][0] == 8
