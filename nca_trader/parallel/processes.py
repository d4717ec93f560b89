"""The processes of a run, one per host, and how they are joined.

They meet at the coordinator's port, and JAX's multi-controller runtime then joins them. Every
process runs the same command and sees the devices of all of them. A lost process cannot be replaced
while the others run: they end within the heartbeat, and what started them restarts all of them from
the newest good checkpoint.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import re
import socket
import sys
import time
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

from nca_trader.config.ranges import refuse
from nca_trader.errors import CheckFailed, ConfigError, NcaTraderError, argument
from nca_trader.progress import Progress

LINE = re.compile(rb"nca_trader((?: \d+)*)\n")  # what processes send before JAX joins them
FAMILIES = socket.AF_INET, socket.AF_INET6
GONE = 5.0  # seconds without a call after which a process is missing again


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
    place = args.coordinator, args.processes, args.process
    if not args.distributed and place == ("", None, None):
        return None
    return Peers(*place, args.heartbeat, args.initialization_timeout)


def check(peers: Peers) -> None:
    """Validate the options of several processes.

    Raises:
      ConfigError: an option is missing or out of range.
    """
    refuse(_problems(peers))


def _problems(peers: Peers) -> Iterator[str]:
    count, number = peers.processes, peers.process
    place = {"coordinator": peers.coordinator or None, "processes": count, "process": number}
    missing = [argument(name) for name, value in place.items() if value is None]
    if missing and len(missing) < len(place):
        yield (
            f"{', '.join(missing)} is missing: give {', '.join(map(argument, place))} together, "
            f"or {argument('distributed')} alone where the cluster knows them."
        )
    host, _, port = peers.coordinator.rpartition(":")
    if peers.coordinator and not (host and port.isdigit()):
        given = argument("coordinator", peers.coordinator)
        yield f"{given}: give HOST:PORT of process 0, e.g. 10.0.0.1:8476."
    if count is not None and count < 1:
        yield f"{argument('processes', count)}: give at least 1, or leave it out for a run of one."
    elif count is not None and number is not None and not 0 <= number < count:
        given = f"{argument('process', number)} of {argument('processes', count)}"
        yield f"{given}: processes are numbered from 0 to {count - 1}."
    if peers.heartbeat < 1:
        yield f"{argument('heartbeat', peers.heartbeat)}: give at least 1 second."


@contextlib.contextmanager
def join_processes(peers: Peers) -> Iterator[None]:
    """Join this process to its run; call it before JAX initialises its devices.

    Only the first process writes to stdout; the others log errors alone.

    Raises:
      ConfigError: `peers` is not valid, or JAX does not know the cluster.
      CheckFailed: the others cannot be reached, or one was lost during the run.
    """
    # jax takes seconds to import; options are checked without it.
    import jax

    from nca_trader.parallel import hosts

    check(peers)
    # SIGTERM is handled here: all processes agree on the update after which they stop.
    with contextlib.suppress(AttributeError):  # not every version of jax has this
        jax.config.update("jax_enable_preemption_service", False)
    try:
        if None not in (place := find_place(peers)):
            meet(*place, peers.initialization_timeout)
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
            f"{argument('distributed')}: JAX does not know this cluster by its environment "
            f"({error}); give {argument('coordinator')}, {argument('processes')} and "
            f"{argument('process')}."
        ) from None
    except CheckFailed:
        raise
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


def find_place(peers: Peers) -> tuple[Any, Any, Any]:
    """Return the coordinator, the number of processes and of this one, as JAX finds them."""
    coordinator = peers.coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    given = coordinator, peers.processes, peers.process
    # JAX has no public name for it. Where a version has none at all, JAX alone waits.
    with contextlib.suppress(ImportError, AttributeError, TypeError):
        if None in given:
            from jax._src.clusters import ClusterEnv

            detect = ClusterEnv.auto_detect_unset_distributed_params
            return detect(*given, [], None, peers.initialization_timeout)[:3]
    return given


def meet(coordinator: str, processes: int, process: int, seconds: float) -> None:
    """Wait at the coordinator's address until every process is there, and say who is missing.

    JAX's own wait is silent, and ends the process by a signal.

    Args:
      coordinator: HOST:PORT of process 0.
      processes: their number.
      process: the number of this one.
      seconds: to wait.

    Raises:
      CheckFailed: some did not come in time.
    """
    turns = _call(coordinator, process) if process else _answer(coordinator, processes)
    began = time.monotonic()
    with contextlib.closing(turns), Progress(None, "join", ticks=False) as shown:
        for missing, why in turns:
            numbers = ", ".join(map(str, sorted(missing)))
            text = f"process{'es' * (len(missing) > 1)} {numbers} of {processes}"
            if missing and time.monotonic() - began > seconds:
                given = argument("coordinator", coordinator)
                raise CheckFailed(
                    f"{given}: waited {seconds:g} s for {text}{why}; start what is missing. "
                    f"`nca-trader doctor` with {given} says on a host whether it reaches process 0."
                )
            shown.note(f"waiting for {text} at {coordinator}{why}" if missing else "", news=True)


def _answer(coordinator: str, processes: int) -> Generator[tuple[set[int], str]]:
    """Answer in process 0 until every other process has read that none is missing."""
    port = int(os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", coordinator).rpartition(":")[2])
    dual = socket.has_dualstack_ipv6()
    untold, calls = {*range(1, processes)}, dict.fromkeys(range(processes), -math.inf)

    def missing() -> set[int]:
        return {number for number in untold if time.monotonic() - calls[number] > GONE}

    try:
        listener = socket.create_server(("", port), family=FAMILIES[dual], dualstack_ipv6=dual)
    except OSError as error:
        raise CheckFailed(
            f"{argument('coordinator', coordinator)}: its port cannot be listened on here "
            f"({os.strerror(error.errno or 0)}); end what uses it, or give all processes another."
        ) from None
    with listener:
        listener.settimeout(1.0)
        while untold:
            # Others that connect, such as `doctor`, get no answer.
            with contextlib.suppress(OSError, ValueError), listener.accept()[0] as peer:
                peer.settimeout(1.0)
                (number,) = map(int, LINE.findall(peer.recv(64)))
                calls[number] = time.monotonic()
                others = b"".join(b" %d" % each for each in missing())
                peer.sendall(b"nca_trader%b\n" % others)
                untold -= set() if others else {number}
            yield missing(), ""


def _call(coordinator: str, process: int) -> Generator[tuple[set[int], str]]:
    """Connect to process 0 each second until all processes are there."""
    host, _, port = coordinator.rpartition(":")
    missing = {0}
    while missing:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), GONE) as peer:
                peer.sendall(b"nca_trader %d\n" % process)
                # A process 0 of an earlier start speaks JAX's own protocol.
                (numbers,) = LINE.findall(peer.makefile("rb").readline())
            missing, why = {*map(int, numbers.split())}, ""
        except (OSError, ValueError) as error:
            missing |= {0}
            why = f" ({getattr(error, 'strerror', None) or 'it does not answer'})"
        yield missing, why
        time.sleep(1.0 if missing else 0.0)


def is_loss(error: BaseException) -> bool:
    """Whether JAX raised `error` because another process was lost or a device failed."""
    import jax

    # On the CPU, a program small enough to run in the calling thread raises the bare type.
    of_gloo = isinstance(error, ValueError) and "Gloo" in str(error)
    return isinstance(error, jax.errors.JaxRuntimeError) or of_gloo


def _lost(error: BaseException, what: str) -> CheckFailed:
    line = str(error).partition("\n")[0][:200]
    return CheckFailed(f"{what} ({line}); start all processes again: the same command resumes.")
