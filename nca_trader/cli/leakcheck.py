"""`nca-trader leakcheck`: checks a rule, a feature or the user's own function for look-ahead."""

from __future__ import annotations

import argparse
from typing import Any

from nca_trader.cli import fail_check
from nca_trader.cli.options import COUNT, READING, add_options, params_of, reading_options, real
from nca_trader.config.agent import RULES

NOTE = (
    "STRATEGY is a rule ("
    + ", ".join(RULES)
    + "), feature:NAME, cost:NAME, or FILE.py:NAME, your own "
    "code, which is run: a function of nca.Bars that returns one row per bar, a Strategy, a "
    "Feature, or a function of --param alone that returns a Strategy or a Feature. Exit code 0: "
    "no look-ahead was found; 1: it looks ahead; 2: it can't be checked."
)


def add_leakcheck_options(parser: argparse.ArgumentParser) -> None:
    """Add the strategy or feature, its bars, and how hard to search for look-ahead."""
    parser.epilog = NOTE
    parser.add_argument(
        "strategy", metavar="STRATEGY", help="a rule, feature:NAME, cost:NAME or FILE.py:NAME"
    )
    parser.add_argument("--data", metavar="FILE", required=True, help="a bar file (CSV, Parquet)")
    parser.add_argument("--cases", type=COUNT, default=200, help="futures to try (default 200)")
    parser.add_argument(
        "--decided",
        choices=("close", "open"),
        default="close",
        help="row t is decided at bar t's close (default), or at its open: then only the open of "
        "bar t may be used",
    )
    parser.add_argument(
        "--tolerance",
        type=real("[0, inf)"),
        default=0.0,
        help="largest change that is rounding, e.g. 1e-9 (default 0: bit for bit)",
    )
    add_options(parser, "param", *READING, seed={"default": 0, "help": "of the cases (default 0)"})


def run_leakcheck(args: argparse.Namespace) -> dict[str, Any]:
    """Check; return the report.

    Raises:
      CheckFailed: it looks ahead.
      ConfigError: there is no such strategy, or it can't be checked.
      BarError: see `read_bars`.
    """
    from nca_trader.data.bars import read_bars
    from nca_trader.evaluate.combinations import subject_of
    from nca_trader.evaluate.lookahead.leakcheck import leakcheck

    name = args.strategy
    subject = subject_of(name, params_of(args))
    # After the subject, whose faults are found without reading a large file.
    bars = read_bars(args.data, **reading_options(args))
    names = ("cases", "seed", "decided", "tolerance")
    found = leakcheck(subject, bars, name=name, **{each: getattr(args, each) for each in names})
    print(found)
    result = {"strategy": name, "data": args.data} | found.to_dict()
    if not found.ok:
        what = "it looks ahead" if found.leaks else "it needs later bars to answer for earlier ones"
        use = "use bars up to its own row only"
        fail_check(args, result, f"{name}: {what}; see above, and {use}.")
    return result
