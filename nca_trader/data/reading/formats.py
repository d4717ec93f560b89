"""Reads files and frames a chunk of rows at a time, so that memory stays bounded.

Delimited text shows its delimiter, header and decimal sign by its first lines; broken lines are
named. Parquet and Feather files are read a part of a row group or record batch at a time.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import itertools
import os
import re
import stat
import struct
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset
import pyarrow.ipc
import pyarrow.parquet

from nca_trader.cloud import CloudPath, fetched, place
from nca_trader.data.reading.faults import Code, Request, refusal, refuse_large
from nca_trader.errors import BarError, argument, printable
from nca_trader.progress import Progress
from nca_trader.types import PRICES

# "spread" alone is not an alias: vendors give it in points, in pips or in the price's unit.
ALIASES = {
    **dict.fromkeys(("time", "date", "datetime", "timestamp", "date_time", "open_time"), "time"),
    **dict.fromkeys(("symbol", "ticker", "asset", "instrument"), "symbol"),
    **dict.fromkeys(("volume", "vol"), "volume"),
    **{name: name for name in (*PRICES, "present", "half_spread")},
    **dict.fromkeys(("dividend", "dividends", "cash_dividend", "dividend_amount"), "cash_dividend"),
    **dict.fromkeys(("funding", "funding_rate"), "funding"),
    **dict.fromkeys(("bid", "bid_close"), "bid"),
    **dict.fromkeys(("ask", "ask_close"), "ask"),
}
MISSING = ("", "NA", "N/A", "#N/A", "NaN", "nan", "-NaN", "-nan", "null", "NULL", "None", "<NA>")
SAMPLE = 200  # lines that show the delimiter, the header and the decimal sign
DELIMITERS = ",;\t|"
VALUE = re.compile(r"[+-]?[.,]?\d[\d.,:/ TZ+-]*(?:[eE][+-]?\d+)?")
COMMA = re.compile(r"[+-]?\d*,\d+")
CHUNK_ROWS, CHUNK_TEXT = 1 << 16, 1 << 22  # rows and characters of a chunk, at most or about
LINE = 1 << 22  # bytes of a line, at most
# Bytes of memory that a column takes in addition to its cells, about, as it takes time.
COLUMN_BYTES = 1 << 19
FEW_ROWS = 1 << 9  # rows of a chunk where there are many columns: each takes time
MOST_TEXT = 32 * CHUNK_TEXT  # of a chunk at most: later lines may be longer than the first ones
SHOWS = 1 << 24  # unpacked bytes that show how much a packed file unpacks to
# A byte of unpacked text counts as so many of memory: 500 MiB of it take ten seconds to read.
TEXT_BYTES = 4
UNPACK, EXPORT = "Unpack it and give the file in it", "Save it as CSV or Parquet"
RECODE, TABLE = "Save it as UTF-8", "Save the table in it as CSV"
ZIP, ARROW = b"PK\x03\x04", b"ARROW1\0\0"
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
      short: lines that end early.
      share: of the file that was read up to here.
    """

    frame: pd.DataFrame
    name: str
    unit: str
    decimal: str = "."
    short: tuple[int, ...] = ()
    share: float = 1.0


class Layout(NamedTuple):
    """The layout of a delimited text.

    Attributes:
      delimiter: one character; " " is any white space.
      depth: lines of the header.
      names: of the columns.
      texts: columns that are text, by number.
      decimal: the decimal sign.
      chunk_rows: rows that are read at a time.
    """

    delimiter: str
    depth: int
    names: list[Any]
    texts: frozenset[int]
    decimal: str
    chunk_rows: int


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
            raise refusal(path, Code.D001, "is a spreadsheet", "Save the sheet as CSV")
        if len(files) != 1:
            say = f"is a zip archive of {len(files)} files ({names or 'none'})"
            raise refusal(path, Code.D001, say, UNPACK)
        if files[0].flag_bits & 1:
            raise refusal(path, Code.D001, f"has a password ({names})", UNPACK)
        # Python unpacks the other ways without a bound.
        if files[0].compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise refusal(path, Code.D001, f"is not packed by deflate ({names})", UNPACK)
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
                    raise refusal(path, Code.D001, f"is {what}", remedy)
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
            raise refusal(self._path, Code.D001, say, "Save it as text in UTF-8")
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
            raise refusal(self._path, Code.D022, say, "Break it into lines")
        if self.taken > MOST_TEXT:
            raise EndlessRow(f"rows of more than {MOST_TEXT // CHUNK_ROWS:,} bytes")
        return size


def canonical(column: object) -> str:
    """Return which of the columns of bars a name means, or "".

    >>> canonical("Open Time"), canonical("<VOL>"), canonical("comment")
    ('time', 'volume', '')
    """
    return ALIASES.get(str(column).strip().strip("<>").lower().replace(" ", "_"), "")


def load_csv(path: Path, request: Request) -> Iterator[Chunk]:
    """Read the rows of a delimited text in chunks.

    Raises:
      BarError: no names, or more fields than names.
    """
    layout = None
    try:
        layout = _layout(path, request)
        yield from _chunks(path, request, layout)
    except pd.errors.EmptyDataError:
        return
    except pd.errors.ParserError as error:
        if layout is None or "fields in line" not in str(error):
            raise
        width = len(layout.names)
        raise _too_wide(path, request, layout.delimiter, layout.depth, width) from error
    except UnicodeDecodeError as error:
        say = "is not UTF-8"
        with io.BufferedReader(Bytes(path, request.memory_gb)) as file:
            for number, line in enumerate(file, 1):
                try:
                    line.decode()
                except UnicodeDecodeError as at:
                    byte = line[at.start]
                    char = bytes([byte]).decode("cp1252" if byte < 0xA0 else "latin-1", "replace")
                    say = (
                        f"line {number} is not UTF-8: byte 0x{byte:02x} is {char!r} in Latin-1 or "
                    )
                    say += "Windows-1252"
                    break
        raise refusal(path, Code.D001, say, "Save it as UTF-8") from error
    except EndlessRow:
        if layout is not None:
            _field_counts(path, request, layout.delimiter)  # names the line where a quote is open
        raise


def _chunks(path: Path, request: Request, layout: Layout) -> Iterator[Chunk]:
    """Read the rows of a text whose layout is known, with options that leave nothing to guess."""
    columns = range(len(layout.names))
    options: dict[str, Any] = dict(
        sep=r"\s+" if layout.delimiter == " " else layout.delimiter,
        decimal=layout.decimal,
        header=None,
        names=columns,
        skiprows=layout.depth,
        low_memory=False,  # else a column's type depends on where pandas' own chunks end
        skip_blank_lines=False,  # keeps the line numbers true
        # A symbol is its text: pandas alone reads NA as missing and 007 as 7.
        dtype=dict.fromkeys(layout.texts, "str"),
        keep_default_na=False,
        na_values={i: MISSING for i in columns if i not in layout.texts},
        chunksize=layout.chunk_rows,
    )
    counts: np.ndarray | None = None
    source = Bytes(path, request.memory_gb)
    with _text(source) as file, pd.read_csv(file, **options) as chunks:
        for frame in chunks:
            source.taken = 0
            frame.index += layout.depth + 1
            values = frame.drop(columns=list(layout.texts))
            frame = frame[values.notna().any(axis=1)]  # without blank lines
            short: tuple[int, ...] = ()
            # Pandas silently fills lines up that end early, so fields are counted again.
            if len(layout.names) > 1 and frame.iloc[:, -1].isna().any():
                if counts is None:
                    counts = _field_counts(path, request, layout.delimiter)
                if len(counts) >= frame.index.max():
                    # With line ends in fields, lines and rows do not match.
                    lines = frame.index.to_numpy()
                    short = tuple(lines[counts[lines - 1] < frame.shape[1]])
            # An Index of objects: tuples would otherwise become levels.
            frame.columns = pd.Index(layout.names, dtype=object, tupleize_cols=False)
            yield Chunk(frame, str(path), "line", layout.decimal, short, source.share)


def _layout(path: Path, request: Request) -> Layout:
    """Find the layout from the first lines."""
    lines: list[str] = []
    with _text(Bytes(path, request.memory_gb)) as file:
        for line in file:
            if len(lines) >= SAMPLE or (len(lines) > 3 and sum(map(len, lines)) > LINE):
                break
            lines.append(line)
    top = lines[0] if lines else ","
    delimiter = max(DELIMITERS, key=top.count)
    if delimiter not in top:  # then the most frequent other sign; pandas takes only ASCII
        others = re.sub(r"[^!-~]|[\w.\"'+/:()<>-]", "", top)
        delimiter = max(others, key=others.count) if others else " "
    sample = [row for row in _fields(path, lines, delimiter) if row]
    if not sample:
        raise refusal(path, Code.D002, "there are no rows")
    depth = _header_depth(sample)
    names = _names(sample[:depth])
    width = max(map(len, sample[depth:]), default=len(names))
    if request.numbered:
        names = [*names, *(str(i + 1) for i in range(len(names), width))]
    elif not depth:
        remedy = f"Name the columns by number, e.g. {argument('columns', 'time=1,close=2')}"
        raise refusal(path, Code.D023, "line 1 holds values, not the columns' names", remedy)
    most = max(len(names), width)
    refuse_large(path, f"{most:,} columns", most * COLUMN_BYTES, request.memory_gb)
    if len(names) < width:
        raise _too_wide(path, request, delimiter, depth, len(names))
    text = set()
    for i, name in enumerate(names):
        level = name[-1] if isinstance(name, tuple) else name
        known = {str(name), str(i + 1)} & {*request.texts}
        if known or "symbol" in (canonical(name), canonical(level)):
            text.add(i)
    decimal = request.decimal or _decimal(path, sample[depth:], depth, delimiter)
    # Long rows come in smaller chunks, to bound the memory of one.
    size = sum(map(len, lines)) // len(lines) + 1
    fewest = min(FEW_ROWS, MOST_TEXT // 2 // size)
    chunk_rows = min(max(CHUNK_TEXT // size, fewest, 1), CHUNK_ROWS)
    return Layout(delimiter, depth, names, frozenset(text), decimal, chunk_rows)


def _text(source: Bytes) -> io.TextIOWrapper:
    """Decode bytes as UTF-8."""
    buffered = io.BufferedReader(source, 1 << 18)
    return io.TextIOWrapper(buffered, encoding="utf-8-sig", newline="")


def _fields(path: Path, lines: Iterable[str], delimiter: str) -> Iterator[list[str]]:
    """Yield the fields of each line.

    Raises:
      BarError: a field is longer than Python's csv takes.
    """
    rows, line = csv.reader(lines, delimiter=delimiter), 1
    try:
        for row in rows:
            yield row
            line = rows.line_num + 1
    except csv.Error as error:
        say = f"line {line}: a field has more than {csv.field_size_limit():,} characters"
        remedy = "Shorten it, or close the quote that is open"
        raise refusal(path, Code.D022, say, remedy) from error


def _is_value(field: str) -> bool:
    """Return whether a field is a number or a time, and so cannot be a column's name."""
    return VALUE.fullmatch(field.strip()) is not None


def _header_depth(rows: list[list[str]]) -> int:
    """Return how many first rows hold names: 0 or 1, or 2 and 3 where symbols have a row."""
    if any(map(_is_value, rows[0])) and "time" not in map(canonical, rows[0]):
        return 0
    if len(rows) < 2 or any(map(_is_value, rows[1])):
        return 1
    # In a header of two levels one row holds the fields and the other the symbols.
    if ("close" in map(canonical, rows[0])) == ("close" in map(canonical, rows[1])):
        return 1
    # Every column but the time needs a name at both levels.
    if len(rows[1]) != len(rows[0]) or any(not field.strip() for field in rows[1][1:]):
        return 1
    # Pandas puts the index's name into a row of its own.
    return 3 if len(rows) > 2 and rows[2][0].strip() and not any(rows[2][1:]) else 2


def _names(rows: list[list[str]]) -> list[Any]:
    """Return the columns' names; those of two levels are pairs, but for the first, the time."""
    if not rows:
        return []
    if len(rows) == 1:
        return [field.strip() for field in rows[0]]
    first = next((row[0] for row in reversed(rows) if canonical(row[0]) == "time"), "time")
    upper = itertools.accumulate(rows[0][1:], lambda last, field: field.strip() or last)
    return [first, *zip(upper, map(str.strip, rows[1][1:]), strict=True)]


def _decimal(path: Path, rows: list[list[str]], depth: int, delimiter: str) -> str:
    """Return the decimal sign: "," where a number has one that cannot separate thousands.

    Raises:
      BarError: every comma may be either.
    """
    if delimiter == ",":
        return "."  # a number in quotes with a comma becomes a fault of its row
    commas = [(i, f) for i, row in enumerate(rows) for f in row if COMMA.fullmatch(f.strip())]
    if not commas:
        return "."
    if any(not re.fullmatch(r"[+-]?[1-9]\d{0,2},\d{3}", field.strip()) for _, field in commas):
        return ","
    row, field = commas[0]
    say = f"line {row + depth + 1}: {field!r} may have a decimal comma or one between thousands"
    remedy = f"Pass {argument('decimal', ',')}, or remove the commas between thousands"
    raise refusal(path, Code.D018, say, remedy)


def _field_counts(path: Path, request: Request, delimiter: str) -> np.ndarray:
    """Return the number of fields of each line, 0 for a blank one."""
    with _text(source := Bytes(path, request.memory_gb)) as file:

        def size(row: list[str]) -> int:
            # The row has ended, so its text is not endless.
            source.taken = 0
            return len(row)

        rows = map(str.split, file) if delimiter == " " else _fields(path, file, delimiter)
        return np.fromiter(map(size, rows), dtype=np.int32)


def _too_wide(path: Path, request: Request, delimiter: str, depth: int, width: int) -> BarError:
    """Return the error that names the first line with more fields than names."""
    counts = _field_counts(path, request, delimiter)
    wide = [(line, count) for line, count in enumerate(counts, 1) if count > width]
    line, count = wide[0]
    more = f" and {len(wide) - 1:,} more" if len(wide) > 1 else ""
    if len(wide) > 1 and len(wide) > (len(counts) - depth) / 2:
        what = "so every column would shift"
        remedy = "Name every field, or the columns by number, e.g. "
        remedy += f"{argument('columns', 'time=1,close=5')} (or time=1+2 of date and clock)"
    else:
        what, remedy = "so the columns are not certain", "Correct the line"
    names = f"the header's {width} names" if depth else f"line 1's {width} fields"
    say = f"line {line}{more}: {count} fields, more than {names}, {what}"
    return refusal(path, Code.D022, say, remedy)


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
    """Return the pieces of a file; its name, and its number of rows."""
    with pa.OSFile(str(path)) as file:
        if file.read(len(ARROW)) != ARROW:
            raise refusal(path, Code.D001, "is not Arrow or Feather of version 2", EXPORT)
        messages = list(map(_unpacked, pyarrow.ipc.MessageReader.open_stream(file)))
        file.seek(len(ARROW))
        width = len(pyarrow.ipc.open_stream(file).schema.names)
    refuse_large(path, f"{width:,} columns", width * COLUMN_BYTES, request.memory_gb)
    rows, size = (sum(part) for part in zip(*messages, strict=True))
    # A batch is unpacked as a whole, and some writers make one of the whole table.
    size = max(size, request.kept(rows) + max(part for _, part in messages))
    refuse_large(path, f"{rows:,} rows of {width:,} columns", size, request.memory_gb)

    def pieces() -> Iterator[pd.DataFrame]:
        # Pages of a memory map would stay in memory together with the bars.
        with pa.OSFile(str(path)) as file:
            file.seek(len(ARROW))  # as a stream, whose messages are those that were counted
            options = pyarrow.ipc.IpcReadOptions(use_threads=False)
            for batch in pyarrow.ipc.open_stream(file, options=options):
                batch.validate(full=True)  # else offsets of a damaged file reach beyond its buffers
                batch = batch.select([f.name for f in batch.schema if _is_flat(f.type)])
                for begin in range(0, len(batch), _rows(width)):
                    yield _frame(batch.slice(begin, _rows(width)), path)

    return pieces(), str(path), rows


def _unpacked(message: Any) -> tuple[int, int]:
    """Return the rows and the unpacked bytes of a message of Arrow, as its own header says.

    Source: Message.fbs of the format; Arrow takes as much memory before it unpacks anything.
    """
    head = memoryview(message.metadata)

    def at(table: int, number: int) -> int:  # of a field of a flatbuffers table; 0 if there is none
        fields = table - struct.unpack_from("<i", head, table)[0]
        if 4 + 2 * number >= struct.unpack_from("<H", head, fields)[0]:
            return 0
        offset = struct.unpack_from("<H", head, fields + 4 + 2 * number)[0]
        return table + offset if offset else 0

    def follow(place: int) -> int:
        return place + struct.unpack_from("<I", head, place)[0]

    if message.type not in ("record batch", "dictionary"):
        return 0, 0
    table = follow(at(follow(0), 2))
    if message.type == "dictionary":
        table = follow(at(table, 1))
    buffers, size, body = follow(at(table, 2)), 0, memoryview(message.body)
    for k in range(struct.unpack_from("<I", head, buffers)[0]):
        offset, length = struct.unpack_from("<qq", head, buffers + 4 + 16 * k)
        if at(table, 3) and length:  # packed: its size comes first, -1 where it is not packed
            length = max(length, struct.unpack_from("<q", body, offset)[0])
        size += length
    rows = struct.unpack_from("<q", head, at(table, 0))[0] if at(table, 0) else 0
    return rows if message.type == "record batch" else 0, size


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
        named = [level for level in frame.index.names if canonical(level)]
        twice = next((level for level in named if level in frame.columns), None)
        if twice is not None:
            say = f"the index and a column are both called {twice!r}"
            raise refusal(name, Code.D005, say, "Drop one of them")
        frame = frame.reset_index(drop=not named)
        frame.index = pd.RangeIndex(begin, begin + len(frame))
        begin += len(frame)
        yield Chunk(frame, name, "row", share=begin / max(rows, begin))
