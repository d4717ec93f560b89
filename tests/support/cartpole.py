"""CartPole in JAX, many at once: a balance that is known to be learnable, and how fast.

Source of the physics: Barto, Sutton and Anderson 1983, "Neuronlike adaptive elements that can
solve difficult learning control problems", with the sizes that Gym's CartPole-v1 took over.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nca_trader.config import AgentConfig, LearnerConfig, OptimizerConfig
from nca_trader.learner.optimizer import make_optimizer
from nca_trader.learner.ppo import Old, gae, hyper_of, ppo_loss
from nca_trader.learner.update import learn
from nca_trader.parallel.mesh import make_mesh

GRAVITY, CART, POLE, HALF_LENGTH, FORCE, SECONDS = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
FAR, TILTED, LIMIT = 2.4, 12 * np.pi / 180, 500

ENVS, LENGTH = 8, 128
LEARNER = LearnerConfig(
    num_segments=ENVS * LENGTH,  # items: steps
    logical_shards=1,
    num_epochs=8,
    num_minibatches=8,
    discount=0.99,
    gae_lambda=0.95,
    entropy_coef=0.0,
)
HYPER = hyper_of(AgentConfig(learner=LEARNER))
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, warmup_updates=0, weight_decay=0.0)


class Pole(NamedTuple):
    """state: `[E, 4]` position, speed, angle, angular speed. steps: `[E]` of the episode."""

    state: jax.Array
    steps: jax.Array


HYPER = hyper_of(AgentConfig(learner=LEARNER))


def begin(key):
    return Pole(
        jax.random.uniform(key, (ENVS, 4), minval=-0.05, maxval=0.05), jnp.zeros(ENVS, jnp.int32)
    )


def step(pole, action):
    """One Euler step under a push to the left (0) or right (1): what follows, fallen, cut off."""
    _, speed, angle, spin = pole.state.T
    push = jnp.where(action == 1, FORCE, -FORCE)
    mass = CART + POLE
    swing = (push + POLE * HALF_LENGTH * spin**2 * jnp.sin(angle)) / mass
    turn = (GRAVITY * jnp.sin(angle) - jnp.cos(angle) * swing) / (
        HALF_LENGTH * (4.0 / 3.0 - POLE * jnp.cos(angle) ** 2 / mass)
    )
    pull = swing - POLE * HALF_LENGTH * turn * jnp.cos(angle) / mass
    state = pole.state + SECONDS * jnp.stack([speed, pull, spin, turn], axis=-1)
    steps = pole.steps + 1
    fallen = (jnp.abs(state[:, 0]) > FAR) | (jnp.abs(state[:, 2]) > TILTED)
    return Pole(state, steps), fallen, ~fallen & (steps >= LIMIT)


def mlp_init(key):
    """Two towers of 64 x 64, of values and of logits."""
    normal = jax.nn.initializers.lecun_normal()

    def tower(key, out, size):
        keys = jax.random.split(key, 3)
        sizes = [(4, 64), (64, 64), (64, out)]
        gains = [1.4, 1.4, size]
        return [
            {"w": g * normal(k, s), "b": jnp.zeros(s[1])}
            for k, s, g in zip(keys, sizes, gains, strict=True)
        ]

    actor, critic = jax.random.split(key)
    return {"actor": tower(actor, 2, 0.01), "critic": tower(critic, 1, 1.0)}


def mlp(layers, x):
    for layer in layers[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"][None])
    return x @ layers[-1]["w"] + layers[-1]["b"][None]


def act(params, state):
    """Log-probabilities `[N, 2]` and values `[N]`."""
    return jax.nn.log_softmax(mlp(params["actor"], state)), mlp(params["critic"], state)[:, 0]


def lose(params, items):
    seen, action, old = items
    log_probs, value = act(params, seen)
    log_prob = jnp.take_along_axis(log_probs, action[:, None], axis=1)[:, 0]
    return ppo_loss(LEARNER, HYPER, old, log_prob, -(jnp.exp(log_probs) * log_probs).sum(-1), value)


def iterate(optimizer, params, opt_state, pole, key):
    """Collect, estimate, learn; and the lengths of the episodes that ended, 0 elsewhere."""
    key, begin_key, shuffle_key = jax.random.split(key, 3)

    def one(carry, keys):
        pole, (action_key, reset_key) = carry, keys
        log_probs, value = act(params, pole.state)
        action = jax.random.categorical(action_key, log_probs)
        log_prob = jnp.take_along_axis(log_probs, action[:, None], axis=1)[:, 0]
        after, fallen, cut = step(pole, action)
        _, final = act(params, after.state)
        over = fallen | cut
        fresh = begin(reset_key)
        following = Pole(
            jnp.where(over[:, None], fresh.state, after.state), jnp.where(over, 0, after.steps)
        )
        lengths = jnp.where(over, after.steps, 0)
        return following, (pole.state, action, log_prob, value, final, fallen, cut, lengths)

    keys = jax.random.split(begin_key, (LENGTH, 2))
    pole, steps = jax.lax.scan(one, pole, (keys[:, 0], keys[:, 1]))
    seen, action, log_prob, value, final, fallen, cut, lengths = steps
    reward = jnp.full(value.shape, 0.1)  # so that values are of order 10, not 100
    discount = LEARNER.discount * (1.0 - fallen)
    mixing = LEARNER.gae_lambda * (1.0 - cut)
    advantage = jax.vmap(gae, in_axes=1, out_axes=1)(reward, discount, value, final, mixing)
    target = advantage + value
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    old = Old(log_prob, advantage, value, target)
    batch = jax.tree.map(lambda a: a.reshape(ENVS * LENGTH, *a.shape[2:]), (seen, action, old))
    params, opt_state, metrics = learn(
        lose, LEARNER, optimizer, params, opt_state, batch, shuffle_key
    )
    return params, opt_state, pole, key, lengths, metrics


def train(seed, updates):
    """Lengths `[updates, LENGTH, ENVS]` of the episodes that ended, 0 where none did."""
    optimizer = make_optimizer(OPTIMIZER, updates * LEARNER.num_epochs * LEARNER.num_minibatches)

    def run(key):
        params_key, pole_key, key = jax.random.split(key, 3)
        params = mlp_init(params_key)
        carry = (params, optimizer.init(params), begin(pole_key), key)

        def update(carry, _):
            *carry, lengths, _ = iterate(optimizer, *carry)
            return tuple(carry), lengths

        return jax.lax.scan(update, carry, None, length=updates)[1]

    spec = jax.sharding.PartitionSpec()
    mapped = jax.shard_map(run, mesh=make_mesh(1), in_specs=spec, out_specs=spec)
    return np.asarray(jax.jit(mapped)(jax.random.key(seed)))


def steps_until(lengths, least, window=20):
    """Environment steps after which the last `window` episodes had a mean length of `least`."""
    flat = lengths.reshape(-1)
    ended = np.flatnonzero(flat)
    mean = np.convolve(flat[ended], np.ones(window) / window, mode="valid")
    good = np.flatnonzero(mean >= least)
    return int(ended[good[0] + window - 1]) + 1 if len(good) else np.inf
