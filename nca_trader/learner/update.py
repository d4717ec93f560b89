"""One iteration of PPO as one jitted function over a mesh: collect, estimate, learn.

Randomness belongs to the segment and not to the device: a key is folded with the segment's
global number, and minibatches are drawn within a fixed number of logical shards. So a seed means
the same run on one device and on eight, to rounding.
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
from nca_trader.envs.trading import Market, TradingEnv
from nca_trader.errors import BarError, ConfigError
from nca_trader.learner.advantages import gae
from nca_trader.learner.optimizer import make_optimizer, whole_or_nothing
from nca_trader.learner.population import over_seeds
from nca_trader.learner.ppo import Loss, ppo_loss
from nca_trader.learner.rollout import Rollout, Segments, begin_segments, collect, deepest_fall
from nca_trader.mesh import DATA, make_mesh, replicated, split
from nca_trader.presets import AgentConfig, LearnerConfig

Metrics = dict[str, Array]


class LearnerState(NamedTuple):
    """All that training carries: with it and the config, a run goes on exactly.

    params, opt_state: replicated. key: the run's key, never changed: draws fold in `update`.
    update: `[]` int32 updates done. segments: split over the mesh's data axis.
    """

    params: Params
    opt_state: Any
    key: Array
    update: Array
    segments: Segments


class Learner(NamedTuple):
    """init: `(key) -> state`. step: `(state) -> (state, metrics)`, donates its argument.

    steps_per_update: environment steps of one call of `step`, of all seeds together.
    mesh: where it runs.
    """

    init: Callable[[Array], LearnerState]
    step: Callable[[LearnerState], tuple[LearnerState, Metrics]]
    steps_per_update: int
    mesh: Mesh


def make_learner(
    env: TradingEnv, policy: Policy, config: AgentConfig, mesh: Mesh | None = None
) -> Learner:
    """Builds the learner; compiles nothing until `step` is called.

    Raises:
      BarError: fewer bars than one segment and the receptive field behind it.
      ConfigError: shapes that do not divide, or a mesh larger than this machine.
    """
    mesh = make_mesh(config.mesh.devices) if mesh is None else mesh
    learn = config.learner
    _check(env, policy, learn, mesh)
    steps_per_update = learn.num_segments * learn.segment_length * learn.envs_per_segment
    total = -(-learn.steps // steps_per_update) * learn.num_epochs * learn.num_minibatches
    optimizer = make_optimizer(config.optimizer, total, DATA)
    iterate = functools.partial(_iterate, env, policy, learn, optimizer, _reward_scale(env, learn))
    spec = LearnerState._make([P(), P(), P(), P(), P(DATA)])
    sharded = jax.shard_map(iterate, mesh=mesh, in_specs=(spec, P()), out_specs=(spec, P()))
    market = jax.device_put(env.market, replicated(mesh))

    def fresh(key: Array) -> LearnerState:
        params_key, run_key = jax.random.split(key)
        params = policy.init(params_key)
        none = jnp.zeros(learn.num_segments, jnp.int32)
        each = (learn.num_segments, learn.envs_per_segment)
        # Placeholders: `left` is 0, so the first update draws every segment anew.
        episode = jax.vmap(jax.vmap(env.begin))(jnp.broadcast_to(run_key, each))
        drop = jax.vmap(env.begin_drops)(jnp.broadcast_to(run_key, each[:1]))
        segments = Segments(none, none, drop, episode)
        update = jnp.zeros((), jnp.int32)
        return LearnerState(params, optimizer.init(params), run_key, update, segments)

    whole, parts = replicated(mesh), split(mesh)
    begin: Callable[[Array], LearnerState] = fresh
    if config.num_seeds > 1:
        sharded, begin = over_seeds(sharded, fresh, config.num_seeds, mesh)
        parts = NamedSharding(mesh, P(None, DATA))
    init = jax.jit(begin, out_shardings=LearnerState._make([whole] * 4 + [parts]))
    step = jax.jit(sharded, donate_argnums=0)
    steps_per_update *= config.num_seeds
    return Learner(init, lambda state: step(state, market), steps_per_update, mesh)


def _check(env: TradingEnv, policy: Policy, config: LearnerConfig, mesh: Mesh) -> None:
    need = policy.first_decision + config.segment_length + 1
    if len(env) < need:
        raise BarError(
            f"{env.bars.source or 'bars'}: {len(env)} bars, but training needs {need}: "
            f"{env.spec.warmup} of feature warm-up, {policy.receptive_field} of receptive field "
            f"and segments of {config.segment_length}; give more bars or lower "
            "learner.segment_length or policy.dilations."
        )
    if config.logical_shards % mesh.size:
        raise ConfigError(
            f"learner.logical_shards = {config.logical_shards} is not a multiple of the mesh's "
            f"{mesh.size} devices; the nearest that is, is "
            f"{max(1, round(config.logical_shards / mesh.size)) * mesh.size}."
        )
    episode = env.config.episode_bars or config.segment_length
    if episode % config.segment_length:
        raise ConfigError(
            f"episode_bars = {episode} is not a multiple of learner.segment_length = "
            f"{config.segment_length}; take "
            f"{max(1, round(episode / config.segment_length)) * config.segment_length}."
        )


def _reward_scale(env: TradingEnv, config: LearnerConfig) -> float:
    """Scales rewards so that the values' targets spread by about one, whatever the market.

    Rewards of spread s sum, discounted by gamma, to a spread of `s / sqrt(1 - gamma^2)`. Larger
    targets would let the error of the values drown the policy's gradient in the norm clip, and
    fall outside the band that the value clip allows.
    """
    legs = env.market.legs
    growth = np.asarray((1.0 + legs.gap) * (1.0 + legs.body), np.float64)
    spread = float(np.log(np.maximum(growth, 1e-6)).mean(axis=1).std())
    # What a full position in every asset makes of it; a differential Sharpe ratio is of order 1.
    spread *= env.spec.num_assets * env.spec.bounds[1]
    if env.config.reward == "differential_sharpe":
        spread = 1.0
    if spread == 0.0:
        return 1.0  # prices that never move: costs are all there is
    left = 1.0 - config.discount**2
    horizon = min(1.0 / left, config.segment_length) if left > 0.0 else config.segment_length
    return 1.0 / (spread * horizon**0.5)


def _iterate(
    env: TradingEnv,
    policy: Policy,
    config: LearnerConfig,
    optimizer: optax.GradientTransformation,
    reward_scale: float,
    state: LearnerState,
    market: Market,
) -> tuple[LearnerState, Metrics]:
    """One iteration on one device's share of the segments; runs inside `shard_map`."""
    key = jax.random.fold_in(state.key, state.update)
    start_key, action_key, shuffle_key = jax.random.split(key, 3)
    count = state.segments.index.shape[0]
    number = jax.lax.axis_index(DATA) * count + jnp.arange(count)
    fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    segments, fresh = begin_segments(
        env, config, policy.first_decision, state.segments, fold(start_key, number)
    )
    segments, rollout = collect(
        env, policy, config, state.params, market, segments, fresh, fold(action_key, number)
    )
    advantage, value_target = estimate(config, rollout, reward_scale)
    drop_rate = env.config.drop_bars
    params, opt_state, losses = _learn(
        policy,
        config,
        drop_rate,
        optimizer,
        market,
        state,
        rollout,
        advantage,
        value_target,
        shuffle_key,
    )
    metrics = losses | _rollout_metrics(rollout, value_target)
    metrics["skipped"] = opt_state.skipped - state.opt_state.skipped
    metrics["param_norm"] = optax.tree.norm(params)
    state = LearnerState(params, opt_state, state.key, state.update + 1, segments)
    return state, metrics


def estimate(config: LearnerConfig, rollout: Rollout, reward_scale: float) -> tuple[Array, Array]:
    """Advantages `[S, L, E]`, normalised over all devices, and the values' targets."""
    next_value = jnp.concatenate([rollout.value[:, 1:], rollout.bootstrap[:, None]], axis=1)
    mixing = jnp.full_like(rollout.reward, config.gae_lambda)
    args = (reward_scale * rollout.reward, rollout.discount, rollout.value, next_value, mixing)
    over_time = jax.vmap(jax.vmap(gae, in_axes=1, out_axes=1))
    advantage = over_time(*args)
    value_target = advantage + rollout.value
    mean = jax.lax.pmean(advantage.mean(), DATA)
    variance = jax.lax.pmean(((advantage - mean) ** 2).mean(), DATA)
    return (advantage - mean) / (jnp.sqrt(variance) + 1e-8), value_target


def _learn(
    policy: Policy,
    config: LearnerConfig,
    drop_rate: float,
    optimizer: optax.GradientTransformation,
    market: Market,
    state: LearnerState,
    rollout: Rollout,
    advantage: Array,
    value_target: Array,
    key: Array,
) -> tuple[Params, Any, Metrics]:
    """Epochs of minibatches over whole segments; returns the losses' mean over all of them."""
    lose = functools.partial(ppo_loss, drop_rate=drop_rate)
    local = config.logical_shards // jax.lax.axis_size(DATA)
    shard = jax.lax.axis_index(DATA) * local + jnp.arange(local)
    each = rollout.index.shape[0] // local
    # The bootstrap is not learnt from: dropped here, it need not be gathered.
    data = (rollout._replace(bootstrap=rollout.index), advantage, value_target)
    data = jax.tree.map(lambda a: a.reshape(local, each, *a.shape[1:]), data)

    def minibatch(carry: Any, piece: Array) -> Any:
        params, opt_state = carry
        batch = jax.tree.map(
            lambda a: jax.vmap(lambda rows, at: rows[at])(a, piece).reshape(-1, *a.shape[2:]),
            data,
        )

        def objective(params: Params) -> tuple[Array, Loss]:
            loss = jax.lax.pmean(lose(params, policy, config, market, *batch), DATA)
            return loss.loss, loss

        # The mean over devices stands inside the gradient: outside, it would be N times too big.
        gradient, loss = jax.grad(objective, has_aux=True)(params)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        metrics = loss._asdict() | {"grad_norm": optax.tree.norm(gradient)}
        return (optax.apply_updates(params, updates), opt_state), metrics

    def epoch(carry: Any, epoch_key: Array) -> Any:
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(epoch_key, shard)
        order = jax.vmap(lambda k: jax.random.permutation(k, each))(keys)
        pieces = order.reshape(local, config.num_minibatches, -1)
        return jax.lax.scan(minibatch, carry, jnp.moveaxis(pieces, 1, 0))

    carry = (state.params, state.opt_state)
    (params, opt_state), metrics = jax.lax.scan(
        epoch, carry, jax.random.split(key, config.num_epochs)
    )
    params, opt_state = whole_or_nothing(carry, (params, opt_state))
    return params, opt_state, jax.tree.map(jnp.mean, metrics)


def _rollout_metrics(rollout: Rollout, value_target: Array) -> Metrics:
    """What the rollout itself says: reward a step, trading, and how much the values explain."""
    error = value_target - rollout.value
    mean, mean_error = jax.lax.pmean((value_target.mean(), error.mean()), DATA)
    spread, missed = jax.lax.pmean(
        (((value_target - mean) ** 2).mean(), ((error - mean_error) ** 2).mean()), DATA
    )
    changed = (rollout.action[:, 1:] != rollout.action[:, :-1]).mean()
    return {
        "explained_variance": 1.0 - missed / jnp.maximum(spread, 1e-12),
        "reward": jax.lax.pmean(rollout.reward.mean(), DATA),
        "drawdown": jax.lax.pmean(deepest_fall(rollout.reward).mean(), DATA),
        "action_changes": jax.lax.pmean(changed, DATA),
    }
