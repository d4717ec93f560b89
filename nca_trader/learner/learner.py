"""The learner: `update` as one jitted function over a mesh, bounded by its memory."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nca_trader.agents import load_agent
from nca_trader.agents.base import env_on_base
from nca_trader.agents.policy import Policy, build_policy
from nca_trader.config import AgentConfig, LearnerConfig
from nca_trader.config.ranges import divides, expect, refuse
from nca_trader.data.shards import Shards
from nca_trader.envs.market import Market
from nca_trader.envs.trading import TradingEnv, begin_dropout, expect_env
from nca_trader.errors import BarError, ConfigError
from nca_trader.learner.layout import make_layout
from nca_trader.learner.ppo import Hyper, hyper_of
from nca_trader.learner.programs import LESS, Bounded, Held, memory_limit
from nca_trader.learner.rollout import Segments
from nca_trader.learner.sampled import begin_ring, ring_spec
from nca_trader.learner.update import Course, LearnerState, Metrics, Parts, make_parts, update
from nca_trader.parallel import hosts
from nca_trader.parallel.mesh import (
    BATCH,
    FSDP,
    MODEL,
    batch_shards,
    compiler_options,
    everywhere,
    mesh_over,
    replicate,
)
from nca_trader.runs.consent import own_names

T = TypeVar("T")

# A value near 1 is drawn by its distance from 1: 0.99 to 0.999 is as wide a step as 0.01 to 0.001.
NEAR_ONE = ("gae_lambda", "discount")


def _inverted(name: str, value: Any) -> Any:
    """Return `value`, or its distance from 1; this is its own inverse."""
    return 1.0 - value if name in NEAR_ONE else value


def draw_hyper(config: AgentConfig, key: Array) -> Hyper | None:
    """Draw one agent's hyper-parameters, uniformly in the logarithm of each range.

    Those without a range are the config's. None where no range is given: then the agents differ
    by their seeds only.
    """
    if not config.population.ranged:
        return None
    drawn = []
    for number, (name, value) in enumerate(hyper_of(config)._asdict().items()):
        if (ends := getattr(config.population, name)) is not None:
            # Sorted, because the distance from 1 turns the ends around.
            low, high = sorted(np.log(_inverted(name, end)) for end in ends)
            # By the field's number, so that a range for one does not change what another draws.
            own = jax.random.fold_in(key, number)
            value = _inverted(name, jnp.exp(jax.random.uniform(own, (), minval=low, maxval=high)))
        drawn.append(jnp.asarray(value, jnp.float32))
    return Hyper._make(drawn)


def init_each(init: Callable[[Array], T], num_agents: int) -> Callable[[Array], T]:
    """Map a learner's init over agents; agent i is what `init(fold_in(key, i))` returns.

    This is a `lax.map` and not a `vmap`: batched decompositions in one program can deadlock on
    the CPU.
    """

    def init_all(key: Array) -> T:
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(num_agents))
        return jax.lax.map(init, keys)

    return init_all


def step_each(step: Callable[..., T], num_agents: int, mesh: Mesh) -> Callable[..., T]:
    """Map a learner's step over a leading axis of agents, which move together.

    A CPU gains nothing from a batch of small matrix products: it is twice as fast with one agent
    after the other, still in one program.
    """
    batch_size = None if mesh.devices.flat[0].platform == "cpu" else num_agents

    def step_all(state: Any, *given: Any) -> T:
        return jax.lax.map(lambda s: step(s, *given), state, batch_size=batch_size)

    return step_all


def number_or_null(value: Any) -> float | None:
    """Return a number of metrics.jsonl; None where it is not finite, since JSON has no NaN."""
    return float(value) if np.isfinite(value) else None


SEARCHES = ("jax_disable_jit", "jax_debug_nans", "jax_debug_infs")  # settings, see `advance`


class Learner(NamedTuple):
    """A learner as two functions; `nca.make_learner` builds it.

    Attributes:
      init: jitted `(key) -> state`.
      step: `(state, market=None) -> (state, metrics)`, one update; donates the state. The market
        is that of a shard, on the mesh, where the environment is of shards; None is the
        environment's own.
      steps_per_update: environment steps of one call of `step`, of all seeds together.
      mesh: the devices it runs on.
      bounded: what `step` runs, with the memory that it needs and the bound on it.
      market: the environment's own market, on the mesh.
      course: how long the run is, the last argument of `bounded`.
    """

    init: jax.stages.Wrapped
    step: Callable[..., tuple[LearnerState, Metrics]]
    steps_per_update: int
    mesh: Mesh
    bounded: Bounded
    market: Market
    course: Course


def make_learner(
    env: TradingEnv,
    policy: Policy,
    config: AgentConfig | str | pathlib.Path,
    mesh: Mesh | None = None,
) -> Learner:
    """Build the learner of a policy in an environment.

    Nothing is compiled until `step` is called. On a mesh of an AOT topology (see `scale.plan`)
    the program can be lowered and compiled, but not run.

    Args:
      env: the environment.
      policy: from `nca.make_policy` with `env.spec`.
      config: an agent: a config, the name of a preset, or the path of a TOML file.
      mesh: the devices to run on; None is the mesh of the config.

    Returns:
      The learner.

    Raises:
      BarError: the bars, or those of one shard, are fewer than one segment and the receptive
        field before it.
      ConfigError: sizes that do not divide, or a mesh larger than this machine.

    Example:
      >>> import nca_trader as nca
      >>> env = nca.TradingEnv(nca.sample_bars("sp500"))
      >>> agent = nca.load_agent("nano")
      >>> learner = nca.make_learner(env, nca.make_policy(agent, env.spec), agent)
      >>> state = learner.init(jax.random.key(0))  # doctest: +SKIP
      >>> state, metrics = learner.step(state)  # doctest: +SKIP
    """
    expect_env(env, policy=policy, config=config)
    expect("policy", policy, Policy, "a Policy, e.g. of nca.make_policy", env=env, config=config)
    config = load_agent(config, name="config")
    return build_learner(env_on_base(env, config.policy), policy, config, mesh)


def build_learner(
    env: TradingEnv, policy: Policy, config: AgentConfig, mesh: Mesh | None = None
) -> Learner:
    """Build the learner of a config whose base `env` has already, see `make_learner`."""
    shape, seeds, streamed = config.learner, config.num_seeds, env.shards is not None
    mesh = mesh_over(config.mesh.axes) if mesh is None else mesh
    # With shards the market given here only describes them: `step` is given one per update.
    market = env.market if streamed else everywhere(env.market, mesh)
    # jit refuses compiler options where a program is traced into another. So only the program
    # that `step` calls itself has them.
    options = compiler_options(mesh)
    # The market is on the device already, so on a CPU it is no longer part of the free memory.
    held = _num_bytes(jax.tree.leaves(market))
    limit = memory_limit(shape.memory_gb, mesh, held)
    if limit is not None and streamed:  # the next shard, and one on its way, are held as well
        limit -= 2 * held
    layout = make_layout(policy, mesh, config.mesh.deterministic)
    # Segments of a minibatch that a device learns from at once.
    parallel = shape.logical_shards if layout.deterministic else batch_shards(mesh)
    items = shape.num_segments // shape.num_minibatches // parallel
    refuse(divides("learner.micro_batches", shape.micro_batches, "a device's minibatch", items))
    check_sizes(env, policy, config, mesh)
    check_shards(env, policy, config)
    per_seed = shape.num_segments * shape.segment_length * shape.envs_per_segment
    # Rounded up: `steps` is reached by a whole number of updates.
    of = functools.partial(make_parts, env, policy, layout, -(-shape.steps // per_seed))
    parts = of(config)
    start, placed = functools.partial(initial_state, parts), _spec(parts, FSDP, MODEL)
    if seeds > 1:
        start = init_each(start, seeds)
        # The agents' axis comes first and is not split. P() stays: it is whole on every device.
        placed = jax.tree.map(lambda axes: P(None, *axes) if axes else axes, placed)
    placed = jax.tree.map(lambda axes: NamedSharding(mesh, axes), placed)
    init = jax.jit(start, out_shardings=placed)

    def build(micro_batches: int) -> Any:
        learner = dataclasses.replace(shape, micro_batches=micro_batches)
        return make_program(of(dataclasses.replace(config, learner=learner)), mesh, placed)

    ring = Held()
    if shape.replay_slots:
        slots = jax.tree.leaves(jax.eval_shape(init, jax.random.key(0)).replay.data)
        of_device = _num_bytes(slots) / batch_shards(mesh)
        ring = Held(shape.replay_slots, of_device / shape.replay_slots)
    larger = [n for n in range(shape.micro_batches + 1, items + 1) if items % n == 0]
    of_type = {int: np.int32, float: np.float32}
    course = everywhere(jax.tree.map(lambda x: of_type[type(x)](x), parts.course), mesh)
    less = f"lower {'num_seeds, ' if seeds > 1 else ''}{LESS}"
    # The length of a run is an argument of the program.
    facts = ({**vars(config), "learner": {**vars(shape), "steps": 1}}, env.shards)
    plain = type(env) is TradingEnv and policy is build_policy(config, env.spec, stored=True)
    step = Bounded(
        make_program(parts, mesh, placed, options),
        make_program(parts, mesh, placed),
        build,
        larger,
        limit,
        ring,
        less,
        facts if plain and not own_names(env.config, config) else None,
    )

    def advance(state: LearnerState, given: Market | None = None) -> tuple[LearnerState, Metrics]:
        # In a jitted program jax cannot name the operation that made a NaN, and would end with
        # its own error. The guard drops the update and the metrics report it. Without jit the
        # search is useful and stays on.
        alone, nans, infs = (getattr(jax.config, name) for name in SEARCHES)
        with jax.debug_nans(alone and nans), jax.debug_infs(alone and infs):
            return step(state, market if given is None else given, course)

    return Learner(init, advance, per_seed * seeds, mesh, step, market, course)


def _num_bytes(leaves: list[Any]) -> int:
    # Not `nbytes`: leaves may be shapes without an array.
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def initial_state(parts: Parts, key: Array) -> LearnerState:
    """Return the state of one agent before its first update."""
    env, config = parts.env, parts.config
    policy, shape = parts.setup.policy, config.learner
    params_key, run_key, hyper_key = jax.random.split(key, 3)
    params = policy.init(params_key)
    none = jnp.zeros(shape.num_segments, jnp.int32)
    each = (shape.num_segments, shape.envs_per_segment)
    # Placeholders: `left` is 0, so that the first update draws every segment.
    episode = jax.vmap(jax.vmap(env.begin))(jnp.broadcast_to(run_key, each))
    drop = functools.partial(begin_dropout, env.dynamics)
    drop = jax.vmap(drop)(jnp.broadcast_to(run_key, each[:1]))
    segments = Segments(none, none, drop, episode)
    ring = None
    if shape.replay_slots:
        ring = begin_ring(parts.setup, env.market, params, segments)
    opt_state, hyper = parts.optimizer.init(params), draw_hyper(config, hyper_key)
    none_done = jnp.zeros((), jnp.int32)
    return LearnerState(params, opt_state, run_key, none_done, segments, ring, hyper)


def make_program(
    parts: Parts,
    mesh: Mesh,
    placed: LearnerState,
    options: dict[str, Any] | None = None,
) -> Any:
    """Return the jitted `(state, market, course) -> (state, metrics)` over the mesh.

    The course is an argument, so that a run of another length finds the program in the cache.
    """

    def one_update(
        state: LearnerState, market: Market, course: Course
    ) -> tuple[LearnerState, Metrics]:
        # Accounts and bar indexes of one shard are not valid on the next.
        if parts.env.shards is not None:
            turn = shard_updates(parts.env.shards, parts.config.learner)
            state = state._replace(segments=end_with_shard(turn, state.update, state.segments))
        return update(parts.over(course), state, market)

    own = _spec(parts, FSDP)
    step = jax.shard_map(
        one_update,
        mesh=mesh,
        in_specs=(own, P(), P()),
        out_specs=(own, P()),
        axis_names=parts.layout.by_hand,
    )
    if parts.config.num_seeds > 1:
        step = step_each(step, parts.config.num_seeds, mesh)
    out = (placed, replicate(mesh))
    # The state is donated, so a device never holds it twice.
    return jax.jit(step, donate_argnums=0, out_shardings=out, compiler_options=options)


def _spec(parts: Parts, *names: str) -> LearnerState:
    """Partitions of the state over these axes of the mesh; the rest is whole on each device."""
    optimizer = parts.optimizer
    shapes = jax.eval_shape(parts.setup.policy.init, jax.random.key(0))
    params, states = parts.layout.specs(shapes, *names), jax.eval_shape(optimizer.init, shapes)
    # Moments and averages are split like the parameters that they belong to.
    moments = optax.tree_map_params(
        optimizer, lambda _, spec: spec, states, params, transform_non_params=lambda _: P()
    )
    ring = ring_spec(parts.config.learner.replay_slots)
    return LearnerState._make([params, moments, P(), P(), P(BATCH), ring, P()])


def check_sizes(env: TradingEnv, policy: Policy, agent: AgentConfig, mesh: Mesh) -> None:
    """Validate the sizes of an update against the bars, the mesh and each other.

    Args:
      env: the environment, with its bars.
      policy: its receptive field needs bars before the first segment.
      agent: the sizes.
      mesh: the devices that share a batch.

    Raises:
      BarError: too few bars.
      ConfigError: sizes that do not divide.
    """
    config = agent.learner
    need = policy.first_decision + config.segment_length + 1
    if len(env) < need:
        raise BarError(
            f"{env.bars.source or 'bars'}: {len(env)} bars, but training needs {need}: "
            f"{env.spec.warmup} of feature warm-up, {policy.receptive_field} of receptive field "
            f"and segments of {config.segment_length}; give more bars or lower "
            "learner.segment_length or policy.dilations."
        )
    if config.logical_shards % (parts := batch_shards(mesh)):
        raise ConfigError(
            f"learner.logical_shards = {config.logical_shards} is not a multiple of the mesh's "
            f"{parts} devices that share a batch; the nearest that is, is "
            f"{max(1, round(config.logical_shards / parts)) * parts}."
        )
    # Otherwise an episode would end inside a segment, but new starts are drawn between segments
    # only.
    episode = env.config.episode_bars or config.segment_length
    if episode % config.segment_length:
        raise ConfigError(
            f"episode_bars = {episode} is not a multiple of learner.segment_length = "
            f"{config.segment_length}; take "
            f"{max(1, round(episode / config.segment_length)) * config.segment_length}."
        )


def check_shards(env: TradingEnv, policy: Policy, config: AgentConfig) -> None:
    """Validate that an agent can train on the shards of `env`, if it has any.

    Raises:
      BarError: a shard is too short.
      ConfigError: a setting needs all bars at once.
    """
    learner, shards = config.learner, env.shards
    if shards is None:
        return
    need = policy.first_decision + learner.segment_length + 1
    for shard in shards:
        if shard.rows < need:
            raise BarError(
                f"{shards.folder / shard.path}: {shard.rows} bars, but training needs {need} of "
                "each shard; write the shards again with rows that leave no short last one, or "
                "lower learner.segment_length or policy.dilations."
            )
    # Every process needs a shard to learn from.
    empty = [p for p in range(hosts.count()) if not len(own_part(shards, p))]
    if empty:
        raise ConfigError(
            f"{shards.folder}: its {len(shards)} shards, drawn by their names' hashes, "
            f"leave process {empty[0]} of {hosts.count()} without one; write more and shorter "
            "shards, or start fewer processes."
        )
    if learner.replay_slots:
        raise ConfigError(
            "learner.replay_slots: an old rollout is of a shard that is no longer on the device; "
            "set it to 0 to train on shards."
        )
    # `exact` needs bars without gaps for log-returns, see `exact.obstacles`.
    if learner.advantages == "exact" and env.config.reward == "log_return":
        raise ConfigError(
            "learner.advantages = 'exact' with reward = 'log_return' asks of all bars whether any "
            "is missing, and shards are not all read; take reward = 'pnl', or 'gae'."
        )
    if config.policy.neighbours == "nearest" and len({s.symbols for s in shards}) > 1:
        raise ConfigError(
            "policy.neighbours = 'nearest' ranks the assets of one universe, but the shards have "
            "several; take 'ring' or 'all', or shards of the same symbols."
        )


def shard_updates(shards: Shards, config: LearnerConfig) -> int:
    """Return how many updates learn from a shard before the next takes its place.

    It is the config's number, or as many as draw each bar of the longest shard once.
    """
    if config.shard_updates is not None:
        return config.shard_updates
    longest = max(shard.rows for shard in shards)
    return -(-longest // (config.num_segments * config.segment_length))


def end_with_shard(turn: int, update: Array, segments: Segments) -> Segments:
    """End all episodes where `update` is the first on another shard."""
    return segments._replace(left=jnp.where(update % turn == 0, 0, segments.left))


def own_part(shards: Shards, process: int) -> Shards:
    """Return the shards that a process of the run reads."""
    return shards.part(process, hosts.count(), by="file") if hosts.count() > 1 else shards
