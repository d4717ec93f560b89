"""Each rule against a derivation in pandas."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
from ledger import random_bars

from nca_trader import ConfigError, rules
from nca_trader.evaluate.targets import strategy_targets

RULES = (
    rules.buy_and_hold(),
    rules.always_flat(),
    rules.sma_cross(3, 8),
    rules.momentum(5),
)


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


def by_asset(bars, signal):
    """`signal(closes)` of each asset's own closes, held over bars that are missing; flat first."""
    columns = []
    for i in range(bars.num_assets):
        closes = pd.Series(bars.close[:, i])[bars.present[:, i]]
        columns.append(signal(closes).astype(float).reindex(range(len(bars))).ffill().fillna(0.0))
    return np.stack(columns, axis=1) / bars.num_assets


@pytest.mark.parametrize(("fast", "slow"), [(1, 2), (3, 8), (10, 30)])
def test_sma_cross_equals_rolling_means(fast, slow):
    def signal(closes):
        return (closes.rolling(fast).mean() > closes.rolling(slow).mean()) & (
            closes.expanding().count() >= slow
        )

    for bars in (random_bars(np.random.default_rng(1), 120, 2), late_bars()):
        targets = strategy_targets(bars, rules.sma_cross(fast, slow))
        np.testing.assert_array_equal(targets, by_asset(bars, signal))
        assert 0.1 < (targets > 0).mean() < 0.9


@pytest.mark.parametrize("lookback", [1, 5, 50])
def test_momentum_compares_with_the_close_that_many_bars_ago(lookback):
    for bars in (random_bars(np.random.default_rng(2), 120, 2), late_bars()):
        targets = strategy_targets(bars, rules.momentum(lookback))
        expected = by_asset(bars, lambda closes: closes > closes.shift(lookback))
        np.testing.assert_array_equal(targets, expected)
        assert (targets > 0).any()


def test_buy_and_hold_orders_each_asset_once_in_its_first_bar():
    bars = late_bars(missing=0.3)
    targets = strategy_targets(bars, rules.buy_and_hold())
    for i in range(3):
        first = int(bars.present[:, i].argmax())
        assert targets[first, i] == pytest.approx(1 / 3)
        assert np.isnan(np.delete(targets[:, i], first)).all()
    assert not np.isnan(targets[20, 2])


def test_always_flat_orders_nothing_else():
    assert (strategy_targets(late_bars(), rules.always_flat()) == 0.0).all()


@pytest.mark.parametrize("strategy", RULES, ids=lambda s: s.name)
def test_later_bars_change_no_earlier_target(strategy):
    bars = late_bars()
    fields = {name: getattr(bars, name).copy() for name in ("open", "high", "low", "close")}
    for values in fields.values():
        values[60:] = values[60:][::-1] * 1.5
    changed = dataclasses.replace(bars, **fields)
    before, after = (strategy_targets(b, strategy) for b in (bars, changed))
    np.testing.assert_array_equal(before[:60], after[:60])
    if strategy.name.startswith(("SMA", "momentum")):
        assert (before[60:] != after[60:]).any()


@pytest.mark.parametrize("strategy", RULES, ids=lambda s: s.name)
def test_targets_are_weights_whatever_is_missing(strategy):
    targets = strategy_targets(late_bars(missing=0.5), strategy)
    ordered = targets[~np.isnan(targets)]
    assert ((ordered >= 0) & (ordered <= 1 / 3)).all() and len(ordered)


@pytest.mark.parametrize(
    ("rule", "arguments"), [("sma_cross", (5, 5)), ("sma_cross", (0, 5)), ("momentum", (0,))]
)
def test_parameters_that_make_no_rule_are_refused(rule, arguments):
    with pytest.raises(ConfigError, match=rule):
        getattr(rules, rule)(*arguments)
