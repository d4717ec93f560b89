"""`nca-trader board`: what agents of any library reach on markets with a known optimum."""

from __future__ import annotations

import argparse
from typing import Any

from nca_trader.cli import fail_check
from nca_trader.cli.options import add_options
from nca_trader.errors import ConfigError, argument
from nca_trader.progress import say

FILE = "board.jsonl"


def add_board_options(parser: argparse.ArgumentParser) -> None:
    """Add the files of rows, where the board goes, and the agent to verify."""
    parser.epilog = (
        "`nca-trader prove MARKET --agent X --out board.jsonl` appends rows. `board verify FILE "
        "--agent X` evaluates X again on new draws, or trains it again where it is a preset, and "
        "exits with 1 where that differs from the row by more than 3 standard errors; where these "
        "are more than 10 points (cannot tell); and where a row is of another agent or of another "
        "version of its market."
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="[verify] FILE",
        help=f"files of rows (default {FILE}); after the word verify, one file whose row of "
        "--agent is repeated",
    )
    add_options(
        parser,
        agent_seconds={},
        agent={"help": "verify: the agent of the row, as `prove` takes it"},
        seed={"help": "verify: the seed of the repetition, drawn without it"},
        allow_code={"help": "verify: load an agent that can run code"},
        python={"help": "verify: the Python that has the agent's library"},
        out={"help": "write the board (.md, .json), its plots (.png, .svg) or both (.html)"},
    )
    parser.add_argument("--name", help="verify: the row's name, where it is not --agent's")


def run_board(args: argparse.Namespace) -> dict[str, Any]:
    """Print the board, or repeat the rows of one agent.

    Raises:
      CheckFailed: a repetition differs by more than its error.
      ConfigError: no such file or row.
    """
    from nca_trader.optimum import board

    words = args.words or [FILE]
    if words[0] == "verify":
        return _verify(args, words[1:] or [FILE])
    rows = board.read_rows(words)
    entries = board.entries_of(rows)
    print(board.markdown(entries))
    if args.out:
        board.write_board(args.out, rows)
        print(f"The board: {args.out}")
    return {"board": [entry.summary() for entry in entries]}


def _verify(args: argparse.Namespace, files: list[str]) -> dict[str, Any]:
    from nca_trader.envs import FROZEN
    from nca_trader.optimum import board
    from nca_trader.optimum.outside.entry import entry_of
    from nca_trader.optimum.prove import prove

    if args.agent is None:
        raise ConfigError("board verify: give the agent of the row with --agent.")
    name = args.name or str(args.agent)
    entries = board.entries_of(board.read_rows(files))
    own = [entry for entry in entries if entry.name == name and len(entry.fractions)]
    if not own:
        names = ", ".join(dict.fromkeys(entry.name for entry in entries))
        raise ConfigError(f"{files[0]}: no fraction of {name!r}; give --name, one of {names}.")
    trained = entry_of(args.agent, args.allow_code, args.python) is None
    for entry in own:
        digest = FROZEN.get(entry.market)
        if digest is None and not args.allow_code:
            raise ConfigError(
                f"{files[0]}: {entry.market} is a file of its own, which may name code; where you "
                f"trust it, give {argument('allow_code')}."
            )
        if any(row.get("digest") != digest for row in entry.rows):
            other = f"{files[0]}: a row of {name} is of another version of {entry.market}; "
            fail_check(args, {"repeats": []}, f"{other}use the nca-trader that made it.")
    repeats = []
    for entry in own:
        asked = entry.rows[0]["entry"].get("steps") or entry.rows[0]["steps"]
        proofs = prove(
            [entry.market],
            args.agent,
            steps=asked if trained else None,
            seeds=None if args.seed is None else [args.seed],
            controls=False,
            allow_code=args.allow_code,
            python=args.python,
            agent_seconds=args.agent_seconds,
        )
        repeats.append(repeat := board.repeated(entry, [proof.row() for proof in proofs]))
        say(str(repeat))
    found = {"repeats": [{**r._asdict(), "agrees": r.verdict == "agrees"} for r in repeats]}
    if wrong := [f"{r.market}: {r.verdict}" for r in repeats if r.verdict != "agrees"]:
        fail_check(args, found, f"{name} is not repeated; {'; '.join(wrong)}.")
    return found
