"""Real files with real faults: each is read right, or refused with its row and the remedy.

Beside each stands what pandas alone makes of it.
"""

import gzip

import numpy as np
import pandas as pd
import pytest
from refused import refusal

from nca_trader.data.bars import read_bars
from nca_trader.errors import BarError


@pytest.fixture
def messy(shared):
    return shared / "data" / "messy"


def raw_lines(path):
    """The file's own lines, split by hand."""
    return [line.split(",") for line in gzip.open(path, "rt").read().splitlines()]


def test_fewer_names_than_fields_are_refused_and_read_by_number(messy):
    path = messy / "2006-01-02-volume-min-001.txt.gz"
    alone = pd.read_csv(path)
    # Shifted by one: the day is gone from the columns, and the date is a time of day.
    assert alone["Date"].iloc[0] == "09:01:00" and "2006-01-02" in alone.index
    said = refusal(read_bars, path)
    assert "D022 line 2 and 30,888 more: 8 fields, more than the header's 7 names" in said
    assert "columns=" in said
    bars = read_bars(
        path,
        symbol="FESX",
        columns="time=1+2,open=3,high=4,low=5,close=6,volume=7",
        timezone="Europe/Berlin",
    )
    lines = raw_lines(path)[1:]
    assert len(bars) == len(lines) == 30_889
    for i, name in enumerate(("open", "high", "low", "close", "volume"), 2):
        want = [float(line[i]) for line in lines]
        np.testing.assert_array_equal(getattr(bars, name)[:, 0], want)
    berlin = bars.index.tz_convert("Europe/Berlin").strftime("%Y-%m-%d,%H:%M:%S")
    assert list(berlin) == [",".join(line[:2]) for line in lines]


def test_newest_first_is_refused_and_mended(messy, shared):
    path = messy / "BTC_USD-Hourly.csv.gz"
    alone = pd.read_csv(path)
    assert alone["unix"].iloc[0] > alone["unix"].iloc[-1]  # its returns run backwards
    said = refusal(read_bars, path)
    assert "D015 line 2 and 33,258 more" in said and "timezone=" in said
    assert "D020 line 3 and 33,257 more: times run backwards, newest first" in said
    bars = read_bars(path, timezone="UTC", repair="sort")
    want = pd.read_parquet(shared / "data" / "btcusd_hourly_2018_2022.parquet")
    np.testing.assert_array_equal(bars.time, want["time"].to_numpy("datetime64[ns]"))
    for name in ("open", "high", "low", "close"):
        np.testing.assert_array_equal(getattr(bars, name)[:, 0], want[name])
    # The other time column, of seconds since 1970, says the same.
    other = read_bars(path, columns="time=unix", repair="sort")
    assert other.digest() == bars.digest()


def test_day_first_dates_are_proved_and_gaps_are_missing_bars(messy):
    path = messy / "FOREX_EURUSD_1H_ASK.csv.gz"
    alone = pd.read_csv(path)
    guessed = pd.to_datetime(alone["Time"], errors="coerce")
    assert guessed.iloc[2] == pd.Timestamp("2017-02-01")  # for 2 January
    assert guessed.isna().mean() > 0.5  # and every day after the 12th is lost
    assert "D015 line 2 and 6,224 more: time '01.01.2017 22:00:00.000'" in refusal(read_bars, path)
    bars = read_bars(path, timezone="UTC")
    lines = raw_lines(path)[1:]
    assert list(bars.index.strftime("%d.%m.%Y %H:%M:%S.000")) == [line[0] for line in lines]
    np.testing.assert_array_equal(bars.close[:, 0], [float(line[4]) for line in lines])
    hours = np.diff(bars.time) / np.timedelta64(1, "h")
    assert (hours > 1).sum() == 52
    full = read_bars(path, timezone="UTC", every="1h")
    assert full.present.sum() == len(bars) and (~full.present).sum() < 100
    np.testing.assert_array_equal(full.close[full.present], bars.close[:, 0])
    weekend = (full.index.day_of_week == 5) | (
        (full.index.day_of_week == 6) & (full.index.hour < 21)
    )
    assert not weekend.any()


def test_a_file_without_header_and_with_a_footer_is_refused_and_read_by_number(messy):
    path = messy / "DJI.csv.gz"
    alone = pd.read_csv(path)
    assert list(alone.columns)[:2] == ["1/4/2016", "17148.93945"]  # the first day is lost
    assert alone.iloc[:, 1].dtype == "str"  # and the footer makes prices texts
    assert "D023 line 1 holds values, not the columns' names" in refusal(read_bars, path)
    said = refusal(read_bars, path, columns="time=1,close=2", repair="close-only,no-volume")
    assert "D013 line 697 and 2 more: time 'nan'" in said
    assert "D009 line 697 and 2 more: close = annulized return is not a number" in said
    bars = read_bars(path, columns="time=1,close=2", repair="close-only,no-volume,drop-bad")
    lines = raw_lines(path)[:-3]
    np.testing.assert_array_equal(bars.close[:, 0], [float(line[1]) for line in lines])
    days = [f"{t.month}/{t.day}/{t.year}" for t in bars.index]
    assert days == [line[0] for line in lines] and len(days) == 696


def test_columns_in_another_order_and_decades_of_closes_alone_are_read_and_noted(messy):
    path = messy / "SP500-fja.csv.gz"
    alone = pd.read_csv(path)
    # Taken by place, as (open, high, low, close), the lows lie above the opens' own lows.
    by_place = alone.iloc[:, 1:5].to_numpy()
    assert (by_place[:, 0] > by_place[:, 1]).any()
    # Adj Close never differs, so there is no adjustment to apply.
    bars = read_bars(path)
    header, *lines = raw_lines(path)
    for name in ("open", "high", "low", "close", "volume"):
        at = header.index(name.title())
        want = [float(line[at]) for line in lines]
        np.testing.assert_array_equal(getattr(bars, name)[:, 0], want)
    told = "Columns that are not used: Adj Close. "
    assert bars.note == f"{told}8,547 of 23,104 bars have open = high = low = close."
    assert (bars.volume == 0).sum() == 5_496
    assert str(bars.time[0])[:10] == lines[0][0] and str(bars.time[-1])[:10] == lines[-1][0]


def test_minutes_that_the_exchange_left_out_are_missing_bars(messy):
    path = messy / "UNITTEST_BTC-1m.feather"
    alone = pd.read_feather(path)
    steps = alone["date"].diff().dropna()
    assert (steps > pd.Timedelta("1min")).sum() == 538  # row n is not minute n
    bars = read_bars(path)
    assert bars.present.all() and len(bars) == len(alone)
    full = read_bars(path, every="1min")
    span = alone["date"].iloc[-1] - alone["date"].iloc[0]
    assert len(full) == span // pd.Timedelta("1min") + 1
    assert (np.diff(full.time) == np.timedelta64(1, "m")).all()
    want = alone.set_index("date").reindex(full.index)
    np.testing.assert_array_equal(full.present[:, 0], want["close"].notna())
    np.testing.assert_array_equal(full.close[:, 0], want["close"].ffill())
    np.testing.assert_array_equal(full.open[:, 0], want["open"].fillna(want["close"].ffill()))
    np.testing.assert_array_equal(full.volume[:, 0], want["volume"].fillna(0.0))


def test_a_long_file_under_other_names_is_refused_and_read_by_name(messy):
    path = messy / "stockdata2.csv.gz"
    alone = pd.read_csv(path)
    assert alone.set_index("Date").index.duplicated().sum() == 4 * 2305  # five assets in one
    assert "D003 no close column; the columns are , Date, stock, value, change" in refusal(
        read_bars, path
    )
    options = {"repair": "close-only,no-volume"}
    said = refusal(read_bars, path, columns="close=value", **options)
    assert 'Pass columns="close=value,symbol=stock"' in said
    # Without the symbols' column the five are one asset with five closes a day.
    said = refusal(read_bars, path, columns="close=value,symbol=-", **options)
    assert "D021 line 3 and 9,219 more: duplicate time 2007-01-03" in said
    bars = read_bars(path, columns="symbol=stock,close=value", repair="close-only,no-volume")
    assert bars.symbols == ("MSFT", "IBM", "SBUX", "AAPL", "GSPC") and bars.present.all()
    lines = [[field.strip('"') for field in line] for line in raw_lines(path)[1:]]
    for a, symbol in enumerate(bars.symbols):
        want = [float(line[3]) for line in lines if line[2] == symbol]
        np.testing.assert_array_equal(bars.close[:, a], want)


@pytest.mark.heavy
def test_missing_prices_splits_and_other_papers_of_a_long_file_are_told(messy):
    path = messy / "dow_jones_10_16.csv.gz"
    alone = pd.read_csv(path)
    apple = alone[alone["tic"] == "AAPL"]["prccd"]
    assert apple.pct_change().min() < -0.85  # the split of 2014 as a loss
    names = "time=datadate,symbol=tic,close=prccd"
    assert "D004 no time column" in refusal(read_bars, path)
    said = refusal(read_bars, path, columns=names, repair="close-only,no-volume")
    assert "D006 line 15894 and 110 more: close = nan" in said
    assert "D027 line 3821 and 4 more: ajexdi = 1 adjusts the prices" in said
    assert f'columns="{names},split=1/ajexdi"' in said
    assert "D025 line 21655: JPM.PG has no bar between 2013-07-05 and" in said
    assert "AAPL jumps from close 645.57 to open 93.7" in said
    bars = read_bars(
        path,
        columns=f"{names},split=1/ajexdi",
        repair="close-only,no-volume,drop-nan,keep-gaps",
        symbol=["AAPL", "V", "JPM.PG"],
    )
    known = alone[alone["prccd"].notna()].copy()
    known["adjusted"] = known["prccd"] / known["ajexdi"]
    for a, symbol in enumerate(bars.symbols):
        rows = known[known["tic"] == symbol]
        present = bars.present[:, a]
        got = pd.Series(bars.close[present, a]).pct_change()
        np.testing.assert_allclose(got, rows["adjusted"].pct_change(), rtol=1e-9, atol=1e-12)
        days = pd.to_datetime(rows["datadate"].astype(str))
        np.testing.assert_array_equal(bars.time[present], days.to_numpy("datetime64[ns]"))
        assert symbol == "JPM.PG" or got.abs().max() < 0.2
    assert bars.close[0, 0] == apple.iloc[0]
    whole = read_bars(
        path,
        columns=f"{names},split=1/ajexdi",
        repair="close-only,no-volume,drop-nan,part-reuse",
    )
    # Two tickers never had a price; another is two papers.
    assert not {"0051B", "4764B"} & set(whole.symbols)
    assert {"JPM.PG", "JPM.PG-2015"} <= set(whole.symbols)


def test_ticks_are_refused_and_their_digits_are_times_to_the_millisecond(messy):
    path = messy / "quote_tick_data.csv.gz"
    alone = pd.read_csv(path)
    assert len(alone) == 9_499 and alone.columns[0] == "20200101 170000065"  # one tick is lost
    with pytest.raises(ValueError):
        pd.to_datetime(alone.iloc[:, 0], format="ISO8601")
    assert "D023 line 1 holds values" in refusal(read_bars, path)
    options = {"columns": "time=1,close=2", "repair": "close-only,no-volume"}
    assert "D015 line 1 and 9,499 more: time '20200101 170000065'" in refusal(
        read_bars, path, **options
    )
    bars = read_bars(path, timezone="Etc/GMT+5", **options)
    lines = raw_lines(path)
    local = bars.index.tz_convert("Etc/GMT+5")
    assert [t.strftime("%Y%m%d %H%M%S%f")[:-3] for t in local] == [line[0] for line in lines]
    np.testing.assert_array_equal(bars.close[:, 0], [float(line[1]) for line in lines])


@pytest.mark.parametrize("name", ["btcperp_minute_2022_01", "btcusd_hourly_2018_2022"])
def test_crypto_sets_are_read_as_they_stand(shared, name):
    path = shared / "data" / f"{name}.parquet"
    assert "D015 row 0" in refusal(read_bars, path)
    bars, want = read_bars(path, timezone="UTC"), pd.read_parquet(path)
    told = {"btcusd_hourly_2018_2022": "Columns that are not used: volume_usd."}
    assert bars.present.all() and bars.note == told.get(name, "")
    np.testing.assert_array_equal(bars.time, want["time"].to_numpy("datetime64[ns]"))
    for field in ("open", "high", "low", "close", "volume"):
        np.testing.assert_array_equal(getattr(bars, field)[:, 0], want[field])


def test_quotes_are_not_taken_for_assets(shared):
    path = shared / "data" / "eurusd_hourly_quotes.parquet"
    assert "D005 no volume column" in refusal(read_bars, path, timezone="UTC")
    bars, want = read_bars(path, timezone="UTC", repair="no-volume"), pd.read_parquet(path)
    assert bars.symbols == ("EURUSD",)
    np.testing.assert_array_equal(bars.close[:, 0], want["close"])
    bid = read_bars(
        path,
        timezone="UTC",
        repair="no-volume",
        columns="open=bid_open,high=bid_high,low=bid_low,close=bid_close",
    )
    np.testing.assert_array_equal(bid.low[:, 0], want["bid_low"])
    only = want.drop(columns=["open", "high", "low", "close"])
    with pytest.raises(BarError, match="D003 no close column"):
        read_bars(only, timezone="UTC")


@pytest.mark.parametrize("name", ["us_equity_daily", "us_equity_hourly"])
def test_equities_are_adjusted_to_their_vendor_s_returns(shared, name):
    path = shared / "data" / f"{name}.parquet"
    zone = "America/New_York" if "hourly" in name else None
    said = refusal(read_bars, path, timezone=zone)
    assert "D027" in said and 'columns="split=split_factor,dividend=price_factor"' in said
    bars = read_bars(
        path,
        timezone=zone,
        symbol=["SPY", "AAPL", "IBM"],
        columns="split=split_factor,dividend=price_factor",
        repair="keep-jumps",
    )
    want = pd.read_parquet(path)
    for a, symbol in enumerate(bars.symbols):
        rows, present = want[want["symbol"] == symbol], bars.present[:, a]
        assert present.sum() == len(rows) and bars.close[0, a] == rows["close"].iloc[0]
        got, adjusted = np.log(bars.close[present, a]), np.log(rows["adj_close"].to_numpy())
        np.testing.assert_allclose(np.diff(got), np.diff(adjusted), atol=1e-9)
        shares = rows["volume"] / rows["split_factor"] * rows["split_factor"].iloc[0]
        np.testing.assert_allclose(bars.volume[present, a], shares, rtol=1e-12)
        local = bars.index[present] if "daily" in name else bars.index[present].tz_convert(zone)
        wall = local.tz_localize(None).to_numpy("datetime64[ns]")
        np.testing.assert_array_equal(wall, rows["time"].to_numpy("datetime64[ns]"))


def test_reused_tickers_are_named_with_their_spans(shared):
    path = shared / "data" / "us_equity_daily.parquet"
    options = {
        "columns": "split=split_factor,dividend=price_factor",
        "symbol": ["FB", "SPY"],
    }
    said = refusal(read_bars, path, **options)
    assert "FB has no bar between 2003-03-28 and 2012-05-18" in said
    bars = read_bars(
        path,
        columns=options["columns"],
        symbol=["FB-2012", "FB", "SPY"],
        repair="part-reuse,keep-jumps",
    )
    want = pd.read_parquet(path)
    late = want[(want["symbol"] == "FB") & (want["time"] > "2010")]
    np.testing.assert_array_equal(bars.close[bars.present[:, 0], 0], late["close"])
    early = bars.time[bars.present[:, 1]]
    assert str(early[-1]).startswith("2003-03-28") and str(early[0]).startswith("1999-09-29")
