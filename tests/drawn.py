"""Bars that are drawn at random, and a rule for them that needs its own positions."""

import dataclasses

import jax.numpy as jnp
import numpy as np

import nca_trader as nca
from nca_trader.types import Bars


def random_bars(rng, length, num_assets, missing=0.0, spread=0.01, unit="D"):
    """Bars of a random walk whose opens gap and whose bars are missing at a given rate."""
    shape = (length, num_assets)
    gap, body = rng.normal(0, spread, (2, *shape))
    gap[0] = 0.0
    close = 100.0 * np.exp(np.cumsum(gap + body, axis=0))
    open_ = close / np.exp(body)
    present = rng.random(shape) >= missing
    present[0] = True
    for t in range(1, length):  # a missing bar carries the last close
        open_[t] = np.where(present[t], open_[t], close[t - 1])
        close[t] = np.where(present[t], close[t], close[t - 1])
    return Bars(
        time=np.datetime64("2020-01-01", "ns") + np.arange(length) * np.timedelta64(1, unit),
        symbols=tuple(f"S{i}" for i in range(num_assets)),
        open=open_,
        high=np.maximum(open_, close),
        low=np.minimum(open_, close),
        close=close,
        volume=np.where(present, 1e6, 0.0),
        present=present,
        source="random",
    )


def rich_bars(rng, length, num_assets, missing=0.1, spread=0.02):
    """Random bars with volume that varies, quotes, dividends, funding, and an asset that goes."""
    bars = random_bars(rng, length, num_assets, missing, spread)
    shape, present = bars.close.shape, bars.present.copy()
    fields = {name: getattr(bars, name).copy() for name in ("open", "high", "low", "close")}
    gone = length * 2 // 3
    present[gone:, -1] = False
    present[(~present).all(axis=1), 0] = True  # a bar of no asset at all is no bar
    for values in fields.values():
        values[gone:, -1] = fields["close"][gone - 1, -1]
    return dataclasses.replace(
        bars,
        **fields,
        present=present,
        volume=np.where(present, rng.lognormal(7.0, 1.5, shape) * (rng.random(shape) > 0.05), 0.0),
        half_spread=rng.uniform(0, 1e-3, shape),
        dividend=np.where(rng.random(shape) < 0.03, 0.5, 0.0),
        funding=rng.normal(0, 1e-4, shape),
    )


def patient(hold):
    """Buys a fall, and leaves after `hold` bars or a gain of 2%: it needs its own positions."""

    def act(previous, bar, portfolio):
        fell = bar.close < previous * 0.995
        gained = bar.close > portfolio.entry_price * 1.02
        leave = (portfolio.bars_held >= hold) | gained
        target = jnp.where((portfolio.bars_held == 0) & fell, 0.4, jnp.nan)
        target = jnp.where(leave & (portfolio.bars_held > 0), 0.0, target)
        return jnp.where(bar.present, bar.close, previous), target

    return nca.Strategy(lambda num_assets: jnp.full(num_assets, jnp.nan), act, f"patient {hold}")
