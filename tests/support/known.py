"""Markets whose optimum is known, each solved once for all tests."""

import functools

from nca_trader.markets.market import draw
from nca_trader.optimum.optima import synthetic

market_of = functools.cache(synthetic.market)


def make(name, num_bars=100_000, seed=0, **parameters):
    """The draw that `synthetic.make` returns."""
    return draw(market_of(name, **parameters), num_bars, seed)
