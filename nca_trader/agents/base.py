"""Base rules: a policy orders the target of a rule, moved by a bounded tilt that it learns.

    target = clip(base + tilt_limit * full position * tilt),    tilt in [-1, 1]

The last layer of such a policy starts at exactly 0, so an agent that has not learnt is its base,
trade for trade. The base is a column of the market: a rule remembers more bars than a policy's
receptive field, so it runs over all bars, in float64, before an account does.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pandas as pd
from jax import Array

from nca_trader.config import PolicyConfig
from nca_trader.config.agent import RULES as NAMES
from nca_trader.config.extensions import FORGET, call_named, load, own_code, terms_of
from nca_trader.config.ranges import describe
from nca_trader.envs.trading import TradingEnv, expect_env
from nca_trader.errors import ConfigError
from nca_trader.strategies import rules
from nca_trader.strategies.blend import blend
from nca_trader.strategies.strategy import Strategy, arguments_needed
from nca_trader.strategies.targets import has_exits, strategy_targets
from nca_trader.types import Bar, Bars, EnvSpec

RULES: dict[str, Callable[..., Strategy]] = {name: getattr(rules, name) for name in NAMES}


class Base(NamedTuple):
    """The base rule of a policy.

    Attributes:
      strategy: the rule as it is traded here, see `base_named`.
      init: `(num_assets) -> state`, before the first bar.
      update: `(state, bar) -> state, target [A]` at the close of `bar`.
      column: `(bars) -> [N, A]` float64, the same for all bars.
    """

    strategy: Strategy
    init: Callable[[int], Any]
    update: Callable[[Any, Bar], tuple[Any, Array]]
    column: Callable[[Bars], np.ndarray]


@functools.lru_cache(maxsize=64)
def strategy_named(name: str) -> Strategy:
    """Return the rule, or the sum of rules, that `[policy] base` names.

    Raises:
      ConfigError: there is none, it is not a strategy, or it sees its account.

    Example:
      >>> strategy_named("half_and_half(lookback=100)").name
      'half equal weight, half time-series momentum 100'
      >>> strategy_named("2/3 * equal_weight + 1/3 * momentum(lookback=50)").name
      '2/3 equal weight + 1/3 momentum 50'
    """
    terms = terms_of(name)
    if terms != [("", name)]:
        named = [(share, strategy_named(rule)) for share, rule in terms]
        for share, _ in named:
            if abs(Fraction(share)) > 10:
                raise ConfigError(f"policy.base = {name!r}: {share} is above 10; give a share.")
        called = " + ".join(f"{share} {rule.name}" for share, rule in named)
        parts = {f"rule-{i}": (x, float(Fraction(share))) for i, (share, x) in enumerate(named)}
        return blend(parts, order="on_change", name=called)
    bare, bracket, values = name.partition("(")
    if bare in RULES and bracket and not values.endswith(")"):
        raise ConfigError(f"policy.base = {name!r}: write values as in {bare}(lookback=100).")
    if bare in RULES:
        found: Any = call_named(RULES[bare], name, values.removesuffix(")") if bracket else "")
    else:
        found = load("strategies", name)
        if not isinstance(found, Strategy) and callable(found) and not arguments_needed(found):
            with own_code(name):
                found = found()
    if not isinstance(found, Strategy):
        raise ConfigError(
            f"policy.base = {name!r}: is {describe(found)}; name a Strategy, or a function that "
            "returns one and whose arguments all have values."
        )
    if found.sees_portfolio or found.runs:
        raise ConfigError(
            f"policy.base = {name!r}: sees its account, and a base is computed before any account "
            "trades; name a strategy of act(state, bar)."
        )
    return found


FORGET.append(strategy_named.cache_clear)


def base_of(spec: EnvSpec) -> Base | None:
    """Return the base of the policies of `spec`; None without one."""
    return None if spec.base == "none" else base_named(spec.base, spec.targets[0] < 0.0)


@functools.lru_cache(maxsize=64)
def base_named(name: str, short: bool) -> Base:
    """Return the base that `[policy] base` names.

    Where the rule gives no order its last target stands, and 0 before its first. It is at least 0
    where the environment does not short.
    """
    strategy = strategy_named(name)
    least = -np.inf if short else 0.0

    def init(num_assets: int) -> tuple[Any, Array]:
        return strategy.init(num_assets), jnp.zeros(num_assets)

    def update(state: tuple[Any, Array], bar: Bar) -> tuple[Any, Array]:
        inner, order = strategy.decide(state[0], bar, None)
        target = order.target * order.size
        last = jnp.where(jnp.isnan(target), state[1], target)
        return (inner, last), jnp.maximum(last, least)

    def column(bars: Bars) -> np.ndarray:
        if has_exits(bars, strategy):  # refuses those of a sum itself
            raise ConfigError(
                f"policy.base = {name!r}: its orders carry stops or targets, which a base "
                "cannot have; leave them out."
            )
        known = pd.DataFrame(strategy_targets(bars, strategy)).ffill().fillna(0.0)
        return np.maximum(known.to_numpy(), least)

    # Of a sum no part has an account of its own, so that the whole trades as one strategy.
    held = dataclasses.replace(strategy, init=init, act=lambda s, bar: update(s, bar), parts=())
    return Base(held, init, update, column)


FORGET.append(base_named.cache_clear)


def history_of(name: str) -> int:
    """Return how many bars of each asset a base needs, the newest included: its memory.

    Raises:
      ConfigError: it states none, so that only all bars would do.

    Example:
      >>> history_of("half_and_half(lookback=1764)"), history_of("none")
      (1765, 0)
    """
    memory = 0 if name == "none" else strategy_named(name).memory
    if memory is None:
        other = "train on a rule that does, e.g. half_and_half"
        remedy = "state how many as nca.Strategy(..., memory=BARS)" if ":" in name else other
        raise ConfigError(
            f"policy.base = {name!r}: does not end its memory after a known number of bars, and a "
            f"live feed has the last bars alone; {remedy}, or replay a file."
        )
    return memory


def spec_on_base(spec: EnvSpec, policy: PolicyConfig) -> EnvSpec:
    """Return `spec` with the base of `policy`; a policy without one leaves it as it is.

    Raises:
      ConfigError: actions are not weights, or `spec` has another base.
    """
    if policy.base == "none":
        if spec.base != "none":
            raise ConfigError(
                f"policy.base = 'none', but the environment's actions are tilts of {spec.base!r}; "
                "give the agent the same base, or the environment without it."
            )
        return spec
    if spec.actions != "weights":
        raise ConfigError(
            f"policy.base = {policy.base!r} is moved by weights, but the environment has actions = "
            f"{spec.actions!r}; set actions = 'weights', or policy.base = 'none'."
        )
    names = ("base", "tilt_limit", "tilt_penalty")
    return dataclasses.replace(spec, **{name: getattr(policy, name) for name in names})


def env_on_base(env: TradingEnv, policy: PolicyConfig) -> TradingEnv:
    """Return `env` as `policy` trades it; `env` itself where it is so already.

    Raises:
      ConfigError: as `spec_on_base` and `base_of`.
    """
    spec = spec_on_base(env.spec, policy)
    base = base_of(spec)
    return env if base is None or spec == env.spec else env.on_base(spec, base.column)


def with_base(
    env: TradingEnv, base: str | Strategy, tilt_limit: float = 0.5, tilt_penalty: float = 0.0
) -> TradingEnv:
    """Return `env` with tilts of a base rule as its actions, e.g. for Gymnasium.

    `nca.train` does this by itself for an agent with `[policy] base`.

    Args:
      env: of `actions = "weights"`.
      base: a rule's name, or a strategy of your own, see `PolicyConfig`.
      tilt_limit: of a tilt, in full positions.
      tilt_penalty: price of a tilt, see `PolicyConfig`.

    Raises:
      ConfigError: an argument is not valid; `env` has other actions; the strategy sees its account
        or orders exits.

    Example:
      >>> import nca_trader as nca
      >>> env = nca.TradingEnv(nca.sample_bars("sp500"), nca.EnvConfig(actions="weights"))
      >>> env = nca.with_base(env, "half_and_half", tilt_limit=0.25)
      >>> env.spec.base, env.spec.action_bounds
      ('half_and_half', (-1.0, 1.0))
    """
    expect_env(env, base=base)
    given: Any = base
    return env_on_base(
        env, PolicyConfig(base=given, tilt_limit=tilt_limit, tilt_penalty=tilt_penalty)
    )
