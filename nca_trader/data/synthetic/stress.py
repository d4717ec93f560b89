"""Markets for stress, without a known optimum: regimes, jumps, clustered volatility."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy.special import erf

from nca_trader.data.synthetic.market import Market, Path, check, compiled, linear_pay, recur
from nca_trader.data.synthetic.solver import stationary
from nca_trader.errors import ConfigError
from nca_trader.types import Costs

CELLS = 1_600  # of the logarithm of a variance


def regime_switching(
    *,
    calm_mu: float = 0.0004,
    calm_sigma: float = 0.006,
    wild_mu: float = -0.001,
    wild_sigma: float = 0.025,
    stay: float = 0.99,
    cost: float = 0.0005,
) -> Market:
    """Log-returns of one of two normals; the regime stays with probability `stay`.

    State: the regime of the next bar, 0 calm, 1 wild. Source: Hamilton (1989).
    """
    check(
        locals(), calm_mu="(-inf, inf)", wild_mu="(-inf, inf)", calm_sigma="(0, inf)",
        wild_sigma="(0, inf)", stay="(0, 1)", cost="[0, 1)",
    )  # fmt: skip
    parameters = dict(locals())

    def generate(key: Array, num_bars: int) -> Path:
        first_key, flip_key, key = jax.random.split(key, 3)
        flips = jax.random.bernoulli(flip_key, 1 - stay, (num_bars,))
        first = jax.random.bernoulli(first_key).astype(int)
        after = (first + jnp.cumsum(flips)) % 2
        wild = jnp.concatenate([first[None], after[:-1]]) == 1
        z = jax.random.normal(key, (num_bars,))
        r = jnp.where(wild, wild_mu + wild_sigma * z, calm_mu + calm_sigma * z)
        return Path(after[:, None].astype(r.dtype), r[:, None], jnp.zeros(1))

    return Market(
        name="regime_switching",
        parameters=parameters,
        reward="log",
        generate=compiled(generate),
        pay=linear_pay(cost),
        costs=Costs(commission=cost),
        state_names=("regime",),
        moments=((0.5,), (0.5,)),
    )


def jump(
    *,
    mu: float = 0.0002,
    sigma: float = 0.008,
    rate: float = 0.01,
    jump_mu: float = -0.02,
    jump_sigma: float = 0.03,
    cost: float = 0.0005,
) -> Market:
    """Jump diffusion: log-return mu + sigma z, and a Poisson number (`rate` a bar) of jumps.

    Each jump is normal in logs, of mean jump_mu and deviation jump_sigma. No state.
    Source: Merton, Option Pricing when Underlying Stock Returns are Discontinuous (1976).
    """
    check(
        locals(), mu="(-inf, inf)", sigma="(0, inf)", rate="[0, inf)", jump_mu="(-inf, inf)",
        jump_sigma="[0, inf)", cost="[0, 1)",
    )  # fmt: skip
    parameters = dict(locals())

    def generate(key: Array, num_bars: int) -> Path:
        count_key, size_key, key = jax.random.split(key, 3)
        z, size = jax.random.normal(key, (num_bars,)), jax.random.normal(size_key, (num_bars,))
        jumps = jax.random.poisson(count_key, rate, (num_bars,)).astype(z.dtype)
        r = mu + sigma * z + jumps * jump_mu + jnp.sqrt(jumps) * jump_sigma * size
        return Path(jnp.zeros((num_bars, 0)), r[:, None], jnp.zeros(1))

    return Market(
        name="jump",
        parameters=parameters,
        reward="log",
        generate=compiled(generate),
        pay=linear_pay(cost),
        costs=Costs(commission=cost),
    )


def garch(
    *,
    mu: float = 0.0002,
    volatility: float = 0.01,
    alpha: float = 0.08,
    beta: float = 0.9,
    cost: float = 0.0005,
) -> Market:
    """GARCH(1, 1): log-return mu + e, e = sqrt(h) z, h' = omega + alpha e^2 + beta h.

    `volatility` is the long-run deviation: omega = volatility^2 (1 - alpha - beta). State: the
    deviation sqrt(h) of the next bar. Source: Bollerslev (1986).
    """
    check(
        locals(), mu="(-inf, inf)", volatility="(0, inf)", alpha="[0, 1)", beta="[0, 1)",
        cost="[0, 1)",
    )  # fmt: skip
    parameters = dict(locals())
    if alpha + beta >= 1:
        raise ConfigError(
            f"alpha={alpha} and beta={beta} add up to {alpha + beta:.6g}: the variance has no "
            f"mean; give a beta below {1 - alpha:.6g}."
        )
    variance = volatility**2

    def generate(key: Array, num_bars: int) -> Path:
        def step(h: Array, z: Array) -> tuple[Array, tuple[Array, Array]]:
            e = jnp.sqrt(h) * z
            h = variance * (1 - alpha - beta) + alpha * e**2 + beta * h
            return h, (e, h)

        z = jax.random.normal(key, (num_bars,))
        e, h = recur(step, jnp.full((), variance, z.dtype), z)
        return Path(jnp.sqrt(h)[:, None], (mu + e)[:, None], jnp.zeros(1))

    return Market(
        name="garch",
        parameters=parameters,
        reward="log",
        generate=compiled(generate),
        pay=linear_pay(cost),
        costs=Costs(commission=cost),
        state_names=("volatility",),
        moments=volatility_moments(volatility, alpha, beta),
    )


def volatility_moments(
    volatility: float, alpha: float, beta: float
) -> tuple[tuple[float], tuple[float]]:
    """Mean and deviation, in the long run, of the deviation sqrt(h) of GARCH(1, 1).

    E[h] is volatility^2. E[sqrt(h)] is that of a chain on cells of log h, whose transitions are
    known: h' = omega + beta h + alpha h z^2 is at most x where z^2 <= (x - omega - beta h) /
    (alpha h), with probability erf(sqrt(z^2 / 2)).
    """
    if alpha == 0.0:
        return (volatility,), (1.0,)  # it never moves
    omega = 1 - alpha - beta  # in units of E[h]
    edges = np.linspace(max(math.log(omega / (1 - beta)), -20.0), 12.0, CELLS + 1)
    h = np.exp((edges[:-1] + edges[1:]) / 2)
    square = (np.exp(edges)[None, :] - omega - beta * h[:, None]) / (alpha * h[:, None])
    below = erf(np.sqrt(np.maximum(square, 0.0) / 2))
    below[:, 0], below[:, -1] = 0.0, 1.0
    mean = float(stationary(np.diff(below, axis=1)) @ np.sqrt(h))
    return (volatility * mean,), (volatility * math.sqrt(max(1 - mean**2, 1e-12)),)
