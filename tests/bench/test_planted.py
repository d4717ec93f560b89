"""Panels whose truth is known: their optimum by a second derivation, and the recipe on ten each."""

import json

import jax
import numpy as np
import pytest

import nca_trader as nca
from benchmarks import agents, planted
from nca_trader.optimum import synthetic

SMALL = planted.Truth(phi=0.95, spread=1.1e-3, train=3_000, test=2_000)


def known_deviation(truth):
    """The deviation of what 2,000 past returns say of a level, by their covariances."""
    lags = np.arange(2_000)
    covariance = truth.spread**2 * truth.phi ** np.abs(np.subtract.outer(lags, lags))
    covariance += planted.SIGMA**2 * np.eye(2_000)
    with_level = truth.spread**2 * truth.phi ** (lags + 1)
    return np.sqrt(with_level @ np.linalg.solve(covariance, with_level))


@pytest.mark.slow
def test_without_costs_the_optimum_is_an_integral():
    truth, risk = planted.WEAK, 20.0
    m = np.linspace(-8, 8, 200_001) * known_deviation(truth)
    second = planted.SIGMA**2 + truth.spread**2 - known_deviation(truth) ** 2 + m**2
    most = 0.15 / np.sqrt(planted.YEAR * (planted.SIGMA**2 + truth.spread**2)) / planted.ASSETS
    size = np.clip(m / (risk * second), -most, most)
    earned = size * m - risk / 2 * size**2 * second
    density = np.exp(-0.5 * (m / known_deviation(truth)) ** 2)
    wanted = planted.ASSETS * (earned * density).sum() / density.sum()
    assert planted.best(truth, risk, cost=0.0).optimum == pytest.approx(wanted, rel=2e-3)


@pytest.mark.slow
def test_more_assets_and_as_much_more_aversion_to_risk_leave_each_asset_its_problem(monkeypatch):
    few = planted.best(planted.WEAK)
    monkeypatch.setattr(planted, "ASSETS", 2 * planted.ASSETS)
    many = planted.best(planted.WEAK, risk=2 * planted.RISK)
    assert many.optimum == pytest.approx(few.optimum, rel=1e-9)
    np.testing.assert_allclose(many.levels, few.levels / 2, rtol=1e-12)
    np.testing.assert_allclose(many.bought, few.bought, atol=1e-9)


@pytest.mark.slow
def test_the_best_rule_earns_its_optimum_and_others_earn_less():
    truth = planted.WEAK._replace(phi=0.95, spread=1.5e-3)
    found, most = planted.best(truth), planted.best(truth, cost=7 * planted.COST)
    wide = planted.best(truth, cost=0.0)
    earned = {"best": [], "most": [], "wide": []}
    for seed in range(4):
        _, states = planted.drawn(truth, 50_000, seed)
        for name, rule in (("best", found), ("most", most), ("wide", wide)):
            held = rule.positions(states)
            traded = np.abs(np.diff(held, axis=0, prepend=0.0)).sum(1)
            held = np.concatenate([np.zeros((1, planted.ASSETS)), held[:-1]])
            cost = planted.COST * np.concatenate([[0.0], traded[:-1]])
            earned[name].append(planted.utility(held, cost, states, truth))
    assert np.mean(earned["best"]) == pytest.approx(found.optimum, rel=0.04)
    # On the same draws, so that chance cancels.
    for name in ("most", "wide"):
        assert np.mean(earned[name]) < np.mean(earned["best"]) - 0.02 * found.optimum


def test_assets_of_a_panel_are_independent_and_their_optimum_adds_up():
    given = {"phi": 0.95, "spread": 0.004, "cost": 2e-4}
    one = synthetic.market("hidden_level", **given)
    panel = synthetic.make("hidden_level", **given, num_assets=3, num_bars=20_000)
    assert panel.optimum == pytest.approx(3 * one.optimum)
    assert np.abs(np.corrcoef(panel.returns.T) - np.eye(3)).max() < 0.04
    # Its own rule, asset by asset, earns the optimum.
    held = np.zeros_like(panel.states)
    for t in range(1, len(held)):
        held[t] = panel.optimal_policy(panel.states[t], held[t - 1])
    pay = (held[:-1] * panel.states[:-1]).sum(1) - 2e-4 * np.abs(np.diff(held, axis=0)).sum(1)
    assert pay.mean() == pytest.approx(panel.optimum, rel=0.1)


def test_a_trend_with_a_half_life_fades():
    task = synthetic.make("hidden_level", spread=0.02, half_life=2_000.0, num_bars=8_000)
    assert task.optimum is None and task.optimal_policy is None
    r = task.returns[:, 0]
    noise = task.parameters["sigma"] ** 2
    early, late = (r[a:b].var() - noise for a, b in ((0, 2000), (6000, 8000)))
    assert late < 0.1 * early  # 2^-6 of the variance


def test_shuffled_rows_are_the_same_returns_without_their_mean():
    bars, _ = planted.drawn(SMALL, 2_000, seed=3)
    mixed, _ = planted.drawn(SMALL, 2_000, seed=3, shuffle=True)
    start = np.full((1, planted.ASSETS), 100.0)
    first, second = (b.close / np.vstack([start, b.close[:-1]]) - 1.0 for b in (bars, mixed))
    assert np.abs(second.mean(0)).max() < 1e-15
    order = np.argsort(first[:, 0])
    np.testing.assert_allclose(
        (first - first.mean(0))[order], second[np.argsort(second[:, 0])], atol=1e-12
    )


@pytest.mark.slow
def test_the_recipe_that_compiles_once_is_the_one_that_is_trained(tmp_path):
    recipe = planted.Recipe(num_seeds=2, steps=20_000)
    for seed in (0, 1):
        bars, _ = planted.drawn(SMALL, 3_000, seed)
        env = nca.TradingEnv(bars, agents.env_of(planted.PANEL))
        run = nca.train(env, recipe.agent, tmp_path / str(seed))
        jax.tree.map(np.testing.assert_array_equal, recipe.trained(env).params(), run.params())


@pytest.mark.slow
@pytest.mark.parametrize("part", ["noise", "power"])
def test_ten_panels_are_judged_as_the_results_say(part):
    known = {r["seed"]: r for r in agents.rows_of(planted.RESULTS) if r["part"] == part}
    seeds, row_of, size = planted.PARTS[part]
    recipe = planted.Recipe(**size)
    for seed in seeds[:10]:
        row = json.loads(json.dumps(row_of(seed, recipe), default=float))
        assert row["bound"] == pytest.approx(known[seed]["bound"], abs=0.1)


@pytest.mark.slow
def test_panels_earn_what_the_results_say():
    known = {r["seed"]: r for r in agents.rows_of(planted.RESULTS) if r["part"] == "optimum"}
    _, row_of, size = planted.PARTS["optimum"]
    recipe = planted.Recipe(**size)
    for seed in sorted(known)[:10]:
        assert row_of(seed, recipe)["fraction"] == pytest.approx(known[seed]["fraction"], abs=0.03)


def test_the_results_are_within_their_bounds():
    rows = agents.rows_of(planted.RESULTS)
    passed = {p: [r["passed"] for r in rows if r["part"] == p] for p in ("noise", "power")}
    assert {part: len(found) for part, found in passed.items()} == {"noise": 100, "power": 100}
    assert sum(passed["noise"]) <= 0.1 * len(passed["noise"])
    assert sum(passed["power"]) >= 0.8 * len(passed["power"])
    shares = [r["fraction"] for r in rows if r["part"] == "optimum"]
    assert len(shares) == 20 and np.mean(shares) >= 0.9
