"""Bars in and out of files and frames: strict by default, repaired only where told to be."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from nca_trader.data.checks import (
    Fault,
    order_faults,
    parse_repair,
    read_times,
    refuse,
    value_faults,
)
from nca_trader.errors import BarError
from nca_trader.types import PRICES, Bars

FIELDS = (*PRICES, "volume")
ALIASES = {
    **dict.fromkeys(("time", "date", "datetime", "timestamp", "date_time", "open_time"), "time"),
    **dict.fromkeys(("symbol", "ticker", "asset", "instrument"), "symbol"),
    **dict.fromkeys(("volume", "vol"), "volume"),
    **{name: name for name in (*PRICES, "present")},
}

MISSING = ("", "NA", "N/A", "#N/A", "NaN", "nan", "-NaN", "-nan", "null", "NULL", "None", "<NA>")


def read_bars(
    source: str | Path | pd.DataFrame,
    symbol: str | Sequence[str] | None = None,
    timezone: str | None = None,
    repair: str | Iterable[str] | None = None,
) -> Bars:
    """Bars from a CSV (any delimiter, .gz), Parquet or Feather file, or from a DataFrame.

    Columns, in any case and order: time (or date, datetime, timestamp; or a DatetimeIndex), open,
    high, low, close, volume (or vol), and for several assets symbol (or ticker), one row an asset
    and time. Others are ignored. Where an asset has no row at a time that another has, its bar is
    missing. `present`, which `write_bars` adds where it must, is False for a missing bar's row.

    Args:
      source: the file or the frame.
      symbol: the symbol or symbols to take, in that order; without a symbol column, what to call
        the asset (default: the file's name without its suffix).
      timezone: IANA zone of times without UTC offset, e.g. "America/New_York". Not needed for
        dates, which are read as 00:00 UTC. Times are the bars' opens.
      repair: what may be mended, of `checks.REPAIRS`, e.g. "sort,drop-nan"; all else is refused.
        `Bars.note` then says what was.

    Raises:
      BarError: every problem at once, each with its code, row and remedy.
    """
    repairs = parse_repair(repair)
    raw, name, unit = _load(source)
    raw, faults = _columns(raw, repairs)
    refuse(name, (fault for fault in faults if not fault.mended_by(repairs)))
    raw, wanted = _symbols(raw, name, symbol)
    frame = raw[["symbol", *FIELDS, "present"]].copy()
    for field in FIELDS:
        frame[field] = pd.to_numeric(frame[field], errors="coerce").astype(np.float64)
    frame["time"], time_faults = read_times(raw["time"], timezone)
    faults += [*time_faults, *value_faults(frame, raw)]
    unnamed = (frame["symbol"].isna() | (frame["symbol"] == "")).to_numpy()
    if unnamed.any():
        faults.append(Fault("D024", "the symbol is empty", "Write it there", unnamed))
    kept, faults = _mend(frame, faults, repairs)
    refuse(
        name,
        (fault for fault in faults if not fault.mended_by(repairs)),
        lambda row: f"{unit} {raw.index[row]}",
    )
    if kept.empty:
        raise BarError(f"{name}: D002 no row is left after the repairs. Correct the rows.")
    done = [
        f"{fault.code} by {fault.mended_by(repairs)}"
        + ("" if fault.mask is None else f" ({fault.mask.sum():,} rows)")
        for fault in faults
    ]
    bars = _assemble(kept, name, f"Repaired on reading: {', '.join(done)}." if done else "")
    return bars.select(*wanted) if wanted else bars


def write_bars(bars: Bars, path: str | Path) -> None:
    """Writes bars as .parquet, .feather, .csv or .csv.gz; `read_bars` gets them back equal.

    The digest is equal too, missing bars included; `source` and `note` are not written.

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


def _canonical(column: object) -> str:
    return ALIASES.get(str(column).strip().strip("<>").lower(), "")


def _load(source: str | Path | pd.DataFrame) -> tuple[pd.DataFrame, str, str]:
    """The rows as they are, what to call the source, and what its readers count: line or row.

    The frame's index is that count: lines from 1, the header's; rows from 0.
    """
    if isinstance(source, pd.DataFrame):
        frame, name, unit = source, "DataFrame", "row"
    else:
        (frame, unit), name = _load_file(Path(source)), str(source)
    if unit == "row":
        index = frame.index
        if isinstance(index, pd.DatetimeIndex) and index.name is None:
            frame = frame.rename_axis("time")
        frame = frame.reset_index(drop=not any(map(_canonical, frame.index.names)))
    if frame.empty:
        raise BarError(f"{name}: D002 there are no rows. Give a file with bars.")
    return frame, name, unit


def _load_file(path: Path) -> tuple[pd.DataFrame, str]:
    """The file's rows, and what its readers count: line or row."""
    try:
        if path.stat().st_size == 0:
            raise BarError(f"{path}: D002 the file is empty. Give a file with bars.")
        if path.suffix in (".parquet", ".pq"):
            return pd.read_parquet(path), "row"
        if path.suffix in (".feather", ".arrow"):
            return pd.read_feather(path), "row"
        return _load_csv(path), "line"
    except FileNotFoundError as error:
        raise BarError(f"{path}: D001 no such file. Check the path.") from error
    except BarError:
        raise
    except (OSError, ValueError) as error:  # pandas' and pyarrow's parse errors are ValueErrors
        what = getattr(error, "strerror", None) or str(error).strip().partition("\n")[0]
        remedy = "Give a CSV, Parquet or Feather file"
        raise BarError(f"{path}: D001 can't be read ({what.rstrip('.')}). {remedy}.") from error


def _load_csv(path: Path) -> pd.DataFrame:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
        header = file.readline()
    delimiter = max(",;\t|", key=header.count)
    names = next(csv.reader([header], delimiter=delimiter), [])
    symbols = [name for name in names if _canonical(name) == "symbol"]
    frame = pd.read_csv(
        path,
        sep=delimiter,
        encoding="utf-8-sig",
        low_memory=False,  # else a column's type depends on where the chunks end
        skip_blank_lines=False,  # keeps the line numbers true
        # A symbol is its text: pandas alone reads NA as missing and 007 as 7.
        dtype=dict.fromkeys(symbols, "str"),
        keep_default_na=False,
        na_values={name: MISSING for name in names if name not in symbols},
    )
    if not isinstance(frame.index, pd.RangeIndex):
        raise BarError(
            f"{path}: D022 the rows have more fields than the header's {len(names)} names, so "
            "every column would shift. Name every field."
        )
    frame.index += 2
    return frame[frame.drop(columns=symbols).notna().any(axis=1)]  # without blank lines


def _columns(raw: pd.DataFrame, repairs: frozenset[str]) -> tuple[pd.DataFrame, list[Fault]]:
    """The columns that matter under their canonical names, and what is wrong with their set."""
    faults, found = [], {}
    for column in raw.columns:
        name = _canonical(column)
        if name in found:
            say = f"columns {found[name]!r} and {column!r} both mean {name}"
            faults.append(Fault("D005", say, "Rename or remove one"))
        elif name:
            found[name] = column
    frame = pd.DataFrame({name: raw[column] for name, column in found.items()})
    names = ", ".join(map(str, raw.columns))
    for name in ("time", *FIELDS):
        if name in found:
            continue
        code = {"time": "D004", "close": "D003"}.get(name, "D005")
        option = {"time": (), "close": (), "volume": ("no-volume",)}.get(name, ("close-only",))
        say = f"no {name} column; the columns are {names}"
        faults.append(Fault(code, say, f"Name the column of the {name} {name!r}", None, option))
        if "close" in frame and repairs.intersection(option):
            frame[name] = 0.0 if name == "volume" else frame["close"]
    if "present" not in found:
        frame["present"] = True
    elif frame["present"].dtype != bool:
        say = "column present holds other values than True and False"
        faults.append(Fault("D005", say, "Correct or rename the column"))
    return frame, faults


def _symbols(
    raw: pd.DataFrame, name: str, symbol: str | Sequence[str] | None
) -> tuple[pd.DataFrame, list[str]]:
    """The rows of the symbols asked for, each with its `symbol`, and those symbols."""
    wanted = [symbol] if isinstance(symbol, str) else list(symbol or ())
    if "symbol" not in raw:
        if len(wanted) > 1:
            raise BarError(f"{name}: D024 no symbol column. Ask for one symbol, or add a column.")
        default = "asset" if name == "DataFrame" else Path(name).name.split(".")[0]
        return raw.assign(symbol=wanted[0] if wanted else default), wanted
    known = [str(each) for each in raw["symbol"].dropna().unique()]
    unknown = [each for each in wanted if each not in known]
    if unknown:
        raise BarError(f"{name}: D024 no symbol {unknown[0]!r}. Choose from {', '.join(known)}.")
    return (raw[raw["symbol"].isin(wanted)] if wanted else raw), wanted


def _mend(
    frame: pd.DataFrame, faults: list[Fault], repairs: frozenset[str]
) -> tuple[pd.DataFrame, list[Fault]]:
    """The rows after the repairs asked for, and all faults with those of their order."""
    stays = frame["time"].notna().to_numpy()
    for fault in faults:
        if fault.mask is not None and fault.mended_by(repairs) in ("drop-nan", "drop-bad"):
            stays = stays & ~fault.mask
    kept = frame[stays].copy()
    for fault in order_faults(kept):
        mask = np.zeros(len(frame), dtype=bool)
        mask[stays] = fault.mask
        faults = [*faults, fault._replace(mask=mask)]
    if "widen" in repairs:
        kept["high"] = kept[list(PRICES)].max(axis=1)
        kept["low"] = kept[list(PRICES)].min(axis=1)
    if "no-volume" in repairs:
        kept["volume"] = kept["volume"].fillna(0.0)
    keep = "last" if "keep-last" in repairs else "first"
    return kept.drop_duplicates(["symbol", "time"], keep=keep), faults


def _assemble(rows: pd.DataFrame, source: str, note: str) -> Bars:
    """Bars from rows of which no two share symbol and time, in any order."""
    time, at = np.unique(rows["time"].to_numpy(), return_inverse=True)
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
