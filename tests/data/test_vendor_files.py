"""Files as vendors write them: read right, or answered with a line and an option that reads it."""

import functools
import re

import numpy as np
import pandas as pd
import pytest
from refused import refusal

from nca_trader.data.bars import read_bars
from nca_trader.data.reading.times import _iso, read_times
from nca_trader.errors import BarError

CLOSE = "close-only,no-volume"


@pytest.fixture
def read(read):
    """Reads a text as the file X.csv."""
    return functools.partial(read, name="X.csv")


def asked(said):
    """The options of the last remedy of a message, as a Python caller would write them."""
    found = re.findall(r'(columns|repair|split|dates|decimal|timezone)="([^"]*)"', said)
    assert found, said
    return dict([found[0]])


def of_times(*times):
    rows = [f"{time},10,11,9,{10 + i % 8 / 8},5" for i, time in enumerate(times)]
    return "\n".join(["date,open,high,low,close,volume", *rows]) + "\n"


MOMENTS = ["2023-03-03T14:30:00", "2023-03-03T21:00:00"]  # 09:30 and 16:00 of New York
NEW_YORK = {"timezone": "America/New_York"}


@pytest.mark.parametrize(("first", "second", "options"), [
    ("20230303 09:30:00 US/Eastern", "20230303 16:00:00 US/Eastern", {}),
    ("20230303  09:30:00", "20230303  16:00:00", NEW_YORK),
    ("20230303-09:30:00", "20230303-16:00:00", NEW_YORK),
    ("20230303 09:30:00 America/New_York", "20230303 16:00:00 America/New_York", {}),
    ("2023-03-03  09:30:00", "2023-03-03  16:00:00", NEW_YORK),
    ("03/03/2023 09:30 AM", "03/03/2023 04:00 PM", NEW_YORK | {"dates": "mdy"}),
    ("2023-03-03 9:30:00 am", "2023-03-03 4:00:00 pm", NEW_YORK),
    ("03-Mar-2023 09:30", "03-Mar-2023 16:00", NEW_YORK),
    ("Mar 3, 2023 9:30 AM", "Mar 3, 2023 4:00 PM", NEW_YORK),
    ("Fri, 3 March 2023 09:30", "Fri, 3 March 2023 16:00", NEW_YORK),
    ("2023.03.03 09:30", "2023.03.03 16:00", NEW_YORK),
    ("2023/03/03 09:30", "2023/03/03 16:00", NEW_YORK),
    ("2023-03-03 09:30:00", "2023-03-03 16:00:00", {"timezone": "-05:00"}),
    ("2023-03-03 09:30:00 -05:00", "2023-03-03 16:00:00 -05:00", {}),
    ("03.03.2023 15:30:00.000 GMT+0100", "03.03.2023 22:00:00.000 GMT+0100", {"dates": "dmy"}),
    ("20230303 143000", "20230303 210000", {"timezone": "UTC"}),
    ("20230303143000", "20230303210000", {"timezone": "UTC"}),
    ("20230303 143000000", "20230303 210000000", {"timezone": "UTC"}),
    ("20230303T1430", "20230303T2100", {"timezone": "UTC"}),
    ("2023-03-03T14:30Z", "2023-03-03T21:00Z", {}),
    ("2023-03-03 09:30:00-0500", "2023-03-03 16:00:00-0500", {}),
    ("1677853800", "1677877200", {}),
    ("1677853800000", "1677877200000", {}),
    ("1677853800000000", "1677877200000000", {}),
    ("1677853800000000000", "1677877200000000000", {}),
])  # fmt: skip
def test_every_way_of_writing_a_moment_is_that_moment(read, first, second, options):
    text = of_times(f'"{first}"', f'"{second}"')
    bars = read(text, **options)
    assert [str(time)[:19] for time in bars.time] == MOMENTS
    if "timezone" in options:
        assert "D015 line 2 and 1 more" in refusal(read, text, **options | {"timezone": None})


ISO = ("%Y-%m-%d", "%Y-%m-%dT%H", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M:%S.%f", "%Y-%m-%dT%H:%M%z")


@pytest.mark.parametrize("form", ISO)
def test_times_of_iso_8601_are_read_alike_with_and_without_others_among_them(form):
    texts = pd.Series(
        pd.date_range("2020-02-27", periods=80, freq="7h", tz="-05:00").strftime(form)
    )
    assert _iso(texts) is not None and _iso(pd.concat([texts, pd.Series(["soon"])])) is None
    alone = read_times(texts, "UTC", None)
    among = read_times(pd.concat([texts, pd.Series(["soon"])], ignore_index=True), "UTC", None)
    np.testing.assert_array_equal(alone.utc, among.utc[:-1])
    want = [pd.to_datetime(text, utc=True).to_datetime64() for text in texts]
    np.testing.assert_array_equal(alone.utc, want)


def test_a_clock_of_two_halves_has_noon_and_midnight(read):
    clocks = ["12:00 AM", "12:30 AM", "11:59 AM", "12:00 PM", "12:30 PM", "11:59 PM"]
    bars = read(of_times(*(f"2023-03-03 {clock}" for clock in clocks)), timezone="UTC")
    want = ["00:00", "00:30", "11:59", "12:00", "12:30", "23:59"]
    assert list(bars.index.strftime("%H:%M")) == want
    said = refusal(read, of_times("2023-03-03 13:00 PM", "2023-03-03 01:30 PM"), timezone="UTC")
    assert "D013 line 2: time '2023-03-03 13:00 PM'" in said


def test_a_zone_in_the_text_repeats_and_skips_an_hour_as_its_clock_does(read):
    times = [f"20231105 {hour:02}:30:00 US/Eastern" for hour in range(4)]
    said = refusal(read, of_times(*times))
    assert "D016 line 3: time '20231105 01:30:00 US/Eastern' is skipped or repeated by the" in said
    bars = read(of_times(times[0], *times[2:]))
    assert list(bars.index.strftime("%H:%M")) == ["04:30", "07:30", "08:30"]
    with pytest.raises(BarError, match="unknown time zone '-5:00'"):
        read(of_times(*times), timezone="-5:00")


@pytest.mark.parametrize(("days", "want"), [
    (["27-Feb-2023", "28-Feb-2023", "01-Mar-2023"], "2023-02-27"),
    (["27-feb-23", "28-feb-23", "01-mar-23"], "2023-02-27"),
    (['"Feb 27, 2023"', '"Feb 28, 2023"', '"Mar 01, 2023"'], "2023-02-27"),
    (["2/27/2023", "2/28/2023", "3/1/2023"], "2023-02-27"),
])  # fmt: skip
def test_days_with_the_name_of_a_month(read, days, want):
    bars = read(of_times(*days))
    assert str(bars.time[0])[:10] == want and list(
        np.diff(bars.time).astype("m8[D]").astype(int)
    ) == [1, 1]
    said = refusal(read, of_times(*days, "30-Xyz-2023"))
    assert "D013 line 5: time '30-Xyz-2023'" in said


def test_years_of_two_digits_need_the_order(read):
    text = of_times("27/02/23", "28/02/23", "01/03/23")
    said = refusal(read, text)
    assert "D017 line 2" in said and asked(said) == {"dates": "dmy"}
    assert str(read(text, **asked(said)).time[2])[:10] == "2023-03-01"


def test_a_spreadsheet_s_count_of_days_is_no_time(read):
    said = refusal(read, of_times(44988.39583, 44988.66667))
    assert "D013 line 2 and 1 more" in said and "Write it as 2018-12-31" in said


NASDAQ = """Date,Close/Last,Volume,Open,High,Low
07/14/2025,$208.62,38840110,$209.93,$210.91,$207.54
07/11/2025,$211.16,39765810,$210.57,$212.13,$209.86
"""


@pytest.mark.parametrize("text", [NASDAQ, NASDAQ.replace("$", ""), NASDAQ.replace("$", "€ ")])
def test_nasdaq_com(read, text):
    said = refusal(read, text)
    assert "D020" in said and "\n" not in said and asked(said) == {"repair": "sort"}
    bars = read(text, repair="sort")
    assert bars.symbols == ("X",) and str(bars.time[0])[:10] == "2025-07-11"
    np.testing.assert_array_equal(bars.close[:, 0], [211.16, 208.62])
    np.testing.assert_array_equal(bars.high[:, 0], [212.13, 210.91])


INVESTING = """"Date","Price","Open","High","Low","Vol.","Change %"
"04/06/2020","7,264.86","7,257.84","7,267.00","7,248.17","184.52M","6.72%"
"04/09/2020","7,278.20","7,277.58","7,281.20","7,275.47","1.5B","1.52%"
"04/14/2020","978.20","977.58","981.20","975.47","190K","1.52%"
"""


def test_investing_com(read):
    bars = read(INVESTING, repair="keep-jumps")
    np.testing.assert_array_equal(bars.close[:, 0], [7264.86, 7278.20, 978.20])
    np.testing.assert_array_equal(bars.volume[:, 0], [184.52e6, 1.5e9, 190e3])
    unproved = "\n".join(INVESTING.splitlines()[:3])
    said = refusal(read, unproved)
    assert "D017 line 2 and 1 more" in said
    assert str(read(unproved, dates="mdy").time[0])[:10] == "2020-04-06"
    german = INVESTING.replace(".", "!").replace(",", ".").replace("!", ",").replace('"."', '","')
    german = re.sub(r"(\d\d)/(\d\d)/", r"\2.\1.", german).replace("Vol,", "Vol.")
    np.testing.assert_array_equal(read(german, repair="keep-jumps").close, bars.close)
    assert (read(german, repair="keep-jumps").time == bars.time).all()


@pytest.mark.parametrize(("cells", "want"), [
    (["1'234.5", "1'235.25"], [1234.5, 1235.25]),
    (["1,234,567", "1,234,568"], [1234567, 1234568]),
    (["1234,5", "1235,25"], [1234.5, 1235.25]),
    (["1.234,5", "1.235,25"], [1234.5, 1235.25]),
    (["1\u00a0234,5", "1\u00a0235,25"], [1234.5, 1235.25]),
    (["+1.5", "$1.25"], [1.5, 1.25]),
    (["12,34,567", "1,01,23,456"], [1234567, 10123456]),
    (["1,23,456.5", "9,87,654.25"], [123456.5, 987654.25]),
])  # fmt: skip
def test_numbers_with_signs_between_thousands(read, cells, want):
    rows = [f'2023-03-0{i + 1};"{cell}"' for i, cell in enumerate(cells)]
    bars = read("\n".join(["date;close", *rows]) + "\n", repair=CLOSE)
    np.testing.assert_array_equal(bars.close[:, 0], want)
    quoted = "\n".join(["date,close", *rows]).replace(";", ",") + "\n"
    np.testing.assert_array_equal(read(quoted, repair=CLOSE).close[:, 0], want)


@pytest.mark.parametrize("cell", ["1,23,4567.5", "12,34", "1.2.3", "5Q", "$", "1 2"])
def test_what_is_no_number_stays_none(read, cell):
    rows = [f"2023-03-{i:02},10.25" for i in range(1, 13)] + [f'2023-03-13,"{cell}"']
    said = refusal(read, "\n".join(["date,close", *rows]), repair=CLOSE)
    assert f"D009 line 14: close = {cell} is not a number" in said and "(drops" not in said


@pytest.mark.parametrize("above", [
    "THIS DATA IS PROVIDED WITHOUT WARRANTY.\n", "# Symbol: X\n# Made on: 2024-01-02\n\n",
    "Symbol,X\nFrom,2023-01-01,to,2023-12-31,daily,bars,of,one,exchange\n", "\n",
])  # fmt: skip
def test_lines_above_the_header(read, above):
    body = of_times("2023-03-01", "2023-03-02", "2023-03-03")
    want = read(body)
    assert read(above + body).digest() == want.digest()
    line = above.count("\n") + 3
    assert f"D007 line {line}: close = inf" in refusal(read, above + body.replace("10.125", "inf"))
    short = f"{above}{body}2023-03-04,10,11\n"
    assert f"D022 line {line + 2}: fewer fields" in refusal(read, short)
    wide = f"{above}{body}2023-03-04,10,11,9,10,5,7,8\n"
    assert f"D022 line {line + 2}: 8 fields, more than the header's 6" in refusal(read, wide)


def test_pairs_of_a_symbol_and_a_field_below_a_line(read):
    text = "NO WARRANTY, AT ALL\nDate,VIX Open,VIX High,VIX Low,VIX Close\n"
    text += "1/13/2022,17.7,18.6,17.5,18.3\n"
    bars = read(text, repair="no-volume")
    assert bars.symbols == ("VIX",) and bars.close[0, 0] == 18.3


def test_a_missing_value_of_bloomberg(read):
    text = of_times("2023-03-01", "2023-03-02").replace("10.125", "#N/A N/A")
    assert "D006 line 3: close = nan" in refusal(read, text)


EVENTS = """timestamp,open,high,low,close,volume,dividend_amount,split_coefficient
2020-08-27,508.57,509.94,495.33,500.04,38888096,0.0,1.0
2020-08-28,504.05,505.77,498.31,499.23,46907479,0.0,1.0
2020-08-31,127.58,131.00,126.00,129.04,225702688,0.0,4.0
2020-09-01,132.76,134.80,130.53,134.18,152470142,0.0,1.0
"""
BY_HAND = [500.04, 499.23, 4 * 129.04, 4 * 134.18]


@pytest.mark.parametrize("name", ["split_coefficient", "splitFactor", "Stock Splits", "ratio"])
def test_a_ratio_on_the_day_of_a_split_is_no_factor_of_every_day(read, name):
    """Splits of Alpha Vantage, Tiingo and Yahoo, and of a column with an unknown name."""
    text = EVENTS.replace("split_coefficient", name)
    text = re.sub(r",1\.0$", ",0.0", text, flags=re.M) if name == "Stock Splits" else text
    said = refusal(read, text)
    assert "D026 line 4: X jumps from close 499.23 to open 127.58" in said
    if name != "ratio":
        assert f"D027 line 4: {name} = 4 adjusts the prices" in said
        assert f'columns="split={name}"' in said
    bars = read(text, columns=f"split={name}")
    np.testing.assert_allclose(bars.close[:, 0], BY_HAND, rtol=1e-15)
    np.testing.assert_array_equal(read(text, split="X:2020-08-31:4").close, bars.close)
    np.testing.assert_array_equal(bars.volume[2:, 0], [225702688 / 4, 152470142 / 4])
    assert "Splits are ratios on their days alone." in bars.note
    back = "\n".join([text.splitlines()[0], *text.splitlines()[:0:-1]])
    assert read(back, columns=f"split={name}", repair="sort").digest() == bars.digest()


def test_a_split_next_to_prices_that_are_adjusted_for_it_is_not_applied(read):
    adjusted = EVENTS
    for old in ("508.57,509.94,495.33,500.04", "504.05,505.77,498.31,499.23"):
        new = ",".join(f"{float(price) / 4:.4f}" for price in old.split(","))
        adjusted = adjusted.replace(old, new)
    bars = read(adjusted)
    np.testing.assert_array_equal(bars.close[:, 0], [125.01, 124.8075, 129.04, 134.18])
    assert "D026" in refusal(read, adjusted, columns="split=split_coefficient")


def test_factors_that_stay_until_the_next_split_are_read_as_before(read):
    levels = EVENTS.replace(",1.0\n", ",0.25\n", 2).replace(",4.0\n", ",1.0\n")
    bars = read(levels, columns="split=split_coefficient")
    np.testing.assert_allclose(bars.close[:, 0], BY_HAND, rtol=1e-15)
    assert "ratios" not in bars.note


def test_a_split_that_the_user_gives(read):
    text = "\n".join(line.rpartition(",")[0] for line in EVENTS.splitlines())
    said = refusal(read, text)
    assert said.count("\n") == 0 and asked(said) == {"split": "X:2020-08-31:4/1"}
    bars = read(text, **asked(said))
    np.testing.assert_allclose(bars.close[:, 0], BY_HAND, rtol=1e-15)
    assert "Split of X on 2020-08-31 by 4, as given." in bars.note
    assert read(text, split=["X:2020-08-31:4"]).digest() == bars.digest()
    # Between two bars any day says the same.
    assert read(text, split="X:2020-08-29:4").digest() == bars.digest()
    assert "D024 no symbol 'Y' of a split. Choose from X." in refusal(
        read, text, split="Y:2020-08-31:4"
    )
    for day in ("2020-08-27", "2020-09-02"):
        assert "has no bars on both sides of its split" in refusal(read, text, split=f"X:{day}:4")
    for wrong in (
        "X:2020-08-31",
        "X:31.08.2020:4",
        "X:2020-08-31:0",
        ":2020-08-31:4",
        "X:2020-08-31:1/0",
    ):
        with pytest.raises(BarError, match="is not SYMBOL:DATE:RATIO"):
            read(text, split=wrong)


def test_milliseconds_that_become_microseconds(read):
    """Binance, 2025; whichever of the two is the larger part, and whichever comes first."""
    time = pd.date_range("2024-12-25", periods=14, freq="1D", tz="UTC")
    for switch in (2, 7, 12):
        unit = [10**6 if i < switch else 10**3 for i in range(14)]
        stamps = [t.value // u for t, u in zip(time, unit, strict=True)]
        bars = read(of_times(*stamps).partition("\n")[2], columns=BINANCE)
        assert (bars.index == time).all() and "in microseconds" in bars.note
        back = read(of_times(*stamps[::-1]), repair="sort")
        assert (back.index == time).all()
    other = read(of_times(*(t.value // 10**6 for t in time)))
    assert other.note == "" and (other.index == time).all()


BINANCE = "time=1,open=2,high=3,low=4,close=5,volume=6"


def test_columns_by_number_that_a_message_names_read_the_file(read):
    binance = "1735603200000,93000,93100,92900,93050,10.5,1735606799999\n"
    binance += "1735606800000,93050,93200,93000,93150,11.5,1735610399999\n"
    said = refusal(read, binance)
    assert said.partition("D0")[2].startswith("23 line 1") and asked(said) == {"columns": BINANCE}
    assert read(binance, **asked(said)).volume[1, 0] == 11.5
    two = "2024.01.02,00:00,1.10,1.11,1.09,1.105,6418\n2024.01.02,00:01,1.105,1.12,1.10,1.11,51\n"
    said = refusal(read, two)
    assert asked(said) == {"columns": BINANCE}  # an example: which column is which, the user knows
    columns = "time=1+2,open=3,high=4,low=5,close=6,volume=7"
    assert len(read(two, columns=columns, timezone="UTC")) == 2


MT5 = """<DATE>\t<TIME>\t<OPEN>\t<HIGH>\t<LOW>\t<CLOSE>\t<TICKVOL>\t<VOL>\t<SPREAD>
2024.01.02\t00:00:00\t1.10\t1.11\t1.09\t1.105\t6418\t0\t3
2024.01.02\t01:00:00\t1.105\t1.12\t1.10\t1.11\t5105\t0\t4
"""


def test_metatrader_5(read):
    said = refusal(read, MT5)
    assert "D015 line 2 and 1 more: time '2024.01.02 00:00:00' has no time zone" in said
    bars = read(MT5, timezone="Europe/Athens")
    assert [str(t)[:16] for t in bars.time] == ["2024-01-01T22:00", "2024-01-01T23:00"]
    np.testing.assert_array_equal(bars.volume[:, 0], [6418, 5105])
    assert "Volume is the number of ticks" in bars.note and bars.half_spread is None
    same = read(MT5, timezone="Europe/Athens", columns="time=<DATE>+<TIME>")
    assert same.digest() == bars.digest()
    real = read(MT5.replace("\t0\t", "\t7\t"), timezone="Europe/Athens")
    np.testing.assert_array_equal(real.volume[:, 0], [7, 7])
    alone = re.sub(r"\t(<VOL>|0)\t", "\t", MT5)
    np.testing.assert_array_equal(read(alone, timezone="UTC").volume[:, 0], [6418, 5105])


@pytest.mark.parametrize(("first", "second", "want"), [
    ("09:30", "16:00", "09:30"), ("0930", "1600", "09:30"), ("930", "1600", "09:30"),
    ("093000", "160000", "09:30"), ("93000", "160000", "09:30"), ("9:30 AM", "4:00 PM", "09:30"),
    ("000000", "000000", "00:00"), ("0", "0", "00:00"),
])  # fmt: skip
@pytest.mark.parametrize("kind", ["csv", "frame", "numbered"])
def test_a_date_and_a_time_are_joined(read, first, second, want, kind):
    text = "Date,Time,Open,High,Low,Close,Volume\n"
    text += f"2023-03-03,{first},10,11,9,10,5\n2023-03-04,{second},10,11,9,10,5\n"
    midnight = want == "00:00"
    if kind == "frame":
        (
            frame := pd.DataFrame([line.split(",") for line in text.splitlines()[1:]])
        ).columns = text.splitlines()[0].split(",")
        frame["Time"] = frame["Time"].map(lambda text: int(text) if text.isdigit() else text)
        bars = read_bars(frame, timezone=None if midnight else "UTC")
    elif kind == "numbered":
        numbers = "time=1+2,open=3,high=4,low=5,close=6,volume=7"
        bars = read(text.partition("\n")[2], columns=numbers, timezone=None if midnight else "UTC")
    else:
        bars = read(text, timezone=None if midnight else "UTC")
    assert list(bars.index.strftime("%d %H:%M")) == [
        f"03 {want}",
        "04 00:00" if midnight else "04 16:00",
    ]


def test_a_row_of_a_date_and_a_clock_alone_is_not_blank(read):
    text = "Date,Time,Close\n2023-03-03,09:30,10\n2023-03-03,09:31,\n\n2023-03-03,09:32,11\n"
    said = refusal(read, text, timezone="UTC", repair=CLOSE)
    assert "D006 line 3: close = nan" in said and "line 4" not in said


def test_adjusted_prices_with_signs_between_thousands_are_seen(read):
    rows = [f'2023-03-0{i},"1,{i}00.5","{a}"' for i, a in ((1, "1,100.5"), (2, "600.25"))]
    text = "\n".join(["Date,Close,Adj Close", *rows])
    said = refusal(read, text, repair=f"{CLOSE},keep-jumps")
    assert "D027 line 3: Adj Close = 600.25" in said
    bars = read(text, repair=f"{CLOSE},keep-jumps", **asked(said))
    np.testing.assert_allclose(bars.close[:, 0], [1100.5, 600.25], rtol=1e-15)


def test_a_line_of_totals_below_the_rows_is_named(read):
    text = of_times("2023-03-01", "2023-03-02", *(f"2023-03-{d}" for d in range(10, 30)))
    said = refusal(read, text + "Total,,,,,110\n")
    assert "D013 line 24: time 'Total' can't be read" in said
    assert len(read(text + "Total,,,,,110\n", repair="drop-bad,drop-nan")) == 22


def test_stooq(read):
    text = "<TICKER>,<PER>,<DATE>,<TIME>,<OPEN>,<HIGH>,<LOW>,<CLOSE>,<VOL>,<OPENINT>\n"
    text += "SPY.US,D,20230302,000000,10,11,9,10,5,0\nSPY.US,D,20230303,000000,10,11,9,10.5,5,0\n"
    bars = read(text)
    assert bars.symbols == ("SPY.US",) and str(bars.time[1])[:10] == "2023-03-03"


def test_a_page_of_yahoo_copied_as_a_table(read):
    text = "Date\tOpen\tHigh\tLow\tClose*\tAdj Close**\tVolume\n"
    text += "Mar 2, 2023\t144.38\t146.71\t143.90\t145.91\t145.1\t52,238,100\n"
    text += "Mar 3, 2023\t148.04\t151.11\t147.33\t151.03\t150.2\t70,732,300\n"
    bars = read(text)
    np.testing.assert_array_equal(bars.volume[:, 0], [52_238_100, 70_732_300])
    back = text.replace("145.1\t", "72.9\t")
    said = refusal(read, back)
    assert 'columns="dividend=Adj Close**/Close*"' in said
    assert len(read(back, columns="dividend=Adj Close**/Close*", repair="keep-jumps")) == 2


def test_a_repair_that_drops_more_than_a_tenth_says_how_many_rows(read):
    days = [f"2023-03-{day:02}" for day in range(1, 21)]
    for bad, many in ((2, False), (3, True), (19, True)):
        text = of_times(*days)
        for day in days[:bad]:
            text = re.sub(f"{day},10,", f"{day},-1,", text)
        said = refusal(read, text)
        assert ("(drops" in said) == many, said
        assert not many or f'repair="drop-bad" (drops {bad} of 20 rows)' in said
        assert len(read(text, repair="drop-bad")) == 20 - bad
    said = refusal(read, re.sub(r",10,11", ",-1,11", of_times(*days)))
    assert "D008 line 2 and 19 more" in said and "drop-bad" not in said


def test_the_zone_of_a_remedy_has_each_time_once(read):
    hours = pd.date_range("2023-11-04", periods=48, freq="h").strftime("%Y-%m-%d %H:%M")
    said = refusal(read, of_times(*hours))
    assert asked(said) == {"timezone": "UTC"} and len(read(of_times(*hours), timezone="UTC")) == 48
    said = refusal(read, of_times(*hours[:20]))
    assert asked(said) == {"timezone": "America/New_York"}
