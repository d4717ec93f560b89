"""Moves shards to the device, read ahead by threads while the device computes."""

from __future__ import annotations

import collections
import contextlib
import itertools
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from nca_trader.data.shards import Shard, Shards
from nca_trader.errors import ConfigError
from nca_trader.types import Bars

# Measured on two cores (docs/lab-notes/streaming.md): a second reader takes from the computation.
READERS = 1
PREFETCH = 2


class Piece(NamedTuple):
    """One shard of a stream.

    Attributes:
      shard: where it is from.
      bars: on the host.
      arrays: what `prepare` made of them, on the device.
    """

    shard: Shard
    bars: Bars
    arrays: Any


def stream(
    shards: Shards,
    prepare: Callable[[Bars], Any],
    *,
    readers: int = READERS,
    prefetch: int = PREFETCH,
    device: Any = None,
    start: int = 0,
    repeat: bool = False,
) -> Generator[Piece, None, None]:
    """Yields shards in their order, each on the device.

    `readers` threads read, check and prepare shards; one more thread moves the next piece to the
    device while the consumer computes with this one. On the host at most `prefetch` shards are
    ahead. On the device there are at most three pieces: the one that the consumer holds, the next,
    and the one being moved.

    The pieces and their order do not depend on the options. A reader's exception is raised in its
    shard's place and ends the stream. The threads end when the stream ends, is closed or is
    forgotten, after the shards that are being read.

    Args:
      shards: what to stream; `shards.part(index, count)` for one host's own.
      prepare: makes a pytree of numpy arrays from bars, in a reader's thread. The arrays must be
        fresh, since the device may share their memory; they are made read-only, so that a
        buffer written to again raises ValueError.
      readers: threads that read; more than `prefetch` are never busy.
      prefetch: shards read ahead; 0 reads each shard when it is asked for, without threads.
      device: a device or a sharding; None is JAX's default device.
      start: index of the first shard.
      repeat: begin again after the last, without end.

    Raises:
      ConfigError: no reader, or a negative prefetch. From the stream: BarError, StateError (see
        `Shards.read`), and what `prepare` raises.
    """
    if readers < 1 or prefetch < 0:
        raise ConfigError(
            f"readers={readers}, prefetch={prefetch}: give at least 1 reader, and 0 or more ahead."
        )
    # These settings of JAX belong to a thread, so the consumer's are copied to ours.
    settings: Any = jax.config
    x64, default = settings.jax_enable_x64, settings.jax_default_device

    def load(shard: Shard) -> Piece:
        with jax.enable_x64(x64), jax.default_device(default):
            with jax.profiler.TraceAnnotation("stream_read"):
                bars = shards.read(shard)
            with jax.profiler.TraceAnnotation("stream_prepare"):
                return Piece(shard, bars, jax.tree.map(_ours, prepare(bars)))

    def place(piece: Piece) -> Piece:
        with jax.enable_x64(x64), jax.default_device(default):
            with jax.profiler.TraceAnnotation("stream_place"):
                return piece._replace(arrays=jax.device_put(piece.arrays, device))

    order = itertools.islice(itertools.cycle(shards) if repeat else shards, start, None)
    if not prefetch:
        return (place(load(shard)) for shard in order)
    return _ahead(order, load, place, min(readers, prefetch), prefetch)


def _ahead(
    todo: Iterator[Shard],
    load: Callable[[Shard], Piece],
    place: Callable[[Piece], Piece],
    readers: int,
    prefetch: int,
) -> Generator[Piece, None, None]:
    """Yields pieces in order; at most `prefetch` are loaded or loading, and one is being placed."""
    loading: collections.deque[Future[Piece]] = collections.deque()
    with contextlib.ExitStack() as stack:
        # Closed in reverse: first nothing more is read, then nothing more is placed.
        placer = stack.enter_context(_pool(1, "stream-place"))
        reader = stack.enter_context(_pool(readers, "stream-read"))

        def load_next(count: int) -> None:
            loading.extend(reader.submit(load, shard) for shard in itertools.islice(todo, count))

        def place_next() -> Future[Piece] | None:
            if not loading:
                return None
            loaded = loading.popleft()
            return placer.submit(lambda: place(loaded.result()))

        load_next(prefetch)
        current = place_next()
        while current is not None:
            piece = current.result()
            load_next(1)
            current = place_next()
            # No name here holds the piece while the consumer has it.
            box = [piece]
            del piece
            yield box.pop()


@contextlib.contextmanager
def _pool(threads: int, name: str) -> Generator[ThreadPoolExecutor, None, None]:
    """Opens threads that end with the block; tasks not begun by then are cancelled."""
    pool = ThreadPoolExecutor(threads, name)
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _ours(leaf: Any) -> Any:
    """Makes an array read-only, as a device may go on reading the host's memory."""
    for part in (leaf, getattr(leaf, "base", None)):
        if isinstance(part, np.ndarray):
            part.setflags(write=False)
    return leaf
