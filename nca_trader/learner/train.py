"""The training loop: repeats `learner.step` and writes metrics and checkpoints.

A run that was stopped or killed resumes from its newest good checkpoint and ends at the same
parameters, bit for bit on the CPU. A run whose numbers are no longer finite returns to that
checkpoint automatically, with another key.

In a run of several processes each calls `train` with the same arguments, and only the first
writes. All must call the same programs, so they first agree on what only one of them knows: a
stop, the time, the content of a file.

Update u learns from shard `u // shard_updates`, over and over. The data cursor is therefore the
number of updates, which every checkpoint has.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from nca_trader.agents.base import env_on_base
from nca_trader.agents.policy import Params, build_policy
from nca_trader.cloud import CloudPath, Place, place
from nca_trader.config import AgentConfig, CheckpointConfig, LearnerConfig
from nca_trader.config.ranges import expect
from nca_trader.data.shards import Piece, stream
from nca_trader.envs.market import Market
from nca_trader.envs.trading import TradingEnv, expect_env
from nca_trader.errors import ConfigError, StateError, logger
from nca_trader.learner.learner import (
    Learner,
    build_learner,
    number_or_null,
    own_part,
    shard_updates,
)
from nca_trader.learner.optimizer import AverageState
from nca_trader.learner.pathwise import refuse_bankrupt
from nca_trader.learner.programs import Compilations
from nca_trader.learner.stopping import Scoring, Stopping
from nca_trader.learner.update import LearnerState
from nca_trader.parallel import hosts
from nca_trader.parallel.mesh import compiler_options, replicate
from nca_trader.progress import Progress, quiet
from nca_trader.runs.checkpoint import Checkpoints, shapes_of, unflatten
from nca_trader.runs.manifest import Run
from nca_trader.runs.opening import training_run
from nca_trader.runs.trackers import Tracker, Tracking, subject_of, tracker_of

Report = Callable[[dict[str, Any]], None]
log = logger(__name__)


def train(
    env: TradingEnv,
    agent: AgentConfig | str | os.PathLike[str],
    run_dir: str | os.PathLike[str] | CloudPath,
    *,
    steps: int | None = None,
    seed: int = 0,
    report: Report = lambda row: None,
    stop: Callable[[], bool] = lambda: False,
    params: Params | None = None,
    select: Scoring | None = None,
    track: str | Tracker | None = None,
) -> Run:
    """Train `agent` in `env` into a run folder; an existing run is resumed.

    Args:
      env: the environment. With shards, training reads one after the other, see
        `LearnerConfig.shard_updates`.
      agent: a config, the name of a preset, or the path of a TOML file.
      run_dir: a folder, or a `gs://` or `s3://` URL of one.
      steps: environment steps of each seed in total, rounded up to whole updates, including those
        that a resumed run has done. None is the agent's `learner.steps`. A resumed run keeps the
        curriculum of the steps that it began with.
      seed: seed of all random numbers.
      report: called with each row of metrics.jsonl.
      stop: called after each update; True in any process saves a checkpoint and returns.
      params: that a new run of one agent begins with (a warm start), e.g. `run.params()` of
        another; None draws them. A run that is resumed keeps its own.
      select: a `nca_trader.Selector`: scores the mean agent on a selection span as training goes
        on, see `agent.selection`. Training stops when no better score came for a while, and the
        run acts as after the update with the best. None trains all steps.
      track: also shows the metrics elsewhere: "tensorboard:DIR", "wandb:ENTITY/PROJECT", the name
        of an installed tracker, or a `nca_trader.runs.trackers.Tracker` of your own.

    Returns:
      The run; `steps_done(run)` is its number of environment steps.

    Raises:
      RunError: `run_dir` holds something else, or another process trains there; a resumed run was
        selected on other bars.
      BarError: too few bars, or a shard is missing.
      ConfigError: an argument is not valid, `env` has bars of the selection span, a process has no
        device in the mesh, or with "pathwise" an account went bankrupt.
      StateError: a shard or a checkpoint cannot be written or differs from what was written, or
        the run failed again after `max_rollbacks` returns to one checkpoint.
      StoreError: the object store of `run_dir` or of the shards cannot be reached.

    Example:
      >>> import nca_trader as nca
      >>> env = nca.TradingEnv(nca.sample_bars("sp500"))
      >>> run = nca.train(env, "nano", "runs/one", steps=100_000)  # doctest: +SKIP
      >>> result = nca.backtest(env.bars, run)  # doctest: +SKIP
    """
    expect_env(env, agent=agent, run_dir=run_dir)
    agent = load_agent(agent)
    agent = _asked_for(agent, steps, seed, params)
    planned = planned_steps(agent)
    env = env_on_base(env, agent.policy)
    if select is not None:
        select.refuse_seen(env)
    tracker = tracker_of(track)
    path = place(run_dir, "run_dir")
    stored = (path / "run.json").exists()
    policy = build_policy(agent, env.spec, stored)
    learner = build_learner(env, policy, _with_first_steps(agent, path) if stored else agent)
    check_processes(learner.mesh)
    updates = planned // learner.steps_per_update
    # Nothing is written before everything that can be refused has been.
    with (
        training_run(env, agent, path, seed) as run,
        Checkpoints(run.path / "checkpoints", agent.checkpoint.keep) as checkpoints,
        contextlib.nullcontext() if hosts.first() else quiet(),  # one line for all processes
        Progress(planned, "train", compiles=True) as shown,
        Markets(env, agent.learner, learner.mesh) as markets,
        Compilations([learner.bounded.program.__name__]) as compiled,
        contextlib.ExitStack() as stack,
    ):
        config = {name: (run.path / name).read_text() for name in ("env.toml", "agent.toml")}
        stopping = Stopping(run, select, agent.selection, updates)
        state, done = _resume(learner, checkpoints, seed, run, params)
        stopping.resume(done)
        shown.skip(done * learner.steps_per_update)
        steps_before = done * learner.steps_per_update
        tracked = Tracking(tracker if hosts.first() else None, subject_of(run), steps_before)
        stack.callback(tracked.close)
        health = Health(agent.checkpoint, run, state.update.shape)
        intervals = Intervals(agent.checkpoint)
        # Each turn is one update. All processes take the same turns, since `step` is a collective.
        while done < updates and not stopping.ended:
            state, row = _updated(learner, state, markets, done)
            done += 1
            row |= {"rollbacks": health.rollbacks, "retraces": compiled.again()}
            refuse_bankrupt(row)
            # Before the row is written, so an update that is rolled back leaves none.
            if fault := health.fault(row):
                failed = done
                state, done = _resume(learner, checkpoints, seed, run, params)
                shown.skip((done - failed + 1) * learner.steps_per_update)
                state = health.roll_back(fault, state, done)
                stopping.resume(done)
                continue
            if scored := stopping.due(done):
                stopping.score(state, done, row)
            if hosts.first():
                run.append(row)
                tracked.log(row["steps"], row)
            # A metric that is not finite is None.
            known = {name: row[name] for name in ("reward", "entropy") if row[name] is not None}
            shown.update(learner.steps_per_update, **known)
            report(row)
            # A checkpoint is written by a thread; its error ends training here and not at the next
            # save.
            checkpoints.check()
            stopped, due = agreed(stop(), intervals.due(done))
            # A rollback must lead to before a row of dropped updates, so none is saved in it.
            # A score stands with the checkpoint of its update: a resumed run makes it again or not.
            due = due or scored
            if stopped or done == updates or stopping.ended or (due and not health.dropping):
                run.lines.flush()  # rows must not be older than the checkpoint
                checkpoints.save(done, state, config)
                health.saved()
                intervals.saved()
            if stopped:
                break
        if (chosen := run.selection) is not None:
            tracked.results = {"selection/update": chosen.update, "selection/score": chosen.score}
    return run


def _with_first_steps(agent: AgentConfig, path: Place) -> AgentConfig:
    """Return the agent with the steps that its run began with.

    Schedules keep their length: with more steps a curriculum that has ended would start again.
    """
    return _for_steps(agent, Run(path, allow_code=None).agent_config.learner.steps)


def _updated(
    learner: Learner, state: LearnerState, markets: Markets, done: int
) -> tuple[LearnerState, dict[str, Any]]:
    """Run the update after `done` others; return the state after it and its row of metrics."""
    started = time.perf_counter()
    state, metrics = learner.step(state, markets.of(done))
    # Waits for the update, which JAX only started; without this `seconds` would be too short.
    metrics = jax.device_get(metrics)
    seconds = time.perf_counter() - started
    row = metrics_row(metrics, done + 1, learner.steps_per_update, seconds)
    if learner.bounded.needed is not None:
        row["memory_gb"] = learner.bounded.needed / 1e9
    if (shard := markets.shard(done)) is not None:
        row["shard"] = shard
    return state, row


def _asked_for(agent: AgentConfig, steps: Any, seed: Any, params: Any) -> AgentConfig:
    """Return the agent with the steps asked for; refuse what `train` cannot begin with."""
    if steps is not None:
        expect("steps", steps, Integral, "a whole number")
        if steps < 1:
            raise ConfigError(f"steps = {steps}: train at least one environment step.")
        agent = _for_steps(agent, steps)
    expect("seed", seed, Integral, "a whole number")
    if not 0 <= seed < 2**32:
        raise ConfigError(f"seed = {seed}: give a whole number from 0 to {2**32 - 1}.")
    if params is not None and agent.num_seeds > 1:
        raise ConfigError(
            f"params: begins one agent, and this one has num_seeds = {agent.num_seeds}; train each "
            "seed alone."
        )
    return agent


def agreed(stop: bool, due: bool) -> tuple[bool, bool]:
    """Return whether any process must stop, and whether a save is due by the clock of process 0."""
    # Clocks and signals differ by host, but a save is a collective, so all decide alike.
    each = hosts.all_gather(np.array([stop, due]))
    return bool(each[:, 0].any()), bool(each[0, 1])


def check_processes(mesh: Mesh) -> None:
    """Validate that every process has a device in the mesh, and so a program to call.

    Raises:
      ConfigError: one has none.
    """
    taking_part = len({device.process_index for device in mesh.devices.flat})
    if taking_part < hosts.count():
        raise ConfigError(
            f"mesh.devices = {mesh.size} are those of {taking_part} processes of {hosts.count()}; "
            f"take all {jax.device_count()}, or start fewer processes."
        )


class Intervals:
    """Decides when a checkpoint is due: by updates or by seconds, whichever comes first."""

    def __init__(self, config: CheckpointConfig, clock: Callable[[], float] = time.monotonic):
        """Start to count seconds."""
        self._config, self._clock = config, clock
        self.saved()

    def saved(self) -> None:
        """Record that a checkpoint was saved now."""
        self._since = self._clock()

    def due(self, done: int) -> bool:
        """Whether a checkpoint is due after `done` updates."""
        every, seconds = self._config.every, self._config.every_seconds
        by_updates = every > 0 and done % every == 0
        return by_updates or 0.0 < seconds <= self._clock() - self._since


class Health:
    """Watches the rows of metrics and rolls training back when it fails."""

    def __init__(self, config: CheckpointConfig, run: Run, shape: tuple[int, ...] = ()):
        """Read the rows that `run` has, so that a killed run keeps its counts.

        Args:
          config: limits.
          run: the run.
          shape: `()`, or `(M,)` of M agents.
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
        self._streaks, rollbacks = hosts.broadcast(known)
        self.rollbacks = int(rollbacks)

    def _count(self, row: dict[str, Any]) -> None:
        dropped = np.greater(row.get("seeds", row)["skipped"], 0)
        self._streaks = np.where(dropped, self._streaks + 1, 0).astype(np.int32)

    @property
    def dropping(self) -> bool:
        """Whether the newest update of any agent was dropped."""
        return bool(np.any(self._streaks))

    def fault(self, row: dict[str, Any]) -> str:
        """Count the newest row; return why training must be rolled back, or ""."""
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
        """Return the restored `state` with another key, so that it draws other numbers.

        Raises:
          StateError: training was rolled back to this checkpoint `max_rollbacks` times already.
        """
        before, self._since = self.rollbacks, self._since + 1
        where = f"checkpoint {done}" if done else "the start"
        if self._since > self._config.max_rollbacks:
            raise StateError(
                f"{self._run.path}: {fault}, also after {self._since - 1} rollbacks to {where}, "
                "which is as it was; look for bars that are not finite, or train into another "
                "folder with a lower optimizer.learning_rate."
            )
        log.warning("%s: %s; rolled back to %s, with another key", self._run.path, fault, where)
        # The rows after the checkpoint were cut, also the one that counted this rollback.
        self._from_rows()
        self.rollbacks = before + 1
        # Of several agents, each has its own key.
        fold = (
            jax.random.fold_in if state.key.ndim == 0 else jax.vmap(jax.random.fold_in, (0, None))
        )
        # The key depends on the number of rollbacks, because the same key would lead to the same
        # fault.
        return state._replace(key=jax.device_put(fold(state.key, self._since), state.key.sharding))

    def saved(self) -> None:
        """Record that a checkpoint was saved, to which the next rollback returns."""
        self._since = 0


def _for_steps(agent: AgentConfig, steps: int) -> AgentConfig:
    """Return the agent with a run of `steps` environment steps."""
    return dataclasses.replace(agent, learner=dataclasses.replace(agent.learner, steps=steps))


def planned_steps(agent: AgentConfig, steps: int | None = None) -> int:
    """Environment steps of a run of `agent`, of all seeds together, in whole updates."""
    learn = agent.learner
    per_update = learn.num_segments * learn.segment_length * learn.envs_per_segment
    return -(-(steps or learn.steps) // per_update) * per_update * agent.num_seeds


def steps_done(run: Run) -> int:
    """Environment steps of all seeds together that the run's metrics record."""
    rows = run.metrics()
    return rows[-1]["steps"] if rows else 0


def _resume(
    learner: Learner, checkpoints: Checkpoints, seed: int, run: Run, params: Params | None
) -> tuple[LearnerState, int]:
    """Return the newest saved state, or a new one (with `params`), and its number of updates.

    Rows of later updates are dropped: they will be written again.
    """
    # Also when resuming: a saved state gets the structure and shardings of a new one.
    # It runs once, so it is compiled with the learner's options, which cost less to compile.
    key, options = jax.random.key(seed), compiler_options(learner.mesh)
    state = learner.init.lower(key).compile(compiler_options=options)(key)
    found = checkpoints.newest(like=shapes_of(state))
    if found is not None:
        state = unflatten(state, found[1])
    elif params is not None:
        state = _begun_with(state, params)
    done = int(np.asarray(state.update).flat[0])
    # Only process 0 writes, and the others wait until the file is cut.
    hosts.on_first(lambda: run.cut(done))
    return state, done


def _begun_with(state: LearnerState, params: Params) -> LearnerState:
    """Return a new state with these parameters, from which an average of them begins too."""

    def put(like: Any) -> Any:
        # Copies: a step donates its state, which would delete the caller's arrays.
        return jax.tree.map(
            lambda leaf, value: jax.device_put(np.array(value, leaf.dtype), leaf.sharding),
            like,
            params,
        )

    def average(part: Any) -> Any:
        return AverageState(put(part.params)) if isinstance(part, AverageState) else part

    opt_state = jax.tree.map(
        average, state.opt_state, is_leaf=lambda part: isinstance(part, AverageState)
    )
    return state._replace(params=put(state.params), opt_state=opt_state)


def dropped_line(row: dict[str, Any]) -> str:
    """Describe from a row of metrics which update was dropped, and the first fault in it.

    Rewards are computed first, then values, the loss, and the gradient.
    """
    names = [name for name, value in row.items() if value is None]
    if "reward" in names:
        first = "rewards are not finite; look at the bars and the costs"
    elif names and names != ["grad_norm"]:
        first = "values or probabilities are not finite, rewards are; look at the features"
    else:
        first = "a gradient is not finite, the loss is; lower optimizer.learning_rate"
    nulls = f" (null in metrics.jsonl: {', '.join(names)})" if names else ""
    return f"update {row['update']} dropped: {first}{nulls}"


def metrics_row(
    metrics: dict[str, Any], done: int, per_update: int, seconds: float
) -> dict[str, Any]:
    """Return a row of metrics.jsonl: means over seeds, and each seed's values under "seeds".

    Numbers that are not finite are None.
    """
    row: dict[str, Any] = {"update": done, "steps": done * per_update}
    for name, value in metrics.items():
        # JSON has no NaN, and `null` says which number was not finite.
        row[name] = number_or_null(np.mean(value))
    if np.ndim(metrics["reward"]):
        row["seeds"] = {name: [number_or_null(v) for v in value] for name, value in metrics.items()}
    row["steps_per_s"] = per_update / seconds
    return row


class Markets(contextlib.AbstractContextManager["Markets"]):
    """The markets of a run's updates; those of shards are read ahead."""

    def __init__(self, env: TradingEnv, config: LearnerConfig, mesh: Mesh):
        """Read nothing yet."""
        self._env, self._config, self._mesh = env, config, mesh
        self._stream: Generator[Piece, None, None] | None = None
        self._turn, self._market = -1, None
        self._own = None if env.shards is None else own_part(env.shards, hosts.own())

    def __exit__(self, *exc: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._stream is not None:
            self._stream.close()

    def shard(self, update: int) -> int | None:
        """Index of the shard that this process learns from in `update` (from 0), or None."""
        env = self._env
        if env.shards is None or self._own is None:
            return None
        shard = self._own[update // shard_updates(env.shards, self._config) % len(self._own)]
        return [other.path for other in env.shards].index(shard.path)

    def of(self, update: int) -> Market | None:
        """Return the market of `update` (from 0) on the mesh; None is the environment's own.

        Raises:
          BarError: its shard is missing.
          StateError: its shard differs from what was written.
        """
        env = self._env
        if env.shards is None or self._own is None:
            return None
        turn = update // shard_updates(env.shards, self._config)
        if turn == self._turn:
            return self._market
        self._market = None  # so that the device need not hold two
        if self._stream is None or turn != self._turn + 1:  # a start, or a way back
            self._close()
            own = [d for d in self._mesh.devices.flat if d.process_index == hosts.own()]
            # A process can put arrays on its own devices only.
            local = self._mesh if len(own) == self._mesh.size else Mesh(np.array(own), ("own",))
            place: Any = replicate(local)
            first = turn % len(self._own)
            self._stream = stream(self._own, env.prepare, start=first, repeat=True, device=place)
        market, whole = next(self._stream).arrays, replicate(self._mesh)

        def joined(leaf: Array) -> Array:
            # Each process read another shard, yet the array counts as replicated: the learner
            # never moves a market between devices.
            copies = [shard.data for shard in leaf.addressable_shards]
            return jax.make_array_from_single_device_arrays(leaf.shape, whole, copies)

        self._market = market if hosts.count() == 1 else jax.tree.map(joined, market)
        self._turn = turn
        return self._market
