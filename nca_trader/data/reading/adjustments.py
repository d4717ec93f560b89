"""Splits and dividends: applied to prices where they are named, and asked about where they are not.

A column without a role that behaves as a split, a dividend or an adjusted close is asked about.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import pandas as pd

from nca_trader.config.reading import ADJUSTMENTS, EVENTS, NO_COLUMN, plain
from nca_trader.data.reading.faults import CHANGES, FACTORS, Fault, Kind, Request, Table, refusal
from nca_trader.errors import argument
from nca_trader.types import PRICES

MOSTLY = 0.9  # of the rows, of a column that changes on few days
TRACKS = 5  # bars on which an adjusted close moves as the close does, at least
LEVEL = 0.01  # of the last adjusted close from the last close, where neither moves
SPLIT = np.log(1.2)  # of a factor, at least, where a smaller one is a dividend's
PAYS = "is paid where the price falls by it, and is not taken as income"
ADJUSTS = "adjusts the prices, which are taken as they stand"
SURE = 5.0  # logarithm of the odds for one of the two answers, at least


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
            raise refusal(request.name, Kind.D024, f"no symbol {symbol!r} of a split", remedy)
        begin = pd.Timestamp(day, tz=request.timezone or "UTC").tz_convert(None).to_datetime64()
        own = code == table.symbols.index(symbol)
        later = own & (time >= begin)
        if not later.any() or not (own & (time < begin)).any():
            say = f"{symbol} has no bars on both sides of its split on {day}"
            raise refusal(request.name, Kind.D026, say, "Correct the date")
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
    before, after, night = nights(table)
    paid = np.maximum(table["cash_dividend"][after] / table["close"][before], 0.0)
    if not (number := int((paid > 0).sum())):
        return table
    odds = odds_of_nights(table["symbol"][after], night, paid)
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


def nights(table: Table) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rows `[n]` of bars of an asset, those that follow them, and the moves in between.

    A move is the logarithm of the open over the close before.
    """
    code, time = table["symbol"], table["time"]
    known = (table["open"] > 0.0) & (table["close"] > 0.0) & ~np.isnat(time)
    rows = np.flatnonzero(table["present"] & known)
    rows = rows[np.lexsort((time[rows], code[rows]))]
    same = code[rows[1:]] == code[rows[:-1]]
    before, after = rows[:-1][same], rows[1:][same]
    with np.errstate(all="ignore"):
        return before, after, np.log(table["open"][after] / table["close"][before])


def odds_of_nights(code: np.ndarray, night: np.ndarray, paid: np.ndarray) -> float:
    """Return the logarithm of the odds that prices fall by what is paid, over that they do not.

    Args:
      code: `[n]` the number of each asset.
      night: `[n]` the moves.
      paid: `[n]`, as a fraction of the price before; 0 of a night on which nothing is.
    """
    usual = pd.Series(np.abs(np.where(paid != 0.0, np.nan, night)))
    noise = usual.groupby(code).transform("median").fillna(np.inf)
    ex = np.flatnonzero((paid != 0.0) & np.isfinite(night))
    noise = np.maximum(1.5 * noise, 1e-5).to_numpy()[ex]
    paid, drop = np.abs(paid[ex]), -night[ex] * np.sign(paid[ex])
    drop = np.clip(drop, -3 * noise, paid + 3 * noise)  # news moves a price by more
    # The slope is 1 or 0, and its weight the inverse of its variance.
    return float(np.sum((paid * drop - 0.5 * paid**2) / noise**2))


def ask_adjustments(table: Table, request: Request) -> list[Fault]:
    """Return questions about adjusted closes, split ratios and payments that are not applied."""
    if request.columns.keys() & FACTORS or not (table.others and len(nights(table)[0])):
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
    remedy = f"Pass {request.name_columns(*uses)}"
    return [
        Fault(Kind.D027, f"{name} = {value:.6g} {PAYS if use[0] == 'c' else ADJUSTS}", mask, remedy)
        for name, value, mask, use in chosen
    ]


def _behaves(value: np.ndarray, table: Table) -> tuple[np.ndarray, str]:
    """Return `[rows]` bool, where a column adjusts or pays as the prices do, and how to name it."""
    mask, close = np.zeros(len(table), bool), table["close"]
    before, after, night = nights(table)

    def falls(paid: np.ndarray) -> bool:
        """Whether prices fall by what is paid, and by no more; marks the rows."""
        ex = paid != 0.0
        if not ex.any() or odds_of_nights(table["symbol"][after], night, paid) <= SURE:
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
        mask[after[step != 0.0]] = odds_of_nights(table["symbol"][after], night, step) > -SURE
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


def name_of(name: str, place: int) -> str:
    """Return a column as a user names it: a comma or a sign would part the name."""
    return str(place) if set(name) & set(",=/+") else name
