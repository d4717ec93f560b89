"""Agents: policies, baselines and exported weights; `load_agent` reads their configs."""

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
    """Load an agent's config by the name of a preset or from a TOML file.

    Args:
      name_or_path: e.g. "nano", or the path of a .toml file; a config is returned as it is.
      overrides: "table.key=value" strings, e.g. "learner.num_epochs=2".
      name: the caller's argument, for messages.

    Returns:
      The config.

    Raises:
      ConfigError: an unknown name, an unreadable file, or one line for each error in it.

    Example:
      >>> load_agent("nano", ["learner.num_epochs=2"]).learner.num_epochs
      2
    """
    return read_preset(AgentConfig, name_or_path, "agents", overrides, name)
