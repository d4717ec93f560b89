"""Speed of whole iterations of the learner, with the learners of other packages as peers."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from nca_trader.agents import load_agent
from nca_trader.agents.policy import make_policy
from nca_trader.config.ranges import switch
from nca_trader.data.bars import sample_bars
from nca_trader.envs import load_env
from nca_trader.envs.trading import TradingEnv
from nca_trader.learner.learner import make_learner
from nca_trader.scale.chips import matmul_flops_per_s

from .timing import Peer, Timing, compared

SEGMENTS, LENGTH = 64, 128
# With one environment per segment nothing shares the encoding of the warm-up bars; a longer segment
# has fewer of them per step. A peer's rollouts are then as long.
LONG = 256
# Longer ones have even fewer, but not all of their cells fit into the cache at once.
LONGEST, PIECES = 2048, 8
REJAX = ("rejax_ppo", {"envs": SEGMENTS})
SB3 = ("sb3_ppo", {"envs": 64, "market": "batch"})
SB3_WIDE = ("sb3_ppo", {"envs": 256, "market": "batch"})
# What each side produces per step: a ratio says little without it.
OURS = (
    "bar index and account kept on the device, cells encoded once per segment; no windows, no infos"
)
THEIRS = {
    "rejax_ppo": "4 numbers of CartPole's state, kept on the device; another market, no costs",
    "sb3_ppo": "float32 observation of one bar and the account, copied to numpy and torch, and "
    "an info dict for each environment and step; the same market and costs",
}


def environment() -> Any:
    """Returns the environment of every row: one market index, long or flat, with costs."""
    return TradingEnv(sample_bars("sp500").select("SP500"), load_env("index_daily"))


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields rows of the learner with nano, an MLP and small, timed in turns with the peers."""
    env = environment()
    for name, agent, each, length, pieces, rivals in _settings():
        learner = _Timed(env, name, agent, each, length, pieces)
        chosen: tuple[Any, ...] = rivals if args.peers else ()
        peers = [Peer(args.peers, name, given | {"steps": length}) for name, given in chosen]
        learner.rounds(peers)
        for (module, _), peer in zip(chosen, peers, strict=True):
            sides = {"ours": OURS, "theirs": THEIRS[module]}
            yield compared(learner.row(), peer.result()) | sides
        if not chosen:
            yield learner.row() | {"ours": OURS}


def _settings() -> Iterator[tuple[str, Any, int, int, int, tuple[Any, ...]]]:
    """Yields name, agent, environments and bars per segment, micro-batches and peers of each row.

    The first rows are like for like: as many environments as the peer, each on its own bars.
    Several environments per segment share the encoder's work, which no peer can do.
    """
    nano = load_agent("nano")
    # As wide and as deep as the peer's, and like its, it sees one observation.
    wide = {"kind": "mlp", "window": 1, "channels": 64, "hidden": 0, "head_hidden": 64}
    mlp = dataclasses.replace(nano, policy=switch(nano.policy, **wide))
    yield "nano", nano, 1, LONG, 1, (REJAX, SB3)
    yield "nano", nano, 1, LONGEST, PIECES, (REJAX,)
    yield "nano", nano, 1, LENGTH, 1, (REJAX,)
    yield "MLP 64x64, no history", mlp, 1, LENGTH, 1, (REJAX, SB3)
    yield "small", load_agent("small"), 1, LENGTH, 1, (REJAX,)
    yield "nano", nano, 4, LENGTH, 1, (REJAX, SB3_WIDE)
    yield "small", load_agent("small"), 4, LENGTH, 1, (REJAX,)


def _mesh_of(agent: Any) -> Any:
    """Returns a mesh of CPU cores that share a batch evenly, or of one accelerator."""
    on_cpu = jax.default_backend() == "cpu"
    devices = math.gcd(jax.device_count(), agent.learner.logical_shards) if on_cpu else 1
    return dataclasses.replace(agent.mesh, devices=devices, data=None)


class _Timed:
    """Iterations of the learner, timed in turn with products of matrices."""

    def __init__(self, env: Any, name: str, agent: Any, each: int, length: int, pieces: int):
        learn = dataclasses.replace(
            agent.learner, num_segments=SEGMENTS, segment_length=length, envs_per_segment=each,
            num_epochs=4, num_minibatches=4, micro_batches=pieces, advantages="gae",
        )  # fmt: skip
        mesh = _mesh_of(agent)
        devices = mesh.devices
        config = dataclasses.replace(agent, learner=learn, num_seeds=1, mesh=mesh)
        policy = make_policy(config, env.spec)
        learner = make_learner(env, policy, config)
        self._timing = Timing(lambda state: learner.step(state)[0], learner.init(jax.random.key(0)))
        self._name = f"{name}, {policy.receptive_field} bars, {each} env/segment of {length}, "
        self._name += f"{pieces} micro-batches, " if pieces > 1 else ""
        self._name += f"{devices} device{'s' if devices > 1 else ''}"
        self._each, self._steps = each, learner.steps_per_update
        self._flops = _update_flops(policy, learn)
        self._rates: list[float] = []

    def rounds(self, peers: Sequence[Peer] = ()) -> None:
        def between() -> None:
            self._rates.append(matmul_flops_per_s())
            for peer in peers:
                peer.round()

        self._timing.rounds(between)

    def row(self) -> dict[str, Any]:
        facts = {"envs": SEGMENTS * self._each, "envs_per_segment": self._each}
        row = self._timing.row(self._name, self._steps, **facts)
        flops_per_s = row["steps_per_s"] / self._steps * self._flops
        return row | {"matmul_share": flops_per_s / statistics.median(self._rates)}


def _update_flops(policy: Any, learn: Any) -> float:
    """Counts the encoder's floating-point operations per update: once to collect, thrice per epoch.

    A gradient costs twice the forward pass. The policy head and the account are not counted.
    """
    bars = policy.receptive_field - 1 + learn.segment_length
    shape = (learn.num_segments, bars, policy.spec.num_assets)
    x = jax.ShapeDtypeStruct((*shape, policy.spec.num_features), jnp.float32)
    present = jax.ShapeDtypeStruct(shape, jnp.bool_)
    params = jax.eval_shape(policy.init, jax.random.key(0))
    encode = functools.partial(policy.encode, halo=policy.receptive_field - 1)
    # Plugins, as that for CUDA, count nothing before they compile.
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        cost: Any = jax.jit(encode).lower(params, x, present).cost_analysis()
    return float(cost["flops"]) * (1 + 3 * learn.num_epochs)
