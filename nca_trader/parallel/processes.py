"""The processes of a run, one per host: how they are joined, and how they are restarted.

JAX's multi-controller runtime joins them. Every process runs the same command and sees the devices
of all of them. A lost process cannot be replaced while the others run: they end within the
heartbeat, and `nca-trader supervise` restarts all of them from the newest good checkpoint.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

from nca_trader.errors import CheckFailed, ConfigError, NcaTraderError, argument

# Exit codes after which a command would end the same way again: done, wrong input, halted,
# damaged, interrupted.
FINAL = (0, 2, 3, 4, 130)
LONGEST = 60.0  # seconds between two starts
HEALTHY = 600.0  # seconds after which a start counts as successful
GRACE = 5.0  # seconds that processes have to end by themselves once one of them has died
POLL = 0.05
# Asks Linux for a SIGKILL when the parent dies, then becomes the command. If the parent died before
# that, no signal would come, but then the process has another parent already.
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


class Peers(NamedTuple):
    """How a process finds the others of its run.

    Attributes:
      coordinator: HOST:PORT of process 0; "" asks the cluster.
      processes: number of processes; None asks the cluster.
      process: number of this process; None asks the cluster.
      heartbeat: seconds without a sign of life after which a process counts as lost.
      initialization_timeout: seconds to wait for the others at the start.
    """

    coordinator: str = ""
    processes: int | None = None
    process: int | None = None
    heartbeat: int = 100
    initialization_timeout: int = 300


def options(args: Any) -> Peers | None:
    """Return the peers that a command's options name; None is a run of one process."""
    numbers = args.processes is not None or args.process is not None
    if not (args.distributed or args.coordinator or numbers):
        return None
    return Peers(
        args.coordinator, args.processes, args.process, args.heartbeat, args.initialization_timeout
    )


def check(peers: Peers) -> None:
    """Validate the options of several processes.

    Raises:
      ConfigError: an option is missing or out of range.
    """
    if peers.processes is not None and peers.processes < 1:
        raise ConfigError(
            f"{argument('processes', peers.processes)}: give at least 1, or leave it out for "
            "a run of one."
        )
    given = {
        argument(name): getattr(peers, name) for name in ("coordinator", "processes", "process")
    }
    missing = [name for name, value in given.items() if value in (None, "")]
    if missing and len(missing) < len(given):
        raise ConfigError(
            f"{', '.join(missing)} is missing: give {argument('coordinator')}, "
            f"{argument('processes')} and {argument('process')} together, or "
            f"{argument('distributed')} alone where the "
            "cluster knows them."
        )
    host, colon, port = peers.coordinator.rpartition(":")
    if peers.coordinator and not (host and colon and port.isdigit()):
        raise ConfigError(
            f"{argument('coordinator', peers.coordinator)}: give HOST:PORT of process 0, e.g. "
            "10.0.0.1:8476."
        )
    if peers.processes is not None and peers.process is not None:
        if not 0 <= peers.process < peers.processes:
            raise ConfigError(
                f"{argument('process', peers.process)} of "
                f"{argument('processes', peers.processes)}: processes are "
                f"numbered from 0 to {peers.processes - 1}."
            )
    if peers.heartbeat < 1:
        raise ConfigError(f"{argument('heartbeat', peers.heartbeat)}: give at least 1 second.")


@contextlib.contextmanager
def joined(peers: Peers) -> Iterator[None]:
    """Join this process to its run; call it before JAX initialises its devices.

    Only the first process writes to stdout; the others log errors alone.

    Raises:
      ConfigError: `peers` is not valid, or JAX does not know the cluster.
      CheckFailed: the others cannot be reached, or one was lost during the run.
    """
    import jax

    from nca_trader.parallel import hosts

    check(peers)
    # SIGTERM is handled here: all processes agree on the update after which they stop.
    with contextlib.suppress(AttributeError):  # not every version of jax has this
        jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            peers.coordinator or None,
            peers.processes,
            peers.process,
            initialization_timeout=peers.initialization_timeout,
            heartbeat_timeout_seconds=peers.heartbeat,
            shutdown_timeout_seconds=peers.heartbeat,
            cluster_detection_method="deactivate" if peers.coordinator else None,
        )
    except ValueError as error:
        raise ConfigError(
            f"{argument('distributed')}: JAX does not know this cluster by its "
            f"environment ({error}); "
            f"give {argument('coordinator')}, {argument('processes')} and {argument('process')}."
        ) from None
    except Exception as error:
        raise _lost(error, "the other processes cannot be reached") from error
    if not hosts.first():
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what compiled code prints as well
        for name in ("nca_trader", "absl"):
            logging.getLogger(name).setLevel(logging.ERROR)
    hosts.barrier()  # connects the devices while every process is at the same point
    try:
        yield
    except BaseException as error:
        lost = is_loss(error)
        raised = _lost(error, "another process was lost, or a device failed") if lost else error
        code = raised.exit_code if isinstance(raised, NcaTraderError) else 1
        code = 130 if isinstance(raised, KeyboardInterrupt) else code

        @atexit.register
        def leave() -> None:
            # JAX's own shutdown waits for the others, which wait for this process.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

        if lost:
            raise raised from error
        raise


def is_loss(error: BaseException) -> bool:
    """Whether JAX raised `error` because another process was lost or a device failed."""
    import jax

    # On the CPU, a program small enough to run in the calling thread raises the bare type.
    of_gloo = isinstance(error, ValueError) and "Gloo" in str(error)
    return isinstance(error, jax.errors.JaxRuntimeError) or of_gloo


def _lost(error: BaseException, what: str) -> CheckFailed:
    line = str(error).partition("\n")[0][:200]
    return CheckFailed(
        f"{what} ({line}); start all processes again, or let `nca-trader supervise` do it."
    )


def bound(command: Sequence[str], parent: int | None = None) -> list[str]:
    """Return the words of a command that Linux kills when `parent` dies.

    On other systems the command is returned as it is. What the command starts itself is not
    killed with it.

    Args:
      command: its words.
      parent: a process id; None is this process.
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
        """Start nothing yet.

        Args:
          command: its words; `nca-trader` is this installation's.
          restarts: how many in a row before it gives up; a start that lasts 10 minutes ends the
            row.
          backoff: seconds before the first restart, doubled before each next, up to 60.
          processes: number of processes on this machine, which get a coordinator; None is the
            command as it is.
          say: called with each line for people.
        """
        words = list(command)
        if words[0] == "nca-trader":
            words[:1] = [sys.executable, "-P", "-m", "nca_trader"]
        self._command, self._processes, self._say = words, processes, say
        self._restarts, self._backoff = restarts, backoff
        self._running: list[subprocess.Popen[bytes]] = []
        self._asked = False

    def run(self) -> int:
        """Run the command until it ends in a way that is final.

        SIGINT, SIGTERM and SIGHUP are passed on; the processes have their own sessions.

        Returns:
          Its exit code.

        Raises:
          CheckFailed: it died once more than `restarts`, or a stop was asked between two starts.
        """

        def pass_on(number: int, frame: FrameType | None) -> None:
            del frame
            self._asked = True
            self._send(number)

        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # ignored under nohup
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, pass_on) for number in numbers}
        try:
            return self._until_final()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _until_final(self) -> int:
        row = 0
        while True:
            began = time.monotonic()
            code = self._start_and_wait()
            if code in FINAL or self._asked:
                return code if code >= 0 else 128 - code
            row = 0 if time.monotonic() - began >= HEALTHY else row
            ended = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            if row == self._restarts:
                raise CheckFailed(
                    f"gave up after {row} restarts: the command ended by {ended}; see "
                    "its messages, fix the cause, and run the same command again."
                )
            wait = min(self._backoff * 2**row, LONGEST)
            row += 1
            self._say(
                f"supervise: ended by {ended}; restart {row} of {self._restarts} in {wait:g} s"
            )
            self._wait(wait)

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self._asked:
                raise CheckFailed("stopped between two starts; the same command resumes.")
            time.sleep(POLL)

    def _start_and_wait(self) -> int:
        """Start all processes and wait for all; return the exit code that says why."""
        commands = [self._command]
        if self._processes is not None:
            shared = [f"--coordinator=127.0.0.1:{free_port()}", f"--processes={self._processes}"]
            commands = [
                [*self._command, *shared, f"--process={number}"]
                for number in range(self._processes)
            ]
        self._running = [
            subprocess.Popen(bound(words), start_new_session=True) for words in commands
        ]
        pids = ", ".join(str(process.pid) for process in self._running)
        self._say(f"supervise: started as process {pids}")
        if self._asked:  # while they were being started
            self._send(signal.SIGTERM)
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
                self._end_groups()
        finally:
            _kill(self._running)
        failed = [code for code in own if code]
        return next((code for code in failed if code in FINAL), min(failed, default=0))

    def _end_groups(self) -> None:
        """Wait until what the ended processes left running, such as a shell's child, have ended."""
        if not self._asked:
            self._send(signal.SIGTERM)
        # After a stop was asked, they may still be saving.
        end = time.monotonic() + (LONGEST if self._asked else GRACE)
        groups = [process.pid for process in self._running]
        while groups and time.monotonic() < end:
            for group in groups:
                # As process 1 of a container a supervisor inherits the orphans and must wait for
                # them too.
                with contextlib.suppress(ChildProcessError):
                    while os.waitpid(-group, os.WNOHANG)[0]:
                        pass
            if groups := [group for group in groups if _signal(group, 0)]:
                time.sleep(POLL)

    def _send(self, number: int) -> None:
        # Training saves at SIGTERM. A terminal that closes is not a reason to lose its work.
        number = signal.SIGTERM if number == signal.SIGHUP else number
        for process in self._running:
            _signal(process.pid, number)


def _signal(group: int, number: int) -> bool:
    """Send a signal to a process group; return whether the group exists."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # macOS refuses a group of zombies
        return False
    return True


def _kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        _signal(process.pid, signal.SIGKILL)
        process.wait()


def free_port() -> int:
    """Return a port of this machine that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
