"""`nca-trader trials` and `runs`: what was tried in a project folder, and its runs."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from nca_trader.errors import ConfigError, printable

FOLDER = "runs"


def add_trials_options(parser: argparse.ArgumentParser) -> None:
    """Add the project folder."""
    parser.epilog = (
        "Every agent that was trained and every evaluation on bars after training is a line. The "
        "more agents were tried on a market, the better the best of them looks by luck alone."
    )
    parser.add_argument(
        "folder", nargs="?", default=FOLDER, metavar="FOLDER", help="of the runs (default runs)"
    )


def run_trials(args: argparse.Namespace) -> dict[str, Any]:
    """Print the trial log and its counts per market; return both."""
    from nca_trader.cloud import place
    from nca_trader.config.records import plain
    from nca_trader.runs.trials import entries

    root = place(args.folder, "folder")
    log = entries(root)
    markets: dict[str, dict[str, int]] = {}
    for entry in log:
        # A sweep is one line of many trials.
        number = 1 if entry.trials is None else entry.trials
        what = "agents" if entry.kind == "train" else "evaluations"
        # An old entry has no symbols; the digest of its bars stands for them.
        for symbol in entry.symbols or [entry.data[:12]]:
            of = markets.setdefault(symbol, {"agents": 0, "evaluations": 0})
            of[what] += number
        symbols = ", ".join(entry.symbols or [])
        judged = "the mean" if entry.seed is None else f"agent {entry.seed}"
        which = f"{number:,} tried" if entry.kind == "train" else judged
        span = f"{(entry.first or '')[:10]} to {(entry.last or '')[:10]}"
        print(f"{entry.time or '':<26}{entry.kind:<6}{entry.run:<36} {which:<12}{span}  {symbols}")
    for symbol, of in markets.items():
        print(
            f"{symbol}: {of['agents']:,} agents and rules tried, {of['evaluations']:,} evaluations"
        )
    if not log:
        print(f"{root}: no trial was recorded")
    return {"trials": [plain(entry) for entry in log], "markets": markets}


def add_runs_options(parser: argparse.ArgumentParser) -> None:
    """Add what to do with the runs, and their folders."""
    parser.epilog = "Removing a run leaves its lines in the trial log: what was tried was tried."
    parser.add_argument(
        "action",
        choices=("list", "compare", "rm"),
        help="list: the runs of a folder; compare: settings that differ, and what training "
        "reached; rm: delete run folders",
    )
    parser.add_argument(
        "paths", nargs="*", metavar="PATH", help="list: a folder (default runs); else run folders"
    )
    parser.add_argument("--yes", action="store_true", help="rm: do not ask")


def run_runs(args: argparse.Namespace) -> dict[str, Any]:
    """List, compare or delete runs; return what is printed."""
    from nca_trader.runs.listing import compare_runs, remove_run, runs_in

    if args.action == "list":
        table = runs_in(*(args.paths or [FOLDER]))
        # Faults go to stderr below: a table on stdout stays one that a script can read.
        _print(table.drop(columns="fault"))
        for name, fault in table["fault"].items():
            if fault:
                print(f"{printable(name)}: {fault}", file=sys.stderr)
        return {"runs": table.reset_index().to_dict("records")}
    if args.action == "compare":
        table = compare_runs(args.paths)
        _print(table)
        return {"differences": table.to_dict("index")}
    removed = []
    for path in args.paths:
        if not args.yes:
            if not sys.stdin.isatty():
                raise ConfigError(f"{path}: give --yes to delete without a terminal to ask on.")
            answer = input(f"delete {path} with all its checkpoints? [y/N] ")
            if answer.strip().lower() not in ("y", "yes"):
                continue
        remove_run(path)
        removed.append(path)
        print(f"{path}: removed; its trials stay in the log")
    return {"removed": removed}


def _print(table: Any) -> None:
    if table.empty:
        print("nothing there")
        return
    # A folder may be a stranger's: its names and texts must not steer the screen.
    shown = table.map(lambda x: printable(x) if isinstance(x, str) else x)
    print(shown.rename(index=printable, columns=printable).to_string(na_rep=""))
