"""Experiments as data: TOML files to frozen dataclasses, and back.

An experiment is env x agent x data. `EnvConfig` and `AgentConfig` hold the first two; every
field has its default and its range in its own class. `nca_trader.config.toml` reads and writes
them. `nca_trader.envs.load_env` and `nca_trader.agents.load_agent` load them by
name.
"""

from nca_trader.config.account import AccountConfig
from nca_trader.config.agent import (
    MAX_NEIGHBOURS,
    AgentConfig,
    CheckpointConfig,
    MeshConfig,
    PolicyConfig,
    PopulationConfig,
    PrecisionConfig,
    SelectionConfig,
)
from nca_trader.config.env import DEFAULT_FEATURES, EnvConfig
from nca_trader.config.learning import CurriculumConfig, LearnerConfig, OptimizerConfig

__all__ = [
    "DEFAULT_FEATURES",
    "MAX_NEIGHBOURS",
    "AccountConfig",
    "AgentConfig",
    "CheckpointConfig",
    "CurriculumConfig",
    "EnvConfig",
    "LearnerConfig",
    "MeshConfig",
    "OptimizerConfig",
    "PolicyConfig",
    "PopulationConfig",
    "PrecisionConfig",
    "SelectionConfig",
]
