"""Features compared among assets, against pandas: `rank:NAME` and `zscore:NAME`."""

import dataclasses

import jax
import numpy as np
import pandas as pd
import pytest
from drawn import rich_bars

import nca_trader as nca
from nca_trader.config import EnvConfig
from nca_trader.data.feature_sets import compared, feature_set
from nca_trader.data.features import FEATURES, Feature, make_feature
from nca_trader.errors import ConfigError
from nca_trader.numerics import MOST_ASSETS, float64_on_cpu

HOURS = pd.date_range("2024-01-01", periods=400, freq="h").to_numpy("datetime64[ns]")
NAMES = ("rsi", "rank:rsi", "zscore:4h:return_1", "rank:volume", "4h:return_1", "zscore:return_5")


def drawn(num_assets, num_bars=400, missing=0.1, seed=0):
    """Random bars of an hour, some of them missing."""
    bars = rich_bars(np.random.default_rng(seed), num_bars, num_assets, missing, spread=0.003)
    return dataclasses.replace(bars, time=HOURS[:num_bars])


def known_of(name, bars):
    """Where a feature's value is meaningful, from its warm-up and the bars alone."""
    counted = bars.present & (bars.volume > 0) if name == "volume" else bars.present
    before = np.vstack([np.zeros_like(counted[:1]), counted[:-1]]).cumsum(0)
    return counted & (before >= FEATURES[name].warmup)


def by_pandas(how, values, known):
    """The definition, row by row."""
    x = pd.DataFrame(np.where(known, values, np.nan))
    count = x.notna().sum(axis=1)
    if how == "rank":
        found = (2 * x.rank(axis=1)).sub(count + 1, axis=0).div(count - 1, axis=0)
    else:
        away = x.sub(x.mean(axis=1), axis=0)
        found = away.div(x.std(axis=1, ddof=0), axis=0)
    return found.replace([np.inf, -np.inf], 0.0).fillna(0.0).to_numpy()


@pytest.mark.parametrize("num_assets", [5, MOST_ASSETS + 3])
def test_a_comparison_is_that_of_pandas_among_the_assets_that_have_a_value(num_assets):
    bars = drawn(num_assets)
    later = bars.present & (np.arange(400)[:, None] >= [0, 150, *[0] * (num_assets - 2)])
    bars = dataclasses.replace(bars, present=later)  # the second is listed later
    found = feature_set(NAMES, 3600).batch(bars)
    plain = feature_set(("rsi", "volume", "return_5"), 3600).batch(bars).astype(np.float64)
    for how, name, at, of in (
        ("rank", "rsi", 1, 0), ("rank", "volume", 3, 1), ("zscore", "return_5", 5, 2)
    ):  # fmt: skip
        wanted = by_pandas(how, plain[..., of], known_of(name, bars))
        # pandas is given float32 values, in which a few differ by rounding or tie.
        np.testing.assert_allclose(found[..., at], wanted, atol=2e-4 if how == "zscore" else 1e-6)
        assert np.abs(wanted).max() > 0.9
    alone = feature_set(("rsi", "4h:return_1"), 3600).batch(bars)
    np.testing.assert_array_equal(found[..., [0, 4]], alone)


def test_a_slow_frame_compares_the_values_of_its_last_bar():
    bars = drawn(4, missing=0.0)
    found = feature_set(("4h:rsi", "rank:4h:rsi"), 3600).batch(bars)
    slow, ranks = np.moveaxis(found.astype(np.float64), -1, 0)
    known = slow != 0.0
    np.testing.assert_allclose(ranks[100:], by_pandas("rank", slow, known)[100:], atol=1e-6)
    assert (ranks[slow == 0.0] == 0.0).all() and np.abs(ranks).max() == 1.0


@pytest.mark.parametrize("num_assets", [3, 17, MOST_ASSETS + 1])
def test_a_stream_sees_the_bits_of_the_batch(num_assets):
    bars, features = drawn(num_assets, 150), feature_set(NAMES, 3600)
    whole, state, every = features.batch(bars), features.init(num_assets), bars.as_bar()
    for row in range(len(bars)):
        state, values = features.step(state, jax.tree.map(lambda x, row=row: x[row], every))
        np.testing.assert_array_equal(values, whole[row])


def of(how, values, known=None):
    """A comparison of a few numbers."""
    x = np.asarray(values, np.float64)
    with float64_on_cpu():
        return np.asarray(compared(how, x, np.ones(len(x), bool) if known is None else known))


def test_ties_share_their_rank_one_asset_has_none_and_equal_values_no_deviation():
    assert of("rank", [3.0, 1.0, 3.0, 7.0]).tolist() == [0.0, -1.0, 0.0, 1.0]
    assert of("rank", [5.0]).tolist() == of("zscore", [5.0]).tolist() == [0.0]
    assert of("rank", [2.0, 2.0]).tolist() == of("zscore", [0.1] * 3 + [0.1]).tolist()[:2] == [0, 0]
    missing = np.array([True, False, True])
    assert of("rank", [1.0, 9.0, 2.0], missing).tolist() == [-1.0, 0.0, 1.0]
    assert of("zscore", [1.0, 9.0, 3.0], missing).tolist() == [-1.0, 0.0, 1.0]
    assert not of("rank", [1.0, 2.0], np.zeros(2, bool)).any()
    for count in (4, 40):  # what an own feature does not know is not compared
        values = [np.nan, np.inf, *range(count)]
        assert of("rank", values).tolist() == [0.0, 0.0, *of("rank", range(count))]
    np.testing.assert_allclose(of("rank", range(40)), (2 * np.arange(40) - 39) / 39, rtol=1e-14)


def test_a_comparison_passes_the_check_for_look_ahead_and_waits_for_its_warmup():
    report = nca.leakcheck("rank:rsi", drawn(4), cases=20)
    assert not report.leaks and report.reacted
    assert feature_set(("zscore:macd",)).warmup == FEATURES["macd"].warmup
    found = feature_set(("rank:return_1",)).batch(drawn(3, missing=0.0))[..., 0]
    first = FEATURES["return_1"].warmup
    assert not found[:first].any() and (np.sort(found[first:]) == [-1.0, 0.0, 1.0]).all()


def bare():
    return Feature(lambda: np.zeros(()), lambda last, bar: (bar.close, bar.close - last), 1)


def made():
    return make_feature(lambda: (), lambda s, bar, count: (s, bar.close), warmup=2)


def test_own_features_are_compared_where_they_say_what_is_known():
    bars = drawn(3, missing=0.0)
    name = f"{__name__}:made"
    found = feature_set((f"rank:{name}",)).batch(bars)[..., 0]
    rank = pd.DataFrame(bars.close).rank(axis=1).to_numpy() - 2
    np.testing.assert_array_equal(found[2:], rank[2:])
    assert not found[:2].any()
    with pytest.raises(ConfigError, match="does not say from which bar on its value is known"):
        feature_set((f"rank:{__name__}:bare",))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("4h:rank:rsi", "'rank' comes first; give 'rank:4h:rsi'"),
        ("rank:zscore:rsi", "a comparison is of a feature alone; give 'zscore:rsi'"),
        ("rank:rzi", "unknown feature 'rzi'; did you mean 'rsi'"),
        ("rank:", "unknown feature 'rank:'"),
        ("rank:4h:column:vix", "a column has no time frame of its own"),
    ],
)
def test_a_comparison_that_cannot_be_made_is_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        feature_set((name,), 3600)


def test_an_environment_observes_comparisons():
    bars, config = drawn(3), EnvConfig(features=("return_1", "rank:return_1"))
    shown = feature_set(config.features).batch(bars)
    np.testing.assert_array_equal(np.asarray(nca.TradingEnv(bars, config).features), shown)
