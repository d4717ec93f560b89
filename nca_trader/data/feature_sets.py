"""Sets of features of several assets, whose batch is the scan of their update by one bar."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from nca_trader.config.extensions import FORGET, own_code, split_comparison, split_frame
from nca_trader.data.features import FEATURES, LEAST, Feature, ratio, refuse_absent, refuse_unknown
from nca_trader.data.time_frames import TimeFrame, refuse_other_length
from nca_trader.numerics import (
    MOST_ASSETS,
    as_one_kernel,
    float64_on_cpu,
    pack_numbers,
    unpack_numbers,
)
from nca_trader.types import Bar, Bars, Tensor

NONE: Mapping[str, Any] = MappingProxyType({})
State = tuple[Any, ...]  # of a set: arrays `[n]`, all numbers of one dtype in each


@dataclasses.dataclass(frozen=True)
class FeatureSet:
    """Several features of several assets; get one from `feature_set`.

    Attributes:
      names: `F` names of `FEATURES`, in the order of the values; "1h:rsi" is a feature of bars of
        an hour, and "rank:rsi" compares the assets, see `compared`.
      parts: a feature by its name; a `TimeFrame`, which has all of its features, by its own.
      bar_seconds: length of the bars; 0 where no feature needs it.
    """

    names: tuple[str, ...]
    parts: Mapping[str, Feature | TimeFrame]
    bar_seconds: int = 0

    @property
    def warmup(self) -> int:
        """Number of present bars of an asset before all of its values are meaningful."""
        return max((part.warmup for part in self.parts.values()), default=0)

    @property
    def memory(self) -> int:
        """Number of present bars of an asset on which its values depend, as far as it is known."""
        return max((part.memory for part in self.parts.values()), default=0)

    def warmup_on(self, bars: Bars) -> int:
        """Return `warmup`, or more where features of a longer time frame leave bars out."""
        time = bars.time.astype(np.int64)
        slow = (part for part in self.parts.values() if isinstance(part, TimeFrame))
        return max([self.warmup, *(part.rows_to_warm(time) for part in slow)])

    def init(self, num_assets: int) -> State:
        """Return the state before any bar: numpy arrays `[n]`, one for each dtype."""
        return pack_numbers(self._states(num_assets))

    def update(
        self, state: State, bar: Bar, given: Mapping[str, Tensor] = NONE
    ) -> tuple[State, Array]:
        """Update the state by one bar; pure, to be traced within `jax.enable_x64(True)`.

        Args:
          state: from `init` or the bar before.
          bar: fields `[A]`.
          given: `[A]` of features, by name, what Python computed of this bar, see `Feature.column`.

        Returns:
          The new state, and values `[A, F]` float32.
        """
        before, after, values = unpack_numbers(state, self._states(len(bar.close))), {}, {}
        for name, part in self.parts.items():
            # One asset's update, mapped over assets: no asset sees another.
            with own_code(name):
                more = [given[name]] if name in given else []
                after[name], values[name] = jax.vmap(part.update)(before[name], bar, *more)
        pairs = [split_comparison(name) for name in self.names]

        def of_each(found: Mapping[str, Array]) -> dict[str, Array]:
            """Return `[A]` by feature of what is `[A]`, or `[A, n]` of a time frame, by part."""
            # The features of a time frame come in their order.
            rows = {part: iter(jnp.atleast_2d(x.T)) for part, x in found.items()}
            rests = dict.fromkeys(rest for _, rest in pairs)
            return {rest: next(rows[split_frame(rest)[0] or rest]) for rest in rests}

        alone, known = of_each(values), {}
        if any(how for how, _ in pairs):
            # An own feature that does not say it is not compared, see `refuse_unknown`.
            each = {n: part.known or (lambda _, bar: bar.present) for n, part in self.parts.items()}
            known = of_each({name: jax.vmap(of)(after[name], bar) for name, of in each.items()})
        columns = [
            compared(how, alone[rest], known[rest]) if how else alone[rest] for how, rest in pairs
        ]
        return pack_numbers(after), jnp.stack(columns, axis=-1).astype(jnp.float32)

    def _states(self, num_assets: int) -> dict[str, Any]:
        """Return the features' states before any bar by name, `[A, ...]`."""
        # `init` of your own feature may use jax, and `update` is traced.
        with float64_on_cpu(), jax.ensure_compile_time_eval():
            first = {name: part.init() for name, part in self.parts.items()}
        return jax.tree.map(lambda x: np.broadcast_to(x, (num_assets, *np.shape(x))).copy(), first)

    @functools.cached_property
    def jitted(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """`update` and its scan over bars, compiled."""

        def update(state: State, bar: Bar) -> tuple[State, Array]:
            # A hundred kernels of a few numbers each take 70 us, one takes 20.
            few = len(bar.close) <= MOST_ASSETS
            return (as_one_kernel(self.update) if few else self.update)(state, bar)

        def scan(state: State, bars: Bar, given: Mapping[str, Tensor] = NONE) -> Any:
            rows = (bars, dict(given))
            return jax.lax.scan(lambda state, x: self.update(state, *x), state, rows)

        # `feature_set` caches sets, so each is compiled once per process.
        return jax.jit(update), jax.jit(scan)

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
        """Return values `[N, A, F]` float32 at every bar: the scan of `update`, on the CPU.

        Raises:
          BarError: features of a slower time frame are of bars of another length.
        """
        refuse_other_length(bars, self.bar_seconds)
        refuse_absent(self.names, bars.columns, f"{bars.source or 'bars'}: have")
        given = {}
        for name, part in self.parts.items():
            if isinstance(part, Feature) and part.column is not None:
                with own_code(name):
                    given[name] = part.column(bars)
        with float64_on_cpu():
            _, values = self.jitted[1](self.init(bars.num_assets), bars.as_bar(), given)
        return np.asarray(values)


@functools.lru_cache
def feature_set(
    names: tuple[str, ...], bar_seconds: int = 0, sessions: str = "every_day"
) -> FeatureSet:
    """Return the features called `names`, in that order.

    Args:
      names: of `FEATURES`; of bars of a longer time frame, e.g. "1h:rsi"; or of values compared
        among the assets, e.g. "rank:rsi" and "zscore:1h:rsi".
      bar_seconds: length of the bars. Only features of longer time frames need it.
      sessions: the name of the sessions that longer bars count from, "every_day" (from midnight
        UTC), "new_york", "fx_week", or of your own.

    Raises:
      ConfigError: a name is unknown, or given twice; a time frame that is not a longer multiple of
        the bars.

    Example:
      >>> feature_set(("rsi", "macd")).warmup
      60
      >>> feature_set(("rsi", "1h:rsi"), bar_seconds=60).warmup  # minutes
      958
    """
    refuse_unknown(names)
    parts: dict[str, Feature | TimeFrame] = {}
    slow: dict[str, dict[str, Feature]] = {}
    for name in names:
        frame, bare = split_frame(name)
        (slow.setdefault(frame, {}) if frame else parts)[bare] = FEATURES[bare]
    for frame, features in slow.items():
        parts[frame] = TimeFrame(frame, [*features.values()], bar_seconds, sessions)
    return FeatureSet(names, parts, bar_seconds if slow else 0)


def compared(how: str, x: Array, known: Array) -> Array:
    """Compare values `x` `[A]` among the assets whose values are `known`, at one bar.

    An asset is among them where it has a bar and its feature has warmed up; the others have 0.

    Args:
      how: "rank" is `(2 r - n - 1) / (n - 1)` in [-1, 1] for the rank r from 1 to n of the n
        assets, where equal values share their mean rank; "zscore" is (x - mean) / deviation, with
        ddof=0. Both are 0 for one asset alone, and the latter where all values are equal.
      x: finite.
      known: `[A]` bool.
    """
    known = known & jnp.isfinite(x)
    count = known.sum()
    if how == "rank":
        found = ratio(signed_ranks(x, known).astype(x.dtype), count - 1.0)
    else:
        away = jnp.where(known, x - jnp.where(known, x, 0.0).sum() / count, 0.0)
        # A deviation has the unit of its feature; rounding alone does not count.
        least = LEAST * jnp.where(known, jnp.abs(x), 0.0).max()
        found = ratio(away, jnp.sqrt((away**2).sum() / count), least)
    return jnp.where(known, found, 0.0)


def signed_ranks(x: Array, known: Array) -> Array:
    """Return `[A]` whole numbers 2 r - n - 1 of the ranks r from 1 to n of the n known values.

    Equal values share their mean rank. What is not known is 0.
    """
    line = jnp.where(known, x, jnp.inf)
    if len(x) <= MOST_ASSETS:  # without sorting, which a single kernel cannot do
        others, own = line[None, :], x[:, None]
        below, up_to = (others < own).sum(1), (others <= own).sum(1)
    else:
        line = jnp.sort(line)
        below, up_to = (jnp.searchsorted(line, x, side=side) for side in ("left", "right"))
    return jnp.where(known, below + up_to - known.sum(), 0)


FORGET.append(feature_set.cache_clear)
