"""The training loop: `learner.step` again and again, its metrics and checkpoints on disk.

A run that was stopped, or killed, goes on from its newest good checkpoint and ends at the same
parameters, bit for bit on the CPU.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from nca_trader.agents.policy import make_policy
from nca_trader.envs.trading import TradingEnv
from nca_trader.errors import ConfigError
from nca_trader.learner.update import Learner, LearnerState, make_learner
from nca_trader.presets import AgentConfig
from nca_trader.runs.checkpoint import Checkpoints, unflatten
from nca_trader.runs.files import write_atomically
from nca_trader.runs.manifest import Run, open_run

Report = Callable[[dict[str, Any]], None]


def train(
    env: TradingEnv,
    agent: AgentConfig,
    run_dir: str | os.PathLike[str],
    *,
    steps: int | None = None,
    seed: int = 0,
    report: Report = lambda row: None,
    stop: Callable[[], bool] = lambda: False,
) -> Run:
    """Trains `agent` in `env` for `steps` environment steps of each seed, into a run folder.

    Args:
      steps: a total, rounded up to whole updates; what a resumed run has done counts.
        None is the preset's `learner.steps`.
      seed: of everything random. report: called with each row of metrics.jsonl.
      stop: asked after each update; True saves a checkpoint and returns.

    Returns:
      The run; `steps_done(run)` says how far it came.

    Raises:
      RunError: `run_dir` holds something else. BarError: too few bars. ConfigError: see there.
    """
    if steps is not None:
        if steps < 1:
            raise ConfigError(f"steps = {steps}: train at least one environment step.")
        learner_config = dataclasses.replace(agent.learner, steps=steps)
        agent = dataclasses.replace(agent, learner=learner_config)
    if not 0 <= seed < 2**32:
        raise ConfigError(f"seed = {seed}: give a whole number from 0 to {2**32 - 1}.")
    policy = make_policy(agent, env.spec)
    learner = make_learner(env, policy, agent)
    # Nothing is written before everything that can be refused has been.
    run = open_run(env, agent, pathlib.Path(run_dir), seed)
    updates = planned_steps(agent) // learner.steps_per_update
    config = {name: (run.path / name).read_text() for name in ("env.toml", "agent.toml")}
    with Checkpoints(run.path / "checkpoints", agent.checkpoint.keep) as checkpoints:
        state = _restore(learner, checkpoints, seed)
        done = _updates_done(state)
        _cut_metrics(run.path / "metrics.jsonl", done)
        with open(run.path / "metrics.jsonl", "a", encoding="utf-8") as file:
            while done < updates:
                started = time.perf_counter()
                state, metrics = learner.step(state)
                metrics = jax.device_get(metrics)
                seconds = time.perf_counter() - started
                done += 1
                row = _row(metrics, done, learner.steps_per_update, seconds)
                file.write(json.dumps(row) + "\n")
                file.flush()
                report(row)
                stopped = stop()
                if stopped or done == updates or done % agent.checkpoint.every == 0:
                    checkpoints.save(done, state, config)
                if stopped:
                    break
    return run


def planned_steps(agent: AgentConfig, steps: int | None = None) -> int:
    """Environment steps that a run of `agent` makes, of all seeds together, in whole updates."""
    learn = agent.learner
    per_update = learn.num_segments * learn.segment_length * learn.envs_per_segment
    return -(-(steps or learn.steps) // per_update) * per_update * agent.num_seeds


def steps_done(run: Run) -> int:
    """Environment steps of all seeds together that the run's metrics record."""
    rows = run.metrics()
    return rows[-1]["steps"] if rows else 0


def _restore(learner: Learner, checkpoints: Checkpoints, seed: int) -> LearnerState:
    state = learner.init(jax.random.key(seed))
    found = checkpoints.newest()
    return state if found is None else unflatten(state, found[1])


def _updates_done(state: LearnerState) -> int:
    return int(np.asarray(state.update).flat[0])


def _cut_metrics(path: pathlib.Path, done: int) -> None:
    """Drops the rows of updates that a kill took back: they will be written again."""
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines()
        if len(lines) > done:
            write_atomically(path, "".join(line + "\n" for line in lines[:done]))


def _number(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None


def _row(metrics: dict[str, Any], done: int, per_update: int, seconds: float) -> dict[str, Any]:
    """One row of metrics.jsonl: means over seeds, and under "seeds" each one's where several.

    A figure that is not finite is null: JSON has no NaN.
    """
    row: dict[str, Any] = {"update": done, "steps": done * per_update}
    for name, value in metrics.items():
        row[name] = _number(np.mean(value))
    if np.ndim(metrics["reward"]):
        row["seeds"] = {name: [_number(v) for v in value] for name, value in metrics.items()}
    row["steps_per_s"] = per_update / seconds
    return row
