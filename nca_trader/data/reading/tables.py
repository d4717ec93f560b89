"""What a table of bars is: rows under the names of their columns, and what those names mean."""

from __future__ import annotations

from typing import NamedTuple

import pandas as pd

from nca_trader.types import PRICES

# A column called spread is in no alias: vendors give it in points, in pips or in the price's unit.
ALIASES = {
    **dict.fromkeys(("time", "date", "datetime", "timestamp", "date_time", "open_time"), "time"),
    **dict.fromkeys(("symbol", "ticker", "asset", "instrument"), "symbol"),
    **dict.fromkeys(("volume", "vol"), "volume"),
    **{name: name for name in (*PRICES, "present")},
    **dict.fromkeys(("dividend", "dividends", "cash_dividend", "dividend_amount"), "cash_dividend"),
    **dict.fromkeys(("funding", "funding_rate"), "funding"),
    **dict.fromkeys(("bid", "bid_close"), "bid"),
    **dict.fromkeys(("ask", "ask_close"), "ask"),
    "half_spread": "half_spread",
}


class Table(NamedTuple):
    """Rows as they were found, some of those of a file or a frame.

    `frame`: its index is what its readers count, lines from 1 (the header's) or rows from 0.
    `unit`: "line" or "row". `decimal`: the sign of texts that are numbers.
    `short`: lines that end early.
    """

    frame: pd.DataFrame
    name: str
    unit: str
    decimal: str = "."
    short: tuple[int, ...] = ()


def holds_numbers(column: pd.Series) -> bool:
    """Whether the column's type is of real numbers; truths and complex numbers are not bars'."""
    kinds = pd.api.types
    other = kinds.is_bool_dtype(column.dtype) or kinds.is_complex_dtype(column.dtype)
    return kinds.is_numeric_dtype(column.dtype) and not other


def canonical(column: object) -> str:
    """Which of the columns of bars this one is by its name, or ""."""
    return ALIASES.get(str(column).strip().strip("<>").lower().replace(" ", "_"), "")
