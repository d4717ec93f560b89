"""The trial log: every agent trained, every rule tried and every evaluation on a test span.

The more were tried, the better the best of them looks by luck alone. So a report states how many
were tried, and nothing is ever taken out of the log. An agent is a trial where it is trained. A
rule is one by what it orders: the same targets on the same bars are one trial, whatever the rule's
name, code, costs or fills, and other targets are another one.
"""

from __future__ import annotations

import base64
import dataclasses
import fcntl
import hashlib
import itertools
import json
import os
import time as clock
import warnings
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from nca_trader.cloud import CloudPath, Place, place, together
from nca_trader.config.records import open_record, plain, seal_record
from nca_trader.config.records import record as record_of
from nca_trader.data.shards import MANIFEST as SHARDS_MANIFEST
from nca_trader.envs.trading import TradingEnv
from nca_trader.errors import StateError, system_errors
from nca_trader.machine import no_link, write_atomically
from nca_trader.runs.folder import now
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
      kind: "train", with `trials`, the number of agents or of rules; or "test", with `seed`, the
        agent (None is the mean of all).
      targets: the digests of the rules, see `digest_of_targets`, 8 bytes each, in base64.
      ratios: of those with a Sharpe ratio the number, and the sums of `sqrt(T) SR` and its square.
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
    targets: str | None = None
    ratios: list[float] | None = None

    @property
    def digests(self) -> np.ndarray:
        """The digests of rules, uint64."""
        return np.frombuffer(base64.b64decode(self.targets or ""), "<u8")

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
    """Return an entry about `data`; `more` are its `trials`, `time` and so on."""
    span = {"symbols": data.markets, "first": data.first, "last": data.last}
    return Entry(kind=kind, run=run, data=data.sha256, **span, **more)


def record(root: Place, entry: Entry) -> None:
    """Append an entry to the log in `root`, the folder of run folders; it is then on disk.

    Raises:
      StateError: the log cannot be written.
    """
    # One line, since the log is read line by line.
    line = seal_record(plain(entry), indent=None)
    if isinstance(root, CloudPath):
        # A store can neither lock nor append, and runs may end there at the same time: each entry
        # is an object. By time, so that they are read in order; random, so that names differ.
        write_atomically(root / FILE / f"{clock.time_ns():020d}-{os.urandom(4).hex()}", line)
        return
    what = f"{root / FILE}: the trial log cannot be written"
    with system_errors(StateError, what, "repair that, then try again"):
        root.mkdir(parents=True, exist_ok=True)
        with open(root / FILE, "a", encoding="utf-8", opener=no_link) as file:
            # Several runs below this folder may write at the same time.
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(line)
            file.flush()
            # On disk before the caller shows a number: an evaluation that was seen is counted.
            os.fsync(file.fileno())


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
    table = pd.DataFrame([plain(entry) for entry in entries(place(folder, "folder"))])
    return table.drop(columns=["targets", "ratios"], errors="ignore")


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
        content = path.read_bytes() if path.is_file() else b""
    remedy = "the count of trials can't be trusted. Restore the file from a copy, or move it away"
    remedy += " to begin a new count"
    found = []
    for number, line in enumerate(content.splitlines(keepends=True), 1):
        where = f"{path} line {number}: not an entry"
        # Lines of older versions have no checksum.
        value = open_record(line, where, remedy)[0]
        found.append(record_of(Entry, value, where, remedy))
    return found


def count(root: Place, kind: str, data: DataRecord | None = None) -> int:
    """Return the number of trials (`kind` "train": agents and rules) or of evaluations ("test").

    Args:
      root: the folder of run folders.
      kind: "train" or "test".
      data: counts what concerns its market, see `Entry.concerns`. None counts all.
    """
    return _number(entries(root), kind, data)


def _number(log: list[Entry], kind: str, data: DataRecord | None) -> int:
    return sum(
        # An evaluation has no `trials`, and counts once.
        1 if entry.trials is None else entry.trials
        for entry in log
        if entry.kind == kind and (data is None or entry.concerns(data))
    )


class Tried(NamedTuple):
    """What was tried on a market so far.

    Attributes:
      number: of trials, agents and rules.
      variance: of the rules' `sqrt(T) SR`, at most 1, which is what luck alone gives T independent
        returns; 1 where fewer than two are known. Many alike have a small one. It is the largest
        that any beginning of the log had, so that searching on around the best of a grid, where all
        are alike, does not make it smaller.
      new: how many of these were not in the log before.
    """

    number: int
    variance: float
    new: int


def count_rules(
    folder: str | os.PathLike[str] | CloudPath | None,
    run: str,
    bars: Bars,
    digests: np.ndarray,
    ratios: np.ndarray,
) -> Tried:
    """Record the rules that are not in the log yet; return what was tried on this market so far.

    Args:
      folder: of the log; None records nothing and counts these rules alone.
      run: what tried them, for readers, e.g. "sweep sma_cross".
      bars: that they were tried on.
      digests: `[M]` uint64, of `digest_of_targets`; one that occurs twice is one trial.
      ratios: `[M]` Sharpe ratio of a bar times the root of the number of bars, NaN for none.
    """
    data, log = data_record(bars), []
    root = None if folder is None else place(folder, "trials")
    if root is not None:
        log = entries(root)
    own = np.unique(digests.astype("<u8"))
    known = np.concatenate([own[:0], *(e.digests for e in log if e.data == data.sha256)])
    new, at = np.unique(digests.astype("<u8"), return_index=True)
    new, at = new[fresh := ~np.isin(new, known)], at[fresh]
    if len(new):
        t = ratios[at][np.isfinite(ratios[at])]
        entry = entry_of(
            "train",
            run,
            data,
            trials=len(new),
            targets=base64.b64encode(new.tobytes()).decode(),
            ratios=[float(len(t)), float(t.sum()), float((t**2).sum())],
            time=now(),
        )
        log.append(entry)
        if root is not None:
            record(root, entry)
    # Without a log no entry is older; an older version counted rules without their digests.
    number = max(_number(log, "train", data), len(own))
    sums = [e.ratios for e in log if e.kind == "train" and e.ratios and e.concerns(data)]
    n, total, squares = np.cumsum(np.reshape(sums, (-1, 3)), axis=0).T
    enough = n >= 2.0
    n, total, squares = n[enough], total[enough], squares[enough]
    variances = (squares - total**2 / n) / (n - 1.0)
    variance = float(min(1.0, variances.max())) if len(n) else 1.0
    return Tried(number, variance, len(new))


def digest_of_targets(targets: np.ndarray, first: int = 0, left: Any = None) -> int:
    """Return 64 bits that tell the orders of one account on its bars from those of another.

    The digest is a sum over bars, so that a sweep adds it up while its accounts run. Targets are
    rounded to float32, in which a sweep may compute them.

    Args:
      targets: `[N, A]` the weights ordered; NaN for no order.
      first: row of the first among all bars.
      left: `[N, A]` why and at which level a position was closed inside a bar, 0 for none; None of
        a rule without levels.

    Example:
      >>> ordered = np.array([[np.nan], [1.0], [0.0]])
      >>> digest_of_targets(ordered) == digest_of_targets(ordered.astype(np.float32))
      True
      >>> digest_of_targets(ordered) == digest_of_targets(ordered[::-1])
      False
    """
    x = np.asarray(targets, np.float32)
    terms = ordered_terms(x, x.view(np.uint32), places(len(x), x.shape[1], first), left)
    low, high = (int(term.sum(dtype=np.uint64)) & 0xFFFFFFFF for term in terms)
    return high << 32 | low


def places(num_rows: int, num_assets: int, first: int = 0) -> np.ndarray:
    """Return `[N, A]` uint32, a number for each bar and asset."""
    start, stop = first * num_assets, (first + num_rows) * num_assets
    return _mixed(np.arange(start, stop, dtype=np.uint32).reshape(num_rows, num_assets))


def ordered_terms(target: Any, bits: Any, places: Any, left: Any = None) -> tuple[Any, Any]:
    """Return the terms of a digest, two of uint32 for each target, of numpy or jax arrays.

    Args:
      target: float32.
      bits: the same numbers as uint32.
      places: of the targets.
      left: as in `digest_of_targets`.
    """
    number = (target == target) & (target != 0.0)
    # One pattern for all NaN and one for both zeros.
    zero = (target == 0.0) * np.uint32(0x80000000)
    bits = bits * number + zero
    if left is not None:
        bits = bits ^ left.astype(np.uint32) * np.uint32(0x9E3779B9)
    term = _mixed(bits ^ places)
    return term, _mixed(term + places)


def _mixed(x: Any) -> Any:
    """Return uint32 numbers whose bits all depend on all bits of x, one for each x.

    Source: Wellons, Prospecting for hash functions (2018), the function "lowbias32".
    """
    x = (x ^ x >> np.uint32(16)) * np.uint32(0x7FEB352D)
    x = (x ^ x >> np.uint32(15)) * np.uint32(0x846CA68B)
    return x ^ x >> np.uint32(16)
