"""A blend is the ledger's account of the weighted sum of what its parts decide alone."""

import dataclasses
import math
import re

import jax.numpy as jnp
import ledger
import numpy as np
import pandas as pd
import pytest
from drawn import patient, random_bars, rich_bars
from rounding import ROUNDING
from tiny import AGENT, ENV
from untrained import untrained_run

import nca_trader as nca
from nca_trader.errors import BarError, ConfigError
from nca_trader.strategies.blend import parts_of

COSTS = nca.Costs(commission=5e-4, slippage=2e-4, interest_lend=0.02)


@pytest.fixture(scope="module")
def bars():
    return random_bars(np.random.default_rng(3), 400, 2)


def mixed(targets, shares):
    """`sum_k share_k target_k`, where each part's last order counts, row by row."""
    last, rows = np.zeros((len(targets), *targets[0].shape[1:])), []
    for asked in zip(*targets, strict=True):
        asked = np.array(asked)
        last = np.where(np.isnan(asked), last, asked)
        total = sum(share * row for share, row in zip(shares, last, strict=True))
        rows.append(np.where(np.isnan(asked).all(0), np.nan, total))
    return np.array(rows)


def alone(bars, part, costs=COSTS, **options):
    return nca.backtest(bars, part, costs, look=False, **options).targets.to_numpy()


@pytest.mark.heavy
@pytest.mark.parametrize("fill", ["next_open", "close"])
@pytest.mark.parametrize("start", [None, 90])
@pytest.mark.few(2)
def test_a_blend_is_the_ledgers_account_of_the_sum_of_its_parts(bars, fill, start):
    parts = {
        "cross": (nca.rules.sma_cross(3, 9), 0.5),
        "sized": (nca.rules.momentum(5).with_volatility(0.1, span=10.0), 0.2),
        "patient": (patient(4), 0.4),
    }
    options = {"fill": fill, "start": None if start is None else str(bars.index[start])}
    mix = nca.blend(parts, costs=COSTS, fill=fill)
    result = nca.backtest(bars, mix, COSTS, **options)
    found = parts_of(bars, mix, start or 0)[start or 0 :]
    targets = [alone(bars, part, **options) for part, _ in parts.values()]
    # Alone, the order in force before a start is repeated there.
    first = 0 if start is None else 1
    for k, each in enumerate(targets):
        np.testing.assert_allclose(found[first:, k], each[first:], rtol=ROUNDING)
    traded = bars[start or 0 :]
    costs = {"commission": 5e-4, "slippage": 2e-4, "interest_lend": 0.02}
    asked = mixed(targets, [share for _, share in parts.values()])
    np.testing.assert_allclose(result.targets, asked, atol=1e-15)
    expected = ledger.run(traded, asked, costs, {"fill": fill})
    np.testing.assert_allclose(result.equity, expected.equity, rtol=1e-9)
    assert result.num_fills > 50 and abs(result.equity.iloc[-1] - 1.0) > 0.01
    np.testing.assert_allclose(result.parts.sum(axis=1), expected.went["market"], atol=1e-9)


AGENTS = [
    {}, {"actions": "weights"}, {"actions": "orders"}, {"reward": "differential_sharpe"},
    {"sizing": "volatility"}, {"actions": "weights", "dead_band": 0.1},
    {"actions": "weights", "sizing": "covariance"},
]  # fmt: skip


@pytest.mark.heavy
@pytest.mark.parametrize("changes", AGENTS)
@pytest.mark.few(3)
def test_an_agent_in_a_blend_decides_as_it_does_alone(bars, tmp_path, changes, caplog):
    run = untrained_run(tmp_path / "agent", bars[:200], dataclasses.replace(ENV, **changes), AGENT)
    own = nca.backtest(bars, run, look=False)
    order = own.rules.order
    mix = nca.blend({"agent": (run, 0.6), "cross": (nca.rules.sma_cross(3, 9), 0.4)}, order=order)
    result = nca.backtest(bars, mix, look=False)
    # As of a run: from the first bar that it has not seen, at the costs that it trained with.
    assert result.equity.index[0] == own.equity.index[0] == bars.index[200]
    assert result.in_sample == 0 and result.charged == ENV.costs and own.num_fills > 10
    found = parts_of(bars, mix, 200)[200:, 0]
    if "dead_band" in changes:  # what its account orders: the band holds some targets back
        held = np.abs(found - own.targets) > 1e-12
        assert 0 < np.asarray(held).sum() < held.size
    else:
        np.testing.assert_allclose(found, own.targets, atol=1e-6)
    cross = alone(bars, nca.rules.sma_cross(3, 9), start=str(bars.index[200]))
    asked = mixed([found, cross], [0.6, 0.4])
    expected = ledger.run(
        bars[200:], asked, {"commission": 5e-4, "slippage": 2e-4}, {"order": order}
    )
    np.testing.assert_allclose(result.equity, expected.equity, rtol=1e-9)


def test_what_a_blend_is_given_in_vain_is_refused(bars, tmp_path):
    with pytest.raises(ConfigError, match=r"blend: sizing='covariance' has no effect: no part has"):
        nca.blend({"cross": (nca.rules.sma_cross(3, 9), 1.0)}, sizing="covariance")
    sized = dataclasses.replace(ENV, sizing="volatility")
    run = untrained_run(tmp_path / "agent", bars[:200], sized, AGENT)
    mix = nca.blend({"agent": (run, 1.0)})
    for sizing in ("volatility", "covariance"):
        said = f"sizing='{sizing}': the targets of blend of agent have sizes already, those of its "
        with pytest.raises(ConfigError, match=said):
            nca.backtest(bars, mix, sizing=sizing)


@pytest.mark.heavy
def test_a_blend_counts_as_an_evaluation_of_its_runs(bars, tmp_path):
    run = untrained_run(tmp_path / "agent", bars[:200], ENV, AGENT)
    mix = nca.blend({"agent": (run, 1.0)})
    assert nca.backtest(bars, mix).evaluations == 1 and nca.backtest(bars, run).evaluations == 2
    assert nca.backtest(bars, mix, start=str(bars.index[150])).in_sample == 50


@pytest.mark.heavy
def test_a_run_in_a_blend_trades_its_own_symbols_alone(bars, tmp_path):
    # Its reward remembers in units of these symbols' variance.
    env = dataclasses.replace(ENV, reward="differential_sharpe")
    run = untrained_run(tmp_path / "agent", bars[:200], env, AGENT)
    mix = nca.blend({"agent": (run, 1.0)})
    assert nca.backtest(bars, mix, look=False).num_fills > 10
    with pytest.raises(BarError, match="the run agent trades S0, S1, in this order"):
        nca.backtest(dataclasses.replace(bars, symbols=("S1", "S0")), mix, look=False)


def test_parts_that_want_opposite_positions_cancel_and_each_has_its_own_gain(bars):
    def steady(weight):
        return nca.Strategy(lambda n: jnp.zeros(n), lambda s, bar: (s, jnp.full(2, weight)), "s")

    mix = nca.blend({"up": (steady(0.4), 0.5), "down": (steady(-0.4), 0.5)})
    result = nca.backtest(bars, mix, COSTS)
    assert result.num_fills == 0
    # Both hold units from the second bar's open on, for 0.2 of the capital in each asset.
    units = 0.2 * result.equity.iloc[1] / bars.close[1]
    expected = (units * (bars.close[-1] - bars.open[1])).sum()
    np.testing.assert_allclose(result.parts.sum(), [expected, -expected], rtol=1e-12)
    np.testing.assert_allclose(result.parts.sum(axis=1), 0.0, atol=1e-15)


def drawn(seed):
    """Orders weights at random, and often 0."""
    rng = np.random.default_rng(seed)
    chosen = rng.choice([math.nan, 0.0, 1.0], (200, 2), p=[0.3, 0.3, 0.4])
    rows = jnp.asarray(chosen * rng.uniform(-1.0, 1.0, (200, 2)))
    return nca.Strategy(lambda n: jnp.zeros((), int), lambda t, bar: (t + 1, rows[t]), "drawn")


ACCOUNTS = [
    ({}, lambda mix: mix),
    ({}, lambda mix: mix.with_delay(2)),
    ({}, lambda mix: mix.with_stop(0.01)),
    ({}, lambda mix: mix.with_take_profit(0.01)),
    ({"delay": 1, "delist_after": 5, "delist_haircut": 0.3}, lambda mix: mix.with_delay(2)),
    ({"borrow": True, "maintenance_margin": 0.5}, lambda mix: mix),
    ({"borrow": True, "maintenance_margin": 0.5}, lambda mix: mix.with_trailing_stop(0.02)),
    ({"capital": 1e4, "lot": 5.0, "min_notional": 800.0, "max_participation": 0.02}, lambda x: x),
]


@pytest.mark.parametrize("fill", ["next_open", "close"])
@pytest.mark.parametrize(("limits", "around"), ACCOUNTS)
@pytest.mark.few(3)
def test_what_parts_earned_sums_to_the_market_also_where_orders_wait_or_positions_are_left(
    fill, limits, around
):
    many = rich_bars(np.random.default_rng(0), 200, 2)
    mix = around(nca.blend({"a": (drawn(1), 1.0), "b": (drawn(2), 0.9)}))
    result = nca.backtest(many, mix, COSTS, fill=fill, **limits)
    assert result.num_fills > 50
    np.testing.assert_allclose(result.parts.sum(axis=1), result.flows["market"], atol=1e-12)


def test_a_position_stays_with_who_held_it_until_an_order_fills():
    """S0 has no bar while the orders of a and b change: nothing fills before it is back."""

    def steps(*weights):
        rows = jnp.asarray(weights + weights[-1:] * 10)
        return nca.Strategy(
            lambda n: jnp.zeros((), int), lambda t, bar: (t + 1, jnp.stack([rows[t], 0.0])), "steps"
        )

    drawn_bars = random_bars(np.random.default_rng(5), 8, 2)
    present, open_, close = (
        x.copy() for x in (drawn_bars.present, drawn_bars.open, drawn_bars.close)
    )
    present[3:5, 0] = False
    open_[3:5, 0] = close[3:5, 0] = close[2, 0]
    gappy = dataclasses.replace(
        drawn_bars, present=present, open=open_, close=close,
        high=np.maximum(open_, close), low=np.minimum(open_, close),
    )  # fmt: skip
    mix = nca.blend({"a": (steps(0.5, 0.5, 0.0), 1.0), "b": (steps(0.0, 0.0, 0.25), 1.0)})
    result = nca.backtest(gappy, mix)
    # Held by a from the open of row 1, by b from the open of row 5, where the order fills.
    units = 0.5 / open_[1, 0]
    to_a = units * (open_[5, 0] - open_[1, 0])
    left = 0.25 * (1.0 + to_a) / open_[5, 0]
    expected = [to_a, left * (close[-1, 0] - open_[5, 0])]
    np.testing.assert_allclose(result.parts.sum(), expected, rtol=1e-12)


def test_an_account_of_a_part_is_paid_out_for_an_asset_that_is_delisted():
    part = nca.Strategy(
        lambda n: jnp.zeros(n),
        lambda s, bar, own: (s, jnp.stack([own.equity / 4.0, 0.5])),
        "its equity",
    )
    many = rich_bars(np.random.default_rng(0), 60, 2)
    rules = {"delist_after": 4, "delist_haircut": 0.3}
    mix = nca.blend({"a": (part, 1.0)}, COSTS, **rules)
    want = alone(many, part, **rules)
    assert np.ptp(want[30:, 0]) > 0.03
    np.testing.assert_allclose(parts_of(many, mix, 0)[:, 0], want, rtol=ROUNDING)


def raising(number):
    def act(state, bar):
        raise ValueError(f"no {number}")

    return nca.Strategy(lambda n: jnp.zeros(n), act, "broken")


def always(target):
    return nca.Strategy(lambda n: jnp.zeros(n), lambda s, bar: (s, jnp.full(2, target)), "always")


GOOD = (nca.rules.sma_cross(3, 9), 0.5)
RUNNING = [
    (raising(7), ConfigError, r"part b: raises ValueError.*no 7"),
    (always(math.nan), BarError, "part b orders nothing on these bars"),
    (always(math.inf), BarError, "part b decides what is not a number at 2020-01-01"),
    (nca.rules.sma_cross(3, 9).with_stop(0.02), ConfigError, "part b carry stops or targets"),
    (patient(4).with_stop(0.02), ConfigError, "part b carry stops or targets"),
]


@pytest.mark.heavy
@pytest.mark.parametrize(("part", "error", "match"), RUNNING)
def test_a_part_that_cannot_trade_is_named(bars, part, error, match):
    with pytest.raises(error, match=match) as caught:
        nca.backtest(bars, nca.blend({"a": GOOD, "b": (part, 0.5)}))
    assert "\n" not in str(caught.value)


def test_a_part_of_a_blend_in_a_blend_is_named_with_its_path(bars):
    inner = nca.blend({"deep": (raising(7), 1.0)})
    with pytest.raises(ConfigError, match=r"part b, part deep: raises ValueError"):
        nca.backtest(bars, nca.blend({"a": GOOD, "b": (inner, 0.5)}))


REFUSED = [
    ({}, "there are no parts"),
    ([("a", GOOD)], "parts"),
    ({"A b": GOOD}, "a name is of a-z"),
    ({1: GOOD, "1": GOOD}, "a name is of a-z"),
    ({"a": nca.rules.sma_cross()}, "give (strategy or run, share)"),
    ({"a": (nca.rules.sma_cross(), "half")}, "its share is"),
    ({"a": (nca.rules.sma_cross(), math.nan)}, "its share is"),
    ({"a": (nca.rules.sma_cross, 0.5)}, "give a Strategy"),
    ({"a": GOOD, "b": (nca.rules.equal_weight(), 0.5)}, "give order"),
]


@pytest.mark.parametrize(("parts", "match"), REFUSED)
def test_what_is_not_a_blend_is_refused_in_one_line(parts, match):
    with pytest.raises(ConfigError, match=re.escape(match)) as caught:
        nca.blend(parts)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "match"),
    [({"max_gros": 1.0}, "did you mean 'max_gross'"), ({"fill": "clsoe"}, "did you mean 'close'")],
)
def test_arguments_of_accounts_are_refused_also_where_no_part_has_an_account(given, match):
    with pytest.raises(ConfigError, match=match):
        nca.blend({"a": GOOD}, **given)


def test_wrappers_of_a_blend_keep_its_parts(bars):
    mix = nca.blend({"a": GOOD, "b": (nca.rules.momentum(20), 0.5)})
    result = nca.backtest(bars, mix.with_delay(2).with_volatility(0.1), COSTS)
    assert isinstance(result.parts, pd.DataFrame)


@pytest.mark.heavy
def test_a_blend_is_not_judged_on_bars_that_trained_its_run(bars, tmp_path):
    run = untrained_run(tmp_path / "agent", bars[:200], ENV, AGENT)

    def mix(share=0.5):
        return nca.blend({"hold": (nca.rules.buy_and_hold(), 0.5), "agent": (run, share)})

    late = bars.index[200]
    with pytest.raises(nca.BarError, match=rf"until .*{bars.index[199].date()}.* begin to test at"):
        nca.walk_forward(bars, mix(), train=150, test=40)
    with pytest.raises(nca.BarError, match="begin to test at row 200"):
        nca.walk_forward(bars, mix, grid={"share": [0.2, 0.4]}, train=150, test=40)
    with pytest.raises(nca.BarError, match=f"sweep bars.between.*{late.date()}"):
        nca.sweep(bars, mix, {"share": [0.2, 0.4]}, nca.Costs())
    walk = nca.walk_forward(bars, mix(), train=200, test=100)
    assert walk.result.equity.index[0] == late


@pytest.mark.heavy
def test_a_grid_of_blends_is_swept_and_walked_as_any_rule(bars):
    def rule(slow=9, share=0.5):
        parts = {"a": (nca.rules.sma_cross(3, slow), share), "b": (patient(4), 1.0 - share)}
        return nca.blend(parts, costs=COSTS)

    grid = {"slow": [8, 20], "share": [0.25]}
    table = nca.sweep(bars, rule, grid, COSTS, precision="f64")
    for row in table.to_dict("records"):
        alone_ = nca.backtest(bars, rule(row["slow"], row["share"]), COSTS)
        assert row["total_return"] == pytest.approx(alone_.metrics["total_return"], rel=1e-9)
    walk = nca.walk_forward(bars, rule, train=120, test=140, grid={"share": [0.25]}, costs=COSTS)
    equity = walk.result.equity
    same = nca.backtest(bars, rule(share=0.25), COSTS, start=str(equity.index[0]))
    np.testing.assert_allclose(equity, same.equity[: len(equity)], rtol=1e-9)
