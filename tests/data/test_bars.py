"""Reading bars: what is right is read exactly, what is wrong is found, named and refused."""

import gzip
import re

import numpy as np
import pandas as pd
import pytest
import refused

from nca_trader.data.bars import read_bars, sample_bars, validate, write_bars
from nca_trader.errors import BarError
from nca_trader.types import PRICES, Bars

GOOD = """Date,Open,High,Low,Close,Volume
2018-01-02,10.0,11.0,9.5,10.5,100
2018-01-03,10.5,10.9,10.1,10.2,200
2018-01-04,10.2,10.8,10.0,10.7,0
2018-01-05,10.7,11.5,10.6,11.4,400
"""


def planted(line, *changes):
    """GOOD with the fields of one line (the header is line 1) replaced, by column."""
    lines = [row.split(",") for row in GOOD.splitlines()]
    for column, text in changes:
        lines[line - 1][lines[0].index(column)] = text
    return "\n".join(map(",".join, lines)) + "\n"


def refusal(read, text, **options):
    return refused.refusal(read, text, **options).rpartition("bars.csv: ")[2]


def test_a_clean_file_is_read_as_it_stands(read):
    bars = read(GOOD)
    assert bars.symbols == ("bars",) and bars.present.all() and bars.note == ""
    assert list(bars.index.strftime("%Y-%m-%d %H:%M %Z")) == [
        f"2018-01-0{day} 00:00 UTC" for day in (2, 3, 4, 5)
    ]
    np.testing.assert_array_equal(bars.close[:, 0], [10.5, 10.2, 10.7, 11.4])
    np.testing.assert_array_equal(bars.high[:, 0], [11.0, 10.9, 10.8, 11.5])
    np.testing.assert_array_equal(bars.volume[:, 0], [100, 200, 0, 400])
    assert read(GOOD, symbol="SPY").symbols == ("SPY",)


@pytest.mark.parametrize("change", [
    lambda text: text.replace(",", ";"),
    lambda text: text.replace(",", "\t"),
    lambda text: "\ufeff" + text,
    lambda text: text.replace("\n", "\r\n"),
    lambda text: text.replace("\n", "\n\n"),
    lambda text: text.replace("Date", "timestamp").replace("ume", "").replace("High", "HIGH "),
    lambda text: re.sub(r"2018-(\d\d)-(\d\d)", r"2018\1\2", text),
    lambda text: re.sub(r"(2018-\d\d-\d\d)", r"\1T00:00:00Z", text),
    lambda text: re.sub(r"(2018-\d\d-\d\d)", r"\1 02:00:00+0200", text),
    lambda text: re.sub(r"(2018-\d\d-\d\d)", lambda m: str(pd.Timestamp(m[0]).value)[:13], text),
])  # fmt: skip
def test_the_same_bars_in_another_dress_are_the_same_bars(read, change):
    assert read(change(GOOD)).digest() == read(GOOD).digest()


def test_gz_parquet_feather_and_frames_agree_with_csv(read, tmp_path):
    want = read(GOOD).digest()
    frame = pd.read_csv(tmp_path / "bars.csv", parse_dates=["Date"])
    (tmp_path / "bars.csv.gz").write_bytes(gzip.compress(GOOD.encode()))
    frame.to_parquet(tmp_path / "bars.parquet")
    frame.set_index("Date").to_parquet(tmp_path / "bars.pq")
    frame.to_feather(tmp_path / "bars.feather")
    for suffix in ("csv.gz", "parquet", "pq", "feather"):
        assert read_bars(tmp_path / f"bars.{suffix}").digest() == want, suffix
    untitled = frame.set_index("Date").rename_axis(None)
    for each in (frame, frame.set_index("Date"), untitled, untitled.tz_localize("UTC")):
        assert read_bars(each, symbol="bars").digest() == want


@pytest.mark.parametrize(("line", "changes", "want"), [
    (2, [("High", "9"), ("Low", "12")], "D010 line 2: high below low: open 10.0, high 9.0"),
    (4, [("Date", "2018-01-04 14:30")], "D015 line 2 and 3 more: time '2018-01-02' has no time z"),
    (4, [("Date", "2018-01-03")], "D021 line 4: duplicate time 2018-01-03T00:00:00Z with different "
                                  "close (10.2 and 10.7)"),
])  # fmt: skip
def test_a_fault_is_shown_with_what_it_is_of(read, line, changes, want):
    """Each kind of fault is found in its line by test_planted.py."""
    message = refusal(read, planted(line, *changes))
    assert message.startswith(want) and "\n" not in message and message.endswith("."), message


def test_all_problems_are_told_at_once(read):
    text = planted(2, ("Close", "inf")).replace("10.2,200", "-3,200").replace("11.5", "x")
    message = refusal(read, text.replace("2018-01-04", "2018-01-03"))
    assert message.startswith("4 problems\n  D0")
    lines = message.splitlines()[1:]
    assert len(lines) == 8 and all(re.match(r"  D\d{3} line \d", each) for each in lines[::2])
    assert all(re.match(r"       \w.* repair=", each) for each in lines[1::2])
    for code in ("D009 line 5", "D007 line 2", "D008 line 3", "D021 line 4"):
        assert code in message


def test_repairs_do_what_they_say_and_nothing_else(read):
    closes = lambda text, repair: list(read(text, repair=repair).close[:, 0])  # noqa: E731
    twice = planted(4, ("Date", "2018-01-03"))
    assert closes(twice, "keep-first") == [10.5, 10.2, 11.4]
    assert closes(twice, ("keep-last",)) == [10.5, 10.7, 11.4]
    assert closes(planted(3, ("Close", "")), "drop-nan") == [10.5, 10.7, 11.4]
    assert closes(planted(5, ("Date", "Source: x")), "drop-bad") == [10.5, 10.2, 10.7]
    wide = read(planted(2, ("Close", "11.1")), repair="widen")
    assert wide.high[0, 0] == 11.1 and wide.low[0, 0] == 9.5
    silent = read(planted(3, ("Volume", "")), repair="no-volume,drop-nan")
    assert list(silent.volume[:, 0]) == [100, 0, 0, 400]
    assert "D008" in refusal(read, planted(4, ("Low", "0")), repair="sort,drop-nan,widen,no-volume")
    assert "D010" in refusal(read, planted(2, ("High", "9"), ("Low", "12")), repair="widen")


def test_missing_columns_are_named_with_those_found(read):
    message = refusal(read, GOOD.replace("Close", "Last"))
    assert message.startswith(
        "D003 no close column; the columns are Date, Open, High, Low, Last, Vol"
    )
    assert refusal(read, GOOD.replace("Date", "When")).startswith("D004 no time column")
    few = "date,close\n2018-01-02,10.5\n2018-01-03,10.2\n"
    message = refusal(read, few)
    assert message.startswith("4 problems") and message.count('repair="close-only"') == 3
    bars = read(few, repair="close-only,no-volume")
    for name in PRICES:
        np.testing.assert_array_equal(getattr(bars, name)[:, 0], [10.5, 10.2])
    assert (bars.volume == 0).all() and "D005 by no-volume" in bars.note
    twice = refusal(read, GOOD.replace("Date,Open", "Date,Time"))
    assert "columns 'Date' and 'Time' both mean time" in twice


@pytest.mark.parametrize(("make", "want"), [
    (lambda path: None, "D001 no such file. Check the path."),
    (lambda path: path.write_text(""), "D002 the file is empty."),
    (lambda path: path.write_text("date,close\n"), "D002 there are no rows."),
    (lambda path: path.write_text("date,open,high,low,close\n2018-01-02,1,1,1,1,5\n"), "D022 "),
    (lambda path: path.write_bytes(b"\xff\xfe\x00date"), "D001 is UTF-16 text. Save it as UTF-8."),
    (lambda path: path.mkdir(), "D001 is a folder without a file"),
])  # fmt: skip
def test_what_is_no_table_of_bars_is_refused_in_one_line(tmp_path, make, want):
    path = tmp_path / "bars.csv"
    make(path)
    with pytest.raises(BarError) as caught:
        read_bars(path)
    assert str(caught.value).startswith(f"{path}: {want}") and "\n" not in str(caught.value)
    (tmp_path / "bars.parquet").write_bytes(b"PAR1 no more PAR1")
    with pytest.raises(BarError, match="D001 can't be read"):
        read_bars(tmp_path / "bars.parquet")


def test_naive_times_need_a_zone_and_its_clock_changes_are_seen(read):
    hours = ["2018-03-09 14:30", "2018-03-11 02:30", "2018-03-12 14:30", "2018-03-13 14:30"]
    text = GOOD
    for old, new in zip(("02", "03", "04", "05"), hours, strict=True):
        text = text.replace(f"2018-01-{old}", new)
    message = refusal(read, text, timezone="America/New_York")
    assert message.startswith("D016 line 3: time '2018-03-11 02:30' is skipped or repeated")
    bars = read(text.replace("11 02:30", "11 03:30"), timezone="America/New_York")
    assert list(bars.index.strftime("%d %H:%M")) == ["09 19:30", "11 07:30", "12 18:30", "13 18:30"]
    with pytest.raises(BarError, match="did you mean 'Europe/Berlin'"):
        read(text, timezone="Europe/Berln")
    mixed = text.replace("09 14:30", "09 14:30-05:00").replace("11 02:30", "11 03:30")
    assert read(mixed, timezone="America/New_York").digest() == bars.digest()


def test_long_files_align_assets_and_carry_closes_over_missing_bars(read):
    rows = """time,ticker,open,high,low,close,volume
2018-01-02,NA,10,11,9,10.5,1
2018-01-03,NA,10,11,9,10.25,2
2018-01-05,NA,10,11,9,10.75,3
2018-01-03,007,20,21,19,20.5,4
2018-01-04,007,20,21,19,20.25,5
"""
    bars = read(rows)
    nan = np.nan
    assert bars.symbols == ("NA", "007") and len(bars) == 4
    np.testing.assert_array_equal(
        bars.present, [[True, False], [True, True], [False, True], [True, False]]
    )
    np.testing.assert_array_equal(
        bars.close, [[10.5, nan], [10.25, 20.5], [10.25, 20.25], [10.75, 20.25]]
    )
    np.testing.assert_array_equal(bars.open, [[10, nan], [10, 20], [10.25, 20], [10, 20.25]])
    np.testing.assert_array_equal(bars.volume, [[1, 0], [2, 4], [0, 5], [3, 0]])
    one = read(rows, symbol="007")
    assert one.symbols == ("007",) and len(one) == 2 and one.present.all()
    assert read(rows, symbol=["007", "NA"]).symbols == ("007", "NA")
    assert refusal(read, rows, symbol="SPY").startswith(
        "D024 no symbol 'SPY'. Choose from NA, 007."
    )
    assert refusal(read, rows.replace("03,NA", "03,")).startswith(
        "D024 line 3: the symbol is empty"
    )
    back = rows.replace("2018-01-05,NA", "2018-01-01,NA")
    assert refusal(read, back).startswith("D020 line 4:")


@pytest.mark.parametrize("suffix", ["parquet", "feather", "csv", "csv.gz"])
def test_bars_come_back_equal_from_a_file(tmp_path, suffix):
    full = sample_bars("sp500")
    rng = np.random.default_rng(0)
    price = np.exp(rng.normal(size=(50, 3)))
    present = rng.random((50, 3)) < 0.7
    present[:5, 1], present[7] = False, False
    price[:5, 1] = np.nan
    holes = Bars(
        time=full.time[:50] + np.timedelta64(1, "ns"), symbols=("NA", "7", "b c"), open=price,
        high=price, low=price, close=price, volume=np.where(present, 1.5, 0.0), present=present,
    )  # fmt: skip
    for bars in (full, full[100:101].select("NASDAQ"), holes, holes[3:20]):
        write_bars(bars, tmp_path / f"bars.{suffix}")
        back = read_bars(tmp_path / f"bars.{suffix}")
        assert back.symbols == bars.symbols and back.digest() == bars.digest()
    with pytest.raises(BarError, match="choose one of these"):
        write_bars(full, tmp_path / "bars.xlsx")
    with pytest.raises(BarError, match="can't be written"):
        write_bars(full, tmp_path / "no" / f"bars.{suffix}")


def test_bars_in_memory_are_checked_alike():
    bars = sample_bars("sp500")
    validate(bars)
    close = bars.close.copy()
    close[7, 1] = np.nan
    close[9, 0] = 1e9
    present = np.ones_like(bars.present)
    broken = Bars(**{**vars(bars), "close": close, "present": present, "source": "mine"})
    with pytest.raises(BarError) as caught:
        validate(broken)
    assert str(caught.value).splitlines()[1].startswith("  D006 row 7, NASDAQ: close = nan")
    assert "D011 row 9, SP500: open or close outside" in str(caught.value)
    present[7, 1] = present[9, 0] = False
    validate(Bars(**{**vars(broken), "present": present}))


def test_an_unknown_or_contradictory_repair_is_refused(read):
    assert "did you mean 'drop-nan'" in refusal(read, GOOD, repair="sort,drop-nans")
    assert "exclude each other" in refusal(read, GOOD, repair=["keep-first", "keep-last"])
