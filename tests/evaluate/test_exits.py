"""Stops and targets inside a bar by hand; `test_judge.py` has those of drawn accounts."""

import drawn
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import random_bars

import nca_trader as nca
from nca_trader import Strategy, backtest, rules

COSTS = nca.Costs(commission=2e-3, slippage=1e-3)


def replay(targets, *, order="on_change"):
    """A strategy that orders row t of `targets` `[N, A]` at bar t, whatever happens."""
    table = jnp.asarray(np.vstack([targets, targets[-1:]]))
    return Strategy(lambda num_assets: 0, lambda row, bar: (row + 1, table[row]), "replay", order)


def bars_of(*rows):
    """Daily bars of one asset from rows of open, high, low, close."""
    o, h, l, c = (np.array(column, float)[:, None] for column in zip(*rows, strict=True))  # noqa: E741
    return drawn.bars_of(c, o, high=h, low=l, symbols=("X",))


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
        (1, (120, 121, 80, 85), 120.0),  # but the open decides before it
        (-1, (80, 130, 79, 120), 80.0),
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


def test_an_asset_that_is_not_listed_yet_leaves_stops_and_impact_alone():
    """Equity of 1000 buys 10 units at 100 with an impact of .1 sqrt(10 / 1000) of the price."""
    bars = bars_of(FLAT, FLAT, FLAT)
    late = {
        name: np.hstack([getattr(bars, name), np.full((3, 1), fill)])
        for name, fill in [(x, np.nan) for x in ("open", "high", "low", "close")] + [("volume", 0)]
    }
    late["volume"][:, 0] = 1000.0
    present = np.array([[True, False]] * 3)
    bars = nca.Bars(time=bars.time, symbols=("X", "Y"), present=present, **late)
    strategy = replay(np.array([[1.0, 0.0]] * 3)).with_stop(0.5)
    costs = nca.Costs(impact=0.1)
    equity = backtest(bars, strategy, costs, borrow=True, capital=1000.0).equity
    np.testing.assert_allclose(equity, [1.0, 0.99, 0.99], rtol=1e-12)


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
    weight, entry, held, best, equity, peak, trading = np.array(seen).T
    assert trading.all()
    np.testing.assert_allclose(entry, [np.nan, 100, 100, 100, np.nan])
    np.testing.assert_allclose(held, [0, 1, 2, 3, 0])
    np.testing.assert_allclose(best, [np.nan, 110, 130, 130, np.nan])
    np.testing.assert_allclose(equity, [1, 1.05, 1.10, 1.10, 1.0])
    np.testing.assert_allclose(peak, [1, 1.05, 1.10, 1.10, 1.10])
    np.testing.assert_allclose(weight, [0, 0.55 / 1.05, 0.6 / 1.1, 0.6 / 1.1, 0], atol=1e-12)


@pytest.mark.heavy
def test_a_span_begins_with_the_order_in_force():
    rng = np.random.default_rng(5)
    bars = random_bars(rng, 200, 1)
    plain = rules.sma_cross(3, 8)
    # A stop that no bar reaches takes the other way through the code.
    far = plain.with_stop(0.99)
    start = str(bars.index[100].date())
    a, b = (backtest(bars, s, COSTS, start=start).equity for s in (plain, far))
    np.testing.assert_allclose(a, b, rtol=1e-12)
