"""The loss from logits by hand in float64, and what must hold at the first minibatch."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from nca_trader.agents import heads
from nca_trader.learner import sampled
from nca_trader.learner.ppo import Old, ppo_loss, setup_of
from nca_trader.learner.rollout import encode_span
from nca_trader.learner.sampled import estimate, normalize, rollout_statistics


@pytest.fixture(scope="module")
def data(stage):
    """A rollout under `stage.params`, random advantages and value targets."""
    keys = jax.random.split(jax.random.key(8), (2, 16))
    segments, fresh = stage.begin(stage.empty_segments(), keys[0])
    _, rollout = stage.collect(stage.env.market, segments, fresh, keys[1])
    rng = np.random.default_rng(0)
    advantage = rng.normal(size=rollout.reward.shape).astype(np.float32)
    return rollout, advantage, np.asarray(rollout.value + rng.normal(size=advantage.shape), "f4")


@pytest.fixture(scope="module")
def loss(stage):
    """`(params, rollout, advantage, value_target) -> Loss`, compiled."""
    setup, market = stage.setup, stage.env.market
    return jax.jit(lambda params, *batch: sampled.loss(setup, params, market, batch))


def likelihood(stage):
    """`(params, rollout) -> (log_prob, value)` of the actions taken, compiled."""

    def of(params, rollout):
        cells = encode_span(stage.policy, params, stage.env.market, rollout.span, 8)
        logits, value = stage.policy.act(params, cells[:, :, None], rollout.seen)
        return heads.log_prob(logits, rollout.action), value

    return jax.jit(of)


def logits_and_values(stage, params, rollout):
    """By windows of one receptive field each, not by the lattice."""
    field = stage.policy.receptive_field
    rows = np.asarray(rollout.span.index)[:, None] + np.arange(8)
    history = rows[..., None] - field + 1 + np.arange(field)
    x = stage.env.features[history].reshape(-1, field, 2, 2)
    present = stage.env.bars.present[history].reshape(-1, field, 2)
    cells = jax.jit(stage.policy.encode)(params, x, present)[:, -1].reshape(16, 8, 1, 2, 4)
    found = jax.jit(stage.policy.act)(params, cells, rollout.seen)
    return (np.asarray(y, np.float64) for y in found)


def test_at_the_first_minibatch_the_policy_is_the_one_that_acted(stage, loss, data):
    rollout, advantage, target = data
    first = loss(stage.params, *data)
    assert abs(first.approx_kl) < 1e-7 and first.clip_fraction == 0.0
    np.testing.assert_allclose(first.policy_loss, -advantage.mean(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        first.value_loss, 0.5 * ((rollout.value - target) ** 2).mean(), rtol=1e-4
    )
    log_prob, value = likelihood(stage)(stage.params, rollout)
    np.testing.assert_allclose(np.exp(log_prob - rollout.log_prob), 1.0, atol=1e-5)
    np.testing.assert_allclose(value, rollout.value, atol=1e-5)


def test_loss_by_hand_from_logits(stage, loss, data):
    rollout, advantage, target = data
    rng = np.random.default_rng(1)
    moved = jax.tree.map(lambda p: p + 0.1 * rng.normal(size=p.shape).astype("f4"), stage.params)
    got = loss(moved, *data)

    config = stage.agent.learner
    logits, value = logits_and_values(stage, moved, rollout)
    log_probs = log_softmax(logits, axis=-1)
    action, old = np.asarray(rollout.action), np.asarray(rollout.value, np.float64)
    kl, clipped, gains, errors, entropies = [], [], [], [], []
    for at in np.ndindex(action.shape[:3]):
        new = sum(log_probs[at][asset, choice] for asset, choice in enumerate(action[at]))
        ratio = np.exp(new - float(rollout.log_prob[at]))
        a = float(advantage[at])
        gains.append(min(ratio * a, min(max(ratio, 0.8), 1.2) * a))
        clipped.append(not 0.8 <= ratio <= 1.2)
        kl.append(ratio - 1.0 - np.log(ratio))
        near = old[at] + min(max(value[at] - old[at], -0.2), 0.2)
        errors.append(max((value[at] - target[at]) ** 2, (near - target[at]) ** 2))
        entropies.append(-(np.exp(log_probs[at]) * log_probs[at]).sum(-1).mean())
    policy_loss, value_loss = -np.mean(gains), 0.5 * np.mean(errors)
    expected = {
        "loss": policy_loss + config.value_coef * value_loss
        - config.entropy_coef * np.mean(entropies),
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": np.mean(entropies),
        "approx_kl": np.mean(kl),
    }  # fmt: skip
    for name, number in expected.items():
        np.testing.assert_allclose(getattr(got, name), number, rtol=1e-3, err_msg=name)
    np.testing.assert_allclose(got.clip_fraction, np.mean(clipped), atol=0.01)
    assert 0.1 < np.mean(clipped) < 0.9  # both sides of the clip were met


@pytest.mark.parametrize("lacks", ["value", "old value", "target"])
def test_without_values_or_their_targets_none_are_learnt(stage, lacks):
    ones = {name: None if name == lacks else jnp.ones(4) for name in ("value", "old value")}
    targets = None if lacks == "target" else jnp.zeros(4)
    old = Old(jnp.zeros(4), jnp.arange(4.0), ones["old value"], targets)
    hyper = stage.setup.hyper
    got = ppo_loss(stage.agent.learner, hyper, old, jnp.zeros(4), jnp.ones(4), ones["value"])
    assert got.value_loss == 0.0
    np.testing.assert_allclose(got.loss, -1.5 - hyper.entropy_coef, rtol=1e-6)


@pytest.mark.heavy
def test_first_gradient_is_the_policy_gradient(stage, data):
    rollout, advantage, target = data
    config = dataclasses.replace(stage.agent.learner, value_coef=0.0, entropy_coef=0.0)
    setup = setup_of(stage.policy, dataclasses.replace(stage.agent, learner=config))

    def surrogate(params):
        return sampled.loss(setup, params, stage.env.market, (rollout, advantage, target)).loss

    def log_likelihood(params):
        return -(advantage * likelihood(stage)(params, rollout)[0]).mean()

    a, b = (jax.jit(jax.grad(f))(stage.params) for f in (surrogate, log_likelihood))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5), a, b)
    assert all(np.abs(leaf).max() > 1e-4 for leaf in jax.tree.leaves(a["nca"]))


def test_estimates_are_a_double_sum_normalised_over_all_devices(stage, data):
    rollout, _, _ = data
    rng = np.random.default_rng(3)
    discount = np.where(rng.random(rollout.reward.shape) < 0.05, 0.0, 0.99).astype("f4")
    rollout = rollout._replace(discount=jnp.asarray(discount))
    # Two devices of eight segments each.
    halves = jax.tree.map(lambda a: a.reshape(2, 8, *a.shape[1:]), rollout)

    @jax.jit
    def estimates(halves):
        each = jax.vmap(lambda r: estimate(stage.setup, r, 70.0))(halves)
        found = jax.vmap(rollout_statistics)(halves, *each)
        return normalize(stage.setup, (halves, *each), found)[0]

    _, *estimated = estimates(halves)
    advantage, target = (np.asarray(y).reshape(16, 8, 2) for y in estimated)

    value = np.concatenate([rollout.value, rollout.bootstrap[:, None]], 1).astype(np.float64)
    delta = 70.0 * np.asarray(rollout.reward, np.float64) + discount * value[:, 1:] - value[:, :-1]
    expected = np.zeros_like(delta)
    for s, t, e in np.ndindex(expected.shape):
        weight = 1.0
        for later in range(t, 8):
            expected[s, t, e] += weight * delta[s, later, e]
            weight *= 0.95 * discount[s, later, e]
    np.testing.assert_allclose(target, expected + value[:, :-1], rtol=1e-4, atol=1e-4)
    # What the two accounts of a segment have in common at a bar is no merit of either.
    own = expected - expected.mean(-1, keepdims=True)
    normal = own / own.std()
    np.testing.assert_allclose(advantage, normal, rtol=1e-3, atol=1e-4)
