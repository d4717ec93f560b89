"""Real bars that every installation has: what the demo and the examples run on."""

from __future__ import annotations

import numpy as np
import pandas as pd

from nca_trader.errors import BarError
from nca_trader.types import PRICES, Bars

SAMPLES = ("sp500",)

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
