"""Agents by name: the TOML files of `agents/`."""

from __future__ import annotations

import os
from collections.abc import Sequence

from nca_trader.config import AgentConfig
from nca_trader.config.toml import read_preset


def load_agent(
    name_or_path: AgentConfig | str | os.PathLike[str],
    overrides: Sequence[str] = (),
    *,
    name: str = "",
) -> AgentConfig:
    """The agent of a preset's name or of a TOML file; a config is taken as it is.

    Args:
      name_or_path: e.g. "nano", or the path of a .toml file.
      overrides: "table.key=value" strings, e.g. "learner.num_epochs=2".
      name: of the caller's argument, for messages.

    Raises:
      ConfigError: unknown name, unreadable file, or a line for each thing wrong in it.
    """
    return read_preset(AgentConfig, name_or_path, "agents", overrides, name)
