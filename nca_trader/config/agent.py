"""An agent: all of its parts, and what must hold between them."""

from __future__ import annotations

import dataclasses

from nca_trader.config.learner import CurriculumConfig, LearnerConfig, OptimizerConfig
from nca_trader.config.policy import PolicyConfig
from nca_trader.config.population import PopulationConfig
from nca_trader.config.precision import PrecisionConfig
from nca_trader.config.ranges import multiple, refuse, strict, whole
from nca_trader.config.run import CheckpointConfig, MeshConfig


@strict
@dataclasses.dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """An agent: its policy and how it learns. `num_seeds` agents train in one program."""

    num_seeds: int = 1
    policy: PolicyConfig = PolicyConfig()
    learner: LearnerConfig = LearnerConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    population: PopulationConfig = PopulationConfig()
    precision: PrecisionConfig = PrecisionConfig()
    mesh: MeshConfig = MeshConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    def __post_init__(self):
        refuse(whole(self, 1, "num_seeds"))
        if (self.population.ranged or self.population.every) and self.num_seeds < 2:
            refuse(["population is of several agents; give num_seeds, e.g. 8."])
        if self.learner.replay_slots and not self.optimizer.ema_decay:
            refuse(
                [
                    "learner.replay_slots needs an average of the parameters to bootstrap values; "
                    "give optimizer.ema_decay, e.g. 0.99."
                ]
            )
        data, fsdp, model = self.mesh.axes
        name = "mesh.devices" if fsdp * model == 1 else "mesh's data * fsdp"
        shards = self.learner.logical_shards
        refuse(multiple("learner.logical_shards", shards, name, data * fsdp))
