"""Faults of a bar file, and the message that lists them all at once, each with its remedy."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from nca_trader.errors import BarError, argument


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
    D028 = "volume and another column are swapped", "Swap them there", "keep-jumps"
    D029 = "open and close, or two assets, are swapped", "Swap them there", "keep-jumps"
    D030 = "an adjustment factor cannot be used", "Correct or remove the row", "drop-bad"
    D031 = "the quotes are crossed: bid above ask", "Correct or remove the row", "drop-bad"
    D032 = "dividends are given twice", "Leave the factor out, or the cash"
    D033 = "a spread or funding rate is 1 or more", "Correct or remove the row", "drop-bad"


class Fault(NamedTuple):
    """One fault of a file: all rows that have it.

    Attributes:
      code: its kind.
      say: the words for the first faulty row.
      mask: `[rows]` bool, the faulty rows; None for the table as a whole.
      remedy: in place of the code's; or "".
      repairs: in place of the code's, the first that was asked for is applied; or None.
      about: the column, or "".
      values: `[rows]` what the faulty rows of the volume should hold, where that is known.
    """

    code: Code
    say: str
    mask: np.ndarray | None = None
    remedy: str = ""
    repairs: tuple[str, ...] | None = None
    about: str = ""
    values: np.ndarray | None = None

    @property
    def fixes(self) -> tuple[str, ...]:
        """The repairs that fix this fault."""
        return self.code.repairs if self.repairs is None else self.repairs

    def fixed_by(self, repairs: Iterable[str]) -> str | None:
        """Returns which of the repairs asked for fixes this fault, if any does."""
        return next((name for name in self.fixes if name in repairs), None)


def refusal(source: object, code: Code, say: str, remedy: str = "") -> BarError:
    """Returns the error of one fault for which reading stops at once."""
    return BarError(f"{source}: {code.name} {say}. {remedy or code.remedy}.")


def refuse(
    source: str,
    faults: Iterable[Fault],
    repairs: Iterable[str] = (),
    where: Callable[[int], str] = str,
) -> None:
    """Refuses a file for all faults that none of `repairs` fixes.

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
    if len(lines) == 2:
        raise BarError(f"{source}: {' '.join(lines)}")
    if lines:
        indents = ("  ", "       ") * (len(lines) // 2)
        listed = (indent + line for indent, line in zip(indents, lines, strict=True))
        raise BarError(f"{source}: {len(lines) // 2} problems", *listed)
