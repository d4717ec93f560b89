"""The environment as Gymnasium sees it, single and as a vector."""

from nca_trader.envs import ID
from nca_trader.envs.gym.environment import GymEnv
from nca_trader.envs.gym.vector import GymVectorEnv

__all__ = ["ID", "GymEnv", "GymVectorEnv"]
