"""The policy, settings and hyper-parameters that every part of an algorithm takes."""

from __future__ import annotations

from typing import NamedTuple

from jax import Array

from nca_trader.agents.policy import Policy
from nca_trader.config import AgentConfig, LearnerConfig


class Hyper(NamedTuple):
    """Hyper-parameters that may differ between the agents of a population.

    Each is a number of the config, or `[]` float32 of one agent (`[M]` of M agents).
    """

    learning_rate: float | Array
    entropy_coef: float | Array
    clip_epsilon: float | Array
    gae_lambda: float | Array
    discount: float | Array


def hyper_of(config: AgentConfig) -> Hyper:
    """Returns the config's own hyper-parameters."""
    learner = config.learner
    return Hyper(
        learning_rate=config.optimizer.learning_rate,
        entropy_coef=learner.entropy_coef,
        clip_epsilon=learner.clip_epsilon,
        gae_lambda=learner.gae_lambda,
        discount=learner.discount,
    )


class Setup(NamedTuple):
    """What an agent learns with; static but for the hyper-parameters of a population."""

    policy: Policy
    config: LearnerConfig
    hyper: Hyper


def setup_of(policy: Policy, config: AgentConfig) -> Setup:
    """Returns the setup of an agent with the config's own hyper-parameters."""
    return Setup(policy, config.learner, hyper_of(config))
