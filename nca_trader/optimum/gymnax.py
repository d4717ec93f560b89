"""A frozen market in the form of gymnax, whole in JAX: for rejax, PureJaxRL and others.

    from nca_trader.optimum.gymnax import GymnaxEnv
    agent = rejax.PPO.create(env=GymnaxEnv("ou_mid"), num_envs=64)

It needs gymnax, which this package does not install; rejax 0.1.3 needs `gymnax<1`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from nca_trader.envs.gym.environment import action_space, observation_space
from nca_trader.envs.gym.packed import observed
from nca_trader.envs.trading import EnvState, TradingEnv
from nca_trader.errors import ConfigError
from nca_trader.optimum.frozen import HORIZON, WINDOW, drawn, frozen

try:
    from gymnax.environments import environment, spaces  # pyright: ignore[reportMissingImports]
except ModuleNotFoundError:
    raise ConfigError("gymnax is not installed; pip install 'gymnax<1'.") from None


@struct.dataclass
class Params:
    """The parameters of the environment; they cannot be changed.

    Attributes:
      max_steps_in_episode: steps of an episode.
    """

    max_steps_in_episode: int = struct.field(pytree_node=False, default=HORIZON)


class MultiDiscrete(spaces.Space):
    """Whole numbers from 0 to `n - 1`, one for each asset; rejax has no agent for it."""

    def __init__(self, n: int, shape: tuple[int, ...]):
        self.n, self.shape, self.dtype = n, shape, jnp.int32

    def sample(self, key: Array) -> Array:
        """Draw an action."""
        return jax.random.randint(key, self.shape, 0, self.n, self.dtype)

    def contains(self, x: Array) -> Array:
        """Return whether `x` is an action."""
        return jnp.all((x >= 0) & (x < self.n))


@dataclasses.dataclass(frozen=True)
class GymnaxEnv(environment.Environment):
    """A frozen market; equal to the id in Gymnasium from the same start.

    It is stored by name, without its bars. An episode ends by truncation, which gymnax before
    version 1 shows as `done` with `info["discount"]` 1.

    Attributes:
      market: as `nca_trader.optimum.frozen.frozen` takes it.
      draw: seed of the path.
    """

    market: str
    draw: int = 0

    def __post_init__(self):
        _ = self.trading  # refuses an unknown market; a path is drawn here and not under a trace

    @property
    def trading(self) -> TradingEnv:
        """The environment whose `reset` and `step` these are."""
        return drawn(self.market, self.draw)

    @property
    def default_params(self) -> Params:
        """The only parameters."""
        return Params()

    def reset_env(self, key: Array, params: Params) -> tuple[Array, EnvState]:
        """Start an episode at a random bar, from a flat account."""
        if params.max_steps_in_episode != HORIZON:
            raise ConfigError(f"{self.name} is frozen: an episode has {HORIZON} steps.")
        state, _ = self.trading.reset(key)
        state = state._replace(key=None)  # gymnax gives the key of the next episode
        return self.get_obs(state), state

    def step_env(
        self, key: Array, state: EnvState, action: Any, params: Params
    ) -> tuple[Array, EnvState, Array, Array, dict[str, Array]]:
        """Order `action` and move to the next bar."""
        trading = self.trading
        action = jnp.reshape(action, trading.spec.num_assets)
        if not trading.spec.num_actions:
            # Nothing is raised inside a program: what is not finite orders nothing.
            action = jnp.where(jnp.isfinite(action), action, jnp.nan)
        state, timestep = trading.step(state, action)
        ended = self.is_terminated(state, params)
        if not hasattr(environment.Environment, "is_truncated"):  # before version 1
            ended |= self.is_truncated(state, params)
        return self.get_obs(state), state, timestep.reward, ended, {"discount": timestep.discount}

    def get_obs(self, state: EnvState, params: Any = None, key: Any = None) -> Array:
        """Return `[D]` features of one bar `[A F]`, then the account."""
        return observed(self.trading.market, state.observation, WINDOW)

    def is_terminated(self, state: EnvState, params: Params) -> Array:
        """Return whether the account is bankrupt."""
        return state.episode.account.bankrupt

    def is_truncated(self, state: EnvState, params: Params) -> Array:
        """Return whether the episode has reached its last bar."""
        return (state.index >= state.last) & ~state.episode.account.bankrupt

    def is_terminal(self, state: EnvState, params: Params) -> Array:
        """Return whether the account is bankrupt, as gymnax's `discount` asks."""
        return self.is_terminated(state, params)

    @property
    def name(self) -> str:
        """The id in Gymnasium."""
        return frozen(self.market).id

    @property
    def num_actions(self) -> int:
        """Actions of an asset, or numbers of an action where it is an array of numbers."""
        return self.trading.spec.num_actions or self.trading.spec.num_assets

    def action_space(self, params: Any = None) -> spaces.Space:
        """Return `Discrete` for one asset, `MultiDiscrete` for several, `Box` for numbers."""
        space: Any = action_space(self.trading.spec)
        if self.trading.spec.num_actions:
            n, shape = self.num_actions, space.shape
            return MultiDiscrete(n, shape) if shape else spaces.Discrete(n)
        return spaces.Box(float(space.low.min()), float(space.high.max()), space.shape)

    def observation_space(self, params: Any = None) -> spaces.Space:
        """Return the `Box` of `get_obs`."""
        space: Any = observation_space(self.trading.spec, WINDOW, flatten=True)
        return spaces.Box(float(space.low.min()), float(space.high.max()), space.shape)
