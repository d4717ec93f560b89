"""One iteration of PPO as one jitted function over a mesh: collect, estimate, learn.

Randomness belongs to the segment and not to the device: a key is folded with the segment's
global number, and minibatches are drawn within a fixed number of logical shards. So a seed means
the same run on any mesh, to rounding; on a deterministic one to the bit, since there each logical
shard is computed by itself, and means over them are taken in the order of their numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nca_trader.agents.policy import Params, Policy
from nca_trader.envs.sharded import ShardedEnv
from nca_trader.envs.trading import Market, TradingEnv
from nca_trader.errors import BarError, ConfigError
from nca_trader.learner.advantages import horizon
from nca_trader.learner.curriculum import cost_scale, volatility_scale
from nca_trader.learner.epochs import learn
from nca_trader.learner.exact import exact
from nca_trader.learner.layout import Layout, by_runs, make_layout
from nca_trader.learner.markets import begun_anew, check_shards, shard_updates
from nca_trader.learner.memory import NO_RING, Fitting, Held, Sizes, memory_limit, sizes_to_try
from nca_trader.learner.optimizer import (
    averaged,
    learning_rate,
    make_optimizer,
    whole_or_nothing,
)
from nca_trader.learner.population import (
    Hyper,
    agents_at_once,
    draw_hyper,
    init_each,
    step_each,
    with_hyper,
)
from nca_trader.learner.replay import (
    Ring,
    add,
    begin_ring,
    can_sample,
    ring_spec,
    sample,
    stored,
)
from nca_trader.learner.rollout import Draw, Method, Segments, begin_segments
from nca_trader.learner.sampled import sampled
from nca_trader.mesh import (
    BATCH,
    FSDP,
    MODEL,
    batch_shards,
    compiler_options,
    everywhere,
    make_mesh,
    replicated,
)
from nca_trader.presets import AgentConfig, LearnerConfig
from nca_trader.ranges import divides, refuse

Metrics = dict[str, Array]
SEARCHES = ("jax_disable_jit", "jax_debug_nans", "jax_debug_infs")  # settings, see `advance`


class LearnerState(NamedTuple):
    """All that training carries: with it and the config, a run goes on exactly.

    params, opt_state: each device its part, as `learner.layout` says. key: the run's key, never
      changed: draws fold in `update`. update: `[]` int32 updates done. segments: split as a batch.
    replay: earlier rollouts, their segments split likewise; None where none are kept.
    hyper: what this agent learns with, where that is not the config's.
    """

    params: Params
    opt_state: Any
    key: Array
    update: Array
    segments: Segments
    replay: Ring | None = None
    hyper: Hyper | None = None


class Learner(NamedTuple):
    """init: `(key) -> state`. step: `(state, market=None) -> (state, metrics)`, donates the state.

    The market is a shard's where the environment is of shards, and on the mesh; None is the
    environment's own. steps_per_update: environment steps of one call of `step`, of all seeds
    together. mesh: where it runs. fitting: the sizes in which it does, and the memory that takes.
    programs: what `step` runs, the first that fits: by sizes, the fastest first, jitted
    `(state, market) -> (state, metrics)`. market: the environment's own, as the mesh has it.
    """

    init: Callable[[Array], LearnerState]
    step: Callable[..., tuple[LearnerState, Metrics]]
    steps_per_update: int
    mesh: Mesh
    fitting: Fitting
    programs: dict[Sizes, Any]
    market: Market


def make_learner(
    env: TradingEnv, policy: Policy, config: AgentConfig, mesh: Mesh | None = None
) -> Learner:
    """Builds the learner; compiles nothing until `step` is called.

    Raises:
      BarError: fewer bars than one segment and the receptive field behind it.
      ConfigError: shapes that do not divide, or a mesh larger than this machine.

    On a mesh of devices that are only described (see `scale.plan`) it can be lowered and compiled.
    """
    mesh = make_mesh(*config.mesh.axes) if mesh is None else mesh
    shape = config.learner
    layout = make_layout(policy, mesh, config.mesh.deterministic)
    _check(env, policy, shape, mesh, layout)
    if isinstance(env, ShardedEnv):
        check_shards(env, policy, config)
    steps_per_update = shape.num_segments * shape.segment_length * shape.envs_per_segment
    updates = -(-shape.steps // steps_per_update)
    total = updates * shape.num_epochs * shape.num_minibatches
    optimizer = make_optimizer(config.optimizer, total, layout)
    make_method = exact if shape.advantages == "exact" else sampled
    method = make_method(env, policy, shape, _reward_scale(env, shape))
    schedule = learning_rate(config.optimizer, total)
    common = (env, policy, layout, updates)
    turn = shard_updates(env, shape) if isinstance(env, ShardedEnv) else None

    def iterate(pieces: int, state: LearnerState, market: Market) -> tuple[LearnerState, Metrics]:
        if turn is not None:
            state = state._replace(segments=begun_anew(turn, state.update, state.segments))
        if state.hyper is None:
            return _iterate(*common, config, optimizer, schedule, method, pieces, state, market)
        own, own_values = with_hyper(config, state.hyper), state.hyper._asdict()
        moves = make_optimizer(own.optimizer, total, layout)
        rate = learning_rate(own.optimizer, total)
        lives = make_method(env, policy, own.learner, _reward_scale(env, own.learner))
        state, metrics = _iterate(*common, own, moves, rate, lives, pieces, state, market)
        return state, metrics | own_values

    spec = functools.partial(_spec, policy, optimizer, layout, shape)
    # One of many shards waits on the host: the markets of a run's updates are handed to `step`.
    market = env.market if turn else everywhere(env.market, mesh)

    def fresh(key: Array) -> LearnerState:
        params_key, run_key, hyper_key = jax.random.split(key, 3)
        params = policy.init(params_key)
        none = jnp.zeros(shape.num_segments, jnp.int32)
        each = (shape.num_segments, shape.envs_per_segment)
        # Placeholders: `left` is 0, so the first update draws every segment anew.
        episode = jax.vmap(jax.vmap(env.begin))(jnp.broadcast_to(run_key, each))
        drop = jax.vmap(env.begin_drops)(jnp.broadcast_to(run_key, each[:1]))
        segments = Segments(none, none, drop, episode)
        update = jnp.zeros((), jnp.int32)
        ring = begin_ring(env, policy, shape, params, segments) if shape.replay_slots else None
        opt_state, hyper = optimizer.init(params), draw_hyper(config, hyper_key)
        return LearnerState(params, opt_state, run_key, update, segments, ring, hyper)

    def build(sizes: Sizes, options: dict[str, Any] | None = None) -> Any:
        one = functools.partial(iterate, sizes.micro_batches)
        own = spec(FSDP)
        step = jax.shard_map(
            one, mesh=mesh, in_specs=(own, P()), out_specs=(own, P()), axis_names=layout.by_hand
        )
        if config.num_seeds > 1:
            step = step_each(step, sizes.agents)
        return jax.jit(
            step,
            donate_argnums=0,
            out_shardings=(placed, replicated(mesh)),
            compiler_options=options,
        )

    begin: Callable[[Array], LearnerState] = fresh
    placed = spec(FSDP, MODEL)
    if config.num_seeds > 1:
        begin = init_each(fresh, config.num_seeds)
        placed = jax.tree.map(lambda axes: P(None, *axes) if axes else axes, placed)
    placed = jax.tree.map(lambda axes: NamedSharding(mesh, axes), placed)
    init = jax.jit(begin, out_shardings=placed)
    items = _items(shape, mesh, layout)
    sizes = sizes_to_try(agents_at_once(config.num_seeds, mesh), shape.micro_batches, items)
    ring = _ring_held(init, shape.replay_slots, mesh) if shape.replay_slots else NO_RING
    limit = memory_limit(shape.memory_gb, mesh)
    programs = {cut: build(cut) for cut in sizes}
    if limit is not None and turn:  # beside the shard in use, the next one and one on its way
        limit -= 2 * sum(leaf.nbytes for leaf in jax.tree.leaves(market))
    # Options are for who calls the step, and not for who traces it into a program of his own.
    called = functools.cache(functools.partial(build, options=compiler_options(mesh)))
    step = Fitting(programs.__getitem__, sizes, limit, ring, called)
    steps_per_update *= config.num_seeds

    def advance(state: LearnerState, given: Market | None = None) -> tuple[LearnerState, Metrics]:
        # Of a whole program jax can't name the operation that made a NaN, and ends with an error
        # of its own; the guard drops the update, and its metrics tell. Without jit it can.
        alone, nans, infs = (getattr(jax.config, name) for name in SEARCHES)
        with jax.debug_nans(alone and nans), jax.debug_infs(alone and infs):
            return step(state, market if given is None else given)

    return Learner(init, advance, steps_per_update, mesh, step, programs, market)


def _ring_held(init: Callable[[Array], LearnerState], slots: int, mesh: Mesh) -> Held:
    """What the ring of a state that `init` makes takes of each device."""
    ring = jax.eval_shape(init, jax.random.key(0)).replay
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(ring.data))
    return Held(slots, held / batch_shards(mesh) / slots)


def _spec(
    policy: Policy, optimizer: Any, layout: Layout, config: LearnerConfig, *names: str
) -> LearnerState:
    """How the state lies over these axes of the mesh; what is not said is whole on each device."""
    shapes = jax.eval_shape(policy.init, jax.random.key(0))
    params, states = layout.specs(shapes, *names), jax.eval_shape(optimizer.init, shapes)
    # Moments and averages lie as the parameters that they are of.
    moments = optax.tree_map_params(
        optimizer, lambda _, spec: spec, states, params, transform_non_params=lambda _: P()
    )
    ring = ring_spec(config.replay_slots)
    return LearnerState._make([params, moments, P(), P(), P(BATCH), ring, P()])


def _items(config: LearnerConfig, mesh: Mesh, layout: Layout) -> int:
    """Segments of a minibatch that a device learns from at once."""
    parts = config.logical_shards if layout.deterministic else batch_shards(mesh)
    return config.num_segments // config.num_minibatches // parts


def _check(
    env: TradingEnv, policy: Policy, config: LearnerConfig, mesh: Mesh, layout: Layout
) -> None:
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
    items = _items(config, mesh, layout)
    refuse(divides("learner.micro_batches", config.micro_batches, "a device's minibatch", items))
    episode = env.config.episode_bars or config.segment_length
    if episode % config.segment_length:
        raise ConfigError(
            f"episode_bars = {episode} is not a multiple of learner.segment_length = "
            f"{config.segment_length}; take "
            f"{max(1, round(episode / config.segment_length)) * config.segment_length}."
        )


def _reward_scale(env: TradingEnv, config: LearnerConfig) -> Any:
    """Scales rewards so that the values' targets spread by about one, whatever the market.

    Rewards of spread s sum, discounted by gamma, to a spread of `s / sqrt(1 - gamma^2)`. Larger
    targets would let the error of the values drown the policy's gradient in the norm clip, and
    fall outside the band that the value clip allows.
    """
    legs = env.market.legs
    growth = (1.0 + np.asarray(legs.gap, np.float64)) * (1.0 + np.asarray(legs.body, np.float64))
    log_return = np.log(np.maximum(growth[: len(env)], 1e-6)).mean(axis=1)
    # Where prices move, but always by the same, the spread is rounding and the move is the scale.
    spread = max(float(log_return.std()), abs(float(log_return.mean())))
    # What a full position in every asset makes of it; a differential Sharpe ratio is of order 1.
    spread *= env.spec.num_assets * env.spec.bounds[1]
    if env.config.reward == "differential_sharpe":
        spread = 1.0
    if spread == 0.0:
        return 1.0  # prices that never move: costs are all there is
    return 1.0 / (spread * horizon(config.discount, config.segment_length) ** 0.5)


def _iterate(
    env: TradingEnv,
    policy: Policy,
    layout: Layout,
    num_updates: int,
    config: AgentConfig,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    method: Method,
    micro_batches: int,
    state: LearnerState,
    market: Market,
) -> tuple[LearnerState, Metrics]:
    """One iteration on one device's share of the segments; runs inside `shard_map`."""
    key = jax.random.fold_in(state.key, state.update)
    start_key, action_key, shuffle_key, replay_key = jax.random.split(key, 4)
    count = state.segments.index.shape[0]
    number = jax.lax.axis_index(BATCH) * count + jnp.arange(count)
    fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    course = (config.curriculum, state.update, num_updates)
    scales = (cost_scale(*course), volatility_scale(*course))
    runs = layout.runs(config.learner.logical_shards)

    def gather(segments: Segments, start_keys: Array, keys: Array) -> Any:
        rows = len(env) if market.rows is None else market.rows
        begin = (env, config.learner, policy.first_decision, segments, start_keys, rows)
        segments, fresh = begin_segments(*begin)
        draw = Draw(keys, fresh, *scales)
        *rows, figures = method.gather(params, market, segments, draw)
        return rows, figures

    # Names for profiles and plans: what an instruction is part of.
    with jax.named_scope("collect"):
        params = layout.gathered(state.params)
        (segments, batch), figures = by_runs(
            gather, runs, state.segments, fold(start_key, number), fold(action_key, number)
        )
        batch, metrics = method.settle(batch, layout.of_all(figures))
    params, opt_state, losses = jax.named_scope("learn")(learn)(
        lambda params, items: method.lose(params, market, items),
        config.learner,
        optimizer,
        state.params,
        state.opt_state,
        batch,
        shuffle_key,
        micro_batches,
        layout,
    )
    ring = state.replay
    if ring is not None:
        params, opt_state = jax.named_scope("replay")(_learn_again)(
            method,
            config.learner,
            optimizer,
            layout,
            (params, opt_state),
            market,
            ring,
            replay_key,
            micro_batches,
        )
        ring = add(ring, stored(batch[0]))
    skipped = opt_state.skipped - state.opt_state.skipped
    before = (state.params, state.opt_state)
    params, opt_state = whole_or_nothing(before, (params, opt_state))
    metrics |= losses | {"skipped": skipped, "param_norm": layout.norm(params)}
    metrics |= {
        "lr": jnp.asarray(schedule(_steps(opt_state))),
        "micro_batches": jnp.int32(micro_batches),
    }
    state = state._replace(params=params, opt_state=opt_state, segments=segments, replay=ring)
    return state._replace(update=state.update + 1), metrics


def _learn_again(
    method: Method,
    config: LearnerConfig,
    optimizer: optax.GradientTransformation,
    layout: Layout,
    learnt: tuple[Params, Any],
    market: Market,
    ring: Ring,
    key: Array,
    micro_batches: int,
) -> tuple[Params, Any]:
    """Learns from a rollout of the ring as from a fresh one, if there is one; `learnt` of it."""
    if method.again is None:
        raise ConfigError("learner.replay_slots: this method cannot learn from old rollouts.")
    revisit = method.again
    sample_key, shuffle_key = jax.random.split(key)

    def again(learnt: tuple[Params, Any]) -> tuple[Params, Any]:
        params, opt_state = learnt
        both = layout.gathered(params), layout.gathered(averaged(opt_state))
        once = lambda item: revisit(*both, market, item)  # noqa: E731
        runs = layout.runs(config.logical_shards)
        batch, figures = by_runs(once, runs, sample(ring, sample_key))
        batch, _ = method.settle(batch, layout.of_all(figures))
        lose = lambda params, items: method.lose(params, market, items)  # noqa: E731
        args = (config, optimizer, params, opt_state, batch, shuffle_key, micro_batches, layout)
        return learn(lose, *args)[:2]

    return jax.lax.cond(can_sample(ring), again, lambda learnt: learnt, learnt)


def _steps(opt_state: Any) -> Array:
    """`[]` gradient steps behind the learning-rate schedule; one that was skipped is none."""

    def of_schedule(path: Any, value: Any) -> bool:
        del value
        return getattr(path[-1], "tuple_name", "") == "ScaleByScheduleState"

    return optax.tree.get(opt_state, "count", filtering=of_schedule)
