"""The search for a batch, over compilers that are rules: what it finds, in how many tries."""

import dataclasses

import pytest
from tiny import AGENT, ENV

from nca_trader.scale.chips import slice_of
from nca_trader.scale.compiled import Answer, Question
from nca_trader.scale.hlo import Cost, Part
from nca_trader.scale.plan import fewest_as_fast, largest_batch, most_that_fits

V5E = slice_of("v5e-8")


def compiler(share):
    """An attempt whose programs need `share(segments)` of the memory, and what it was asked."""
    asked = []

    def attempt(segments):
        asked.append(segments)
        needed = share(segments)
        return needed is not None and needed <= 1.0, needed

    return attempt, asked


@pytest.mark.parametrize("unit", [1, 8, 64])
@pytest.mark.parametrize("most", [1, 2, 3, 7, 16, 17, 100, 1_000, 5_000, 100_000])
def test_bytes_on_a_line_take_few_tries(most, unit):
    attempt, asked = compiler(lambda segments: 0.01 + 0.99 * segments / (most * unit))
    found = most_that_fits(attempt, unit, unit)
    assert 0 < found <= most * unit and found % unit == 0
    # Within a sixteenth, of the segments or of the memory, or the next is one too many.
    assert found + max(unit, found / 16) >= most * unit * 15 / 16
    assert len(asked) == len(set(asked)) <= (3 if most == 1 else 6)


SHAPES = {
    "a jump": lambda n: 0.3 if n <= 5_000 else 2.0,
    "a jump whose bytes nobody says": lambda n: 0.3 if n <= 5_000 else None,
    "a square": lambda n: (n / 5_000) ** 2,
    "a root": lambda n: (n / 5_000) ** 0.25,
    "nothing at first": lambda n: max(1e-4, (n - 4_000) / 1_000),
    "all at first": lambda n: 0.9 + 0.1 * n / 5_000,
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("begin", [8, 800, 40_000])
def test_bytes_on_no_line_take_more(shape, begin):
    attempt, asked = compiler(SHAPES[shape])
    found = most_that_fits(attempt, begin, 8)
    fits = SHAPES[shape](found)
    assert fits <= 1.0
    over = SHAPES[shape](found + max(8, found // 16))
    assert fits >= 15 / 16 or over is None or over > 1.0
    assert len(asked) == len(set(asked)) <= 20


@pytest.mark.parametrize("begin", [8, 80])
def test_where_nothing_fits_the_least_is_the_last_try(begin):
    attempt, asked = compiler(lambda segments: 1.5 + segments)
    assert most_that_fits(attempt, begin, 8) == 0
    assert asked == [begin] if begin == 8 else asked == [begin, 8]


@pytest.mark.parametrize(("overhead", "lowest"), [(0, 8), (100, 1_900), (10, 190)])
def test_the_fewest_as_fast_is_found_to_a_factor_of_two(overhead, lowest):
    # n / (n + overhead) of the best rate: 95% from 19 times the overhead on.
    tried = {n: n / (n + overhead) for n in (8, 128, 80_000)}

    def attempt(segments):
        assert segments not in tried and segments % 8 == 0
        tried[segments] = segments / (segments + overhead)
        return True, 0.0

    found = fewest_as_fast(lambda: dict(sorted(tried.items())), attempt, 8)
    assert lowest <= found <= 2 * lowest and len(tried) <= 8


def test_a_rate_that_falls_again_is_the_best_where_it_was():
    def speed(n):
        return n if n <= 512 else 512 - n / 200

    tried = {n: speed(n) for n in (8, 512, 40_000)}

    def attempt(segments):
        tried[segments] = speed(segments)
        return True, 0.0

    assert fewest_as_fast(lambda: dict(sorted(tried.items())), attempt, 8) == 512


def answer_of(segments, limit=1e9):
    """10^6 bytes and 1,000 cycles a segment, 100,000 cycles beside them."""
    needed = 10**6 * segments
    cost = Cost({"other": Part(100_000 + 1_000 * segments, 0)}, {}, 0)
    return Answer(needed <= limit, limit, needed, {}, 1, cost, 0, 7, 9, segments * 16, 1.0)


def searched(found=None, **changes):
    learner = dataclasses.replace(AGENT.learner, **changes)
    agent, asked = dataclasses.replace(AGENT, learner=learner), []

    def ask(question):
        assert not question.search
        asked.append(question.agent.learner.num_segments)
        return answer_of(asked[-1])

    question = Question(ENV, agent, None, V5E)
    return largest_batch(ask, question, found), asked


def test_both_batches_come_with_what_was_tried():
    found, asked = searched(answer_of(8))
    assert 8 not in asked and len(asked) <= 7  # known from before
    assert [each["num_segments"] for each in found["tries"]] == sorted([8, *asked])
    largest, efficient = found["largest"], found["efficient"]
    assert 1_000 * 15 / 16 <= largest["num_segments"] <= 1_000
    assert largest["hbm_bytes_per_chip"] == 10**6 * largest["num_segments"]
    # n / (n + 100) of a rate whose best is seen at `largest`.
    best = largest["num_segments"] / (largest["num_segments"] + 100)
    assert efficient["num_segments"] / (efficient["num_segments"] + 100) >= 0.95 * best
    assert efficient["steps"] == 16 * efficient["num_segments"]


def test_what_was_cut_into_micro_batches_is_asked_again():
    cut = answer_of(8)._replace(micro_batches=4, fits=True)
    assert 8 in searched(cut)[1]
    nothing, asked = searched(answer_of(8)._replace(fits=False, needed=10**10))
    assert (nothing["largest"], nothing["efficient"], asked) == (None, None, [])
