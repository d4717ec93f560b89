"""The same bars laid out in other ways are the same bars; what can't be told apart is refused."""

import io

import numpy as np
import pandas as pd
import pytest
from refused import refusal

from nca_trader.data.bars import read_bars
from nca_trader.errors import BarError
from nca_trader.types import PRICES

FIELDS = (*PRICES, "volume")


def frame_of(symbol, first, days=6):
    """A long frame of one asset, from integers, so that every text of them is exact."""
    close = first + np.arange(days) + 0.25
    time = pd.date_range("2021-01-28", periods=days, tz="UTC")
    prices = {"open": close - 0.5, "high": close + 1.5, "low": close - 1.5, "close": close}
    return pd.DataFrame({"time": time, "symbol": symbol, **prices, "volume": 1000.0 + close})


@pytest.fixture(scope="module")
def long():
    """Two assets; MSFT has no bar on the third day."""
    other = frame_of("MSFT", 200)
    return pd.concat([frame_of("AAPL", 100), other.drop(index=2)], ignore_index=True)


def wide_of(long, name):
    """The wide table whose column of a symbol and a field is called `name(symbol, field)`."""
    columns, times = {}, sorted(long["time"].unique())
    for symbol, rows in long.groupby("symbol"):
        for field in FIELDS:
            columns[name(symbol, field)] = rows.set_index("time")[field]
    wide = pd.DataFrame(columns, index=times)
    return wide.assign(time=[f"{t:%Y-%m-%d}" for t in times]).reset_index(drop=True)


@pytest.mark.parametrize("name", [
    "{s}_{f}".format, "{f}_{s}".format, "{s} {f}".format, "{f}.{s}".format, "{s}-{f}".format,
    lambda s, f: f"{s}_{f.title()}",
])  # fmt: skip
def test_wide_columns_are_the_long_file(read, long, name):
    wide = wide_of(long, lambda s, f: name(s=s, f=f) if name.__name__ == "format" else name(s, f))
    want = read_bars(long)
    assert want.present.sum() == 11 and not want.present[2, 1]
    assert read(wide.to_csv(index=False)).digest() == want.digest()
    assert read_bars(wide).digest() == want.digest()
    assert read_bars(wide, symbol="MSFT").present.all()


def test_headers_of_two_levels_are_the_long_file(read, long, tmp_path):
    want = read_bars(long).digest()
    wide = wide_of(long, lambda s, f: f"{s}|{f}").drop(columns="time")
    pairs = [tuple(column.split("|")) for column in wide.columns]
    for order in (pairs, [pair[::-1] for pair in pairs]):
        for names in ((None, None), ("Price", "Ticker")):
            frame = wide.copy()
            frame.columns = pd.MultiIndex.from_tuples(order, names=names)
            frame.index = pd.DatetimeIndex(sorted(long["time"].unique()), name="Date")
            assert read_bars(frame).digest() == want
            text = frame.tz_localize(None).to_csv()
            assert text.splitlines()[2].startswith("Date")
            assert read(text).digest() == want
            frame.to_parquet(tmp_path / "bars.parquet")
            assert read_bars(tmp_path / "bars.parquet").digest() == want
    # As a spreadsheet writes it: each symbol once, over merged cells, and no row for the index.
    upper = "".join(f",{symbol},,,," for symbol in ("AAPL", "MSFT"))
    lower = "Date," + ",".join(FIELDS * 2)
    rows = wide_of(long, "{}_{}".format)
    rows = rows[["time", *[c for c in rows.columns if c != "time"]]]
    body = rows.to_csv(index=False).partition("\n")[2]
    assert read(f"{upper}\n{lower}\n{body}").digest() == want


def test_a_time_in_the_index_and_in_a_column_is_refused(long):
    for name in ("time", None):
        with pytest.raises(BarError, match="D005 the index and a column are both called 'time'"):
            read_bars(long.set_index("time", drop=False).rename_axis(name))


def test_a_fault_of_a_wide_file_names_line_and_asset(read, long):
    wide = wide_of(long, "{}_{}".format)
    wide.iloc[4, wide.columns.get_loc("MSFT_low")] = -1.0
    wide.iloc[3, wide.columns.get_loc("AAPL_close")] = np.nan  # its other cells are filled
    said = refusal(read, wide.to_csv(index=False))
    assert "D008 line 6, MSFT: low = -1.0" in said and "D006 line 5, AAPL: close = nan" in said
    twice = wide_of(long, "{}_{}".format)
    twice["close_MSFT"] = twice["MSFT_close"]
    assert "'MSFT_close' and 'close_MSFT' both mean close of MSFT" in refusal(
        read, twice.to_csv(index=False)
    )


def test_a_table_of_closes_alone_is_read_where_that_is_said(read, long):
    closes = long.pivot(index="time", columns="symbol", values="close").reset_index()
    closes["time"] = closes["time"].dt.strftime("%Y-%m-%d")
    text = closes.to_csv(index=False)
    assert "D003 no close column; the columns are time, AAPL, MSFT" in refusal(read, text)
    bars = read(text, columns="close=*", repair="close-only,no-volume")
    np.testing.assert_array_equal(bars.close, read_bars(long).close)
    np.testing.assert_array_equal(bars.present, read_bars(long).present)


@pytest.mark.parametrize("delimiter", [";", "\t", "|", "^", "~", "#", " "])
@pytest.mark.parametrize("decimal", [".", ","])
def test_any_delimiter_and_a_decimal_comma_are_read(read, long, delimiter, decimal):
    stream = io.StringIO()
    days = long.assign(time=long["time"].dt.strftime("%Y-%m-%d"))
    days.to_csv(stream, sep=delimiter, decimal=decimal, index=False)
    assert read(stream.getvalue()).digest() == read_bars(long).digest()


def test_a_comma_that_may_part_thousands_is_refused(read):
    text = "time;open;high;low;close;volume\n2021-01-28;1,234;1,236;1,233;1,235;10\n"
    said = refusal(read, text)
    assert "D018 line 2: '1,234' may have a decimal comma or one between thousands" in said
    assert read(text, decimal=",").close[0, 0] == 1.235
    assert read(text + "2021-01-29;1,2345;1,2355;1,23;1,235;9\n").close[0, 0] == 1.235
    assert 'decimal="," or decimal=".", by which it parts thousands' in said
    assert read(text, decimal=".").close[0, 0] == 1235.0
    assert "D009" in refusal(read, text.replace("10\n", "1.5\n"), decimal=",")
    with pytest.raises(BarError, match="unknown decimal sign ':'"):
        read(text, decimal=":")
    bad = text.replace("1,236", "1,2x6").replace("1,235", "1,2355")
    said = refusal(read, bad)  # the column's other cells are still numbers
    assert "D009 line 2: high = 1,2x6 is not a number" in said and "\n" not in said


DAYS = ["01/02/2021", "02/02/2021", "03/02/2021"]


def dated(days, clock=""):
    rows = [f"{day}{clock},10,11,9,{10 + i / 4},5" for i, day in enumerate(days)]
    return "\n".join(["time,open,high,low,close,volume", *rows]) + "\n"


def test_day_and_month_are_told_apart_by_proof_or_option_alone(read):
    said = refusal(read, dated(DAYS))
    assert "D017 line 2 and 2 more: time '01/02/2021': no date shows which is the day" in said
    assert 'dates="dmy" or dates="mdy"' in said
    for order, want in (("dmy", ["02-01", "02-02", "02-03"]), ("mdy", ["01-02", "02-02", "03-02"])):
        assert list(read(dated(DAYS), dates=order).index.strftime("%m-%d")) == want
    proved = read(dated([*DAYS, "13/02/2021"]))
    assert list(proved.index.strftime("%m-%d")) == ["02-01", "02-02", "02-03", "02-13"]
    proved = read(dated([*DAYS, "3/13/2021"]))
    assert list(proved.index.strftime("%m-%d")) == ["01-02", "02-02", "03-02", "03-13"]
    both = refusal(read, dated([*DAYS, "13/02/2021", "14/02/2021", "02/15/2021"]))
    assert "D017 line 7: time '02/15/2021' has day and month in another order" in both
    wrong = refusal(read, dated([*DAYS, "13/02/2021"]), dates="mdy")
    assert "D013 line 5: time '13/02/2021' can't be read" in wrong
    for sign in "./-":
        days = [day.replace("/", sign) for day in [*DAYS, "13/02/2021"]]
        clock = read(dated(days, " 9:30"), timezone="UTC")
        assert str(clock.time[0])[:16] == "2021-02-01T09:30"
    with pytest.raises(BarError, match=r"unknown order of dates 'ymd'; give dmy \(31.12.2018\)"):
        read(dated(DAYS), dates="ymd")


@pytest.mark.parametrize("clock", ["1.5", "1e300", "inf"])
def test_a_second_column_of_a_time_that_holds_no_clock_is_refused(read, clock):
    text = f"day,clock,close\n20210201,90100,10\n20210202,{clock},10\n"
    said = refusal(read, text, columns="time=1+2", repair="close-only,no-volume", timezone="UTC")
    assert "D013 line 3: time '20210202 " in said


def test_columns_are_named_by_name_or_number_and_nothing_is_guessed(read, long):
    text = "Day,Sym,O,H,L,Last,Qty\n" + long.assign(
        time=long["time"].dt.strftime("%Y-%m-%d")
    ).to_csv(index=False, header=False)
    names = "time=Day,symbol=sym,open=O,high=H,low=L,close=Last,volume=Qty"
    numbers = "time=1,symbol=2,open=3,high=4,low=5,close=6,volume=7"
    want = read_bars(long).digest()
    assert read(text, columns=names).digest() == want
    assert read(text, columns=numbers).digest() == want
    assert read(text.partition("\n")[2], columns=numbers).digest() == want
    given = dict(pair.split("=") for pair in numbers.split(","))
    assert read(text, columns={role: int(at) for role, at in given.items()}).digest() == want
    assert "no column 'Close'; the columns are Day, Sym" in refusal(
        read, text, columns=names.replace("Last", "Close")
    )
    assert "no column '8'" in refusal(read, text, columns=numbers.replace("7", "8"))
    assert "did you mean 'close'" in refusal(read, text, columns="clse=Last")
    assert "has no column" in refusal(read, text, columns="close")
    assert "names a role twice" in refusal(read, text, columns="close=O,close=H")


def test_blanks_and_case_do_not_make_other_assets(tmp_path):
    days = pd.date_range("2020-01-01", periods=6).strftime("%Y-%m-%d")
    names = ["SPY", "SPY ", " SPY", "spy", "QQQ", "SPY"]
    rows = [f"{day},{name},10,11,9,10,5" for day, name in zip(days, names, strict=True)]
    path = tmp_path / "bars.csv"
    path.write_text("\n".join(["time,symbol,open,high,low,close,volume", *rows]) + "\n")
    with pytest.raises(BarError, match=r"D024 line 5: the symbols 'SPY' and 'spy' differ in case"):
        read_bars(path)
    bars = read_bars(path, repair="keep-case")
    assert bars.symbols == ("SPY", "spy", "QQQ")
    assert bars.present.sum(axis=0).tolist() == [4, 1, 1]
    assert "Blanks around symbols were removed, first of 'SPY '." in bars.note
    assert read_bars(path, "SPY").present.sum() == 4
    # A blank may hide that a bar is there twice.
    path.write_text(path.read_text().replace("2020-01-02,SPY ", "2020-01-01,SPY "))
    with pytest.raises(BarError, match="D021 line 3"):
        read_bars(path, repair="keep-case")
