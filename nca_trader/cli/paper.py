"""`nca-trader paper`, `halt`, `resume` and `journal`: a session, its kill switch, its record."""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from nca_trader.cli import end_stopped, fail_check, stop_on_signal
from nca_trader.cli.checks import add_subject
from nca_trader.cli.options import (
    ACCOUNT,
    READING,
    account_of,
    add_options,
    params_of,
    reading_options,
    real,
    write_command,
)
from nca_trader.errors import ConfigError

TRADED = ("param", "seed", "force_agent", "allow_code")
ENV = {"help": "with --strategy: an environment's costs and limits"}


def add_paper_options(parser: argparse.ArgumentParser) -> None:
    """Add what trades, its account, the feed, the broker and the journal."""
    add_subject(parser, "run folder or exported file")
    add_options(parser, *TRADED, *READING, *ACCOUNT, env=ENV)
    feeds = "replay:FILE, a bar file; live: alpaca:SYM,.. or ccxt:EXCHANGE:SYM or module:name"
    parser.add_argument("--feed", required=True, metavar="FEED", help=feeds)
    brokers = "simulated (default), or with a live feed alpaca or module:name"
    parser.add_argument("--broker", default="simulated", help=brokers)
    warmup = "bars of history that a live session begins with at least; default 500"
    parser.add_argument("--warmup", type=int, metavar="BARS", help=warmup)
    journal = "SQLite journal; continued if it exists"
    parser.add_argument("--journal", required=True, metavar="FILE", help=journal)
    parser.add_argument("--start", metavar="DATE", help="decide nothing before; default: warm-up")
    speed = "of a replay: bars a second, to watch it; default: as fast as it goes"
    parser.add_argument("--speed", type=real("(0, inf)"), metavar="BARS", help=speed)
    parser.add_argument(
        "--capital",
        type=real("(0, inf)"),
        default=100_000.0,
        metavar="MONEY",
        help="default %(default)s",
    )


def run_paper(args: argparse.Namespace) -> dict[str, Any]:
    """Run the session to the end of its feed, or until it is asked to stop."""
    from nca_trader.evaluate.wording import in_sample_sentence
    from nca_trader.paper.session.parity import summarise
    from nca_trader.paper.session.trade import paper_trade

    what, options = _subject_and_options(args)
    # A bar is finished first, with its events in the journal.
    with stop_on_signal("bar") as stop:
        result = paper_trade(
            what,
            args.feed,
            args.journal,
            broker=args.broker,
            start=args.start,
            stop=_paced(stop, args.speed),
            reading=reading_options(args),
            warmup=args.warmup,
            **options,
        )
        asked = stop()
        # The journal has every event already, so nothing is lost by stopping between two bars.
        if asked:
            print(f"stopped; all is in {args.journal}, and the same command resumes from there.")
    if result["agent"]:
        print(result["agent"])
    # A shared policy trades assets that it has never seen; a reader should know how many.
    others = [s for s in result.get("symbols", []) if s not in result["trained_symbols"]]
    if others:
        print(f"{len(others)} of {len(result['symbols'])} symbols did not train the agent.")
    # Paper trading of bars that trained the agent is IN SAMPLE too.
    if result["in_sample"]:
        print(in_sample_sentence(result["in_sample"], result["decisions"]))
    print(
        f"{result['bars']} bars, {result['decisions']} decisions, {result['orders']} orders, "
        f"{result['fills']} fills; equity {result['equity']:.6f} of the start's, "
        f"{result['value']:,.2f} in money; journal {args.journal}, {result['events']} events, "
        f"head {result['head'][:16]}, {result['durability']}"
    )
    result["no_orders"] = why_no_order(result, args.journal)
    if result["no_orders"]:
        print(f"No order was sent: {result['no_orders']}.")
    table = summarise(args.journal)
    if table is not None:
        print(table)
    print(f"The page: {write_command('dashboard', journal=args.journal)}")
    # None before the first bar is decided on, when there is no account yet.
    result |= {"summary": table and table.body}
    return end_stopped(args, result) if asked else result


def _paced(stop: Callable[[], bool], speed: float | None) -> Callable[[], bool]:
    """Return `stop`, which then lasts until the next bar of a replay of `speed` bars a second."""
    if speed is None:
        return stop
    due = time.monotonic()

    def wait() -> bool:
        nonlocal due
        due = max(due + 1.0 / speed, time.monotonic())
        # In pieces, so that a signal ends it soon.
        while not stop() and (left := due - time.monotonic()) > 0.0:
            time.sleep(min(left, 0.2))
        return stop()

    return wait


def why_no_order(result: Mapping[str, Any], journal: str) -> str | None:
    """Return why a session sent no order, in words; None where it sent one.

    Args:
      result: of `paper_trade`.
      journal: the session's.
    """
    from nca_trader.paper.journal.journal import read_events

    if result["orders"]:
        return None
    if not result["bars"]:
        return "the feed gave no bar"
    if not result["decisions"]:
        return (
            f"none of its {result['bars']:,} bars was decided at; they are the agent's warm-up, "
            "older than the newest one, or before the start"
        )
    decisions = [event.body["target"] for event in read_events(journal, "decision")]
    if not any(target for targets in decisions for target in targets):
        return f"none of its {len(decisions):,} decisions asks for a position"
    codes = Counter(event.body["code"] for event in read_events(journal, "risk"))
    seen = ", ".join(f"{code} {count:,} times" for code, count in codes.most_common(3))
    return f"what its decisions ask for was never ordered ({seen or 'the account holds it'})"


def _subject_and_options(args: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """Return what trades, and the options of `paper_trade` for its account."""
    # Before jax is imported, which reads it: a step's programs are so small that handing them to
    # another thread takes longer than they do. The results are the same.
    os.environ.setdefault("JAX_CPU_ENABLE_ASYNC_DISPATCH", "false")
    from nca_trader.envs import load_env
    from nca_trader.evaluate.combinations import subject_of
    from nca_trader.runs.exported import read_run

    if args.run_dir:
        # Allowed here, it is signed, or remembered by this process.
        run = read_run(args.run_dir, seed=args.seed, allow_code=args.allow_code)
        what: Any = args.run_dir
        account = account_of(args, usual=run.env_config)
    else:  # without --env nothing costs, and nothing limits its weights
        what = subject_of(args.strategy, params_of(args))
        account = account_of(args, args.env and load_env(args.env))
    account = dataclasses.replace(account, capital=getattr(args, "capital", None))
    return what, {"seed": args.seed, "force_agent": args.force_agent, "account": account}


def add_halt_options(parser: argparse.ArgumentParser) -> None:
    """Add the session's journal and the reason."""
    parser.add_argument("--journal", required=True, metavar="FILE", help="of the session")
    parser.add_argument("--reason", required=True, metavar="TEXT", help="kept in the journal")


add_resume_options = add_halt_options


def run_halt(args: argparse.Namespace) -> dict[str, Any]:
    """Write the file that halts the session."""
    from nca_trader.paper.journal.halting import halt_file, read_halt, request_halt
    from nca_trader.paper.session.halts import refuse_no_journal

    refuse_no_journal(args.journal)
    # The first reason stays: a second request must not hide why trading stopped.
    file, first = halt_file(args.journal), request_halt(args.journal, args.reason)
    if first:
        print(f"{file}: the session halts at its next bar or order, and every later start refuses.")
    else:
        print(f"{file}: a halt was asked for before, for this reason: {read_halt(args.journal)}")
    return {"file": str(file), "first": first}


def run_resume(args: argparse.Namespace) -> dict[str, Any]:
    """Lift the halt."""
    from nca_trader.paper.session.halts import resume

    # The clock is read here alone, so that the library's records can be replayed.
    halt = resume(args.journal, args.reason, time.time_ns())
    what = "its halt file is removed" if halt is None else f"lifted: {halt.body['code']}"
    print(f"{args.journal}: {what}; the session's own command resumes from there.")
    return {"lifted": None if halt is None else halt.body["code"]}


def add_journal_options(parser: argparse.ArgumentParser) -> None:
    """Add the journal, what to do with it, and what traded."""
    walk = (
        "verify: walk the hash chain; exit 4 names the first damage. replay: trade its bars again "
        "with --run or --strategy, and compare bit for bit"
    )
    parser.add_argument("action", choices=("verify", "replay"), help=walk)
    parser.add_argument("file", metavar="FILE", help="the journal")
    what = "replay: the run folder or exported file that traded"
    add_subject(parser, what, required=False)
    add_options(parser, *TRADED, *ACCOUNT, env=ENV)


def run_journal(args: argparse.Namespace) -> dict[str, Any]:
    """Verify or replay the journal.

    Raises:
      StateError: it is damaged.
      CheckFailed: the replay differs.
    """
    from nca_trader.paper.journal.journal import verify

    subject = args.run_dir or args.strategy
    if bool(subject) != (args.action == "replay"):
        option = "--run or --strategy"
        said = "has no effect there; leave it out" if subject else f"is needed: give {option}"
        raise ConfigError(f"journal {args.action}: {option} {said}.")
    if args.action == "replay":
        from nca_trader.paper.session.rebuild import rebuild

        what, options = _subject_and_options(args)
        rebuilt = rebuild(args.file, what, **options)
        print(f"{args.file}: {rebuilt.sentence}")
        _say_watched(args.file)
        if rebuilt.difference:
            fail_check(args, rebuilt._asdict(), f"{args.file}: differs at {rebuilt.difference}.")
        return rebuilt._asdict()
    # Each hash covers the one before it, so the head identifies the whole journal.
    head = verify(args.file)
    print(f"{args.file}: {head.seq} events, the chain holds; head {head.hash[:16]}")
    _say_watched(args.file)
    return {"events": head.seq, "head": head.hash}


def _say_watched(file: str) -> None:
    """Print what the session watched for drift, and what it did not and why."""
    from nca_trader.errors import printable
    from nca_trader.paper.journal.journal import read_events
    from nca_trader.paper.session.drift import watched_sentence

    for event in read_events(file, "watched"):  # a second one where it changed
        print(f"{file}: {printable(watched_sentence(event.body))}")
