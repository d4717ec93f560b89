"""`nca-trader leakcheck`: does a rule, a feature or a function of the user's own look ahead?"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import pathlib
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nca_trader.cli.checks import STRATEGIES, check_strategy
from nca_trader.cli.reading import add_reading_arguments, reading_options

HELP = "look for look-ahead in a strategy or a feature, by running it on other futures"
NOTE = (
    "STRATEGY is a rule (" + ", ".join(STRATEGIES) + "), feature:NAME, or FILE.py:NAME, your own "
    "code, which is run: a function of nca.Bars that gives one row a bar, a Strategy, a Feature, "
    "or a function without arguments that gives one of the last two. Exit code 0: no look-ahead "
    "was found; 1: it looks ahead; 2: it can't be checked."
)
QUIET = 2.0  # seconds before progress is shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.epilog = NOTE
    parser.add_argument("strategy", metavar="STRATEGY", help="a rule, feature:NAME or FILE.py:NAME")
    parser.add_argument("--data", metavar="FILE", required=True, help="a bar file (CSV, Parquet)")
    parser.add_argument("--cases", type=int, default=200, help="futures to try (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="of the cases (default 0)")
    parser.add_argument(
        "--decided",
        choices=("close", "open"),
        default="close",
        help="row t is decided at bar t's close (default), or at its open: then of bar t its open "
        "alone may be used",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.0,
        help="largest change that is rounding, e.g. 1e-9 (default 0: bit for bit)",
    )
    add_reading_arguments(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Checks; returns the report.

    Raises:
      CheckFailed: it looks ahead.
      ConfigError: there is no such strategy, or it can't be checked.
      BarError: see `read_bars`.
    """
    from nca_trader.cli import print_json
    from nca_trader.data.bars import read_bars
    from nca_trader.errors import CheckFailed
    from nca_trader.evaluate.leakcheck import leakcheck

    subject = named(args.strategy)
    bars = read_bars(args.data, **reading_options(args))
    with shown() as report:
        found = leakcheck(
            subject,
            bars,
            cases=args.cases,
            seed=args.seed,
            decided=args.decided,
            tolerance=args.tolerance,
            name=args.strategy,
            report=report,
        )
    print(found)
    result = {"strategy": args.strategy, "data": args.data} | found.to_dict()
    if found.ok:
        return result
    if args.json:  # it is the result also where the exit code is 1
        print_json(result)
    what = "it looks ahead" if found.leaks else "it needs later bars to answer for earlier ones"
    raise CheckFailed(f"{args.strategy}: {what}; see above, and use bars up to its own row only.")


def named(strategy: str) -> Any:
    """What STRATEGY names: a rule's `Strategy`, a feature's name, or what is in the user's file.

    Raises:
      ConfigError: there is no such thing, or the file can't be imported.
    """
    from nca_trader.agents import rules
    from nca_trader.data.features import feature_set

    if strategy.startswith("feature:"):
        name = strategy.removeprefix("feature:")
        feature_set((name,))  # refuses an unknown one
        return name
    file, _, name = strategy.rpartition(":")
    if strategy.endswith(".py") or file.endswith(".py"):
        return _from_file(strategy, *((file, name) if file.endswith(".py") else (strategy, "")))
    check_strategy(strategy, of_a_file=True)
    return getattr(rules, strategy)()


def _from_file(strategy: str, path: str, name: str) -> Any:
    """The function, `Strategy` or `Feature` of a file that the user named to be run."""
    from nca_trader.agents.rules import Strategy
    from nca_trader.config.ranges import nearest
    from nca_trader.data.features import Feature
    from nca_trader.errors import ConfigError, user_line

    module = _imported(pathlib.Path(path))
    own = [key for key, value in vars(module).items() if _is_subject(value, module)]
    if name not in vars(module):
        what = f"no {name!r} there; {nearest(name, own)}" if name else "which of its functions? "
        there = f"There are {', '.join(own)}." if own else "It defines no function of bars."
        raise ConfigError(f"{path}: {what}{there} Write {path}:NAME.")
    found = getattr(module, name)
    if isinstance(found, Strategy | Feature):
        return found
    if not callable(found) or isinstance(found, type):
        raise ConfigError(
            f"{strategy}: a {type(found).__name__} is no strategy; name a function of bars, a "
            "Strategy or a Feature."
        )
    needed = _arguments_needed(found)
    if needed == 1:
        return found
    if needed:
        raise ConfigError(
            f"{strategy}: takes {needed} arguments; a function of bars takes one, so give the "
            "others defaults."
        )
    try:
        built = found()
    except Exception as error:
        what = f"{type(error).__name__} at {user_line(error)}: {' '.join(str(error).split())}"
        raise ConfigError(f"{strategy}: it can't be built ({what}); mend that.") from None
    if not isinstance(built, Strategy | Feature):
        raise ConfigError(
            f"{strategy}: takes no bars and gives a {type(built).__name__}; let it take bars, or "
            "give a Strategy or a Feature."
        )
    return built


def _imported(path: pathlib.Path) -> types.ModuleType:
    """The user's file as a module; it finds its neighbours, as `python FILE` would let it."""
    from nca_trader.errors import ConfigError, user_line

    if not path.is_file():
        raise ConfigError(f"{path}: no such file; check the path.")
    spec = importlib.util.spec_from_file_location(f"leakcheck_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path}: is no Python file; name one that ends in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses look there for their own module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise ConfigError(
            f"{path} line {error.lineno}: {error.msg} (SyntaxError); mend it."
        ) from None
    except (Exception, SystemExit) as error:
        said = " ".join(str(error).split()) or "no message"
        raise ConfigError(
            f"{path}: importing it raises {type(error).__name__} at {user_line(error)}: {said}; "
            "mend that."
        ) from None
    finally:
        sys.path.remove(str(path.resolve().parent))
    return module


def _is_subject(value: Any, module: types.ModuleType) -> bool:
    """Whether a name of the user's file is one that could be checked."""
    from nca_trader.agents.rules import Strategy
    from nca_trader.data.features import Feature

    mine = inspect.isfunction(value) and value.__module__ == module.__name__
    return isinstance(value, Strategy | Feature) or (mine and _arguments_needed(value) < 2)


def _arguments_needed(function: Callable[..., Any]) -> int:
    """How many positional arguments a call can't leave out; functions of bars have one."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a built-in that says nothing of itself
        return 1
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.default is p.empty and p.kind in kinds for p in parameters)


@contextmanager
def shown() -> Iterator[Callable[[int, int], None]]:
    """Gives the function that shows progress: on a terminal, once it has taken a while."""
    from nca_trader.watch.progress import DRAW_EVERY, on_terminal

    began = time.monotonic()
    drawn = began + QUIET - DRAW_EVERY
    width = 0

    def report(done: int, total: int) -> None:
        nonlocal drawn, width
        now = time.monotonic()
        if now - drawn < DRAW_EVERY or not on_terminal(sys.stderr):
            return
        line = f"leakcheck  {done} of {total} cases"
        drawn, width = now, len(line)
        print(f"\r{line}", end="", file=sys.stderr, flush=True)

    try:
        yield report
    finally:
        if width:
            print("\r" + " " * width + "\r", end="", file=sys.stderr, flush=True)
