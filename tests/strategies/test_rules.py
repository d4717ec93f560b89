"""Each rule against a derivation in pandas."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from drawn import bars_of, random_bars

import nca_trader as nca
from nca_trader import ConfigError, rules
from nca_trader.numerics import float64_on_cpu
from nca_trader.strategies.strategy import Strategy
from nca_trader.strategies.targets import needs_account, strategy_targets


def late_bars(seed=0, length=120, missing=0.15):
    """Bars of three assets with holes; the last asset is listed at row 20, NaN before."""
    bars = random_bars(np.random.default_rng(seed), length, 3, missing)
    fields = {name: getattr(bars, name).copy() for name in ("open", "high", "low", "close")}
    present = bars.present.copy()
    present[:20, 2] = False
    present[20, 2] = True
    for values in fields.values():
        values[:20, 2] = np.nan
    return dataclasses.replace(bars, present=present, **fields)


def listed(bars):
    """The number of assets that have had a bar, `[N, 1]`; at least 1."""
    return np.maximum((bars.present.cumsum(0) > 0).sum(1, keepdims=True), 1)


def by_asset(bars, signal):
    """`signal(closes)` of each asset's own closes, held over bars that are missing; flat first."""
    columns = []
    for i in range(bars.num_assets):
        closes = pd.Series(bars.close[:, i])[bars.present[:, i]]
        columns.append(signal(closes).astype(float).reindex(range(len(bars))).ffill().fillna(0.0))
    return np.stack(columns, axis=1) / listed(bars)


@pytest.mark.parametrize(("fast", "slow"), [(1, 2), (10, 30)])
def test_sma_cross_equals_rolling_means(fast, slow):
    def signal(closes):
        return (closes.rolling(fast).mean() > closes.rolling(slow).mean()) & (
            closes.expanding().count() >= slow
        )

    bars = late_bars()
    targets = strategy_targets(bars, rules.sma_cross(fast, slow))
    np.testing.assert_array_equal(targets, by_asset(bars, signal))
    assert 0.1 < (targets > 0).mean() < 0.9


@pytest.mark.parametrize("lookback", [1, 50])
def test_momentum_compares_with_the_close_that_many_bars_ago(lookback):
    bars = late_bars()
    targets = strategy_targets(bars, rules.momentum(lookback))
    expected = by_asset(bars, lambda closes: closes > closes.shift(lookback))
    np.testing.assert_array_equal(targets, expected)
    assert (targets > 0).any()


def test_buy_and_hold_divides_equity_at_each_first_bar():
    bars = late_bars(missing=0.3)
    targets = strategy_targets(bars, rules.buy_and_hold())
    assert not np.isnan(targets[20, 2])
    known = np.zeros(3, bool)
    for target, present in zip(targets, bars.present, strict=True):
        more = (present & ~known).any()
        known |= present
        np.testing.assert_array_equal(target, np.where(known & more, 1 / known.sum(), np.nan))


def test_always_flat_orders_nothing_else():
    assert (strategy_targets(late_bars(), rules.always_flat()) == 0.0).all()


def loop(bars, decide):
    """`decide(history of one asset's own bars)` at each of its bars, held over missing ones."""
    columns = []
    for i in range(bars.num_assets):
        rows = np.flatnonzero(bars.present[:, i])
        names = ("high", "low", "close")
        history = pd.DataFrame({name: getattr(bars, name)[rows, i] for name in names})
        weights = pd.Series(np.asarray(decide(history)), rows).reindex(range(len(bars)))
        columns.append(weights.ffill().fillna(0.0))
    return np.stack(columns, axis=1)


def test_time_series_momentum_is_the_sign_of_the_past_return():
    bars = late_bars(1)
    expected = loop(bars, lambda h: np.sign(h.close - h.close.shift(20)).fillna(0.0)) / listed(bars)
    found = strategy_targets(bars, rules.time_series_momentum(20))
    np.testing.assert_allclose(found, expected, atol=1e-15)
    assert (found > 0).any() and (found < 0).any()


def test_cross_sectional_momentum_holds_the_best_third():
    rng = np.random.default_rng(3)
    bars = random_bars(rng, 150, 6)
    returns = pd.DataFrame(bars.close).pct_change(20).to_numpy()
    expected = np.zeros(returns.shape)
    for t in range(20, 150):
        expected[t, np.argsort(-returns[t])[:2]] = 0.5
    np.testing.assert_array_equal(
        strategy_targets(bars, rules.cross_sectional_momentum(20)), expected
    )
    with pytest.raises(ConfigError, match="several"):
        strategy_targets(bars.select("S0"), rules.cross_sectional_momentum(20))


@pytest.mark.parametrize("weights", ["top", "ranks"])
def test_cross_sectional_momentum_compares_no_asset_that_is_gone(weights):
    """A delisted asset with the best last return would hold its share of the money for ever."""
    bars = random_bars(np.random.default_rng(3), 150, 7)
    present = bars.present.copy()
    present[60:, 6] = False
    present[100:110, 5] = False  # fewer bars than are compared: nothing changes
    close = bars.close.copy()
    close[:, 6] = 50.0 * 1.05 ** np.minimum(np.arange(150), 59)
    close[100:110, 5] = close[99, 5]
    bars = bars_of(close, present=present)
    found = strategy_targets(bars, rules.cross_sectional_momentum(20, weights=weights))
    others = strategy_targets(
        bars.select(*bars.symbols[:6]), rules.cross_sectional_momentum(20, weights=weights)
    )
    assert (found[20:79, 6] > 0.0).all() and not found[79:, 6].any()
    np.testing.assert_array_equal(found[79:, :6], others[79:])


def test_cross_sectional_momentum_by_ranks_is_long_and_short_and_sums_to_one():
    bars = random_bars(np.random.default_rng(3), 150, 6, missing=0.05)
    close = pd.DataFrame(np.where(bars.present, bars.close, np.nan))
    # Over the last 20 bars of the asset itself; a missing bar changes nothing.
    past = pd.DataFrame({i: x.dropna().pct_change(20) for i, x in close.items()})
    past = past.reindex(close.index).ffill()
    centred = past.rank(axis=1).sub((past.notna().sum(axis=1) + 1) / 2, axis=0)
    expected = centred.div(centred.abs().sum(axis=1), axis=0)
    found = strategy_targets(bars, rules.cross_sectional_momentum(20, weights="ranks"))
    np.testing.assert_allclose(found, expected.fillna(0.0), atol=1e-12)
    assert (found > 0).any() and (found < 0).any()
    # One asset alone has no place among others, and a sum with other rules goes on.
    alone = strategy_targets(bars.select("S0"), rules.cross_sectional_momentum(20, weights="ranks"))
    assert not alone.any()
    with pytest.raises(
        ConfigError, match="share has no effect with weights = 'ranks'; leave it out"
    ):
        rules.cross_sectional_momentum(20, 0.5, weights="ranks")
    with pytest.raises(ConfigError, match="weights = 'best'; give 'top' or 'ranks'"):
        rules.cross_sectional_momentum(20, weights="best")


def reversion(history, lookback, entry, leave):
    close, side, sides = history.close, 0.0, []
    middle, width = close.rolling(lookback).mean(), close.rolling(lookback).std()
    for price, mean, deviation in zip(close, middle, width, strict=True):
        away = (price - mean) / deviation
        if (side > 0 and away >= -leave) or (side < 0 and away <= leave):
            side = 0.0
        if away < -entry:
            side = 1.0
        elif away > entry:
            side = -1.0
        sides.append(side)
    return sides


@pytest.mark.parametrize(("entry", "leave"), [(1.0, 0.0), (1.5, 0.5)])
def test_mean_reversion_equals_a_loop(entry, leave):
    bars = late_bars(2, length=200)
    expected = loop(bars, lambda h: reversion(h, 10, entry, leave)) / listed(bars)
    found = strategy_targets(bars, rules.mean_reversion(10, entry, leave))
    np.testing.assert_allclose(found, expected, atol=1e-15)
    assert (found > 0).any() and (found < 0).any() and (found == 0).any()


def test_breakout_equals_a_loop_and_carries_its_stop():
    def channel(history):
        ceiling, ground = (
            history.high.rolling(15).max().shift(),
            history.low.rolling(5).min().shift(),
        )
        up, down = history.close > ceiling, history.close < ground
        return pd.Series(np.where(up, 1.0, np.where(down, 0.0, np.nan))).ffill().fillna(0.0)

    bars = late_bars(3, length=250)
    plain = strategy_targets(bars, rules.breakout(15, 5, stop=None))
    np.testing.assert_allclose(
        plain, loop(bars, lambda h: channel(h).to_numpy()) / listed(bars), atol=1e-15
    )
    assert (plain > 0).any()
    assert needs_account(bars, rules.breakout(15, 5, stop=0.1))


def test_equal_weight_is_shared_by_what_is_listed():
    targets = strategy_targets(late_bars(missing=0.0), rules.equal_weight())
    np.testing.assert_allclose(targets[:20], [[0.5, 0.5, 0.0]] * 20)
    np.testing.assert_allclose(targets[20:], 1 / 3)


def test_volatility_hold_scales_by_the_weighted_volatility_per_year():
    bars = random_bars(np.random.default_rng(4), 300, 1)
    returns = pd.Series(bars.close[:, 0]).pct_change()
    # Adjusted weights: both means then carry the same factor, which cancels in the quotient.
    square = (returns**2).dropna().ewm(span=20).mean()
    days = pd.Series(bars.time).diff().dt.total_seconds() / (365.2425 * 86_400)
    years = days.dropna().ewm(span=20).mean()
    size = np.minimum(1.0, 0.1 / np.sqrt(square / years)).to_numpy()
    expected = np.concatenate([np.zeros(20), size[19:]])
    found = strategy_targets(bars, rules.volatility_hold(0.1, span=20.0))[:, 0]
    np.testing.assert_allclose(found, expected, rtol=1e-10)
    assert 0.05 < found[20:].min() < found[20:].max()


def test_the_tuned_cross_follows_the_pair_that_earned_most_so_far():
    bars, pairs, every, cost = (
        random_bars(np.random.default_rng(6), 400, 1),
        ((2, 6), (5, 20)),
        50,
        1e-3,
    )
    close = bars.close[:, 0]
    held = np.stack([strategy_targets(bars, rules.sma_cross(*pair))[:, 0] for pair in pairs])
    moves = np.diff(close) / close[:-1]
    paid = cost * np.abs(np.diff(held, axis=1))
    scores = np.cumsum(np.log1p(held[:, :-1] * moves - paid), axis=1)
    expected, chosen, choices = np.zeros(400), None, []
    for t in range(400):
        if (t + 1) % every == 0:
            chosen = int(np.argmax(scores[:, t - 1]))
            choices.append(chosen)
        expected[t] = 0.0 if chosen is None else held[chosen, t]
    found = strategy_targets(bars, rules.tuned_sma(pairs, every, cost))[:, 0]
    np.testing.assert_array_equal(found, expected)
    assert len(set(choices)) == 2


def test_random_tosses_one_coin_per_asset_and_holds_it():
    bars = random_bars(np.random.default_rng(7), 2000, 2)
    found = strategy_targets(bars, rules.random(seed=5, hold=10))
    blocks = found.reshape(200, 10, 2)
    assert (blocks == blocks[:, :1]).all()
    assert 0.4 < (blocks[:, 0] > 0).mean() < 0.6
    assert not np.array_equal(found, strategy_targets(bars, rules.random(seed=6, hold=10)))


def test_the_forecaster_solves_its_weighted_regression():
    """Against a direct solution of the same weighted least squares at every bar."""
    rng = np.random.default_rng(8)
    bars, lags, span = random_bars(rng, 250, 1), 2, 100
    close = bars.close[:, 0]
    r = 100.0 * np.diff(close) / close[:-1]
    forget, size = 1.0 - 2.0 / (span + 1.0), lags + 1
    expected = np.zeros(250)
    for t in range(250):
        if t < 10 * size:
            continue
        rows = np.arange(lags, t)
        inputs = np.stack([np.ones(len(rows)), *(r[rows - k - 1] for k in range(lags))], axis=1)
        weight = forget ** np.arange(len(rows) - 1, -1, -1)
        # The prior of unit variance is forgotten as the oldest observation is.
        gram = (inputs * weight[:, None]).T @ inputs + forget ** len(rows) * np.eye(size)
        solved = np.linalg.solve(gram, (inputs * weight[:, None]).T @ r[rows])
        forecast = solved @ np.concatenate([[1.0], r[t - 1 - np.arange(lags)]]) / 100.0
        expected[t] = np.sign(forecast) * (abs(forecast) > 1e-4)
    found = strategy_targets(bars, rules.forecaster(lags, 1e-4, span))[:, 0]
    np.testing.assert_array_equal(found, expected)
    assert (found > 0).any() and (found < 0).any() and (found[30:] == 0).any()


def test_half_and_half_is_the_mean_of_equal_weight_and_the_trend():
    bars = random_bars(np.random.default_rng(3), 60, 3, missing=0.1)
    found = strategy_targets(bars, rules.half_and_half(10))
    two = (rules.equal_weight(), rules.time_series_momentum(10))
    want = sum(strategy_targets(bars, rule) for rule in two) / 2
    np.testing.assert_array_equal(found, want)
    # Half of 1/3, and half of 1/3 with the sign of the trend.
    all_listed = found[listed(bars)[:, 0] == 3]
    assert set(np.unique(all_listed.round(12))) == {0.0, round(1 / 6, 12), round(1 / 3, 12)}


def test_of_equal_returns_each_asset_has_its_part_of_what_is_left():
    """Two of six are held: one is ahead, three share the second place."""
    growth = np.array([1.02, 1.01, 1.01, 1.0, 1.01, 1.0])
    close = 100.0 * growth ** np.arange(10)[:, None]
    bars = bars_of(close)
    found = strategy_targets(bars, rules.cross_sectional_momentum(1))
    np.testing.assert_allclose(found[5], [0.5, 1 / 6, 1 / 6, 0.0, 1 / 6, 0.0], rtol=1e-6)


@pytest.mark.parametrize(("share", "assets"), [(0.29, 100), (0.07, 100), (0.57, 100), (0.58, 50)])
def test_a_share_of_assets_is_a_whole_number_of_them(share, assets):
    """The product of floats is below the whole number: 0.29 * 100 is 28.999999999999996."""
    rng = np.random.default_rng(0)
    bars = random_bars(rng, 6, assets)
    found = strategy_targets(bars, rules.cross_sectional_momentum(2, share))
    assert (found[5] > 0).sum() == round(share * assets)


# Every rule, with parameters that decide something within 300 bars.
EVERY = {
    "always_flat": rules.always_flat(),
    "buy_and_hold": rules.buy_and_hold(),
    "equal_weight": rules.equal_weight(),
    "volatility_hold": rules.volatility_hold(0.1, span=20.0),
    "half_and_half": rules.half_and_half(20),
    "sma_cross": rules.sma_cross(3, 8),
    "tuned_sma": rules.tuned_sma(((2, 6), (5, 20)), every=50),
    "momentum": rules.momentum(10),
    "time_series_momentum": rules.time_series_momentum(10),
    "cross_sectional_momentum": rules.cross_sectional_momentum(10, 0.5),
    "mean_reversion": rules.mean_reversion(10),
    "breakout": rules.breakout(15, 5),
    "random": rules.random(3, hold=5),
    "forecaster": rules.forecaster(2, span=100),
}


def test_every_rule_is_tested_below():
    made = vars(rules).items()
    own = (name for name, x in made if getattr(x, "__module__", None) == rules.__name__)
    assert {name for name in own if not name.startswith("_")} == set(EVERY)


@functools.partial(jax.jit, static_argnums=1)
def decided(bar, strategies):
    """What strategies decide that see no account, `[N, A]` each: one program for all of them."""

    def step(states, bar_t):
        both = [one.decide(x, bar_t, None) for one, x in zip(strategies, states, strict=True)]
        return tuple(state for state, _ in both), [order.target for _, order in both]

    begun = tuple(jax.tree.map(jnp.asarray, one.init(bar.close.shape[1])) for one in strategies)
    return jax.lax.scan(step, begun, bar)[1]


def targets_of_all(bars, strategies):
    with float64_on_cpu():
        return [np.asarray(x) for x in decided(bars.as_bar(), strategies)]


def with_a_late_one(bars, order, at):
    """The bars in another order of symbols, and one more that is listed at row `at`."""
    more, present = {}, np.c_[bars.present, np.arange(len(bars)) >= at]
    for field in ("open", "high", "low", "close", "volume"):
        late = np.where(present[:, -1], 7.0, 0.0 if field == "volume" else np.nan)
        more[field] = np.c_[getattr(bars, field), late][:, order]
    symbols = np.array([*bars.symbols, "LATE"])[order]
    return dataclasses.replace(bars, symbols=tuple(symbols), present=present[:, order], **more)


def test_symbols_without_a_bar_and_the_order_of_symbols_change_nothing():
    bars, order = late_bars(length=240), np.random.default_rng(0).permutation(4)
    wide, place = with_a_late_one(bars, order, 200), np.argsort(order)
    both = [targets_of_all(x, tuple(EVERY.values())) for x in (wide, bars)]
    for name, found, expected in zip(EVERY, *both, strict=True):
        found, expected = found[:200], expected[:200]
        np.testing.assert_allclose(
            found[:, place[:3]], expected, rtol=1e-12, atol=1e-15, err_msg=name
        )
        assert (np.nan_to_num(found[:, place[3]]) == 0.0).all(), name
        assert np.nan_to_num(expected).any() or name == "always_flat", name


@pytest.mark.parametrize("name", ["momentum", "breakout"])  # targets alone, and with stops
@pytest.mark.few(1)
def test_an_account_earns_the_same_beside_a_symbol_without_a_bar(name):
    bars, order = late_bars(length=240), np.random.default_rng(0).permutation(4)
    both = (x[:200] for x in (with_a_late_one(bars, order, 200), bars))
    costs = nca.Costs(commission=1e-3)
    np.testing.assert_allclose(
        *(nca.backtest(x, EVERY[name], costs).equity.to_numpy() for x in both), rtol=1e-9
    )


class Halved(Strategy):
    """Orders half of what its functions decide."""

    def decide(self, state, bar, portfolio):
        state, order = super().decide(state, bar, portfolio)
        return state, order._replace(target=0.5 * order.target)


def test_a_decision_of_a_subclass_counts_once_whatever_is_put_around_it():
    bars, plain = late_bars(), rules.sma_cross(3, 8)
    own = Halved(plain.init, plain.act)
    around = (own, own.with_delay(0), own.with_stop(0.9), own.with_take_profit(0.9))
    expected, *found = targets_of_all(bars, (plain, *around))
    for one in found:
        np.testing.assert_array_equal(one, 0.5 * expected)
