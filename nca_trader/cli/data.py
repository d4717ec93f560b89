"""`nca-trader data check`: what is wrong with a bar file, or what is in it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from nca_trader.cli.reading import add_reading_arguments, reading_options

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from nca_trader.types import Bars

HELP = "check a bar file: every problem with its line and remedy, or a summary"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("what", choices=("check",), help="check: read the file, and say how it is")
    parser.add_argument("file", metavar="FILE", help="a CSV, Parquet or Feather file")
    add_reading_arguments(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Reads the file; returns its summary.

    Raises:
      BarError: every problem of the file.
    """
    from nca_trader.data.bars import read_bars

    bars = read_bars(args.file, **reading_options(args))
    summary = {"file": args.file} | summarise(bars)
    longest = f", the longest {summary['longest_gap']}" if summary["gaps"] else ""
    print(f"{args.file}: no problem")
    print(f"  rows     {summary['rows']:,} bars at {summary['times']:,} times")
    print(f"  span     {summary['first']} to {summary['last']}, UTC")
    print(f"  symbols  {len(bars.symbols)}: {', '.join(bars.symbols)}")
    print(f"  gaps     {summary['gaps']:,} steps longer than the usual {summary['step']}{longest}")
    print(f"  missing  {summary['missing']:,} bars of an asset at a time of the others")
    for line in _extra_lines(summary):
        print(line)
    if bars.note:
        print(f"  note     {bars.note}")
    return summary


def _extra_lines(summary: dict[str, Any]) -> list[str]:
    """What the file says beside prices and volume, a line each."""
    lines = []
    if summary["half_spread_median"] is not None:
        lines.append(f"  spread   half of it {1e4 * summary['half_spread_median']:.3g} bp (median)")
    if summary["dividends"] is not None:
        lines.append(f"  income   {summary['dividends']:,} dividends in cash")
    if summary["funding_mean"] is not None:
        lines.append(f"  funding  {1e4 * summary['funding_mean']:.3g} bp a bar (mean), longs pay")
    return lines


def summarise(bars: Bars) -> dict[str, Any]:
    """Figures of the bars: counts, span, steps between times, missing bars of each symbol."""
    import numpy as np
    import pandas as pd

    steps, counts = np.unique(np.diff(bars.time), return_counts=True)
    usual = steps[np.argmax(counts)] if len(steps) else np.timedelta64("NaT", "ns")
    missing = (~bars.present).sum(axis=0)
    return {
        "rows": int(bars.present.sum()),
        "times": len(bars),
        "first": bars.index[0].isoformat(),
        "last": bars.index[-1].isoformat(),
        "symbols": list(bars.symbols),
        "step": str(pd.Timedelta(usual)) if len(steps) else None,
        "gaps": int(counts[steps > usual].sum()),
        "longest_gap": str(pd.Timedelta(steps[-1])) if len(steps) else None,
        "missing": int(missing.sum()),
        "missing_by_symbol": dict(zip(bars.symbols, map(int, missing), strict=True)),
        "bars_per_year": bars.bars_per_year,
        "half_spread_median": _of_present(bars, "half_spread", np.median),
        "dividends": None if bars.dividend is None else int((bars.dividend != 0.0).sum()),
        "funding_mean": _of_present(bars, "funding", np.mean),
        "note": bars.note,
    }


def _of_present(bars: Bars, name: str, figure: Callable[[np.ndarray], Any]) -> float | None:
    """A figure of one of the optional arrays, over present bars; None without it."""
    values = getattr(bars, name)
    return None if values is None else float(figure(values[bars.present]))
