"""Fresh paths of a market, all played at once, and what an agent from outside earns on them.

Each path is a draw of its own: pieces of one path would show an agent the future of other pieces.
An agent sees what the Gymnasium environment of the market shows with a window of one bar.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from nca_trader.config import EnvConfig
from nca_trader.envs.account.state import Account, BarReturns
from nca_trader.envs.actions import every_action
from nca_trader.envs.gym.packed import account_row
from nca_trader.envs.market import Dynamics
from nca_trader.envs.trading import Episode, Observation, TradingEnv, transition
from nca_trader.markets import SyntheticMarket, Task, task_of
from nca_trader.optimum.measure import (
    CELLS,
    COUNTED,
    WARM,
    Earnings,
    earnings_of,
    flat_episodes,
    optimal_positions,
    ordered_by,
    rows_of,
)

HISTORY = 4096  # bars before the first decision: the levels are measured from as many
PATHS, LEAST = 64, 32  # paths at most; pieces at least
LONE_PATHS = 16  # of the control without neighbours, which plays each asset by itself

Decide = Callable[[np.ndarray], np.ndarray]


class Paths(NamedTuple):
    """B paths of a market, with L bars of decisions each.

    Attributes:
      task: their states and returns, one path after the other.
      rows: `[P, WARM + COUNTED]` rows of the task; those of a path's pieces follow each other.
      features: `[L, B, A F]` float32.
      legs: `[L + 1, B, A]` returns and prices.
      dynamics: static.
    """

    task: Task
    rows: np.ndarray
    features: np.ndarray
    legs: BarReturns
    dynamics: Dynamics

    def first(self, count: int) -> Paths:
        """Return the first `count` paths alone."""
        each = len(self.rows) // self.features.shape[1]
        legs = jax.tree.map(lambda leg: leg[:, :count], self.legs)
        return self._replace(
            rows=self.rows[: count * each], features=self.features[:, :count], legs=legs
        )


def draw_paths(market: SyntheticMarket, config: EnvConfig, seed: int) -> Paths:
    """Draw the paths of an evaluation.

    Args:
      market: with its optimum.
      config: of its environment.
      seed: of all draws, a whole number of any size.
    """
    num_pieces = max(CELLS // (COUNTED * market.num_assets), LEAST)
    count = min(num_pieces, PATHS)
    each = num_pieces // count
    num_pieces = count * each
    length = WARM + each * COUNTED
    config = dataclasses.replace(config, market_bars=HISTORY + length + 1)
    # 63 bits each: no table of their first returns can be made.
    seeds = np.random.SeedSequence(seed).generate_state(count, np.uint64) >> 1
    envs = [TradingEnv(task_of(config, int(one), market), config) for one in seeds]
    tasks = [env.task for env in envs if env.task is not None]
    features = np.stack([env.features[HISTORY:-1] for env in envs], axis=1)
    legs = jax.tree.map(
        lambda *legs: jnp.stack([leg[HISTORY:] for leg in legs], axis=1),
        *(env.market.legs for env in envs),
    )
    # Ranks of neighbours differ from path to path, and no step reads them.
    spec = dataclasses.replace(envs[0].spec, nearest=())
    states, returns = (
        np.concatenate([getattr(task, name) for task in tasks]) for name in ("states", "returns")
    )
    known = {"optimum": market.optimum, "optimal_policy": market.optimal_policy}
    first = HISTORY + config.market_bars * np.arange(count)
    return Paths(
        task=dataclasses.replace(tasks[0], states=states, returns=returns, **known),
        rows=(first[:, None, None] + rows_of(each)).reshape(num_pieces, -1),
        features=features.reshape(length, count, -1),
        legs=legs,
        dynamics=envs[0].dynamics._replace(spec=spec),
    )


def judge(paths: Paths, ordered: np.ndarray) -> Earnings:
    """Judge weights `[L, B, A]` that were ordered along the paths."""
    length, count, assets = ordered.shape
    # A path is followed from its beginning; its pieces are cut out of it.
    cut = rows_of((length - WARM) // COUNTED)
    pieces = np.moveaxis(ordered[cut], 2, 0).reshape(-1, cut.shape[1], assets)
    assert len(pieces) == len(paths.rows) == count * len(cut)
    return earnings_of(paths.task, paths.rows, np.asarray(pieces, np.float64))


def play(paths: Paths, decide: Decide) -> np.ndarray:
    """Step all accounts bar by bar, and return the weights `[L, B, A]` that they ordered.

    Args:
      paths: to play.
      decide: `(observations [B, D] float32) -> actions [B, A]`, called once a bar.
    """
    length, count, _ = paths.features.shape
    assets = paths.task.num_assets
    ordered = np.empty((length, count, assets), np.float32)
    episodes = flat_episodes(paths.dynamics, count)
    account = _accounts(paths.dynamics, episodes)
    for bar in range(length):
        seen = np.concatenate([paths.features[bar], np.asarray(account)], axis=1)
        action = decide(seen)
        episodes, account, now = _step(paths.dynamics, paths.legs, episodes, action, bar)
        ordered[bar] = np.asarray(now)
    return ordered


def follow(paths: Paths, actions: np.ndarray) -> np.ndarray:
    """Return the weights `[L, B, A]` that actions `[L, B, A]` order, which are known beforehand."""
    return np.asarray(_follow(paths.dynamics, paths.legs, actions))


@functools.partial(jax.jit, static_argnums=0)
def _step(
    dynamics: Dynamics, legs: BarReturns, episodes: Episode, action: Array, bar: int
) -> tuple[Episode, Array, Array]:
    now, following = (jax.tree.map(lambda leg, at=at: leg[at], legs) for at in (bar, bar + 1))
    move = jax.vmap(functools.partial(transition, dynamics))
    ordered = jax.vmap(functools.partial(ordered_by, dynamics))(episodes, action)
    episodes, _ = move(episodes, action, now, following)
    return episodes, _accounts(dynamics, episodes), ordered


@functools.partial(jax.jit, static_argnums=0)
def _follow(dynamics: Dynamics, legs: BarReturns, actions: Array) -> Array:
    def step(episodes: Episode, given: tuple[Array, Array]) -> tuple[Episode, Array]:
        action, bar = given
        episodes, _, ordered = _step(dynamics, legs, episodes, action, bar)
        return episodes, ordered

    bars = jnp.arange(len(actions))
    return jax.lax.scan(step, flat_episodes(dynamics, actions.shape[1]), (actions, bars))[1]


def _accounts(dynamics: Dynamics, episodes: Episode) -> Array:
    def one(account: Account) -> Array:
        return account_row(dynamics.spec, Observation(jnp.zeros((), jnp.int32), account))

    return jax.vmap(one)(episodes.account).astype(jnp.float32)


def simple_controls(paths: Paths, seed: int) -> dict[str, Earnings]:
    """Judge cash, random actions, and the best of actions that never change.

    The last is left out where the optimal policy never changes either.
    """
    spec = paths.dynamics.spec
    shape = (*paths.features.shape[:2], spec.num_assets)
    drawn = np.random.default_rng(np.random.SeedSequence(seed).spawn(1)[0])
    if spec.num_actions:
        random = drawn.integers(0, spec.num_actions, shape, np.int32)
    else:
        random = drawn.uniform(*spec.action_bounds, shape).astype(np.float32)
    found = {
        "cash": judge(paths, np.zeros(shape, np.float32)),
        "random": judge(paths, follow(paths, random)),
    }
    if np.ptp(optimal_positions(paths.task, paths.rows[:1]), axis=1).max() > 1e-9:
        each = [np.full(shape, action) for action in np.asarray(every_action(spec))]
        held = [judge(paths, follow(paths, actions)) for actions in each]
        found["constant"] = max(held, key=lambda one: one.earned)
    return found


def alone(decide: Decide, num_assets: int, num_features: int) -> Decide:
    """Return the decisions of an agent that sees each asset among those of another path.

    Row (b, i) of what `decide` gets has asset i's features and weights of path b, and all other
    assets' of path b + 1; only its action for asset i counts.

    Args:
      decide: for `[B A, D]` observations.
      num_assets: A.
      num_features: F.
    """
    each, begin = np.arange(num_assets), num_assets * num_features
    held, cash = begin + each, begin + 2 * num_assets

    def act(observations: np.ndarray) -> np.ndarray:
        own = np.zeros((num_assets, observations.shape[1]), bool)
        own[:, :begin] = np.repeat(np.eye(num_assets, dtype=bool), num_features, axis=1)
        own[each, held] = own[each, held + num_assets] = True
        others = np.roll(observations, -1, axis=0)
        mixed = np.where(own, observations[:, None], others[:, None])
        mixed[..., cash] = 1.0 - mixed[..., held].sum(-1)
        actions = decide(mixed.reshape(-1, observations.shape[1]))
        return actions.reshape(-1, num_assets, num_assets)[:, each, each]

    return act
