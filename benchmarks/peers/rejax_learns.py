"""rejax's PPO on a frozen market, its agents saved on the way; its own hyper-parameters."""

import json

import cloudpickle
import jax
import rejax

from benchmarks.peers.clock import row, run
from benchmarks.peers.looks import Looks
from nca_trader.optimum.gymnax import GymnaxEnv


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
    algorithm = rejax.PPO.create(
        env=env, env_params=env.default_params, total_timesteps=steps, **json.loads(given)
    )
    state = jax.jit(algorithm.init_state)(jax.random.key(seed))
    each = algorithm.num_envs * algorithm.num_steps
    iterate = jax.jit(lambda state: algorithm.train_iteration(state)).lower(state).compile()
    looks = Looks(out, steps, seconds, ".pkl")
    looks.start()
    done, on = 0, True
    while on and done < steps:
        state = jax.block_until_ready(iterate(state))
        done += each

        def save(path: str, state=state) -> None:
            with open(path, "wb") as file:
                cloudpickle.dump((algorithm, state), file)

        on = looks.look(done, save, end=done >= steps)
    rate = done / max(looks.spent, 1e-9)
    return row("rejax PPO", "rejax", algorithm.num_envs, rate, looks=looks.found)


if __name__ == "__main__":
    run(main)
