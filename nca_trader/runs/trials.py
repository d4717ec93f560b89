"""The ledger of trials: every agent trained and every look at a test span, counted for ever.

The more agents were tried, the better the best of them looks by luck alone; a report that does
not say how many were tried cannot be believed.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import os
import time
from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

import numpy as np
import pandas as pd

from nca_trader.cloud import CloudPath, Place, place, together
from nca_trader.config.records import read_json
from nca_trader.config.records import record as record_of
from nca_trader.data.shards import MANIFEST as SHARDS_MANIFEST
from nca_trader.data.shards import Shards
from nca_trader.disk import write_atomically
from nca_trader.envs.trading import TradingEnv
from nca_trader.errors import StateError
from nca_trader.types import Bars

FILE = "trials.jsonl"


class DataRecord(TypedDict):
    """Bars as a manifest names them. first, last: times of the first and last of `rows` bars.

    universes: the symbols of each shard, every combination once.
    """

    source: str
    note: str
    symbols: list[str]
    rows: int
    first: str
    last: str
    sha256: str
    universes: NotRequired[list[list[str]]]


class Entry(TypedDict):
    """A line of the ledger.

    kind: "train", with `trials`, the number of agents; or "test". data: SHA-256 of the bars.
    symbols, first, last: the market, see `markets`, and the span that was judged or trained on.
    seed: of the agent that was judged.
    """

    kind: str
    run: str
    data: str
    trials: NotRequired[int]
    time: NotRequired[str]
    symbols: NotRequired[list[str]]
    first: NotRequired[str]
    last: NotRequired[str]
    seed: NotRequired[int]


def record(root: Place, entry: dict[str, Any]) -> None:
    """Appends one entry to the ledger in `root`; it is on disk when this returns.

    In a store each entry is an object of its own: runs may end there at the same time, and
    nothing can be locked or appended to.

    Args:
      root: the folder that holds the run folders.
      entry: an `Entry`.

    Raises:
      StateError: the ledger cannot be written.
    """
    line = json.dumps(entry, sort_keys=True) + "\n"
    if isinstance(root, CloudPath):
        # By time, so that they are read in order; random, so that no two have one name.
        write_atomically(root / FILE / f"{time.time_ns():020d}-{os.urandom(4).hex()}", line)
        return
    try:
        root.mkdir(parents=True, exist_ok=True)
        with open(root / FILE, "a", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StateError(
            f"{root / FILE}: the ledger of trials cannot be written ({error.strerror}); mend "
            "that, then try again."
        ) from None


def trials(folder: str | os.PathLike[str] | CloudPath) -> pd.DataFrame:
    """Returns the trial log of a project folder, oldest entry first.

    Agents that were trained (`kind` "train") and evaluations on test spans ("test") are counted
    there, from Python and from the command.

    Args:
      folder: the folder of the run folders, e.g. "runs".

    Returns:
      One row per entry: `kind`, `run`, `seed`, `time`, the data's symbols, first and last bar.

    Raises:
      StateError: a line is damaged; the message names it.
    """
    return pd.DataFrame(entries(place(folder, "folder")))


def entries(root: Place) -> list[Entry]:
    """All entries of the ledger in `root`, oldest first.

    Raises:
      StateError: a line is damaged; names it.
    """
    path = root / FILE
    if isinstance(path, CloudPath):
        text = "".join(together(CloudPath.read_text, path.iterdir()))
    else:
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    remedy = "the count of trials can't be trusted. Restore the file from a copy, or move it away"
    remedy += " to begin a new count"
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{path} line {number}: not an entry"
        found.append(record_of(Entry, read_json(line, where, remedy), where, remedy))
    return found


def count(root: Place, kind: str, data: DataRecord | None = None) -> int:
    """Counts agents trained (`kind` "train") or looks at a test span ("test").

    Args:
      data: counts those of its market, i.e. of any of its symbols; looks, where the span that
        was judged shares a bar's time with that of `data`. None counts all.
    """
    return sum(
        entry.get("trials", 1)
        for entry in entries(root)
        if entry["kind"] == kind and (data is None or _of(entry, data))
    )


def named(data: DataRecord) -> dict[str, Any]:
    """The keys by which an entry names its data."""
    return {
        "data": data["sha256"],
        "symbols": markets(data),
        "first": data["first"],
        "last": data["last"],
    }


def markets(data: DataRecord) -> list[str]:
    """The symbols of `data`; of a synthetic draw with its name, since each draw is another."""
    synthetic = data["source"].startswith("synthetic ")
    names = sorted({*data["symbols"], *itertools.chain(*data.get("universes", []))})
    return [f"{data['source']}: {name}" if synthetic else name for name in names]


def _of(entry: Entry, data: DataRecord) -> bool:
    if "symbols" not in entry:  # written by an older version, which knew the digest alone
        return entry["data"] == data["sha256"]
    shared = set(entry["symbols"]) & set(markets(data))
    if entry["kind"] == "train":  # whatever the years: the same market was searched
        return bool(shared)
    return bool(shared) and overlaps(entry, data)


def overlaps(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two spans with "first" and "last" share a time."""
    first, last = (max(one["first"], other["first"]), min(one["last"], other["last"]))
    return bool(np.datetime64(first) <= np.datetime64(last))


def data_record(bars: Bars) -> DataRecord:
    """What a manifest says of bars: enough to know them again."""
    return {
        "source": bars.source,
        "note": bars.note,
        "symbols": list(bars.symbols),
        "rows": len(bars),
        "first": str(bars.time[0]),
        "last": str(bars.time[-1]),
        "sha256": bars.digest(),
    }


def _shards_record(shards: Shards) -> DataRecord:
    """The same of shards, and `universes`: the symbols of each, every combination once."""
    known = [[shard.path, shard.sha256, shard.symbols] for shard in shards]
    return {
        "source": str(shards.folder / SHARDS_MANIFEST),
        "note": shards[0].note,
        "symbols": list(shards.symbols),
        "universes": [list(u) for u in dict.fromkeys(shard.symbols for shard in shards)],
        "rows": shards.rows,
        "first": str(min(shard.span[0] for shard in shards)),
        "last": str(max(shard.span[1] for shard in shards)),
        "sha256": hashlib.sha256(json.dumps(known).encode()).hexdigest(),
    }


def record_of_env(env: TradingEnv) -> DataRecord:
    """What a manifest says of the bars of an environment."""
    return data_record(env.bars) if env.shards is None else _shards_record(env.shards)
