"""Backtest, train and paper-trade with neural cellular automata in JAX."""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from nca_trader.envs import register
from nca_trader.errors import shorten_tracebacks
from nca_trader.machine import check_versions

if TYPE_CHECKING:
    from nca_trader.agents import load_agent, rules
    from nca_trader.agents.base import with_base
    from nca_trader.agents.blend import blend
    from nca_trader.agents.check import check_policy
    from nca_trader.agents.policy import make_policy
    from nca_trader.agents.strategy import Strategy
    from nca_trader.config import AccountConfig, AgentConfig, EnvConfig
    from nca_trader.config.account import Limits
    from nca_trader.config.spans import Spans, Training
    from nca_trader.data.bars import read_bars, sample_bars, write_bars
    from nca_trader.data.calendar import Sessions, flat_at_close, new_york, session_ends
    from nca_trader.data.indicators import indicator
    from nca_trader.data.resampling import align, resample
    from nca_trader.envs import load_env
    from nca_trader.envs.account.exits import Order, Portfolio
    from nca_trader.envs.check import check_env
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
    from nca_trader.evaluate.backtest import backtest
    from nca_trader.evaluate.comparison import Comparison, compare
    from nca_trader.evaluate.leakcheck import leakcheck
    from nca_trader.evaluate.report.page import report
    from nca_trader.evaluate.report.tables import report_folds, report_sweep
    from nca_trader.evaluate.result import Result
    from nca_trader.evaluate.selection import Selector
    from nca_trader.evaluate.sweep import sweep
    from nca_trader.evaluate.tune import tune
    from nca_trader.evaluate.walkforward.walk import WalkForward, walk_forward
    from nca_trader.learner.learner import make_learner
    from nca_trader.learner.train import train
    from nca_trader.optimum import synthetic
    from nca_trader.optimum.prove import prove
    from nca_trader.paper.check import check_broker, check_feed
    from nca_trader.paper.fetch import fetch_bars
    from nca_trader.paper.loaded import AgentStream, LoadedAgent, load
    from nca_trader.paper.session import paper_trade
    from nca_trader.parallel.mesh import make_mesh
    from nca_trader.runs.manifest import Run
    from nca_trader.runs.trials import trials
    from nca_trader.scale.plan import plan
    from nca_trader.types import Bar, Bars, Costs, EnvSpec

shorten_tracebacks()

__version__ = "0.3.0"

__all__ = [
    "AccountConfig",
    "AgentConfig",
    "AgentStream",
    "Bar",
    "BarError",
    "Bars",
    "CheckFailed",
    "Comparison",
    "ConfigError",
    "Costs",
    "EnvConfig",
    "EnvSpec",
    "HaltError",
    "Limits",
    "LoadedAgent",
    "NcaTraderError",
    "Order",
    "Portfolio",
    "Result",
    "Run",
    "RunError",
    "Selector",
    "Sessions",
    "Spans",
    "StateError",
    "Strategy",
    "TradingEnv",
    "Training",
    "WalkForward",
    "align",
    "backtest",
    "blend",
    "check_broker",
    "check_env",
    "check_feed",
    "check_policy",
    "compare",
    "fetch_bars",
    "flat_at_close",
    "indicator",
    "leakcheck",
    "load",
    "load_agent",
    "load_env",
    "make_learner",
    "make_mesh",
    "make_policy",
    "new_york",
    "paper_trade",
    "plan",
    "prove",
    "read_bars",
    "report",
    "report_folds",
    "report_sweep",
    "resample",
    "rules",
    "sample_bars",
    "session_ends",
    "sweep",
    "synthetic",
    "train",
    "trials",
    "tune",
    "walk_forward",
    "with_base",
    "write_bars",
]

# Imported when first asked for: jax and pandas take seconds, which `nca-trader --help` need not.
_NAMES = {
    "agents": "load_agent",
    "agents.base": "with_base",
    "agents.blend": "blend",
    "agents.check": "check_policy",
    "agents.policy": "make_policy",
    "agents.rules": "rules",
    "agents.strategy": "Strategy",
    "config": "AgentConfig EnvConfig",
    "config.account": "Limits",
    "config.spans": "Spans Training",
    "data.bars": "read_bars sample_bars write_bars",
    "data.calendar": "Sessions flat_at_close new_york session_ends",
    "data.indicators": "indicator",
    "data.resampling": "align resample",
    "envs": "load_env",
    "envs.account.exits": "Order Portfolio",
    "envs.check": "check_env",
    "envs.trading": "TradingEnv",
    "errors": "BarError CheckFailed ConfigError HaltError NcaTraderError RunError StateError",
    "evaluate.backtest": "backtest",
    "evaluate.comparison": "Comparison compare",
    "evaluate.leakcheck": "leakcheck",
    "evaluate.report.page": "report",
    "evaluate.report.tables": "report_folds report_sweep",
    "evaluate.result": "Result",
    "evaluate.selection": "Selector",
    "evaluate.sweep": "sweep",
    "evaluate.tune": "tune",
    "evaluate.walkforward.walk": "WalkForward walk_forward",
    "learner.learner": "make_learner",
    "learner.train": "train",
    "optimum.prove": "prove",
    "optimum.synthetic": "synthetic",
    "paper.check": "check_broker check_feed",
    "paper.fetch": "fetch_bars",
    "paper.loaded": "AgentStream LoadedAgent load",
    "paper.session": "paper_trade",
    "parallel.mesh": "make_mesh",
    "runs.manifest": "Run",
    "runs.trials": "trials",
    "scale.plan": "plan",
    "types": "AccountConfig Bar Bars Costs EnvSpec",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Return the public name, from the module that it lives in."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_versions()
    module = importlib.import_module(f"{__name__}.{_HOME[name]}")
    found = getattr(module, name, module)  # `rules`, `synthetic`: the module itself
    # Only next to jax, which takes longer to import than gymnasium: light names must stay light.
    if "jax" in sys.modules:
        register()
    globals()[name] = found  # the next access does not come here
    return found


# `import gymnasium, nca_trader` is enough for `gymnasium.make`, whatever is used of the package.
if "gymnasium" in sys.modules:
    register()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
