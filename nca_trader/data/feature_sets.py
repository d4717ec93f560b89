"""Sets of features by name: those of `features`, and your own."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from nca_trader.config.extensions import FORGET, Registry, own_code
from nca_trader.config.ranges import described
from nca_trader.data.features import BUILT_IN, Feature
from nca_trader.errors import ConfigError
from nca_trader.numerics import MOST_ASSETS, as_one_kernel, float64_on_cpu, packed, unpacked
from nca_trader.types import Bar, Bars

State = tuple[Any, ...]  # of a set: arrays `[n]`, all numbers of one dtype in each


def own_feature(value: Any, name: str) -> Feature:
    """Return the feature that your own code gives, once it has the shapes and types of one.

    Args:
      value: a `Feature`, or a function without arguments that returns one.
      name: of it, for messages.

    Raises:
      ConfigError: it isn't one, or its update cannot be scanned.
    """
    if callable(value) and not isinstance(value, Feature):
        with own_code(name):
            value = value()
    if not isinstance(value, Feature):
        raise ConfigError(
            f"{name}: is {described(value)}; give a Feature, e.g. of make_feature, or a function "
            "that returns one."
        )
    # With quotes and dividends: a feature may need them, and `update` says so where they lack.
    types = dict.fromkeys(Bar._fields, np.float64) | {"time": np.int64, "present": bool}
    fields: Any = {field: jax.ShapeDtypeStruct((), kind) for field, kind in types.items()}
    bar = Bar(**fields)
    with float64_on_cpu(), own_code(name):
        state = value.init()
        after, given = jax.eval_shape(value.update, state, bar)
        same = jax.tree.structure(state) == jax.tree.structure(after)
        pairs = zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=False)
        if not same or any(np.shape(x) != y.shape or x.dtype != y.dtype for x, y in pairs):
            raise ConfigError(
                f"{name}: a bar changes the structure, a shape or a type of its state; return the "
                "state as `init` gives it."
            )
    if given.shape != () or given.dtype != np.float64:
        raise ConfigError(
            f"{name}: its value is {given.dtype}{given.shape}; return one float64 number per bar."
        )
    return value


FEATURES: Registry[Feature] = Registry("features", BUILT_IN, own_feature)


@dataclasses.dataclass(frozen=True)
class FeatureSet:
    """Several features of several assets; get one from `feature_set`.

    Attributes:
      names: `F` names of `FEATURES`, in the order of the values.
    """

    names: tuple[str, ...]

    @property
    def warmup(self) -> int:
        """Number of present bars of an asset before all of its values are meaningful."""
        return max((FEATURES[name].warmup for name in self.names), default=0)

    def init(self, num_assets: int) -> State:
        """Return the state before any bar: numpy arrays `[n]`, one for each dtype."""
        return packed(self._states(num_assets))

    def update(self, state: State, bar: Bar) -> tuple[State, Array]:
        """Update the state by one bar; pure, to be traced within `jax.enable_x64(True)`.

        Args:
          state: from `init` or the bar before.
          bar: fields `[A]`.

        Returns:
          The new state, and values `[A, F]` float32.
        """
        before, after, values = unpacked(state, self._states(len(bar.close))), {}, []
        for name in self.names:
            # One asset's update, mapped over assets: no asset sees another.
            with own_code(name):
                after[name], value = jax.vmap(FEATURES[name].update)(before[name], bar)
            values.append(value[:, None])
        return packed(after), jnp.concatenate(values, axis=-1).astype(jnp.float32)

    def _states(self, num_assets: int) -> dict[str, Any]:
        """Return the features' states before any bar by name, `[A, ...]`."""
        # `init` of your own feature may use jax, and `update` is traced.
        with float64_on_cpu(), jax.ensure_compile_time_eval():
            first = {name: FEATURES[name].init() for name in self.names}
        return jax.tree.map(lambda x: np.broadcast_to(x, (num_assets, *np.shape(x))).copy(), first)

    @functools.cached_property
    def jitted(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """`update` and its scan over bars, compiled."""

        def update(state: State, bar: Bar) -> tuple[State, Array]:
            # A hundred kernels of a few numbers each take 70 us, one takes 20.
            few = len(bar.close) <= MOST_ASSETS
            return (as_one_kernel(self.update) if few else self.update)(state, bar)

        # `feature_set` caches sets, so each is compiled once per process.
        return jax.jit(update), jax.jit(functools.partial(jax.lax.scan, self.update))

    def step(self, state: State, bar: Bar) -> tuple[State, np.ndarray]:
        """Run `update` for a live loop, compiled, in float64 on the CPU.

        Args:
          state: from `init` or the bar before.
          bar: numpy fields `[A]`.

        Returns:
          The new state, and values `[A, F]` float32, bit for bit those of `batch`.
        """
        with float64_on_cpu():
            state, values = self.jitted[0](state, bar)
        return state, np.asarray(values)

    def batch(self, bars: Bars) -> np.ndarray:
        """Return values `[N, A, F]` float32 at every bar: the scan of `update`, on the CPU."""
        with float64_on_cpu():
            _, values = self.jitted[1](self.init(bars.num_assets), bars.as_bar())
        return np.asarray(values)


@functools.lru_cache
def feature_set(names: tuple[str, ...]) -> FeatureSet:
    """Return the features called `names`, in that order.

    Raises:
      ConfigError: a name is unknown, or given twice.

    Example:
      >>> feature_set(("rsi", "macd")).warmup
      60
    """
    for name in names:
        FEATURES[name]  # refuses an unknown one
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"feature {twice!r} is listed twice; list it once.")
    return FeatureSet(names)


FORGET.append(feature_set.cache_clear)
