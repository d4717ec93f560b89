"""`nca-trader supervise -- COMMAND`: starts it again when it dies, until it is done."""

from __future__ import annotations

import argparse
import shutil
import sys
from typing import Any

HELP = "start a command again when it dies; training then goes on from its newest checkpoint"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument(
        "--restarts", type=int, default=10, metavar="N", help="in a row, at most (default 10)"
    )
    parser.add_argument(
        "--backoff",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="before the first restart; doubles with each, up to 60 (default 1)",
    )
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="start N processes on this machine, which train as one",
    )
    parser.add_argument(
        "words", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="e.g. nca-trader train ..."
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Supervises; ends with the command's own exit code.

    Raises:
      ConfigError: no command, or numbers that cannot be meant.
      CheckFailed: it died too often.
    """
    from nca_trader.errors import ConfigError
    from nca_trader.parallel.processes import Supervisor

    words = args.words[1:] if args.words[:1] == ["--"] else args.words
    if not words:
        raise ConfigError("give a command after --, e.g. supervise -- nca-trader train ...")
    # `nca-trader` is this installation's, also where its scripts are not on the PATH.
    if words[0] != "nca-trader" and shutil.which(words[0]) is None:
        raise ConfigError(f"{words[0]}: is no command here; check its name or path.")
    processes = 1 if args.processes is None else args.processes
    if args.restarts < 0 or args.backoff < 0 or processes < 1:
        raise ConfigError(
            f"--restarts {args.restarts}, --backoff {args.backoff}, --processes "
            f"{processes}: give 0 or more of the first two, and at least 1 process."
        )
    code = Supervisor(
        words, restarts=args.restarts, backoff=args.backoff, processes=args.processes
    ).run()
    if code:
        sys.exit(code)  # the command has said why
    return {"command": words, "code": code}
