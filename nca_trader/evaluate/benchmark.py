"""Returns against a benchmark: alpha, beta and the information ratio, with standard errors.

The standard errors allow for returns that are autocorrelated and whose variance changes (Newey and
West 1987). Those of ordinary least squares assume neither, and are too small for most strategies.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from nca_trader.errors import ConfigError
from nca_trader.evaluate.metrics import NO_VOLATILITY
from nca_trader.strategies.rules import buy_and_hold

HOLD = buy_and_hold()  # one object, so that its program is compiled once


class Relative(NamedTuple):
    """A strategy against a benchmark; NaN where it is undefined.

    Attributes:
      alpha: intercept of `r = alpha + beta r_b + e` times P, a return per year.
      alpha_error: its standard error.
      beta: slope.
      beta_error: its standard error.
      information_ratio: `mean(r - r_b) / std(r - r_b, ddof=1) * sqrt(P)`.
      information_ratio_error: its standard error.
    """

    alpha: float
    alpha_error: float
    beta: float
    beta_error: float
    information_ratio: float
    information_ratio_error: float


def lags_of(num_bars: int) -> int:
    """Return the number of lags of the Newey-West estimate, `floor(4 (T / 100)^(2/9))`.

    Source: Newey and West, Automatic Lag Selection in Covariance Matrix Estimation (1994).
    """
    return int(4.0 * (num_bars / 100.0) ** (2.0 / 9.0))


def relative(returns: ArrayLike, benchmark: ArrayLike, bars_per_year: float) -> Relative:
    """Regress returns on those of a benchmark, bar by bar.

    Args:
      returns: `[T]` simple returns of the strategy, in excess of the interest on cash.
      benchmark: `[T]` likewise of the benchmark on the same bars. A bar that is NaN in either is
        left out.
      bars_per_year: P.

    Raises:
      ConfigError: the two have different lengths.

    Source: Jensen (1968) for alpha; Lo, The Statistics of Sharpe Ratios (2002) for the error of the
    information ratio, with the variance of `d - ir (d^2 - 1) / 2` of standardised differences d.

    Example:
      >>> import numpy as np
      >>> market = np.random.default_rng(0).normal(0, 0.01, 500)
      >>> found = relative(0.5 * market + 1e-4, market, bars_per_year=252)
      >>> round(found.beta, 6), round(found.alpha, 6)
      (0.5, 0.0252)
    """
    r, b = np.asarray(returns, np.float64), np.asarray(benchmark, np.float64)
    if r.shape != b.shape or r.ndim != 1:
        raise ConfigError(
            f"returns have shape {r.shape} and the benchmark {b.shape}; give [T] of the same bars."
        )
    unknown = np.isnan(r) | np.isnan(b)
    if unknown.any():
        r, b = r[~unknown], b[~unknown]
    alpha = beta = alpha_error = beta_error = math.nan
    # Two parameters need three bars, and a benchmark that never moves has no slope.
    if r.size > 2 and b.std() >= NO_VOLATILITY:
        centred = b - b.mean()
        slope = centred / (centred @ centred)
        # Both estimates are weighted sums of returns; these are the weights.
        level = 1.0 / r.size - slope * b.mean()
        beta, alpha = float(slope @ r), float(level @ r)
        left = r - alpha - beta * b
        alpha_error, beta_error = _long_run_error(level * left), _long_run_error(slope * left)
    ratio, ratio_error = _information_ratio(r - b)
    annual = math.sqrt(bars_per_year)
    return Relative(
        alpha * bars_per_year,
        alpha_error * bars_per_year,
        beta,
        beta_error,
        ratio * annual,
        ratio_error * annual,
    )


def _information_ratio(difference: np.ndarray) -> tuple[float, float]:
    """Compute the ratio per bar and its standard error."""
    if difference.size < 3 or (deviation := difference.std(ddof=1)) < NO_VOLATILITY:
        return math.nan, math.nan
    mean = difference.mean()
    ratio = float(mean / deviation)
    z = (difference - mean) / deviation
    # The delta method: the mean and the deviation are both estimated.
    return ratio, _long_run_error((z - 0.5 * ratio * (z * z - 1.0)) / difference.size)


def _long_run_error(terms: np.ndarray) -> float:
    """Compute the standard error of a sum of terms `[T]` that may be autocorrelated.

    Its variance has Bartlett's weights, `sum_t x_t^2 + 2 sum_l (1 - l / (L + 1)) sum_t x_t x_(t-l)`
    for L lags.
    """
    lags = lags_of(terms.size)
    variance = float(terms @ terms)
    for lag in range(1, min(lags, terms.size - 1) + 1):
        # Not `@`, whose threads wait for each other: 60 times as long on cores that others use.
        product = float(np.einsum("i,i->", terms[lag:], terms[:-lag]))
        variance += 2.0 * (1.0 - lag / (lags + 1.0)) * product
    # Bartlett's weights make it 0 or above, but for rounding.
    return math.sqrt(max(variance, 0.0))
