"""An environment's step with one array in and one array out, for callers that step from Python.

The time of a jitted call from Python grows with its number of arrays, and that of reading results
with the number of reads. So the result of a step and the state for the next one are the 32-bit
words of one row: first the words that the caller reads, then the carried ones. `jax.vmap` batches
it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from nca_trader.envs.account.state import equity
from nca_trader.envs.market import Market
from nca_trader.envs.rewards import memory_features, num_shown
from nca_trader.envs.trading import (
    EnvState,
    Observation,
    TimeStep,
    TradingEnv,
    episode_length,
    reset,
    step,
    window,
)
from nca_trader.types import EnvSpec

DRAWN = -1  # a start that is drawn


class Carry(NamedTuple):
    """The state of an episode, and the start of the next one.

    state: of the environment. seed: `[2]` uint32, raw key of this stream of episodes. count: `[]`
    uint32, the episode's number in it. over: `[]` bool, this episode has ended.
    """

    state: EnvState
    seed: Array
    count: Array
    over: Array


class StepOutput(NamedTuple):
    """The part of a row that the caller reads, `[]` each but the last.

    index: int32 row. terminated, truncated: bool. reward, equity: float32. observation: `[D]`
    float32, the window's features `[T, A, F]` if gathered on the device, then the account's:
    weight held `[A]`, weight ordered `[A]`, cash `[1]`, as fractions of equity, and `[M]` the
    reward's memory.
    """

    index: Array
    terminated: Array
    truncated: Array
    reward: Array
    equity: Array
    observation: Array


class Packing:
    """A pytree of arrays as one vector of 32-bit words, and back, bit for bit.

    Attributes:
      size: number of words.
    """

    def __init__(self, shapes: Any):
        self._leaves, self._tree = jax.tree.flatten(shapes)
        self._sizes = [jax.eval_shape(_words, leaf).size for leaf in self._leaves]
        self.size = sum(self._sizes)

    def unpack(self, words: Array) -> Any:
        """Return the pytree of `words` `[size]`."""
        # The sizes are numpy's and static, so these are slices and not gathers.
        ends = np.cumsum(self._sizes)
        parts = [words[end - n : end] for n, end in zip(self._sizes, ends, strict=True)]
        leaves = [_of_words(part, leaf) for part, leaf in zip(parts, self._leaves, strict=True)]
        return jax.tree.unflatten(self._tree, leaves)


def pack(tree: Any) -> Array:
    """Return `[size]` uint32, the words of a pytree's arrays; typed keys become their data."""
    return jnp.concatenate([_words(leaf) for leaf in jax.tree.leaves(tree)])


class RowPair:
    """Two rows of a market's array, `first` `[]` and the next, indexed like the whole array.

    `step` reads rows t and t + 1 and nothing else, so it runs on these two unchanged.
    """

    def __init__(self, first: Array, values: Array):
        self._first, self._values = first, values
        self.shape, self.dtype = (None, *values.shape[1:]), values.dtype

    def __getitem__(self, row: Array) -> Array:
        return self._values[row - self._first.astype(row.dtype)]


class Kernel:
    """The jitted steps of one environment with one window, shared by all its callers.

    A row is `[W]` words: `seen` words that the caller reads, then the carried ones.

    Attributes:
      env, window: as given.
      market: the arrays that the traced functions for batches take first.
      on_device: whether windows are gathered on the device.
      seen: number of words that the caller reads. observation: the slice of them that is the
        observation.
    """

    def __init__(self, env: TradingEnv, window: int, on_device: bool):
        self.env, self.window, self.on_device = env, window, on_device
        # Arrays that no step reads are left out: every array makes a call slower.
        market = dataclasses.replace(env.market, volatility=None)
        market = market if on_device else dataclasses.replace(market, features=None)
        self.market, self._market_tree = jax.tree.flatten(market)
        legs, self._legs_tree = jax.tree.flatten(env.market.legs)
        self._leg = Packing([jax.ShapeDtypeStruct(leg.shape[1:], leg.dtype) for leg in legs])
        self._legs = jax.jit(jax.vmap(pack))(legs)
        # Any key will do: only shapes are taken from it, and nothing is computed.
        key = jax.random.key_data(jax.random.key(0))
        scalar = jax.ShapeDtypeStruct((), jnp.int32)
        seen, carry = jax.eval_shape(self._begin, self.market, key, scalar, scalar)
        self._carry, self.seen = Packing(carry), Packing(seen).size
        self.observation = slice(self.seen - seen.observation.size, self.seen)
        self._reset = jax.jit(self.begin_row)
        self._step = jax.jit(self._step_pair)

    def reset(self, seed: np.ndarray, count: int, start: int = DRAWN) -> Array:
        """Return `[W]`, the row of episode `count` of `seed` `[2]`, from bar `start` if given."""
        # Without windows the traced function needs no array of the market, only its sizes.
        market = self.market if self.on_device else []
        return self._reset(market, seed, np.uint32(count), np.int32(start))

    def step(self, words: Array, action: Array | np.ndarray) -> Array:
        """Return the row `[W]` after `action` `[A]`; an action on the device saves 10 us."""
        market = self.market if self.on_device else []
        return self._step(market, self._legs, words, action)

    def _whole(self, leaves: list[Array]) -> Market:
        """Return the market of traced `leaves`; without them, one that is only read for sizes."""
        return jax.tree.unflatten(self._market_tree, leaves) if leaves else self.env.market

    def _begin(
        self, market: list[Array], seed: Array, count: Array, start: Array
    ) -> tuple[StepOutput, Carry]:
        whole = self._whole(market)
        key = jax.random.fold_in(jax.random.wrap_key_data(seed), count)
        state, timestep = reset(whole, key)
        given = start >= 0
        # An episode from a late start is shorter: it ends at the last bar.
        end = jnp.minimum(start + episode_length(whole), whole.num_bars - 1)
        # The draw is made in either case, so a given start leaves the other draws as they are.
        first, last = jnp.where(given, start, state.index), jnp.where(given, end, state.last)
        state = state._replace(index=first, last=last)
        timestep = timestep._replace(observation=timestep.observation._replace(index=first))
        seen = self._see(whole, timestep)
        return seen, Carry(state, seed, jnp.asarray(count, jnp.uint32), jnp.zeros((), bool))

    def begin_row(self, market: list[Array], seed: Array, count: Array, start: Array) -> Array:
        """Return the row `[W]` of the first bar of an episode, see `reset`; traced."""
        return pack(self._begin(market, seed, count, start))

    def step_row(self, market: list[Array], carried: Array, action: Array) -> Array:
        """Return the row `[W]` after `action` `[A]`, from the carried words of the row before."""
        return self._advance(self._whole(market), self.unpack(carried), action)

    def _advance(self, market: Market, carry: Carry, action: Array) -> Array:
        state, timestep = step(market, carry.state, action)
        seen = self._see(market, timestep)
        over = seen.terminated | seen.truncated
        return pack((seen, carry._replace(state=state, over=over)))

    def _step_pair(self, market: list[Array], legs: Array, row: Array, action: Array) -> Array:
        """Step one account over two rows of the packed returns and prices `[N, K]`.

        An argument costs more time per call than the computation with it. So the market is one
        array of words, from which two rows are sliced.
        """
        carry = self.unpack(row[self.seen :])
        first = carry.state.index
        pair = jax.lax.dynamic_slice_in_dim(legs, first, 2)
        rows = [RowPair(first, leg) for leg in jax.vmap(self._leg.unpack)(pair)]
        pair = jax.tree.unflatten(self._legs_tree, rows)
        return self._advance(dataclasses.replace(self._whole(market), legs=pair), carry, action)

    def unpack(self, carried: Array) -> Carry:
        """Return the `Carry` of a row's carried words."""
        return self._carry.unpack(carried)

    def _see(self, market: Market, timestep: TimeStep) -> StepOutput:
        observation = timestep.observation
        if self.on_device:
            words = observed(market, observation, self.window)
        else:
            words = account_row(self.env.spec, observation)
        # Cast to one word each, also under x64: callers find the numbers by their position.
        return StepOutput(
            observation.index,
            timestep.discount == 0.0,
            timestep.truncated,
            timestep.reward.astype(jnp.float32),
            equity(observation.account).astype(jnp.float32),
            words.astype(jnp.float32),
        )


def observed(market: Market, observation: Observation, length: int) -> Array:
    """Return `[D]` the features of the last `length` bars, then `account_row`."""
    account = account_row(market.dynamics.spec, observation)
    return jnp.concatenate([window(market, observation, length).ravel(), account])


def account_size(spec: EnvSpec) -> int:
    """Return 2 A + 1 + M, the length of `account_row`; 3 A + 1 + M with a base rule."""
    return (2 + (spec.base != "none")) * spec.num_assets + 1 + num_shown(spec)


def account_row(spec: EnvSpec, observation: Observation) -> Array:
    """Return weights held and ordered, cash, the reward's memory, then the base's target if any."""
    account = observation.account
    held = account.held
    kept = (number[None] for number in memory_features(spec, account))
    base = () if spec.base == "none" else (account.base,)
    return jnp.concatenate([held, account.ordered, 1.0 - held.sum()[None], *kept, *base])


def _is_key(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _words(leaf: Array) -> Array:
    """Return `[n]` uint32; types of fewer than 32 bits (bool, int8) take one word each."""
    if _is_key(leaf.dtype):
        leaf = jax.random.key_data(leaf)
    if leaf.dtype.itemsize < 4:
        leaf = leaf.astype(jnp.int32)  # a bitcast needs types of one size
    return jax.lax.bitcast_convert_type(leaf, jnp.uint32).ravel()


def _of_words(words: Array, like: Any) -> Array:
    if _is_key(like.dtype):
        data = jax.eval_shape(jax.random.key_data, like)
        return jax.random.wrap_key_data(words.reshape(data.shape))
    if like.dtype.itemsize < 4:
        return jax.lax.bitcast_convert_type(words, jnp.int32).reshape(like.shape).astype(like.dtype)
    if like.dtype.itemsize == 8:  # a float64 is two words
        words = words.reshape(*like.shape, 2)
        return jax.lax.bitcast_convert_type(words, like.dtype)
    return jax.lax.bitcast_convert_type(words, like.dtype).reshape(like.shape)
