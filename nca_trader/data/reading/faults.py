"""A table of bars, its faults, and the two answers to them: refuse the file or repair it.

A message lists all faults at once, each with its remedy.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from nca_trader.config.reading import MEMORY_GB
from nca_trader.data.reading.forensic import gaps_of_half_a_year
from nca_trader.data.reading.times import Times
from nca_trader.errors import BarError, argument
from nca_trader.types import PRICES

GIB = 1 << 30
ROW_BYTES = 128  # of memory that an asset's bar takes while it is read and checked, about


class Code(enum.Enum):
    """Kinds of fault, under codes that do not change.

    Attributes:
      text: what is wrong.
      remedy: what a user can do, where a message names no remedy of its own.
      repairs: those of `REPAIRS` that fix it, where a fault names none of its own.
    """

    text: str
    remedy: str
    repairs: tuple[str, ...]

    def __init__(self, text: str, remedy: str, *repairs: str):
        self.text, self.remedy, self.repairs = text, remedy, repairs

    D001 = "the file cannot be read, or is not a table", "Give a CSV, Parquet or Feather file"
    D002 = "there are no rows", "Give a file with bars"
    D003 = "there is no close column", "Say which it is"
    D004 = "there is no time column", "Say which it is"
    D005 = "another column is missing or ambiguous", "Rename or remove one"
    D006 = "a value is missing", "Correct or remove the row", "drop-nan"
    D007 = "a value is infinite", "Correct or remove the row", "drop-bad"
    D008 = "a price is not positive", "Correct or remove the row", "drop-bad"
    D009 = "a value is not a number", "Correct or remove the row", "drop-bad"
    D010 = "the high is below the low", "Correct or remove the row", "drop-bad"
    D011 = "the open or the close is outside low to high", "Correct or remove the row", "widen"
    D012 = "a volume, spread or dividend is negative", "Correct or remove the row", "drop-bad"
    D013 = "a time cannot be read", "Write it as 2018-12-31 or 2018-12-31T14:30:00Z", "drop-bad"
    D014 = "some times have a UTC offset and others have none", "Add an offset"
    D015 = "the time zone is not known", "Add a UTC offset"
    D016 = "the zone's clock skips or repeats a time", "Add a UTC offset to the time", "drop-bad"
    D017 = "day and month cannot be distinguished", "Write them alike"
    D018 = "a comma may be a decimal one or one between thousands", "Remove the commas"
    D019 = "day and month are exchanged in some dates", "Write the dates again from the source"
    D020 = "times do not increase", "Sort the rows by time", "sort"
    D021 = "a time of a symbol is there twice", "Remove one", "keep-first", "keep-last"
    D022 = "a line is too long or too short, or has no end", "Complete or remove it", "drop-bad"
    D023 = "there is no header", "Name the columns"
    D024 = "a symbol is missing, unknown or does not print", "Correct it", "drop-bad"
    D025 = "half a year without bars", "Give each its own symbol", "part-reuse", "keep-gaps"
    D026 = "the price jumps between two bars", "Correct the prices, or adjust splits", "keep-jumps"
    D027 = "the file holds an adjustment that is not applied", "Apply it", "unadjusted"
    D030 = "an adjustment factor cannot be used", "Correct or remove the row", "drop-bad"
    D031 = "the quotes are crossed: bid above ask", "Correct or remove the row", "drop-bad"
    D032 = "dividends are given twice", "Leave the factor out, or the cash"
    D033 = "a spread or funding rate is 1 or more", "Correct or remove the row", "drop-bad"
    D034 = "reading takes more memory than is allowed", "Give fewer rows, or allow more memory"
    D035 = "a third of the trading hours has no bar", "Give another length of a bar", "keep-gaps"
    D036 = "prices may be adjusted for the dividends of the file", "Say whether they are"


class Fault(NamedTuple):
    """One fault of a file: all rows that have it.

    Attributes:
      code: its kind.
      say: the message about the first faulty row.
      mask: `[rows]` bool, the faulty rows; None for the table as a whole.
      remedy: in place of the code's; or "".
      repairs: in place of the code's, the first that was asked for is applied; or None.
      about: the column, or "".
    """

    code: Code
    say: str
    mask: np.ndarray | None = None
    remedy: str = ""
    repairs: tuple[str, ...] | None = None
    about: str = ""

    @property
    def fixes(self) -> tuple[str, ...]:
        """The repairs that fix this fault."""
        return self.code.repairs if self.repairs is None else self.repairs

    def fixed_by(self, repairs: Iterable[str]) -> str | None:
        """Return which of the repairs asked for fixes this fault, if any does."""
        return next((name for name in self.fixes if name in repairs), None)


@dataclasses.dataclass
class Unread:
    """Cells of a column that are not numbers: their rows, and the texts of the first ones."""

    rows: list[np.ndarray] = dataclasses.field(default_factory=list)
    texts: dict[int, str] = dataclasses.field(default_factory=dict)

    def add(self, rows: np.ndarray, column: pd.Series, begin: int) -> None:
        """Add the cells at `rows` of a chunk that starts at row `begin` of the file."""
        self.rows.append(rows + begin)
        # Bounded, as a hostile file may hold nothing but long texts.
        left = UNREAD_TEXT - sum(map(len, self.texts.values()))
        for row in rows[: max(left, 0)]:
            text = f"{column.iloc[row]}"
            if (left := left - len(text)) < 0:
                break
            self.texts[int(row) + begin] = text

    def text(self, row: int) -> str:
        """Return the cell as it was written, or "a text" where it was not kept."""
        return self.texts.get(row, "a text")


@dataclasses.dataclass(frozen=True)
class Table:
    """All rows of a file as numbers, in the order of the file.

    Attributes:
      name: the file.
      columns: `[rows]` each: time datetime64[ns] in UTC, symbol int32 (a place in `symbols`),
        present bool, and float64 open, high, low, close, volume, and what else the file has.
      symbols: the assets' names, in the order of the file.
      others: name and float64 values `[rows]` of each column of adjustments that is not applied.
      place: `[rows]` int32, the line or row of the file.
      unit: "line" or "row".
      wide: whether a line holds several assets.
      unread: by column, the cells that hold other than numbers.
      short: rows of lines that end early.
      times: the evidence from reading the times; None where they were times already.
      faults: what is wrong with the columns.
      notes: sentences for the note of the bars.
      vendor: whether the dividends have a vendor's name, so that prices may be adjusted for them.
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
    notes: list[str] = dataclasses.field(default_factory=list)
    vendor: bool = False

    def __len__(self) -> int:
        return len(self.columns["present"])

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    def where(self, row: int) -> str:
        """Return the row as its reader knows it, e.g. "line 12" or, side by side, "line 12, A"."""
        at = row if self.place is None else self.place[row]
        return f"{self.unit} {at}" + f", {self.symbols[self['symbol'][row]]}" * self.wide

    def marked(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Return `[rows]` bool, True at the rows in `parts`."""
        mask = np.zeros(len(self), dtype=bool)
        for rows in parts:
            mask[rows] = True
        return mask


class Request(NamedTuple):
    """The arguments of `read_bars`, apart from the file.

    Attributes:
      columns: column by role.
      timezone, dates, decimal: as in `read_bars`.
      symbols: those to take; none: all.
      repairs: the repairs asked for.
      memory_gb: GiB that reading may take.
    """

    columns: Mapping[str, str]
    timezone: str | None
    dates: str | None
    decimal: str | None
    symbols: Sequence[str]
    repairs: frozenset[str]
    memory_gb: float = MEMORY_GB

    @property
    def texts(self) -> list[str]:
        """Names or numbers of columns, in addition to those called symbol, that hold texts."""
        return [self.columns["symbol"]] if "symbol" in self.columns else []

    @property
    def numbered(self) -> bool:
        """Whether columns are asked for by number, so that the names need not be right."""
        return any(part.isdigit() for text in self.columns.values() for part in text.split("+"))

    def kept(self, rows: float) -> float:
        """Return the bytes of memory that so many rows of a file take, where all are taken."""
        return 0.0 if self.symbols else rows * ROW_BYTES


def refuse_large(source: object, what: str, size: float, memory_gb: float) -> None:
    """Refuse a file before it takes more memory than is allowed.

    Args:
      source: the name of the file.
      what: what takes the memory, in the plural.
      size: bytes of memory that it takes.
      memory_gb: GiB that are allowed.
    """
    if size > memory_gb * GIB:
        say = f"{what} count as {size / GIB:,.3g} GiB of memory, and {memory_gb:.3g} are allowed"
        remedy = f"Give fewer, or pass {argument('memory_gb', math.ceil(1.25 * size / GIB))}"
        raise refusal(source, Code.D034, say, remedy)


def refusal(source: object, code: Code, say: str, remedy: str = "") -> BarError:
    """Return the error of one fault that ends reading at once."""
    return BarError(f"{source}: {code.name} {say}. {remedy or code.remedy}.")


def refuse(
    source: str,
    faults: Iterable[Fault],
    repairs: Iterable[str] = (),
    where: Callable[[int], str] = str,
) -> None:
    """Refuse a file for all faults that none of `repairs` fixes.

    Args:
      source: the name of the file.
      faults: what is wrong with it.
      repairs: the repairs asked for.
      where: names a row as its reader knows it, e.g. "line 12".

    Raises:
      BarError: lists every such fault, each with its code, first row and remedy.
    """
    lines = []
    for fault in faults:
        if fault.fixed_by(repairs):
            continue
        place, remedy = "", fault.remedy or fault.code.remedy
        if fault.mask is not None:
            rows = np.flatnonzero(fault.mask)
            more = f" and {len(rows) - 1:,} more" if len(rows) > 1 else ""
            place = f"{where(int(rows[0]))}{more}: "
        if fault.fixes:
            remedy += ", or pass " + " or ".join(argument("repair", name) for name in fault.fixes)
        lines += [f"{fault.code.name} {place}{fault.say}.", f"{remedy}."]
    # One fault: what and where, and its remedy.
    if len(lines) == 2:
        raise BarError(f"{source}: {' '.join(lines)}")
    if lines:
        indents = ("  ", "       ") * (len(lines) // 2)
        listed = (indent + line for indent, line in zip(indents, lines, strict=True))
        raise BarError(f"{source}: {len(lines) // 2} problems", *listed)


FACTORS = ("split", "dividend")
UNREAD_TEXT = 1 << 20  # characters of cells that are not numbers, kept for messages
DROPS = ("drop-nan", "drop-bad")
FLAT = 0.1  # of the bars: if more have no range, the note says so


def repair(table: Table, faults: Iterable[Fault], repairs: frozenset[str]) -> Table:
    """Return the rows after the repairs asked for, with adjusted prices.

    Args:
      table: all rows.
      faults: what is wrong with them.
      repairs: those asked for.

    Raises:
      BarError: no row is left.
    """
    stays = rows_that_stay(table, faults, repairs)
    # D021 is the only fault between rows whose repair drops rows. `assemble` does the sorting.
    if any(fault.code == Code.D021 for fault in faults) and stays.any():
        # Among rows that stay: a row that is dropped must not be the one kept of a pair.
        stays &= ~repeated_rows(table, stays, repairs)
    if not stays.any():
        raise refusal(table.name, Code.D002, "no row is left after the repairs", "Correct the rows")
    columns = dict(table.columns)
    if not stays.all():
        columns = {name: column[stays] for name, column in columns.items()}
    if "widen" in repairs:
        prices = [columns[name] for name in PRICES]
        columns["high"] = np.maximum.reduce(prices)
        columns["low"] = np.minimum.reduce(prices)
    if "no-volume" in repairs:  # an infinite volume stays, and is a fault
        columns["volume"] = np.nan_to_num(columns["volume"], posinf=np.inf, neginf=-np.inf)
    symbols = table.symbols
    if "part-reuse" in repairs:
        columns["symbol"], symbols = _parted(columns, symbols)
    # After the symbols are split up: each span starts at its own first factor.
    columns = adjusted(columns, np.ones(len(columns["time"]), dtype=bool))
    # The columns and texts that only detection needs are freed here.
    return Table(name=table.name, columns=columns, symbols=symbols, notes=table.notes)


def rows_that_stay(table: Table, faults: Iterable[Fault], repairs: frozenset[str]) -> np.ndarray:
    """Return `[rows]` bool, the rows with a time that no repair asked for drops."""
    stays = ~np.isnat(table["time"])
    for fault in faults:
        if fault.mask is not None and fault.fixed_by(repairs) in DROPS:
            stays &= ~fault.mask
    return stays


def repeated_rows(
    table: Table, among: np.ndarray, repairs: frozenset[str] = frozenset()
) -> np.ndarray:
    """Return `[rows]` bool: of rows `among` that share time and symbol, all but the one kept."""
    keys = pd.DataFrame({name: table[name][among] for name in ("time", "symbol")}, copy=False)
    mask = np.zeros(len(table), dtype=bool)
    mask[among] = keys.duplicated(keep="last" if "keep-last" in repairs else "first")
    return mask


def adjusted(columns: Mapping[str, np.ndarray], among: np.ndarray) -> dict[str, np.ndarray]:
    """Return the columns with prices multiplied by f_t / f_first, for splits and dividends.

    f is split times dividend, and f_first is that of the symbol's first present row. Volume is
    divided by split_t / split_first alone. Cash per unit is multiplied by the same quotient.
    Vendors divide by the last factor, which is not known at t. Relative to the first factor, a
    later split changes no earlier bar.

    Args:
      columns: `[rows]` each.
      among: `[rows]` bool, the rows that may be a symbol's first.
    """
    given = [name for name in FACTORS if name in columns]
    out = dict(columns)
    if not given:
        return out
    code, rows = columns["symbol"], np.flatnonzero(columns["present"] & among)
    rows = rows[np.argsort(columns["time"][rows], kind="stable")]
    first = np.full(code.max() + 1, -1)
    first[code[rows[::-1]]] = rows[::-1]  # the last assignment stays: the first row in time
    factor = {}
    with np.errstate(all="ignore"):  # a factor of 0 is a fault of its own
        for name in given:
            value = columns[name]
            # A symbol without a present row has no factor; its prices are NaN or carried.
            factor[name] = value / np.where(first >= 0, value[first], 1.0)[code]
        total = np.prod(list(factor.values()), axis=0)
        for name in PRICES:
            out[name] = columns[name] * total
        if "split" in factor:
            out["volume"] = columns["volume"] / factor["split"]
            if "cash_dividend" in columns:
                out["cash_dividend"] = columns["cash_dividend"] * factor["split"]
    return out


def note_of(table: Table, faults: Iterable[Fault], repairs: frozenset[str]) -> str:
    """Return the note for reports: repairs, adjustments, and bars that hold a close alone."""
    done = [
        f"{fault.code.name} by {fault.fixed_by(repairs)}"
        + ("" if fault.mask is None else f" ({fault.mask.sum():,} rows)")
        for fault in faults
    ]
    notes = [f"Repaired on reading: {', '.join(dict.fromkeys(done))}."] if done else []
    notes += table.notes
    factors = [name for name in FACTORS if name in table]
    if factors:
        notes.append(f"Prices adjusted by {' and '.join(factors)}, relative to the first bar.")
    flat = (table["high"] == table["low"]) & (table["open"] == table["close"]) & table["present"]
    count = int(table["present"].sum())
    if flat.sum() > FLAT * count and "close-only" not in repairs:
        notes.append(f"{flat.sum():,} of {count:,} bars have open = high = low = close.")
    return " ".join(notes)


def _parted(columns: Mapping[str, np.ndarray], symbols: list[str]) -> tuple[np.ndarray, list[str]]:
    """Give every later span of a symbol the year of its first bar: FB, FB-2012.

    Returns codes `[rows]` and names, in the order of the assets' first rows.
    """
    time, code = columns["time"], columns["symbol"]
    rows = np.lexsort((time, code))
    names, out = list(symbols), code.copy()
    for place in gaps_of_half_a_year(time[rows], code[rows], columns["present"][rows]):
        later = rows[place:][code[rows[place:]] == code[rows[place]]]
        names.append(f"{symbols[code[rows[place]]]}-{str(time[rows[place]])[:4]}")
        out[later] = len(names) - 1
    # The assets keep the order of their first rows in the file.
    new, order = pd.factorize(out)
    return new.astype(np.int32), [names[i] for i in order]
