"""Reading a file takes no more memory and time than is allowed, whatever the file unpacks to."""

import gzip
import json
import re
import subprocess
import sys
import zipfile

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

from nca_trader.data.bars import read_bars
from nca_trader.errors import BarError, NcaTraderError

HEADER = b"time,open,high,low,close,volume\n"
ROW = b"2020-01-01T00:00:00Z,10.0,11.0,9.0,10.0,5\n"
ROWS = 1 << 18  # of a member or a group: ten megabytes of text
LETTERS = "x" * 1_000_000


def table(rows, **more):
    """The same bar again and again, which takes a few bytes of a packed file."""
    time = pa.array(np.full(rows, 1577836800000)).cast(pa.timestamp("ms", "UTC"))
    price = pa.array(np.full(rows, 10.0))
    names = ("open", "high", "low", "close", "volume")
    return pa.table({"time": time, **dict.fromkeys(names, price)} | more)


def repeated(text, rows):
    """A column that stores its text once."""
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, "int32")), pa.array([text]))


def viewed(rows):
    """A column whose every cell is a view of the same text."""
    letters = np.frombuffer(LETTERS.encode(), np.uint8)
    view = np.zeros(rows, [("size", "<i4"), ("begin", "S4"), ("buffer", "<i4"), ("at", "<i4")])
    view["size"], view["begin"] = len(letters), b"xxxx"
    buffers = [None, pa.py_buffer(view.tobytes()), pa.py_buffer(letters.tobytes())]
    return pa.Array.from_buffers(pa.string_view(), rows, buffers)


def gzipped(path):
    path.write_bytes(gzip.compress(HEADER) + gzip.compress(ROW * ROWS) * 100)


def zipped(path, way=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", way) as archive, archive.open("a.csv", "w") as file:
        file.write(HEADER)
        for _ in range(60 if way == zipfile.ZIP_DEFLATED else 1):
            file.write(ROW * ROWS)


def many_groups(path):
    group = table(1_000_000)
    with pyarrow.parquet.ParquetWriter(path, group.schema, compression="zstd") as writer:
        for _ in range(18):
            writer.write_table(group)


def parquet(whole):
    return lambda path: pyarrow.parquet.write_table(whole(), path, compression="zstd")


def feather(whole, rows=1 << 16):
    def write(path):
        pyarrow.feather.write_feather(whole(), path, compression="zstd", chunksize=rows)

    return write


def text(*lines):
    return lambda path: path.write_text("\n".join(lines) + "\n")


def wide(rows):
    names = ",".join(f"A{i}" for i in range(60_000))
    days = pd.date_range("2020-01-01", periods=rows).strftime("%Y-%m-%d")
    return text(f"time,{names}", *(day + ",10.25" * 60_000 for day in days))


def of_text_times(rows):
    return table(rows).set_column(0, "time", repeated(LETTERS, rows))


SPARSE = (f"{d:%Y-%m-%d},S{i},1,1,1,1,1" for i, d in enumerate(pd.date_range("1950", periods=9000)))
LITTLE = {"memory_gb": 0.2}  # for files that take a test long to write
CLOSES = {"columns": "close=*", "repair": "close-only,no-volume"}
# How the file is made, what is said of it, and options.
FILES = {
    "a gigabyte.csv.gz": (gzipped, "D034 unpacks to about", {}),
    "a gigabyte.zip": (zipped, "D034 unpacks to about 660,", {}),
    "bzip2.zip": (lambda path: zipped(path, zipfile.ZIP_BZIP2), "D001 is not packed by def", {}),
    "lzma.zip": (lambda path: zipped(path, zipfile.ZIP_LZMA), "D001 is not packed by def", {}),
    "rows.parquet": (many_groups, "D034 18,000,000 rows of 6 columns", {}),
    "texts.parquet": (
        parquet(lambda: table(200_000, note=repeated(LETTERS, 200_000))),
        "rows have more than 134,217,728 bytes of text",
        {},
    ),
    "times.parquet": (parquet(lambda: of_text_times(100_000)), "bytes of text", {}),
    "rows.feather": (feather(lambda: table(2_000_000)), "D034 2,000,000 rows of 6", LITTLE),
    "batch.arrow": (feather(lambda: table(2_000_000), 2_000_000), "D034 2,000,000 rows", LITTLE),
    "texts.feather": (
        feather(lambda: table(300, note=[LETTERS] * 300), 300),
        "300 rows have more than 134,217,728 bytes of text",
        {},
    ),
    "categories.feather": (feather(lambda: of_text_times(100_000)), "bytes of text", {}),
    "views.feather": (feather(lambda: table(9000, note=viewed(9000))), "bytes of text", {}),
    "columns.csv": (wide(5), "D034 60,001 columns", CLOSES),
    "assets.csv": (
        text("time,symbol,open,high,low,close,volume", *SPARSE),
        "D034 9,000 assets at 9,000 times",
        {},
    ),
    "years.csv": (
        text(HEADER.decode().strip(), "1800-01-02T00:00Z,1,1,1,1,1", "2030-01-02T00:00Z,1,1,1,1,1"),
        "D034 7,258,118,401 times from the first bar to the last",
        {"every": "1s", "repair": "keep-gaps"},
    ),
}
CHILD = """
import json, resource, sys, time
import pyarrow.dataset, pyarrow.feather, pyarrow.parquet
from nca_trader.data.bars import read_bars
from nca_trader.errors import BarError
resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))  # so that a failure ends here
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
out = {}
for path, options in json.loads(sys.stdin.read()):
    before, begin = peak(), time.process_time()
    try:
        said = f"{len(read_bars(path, **options))} bars"
    except BarError as error:
        said = str(error)
    out[path] = said, peak() - before, time.process_time() - begin
print(json.dumps(out))
"""


def measured(asked):
    """What a fresh process says of files, the GiB by which its peak grew, and its seconds."""
    if not sys.platform.startswith("linux"):
        pytest.skip("another system counts peak memory in another unit")
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=json.dumps(asked), capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    return json.loads(done.stdout)


@pytest.mark.heavy
def test_what_unpacks_to_more_than_is_allowed_is_one_line_at_once(tmp_path):
    asked = []
    for name, (make, _, options) in FILES.items():
        make(tmp_path / name)
        assert (tmp_path / name).stat().st_size < 4 << 20, name
        asked.append((str(tmp_path / name), options))
    found = measured(asked)
    for name, (_, want, _) in FILES.items():
        said, grown, seconds = found[str(tmp_path / name)]
        assert want in said and said.startswith(f"{tmp_path / name}: D0"), said
        assert "\n" not in said and said.endswith("."), said
        assert "D034" not in said or "pass memory_gb=" in said, said
        assert grown < 0.5 and seconds < 10.0, (name, grown, seconds)


def test_the_option_that_is_named_reads_the_file(tmp_path):
    FILES["years.csv"][0](tmp_path / "years.csv")
    feather(lambda: table(200_000))(tmp_path / "rows.feather")
    for name, options in (
        ("rows.feather", {"memory_gb": 0.02, "repair": "keep-first"}),
        ("years.csv", {"every": "1h", "repair": "keep-gaps", "memory_gb": 0.1}),
    ):
        with pytest.raises(BarError) as caught:
            read_bars(tmp_path / name, **options)
        more = float(re.search(r"pass memory_gb=(\d+)", str(caught.value))[1])
        assert len(read_bars(tmp_path / name, **options | {"memory_gb": more})) > 0


def test_rows_of_a_symbol_take_their_own_memory_alone(tmp_path):
    days = pd.date_range("1990", periods=2000, tz="UTC").repeat(10)
    frame = pd.DataFrame({"time": days, "symbol": list("ABCDEFGHIJ") * 2000, "close": 5.0})
    frame.to_csv(tmp_path / "many.csv", index=False)
    options = {"repair": "close-only,no-volume", "memory_gb": 0.002}
    with pytest.raises(BarError, match="D034 about 20,000 bars of an asset"):
        read_bars(tmp_path / "many.csv", **options)
    assert len(read_bars(tmp_path / "many.csv", "B", **options)) == 2000
    assert len(read_bars(frame, repair="close-only,no-volume", memory_gb=0.003)) == 2000
    for wrong in (0.0, -1.0, float("nan"), "2"):
        with pytest.raises(NcaTraderError, match="memory_gb"):
            read_bars(frame, memory_gb=wrong)


def minutes(rows):
    """Bars of one asset, a minute apart."""
    rng = np.random.default_rng(0)
    close = np.round(100.0 * np.exp(np.cumsum(rng.normal(0, 1e-4, rows))), 2)
    opens = np.append(close[:1], close[:-1])
    time = pa.array(np.arange(rows) * 60_000).cast(pa.timestamp("ms", "UTC"))
    high, low = np.maximum(opens, close), np.minimum(opens, close)
    bars = {"open": opens, "high": high, "low": low, "close": close, "volume": np.ones(rows)}
    return pa.table({"time": time, **bars})


@pytest.mark.heavy
@pytest.mark.parametrize("write", [
    pyarrow.parquet.write_table, pyarrow.feather.write_feather,
])  # fmt: skip
def test_a_file_just_below_the_bound_is_read_within_it(tmp_path, write):
    rows = 3_000_000
    small, large = tmp_path / "small.bars", tmp_path / "large.bars"
    suffix = ".parquet" if write is pyarrow.parquet.write_table else ".feather"
    small, large = small.with_suffix(suffix), large.with_suffix(suffix)
    write(minutes(100), small)
    write(minutes(rows), large)
    bound = rows * 128 * 1.03 / 2**30  # a batch of 65,536 rows comes on top
    found = measured([(str(small), {}), (str(large), {"memory_gb": bound})])
    said, grown, _ = found[str(large)]
    assert said == f"{rows} bars"
    assert grown < bound, (grown, bound)
    with pytest.raises(BarError, match=r"D034 3,000,000 rows of 6 columns count as 0.3[56]"):
        read_bars(large, memory_gb=0.9 * bound)
