"""`nca-trader journal`: is a paper session's journal whole?"""

from __future__ import annotations

import argparse
from typing import Any

HELP = "check a paper session's journal"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `journal`."""
    parser.add_argument(
        "action", choices=("verify",), help="walk the hash chain; exit 4 names the first damage"
    )
    parser.add_argument("file", metavar="FILE", help="the journal")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Verifies the journal; damage is a `StateError`, which exits with 4."""
    from nca_trader.paper.journal import verify

    head = verify(args.file)
    print(f"{args.file}: {head.seq} events, the chain holds; head {head.hash[:16]}")
    return {"events": head.seq, "head": head.hash}
