"""Worse conditions: costs, delay and capital, against hand ledgers and closed forms."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import nca_trader as nca
from nca_trader.errors import ConfigError
from nca_trader.strategies.targets import strategy_targets
from nca_trader.types import PRICES

COSTS = nca.Costs(commission=1e-3, slippage=2e-4)


def half_the_quote(trade):
    return 0.5 * trade.half_spread


@pytest.fixture(scope="module")
def bars():
    return nca.sample_bars("sp500").select("SP500")[-300:]


@pytest.mark.few(2)
@pytest.mark.parametrize("make", ["array", "function", "strategy"])
def test_every_form_of_targets_is_late_alike(bars, make):
    rule = nca.rules.sma_cross(5, 20)
    decided = strategy_targets(bars, rule)
    given = {"array": decided, "function": lambda b: decided[: len(b)], "strategy": rule}[make]
    for start in (None, str(bars.index[100])):
        result = nca.backtest(bars, given, COSTS, order="on_change", start=start, delay=3)
        late = np.concatenate([np.full((3, 1), np.nan), decided[:-3]])
        other = nca.backtest(bars, late, COSTS, order="on_change", start=start)
        np.testing.assert_array_equal(result.equity, other.equity)
    np.testing.assert_array_equal(strategy_targets(bars, rule.with_delay(3)), late)


def scheduled(entries):
    """Buys at the bars of `entries` and leaves five bars later, with a stop and a take-profit."""

    def act(row, bar):
        buy = jnp.isin(row, jnp.array(entries))
        leave = jnp.isin(row - 5, jnp.array(entries))
        target = jnp.where(buy, 1.0, jnp.where(leave, 0.0, jnp.nan))
        return row + 1, nca.Order(target, stop_loss=0.01, take_profit=0.015)

    return nca.Strategy(lambda num_assets: jnp.zeros((), int), act)


@pytest.mark.heavy
def test_stops_are_late_with_their_orders(bars):
    entries = [20, 60, 61, 100, 180, 240]
    late = nca.backtest(bars, scheduled(entries).with_delay(2), COSTS)
    other = nca.backtest(bars, scheduled([row + 2 for row in entries]), COSTS)
    assert {"stop", "take profit"} & set(late.trades["reason"])
    np.testing.assert_array_equal(late.equity, other.equity)
    again = nca.backtest(bars, scheduled(entries), COSTS, delay=2)
    np.testing.assert_array_equal(again.equity, other.equity)


@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.few(1)
def test_rows_are_the_backtests_that_they_name(bars, seen):
    rule = nca.rules.sma_cross(5, 20)
    rule = rule.with_stop(0.02) if seen else rule
    start = str(bars.index[40])
    base = nca.backtest(bars, rule, COSTS, "close", start=start)
    stress = base.stress(factors=(1, 3), delays=(0, 2), capitals=(1e9,), participation=0.05)
    thrice = nca.backtest(bars, rule, COSTS.scaled(3), "close", start=start)
    late = nca.backtest(bars, rule, COSTS, "close", start=start, delay=2)
    large = nca.backtest(
        bars, rule, COSTS, "close", start=start, capital=1e9, max_participation=0.05
    )
    for table, key, result in (
        (stress.costs, 1, base),
        (stress.costs, 3, thrice),
        (stress.delays, 0, base),
        (stress.delays, 2, late),
        (stress.capacity, 1e9, large),
    ):
        for name in ("sharpe", "total_return", "turnover"):
            assert table.loc[key, name] == pytest.approx(result.metrics[name], rel=1e-12)


@pytest.fixture(scope="module")
def rising(bars):
    """Returns bars whose price rises by 0.1% per bar, with a volume of 1,000 units each."""
    prices = {name: bars.close[:1] * 1.001 ** np.arange(300)[:, None] for name in PRICES}
    return dataclasses.replace(bars, volume=np.full((300, 1), 1000.0), **prices)


def test_the_break_even_of_one_purchase_is_its_gain_over_its_commission(rising):
    costs = nca.Costs(commission=1e-3)
    result = nca.backtest(rising[:60], np.ones(60), costs, order="on_change")
    found = result.stress(delays=(), factors=(1,), capitals=())
    assert found.break_even == pytest.approx((1.001**58 - 1.0) / 1e-3, rel=2e-3)
    whole = nca.backtest(rising, np.ones(300), costs, order="on_change")
    found = whole.stress(delays=(), factors=(1,), capitals=())
    assert np.isinf(found.break_even) and "gains at all costs" in found.sentence


def test_without_costs_there_are_none_to_stress(bars):
    free = nca.backtest(bars, np.ones(300), nca.Costs(interest_lend=0.02)).stress(capitals=())
    assert not free.charged and np.isnan(free.break_even)
    assert free.sentence.startswith("No costs of trading or borrowing are given")
    assert "1x" not in repr(free) and "factor" not in repr(free) and "\n" not in free.sentence
    charged = nca.backtest(bars, np.ones(300), nca.Costs(borrow_fee=0.01)).stress(delays=())
    assert "No costs" not in charged.sentence


def test_spreads_that_the_bars_quote_are_costs_like_others(rising):
    """They were left out: at 2 times the costs, and where they were all that was charged."""
    traded = np.tile([0.0, 1.0], 150)
    quoted = dataclasses.replace(rising, half_spread=np.full((300, 1), 2e-4))
    result = nca.backtest(quoted, traded, order="on_change")
    table = result.stress(factors=(1, 2, 3), delays=(), capitals=())
    assert table.charged and table.costs["total_return"].is_monotonic_decreasing
    for factor in (2, 3):  # bars that quote so much more
        wide = dataclasses.replace(quoted, half_spread=factor * quoted.half_spread)
        there = nca.backtest(wide, traded, order="on_change").equity
        np.testing.assert_allclose(result.at_costs(factor).equity, there, rtol=1e-13)
        np.testing.assert_allclose(
            result.at_costs(factor / 2).at_costs(2).equity, there, rtol=1e-13
        )
        assert table.costs["total_return"][factor] == pytest.approx(there.iloc[-1] - 1.0)
    # Half of the bars gain 0.1%, for which the spread is paid twice.
    assert table.break_even == pytest.approx(1e-3 / 4e-4, rel=0.01)
    assert not result.uncharged and nca.backtest(rising, traded).uncharged
    # A cost of the user's own gets what the bars quote, and is scaled once.
    own = nca.backtest(quoted, traded, nca.Costs(own=(half_the_quote,)), order="on_change")
    name = own.charged.own[0]
    once, twice = (-own.at_costs(factor).flows[name].sum() for factor in (1, 2))
    assert twice == pytest.approx(2.0 * once, rel=0.05) and once > 0.0
    # Quotes of 0 are no costs, nor are quotes times 0.
    none = dataclasses.replace(quoted, half_spread=np.zeros((300, 1)))
    assert not nca.backtest(none, traded).stress(delays=(), capitals=()).charged
    assert nca.backtest(quoted, traded, nca.Costs(quote_scale=0.0)).uncharged
    with pytest.raises(ConfigError, match=r"quote_scale = 2.0 has no effect, .* quote no spread"):
        nca.backtest(rising, traded, nca.Costs(quote_scale=2.0))
    with pytest.raises(ConfigError, match=r"costs.quote_scale = -1 is not a number in \[0, inf\)"):
        nca.Costs(quote_scale=-1)


@pytest.mark.heavy
def test_more_capital_than_volume_earns_less_of_a_good_thing(rising):
    result = nca.backtest(rising, np.ones(300), COSTS, order="on_change")
    table = result.stress(factors=(1,), delays=(), participation=1e-4).capacity
    assert list(table.index / table.index[0]) == pytest.approx([1, 10, 100, 1000], rel=0.05)
    assert table["total_return"].is_monotonic_decreasing
    # The most that can be bought: 0.1 units at each open, which is less than the capital.
    opened, close = rising.open[1:, 0], rising.close[-1, 0]
    paid = 0.1 * (opened * 1.0002 * 1.001).sum()
    assert paid < table.index[-1]
    gained = 0.1 * 299 * close - paid
    assert table["total_return"].iloc[-1] == pytest.approx(gained / table.index[-1])


@pytest.mark.parametrize("volume", [np.nan, 0.0])
def test_without_volume_there_is_no_curve_of_capital(bars, volume):
    quiet = dataclasses.replace(bars, volume=np.full((300, 1), volume))
    stress = nca.backtest(quiet, nca.rules.momentum(20), COSTS).stress()
    assert len(stress.capacity) == 0 and "capital" not in stress.sentence
    assert len(stress.plot().axes) == 2
    assert "Sharpe ratio by costs" in repr(stress)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"factors": (0.0,)}, "factors=0.0: give numbers above 0"),
        ({"capitals": (-1e5,)}, "capitals=-100000.0: give numbers above 0"),
        ({"delays": (1.5,)}, "delay=1.5: give a whole number of bars"),
        ({"factors": (200.0,)}, "commission"),
    ],
)
def test_impossible_options_are_one_line(bars, options, match):
    result = nca.backtest(bars, nca.rules.momentum(20), COSTS)
    with pytest.raises(ConfigError, match=match) as caught:
        result.stress(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("delay", [-1, 0.5, True])
def test_a_delay_is_a_whole_number(bars, delay):
    with pytest.raises(ConfigError, match="give a whole number of bars"):
        nca.backtest(bars, nca.rules.momentum(20), delay=delay)
    with pytest.raises(ConfigError, match="give a whole number of bars"):
        nca.rules.momentum(20).with_delay(delay)


def ledger(bars, targets, commission):
    """Equity of cash and units, filled at the next open each time the target changes."""
    cash, units, last, waiting, equity = 1.0, 0.0, np.nan, np.nan, []
    for open_, close, target in zip(bars.open[:, 0], bars.close[:, 0], targets, strict=True):
        if not np.isnan(waiting):
            worth = cash + units * open_
            bought = (worth * waiting - units * open_) / open_
            if waiting == 1.0:  # all cash, the commission included
                bought = cash / (open_ * (1.0 + commission))
            cash -= bought * open_ + commission * abs(bought) * open_
            units, waiting = units + bought, np.nan
        equity.append(cash + units * close)
        if not np.isnan(target) and target != last:
            last = waiting = target
    return np.array(equity)


@pytest.mark.parametrize("delay", [0, 1, 4])
def test_a_late_order_equals_a_hand_ledger_of_later_targets(bars, delay):
    rng = np.random.default_rng(delay)
    targets = np.where(rng.random(300) < 0.1, rng.integers(0, 2, 300), np.nan)
    targets[0] = 0.0
    late = np.concatenate([np.full(delay, np.nan), targets[: 300 - delay]])
    expected = ledger(bars, late, 1e-3)
    costs = nca.Costs(commission=1e-3)
    result = nca.backtest(bars, targets, costs, order="on_change", delay=delay)
    np.testing.assert_allclose(result.equity, expected, rtol=1e-12)


@pytest.mark.heavy
def test_reruns_of_an_agent_are_one_look_at_its_bars(tiny, tmp_path):
    run, bars = tiny.copy(tmp_path / "copy").run, tiny.bars
    first = nca.backtest(bars, run)
    looks = first.evaluations
    stress = first.stress()
    assert stress.costs.loc[1.0, "sharpe"] == pytest.approx(first.metrics["sharpe"], rel=1e-9)
    assert nca.backtest(bars, run).evaluations == looks + 1
    # It decides as if its orders were on time.
    late = nca.backtest(bars, run, delay=2, look=False)
    np.testing.assert_array_equal(late.targets[2:], first.targets[:-2].to_numpy())
