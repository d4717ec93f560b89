"""Checks what a command alone knows of its arguments, before jax is imported.

An option means the same in every command, so one function checks them all. It reads presets and
looks for files. The values of options are checked once, by the library's own functions.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Callable
from typing import Any

from nca_trader.cli.options import ACCOUNT, READING, add_options, agent_of, overrides
from nca_trader.cloud import CloudPath, local, place
from nca_trader.config import EnvConfig
from nca_trader.config.extensions import is_source
from nca_trader.config.ranges import moment, refuse
from nca_trader.config.toml import read_preset
from nca_trader.errors import BarError, ConfigError, argument
from nca_trader.machine import run_file
from nca_trader.parallel import processes


def add_subject(parser: argparse.ArgumentParser, run: str, required: bool = True) -> None:
    """Add what is traded, `--run` with the help `run`, or `--strategy`."""
    what = parser.add_mutually_exclusive_group(required=required)
    add_options(what, run={"help": run}, strategy={})


def _outside(args: argparse.Namespace) -> Any:
    from nca_trader.optimum.outside.entry import entry_of  # takes numpy

    return entry_of(args.agent, args.allow_code, args.python)


# Options of commands that have no effect alone: what they need, whether it is there, their names.
Needs = tuple[str, Callable[[Any], Any], str]
TRADED: tuple[Needs, ...] = (
    ("--run", lambda args: args.run_dir, "seed steps force_agent allow_code"),
    ("--strategy", lambda args: args.strategy, "param env trials"),
)
REPLAYED = "seed force_agent allow_code param env " + " ".join(ACCOUNT)
VERIFIED = "agent agent_seconds seed name allow_code python"
NEEDS: dict[str, tuple[Needs, ...]] = {
    "backtest": TRADED,
    "board": (
        ("the word verify", lambda args: args.words[:1] == ["verify"], VERIFIED),
        ("another word than verify", lambda args: args.words[:1] != ["verify"], "out"),
    ),
    "demo": (("a run that begins", lambda args: not args.resume, "out"),),
    "export": (
        ("--codebook", lambda args: args.codebook != "none", "codebook_seed"),
        ("--format nca", lambda args: args.format == "nca", "bits codebook group activations"),
    ),
    "journal": (*TRADED, ("the word replay", lambda args: args.action == "replay", REPLAYED)),
    "paper": (
        *TRADED,
        ("a replay", lambda args: args.feed.startswith("replay:"), "speed"),
        ("a live feed", lambda args: not args.feed.startswith("replay:"), "warmup"),
    ),
    "plan": (("--manifest", lambda args: args.manifest, "run image out"),),
    "prove": (
        ("an agent from outside", _outside, "agent_seconds allow_code python"),
        ("an agent that is trained here", lambda args: not _outside(args), "steps set workers"),
    ),
    "runs": (("the word rm", lambda args: args.action == "rm", "yes"),),
    "sweep": (("--sample", lambda args: args.sample, "seed method"),),
    "train": (("--distributed", processes.options, "heartbeat initialization_timeout"),),
    "walkforward": (
        ("--agent", lambda args: args.agent, "warm_start steps seeds seed deploy"),
        ("--strategy", lambda args: args.strategy, "param"),
        ("--grid", lambda args: args.grid, "metric"),
    ),
    "watch": (("a second look", lambda args: not args.once, "every prometheus"),),
}
DATES = ("start", "stop", "until")
# Endings of what `--out` writes.
ENDINGS = {
    "backtest": (".html", ".parquet", ".csv"),
    "walkforward": (".html", ".parquet", ".csv"),
    "board": (".md", ".json", ".html", ".png", ".svg"),
    "prove": (".html", ".md", ".png", ".svg", ".jsonl"),
    "sweep": (".html", ".parquet", ".csv"),
}


def check(args: argparse.Namespace) -> None:
    """Refuse wrong names, missing files and numbers out of range.

    Raises:
      ConfigError, BarError, RunError: for the first fault.
    """
    _refuse_idle(args)
    given = {name: value for name, value in vars(args).items() if value is not None}
    judged = args.command in ("prove", "board") and "agent" in given
    if given.get("agent") and not (judged and _outside(args)):
        agent_of(args)
    # `markets` are the environments of `prove`.
    drawn = False
    for name in (*filter(None, [given.get("env")]), *given.get("markets", ())):
        drawn = bool(read_preset(EnvConfig, name, "envs", overrides(args, "env.")).market)
    for name in DATES:
        if name in given:
            moment(given[name], name)
    if args.command == "trials" and (path := _here(given["folder"])) and not path.is_dir():
        raise ConfigError(f"{path}: there is no such folder; give the folder of the runs.")
    if args.command == "runs":
        _check_runs(given)
    # Without a file `--symbol` chooses among the sample bars, where there are any.
    sampled = not drawn and args.command not in ("export", "doctor")
    _check_reading(args.command, given, ("symbol",) if sampled else ())
    _check_files(args.command, given)
    if "out" in given and args.command in ENDINGS:
        _check_output(args.command, given["out"], ENDINGS[args.command])


def _refuse_idle(args: argparse.Namespace) -> None:
    """Refuse options that have no effect with the others.

    Raises:
      ConfigError: with a line for each, and what it needs.
    """
    for kind, prefix in (("env", "env."), ("agent", "")):
        changes = overrides(args, prefix) if hasattr(args, kind) else []
        if changes and not getattr(args, kind):
            raise ConfigError(f"--set {changes[0]} changes the {kind}; name it with --{kind}.")
    idle = {
        name: needs
        for needs, there, names in NEEDS.get(args.command, ())
        for name in names.split()
        if getattr(args, name, None) != args.usual.get(name) and not there(args)
    }
    lines = (f"{argument(name)} has no effect without {idle[name]}; leave it out." for name in idle)
    refuse(lines)


def _check_reading(command: str, given: dict[str, Any], sampled: tuple[str, ...]) -> None:
    """Refuse options of a bar file that is not given."""
    names = [name for name in READING if name in given and name not in sampled]
    names += ["until"] if command == "export" and "until" in given else []
    if command == "watch" or not names:  # its `--every` is another option
        return
    if command not in ("data", "paper") and not given.get("data"):
        raise ConfigError(f"{argument(names[0])} is about a bar file; give --data FILE with it.")


def _check_files(command: str, given: dict[str, Any]) -> None:
    """Look for the bar file and the folder of the journal."""
    bars = given.get("file") if command == "data" else given.get("data")
    if given.get("what") == "fetch":  # a venue in place of a file
        bars = None
    if command == "paper":
        from nca_trader.config.reading import replayed_file

        # None for a live feed, which has no file.
        bars = replayed_file(given["feed"], given["broker"])
        # SQLite would make the file but not its folder, and says no more than "unable to open".
        folder = pathlib.Path(given["journal"]).parent
        if not folder.is_dir():
            raise ConfigError(f"{folder}: there is no such folder; make it, or choose another.")
    from nca_trader.config.reading import SAMPLE

    if (
        bars and command != "doctor" and not bars.startswith(SAMPLE) and not is_source(bars)
    ):  # the doctor reports a missing file as a finding
        path = _here(bars)
        if path is not None and not path.exists():
            raise BarError(f"{path}: D001 no such file. Check the path.")


def _check_runs(given: dict[str, Any]) -> None:
    """Check the folders of `runs`, whose number depends on what is done with them."""
    action, paths = given["action"], given["paths"]
    if action == "list" and len(paths) > 1:
        raise ConfigError(f"list takes one folder; got {len(paths)}.")
    if action == "rm" and not paths:
        raise ConfigError("rm needs the folder of a run.")
    for path in filter(None, map(_here, paths if action == "rm" else [])):
        run_file(path)  # all of them, before the first is deleted


def _here(name: str) -> pathlib.Path | None:
    """Return a path of this machine, or None: to ask an object store takes a network call."""
    return None if isinstance(path := place(name), CloudPath) else path


def _check_output(command: str, out: str, endings: tuple[str, ...]) -> None:
    # A page and a table are written by libraries that take a path of this machine.
    path = local(out, f"what {argument('out')} writes")
    if path.suffix not in endings:
        raise ConfigError(
            f"{argument('out', out)}: write to a name that ends in {' or '.join(endings)}."
        )
    # `prove` makes the folder.
    if command != "prove" and not path.parent.is_dir():
        raise ConfigError(
            f"{argument('out', out)}: there is no folder {path.parent}; make it first."
        )
