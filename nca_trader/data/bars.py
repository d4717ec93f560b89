"""Bars in and out of files and frames: strict by default, repaired only where told to be."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import pandas as pd

from nca_trader.cloud import CloudPath
from nca_trader.config.ranges import expect
from nca_trader.config.reading import parse_columns, parse_repair, parse_step
from nca_trader.data.calendar import expected_times
from nca_trader.data.reading.adjust import FACTORS, adjust
from nca_trader.data.reading.checks import order_faults
from nca_trader.data.reading.crossed import column_faults, part_reused, series_faults
from nca_trader.data.reading.faults import Fault, refuse
from nca_trader.data.reading.files import load
from nca_trader.data.reading.gather import gather
from nca_trader.data.reading.records import Records
from nca_trader.data.reading.times import TimeReader
from nca_trader.errors import BarError
from nca_trader.types import PRICES, Bars

DROPS = ("drop-nan", "drop-bad")
ROW_FAULTS = {
    "D006",
    "D007",
    "D008",
    "D009",
    "D010",
    "D011",
    "D012",
    "D022",
    "D030",
    "D031",
    "D033",
}
EXTRA_COLUMNS = (  # of the bars, and of the records
    ("half_spread", "half_spread"), ("dividend", "cash_dividend"), ("funding", "funding")
)  # fmt: skip
# With these a cell begins that a spreadsheet runs; the last four are wide forms.
FORMULA = tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")
FLAT = 0.1  # of the bars: more than that without a range is worth a word


def read_bars(
    source: str | os.PathLike[str] | CloudPath | pd.DataFrame,
    symbol: str | Sequence[str] | None = None,
    timezone: str | None = None,
    repair: str | Iterable[str] | None = None,
    *,
    columns: str | Mapping[str, str | int] | None = None,
    dates: str | None = None,
    decimal: str | None = None,
    every: str | None = None,
) -> Bars:
    """Bars from a CSV (any delimiter, .gz), Parquet or Feather file, or from a DataFrame.

    Columns, in any case and order: time (or date, datetime, timestamp; or a DatetimeIndex), open,
    high, low, close, volume (or vol), and for several assets symbol (or ticker), one row an asset
    and time. Several assets may also stand side by side, in columns such as AAPL_close or
    close_AAPL, or under a header of two levels; an asset whose cells are all empty has no bar.
    Others are ignored. Where an asset has no row at a time that another has, its bar is
    missing. `present`, which `write_bars` adds where it must, is False for a missing bar's row.

    A file may also say how wide the market is, by bid and ask (or half_spread), what a unit pays
    in cash, by dividend (or dividends) on the day from which it is traded without, and what a long
    position pays, by funding (or funding_rate): see `Bars`.

    A file is read in chunks: beside the bars themselves memory is bounded, but for 8 bytes a row
    of each further column of numbers.

    Prices are taken as they stand, unless `columns` names factors: a split factor multiplies open,
    high, low and close and divides volume, a dividend factor multiplies the four prices alone.
    Both are taken relative to the symbol's first bar, so that a bar depends on no later event:
    the first bar has the prices of its day, and returns are those of the adjusted prices.

    Args:
      source: the file or the frame; or a `gs://` or `s3://` URL of a file.
      symbol: the symbol or symbols to take, in that order; without a symbol column, what to call
        the asset (default: the file's name without its suffix).
      timezone: IANA zone of times without UTC offset, e.g. "America/New_York". Not needed for
        dates, which are read as 00:00 UTC. Times are the bars' opens.
      repair: what may be mended, of `REPAIRS`, e.g. "sort,drop-nan"; all else is refused.
        `Bars.note` then says what was.
      columns: which column is what, where the names don't say it, by name or number from 1:
        "time=datadate,close=prccd". A time may be two, "time=1+2"; "close=*" takes each column
        but the time as an asset's close; "funding=-" takes none. "split" and "dividend" name
        factors, which may be quotients: "split=1/ajexdi", "dividend=Adj Close/Close".
        "cash_dividend" is cash, "spread" a spread in the price's unit.
      dates: "dmy" or "mdy" for dates such as 01/02/2018, where no date of the file proves it.
      decimal: "," or "." of a CSV, where its numbers don't show it.
      every: the bars' length, e.g. "1min", "1h", "1d": times of the file's own trading hours (see
        `calendar.expected_times`) at which no asset has a bar are then missing bars as well,
        in place of no rows at all.

    Raises:
      BarError: every problem at once, each with its code, row and remedy.
    """
    expect("source", source, str | os.PathLike | CloudPath | pd.DataFrame, "a path or a DataFrame")
    repairs, given, step = parse_repair(repair), parse_columns(columns), parse_step(every)
    if decimal not in (None, ".", ","):
        raise BarError(f"unknown decimal sign {decimal!r}; give '.' or ','.")
    times = TimeReader(timezone, dates)
    numbered = any(part.isdigit() for text in given.values() for part in text.split("+"))
    tables = load(source, [given[r] for r in ("symbol",) if r in given], numbered, decimal)
    rows = gather(tables, given, repairs, times, symbol)
    faults = [*rows.faults, *column_faults(rows.records, rows.others, repairs)]
    rows.others.clear()
    kept, more = _mend(rows.records, faults, repairs, timezone, dates)
    faults += more
    unmended = [fault for fault in faults if not fault.mended_by(repairs)]
    refuse(rows.name, unmended, rows.where)
    if not len(kept):
        raise BarError(f"{rows.name}: D002 no row is left after the repairs. Correct the rows.")
    note = _note(kept, faults, repairs)
    name, wanted = rows.name, rows.wanted
    del rows  # its arrays are not needed beside the bars' own
    bars = _assemble(kept, step, timezone, name, note)
    return bars.select(*wanted) if wanted and tuple(wanted) != bars.symbols else bars


def write_bars(bars: Bars, path: str | os.PathLike[str]) -> None:
    """Writes bars as .parquet, .feather, .csv or .csv.gz; `read_bars` gets them back equal.

    The digest is equal too, missing bars included; `source` and `note` are not written. Bars that
    needed keep-jumps or keep-gaps need it again.

    Raises:
      BarError: the suffix is another, or the file can't be written; of a CSV, a spreadsheet would
        take a symbol for a formula.
    """
    expect("bars", bars, Bars, "Bars, e.g. of nca.read_bars", path=path)
    expect("path", path, str | os.PathLike, "a path")
    path = os.fspath(path)
    width = bars.num_assets
    frame = pd.DataFrame({"time": bars.index.repeat(width), "symbol": bars.symbols * len(bars)})
    for field in bars.fields:
        if field != "present":
            frame[field] = getattr(bars, field).ravel()
    if not bars.present.all():
        frame["present"] = bars.present.ravel()
    writers: dict[str, Callable[[], object]] = {
        "parquet": lambda: frame.to_parquet(path, index=False),
        "feather": lambda: frame.to_feather(path),
        "csv": lambda: frame.to_csv(path, index=False),
        "csv.gz": lambda: frame.to_csv(path, index=False),
    }
    suffix = next((s for s in writers if path.endswith(f".{s}")), None)
    if suffix is None:
        raise BarError(f"{path}: bars are written as .{', .'.join(writers)}; choose one of these.")
    runs = next((s for s in bars.symbols if s[:1] in FORMULA or not s.isprintable()), None)
    if runs is not None and suffix.startswith("csv"):
        raise BarError(
            f"{path}: a spreadsheet would run the symbol {runs!r} as a formula, or it does not "
            "print; write .parquet or .feather, or rename it."
        )
    try:
        writers[suffix]()
    except OSError as error:
        raise BarError(f"{path}: can't be written ({error.strerror or error}).") from error


def _mend(
    records: Records,
    faults: list[Fault],
    repairs: frozenset[str],
    timezone: str | None,
    dates: str | None,
) -> tuple[Records, list[Fault]]:
    """The rows after the repairs asked for, and what is wrong between rows."""
    more: list[Fault] = []
    sound = stays = ~np.isnat(records["time"])
    for fault in faults:
        if fault.mask is not None:
            if fault.mended_by(repairs) in DROPS:
                stays = stays & ~fault.mask
            if fault.code in ROW_FAULTS:
                sound = sound & ~fault.mask

    def found(fault: Fault, rows: np.ndarray | slice) -> None:
        mask = np.zeros(len(records), dtype=bool)
        mask[rows] = fault.mask
        more.append(fault._replace(mask=mask))

    kept = records.take(stays)
    if any(fault.code == "D005" and fault.about in ("time", "symbol") for fault in faults):
        return kept, more  # which rows follow each other depends on that column
    between = list(order_faults(kept, timezone, dates))
    no_zone = any(fault.code in ("D014", "D015") for fault in faults)
    for fault in between:
        # Without its zone, a clock that is put back shows an hour twice.
        if not (no_zone and fault.code == "D021"):
            found(fault, stays)
    if any(fault.code == "D021" for fault in between):
        kept, stays = _once(kept, stays, "last" if "keep-last" in repairs else "first")
    if "widen" in repairs:
        prices = [kept[name] for name in PRICES]
        kept["high"], kept["low"] = np.maximum.reduce(prices), np.minimum.reduce(prices)
    if "no-volume" in repairs:
        kept["volume"] = np.nan_to_num(kept["volume"], posinf=np.inf, neginf=-np.inf)
    unparted = dict(kept.columns), kept.symbols
    if "part-reuse" in repairs:
        part_reused(kept)
    adjust(kept)
    checked = Records(kept.columns | {"symbol": unparted[0]["symbol"]}, unparted[1])
    # What a row's own fault makes of its neighbours is not told again.
    of_kept = sound[stays]
    where = np.flatnonzero(stays)[of_kept] if not (stays.all() and of_kept.all()) else slice(None)
    for fault in series_faults(checked.take(of_kept)):
        found(fault, where)
    return kept, more


def _note(kept: Records, faults: list[Fault], repairs: frozenset[str]) -> str:
    """What a report must say of the bars: what was mended, adjusted, and what is only closes."""
    done = [
        f"{fault.code} by {fault.mended_by(repairs)}"
        + ("" if fault.mask is None else f" ({fault.mask.sum():,} rows)")
        for fault in faults
    ]
    notes = [f"Repaired on reading: {', '.join(dict.fromkeys(done))}."] if done else []
    factors = [name for name in FACTORS if name in kept]
    if factors:
        notes.append(f"Prices adjusted by {' and '.join(factors)}, relative to the first bar.")
    flat = (kept["high"] == kept["low"]) & (kept["open"] == kept["close"]) & kept["present"]
    count = int(kept["present"].sum())
    if flat.sum() > FLAT * count and "close-only" not in repairs:
        notes.append(f"{flat.sum():,} of {count:,} bars have open = high = low = close.")
    return " ".join(notes)


def _assemble(
    kept: Records, step: np.timedelta64 | None, timezone: str | None, source: str, note: str
) -> Bars:
    """Bars from rows of which no two share symbol and time, in any order; empties `kept`."""
    columns, own = kept.columns, kept["time"]
    del columns["time"]
    code, symbols = _used(columns.pop("symbol"), kept.symbols)
    if len(symbols) == 1 and (own[1:] > own[:-1]).all():
        time, at = own, slice(None)
    else:
        time, at = np.unique(own, return_inverse=True)
    if step is not None:
        grown = np.union1d(time, expected_times(time, step, timezone))
        at = np.searchsorted(grown, time)[at]
        time = grown
    shape = (len(time), len(symbols))
    whole = len(own) == len(time) * len(symbols)

    def grid(values: np.ndarray, fill: float | bool) -> np.ndarray:
        if isinstance(at, slice):
            return values[:, None]
        out = np.full(shape, fill, dtype=values.dtype)
        out[at, code] = values
        return out

    close = grid(columns.pop("close"), np.nan)
    fields, given = {"close": close}, None
    if not whole:
        given = grid(np.ones(len(own), dtype=bool), False)
        fields["close"] = pd.DataFrame(close).ffill().to_numpy()
    for name in PRICES[:3]:
        fields[name] = grid(columns.pop(name), np.nan)
        if given is not None:
            np.copyto(fields[name], fields["close"], where=~given)
    for name, column in (("volume", "volume"), ("present", "present"), *EXTRA_COLUMNS):
        if column in columns:
            values = columns.pop(column)
            fields[name] = grid(values, values.dtype.type(0))
    for array in (time, *fields.values()):  # ours alone: frozen, they need not be copied
        for part in (array, array.base):
            if isinstance(part, np.ndarray):
                part.setflags(write=False)
    return Bars(time=time, symbols=tuple(symbols), source=source, note=note, **fields)


def _used(code: np.ndarray, symbols: list[str]) -> tuple[np.ndarray, list[str]]:
    """Codes of those symbols alone that have a row."""
    used = np.bincount(code, minlength=len(symbols)) > 0
    if used.all():
        return code, symbols
    place = np.cumsum(used) - 1
    return place[code], [name for name, has in zip(symbols, used, strict=True) if has]


def _once(kept: Records, stays: np.ndarray, keep: str) -> tuple[Records, np.ndarray]:
    """One row of each symbol and time, the first or the last; and which of all rows these are."""
    keys = pd.DataFrame({name: kept[name] for name in ("symbol", "time")}, copy=False)
    once = ~keys.duplicated(keep=keep).to_numpy()  # pyright: ignore[reportArgumentType]
    left = stays.copy()
    left[stays] = once
    return kept.take(once), left
