"""Columns of your own, joined to bars as of the times at which they were known."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from nca_trader.cloud import CloudPath, place
from nca_trader.config.ranges import describe
from nca_trader.config.reading import length_of, role_of
from nca_trader.data.calendar import bar_length
from nca_trader.data.reading.faults import Kind, Request, refusal, refuse
from nca_trader.data.reading.files import Frame, load, name_source
from nca_trader.data.reading.parse import floats
from nca_trader.data.reading.times import keep_cells, read_times, whole
from nca_trader.errors import ConfigError, argument
from nca_trader.types import Bars

NAME = re.compile(r"[A-Za-z_]\w*")
LATER = re.compile(r"(.+)\+(\d+[A-Za-z]+)")  # a source and its delay, as one text


class Added(NamedTuple):
    """A column as the user gave it.

    Attributes:
      source: a frame, the path of a file, or the name of a column of the bars' own file.
      delay: from a value's stamp until it was known; None: a step of its own stamps.
    """

    source: Any
    delay: np.timedelta64 | None

    @property
    def of_file(self) -> bool:
        """Whether it is a column of the bars' own file."""
        text = self.source
        return isinstance(text, str) and not ("//" in text or os.path.exists(text))


class Values(NamedTuple):
    """The values of a frame: `[n]` stamps in UTC, numbers, and symbols or None."""

    time: np.ndarray
    value: np.ndarray
    symbol: np.ndarray | None


def parse_extra(extra: str | Mapping[str, Any] | None) -> dict[str, Added]:
    """Return the columns by name of "vix=vix.csv+1d,score=Score", or of a mapping.

    Raises:
      ConfigError: a name, a source or a delay is not one.
    """
    if isinstance(extra, str):
        pairs = (part.strip().partition("=") for part in extra.split(","))
        extra = {name: source for name, _, source in pairs}
    if not isinstance(extra, Mapping | None):
        raise ConfigError(f"{argument('extra')} is {describe(extra)}; give frames by name.")
    found = {}
    for name, source in (extra or {}).items():
        if not (isinstance(name, str) and NAME.fullmatch(name)):
            raise ConfigError(f"{argument('extra')}: {name!r} is not a name; give e.g. vix.")
        delay = None
        if isinstance(source, tuple) and len(source) == 2:
            source, delay = source
        elif isinstance(source, str) and (text := LATER.fullmatch(source)):
            source, delay = text[1], text[2]
        source = source.to_frame(name) if isinstance(source, pd.Series) else source
        if not isinstance(source, Frame | str | os.PathLike | CloudPath) or str(source) == "":
            raise ConfigError(
                f"{argument('extra')}: {name} is {describe(source)}; give a frame, a file, a "
                "column of the bars' file, or one of these and a delay."
            )
        found[name] = Added(source, _delay(name, delay))
    return found


def _delay(name: str, delay: Any) -> np.timedelta64 | None:
    if delay is None:
        return None
    length = length_of(delay)
    if not length >= np.timedelta64(0, "ns"):
        say = f"{name} has the delay {describe(delay)}; give a time such as 1d, 12h or 0s"
        raise ConfigError(f"{argument('extra')}: {say}.")
    return length


def with_columns(bars: Bars, wanted: Mapping[str, Added], request: Request) -> Bars:
    """Return bars with columns: the last value that was known at each bar's close.

    Args:
      bars: which have the columns of their own file already, as of each row.
      wanted: by name.
      request: the zone and the order of dates in frames.

    Raises:
      BarError: a frame has no times or no numbers. ConfigError: a delay must be given.
    """
    length = bar_length(bars.time)
    close = bars.time if np.isnat(length) else bars.time + length
    columns = dict(bars.columns)
    for name, column in wanted.items():
        if not column.of_file:
            found = _values(name, column.source, request)
        elif name not in columns:
            say = f"no column {column.source!r}"
            raise refusal(request.name, Kind.D005, say, "Give a frame, or the file's path")
        elif column.delay is None:
            continue
        else:
            time, symbol = np.repeat(bars.time, bars.num_assets), np.tile(bars.symbols, len(bars))
            found = Values(time, columns[name].ravel(), symbol)
        delay = _own_steps(found.time) if column.delay is None else column.delay
        if np.isnat(delay).any():
            said = argument("extra")
            raise ConfigError(f"{said}: {name} has one time; say when it was known, e.g. +1d.")
        columns[name] = np.column_stack(
            [_as_of(found, delay, close, symbol) for symbol in bars.symbols]
        )
    return dataclasses.replace(bars, columns=columns)


def _own_steps(time: np.ndarray) -> np.ndarray:
    """Return how long after each stamp `[n]` its span ends: the most frequent step of the stamps.

    Up to half a step longer where the next stamp says so: months, leap years, days of 25 hours.
    """
    stamps, at = np.unique(time, return_inverse=True)
    step = bar_length(stamps)
    gaps = np.append(np.diff(stamps), step)
    return np.where((gaps > step) & (gaps < 1.5 * step), gaps, step)[at]


def _as_of(
    found: Values, delay: np.ndarray | np.timedelta64, close: np.ndarray, symbol: str
) -> np.ndarray:
    """Return the last value `[N]` that was known at each close; NaN before the first."""
    taken = np.isfinite(found.value)
    if found.symbol is not None:
        taken &= found.symbol == symbol
    known, value = (found.time + delay)[taken], found.value[taken]
    # Of two with one stamp the later row is the corrected one.
    order = np.argsort(known, kind="stable")
    rows = np.searchsorted(known[order], close, side="right") - 1
    value = np.append(value[order], np.nan)
    return value[rows]  # -1: the NaN


def _values(name: str, source: Any, request: Request) -> Values:
    """Read a frame or a file of stamps and numbers, for all assets or by symbol."""
    source = source if isinstance(source, Frame) else place(source)
    request = request._replace(name=name_source(source))
    chunks = [chunk for chunk in load(source, request) if not chunk.frame.empty]
    where = f"{argument('extra')}: {name}"
    if not chunks:
        raise refusal(where, Kind.D002, "there are no rows")
    labels = list(chunks[0].frame.columns)
    roles = {role_of(label): i for i, label in reversed([*enumerate(labels)])}
    if "time" not in roles:
        say = f"no time column; the columns are {', '.join(map(str, labels))}"
        raise refusal(where, Kind.D004, say, "Call it time")
    others = [i for i in range(len(labels)) if i not in (roles["time"], roles.get("symbol"))]
    same = [i for i in others if str(labels[i]).strip().lower() == name.lower()]
    # Of a file of prices the close, or else the only column that there is.
    at = same or ([roles["close"]] if "close" in roles else others)
    if len(at) != 1:
        say = f"does not show which column it is; the columns are {', '.join(map(str, labels))}"
        raise refusal(where, Kind.D005, say, f"Call it {name}")
    time = whole([keep_cells(chunk.frame.iloc[:, roles["time"]]) for chunk in chunks])
    read = read_times(time, request.timezone, request.dates)
    refuse(where, read.faults)
    value = np.concatenate([floats(chunk.frame.iloc[:, at[0]], chunk) for chunk in chunks])
    if not np.isfinite(value).any():
        raise refusal(where, Kind.D005, f"column {labels[at[0]]!r} has no numbers")
    symbol = None
    if "symbol" in roles:
        texts = [chunk.frame.iloc[:, roles["symbol"]].astype("str") for chunk in chunks]
        symbol = pd.concat(texts).str.strip().to_numpy(object)
    return Values(read.utc, value, symbol)
