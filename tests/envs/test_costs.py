"""Every cost and limit by hand; `test_judge.py` has them together, against a ledger."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import random_bars, rich_bars
from hypothesis import given, settings
from hypothesis import strategies as st

from nca_trader import Costs, EnvConfig, Order, Strategy, backtest
from nca_trader.envs.account import state as cost_of
from nca_trader.errors import BarError, ConfigError
from nca_trader.types import SECONDS_PER_YEAR

COSTS = Costs(
    commission=5e-4, slippage=2e-4, half_spread=3e-4, impact=0.02, fixed_fee=1.0, borrow_fee=0.05,
    interest_lend=0.02, interest_borrow=0.07, funding=0.04, liquidation_fee=0.01,
)  # fmt: skip


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32 - 1), fill=st.sampled_from(["next_open", "close"]))
def test_every_bar_of_flows_sums_to_the_change_of_equity(seed, fill):
    rng = np.random.default_rng(seed)
    bars = rich_bars(rng, 60, 2)
    result = backtest(
        bars, 3 * rng.uniform(-1, 1, (60, 2)), COSTS, fill, borrow=True, capital=1e5,
        maintenance_margin=0.25, delist_after=3, delist_haircut=0.5,
    )  # fmt: skip
    change = np.diff(result.equity.to_numpy(), prepend=1.0)
    np.testing.assert_allclose(result.flows.sum(axis=1), change, rtol=1e-9, atol=1e-12)
    assert result.costs.amount["total"] == pytest.approx(result.equity.iloc[-1] - 1.0, abs=1e-12)


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


def test_holding_a_short_pays_the_lender_and_earns_on_the_proceeds():
    # Short 5 units at 100 from the second open to the third: a day at 36.5242% a year on 500.
    worth, went = end_of(Costs(borrow_fee=YEAR / 1000), (-0.5, 0.0))
    first = 500.0 / 1000
    assert went["borrow_fee"] == pytest.approx(-first, rel=1e-9)
    assert worth == pytest.approx(999.5, rel=1e-9)
    # Funding turns: who is short receives.
    _, went = end_of(Costs(funding=YEAR / 1000), (-0.5, 0.0))
    assert went["funding"] == pytest.approx(first, rel=1e-9)


def test_borrowed_cash_pays_interest_for_the_days_between_opens():
    bars = still_bars(4, days=3)  # a weekend counts its days
    _, went = end_of(Costs(interest_borrow=0.1), (1.0, 1.0), bars, borrow=True)
    owed = 1000.0 * (1 + 0.1 * 3 / YEAR) ** 2 - 1000.0
    assert went == {"interest": pytest.approx(-owed, rel=1e-9)}


@pytest.mark.parametrize("fill", ["next_open", "close"])
@pytest.mark.parametrize(
    ("cost", "target", "sign"),
    [
        (dict(borrow_fee=0.1), -0.5, -1),
        (dict(funding=0.1), 0.5, -1),
        (dict(funding=0.1), -0.5, 1),
        (dict(interest_lend=0.1), -1.0, 1),
    ],
)
def test_a_position_held_over_a_weekend_is_charged_for_it(fill, cost, target, sign):
    """Opened on Friday and closed on Monday, it is charged for three days, and nothing else is.

    By hand: 10% per year on 500 of value, or on the cash of 1,000 and then of 2,000.
    """
    time = np.array(["2021-01-07", "2021-01-08", "2021-01-11", "2021-01-12"], "datetime64[ns]")
    bars = dataclasses.replace(still_bars(4), time=time)
    row = 0 if fill == "next_open" else 1  # decided, so that it fills on Friday
    orders = np.full((4, 2), np.nan)
    orders[row], orders[row + 1] = (target, 0.0), (0.0, 0.0)
    result = backtest(bars, orders, Costs(**cost), fill, borrow=True, capital=1000.0)
    charged = 1000.0 * result.flows.loc[:, ["interest", "borrow_fee", "funding"]].sum(axis=1)
    day = 0.1 / YEAR
    expected = [0.0, 0.0, sign * 500.0 * 3 * day, 0.0]
    if "interest_lend" in cost:  # cash earns before and after, too
        friday = 1000.0 * (1.0 + day)
        monday = friday + 2.0 * friday * 3 * day
        expected = [0.0, friday - 1000.0, monday - friday, monday * day]
    np.testing.assert_allclose(charged, expected, rtol=1e-9, atol=1e-12)


def test_dividends_are_paid_to_who_holds_and_by_who_is_short():
    dividend = np.zeros((3, 2))
    dividend[2] = (2.0, 0.0)
    bars = still_bars(dividend=dividend)
    assert end_of(bars=bars)[1] == {"dividends": pytest.approx(10.0)}
    assert end_of(targets=(-0.5, 0.0), bars=bars)[1] == {"dividends": pytest.approx(-10.0)}
    dividend[2], dividend[1] = 0.0, (2.0, 0.0)  # bought at the open at which it is ex: too late
    assert end_of(bars=still_bars(dividend=dividend))[1] == {}


def test_quotes_in_the_bars_add_to_the_half_spread():
    quoted = np.full((3, 2), 0.01)
    assert end_of(bars=still_bars(half_spread=quoted))[1] == {"spread": pytest.approx(-5.0)}
    _, went = end_of(Costs(half_spread=0.01), bars=still_bars(half_spread=quoted))
    assert went == {"spread": pytest.approx(-10.0)}


@pytest.mark.parametrize(
    ("limits", "held"),
    [
        (dict(lot=2.0), 4.0),  # 5 units are two lots of 2
        (dict(lot=7.0), 0.0),
        (dict(min_notional=500.0), 5.0),
        (dict(min_notional=500.1), 0.0),
        (dict(max_participation=0.04), 5.0),  # 4 of 100 in the second bar, the rest in the third
        (dict(max_participation=0.02), 4.0),
        (dict(max_gross=0.25), 2.5),
        (dict(max_net=0.1), 1.0),
    ],
)
def test_a_limit_by_hand(limits, held):
    result = backtest(still_bars(), [[0.5, 0.0]] * 3, capital=1000.0, **limits)
    assert 10.0 * result.weights.iloc[-1, 0] == pytest.approx(held)
    assert result.equity.iloc[-1] == pytest.approx(1.0)


def test_a_tick_rounds_the_price_against_the_trader():
    # 100 * 1.0002 = 100.02 is paid as 100.5, or sold at 99.5 for 99.98.
    _, went = end_of(Costs(slippage=2e-4), tick=0.5)
    assert went == {"slippage": pytest.approx(-2.5)}
    _, went = end_of(Costs(slippage=2e-4), (-0.5, 0.0), tick=0.5)
    assert went == {"slippage": pytest.approx(-2.5)}
    assert end_of(tick=0.5)[1] == {}  # 100 is on a tick


def test_a_margin_call_closes_at_the_open_that_meets_it():
    # Long 2 on 1: at -20% equity is .6 of 1.6 gross; a margin of .4 is not met (.375).
    bars = still_bars(4)
    price = np.array(bars.close)
    price[2:, 0] = 80.0
    fields = {name: price for name in ("open", "high", "low", "close")}
    bars = dataclasses.replace(bars, **fields)
    options = dict(bars=bars, borrow=True, targets=(2.0, 0.0))
    worth, went = end_of(Costs(liquidation_fee=0.01), maintenance_margin=0.4, **options)
    assert went == {"market": pytest.approx(-400.0), "liquidation": pytest.approx(-16.0)}
    assert worth == pytest.approx(584.0)
    assert end_of(maintenance_margin=0.37, **options)[0] == pytest.approx(600.0)
    result = backtest(bars, [[2.0, 0.0]] + [[np.nan, np.nan]] * 3, borrow=True,
                      maintenance_margin=0.4)  # fmt: skip
    assert (result.weights.iloc[-1] == 0.0).all()


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


@pytest.mark.parametrize(
    ("stop", "reason", "price"), [(0.1, "stop", 90.0), (0.3, "liquidated", 100 * 2 / 2.7)]
)
def test_a_stop_or_a_margin_call_whichever_the_adverse_prices_reach_first(stop, reason, price):
    bars = bars_with_a_range(60.0, 130.0)

    def act(row, bar):
        target = jnp.where(row == 0, jnp.array([3.0, 0.0]), jnp.nan)
        return row + 1, Order(target, stop_loss=stop, take_profit=0.2)

    strategy = Strategy(lambda num_assets: 0, act)
    result = backtest(bars, strategy, borrow=True, maintenance_margin=0.1)
    assert result.trades["reason"].tolist() == [reason]
    assert result.equity.iloc[-1] == pytest.approx(1.0 + 3.0 * (price - 100) / 100)


def test_several_positions_go_to_their_adverse_prices_together():
    """Long 2 at 100 to a low of 80, short 1 at 10 to a high of 12: the same share u of both ways.

    1 - .4 u - .2 u = .3 (2 (1 - .2 u) + 1 + .2 u) at u = .1 / .54.
    """
    bars = bars_with_a_range(80.0, 130.0)
    high = np.array(bars.high)
    high[2, 1] = 12.0
    bars = dataclasses.replace(bars, high=high)
    orders = [[2.0, -1.0]] + [[np.nan, np.nan]] * 3
    result = backtest(bars, orders, borrow=True, maintenance_margin=0.3)
    share = 0.1 / 0.54
    assert result.equity.iloc[-1] == pytest.approx(1.0 - 0.6 * share)
    exits = [100 * (1 - 0.2 * share), 10 * (1 + 0.2 * share)]
    assert result.trades["exit_price"].tolist() == pytest.approx(exits)


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


def test_a_fixed_fee_is_not_paid_for_rounding():
    """A position is opened and closed, and then a target of 0 is ordered at each bar."""
    rng = np.random.default_rng(0)
    bars = random_bars(rng, 200, 2)
    targets = np.zeros((200, 2))
    targets[:20] = rng.uniform(0.1, 0.4, (20, 2))
    fees = backtest(bars, targets, Costs(fixed_fee=1.0), borrow=True, capital=1e5).flows[
        "fixed_fee"
    ]
    # Twenty fills of two assets, and one sale of each.
    assert -fees.sum() * 1e5 == pytest.approx(42.0)


def test_an_asset_that_is_gone_is_paid_out_less_a_haircut():
    present = np.ones((6, 2), bool)
    present[2:, 0] = False
    bars = dataclasses.replace(still_bars(6), present=present)
    worth, went = end_of(bars=bars, delist_after=3, delist_haircut=0.4)
    assert (worth, went) == (pytest.approx(800.0), {"delisting": pytest.approx(-200.0)})
    held = backtest(bars, [[0.5, 0.0]] * 6, delist_after=3, delist_haircut=0.4).weights.iloc[:, 0]
    assert (held.to_numpy()[1:4] == 0.5).all() and (held.to_numpy()[4:] == 0.0).all()
    assert end_of(bars=bars)[0] == pytest.approx(1000.0)  # never, unless it is asked for


def test_a_short_position_in_what_is_gone_gains_the_haircut():
    present = np.ones((6, 2), bool)
    present[2:, 0] = False
    bars = dataclasses.replace(still_bars(6), present=present)
    worth, _ = end_of(targets=(-0.5, 0.0), bars=bars, delist_after=2, delist_haircut=0.4)
    assert worth == pytest.approx(1200.0)


@pytest.mark.parametrize(
    ("costs", "limits", "says"),
    [
        (Costs(fixed_fee=1.0), {}, "costs.fixed_fee need money; give capital"),
        (Costs(), dict(lot=1.0), "lot need money; give capital"),
        (Costs(), dict(capital=1e5, lot=-1.0), "lot=-1.0 is outside its range"),
        (Costs(), dict(capital=1e5, max_participation=1.5), "max_participation=1.5 is outside"),
        (Costs(), dict(maintenance_margin=0.0), "maintenance_margin=0.0 is outside"),
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
