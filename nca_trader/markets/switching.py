"""Markets whose best position in {-1, 0, 1} switches at thresholds of a signal.

They pay `a r - c |a - a_prev|`. Prices follow the returns, so an agent that sees bars knows the
state, except that of `markov_drift` (see there). Each carries the problem whose solution is its
optimum; `nca_trader.optimum.optima.switching` solves it.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from nca_trader.errors import ConfigError
from nca_trader.markets.market import (
    Chain,
    Density,
    MarkovProcess,
    Mean,
    Path,
    SyntheticMarket,
    autoregression,
    builder,
    linear_pay,
    recur,
)
from nca_trader.numerics import arrays
from nca_trader.types import Costs, Tensor

NODES_PER_PANEL = 12
MAX_NODES = 4_096


def stationary(chain: np.ndarray) -> np.ndarray:
    """Compute `[n]` the stationary distribution of a chain `[n, n]` with one recurrent class."""
    n = len(chain)
    # The added ones replace the equation that is redundant by "sums to 1".
    return np.linalg.solve(np.eye(n) - chain.T + 1.0, np.ones(n))


def gauss_nodes(edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return `[n]` Gauss's nodes and `[n]` their weights, on the panels between `edges`."""
    x, weight = np.polynomial.legendre.leggauss(NODES_PER_PANEL)
    half = np.diff(edges) / 2
    nodes = ((edges[:-1] + edges[1:]) / 2)[:, None] + half[:, None] * x[None, :]
    return nodes.ravel(), (half[:, None] * weight[None, :]).ravel()


def transitions(density: Density, at: np.ndarray, y: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Return `[m, n]` probabilities of the nodes `y`, with weights `w`, after the states `at`."""
    rows = density(y[None, :], at[:, None]) * w[None, :]
    return rows / rows.sum(axis=1, keepdims=True)  # what leaves the range stays at its end


def panels(low: float, high: float, width: float) -> int:
    """Return the number of panels of at most `width` that cover the range."""
    return int(np.ceil((high - low) / width))


REACH = 8.0  # standard deviations; the probability of a state beyond is below 1e-15
SLOWEST = 0.999  # a slower state needs more nodes than a dense solve takes in seconds


def gaussian(y: np.ndarray, mean: np.ndarray, sd: float) -> np.ndarray:
    """Compute the normal density."""
    return np.exp(-0.5 * ((y - mean) / sd) ** 2) / (sd * math.sqrt(2 * math.pi))


def autoregressive(mean: Mean, phi: float, sigma: float, cost: float) -> MarkovProcess:
    """Return the problem of a state x' = phi x + sigma eps and expected next returns m(x)."""
    reach = REACH * sigma / math.sqrt(1 - phi**2)

    def density(y: np.ndarray, x: np.ndarray) -> np.ndarray:
        return gaussian(y, phi * x, sigma)

    return MarkovProcess(density, mean, -reach, reach, 1.5 * sigma, cost)


def switching_market(
    problem: Chain | MarkovProcess | None, cost: float, **fields: Any
) -> SyntheticMarket:
    """Return a market with a linear pay, and the problem that its optimum solves."""
    return SyntheticMarket(
        costs=Costs(commission=cost), pay=linear_pay(cost), problem=problem, **fields
    )


@builder(
    phi=f"[-{SLOWEST}, {SLOWEST}]", sigma="(0, inf)", cost="[0, 1)", reward=("log", "simple")
)  # fmt: skip
def ou(
    *, phi: float = 0.95, sigma: float = 0.01, cost: float = 0.002, reward: str = "log"
) -> SyntheticMarket:
    """Return an Ornstein-Uhlenbeck log-price: x' = phi x + sigma eps, close = 100 exp(x).

    State: x. It pays log-returns, E[r | x] = (phi - 1) x, or with reward="simple" simple ones,
    E[r | x] = exp((phi - 1) x + sigma^2 / 2) - 1. At cost 0 the optimum in logs is
    (1 - phi) sigma sqrt(2 / pi) / sqrt(1 - phi^2).
    """
    logs = reward == "log"

    def mean(x: Tensor) -> Tensor:
        drift = (phi - 1) * x
        return drift if logs else arrays(x).expm1(drift + sigma**2 / 2)

    def generate(key: Array, num_bars: int) -> Path:
        first, x = autoregression(key, num_bars, phi, sigma)
        r = jnp.diff(x, prepend=first)
        r = r if logs else jnp.expm1(r)
        return Path(x[:, None], r[:, None], first[None])

    return switching_market(
        autoregressive(mean, phi, sigma, cost),
        cost,
        reward=reward,
        generate=generate,
        state_names=("log_price",),
        moments=((0.0,), (sigma / math.sqrt(1 - phi**2),)),
        expected_return=mean,
    )


@builder(phi=f"[-{SLOWEST}, {SLOWEST}]", sigma="(0, inf)", cost="[0, 1)")
def ar1(*, phi: float = 0.3, sigma: float = 0.01, cost: float = 0.001) -> SyntheticMarket:
    """Autoregressive log-returns: r' = phi r + sigma eps. State: the last bar's r.

    At cost 0 the optimum is |phi| sigma sqrt(2 / pi) / sqrt(1 - phi^2).
    """

    def mean(r: Tensor) -> Tensor:
        return phi * r

    def generate(key: Array, num_bars: int) -> Path:
        _, r = autoregression(key, num_bars, phi, sigma)
        return Path(r[:, None], r[:, None], jnp.zeros(1))

    return switching_market(
        autoregressive(mean, phi, sigma, cost),
        cost,
        reward="log",
        generate=generate,
        state_names=("return",),
        moments=((0.0,), (sigma / math.sqrt(1 - phi**2),)),
        expected_return=mean,
    )


@builder(period=2, amp="(-1, 1)", cost="[0, 1)", reward=("log", "simple"))
def sine(
    *, amp: float = 0.05, period: int = 64, cost: float = 0.001, reward: str = "log"
) -> SyntheticMarket:
    """close[t] = 100 (1 + amp sin(2 pi t / period)), the same for every key.

    State: the phase t mod period, from 0 to period - 1. Where a whole swing pays for its two
    trades, the optimum is 2 (ln((1 + h) / (1 - h)) - 2 c) / period. h is the largest value of
    amp sin; a period that is a multiple of 4 has h = amp.
    """
    phase = np.arange(period + 1) % period
    log_price = np.log1p(amp * np.sin(2 * np.pi * phase / period))
    move = np.diff(log_price)
    move = move if reward == "log" else np.expm1(move)

    def generate(key: Array, num_bars: int) -> Path:
        del key  # nothing is drawn
        before = (jnp.arange(num_bars) - 1) % period
        returns = jnp.asarray(move)[before]
        states = jnp.arange(num_bars) % period
        start = jnp.asarray(log_price)[jnp.asarray([period - 1])]
        return Path(states[:, None].astype(returns.dtype), returns[:, None], start)

    def expected_return(state: Tensor) -> Tensor:
        return arrays(state).asarray(move, dtype=state.dtype)[state.astype(int)]

    # The phases follow each other with certainty, and there is a range for each.
    chain, cuts = np.roll(np.eye(period), 1, axis=1), np.arange(period - 1) + 0.5
    return switching_market(
        Chain(chain, move, cost, cuts),
        cost,
        reward=reward,
        generate=generate,
        state_names=("phase",),
        moments=(((period - 1) / 2,), (math.sqrt((period**2 - 1) / 12),)),
        expected_return=expected_return,
    )


@builder(mu="(-inf, inf)", sigma="(0, inf)", stay="(0, 1)", cost="[0, 1)")
def markov_drift(
    *,
    mu: float = 0.005,
    sigma: float = 0.01,
    stay: float = 0.98,
    cost: float = 0.001,
    hidden: bool = False,
) -> SyntheticMarket:
    """Log-returns r' = mu s + sigma eps, where s is -1 or 1 and stays with probability `stay`.

    Observable: state s. Bars do not show it: an agent must be given `Task.states`. If it pays to
    follow s, the optimum is |mu| - 2 c (1 - stay).

    Hidden: an agent sees the returns alone. State: the belief b = P(s = 1 | all returns), by
    Bayes (Wonham 1965; Hamilton 1989): post = b N(r; mu) / (b N(r; mu) + (1 - b) N(r; -mu)),
    b' = stay post + (1 - stay) (1 - post). The log-odds of `post` are a mixture of two normals,
    on which the optimum is solved. No policy that sees all past returns can do better.
    """
    if hidden:
        problem, deviation = hidden_drift(mu / sigma, sigma, stay, cost)
        moments = (0.5,), (deviation,)
    else:
        moments = (0.0,), (1.0,)
        chain = np.array([[stay, 1 - stay], [1 - stay, stay]])
        problem = Chain(chain, np.array([-mu, mu]), cost, np.zeros(1))

    def mean(state: Tensor) -> Tensor:
        return mu * (2 * state - 1 if hidden else state)

    def generate(key: Array, num_bars: int) -> Path:
        first_key, flip_key, key = jax.random.split(key, 3)
        first = jax.random.rademacher(first_key, ()).astype(float)
        flips = jax.random.bernoulli(flip_key, 1 - stay, (num_bars,))
        s = first * jnp.cumprod(jnp.where(flips, -1.0, 1.0))
        before = jnp.concatenate([first[None], s[:-1]])
        r = mu * before + sigma * jax.random.normal(key, (num_bars,))

        def updated(belief: Array, evidence: Array) -> Array:
            odds = jnp.log(belief) - jnp.log1p(-belief) + evidence
            return (1 - stay) + (2 * stay - 1) * jax.nn.sigmoid(odds)

        # Before any return both drifts are equally likely.
        states = recur(updated, jnp.full((), 0.5), 2 * mu / sigma**2 * r) if hidden else s
        return Path(states[:, None], r[:, None], jnp.zeros(1))

    return switching_market(
        problem,
        cost,
        reward="log",
        generate=generate,
        state_names=("belief" if hidden else "drift",),
        moments=moments,
        expected_return=mean,
    )


def hidden_drift(
    ratio: float, sigma: float, stay: float, cost: float
) -> tuple[MarkovProcess, float]:
    """Return the problem on z, the log-odds of `post`, and the beliefs' long-run deviation.

    `ratio` is mu / sigma.
    """
    persistence = 2 * stay - 1

    def belief(z: np.ndarray) -> np.ndarray:
        return (1 - stay) + persistence / (1 + np.exp(-z))

    def density(y: np.ndarray, z: np.ndarray) -> np.ndarray:
        up, down = belief(z), belief(-z)  # sum to 1
        centre, shift, sd = np.log(up) - np.log(down), 2 * ratio**2, 2 * abs(ratio)
        return up * gaussian(y, centre + shift, sd) + down * gaussian(y, centre - shift, sd)

    # The log-odds before a return are bounded by those of `stay`; one return adds the rest.
    reach = abs(math.log(stay / (1 - stay))) + 2 * ratio**2 + REACH * 2 * abs(ratio)
    width = min(3 * abs(ratio), 1.5)
    # The smaller mu, the narrower the density, and with it the panels.
    count = panels(-reach, reach, width) if width else MAX_NODES
    if count * NODES_PER_PANEL > MAX_NODES:
        raise ConfigError(
            f"mu={ratio * sigma:.3g} is too small for sigma={sigma} to solve the hidden market; "
            f"give mu of about {0.03 * sigma:.3g} or more."
        )

    def mean(z: np.ndarray) -> np.ndarray:
        return ratio * sigma * (2 * belief(z) - 1)

    nodes, weight = gauss_nodes(np.linspace(-reach, reach, count + 1))
    # The long-run deviation, on the nodes of an even grid.
    probability = stationary(transitions(density, nodes, nodes, weight))
    deviation = math.sqrt(probability @ (belief(nodes) - 0.5) ** 2)
    return MarkovProcess(density, mean, -reach, reach, width, cost, belief), deviation


@builder(
    phi=f"(0, {SLOWEST}]", spread="(0, inf)", sigma="(0, inf)", cost="[0, 1)", num_assets=1,
    half_life="[0, inf)", reward=("log", "simple"),
)  # fmt: skip
def hidden_level(
    *,
    phi: float = 0.98,
    spread: float = 0.004,
    sigma: float = 0.01,
    cost: float = 0.001,
    num_assets: int = 1,
    half_life: float = 0.0,
    reward: str = "log",
) -> SyntheticMarket:
    """Noise and a level that it hides: returns r' = level + sigma eps; an agent sees returns alone.

    level' = phi level + eta, of stationary deviation `spread`. State: m, the level's mean given
    all returns, by the steady Kalman filter. With P the variance of the level around m, and
    S = P + sigma^2 that of a return,

        m' = phi (m + P / S (r' - m)),    P = phi^2 P sigma^2 / S + spread^2 (1 - phi^2).

    The filter's innovations are white, so m is an autoregression with shocks of deviation
    phi P / sqrt(S), and E[r' | all returns] = m: the rule is that of `ar1`, solved for m.
    It pays log-returns; with reward="simple" the same numbers are simple returns. A panel has
    `num_assets` independent levels, and its optimum is the sum of theirs. With a
    `half_life` in bars levels fade: theirs is `2^(-t / half_life)` times as large, the filter
    forgets that, and no optimum is known.
    Sources: Kalman (1960); Harvey, Forecasting, Structural Time Series Models (1989), section 4.2.
    """
    shock = spread**2 * (1 - phi**2)
    linear = sigma**2 * (1 - phi**2) - shock
    # The positive root of the equation for P in the docstring.
    error = (math.sqrt(linear**2 + 4 * shock * sigma**2) - linear) / 2  # P
    gain = error / (error + sigma**2)
    moved = phi * error / math.sqrt(error + sigma**2)
    known = moved / math.sqrt(1 - phi**2)  # the deviation of m

    def generate(key: Array, num_bars: int) -> Path:
        keys = jax.random.split(key, 4)
        # The filter starts in its steady state: its mean, then the level around it.
        first_mean = known * jax.random.normal(keys[0], (num_assets,))
        first_level = first_mean + math.sqrt(error) * jax.random.normal(keys[1], (num_assets,))
        shocks = math.sqrt(shock) * jax.random.normal(keys[2], (num_bars, num_assets))
        noise = sigma * jax.random.normal(keys[3], (num_bars, num_assets))
        bars = jnp.arange(num_bars)
        fading = jnp.exp2(-bars / half_life) if half_life else jnp.ones(num_bars)

        def moved_on(last: Any, drawn: Any) -> Any:
            level, mean, _ = last
            r = drawn[2] * level + drawn[1]
            return phi * level + drawn[0], phi * (mean + gain * (r - mean)), r

        first = first_level, first_mean, jnp.zeros_like(first_level)
        _, mean, r = recur(moved_on, first, (shocks, noise, fading))
        return Path(mean, r, jnp.zeros(num_assets))

    def expected_return(state: Tensor) -> Tensor:
        return state

    return switching_market(
        # No optimum is known of levels that fade.
        None if half_life else autoregressive(expected_return, phi, moved, cost),
        cost,
        reward=reward,
        generate=generate,
        num_assets=num_assets,
        state_names=("filtered_level",)
        if num_assets == 1
        else tuple(f"filtered_level_{i}" for i in range(num_assets)),
        moments=((0.0,) * num_assets, (known,) * num_assets),
        expected_return=None if half_life else expected_return,
    )
