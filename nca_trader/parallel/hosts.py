"""The processes of one run, of which each host has one: which is ours, and what they agree on.

In a run of one process every function here answers at once. In a run of several, each must be
called by all of them in the same order: it is a meeting, at which the ones that came wait.
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
    """How many processes take part in the run."""
    return jax.process_count()


def own() -> int:
    """The number of this process, from 0."""
    return jax.process_index()


def first() -> bool:
    """Whether this is process 0, the one that writes."""
    return own() == 0


def of_first(tree: Any) -> Any:
    """The numbers of process 0, of the same shapes everywhere, as numpy arrays."""
    return jax.tree.map(np.asarray, multihost_utils.broadcast_one_to_all(tree))


def of_each(numbers: Any) -> np.ndarray:
    """`[P, ...]`: the `numbers` of each of P processes, an array of one shape or a number."""
    own = np.asarray(numbers)
    return multihost_utils.process_allgather(own) if count() > 1 else own[None]


def meet() -> None:
    """Returns once every process has called it."""
    of_each(0)


def on_first(do: Callable[[], T]) -> T | None:
    """Lets process 0 alone `do` something, and returns once it is done; None on the others.

    Raises:
      RunError, StateError, CheckFailed: on the others, where process 0 raised something of its
        own: what ends them with its exit code, by which a supervisor on each host knows whether
        to start again.
    """
    result, error, code = None, None, 0
    if first():
        try:
            result = do()
        except Exception as mistake:
            error, code = mistake, getattr(mistake, "exit_code", 1)
    code = int(of_first(np.int32(code)))
    if error is not None:
        raise error
    if code:
        kind = {kind.exit_code: kind for kind in (RunError, StateError)}.get(code, CheckFailed)
        raise kind("process 0 gave up; see what it said, on the host that it runs on.")
    return result


def copied(leaf: Array) -> np.ndarray:
    """A copy of a whole array on this host, of what lies on others' devices as well."""
    if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        leaf = multihost_utils.process_allgather(leaf, tiled=True)
    return np.array(leaf)
