"""The vector environment in the form of Stable-Baselines3.

    from nca_trader.envs.sb3 import SB3VecEnv
    agent = PPO("MlpPolicy", SB3VecEnv(64, bars, config))
    agent = PPO("MlpPolicy", SB3VecEnv(64, "nca_trader/ou_mid-v1"))

It needs Stable-Baselines3, which this package does not install: `pip install stable-baselines3`.
`make_vec_env` of that library works as well, but steps environments one after the other.
`targets_of` returns what a trained model orders, for `nca_trader.backtest`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import time
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import jax.numpy as jnp
import numpy as np
from gymnasium import ActionWrapper, ObservationWrapper
from gymnasium.vector import AutoresetMode
from stable_baselines3.common.vec_env import (  # pyright: ignore[reportMissingImports]
    DummyVecEnv,
    VecCheckNan,
    VecEnv,
    VecEnvWrapper,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
)

from nca_trader.config import EnvConfig
from nca_trader.envs.actions import to_target
from nca_trader.envs.gym.environment import GymEnv, split_observation
from nca_trader.envs.gym.vector import GymVectorEnv
from nca_trader.envs.sb3_model import Act, act_of, frames_of
from nca_trader.errors import ConfigError
from nca_trader.types import Bars

# Wrappers that neither change observations nor actions, and the two that `act_of` plays.
KNOWN = (VecMonitor, VecCheckNan, VecNormalize, VecFrameStack)
INSTEAD = (
    "give an object whose predict(observation, state, episode_start, deterministic) does the same"
)


def targets_of(
    model: Any, bars: Bars, config: EnvConfig, window: int = 1, start: str | int | None = None
) -> np.ndarray:
    """Return the weights that a model orders over bars, deciding as it would live.

    The model acts in one episode of the Gymnasium environment, from a flat account. Give the result
    to `nca_trader.backtest` with the costs, fill and order of `config`.

    Args:
      model: anything with Stable-Baselines3's `predict(observation, deterministic=True)`; one with
        a memory takes `state` and `episode_start` as well. Its own environment says what it sees:
        a `VecNormalize`, a `VecFrameStack`, and the masks of an `ActionMasker`. No file holds
        these, so a model that was loaded needs it: `PPO.load(path, env=VecNormalize.load(...))`.
      bars: N bars of the A assets that it was trained on.
      config: of the environment that it was trained in.
      window: T, bars of features in an observation.
      start: row or date of the first decision; None is the first bar with warm features.

    Returns:
      `[N, A]` float64 weights, NaN where the model did not decide.

    Raises:
      ConfigError, BarError: as `GymEnv` and its `reset`; or the model sees other observations, or
        was trained in another wrapper.
    """
    # One episode to the end of the bars, from no position.
    whole = dataclasses.replace(config, episode_bars=None, random_start=False)
    env = GymEnv(bars, whole, window)
    spec = env.trading.spec
    seen, info = env.reset(seed=0, options={"start": spec.warmup if start is None else start})
    targets, ended = np.full((len(bars), spec.num_assets), np.nan), False
    try:
        act, mask = _of_model(model, len(seen), spec.num_assets)
    except LookupError as error:
        raise ConfigError(f"{type(model).__name__}: {error}.") from None
    memory = None
    while not ended:
        masks = {} if mask is None else {"action_masks": mask(env)}
        action, memory = act(seen[None], memory, **masks)
        row = info["row"]
        # Gymnasium's discrete space takes a number, the model returns an array.
        action = int(action) if env.action_space.shape == () else action
        account = split_observation(seen, spec, window)["account"]
        ordered = account[spec.num_assets : 2 * spec.num_assets]
        targets[row] = to_target(spec, np.atleast_1d(action), jnp.asarray(ordered))
        seen, _, terminated, truncated, info = env.step(action)
        ended = terminated or truncated
    return targets


def _of_model(model: Any, size: int, assets: int) -> tuple[Act, Callable[[Any], Any] | None]:
    """Return how a model acts on observations of `size` numbers, and the function of its masks.

    Raises:
      LookupError: what it sees or may do is not known, or not played here.
    """
    env = getattr(model, "get_env", lambda: None)()
    load = f"load it with its environment, {type(model).__name__}.load(path, env=...)"
    found, masks = {}, None
    for each in _wrappers(env):
        name = type(each).__name__
        known = type(each) in KNOWN
        if isinstance(each, gymnasium.Wrapper):
            known = each.observation_space.shape == each.env.observation_space.shape
            masks = vars(each).get("_action_mask_fn", masks)  # of an `ActionMasker`
        if not known or name in found or isinstance(each, ObservationWrapper | ActionWrapper):
            raise LookupError(f"{name} of its environment is not played here; {INSTEAD}")
        found[name] = each
    frames = frames_of(model, size, assets)
    if env is not None:
        stack = found.get("VecFrameStack")
        frames = 1 if stack is None else stack.stacked_obs.n_stack
        frames *= model.observation_space.shape == (size * frames,)
    if not frames:
        raise LookupError(
            f"it observes {model.observation_space}, and the environment shows {size} numbers; "
            f"give the config and window that it was trained with, or {load}"
        )
    if "action_masks" in inspect.signature(model.predict).parameters:
        if env is None:
            raise LookupError(f"its file does not hold the masks of its actions; {load}")
        # A method is of another environment, which stands at another bar.
        if env.has_attr("action_masks") and (masks is None or hasattr(masks, "__self__")):
            raise LookupError(f"a method of its environment gives its masks; {INSTEAD}")
    return act_of(model, size, frames, found.get("VecNormalize"), load, single=True), masks


def _wrappers(env: Any) -> Iterator[Any]:
    """Yield the wrappers of a model's environment, those of its first environment included."""
    while isinstance(env, VecEnvWrapper):
        yield env
        env = env.venv
    env = next(iter(getattr(env, "envs", ())), None) if isinstance(env, DummyVecEnv) else None
    while isinstance(env, gymnasium.Wrapper):
        yield env
        env = env.env


class SB3VecEnv(VecEnv):
    """`num_envs` accounts in one market, stepped by one compiled call.

    As in Stable-Baselines3, an environment whose episode ends starts the next one in the same step.
    `infos[i]` then has "terminal_observation", "TimeLimit.truncated" and "episode": the return,
    length and seconds for its logger. Rewards are float32, observations are flat.
    """

    def __init__(self, num_envs: int, bars: Any = None, *args: Any, **kwargs: Any):
        """Make the environments; arguments as those of `GymVectorEnv`, but for the autoreset.

        Args:
          num_envs: how many.
          bars: as `GymVectorEnv`, or an id of this package in Gymnasium.
          *args: as `GymVectorEnv`.
          **kwargs: as `GymVectorEnv`, or as the id takes them.

        Raises:
          ConfigError, BarError: as `GymVectorEnv`.
        """
        make: Any = functools.partial(GymVectorEnv, num_envs, bars)
        if isinstance(bars, str) and bars in gymnasium.registry:
            make = functools.partial(gymnasium.make_vec, bars, num_envs)
        given = dict(zip(("config", "window", "flatten"), args, strict=False)) | kwargs
        self.envs: GymVectorEnv = make(autoreset_mode=AutoresetMode.SAME_STEP, **given)
        self.render_mode = None
        self._actions: np.ndarray | None = None
        self._returns, self._lengths = np.zeros(num_envs), np.zeros(num_envs, int)
        self._began = time.perf_counter()
        single = self.envs.single_observation_space, self.envs.single_action_space
        super().__init__(num_envs, *single)

    def reset(self) -> np.ndarray:
        """Return `[n, D]` first observations of new episodes, with the seeds that `seed` set."""
        seeds = None if self._seeds[0] is None else list(self._seeds)
        observations, _ = self.envs.reset(seed=seeds)
        self._reset_seeds()  # as the base class asks: a seed holds for one reset
        self._returns[:], self._lengths[:] = 0.0, 0
        return observations

    def step_async(self, actions: np.ndarray) -> None:
        """Keep `actions` `[n]` or `[n, A]` for `step_wait`."""
        self._actions = actions

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        """Return `[n, D]` observations, `[n]` rewards, `[n]` whether episodes ended, `n` infos."""
        seen, reward, terminated, truncated, info = self.envs.step(self._actions)
        done, infos = terminated | truncated, [{} for _ in range(self.num_envs)]
        self._returns += reward
        self._lengths += 1
        for i in np.flatnonzero(done):
            episode = {"r": self._returns[i], "l": int(self._lengths[i])}
            infos[i] = {
                "terminal_observation": info["final_obs"][i],
                # Stable-Baselines3 bootstraps from the terminal observation where this is True.
                "TimeLimit.truncated": bool(truncated[i] and not terminated[i]),
                "episode": episode | {"t": time.perf_counter() - self._began},
            }
            self._returns[i], self._lengths[i] = 0.0, 0
        return seen, reward.astype(np.float32), done, infos

    def close(self) -> None:
        """Free the environments."""
        self.envs.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """Return the attribute `attr_name` of each environment at `indices`; all share it."""
        # The base class's constructor reads `render_mode` of each environment through this method.
        owner = self if hasattr(self, attr_name) else self.envs
        return [getattr(owner, attr_name)] * len(list(self._get_indices(indices)))

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Refuse: the environments are one batch."""
        raise ConfigError(
            f"{attr_name} cannot be set in one environment of a batch; give it when making them."
        )

    def env_method(
        self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any
    ) -> list[Any]:
        """Refuse: the environments are one batch."""
        raise ConfigError(
            f"{method_name}() cannot be called on one environment of a batch; use "
            "stable_baselines3.common.env_util.make_vec_env for environments of their own."
        )

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        """Return False for each environment: none has a Gymnasium wrapper."""
        return [False] * len(list(self._get_indices(indices)))
