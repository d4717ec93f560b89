"""rejax's PPO on a frozen market, its agents saved on the way.

Hyper-parameters are its own but for those given; actions that are numbers are learnt within -1 and
1, as its Gaussian begins with a deviation of 1.
"""

import json
import sys

import cloudpickle
import jax
import jax.numpy as jnp
import rejax
from gymnax.environments import spaces

from benchmarks.peers.clock import row, run
from benchmarks.peers.looks import Looks
from nca_trader.optimum.gymnax import GymnaxEnv


class Rescaled(GymnaxEnv):
    """A market whose actions are numbers within -1 and 1."""

    def action_space(self, params=None) -> spaces.Space:
        """The `Box` of -1 to 1."""
        return spaces.Box(-1.0, 1.0, super().action_space(params).shape)

    def step_env(self, key, state, action, params):
        """Orders the action in the market's own units."""
        own = super().action_space(params)
        half, middle = (own.high - own.low) / 2.0, (own.high + own.low) / 2.0
        return super().step_env(key, state, middle + half * action, params)


def in_own_units(algorithm, state):
    """An agent that orders the same in the units of the market, as its mean is a linear layer."""
    plain = GymnaxEnv(algorithm.env.market)
    own = plain.action_space()
    half, middle = (own.high - own.low) / 2.0, (own.high + own.low) / 2.0
    params = jax.tree.map(jnp.asarray, state.actor_ts.params)
    last = params["params"]["action_mean"]
    last = {"kernel": last["kernel"] * half, "bias": last["bias"] * half + middle}
    params = {"params": params["params"] | {"action_mean": last}}
    actor = algorithm.actor.clone(action_range=(own.low, own.high))
    state = state.replace(actor_ts=state.actor_ts.replace(params=params))
    return algorithm.replace(env=plain, actor=actor), state


def main(
    market: str = "ou_mid",
    steps: int = 100_000,
    seconds: float = 0.0,
    seed: int = 0,
    given: str = "{}",
    out: str = "build/learns",
) -> dict[str, object]:
    """Trains for `steps`, or for `seconds` where these are above 0; `given` is JSON."""
    env = GymnaxEnv(f"nca_trader/{market}-v1")
    scaled = isinstance(env.action_space(), spaces.Box)
    env = Rescaled(env.market) if scaled else env
    steps = sys.maxsize >> 33 if seconds else steps  # its counter is of 32 bits
    algorithm = rejax.PPO.create(
        env=env, env_params=env.default_params, total_timesteps=steps, **json.loads(given)
    )
    state = jax.jit(algorithm.init_state)(jax.random.key(seed))
    each = algorithm.num_envs * algorithm.num_steps
    # The moments of rewards begin as whole numbers, and an iteration returns others.
    after = jax.eval_shape(algorithm.train_iteration, state)
    state = jax.tree.map(
        lambda x, to: x if x.dtype == to.dtype else x.astype(to.dtype), state, after
    )
    iterate = jax.jit(lambda state: algorithm.train_iteration(state)).lower(state).compile()
    looks = Looks(out, steps, seconds, ".pkl")
    looks.start()
    done, on = 0, True
    while on and done < steps:
        state = jax.block_until_ready(iterate(state))
        done += each

        def save(path: str, state=state) -> None:
            with open(path, "wb") as file:
                pair = in_own_units(algorithm, state) if scaled else (algorithm, state)
                cloudpickle.dump(pair, file)

        on = looks.look(done, save, end=done >= steps)
    rate = done / max(looks.spent, 1e-9)
    found = {"looks": looks.found, "before": looks.before}
    return row("rejax PPO", "rejax", algorithm.num_envs, rate, **found)


if __name__ == "__main__":
    run(main)
