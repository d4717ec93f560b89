"""The stated optima: published numbers, closed forms, and a second method at random parameters."""

import itertools
import json
import math

import numpy as np
import pytest
from scipy import sparse
from scipy.interpolate import CubicSpline
from scipy.linalg import solve_discrete_lyapunov
from scipy.optimize import linprog, minimize_scalar

from nca_trader.config import account
from nca_trader.optimum.optima import synthetic

# From ../shared/expected/known_optimum.json, so that these hold without it. The grid behind the
# table's OU, AR(1) and hidden values is off by up to 3e-4, as its own convergence study says.
GRID = 3.5e-4
PUBLISHED = [
    ("ou_log", "ou", {"cost": 0.001}, 0.0011607217318178203, GRID),
    ("ou_mid", "ou", {}, 0.0010874758131783503, GRID),
    ("ou_expensive", "ou", {"cost": 0.005}, 0.0009284379243316655, GRID),
    ("ou_cheap", "ou", {"cost": 0.0}, 0.0012779395994823146, GRID),
    ("ou_simple", "ou", {"cost": 0.001, "reward": "simple"}, 0.001161479510508115, GRID),
    ("ar1", "ar1", {}, 0.0018171750317001138, GRID),
    ("ar1_weak", "ar1", {"phi": 0.1, "cost": 0.0005}, 0.0004264109069891346, GRID),
    ("markov_switching.hidden", "markov_drift", {"hidden": True}, 0.003664724729425429, 1e-5),
    ("markov_switching.observable", "markov_drift", {}, 0.00496, 1e-12),
    ("garleanu_pedersen", "garleanu_pedersen", {}, 0.0009843602615324117, 1e-12),
    ("sine.log", "sine", {}, 0.003065108079905697, 1e-12),
    ("sine.simple", "sine", {"reward": "simple"}, 0.0030651164615143733, 1e-12),
    ("martingale", "martingale", {}, 0.0, 0.0),
    ("kelly_coin", "kelly", {}, 0.005008366846356839, 1e-12),
    ("lead_lag_ring_hop1", "ring", {"hop": 1}, 0.002509230859632514, 1e-12),
    ("lead_lag_ring_hop3", "ring", {"hop": 3}, 0.002509230859632514, 1e-12),
]


@pytest.fixture(autouse=True)
def _any_cost(monkeypatch):
    """A market of theory may charge what no venue does."""
    monkeypatch.setitem(account.IMPLAUSIBLE, "commission", 1.0)


@pytest.fixture(scope="module")
def table(shared):
    return json.loads((shared / "expected" / "known_optimum.json").read_text())


@pytest.mark.parametrize(("entry", "name", "parameters", "value", "rtol"), PUBLISHED)
def test_an_optimum_is_the_published_one(entry, name, parameters, value, rtol):
    assert synthetic.market(name, **parameters).optimum == pytest.approx(value, rel=rtol, abs=0)


def test_the_published_optima_are_those_of_the_shared_table(table):
    for entry, _, _, value, _ in PUBLISHED:
        found = table
        for key in entry.split("."):
            found = found[key]
        assert found["optimal_value"] == value, entry


def test_thresholds_are_the_shared_table_to_its_grid(table):
    for entry, name, given in (("ou_mid", "ou", {}), ("ou_expensive", "ou", {"cost": 0.005})):
        cuts = [row["x"] for row in table[entry]["thresholds"]["from_flat"]]
        np.testing.assert_allclose(synthetic.market(name, **given).details["cuts"], cuts, atol=5e-4)
    hidden = table["markov_switching"]["hidden"]["thresholds_belief"]["from_flat"]
    cuts = synthetic.market("markov_drift", hidden=True).details["cuts"]
    np.testing.assert_allclose(cuts, hidden, atol=5e-4)


@pytest.mark.parametrize(("mu", "fraction"), [(-0.1, 0.0), (0.9, 1.0)])
def test_merton_neither_shorts_nor_borrows(mu, fraction):
    assert synthetic.market("merton", mu=mu).details["fraction"] == fraction


# The second method of the threshold markets: value iteration over (state, position) on a grid,
# three positions at once and every action tried, which knows nothing of units or cuts.


def value_iteration(step, mean, cost):
    """The average reward, where `step(v [3, n]) -> [3, n]` is the expectation of v a step on."""
    actions = np.array([-1.0, 0.0, 1.0])
    fee = cost * np.abs(actions[:, None] - actions[None, :])  # [new, old]
    value, gain = np.zeros((3, len(mean))), math.inf
    for _ in range(20_000):
        hold = actions[:, None] * mean[None, :] + step(value)
        new = (hold[:, None, :] - fee[:, :, None]).max(axis=0)
        change = new - value
        low, high = change.min(), change.max()
        value, gain = new - new[1, 0], (low + high) / 2
        if high - low < 1e-10:
            return gain
    raise AssertionError("value iteration did not converge")


def autoregressive_grid(phi, sigma, mean, cost, n):
    x = np.linspace(-7, 7, n) * sigma / math.sqrt(1 - phi**2)
    chain = np.exp(-0.5 * ((x[None, :] - phi * x[:, None]) / sigma) ** 2)
    chain /= chain.sum(axis=1, keepdims=True)
    return value_iteration(lambda v: v @ chain.T, mean(x), cost)


def extrapolated(gain, n):
    """The error of an even grid falls with the square of its step."""
    return (4 * gain(2 * n + 1) - gain(n + 1)) / 3


DRAWS = np.random.default_rng(7).uniform(size=(5, 6))


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("reward", ["log", "simple"])
@pytest.mark.few(2)
def test_ou_equals_value_iteration_on_a_grid(draw, reward):
    phi, sigma = 0.2 + 0.76 * draw[0], 0.005 + 0.03 * draw[1]
    cost = draw[2] * 0.8 * sigma
    market = synthetic.market("ou", phi=phi, sigma=sigma, cost=cost, reward=reward)
    simple = np.exp(sigma**2 / 2) if reward == "simple" else None

    def mean(x):
        return (phi - 1) * x if simple is None else np.exp((phi - 1) * x) * simple - 1

    grid = extrapolated(lambda n: autoregressive_grid(phi, sigma, mean, cost, n), 240)
    assert market.optimum == pytest.approx(grid, rel=2e-4)


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.few(1)
def test_ar1_equals_value_iteration_on_a_grid(draw):
    phi, sigma = (-1) ** int(draw[0] * 10) * (0.1 + 0.8 * draw[1]), 0.005 + 0.03 * draw[2]
    cost = draw[3] * 0.5 * abs(phi) * sigma
    market = synthetic.market("ar1", phi=phi, sigma=sigma, cost=cost)
    grid = extrapolated(lambda n: autoregressive_grid(phi, sigma, lambda r: phi * r, cost, n), 240)
    assert market.optimum == pytest.approx(grid, rel=2e-4)


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.few(2)
def test_hidden_drift_equals_value_iteration_over_beliefs(draw):
    sigma, stay = 0.005 + 0.02 * draw[0], 0.1 + 0.88 * draw[1]
    mu, cost = sigma * (0.2 + 0.8 * draw[2]), 0.4 * sigma * draw[3]
    market = synthetic.market("markov_drift", mu=mu, sigma=sigma, stay=stay, cost=cost, hidden=True)
    low, high = sorted((stay, 1 - stay))
    belief = np.linspace(low, high, 801)
    z, weight = np.polynomial.hermite_e.hermegauss(64)
    weight = weight / weight.sum()
    parts = []
    for drift, prior in ((mu, belief), (-mu, 1 - belief)):
        r = drift + sigma * z[None, :]
        up = belief[:, None] * np.exp(-0.5 * ((r - mu) / sigma) ** 2)
        down = (1 - belief[:, None]) * np.exp(-0.5 * ((r + mu) / sigma) ** 2)
        after = (stay * up + (1 - stay) * down) / (up + down)
        parts.append((prior[:, None] * weight[None, :], after))

    def step(value):
        rows = [
            sum((w * np.interp(after, belief, row)).sum(axis=1) for w, after in parts)
            for row in value
        ]
        return np.stack(rows)

    grid = value_iteration(step, mu * (2 * belief - 1), cost)
    assert market.optimum == pytest.approx(grid, rel=3e-4, abs=1e-9)


def linear_program(chain, mean, cost):
    """The best average reward as a flow over (state, held, action): Puterman, section 8.8."""
    n, actions = len(mean), (-1.0, 0.0, 1.0)
    pays = [a * mean[s] - cost * abs(a - h) for s in range(n) for h in actions for a in actions]
    balance = np.zeros((3 * n, 9 * n))
    for s in range(n):
        for h in range(3):
            for a in range(3):
                column = 9 * s + 3 * h + a
                balance[3 * s + h, column] += 1.0
                balance[np.arange(n) * 3 + a, column] -= chain[s]
    rows = np.vstack([balance, np.ones(9 * n)])
    found = linprog(-np.array(pays), A_eq=rows, b_eq=[0.0] * (3 * n) + [1.0], bounds=(0, None))
    assert found.success, found.message
    return -found.fun


@pytest.mark.parametrize("draw", DRAWS)
def test_observable_drift_equals_a_linear_program(draw):
    mu, stay, cost = 0.001 + 0.01 * draw[0], 0.02 + 0.97 * draw[1], 0.01 * draw[2]
    market = synthetic.market("markov_drift", mu=mu, stay=stay, cost=cost)
    chain = np.array([[stay, 1 - stay], [1 - stay, stay]])
    other = linear_program(chain, np.array([-mu, mu]), cost)
    assert market.optimum == pytest.approx(other, abs=1e-9)


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("reward", ["log", "simple"])
def test_sine_equals_a_linear_program(draw, reward):
    amp, period, cost = 0.3 * draw[0] + 0.01, 2 + int(22 * draw[1]), 0.15 * draw[2]
    market = synthetic.market("sine", amp=amp, period=period, cost=cost, reward=reward)
    price = 1 + amp * np.sin(2 * np.pi * np.arange(period + 1) / period)
    move = np.diff(np.log(price)) if reward == "log" else price[1:] / price[:-1] - 1
    other = linear_program(np.roll(np.eye(period), 1, axis=1), move, cost)
    assert market.optimum == pytest.approx(other, abs=1e-9)


@pytest.mark.parametrize("draw", DRAWS)
def test_kelly_equals_a_search_over_weights(draw):
    p, move = 0.2 + 0.6 * draw[0], 0.1 + 0.5 * draw[1]
    market = synthetic.market("kelly", p=p, move=move)

    def loss(a):
        return -(p * np.log1p(a * move) + (1 - p) * np.log1p(-a * move))

    found = minimize_scalar(loss, bounds=(-0.99 / move, 0.99 / move), method="bounded")
    assert market.optimum == pytest.approx(-found.fun, rel=1e-6)
    best = market.optimal_policy(np.zeros((1, 0)), np.zeros((1, 1)))
    assert best[0, 0] == pytest.approx(found.x, abs=1e-4)


@pytest.mark.parametrize("draw", DRAWS)
def test_merton_equals_a_search_with_another_quadrature(draw):
    gamma, mu, sigma, dt = (
        0.5 + 5 * draw[0],
        0.15 * draw[1],
        0.2 + 0.4 * draw[2],
        0.01 + draw[3] / 4,
    )
    market = synthetic.market("merton", gamma=gamma, mu=mu, sigma=sigma, dt=dt)
    z, weight = np.polynomial.hermite_e.hermegauss(120)
    r = np.exp((mu - sigma**2 / 2) * dt + sigma * math.sqrt(dt) * z) - 1

    def loss(a):
        wealth = weight @ (1 + a * r) ** (1 - gamma) / weight.sum()
        return -np.log(wealth) / (1 - gamma)

    found = minimize_scalar(loss, bounds=(0, 1), method="bounded", options={"xatol": 1e-10})
    assert market.optimum == pytest.approx(-found.fun, rel=1e-6, abs=1e-12)
    assert market.details["fraction"] == pytest.approx(found.x, abs=1e-4)


@pytest.mark.parametrize("draw", DRAWS)
def test_garleanu_pedersen_equals_value_iteration_over_quadratics(draw):
    b, phi, sig_f = 0.5 + draw[0], 0.02 + 0.9 * draw[1], 0.0002 + 0.001 * draw[2]
    sigma, g, cost = 0.005 + 0.03 * draw[3], 1 + 9 * draw[4], 40 * draw[5]
    market = synthetic.market(
        "garleanu_pedersen", B=b, phi_mr=phi, sig_f=sig_f, sigma=sigma, gamma_risk=g,
        lambda_cost=cost,
    )  # fmt: skip
    rho, risk, fee = 1 - phi, g * sigma**2, cost * sigma**2
    p = q = s = 0.0  # the value is p x_prev^2 + q x_prev f + s f^2 + the gain
    for _ in range(5_000):
        bend, pull = risk / 2 + fee / 2 - p, b + q * rho
        p = fee**2 / (4 * bend) - fee / 2
        q = fee * pull / (2 * bend)
        s = pull**2 / (4 * bend) + s * rho**2
    assert market.optimum == pytest.approx(s * sig_f**2, rel=1e-9)
    bend, pull = risk / 2 + fee / 2 - p, b + q * rho
    held, f = np.array([0.7]), np.array([0.001])
    np.testing.assert_allclose(
        market.optimal_policy(f, held), (pull * f + fee * held) / (2 * bend), rtol=1e-9
    )


@pytest.mark.parametrize("draw", DRAWS)
def test_the_ring_equals_its_stationary_covariance(draw):
    assets, beta, sigma = 3 + int(9 * draw[0]), -0.9 + 1.8 * draw[1], 0.005 + 0.02 * draw[2]
    hop = 1 + int((assets - 1) * draw[3])
    market = synthetic.market("ring", assets=assets, hop=hop, beta=beta, sigma=sigma)
    push = beta * np.roll(np.eye(assets), hop, axis=0)  # asset i from asset i - hop
    np.testing.assert_allclose(
        market.expected_return(np.arange(assets) * 1.0), push @ np.arange(assets), atol=1e-12
    )
    big = np.eye(assets**2) - np.kron(push, push)
    spread = np.linalg.solve(big, sigma**2 * np.eye(assets).ravel()).reshape(assets, assets)
    drift = np.sqrt(np.diag(push @ spread @ push.T))
    assert market.optimum == pytest.approx(math.sqrt(2 / math.pi) * drift.mean(), rel=1e-9)
    own = np.diag(push @ spread)  # what an asset's own last return tells of its next
    np.testing.assert_allclose(own, 0.0, atol=1e-15)


@pytest.mark.parametrize("draw", [*DRAWS[:4], None])
@pytest.mark.few(1)
def test_a_volatility_that_moves_equals_a_sum_over_beliefs_on_a_grid(draw):
    """Lines between 2,001 beliefs, Gauss's returns, and a search for each belief's weight."""
    given = {}
    if draw is not None:
        given = {
            "low": 0.03 + 0.05 * draw[0], "high": 0.08 + 0.04 * draw[1], "mu": 0.004 * draw[4],
            "stay": 0.1 + 0.85 * draw[2], "gamma": [1.0, 0.5, 2.0, 7.0][int(4 * draw[3])],
        }  # fmt: skip
    market = synthetic.market("moving_volatility", **given)
    full = market.parameters
    gamma, stay, mu = full["gamma"], full["stay"], full["mu"]
    z, weight = np.polynomial.hermite_e.hermegauss(100)
    weight = weight / weight.sum()
    belief = np.linspace(min(stay, 1 - stay), max(stay, 1 - stay), 2_001)[:, None]
    parts = []
    for at, prior in ((0, 1 - belief), (1, belief)):
        s = (full["low"], full["high"])[at]
        log_return = mu - s**2 / 2 + s * z
        calm, wild = (
            np.exp(-0.5 * ((log_return - mu + v**2 / 2) / v) ** 2) / v
            for v in (full["low"], full["high"])
        )
        after = (stay * belief * wild + (1 - stay) * (1 - belief) * calm) / (
            belief * wild + (1 - belief) * calm
        )
        parts.append((prior * weight, after, np.exp(log_return) - 1))

    def utility(a, r):
        grown = 1 + a * r
        return np.log(grown) if gamma == 1 else (grown ** (1 - gamma) - 1) / (1 - gamma)

    def worth(row, a):
        return sum((w[row] * utility(a, r)).sum() for w, _, r in parts)

    value = np.empty(41)
    rows = np.linspace(0, 2_000, 41).astype(int)
    for k, row in enumerate(rows):
        found = minimize_scalar(
            lambda a, row=row: -worth(row, a), bounds=(0, 1), method="bounded",
            options={"xatol": 1e-9},
        )  # fmt: skip
        value[k] = -found.fun
        best = market.optimal_policy(belief[row], np.zeros(1))
        assert best[0] == pytest.approx(found.x, abs=1e-4)
    value = CubicSpline(belief[rows, 0], value)(belief[:, 0])
    # Its mean many steps on, from any belief.
    for _ in range(int(12 / (1 - abs(2 * stay - 1))) + 1):
        value = sum((w * np.interp(after, belief[:, 0], value)).sum(1) for w, after, _ in parts)
    assert np.ptp(value) <= 1e-4 * abs(value).max()
    assert market.optimum == pytest.approx(value.mean(), rel=2e-4)


@pytest.mark.parametrize("draw", DRAWS)
def test_followers_equal_the_stationary_covariance_of_their_stacked_returns(draw):
    assets, delay, graph = 3 + int(3 * draw[0]), 1 + int(3 * draw[1]), int(100 * draw[2])
    beta, sigma = -0.9 + 1.8 * draw[3], 0.005 + 0.02 * draw[4]
    market = synthetic.market(
        "lead_lag", assets=assets, delay=delay, graph=graph, beta=beta, sigma=sigma
    )
    leader = market.details["leader"]
    # The newest returns first; each step shifts the older ones on.
    size = assets * delay
    step = np.zeros((size, size))
    step[np.arange(assets), size - assets + leader] = beta
    step[assets:, :-assets] += np.eye(size - assets)
    shock = np.diag([sigma**2] * assets + [0.0] * (size - assets))
    spread = solve_discrete_lyapunov(step, shock)
    np.testing.assert_allclose(spread, np.eye(size) * market.moments[1][0] ** 2, atol=1e-12)
    drift = np.sqrt(np.diag(step @ spread @ step.T)[:assets])
    assert market.optimum == pytest.approx(math.sqrt(2 / math.pi) * drift.mean(), rel=1e-9)
    # Its own returns tell nothing of an asset's next one.
    own = (step @ spread)[:assets].reshape(assets, delay, assets)
    assert abs(own[np.arange(assets), :, np.arange(assets)]).max() < 1e-15


@pytest.mark.parametrize("draw", DRAWS)
def test_a_lagged_market_pays_the_mean_absolute_forecast(draw):
    """The variance as a sum over all shocks, the mean as a quadrature: no closed form of either."""
    phi, sigma, lag = 1.8 * draw[0] - 0.9, 0.005 + 0.03 * draw[1], 2 + int(9 * draw[2])
    variance = sigma**2 * sum(phi ** (2 * k) for k in range(2_000))
    z = np.linspace(0.0, 12.0, 200_001)
    half = np.trapezoid(z * np.exp(-0.5 * z**2), z) / math.sqrt(2 * math.pi)
    market = synthetic.market("lagged_ar", lag=lag, phi=phi, sigma=sigma)
    assert market.optimum == pytest.approx(2 * half * abs(phi) * math.sqrt(variance), rel=1e-8)


@pytest.mark.parametrize("draw", DRAWS[:3])
def test_a_hidden_level_equals_value_iteration_on_least_squares(draw):
    """What is known of the level comes from covariances of 600 returns, and not from a filter."""
    phi, sigma = 0.5 + 0.45 * draw[0], 0.005 + 0.02 * draw[1]
    spread, cost = sigma * (0.3 + draw[2]), 0.5 * sigma * draw[3]
    lags = np.arange(600)
    covariance = spread**2 * phi ** np.abs(np.subtract.outer(lags, lags)) + sigma**2 * np.eye(600)
    with_level = spread**2 * phi ** (lags + 1)  # of the newest return, and the older ones
    known = with_level @ np.linalg.solve(covariance, with_level)
    market = synthetic.market("hidden_level", phi=phi, spread=spread, sigma=sigma, cost=cost)
    assert market.moments[1][0] == pytest.approx(math.sqrt(known), rel=1e-7)
    shock = math.sqrt(known * (1 - phi**2))
    gain = extrapolated(lambda n: autoregressive_grid(phi, shock, lambda m: m, cost, n), 300)
    assert market.optimum == pytest.approx(gain, rel=1e-3, abs=1e-7)


def test_where_trading_never_pays_the_best_is_nothing():
    for name, given in (
        ("ou", {"cost": 0.5}),
        ("sine", {"cost": 0.5}),
        ("markov_drift", {"stay": 0.5, "cost": 0.1}),
        ("markov_drift", {"stay": 0.5, "hidden": True}),
    ):
        assert synthetic.market(name, **given).optimum == pytest.approx(0.0, abs=1e-12)


def test_where_trading_never_pays_but_returns_drift_the_best_is_to_hold():
    # E[simple return] of an OU log-price is exp(var(diff) / 2) - 1 and var(diff) 2 s^2 / (1 + phi).
    market = synthetic.market("ou", cost=0.5, reward="simple")
    assert market.optimum == pytest.approx(math.expm1(0.01**2 / 1.95), rel=1e-9)


@pytest.mark.heavy
@pytest.mark.parametrize("draw", [*DRAWS[:3], None])
def test_a_panel_with_a_limit_equals_a_linear_program(draw):
    """The flow over (state, held, next position), of the market's own default where None."""
    given = {"assets": 3}
    if draw is not None:
        given = {
            "assets": 2, "common": 0.006 * draw[0], "own": 0.001 + 0.004 * draw[1],
            "common_stay": 0.5 + 0.45 * draw[2], "own_stay": 0.1 + 0.8 * draw[3],
            "cost": 0.004 * draw[4], "quadratic": 0.02 * draw[5], "gross": 1 + draw[0],
        }  # fmt: skip
    market = synthetic.market("factor_panel", **given)
    full = market.parameters
    assets = full["assets"]
    loading = [1 + full["spread"] * (1 - 2 * i / (assets - 1)) for i in range(assets)]
    held = []
    for signs in itertools.product((0, 1, -1), repeat=assets):
        over = max(sum(map(abs, signs)) / full["gross"], 1.0)
        held.append([s / over for s in signs])
    states = list(itertools.product((1, -1), repeat=assets + 1))
    stays = [full["common_stay"], *[full["own_stay"]] * assets]
    chain = np.array([
        [math.prod(k if x == y else 1 - k for x, y, k in zip(s, n, stays, strict=True))
         for n in states]
        for s in states
    ])  # fmt: skip
    n, p = len(states), len(held)
    a, b = np.array(held)[None, :], np.array(held)[:, None]  # next, held
    fee = (full["cost"] * np.abs(a - b) + full["quadratic"] / 2 * (a - b) ** 2).sum(-1)
    pays = np.empty((n, p, p))
    for row, (factor, *own) in enumerate(states):
        mean = [b * full["common"] * factor + full["own"] * o
                for b, o in zip(loading, own, strict=True)]  # fmt: skip
        pays[row] = np.array(held) @ mean - fee
    # What flows out of (s, held) flows in from all (s', held') that hold it next.
    out = sparse.kron(sparse.eye(n * p), np.ones((1, p)))
    into = sparse.kron(chain.T, sparse.kron(np.ones((1, p)), sparse.eye(p)))
    rows = sparse.vstack([out - into, np.ones((1, n * p * p))])
    found = linprog(
        -pays.ravel(), A_eq=rows, b_eq=[0.0] * (n * p) + [1.0], bounds=(0, None), method="highs"
    )
    assert found.success, found.message
    assert market.optimum == pytest.approx(-found.fun, rel=1e-6, abs=1e-9)
    # The limit binds, and both costs matter.
    if draw is None:
        for change in ({"gross": 3.0}, {"cost": 0.0}, {"quadratic": 0.0}):
            assert synthetic.market("factor_panel", **change).optimum > 1.03 * market.optimum


@pytest.mark.parametrize("draw", DRAWS)
def test_a_martingale_pays_no_policy(draw):
    sigma, cost = 0.005 + 0.05 * draw[0], 0.01 * draw[1]
    z, weight = np.polynomial.hermite_e.hermegauss(60)
    mean = weight @ (np.exp(sigma * z - sigma**2 / 2) - 1) / weight.sum()
    assert mean == pytest.approx(0.0, abs=1e-12)
    market = synthetic.market("martingale", sigma=sigma, cost=cost)
    other = value_iteration(lambda v: v, np.array([mean]), cost)
    assert market.optimum == pytest.approx(other, abs=1e-9)
