"""Reads cells as numbers, of a chunk in any notation that vendors write."""

from __future__ import annotations

from collections.abc import Container

import numpy as np
import pandas as pd

from nca_trader.config.reading import FIELDS, INCOME, SPREADS
from nca_trader.data.reading.faults import FACTORS, Unread
from nca_trader.data.reading.files import Chunk
from nca_trader.data.reading.times import holds_numbers

NUMBERS = (*FIELDS, *FACTORS, *INCOME, *SPREADS)
SHOWN, LONGEST_CELL = 1000, 1000  # cells that are not numbers, and characters of each


def spread_columns(names: Container[str]) -> list[str]:
    """Return the columns that give the half spread, the most direct ones of the table.

    >>> spread_columns({"bid", "ask", "spread"})
    ['bid', 'ask']
    """
    if "half_spread" in names:
        return ["half_spread"]
    if "bid" in names and "ask" in names:
        return ["bid", "ask"]
    return ["spread"] if "spread" in names else []


def numbers(
    raw: pd.DataFrame, chunk: Chunk, unread: dict[str, Unread], begin: int
) -> dict[str, np.ndarray]:
    """Return a chunk's columns `[n]`: float64, NaN where a cell is not a number, and `present`.

    Adds the half spread, and 0 where no income is paid. Cells of rows from `begin` on that are
    neither numbers nor empty are added to `unread`.
    """
    present = raw["present"].to_numpy()
    arrays = {"present": present}
    for name in (*FIELDS, "ticks", *FACTORS, *INCOME, *spread_columns(raw)):
        if name not in raw:
            continue
        values, empty = floats(raw[name], chunk), raw[name].isna().to_numpy()
        rows = np.flatnonzero(np.isnan(values) & ~empty)
        if len(rows):
            cells = unread.setdefault(name, Unread())
            cells.rows.append(rows + begin)
            for row in rows[: SHOWN - len(cells.texts)]:
                cells.texts[int(row) + begin] = f"{raw[name].iloc[row]}"[:LONGEST_CELL]
        # An empty cell of income means 0, but a text is a fault.
        arrays[name] = np.where(present & empty, 0.0, values) if name in INCOME else values
    with np.errstate(divide="ignore", invalid="ignore"):
        if "bid" in arrays:
            bid, ask = arrays["bid"], arrays["ask"]
            arrays["half_spread"] = (ask - bid) / (ask + bid)
        elif "spread" in arrays:
            arrays["half_spread"] = arrays["spread"] / (2.0 * arrays["close"])
    return arrays


def floats(column: pd.Series, chunk: Chunk) -> np.ndarray:
    """Return a column as float64, NaN where a cell is not a number."""
    number = holds_numbers(column)
    # Lists, dates and integers of many digits: to_numeric raises, or counts nanoseconds.
    text = column if number else column.astype("str")
    values = pd.to_numeric(text, errors="coerce").to_numpy(np.float64, na_value=np.nan)
    # With a decimal comma, a point does not part decimals.
    left = column.notna().to_numpy() & (np.isnan(values) | (chunk.decimal == ","))
    if not number and left.any():
        cleaned = pd.to_numeric(_cleaned(text[left], chunk), errors="coerce")
        values = values.copy()
        values[left] = cleaned.to_numpy(np.float64, na_value=np.nan)
    return values


def _cleaned(text: pd.Series, chunk: Chunk) -> pd.Series:
    """Return numbers as Python writes them, of texts such as $1,234.50, 1.234,5 and 190.28M.

    The comma of 1,234 is removed only where other numbers show that it is not the decimal sign.
    """
    text = text.str.strip().str.replace(r"^([+-]?)[$€£¥] ?", r"\1", regex=True)
    for letters, power in (("Kk", "e3"), ("Mm", "e6"), ("Bb", "e9")):
        text = text.str.replace(
            rf"^([+-]?[0-9][0-9.,' ]*) ?[{letters}]$", rf"\1{power}", regex=True
        )
    parts = "' \u00a0\u202f" + (",." if chunk.proved else "").replace(chunk.decimal, "")
    # By threes, or as in India by twos until the last three.
    three, two = rf"[{parts}][0-9]{{3}}", rf"[{parts}][0-9]{{2}}"
    by = f"[0-9]{{1,3}}(?:{three})+|[0-9]{{1,2}}(?:{two})+{three}"
    groups = rf"[+-]?(?:{by})(?:\{chunk.decimal}[0-9]+)?(?:e[0-9])?"
    whole = text.str.fullmatch(groups).to_numpy(bool, na_value=False)
    text = text.mask(whole, text.str.replace(f"[{parts}]", "", regex=True))
    if chunk.decimal == ",":
        text = text.str.replace(".", "?", regex=False).str.replace(",", ".", regex=False)
    return text
