"""Functions of past bars as features: their values by pandas, and functions that are refused."""

import dataclasses

import jax
import numpy as np
import pandas as pd
import pytest
from drawn import random_bars
from tiny import AGENT
from untrained import untrained_run

import nca_trader as nca
from nca_trader.data.feature_sets import FeatureSet, feature_set
from nca_trader.data.resampling import align, resample
from nca_trader.errors import ConfigError
from nca_trader.paper.journal.journal import read_events
from nca_trader.runs.portable import portable


def over_mean(close, scale=1.0):
    return scale * (close[-1] / close.mean() - 1.0)


def set_of(feature):
    return FeatureSet(("own",), {"own": feature})


def values_of(feature, bars):
    return set_of(feature).batch(bars)[..., 0]


@pytest.fixture(scope="module")
def bars():
    return random_bars(np.random.default_rng(2), 300, 2, missing=0.1)


def test_a_function_of_the_last_bars_is_that_of_pandas_rolling_windows(bars):
    plain = nca.indicator(over_mean, "close", lookback=20, raw=True, scale=3.0)
    scored = nca.indicator(over_mean, "close", lookback=20, scale=3.0)
    found, scores = values_of(plain, bars), values_of(scored, bars)
    assert (plain.warmup, scored.warmup) == (19, 79)
    for a in range(2):
        there = bars.present[:, a]
        close = pd.Series(bars.close[there, a])
        want = 3.0 * (close / close.rolling(20).mean() - 1.0)
        np.testing.assert_allclose(found[there, a], want.fillna(0.0), rtol=1e-5, atol=1e-7)
        past = want.dropna().ewm(span=60)
        z = (want.dropna() - past.mean().shift()) / past.std(bias=True).shift()
        np.testing.assert_allclose(scores[there, a][79:], z[60:], rtol=1e-4, atol=1e-6)
        assert (scores[there, a][:79] == 0).all()
        assert (found[~there, a] == 0).all() and (scores[~there, a] == 0).all()


@pytest.mark.parametrize("raw", [True, False])
def test_bar_by_bar_python_is_asked_for_the_same_bits(bars, raw):
    features = set_of(nca.indicator(over_mean, "close", lookback=7, raw=raw))
    state, columns, found = features.init(2), bars.as_bar(), features.batch(bars)
    for row in range(150):
        state, values = features.step(state, jax.tree.map(lambda x, row=row: x[row], columns))
        np.testing.assert_array_equal(values, found[row])
    assert (found[100:] != 0).any()


def spoiled(high, low):
    high -= low  # changes what it was given
    return pd.Series(high).rolling(3).mean()


def test_columns_come_in_their_order_and_a_function_may_change_them(bars):
    ranged = nca.indicator(spoiled, "high", "low", lookback=3, raw=True)
    found = values_of(ranged, bars)
    np.testing.assert_array_equal(found, values_of(ranged, bars))
    there = bars.present[:, 0]
    want = pd.Series((bars.high - bars.low)[there, 0]).rolling(3).mean().fillna(0.0)
    np.testing.assert_allclose(found[there, 0], want, rtol=1e-6)


def centred(close):
    return pd.Series(close).rolling(5, center=True).mean()


@pytest.mark.parametrize(("function", "columns", "lookback", "message"), [
    (centred, ("close",), 20, "centred: gives nan for the newest of 20 bars; state a longer"),
    (lambda x: pd.Series(x).rolling(9).mean(), ("close",), 8, "gives nan for the newest of 8 bars"),
    (lambda x: (x, x), ("close",), 8, r"returns the shape \(2, 8\) of 8 bars; return one number"),
    (lambda x: x[:3], ("close",), 8, r"returns the shape \(3,\) of 8 bars"),
    (lambda x: "up", ("close",), 8, "could not convert string to float"),
    (lambda x: 1 / 0, ("close",), 8, "ZeroDivisionError at .*: division by zero; correct that"),
    (over_mean, ("closes",), 8, "unknown column 'closes'; did you mean 'close'"),
    (over_mean, (), 8, "takes columns of bars; name them in order"),
    (over_mean, ("close",), 0, "lookback = 0: an indicator takes 1 to 8192 bars here"),
    (over_mean, ("close",), 10**9, "lookback = 1000000000: an indicator"),
    (over_mean, ("close",), True, "lookback = True: an indicator"),
    (3, ("close",), 8, "is of a function, not of the number 3"),
    (over_mean, ("close", "high", "low"), 5, "TypeError"),
])  # fmt: skip
def test_what_is_no_function_of_past_bars_is_refused_in_one_line(
    function, columns, lookback, message
):
    with pytest.raises(ConfigError, match=message) as caught:
        nca.indicator(function, *columns, lookback=lookback)
    assert "\n" not in str(caught.value)


def test_values_that_are_not_finite_and_columns_that_lack_are_named(bars):
    calm = dataclasses.replace(
        bars, **dict.fromkeys(("open", "high", "low", "close"), bars.close * 0 + 5)
    )
    steep = nca.indicator(lambda x: 1.0 / np.ptp(x), "close", lookback=3)
    with (
        np.errstate(divide="ignore"),
        pytest.raises(ConfigError, match=r"gives inf at row \d+ of S0"),
    ):
        values_of(steep, calm)
    quoted = nca.indicator(over_mean, "half_spread", lookback=3)
    with pytest.raises(ConfigError, match="over_mean: takes half_spread, which the bars lack"):
        values_of(quoted, bars)


OWN = """
import nca_trader as nca

def over_mean(period=5):
    return nca.indicator(lambda x: x[-1] / x.mean() - 1.0, "close", lookback=period)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_indicator.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.heavy
def test_a_slower_time_frame_and_a_session_see_the_same(own):
    hours = random_bars(np.random.default_rng(3), 300, 2, unit="h")
    nca.write_bars(hours, own / "bars.parquet")
    name = "own_indicator:over_mean(period=4)"
    found = feature_set((f"2h:{name}",), 3600).batch(hours)
    slow = resample(hours, "2h")
    values, rows = feature_set((name,)).batch(slow), align(slow, hours)
    joined = np.where(rows[:, None, None] < 0, 0.0, values[np.maximum(rows, 0)])
    here = hours.present & slow.present[np.maximum(rows, 0)]
    np.testing.assert_array_equal(found[here], joined[here])
    env = nca.EnvConfig(features=(name, f"2h:{name}"))
    run = untrained_run(own / "runs" / "own", hours[:200], env, AGENT)
    nca.paper_trade(run.path, f"replay:{own}/bars.parquet", own / "paper.db")
    events = list(read_events(own / "paper.db", "decision"))
    at = np.searchsorted(hours.time.astype(np.int64), [event.ts_event for event in events])
    result = nca.backtest(hours, run, start=str(hours.time[0]), look=False)
    assert len(events) > 50
    paper = np.array([event.body["target"] for event in events])
    np.testing.assert_array_equal(paper, result.targets.to_numpy()[at])
    with pytest.raises(ConfigError, match="cannot be compiled for another process"):
        portable(run)


def test_indicators_of_ta_lib_are_its_own(bars):
    talib = pytest.importorskip("talib", reason="TA-Lib is not installed")
    one = random_bars(np.random.default_rng(4), 500, 1)
    close, high, low = (getattr(one, name)[:, 0] for name in ("close", "high", "low"))
    rsi = nca.indicator(talib.RSI, "close", lookback=200, raw=True, timeperiod=14)
    np.testing.assert_allclose(
        values_of(rsi, one)[199:, 0], talib.RSI(close, timeperiod=14)[199:], rtol=1e-4
    )
    ours = feature_set(("rsi",)).batch(one)[199:, 0, 0]
    np.testing.assert_allclose(values_of(rsi, one)[199:, 0] / 50 - 1, ours, atol=1e-4)
    atr = nca.indicator(talib.ATR, "high", "low", "close", lookback=200, raw=True)
    np.testing.assert_allclose(
        values_of(atr, one)[199:, 0], talib.ATR(high, low, close)[199:], rtol=1e-4
    )
    with pytest.raises(ConfigError, match="RSI: gives nan for the newest of 10 bars"):
        nca.indicator(talib.RSI, "close", lookback=10)
    with pytest.raises(ConfigError, match=r"MACD: returns the shape \(3, 99\)"):
        nca.indicator(talib.MACD, "close", lookback=99)


def whole(close):
    return (close - close.mean()) / close.std()


@pytest.mark.heavy
def test_leakcheck_passes_a_function_of_past_bars_and_finds_one_that_knows_all(bars):
    one = bars.select("S0")
    report = nca.leakcheck(nca.indicator(whole, "close", lookback=30), one, cases=12)
    assert report.ok and report.reacted > 4, report  # of its own window
    # As plain functions of whole columns both look ahead.
    assert not nca.leakcheck(lambda bars: whole(bars.close), one, cases=12).ok
    assert not nca.leakcheck(lambda bars: centred(bars.close[:, 0]), one, cases=12).ok

    def leaky(bars):
        """Planted: the function keeps all closes, and looks up the next one."""
        after = dict(zip(bars.close[:-1, 0], bars.close[1:, 0], strict=True))
        ahead = nca.indicator(
            lambda close: after.get(close[-1], close[-1]) / close[-1], "close", lookback=5, raw=True
        )
        return values_of(ahead, bars)

    report = nca.leakcheck(leaky, one, cases=12)
    assert not report.ok and "close" in report.columns, report
    calls = []

    def counts(close):
        calls.append(1)
        return close[-1] * len(calls)

    with pytest.raises(ConfigError, match="gives other values when it is called again"):
        nca.leakcheck(nca.indicator(counts, "close", lookback=5), one, cases=5)


@pytest.mark.heavy
def test_leakcheck_says_what_a_longer_lookback_would_change(bars):
    def average(close):
        return pd.Series(close).ewm(span=10).mean()

    def notes(lookback):
        return nca.leakcheck(
            nca.indicator(average, "close", lookback=lookback), bars, cases=5
        ).notes

    _, note = notes(12)  # the first is of the bars that cases are of
    assert "with twice its lookback of 12 bars a value of average differs by up to" in note
    assert notes(80) == ()
