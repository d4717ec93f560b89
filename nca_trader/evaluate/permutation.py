"""Whether an account's timing earned anything: its positions against the same positions shifted.

All circular shifts of the positions against the returns keep exposure, turnover and the order of
the positions, and lose their timing alone. Where timing is worth nothing and returns are
stationary, each shift is as likely as the true one, so the rank of the true one is a p-value.
Source: Lehmann and Romano, Testing Statistical Hypotheses (2005), section 15.2, for tests over a
group of transformations; Aronson, Evidence-Based Technical Analysis (2006), chapter 5, for trading.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from nca_trader.evaluate.result import Result
from nca_trader.progress import tracked

MOST = 5000  # shifts that are computed; of longer spans as many are drawn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """What shifts of the positions earned.

    Attributes:
      earned: mean return per year of the true positions, before costs.
      shifted: mean and highest of the shifts.
      p_value: share of all shifts, the true one included, that earned at least as much.
      shifts: how many.
    """

    earned: float
    shifted: tuple[float, float]
    p_value: float
    shifts: int

    @property
    def sentence(self) -> str:
        """The finding in words."""
        found = "not distinguishable from chance" if self.p_value > 0.05 else "not chance alone"
        return (
            f"Before costs the positions earned {self.earned:+.1%} a year; the same positions at "
            f"{self.shifts:,} other times earned {self.shifted[0]:+.1%} on average. Its timing is "
            f"{found} (p = {self.p_value:.2f})."
        )


def timing_test(result: Result, seed: int = 0) -> Timing:
    """Compare what an account's positions earned with all their circular shifts in time.

    The positions of all assets shift together, so that what they share stays.

    Args:
      result: of `nca.backtest`.
      seed: of the shifts that are drawn where there are more than 5,000.

    Example:
      >>> import nca_trader as nca
      >>> bars = nca.sample_bars("sp500")[-500:]
      >>> timing_test(nca.backtest(bars, nca.rules.buy_and_hold())).p_value > 0.05
      True
    """
    bars = result.traded_bars
    with np.errstate(invalid="ignore"):
        moved = np.nan_to_num(bars.close[1:] / bars.close[:-1] - 1.0)
    held = result.weights.to_numpy()[:-1]
    return shifted(held, moved, result.bars_per_year, seed)


def shifted(held: np.ndarray, moved: np.ndarray, bars_per_year: float, seed: int = 0) -> Timing:
    """Run the test on weights `[T, A]` and the returns `[T, A]` that they earned."""
    length = len(held)
    shifts = np.arange(1, length)
    if length > MOST:
        shifts = np.sort(np.random.default_rng(seed).choice(shifts, MOST, replace=False))

    def mean(shift: int) -> float:
        return float((np.roll(held, shift, axis=0) * moved).sum()) / length * bars_per_year

    true, others = mean(0), np.array([mean(k) for k in tracked(shifts.tolist(), "shift", "times")])
    # A constant position earns the same at all times but for rounding, and has no timing.
    least = true - 1e-9 * max(1.0, abs(true))
    return Timing(
        earned=true,
        shifted=(float(others.mean()), float(others.max())),
        p_value=float(1 + (others >= least).sum()) / (1 + len(others)),
        shifts=len(others),
    )


def break_even(result: Result) -> float:
    """Return the cost per traded notional at which a result's mean return is 0.

    It is what the account earned before costs, divided by what it traded; negative where it lost
    before costs, and NaN where it never traded. Decisions are those at the costs that were charged.

    Example:
      >>> import nca_trader as nca
      >>> bars = nca.sample_bars("sp500")[-500:]
      >>> result = nca.backtest(bars, nca.rules.momentum(20), nca.Costs(commission=5e-4))
      >>> bool(break_even(result) < 5e-4) == bool(result.judged_returns.mean() < 0)
      True
    """
    traded = float(result.turnover.sum())
    if traded == 0.0:
        return float("nan")
    return float(np.nansum(result.judged_returns) + result.cost.sum()) / traded
