"""Shards: Parquet files of bars under one manifest, for markets larger than memory.

`shards.json` lists each shard's path relative to the manifest, rows, SHA-256, first and last time
and symbols, with a checksum of its own. A shard is a market of its own: features start again in
each. `stream` moves shards to the device, read ahead by threads while the device computes.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import io
import itertools
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet

from nca_trader.cloud import CloudPath, Place, place
from nca_trader.config.records import open_record, plain, record, seal_record, show
from nca_trader.data.reading.files import read_numbers
from nca_trader.errors import BarError, ConfigError, StateError, system_errors
from nca_trader.machine import make_directory, write_atomically
from nca_trader.types import Bars, split_columns

FORMAT = 2
UNSEALED = 1  # the format before the manifest had a checksum
MANIFEST = "shards.json"
AGAIN = "copy it again from the source, or write the shards again"
# Measured on two cores (docs/lab-notes/speed.md): a second reader takes from the computation.
READERS = 1
PREFETCH = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
    """One file of the manifest, or some of its symbols.

    Attributes:
      path: relative to the manifest, with "/".
      rows: N, bars on its time axis.
      sha256: of the file's bytes, hexadecimal.
      span: its first and its last time, UTC.
      symbols: those that are read.
      source, note: as in `Bars`.
      stored: all that the file holds, in its order; None if these are `symbols`.
    """

    path: str
    rows: int
    sha256: str
    span: tuple[str, ...]
    symbols: tuple[str, ...]
    source: str
    note: str
    stored: tuple[str, ...] | None = None

    def __post_init__(self):
        path = PurePosixPath(self.path)
        if path.is_absolute() or ".." in path.parts:  # the manifest may be a stranger's
            raise ValueError(f"{path} lies outside the folder")
        if len([np.datetime64(end, "ns") for end in self.span]) != 2:
            raise ValueError(f"span = {show(self.span)} is not a first and a last time")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Listing:
    """The whole of shards.json."""

    format: int
    shards: list[Shard]


class Shards(Sequence[Shard]):
    """The shards of a folder, or a part of them; opened by `open_shards`."""

    def __init__(
        self, folder: Place, shards: Iterable[Shard], depth: int = 0, verified: Any = None
    ):
        self.folder, self._shards, self._depth = folder, tuple(shards), depth
        # Path to version of the bytes that had the right SHA-256; parts share it.
        self._verified: dict[str, object] = {} if verified is None else verified

    def __len__(self) -> int:
        return len(self._shards)

    def __getitem__(self, index: Any) -> Any:
        """Return a shard or, for a slice, `Shards`."""
        if isinstance(index, slice):
            return Shards(self.folder, self._shards[index], self._depth, self._verified)
        return self._shards[index]

    def __repr__(self) -> str:
        return f"Shards({len(self)} shards, {self.rows:,} rows, {self.folder})"

    @property
    def rows(self) -> int:
        """Total number of bars on all time axes."""
        return sum(shard.rows for shard in self)

    @property
    def symbols(self) -> tuple[str, ...]:
        """All symbols, each once, in the order of their first shards."""
        return tuple(dict.fromkeys(symbol for shard in self for symbol in shard.symbols))

    def part(self, index: int, count: int, by: str = "symbol") -> Shards:
        """Return one of `count` disjoint parts, the same on every host.

        A name's part is its SHA-256 modulo `count`. It depends neither on other names nor on their
        order, and sizes are equal only on average. A part of a part is drawn by another hash, so
        that e.g. each host's shards still fall into training and selection.

        Args:
          index: of the part, from 0.
          count: the number of parts.
          by: "symbol": a symbol's whole series lies in one part, and a shard of several symbols
            gives each part its own; for training against selection. "file": whole shards, so
            that one series may be spread over the parts; for hosts that share the work.

        Raises:
          ConfigError: no such part, or another `by`.
        """
        if by not in ("symbol", "file"):
            raise ConfigError(f"by={by!r}: shards are split by 'symbol' or by 'file'.")
        if not 0 <= index < count:
            raise ConfigError(f"part {index} of {count}: give an index from 0 to the count - 1.")

        # Python's own hash differs between processes, and hosts must agree.
        def here(name: str) -> bool:
            word = hashlib.sha256(f"{self._depth}:{name}".encode()).digest()
            return int.from_bytes(word[:8]) % count == index

        chosen = []
        for shard in self:
            whole = by == "file" and here(shard.path)
            own = tuple(s for s in shard.symbols if whole or (by == "symbol" and here(s)))
            if own:
                stored = shard.stored or shard.symbols
                chosen.append(dataclasses.replace(shard, symbols=own, stored=stored))
        return Shards(self.folder, chosen, self._depth + 1, self._verified)

    def read(self, shard: Shard) -> Bars:
        """Read the bars `[rows, A]` of a shard; its SHA-256 is checked when first read.

        Raises:
          BarError: it is missing. StateError: it is not the file that was written.
        """
        content = self._content(shard)
        stored = shard.stored or shard.symbols
        try:
            found, shape = read_numbers(content), (shard.rows, len(stored))
            arrays: Any = {k: found[k].to_numpy().reshape(shape) for k in found.column_names}
            time = arrays.pop("time")[:, 0]
            arrays = split_columns(arrays)
            bars = Bars(time=time, symbols=stored, source=shard.source, note=shard.note, **arrays)
        except (pa.ArrowException, ValueError, KeyError, TypeError, IndexError) as error:
            what = str(error).partition("\n")[0].rstrip(".")
            raise StateError(
                f"{self.folder / shard.path}: is not a shard of {shard.rows} rows and "
                f"{len(stored)} symbols ({what}); {AGAIN}."
            ) from error
        return bars if shard.symbols == stored else bars.select(*shard.symbols)

    def verify(self) -> None:
        """Read every shard's bytes and compare their SHA-256 with the manifest's.

        Raises:
          BarError: shards are missing. StateError: shards are changed. A line for each.
        """
        faults: list[BarError | StateError] = []
        for shard in self:
            self._verified.pop(shard.path, None)
            try:
                self._content(shard)
            except (BarError, StateError) as error:
                faults.append(error)
        if faults:
            raise type(faults[0])(*(line for fault in faults for line in fault.args))

    def _content(self, shard: Shard) -> bytes:
        """Return the file's bytes after comparing them with the manifest.

        The caller parses these very bytes, so the file cannot change between check and use.
        """
        path = self.folder / shard.path
        what = f"{path}: a shard of {self.folder / MANIFEST} can't be read"
        with system_errors(BarError, what, AGAIN):
            if isinstance(path, CloudPath):
                content, version = path.read()
            else:
                found = path.stat()  # before the bytes: a change in between is then seen
                content, version = path.read_bytes(), (found.st_size, found.st_mtime_ns)
        if self._verified.get(shard.path) != version:  # later passes need not hash
            if hashlib.sha256(content).hexdigest() != shard.sha256:
                raise StateError(
                    f"{path}: not the bytes that were written (another SHA-256 than in "
                    f"{MANIFEST}); {AGAIN}."
                )
            self._verified[shard.path] = version
        return content


def write_shards(
    bars: Bars | Iterable[Bars], folder: str | Path | CloudPath, *, rows: int = 100_000
) -> Shards:
    """Write bars as shards of at most `rows` rows, each whole or not there, the manifest last.

    Args:
      bars: of one series of assets, or an iterator of several, e.g. one that holds one file in
        memory: `(read_bars(path) for path in paths)`. For one shard per symbol give
        `(bars.select(symbol) for symbol in bars.symbols)`.
      folder: is created if it does not exist; or a `gs://` or `s3://` URL.
      rows: N of a shard. The last of a series may be shorter, and compiles a program of its own.

    Returns:
      The shards, as `open_shards` gives them.

    Raises:
      ConfigError: `rows` is below 1. BarError: there are no bars.
      StateError: the folder has a manifest already, or can't be written.

    Example:
      >>> import tempfile
      >>> import nca_trader as nca
      >>> shards = write_shards(nca.sample_bars("sp500"), tempfile.mkdtemp(), rows=3_000)
      >>> [len(shards.read(shard)) for shard in shards]
      [3000, 2031]
    """
    folder = place(folder)
    if rows < 1:
        raise ConfigError(f"rows={rows}: give at least one row per shard.")
    # A manifest says that a folder is complete, so writing never starts under one.
    if (folder / MANIFEST).exists():
        raise StateError(f"{folder / MANIFEST}: is there already; choose another folder.")
    make_directory(folder)
    shards: list[Shard] = []
    for series in [bars] if isinstance(bars, Bars) else bars:
        for first in range(0, len(series), rows):
            piece = series[first : first + rows]
            content = parquet_of(piece)
            shard = Shard(
                path=f"{len(shards):06d}.parquet",
                rows=len(piece),
                sha256=hashlib.sha256(content).hexdigest(),
                span=(str(piece.time[0]), str(piece.time[-1])),
                symbols=piece.symbols,
                source=piece.source,
                note=piece.note,
            )
            # The manifest is written last, so that a part of a folder is never opened.
            write_atomically(folder / shard.path, content)
            shards.append(shard)
    if not shards:
        raise BarError(f"{folder}: there are no bars to write; give at least one.")
    write_atomically(folder / MANIFEST, seal_record(plain(Listing(format=FORMAT, shards=shards))))
    return open_shards(folder)


def parquet_of(bars: Bars) -> bytes:
    """Return a bar file, one row per asset and time, that `read_bars` reads as well."""
    width = bars.num_assets
    # Symbols repeat in every row, so they are stored as codes.
    codes = np.tile(np.arange(width, dtype=np.int32), len(bars))
    columns = {
        "time": pa.array(bars.time.repeat(width), pa.timestamp("ns", "UTC")),
        "symbol": pa.DictionaryArray.from_arrays(codes, list(bars.symbols)),
        **{name: pa.array(getattr(bars, name).ravel()) for name in bars.fields},
    }
    file = io.BytesIO()
    # Prices hardly repeat, so a dictionary of them costs time and saves nothing.
    pyarrow.parquet.write_table(
        pa.table(columns),
        file,
        row_group_size=max(len(codes), 1),
        use_dictionary=["symbol"],  # pyright: ignore[reportArgumentType]
        column_encoding={"time": "DELTA_BINARY_PACKED"},
    )
    return file.getvalue()


def folder_of_shards(path: str | Path | CloudPath) -> Place | None:
    """Return the folder of shards that a path names, itself or by its manifest; None for a file.

    A URL without a suffix is taken as a folder, as looking for a manifest needs a right to list.
    """
    found = place(path)
    if found.name == MANIFEST:
        return found.parent
    cloud = isinstance(found, CloudPath)
    return found if (not found.suffix if cloud else (found / MANIFEST).is_file()) else None


def open_shards(folder: str | Path | CloudPath) -> Shards:
    """Open the shards that a folder's manifest lists; bars are read later.

    Args:
      folder: written by `write_shards`; or a `gs://` or `s3://` URL.

    Raises:
      BarError: there is no manifest, or one of another format. StateError: it is damaged.
    """
    folder = place(folder)
    path = folder / MANIFEST
    remedy = "give a folder that write_shards wrote"
    with system_errors(BarError, f"{path}: can't be read", remedy):
        content = path.read_bytes()
    where = f"{path}: is not a manifest of shards (format {FORMAT})"
    value, checked = open_record(content, where, AGAIN)
    version = value.get("format") if isinstance(value, dict) else FORMAT
    if type(version) is int and version not in (UNSEALED, FORMAT):
        raise BarError(
            f"{path}: has format {show(version)}, this version reads {FORMAT}; write the shards "
            "again."
        )
    listing = record(Listing, value, where, AGAIN)
    if version == FORMAT and not checked:
        raise StateError(f"{where}: has no 'checksum'; {AGAIN}.")
    return Shards(folder, listing.shards)


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
    """Yield shards in their order, each on the device.

    `readers` threads read, check and prepare shards; one more thread moves the next piece to the
    device while the consumer computes with this one. On the host at most `prefetch` shards are
    ahead. On the device there are at most three pieces: the one that the consumer holds, the next,
    and the one being moved.

    The pieces and their order do not depend on the options. A reader's exception is raised in its
    shard's place and ends the stream. The threads end when the stream ends, is closed or is
    garbage-collected, after the shards that are being read.

    Args:
      shards: what to stream; `shards.part(index, count)` for one host's own.
      prepare: makes a pytree of numpy arrays from bars, in a reader's thread. The arrays must be
        fresh, since the device may share their memory; they are made read-only, so that a
        buffer written to again raises ValueError.
      readers: threads that read; more than `prefetch` are never busy.
      prefetch: shards read ahead; 0 reads each shard when it is asked for, without threads.
      device: a device or a sharding; None is JAX's default device.
      start: index of the first shard.
      repeat: start again after the last, without end.

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
                arrays = prepare(bars)
                # The device may go on reading the host's memory, also that of a view's base.
                for leaf in jax.tree.leaves(arrays):
                    for part in (leaf, getattr(leaf, "base", None)):
                        if isinstance(part, np.ndarray):
                            part.setflags(write=False)
                return Piece(shard, bars, arrays)

    def put(piece: Piece) -> Piece:
        with jax.enable_x64(x64), jax.default_device(default):
            with jax.profiler.TraceAnnotation("stream_place"):
                return piece._replace(arrays=jax.device_put(piece.arrays, device))

    order = itertools.islice(itertools.cycle(shards) if repeat else shards, start, None)

    def ahead() -> Generator[Piece, None, None]:
        placer = ThreadPoolExecutor(1, "stream-place")
        # More readers than shards ahead would never be busy.
        reader = ThreadPoolExecutor(min(readers, prefetch), "stream-read")
        loading: collections.deque[Future[Piece]] = collections.deque()

        def load_next(count: int) -> None:
            loading.extend(reader.submit(load, shard) for shard in itertools.islice(order, count))

        def place_next() -> Future[Piece] | None:
            if not loading:
                return None
            loaded = loading.popleft()
            return placer.submit(lambda: put(loaded.result()))

        try:
            load_next(prefetch)
            current = place_next()
            while current is not None:
                piece = current.result()
                load_next(1)
                current = place_next()
                # No name here refers to the piece while the consumer has it, so its memory is
                # free as soon as the consumer drops it.
                box = [piece]
                del piece
                yield box.pop()
        finally:  # first nothing more is read, then nothing more is placed
            for pool in (reader, placer):
                pool.shutdown(wait=True, cancel_futures=True)

    return ahead() if prefetch else (put(load(shard)) for shard in order)
