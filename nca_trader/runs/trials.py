"""The trial log: every agent trained and every evaluation on a test span, and on which bars.

The more agents were tried, the better the best of them looks by luck alone. So a report states how
many were tried, and nothing is ever taken out of the log.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import itertools
import json
import os
import time as clock
import warnings
from typing import Any

import numpy as np
import pandas as pd

from nca_trader.cloud import CloudPath, Place, place, together
from nca_trader.config.records import plain, sealed, unsealed
from nca_trader.config.records import record as record_of
from nca_trader.data.shards import MANIFEST as SHARDS_MANIFEST
from nca_trader.envs.trading import TradingEnv
from nca_trader.errors import StateError
from nca_trader.machine import write_atomically
from nca_trader.types import Bars

FILE = "trials.jsonl"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataRecord:
    """Bars as a manifest names them: enough to recognise them.

    Attributes:
      first, last: times of the first and last of `rows` bars.
      universes: of shards, the symbols of each, every combination once.
    """

    source: str
    note: str
    symbols: list[str]
    rows: int
    first: str
    last: str
    sha256: str
    universes: list[list[str]] | None = None

    def __post_init__(self):
        for end in (self.first, self.last):
            try:
                with warnings.catch_warnings(action="error"):  # numpy's of a UTC offset
                    np.datetime64(end, "ns")
            except (ValueError, UserWarning):
                raise ValueError(f"{end!r} is not a time") from None

    @property
    def markets(self) -> list[str]:
        """The symbols; of a synthetic draw with its name, since each draw is another market."""
        names = sorted({*self.symbols, *itertools.chain(*(self.universes or []))})
        synthetic = self.source.startswith("synthetic ")
        return [f"{self.source}: {name}" if synthetic else name for name in names]


def data_record(bars: Bars) -> DataRecord:
    """Return the record of bars."""
    return DataRecord(
        source=bars.source,
        note=bars.note,
        symbols=list(bars.symbols),
        rows=len(bars),
        first=str(bars.time[0]),
        last=str(bars.time[-1]),
        sha256=bars.digest(),
    )


def record_of_env(env: TradingEnv) -> DataRecord:
    """Return the record of an environment's bars, which may be in shards."""
    shards = env.shards
    if shards is None:
        return data_record(env.bars)
    # The checksums of the shards stand for their bars, so no bar is read.
    known = [[shard.path, shard.sha256, shard.symbols] for shard in shards]
    return DataRecord(
        source=str(shards.folder / SHARDS_MANIFEST),
        note=shards[0].note,
        symbols=list(shards.symbols),
        rows=shards.rows,
        # ISO times sort as time does.
        first=min(shard.span[0] for shard in shards),
        last=max(shard.span[1] for shard in shards),
        sha256=hashlib.sha256(json.dumps(known).encode()).hexdigest(),
        universes=[list(u) for u in dict.fromkeys(shard.symbols for shard in shards)],
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A line of the trial log. A field that an older version did not write is None.

    Attributes:
      kind: "train", with `trials`, the number of agents; or "test", with `seed`, the agent
        (None is the mean of all).
      data: SHA-256 of the bars. symbols: their `DataRecord.markets`.
      first, last: the span that the agents were trained or judged on.
    """

    kind: str
    run: str
    data: str
    trials: int | None = None
    time: str | None = None
    symbols: list[str] | None = None
    first: str | None = None
    last: str | None = None
    seed: int | None = None

    def concerns(self, data: DataRecord) -> bool:
        """Whether the entry is of a market of `data`; a test also where its span overlaps."""
        # An entry of an older version knows only the checksum of its bars.
        if self.symbols is None or self.first is None or self.last is None:
            return self.data == data.sha256
        shared = bool(set(self.symbols) & set(data.markets))
        if self.kind == "train":  # in whatever years: the same market was searched
            return shared
        # Compared as text: ISO times sort as time does.
        first, last = max(self.first, data.first), min(self.last, data.last)
        return shared and bool(np.datetime64(first) <= np.datetime64(last))


def entry_of(kind: str, run: str, data: DataRecord, **more: Any) -> Entry:
    """Return an entry about `data`; `more` are its `trials`, `time` and `seed`."""
    span = {"symbols": data.markets, "first": data.first, "last": data.last}
    return Entry(kind=kind, run=run, data=data.sha256, **span, **more)


def record(root: Place, entry: Entry) -> None:
    """Append an entry to the log in `root`, the folder of run folders; it is then on disk.

    Raises:
      StateError: the log cannot be written.
    """
    # One line, since the log is read line by line.
    line = sealed(plain(entry), indent=None)
    if isinstance(root, CloudPath):
        # A store can neither lock nor append, and runs may end there at the same time: each entry
        # is an object. By time, so that they are read in order; random, so that names differ.
        write_atomically(root / FILE / f"{clock.time_ns():020d}-{os.urandom(4).hex()}", line)
        return
    try:
        root.mkdir(parents=True, exist_ok=True)
        with open(root / FILE, "a", encoding="utf-8") as file:
            # Several runs below this folder may write at the same time.
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(line)
            file.flush()
            # On disk before the caller shows a number: an evaluation that was seen is counted.
            os.fsync(file.fileno())
    except OSError as error:
        raise StateError(
            f"{root / FILE}: the trial log cannot be written ({error.strerror}); repair that, then "
            "try again."
        ) from None


def trials(folder: str | os.PathLike[str] | CloudPath) -> pd.DataFrame:
    """Return the trial log of a project folder, oldest entry first.

    Agents that were trained (`kind` "train") and evaluations on test spans ("test") are counted
    there, from Python and from the command.

    Args:
      folder: the folder of the run folders, e.g. "runs".

    Returns:
      One row per entry: `kind`, `run`, `seed`, `time`, the data's symbols, first and last bar.

    Raises:
      StateError: a line is damaged; the message names it.

    >>> import tempfile
    >>> trials(tempfile.mkdtemp()).empty
    True
    """
    return pd.DataFrame([plain(entry) for entry in entries(place(folder, "folder"))])


def entries(root: Place) -> list[Entry]:
    """Return all entries of the log in `root`, oldest first.

    Raises:
      StateError: a line is damaged; the message names it.
    """
    path = root / FILE
    if isinstance(path, CloudPath):
        # All at once: a store answers each request after some tenths of a second.
        content = b"".join(together(CloudPath.read_bytes, path.iterdir()))
    else:
        content = path.read_bytes() if path.exists() else b""
    remedy = "the count of trials can't be trusted. Restore the file from a copy, or move it away"
    remedy += " to begin a new count"
    found = []
    for number, line in enumerate(content.splitlines(keepends=True), 1):
        where = f"{path} line {number}: not an entry"
        # Lines of older versions have no checksum.
        value = unsealed(line, where, remedy)[0]
        found.append(record_of(Entry, value, where, remedy))
    return found


def count(root: Place, kind: str, data: DataRecord | None = None) -> int:
    """Return the number of agents trained (`kind` "train") or of evaluations ("test").

    Args:
      root: the folder of run folders.
      kind: "train" or "test".
      data: counts what concerns its market, see `Entry.concerns`. None counts all.
    """
    return sum(
        # An evaluation has no `trials`, and counts once.
        1 if entry.trials is None else entry.trials
        for entry in entries(root)
        if entry.kind == kind and (data is None or entry.concerns(data))
    )
