"""Markets whose optimum is a formula.

`trend_panel` draws assets with a planted trend that decays. Each asset's drift is a latent AR(1),
so that a trend begins by chance:

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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jax import Array

from nca_trader.config.ranges import between, refuse, whole
from nca_trader.errors import ConfigError
from nca_trader.markets.market import (
    Path,
    Policy,
    SyntheticMarket,
    autoregression,
    builder,
    linear_pay,
    recur,
)
from nca_trader.numerics import arrays
from nca_trader.types import Bars, Costs, Tensor


def constant_policy(weight: float) -> Policy:
    """Return the policy that holds the same weight in every state."""

    def policy(state: Tensor, position: Tensor) -> Tensor:
        return arrays(position).full_like(position, weight)

    return policy


def same_for_all(value: float):
    """Return the expected return of a market without a state."""

    def expected_return(state: Tensor) -> Tensor:
        return arrays(state).full((*state.shape[:-1], 1), value, dtype=state.dtype)

    return expected_return


def log_growth(previous: Tensor, position: Tensor, r: Tensor) -> Tensor:
    """Return `ln(1 + sum_i a_i r_i)`: the growth of equity, rebalanced every bar, without cost."""
    return arrays(r).log1p((position * r).sum(axis=-1))


@builder(sigma="(0, inf)", cost="[0, 1)")
def martingale(*, sigma: float = 0.01, cost: float = 0.001) -> SyntheticMarket:
    """Return simple returns exp(sigma z - sigma^2 / 2) - 1 of mean 0: the best is never to trade.

    No state. An agent that earns more than 0 here by 3 standard errors looks ahead.
    """

    def generate(key: Array, num_bars: int) -> Path:
        shock = sigma * jax.random.normal(key, (num_bars, 1))
        return Path(jnp.zeros((num_bars, 0)), jnp.expm1(shock - sigma**2 / 2), jnp.zeros(1))

    return SyntheticMarket(
        reward="simple",
        generate=generate,
        pay=linear_pay(cost),
        costs=Costs(commission=cost),
        optimum=0.0,
        optimal_policy=lambda state, position: position,
        expected_return=same_for_all(0.0),
    )


@builder(p="(0, 1)", move="(0, 1)")
def kelly(*, p: float = 0.55, move: float = 0.2) -> SyntheticMarket:
    """Return a coin: the price moves by +move with probability p, else by -move (simple returns).

    No state; pays ln(1 + a r). The best stake is f = a move = 2 p - 1, so the best weight is
    a = (2 p - 1) / move, and the optimum ln 2 + p ln p + q ln q with q = 1 - p, for any move.
    A move of 1, the textbook's coin, takes the price to zero; `details["stake"]` is f.
    Source: Kelly, A New Interpretation of Information Rate (1956).
    """
    stake, q = 2 * p - 1, 1 - p

    def generate(key: Array, num_bars: int) -> Path:
        heads = jax.random.bernoulli(key, p, (num_bars, 1))
        return Path(jnp.zeros((num_bars, 0)), jnp.where(heads, move, -move), jnp.zeros(1))

    return SyntheticMarket(
        reward="simple",
        generate=generate,
        pay=log_growth,
        bounds=(-1.0 / move, 1.0 / move),
        environment=dict(actions="weights", order="rebalance", reward="log_return"),
        optimum=math.log(2) + p * math.log(p) + q * math.log(q),
        optimal_policy=constant_policy(stake / move),
        expected_return=same_for_all(move * stake),
        details={"stake": stake},
    )


@builder(gamma="(0, inf)", mu="(-inf, inf)", sigma="(0, inf)", dt="(0, inf)")
def merton(
    *, gamma: float = 1.0, mu: float = 0.08, sigma: float = 0.4, dt: float = 1 / 12
) -> SyntheticMarket:
    """Return a geometric Brownian motion, a weight in [0, 1], and constant relative risk aversion.

    Simple returns r = exp((mu - sigma^2 / 2) dt + sigma sqrt(dt) z) - 1; mu and sigma per year,
    dt in years, cash pays nothing. The optimum is the log of the certainty equivalent per step,
    max_a ln(E[(1 + a r)^(1 - gamma)]) / (1 - gamma), or max_a E[ln(1 + a r)] for gamma = 1; `pay`
    gives what is averaged, `score` the logarithm. Between the bounds a solves
    E[r (1 + a r)^-gamma] = 0; as dt shrinks, a tends to mu / (gamma sigma^2).
    Source: Merton, Lifetime Portfolio Selection under Uncertainty (1969).
    """
    drift, sd = (mu - sigma**2 / 2) * dt, sigma * math.sqrt(dt)

    def pay(previous: Tensor, position: Tensor, r: Tensor) -> Tensor:
        grown = log_growth(previous, position, r)
        return grown if gamma == 1 else arrays(r).exp((1 - gamma) * grown)

    def score(mean_pay: float) -> float:
        return float(mean_pay) if gamma == 1 else math.log(mean_pay) / (1 - gamma)

    # On an even grid the sum over a normal density is exact to rounding.
    z = np.linspace(-12.0, 12.0, 2_001)
    weight = np.exp(-0.5 * z**2)
    weight, r = weight / weight.sum(), np.expm1(drift + sd * z)

    def slope(a: float) -> float:
        return float(weight @ (r * (1 + a * r) ** -gamma))

    low, high = 0.0, 1.0
    for _ in range(60):  # the slope falls in a
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) > 0 else (low, middle)
    # The weight is at a bound where the slope has no root between them.
    fraction = 0.0 if slope(0.0) <= 0 else 1.0 if slope(1.0) >= 0 else low
    mean_pay = weight @ pay(r[:, None], np.full((len(r), 1), fraction), r[:, None])

    def generate(key: Array, num_bars: int) -> Path:
        shock = drift + sd * jax.random.normal(key, (num_bars, 1))
        return Path(jnp.zeros((num_bars, 0)), jnp.expm1(shock), jnp.zeros(1))

    return SyntheticMarket(
        reward="simple",
        generate=generate,
        pay=pay,
        score=score,
        bounds=(0.0, 1.0),
        environment=dict(actions="weights", order="rebalance", reward="crra", risk_aversion=gamma),
        score_reward=lambda mean: score(mean if gamma == 1 else 1 + (1 - gamma) * mean),
        optimum=score(mean_pay),
        optimal_policy=constant_policy(fraction),
        expected_return=same_for_all(math.expm1(mu * dt)),
        details={"fraction": fraction},
    )


@builder(
    B="(-inf, inf)", phi_mr="(0, 1]", sig_f="[0, inf)", sigma="(0, inf)",
    gamma_risk="(0, inf)", lambda_cost="[0, inf)",
)  # fmt: skip
def garleanu_pedersen(
    *,
    B: float = 1.0,
    phi_mr: float = 0.1,
    sig_f: float = 0.0005,
    sigma: float = 0.01,
    gamma_risk: float = 5.0,
    lambda_cost: float = 20.0,
) -> SyntheticMarket:
    """Return a predictor that decays, quadratic risk and quadratic costs; any position.

    f' = (1 - phi_mr) f + sig_f eps, log-return r' = B f + sigma u, and x pays
    x r' - gamma_risk / 2 sigma^2 x^2 - lambda_cost / 2 sigma^2 (x - x_prev)^2. State: f. The best
    is to trade a fixed part of the way to an aim in front of the target:

        x = (1 - k) x_prev + k aim(f),    k = a / lambda = 2 g / (g + sqrt(g^2 + 4 g lambda)),
        aim(f) = B f / (g sigma^2) / (1 + phi_mr a / g),    g = gamma_risk.

    The optimum follows from the moments of (x, f). `costs` are zero: the quadratic cost is in
    `pay`, not a fraction of the traded notional. Traders are given the predictor, which returns
    hardly show; bars show it as their volume, exp(f / its deviation).
    Source: Garleanu and Pedersen, Dynamic Trading with Predictable Returns and Transaction Costs
    (2013), propositions 3 and 4, without discounting.
    """
    g, cost, decay = gamma_risk, lambda_cost, 1 - phi_mr
    # The rate and the aim of the docstring: k, and aim(f) / f.
    rate = 2 * g / (g + math.sqrt(g * g + 4 * g * cost))
    aim = B / (g * sigma**2) / (1 + phi_mr * rate * cost / g)

    # Stationary, as the first predictor is drawn from it.
    variance_f = sig_f**2 / (1 - decay**2)
    x_f = rate * aim * variance_f / (1 - (1 - rate) * decay)  # E[x f]
    # x = (1 - k) x_prev + k aim f, and E[x_prev f] = decay E[x f].
    x_x = (2 * (1 - rate) * decay * x_f + rate * aim * variance_f) * rate * aim
    x_x /= 1 - (1 - rate) ** 2
    trade = 2 * x_x - 2 * ((1 - rate) * x_x + rate * aim * decay * x_f)  # E[(x - x_prev)^2]

    def pay(previous: Tensor, position: Tensor, r: Tensor) -> Tensor:
        risk = g * position**2 + cost * (position - previous) ** 2
        return (position * r - sigma**2 / 2 * risk).sum(axis=-1)

    def generate(key: Array, num_bars: int) -> Path:
        f_key, key = jax.random.split(key)
        first, f = autoregression(f_key, num_bars, decay, sig_f)
        # A return follows the predictor of the bar before it.
        before = jnp.concatenate([first[None], f[:-1]])
        r = B * before + sigma * jax.random.normal(key, (num_bars,))
        return Path(f[:, None], r[:, None], jnp.zeros(1))

    return SyntheticMarket(
        reward="log",
        generate=generate,
        pay=pay,
        state_names=("predictor",),
        # A predictor that never moves has no scale; any will do.
        moments=((0.0,), (math.sqrt(variance_f) or 1.0,)),
        bounds=(-math.inf, math.inf),
        # 5 standard deviations of the best position: the bound hardly ever binds.
        environment=dict(
            actions="weights",
            size=max(1.0, round(5 * math.sqrt(x_x), 1)),
            risk_aversion=g * sigma**2,
            quadratic_cost=cost * sigma**2,
        ),
        optimum=B * x_f - sigma**2 / 2 * (g * x_x + cost * trade),
        optimal_policy=lambda state, position: (1 - rate) * position + rate * aim * state,
        expected_return=lambda state: B * state,
        volume=lambda state: np.exp(state / math.sqrt(variance_f or 1.0)),
        details={"trade_rate": rate, "aim_per_predictor": aim},
    )


def led(
    leader: np.ndarray,
    delay: int,
    beta: float,
    sigma: float,
    state_names: tuple[str, ...],
    **facts: Any,
) -> SyntheticMarket:
    """Return assets that each follow another one: r'[i] = beta r[leader(i)] + sigma eps[i].

    The best holds the sign of that mean, in equal parts and without cost.

    Args:
      leader: `[A]` int32 number of the asset that each follows.
      delay: bars from the leader's return to that which follows it.
      beta: see above.
      sigma: see above.
      state_names: of the returns that the next ones follow.
      **facts: other fields of the market.
    """
    assets, scale = len(leader), sigma / math.sqrt(1 - beta**2)

    def mean(state: Tensor) -> Tensor:
        return beta * state[..., leader]

    def generate(key: Array, num_bars: int) -> Path:
        first_key, key = jax.random.split(key)
        first = scale * jax.random.normal(first_key, (delay, assets))
        # A row of `delay` bars follows the row before it, bar by bar.
        shocks = sigma * jax.random.normal(key, (-(-num_bars // delay), delay, assets))
        r = recur(lambda r, shock: mean(r) + shock, first, shocks)
        r = jnp.concatenate([first, r.reshape(-1, assets)])
        return Path(r[1 : num_bars + 1], r[delay:][:num_bars], jnp.zeros(assets))

    return SyntheticMarket(
        generate=generate,
        pay=linear_pay(0.0),
        num_assets=assets,
        state_names=state_names,
        moments=((0.0,) * assets, (scale,) * assets),
        bounds=(-1.0 / assets, 1.0 / assets),
        optimum=abs(beta) * scale * math.sqrt(2 / math.pi),
        optimal_policy=lambda state, position: arrays(state).sign(mean(state)) / assets,
        expected_return=mean,
        **facts,
    )


@builder(assets=2, hop=1, beta="(-1, 1)", sigma="(0, inf)")
def ring(
    *, assets: int = 16, hop: int = 1, beta: float = 0.3, sigma: float = 0.01
) -> SyntheticMarket:
    """Each asset follows another: r'[i] = beta r[(i - hop) mod A] + sigma eps[i], simple returns.

    State: `[A]` the last bar's returns. Positions are in [-1/A, 1/A], without cost. The best is
    sign(beta r[i - hop]) / A, the optimum |beta| sigma sqrt(2 / pi) / sqrt(1 - beta^2): r has the
    variance sigma^2 / (1 - beta^2) for any ring. An asset's own past is worth nothing and the
    sign of all assets' mean 1 / sqrt(A) of it: only messages from `hop` places away solve it.
    """
    if hop >= assets:
        raise ConfigError(f"hop={hop} is once around {assets} assets; give at most {assets - 1}.")
    leader = np.roll(np.arange(assets, dtype=np.int32), hop)
    names = tuple(f"return_{i}" for i in range(assets))
    return led(leader, 1, beta, sigma, names, reward="simple")


@builder(lag=2, phi="(-1, 1)", sigma="(0, inf)")
def lagged_ar(*, lag: int = 5, phi: float = 0.3, sigma: float = 0.01) -> SyntheticMarket:
    """Log-returns that repeat an older one: r' = phi r[lag - 1 bars before] + sigma eps, no cost.

    State: the return that the next one follows, `lag - 1` bars before the last. The best is its
    sign (of `phi` times it), and the optimum |phi| sigma sqrt(2 / pi) / sqrt(1 - phi^2): every
    `lag`-th return is an autoregression of its own. The last return does not predict the next.
    """
    # Of `lag` autoregressions, which take turns.
    return led(np.zeros(1, np.int32), lag, phi, sigma, ("older_return",), reward="log")


@builder(assets=2, delay=1, graph=0, beta="(-1, 1)", sigma="(0, inf)")
def lead_lag(
    *, assets: int = 8, delay: int = 3, graph: int = 21, beta: float = 0.3, sigma: float = 0.01
) -> SyntheticMarket:
    """Each asset follows another one, some bars later; which one is to be found.

    Simple returns r[t+1, i] = beta r[t+1-delay, leader(i)] + sigma eps[t+1, i]. The leaders are
    one cycle through all assets, in an order that the number `graph` draws (`details["leader"]`).
    State: `[A]` the returns of `delay - 1` bars before the last. Positions are in [-1/A, 1/A],
    without cost. Every return has the variance v = beta^2 v + sigma^2, and those of `delay`
    consecutive bars are independent, as no two of them share a shock. So the best is
    sign(beta r[leader]) / A, and the optimum |beta| sigma sqrt(2 / pi) / sqrt(1 - beta^2).
    An asset's own past, and returns of the same bar, are worth nothing; nor are those of the
    assets next to it with the default `graph`, whose offsets are each of two assets at most.
    """
    # This generator's numbers are the same in every version of numpy.
    order = np.argsort(np.random.SeedSequence(graph).generate_state(assets), kind="stable")
    leader = np.empty(assets, np.int32)
    leader[np.roll(order, -1)] = order
    names = tuple(f"older_return_{i}" for i in range(assets))
    return led(leader, delay, beta, sigma, names, reward="simple", details={"leader": leader})


@builder(assets=2, beta="(-inf, inf)", common="[0, inf)", sigma="(0, inf)")
def cross_section(
    *, assets: int = 5, beta: float = 1.0, common: float = 3.0, sigma: float = 0.004
) -> SyntheticMarket:
    """Each asset follows its own place among all, behind a move that they have in common.

    Simple returns r'[i] = sigma (beta place[i] + common m + eps[i]), where m is one number for all
    assets and place = (2 rank(r)[i] - 1 - A) / (A - 1), in [-1, 1]. State: `[A]` the last bar's
    returns. Positions are in [-1/A, 1/A], without cost. The best is sign(beta place) / A, and the
    optimum sigma |beta| mean|place|, whatever the returns' distribution. An asset's own return is
    worth little: `common` hides its place.
    """
    places = np.linspace(-1.0, 1.0, assets)
    scale = sigma * math.sqrt(1.0 + common**2 + beta**2 * (places**2).mean())

    def mean(state: Tensor) -> Tensor:
        below = (state[..., None, :] < state[..., :, None]).sum(-1)
        return sigma * beta * (2 * below + 1 - assets).astype(state.dtype) / (assets - 1)

    def generate(key: Array, num_bars: int) -> Path:
        first_key, common_key, key = jax.random.split(key, 3)
        shared = common * jax.random.normal(common_key, (num_bars, 1))
        shocks = sigma * (shared + jax.random.normal(key, (num_bars, assets)))
        first = scale * jax.random.normal(first_key, (assets,))
        r = recur(lambda r, shock: mean(r) + shock, first, shocks)
        return Path(r, r, jnp.zeros(assets))

    return SyntheticMarket(
        reward="simple",
        generate=generate,
        pay=linear_pay(0.0),
        num_assets=assets,
        state_names=tuple(f"return_{i}" for i in range(assets)),
        moments=((0.0,) * assets, (scale,) * assets),
        bounds=(-1.0 / assets, 1.0 / assets),
        optimum=sigma * abs(beta) * float(np.abs(places).mean()),
        optimal_policy=lambda state, position: arrays(state).sign(mean(state)) / assets,
        expected_return=mean,
    )


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
