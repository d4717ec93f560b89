"""Loads what `--strategy` names: a rule, or a member of the user's own file, which is run."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nca_trader.agents.base import RULES
from nca_trader.agents.strategy import Strategy, arguments_needed
from nca_trader.config.account import PLAIN
from nca_trader.config.extensions import load, module_of, origin_of
from nca_trader.config.ranges import nearest
from nca_trader.data.features import Feature, refuse_unknown
from nca_trader.envs.account.costs import SIZES, Trade, own_rates
from nca_trader.envs.account.state import legs_of
from nca_trader.errors import ConfigError, user_line
from nca_trader.evaluate.combinations import check_parameters
from nca_trader.numerics import float64_on_cpu
from nca_trader.types import Bars, Costs


def subject_of(name: str, params: Mapping[str, Any] | None = None) -> Any:
    """Return the strategy, function of bars or feature that a command names.

    Args:
      name: a rule, "feature:NAME", "cost:NAME", or "FILE.py:NAME"; the file is imported, so its
        code runs.
      params: of a rule, of a function that returns a strategy, or of a function of bars.

    Returns:
      A `Strategy`, a `Feature`, the name of a feature, or a function that takes bars alone.

    Raises:
      ConfigError: there is no such rule, file or name; a parameter that it does not have; a member
        that is not a strategy.
    """
    if name.startswith("feature:"):
        refuse_unknown((name.removeprefix("feature:"),))
        return name.removeprefix("feature:")
    if name.startswith("cost:"):
        return functools.partial(cost_rates, name.removeprefix("cost:"))
    if name.startswith(("reward:", "actions:")):
        raise ConfigError(f"{name}: is one step, and no function of bars; nca.check_env judges it.")
    return built(member_of(name), name, params or {})


def cost_rates(name: str, bars: Bars) -> np.ndarray:
    """Return `[N, S, A]` the rates of your own cost for trades of S sizes at each bar's open."""
    costs, money = Costs(own=(name,)), 1e6
    rules = dataclasses.replace(PLAIN, costs=costs, capital=money)
    legs = legs_of(bars, rules)  # refuses what is not a cost
    sizes = np.array([*SIZES, *(-size for size in SIZES)])
    quoted = np.zeros(legs.overnight.shape) if legs.half_spread is None else legs.half_spread
    price, volume = jnp.asarray(legs.open), jnp.asarray(legs.volume)

    def rates(size: Any, price: Any, volume: Any, quoted: Any) -> Any:
        traded = jnp.full(price.shape, size)
        return own_rates(Trade(traded, price, volume, quoted, jnp.asarray(money)), costs)[0]

    with float64_on_cpu():
        of_sizes = jax.vmap(rates, in_axes=(0, None, None, None))
        found = jax.vmap(of_sizes, in_axes=(None, 0, 0, 0))(sizes, price, volume, quoted)
    # No trade fills in a bar that is missing.
    return np.where(np.asarray(legs.present)[:, None], np.asarray(found), np.nan)


def member_of(name: str) -> Any:
    """Return the rule, or the member of the user's file, that `name` stands for, as it is.

    Raises:
      ConfigError: there is no such rule, file or member.
    """
    if name in RULES:
        return RULES[name]
    file, _, member = name.rpartition(":")
    if name.endswith(".py"):
        file, member = name, ""
    if not file.endswith(".py"):
        if origin_of("strategies", name) is None:
            raise ConfigError(
                f"{name}: no such rule; {nearest(name, RULES)}There are {', '.join(RULES)}; "
                "FILE.py:NAME or module:name is your own."
            )
        return load("strategies", name)
    module = module_of(file)
    if member in vars(module):
        return getattr(module, member)
    subjects = [
        key
        for key, value in vars(module).items()
        if isinstance(value, Strategy | Feature)
        # Functions that the file imports are left out.
        or (inspect.isfunction(value) and value.__module__ == module.__name__)
    ]
    what = f"no {member!r} there; {nearest(member, subjects)}" if member else "which of its names? "
    there = f"There are {', '.join(subjects)}." if subjects else "It defines no function."
    raise ConfigError(f"{file}: {what}{there} Write {file}:NAME.")


def built(member: Any, where: str, params: Mapping[str, Any]) -> Any:
    """Return what backtests take of a member: a strategy, a feature, or a function of bars.

    A function whose parameters all have values is called, and returns a strategy or a feature; one
    that lacks a single argument takes bars.

    Args:
      member: of `member_of`.
      where: its name, for messages.
      params: values of parameters, by name.

    Raises:
      ConfigError: see `subject_of`.
    """
    if isinstance(member, Strategy | Feature):
        if params:
            raise ConfigError(
                f"{where}: is a {type(member).__name__} and takes no parameters; name the function "
                "that returns it."
            )
        return member
    # A class can be called too, but returns an object of its own.
    if not callable(member) or isinstance(member, type):
        raise ConfigError(
            f"{where}: a {type(member).__name__} is not a strategy; name a function of bars, a "
            "Strategy or a Feature."
        )
    check_parameters(where, member, params)
    function = functools.partial(member, **params)
    needed = arguments_needed(function)
    if needed == 1:
        # Its name and file stay those of the function, by which results and trials know it.
        return functools.update_wrapper(function, member)
    if needed:
        raise ConfigError(
            f"{where}: lacks {needed} arguments; a function of bars takes one, so give the others "
            "as parameters, or defaults."
        )
    try:
        strategy = function()
    except ConfigError:
        raise  # a rule says itself what is wrong
    except (Exception, SystemExit) as error:
        what = f"{type(error).__name__} at {user_line(error)}: {' '.join(str(error).split())}"
        raise ConfigError(f"{where}: it can't be built ({what}); repair that.") from None
    if not isinstance(strategy, Strategy | Feature):
        raise ConfigError(
            f"{where}: takes no bars and returns a {type(strategy).__name__}; let it take bars, or "
            "return a Strategy or a Feature."
        )
    return strategy
