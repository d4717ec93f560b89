"""Reads delimited text: its first lines show the format in which all rows are then read."""

from __future__ import annotations

import collections
import contextlib
import csv
import gzip
import io
import itertools
import re
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from nca_trader.config.reading import FIELDS, named_pair, plain, role_of
from nca_trader.data.reading.faults import Code, Request, refusal, refuse_large
from nca_trader.data.reading.times import TimeReader, joined
from nca_trader.errors import BarError, argument, printable

MISSING = (
    *("", "NA", "N/A", "n/a", "#N/A", "#N/A N/A", "NaN", "nan", "-NaN", "-nan"),
    *("null", "NULL", "None", "<NA>"),
)
SAMPLE = 200  # lines that show the delimiter, the header and the decimal sign
DELIMITERS = ",;\t|"
VALUE = re.compile(r"[+-]?[.,]?\d[\d.,:/ TZ+-]*(?:[eE][+-]?\d+)?")
NUMBER = re.compile(r"[+-]?[$€£¥]? ?([\d.,]*\d) ?[KMBkmb%]?")
BETWEEN = re.compile("(?<=\\d)['\u00a0\u202f](?=\\d{3})")  # signs that part thousands alone
# "1,234" may be either: a decimal sign, or one between thousands.
THOUSANDS = re.compile(r"[1-9]\d{0,2}[.,]\d{3}")
CHUNK_ROWS, CHUNK_TEXT = 1 << 16, 1 << 22  # rows and characters of a chunk, at most or about
FEW_ROWS = 1 << 9  # rows of a chunk where there are many columns: each takes time
# Bytes of memory that a column takes in addition to its cells, about, as it takes time.
COLUMN_BYTES = 1 << 19
LINE = 1 << 22  # bytes of a line, at most
MOST_TEXT = 32 * CHUNK_TEXT  # of a chunk at most: later lines may be longer than the first ones
SHOWS = 1 << 24  # unpacked bytes that show how much a packed file unpacks to
# A byte of unpacked text counts as so many of memory: 500 MiB of it take ten seconds to read.
TEXT_BYTES = 4
UNPACK, EXPORT = "Unpack it and give the file in it", "Save it as CSV or Parquet"
RECODE, TABLE = "Save it as UTF-8", "Save the table in it as CSV"
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


class Layout(NamedTuple):
    """The layout of a delimited text.

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
        raise _too_wide(path, request, layout, []) from error
    except UnicodeDecodeError as error:
        raise _not_utf8(path, request) from error
    except EndlessRow:
        if layout is not None:
            _field_counts(path, request, layout)  # names the line where a quote is open
        raise


def _not_utf8(path: Path, request: Request) -> BarError:
    """Return the error that names the first line that is not UTF-8, and its byte."""
    say = "is not UTF-8"
    with io.BufferedReader(Bytes(path, request.memory_gb)) as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError as at:
                byte = line[at.start]
                char = bytes([byte]).decode("cp1252" if byte < 0xA0 else "latin-1", "replace")
                say = f"line {number} is not UTF-8: byte 0x{byte:02x} is {char!r} in Latin-1 or "
                say += "Windows-1252"
                break
    return refusal(path, Code.D001, say, "Save it as UTF-8")


def _chunks(path: Path, request: Request, layout: Layout) -> Iterator[Chunk]:
    """Read the rows of a text whose layout is known, with options that leave nothing to guess."""
    columns = range(len(layout.names))
    begin = layout.above + layout.depth
    options: dict[str, Any] = dict(
        sep=r"\s+" if layout.delimiter == " " else layout.delimiter,
        decimal=layout.decimal,
        header=None,
        names=columns,
        skiprows=begin,
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
            frame.index += begin + 1
            values = frame.drop(columns=list(layout.texts))
            frame = frame[values.notna().any(axis=1)]  # without blank lines
            short: tuple[int, ...] = ()
            # Pandas silently fills lines up that end early, so fields are counted again.
            if len(layout.names) > 1 and frame.iloc[:, -1].isna().any():
                if counts is None:
                    counts = _field_counts(path, request, layout)
                if len(counts) >= frame.index.max():
                    # With line ends in fields, lines and rows do not match.
                    lines = frame.index.to_numpy()
                    short = tuple(lines[counts[lines - 1] < frame.shape[1]])
            # An Index of objects: tuples would otherwise become levels.
            frame.columns = pd.Index(layout.names, dtype=object, tupleize_cols=False)
            yield Chunk(
                frame, str(path), "line", layout.decimal, layout.proved, short, source.share
            )


def _layout(path: Path, request: Request) -> Layout:
    """Find the layout from the first lines."""
    lines: list[str] = []
    with _text(Bytes(path, request.memory_gb)) as file:
        for line in file:
            if len(lines) >= SAMPLE or (len(lines) > 3 and sum(map(len, lines)) > LINE):
                break
            lines.append(line)
    above = 0
    delimiter, sample = _sample(path, lines)
    depth = _header_depth(sample)
    if depth < 2 and (above := _lines_above(lines)):
        delimiter, sample = _sample(path, lines[above:])
        depth = _header_depth(sample)
    names = _names(sample[:depth])
    width = max(map(len, sample[depth:]), default=len(names))
    if request.numbered:
        names = [*names, *(str(i + 1) for i in range(len(names), width))]
    elif not depth:
        remedy = f"Name the columns by number, e.g. {_by_number(sample)}"
        raise refusal(path, Code.D023, "line 1 holds values, not the columns' names", remedy)
    most = max(len(names), width)
    refuse_large(path, f"{most:,} columns", most * COLUMN_BYTES, request.memory_gb)
    decimal, proved = _decimal(path, sample[depth:], above + depth, delimiter, request.decimal)
    # Long rows come in smaller chunks, to bound the memory of one.
    size = sum(map(len, lines)) // len(lines) + 1
    fewest = min(FEW_ROWS, MOST_TEXT // 2 // size)
    chunk_rows = min(max(CHUNK_TEXT // size, fewest, 1), CHUNK_ROWS)
    texts = _texts(names, request)
    layout = Layout(delimiter, above, depth, names, texts, decimal, proved, chunk_rows)
    if len(names) < width:
        raise _too_wide(path, request, layout, sample[depth:])
    return layout


def _texts(names: list[Any], request: Request) -> frozenset[int]:
    """Return the columns that are text: symbols, and the dates and clocks of a time in two."""
    last = [name[-1] if isinstance(name, tuple) else name for name in names]
    two = {"date", "time"} <= set(map(plain, last))
    return frozenset(
        i
        for i, name in enumerate(names)
        if {str(name), str(i + 1)} & {*request.texts}
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
        raise refusal(path, Code.D022, say, remedy) from error


def _sample(path: Path, lines: list[str]) -> tuple[str, list[list[str]]]:
    """Return the delimiter, as the first line shows it, and the fields of the lines."""
    top = lines[0] if lines else ","
    delimiter = max(DELIMITERS, key=top.count)
    if delimiter not in top:  # then the most frequent other sign; pandas takes only ASCII
        others = re.sub(r"[^!-~]|[\w.\"'+/:()<>-]", "", top)
        delimiter = max(others, key=others.count) if others else " "
    sample = [row for row in _fields(path, lines, delimiter) if row]
    if not sample:
        raise refusal(path, Code.D002, "there are no rows")
    return delimiter, sample


def _lines_above(lines: list[str]) -> int:
    """Return the number of lines above the first one that names a time and a price."""
    for i, line in enumerate(lines):
        names = [name.strip().strip('"') for name in re.split(f"[{DELIMITERS}]", line)]
        roles = {role_of(name) or (named_pair(name) or ("", ""))[1] for name in names}
        if "time" in roles and len(roles - {"", "time", "symbol"}) > 0:
            return i
    return 0


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
            groups = re.fullmatch(r"[1-9]\d{0,2}(?:([.,])\d{3})(?:\1\d{3})*(?:[.,]\d+)?", number[1])
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
    raise refusal(path, Code.D018, say, remedy)


def _field_counts(path: Path, request: Request, layout: Layout) -> np.ndarray:
    """Return the number of fields of each line; 0 for a blank one and those above the header."""
    with _text(source := Bytes(path, request.memory_gb)) as file:

        def size(row: list[str]) -> int:
            # The row has ended, so its text is not endless.
            source.taken = 0
            return len(row)

        for _ in range(layout.above):
            next(file)
        split = layout.delimiter == " "
        rows = map(str.split, file) if split else _fields(path, file, layout.delimiter)
        counts = np.fromiter(map(size, rows), dtype=np.int32)
    return np.append(np.zeros(layout.above, np.int32), counts)


def _too_wide(
    path: Path, request: Request, layout: Layout, sample: Sequence[list[str]]
) -> BarError:
    """Return the error that names the first line with more fields than names."""
    counts, width = _field_counts(path, request, layout), len(layout.names)
    wide = [(line, count) for line, count in enumerate(counts, 1) if count > width]
    line, count = wide[0]
    more = f" and {len(wide) - 1:,} more" if len(wide) > 1 else ""
    what, remedy = "so the columns are not certain", "Correct the line"
    if len(wide) > 1 and len(wide) > (len(counts) - layout.depth) / 2:
        what = "so every column would shift"
        remedy = f"Name every field, or the columns by number, e.g. {_by_number(sample)}"
    names = f"the header's {width} names" if layout.depth else f"line 1's {width} fields"
    say = f"line {line}{more}: {count} fields, more than {names}, {what}"
    return refusal(path, Code.D022, say, remedy)


def _by_number(rows: Sequence[list[str]]) -> str:
    """Return columns by number that the first rows bear out: a time, and prices or a close."""
    frame = pd.DataFrame(rows, dtype="str")

    def is_time(column: pd.Series) -> bool:
        return any(_readable(column, order) for order in ("dmy", "mdy"))

    first = next((i for i in range(frame.shape[1]) if is_time(frame[i])), 0)
    said, rest = f"time={first + 1}", first + 1
    clock = frame[rest] if rest < frame.shape[1] else pd.Series([], dtype="str")
    if clock.str.contains(":").any() and is_time(joined(frame[first], clock, {})):
        said, rest = f"{said}+{rest + 1}", rest + 1
    values = frame.apply(pd.to_numeric, errors="coerce").to_numpy(float)
    numbers = [i for i in range(rest, frame.shape[1]) if np.isfinite(values[:, i]).mean() > 0.9]
    for i, four in zip(numbers, zip(*(numbers[k:] for k in range(4)), strict=False), strict=False):
        o, h, low, c = values[:, four].T
        known = np.isfinite(o + h + low + c)
        if known.any() and ((np.maximum(o, c) <= h) & (np.minimum(o, c) >= low))[known].all():
            places = numbers[numbers.index(i) :]
            named = [f"{name}={j + 1}" for name, j in zip(FIELDS, places, strict=False)]
            return argument("columns", ",".join([said, *named]))
    close = numbers[0] if numbers else rest
    return argument("columns", f"{said},close={close + 1}")


def _readable(column: pd.Series, order: str) -> bool:
    """Return whether most of a column's texts are times."""
    reader = TimeReader(None, order)
    reader.add(column)
    return not np.isnat(reader.finish()[0]).mean() > 0.5
