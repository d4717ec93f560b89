"""Parses a file into one table of numbers.

A chunk's text is not kept, but for a few cells that are not numbers, which messages name. Memory
thus depends on the number of bars alone, and on that of further columns of numbers, which may have
changed places with the volume.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from nca_trader.cloud import CloudPath
from nca_trader.config.reading import FIELDS, INCOME, SPREADS
from nca_trader.data.reading.columns import Arranged, arrange, holds_numbers
from nca_trader.data.reading.faults import Code, Fault, refusal, refuse
from nca_trader.data.reading.files import load
from nca_trader.data.reading.times import Growing, TimeReader, Times
from nca_trader.errors import argument

FACTORS = ("split", "dividend")
NUMBERS = (*FIELDS, *FACTORS, *INCOME, *SPREADS)
LONGEST = 64  # characters of a symbol at most
UNREAD_TEXT = 1 << 20  # characters of cells that are not numbers, kept for messages


@dataclasses.dataclass
class Unread:
    """Cells of a column that hold other than numbers: their rows, and the texts of the first."""

    rows: list[np.ndarray] = dataclasses.field(default_factory=list)
    texts: dict[int, str] = dataclasses.field(default_factory=dict)

    def text(self, row: int) -> str:
        """Returns the cell as it was written, or "a text" where it was not kept."""
        return self.texts.get(row, "a text")


@dataclasses.dataclass(frozen=True)
class Table:
    """All rows of a file as numbers, in the order of the file.

    Attributes:
      name: the file.
      columns: `[rows]` each: time datetime64[ns] in UTC, symbol int32 (a place in `symbols`),
        present bool, and float64 open, high, low, close, volume, and what else the file has.
      symbols: the assets' names, in the order of the file.
      others: name and float64 values `[rows]` of each further column that holds numbers alone.
      place: `[rows]` int32, the line or row of the file.
      unit: "line" or "row".
      wide: whether a line holds several assets.
      unread: by column, the cells that hold other than numbers.
      short: rows of lines that end early.
      times: what reading the times showed; None where they were times already.
      faults: what is wrong with the columns.
    """

    name: str
    columns: dict[str, np.ndarray]
    symbols: list[str]
    others: list[tuple[str, np.ndarray]] = dataclasses.field(default_factory=list)
    place: np.ndarray | None = None
    unit: str = "row"
    wide: bool = False
    unread: dict[str, Unread] = dataclasses.field(default_factory=dict)
    short: list[np.ndarray] = dataclasses.field(default_factory=list)
    times: Times | None = None
    faults: list[Fault] = dataclasses.field(default_factory=list)

    def __len__(self) -> int:
        return len(self.columns["present"])

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    def where(self, row: int) -> str:
        """Returns the row as its reader knows it, e.g. "line 12" or, side by side, "line 12, A"."""
        at = row if self.place is None else self.place[row]
        return f"{self.unit} {at}" + f", {self.symbols[self['symbol'][row]]}" * self.wide

    def marked(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Returns `[rows]` bool, True at the rows in `parts`."""
        mask = np.zeros(len(self), dtype=bool)
        for rows in parts:
            mask[rows] = True
        return mask


class Request(NamedTuple):
    """What `read_bars` was asked for, apart from the file.

    Attributes:
      columns: column by role.
      timezone, dates, decimal: as in `read_bars`.
      symbols: those to take; none: all.
      repairs: the repairs asked for.
    """

    columns: Mapping[str, str]
    timezone: str | None
    dates: str | None
    decimal: str | None
    symbols: Sequence[str]
    repairs: frozenset[str]


def parse(source: str | os.PathLike[str] | CloudPath | pd.DataFrame, request: Request) -> Table:
    """Reads all rows of a file, a chunk at a time.

    Raises:
      BarError: there is no table, no time or no close; there is no such symbol.
    """
    given = request.columns
    times = TimeReader(request.timezone, request.dates)
    texts = [given["symbol"]] if "symbol" in given else []
    numbered = any(part.isdigit() for text in given.values() for part in text.split("+"))
    symbols = _Symbols(request)
    columns: dict[str, Growing] = {}
    others: dict[tuple[int, str], Growing] = {}
    unread: dict[str, Unread] = {}
    short, faults = [], {}
    name, unit, wide, begin = "", "row", False, 0
    for chunk in load(source, texts, numbered, request.decimal):
        arranged = arrange(chunk, given)
        name, unit, wide = chunk.name, chunk.unit, arranged.symbols is not None
        if not {"time", "close"} <= set(arranged.frame):  # nothing can stand in for these
            refuse(name, arranged.faults)
        # Every chunk has the same header, so each fault is kept once.
        faults |= {(fault.code, fault.say): fault for fault in arranged.faults}
        # Rows of symbols that were not asked for are dropped here, before they take memory.
        code, taken = symbols.take(arranged, name)
        if not taken.any():
            continue
        raw = arranged.frame if taken.all() else arranged.frame[taken]
        numbers = _numbers(raw, chunk.decimal)
        _note_unread(unread, raw, numbers, begin)
        arrays = {"symbol": code, "place": raw.index.to_numpy(np.int32)}
        for key, array in (arrays | _bar_columns(raw, numbers)).items():
            columns.setdefault(key, Growing(array.dtype)).add(array)
        rest = arranged.others if taken.all() else arranged.others[taken]
        for i, (label, column) in enumerate(rest.items()):
            if pd.api.types.is_numeric_dtype(column.dtype):
                values = column.to_numpy(np.float64, na_value=np.nan)
                others.setdefault((i, str(label).strip()), Growing(float)).add(values)
        times.add(raw["time"])
        if raw.index.isin(chunk.short).any():
            short.append(np.flatnonzero(raw.index.isin(chunk.short)) + begin)
        begin += len(raw)
    symbols.check(name)
    if not begin:
        raise refusal(name, Code.D002, "there are no rows")
    read = times.finish()
    # Times come last: what form they have, later rows may decide.
    arrays = {"time": read.utc} | {key: column.whole for key, column in columns.items()}
    return Table(
        name=name,
        place=arrays.pop("place"),
        columns=arrays,
        symbols=list(symbols.codes),
        # A shorter one was text in some chunk.
        others=[(key[1], c.whole) for key, c in others.items() if len(c.whole) == begin],
        unit=unit,
        wide=wide,
        unread=unread,
        short=short,
        times=read,
        faults=list(faults.values()),
    )


def spread_columns(names: Container[str]) -> list[str]:
    """Returns which columns the half spread is taken from, the most direct there are.

    >>> spread_columns({"bid", "ask", "spread"})
    ['bid', 'ask']
    """
    if "half_spread" in names:
        return ["half_spread"]
    if "bid" in names and "ask" in names:
        return ["bid", "ask"]
    return ["spread"] if "spread" in names else []


def _numbers(raw: pd.DataFrame, decimal: str) -> dict[str, np.ndarray]:
    """Returns the columns of bars as float64 `[n]`, NaN where they are not numbers."""
    numbers = {}
    for name in (*FIELDS, *FACTORS, *INCOME, *spread_columns(raw)):
        if name not in raw:
            continue
        column = raw[name]
        if not holds_numbers(column):
            # Lists, dates and integers of many digits: to_numeric raises, or counts nanoseconds.
            column = column.astype("str")
        if decimal == "," and not pd.api.types.is_numeric_dtype(column.dtype):
            # One cell that is not a number makes the column text; a point is not a decimal there.
            text = column.astype("str").str.replace(".", "?", regex=False)
            column = text.str.replace(",", ".", regex=False)
        numbers[name] = pd.to_numeric(column, errors="coerce").to_numpy(np.float64, na_value=np.nan)
    return numbers


def _note_unread(
    unread: dict[str, Unread], raw: pd.DataFrame, numbers: dict[str, np.ndarray], begin: int
) -> None:
    """Adds the cells of rows from `begin` on that are neither numbers nor empty."""
    for name, values in numbers.items():
        if not np.isnan(values).any():
            continue
        rows = np.flatnonzero(np.isnan(values) & raw[name].notna().to_numpy())
        if not len(rows):
            continue
        cells = unread.setdefault(name, Unread())
        cells.rows.append(rows + begin)
        # A hostile file may hold nothing but long texts.
        left = UNREAD_TEXT - sum(map(len, cells.texts.values()))
        for row in rows[: max(left, 0)]:
            text = f"{raw[name].iloc[row]}"
            if (left := left - len(text)) < 0:
                break
            cells.texts[int(row) + begin] = text


def _bar_columns(raw: pd.DataFrame, numbers: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns a chunk's arrays: with the half spread, and 0 where no income is paid."""
    present = raw["present"].to_numpy()
    arrays = {"present": present, **numbers}
    for name in INCOME:
        if name in arrays:  # an empty cell means 0, but a text is a fault
            none = present & raw[name].isna().to_numpy()
            arrays[name] = np.where(none, 0.0, arrays[name])
    with np.errstate(divide="ignore", invalid="ignore"):
        if "bid" in arrays:
            bid, ask = arrays["bid"], arrays["ask"]
            arrays["half_spread"] = (ask - bid) / (ask + bid)
        elif "spread" in arrays:
            arrays["half_spread"] = arrays["spread"] / (2.0 * arrays["close"])
    return arrays


def is_name(symbol: str) -> bool:
    """Returns whether a symbol is short and prints, so that it cannot change a terminal or a log.

    >>> is_name("BRK.B"), is_name("a" * 65)
    (True, False)
    """
    return symbol.isprintable() and len(symbol) <= LONGEST


class _Symbols:
    """The names of the assets that are taken.

    Attributes:
      codes: the place of each among the assets, in the order of the file.
    """

    def __init__(self, request: Request):
        self.codes: dict[str, int] = {}
        self._wanted, self._parted = request.symbols, "part-reuse" in request.repairs
        self._known: dict[str, None] = {}  # every name of the file, in its order
        # FB-2012 is a span of FB, if the repair makes one.
        self._bases = {re.sub(r"-\d{4}$", "", name) for name in self._wanted} | {*self._wanted}

    def take(self, rows: Arranged, table: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the codes `[taken]` of the rows that are taken, and which `[rows]` these are."""
        size = len(rows.frame)
        if "symbol" not in rows.frame:
            self._code(self._only(table))
            return np.zeros(size, dtype=np.int32), np.ones(size, dtype=bool)
        for each in rows.symbols or ():  # side by side: in the order of the columns
            if not self._wanted or each in self._wanted:
                self._code(each)
        local, found = pd.factorize(rows.frame["symbol"].astype("str"))
        names = ["" if name is None or pd.isna(name) else str(name) for name in [*found, ""]]
        self._known |= dict.fromkeys(name for name in names if name)
        codes = np.full(len(names), -1, dtype=np.int32)
        for i in np.unique(local):  # -1 is the last of names, the empty one
            if not self._wanted or names[i] in self._bases:
                codes[i] = self._code(names[i])
        code = codes[local]
        taken = code >= 0
        return code[taken], taken

    def _code(self, name: str) -> int:
        """Returns the place of a name, a new one for a new name."""
        return self.codes.setdefault(name, len(self.codes))

    def _only(self, table: str) -> str:
        """Returns the name of the asset of a table without a symbol column.

        Raises:
          BarError: several are asked for, or the file's name is not a name of an asset.
        """
        if len(self._wanted) > 1:
            remedy = "Ask for one symbol, or add a column"
            raise refusal(table, Code.D024, "no symbol column", remedy)
        default = "" if table == "DataFrame" else Path(table).name.split(".")[0]
        name = self._wanted[0] if self._wanted else default or "asset"
        if not is_name(name):
            say = f"the symbol {name[:LONGEST]!r}, from the file's name, does not print"
            raise refusal(table, Code.D024, say, f"Pass {argument('symbol', 'NAME')}")
        self._known[name] = None
        return name

    def check(self, table: str) -> None:
        """Refuses a symbol that was asked for and that the file does not have."""
        for each in self._wanted:
            base = re.sub(r"-\d{4}$", "", each) if self._parted else each
            if each not in self._known and base not in self._known:
                remedy = f"Choose from {', '.join(self._known)}"
                raise refusal(table, Code.D024, f"no symbol {each!r}", remedy)
