"""Markets that pay `a r - c |a - a_prev|` for positions in {-1, 0, 1}: a signal against a cost.

The optima are exact: `solver` holds the method. Prices follow the returns, so that an agent that
sees bars can know the state of all of them but `markov_drift`'s (see there).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from nca_trader.config.ranges import one_of, refuse
from nca_trader.data.synthetic import solver
from nca_trader.data.synthetic.market import (
    Market,
    Path,
    check,
    compiled,
    linear_pay,
    recur,
    threshold_policy,
)
from nca_trader.errors import ConfigError
from nca_trader.numerics import arrays
from nca_trader.types import Costs, Tensor

REACH = 8.0  # standard deviations beyond which a state is not looked for
SLOWEST = 0.999  # a slower state needs more nodes than a dense solve takes in seconds


def gaussian(y: np.ndarray, mean: np.ndarray, sd: float) -> np.ndarray:
    """The normal density."""
    return np.exp(-0.5 * ((y - mean) / sd) ** 2) / (sd * math.sqrt(2 * math.pi))


def autoregression(key: Array, num_bars: int, phi: float, sigma: float) -> tuple[Array, Array]:
    """`[]` x before the first bar, stationary, and `[N]` x[t] = phi x[t-1] + sigma eps."""
    first_key, key = jax.random.split(key)
    first = sigma / math.sqrt(1 - phi**2) * jax.random.normal(first_key)
    noise = sigma * jax.random.normal(key, (num_bars,))

    def step(x: Array, shock: Array) -> tuple[Array, Array]:
        x = phi * x + shock
        return x, x

    return first, recur(step, first, noise)


def solve_autoregression(
    mean: solver.Mean, phi: float, sigma: float, cost: float
) -> solver.Switching:
    """The optimal rule where the state is x' = phi x + sigma eps and the next return m(x)."""
    reach = REACH * sigma / math.sqrt(1 - phi**2)

    def density(y: np.ndarray, x: np.ndarray) -> np.ndarray:
        return gaussian(y, phi * x, sigma)

    return solver.solve_line(density, mean, -reach, reach, 1.5 * sigma, cost)


def check_reward(reward: str) -> None:
    """Refuses what is neither log nor simple."""
    refuse(one_of(type("Given", (), {"reward": reward}), "reward", ("log", "simple")))


def threshold_market(rule: solver.Switching, cost: float, **fields) -> Market:
    """A market that pays linearly and whose optimal policy is `rule`."""
    return Market(
        costs=Costs(commission=cost),
        pay=linear_pay(cost),
        optimum=rule.gain,
        optimal_policy=threshold_policy(rule.cuts, rule.signals),
        details={"cuts": rule.cuts, "signals": rule.signals},
        **fields,
    )


def ou(
    *, phi: float = 0.95, sigma: float = 0.01, cost: float = 0.002, reward: str = "log"
) -> Market:
    """An Ornstein-Uhlenbeck log-price: x' = phi x + sigma eps, close = 100 exp(x).

    State: x. It pays log-returns, E[r | x] = (phi - 1) x, or with reward="simple" simple ones,
    E[r | x] = exp((phi - 1) x + sigma^2 / 2) - 1. At cost 0 the optimum in logs is
    (1 - phi) sigma sqrt(2 / pi) / sqrt(1 - phi^2).
    """
    check(locals(), phi=f"[-{SLOWEST}, {SLOWEST}]", sigma="(0, inf)", cost="[0, 1)")
    check_reward(reward)
    logs = reward == "log"

    def mean(x: Tensor) -> Tensor:
        drift = (phi - 1) * x
        return drift if logs else arrays(x).expm1(drift + sigma**2 / 2)

    def generate(key: Array, num_bars: int) -> Path:
        first, x = autoregression(key, num_bars, phi, sigma)
        r = jnp.diff(x, prepend=first)
        r = r if logs else jnp.expm1(r)
        return Path(x[:, None], r[:, None], first[None])

    return threshold_market(
        solve_autoregression(mean, phi, sigma, cost),
        cost,
        name="ou",
        parameters={"phi": phi, "sigma": sigma, "cost": cost, "reward": reward},
        reward=reward,
        generate=compiled(generate),
        state_names=("log_price",),
        moments=((0.0,), (sigma / math.sqrt(1 - phi**2),)),
        expected_return=mean,
    )


def ar1(*, phi: float = 0.3, sigma: float = 0.01, cost: float = 0.001) -> Market:
    """Log-returns that remember: r' = phi r + sigma eps. State: the last bar's r.

    At cost 0 the optimum is |phi| sigma sqrt(2 / pi) / sqrt(1 - phi^2).
    """
    check(locals(), phi=f"[-{SLOWEST}, {SLOWEST}]", sigma="(0, inf)", cost="[0, 1)")

    def mean(r: Tensor) -> Tensor:
        return phi * r

    def generate(key: Array, num_bars: int) -> Path:
        _, r = autoregression(key, num_bars, phi, sigma)
        return Path(r[:, None], r[:, None], jnp.zeros(1))

    return threshold_market(
        solve_autoregression(mean, phi, sigma, cost),
        cost,
        name="ar1",
        parameters={"phi": phi, "sigma": sigma, "cost": cost},
        reward="log",
        generate=compiled(generate),
        state_names=("return",),
        moments=((0.0,), (sigma / math.sqrt(1 - phi**2),)),
        expected_return=mean,
    )


def martingale(*, sigma: float = 0.01, cost: float = 0.001) -> Market:
    """Simple returns exp(sigma z - sigma^2 / 2) - 1 of mean 0: the best is never to trade.

    No state. An agent that earns more than 0 here by 3 standard errors looks ahead.
    """
    check(locals(), sigma="(0, inf)", cost="[0, 1)")

    def generate(key: Array, num_bars: int) -> Path:
        shock = sigma * jax.random.normal(key, (num_bars, 1))
        return Path(jnp.zeros((num_bars, 0)), jnp.expm1(shock - sigma**2 / 2), jnp.zeros(1))

    def expected_return(state: Tensor) -> Tensor:
        return arrays(state).zeros((*state.shape[:-1], 1), dtype=state.dtype)

    return Market(
        name="martingale",
        parameters={"sigma": sigma, "cost": cost},
        reward="simple",
        generate=compiled(generate),
        pay=linear_pay(cost),
        costs=Costs(commission=cost),
        optimum=0.0,
        optimal_policy=lambda state, position: position,
        expected_return=expected_return,
    )


def sine(
    *, amp: float = 0.05, period: int = 64, cost: float = 0.001, reward: str = "log"
) -> Market:
    """close[t] = 100 (1 + amp sin(2 pi t / period)), the same for every key.

    State: the phase t mod period, of 0 to period - 1. Where a whole swing pays for its two
    trades, the optimum is 2 (ln((1 + h) / (1 - h)) - 2 c) / period, h being the largest value of
    amp sin, and a period a multiple of 4 has h = amp.
    """
    check(locals(), {"period": 2}, amp="(-1, 1)", cost="[0, 1)")
    check_reward(reward)
    phase = np.arange(period + 1) % period
    log_price = np.log1p(amp * np.sin(2 * np.pi * phase / period))
    move = np.diff(log_price)
    move = move if reward == "log" else np.expm1(move)
    gain, signals = solver.solve_chain(np.roll(np.eye(period), 1, axis=1), move, cost)

    def generate(key: Array, num_bars: int) -> Path:
        del key  # nothing is drawn
        before = (jnp.arange(num_bars) - 1) % period
        returns = jnp.asarray(move)[before]
        states = jnp.arange(num_bars) % period
        start = jnp.asarray(log_price)[jnp.asarray([period - 1])]
        return Path(states[:, None].astype(returns.dtype), returns[:, None], start)

    def expected_return(state: Tensor) -> Tensor:
        return arrays(state).asarray(move, dtype=state.dtype)[state.astype(int)]

    cuts = np.arange(period - 1) + 0.5  # a range for each phase
    return threshold_market(
        solver.Switching(gain, cuts, signals),
        cost,
        name="sine",
        parameters={"amp": amp, "period": period, "cost": cost, "reward": reward},
        reward=reward,
        generate=compiled(generate),
        state_names=("phase",),
        moments=(((period - 1) / 2,), (math.sqrt((period**2 - 1) / 12),)),
        expected_return=expected_return,
    )


def markov_drift(
    *,
    mu: float = 0.005,
    sigma: float = 0.01,
    stay: float = 0.98,
    cost: float = 0.001,
    hidden: bool = False,
) -> Market:
    """Log-returns r' = mu s + sigma eps, where s is -1 or 1 and stays with probability `stay`.

    Observable: state s, which bars do not tell: an agent must be given `Task.states`. If it pays
    to follow s, the optimum is |mu| - 2 c (1 - stay).

    Hidden: an agent has the returns alone. State: the belief b = P(s = 1 | all returns), by
    Bayes (Wonham 1965; Hamilton 1989): post = b N(r; mu) / (b N(r; mu) + (1 - b) N(r; -mu)),
    b' = stay post + (1 - stay) (1 - post). The log-odds of `post` are a mixture of two normals,
    on which the optimum is solved; for a policy it is one of whatever sees all past returns.
    """
    check(locals(), mu="(-inf, inf)", sigma="(0, inf)", stay="(0, 1)", cost="[0, 1)")
    if hidden:
        rule, deviation = solve_hidden(mu / sigma, sigma, stay, cost)
        moments = (0.5,), (deviation,)
    else:
        moments = (0.0,), (1.0,)
        chain = np.array([[stay, 1 - stay], [1 - stay, stay]])
        gain, signals = solver.solve_chain(chain, np.array([-mu, mu]), cost)
        rule = solver.Switching(gain, np.zeros(1), signals)

    def mean(state: Tensor) -> Tensor:
        return mu * (2 * state - 1 if hidden else state)

    def generate(key: Array, num_bars: int) -> Path:
        first_key, flip_key, key = jax.random.split(key, 3)
        first = jax.random.rademacher(first_key, ()).astype(float)
        flips = jax.random.bernoulli(flip_key, 1 - stay, (num_bars,))
        s = first * jnp.cumprod(jnp.where(flips, -1.0, 1.0))
        before = jnp.concatenate([first[None], s[:-1]])
        r = mu * before + sigma * jax.random.normal(key, (num_bars,))

        def step(belief: Array, evidence: Array) -> tuple[Array, Array]:
            odds = jnp.log(belief) - jnp.log1p(-belief) + evidence
            belief = (1 - stay) + (2 * stay - 1) * jax.nn.sigmoid(odds)
            return belief, belief

        states = recur(step, jnp.full((), 0.5), 2 * mu / sigma**2 * r) if hidden else s
        return Path(states[:, None], r[:, None], jnp.zeros(1))

    return threshold_market(
        rule,
        cost,
        name="markov_drift",
        parameters=dict(mu=mu, sigma=sigma, stay=stay, cost=cost, hidden=hidden),
        reward="log",
        generate=compiled(generate),
        state_names=("belief" if hidden else "drift",),
        moments=moments,
        expected_return=mean,
    )


def solve_hidden(
    ratio: float, sigma: float, stay: float, cost: float
) -> tuple[solver.Switching, float]:
    """The optimal rule on beliefs, and their deviation in the long run, for ratio = mu / sigma.

    Both are solved on z, the log-odds of `post`.
    """
    persistence = 2 * stay - 1

    def belief(z: np.ndarray) -> np.ndarray:
        return (1 - stay) + persistence / (1 + np.exp(-z))

    def density(y: np.ndarray, z: np.ndarray) -> np.ndarray:
        up, down = belief(z), belief(-z)  # sum to 1
        centre, shift, sd = np.log(up) - np.log(down), 2 * ratio**2, 2 * abs(ratio)
        return up * gaussian(y, centre + shift, sd) + down * gaussian(y, centre - shift, sd)

    reach = abs(math.log(stay / (1 - stay))) + 2 * ratio**2 + REACH * 2 * abs(ratio)
    width = min(3 * abs(ratio), 1.5)
    panels = solver.panels(-reach, reach, width) if width else solver.MAX_NODES
    if panels * solver.NODES_PER_PANEL > solver.MAX_NODES:
        raise ConfigError(
            f"mu={ratio * sigma:.3g} is too small for sigma={sigma} to solve the hidden market; "
            f"give mu of about {0.03 * sigma:.3g} or more."
        )

    def mean(z: np.ndarray) -> np.ndarray:
        return ratio * sigma * (2 * belief(z) - 1)

    rule = solver.solve_line(density, mean, -reach, reach, width, cost)
    order = slice(None) if persistence > 0 else slice(None, None, -1)  # a belief falls in z then
    rule = rule._replace(cuts=belief(rule.cuts)[order], signals=rule.signals[order])
    nodes, weight = solver.gauss_nodes(np.linspace(-reach, reach, panels + 1))
    probability = solver.stationary(solver.transitions(density, nodes, nodes, weight))
    return rule, math.sqrt(probability @ (belief(nodes) - 0.5) ** 2)


def ring(*, assets: int = 16, hop: int = 1, beta: float = 0.3, sigma: float = 0.01) -> Market:
    """Each asset follows another: r'[i] = beta r[(i - hop) mod A] + sigma eps[i], simple returns.

    State: `[A]` the last bar's returns. Positions are in [-1/A, 1/A], without cost. The best is
    sign(beta r[i - hop]) / A, the optimum |beta| sigma sqrt(2 / pi) / sqrt(1 - beta^2): r has the
    variance sigma^2 / (1 - beta^2) whatever the ring. An asset's own past is worth nothing and
    the sign of all assets' mean 1 / sqrt(A) of it: only messages from `hop` places away solve it.
    """
    check(locals(), {"assets": 2, "hop": 1}, beta="(-1, 1)", sigma="(0, inf)")
    if hop >= assets:
        raise ConfigError(f"hop={hop} is once around {assets} assets; give at most {assets - 1}.")
    scale = sigma / math.sqrt(1 - beta**2)

    def mean(r: Tensor) -> Tensor:
        return beta * arrays(r).roll(r, hop, axis=-1)

    def generate(key: Array, num_bars: int) -> Path:
        first_key, key = jax.random.split(key)
        first = scale * jax.random.normal(first_key, (assets,))

        def step(r: Array, shock: Array) -> tuple[Array, Array]:
            r = beta * jnp.roll(r, hop) + shock
            return r, r

        r = recur(step, first, sigma * jax.random.normal(key, (num_bars, assets)))
        return Path(r, r, jnp.zeros(assets))

    return Market(
        name="ring",
        parameters={"assets": assets, "hop": hop, "beta": beta, "sigma": sigma},
        reward="simple",
        generate=compiled(generate),
        pay=linear_pay(0.0),
        num_assets=assets,
        state_names=tuple(f"return_{i}" for i in range(assets)),
        moments=((0.0,) * assets, (scale,) * assets),
        bounds=(-1.0 / assets, 1.0 / assets),
        optimum=abs(beta) * scale * math.sqrt(2 / math.pi),
        optimal_policy=lambda state, position: arrays(state).sign(mean(state)) / assets,
        expected_return=mean,
    )
