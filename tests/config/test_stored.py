"""Everything that is stored is written and read by one mechanism, and reads back equal."""

import dataclasses
import itertools
import json
import types
import typing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nca_trader.agents import load_agent
from nca_trader.config import AgentConfig, EnvConfig
from nca_trader.config.records import (
    Mismatch,
    convert,
    open_record,
    plain,
    read_json,
    record,
    seal_record,
)
from nca_trader.config.toml import from_toml_text, preset_names, to_toml
from nca_trader.envs import load_env
from nca_trader.errors import ConfigError, StateError
from nca_trader.runs.exported import Coding
from nca_trader.runs.manifest import Deployment, Manifest, RunManifest, Selection
from nca_trader.runs.trials import DataRecord, Entry
from nca_trader.types import EnvSpec

PRESETS = [(folder, name) for folder in ("agents", "envs") for name in preset_names(folder)]


def both_ways(config):
    """Round-trips a config through TOML and through JSON."""
    kind = type(config)
    assert from_toml_text(kind, to_toml(config), "file") == config
    assert record(kind, json.loads(json.dumps(plain(config))), "file") == config


@pytest.mark.parametrize(("folder", "name"), PRESETS)
def test_a_preset_reads_back_equal(folder, name):
    both_ways(load_agent(name) if folder == "agents" else load_env(name))


# Values of each type. Every field accepts some of them.
TRIED = (True, False, 1, 2, 8, 0.0, 0.25, 0.5, 1.5, "cosine", "close", (1, 2), (0.1, 0.5), ("rsi",))


@pytest.mark.parametrize("whole", [EnvConfig, AgentConfig])
@pytest.mark.few(1)
def test_every_field_of_a_config_reads_back_equal(whole):
    tables = {f.name: f.default for f in dataclasses.fields(whole)}
    tables = {name: part for name, part in tables.items() if dataclasses.is_dataclass(part)}
    for name, part in {"": whole(), **tables}.items():
        hints = typing.get_type_hints(type(part))
        for field, value in itertools.product(dataclasses.fields(part), TRIED):
            try:
                given = convert(plain(value), hints[field.name])
                changed = dataclasses.replace(part, **{field.name: given})
                config = dataclasses.replace(whole(), **{name: changed}) if name else changed
            except (ConfigError, Mismatch):
                continue
            both_ways(config)


STORED = (Manifest, RunManifest, Selection, Deployment, DataRecord, Entry, EnvSpec, Coding)


CODINGS = (Coding(), Coding(bits=4, activations=True), Coding(codebook="cosine", group=2))


PLAIN = {
    bool: st.booleans(),
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False, allow_infinity=False),
    str: st.text(max_size=20),
}


def values(kind):
    """Values of a declared type."""
    of = typing.get_args(kind)
    if kind in PLAIN:
        return PLAIN[kind]
    if kind is Coding:
        return st.sampled_from(CODINGS)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        fields = {f.name: values(hints[f.name]) for f in dataclasses.fields(kind)}
        if kind is DataRecord:
            times = st.datetimes().map(lambda time: time.isoformat())
            fields |= {"first": times, "last": times}
        return st.builds(kind, **fields)
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        return st.one_of(*(st.none() if k is types.NoneType else values(k) for k in of))
    if origin is dict:
        if of[1] is typing.Any:  # the spec of a manifest
            return values(EnvSpec).map(plain)
        return st.dictionaries(PLAIN[str], values(of[1]), max_size=3)
    if origin is tuple and of[-1] is not Ellipsis:  # of this length
        return st.tuples(*map(values, of))
    return st.lists(values(of[0]), max_size=3).map(origin)


@pytest.mark.heavy
@pytest.mark.parametrize("kind", STORED)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_stored_record_reads_back_equal_and_knows_its_keys(kind, data):
    value = data.draw(values(kind))
    written = json.dumps(plain(value))
    assert record(kind, read_json(written, "file"), "file") == value
    assert record(kind, open_record(seal_record(plain(value)).encode(), "file")[0], "file") == value
    parsed = json.loads(written)
    with pytest.raises(StateError, match="is not a known key") as info:
        record(kind, parsed | {"colour": 1}, "file")
    assert "\n" not in str(info.value)
    needed = [f.name for f in dataclasses.fields(kind) if f.default is not None]
    if needed:
        del parsed[data.draw(st.sampled_from(needed))]
        with pytest.raises(StateError, match="has no "):
            record(kind, parsed, "file")
