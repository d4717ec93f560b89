"""Numbers as a reader sees them, and a sentence that goes with them."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percent(value: float, digits: int = 1) -> str:
    """Write 0.123 as 12.3% and NaN as n/a. A value that rounds to zero has no minus sign."""
    # `z` takes the sign from a value that rounds to zero.
    return "n/a" if math.isnan(value) else f"{value:z.{digits}%}"


def decimal(value: float, digits: int = 2) -> str:
    """Write 1.234 as 1.23 and NaN as n/a."""
    return "n/a" if math.isnan(value) else f"{value:z.{digits}f}"


def few(names: Sequence[str], most: int = 4) -> str:
    """Write the first names, and how many more there are."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def listed(names: Sequence[str]) -> str:
    """Join names as `"a, b and c"`."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def first_sentence(text: str) -> tuple[str, str]:
    """Return the first sentence of a text and the rest."""
    first, stop, rest = text.partition(". ")
    return first + stop.strip(), rest


def count(number: int, noun: str) -> str:
    """Write "1 bar" or "2,000 bars"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def times(number: int) -> str:
    """Write "once" or "2 times"."""
    return "once" if number == 1 else f"{number} times"


def whole(value: float) -> str:
    """Write 1234.0 as 1,234 and NaN as n/a."""
    return "n/a" if math.isnan(value) else f"{value:,.0f}"


def significant(value: float) -> str:
    """Write 0.01234 as 0.0123 and NaN as n/a."""
    return "n/a" if math.isnan(value) else f"{value:.3g}"


def money(value: float) -> str:
    """Write 1234567.0 as 1.23M and NaN as n/a."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return significant(value / size) + unit
    return significant(value)


def with_error(value: float, error: float, write=decimal) -> str:
    """Write an estimate with its standard error, e.g. "0.52 (se 0.03)"."""
    return f"{write(value)} (se {write(error)})"


def in_sample_sentence(in_sample: int, num_bars: int) -> str:
    """Say that the agent had seen `in_sample` of the `num_bars` bars."""
    return (
        f"IN SAMPLE: {in_sample:,} of these {num_bars:,} bars are not later than the last that the "
        "agent was trained or selected on. What it did here is not evidence of what it would do on "
        "others."
    )
