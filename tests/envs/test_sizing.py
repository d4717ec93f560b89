"""Sizes that follow volatility, and the dead band: against pandas and ledgers in plain numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from drawn import bars_of
from rounding import ROUNDING

import nca_trader as nca
from nca_trader.agents.heads import account_features
from nca_trader.data.bars import write_bars
from nca_trader.envs.account.risk import Sizing, before_bars, next_size, sizes
from nca_trader.envs.trading import TradingEnv
from nca_trader.errors import ConfigError
from nca_trader.paper.journal.journal import read_events

SPAN, CAP, FLOOR, TARGET = 20, 2.5, 0.05, 0.15
RULES = {
    "sizing": "volatility",
    "volatility_target": TARGET,
    "volatility_span": SPAN,
    "volatility_floor": FLOOR,
    "size_cap": CAP,
}
COSTS = nca.Costs(commission=2e-4, slippage=1e-4)
YEAR = 365.2425 * 86_400


@pytest.fixture(scope="module")
def bars():
    rng = np.random.default_rng(5)
    num_bars, scale = 260, np.array([0.002, 0.012, 0.03])
    close = 100.0 * np.exp((scale * rng.standard_normal((num_bars, 3))).cumsum(0))
    opened = close * np.exp(0.3 * scale * rng.standard_normal(close.shape))
    present = rng.random(close.shape) > 0.05
    present[0] = True
    present[(~present).all(1), 0] = True  # a bar without any asset is no bar
    days = np.arange(num_bars) + 2 * (np.arange(num_bars) // 5)  # without weekends
    nan = np.where(present, 1.0, np.nan)
    filled = pd.DataFrame(close * nan).ffill().to_numpy()
    opened = np.where(present, opened, filled)
    time = np.datetime64("2012-01-02") + days * np.timedelta64(1, "D")
    return bars_of(filled, opened, time=time, symbols=("A", "B", "C"), present=present)


def pandas_sizes(bars):
    """Compute the sizes asset by asset from its own bars, with pandas' weighted means."""
    found = np.full(bars.close.shape, np.nan)
    for a in range(bars.num_assets):
        rows = np.flatnonzero(bars.present[:, a])
        close = pd.Series(bars.close[rows, a])
        time = pd.Series((bars.time[rows] - bars.time[0]) / np.timedelta64(1, "s"))
        square = (close.pct_change() ** 2).iloc[1:].ewm(span=SPAN, adjust=True).mean()
        years = (time.diff() / YEAR).iloc[1:].ewm(span=SPAN, adjust=True).mean()
        size = np.minimum(CAP, TARGET / np.maximum(np.sqrt(square / years), FLOOR))
        size.iloc[: SPAN - 1] = 0.0
        found[rows[1:], a] = size
        found[rows[0], a] = 0.0
    return pd.DataFrame(found).ffill().to_numpy()


def test_sizes_are_those_of_pandas(bars):
    found = sizes(bars, Sizing(TARGET, SPAN, FLOOR, CAP))
    np.testing.assert_allclose(found, pandas_sizes(bars), rtol=1e-12)
    assert (found[-1] == CAP).sum() == 1 and len(set(found[-1])) == 3  # one is at the cap


def test_a_live_loop_and_a_truncated_history_have_the_same_bits(bars):
    sizing = Sizing(TARGET, SPAN, FLOOR, CAP)
    found = sizes(bars, sizing)
    np.testing.assert_array_equal(sizes(bars[:100], sizing), found[:100])
    seen = before_bars(3)
    for row in range(120):
        seen, size = next_size(seen, jax.tree.map(lambda x, r=row: x[r], bars.as_bar()), sizing)
        np.testing.assert_allclose(size, found[row], rtol=ROUNDING)


def ledger(bars, targets, order, dead_band=0.0):
    """Keep cash and units by hand; orders fill at the next open that exists, with the costs."""
    size = pandas_sizes(bars)
    cash, units = 1.0, np.zeros(3)
    ordered, waiting = np.zeros(3), np.zeros(3, bool)
    equity = []
    for t in range(len(bars)):
        fills = waiting & bars.present[t]
        worth = cash + units @ bars.open[t]
        for a in np.flatnonzero(fills):
            new = ordered[a] * worth / bars.open[t, a]
            traded = new - units[a]
            price = bars.open[t, a] * (1.0 + np.sign(traded) * COSTS.slippage)
            cash -= traded * price + COSTS.commission * abs(traded) * price
            units[a] = new
        waiting &= ~fills
        worth = cash + units @ bars.close[t]
        equity.append(worth)
        wanted = targets[t] * size[t]
        before = ordered if order == "on_change" else units * bars.close[t] / worth
        new = wanted != ordered if order == "on_change" else np.ones(3, bool)
        if dead_band:
            new &= (np.abs(wanted - before) > dead_band) | (wanted == 0.0)
        ordered, waiting = np.where(new, wanted, ordered), waiting | new
    return np.array(equity)


@pytest.fixture(scope="module")
def targets():
    rng = np.random.default_rng(9)
    return np.repeat(rng.uniform(-1.0, 1.0, (52, 3)) / 3, 5, axis=0)


@pytest.mark.parametrize("dead_band", [0.0, 0.02])
@pytest.mark.parametrize("order", ["on_change", "rebalance"])
@pytest.mark.few(2)
def test_a_backtest_equals_a_ledger(bars, targets, order, dead_band):
    found = nca.backtest(
        bars, targets, COSTS, order=order, borrow=True, dead_band=dead_band, **RULES
    )
    expected = ledger(bars, targets, order, dead_band)
    np.testing.assert_allclose(found.equity, expected, rtol=1e-10)
    plain = nca.backtest(bars, targets, COSTS, order=order, borrow=True)
    assert abs(plain.equity.iloc[-1] / expected[-1] - 1.0) > 0.01


def test_a_dead_band_trades_less_and_closes_what_is_small(bars):
    weights = np.full((260, 3), 0.2)
    weights[200:] = 0.0
    runs = [
        nca.backtest(bars, weights, COSTS, borrow=True, dead_band=band, **RULES)
        for band in (0.0, 0.05, 0.5)
    ]
    turnover = [run.turnover.sum() for run in runs]
    assert turnover[0] > 2 * turnover[1] > 0.0
    # Sizes are below 3 and weights below 0.6: most moves are smaller than the last band.
    assert runs[1].weights.iloc[-1].abs().max() < 1e-12
    assert runs[2].num_fills <= 6


def test_a_strategy_with_volatility_is_the_same_account(bars):
    rule = nca.rules.equal_weight().with_volatility(TARGET, SPAN, CAP)
    options = {"borrow": True, "order": "rebalance"}
    one = nca.backtest(bars, rule, COSTS, **options)
    other = nca.backtest(
        bars, nca.rules.equal_weight(), COSTS, **options, **RULES | {"volatility_floor": 1e-9}
    )
    np.testing.assert_allclose(one.equity, other.equity, rtol=1e-12)
    assert one.weights.to_numpy()[-1].sum() > 1.0


@pytest.mark.parametrize("fill", ["next_open", "close"])
def test_an_environment_earns_what_a_backtest_of_its_actions_earns(bars, fill):
    config = nca.EnvConfig(
        features=("return_1",), actions="weights", costs=COSTS, fill=fill, random_start=False,
        borrow=True, max_gross=None, **RULES,
    )  # fmt: skip
    env = TradingEnv(bars, config)
    assert env.spec.warmup == 60  # of the feature; the estimate needs fewer
    state, timestep = jax.jit(env.reset)(jax.random.key(0))
    step, rng, grown = jax.jit(env.step), np.random.default_rng(0), 0.0
    first = int(timestep.observation.index)
    asked = np.full((len(bars), 3), np.nan)
    for row in range(first, first + 40):
        asked[row] = rng.uniform(-1 / 3, 1 / 3, 3)
        state, timestep = step(state, jnp.asarray(asked[row], jnp.float32))
        grown += float(timestep.reward)
        if bool(timestep.truncated):
            break
    result = nca.backtest(bars[: row + 2], asked[: row + 2], COSTS, fill=fill, borrow=True, **RULES)
    assert np.exp(grown) == pytest.approx(result.equity.iloc[-1], rel=1e-5)
    # The policy sees positions in units of full ones, whatever their size.
    held = account_features(env.spec, timestep.observation.account)[:, 0]
    size = sizes(bars, Sizing(TARGET, SPAN, FLOOR, CAP))[row + 1]
    weights = np.asarray(timestep.observation.account.held)
    np.testing.assert_allclose(held, weights / (size / 3), rtol=1e-5)


def test_a_random_start_is_a_position_that_could_have_been_ordered(bars):
    config = nca.EnvConfig(
        features=("return_1",), actions="direction", borrow=True, max_gross=None, **RULES
    )
    env = TradingEnv(bars, config)
    found = sizes(bars, Sizing(TARGET, SPAN, FLOOR, CAP))
    reset = jax.jit(env.reset)
    for seed in range(5):
        _, timestep = reset(jax.random.key(seed))
        account = timestep.observation.account
        full = np.asarray(account.held) / (found[int(timestep.observation.index)] / 3)
        np.testing.assert_allclose(full, np.round(full), atol=1e-5)


@pytest.mark.heavy
@pytest.mark.parametrize(("fill", "order"), [("next_open", "on_change"), ("close", "rebalance")])
def test_paper_orders_and_earns_what_the_backtest_does(bars, tmp_path, fill, order):
    path = tmp_path / "bars.parquet"
    write_bars(bars, path)
    rule, options = nca.rules.momentum(10), {"borrow": True, "dead_band": 0.01, **RULES}
    options |= {"costs": COSTS, "fill": fill, "order": order}
    nca.paper_trade(rule, f"replay:{path}", tmp_path / "paper.db", **options)
    expected = nca.backtest(bars, rule, **options)
    decided = [event.body["target"] for event in read_events(tmp_path / "paper.db", "decision")]
    np.testing.assert_allclose(decided, expected.targets, rtol=ROUNDING)
    equity = [e.body["equity"] for e in read_events(tmp_path / "paper.db", "snapshot")]
    np.testing.assert_allclose(equity, expected.equity, rtol=1e-14)
    assert expected.num_fills > 100


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sizing": "vol"}, "sizing"),
        ({"sizing": "volatility", "actions": "orders"}, "direction"),
        ({"sizing": "volatility", "reward": "pnl"}, "log_return"),
        ({"sizing": "volatility", "size_cap": 0.0}, "size_cap"),
        ({"volatility_target": 0.2}, "sizing='volatility'"),
        ({"dead_band": -0.1}, "dead_band"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(changes, words):
    with pytest.raises(ConfigError, match=words) as raised:
        dataclasses.replace(nca.EnvConfig(), **changes)
    assert "\n" not in str(raised.value)


def late_bars(bars):
    """The same bars, of which the last asset is listed at bar 90."""
    present = bars.present.copy()
    present[:90, 2] = False
    fields = {name: getattr(bars, name).copy() for name in ("open", "high", "low", "close")}
    for values in fields.values():
        values[:90, 2] = np.nan
    return dataclasses.replace(bars, present=present, **fields)


@pytest.mark.parametrize("within", [False, True])
def test_who_buys_once_buys_when_an_asset_has_a_size_and_at_that_size(bars, within):
    late = late_bars(bars)
    rule, account = nca.rules.buy_and_hold(), {"sizing": "volatility", "volatility_span": SPAN}
    if within:  # the strategy sizes itself, in an account that does not
        rule, account = rule.with_volatility(TARGET, SPAN), {}
    result = nca.backtest(late, rule, fill="close", borrow=True, **account)
    orders = result.orders
    # At the listing of C equity is divided again.
    assert sorted(orders["symbol"]) == ["A", "A", "B", "B", "C"]
    for number, symbol in enumerate(late.symbols):
        # The close of the bar with the 20th return.
        rows = np.flatnonzero(late.present[:, number])
        row = rows[SPAN]
        bought = orders[orders["symbol"] == symbol].iloc[0]
        assert bought["time"] == late.index[row]
        size = pandas_sizes(late)[row, number]
        listed = 3 if symbol == "C" else 2
        share = result.weights[symbol].iloc[row]
        assert share == pytest.approx(min(size, 1.0) / listed, rel=1e-9)


def test_weights_that_are_given_once_wait_for_a_size_as_a_strategy_does(bars):
    late, account = late_bars(bars), {"sizing": "volatility", "volatility_span": SPAN}
    account |= {"borrow": True, "order": "on_change"}
    once = np.full(late.close.shape, np.nan)
    once[0, :2], once[90] = 1 / 2, 1 / 3  # when one is listed, as `buy_and_hold` does
    held = nca.backtest(late, nca.rules.buy_and_hold(), COSTS, **account)
    known = nca.backtest(late, once, COSTS, **account)
    asked = nca.backtest(late, lambda given: once[: len(given)], COSTS, **account)
    assert len(held.orders) == 5
    for found in (known, asked):
        np.testing.assert_array_equal(found.equity, held.equity)


@pytest.mark.heavy
def test_a_sweep_waits_for_a_size_as_a_backtest_does(bars):
    late = late_bars(bars)
    rules = {"sizing": "volatility", "volatility_span": SPAN, "borrow": True}

    def sized(share=1.0):
        hold = nca.rules.buy_and_hold()
        return nca.Strategy(
            hold.init, lambda s, bar: (lambda r: (r[0], share * r[1]))(hold.act(s, bar)), "mine"
        )

    table = nca.sweep(late, sized, {"share": [0.5, 1.0]}, COSTS, trials=None, **rules)
    for share, row in zip((0.5, 1.0), table["equity"], strict=True):
        found = nca.backtest(late, sized(share), COSTS, **rules)
        assert row == pytest.approx(found.equity.iloc[-1], rel=1e-6) and len(found.orders) == 5
