"""Several agents in one program, mapped over a leading axis; hyper-parameters may differ.

In population based training the worst agents continue as copies of the best, with slightly
changed hyper-parameters. Source: Jaderberg et al. 2017, "Population based training of neural
networks", with truncation selection and perturbation (section 4.1.1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from nca_trader.config import AgentConfig, PopulationConfig
from nca_trader.errors import ConfigError
from nca_trader.learner.ppo import Hyper, hyper_of
from nca_trader.learner.update import LearnerState
from nca_trader.numerics import cov32
from nca_trader.parallel import hosts
from nca_trader.runs.manifest import Run

T = TypeVar("T")
Fitness = Callable[[LearnerState], Any]

# Near 1 the distance from 1 counts: 0.99 is to 0.999 as 0.01 is to 0.001.
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


def exploit(config: PopulationConfig, state: Any, fitness: Array, key: Array) -> tuple[Any, Array]:
    """Replace the worst agents by copies of the best, with perturbed hyper-parameters.

    Args:
      config: `share` of the agents is replaced, each by one of as many best, drawn uniformly.
      state: of a learner of M agents.
      fitness: `[M]`, more is better; NaN is the worst.
      key: draws who copies whom, and whether a value is multiplied or divided by `perturb`.

    Returns:
      The state, and `[M]` int32 the agent that each one continues from. Parameters, optimiser
      state and hyper-parameters are copied; each agent keeps its keys, accounts and replay.
    """
    size = fitness.shape[0]
    count = max(int(config.share * size), 1)
    # `argsort` puts NaN last, where the best are.
    order = jnp.argsort(jnp.where(jnp.isnan(fitness), -jnp.inf, fitness))
    parent_key, explore_key = jax.random.split(key)
    best = order[-count:][jax.random.randint(parent_key, (count,), 0, count)]
    parent = jnp.arange(size).at[order[:count]].set(best)
    taken = (state.params, state.opt_state, state.hyper)
    params, opt_state, hyper = jax.tree.map(lambda leaf: leaf[parent], taken)
    if hyper is not None:
        copied, values = parent != jnp.arange(size), {}
        for number, (name, value) in enumerate(hyper._asdict().items()):
            if (ends := getattr(config, name)) is not None:
                own = jax.random.fold_in(explore_key, number)
                more = jax.random.bernoulli(own, shape=copied.shape)
                factor = jnp.where(more, config.perturb, 1.0 / config.perturb)
                # Perturbed on the scale on which it was drawn.
                moved = _inverted(name, _inverted(name, value) * factor)
                # Survivors keep their values; only copies explore.
                value = jnp.where(copied, jnp.clip(moved, *ends), value)
            values[name] = value
        hyper = Hyper(**values)
    return state._replace(params=params, opt_state=opt_state, hyper=hyper), parent


def mean_reward(rows: Sequence[dict[str, Any]]) -> np.ndarray:
    """Return `[M]` mean training rewards of the agents over rows of metrics; NaN if any failed."""
    return np.array([row["seeds"]["reward"] for row in rows], np.float64).mean(axis=0)


def correlations(hyper: Hyper, fitness: Array) -> dict[str, Array]:
    """Correlation of each hyper-parameter's logarithm with the fitness, over the agents.

    It is 0 where all agents have the same value.

    Args:
      hyper: each `[M]`.
      fitness: `[M]`.
    """
    # 1e-9 keeps a discount of 1, whose distance is 0, finite.
    logs = [jnp.log(_inverted(name, value) + 1e-9) for name, value in hyper._asdict().items()]
    columns = jnp.stack([*logs, jnp.nan_to_num(fitness)], axis=1)
    # In units of its spread each column has a variance of 1, next to which the jitter is small; a
    # constant column has variance 0, and the jitter makes its correlation 0 instead of NaN.
    scale = columns.std(axis=0, keepdims=True)
    cov = cov32(columns / jnp.where(scale > 0.0, scale, 1.0), jitter=1e-6)
    spread = jnp.sqrt(jnp.diag(cov))
    return dict(zip(hyper._fields, cov[-1, :-1] / (spread[:-1] * spread[-1]), strict=True))


def init_each(init: Callable[[Array], T], num_agents: int) -> Callable[[Array], T]:
    """Map a learner's init over agents; agent i is what `init(fold_in(key, i))` returns.

    This is a `lax.map` and not a `vmap`: batched decompositions in one program can deadlock on
    the CPU.
    """

    def init_all(key: Array) -> T:
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(num_agents))
        return jax.lax.map(init, keys)

    return init_all


def agents_at_once(num_agents: int, mesh: Mesh) -> int:
    """Return how many agents move at once where memory allows.

    A CPU gains nothing from a batch of small matrix products: it is twice as fast with one agent
    after the other, still in one program.
    """
    return 1 if mesh.devices.flat[0].platform == "cpu" else num_agents


def step_each(step: Callable[[Any, Any], T], together: int) -> Callable[..., T]:
    """Map a learner's step over a leading axis of agents, `together` at a time."""
    batch_size = together if together > 1 else None

    def step_all(state: Any, market: Any) -> T:
        return jax.lax.map(lambda s: step(s, market), state, batch_size=batch_size)

    return step_all


def number_or_null(value: Any) -> float | None:
    """Return a number of metrics.jsonl; None where it is not finite, since JSON has no NaN."""
    return float(value) if np.isfinite(value) else None


def fitness_of(
    config: PopulationConfig,
    run: Run,
    row: dict[str, Any],
    state: LearnerState,
    fitness: Fitness | None,
) -> np.ndarray:
    """Return the `[M]` fitness of the agents: the caller's, or the recent mean training reward.

    Args:
      config: `every` is the number of updates that a mean is taken over.
      run: its metrics are those of the updates before the newest.
      row: metrics of the newest update.
      state: of the learner of M agents.
      fitness: the caller's measure, or None.
    """
    if fitness is not None:
        # All processes use the fitness of process 0; with their own they could copy others.
        return hosts.broadcast(np.asarray(fitness(state), np.float32))
    score = np.zeros(state.update.shape, np.float32)
    if hosts.first():
        # Only process 0 has the rows of metrics; the newest is not written yet.
        score[:] = mean_reward([*run.metrics(), row][-config.every :])
    return hosts.broadcast(score)


def exploited(
    config: PopulationConfig, state: LearnerState, score: np.ndarray, seed: int, row: dict[str, Any]
) -> LearnerState:
    """Return the population after an exploit, where it was on the mesh; record it in `row`."""
    if score.shape != state.update.shape:
        raise ConfigError(
            f"fitness is of shape {list(score.shape)}, but {state.update.size} agents train; give "
            "one number per agent."
        )
    # The agents' own keys are folded with 0 to M - 1, so M is free.
    key = jax.random.fold_in(jax.random.key(seed), score.size)
    key = jax.random.fold_in(key, row["update"])
    if state.hyper is not None:
        of = jax.device_get(correlations(state.hyper, jnp.asarray(score)))
        row["fitness_correlation"] = {name: number_or_null(value) for name, value in of.items()}
    placed = jax.tree.map(lambda leaf: leaf.sharding, state)
    state, parent = jax.jit(exploit, static_argnums=0)(config, state, jnp.asarray(score), key)
    row["seeds"] |= {"fitness": [number_or_null(s) for s in score], "parent": parent.tolist()}
    # The gather of agents may change shardings; with others the step would be compiled again.
    return jax.device_put(state, placed)
