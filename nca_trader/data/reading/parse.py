"""Parses a file into one table of numbers, one row per asset and time.

A chunk's text is not kept, except for times and for a few cells that are not numbers, which
messages name. Memory thus depends only on the number of bars.

A file may call its symbols, its adjusted closes and its payments as it likes: a column without a
role is kept for as long as its values may be one of these, and all others are named in the note.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa

from nca_trader.cloud import Place
from nca_trader.config.reading import (
    ADJUSTMENTS,
    FIELDS,
    INCOME,
    NO_COLUMN,
    SECOND,
    SPREADS,
    VENDOR_DIVIDENDS,
    named_pair,
    plain,
    role_of,
)
from nca_trader.data.reading.faults import (
    CHANGES,
    FACTORS,
    FALSE,
    GIB,
    ROW_BYTES,
    TRUE,
    Fault,
    Kind,
    Labels,
    Request,
    Table,
    Unread,
    refusal,
    refuse,
)
from nca_trader.data.reading.files import Chunk, Frame, load
from nca_trader.data.reading.times import (
    REAL,
    is_clock,
    join_clock,
    keep_cells,
    read_times,
    whole,
)
from nca_trader.errors import argument
from nca_trader.types import COLUMN

LONGEST = 64  # characters of a symbol at most
CAPACITY = 1 << 16  # rows of an array to begin with
NUMBERS = (*FIELDS, *FACTORS, *INCOME, *SPREADS)
SHOWN, LONGEST_CELL = 1000, 1000  # cells that are not numbers, and characters of each
PRUNED = 0.8  # of a chunk's rows, of a column that changes on few days
MOST_VALUES = 20_000  # of a column that may name assets
MOST_NAMED = 12  # unused columns that a note names


class Growing:
    """An array that chunks are added to.

    It doubles as it grows, and no page of it takes memory before it is written to. A list of the
    chunks, joined at the end, would take twice the memory: the freed chunks leave fragments.
    """

    def __init__(self, dtype: np.dtype | type | str):
        self._array, self._size = np.empty(CAPACITY, dtype), 0

    def add(self, values: np.ndarray) -> None:
        """Append `values` `[n]`."""
        size = self._size + len(values)
        if size > len(self._array):
            grown = np.empty(max(2 * len(self._array), size), self._array.dtype)
            grown[: self._size] = self.whole
            self._array = grown
        self._array[self._size : size] = values
        self._size = size

    @property
    def whole(self) -> np.ndarray:
        """`[size]` all that was added, not a copy."""
        return self._array[: self._size]


class Arranged(NamedTuple):
    """A chunk under the canonical names, one row per asset and time.

    Attributes:
      frame: time, open, high, low, close, volume, present; clock and symbol where these are columns
        of their own; and further `ROLES` of the table.
      others: the other columns of the same rows.
      unused: names of the columns that are not used, those of `others` among them.
      faults: what is wrong with the columns.
      symbols: of a wide table, in the order of its columns; None of a long one.
    """

    frame: pd.DataFrame
    others: pd.DataFrame
    unused: list[str]
    faults: list[Fault]
    symbols: tuple[str, ...] | None


def parse(source: Place | Frame, request: Request) -> Table:
    """Read all rows of a file, a chunk at a time.

    Raises:
      BarError: there is no table, no time or no close; there is no such symbol.
    """
    given = request.columns
    names: dict[str, int] = {}  # of symbols, each with its number
    # FB-2012 names a span of FB, if the repair part-reuse makes one.
    bases = {*request.symbols, *map(_base, request.symbols)}
    times: dict[str, list[pd.Series]] = {"time": [], "clock": []}
    columns: dict[Any, Growing] = {}
    unread: dict[str, Unread] = {}
    faults, begin, candidates = {}, 0, Candidates()
    chunk = arranged = two = None
    for chunk in load(source, request):
        if chunk.frame.empty:
            continue
        two = _time_in_two(chunk, request) if two is None else two
        arranged = arrange(chunk, request, two)
        if not {"time", "close"} <= set(arranged.frame):  # no other column can stand in for these
            refuse(request.name, arranged.faults)
        # Every chunk has the same header, so the same faults come with each.
        faults |= {(fault.code, fault.say): fault for fault in arranged.faults}
        code = _coded(arranged, names, request)
        raw, rest = arranged.frame, arranged.others
        if request.symbols:  # the other rows are dropped here, before they take memory
            taken = np.isin(code, [names[each] for each in bases if each in names])
            code, raw, rest = code[taken], raw[taken], rest[taken]
        arrays: dict[Any, np.ndarray] = {"symbol": code} | numbers(raw, chunk, unread, begin)
        arrays |= _own(rest, chunk, request)
        arrays |= candidates.add(rest, raw, chunk, arrays["close"], code)
        for key, array in arrays.items():
            columns.setdefault(key, Growing(array.dtype)).add(array)
        for key in times.keys() & set(raw):
            times[key].append(keep_cells(raw[key]))
        begin += len(raw)
        _check_size(begin, begin / chunk.share, request)
    if arranged is not None:
        _check_symbols(names, request)  # only the whole file shows that it lacks one
    if chunk is None or arranged is None or not begin:
        raise refusal(request.name, Kind.D002, "there are no rows")
    _check_own(chunk, columns, request)
    time = whole(times.pop("time"))
    time = join_clock(time, whole(times.pop("clock"))) if two else time
    read = read_times(time, request.timezone, request.dates)
    del time  # the texts take half as much memory as all else
    pa.default_memory_pool().release_unused()
    # Times come last, since later rows may decide their form.
    arrays = {"time": read.utc} | {key: column.whole for key, column in columns.items()}
    labels, _ = candidates.split({**arrays})
    notes, time_faults = [*read.notes], read.faults
    over, name = unfinished(labels, arrays["symbol"], arrays["time"])
    if name:
        which = f"of {over.sum():,} asset" + "s" * bool(over.sum() > 1)
        notes.append(f"Left out the last candle {which}, not over by the column {name}.")
        for cells in unread.values():
            cells.leave_out(over)
        arrays = {key: array[~over] for key, array in arrays.items()}
        time_faults = [each.among(~over) for each in time_faults]
    labels, others = candidates.split(arrays)
    used = np.flatnonzero(np.bincount(arrays["symbol"]))
    if len(used) < len(names):
        arrays["symbol"] = np.searchsorted(used, arrays["symbol"]).astype(np.int32)
    by_number = {number: name for name, number in names.items() if name == name.strip()}
    blank = [name for name in names if name != name.strip()][:1]
    notes += [f"Blanks around symbols were removed, first of {name!r}." for name in blank]
    short, ticks = arrays.pop("short"), arrays.pop("ticks", None)
    if ticks is not None and not arrays["volume"].any():
        arrays["volume"] = ticks
        notes.append("Volume is the number of ticks, as the volume's own column holds zeros.")
    unused = [each for each in arranged.unused if not (each == name or _is_own(each, request))]
    notes += name_unused(unused)
    return Table(
        place=arrays.pop("place"),
        columns=arrays,
        symbols=[by_number[int(number)] for number in used],
        others=others,
        labels=labels if arranged.symbols is None else [],
        unnamed="symbol" not in arranged.frame,
        unit=chunk.unit,
        wide=arranged.symbols is not None,
        unread=unread,
        short=short,
        time_faults=time_faults,
        faults=list(faults.values()),
        notes=notes,
        close_name=str(given.get("close") or _close_of(chunk.frame.columns)),
        vendor="cash_dividend" not in given and _names_dividends(chunk.frame.columns),
    )


def _close_of(header: pd.Index) -> Any:
    """Return the column of closes."""
    closes = (c for c in header if role_of(c) == "close" or plain(c) == "price")
    return next(closes, "close")


def _names_dividends(header: pd.Index) -> bool:
    """Whether a column is named as a vendor names dividends, at any level."""
    levels = (plain(level) for c in header for level in (c if isinstance(c, tuple) else (c,)))
    return not {*VENDOR_DIVIDENDS}.isdisjoint(levels)


def arrange(chunk: Chunk, request: Request, two: list[int]) -> Arranged:
    """Put a chunk under the canonical names.

    Missing columns get stand-ins, so that the rows are checked in spite of them.

    Args:
      chunk: rows of the table.
      request: columns by role, as the user named them.
      two: the columns of a date and a clock that are one time; or none.

    Raises:
      BarError: a column that was asked for is not there.
    """
    arranged = _wide(chunk, request, two) or _long(chunk, request, two)
    frame, faults = arranged.frame, arranged.faults
    names = ", ".join(map(str, chunk.frame.columns))
    lacking = [name for name in ("time", *FIELDS) if name not in frame]
    for name in lacking:
        code = {"time": Kind.D004, "close": Kind.D003}.get(name, Kind.D005)
        stand_in = {"time": (), "close": (), "volume": ("no-volume",)}.get(name, ("close-only",))
        remedy = f"Say which it is by {argument('columns', name + '=COLUMN')}"
        numbers = all(map(pd.api.types.is_numeric_dtype, arranged.others.dtypes))
        known = {"symbol", *FIELDS} & set(frame)
        if name == "close" and not known and numbers and arranged.others.shape[1] > 1:
            ways = request.name_columns("close=*"), argument("repair", "close-only,no-volume")
            remedy += f"; where each column is the close of an asset, pass {' '.join(ways)}"
        say = f"no {name} column; the columns are {names}"
        faults.append(Fault(code, say, None, remedy, stand_in))
    # The stand-ins are what the repairs close-only and no-volume would take.
    if not {"time", "close"} & set(lacking):
        for name in lacking:
            frame[name] = 0.0 if name == "volume" else frame["close"]
    if "present" in frame and frame["present"].dtype != bool:
        say = "column present holds other values than True and False"
        faults.append(Fault(Kind.D005, say, None, "Correct or rename the column"))
        frame["present"] = True
    elif "present" not in frame:
        frame["present"] = True
    return arranged


def _time_in_two(chunk: Chunk, request: Request) -> list[int]:
    """Return the columns of a date and a clock that are one time; none where it has its own."""
    names = [str(column).strip().lower() for column in chunk.frame.columns]
    text = request.columns.get("time", "")
    if text:
        if "+" not in text or text.lower() in names:
            return []
        return [_position(chunk, part.strip(), request) for part in text.split("+", 1)]
    found = list(map(plain, chunk.frame.columns))
    if found.count("date") != 1 or found.count("time") != 1:
        return []
    two = [found.index("date"), found.index("time")]
    return two if is_clock(chunk.frame.iloc[:, two[1]]) else []


def _long(chunk: Chunk, request: Request, two: list[int]) -> Arranged:
    """Arrange a table with one row per asset and time."""
    raw, given, used, faults = chunk.frame, request.columns, set(two), []
    found = {name: raw.iloc[:, i] for name, i in zip(("time", "clock"), two, strict=False)}
    for role, text in given.items():
        if text != NO_COLUMN and role not in found:
            found[role] = _expression(chunk, role, text, used, request)
    # Of two names of a role the plain one counts, as close next to close_price.
    for at, column in sorted(enumerate(raw.columns), key=lambda one: plain(one[1]) in SECOND):
        role = role_of(column)
        if at in two or (role in found and plain(column) in SECOND):
            continue
        # A dividend that the user named as a factor is not cash.
        if not role or role in given or (role == "cash_dividend" and at in used):
            continue
        if role in found:
            say = f"columns {found[role].name!r} and {column!r} both mean {role}"
            remedy = f"Rename or remove one, or say which by {argument('columns')}"
            faults.append(Fault(Kind.D005, say, None, remedy, about=role))
        else:
            found[role] = raw.iloc[:, at]  # by place, as names may be there twice
            used.add(at)
    price = [i for i, column in enumerate(raw.columns) if plain(column) == "price"]
    # One table of Investing.com calls the close so, next to the other three.
    if "close" not in found and {"open", "high", "low"} <= found.keys() and len(price) == 1:
        found["close"] = raw.iloc[:, price[0]]
        used.add(price[0])
    if "volume" not in found and "ticks" in found and given.get("volume") != NO_COLUMN:
        found["volume"] = found.pop("ticks")
    frame = pd.DataFrame(found, index=raw.index, copy=False)
    others = raw.iloc[:, [i for i in range(raw.shape[1]) if i not in used]]
    less = {role for role in SPREADS if role in found} - {*spread_columns(found)}
    less |= {"ticks"} & found.keys()
    unused = [*others.columns, *(found[role].name for role in sorted(less))]
    return Arranged(frame, others, [*map(str, unused)], faults, None)


def _position(chunk: Chunk, text: str, request: Request) -> int:
    """Return the place of the column with this name, else with this number from 1.

    Raises:
      BarError: none is, or more than one.
    """
    names = [str(column).strip() for column in chunk.frame.columns]
    same = [i for i, name in enumerate(names) if name == text]
    same = same or [i for i, name in enumerate(names) if name.lower() == text.lower()]
    if not same and text.isdigit() and 1 <= int(text) <= len(names):
        same = [int(text) - 1]
    if len(same) == 1:
        return same[0]
    what = f"{len(same)} columns are called {text!r}" if same else f"no column {text!r}"
    say = f"{what}; the columns are {', '.join(names)}"
    raise refusal(request.name, Kind.D005, say, "Name one of them, or its number from 1")


def _expression(chunk: Chunk, role: str, text: str, used: set[int], request: Request) -> pd.Series:
    """Return the column that `text` names: itself, or A/B or 1/B divided.

    Adds to `used` the columns that this uses up.
    """
    names = {str(column).strip().lower() for column in chunk.frame.columns}
    if role not in FACTORS or "/" not in text or text.lower() in names:
        used.add(at := _position(chunk, text, request))
        return chunk.frame.iloc[:, at]
    first, _, second = (part.strip() for part in text.partition("/"))
    used.add(at := _position(chunk, second, request))
    # Not a number gives NaN, which is a fault of its row (D030).
    below = floats(chunk.frame.iloc[:, at], chunk)
    # The numerator is not used up: a dividend's may be the close itself.
    at = None if first == "1" else _position(chunk, first, request)
    above = 1.0 if at is None else floats(chunk.frame.iloc[:, at], chunk)
    with np.errstate(divide="ignore", invalid="ignore"):
        return pd.Series(above / below, chunk.frame.index)


def _wide(chunk: Chunk, request: Request, two: list[int]) -> Arranged | None:
    """Arrange a table with a column for each symbol and field; None if the table is long."""
    raw, given = chunk.frame, request.columns
    all_closes = given.get("close") == "*"
    roles = given.keys() | {role_of(column) for column in raw.columns}
    # A table with a symbol column, or with one close, has one row per asset and time.
    if "symbol" in roles or ("close" in roles and not all_closes):
        return None
    clock = given.get("time")
    # In a header of two levels, either level may name the time.
    levels = [(*map(str, c),) if isinstance(c, tuple) else (str(c),) for c in raw.columns]
    times = [i for i, level in enumerate(levels) if "time" in map(role_of, level)]
    at = two or ([_position(chunk, clock, request)] if clock else times[:1])
    if all_closes:
        names = {i: (str(c), "close") for i, c in enumerate(raw.columns) if i not in at}
    else:
        pairs = {i: named_pair(c) for i, c in enumerate(raw.columns) if i not in at}
        names = {i: pair for i, pair in pairs.items() if pair}
    if not at or "close" not in {field for _, field in names.values()}:
        return None
    faults, positions = [], {}
    for i, (symbol, field) in names.items():
        fields = positions.setdefault(symbol, {})
        if field in fields:
            say = f"columns {raw.columns[fields[field]]!r} and {raw.columns[i]!r} both mean "
            faults.append(Fault(Kind.D005, f"{say}{field} of {symbol}"))
        fields[field] = i
    places = {(s, field): i for s, fields in positions.items() for field, i in fields.items()}
    columns = pd.MultiIndex.from_tuples(places, names=["symbol", None])
    table = raw.iloc[:, [*places.values()]].set_axis(columns, axis=1)
    frame = table.stack("symbol", future_stack=True).reset_index("symbol")
    for name, i in zip(("time", "clock"), at, strict=False):
        frame[name] = raw.iloc[:, i]
    # An empty row is not a bar. A row that holds income alone is kept and refused later, so no
    # dividend is lost silently.
    paid = frame[[name for name in INCOME if name in frame]].fillna(0.0).ne(0.0).any(axis=1)
    known = frame[[name for name in FIELDS if name in frame]].notna().any(axis=1)
    frame = frame[known | paid]
    used = {*at, *places.values()}
    unused = [" ".join(level) for i, level in enumerate(levels) if i not in used]
    return Arranged(frame, pd.DataFrame(index=frame.index), unused, faults, tuple(positions))


def _coded(rows: Arranged, names: dict[str, int], request: Request) -> np.ndarray:
    """Return `[rows]` the number of each row's symbol in `names`, to which new ones are added.

    A name with blanks around it has the number of the name without. A table without a symbol column
    holds one asset, named after the file.
    """
    if "symbol" not in rows.frame:
        wanted, table = request.symbols, request.name
        if len(wanted) > 1:
            remedy = "Ask for one symbol, or add a column"
            raise refusal(table, Kind.D024, "no symbol column", remedy)
        default = "" if table == "DataFrame" else Path(table).name.split(".")[0]
        name = wanted[0] if wanted else default or "asset"
        if not is_name(name):
            say = f"the symbol {name[:LONGEST]!r}, from the file's name, does not print"
            raise refusal(table, Kind.D024, say, f"Pass {argument('symbol', 'NAME')}")
        names[name] = 0
        return np.zeros(len(rows.frame), dtype=np.int32)
    for each in rows.symbols or ():  # side by side: in the order of the columns
        names.setdefault(each, len(names))
    # Symbols repeat, so each name is looked up once.
    local, found = pd.factorize(rows.frame["symbol"].astype("str").fillna(""))
    for each in found:
        names[each] = names.setdefault(each.strip(), len(names))
    return np.array([names[each] for each in found], dtype=np.int32)[local]


def _base(symbol: str) -> str:
    """Return the symbol without a year at its end, as the repair part-reuse adds one."""
    return re.sub(r"-\d{4}$", "", symbol)


def is_name(symbol: str) -> bool:
    """Return whether a symbol is short and prints, so that it cannot change a terminal or a log.

    >>> is_name("BRK.B"), is_name("a" * 65)
    (True, False)
    """
    return symbol.isprintable() and len(symbol) <= LONGEST


def _own(rest: pd.DataFrame, chunk: Chunk, request: Request) -> dict[str, np.ndarray]:
    """Return the columns `[n]` without a role that are taken as your own."""
    names = {label: str(label).strip() for label in rest.columns if _is_own(label, request)}
    return {
        COLUMN + request.own.get(text, text.removeprefix(COLUMN)): floats(rest[label], chunk)
        for label, text in names.items()
    }


def _is_own(label: object, request: Request) -> bool:
    text = str(label).strip()
    return text in request.own or text.startswith(COLUMN)


def _check_size(rows: int, expected: float, request: Request) -> None:
    """Refuse a file whose rows so far, or as many as are expected, take too much memory."""
    size = max(request.kept(expected), rows * ROW_BYTES)
    # The rows so far show how many come, but not well: the first lines may be shorter.
    if max(rows * ROW_BYTES, 0.8 * size) > request.memory_gb * GIB:
        what = f"about {size / ROW_BYTES:,.0f} bars of an asset"
        request.refuse_large(what, size)


def _check_symbols(names: dict[str, int], request: Request) -> None:
    """Refuse a file that lacks a symbol which was asked for."""
    for each in request.symbols:
        if each not in names and not ("part-reuse" in request.repairs and _base(each) in names):
            remedy = f"Choose from {', '.join(name for name in names if name)}"
            raise refusal(request.name, Kind.D024, f"no symbol {each!r}", remedy)


def _check_own(chunk: Chunk, columns: Container[Any], request: Request) -> None:
    """Refuse a file that lacks a column of the user's own."""
    absent = [text for text, name in request.own.items() if COLUMN + name not in columns]
    if absent:
        say = f"no column {absent[0]!r} and no such file; the columns are "
        say += ", ".join(map(str, chunk.frame.columns))
        raise refusal(request.name, Kind.D005, say, f"Correct {argument('extra')}")


def numbers(
    raw: pd.DataFrame, chunk: Chunk, unread: dict[str, Unread], begin: int
) -> dict[str, np.ndarray]:
    """Return a chunk's columns `[n]`: float64, NaN where a cell is not a number, and `present`.

    And `place`, the line or row, and `short`, whether the line ends early.

    Adds the half spread, and 0 where no income is paid. Cells of rows from `begin` on that are
    neither numbers nor empty are added to `unread`.
    """
    present = raw["present"].to_numpy()
    place = raw.index.to_numpy(np.int32)
    arrays = {"present": present, "place": place, "short": raw.index.isin(chunk.short)}
    for name in (*FIELDS, "ticks", *FACTORS, *INCOME, *spread_columns(raw)):
        if name not in raw:
            continue
        values, empty = floats(raw[name], chunk), raw[name].isna().to_numpy()
        rows = np.flatnonzero(np.isnan(values) & ~empty)
        if len(rows):
            cells = unread.setdefault(name, Unread())
            cells.rows.append(rows + begin)
            for row in rows[: SHOWN - len(cells.texts)]:
                cells.texts[int(row) + begin] = f"{raw[name].iloc[row]}"[:LONGEST_CELL]
        # An empty cell of income means 0, but a text is a fault.
        arrays[name] = np.where(present & empty, 0.0, values) if name in INCOME else values
    with np.errstate(divide="ignore", invalid="ignore"):
        if "bid" in arrays:
            bid, ask = arrays["bid"], arrays["ask"]
            arrays["half_spread"] = (ask - bid) / (ask + bid)
        elif "spread" in arrays:
            arrays["half_spread"] = arrays["spread"] / (2.0 * arrays["close"])
    return arrays


def spread_columns(names: Container[str]) -> list[str]:
    """Return the columns that give the half spread, the most direct ones of the table.

    >>> spread_columns({"bid", "ask", "spread"})
    ['bid', 'ask']
    """
    if "half_spread" in names:
        return ["half_spread"]
    if "bid" in names and "ask" in names:
        return ["bid", "ask"]
    return ["spread"] if "spread" in names else []


def floats(column: pd.Series, chunk: Chunk) -> np.ndarray:
    """Return a column as float64, NaN where a cell is not a number."""
    number = column.dtype.kind in REAL
    # Lists, dates and integers of many digits: to_numeric raises, or counts nanoseconds.
    text = column if number else column.astype("str")
    values = pd.to_numeric(text, errors="coerce").to_numpy(np.float64, na_value=np.nan)
    # With a decimal comma, a point does not part decimals.
    left = column.notna().to_numpy() & (np.isnan(values) | (chunk.decimal == ","))
    if not number and left.any():
        cleaned = pd.to_numeric(_cleaned(text[left], chunk), errors="coerce")
        values = values.copy()
        values[left] = cleaned.to_numpy(np.float64, na_value=np.nan)
    return values


def _cleaned(text: pd.Series, chunk: Chunk) -> pd.Series:
    """Return numbers as Python writes them, of texts such as $1,234.50, 1.234,5 and 190.28M.

    The comma of 1,234 is removed only where other numbers show that it is not the decimal sign.
    """
    text = text.str.strip().str.replace(r"^([+-]?)[$€£¥] ?", r"\1", regex=True)
    for letters, power in (("Kk", "e3"), ("Mm", "e6"), ("Bb", "e9")):
        text = text.str.replace(
            rf"^([+-]?[0-9][0-9.,' ]*) ?[{letters}]$", rf"\1{power}", regex=True
        )
    parts = "' \u00a0\u202f" + (",." if chunk.proved else "").replace(chunk.decimal, "")
    # By threes, or as in India by twos until the last three.
    three, two = rf"[{parts}][0-9]{{3}}", rf"[{parts}][0-9]{{2}}"
    by = f"[0-9]{{1,3}}(?:{three})+|[0-9]{{1,2}}(?:{two})+{three}"
    groups = rf"[+-]?(?:{by})(?:\{chunk.decimal}[0-9]+)?(?:e[0-9])?"
    whole = text.str.fullmatch(groups).to_numpy(bool, na_value=False)
    text = text.mask(whole, text.str.replace(f"[{parts}]", "", regex=True))
    if chunk.decimal == ",":
        text = text.str.replace(".", "?", regex=False).str.replace(",", ".", regex=False)
    return text


class Candidates:
    """Columns without a role, a chunk at a time, for as long as they may have a meaning.

    The first chunk shows most columns to have none, so that memory does not grow with their number.
    """

    def __init__(self) -> None:
        self._values: dict[tuple, dict[Any, int]] = {}
        self._gone: set[tuple] = set()
        self._rows = 0

    def add(
        self,
        rest: pd.DataFrame,
        raw: pd.DataFrame,
        chunk: Chunk,
        close: np.ndarray,
        code: np.ndarray,
    ) -> dict[Any, np.ndarray]:
        """Return arrays `[rows]` to keep: codes of labels, and numbers, by kind, place and name.

        Args:
          rest: the columns.
          raw: the columns with a role, of the same rows.
          chunk: they are of.
          close: `[rows]`.
          code: `[rows]` the asset's number.
        """
        self._rows += len(rest)
        order, found = np.argsort(code, kind="stable"), {}
        same = code[order][1:] == code[order][:-1]
        header = [str(name) for name in chunk.frame.columns]
        # Where no time is there twice, assets can only stand one after the other.
        times = [name for name in ("time", "clock") if name in raw]
        once = rest.shape[1] > 0 and not raw[times].duplicated().any()
        for i, (label, column) in enumerate(rest.items()):
            text = str(label).strip()
            place = header.index(str(label)) + 1
            labels, number = ("label", i, text, place), ("number", i, text, place)
            codes = None if labels in self._gone else self._codes(labels, column, once)
            if codes is not None:
                found[labels] = codes
            if number in self._gone:
                continue
            value = floats(column, chunk)
            unread = (np.isnan(value) & column.notna().to_numpy()).any()
            seldom = not unread and _changes_seldom(value[order], close[order], same)
            if seldom or plain(label) in ADJUSTMENTS:
                found[number] = value
            else:
                self._gone.add(number)
        return found

    def _codes(self, key: tuple, column: pd.Series, once: bool) -> np.ndarray | None:
        """Return the number of each value, None where the column cannot name assets."""
        whole = column.dtype.kind not in REAL or pd.api.types.is_integer_dtype(column.dtype)
        local, found = pd.factorize(column)
        blocks = not once or (np.diff(local) != 0).sum() < len(found)
        if whole and blocks and (local >= 0).all():
            values = self._values.setdefault(key, {})
            numbers = [values.setdefault(each, len(values)) for each in found.tolist()]
            if "" not in values and len(values) <= min(MOST_VALUES, max(self._rows // 2, 2)):
                return np.array(numbers, np.int32)[local]
        self._gone.add(key)
        return None

    def split(self, arrays: dict[Any, np.ndarray]) -> tuple[list[Labels], list[tuple]]:
        """Take what is left out of `arrays`; return the labels, and name, place and numbers."""
        labels, others = [], []
        for key in [key for key in arrays if isinstance(key, tuple)]:
            kind, _, name, place = key
            array = arrays.pop(key)
            if kind == "label" and key not in self._gone:
                values = [str(value).strip() for value in self._values[key]]
                labels.append(Labels(name, place, array, values))
            elif key not in self._gone:
                others.append((name, place, array))
        return labels, others


def _changes_seldom(value: np.ndarray, close: np.ndarray, same: np.ndarray) -> bool:
    """Whether a column, or its ratio to the close, is mostly the one of the row before."""
    if not same.any():
        return True
    filled = np.nan_to_num(value)
    with np.errstate(all="ignore"):
        ratio = np.abs(np.diff(np.log(value / close))) <= CHANGES
    still = (filled[1:] == filled[:-1])[same].mean()
    return max(still, ratio[same].mean()) >= PRUNED


def unfinished(labels: list[Labels], code: np.ndarray, time: np.ndarray) -> tuple[np.ndarray, str]:
    """Return `[rows]` bool, the last candles that a true/false column says were not over; its name.

    It is true in all other rows.
    """
    order = np.lexsort((time, code))
    last = np.zeros(len(code), bool)
    last[order] = np.append(code[order][1:] != code[order][:-1], True)
    for label in labels:
        words = [value.lower() for value in label.values]
        if len(words) == 2 and set(words) & TRUE and set(words) & FALSE:
            mask = label.codes == next(i for i, word in enumerate(words) if word in FALSE)
            if mask.any() and not (mask & ~last).any() and mask.sum() < len(mask) - 1:
                return mask, label.name
    return np.zeros(len(code), bool), ""


def name_unused(names: list[str]) -> Iterator[str]:
    """Yield the sentence that names the columns of a file that are not used."""
    if names:
        more = f" and {len(names) - MOST_NAMED:,} more" if names[MOST_NAMED:] else ""
        yield f"Columns that are not used: {', '.join(names[:MOST_NAMED])}{more}."
