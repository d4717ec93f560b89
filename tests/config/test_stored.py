"""Everything that is stored is written and read by one mechanism, and reads back equal."""

import dataclasses
import itertools
import json
import typing

import pytest

from nca_trader.agents import load_agent
from nca_trader.config import AgentConfig, EnvConfig
from nca_trader.config.records import (
    Mismatch,
    convert,
    plain,
    record,
)
from nca_trader.config.toml import from_toml_text, preset_names, to_toml
from nca_trader.envs import load_env
from nca_trader.errors import ConfigError

PRESETS = [(folder, name) for folder in ("agents", "envs") for name in preset_names(folder)]


def both_ways(config):
    """Round-trips a config through TOML and through JSON."""
    kind = type(config)
    assert from_toml_text(kind, to_toml(config), "file") == config
    assert record(kind, json.loads(json.dumps(plain(config))), "file") == config


@pytest.mark.parametrize(("folder", "name"), PRESETS)
def test_a_preset_reads_back_equal(folder, name):
    both_ways(load_agent(name) if folder == "agents" else load_env(name))


# Values of each type of which every field accepts some.
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
