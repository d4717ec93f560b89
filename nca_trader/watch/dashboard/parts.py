"""The parts of a view model: cells, tables and charts of JSON types, and their texts.

A template and a script place them without a decision of their own, so that all that a page says
can be tested in Python.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

POINTS = 1200  # of a line at most: a screen has no more columns
NOTHING = "n/a"


def percent(share: float, digits: int = 1, signed: bool = False) -> str:
    """Write a share, e.g. "12.5%"; "n/a" for NaN.

    >>> percent(0.125), percent(-0.0312, 2), percent(0.02, signed=True), percent(math.nan)
    ('12.5%', '-3.12%', '+2.0%', 'n/a')
    """
    if not math.isfinite(share):
        return NOTHING
    text = f"{100.0 * share:{'+' if signed else ''},.{digits}f}%"
    # A loss that rounds to zero has no sign.
    return text if text.strip("+-0.%") else text.lstrip("+-")


def amount(value: float, digits: int = 2) -> str:
    """Write a sum of money or units.

    >>> amount(1234.5), amount(-0.25, 4), amount(-1e-9), amount(math.inf)
    ('1,234.50', '-0.2500', '0.00', 'n/a')
    """
    # Less than a digit has no sign.
    return f"{value:z,.{digits}f}" if math.isfinite(value) else NOTHING


def points(share: float) -> str:
    """Write a fraction of a price in basis points.

    >>> points(0.00025), points(math.nan)
    ('2.5 bp', 'n/a')
    """
    return f"{1e4 * share:z.1f} bp" if math.isfinite(share) else NOTHING


def mean(values: Collection[float]) -> float:
    """Return the mean; NaN of none."""
    return sum(values) / len(values) if values else math.nan


def last(values: Sequence[float]) -> float:
    """Return the last value; NaN of none."""
    return values[-1] if values else math.nan


def short(value: float) -> str:
    """Write a number in about four digits, e.g. a metric.

    >>> short(0.00012345), short(73412.0), short(math.nan)
    ('0.0001234', '73,412', 'n/a')
    """
    if not math.isfinite(value):
        return NOTHING
    return f"{value:,.0f}" if abs(value) >= 1000.0 else f"{value:.4g}"


def moment(nanoseconds: int, seconds: bool = False) -> str:
    """Write a time, UTC, without the time of day at midnight.

    >>> moment(1546214400 * 10**9), moment(1546254061 * 10**9), moment(2**70)
    ('2018-12-31', '2018-12-31 11:01', 'n/a')
    """
    try:
        at = datetime.datetime.fromtimestamp(nanoseconds // 10**9, datetime.UTC)
    except (OverflowError, ValueError, OSError):
        return NOTHING
    text = at.strftime("%Y-%m-%d %H:%M:%S")
    return text if seconds else text[:10] if text.endswith(" 00:00:00") else text[:16]


def ago(seconds: float) -> str:
    """Write an age.

    >>> [ago(x) for x in (0.4, 12, 125, 7300, 200_000, math.nan)]
    ['now', '12 s', '2 min', '2 h', '2 days', 'n/a']
    """
    if not math.isfinite(seconds):
        return NOTHING
    if seconds < 1.0:
        return "now"
    # Up to a limit above one unit: "75 s" says more than "1 min".
    for most, unit, name in ((90, 1, "s"), (5400, 60, "min"), (129_600, 3600, "h")):
        if seconds < most:
            return f"{seconds // unit:.0f} {name}"
    return f"{seconds // 86_400:.0f} days"


def cell(text: str, tone: str = "", bar: float | None = None) -> dict[str, Any]:
    """Return a table's cell. bar: a length in [0, 1] that is drawn before the text."""
    if bar is None or not math.isfinite(bar):
        return {"text": text, "tone": tone}
    return {"text": text, "tone": tone, "bar": round(min(max(bar, 0.0), 1.0), 4)}


def tile(key: str, label: str, value: str, note: str = "", tone: str = "") -> dict[str, str]:
    """Return one large number of a page, its label, and a note below it."""
    return {"key": key, "label": label, "value": value, "note": note, "tone": tone}


def table(
    headers: Sequence[str], rows: Sequence[Sequence[Any]], note: str = "", empty: str = ""
) -> dict[str, Any]:
    """Return a table; a text stands for a plain cell. empty: said where there is no row."""
    # Texts stay texts: the template escapes them, and no cell holds markup.
    made = [[item if isinstance(item, dict) else cell(str(item)) for item in row] for row in rows]
    return {"headers": list(headers), "rows": made, "note": note if made else empty}


def chart(
    x: Sequence[float],
    lines: Mapping[str, Sequence[float]],
    pick: Callable[[list[float]], float],
    **how: Any,
) -> dict[str, Any]:
    """Return a line chart of at most `POINTS` points.

    Args:
      x: rising, seconds since 1970 UTC.
      lines: y by label.
      pick: what stands for the points that share a place, e.g. `min`.
      **how: `percent` says whether y is a share; `area` fills below.
    """
    size = max(-(-len(x) // POINTS), 1)  # points that share a place, rounded up
    places = [slice(start, start + size) for start in range(0, len(x), size)]
    kept = []
    for label, y in lines.items():
        # A gap of NaN leaves a gap in the line, and no zero.
        seen = ([value for value in y[place] if math.isfinite(value)] for place in places)
        # Seven digits are more than a screen resolves, and half of what floats take in JSON.
        values = [float(f"{pick(some):.7g}") if some else None for some in seen]
        kept.append({"label": label, "y": values})
    return {"x": [x[place][-1] for place in places], "lines": kept, **how}


def histogram(values: Sequence[float], edges: Sequence[float]) -> list[int]:
    """Count values in `(edge before, edge]`; the last bin holds all above the last edge.

    >>> histogram([1, 10, 11, 5000], [10, 100])
    [2, 1, 1]
    """
    bins = np.searchsorted(edges, values)
    return np.bincount(bins, minlength=len(edges) + 1).tolist()


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value that `share` of all do not exceed; NaN of none.

    >>> quantile([3.0, 1.0, 2.0, 4.0], 0.5), quantile([1.0, 2.0], 0.99)
    (2.0, 2.0)
    """
    return float(np.quantile(values, share, method="inverted_cdf")) if values else math.nan
