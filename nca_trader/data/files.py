"""Files and frames as tables, a chunk of rows at a time, so that memory stays bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

from nca_trader.data.delimited import load_csv
from nca_trader.data.tables import Table, canonical
from nca_trader.errors import BarError

CELLS = 1 << 19  # of a chunk: enough that the work a chunk is small beside the work a cell
REMEDY = "Give a CSV, Parquet or Feather file"


def load(
    source: str | Path | pd.DataFrame,
    texts: Sequence[str],
    numbered: bool,
    decimal: str | None,
) -> Iterator[Table]:
    """The table of a file or a frame, in chunks of rows: what is read of it takes bounded memory.

    Args:
      source: the file or the frame.
      texts: names or numbers of columns, beside those called symbol, whose values are texts.
      numbered: whether columns are asked for by number, so that the names need not be right.
      decimal: the decimal sign of a CSV, "." or ","; None: as the file shows.

    Raises:
      BarError: there is no table.
    """
    if isinstance(source, pd.DataFrame):
        tables = _titled(_slices(source), "DataFrame")
    else:
        path = Path(source)
        tables = _guarded(path, lambda: _of_file(path, texts, numbered, decimal))
    empty = True
    for table in tables:
        if not table.frame.empty:
            empty = False
            yield table
    if empty:
        name = "DataFrame" if isinstance(source, pd.DataFrame) else source
        raise BarError(f"{name}: D002 there are no rows. Give a file with bars.")


def _guarded(path: Path, read: Callable[[], Iterator[Table]]) -> Iterator[Table]:
    """What `read` gives; that the file isn't there or isn't what it seems becomes a `BarError`."""
    try:
        if path.stat().st_size == 0:
            raise BarError(f"{path}: D002 the file is empty. Give a file with bars.")
        yield from read()
    except FileNotFoundError as error:
        raise BarError(f"{path}: D001 no such file. Check the path.") from error
    except BarError:
        raise
    except (OSError, EOFError, ValueError) as error:  # parse errors are ValueErrors
        what = getattr(error, "strerror", None) or str(error).strip().partition("\n")[0]
        raise BarError(f"{path}: D001 can't be read ({what.rstrip('.')}). {REMEDY}.") from error


def _of_file(
    path: Path, texts: Sequence[str], numbered: bool, decimal: str | None
) -> Iterator[Table]:
    if path.suffix in (".parquet", ".pq"):
        return _titled(_parquet(path), str(path))
    if path.suffix in (".feather", ".arrow"):
        return _titled(_feather(path), str(path))
    return load_csv(path, texts, numbered, decimal)


def _slices(frame: pd.DataFrame) -> Iterator[pd.DataFrame]:
    rows = max(CELLS // max(frame.shape[1], 1), 1)
    for begin in range(0, len(frame), rows):
        yield frame.iloc[begin : begin + rows]


def _parquet(path: Path) -> Iterator[pd.DataFrame]:
    if path.is_dir():  # a data set of several files
        yield from _slices(pd.read_parquet(path))
        return
    with pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
        rows = max(CELLS // max(len(file.schema_arrow.names), 1), 1)
        for batch in file.iter_batches(batch_size=rows, use_threads=False):
            yield pa.Table.from_batches([batch]).to_pandas()


def _feather(path: Path) -> Iterator[pd.DataFrame]:
    with pa.memory_map(str(path)) as memory:
        if memory.read(6) != b"ARROW1":  # a feather file of the first version
            yield from _slices(pd.read_feather(path))
            return
        file = pyarrow.ipc.open_file(memory)
        for i in range(file.num_record_batches):
            yield from _slices(pa.Table.from_batches([file.get_batch(i)]).to_pandas())


def _titled(frames: Iterator[pd.DataFrame], name: str) -> Iterator[Table]:
    """Tables whose columns include the frames' own index, if that is a time or a symbol."""
    begin = 0
    for each in frames:
        frame: Any = each
        if isinstance(frame.index, pd.DatetimeIndex) and frame.index.name is None:
            frame = frame.rename_axis("time")
        named = [level for level in frame.index.names if canonical(level)]
        twice = next((level for level in named if level in frame.columns), None)
        if twice is not None:
            raise BarError(
                f"{name}: D005 the index and a column are both called {twice!r}. Drop one of them."
            )
        frame = frame.reset_index(drop=not named)
        frame.index = pd.RangeIndex(begin, begin + len(frame))
        begin += len(frame)
        yield Table(frame, name, "row")
