"""Reads and writes bars: strict by default, repaired only as asked."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import pandas as pd

from nca_trader.cloud import CloudPath
from nca_trader.config.ranges import expect
from nca_trader.config.reading import parse_columns, parse_repair, parse_step
from nca_trader.data.calendar import expected_times
from nca_trader.data.reading.detect import detect, extra_faults, value_faults
from nca_trader.data.reading.faults import refuse
from nca_trader.data.reading.parse import Request, Table, parse
from nca_trader.data.reading.repair import note_of
from nca_trader.data.reading.repair import repair as repaired
from nca_trader.errors import BarError
from nca_trader.types import EXTRAS, PRICES, Bars

# A spreadsheet runs a cell that begins with one of these; the last four are wide forms.
FORMULA = tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")


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
    """Reads bars from a CSV (any delimiter, .gz), Parquet or Feather file, or from a DataFrame.

    Columns may have any case and order: time (or date, datetime, timestamp; or a DatetimeIndex),
    open, high, low, close, volume (or vol). Several assets need a column symbol (or ticker) and one
    row per asset and time, or columns side by side such as AAPL_close or close_AAPL, or a header of
    two levels. Other columns are ignored. Where an asset has no row at a time that another has, or
    only empty cells, its bar is missing. `present`, which `write_bars` adds where it must, is False
    in the row of a missing bar.

    Columns bid and ask (or half_spread), dividend (or dividends; cash per unit, on the ex-date) and
    funding (or funding_rate; paid by a long position) are read as well: see `Bars`.

    A file is read in chunks. In addition to the bars, memory is bounded, but for 8 bytes per row of
    each further column of numbers.

    Prices are taken as they stand, unless `columns` names factors: a split factor multiplies open,
    high, low and close and divides volume; a dividend factor multiplies the four prices alone.
    Both are taken relative to the symbol's first bar, so that a bar depends on no later event.

    Args:
      source: the file or the frame; or a `gs://` or `s3://` URL of a file.
      symbol: the symbol or symbols to take, in that order; without a symbol column, the name of
        the asset (default: the file's name without its suffix).
      timezone: IANA zone of times without UTC offset, e.g. "America/New_York". Not needed for
        dates, which are read as 00:00 UTC. Times are the bars' opens.
      repair: names of `REPAIRS`, e.g. "sort,drop-nan"; all other faults are refused. `Bars.note`
        then says what was repaired.
      columns: column by role, by name or number from 1, where the names do not say it:
        "time=datadate,close=prccd". A time may be two columns, "time=1+2"; "close=*" takes each
        column but the time as an asset's close; "funding=-" takes none. "split" and "dividend"
        name factors, which may be quotients: "split=1/ajexdi", "dividend=Adj Close/Close".
        "cash_dividend" is cash, "spread" a spread in the price's unit.
      dates: "dmy" or "mdy" for dates such as 01/02/2018, where no date of the file proves it.
      decimal: "," or "." of a CSV, where its numbers do not show it.
      every: the bars' length, e.g. "1min", "1h", "1d". Times of the file's own trading hours (see
        `calendar.expected_times`) at which no asset has a bar then become missing bars.

    Returns:
      Bars `[N, A]` in order of time; `note` says what was repaired or adjusted.

    Raises:
      BarError: every problem at once, each with its code, row and remedy.

    Example:
      >>> import pandas as pd
      >>> days = pd.date_range("2024-01-02", periods=2, tz="UTC")
      >>> frame = pd.DataFrame({"time": days, "close": [10.0, 10.5]})
      >>> read_bars(frame, "A", repair="close-only,no-volume").close
      array([[10. ],
             [10.5]])
    """
    expect("source", source, str | os.PathLike | CloudPath | pd.DataFrame, "a path or a DataFrame")
    if decimal not in (None, ".", ","):
        raise BarError(f"unknown decimal sign {decimal!r}; give '.' or ','.")
    wanted = (symbol,) if isinstance(symbol, str) else tuple(symbol or ())
    repairs, step = parse_repair(repair), parse_step(every)
    request = Request(parse_columns(columns), timezone, dates, decimal, wanted, repairs)
    table = parse(source, request)
    faults = detect(table, request)
    refuse(table.name, faults, repairs, table.where)
    table = repaired(table, faults, repairs)
    bars = assemble(table, step, timezone, note_of(table, faults, repairs))
    return bars.select(*wanted) if wanted and wanted != bars.symbols else bars


def write_bars(bars: Bars, path: str | os.PathLike[str]) -> None:
    """Writes bars to a file from which `read_bars` reads them back equal, with the same digest.

    `source` and `note` are not written. Bars that needed keep-jumps or keep-gaps need it again.

    Args:
      bars: any bars.
      path: ends in .parquet, .feather, .csv or .csv.gz.

    Raises:
      BarError: the path has another suffix, or cannot be written; a spreadsheet would take a symbol
        in a CSV for a formula.
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
    writers: dict[str, Callable[..., object]] = {
        "parquet": functools.partial(frame.to_parquet, index=False),
        "feather": frame.to_feather,
        "csv": functools.partial(frame.to_csv, index=False),
        "csv.gz": functools.partial(frame.to_csv, index=False),
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
        writers[suffix](path)
    except OSError as error:
        raise BarError(f"{path}: can't be written ({error.strerror or error}).") from error


def validate(bars: Bars) -> None:
    """Checks bars that were built by hand as `read_bars` checks a file's.

    Args:
      bars: any bars.

    Raises:
      BarError: every problem at once, with code, row, symbol and remedy.

    Example:
      >>> import nca_trader as nca
      >>> nca.data.validate(nca.sample_bars("sp500"))
    """
    columns = {name: getattr(bars, name).ravel() for name in bars.fields}
    if "dividend" in columns:
        columns["cash_dividend"] = columns.pop("dividend")
    table = Table(bars.source or "bars", columns, list(bars.symbols))
    # Arrays in memory have no option that repairs them; their owner does.
    found = value_faults(table) + extra_faults(table)
    faults = [fault._replace(repairs=()) for fault in found]
    width, names = bars.num_assets, bars.symbols
    refuse(table.name, faults, (), lambda i: f"row {i // width}, {names[i % width]}")


def assemble(table: Table, step: np.timedelta64 | None, timezone: str | None, note: str) -> Bars:
    """Puts rows, in any order, on one axis of time.

    Args:
      table: rows, each of another symbol and time; its columns are taken out of it.
      step: the bars' length, to make gaps in the trading hours missing bars; or None.
      timezone: the zone of the trading hours.
      note: what a report must say of the bars.
    """
    columns = table.columns
    used = np.flatnonzero(np.bincount(columns["symbol"], minlength=len(table.symbols)))
    symbols = tuple(table.symbols[i] for i in used)
    own, code = columns.pop("time"), columns.pop("symbol")
    if len(used) < len(table.symbols):
        code = np.searchsorted(used, code)
    # Most files hold one asset in order, whose columns are the bars' own arrays, not copied.
    if len(symbols) == 1 and (own[1:] > own[:-1]).all():
        time, at = own, slice(None)
    else:
        time, at = np.unique(own, return_inverse=True)
    if step is not None:
        grown = np.union1d(time, expected_times(time, step, timezone))
        at = np.searchsorted(grown, time)[at]
        time = grown
    shape = (len(time), len(symbols))

    # Each column is popped when its grid is made, so that not all are in memory twice.
    def grid(values: np.ndarray, fill: float | bool) -> np.ndarray:
        if isinstance(at, slice):
            return values[:, None]
        out = np.full(shape, fill, dtype=values.dtype)
        out[at, code] = values
        return out

    close = grid(columns.pop("close"), np.nan)
    fields, given = {"close": close}, None
    if len(own) < len(time) * len(symbols):  # a missing bar carries the last close, volume 0
        given = grid(np.ones(len(own), dtype=bool), False)
        fields["close"] = pd.DataFrame(close).ffill().to_numpy()
    for name in PRICES[:3]:
        fields[name] = grid(columns.pop(name), np.nan)
        if given is not None:
            np.copyto(fields[name], fields["close"], where=~given)
    columns.pop("dividend", None)  # a factor; what `Bars` calls so is cash
    for name in ("volume", "present", *EXTRAS):
        column = "cash_dividend" if name == "dividend" else name
        if column in columns:
            values = columns.pop(column)
            fields[name] = grid(values, values.dtype.type(0))
    for array in (time, *fields.values()):  # ours alone: frozen, they need not be copied
        for part in (array, array.base):
            if isinstance(part, np.ndarray):
                part.setflags(write=False)
    return Bars(time=time, symbols=symbols, source=table.name, note=note, **fields)
