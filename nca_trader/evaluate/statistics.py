"""Inference on Sharpe ratios: PSR, DSR, MinTRL and bootstrap intervals.

Sharpe ratios are per bar, not annualised, unless a docstring says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import norm

from nca_trader.errors import ConfigError
from nca_trader.evaluate import metrics
from nca_trader.progress import Progress


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


class Interval(NamedTuple):
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
    r = metrics.known(returns)
    return Moments(metrics.sharpe(r, 1.0), r.size, metrics.skewness(r), metrics.kurtosis(r))


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
    return float(norm.cdf((m.sharpe - benchmark) * math.sqrt(m.num_bars - 1) / _spread(m)))


def min_track_record(m: Moments, benchmark: float = 0.0, confidence: float = 0.95) -> float:
    """Compute the bars needed before PSR against `benchmark` reaches `confidence`.

    `MinTRL = 1 + (1 - skew SR + (kurt - 1) / 4 SR^2) (Z / (SR - SR*))^2` (the same paper, eq. 13).
    Infinite where the Sharpe ratio does not exceed the benchmark; `m.num_bars` is not used.
    """
    if math.isnan(m.sharpe):
        return math.nan
    if m.sharpe <= benchmark:
        return math.inf
    z = float(norm.ppf(confidence))
    return 1.0 + _spread(m) ** 2 * (z / (m.sharpe - benchmark)) ** 2


def expected_max_sharpe(num_trials: int, variance: float) -> float:
    """Compute the Sharpe ratio that the best of N trials without skill is expected to show.

    `SR0 = sqrt(V) ((1 - g) Z(1 - 1/N) + g Z(1 - 1/(N e)))`, g = Euler-Mascheroni, V = variance of
    the trials' Sharpe ratios (Bailey and Lopez de Prado 2014). 0 for a single trial.
    """
    if num_trials < 1:
        raise ConfigError(f"num_trials = {num_trials}; the evaluated trial counts: at least 1.")
    if num_trials == 1:
        return 0.0  # the formula is an approximation for large N, and -inf here
    ends = norm.ppf([1.0 - 1.0 / num_trials, 1.0 - 1.0 / (num_trials * math.e)])
    return math.sqrt(variance) * float((1 - np.euler_gamma) * ends[0] + np.euler_gamma * ends[1])


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


def bootstrap_interval(
    statistic: Callable[[np.ndarray], float],
    samples: ArrayLike,
    level: float = 0.95,
    repetitions: int = 2000,
    seed: int = 0,
) -> Interval:
    """Compute a percentile interval by the stationary bootstrap (Politis and Romano 1994).

    Args:
      statistic: of samples like those given.
      samples: `[T]`, or `[T, K]` series that are resampled together, bar by bar.
      level: of confidence.
      repetitions: resamples.
      seed: the same seed gives the same interval.

    Returns:
      The interval; undefined (NaN) below 20 bars, and where the statistic is undefined for the
      samples or for any resample. Mean block length by Patton, Politis and White (2009), the
      longest over the columns.
    """
    values = bootstrap_values(statistic, samples, repetitions, seed)
    if values is None:
        return Interval(math.nan, math.nan, level)
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high), level)


def bootstrap_values(
    statistic: Callable[[np.ndarray], float], samples: ArrayLike, repetitions: int, seed: int
) -> np.ndarray | None:
    """Compute a statistic of stationary resamples `[repetitions]`; arguments as above.

    Returns:
      None below 20 bars, and where the statistic is undefined for any resample.
    """
    samples = np.asarray(samples, np.float64)
    columns = samples.reshape(len(samples), -1)
    if len(samples) < 20 or (columns.std(axis=0) < metrics.NO_VOLATILITY).all():
        return None
    # Imported here because it costs a second (statsmodels).
    from arch.bootstrap import StationaryBootstrap, optimal_block_length

    # arch's annotation says int; the mean length of a geometric block is any number above 1.
    block: Any = len(columns) ** (1 / 3)  # the rate of the optimal length, if none is estimated
    # A constant column has no autocorrelation to estimate a length from.
    moving = columns[:, columns.std(axis=0) >= metrics.NO_VOLATILITY]
    estimated = float(np.max(optimal_block_length(moving)["stationary"]))
    if math.isfinite(estimated):
        block = max(1.0, estimated)
    bootstrap = StationaryBootstrap(block, samples, seed=seed)
    with Progress(repetitions, "bootstrap", "resamples") as shown:

        def on(drawn: np.ndarray) -> np.ndarray:
            shown.update()
            return np.array(statistic(drawn))

        values = bootstrap.apply(on, repetitions)
    # A resample without a trade has no Sharpe ratio. The rest would be another statistic.
    return values.ravel() if np.isfinite(values).all() else None


def sharpe_interval(returns: ArrayLike, bars_per_year: float, seed: int = 0) -> Interval:
    """Compute the 95% interval of the annualised Sharpe ratio of returns `[T]`."""
    return bootstrap_interval(
        lambda r: metrics.sharpe(r, bars_per_year), metrics.known(returns), seed=seed
    )


def mean_difference_interval(
    returns: ArrayLike, other: ArrayLike, bars_per_year: float, seed: int = 0
) -> Interval:
    """Compute the 95% interval of `P * mean(r - r_other)`, return per year, paired by bar.

    Identical series differ by exactly 0: the interval is then [0, 0].
    """
    difference = np.asarray(returns, np.float64) - np.asarray(other, np.float64)
    # Resampling zeros has no volatility, which counts as undefined elsewhere.
    if not difference.any():
        return Interval(0.0, 0.0, 0.95)
    return bootstrap_interval(
        lambda d: float(d.mean() * bars_per_year), metrics.known(difference), seed=seed
    )


def sharpe_difference_interval(
    returns: ArrayLike, other: ArrayLike, bars_per_year: float, seed: int = 0
) -> Interval:
    """Compute the 95% interval of the difference of two annualised Sharpe ratios, by bar."""
    # Both columns are resampled by the same bars, so what they share cancels.
    pairs = np.column_stack([returns, other]).astype(np.float64)

    def difference(rows: np.ndarray) -> float:
        first, second = (metrics.sharpe(rows[:, k], bars_per_year) for k in (0, 1))
        return first - second

    return bootstrap_interval(difference, pairs[~np.isnan(pairs).any(axis=1)], seed=seed)
