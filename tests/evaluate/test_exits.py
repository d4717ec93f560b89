"""Stops and targets inside a bar, against a ledger of cash and units that shares no code."""

import jax.numpy as jnp
import numpy as np
import pytest
from ledger import random_bars

import nca_trader as nca
from nca_trader import Order, Strategy, backtest, rules

COSTS = nca.Costs(commission=2e-3, slippage=1e-3)


def replay(targets, *, order="on_change"):
    """A strategy that orders row t of `targets` `[N, A]` at bar t, whatever happens."""
    table = jnp.asarray(np.vstack([targets, targets[-1:]]))
    return Strategy(lambda num_assets: 0, lambda row, bar: (row + 1, table[row]), "replay", order)


def ledger(bars, targets, fill, stop=None, trail=None, gain=None):
    """Equity at each close, of a loop over bars with cash, units, entries and best prices.

    One position per asset; a target that changes is traded to its share of equity at the fill's
    prices, sells before buys, buys scaled to the cash.
    """
    f, s = COSTS.commission, COSTS.slippage
    num_bars, num_assets = targets.shape
    cash, units = 1.0, np.zeros(num_assets)
    entry, best = np.full(num_assets, np.nan), np.full(num_assets, np.nan)
    asked, waiting, out = np.full(num_assets, np.nan), None, np.zeros(num_assets, bool)
    equity, left = np.zeros(num_bars), []

    def trade(i, size, price):
        nonlocal cash
        paid = price * (1 + s * np.sign(size))
        cash -= size * paid + f * abs(size) * paid
        units[i] += size

    def fill_at(prices, weights):
        # The position that each changed order wants, at equity before costs.
        total = cash + units @ prices
        wanted = {i: w * total / prices[i] - units[i] for i, w in weights.items()}
        for i, size in wanted.items():
            if size < 0:
                trade(i, size, prices[i])
        need = sum(size * prices[i] * (1 + s) * (1 + f) for i, size in wanted.items() if size > 0)
        share = min(1.0, max(cash, 0.0) / need) if need > 0 else 1.0
        for i, size in wanted.items():
            if size > 0:
                trade(i, size * share, prices[i])
        for i in wanted:
            if abs(units[i]) * prices[i] < 1e-9:
                units[i], entry[i], best[i] = 0.0, np.nan, np.nan
            else:  # every order here opens or reverses
                entry[i] = best[i] = prices[i]

    for t in range(num_bars):
        opens, highs, lows, closes = (
            getattr(bars, name)[t] for name in ("open", "high", "low", "close")
        )
        if fill == "next_open" and waiting:
            fill_at(opens, waiting)
            waiting = None
        for i in np.flatnonzero(units):
            long = units[i] > 0
            sign = 1 if long else -1
            stops = [entry[i] * (1 - sign * stop)] if stop else []
            stops += [best[i] * (1 - sign * trail)] if trail else []
            price = None
            if stops:
                level = max(stops) if long else min(stops)
                if (lows[i] <= level) if long else (highs[i] >= level):
                    price = min(opens[i], level) if long else max(opens[i], level)
            if price is None and gain:
                level = entry[i] * (1 + sign * gain)
                if (highs[i] >= level) if long else (lows[i] <= level):
                    price = max(opens[i], level) if long else min(opens[i], level)
            if price is not None:
                trade(i, -units[i], price)
                entry[i] = best[i] = np.nan
                out[i] = True
                left.append((t, int(i), price))
            else:
                best[i] = max(best[i], highs[i]) if long else min(best[i], lows[i])
        orders = {}
        for i in range(num_assets):
            if targets[t, i] != asked[i]:
                orders[i], asked[i], out[i] = targets[t, i], targets[t, i], False
        if fill == "close" and orders:
            fill_at(closes, orders)
        elif orders:
            waiting = {**(waiting or {}), **orders}
        equity[t] = cash + units @ closes
    return equity, left


def drawn_targets(rng, num_bars, num_assets):
    """Targets of -0.375, 0 or 0.375 that last for some bars; a change always reverses or closes."""
    draws = rng.choice([-0.375, 0.0, 0.375], (num_bars, num_assets))
    keep = rng.random((num_bars, num_assets)) < 0.9
    for t in range(1, num_bars):
        draws[t] = np.where(keep[t], draws[t - 1], draws[t])
    return draws


@pytest.mark.parametrize("fill", ["next_open", "close"])
@pytest.mark.parametrize(
    "levels",
    [{"stop": 0.02}, {"trail": 0.03}, {"gain": 0.02}, {"stop": 0.03, "trail": 0.04, "gain": 0.03}],
    ids=lambda levels: "+".join(levels),
)
@pytest.mark.few(4)
def test_equity_equals_the_ledgers_bar_by_bar(fill, levels):
    rng = np.random.default_rng(1)
    bars = random_bars(rng, 600, 2)
    targets = drawn_targets(rng, 600, 2)
    strategy = replay(targets)
    for name, level in levels.items():
        method = {"stop": "with_stop", "trail": "with_trailing_stop", "gain": "with_take_profit"}
        strategy = getattr(strategy, method[name])(level)
    result = backtest(bars, strategy, COSTS, fill)
    equity, left = ledger(bars, targets, fill, **levels)
    assert len(left) > 10
    np.testing.assert_allclose(result.equity.to_numpy(), equity, rtol=1e-11)


def bars_of(*rows):
    """Daily bars of one asset from rows of open, high, low, close."""
    o, h, l, c = (np.array(column, float)[:, None] for column in zip(*rows, strict=True))  # noqa: E741
    time = np.datetime64("2020-01-01", "ns") + np.arange(len(rows)) * np.timedelta64(1, "D")
    return nca.Bars(
        time=time, symbols=("X",), open=o, high=h, low=l, close=c,
        volume=np.ones_like(o), present=np.ones(o.shape, bool),
    )  # fmt: skip


FLAT = (100.0, 100.0, 100.0, 100.0)


LONG, SHORT = (
    Strategy(lambda num_assets: (), lambda s, bar, side=side: (s, side))
    .with_stop(0.05)
    .with_take_profit(0.1)
    for side in (1.0, -1.0)
)


@pytest.mark.parametrize(
    ("side", "bar", "price"),
    [
        (1, (100, 101, 94, 96), 95.0),  # the stop
        (1, (93, 99, 92, 98), 93.0),  # a gap through the stop fills at the open
        (1, (100, 112, 99, 111), 110.0),  # the target
        (1, (113, 115, 112, 114), 113.0),  # a gap through the target
        (1, (100, 120, 90, 100), 95.0),  # both: the stop
        (-1, (100, 106, 99, 104), 105.0),
        (-1, (107, 108, 101, 102), 107.0),
        (-1, (100, 101, 88, 89), 90.0),
        (-1, (87, 88, 85, 86), 87.0),
        (-1, (100, 110, 80, 100), 105.0),
    ],
)
def test_a_fill_inside_a_bar(side, bar, price):
    bars = bars_of(FLAT, FLAT, bar, FLAT, FLAT)
    equity = backtest(bars, LONG if side > 0 else SHORT).equity.to_numpy()
    # Equity of 1 at 100, one unit long or short, and flat afterwards.
    np.testing.assert_allclose(equity[2:], 1.0 + side * (price - 100) / 100, rtol=1e-12)


def test_an_exit_in_the_bar_of_the_entry():
    bars = bars_of(FLAT, (100, 101, 90, 99), FLAT)
    equity = backtest(bars, LONG).equity.to_numpy()
    np.testing.assert_allclose(equity, [1.0, 0.95, 0.95])


def test_a_trailing_stop_uses_earlier_bars_only():
    # The bar that makes the high does not raise the stop that its own low is compared with.
    bars = bars_of(FLAT, FLAT, (100, 120, 100, 119), (119, 119, 107, 110), FLAT)
    equity = backtest(bars, replay(np.ones((5, 1))).with_trailing_stop(0.1)).equity.to_numpy()
    np.testing.assert_allclose(equity, [1.0, 1.0, 1.19, 1.08, 1.08])


def test_prices_given_with_the_order():
    def act(row, bar):
        target = jnp.ones(1)
        return row + 1, Order(target, stop_price=bar.close - 3.0, limit_price=bar.close + 50.0)

    bars = bars_of(FLAT, FLAT, (100, 100, 96, 99), FLAT, FLAT)
    result = backtest(bars, Strategy(lambda num_assets: 0, act))
    np.testing.assert_allclose(result.equity.to_numpy(), [1.0, 1.0, 0.97, 0.97, 0.97])


def test_an_asset_stays_flat_until_its_target_changes():
    targets = np.array([1, 1, 1, 1, 0.5, 0.5, 0.5])[:, None]
    bars = bars_of(FLAT, FLAT, (100, 100, 90, 91), FLAT, FLAT, FLAT, FLAT)
    for order in ("on_change", "rebalance"):
        result = backtest(bars, replay(targets, order=order).with_stop(0.05))
        np.testing.assert_array_equal(result.weights["X"].round(9), [0, 1, 0, 0, 0, 0.5, 0.5])


def test_a_change_of_size_does_not_reopen_what_a_stop_closed():
    rng = np.random.default_rng(4)
    bars = random_bars(rng, 300, 1)
    sized = rules.volatility_hold(0.3, span=10.0).with_stop(0.06)
    weights = backtest(bars, sized).weights.to_numpy()[:, 0]
    assert (weights != 0.0).any() and weights[-1] == 0.0
    opened = (weights[1:] != 0.0) & (weights[:-1] == 0.0)
    assert opened.sum() == 1


def test_the_portfolio_is_what_a_hand_would_note():
    seen = []

    def act(row, bar, portfolio):
        import jax

        jax.debug.callback(lambda *x: seen.append([float(np.ravel(v)[0]) for v in x]), *portfolio)
        return row + 1, jnp.where(row == 0, 0.5, jnp.where(row == 3, 0.0, jnp.nan))[None]

    bars = bars_of(FLAT, (100, 110, 100, 110), (110, 130, 100, 120), (120, 121, 119, 120), FLAT)
    backtest(bars, Strategy(lambda num_assets: 0, act))
    weight, entry, held, best, equity, peak = np.array(seen).T
    np.testing.assert_allclose(entry, [np.nan, 100, 100, 100, np.nan])
    np.testing.assert_allclose(held, [0, 1, 2, 3, 0])
    np.testing.assert_allclose(best, [np.nan, 110, 130, 130, np.nan])
    np.testing.assert_allclose(equity, [1, 1.05, 1.10, 1.10, 1.0])
    np.testing.assert_allclose(peak, [1, 1.05, 1.10, 1.10, 1.10])
    np.testing.assert_allclose(weight, [0, 0.55 / 1.05, 0.6 / 1.1, 0.6 / 1.1, 0], atol=1e-12)


def test_a_span_begins_with_the_order_in_force():
    rng = np.random.default_rng(5)
    bars = random_bars(rng, 200, 1)
    plain = rules.sma_cross(3, 8)
    # A stop that no bar reaches takes the other way through the code.
    far = plain.with_stop(0.99)
    start = str(bars.index[100].date())
    a, b = (backtest(bars, s, COSTS, start=start).equity for s in (plain, far))
    np.testing.assert_allclose(a, b, rtol=1e-12)
