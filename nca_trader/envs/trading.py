"""The trading environment: real bars, one account, pure functions of an index.

What an agent does never changes the bars, so an observation is the bar's index and the account;
`TradingEnv.window` gathers the features of the bars behind it for those who need the array.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from nca_trader.config import EnvConfig
from nca_trader.config.ranges import expect
from nca_trader.data.features import feature_set
from nca_trader.data.synthetic import Task, task_of
from nca_trader.envs import rewards
from nca_trader.envs.account.legs import Legs, legs_of
from nca_trader.envs.account.orders import Rules, rules_of
from nca_trader.envs.account.state import Account, log_return, open_account
from nca_trader.envs.account.step import on_bar
from nca_trader.envs.account.step import place as place_order
from nca_trader.envs.actions import targets_of, to_target
from nca_trader.envs.nearest import nearest_assets
from nca_trader.envs.presets import load_env
from nca_trader.envs.reward_memory import begun, remembered
from nca_trader.errors import BarError, ConfigError
from nca_trader.machine import memory
from nca_trader.numerics import hash_uniform
from nca_trader.types import Bars, Costs, EnvSpec, Tensor


class Market(NamedTuple):
    """The bars as the device holds them, float32; an argument of every jitted function.

    features: `[N, A, F]`. legs: what an account lives through, each `[N, A]` or None.
    volatility: `[]` of equal weights in every asset, per bar; see `volatility_of`.
    rows: `[]` int32 bars, where more rows are there (see `ShardedEnv`); None: all of them.
    """

    features: Tensor
    legs: Legs
    volatility: Tensor
    rows: Tensor | None = None


COPIES = 3  # of the features at once: as computed, beside the market's state, on the device


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


def spec_of(config: EnvConfig, symbols: tuple[str, ...], states: tuple[str, ...] = ()) -> EnvSpec:
    """What a policy sees of the environment that `config` makes of these symbols.

    Args:
      states: names of the market's own state, which is observed after the features.
    """
    return EnvSpec(
        symbols=symbols,
        features=(*config.features, *states),
        targets=targets_of(config, len(symbols)),
        warmup=feature_set(config.features).warmup,
        actions=config.actions,
        constant_size=config.reward == "pnl",
        memory=config.reward if config.reward in ("differential_sharpe", "drawdown") else "",
        decay=config.sharpe_decay if config.reward == "differential_sharpe" else 0.0,
    )


def kept(rate: float, drop: Array, row: Array, num_assets: int) -> Array:
    """The bars at `row` `[...]` whose features episodes of seeds `drop` show, `[..., A]` bool."""
    shape = (*jnp.shape(row), num_assets)
    drop, row = (jnp.broadcast_to(jnp.asarray(x), shape[:-1])[..., None] for x in (drop, row))
    words = (jnp.broadcast_to(x, shape) for x in (drop, row, jnp.arange(num_assets)))
    return hash_uniform(*words) >= rate


def transition(
    config: EnvConfig,
    spec: EnvSpec,
    rules: Rules,
    episode: Episode,
    action: Array,
    now: Legs,
    following: Legs,
) -> tuple[Episode, Array]:
    """One step of one account: order what `action` `[A]` means, then live through a bar.

    Args:
      config, spec, rules: of the environment, static. episode: at the close of bar t.
      now: legs of bar t; it matters only where orders fill at the close.
      following: legs of bar t + 1.

    Returns:
      The episode at the close of bar t + 1, and the step's reward `[]`.
    """
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


class TradingEnv:
    """An environment over `bars`, as `config` describes it; every method is pure and jittable.

    Attributes:
      bars: host bars. spec: what a policy needs to know. market: device arrays.
      features: `[N, A, F]` float32 on the host. costs, rules: static.
    """

    def __init__(
        self,
        bars: Bars | Task | None = None,
        config: EnvConfig | str | os.PathLike[str] | None = None,
    ):
        """Computes the features of all bars once, by scanning their online updates.

        Args:
          bars: real bars; or a synthetic task, whose state is observed beside the features; or
            None, which draws the market that `config` names.
          config: an `EnvConfig`, a preset's name, or the path of a TOML file; None is the
            default, or the task's own.

        Raises:
          BarError: too few bars. ConfigError: neither bars nor a market; an unknown feature.
        """
        if bars is not None:
            accepted = "Bars, e.g. of nca.read_bars, a synthetic Task, or None"
            expect("bars", bars, Bars | Task, accepted, config=config)
        if config is None:
            config = bars.config if isinstance(bars, Task) else EnvConfig()
        config = load_env(config, name="config")
        if bars is None:
            bars = task_of(config)
        states = observed_states(bars, config)
        self.bars = bars.bars if isinstance(bars, Task) else bars
        self.task = bars if isinstance(bars, Task) else None
        self.config = config
        names = tuple(f"state:{name}" for name in states[0])
        spec = spec_of(config, self.bars.symbols, names)
        self.spec = dataclasses.replace(spec, nearest=nearest_assets(self.bars))
        if spec.memory:
            variance = rewards.variance_in(self.bars, spec.size)
            self.spec = dataclasses.replace(self.spec, variance=variance)
        self.costs, self.rules = config.costs, rules_of(config)
        if len(self.bars) < self.spec.warmup + 2:
            raise BarError(
                f"{self.bars.source or 'bars'}: {len(self.bars)} bars, but the features need "
                f"{self.spec.warmup} bars to warm up and 2 to trade; give more bars or choose "
                "features with a shorter memory."
            )
        rewards.check_paid(config, self.bars, self.spec.size)
        self.features = features_of(self.bars, config, states[1])
        market = host_market(self.bars, self.features, self.costs, self.rules)
        self.market = jax.tree.map(jnp.asarray, market)

    def __len__(self) -> int:
        return len(self.bars)

    def begin(self, key: Array) -> Episode:
        """A new account, flat or at a random position that an order could have reached.

        The order is filled by the account's own rules, free of charge: assets that are long
        together may want more than `max_gross` or than cash pays for. Costs are drawn as well,
        where the config says so.
        """
        config, scale = self.config, None
        account = open_account(jnp.zeros(self.spec.num_assets))
        if config.random_costs is not None:
            low, high = np.log(config.random_costs)
            cost_key, key = jax.random.split(key)
            scale = jnp.exp(jax.random.uniform(cost_key, (), minval=low, maxval=high))
        if config.random_start:
            shape = account.weight.shape
            if config.actions == "weights":
                low, high = self.spec.bounds
                target = jax.random.uniform(key, shape, minval=low, maxval=high)
            else:
                target = jnp.asarray(self.spec.targets, jnp.float32)[
                    jax.random.randint(key, shape, 0, len(self.spec.targets))
                ]
            free = Rules(fill="close", max_gross=config.max_gross, max_net=config.max_net)
            free = free._replace(borrow=config.borrow)
            there = Legs(target, target, jnp.ones(shape, bool)).at_close
            account = place_order(account, target, there, Costs(), free)[0]
        return Episode(begun(self.spec, account), scale)

    def begin_drops(self, key: Array) -> Array | None:
        """`[]` uint32, which features an episode hides; None where the config hides none."""
        return jax.random.bits(key, (), jnp.uint32) if self.config.feature_dropout else None

    def reset(self, key: Array) -> tuple[EnvState, TimeStep]:
        """Starts an episode at a random bar after the features' warm-up."""
        key, start_key, account_key = jax.random.split(key, 3)
        length = self.config.episode_bars or len(self) - 1 - self.spec.warmup
        length = min(length, len(self) - 1 - self.spec.warmup)
        first = jax.random.randint(start_key, (), self.spec.warmup, len(self) - length)
        drop = self.begin_drops(jax.random.fold_in(start_key, 1))
        state = EnvState(key, first, drop, self.begin(account_key), first + length)
        zero = jnp.zeros(())
        return state, TimeStep(state.observation, zero, zero + 1.0, jnp.zeros((), bool))

    def step(self, state: EnvState, action: Array) -> tuple[EnvState, TimeStep]:
        """Orders what `action` `[A]` means (see `EnvSpec.actions`), and moves one bar on.

        The episode has ended where the time step's discount is 0 or `truncated` is True; call
        `reset` then. Its observation is the final one, which a bootstrap needs.
        """
        index = state.index
        now, following = self.legs_at(index), self.legs_at(index + 1)
        episode, reward = transition(
            self.config, self.spec, self.rules, state.episode, action, now, following
        )
        ruined = episode.account.ruined
        truncated = ~ruined & (index + 1 >= state.last)
        state = state._replace(index=index + 1, episode=episode)
        discount = 1.0 - ruined.astype(jnp.float32)
        return state, TimeStep(state.observation, reward, discount, truncated)

    def legs_at(self, index: Array) -> Legs:
        """The legs of the bars at `index` `[...]`."""
        return take_legs(self.market, index)

    @functools.partial(jax.jit, static_argnums=(0, 2))
    def window(self, observation: Observation, length: int) -> Array:
        """`[T, A, F]` features of the `length` bars up to the observation's; 0 before the first."""
        rows = observation.index - length + 1 + jnp.arange(length)
        seen = self.market.features[jnp.maximum(rows, 0)]
        there = (rows >= 0)[:, None]
        if observation.drop is not None:
            rate, assets = self.config.feature_dropout, self.spec.num_assets
            there = there & kept(rate, observation.drop, rows, assets)
        return jnp.where(there[..., None], seen, 0.0)


def take_legs(market: Market, index: Array) -> Legs:
    """The legs of the bars at `index` `[...]`."""
    row = jnp.asarray(index, jnp.uint32)  # never counted from the end: no check for that
    return jax.tree.map(lambda leg: leg[row], market.legs)


def observed_states(source: Bars | Task, config: EnvConfig) -> tuple[tuple[str, ...], np.ndarray]:
    """Names, and `[N, A, S]` float32 values, of the market's own state that agents observe.

    Raises:
      ConfigError: the config observes a state that bars alone do not have.
    """
    if isinstance(source, Task) and config.market_state:
        return source.signal_names, source.signals.astype(np.float32)
    bars = source.bars if isinstance(source, Task) else source
    if config.market and config.market_state:
        raise ConfigError(
            f"{bars.source or 'bars'}: the environment observes the state of the market "
            f"{config.market}, which bars do not hold; give no bars, or set market_state = false."
        )
    return (), np.zeros((*bars.close.shape, 0), np.float32)


def features_of(bars: Bars, config: EnvConfig, states: np.ndarray) -> np.ndarray:
    """`[N, A, F]` float32: the features of `config`, then the market's own `states`.

    Raises:
      BarError: they are more than memory holds.
    """
    if not config.features:
        return states
    width = len(config.features) + states.shape[-1]
    need, free = COPIES * 4 * bars.close.size * width, memory().free
    if need > free:
        raise BarError(
            f"{bars.source or 'bars'}: {width} features of {len(bars):,} bars of "
            f"{bars.num_assets} assets need {need / 1e9:.3g} GB and {free / 1e9:.3g} GB are free; "
            "give fewer bars or features, or train on shards (docs/guides/streaming.md)."
        )
    return np.concatenate([feature_set(config.features).batch(bars), states], axis=-1)


def host_market(bars: Bars, features: np.ndarray, costs: Costs, rules: Rules) -> Market:
    """The market as numpy arrays, which a device takes as they are."""

    def narrow(leg: Any) -> np.ndarray:
        return leg if leg.dtype == bool else leg.astype(np.float32)

    legs = jax.tree.map(narrow, legs_of(bars, costs, rules))
    return Market(features, legs, volatility_of(legs))


def volatility_of(legs: Legs) -> np.ndarray:
    """`[]` float32 standard deviation of the log-returns of equal weights in every asset.

    Where prices always move by the same amount, the deviation is rounding: there it is that move.
    """
    growth = (1.0 + np.asarray(legs.gap, np.float64)) * (1.0 + np.asarray(legs.body, np.float64))
    log_return = np.log(np.maximum(growth, 1e-6)).mean(axis=1)
    return np.asarray(max(log_return.std(), abs(log_return.mean())), np.float32)
