"""Bars in and out of files and frames: strict by default, repaired only where told to be."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from nca_trader.data.adjust import FACTORS, adjust, factor_faults
from nca_trader.data.calendar import expected_times, parse_step
from nca_trader.data.checks import order_faults, value_faults
from nca_trader.data.columns import FIELDS, Rows, arrange, parse_columns
from nca_trader.data.crossed import column_faults, part_reused, series_faults
from nca_trader.data.faults import Fault, parse_repair, refuse
from nca_trader.data.tables import load
from nca_trader.data.times import read_times
from nca_trader.errors import BarError
from nca_trader.types import PRICES, Bars

DROPS = ("drop-nan", "drop-bad")
ROW_FAULTS = {"D006", "D007", "D008", "D009", "D010", "D011", "D012", "D022", "D030"}
FLAT = 0.1  # of the bars: more than that without a range is worth a word


def read_bars(
    source: str | Path | pd.DataFrame,
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

    Prices are taken as they stand, unless `columns` names factors: a split factor multiplies open,
    high, low and close and divides volume, a dividend factor multiplies the four prices alone.
    Both are taken relative to the symbol's first bar, so that a bar depends on no later event:
    the first bar has the prices of its day, and returns are those of the adjusted prices.

    Args:
      source: the file or the frame.
      symbol: the symbol or symbols to take, in that order; without a symbol column, what to call
        the asset (default: the file's name without its suffix).
      timezone: IANA zone of times without UTC offset, e.g. "America/New_York". Not needed for
        dates, which are read as 00:00 UTC. Times are the bars' opens.
      repair: what may be mended, of `faults.REPAIRS`, e.g. "sort,drop-nan"; all else is refused.
        `Bars.note` then says what was.
      columns: which column is what, where the names don't say it, by name or number from 1:
        "time=datadate,close=prccd". A time may be two, "time=1+2"; "close=*" takes each column
        but the time as an asset's close. "split" and "dividend" name factors, which may be
        quotients: "split=1/ajexdi", "dividend=Adj Close/Close".
      dates: "dmy" or "mdy" for dates such as 01/02/2018, where no date of the file proves it.
      decimal: "," or "." of a CSV, where its numbers don't show it.
      every: the bars' length, e.g. "1min", "1h", "1d": times of the file's own trading hours (see
        `calendar.expected_times`) at which no asset has a bar are then missing bars as well,
        in place of no rows at all.

    Raises:
      BarError: every problem at once, each with its code, row and remedy.
    """
    repairs, given, step = parse_repair(repair), parse_columns(columns), parse_step(every)
    if decimal not in (None, ".", ","):
        raise BarError(f"unknown decimal sign {decimal!r}; give '.' or ','.")
    numbered = any(part.isdigit() for text in given.values() for part in text.split("+"))
    table = load(source, [given[r] for r in ("symbol",) if r in given], numbered, decimal)
    rows = arrange(table, given, repairs)
    if not {"time", "close"} <= set(rows.frame):
        refuse(table.name, rows.faults)
    raw, others, wanted = _symbols(rows, table.name, symbol, repairs)
    frame = _numbers(raw, table.decimal)
    frame["time"], time_faults = read_times(raw["time"], timezone, dates)
    faults = [*rows.faults, *time_faults, *value_faults(frame, raw), *factor_faults(frame)]
    short = raw.index.isin(table.short)
    if short.any():
        say = "fewer fields than the other lines"
        faults.append(Fault("D022", say, "Complete or remove the line", short, ("drop-bad",)))
    unnamed = (frame["symbol"].isna() | (frame["symbol"] == "")).to_numpy()
    if unnamed.any():
        faults.append(
            Fault("D024", "the symbol is empty", "Write it there", unnamed, ("drop-bad",))
        )
    kept, more = _mend(frame, others, faults, repairs)
    faults += more
    refuse(
        table.name,
        (fault for fault in faults if not fault.mended_by(repairs)),
        lambda row: f"{table.unit} {raw.index[row]}" + f", {raw['symbol'].iloc[row]}" * rows.wide,
    )
    if kept.empty:
        raise BarError(f"{table.name}: D002 no row is left after the repairs. Correct the rows.")
    bars = _assemble(kept, step, timezone, table.name, _note(kept, faults, repairs))
    return bars.select(*wanted) if wanted else bars


def write_bars(bars: Bars, path: str | Path) -> None:
    """Writes bars as .parquet, .feather, .csv or .csv.gz; `read_bars` gets them back equal.

    The digest is equal too, missing bars included; `source` and `note` are not written. Bars that
    needed keep-jumps or keep-gaps need it again.

    Raises:
      BarError: the suffix is another, or the file can't be written.
    """
    width = bars.num_assets
    frame = pd.DataFrame({"time": bars.index.repeat(width), "symbol": bars.symbols * len(bars)})
    for field in FIELDS:
        frame[field] = getattr(bars, field).ravel()
    if not bars.present.all():
        frame["present"] = bars.present.ravel()
    writers: dict[str, Callable[[], object]] = {
        "parquet": lambda: frame.to_parquet(path, index=False),
        "feather": lambda: frame.to_feather(path),
        "csv": lambda: frame.to_csv(path, index=False),
        "csv.gz": lambda: frame.to_csv(path, index=False),
    }
    suffix = next((s for s in writers if str(path).endswith(f".{s}")), None)
    if suffix is None:
        raise BarError(f"{path}: bars are written as .{', .'.join(writers)}; choose one of these.")
    try:
        writers[suffix]()
    except OSError as error:
        raise BarError(f"{path}: can't be written ({error.strerror or error}).") from error


def _symbols(
    rows: Rows, name: str, symbol: str | Sequence[str] | None, repairs: frozenset[str]
) -> tuple[pd.DataFrame, pd.DataFrame, list[str]]:
    """The rows of the symbols asked for, with their `symbol`, their others, and those symbols."""
    wanted = [symbol] if isinstance(symbol, str) else list(symbol or ())
    raw = rows.frame
    if "symbol" not in raw:
        if len(wanted) > 1:
            raise BarError(f"{name}: D024 no symbol column. Ask for one symbol, or add a column.")
        default = "asset" if name == "DataFrame" else Path(name).name.split(".")[0]
        return raw.assign(symbol=wanted[0] if wanted else default), rows.others, wanted
    if not wanted:
        return raw, rows.others, wanted
    known = [str(each) for each in raw["symbol"].dropna().unique()]
    base = {each: each for each in wanted}
    if "part-reuse" in repairs:  # FB-2012 is a span of FB
        base = {w: w if w in known else re.sub(r"-\d{4}$", "", w) for w in wanted}
    unknown = [each for each in wanted if base[each] not in known]
    if unknown:
        raise BarError(f"{name}: D024 no symbol {unknown[0]!r}. Choose from {', '.join(known)}.")
    mask = raw["symbol"].isin(list(base.values())).to_numpy()
    return raw[mask], rows.others[mask], wanted


def _numbers(raw: pd.DataFrame, decimal: str) -> pd.DataFrame:
    """The columns of bars, fields and factors as float64, NaN where they are no numbers."""
    given = [name for name in (*FIELDS, *FACTORS) if name in raw]
    frame = raw[["symbol", "present"]].copy()
    for name in given:
        column = raw[name]
        if decimal == "," and not pd.api.types.is_numeric_dtype(column.dtype):
            # A column of which one cell is no number came as text; a point is no decimal there.
            text = column.astype("str").str.replace(".", "?", regex=False)
            column = text.str.replace(",", ".", regex=False)
        frame[name] = pd.to_numeric(column, errors="coerce").astype(np.float64)
    return frame


def _mend(
    frame: pd.DataFrame, others: pd.DataFrame, faults: list[Fault], repairs: frozenset[str]
) -> tuple[pd.DataFrame, list[Fault]]:
    """The rows after the repairs asked for, and what is wrong between rows and columns."""
    more = list(column_faults(frame, others, repairs))
    sound = stays = frame["time"].notna().to_numpy()
    for fault in faults:
        if fault.mask is not None:
            if fault.mended_by(repairs) in DROPS:
                stays = stays & ~fault.mask
            if fault.code in ROW_FAULTS:
                sound = sound & ~fault.mask

    def found(fault: Fault, rows: np.ndarray) -> None:
        mask = np.zeros(len(frame), dtype=bool)
        mask[rows] = fault.mask
        more.append(fault._replace(mask=mask))

    kept, rows = frame[stays], np.flatnonzero(stays)
    for fault in order_faults(kept):
        found(fault, rows)
    keep = "last" if "keep-last" in repairs else "first"
    once = ~kept.duplicated(["symbol", "time"], keep=keep).to_numpy()
    kept, rows = kept[once].copy(), rows[once]
    if "widen" in repairs:
        kept["high"] = kept[list(PRICES)].max(axis=1)
        kept["low"] = kept[list(PRICES)].min(axis=1)
    if "no-volume" in repairs:
        kept["volume"] = kept["volume"].fillna(0.0)
    symbol = kept["symbol"]
    if "part-reuse" in repairs:
        kept["symbol"] = part_reused(kept)
    kept = adjust(kept)
    # What a row's own fault makes of its neighbours is not told again.
    for fault in series_faults(kept.assign(symbol=symbol)[sound[rows]]):
        found(fault, rows[sound[rows]])
    return kept, more


def _note(kept: pd.DataFrame, faults: list[Fault], repairs: frozenset[str]) -> str:
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
    bars = kept[kept["present"]]
    flat = (bars["high"] == bars["low"]).to_numpy() & (bars["open"] == bars["close"]).to_numpy()
    if flat.mean() > FLAT and "close-only" not in repairs:
        notes.append(f"{flat.sum():,} of {len(flat):,} bars have open = high = low = close.")
    return " ".join(notes)


def _assemble(
    rows: pd.DataFrame, step: np.timedelta64 | None, timezone: str | None, source: str, note: str
) -> Bars:
    """Bars from rows of which no two share symbol and time, in any order."""
    time, at = np.unique(rows["time"].to_numpy(), return_inverse=True)
    if step is not None:
        own, time = time, np.union1d(time, expected_times(time, step, timezone))
        at = np.searchsorted(time, own)[at]
    code, symbols = pd.factorize(rows["symbol"])
    shape = (len(time), len(symbols))

    def grid(values: object, fill: float | bool) -> np.ndarray:
        out = np.full(shape, fill)
        out[at, code] = values
        return out

    given = grid(True, False)
    fields = {name: grid(rows[name].to_numpy(), np.nan) for name in PRICES}
    carried = pd.DataFrame(fields["close"]).ffill().to_numpy()
    return Bars(
        time=time,
        symbols=tuple(symbols),
        volume=grid(rows["volume"].to_numpy(), 0.0),
        present=grid(rows["present"].to_numpy(), False),
        source=source,
        note=note,
        **{name: np.where(given, field, carried) for name, field in fields.items()},
    )
