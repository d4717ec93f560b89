"""How often the gate's second question passes harm, and how often it passes what is harmless.

    python -m benchmarks.harm benchmarks/results/harm.jsonl            # the same command resumes
    python -m benchmarks.harm FILE --draws 40 --years 2 10
    python -m benchmarks.harm benchmarks/results/harm.jsonl --table    # what is there

A market has 8 assets with a common factor, innovations of Student's t with 5 degrees of freedom,
and a common volatility whose logarithm is an AR(1) process. The base is half long and half
trend-like; an agent adds a tilt that knows nothing, so large that the correlation of their returns
is as asked. Returns are then shifted so that the true Sharpe ratios, net of costs, are exactly
those of the case.
"""

import argparse
import json
import math
import pathlib

import numpy as np
from scipy.signal import lfilter
from scipy.special import ndtr
from scipy.stats import beta

from nca_trader.evaluate.evidence.gate import TOLERATED, harm
from nca_trader.optimum.rows import about
from nca_trader.runs.folder import commit

YEAR, ASSETS = 252, 8
SHARPE, PAID = 0.84, 0.1  # of the base, and what it pays of it for trading, per year
YEARS, CORRELATIONS = (0.5, 1, 2, 5, 10, 15, 20, 25), (0.9, 0.96, 0.99)
# The harm at true and at doubled costs, in annual Sharpe ratios, and among how many tilts the best
# was chosen on the same bars.
CASES = {
    "harmless": (0.0, 0.0, 1),
    "harm 0.15": (0.15, 0.15, 1),
    "harm 0.3": (0.3, 0.3, 1),
    "harm 0.3 at doubled costs alone": (0.0, 0.3, 1),
    "harm 0.3 at true costs alone": (0.3, 0.0, 1),
    "harm 0.3, the best of 10": (0.3, 0.3, 10),
}
REPETITIONS = 400  # resamples; the gate has 2,000


def _ar(rng, phi, shape):
    """A stationary AR(1) process of variance 1."""
    noise = rng.standard_normal(shape)
    noise[1:] *= math.sqrt(1.0 - phi**2)
    return np.asarray(lfilter([1.0], [1.0, -phi], noise, axis=0))


class Market:
    """The returns of a base and of tilts, before drifts and costs.

    base, tilts: `[T]` and `[K, T]` gross returns without drift. traded: `[K + 1, T]` absolute
    changes of the positions, of the base and of each tilt added to it, relative to their mean.
    """

    def __init__(self, seed, bars, tilts, size):
        rng = np.random.default_rng(seed)
        volatility = 0.01 * np.exp(0.4 * _ar(rng, 0.98, (bars, 1)))
        factor, own = (rng.standard_t(5, (bars, n)) for n in (1, ASSETS))
        moves = volatility * math.sqrt(3 / 5) * (math.sqrt(0.3) * factor + math.sqrt(0.7) * own)
        position = 0.5 + 0.5 * np.sign(_ar(rng, 0.99, (bars + 1, ASSETS)))
        self.base = (position[:-1] * moves).mean(1)
        self.tilts, self.traded = [], [np.abs(np.diff(position, axis=0)).mean(1)]
        for _ in range(tilts):
            tilt = np.tanh(_ar(rng, 0.95, (bars + 1, ASSETS)))
            self.tilts.append((tilt[:-1] * moves).mean(1))
            self.traded.append(np.abs(np.diff(position + size * tilt, axis=0)).mean(1))


def _deviations():
    """Daily volatilities of base and tilt, roots of `E[v^2] (0.3 E[mean(p)^2] + 0.7 E[p^2] / A)`.

    v^2 is log-normal. A position of the base is 0 or 1 with probability 1/2; one of a tilt is the
    hyperbolic tangent of a normal number, 0 on average.
    """
    variance = 1e-4 * math.exp(2.0 * 0.4**2)
    base = 0.3 * (0.25 + 0.25 / ASSETS) + 0.7 * 0.5 / ASSETS
    x, weights = np.polynomial.hermite_e.hermegauss(60)
    tilt = float((weights * np.tanh(x) ** 2).sum() / weights.sum()) / ASSETS
    return math.sqrt(variance * base), math.sqrt(variance * tilt)


BASE_DEVIATION, TILT_DEVIATION = _deviations()


def size_of(correlation):
    """The size of a tilt, uncorrelated with the base, that gives this correlation of returns."""
    return BASE_DEVIATION / TILT_DEVIATION * math.sqrt(1.0 / correlation**2 - 1.0)


def judged(seed, years, correlation, case):
    """What the gate finds of a drawn market."""
    true, doubled, count = CASES[case]
    size, bars = size_of(correlation), round(years * YEAR)
    market = Market(seed, bars, count, size)
    # Costs per year of the base and of an agent, as Sharpe ratios.
    paid = PAID + max(0.0, true - doubled), PAID + max(0.0, doubled - true)
    deviations = BASE_DEVIATION, BASE_DEVIATION / correlation
    gross = [market.base, *(market.base + size * tilt for tilt in market.tilts)]
    once, twice = [], []
    for k, returns in enumerate(gross):
        agent = int(k > 0)
        unit = deviations[agent] / math.sqrt(YEAR)  # the mean return of an annual ratio of 1
        costs = paid[agent] * unit * market.traded[k] / market.traded[k].mean()
        net = returns + (SHARPE - true * agent + paid[agent]) * unit - costs
        once.append(net)
        twice.append(net - costs)
    base, *agents = once
    named = {f"tilt {k}": r for k, r in enumerate(agents)}
    best = int(np.argmax([r.mean() / r.std(ddof=1) for r in agents]))
    pair = twice[1 + best], twice[0]
    return harm(named, ("base", base), pair, YEAR, repetitions=REPETITIONS)


def expected(years, correlation, harmed):
    """The share that passes by the normal law: `Phi((0.15 - harm) / se - 1.645)`.

    `se^2 = (2 (1 - c) + (S^2 + S'^2 - 2 S S' c^2) / (2 P)) / years` (Jobson and Korkie 1981, with
    Memmel's correction 2003), S and S' the annual ratios and c the correlation.
    """
    ours, theirs = SHARPE - harmed, SHARPE
    more = (ours**2 + theirs**2 - 2.0 * ours * theirs * correlation**2) / (2.0 * YEAR)
    error = math.sqrt((2.0 * (1.0 - correlation) + more) / years)
    return float(ndtr((TOLERATED - harmed) / error - 1.6449))


def run(file, draws, spans, correlations):
    """Appends a row of each cell that is not in `file` yet."""
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    done = {(row["case"], row["years"], row["correlation"]) for row in rows}
    for years in spans:
        for correlation in correlations:
            for case in CASES:
                if (case, years, correlation) in done:
                    continue
                seeds = [(k, round(12 * years)) for k in range(draws)]
                found = [judged(seed, years, correlation, case) for seed in seeds]
                row = {"case": case, "years": years, "correlation": correlation, "draws": draws}
                row |= {"passed": sum(x.passed for x in found)}
                row |= {"gained": sum(x.gained for x in found)}
                row |= {"expected": expected(years, correlation, max(CASES[case][:2]))}
                with file.open("a") as out:
                    out.write(json.dumps(row | {"commit": commit()} | about()) + "\n")
                print(case, years, correlation, row["passed"], flush=True)


def interval(passed, draws):
    """The 95% interval of a share (Clopper and Pearson)."""
    low = beta.ppf(0.025, passed, draws - passed + 1) if passed else 0.0
    high = beta.ppf(0.975, passed + 1, draws - passed) if passed < draws else 1.0
    return float(low), float(high)


def table(file):
    """The rows of docs/guides/walk-forward.md: of each case, correlation and span what passed."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    spans = sorted({row["years"] for row in rows})
    heads = " | ".join(f"{years:g} years" for years in spans)
    lines = [f"| case | correlation | {heads} |", "|-" * (len(spans) + 2) + "|"]
    for case in CASES:
        for correlation in sorted({row["correlation"] for row in rows}):
            known = {
                row["years"]: row
                for row in rows
                if (row["case"], row["correlation"]) == (case, correlation)
            }
            cells = []
            for years in spans:
                row = known.get(years)
                share = row and row["passed"] / row["draws"]
                high = row and interval(row["passed"], row["draws"])[1]
                cells.append(f"{share:.1%} ({high:.1%})" if row else "")
            lines.append(f"| {case} | {correlation:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main():
    """Runs from the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--draws", type=int, default=400, help="of each cell (%(default)s)")
    parser.add_argument("--years", nargs="+", type=float, default=YEARS)
    parser.add_argument("--correlations", nargs="+", type=float, default=CORRELATIONS)
    parser.add_argument("--table", action="store_true", help="print what is there; draw nothing")
    args = parser.parse_args()
    if args.table:
        print(table(args.file))
        return
    run(args.file, args.draws, args.years, args.correlations)


if __name__ == "__main__":
    main()
