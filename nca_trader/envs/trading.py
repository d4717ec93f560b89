"""The trading environment: `reset(market, key)` and `step(market, state, action)`, pure functions.

An agent's actions never change the bars. So an observation is the index of a bar and the account;
`window` gathers the features of the bars up to it, for callers that need the array. `TradingEnv`
binds these functions to one market.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from nca_trader.config import AccountConfig, EnvConfig
from nca_trader.config.account import PLAIN
from nca_trader.config.ranges import expect
from nca_trader.data.shards import Shards
from nca_trader.data.time_frames import seconds_of_bars
from nca_trader.envs import actions, load_env, rewards
from nca_trader.envs.account.fills import cap
from nca_trader.envs.account.risk import alone_of
from nca_trader.envs.account.state import (
    Account,
    BarReturns,
    log_return,
    open_account,
)
from nca_trader.envs.account.step import on_bar
from nca_trader.envs.account.step import place as place_order
from nca_trader.envs.market import (
    Dynamics,
    Market,
    feature_set_of,
    features_of,
    first_of,
    market_of,
    nearest_assets,
    observed_states,
    spec_of,
    state_names,
)
from nca_trader.envs.rewards import begin_account, remember
from nca_trader.errors import BarError, ConfigError, StateError
from nca_trader.markets import Task, task_of
from nca_trader.numerics import hash_uniform
from nca_trader.types import Bars, Costs, EnvSpec


class Observation(NamedTuple):
    """What an agent sees: 24 bytes for one asset, and not a window of features.

    index: `[]` int32, the bar whose close was just seen. account: its state at that close.
    drop: `[]` uint32 seed of the features that this episode hides; None where none can be hidden.
    """

    index: Array
    account: Account
    drop: Array | None = None


class TimeStep(NamedTuple):
    """The result of a step.

    observation: after the step. reward: `[]`, see `EnvConfig.reward`. discount: `[]` 0 at
    bankruptcy, else 1. truncated: `[]` bool, the data or the episode ended: bootstrap there, the
    account could go on.
    """

    observation: Observation
    reward: Array
    discount: Array
    truncated: Array


class Episode(NamedTuple):
    """One account and the costs of its episode.

    account: its state. cost_scale: `[]` factor on the costs of this episode; None where costs are
    not drawn.
    """

    account: Account
    cost_scale: Array | None = None


class EnvState(NamedTuple):
    """The state of an environment.

    key: for the next episode. index, drop: as in `Observation`. episode: of the account.
    last: `[]` int32 row of the episode's end.
    """

    key: Array
    index: Array
    drop: Array | None
    episode: Episode
    last: Array

    @property
    def observation(self) -> Observation:
        """The observation at this state."""
        return Observation(self.index, self.episode.account, self.drop)


def keep_mask(rate: float, drop: Array, row: Array, num_assets: int) -> Array:
    """Return the dropout mask `[..., A]` bool of the bars at `row` `[...]`; False is hidden.

    A hash of seed, bar and asset, not a random stream: a segment of an episode needs no state.

    Args:
      rate: `EnvConfig.feature_dropout`.
      drop: `[...]` uint32 seed of the episode.
      row: `[...]` int32 rows of bars.
      num_assets: A.
    """
    shape = (*jnp.shape(row), num_assets)
    drop, row = (jnp.broadcast_to(jnp.asarray(x), shape[:-1])[..., None] for x in (drop, row))
    words = (jnp.broadcast_to(x, shape) for x in (drop, row, jnp.arange(num_assets)))
    return hash_uniform(*words) >= rate


def transition(
    dynamics: Dynamics, episode: Episode, action: Array, now: BarReturns, following: BarReturns
) -> tuple[Episode, Array]:
    """Order what `action` means at the close of bar t, then move the account to t + 1.

    Every caller uses this one step: `step`, training, and the evaluation of `prove`.

    Args:
      dynamics: config, spec and rules, static.
      episode: at the close of bar t.
      action: `[A]`, see `EnvSpec.actions`.
      now: prices of bar t; they matter only where orders fill at the close.
      following: returns and prices of bar t + 1.

    Returns:
      The episode at the close of bar t + 1, and the step's reward `[]`.
    """
    config, spec, rules = dynamics
    before, scale = episode.account, 1.0
    if episode.cost_scale is not None:
        scale = episode.cost_scale
        costs = rules.costs.scaled(scale, quotes=now.half_spread is not None)
        rules = dataclasses.replace(rules, costs=costs)
    # From the weights last ordered and not from those held, which drift with prices.
    target = actions.to_target(spec, action, before.ordered, before.base)
    placed, _ = place_order(before, target, now.at_close, rules)
    after, _ = on_bar(placed, following, rules)
    step = rewards.Step(
        log_return(before, after),
        cap(before.ordered, rules),
        cap(placed.ordered, rules),
        following,
        rules.costs,
        scale,
        before.memory.kept if spec.memory else None,
    )
    # The reward reads the memory of before the step; only then is it updated.
    reward = rewards.reward_of(config, spec, step) - actions.tilt_price(spec, action)
    return episode._replace(account=remember(spec, after)), reward


def begin(dynamics: Dynamics, key: Array, first: BarReturns | None = None) -> Episode:
    """Open an account, flat or at a random position that an order could have reached.

    Costs are drawn where the config says so.

    Args:
      dynamics: config, spec and rules, static.
      key: of the episode.
      first: the bar at whose close the account opens; None leaves out what follows the market.
    """
    config, spec, rules = dynamics
    scale, account = None, open_account(jnp.zeros(spec.num_assets), rules)
    size = None if first is None else first.size
    if size is not None:
        account = account._replace(size=jnp.asarray(alone_of(size)))
    if config.random_costs is not None:
        # Evenly in the log: a factor of 1/2 is as likely as one of 2.
        low, high = np.log(config.random_costs)
        cost_key, key = jax.random.split(key)
        scale = jnp.exp(jax.random.uniform(cost_key, (), minval=low, maxval=high))
    if config.random_start:
        shape = account.weight.shape
        if config.actions not in actions.SCHEMES.builtin:
            each = actions.every_action(spec)
            drawn = each[jax.random.randint(key, shape, 0, len(each))]
            target = actions.to_target(spec, drawn, account.ordered)
        elif config.actions == "weights":
            low, high = spec.bounds
            target = jax.random.uniform(key, shape, minval=low, maxval=high)
        else:
            target = jnp.asarray(spec.targets, jnp.float32)[
                jax.random.randint(key, shape, 0, len(spec.targets))
            ]
        # Filled by the account's own rules, at no cost: the targets of several assets may together
        # exceed `max_gross` or cash, and no account could then hold them.
        caps = {
            name: getattr(rules, name) for name in ("max_gross", "max_net", "borrow", "size_cap")
        }
        free = dataclasses.replace(PLAIN, fill="close", **caps)
        there = BarReturns(target, target, jnp.ones(shape, bool), size=size).at_close
        account = place_order(account, target, there, free)[0]
    account = begin_account(spec, account)
    if first is not None and first.base is not None:
        account = account._replace(base=jnp.asarray(first.base, account.weight.dtype))
    return Episode(account, scale)


def begin_dropout(dynamics: Dynamics, key: Array) -> Array | None:
    """Draw `[]` uint32, the seed of an episode's feature dropout; None without dropout."""
    return jax.random.bits(key, (), jnp.uint32) if dynamics.config.feature_dropout else None


def episode_length(market: Market) -> Any:
    """Return the bars of an episode: `episode_bars`, or fewer where the data ends before."""
    config, spec, _ = market.dynamics
    # The first decision is at the close of bar `warmup`, and the last needs a bar to earn in.
    longest = market.num_bars - 1 - spec.warmup
    if config.episode_bars is None:
        return longest
    # A padded shard has its number of bars on the device; for all others this stays a plain int.
    minimum = min if isinstance(longest, int) else jnp.minimum
    return minimum(config.episode_bars, longest)


def reset(market: Market, key: Array) -> tuple[EnvState, TimeStep]:
    """Start an episode at a random bar after the features' warm-up.

    Args:
      market: the bars and the dynamics.
      key: of this episode and the next ones.

    Returns:
      The state, and the first time step, of reward 0.
    """
    spec = market.dynamics.spec
    key, start_key, account_key = jax.random.split(key, 3)
    length = episode_length(market)
    first = jax.random.randint(start_key, (), spec.warmup, market.num_bars - length)
    # Folded in and not split off, so that dropout leaves the draws of the same key as they are.
    drop = begin_dropout(market.dynamics, jax.random.fold_in(start_key, 1))
    episode = begin(market.dynamics, account_key, market.legs_at(first))
    state = EnvState(key, first, drop, episode, first + length)
    zero = jnp.zeros(())
    return state, TimeStep(state.observation, zero, zero + 1.0, jnp.zeros((), bool))


def step(market: Market, state: EnvState, action: Array) -> tuple[EnvState, TimeStep]:
    """Order a target and move to the next bar.

    The episode has ended where the time step's discount is 0 or `truncated` is True; call `reset`
    then. Its observation is the final one, which a bootstrap needs.

    Args:
      market: the bars and the dynamics.
      state: before the step.
      action: `[A]`, see `EnvSpec.actions`.

    Returns:
      The state after the step, and the time step.
    """
    index = state.index
    now, following = market.legs_at(index), market.legs_at(index + 1)
    episode, reward = transition(market.dynamics, state.episode, action, now, following)
    bankrupt = episode.account.bankrupt
    # Bankruptcy takes precedence: the value of an account that has ended is 0.
    truncated = ~bankrupt & (index + 1 >= state.last)
    state = state._replace(index=index + 1, episode=episode)
    discount = 1.0 - bankrupt.astype(jnp.float32)
    return state, TimeStep(state.observation, reward, discount, truncated)


def window(market: Market, observation: Observation, length: int) -> Array:
    """Gather the features of the bars up to the observation's.

    Args:
      market: the bars and the dynamics.
      observation: its `index` is the last bar.
      length: T, number of bars.

    Returns:
      `[T, A, F]`. Rows before the first bar, and hidden features, are 0.
    """
    rows = observation.index - length + 1 + jnp.arange(length)
    # Rows before the first bar are masked below. A negative index would count from the end.
    seen = market.features[jnp.maximum(rows, 0)]
    there = (rows >= 0)[:, None]
    if observation.drop is not None:
        config, spec, _ = market.dynamics
        there = there & keep_mask(config.feature_dropout, observation.drop, rows, spec.num_assets)
    return jnp.where(there[..., None], seen, 0.0)


_window = jax.jit(window, static_argnums=2)


class TradingEnv:
    """A trading environment over bars; `reset`, `step` and `window` are pure and jittable.

    Attributes:
      config: costs, features, reward and limits, as an `EnvConfig`.
      bars: host bars; with shards, those of the first.
      shards: in the order in which agents train on them, or None.
      task: the synthetic market, or None.
      features: `[N, A, F]` float32 on the host.
      market: device arrays; with shards, those of the first, on the host.

    Example:
      >>> import jax, nca_trader as nca
      >>> bars = nca.sample_bars("sp500")[:300]
      >>> env = nca.TradingEnv(bars, nca.EnvConfig(features=("return_1",)))
      >>> state, timestep = env.reset(jax.random.key(0))
      >>> timestep.observation.account.weight.shape
      (2,)
    """

    def __init__(
        self,
        bars: Bars | Task | Shards | None = None,
        config: EnvConfig | str | os.PathLike[str] | None = None,
    ):
        """Compute the features of all bars once, by a scan of their online updates.

        Args:
          bars: real bars; or a synthetic task, whose state is observed in addition to the
            features; or shards, for bars that do not fit into memory (only the first is read);
            or None, which draws the market that `config` names.
          config: an `EnvConfig`, a preset's name, or the path of a TOML file; None is the
            default, or the task's own.

        Raises:
          BarError: there are too few bars, or shards have different numbers of symbols.
          ConfigError: there are neither bars nor a market, or a feature is unknown.
        """
        if bars is not None:
            accepted = "Bars, e.g. of nca.read_bars, a synthetic Task, Shards, or None"
            expect("bars", bars, Bars | Task | Shards, accepted, config=config)
        if config is None:
            config = bars.config if isinstance(bars, Task) else EnvConfig()
        config = load_env(config, name="config")
        cls = type(self)
        _refuse_own(cls.__name__, [x for x in MADE if isinstance(getattr(cls, x, None), property)])
        self.shards, self.task, self._base = None, None, None
        if isinstance(bars, Shards):
            self.shards, bars = bars, first_of(bars)
        elif bars is None:
            bars = task_of(config)
        names = state_names(bars, config)
        states = observed_states(bars, config, names)
        if isinstance(bars, Task):
            self.task, bars = bars, bars.bars
        self.bars = bars
        spec = spec_of(config, bars.symbols, names, seconds_of_bars(bars))
        warmup = max(spec.warmup, feature_set_of(config, spec.bar_seconds).warmup_on(bars))
        spec = dataclasses.replace(spec, nearest=nearest_assets(bars), warmup=warmup)
        if spec.memory:
            # In the spec, and so stored with a run: a backtest on other bars shows the policy its
            # memory in the unit of the bars that it was trained on.
            spec = dataclasses.replace(spec, variance=rewards.variance_in(bars, spec.size))
        if len(bars) < spec.warmup + 2:
            raise BarError(
                f"{bars.source or 'bars'}: {len(bars)} bars, but the features need "
                f"{spec.warmup} bars to warm up and 2 to trade; give more bars or choose "
                "features with a shorter memory."
            )
        # Before the features, which take the longest.
        rewards.check_paid(config, bars, spec.size)
        rewards.check_own(config, spec, config.account, len(bars))
        actions.check_own(spec, len(bars))
        self.features = features_of(bars, config, states, spec.bar_seconds)
        dynamics = Dynamics(config, spec, config.account)
        self.market = market_of(bars, self.features, dynamics, self.shards)
        # The market of shards stays on the host: training puts one after the other on the devices.
        if self.shards is None:
            self.market = jax.tree.map(jnp.asarray, self.market)
        self._made = {name: vars(self)[name] for name in MADE}

    def __len__(self) -> int:
        return len(self.bars)

    def prepare(self, bars: Bars) -> Market:
        """Make the market of another shard, in numpy and of the first shard's shape.

        All shards share one compiled program, so rows after a shard's last are 0.

        Args:
          bars: of the shard.

        Raises:
          StateError: the shard has other columns than the first one.
        """
        rewards.check_paid(self.config, bars, self.spec.size)
        none = np.zeros((*bars.close.shape, 0), np.float32)
        features = features_of(bars, self.config, none, self.spec.bar_seconds)
        market = self._on_base(market_of(bars, features, self.dynamics, self.shards), bars)
        # A column more or less is another tree, for which every step would be compiled again.
        if jax.tree.structure(market) != jax.tree.structure(self.market):
            raise StateError(
                f"{bars.source or 'a shard'}: the shard from {bars.time[0]} on has other columns "
                f"than the first one ({', '.join(sorted(self.bars.fields))}); write all shards "
                "from bars with the same columns."
            )
        # All rewards are scaled by the first shard, so that values learnt on it hold on the next.
        return dataclasses.replace(market, volatility=self.market.volatility)

    def on_base(self, spec: EnvSpec, base: Callable[[Bars], np.ndarray]) -> TradingEnv:
        """Return this environment with the targets of a base rule as a column of its market.

        Args:
          spec: of this environment, with the base; `nca_trader.agents.base` makes both.
          base: `(bars) -> [N, A]` float64, the target at each close.
        """
        other = copy.copy(self)
        other._base = base
        market = dataclasses.replace(self.market, dynamics=self.dynamics._replace(spec=spec))
        other.market = other._on_base(market, self.bars)
        other._made = self._made | {"market": other.market}
        return other

    def _on_base(self, market: Market, bars: Bars) -> Market:
        if self._base is None:
            return market
        base = self._base(bars).astype(np.float32)
        base = np.pad(base, ((0, len(market.legs.present) - len(bars)), (0, 0)))
        base = base if self.shards is not None else jnp.asarray(base)
        return dataclasses.replace(market, legs=market.legs._replace(base=base))

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
        """The description of the environment that a policy is made for."""
        return self.dynamics.spec

    @property
    def costs(self) -> Costs:
        """The costs of trading and holding."""
        return self.dynamics.config.costs

    @property
    def rules(self) -> AccountConfig:
        """What an account is given."""
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


# What an environment consists of: its own functions, and what its constructor computes. None is
# of names that mean something to a wrapper of Gymnasium and nothing here.
OWN = {key: value for key, value in vars(TradingEnv).items() if key[:2] != "__" or key == "__len__"}
METHODS = {"action": None, "observation": None, "reward": None, **OWN}
MADE = ("bars", "features", "market", "shards", "task")
INSTEAD = {
    "step reward action": "a reward or actions of your own (reward='mine:r', actions='mine:a')",
    "features observation spec window": "features of your own (features=('mine:f',))",
    "config costs dynamics rules": "an EnvConfig with other fields",
    "reset begin": "an EnvConfig (episode_bars, random_start), or a market (market='mine:m')",
}
ELSE = "other bars, or a market of your own (market='mine:m')"


def expect_env(env: Any, **others: Any) -> None:
    """Check that an argument is an environment that is the same for all who use it.

    Training, Gymnasium and the checks call the functions above with the environment's market. So
    some of them would use a method or an attribute of your own, and others would not.

    Args:
      env: the argument.
      others: see `expect`.

    Raises:
      ConfigError: it is not an environment; or a subclass, or the object, overrides something.
    """
    expect("env", env, TradingEnv, "a TradingEnv", **others)
    name, made = type(env).__name__, vars(env).get("_made")
    if made is None:
        raise ConfigError(f"{name}.__init__: call super().__init__(bars, config) in it.")
    static = inspect.getattr_static
    own = [key for key, value in METHODS.items() if static(env, key, None) is not value]
    _refuse_own(name, own + [key for key, value in made.items() if getattr(env, key) is not value])


def _refuse_own(name: str, own: list[str]) -> None:
    if own:
        found = ([text for x, text in INSTEAD.items() if key in x.split()] for key in own)
        instead = dict.fromkeys((texts or [ELSE])[0] for texts in found)
        raise ConfigError(
            f"{', '.join(f'{name}.{key}' for key in own)}: training and Gymnasium would not use "
            f"what you override; remove it, and give {', and '.join(instead)} in its place; see "
            "docs/guides/extend.md."
        )
