"""The command `nca-trader`: one file a command, found by name, imported only when it runs.

Exit codes: 0 done, or stopped on request with all saved; 1 a check failed, or an object store
cannot be reached; 2 the input was wrong; 3 halted; 4 damaged or unwritable state; 130 interrupted
twice.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

COMMANDS = (
    "demo", "train", "supervise", "prove", "backtest", "export", "paper", "journal", "data",
    "leakcheck", "plan", "profile", "watch", "doctor", "bench",
)  # fmt: skip

# Commands that train, and what makes training smaller.
LEARNING = ("demo", "train", "prove", "profile", "bench")
LESS = (
    "lower learner.num_segments, learner.segment_length, learner.envs_per_segment, "
    "policy.channels or env.market_bars, or give fewer bars"
)


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and exits with 2."""

    def error(self, message: str) -> NoReturn:
        """Prints the line and exits."""
        self.exit(2, f"{self.prog}: {message}; see `{self.prog} --help`.\n")


def build_parser() -> Parser:
    """The parser of every command; heavy imports wait until a command runs."""
    import nca_trader

    parser = Parser(prog="nca-trader", description=nca_trader.__doc__)
    parser.add_argument("--version", action="version", version=nca_trader.__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = importlib.import_module(f"nca_trader.cli.{name}")
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(command)
        command.add_argument(
            "--json", action="store_true", help="one JSON object as the last line of stdout"
        )
        command.set_defaults(execute=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    from nca_trader.cli.checks import check
    from nca_trader.errors import NcaTraderError, options_named

    args = build_parser().parse_args(argv)
    use_compile_cache()
    try:
        with options_named():
            check(args)
            result = args.execute(args)
    except NcaTraderError as error:
        print(f"nca-trader {args.command}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; what was saved before stays", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader went away, e.g. `| head`; nothing more can be said to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        return _system_error(args.command, error)
    if args.json and result is not None:
        print_json(result)
    return 0


def _system_error(command: str, error: Exception) -> int:
    """Says in one line what the machine refused; returns the exit code. All else is raised."""
    from nca_trader.errors import ConfigError, StateError, out_of_memory, printable

    if out_of_memory(error):
        said = next(iter(str(error).splitlines()), "no memory is left")
        less = LESS if command in LEARNING else "give fewer bars or assets"
        print(f"nca-trader {command}: out of memory ({said}); {less}.", file=sys.stderr)
        return ConfigError.exit_code
    if isinstance(error, OSError):
        where = f"{error.filename or 'this machine'}: {error.strerror or error}"
        print(f"nca-trader {command}: {printable(where)}", file=sys.stderr)
        return StateError.exit_code
    raise error


def print_json(result: dict[str, Any]) -> None:
    """One object on one line; a number that is not finite has no place in JSON and is null."""
    print(json.dumps(_finite(result), allow_nan=False, default=str), flush=True)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def use_compile_cache() -> None:
    """Keeps compiled programs under the user's cache folder, unless the user chose otherwise."""
    if "NCA_TRADER_NO_CACHE" in os.environ or "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    # Through the environment: jax, slow to import and not needed by all commands, reads it then.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(pathlib.Path(home) / "nca_trader" / "jax")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
