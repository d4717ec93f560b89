"""One exception class per kind of mistake; each message says what, where and the remedy.

The command line prints the message alone, in one line a problem, and exits with `exit_code`.
A message names an argument through `argument`, so that a reader can write what it says.
"""

import contextlib
import errno
import json
import pathlib
import shlex
import sysconfig
import traceback
from collections.abc import Iterator

# Arguments whose option has another name.
OPTIONS = {"run_dir": "run", "overrides": "set"}
_in_a_command = False


@contextlib.contextmanager
def options_named() -> Iterator[None]:
    """Makes `argument` name command options inside the block; `nca_trader.cli.main` is in one."""
    global _in_a_command
    before, _in_a_command = _in_a_command, True
    try:
        yield
    finally:
        _in_a_command = before


def in_a_command() -> bool:
    """Whether a command runs, which shows what a caller in Python is told by the log."""
    return _in_a_command


def argument(name: str, value: object = None) -> str:
    """Names an argument as its user writes it, with its value where there is one.

    To a caller in Python that is `repair="sort"`, and in a command `--repair sort`, quoted for a
    shell.
    """
    if not _in_a_command:
        text = json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
        return name if value is None else f"{name}={text}"
    option = "--" + OPTIONS.get(name, name).replace("_", "-")
    if value is None:
        return option
    # A value such as -3d after a space would be taken for an option.
    return f"{option}{'=' if str(value).startswith('-') else ' '}{shlex.quote(str(value))}"


LONGEST = 4000  # characters of a line of a message


def printable(text: object) -> str:
    r"""Returns `text` in one line that a terminal shows as it is: control characters escaped.

    A name in a file may hold escape sequences and line breaks, which would otherwise clear the
    screen or add a line to a message. They become e.g. \x1b and \n.
    """
    line = str(text)
    if len(line) > LONGEST:
        line = f"{line[: LONGEST // 2]} ... {line[-LONGEST // 2 :]}"  # the remedy is at the end
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def user_line(error: BaseException) -> str:
    """Names the innermost line of a user's own code in a traceback; "" where there is none."""
    libraries = (str(pathlib.Path(__file__).parent), sysconfig.get_path("stdlib"), "<frozen")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        name = frame.filename
        if "site-packages" not in name and not name.startswith(libraries):
            said = f" (`{frame.line}`)" if frame.line else ""
            return f"{name.rpartition('/')[2]} line {frame.lineno}{said}"
    return ""


class NcaTraderError(Exception):
    """Base of every error this package raises on purpose.

    Each argument is a line of the message, and is shown `printable`.
    """

    exit_code = 2

    def __str__(self) -> str:
        """The message."""
        return "\n".join(map(printable, self.args))


class BarError(NcaTraderError, ValueError):
    """Bars that cannot be used: names the file, the row, the problem and the remedy."""


class ConfigError(NcaTraderError, ValueError):
    """A preset, option or argument that is unknown or out of range."""


class RunError(NcaTraderError):
    """A run folder that is missing, of another agent or environment, or not a run at all."""


class StateError(NcaTraderError):
    """State on disk that is damaged or cannot be written: a checkpoint, a journal, a ledger."""

    exit_code = 4


class HaltError(NcaTraderError):
    """Trading halted by a risk limit or by a reconciliation that did not agree."""

    exit_code = 3


class StoreError(NcaTraderError):
    """An object store that cannot be reached now; the same command may succeed later."""

    exit_code = 1


class CheckFailed(NcaTraderError):
    """A check ran to its end, and what it checks does not hold."""

    exit_code = 1


def out_of_memory(error: BaseException) -> bool:
    """Whether an error of Python, numpy, the system or XLA says that memory does not suffice."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    of_xla = type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError")
    return of_xla and ("RESOURCE_EXHAUSTED" in str(error) or "HbmOom" in str(error))
