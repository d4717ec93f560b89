"""The kill switch of a session, and what its risk limits say in the journal.

A halt is latched: the journal holds it, and every later start refuses until `resume` has written
why trading may go on. It comes from a limit, from the file JOURNAL.halt, or from SIGUSR1.
Limits are applied in `envs.account.risk`, where a backtest applies them.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nca_trader.config.records import finite
from nca_trader.envs.account.risk import CODES, Allow, Deny, is_denied, lifted, verdict
from nca_trader.envs.account.state import Account
from nca_trader.errors import ConfigError, HaltError, argument, options_named, printable
from nca_trader.machine import refuse_link
from nca_trader.paper.journal.halting import checked_reason, halt_file, read_halt
from nca_trader.paper.journal.journal import Event, Journal, read_events


class Halt(Exception):
    """Trading must stop. code: stable. detail: numbers and names, in JSON types.

    A session journals it and raises `HaltError`.
    """

    def __init__(self, code: str, **detail: Any):
        super().__init__(code)
        # A number of a venue's may be none, which JSON does not have.
        self.code, self.detail = code, finite(detail)
        self.key = ""  # of its event, once it is journalled

    @property
    def body(self) -> dict[str, Any]:
        """The body of its event."""
        return {"code": self.code, "detail": self.detail}


class Stopped(Exception):
    """The session was asked to end, and may go on later."""


class KillSwitch:
    """Says whether somebody asked the session of a journal to halt, or to end.

    Args:
      journal: path of the journal; the file is `JOURNAL.halt` next to it.

    Attributes:
      stop: returns whether the session is to end.
      stopped: whether it said so.
    """

    def __init__(self, journal: Path):
        self._journal = journal
        self.stop: Callable[[], bool] = lambda: False
        self._signalled = self.stopped = False

    def asked(self) -> dict[str, Any] | None:
        """Return who asked and why; None without a request."""
        if self._signalled:
            return {"by": "signal", "reason": "SIGUSR1"}
        reason = read_halt(self._journal)
        return None if reason is None else {"by": "file", "reason": reason}

    def refuse(self) -> None:
        """Raise `Halt` where somebody asked for one."""
        asked = self.asked()
        if asked is not None:
            raise Halt("asked", **asked)

    def end(self) -> None:
        """Raise `Stopped` where the session is to end."""
        self.stopped = self.stopped or self.stop()
        if self.stopped:
            raise Stopped

    def heard(self) -> None:
        """Raise, during a wait, where a halt or the end was asked for."""
        self.refuse()
        self.end()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take SIGUSR1 for a halt inside the block; in a thread, where none can, do nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(*_: object) -> None:
            # A flag and no more: a handler may run between any two instructions.
            self._signalled = True

        before = signal.signal(signal.SIGUSR1, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGUSR1, signal.SIG_DFL if before is None else before)


def refuse_no_journal(journal: str | Path) -> None:
    """Raise ConfigError where there is no journal at a path: no session would see the halt."""
    next(read_events(_existing(journal)), None)  # another program's file is refused


def resume(journal: str | Path, reason: str, now: int) -> Event | None:
    """Lift the halt of a journal, and remove the file that asked for one.

    Args:
      journal: its path; no session may be writing to it.
      reason: why trading may go on.
      now: nanoseconds since 1970 UTC.

    Returns:
      The halt that is lifted; None where only the file was there.

    Raises:
      ConfigError: nothing is halted, there is no such journal, or the reason is empty.
      StateError: a session is running, or the journal is damaged.
    """
    # Before the journal is opened, so that bad input touches nothing.
    reason, asked = checked_reason(reason), read_halt(journal)
    with contextlib.closing(Journal(_existing(journal), lambda: now)) as opened:
        standing = standing_halt(opened.events())
        if standing is None and asked is None:
            raise ConfigError(f"{journal}: is not halted; there is nothing to resume.")
        begun = standing or next(opened.events("run_started"), None)
        if begun is not None:
            halt = None if standing is None else {"seq": standing.seq, **standing.body}
            body = {"reason": reason, "halt": halt}
            if asked is not None:
                body["asked"] = asked
            key, ts = str(opened.head.seq), now if standing is None else standing.ts_event
            opened.record(begun.run, "resume", key, body, ts)
    # Last: a kill before this line leaves the session halted, not trading.
    halt_file(journal).unlink(missing_ok=True)
    return standing


class Lifts(NamedTuple):
    """Halts of a journal that people lifted.

    halts: their keys. refused: times of good bars after which bad ones halted. A replay of the
    good ones alone does not come to these halts.
    """

    halts: frozenset[str]
    refused: frozenset[int] = frozenset()


def lifts_of(events: Iterable[Event]) -> Lifts:
    """Return what the halts and resumes of a journal say was lifted, and its bars after what.

    Args:
      events: by seq; others than these may be among them.
    """
    halts, standing, refused, last = set(), set(), set(), 0
    for event in events:
        if event.kind == "bar":
            last = event.ts_event
        elif event.kind == "halt":
            standing.add(event.key)
            if event.body["code"] == "bad-bars":
                refused.add(last)
        elif event.kind == "resume":
            # One `resume` lifts every halt before it.
            halts, standing = halts | standing, set()
    return Lifts(frozenset(halts), frozenset(refused))


def standing_halt(events: Iterator[Event]) -> Event | None:
    """Return the newest halt that no later `resume` lifts."""
    last = None
    for event in events:
        if event.kind in ("halt", "resume"):
            last = event
    return last if last is not None and last.kind == "halt" else None


def refuse_halted(journal: Journal) -> None:
    """Raise HaltError where the journal's last word is a halt."""
    halt = standing_halt(journal.events())
    if halt is not None:
        raise HaltError(
            f"{journal.path}: trading was halted at {np.datetime64(halt.ts_event, 'ns')}, "
            f"{halt.body['code']} (seq {halt.seq}); correct the cause, then {remedy(journal.path)}."
        )


def halted(journal: Journal, halt: Halt, last: int | None) -> HaltError:
    """Return the error of a halt in a journal, after the bar at `last`, seconds since 1970 UTC."""
    when = "before the first bar" if last is None else f"at {np.datetime64(last, 's')}"
    detail = printable(", ".join(f"{name} {value}" for name, value in halt.detail.items()))
    return HaltError(
        f"{journal.path}: halted {when}, {halt.code} ({detail}); the last events of the journal "
        f"show why. Correct the cause, then {remedy(journal.path)}."
    )


def remedy(journal: Path) -> str:
    """Return what lifts a halt, for a message."""
    with options_named():  # a command is typed into a shell, also by a caller in Python
        return f"`nca-trader resume {argument('journal', journal)} {argument('reason')} TEXT`"


def said(account: Account, asked: np.ndarray, symbols: Sequence[str]) -> list[dict[str, Any]]:
    """Return the bodies of `risk` events about an account's last order, one by limit."""
    if not account.guard:
        return []
    # A denied order leaves no target, as if none had been given.
    given = np.where(is_denied(account.guard), np.nan, account.ordered)
    found = verdict(account.guard, asked, given)
    if isinstance(found, Allow):
        return []
    if isinstance(found, Deny) and found.halts:
        return [{"code": found.code, **found.detail}]
    codes = np.asarray(account.guard.limited)
    bodies = []
    for code in np.unique(codes[codes > 0]).tolist():
        at = np.flatnonzero(codes == code).tolist()
        cut = {symbols[i]: None if np.isnan(given[i]) else float(given[i]) for i in at}
        asks = {symbols[i]: float(asked[i]) for i in at}
        bodies.append({"code": CODES[code], "asked": asks, "target": cut})
    return bodies


def broken(account: Account) -> Halt | None:
    """Return the halt of a limit; None where none halts."""
    if not account.guard:
        return None
    nothing = np.full(np.shape(account.held), np.nan)
    found = verdict(account.guard, nothing, nothing)
    if isinstance(found, Deny) and found.halts:
        return Halt(found.code, **found.detail)
    return None


def after_resume(account: Account) -> Account:
    """Return the account with its losses counted from here, as after `resume`."""
    return account._replace(guard=lifted(account.guard)) if account.guard else account


def _existing(journal: str | Path) -> Path:
    path = Path(journal)
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such journal; check the path.")
    refuse_link(path)  # the session's files are next to the file itself
    return path
