"""The readout, its distribution against enumeration, and what it sees of an account."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from drawn import random_params
from scipy.special import log_softmax

from nca_trader.agents import heads
from nca_trader.agents.heads import greedy
from nca_trader.agents.policy import make_policy
from nca_trader.config import AgentConfig, PolicyConfig
from nca_trader.envs.account.state import open_account
from nca_trader.types import EnvSpec

JOINT = list(itertools.product(range(3), repeat=2))  # three actions for each of two assets


def joint_log_probs(logits):
    """Log-probability of each of the nine joint actions, in float64."""
    each = log_softmax(logits.astype(np.float64), axis=-1)
    return np.array([each[0, a] + each[1, b] for a, b in JOINT])


def test_log_prob_and_entropy_equal_an_enumeration_of_joint_actions():
    for logits in np.random.default_rng(0).normal(0, 3, (5, 2, 3)).astype(np.float32):
        expected = joint_log_probs(logits)
        got = heads.log_prob(jnp.broadcast_to(logits, (9, 2, 3)), jnp.array(JOINT))
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(np.exp(got).sum(), 1.0, rtol=1e-6)
        entropy = scipy.stats.entropy(np.exp(expected))
        np.testing.assert_allclose(heads.entropy(logits), entropy, rtol=1e-5)


def test_the_gaussian_is_that_of_scipy_within_its_bounds():
    """Log-probability, entropy and a draw, of actions before squashing."""
    head, rng = heads.SQUASHED_GAUSSIAN, np.random.default_rng(0)
    logits = rng.normal(size=(5, 3, 2)).astype(np.float32) * 3.0  # some deviations are clipped
    scale = np.exp(np.clip(logits[..., 1].astype(float), heads.LEAST_LOG_STD, heads.MOST_LOG_STD))
    assert len(np.unique(scale)) < scale.size
    each = scipy.stats.norm(logits[..., 0], scale)
    noise = rng.normal(size=(5, 3, 1)).astype(np.float32)
    action = np.asarray(head.sample(jnp.asarray(logits), jnp.asarray(noise)))
    np.testing.assert_allclose(action, each.ppf(scipy.stats.norm.cdf(noise[..., 0])), rtol=2e-4)
    found = head.log_prob(jnp.asarray(logits), jnp.asarray(action))
    np.testing.assert_allclose(found, each.logpdf(action).sum(-1), rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(head.entropy(jnp.asarray(logits)), each.entropy().sum(-1), rtol=1e-5)
    np.testing.assert_array_equal(head.mode(jnp.asarray(logits)), logits[..., 0])


def test_log_prob_and_entropy_hold_for_extreme_logits():
    logits = jnp.array([[1000.0, 0.0, -1000.0], [0.0, 0.0, 0.0]])
    assert heads.log_prob(logits, jnp.array([2, 1])) == np.float32(-2000 - np.log(3))
    np.testing.assert_allclose(heads.entropy(logits), np.log(3), rtol=1e-6)
    assert np.isfinite(jax.grad(lambda x: heads.entropy(x))(logits)).all()


def test_actions_are_drawn_as_often_as_their_probability_says():
    logits = np.array([[0.5, -1.0, 0.2], [1.5, 0.0, -0.5]], np.float32)
    noise = jax.random.gumbel(jax.random.key(3), (20_000, 2, 3))
    actions = np.asarray(heads.sample(logits[None], noise))
    assert actions.dtype == np.int32
    counts = np.bincount(actions @ [3, 1], minlength=9)
    expected = 20_000 * np.exp(joint_log_probs(logits))
    assert scipy.stats.chisquare(counts, expected).pvalue > 0.01
    # The test has the power to see logits that are off by a tenth.
    off = joint_log_probs(logits + np.array([[0.1, 0, 0], [0, 0, 0]], np.float32))
    assert scipy.stats.chisquare(counts, 20_000 * np.exp(off)).pvalue < 0.01


def test_greedy_takes_the_most_probable_joint_action():
    for logits in np.random.default_rng(1).normal(size=(10, 2, 3)).astype(np.float32):
        assert tuple(np.asarray(greedy(logits))) == JOINT[joint_log_probs(logits).argmax()]


def test_account_features_by_hand():
    # Holds .3 and -.1, ordered .4 and 0; a full position is .4; cash 1 - .3 + .1 = .8.
    account = open_account(jnp.array([0.25, -0.1]))._replace(
        weight_low=jnp.array([0.05, 0.0]), ordered=jnp.array([0.4, 0.0])
    )
    spec = EnvSpec(symbols=("A", "B"), features=("rsi",), targets=(-0.4, 0.0, 0.4), warmup=0)
    np.testing.assert_allclose(
        heads.account_features(spec, account), [[0.75, 1.0, 0.8], [-0.25, 0.0, 0.8]], rtol=1e-6
    )
    # Of constant size: what is held is what was ordered, whatever the weights drifted to.
    constant = dataclasses.replace(spec, constant_size=True)
    np.testing.assert_allclose(
        heads.account_features(constant, account), [[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]], rtol=1e-6
    )


def test_account_features_of_a_float64_account_are_float32():
    with jax.enable_x64(True):
        account = open_account(jnp.array([0.1, 0.2], jnp.float64))
        spec = EnvSpec(symbols=("A", "B"), features=("rsi",), targets=(0.0, 0.5), warmup=0)
        assert heads.account_features(spec, account).dtype == jnp.float32


def lowered_for(platform, monkeypatch):
    """From here on a function of several forms takes that of `platform`."""
    choose = {"cpu": lambda *x, tpu, default: default(*x), "tpu": lambda *x, tpu, default: tpu(*x)}
    monkeypatch.setattr(jax.lax, "platform_dependent", choose[platform])


def readout(targets):
    """A policy for two assets, random parameters, 7 bars' cells, and 5 accounts that share them."""
    spec = EnvSpec(symbols=("A", "B"), features=("rsi",), targets=targets, warmup=0)
    policy = make_policy(AgentConfig(policy=PolicyConfig(channels=3, head_hidden=4)), spec)
    params = jax.tree.map(np.asarray, random_params(policy, 2, 1.0))
    rng = np.random.default_rng(3)
    cells = rng.normal(size=(7, 1, 2, 3)).astype(np.float32)
    seen = rng.normal(size=(7, 5, 2, 3)).astype(np.float32)
    return policy, params, cells, seen


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_readout_by_hand_and_accounts_share_a_cell(platform, monkeypatch):
    lowered_for(platform, monkeypatch)
    policy, params, cells, seen = readout((0.0, 0.5))
    # A function of its own: jit would find what was traced for the other platform.
    logits, value = jax.jit(lambda *given: policy.act(*given))(params, cells, seen)
    p = params["head"]
    for t, e in np.ndindex(7, 5):
        values = []
        for a in range(2):
            hidden = np.tanh(cells[t, 0, a] @ p["cell"] + seen[t, e, a] @ p["account"] + p["bias"])
            np.testing.assert_allclose(logits[t, e, a], hidden @ p["logits"], rtol=1e-4, atol=1e-5)
            values.append(hidden @ p["value"] + p["value_bias"])
        np.testing.assert_allclose(value[t, e], np.mean(values), rtol=1e-4, atol=1e-5)
