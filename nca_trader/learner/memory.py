"""Programs that fit a device: what a compiled step needs is known before it runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import Mesh

from nca_trader.errors import ConfigError
from nca_trader.mesh import is_described

log = logging.getLogger(__name__)
Step = Callable[..., Any]


def memory_limit(memory_gb: float | None, mesh: Mesh) -> float | None:
    """Bytes of a device that one update may need; None is no bound.

    Args:
      memory_gb: what a user allows, in 1e9 bytes; None is what the device reports, if it does.
    """
    if memory_gb is not None:
        return memory_gb * 1e9
    if is_described(mesh):
        return None  # whoever describes them knows what they have
    reported = mesh.devices.flat[0].memory_stats()
    return None if reported is None else reported.get("bytes_limit")


def bytes_needed(compiled: Any) -> int:
    """Bytes a device needs to run a compiled program, its arguments included."""
    sizes = compiled.memory_analysis()
    held = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return held + sizes.temp_size_in_bytes + sizes.generated_code_size_in_bytes


def piece_counts(first: int, items: int) -> list[int]:
    """Numbers of pieces to try for `items`: `first`, then each at least twice the one before."""
    counts = [first]
    for count in range(first, items + 1):
        if count >= 2 * counts[-1] and items % count == 0:
            counts.append(count)
    return counts


def fitting(build: Callable[[int], Any], counts: Iterable[int], limit: float | None) -> Step:
    """A jitted step in as few micro-batches as fit into `limit` bytes of a device.

    Which, is found at the first call, by compiling. More micro-batches than the first of `counts`
    are logged: they cost time, and the result is the same.

    Args:
      build: `(micro_batches) -> jitted step`. counts: as in `piece_counts`.

    Raises:
      ConfigError: at the first call, if not even the last of `counts` fits.
    """
    remaining = list(counts)
    if limit is None:
        return build(remaining[0])
    chosen: list[Any] = []

    def step(*args: Any) -> Any:
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(args)):
            return build(remaining[0])(*args)  # someone else compiles: they ask what it needs
        while True:
            if not chosen:
                chosen.append(_smallest(build, remaining, limit, args))
            try:
                return chosen[0](*args)
            except jax.errors.JaxRuntimeError as error:
                gone = any(leaf.is_deleted() for leaf in jax.tree.leaves(args))
                if not out_of_memory(error) or gone or len(remaining) == 1:
                    raise
                _go_on(remaining, "allocation failed")
                chosen.clear()

    return step


def _smallest(build: Callable[[int], Any], remaining: list[int], limit: float, args: Any) -> Any:
    """The compiled step of the first of `remaining` that fits; those before it are taken out."""
    while True:
        try:
            compiled = build(remaining[0]).lower(*args).compile()
            needed = bytes_needed(compiled)
            if needed <= limit:
                return compiled
            why = f"an update needs {needed / 1e9:.3g} GB of {limit / 1e9:.3g} GB"
        except jax.errors.JaxRuntimeError as error:
            if not out_of_memory(error):
                raise
            why = f"the compiler says that an update does not fit into {limit / 1e9:.3g} GB"
        if len(remaining) == 1:
            raise ConfigError(
                f"learner.micro_batches = {remaining[0]}: {why}, and a micro-batch is one segment "
                "already; raise learner.memory_gb, or lower learner.num_segments, "
                "learner.segment_length or policy.channels."
            )
        _go_on(remaining, why)


def _go_on(remaining: list[int], why: str) -> None:
    log.warning(
        "learner.micro_batches = %d: %s; trying %d, with the same result", *remaining[:1], why,
        remaining[1],
    )  # fmt: skip
    del remaining[0]


def out_of_memory(error: Exception) -> bool:
    """Whether a compiler or an allocation says that memory does not suffice."""
    return "RESOURCE_EXHAUSTED" in str(error) or "HbmOom" in str(error)
