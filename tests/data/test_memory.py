"""How many bars a feature remembers: its value on so many bars is that on all of them."""

import numpy as np
import pytest
from drawn import random_bars, rich_bars

from nca_trader.data.feature_sets import FeatureSet, feature_set
from nca_trader.data.features import (
    BUILT_IN,
    add,
    bars_to_forget,
    empty_average,
    level,
    return_level,
)
from nca_trader.data.indicators import indicator

LONG = ("price_level", "volume_level", "return_level")


@pytest.mark.parametrize("span", [2, 9.5, 60, 252])
def test_an_average_forgets_after_as_many_values_as_weigh_less_than_rounding(span):
    keep, bars = 1.0 - 2.0 / (span + 1.0), bars_to_forget(span)
    assert keep**bars <= 2.0**-52 < keep ** (bars - 1)
    values = np.random.default_rng(0).lognormal(size=3 * bars)
    whole = part = empty_average()
    for number, x in enumerate(values):
        whole = add(whole, x, span)
        part = add(part, x, span) if number >= 2 * bars else part
    np.testing.assert_allclose(part.mean, whole.mean, rtol=1e-13)


def values_of(bars, names):
    return feature_set(names, 86_400).batch(bars)


def test_a_features_value_is_that_of_its_last_bars():
    names = tuple(name for name in BUILT_IN if name not in LONG)
    bars = random_bars(np.random.default_rng(1), 9_000, 1)
    whole = values_of(bars, names)
    for count in {BUILT_IN[name].memory for name in names}:
        alike = tuple(name for name in names if BUILT_IN[name].memory == count)
        part, want = values_of(bars[-count:], alike), whole[..., [names.index(x) for x in alike]]
        np.testing.assert_allclose(part[-1], want[-1], rtol=2e-6, atol=2e-6, err_msg=str(alike))
    needed = feature_set(names).memory
    assert needed == max(BUILT_IN[name].memory for name in names) < 9_000
    assert BUILT_IN["bollinger"].memory == 20 and BUILT_IN["rsi"].memory < 300
    assert feature_set(LONG).memory > 30_000


def test_missing_bars_are_not_counted():
    parts = {
        "level": level(lambda bar: bar.close, lambda bar: bar.present, span=300),
        "returns": return_level(300),
        "own": indicator(lambda x: x.mean(), "close", lookback=30),
    }
    bars = rich_bars(np.random.default_rng(2), 6_000, 2)[:3_900]  # before an asset goes
    for name, feature in parts.items():
        found = FeatureSet((name,), {name: feature})
        first = min(np.flatnonzero(there)[-found.memory] for there in bars.present.T)
        part, whole = found.batch(bars[first:])[-1], found.batch(bars)[-1]
        np.testing.assert_allclose(part, whole, rtol=2e-6, atol=2e-6)


def test_a_slower_frame_counts_its_own_bars():
    bars = random_bars(np.random.default_rng(3), 4_500, 1, unit="m")
    found = feature_set(("15min:rsi", "5min:macd"), 60)
    assert 15 * 230 < found.memory < 15 * 260
    whole = found.batch(bars)
    for late in range(0, 17, 4):  # whatever bar is the first
        part = found.batch(bars[-found.memory - late : len(bars) - late])
        np.testing.assert_allclose(part[-1], whole[-1 - late], rtol=2e-6, atol=2e-6)
