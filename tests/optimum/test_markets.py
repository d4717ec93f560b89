"""Synthetic markets as drawn: bars that agree with states, and policies that earn the optimum."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from known import make, market_of

import nca_trader as nca
from nca_trader.data.bars import validate
from nca_trader.errors import ConfigError
from nca_trader.markets.market import draw
from nca_trader.numerics import cpu
from nca_trader.optimum.optima import synthetic

# Those that pay simple returns.
SIMPLE = "martingale kelly merton ring lead_lag moving_volatility cross_section".split()
CASES = [
    ("ou", {}),
    ("ou", {"cost": 0.001}),
    ("ou", {"cost": 0.005}),
    ("ou", {"phi": -0.4, "cost": 0.003}),
    ("ou", {"phi": 0.9, "sigma": 0.03, "reward": "simple"}),
    ("ar1", {}),
    ("ar1", {"phi": -0.6, "cost": 0.004}),
    ("markov_drift", {}),
    ("markov_drift", {"hidden": True}),
    ("markov_drift", {"hidden": True, "stay": 0.1, "mu": -0.006}),
    ("garleanu_pedersen", {}),
    ("garleanu_pedersen", {"lambda_cost": 0.0}),
    ("sine", {}),
    ("sine", {"reward": "simple"}),
    ("martingale", {}),
    ("kelly", {}),
    ("kelly", {"p": 0.4, "move": 0.5}),
    ("merton", {}),
    ("merton", {"gamma": 3.0, "dt": 0.25}),
    ("ring", {"hop": 1}),
    ("ring", {"hop": 3, "assets": 5, "beta": -0.5}),
    ("lagged_ar", {}),
    ("lagged_ar", {"lag": 2, "phi": -0.5}),
    ("hidden_level", {}),
    ("hidden_level", {"phi": 0.8, "spread": 0.01, "cost": 0.0}),
    ("factor_panel", {}),
    ("factor_panel", {"assets": 2, "cost": 0.0, "quadratic": 0.01, "gross": 1.0}),
    ("moving_volatility", {}),
    ("moving_volatility", {"gamma": 1.0, "low": 0.3, "high": 0.1, "stay": 0.9, "mu": 0.02}),
    ("lead_lag", {}),
    ("lead_lag", {"assets": 5, "delay": 1, "graph": 4, "beta": -0.5}),
    ("cross_section", {}),
    ("cross_section", {"assets": 8, "beta": -0.5, "common": 1.0}),
]  # fmt: skip
BARS, SETTLING = 2_000, 207  # 1,792 rewards a path: 28 periods of the sine


@functools.lru_cache(maxsize=12)
def drawn(name, parameters):
    """A market, states [P, N, S] and returns [P, N, A] of P paths, drawn in float32."""
    market = market_of(name, **dict(parameters))
    paths = 512 if market.num_assets == 1 else 64
    keys = jax.random.split(jax.random.key(0), paths)
    path = jax.vmap(lambda key: market.generate(key, BARS))(keys)
    return market, np.asarray(path.states), np.asarray(path.returns)


def draws(name, parameters):
    market, states, returns = drawn(name, tuple(sorted(parameters.items())))
    return market, states.astype(np.float64), returns.astype(np.float64)


def earned(market, states, returns, policy):
    """What `policy` earns a step, and the standard error of that, from independent paths."""
    paths = len(returns)
    position = np.zeros((paths, market.num_assets))
    pays = np.zeros((BARS - 1, paths))
    for t in range(BARS - 1):
        previous, position = position, policy(states[:, t], position)
        pays[t] = market.pay(previous, position, returns[:, t + 1])
    means = pays[SETTLING:].mean(axis=0)
    mean, error = means.mean(), means.std(ddof=1) / math.sqrt(paths)
    slope = (market.score(mean * (1 + 1e-6)) - market.score(mean)) / (mean * 1e-6) if mean else 1
    return market.score(mean), abs(slope) * error


def test_every_market_with_an_optimum_is_simulated():
    assert {name for name, _ in CASES} == set(synthetic.MARKETS)


@pytest.mark.parametrize(("name", "parameters"), CASES)
@pytest.mark.few(3)
def test_the_optimal_policy_earns_the_optimum(name, parameters):
    market, states, returns = draws(name, parameters)
    # float32 returns are off by a millionth; it is all that the sine's deterministic path has.
    rounding = 1e-6 * abs(market.optimum)
    mean, error = earned(market, states, returns, market.optimal_policy)
    # 68 comparisons: by chance one of 370 is off by 3 errors, and one of 16,000 by 4.
    assert abs(mean - market.optimum) <= 4 * error + rounding
    assert error <= 0.04 * abs(market.optimum) + 1e-6  # or the line above says nothing
    if name in ("kelly", "merton", "moving_volatility"):  # whose pay is not linear in the return
        return
    expected = np.zeros_like(returns)
    expected[:, 1:] = market.expected_return(states[:, :-1])
    mean, error = earned(market, states, expected, market.optimal_policy)
    assert abs(mean - market.optimum) <= 4 * error + rounding


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "parameters", "naive", "fraction"),
    [
        ("ou", {}, lambda x, a: -np.sign(x), 0.8034),
        ("ou", {"cost": 0.005}, lambda x, a: -np.sign(x), 0.2880),
        ("ar1", {}, lambda r, a: np.sign(r), 0.9373),
        ("markov_drift", {"hidden": True}, lambda b, a: np.sign(b - 0.5), 0.9953),
        ("garleanu_pedersen", {}, lambda f, x: 2_000.0 * f, 0.2673),
        ("ring", {}, lambda r, a: np.sign(r) / 16, 0.0),
        ("ring", {}, lambda r, a: np.sign(np.roll(r, -1, axis=-1)) / 16, 0.0),
        ("ring", {}, lambda r, a: np.sign(r.mean(-1, keepdims=True)) / 16 + 0 * r, 0.25),
        ("kelly", {}, lambda _, a: np.full_like(a, 0.25), 0.7493),
        ("lagged_ar", {}, lambda r, a: np.ones_like(a), 0.0),
        ("lead_lag", {}, lambda r, a: np.sign(r) / 8, 0.0),
        ("lead_lag", {}, lambda r, a: np.sign(r.mean(-1, keepdims=True)) / 8 + 0 * r, 8**-0.5),
        ("moving_volatility", {}, lambda b, a: np.full_like(a, 0.125), 0.5502),
    ],
)  # fmt: skip
def test_naive_policies_earn_their_published_fraction(name, parameters, naive, fraction):
    market, states, returns = draws(name, parameters)
    mean, error = earned(market, states, returns, naive)
    assert abs(mean - fraction * market.optimum) <= 3 * error + 1e-3 * market.optimum


@pytest.mark.few(4)
@pytest.mark.parametrize("name", synthetic.MARKETS)
def test_bars_are_valid_and_open_at_the_close_before(name):
    market = market_of(name)
    task = draw(market, 300, 3)
    bars = task.bars
    validate(bars)
    assert task.reward == ("simple" if name in SIMPLE else "log")
    assert len(bars) == 300 and bars.num_assets == task.num_assets == task.returns.shape[1]
    assert task.states.shape == (300, len(task.state_names))
    np.testing.assert_array_equal(bars.open[1:], bars.close[:-1])
    np.testing.assert_array_equal(bars.high, np.maximum(bars.open, bars.close))
    np.testing.assert_array_equal(bars.low, np.minimum(bars.open, bars.close))
    shown = 1 if task.volume is None else task.volume(task.states)
    assert bars.present.all() and (bars.volume == shown).all()
    ratio = bars.close / bars.open
    moved = np.log(ratio) if task.reward == "log" else ratio - 1
    np.testing.assert_allclose(moved, task.returns, atol=1e-12)
    assert draw(market, 300, 3).bars.digest() == bars.digest()
    same = draw(market, 300, 4).bars.digest() == bars.digest()
    assert same == (name == "sine")  # in which nothing is random


def test_a_path_is_drawn_on_the_cpu_whatever_the_default_device_is():
    market, found = market_of("ou"), []

    def generate(key, num_bars):
        path = market.generate(key, num_bars)
        found.append(path.returns.devices())
        return path

    other = jax.local_devices(backend="cpu")[-1]
    with jax.default_device(other):
        draw(dataclasses.replace(market, generate=generate), 500, 3)
    assert found == [{cpu()}] != [{other}]  # with one device this would show nothing


@pytest.mark.parametrize("name", synthetic.MARKETS)
@pytest.mark.few(3)
def test_policy_and_generator_run_under_jit_and_agree_with_numpy(name):
    market = market_of(name)
    path = jax.jit(lambda key: market.generate(key, 64))(jax.random.key(5))
    assert path.returns.shape == (64, market.num_assets)
    assert path.states.shape == (64, len(market.state_names))
    assert path.returns.dtype == path.states.dtype == jnp.float32
    held = jnp.zeros((64, market.num_assets))
    position = jax.jit(market.optimal_policy)(path.states, held)
    plain = market.optimal_policy(np.asarray(path.states), np.asarray(held))
    np.testing.assert_allclose(position, plain, rtol=1e-6)
    low, high = market.bounds
    assert position.shape == held.shape and bool(((position >= low) & (position <= high)).all())
    pay = jax.jit(market.pay)(held, position, path.returns)
    np.testing.assert_allclose(
        pay, market.pay(np.asarray(held), plain, np.asarray(path.returns)), rtol=1e-4, atol=1e-8
    )
    expected = jax.jit(market.expected_return)(path.states)
    assert expected.shape == path.returns.shape


def test_a_tasks_rewards_are_the_sum_written_out():
    task = make("ou", num_bars=40, seed=1)
    positions = np.random.default_rng(0).choice([-1.0, 0.0, 1.0], (40, 1))
    held, wanted = 0.0, []
    for t in range(39):
        a = positions[t, 0]
        wanted.append(a * task.returns[t + 1, 0] - 0.002 * abs(a - held))
        held = a
    np.testing.assert_allclose(task.rewards(positions), wanted, rtol=1e-12)
    with pytest.raises(ConfigError, match=r"shape \(40,\) where \[N, A\] = \(40, 1\)"):
        task.rewards(positions[:, 0])
    ring = make("ring", num_bars=20, assets=4)
    positions = np.sign(np.roll(ring.states, 1, axis=1)) / 4
    wanted = (positions[:-1] * 4 * ring.returns[1:]).mean(axis=1)
    np.testing.assert_allclose(ring.rewards(positions), wanted, rtol=1e-12)


def test_an_ou_price_is_the_exponential_of_its_state():
    task = make("ou", num_bars=300)
    np.testing.assert_allclose(task.bars.close, 100 * np.exp(task.states), rtol=1e-10)


def test_a_sine_price_is_the_sine_of_its_state():
    task = make("sine", num_bars=200, amp=0.1, period=20)
    t = np.arange(200)[:, None]
    wave = 100 * (1 + 0.1 * np.sin(2 * np.pi * t / 20))
    np.testing.assert_allclose(task.bars.close, wave, rtol=1e-12)
    np.testing.assert_array_equal(task.states, t % 20)
    np.testing.assert_allclose(task.expected_return(task.states)[:-1], task.returns[1:], atol=1e-12)


def test_the_belief_is_bayes_rule_on_all_returns():
    task = make("markov_drift", num_bars=200, hidden=True, stay=0.9)
    belief = 0.5
    for t in range(200):
        r = task.returns[t, 0]
        up = belief * math.exp(-0.5 * ((r - 0.005) / 0.01) ** 2)
        down = (1 - belief) * math.exp(-0.5 * ((r + 0.005) / 0.01) ** 2)
        post = up / (up + down)
        belief = 0.9 * post + 0.1 * (1 - post)
        assert task.states[t, 0] == pytest.approx(belief, rel=1e-9)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "name", ["ou", "ar1", "markov_drift", "garleanu_pedersen", "ring", "lagged_ar", "lead_lag"]
)
def test_the_next_return_less_its_expectation_is_noise(name):
    market, states, returns = draws(name, {})
    noise = returns[:, 1:] - market.expected_return(states[:, :-1])
    assert abs(noise.mean()) <= 4 * noise.std() / math.sqrt(noise.size)
    assert noise.std() == pytest.approx(0.01, rel=0.01)
    for column in range(min(states.shape[-1], 2)):
        seen = states[:, :-1, column].ravel()
        # One correlation of about a million pairs has a standard error of 1e-3 or less.
        assert abs(np.corrcoef(seen, noise[:, :, 0].ravel())[0, 1]) <= 4e-3


def test_a_lagged_return_follows_the_one_its_state_names():
    task = make("lagged_ar", num_bars=300, lag=4, phi=0.8, sigma=1e-9)
    r = task.returns[:, 0]
    np.testing.assert_allclose(r[4:], 0.8 * r[:-4], atol=1e-8)
    np.testing.assert_array_equal(task.states[3:, 0], r[:-3])
    # Returns next to each other have nothing to do with one another.
    long = make("lagged_ar", num_bars=50_000, lag=4, phi=0.5).returns[:, 0]
    lags = [np.corrcoef(long[k:], long[:-k])[0, 1] for k in range(1, 9)]
    assert np.abs(np.array(lags) - np.array([0, 0, 0, 0.5, 0, 0, 0, 0.25])).max() < 0.02


def test_a_follower_repeats_its_leader_after_the_delay():
    task = make("lead_lag", num_bars=400, assets=6, delay=4, beta=0.8, sigma=1e-9)
    leader, r = task.details["leader"], task.returns
    np.testing.assert_allclose(r[4:], 0.8 * r[:-4, leader], atol=1e-8)
    np.testing.assert_array_equal(task.states[3:], r[:-3])
    # One cycle through all of them.
    seen, at = [], 0
    for _ in range(6):
        seen.append(at := leader[at])
    assert sorted(seen) == list(range(6))
    orders = {tuple(market_of("lead_lag", graph=g).details["leader"]) for g in range(9)}
    assert len(orders) == 9
    # The frozen environment's own, which no other version of numpy may change.
    leader = market_of("lead_lag").details["leader"]
    assert list(leader) == [3, 6, 5, 7, 2, 1, 0, 4]
    offset = (leader - np.arange(8)) % 8
    assert not np.isin(offset, [0, 1, 7]).any() and np.bincount(offset).max() <= 2


def test_the_belief_in_a_volatility_is_bayes_rule_on_all_returns():
    task = make("moving_volatility", num_bars=200, stay=0.9)
    belief = 0.5
    for t in range(200):
        log_return = math.log1p(task.returns[t, 0])
        like = [
            math.exp(-0.5 * ((log_return - 0.004 + s**2 / 2) / s) ** 2) / s for s in (0.04, 0.12)
        ]
        post = belief * like[1] / (belief * like[1] + (1 - belief) * like[0])
        belief = 0.9 * post + 0.1 * (1 - post)
        assert task.states[t, 0] == pytest.approx(belief, rel=1e-9)


def test_what_a_panel_holds_is_scaled_to_its_limit():
    task = make("factor_panel", num_bars=30)
    wanted = np.random.default_rng(0).choice([-1.0, 0.0, 1.0], (30, 3))
    over = np.maximum(np.abs(wanted).sum(1) / 1.5, 1.0)[:, None]
    np.testing.assert_array_equal(task.rewards(wanted), task.rewards(wanted / over))
    a, b = wanted[5] / over[5], wanted[4] / over[4]
    paid = a @ task.returns[6] - 0.004 * np.abs(a - b).sum() - 0.008 * ((a - b) ** 2).sum()
    assert task.rewards(wanted)[5] == pytest.approx(paid, rel=1e-12)


LEVEL = {"phi": 0.95, "spread": 0.004, "cost": 2e-4}


def test_the_filtered_level_is_that_of_least_squares_on_all_returns():
    """The mean given a window of returns, by their covariances: no recursion, no steady state."""
    phi, spread, sigma, window = 0.95, 0.004, 0.01, 250
    task = make("hidden_level", **LEVEL, num_bars=600)
    gap = np.abs(np.subtract.outer(np.arange(window), np.arange(window)))
    covariance = spread**2 * phi**gap + sigma**2 * np.eye(window)
    # The level after the newest return is one step further on than the one that it showed.
    with_level = spread**2 * phi ** np.arange(window, 0, -1)
    weights = np.linalg.solve(covariance, with_level)
    rows = np.arange(window - 1, 600)
    wanted = [task.returns[t - window + 1 : t + 1, 0] @ weights for t in rows]
    np.testing.assert_allclose(task.states[rows, 0], wanted, atol=1e-9)
    assert task.states.std() > 1e-3


def test_the_public_name_makes_tasks():
    task = nca.synthetic.make("sine", amp=0.05, cost=0.001, num_bars=100, seed=0)
    assert task.costs == nca.Costs(commission=0.001)
    assert task.optimum == pytest.approx(0.00306511, rel=1e-5)
    assert "sine: amp=0.05" in repr(task) and "optimum=0.00306" in repr(task)


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("oo", {}, "no synthetic market 'oo'; did you mean 'ou'"),
        ("ou", {"ph": 0.5}, "the market 'ou' has no parameter 'ph'; did you mean 'phi'"),
        ("ou", {"phi": 1.0}, r"phi=1.0 is outside its range; give a number in \[-0.999, 0.999\]"),
        ("ou", {"sigma": 0, "cost": -1}, r"sigma=0 is .*\ncost=-1 is "),
        ("ou", {"reward": "lag"}, "reward='lag' is not known; did you mean 'log'"),
        ("sine", {"num_bars": 1}, "num_bars=1 is below its least value; give at least 2"),
        ("sine", {"seed": 0.5}, "seed=0.5 is not a whole number"),
        ("ar1", {"phi": -1.2}, "phi=-1.2 is outside its range"),
        ("sine", {"period": 1}, "period=1 is below its least value"),
        ("sine", {"amp": 1.0}, "amp=1.0 is outside its range"),
        ("kelly", {"move": 1.0}, r"move=1.0 is outside its range; give a number in \(0, 1\)"),
        ("kelly", {"p": 0.9, "num_bars": 9_000}, "more than a float holds; give fewer bars"),
        ("merton", {"gamma": 0.0}, "gamma=0.0 is outside its range"),
        ("ring", {"hop": 16}, "hop=16 is once around 16 assets; give at most 15"),
        ("ring", {"sigma": 1.0, "num_bars": 50}, "to zero or below; give a smaller sigma"),
        ("markov_drift", {"hidden": True, "mu": 1e-5}, "mu=1e-05 is too small for sigma=0.01"),
        ("markov_drift", {"stay": 1.0}, "stay=1.0 is outside its range"),
        ("garleanu_pedersen", {"phi_mr": 0.0}, "phi_mr=0.0 is outside its range"),
        ("lagged_ar", {"lag": 1}, "lag=1 is below its least value; give at least 2"),
        ("hidden_level", {"phi": 1.0}, "phi=1.0 is outside its range"),
        ("factor_panel", {"assets": 5}, "assets=5 have 243 positions; give at most 4"),
        ("factor_panel", {"gross": 0.9}, "gross=0.9 is outside its range"),
        ("moving_volatility", {"high": 0.5}, "is 12.5 times low=0.04, more than 4: .* bring the"),
        ("moving_volatility", {"stay": 0.99}, "stay=0.99 is outside its range"),
        ("lead_lag", {"assets": 1, "delay": 0}, r"(?s)assets=1 is below.*delay=0 is below"),
    ],
)
def test_what_cannot_be_is_refused_with_a_remedy(name, parameters, message):
    with pytest.raises(ConfigError, match=message):
        synthetic.make(name, **parameters)


def test_assets_of_a_panel_are_independent_and_their_optimum_adds_up():
    one = market_of("hidden_level", **LEVEL)
    panel = make("hidden_level", **LEVEL, num_assets=3, num_bars=8_000)
    assert panel.optimum == pytest.approx(3 * one.optimum)
    assert np.abs(np.corrcoef(panel.returns.T) - np.eye(3)).max() < 0.04
    # Its own rule, asset by asset, earns the optimum.
    held = np.zeros_like(panel.states)
    for t in range(1, len(held)):
        held[t] = panel.optimal_policy(panel.states[t], held[t - 1])
    pay = (held[:-1] * panel.states[:-1]).sum(1) - 2e-4 * np.abs(np.diff(held, axis=0)).sum(1)
    assert pay.mean() == pytest.approx(panel.optimum, rel=0.1)


def test_a_trend_with_a_half_life_fades():
    task = make("hidden_level", spread=0.02, half_life=2_000.0, num_bars=8_000)
    assert task.optimum is None and task.optimal_policy is None
    r = task.returns[:, 0]
    noise = task.parameters["sigma"] ** 2
    early, late = (r[a:b].var() - noise for a, b in ((0, 2000), (6000, 8000)))
    assert late < 0.1 * early  # 2^-6 of the variance


def walked(market, rng, steps, paths=5_000):
    """What the market's policy earns on paths drawn by the market's equations in numpy, float64.

    Beliefs are a filter's of its own here, on likelihoods and not on odds.
    """
    given, assets = market.parameters, market.num_assets
    position, length = np.zeros((paths, assets)), steps // paths
    earned = np.zeros(paths)
    sign = rng.choice([-1.0, 1.0], (paths, assets + 1))
    wild, belief = rng.random(paths) < 0.5, np.full(paths, 0.5)
    past = [rng.normal(size=(paths, assets)) * market_scale(given) for _ in range(16)]
    for t in range(length + 200):
        if market.name == "factor_panel":
            state = sign
            drift = given["common"] * sign[:, :1] * np.array([1.5, 1.0, 0.5])
            r = drift + given["own"] * sign[:, 1:]  # noise has no effect on a linear pay's mean
            stays = np.array([given["common_stay"], *[given["own_stay"]] * assets])
            sign = np.where(rng.random(sign.shape) < stays, sign, -sign)
        elif market.name == "moving_volatility":
            state = belief[:, None]
            s = np.where(wild, given["high"], given["low"])
            log_return = given["mu"] - s**2 / 2 + s * rng.normal(size=paths)
            like = [
                np.exp(-0.5 * ((log_return - given["mu"] + v**2 / 2) / v) ** 2) / v
                for v in (given["low"], given["high"])
            ]
            post = belief * like[1] / (belief * like[1] + (1 - belief) * like[0])
            belief = given["stay"] * post + (1 - given["stay"]) * (1 - post)
            wild = np.where(rng.random(paths) < given["stay"], wild, ~wild)
            r = np.expm1(log_return)[:, None]
        else:
            state = past[-given["delay"]]
            r = given["beta"] * state[:, market.details["leader"]]
            past = [*past[1:], r + given["sigma"] * rng.normal(size=r.shape)]
        previous, position = position, market.optimal_policy(state, position)
        if t >= 200:
            earned += market.pay(previous, position, r) / length
    return earned.mean(), earned.std(ddof=1) / math.sqrt(paths)


def market_scale(given):
    """The deviation of a return that follows another."""
    return given.get("sigma", 1.0) / math.sqrt(1 - given.get("beta", 0.0) ** 2)


HARDER = ("factor_panel", "moving_volatility", "lead_lag")


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        *((name, 10**6) for name in HARDER),
        *(pytest.param(name, 10**7, marks=pytest.mark.slow) for name in HARDER),
    ],
)
def test_the_optimal_policy_earns_the_optimum_on_paths_drawn_otherwise(name, steps):
    market = market_of(name)
    mean, error = walked(market, np.random.default_rng(steps), steps)
    assert abs(mean - market.optimum) <= 3 * error
    assert error <= (0.04 if steps == 10**6 else 0.015) * market.optimum
