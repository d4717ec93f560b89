"""One exception class per kind of mistake; each message gives place, cause and remedy.

The command line prints only the message, one line per problem, and exits with `exit_code`. Messages
name arguments with `argument`, so that a reader can type what they say.
"""

import contextlib
import errno
import json
import logging
import os
import pathlib
import shlex
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from types import TracebackType

# Arguments whose option has another name.
OPTIONS = {"run_dir": "run", "overrides": "set"}
_in_a_command = False


@contextlib.contextmanager
def options_named() -> Iterator[None]:
    """Make `argument` name command options inside the block; `nca_trader.cli.main` uses one."""
    global _in_a_command
    before, _in_a_command = _in_a_command, True
    try:
        yield
    finally:
        _in_a_command = before


def in_a_command() -> bool:
    """Return whether a command is running: it prints what Python callers find in the log."""
    return _in_a_command


def argument(name: str, value: object = None) -> str:
    """Format an argument as its user writes it, with its value if there is one.

    A Python caller reads `repair="sort"`; a user of the command line reads `--repair sort`, quoted
    for a shell.
    """
    if not _in_a_command:
        text = json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
        return name if value is None else f"{name}={text}"
    option = "--" + OPTIONS.get(name, name).replace("_", "-")
    if value is None:
        return option
    # After a space, a value such as -3d would be parsed as an option.
    return f"{option}{'=' if str(value).startswith('-') else ' '}{shlex.quote(str(value))}"


LONGEST_LINE = 4000  # characters of a line of a message


def printable(text: object) -> str:
    r"""Return `text` in one line, with control characters escaped, e.g. \x1b and \n.

    A name in a file may hold escape sequences and line breaks, which would otherwise clear the
    screen or add a line to a message.
    """
    line = str(text)
    if len(line) > LONGEST_LINE:
        # The remedy is at the end.
        line = f"{line[: LONGEST_LINE // 2]} ... {line[-LONGEST_LINE // 2 :]}"
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def _of_the_user(frame: traceback.FrameSummary) -> bool:
    """Return whether a frame is of no package, not of Python's own library or its importers."""
    libraries = (str(pathlib.Path(__file__).parent), sysconfig.get_path("stdlib"), "<frozen")
    return "site-packages" not in frame.filename and not frame.filename.startswith(libraries)


def user_line(error: BaseException) -> str:
    """Return the innermost line of the user's own code in a traceback; "" without one."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _of_the_user(frame):
            source = f" (`{frame.line}`)" if frame.line else ""
            return f"{frame.filename.rpartition('/')[2]} line {frame.lineno}{source}"
    return ""


class _Plain(logging.Filter):
    """Prints a warning as its sentence alone where the user has set no format.

    Some packages, when imported, give the root logger a handler of Python's default format, which
    begins with the name of our module. Handlers and formats of a user's own stay in charge.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Print the message; return whether it is passed on."""
        handlers = logging.getLogger().handlers
        formats = [getattr(h.formatter, "_fmt", logging.BASIC_FORMAT) for h in handlers]
        # A handler of a class of its own, e.g. of a file or a test, was chosen.
        usual = all(type(h) is logging.StreamHandler for h in handlers)
        if not handlers or not usual or set(formats) != {logging.BASIC_FORMAT}:
            return True
        print(record.getMessage(), file=sys.stderr, flush=True)
        return False


def logger(name: str) -> logging.Logger:
    """Return the logger of a module, whose warnings are sentences."""
    found = logging.getLogger(name)
    found.addFilter(_Plain())
    return found


WHOLE = "NCA_TRADER_TRACEBACK"  # set in the environment, errors keep all frames and causes


def short_traceback(error: BaseException) -> list[str]:
    """Return the lines of a traceback with the user's own frames alone, and without causes."""
    if WHOLE in os.environ:
        return traceback.format_exception(error)
    found = traceback.TracebackException(type(error), error, error.__traceback__)
    found.stack = traceback.StackSummary.from_list(list(filter(_of_the_user, found.stack)))
    return [line.rstrip("\n") for line in found.format(chain=False)]


def shorten_tracebacks() -> None:
    """Let Python print an error of this package without the package's own frames.

    An `excepthook` that another package has set stays.
    """
    if sys.excepthook is not sys.__excepthook__ or WHOLE in os.environ:
        return

    def shown(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
        if isinstance(error, NcaTraderError):
            print("\n".join(short_traceback(error)), file=sys.stderr)
        else:
            sys.__excepthook__(kind, error, at)

    sys.excepthook = shown


class NcaTraderError(Exception):
    """Base of every error that this package raises on purpose.

    Each argument is one line of the message, and is made `printable`.

    Example:
      >>> import nca_trader as nca
      >>> try:
      ...     nca.load_agent("nanno")
      ... except nca.NcaTraderError as error:
      ...     print(error.exit_code, type(error).__name__)
      2 ConfigError
    """

    exit_code = 2

    def __str__(self) -> str:
        """Return the message."""
        return "\n".join(map(printable, self.args))

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows; IPython asks for it by this name."""
        return short_traceback(self)


class BarError(NcaTraderError, ValueError):
    """Bars that cannot be used; the message names file, row, problem and remedy."""


class ConfigError(NcaTraderError, ValueError):
    """A preset, option or argument that is unknown or out of range."""


class RunError(NcaTraderError):
    """A run folder that is missing, belongs to another agent or environment, or is not a run."""


class StateError(NcaTraderError):
    """State on disk that is damaged or not writable: a checkpoint, a journal, a trial log."""

    exit_code = 4


class HaltError(NcaTraderError):
    """Trading was halted by a risk limit or a failed reconciliation."""

    exit_code = 3


class StoreError(NcaTraderError):
    """An object store is not reachable now; the same command may succeed later."""

    exit_code = 1


class CheckFailed(NcaTraderError):
    """A check ran to its end and failed."""

    exit_code = 1


@contextlib.contextmanager
def extra(message: str) -> Iterator[None]:
    """Turn a failed import of an optional package inside the block into an error with `message`.

    Raises:
      ConfigError: the block raised ImportError.
    """
    try:
        yield
    except ImportError:
        raise ConfigError(message) from None


@contextlib.contextmanager
def system_errors(kind: type[NcaTraderError], what: str, remedy: str = "") -> Iterator[None]:
    """Turn an error of the system inside the block into `kind`: what fails, why, the remedy.

    Raises:
      NcaTraderError: of `kind`; the block raised OSError.
    """
    try:
        yield
    except OSError as error:
        raise kind(f"{what} ({error.strerror}){remedy and '; '}{remedy}.") from None


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error of Python, numpy, the system or XLA means exhausted memory."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    # By name: importing jax for its exception types would take seconds in commands without jax.
    of_xla = type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError")
    return of_xla and ("RESOURCE_EXHAUSTED" in str(error) or "HbmOom" in str(error))
