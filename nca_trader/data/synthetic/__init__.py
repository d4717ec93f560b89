"""Synthetic markets by name: most have a known optimum, some are for stress."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

from nca_trader.config import EnvConfig
from nca_trader.config.ranges import nearest
from nca_trader.config.records import SHOWN, read_toml
from nca_trader.data.synthetic import closed_form, switching
from nca_trader.data.synthetic.market import Market, Path, Task, draw, seed_of
from nca_trader.errors import ConfigError

__all__ = ["MARKETS", "Market", "Path", "Task", "make", "market", "market_of", "seed_of", "task_of"]

MARKETS: dict[str, Callable[..., Market]] = {
    build.__name__: build
    for build in (
        switching.ou,
        switching.ar1,
        switching.markov_drift,
        closed_form.garleanu_pedersen,
        switching.sine,
        closed_form.martingale,
        closed_form.kelly,
        closed_form.merton,
        closed_form.ring,
        closed_form.lagged_ar,
        switching.hidden_level,
        closed_form.regime_switching,
        closed_form.jump,
        closed_form.garch,
    )
}


def market(name: str, **parameters: Any) -> Market:
    """Solve the market called `name` without drawing a path.

    Args:
      name: a key of `MARKETS`.
      **parameters: those of `MARKETS[name]`, whose docstring describes them.

    Raises:
      ConfigError: no such market or parameter, or a parameter out of range.

    Example:
      >>> market("martingale").optimum
      0.0
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
    """Draw a synthetic market.

    Args:
      name: a key of `MARKETS`.
      num_bars: N, at least 2.
      seed: of the draw.
      **parameters: those of `MARKETS[name]`.

    Returns:
      A `Task`: `.bars`, `.costs`, `.optimum` (the best average reward per step),
      `.optimal_policy`, and the other attributes of `Market`. The stress markets
      regime_switching, jump and garch have None as `.optimum` and `.optimal_policy`.

    Raises:
      ConfigError: no such market or parameter, or a value out of range.

    Example:
      >>> task = make("ou", phi=0.95, cost=0.0, num_bars=50)
      >>> len(task.bars), round(task.optimum, 6)
      (50, 0.001278)
    """
    return draw(market(name, **parameters), num_bars, seed)


def task_of(config: EnvConfig, seed: int = 0) -> Task:
    """Draw `config.market_bars` bars of the market that `config.market` names.

    Raises:
      ConfigError: see `market_of`; or the market has no such path.
    """
    return draw(market_of(config), config.market_bars, seed)


def market_of(config: EnvConfig) -> Market:
    """Solve the market that `config.market` names, e.g. "ou(phi=0.95, cost=0.005)".

    Raises:
      ConfigError: no name, or an unknown one; a parameter is unknown or out of range.
    """
    given = config.market
    if not given:
        raise ConfigError("no bars, and the environment names no market; give a bar file.")
    match = re.fullmatch(r"\s*(\w+)\s*(?:\((.*)\))?\s*", given, re.DOTALL)
    try:
        if match is None:
            raise ConfigError
        # The inside of a TOML inline table, so that values are written as everywhere in a config.
        parameters = read_toml(f"market = {{{match[2] or ''}}}", "market")["market"]
    except ConfigError:
        text = given if len(given) <= 2 * SHOWN else given[: 2 * SHOWN] + "..."
        raise ConfigError(
            f"market = {text!r} is not a market; write a name and its parameters, e.g. "
            "'ou(phi=0.95, cost=0.005)'."
        ) from None
    return market(match[1], **parameters)
