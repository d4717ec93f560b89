"""Backtest, train and paper-trade with neural cellular automata in JAX."""

from nca_trader.agents import rules
from nca_trader.agents.policy import make_policy
from nca_trader.agents.presets import load_agent
from nca_trader.agents.rules import Strategy
from nca_trader.data.bars import read_bars, write_bars
from nca_trader.data.samples import sample_bars
from nca_trader.envs.presets import load_env
from nca_trader.envs.trading import TradingEnv
from nca_trader.errors import (
    BarError,
    CheckFailed,
    ConfigError,
    HaltError,
    NcaTraderError,
    RunError,
    StateError,
)
from nca_trader.evaluate.backtest import Result, backtest
from nca_trader.learner.train import train
from nca_trader.learner.update import make_learner
from nca_trader.mesh import make_mesh
from nca_trader.presets import AgentConfig, EnvConfig
from nca_trader.runs.manifest import Run
from nca_trader.types import Bar, Bars, Costs, EnvSpec

__version__ = "0.1.0"

__all__ = [
    "AgentConfig",
    "Bar",
    "BarError",
    "Bars",
    "CheckFailed",
    "ConfigError",
    "Costs",
    "EnvConfig",
    "EnvSpec",
    "HaltError",
    "NcaTraderError",
    "Result",
    "Run",
    "RunError",
    "StateError",
    "Strategy",
    "TradingEnv",
    "backtest",
    "load_agent",
    "load_env",
    "make_learner",
    "make_mesh",
    "make_policy",
    "read_bars",
    "rules",
    "sample_bars",
    "train",
    "write_bars",
]
