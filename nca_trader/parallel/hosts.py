"""Collectives of the processes of a run, one per host.

In a run of one process every function returns immediately. In a run of several, `broadcast`,
`all_gather`, `barrier`, `on_first` and `copy_to_host` are collectives: every process must call
them, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax import Array
from jax.experimental import multihost_utils

from nca_trader.errors import CheckFailed, RunError, StateError

T = TypeVar("T")


def count() -> int:
    """Return the number of processes of the run."""
    return jax.process_count()


def own() -> int:
    """Return the number of this process, from 0."""
    return jax.process_index()


def first() -> bool:
    """Whether this is process 0, the one that writes."""
    return own() == 0


def broadcast(tree: Any) -> Any:
    """Broadcast the arrays of process 0, of the same shapes everywhere, as numpy arrays."""
    return jax.tree.map(np.asarray, multihost_utils.broadcast_one_to_all(tree))


def all_gather(numbers: Any) -> np.ndarray:
    """Gather the numbers of all P processes, `[P, ...]`, of one shape everywhere."""
    own = np.asarray(numbers)
    # A run of one process needs no collective.
    return multihost_utils.process_allgather(own) if count() > 1 else own[None]


def barrier() -> None:
    """Wait until every process has called it (a barrier)."""
    all_gather(0)


def on_first(do: Callable[[], T]) -> T | None:
    """Call `do` in process 0 only, and wait for it.

    Returns:
      Its result in process 0, None in the others.

    Raises:
      RunError, StateError, CheckFailed: in the others, where process 0 raised an error of its own.
        They end with its exit code, so that what restarts them decides alike on all hosts.
    """
    result, error, code = None, None, 0
    if first():
        try:
            result = do()
        except Exception as mistake:
            error, code = mistake, getattr(mistake, "exit_code", 1)
    # Before process 0 raises its error, because the others wait in this collective.
    code = int(broadcast(np.int32(code)))
    if error is not None:
        raise error
    if code:
        # Only CheckFailed is worth a restart, see docs/guides/service.md.
        kind = {kind.exit_code: kind for kind in (RunError, StateError)}.get(code, CheckFailed)
        raise kind("process 0 failed; see its message on the host that it runs on.")
    return result


def copy_to_host(leaf: Array) -> np.ndarray:
    """Copy a whole array to this host, including parts on devices of others."""
    # numpy cannot read parts on devices of other processes.
    if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        leaf = multihost_utils.process_allgather(leaf, tiled=True)
    return np.array(leaf)
