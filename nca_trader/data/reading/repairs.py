"""Repairs a table as its user asked, and applies splits and dividends to its prices."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np
import pandas as pd

from nca_trader.config.reading import plain
from nca_trader.data.reading.faults import FACTORS, Fault, Kind, Request, Table, refusal
from nca_trader.errors import argument
from nca_trader.types import PRICES

REUSE = np.timedelta64(180, "D")  # without bars, at least
# Columns of vendors that hold adjusted prices or factors for them; the last three hold the ratio
# of a split on its day alone.
EVENTS = {"split_coefficient", "splitfactor", "stock_splits"}
ADJUSTMENTS = EVENTS | {
    "split_factor", "price_factor", "adj_close", "adjclose", "adjusted_close", "ajexdi",
    "factor", "adj_factor", "adjustment_factor",
}  # fmt: skip
SURE = 5.0  # logarithm of the odds for one of the two answers, at least
MARKED = 0.2  # as a logarithm, of a price from one bar to the next
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
    if any(fault.code == Kind.D021 for fault in faults) and stays.any():
        # Among rows that stay: a row that is dropped must not be the one kept of a pair.
        stays &= ~repeated_rows(table, stays, repairs)
    if not stays.any():
        raise refusal(table.name, Kind.D002, "no row is left after the repairs", "Correct the rows")
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
    columns = adjust(columns, np.ones(len(columns["time"]), dtype=bool))
    # The columns and texts that only detection needs are freed here.
    return Table(name=table.name, columns=columns, symbols=symbols, notes=table.notes)


def rows_that_stay(table: Table, faults: Iterable[Fault], repairs: frozenset[str]) -> np.ndarray:
    """Return `[rows]` bool, the rows with a time that no repair asked for drops."""
    stays = ~np.isnat(table["time"])
    for fault in faults:
        if fault.mask is not None and fault.fixed_by(repairs) in ("drop-nan", "drop-bad"):
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


def adjust(columns: Mapping[str, np.ndarray], among: np.ndarray) -> dict[str, np.ndarray]:
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


def without_signs(table: Table) -> Table:
    """Return the table with negative prices as their sizes."""
    sizes = {name: np.abs(table[name]) for name in PRICES}
    number = int((table["close"] < 0.0).sum())
    note = f"{number:,} negative closes were taken as their sizes."
    return dataclasses.replace(
        table, columns=table.columns | sizes, notes=[*table.notes, *[note] * (number > 0)]
    )


def are_marked(close: np.ndarray, code: np.ndarray) -> bool:
    """Whether closes change their sign and hardly their size, as CRSP marks a mean of quotes."""
    size = np.abs(close)
    turns = (close[1:] * close[:-1] < 0.0) & (code[1:] == code[:-1])
    with np.errstate(all="ignore"):
        moves = np.abs(np.diff(np.log(size)))[turns]
    # A price that falls below 0 is small where it does.
    usual = np.median(size[1:][turns]) > 0.5 * np.nanmedian(size) if turns.any() else False
    return bool(usual and np.median(moves) < MARKED)


def with_splits(table: Table, request: Request) -> Table:
    """Return the table with a `split` factor in each row, also of ratios and of splits as given.

    Raises:
      BarError: a split was given of a symbol or a day that divides no bars.
    """
    columns, notes = dict(table.columns), list(table.notes)
    code, time = columns["symbol"], columns["time"]
    if "split" in columns:
        levels = _levels(plain(request.columns["split"]), columns["split"], code, time)
        notes += ["Splits are ratios on their days alone."] * (levels is not columns["split"])
        columns["split"] = levels
    for symbol, day, ratio in request.splits:
        if symbol not in table.symbols:
            remedy = f"Choose from {', '.join(table.symbols)}"
            raise refusal(table.name, Kind.D024, f"no symbol {symbol!r} of a split", remedy)
        begin = pd.Timestamp(day, tz=request.timezone or "UTC").tz_convert(None).to_datetime64()
        own = code == table.symbols.index(symbol)
        later = own & (time >= begin)
        if not later.any() or not (own & (time < begin)).any():
            say = f"{symbol} has no bars on both sides of its split on {day}"
            raise refusal(table.name, Kind.D026, say, "Correct the date")
        columns["split"] = columns.get("split", np.ones(len(code))) * np.where(later, ratio, 1.0)
        notes.append(f"Split of {symbol} on {day} by {ratio:.6g}, as given.")
    return dataclasses.replace(table, columns=columns, notes=notes)


def _levels(name: str, value: np.ndarray, code: np.ndarray, time: np.ndarray) -> np.ndarray:
    """Return split factors `[rows]`: the running product of ratios that stand on their days alone.

    Ratios stand between rows of 1, or of 0 where most are 0; a column of factors keeps each value
    until the next split, and is returned as it is.
    """
    rest = 0.0 if (value == 0.0).sum() > (value == 1.0).sum() else 1.0
    rows = np.lexsort((time, code))
    ratio, event = value[rows], value[rows] != rest
    if not (np.isfinite(ratio) & ((ratio > 0.0) | ~event)).all():
        return value
    same = code[rows[1:]] == code[rows[:-1]]
    # Each ratio with a row of its symbol before it and one behind it; the others show nothing.
    inner = np.concatenate(([False], same[:-1] & same[1:], [False]))[: len(rows)]
    alone = event[:-1] & event[1:] & same  # two in a row
    if alone.any() or not (name in EVENTS or (event & inner).any()):
        return value
    levels = np.empty_like(value)
    levels[rows] = pd.Series(np.where(event, ratio, 1.0)).groupby(code[rows]).cumprod()
    return levels


def settle_dividends(table: Table) -> Table:
    """Return the table without dividends that its prices are adjusted for, or with a question.

    On an ex-date a price as traded opens lower by about the dividend, and an adjusted one does not.
    The slope of these returns on the yields is thus 1 or 0, with an error that follows from the
    other nights of each symbol. Both are equally likely at first.
    """
    if not table.vendor or "cash_dividend" not in table:
        return table
    before, after = following_bars(table)
    paid = np.maximum(table["cash_dividend"][after] / table["close"][before], 0.0)
    if not (number := int((paid > 0).sum())):
        return table
    odds = odds_of_nights(table, before, after, paid)
    if odds > SURE:
        return table
    if odds < -SURE:
        note = f"Prices are adjusted for dividends: on {number:,} ex-dates they do not drop."
        columns = {k: v for k, v in table.columns.items() if k != "cash_dividend"}
        return dataclasses.replace(table, columns=columns, notes=[*table.notes, note])
    say = f"{number:,} ex-dates do not show whether prices are adjusted for the dividends"
    ways = (argument("columns", f"cash_dividend={way}") for way in ("-", "COLUMN"))
    remedy = "Pass {} if they are, and {} if they are as traded".format(*ways)
    return dataclasses.replace(table, faults=[*table.faults, Fault(Kind.D036, say, None, remedy)])


def following_bars(table: Table) -> tuple[np.ndarray, np.ndarray]:
    """Return rows `[n]` and `[n]` of bars of an asset, each with the next one."""
    code, time = table["symbol"], table["time"]
    known = (table["open"] > 0.0) & (table["close"] > 0.0) & ~np.isnat(time)
    rows = np.flatnonzero(table["present"] & known)
    rows = rows[np.lexsort((time[rows], code[rows]))]
    same = code[rows[1:]] == code[rows[:-1]]
    return rows[:-1][same], rows[1:][same]


def odds_of_nights(table: Table, before: np.ndarray, after: np.ndarray, paid: np.ndarray) -> float:
    """Return the logarithm of the odds that prices fall by what is paid, over that they do not.

    Args:
      table: the bars.
      before: `[n]` rows.
      after: `[n]` the rows of the bars that follow them.
      paid: `[n]`, as a fraction of the price before; 0 of a night on which nothing is.
    """
    with np.errstate(all="ignore"):
        night = np.log(table["open"][after] / table["close"][before])
    usual = pd.Series(np.abs(np.where(paid != 0.0, np.nan, night)))
    noise = usual.groupby(table["symbol"][after]).transform("median").fillna(np.inf)
    ex = np.flatnonzero((paid != 0.0) & np.isfinite(night))
    noise = np.maximum(1.5 * noise, 1e-5).to_numpy()[ex]
    paid, drop = np.abs(paid[ex]), -night[ex] * np.sign(paid[ex])
    drop = np.clip(drop, -3 * noise, paid + 3 * noise)  # news moves a price by more
    # The slope is 1 or 0, and its weight the inverse of its variance.
    return float(np.sum((paid * drop - 0.5 * paid**2) / noise**2))


def gaps_of_half_a_year(time: np.ndarray, code: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Return places of the first bar after half a year without a row.

    A row whose `present` is False does not count as such a gap.

    Args:
      time: `[n]` times of the rows, which are in order of symbol and time.
      code: `[n]` the number of each row's symbol.
      present: `[n]` whether the row is a bar.
    """
    inside = (code[1:] == code[:-1]) & present[1:] & present[:-1]
    long = inside & (np.diff(time) > REUSE)
    if not long.any():
        return np.zeros(0, dtype=int)
    step = np.diff(time) / np.timedelta64(1, "D")
    # Bars of a quarter or a year are always as far apart as that.
    return np.flatnonzero(long & (step > 20 * typical(step, inside, code))) + 1


def typical(value: np.ndarray, inside: np.ndarray, code: np.ndarray) -> np.ndarray:
    """Return `[n - 1]` the median of `value` `[n - 1]` within each row's symbol."""
    series = pd.Series(np.where(inside, value, np.nan))
    return series.groupby(code[1:]).transform("median").to_numpy()
