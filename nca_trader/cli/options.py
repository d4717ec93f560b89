"""Options that several commands share, and the bars, environments and agents they stand for."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import re
import shlex
import sys
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from nca_trader.config.agent import RULES
from nca_trader.config.ranges import within
from nca_trader.config.spans import value_of
from nca_trader.errors import BarError, ConfigError, argument, options_named

T = TypeVar("T")


def _number(kind: Callable[[str], T], holds: Callable[[T], bool], words: str) -> Callable[[str], T]:
    def read(text: str) -> T:
        with contextlib.suppress(ValueError):
            if holds(number := kind(text)):
                return number
        raise argparse.ArgumentTypeError(f"{text} is not a {words}; give one")

    return read


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return the `type` of an option: a whole number from `least` to `most`."""
    words = f"of at least {least}" if most is None else f"from {least} to {most}"
    highest = math.inf if most is None else most
    return _number(int, lambda number: least <= number <= highest, f"whole number {words}")


def real(interval: str) -> Callable[[str], float]:
    """Return the `type` of an option: a number in an interval, e.g. "[0, 1)"."""
    return _number(float, lambda number: within(number, interval), f"number in {interval}")


COUNT, SEED = whole(1), whole(0, 2**32 - 1)
# The options of `read_bars`, the same for every command that reads a bar file.
READ: dict[str, dict[str, Any]] = {
    "symbol": {"help": "of a file that holds several"},
    "timezone": {"help": "of times without an offset, e.g. America/New_York"},
    "repair": {
        "metavar": "NAMES",
        "help": "repairs of the file that are allowed, e.g. sort,drop-nan: sort, keep-first, "
        "keep-last, drop-nan, drop-bad, absolute, widen, close-only, no-volume, part-reuse, "
        "keep-gaps, keep-jumps, keep-case, unadjusted; without it a fault is refused",
    },
    "columns": {
        "metavar": "ROLE=COLUMN,...",
        "help": "the column of each role, by name or number from 1, e.g. time=1+2,close=prccd; "
        "roles: time, symbol, open, high, low, close, volume; factors of prices: split, dividend; "
        "cash and quotes: cash_dividend, funding, bid, ask, spread, half_spread; ROLE=- takes none",
    },
    "dates": {"choices": ("dmy", "mdy"), "help": "the order in 01/02/2018"},
    "header": {"type": COUNT, "metavar": "LINE", "help": "of a CSV: the line of the names, from 1"},
    "decimal": {"choices": (".", ","), "help": "the decimal sign of a CSV"},
    "every": {"metavar": "LENGTH", "help": "e.g. 1min, 1h, 1d: gaps of trading are missing bars"},
    "memory_gb": {"type": float, "metavar": "GIB", "help": "memory of reading a file, at most (2)"},
    "split": {
        "action": "append",
        "metavar": "SYMBOL:DATE:RATIO",
        "help": "a split of prices as traded that no column gives, repeatable: AAPL:2020-08-31:4",
    },
    "extra": {
        "metavar": "NAME=FILE,...",
        "help": "columns of your own, of a file or of the bars' file, known a step or +DELAY after "
        "their stamps: vix=vix.csv,cpi=cpi.csv+45d,score=Score; see docs/guides/bars.md",
    },
}
READING = tuple(READ)
# The options of an account, the same for every command that trades.
ACCOUNT = ("commission", "slippage", "fill", "order", "limit")
# Those of backtests alone.
OF_BACKTESTS = ("delay", "stop_loss", "take_profit", "trailing_stop")
SHARED: dict[str, dict[str, Any]] = {
    **READ,
    "env": {"help": "an environment: preset name or TOML file"},
    "agent": {"help": "an agent: preset name or TOML file"},
    "agent_seconds": {"type": float, "metavar": "S", "help": "of an agent for a market (1800)"},
    "track": {
        "metavar": "KIND[:OPTIONS]",
        "help": "also show the metrics elsewhere: tensorboard[:DIR] or wandb[:ENTITY/PROJECT]; see "
        "docs/guides/training.md",
    },
    "run": {"dest": "run_dir", "metavar": "DIR", "help": "run folder or exported file"},
    "seed": {"type": SEED, "metavar": "N", "help": "the agent of that number, from 0"},
    "force_agent": {
        "action": "store_true",
        "help": "with --run: the agent trades, also where a baseline was deployed in its place",
    },
    "allow_code": {
        "action": "store_true",
        "help": "with --run: load own code that it names, though you have not signed it; it runs",
    },
    "data": {"help": "a bar file or folder (or URL), sample:fx or module:name; else sample:sp500"},
    "devices": {"type": int, "help": "devices to train on; at most one per core on a CPU"},
    "set": {
        "action": "append",
        "default": [],
        "metavar": "TABLE.KEY=VALUE",
        "help": "change a field of the agent, or env.KEY of the environment; repeatable",
    },
    "param": {
        "action": "append",
        "metavar": "NAME=VALUE",
        "help": "a parameter of --strategy, e.g. fast=10; repeatable",
    },
    "commission": {"type": float, "metavar": "F", "help": "fraction of notional"},
    "slippage": {"type": float, "metavar": "F", "help": "fraction of price"},
    "fill": {
        "choices": ("next_open", "close"),
        "help": "the open after a decision, or the close that it saw, which is idealised",
    },
    "order": {
        "choices": ("on_change", "rebalance"),
        "help": "trade when a target changes, or at each target",
    },
    "limit": {
        "action": "append",
        "metavar": "NAME=VALUE",
        "help": "a risk limit, repeatable: max_position, max_gross, max_order, "
        "max_orders_per_minute, price_collar, max_daily_loss or max_drawdown, e.g. "
        "max_drawdown=0.2",
    },
    "delay": {"type": int, "metavar": "BARS", "help": "every order is late by so many"},
    "stop_loss": {"type": float, "metavar": "F", "help": "leave at a loss of F of the entry price"},
    "take_profit": {"type": float, "metavar": "F", "help": "leave at a gain of F of it"},
    "trailing_stop": {"type": float, "metavar": "F", "help": "leave F below the best price so far"},
    "strategy": {
        "metavar": "NAME|FILE.py:NAME",
        "help": "your own strategy or function of bars in a file, which is run, or a rule: "
        + ", ".join(RULES),
    },
    "grid": {
        "action": "append",
        "default": [],
        "metavar": "NAME=VALUES",
        "help": "values of a parameter: START:STOP[:STEP], without STOP, or A,B,C; with --sample "
        "LOW:HIGH is a range to draw from; repeatable",
    },
    "until": {"metavar": "DATE", "help": "take bars before this date, and keep the rest unseen"},
    "steps": {"type": COUNT, "metavar": "N", "help": "environment steps of each agent"},
    "seeds": {"type": COUNT, "metavar": "N", "help": "agents that train alike, and act together"},
    "metric": {"default": "sharpe", "metavar": "NAME", "help": "to maximise (%(default)s)"},
    "folder": {"metavar": "DIR", "help": "keeps what is done; the same command resumes it"},
    "trials": {"metavar": "DIR", "help": "folder of the trial log, which counts it (runs)"},
    "workers": {
        "metavar": "W",
        "help": "processes of this machine, or tcp://HOST:PORT of a cluster",
    },
    "python": {"metavar": "PROGRAM", "help": "the Python that has an outside agent's library"},
    "out": {
        "metavar": "FILE",
        "help": "write a page (.html), or the result as a table (.parquet, .csv)",
    },
}
ALIASES = {"until": ("--stop",)}


def add_options(parser: Any, *names: str, **changes: dict[str, Any]) -> None:
    """Add options of `SHARED` by name.

    Args:
      parser: of a command, or a group of its options.
      *names: the options.
      **changes: options that differ here, e.g. `env={"required": True}`.
    """
    for name in (*names, *changes):
        flags = (f"--{name.replace('_', '-')}", *ALIASES.get(name, ()))
        parser.add_argument(*flags, **SHARED[name] | changes.get(name, {}))


def add_old_name(parser: Any, old: str, new: str, kind: type) -> None:
    """Accept `--old` as `--new`, with one warning; the help names only the new one."""

    class OldName(argparse.Action):
        def __call__(self, parser, namespace, values, option_string=None):
            warnings.warn(f"--{old} is now called --{new}.", FutureWarning, stacklevel=2)
            setattr(namespace, self.dest, values)

    unset, dest = argparse.SUPPRESS, new.replace("-", "_")
    parser.add_argument(f"--{old}", dest=dest, type=kind, action=OldName, default=unset, help=unset)


def reading_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the reading options that were given, as `read_bars` takes them."""
    # Only what was given, so that the defaults are those of `read_bars`.
    given = {name: getattr(args, name) for name in READING}
    given["split"] = ",".join(args.split) if args.split else None  # as one text, for records
    return {name: value for name, value in given.items() if value is not None}


def account_of(args: argparse.Namespace, env: Any = None, usual: Any = None) -> Any:
    """Return the `AccountConfig` of a command: what its options give, over an environment's.

    Args:
      args: with the options `ACCOUNT`.
      env: the `EnvConfig` of `--env`, whose account is meant whole; None without.
      usual: the `EnvConfig` of a run, whose costs stay where an option gives another one.
    """
    from nca_trader.config.account import AccountConfig, Costs, Limits

    # Only what was given replaces the environment's. 0 is a cost, too.
    names = (*ACCOUNT, *OF_BACKTESTS)
    given = {name: x for name in names if (x := getattr(args, name, None)) is not None}
    costs = {name: given.pop(name) for name in ("commission", "slippage") if name in given}
    # An option is repeated for each limit; the account takes one `Limits`.
    if limits := _named(given.pop("limit", None), "limit", "max_drawdown=0.2"):
        given["risk"] = Limits(**limits)
    if costs:
        config = env or usual
        given["costs"] = dataclasses.replace(config.costs if config else Costs(), **costs)
    return dataclasses.replace(env.account if env else AccountConfig(), **given)


def params_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the values of `--param` by name: numbers, true and false, or texts.

    Raises:
      ConfigError: one that is not NAME=VALUE, or a name that is given twice.
    """
    return _named(args.param, "param", "fast=10")


def _named(texts: list[str] | None, option: str, example: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"--{option} {text}: write NAME=VALUE, e.g. {example}.")
        if name in found:
            raise ConfigError(f"--{option} {text}: {name} is given twice; give it once.")
        found[name] = value_of(value)
    return found


def write_command(command: str, *words: str, **options: Any) -> str:
    """Write a whole command, quoted for a shell.

    Args:
      command: e.g. "backtest".
      *words: its arguments without a name.
      **options: values by argument; None and False are left out, True is an option without a
        value, a list repeats its option.

    Example:
      >>> write_command("backtest", run_dir="my run", seed=None)
      "nca-trader backtest --run 'my run'"
    """
    # A command is typed into a shell, so it names options even where Python code calls this.
    with options_named():
        parts = ["nca-trader", command, *map(shlex.quote, words)]
        for name, value in options.items():
            if value is True:
                parts.append(argument(name))
            elif value is not None and value is not False:
                each = value if isinstance(value, list | tuple) else [value]
                parts += [argument(name, item) for item in each]
    return " ".join(parts)


def again(args: argparse.Namespace, *words: str, **changes: Any) -> str:
    """Write the command that was given, without options at their defaults; see `write_command`."""
    given = {name: getattr(args, name) for name in args.usual if name not in ("json", "quiet")}
    given = {name: value for name, value in given.items() if value != args.usual[name]}
    return write_command(args.command, *words, **given | changes)


def overrides(args: argparse.Namespace, kind: str) -> list[str]:
    """Return the changes of `--set` to the environment ("env.") or to the agent ("")."""
    texts = getattr(args, "set", [])
    if kind:
        # The environment takes its keys without the prefix.
        return [text.removeprefix(kind) for text in texts if text.startswith(kind)]
    return [text for text in texts if not text.startswith("env.")]


def agent_of(args: argparse.Namespace) -> Any:
    """Return the agent of `--agent`, with `--set` and `--devices` applied."""
    from nca_trader.agents import load_agent

    agent = load_agent(args.agent, overrides(args, ""))
    if getattr(args, "devices", None) is None:
        return agent
    # The preset may fix `data`; None is what the number of devices leaves.
    mesh = dataclasses.replace(agent.mesh, devices=args.devices, data=None)
    return dataclasses.replace(agent, mesh=mesh)


def load_experiment(args: argparse.Namespace) -> tuple[Any, Any]:
    """Return the configs of `--env` and `--agent`, with `--set` and `--devices` applied."""
    from nca_trader.envs import load_env

    return load_env(args.env, overrides(args, "env.")), agent_of(args)


def load_bars(args: argparse.Namespace) -> Any:
    """Return the bars of `--data`, or the sample bars.

    Raises:
      BarError: see `read_bars`.
    """
    from nca_trader.data.bars import read_bars, sample_bars

    if args.data is not None:
        bars = read_bars(args.data, **reading_options(args))
        # A result prints the note itself.
        if bars.note and args.command != "backtest" and not args.quiet:
            print(f"{args.data}: {bars.note}", file=sys.stderr)
        return bars
    bars = sample_bars("sp500")
    return bars if args.symbol is None else bars.select(args.symbol)


def load_training(args: argparse.Namespace, seed: int = 0) -> tuple[Any, Any]:
    """Return the environment and the agent of a training command, ready on this machine's cores.

    Args:
      args: with `env`, `agent`, `set`, `devices`, `data`, `until` and the reading options.
      seed: of a synthetic market's path.

    Raises:
      BarError, StateError, ConfigError: see `read_bars`, `open_shards` and `TradingEnv`.
    """
    from nca_trader.data.shards import folder_of_shards, open_shards
    from nca_trader.envs.trading import TradingEnv
    from nca_trader.machine import cores
    from nca_trader.markets import task_of
    from nca_trader.parallel.mesh import use_cores

    config, agent = load_experiment(args)
    # Before any array: JAX counts a CPU's devices once, when it starts.
    if (wanted := math.prod(agent.mesh.axes)) > 1:
        use_cores(min(wanted, cores()))
    if args.data is not None and (folder := folder_of_shards(args.data)) is not None:
        # Shards were read, repaired and cut when they were written.
        given = [*reading_options(args), *(["until"] if args.until is not None else [])]
        if given:
            raise ConfigError(
                f"--{given[0]} is about a bar file, and {args.data} is shards; choose what is in "
                "them when they are written."
            )
        return TradingEnv(open_shards(folder), config), agent
    # With --data the market is only a source of costs and actions.
    if config.market and args.data is None:
        return TradingEnv(task_of(config, seed), config), agent
    bars = load_bars(args)
    # Checked here: an empty span would fail later, without the name of the option.
    if args.until is not None and bars.row(args.until) == 0:
        raise BarError(
            f"{bars.source}: no bar before --until {args.until}; the first is of {bars.index[0]}."
        )
    return TradingEnv(bars.between(None, args.until), config), agent


def load_selection(args: argparse.Namespace) -> Any:
    """Return the `Selector` of `--select FROM:TO`, or None; without `--until` set it to FROM.

    Raises:
      ConfigError: it is not FROM:TO, or there is no bar file.
      BarError, StateError: see `read_bars` and `Selector`.
    """
    from nca_trader.data.shards import folder_of_shards
    from nca_trader.evaluate.evidence.selection import Selector

    if args.select is None:
        return None
    # A time of day has colons too, so the second date is known by its year.
    found = re.fullmatch(r"(.+?):(\d{4}(?:-.*)?|)", args.select)
    if found is None:
        raise ConfigError(
            f"--select {args.select}: give two dates, FROM:TO, e.g. 2011-01-01:2013-01-01."
        )
    if args.data is None or folder_of_shards(args.data) is not None:
        raise ConfigError("--select takes bars of a file; give one with --data.")
    if args.until is None:
        # What selects must not train as well.
        args.until = found[1]
    return Selector(load_bars(args), found[1], found[2] or None)
