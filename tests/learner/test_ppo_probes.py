"""The learner on tables: the value of a cut-off that is no end, and a small decision process."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nca_trader.config import AgentConfig, LearnerConfig, OptimizerConfig
from nca_trader.learner.optimizer import make_optimizer
from nca_trader.learner.ppo import Old, gae, hyper_of, ppo_loss
from nca_trader.learner.update import learn
from nca_trader.parallel.mesh import make_mesh

ENVS, LENGTH, STATES, ACTIONS, UPDATES = 16, 20, 4, 2, 150
CONFIG = LearnerConfig(
    num_segments=ENVS * LENGTH,
    logical_shards=1,
    num_minibatches=2,
    discount=0.8,
    entropy_coef=0.002,
    clip_epsilon=0.3,
)
HYPER = hyper_of(AgentConfig(learner=CONFIG))
RATE = OptimizerConfig(learning_rate=0.05, schedule="linear", warmup_updates=0, weight_decay=0.0)


def lose(params, items):
    state, action, old = items
    log_probs = jax.nn.log_softmax(params["logits"][state])
    log_prob = jnp.take_along_axis(log_probs, action[:, None], axis=1)[:, 0]
    entropy = -(jnp.exp(log_probs) * log_probs).sum(-1)
    return ppo_loss(CONFIG, HYPER, old, log_prob, entropy, params["value"][state])


def train(chance, reward, limit, values_of_cuts):
    """Tables learnt in the process `chance` `[S, A, S]`, `reward` `[S, A]`, cut off at `limit`.

    Args:
      values_of_cuts: 1 where the value of what follows a cut-off is bootstrapped, or 0.
    """
    given = np.float32(chance), np.float32(reward), np.float32(limit), np.float32(values_of_cuts)
    return jax.tree.map(np.asarray, program()(*given))


def trained(chance, reward, limit, values_of_cuts):
    optimizer = make_optimizer(RATE, UPDATES * CONFIG.num_epochs * CONFIG.num_minibatches)

    def step(carry, keys):
        params, state, age = carry
        log_probs = jax.nn.log_softmax(params["logits"][state])
        action = jax.random.categorical(keys[0], log_probs)
        log_prob = jnp.take_along_axis(log_probs, action[:, None], axis=1)[:, 0]
        after = jax.random.categorical(keys[1], jnp.log(chance[state, action]))
        cut = age + 1 >= limit
        fresh = jax.random.randint(keys[2], after.shape, 0, STATES)
        carry = (params, jnp.where(cut, fresh, after), jnp.where(cut, 0, age + 1))
        return carry, (state, action, log_prob, reward[state, action], after, cut)

    def update(carry, key):
        params, opt_state, state, age = carry
        keys = jax.random.split(key, 3 * LENGTH + 1)
        (_, state, age), steps = jax.lax.scan(
            step, (params, state, age), keys[1:].reshape(LENGTH, 3)
        )
        seen, action, log_prob, paid, after, cut = steps
        value, following = params["value"][seen], params["value"][after]
        discount = CONFIG.discount * (1.0 - cut * (1.0 - values_of_cuts))
        args = (paid, discount, value, following, 0.9 * (1.0 - cut))
        advantage = jax.vmap(gae, in_axes=1, out_axes=1)(*args)
        target = advantage + value
        old = Old(log_prob, advantage / (advantage.std() + 1e-3), value, target)
        batch = jax.tree.map(lambda a: a.reshape(-1), (seen, action, old))
        params, opt_state, _ = learn(lose, CONFIG, optimizer, params, opt_state, batch, keys[0])
        return (params, opt_state, state, age), None

    def run(key):
        params = {"logits": jnp.zeros((STATES, ACTIONS)), "value": jnp.zeros(STATES)}
        nothing = jnp.zeros(ENVS, jnp.int32)
        carry = (params, optimizer.init(params), nothing, nothing)
        return jax.lax.scan(update, carry, jax.random.split(key, UPDATES))[0][0]

    return run(jax.random.key(0))


@functools.cache
def program():
    spec = jax.sharding.PartitionSpec()
    return jax.jit(jax.shard_map(trained, mesh=make_mesh(1), in_specs=spec, out_specs=spec))


@pytest.mark.parametrize("values_of_cuts", [True, False])
@pytest.mark.few(1)
def test_a_cut_off_is_no_end(values_of_cuts):
    """Reward 1 for ever, cut off after 10 steps: worth 1 / (1 - gamma) if, and only if, told so."""
    stays = np.broadcast_to(np.eye(STATES)[:, None], (STATES, ACTIONS, STATES))
    params = train(stays, np.ones((STATES, ACTIONS)), 10, values_of_cuts)
    if values_of_cuts:
        np.testing.assert_allclose(params["value"], 5.0, rtol=0.01)
    else:
        assert params["value"].max() < 4.3


def test_a_small_decision_process_against_value_iteration():
    rng = np.random.default_rng(3)
    chance = rng.dirichlet(np.full(STATES, 0.5), (STATES, ACTIONS))
    reward = rng.normal(size=(STATES, ACTIONS))
    value = np.zeros(STATES)
    for _ in range(200):
        q = reward + CONFIG.discount * chance @ value
        value = q.max(axis=1)
    assert np.abs(q[:, 0] - q[:, 1]).min() > 0.1  # so that the best action is no matter of noise
    params = train(chance, reward, 25, True)
    np.testing.assert_array_equal(params["logits"].argmax(1), q.argmax(1))
    np.testing.assert_allclose(params["value"], value, atol=0.25)
