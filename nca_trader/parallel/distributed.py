"""Joining the processes of a run, one for each host: JAX's multi-controller runtime.

Every process runs the same command and sees the devices of all of them. A process that is lost
cannot be replaced while the others live: they end within the heartbeat, and `nca-trader supervise`
starts all of them again from the newest good checkpoint.
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
    """How a process finds the others.

    coordinator: HOST:PORT of process 0, "" is what the cluster says. processes: how many there
    are, process: which of them this is; None is what the cluster says. heartbeat: seconds without
    a sign of life after which a process counts as lost. patience: seconds to wait for the others
    at the start.
    """

    coordinator: str = ""
    processes: int | None = None
    process: int | None = None
    heartbeat: int = 100
    patience: int = 300


def check(peers: Peers) -> None:
    """Refuses what cannot be meant.

    Raises:
      ConfigError: see there.
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
    """Joins the run of which this process is a part; must come before JAX looks for its devices.

    Processes but the first say nothing on stdout and log errors alone.

    Raises:
      ConfigError: `peers` cannot be meant, or the cluster is none that JAX knows.
      CheckFailed: the others cannot be reached, or one was lost while this one computed.
    """
    import jax

    from nca_trader.parallel import hosts

    check(peers)
    # The signal is ours: all processes agree on the update after which they stop.
    with contextlib.suppress(AttributeError):  # not every version of jax has this
        jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            peers.coordinator or None,
            peers.processes,
            peers.process,
            initialization_timeout=peers.patience,
            heartbeat_timeout_seconds=peers.heartbeat,
            shutdown_timeout_seconds=peers.heartbeat,
            cluster_detection_method="deactivate" if peers.coordinator else None,
        )
    except ValueError as error:
        raise ConfigError(
            f"{argument('distributed')}: this cluster is none that JAX knows by its "
            f"environment ({error}); "
            f"give {argument('coordinator')}, {argument('processes')} and {argument('process')}."
        ) from None
    except Exception as error:
        raise _lost(error, "the other processes cannot be reached") from error
    if not hosts.first():
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what compiled code prints as well
        for name in ("nca_trader", "absl"):
            logging.getLogger(name).setLevel(logging.ERROR)
    hosts.meet()  # connects the devices, while every process is near
    try:
        yield
    except BaseException as error:
        lost = _is_loss(error)
        told = _lost(error, "another process was lost, or a device failed") if lost else error
        code = told.exit_code if isinstance(told, NcaTraderError) else 1
        atexit.register(_leave, 130 if isinstance(told, KeyboardInterrupt) else code)
        if lost:
            raise told from error
        raise


def _is_loss(error: BaseException) -> bool:
    """Whether it is JAX's error of a process that others waited for, or of a device."""
    import jax

    # A program that is small enough to be run where it is called raises, on the CPU, the bare type.
    of_gloo = isinstance(error, ValueError) and "Gloo" in str(error)
    return isinstance(error, jax.errors.JaxRuntimeError) or of_gloo


def _lost(error: BaseException, what: str) -> CheckFailed:
    line = str(error).partition("\n")[0][:200]
    return CheckFailed(
        f"{what} ({line}); start all processes again, or let `nca-trader supervise` do it."
    )


def _leave(code: int) -> None:
    """Ends the process now: JAX's own end waits for the others, who wait for this one."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def options(args: Any) -> Peers | None:
    """What a command's options say of other processes; None is a run of this process alone."""
    numbers = args.processes is not None or args.process is not None
    if not (args.distributed or args.coordinator or numbers):
        return None
    return Peers(args.coordinator, args.processes, args.process, args.heartbeat, args.patience)
