"""Environments by name: the TOML files of `envs/`, and their id in Gymnasium."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nca_trader.errors import ConfigError

if TYPE_CHECKING:
    from nca_trader.config import EnvConfig

ID = "nca_trader/Trading-v0"


def register() -> None:
    """Register the environment with Gymnasium; a second call does nothing."""
    import gymnasium

    if ID not in gymnasium.registry:
        gymnasium.register(
            ID,
            entry_point="nca_trader.envs.gym.environment:GymEnv",
            vector_entry_point="nca_trader.envs.gym.vector:GymVectorEnv",
        )


def load_env(
    name_or_path: EnvConfig | str | os.PathLike[str],
    overrides: Sequence[str] = (),
    *,
    name: str = "",
) -> EnvConfig:
    """Load an environment's config from a preset or a TOML file.

    Args:
      name_or_path: a preset's name, e.g. "index_daily", or the path of a .toml file. An
        `EnvConfig` is returned as it is.
      overrides: "table.key=value" strings, e.g. "costs.commission=1e-3".
      name: the name of the caller's argument, for messages.

    Returns:
      The config, with every feature's name checked.

    Raises:
      ConfigError: an unknown name or feature, an unreadable file, or every error in the file, one
        per line.

    Example:
      >>> import nca_trader as nca
      >>> nca.load_env("index_daily", ["costs.commission=1e-3"]).costs.commission
      0.001
    """
    # `import nca_trader` imports this module, and must stay fast.
    from nca_trader.config import EnvConfig
    from nca_trader.config.toml import read_preset

    config = read_preset(EnvConfig, name_or_path, "envs", overrides, name)
    # jax takes seconds to import. Errors in the file itself are raised before.
    from nca_trader.data.features import refuse_unknown

    try:
        refuse_unknown(config.features)
    except ConfigError as error:
        source = "EnvConfig" if isinstance(name_or_path, EnvConfig) else name_or_path
        raise ConfigError(f"{source}: features: {error}") from None
    return config
