"""Speed of the environment, with the environments of other packages as peers."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import nca_trader.envs.gym.environment  # noqa: F401  (registers the name)
from nca_trader.config import EnvConfig
from nca_trader.config.ranges import multiple, refuse
from nca_trader.data.bars import sample_bars
from nca_trader.data.features import FEATURES as KNOWN
from nca_trader.envs.account.state import open_account
from nca_trader.envs.trading import Episode, TradingEnv, transition
from nca_trader.errors import ConfigError
from nca_trader.learner.rollout import select
from nca_trader.parallel.mesh import DATA, make_mesh
from nca_trader.types import Costs

from .timing import compared, measure, measured_by

LENGTH, EPISODE = 512, 256  # bars of one compiled call, and of an episode
BLOCK = 1024  # accounts that one core walks together: their data stays in its cache
WINDOW, FEATURES = 64, 20
SB3_ENVS = 64
# The peers of each row: module and options.
PEERS = {
    "index": (("torchtrade_batched", {}), ("gymnax_cartpole", {})),
    "window": (("torchtrade_batched", {"window": WINDOW, "features": FEATURES}),),
    "one": (("gym_trading_env_single", {"envs": 1}),),
    "vector": (("gym_trading_env_single", {"envs": 1}),),
}
# What each side produces per step: a ratio says little without it.
OURS = {
    "index": "bar index and account, on the device; no window, no info dict, rewards summed",
    "window": f"the account on the device; the {WINDOW} x {FEATURES} window is gathered and summed "
    "inside the compiled loop and never written out; no info dict",
    "one": "numpy observation of 5 features and 3 account fractions, info dict of 4 entries",
    "vector": "one numpy array [envs, 8] of observations and one dict of arrays as info, for all "
    "environments at once",
    "sb3": "one numpy array [envs, D] of observations, an info dict for each environment",
}
THEIRS = {
    "torchtrade_batched": "a tensordict for every step: feature windows (10 x 5 unless the row "
    "says otherwise), 6 account features, reward, flags; no info dict",
    "gymnax_cartpole": "4 numbers of state, which are the observation, summed; another "
    "problem, without bars or accounts",
    "gym_trading_env_single": "numpy observation of 5 features, a history row and an info dict of "
    "17 entries; one environment at a time",
    "gym-trading-env": "the same through DummyVecEnv, one environment after another, with Monitor",
    "gym-anytrading": "numpy windows of 10 prices and differences and an info dict; one "
    "environment after another, with Monitor; its fee is not in the reward",
}


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields rows of random actions in the environment itself and through Gymnasium.

    Args:
      args: `envs`, a number of environments, and `peers`, an interpreter or None.
    """
    for kind, measured in (
        ("index", lambda: _index(args.envs, 0)),
        ("window", lambda: _index(args.envs, WINDOW)),
        ("one", _one_env),
        ("vector", _vector_env),
    ):
        row = measured() | {"ours": OURS[kind]}
        rivals = PEERS[kind] if args.peers else ()
        for module, options in rivals:
            theirs = measured_by(args.peers, module, {"envs": args.envs} | options)
            yield compared(row, theirs) | {"theirs": THEIRS[module]}
        if not rivals:
            yield row
    if not args.peers:
        return
    # Stable-Baselines3's PPO on our batch of environments, then on the peers' environments.
    options = {"envs": SB3_ENVS}
    ours = measured_by(args.peers, "sb3_ppo", options | {"market": "batch"})
    row = {
        "name": f"Stable-Baselines3 PPO on {SB3_ENVS} environments",
        "envs": SB3_ENVS,
        "envs_per_segment": None,
        "steps_per_s": ours["steps_per_s"],
        "compile_s": None,
        "ours": OURS["sb3"],
    }
    for market in ("gym-trading-env", "gym-anytrading"):
        theirs = measured_by(args.peers, "sb3_ppo", options | {"market": market})
        yield compared(row, theirs) | {"theirs": THEIRS[market]}


def _setting(features: int) -> TradingEnv:
    """Returns an environment of one asset with every proportional cost; 5,031 daily bars."""
    costs = Costs(
        commission=5e-4, slippage=2e-4, half_spread=1e-4, borrow_fee=0.01, interest_lend=0.02,
        interest_borrow=0.04,
    )  # fmt: skip
    config = EnvConfig(
        features=tuple(KNOWN)[:features], costs=costs, size=1.0, random_start=False,
        episode_bars=EPISODE,
    )  # fmt: skip
    return TradingEnv(sample_bars("sp500").select("SP500"), config)


def _index(envs: int, window: int) -> dict[str, Any]:
    """Measures accounts that each have their own bars and reset by themselves.

    Accounts are split over the mesh. On a CPU each device walks its accounts in blocks that fit
    its cache, one block after another. With `window`, features are read too.
    """
    mesh = make_mesh(len(jax.devices()))
    if envs < mesh.size:
        raise ConfigError(f"--envs {envs}: give at least {mesh.size}, one per device.")
    block = envs // mesh.size
    if mesh.devices.flat[0].platform == "cpu":
        block = min(BLOCK, block)
    refuse(multiple("--envs", envs, "devices x block", mesh.size * block))
    walk, begin = _walk(window)

    def blocks(carry: Any) -> Any:
        parts = jax.tree.map(lambda a: a.reshape(-1, block, *a.shape[1:]), carry)
        return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), jax.lax.map(walk, parts))

    spread = jax.shard_map(blocks, mesh=mesh, in_specs=P(DATA), out_specs=P(DATA))
    lanes = jnp.arange(envs, dtype=jnp.uint32)
    carry = jax.device_put(jax.jit(begin)(lanes), NamedSharding(mesh, P(DATA)))
    name = f"{window} x {FEATURES} windows" if window else "index observations, all costs"
    call = jax.jit(spread, donate_argnums=0)
    return measure(name, call, carry, envs * LENGTH, envs=envs, devices=mesh.size, block=block)


def _walk(window: int) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Returns `walk(carry) -> carry`, LENGTH bars of a block, and `begin(lanes) -> carry`."""
    env = _setting(FEATURES)
    first, last = env.spec.warmup, len(env) - 2 - EPISODE
    move = jax.vmap(functools.partial(transition, env.dynamics))

    def begin(lane: Any) -> Any:
        start = (first + lane % jnp.uint32(last - first)).astype(jnp.int32)
        fresh = Episode(jax.vmap(open_account)(jnp.zeros((lane.size, 1))))
        zero = jnp.zeros(lane.shape)
        return lane, jnp.zeros_like(lane), start, jnp.full(lane.shape, EPISODE), fresh, zero

    def step(carry: Any, _: None) -> Any:
        lane, number, index, left, episode, total = carry
        # A hash of counters: a random generator would cost more than the account.
        h = number * jnp.uint32(2654435761) ^ lane * jnp.uint32(2246822519)
        h = (h ^ (h >> 15)) * jnp.uint32(2246822519)
        h = h ^ (h >> 13)
        action = _below(len(env.spec.targets), h).astype(jnp.int32)[:, None]
        now, after = env.market.legs_at(index), env.market.legs_at(index + 1)
        episode, reward = move(episode, action, now, after)
        total = total + reward
        if window:
            rows = index[:, None] + 1 - jnp.arange(window)[None]
            total = total + env.market.features[rows].sum((1, 2, 3))
        done = (left <= 1) | episode.account.bankrupt
        start = first + _below(last - first, h).astype(jnp.int32)
        index, left = jnp.where(done, start, index + 1), jnp.where(done, EPISODE, left - 1)
        episode = select(done, Episode(jax.vmap(open_account)(jnp.zeros((lane.size, 1)))), episode)
        return (lane, number + 1, index, left, episode, total), None

    return lambda carry: jax.lax.scan(step, carry, length=LENGTH)[0], begin


def _below(limit: int, word: Any) -> Any:
    """Maps the high half of a random uint32 to a number below `limit`, at most 65,536."""
    return (word >> 16) * limit >> 16


def _one_env() -> dict[str, Any]:
    """Measures one environment through Gymnasium: five features of one bar and the account."""
    # Without Gymnasium's wrappers, as the peer is.
    env = gymnasium.make("nca_trader/Trading-v0", env=_setting(5), window=1).unwrapped
    actions = [0, 1, 2, 1] * 256
    env.reset(seed=0)

    def many(carry: Any) -> Any:
        for action in actions:
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()
        return carry

    row = measure("Gymnasium, one environment", many, jax.numpy.zeros(()), len(actions), envs=1)
    env.close()
    return row


def _vector_env(envs: int = 1024) -> dict[str, Any]:
    """Measures a vector environment through Gymnasium, with the same observation."""
    env = gymnasium.make_vec(
        "nca_trader/Trading-v0",
        num_envs=envs,
        vectorization_mode="vector_entry_point",
        env=_setting(5),
        window=1,
    )
    actions = np.random.default_rng(0).integers(0, 3, (64, envs))
    env.reset(seed=0)

    def many(carry: Any) -> Any:
        for action in actions:
            env.step(action)
        return carry

    name = f"Gymnasium, vector of {envs:,}"
    row = measure(name, many, jax.numpy.zeros(()), envs * len(actions), envs=envs)
    env.close()
    return row
