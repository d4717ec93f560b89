"""Backtest, train and paper-trade with neural cellular automata in JAX."""

import contextlib
import importlib
import os
import sys

# `python -m nca_trader` puts the current folder in front, where any file may have a module's name.
# In a checkout it is also the folder of this package.
with contextlib.suppress(FileNotFoundError):
    _asked = sys.argv[:1] == ["-m"] and any("nca_trader" in word for word in sys.orig_argv)
    if _asked and not sys.flags.safe_path:
        if not os.path.samefile(sys.path[0] or ".", f"{__path__[0]}/.."):
            del sys.path[0]

from typing import TYPE_CHECKING, Any

from nca_trader.envs import register
from nca_trader.errors import shorten_tracebacks
from nca_trader.machine import check_versions

if TYPE_CHECKING:
    from nca_trader.agents import load_agent as load_agent
    from nca_trader.agents.base import with_base as with_base
    from nca_trader.agents.cell_rule import cell_rule as cell_rule
    from nca_trader.agents.check import check_policy as check_policy
    from nca_trader.agents.policy import make_policy as make_policy
    from nca_trader.config import AccountConfig as AccountConfig
    from nca_trader.config import AgentConfig as AgentConfig
    from nca_trader.config import EnvConfig as EnvConfig
    from nca_trader.config.account import Limits as Limits
    from nca_trader.config.spans import Spans as Spans
    from nca_trader.config.spans import Training as Training
    from nca_trader.data.bars import read_bars as read_bars
    from nca_trader.data.bars import sample_bars as sample_bars
    from nca_trader.data.bars import write_bars as write_bars
    from nca_trader.data.calendar import Sessions as Sessions
    from nca_trader.data.calendar import flat_at_close as flat_at_close
    from nca_trader.data.calendar import new_york as new_york
    from nca_trader.data.calendar import session_ends as session_ends
    from nca_trader.data.indicators import indicator as indicator
    from nca_trader.data.resampling import align as align
    from nca_trader.data.resampling import resample as resample
    from nca_trader.envs import load_env as load_env
    from nca_trader.envs.account.exits import Order as Order
    from nca_trader.envs.account.exits import Portfolio as Portfolio
    from nca_trader.envs.actions import ActionScheme as ActionScheme
    from nca_trader.envs.check import check_env as check_env
    from nca_trader.envs.rewards import Reward as Reward
    from nca_trader.envs.trading import TradingEnv as TradingEnv
    from nca_trader.errors import BarError as BarError
    from nca_trader.errors import CheckFailed as CheckFailed
    from nca_trader.errors import ConfigError as ConfigError
    from nca_trader.errors import HaltError as HaltError
    from nca_trader.errors import NcaTraderError as NcaTraderError
    from nca_trader.errors import RunError as RunError
    from nca_trader.errors import StateError as StateError
    from nca_trader.evaluate.backtest import backtest as backtest
    from nca_trader.evaluate.evidence.selection import Selector as Selector
    from nca_trader.evaluate.lookahead.leakcheck import leakcheck as leakcheck
    from nca_trader.evaluate.report.page import report as report
    from nca_trader.evaluate.report.summary import Comparison as Comparison
    from nca_trader.evaluate.report.summary import compare as compare
    from nca_trader.evaluate.report.tables import report_folds as report_folds
    from nca_trader.evaluate.report.tables import report_sweep as report_sweep
    from nca_trader.evaluate.result import Result as Result
    from nca_trader.evaluate.sweep.sweep import sweep as sweep
    from nca_trader.evaluate.tune import tune as tune
    from nca_trader.evaluate.walkforward.walk import WalkForward as WalkForward
    from nca_trader.evaluate.walkforward.walk import walk_forward as walk_forward
    from nca_trader.learner.learner import make_learner as make_learner
    from nca_trader.learner.train import train as train
    from nca_trader.optimum.optima import synthetic as synthetic
    from nca_trader.optimum.prove import prove as prove
    from nca_trader.paper.check import check_broker as check_broker
    from nca_trader.paper.check import check_feed as check_feed
    from nca_trader.paper.feeds.fetch import fetch_bars as fetch_bars
    from nca_trader.paper.loaded import AgentStream as AgentStream
    from nca_trader.paper.loaded import LoadedAgent as LoadedAgent
    from nca_trader.paper.loaded import load as load
    from nca_trader.paper.session.trade import paper_trade as paper_trade
    from nca_trader.parallel.mesh import make_mesh as make_mesh
    from nca_trader.runs.manifest import Run as Run
    from nca_trader.runs.trials import trials as trials
    from nca_trader.scale.plan import plan as plan
    from nca_trader.strategies import rules as rules
    from nca_trader.strategies.blend import blend as blend
    from nca_trader.strategies.strategy import Strategy as Strategy
    from nca_trader.types import Bar as Bar
    from nca_trader.types import Bars as Bars
    from nca_trader.types import Costs as Costs
    from nca_trader.types import EnvSpec as EnvSpec

shorten_tracebacks()

__version__ = "0.3.0"

# Imported when first asked for: jax and pandas take seconds, which `nca-trader --help` need not.
_NAMES = {
    "agents": "load_agent",
    "agents.cell_rule": "cell_rule",
    "agents.base": "with_base",
    "strategies.blend": "blend",
    "agents.check": "check_policy",
    "agents.policy": "make_policy",
    "strategies.rules": "rules",
    "strategies.strategy": "Strategy",
    "config": "AgentConfig EnvConfig",
    "config.account": "Limits",
    "config.spans": "Spans Training",
    "data.bars": "read_bars sample_bars write_bars",
    "data.calendar": "Sessions flat_at_close new_york session_ends",
    "data.indicators": "indicator",
    "data.resampling": "align resample",
    "envs": "load_env",
    "envs.account.exits": "Order Portfolio",
    "envs.actions": "ActionScheme",
    "envs.check": "check_env",
    "envs.rewards": "Reward",
    "envs.trading": "TradingEnv",
    "errors": "BarError CheckFailed ConfigError HaltError NcaTraderError RunError StateError",
    "evaluate.backtest": "backtest",
    "evaluate.lookahead.leakcheck": "leakcheck",
    "evaluate.report.page": "report",
    "evaluate.report.tables": "report_folds report_sweep",
    "evaluate.report.summary": "Comparison compare",
    "evaluate.result": "Result",
    "evaluate.evidence.selection": "Selector",
    "evaluate.sweep.sweep": "sweep",
    "evaluate.tune": "tune",
    "evaluate.walkforward.walk": "WalkForward walk_forward",
    "learner.learner": "make_learner",
    "learner.train": "train",
    "optimum.prove": "prove",
    "optimum.optima.synthetic": "synthetic",
    "paper.check": "check_broker check_feed",
    "paper.feeds.fetch": "fetch_bars",
    "paper.loaded": "AgentStream LoadedAgent load",
    "paper.session.trade": "paper_trade",
    "parallel.mesh": "make_mesh",
    "runs.manifest": "Run",
    "runs.trials": "trials",
    "scale.plan": "plan",
    "types": "AccountConfig Bar Bars Costs EnvSpec",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
# For programs; type checkers take the imports above, which name each twice, as exports.
__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


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
