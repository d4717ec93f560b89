"""Synthetic markets by name; `nca_trader.optimum` knows the best that can be earned there."""

# The first three define the markets, which `MARKETS` then holds.
from nca_trader.markets import closed_form as closed_form
from nca_trader.markets import harder as harder
from nca_trader.markets import switching as switching
from nca_trader.markets.market import MARKETS as MARKETS
from nca_trader.markets.market import SyntheticMarket as SyntheticMarket
from nca_trader.markets.market import Task as Task
from nca_trader.markets.market import market as market
from nca_trader.markets.market import market_of as market_of
from nca_trader.markets.market import seed_of as seed_of
from nca_trader.markets.market import task_of as task_of
