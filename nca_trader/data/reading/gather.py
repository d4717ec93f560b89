"""Chunks of a table become `Records`: numbers at once, and what each row alone shows checked.

Of a chunk's text nothing is kept, so that memory depends on the number of bars alone, and on that
of further columns of numbers, which may have changed places with the volume.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from nca_trader.config.reading import FIELDS, INCOME, SPREADS
from nca_trader.data.reading.adjust import FACTORS, factor_faults
from nca_trader.data.reading.checks import value_faults
from nca_trader.data.reading.columns import Rows, arrange
from nca_trader.data.reading.extras import add_extras, double_count
from nca_trader.data.reading.faults import Fault, refuse
from nca_trader.data.reading.records import Growing, Records
from nca_trader.data.reading.tables import Table, holds_numbers
from nca_trader.data.reading.times import TimeReader
from nca_trader.errors import BarError, argument
from nca_trader.types import EXTRAS

SYMBOL = 64  # characters of a symbol at most
NUMBERS = (*FIELDS, *FACTORS, *INCOME, *SPREADS)
KEPT = ("present", *FIELDS, *FACTORS, "cash_dividend", *EXTRAS)


class Gathered(NamedTuple):
    """All rows of a file.

    others: name and float64 values `[rows]` of each further column that holds numbers alone.
    place: `[rows]` int32, the line or row of the file that each stands in; `where(row)` tells it.
    wanted: the symbols asked for. faults: of rows and columns; none between rows.
    """

    records: Records
    others: list[tuple[str, np.ndarray]]
    place: np.ndarray
    unit: str
    wide: bool
    name: str
    wanted: list[str]
    faults: list[Fault]

    def where(self, row: int) -> str:
        """The row as its reader knows it, e.g. "line 12" or, side by side, "line 12, AAPL"."""
        symbol = self.records.symbols[self.records["symbol"][row]]
        return f"{self.unit} {self.place[row]}" + f", {symbol}" * self.wide


def gather(
    tables: Iterable[Table],
    given: Mapping[str, str],
    repairs: frozenset[str],
    times: TimeReader,
    symbol: str | Sequence[str] | None,
) -> Gathered:
    """The rows of all chunks and what is wrong with each.

    Raises:
      BarError: there is no table, no time or no close; no such symbol.
    """
    wanted = [symbol] if isinstance(symbol, str) else list(symbol or ())
    symbols, columns, faults = _Symbols(wanted, repairs), _Columns(), _Faults()
    name, unit, wide, begin = "", "row", False, 0
    for table in tables:
        rows = arrange(table, given, repairs)
        name, unit, wide = table.name, table.unit, rows.wide
        if not {"time", "close"} <= set(rows.frame):
            refuse(name, rows.faults)
        faults.add(0, rows.faults, begin)
        code, taken = symbols.take(rows, name)
        if not taken.any():
            continue
        raw = rows.frame if taken.all() else rows.frame[taken]
        frame = _numbers(raw, table.decimal)
        short = raw.index.isin(table.short)
        faults.add(2, value_faults(frame, raw), begin)
        faults.add(3, factor_faults(frame), begin)
        faults.add(4, add_extras(frame, raw), begin)
        faults.add(5, _line_faults(short, code, symbols), begin)
        times.add(raw["time"])
        columns.add({"symbol": code, "place": raw.index.to_numpy(np.int32), **_arrays(frame)})
        columns.add_others(rows.others if taken.all() else rows.others[taken])
        begin += len(raw)
    faults.add(6, double_count(set(columns.columns)), begin)
    wanted = symbols.resolve(name)
    if not begin:
        raise BarError(f"{name}: D002 there are no rows. Give a file with bars.")
    time, time_faults = times.finish()
    faults.add(1, time_faults, 0)
    everything = {"time": time, **columns.finish()}
    place = everything.pop("place")
    records = Records(everything, symbols.names)
    others = columns.finish_others()
    return Gathered(records, others, place, unit, wide, name, wanted, faults.finish(begin))


def _line_faults(short: np.ndarray, code: np.ndarray, symbols: _Symbols) -> Iterable[Fault]:
    unnamed, wild = code == symbols.unnamed, np.isin(code, symbols.wild)
    if short.any():
        say = "fewer fields than the other lines"
        yield Fault("D022", say, "Complete or remove the line", short, ("drop-bad",))
    if unnamed.any():
        yield Fault("D024", "the symbol is empty", "Write it there", unnamed, ("drop-bad",))
    if wild.any():
        name = symbols.names[code[int(np.argmax(wild))]][:SYMBOL]
        say = f"the symbol {name!r} does not print or is longer than {SYMBOL} characters"
        yield Fault("D024", say, "Correct it", wild, ("drop-bad",))


def _numbers(raw: pd.DataFrame, decimal: str) -> pd.DataFrame:
    """The columns of bars as float64, NaN where they are no numbers."""
    frame = {"present": raw["present"]}
    for name in NUMBERS:
        if name not in raw:
            continue
        column = raw[name]
        if not holds_numbers(column):
            # Lists, dates and integers of many digits: to_numeric raises, or counts nanoseconds.
            column = column.astype("str")
        if decimal == "," and not pd.api.types.is_numeric_dtype(column.dtype):
            # A column of which one cell is no number came as text; a point is no decimal there.
            text = column.astype("str").str.replace(".", "?", regex=False)
            column = text.str.replace(",", ".", regex=False)
        frame[name] = pd.to_numeric(column, errors="coerce").astype(np.float64)
    return pd.DataFrame(frame, index=raw.index, copy=False)


def _arrays(frame: pd.DataFrame) -> dict[str, np.ndarray]:
    return {name: frame[name].to_numpy() for name in KEPT if name in frame}


class _Columns:
    """Columns that grow by the chunks' arrays."""

    def __init__(self):
        self.columns: dict[str, Growing] = {}
        self._others: dict[int, Growing] | None = None
        self._names: list[str] = []

    def add(self, arrays: Mapping[str, np.ndarray]) -> None:
        for name, array in arrays.items():
            self.columns.setdefault(name, Growing(array.dtype)).add(array)

    def add_others(self, others: pd.DataFrame) -> None:
        """The further columns that hold numbers in this chunk and in all before it."""
        if self._others is None:
            self._others = {i: Growing(np.dtype(np.float64)) for i in range(others.shape[1])}
            self._names = [str(column).strip() for column in others.columns]
        for i in list(self._others):
            column = others.iloc[:, i]
            if pd.api.types.is_numeric_dtype(column.dtype):
                self._others[i].add(column.to_numpy(np.float64, na_value=np.nan))
            else:
                del self._others[i]

    def finish(self) -> dict[str, np.ndarray]:
        return {name: column.whole for name, column in self.columns.items()}

    def finish_others(self) -> list[tuple[str, np.ndarray]]:
        return [(self._names[i], column.whole) for i, column in (self._others or {}).items()]


def _is_name(symbol: str) -> bool:
    """Whether a symbol prints, so that it cannot change a terminal or a log, and is short."""
    return symbol.isprintable() and len(symbol) <= SYMBOL


class _Symbols:
    """The names of the assets by code, in the order of the file, and which of them are wanted."""

    def __init__(self, wanted: list[str], repairs: frozenset[str]):
        self.names: list[str] = []
        self.unnamed = -1  # the code of an empty name, once there is one
        self.wild: list[int] = []  # codes of names that do not print or are too long
        self._wanted, self._parted = wanted, "part-reuse" in repairs
        self._column, self._known, self._codes = True, {}, {}

    def take(self, rows: Rows, table: str) -> tuple[np.ndarray, np.ndarray]:
        """Codes `[taken]` of the rows that are taken, and which `[rows]` these are."""
        size = len(rows.frame)
        if "symbol" not in rows.frame:
            if len(self._wanted) > 1:
                say = "D024 no symbol column. Ask for one symbol, or add a column."
                raise BarError(f"{table}: {say}")
            default = "" if table == "DataFrame" else Path(table).name.split(".")[0]
            name = self._wanted[0] if self._wanted else default or "asset"
            if not _is_name(name):
                say = f"the symbol {name[:SYMBOL]!r}, from the file's name, does not print"
                raise BarError(f"{table}: D024 {say}. Pass {argument('symbol', 'NAME')}.")
            self.names, self._column = [name], False
            return np.zeros(size, dtype=np.int32), np.ones(size, dtype=bool)
        for each in rows.symbols:  # side by side: in the order of the columns
            if not self._wanted or each in self._wanted:
                self._code(each)
        local, found = pd.factorize(rows.frame["symbol"].astype("str"))
        names = ["" if name is None or pd.isna(name) else str(name) for name in [*found, ""]]
        self._known |= dict.fromkeys(name for name in names if name)
        bases = {b for w in self._wanted for b in (w, re.sub(r"-\d{4}$", "", w))}
        codes = np.full(len(names), -1, dtype=np.int32)
        for i in np.unique(local):  # -1 is the last of names, the empty one
            if not self._wanted or names[i] in bases:
                codes[i] = self._code(names[i])
        code = codes[local]
        taken = code >= 0
        return code[taken], taken

    def _code(self, name: str) -> int:
        if name not in self._codes:
            self._codes[name] = len(self.names)
            self.names.append(name)
            if not name:
                self.unnamed = self._codes[name]
            elif not _is_name(name):
                self.wild.append(self._codes[name])
        return self._codes[name]

    def resolve(self, table: str) -> list[str]:
        """The symbols asked for; refuses one that the file doesn't have."""
        if not self._column:
            return self._wanted
        for each in self._wanted:
            # FB-2012 is a span of FB, if the repair makes one.
            base = re.sub(r"-\d{4}$", "", each) if self._parted else each
            if each not in self._known and base not in self._known:
                known = ", ".join(self._known)
                raise BarError(f"{table}: D024 no symbol {each!r}. Choose from {known}.")
        return self._wanted


class _Faults:
    """The faults of all chunks, those of one kind and column together."""

    def __init__(self):
        self._found: dict[tuple, list[tuple[int, Fault]]] = {}

    def add(self, stage: int, faults: Iterable[Fault], begin: int) -> None:
        """Of the rows from `begin` on; `stage` tells what is told first."""
        for fault in faults:
            rank = NUMBERS.index(fault.about) if fault.about in NUMBERS else len(NUMBERS)
            say = "" if fault.mask is not None else fault.say
            key = (stage, rank, fault.code != "D009", fault.code, fault.repairs, say)
            self._found.setdefault(key, []).append((begin, fault))

    def finish(self, size: int) -> list[Fault]:
        """Each with a mask of all `size` rows; the words are of its first row."""
        found = []
        for key in sorted(self._found):
            parts = self._found[key]
            fault = parts[0][1]
            if fault.mask is not None:
                mask = np.zeros(size, dtype=bool)
                for begin, part in parts:
                    if part.mask is not None:
                        mask[begin : begin + len(part.mask)] = part.mask
                fault = fault._replace(mask=mask)
            found.append(fault)
        return found
