"""Tests of many strategies at once: is the best of them better, or was it searched for.

Returns are `[T, M]`, a row per bar (or per block of bars) and a column per strategy that was tried.
Leaving out the bad ones makes luck look like skill.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from nca_trader.errors import ConfigError
from nca_trader.evaluate.metrics import NO_VOLATILITY

COLUMNS = 4096  # strategies whose resampled means are computed at once: bounds memory


class Overfit(NamedTuple):
    """What combinatorially symmetric cross-validation finds.

    Attributes:
      probability: PBO, the share of splits in which the strategy that is the best in sample is not
        above the median out of sample; 0.5 is what chance alone gives.
      logits: `[splits]`, `log(w / (1 - w))` of its relative rank w out of sample.
    """

    probability: float
    logits: np.ndarray


def overfit_probability(returns: ArrayLike, num_parts: int = 16) -> Overfit:
    """Compute the probability of backtest overfitting (PBO) by CSCV.

    The rows are cut into `num_parts` parts. Every choice of half of them is once in sample; the
    strategy with the highest Sharpe ratio there is ranked among all in the other half.

    Source: Bailey, Borwein, Lopez de Prado and Zhu, The probability of backtest overfitting (2017).

    Args:
      returns: `[T, M]` of M strategies, at least two.
      num_parts: S, even; rows beyond a multiple of it are left out at the end.

    Raises:
      ConfigError: fewer than two strategies, an odd number of parts, or too few rows.

    Example:
      >>> noise = np.random.default_rng(0).standard_normal((1600, 50))
      >>> overfit_probability(noise).probability  # chance gives one half
      0.5074592074592075
    """
    r = _matrix(returns, at_least=2)
    if num_parts < 2 or num_parts % 2 or len(r) < 2 * num_parts:
        raise ConfigError(
            f"num_parts = {num_parts} of {len(r)} rows; give an even number of parts, of at least "
            "two rows each."
        )
    rows = len(r) // num_parts
    parts = r[: rows * num_parts].reshape(num_parts, rows, -1)
    # The choices of half of the parts as rows of ones, in lexicographic order.
    bits = np.arange(2**num_parts)[:, None] >> np.arange(num_parts)[::-1] & 1
    inside = bits[bits.sum(1) == num_parts // 2].astype(np.float64)
    # All splits are one product each: sums and sums of squares of the parts say everything.
    n = rows * num_parts // 2
    mean = inside @ parts.sum(1) / n
    variance = (inside @ (parts**2).sum(1) - n * mean**2) / (n - 1)
    # A strategy that never trades has no Sharpe ratio; here it is worth as much as cash.
    flat = variance <= NO_VOLATILITY**2
    sharpe = np.where(flat, 0.0, mean) / np.sqrt(np.where(flat, 1.0, variance))
    # Halves are sorted, so the complement of the first is the last, and so on.
    outside = sharpe[::-1]
    chosen = np.take_along_axis(outside, sharpe.argmax(1)[:, None], axis=1)
    # Equal ratios share their mean rank: identical strategies are neither good nor bad.
    below, equal = (outside < chosen).sum(1), (outside == chosen).sum(1)
    w = (below + (equal + 1) / 2) / (r.shape[1] + 1)
    logits = np.log(w / (1.0 - w))
    return Overfit(float((logits <= 0.0).mean()), logits)


class Superiority(NamedTuple):
    """P-values of a test of superior predictive ability.

    Small means that the best strategy is better than the benchmark, even allowing for the search.

    Attributes:
      lower: liberal; strategies that are worse than the benchmark are not recentred.
      consistent: the one to report.
      upper: White's reality check; all are recentred.
    """

    lower: float
    consistent: float
    upper: float


def superior_ability(
    returns: ArrayLike,
    benchmark: ArrayLike,
    block: float | None = None,
    repetitions: int = 1000,
    seed: int = 0,
) -> Superiority:
    """Test whether the best of M strategies beats a benchmark (Hansen's SPA).

    It equals `arch.bootstrap.SPA` with losses of `-returns` and the same seed. The mean of a
    resample is a product of how often it draws each row and the returns, so all resamples of all
    strategies are one matrix product.

    Source: Hansen, A test for superior predictive ability (2005); resamples by the stationary
    bootstrap (Politis and Romano 1994).

    Args:
      returns: `[T, M]`.
      benchmark: `[T]` returns of the benchmark, zeros for cash.
      block: mean length of a block, in rows; None takes `T^(1/3)`.
      repetitions: resamples.
      seed: the same seed gives the same p-values.

    Raises:
      ConfigError: returns that are not `[T, M]`, or a benchmark that is not `[T]`.

    Example:
      >>> rng = np.random.default_rng(0)
      >>> noise = 0.01 * rng.standard_normal((500, 20))
      >>> superior_ability(noise, np.zeros(500)).consistent > 0.05
      True
      >>> superior_ability(noise + 0.003, np.zeros(500)).consistent < 0.01
      True
    """
    return superior_to_each(returns, [benchmark], block, repetitions, seed)[0]


def superior_to_each(
    returns: ArrayLike,
    benchmarks: Sequence[ArrayLike],
    block: float | None = None,
    repetitions: int = 1000,
    seed: int = 0,
) -> list[Superiority]:
    """Run `superior_ability` against several benchmarks `[T]`, with one set of resamples."""
    r = _matrix(returns)
    num_rows, against = len(r), [np.asarray(b, np.float64) for b in benchmarks]
    for b in against:
        if b.shape != (num_rows,) or num_rows < 4:
            raise ConfigError(
                f"benchmark has shape {b.shape} and the returns {r.shape}; give returns of the "
                "same rows, at least four."
            )
    block = max(1.0, num_rows ** (1 / 3)) if block is None else float(block)
    counts = _resamples(num_rows, block, repetitions, seed)
    bound = math.sqrt(2.0 * math.log(math.log(num_rows)))
    best = np.full(len(against), -np.inf)
    highest = np.full((len(against), 3, repetitions), -np.inf)
    # In pieces, as resamples of all strategies at once would take gigabytes.
    for first in range(0, r.shape[1], COLUMNS):
        some = r[:, first : first + COLUMNS]
        resampled = counts @ some
        resampled /= num_rows
        centred = np.empty_like(resampled)
        transformed = np.fft.rfft(some, axis=0)
        for k, b in enumerate(against):
            mean = some.mean(0) - b.mean()
            best[k] = max(best[k], float(mean.max()))
            # Transforms add up, so that of the excess over each benchmark needs no other.
            excesses = transformed - np.fft.rfft(b)[:, None]
            least = -bound * np.sqrt(_variance_of_mean(excesses, num_rows, block))
            # What is far below the benchmark cannot be the best, and does not count towards it.
            centres = (np.maximum(mean, 0.0), np.where(mean >= least, mean, 0.0), mean)
            of_benchmark = counts @ b / num_rows
            for j, centre in enumerate(centres):
                np.subtract(resampled, centre, out=centred)
                excess = centred.max(1) - of_benchmark
                # In place: the best of all pieces so far.
                np.maximum(highest[k, j], excess, out=highest[k, j])
    p = (highest > best[:, None, None]).mean(-1)
    return [Superiority(*map(float, row)) for row in p]


def _resamples(num_rows: int, block: float, repetitions: int, seed: int) -> np.ndarray:
    """Return `[repetitions, T]` how often each stationary resample has each row."""
    # Imported here because it costs a second (statsmodels).
    from arch.bootstrap import StationaryBootstrap

    # arch's annotation says int; the mean length of a geometric block is any number above 1.
    mean_length: Any = block
    bootstrap = StationaryBootstrap(mean_length, np.arange(num_rows), seed=seed)
    counts = np.empty((repetitions, num_rows))
    for times, (data, _) in zip(counts, bootstrap.bootstrap(repetitions), strict=True):
        times[:] = np.bincount(data[0], minlength=num_rows)
    return counts


def _variance_of_mean(transformed: np.ndarray, num_rows: int, block: float) -> np.ndarray:
    """Return `[M]` the stationary bootstrap's variance of the means of x `[T, M]`, T = `num_rows`.

    `sum_i k_i c_i / T^2` over circular autocovariances c with the weights
    `k_i = (1 - i/T)(1 - p)^i + (i/T)(1 - p)^(T - i)`, p = 1 / block (Politis and Romano
    1994, eq. 8).
    The weights are symmetric, so the sum is one over squared Fourier coefficients, which are the
    argument `transformed`: `rfft(x)`, `[T // 2 + 1, M]`.
    """
    lag, keep = np.arange(num_rows), 1.0 - 1.0 / block
    weight = (1.0 - lag / num_rows) * keep**lag + lag / num_rows * keep ** (num_rows - lag)
    spectrum = np.abs(transformed) ** 2
    spectrum[0] = 0.0  # the mean, which autocovariances are without
    # The real transform leaves out the second half of the coefficients, which are the same.
    spectrum[1 : (num_rows + 1) // 2] *= 2.0
    of_weight = np.fft.rfft(weight).real
    return np.maximum(of_weight @ spectrum, 0.0) / num_rows**3


def confidence_set(
    returns: pd.DataFrame,
    size: float = 0.1,
    block: float | None = None,
    repetitions: int = 1000,
    seed: int = 0,
) -> pd.Series:
    """Compute the Model Confidence Set: the strategies that may be the best.

    Put cash (zeros) and the benchmark among the columns: where they are in the set, no strategy is
    shown to be better than they are. The time grows with the square of the number of columns.

    Source: Hansen, Lunde and Nason, The model confidence set (2011), as in `arch.bootstrap.MCS`.

    Args:
      returns: `[T, M]` with a name for each column.
      size: of the test; the set holds the best with probability `1 - size`.
      block: mean length of a block, in rows; None takes `T^(1/3)`.
      repetitions: resamples.
      seed: the same seed gives the same set.

    Returns:
      P-values by name, the highest first. The set are those above `size`, and so are the entries of
      `.attrs["included"]`.

    Example:
      >>> rng = np.random.default_rng(0)
      >>> r = pd.DataFrame({"good": 0.01 * rng.standard_normal(900) + 0.002, "cash": np.zeros(900)})
      >>> confidence_set(r).attrs["included"]
      ['good']
    """
    from arch.bootstrap import MCS

    r = _matrix(returns, at_least=2)
    length: Any = max(1.0, len(r) ** (1 / 3)) if block is None else block
    # arch takes losses, and less is better.
    found = MCS(pd.DataFrame(-r, columns=returns.columns), size, repetitions, length, seed=seed)
    found.compute()
    p = found.pvalues["Pvalue"].sort_values(ascending=False)
    p.attrs["included"] = list(found.included)
    return p


def block_returns(returns: ArrayLike, most: int = 2000) -> np.ndarray:
    """Sum returns `[T]` or `[T, M]` into at most `most` blocks of equally many rows.

    Sums of simple returns keep the mean, which is what SPA compares, and PBO's parts; a last block
    may be shorter. NaN counts as 0.
    """
    r = np.nan_to_num(np.asarray(returns, np.float64))
    length = block_length(len(r), most)
    return np.add.reduceat(r, np.arange(0, len(r), length), axis=0)


def block_length(num_rows: int, most: int = 2000) -> int:
    """Return how many rows make a block, so that there are at most `most` blocks."""
    return max(1, -(-num_rows // most))


def _matrix(returns: ArrayLike | Iterable[Any], at_least: int = 1) -> np.ndarray:
    r = np.asarray(returns, np.float64)
    if r.ndim != 2 or r.shape[1] < at_least or not len(r):
        raise ConfigError(
            f"returns have shape {r.shape}; give [T, M], a column per strategy, with at least "
            f"{at_least} column{'s' if at_least > 1 else ''}."
        )
    if not np.isfinite(r).all():
        row = int(np.argwhere(~np.isfinite(r))[0, 0])
        raise ConfigError(f"returns row {row} is not finite; leave such rows out.")
    return r
