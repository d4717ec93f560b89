"""Clean files of bars, and faults to plant into them."""

from typing import NamedTuple

import numpy as np
import pandas as pd

from nca_trader.types import PRICES

HEADER = ["time", "symbol", *PRICES, "volume", "value", "interest"]


class Clean(NamedTuple):
    """A clean long file of texts: `cells` `[rows, columns]` under HEADER, rows by asset."""

    cells: np.ndarray
    num_assets: int

    @property
    def length(self):
        return len(self.cells) // self.num_assets


def market(seed, length=150, num_assets=2, drift=0.01):
    """Minute bars, from another generator than the package's: a walk of ticks of a cent."""
    rng = np.random.default_rng(seed)
    rows = []
    for a in range(num_assets):
        last = 40.0 + 30.0 * a
        for t in range(length):
            gap, body = rng.normal(0.0, drift / 20), rng.normal(0.0, drift)
            open_, close = last * np.exp(gap), last * np.exp(gap + body)
            high = max(open_, close) * (1 + abs(rng.normal(0, drift / 4)))
            low = min(open_, close) * (1 - abs(rng.normal(0, drift / 4)))
            volume = rng.integers(100, 1000)
            interest = rng.integers(1_000_000, 2_000_000)
            stamp = pd.Timestamp("2021-03-01T14:30Z") + pd.Timedelta(t, "min")
            row = [stamp.strftime("%Y-%m-%dT%H:%M:%SZ"), "AB"[a]]
            row += [f"{x:.6f}" for x in (open_, high, low, close)]
            rows.append([*row, str(volume), f"{volume * (high + low) / 2:.6f}", str(interest)])
            last = close
    return Clean(np.array(rows, dtype=object), num_assets)


def text_of(cells, header=HEADER):
    return "\n".join(",".join(row) for row in [header, *cells.tolist()]) + "\n"


def cell(column, value):
    """Writes a value into a row's column."""

    def plant(cells, row):
        cells[row, HEADER.index(column)] = value
        return row

    return plant


def scaled(column, factor):
    def plant(cells, row):
        at = HEADER.index(column)
        cells[row, at] = f"{float(cells[row, at]) * factor:.6f}"
        return row

    return plant


def exchange(first, second):
    def plant(cells, row):
        i, j = HEADER.index(first), HEADER.index(second)
        cells[row, [i, j]] = cells[row, [j, i]]
        return row

    return plant


def same_time_as_above(cells, row):
    cells[row, 0] = cells[row - 1, 0]
    return row


def without_offset(cells, row):
    cells[row, 0] = cells[row, 0].removesuffix("Z")
    return row


def swapped_rows(cells, row):
    cells[[row - 1, row]] = cells[[row, row - 1]]
    return row


def all_prices(factor):
    """All four prices of this row and those below, of one asset: an unadjusted split."""

    def plant(cells, row):
        rows = (np.arange(len(cells)) >= row) & (cells[:, 1] == cells[row, 1])
        for name in PRICES:
            at = HEADER.index(name)
            cells[rows, at] = [f"{float(x) * factor:.6f}" for x in cells[rows, at]]
        return row

    return plant


def years_later(cells, row):
    rows = np.flatnonzero((np.arange(len(cells)) >= row) & (cells[:, 1] == cells[row, 1]))
    for r in rows:
        cells[r, 0] = cells[r, 0].replace("2021", "2024")
    return row


# code, how to plant it at a row, the repair that reads the file all the same (None: there is none)
PLANTS = {
    "empty": ("D006", cell("close", ""), "drop-nan"),
    "na": ("D006", cell("low", "N/A"), "drop-nan"),
    "no volume": ("D006", cell("volume", ""), "no-volume"),
    "inf": ("D007", cell("open", "inf"), "drop-bad"),
    "1e400": ("D007", cell("high", "1e400"), "drop-bad"),
    "infinite volume": ("D007", cell("volume", "-inf"), "drop-bad"),
    "zero": ("D008", cell("low", "0"), "drop-bad"),
    "negative": ("D008", cell("close", "-37.63"), "drop-bad"),
    "text": ("D009", cell("open", "halted"), "drop-bad"),
    "no thousands": ("D009", cell("volume", '"12,34"'), "drop-bad"),
    "high below low": ("D010", exchange("high", "low"), "drop-bad"),
    "close above high": ("D011", scaled("close", 1.5), "widen"),
    "open below low": ("D011", scaled("open", 0.6), "widen"),
    "price in the volume": ("D011", exchange("close", "volume"), "widen"),
    "negative volume": ("D012", cell("volume", "-5"), "drop-bad"),
    "no time": ("D013", cell("time", ""), "drop-bad"),
    "a word for a time": ("D013", cell("time", "yesterday"), "drop-bad"),
    "another date form": ("D013", cell("time", "03/01/2021 14:31"), "drop-bad"),
    "a day of no month": ("D013", cell("time", "2021-02-30T14:31:00Z"), "drop-bad"),
    "naive among aware": ("D014", without_offset, None),
    "order": ("D020", swapped_rows, "sort"),
    "duplicate": ("D021", same_time_as_above, "keep-first"),
    "no symbol": ("D024", cell("symbol", ""), "drop-bad"),
    "years between": ("D025", years_later, "keep-gaps"),
    "split": ("D026", all_prices(0.5), "keep-jumps"),
    "reverse split": ("D026", all_prices(10.0), "keep-jumps"),
}
