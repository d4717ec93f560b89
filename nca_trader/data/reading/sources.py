"""Reads files and frames a chunk of rows at a time, so that memory stays bounded.

Parquet files are read a part of a row group at a time, Feather files a batch.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset
import pyarrow.ipc
import pyarrow.parquet

from nca_trader.cloud import CloudPath, fetched, place
from nca_trader.config.reading import role_of
from nca_trader.data.reading.faults import Code, Request, refusal, refuse_large
from nca_trader.data.reading.text import COLUMN_BYTES, FEW_ROWS, MOST_TEXT, Chunk, load_csv
from nca_trader.errors import BarError
from nca_trader.progress import Progress

CELLS = 1 << 19  # of a chunk: enough that the work per cell outweighs the work per chunk


def load(
    source: str | os.PathLike[str] | CloudPath | pd.DataFrame, request: Request
) -> Iterator[Chunk]:
    """Read a file or a frame in chunks of rows, so that memory stays bounded.

    Args:
      source: the file, or its URL in an object store, or the frame.
      request: columns that hold texts or are asked for by number, the decimal sign, and the memory
        that reading may take.

    Raises:
      BarError: there is no table, or it unpacks to more than is allowed.
    """
    if isinstance(source, pd.DataFrame):
        path = copy = "DataFrame"
        chunks = _titled(_slices(source), path, len(source))
    else:
        path = place(source)
        try:
            copy = fetched(path) if isinstance(path, CloudPath) else path
        except FileNotFoundError as error:
            raise refusal(path, Code.D001, "no such object", "Check the URL") from error
        chunks = _guarded(copy, request)
    empty = True
    try:
        for chunk in chunks:
            if not chunk.frame.empty:
                empty = False
                yield chunk._replace(name=str(path))
    except BarError as error:
        # The file is a copy where the user gave a URL; messages give the URL.
        raise BarError(*(line.replace(str(copy), str(path)) for line in error.args)) from error
    if empty:
        raise refusal(path, Code.D002, "there are no rows")


def _guarded(path: Path, request: Request) -> Iterator[Chunk]:
    """Read a file; any failure becomes a `BarError` that names it."""
    try:
        mode = path.stat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            # A pipe has size 0 and cannot be read twice, which the layout needs.
            kind = "a pipe" if stat.S_ISFIFO(mode) else "a device"
            say = f"is {kind} and not a file"
            raise refusal(path, Code.D001, say, "Save what it gives to a file")
        if path.stat().st_size == 0:
            raise refusal(path, Code.D002, "the file is empty")
        size, done = path.stat().st_size, 0
        if path.suffix in (".parquet", ".pq"):
            chunks = _titled(*_parquet(path, request))
        elif path.suffix in (".feather", ".arrow"):
            chunks = _titled(*_feather(path, request))
        else:
            chunks = load_csv(path, request)
        with Progress(size, f"read {path.name}", "bytes") as shown:
            for chunk in chunks:
                yield chunk
                # Arrow keeps what it freed, which would add up to more than the bars.
                pa.default_memory_pool().release_unused()
                read = round(chunk.share * size)
                shown.update(read - done)
                done = read
    except FileNotFoundError as error:
        raise refusal(path, Code.D001, "no such file", "Check the path") from error
    except BarError:
        raise
    except MemoryError as error:
        raise refusal(path, Code.D001, "takes more memory than there is") from error
    except Exception as error:
        # On a damaged file pandas, pyarrow and zlib raise anything, including KeyError.
        what = getattr(error, "strerror", None) or str(error).strip().partition("\n")[0]
        raise refusal(path, Code.D001, f"can't be read ({what.rstrip('.')})") from error


def _slices(frame: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Yield a frame in pieces."""
    rows = _rows(frame.shape[1])
    for begin in range(0, len(frame), rows):
        yield frame.iloc[begin : begin + rows]


def _parquet(path: Path, request: Request) -> tuple[Iterator[pd.DataFrame], str, int]:
    """Return the pieces of a file, or of a folder of files; its name, and its number of rows."""
    files: list[tuple[str | Path, dict[str, Any]]] = [(path, {})]
    if path.is_dir():  # a data set of several files, whose folders may name columns
        whole = pyarrow.dataset.dataset(path, format="parquet", partitioning="hive")
        files = []
        for fragment in whole.get_fragments():
            keys = pyarrow.dataset.get_partition_keys(fragment.partition_expression)
            if {*fragment.physical_schema.names, *keys} != set(whole.schema.names):
                say = "its columns are not those of the folder's other files"
                raise refusal(fragment.path, Code.D005, say, "Write them alike")
            files.append((fragment.path, keys))
    rows = size = 0
    for file, _ in files:
        about = pyarrow.parquet.read_metadata(file)
        width = about.num_columns
        refuse_large(file, f"{width:,} columns", width * COLUMN_BYTES, request.memory_gb)
        # A column that repeats a value is stored in a few bytes, and a text is as long as it is.
        groups = (about.row_group(i).total_byte_size for i in range(about.num_row_groups))
        rows += about.num_rows
        size = max(size + sum(groups), rows * width * 8, request.kept(rows))
        refuse_large(file, f"{rows:,} rows of {width:,} columns", size, request.memory_gb)
    frames = (frame.assign(**keys) for file, keys in files for frame in _pieces(file))
    return frames, str(path), rows


def _pieces(path: str | Path) -> Iterator[pd.DataFrame]:
    """Read a Parquet file in pieces; a fragment's own scan would hold a whole row group."""
    schema = pyarrow.parquet.read_schema(path)
    names = [field.name for field in schema if _is_flat(field.type)]
    texts = [field.name for field in schema if _is_text(field.type)]
    options: Any = {"read_dictionary": texts, "buffer_size": 1 << 20, "pre_buffer": False}
    with pyarrow.parquet.ParquetFile(path, **options) as file:
        size = _rows(len(names))
        for rows in file.iter_batches(batch_size=size, columns=names, use_threads=False):
            yield _frame(rows, path)


def _feather(path: Path, request: Request) -> tuple[Iterator[pd.DataFrame], str, int]:
    """Return the batches of a file; its name, and its number of rows."""
    whole = pyarrow.dataset.dataset(path, format="feather")
    rows, width = whole.count_rows(), len(whole.schema.names)
    refuse_large(path, f"{width:,} columns", width * COLUMN_BYTES, request.memory_gb)
    size = max(rows * width * 8, request.kept(rows))
    refuse_large(path, f"{rows:,} rows of {width:,} columns", size, request.memory_gb)

    def pieces() -> Iterator[pd.DataFrame]:
        with pa.OSFile(str(path)) as file, pyarrow.ipc.open_file(file) as batches:
            for i in range(batches.num_record_batches):
                batch = batches.get_batch(i)
                batch.validate(full=True)  # else offsets of a damaged file reach beyond its buffers
                batch = batch.select([f.name for f in batch.schema if _is_flat(f.type)])
                for begin in range(0, len(batch), _rows(width)):
                    yield _frame(batch.slice(begin, _rows(width)), path)

    return pieces(), str(path), rows


def _is_flat(kind: pa.DataType) -> bool:
    """Return whether a column has numbers, times or texts; other columns have no role."""
    types = pa.types
    flat = types.is_primitive(kind) or types.is_decimal(kind) or types.is_null(kind)
    return flat or types.is_dictionary(kind) or _is_text(kind)


def _is_text(kind: pa.DataType) -> bool:
    texts = (pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary())
    return kind in (*texts, pa.binary_view())


def _frame(rows: pa.RecordBatch, path: str | Path) -> pd.DataFrame:
    """Return a piece whose texts were stored once each, unless they are too long as a whole."""
    columns, size = [], 0
    for column in rows.columns:
        if pa.types.is_dictionary(column.type) and _is_text(column.type.value_type):
            known = pc.call_function("binary_length", [column.dictionary]).fill_null(0).to_numpy()
            size += int(known[column.indices.drop_null().to_numpy()].sum(dtype=np.int64))
            column = pc.cast(column, column.type.value_type) if size <= MOST_TEXT else column
        elif column.type in (pa.string_view(), pa.binary_view()):
            views = np.frombuffer(column.buffers()[1], "<i4")[::4]  # each begins with its length
            size += int(views[column.offset :][: len(column)].sum(dtype=np.int64))
        elif _is_text(column.type):
            size += column.nbytes
        if size > MOST_TEXT:
            say = f"{len(rows):,} rows have more than {MOST_TEXT:,} bytes of text"
            raise refusal(path, Code.D022, say, "Shorten it")
        columns.append(column)
    fields = [pa.field(name, c.type) for name, c in zip(rows.schema.names, columns, strict=True)]
    # The metadata say which column is the index, and how the columns' names are levels.
    schema = pa.schema(fields, rows.schema.metadata)
    return pa.RecordBatch.from_arrays(columns, schema=schema).to_pandas(use_threads=False)


def _rows(width: int) -> int:
    """Return the rows of a chunk of that many columns."""
    return max(CELLS // max(width, 1), FEW_ROWS)


def _titled(frames: Iterator[pd.DataFrame], name: str, rows: int) -> Iterator[Chunk]:
    """Make chunks whose columns include the frames' index, if it is a time or a symbol."""
    begin = 0
    for each in frames:
        frame: Any = each
        if isinstance(frame.index, pd.DatetimeIndex) and frame.index.name is None:
            frame = frame.rename_axis("time")
        named = [level for level in frame.index.names if role_of(level)]
        twice = next((level for level in named if level in frame.columns), None)
        if twice is not None:
            say = f"the index and a column are both called {twice!r}"
            raise refusal(name, Code.D005, say, "Drop one of them")
        frame = frame.reset_index(drop=not named)
        frame.index = pd.RangeIndex(begin, begin + len(frame))
        begin += len(frame)
        yield Chunk(frame, name, "row", share=begin / max(rows, begin))
