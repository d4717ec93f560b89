"""A panel of assets with a planted trend that decays, and the Sharpe ratio of the best rule.

Each asset's drift is a latent AR(1), so that a trend begins by chance and decays:

    x[t+1] = phi x[t] + sqrt(1 - phi^2) w[t+1]        r[t+1] = sigma (strength x[t] + e[t+1])

The best linear forecast of x from past returns is a Kalman filter with the steady variance P,

    P = phi^2 P / (1 + strength^2 P) + 1 - phi^2

and the forecast has variance `v = 1 - P`. Holding `forecast / sigma` in each of A independent
assets earns, per bar before costs, the Sharpe ratio

    sqrt(A) strength v / sqrt(v + strength^2 v (2 v + P)).

Source: Kalman 1960, "A new approach to linear filtering and prediction problems"; the moments are
those of a Gaussian x given its forecast.
"""

from __future__ import annotations

import dataclasses
import math
import types

import numpy as np
import pandas as pd

from nca_trader.config.ranges import between, refuse, whole
from nca_trader.types import Bars

DAYS = 252.0  # bars of a year


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrendPanel:
    """A simulated panel.

    Attributes:
      bars: N daily bars of A assets; opens are the closes before.
      drift: `[N, A]` the latent x, which no agent observes.
      forecast: `[N, A]` the best linear forecast of x from the returns so far.
      sharpe: annual Sharpe ratio of the best linear rule, before costs.
      strength: of the trend, as a fraction of a bar's volatility.
    """

    bars: Bars
    drift: np.ndarray
    forecast: np.ndarray
    sharpe: float
    strength: float


def best_sharpe(strength: float, phi: float, num_assets: int) -> float:
    """Return the annual Sharpe ratio of the best linear rule, before costs."""
    kept = _kept(strength, phi)
    v, s2 = 1.0 - kept, strength**2
    second = v + s2 * v * (2.0 * v + kept)
    return math.sqrt(DAYS * num_assets) * strength * v / math.sqrt(second)


def _kept(strength: float, phi: float) -> float:
    """Return P, the variance of x around its forecast: the root of its quadratic equation."""
    s2, noise = strength**2, 1.0 - phi**2
    b = 1.0 - phi**2 - s2 * noise
    return 2.0 * noise / (b + math.sqrt(b * b + 4.0 * s2 * noise))


def trend_panel(
    num_assets: int = 12,
    num_bars: int = 7560,
    seed: int = 0,
    *,
    sharpe: float = 1.0,
    half_life: float = 60.0,
) -> TrendPanel:
    """Draw a panel whose best rule has a known Sharpe ratio.

    Assets differ in volatility, from 5% to 40% a year.

    Args:
      num_assets: A.
      num_bars: N.
      seed: of the draw.
      sharpe: annual Sharpe ratio of the best linear rule, before costs.
      half_life: bars after which half of a trend is left.

    Raises:
      ConfigError: an argument out of range.

    Example:
      >>> panel = trend_panel(3, 1000, sharpe=2.0)
      >>> panel.bars.close.shape, round(panel.sharpe, 6)
      ((1000, 3), 2.0)
    """
    given = types.SimpleNamespace(**locals())
    refuse(
        whole(given, 1, "num_assets"),
        whole(given, 2, "num_bars"),
        whole(given, 0, "seed"),
        between(given, "(0, 10]", "sharpe"),
        between(given, "[1, inf)", "half_life"),
    )
    phi = 0.5 ** (1.0 / half_life)
    # The ratio rises with the strength, so a bisection finds it.
    low, high = 1e-6, 10.0
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (
            (middle, high) if best_sharpe(middle, phi, num_assets) < sharpe else (low, middle)
        )
    strength = high
    rng = np.random.default_rng(seed)
    shocks = rng.standard_normal((2, num_bars, num_assets))
    sigma = np.geomspace(0.05, 0.40, num_assets) / math.sqrt(DAYS)
    x, forecast = rng.standard_normal(num_assets), np.zeros(num_assets)
    kept = _kept(strength, phi)
    gain = strength * kept / (1.0 + strength**2 * kept)
    drift, seen, returns = (np.zeros((num_bars, num_assets)) for _ in range(3))
    for t in range(num_bars):
        scaled = strength * x + shocks[0, t]
        forecast = phi * (forecast + gain * (scaled - strength * forecast))
        x = phi * x + math.sqrt(1.0 - phi**2) * shocks[1, t]
        returns[t], drift[t], seen[t] = sigma * scaled, x, forecast
    close = 100.0 * np.cumprod(np.maximum(1.0 + returns, 1e-3), axis=0)
    open_ = np.concatenate([np.full((1, num_assets), 100.0), close[:-1]])
    bars = Bars(
        time=pd.bdate_range("1980-01-01", periods=num_bars).to_numpy("datetime64[ns]"),
        symbols=tuple(f"T{i:02d}" for i in range(num_assets)),
        open=open_,
        high=np.maximum(open_, close),
        low=np.minimum(open_, close),
        close=close,
        volume=np.ones_like(close),
        present=np.ones(close.shape, bool),
        source=f"simulated trend panel, seed {seed}",
        note=f"Simulated: the best rule has a Sharpe ratio of {sharpe:g} before costs.",
    )
    found = best_sharpe(strength, phi, num_assets)
    return TrendPanel(bars=bars, drift=drift, forecast=seen, sharpe=found, strength=strength)
