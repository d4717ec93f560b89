"""Stopping on request: the first Ctrl-C or SIGTERM asks, the second insists."""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def stop_on_signal(what: str = "update") -> Iterator[Callable[[], bool]]:
    """Gives a function that is True once SIGINT or SIGTERM has come.

    Args:
      what: "update" or "bar", after which the caller stops; for the message.

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
        yield lambda: asked
    finally:
        for number, handler in before.items():
            # None is a handler that is not Python's; it cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
