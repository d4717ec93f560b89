"""Tables as they stand in files and frames: rows, the names of their columns, broken lines."""

from __future__ import annotations

import csv
import gzip
import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import pandas as pd

from nca_trader.errors import BarError
from nca_trader.types import PRICES

ALIASES = {
    **dict.fromkeys(("time", "date", "datetime", "timestamp", "date_time", "open_time"), "time"),
    **dict.fromkeys(("symbol", "ticker", "asset", "instrument"), "symbol"),
    **dict.fromkeys(("volume", "vol"), "volume"),
    **{name: name for name in (*PRICES, "present")},
}
MISSING = ("", "NA", "N/A", "#N/A", "NaN", "nan", "-NaN", "-nan", "null", "NULL", "None", "<NA>")
SAMPLE = 200  # lines that tell the delimiter, the header and the decimal sign
DELIMITERS = ",;\t|"
VALUE = re.compile(r"[+-]?[.,]?\d[\d.,:/ TZ+-]*(?:[eE][+-]?\d+)?")
COMMA = re.compile(r"[+-]?\d*,\d+")
REMEDY = "Name the columns by number, e.g. --columns time=1,close=2"


class Table(NamedTuple):
    """Rows as they were found.

    `frame`: its index is what its readers count, lines from 1 (the header's) or rows from 0.
    `unit`: "line" or "row". `decimal`: the sign of texts that are numbers.
    `short`: lines that end early.
    """

    frame: pd.DataFrame
    name: str
    unit: str
    decimal: str = "."
    short: tuple[int, ...] = ()


def canonical(column: object) -> str:
    """Which of the columns of bars this one is by its name, or ""."""
    return ALIASES.get(str(column).strip().strip("<>").lower(), "")


def load(
    source: str | Path | pd.DataFrame,
    texts: Sequence[str],
    numbered: bool,
    decimal: str | None,
) -> Table:
    """The table of a file or a frame.

    Args:
      source: the file or the frame.
      texts: names or numbers of columns, beside those called symbol, whose values are texts.
      numbered: whether columns are asked for by number, so that the names need not be right.
      decimal: the decimal sign of a CSV, "." or ","; None: as the file shows.

    Raises:
      BarError: there is no table.
    """
    if isinstance(source, pd.DataFrame):
        table = Table(source, "DataFrame", "row")
    else:
        path = Path(source)
        table = _guarded(path, lambda: _load_file(path, texts, numbered, decimal))
    frame, name = table.frame, table.name
    if table.unit == "row":
        index = frame.index
        if isinstance(index, pd.DatetimeIndex) and index.name is None:
            frame = frame.rename_axis("time")
        named = [level for level in frame.index.names if canonical(level)]
        twice = next((level for level in named if level in frame.columns), None)
        if twice is not None:
            raise BarError(
                f"{name}: D005 the index and a column are both called {twice!r}. Drop one of them."
            )
        frame = frame.reset_index(drop=not named)
    if frame.empty:
        raise BarError(f"{name}: D002 there are no rows. Give a file with bars.")
    return table._replace(frame=frame)


def _guarded(path: Path, read: Callable[[], Table]) -> Table:
    """What `read` gives; that the file isn't there or isn't what it seems becomes a `BarError`."""
    try:
        if path.stat().st_size == 0:
            raise BarError(f"{path}: D002 the file is empty. Give a file with bars.")
        return read()
    except FileNotFoundError as error:
        raise BarError(f"{path}: D001 no such file. Check the path.") from error
    except BarError:
        raise
    except (OSError, EOFError, ValueError) as error:  # parse errors are ValueErrors
        what = getattr(error, "strerror", None) or str(error).strip().partition("\n")[0]
        remedy = "Give a CSV, Parquet or Feather file"
        raise BarError(f"{path}: D001 can't be read ({what.rstrip('.')}). {remedy}.") from error


def _load_file(path: Path, texts: Sequence[str], numbered: bool, decimal: str | None) -> Table:
    if path.suffix in (".parquet", ".pq"):
        return Table(pd.read_parquet(path), str(path), "row")
    if path.suffix in (".feather", ".arrow"):
        return Table(pd.read_feather(path), str(path), "row")
    return _load_csv(path, texts, numbered, decimal)


def _load_csv(path: Path, texts: Sequence[str], numbered: bool, decimal: str | None) -> Table:
    with _open(path) as file:
        lines = list(itertools.islice(file, SAMPLE))
    delimiter = _delimiter(lines[0])
    sample = [row for row in csv.reader(lines, delimiter=delimiter) if row]
    if not sample:
        raise BarError(f"{path}: D002 there are no rows. Give a file with bars.")
    depth = _header_depth(sample)
    names = _names(sample[:depth])
    width = max(map(len, sample[depth:]), default=len(names))
    if numbered:
        names = [*names, *(str(i + 1) for i in range(len(names), width))]
    elif not depth:
        raise BarError(f"{path}: D023 line 1 holds values, not the columns' names. {REMEDY}.")
    if len(names) < width:
        raise BarError(_too_wide(path, delimiter, depth, len(names)))
    is_text = [
        "symbol" in (canonical(name), canonical(name[-1]) if isinstance(name, tuple) else "")
        or str(name) in texts
        or str(i + 1) in texts
        for i, name in enumerate(names)
    ]
    decimal = decimal or _decimal(path, sample[depth:], depth, delimiter)
    missing: Any = {i: MISSING for i, text in enumerate(is_text) if not text}
    try:
        frame = pd.read_csv(
            path,
            sep=r"\s+" if delimiter == " " else delimiter,
            decimal=decimal,
            encoding="utf-8-sig",
            header=None,
            names=range(len(names)),
            skiprows=depth,
            low_memory=False,  # else a column's type depends on where the chunks end
            skip_blank_lines=False,  # keeps the line numbers true
            # A symbol is its text: pandas alone reads NA as missing and 007 as 7.
            dtype={i: "str" for i, text in enumerate(is_text) if text},
            keep_default_na=False,
            na_values=missing,
        )
    except pd.errors.EmptyDataError:
        frame = pd.DataFrame(columns=range(len(names)))
    except pd.errors.ParserError as error:
        if "fields in line" not in str(error):
            raise
        raise BarError(_too_wide(path, delimiter, depth, len(names))) from error
    frame.index += depth + 1
    values = frame.drop(columns=[i for i, text in enumerate(is_text) if text])
    frame = frame[values.notna().any(axis=1)]  # without blank lines
    short = _too_narrow(path, delimiter, frame)
    # An Index of objects: tuples would otherwise become levels.
    frame.columns = pd.Index(names, dtype=object, tupleize_cols=False)
    return Table(frame, str(path), "line", decimal, short)


def _open(path: Path) -> IO[str]:
    opener: Any = gzip.open if path.suffix == ".gz" else open
    return opener(path, "rt", encoding="utf-8-sig", newline="")


def _delimiter(line: str) -> str:
    """The usual delimiter that the line has most of, else its most frequent other sign."""
    best = max(DELIMITERS, key=line.count)
    if best in line:
        return best
    others = re.sub(r"[\w\s.\"'+/:()<>-]", "", line)
    return max(others, key=others.count) if others else " "


def _is_value(field: str) -> bool:
    return VALUE.fullmatch(field.strip()) is not None


def _header_depth(rows: list[list[str]]) -> int:
    """How many of the first rows hold names: 0, 1, or 2 and 3 where symbols have their own row."""
    if any(map(_is_value, rows[0])) and "time" not in map(canonical, rows[0]):
        return 0
    if len(rows) < 2 or any(map(_is_value, rows[1])):
        return 1
    # Of the two rows of a two-level header one holds fields and the other doesn't.
    if ("close" in map(canonical, rows[0])) == ("close" in map(canonical, rows[1])):
        return 1
    if len(rows[1]) != len(rows[0]) or any(not field.strip() for field in rows[1][1:]):
        return 1
    # Pandas puts the index's name into a row of its own.
    return 3 if len(rows) > 2 and rows[2][0].strip() and not any(rows[2][1:]) else 2


def _names(rows: list[list[str]]) -> list[Any]:
    """The columns' names; of a two-level header pairs, but for the first, the time."""
    if not rows:
        return []
    if len(rows) == 1:
        return [field.strip() for field in rows[0]]
    first = next((row[0] for row in reversed(rows) if canonical(row[0]) == "time"), "time")
    upper = itertools.accumulate(rows[0][1:], lambda last, field: field.strip() or last)
    return [first, *zip(upper, map(str.strip, rows[1][1:]), strict=True)]


def _decimal(path: Path, rows: list[list[str]], depth: int, delimiter: str) -> str:
    """The decimal sign of the sample: "," where numbers have one that parts no thousands.

    Raises:
      BarError: every comma may be either.
    """
    if delimiter == ",":
        return "."  # a number in quotes with a comma is told as no number
    commas = [(i, f) for i, row in enumerate(rows) for f in row if COMMA.fullmatch(f.strip())]
    if not commas:
        return "."
    if any(not re.fullmatch(r"[+-]?[1-9]\d{0,2},\d{3}", field.strip()) for _, field in commas):
        return ","
    row, field = commas[0]
    raise BarError(
        f"{path}: D018 line {row + depth + 1}: {field!r} may have a decimal comma or one between "
        "thousands. Pass --decimal , or remove the commas between thousands."
    )


def _field_counts(path: Path, delimiter: str) -> list[int]:
    """The number of fields of each line; of a blank one 0."""
    with _open(path) as file:
        if delimiter == " ":
            return [len(line.split()) for line in file]
        return [len(row) for row in csv.reader(file, delimiter=delimiter)]


def _too_wide(path: Path, delimiter: str, depth: int, width: int) -> str:
    counts = _field_counts(path, delimiter)
    wide = [(line, count) for line, count in enumerate(counts, 1) if count > width]
    line, count = wide[0]
    more = f" and {len(wide) - 1:,} more" if len(wide) > 1 else ""
    if len(wide) > 1 and len(wide) > (len(counts) - depth) / 2:
        what = "so every column would shift. Name every field, or the columns by number, "
        what += "e.g. --columns time=1,close=5 (or time=1+2 of date and clock)"
    else:
        what = "so it can't be told which is which. Correct the line"
    names = f"the header's {width} names" if depth else f"line 1's {width} fields"
    return f"{path}: D022 line {line}{more}: {count} fields, more than {names}, {what}."


def _too_narrow(path: Path, delimiter: str, frame: pd.DataFrame) -> tuple[int, ...]:
    """Lines that end early: pandas alone fills them up, where they end or where it shifts them."""
    width = frame.shape[1]
    if width == 1 or not frame.iloc[:, -1].isna().any():
        return ()
    counts = np.array(_field_counts(path, delimiter))
    if len(counts) < frame.index.max():  # a field holds line ends, so lines can't be counted
        return ()
    mask = counts[frame.index.to_numpy() - 1] < width
    return tuple(frame.index[mask])
