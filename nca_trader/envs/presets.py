"""Environments by name: the TOML files of `envs/`."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from nca_trader.presets import EnvConfig
from nca_trader.toml import read_preset


def load_env(name_or_path: str | pathlib.Path, overrides: Sequence[str] = ()) -> EnvConfig:
    """The environment of a preset's name or of a TOML file.

    Args:
      name_or_path: e.g. "index_daily", or the path of a .toml file.
      overrides: "table.key=value" strings, e.g. "costs.commission=1e-3".

    Raises:
      ConfigError: unknown name, unreadable file, or a line for each thing wrong in it.
    """
    return read_preset(EnvConfig, name_or_path, "envs", overrides)
