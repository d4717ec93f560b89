"""Returns against a benchmark: alpha, beta and the information ratio, with standard errors.

The standard errors allow for returns that are autocorrelated and whose variance changes (Newey and
West 1987). Those of ordinary least squares assume neither, and are too small for most strategies.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from nca_trader.errors import ConfigError
from nca_trader.evaluate.metrics import NO_VOLATILITY
from nca_trader.numerics import row_sums
from nca_trader.types import Bars


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
      returns: `[T]` simple returns of the strategy.
      benchmark: `[T]` simple returns of the benchmark on the same bars. A bar that is NaN in
        either is left out.
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
        mean = b.mean()
        # One array for all products: to ask the system for memory takes longer than they do.
        centred, product = b - mean, np.empty(r.size)
        scatter = float(np.multiply(centred, centred, out=product).sum())
        beta = float(np.multiply(centred, r, out=product).sum()) / scatter
        alpha = float(r.mean() - beta * mean)
        left = r - alpha
        left -= np.multiply(b, beta, out=product)
        # Both estimates are weighted sums of the residuals; these are the weights.
        slope = np.divide(centred, scatter, out=centred)
        level = np.multiply(slope, -mean, out=product)
        level += 1.0 / r.size
        lags = lags_of(r.size)
        alpha_error, beta_error = (
            _long_run_error(np.multiply(w, left, out=w), lags) for w in (level, slope)
        )
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
    z = difference - mean
    z /= deviation
    # The delta method: the mean and the deviation are both estimated.
    influence = z * z
    influence -= 1.0
    influence *= -0.5 * ratio
    influence += z
    influence /= difference.size
    return ratio, _long_run_error(influence, lags_of(difference.size))


def _long_run_error(terms: np.ndarray, lags: int) -> float:
    """Compute the standard error of a sum of terms `[T]` that may be autocorrelated.

    Its variance has Bartlett's weights, `sum_t x_t^2 + 2 sum_l (1 - l / (L + 1)) sum_t x_t x_(t-l)`
    for L lags. That is the mean square of the sums of L + 1 terms in a row. These are sums of sums
    of 1, 2, 4, ... terms in a row: a few additions and not a product per lag.
    """
    window = lags + 1
    some = np.zeros(terms.size + 2 * lags)
    some[lags : lags + terms.size] = terms
    sums, width, done = np.zeros(terms.size + lags), 1, 0
    while True:
        # The binary digits of L + 1 say which sums of powers of two it is made of.
        if window & width:
            sums += some[done : done + sums.size]
            done += width
        if done == window:
            return math.sqrt(float(np.square(sums, out=sums).sum()) / window)
        some = some[:-width] + some[width:]
        width *= 2


def buy_and_hold(bars: Bars) -> pd.Series:
    """Compute the equity `[N]` of buying every asset at its first close and holding it.

    Each asset gets an equal share of the capital, 1. There are no costs, and no rebalancing. An
    asset's share is cash until its first bar.

    Example:
      >>> import nca_trader as nca
      >>> bars = nca.sample_bars("sp500")[-250:].select("SP500")
      >>> held = buy_and_hold(bars)
      >>> bool(abs(held.iloc[-1] - bars.close[-1, 0] / bars.close[0, 0]) < 1e-12)
      True
    """
    known = ~np.isnan(bars.close)
    first = known.argmax(axis=0)  # 0 where there is none
    start = bars.close[first, np.arange(bars.num_assets)]
    growth = np.where(known, bars.close / start, 1.0)
    return pd.Series(row_sums(growth) / bars.num_assets, bars.index, name="buy and hold")
