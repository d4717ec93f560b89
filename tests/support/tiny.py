"""The smallest experiment: an agent that trains in seconds, and the files of it."""

import pathlib
import shutil

import numpy as np
from drawn import random_bars

from nca_trader.config import (
    AgentConfig,
    CheckpointConfig,
    EnvConfig,
    LearnerConfig,
    PolicyConfig,
)
from nca_trader.config.toml import to_toml
from nca_trader.data.bars import read_bars, write_bars
from nca_trader.envs.trading import TradingEnv
from nca_trader.learner.train import train
from nca_trader.runs.manifest import Run
from nca_trader.types import Costs

AGENT = AgentConfig(
    policy=PolicyConfig(channels=4, hidden=8, steps=2, dilations=(1, 2), head_hidden=8),
    learner=LearnerConfig(
        steps=256,
        num_segments=8,
        segment_length=16,
        envs_per_segment=1,
        num_epochs=1,
        num_minibatches=1,
    ),
    checkpoint=CheckpointConfig(every=1, every_seconds=0.0),
)
# What is traced fastest, for what is the same whatever the policy.
MLP = PolicyConfig(kind="mlp", channels=4, hidden=4, window=2, head_hidden=4)
ENV = EnvConfig(features=("return_1", "return_5"), costs=Costs(commission=5e-4, slippage=2e-4))
STEPS_PER_UPDATE = 8 * 16
# An agent as small, for commands: updates of 64 steps.
SMALL = (
    "learner.num_segments=8 learner.segment_length=8 learner.envs_per_segment=1 "
    "learner.num_minibatches=1 policy.hidden=4 policy.channels=4 policy.dilations=[1] "
    "policy.steps=1 policy.neighbours=none"
).split()
TRAINING_ROWS, NUM_BARS = 200, 260
UNTIL = "2020-07-19"  # the date of row 200; the bars begin on 2020-01-01


class Tiny:
    """A folder with bars.csv, env.toml, agent.toml, and in runs/ what was trained with them."""

    def __init__(self, folder: pathlib.Path):
        self.folder, self.runs = folder, folder / "runs"
        self.path = self.runs / "tiny"
        self.data = folder / "bars.csv"

    @classmethod
    def train(cls, folder):
        tiny = cls(folder)
        write_bars(random_bars(np.random.default_rng(0), NUM_BARS, 2), tiny.data)
        (folder / "env.toml").write_text(to_toml(ENV))
        (folder / "agent.toml").write_text(to_toml(AGENT))
        train(tiny.env, AGENT, tiny.path)
        return tiny

    def copy(self, folder):
        """The same files elsewhere, to be changed; nobody has looked at its test span yet."""
        shutil.copytree(self.folder, folder)
        ledger = folder / "runs" / "trials.jsonl"
        lines = ledger.read_text().splitlines(keepends=True)
        ledger.write_text("".join(line for line in lines if '"kind": "train"' in line))
        return Tiny(folder)

    @property
    def bars(self):
        return read_bars(self.data)

    @property
    def env(self):
        return TradingEnv(self.bars[:TRAINING_ROWS], ENV)

    @property
    def run(self):
        return Run(self.path)

    def train_command(self, run, **changes):
        """Arguments that train into `run` what this run was trained with, but for the changes."""
        options = {
            "env": self.folder / "env.toml",
            "agent": self.folder / "agent.toml",
            "data": self.data,
            "until": UNTIL,
            "run": run,
        }
        given = options | changes
        return ["train", *(f"--{name}={value}" for name, value in given.items())]

    def written(self):
        """Every file in the folder with its bytes: to see that nothing was written."""
        files = (path for path in sorted(self.folder.rglob("*")) if path.is_file())
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in files}
