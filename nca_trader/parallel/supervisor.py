"""Starting a command again when it dies: what is done of it is in its newest good checkpoint."""

from __future__ import annotations

import contextlib
import os
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
# Becomes the command after asking Linux for a SIGKILL when its parent dies. A parent that died
# before that would not be noticed: then the process has another parent already.
BOUND = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):
    os.kill(os.getpid(), signal.SIGKILL)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.stderr.write(f"{sys.argv[2]}: {error.strerror}\\n")
    sys.exit(2)
"""


def bound(command: Sequence[str], parent: int | None = None) -> list[str]:
    """The words of a command that Linux kills when `parent` dies, None being this process.

    Elsewhere the command as it is. What the command starts itself is not killed with it.
    """
    if sys.platform != "linux":
        return [*command]
    parent = os.getpid() if parent is None else parent
    return [sys.executable, "-I", "-S", "-c", BOUND, str(parent), *command]


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
            subprocess.Popen(bound(words), start_new_session=True) for words in self._commands()
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
                self._end_rest()
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

    def _end_rest(self) -> None:
        """Gives what the ended processes left running, such as a shell's, the time to end."""
        if not self._asked:
            self._hand_on(signal.SIGTERM)
        end = time.monotonic() + (LONGEST if self._asked else GRACE)  # asked, they may be saving
        while any(_lives(process.pid) for process in self._running) and time.monotonic() < end:
            time.sleep(POLL)

    def _hand_on(self, number: int) -> None:
        # Training saves at SIGTERM; a terminal that closes is no reason to lose its work.
        number = signal.SIGTERM if number == signal.SIGHUP else number
        for process in self._running:
            _signal(process.pid, number)

    @contextlib.contextmanager
    def _forwarding(self) -> Iterator[None]:
        """Hands SIGINT, SIGTERM and SIGHUP on; the processes have sessions of their own."""

        def hand_on(number: int, frame: FrameType | None) -> None:
            del frame
            self._asked = True
            self._hand_on(number)

        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # else under nohup
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, hand_on) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _signal(group: int, number: int) -> bool:
    """Sends a signal to a process group; whether there is one."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # macOS refuses a group of zombies
        return False
    return True


def _lives(group: int) -> bool:
    """Whether any process of a group runs whose first process has been waited for."""
    # As process 1 of a container a supervisor inherits the orphans, and must wait for them too.
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass
    return _signal(group, 0)


def _kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        _signal(process.pid, signal.SIGKILL)
        process.wait()


def _told(code: int) -> str:
    return f"{signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def free_port() -> int:
    """A port of this machine that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
