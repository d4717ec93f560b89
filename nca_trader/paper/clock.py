"""The clocks of a live session, and its only waits; a replay has its feed's clock and no wait."""

from __future__ import annotations

import time

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
