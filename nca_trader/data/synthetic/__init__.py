"""Markets made to measure: those whose optimum is known exactly, and some for stress."""

from nca_trader.data.synthetic.catalogue import MARKETS, make, market, market_of, task_of
from nca_trader.data.synthetic.market import Market, Path, Task, seed_of

__all__ = ["MARKETS", "Market", "Path", "Task", "make", "market", "market_of", "seed_of", "task_of"]
