"""A table of bars, its faults, and the two answers to them: refuse the file or repair it.

A message lists all faults at once, each with its remedy.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from nca_trader.config.reading import MEMORY_GB
from nca_trader.errors import BarError, argument

GIB = 1 << 30
FACTORS = ("split", "dividend")
DROPS = ("drop-nan", "drop-bad", "keep-first", "keep-last")  # repairs that drop rows
MANY = 0.1  # of the rows: where a repair drops more, a message says how many
CHANGES = 1e-3  # relative, of a column that adjusts prices: adjusted closes are rounded
# Texts of a column of truth values.
TRUE, FALSE = {"true", "1", "1.0", "yes"}, {"false", "0", "0.0", "no"}
ROW_BYTES = 128  # of memory that an asset's bar takes while it is read and checked, about


class Kind(enum.Enum):
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
    D037 = "a column may name the assets", "Say whether it does"


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

    code: Kind
    say: str
    mask: np.ndarray | None = None
    remedy: str = ""
    repairs: tuple[str, ...] | None = None
    about: str = ""

    @property
    def fixes(self) -> tuple[str, ...]:
        """The repairs that fix this fault."""
        return self.code.repairs if self.repairs is None else self.repairs

    def among(self, rows: np.ndarray) -> Fault:
        """Return the fault of a table of these rows alone."""
        return self if self.mask is None else self._replace(mask=self.mask[rows])

    def fixed_by(self, repairs: Iterable[str]) -> str | None:
        """Return which of the repairs asked for fixes this fault, if any does."""
        return next((name for name in self.fixes if name in repairs), None)


@dataclasses.dataclass
class Unread:
    """Cells of a column that are not numbers: their rows, and the texts of the first ones."""

    rows: list[np.ndarray] = dataclasses.field(default_factory=list)
    texts: dict[int, str] = dataclasses.field(default_factory=dict)

    def leave_out(self, mask: np.ndarray) -> None:
        """Leave out the rows in `mask`, and number the others again."""
        new = np.cumsum(~mask) - 1
        self.rows = [new[rows[~mask[rows]]] for rows in self.rows]
        self.texts = {int(new[row]): text for row, text in self.texts.items() if not mask[row]}


class Labels(NamedTuple):
    """A column of text or whole numbers that no role has.

    name, place: of the column, from 1. codes: `[rows]` int32, places in `values`, the texts.
    """

    name: str
    place: int
    codes: np.ndarray
    values: list[str]

    @property
    def number(self) -> bool:
        """Whether the values are numbers as they are, and not codes such as 007."""
        return all(re.fullmatch(r"-?(0|[1-9]\d*)(\.0)?", value) for value in self.values)


@dataclasses.dataclass(frozen=True)
class Table:
    """All rows of a file as numbers, in the order of the file.

    Attributes:
      columns: `[rows]` each: time datetime64[ns] in UTC, symbol int32 (a place in `symbols`),
        present bool, and float64 open, high, low, close, volume, and what else the file has.
      symbols: the assets' names, in the order of the file.
      others: name, place from 1 and float64 values `[rows]` of columns without a role that may
        hold adjustments.
      labels: the columns without a role that may name assets.
      unnamed: whether no column names the assets.
      place: `[rows]` int32, the line or row of the file.
      unit: "line" or "row".
      wide: whether a line holds several assets.
      unread: by column, the cells that hold other than numbers.
      short: `[rows]` bool, whether the line ends early; or None.
      time_faults: what is wrong with the times.
      faults: what is wrong with the columns.
      notes: sentences for the note of the bars.
      close_name: the column that is the close.
      vendor: whether the dividends have a vendor's name, so that prices may be adjusted for them.
    """

    columns: dict[str, np.ndarray]
    symbols: list[str]
    others: list[tuple[str, int, np.ndarray]] = dataclasses.field(default_factory=list)
    labels: list[Labels] = dataclasses.field(default_factory=list)
    unnamed: bool = False
    place: np.ndarray | None = None
    unit: str = "row"
    wide: bool = False
    unread: dict[str, Unread] = dataclasses.field(default_factory=dict)
    short: np.ndarray | None = None
    time_faults: list[Fault] = dataclasses.field(default_factory=list)
    faults: list[Fault] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    close_name: str = "close"
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


class Request(NamedTuple):
    """The arguments of `read_bars`, and the name of the file.

    Attributes:
      columns: column by role.
      timezone, dates, decimal: as in `read_bars`.
      symbols: those to take; none: all.
      repairs: the repairs asked for.
      memory_gb: GiB that reading may take.
      splits: symbol, date and ratio of each that was given.
      own: names of columns of your own by the file's names of them.
      header: the line of the columns' names, from 1; None: it is found.
      name: the file or the frame, for messages.
    """

    columns: Mapping[str, str]
    timezone: str | None
    dates: str | None
    decimal: str | None
    symbols: Sequence[str]
    repairs: frozenset[str]
    memory_gb: float = MEMORY_GB
    splits: tuple[tuple[str, str, float], ...] = ()
    own: Mapping[str, str] = {}
    header: int | None = None
    name: str = ""

    @property
    def texts(self) -> list[str]:
        """Names or numbers of columns that hold texts: symbols, and times in two columns."""
        time = self.columns.get("time", "").split("+")
        parts = [part.strip() for part in time] if len(time) > 1 else []
        return [*parts, *([self.columns["symbol"]] if "symbol" in self.columns else [])]

    @property
    def numbered(self) -> bool:
        """Whether columns are asked for by number, so that the names need not be right."""
        return any(part.isdigit() for text in self.columns.values() for part in text.split("+"))

    def kept(self, rows: float) -> float:
        """Return the bytes of memory that so many rows of a file take, where all are taken."""
        return 0.0 if self.symbols else rows * ROW_BYTES

    def name_columns(self, *more: str) -> str:
        """Return the argument that names columns as they are named already, and some more."""
        given = {role: f"{role}={text}" for role, text in self.columns.items()}
        given |= {text.partition("=")[0]: text for text in more}
        return argument("columns", ",".join(given.values()))

    def refuse_large(self, what: str, size: float) -> None:
        """Refuse a file before it takes more memory than is allowed.

        Args:
          what: what takes the memory, in the plural.
          size: bytes of memory that it takes.
        """
        if size > self.memory_gb * GIB:
            need, most = f"{size / GIB:,.3g} GiB", f"{self.memory_gb:.3g}"
            remedy = f"Give fewer, or pass {argument('memory_gb', math.ceil(1.25 * size / GIB))}"
            say = f"{what} count as {need} of memory, and {most} are allowed"
            raise refusal(self.name, Kind.D034, say, remedy)


def refusal(source: object, code: Kind, say: str, remedy: str = "") -> BarError:
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
        fixes = [argument("repair", name) for name in fault.fixes]
        if fault.mask is not None and fault.mask.mean() > MANY:
            size, many = len(fault.mask), int(fault.mask.sum())
            # Without any row there are no bars, so such a repair is not named.
            drops = f" (drops {many:,} of {size:,} rows)"
            fixes = [
                text + drops * (name in DROPS)
                for name, text in zip(fault.fixes, fixes, strict=True)
                if many < size or name not in DROPS
            ]
        if fixes:
            remedy += f", or pass {' or '.join(fixes)}"
        lines += [f"{fault.code.name} {place}{fault.say}.", f"{remedy}."]
    # One fault: what and where, and its remedy.
    if len(lines) == 2:
        raise BarError(f"{source}: {' '.join(lines)}")
    if lines:
        indents = ("  ", "       ") * (len(lines) // 2)
        listed = (indent + line for indent, line in zip(indents, lines, strict=True))
        raise BarError(f"{source}: {len(lines) // 2} problems", *listed)
