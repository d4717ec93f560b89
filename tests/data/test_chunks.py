"""Files are read a chunk at a time: the same bars and the same words, in bounded memory."""

import json
import subprocess
import sys
import tracemalloc

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.feather
import pytest
from planted import HEADER, PLANTS, market, text_of

from nca_trader.data.bars import read_bars, sample_bars, write_bars
from nca_trader.data.reading import files, times
from nca_trader.data.reading.faults import Request
from nca_trader.errors import BarError


@pytest.fixture
def small_chunks(monkeypatch):
    def use(rows=7):
        monkeypatch.setattr(files, "CHUNK_ROWS", rows)
        monkeypatch.setattr(files, "CELLS", 9 * rows)

    return use


def outcome(source, **options):
    """The digest and the note, or the refusal."""
    try:
        bars = read_bars(source, **options)
    except BarError as error:
        return str(error)
    return bars.digest() + bars.note


@pytest.mark.parametrize("name", PLANTS)
@pytest.mark.few(13)
def test_every_planted_fault_is_told_alike_however_the_file_is_cut(name, tmp_path, small_chunks):
    _, plant, repair = PLANTS[name]
    cells = market(2, length=20).cells
    plant(cells, 23)
    path = tmp_path / "bars.csv"
    path.write_text(text_of(cells))
    options = [{}, {"repair": repair}]
    at_once = [outcome(path, **some) for some in options]
    assert "D0" in at_once[0]
    small_chunks()
    assert [outcome(path, **some) for some in options] == at_once


def test_several_faults_in_several_chunks_are_told_once_each_with_their_number(
    tmp_path, small_chunks
):
    cells = market(0, length=30).cells
    for row in (2, 20, 41, 55):
        cells[row, HEADER.index("close")] = "inf"
    for row in (30, 50):
        cells[row, HEADER.index("low")] = "-1"
    cells[35, 0] = "soon"
    path = tmp_path / "bars.csv"
    path.write_text(text_of(cells))
    small_chunks()
    said = outcome(path)
    for want in ("3 problems", "D007 line 4 and 3 more: close = inf", "D008 line 32 and 1 more",
                 "D013 line 37: time 'soon'"):  # fmt: skip
        assert want in said, said
    read = read_bars(path, repair="drop-bad")
    assert read.present.sum() == 60 - 7


TIMES = {
    "dates": ("%d.%m.%Y", {}),
    "dates and clocks": ("%d.%m.%Y %H:%M", {"timezone": "Europe/Berlin"}),
    "month first": ("%m/%d/%Y", {"dates": "mdy"}),
    "digits": ("%Y%m%d %H%M%S", {"timezone": "UTC"}),
    "numbers": ("%Y%m%d", {}),
    "offsets": ("%Y-%m-%dT%H:%M:%S+0100", {}),
    "naive": ("%Y-%m-%d %H:%M", {}),
    "unproved": ("%d/%m/%y", {}),
}


@pytest.mark.parametrize("form", TIMES)
def test_times_are_read_alike_however_the_file_is_cut(form, tmp_path, small_chunks):
    write, options = TIMES[form]
    time = pd.date_range("2021-03-20 12:30", periods=25, freq="1D")  # over the change of the clock
    frame = pd.DataFrame({"time": time.strftime(write), "close": 5.0})
    options = options | {"repair": "close-only,no-volume"}
    at_once, broken = [], frame.copy()
    broken.loc[[13, 21], "time"] = ["", "Source: a vendor"]
    for i, each in enumerate((frame, broken)):
        each.to_csv(tmp_path / f"{i}.csv", index=False)
        at_once.append(outcome(tmp_path / f"{i}.csv", **options))
    assert (".csv: D0" in at_once[0]) == (form in ("naive", "unproved"))
    small_chunks()
    for i, want in enumerate(at_once):
        assert outcome(tmp_path / f"{i}.csv", **options) == want


def epochs(unit):
    return lambda time: pd.Series(time.as_unit(unit).astype("int64").astype("str"))


FORMS = {
    "iso": lambda time: pd.Series(time.strftime("%Y-%m-%dT%H:%M:%SZ")),
    "seconds": epochs("s"),
    "milliseconds": epochs("ms"),
    "nanoseconds": epochs("ns"),
    "digits": lambda time: pd.Series(time.strftime("%Y%m%d %H%M%S")),
    "compact": lambda time: pd.Series(time.strftime("%Y%m%d")),
    "day first": lambda time: pd.Series(time.strftime("%d.%m.%Y %H:%M:%S")),
}


@pytest.mark.heavy
@pytest.mark.parametrize("first", FORMS)
def test_times_that_change_their_form_are_refused_where_they_do(
    first, tmp_path, monkeypatch, small_chunks
):
    monkeypatch.setattr(times, "HEAD", 20)
    time = pd.date_range("2027-01-24", periods=60, freq="1D", tz="UTC")  # 1801...: as a year
    path = tmp_path / "bars.csv"
    for second in FORMS:
        if second == first:
            continue
        small_chunks(1 << 16)
        text = pd.concat([FORMS[first](time[:40]), FORMS[second](time[40:])])
        pd.DataFrame({"time": text, "close": 5.0}).to_csv(path, index=False)
        options = {"repair": "close-only,no-volume", "timezone": "UTC"}
        at_once = outcome(path, **options)
        small_chunks()
        assert outcome(path, **options) == at_once, (first, second)
        if {first, second} <= {"iso", "digits", "compact"}:  # each is ISO 8601
            assert (read_bars(path, **options).index == time).all()
            continue
        said = f"D013 line 42 and 19 more: time '{text.iloc[40]}' can't be read. Write it as 2018"
        assert said in at_once, (first, second, at_once)
    # The last pair stands for all: the rows in the other form are the only ones to drop.
    assert len(read_bars(path, **options | {"repair": "close-only,no-volume,drop-bad"})) == 40


def test_a_file_of_epochs_since_1970_is_read(tmp_path):
    for freq, begin in (("1D", "1970-01-01"), ("30D", "1965-03-02")):
        time = pd.date_range(begin, "2024-01-01", freq=freq, tz="UTC")
        frame = pd.DataFrame({"time": FORMS["milliseconds"](time), "close": 5.0})
        frame.to_csv(tmp_path / "bars.csv", index=False)
        bars = read_bars(tmp_path / "bars.csv", repair="close-only,no-volume")
        assert (bars.index == time).all()


def test_the_order_of_day_and_month_may_be_proved_late(tmp_path, monkeypatch, small_chunks):
    monkeypatch.setattr(times, "HEAD", 5)
    small_chunks(4)
    time = pd.DatetimeIndex([f"2021-{m:02}-{d:02}" for m in (1, 2, 3) for d in range(1, 13)])
    time = time.append(pd.DatetimeIndex(["2021-03-13"]))
    for write in ("%d/%m/%Y", "%m/%d/%Y"):
        frame = pd.DataFrame({"time": time.strftime(write), "close": 5.0})
        frame.to_csv(tmp_path / "bars.csv", index=False)
        bars = read_bars(tmp_path / "bars.csv", repair="close-only,no-volume")
        assert (bars.index.tz_localize(None) == time).all()


@pytest.mark.parametrize("suffix", ["csv", "csv.gz", "parquet", "feather"])
def test_samples_and_frames_are_the_same_bars_however_they_are_cut(suffix, tmp_path, small_chunks):
    bars = sample_bars("sp500")[:500]
    path = tmp_path / f"bars.{suffix}"
    write_bars(bars, path)
    frame = pd.DataFrame(bars.close, index=bars.index, columns=list(bars.symbols))
    options = {"columns": "close=*", "repair": "close-only,no-volume"}
    want = read_bars(frame.reset_index(), **options).digest()
    small_chunks(23)
    assert read_bars(path).digest() == bars.digest()
    assert read_bars(frame.reset_index(), **options).digest() == want
    # An asset that begins later keeps its place among the columns.
    frame.iloc[:100, 0] = np.nan
    assert read_bars(frame.reset_index(), **options).symbols == bars.symbols


def test_a_line_that_is_too_wide_or_short_is_found_in_any_chunk(tmp_path, small_chunks):
    lines = text_of(market(0, length=30).cells).splitlines()
    small_chunks()
    path = tmp_path / "bars.csv"
    for at in (3, 30, 60):
        path.write_text("\n".join([*lines[:at], f"{lines[at]},7", *lines[at + 1 :]]))
        assert f"D022 line {at + 1}: 10 fields" in outcome(path)
        path.write_text("\n".join([*lines[:at], lines[at].rpartition(",")[0], *lines[at + 1 :]]))
        assert f"D022 line {at + 1}: fewer fields" in outcome(path)


def minutes(rows, width=0):
    """Minute bars, with a column of `width` letters."""
    rng = np.random.default_rng(0)
    close = 100.0 * np.exp(np.cumsum(rng.normal(0, 1e-4, rows)))
    open_ = np.concatenate((close[:1], close[:-1]))
    frame = pd.DataFrame({
        "time": pd.date_range("2015-01-01", periods=rows, freq="1min", tz="UTC"),
        "open": open_,
        "high": np.maximum(open_, close) * 1.00001,
        "low": np.minimum(open_, close) * 0.99999,
        "close": close,
        "volume": rng.integers(1, 1000, rows),
    })  # fmt: skip
    return frame.assign(comment="x" * width) if width else frame


def write_minutes(path, rows, width=0):
    """As .csv, .parquet of one row group or .feather of one record batch."""
    frame = minutes(rows, width)
    if path.suffix == ".csv":
        frame["time"] = frame["time"].dt.strftime("%Y-%m-%dT%H:%MZ")
        frame.to_csv(path, index=False)
    elif path.suffix == ".parquet":
        frame.to_parquet(path, index=False, row_group_size=rows)
    else:
        pyarrow.feather.write_feather(frame, path, chunksize=rows)


def compact(rows):
    """Bytes of the bars themselves: six numbers and a truth value each."""
    return rows * (6 * 8 + 1)


def test_a_folder_of_parquet_files_is_one_table_and_names_columns(tmp_path, small_chunks):
    frame, folder = minutes(40), tmp_path / "bars.parquet"
    small_chunks()
    for name in ("A", "B"):
        (folder / f"symbol={name}").mkdir(parents=True)
        frame.to_parquet(folder / f"symbol={name}" / "0.parquet", index=False)
    want = read_bars(pd.concat([frame.assign(symbol="A"), frame.assign(symbol="B")]))
    assert read_bars(folder).digest() == want.digest()
    frame.assign(more=1.0).to_parquet(folder / "symbol=B" / "0.parquet", index=False)
    said = outcome(folder)
    assert ".parquet: D005 its columns are not those" in said and "\n" not in said


@pytest.mark.parametrize("kind", ["parquet", "feather", "folder"])
def test_no_more_than_parts_of_a_binary_table_are_held(kind, tmp_path, small_chunks):
    rows = 200_000
    folder = tmp_path / "bars.parquet"
    path = folder / "part.parquet" if kind == "folder" else tmp_path / f"bars.{kind}"
    path.parent.mkdir(exist_ok=True)
    write_minutes(path, rows)
    path = folder if kind == "folder" else path
    small_chunks(2_000)
    before, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        read = held = 0
        for table in files.load(path, Request({}, None, None, None, (), frozenset())):
            read, held = read + len(table.frame), max(held, pool.bytes_allocated())
            del table
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(before)
    assert read == rows
    # By Arrow: the pages of a row group, or a batch, which is unpacked as a whole.
    assert held < (1.3 if kind == "feather" else 0.6) * compact(rows)
    assert peak < 0.15 * compact(rows)  # by numpy


MEASURE = """
import json, sys, threading, time
import pandas, pyarrow.parquet
from nca_trader.data.bars import read_bars

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

def watch():
    while not done:
        peak[0] = max(peak[0], resident())
        time.sleep(0.002)

read_bars(sys.argv[1])  # what is imported and kept on a first call
done, before = False, resident()
peak = [before]
thread = threading.Thread(target=watch)
thread.start()
begin = time.perf_counter()
bars = read_bars(sys.argv[2])
seconds, done = time.perf_counter() - begin, True
thread.join()
print(json.dumps({"bytes": peak[0] - before, "seconds": seconds, "rows": len(bars)}))
"""


def measured(first, path):
    """Bytes of resident memory above those before, and seconds, of reading `path`."""
    if not sys.platform.startswith("linux"):
        pytest.skip("resident memory is read from /proc")
    command = [sys.executable, "-c", MEASURE, str(first), str(path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


CONSTANT = 60e6  # bytes: a chunk as text and as numbers, and what the allocator keeps


@pytest.mark.slow  # half a minute of parsing
def test_memory_does_not_grow_with_the_width_of_the_text(tmp_path):
    rows = 30_000
    write_minutes(tmp_path / "first.csv", 100)
    write_minutes(tmp_path / "narrow.csv", rows)
    write_minutes(tmp_path / "wide.csv", rows, width=4000)
    narrow = measured(tmp_path / "first.csv", tmp_path / "narrow.csv")
    wide = measured(tmp_path / "first.csv", tmp_path / "wide.csv")
    assert narrow["rows"] == wide["rows"] == rows
    assert narrow["bytes"] < 2.5 * compact(rows) + CONSTANT
    assert wide["bytes"] < 2.5 * compact(rows) + CONSTANT  # the text alone is 120 MB more


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["csv", "parquet", "feather"])
def test_two_million_rows_take_seconds_and_memory_of_the_bars(kind, tmp_path):
    rows = 2_000_000
    write_minutes(tmp_path / f"first.{kind}", 100)
    write_minutes(tmp_path / f"bars.{kind}", rows)
    found = measured(tmp_path / f"first.{kind}", tmp_path / f"bars.{kind}")
    assert found["rows"] == rows
    # A Feather file of one batch is unpacked as a whole.
    assert found["bytes"] < (3.0 if kind == "feather" else 2.5) * compact(rows)
    assert found["seconds"] < 30  # 2 to 7 on a quiet machine
