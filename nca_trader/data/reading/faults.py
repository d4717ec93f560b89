"""Faults of a bar file and the message that lists them: all at once, each with its remedy.

Each kind of fault has a code that does not change:

| code | fault |
|-|-|
| D001 | the file cannot be read, or is not a table |
| D002 | there are no rows |
| D003 | there is no close column |
| D004 | there is no time column |
| D005 | another column is missing or ambiguous |
| D006 | a value is missing |
| D007 | a value is infinite |
| D008 | a price is not positive |
| D009 | a value is not a number |
| D010 | the high is below the low |
| D011 | the open or the close is outside low to high |
| D012 | a volume, spread or dividend is negative |
| D013 | a time cannot be read |
| D014 | some times have a UTC offset and others have none |
| D015 | the time zone is not known |
| D016 | the zone's clock skips or repeats a time |
| D017 | day and month cannot be distinguished |
| D018 | a comma may be a decimal one or one between thousands |
| D019 | day and month are exchanged in some of the dates |
| D020 | times do not increase |
| D021 | a time of a symbol is there twice |
| D022 | a line has more or fewer fields than names, or a text has no end |
| D023 | there is no header |
| D024 | a symbol is missing, unknown or does not print |
| D025 | half a year or more is between two spans of a symbol |
| D026 | the price jumps between two bars |
| D027 | the file holds an adjustment that is not applied |
| D028 | volume and another column are swapped |
| D029 | open and close, or the columns of two assets, are swapped |
| D030 | an adjustment factor cannot be used |
| D031 | the quotes are crossed: bid above ask |
| D032 | dividends are given twice |
| D033 | a half spread or a funding rate is not a fraction below 1 |
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from nca_trader.errors import BarError, argument


class Fault(NamedTuple):
    """One kind of fault: `say` tells it of the first faulty row.

    `mask` `[rows]` says where, None means the table as a whole; `repairs` are the options of
    `REPAIRS` that mend it, of which the first that was asked for is applied. `about` is the column.
    """

    code: str
    say: str
    remedy: str
    mask: np.ndarray | None = None
    repairs: tuple[str, ...] = ()
    about: str = ""

    def mended_by(self, repairs: frozenset[str]) -> str | None:
        """Which of the repairs asked for mends it, if any."""
        return next((repair for repair in self.repairs if repair in repairs), None)


def refuse(source: str, faults: Iterable[Fault], where: Callable[[int], str] = str) -> None:
    """Raises one `BarError` that lists every fault; silent where there is none.

    `where(row)` names a row as its reader knows it, e.g. "line 12".
    """
    lines = []
    for fault in faults:
        place, remedy = "", fault.remedy
        if fault.mask is not None:
            rows = np.flatnonzero(fault.mask)
            more = f" and {len(rows) - 1:,} more" if len(rows) > 1 else ""
            place = f"{where(int(rows[0]))}{more}: "
        if fault.repairs:
            remedy += ", or pass " + " or ".join(argument("repair", name) for name in fault.repairs)
        lines.append((f"{fault.code} {place}{fault.say}.", f"{remedy}."))
    if len(lines) == 1:
        raise BarError(f"{source}: {' '.join(lines[0])}")
    if lines:
        pairs = [(f"  {first}", f"       {second}") for first, second in lines]
        raise BarError(f"{source}: {len(lines)} problems", *itertools.chain(*pairs))
