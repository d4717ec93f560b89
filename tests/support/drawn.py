"""Bars and parameters that are drawn at random, and a rule that needs its own positions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import nca_trader as nca
from nca_trader.types import Bars, EnvSpec

EVERY_COST = nca.Costs(
    commission=5e-4,
    slippage=2e-4,
    half_spread=1e-4,
    impact=0.1,
    fixed_fee=1.0,
    borrow_fee=0.02,
    interest_lend=0.04,
    interest_borrow=0.07,
    funding=0.03,
    liquidation_fee=0.01,
)


def bars_of(close, open_=None, start="2020-01-01", step="D", **columns):
    """Bars `[N, A]` of these prices, a day or another `step` apart; what is not given is plain."""
    close = np.asarray(close, float)
    close = close[:, None] if close.ndim == 1 else close
    open_ = close if open_ is None else open_
    plain = dict(
        time=np.datetime64(start, "ns") + np.arange(len(close)) * np.timedelta64(1, step),
        symbols=tuple(f"S{i}" for i in range(close.shape[1])),
        open=open_, high=np.maximum(open_, close), low=np.minimum(open_, close), close=close,
        volume=np.ones(close.shape), present=np.ones(close.shape, bool),
    )  # fmt: skip
    return Bars(**plain | columns)


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
    volume = np.where(present, 1e6, 0.0)
    return bars_of(close, open_, step=unit, volume=volume, present=present, source="random")


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


SPEC = EnvSpec(
    symbols=("A", "B", "C"),
    features=("rsi", "macd"),
    targets=(-0.3, 0.0, 0.3),
    warmup=0,
    nearest=((2, 1), (2, 0), (0, 1)),
)


def random_input(length, batch=2, seed=1, assets=3):
    """Two features `[B, T, A, 2]` of bars of which a fifth is missing, and a mask of the others."""
    rng = np.random.default_rng(seed)
    x = 3.0 * rng.normal(size=(batch, length, assets, 2))
    return x.astype(np.float32), rng.random((batch, length, assets)) > 0.2


def random_params(policy, seed=0, scale=0.5):
    """No parameter zero: an untrained rule changes nothing and would hide a fault."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(policy.init, jax.random.key(0))
    return jax.tree.map(lambda s: jnp.asarray(scale * rng.normal(size=s.shape), "f4"), shapes)


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
