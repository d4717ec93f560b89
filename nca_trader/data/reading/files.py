"""Loads files and frames in chunks of rows, so that memory stays bounded.

The first lines of a delimited text show the format of all its rows. A Parquet file is read a part
of a row group at a time, a Feather file a batch.
"""

from __future__ import annotations

import collections
import contextlib
import csv
import gzip
import io
import itertools
import re
import stat
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset
import pyarrow.ipc
import pyarrow.parquet

from nca_trader.cloud import CloudPath, Place, fetched
from nca_trader.config.reading import named_pair, plain, role_of
from nca_trader.data.reading.faults import Kind, Request, refusal
from nca_trader.errors import BarError, ConfigError, StoreError, argument, printable
from nca_trader.machine import refuse_packed
from nca_trader.progress import Progress
from nca_trader.types import Bars

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
MISSING = (
    *("", "NA", "N/A", "n/a", "#N/A", "#N/A N/A", "NaN", "nan", "-NaN", "-nan"),
    *("null", "NULL", "None", "<NA>"),
)
SAMPLE = 200  # lines that show the delimiter, the header and the decimal sign
DELIMITERS = ",;\t|"
BY_NUMBER = "time=1,open=2,high=3,low=4,close=5,volume=6"  # as most files without names are
CODE = re.compile(r"0\d+")
VALUE = re.compile(r"[+-]?[.,]?\d[\d.,:/ TZ+-]*(?:[eE][+-]?\d+)?")
NUMBER = re.compile(r"[+-]?[$€£¥]? ?([\d.,]*\d) ?[KMBkmb%]?")
BETWEEN = re.compile("(?<=\\d)['\u00a0\u202f](?=\\d{3})")  # signs that part thousands alone
# By threes, 1,234,567, or as in India by twos until the last three, 12,34,567.
GROUPS = re.compile(
    r"[1-9]\d{0,2}(?:([.,])\d{3})(?:\1\d{3})*(?:[.,]\d+)?"
    r"|[1-9]\d?(?:([.,])\d\d)(?:\2\d\d)*\2\d{3}(?:[.,]\d+)?"
)
# "1,234" may be either: a decimal sign, or one between thousands.
THOUSANDS = re.compile(r"[1-9]\d{0,2}[.,]\d{3}")


@runtime_checkable
class ArrowStream(Protocol):
    """A table in memory that gives Arrow data: of pyarrow, polars, duckdb and others."""

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        """Return the stream, of Arrow's PyCapsule interface."""
        ...


Frame = pd.DataFrame | ArrowStream


class Chunk(NamedTuple):
    """Some rows of a file or a frame, as they were found.

    Attributes:
      frame: its index is what a reader counts: lines from 1 (the header's) or rows from 0.
      unit: "line" or "row".
      decimal: the sign of texts that are numbers.
      proved: whether numbers or the user show that sign, so that the other parts thousands.
      short: lines that end early.
      share: of the file that was read up to here.
    """

    frame: pd.DataFrame
    unit: str
    decimal: str = "."
    proved: bool = False
    short: tuple[int, ...] = ()
    share: float = 1.0


class TextFormat(NamedTuple):
    """The format of a delimited text.

    Attributes:
      delimiter: one character; " " is any white space.
      above: lines above the header.
      depth: lines of the header.
      names: of the columns.
      texts: columns that are text, by number.
      decimal, proved: as in `Chunk`.
      chunk_rows: rows that are read at a time.
    """

    delimiter: str
    above: int
    depth: int
    names: list[Any]
    texts: frozenset[int]
    decimal: str
    proved: bool
    chunk_rows: int


class EndlessRow(ValueError):
    """Rows with too much text for a chunk: a quote is open, or lines grow without bound."""


def name_source(source: Place | Frame | Bars) -> str:
    """Return what messages call a file, a frame or bars."""
    if isinstance(source, Bars):
        return source.source or "bars"
    if isinstance(source, pd.DataFrame):
        return "DataFrame"
    return type(source).__name__ if isinstance(source, ArrowStream) else str(source)


def load(source: Place | Frame, request: Request) -> Iterator[Chunk]:
    """Read a file or a frame in chunks of rows, so that memory stays bounded.

    Args:
      source: the file, or its URL in an object store, or the frame.
      request: the source's name for messages, columns that hold texts or are asked for by number,
        the decimal sign, and the memory that reading may take.

    Raises:
      BarError: there is no table, or it unpacks to more than is allowed.
    """
    if isinstance(source, Frame):
        refuse_header(request, "a frame")
        whole = isinstance(source, pd.DataFrame)
        frames, rows = (slices(source), len(source)) if whole else (batches(source, request), 0)
        yield from label(frames, rows, request)
        return
    path = copy = source
    try:
        # Messages give the URL, and not the name of the copy.
        copy = fetched(path) if isinstance(path, CloudPath) else path
        binary = copy.is_dir() or copy.suffix in (*PARQUET, ".feather", ".arrow")
        size, done = _size(copy, request), 0
        if binary:
            refuse_header(request, request.name)
        chunks = label(*tables(copy, request), request) if binary else load_csv(copy, request)
        with Progress(size, f"read {copy.name}", "bytes") as shown:
            for chunk in chunks:
                yield chunk
                # Arrow keeps what it freed, which would add up to more than the bars.
                pa.default_memory_pool().release_unused()
                read = round(chunk.share * size)
                shown.update(read - done)
                done = read
        pa.default_memory_pool().release_unused()
    except FileNotFoundError as error:
        url = isinstance(path, CloudPath)
        what, remedy = ("object", "Check the URL") if url else ("file", "Check the path")
        raise refusal(request.name, Kind.D001, f"no such {what}", remedy) from error
    except (BarError, ConfigError, StoreError):  # of a store: no such bucket, or out of reach
        raise
    except MemoryError as error:
        raise refusal(request.name, Kind.D001, "takes more memory than there is") from error
    except Exception as error:
        # On a damaged file pandas, pyarrow and zlib raise anything, including KeyError.
        what = getattr(error, "strerror", None) or str(error).strip().partition("\n")[0]
        what = what.replace(str(copy), request.name).rstrip(".")
        raise refusal(request.name, Kind.D001, f"can't be read ({what})") from error


def refuse_header(request: Request, what: str) -> None:
    """Refuse the line of a header for what names its columns itself."""
    if request.header is not None:
        raise BarError(f"{argument('header')} is of a CSV; leave it out with {what}.")


def _size(path: Path, request: Request) -> int:
    """Return the bytes of a file.

    Raises:
      BarError: it is empty, or a pipe or a device: these cannot be read twice, which finding the
        format needs.
    """
    about = path.stat()
    if not (stat.S_ISREG(about.st_mode) or stat.S_ISDIR(about.st_mode)):
        kind = "a pipe" if stat.S_ISFIFO(about.st_mode) else "a device"
        remedy = "Save what it gives to a file"
        raise refusal(request.name, Kind.D001, f"is {kind} and not a file", remedy)
    if about.st_size == 0:
        raise refusal(request.name, Kind.D002, "the file is empty")
    return about.st_size


def label(frames: Iterator[pd.DataFrame], rows: int, request: Request) -> Iterator[Chunk]:
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
            raise refusal(request.name, Kind.D005, say, "Drop one of them")
        frame = frame.reset_index(drop=not named)
        frame.index = pd.RangeIndex(begin, begin + len(frame))
        begin += len(frame)
        yield Chunk(frame, "row", share=begin / max(rows, begin))


def slices(frame: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Yield a frame in pieces."""
    rows = _rows(frame.shape[1])
    for begin in range(0, len(frame), rows):
        yield frame.iloc[begin : begin + rows]


def batches(source: Any, request: Request) -> Iterator[pd.DataFrame]:
    """Yield what gives Arrow data in pieces: a table, a reader of batches, a frame of polars."""
    try:
        reader = pa.RecordBatchReader.from_stream(source)
    except pa.ArrowInvalid:
        say = "is a column and not a table"
        raise refusal(request.name, Kind.D001, say, "Give the table") from None
    for batch in reader:
        columns: dict[str, Any] = {}
        for field, column in zip(batch.schema, batch.columns, strict=True):
            if _is_category(field.type):  # Arrow finds no length of views, as polars gives
                texts = column.dictionary.cast(pa.large_string())
                column = pa.DictionaryArray.from_arrays(column.indices, texts)
            columns[field.name] = column if _is_flat(field.type) else pa.nulls(len(column))
        flat, size = pa.RecordBatch.from_pydict(columns), _rows(len(columns))
        for begin in range(0, len(flat), size):
            yield _frame(flat.slice(begin, size), request)


def load_csv(path: Path, request: Request) -> Iterator[Chunk]:
    """Read the rows of a delimited text in chunks.

    Raises:
      BarError: no names, or more fields than names.
    """
    form = None
    try:
        form = _format(path, request)
        yield from _chunks(path, request, form)
    except pd.errors.EmptyDataError:
        return
    except pd.errors.ParserError as error:
        if form is None or "fields in line" not in str(error):
            raise
        raise _too_wide(path, request, form) from error
    except UnicodeDecodeError as error:
        raise _not_utf8(path, request) from error
    except EndlessRow:
        if form is not None:
            _field_counts(path, request, form)  # names the line where a quote is open
        raise


def _not_utf8(path: Path, request: Request) -> BarError:
    """Return the error that names the first line that is not UTF-8."""
    say = "is not UTF-8"
    with io.BufferedReader(Bytes(path, request)) as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                say = f"line {number} is not UTF-8"
                break
    return refusal(request.name, Kind.D001, say, "Save it as UTF-8")


def _chunks(path: Path, request: Request, form: TextFormat) -> Iterator[Chunk]:
    """Read the rows of a text whose format is known, with options that leave nothing to guess."""
    columns = range(len(form.names))
    begin = form.above + form.depth
    options: dict[str, Any] = dict(
        sep=r"\s+" if form.delimiter == " " else form.delimiter,
        decimal=form.decimal,
        header=None,
        names=columns,
        skiprows=begin,
        low_memory=False,  # else a column's type depends on where pandas' own chunks end
        skip_blank_lines=False,  # keeps the line numbers true
        # A symbol is its text: pandas alone reads NA as missing and 007 as 7.
        dtype=dict.fromkeys(form.texts, "str"),
        keep_default_na=False,
        na_values={i: MISSING for i in columns if i not in form.texts},
        chunksize=form.chunk_rows,
    )
    counts: np.ndarray | None = None
    source = Bytes(path, request)
    with _text(source) as file, pd.read_csv(file, **options) as chunks:
        for frame in chunks:
            source.taken = 0
            frame.index += begin + 1
            texts = list(form.texts)
            blank = frame.drop(columns=texts).isna().all(axis=1)
            if blank.any():
                blank[blank] = frame.loc[blank, texts].fillna("").eq("").all(axis=1)
            frame = frame[~blank]
            short: tuple[int, ...] = ()
            # Pandas silently fills lines up that end early, so fields are counted again.
            if len(form.names) > 1 and frame.iloc[:, -1].isna().any():
                if counts is None:
                    counts = _field_counts(path, request, form)
                if len(counts) >= frame.index.max():
                    # With line ends in fields, lines and rows do not match.
                    lines = frame.index.to_numpy()
                    short = tuple(lines[counts[lines - 1] < frame.shape[1]])
            # An Index of objects: tuples would otherwise become levels.
            frame.columns = pd.Index(form.names, dtype=object, tupleize_cols=False)
            yield Chunk(frame, "line", form.decimal, form.proved, short, source.share)


def _format(path: Path, request: Request) -> TextFormat:
    """Find the format from the first lines."""
    lines: list[str] = []
    with _text(Bytes(path, request)) as file:
        for line in file:
            if len(lines) >= SAMPLE or (len(lines) > 3 and sum(map(len, lines)) > LINE):
                break
            lines.append(line)
    above = (request.header or 1) - 1
    if request.header is not None and above >= len(lines):
        say = f"{argument('header', request.header)} is not among the first {len(lines)} lines"
        raise refusal(request.name, Kind.D023, say, "Give the line that holds the columns' names")
    delimiter, sample = _sample(lines[above:], request)
    depth = max(_header_depth(sample), request.header is not None)
    if request.header is None and depth < 2 and (above := _lines_above(lines, request)):
        delimiter, sample = _sample(lines[above:], request)
        depth = _header_depth(sample)
    names = _names(sample[:depth])
    width = max(map(len, sample[depth:]), default=len(names))
    if request.numbered:
        names = [*names, *(str(i + 1) for i in range(len(names), width))]
    elif not depth:
        remedy = f"Name the columns by number, e.g. {argument('columns', BY_NUMBER)}"
        raise refusal(
            request.name, Kind.D023, "line 1 holds values, not the columns' names", remedy
        )
    most = max(len(names), width)
    request.refuse_large(f"{most:,} columns", most * COLUMN_BYTES)
    decimal, proved = _decimal(sample[depth:], above + depth, delimiter, request)
    # Long rows come in smaller chunks, to bound the memory of one.
    size = sum(map(len, lines)) // len(lines) + 1
    fewest = min(FEW_ROWS, MOST_TEXT // 2 // size)
    chunk_rows = min(max(CHUNK_TEXT // size, fewest, 1), CHUNK_ROWS)
    texts = _texts(names, request, sample[depth:])
    form = TextFormat(delimiter, above, depth, names, texts, decimal, proved, chunk_rows)
    if len(names) < width:
        raise _too_wide(path, request, form)
    return form


def _texts(names: list[Any], request: Request, rows: list[list[str]]) -> frozenset[int]:
    """Return the columns that are text: symbols, codes, and dates and clocks of a time in two."""
    last = [name[-1] if isinstance(name, tuple) else name for name in names]
    two = {"date", "time"} <= set(map(plain, last))
    return frozenset(
        i
        for i, name in enumerate(names)
        if {str(name), str(i + 1)} & {*request.texts}
        or (not role_of(name) and any(CODE.fullmatch(row[i].strip()) for row in rows if row[i:]))
        or "symbol" in (role_of(name), role_of(last[i]))
        or (two and plain(last[i]) in ("date", "time"))
    )


def _text(source: Bytes) -> io.TextIOWrapper:
    """Decode bytes as UTF-8."""
    buffered = io.BufferedReader(source, 1 << 18)
    return io.TextIOWrapper(buffered, encoding="utf-8-sig", newline="")


def _fields(lines: Iterable[str], delimiter: str, request: Request) -> Iterator[list[str]]:
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
        raise refusal(request.name, Kind.D022, say, remedy) from error


def _sample(lines: list[str], request: Request) -> tuple[str, list[list[str]]]:
    """Return the delimiter, as the first line shows it, and the fields of the lines."""
    top = lines[0] if lines else ","
    delimiter = max(DELIMITERS, key=top.count)
    if delimiter not in top:  # then the most frequent other sign; pandas takes only ASCII
        others = re.sub(r"[^!-~]|[\w.\"'+/:()<>-]", "", top)
        delimiter = max(others, key=others.count) if others else " "
    sample = [row for row in _fields(lines, delimiter, request) if row]
    if not sample:
        raise refusal(request.name, Kind.D002, "there are no rows")
    return delimiter, sample


def _lines_above(lines: list[str], request: Request) -> int:
    """Return the number of lines above the header.

    The header is the first line that names a time and a price, or all columns that were asked for
    by name. Without one it is the first line of names without an empty cell, under lines that have
    one.
    """
    asked = {part.strip().lower() for text in request.columns.values() for part in text.split("+")}
    asked = {name for name in asked if not re.fullmatch(r"[-*]|\d+|.*/.*", name)}
    for i, line in enumerate(lines):
        names = [name.strip().strip('"') for name in re.split(f"[{DELIMITERS}]", line)]
        roles = {role_of(name) or (named_pair(name) or ("", ""))[1] for name in names}
        if "time" in roles and len(roles - {"", "time", "symbol"}) > 0:
            return i
        if asked and asked <= {name.lower() for name in names}:
            return i
    delimiter = max(DELIMITERS, key="".join(lines).count)
    rows = [[cell.strip() for cell in row] for row in csv.reader(lines, delimiter=delimiter)]
    width = max(map(len, rows), default=0)
    full = [i for i, row in enumerate(rows) if len(row) == width and all(row)]
    first = full[0] if full and width > 1 else 0
    return 0 if any(map(VALUE.fullmatch, rows[first])) else first


def _header_depth(rows: list[list[str]]) -> int:
    """Return how many first rows hold names: 0 or 1, or 2 and 3 where symbols have a row."""

    def has_values(row: list[str]) -> bool:
        return any(VALUE.fullmatch(field.strip()) for field in row)

    if has_values(rows[0]) and "time" not in map(role_of, rows[0]):
        return 0
    if len(rows) < 2 or has_values(rows[1]):
        return 1
    # In a header of two levels one row holds the fields and the other the symbols.
    if ("close" in map(role_of, rows[0])) == ("close" in map(role_of, rows[1])):
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
    first = next((row[0] for row in reversed(rows) if role_of(row[0]) == "time"), "time")
    upper = itertools.accumulate(rows[0][1:], lambda last, field: field.strip() or last)
    return [first, *zip(upper, map(str.strip, rows[1][1:]), strict=True)]


def _decimal(
    rows: list[list[str]], above: int, delimiter: str, request: Request
) -> tuple[str, bool]:
    """Return the decimal sign, and whether it is given or some number shows it.

    Raises:
      BarError: every comma may be one between thousands.
    """
    if request.decimal is not None:
        return request.decimal, True
    shown: collections.Counter[str] = collections.Counter()
    unclear: list[tuple[int, str]] = []
    for i, row in enumerate(rows, above + 1):
        for field in row:
            number = NUMBER.fullmatch(BETWEEN.sub("", field.strip()))
            signs = re.findall("[.,]", number[1]) if number else []
            if not number or not signs:
                continue
            groups = GROUPS.fullmatch(number[1])
            if len(set(signs)) == 2 and groups and signs.count(signs[-1]) == 1:
                shown[signs[-1]] += 1  # 1,234.5
            elif len(signs) > 1:
                shown[{",": ".", ".": ","}[signs[0]]] += bool(groups)  # 1,234,567
            elif THOUSANDS.fullmatch(number[1]):
                unclear += [(i, field)] if signs == [","] else []
            else:
                shown[signs[0]] += 1
    if shown["."] or shown[","]:
        comma = shown[","] > shown["."] or (shown[","] > 0 and delimiter != ",")
        return ("," if comma else "."), True
    if not unclear:
        return ".", False
    line, field = unclear[0]
    say = f"line {line}: {field!r} may have a decimal comma or one between thousands"
    ways = " or ".join(argument("decimal", sign) for sign in ",.")
    remedy = f"Pass {ways}, by which it parts thousands"
    raise refusal(request.name, Kind.D018, say, remedy)


def _field_counts(path: Path, request: Request, form: TextFormat) -> np.ndarray:
    """Return the number of fields of each line; 0 for a blank one and those above the header."""
    with _text(source := Bytes(path, request)) as file:

        def size(row: list[str]) -> int:
            # The row has ended, so its text is not endless.
            source.taken = 0
            return len(row)

        for _ in range(form.above):
            next(file)
        split = form.delimiter == " "
        rows = map(str.split, file) if split else _fields(file, form.delimiter, request)
        counts = np.fromiter(map(size, rows), dtype=np.int32)
    return np.append(np.zeros(form.above, np.int32), counts)


def _too_wide(path: Path, request: Request, form: TextFormat) -> BarError:
    """Return the error that names the first line with more fields than names."""
    counts, width = _field_counts(path, request, form), len(form.names)
    wide = [(line, count) for line, count in enumerate(counts, 1) if count > width]
    line, count = wide[0]
    more = f" and {len(wide) - 1:,} more" if len(wide) > 1 else ""
    what, remedy = "so the columns are not certain", "Correct the line"
    if len(wide) > 1 and len(wide) > (len(counts) - form.depth) / 2:
        what = "so every column would shift"
        remedy = (
            f"Name every field, or the columns by number, e.g. {argument('columns', BY_NUMBER)}"
        )
    names = f"the header's {width} names" if form.depth else f"line 1's {width} fields"
    say = f"line {line}{more}: {count} fields, more than {names}, {what}"
    return refusal(request.name, Kind.D022, say, remedy)


class Bytes(io.RawIOBase):
    """Bytes of a text file, unpacked where it is a gzip file or a zip archive, with bounded lines.

    `taken` counts the bytes since its reader last set it to 0.

    Args:
      path: the file.
      request: its name for messages, and the memory that reading may take.

    Raises:
      BarError: the file is not text, a line has no end, or it unpacks to more than is allowed.
      EndlessRow: too much was taken.
    """

    def __init__(self, path: Path, request: Request):
        self._request, self._size = request, path.stat().st_size
        self._line, self._length, self.taken, self._total = 1, 0, 0, 0
        self._files = contextlib.ExitStack()  # for `close`, also of a file that is refused below
        with contextlib.ExitStack() as stack:
            file: Any = stack.enter_context(open(path, "rb"))
            self._file = self._counted = file
            # The suffix may be wrong, so the first bytes decide.
            begin = file.peek(16)
            self._packed = begin.startswith((b"\x1f\x8b", ZIP))
            if begin.startswith(ZIP):
                self._file, self._size = _open_zipped(path, request)
                self._counted = stack.enter_context(self._file)
            elif self._packed:
                self._file = stack.enter_context(gzip.open(file))
            begin = self._file.peek(16)
            # Again, as these may be the unpacked bytes.
            markup = begin.lstrip().lower()
            for mark, (what, remedy) in NOT_TEXT.items():
                if begin.startswith(mark) or (mark[:1] in b"<{[" and markup.startswith(mark)):
                    raise refusal(request.name, Kind.D001, f"is {what}", remedy)
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
            raise refusal(self._request.name, Kind.D001, say, "Save it as text in UTF-8")
        self._line += block.count(b"\n")
        # The last line of a block may continue in the next one.
        end = max(block.rfind(b"\n"), block.rfind(b"\r"))
        self._length = self._length + size if end < 0 else size - end - 1
        self.taken += size
        self._total += size
        if self._packed:
            text = self._total / self.share
            say = f"unpacks to about {text:,.0f} bytes of text, which"
            self._request.refuse_large(say, text * TEXT_BYTES)
        if self._length > LINE:
            say = f"line {self._line} has more than {LINE:,} bytes"
            raise refusal(self._request.name, Kind.D022, say, "Break it into lines")
        if self.taken > MOST_TEXT:
            raise EndlessRow(f"rows of more than {MOST_TEXT // CHUNK_ROWS:,} bytes")
        return size


def _open_zipped(path: Path, request: Request) -> tuple[Any, int]:
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
            raise refusal(request.name, Kind.D001, "is a spreadsheet", "Save the sheet as CSV")
        if len(files) != 1:
            say = f"is a zip archive of {len(files)} files ({names or 'none'})"
            raise refusal(request.name, Kind.D001, say, UNPACK)
        if files[0].flag_bits & 1:
            raise refusal(request.name, Kind.D001, f"has a password ({names})", UNPACK)
        # Python unpacks the other ways without a bound.
        if files[0].compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise refusal(request.name, Kind.D001, f"is not packed by deflate ({names})", UNPACK)
        return archive.open(files[0]), files[0].file_size  # open until it is closed itself


def tables(path: Path, request: Request) -> tuple[Iterator[pd.DataFrame], int]:
    """Return the pieces of a Parquet or Feather file or of a folder; its number of rows.

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
            raise refusal(request.name, Kind.D001, say)
    whole = pyarrow.dataset.dataset(found, format=kind, partitioning=hive)
    names = _symbols_of(path, found, whole.schema.names, request) if hive else {}
    rows, size, width, files = 0, 0, len(whole.schema.names), []
    for part in whole.get_fragments():
        keys = pyarrow.dataset.get_partition_keys(part.partition_expression)
        if {*part.physical_schema.names, *keys} != set(whole.schema.names):
            say = "its columns are not those of the folder's other files"
            name = part.path.replace(str(path), request.name)
            raise refusal(name, Kind.D005, say, "Write them alike")
        flat = [field.name for field in part.physical_schema if _is_flat(field.type)]
        # Columns of lists and the like have no role, and are named as not used.
        keys |= {field.name: None for field in part.physical_schema if not _is_flat(field.type)}
        files.append((part.path if hive else str(path), flat, keys | names.get(part.path, {})))
        rows += part.count_rows()
        if kind == "parquet":
            groups = pyarrow.parquet.read_metadata(part.path)
            size += sum(groups.row_group(i).total_byte_size for i in range(groups.num_row_groups))
    request.refuse_large(f"{width:,} columns", width * COLUMN_BYTES)
    size = max(size, rows * width * 8, int(request.kept(rows)))
    request.refuse_large(f"{rows:,} rows of {width:,} columns", size)
    read = _feather if kind == "feather" else _parquet
    pieces = (
        _frame(batch, request).assign(**keys)
        for file, flat, keys in files
        for batch in read(file, flat)
    )
    return pieces, rows


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
            raise refusal(request.name, Kind.D005, say, remedy)
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


def _feather(path: str, names: list[str]) -> Iterator[pa.RecordBatch]:
    """Read columns of a file, a batch at a time."""
    size = _rows(len(names))
    with pa.OSFile(path) as file, pyarrow.ipc.open_file(file) as batches:
        for i in range(batches.num_record_batches):
            batch = batches.get_batch(i)
            batch.validate(full=True)  # else offsets of a damaged file reach beyond its buffers
            batch = batch.select(names)
            yield from (batch.slice(begin, size) for begin in range(0, len(batch), size))


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


def _frame(rows: pa.RecordBatch, request: Request) -> pd.DataFrame:
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
            raise refusal(request.name, Kind.D022, say, "Shorten it")
        columns.append(column)
    fields = [pa.field(name, c.type) for name, c in zip(rows.schema.names, columns, strict=True)]
    # The metadata say which column is the index, and how the columns' names are levels.
    schema = pa.schema(fields, rows.schema.metadata)
    return pa.RecordBatch.from_arrays(columns, schema=schema).to_pandas(use_threads=False)


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


def _rows(width: int) -> int:
    """Return the rows of a chunk of that many columns."""
    return max(CELLS // max(width, 1), FEW_ROWS)
