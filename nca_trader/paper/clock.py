"""The clocks of a live session, and its only waits; a replay has its feed's clock and no wait.

A session waits for a time or for an answer. During both it checks every tenth of a second whether a
halt or a stop was asked for.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

NANOSECONDS = 1_000_000_000
TICK = 0.1  # seconds after which a wait looks for a halt or a stop again
EXIT = 9.0  # seconds that the end of a session awaits all requests, so that it takes ten at most


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


class Caller:
    """Runs calls in a thread of its own, one at a time, so that waiting for one can end early.

    Args:
      name: of the thread.

    Attributes:
      busy: how many calls have not ended.

    >>> caller = Caller("sums")
    >>> caller.start(lambda: 1 + 1)
    >>> caller.done(5.0), caller.result()
    (True, 2)
    """

    def __init__(self, name: str):
        self._calls: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._last: tuple[Any, BaseException | None] = (None, None)
        self.busy = 0
        # A process that ends does not wait for it.
        threading.Thread(target=self._run, daemon=True, name=name).start()

    def start(self, call: Callable[[], Any]) -> None:
        """Begin a call, after those before it."""
        self.busy += 1
        self._calls.put(call)

    def done(self, seconds: float) -> bool:
        """Wait for every call, at most so long in all; return whether they have ended."""
        until = time.monotonic() + seconds
        with contextlib.suppress(queue.Empty):
            while self.busy:
                self._last = self._ended.get(timeout=max(until - time.monotonic(), 0.0))
                self.busy -= 1
        return not self.busy

    def result(self) -> Any:
        """Return what the last call returned.

        Raises:
          BaseException: what it raised.
        """
        found, error = self._last
        if error is not None:
            raise error
        return found

    def close(self) -> None:
        """End the thread after the call under way."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                self._ended.put((call(), None))
            except BaseException as error:  # for the thread that waits for the answer
                self._ended.put((None, error))


class Waits(Clock):
    """A session's clock, whose waits end as soon as the session does.

    Args:
      clock: of this machine.
      heard: called every `TICK` of a wait; raises where the session halts or stops.
    """

    def __init__(self, clock: Clock, heard: Callable[[], None]):
        self._clock, self._heard = clock, heard
        self._caller: Caller | None = None  # from the first call on

    def now(self) -> int:
        """Return nanoseconds since 1970 UTC."""
        return self._clock.now()

    def monotonic(self) -> float:
        """Return seconds since some moment; it never goes back."""
        return self._clock.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait, unless the session ends."""
        until = self.monotonic() + seconds
        while (left := until - self.monotonic()) > 0.0:
            self._clock.sleep(min(left, TICK))
            self._heard()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return what a call returns that may wait for the network, unless the session ends.

        The call itself goes on then, and `close` awaits it.
        """
        self._heard()
        self._caller = self._caller or Caller("venue")
        self._caller.start(functools.partial(function, *args))
        while not self._caller.done(TICK):
            self._heard()
        return self._caller.result()

    def last(self, function: Callable[[], Any]) -> None:
        """Begin the last call of a session that has ended, after the one under way.

        `close` awaits both. While one does not end there is no other.
        """
        self._caller = self._caller or Caller("venue")
        self._caller.start(function)

    def close(self) -> None:
        """Await the calls that have not ended, if there are any."""
        if self._caller is not None:
            self._caller.done(EXIT)
            self._caller.close()


class Patience(NamedTuple):
    """How long a router waits, in seconds unless said otherwise.

    age: after a bar came, in which its orders may be sent. grace: in which an order that the
    venue does not have may still appear. looks: of unanswered look-ups. first, last: of the waits
    between attempts. recounts: how often books that differ are compared.
    """

    age: float = 60.0
    grace: float = 2.0
    looks: float = 20.0
    first: float = 0.25
    last: float = 30.0
    recounts: int = 4

    def looks_for(self, clock: Clock, what: str) -> Iterator[float]:
        """Yield the seconds waited so far, after longer and longer waits, without an end."""
        begun, wait = clock.monotonic(), self.first
        while True:
            yield clock.monotonic() - begun
            clock.sleep(jitter(wait, what))
            wait = min(2.0 * wait, self.last)


PATIENCE = Patience()


def jitter(wait: float, what: str) -> float:
    """Return half to all of `wait`: sessions that failed together must not return together."""
    text = f"{what}{wait}"
    return wait * (0.5 + hashlib.sha256(text.encode()).digest()[0] / 510)
