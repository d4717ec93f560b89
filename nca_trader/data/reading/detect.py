"""Finds the faults of a table of bars, without changing it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd

from nca_trader.config.reading import INCOME
from nca_trader.data.reading import forensic
from nca_trader.data.reading.faults import (
    FACTORS,
    Code,
    Fault,
    Request,
    Table,
    adjusted,
    repeated_rows,
    rows_that_stay,
)
from nca_trader.data.reading.forensic import Series
from nca_trader.data.reading.parse import LONGEST, NUMBERS, is_name, spread_columns
from nca_trader.data.reading.times import Times
from nca_trader.errors import argument
from nca_trader.types import PRICES

SURE = 5.0  # logarithm of the odds for one of the two answers, at least
SLACK = 1e-9  # relative: vendors' adjusted prices are off by rounding
BACK_ADJUSTED = (
    "; adjust a back-adjusted future by ratios instead of differences, or add an offset to all its "
    "prices, whose returns are then of that sum"
)
# A row with one of these faults cannot be compared with the bars around it.
ROW_FAULTS = {
    *(Code.D006, Code.D007, Code.D008, Code.D009, Code.D010, Code.D011, Code.D012),
    *(Code.D022, Code.D030, Code.D031, Code.D033),
}


def detect(table: Table, request: Request) -> list[Fault]:
    """Find all faults of a file: of its columns, of single rows, and between rows.

    Between rows only those are compared that the repairs asked for leave.

    Args:
      table: all rows.
      request: the repairs asked for, and what the user said of times.

    Returns:
      The faults in the order in which a message lists them.
    """
    faults = sorted(
        table.faults,
        key=lambda fault: (_column_rank(fault), fault.code.name, fault.fixes, fault.say),
    )
    faults += time_faults(table.times, request.timezone) if table.times else []
    faults += value_faults(table) + factor_faults(table) + extra_faults(table)
    faults += line_faults(table)
    for name, value in table.others:
        if not table.columns.keys() & FACTORS:
            mask, use = forensic.unadjusted(name, value, table["close"], table["symbol"])
            if mask.any():
                say = f"{name} = {value[mask][0]:.6g} adjusts the prices, which are taken as they "
                remedy = f"Pass {argument('columns', use)}"
                faults.append(Fault(Code.D027, f"{say}stand", mask, remedy))
    if any(fault.code == Code.D005 and fault.about in ("time", "symbol") for fault in faults):
        return faults  # the order of rows depends on that column
    # Rows that a repair drops are not compared with others, as the bars will not hold them.
    stays = rows_that_stay(table, faults, request.repairs)
    between = order_faults(table, stays, request.timezone, request.dates)
    if any(fault.code == Code.D021 for fault in between):
        stays = stays & ~repeated_rows(table, stays, request.repairs)
    if any(fault.code in (Code.D014, Code.D015) for fault in faults):
        # Without its zone, a clock that is put back shows an hour twice.
        between = [fault for fault in between if fault.code != Code.D021]
    # A row's own fault would show again as a jump to its neighbours.
    sound = stays
    for fault in faults:
        if fault.mask is not None and fault.code in ROW_FAULTS:
            sound = sound & ~fault.mask
    columns = adjusted(table.columns, stays)
    return faults + between + series_faults(columns, table.symbols, sound)


def settle_dividends(table: Table) -> Table:
    """Return the table without dividends that its prices are adjusted for, or with a question.

    On an ex-date a price as traded opens lower by about the dividend, and an adjusted one does not.
    The slope of these returns on the yields is thus 1 or 0, with an error that follows from the
    other nights of each symbol. Both are equally likely at first.
    """
    if not table.vendor or "cash_dividend" not in table:
        return table
    names = ("symbol", "time", "open", "close", "cash_dividend", "present")
    code, time, opens, close, cash, present = (table[name] for name in names)
    rows = np.flatnonzero(present & (opens > 0) & (close > 0) & ~np.isnat(time))
    rows = rows[np.lexsort((time[rows], code[rows]))]
    same = code[rows[1:]] == code[rows[:-1]]
    before, after = rows[:-1][same], rows[1:][same]
    night, paid = np.log(opens[after] / close[before]), cash[after] / close[before]
    usual = pd.Series(np.abs(np.where(paid > 0, np.nan, night)))
    noise = np.maximum(1.5 * usual.groupby(code[after]).transform("median").fillna(np.inf), 1e-5)
    ex = np.flatnonzero(paid > 0)
    if not len(ex):
        return table
    drop, paid, noise = -night[ex], paid[ex], noise.to_numpy()[ex]
    drop = np.clip(drop, -3 * noise, paid + 3 * noise)  # news moves a price by more
    weight = float(np.sum((paid / noise) ** 2))
    slope = float(np.sum(paid * drop / noise**2)) / weight if weight else 0.5
    if abs(slope - 0.5) * weight > SURE:
        if slope > 0.5:
            return table
        note = f"Prices are adjusted for dividends: on {len(ex):,} ex-dates they do not drop."
        columns = {k: v for k, v in table.columns.items() if k != "cash_dividend"}
        return dataclasses.replace(table, columns=columns, notes=[*table.notes, note])
    say = f"{len(ex):,} ex-dates do not show whether prices are adjusted for the dividends"
    ways = (argument("columns", f"cash_dividend={way}") for way in ("-", "COLUMN"))
    remedy = "Pass {} if they are, and {} if they are as traded".format(*ways)
    return dataclasses.replace(table, faults=[*table.faults, Fault(Code.D036, say, None, remedy)])


def _column_rank(fault: Fault) -> int:
    """Order faults of values by their column, those of no column last."""
    return NUMBERS.index(fault.about) if fault.about in NUMBERS else len(NUMBERS)


def time_faults(times: Times, timezone: str | None) -> list[Fault]:
    """Find times that cannot be read or placed; `timezone` is that of the file."""
    if (order := times.order) is not None:
        if order["day_first"].any():
            names = sorted(("day_first", "month_first"), key=lambda name: order[name].sum())
            few, most = (order.texts[name] for name in names)
            say = f"time {few!r} has day and month in another order than {most!r}"
            return [Fault(Code.D017, say, order[names[0]])]
        say = f"time {order.texts['known']!r}: no date shows which is the day, which the month"
        ways = " or ".join(argument("dates", name) for name in ("dmy", "mdy"))
        return [Fault(Code.D017, say, order["known"], f"Pass {ways}")]
    texts, zone = times.marks.texts, f"{argument('timezone')}, e.g. "
    zone += argument("timezone", "America/New_York")
    faults = []
    unread, naive, skipped = (times.marks[name] for name in ("unread", "naive", "skipped"))
    if unread.any():
        faults.append(Fault(Code.D013, f"time {texts['unread']!r} can't be read", unread))
    if skipped.any():
        say = f"time {texts['skipped']!r} is skipped or repeated by the clock of {timezone}"
        faults.append(Fault(Code.D016, say, skipped))
    if naive.any() and timezone is None:
        first = f"time {texts['naive']!r} has no"
        if times.num_aware:
            say = f"{first} UTC offset but {times.num_aware:,} others do"
            faults.append(Fault(Code.D014, say, naive, f"Add an offset or pass {zone}"))
        elif times.clocked:
            remedy = f"Add a UTC offset or pass {zone}"
            faults.append(Fault(Code.D015, f"{first} time zone", naive, remedy))
    return faults


class _Checks:
    """Collects faults of single rows; a row counts in the first check that it fails.

    Rows whose `present` is False are not checked.
    """

    def __init__(self, table: Table):
        self.table, self.left = table, table["present"].copy()
        self.faults: list[Fault] = []

    def fail(self, code: Code, wrong: np.ndarray, say: str, about: str = "", **options) -> None:
        """Add the rows where `wrong`; `say` is filled with the columns of the first one."""
        mask = wrong & self.left
        if not mask.any():
            return
        row = int(np.argmax(mask))
        cells = {name: column[row] for name, column in self.table.columns.items()}
        if code == Code.D009:  # the table holds NaN in place of the text
            cells[about] = self.table.unread[about].text(row)
        say = say.format(**cells)
        self.faults.append(Fault(code, say, mask, about=about, **options))
        if "no-volume" not in self.faults[-1].fixes:  # such a row stays, so other checks are due
            self.left &= ~mask

    def number(self, name: str) -> np.ndarray:
        """Check that a column is a finite number; return it."""
        value, says = self.table[name], f"{name} = {{{name}}}"
        if name in self.table.unread:
            unread = self.table.marked(self.table.unread[name].rows)
            self.fail(Code.D009, unread, f"{says} is not a number", name)
        if np.isfinite(
            value
        ).all():  # a bar of a feed is checked alone, where each check costs 1 us
            return value
        repairs = ("no-volume", "drop-nan") if name == "volume" else None
        self.fail(Code.D006, np.isnan(value), says, name, repairs=repairs)
        self.fail(Code.D007, np.isinf(value), says, name)
        return value


def value_faults(table: Table) -> list[Fault]:
    """Find faults of open, high, low, close and volume, row by row."""
    checks = _Checks(table)
    for name in ("close", "open", "high", "low"):  # the close first: it may stand in for the others
        remedy = Code.D008.remedy + BACK_ADJUSTED
        wrong = checks.number(name) <= 0
        checks.fail(Code.D008, wrong, f"{name} = {{{name}}}", name, remedy=remedy)
    # A volume of 0 is valid: a bar in which nothing was traded.
    checks.fail(Code.D012, checks.number("volume") < 0, "volume = {volume}", "volume")
    o, h, low, c = (table[name] for name in PRICES)
    bar = "open {open}, high {high}, low {low}, close {close}"
    # Exact comparisons would refuse prices that a vendor has adjusted.
    slack = SLACK * np.abs(c)
    checks.fail(Code.D010, h < low - slack, f"high below low: {bar}")
    outside = (np.maximum(o, c) > h + slack) | (np.minimum(o, c) < low - slack)
    checks.fail(Code.D011, outside, f"open or close outside low to high: {bar}")
    return sorted(checks.faults, key=_column_rank)


def factor_faults(table: Table) -> list[Fault]:
    """Find present rows whose `split` or `dividend` factor is missing, infinite or not above 0."""
    faults = []
    for name in FACTORS:
        if name not in table:
            continue
        factor, present = table[name], table["present"]
        missing, usable = np.isnan(factor), np.isfinite(factor) & (factor > 0)
        for mask, repair in ((~missing & ~usable, "drop-bad"), (missing, "drop-nan")):
            if (mask & present).any():
                say = f"{name} factor = {factor[mask & present][0]}"
                faults.append(Fault(Code.D030, say, mask & present, repairs=(repair,)))
    return faults


def extra_faults(table: Table) -> list[Fault]:
    """Find faults of quotes, spreads, dividends paid in cash and funding, row by row."""
    checks = _Checks(table)
    # A computed half spread is checked by its source columns, which the user knows.
    spread = spread_columns(table.columns.keys() - {"half_spread"}) or spread_columns(table.columns)
    for name in (*spread, *(name for name in INCOME if name in table)):
        value = checks.number(name)
        if name in ("bid", "ask"):
            checks.fail(Code.D008, value <= 0.0, f"{name} = {{{name}}}", name)
        elif name != "funding":
            checks.fail(Code.D012, value < 0.0, f"{name} = {{{name}}}", name)
    if "bid" in table:
        say = "crossed quotes: bid {bid} above ask {ask}"
        checks.fail(Code.D031, table["ask"] < table["bid"], say, "ask")
    wide = "{} = {{{}}} is not a fraction below 1"
    if spread:
        at = spread[0]
        checks.fail(Code.D033, table["half_spread"] >= 1.0, wide.format(at, at), at)
    if "funding" in table:  # either sign
        wrong = np.abs(table["funding"]) >= 1.0
        checks.fail(Code.D033, wrong, wide.format("funding", "funding"), "funding")
    return sorted(checks.faults, key=_column_rank)


def line_faults(table: Table) -> list[Fault]:
    """Find lines that end early, symbols that are not names, and dividends given twice."""
    faults = []
    if table.short:
        say = "fewer fields than the other lines"
        remedy = "Complete or remove the line"
        faults.append(Fault(Code.D022, say, table.marked(table.short), remedy))
    names = table.symbols
    # A symbol goes into messages, file names and reports, so it must be safe to print.
    unnamed = np.isin(table["symbol"], [i for i, name in enumerate(names) if not name])
    wild = np.isin(table["symbol"], [i for i, name in enumerate(names) if not is_name(name)])
    if unnamed.any():
        faults.append(Fault(Code.D024, "the symbol is empty", unnamed, "Write it there"))
    if wild.any():
        name = names[table["symbol"][int(np.argmax(wild))]][:LONGEST]
        say = f"the symbol {name!r} does not print or is longer than {LONGEST} characters"
        faults.append(Fault(Code.D024, say, wild))
    first = {name.casefold(): i for i, name in reversed([*enumerate(names)])}
    alike = np.isin(
        table["symbol"], [i for i, name in enumerate(names) if first[name.casefold()] != i]
    )
    if alike.any():
        name = names[table["symbol"][int(np.argmax(alike))]]
        say = f"the symbols {names[first[name.casefold()]]!r} and {name!r} differ in case alone"
        faults.append(Fault(Code.D024, say, alike, "Write them alike", ("keep-case",)))
    if {"dividend", "cash_dividend"} <= table.columns.keys():
        say = "dividends are given twice, as a factor of the prices and as cash"
        remedy = f"Leave the factor out, or the cash by {argument('columns', 'cash_dividend=-')}"
        faults.append(Fault(Code.D032, say, None, remedy))
    return faults


def order_faults(
    table: Table, among: np.ndarray, timezone: str | None, dates: str | None
) -> list[Fault]:
    """Find rows that repeat a time of their symbol, or whose time is before the row above.

    Where dates with day and month exchanged explain these, that is the only fault: sorted or
    dropped, such rows would still have wrong dates.

    Args:
      table: all rows.
      among: `[rows]` bool, the rows that are compared.
      timezone: name of the zone of the times in the file, as in `read_bars`; None for UTC.
      dates: order of day and month, as in `read_bars`.
    """
    time, close = table["time"], table["close"]
    rows, inside, forward = _steps(table, among)
    if (forward | ~inside).all():
        return []
    local = time
    if timezone is not None:
        local = pd.DatetimeIndex(time, tz="UTC").tz_convert(timezone).tz_localize(None).to_numpy()
    # Day and month exchanged, where the day can be a month; both count from 0.
    day = (local.astype("datetime64[D]") - local.astype("datetime64[M]")).astype(int)
    month = local.astype("datetime64[M]").astype(int) % 12
    moved = (local.astype("datetime64[Y]").astype("datetime64[M]") + day).astype("datetime64[D]")
    clock = local - local.astype("datetime64[D]")
    other = np.where(day < 12, moved + month + clock, local)

    def path(each: np.ndarray) -> tuple[float, int]:
        step = np.diff(each)[inside].astype(np.int64).astype(np.float64)
        back = min((step < 0).sum(), (step > 0).sum()) + (step == 0).sum()
        return float(np.abs(step).sum()), int(back)

    # Exchanged, the rows run in one direction by far shorter steps. Sorting them would hide the
    # wrong dates, so no repair fixes this fault.
    (short, few), (long, many) = path(other[rows]), path(local[rows])
    if 2 * short < long and 2 * few <= many:
        mask = among & (other != local)
        wrong, right = (str(t[int(np.argmax(mask))])[:10] for t in (local, other))
        say = f"day and month are exchanged in dates: {wrong} is {right}, and so in order"
        remedy = Code.D019.remedy
        if dates is not None and (day[among] < 12).all():  # no date proves the order
            remedy += f", or pass {argument('dates', 'mdy' if dates == 'dmy' else 'dmy')}"
        return [Fault(Code.D019, say, mask, remedy)]
    faults = []
    again = repeated_rows(table, among)
    if again.any():
        row = int(np.argmax(again))
        same = among & (time == time[row]) & (table["symbol"] == table["symbol"][row])
        first = int(np.argmax(same))
        words = "the same close" if close[first] == close[row] else "different close"
        stamp = np.datetime_as_string(time[row], unit="s")
        say = f"duplicate time {stamp}Z with {words} ({close[first]} and {close[row]})"
        faults.append(Fault(Code.D021, say, again))
        # Without the repeated rows, the others may be in order.
        rows, inside, forward = _steps(table, among & ~again)
    back = inside & ~forward
    if back.any():
        newest_first = back.sum() == inside.sum()
        say = "the time is before that of the row above"
        say = "times run backwards, newest first" if newest_first else say
        places = np.arange(len(table))[rows]
        faults.append(Fault(Code.D020, say, table.marked([places[1:][back]])))
    return faults


def _steps(table: Table, among: np.ndarray) -> tuple[slice | np.ndarray, np.ndarray, np.ndarray]:
    """Return rows by symbol, in file order, and for each step: same symbol, and later time."""
    rows = slice(None) if among.all() else np.flatnonzero(among)
    symbol = table["symbol"][rows]
    if (symbol[1:] < symbol[:-1]).any():
        order = np.argsort(symbol, kind="stable")
        rows, symbol = order if isinstance(rows, slice) else rows[order], symbol[order]
    time = table["time"][rows]
    return rows, symbol[1:] == symbol[:-1], time[1:] > time[:-1]


def series_faults(
    columns: dict[str, np.ndarray], symbols: list[str], sound: np.ndarray
) -> list[Fault]:
    """Find faults between bars of one symbol in order of time.

    Args:
      columns: `[rows]` each, of all rows, with adjusted prices.
      symbols: the names.
      sound: `[rows]` bool, the rows that are compared.
    """
    rows = slice(None) if sound.all() else np.flatnonzero(sound)
    code, time = columns["symbol"][rows], columns["time"][rows]
    later = (code[1:] > code[:-1]) | ((code[1:] == code[:-1]) & (time[1:] >= time[:-1]))
    if not later.all():  # else the slice stays, which copies nothing
        order = np.lexsort((time, code))
        rows = order if isinstance(rows, slice) else rows[order]
    code, time, present = (columns[name][rows] for name in ("symbol", "time", "present"))
    faults: list[Fault] = []

    def add(code: Code, at: np.ndarray, say: str, **options) -> None:
        if len(at):
            mask = np.zeros(len(sound), dtype=bool)
            mask[at if isinstance(rows, slice) else rows[at]] = True
            faults.append(Fault(code, say, mask, **options))

    # Before missing bars are left out: their rows show that a gap is known.
    parted = forensic.gaps_of_half_a_year(time, code, present)
    if len(parted):
        first, own = int(parted[0]), np.flatnonzero(code == code[parted[0]])
        until = next((int(at) for at in parted[1:] if code[at] == code[first]), int(own[-1]) + 1)
        days = [str(time[at])[:10] for at in (own[0], first - 1, first, until - 1)]
        say = f"{symbols[code[first]]} has bars from {days[0]} to {days[1]} and again from "
        add(Code.D025, parted, f"{say}{days[2]} to {days[3]}: a ticker used again, or a gap")
    checked = present & (columns["close"][rows] > 0)
    if not checked.all():  # a missing bar carries an old price that was not traded
        rows = np.flatnonzero(checked) if isinstance(rows, slice) else rows[checked]
    bars = Series(*(columns[name][rows] for name in ("symbol", "time", *PRICES, "volume")))
    at, say = forensic.jump_fault(bars, symbols)
    example = argument("columns", "split=COLUMN")
    add(Code.D026, at, say, remedy=f"{Code.D026.remedy}, e.g. {example}")
    return faults
