"""Real bars that every installation has: what the demo and the examples run on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import pandas as pd

from nca_trader.errors import BarError
from nca_trader.types import PRICES, Bars

SAMPLES = ("sp500",)


class EarlierLooks(NamedTuple):
    """How often, at least, this project judged agents on a span before anybody's own ledger began.

    symbols: of the bars. first, last: the span's first and last day. count: a lower bound.
    source: where the count comes from.
    """

    symbols: tuple[str, ...]
    first: str
    last: str
    count: int
    source: str


# Single agents that notes, pages and examples name are 15; the record of the project says "dozens
# of times", so two dozen at least. The suite's own demos, in which nobody selects, are not counted.
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
    """Returns the looks of `EARLIER_LOOKS` at any of `symbols` in a span from `first` to `last`."""
    named, begin, end = set(symbols), np.datetime64(first), np.datetime64(last)
    return sum(
        known.count
        for known in EARLIER_LOOKS
        if named & set(known.symbols)
        and begin < np.datetime64(known.last) + 1
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
    """The sample bars called `name`.

    `sp500`: S&P 500 and NASDAQ price indexes, daily, 1999-01-04 to 2018-12-31, 5,031 bars, times
    at 00:00 UTC of the trading day. Prices are in index points, volumes in shares. Source: Yahoo
    Finance, as the `arch` package ships it.

    Raises:
      BarError: no sample has that name.
    """
    if name not in SAMPLES:
        raise BarError(f"no sample bars {name!r}; there are {', '.join(SAMPLES)}.")
    from arch.data import nasdaq, sp500  # here, because it takes a second that few callers need

    frames = {"SP500": sp500.load(), "NASDAQ": nasdaq.load()}
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
