"""The parser of every command, and `main`, which runs one of them."""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import logging
import os
import pathlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NoReturn

# Each command: the module that has its `add_COMMAND_options` and `run_COMMAND`, and its help.
COMMANDS = {
    "demo": ("demo", "train, backtest and paper-replay on real sample bars, then write a page"),
    "init": ("project", "write a project folder: environment, agent, strategy, data"),
    "presets": ("project", "list, show or copy the environments and agents that ship"),
    "config": ("project", "print an environment and an agent with every key"),
    "train": ("train", "train an agent into a run folder; the same command resumes it"),
    "prove": ("prove", "train on markets with a known optimum, and print the fraction reached"),
    "board": ("board", "a table of what agents reached in `prove`; or verify one of its rows"),
    "backtest": ("backtest", "backtest a trained run or a rule, and print its metrics"),
    "sweep": ("sweep", "run a rule with every combination of a grid, and say if the best is luck"),
    "trials": ("runs", "list what was trained and evaluated in a project folder"),
    "runs": ("runs", "list, compare or remove the runs of a project folder"),
    "walkforward": ("walkforward", "refit fold by fold, and report what was earned out of sample"),
    "tune": ("sweep", "search hyper-parameters of an agent; every trial is counted"),
    "export": ("export", "write a run's agent to a small file, with 4, 8 or 16 bits per weight"),
    "paper": ("paper", "paper-trade a run's agent, every step in a journal"),
    "halt": ("paper", "stop a paper session's trading until it is resumed"),
    "resume": ("paper", "let a paper session trade again after a halt, and say why"),
    "journal": ("paper", "verify or replay a paper session's journal"),
    "data": ("data", "check a bar file, every problem with its remedy; or download one"),
    "leakcheck": ("leakcheck", "look for look-ahead in a strategy or a feature, on other futures"),
    "plan": ("scale", "compile a run for a TPU slice: does it fit, and what bounds it"),
    "watch": ("watch", "follow a run or a paper session: metrics, Prometheus, alert rules"),
    "dashboard": ("watch", "show paper sessions on a page, live, with HALT"),
    "doctor": ("scale", "what this machine has, what is misconfigured, and how to fix it"),
}
# Commands that train, and what makes training smaller.
LEARNING = ("demo", "train", "walkforward", "tune", "prove")
LESS = (
    "lower learner.num_segments, learner.segment_length, learner.envs_per_segment, "
    "policy.channels or env.market_bars, or give fewer bars"
)


INTERRUPTED = 130  # as of a program that Ctrl-C ends, so that a script can see it


class Interrupted(KeyboardInterrupt):
    """A command was asked to stop, has saved everything and has said so."""


# The options that help lists first, as far as a command has them, and how many at most; those that
# every command has come last.
FIRST = (
    "run strategy agent env feed journal data grid space train test folder host port rules "
    "until start stop steps out trials set devices param broker bits decided cases select seed"
).split()
LAST = ("help", "json", "quiet")
NUM_FIRST = 10


class Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line, and exits with 2.

    Its help lists ten options first, then those of an account, then the rest. The options of a bar
    file are described by `nca-trader data --help` alone.
    """

    def format_help(self) -> str:
        """Return the help of a command, in groups."""
        from nca_trader.cli.options import ACCOUNT, READING, SHARED

        options, groups = self._optionals._group_actions, self._action_groups
        name = self.prog.rpartition(" ")[2]
        if name not in COMMANDS:
            return super().format_help()
        # `watch --every` is another option of the same name.
        shared = [a for a in options if a.help == SHARED.get(a.dest, {}).get("help")]
        reading = [a for a in shared if a.dest in READING]
        account = [a for a in options if _name(a) in ACCOUNT and not a.required]
        others = [a for a in options if a not in reading and a not in account]
        order = {word: number for number, word in enumerate(FIRST)}

        def rank(action: argparse.Action) -> tuple[bool, bool, int]:
            name = _name(action)
            return not action.required, name in LAST, order.get(name, len(order))

        ranked = sorted((a for a in others if a.help != argparse.SUPPRESS), key=rank)
        # The options of a group in which one has to be given are not `required` by themselves.
        first = ranked[:NUM_FIRST]
        rest = [a for a in others if a not in first]
        formatter = self._get_formatter()
        positionals = self._positionals._group_actions
        needed = [a for a in first if a.required]
        alternatives = [g for g in self._mutually_exclusive_groups if g.required]
        needed += [a for g in alternatives for a in g._group_actions if a in first]
        formatter.add_usage(None, [*needed, *positionals], alternatives, "usage: ")
        usage = formatter.format_help().rstrip()
        short = len(needed) + len(positionals) < len(options) + len(positionals)
        formatter = self._get_formatter()
        formatter.add_text(self.description)
        sections: list[Any] = [("arguments", None, positionals), ("options", None, first)]
        sections += [("the account", None, account), ("more options", None, rest)]
        for group in groups:
            if group not in (self._optionals, self._positionals):
                sections.append((group.title or "", group.description, group._group_actions))
        if reading and name == "data":
            sections.insert(2, ("reading a bar file", None, reading))
        elif reading:
            words = ", ".join(f"--{_name(action)}" for action in reading)
            about = f"{words}: as `nca-trader data --help` describes them"
            sections.insert(2, ("reading a bar file", about, []))
        for title, description, actions in sections:
            formatter.start_section(title)
            formatter.add_text(description)
            formatter.add_arguments(actions)
            formatter.end_section()
        formatter.add_text(self.epilog)
        return f"{usage}{' [OPTION ...]' if short else ''}\n\n{formatter.format_help()}"

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the words, and keep those that are names for the message of a fault."""
        words = sys.argv[1:] if args is None else list(args)
        self._given = [word.partition("=")[0] for word in words]
        found, unknown = super().parse_known_args(words, namespace)
        if unknown and self._subparsers is None:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Print the line, with the names that were meant, and exit."""
        from nca_trader.config.ranges import nearest

        known, dashes = [_name(action) for action in self._actions], "--"
        own = [word[2:] for word in self._given if word.startswith(dashes)]
        if self._subparsers is not None:
            known, dashes = list(COMMANDS), ""
            own = [word for word in self._given if word[:1] != "-"][:1]
        slips = [word for word in own if not any(name.startswith(word) for name in known)]
        close = (nearest(word, known).strip() for word in slips)
        meant = "".join(" " + hint.replace("'", f"'{dashes}", 1) for hint in close if hint)
        self.exit(2, f"{self.prog}: {message};{meant} see `{self.prog} --help`.\n")


def _name(action: argparse.Action) -> str:
    """Return the name of an option without its dashes."""
    return next((text[2:] for text in action.option_strings if text[:2] == "--"), "")


def build_parser() -> Parser:
    """Return the parser of every command; heavy imports wait until a command runs."""
    import nca_trader

    parser = Parser(prog="nca-trader", description=nca_trader.__doc__)
    parser.add_argument("--version", action="version", version=nca_trader.__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (home, about) in COMMANDS.items():
        # These modules import jax inside their functions, so `--help` is quick.
        module = importlib.import_module(f"nca_trader.cli.{home}")
        command = commands.add_parser(name, help=about, description=about)
        getattr(module, f"add_{name}_options")(command)
        command.add_argument(
            "--json", action="store_true", help="one JSON object as the last line of stdout"
        )
        words = "show no progress on stderr; results and errors stay"
        command.add_argument("--quiet", action="store_true", help=words)
        options = (a for a in command._actions if a.option_strings)
        usual = {a.dest: a.default for a in options if a.default != argparse.SUPPRESS}
        command.set_defaults(execute=getattr(module, f"run_{name}"), usual=usual)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
      argv: the words after `nca-trader`; by default those of this process.

    Returns:
      The exit code.

    Example:
      >>> main(["backtest", "--strategy=momentum", "--repair=sort"])  # its line is on stderr
      2
    """
    from nca_trader.cli.checks import check
    from nca_trader.errors import (
        ConfigError,
        NcaTraderError,
        StateError,
        options_named,
        out_of_memory,
        printable,
    )
    from nca_trader.machine import avoid_tpu, check_versions
    from nca_trader.progress import in_pipes, quiet

    # Tracing makes millions of objects that live, and Python would look through them: 1 s of 9.
    gc.set_threshold(50_000, 20, 100)
    # Another package may ask for the root logger's format first, which begins with our modules.
    logging.basicConfig(format="%(message)s")
    args = argparse.Namespace(command="", json=False)
    words = sys.argv[1:] if argv is None else argv
    try:
        args = build_parser().parse_args(words)
        check_versions()
        use_compile_cache()
        avoid_tpu()
        with options_named():
            # Before the command imports jax, so that a wrong option is refused at once.
            check(args)
            with quiet() if args.quiet else in_pipes(), terminated():
                result = args.execute(args)
    except NcaTraderError as error:
        print(f"nca-trader {args.command}: {error}", file=sys.stderr)
        return error.exit_code
    except Interrupted:
        return INTERRUPTED
    except KeyboardInterrupt:
        print("interrupted; what was saved before stays", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has closed the pipe, e.g. `| head`. Python flushes stdout when it exits, which
        # would fail again: what is left goes to /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        # First, as some systems report a failed allocation as an OSError.
        if out_of_memory(error):
            cause = next(iter(str(error).splitlines()), "no memory is left")
            less = LESS if args.command in LEARNING else "give fewer bars or assets"
            print(f"nca-trader {args.command}: out of memory ({cause}); {less}.", file=sys.stderr)
            return ConfigError.exit_code
        if isinstance(error, OSError):
            where = f"{error.filename or 'this machine'}: {error.strerror or error}"
            print(f"nca-trader {args.command}: {printable(where)}", file=sys.stderr)
            return StateError.exit_code
        raise
    # Of several processes only the first one has a result.
    if args.json and result is not None:
        print_json(result)
    return 0


def print_json(result: dict[str, Any]) -> None:
    """Print one object on one line; a number that is not finite becomes null.

    Example:
      >>> print_json({"sharpe": float("nan"), "trades": 3})
      {"sharpe": null, "trades": 3}
    """
    from nca_trader.config.records import finite

    # JSON has no NaN: `finite` replaces it, and one that slips through is an error here.
    print(json.dumps(finite(result), allow_nan=False, default=str), flush=True)


def fail_check(args: argparse.Namespace, result: dict[str, Any], message: str) -> NoReturn:
    """End a command whose check failed, with exit code 1.

    The result is printed too: with `--json` a reader gets it whatever the exit code.

    Raises:
      CheckFailed: always.
    """
    from nca_trader.errors import CheckFailed

    if args.json:
        print_json(result)
    raise CheckFailed(message)


def end_stopped(args: argparse.Namespace, result: dict[str, Any] | None) -> NoReturn:
    """End a command that was asked to stop and has saved all, with exit code 130.

    Raises:
      Interrupted: always.
    """
    if args.json and result is not None:
        print_json(result)
    raise Interrupted


@contextlib.contextmanager
def stop_on_signal(what: str) -> Iterator[Callable[[], bool]]:
    """Turn the first SIGINT or SIGTERM into a request to stop, and the second into an interrupt.

    Args:
      what: "update", "bar" or "look", after which the caller stops; for the message.

    Returns:
      A context manager that yields a function, which is true once a signal has come.

    Raises:
      KeyboardInterrupt: at the second signal, wherever the program is.
    """
    asked = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        print(f"\nstopping after this {what}; once more stops at once", file=sys.stderr)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        # The caller asks after each unit of work, so state is saved between two of them.
        yield lambda: asked
    finally:
        for number, handler in before.items():
            # None stands for a handler that Python did not install and cannot restore.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextlib.contextmanager
def terminated() -> Iterator[None]:
    """Let SIGTERM interrupt as Ctrl-C does, so that either ends a command with exit code 130."""
    before = signal.getsignal(signal.SIGTERM)
    # Only the main thread may set it, and a process that ignores the signal goes on to.
    if before is not signal.SIG_DFL or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def use_compile_cache() -> None:
    """Keep compiled programs under the user's cache folder, unless the user chose otherwise."""
    if "NCA_TRADER_NO_CACHE" in os.environ or "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    from nca_trader.machine import PROGRAMS, processor

    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    folder = pathlib.Path(home) / "nca_trader"
    # Through the environment: jax is slow to import, not every command needs it, and it reads them.
    # What is compiled for one kind of processor may not run on another that shares the folder.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / f"jax-{processor()}")
    # Most programs take less than jax's own bound of a second: 2 s of a `prove` are such ones.
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ[PROGRAMS] = str(folder / "traced")
