"""Finds the faults of a table of bars, and makes the repairs that were asked for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import pandas as pd

from nca_trader.config.reading import INCOME, NO_COLUMN
from nca_trader.data.reading.adjustments import adjust, ask_adjustments, name_of
from nca_trader.data.reading.faults import (
    FACTORS,
    FALSE,
    TRUE,
    Fault,
    Kind,
    Labels,
    Request,
    Table,
    refusal,
    refuse,
)
from nca_trader.data.reading.parse import LONGEST, NUMBERS, is_name, spread_columns
from nca_trader.errors import argument
from nca_trader.types import PRICES

SLACK = 1e-9  # relative: vendors' adjusted prices are off by rounding
BACK_ADJUSTED = (
    "; adjust a back-adjusted future by ratios instead of differences, or add an offset to all its "
    "prices, whose returns are then of that sum"
)
JUMP = np.log(1.8)  # at least, and
JUMP_MOVES = 25  # times the symbol's median move: wild symbols jump higher
RATIOS = (  # shares after and before, of the splits that are common
    (5, 4), (4, 3), (3, 2), (5, 3), (2, 1), (5, 2), (3, 1), (4, 1), (5, 1), (6, 1), (7, 1),
    (8, 1), (10, 1), (15, 1), (20, 1), (25, 1), (30, 1), (50, 1), (100, 1),
)  # fmt: skip
NEAR_RATIO = 0.025  # as logarithms: the price's own move overnight
SUSPECTS = 10_000  # moves by the ratio of a split that are looked at
SPLIT_MOVES = 8  # times the moves of the bars around, at least
AROUND = 50  # bars before and after, at most
QUIET = 12.0  # or this part of the jump: a price that opens a third lower on news moves on by more
CALM = 3.0  # times the range of the bars around, at most: news moves a price within the bar too
BUSY = 2.5  # times the volume of the bars before, at most
MOST_NAMED = 4  # splits that a message names
SEVERAL = 0.3  # of the rows repeat a time, at least, where they may be of several assets
# A row with one of these faults cannot be compared with the bars around it.
ROW_FAULTS = {
    *(Kind.D006, Kind.D007, Kind.D008, Kind.D009, Kind.D010, Kind.D011, Kind.D012),
    *(Kind.D022, Kind.D030, Kind.D031, Kind.D033),
}
REUSE = np.timedelta64(180, "D")  # without bars, at least
MARKED = 0.2  # as a logarithm, of a price from one bar to the next
FLAT = 0.1  # of the bars: if more have no range, the note says so
MOST_SHOWN = 4  # values of a column that a message names
JUMPS = 5.0  # times the usual move, of the price from one asset to the next
# Days, months, quarters and dates come in blocks, and name no asset.
CALENDAR = re.compile(
    r"(mon|tue|wed|thu|fri|sat|sun|jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*"
    r"|[qhw]\d\d?|(19|20)\d\d([-/. _]?([qhw]?\d\d?|[a-z]{3,9})){0,2}"
    r"|\d\d?[-/.]\d\d?[-/.](\d\d)?\d\d|\d{4}-\d\d-\d\d[T ]\d\d:\d\d.*",
    re.IGNORECASE,
)


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
    faults += table.time_faults
    faults += row_faults(table) + line_faults(table)
    faults += ask_adjustments(table, request)
    if any(fault.code == Kind.D005 and fault.about in ("time", "symbol") for fault in faults):
        return faults  # the order of rows depends on that column
    if (asked := ask_symbol(table, request)) is not None:
        return [*faults, asked]
    # Rows that a repair drops are not compared with others, as the bars will not hold them.
    stays = rows_that_stay(table, faults, request.repairs)
    between = order_faults(table, stays, request)
    stays = rows_that_stay(table, [*faults, *between], request.repairs)
    if any(fault.code in (Kind.D014, Kind.D015) for fault in faults):
        # Without its zone, a clock that is put back shows an hour twice.
        between = [fault for fault in between if fault.code != Kind.D021]
    # A row's own fault would show again as a jump to its neighbours.
    sound = stays
    for fault in faults:
        if fault.mask is not None and fault.code in ROW_FAULTS:
            sound = sound & ~fault.mask
    columns = adjust(table.columns, stays)
    return faults + between + series_faults(columns, table.symbols, sound, request.timezone)


def _column_rank(fault: Fault) -> int:
    """Order faults of values by their column, those of no column last."""
    return NUMBERS.index(fault.about) if fault.about in NUMBERS else len(NUMBERS)


class _Checks:
    """Collects faults of single rows; a row counts in the first check that it fails.

    Rows whose `present` is False are not checked.
    """

    def __init__(self, table: Table):
        self.table, self.left = table, table["present"].copy()
        self.faults: list[Fault] = []

    def fail(self, code: Kind, wrong: np.ndarray, say: str, about: str = "", **options) -> None:
        """Add the rows where `wrong`; `say` is filled with the columns of the first one."""
        mask = wrong & self.left
        if not mask.any():
            return
        row = int(np.argmax(mask))
        cells = {name: column[row] for name, column in self.table.columns.items()}
        if code == Kind.D009:  # the table holds NaN in place of the text
            cells[about] = self.table.unread[about].texts.get(row, "a text")
        say = say.format(**cells)
        self.faults.append(Fault(code, say, mask, about=about, **options))
        if "no-volume" not in self.faults[-1].fixes:  # such a row stays, so other checks are due
            self.left &= ~mask

    def number(self, name: str) -> np.ndarray:
        """Check that a column is a finite number; return it."""
        value, says = self.table[name], f"{name} = {{{name}}}"
        if name in self.table.unread:
            unread = np.isin(np.arange(len(value)), np.concatenate(self.table.unread[name].rows))
            self.fail(Kind.D009, unread, f"{says} is not a number", name)
        if np.isfinite(
            value
        ).all():  # a bar of a feed is checked alone, where each check costs 1 us
            return value
        repairs = ("no-volume", "drop-nan") if name == "volume" else None
        self.fail(Kind.D006, np.isnan(value), says, name, repairs=repairs)
        self.fail(Kind.D007, np.isinf(value), says, name)
        return value


def row_faults(table: Table) -> list[Fault]:
    """Find faults of the values of each row: of prices and volume, of factors, and of the rest."""
    return _price_faults(table) + _factor_faults(table) + _extra_faults(table)


def _price_faults(table: Table) -> list[Fault]:
    checks = _Checks(table)
    for name in ("close", "open", "high", "low"):  # the close first: it may stand in for the others
        remedy = Kind.D008.remedy + BACK_ADJUSTED
        wrong = checks.number(name) <= 0
        # A live bar is checked alone, without its symbol.
        marked = "symbol" in table and wrong.any() and are_marked(table["close"], table["symbol"])
        repairs = (*Kind.D008.repairs, *["absolute"] * bool(marked))
        checks.fail(Kind.D008, wrong, f"{name} = {{{name}}}", name, remedy=remedy, repairs=repairs)
    # A volume of 0 is valid: a bar in which nothing was traded.
    checks.fail(Kind.D012, checks.number("volume") < 0, "volume = {volume}", "volume")
    o, h, low, c = (table[name] for name in PRICES)
    bar = "open {open}, high {high}, low {low}, close {close}"
    # Exact comparisons would refuse prices that a vendor has adjusted.
    slack = SLACK * np.abs(c)
    with np.errstate(invalid="ignore"):  # rows with an infinite price have failed already
        below = h < low - slack
        outside = (np.maximum(o, c) > h + slack) | (np.minimum(o, c) < low - slack)
    checks.fail(Kind.D010, below, f"high below low: {bar}")
    checks.fail(Kind.D011, outside, f"open or close outside low to high: {bar}")
    return sorted(checks.faults, key=_column_rank)


def are_marked(close: np.ndarray, code: np.ndarray) -> bool:
    """Whether closes change their sign and hardly their size, as CRSP marks a mean of quotes."""
    size = np.abs(close)
    turns = (close[1:] * close[:-1] < 0.0) & (code[1:] == code[:-1])
    with np.errstate(all="ignore"):
        moves = np.abs(np.diff(np.log(size)))[turns]
    # A price that falls below 0 is small where it does.
    usual = np.median(size[1:][turns]) > 0.5 * np.nanmedian(size) if turns.any() else False
    return bool(usual and np.median(moves) < MARKED)


def _factor_faults(table: Table) -> list[Fault]:
    checks = _Checks(table)
    for name in (name for name in FACTORS if name in table):
        factor, say = table[name], f"{name} factor = {{{name}}}"
        wrong = (factor <= 0.0) | np.isinf(factor)
        checks.fail(Kind.D030, wrong, say, repairs=("drop-bad",))
        checks.fail(Kind.D030, np.isnan(factor), say, repairs=("drop-nan",))
    return checks.faults


def _extra_faults(table: Table) -> list[Fault]:
    checks = _Checks(table)
    # A computed half spread is checked by its source columns, which the user knows.
    spread = spread_columns(table.columns.keys() - {"half_spread"}) or spread_columns(table.columns)
    for name in (*spread, *(name for name in INCOME if name in table)):
        value = checks.number(name)
        if name in ("bid", "ask"):
            checks.fail(Kind.D008, value <= 0.0, f"{name} = {{{name}}}", name)
        elif name != "funding":
            checks.fail(Kind.D012, value < 0.0, f"{name} = {{{name}}}", name)
    if "bid" in table:
        say = "crossed quotes: bid {bid} above ask {ask}"
        checks.fail(Kind.D031, table["ask"] < table["bid"], say, "ask")
    wide = "{} = {{{}}} is not a fraction below 1"
    if spread:
        at = spread[0]
        checks.fail(Kind.D033, table["half_spread"] >= 1.0, wide.format(at, at), at)
    if "funding" in table:  # either sign
        wrong = np.abs(table["funding"]) >= 1.0
        checks.fail(Kind.D033, wrong, wide.format("funding", "funding"), "funding")
    return sorted(checks.faults, key=_column_rank)


def line_faults(table: Table) -> list[Fault]:
    """Find lines that end early, symbols that are not names, and dividends given twice."""
    faults = []
    if table.short is not None and table.short.any():
        say = "fewer fields than the other lines"
        remedy = "Complete or remove the line"
        faults.append(Fault(Kind.D022, say, table.short, remedy))
    names, code = table.symbols, table["symbol"]
    first = {name.casefold(): i for i, name in reversed([*enumerate(names)])}

    def found(wrong: Callable[[int], bool]) -> tuple[np.ndarray, str]:
        """Return the rows of symbols that are wrong, and the first one's name."""
        mask = np.isin(code, [i for i in range(len(names)) if wrong(i)])
        return mask, names[code[int(np.argmax(mask))]]

    unnamed, _ = found(lambda i: not names[i])
    if unnamed.any():
        faults.append(Fault(Kind.D024, "the symbol is empty", unnamed, "Write it there"))
    # A symbol goes into messages, file names and reports, so it must be safe to print.
    wild, name = found(lambda i: not is_name(names[i]))
    if wild.any():
        say = f"the symbol {name[:LONGEST]!r} does not print or is longer than {LONGEST} characters"
        faults.append(Fault(Kind.D024, say, wild))
    alike, name = found(lambda i: first[names[i].casefold()] != i)
    if alike.any():
        say = f"the symbols {names[first[name.casefold()]]!r} and {name!r} differ in case alone"
        faults.append(Fault(Kind.D024, say, alike, "Write them alike", ("keep-case",)))
    if {"dividend", "cash_dividend"} <= table.columns.keys():
        say = "dividends are given twice, as a factor of the prices and as cash"
        remedy = f"Leave the factor out, or the cash by {argument('columns', 'cash_dividend=-')}"
        faults.append(Fault(Kind.D032, say, None, remedy))
    return faults


def ask_symbol(table: Table, request: Request) -> Fault | None:
    """Return the question whether a column names the assets, where none does as yet."""
    if request.columns.get("symbol") == NO_COLUMN or not table.labels:
        return None
    keys = pd.DataFrame({"time": table["time"], "symbol": table["symbol"]})
    twice = keys.duplicated(keep=False).to_numpy()
    for label in sorted(table.labels, key=lambda label: (label.number, len(label.values))):
        if len(label.values) < 2:
            continue
        # Some rows may be there twice as well.
        left = keys.assign(label=label.codes).duplicated().sum() if twice.any() else 0
        counts = np.bincount(label.codes[twice], minlength=len(label.values))
        repeats = (counts > 1).sum() > 1 and left <= twice.sum() / 20
        if not repeats and not (table.unnamed and _in_blocks(label, table)):
            continue
        some = ", ".join(label.values[:MOST_SHOWN])
        more = f" and {len(label.values) - MOST_SHOWN:,} more" if label.values[MOST_SHOWN:] else ""
        how = "its values repeat at each time" if repeats else "each of its values has its own rows"
        say = f"column {label.name!r} may name the assets ({some}{more}): {how}"
        if not table.unnamed:
            remedy = "Write both names into one column, or keep the rows of one of these"
            return Fault(Kind.D037, say, None, remedy)
        name = name_of(label.name, label.place)
        yes, no = (request.name_columns(f"symbol={text}") for text in (name, NO_COLUMN))
        return Fault(Kind.D037, say, None, f"Pass {yes} if it does, and {no} if not")
    return None


def _in_blocks(label: Labels, table: Table) -> bool:
    """Whether the rows of each value stand together, as those of one asset after another."""
    code, count = label.codes, len(label.values)
    begins = np.flatnonzero(np.diff(code)) + 1
    sizes = np.diff(np.concatenate(([0], begins, [len(code)])))
    if len(sizes) != count or sizes.min() < 2 or all(map(CALENDAR.fullmatch, label.values)):
        return False
    if {value.lower() for value in label.values} <= TRUE | FALSE:
        return False
    steps = np.diff(table["time"].astype(np.int64))
    at = begins - 1
    inside = np.delete(steps, at)
    # Against the direction of all other rows, time begins again.
    if len(inside) and (np.sign(steps[at]) != np.sign(np.median(inside))).any():
        return True
    if not label.number:
        return True
    values = np.array([float(value) for value in label.values])
    if set(values) <= {-1.0, 0.0, 1.0} or _counts_time(values[code], table["time"]):
        return False
    with np.errstate(all="ignore"):
        moves = np.abs(np.diff(np.log(table["close"])))
        if np.ptp(np.log(values[code] / table["close"])) < np.log(2.0):
            return False  # a price
    usual = np.nanmedian(np.delete(moves, at))
    return bool(np.nanmedian(moves[at]) > max(JUMPS * usual, 0.01))


def _counts_time(value: np.ndarray, time: np.ndarray) -> bool:
    """Whether numbers are those of the year, the month, the day or the hour, or count them."""
    stamps = pd.DatetimeIndex(time)
    units = [stamps.year, stamps.quarter, stamps.month, stamps.day, stamps.day_of_week, stamps.hour]
    units += [np.unique(time.astype(f"M8[{unit}]"), return_inverse=True)[1] for unit in "YMWD"]
    return any(np.ptp(value - np.asarray(unit)) == 0.0 for unit in units)


def order_faults(table: Table, among: np.ndarray, request: Request) -> list[Fault]:
    """Find rows that repeat a time of their symbol, or whose time is before the row above.

    Where dates with day and month exchanged explain these, that is the only fault: sorted or
    dropped, such rows would still have wrong dates.

    Args:
      table: all rows.
      among: `[rows]` bool, the rows that are compared.
      request: the zone of the times, the order of day and month, and whether the user said that
        the rows are of one asset.
    """
    time, close = table["time"], table["close"]
    rows, inside, forward = _steps(table, among)
    if (forward | ~inside).all():
        return []
    clock = pd.DatetimeIndex(time, tz="UTC").tz_convert(request.timezone or "UTC").tz_localize(None)
    swap, local, other = among & (clock.day <= 12), clock.to_numpy(), clock.to_numpy().copy()
    day = clock[swap].normalize()
    parts = {"year": day.year, "month": day.day, "day": day.month}
    other[swap] += pd.to_datetime(pd.DataFrame(parts)).to_numpy() - day.to_numpy()
    # Sorting such rows would hide the wrong dates, so no repair fixes this fault.
    if _runs_one_way(other[rows], inside) and not _runs_one_way(local[rows], inside):
        mask = among & (other != local)
        wrong, right = (str(t[int(np.argmax(mask))])[:10] for t in (local, other))
        say = f"day and month are exchanged in dates: {wrong} is {right}, and so in order"
        remedy = Kind.D019.remedy
        if request.dates is not None and swap[among].all():  # no date proves the order
            other_order = "mdy" if request.dates == "dmy" else "dmy"
            remedy += f", or pass {argument('dates', other_order)}"
        return [Fault(Kind.D019, say, mask, remedy)]
    faults = []
    again = repeated_rows(table, among)
    if again.any():
        row = int(np.argmax(again))
        same = among & (time == time[row]) & (table["symbol"] == table["symbol"][row])
        first = int(np.argmax(same))
        words = "the same close" if close[first] == close[row] else "different close"
        stamp = np.datetime_as_string(time[row], unit="s")
        say = f"duplicate time {stamp}Z with {words} ({close[first]} and {close[row]})"
        remedy, repairs = "", None
        sure = request.columns.get("symbol") == NO_COLUMN
        if not sure and _of_several(table, among, again):
            remedy, repairs = "Add a column that names the asset of each row", ()
        faults.append(Fault(Kind.D021, say, again, remedy, repairs))
        # Without the repeated rows, the others may be in order.
        rows, inside, forward = _steps(table, among & ~again)
    back = inside & ~forward
    if back.any():
        newest_first = back.sum() == inside.sum()
        say = "the time is before that of the row above"
        say = "times run backwards, newest first" if newest_first else say
        places = np.arange(len(table))
        faults.append(Fault(Kind.D020, say, np.isin(places, places[rows][1:][back])))
    return faults


def _runs_one_way(time: np.ndarray, inside: np.ndarray) -> bool:
    """Return whether times never decrease or never increase, in the steps that are `inside`."""
    steps = np.diff(time).astype(np.int64) * inside
    return bool((steps >= 0).all() or (steps <= 0).all())


def _of_several(table: Table, among: np.ndarray, again: np.ndarray) -> bool:
    """Whether rows that repeat a time are as many, and as different, as those of other assets."""
    if again.sum() < SEVERAL * among.sum():
        return False
    keys = [table["symbol"][among], table["time"][among]]
    first = pd.Series(table["close"][among]).groupby(keys).transform("first").to_numpy()
    return bool((first != table["close"][among])[again[among]].mean() > 0.5)


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
    columns: dict[str, np.ndarray], symbols: list[str], sound: np.ndarray, timezone: str | None
) -> list[Fault]:
    """Find faults between bars of one symbol in order of time.

    Args:
      columns: `[rows]` each, of all rows, with adjusted prices.
      symbols: the names.
      sound: `[rows]` bool, the rows that are compared.
      timezone: as in `read_bars`.
    """
    rows = slice(None) if sound.all() else np.flatnonzero(sound)
    code, time = columns["symbol"][rows], columns["time"][rows]
    later = (code[1:] > code[:-1]) | ((code[1:] == code[:-1]) & (time[1:] >= time[:-1]))
    if not later.all():  # else the slice stays, which copies nothing
        order = np.lexsort((time, code))
        rows = order if isinstance(rows, slice) else rows[order]
    code, time, present = (columns[name][rows] for name in ("symbol", "time", "present"))
    faults: list[Fault] = []

    def add(code: Kind, at: np.ndarray, say: str, **options) -> None:
        if len(at):
            mask = np.zeros(len(sound), dtype=bool)
            mask[at if isinstance(rows, slice) else rows[at]] = True
            faults.append(Fault(code, say, mask, **options))

    # Before missing bars are left out: their rows show that a gap is known.
    parted = gaps_of_half_a_year(time, code, present)
    if len(parted):
        first = parted[0]
        say = f"{symbols[code[first]]} has no bar between {str(time[first - 1])[:10]} and "
        add(Kind.D025, parted, f"{say}{str(time[first])[:10]}: a ticker used again, or a gap")
    checked = present & (columns["close"][rows] > 0)
    if not checked.all():  # a missing bar carries an old price that was not traded
        rows = np.flatnonzero(checked) if isinstance(rows, slice) else rows[checked]
    bars = {name: columns[name][rows] for name in ("symbol", "time", *PRICES, "volume")}
    if len(at := jumps(bars)):
        say, remedy = _about_jumps(bars, at, symbols, timezone)
        add(Kind.D026, at, say, remedy=remedy)
    return faults


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


def _about_jumps(
    bars: dict[str, np.ndarray], at: np.ndarray, names: list[str], timezone: str | None
) -> tuple[str, str]:
    """Return what a message says of jumps at places of `bars`, and the splits that undo them."""
    before, after = bars["close"][at - 1], bars["open"][at]
    local = pd.DatetimeIndex(bars["time"], tz="UTC").tz_convert(timezone or "UTC")
    named, said = [], ""
    for i, row in enumerate(at[:MOST_NAMED]):
        ratio, symbol = split_of(after[i] / before[i]), names[bars["symbol"][row]]
        if ratio and local[row].date() > local[row - 1].date() and not set(symbol) & set(",:"):
            named.append(f"{symbol}:{local[row]:%Y-%m-%d}:{ratio}")
        if ratio and not i:
            said = f", as a split of {ratio.replace('/', ' for ')} that is not adjusted"
    first = (
        f"{names[bars['symbol'][at[0]]]} jumps from close {before[0]:.6g} to open {after[0]:.6g}"
    )
    some = f" ({len(named)} of {len(at):,} jumps)" if len(named) < len(at) else ""
    way = argument("columns", "split=COLUMN")
    way = argument("split", ",".join(named)) + some if named else way
    remedy = f"{Kind.D026.remedy}, e.g. {way}"
    return f"{first}, {after[0] / before[0]:.4g} times{said}", remedy


def split_of(times: float) -> str:
    """Return the split that a price `times` the one before looks like, or "".

    >>> split_of(0.5), split_of(1.5), split_of(0.9)
    ('2/1', '2/3', '')
    """
    ratios = {b / a: f"{a}/{b}" for a, b in RATIOS} | {a / b: f"{b}/{a}" for a, b in RATIOS}
    near = min(ratios, key=lambda ratio: abs(np.log(times / ratio)))
    return ratios[near] if abs(np.log(times / near)) <= NEAR_RATIO else ""


def jumps(bars: dict[str, np.ndarray]) -> np.ndarray:
    """Return places whose open is far from the close before, or by a split's ratio.

    Args:
      bars: symbol, time, prices and volume `[n]` of present bars, by symbol and time.
    """
    code, time, opens, close = (bars[name] for name in ("symbol", "time", "open", "close"))
    # Where the next bar is of the same symbol and span.
    inside = (code[1:] == code[:-1]) & (np.diff(time) <= REUSE)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        gaps = np.log(opens[1:] / close[:-1]).astype(np.float32)
    # Between symbols, or without a price, there is no move.
    gaps[~(inside & np.isfinite(gaps))] = 0.0
    places = np.flatnonzero(np.abs(gaps) > np.log(RATIOS[0][0] / RATIOS[0][1]) - NEAR_RATIO)
    found: set[int] = set()
    high = places[is_far(gaps[places], 0.0)]
    if len(high):
        with np.errstate(divide="ignore", invalid="ignore"):
            move = np.abs(np.diff(np.log(close)))
        far = is_far(gaps[high], typical(move, inside, code)[high])
        found.update((high[far] + 1).tolist())
    size, near = np.abs(gaps[places]), np.zeros(len(places), dtype=bool)
    for after, before in RATIOS:
        near |= np.abs(size - np.log(after / before)) <= NEAR_RATIO
    # In a file with more moves of such sizes they are not splits, and looking takes minutes.
    for row in (places[near] + 1).tolist()[:SUSPECTS]:
        if row not in found and _is_split(bars, row, gaps):
            found.add(row)
    return np.array(sorted(found), dtype=int)


def is_far(move: np.ndarray, typical: np.ndarray | float) -> np.ndarray:
    """Return whether moves, as logarithms, are jumps for symbols whose median move is `typical`."""
    size = np.abs(move)
    return (size > JUMP) & (size > JUMP_MOVES * typical)


def _is_split(bars: dict[str, np.ndarray], row: int, gaps: np.ndarray) -> bool:
    """Return whether only the level of the price changes at `row`.

    News that moves a price as far also widens the bar's range and multiplies its volume. A split of
    k for 1 multiplies the volume by k.
    """
    first, last = max(row - AROUND, 0), min(row + AROUND + 1, len(bars["symbol"]))
    part = slice(first, last)
    own = bars["symbol"][part] == bars["symbol"][row]
    at, gap = row - first, abs(float(gaps[row - 1]))
    with np.errstate(divide="ignore", invalid="ignore"):
        spread = np.log(bars["high"][part] / bars["low"][part])
        body = np.abs(np.log(bars["close"][part] / bars["open"][part]))
    others = own.copy()
    others[at] = False
    if others.sum() < 5:
        return False
    between = own[1:] & own[:-1]
    # The jump itself must not count as a usual move.
    between[at - 1] = False
    moves = np.abs(gaps[first : last - 1])[between]
    usual = max(float(np.nanmedian(spread[others])), float(np.nanmedian(body[others])))
    if not gap > SPLIT_MOVES * max(usual, float(np.nanpercentile(moves, 75)), 1e-9):
        return False
    if not spread[at] <= max(CALM * usual, gap / QUIET):
        return False
    volume = bars["volume"][part]
    known = volume[:at][own[:at]]
    if not len(known) or not np.median(known) > 0.0:
        return True
    more = max(1.0, float(np.exp(-gaps[row - 1])))  # the factor of the volume in the new unit
    return bool(volume[at] <= more * max(BUSY * np.median(known), 1.5 * np.percentile(known, 95)))


def repair(table: Table, faults: Iterable[Fault], request: Request) -> Table:
    """Return the rows after the repairs asked for, with adjusted prices, and notes of both.

    Args:
      table: all rows.
      faults: what is wrong with them.
      request: the repairs asked for.

    Raises:
      BarError: lists every fault that none of them fixes; or no row is left.
    """
    repairs = request.repairs
    refuse(request.name, faults, repairs, table.where)
    stays = rows_that_stay(table, faults, repairs)
    if not stays.any():
        say = "no row is left after the repairs"
        raise refusal(request.name, Kind.D002, say, "Correct the rows")
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
    done = [
        f"{fault.code.name} by {fault.fixed_by(repairs)}"
        + ("" if fault.mask is None else f" ({fault.mask.sum():,} rows)")
        for fault in faults
    ]
    notes = [f"Repaired on reading: {', '.join(dict.fromkeys(done))}."] if done else []
    notes += table.notes
    factors = [name for name in FACTORS if name in columns]
    if factors:
        notes.append(f"Prices adjusted by {' and '.join(factors)}, relative to the first bar.")
    o, high, low, close = (columns[name] for name in PRICES)
    count = int(columns["present"].sum())
    flat = int(((high == low) & (o == close) & columns["present"]).sum())
    if flat > FLAT * count and "close-only" not in repairs:
        notes.append(f"{flat:,} of {count:,} bars have open = high = low = close.")
    # The columns and texts that only detection needs are freed here.
    return Table(columns, symbols, notes=notes)


def rows_that_stay(table: Table, faults: Iterable[Fault], repairs: frozenset[str]) -> np.ndarray:
    """Return `[rows]` bool, the rows with a time that no repair asked for drops."""
    stays = ~np.isnat(table["time"])
    for fault in faults:
        if fault.mask is not None and fault.fixed_by(repairs) in ("drop-nan", "drop-bad"):
            stays &= ~fault.mask
    # D021 is the only fault between rows whose repair drops rows. `assemble` does the sorting.
    if any(fault.code == Kind.D021 for fault in faults) and stays.any():
        # Among rows that stay: a row that is dropped must not be the one kept of a pair.
        stays &= ~repeated_rows(table, stays, repairs)
    return stays


def repeated_rows(
    table: Table, among: np.ndarray, repairs: frozenset[str] = frozenset()
) -> np.ndarray:
    """Return `[rows]` bool: of rows `among` that share time and symbol, all but the one kept."""
    keys = pd.DataFrame({name: table[name][among] for name in ("time", "symbol")}, copy=False)
    mask = np.zeros(len(table), dtype=bool)
    mask[among] = keys.duplicated(keep="last" if "keep-last" in repairs else "first")
    return mask


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
