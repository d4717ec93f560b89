"""What columns without a role hold, by what their values do.

A file may call its symbols, its adjusted closes and its payments as it likes. A column whose values
behave as one of them is asked about, and all others are named in the note of the bars.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from nca_trader.config.reading import NO_COLUMN, plain
from nca_trader.data.reading.faults import FACTORS, Fault, Kind, Labels, Request, Table
from nca_trader.data.reading.files import Chunk
from nca_trader.data.reading.numbers import floats
from nca_trader.data.reading.repairs import (
    ADJUSTMENTS,
    EVENTS,
    SURE,
    adjust,
    following_bars,
    odds_of_nights,
)
from nca_trader.data.reading.times import holds_numbers
from nca_trader.errors import argument

CHANGES = 1e-3  # relative: adjusted closes are rounded
MOSTLY, PRUNED = 0.9, 0.8  # of the rows, of a column that changes on few days; of those of a chunk
TRACKS = 5  # bars on which an adjusted close moves as the close does, at least
LEVEL = 0.01  # of the last adjusted close from the last close, where neither moves
SPLIT = np.log(1.2)  # of a factor, at least, where a smaller one is a dividend's
MOST_VALUES, MOST_SHOWN = 20_000, 4  # of a column that may name assets; of those in a message
MOST_NAMED = 12  # unused columns that a note names
JUMPS = 5.0  # times the usual move, of the price from one asset to the next
PAYS = "is paid where the price falls by it, and is not taken as income"
ADJUSTS = "adjusts the prices, which are taken as they stand"
TRUE, FALSE = {"true", "1", "1.0", "yes"}, {"false", "0", "0.0", "no"}
# Days, months, quarters and dates come in blocks, and name no asset.
CALENDAR = re.compile(
    r"(mon|tue|wed|thu|fri|sat|sun|jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*"
    r"|[qhw]\d\d?|(19|20)\d\d([-/. _]?([qhw]?\d\d?|[a-z]{3,9})){0,2}"
    r"|\d\d?[-/.]\d\d?[-/.](\d\d)?\d\d|\d{4}-\d\d-\d\d[T ]\d\d:\d\d.*",
    re.IGNORECASE,
)


class Candidates:
    """Columns without a role, a chunk at a time, for as long as they may have a meaning.

    The first chunk shows most columns to have none, so that memory does not grow with their number.
    """

    def __init__(self) -> None:
        self._values: dict[tuple, dict[Any, int]] = {}
        self._gone: set[tuple] = set()
        self._rows = 0

    def add(
        self,
        rest: pd.DataFrame,
        raw: pd.DataFrame,
        chunk: Chunk,
        close: np.ndarray,
        code: np.ndarray,
    ) -> dict[Any, np.ndarray]:
        """Return arrays `[rows]` to keep: codes of labels, and numbers, by kind, place and name.

        Args:
          rest: the columns.
          raw: the columns with a role, of the same rows.
          chunk: they are of.
          close: `[rows]`.
          code: `[rows]` the asset's number.
        """
        self._rows += len(rest)
        order, found = np.argsort(code, kind="stable"), {}
        same = code[order][1:] == code[order][:-1]
        header = [str(name) for name in chunk.frame.columns]
        # Where no time is there twice, assets can only stand one after the other.
        times = [name for name in ("time", "clock") if name in raw]
        once = rest.shape[1] > 0 and not raw[times].duplicated().any()
        for i, (label, column) in enumerate(rest.items()):
            text = str(label).strip()
            place = header.index(str(label)) + 1
            labels, number = ("label", i, text, place), ("number", i, text, place)
            codes = None if labels in self._gone else self._codes(labels, column, once)
            if codes is not None:
                found[labels] = codes
            if number in self._gone:
                continue
            value = floats(column, chunk)
            unread = (np.isnan(value) & column.notna().to_numpy()).any()
            seldom = not unread and _changes_seldom(value[order], close[order], same)
            if seldom or plain(label) in ADJUSTMENTS:
                found[number] = value
            else:
                self._gone.add(number)
        return found

    def _codes(self, key: tuple, column: pd.Series, once: bool) -> np.ndarray | None:
        """Return the number of each value, None where the column cannot name assets."""
        whole = not holds_numbers(column) or pd.api.types.is_integer_dtype(column.dtype)
        local, found = pd.factorize(column)
        blocks = not once or (np.diff(local) != 0).sum() < len(found)
        if whole and blocks and (local >= 0).all():
            values = self._values.setdefault(key, {})
            numbers = [values.setdefault(each, len(values)) for each in found.tolist()]
            if "" not in values and len(values) <= min(MOST_VALUES, max(self._rows // 2, 2)):
                return np.array(numbers, np.int32)[local]
        self._gone.add(key)
        return None

    def split(self, arrays: dict[Any, np.ndarray]) -> tuple[list[Labels], list[tuple]]:
        """Take what is left out of `arrays`; return the labels, and name, place and numbers."""
        labels, others = [], []
        for key in [key for key in arrays if isinstance(key, tuple)]:
            kind, _, name, place = key
            array = arrays.pop(key)
            if kind == "label" and key not in self._gone:
                values = [str(value).strip() for value in self._values[key]]
                labels.append(Labels(name, place, array, values))
            elif key not in self._gone:
                others.append((name, place, array))
        return labels, others


def _changes_seldom(value: np.ndarray, close: np.ndarray, same: np.ndarray) -> bool:
    """Whether a column, or its ratio to the close, is mostly the one of the row before."""
    if not same.any():
        return True
    filled = np.nan_to_num(value)
    with np.errstate(all="ignore"):
        ratio = np.abs(np.diff(np.log(value / close))) <= CHANGES
    still = (filled[1:] == filled[:-1])[same].mean()
    return max(still, ratio[same].mean()) >= PRUNED


def unfinished(labels: list[Labels], code: np.ndarray, time: np.ndarray) -> tuple[np.ndarray, str]:
    """Return `[rows]` bool, the last candles that a true/false column says were not over; its name.

    It is true in all other rows.
    """
    order = np.lexsort((time, code))
    last = np.zeros(len(code), bool)
    last[order] = np.append(code[order][1:] != code[order][:-1], True)
    for label in labels:
        words = [value.lower() for value in label.values]
        if len(words) == 2 and set(words) & TRUE and set(words) & FALSE:
            mask = label.codes == next(i for i, word in enumerate(words) if word in FALSE)
            if mask.any() and not (mask & ~last).any() and mask.sum() < len(mask) - 1:
                return mask, label.name
    return np.zeros(len(code), bool), ""


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
        yes, no = (_passing(request, f"symbol={text}") for text in (name, NO_COLUMN))
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


def ask_adjustments(table: Table, request: Request) -> list[Fault]:
    """Return questions about adjusted closes, split ratios and payments that are not applied."""
    if request.columns.keys() & FACTORS or not (table.others and len(following_bars(table)[0])):
        return []
    closes, others = [], []
    for name, place, value in table.others:
        known = plain(name) in ADJUSTMENTS
        mask, use = _unadjusted(name, value, table) if known else _behaves(value, table)
        if mask.any():
            named = use.format(name=name_of(name, place), close=table.close_name)
            found = (name, value[mask][0], mask, named)
            (closes if "{close}" in use else others).append((known, found))
    # An adjusted close holds all the rest; of several the one that is called so. Where a split has
    # a column of its own, it adjusts the volume as well.
    closes.sort(key=lambda one: (not one[0], "close" not in plain(one[1][0])))
    whole = {use.partition("=")[0] for _, (*_, use) in others} >= {*FACTORS}
    chosen = [found for _, found in (others if whole else closes[:1] or others)]
    if not chosen:
        return []
    uses = list(dict.fromkeys(use for *_, use in chosen))
    if "cash_dividend" in table and any(use.startswith("dividend") for use in uses):
        uses.append(f"cash_dividend={NO_COLUMN}")
    remedy = f"Pass {_passing(request, *uses)}"
    return [
        Fault(Kind.D027, f"{name} = {value:.6g} {PAYS if use[0] == 'c' else ADJUSTS}", mask, remedy)
        for name, value, mask, use in chosen
    ]


def name_of(name: str, place: int) -> str:
    """Return a column as a user names it: a comma or a sign would part the name."""
    return str(place) if set(name) & set(",=/+") else name


def _passing(request: Request, *more: str) -> str:
    """Return the argument that names columns as they are named already, and some more."""
    given = {role: f"{role}={text}" for role, text in request.columns.items()}
    given |= {text.partition("=")[0]: text for text in more}
    return argument("columns", ",".join(given.values()))


def _behaves(value: np.ndarray, table: Table) -> tuple[np.ndarray, str]:
    """Return `[rows]` bool, where a column adjusts or pays as the prices do, and how to name it."""
    mask, close = np.zeros(len(table), bool), table["close"]
    before, after = following_bars(table)

    def falls(paid: np.ndarray) -> bool:
        """Whether prices fall by what is paid, and by no more; marks the rows."""
        with np.errstate(all="ignore"):
            night = np.log(table["open"][after] / close[before])
        ex = paid != 0.0
        if not ex.any() or odds_of_nights(table, before, after, paid) <= SURE:
            return False
        left, usual = np.nanmedian(np.abs(night + paid)[ex]), np.nanmedian(np.abs(night[~ex]))
        mask[after[ex]] = left <= max(3.0 * usual, np.median(np.abs(paid[ex])) / 4.0)
        return bool(mask.any())

    def few(step: np.ndarray) -> np.ndarray:
        """Return the steps of a logarithm that changes on few days; none of another one."""
        step = np.where(np.abs(step) > CHANGES, step, 0.0)
        seldom = np.isfinite(step).all() and (step != 0.0).mean() <= 1.0 - MOSTLY
        return step if seldom else np.zeros_like(step)

    with np.errstate(all="ignore"):
        level = np.log(np.where(value > 0.0, value, np.nan))
        ratio = level - np.log(close)
        moves = np.abs(np.log(close[after] / close[before]))
    step = few(ratio[after] - ratio[before])
    tracks = (moves[step == 0.0] > CHANGES).sum() >= TRACKS
    adjusts = tracks or (step.any() and abs(ratio[after[-1]]) <= LEVEL)
    if adjusts and falls(step):
        return mask, "dividend={name}/{close}"
    if tracks and step.any() and (step >= 0.0).all():
        # It moves as the close does, and is one unless the close shows to be adjusted.
        mask[after[step != 0.0]] = odds_of_nights(table, before, after, step) > -SURE
        return mask, "dividend={name}/{close}"
    filled = np.nan_to_num(value)
    if ((filled == 0.0) | (filled == 1.0)).all():
        return mask, ""  # a signal
    rest = np.where(filled == 0.0, 1.0, filled)
    if (rest > 0.0).all() and (rest == 1.0).mean() >= MOSTLY:
        for sign, use in ((1.0, "split={name}"), (-1.0, "split=1/{name}")):
            if falls(sign * np.log(rest[after])):
                return mask, use
    step = few(level[after] - level[before])
    for sign, use in ((1.0, "{name}"), (-1.0, "1/{name}")):
        if falls(sign * step):
            return mask, f"{'split' if np.abs(step).max() > SPLIT else 'dividend'}={use}"
    if "cash_dividend" not in table and (filled >= 0.0).all() and (filled == 0.0).mean() >= MOSTLY:
        falls(filled[after] / close[before])
    return mask, "cash_dividend={name}"


def _unadjusted(name: str, value: np.ndarray, table: Table) -> tuple[np.ndarray, str]:
    """Return `[rows]` bool, where a vendor's adjustment changes, and how to name it.

    A ratio on the day of a split counts where the price falls by it: other vendors give it next to
    prices that are adjusted.
    """
    kind, code = plain(name), table["symbol"]
    mask = np.zeros(len(table), dtype=bool)
    with np.errstate(divide="ignore", invalid="ignore"):
        if kind in EVENTS:
            rows = np.lexsort((table["time"], code))
            rows = rows[table["present"][rows]]
            before, after = rows[:-1], rows[1:]
            prices = adjust(table.columns, table["present"])  # by splits that the user gave
            night = np.log(prices["open"][after] / prices["close"][before])
            ratio = np.log(np.where(value[after] > 0.0, value[after], 1.0))
            falls = np.abs(night + ratio) < np.abs(night)
            mask[after] = (code[after] == code[before]) & (ratio != 0.0) & falls
            return mask, "split={name}"
        adjusts = kind in ("adj_close", "adjclose", "adjusted_close")
        factor = value / table["close"] if adjusts else value
        mask[1:] = np.abs(factor[1:] / factor[:-1] - 1.0) > CHANGES
    mask[1:] &= code[1:] == code[:-1]
    use = "dividend={name}/{close}" if adjusts else "dividend={name}"
    return mask, {"ajexdi": "split=1/{name}", "split_factor": "split={name}"}.get(kind, use)


def name_unused(names: list[str]) -> Iterator[str]:
    """Yield the sentence that names the columns of a file that are not used."""
    if names:
        more = f" and {len(names) - MOST_NAMED:,} more" if names[MOST_NAMED:] else ""
        yield f"Columns that are not used: {', '.join(names[:MOST_NAMED])}{more}."
