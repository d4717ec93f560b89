"""`nca-trader bench ppo`: whole iterations of the learner, beside the learners that others ship."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from typing import Any

from nca_trader.cli.bench import beside, measure

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
        row = _learner(env, name, agent, each)
        rivals = rivals if args.peers else ()
        for module, options in rivals:
            yield beside(row, args.peers, module, options)
        if not rivals:
            yield row


def _settings() -> Iterator[tuple[str, Any, int, tuple[Any, ...]]]:
    """Name, agent, environments a segment, and the peers of each row."""
    from nca_trader.agents.presets import load_agent

    nano = load_agent("nano")
    # As wide and as deep as the peer's, and like its, it sees one observation.
    wide = {"kind": "mlp", "window": 1, "channels": 64, "hidden": 0, "head_hidden": 64}
    shape = {"neighbours": "none", "fire_rate": 1.0, "remat": "none"}
    perceptron = dataclasses.replace(nano.policy, **wide, **shape)
    yield "MLP 64x64, no history", dataclasses.replace(nano, policy=perceptron), 1, (REJAX,)
    yield "nano", nano, 4, (REJAX, SB3)
    yield "nano", nano, 1, ()
    yield "small", load_agent("small"), 4, (REJAX,)
    yield "small", load_agent("small"), 1, ()


def _learner(env: Any, name: str, agent: Any, each: int) -> dict[str, Any]:
    import jax

    from nca_trader.agents.policy import make_policy
    from nca_trader.learner.update import make_learner
    from nca_trader.scale.rates import matmul_flops_per_s

    learn = dataclasses.replace(
        agent.learner, num_segments=SEGMENTS, segment_length=LENGTH, envs_per_segment=each,
        num_epochs=4, num_minibatches=4, advantages="gae",
    )  # fmt: skip
    config = dataclasses.replace(agent, learner=learn, num_seeds=1)
    policy = make_policy(config, env.spec)
    learner = make_learner(env, policy, config)
    row = measure(
        f"{name}, {policy.receptive_field} bars, {each} env/segment",
        lambda state: learner.step(state)[0],
        learner.init(jax.random.key(0)),
        learner.steps_per_update,
        envs=learn.num_segments * each,
        envs_per_segment=each,
    )
    updates_per_s = row["steps_per_s"] / learner.steps_per_update
    rate = matmul_flops_per_s(repeats=41)
    return row | {"matmul_share": updates_per_s * _update_flops(policy, learn) / rate}


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
    cost: Any = jax.jit(policy.encode).lower(params, x, present).cost_analysis()
    return float(cost["flops"]) * (1 + 3 * learn.num_epochs)
