"""Harder markets: assets that share a limit, and a volatility to be filtered."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from nca_trader.errors import ConfigError
from nca_trader.markets.closed_form import same_for_all
from nca_trader.markets.market import (
    Coupled,
    Path,
    SyntheticMarket,
    builder,
    recur,
    within,
)
from nca_trader.markets.switching import stationary
from nca_trader.numerics import arrays
from nca_trader.types import Costs, Tensor

MOST_RATIO = 4.0  # of the two volatilities
MOST_ASSETS = 4  # of `factor_panel`: 81 positions in 32 states
NODES, POINTS = 64, 401  # beliefs, and next returns at each
TABLE = 513  # beliefs at which the best weight is tabulated


@builder(
    assets=2, common="(-inf, inf)", own="(-inf, inf)", spread="[0, 1)", common_stay="(0, 1)",
    own_stay="(0, 1)", sigma="(0, inf)", cost="[0, 1)", quadratic="[0, inf)", gross="[1, inf)",
)  # fmt: skip
def factor_panel(
    *,
    assets: int = 3,
    common: float = 0.004,
    own: float = 0.004,
    spread: float = 0.5,
    common_stay: float = 0.97,
    own_stay: float = 0.9,
    sigma: float = 0.01,
    cost: float = 0.004,
    quadratic: float = 0.016,
    gross: float = 1.5,
) -> SyntheticMarket:
    """Return assets with a common factor, two costs, and a limit on all positions together.

    Log-returns r'[i] = b[i] (common f + sigma u) + own o[i] + sigma eps[i]. The factor's drift f
    and each asset's own o[i] are -1 or 1 and stay so with probabilities `common_stay` and
    `own_stay`; loadings b fall evenly from 1 + spread to 1 - spread. State: f, o[0], o[1], ... An
    asset is short, flat or long by 1, and a vector whose sum of sizes exceeds `gross` is scaled
    down to it, so that what one asset may earn depends on the others. It pays
    `sum_i a_i r_i - cost |da_i| - quadratic / 2 da_i^2` of the scaled positions. Bars show as an
    asset's volume its own expected return alone, exp(E[r[i]] / its deviation).

    The optimum is that of a Markov decision process of 2^(A+1) states times 3^A positions, see
    `nca_trader.optimum.optima.coupled`.
    Sources: Puterman, Markov Decision Processes (1994), section 8.5; for the problem Garleanu and
    Pedersen, Dynamic Portfolio Choice with Frictions (2016).
    """
    if assets > MOST_ASSETS:
        raise ConfigError(
            f"assets={assets} have {3**assets:,} positions; give at most {MOST_ASSETS}."
        )
    loading = 1 + spread * np.linspace(1, -1, assets)
    stay = np.array([common_stay, *[own_stay] * assets])
    scale = np.sqrt((common * loading) ** 2 + own**2)
    scale = np.where(scale > 0, scale, 1.0)  # an asset without a drift has none; any will do
    environment = dict(size=1.0, max_gross=gross, quadratic_cost=quadratic)

    def mean(state: Tensor) -> Tensor:
        xp = arrays(state)
        each = xp.asarray(common * loading, dtype=state.dtype)
        own_part = own * state[..., 1:]
        return state[..., :1] * xp.broadcast_to(each, own_part.shape) + own_part

    def pay(previous: Tensor, position: Tensor, r: Tensor) -> Tensor:
        traded = position - previous
        return (position * r - cost * abs(traded) - quadratic / 2 * traded**2).sum(axis=-1)

    def generate(key: Array, num_bars: int) -> Path:
        keys = jax.random.split(key, 4)
        first = jax.random.rademacher(keys[0], (assets + 1,)).astype(float)
        flips = jax.random.bernoulli(keys[1], jnp.asarray(1 - stay)[None], (num_bars, assets + 1))
        states = first[None] * jnp.cumprod(jnp.where(flips, -1.0, 1.0), axis=0)
        before = jnp.concatenate([first[None], states[:-1]])
        shock = sigma * jax.random.normal(keys[2], (num_bars, 1)) * jnp.asarray(loading)[None]
        noise = sigma * jax.random.normal(keys[3], (num_bars, assets))
        return Path(states, jnp.asarray(mean(before)) + shock + noise, jnp.zeros(assets))

    # In the order of binary and ternary numbers.
    states = np.array(list(itertools.product((-1.0, 1.0), repeat=assets + 1)))
    signs = np.array(list(itertools.product((-1.0, 0.0, 1.0), repeat=assets)))
    held = within(gross, signs)
    same = states[:, None, :] == states[None, :, :]
    return SyntheticMarket(
        reward="log",
        generate=generate,
        pay=pay,
        costs=Costs(commission=cost),
        num_assets=assets,
        state_names=("factor", *(f"own_{i}" for i in range(assets))),
        moments=((0.0,) * (assets + 1), (1.0,) * (assets + 1)),
        environment=environment,
        expected_return=mean,
        volume=lambda state: np.exp(mean(state) / scale),
        problem=Coupled(
            chain=np.where(same, stay, 1 - stay).prod(-1),
            # The pay is linear in the return, so its mean is the pay of the mean.
            pay=np.asarray(pay(held[None, :, None], held[None, None], mean(states)[:, None, None])),
            held=held,
        ),
    )


@builder(
    low="(0, inf)", high="(0, inf)", stay="[0.02, 0.98]", gamma="(0, inf)", mu="(-inf, inf)"
)  # fmt: skip
def moving_volatility(
    *,
    low: float = 0.04,
    high: float = 0.12,
    stay: float = 0.97,
    gamma: float = 4.0,
    mu: float = 0.004,
) -> SyntheticMarket:
    """Return a volatility that moves and is not seen: the best weight is Merton's fraction of it.

    Simple returns r = exp(mu - s^2 / 2 + s z) - 1 per bar. The volatility s is `low` or `high` and
    stays so with probability `stay`; cash pays nothing, a weight is in [0, 1], rebalanced every
    bar without cost. It pays the utility of a bar, ((1 + a r)^(1 - gamma) - 1) / (1 - gamma), or
    ln(1 + a r) for gamma = 1. State: the belief b = P(s = high | all returns), by Bayes. Nothing
    that an agent does changes the beliefs, so the best is to maximise the next bar's expected
    utility, at E[r (1 + a r)^-gamma | b] = 0: about mu / (gamma s^2) where s is known. (For the
    utility of wealth at a horizon a hedge against beliefs is added, except for gamma = 1.)
    With the default mu the log-price has no drift.

    The optimum is the mean of that maximum over the stationary beliefs. Expectations of the next
    belief are taken by interpolation at Chebyshev's nodes, a matrix whose stationary vector
    weighs them; `NODES` gives nine digits or more.
    Sources: Merton, Lifetime Portfolio Selection under Uncertainty (1969); Hamilton, A New
    Approach to the Economic Analysis of Nonstationary Time Series (1989).
    """
    if not 1 / MOST_RATIO <= high / low <= MOST_RATIO:
        raise ConfigError(
            f"high={high} is {high / low:.3g} times low={low}, more than {MOST_RATIO:g}: beliefs "
            "jump, and the optimum is not solved to nine digits; bring the two together."
        )
    sd, persistence = np.array([low, high]), 2 * stay - 1

    def utility(earned: Tensor) -> Tensor:
        xp = arrays(earned)
        grown = xp.log1p(earned)
        return grown if gamma == 1 else xp.expm1((1 - gamma) * grown) / (1 - gamma)

    def updated(belief: Tensor, log_return: Tensor) -> Tensor:
        """Return the belief after a log-return, by Bayes and one step of the chain."""
        xp = arrays(log_return)
        calm, wild = ((log_return - mu + s**2 / 2) / s for s in (low, high))
        evidence = (calm**2 - wild**2) / 2 + math.log(low / high)
        odds = xp.log(belief) - xp.log1p(-belief) + evidence
        return 0.5 + persistence / 2 * xp.tanh(odds / 2)

    # On an even grid the sum over a normal density is exact to rounding.
    z = np.linspace(-10.0, 10.0, POINTS)
    weight = np.exp(-0.5 * z**2)
    weight /= weight.sum()
    logs = mu - sd[:, None] ** 2 / 2 + sd[:, None] * z  # [2, K] by volatility
    r = np.expm1(logs)

    def expected(function: Any, belief: np.ndarray) -> np.ndarray:
        """Return the mean over the next return, of values `[..., 2, K]` at beliefs `[...]`."""
        return (function @ weight * np.stack([1 - belief, belief], -1)).sum(-1)

    def best_weight(belief: np.ndarray) -> np.ndarray:
        least, most = np.zeros_like(belief), np.ones_like(belief)
        for _ in range(34):  # the slope falls in the weight
            a = (least + most) / 2
            rising = expected(r * (1 + a[:, None, None] * r) ** -gamma, belief) > 0
            least, most = np.where(rising, a, least), np.where(rising, most, a)
        return (least + most) / 2

    reach = max(abs(persistence) / 2, 1e-6)  # of beliefs around 1 / 2; a coin's stay there
    nodes = 0.5 - reach * np.cos(np.pi * (np.arange(NODES) + 0.5) / NODES)
    following = updated(nodes[:, None, None], logs)  # [n, 2, K]
    angle = np.arccos(np.clip((following - 0.5) / reach, -1, 1))
    order = np.arange(NODES)
    waves = np.stack([expected(np.cos(k * angle), nodes) for k in order], -1)
    # From values at the nodes to coefficients of Chebyshev's polynomials.
    at_nodes = np.cos(order * np.arccos(np.clip((nodes - 0.5) / reach, -1, 1))[:, None])
    probability = stationary(waves @ np.linalg.inv(at_nodes))
    grid = np.linspace(0.5 - reach, 0.5 + reach, TABLE)
    table = best_weight(grid)

    def policy(state: Tensor, position: Tensor) -> Tensor:
        return arrays(state).interp(state, grid, table).astype(state.dtype)

    def generate(key: Array, num_bars: int) -> Path:
        keys = jax.random.split(key, 3)
        first = jax.random.bernoulli(keys[0], 0.5)
        flips = jnp.cumsum(jax.random.bernoulli(keys[1], 1 - stay, (num_bars,)))
        s = jnp.where((first + flips) % 2 == 1, high, low)
        log_return = mu - s**2 / 2 + s * jax.random.normal(keys[2], (num_bars,))
        # Before any return both volatilities are equally likely.
        belief = recur(updated, jnp.full((), 0.5), log_return)
        return Path(belief[:, None], jnp.expm1(log_return)[:, None], jnp.zeros(1))

    a = best_weight(nodes)
    mean_belief = probability @ nodes
    return SyntheticMarket(
        reward="simple",
        generate=generate,
        pay=lambda previous, position, r: utility((position * r).sum(-1)),
        state_names=("belief",),
        moments=(
            (float(mean_belief),),
            (math.sqrt(max(probability @ (nodes - mean_belief) ** 2, 0.0)) or 1.0,),
        ),
        bounds=(0.0, 1.0),
        environment=dict(actions="weights", order="rebalance", reward="crra", risk_aversion=gamma),
        optimum=float(probability @ expected(utility(a[:, None, None] * r), nodes)),
        optimal_policy=policy,
        expected_return=same_for_all(math.expm1(mu)),
        details={"beliefs": grid, "weights": table},
    )
