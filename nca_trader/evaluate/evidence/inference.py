"""Inference on returns: Sharpe ratios, bootstrap intervals, and tests of the best of many.

Sharpe ratios are per bar, not annualised, unless a docstring says otherwise. Where many strategies
are tested at once, returns are `[T, M]`: a row per bar, or per block of bars, and a column for
every strategy that was tried. Leaving out the bad ones makes luck look like skill.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from nca_trader.errors import ConfigError
from nca_trader.evaluate import metrics

COLUMNS = 1024  # strategies that are resampled at once: bounds memory
NUMBERS_OF_SPLITS = 2_000_000  # splits times strategies: bounds the time and memory of PBO
BATCH = 2**16  # rows of resamples that are drawn at once, in a processor's cache
SHORT, KEPT = 2_500, 5_000_000  # rows, and counts, that are kept: 10 MB for each block
NO_ERROR = 1e-6  # standard error of a difference of Sharpe ratios that rounding alone leaves


class Moments(NamedTuple):
    """The moments that the distribution of an estimated Sharpe ratio depends on.

    Attributes:
      sharpe: per bar, `mean / std(ddof=1)`.
      num_bars: T.
      skewness: third standardised moment.
      kurtosis: fourth standardised moment; a Gaussian's is 3.
    """

    sharpe: float
    num_bars: int
    skewness: float
    kurtosis: float


class ConfidenceInterval(NamedTuple):
    """A confidence interval.

    Attributes:
      low: lower end; NaN where the interval is undefined.
      high: upper end; likewise.
      level: of confidence, e.g. 0.95.
    """

    low: float
    high: float
    level: float


def moments(returns: ArrayLike) -> Moments:
    """Compute the moments of returns `[T]`; NaN returns are left out."""
    r = metrics.sums(returns)
    return Moments(metrics.sharpe(r, 1.0), int(r.count), metrics.skewness(r), metrics.kurtosis(r))


def _spread(m: Moments) -> float:
    """Compute `sqrt(1 - skew SR + (kurt - 1) / 4 SR^2)`, the standard error times sqrt(T - 1)."""
    return math.sqrt(1.0 - m.skewness * m.sharpe + (m.kurtosis - 1.0) / 4.0 * m.sharpe**2)


def probabilistic_sharpe(m: Moments, benchmark: float = 0.0) -> float:
    """Compute the probability that the true Sharpe ratio exceeds `benchmark` (per bar).

    `PSR = Phi((SR - SR*) sqrt(T - 1) / sqrt(1 - skew SR + (kurt - 1) / 4 SR^2))`
    (Bailey and Lopez de Prado 2012, eq. 11). NaN where the Sharpe ratio is undefined.
    """
    if math.isnan(m.sharpe):
        return math.nan
    score = (m.sharpe - benchmark) * math.sqrt(m.num_bars - 1) / _spread(m)
    return 0.5 * math.erfc(-score / math.sqrt(2.0))  # not scipy's, which takes 0.2 s to import


def expected_max_sharpe(num_trials: int, variance: float) -> float:
    """Compute the Sharpe ratio that the best of N trials without skill is expected to show.

    `SR0 = sqrt(V) ((1 - g) Z(1 - 1/N) + g Z(1 - 1/(N e)))`, g = Euler-Mascheroni, V = variance of
    the trials' Sharpe ratios (Bailey and Lopez de Prado 2014). 0 for a single trial.
    """
    if num_trials < 1:
        raise ConfigError(f"num_trials = {num_trials}; the evaluated trial counts: at least 1.")
    if num_trials == 1:
        return 0.0  # the formula is an approximation for large N, and -inf here
    # By symmetry, Z(1 - p) = -Z(p).
    first, last = (-NormalDist().inv_cdf(1.0 / n) for n in (num_trials, num_trials * math.e))
    return math.sqrt(variance) * float((1 - np.euler_gamma) * first + np.euler_gamma * last)


def deflated_sharpe(m: Moments, num_trials: int, variance: float | None = None) -> float:
    """Compute the probability that the true Sharpe ratio exceeds 0, allowing for N trials.

    `DSR = PSR(SR0)` with SR0 of `expected_max_sharpe` (Bailey and Lopez de Prado 2014).

    Args:
      m: moments of the selected trial's returns.
      num_trials: N, independent trials so far, with this one.
      variance: of the trials' Sharpe ratios, per bar; None takes 1 / (T - 1), the variance of
        trials without skill.
    """
    if math.isnan(m.sharpe):
        return math.nan
    variance = 1.0 / (m.num_bars - 1) if variance is None else variance
    return probabilistic_sharpe(m, expected_max_sharpe(num_trials, variance))


class Resampled(NamedTuple):
    """Moments of the K columns of R resamples, `[R, K]`.

    Attributes:
      mean: of each column.
      deviation: its standard deviation (ddof=1).
    """

    mean: np.ndarray
    deviation: np.ndarray

    def sharpe(self, bars_per_year: float) -> np.ndarray:
        """`[R, K]` annualised Sharpe ratios; NaN for a resample that never moves."""
        still = self.deviation < metrics.NO_VOLATILITY
        ratio = self.mean / np.where(still, 1.0, self.deviation)
        return np.where(still, np.nan, ratio * math.sqrt(bars_per_year))


def best_block(series: ArrayLike) -> float:
    """Estimate the mean block length at which a stationary bootstrap of `[T]` values is best.

    Source: Patton, Politis and White, Correction to "Automatic block-length selection for the
    dependent bootstrap" (2009).
    """
    x = np.asarray(series, np.float64)
    num, x = len(x), x - x.mean()
    run = max(5, int(math.log10(num)))
    longest = math.ceil(math.sqrt(num)) + run
    lags = np.arange(longest + 1)
    products = np.array([x[lag:] @ x[: num - lag] for lag in lags])
    squares = np.concatenate([[0.0], np.cumsum(x**2)])
    ends = (squares[-1] - squares[lags + 1]) * squares[num - 1 - lags]
    small = abs(products) < 2 * np.sqrt(math.log10(num) / num * ends)
    # Correlations count up to twice the lag after which so many of them are not significant.
    runs = np.convolve(small[:-1], np.ones(run), "valid") == run
    last = min(2 * max(int(runs.argmax()), 1), longest) if runs.any() else longest
    used = lags[1 : last + 1]
    weights = 2 * np.minimum(1.0, 2 * (1 - used / last)) * products[used] / num
    spectrum = products[0] / num + weights.sum()
    length = ((weights @ used) ** 2 / spectrum**2 * num) ** (1 / 3)
    return min(length, math.ceil(min(3 * math.sqrt(num), num / 3)))


def _stationary_counts(num: int, block: float, repetitions: int, seed: int) -> Iterator[np.ndarray]:
    """Draw how often each resample has a row: in a circle, in blocks of geometric lengths.

    Yields:
      `[B, num]` of B resamples at a time, as many as fit into `BATCH` numbers.
    """
    rng = np.random.default_rng(seed)
    size = max(1, BATCH // num)
    for at in range(0, repetitions, size):
        many = min(size, repetitions - at)
        rows, drawn = np.empty((many, num), np.int64), np.empty((many, num))
        for row, each in zip(rows, drawn, strict=True):
            row[:] = rng.integers(num, size=num)
            rng.random(out=each)
        begins = drawn <= 1 / block
        begins[:, 0] = True
        place = np.flatnonzero(begins)
        of, first = place // num, rows.ravel()[place]
        end = first + np.diff(place, append=many * num)
        # A block counts from its first row on, and no more from its end on.
        round_the_end = end >= num
        steps = np.bincount(of * num + first, minlength=many * num)
        steps -= np.bincount(of * num + end - num * round_the_end, minlength=many * num)
        over = np.bincount(of[round_the_end], minlength=many)
        yield steps.reshape(many, num).cumsum(axis=1) + over[:, None]


@functools.lru_cache(maxsize=4)
def _short_counts(num: int, block: float, repetitions: int, seed: int) -> list[np.ndarray]:
    """Keep the counts of short series: those of one backtest often have the same block."""
    kept = [counts.astype(np.int16) for counts in _stationary_counts(num, block, repetitions, seed)]
    for counts in kept:
        counts.setflags(write=False)
    return kept


def resampled(samples: ArrayLike, repetitions: int = 2000, seed: int = 0) -> Resampled | None:
    """Resample rows by the stationary bootstrap (Politis and Romano 1994).

    Args:
      samples: `[T]`, or `[T, K]` series that are resampled together, bar by bar.
      repetitions: R.
      seed: the same seed gives the same resamples.

    Returns:
      The moments; None below 20 bars, and where nothing moves. Mean block length by Patton,
      Politis and White (2009), the longest over the columns.
    """
    columns = np.asarray(samples, np.float64)
    columns = columns.reshape(len(columns), -1)
    moving = columns[:, columns.std(axis=0) >= metrics.NO_VOLATILITY]
    if len(columns) < 20 or not moving.size:
        return None
    # A constant column has no autocorrelation to estimate a length from.
    estimated = max(map(best_block, moving.T))
    # The rate of the optimal length, if none is estimated.
    block = max(1.0, estimated) if math.isfinite(estimated) else len(columns) ** (1 / 3)
    centre = columns.mean(axis=0)
    # Centred, so that the squares lose no digits; and side by side, for one product a resample.
    powers = np.hstack([columns - centre, (columns - centre) ** 2]) / len(columns)
    short = len(columns) <= SHORT and len(columns) * repetitions <= KEPT
    draw = _short_counts if short else _stationary_counts
    drawn = draw(len(columns), block, repetitions, seed)
    found = np.concatenate([counts @ powers for counts in drawn])
    mean, squares = np.hsplit(found, 2)
    # Of a resample that never moves the difference is rounding, which is the processor's own.
    rounding = len(columns) * np.finfo(np.float64).eps * squares
    variance = np.where(squares - mean**2 > rounding, squares - mean**2, 0.0)
    variance *= len(columns) / (len(columns) - 1)
    return Resampled(centre + mean, np.sqrt(variance))


def _interval(values: np.ndarray | None) -> ConfidenceInterval:
    """Return the 95% percentile interval; NaN where a resample, or all, is undefined."""
    # A resample without a trade has no Sharpe ratio. Leaving it out would change the statistic.
    if values is None or not np.isfinite(values).all():
        return ConfidenceInterval(math.nan, math.nan, 0.95)
    low, high = np.quantile(values, [0.025, 0.975])
    return ConfidenceInterval(float(low), float(high), 0.95)


def sharpe_interval(returns: ArrayLike, bars_per_year: float, seed: int = 0) -> ConfidenceInterval:
    """Compute the 95% interval of the annualised Sharpe ratio of returns `[T]`."""
    found = resampled(metrics.drop_nan(returns), seed=seed)
    return _interval(found and found.sharpe(bars_per_year))


def mean_difference_interval(
    returns: ArrayLike, other: ArrayLike, bars_per_year: float, seed: int = 0
) -> ConfidenceInterval:
    """Compute the 95% interval of `P * mean(r - r_other)`, return per year, paired by bar.

    Identical series differ by exactly 0: the interval is then [0, 0].
    """
    difference = np.asarray(returns, np.float64) - np.asarray(other, np.float64)
    # `resampled` returns None for returns without volatility, such as these zeros.
    if not difference.any():
        return ConfidenceInterval(0.0, 0.0, 0.95)
    found = resampled(metrics.drop_nan(difference), seed=seed)
    return _interval(found and found.mean * bars_per_year)


def sharpe_difference_interval(
    returns: ArrayLike, other: ArrayLike, bars_per_year: float, seed: int = 0
) -> ConfidenceInterval:
    """Compute the 95% interval of the difference of two annualised Sharpe ratios, by bar."""
    # Both columns are resampled by the same bars, so what they share cancels.
    pairs = np.column_stack([returns, other]).astype(np.float64)
    found = resampled(pairs[~np.isnan(pairs).any(axis=1)], seed=seed)
    return _interval(found and -np.diff(found.sharpe(bars_per_year)))


class Overfit(NamedTuple):
    """What combinatorially symmetric cross-validation finds.

    Attributes:
      probability: PBO, the share of splits in which the strategy that is the best in sample is not
        above the median out of sample; 0.5 is what chance alone gives.
      logits: `[splits]`, `log(w / (1 - w))` of its relative rank w out of sample.
    """

    probability: float
    logits: np.ndarray


def overfit_probability(returns: ArrayLike, num_parts: int | None = None) -> Overfit:
    """Compute the probability of backtest overfitting (PBO) by CSCV.

    The rows are cut into `num_parts` parts. Every choice of half of them is once in sample; the
    strategy with the highest Sharpe ratio there is ranked among all in the other half.

    Source: Bailey, Borwein, Lopez de Prado and Zhu, The probability of backtest overfitting (2017).

    Args:
      returns: `[T, M]` of M strategies, at least two.
      num_parts: S, even; rows beyond a multiple of it are left out at the end. None takes as many
        as time and memory allow, at most 16; the probability of fewer than 32 rows is NaN.

    Raises:
      ConfigError: fewer than two strategies, an odd number of parts, or too few rows.

    Example:
      >>> noise = np.random.default_rng(0).standard_normal((1600, 50))
      >>> overfit_probability(noise).probability  # chance gives one half
      0.5074592074592075
    """
    r = _matrix(returns, at_least=2)
    if num_parts is None:
        # Every half of the parts is a split, so their number grows very fast.
        known = [s for s in (16, 14, 12, 10, 8) if len(r) >= 4 * s]
        fit = [s for s in known if math.comb(s, s // 2) * r.shape[1] <= NUMBERS_OF_SPLITS]
        if not known:
            return Overfit(math.nan, np.zeros(0))
        num_parts = fit[0] if fit else known[-1]
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
    # Mean and variance of every split follow from the parts' sums and sums of squares, so one
    # matrix product each computes all splits.
    n = rows * num_parts // 2
    mean = inside @ parts.sum(1) / n
    variance = (inside @ (parts**2).sum(1) - n * mean**2) / (n - 1)
    # A strategy that never trades has no Sharpe ratio; here it counts as cash.
    flat = variance <= metrics.NO_VOLATILITY**2
    sharpe = np.where(flat, 0.0, mean) / np.sqrt(np.where(flat, 1.0, variance))
    # Halves are sorted, so the complement of the first is the last, and so on.
    outside = sharpe[::-1]
    # Of equal ones the first is chosen. Rounding must not decide: of accounts that hold the same,
    # one in float32 differs from its float64 twin, by less than a tenth of a digit in the mean.
    kind = np.asarray(returns).dtype
    near = 0.1 * float(np.finfo(kind if kind.kind == "f" else np.float64).eps)
    best = (sharpe >= sharpe.max(axis=1, keepdims=True) - near).argmax(axis=1)
    chosen = np.take_along_axis(outside, best[:, None], axis=1)
    # Equal ratios share their mean rank: identical strategies are neither good nor bad.
    below, equal = (outside < chosen - near).sum(1), (abs(outside - chosen) <= near).sum(1)
    w = (below + (equal + 1) / 2) / (r.shape[1] + 1)
    logits = np.log(w / (1.0 - w))
    return Overfit(float((logits <= 0.0).mean()), logits)


def superiority(
    returns: ArrayLike,
    chosen: int,
    benchmark: ArrayLike | None = None,
    repetitions: int = 1000,
    seed: int = 0,
) -> float:
    """Test whether one of M strategies is better than a benchmark, allowing for the search.

    The p-value of strategy c is the share of resamples whose largest statistic `max_k t*_k` is at
    least `t_c`, so that c pays for the M - 1 that it was chosen from (Romano and Wolf 2005).

    Against cash (`benchmark=None`) this is Hansen's SPA, each mean over its standard error:
    `t_k = sqrt(T) SR_k` with `SR_k = mean(r_k) / std(r_k)`, and `t*_k` has the mean of a resample
    and the same `std(r_k)`. Against a benchmark b it is the difference of Sharpe ratios over its
    standard error, `t_k = (SR_k - SR_b) / s_k`, with both computed again in each resample. In both
    a strategy that is far below the benchmark is not recentred (Hansen's consistent version).

    Resamples are of circular blocks of `T^(1/3)` rows. A standard error is that of the sums over
    blocks of `y_k - y_b`, where `y = z - SR/2 (z^2 - 1)` of the standardised returns z is what a
    row adds to the estimate of a Sharpe ratio (the delta method).

    Source: Hansen, A test for superior predictive ability (2005); Ledoit and Wolf, Robust
    performance hypothesis testing with the Sharpe ratio (2008).

    Args:
      returns: `[T, M]` in excess of cash.
      chosen: c, the column that is tested.
      benchmark: `[T]` of the benchmark, likewise; None is cash.
      repetitions: resamples.
      seed: the same seed gives the same p-value.

    Returns:
      The p-value, 1 where `t_c` is not above 0; NaN below 20 rows, which no resample differs from.

    Raises:
      ConfigError: returns that are not `[T, M]`, or a benchmark that is not `[T]`.

    Example:
      >>> noise = 0.01 * np.random.default_rng(0).standard_normal((500, 20))
      >>> best = int((noise.mean(0) / noise.std(0)).argmax())
      >>> superiority(noise, best) > 0.05
      True
      >>> superiority(noise + 0.003, best) < 0.01
      True
    """
    r = _matrix(returns)
    other = None if benchmark is None else np.asarray(benchmark, np.float64)
    if other is not None and other.shape != (len(r),):
        raise ConfigError(
            f"benchmark has shape {other.shape} and the returns {r.shape}; give returns of the "
            "same rows."
        )
    if len(r) < 20:
        return math.nan
    length = max(1, round(len(r) ** (1 / 3)))
    drawn = np.random.default_rng(seed).integers(len(r), size=(repetitions, len(r) // length))
    # How often each resample has the block that begins at a row: sums over it are matrix products.
    counts = np.stack([np.bincount(row, minlength=len(r)) for row in drawn]).astype(np.float64)
    highest, found = np.zeros(repetitions), 0.0
    # In pieces, as resamples of all strategies at once would take gigabytes.
    for first in range(0, r.shape[1], COLUMNS):
        t, again = _studentised(r[:, first : first + COLUMNS], other, counts, length)
        np.maximum(highest, again.max(1), out=highest)
        if first <= chosen < first + COLUMNS:
            found = max(0.0, float(t[chosen - first]))
    return float((1 + (highest >= found).sum()) / (1 + repetitions))


def _studentised(
    r: np.ndarray, benchmark: np.ndarray | None, counts: np.ndarray, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return `t` `[M]` of `superiority`, and of each resample `t*` `[R, M]`, recentred."""
    columns = r if benchmark is None else np.column_stack([r, benchmark])
    num_rows, num_blocks = len(r), counts[0].sum()
    drawn = num_blocks * length
    deviation = columns.std(axis=0, ddof=1)
    moving = deviation > metrics.NO_VOLATILITY
    # An account that never moves has no Sharpe ratio; here it counts as cash.
    scale = np.where(moving, deviation, np.inf)
    ratio, z = columns.mean(axis=0) / scale, (columns - columns.mean(axis=0)) / scale
    mean = counts @ _block_sums(z, length) / drawn
    again, added = ratio + mean, z
    if benchmark is not None:
        squares = counts @ _block_sums(z**2, length) / drawn
        again = np.where(moving, again / np.sqrt(np.maximum(squares - mean**2, 1e-12)), 0.0)
        added = z - ratio / 2.0 * (z**2 - 1.0) * moving
        mean = mean - ratio / 2.0 * (squares - 1.0) * moving
        # Less those of the benchmark, the last column.
        ratio, again, added, mean = (x[..., :-1] - x[..., -1:] for x in (ratio, again, added, mean))
    sums = _block_sums(added, length)
    error = np.sqrt((sums**2).mean(axis=0) / (length * num_rows))
    least = -math.sqrt(2.0 * math.log(math.log(num_rows))) * error
    again = again - np.where(ratio >= least, ratio, 0.0)
    if benchmark is None:
        return math.sqrt(num_rows) * ratio, math.sqrt(drawn) * again
    spread = np.maximum(counts @ sums**2 / num_blocks - (length * mean) ** 2, 0.0)
    # A copy of the benchmark differs from it by rounding alone.
    differs = error > NO_ERROR
    errors = np.where(differs, np.maximum(np.sqrt(spread / num_blocks) / length, NO_ERROR), np.inf)
    return np.where(differs, ratio, 0.0) / np.where(differs, error, 1.0), again / errors


def _block_sums(x: np.ndarray, length: int) -> np.ndarray:
    """Return `[T, M]` the sums over the `length` rows from each row on, in a circle."""
    total = np.concatenate([np.zeros_like(x[:1]), x, x[: length - 1]]).cumsum(axis=0)
    return total[length:] - total[:-length]


def block_returns(returns: ArrayLike, most: int = 2000) -> np.ndarray:
    """Sum returns `[T]` or `[T, M]` into at most `most` blocks of equally many rows.

    A last block may be shorter. NaN counts as 0.
    """
    r = np.nan_to_num(np.asarray(returns, np.float64))
    length = block_length(len(r), most)
    return np.add.reduceat(r, np.arange(0, len(r), length), axis=0)


def block_length(num_rows: int, most: int = 2000) -> int:
    """Return how many rows make a block, so that there are at most `most` blocks."""
    return max(1, -(-num_rows // most))


def _matrix(returns: ArrayLike, at_least: int = 1) -> np.ndarray:
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
