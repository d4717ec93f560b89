"""Files as they are stored: bytes of text, Parquet and Feather, and frames in memory.

All are read a part at a time, so that memory stays bounded: a Parquet file a part of a row group, a
Feather file a batch.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset
import pyarrow.ipc
import pyarrow.parquet

from nca_trader.config.reading import role_of
from nca_trader.data.reading.faults import Kind, Request, refusal, refuse_large
from nca_trader.errors import argument, printable
from nca_trader.machine import refuse_packed

CHUNK_ROWS, CHUNK_TEXT = 1 << 16, 1 << 22  # rows and characters of a chunk, at most or about
FEW_ROWS = 1 << 9  # rows of a chunk where there are many columns: each takes time
# Bytes of memory that a column takes in addition to its cells, about, as it takes time.
COLUMN_BYTES = 1 << 19
CELLS = 1 << 19  # of a chunk: enough that the work per cell outweighs the work per chunk
LINE = 1 << 22  # bytes of a line, at most
MOST_TEXT = 32 * CHUNK_TEXT  # of a chunk at most: later lines may be longer than the first ones
SHOWS = 1 << 24  # unpacked bytes that show how much a packed file unpacks to
# A byte of unpacked text counts as so many of memory: 500 MiB of it take ten seconds to read.
TEXT_BYTES = 4
UNPACK, EXPORT = "Unpack it and give the file in it", "Save it as CSV or Parquet"
RECODE, TABLE = "Save it as UTF-8", "Save the table in it as CSV"
PARQUET = (".parquet", ".pq")
DIGITS, YEAR = re.compile(r"[\d\W_]+"), re.compile(r"(19|20)\d\d(\d\d){0,2}")
ZIP = b"PK\x03\x04"
SPREADSHEET = ("[Content_Types].xml", "mimetype")  # files in those of Microsoft and OpenDocument
NOT_TEXT = {  # what begins with these bytes, and what to do with it
    b"PK\x03\x04": ("a zip archive in an archive", UNPACK),
    b"\x1f\x8b": ("compressed by gzip twice", UNPACK),
    b"BZh": ("compressed by bzip2", UNPACK),
    b"\xfd7zXZ": ("compressed by xz", UNPACK),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", UNPACK),
    b"PAR1": ("Parquet", "Give it a name that ends in .parquet"),
    b"ARROW1": ("Arrow or Feather", "Give it a name that ends in .feather"),
    b"FEA1": ("Arrow or Feather", "Give it a name that ends in .feather"),
    b"SQLite format 3": ("a SQLite database", EXPORT),
    **dict.fromkeys((b"<!", b"<html", b"<?xml"), ("an HTML or XML page", TABLE)),
    **dict.fromkeys((b"{", b"["), ("JSON", EXPORT)),
    # Before UTF-16, with whose mark this one begins.
    **dict.fromkeys((b"\xff\xfe\0\0", b"\0\0\xfe\xff"), ("UTF-32 text", RECODE)),
    **dict.fromkeys((b"\xff\xfe", b"\xfe\xff"), ("UTF-16 text", RECODE)),
}


class Chunk(NamedTuple):
    """Some rows of a file or a frame, as they were found.

    Attributes:
      frame: its index is what a reader counts: lines from 1 (the header's) or rows from 0.
      name: the file.
      unit: "line" or "row".
      decimal: the sign of texts that are numbers.
      proved: whether numbers or the user show that sign, so that the other parts thousands.
      short: lines that end early.
      share: of the file that was read up to here.
    """

    frame: pd.DataFrame
    name: str
    unit: str
    decimal: str = "."
    proved: bool = False
    short: tuple[int, ...] = ()
    share: float = 1.0


class EndlessRow(ValueError):
    """Rows with too much text for a chunk: a quote is open, or lines grow without bound."""


def _open_zipped(path: Path) -> tuple[Any, int]:
    """Open the one file of a zip archive; return it and its size.

    Raises:
      BarError: a spreadsheet, an archive of no file or of several, or one with a password.
    """
    with zipfile.ZipFile(path) as archive:
        # macOS adds a folder of attributes.
        files = [
            one for one in archive.infolist() if not (one.is_dir() or one.filename[:2] == "__")
        ]
        names = ", ".join(printable(one.filename) for one in files[:4])
        if any(one.filename in SPREADSHEET for one in files):
            raise refusal(path, Kind.D001, "is a spreadsheet", "Save the sheet as CSV")
        if len(files) != 1:
            say = f"is a zip archive of {len(files)} files ({names or 'none'})"
            raise refusal(path, Kind.D001, say, UNPACK)
        if files[0].flag_bits & 1:
            raise refusal(path, Kind.D001, f"has a password ({names})", UNPACK)
        # Python unpacks the other ways without a bound.
        if files[0].compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise refusal(path, Kind.D001, f"is not packed by deflate ({names})", UNPACK)
        return archive.open(files[0]), files[0].file_size  # open until it is closed itself


class Bytes(io.RawIOBase):
    """Bytes of a text file, unpacked where it is a gzip file or a zip archive, with bounded lines.

    `taken` counts the bytes since its reader last set it to 0.

    Args:
      path: the file.
      memory_gb: see `read_bars`.

    Raises:
      BarError: the file is not text, a line has no end, or it unpacks to more than is allowed.
      EndlessRow: too much was taken.
    """

    def __init__(self, path: Path, memory_gb: float):
        self._path, self._memory_gb, self._size = path, memory_gb, path.stat().st_size
        self._line, self._length, self.taken, self._total = 1, 0, 0, 0
        with contextlib.ExitStack() as stack:
            file: Any = stack.enter_context(open(path, "rb"))
            self._file = self._counted = file
            # The suffix may be wrong, so the first bytes decide.
            begin = file.peek(16)
            self._packed = begin.startswith((b"\x1f\x8b", ZIP))
            if begin.startswith(ZIP):
                self._file, self._size = _open_zipped(path)
                self._counted = stack.enter_context(self._file)
            elif self._packed:
                self._file = stack.enter_context(gzip.open(file))
            begin = self._file.peek(16)
            # Again, as these may be the unpacked bytes.
            markup = begin.lstrip().lower()
            for mark, (what, remedy) in NOT_TEXT.items():
                if begin.startswith(mark) or (mark[:1] in b"<{[" and markup.startswith(mark)):
                    raise refusal(path, Kind.D001, f"is {what}", remedy)
            self._files = stack.pop_all()

    @property
    def share(self) -> float:
        """The share of the file that was read; 1 of a packed one that has not shown it yet."""
        if self._packed and self._total < SHOWS:
            return 1.0
        return min(self._counted.tell() / max(self._size, 1), 1.0)

    def readable(self) -> bool:
        """Return True."""
        return True

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            self._files.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        """Read into `buffer` and return the number of bytes."""
        size = self._file.readinto(buffer)
        block = bytes(memoryview(buffer)[:size])
        if (at := block.find(0)) >= 0:
            line = self._line + block.count(b"\n", 0, at)
            say = f"line {line} holds a zero byte, as UTF-16 and binary files do"
            raise refusal(self._path, Kind.D001, say, "Save it as text in UTF-8")
        self._line += block.count(b"\n")
        # The last line of a block may continue in the next one.
        end = max(block.rfind(b"\n"), block.rfind(b"\r"))
        self._length = self._length + size if end < 0 else size - end - 1
        self.taken += size
        self._total += size
        if self._packed:
            text = self._total / self.share
            say = f"unpacks to about {text:,.0f} bytes of text, which"
            refuse_large(self._path, say, text * TEXT_BYTES, self._memory_gb)
        if self._length > LINE:
            say = f"line {self._line} has more than {LINE:,} bytes"
            raise refusal(self._path, Kind.D022, say, "Break it into lines")
        if self.taken > MOST_TEXT:
            raise EndlessRow(f"rows of more than {MOST_TEXT // CHUNK_ROWS:,} bytes")
        return size


def slices(frame: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Yield a frame in pieces."""
    rows = _rows(frame.shape[1])
    for begin in range(0, len(frame), rows):
        yield frame.iloc[begin : begin + rows]


def batches(source: Any) -> Iterator[pd.DataFrame]:
    """Yield what gives Arrow data in pieces: a table, a reader of batches, a frame of polars."""
    try:
        reader = pa.RecordBatchReader.from_stream(source)
    except pa.ArrowInvalid:
        say = "is a column and not a table"
        raise refusal(type(source).__name__, Kind.D001, say, "Give the table") from None
    for batch in reader:
        columns: dict[str, Any] = {}
        for field, column in zip(batch.schema, batch.columns, strict=True):
            if _is_category(field.type):  # Arrow finds no length of views, as polars gives
                texts = column.dictionary.cast(pa.large_string())
                column = pa.DictionaryArray.from_arrays(column.indices, texts)
            columns[field.name] = column if _is_flat(field.type) else pa.nulls(len(column))
        flat, size = pa.RecordBatch.from_pydict(columns), _rows(len(columns))
        for begin in range(0, len(flat), size):
            yield _frame(flat.slice(begin, size), type(source).__name__)


def tables(path: Path, request: Request) -> tuple[Iterator[pd.DataFrame], str, int]:
    """Return the pieces of a Parquet or Feather file or of a folder; its name and number of rows.

    A table that takes more memory than is allowed is refused, whatever it is packed to: a column
    that repeats a value is stored in a few bytes. The folders of a data set may name columns.
    """
    kind = "feather" if path.suffix in (".feather", ".arrow") else "parquet"
    hive = "hive" if path.is_dir() else None
    found: Any = path
    if hive:
        found = sorted(str(one) for end in PARQUET for one in path.rglob(f"[!._]*{end}"))
        if not found:
            say = f"is a folder without a file that ends in {' or '.join(PARQUET)}"
            raise refusal(path, Kind.D001, say)
    whole = pyarrow.dataset.dataset(found, format=kind, partitioning=hive)
    names = _symbols_of(path, found, whole.schema.names, request) if hive else {}
    rows, size, width, files = 0, 0, len(whole.schema.names), []
    for part in whole.get_fragments():
        keys = pyarrow.dataset.get_partition_keys(part.partition_expression)
        if {*part.physical_schema.names, *keys} != set(whole.schema.names):
            say = "its columns are not those of the folder's other files"
            raise refusal(part.path, Kind.D005, say, "Write them alike")
        flat = [field.name for field in part.physical_schema if _is_flat(field.type)]
        # Columns of lists and the like have no role, and are named as not used.
        keys |= {field.name: None for field in part.physical_schema if not _is_flat(field.type)}
        files.append((part.path if hive else str(path), flat, keys | names.get(part.path, {})))
        rows += part.count_rows()
        if kind == "parquet":
            groups = pyarrow.parquet.read_metadata(part.path)
            size += sum(groups.row_group(i).total_byte_size for i in range(groups.num_row_groups))
    refuse_large(path, f"{width:,} columns", width * COLUMN_BYTES, request.memory_gb)
    size = max(size, rows * width * 8, int(request.kept(rows)))
    refuse_large(path, f"{rows:,} rows of {width:,} columns", size, request.memory_gb)
    read = _feather if kind == "feather" else _parquet
    pieces = (
        _frame(batch, file).assign(**keys)
        for file, flat, keys in files
        for batch in read(file, flat)
    )
    return pieces, str(path), rows


def _symbols_of(
    folder: Path, files: list[str], columns: list[str], request: Request
) -> dict[str, dict[str, str]]:
    """Return the symbol of each file of a folder whose tables have none; {} of parts of one table.

    The first part of its path names it: SPY.parquet, SPY/2024.parquet. Names that differ in digits
    alone, such as part-0 and part-1 or 2023 and 2024, are parts of one table.
    """
    roles = {role_of(column) for column in columns} | set(request.columns)
    if "symbol" in roles or "close" not in roles:
        return {}
    names = {file: Path(file).relative_to(folder).parts[0] for file in files}
    names = {file: name.removesuffix(Path(file).suffix) for file, name in names.items()}
    if len({*names.values()}) > 1 and not request.symbols:
        bare = next((n for n in names.values() if n.isdigit() and not YEAR.fullmatch(n)), None)
        if bare is not None:
            say = f"file {bare} may be a symbol's or a part of one table"
            remedy = f"Name folders as in symbol={bare}, or pass {argument('symbol', 'NAME')}"
            raise refusal(folder, Kind.D005, say, remedy)
    if len({DIGITS.sub("", name) for name in names.values()}) < 2:
        return {}
    if all(name.startswith("part-") for name in names.values()):
        return {}
    return {file: {"symbol": name} for file, name in names.items()}


def _parquet(path: str, names: list[str]) -> Iterator[pa.RecordBatch]:
    """Read columns of a file in pieces; a fragment's own scan would hold a whole row group."""
    texts = [field.name for field in pyarrow.parquet.read_schema(path) if _is_text(field.type)]
    options: Any = {"read_dictionary": texts, "buffer_size": 1 << 20, "pre_buffer": False}
    with pyarrow.parquet.ParquetFile(path, **options) as file:
        yield from file.iter_batches(_rows(len(names)), columns=names, use_threads=False)


def read_numbers(content: bytes) -> pa.Table:
    """Read the columns of numbers and times of a table that this package wrote.

    Raises:
      ValueError: it is not Parquet, or would take far more memory than its bytes.
    """
    with pyarrow.parquet.ParquetFile(pa.BufferReader(content)) as file:
        head = file.metadata
        size = sum(head.row_group(i).total_byte_size for i in range(head.num_row_groups))
        refuse_packed(max(size, head.num_rows * head.num_columns * 8), len(content))
        names = [field.name for field in file.schema_arrow if pa.types.is_primitive(field.type)]
        # One thread: shards are read several at once.
        return file.read(names, use_threads=False)


def _feather(path: str, names: list[str]) -> Iterator[pa.RecordBatch]:
    """Read columns of a file, a batch at a time."""
    size = _rows(len(names))
    with pa.OSFile(path) as file, pyarrow.ipc.open_file(file) as batches:
        for i in range(batches.num_record_batches):
            batch = batches.get_batch(i)
            batch.validate(full=True)  # else offsets of a damaged file reach beyond its buffers
            batch = batch.select(names)
            yield from (batch.slice(begin, size) for begin in range(0, len(batch), size))


def _is_flat(kind: pa.DataType) -> bool:
    """Return whether a column has numbers, times or texts; other columns have no role."""
    types = pa.types
    flat = types.is_primitive(kind) or types.is_decimal(kind) or types.is_null(kind)
    return flat or types.is_dictionary(kind) or _is_text(kind)


def _is_category(kind: pa.DataType) -> bool:
    return pa.types.is_dictionary(kind) and _is_text(kind.value_type)


def _is_text(kind: pa.DataType) -> bool:
    texts = (pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary())
    return kind in (*texts, pa.binary_view())


def _frame(rows: pa.RecordBatch, path: str | Path) -> pd.DataFrame:
    """Return a piece whose texts were stored once each, unless they are too long as a whole."""
    columns, size = [], 0
    for column in rows.columns:
        if _is_category(column.type):
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
            raise refusal(path, Kind.D022, say, "Shorten it")
        columns.append(column)
    fields = [pa.field(name, c.type) for name, c in zip(rows.schema.names, columns, strict=True)]
    # The metadata say which column is the index, and how the columns' names are levels.
    schema = pa.schema(fields, rows.schema.metadata)
    return pa.RecordBatch.from_arrays(columns, schema=schema).to_pandas(use_threads=False)


def _rows(width: int) -> int:
    """Return the rows of a chunk of that many columns."""
    return max(CELLS // max(width, 1), FEW_ROWS)


def titled(frames: Iterator[pd.DataFrame], name: str, rows: int) -> Iterator[Chunk]:
    """Make chunks whose columns include the frames' index, if it is a time or a symbol."""
    begin = 0
    for each in frames:
        frame: Any = each
        if isinstance(frame.index, pd.PeriodIndex):  # a bar's time is its open
            frame = frame.set_axis(frame.index.to_timestamp())
        spans = [name for name, kind in frame.dtypes.items() if isinstance(kind, pd.PeriodDtype)]
        frame = frame.assign(**{name: frame[name].dt.to_timestamp() for name in spans})
        if isinstance(frame.index, pd.DatetimeIndex) and frame.index.name is None:
            frame = frame.rename_axis("time")
        named = [level for level in frame.index.names if role_of(level)]
        twice = next((level for level in named if level in frame.columns), None)
        if twice is not None:
            say = f"the index and a column are both called {twice!r}"
            raise refusal(name, Kind.D005, say, "Drop one of them")
        frame = frame.reset_index(drop=not named)
        frame.index = pd.RangeIndex(begin, begin + len(frame))
        begin += len(frame)
        yield Chunk(frame, name, "row", share=begin / max(rows, begin))
