"""`nca-trader bench ppo`: whole iterations of the learner, beside the learners that others ship."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import statistics
from collections.abc import Iterator
from typing import Any

from nca_trader.cli.bench import Timing, compared, measured_by

SEGMENTS, LENGTH = 64, 128
REJAX = ("rejax_ppo", {"envs": SEGMENTS})
SB3 = ("sb3_ppo", {"envs": 8})


def environment() -> Any:
    """One market index, long or flat, with costs: what every row trains on."""
    from nca_trader.data.samples import sample_bars
    from nca_trader.envs.presets import load_env
    from nca_trader.envs.trading import TradingEnv

    return TradingEnv(sample_bars("sp500").select("SP500"), load_env("index_daily"))


def bench_ppo(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The learner with a perceptron, nano and small; with peers, beside theirs."""
    env = environment()
    for name, agent, each, rivals in _settings():
        learner = _Timed(env, name, agent, each)
        learner.rounds()
        rivals = rivals if args.peers else ()
        for module, options in rivals:
            theirs = measured_by(args.peers, module, options)
            learner.rounds()  # before and after: the machine may have been slower for the peer
            yield compared(learner.row(), theirs)
        if not rivals:
            yield learner.row()


def _settings() -> Iterator[tuple[str, Any, int, tuple[Any, ...]]]:
    """Name, agent, environments a segment, and the peers of each row."""
    from nca_trader.agents.presets import load_agent
    from nca_trader.ranges import switched

    nano = load_agent("nano")
    # As wide and as deep as the peer's, and like its, it sees one observation.
    wide = {"kind": "mlp", "window": 1, "channels": 64, "hidden": 0, "head_hidden": 64}
    perceptron = switched(nano.policy, **wide)
    yield "MLP 64x64, no history", dataclasses.replace(nano, policy=perceptron), 1, (REJAX,)
    yield "nano", nano, 4, (REJAX, SB3)
    yield "nano", nano, 1, ()
    yield "small", load_agent("small"), 4, (REJAX,)
    yield "small", load_agent("small"), 1, ()


class _Timed:
    """The learner's iterations, and products of matrices in turn with them."""

    def __init__(self, env: Any, name: str, agent: Any, each: int):
        import jax

        from nca_trader.agents.policy import make_policy
        from nca_trader.learner.update import make_learner

        learn = dataclasses.replace(
            agent.learner, num_segments=SEGMENTS, segment_length=LENGTH, envs_per_segment=each,
            num_epochs=4, num_minibatches=4, advantages="gae",
        )  # fmt: skip
        # A CPU's cores, as many as share a batch evenly; of accelerators one, as the product has.
        on_cpu = jax.default_backend() == "cpu"
        devices = math.gcd(jax.device_count(), learn.logical_shards) if on_cpu else 1
        mesh = dataclasses.replace(agent.mesh, devices=devices, data=None)
        config = dataclasses.replace(agent, learner=learn, num_seeds=1, mesh=mesh)
        policy = make_policy(config, env.spec)
        learner = make_learner(env, policy, config)
        self._timing = Timing(lambda state: learner.step(state)[0], learner.init(jax.random.key(0)))
        self._name = f"{name}, {policy.receptive_field} bars, {each} env/segment, "
        self._name += f"{devices} device{'s' if devices > 1 else ''}"
        self._each, self._steps = each, learner.steps_per_update
        self._flops = _update_flops(policy, learn)
        self._rates: list[float] = []

    def rounds(self) -> None:
        from nca_trader.scale.rates import matmul_flops_per_s

        self._timing.rounds(lambda: self._rates.append(matmul_flops_per_s()))

    def row(self) -> dict[str, Any]:
        facts = {"envs": SEGMENTS * self._each, "envs_per_segment": self._each}
        row = self._timing.row(self._name, self._steps, **facts)
        flops_per_s = row["steps_per_s"] / self._steps * self._flops
        return row | {"matmul_share": flops_per_s / statistics.median(self._rates)}


def _update_flops(policy: Any, learn: Any) -> float:
    """Floating-point operations of the encoder in one update: once to collect, thrice an epoch.

    A gradient costs twice the forward pass; the readout and the account are not counted.
    """
    import jax
    import jax.numpy as jnp

    bars = policy.receptive_field - 1 + learn.segment_length
    shape = (learn.num_segments, bars, policy.spec.num_assets)
    x = jax.ShapeDtypeStruct((*shape, policy.spec.num_features), jnp.float32)
    present = jax.ShapeDtypeStruct(shape, jnp.bool_)
    params = jax.eval_shape(policy.init, jax.random.key(0))
    encode = functools.partial(policy.encode, halo=policy.receptive_field - 1)
    cost: Any = jax.jit(encode).lower(params, x, present).cost_analysis()
    return float(cost["flops"]) * (1 + 3 * learn.num_epochs)
