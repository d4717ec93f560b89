"""The training loop: `learner.step` again and again, its metrics and checkpoints on disk.

A run that was stopped, or killed, goes on from its newest good checkpoint and ends at the same
parameters, bit for bit on the CPU. A run whose numbers are no longer finite goes back to it by
itself, with another key.

In a run of several processes each calls `train` with the same arguments. The first one alone
writes; what a process knows by itself (that it was asked to stop, what the time is, what a file
says) is agreed on before anything follows from it, since all must call the same programs.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import time
from collections.abc import Callable, Generator
from numbers import Integral
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from nca_trader.agents import load_agent
from nca_trader.agents.policy import make_policy
from nca_trader.cloud import CloudPath, place
from nca_trader.config import AgentConfig, CheckpointConfig, LearnerConfig
from nca_trader.config.ranges import expect
from nca_trader.data.shards import Piece, stream
from nca_trader.envs.market import Market
from nca_trader.envs.trading import TradingEnv
from nca_trader.errors import ConfigError, StateError
from nca_trader.learner.learner import Learner, make_learner, own_part, shard_updates
from nca_trader.learner.population import Fitness, exploited, fitness_of, number_or_null
from nca_trader.learner.programs import Compilations
from nca_trader.learner.update import LearnerState
from nca_trader.parallel import hosts
from nca_trader.parallel.mesh import replicated
from nca_trader.runs.checkpoint import Checkpoints, unflatten
from nca_trader.runs.manifest import Run, training_run

Report = Callable[[dict[str, Any]], None]
log = logging.getLogger(__name__)


def train(
    env: TradingEnv,
    agent: AgentConfig | str | os.PathLike[str],
    run_dir: str | os.PathLike[str] | CloudPath,
    *,
    steps: int | None = None,
    seed: int = 0,
    report: Report = lambda row: None,
    stop: Callable[[], bool] = lambda: False,
    fitness: Fitness | None = None,
) -> Run:
    """Trains `agent` in `env` for `steps` environment steps of each seed, into a run folder.

    Args:
      agent: a config, a preset's name, or the path of a TOML file.
      run_dir: a folder, or a `gs://` or `s3://` URL of one.
      env: of shards, it trains on shard after shard, read ahead, see `learner.shard_updates`.
      steps: a total, rounded up to whole updates; what a resumed run has done counts.
        None is the preset's `learner.steps`. A curriculum's course stays that of the steps that
        the run began with.
      seed: of everything random. report: called with each row of metrics.jsonl.
      stop: asked after each update; True, of any process, saves a checkpoint and returns.
      fitness: of a population's agents, `[M]`, more is better, e.g. on a selection span; None is
        the mean training reward since the last exploit.

    Returns:
      The run; `steps_done(run)` says how far it came.

    Raises:
      RunError: `run_dir` holds something else, or another process trains there.
      BarError: too few bars, or a shard is missing.
      ConfigError: see there; or a process has no device in the mesh.
      StateError: a shard or a checkpoint is not what was written, or cannot be; or the run went
        back to one checkpoint `max_rollbacks` times and failed again.
      StoreError: the object store of `run_dir` or of the shards cannot be reached.
    """
    expect("env", env, TradingEnv, "a TradingEnv", agent=agent, run_dir=run_dir)
    agent = load_agent(agent)
    if steps is not None:
        expect("steps", steps, Integral, "a whole number")
        if steps < 1:
            raise ConfigError(f"steps = {steps}: train at least one environment step.")
        agent = _for_steps(agent, steps)
    expect("seed", seed, Integral, "a whole number")
    if not 0 <= seed < 2**32:
        raise ConfigError(f"seed = {seed}: give a whole number from 0 to {2**32 - 1}.")
    path = place(run_dir, "run_dir")
    policy = make_policy(agent, env.spec)
    # What goes by the run's length goes on by the length that it began with: a curriculum that
    # has ended would begin again otherwise.
    began = agent
    if (path / "run.json").exists():
        began = _for_steps(agent, Run(path).agent_config.learner.steps)
    learner = make_learner(env, policy, began)
    _check_processes(learner.mesh)
    updates = planned_steps(agent) // learner.steps_per_update
    # Nothing is written before everything that can be refused has been.
    with (
        training_run(env, agent, path, seed) as run,
        Checkpoints(run.path / "checkpoints", agent.checkpoint.keep) as checkpoints,
        Markets(env, agent.learner, learner.mesh) as markets,
        Compilations(step.__name__ for step in learner.programs.values()) as compiled,
    ):
        config = {name: (run.path / name).read_text() for name in ("env.toml", "agent.toml")}
        state, done = _resume(learner, checkpoints, seed, run)
        health = Health(agent.checkpoint, run, state.update.shape)
        intervals = Intervals(agent.checkpoint)
        while done < updates:
            started = time.perf_counter()
            state, metrics = learner.step(state, markets.of(done))
            metrics = jax.device_get(metrics)
            seconds = time.perf_counter() - started
            done += 1
            row = _row(metrics, done, learner.steps_per_update, seconds)
            row |= {"rollbacks": health.rollbacks, "retraces": compiled.again()}
            row |= learner.fitting.figures
            if (shard := markets.shard(done - 1)) is not None:
                row["shard"] = shard
            if fault := health.fault(row):
                state, done = _resume(learner, checkpoints, seed, run)
                state = health.roll_back(fault, state, done)
                continue
            if agent.population.every and done % agent.population.every == 0:
                score = fitness_of(agent.population, run, row, state, fitness)
                state = exploited(agent.population, state, score, seed, row)
            if hosts.first():
                run.lines.append(json.dumps(row))
            report(row)
            checkpoints.check()
            stopped, due = _agreed(stop(), intervals.due(done))
            # In a row of dropped updates none is saved: the way back leads to before it.
            if stopped or done == updates or (due and not health.dropping):
                run.lines.flush()  # before there is a checkpoint that they led to
                checkpoints.save(done, state, config)
                health.saved()
                intervals.saved()
            if stopped:
                break
    return run


def _agreed(stop: bool, due: bool) -> tuple[bool, bool]:
    """Whether any process was asked to stop, and whether the first one's clock says to save."""
    each = hosts.of_each(np.array([stop, due]))
    return bool(each[:, 0].any()), bool(each[0, 1])


def _check_processes(mesh: Mesh) -> None:
    """Refuses a mesh that leaves a process without a device: it would have nothing to call."""
    taking_part = len({device.process_index for device in mesh.devices.flat})
    if taking_part < hosts.count():
        raise ConfigError(
            f"mesh.devices = {mesh.size} are those of {taking_part} processes of {hosts.count()}; "
            f"take all {jax.device_count()}, or start fewer processes."
        )


class Intervals:
    """When a checkpoint is due: after so many updates or seconds, whichever comes first."""

    def __init__(self, config: CheckpointConfig, clock: Callable[[], float] = time.monotonic):
        """The seconds count from now on."""
        self._config, self._clock = config, clock
        self.saved()

    def saved(self) -> None:
        """A checkpoint was saved just now."""
        self._since = self._clock()

    def due(self, done: int) -> bool:
        """Whether one is due after `done` updates."""
        every, seconds = self._config.every, self._config.every_seconds
        by_updates = every > 0 and done % every == 0
        return by_updates or 0.0 < seconds <= self._clock() - self._since


class Health:
    """Whether training goes well, by its rows of metrics; and the way back when it does not."""

    def __init__(self, config: CheckpointConfig, run: Run, shape: tuple[int, ...] = ()):
        """What the rows that `run` has say; a run that was killed so goes on where it was.

        `shape` is `[]`, or `[M]` of M agents.
        """
        self._config, self._run, self._shape = config, run, shape
        self._from_rows()
        self._since = 0  # rollbacks since the newest checkpoint was saved

    def _from_rows(self) -> None:
        self._streaks: Any = np.zeros(self._shape, np.int32)  # dropped updates in a row, by agent
        rows = self._run.metrics() if hosts.first() else []
        for row in rows:
            self._count(row)
        known = (self._streaks, np.int32(rows[-1]["rollbacks"] if rows else 0))
        self._streaks, rollbacks = hosts.of_first(known)
        self.rollbacks = int(rollbacks)

    def _count(self, row: dict[str, Any]) -> None:
        dropped = np.greater(row.get("seeds", row)["skipped"], 0)
        self._streaks = np.where(dropped, self._streaks + 1, 0).astype(np.int32)

    @property
    def dropping(self) -> bool:
        """Whether the newest update was dropped, of any agent."""
        return bool(np.any(self._streaks))

    def fault(self, row: dict[str, Any]) -> str:
        """Takes in the newest row; says why training must go back, or "" where it need not."""
        self._count(row)
        if self.dropping:
            log.warning("%s: %s", self._run.path, dropped_line(row))
        if row["param_norm"] is None:
            return f"update {row['update']} left parameters that are not finite"
        longest = int(np.max(self._streaks))
        if longest >= self._config.max_skips:
            return f"update {row['update']} is the last of {longest} in a row that were dropped"
        return ""

    def roll_back(self, fault: str, state: LearnerState, done: int) -> LearnerState:
        """The restored `state` with another key, so that it does not draw the same again.

        Raises:
          StateError: it has been there `max_rollbacks` times already.
        """
        before, self._since = self.rollbacks, self._since + 1
        where = f"checkpoint {done}" if done else "the start"
        if self._since > self._config.max_rollbacks:
            raise StateError(
                f"{self._run.path}: {fault}, also after {self._since - 1} rollbacks to {where}, "
                "which is as it was; look for bars that are not finite, or train into another "
                "folder with a lower optimizer.learning_rate."
            )
        log.warning("%s: %s; rolled back to %s, on with another key", self._run.path, fault, where)
        self._from_rows()
        self.rollbacks = before + 1
        return state._replace(key=_folded(state.key, self._since))

    def saved(self) -> None:
        """A checkpoint was saved: the way back is a new one."""
        self._since = 0


def _folded(key: Array, number: int) -> Array:
    """`key`, or each of the agents' keys, folded with `number`, where it was."""
    fold = jax.random.fold_in if key.ndim == 0 else jax.vmap(jax.random.fold_in, (0, None))
    return jax.device_put(fold(key, number), key.sharding)


def _for_steps(agent: AgentConfig, steps: int) -> AgentConfig:
    """The agent whose run is `steps` environment steps long."""
    return dataclasses.replace(agent, learner=dataclasses.replace(agent.learner, steps=steps))


def planned_steps(agent: AgentConfig, steps: int | None = None) -> int:
    """Environment steps that a run of `agent` makes, of all seeds together, in whole updates."""
    learn = agent.learner
    per_update = learn.num_segments * learn.segment_length * learn.envs_per_segment
    return -(-(steps or learn.steps) // per_update) * per_update * agent.num_seeds


def steps_done(run: Run) -> int:
    """Environment steps of all seeds together that the run's metrics record."""
    rows = run.metrics()
    return rows[-1]["steps"] if rows else 0


def _resume(
    learner: Learner, checkpoints: Checkpoints, seed: int, run: Run
) -> tuple[LearnerState, int]:
    """The newest state that is saved, or a new one, and how many updates it has done.

    Rows of updates that a kill or a rollback took back are dropped: they will be written again.
    """
    state = learner.init(jax.random.key(seed))
    found = checkpoints.newest()
    state = state if found is None else unflatten(state, found[1])
    done = int(np.asarray(state.update).flat[0])
    hosts.on_first(lambda: run.lines.cut(done))
    return state, done


def dropped_line(row: dict[str, Any]) -> str:
    """Which update was dropped, by its row of metrics, and what of it is not finite first.

    Rewards come before values, values before the loss, and all of them before a gradient.
    """
    names = [name for name, value in row.items() if value is None]
    if "reward" in names:
        first = "rewards are not finite; look at the bars and the costs"
    elif names and names != ["grad_norm"]:
        first = "values or probabilities are not finite, rewards are; look at the features"
    else:
        first = "a gradient is not finite, the loss is; lower optimizer.learning_rate"
    told = f" (null in metrics.jsonl: {', '.join(names)})" if names else ""
    return f"update {row['update']} dropped: {first}{told}"


def _row(metrics: dict[str, Any], done: int, per_update: int, seconds: float) -> dict[str, Any]:
    """One row of metrics.jsonl: means over seeds, and under "seeds" each one's where several.

    A figure that is not finite is null: JSON has no NaN.
    """
    row: dict[str, Any] = {"update": done, "steps": done * per_update}
    for name, value in metrics.items():
        row[name] = number_or_null(np.mean(value))
    if np.ndim(metrics["reward"]):
        row["seeds"] = {name: [number_or_null(v) for v in value] for name, value in metrics.items()}
    row["steps_per_s"] = per_update / seconds
    return row


class Markets:
    """The markets of a run's updates, read ahead where they are a stream."""

    def __init__(self, env: TradingEnv, config: LearnerConfig, mesh: Mesh):
        """Reads nothing yet."""
        self._env, self._config, self._mesh = env, config, mesh
        self._stream: Generator[Piece, None, None] | None = None
        self._turn, self._market = -1, None
        self._own = None if env.shards is None else own_part(env.shards, hosts.own())

    def __enter__(self) -> Markets:
        return self

    def __exit__(self, *exc: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._stream is not None:
            self._stream.close()

    def shard(self, update: int) -> int | None:
        """Index of the shard that `update` (from 0) learns from here; None where there are none."""
        env = self._env
        if env.shards is None or self._own is None:
            return None
        shard = self._own[update // shard_updates(env.shards, self._config) % len(self._own)]
        return [other.path for other in env.shards].index(shard.path)

    def of(self, update: int) -> Market | None:
        """The market of `update` (from 0) on the mesh; None is the environment's own.

        Raises:
          BarError: its shard is missing. StateError: it is not the one that was written.
        """
        env = self._env
        if env.shards is None or self._own is None:
            return None
        turn = update // shard_updates(env.shards, self._config)
        if turn == self._turn:
            return self._market
        self._market = None  # so that the device need not hold it beside the next
        if self._stream is None or turn != self._turn + 1:  # a start, or a way back
            self._close()
            place: Any = replicated(_local(self._mesh))
            first = turn % len(self._own)
            self._stream = stream(self._own, env.prepare, start=first, repeat=True, device=place)
        market = next(self._stream).arrays
        self._market, self._turn = jax.tree.map(self._joined, market), turn
        return self._market

    def _joined(self, leaf: Array) -> Array:
        """An array on this process's devices as one on the whole mesh.

        Each device's copy is what its process read. The learner takes the market as something
        that every device has by itself, and never moves it between them.
        """
        if hosts.count() == 1:
            return leaf
        copies = [shard.data for shard in leaf.addressable_shards]
        place = replicated(self._mesh)
        return jax.make_array_from_single_device_arrays(leaf.shape, place, copies)


def _local(mesh: Mesh) -> Mesh:
    """The devices of the mesh that are this process's, in one row."""
    own = [device for device in mesh.devices.flat if device.process_index == hosts.own()]
    return mesh if len(own) == mesh.size else Mesh(np.array(own), ("own",))
