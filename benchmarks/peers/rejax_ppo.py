"""rejax's PPO (PureJaxRL's algorithm) on gymnax CartPole, MLP 64x64, 4 epochs, 4 minibatches."""

import jax
import rejax

from benchmarks.peers.clock import row, run, steps_per_second


def main(envs: int = 64, seconds: float = 5.0, steps: int = 128) -> dict[str, object]:
    """Environment steps a second of whole iterations, of `steps` for each environment."""
    algorithm = rejax.PPO.create(
        env="CartPole-v1",
        agent_kwargs={"hidden_layer_sizes": (64, 64), "activation": "tanh"},
        num_envs=envs,
        num_steps=steps,
        num_epochs=4,
        num_minibatches=4,
        learning_rate=3e-4,
        total_timesteps=envs * steps,
    )
    iterate = jax.jit(lambda state: algorithm.train_iteration(state), donate_argnums=0)
    state = algorithm.init_state(jax.random.key(0))

    def call() -> None:
        nonlocal state
        state = jax.block_until_ready(iterate(state))

    return row(
        "rejax PPO, CartPole, MLP 64x64",
        "rejax",
        envs,
        steps_per_second(call, envs * steps, seconds),
        jax=jax.__version__,
        device=jax.devices()[0].device_kind,
    )


if __name__ == "__main__":
    run(main)
