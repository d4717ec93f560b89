"""The trading environment: real bars, one account, pure functions of an index.

What an agent does never changes the bars, so an observation is the bar's index and the account;
`TradingEnv.window` gathers the features of the bars behind it for those who need the array.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from nca_trader.data.features import feature_set
from nca_trader.envs.account import Account, Legs, Rules, legs_of, log_return, on_bar, open_account
from nca_trader.envs.account import place as place_order
from nca_trader.errors import BarError
from nca_trader.presets import EnvConfig
from nca_trader.types import Bars, Costs, EnvSpec


class Market(NamedTuple):
    """The bars as the device holds them, float32; an argument of every jitted function.

    features: `[N, A, F]`. legs: returns and presence, each `[N, A]`.
    """

    features: Array
    legs: Legs


class Observation(NamedTuple):
    """index: `[]` int32, the bar whose close was just seen. account: as it stands there."""

    index: Array
    account: Account


class TimeStep(NamedTuple):
    """What a step gives back.

    observation: after the step. reward: `[]` log-return of equity. discount: `[]` 0 at ruin,
    else 1. truncated: `[]` bool, the data or the episode ran out: bootstrap, do not stop.
    """

    observation: Observation
    reward: Array
    discount: Array
    truncated: Array


class EnvState(NamedTuple):
    """key: for the next episode. observation: now. last: `[]` int32 row of the episode's end."""

    key: Array
    observation: Observation
    last: Array


def spec_of(config: EnvConfig, symbols: tuple[str, ...]) -> EnvSpec:
    """What a policy sees of the environment that `config` makes of these symbols."""
    size = 1.0 / len(symbols) if config.size is None else config.size
    return EnvSpec(
        symbols=symbols,
        features=config.features,
        targets=(-size, 0.0, size) if config.short else (0.0, size),
        warmup=feature_set(config.features).warmup,
    )


def rules_of(config: EnvConfig) -> Rules:
    """The account's rules in the environment that `config` makes."""
    return Rules(
        fill=config.fill, order=config.order, max_gross=config.max_gross, floor=config.ruin_floor
    )


def transition(
    account: Account,
    target: Array,
    now: Legs,
    following: Legs,
    costs: Costs,
    rules: Rules,
) -> tuple[Account, Array]:
    """One step of one account: order `target` `[A]` at this close, then live through a bar.

    Args:
      account: at the close of bar t. now: legs of bar t; only `present` matters, and only where
        orders fill at the close. following: legs of bar t + 1.

    Returns:
      The account at the close of bar t + 1, and its log-return since before the order.
    """
    after, _ = place_order(account, target, now.present, costs, rules)
    after, _ = on_bar(after, following, costs, rules)
    return after, log_return(account, after)


class TradingEnv:
    """An environment over `bars`, as `config` describes it; every method is pure and jittable.

    Attributes:
      bars: host bars. spec: what a policy needs to know. market: device arrays.
      costs, rules: static. targets: `[n]` the weight that each action means.
    """

    def __init__(self, bars: Bars, config: EnvConfig = EnvConfig()):
        """Computes the features of all bars once, by scanning their online updates."""
        self.bars, self.config = bars, config
        self.spec = spec_of(config, bars.symbols)
        self.costs, self.rules = config.costs, rules_of(config)
        self.targets = np.asarray(self.spec.targets, np.float32)
        if len(bars) < self.spec.warmup + 2:
            raise BarError(
                f"{bars.source or 'bars'}: {len(bars)} bars, but the features need "
                f"{self.spec.warmup} bars to warm up and 2 to trade; give more bars or choose "
                "features with a shorter memory."
            )
        self.features = feature_set(config.features).batch(bars)
        gap, body, present = legs_of(bars)
        legs = Legs(gap.astype(np.float32), body.astype(np.float32), present)
        self.market = Market(jnp.asarray(self.features), jax.tree.map(jnp.asarray, legs))

    def __len__(self) -> int:
        return len(self.bars)

    def begin(self, key: Array) -> Account:
        """A new account, flat or at a random position that an order could have reached.

        The order is filled by the account's own rules, free of charge: assets that are long
        together may want more than `max_gross` or than cash pays for.
        """
        flat = open_account(jnp.zeros(self.spec.num_assets))
        if not self.config.random_start:
            return flat
        action = jax.random.randint(key, (self.spec.num_assets,), 0, self.spec.num_actions)
        target, there = jnp.asarray(self.targets)[action], jnp.ones(action.shape, bool)
        rules = self.rules._replace(fill="close")
        return place_order(flat, target, there, Costs(), rules)[0]

    def reset(self, key: Array) -> tuple[EnvState, TimeStep]:
        """Starts an episode at a random bar after the features' warm-up."""
        key, start_key, account_key = jax.random.split(key, 3)
        length = self.config.episode_bars or len(self) - 1 - self.spec.warmup
        length = min(length, len(self) - 1 - self.spec.warmup)
        first = jax.random.randint(start_key, (), self.spec.warmup, len(self) - length)
        observation = Observation(first, self.begin(account_key))
        state = EnvState(key, observation, first + length)
        zero = jnp.zeros(())
        return state, TimeStep(observation, zero, zero + 1.0, jnp.zeros((), bool))

    def step(self, state: EnvState, action: Array) -> tuple[EnvState, TimeStep]:
        """Orders what `action` `[A]` int32 means, and moves one bar on.

        The episode has ended where the time step's discount is 0 or `truncated` is True; call
        `reset` then. Its observation is the final one, which a bootstrap needs.
        """
        index, account = state.observation
        now, following = _row(self.market.legs, index), _row(self.market.legs, index + 1)
        target = jnp.asarray(self.targets)[action]
        account, reward = transition(account, target, now, following, self.costs, self.rules)
        observation = Observation(index + 1, account)
        discount = 1.0 - account.ruined.astype(jnp.float32)
        truncated = ~account.ruined & (index + 1 >= state.last)
        step = TimeStep(observation, reward, discount, truncated)
        return state._replace(observation=observation), step

    @functools.partial(jax.jit, static_argnums=(0, 2))
    def window(self, observation: Observation, length: int) -> Array:
        """`[T, A, F]` features of the `length` bars up to the observation's; 0 before the first."""
        rows = observation.index - length + 1 + jnp.arange(length)
        seen = self.market.features[jnp.maximum(rows, 0)]
        return jnp.where((rows >= 0)[:, None, None], seen, 0.0)


def _row(legs: Legs, index: Array) -> Legs:
    return jax.tree.map(lambda leg: leg[index], legs)
