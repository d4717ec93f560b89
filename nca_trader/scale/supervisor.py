"""Starting a command again when it dies: what is done of it is in its newest good checkpoint."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from nca_trader.errors import CheckFailed

# A command that ends so would end so again: done, wrong input, halted, damaged, interrupted.
FINAL = (0, 2, 3, 4, 130)
LONGEST = 60.0  # seconds between two starts
HEALTHY = 600.0  # seconds after which a start counts as one that went well
GRACE = 5.0  # seconds that processes have to end by themselves once one of them has died
POLL = 0.05


class Supervisor:
    """Runs a command, as one process or as several that belong together, until it is done."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        restarts: int = 10,
        backoff: float = 1.0,
        processes: int | None = None,
        say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
    ):
        """Starts nothing yet.

        Args:
          command: its words; `nca-trader` is this installation's.
          restarts: in a row, before it gives up; a start that lasts 10 minutes ends the row.
          backoff: seconds before the first of them, twice as many before each next, up to 60.
          processes: so many on this machine, which meet at a coordinator of their own; None is
            the command as it is.
          say: takes a line for people.
        """
        words = list(command)
        if words[0] == "nca-trader":
            words[:1] = [sys.executable, "-m", "nca_trader"]
        self._command, self._processes, self._say = words, processes, say
        self._restarts, self._backoff = restarts, backoff
        self._running: list[subprocess.Popen[bytes]] = []
        self._asked = False

    def run(self) -> int:
        """Returns the exit code of the command, once it ends in a way that is final.

        Raises:
          CheckFailed: it died once more than it may, or a stop was asked between two starts.
        """
        row = 0
        with self._forwarding():
            while True:
                began = time.monotonic()
                code = self._once()
                if code in FINAL or self._asked:
                    return code if code >= 0 else 128 - code
                row = 0 if time.monotonic() - began >= HEALTHY else row
                if row == self._restarts:
                    raise CheckFailed(
                        f"gave up after {row} restarts: the command ended by {_told(code)}; see "
                        "what it said, mend that, and give the same command again."
                    )
                wait = min(self._backoff * 2**row, LONGEST)
                row += 1
                self._say(
                    f"supervise: ended by {_told(code)}; restart {row} of {self._restarts} in "
                    f"{wait:g} s"
                )
                self._wait(wait)

    def _once(self) -> int:
        """Starts all processes and waits for all; the exit code that says why they ended."""
        self._running = [
            subprocess.Popen(words, start_new_session=True) for words in self._commands()
        ]
        pids = ", ".join(str(process.pid) for process in self._running)
        self._say(f"supervise: started as process {pids}")
        if self._asked:  # while they were being started
            self._hand_on(signal.SIGTERM)
        own: list[int] = []  # codes of those that ended by themselves
        deadline = float("inf")
        try:
            while alive := [process for process in self._running if process.poll() is None]:
                own = [p.returncode for p in self._running if p.returncode is not None]
                if any(own) and not self._asked:
                    deadline = min(deadline, time.monotonic() + GRACE)
                if time.monotonic() > deadline:
                    # They wait for the dead one inside compiled code, where no signal is heard.
                    _kill(alive)
                    break
                time.sleep(POLL)
            else:
                own = [process.returncode for process in self._running]
        finally:
            _kill(self._running)
        failed = [code for code in own if code]
        return next((code for code in failed if code in FINAL), min(failed, default=0))

    def _commands(self) -> Iterator[list[str]]:
        if self._processes is None:
            yield self._command
            return
        coordinator = f"127.0.0.1:{free_port()}"
        for number in range(self._processes):
            yield [
                *self._command,
                f"--coordinator={coordinator}",
                f"--processes={self._processes}",
                f"--process={number}",
            ]

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self._asked:
                raise CheckFailed("stopped between two starts; the same command goes on.")
            time.sleep(POLL)

    def _hand_on(self, number: int) -> None:
        for process in self._running:
            if process.poll() is None:
                process.send_signal(number)

    @contextlib.contextmanager
    def _forwarding(self) -> Iterator[None]:
        """Hands SIGINT and SIGTERM on; the processes have a session of their own."""

        def hand_on(number: int, frame: FrameType | None) -> None:
            del frame
            self._asked = True
            self._hand_on(number)

        both = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, hand_on) for number in both}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()


def _told(code: int) -> str:
    return f"{signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def free_port() -> int:
    """A port of this machine that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
