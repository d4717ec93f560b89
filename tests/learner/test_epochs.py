"""Epochs, minibatches, micro-batches and the KL stop, on a loss whose gradient is known."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from nca_trader.config import AgentConfig, LearnerConfig
from nca_trader.learner.ppo import Loss, Old, hyper_of, ppo_loss
from nca_trader.learner.update import gradient_of, learn
from nca_trader.parallel.mesh import DATA, make_mesh

CONFIG = LearnerConfig(
    num_segments=32, logical_shards=8, num_epochs=2, num_minibatches=2, target_kl=None
)
ITEMS = np.random.default_rng(0).normal(size=(32, 3)).astype("f4")


def lose(params, items):
    """`mean (params . x)^2 / 2`; its "KL" is how far the parameters have moved."""
    half = 0.5 * ((items * params[None]).sum(-1) ** 2).mean()
    zero = jnp.zeros(())
    return Loss(half, half, zero, zero, jnp.abs(params - 1.0).max() + 0.0 * half, zero)


@functools.cache
def run(devices, **changes):
    config, optimizer = dataclasses.replace(CONFIG, **changes), optax.sgd(0.1)

    def once(params, items, key):
        args = (config, optimizer, params, optimizer.init(params), items, key)
        params, _, metrics = learn(lose, *args)
        return params, metrics

    mapped = jax.shard_map(
        once, mesh=make_mesh(devices), in_specs=(P(), P(DATA), P()), out_specs=P()
    )
    params, metrics = jax.jit(mapped)(jnp.ones(3), ITEMS, jax.random.key(0))
    return np.asarray(params), {name: float(x) for name, x in metrics.items()}


@functools.cache
def by_hand(steps):
    """Gradient steps on the minibatches that the key draws within each of eight shards."""
    params, losses = np.ones(3), []
    shards = ITEMS.reshape(8, 4, 3).astype(np.float64)
    for epoch_key in jax.random.split(jax.random.key(0), 2):
        order = np.stack(
            [jax.random.permutation(jax.random.fold_in(epoch_key, i), 4) for i in range(8)]
        )
        for piece in np.split(order, 2, axis=1):
            x = np.concatenate([shard[rows] for shard, rows in zip(shards, piece, strict=True)])
            losses.append(0.5 * ((x @ params) ** 2).mean())
            if len(losses) <= steps:
                params = params - 0.1 * (x * (x @ params)[:, None]).mean(0)
    return params, losses


@pytest.mark.parametrize(("devices", "micro_batches"), [(8, 1), (4, 2)])
def test_steps_are_those_by_hand_on_any_devices_in_any_pieces(devices, micro_batches):
    params, metrics = run(devices, micro_batches=micro_batches)
    expected, losses = by_hand(4)
    np.testing.assert_allclose(params, expected, rtol=1e-5)
    assert metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert metrics["kl_stopped"] == 0


def test_beyond_target_kl_the_rest_of_an_update_moves_nothing():
    first, losses = by_hand(1)
    moved = np.abs(first - 1.0).max()
    params, metrics = run(4, target_kl=float(0.9 * moved))
    np.testing.assert_allclose(params, first, rtol=1e-5)
    assert metrics["kl_stopped"] == 3  # the second found it; the others were not computed
    assert metrics["loss"] == pytest.approx(np.mean(losses[:2]), rel=1e-5)
    assert metrics["approx_kl"] == pytest.approx(moved / 2, rel=1e-5)
    far, metrics = run(4, target_kl=100.0)
    np.testing.assert_allclose(far, by_hand(4)[0], rtol=1e-5)
    assert metrics["kl_stopped"] == 0


@pytest.mark.parametrize("pieces", [2, 32])
def test_a_gradient_in_pieces_is_that_of_the_whole(pieces):
    params = np.array([0.3, -1.2, 2.0], "f4")
    mapped = jax.shard_map(
        lambda params, items: gradient_of(lose, params, items, pieces)[0],
        mesh=make_mesh(1), in_specs=(P(), P(DATA)), out_specs=P(),
    )  # fmt: skip
    got = jax.jit(mapped)(jnp.asarray(params), ITEMS[None])
    want = (ITEMS * (ITEMS @ params)[:, None]).mean(0)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.heavy
def test_the_loss_has_the_slope_of_its_differences_in_float64():
    rng = np.random.default_rng(1)
    config = LearnerConfig(clip_epsilon=0.1, entropy_coef=0.05)
    hyper = hyper_of(AgentConfig(learner=config))
    with jax.enable_x64(True):
        logits, value = rng.normal(size=(40, 3)), rng.normal(size=40)
        action = rng.integers(0, 3, 40)
        shift = 0.3 * rng.normal(size=40)
        log_prob = np.asarray(jax.nn.log_softmax(logits))[np.arange(40), action]
        old = Old(log_prob + shift, *(jnp.asarray(rng.normal(size=40)) for _ in range(3)))

        def total(params):
            log_probs = jax.nn.log_softmax(params["logits"])
            chosen = log_probs[np.arange(40), action]
            entropy = -(jnp.exp(log_probs) * log_probs).sum(-1)
            return ppo_loss(config, hyper, old, chosen, entropy, params["value"]).loss

        params = {"logits": jnp.asarray(logits), "value": jnp.asarray(value)}
        gradient, total = jax.grad(total)(params), jax.jit(total)
        for name in params:
            for at in list(np.ndindex(params[name].shape))[::7]:
                ahead, behind = (
                    total(params | {name: params[name].at[at].add(h)}) for h in (1e-6, -1e-6)
                )
                slope = (ahead - behind) / 2e-6
                np.testing.assert_allclose(gradient[name][at], slope, rtol=1e-6, atol=1e-9)
