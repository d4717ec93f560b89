"""Decisions of a model of Stable-Baselines3 or sb3-contrib, with its memory, statistics and stack.

`targets_of` and the process in which `prove` plays a model share them. That process may be of a
Python without jax and without this package, so nothing but numpy is imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

Act = Callable[..., tuple[Any, Any]]  # (observations, memory) -> (actions, memory)


def frames_of(model: Any, size: int, assets: int) -> int:
    """Return how many observations of the market a model sees at once; 0 where it sees another.

    A file names no wrapper. It keeps the last observations, and each of a `VecFrameStack` ends with
    an account, whose weights and cash sum to 1. Those of a longer window do not.

    Args:
      model: that was loaded without its environment; one of another library sees one.
      size: D, numbers in an observation.
      assets: A.
    """
    shape = getattr(getattr(model, "observation_space", None), "shape", (size,)) or ()
    if shape == (size,) or len(shape) != 1 or shape[0] % size:
        return int(shape == (size,))
    # Before the statistics of a `VecNormalize`; of the size of one where these come first.
    last = next((x for x in (model._last_original_obs, model._last_obs) if x is not None), ())
    if np.shape(last)[1:] == (size,):
        return shape[0] // size
    frames = np.reshape(last, (-1, size))
    frames = frames[frames.any(axis=1)]  # before an episode they are zeros
    whole = frames[:, -1] + frames[:, -1 - 2 * assets : -1 - assets].sum(axis=1)
    return shape[0] // size if len(frames) and np.allclose(whole, 1.0, atol=1e-4) else 0


def act_of(model: Any, size: int, frames: int, normal: Any, give: str, single: bool = False) -> Act:
    """Return how a model acts: `(observations [B, D], memory) -> (actions, memory)`.

    The memory is None at an episode's first decision. Further arguments by name go to `predict`.

    Args:
      model: anything with Stable-Baselines3's `predict(observation, deterministic=True)`; one with
        a memory takes `state` and `episode_start` as well.
      size: D, numbers in an observation of the market.
      frames: observations that the model sees at once, the newest last.
      normal: the `VecNormalize` that it was trained in, inside or outside of the stack; or None.
      give: how a user gives the statistics, for messages.
      single: whether B is 1 and `predict` gets `[D]`, as an object of the user's own may expect.

    Raises:
      LookupError: its statistics are missing, or of another size.
    """
    if normal is None and getattr(model, "_last_original_obs", None) is not None:
        raise LookupError(f"it was trained in a VecNormalize, which its file does not hold; {give}")
    of = size if normal is None else int(np.prod(normal.observation_space.shape))
    if of not in (size, size * frames):
        raise LookupError(
            f"its VecNormalize is of {of} numbers, and the model sees {size * frames}; {give}"
        )
    remembers = "episode_start" in inspect.signature(model.predict).parameters

    def act(seen: np.ndarray, memory: Any, **more: Any) -> tuple[Any, Any]:
        begins, none = memory is None, np.zeros((len(seen), size * (frames - 1)), np.float32)
        state, before = (None, none) if begins else memory
        if remembers:
            more |= {"state": state, "episode_start": np.full(len(seen), begins)}
        if normal and of == size:
            seen = normal.normalize_obs(seen)
        seen = np.concatenate([before, seen], axis=1)
        before = seen[:, size:]
        if normal and of > size:
            seen = normal.normalize_obs(seen)
        actions, state = model.predict(seen[0] if single else seen, deterministic=True, **more)
        return actions, (state, before)

    return act
