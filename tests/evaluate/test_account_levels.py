"""Levels of an account: a stop, a target and a trailing stop on whatever trades it."""

import dataclasses

import ledger
import numpy as np
import pandas as pd
import pytest
from drawn import random_bars

import nca_trader as nca
from nca_trader.config.account import EXITS
from nca_trader.errors import BarError, ConfigError
from nca_trader.evaluate.combinations import with_levels_of
from nca_trader.evaluate.lookahead.leakcheck import leakcheck

BARS = random_bars(np.random.default_rng(8), 260, 2)
COSTS = nca.Costs(commission=1e-3, slippage=5e-4)
LEVELS = {"stop_loss": 0.04, "take_profit": 0.06, "trailing_stop": 0.05}


def trend(bars, window=8):
    """Half of the account in each asset above its average."""
    close = pd.DataFrame(bars.close)
    return (close > close.rolling(window).mean()).to_numpy() * 0.5


def with_own(rule, levels=LEVELS):
    rule = rule.with_stop(levels["stop_loss"]).with_take_profit(levels["take_profit"])
    return rule.with_trailing_stop(levels["trailing_stop"])


def run(subject, **given):
    return nca.backtest(BARS, subject, COSTS, look=False, **given)


@pytest.mark.parametrize("more", [{}, {"fill": "close", "delay": 2}, {"start": 100}, {
    "sizing": "volatility", "volatility_span": 5}, {
    "sizing": "covariance", "volatility_span": 5, "shrinkage": 0.2}],
    ids=["plain", "late", "span", "volatility", "covariance"])  # fmt: skip
def test_a_level_of_the_account_is_that_of_the_order(more):
    more = dict(more)
    if "start" in more:
        more["start"] = str(BARS.index[more["start"]])
    rule = nca.rules.sma_cross(3, 9)
    found = run(rule, **LEVELS, **more)
    assert found.equity.equals(run(with_own(rule), **more).equity)
    assert not found.equity.equals(run(rule, **more).equity)
    assert found.again().equity.equals(found.equity)
    assert found.hold.equity.equals(run(rule, **more).hold.equity)
    # Weights that are known beforehand, by a function of bars, in an order of their own.
    plain = {"order": "on_change"} | more
    known = run(trend(BARS), **LEVELS, **plain)
    for subject, given in (
        (trend, LEVELS),
        (lambda bars: nca.Order(trend(bars), **LEVELS), {}),
        (nca.Order(trend(BARS), **LEVELS), {}),
    ):
        result = run(subject, **given, **plain)
        assert result.equity.equals(known.equity)
        assert result.again().equity.equals(known.equity)


def test_a_level_of_an_order_comes_before_that_of_the_account():
    rule = nca.rules.sma_cross(3, 9)
    own = run(rule.with_stop(0.02)).equity
    assert run(rule.with_stop(0.02), stop_loss=0.3).equity.equals(own)
    stops = np.where(np.arange(260)[:, None] < 130, 0.02, np.nan) + np.zeros((260, 2))
    mixed = run(nca.Order(trend(BARS), stop_loss=stops), stop_loss=0.05)
    levels = {"stop_loss": np.where(np.isnan(stops), 0.05, stops)}
    charged = {"commission": 1e-3, "slippage": 5e-4}
    judged = ledger.run(BARS, trend(BARS), charged, {"order": "rebalance"}, levels)
    np.testing.assert_allclose(mixed.equity, judged.equity, rtol=1e-9)


def test_a_runs_agent_is_left_inside_the_bar_as_the_judge_says(tiny):
    bars, one = nca.read_bars(tiny.data), nca.Run(tiny.path)
    given = {"look": False, "start": str(bars.index[0])}
    found = nca.backtest(bars, one, COSTS, **given, **LEVELS)
    plain = nca.backtest(bars, one, COSTS, **given)
    assert not found.equity.equals(plain.equity)
    assert {"stop", "target", "trailing stop"} & {*found.trades["reason"]}
    spec = one.policy.spec
    best = np.argmax(np.nan_to_num(found.logits), axis=-1)
    decided = np.asarray(spec.targets)[best] if spec.num_actions else None
    decided = np.where(np.isnan(found.logits).any(-1), np.nan, decided)
    rules = {n: x for n, x in found.rules.stored.items() if n in ledger.RULES}
    levels = {name: np.full(decided.shape, x) for name, x in LEVELS.items()}
    charged = {"commission": 1e-3, "slippage": 5e-4}
    judged = ledger.run(bars, decided, charged, rules, levels)
    np.testing.assert_allclose(found.equity, judged.equity, rtol=1e-9)


def test_levels_are_axes_of_a_grid():
    grid = {"fast": [3, 4], "slow": [9], "stop_loss": [None, 0.03], "take_profit": [0.05, 0.08]}
    given = {"precision": "f64", "trials": None}
    table = nca.sweep(BARS, nca.rules.sma_cross, grid, COSTS, **given)
    for row in table.to_dict("records"):
        one = nca.rules.sma_cross(row["fast"], 9)
        levels = {name: row[name] for name in ("stop_loss", "take_profit")}
        equity = run(one, **levels).equity.iloc[-1]
        assert row["equity"] == pytest.approx(equity, rel=1e-12)
    looped = nca.sweep(BARS, trend, {"window": [8], "trailing_stop": [0.03, 0.05]}, COSTS, **given)
    for row in looped.to_dict("records"):
        equity = run(trend, trailing_stop=row["trailing_stop"]).equity.iloc[-1]
        assert row["equity"] == pytest.approx(equity, rel=1e-12)
    one = {"fast": [3, 4], "slow": [9]}
    same = nca.sweep(BARS, nca.rules.sma_cross, one, COSTS, stop_loss=0.03, **given)
    own = nca.sweep(BARS, nca.rules.sma_cross, one | {"stop_loss": [0.03]}, COSTS, **given)
    assert same["equity"].to_list() == pytest.approx(own["equity"].to_list(), rel=1e-12)
    for name in ("sharpe", "benchmark_sharpe", "deflated_sharpe", "spa_cash", "spa_hold", "pbo"):
        assert same.attrs["search"][name] == pytest.approx(own.attrs["search"][name])
    rule = with_levels_of(nca.rules.sma_cross, grid)
    assert rule is with_levels_of(nca.rules.sma_cross, grid) is with_levels_of(rule, grid)

    def own(stop_loss):
        return nca.rules.sma_cross(3, 9).with_stop(2 * stop_loss)

    assert with_levels_of(own, {"stop_loss": [0.1]}) is own  # a parameter of its own is the rule's


def test_a_walk_forward_has_them_and_says_where_one_keeps_an_asset_flat():
    rule, spans = nca.rules.sma_cross(3, 9), {"train": 100, "test": 40}
    account = nca.AccountConfig(costs=COSTS, **LEVELS)
    own = nca.walk_forward(BARS, with_own(rule), account=COSTS, **spans)
    found = nca.walk_forward(BARS, rule, account=account, **spans)
    assert found.result.equity.equals(own.result.equity)
    start = str(BARS.index[100])
    held = run(rule, start=start, **LEVELS).equity
    np.testing.assert_allclose(found.result.equity, held, rtol=1e-12)
    fitted = nca.walk_forward(
        BARS, nca.rules.sma_cross, grid={"fast": [3, 4], "slow": [9], "stop_loss": [0.02, 0.2]},
        account=COSTS, **spans,
    )  # fmt: skip
    assert set(fitted.folds["stop_loss"]) <= {0.02, 0.2}
    # Held from its first bar, left by its stop, and not ordered again.
    still = nca.walk_forward(
        BARS, nca.rules.buy_and_hold(), account=nca.AccountConfig(stop_loss=0.03), **spans
    )
    empty = [number for number, row in still.folds.iterrows() if row["total_return"] == 0.0]
    assert empty and all(still.folds.loc[empty, "closed_before"] == "S0, S1")
    assert f"fold {empty[0]} (S0, S1)" in still.verdict
    assert any(text.startswith("CLOSED: a level closed S0, S1") for text in still.result.cautions)
    assert not any("CLOSED" in text for text in found.result.cautions)
    assert "closed_before" not in own.folds or "A level closed" in own.verdict
    # What it is compared with has none of its levels.
    assert found.baselines.keys() == own.baselines.keys()
    for name, baseline in own.baselines.items():
        assert found.baselines[name].equity.equals(baseline.equity)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"stop": 0.05}, r"stop=0.05: is the date .* is stop_loss=0.05"),
        ({"stop_loss": 5.0}, r"stop_loss=5.0 is outside its range; give a number in \(0, 1\)"),
        ({"trailing_stop": 0.0}, "trailing_stop=0.0 is outside"),
        ({"take_profit": -0.1}, "take_profit=-0.1 is outside"),
    ],
)
def test_a_slip_of_a_level_is_refused_by_name(given, said):
    with pytest.raises(ConfigError, match=said):
        run(trend, **given)


@pytest.mark.parametrize(
    ("levels", "said"),
    [
        ({"stop_loss": np.ones((3, 2))}, r"stop_loss of the Order has shape \(3, 2\)"),
        ({"take_profit": "5%"}, "take_profit of the Order"),
        ({"trailing_stop": -0.1}, "trailing_stop of the Order is -0.1; give numbers above 0"),
    ],
)
def test_levels_of_an_order_that_do_not_fit_are_refused(levels, said):
    with pytest.raises(BarError, match=said):
        run(nca.Order(trend(BARS), **levels))


def test_a_level_that_looks_ahead_is_found():
    def ahead(bars):
        drop = pd.DataFrame(bars.low).shift(-1) / bars.close
        return nca.Order(trend(bars), stop_loss=np.where(drop < 1.0, 0.01, 0.3))

    with pytest.raises(ConfigError, match="looks ahead"):
        run(ahead)
    assert leakcheck(ahead, BARS).leaks
    assert leakcheck(lambda bars: nca.Order(trend(bars), stop_loss=0.05), BARS).leaks == 0


def test_who_has_no_levels_refuses_them(tmp_path):
    env = nca.EnvConfig(features=("return_1",))
    for name in EXITS:
        account = nca.AccountConfig(**{name: 0.05})
        for use in (
            lambda given: env.with_account(given),
            lambda given: nca.blend({"a": (nca.rules.sma_cross(3, 9), 1.0)}, account=given),
        ):
            with pytest.raises(ConfigError, match=name):
                use(account)
        # One that is off is as if it had not been given.
        off = nca.AccountConfig(**{name: float("inf")})
        assert env.with_account(off) == env
        assert dataclasses.replace(off, **{name: None}).stored == off.stored == {}
    with pytest.raises(BarError, match=r"an Order, which a backtest alone takes"):
        nca.walk_forward(
            BARS, lambda bars: nca.Order(trend(bars), stop_loss=0.1), train=100, test=40
        )
