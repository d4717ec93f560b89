"""The agent of a run as a strategy, which decides on an account of its own; see `agents.blend`."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from nca_trader.agents.base import base_of
from nca_trader.agents.heads import best_target
from nca_trader.agents.policy import read_out
from nca_trader.config import AccountConfig
from nca_trader.config.account import complete_account
from nca_trader.envs.account.exits import Order
from nca_trader.envs.account.risk import bars_of_size
from nca_trader.envs.market import feature_set_of
from nca_trader.envs.rewards import begun, remembered
from nca_trader.errors import ConfigError
from nca_trader.runs.universe import run_on
from nca_trader.strategies.blend import Own, moved, ordered, own_account
from nca_trader.strategies.strategy import Strategy
from nca_trader.types import Bar

if TYPE_CHECKING:
    from nca_trader.runs.manifest import Run


class Deciding(NamedTuple):
    """The memory of a run's agent.

    own: its account. features: of the feature set. stream: of the policy. rows: bars seen. unfit:
    bars for which the stream still holds a feature that is not finite. decided: whether it has.
    base: of its base rule, or ().
    """

    own: Own
    features: Any
    stream: Any
    rows: Array
    unfit: Array
    decided: Array
    base: Any = ()


def deciding(run: Run, given: AccountConfig) -> Strategy:
    """Return the strategy that decides as a run does, on an account of its own.

    It streams bar by bar in place of encoding many bars at once, and its target is infinite where
    its numbers are not finite. A baseline that trades in the agent's place is the strategy itself.

    Args:
      run: an agent's.
      given: of its account, in the place of the run's.

    Raises:
      ConfigError: it observes the state of a synthetic market, which no bars have.
    """
    if run.replacement is not None:
        return run.replacement
    if run.env_config.market and run.env_config.market_state:
        raise ConfigError(
            f"{run.path}: its agent observes the state of the market {run.env_config.market}, "
            "which bars do not have; blend one that was trained on bars alone."
        )
    rules = complete_account(given, run)
    features = feature_set_of(run.env_config, run.spec.bar_seconds)
    params = run.params()
    base = base_of(run.spec)

    @functools.lru_cache(maxsize=8)
    def policy_of(num_assets: int) -> Any:
        # A strategy knows the number of assets alone; their names are checked with the bars.
        named: Any = SimpleNamespace(symbols=tuple(map(str, range(num_assets))), source="")
        own = run.spec.num_assets == num_assets
        return (run if own else run_on(run, named)).policy

    def init(num_assets: int) -> Deciding:
        own, none = own_account(num_assets, rules), jnp.zeros((), bool)
        policy = policy_of(num_assets)
        own = own._replace(account=begun(policy.spec, own.account))
        count = jnp.zeros((), jnp.int32)
        followed = () if base is None else base.init(num_assets)
        begun_with = (features.init(num_assets), policy.begin(), count, count, none, followed)
        return Deciding(own, *begun_with)

    def act(state: Deciding, bar: Bar, portfolio: Any) -> tuple[Deciding, Order]:
        policy = policy_of(len(bar.close))
        own, legs = moved(state.own, bar, portfolio.trading, rules)
        kept, row = features.update(state.features, bar)
        stream, cells = policy.stream(params, state.stream, row, bar.present)
        # A NaN stays in the stream until the receptive field has passed over it.
        unfit = jnp.where(
            jnp.isfinite(row).all(), jnp.maximum(state.unfit - 1, 0), policy.receptive_field
        ).astype(jnp.int32)
        ready = portfolio.trading & (state.rows >= policy.first_decision)
        own = own._replace(account=remembered(policy.spec, own.account, ~state.decided))
        followed, account = state.base, own.account
        if base is not None:
            followed, target = base.update(followed, bar)
            account = account._replace(base=target)
        logits = read_out(policy, params, cells, account)
        target = best_target(policy.spec, logits, account, policy.ensemble)
        fit = jnp.isfinite(logits).all() & jnp.isfinite(target).all() & (unfit == 0)
        # What cannot be decided is not ordered on its account either.
        order = Order(jnp.where(ready & fit, target, jnp.nan).astype(jnp.float64))
        own, asked = ordered(own, order, bar, legs, rules)
        asked = jnp.where(ready & ~fit, jnp.inf, asked)
        decided = state.decided | ready
        after = Deciding(own, kept, stream, state.rows + 1, unfit, decided, followed)
        return after, Order(asked)

    memory = max(run.history, bars_of_size(rules.scale))
    return Strategy(init, act, run.name, rules.order, memory=memory)
