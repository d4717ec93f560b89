"""Performance metrics, with the names and formulas of the field.

They take simple returns `r [T]`, one per bar, in float64; `simple_returns` computes them from
equity. One rule for NaN: a NaN return is a bar without information and is left out. A metric that
is then undefined (no bars, or no volatility to divide by) is NaN, never 0 and never infinite.
Metrics against a benchmark are in `evaluate.benchmark`, those of trades in `evaluate.trades`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from nca_trader.errors import ConfigError

NO_VOLATILITY = 1e-12  # per bar; a constant return leaves this much behind in float64
NO_RETURN = 1e-15  # of a bar; less is rounding
NO_WEIGHT = 1e-9  # of equity; a closed position leaves this much behind in a pair of floats
TAIL = 0.05  # share of bars in a tail: value at risk is that of 95%


def simple_returns(equity: ArrayLike) -> np.ndarray:
    """Compute simple returns of an equity curve: `r_t = E_t / E_{t-1} - 1`.

    Args:
      equity: `[N]`, positive; `E_{-1}`, before the first bar, is 1.

    Returns:
      `[N]`.
    """
    equity = np.asarray(equity, np.float64)
    # No return starts at an equity of 0 or less; a bankrupt account stops at a floor above 0.
    if equity.ndim != 1 or (equity <= 0).any():
        raise ConfigError(
            f"equity must be one column of positive numbers; got shape {equity.shape}, "
            f"least {np.min(equity, initial=np.inf):g}; give one account's equity."
        )
    return equity / np.concatenate([[1.0], equity[:-1]]) - 1.0


class Sums(NamedTuple):
    """What metrics need of returns r, all `[M]` float64 of M accounts, or one number each.

    The metrics of sums alone take it in place of returns, see `of_sums`.

    bars, count: of bars, with and without those of NaN, whose time has passed. growth:
    `prod(1 + r)`. depth: the deepest drawdown. mean, variance, third, fourth: central moments, all
    divided by `count`. downside: mean of `min(r, 0)^2`. won, moved: bars with a gain, and with a
    return.
    """

    bars: Any
    count: Any
    growth: Any
    depth: Any
    mean: Any
    variance: Any
    third: Any
    fourth: Any
    downside: Any
    won: Any
    moved: Any


# An undefined quotient is NaN by `_defined`, and no reason to warn.
_quiet = np.errstate(all="ignore")


@_quiet
def sums(returns: ArrayLike | Sums) -> Sums:
    """Compute the sums of one account's simple returns `[T]`."""
    if isinstance(returns, Sums):
        return returns
    r = drop_nan(returns)
    count = np.float64(r.size)
    mean = r.sum() / count
    centred = r - mean
    square = centred * centred
    return Sums(
        bars=np.float64(np.size(returns)),
        count=count,
        growth=np.prod(1.0 + r),
        depth=drawdown_series(r).min(initial=0.0),
        mean=mean,
        variance=square.sum() / count,
        third=(square * centred).sum() / count,
        fourth=(square * square).sum() / count,
        downside=(np.minimum(r, 0.0) ** 2).sum() / count,
        won=(r > NO_RETURN).sum(dtype=np.float64),
        moved=(np.abs(r) > NO_RETURN).sum(dtype=np.float64),
    )


def _defined(condition: Any, value: Any) -> Any:
    """Return `value` where `condition` holds and NaN elsewhere, a float of one account."""
    found = np.where(condition, value, np.nan)
    return found if found.ndim else float(found)


def drop_nan(returns: ArrayLike) -> np.ndarray:
    """Return the returns that are not NaN, `[T]` float64."""
    r = np.asarray(returns, np.float64)
    if r.ndim != 1:
        raise ConfigError(f"returns have shape {r.shape}; metrics take one account's, [T].")
    unknown = np.isnan(r)
    return r[~unknown] if unknown.any() else r


def traded_returns(returns: ArrayLike, turnover: ArrayLike | None) -> np.ndarray:
    """Return the returns that ratios are computed from: zeros if nothing was ever filled.

    Args:
      returns: `[T]`.
      turnover: `[T]` traded notional as a fraction of equity; None where it is unknown.
    """
    r = np.asarray(returns, np.float64)
    # Without a fill, equity moves by the interest on cash alone. A ratio of that does not measure
    # a strategy; the ratios of zeros are NaN.
    return r if turnover is None or np.nansum(np.asarray(turnover)) > 0.0 else np.zeros_like(r)


def excess_returns(equity: ArrayLike, interest: ArrayLike | None) -> np.ndarray:
    """Compute returns less the interest earned on cash, `r_t - max(i_t, 0) / E_{t-1}`.

    Args:
      equity: `[N]`, positive.
      interest: `[N]` i, received on cash (positive) or paid for borrowed money (negative), in the
        unit of equity; None for none. What was paid is a cost of the strategy and stays in.

    Returns:
      `[N]`. Without interest they are the simple returns.

    Example:
      >>> excess_returns([1.02, 1.02], interest=[0.01, 0.0]).round(6).tolist()
      [0.01, 0.0]
    """
    r = simple_returns(equity)
    if interest is None or not np.any(interest):
        return r
    equity = np.asarray(equity, np.float64)
    earned = np.maximum(np.asarray(interest, np.float64), 0.0)
    return r - earned / np.concatenate([[1.0], equity[:-1]])


def total_return(returns: ArrayLike | Sums) -> Any:
    """Compute `prod(1 + r) - 1`. NaN for no bars."""
    r = sums(returns)
    return _defined(r.count > 0, r.growth - 1.0)


@_quiet
def cagr(returns: ArrayLike | Sums, bars_per_year: float) -> Any:
    """Compute the annual growth rate, `prod(1 + r) ** (P / T) - 1`; P = bars per year.

    NaN for no bars, and for an account that lost more than its equity.
    """
    r = sums(returns)
    return _defined((r.count > 0) & (r.growth >= 0.0), r.growth ** (bars_per_year / r.bars) - 1.0)


@_quiet
def annual_volatility(returns: ArrayLike | Sums, bars_per_year: float) -> Any:
    """Compute `std(r, ddof=1) * sqrt(P)`. NaN for fewer than two bars."""
    r = sums(returns)
    return _defined(r.count > 1, _deviation(r) * math.sqrt(bars_per_year))


def _deviation(r: Sums) -> Any:
    return np.sqrt(r.variance * r.count / (r.count - 1.0))


@_quiet
def sharpe(returns: ArrayLike | Sums, bars_per_year: float, risk_free: float = 0.0) -> Any:
    """Compute the Sharpe ratio, `mean(r - rf / P) / std(r, ddof=1) * sqrt(P)` (Sharpe 1994).

    Args:
      returns: `[T]`.
      bars_per_year: P.
      risk_free: rf, a simple rate per year, e.g. 0.015.

    Returns:
      The annualised ratio; NaN where the returns have no volatility: an account that is always
      flat has no Sharpe ratio.
    """
    r = sums(returns)
    deviation, mean = _deviation(r), r.mean - risk_free / bars_per_year
    # NaN takes the place of 0, which would rank an account that never trades above one that loses.
    return _defined(deviation >= NO_VOLATILITY, mean / deviation * math.sqrt(bars_per_year))


@_quiet
def downside_deviation(returns: ArrayLike | Sums, bars_per_year: float) -> Any:
    """Compute `sqrt(mean(min(r, 0) ** 2) * P)`, the mean over all bars (Sortino 1994)."""
    r = sums(returns)
    return _defined(r.count > 0, np.sqrt(r.downside * bars_per_year))


@_quiet
def sortino(returns: ArrayLike | Sums, bars_per_year: float) -> Any:
    """Compute `mean(r) * P / downside_deviation`, target 0. NaN where no bar lost."""
    r = sums(returns)
    downside = downside_deviation(r, bars_per_year)
    return _defined(downside >= NO_VOLATILITY, r.mean * bars_per_year / downside)


def drawdown_series(returns: ArrayLike) -> np.ndarray:
    """Compute `E_t / max(1, E_0 .. E_t) - 1`, `[T]`, 0 or below; a NaN return is a return of 0."""
    r = np.asarray(returns, np.float64)
    equity = np.cumprod(1.0 + (r if np.isfinite(r).all() else np.nan_to_num(r, nan=0.0)))
    # The capital before the first bar counts as a high: a loss on the first bar is a drawdown.
    return equity / np.maximum(np.maximum.accumulate(equity), 1.0) - 1.0


def max_drawdown(returns: ArrayLike | Sums) -> Any:
    """Compute the deepest drawdown, 0 or below, e.g. -0.55. NaN for no bars."""
    r = sums(returns)
    return _defined(r.count > 0, r.depth)


@_quiet
def calmar(returns: ArrayLike | Sums, bars_per_year: float) -> Any:
    """Compute `cagr / |max_drawdown|` (Young 1991) of the span. NaN where nothing was lost."""
    r = sums(returns)
    deepest = max_drawdown(r)
    return _defined(deepest < 0.0, np.divide(cagr(r, bars_per_year), -deepest))


def max_drawdown_duration(returns: ArrayLike) -> float:
    """Compute the longest time below an earlier high, in bars; 0 without a drawdown.

    It runs from the bar of the high to the bar that reaches the high again, or to the last bar
    where none does. NaN bars count, because their time has passed. NaN for no bars.
    """
    if not drop_nan(returns).size:
        return math.nan
    below = drawdown_series(returns) < 0.0
    # The distance between two bars at a high, the start and the end included.
    edges = np.flatnonzero(np.concatenate([[True], ~below, [True]]))
    lengths = np.diff(edges)
    # A drawdown that is open at the end has no bar of recovery to count.
    if below[-1]:
        lengths[-1] -= 1
    return float(lengths[lengths > 1].max(initial=1 if below[-1] else 0))


def ulcer_index(returns: ArrayLike) -> float:
    """Compute `sqrt(mean(drawdown ** 2))` (Martin and McCann 1989). NaN for no bars."""
    r = drop_nan(returns)
    return float(np.sqrt(np.mean(drawdown_series(r) ** 2))) if r.size else math.nan


def omega(returns: ArrayLike, threshold: float = 0.0) -> float:
    """Compute `sum(max(r - h, 0)) / sum(max(h - r, 0))` (Keating and Shadwick 2002).

    Args:
      returns: `[T]`.
      threshold: h, a return per bar.

    Returns:
      NaN where no bar was below the threshold.
    """
    r = drop_nan(returns) - threshold
    lost = -np.minimum(r, 0.0).sum()
    return float(np.maximum(r, 0.0).sum() / lost) if lost > 0 else math.nan


def tail_ratio(returns: ArrayLike) -> float:
    """Compute `|95% quantile| / |5% quantile|` of returns. NaN where the 5% quantile is 0."""
    r = drop_nan(returns)
    if not r.size:
        return math.nan
    low, high = np.abs(np.quantile(r, [TAIL, 1.0 - TAIL]))
    return float(high / low) if low > 0 else math.nan


def value_at_risk(returns: ArrayLike) -> float:
    """Compute the 5% quantile of returns per bar, e.g. -0.02; NaN for no bars."""
    r = drop_nan(returns)
    return float(np.quantile(r, TAIL)) if r.size else math.nan


def expected_shortfall(returns: ArrayLike) -> float:
    """Compute the mean of the returns at or below `value_at_risk` (CVaR); NaN for no bars."""
    r = drop_nan(returns)
    return float(r[r <= np.quantile(r, TAIL)].mean()) if r.size else math.nan


def stability(returns: ArrayLike) -> float:
    """Compute R squared of a line through cumulative log-returns, 1 for a constant growth.

    NaN for fewer than two bars, for an equity that never moved, and after a loss of everything.
    """
    r = drop_nan(returns)
    if r.size < 2 or (r <= -1.0).any():
        return math.nan
    path = np.cumsum(np.log1p(r))
    if path.std() < NO_VOLATILITY:
        return math.nan
    return float(np.corrcoef(np.arange(r.size), path)[0, 1] ** 2)


@_quiet
def hit_rate(returns: ArrayLike | Sums) -> Any:
    """Compute the share of winning bars among those with a return other than 0; NaN for none.

    A return within 1e-15 of 0 is rounding, e.g. of an account that holds cash.
    """
    r = sums(returns)
    return _defined(r.moved > 0, r.won / r.moved)


@_quiet
def skewness(returns: ArrayLike | Sums) -> Any:
    """Compute the third standardised moment, `mean((r - mean)^3) / std(ddof=0)^3`."""
    r = sums(returns)
    deviation = np.sqrt(r.variance)
    return _defined(deviation >= NO_VOLATILITY, r.third / deviation**3)


@_quiet
def kurtosis(returns: ArrayLike | Sums) -> Any:
    """Compute the fourth standardised moment, not in excess: a Gaussian has 3."""
    r = sums(returns)
    return _defined(np.sqrt(r.variance) >= NO_VOLATILITY, r.fourth / r.variance**2)


def positions(weights: ArrayLike) -> np.ndarray:
    """Return -1 (short), 0 (flat) or 1 (long) of each weight, in the shape of `weights`.

    A weight within 1e-9 of 0 is rounding, and flat. So is a NaN weight.
    """
    held = np.asarray(weights, np.float64)
    # A comparison with NaN is false on both sides, which is flat.
    return np.subtract(held > NO_WEIGHT, held < -NO_WEIGHT, dtype=np.int8)


def exposure(weights: ArrayLike) -> float:
    """Compute the share of bars with a position in an asset; `weights` `[N, A]`. NaN for none."""
    held = positions(weights)
    return float(np.mean(held.any(axis=1))) if len(held) else math.nan


def annual_turnover(turnover: ArrayLike, bars_per_year: float) -> float:
    """Compute the traded notional per year, in multiples of equity: `sum_t sum_i |d_ti| * P / N`.

    Args:
      turnover: `[N]`, traded notional of each bar as a fraction of equity, both sides counted: from
        flat to fully long is 1, from long to short 2. NaN counts as 0.
      bars_per_year: P.
    """
    traded = np.asarray(turnover, np.float64)
    return float(np.nansum(traded) * bars_per_year / traded.size) if traded.size else math.nan


def summary(
    equity: pd.Series,
    weights: pd.DataFrame | None = None,
    turnover: pd.Series | None = None,
    bars_per_year: float = 252.0,
    interest: pd.Series | None = None,
) -> dict[str, float]:
    """Compute every metric of one account's equity, by name.

    Args:
      equity: `[N]` equity at each bar's close.
      weights: `[N, A]` weights held at each close, for `exposure`.
      turnover: `[N]` traded fraction of equity per bar, for `turnover` (per year).
      bars_per_year: P, see `Bars.bars_per_year`.
      interest: `[N]` on cash, which ratios leave out, see `excess_returns`; None for none.

    Returns:
      Floats; NaN where a metric is undefined or its input was not given. Where `turnover` is 0
      throughout, sharpe, sortino, calmar, hit_rate, skewness, kurtosis, omega and tail_ratio are
      NaN. `interest` is the sum of what cash earned, as a fraction of the capital.
    """
    plain = simple_returns(equity)
    grown, excess = (traded_returns(r, turnover) for r in (plain, excess_returns(equity, interest)))
    whole = sums(plain)
    # Usually all three are the same returns, and their sums are computed once.
    of_grown, of_excess = (
        whole if np.array_equal(r, plain, equal_nan=True) else sums(r) for r in (grown, excess)
    )
    return {
        "bars": float(drop_nan(plain).size),
        **of_sums(whole, of_grown, of_excess, bars_per_year),
        "exposure": math.nan if weights is None else exposure(weights),
        "turnover": math.nan if turnover is None else annual_turnover(turnover, bars_per_year),
        "interest": 0.0 if interest is None else float(np.maximum(interest, 0.0).sum()),
        **of_tails(plain, grown, excess),
        "stability": stability(plain),
        "max_drawdown_duration": max_drawdown_duration(plain),
        "ulcer_index": ulcer_index(plain),
    }


def of_sums(r: Any, grown: Any, ratios: Any, bars_per_year: float) -> dict[str, Any]:
    """Compute the metrics of sums over bars, of one account or of M.

    Args:
      r: `Sums` of all returns.
      grown: of the same, `traded_returns`.
      ratios: of those in excess of the interest on cash, `traded_returns`.
      bars_per_year: P.
    """
    return {
        "total_return": total_return(r),
        "cagr": cagr(r, bars_per_year),
        "annual_volatility": annual_volatility(r, bars_per_year),
        "sharpe": sharpe(ratios, bars_per_year),
        "sortino": sortino(ratios, bars_per_year),
        "max_drawdown": max_drawdown(r),
        "calmar": calmar(grown, bars_per_year),
        "hit_rate": hit_rate(ratios),
        "skewness": skewness(ratios),
        "kurtosis": kurtosis(ratios),
    }


def of_tails(r: Any, grown: Any, ratios: Any) -> dict[str, float]:
    """Compute the metrics that need every return of an account; arguments as in `of_sums`."""
    return {
        "value_at_risk": value_at_risk(r),
        "expected_shortfall": expected_shortfall(r),
        "tail_ratio": tail_ratio(grown),
        "omega": omega(ratios),
    }


@_quiet
def of_trades(ended: Any, winners: Any, gains: Any, losses: Any) -> dict[str, Any]:
    """Compute the metrics of sums over trades, of one account or of M.

    Args:
      ended: how many trades ended.
      winners: how many of them gained.
      gains: what these gained, a fraction of the capital.
      losses: what the others lost, 0 or above.
    """
    ended, losses = np.asarray(ended, np.float64), np.asarray(losses, np.float64)
    return {
        "win_rate": _defined(ended > 0, winners / ended),
        "profit_factor": _defined(losses > 0.0, gains / losses),
        "expectancy": _defined(ended > 0, (gains - losses) / ended),
    }
