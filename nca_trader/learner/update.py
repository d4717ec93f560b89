"""One update: collect, estimate, learn, replay, guard. `update` reads as the algorithm does.

It runs on one device's share of the segments, inside `shard_map`. Randomness belongs to the
segment and not to the device: a key is folded with the segment's global number, and minibatches
are drawn within a fixed number of logical shards. So a seed means the same run on any mesh, to
rounding. On a deterministic mesh it is the same to the bit, since there each logical shard is
computed by itself, and means over shards are taken in the order of their numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from nca_trader.agents.policy import Params, Policy
from nca_trader.config import AgentConfig, CurriculumConfig, LearnerConfig
from nca_trader.config.registry import Registry
from nca_trader.envs.market import Market
from nca_trader.envs.trading import TradingEnv
from nca_trader.errors import ConfigError
from nca_trader.learner.exact import EXACT
from nca_trader.learner.layout import EVERYWHERE, Layout, by_runs, mean_in_order, one_by_one
from nca_trader.learner.optimizer import (
    averaged,
    learning_rate,
    make_optimizer,
    whole_or_nothing,
)
from nca_trader.learner.pathwise import PATHWISE
from nca_trader.learner.ppo import AgentSetup, Hyper, Loss, setup_of
from nca_trader.learner.rollout import (
    Algorithm,
    Begun,
    Draw,
    Segments,
    begin_segments,
)
from nca_trader.learner.sampled import (
    SAMPLED,
    Ring,
    Stored,
    add,
    can_sample,
    own_algorithm,
    sample,
    store_rollout,
)
from nca_trader.parallel.mesh import BATCH

Metrics = dict[str, Array]
Lose = Callable[[Params, Any], Loss]
Scales = tuple[Array | None, Array | None]
# Values of `learner.advantages`; "gae" and "group" differ in their estimates only.
ALGORITHMS: Registry[Algorithm] = Registry(
    "advantages",
    {"gae": SAMPLED, "group": SAMPLED, "exact": EXACT, "pathwise": PATHWISE},
    own_algorithm,
)


class LearnerState(NamedTuple):
    """The state of training; with it and the config, a run resumes exactly.

    Attributes:
      params: each device has its part, see `learner.layout`.
      opt_state: of the optimiser, split like the parameters.
      key: the run's key. It never changes within a run; draws fold in `update`.
      update: `[]` int32 updates done.
      segments: the environments, split like a batch.
      replay: earlier rollouts, their segments split likewise; None without replay.
      hyper: of one agent of a population, where its hyper-parameters differ from the config's.
    """

    params: Params
    opt_state: Any
    key: Array
    update: Array
    segments: Segments
    replay: Ring | None = None
    hyper: Hyper | None = None


class Course(NamedTuple):
    """How long a run is: its schedules end there.

    Attributes:
      steps: gradient steps of the whole run, see `gradient_steps`.
      costs: updates until the costs of the curriculum are whole, at least 1.
      volatility: updates until its volatility is, likewise.
    """

    steps: Any
    costs: Any
    volatility: Any


class Parts(NamedTuple):
    """The static parts of an update.

    Attributes:
      env: the environment; its market is an argument of the update.
      layout: of the parameters on the mesh.
      course: of the whole run; traced where one program serves runs of any length.
      config: the agent's settings.
      optimizers: `(gradient steps of a run, peak=None) -> optimiser`, see `make_optimizer`.
      optimizer: with the config's learning rate.
      setup: with the config's hyper-parameters.
      algorithm: collects, normalises and computes the loss.
    """

    env: TradingEnv
    layout: Layout
    course: Course
    config: AgentConfig
    optimizers: Callable[..., optax.GradientTransformation]
    optimizer: optax.GradientTransformation
    setup: AgentSetup
    algorithm: Algorithm

    def over(self, course: Course) -> Parts:
        """Return the parts of a run of another length."""
        return self._replace(course=course, optimizer=self.optimizers(course.steps))

    def of(self, hyper: Hyper | None) -> tuple[AgentSetup, optax.GradientTransformation]:
        """Return the setup and the optimiser of an agent with hyper-parameters of its own."""
        if hyper is None:
            return self.setup, self.optimizer
        optimizer = self.optimizers(self.course.steps, hyper.learning_rate)
        return self.setup._replace(hyper=hyper), optimizer


def make_parts(
    env: TradingEnv, policy: Policy, layout: Layout, num_updates: int, config: AgentConfig
) -> Parts:
    """Build the parts that `config` asks for.

    Raises:
      ConfigError: the estimator of advantages does not apply to the environment.
    """
    curriculum = config.curriculum
    course = Course(
        gradient_steps(config.learner, num_updates),
        whole_after(curriculum.costs_share, num_updates),
        whole_after(curriculum.volatility_share, num_updates),
    )
    make = make_optimizer

    def optimizers(steps: Any, peak: Any = None) -> optax.GradientTransformation:
        return make(config.optimizer, steps, layout, peak)

    optimizer = optimizers(course.steps)
    algorithm = ALGORITHMS[config.learner.advantages]
    algorithm.check(env)
    setup = setup_of(policy, config)
    return Parts(env, layout, course, config, optimizers, optimizer, setup, algorithm)


def gradient_steps(config: LearnerConfig, num_updates: int) -> int:
    """Count the gradient steps of a run of `num_updates`.

    With replay every update but the first, which finds the ring empty, takes twice as many. Steps
    that the guard or `target_kl` skips are counted too; the schedule does not advance in them.
    """
    replayed = num_updates - 1 if config.replay_slots else 0
    return (num_updates + replayed) * config.num_epochs * config.num_minibatches


def update(parts: Parts, state: LearnerState, market: Market) -> tuple[LearnerState, Metrics]:
    """Make one update of one agent on this device's share of the segments.

    Args:
      parts: the static parts.
      state: of one agent, this device's part.
      market: the bars.

    Returns:
      The state after it, and its metrics, `[]` each.
    """
    layout, config = parts.layout, parts.config
    setup, optimizer = parts.of(state.hyper)
    # Folded, not split and carried: a resumed run draws the same numbers from key and update.
    key = jax.random.fold_in(state.key, state.update)
    start_key, action_key, shuffle_key, replay_key = jax.random.split(key, 4)
    course, curriculum = parts.course, config.curriculum
    rate_of = learning_rate(config.optimizer, course.steps, setup.hyper.learning_rate)
    scales = (
        cost_scale(curriculum, state.update, course.costs),
        volatility_scale(curriculum, state.update, course.volatility),
    )
    loss = functools.partial(parts.algorithm.loss, setup)
    learn_from = functools.partial(
        learn, lambda params, items: loss(params, market, items), config.learner, optimizer
    )

    # Named scopes appear in profiles and plans: they say what an instruction is part of.
    with jax.named_scope("collect"):
        keys = (start_key, action_key)
        segments, batch, begun, metrics = collect(parts, setup, state, market, keys, scales)

    # Kept until the end, to undo the update if a gradient is dropped.
    before = (state.params, state.opt_state)
    with jax.named_scope("learn"):
        found = learn_from(*before, batch, shuffle_key, layout)
    params, opt_state, losses = found
    old, ring = state.replay, None
    if old is not None and begun is not None:
        sample_key, shuffle_key = jax.random.split(replay_key)

        def again(learnt: tuple[Params, Any]) -> tuple[Params, Any]:
            item = sample(old, sample_key)
            batch = replay(parts, setup, learnt, market, item, scales)
            return learn_from(*learnt, batch, shuffle_key, layout)[:2]

        with jax.named_scope("replay"):
            learnt = (params, opt_state)
            # In the first update the ring is empty.
            params, opt_state = jax.lax.cond(can_sample(old), again, lambda same: same, learnt)
        # After sampling, so an update never learns twice from its own rollout.
        ring = add(old, store_rollout(batch[0], begun))

    # If one gradient of an update was dropped, all its steps are undone; the count stays.
    params, opt_state = whole_or_nothing(before, (params, opt_state))
    # The optimiser counts over the run; the row of metrics is for one update.
    skipped = opt_state.skipped - state.opt_state.skipped
    metrics |= losses | {"skipped": skipped, "param_norm": layout.norm(params)}
    metrics |= {"lr": jnp.asarray(rate_of(_steps(opt_state)))}
    metrics |= {"micro_batches": jnp.int32(config.learner.micro_batches)}
    named = zip(("cost_scale", "volatility_scale"), scales, strict=True)
    metrics |= {name: scale for name, scale in named if scale is not None}
    metrics |= {} if state.hyper is None else state.hyper._asdict()
    state = state._replace(params=params, opt_state=opt_state, segments=segments, replay=ring)
    return state._replace(update=state.update + 1), metrics


def whole_after(share: float, num_updates: int) -> float:
    """Return the updates after which a curriculum over `share` of a run has ended."""
    # At least one, so that a share of 0 does not divide by zero.
    return max(share * num_updates, 1.0)


def cost_scale(config: CurriculumConfig, update: Array, whole: Any) -> Array | None:
    """Return the `[]` float32 factor on costs in `update`, 1 after `whole` updates.

    None without a curriculum.
    """
    return _towards_one(config.costs_from, update, whole)


def volatility_scale(config: CurriculumConfig, update: Array, whole: Any) -> Array | None:
    """Return the `[]` float32 factor on log-returns in `update`, as `cost_scale`."""
    return _towards_one(config.volatility_from, update, whole)


def _towards_one(start: float, update: Array, whole: Any) -> Array | None:
    # None and not 1.0: without a curriculum the program has no such product.
    if start == 1.0:
        return None
    return start + (1.0 - start) * jnp.minimum(update / whole, 1.0)


def collect(
    parts: Parts,
    setup: AgentSetup,
    state: LearnerState,
    market: Market,
    keys: tuple[Array, Array],
    scales: Scales,
) -> tuple[Segments, Any, Begun | None, Metrics]:
    """Collect a batch with the current policy and normalize its advantages over all devices.

    Args:
      parts: the static parts of the update.
      setup: with the hyper-parameters of this agent.
      state: of the agent before the update.
      market: the bars.
      keys: of new starts, and of actions.
      scales: of the curriculum, on costs and log-returns.

    Returns:
      The segments after it, the batch, how its accounts began (None without replay), metrics.
    """
    algorithm, layout = parts.algorithm, parts.layout
    params = layout.gathered(state.params)
    count = state.segments.index.shape[0]
    # Global numbers of segments: keys belong to them, so a seed is the same run on any mesh.
    number = jax.lax.axis_index(BATCH) * count + jnp.arange(count)
    start_keys, action_keys = (jax.vmap(jax.random.fold_in, (None, 0))(k, number) for k in keys)

    def some(segments: Segments, start_keys: Array, keys: Array) -> Any:
        begun, fresh = begin_segments(setup, market, segments, start_keys)
        draw = Draw(keys, fresh, *scales)
        after, batch, statistics = algorithm.collect(setup, params, market, begun, draw)
        # Without replay, what only it needs is dropped here.
        kept = None if state.replay is None else Begun(begun.episode, fresh)
        return (after, batch, kept), statistics

    runs = layout.runs(parts.config.learner.logical_shards)
    rows, statistics = by_runs(some, runs, state.segments, start_keys, action_keys)
    segments, batch, begun = rows
    batch, metrics = algorithm.normalize(setup, batch, layout.of_all(statistics))
    return segments, batch, begun, metrics


def replay(
    parts: Parts,
    setup: AgentSetup,
    learnt: tuple[Params, Any],
    market: Market,
    item: Stored,
    scales: Scales,
) -> Any:
    """Return the batch of a stored rollout at today's costs, with normalized advantages.

    Args:
      parts: the static parts of the update.
      setup: with the hyper-parameters of this agent.
      learnt: parameters and the optimiser's state.
      market: the bars.
      item: the stored rollout.
      scales: of the curriculum, on costs and log-returns.

    Raises:
      ConfigError: the algorithm cannot learn from old rollouts.
    """
    again, layout = parts.algorithm.replay, parts.layout
    if again is None:
        raise ConfigError("learner.replay_slots: this method cannot learn from old rollouts.")
    # The averaged parameters only bootstrap the value after the last step.
    both = layout.gathered(learnt[0]), layout.gathered(averaged(learnt[1]))
    runs = layout.runs(parts.config.learner.logical_shards)
    once = functools.partial(again, setup, *both, market)
    batch, statistics = by_runs(lambda item: once(item, scales), runs, item)
    return parts.algorithm.normalize(setup, batch, layout.of_all(statistics))[0]


def learn(
    lose: Lose,
    config: LearnerConfig,
    optimizer: optax.GradientTransformation,
    params: Params,
    opt_state: Any,
    batch: Any,
    key: Array,
    layout: Layout = EVERYWHERE,
) -> tuple[Params, Any, dict[str, Array]]:
    """Take `num_epochs` times `num_minibatches` gradient steps of `lose` on `batch`.

    With `target_kl`, steps stop at the first minibatch with a larger KL divergence from the policy
    that acted. `kl_stopped` counts this minibatch and all after it.

    Args:
      lose: `(params, items) -> Loss`, a mean over the items.
      config: numbers of epochs, minibatches, micro-batches and logical shards, and `target_kl`.
      optimizer: applied to each gradient.
      params: this device's part of the parameters.
      opt_state: likewise of the optimiser's state.
      batch: pytree of `[N, ...]`, this device's N items, in its share of the `logical_shards`.
      key: of the shuffling, the same on every device.
      layout: of the parameters on the mesh.

    Returns:
      Parameters, optimiser state and the losses' mean over the minibatches that were computed.
    """
    # Minibatches are drawn within a logical shard, so that segments stay on their device.
    local = config.logical_shards // jax.lax.axis_size(BATCH)
    shard = jax.lax.axis_index(BATCH) * local + jnp.arange(local)
    each = jax.tree.leaves(batch)[0].shape[0] // local
    data = jax.tree.map(lambda a: a.reshape(local, each, *a.shape[1:]), batch)

    def compute(params: Params, opt_state: Any, piece: Array) -> Any:
        items = jax.tree.map(lambda a: jax.vmap(lambda rows, at: rows[at])(a, piece), data)
        gradient, loss = gradient_of(lose, params, items, config.micro_batches, layout)
        metrics = loss._asdict() | {"grad_norm": layout.norm(gradient)}

        def move() -> Any:
            # Split parameters get their own part of the gradient, and so do their moments.
            updates, moved = optimizer.update(gradient, opt_state, params)
            return optax.apply_updates(params, updates), moved

        if config.target_kl is None:
            return (*move(), jnp.bool_(True)), metrics
        near = ~(loss.approx_kl > config.target_kl)  # NaN counts as near: the guard drops it
        return (*jax.lax.cond(near, move, lambda: (params, opt_state)), near), metrics

    def minibatch(carry: Any, piece: Array) -> Any:
        params, opt_state, going = carry
        if config.target_kl is None:
            carry, metrics = compute(params, opt_state, piece)
        else:
            # Both branches of a `cond` need the same types: zeros stand for metrics that are not
            # computed.
            shapes = jax.eval_shape(lambda: compute(params, opt_state, piece)[1])
            nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
            # A branch, so a minibatch after the stop costs nothing.
            carry, metrics = jax.lax.cond(
                going, lambda: compute(params, opt_state, piece), lambda: (carry, nothing)
            )
        return carry, (metrics, going, carry[-1])

    def epoch(carry: Any, epoch_key: Array) -> Any:
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(epoch_key, shard)
        # Not vmap: a TPU's compiler takes four times as long over a sort of several rows.
        order = jax.lax.map(lambda k: jax.random.permutation(k, each), keys)
        pieces = order.reshape(local, config.num_minibatches, -1)
        return jax.lax.scan(minibatch, carry, jnp.moveaxis(pieces, 1, 0))

    carry = (params, opt_state, jnp.bool_(True))
    (params, opt_state, _), (metrics, computed, moved) = jax.lax.scan(
        epoch, carry, jax.random.split(key, config.num_epochs)
    )
    # The sum includes zeros of minibatches that were not computed; the first always is.
    metrics = jax.tree.map(lambda m: m.sum() / computed.sum(), metrics)
    return params, opt_state, metrics | {"kl_stopped": (~moved).sum()}


def gradient_of(
    lose: Lose, params: Params, items: Any, micro_batches: int = 1, layout: Layout = EVERYWHERE
) -> tuple[Params, Loss]:
    """Return the gradient of the mean loss over all devices' items, and the loss's terms.

    Each device sums the gradients of its own pieces, in float32, before they are averaged over
    devices. JAX does not sum them itself, because the parameters are marked as varying.

    Args:
      lose: `(params, items) -> Loss`, a mean over the items.
      params: this device's part of the parameters.
      items: pytree of `[G, M, ...]`, this device's G logical shards of M items. With a
        deterministic layout the gradient of each shard is computed separately.
      micro_batches: pieces in which the gradient is summed.
      layout: of the parameters on the mesh.
    """
    own = layout.own(params)

    def one(items: Any) -> tuple[Params, Loss]:
        def objective(params: Params) -> tuple[Array, Loss]:
            loss = lose(params, items)
            return loss.loss, loss

        return jax.grad(objective, has_aux=True)(own)

    def add(total: Params, piece: Any) -> tuple[Params, Loss]:
        gradient, loss = one(piece)
        # Summed in float32 at least: the sum of many pieces would lose digits in bfloat16.
        return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, gradient), loss

    def in_pieces(items: Any) -> tuple[Params, Loss]:
        if micro_batches == 1:
            return one(items)
        pieces = jax.tree.map(lambda a: a.reshape(micro_batches, -1, *a.shape[1:]), items)
        zero = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.promote_types(p, jnp.float32)), own)
        total, losses = jax.lax.scan(add, zero, pieces)
        gradient = jax.tree.map(lambda t, p: (t / micro_batches).astype(p.dtype), total, own)
        return gradient, jax.tree.map(jnp.mean, losses)

    if layout.deterministic:
        return mean_in_order(one_by_one(in_pieces, items))
    # One product with more rows: bits need not agree across meshes here.
    items = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), items)
    return layout.mean(*in_pieces(items))


def _steps(opt_state: Any) -> Array:
    """Return the `[]` steps that the learning-rate schedule has counted; skipped ones are not."""

    def of_schedule(path: Any, value: Any) -> bool:
        del value
        # Adam's state has a `count` as well.
        return getattr(path[-1], "tuple_name", "") == "ScaleByScheduleState"

    return optax.tree.get(opt_state, "count", filtering=of_schedule)
