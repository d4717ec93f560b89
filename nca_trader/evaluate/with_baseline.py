"""A strategy next to the agent in the Gymnasium environment, in the same bars at the same costs."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from nca_trader.agents.blend import alone
from nca_trader.agents.strategy import Strategy, sized_once
from nca_trader.agents.targets import (
    as_targets,
    refuse_no_targets,
    strategy_faults,
)
from nca_trader.config.ranges import expect
from nca_trader.envs.account import exits
from nca_trader.envs.account.state import equity, open_account, rules_of
from nca_trader.envs.gym.environment import GymEnv
from nca_trader.evaluate.outputs import function_targets
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
        # Taken from below all wrappers, which may change observations but not the bars.
        inner: Any = env.unwrapped
        trading = inner.trading
        bars, config = trading.bars, trading.config
        if not isinstance(targets, Strategy):
            refuse_no_targets(targets)
            decided = function_targets(bars, targets) if callable(targets) else targets
            targets = _written(as_targets(decided, bars))
        # The order is the strategy's and not the environment's, as in a backtest of it.
        rules = rules_of(config)._replace(order=targets.order)
        strategy = targets if rules.scale is None else sized_once(targets, rules.scale.span)
        own = alone(strategy, config.costs, rules)
        with float64_on_cpu():
            self._bars: Bar = jax.tree.map(jnp.asarray, bars.as_bar())
            flat = open_account(jnp.zeros(bars.num_assets, jnp.float64))
            book = exits.open_book(bars.num_assets, jnp.float64)
        self._strategy, self._all = strategy, bars

        def closed(state: Any, bars: Bar, row: Array, trading: bool) -> Any:
            """Return the state after one more bar."""
            bar, seen = jax.tree.map(lambda x: x[row], bars), exits.portfolio(flat, book, trading)
            return own.decide(state, bar, seen)[0]

        def begin(bars: Bar, row: Array) -> Any:
            """Return the state at the close of `row`, where the account opens."""
            # A loop takes the place of a scan: each episode has another number of bars before it.
            start = jax.tree.map(jnp.asarray, own.init(flat.weight.size))
            before = jax.lax.fori_loop(0, row, lambda k, s: closed(s, bars, k, False), start)
            return closed(before, bars, row, True)

        self._begin = jax.jit(begin)
        self._step = jax.jit(functools.partial(closed, trading=True))
        self._state: Any = None

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        """Start an episode, and the strategy's account with it."""
        seen, info = self.env.reset(**options)
        with float64_on_cpu(), strategy_faults(self._all, self._strategy):
            self._state = self._begin(self._bars, info["row"])
        return seen, info | {"baseline": 1.0}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the environment, and move the strategy's account through the same bar."""
        seen, reward, terminated, truncated, info = self.env.step(action)
        with float64_on_cpu():
            self._state = self._step(self._state, self._bars, info["row"])
            worth = equity(self._state[1].account)
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
