"""Experiments as data: TOML files to frozen dataclasses, and back.

An experiment is env x agent x data. `EnvConfig` and `AgentConfig` hold the first two; every
field has its default and its range in its own class. `nca_trader.config.toml` reads and writes
them. `nca_trader.envs.load_env` and `nca_trader.agents.load_agent` load them by
name.
"""

from nca_trader.config.account import AccountConfig as AccountConfig
from nca_trader.config.agent import MAX_NEIGHBOURS as MAX_NEIGHBOURS
from nca_trader.config.agent import AgentConfig as AgentConfig
from nca_trader.config.agent import CheckpointConfig as CheckpointConfig
from nca_trader.config.agent import MeshConfig as MeshConfig
from nca_trader.config.agent import PolicyConfig as PolicyConfig
from nca_trader.config.agent import PopulationConfig as PopulationConfig
from nca_trader.config.agent import PrecisionConfig as PrecisionConfig
from nca_trader.config.agent import SelectionConfig as SelectionConfig
from nca_trader.config.env import DEFAULT_FEATURES as DEFAULT_FEATURES
from nca_trader.config.env import EnvConfig as EnvConfig
from nca_trader.config.learning import CurriculumConfig as CurriculumConfig
from nca_trader.config.learning import LearnerConfig as LearnerConfig
from nca_trader.config.learning import OptimizerConfig as OptimizerConfig
