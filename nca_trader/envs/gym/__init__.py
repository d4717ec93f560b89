"""The environment as Gymnasium sees it, single and as a vector."""

from nca_trader.envs.gym.environment import GymEnv
from nca_trader.envs.gym.vector import GymVectorEnv
from nca_trader.envs.registration import ID

__all__ = ["ID", "GymEnv", "GymVectorEnv"]
