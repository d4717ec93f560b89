"""Judging against a known optimum: the best scores 1, flat 0, and who looks ahead is caught."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from drawn import random_params
from known import make
from windowed import decide_on_window

from nca_trader import AgentConfig, TradingEnv, make_policy
from nca_trader.config import PolicyConfig
from nca_trader.envs import load_env
from nca_trader.errors import BarError, ConfigError
from nca_trader.markets import task_of as drawn
from nca_trader.optimum import measure
from nca_trader.optimum.frozen import frozen
from nca_trader.optimum.optima.synthetic import solved
from nca_trader.optimum.rows import OBSERVED

KNOWN = {
    "ou": {},
    "ar1": {},
    "markov_drift": dict(hidden=True),
    "garleanu_pedersen": {},
    "kelly": {},
    "merton": dict(gamma=3.0, mu=0.12, sigma=0.3),  # whose score is a logarithm of a mean
    "ring": dict(assets=4),
    "sine": {},
}
BARS = 30_000


@functools.cache
def task_of(name):
    return make(name, num_bars=BARS, seed=4, **KNOWN.get(name, {}))


@functools.cache
def rows():
    return measure.pieces(BARS, 70)


def test_pieces_count_every_bar_once():
    counted = rows()[:, measure.WARM :].ravel()
    np.testing.assert_array_equal(
        counted, np.arange(70 + measure.WARM, 70 + measure.WARM + len(counted))
    )
    assert counted[-1] < BARS - 1 <= counted[-1] + measure.COUNTED


def test_too_few_bars_for_a_standard_error_are_refused():
    least = 70 + 1 + measure.WARM + 8 * measure.COUNTED
    assert len(measure.pieces(least, 70)) == 8
    with pytest.raises(BarError, match=f"give {least} or more"):
        measure.pieces(least - 1, 70)


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.few(4)
def test_the_optimal_policy_scores_one(name):
    task = task_of(name)
    reached = measure.earnings_of(task, rows(), measure.optimal_positions(task, rows()))
    # Against itself the fraction is 1 by construction; what it earned on this path is not.
    assert reached.fraction == 1.0 and not reached.looks_ahead
    assert abs(reached.earned - task.optimum) <= 3 * reached.earned_error + 1e-3 * task.optimum
    assert reached.earned_error < 0.05 * task.optimum  # and that says something


@pytest.mark.parametrize("name", KNOWN)
def test_who_never_trades_scores_nothing(name):
    task = task_of(name)
    reached = measure.earnings_of(task, rows(), np.zeros((*rows().shape, task.num_assets)))
    assert reached.earned == 0.0 == reached.turnover == reached.fraction
    assert reached.error == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("name", ["ou", "ar1", "ring", "martingale"])
def test_who_sees_the_next_return_is_caught(name):
    task = task_of(name)
    size = task.bounds[1]
    ahead = size * np.sign(task.returns[rows() + 1])
    assert measure.earnings_of(task, rows(), ahead).looks_ahead
    # Not by what is expected of its positions, which is what the fraction is of.
    assert not measure.earnings_of(task, rows(), ahead).fraction > 1.0


def test_a_path_on_which_the_optimal_policy_earns_nothing_has_no_fraction():
    """Its costs are above what a bar can earn, nearly always."""
    task = make("ou", num_bars=BARS, seed=4, phi=0.9, cost=0.08)
    flat = ~measure.optimal_positions(task, rows()).any(axis=(1, 2))
    still = rows()[flat]
    assert task.optimum > 0.0 and len(still) >= 8
    held = -np.sign(task.states[still])
    reached = measure.earnings_of(task, still, held)
    assert np.isnan(reached.fraction) and np.isnan(reached.error) and reached.earned < 0.0
    ruined = measure.earnings_of(dataclasses.replace(task, pay=all_lost), still, held)
    assert ruined.bankrupt


def all_lost(previous, position, r):
    """Pay of an account that is gone where it holds anything."""
    return np.where(np.abs(position).sum(-1) > 0.0, -np.inf, 0.0)


def test_a_coin_tossed_for_positions_loses_its_costs():
    task = task_of("martingale")
    tossed = np.random.default_rng(0).choice([-1.0, 1.0], (*rows().shape, 1))
    reached = measure.earnings_of(task, rows(), tossed)
    assert np.isnan(reached.fraction) and not reached.looks_ahead
    assert reached.turnover == pytest.approx(1.0, abs=0.02)
    assert reached.earned == pytest.approx(-0.001 * reached.turnover, rel=1e-9)


def test_the_fraction_is_that_of_a_long_run_without_the_comparison():
    """The sign rule on ou, from its definition: what it pays over the optimum, noise and all."""
    task = task_of("ou")
    held = -np.sign(task.states[rows()])
    reached = measure.earnings_of(task, rows(), held)
    plain = -np.sign(task.states)
    alone = task.rewards(plain)[70 + measure.WARM :].mean() / task.optimum
    noise = task.returns.std() / len(plain) ** 0.5 / task.optimum
    assert alone == pytest.approx(reached.fraction, abs=3 * noise)
    assert reached.fraction < 0.9


@pytest.mark.heavy
def test_the_error_of_a_fraction_covers_it_on_200_draws():
    """Against the ratio over all draws; of ten pieces an error has nine degrees of freedom."""
    found, means = [], []
    for seed in range(200):
        task = make("ou", num_bars=11_000, seed=seed)
        of = measure.pieces(len(task.bars), 70)
        sign, best = (
            measure.earnings_of(task, of, held)
            for held in (-np.sign(task.states[of]), measure.optimal_positions(task, of))
        )
        found.append((sign.fraction, sign.error))
        means.append((sign.earned, best.earned))
    fraction, error = np.array(found).T
    ours, best = np.mean(means, axis=0)
    covered = np.abs(fraction - ours / best) <= 2.262 * error
    # 95% of 200, give or take 1.5%, and a little less for the ratio's own bend.
    assert 0.90 <= covered.mean() <= 0.99


OF_THE_STATE = ("ou_mid", "ou_log", "ou_expensive", "ar1_weak", "garleanu_pedersen", "factor_panel")


@pytest.mark.heavy
@pytest.mark.parametrize("name", OF_THE_STATE)
def test_the_best_rule_on_the_observation_reaches_what_is_printed(name):
    """The optimal policy on the state as least squares estimate it from a bar's features."""
    assert set(OF_THE_STATE) == set(OBSERVED)
    config = frozen(name).config
    fitted, played = (TradingEnv(drawn(config, seed), config) for seed in (1, 2))

    def seen(env):
        flat = np.asarray(env.features, np.float64).reshape(len(env), -1)
        return np.column_stack([flat, np.ones(len(env))])

    known = slice(5_000, None)  # where the average of 4,096 bars has warmed up
    by, *_ = np.linalg.lstsq(seen(fitted)[known], fitted.task.states[known], rcond=None)
    task = solved(played.task)
    guessed = dataclasses.replace(task, states=seen(played) @ by)
    of = measure.pieces(len(played), 5_000)
    reached = measure.earnings_of(task, of, measure.optimal_positions(guessed, of))
    assert reached.fraction == pytest.approx(OBSERVED[name], abs=5e-4 + 3 * reached.error)
    assert reached.error < 0.003


TINY = AgentConfig(
    policy=PolicyConfig(channels=4, hidden=8, steps=2, dilations=(1, 2), head_hidden=8)
)


@functools.cache
def env_of(name):
    config = dataclasses.replace(load_env(name), market_bars=9_000)
    return TradingEnv(drawn(config, 1), config)


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["ou_mid", "garleanu_pedersen"])
@pytest.mark.few(1)
def test_positions_in_pieces_are_those_of_stepping_the_environment(name):
    """One piece, bar by bar through `env.step` with windows: neither cells nor pieces."""
    env = env_of(name)
    policy = make_policy(TINY, env.spec)
    params = random_params(policy)
    all_rows = policy.first_decision + np.arange(40) + np.array([[0], [500]])
    positions = measure.greedy_positions(env, policy, params, all_rows)
    assert len(np.unique(positions)) > 1

    flat = dataclasses.replace(env.config, random_start=False)
    single = TradingEnv(env.task, flat)
    state, _ = single.reset(jax.random.key(0))
    state = state._replace(index=state.index * 0 + int(all_rows[1, 0]))

    @jax.jit
    def one(params, state, window):
        present = np.ones(window.shape[:2], bool)
        logits = decide_on_window(policy, params, window, present, state.episode.account)
        action = policy.distribution.order(env.spec, policy.distribution.mode(logits))
        return single.step(state, action)[0]

    for t in range(40):
        window = single.window(state.observation, policy.receptive_field)
        state = one(params, state, window)
        ordered = np.asarray(state.episode.account.ordered)
        np.testing.assert_allclose(ordered, positions[1, t], rtol=2e-5, atol=1e-6)


def test_pieces_run_in_groups_are_run_alone(monkeypatch):
    env = env_of("garleanu_pedersen")
    policy = make_policy(TINY, env.spec)
    params = random_params(policy)
    # Of three groups the last is filled up, and ends with the path.
    rows = len(env) - 30 + np.arange(20) - np.array([[90], [70], [50], [30], [0]])
    monkeypatch.setattr(measure, "GROUP", 2)
    grouped = measure.greedy_positions(env, policy, params, rows)
    alone = [measure.greedy_positions(env, policy, params, row[None])[0] for row in rows]
    np.testing.assert_allclose(grouped, alone, rtol=2e-5, atol=1e-6)
    assert grouped.shape == (5, 20, 1) and len(np.unique(grouped)) > 10


def test_bars_of_no_known_optimum_are_refused():
    task = dataclasses.replace(make("martingale", num_bars=500), optimum=None)
    env = TradingEnv(task)
    policy = make_policy(TINY, env.spec)
    with pytest.raises(ConfigError, match="no optimum is known"):
        measure.reached_by(env, policy, {})
