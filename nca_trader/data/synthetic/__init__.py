"""Markets made to measure: those whose optimum is known exactly, and some for stress."""

from nca_trader.data.synthetic.catalogue import MARKETS, make, market, task_of
from nca_trader.data.synthetic.market import Market, Path, Task

__all__ = ["MARKETS", "Market", "Path", "Task", "make", "market", "task_of"]
