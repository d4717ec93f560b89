"""Markets where size matters: growth (Kelly), utility (Merton), and quadratic costs."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from nca_trader.data.synthetic.linear import autoregression
from nca_trader.data.synthetic.market import Market, Path, Policy, check, compiled
from nca_trader.numerics import arrays
from nca_trader.types import Tensor


def constant_policy(weight: float) -> Policy:
    """The same weight in every state."""

    def policy(state: Tensor, position: Tensor) -> Tensor:
        return arrays(position).full_like(position, weight)

    return policy


def same_for_all(value: float):
    """The expected return of a market without a state."""

    def expected_return(state: Tensor) -> Tensor:
        return arrays(state).full((*state.shape[:-1], 1), value, dtype=state.dtype)

    return expected_return


def log_growth(previous: Tensor, position: Tensor, r: Tensor) -> Tensor:
    """`ln(1 + sum_i a_i r_i)`: the growth of equity, rebalanced every bar, without cost."""
    return arrays(r).log1p((position * r).sum(axis=-1))


def kelly(*, p: float = 0.55, move: float = 0.2) -> Market:
    """A coin: the price moves by +move with probability p, else by -move (simple returns).

    No state; pays ln(1 + a r). The best stake is f = a move = 2 p - 1, so the best weight is
    a = (2 p - 1) / move, and the optimum ln 2 + p ln p + q ln q with q = 1 - p, whatever the move.
    A move of 1, the textbook's coin, takes the price to zero; `details["stake"]` is f.
    Source: Kelly, A New Interpretation of Information Rate (1956).
    """
    check(locals(), p="(0, 1)", move="(0, 1)")
    stake, q = 2 * p - 1, 1 - p

    def generate(key: Array, num_bars: int) -> Path:
        heads = jax.random.bernoulli(key, p, (num_bars, 1))
        return Path(jnp.zeros((num_bars, 0)), jnp.where(heads, move, -move), jnp.zeros(1))

    return Market(
        name="kelly",
        parameters={"p": p, "move": move},
        reward="simple",
        generate=compiled(generate),
        pay=log_growth,
        bounds=(-1.0 / move, 1.0 / move),
        environment=dict(actions="weights", order="rebalance", reward="log_return"),
        optimum=math.log(2) + p * math.log(p) + q * math.log(q),
        optimal_policy=constant_policy(stake / move),
        expected_return=same_for_all(move * stake),
        details={"stake": stake},
    )


def merton(
    *, gamma: float = 1.0, mu: float = 0.08, sigma: float = 0.4, dt: float = 1 / 12
) -> Market:
    """A geometric Brownian motion, a weight in [0, 1], and constant relative risk aversion.

    Simple returns r = exp((mu - sigma^2 / 2) dt + sigma sqrt(dt) z) - 1; mu and sigma a year, dt
    in years, cash pays nothing. The optimum is the log of the certainty equivalent a step,
    max_a ln(E[(1 + a r)^(1 - gamma)]) / (1 - gamma), or max_a E[ln(1 + a r)] for gamma = 1; `pay`
    gives what is averaged, `score` the logarithm. Between the bounds a solves
    E[r (1 + a r)^-gamma] = 0; as dt shrinks, a tends to mu / (gamma sigma^2).
    Source: Merton, Lifetime Portfolio Selection under Uncertainty (1969).
    """
    check(locals(), gamma="(0, inf)", mu="(-inf, inf)", sigma="(0, inf)", dt="(0, inf)")
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
    fraction = 0.0 if slope(0.0) <= 0 else 1.0 if slope(1.0) >= 0 else low
    mean_pay = weight @ pay(r[:, None], np.full((len(r), 1), fraction), r[:, None])

    def generate(key: Array, num_bars: int) -> Path:
        shock = drift + sd * jax.random.normal(key, (num_bars, 1))
        return Path(jnp.zeros((num_bars, 0)), jnp.expm1(shock), jnp.zeros(1))

    return Market(
        name="merton",
        parameters={"gamma": gamma, "mu": mu, "sigma": sigma, "dt": dt},
        reward="simple",
        generate=compiled(generate),
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


def garleanu_pedersen(
    *,
    B: float = 1.0,
    phi_mr: float = 0.1,
    sig_f: float = 0.0005,
    sigma: float = 0.01,
    gamma_risk: float = 5.0,
    lambda_cost: float = 20.0,
) -> Market:
    """A predictor that decays, quadratic risk and quadratic costs; any position.

    f' = (1 - phi_mr) f + sig_f eps, log-return r' = B f + sigma u, and x pays
    x r' - gamma_risk / 2 sigma^2 x^2 - lambda_cost / 2 sigma^2 (x - x_prev)^2. State: f. The best
    is to trade a fixed part of the way to an aim in front of the target:

        x = (1 - k) x_prev + k aim(f),    k = a / lambda = 2 g / (g + sqrt(g^2 + 4 g lambda)),
        aim(f) = B f / (g sigma^2) / (1 + phi_mr a / g),    g = gamma_risk.

    The optimum follows from the moments of (x, f). `costs` are none: the quadratic cost is in
    `pay`, not a fraction of what is traded. Traders are given the predictor, which returns hardly
    tell; bars show it as their volume, exp(f / its deviation).
    Source: Garleanu and Pedersen, Dynamic Trading with Predictable Returns and Transaction Costs
    (2013), propositions 3 and 4, without discounting.
    """
    check(
        locals(), B="(-inf, inf)", phi_mr="(0, 1]", sig_f="[0, inf)", sigma="(0, inf)",
        gamma_risk="(0, inf)", lambda_cost="[0, inf)",
    )  # fmt: skip
    g, cost, decay = gamma_risk, lambda_cost, 1 - phi_mr
    rate = 2 * g / (g + math.sqrt(g * g + 4 * g * cost))
    aim = B / (g * sigma**2) / (1 + phi_mr * rate * cost / g)

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
        before = jnp.concatenate([first[None], f[:-1]])
        r = B * before + sigma * jax.random.normal(key, (num_bars,))
        return Path(f[:, None], r[:, None], jnp.zeros(1))

    return Market(
        name="garleanu_pedersen",
        parameters=dict(
            B=B, phi_mr=phi_mr, sig_f=sig_f, sigma=sigma, gamma_risk=g, lambda_cost=cost
        ),
        reward="log",
        generate=compiled(generate),
        pay=pay,
        state_names=("predictor",),
        moments=((0.0,), (math.sqrt(variance_f) or 1.0,)),
        bounds=(-math.inf, math.inf),
        # Hardly a bound binds: 5 standard deviations of the best position.
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
