"""The clocks of a live session, and its only waits; a replay has its feed's clock and no wait."""

from __future__ import annotations

import time
from typing import NamedTuple

NANOSECONDS = 1_000_000_000


class Clock:
    """This machine's clocks. A test passes another, so that its waits take no time."""

    def now(self) -> int:
        """Return nanoseconds since 1970 UTC."""
        return time.time_ns()

    def monotonic(self) -> float:
        """Return seconds since some moment; it never goes back."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)


class Patience(NamedTuple):
    """How long a router waits, in seconds unless said otherwise.

    age: after a bar's close, in which its orders may be sent. grace: in which an order that the
    venue does not have may still appear. looks: of unanswered look-ups. first, last: of the waits
    between attempts. recounts: how often books that differ are compared.
    """

    age: float = 60.0
    grace: float = 2.0
    looks: float = 20.0
    first: float = 0.25
    last: float = 30.0
    recounts: int = 4


PATIENCE = Patience()
