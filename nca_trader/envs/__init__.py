"""Environments by name: the TOML files of `envs/`, and their ids in Gymnasium."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nca_trader.errors import ConfigError

if TYPE_CHECKING:
    from nca_trader.config import EnvConfig

ID = "nca_trader/Trading-v0"
FROZEN_ID = "nca_trader/{}-v1"
# Presets of markets whose optimum is known, each an id of its own; see `nca_trader.optimum.frozen`,
# which computes these digests. One that changes is another environment, of another version.
FROZEN = {
    "ou_mid": "9b3d7d2b8d5ba182392192226385bcbf5603937c59feb7450a96285fcffe20b1",
    "ou_log": "d69e0041cb4d78f81d7a23a0b55b3a824bd02fa436698cd9a9948d94d3e42d5c",
    "ou_expensive": "2306f1fdeeb623ebe9e5ce8bea01ff36e53ebe7285abadb92e17b01388955643",
    "ar1_weak": "19423efb70a0782b0cab66fb44b8e273c895820997d69ec641ccf1b341107a36",
    "hidden": "ad7ba17395517e88d0d9e7f928dd3156bf0ed3c2ded935a2ccc833abc6666794",
    "garleanu_pedersen": "df696724cb149c5071e82175e115d25445236f0fe285969a93f9f94a4180b469",
    "sine": "e52a941915f1d8bc93d7c0c4052cb44721075016aa495abd0b043c0950e228d7",
    "ring": "f79eb9c94ba90a4b898f63fdeb151b9e63a4b3044f43748f44f47123aff46879",
    "ring_hop3": "551ffd2111ad0c22481aa9b54088d983a769e91f06224ef9f76f0e4bfdc6a1a4",
    "lagged_ar": "0a0a87216a4684e0c3cab2470aeed00ef00df64f059b7e6f25ae96b5f172442e",
    "hidden_level": "64948411e096b012dc4cc8d388da5761e8b5f924c4c2f39fde3c123b34d62a9a",
    "kelly": "9d8c32a6abbedd0cad68d6ed207e0cb93a632e2667daabf0a5f548c2933aeaef",
    "merton": "31375ca04a122fbe0d2fd3cf79e1ee3c83c0ac223db444540a26336db94b7dc5",
    "factor_panel": "bc1bf4d91422fc4b4e058235fe2554cf37f57e85c908ff3d14b287e5e7360477",
    "moving_volatility": "cfb51f14a0241676b320544f5793631f504ed609125ce6d116297ce12522290d",
    "lead_lag": "2067d75fb3d63ef30070ee17dc463bb84b0f2e95be48ff08cc652e3c8591c63d",
    "martingale": "732ff8c94e4b69d26c4a4a8a87eb58b9d222064f3705548c9013c86c18b0685c",
}


def register() -> None:
    """Register every id with Gymnasium; a second call does nothing."""
    import gymnasium

    if ID in gymnasium.registry:
        return
    gymnasium.register(
        ID,
        entry_point="nca_trader.envs.gym.environment:GymEnv",
        vector_entry_point="nca_trader.envs.gym.vector:GymVectorEnv",
    )
    # As texts: this module is imported by `import nca_trader`, which must stay fast.
    for market, digest in FROZEN.items():
        gymnasium.register(
            FROZEN_ID.format(market),
            entry_point="nca_trader.optimum.frozen:FrozenEnv",
            vector_entry_point="nca_trader.optimum.frozen:FrozenVectorEnv",
            kwargs={"market": market, "digest": digest},
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
