"""Markets that one bar does not tell: what is to be known lies in the bars before it."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from nca_trader.data.synthetic.linear import SLOWEST, solve_autoregression, threshold_market
from nca_trader.data.synthetic.market import Market, Path, check, compiled, linear_pay, recur
from nca_trader.numerics import arrays
from nca_trader.types import Tensor


def lagged_ar(*, lag: int = 5, phi: float = 0.3, sigma: float = 0.01) -> Market:
    """Log-returns that repeat an older one: r' = phi r[lag - 1 bars before] + sigma eps, no cost.

    State: the return that the next one follows, `lag - 1` bars before the last. The best is its
    sign (of `phi` times it), and the optimum |phi| sigma sqrt(2 / pi) / sqrt(1 - phi^2): every
    `lag`-th return is an autoregression of its own. The last return tells nothing of the next.
    """
    check(locals(), {"lag": 2}, phi="(-1, 1)", sigma="(0, inf)")
    scale = sigma / math.sqrt(1 - phi**2)

    def generate(key: Array, num_bars: int) -> Path:
        first_key, key = jax.random.split(key)
        first = scale * jax.random.normal(first_key, (lag,))
        shocks = sigma * jax.random.normal(key, (-(-num_bars // lag), lag))

        def step(r: Array, shock: Array) -> tuple[Array, Array]:
            r = phi * r + shock
            return r, r

        r = jnp.concatenate([first, recur(step, first, shocks).ravel()])
        return Path(r[1 : num_bars + 1, None], r[lag:][:num_bars, None], jnp.zeros(1))

    return Market(
        name="lagged_ar",
        parameters={"lag": lag, "phi": phi, "sigma": sigma},
        reward="log",
        generate=compiled(generate),
        pay=linear_pay(0.0),
        state_names=("older_return",),
        moments=((0.0,), (scale,)),
        optimum=abs(phi) * scale * math.sqrt(2 / math.pi),
        optimal_policy=lambda state, position: arrays(state).sign(phi * state),
        expected_return=lambda state: phi * state,
    )


def hidden_level(
    *, phi: float = 0.98, spread: float = 0.004, sigma: float = 0.01, cost: float = 0.001
) -> Market:
    """Log-returns of a level hidden in noise: r' = level + sigma eps, an agent has returns alone.

    level' = phi level + eta, of stationary deviation `spread`. State: m, the level's mean given
    all returns, by the steady Kalman filter: with P the variance of the level around m, and
    S = P + sigma^2 that of a return,

        m' = phi (m + P / S (r' - m)),    P = phi^2 P sigma^2 / S + spread^2 (1 - phi^2).

    What surprises the filter is white, so m is an autoregression with shocks of deviation
    phi P / sqrt(S), and E[r' | all returns] = m: the rule is that of `ar1`, solved for m.
    Sources: Kalman (1960); Harvey, Forecasting, Structural Time Series Models (1989), section 4.2.
    """
    check(
        locals(), phi=f"(0, {SLOWEST}]", spread="(0, inf)", sigma="(0, inf)", cost="[0, 1)"
    )  # fmt: skip
    shock = spread**2 * (1 - phi**2)
    linear = sigma**2 * (1 - phi**2) - shock
    error = (math.sqrt(linear**2 + 4 * shock * sigma**2) - linear) / 2  # P
    gain = error / (error + sigma**2)
    moved = phi * error / math.sqrt(error + sigma**2)
    known = moved / math.sqrt(1 - phi**2)  # the deviation of m

    def generate(key: Array, num_bars: int) -> Path:
        keys = jax.random.split(key, 4)
        first_mean = known * jax.random.normal(keys[0])
        first_level = first_mean + math.sqrt(error) * jax.random.normal(keys[1])
        shocks = math.sqrt(shock) * jax.random.normal(keys[2], (num_bars,))
        noise = sigma * jax.random.normal(keys[3], (num_bars,))

        def step(carry: Any, drawn: Any) -> tuple[Any, Any]:
            level, mean = carry
            r = level + drawn[1]
            mean = phi * (mean + gain * (r - mean))
            return (phi * level + drawn[0], mean), (r, mean)

        r, mean = recur(step, (first_level, first_mean), (shocks, noise))
        return Path(mean[:, None], r[:, None], jnp.zeros(1))

    def expected_return(state: Tensor) -> Tensor:
        return state

    return threshold_market(
        solve_autoregression(expected_return, phi, moved, cost),
        cost,
        name="hidden_level",
        parameters={"phi": phi, "spread": spread, "sigma": sigma, "cost": cost},
        reward="log",
        generate=compiled(generate),
        state_names=("filtered_level",),
        moments=((0.0,), (known,)),
        expected_return=expected_return,
    )
