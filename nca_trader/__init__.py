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
_HOME = {
    "AccountConfig": "types",
    "AgentConfig": "config",
    "AgentStream": "paper.loaded",
    "Bar": "types",
    "BarError": "errors",
    "Bars": "types",
    "CheckFailed": "errors",
    "Comparison": "evaluate.comparison",
    "ConfigError": "errors",
    "Costs": "types",
    "EnvConfig": "config",
    "EnvSpec": "types",
    "HaltError": "errors",
    "Limits": "config.account",
    "LoadedAgent": "paper.loaded",
    "NcaTraderError": "errors",
    "Order": "envs.account.exits",
    "Portfolio": "envs.account.exits",
    "Result": "evaluate.result",
    "Run": "runs.manifest",
    "RunError": "errors",
    "Selector": "evaluate.selection",
    "Sessions": "data.calendar",
    "Spans": "config.spans",
    "StateError": "errors",
    "Strategy": "agents.strategy",
    "TradingEnv": "envs.trading",
    "Training": "config.spans",
    "WalkForward": "evaluate.walkforward.walk",
    "check_broker": "paper.check",
    "check_env": "envs.check",
    "check_feed": "paper.check",
    "check_policy": "agents.check",
    "align": "data.resampling",
    "backtest": "evaluate.backtest",
    "blend": "agents.blend",
    "compare": "evaluate.comparison",
    "fetch_bars": "paper.fetch",
    "flat_at_close": "data.calendar",
    "indicator": "data.indicators",
    "leakcheck": "evaluate.leakcheck",
    "load": "paper.loaded",
    "load_agent": "agents",
    "load_env": "envs",
    "make_learner": "learner.learner",
    "make_mesh": "parallel.mesh",
    "make_policy": "agents.policy",
    "new_york": "data.calendar",
    "paper_trade": "paper.session",
    "plan": "scale.plan",
    "prove": "optimum.prove",
    "read_bars": "data.bars",
    "report": "evaluate.report.page",
    "report_folds": "evaluate.report.tables",
    "report_sweep": "evaluate.report.tables",
    "resample": "data.resampling",
    "rules": "agents.rules",
    "sample_bars": "data.bars",
    "session_ends": "data.calendar",
    "sweep": "evaluate.sweep",
    "synthetic": "optimum.synthetic",
    "train": "learner.train",
    "trials": "runs.trials",
    "tune": "evaluate.tune",
    "walk_forward": "evaluate.walkforward.walk",
    "with_base": "agents.base",
    "write_bars": "data.bars",
}


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
