"""The options of `read_bars`, the same for every command that reads a bar file."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

from nca_trader.errors import argument, options_named

OPTIONS = ("symbol", "timezone", "repair", "columns", "dates", "decimal", "every")


def add_reading_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--symbol", help="of a file that holds several")
    parser.add_argument("--timezone", help="of times without an offset, e.g. America/New_York")
    parser.add_argument(
        "--repair",
        metavar="NAMES",
        help="repairs of the file that are allowed, e.g. sort,drop-nan: sort, keep-first, "
        "keep-last, drop-nan, drop-bad, widen, close-only, no-volume, swap-volume, part-reuse, "
        "keep-gaps, keep-jumps, unadjusted; without it a fault is refused",
    )
    parser.add_argument(
        "--columns",
        metavar="ROLE=COLUMN,...",
        help="which column is what, by name or number from 1, e.g. time=1+2,close=prccd; roles: "
        "time, symbol, open, high, low, close, volume; factors of prices: split, dividend; cash "
        "and quotes: cash_dividend, funding, bid, ask, spread, half_spread; ROLE=- takes none",
    )
    parser.add_argument("--dates", choices=("dmy", "mdy"), help="the order in 01/02/2018")
    parser.add_argument("--decimal", choices=(".", ","), help="the decimal sign of a CSV")
    parser.add_argument(
        "--every", metavar="LENGTH", help="e.g. 1min, 1h, 1d: gaps of trading are missing bars"
    )


def reading_options(args: argparse.Namespace) -> dict[str, Any]:
    """What of them was given, as `read_bars` takes it."""
    given = {name: getattr(args, name) for name in OPTIONS}
    return {name: value for name, value in given.items() if value is not None}


def typed(command: str, *words: str, **options: Any) -> str:
    """Writes a whole command, quoted for a shell.

    Args:
      command: e.g. "backtest". words: its arguments without a name.
      options: values by argument, those that are None left out; a list repeats its option, True
        is an option without a value.
    """
    with options_named():
        parts = ["nca-trader", command, *map(shlex.quote, words)]
        for name, value in options.items():
            if value is True:
                parts.append(argument(name))
            elif value is not None and value is not False:
                each = value if isinstance(value, list | tuple) else [value]
                parts += [argument(name, item) for item in each]
    return " ".join(parts)
