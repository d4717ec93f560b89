"""Frames of polars, Arrow tables and folders of Parquet files are the same bars as one frame."""

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import nca_trader as nca
from nca_trader.errors import BarError, ConfigError


@pytest.fixture(scope="module")
def long():
    """Two assets, hourly by New York's clock over a change of it; B lacks some bars."""
    rng = np.random.default_rng(7)
    time = pd.date_range("2024-03-06 09:00", periods=200, freq="h", tz="America/New_York")
    parts = []
    for symbol in ("A", "B"):
        close = 100.0 * np.exp(rng.normal(0, 0.01, 200).cumsum())
        prices = {"open": close, "high": 1.01 * close, "low": 0.99 * close, "close": close}
        parts.append(pd.DataFrame({"time": time, "symbol": symbol, **prices}))
        parts[-1]["volume"] = rng.integers(1, 1000, 200)
    return pd.concat([parts[0], parts[1].drop(index=range(40, 60))], ignore_index=True)


def kinds(frame):
    """The same table as others hold it, by name."""
    polars, table = pl.from_pandas(frame), pa.Table.from_pandas(frame)
    yield "polars", polars
    yield "lazy", polars.lazy()
    yield "categories", polars.with_columns(pl.col("symbol").cast(pl.Categorical))
    yield "chunks", pl.concat([polars[:33], polars[33:]], rechunk=False)
    for unit in ("ms", "us"):
        yield unit, polars.with_columns(pl.col("time").dt.cast_time_unit(unit))
    yield "utc", polars.with_columns(pl.col("time").dt.convert_time_zone("UTC"))
    yield "decimals", polars.with_columns(pl.col("volume").cast(pl.Decimal(18, 2)))
    yield "table", table
    yield "reader", table.to_reader(max_chunksize=50)
    yield "views", table.set_column(1, "symbol", table["symbol"].cast(pa.string_view()))
    yield "dictionary", table.set_column(1, "symbol", table["symbol"].dictionary_encode())


def test_arrow_data_and_polars_are_the_bars_of_the_pandas_frame(long):
    want = nca.read_bars(long)
    assert want.present.sum() == 380 and str(want.time[0]) == "2024-03-06T14:00:00.000000000"
    for name, table in kinds(long):
        assert nca.read_bars(table).digest() == want.digest(), name
    one = nca.read_bars(pl.from_pandas(long), symbol="B")
    assert one.digest() == nca.read_bars(long, symbol="B").digest()


def test_dates_without_a_zone_are_those_of_pandas(long):
    days = long[long.symbol == "A"].head(30).drop(columns="symbol")
    days["time"] = pd.date_range("2024-01-01", periods=30)
    want, frame = nca.read_bars(days, "A").digest(), pl.from_pandas(days)
    assert nca.read_bars(frame, "A").digest() == want
    assert nca.read_bars(frame.with_columns(pl.col("time").cast(pl.Date)), "A").digest() == want
    text = frame.with_columns(pl.col("time").dt.to_string("%Y-%m-%d"))
    assert nca.read_bars(text, "A").digest() == want


def test_a_table_with_a_fault_is_refused_as_a_frame_is(long):
    frame = pl.from_pandas(long)
    for table, said in [
        (frame.head(0), "DataFrame: D002 there are no rows"),
        (frame.drop("close"), "DataFrame: D003 no close column"),
        (pa.Table.from_pandas(long.drop(columns="time")), "Table: D004 no time column"),
        (frame["close"], "Series: D001 is a column and not a table"),
    ]:
        with pytest.raises(BarError, match=said):
            nca.read_bars(table)
    with pytest.raises(ConfigError, match="give a path or a frame"):
        nca.read_bars([1.0])


@pytest.mark.parametrize("name", ["{s}/{h}.parquet", "symbol={s}/part-{h}.pq", "{s}/2024/{h}.pq"])
def test_a_folder_whose_names_say_the_symbol_is_the_long_table(tmp_path, long, name):
    bare = long.drop(columns="symbol")
    for symbol in ("A", "B"):
        rows = bare[long.symbol == symbol]
        for half, part in enumerate((rows[:90], rows[90:])):
            path = tmp_path / name.format(s=symbol, h=half)
            path.parent.mkdir(parents=True, exist_ok=True)
            part.to_parquet(path, index=False)
    (tmp_path / "_SUCCESS").write_text("")
    (tmp_path / "readme.txt").write_text("not a table")
    assert nca.read_bars(tmp_path).digest() == nca.read_bars(long).digest()
    assert nca.read_bars(tmp_path, symbol="B").symbols == ("B",)


def test_a_folder_is_one_file_per_symbol_or_parts_of_one_table(tmp_path, long):
    want = nca.read_bars(long)
    bare = {symbol: rows.drop(columns="symbol") for symbol, rows in long.groupby("symbol")}

    def folder(name, parts):
        (tmp_path / name).mkdir()
        for file, frame in parts.items():
            frame.to_parquet(tmp_path / name / f"{file}.parquet", index=False)
        return tmp_path / name

    each = folder("each", bare)
    assert nca.read_bars(each).digest() == want.digest()
    halves = {"1": bare["A"][:90], "2": bare["A"][90:]}
    one = want.select("A").digest()
    for name, file in {"years": "202{}", "parts": "part-{}", "named": "A_{}"}.items():
        parts = folder(name, {file.format(half): rows for half, rows in halves.items()})
        assert nca.read_bars(parts, symbol="A").digest() == one
        assert nca.read_bars(parts).symbols == (name,)
    whole = folder("whole", {"x": long[:200], "y": long[200:]})
    assert nca.read_bars(whole).digest() == want.digest()
    numbers = folder("numbers", {"7203": bare["A"], "6758": bare["B"]})
    with pytest.raises(BarError, match="D005 file 6758 may be a symbol's or a part of one table"):
        nca.read_bars(numbers)
    with pytest.raises(BarError, match="D021"):  # as parts of one, they have the same times
        nca.read_bars(numbers, symbol="7203")
    with pytest.raises(BarError, match="D005 its columns are not those of the folder's other"):
        nca.read_bars(folder("mixed", {"A": bare["A"], "B": bare["B"].drop(columns="open")}))
    (tmp_path / "none").mkdir()
    with pytest.raises(BarError, match="D001 is a folder without a file that ends in"):
        nca.read_bars(tmp_path / "none")
