"""The agent of a run bar by bar, and as a strategy that decides on an account of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from nca_trader.agents.base import base_of
from nca_trader.config import AccountConfig, EnvConfig
from nca_trader.envs.account.exits import Order
from nca_trader.envs.market import feature_set_of
from nca_trader.envs.rewards import begin_account, remember
from nca_trader.numerics import float64_on_cpu
from nca_trader.strategies.blend import Own, move_account, order_on_account, own_account
from nca_trader.strategies.strategy import Strategy
from nca_trader.types import Bar, EnvSpec

if TYPE_CHECKING:
    from nca_trader.agents.policy import Params, Policy


class Inputs(NamedTuple):
    """What a run's agent computes of bars, online: its features and the target of its base rule.

    init: `(num_assets) -> state`, before the first bar. update: `(state, bar) -> state, features
    [A, F] float32, target [A]`; the target is () without a base rule. names: of the F features.
    """

    init: Callable[[int], Any]
    update: Callable[[Any, Bar], tuple[Any, Array, Any]]
    names: tuple[str, ...]


def inputs_of(config: EnvConfig, spec: EnvSpec) -> Inputs:
    """Return the inputs of an agent that was trained in this environment."""
    features, base = feature_set_of(config, spec.bar_seconds), base_of(spec)

    def init(num_assets: int) -> Any:
        with float64_on_cpu():
            return features.init(num_assets), () if base is None else base.init(num_assets)

    def update(state: Any, bar: Bar) -> tuple[Any, Array, Any]:
        inner, row = features.update(state[0], bar)
        followed, target = (state[1], ()) if base is None else base.update(state[1], bar)
        return (inner, followed), row, target

    return Inputs(init, update, tuple(features.names))


class Deciding(NamedTuple):
    """The memory of a run's agent.

    own: its account. inputs: of its features and its base rule. stream: of the policy. rows: bars
    seen. unfit: bars for which the stream still holds a feature that is not finite. decided:
    whether it has.
    """

    own: Own
    inputs: Any
    stream: Any
    rows: Array
    unfit: Array
    decided: Array


def deciding(
    name: str,
    inputs: Inputs,
    policy_of: Callable[[int], Policy],
    params: Params,
    rules: AccountConfig,
    memory: int,
) -> Strategy:
    """Return the strategy that decides as a run's agent does, on an account of its own.

    It streams bar by bar in place of encoding many bars at once, and its target is infinite where
    its numbers are not finite.

    Args:
      name: of the run.
      inputs: of the agent.
      policy_of: the policy of so many assets.
      params: of each policy.
      rules: of its account, complete.
      memory: bars on which a decision depends.
    """
    from nca_trader.agents.policy import decide_next  # imports Flax, 0.3 s

    def init(num_assets: int) -> Deciding:
        own, none = own_account(num_assets, rules), jnp.zeros((), bool)
        policy = policy_of(num_assets)
        own = own._replace(account=begin_account(policy.spec, own.account))
        count = jnp.zeros((), jnp.int32)
        return Deciding(own, inputs.init(num_assets), policy.begin(), count, count, none)

    def act(state: Deciding, bar: Bar, portfolio: Any) -> tuple[Deciding, Order]:
        policy = policy_of(len(bar.close))
        own, legs = move_account(state.own, bar, portfolio.trading, rules)
        kept, row, base = inputs.update(state.inputs, bar)
        # A NaN stays in the stream until the receptive field has passed over it.
        unfit = jnp.where(
            jnp.isfinite(row).all(), jnp.maximum(state.unfit - 1, 0), policy.receptive_field
        ).astype(jnp.int32)
        ready = portfolio.trading & (state.rows >= policy.first_decision)
        own = own._replace(account=remember(policy.spec, own.account, ~state.decided))
        account = own.account._replace(base=base)
        stream, logits, target = decide_next(
            policy, params, state.stream, row, jnp.asarray(bar.present), account
        )
        fit = jnp.isfinite(logits).all() & jnp.isfinite(target).all() & (unfit == 0)
        # What cannot be decided is not ordered on its account either.
        order = Order(jnp.where(ready & fit, target, jnp.nan).astype(jnp.float64))
        own, asked = order_on_account(own, order, bar, legs, rules)
        asked = jnp.where(ready & ~fit, jnp.inf, asked)
        decided = state.decided | ready
        return Deciding(own, kept, stream, state.rows + 1, unfit, decided), Order(asked)

    return Strategy(init, act, name, rules.order, memory=memory)
