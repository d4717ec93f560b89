"""One exception class per kind of mistake; each message says what, where and the remedy.

The command line prints the message alone, in one line a problem, and exits with `exit_code`.
"""


class NcaTraderError(Exception):
    """Base of every error this package raises on purpose."""

    exit_code = 2


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
