"""A strategy next to the agent in the Gymnasium environment, in the same bars at the same costs."""

from __future__ import annotations

from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from nca_trader.agents.strategy import Strategy, sized_once
from nca_trader.agents.targets import (
    as_targets,
    refuse_no_targets,
    strategy_faults,
)
from nca_trader.config.ranges import expect
from nca_trader.envs.account import exits
from nca_trader.envs.account.state import equity, legs_of, open_account, rules_of
from nca_trader.envs.gym.environment import GymEnv
from nca_trader.evaluate.outputs import function_targets
from nca_trader.evaluate.simulate import strategy_step
from nca_trader.numerics import float64_on_cpu
from nca_trader.types import Bar


class WithBaseline(gymnasium.Wrapper):
    """Adds `info["baseline"]`, the equity of a strategy since the episode's start, 1.0 there.

    The strategy sees the bars before an episode, begins it flat, and trades at the costs and rules
    of the environment, as `nca.backtest(bars, strategy, start=...)` does. It has an account of its
    own: the agent's actions do not reach it.

    Example:
      >>> import nca_trader as nca
      >>> from nca_trader.envs.gym import GymEnv
      >>> env = WithBaseline(GymEnv("sp500"), nca.rules.sma_cross(10, 30))
      >>> _, info = env.reset(seed=0)
      >>> *_, info = env.step(env.action_space.sample())
      >>> sorted(info)
      ['baseline', 'equity', 'row', 'time', 'weights']
    """

    def __init__(self, env: gymnasium.Env, targets: Any):
        """Wrap an environment.

        Args:
          env: a `GymEnv`, in wrappers or not.
          targets: a `Strategy`, a function of bars, or `[N, A]` weights for the environment's bars.

        Raises:
          ConfigError: `env` is another environment, or `targets` is not a strategy.
          BarError: weights that do not fit the bars.
        """
        expect("env", getattr(env, "unwrapped", env), GymEnv, "a GymEnv, e.g. gymnasium.make(...)")
        super().__init__(env)
        # Beneath all wrappers: they may change what is seen, and not the bars.
        inner: Any = env.unwrapped
        trading = inner.trading
        bars, config = trading.bars, trading.config
        if not isinstance(targets, Strategy):
            refuse_no_targets(targets)
            decided = function_targets(bars, targets) if callable(targets) else targets
            targets = _written(as_targets(decided, bars))
        strategy, costs, rules = targets, config.costs, rules_of(config)
        num_assets = bars.num_assets
        # Of the strategy and not of the environment, as in a backtest of it.
        rules = rules._replace(order=strategy.order)
        if rules.scale is not None:
            strategy = sized_once(strategy, rules.scale.span)
        with float64_on_cpu():
            self._legs = jax.tree.map(jnp.asarray, legs_of(bars, costs, rules))
            # Time before an episode earns no interest.
            years = None if self._legs.years is None else jnp.zeros_like(self._legs.years)
            self._still = self._legs._replace(years=years)
            self._bars: Bar = jax.tree.map(jnp.asarray, bars.as_bar())
        self._strategy, self._all = strategy, bars
        never = jnp.full(num_assets, jnp.nan)

        def begin(bars: Bar, row: Array) -> Any:
            """Return what trading begins with at the close of `row`, and its first order."""
            account = open_account(jnp.zeros(num_assets, jnp.float64), rules)
            book = exits.open_book(num_assets, jnp.float64)
            flat = exits.portfolio(account, book, trading=False)

            def warm(k: Array, carry: Any) -> Any:
                state, last = carry
                state, order = strategy.decide(state, jax.tree.map(lambda x: x[k], bars), flat)
                return state, jnp.where(jnp.isnan(order.target), last, order.target)

            start = (strategy.init(num_assets), never.astype(jnp.float64))
            # A loop and no scan: the number of bars before an episode differs from one to the
            # next.
            state, last = jax.lax.fori_loop(0, row, warm, start)
            return (account, book, state), last

        def step(legs: Any, bars: Bar, row: Array, carry: Any, held_over: Array) -> Any:
            now, bar = jax.tree.map(lambda x: x[row], (legs, bars))
            carry, _ = strategy_step(carry, now, bar, strategy, costs, rules, held_over)
            return carry, equity(carry[0])

        self._begin, self._step, self._never = jax.jit(begin), jax.jit(step), never
        self._carry: Any = None

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        """Start an episode, and the strategy's account with it."""
        seen, info = self.env.reset(**options)
        row = info["row"]
        with float64_on_cpu(), strategy_faults(self._all, self._strategy):
            carry, last = self._begin(self._bars, row)
            # Before the first close the account is flat, so that this bar moves nothing in it.
            self._carry, _ = self._step(self._still, self._bars, row, carry, last)
        return seen, info | {"baseline": 1.0}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the environment, and move the strategy's account through the same bar."""
        seen, reward, terminated, truncated, info = self.env.step(action)
        with float64_on_cpu():
            self._carry, worth = self._step(
                self._legs, self._bars, info["row"], self._carry, self._never
            )
        return seen, reward, terminated, truncated, info | {"baseline": float(worth)}


def _written(targets: np.ndarray) -> Strategy:
    """Return a strategy that orders row t of `targets` `[N, A]` at bar t, each number an order."""
    with float64_on_cpu():
        rows = jnp.asarray(targets)
    return Strategy(
        lambda num_assets: jnp.zeros((), jnp.int32),
        lambda row, bar: (row + 1, rows[row]),
        "targets",
        "rebalance",
    )
