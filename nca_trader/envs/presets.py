"""Environments by name: the TOML files of `envs/`."""

from __future__ import annotations

import os
from collections.abc import Sequence

from nca_trader.config import EnvConfig
from nca_trader.config.toml import read_preset
from nca_trader.errors import ConfigError


def load_env(
    name_or_path: EnvConfig | str | os.PathLike[str],
    overrides: Sequence[str] = (),
    *,
    name: str = "",
) -> EnvConfig:
    """The environment of a preset's name or of a TOML file; a config is taken as it is.

    Args:
      name_or_path: e.g. "index_daily", or the path of a .toml file.
      overrides: "table.key=value" strings, e.g. "costs.commission=1e-3".
      name: of the caller's argument, for messages.

    Raises:
      ConfigError: unknown name or feature, unreadable file, or a line for each thing wrong in it.
    """
    config = read_preset(EnvConfig, name_or_path, "envs", overrides, name)
    # jax is slow to import: what is wrong in the file itself has been said before.
    from nca_trader.data.features import feature_set

    try:
        feature_set(config.features)
    except ConfigError as error:
        source = "EnvConfig" if isinstance(name_or_path, EnvConfig) else name_or_path
        raise ConfigError(f"{source}: features: {error}") from None
    return config
