"""Splits and dividends: prices by factors that stand in the file, relative to the first bar."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from nca_trader.data.reading.faults import Fault
from nca_trader.data.reading.records import Records
from nca_trader.types import PRICES

FACTORS = ("split", "dividend")


def factor_faults(frame: pd.DataFrame) -> Iterator[Fault]:
    """Present rows whose `split` or `dividend` factor is missing, not finite, or not above 0."""
    for name in FACTORS:
        if name not in frame:
            continue
        factor, present = frame[name].to_numpy(), frame["present"].to_numpy()
        missing, usable = np.isnan(factor), np.isfinite(factor) & (factor > 0)
        for mask, repair in ((missing, "drop-nan"), (~missing & ~usable, "drop-bad")):
            if (mask & present).any():
                say = f"{name} factor = {factor[mask & present][0]}"
                yield Fault("D030", say, "Correct or remove the row", mask & present, (repair,))


def adjust(records: Records) -> None:
    """Adjusts the prices, in place: f_t / f_first times open, high, low and close.

    f is split times dividend, f_first that of the symbol's first present row; volume is divided by
    split_t / split_first, dividends leave it. Cash that a unit pays is split as its price is. What
    vendors divide by, the last factor, is not known at t: relative to the first one, a later split
    changes no earlier bar.
    """
    given = [name for name in FACTORS if name in records]
    if not given:
        return
    code, rows = records["symbol"], np.flatnonzero(records["present"])
    rows = rows[np.argsort(records["time"][rows], kind="stable")]
    first = np.full(len(records.symbols), -1)
    first[code[rows[::-1]]] = rows[::-1]  # the last assignment stays: the first row in time
    factor = {}
    with np.errstate(all="ignore"):  # a factor that is 0 is told by `factor_faults`
        for name in given:
            value = records[name]
            # A symbol without a present row has no factor; its prices are NaN or carried.
            factor[name] = value / np.where(first >= 0, value[first], 1.0)[code]
        total = np.prod(list(factor.values()), axis=0)
        for name in PRICES:
            records[name] = records[name] * total
        if "split" in factor:
            records["volume"] = records["volume"] / factor["split"]
            if "cash_dividend" in records:
                records["cash_dividend"] = records["cash_dividend"] * factor["split"]
