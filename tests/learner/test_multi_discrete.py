"""Several assets are a multi-discrete action: one categorical an asset, independent of the others.

Every figure is a product of categoricals over assets, written out in numpy; and one update of the
learner moves along the gradient of that joint surrogate.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import random_bars
from tiny import AGENT, ENV

from nca_trader import TradingEnv, make_policy
from nca_trader.agents import heads
from nca_trader.learner import sampled
from nca_trader.learner.ppo import setup_of
from nca_trader.learner.rollout import Draw, Segments, roll_out

pytestmark = pytest.mark.usefixtures("quick_compile")

ASSETS, CHOICES = 3, 3
JOINT = np.array(list(itertools.product(range(CHOICES), repeat=ASSETS)))  # all 27 actions


def joint_probability(logits):
    """`[27]` probability of each joint action: the outer product of A softmaxes, in float64."""
    each = np.exp(logits.astype(np.float64))
    each /= each.sum(-1, keepdims=True)
    return np.einsum("i,j,k->ijk", *each).ravel()


@pytest.mark.parametrize("seed", range(3))
def test_log_prob_entropy_and_ratio_are_of_the_product_of_categoricals(seed):
    rng = np.random.default_rng(seed)
    logits, other = rng.normal(0, 2, (2, ASSETS, CHOICES)).astype(np.float32)
    p, q = joint_probability(logits), joint_probability(other)
    assert p.sum() == pytest.approx(1.0) and len(p) == CHOICES**ASSETS
    ask = jax.vmap(heads.CATEGORICAL.log_prob, in_axes=(None, 0))
    np.testing.assert_allclose(ask(logits, JOINT), np.log(p), rtol=1e-5, atol=1e-5)
    assert float(heads.CATEGORICAL.entropy(logits)) == pytest.approx(-(p * np.log(p)).sum(), 1e-5)
    ratio = np.exp(np.asarray(ask(logits, JOINT)) - np.asarray(ask(other, JOINT)))
    np.testing.assert_allclose(ratio, p / q, rtol=1e-4)
    best = tuple(np.asarray(heads.CATEGORICAL.mode(logits)))
    assert best == tuple(JOINT[p.argmax()])


LEARNER = dataclasses.replace(
    AGENT.learner, num_segments=2, segment_length=4, envs_per_segment=4, logical_shards=1
)


@pytest.fixture(scope="module")
def lived():
    """A rollout of three assets, and of moved parameters logits, loss and gradient on it."""
    env = TradingEnv(random_bars(np.random.default_rng(1), 90, ASSETS), ENV)
    policy = make_policy(AGENT, env.spec)
    setup = setup_of(policy, dataclasses.replace(AGENT, learner=LEARNER))
    params = jax.jit(policy.init)(jax.random.key(0))
    rng = np.random.default_rng(2)
    moved = jax.tree.map(lambda p: p + 0.08 * rng.normal(size=p.shape).astype("f4"), params)
    index = jnp.array([70, 81], jnp.int32)
    keys = jax.random.split(jax.random.key(1), (2, 4))
    advantage = rng.normal(size=(2, 4, 4)).astype(np.float32)

    @jax.jit
    def live():
        segments = Segments(index, index, None, jax.vmap(jax.vmap(env.begin))(keys))
        draw = Draw(jax.random.split(jax.random.key(2), 2), segments.episode)
        return roll_out(setup, params, env.market, segments, draw)[1]

    rollout = live()

    @jax.jit
    def learn(at):
        def objective(at):
            loss = sampled.loss(setup, at, env.market, (rollout, advantage, None))
            return loss.loss, loss

        cells = sampled.encode_span(policy, at, env.market, rollout.span, 4)
        logits, _ = policy.act(at, cells[:, :, None], rollout.seen)
        return logits, *jax.grad(objective, has_aux=True)(at)

    return rollout, advantage, moved, learn


def test_the_updates_ratio_is_the_product_over_assets(lived):
    rollout, advantage, moved, learn = lived
    logits, _, loss = learn(moved)
    each = np.exp(np.asarray(logits, np.float64))
    each /= each.sum(-1, keepdims=True)  # [S, L, E, A, n]
    took = np.take_along_axis(each, np.asarray(rollout.action)[..., None], -1)[..., 0]
    ratio = took.prod(-1) / np.exp(np.asarray(rollout.log_prob, np.float64))
    clipped = np.clip(ratio, 1 - LEARNER.clip_epsilon, 1 + LEARNER.clip_epsilon)
    expected = -np.minimum(ratio * advantage, clipped * advantage).mean()
    assert float(loss.policy_loss) == pytest.approx(expected, rel=1e-4)
    assert float(loss.clip_fraction) == pytest.approx((np.abs(ratio - 1) > 0.2).mean(), abs=1e-6)
    assert 0.05 < float(loss.clip_fraction) < 0.95
    # Per asset, so that a bonus weighs the same in a panel of any size.
    assert float(loss.entropy) == pytest.approx(-(each * np.log(each)).sum(-1).mean(), rel=1e-4)
    assert rollout.action.shape == (2, 4, 4, ASSETS) and rollout.log_prob.shape == (2, 4, 4)
    assert len(np.unique(rollout.action)) == CHOICES


def test_a_step_along_its_gradient_learns(lived):
    _, _, moved, learn = lived
    _, gradient, before = learn(moved)
    size = sum((np.asarray(g, np.float64) ** 2).sum() for g in jax.tree.leaves(gradient))
    rate = 1e-3 / size  # of plain gradient descent: the loss falls by rate |g|^2, to first order
    _, _, after = learn(jax.tree.map(lambda p, g: p - rate * g, moved, gradient))
    assert float(before.loss - after.loss) == pytest.approx(1e-3, rel=0.1)
