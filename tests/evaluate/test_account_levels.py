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
    rule, charged = nca.rules.sma_cross(3, 9), {"commission": 1e-3, "slippage": 5e-4}
    own = run(rule.with_stop(0.02)).equity
    assert run(rule.with_stop(0.02), stop_loss=0.3).equity.equals(own)
    # A level stays in force with its target; a new target without one has the account's.
    targets = trend(BARS)
    changed = np.diff(targets, axis=0, prepend=np.nan) != 0.0
    given = np.where(changed & (np.arange(260)[:, None] < 130), 0.02, np.nan)
    for usual in (0.05, 0.005):
        mixed = run(nca.Order(targets, stop_loss=given), stop_loss=usual)
        levels = {"stop_loss": np.where(changed & np.isnan(given), usual, given)}
        judged = ledger.run(BARS, targets, charged, {"order": "rebalance"}, levels)
        np.testing.assert_allclose(mixed.equity, judged.equity, rtol=1e-9)


def test_a_span_begins_with_the_order_in_force_and_its_own_levels_and_size():
    none = np.full((260, 2), np.nan)
    targets, stops, sizes = none.copy(), none.copy(), np.full((260, 2), 0.2)
    targets[0], targets[50], stops[0], stops[60, 1], sizes[50] = 0.5, 0.4, 0.01, 0.02, 0.7
    start = {"start": str(BARS.index[100])}
    # The order of row 50 has no stop, and that of an asset got one later.
    held, late = none.copy(), none.copy()
    held[100], late[100, 1] = 0.4 * 0.7, 0.02
    found = run(nca.Order(targets, size=sizes, stop_loss=stops), **start)
    assert found.equity.equals(run(nca.Order(held, stop_loss=late), **start).equity)
    assert not found.equity.equals(run(nca.Order(held), **start).equity)
    assert found.again().equity.equals(found.equity)
    sized = run(nca.Order(trend(BARS), size=0.5))
    assert sized.equity.equals(run(0.5 * trend(BARS)).equity)
    assert sized.again().equity.equals(sized.equity)


def test_another_level_is_another_trial(tmp_path):
    hold = nca.rules.buy_and_hold()
    levels = (None, 0.02, 0.0201, 0.021)
    tried = [run(hold, stop_loss=x, trials=tmp_path).tried for x in levels]
    assert tried == [1, 2, 3, 4]
    given = {"precision": "f64", "trials": tmp_path}
    table = nca.sweep(BARS, nca.rules.buy_and_hold, {"stop_loss": [0.02, 0.021]}, COSTS, **given)
    assert table.attrs["search"]["trials"] == 4  # both are there already


def test_a_runs_agent_is_left_inside_the_bar_as_the_judge_says(tiny):
    bars, one = nca.read_bars(tiny.data), nca.Run(tiny.path)
    given = {"look": False, "start": str(bars.index[0])}
    found = nca.backtest(bars, one, COSTS, **given, **LEVELS)
    plain = nca.backtest(bars, one, COSTS, **given)
    assert not found.equity.equals(plain.equity)
    assert {"stop", "take profit", "trailing stop"} & {*found.trades["reason"]}
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


def trend_of(bars, window):  # without a default
    return trend(bars, window)


def test_what_a_rule_has_of_its_own_comes_before_an_axis():
    def doubled(stop_loss):
        return nca.rules.sma_cross(3, 9).with_stop(2 * stop_loss)

    def options(fast, **options):
        return nca.rules.sma_cross(fast, 9).with_stop(2 * options["stop_loss"])

    def fixed(fast):
        return nca.rules.sma_cross(fast, 9).with_stop(0.02)

    def ordered(bars, window):
        return nca.Order(trend(bars, window), stop_loss=0.02)

    given = {"precision": "f64", "trials": None}
    for rule, grid, same in (
        (doubled, {}, nca.rules.sma_cross(3, 9).with_stop(0.08)),
        (options, {"fast": [3]}, nca.rules.sma_cross(3, 9).with_stop(0.08)),
        (fixed, {"fast": [3]}, nca.rules.sma_cross(3, 9).with_stop(0.02)),
        (ordered, {"window": [8]}, nca.Order(trend(BARS), stop_loss=0.02)),
        (trend_of, {"window": [8]}, nca.Order(trend(BARS), stop_loss=0.04)),
    ):
        table = nca.sweep(BARS, rule, grid | {"stop_loss": [0.04]}, COSTS, **given)
        assert table["equity"].iloc[0] == pytest.approx(run(same).equity.iloc[-1], rel=1e-12)


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
    # Folds may choose to have none.
    grid = {"fast": [3, 4], "slow": [9], "stop_loss": [0.01, None]}
    either = nca.walk_forward(BARS, nca.rules.sma_cross, grid=grid, account=COSTS, **spans)
    assert len({str(x) for x in either.folds["stop_loss"]}) == 2
    with pytest.raises(ConfigError, match="stop_loss of a function of bars cannot differ"):
        nca.walk_forward(BARS, trend, grid={"window": [8], "stop_loss": [0.02]}, **spans)
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
        ({"stop_loss": np.ones((3, 2))}, r"stop_loss of the Order is .* of shape \[3, 2\]; give"),
        ({"take_profit": "5%"}, "take_profit of the Order"),
        ({"trailing_stop": -0.1}, "trailing_stop of the Order is -0.1; give numbers above 0"),
        ({"stop_loss": 5.0}, "stop_loss of the Order is 5; give numbers above 0 and below 1"),
        ({"size": None}, "size of the Order is None"),
        ({"size": np.nan}, "size of the Order is NaN where its target is not"),
        ({"size": 30.0}, r"targets row \d+ is 15 of S"),
        ({"stop_loss": {"S0": 0.1}}, "stop_loss of the Order is a dict"),
        (
            {"stop_loss": pd.DataFrame(np.full((260, 2), 0.1), columns=["S1", "S0"])},
            "stop_loss have the columns S1, S0, but the bars are S0, S1",
        ),
    ],
)
def test_levels_of_an_order_that_do_not_fit_are_refused(levels, said):
    for subject in (
        nca.Order(trend(BARS), **levels),
        lambda bars: nca.Order(trend(bars), **levels),
    ):
        with pytest.raises(BarError, match=said):
            run(subject)


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
