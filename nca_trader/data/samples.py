"""Real bars that ship with every installation, for the demo and the examples."""

from __future__ import annotations

import importlib.util
import pathlib
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import pandas as pd

from nca_trader.errors import BarError
from nca_trader.types import PRICES, Bars

SAMPLES = ("sp500",)


class EarlierLooks(NamedTuple):
    """A lower bound on the number of this project's own evaluations of a span.

    Attributes:
      symbols: of the bars.
      first, last: the span's first and last day.
      count: of evaluations, at least.
      source: where the count comes from.
    """

    symbols: tuple[str, ...]
    first: str
    last: str
    count: int
    source: str


# Notes, pages and examples name 15 agents; the record of the project says "dozens of times", so
# at least two dozen. The demos in tests, which select nothing, are not counted.
EARLIER_LOOKS = (
    EarlierLooks(
        ("SP500", "NASDAQ"),
        "2013-01-01",
        "2018-12-31",
        24,
        "this project's own record of its development up to November 2026",
    ),
)


def earlier_looks(symbols: Iterable[str], first: str, last: str) -> int:
    """Return the test-set evaluations in `EARLIER_LOOKS` that concern a span of some symbols.

    Args:
      symbols: any of these counts.
      first: the first day of the span, e.g. "2015-01-01".
      last: the last day of the span, included.

    Example:
      >>> earlier_looks(["SP500"], "2018-01-01", "2019-01-01")
      24
    """
    named, begin, end = set(symbols), np.datetime64(first), np.datetime64(last)
    return sum(
        known.count
        for known in EARLIER_LOOKS
        if named & set(known.symbols)
        and begin < np.datetime64(known.last) + np.timedelta64(1, "D")
        and end >= np.datetime64(known.first)
    )


# On 95% of the days of 1999-2005 (43% in 2006, 25% in 2012-2013, nearly none from 2014) this
# source's S&P 500 open equals the close of the day before: a fill at the next open is then a
# fill at the close that was seen. The NASDAQ's opens are true opens.
NOTE = (
    "S&P 500 and NASDAQ price indexes: not tradable as such, and without dividends. "
    "The S&P 500's open is mostly the close of the day before until 2006."
)


def sample_bars(name: str) -> Bars:
    """Return sample bars.

    Args:
      name: "sp500" for the S&P 500 and NASDAQ price indexes, daily, 1999-01-04 to 2018-12-31,
        5,031 bars, times at 00:00 UTC of the trading day. Prices are in index points, volumes in
        shares. Source: Yahoo Finance, as the `arch` package ships it.

    Raises:
      BarError: no sample has that name.

    Example:
      >>> sample_bars("sp500").symbols
      ('SP500', 'NASDAQ')
    """
    if name not in SAMPLES:
        raise BarError(f"no sample bars {name!r}; there are {', '.join(SAMPLES)}.")
    frames = {"SP500": _frame("sp500"), "NASDAQ": _frame("nasdaq")}
    time = frames["SP500"].index
    if not time.equals(frames["NASDAQ"].index):
        raise BarError("sample bars 'sp500': the two indexes differ in dates; reinstall arch.")
    columns = {
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


def _frame(name: str) -> pd.DataFrame:
    """Return a table of the `arch` package, by date; its own loader takes a second to import."""
    found = importlib.util.find_spec("arch")
    folders = list(found.submodule_search_locations or ()) if found else []
    path = pathlib.Path(*folders[:1]) / "data" / name / f"{name}.csv.gz"
    if not folders or not path.is_file():
        raise BarError(f"sample bars: {path} is not there; reinstall arch, which ships them.")
    frame = pd.read_csv(path, index_col="Date", parse_dates=True)
    return frame.apply(pd.to_numeric, errors="coerce")
