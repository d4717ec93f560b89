"""What bars may say beside prices and volume: spread, dividends paid in cash, funding.

`half_spread` is (ask - bid) / (ask + bid) of the quotes at the bar's close, `spread` / (2 close)
of a spread in the price's unit, or a column of its own. An empty cell of a dividend or a funding
rate is none, 0; one of a quote is missing.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from nca_trader.config.reading import INCOME, SPREADS
from nca_trader.data.reading.faults import Fault
from nca_trader.errors import argument

REMEDY = "Correct or remove the row"


def used_extras(frame: pd.DataFrame) -> list[str]:
    """The columns of `frame` that extras are computed from: of the spread's, the most direct."""
    if "half_spread" in frame:
        spread = ["half_spread"]
    elif {"bid", "ask"} <= set(frame):
        spread = ["bid", "ask"]
    else:
        spread = ["spread"] * ("spread" in frame)
    return [*spread, *(name for name in INCOME if name in frame)]


def add_extras(
    frame: pd.DataFrame, raw: pd.DataFrame, empty_is_none: bool = True
) -> Iterator[Fault]:
    """Puts half_spread and 0 for empty income into `frame`, in place; yields what is wrong.

    `frame` has the columns as float64, NaN where `raw` holds no number. Rows whose `present` is
    False are not looked at, and a row counts in the first check that it fails.
    """
    unchecked = frame["present"].to_numpy().copy()

    def fault(code: str, mask: np.ndarray, say: str, about: str, *repairs: str):
        mask = mask & unchecked
        if mask.any():
            unchecked[mask] = False
            value = (raw if code == "D009" else frame)[about].iloc[int(np.argmax(mask))]
            yield Fault(code, say.format(f"{about} = {value}"), REMEDY, mask, repairs, about)

    for name in used_extras(frame):
        value, given = frame[name].to_numpy(), raw[name].notna().to_numpy()
        yield from fault("D009", np.isnan(value) & given, "{} is not a number", name, "drop-bad")
        if name in INCOME and empty_is_none:
            none = ~given & frame["present"].to_numpy()
            frame[name] = value = np.where(none, 0.0, value)
        else:
            yield from fault("D006", np.isnan(value), "{}", name, "drop-nan")
        yield from fault("D007", np.isinf(value), "{}", name, "drop-bad")
        if name in ("bid", "ask"):
            yield from fault("D008", value <= 0.0, "{}", name, "drop-bad")
        elif name != "funding":
            yield from fault("D012", value < 0.0, "{}", name, "drop-bad")
    with np.errstate(divide="ignore", invalid="ignore"):
        if "half_spread" not in frame and {"bid", "ask"} <= set(frame):
            bid, ask = frame["bid"].to_numpy(), frame["ask"].to_numpy()
            frame["half_spread"] = (ask - bid) / (ask + bid)
            crossed = ask < bid
            if (crossed & unchecked).any():
                row = int(np.argmax(crossed & unchecked))
                say = f"crossed quotes: bid {bid[row]} above ask {ask[row]}"
                yield from fault("D031", crossed, say, "ask", "drop-bad")
        elif "half_spread" not in frame and "spread" in frame:
            frame["half_spread"] = frame["spread"] / (2.0 * frame["close"])
    wide = "{} is no fraction below 1"
    if "half_spread" in frame:
        about = next(name for name in SPREADS if name in raw)
        yield from fault("D033", frame["half_spread"].to_numpy() >= 1.0, wide, about, "drop-bad")
    if "funding" in frame:
        size = np.abs(frame["funding"].to_numpy())
        yield from fault("D033", size >= 1.0, wide, "funding", "drop-bad")


def double_count(columns: set[str]) -> Iterator[Fault]:
    """Dividends both as cash and in the prices would be earned twice."""
    if {"dividend", "cash_dividend"} <= columns:
        say = "dividends are given twice, as a factor of the prices and as cash"
        remedy = f"Leave the factor out, or the cash by {argument('columns', 'cash_dividend=-')}"
        yield Fault("D032", say, remedy)
