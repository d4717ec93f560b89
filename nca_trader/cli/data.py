"""`nca-trader data`: checks a bar file, or downloads one from a venue's history."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from nca_trader.cli.options import READING, add_options, reading_options
from nca_trader.errors import ConfigError

if TYPE_CHECKING:
    from nca_trader.types import Bars


SUFFIXES = (".parquet", ".feather", ".csv", ".csv.gz")


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """Add the bar file to check, or what to download."""
    what = "check: read the file, and say how it is; fetch: download a venue's history to --out"
    parser.add_argument("what", choices=("check", "fetch"), help=what)
    parser.add_argument(
        "file",
        metavar="FILE|VENUE",
        help="check: a CSV, Parquet or Feather file; fetch: yahoo, alpaca or ccxt:EXCHANGE",
    )
    parser.add_argument("symbols", nargs="?", metavar="SYMBOLS", help="fetch: e.g. SPY,QQQ")
    dated = {"begin": ("from", "start"), "end": ("to", "until", "stop")}
    about = {"begin": "fetch: the first bar's date", "end": "fetch: bars close by then; now"}
    for dest, names in dated.items():
        flags = [f"--{name}" for name in names]
        parser.add_argument(*flags, dest=dest, metavar="DATE", help=about[dest])
    parser.add_argument("--bar", metavar="LENGTH", help="fetch: length of a bar, e.g. 1d, 1h, 1m")
    parser.add_argument(
        "--out", metavar="FILE", help="fetch: a .parquet, .feather or .csv; a second run resumes"
    )
    parser.add_argument("--cache", metavar="FOLDER", help="fetch: what came; in the user's cache")
    add_options(parser, *READING)


def run_data(args: argparse.Namespace) -> dict[str, Any]:
    """Read the file, downloaded first where that is asked for; return its summary.

    Raises:
      BarError: every problem of the file. ConfigError: an option of the other task, or none.
    """
    from nca_trader.data.bars import read_bars

    needed = {"SYMBOLS": args.symbols, "--from": args.begin, "--bar": args.bar, "--out": args.out}
    if args.what == "fetch":
        missing = [name for name, value in needed.items() if value is None]
        if missing:
            raise ConfigError(f"data fetch: give {', '.join(missing)} as well.")
        from nca_trader.paper.feeds.fetch import fetch_bars, late_starts, write_whole

        if not args.out.endswith(SUFFIXES):
            raise ConfigError(f"--out {args.out}: bars are written as {', '.join(SUFFIXES)}.")
        source, how = f"{args.file}:{args.symbols}", {"repair": args.repair, "cache": args.cache}
        # The summary below is of the file and not of what the venue sent.
        write_whole(fetch_bars(source, args.begin, args.end, args.bar, **how), args.out)
        args.file = args.out
    elif used := [
        name
        for name, value in (needed | {"--to": args.end, "--cache": args.cache}).items()
        if value
    ]:
        raise ConfigError(f"data check: {', '.join(used)} is of data fetch; leave it out.")

    bars = read_bars(args.file, **reading_options(args))
    # A file with a fault has raised by now, with all of its faults.
    found = {"file": args.file} | summarise(bars)
    if args.what == "fetch":
        # A venue answers a date before its listing with later bars and no error.
        found["late"] = late_starts(bars, args.begin)
    after = f"{found['longest_gap']} after {found['longest_gap_after']}"
    longest = f", the longest {after}" if found["gaps"] else ""
    # Without --every the times of the bars are those of some asset.
    where = " or within the file's trading hours" if args.every else ""
    print(f"{args.file}: no problem")
    print(f"  rows     {found['rows']:,} bars at {found['times']:,} times")
    print(f"  span     {found['first']} to {found['last']}, UTC")
    print(f"  symbols  {len(bars.symbols)}: {', '.join(bars.symbols)}")
    year = "unknown" if len(bars) < 2 else f"{bars.bars_per_year:,.1f} bars: {found['year']}"
    print(f"  year     {year}")
    print(f"  gaps     {found['gaps']:,} steps longer than the usual {found['step']}{longest}")
    print(f"  missing  {found['missing']:,} bars of an asset at a time of the others{where}")
    if found["half_spread_median"] is not None:
        print(f"  spread   half of it {1e4 * found['half_spread_median']:.3g} bp (median)")
    if found["dividends"] is not None:
        print(f"  income   {found['dividends']:,} dividends in cash")
    if found["funding_mean"] is not None:
        print(f"  funding  {1e4 * found['funding_mean']:.3g} bp per bar (mean), longs pay")
    for symbol, first in found.get("late", {}).items():
        print(
            f"  begins   {symbol} on {first}: the venue gave nothing from {args.begin} until then"
        )
    if bars.columns:
        print(f"  columns  {', '.join(bars.columns)}")
    if bars.note:
        print(f"  note     {bars.note}")
    return found


def summarise(bars: Bars) -> dict[str, Any]:
    """Count bars, times, gaps and missing bars; a statistic of an absent column is None."""
    import numpy as np
    import pandas as pd

    from nca_trader.types import trading_year

    between = np.diff(bars.time)
    steps, counts = np.unique(between, return_counts=True)
    # The most frequent step is the usual one; longer ones are gaps.
    usual = steps[np.argmax(counts)] if len(steps) else np.timedelta64("NaT", "ns")
    missing = (~bars.present).sum(axis=0)
    spread, funding, there = bars.half_spread, bars.funding, bars.present
    return {
        # A time at which an asset has no bar is not a row of it.
        "rows": int(there.sum()),
        "times": len(bars),
        "first": bars.index[0].isoformat(),
        "last": bars.index[-1].isoformat(),
        "symbols": list(bars.symbols),
        "step": str(pd.Timedelta(usual)) if len(steps) else None,
        "gaps": int(counts[steps > usual].sum()),
        # `unique` sorts, so the last step is the longest.
        "longest_gap": str(pd.Timedelta(steps[-1])) if len(steps) else None,
        "longest_gap_after": bars.index[int(between.argmax())].isoformat() if len(steps) else None,
        "missing": int(missing.sum()),
        "missing_by_symbol": dict(zip(bars.symbols, map(int, missing), strict=True)),
        # Estimated from the times; annual metrics are scaled by it.
        "bars_per_year": bars.bars_per_year,
        "year": trading_year(bars.time)[1],
        "half_spread_median": None if spread is None else float(np.median(spread[there])),
        "dividends": None if bars.dividend is None else int((bars.dividend != 0.0).sum()),
        "funding_mean": None if funding is None else float(np.mean(funding[there])),
        "note": bars.note,
    }
