"""Features of a slower time frame: those of `resample`'s bars, joined by pandas at their closes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from drawn import bars_of, rich_bars

import nca_trader as nca
from nca_trader.config import env
from nca_trader.config.extensions import name_of
from nca_trader.data.calendar import OUTSIDE, SESSIONS, Sessions
from nca_trader.data.feature_sets import feature_set
from nca_trader.data.features import make_feature
from nca_trader.data.resampling import resample
from nca_trader.data.time_frames import TimeFrame
from nca_trader.errors import BarError, ConfigError
from nca_trader.numerics import float64_on_cpu

SLOW = ("return_1", "rsi", "atr", "volume", "cost_in_vol", "day_of_week_sin")
OFFICE = Sessions(
    zone="Europe/Berlin",
    weekly=tuple((day, "09:00", day, "17:30") for day in range(5)),
    half_days={"2024-04-02": "14:00"},
    holidays=frozenset({"2024-04-03"}),
)
BERLIN = name_of(OFFICE, "sessions")  # "test_time_frames:OFFICE"


def drawn(times, num_assets=2, missing=0.1, seed=0):
    """Random bars with every column at these times."""
    bars = rich_bars(np.random.default_rng(seed), len(times), num_assets, missing, spread=0.003)
    return dataclasses.replace(bars, time=pd.DatetimeIndex(times).to_numpy("datetime64[ns]"))


def new_york_times(first, last, step, opens="09:30"):
    """Bars' opens in UTC by the clock of New York, of the regular hours alone."""
    calendar = nca.new_york(2024, 2024)
    days = [f"{d:%Y-%m-%d}" for d in pd.bdate_range(first, last)]
    parts = []
    for day in (day for day in days if day not in calendar.holidays):
        closes = calendar.half_days.get(day, "16:00")
        span = pd.date_range(f"{day} {opens}", f"{day} {closes}", freq=step, inclusive="left")
        parts.append(span.tz_localize("America/New_York").tz_convert(None))
    return parts[0].append(parts[1:])


def begin_of(time, frame, sessions):
    """Where the slow bar of a time begins, by the definition in words."""
    width = pd.Timedelta(frame.replace("d", "D"))
    if not sessions.weekly:
        return time.floor(width)
    local = time.tz_localize("UTC").tz_convert(sessions.zone)
    day, clock = sessions.weekly[0][:2]
    back = (local.day_of_week - day) % 7 if len(sessions.weekly) == 1 else 0
    date = local.tz_localize(None).normalize() - pd.Timedelta(back, "D")
    opened = pd.Timestamp(f"{date:%Y-%m-%d} {clock}").tz_localize(sessions.zone)
    whole = max((local - opened) // width, 0) if width < pd.Timedelta(1, "D") else 0
    return (opened + whole * width).tz_convert(None)


def joined(bars, frame, sessions):
    """`[N, A, F]`: the batch of `resample`'s bars, joined by pandas as of the bars' closes."""
    slow = resample(bars, frame, sessions)
    length = pd.Timedelta(pd.Series(np.diff(bars.time)).mode()[0])
    present, inside = slow.present.copy(), np.ones(len(bars), bool)
    if sessions.weekly:
        inside = ~np.isnat(sessions.spans(bars.time, length.to_timedelta64())[0])
    for a in range(bars.num_assets):  # a first slow bar that began before the asset's bars
        first = pd.Timestamp(bars.time[np.argmax(bars.present[:, a] & inside)])
        begin = begin_of(first, frame, sessions)
        if first > begin:
            present[slow.time <= begin + pd.Timedelta(frame.replace("d", "D")), a] = False
    values = feature_set(SLOW).batch(dataclasses.replace(slow, present=present))
    found = np.zeros((*bars.close.shape, len(SLOW)), np.float32)
    closes = pd.DataFrame({"at": bars.time + length.to_timedelta64()})
    for a in range(bars.num_assets):
        right = pd.DataFrame(values[:, a]).assign(at=slow.time)[slow.present[:, a]]
        columns = pd.merge_asof(closes, right, on="at").drop(columns="at").fillna(0.0)
        found[:, a] = np.where(bars.present[:, a, None], columns, 0.0)
    return found


def cases():
    minutes = pd.date_range("2024-01-02 00:07", periods=5_000, freq="1min")
    hours = pd.date_range("2024-03-17 21:00", periods=900, freq="1h")  # two clock changes
    tens = pd.date_range("2024-03-27 02:10", periods=3_000, freq="10min")
    session = new_york_times("2024-02-26", "2024-03-22", "5min")
    half = new_york_times("2024-06-24", "2024-07-31", "15min")
    early = new_york_times("2024-06-24", "2024-07-31", "1h", opens="09:00")
    rng = np.random.default_rng(3)
    holes = minutes[rng.random(len(minutes)) > 0.3]  # times at which no asset has a bar
    return {
        "holes": (drawn(holes), ("5min", "12h"), "every_day"),
        "one asset": (drawn(minutes, 1, 0.0), ("3min", "1h"), "every_day"),
        "hours": (drawn(hours), ("2h", "1d"), "every_day"),
        "stocks without sessions": (drawn(session), ("1d",), "every_day"),
        "sessions over a clock change": (drawn(session), ("30min", "1d"), "new_york"),
        "half day and holiday": (drawn(half), ("1h", "1d"), "new_york"),
        "bars that begin before the session": (drawn(early), ("2h", "1d"), "new_york"),
        "round the clock by sessions": (drawn(tens), ("1h", "1d"), BERLIN),
        "a week of currencies": (drawn(hours), ("4h", "1d"), "fx_week"),
    }


@pytest.mark.heavy
@pytest.mark.parametrize("case", list(cases()))
@pytest.mark.few(4)
def test_a_slower_feature_is_that_of_resampled_bars_joined_at_their_closes(case):
    bars, frames, sessions = cases()[case]
    names = tuple(f"{frame}:{name}" for frame in frames for name in SLOW)
    step = int(pd.Series(np.diff(bars.time)).mode()[0] / pd.Timedelta("1s"))
    features = feature_set((*names, "rsi"), step, sessions)
    found = features.batch(bars)
    wanted = [joined(bars, frame, SESSIONS[sessions]) for frame in frames]
    np.testing.assert_array_equal(found[..., :-1], np.concatenate(wanted, axis=-1))
    assert (found[..., 0, 1] != 0).mean() > 0.1  # the RSI of the faster frame
    np.testing.assert_array_equal(found[..., -1], feature_set(("rsi",)).batch(bars)[..., 0])
    if case in ("holes", "sessions over a clock change"):  # bar by bar it is the same
        state, columns = features.init(bars.num_assets), bars.as_bar()
        for row in range(1500):
            state, values = features.step(state, jax.tree.map(lambda x, row=row: x[row], columns))
            np.testing.assert_array_equal(values, found[row])


def seen(bars, frame="1h", bar_seconds=1800, sessions="every_day"):
    """What a feature sees of slow bars `[N, A, 8]`: how many, their times and their columns."""
    columns = ("time", "open", "high", "low", "close", "volume", "half_spread")

    def of(column):
        def update(count, bar, _):
            value = getattr(bar, column) if column else count + 1.0
            value = 0.0 if value is None else value
            return count + 1.0, jnp.asarray(value, jnp.float64)

        return make_feature(lambda: np.zeros(()), update, warmup=0)

    part = TimeFrame(frame, [of(name) for name in ("", *columns)], bar_seconds, sessions)
    with float64_on_cpu():
        states = jax.tree.map(lambda x: np.stack([x] * bars.num_assets), part.init())
        return np.asarray(jax.lax.scan(jax.vmap(part.update), states, bars.as_bar())[1])


def test_slow_bars_by_hand():
    """Half hours, added up to hours; the second half hour of 03:00 is missing."""
    at = ["01:30", "02:00", "02:30", "03:00", "04:00", "04:30", "05:30", "06:00"]
    bars = bars_of(
        [9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
        np.array([[8.0], [1.5], [1.0], [2.0], [3.0], [4.0], [5.0], [6.0]]),
        time=pd.DatetimeIndex([f"2024-05-01 {clock}" for clock in at]).to_numpy(),
        volume=np.array([[99.0], [0.1], [0.2], [0.3], [4.0], [5.0], [6.0], [7.0]]),
        half_spread=np.array([[9.0], [0.1], [0.2], [0.3], [0.2], [0.4], [0.5], [0.6]]),
    )
    nothing = [0.0] * 8
    # The number, when it closed, open, high, low, close, volume, half-spread.
    two = [1, "03:00", 1.5, 2.0, 1.0, 2.0, 0.1 + 0.2, (0.1 + 0.2) / 2]
    three = [2, "04:00", 2.0, 3.0, 2.0, 3.0, 0.3, 0.3]
    four = [3, "05:00", 3.0, 5.0, 3.0, 5.0, 9.0, (0.2 + 0.4) / 2]
    five = [4, "06:00", 5.0, 6.0, 5.0, 6.0, 6.0, 0.5]
    # The hour of 01:00 began before the bars. That of 03:00 is known from the bar of 04:00, and
    # that of 05:00, whose first half is missing, from its own last bar on.
    want = [nothing, nothing, two, two, three, four, five, five]
    for row in want:
        if row is not nothing and isinstance(row[1], str):
            row[1] = pd.Timestamp(f"2024-05-01 {row[1]}").timestamp()
    np.testing.assert_array_equal(seen(bars)[:, 0], np.array(want))


def test_a_session_is_a_day_and_ends_early_on_a_half_day():
    times = new_york_times("2024-07-01", "2024-07-08", "30min")
    rows = pd.DatetimeIndex(times).tz_localize("UTC").tz_convert("America/New_York")
    bars = bars_of(np.arange(1.0, len(times) + 1), time=times.to_numpy("datetime64[ns]"))
    count = seen(bars, "1d", 1800, "new_york")[:, 0, 0]
    known = [f"{rows[row]:%m-%d %H:%M}" for row in np.flatnonzero(np.diff(count, prepend=0.0))]
    assert known == ["07-01 15:30", "07-02 15:30", "07-03 12:30", "07-05 15:30", "07-08 15:30"]
    # Where the last bar is missing, the day is known from the next morning on.
    kept = rows.strftime("%m-%d %H:%M") != "07-02 15:30"
    part = dataclasses.replace(bars_of(bars.close[kept]), time=bars.time[kept])
    count = seen(part, "1d", 1800, "new_york")[:, 0, 0]
    known = [f"{rows[kept][row]:%m-%d %H:%M}" for row in np.flatnonzero(np.diff(count, prepend=0))]
    assert known == ["07-01 15:30", "07-03 09:30", "07-03 12:30", "07-05 15:30", "07-08 15:30"]


def test_a_bar_of_an_irregular_time_does_not_open_its_slow_bar_again():
    at = ["00:00", "00:30", "00:45", "01:00", "01:30"]
    time = pd.DatetimeIndex([f"2024-05-01 {clock}" for clock in at]).to_numpy("datetime64[ns]")
    bars = bars_of([1.0, 2.0, 50.0, 3.0, 4.0], time=time)
    np.testing.assert_array_equal(seen(bars)[:, 0, 0], [0, 1, 1, 1, 2])
    np.testing.assert_array_equal(seen(bars)[:, 0, 5], [0, 2, 2, 2, 4])


def test_each_asset_has_slow_bars_of_its_own():
    bars = bars_of(np.ones((8, 2)), step="h", start="2024-05-01")
    present = bars.present.copy()
    present[:3, 1] = False  # its first slow bar lacks its first hour, and does not count
    present[5, :1] = False  # known from the next bar on
    found = seen(dataclasses.replace(bars, present=present), "2h", 3600)[..., 0]
    np.testing.assert_array_equal(found[:, 0], [0, 1, 1, 2, 2, 0, 3, 4])
    np.testing.assert_array_equal(found[:, 1], [0, 0, 0, 0, 0, 1, 1, 2])


@pytest.mark.few(2)
@pytest.mark.parametrize(("frame", "step", "sessions"), [
    ("5min", "1min", "every_day"), ("1d", "4h", "every_day"), ("1d", "30min", "new_york"),
    ("1d", "1h", "new_york"), ("1h", "30min", "new_york"),
])  # fmt: skip
def test_the_warm_up_is_that_of_the_worst_first_bar(frame, step, sessions):
    """Exact where each slow bar has as many bars, and never too short."""
    calendar, length = SESSIONS[sessions], pd.Timedelta(step)
    times = new_york_times("2024-01-02", "2024-02-20", step) if calendar.weekly else (
        pd.date_range("2024-01-02", periods=250, freq=step))  # fmt: skip
    names = (f"{frame}:rsi",)
    features = feature_set(names, int(length.total_seconds()), sessions)
    bars = drawn(times, 1, 0.0)
    late = []
    for first in range(14):
        values = features.batch(bars[first : first + 230])[:, 0, 0]
        late.append(int(np.flatnonzero(values)[0]))
    most = {"5min": 5, "1h": 2}.get(frame, 6 if step == "4h" else 13 if step == "30min" else 7)
    assert features.warmup == 16 * most - 2 >= max(late)
    if frame != "1h":  # there the last slow bar of a session has one bar
        assert max(late) == features.warmup
    assert feature_set((*names, "return_252"), int(length.total_seconds()), sessions).warmup >= 252


@pytest.mark.parametrize(("name", "bar_seconds", "message"), [
    ("1h:rsi", 0, "need the length of the bars in whole seconds; give bar_seconds"),
    ("1h:rsi", 2400, "'1h' is not a longer multiple of the bars' own length, 2400 s"),
    ("1h:rsi", 3600, "is not a longer multiple"), ("5min:rsi", 3600, "is not a longer multiple"),
    ("7h:rsi", 60, "'7h': every='7h' must divide a day evenly"),
    ("2d:rsi", 60, "must divide a day"), ("1w:rsi", 60, "must divide a day"),
    ("1h:rzi", 60, "unknown feature 'rzi'; did you mean 'rsi'"),
    ("1h:1d:rsi", 60, "unknown feature '1d:rsi'"), ("1h:", 60, "unknown feature '1h:'"),
])  # fmt: skip
def test_a_time_frame_that_cannot_be_is_refused_in_one_line(name, bar_seconds, message):
    with pytest.raises(ConfigError, match=message) as caught:
        feature_set((name,), bar_seconds)
    assert "\n" not in str(caught.value)


def test_the_config_knows_the_sessions_that_there_are():
    assert set(env.SESSIONS) == set(SESSIONS)


def test_bars_of_another_length_are_refused():
    with pytest.raises(BarError, match="are of 3600 s, and the features of 60 s; give bars of"):
        feature_set(("4h:rsi",), 60).batch(drawn(pd.date_range("2024", periods=40, freq="1h")))
    days = nca.sample_bars("sp500")[:300]
    with pytest.raises(ConfigError, match="'1h' is not a longer multiple of the bars' own length"):
        nca.TradingEnv(days, nca.EnvConfig(features=("1h:rsi",)))
    with pytest.raises(ConfigError, match="sessions='new_york' has no effect without a feature of"):
        nca.EnvConfig(features=("rsi",), sessions="new_york")
    with pytest.raises(ConfigError, match="sessions='newyork' is not known"):
        nca.EnvConfig(features=("1d:rsi",), sessions="newyork")


def test_times_outside_every_session_are_in_no_slow_bar():
    bars = drawn(pd.date_range("2024-03-04 00:00", periods=300, freq="30min"), 1, 0.0)
    hours = bars.index.tz_convert("America/New_York")
    inside = (hours.time >= pd.Timestamp("09:30").time()) & (hours.hour < 16)
    inside &= hours.day_of_week < 5
    alone = dataclasses.replace(bars_of(bars.close[inside]), **{
        name: getattr(bars, name)[inside] for name in ("time", *bars.fields)
    })  # fmt: skip
    for frame in ("1h", "1d"):
        every, some = (seen(x, frame, 1800, "new_york")[:, 0] for x in (bars, alone))
        np.testing.assert_array_equal(every[inside], some)
    assert OUTSIDE == np.datetime64("NaT", "ns").astype(np.int64)


def ahead(bars):
    """A planted leak: each slow bar is seen one bar before it is over."""
    found = feature_set(("1h:rsi",), 600).batch(bars)
    return np.concatenate([found[1:], found[-1:]])


@pytest.mark.heavy
def test_leakcheck_passes_a_slower_frame_and_finds_one_seen_a_bar_early():
    bars = drawn(pd.date_range("2024-01-02 00:20", periods=250, freq="10min"))
    report = nca.leakcheck("1h:rsi", bars, cases=40)
    assert report.ok and report.reacted > 20, report
    report = nca.leakcheck(ahead, bars, cases=40)
    assert not report.ok and "close" in report.columns, report
    # It shows at the last bar before the end of an hour alone.
    assert bars.index[report.example.row].minute == 40
