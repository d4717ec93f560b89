"""Checks a command's arguments by themselves, before jax is imported.

An option means the same in every command, so one function checks them all. It reads presets and
looks for files. The library checks later whatever depends on the bars or on a device.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

from nca_trader.cli.options import ACCOUNT, READING, agent_of, limits_of, overrides, params_of
from nca_trader.cloud import CloudPath, local, place
from nca_trader.config import EnvConfig, spans
from nca_trader.config.account import Costs
from nca_trader.config.agent import RULES
from nca_trader.config.extensions import is_source, origin_of
from nca_trader.config.ranges import moment, nearest, refuse
from nca_trader.config.toml import read_preset
from nca_trader.errors import BarError, ConfigError, RunError, argument
from nca_trader.machine import run_file
from nca_trader.parallel import processes


def add_subject(parser: argparse.ArgumentParser, run: str, required: bool = True) -> None:
    """Add what is traded, `--run` with the help `run`, or `--strategy`."""
    what = parser.add_mutually_exclusive_group(required=required)
    what.add_argument("--run", dest="run_dir", metavar="DIR", help=run)
    what.add_argument(
        "--strategy",
        metavar="NAME|FILE.py:NAME",
        help="your own strategy or function of bars in a file, which is run, or a rule: "
        + ", ".join(RULES),
    )


def _outside(args: argparse.Namespace) -> Any:
    from nca_trader.optimum.entry import entry_of  # takes numpy

    return entry_of(args.agent, args.allow_code, args.python)


# Options of commands that have no effect alone: what they need, whether it is there, their names.
Needs = tuple[str, Callable[[Any], Any], str]
TRADED: tuple[Needs, ...] = (
    ("--run", lambda args: args.run_dir, "seed steps force_agent allow_code"),
    ("--strategy", lambda args: args.strategy, "param env trials"),
)
REPLAYED = "seed force_agent allow_code param env " + " ".join(ACCOUNT)
VERIFIED = "agent seed name allow_code python"
NEEDS: dict[str, tuple[Needs, ...]] = {
    "backtest": TRADED,
    "board": (("the word verify", lambda args: args.words[:1] == ["verify"], VERIFIED),),
    "demo": (("a run that begins", lambda args: not args.resume, "out"),),
    "export": (("--codebook", lambda args: args.codebook != "none", "codebook_seed"),),
    "journal": (*TRADED, ("the word replay", lambda args: args.action == "replay", REPLAYED)),
    "paper": (
        *TRADED,
        ("a replay", lambda args: args.feed.startswith("replay:"), "speed"),
        ("a live feed", lambda args: not args.feed.startswith("replay:"), "warmup"),
    ),
    "prove": (("an agent from outside", _outside, "allow_code python"),),
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
    if judged and _outside(args):
        for name in ("steps", "set", "workers"):
            if given.get(name):
                raise ConfigError(
                    f"{argument(name)}: {args.agent} is not trained here; leave it out."
                )
    elif given.get("agent"):
        agent_of(args)
    # `markets` are the environments of `prove`.
    drawn = False
    for name in (*filter(None, [given.get("env")]), *given.get("markets", ())):
        drawn = bool(read_preset(EnvConfig, name, "envs", overrides(args, "env.")).market)
    if "topology" in given:
        from nca_trader.scale.chips import slice_of

        slice_of(given["topology"])
    if args.command == "train":  # the only one that joins several processes
        if (peers := processes.options(args)) is not None:
            processes.check(peers)
    if "limit" in given:
        limits_of(args)
    # A misspelt NAME=VALUE is found here, before the strategy's file is run.
    if "param" in given:
        params_of(args)
    if "strategy" in given:
        check_strategy(given["strategy"], features=args.command == "leakcheck")
    # Built and dropped: its own checks say what is wrong with a cost.
    Costs(**{name: given[name] for name in ("commission", "slippage") if name in given})
    if args.command == "sweep":
        spans.parse_grid(given["grid"], "sample" in given)
    for name in DATES:
        if name in given:
            moment(given[name], name)
    _check_jobs(args.command, given)
    if args.command == "trials":
        _check_project(given["folder"])
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


def _check_jobs(command: str, given: dict[str, Any]) -> None:
    """Refuse unknown workers, spans and grids, and options without an effect."""
    if "workers" in given:
        from nca_trader.parallel.jobs import parse_workers

        parse_workers(given["workers"])
    if command not in ("walkforward", "tune"):
        return
    spans.check_metric(given["metric"])
    if command == "tune":
        # Optuna is an extra; its absence is said before bars are read.
        spans.check_optuna()
        spans.check_space(agent_of(argparse.Namespace(**given)), spans.parse_space(given["space"]))
        return
    # The options have the names of the fields, so a field that is added is checked too.
    sizes: dict[str, Any] = {
        field.name: given.get(field.name) for field in dataclasses.fields(spans.Spans)
    }
    spans.check_spans(spans.Spans(**sizes))
    grid = spans.parse_grid(given["grid"])
    if "agent" in given:
        if grid:
            raise ConfigError(f"{argument('grid')}: an agent has no grid; try `nca-trader tune`.")
        if "env" not in given:
            raise ConfigError(f"{argument('env')} is missing; an agent needs an environment.")


def _check_reading(command: str, given: dict[str, Any], sampled: tuple[str, ...]) -> None:
    """Refuse impossible options of a bar file, and options of a file that is not given."""
    names = [name for name in READING if name in given and name not in sampled]
    names += ["until"] if command == "export" and "until" in given else []
    if command == "watch" or not names:  # its `--every` is another option
        return
    if command not in ("data", "paper") and not given.get("data"):
        raise ConfigError(f"{argument(names[0])} is about a bar file; give --data FILE with it.")
    from nca_trader.config import reading

    reading.parse_repair(given.get("repair"))
    reading.parse_columns(given.get("columns"))
    reading.refuse_times(given.get("timezone"), given.get("dates"))
    reading.parse_step(given.get("every"))
    reading.parse_splits(given.get("split"))


def _check_files(command: str, given: dict[str, Any]) -> None:
    """Look for the bar file, the run, and the folder of the journal."""
    bars = given.get("file") if command == "data" else given.get("data")
    if given.get("what") == "fetch":  # a venue in place of a file
        bars = None
    if command in ("halt", "resume") and not pathlib.Path(str(given.get("journal"))).is_file():
        raise ConfigError(f"{given.get('journal')}: there is no such journal; check the path.")
    if command == "paper":
        from nca_trader.config.reading import replayed

        # None for a live feed, which has no file.
        bars = replayed(given["feed"], given["broker"])
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
    # `demo --resume` is the one place where a run is not called `--run`.
    run = given.get("resume") if command == "demo" else given.get("run_dir")
    if run is None or (path := _here(run)) is None:
        return
    if command == "train":
        # A folder that is not there is what a new run begins with.
        if path.is_file():
            raise RunError(f"{path}: is a file; choose another folder.")
    elif command == "watch":
        if not path.is_dir():
            raise RunError(f"{path}: no such folder; give the {argument('run_dir')} of a run.")
    elif command == "export" or not path.is_file():  # the others read an exported file too
        run_file(path)


def _check_runs(given: dict[str, Any]) -> None:
    """Check the folders of `runs`, whose number depends on what is done with them."""
    action, paths = given["action"], given["paths"]
    if action == "list":
        if len(paths) > 1:
            raise ConfigError(f"list takes one folder; got {len(paths)}.")
        # The folder that `train` and `demo` use where none is given.
        _check_project(*(paths or ["runs"]))
        return
    if action == "compare" and len(paths) < 2:
        raise ConfigError("compare needs at least two runs; give their folders.")
    if not paths:
        raise ConfigError("rm needs the folder of a run.")
    for path in filter(None, map(_here, paths)):
        run_file(path)


def _check_project(folder: str) -> None:
    if (path := _here(folder)) is not None and not path.is_dir():
        raise ConfigError(f"{path}: there is no such folder; give the folder of the runs.")


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


def check_strategy(name: str, features: bool = False) -> None:
    """Refuse an unknown rule, or a file that is not there; with `features`, accept features too."""
    if features and name.startswith(("feature:", "cost:", "reward:", "actions:")):
        return  # what they name is seen when it is loaded
    # A Windows path has a colon of its own, so the last one separates the member.
    file = name if name.endswith(".py") else name.rpartition(":")[0]
    if file.endswith(".py"):
        if not pathlib.Path(file).is_file():
            raise ConfigError(f"{file}: no such file; check the path.")
    elif name not in RULES:
        if origin_of("strategies", name) is not None:
            return
        more = "feature:NAME names a feature, cost:NAME a cost, " if features else ""
        raise ConfigError(
            f"{name if features else argument('strategy', name)}: no such rule; "
            f"{nearest(name, RULES)}There are {', '.join(RULES)}; {more}FILE.py:NAME "
            "or module:name your own."
        )
