"""Files that are no table of bars, or are made to break a reader: one line each, bounded memory."""

import bz2
import decimal
import gzip
import io
import json
import lzma
import os
import pathlib
import re
import subprocess
import sys
import zipfile

import numpy as np
import pandas as pd
import pytest

from nca_trader.data.bars import read_bars, sample_bars, write_bars
from nca_trader.errors import BarError, printable

HEADER = "time,symbol,open,high,low,close,volume\n"


def rows(count, symbol="A"):
    days = pd.date_range("1990-01-01", periods=count).strftime("%Y-%m-%d")
    return "".join(f"{day},{symbol},10,11,9,10,5\n" for day in days)


def refusal(path, **options):
    with pytest.raises(BarError) as caught:
        read_bars(path, **options)
    said = str(caught.value)
    assert "\n" not in said and said.endswith("."), said
    return said.removeprefix(f"{path}: ")


def text_file(folder, text, name="bars.csv"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


MEMBER = 1 << 24  # bytes of one gzip member; a file may be many, one after the other
BOMBS = {
    "one line": (b"", b"x", "D022 line 1"),
    "a later line": ((HEADER + rows(300)).encode(), b"x", "D022 line 302"),
    "a field": ((HEADER + rows(300)).encode() + b"1991-01-01,A,", b"1", "D022 line 302"),
    "a quote that is not closed": (
        (HEADER + rows(300)).encode() + b'1991-01-01,"',
        b"2" * 1023 + b"\n",
        "D022 line 302",
    ),
    "zeros": (HEADER.encode(), b"\0", "D001 line 2"),
}
CHILD = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))  # so that a failure ends here
from nca_trader.data.bars import read_bars
from nca_trader.errors import BarError
out = {}
for path in sys.argv[1:]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        read_bars(path, memory_gb=100)
        said = "read"
    except BarError as error:
        said = str(error)
    out[path] = said, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
print(json.dumps(out))
"""


def measured(*paths):
    """What a fresh process says of each file, and the MiB by which its peak memory grew."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *map(str, paths)],
        capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    return json.loads(done.stdout)


def bomb(folder, name, members):
    begin, fill, _ = BOMBS[name]
    path = folder / f"{name}.csv.gz"
    member = gzip.compress(fill * (MEMBER // len(fill)), 9)
    path.write_bytes(gzip.compress(begin) + member * members)
    return path


def check_bombs(folder, members):
    paths = {name: bomb(folder, name, members) for name in BOMBS}
    # The first call pays for what pandas loads on its first file.
    found = measured(text_file(folder, HEADER + rows(5)), *paths.values())
    for name, path in paths.items():
        said, grown = found[str(path)]
        assert said.startswith(f"{path}: {BOMBS[name][2]}"), said
        assert "\n" not in said and len(said) < 500
        assert grown < 400, (name, grown)
    return {name: round(found[str(path)][1]) for name, path in paths.items()}


@pytest.mark.heavy
def test_a_line_or_field_without_end_is_refused_in_bounded_memory(tmp_path):
    print(check_bombs(tmp_path, 12))  # 192 MiB, which pandas alone holds several times over


@pytest.mark.parametrize("line", [1, 150, 301, 40_000])
def test_a_field_longer_than_csv_allows_is_one_line_wherever_it_is(tmp_path, line):
    lines = (HEADER + rows(40_000)).splitlines(keepends=True)
    fields = lines[line - 1].split(",")
    fields[-1 if line == 1 else 1] = "x" * 140_000
    lines[line - 1] = ",".join(fields)
    want = f"D022 line {line}: a field has more than 131,072 characters"
    said = refusal(text_file(tmp_path, "".join(lines)))
    # Behind the first lines pandas alone reads, and the field is a symbol.
    assert said.startswith(want if line <= 200 else f"D024 line {line}: the symbol 'xxx"), said
    # A line that ends early makes the fields be counted, by Python's own reader.
    lines[-1] = "2200-01-01,A\n"
    assert refusal(text_file(tmp_path, "".join(lines))).startswith(want)


def test_too_many_columns_are_refused(tmp_path):
    wide = "time," + ",".join(f"S{i}" for i in range(70_000))
    path = text_file(tmp_path, f"{wide}\n2020-01-01{',1' * 70_000}\n")
    said = refusal(path, columns="close=*")
    assert said.startswith("D034 70,001 columns count as") and "pass memory_gb=" in said


def test_a_pipe_is_named_and_not_waited_for(tmp_path):
    path = tmp_path / "bars.csv"
    os.mkfifo(path)
    assert refusal(path) == "D001 is a pipe and not a file. Save what it gives to a file."
    assert "D001 is a device and not a file" in refusal(pathlib.Path("/dev/null"))


@pytest.mark.parametrize(
    ("coding", "name"),
    [
        ("utf-16", "UTF-16"),
        ("utf-16-be", "UTF-16"),
        ("utf-16-le", "UTF-16"),
        ("utf-32", "UTF-32"),
        ("latin-1", "line 1 is not UTF-8"),
    ],
)
@pytest.mark.parametrize("suffix", ["csv", "csv.gz"])
def test_other_encodings_are_named(tmp_path, coding, name, suffix):
    text = HEADER.replace("volume", "volume,société") + rows(5).replace("5\n", "5,1\n")
    content = text.encode(coding)
    if coding == "utf-16-be":
        content = b"\xfe\xff" + content
    content = gzip.compress(content) if suffix == "csv.gz" else content
    said = refusal(text_file(tmp_path, content, f"bars.{suffix}"))
    assert said.startswith("D001 ") and name in said and "UTF-8" in said


def test_latin_1_far_down_is_named_with_its_line(tmp_path):
    text = HEADER + rows(70_000) + rows(1, "Nestlé")
    said = refusal(text_file(tmp_path, text.encode("latin-1")))
    assert said.startswith("D001 line 70002 is not UTF-8")


def zipped(text, *names):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            archive.writestr(name, text)
    return file.getvalue()


def test_a_zip_archive_of_one_file_is_read_and_a_damaged_one_is_one_line(tmp_path):
    text = (HEADER + rows(2000)).encode()
    want = read_bars(text_file(tmp_path, text)).digest()
    packed = zipped(text, "bars.csv")
    for name in ("bars.zip", "bars.csv"):
        assert read_bars(text_file(tmp_path, packed, name)).digest() == want
    with_folder = zipped(text, "year/", "year/bars.csv", "__MACOSX/year/._bars.csv")
    assert read_bars(text_file(tmp_path, with_folder, "mac.zip")).digest() == want
    assert "D001 is a zip archive of 0 files" in refusal(text_file(tmp_path, zipped(text, "a/")))
    again = zipped(packed, "bars.zip")
    assert "D001 is a zip archive in an archive" in refusal(text_file(tmp_path, again))
    locked = bytearray(packed)
    for mark, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        locked[locked.index(mark) + at] |= 1
    assert "D001 has a password" in refusal(text_file(tmp_path, bytes(locked)))
    assert refusal(text_file(tmp_path, b"PK\x03\x04garbage")).startswith("D001 can't be read")
    for at in range(4, len(packed), len(packed) // 40):
        broken = packed[:at] + bytes([packed[at] ^ 0x5A]) + packed[at + 1 :]
        path = text_file(tmp_path, broken)
        try:  # a changed date of the archive is no fault of the bars
            assert read_bars(path).digest() == want
        except BarError as error:
            assert re.search(r"D0\d\d ", str(error))


@pytest.mark.parametrize(
    ("make", "want"),
    [
        (lambda text: zipped(text, "a.csv", "b.csv"), "a zip archive of 2 files (a.csv, b.csv)"),
        (lambda text: zipped(text, "[Content_Types].xml", "xl/workbook.xml"), "a spreadsheet"),
        (lambda text: bz2.compress(text.encode()), "compressed by bzip2"),
        (lambda text: lzma.compress(text.encode()), "compressed by xz"),
        (lambda text: b"\x28\xb5\x2f\xfd" + bytes(99), "compressed by zstd"),
        (lambda text: gzip.compress(gzip.compress(text.encode())), "compressed by gzip twice"),
        (lambda text: json.dumps([{"time": "2020-01-01", "close": 1}]).encode(), "JSON"),
        (lambda text: b'\n {"time": ["2020-01-01"], "close": [1]}', "JSON"),
        (lambda text: b"<!DOCTYPE html><html><body>Not found", "an HTML or XML page"),
        (lambda text: b"<?xml version='1.0'?><rows/>", "an HTML or XML page"),
        (lambda text: b"PAR1" + bytes(50), "Parquet"),
        (lambda text: b"ARROW1" + bytes(50), "Arrow or Feather"),
        (lambda text: b"SQLite format 3\0" + bytes(90), "a SQLite database"),
    ],
)
@pytest.mark.parametrize("name", ["bars.csv", "bars.zip"])
def test_other_kinds_of_files_are_refused_by_name(tmp_path, make, want, name):
    said = refusal(text_file(tmp_path, make(HEADER + rows(5)), name))
    assert said.startswith(f"D001 is {want}"), said


def test_a_gzip_file_is_known_by_its_bytes_and_a_damaged_one_is_one_line(tmp_path):
    text = (HEADER + rows(2000)).encode()
    want = read_bars(text_file(tmp_path, text)).digest()
    packed = gzip.compress(text)
    assert read_bars(text_file(tmp_path, packed, "bars.txt")).digest() == want
    assert read_bars(text_file(tmp_path, text, "plain.csv.gz")).digest() == want
    assert refusal(text_file(tmp_path, gzip.compress(b""))).startswith("D002 ")
    assert "D001 can't be read" in refusal(text_file(tmp_path, packed[: len(packed) // 2]))
    for at in range(40, len(packed), len(packed) // 20):
        broken = packed[:at] + bytes([packed[at] ^ 0x5A]) + packed[at + 1 :]
        assert re.match(r"D0\d\d ", refusal(text_file(tmp_path, broken)))


ESCAPES = ["\x1b[2J", "A\nB", "A\rB", "A\tB", "\u202eABC", "\x07", "A\x85B", "A\u2028B"]


@pytest.mark.parametrize("symbol", ESCAPES)
def test_a_symbol_that_does_not_print_is_refused_and_shown_escaped(tmp_path, symbol):
    path = text_file(tmp_path, HEADER + rows(3) + rows(2, f'"{symbol}"'))
    said = refusal(path)
    assert said.isprintable() and "D024 line 5" in said and "does not print" in said, said
    assert printable(symbol) in said
    # Asked for another one, the reader lists those that there are.
    assert refusal(path, symbol="B").isprintable()
    bars = read_bars(path, repair="drop-bad")
    assert bars.symbols == ("A",) and len(bars) == 3


def test_other_texts_of_a_file_are_shown_escaped(tmp_path):
    wild = "\x1b]0;title\x07"
    for text in (
        HEADER.replace("volume", wild) + rows(3),
        HEADER + rows(3).replace("9,10,", f"9,{wild},"),
        HEADER + rows(3).replace("-01-", wild),
        HEADER.replace("symbol", f'"{wild}\nclose","symbol"') + rows(3),
        f'time,"{wild}_close","{wild}_open"\n2020-01-01,1,1\n2020-01-02,1,1\n',
    ):
        with pytest.raises(BarError) as caught:
            read_bars(text_file(tmp_path, text), columns=None)
        for line in str(caught.value).split("\n"):
            assert line.isprintable() and re.match(r".*bars\.csv: |  D0\d\d|       \w", line), line
    named = text_file(
        tmp_path, HEADER.replace("symbol,", "") + rows(3).replace(",A,", ","), "\x1b.csv"
    )
    with pytest.raises(BarError, match="does not print"):
        read_bars(named)
    assert read_bars(named, symbol="A").symbols == ("A",)


def test_a_message_stays_short_and_keeps_its_remedy(tmp_path):
    path = text_file(tmp_path, "x" * 100_000 + ",y\n2020-01-01,1\n")
    with pytest.raises(BarError) as caught:
        read_bars(path)
    lines = str(caught.value).split("\n")
    assert max(map(len, lines)) < 5_000 and any("time=COLUMN" in line for line in lines)


@pytest.mark.parametrize("symbol", ["=1+1", "+A", "-A", "@SUM(A1)", "\tA", "\r=1", "A\nB", "\x1b"])
@pytest.mark.parametrize("suffix", ["csv", "csv.gz"])
@pytest.mark.few(7)
def test_a_symbol_that_a_spreadsheet_would_run_is_not_written_as_text(tmp_path, symbol, suffix):
    bars = sample_bars("sp500")[:10].select("SP500")
    object.__setattr__(bars, "symbols", (symbol,))
    with pytest.raises(BarError, match=r"a spreadsheet|does not print"):
        write_bars(bars, tmp_path / f"bars.{suffix}")
    assert not list(tmp_path.iterdir())
    if symbol.isprintable():
        write_bars(bars, tmp_path / "bars.parquet")
        assert read_bars(tmp_path / "bars.parquet").symbols == (symbol,)


def test_wide_closes_name_the_option_that_reads_them(tmp_path):
    closes = "Date,AAPL,MSFT\n2020-01-01,1,2\n2020-01-02,1,2\n"
    path = text_file(tmp_path, closes)
    with pytest.raises(BarError) as caught:
        read_bars(path)
    said = str(caught.value)
    assert 'columns="close=*"' in said and 'repair="close-only,no-volume"' in said, said
    bars = read_bars(path, columns="close=*", repair="close-only,no-volume")
    assert bars.symbols == ("AAPL", "MSFT")
    # One further column is a close by another name.
    one = text_file(tmp_path, "Date,Last\n2020-01-01,1\n")
    with pytest.raises(BarError) as caught:
        read_bars(one)
    assert "close=*" not in str(caught.value)


@pytest.mark.parametrize(
    ("header", "row"),
    [
        ("date,timestamp", "{day},{day}T{hour}:00Z"),  # the day alone repeats
        ("time,symbol,ticker", "{day}T{hour}:00Z,NYSE,{name}"),  # the first column is the exchange
    ],
)
def test_duplicates_are_not_named_before_the_columns_are_known(tmp_path, header, row):
    lines = [f"{header},open,high,low,close,volume"]
    for day in ("2020-01-02", "2020-01-03"):
        for hour in (14, 15):
            for name in "AB" if "ticker" in header else "A":
                lines.append(f"{row.format(day=day, hour=hour, name=name)},10,11,9,10,5")
    path = text_file(tmp_path, "\n".join(lines) + "\n")
    said = refusal(path)
    assert said.startswith("D005") and "both mean" in said and "D02" not in said


def test_duplicates_of_a_clock_that_is_put_back_wait_for_the_zone(tmp_path):
    local = pd.date_range("2020-10-31 20:00", periods=12, freq="h", tz="America/New_York")
    lines = [f"{t:%Y-%m-%d %H:%M},A,10,11,9,10,5\n" for t in local]
    assert len(set(lines)) == 11  # 01:00 is there twice
    assert refusal(text_file(tmp_path, HEADER + "".join(lines))).startswith("D015 ")


def mangled(dates):
    """Dates of days first, read one at a time by a program that takes months first where it can."""
    return [pd.to_datetime(f"{t:%d/%m/%Y}", dayfirst=t.day > 12) for t in dates]


@pytest.mark.parametrize(
    ("days", "newest_first", "form"),
    [
        (45, False, "%Y-%m-%d"),
        (250, False, "%Y%m%d"),
        (45, True, "%Y-%m-%dT14:30:00Z"),
        (300, True, "%Y-%m-%d"),
    ],
)
def test_mangled_dates_are_never_sorted_into_wrong_ones(tmp_path, days, newest_first, form):
    true = pd.bdate_range("2015-02-03", periods=days)
    wrong = mangled(true)
    assert list(wrong) != list(true)
    price = [f"10,11,9,{10 + i / days},5" for i in range(days)]
    lines = [f"{w.strftime(form)},A,{p}\n" for w, p in zip(wrong, price, strict=True)]
    lines = lines[::-1] if newest_first else lines
    path = text_file(tmp_path, HEADER + "".join(lines))
    said = refusal(path)
    assert said.startswith("D019 line ") and "sort" not in said and "D02" not in said, said
    moved = sum(w != t for w, t in zip(wrong, true, strict=True))
    assert f"and {moved - 1:,} more" in said
    for repair in ("sort", "sort,keep-first", "sort,drop-bad"):
        assert "D019" in refusal(path, repair=repair)
    right = [f"{t.strftime(form)},A,{p}\n" for t, p in zip(true, price, strict=True)]
    right = right[::-1] if newest_first else right
    want = read_bars(text_file(tmp_path, HEADER + "".join(right)), repair="sort")
    assert len(want) == days


def test_days_first_read_as_months_first_are_not_sorted(tmp_path):
    # Only days up to the 12th: no date shows which number is the month.
    true = [t for t in pd.bdate_range("2015-01-01", periods=400) if t.day <= 12]
    lines = [f"{t:%d/%m/%Y},A,10,11,9,10,5\n" for t in true]
    path = text_file(tmp_path, HEADER + "".join(lines))
    assert "D017" in refusal(path)
    said = refusal(path, dates="mdy", repair="sort")
    assert said.startswith("D019") and 'dates="dmy"' in said
    np.testing.assert_array_equal(
        read_bars(path, dates="dmy").time, np.array(true, "datetime64[ns]")
    )


@pytest.mark.parametrize("seed", range(2))
def test_rows_that_are_only_out_of_order_are_sorted_as_before(tmp_path, seed):
    rng = np.random.default_rng(seed)
    lines = rows(int(rng.integers(3, 400))).splitlines(keepends=True)
    want = read_bars(text_file(tmp_path, HEADER + "".join(lines))).digest()
    others = {
        "newest first": lines[::-1],
        "shuffled": [lines[i] for i in rng.permutation(len(lines))],
        "a later part first": lines[len(lines) // 3 :] + lines[: len(lines) // 3],
        "one row last": [*lines[1:], lines[0]],
    }
    for name, each in others.items():
        path = text_file(tmp_path, HEADER + "".join(each))
        said, bars = refusal(path), read_bars(path, repair="sort")
        assert said.startswith("D020") and said.endswith('or pass repair="sort".'), name
        assert ("newest first" in said) == (name == "newest first"), name
        assert bars.digest() == want and bars.note.startswith("Repaired on reading: D020 by"), name


ODD = {
    "lists": lambda n: [[1.0, 2.0]] * n,
    "dicts": lambda n: [{"a": 1}] * n,
    "bytes": lambda n: [b"10.5"] * n,
    "none": lambda n: [None] * n,
    "dates": lambda n: pd.date_range("2020-01-01", periods=n),
    "lengths of time": lambda n: pd.to_timedelta(np.arange(n), unit="D"),
    "truths": lambda n: np.arange(n) % 2 == 0,
    "complex": lambda n: np.arange(n) + 1j,
    "decimals": lambda n: [decimal.Decimal("10.5")] * n,
    "categories": lambda n: pd.Categorical(["10.5"] * n),
    "periods": lambda n: pd.period_range("2020-01", periods=n, freq="M"),
    "intervals": lambda n: pd.interval_range(0, n),
    "nullable": lambda n: pd.array([10] * (n - 1) + [None], dtype="Int64"),
    "mixed": lambda n: ["10.5", 10.5, None, b"x", [1]] * (n // 5),
    "huge": lambda n: [10**400] * n,
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("column", ["time", "symbol", "close", "volume", "present", "bid"])
@pytest.mark.few(31)
def test_columns_of_any_type_are_read_or_refused(kind, column):
    count = 20
    frame = pd.DataFrame({"time": pd.date_range("2020-01-01", periods=count, tz="UTC")})
    frame["symbol"] = "A"
    frame[["open", "high", "low", "close"]] = 10.5
    frame["volume"], frame["ask"] = 1.0, 11.0
    frame[column] = pd.Series(ODD[kind](count))
    try:
        bars = read_bars(frame)
    except BarError as error:
        assert all(map(str.isprintable, str(error).split("\n")))
    else:
        # Dates and truths are not prices.
        assert column != "close" or kind in ("decimals", "categories", "bytes"), bars.close[:3]
        assert (bars.close[bars.present] == 10.5).all()


@pytest.mark.parametrize("year", ["-20000", "11000", "250000"])
def test_a_time_of_a_year_that_python_does_not_have_is_named(year):
    time = np.array(["2020-01-01", f"{year}-01-01", "2020-01-03"], "datetime64[s]")
    frame = pd.DataFrame({"time": time, "close": 1.0})
    with pytest.raises(BarError, match=rf"D013 row 1: time '{year}-01-01T00:00:00' can't be read"):
        read_bars(frame, repair="close-only,no-volume")


@pytest.mark.slow
def test_three_gigabytes_of_one_line_take_no_more_memory_than_less(tmp_path):
    check_bombs(tmp_path, 192)
