"""Reads files and frames a chunk of rows at a time, so that memory stays bounded."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset
import pyarrow.ipc
import pyarrow.parquet

from nca_trader.cloud import CloudPath, Place, fetched, place
from nca_trader.data.reading.columns import Chunk, canonical
from nca_trader.data.reading.delimited import load_csv
from nca_trader.data.reading.faults import Code, refusal
from nca_trader.errors import BarError

CELLS = 1 << 19  # of a chunk: enough that the work per cell outweighs the work per chunk
ROWS_PER_BYTE = 64  # of a Feather file, at most; a damaged one may claim any number


def load(
    source: str | os.PathLike[str] | CloudPath | pd.DataFrame,
    texts: Sequence[str],
    numbered: bool,
    decimal: str | None,
) -> Iterator[Chunk]:
    """Reads a file or a frame in chunks of rows, so that memory stays bounded.

    Args:
      source: the file, or its URL in an object store, or the frame.
      texts: names or numbers of columns, in addition to those called symbol, that hold texts.
      numbered: whether columns are asked for by number, so that the names need not be right.
      decimal: the decimal sign of a CSV, "." or ","; None: as the file shows.

    Raises:
      BarError: there is no table.
    """
    if isinstance(source, pd.DataFrame):
        path, chunks = "DataFrame", _titled(_slices(source), "DataFrame")
    else:
        path = place(source)
        try:
            copy = fetched(path) if isinstance(path, CloudPath) else path
        except FileNotFoundError as error:
            raise refusal(path, Code.D001, "no such object", "Check the URL") from error
        # The file is a copy where the user gave a URL, and is named by that in chunks and errors.
        chunks = _named(_guarded(copy, texts, numbered, decimal), copy, path)
    empty = True
    for chunk in chunks:
        if not chunk.frame.empty:
            empty = False
            yield chunk
    if empty:
        raise refusal(path, Code.D002, "there are no rows")


def _named(chunks: Iterator[Chunk], copy: Path, path: Place) -> Iterator[Chunk]:
    """Gives the chunks of a copy, and the errors that name it, the name that the user gave."""
    try:
        for chunk in chunks:
            yield chunk._replace(name=str(path))
    except BarError as error:
        lines = (line.replace(str(copy), str(path)) for line in error.args)
        raise BarError(*lines) from error


def _guarded(
    path: Path, texts: Sequence[str], numbered: bool, decimal: str | None
) -> Iterator[Chunk]:
    """Reads a file; any failure becomes a `BarError` that names it."""
    try:
        mode = path.stat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            # Its size is 0, and a file is read more than once.
            kind = "a pipe" if stat.S_ISFIFO(mode) else "a device"
            say = f"is {kind} and not a file"
            raise refusal(path, Code.D001, say, "Save what it gives to a file")
        if path.stat().st_size == 0:
            raise refusal(path, Code.D002, "the file is empty")
        if path.suffix in (".parquet", ".pq"):
            chunks = _titled(_parquet(path), str(path))
        elif path.suffix in (".feather", ".arrow"):
            chunks = _titled(_feather(path), str(path))
        else:
            chunks = load_csv(path, texts, numbered, decimal)
        for chunk in chunks:
            yield chunk
            # Arrow keeps what it freed, which would add up to more than the bars.
            pa.default_memory_pool().release_unused()
    except FileNotFoundError as error:
        raise refusal(path, Code.D001, "no such file", "Check the path") from error
    except BarError:
        raise
    except MemoryError as error:
        raise refusal(path, Code.D001, "takes more memory than there is") from error
    except Exception as error:
        # On a damaged file pandas, pyarrow and zlib raise anything, KeyErrors as well.
        what = getattr(error, "strerror", None) or str(error).strip().partition("\n")[0]
        raise refusal(path, Code.D001, f"can't be read ({what.rstrip('.')})") from error


def _slices(frame: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Yields a frame in pieces."""
    rows = _rows(frame.shape[1])
    for begin in range(0, len(frame), rows):
        yield frame.iloc[begin : begin + rows]


def _parquet(path: Path) -> Iterator[pd.DataFrame]:
    """Reads a file, or a folder of files, in pieces."""
    if path.is_dir():  # a data set of several files, whose folders may name columns
        files = pyarrow.dataset.dataset(path, format="parquet", partitioning="hive")
        for fragment in files.get_fragments():
            keys = pyarrow.dataset.get_partition_keys(fragment.partition_expression)
            if {*fragment.physical_schema.names, *keys} != set(files.schema.names):
                say = "its columns are not those of the folder's other files"
                raise refusal(fragment.path, Code.D005, say, "Write them alike")
            # The fragment's own scan would hold a whole row group.
            yield from (frame.assign(**keys) for frame in _parquet(Path(fragment.path)))
        return
    with pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
        size = _rows(len(file.schema_arrow.names))
        yield from map(_frame, file.iter_batches(batch_size=size, use_threads=False))


def _feather(path: Path) -> Iterator[pd.DataFrame]:
    """Reads a file in pieces."""
    # Pages of a memory map would stay in memory together with the bars.
    with pa.OSFile(str(path)) as file:
        if file.read(6) != b"ARROW1":  # a feather file of the first version
            yield from _slices(pd.read_feather(path))
            return
        for i in range(pyarrow.ipc.open_file(file).num_record_batches):
            yield from _of_batch(file, i)


def _of_batch(file: pa.NativeFile, index: int) -> Iterator[pd.DataFrame]:
    """Reads a record batch in parts, as some writers make one batch of the whole table.

    A batch is compressed by columns: in memory are one column and an eighth of the batch at most.
    """
    schema = pyarrow.ipc.open_file(file).schema

    def column(at: int, begin: int, end: int) -> tuple[pa.Array, int]:
        options = pyarrow.ipc.IpcReadOptions(included_fields=[at], use_threads=False)
        whole = pyarrow.ipc.open_file(file, options=options).get_batch(index).column(0)
        whole.validate(full=True)  # else offsets of a damaged file reach beyond its buffers
        # Taken, not sliced: a slice would keep the whole column.
        return whole.take(pa.array(np.arange(begin, min(end, len(whole))))), len(whole)

    width, size = len(schema.names), column(0, 0, 0)[1]
    rows = max(_rows(width), -(-size // 8))
    if size > ROWS_PER_BYTE * file.size():
        raise ValueError(f"{size:,} rows in a file of {file.size():,} bytes")
    for begin in range(0, size, rows):
        columns = []
        for at in range(width):
            columns.append(column(at, begin, begin + rows)[0])
            pa.default_memory_pool().release_unused()
        for part in pa.Table.from_arrays(columns, schema=schema).to_batches(_rows(width)):
            yield _frame(part)


def _rows(width: int) -> int:
    """Returns the rows of a chunk of that many columns."""
    return max(CELLS // max(width, 1), 1)


def _frame(rows: pa.RecordBatch | pa.Table) -> pd.DataFrame:
    """Converts rows to pandas, in this thread."""
    return rows.to_pandas(use_threads=False)


def _titled(frames: Iterator[pd.DataFrame], name: str) -> Iterator[Chunk]:
    """Makes chunks whose columns include the frames' own index, if it is a time or a symbol."""
    begin = 0
    for each in frames:
        frame: Any = each
        if isinstance(frame.index, pd.DatetimeIndex) and frame.index.name is None:
            frame = frame.rename_axis("time")
        named = [level for level in frame.index.names if canonical(level)]
        twice = next((level for level in named if level in frame.columns), None)
        if twice is not None:
            say = f"the index and a column are both called {twice!r}"
            raise refusal(name, Code.D005, say, "Drop one of them")
        frame = frame.reset_index(drop=not named)
        frame.index = pd.RangeIndex(begin, begin + len(frame))
        begin += len(frame)
        yield Chunk(frame, name, "row")
