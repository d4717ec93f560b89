"""`nca-trader halt` stops a paper session's trading; `resume` lets it go on."""

from __future__ import annotations

import argparse
import time
from typing import Any


def add_halt_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--journal", required=True, metavar="FILE", help="of the session")
    parser.add_argument("--reason", required=True, metavar="TEXT", help="kept in the journal")


def add_resume_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_halt_options(parser)
    sleeve = "the sleeve that halted by itself; without it the whole session"
    parser.add_argument("--sleeve", metavar="NAME", help=sleeve)


def run_halt(args: argparse.Namespace) -> dict[str, Any]:
    """Write the file that halts the session."""
    from nca_trader.paper.halting import halt_file, read_halt, request_halt
    from nca_trader.paper.risk import refuse_no_journal

    refuse_no_journal(args.journal)
    file, first = halt_file(args.journal), request_halt(args.journal, args.reason)
    if first:
        print(f"{file}: the session halts at its next bar or order, and every later start refuses.")
    else:
        print(f"{file}: a halt was asked for before, for this reason: {read_halt(args.journal)}")
    return {"file": str(file), "first": first}


def run_resume(args: argparse.Namespace) -> dict[str, Any]:
    """Lift the halt."""
    from nca_trader.paper.risk import resume

    halt = resume(args.journal, args.reason, time.time_ns(), args.sleeve)
    if args.sleeve is not None:
        print(f"{args.journal}: {args.sleeve} trades again from the next start of its session.")
        return {"lifted": args.sleeve}
    what = "its halt file is removed" if halt is None else f"lifted: {halt.body['code']}"
    print(f"{args.journal}: {what}; the session's own command resumes from there.")
    return {"lifted": None if halt is None else halt.body["code"]}
