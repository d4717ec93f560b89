"""What a reader of bars finds wrong, and how that is told: all of it, each with its remedy.

Each kind of fault has a code that does not change:

D001 unreadable, D002 no rows, D003 no close, D004 no time, D005 other column missing or ambiguous,
D006 value missing, D007 infinite, D008 price not positive, D009 not a number, D010 high below low,
D011 open or close outside low to high, D012 negative volume,
spread or dividend, D013 time unreadable, D014 times with
and without UTC offset, D015 no time zone, D016 time that the zone's clock skips or repeats,
D017 day and month not told apart, D018 comma that may be a decimal one, D020 not increasing,
D021 duplicate, D022 more or fewer fields than names, D023 no header, D024 symbol missing or
unknown, D025 years between two spans of a symbol, D026 jump between bars, D027 adjustment in the
file but not applied, D028 volume swapped with another column, D029 open and close swapped, or the
columns of two assets, D030 adjustment factor not usable, D031 crossed quotes, D032 dividends given
twice, D033 half spread or funding rate that is no fraction.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from nca_trader.errors import BarError, argument

REPAIRS = {
    "sort": "put rows in order of time",
    "keep-first": "of rows with the same time and symbol, keep the first",
    "keep-last": "of rows with the same time and symbol, keep the last",
    "drop-nan": "drop rows in which a value is missing",
    "drop-bad": "drop rows whose time or values are impossible",
    "widen": "widen high and low until they take in open and close",
    "close-only": "take a missing open, high or low column from the close",
    "no-volume": "take missing volume as 0",
    "swap-volume": "put volume back where price shows that it stands in the other column",
    "part-reuse": "of a symbol with half a year without bars, make each span an asset of its own",
    "keep-gaps": "take half a year without bars as a gap of one asset",
    "keep-jumps": "take jumps of the price, and gaps as of swapped columns, as real",
    "unadjusted": "take prices as they stand where the file holds an adjustment as well",
}
EXCLUSIVE = (("keep-first", "keep-last"), ("part-reuse", "keep-gaps"))


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


def parse_repair(repair: str | Iterable[str] | None) -> frozenset[str]:
    """The repairs asked for, from "sort,drop-nan" or a sequence; refuses what is not known."""
    given = repair.split(",") if isinstance(repair, str) else repair or ()
    names = frozenset(name.strip() for name in given) - {""}
    for name in sorted(names - REPAIRS.keys()):
        near = difflib.get_close_matches(name, REPAIRS, n=1, cutoff=0.0)[0]
        raise BarError(f"unknown repair {name!r}; did you mean {near!r}?")
    for one, other in EXCLUSIVE:
        if names >= {one, other}:
            raise BarError(f"repairs {one} and {other} exclude each other; give one.")
    return names


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
        body = "".join(f"\n  {first}\n       {second}" for first, second in lines)
        raise BarError(f"{source}: {len(lines)} problems{body}")
