"""Every cost and limit by hand; `test_judge.py` has them together, against a ledger."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import ledger
import numpy as np
import pytest
from drawn import random_bars

from nca_trader import Costs, EnvConfig, backtest
from nca_trader.envs.account import state as cost_of
from nca_trader.errors import BarError, ConfigError
from nca_trader.types import SECONDS_PER_YEAR

# One cost at a time: equity 1000, two assets at 100 and 10 whose prices do not move.


FREE = Costs()


def still_bars(length=3, volume=100.0, days=1, **extras):
    bars = random_bars(np.random.default_rng(0), length, 2)
    price = np.broadcast_to([100.0, 10.0], (length, 2))
    time = bars.time[0] + np.arange(length) * np.timedelta64(days, "D")
    return dataclasses.replace(
        bars, time=time, open=price, high=price, low=price, close=price,
        volume=np.full((length, 2), volume), **extras,
    )  # fmt: skip


def end_of(costs=FREE, targets=(0.5, 0.0), bars=None, **limits):
    """Equity in money, and where it went, of 1000 put into `targets` at the second open."""
    bars = still_bars() if bars is None else bars
    orders = np.full((len(bars), 2), np.nan)
    orders[0] = targets
    result = backtest(bars, orders, costs, **{"capital": 1000.0, **limits})
    amounts = 1000.0 * result.costs.amount
    assert amounts.pop("total") == pytest.approx(amounts.sum(), abs=1e-9)
    return 1000.0 * result.equity.iloc[-1], amounts[amounts.abs() > 1e-9].to_dict()


YEAR = SECONDS_PER_YEAR / 86400  # days
HAND = {
    # 5 units at 100: 500 of notional.
    "commission": (dict(commission=0.01), {}, {"commission": -5.0}),
    "slippage": (dict(slippage=0.01), {}, {"slippage": -5.0}),
    "half_spread": (dict(half_spread=0.01), {}, {"spread": -5.0}),
    "fixed_fee": (dict(fixed_fee=2.5), {}, {"fixed_fee": -2.5}),
    "two fixed fees": (dict(fixed_fee=2.5), dict(targets=(0.5, 0.1)), {"fixed_fee": -5.0}),
    # 5 of 100 units of volume: 0.1 * sqrt(.05) of 500.
    "impact": (dict(impact=0.1), {}, {"impact": -50.0 * math.sqrt(0.05)}),
    # A day on 500 of cash at 10% a year; the last of the three closes is one day after the first
    # that holds it.
    "interest": (dict(interest_lend=0.1), dict(targets=(0.0, 0.0)), {"interest": 1000.0 * (
        (1 + 0.1 / YEAR) ** 2 - 1)}),
    "commission on commission": (
        # 5 units bought at 101, 1% of 505.
        dict(commission=0.01, slippage=0.01), {}, {"slippage": -5.0, "commission": -5.05},
    ),
    "a short sale": (
        # 500 sold at 99 brings 495, 1% of which is 4.95.
        dict(commission=0.01, slippage=0.01),
        dict(targets=(-0.5, 0.0)),
        {"slippage": -5.0, "commission": -4.95},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HAND)
def test_a_cost_by_hand(name):
    costs, options, expected = HAND[name]
    worth, went = end_of(Costs(**costs), **options)
    assert went == pytest.approx(expected, rel=1e-9)
    assert worth == pytest.approx(1000.0 + sum(expected.values()), rel=1e-12)


def bars_with_a_range(low, high, close=100.0):
    """Bars at 100, the third of which reaches `low` and `high` in the first asset."""
    bars = still_bars(4)
    fields = {name: np.array(getattr(bars, name)) for name in ("open", "high", "low", "close")}
    fields["low"][2, 0], fields["high"][2, 0], fields["close"][2, 0] = low, high, close
    return dataclasses.replace(bars, **fields)


@pytest.mark.parametrize("fill", ["next_open", "close"])
@pytest.mark.parametrize(
    ("target", "low", "high", "price"),
    [
        # Long 3 at 100: at p equity is 1 + 3 (p - 100) / 100, a tenth of 3 p / 100 at 74.07.
        (3.0, 60.0, 101.0, 100 * 2 / 2.7),
        (3.0, 74.1, 101.0, None),
        # Short 2: 1 - 2 (p - 100) / 100 is a tenth of 2 p / 100 at 3 / 2.2.
        (-2.0, 99.0, 150.0, 100 * 3 / 2.2),
        (-2.0, 50.0, 136.0, None),
    ],
)
def test_a_margin_call_comes_inside_a_bar_where_the_margin_is_met(fill, target, low, high, price):
    bars = bars_with_a_range(low, high)
    orders = np.full((4, 2), np.nan)
    orders[0 if fill == "next_open" else 1, 0] = target
    result = backtest(bars, orders, Costs(), fill, borrow=True, maintenance_margin=0.1)
    worth = 1.0 if price is None else 1.0 + target * (price - 100) / 100
    np.testing.assert_allclose(result.equity, [1.0, 1.0, worth, worth], rtol=1e-12)
    assert result.trades["reason"].tolist() == ["open" if price is None else "liquidated"]
    if price is not None:
        assert result.trades["exit_price"].tolist() == pytest.approx([price])
        assert result.orders["at"].tolist() == [fill.removeprefix("next_"), "inside"]


def test_orders_below_the_least_notional_are_counted_and_said():
    price = np.array([100.0, 100.0, 60.0, 60.0, 60.0, 60.0])
    bars = still_bars(6)
    fields = {
        name: np.stack([price, np.full(6, 10.0)], axis=1)
        for name in ("open", "high", "low", "close")
    }
    bars = dataclasses.replace(bars, **fields)
    targets = np.array([0.12, 0.12, 0, 0, 0, 0])[:, None] * [[1.0, 0.0]]
    limits = {"capital": 100.0, "min_notional": 10.0}
    result = backtest(bars, targets, order="on_change", **limits)
    # .12 units are worth 7.2 when they are to be sold.
    assert result.cut.small == 1 and len(result.orders) == 1
    assert any(
        text.startswith("NOT SENT: orders worth less than min_notional=10, 1 in all")
        for text in result.cautions
    )
    assert backtest(bars, targets, order="on_change", capital=100.0).cut.small == 0


@pytest.mark.parametrize(("fill", "order"), [("next_open", "on_change"), ("close", "rebalance")])
@pytest.mark.parametrize(
    ("costs", "targets", "small"),
    [
        ({}, [0.45, 0.5], 0),  # 4 and 50 units
        ({}, [0.05, 0.5], 1),  # half a unit of the first
        ({}, [-0.05, 0.005], 2),
        ({"commission": 0.01}, [0.1, 0.9], 1),  # 0.99 of a unit and 89, as cash pays for
        ({"commission": 0.01}, [0.1, 0.0], 0),
        ({"commission": 0.01}, [1e-12, 0.0], 1),
    ],
)
def test_orders_of_less_than_a_lot_are_counted_until_one_is_held(
    fill, order, costs, targets, small
):
    bars, lot = still_bars(4), {"capital": 1000.0, "lot": 1.0}
    orders = np.tile(targets, (4, 1))
    result = backtest(bars, orders, Costs(**costs), fill, order, **lot)
    if small and order == "rebalance":
        small *= 3 + (fill == "close")
    assert result.cut.small == small
    says = [text for text in result.cautions if text.startswith("NOT SENT: orders of less than")]
    assert len(says) == bool(small) and all(f"lot=1, {small} in all" in text for text in says)


@pytest.mark.parametrize("fill", ["next_open", "close"])
@pytest.mark.parametrize("order", ["on_change", "rebalance"])
@pytest.mark.parametrize("limits", [{}, {"min_notional": 120.0, "max_participation": 0.3}])
@pytest.mark.few(2)
def test_orders_that_round_to_nothing_are_those_of_a_ledger(fill, order, limits):
    costs = {"commission": 2e-3, "fixed_fee": 0.1, "slippage": 1e-3}
    rules = {"capital": 1000.0, "lot": 0.5, "tick": 0.05, "fill": fill, "order": order} | limits
    counts = []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        bars = random_bars(rng, 40, 3)
        times = rng.choice([0.05, 1.0, 8.0], 3)  # capital is much or little
        prices = {name: getattr(bars, name) * times for name in ("open", "high", "low", "close")}
        bars = dataclasses.replace(bars, volume=rng.lognormal(1.0, 2.0, (40, 3)), **prices)
        weights = rng.uniform(-0.4 * (seed % 2), 0.8, (40, 3))
        weights = np.where(rng.random((40, 3)) < 0.5, np.nan, weights)
        result = backtest(bars, weights, Costs(**costs), **rules)
        outcome = ledger.run(bars, weights, costs, rules)
        np.testing.assert_allclose(result.equity, outcome.equity, rtol=1e-9)
        assert result.cut.small == outcome.small
        counts.append(outcome.small)
    assert sum(count > 0 for count in counts) >= 2


@pytest.mark.parametrize(
    ("costs", "limits", "says"),
    [
        (Costs(fixed_fee=1.0), {}, "costs.fixed_fee need money; give capital"),
        (Costs(), dict(lot=1.0), "lot need money; give capital"),
        (Costs(), dict(capital=1e5, lot=-1.0), "lot=-1.0 is outside its range"),
        (Costs(), dict(capital=1e5, max_participation=1.5), "max_participation=1.5 is outside"),
        (Costs(), dict(maintenance_margin=-0.1), "maintenance_margin=-0.1 is outside"),
        (Costs(), dict(delist_after=0), "delist_after=0 is below its least value"),
    ],
)
def test_limits_out_of_range_are_refused_in_backtest_and_environment(costs, limits, says):
    with pytest.raises(ConfigError, match=says):
        backtest(still_bars(), np.zeros((3, 2)), costs, **limits)
    with pytest.raises(ConfigError, match=says):
        EnvConfig(costs=costs, **limits)


@pytest.mark.parametrize(
    "wrong", [dict(impact=-1.0), dict(fixed_fee=math.inf), dict(borrow_fee=12.0),
              dict(half_spread=1.0), dict(commission=math.nan)]
)  # fmt: skip
def test_costs_that_mean_nothing_are_refused(wrong):
    (name,) = wrong
    with pytest.raises(ConfigError, match=f"costs.{name}"):
        Costs(**wrong)


def test_volume_that_nobody_reported_is_refused_where_it_matters():
    volume = np.full((3, 2), 100.0)
    volume[1, 1] = np.nan
    bars = dataclasses.replace(still_bars(), volume=volume)
    assert end_of(bars=bars)[0] == pytest.approx(1000.0)
    with pytest.raises(BarError, match="S1 has no volume at 2020-01-02"):
        end_of(Costs(impact=0.1), bars=bars)


def test_impact_counts_a_bar_without_volume_as_the_whole_of_it():
    np.testing.assert_allclose(
        cost_of.impact(0.1, np.array([0.0, 4.0, -4.0, 400.0]), np.array([0.0, 16.0, 0.0, 4.0])),
        [0.0, 0.05, 0.1, 0.1],
    )
    slope = jax.grad(lambda u: cost_of.impact(0.1, u, jnp.ones(())).sum())(jnp.zeros(()))
    assert float(slope) == 0.0
