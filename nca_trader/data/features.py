"""Features as online updates: a batch and a live loop see the same values.

A feature is `init() -> state` and `update(state, bar) -> state, value`, written for one asset in
float64. Its batch form is the scan of its update. Look-ahead thus cannot be written, and the live
loop sees training's numbers bit for bit. Every value is normalised by the past alone: by
statistics of the bars before it, or by an indicator's own definition, which includes the bar.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from nca_trader.data.indicators import FEATURES
from nca_trader.errors import ConfigError
from nca_trader.numerics import float64_on_cpu
from nca_trader.types import Bar, Bars


@dataclasses.dataclass(frozen=True)
class FeatureSet:
    """Several features of several assets; get one from `feature_set`.

    Attributes:
      names: `F` names, in the order of the values.
    """

    names: tuple[str, ...]

    @property
    def warmup(self) -> int:
        """Number of present bars of an asset before all of its values are meaningful."""
        return max((FEATURES[name].warmup for name in self.names), default=0)

    def init(self, num_assets: int) -> dict[str, Any]:
        """Returns the state before any bar: a dict by name of numpy arrays `[A, ...]`."""
        return {
            name: jax.tree.map(
                lambda x: np.broadcast_to(x, (num_assets, *x.shape)).copy(), FEATURES[name].init()
            )
            for name in self.names
        }

    def update(self, state: dict[str, Any], bar: Bar) -> tuple[dict[str, Any], Array]:
        """Updates the state by one bar; pure, to be traced within `jax.enable_x64(True)`.

        Args:
          state: from `init` or the bar before.
          bar: fields `[A]`.

        Returns:
          The new state, and values `[A, F]` float32.
        """
        new, values = {}, []
        for name in self.names:
            new[name], value = jax.vmap(FEATURES[name].update)(state[name], bar)
            values.append(value)
        return new, jnp.stack(values, axis=-1).astype(jnp.float32)

    @functools.cached_property
    def _jitted_update(self):
        return jax.jit(self.update)

    @functools.cached_property
    def _jitted_scan(self):
        return jax.jit(lambda state, bars: jax.lax.scan(self.update, state, bars))

    def step(self, state: dict[str, Any], bar: Bar) -> tuple[dict[str, Any], np.ndarray]:
        """Runs `update` for a live loop, compiled, in float64 on the CPU.

        Args:
          state: from `init` or the bar before.
          bar: numpy fields `[A]`.

        Returns:
          The new state, and values `[A, F]` float32, bit for bit those of `batch`.
        """
        with float64_on_cpu():
            state, values = self._jitted_update(state, bar)
        return state, np.asarray(values)

    def batch(self, bars: Bars) -> np.ndarray:
        """Returns values `[N, A, F]` float32 at every bar: the scan of `update`, on the CPU."""
        with float64_on_cpu():
            _, values = self._jitted_scan(self.init(bars.num_assets), bars.as_bar())
        return np.asarray(values)


@functools.lru_cache
def feature_set(names: tuple[str, ...]) -> FeatureSet:
    """Returns the features called `names`, in that order.

    Raises:
      ConfigError: a name is unknown, or given twice.

    Example:
      >>> feature_set(("rsi", "macd")).warmup
      60
    """
    for name in names:
        if name not in FEATURES:
            near = difflib.get_close_matches(name, FEATURES, n=1, cutoff=0.0)[0]
            raise ConfigError(f"unknown feature {name!r}; did you mean {near!r}?")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"feature {twice!r} is listed twice; list it once.")
    return FeatureSet(names)
