"""Loads files and frames; the first lines of a delimited text show the format of all its rows."""

from __future__ import annotations

import collections
import csv
import io
import itertools
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import pandas as pd
import pyarrow as pa

from nca_trader.cloud import CloudPath, fetched, place
from nca_trader.config.reading import named_pair, plain, role_of
from nca_trader.data.reading import files
from nca_trader.data.reading.faults import Kind, Request, refusal, refuse_large
from nca_trader.data.reading.files import Bytes, Chunk, EndlessRow, slices, tables, titled
from nca_trader.errors import BarError, ConfigError, StoreError, argument
from nca_trader.progress import Progress

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


def load(source: str | os.PathLike[str] | CloudPath | Frame, request: Request) -> Iterator[Chunk]:
    """Read a file or a frame in chunks of rows, so that memory stays bounded.

    Args:
      source: the file, or its URL in an object store, or the frame.
      request: columns that hold texts or are asked for by number, the decimal sign, and the memory
        that reading may take.

    Raises:
      BarError: there is no table, or it unpacks to more than is allowed.
    """
    if isinstance(source, Frame):
        refuse_header(request, "a frame")
    if isinstance(source, pd.DataFrame):
        yield from titled(slices(source), "DataFrame", len(source))
        return
    if isinstance(source, ArrowStream):
        yield from titled(files.batches(source), type(source).__name__, 0)
        return
    path = copy = place(source)
    try:
        copy = fetched(path) if isinstance(path, CloudPath) else path
        size, done = _size(copy), 0
        binary = copy.is_dir() or copy.suffix in (*files.PARQUET, ".feather", ".arrow")
        if binary:
            refuse_header(request, path)
        chunks = titled(*tables(copy, request)) if binary else load_csv(copy, request)
        with Progress(size, f"read {copy.name}", "bytes") as shown:
            for chunk in chunks:
                yield chunk._replace(name=str(path))
                # Arrow keeps what it freed, which would add up to more than the bars.
                pa.default_memory_pool().release_unused()
                read = round(chunk.share * size)
                shown.update(read - done)
                done = read
        pa.default_memory_pool().release_unused()
    except FileNotFoundError as error:
        url = isinstance(path, CloudPath)
        what, remedy = ("object", "Check the URL") if url else ("file", "Check the path")
        raise refusal(path, Kind.D001, f"no such {what}", remedy) from error
    except BarError as error:
        # The file is a copy where the user gave a URL; messages give the URL.
        raise BarError(*(line.replace(str(copy), str(path)) for line in error.args)) from error
    except (ConfigError, StoreError):  # of a store: no such bucket, or it cannot be reached
        raise
    except MemoryError as error:
        raise refusal(path, Kind.D001, "takes more memory than there is") from error
    except Exception as error:
        # On a damaged file pandas, pyarrow and zlib raise anything, including KeyError.
        what = getattr(error, "strerror", None) or str(error).strip().partition("\n")[0]
        what = what.replace(str(copy), str(path)).rstrip(".")
        raise refusal(path, Kind.D001, f"can't be read ({what})") from error


def refuse_header(request: Request, source: object) -> None:
    """Refuse the line of a header for what names its columns itself."""
    if request.header is not None:
        raise BarError(f"{argument('header')} is of a CSV; leave it out with {source}.")


def _size(path: Path) -> int:
    """Return the bytes of a file.

    Raises:
      BarError: it is empty, or a pipe or a device: these cannot be read twice, which finding the
        format needs.
    """
    about = path.stat()
    if not (stat.S_ISREG(about.st_mode) or stat.S_ISDIR(about.st_mode)):
        kind = "a pipe" if stat.S_ISFIFO(about.st_mode) else "a device"
        remedy = "Save what it gives to a file"
        raise refusal(path, Kind.D001, f"is {kind} and not a file", remedy)
    if about.st_size == 0:
        raise refusal(path, Kind.D002, "the file is empty")
    return about.st_size


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
    with io.BufferedReader(Bytes(path, request.memory_gb)) as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                say = f"line {number} is not UTF-8"
                break
    return refusal(path, Kind.D001, say, "Save it as UTF-8")


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
    source = Bytes(path, request.memory_gb)
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
            yield Chunk(frame, str(path), "line", form.decimal, form.proved, short, source.share)


def _format(path: Path, request: Request) -> TextFormat:
    """Find the format from the first lines."""
    lines: list[str] = []
    with _text(Bytes(path, request.memory_gb)) as file:
        for line in file:
            if len(lines) >= SAMPLE or (len(lines) > 3 and sum(map(len, lines)) > files.LINE):
                break
            lines.append(line)
    above = (request.header or 1) - 1
    if request.header is not None and above >= len(lines):
        say = f"{argument('header', request.header)} is not among the first {len(lines)} lines"
        raise refusal(path, Kind.D023, say, "Give the line that holds the columns' names")
    delimiter, sample = _sample(path, lines[above:])
    depth = max(_header_depth(sample), request.header is not None)
    if request.header is None and depth < 2 and (above := _lines_above(lines, request)):
        delimiter, sample = _sample(path, lines[above:])
        depth = _header_depth(sample)
    names = _names(sample[:depth])
    width = max(map(len, sample[depth:]), default=len(names))
    if request.numbered:
        names = [*names, *(str(i + 1) for i in range(len(names), width))]
    elif not depth:
        remedy = f"Name the columns by number, e.g. {argument('columns', BY_NUMBER)}"
        raise refusal(path, Kind.D023, "line 1 holds values, not the columns' names", remedy)
    most = max(len(names), width)
    refuse_large(path, f"{most:,} columns", most * files.COLUMN_BYTES, request.memory_gb)
    decimal, proved = _decimal(path, sample[depth:], above + depth, delimiter, request.decimal)
    # Long rows come in smaller chunks, to bound the memory of one.
    size = sum(map(len, lines)) // len(lines) + 1
    fewest = min(files.FEW_ROWS, files.MOST_TEXT // 2 // size)
    chunk_rows = min(max(files.CHUNK_TEXT // size, fewest, 1), files.CHUNK_ROWS)
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
        raise refusal(path, Kind.D022, say, remedy) from error


def _sample(path: Path, lines: list[str]) -> tuple[str, list[list[str]]]:
    """Return the delimiter, as the first line shows it, and the fields of the lines."""
    top = lines[0] if lines else ","
    delimiter = max(DELIMITERS, key=top.count)
    if delimiter not in top:  # then the most frequent other sign; pandas takes only ASCII
        others = re.sub(r"[^!-~]|[\w.\"'+/:()<>-]", "", top)
        delimiter = max(others, key=others.count) if others else " "
    sample = [row for row in _fields(path, lines, delimiter) if row]
    if not sample:
        raise refusal(path, Kind.D002, "there are no rows")
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
    path: Path, rows: list[list[str]], above: int, delimiter: str, given: str | None
) -> tuple[str, bool]:
    """Return the decimal sign, and whether it is given or some number shows it.

    Raises:
      BarError: every comma may be one between thousands.
    """
    if given is not None:
        return given, True
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
    raise refusal(path, Kind.D018, say, remedy)


def _field_counts(path: Path, request: Request, form: TextFormat) -> np.ndarray:
    """Return the number of fields of each line; 0 for a blank one and those above the header."""
    with _text(source := Bytes(path, request.memory_gb)) as file:

        def size(row: list[str]) -> int:
            # The row has ended, so its text is not endless.
            source.taken = 0
            return len(row)

        for _ in range(form.above):
            next(file)
        split = form.delimiter == " "
        rows = map(str.split, file) if split else _fields(path, file, form.delimiter)
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
    return refusal(path, Kind.D022, say, remedy)
