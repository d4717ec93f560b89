"""The file that asks the session of a journal to halt: `JOURNAL.halt`, whose text is the reason."""

from __future__ import annotations

import os
from pathlib import Path

from nca_trader.errors import ConfigError, StateError, argument, printable, system_errors
from nca_trader.machine import write_once

LONGEST = 500  # characters of a reason


def halt_file(journal: str | Path) -> Path:
    """Return the file that halts the session of `journal`."""
    path = Path(journal)
    return path.with_name(f"{path.name}.halt")


def checked_reason(reason: str) -> str:
    """Return a reason in one line of at most `LONGEST` characters.

    Raises:
      ConfigError: it is empty.
    """
    text = printable(" ".join(reason.split())[:LONGEST])
    if not text:
        raise ConfigError(f"{argument('reason')} is empty; say why.")
    return text


def request_halt(journal: str | Path, reason: str) -> bool:
    """Ask the session of `journal` to halt at its next bar or order.

    The first request counts: its file stays as it is until `resume` removes it, so that the
    journal holds the reason of the one that stopped the session.

    Returns:
      True if this call asked, False if somebody had asked before.

    Raises:
      ConfigError: the reason is empty.
      StateError: the file cannot be written.
    """
    target, said = halt_file(journal), checked_reason(reason)
    remedy = "stop the session's process instead"
    with system_errors(StateError, f"{target}: cannot be written", remedy):
        return write_once(target, f"{said}\n")


def read_halt(journal: str | Path) -> str | None:
    """Return the reason in a journal's halt file; None without one.

    A link, or a file that cannot be read, halts as well: someone put it there.
    """
    file = f"{journal}.halt"  # as text: a path costs as much as the call
    if not os.path.lexists(file):  # one system call, at every bar and before every order
        return None
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as opened:
            text = opened.read(4 * LONGEST).decode(errors="replace")
    except OSError as error:
        return f"the file cannot be read ({error.strerror})"
    return printable(" ".join(text.split())[:LONGEST])
