"""Repairs a table of bars as its user asked for, and says what was done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import pandas as pd

from nca_trader.data.reading.faults import Code, Fault, refusal
from nca_trader.data.reading.forensic import gaps_of_half_a_year
from nca_trader.data.reading.parse import FACTORS, Table
from nca_trader.types import PRICES

DROPS = ("drop-nan", "drop-bad")
FLAT = 0.1  # of the bars: more than that without a range is worth a word


def repair(table: Table, faults: Iterable[Fault], repairs: frozenset[str]) -> Table:
    """Returns the rows after the repairs asked for, with adjusted prices.

    Args:
      table: all rows.
      faults: what is wrong with them.
      repairs: those asked for.

    Raises:
      BarError: no row is left.
    """
    stays = rows_that_stay(table, faults, repairs)
    # Of the faults between rows only this one drops any; "sort" is done when rows get their places.
    if any(fault.code == Code.D021 for fault in faults) and stays.any():
        stays &= ~repeated_rows(table, stays, repairs)
    if not stays.any():
        raise refusal(table.name, Code.D002, "no row is left after the repairs", "Correct the rows")
    columns = table.columns | {"volume": volume_put_back(table["volume"], faults, repairs)}
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
    # After the symbols are parted: each span begins at its own first factor.
    columns = adjusted(columns, np.ones(len(columns["time"]), dtype=bool))
    # What only detection needs is not kept.
    return Table(name=table.name, columns=columns, symbols=symbols)


def rows_that_stay(table: Table, faults: Iterable[Fault], repairs: frozenset[str]) -> np.ndarray:
    """Returns `[rows]` bool, the rows with a time that no repair asked for drops."""
    stays = ~np.isnat(table["time"])
    for fault in faults:
        if fault.mask is not None and fault.fixed_by(repairs) in DROPS:
            stays &= ~fault.mask
    return stays


def repeated_rows(
    table: Table, among: np.ndarray, repairs: frozenset[str] = frozenset()
) -> np.ndarray:
    """Returns `[rows]` bool: of rows `among` that share time and symbol, all but the one kept."""
    keys = pd.DataFrame({name: table[name][among] for name in ("time", "symbol")}, copy=False)
    mask = np.zeros(len(table), dtype=bool)
    mask[among] = keys.duplicated(keep="last" if "keep-last" in repairs else "first")
    return mask


def volume_put_back(
    volume: np.ndarray, faults: Iterable[Fault], repairs: frozenset[str]
) -> np.ndarray:
    """Returns `[rows]` the volume, from the other column where it was swapped with it."""
    for fault in faults:
        if fault.mask is not None and fault.values is not None and fault.fixed_by(repairs):
            volume = np.where(fault.mask, fault.values, volume)
    return volume


def adjusted(columns: Mapping[str, np.ndarray], among: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the columns with prices adjusted for splits and dividends: f_t / f_first times them.

    f is split times dividend, f_first that of the symbol's first present row. Volume is divided by
    split_t / split_first, dividends leave it. Cash per unit is split as its price is. Vendors
    divide by the last factor, which is not known at t: relative to the first one, a later split
    changes no earlier bar.

    Args:
      columns: `[rows]` each.
      among: `[rows]` bool, the rows among which a symbol's first is looked for.
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
    """Returns what a report must say of the bars: repairs, adjustment, and bars of closes alone."""
    done = [
        f"{fault.code.name} by {fault.fixed_by(repairs)}"
        + ("" if fault.mask is None else f" ({fault.mask.sum():,} rows)")
        for fault in faults
    ]
    notes = [f"Repaired on reading: {', '.join(dict.fromkeys(done))}."] if done else []
    factors = [name for name in FACTORS if name in table]
    if factors:
        notes.append(f"Prices adjusted by {' and '.join(factors)}, relative to the first bar.")
    flat = (table["high"] == table["low"]) & (table["open"] == table["close"]) & table["present"]
    count = int(table["present"].sum())
    if flat.sum() > FLAT * count and "close-only" not in repairs:
        notes.append(f"{flat.sum():,} of {count:,} bars have open = high = low = close.")
    return " ".join(notes)


def _parted(columns: Mapping[str, np.ndarray], symbols: list[str]) -> tuple[np.ndarray, list[str]]:
    """Gives every later span of a symbol the year of its first bar: FB, FB-2012.

    Returns codes `[rows]` and names, in the order of the assets' first rows.
    """
    time, code = columns["time"], columns["symbol"]
    rows = np.lexsort((time, code))
    names, out = list(symbols), code.copy()
    for place in gaps_of_half_a_year(time[rows], code[rows], columns["present"][rows]):
        later = rows[place:][code[rows[place:]] == code[rows[place]]]
        names.append(f"{symbols[code[rows[place]]]}-{str(time[rows[place]])[:4]}")
        out[later] = len(names) - 1
    new, order = pd.factorize(out)
    return new.astype(np.int32), [names[i] for i in order]
