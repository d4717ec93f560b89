"""The environment in the form of Gymnasium: one account, or a vector of accounts."""

from nca_trader.envs import ID
from nca_trader.envs.gym.environment import GymEnv
from nca_trader.envs.gym.vector import GymVectorEnv

__all__ = ["ID", "GymEnv", "GymVectorEnv"]
