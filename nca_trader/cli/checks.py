"""Checks a command's arguments by themselves, before jax is imported.

An option means the same in every command, so one function checks them all. It reads presets and
looks for files. The library checks later whatever depends on the bars or on a device.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from typing import Any

from nca_trader.cli.options import READING, agent_of, limits_of, overrides, params_of
from nca_trader.config.agent import RULES
from nca_trader.errors import BarError, ConfigError, RunError, argument


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
    from nca_trader.config import EnvConfig
    from nca_trader.config.account import Costs
    from nca_trader.config.toml import read_preset
    from nca_trader.optimum.entry import entry_of

    given = {name: value for name, value in vars(args).items() if value is not None}
    judged = args.command in ("prove", "board") and "agent" in given
    if judged and entry_of(args.agent, args.allow_code, args.python):
        for name in ("steps", "set", "workers"):
            if given.get(name):
                raise ConfigError(
                    f"{argument(name)}: {args.agent} is not trained here; leave it out."
                )
    elif given.get("agent"):
        agent_of(args)
    # `markets` are the environments of `prove`.
    for name in (*filter(None, [given.get("env")]), *given.get("markets", ())):
        read_preset(EnvConfig, name, "envs", overrides(args, "env."))
    if "topology" in given:
        from nca_trader.scale.chips import slice_of

        slice_of(given["topology"])
    if args.command == "train":  # the only one that joins several processes
        from nca_trader.parallel import processes

        if (peers := processes.options(args)) is not None:
            processes.check(peers)
    if "limit" in given:
        limits_of(args)
    # A misspelt NAME=VALUE is found here, before the strategy's file is run.
    if "param" in given:
        if "run_dir" in given:
            raise ConfigError("--param: is of a strategy; a run has its own, so leave it out.")
        params_of(args)
    if "strategy" in given:
        check_strategy(given["strategy"], features=args.command == "leakcheck")
    # Built and dropped: its own checks say what is wrong with a cost.
    Costs(**{name: given[name] for name in ("commission", "slippage") if name in given})
    if args.command == "sweep":
        from nca_trader.config.spans import parse_grid

        parse_grid(given["grid"], "sample" in given)
    if args.command in ("backtest", "paper") and "strategy" in given:
        for name, what in (("seed", "a rule has no agents"), ("steps", "a rule has none")):
            if name in given:
                raise ConfigError(f"{argument(name)}: {what}; give it with --run.")
    elif args.command in ("backtest", "paper") and "env" in given:
        raise ConfigError("--env: a run has its own costs and limits; leave it out.")
    for name in DATES:
        if name in given:
            from nca_trader.config.ranges import moment  # imports pandas, which takes a while

            moment(given[name], name)
    _check_jobs(args.command, given)
    if args.command == "trials":
        _check_project(given["folder"])
    if args.command == "runs":
        _check_runs(given)
    _check_reading(args.command, given)
    _check_files(args.command, given)
    if "out" in given and args.command in ENDINGS:
        _check_output(args.command, given["out"], ENDINGS[args.command])


def _check_jobs(command: str, given: dict[str, Any]) -> None:
    """Refuse unknown workers, spans and grids, and options without an effect."""
    if "workers" in given:
        from nca_trader.parallel.jobs import parse_workers

        parse_workers(given["workers"])
    if command not in ("walkforward", "tune"):
        return
    from nca_trader.config import spans

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
        return
    for name in ("warm_start", "steps"):
        if given.get(name):
            raise ConfigError(f"{argument(name)}: is of an agent; give it with --agent.")


def _check_reading(command: str, given: dict[str, Any]) -> None:
    """Refuse impossible options of a bar file, and options of a file that is not given."""
    # `--symbol` chooses among the sample bars too.
    names = [name for name in READING if name in given and name != "symbol"]
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
    from nca_trader.cloud import CloudPath, place
    from nca_trader.machine import run_file

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
    from nca_trader.config.extensions import is_source
    from nca_trader.config.reading import SAMPLE

    if (
        bars and command != "doctor" and not bars.startswith(SAMPLE) and not is_source(bars)
    ):  # the doctor reports a missing file as a finding
        path = place(bars)
        if not isinstance(path, CloudPath) and not path.exists():
            raise BarError(f"{path}: D001 no such file. Check the path.")
    # `demo --resume` is the one place where a run is not called `--run`.
    run = given.get("resume") if command == "demo" else given.get("run_dir")
    # To ask an object store takes a network call: the library does it when it reads the run.
    if run is None or isinstance(path := place(run), CloudPath):
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
    from nca_trader.cloud import CloudPath, place
    from nca_trader.machine import run_file

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
    for path in map(place, paths):
        if not isinstance(path, CloudPath):
            run_file(path)


def _check_project(folder: str) -> None:
    from nca_trader.cloud import CloudPath, place

    path = place(folder)
    if not isinstance(path, CloudPath) and not path.is_dir():
        raise ConfigError(f"{path}: there is no such folder; give the folder of the runs.")


def _check_output(command: str, out: str, endings: tuple[str, ...]) -> None:
    from nca_trader.cloud import local

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
    from nca_trader.config.ranges import nearest

    if features and name.startswith(("feature:", "cost:", "reward:", "actions:")):
        return  # what they name is seen when it is loaded
    # A Windows path has a colon of its own, so the last one separates the member.
    file = name if name.endswith(".py") else name.rpartition(":")[0]
    if file.endswith(".py"):
        if not pathlib.Path(file).is_file():
            raise ConfigError(f"{file}: no such file; check the path.")
    elif name not in RULES:
        from nca_trader.config.extensions import origin_of

        if origin_of("strategies", name) is not None:
            return
        more = "feature:NAME names a feature, cost:NAME a cost, " if features else ""
        raise ConfigError(
            f"{name if features else argument('strategy', name)}: no such rule; "
            f"{nearest(name, RULES)}There are {', '.join(RULES)}; {more}FILE.py:NAME "
            "or module:name your own."
        )
