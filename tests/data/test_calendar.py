"""Calendars: sessions known beforehand, positions flat at their close, bars in a year."""

import datetime

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nca_trader.data.bars import read_bars
from nca_trader.data.calendar import (
    EVERY_DAY,
    FX_WEEK,
    Sessions,
    bar_length,
    expected_times,
    flat_at_close,
    new_york,
    session_ends,
)
from nca_trader.errors import BarError, ConfigError
from nca_trader.evaluate.backtest import backtest
from nca_trader.types import Bars, bars_per_year, trading_year

NEW_YORK = "America/New_York"
# From the exchange's own notices.
HALF_DAYS = {
    2014: ["07-03", "11-28", "12-24"],
    2018: ["07-03", "11-23", "12-24"],
    2021: ["11-26"],
    2024: ["07-03", "11-29", "12-24"],
}
HOLIDAYS = {
    2018: ["01-01", "01-15", "02-19", "03-30", "05-28", "07-04", "09-03", "11-22", "12-25"],
    2021: ["01-01", "01-18", "02-15", "04-02", "05-31", "07-05", "09-06", "11-25", "12-24"],
    2022: ["01-17", "02-21", "04-15", "05-30", "06-20", "07-04", "09-05", "11-24", "12-26"],
    2024: ["01-01", "01-15", "02-19", "03-29", "05-27", "06-19", "07-04", "09-02", "11-28",
           "12-25"],
}  # fmt: skip


def bars_at(time, price=100.0, present=None):
    """Flat bars, of one asset, at these times."""
    time = pd.DatetimeIndex(time).tz_convert("UTC").tz_localize(None)
    close = np.broadcast_to(np.asarray(price, float).reshape(-1, 1), (len(time), 1))
    fields = dict.fromkeys(("open", "high", "low", "close"), close)
    here = np.ones((len(time), 1), bool) if present is None else present
    return Bars(
        time=time.to_numpy("datetime64[ns]"), symbols=("X",), volume=close, present=here, **fields
    )


def session_times(days, step, half=(), opens="09:30", closes="16:00"):
    """The bars' opens of New York sessions, written down day by day."""
    parts = []
    for day in days:
        until = "13:00" if day in half else closes
        start, end = (pd.Timestamp(f"{day} {clock}", tz=NEW_YORK) for clock in (opens, until))
        parts.append(pd.date_range(start, end, freq=step, inclusive="left").tz_convert("UTC"))
    return parts[0].append(parts[1:])


def trading_days(first, last):
    sessions = new_york(int(first[:4]), int(last[:4]))
    days = [f"{d:%Y-%m-%d}" for d in pd.bdate_range(first, last)]
    return [d for d in days if d not in sessions.holidays], sessions


@pytest.mark.parametrize("year", sorted(HALF_DAYS | HOLIDAYS))
def test_new_york_s_rules_give_the_exchange_s_own_dates(year):
    sessions = new_york(year, year)
    for known, found in ((HALF_DAYS, sessions.half_days), (HOLIDAYS, sessions.holidays)):
        if year in known:
            assert sorted(found) == [f"{year}-{day}" for day in known[year]]


# The library itself reads columns in a way that the next pandas gives up.
@pytest.mark.filterwarnings("ignore:(Series|DatetimeIndex).values returning an ndarray that drops")
def test_new_york_s_rules_are_another_library_s_over_twelve_years():
    library = pytest.importorskip("exchange_calendars")
    theirs = library.get_calendar("XNYS", start="2014-01-01", end="2025-12-31")
    ours = new_york(2014, 2025, closed=["2018-12-05", "2025-01-09"])
    weekdays = {f"{d:%Y-%m-%d}" for d in pd.bdate_range("2014-01-01", "2025-12-31")}
    assert weekdays - ours.holidays == {f"{d:%Y-%m-%d}" for d in theirs.sessions}
    assert sorted(ours.half_days) == [f"{d:%Y-%m-%d}" for d in theirs.early_closes]
    minutes = theirs.minutes[::17]
    opened, closed = ours.spans(minutes.to_numpy("datetime64[ns]"), np.timedelta64(1, "m"))
    theirs_closed = theirs.schedule["close"].loc[theirs.minutes_to_sessions(minutes)]
    np.testing.assert_array_equal(
        closed, pd.DatetimeIndex(theirs_closed).tz_convert(None).to_numpy("datetime64[ns]")
    )
    assert (opened < closed).all()


def test_the_last_bar_of_each_session_is_known_from_its_own_time():
    days, sessions = trading_days("2024-06-24", "2024-07-12")  # a half day and a holiday
    assert "2024-07-04" not in days
    time = session_times(days, "30min", half=("2024-07-03",))
    bars = bars_at(time)
    local = bars.index.tz_convert(NEW_YORK)
    want = [
        f"{t:%H:%M}" == ("12:30" if f"{t:%Y-%m-%d}" == "2024-07-03" else "15:30") for t in local
    ]
    ends = session_ends(bars, sessions)
    np.testing.assert_array_equal(ends, want)
    for row in range(2, len(bars)):  # the next bar is not looked at
        assert session_ends(bars[: row + 1], sessions)[row] == ends[row]


def test_sessions_follow_the_change_of_the_clock():
    days, sessions = trading_days("2024-03-06", "2024-03-14")  # the clock changes on 03-10
    bars = bars_at(session_times(days, "1h", opens="10:00"))
    hours = bars.index[session_ends(bars, sessions)].strftime("%m-%d %H")
    assert list(hours) == [
        "03-06 20", "03-07 20", "03-08 20", "03-11 19", "03-12 19", "03-13 19", "03-14 19"
    ]  # fmt: skip
    week = pd.date_range("2024-03-08 15:00", "2024-03-17 20:00", freq="1h", tz=NEW_YORK)
    fx = bars_at(week)
    last = fx.index[session_ends(fx, FX_WEEK)].tz_convert(NEW_YORK)
    assert [f"{t:%a %H:%M}" for t in last] == ["Fri 16:00", "Fri 16:00"]
    opened, closed = FX_WEEK.spans(fx.time, np.timedelta64(1, "h"))
    weekend = (week.day_of_week == 5) | ((week.day_of_week == 4) & (week.hour >= 17))
    weekend |= (week.day_of_week == 6) & (week.hour < 16)  # the bar of 16:00 ends as the week opens
    weekend |= (week.day_of_week == 6) & (week.hour == 16)
    np.testing.assert_array_equal(np.isnat(closed), weekend)
    np.testing.assert_array_equal(np.isnat(opened), weekend)
    assert not session_ends(fx, EVERY_DAY).any()


@pytest.mark.parametrize("fill", ["next_open", "close"])
@pytest.mark.parametrize("step", ["30min", "1h"])
def test_no_position_is_held_over_night(fill, step):
    days, sessions = trading_days("2024-06-24", "2024-07-12")
    time = session_times(days, step, half=("2024-07-03",))
    rng = np.random.default_rng(0)
    bars = bars_at(time, 100.0 * np.exp(np.cumsum(rng.normal(0, 0.01, len(time)))))
    targets = rng.choice([-1.0, 0.5, 1.0], len(bars))
    flat = flat_at_close(targets, bars, sessions, fill)
    assert (flat != targets).sum() == len(days) - (targets[flat != targets] == 0).sum()
    local = bars.index.tz_convert(NEW_YORK)
    last = np.append(local.normalize()[1:] != local.normalize()[:-1], True)
    held = backtest(bars, flat, fill=fill).weights.to_numpy()[:, 0]
    np.testing.assert_allclose(held[last], 0.0, atol=1e-15)  # a held weight is a rounded sum
    assert (np.abs(held[~last]) > 0.4).mean() > 0.5
    before = backtest(bars, targets, fill=fill).weights.to_numpy()[:, 0]
    assert (np.abs(before[last]) > 0.4).all()  # what it would have been


def test_what_can_t_be_flat_at_a_close_is_refused():
    _, sessions = trading_days("2024-06-24", "2024-07-12")
    daily = bars_at(pd.bdate_range("2024-06-24", periods=9, tz="UTC"))
    assert session_ends(daily, sessions).all()
    with pytest.raises(ConfigError, match="daily bars have no close within them"):
        flat_at_close(np.ones(9), daily, sessions)
    with pytest.raises(ConfigError, match="fill = 'open' is unknown; there are next_open and clo"):
        flat_at_close(np.ones(9), daily, sessions, "open")
    with pytest.raises(BarError, match="targets have 8 rows, but there are 9 bars"):
        flat_at_close(np.ones(8), daily, sessions)
    hourly = bars_at(pd.date_range("2024-06-24", periods=9, freq="1h", tz="UTC"))
    np.testing.assert_array_equal(flat_at_close(np.ones(9), hourly, EVERY_DAY), np.ones(9))


@pytest.mark.parametrize(("change", "message"), [
    ({"zone": "Mars"}, "'Mars' is not a time zone"),
    ({"weekly": ((0, "16:00", 0, "09:30"),)}, "does not end after it begins"),
    ({"weekly": ((0, "9.30", 0, "16:00"),)}, "'9.30' is not a time of day"),
    ({"holidays": frozenset({"4 July"})}, "'4 July' is not a date"),
    ({"half_days": {"2024-07-03": "1pm"}}, "'1pm' is not a time of day"),
])  # fmt: skip
def test_a_calendar_that_is_none_is_refused(change, message):
    given = {"zone": NEW_YORK, "weekly": ((0, "09:30", 0, "16:00"),)} | change
    with pytest.raises(ConfigError, match=message):
        Sessions(**given)
    with pytest.raises(ConfigError, match="the rules hold from 2014 on"):
        new_york(1999, 2020)


def exchange_times(first, last, step):
    days, sessions = trading_days(first, last)
    return session_times(days, step, half=sessions.half_days).tz_localize(None)


def fx_times(first, last, step):
    every = pd.date_range(first, last, freq=step, tz="UTC", inclusive="left")
    local = every.tz_convert(NEW_YORK)
    shut = (local.day_of_week == 5) | ((local.day_of_week == 4) & (local.hour >= 17))
    shut |= (local.day_of_week == 6) & (local.hour < 17)
    shut |= local.strftime("%m-%d").isin(["12-25", "01-01"])
    return every[~shut]


@pytest.mark.parametrize(("time", "want", "within"), [
    # Counted: a year or more.
    (pd.DatetimeIndex(trading_days("2015-01-01", "2024-12-31")[0]), 252, 0.003),
    (exchange_times("2023-01-01", "2024-06-30", "1h"), 252 * 7, 0.01),
    (pd.date_range("2023-01-01", "2024-06-30", freq="1h"), 8766, 0.001),
    (fx_times("2022-01-03", "2024-01-01", "1h"), 6220, 0.01),
    (pd.date_range("2000-01-01", periods=60, freq="MS"), 12, 0.01),
    (pd.date_range("2000-01-01", periods=9, freq="W"), 52.18, 0.001),
    # Told by their hours: less than a year.
    (pd.date_range("2022-01-01", periods=2880, freq="1min"), 525_949, 1e-4),
    (pd.date_range("2022-01-05 07:00", periods=500, freq="1min"), 525_949, 1e-4),
    (pd.date_range("2022-01-01", periods=90, freq="1D"), 365.25, 1e-3),
    (exchange_times("2024-06-25", "2024-06-26", "1min"), 98_280, 1e-6),
    (exchange_times("2024-06-24", "2024-07-12", "1min"), 98_280, 0.003),  # with a half day
    (exchange_times("2024-01-05", "2024-04-12", "30min"), 252 * 13, 0.002),
    (pd.DatetimeIndex(trading_days("2024-06-03", "2024-06-14")[0]), 252, 0.002),
    (fx_times("2024-02-01", "2024-03-15", "1h"), 6262, 0.01),
    (fx_times("2024-02-05", "2024-02-13", "1h"), 6262, 0.01),
])  # fmt: skip
def test_bars_in_a_year_are_those_of_the_calendar(time, want, within):
    stamps = pd.DatetimeIndex(time).to_numpy("datetime64[ns]")
    assert bars_per_year(stamps) == pytest.approx(want, rel=within)


def local(days, opens, closes, step, zone=NEW_YORK):
    """Times in UTC of bars between two clocks of the market's zone, day by day."""
    clock = pd.timedelta_range(f"{opens}:00", f"{closes}:00", freq=step, closed="left")
    times = pd.DatetimeIndex(
        (pd.DatetimeIndex(days).to_numpy()[:, None] + clock.to_numpy()).ravel()
    )
    return times.tz_localize(zone).tz_convert("UTC").tz_localize(None)


STAMPS = {
    # Zone, days of a week, local clocks and the length of a bar.
    "New York": ("America/New_York", 5, ["00:00"], "1d"),
    "Chicago": ("America/Chicago", 5, ["00:00"], "1d"),
    "London": ("Europe/London", 5, ["00:00"], "1d"),
    "Sydney": ("Australia/Sydney", 5, ["00:00"], "1d"),
    "New York's opens": ("America/New_York", 5, ["09:30"], "1d"),
    "four hours": ("America/New_York", 5, ["04:00", "08:00", "12:00", "16:00"], "4h"),
    "hours": ("Europe/Berlin", 5, [f"{hour:02}:00" for hour in range(9, 18)], "1h"),
    "half hours": ("America/Toronto", 5, ["09:30", "10:00", "10:30", "11:00"], "30min"),
    "Tokyo": ("Asia/Tokyo", 5, ["00:00"], "1d"),
    "no weekend": ("UTC", 7, ["00:00"], "1d"),
}


@pytest.mark.parametrize("name", STAMPS)
def test_hours_are_counted_in_the_clock_in_which_they_repeat(name):
    zone, week, clocks, every = STAMPS[name]
    days = pd.date_range("2022-01-03", "2023-12-29")
    days = days[days.day_of_week < week]
    local = pd.DatetimeIndex([pd.Timestamp(f"{day:%Y-%m-%d} {c}") for day in days for c in clocks])
    time = local.tz_localize(zone).tz_convert("UTC")
    frame = pd.DataFrame({"time": time, **dict.fromkeys(("open", "high", "low", "close"), 5.0)})
    kept = frame.drop(index=[20, 300])
    for each, missing in ((frame, 0), (kept, 2)):
        bars = read_bars(each, every=every, repair="no-volume")
        assert (bars.index == time).all() and (~bars.present).sum() == missing
    fits = "Trading hours are by the clock of" in bars.note
    assert fits == (zone not in ("UTC", "Asia/Tokyo")), bars.note


def test_a_third_of_the_hours_missing_is_asked_about():
    time = pd.date_range("2024-01-01", periods=900, freq="1min", tz="UTC")
    frame = pd.DataFrame({"time": time, **dict.fromkeys(("open", "high", "low", "close"), 5.0)})
    rng = np.random.default_rng(0)
    for share, asked in ((0.3, False), (0.4, True)):
        some = frame[(rng.random(900) > share) | (np.arange(900) % 899 == 0)]
        options = {"every": "1min", "repair": "no-volume"}
        if asked:
            with pytest.raises(BarError, match=r"D035 \d+ of 900 times within .* pass repair="):
                read_bars(some, **options)
            options["repair"] += ",keep-gaps"
        bars = read_bars(some, **options)
        assert len(bars) == 900 and bars.present.sum() == len(some)
        assert ("of 900 times within the trading hours have no bar" in bars.note) == asked


SIX_DAYS = pd.date_range("2024-01-01", periods=140)
SIX_DAYS = SIX_DAYS[SIX_DAYS.day_of_week != 5]


def test_the_words_say_where_the_bars_in_a_year_come_from():
    words = {
        "390 a day, 5 days a week": exchange_times("2024-06-24", "2024-07-12", "1min"),
        "1 a day, 6 days a week": SIX_DAYS,
        "24 a day, 7 days a week": pd.date_range("2024-01-01", periods=900, freq="1h"),
        "1,440 a day, 7 days a week": pd.date_range("2024-01-01", periods=900, freq="1min"),
        "counted over 2.9 years": pd.bdate_range("2020-01-01", periods=760),
        "counted over 4.9 years": pd.date_range("2000-01-01", periods=60, freq="MS"),
        "unknown of one bar": pd.date_range("2000-01-01", periods=1),
    }  # fmt: skip
    for want, times in words.items():
        assert trading_year(pd.DatetimeIndex(times).to_numpy("datetime64[ns]"))[1] == want


def test_two_days_of_minutes_are_not_stretched_over_the_nights():
    """What N - 1 steps over the time between the first and the last bar would say."""
    time = exchange_times("2024-06-25", "2024-06-26", "1min").to_numpy("datetime64[ns]")
    naive = (len(time) - 1) * 365.2425 / ((time[-1] - time[0]) / np.timedelta64(1, "D"))
    assert naive > 2.2 * bars_per_year(time)
    assert np.isnan(bars_per_year(time[:1]))
    assert np.isnat(bar_length(time[:1]))


@pytest.mark.parametrize(("time", "zone", "every", "shut"), [
    (fx_times("2024-01-02", "2024-03-01", "1h"), "America/New_York", "1h", 0),
    (pd.date_range("2024-01-01", "2024-03-01", freq="1h", tz="UTC"), "UTC", "1h", 0),
    # The afternoon of a half day is missing bars, and a holiday seven hours of them.
    (session_times(trading_days("2024-06-03", "2024-07-31")[0], "1h", half=("2024-07-03",),
                   opens="09:30"), NEW_YORK, "1h", 3 + 2 * 7),
])  # fmt: skip
def test_nights_weekends_and_markets_that_never_close_are_no_gaps(time, zone, every, shut):
    frame = pd.DataFrame({"time": time, **dict.fromkeys(("open", "high", "low", "close"), 5.0)})
    bars = read_bars(frame, timezone=zone, every=every, repair="no-volume")
    assert (~bars.present).sum() == shut
    gap = frame.drop(index=100)
    assert (
        ~read_bars(gap, timezone=zone, every=every, repair="no-volume").present
    ).sum() == 1 + shut


def missing(time, step, zone=None):
    """The expected times without a bar, in UTC."""
    stamps = time.tz_convert(None).to_numpy("datetime64[ns]")
    expected, _ = expected_times(stamps, step.astype("timedelta64[ns]"), zone)
    assert len(np.unique(expected)) == len(expected)
    return pd.DatetimeIndex(np.setdiff1d(expected, stamps), tz="UTC")


@pytest.mark.parametrize(("zone", "pause"), [(NEW_YORK, 45), ("Europe/Berlin", 20)])
def test_a_daily_pause_of_a_market_that_never_closes_has_its_clock(zone, pause):
    time = pd.date_range("2023-02-02", "2023-05-29", freq="5min", tz="UTC")
    local = time.tz_convert(zone)
    shut = (local.hour == 17) & (local.minute < pause)
    kept = time[~shut]
    assert len(missing(kept, np.timedelta64(300, "s"))) == 0
    assert list(missing(kept.delete([500, 30_000]), np.timedelta64(300, "s"))) == [
        kept[500], kept[30_000]
    ]  # fmt: skip


def test_minutes_that_trade_on_one_day_of_five_are_no_pause():
    """Thin trading around a lunch: each minute is expected, also one that never trades."""
    of_day = np.arange(360)
    inner = (of_day >= 30) & (of_day < 330)  # a day of the week may show no bar at its edges
    for share, num_days in ((0.1, 30), (0.2, 30), (0.6, 30), (0.2, 3)):
        days = pd.bdate_range("2023-01-02", periods=num_days)
        minutes = local(days, "09:00", "15:00", "1min", "Asia/Tokyo").tz_localize("UTC")
        there = np.random.default_rng(0).random((num_days, 360)) < share
        there[0, 0] = there[-1, -1] = True
        if num_days > 3:  # three days of a thin market are too few to show a lunch
            there[:, 150:210] = False
        want = ~there & inner & ((num_days == 3) | (of_day < 150) | (of_day >= 210))
        found = missing(minutes[there.ravel()], np.timedelta64(60, "s"))
        inside = found.isin(minutes[np.tile(inner, num_days)])
        assert list(found[inside]) == list(minutes[want.ravel()]), (share, num_days)


@pytest.mark.parametrize(("num_days", "step"), [(1, 1), (1, 60), (2, 1), (2, 60)])
def test_two_days_show_a_pause_and_one_alone_does_not(num_days, step):
    days = pd.bdate_range("2023-01-02", periods=num_days)
    every = local(days, "09:00", "11:00", f"{step}s", "Asia/Tokyo").tz_localize("UTC")
    of_day = every.hour * 60 + every.minute
    shut = (of_day >= of_day[0] + 50) & (of_day < of_day[0] + 70)
    found = missing(every[~shut], np.timedelta64(step, "s"))
    assert list(found) == (list(every[shut]) if num_days == 1 else [])


def test_a_bar_at_an_odd_second_is_no_calendar():
    days = pd.bdate_range("2023-01-02", periods=30)
    hours = session_times([f"{d:%Y-%m-%d}" for d in days], "1h", opens="10:00")
    odd = hours.union(pd.DatetimeIndex([hours[7] + pd.Timedelta("17min 3s")]))
    assert len(missing(odd, np.timedelta64(3600, "s"), NEW_YORK)) == 0
    assert list(missing(odd.delete(40), np.timedelta64(3600, "s"), NEW_YORK)) == [odd[40]]
    # The first bar of a day is a half hour: its minute is another one than the others'.
    first = session_times([f"{d:%Y-%m-%d}" for d in days], "1h", closes="10:00")
    mixed = hours.union(first)
    assert len(missing(mixed, np.timedelta64(3600, "s"), NEW_YORK)) == 0
    assert list(missing(mixed.delete([35, 49]), np.timedelta64(3600, "s"), NEW_YORK)) == [
        mixed[35], mixed[49]
    ]  # fmt: skip


def test_assets_with_a_lunch_have_no_missing_bars_in_it():
    days = pd.bdate_range("2023-01-09", periods=10)
    morning, noon = (
        local(days, *span, "1min", "Asia/Tokyo")
        for span in (("09:00", "11:30"), ("12:30", "15:00"))
    )
    time = morning.union(noon).tz_localize("UTC")
    frame = pd.DataFrame({"time": time, **dict.fromkeys(("open", "high", "low", "close"), 5.0)})
    both = pd.concat([frame.assign(symbol="A"), frame.drop(index=[200]).assign(symbol="B")])
    bars = read_bars(both.drop(index=[700]), every="1min", repair="no-volume")
    assert len(bars) == 3000 and list((~bars.present).sum(axis=0)) == [1, 2]
    assert bars.bars_per_year == pytest.approx(252 * 300, rel=0.003)


ONE_DAY = pd.date_range("2024-01-03", periods=1)  # a Wednesday
MIDWEEK = pd.date_range("2024-01-03", periods=19_872, freq="10s")
WEEK_OF_FX = pd.date_range("2024-02-04 22:00", "2024-02-09 22:00", freq="1h", inclusive="left")
EVERY_DATE = pd.date_range("2024-01-01", periods=365)
FRIDAYS = pd.date_range("2024-01-08", periods=43)  # which end at noon


@pytest.mark.parametrize(("time", "want", "within"), [
    # Less than a week, by the hours that trade.
    (local(ONE_DAY, "09:30", "16:00", "30min"), 252 * 13, 1e-6),
    (local(ONE_DAY, "08:00", "16:30", "1min", "Europe/London"), 252 * 510, 1e-6),
    (local(pd.to_datetime(["2024-01-05", "2024-01-08"]), "09:30", "16:00", "30min"), 3276, 1e-6),
    (local(pd.bdate_range("2024-01-05", periods=2), "09:30", "16:00", "30min")[:15], 3276, 1e-6),
    (local(pd.bdate_range("2024-01-08", periods=2), "09:30", "16:00", "30min")[6:], 3276, 1e-6),
    (MIDWEEK, 365.2425 * 8640, 1e-6),
    (MIDWEEK.delete([777, 12_345]), 365.2425 * 8640, 1e-3),
    (WEEK_OF_FX, 6261.3, 1e-3),
    (WEEK_OF_FX[:10], 6261.3, 1e-3),
    (WEEK_OF_FX[-30:], 6261.3, 1e-3),
    # The days of a week that trade.
    *[(EVERY_DATE[:n][EVERY_DATE[:n].day_of_week >= 5], 104.36, 1e-3) for n in (30, 100, 365)],
    (EVERY_DATE[EVERY_DATE.day_of_week < 4], 208.7, 0.01),
    (local(FRIDAYS[FRIDAYS.day_of_week < 4], "09:00", "17:00", "1h").union(
        local(FRIDAYS[FRIDAYS.day_of_week == 4], "09:00", "13:00", "1h")), 36 * 50.4, 0.005),
])  # fmt: skip
def test_a_short_file_counts_by_the_hours_of_the_week_that_trade(time, want, within):
    stamps = pd.DatetimeIndex(time).to_numpy("datetime64[ns]")
    assert bars_per_year(stamps) == pytest.approx(want, rel=within)


def calendars(first, years):
    """Six kinds of markets: their times, and the bars a year by the calendar's own rules."""
    last = first + pd.DateOffset(years=years)
    days = pd.DatetimeIndex(trading_days(f"{first:%Y-%m-%d}", f"{last:%Y-%m-%d}")[0])
    every = pd.date_range(first, last, inclusive="left")
    saturdays = every[every.day_of_week == 5][3::17]  # special sessions, three a year
    hours = pd.date_range(first, last, freq="1h", inclusive="left")
    tokyo = [
        local(days, *span, "30min", "Asia/Tokyo")
        for span in (("09:00", "11:30"), ("12:30", "15:00"))
    ]
    return {
        "weekdays": (days, 252),
        "stamped at the day's end": (days + pd.Timedelta(1, "D"), 252),
        "stamped at New York's midnight": (days.tz_localize(NEW_YORK).tz_convert(None), 252),
        "special Saturdays": (days.union(saturdays), 252 + 365.2425 / 7 / 17),
        "half hours": (local(days, "09:30", "16:00", "30min"), 252 * 13),
        "a break at noon": (tokyo[0].union(tokyo[1]), 252 * 10),
        "extended hours": (local(days, "04:00", "20:00", "1h"), 252 * 16),
        "FX with Sunday bars": (every[every.day_of_week != 5], 365.2425 * 6 / 7),
        "hours of FX": (
            fx_times(first, last, "1h").tz_localize(None),
            24 * (365.2425 * 5 / 7 - 1.5),
        ),
        "days of a market that never closes": (every, 365.2425),
        "hours of a market that never closes": (hours, 24 * 365.2425),
        "minutes": (local(days[:150], "09:30", "16:00", "1min"), 98_280),
    }  # fmt: skip


LEAST_DAYS, NEAR = 28, 0.02  # from four weeks on: a holiday or a special session in each hides none


@pytest.mark.heavy
@settings(max_examples=5, deadline=None)
@given(first=st.dates(datetime.date(2015, 1, 1), datetime.date(2021, 12, 31)))
def test_bars_in_a_year_stay_near_the_truth_as_a_file_grows(first):
    for name, (times, want) in calendars(pd.Timestamp(first), 3).items():
        times = times.to_numpy("datetime64[ns]")
        ends = times[0] + np.arange(LEAST_DAYS, 1090, 13) * np.timedelta64(1, "D")
        rows = np.unique(np.searchsorted(times, ends[ends <= times[-1]]))
        found = np.array([bars_per_year(times[:row]) for row in rows])
        worst = np.argmax(np.abs(found / want - 1.0))
        assert abs(found[worst] / want - 1.0) < NEAR, (name, times[rows[worst]], found[worst], want)
        # Nor does one more bar change it: over the two years after which all is counted, too.
        two_years = np.searchsorted(times, times[0] + np.timedelta64(730, "D"))
        some = [*rows[:3], *range(two_years - 3, min(two_years + 3, len(times)))]
        ratios = [bars_per_year(times[: row + 1]) / bars_per_year(times[:row]) for row in some]
        assert np.abs(np.array(ratios) - 1.0).max() < 0.012, (name, ratios)


def clocks_of_a_market(draw, opens, closes):
    """One or two pauses between two minutes of the day, each with its stretch of trading."""
    first = draw(st.integers(opens + 40, opens + 90))
    pauses = [(first, first + draw(st.integers(5, 90)))]
    if draw(st.booleans()):
        second = draw(st.integers(pauses[0][1] + 40, closes - 130))
        pauses.append((second, second + draw(st.integers(5, 90))))
    edges = [opens, *(minute for pause in pauses for minute in pause), closes]
    return list(zip(edges[::2], edges[1::2], strict=True))


@st.composite
def markets(draw):
    """A market written down minute by minute: its bars in UTC, their clock, its days and step."""
    step = draw(st.sampled_from([1, 10, 60, 120, 180, 300, 600, 900, 1200, 1800]))
    most = {1: 3, 10: 10, 60: 150}.get(step, 500)
    zone = draw(st.sampled_from([NEW_YORK, "Europe/Berlin", "Asia/Tokyo", "Asia/Kolkata", "UTC"]))
    days = pd.bdate_range(
        draw(st.dates(datetime.date(2019, 1, 1), datetime.date(2022, 12, 31))),
        periods=draw(st.integers(3, most)),
    )
    opens = draw(st.integers(7 * 60, 10 * 60))
    spans = clocks_of_a_market(draw, opens, opens + 450)
    # Bars are cut by the clock, or count from each open.
    by_clock = draw(st.booleans())
    of_day = [
        np.arange(60 * a // step * step if by_clock else 60 * a, 60 * z, step) for a, z in spans
    ]
    of_day = np.unique(np.concatenate(of_day)).astype("timedelta64[s]")
    clock = np.tile(of_day, len(days))
    local = pd.DatetimeIndex(np.repeat(days.to_numpy("datetime64[s]"), len(of_day)) + clock)
    return local.tz_localize(zone), clock, days, np.timedelta64(step, "s"), zone


@pytest.mark.heavy
@settings(max_examples=25, deadline=None)
@given(market=markets(), given_zone=st.booleans(), seed=st.integers(0, 2**32 - 1))
def test_a_pause_within_the_hours_is_no_gap_and_a_dropped_bar_is_one(market, given_zone, seed):
    time, clock, days, step, zone = market
    named = zone if given_zone else None
    assert len(missing(time, step, named)) == 0
    keep = np.random.default_rng(seed).random(len(time)) > 0.02
    keep[[0, -1]] = True
    # Such a time of the day is there on most others, and its hour in one week of five.
    few = pd.Series(keep).groupby(clock).transform("mean").to_numpy() < 0.6
    hour = pd.Series(time.tz_localize(None)).dt.strftime("%a %H")
    few |= pd.Series(keep).groupby(hour).transform("sum").to_numpy() == 0
    keep |= few
    assert list(missing(time[keep], step, named)) == list(time[~keep].tz_convert("UTC"))
    if len(days) > 40:  # a holiday is missing bars, and so is the afternoon of a half day
        date = time.tz_localize(None).normalize()
        shut = (date == days[20]) | ((date == days[27]) & (clock > np.median(clock)))
        assert list(missing(time[~shut], step, named)) == list(time[shut].tz_convert("UTC"))
