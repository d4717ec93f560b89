"""Columns of one's own: joined as of when they were known, carried along, and shown as features."""

import dataclasses
import pickle

import jax.numpy as jnp
import numpy as np
import pandas as pd
import polars as pl
import pytest
from drawn import random_bars

import nca_trader as nca
from nca_trader.data.bars import frame_of
from nca_trader.data.feature_sets import feature_set
from nca_trader.data.features import LEVEL_SPAN, make_feature
from nca_trader.data.shards import open_shards, write_shards
from nca_trader.envs.gym import GymEnv
from nca_trader.errors import BarError, ConfigError
from nca_trader.types import split_columns

HOUR, DAY = np.timedelta64(1, "h"), np.timedelta64(1, "D")


@pytest.fixture(scope="module")
def hours():
    """Ten days of hours of two assets, some of them missing."""
    return random_bars(np.random.default_rng(2), 240, 2, missing=0.1, unit="h")


@pytest.fixture(scope="module")
def vix():
    """A number a day from the third of the bars' days on, with a gap and an empty cell."""
    days = pd.DatetimeIndex([*pd.date_range("2020-01-03", periods=4), pd.Timestamp("2020-01-09")])
    return pd.DataFrame({"Date": days, "VIX": [20.0, 21.0, np.nan, 23.0, 24.0]})


@pytest.fixture(scope="module")
def rich(hours):
    rng = np.random.default_rng(8)
    score = rng.normal(size=(240, 2))
    score[:30, 1] = np.nan
    table = frame_of(hours).assign(Score=score.ravel())
    cpi = pd.Series([1.0, 2.0], pd.DatetimeIndex(["2020-01-01", "2020-01-06"]))
    return nca.read_bars(table, extra={"score": "Score", "cpi": (cpi, "36h")})


def by_hand(bars, rows, delay, length=HOUR):
    """The last value known at each bar's close, by a loop over all rows of the frame."""
    out = np.full(bars.close.shape, np.nan)
    for i, time in enumerate(bars.time):
        for j, symbol in enumerate(bars.symbols):
            newest = None
            for stamp, value, of in rows:
                known = np.datetime64(stamp, "ns") + delay
                if np.isfinite(value) and of in (None, symbol) and known <= time + length:
                    newest = max(newest or (known, value), (known, value), key=lambda x: x[0])
            out[i, j] = np.nan if newest is None else newest[1]
    return out


def test_a_days_value_counts_from_the_end_of_its_day(hours, vix):
    bars = nca.read_bars(frame_of(hours), extra={"vix": vix})
    rows = [(stamp, value, None) for stamp, value in zip(vix.Date, vix.VIX, strict=True)]
    np.testing.assert_array_equal(bars.columns["vix"], by_hand(hours, rows, DAY))
    at = {str(time)[:13]: value for time, value in zip(bars.time, bars.columns["vix"][:, 0],
                                                       strict=True)}  # fmt: skip
    assert np.isnan(at["2020-01-03T00"]) and np.isnan(at["2020-01-03T22"])
    # The bar from 23:00 closes at midnight, when the day is over.
    assert at["2020-01-03T23"] == 20.0 == at["2020-01-04T22"] and at["2020-01-04T23"] == 21.0
    # A day without a number keeps the last one.
    assert at["2020-01-06T12"] == 21.0 and at["2020-01-08T12"] == 23.0


@pytest.mark.parametrize("delay", ["0s", "36h", "3d"])
def test_a_stated_delay_counts_from_the_stamp(hours, delay):
    rng = np.random.default_rng(4)
    stamps = (
        hours.time[0] + rng.integers(-48, 300, 60) * HOUR + rng.integers(0, 60, 60) * (HOUR / 60)
    )
    stamps = np.unique(stamps)
    frame = pd.DataFrame({"time": stamps, "value": rng.normal(size=len(stamps))})
    frame["symbol"] = rng.choice(hours.symbols, len(frame))
    frame = frame.sample(frac=1.0, random_state=1)
    frame["time"] = frame["time"].dt.tz_localize("UTC").dt.tz_convert("Asia/Tokyo")
    rows = [*zip(frame.time.dt.tz_convert(None), frame.value, frame.symbol, strict=True)]
    want = by_hand(hours, rows, pd.Timedelta(delay.replace("3d", "3D")).to_timedelta64())
    got = nca.read_bars(frame_of(hours), extra={"x": (frame, delay)}).columns["x"]
    np.testing.assert_array_equal(got, want)
    assert 0.1 < np.isfinite(got).mean()
    same = nca.read_bars(frame_of(hours), extra={"x": (pl.from_pandas(frame), delay)})
    np.testing.assert_array_equal(same.columns["x"], want)


def test_a_value_that_comes_later_changes_no_earlier_row(hours, vix):
    """Any later number, of any stamp that was not known by then, leaves the past as it was."""
    rng = np.random.default_rng(9)
    before = nca.read_bars(frame_of(hours), extra={"vix": vix}).columns["vix"]
    for row in rng.integers(0, len(hours), 25):
        close = hours.time[row] + HOUR
        later = (vix.Date.to_numpy("datetime64[ns]") + DAY) > close
        other = vix.assign(VIX=np.where(later, rng.normal(size=len(vix)), vix.VIX))
        after = nca.read_bars(frame_of(hours), extra={"vix": other}).columns["vix"]
        np.testing.assert_array_equal(before[: row + 1], after[: row + 1])
        assert later.sum() < 2 or (before[-1] != after[-1]).all()


def test_a_column_of_the_file_is_of_its_row_or_later(hours, tmp_path):
    table = frame_of(hours).assign(Score=np.arange(480.0))
    table.loc[100:109, "Score"] = np.nan
    table.to_csv(tmp_path / "bars.csv", index=False)
    bars = nca.read_bars(tmp_path / "bars.csv", extra="score=Score")
    given = table.Score.to_numpy().reshape(240, 2)
    want = pd.DataFrame(given).ffill().to_numpy()
    np.testing.assert_array_equal(bars.columns["score"], want)
    late = nca.read_bars(tmp_path / "bars.csv", extra="score=Score+3h").columns["score"]
    np.testing.assert_array_equal(late[2:], want[:-2])
    assert np.isnan(late[:2]).all()


def test_columns_go_where_the_bars_go(rich, hours, tmp_path):
    assert rich.fields[-2:] == ("column:cpi", "column:score")
    assert [*rich.columns] == ["cpi", "score"] and rich.digest() != hours.digest()
    for suffix in ("parquet", "feather", "csv.gz"):
        nca.write_bars(rich, tmp_path / f"bars.{suffix}")
        assert nca.read_bars(tmp_path / f"bars.{suffix}").digest() == rich.digest()
    assert pickle.loads(pickle.dumps(rich)).digest() == rich.digest()
    part = rich[50:90].select("S1")
    np.testing.assert_array_equal(part.columns["score"][:, 0], rich.columns["score"][50:90, 1])
    shards = write_shards(rich, tmp_path / "shards", rows=100)
    again = [shards.read(shard) for shard in open_shards(tmp_path / "shards")]
    assert [piece.digest() for piece in again] == [
        rich[first : first + 100].digest() for first in (0, 100, 200)
    ]
    longer = nca.resample(rich, "4h")
    np.testing.assert_array_equal(longer.columns["score"], rich.columns["score"][3::4])
    for row, bar in enumerate(rich.each()):
        np.testing.assert_array_equal(bar.columns["score"], rich.columns["score"][row])
    with pytest.raises(ValueError, match="read-only"):
        rich.columns["cpi"][0] = 1.0
    with pytest.raises(AttributeError, match="column:vix"):
        getattr(rich, "column:vix")
    nca.data.validate(rich)


def test_the_feature_is_the_score_by_its_own_past(rich):
    """The mean and the deviation before each value by pandas' own moving averages."""
    found = feature_set(("column:score", "column:score:raw", "column:cpi:raw")).batch(rich)
    for asset in range(2):
        x, there = rich.columns["score"][:, asset], rich.present[:, asset]
        counted = there & np.isfinite(x)
        kept = pd.Series(x[counted])
        past = kept.ewm(span=LEVEL_SPAN, adjust=True)
        want = (kept - past.mean().shift()) / past.std(bias=True).shift()
        want[:60] = 0.0
        np.testing.assert_allclose(found[counted, asset, 0], want, rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(found[~counted, asset, :2], 0.0)
        np.testing.assert_array_equal(found[counted, asset, 1], x[counted].astype(np.float32))
    assert not found[:35, :, 2].any() and found[:, :, 2].max() == 2.0


def doubled():
    return make_feature(lambda: (), lambda state, bar, n: (state, bar.columns["cpi"] * 2.0), 40)


def test_gymnasium_and_a_feature_of_ones_own_see_them(rich):
    names = ("column:score:raw", "column:cpi:raw", doubled)
    env = nca.TradingEnv(rich, nca.EnvConfig(features=names))
    want = feature_set(env.config.features).batch(rich)
    np.testing.assert_array_equal(want[60:, :, 2], want[60:, :, 1] * 2.0)
    gym = GymEnv(env=env, window=4, flatten=False)
    windows = [gym.reset(seed=0)[0]["window"]]
    windows += [gym.step(gym.action_space.sample())[0]["window"] for _ in range(50)]
    (end,) = [i for i in range(4, 241) if np.array_equal(want[i - 4 : i], windows[-1])]
    for before, window in enumerate(windows[::-1]):
        np.testing.assert_array_equal(window, want[end - before - 4 : end - before])


def test_what_bars_lack_is_named_with_what_there_is(rich, hours):
    for bars, name, said in [
        (hours, "column:vix", "have no column 'vix'; there are none. Give it by extra"),
        (rich, "column:vix:raw", "have no column 'vix'; there are cpi, score"),
        (rich, "column:cpi:z", "give column:cpi or column:cpi:raw"),
    ]:
        with pytest.raises(ConfigError, match=said) as caught:
            nca.TradingEnv(bars, nca.EnvConfig(features=("return_1", name)))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("extra", "error", "said"),
    [
        ({"s": "Nope"}, BarError, "D005 no column 'Nope' and no such file; the columns are time"),
        ({"a b": "close"}, ConfigError, "'a b' is not a name"),
        ({"v": 3}, ConfigError, "v is the number 3; give a frame, a file, a column"),
        ({"v": ("VIX", "soon")}, ConfigError, "v has the delay the text 'soon'; give a time"),
        ({"v": "one"}, ConfigError, "v has one time; say when it was known"),
        ({"v": "empty"}, BarError, "v: D002 there are no rows"),
        ({"v": "timeless"}, BarError, "v: D004 no time column; the columns are VIX"),
        ({"v": "two"}, BarError, "v: D005 does not show which column it is; the columns are Date"),
        ({"v": "words"}, BarError, "v: D005 column 'VIX' has no numbers"),
        ("vix", ConfigError, "vix is the text ''"),
    ],
)
def test_what_cannot_be_joined_is_refused(hours, vix, extra, error, said):
    frames = {
        "one": vix[:1], "empty": vix[:0], "timeless": vix.drop(columns="Date"),
        "two": vix.assign(other=1.0), "words": vix.assign(VIX="high"),
    }  # fmt: skip
    if isinstance(extra, dict):
        extra = {k: frames.get(x, x) if isinstance(x, str) else x for k, x in extra.items()}
    with pytest.raises(error, match=said) as caught:
        nca.read_bars(frame_of(hours), extra=extra)
    assert "\n" not in str(caught.value)


def test_bars_without_columns_are_as_they_were(hours):
    assert hours.columns == {} and hours.as_bar().columns is None
    assert split_columns({"close": 1.0}) == {"close": 1.0}
    assert dataclasses.replace(hours, columns={}).digest() == hours.digest()


def follow():
    """A rule that reads a column: long where it is above zero."""

    def act(state, bar):
        return state, jnp.where(bar.columns["score"] > 0.0, 0.5, 0.0)

    return nca.Strategy(lambda num_assets: (), act, "follow")


@pytest.mark.heavy
def test_rules_read_them_and_others_trade_as_without(rich, hours):
    result = nca.backtest(rich, follow())
    want = np.where(rich.columns["score"] > 0.0, 0.5, 0.0)
    np.testing.assert_array_equal(result.targets.ffill().to_numpy()[60:], want[60:])
    cross = nca.rules.sma_cross(5, 20)
    for rule in (cross, nca.blend({"a": (cross, 0.5), "b": (nca.rules.momentum(9), 0.5)})):
        ours, plain = (nca.backtest(bars, rule).equity for bars in (rich, hours))
        pd.testing.assert_series_equal(ours, plain)
    grid = {"fast": [3, 5], "slow": [20, 30]}
    found = [nca.sweep(b, nca.rules.sma_cross, grid, trials=None) for b in (rich, hours)]
    pd.testing.assert_frame_equal(*found, check_flags=False)
    slow = nca.EnvConfig(features=("return_1", "4h:rsi"))
    one, other = (nca.TradingEnv(bars, slow).market.features for bars in (rich, hours))
    np.testing.assert_array_equal(one, other)
    with pytest.raises(ConfigError, match="'4h:column:cpi': a column has no time frame of its own"):
        nca.TradingEnv(rich, nca.EnvConfig(features=("return_1", "4h:column:cpi")))


@pytest.mark.parametrize(
    ("stamps", "ends"),
    [
        (["2023-01-01", "2024-01-01", "2025-01-01", "2026-01-01"], "2025-01-01"),  # 366 days
        (["2023-02-01", "2023-03-01", "2023-04-01", "2023-05-01"], "2023-04-01"),
        (["2023-01-01", "2023-04-01", "2023-07-01", "2023-10-01"], "2023-07-01"),
        (["2023-11-04T04", "2023-11-05T04", "2023-11-06T05", "2023-11-07T05"], "2023-11-06T05"),
    ],
)
def test_a_span_that_is_longer_than_most_is_known_at_its_end(stamps, ends):
    """The end of the second span, which the next stamp shows, is where its value begins."""
    frame = pd.DataFrame({"time": pd.to_datetime(stamps, utc=True), "x": np.arange(4.0)})
    step = pd.Timedelta(hours=1 if "T" in ends else 24)
    first, end = pd.Timestamp(stamps[0], tz="UTC"), pd.Timestamp(ends, tz="UTC")
    opens = pd.date_range(first, end + 5 * step, freq=step)
    prices = pd.DataFrame({"time": opens, "close": 100.0 + np.arange(len(opens)) % 7})
    bars = nca.read_bars(prices, "A", repair="close-only,no-volume", extra={"x": frame})
    closes = bars.index + step
    assert closes[np.flatnonzero(bars.columns["x"][:, 0] == 1.0)[0]] == end


@pytest.mark.heavy
def test_the_search_for_look_ahead_sees_columns(rich):
    """A column that is joined one bar early leaks, through the column and nothing else."""

    def early(bars):
        columns = {k: np.vstack([x[1:], x[-1:]]) for k, x in bars.columns.items()}
        shifted = dataclasses.replace(bars, columns=columns)
        return feature_set(("column:score:raw",)).batch(shifted)[..., 0]

    found = nca.leakcheck(early, rich, cases=60)
    assert not found.ok and found.columns == ("column:score",)
    assert found.example.columns == ("column:score",)
    for name in ("column:score", "column:score:raw"):
        found = nca.leakcheck(name, rich, cases=30)
        assert found.ok and found.reacted
