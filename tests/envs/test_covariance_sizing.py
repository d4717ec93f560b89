"""Sizes by covariance, against a loop in numpy that inverts the matrix, and each way alike."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import bars_of
from tiny import AGENT, ENV
from untrained import untrained_run

import nca_trader as nca
from nca_trader import ConfigError
from nca_trader.config.account import CORRELATIONS, complete_account
from nca_trader.envs.account.risk import Joint, apply_size, sizes, undo_size
from nca_trader.evaluate.evidence.deploy import mean_exposure
from nca_trader.paper.journal.journal import read_events
from nca_trader.strategies.strategy import weights_by_covariance
from nca_trader.strategies.targets import strategy_targets
from nca_trader.types import SECONDS_PER_YEAR

SPAN, LONG, TARGET = 20, 40, 0.15
SIZED = {
    "sizing": "covariance", "volatility_span": SPAN, "correlation_span": LONG, "size_cap": 2.0,
    "shrinkage": 0.3, "borrow": True, "volatility_target": TARGET,
}  # fmt: skip
ENV_OF_WEIGHTS = dataclasses.replace(
    ENV, actions="weights", max_gross=None, random_start=False, episode_bars=None
)
COSTS = nca.Costs(commission=5e-4)
TREND = nca.rules.time_series_momentum(15)
SIZING = complete_account(nca.AccountConfig(**SIZED))


@pytest.fixture(scope="module")
def bars():
    """Four assets that move together, with missing bars; the last is listed late."""
    rng = np.random.default_rng(8)
    close = 100 * np.exp(0.02 * rng.standard_normal((220, 4)).cumsum(0))
    close = close * np.exp(0.02 * rng.standard_normal((220, 1)).cumsum(0))
    present = rng.random((220, 4)) > 0.05
    present &= (np.arange(220)[:, None] >= 70) | (np.arange(4) < 3)
    # As in a file, a missing bar has the last close.
    last = np.maximum.accumulate(np.where(present, np.arange(220)[:, None], 0), axis=0)
    close = np.take_along_axis(close, last, axis=0)
    return dataclasses.replace(bars_of(close), present=present)


def by_hand(bars, targets, shrinkage=0.3):
    """Weights from the definition: one row after the other, with `np.linalg.inv`."""
    count, keep, wide = bars.num_assets, 1 - 2 / (SPAN + 1), 1 - 2 / (LONG + 1)
    close, time = np.full(count, np.nan), np.full(count, np.nan)
    square, years, seen = np.zeros(count), np.zeros(count), np.zeros(count)
    products, last, found = np.zeros((count, count)), np.full(count, np.nan), []
    for row in range(len(bars)):
        here, now = bars.present[row], bars.seconds[row]
        r = bars.close[row] / close - 1
        known = here & ~np.isnan(r)
        x = np.where(known, r, 0.0)
        products = wide * products + (1 - wide) * np.outer(x, x)
        square = np.where(known, keep * square + (1 - keep) * x**2, square)
        passed = np.nan_to_num((now - time) / SECONDS_PER_YEAR)
        years = np.where(known, keep * years + (1 - keep) * passed, years)
        before, seen = seen, seen + known
        close, time = np.where(here, bars.close[row], close), np.where(here, now, time)
        last = np.where(np.isnan(targets[row]), last, targets[row])
        with np.errstate(all="ignore"):
            alone = np.where(seen >= SPAN, TARGET / np.maximum(np.sqrt(square / years), 0.01), 0)
        wanted = np.nan_to_num(last)
        held = np.flatnonzero((wanted != 0) & (alone > 0))
        weights = np.where(np.isnan(last), np.nan, 0.0)
        part = products[np.ix_(held, held)]
        deviation = np.sqrt(np.diag(part))
        matrix = (1 - shrinkage) * part / np.outer(deviation, deviation)
        np.fill_diagonal(matrix, 1.0)
        times = np.maximum(np.linalg.inv(matrix) @ wanted[held] / wanted[held], 0.0)
        weights[held] = wanted[held] * np.minimum(2.0, alone[held] * times)
        begins = ((before < SPAN) & (seen >= SPAN)).any()
        orders = begins or not np.isnan(targets[row]).all()
        found.append(weights if orders else np.full(count, np.nan))
    return np.array(found)


def test_weights_are_those_of_the_inverse_of_the_shrunk_correlation(bars):
    raw = strategy_targets(bars, TREND) * np.random.default_rng(0).uniform(0.5, 1.5, (220, 4))
    raw[100:110] = np.nan
    found = weights_by_covariance(bars, raw, SIZING.covariance)
    np.testing.assert_allclose(found, by_hand(bars, raw), rtol=1e-9, atol=1e-12)
    result = nca.backtest(bars, raw, COSTS, **SIZED)
    known = ~np.isnan(found)
    np.testing.assert_allclose(result.targets.to_numpy()[known], found[known], rtol=1e-12)
    assert not result.cautions
    # It is not what volatility alone gives.
    alone = nca.backtest(bars, raw, COSTS, **SIZED | {"shrinkage": 1.0})
    volatility = {k: v for k, v in SIZED.items() if k not in ("correlation_span", "shrinkage")}
    same = nca.backtest(bars, raw, COSTS, **volatility | {"sizing": "volatility"})
    at = np.isfinite(raw)
    np.testing.assert_allclose(alone.targets.to_numpy()[at], same.targets.to_numpy()[at], rtol=1e-9)
    assert np.abs(result.targets - alone.targets).max().max() > 0.05


def test_weights_a_function_and_a_strategy_are_sized_alike_and_stay_so_in_a_rerun(bars):
    given = strategy_targets(bars, TREND)
    results = [
        nca.backtest(bars, subject, COSTS, order="on_change", **SIZED)
        for subject in (TREND, given, lambda known: given[: len(known)])
    ]
    for other in results[1:]:
        np.testing.assert_allclose(other.equity, results[0].equity, rtol=1e-12)
    again = results[0].again(costs=nca.Costs())
    assert again.targets.equals(results[0].targets) and again.equity.iloc[-1] != 1.0


def watched(state, bar, portfolio):
    """The trend, by a strategy that is simulated with its account."""
    state, order = TREND.decide(state, bar, None)
    return state, order._replace(target=order.target + 0.0 * portfolio.weight)


SEEING = nca.Strategy(TREND.init, watched, "seeing", order=TREND.order)


def test_a_strategy_that_sees_its_account_a_sweep_and_paper_agree(bars, tmp_path):
    result = nca.backtest(bars, TREND, COSTS, order="on_change", **SIZED)
    seeing = nca.backtest(bars, SEEING, COSTS, order="on_change", **SIZED)
    np.testing.assert_allclose(seeing.equity, result.equity, rtol=1e-9)
    grid = {"lookback": [15, 30]}
    rule = nca.rules.time_series_momentum
    table = nca.sweep(bars, rule, grid, COSTS, trials=None, order="on_change", **SIZED)
    assert table["equity"][0] == pytest.approx(result.equity.iloc[-1], rel=1e-5)
    nca.write_bars(bars, tmp_path / "bars.parquet")
    file = f"replay:{tmp_path}/bars.parquet"
    nca.paper_trade(TREND, file, tmp_path / "paper.db", costs=COSTS, order="on_change", **SIZED)
    events = list(read_events(tmp_path / "paper.db", "decision"))
    at = np.searchsorted(bars.time.astype(np.int64), [event.ts_event for event in events])
    paper = np.array([event.body["target"] for event in events], float)
    wanted = result.targets.to_numpy()[at]
    assert len(events) > 150
    np.testing.assert_allclose(paper, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rule", ["with_take_profit", "with_stop", "with_trailing_stop"])
def test_one_asset_is_sized_as_by_volatility_and_a_stop_that_closed_it_stays(bars, rule):
    one = bars.select("S0")
    alone = {k: v for k, v in SIZED.items() if k not in ("correlation_span", "shrinkage")}
    long = nca.Strategy(lambda n: 0.0, lambda s, bar: (s, jnp.ones_like(bar.close)), "long")
    for subject in (getattr(long, rule)(0.03), getattr(TREND, rule)(0.02)):
        for more in ({}, {"delay": 1}):
            found = nca.backtest(one, subject, COSTS, **SIZED, **more)
            same = nca.backtest(one, subject, COSTS, **alone | {"sizing": "volatility"}, **more)
            np.testing.assert_allclose(found.equity, same.equity, rtol=1e-9)
            assert found.num_fills == same.num_fills > 1


def test_the_stop_of_an_asset_survives_the_orders_of_others(bars):
    def act(n, bar):
        first = jnp.where(n == 60, 1.0, jnp.nan)
        target = jnp.stack([first, *[jnp.where(n % 10 == 0, 0.5, jnp.nan)] * 3])
        never = jnp.full(3, jnp.nan)
        return n + 1, nca.Order(target, stop_loss=jnp.append(0.05 * first, never))

    subject = nca.Strategy(lambda n: jnp.zeros((), jnp.int64), act, "once")
    found = nca.backtest(bars, subject, COSTS, **SIZED)
    mine = found.orders[found.orders["symbol"] == "S0"]
    assert mine["reason"].iloc[-1] == "stop" and found.weights["S0"].iloc[-1] == 0.0


def test_an_asset_that_is_gone_shares_no_risk(bars):
    """A twin of S0 that is delisted: then S0 has the size that it has without the twin."""
    twin = np.array([0, 2, 0])
    fields = {name: getattr(bars, name)[:, twin] for name in bars.fields}
    fields["present"] = fields["present"] & ((np.arange(220)[:, None] < 150) | (twin != 0))
    fields["present"][:, 0] = bars.present[:, 0]
    twins = dataclasses.replace(bars, symbols=("S0", "S2", "TWIN"), **fields)
    raw = np.full((220, 3), 0.3)
    with_twin, without = (
        nca.backtest(each, x, COSTS, **SIZED | {"delist_after": 5}).targets["S0"].to_numpy()
        for each, x in ((twins, raw), (twins.select("S0", "S2"), raw[:, :2]))
    )
    assert (np.abs(with_twin - without)[60:150] > 0.01).all()
    np.testing.assert_allclose(with_twin[156:], without[156:], rtol=1e-9)


def test_prices_without_returns_and_endless_weights_end(bars):
    close = bars.close.copy()
    close[100, 0] = 0.0  # a bar that no file may have
    odd = dataclasses.replace(bars, **dict.fromkeys(("open", "high", "low", "close"), close))
    weights = weights_by_covariance(odd, np.full((220, 4), 0.3), SIZING.covariance)
    assert np.isfinite(weights[60:]).all()

    def endless(state, bar, portfolio):
        return state, jnp.where(jnp.arange(4) == 1, jnp.inf, 0.5) + 0.0 * portfolio.weight

    subject = nca.Strategy(lambda n: (), endless, "endless")
    with pytest.raises(nca.BarError, match="infinite"):
        nca.backtest(bars, subject, COSTS, **SIZED)


def test_who_buys_once_buys_when_assets_have_a_size(bars):
    result = nca.backtest(bars, nca.rules.buy_and_hold(), COSTS, **SIZED)
    assert set(result.orders["symbol"]) == {*bars.symbols} and result.num_fills < 8


def test_correlations_without_an_inverse_are_shrunk_further_and_it_is_said(bars, tmp_path, caplog):
    """Two assets that are one: without shrinkage their matrix is singular."""
    twin = np.array([0, 1, 2, 2])
    fields = {name: getattr(bars, name)[:, twin] for name in bars.fields}
    twins = dataclasses.replace(bars, **fields)
    plain = SIZED | {"shrinkage": 0.0, "size_cap": 50.0}
    raw = np.full((220, 4), 0.1)
    result = nca.backtest(twins, raw, COSTS, **plain)
    (caution,) = [text for text in result.cautions if text.startswith("SHRUNK")]
    assert "the correlations had no inverse, and were shrunk further than shrinkage=0." in caution
    assert np.isfinite(result.targets.to_numpy()[60:]).all()
    at = 150  # both of the pair have the same weight, of .9 of the correlation
    weights = result.targets.to_numpy()[at]
    assert weights[2] == pytest.approx(weights[3]) and weights[2] > 0.0
    seeing = nca.Strategy(
        lambda n: (),
        lambda s, bar, portfolio: (s, jnp.full(4, 0.1) + 0.0 * portfolio.weight),
        "see",
    )
    assert any("SHRUNK" in x for x in nca.backtest(twins, seeing, COSTS, **plain).cautions)
    nca.write_bars(twins, tmp_path / "bars.parquet")
    file = f"replay:{tmp_path}/bars.parquet"
    for say in (
        lambda: nca.sweep(twins, nca.rules.momentum, {"lookback": [9]}, trials=None, **plain),
        lambda: nca.paper_trade(TREND, file, tmp_path / "paper.db", **plain),
    ):
        caplog.clear()
        say()
        said = "bars the correlations of all assets have no inverse; those of what is held"
        assert sum(said in text for text in caplog.messages) == 1


@pytest.mark.parametrize("sizing", ["volatility", "covariance"])
def test_late_orders_of_an_agent_have_the_size_of_the_close_that_they_come_to(
    bars, tmp_path, sizing
):
    """Once, and as those of a rule; the exposure of a hold is what it asked for."""
    joint = {} if sizing == "covariance" else dict.fromkeys(CORRELATIONS)
    given = SIZED | joint | {"sizing": sizing, "order": "rebalance"}
    env = ENV_OF_WEIGHTS.with_account(nca.AccountConfig(**given))
    run = untrained_run(tmp_path / "run", bars[:200], env, AGENT)
    prompt, late = (nca.backtest(bars, run, look=False, delay=n) for n in (0, 1))
    asked = np.tanh(np.asarray(prompt.logits, float)[..., 0]) / 4
    raw = np.full((220, 4), np.nan)
    raw[201:] = asked[:-1]
    by_rule = nca.backtest(bars, raw, account=prompt.rules, start=str(bars.index[200]))
    theirs = late.targets.to_numpy()
    assert np.isnan(theirs[0]).all() and np.abs(theirs[1:]).mean() > 0.01
    np.testing.assert_allclose(theirs, by_rule.targets, rtol=1e-5)
    ours = prompt.targets.to_numpy()
    found = undo_size(ours, sizes(bars, prompt.rules.sizes, 200))
    plain = (ours != 0.0).all(1)  # a size of 0 hides its target
    assert plain.sum() > 5
    np.testing.assert_allclose(found[plain], asked[plain], atol=1e-6)
    np.testing.assert_array_equal(mean_exposure(prompt), found.mean(0))


def test_what_rounding_leaves_of_0_is_no_position_and_0_has_a_slope(bars):
    """The others' sizes are those without it, and a policy on a base of 0 can learn."""
    whole = np.full((220, 4), 0.25)
    whole[:, 0] = 0.0
    rest = weights_by_covariance(bars, whole, SIZING.covariance)
    for hair in (0.1 + 0.2 - 0.3, -1e-17):
        whole[:, 0] = hair
        found = weights_by_covariance(bars, whole, SIZING.covariance)
        np.testing.assert_allclose(found, rest, atol=1e-15)
    joint = Joint(jnp.full(3, 2.0), jnp.full((3, 3), 0.5).at[jnp.arange(3), jnp.arange(3)].set(1.0))
    for at in ([0.0, 0.0, 0.0], [0.0, 0.2, 0.1], [1e-21, 0.2, 0.1]):
        slope = jax.jacobian(apply_size)(jnp.asarray(at, jnp.float32), joint, 5.0)
        assert np.isfinite(slope).all() and (np.diagonal(slope) > 0.5).all(), at


def test_an_asset_that_is_not_held_changes_no_size(bars):
    """Without shrinkage too, where its correlations with another have no inverse."""
    twin = np.array([0, 1, 2, 3, 3])
    fields = {name: getattr(bars, name)[:, twin] for name in bars.fields}
    more = dataclasses.replace(bars, symbols=(*bars.symbols, "TWIN"), **fields)
    plain = SIZED | {"shrinkage": 0.0}
    raw = np.array([0.2, 0.1, -0.2, 0.0])
    alone = nca.backtest(bars, np.tile(raw, (220, 1)), COSTS, **plain)
    among = nca.backtest(more, np.tile([*raw, 0.0], (220, 1)), COSTS, **plain)
    np.testing.assert_allclose(among.targets.iloc[:, :4], alone.targets, rtol=1e-9)
    assert not among.cautions and not alone.cautions


def test_an_environment_sizes_as_a_backtest_of_its_targets_with_the_same_account(bars):
    """The market's own correlations in float32, against the loop above in float64."""
    env = nca.TradingEnv(bars, ENV_OF_WEIGHTS.with_account(nca.AccountConfig(**SIZED)))
    raw = np.random.default_rng(3).uniform(-0.25, 0.25, bars.close.shape).astype(np.float32)
    raw[:, 1] *= np.arange(220) % 3 > 0  # a target of 0 is of no position
    known = by_hand(bars, raw.astype(float))
    state, _ = env.reset(jax.random.key(0))
    step = jax.jit(env.step)
    for row in range(int(state.index), 218):
        assert int(state.index) == row
        state, _ = step(state, jnp.asarray(raw[row]))
        ordered = np.asarray(state.episode.account.ordered)
        np.testing.assert_allclose(ordered, known[row], rtol=2e-4, atol=1e-6)


def test_what_cannot_be_sized_jointly_is_refused(bars, tmp_path):
    with pytest.raises(
        ConfigError, match=r"shrinkage=0\.0 is outside its range; give a number in \[0\.01, 1\]"
    ):
        nca.EnvConfig(sizing="covariance", actions="weights", shrinkage=0.0)
    with pytest.raises(
        ConfigError, match=r"shrinkage=0\.5 has no effect without sizing='covariance'"
    ):
        nca.backtest(bars, TREND, sizing="volatility", shrinkage=0.5)
    for wrong in ({"shrinkage": 1.5}, {"correlation_span": 1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            nca.AccountConfig(**wrong)
    nca.write_bars(bars, tmp_path / "bars.parquet")
    with pytest.raises(
        ConfigError, match=r"on paper it is of strategies alone; give a nca\.Strategy"
    ):
        nca.paper_trade(
            lambda known: np.ones(len(known)), f"replay:{tmp_path}/bars.parquet",
            tmp_path / "paper.db", **SIZED,
        )  # fmt: skip
