"""Stable-Baselines3's PPO on a market whose optimum is known: seconds until it reaches a part.

It has its MLP of 64x64, our environments stepped as one batch, and its own normalisation of
observations and rewards. It sees what `nca-trader prove` shows of a market, one bar of it.
"""

import dataclasses
import time

import jax.numpy as jnp
import numpy as np
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import VecNormalize

from benchmarks.peers.clock import row, run
from benchmarks.ppo import market_draws
from nca_trader.agents import load_agent
from nca_trader.agents.policy import make_policy
from nca_trader.envs.sb3 import SB3VecEnv
from nca_trader.optimum.measure import earnings_of, greedy_positions, pieces

LENGTH = 128


def act(params, cells, seen):
    """Logits of its policy network as a policy of ours has them, and no value."""
    x = jnp.concatenate([cells[..., 0, :], seen[..., 0, :]], axis=-1)
    x = jnp.clip((x - params["mean"]) / params["deviation"], -params["clip"], params["clip"])
    for weight, bias in params["hidden"]:
        x = jnp.tanh(x @ weight.T + bias)
    weight, bias = params["action"]
    return (x @ weight.T + bias)[..., None, :], jnp.zeros(x.shape[:-1])


def weights(agent, env):
    """The parameters that `act` takes."""
    pair = lambda layer: tuple(p.detach().numpy().copy() for p in (layer.weight, layer.bias))  # noqa: E731
    moments = env.obs_rms
    return {
        "mean": np.float32(moments.mean),
        "deviation": np.sqrt(np.float32(moments.var) + np.float32(env.epsilon)),
        "clip": np.float32(env.clip_obs),
        "hidden": [pair(layer) for layer in agent.policy.mlp_extractor.policy_net[::2]],
        "action": pair(agent.policy.action_net),
    }


def main(
    envs: int = 64, seconds: float = 90.0, part: float = 0.95, market: str = "ou_mid", seed: int = 0
) -> dict[str, object]:
    """Trains until a look finds `part` of the optimum, or for `seconds`; looks are not timed."""
    trained, judged = market_draws(market, seed)
    env = VecNormalize(SB3VecEnv(envs, env=trained))
    agent = PPO(
        "MlpPolicy", env, n_steps=LENGTH, batch_size=envs * LENGTH // 4, n_epochs=4,
        device="cpu", seed=seed,
    )  # fmt: skip
    # Its observation has the account's raw weights, also where positions have constant size.
    spec = dataclasses.replace(judged.spec, constant_size=False)
    policy = make_policy(load_agent("mlp"), spec)._replace(act=act)
    rows = pieces(len(judged), policy.first_decision)

    def reached() -> float:
        given = (judged, policy, weights(agent, env), rows, judged.features)
        return earnings_of(judged.task, rows, greedy_positions(*given)).fraction

    agent.learn(envs * LENGTH)  # compiles our step
    fraction = reached()
    spent, steps, looked = 0.0, envs * LENGTH, 0.0
    while fraction < part and spent < seconds:
        began = time.perf_counter()
        agent.learn(envs * LENGTH, reset_num_timesteps=False)
        spent, steps = spent + time.perf_counter() - began, steps + envs * LENGTH
        if spent - looked >= 1.0:
            fraction, looked = reached(), spent
    facts = {"fraction": fraction, "seconds": spent, "steps": steps}
    name = f"Stable-Baselines3 PPO, {envs} environments in a batch"
    return row(name, "stable-baselines3", envs, steps / max(spent, 1e-9), **facts)


if __name__ == "__main__":
    run(main)
