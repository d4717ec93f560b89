"""What the JSON files of a run hold, and how they are read: every key known, of its type."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import warnings
from typing import Any, NotRequired, TypedDict, TypeVar, cast

import numpy as np

from nca_trader.config import EnvConfig
from nca_trader.config.records import RESTORE, record
from nca_trader.data.shards import MANIFEST as SHARDS_MANIFEST
from nca_trader.data.shards import Shards
from nca_trader.envs.trading import TradingEnv, spec_of
from nca_trader.errors import ConfigError, StateError
from nca_trader.types import Bars, EnvSpec

FORMAT = 4
UNSEALED = 3  # the format before run.json and selection.json had a checksum
M = TypeVar("M", bound="Manifest")


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


class Manifest(TypedDict):
    """What a run was made with, in run.json and in an exported file. config: SHA-256 by file."""

    name: str
    seed: int
    command: str
    data: DataRecord
    spec: dict[str, Any]
    config: dict[str, str]
    versions: dict[str, str]
    commit: str
    device: str


class RunManifest(Manifest):
    """The whole of run.json."""

    format: int
    created: str


class Selection(TypedDict):
    """selection.json: which agent was selected, the Sharpe ratio of each, and on which bars."""

    selected: int
    sharpe: NotRequired[list[float | None]]
    data: NotRequired[DataRecord]


class Row(TypedDict):
    """What a row of metrics.jsonl has in addition to numbers by name."""

    update: NotRequired[int]
    steps: NotRequired[int]
    seeds: NotRequired[dict[str, list[float | None]]]
    fitness_correlation: NotRequired[dict[str, float | None]]


def row_of(value: Any, source: str) -> dict[str, Any]:
    """Returns parsed JSON as a row of metrics; see `manifest_of`."""
    row = record(dict[str, Any], value, source)
    named = {name: number for name, number in row.items() if name in Row.__annotations__}
    record(Row, named, source)
    record(dict[str, float | None], {k: v for k, v in row.items() if k not in named}, source)
    return row


def manifest_of(kind: type[M], value: Any, source: str) -> M:
    """Returns parsed JSON as a manifest.

    Raises:
      StateError: a key is unknown or missing, or a value has another type.
    """
    found = record(kind, value, source)
    _refuse_no_span(found["data"], source)
    return found


def selection_of(value: Any, source: str) -> dict[str, Any]:
    """Returns parsed JSON as a `Selection`; see `manifest_of`."""
    found = dict(record(Selection, value, source))
    if "data" in found:
        _refuse_no_span(cast(DataRecord, found["data"]), source)
    return found


def _refuse_no_span(data: DataRecord, source: str) -> None:
    for end in (data["first"], data["last"]):
        try:
            with warnings.catch_warnings(action="error"):  # of a UTC offset, which is ours never
                np.datetime64(end, "ns")
        except (ValueError, UserWarning):
            raise StateError(f"{source}: {end!r} is not a time; {RESTORE}.") from None


def read_spec(manifest: Manifest, config: EnvConfig, source: str, *, exact: bool) -> EnvSpec:
    """Rebuilds the `EnvSpec` of a manifest, every field of it.

    Args:
      exact: whether the record has a checksum. Without one, an older version wrote the record:
        what it lacks follows from `config`, and must agree with `config` where it has it.

    Raises:
      StateError: a field is unknown or missing, or has another type or value.
    """
    given, where = manifest["spec"], f"{source}: spec"
    if exact:
        return record(EnvSpec, given, where)
    features = record(list[str], given.get("features", []), f"{where}.features")
    symbols = given.get("symbols", manifest["data"]["symbols"])
    symbols = record(tuple[str, ...], symbols, f"{where}.symbols")
    states = tuple(name for name in features if name.startswith("state:"))
    try:
        derived = spec_of(config, symbols, states)
    except ConfigError as error:  # a feature that this version does not have
        raise StateError(f"{source}: env.toml: {error}") from None
    # Agents of older versions were not shown what the reward remembers.
    spec = record(EnvSpec, _as_json(derived) | {"memory": "", "decay": 0.0} | given, where)
    for name in ("features", "targets", "actions", "constant_size"):
        there, here = getattr(spec, name), getattr(derived, name)
        if there != here:
            raise StateError(
                f"{source}: spec.{name} is {there}, but env.toml gives {here}; {RESTORE}."
            )
    return spec


def _as_json(value: Any) -> dict[str, Any]:
    """The fields of a dataclass in the types that JSON reads back."""
    return json.loads(json.dumps(dataclasses.asdict(value)))


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
