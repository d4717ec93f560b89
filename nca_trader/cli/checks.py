"""What is wrong with a command's arguments by themselves, found before jax is imported.

Every command's options of one name mean one thing, so one function checks them all. It reads
presets and looks whether files are there; what takes bars or a device to know is refused later.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import pathlib
from typing import Any

from nca_trader.cli.reading import OPTIONS
from nca_trader.errors import BarError, ConfigError, RunError, argument

AT_LEAST_ONE = ("steps", "devices", "cases", "envs", "group", "micro_batches")
DATES = ("start", "stop", "until")
STRATEGIES = ("buy_and_hold", "always_flat", "sma_cross", "momentum")
KINDS = {"backtest": (".html", ".parquet", ".csv"), "prove": (".html", ".png", ".svg")}


def check(args: argparse.Namespace) -> None:
    """Refuses wrong names, files that are not there, and numbers out of range.

    Raises:
      ConfigError, BarError, RunError: the first that is found.
    """
    given = {name: value for name, value in vars(args).items() if value is not None}
    _check_configs(args, given)
    for name in AT_LEAST_ONE:
        if name in given and given[name] < 1:
            raise ConfigError(
                f"{argument(name, given[name])} is not a whole number of at least 1; give one."
            )
    _check_ranges(args.command, given)
    if args.command == "backtest":
        _check_backtest(given)
    if any(name in given for name in DATES):
        from nca_trader.config.ranges import moment  # pandas, which takes a while

        for name in DATES:
            if name in given:
                moment(given[name], name)
    _check_reading(args.command, given)
    _check_files(args.command, given)
    if args.command in KINDS and "out" in given:
        _check_output(args.command, given["out"], KINDS[args.command])


def _check_configs(args: argparse.Namespace, given: dict[str, Any]) -> None:
    """Reads the agent, the environment or environments and the rule, by name or file."""
    from nca_trader.config import EnvConfig
    from nca_trader.config.toml import read_preset

    if given.get("agent"):
        agent_of(args)
    for name in (*filter(None, [given.get("env")]), *given.get("markets", ())):
        read_preset(EnvConfig, name, "envs", overrides(args, "env."))
    if "topology" in given:
        from nca_trader.scale.chips import slice_of

        slice_of(given["topology"])
    if args.command == "train":
        from nca_trader.parallel import processes

        if (peers := processes.options(args)) is not None:
            processes.check(peers)
    strategy = given.get("strategy")
    if strategy is not None:
        check_strategy(strategy, of_a_file=args.command == "leakcheck")


def agent_of(args: argparse.Namespace) -> Any:
    """The agent of `--agent`, with `--set` and `--devices` applied."""
    from nca_trader.agents import load_agent

    agent = load_agent(args.agent, overrides(args, ""))
    if getattr(args, "devices", None) is None:
        return agent
    mesh = dataclasses.replace(agent.mesh, devices=args.devices, data=None)
    return dataclasses.replace(agent, mesh=mesh)


def overrides(args: argparse.Namespace, kind: str) -> list[str]:
    """The changes of `--set` to the environment ("env.") or to the agent ("")."""
    texts = getattr(args, "set", [])
    if kind:
        return [text.removeprefix(kind) for text in texts if text.startswith(kind)]
    return [text for text in texts if not text.startswith("env.")]


def _check_ranges(command: str, given: dict[str, Any]) -> None:
    if not 0 <= given.get("seed", 0) < 2**32:
        raise ConfigError(
            f"{argument('seed', given['seed'])}: give a whole number from 0 to {2**32 - 1}."
        )
    costs = {name: given[name] for name in ("commission", "slippage") if name in given}
    if costs:
        from nca_trader.config.env import Costs

        Costs(**costs)
    ranges = (
        ("capital", lambda money: 0.0 < money < math.inf, "a sum of money above 0"),
        ("tolerance", lambda change: 0.0 <= change < math.inf, "0, or e.g. 1e-9"),
        ("min_agreement", lambda share: 0.0 <= share <= 1.0, "a share from 0 to 1"),
        ("bits", lambda bits: bits in (4, 8, 16), "4, 8 or 16"),
    )
    if command == "watch":
        seconds = ("every", lambda seconds: 0.05 <= seconds < math.inf, "seconds, at least 0.05")
        ranges = (*ranges, seconds)
    for name, holds, accepted in ranges:
        if name in given and not holds(given[name]):
            raise ConfigError(f"{argument(name, given[name])}: give {accepted}.")


def _check_backtest(given: dict[str, Any]) -> None:
    if "strategy" in given:
        for name, what in (("seed", "a rule has no agents"), ("steps", "a rule has none")):
            if name in given:
                raise ConfigError(f"{argument(name)}: {what}; give it with --run.")
    elif "env" in given:
        raise ConfigError("--env: a run has its own costs and limits; leave it out.")


def _check_reading(command: str, given: dict[str, Any]) -> None:
    """Refuses options of a bar file that cannot be, or that no file is there for."""
    names = [name for name in OPTIONS if name in given and name != "symbol"]
    if command == "watch" or not names:
        return
    if command in ("train", "backtest", "demo", "profile") and "data" not in given:
        raise ConfigError(f"{argument(names[0])} is about a bar file; give --data FILE with it.")
    from nca_trader.config import reading

    reading.parse_repair(given.get("repair"))
    reading.parse_columns(given.get("columns"))
    reading.refuse_times(given.get("timezone"), given.get("dates"))
    reading.parse_step(given.get("every"))


def _check_files(command: str, given: dict[str, Any]) -> None:
    """Looks for the bar file, the run and the folders of what is written."""
    from nca_trader.cloud import CloudPath, place
    from nca_trader.disk import run_file

    bars = given.get("file") if command == "data" else given.get("data")
    if command == "paper":
        from nca_trader.config.reading import replayed

        bars = replayed(given["feed"], given["broker"])
        folder = pathlib.Path(given["journal"]).parent
        if not folder.is_dir():
            raise ConfigError(f"{folder}: there is no such folder; make it, or choose another.")
    if bars and command != "doctor":
        path = place(bars)
        if not isinstance(path, CloudPath) and not path.exists():
            raise BarError(f"{path}: D001 no such file. Check the path.")
    run = given.get("resume") if command == "demo" else given.get("run_dir")
    if run is not None and command == "watch":
        path = place(run)
        if not isinstance(path, CloudPath) and not path.is_dir():
            raise RunError(f"{path}: no such folder; give the {argument('run_dir')} of a run.")
    elif run is not None and command == "train":
        path = place(run)
        if not isinstance(path, CloudPath) and path.is_file():
            raise RunError(f"{path}: is a file; choose another folder.")
    elif run is not None:
        path = place(run)
        if not isinstance(path, CloudPath) and not (path.is_file() and command != "export"):
            run_file(path)


def _check_output(command: str, out: str, kinds: tuple[str, ...]) -> None:
    from nca_trader.cloud import local

    path = local(out, f"what {argument('out')} writes")
    if path.suffix not in kinds:
        raise ConfigError(
            f"{argument('out', out)}: write to a name that ends in {' or '.join(kinds)}."
        )
    # `prove` makes the folder.
    if command == "backtest" and not path.parent.is_dir():
        raise ConfigError(
            f"{argument('out', out)}: there is no folder {path.parent}; make it first."
        )


def check_strategy(name: str, of_a_file: bool = False) -> None:
    """Refuses a rule that there is not; with `of_a_file` the user's own files and features too."""
    from nca_trader.config.ranges import nearest

    file, _, _ = name.rpartition(":")
    file = name if name.endswith(".py") else file
    if of_a_file and file.endswith(".py"):
        if not pathlib.Path(file).is_file():
            raise ConfigError(f"{file}: no such file; check the path.")
        return
    if name in STRATEGIES or (of_a_file and name.startswith("feature:")):
        return
    more = "; feature:NAME names a feature, FILE.py:NAME your own" if of_a_file else ""
    raise ConfigError(
        f"{name if of_a_file else argument('strategy', name)}: no such rule; "
        f"{nearest(name, STRATEGIES)}There are "
        f"{', '.join(STRATEGIES)}{more}."
    )
