"""Is one checkout faster than another, or is it noise? Processes in turns, and a test of ranks.

    python -m benchmarks.compare BEFORE AFTER --rounds 8 -- env

BEFORE and AFTER are two checkouts (`git worktree add ../before main`). Each round starts one
process of each, in turns (before, after; after, before; ...), so that what drifts, such as a
machine that grows warm, meets both. The rounds are the sample: calls within a process share its
memory layout and its neighbours, and would be taken for far more evidence than they are.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

DRAWS = 2_000  # of the bootstrap, and of the signs where there are too many to list
NO_EVIDENCE, FASTER, SLOWER = "no evidence", "faster", "slower"


class Verdict(NamedTuple):
    """change: median of the rounds' after / before, in steps per second; low, high: its interval.

    p: chance of rounds at least so one-sided if neither is faster.
    """

    verdict: str
    change: float
    low: float
    high: float
    p: float


def fewest_rounds(confidence: float) -> int:
    """Below so many rounds not even all of them on one side are evidence: `2 / 2^n <= 1 - c`."""
    return math.ceil(math.log2(2.0 / (1.0 - confidence)))


def judge(
    before: Sequence[float], after: Sequence[float], confidence: float = 0.95, seed: int = 0
) -> Verdict:
    """Whether `after` is faster than `before`, each `[R]` steps per second of R rounds.

    Wilcoxon's signed-rank test on the logs of the rounds' ratios, exact up to 14 rounds, two-sided
    at `1 - confidence`: where neither is faster it says otherwise in at most that part of all
    cases. The interval is the bootstrap's of the median; the test does not use it.
    """
    logs = np.log(np.asarray(after, float)) - np.log(np.asarray(before, float))
    rng = np.random.default_rng(seed)
    medians = np.median(rng.choice(logs, (DRAWS, len(logs))), axis=1)
    low, high = np.quantile(medians, [(1 - confidence) / 2, (1 + confidence) / 2])
    p = signed_rank(logs, rng)
    change = float(np.median(logs))
    verdict = NO_EVIDENCE if p > 1.0 - confidence else FASTER if change > 0 else SLOWER
    change, low, high = (float(np.exp(x)) for x in (change, low, high))
    return Verdict(verdict, change, low, high, p)


def signed_rank(differences: np.ndarray, rng: np.random.Generator) -> float:
    """Two-sided p of Wilcoxon's test that `differences` `[R]` are symmetric about 0.

    Zeros count for neither side; ties share their ranks.
    """
    moved = differences[differences != 0.0]
    size = np.abs(moved)
    ranks = (size[:, None] > size).sum(1) + 0.5 * ((size[:, None] == size).sum(1) + 1)
    if len(moved) <= 14:
        signs = (np.arange(2 ** len(moved))[:, None] >> np.arange(len(moved))) & 1
    else:
        signs = rng.integers(0, 2, (DRAWS, len(moved)))
        signs[0] = moved > 0  # the one that was seen: p is never 0
    middle = ranks.sum() / 2.0
    extreme = abs(ranks[moved > 0].sum() - middle)
    # Ranks are halves: no rounding, but sums of many draws need none either.
    return float(np.mean(np.abs(signs @ ranks - middle) >= extreme - 1e-9))


Measure = Callable[[str], dict[str, float]]


def rounds(
    measure: Measure, before: str, after: str, count: int
) -> Iterable[tuple[dict[str, float], dict[str, float]]]:
    """What (before, after) measure in each round, the one that begins taking turns."""
    for number in range(count):
        pair = (before, after) if number % 2 == 0 else (after, before)
        found = {which: measure(which) for which in pair}
        yield found[before], found[after]


def measured(checkout: str, words: Sequence[str]) -> dict[str, float]:
    """Steps per second by row of `python -m benchmarks WORDS --json`, run in a checkout."""
    command = [sys.executable, "-m", "benchmarks", *words, "--json"]
    env = os.environ | {"PYTHONPATH": checkout}
    done = subprocess.run(
        command, cwd=checkout, env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        sys.exit(f"{checkout}: {' '.join(words)} failed: {last}")
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found: dict[str, float] = {}
    for row in rows:
        envs = "" if row.get("envs") is None else f", {row['envs']} envs"
        found[f"{row['bench']} {row['name']}{envs}"] = row["steps_per_s"]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.compare", description=__doc__)
    parser.add_argument("before", help="a checkout")
    parser.add_argument("after", help="another")
    parser.add_argument("--rounds", type=int, default=8, help="of one process each (%(default)s)")
    parser.add_argument("--confidence", type=float, default=0.95, help="%(default)s")
    parser.add_argument("words", nargs="+", help="after --: a benchmark, e.g. env")
    args = parser.parse_args(argv)
    if not 0.5 <= args.confidence < 1.0:
        parser.error(f"--confidence {args.confidence:g}: give a number from .5 to below 1.")
    if args.rounds < (least := fewest_rounds(args.confidence)):
        parser.error(f"--rounds {args.rounds}: {args.confidence:g} takes at least {least} rounds.")
    before, after = (os.path.abspath(path) for path in (args.before, args.after))
    pairs = list(rounds(lambda at: measured(at, args.words), before, after, args.rounds))
    return report(pairs, args.confidence)


def report(pairs: Sequence[tuple[dict[str, float], dict[str, float]]], confidence: float) -> int:
    """Prints a line for each row that both have; 1 where one is slower, as a CI wants it.

    Each of n rows is tested at `1 - (1 - confidence) / n` (Bonferroni), so that all n together
    are wrong no more often than one would be.
    """
    names = [name for name in pairs[0][0] if all(name in a and name in b for a, b in pairs)]
    if not names:
        sys.exit("the two checkouts measured no row of the same name")
    each = 1.0 - (1.0 - confidence) / len(names)
    if len(pairs) < fewest_rounds(each):
        print(
            f"{len(names)} rows: nothing can be found with fewer than {fewest_rounds(each)} rounds"
        )
    slower = False
    for name in names:
        found = judge([a[name] for a, _ in pairs], [b[name] for _, b in pairs], each)
        slower |= found.verdict == SLOWER
        print(
            f"{name:<52} {found.verdict:<12} x{found.change:.3f} "
            f"[{found.low:.3f}, {found.high:.3f}]  p {found.p:.3f}"
        )
    return int(slower)


if __name__ == "__main__":
    sys.exit(main())
