"""Synthetic markets by name."""

from __future__ import annotations

import inspect
import re
from typing import Any

from nca_trader.config import EnvConfig
from nca_trader.config.ranges import nearest
from nca_trader.config.records import SHOWN, read_toml
from nca_trader.data.synthetic import growth, linear, memory, stress
from nca_trader.data.synthetic.market import Market, Task, draw
from nca_trader.errors import ConfigError

MARKETS = {
    build.__name__: build
    for build in (
        linear.ou,
        linear.ar1,
        linear.markov_drift,
        growth.garleanu_pedersen,
        linear.sine,
        linear.martingale,
        growth.kelly,
        growth.merton,
        linear.ring,
        memory.lagged_ar,
        memory.hidden_level,
        stress.regime_switching,
        stress.jump,
        stress.garch,
    )
}


def market(name: str, **parameters: Any) -> Market:
    """The market called `name`, solved but not drawn; `MARKETS[name]` documents its parameters.

    Raises:
      ConfigError: no such market or parameter, or a parameter out of range.
    """
    if name not in MARKETS:
        raise ConfigError(
            f"no synthetic market '{name}'; {nearest(str(name), MARKETS)}There are "
            f"{', '.join(MARKETS)}."
        )
    known = inspect.signature(MARKETS[name]).parameters
    for unknown in parameters.keys() - known.keys():
        raise ConfigError(
            f"the market '{name}' has no parameter '{unknown}'; {nearest(unknown, known)}It has "
            f"{', '.join(known)}."
        )
    return MARKETS[name](**parameters)


def make(name: str, *, num_bars: int = 100_000, seed: int = 0, **parameters: Any) -> Task:
    """A synthetic market and `num_bars` bars of it: `make("ou", phi=0.95, cost=0.002)`.

    Returns:
      A `Task`: `.bars`, `.costs`, `.optimum` (the best average reward a step), `.optimal_policy`,
      and what else `Market` lists. Of the stress markets regime_switching, jump and garch,
      `.optimum` and `.optimal_policy` are None.

    Raises:
      ConfigError: no such market or parameter, or a value out of range.
    """
    return draw(market(name, **parameters), num_bars, seed)


def task_of(config: EnvConfig, seed: int = 0) -> Task:
    """The market that `config.market` names, and `config.market_bars` bars of it.

    Raises:
      ConfigError: see `market_of`; or the market has no such path.
    """
    return draw(market_of(config), config.market_bars, seed)


def market_of(config: EnvConfig) -> Market:
    """The market that `config.market` names, solved but not drawn.

    Raises:
      ConfigError: it names none, or one that is not known; a parameter is unknown or out of range.
    """
    if not config.market:
        raise ConfigError("no bars, and the environment names no market; give a bar file.")
    match = re.fullmatch(r"\s*(\w+)\s*(?:\((.*)\))?\s*", config.market, re.DOTALL)
    if match is None:
        raise _unread(config.market)
    name, given = match[1], match[2] or ""
    try:
        # The inside of an inline table: names, numbers, true and false as everywhere in TOML.
        parameters = read_toml(f"market = {{{given}}}", "market")["market"]
    except ConfigError:
        raise _unread(config.market) from None
    return market(name, **parameters)


def _unread(text: str) -> ConfigError:
    text = text if len(text) <= 2 * SHOWN else text[: 2 * SHOWN] + "..."
    return ConfigError(
        f"market = {text!r} is not a market; write a name and its parameters, e.g. "
        "'ou(phi=0.95, cost=0.005)'."
    )
