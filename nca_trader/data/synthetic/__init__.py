"""Synthetic markets by name; `nca_trader.optimum` knows the best that can be earned there."""

# The first three define the markets, which `MARKETS` then holds.
from nca_trader.data.synthetic import closed_form, harder, switching
from nca_trader.data.synthetic.market import (
    MARKETS,
    SyntheticMarket,
    Task,
    market,
    market_of,
    seed_of,
    task_of,
)

__all__ = [
    "MARKETS",
    "SyntheticMarket",
    "Task",
    "closed_form",
    "harder",
    "market",
    "market_of",
    "seed_of",
    "switching",
    "task_of",
]
