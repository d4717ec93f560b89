"""The trading environment: `reset(market, key)` and `step(market, state, action)`, pure functions.

What an agent does never changes the bars. So an observation is the index of a bar and the account;
`window` gathers the features of the bars up to it, for callers that need the array. `TradingEnv`
binds these functions to one market.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from nca_trader.config import EnvConfig
from nca_trader.config.ranges import expect
from nca_trader.data.shards import Shards
from nca_trader.data.synthetic import Task, task_of
from nca_trader.envs import load_env, rewards
from nca_trader.envs.account.state import (
    Account,
    Legs,
    Rules,
    legs_of,
    log_return,
    open_account,
    rules_of,
)
from nca_trader.envs.account.step import on_bar
from nca_trader.envs.account.step import place as place_order
from nca_trader.envs.market import (
    Dynamics,
    Market,
    features_of,
    first_of,
    nearest_assets,
    observed_states,
    spec_of,
    volatility_of,
)
from nca_trader.envs.rewards import begun, remembered
from nca_trader.errors import BarError, StateError
from nca_trader.numerics import hash_uniform
from nca_trader.types import Bars, Costs, EnvSpec, Tensor


class Observation(NamedTuple):
    """What an agent sees.

    index: `[]` int32, the bar whose close was just seen. account: as it stands there.
    drop: `[]` uint32 that says whose features this episode hides; None where none can be hidden.
    """

    index: Array
    account: Account
    drop: Array | None = None


class TimeStep(NamedTuple):
    """What a step gives back.

    observation: after the step. reward: `[]`, see `EnvConfig.reward`. discount: `[]` 0 at ruin,
    else 1. truncated: `[]` bool, the data or the episode ran out: bootstrap, do not stop.
    """

    observation: Observation
    reward: Array
    discount: Array
    truncated: Array


class Episode(NamedTuple):
    """One account and what belongs to its episode.

    cost_scale: `[]` factor on the costs of this episode; None where they are not drawn.
    """

    account: Account
    cost_scale: Array | None = None


class EnvState(NamedTuple):
    """key: for the next episode. index, drop: as in `Observation`. episode: of the account.

    last: `[]` int32 row of the episode's end.
    """

    key: Array
    index: Array
    drop: Array | None
    episode: Episode
    last: Array

    @property
    def observation(self) -> Observation:
        """What an agent sees here."""
        return Observation(self.index, self.episode.account, self.drop)


def kept(rate: float, drop: Array, row: Array, num_assets: int) -> Array:
    """The bars at `row` `[...]` whose features episodes of seeds `drop` show, `[..., A]` bool."""
    shape = (*jnp.shape(row), num_assets)
    drop, row = (jnp.broadcast_to(jnp.asarray(x), shape[:-1])[..., None] for x in (drop, row))
    words = (jnp.broadcast_to(x, shape) for x in (drop, row, jnp.arange(num_assets)))
    return hash_uniform(*words) >= rate


def to_target(spec: EnvSpec, action: Tensor, ordered: Array) -> Array:
    """The target weights `[A]` that `action` `[A]` orders.

    Args:
      action: int32, or floating where `spec.actions` is "weights": there it is the target, and
        is cut to `spec.bounds`. ordered: `[A]` last ordered targets, which "orders" moves.
    """
    low, high = spec.bounds
    if spec.actions == "weights":
        return jnp.clip(jnp.asarray(action, ordered.dtype), low, high)
    if spec.actions == "orders":
        step = jnp.asarray(action - 1, ordered.dtype) * high
        return jnp.clip(ordered + step, low, high)
    # Selected, not looked up: a table of three is read one account at a time.
    *rest, target = (jnp.asarray(weight, ordered.dtype) for weight in spec.targets)
    for number, weight in reversed(list(enumerate(rest))):
        target = jnp.where(action == number, weight, target)
    return jnp.broadcast_to(target, jnp.shape(action))


def transition(
    dynamics: Dynamics, episode: Episode, action: Array, now: Legs, following: Legs
) -> tuple[Episode, Array]:
    """Orders what `action` `[A]` means at the close of bar t, then moves the account to t + 1.

    This is the one step of every caller: `step`, training, and the judge of `prove`.

    Args:
      dynamics: static. episode: at the close of bar t.
      now: legs of bar t; they matter only where orders fill at the close.
      following: legs of bar t + 1.

    Returns:
      The episode at the close of bar t + 1, and the step's reward `[]`.
    """
    config, spec, rules = dynamics
    before, costs, scale = episode.account, config.costs, 1.0
    if episode.cost_scale is not None:
        scale = episode.cost_scale
        costs, now, following = costs.scaled(scale), now.at_cost(scale), following.at_cost(scale)
    target = to_target(spec, action, before.ordered)
    placed, _ = place_order(before, target, now.at_close, costs, rules)
    after, _ = on_bar(placed, following, costs, rules)
    step = rewards.Step(
        log_return(before, after),
        before.ordered,
        placed.ordered,
        following,
        costs,
        scale,
        before.memory.kept if spec.memory else None,
    )
    reward = rewards.reward_of(config, spec, step)
    return episode._replace(account=remembered(spec, after)), reward


def begin(dynamics: Dynamics, key: Array) -> Episode:
    """Opens an account, flat or at a random position that an order could have reached.

    The opening order is filled by the account's own rules, free of charge: assets that are long
    together may exceed `max_gross` or the cash there is. Costs are drawn where the config says so.
    """
    config, spec, _ = dynamics
    scale, account = None, open_account(jnp.zeros(spec.num_assets))
    if config.random_costs is not None:
        low, high = np.log(config.random_costs)
        cost_key, key = jax.random.split(key)
        scale = jnp.exp(jax.random.uniform(cost_key, (), minval=low, maxval=high))
    if config.random_start:
        shape = account.weight.shape
        if config.actions == "weights":
            low, high = spec.bounds
            target = jax.random.uniform(key, shape, minval=low, maxval=high)
        else:
            target = jnp.asarray(spec.targets, jnp.float32)[
                jax.random.randint(key, shape, 0, len(spec.targets))
            ]
        free = Rules(fill="close", max_gross=config.max_gross, max_net=config.max_net)
        free = free._replace(borrow=config.borrow)
        there = Legs(target, target, jnp.ones(shape, bool)).at_close
        account = place_order(account, target, there, Costs(), free)[0]
    return Episode(begun(spec, account), scale)


def begin_dropout(dynamics: Dynamics, key: Array) -> Array | None:
    """`[]` uint32 seed of an episode's feature dropout; None where the config has none."""
    return jax.random.bits(key, (), jnp.uint32) if dynamics.config.feature_dropout else None


def episode_length(market: Market) -> Any:
    """Bars of an episode: as the config says, and at most what the data has."""
    config, spec, _ = market.dynamics
    longest = market.num_bars - 1 - spec.warmup
    if config.episode_bars is None:
        return longest
    minimum = min if isinstance(longest, int) else jnp.minimum
    return minimum(config.episode_bars, longest)


def reset(market: Market, key: Array) -> tuple[EnvState, TimeStep]:
    """Starts an episode at a random bar after the features' warm-up."""
    spec = market.dynamics.spec
    key, start_key, account_key = jax.random.split(key, 3)
    length = episode_length(market)
    first = jax.random.randint(start_key, (), spec.warmup, market.num_bars - length)
    drop = begin_dropout(market.dynamics, jax.random.fold_in(start_key, 1))
    state = EnvState(key, first, drop, begin(market.dynamics, account_key), first + length)
    zero = jnp.zeros(())
    return state, TimeStep(state.observation, zero, zero + 1.0, jnp.zeros((), bool))


def step(market: Market, state: EnvState, action: Array) -> tuple[EnvState, TimeStep]:
    """Orders what `action` `[A]` means (see `EnvSpec.actions`), and moves one bar on.

    The episode has ended where the time step's discount is 0 or `truncated` is True; call `reset`
    then. Its observation is the final one, which a bootstrap needs.
    """
    index = state.index
    now, following = market.legs_at(index), market.legs_at(index + 1)
    episode, reward = transition(market.dynamics, state.episode, action, now, following)
    ruined = episode.account.ruined
    truncated = ~ruined & (index + 1 >= state.last)
    state = state._replace(index=index + 1, episode=episode)
    discount = 1.0 - ruined.astype(jnp.float32)
    return state, TimeStep(state.observation, reward, discount, truncated)


def window(market: Market, observation: Observation, length: int) -> Array:
    """`[T, A, F]` features of the `length` bars up to the observation's; 0 before the first."""
    rows = observation.index - length + 1 + jnp.arange(length)
    seen = market.features[jnp.maximum(rows, 0)]
    there = (rows >= 0)[:, None]
    if observation.drop is not None:
        config, spec, _ = market.dynamics
        there = there & kept(config.feature_dropout, observation.drop, rows, spec.num_assets)
    return jnp.where(there[..., None], seen, 0.0)


_window = jax.jit(window, static_argnums=2)


class TradingEnv:
    """An environment over bars, as `config` describes it; every method is pure and jittable.

    Attributes:
      bars: host bars; of shards, those of the first. shards: in the order in which agents train on
        them, or None. task: the synthetic market, or None.
      features: `[N, A, F]` float32 on the host. market: device arrays; of shards, those of the
        first, on the host.
    """

    def __init__(
        self,
        bars: Bars | Task | Shards | None = None,
        config: EnvConfig | str | os.PathLike[str] | None = None,
    ):
        """Computes the features of all bars once, by scanning their online updates.

        Args:
          bars: real bars; or a synthetic task, whose state is observed in addition to the
            features; or shards of bars that do not fit into memory, of which the first is read;
            or None, which draws the market that `config` names.
          config: an `EnvConfig`, a preset's name, or the path of a TOML file; None is the
            default, or the task's own.

        Raises:
          BarError: too few bars; shards of different numbers of symbols.
          ConfigError: neither bars nor a market; an unknown feature.
        """
        if bars is not None:
            accepted = "Bars, e.g. of nca.read_bars, a synthetic Task, Shards, or None"
            expect("bars", bars, Bars | Task | Shards, accepted, config=config)
        if config is None:
            config = bars.config if isinstance(bars, Task) else EnvConfig()
        config = load_env(config, name="config")
        self.shards, self.task = None, None
        if isinstance(bars, Shards):
            self.shards, bars = bars, first_of(bars, config)
        elif bars is None:
            bars = task_of(config)
        states = observed_states(bars, config)
        if isinstance(bars, Task):
            self.task, bars = bars, bars.bars
        self.bars = bars
        names = tuple(f"state:{name}" for name in states[0])
        spec = spec_of(config, bars.symbols, names)
        spec = dataclasses.replace(spec, nearest=nearest_assets(bars))
        if spec.memory:
            spec = dataclasses.replace(spec, variance=rewards.variance_in(bars, spec.size))
        if len(bars) < spec.warmup + 2:
            raise BarError(
                f"{bars.source or 'bars'}: {len(bars)} bars, but the features need "
                f"{spec.warmup} bars to warm up and 2 to trade; give more bars or choose "
                "features with a shorter memory."
            )
        rewards.check_paid(config, bars, spec.size)
        self.features = features_of(bars, config, states[1])
        dynamics = Dynamics(config, spec, rules_of(config))
        self.market = self._market_of(bars, self.features, dynamics)
        if self.shards is None:
            self.market = jax.tree.map(jnp.asarray, self.market)

    def __len__(self) -> int:
        return len(self.bars)

    def _market_of(self, bars: Bars, features: np.ndarray, dynamics: Dynamics) -> Market:
        """The market of `bars` as numpy arrays; of a shard, padded with zeros to the longest."""

        def narrow(leg: np.ndarray) -> np.ndarray:
            return leg if leg.dtype == bool else leg.astype(np.float32)

        legs = jax.tree.map(narrow, legs_of(bars, dynamics.config.costs, dynamics.rules))
        market = Market(features, legs, volatility_of(legs), None, dynamics)
        if self.shards is None:
            return market
        longest = max(shard.rows for shard in self.shards)

        def pad(leaf: np.ndarray) -> np.ndarray:
            return np.pad(leaf, [(0, longest - len(leaf))] + [(0, 0)] * (leaf.ndim - 1))

        return dataclasses.replace(
            market,
            features=pad(features),
            legs=jax.tree.map(pad, legs),
            rows=np.asarray(len(bars), np.int32),
        )

    def prepare(self, bars: Bars) -> Market:
        """Returns the market of another shard on the host, of the first one's shape.

        All shards share one compiled program, so rows after a shard's last are 0.

        Raises:
          StateError: the shard has other columns than the first one.
        """
        rewards.check_paid(self.config, bars, self.spec.size)
        features = features_of(bars, self.config, np.zeros((*bars.close.shape, 0), np.float32))
        market = self._market_of(bars, features, self.dynamics)
        if jax.tree.structure(market) != jax.tree.structure(self.market):
            raise StateError(
                f"{bars.source or 'a shard'}: the shard from {bars.time[0]} on has other columns "
                f"than the first one ({', '.join(sorted(self.bars.fields))}); write all shards "
                "from bars with the same columns."
            )
        # Values learnt on one shard hold on the next: all rewards are scaled by the first.
        return dataclasses.replace(market, volatility=self.market.volatility)

    @property
    def dynamics(self) -> Dynamics:
        """The static part of the market: config, spec and rules."""
        return self.market.dynamics

    @property
    def config(self) -> EnvConfig:
        """The configuration, as given."""
        return self.dynamics.config

    @property
    def spec(self) -> EnvSpec:
        """What a policy needs to know of the environment."""
        return self.dynamics.spec

    @property
    def costs(self) -> Costs:
        """What trading and holding cost."""
        return self.dynamics.config.costs

    @property
    def rules(self) -> Rules:
        """How orders fill."""
        return self.dynamics.rules

    def begin(self, key: Array) -> Episode:
        """`begin` with this environment's dynamics."""
        return begin(self.dynamics, key)

    def reset(self, key: Array) -> tuple[EnvState, TimeStep]:
        """`reset` with this environment's market."""
        return reset(self.market, key)

    def step(self, state: EnvState, action: Array) -> tuple[EnvState, TimeStep]:
        """`step` with this environment's market."""
        return step(self.market, state, action)

    def window(self, observation: Observation, length: int) -> Array:
        """`window` with this environment's market, jitted."""
        return _window(self.market, observation, length)
