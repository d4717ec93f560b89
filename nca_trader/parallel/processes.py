"""The processes of a run, one per host, and how they are joined.

JAX's multi-controller runtime joins them. Every process runs the same command and sees the devices
of all of them. A lost process cannot be replaced while the others run: they end within the
heartbeat, and what started them restarts all of them from the newest good checkpoint.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from nca_trader.errors import CheckFailed, ConfigError, NcaTraderError, argument


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
    # jax takes seconds to import; options are checked without it.
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
    return CheckFailed(f"{what} ({line}); start all processes again: the same command resumes.")
