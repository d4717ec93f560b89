"""The pooled Sharpe ratio of correlated assets, whose best weights are known in closed form."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nca_trader as nca
from nca_trader.config.ranges import switch
from nca_trader.markets.market import Path, SyntheticMarket, draw, linear_pay

# A asset's next return is its signal and a shock; shocks are correlated, signals are not.
ASSETS, CORRELATION, SIGMA, STRENGTH = 3, 0.6, 0.01, 0.5
COVARIANCE = SIGMA**2 * (
    np.full((ASSETS, ASSETS), CORRELATION) + (1 - CORRELATION) * np.eye(ASSETS)
)


def generate(key, num_bars):
    signal_key, shock_key = jax.random.split(key)
    signal = STRENGTH * SIGMA * jax.random.normal(signal_key, (num_bars, ASSETS))
    shock = jax.random.normal(shock_key, (num_bars, ASSETS)) @ np.linalg.cholesky(COVARIANCE).T
    before = jnp.concatenate([jnp.zeros((1, ASSETS)), signal[:-1]])
    return Path(signal, before + shock, jnp.zeros(ASSETS))


MARKET = SyntheticMarket(
    reward="simple",
    generate=generate,
    pay=linear_pay(0.0),
    name="correlated",
    num_assets=ASSETS,
    state_names=tuple(f"signal_{i}" for i in range(ASSETS)),
    moments=((0.0,) * ASSETS, (STRENGTH * SIGMA,) * ASSETS),
    bounds=(-1.0 / ASSETS, 1.0 / ASSETS),
    environment={"reward": "log_return", "actions": "weights"},
)


def ratio(weights, returns):
    earned = (weights[:-1] * returns[1:]).sum(axis=1)
    return earned.mean() / earned.std()


def best(signal):
    """Return `w = (S + s s')^-1 s`, the weights of the highest unconditional Sharpe ratio."""
    second = COVARIANCE + signal[:, :, None] * signal[:, None, :]
    return np.linalg.solve(second, signal[:, :, None])[..., 0]


def fractions(folder, seeds, steps, **policy):
    """The ratio of each seed on a draw that none has seen, and untrained, over the optimum's."""
    train, test = draw(MARKET, 20_000, 1), draw(MARKET, 20_000, 2)
    preset = nca.load_agent("panel_nca")
    agent = dataclasses.replace(
        preset,
        num_seeds=seeds,
        policy=switch(preset.policy, base="none", steps=2, neighbours="all", **policy),
        learner=dataclasses.replace(preset.learner, steps=steps),
        optimizer=dataclasses.replace(preset.optimizer, learning_rate=1e-2),
    )
    run = nca.train(nca.TradingEnv(train), agent, folder / "run")
    signal, returns = np.asarray(test.states), np.asarray(test.returns)
    start = str(test.bars.index[10])
    optimum = ratio(best(signal)[10:], returns[10:])
    each = []
    for seed in range(seeds):
        acted = nca.backtest(test, nca.Run(run.path, seed=seed), start=start, look=False)
        each.append(ratio(np.asarray(acted.targets), returns[10:]) / optimum)
    first = run.metrics()[0]["pooled_sharpe"]
    return np.array(each), np.array(first) / optimum


@pytest.mark.slow
def test_two_seeds_learn_most_of_it(tmp_path):
    reached, untrained = fractions(tmp_path, 2, 250_000)
    assert reached.min() > 0.88 and np.abs(untrained).max() < 0.3


def test_the_optimum_is_that_of_its_formula():
    task = draw(MARKET, 100_000, 5)
    signal, returns = np.asarray(task.states), np.asarray(task.returns)
    u = np.einsum("ti,ij,tj->t", signal, np.linalg.inv(COVARIANCE), signal)
    q = (u / (1.0 + u)).mean()
    # E[w r] and E[(w r)^2] are both q.
    assert ratio(best(signal), returns) == pytest.approx(np.sqrt(q / (1.0 - q)), rel=0.02)
    # Weights that leave out the correlation, or the size of the signal, earn clearly less.
    optimum = ratio(best(signal), returns)
    assert ratio(signal, returns) < 0.8 * optimum
    assert ratio(signal @ np.linalg.inv(COVARIANCE), returns) < 0.9 * optimum


@pytest.mark.slow
def test_ten_of_ten_seeds_reach_95_percent_of_the_optimum(tmp_path):
    reached, untrained = fractions(tmp_path, 10, 1_500_000)
    assert reached.min() >= 0.95, reached
    assert np.abs(untrained).max() < 0.5
