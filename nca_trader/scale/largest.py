"""The largest batch that fits a chip, and the smallest that is as fast, in few compilations.

A compilation takes a minute, and the bytes of a program grow almost by a line in its segments: two
compilations tell where the line meets the memory, and what stands there is compiled to see.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from nca_trader.scale.chips import Chip
from nca_trader.scale.compiled import Answer, Ask, Question

Report = dict[str, Any]
Rate = Callable[[Answer, Chip], float]
CLOSE = 0.95  # of the best rate: what a smaller batch may lose
NEAR = 1 / 16  # of the batch, or of the memory: what the largest may leave
STRIDE = 16  # times the first batch is the second, far enough from it to see a slope
FURTHEST = 4 * STRIDE  # times a batch is the next, whatever the line says


class Size(NamedTuple):
    """Of a program: whether it fits, and the share of the memory it needs, None if unknown."""

    fits: bool
    share: float | None


def largest_batch(
    ask: Ask, question: Question, rate: Rate, say: Callable[[str], None], found: Answer | None
) -> Report:
    """The most segments that fit without more micro-batches, and the fewest that are as fast.

    Args:
      question: about the batch to begin with. rate: steps a second, as estimated, of an answer.
      found: what is known of that batch already; None, or what was cut into more micro-batches,
        is asked again.

    Returns:
      `largest` (to a sixteenth, of the segments or of the memory) and `efficient` (the fewest
      segments within 5% of the best estimated rate, to a factor of 2), each a try; `tries`, all
      of them. None where not even the least that the mesh allows fits.
    """
    learner, chip = question.agent.learner, question.there.of
    unit = learner.logical_shards * learner.num_minibatches
    tries: dict[int, Report] = {}

    def attempt(segments: int) -> Size:
        changed = dataclasses.replace(learner, num_segments=segments)
        agent = dataclasses.replace(question.agent, learner=changed)
        known = found if segments == learner.num_segments else None
        if known is None or known.micro_batches != learner.micro_batches:
            say(f"compiling with {segments:,} segments ...")
            known = ask(question._replace(agent=agent, search=False))
        tries[segments] = {
            "num_segments": segments,
            "steps": known.steps,
            "fits": known.fits,
            "hbm_bytes_per_chip": None if known.needed is None else known.needed * chip.devices,
            "steps_per_s": rate(known, chip) if known.fits else None,
        }
        return Size(known.fits, None if known.needed is None else known.needed / known.limit)

    most = most_that_fits(attempt, learner.num_segments, unit)
    fewest = fewest_as_fast(lambda: _rates(tries), attempt, unit) if most else None
    return {
        "largest": tries[most] if most else None,
        "efficient": None if fewest is None else tries[fewest],
        "tries": [each for _, each in sorted(tries.items())],
    }


def _rates(tries: dict[int, Report]) -> dict[int, float]:
    """Of the batches that fit, smallest first."""
    return {n: each["steps_per_s"] for n, each in sorted(tries.items()) if each["fits"]}


def most_that_fits(attempt: Callable[[int], Size], begin: int, unit: int) -> int:
    """The most segments that fit, or `NEAR` below; 0 if not even `unit` does.

    The next is where the line through the two largest batches meets the memory, kept between what
    fits and what does not; a step that leaves more than half of that range is followed by one to
    its middle, so that the search ends soon where bytes are no line.

    Args:
      attempt: tries a number of segments, a multiple of `unit`. begin: the first.
    """
    shares: dict[int, float] = {}
    low, high, segments, halve = 0, 0, begin, False
    while True:
        before, (fits, share) = high - low, attempt(segments)
        if share is not None:
            shares[segments] = share
        low, high = (segments, high) if fits else (low, segments)
        if not low and high > unit:
            segments = unit
            continue
        if not low or (share is not None and fits and share >= 1 - NEAR):
            return low
        if not high:
            segments = _multiple(_meets(shares, STRIDE * low), unit, 2 * low, FURTHEST * low)
            continue
        if high - low <= max(unit, low * NEAR):
            return low
        halve = not halve and 0 < before < 2 * (high - low)
        middle = (low + high) / 2
        aim = middle if halve else _meets(shares, middle)
        segments = _multiple(aim, unit, low + unit, high - unit)


def _meets(shares: dict[int, float], otherwise: float) -> float:
    """Where the line through the two largest batches is half of `NEAR` below the whole memory."""
    if len(shares) < 2:
        return otherwise
    (a, share_a), (b, share_b) = sorted(shares.items())[-2:]
    slope = (share_b - share_a) / (b - a)
    return a + (1 - NEAR / 2 - share_a) / slope if slope > 0 else otherwise


def _multiple(wanted: float, unit: int, least: int, most: int) -> int:
    """The multiple of `unit` at or below `wanted`, within `least` and `most`, two multiples."""
    return min(max(int(wanted // unit) * unit, least), most)


def fewest_as_fast(
    rates: Callable[[], dict[int, float]], attempt: Callable[[int], Size], unit: int
) -> int:
    """The fewest segments within `CLOSE` of the best rate; half as many would be too slow.

    Args:
      rates: of what was tried and fits, by segments, smallest first. attempt: adds one.
    """
    while True:
        tried = rates()
        numbers, enough = list(tried), CLOSE * max(tried.values())
        at = next(i for i, n in enumerate(numbers) if tried[n] >= enough)
        if at == 0 or numbers[at] <= 2 * numbers[at - 1]:
            return numbers[at]
        below, above = numbers[at - 1], numbers[at]
        attempt(_multiple(math.sqrt(below * above), unit, below + unit, above - unit))
