"""The optimiser against AdamW written by hand in float64, and its guard."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from nca_trader import ConfigError, make_mesh
from nca_trader.config import OptimizerConfig
from nca_trader.learner.optimizer import (
    averaged,
    learning_rate,
    make_optimizer,
    scale_by_width,
    skip_not_finite,
)
from nca_trader.parallel.mesh import DATA

CONFIG = OptimizerConfig(
    learning_rate=0.1,
    warmup_updates=3,
    eps=0.3,
    weight_decay=0.05,
    max_grad_norm=0.5,
)
TOTAL = 12
SCHEDULES = ("constant", "linear", "cosine", "sgdr")


def scheduled(schedule):
    own = {"first_period": 2} if schedule == "sgdr" else {}
    return dataclasses.replace(CONFIG, schedule=schedule, **own)


def some_params():
    rng = np.random.default_rng(0)
    shapes = {"matrix": (3, 2), "vector": (4,), "scalar": ()}
    return {name: jnp.asarray(rng.normal(size=s), jnp.float32) for name, s in shapes.items()}


def some_gradients(count):
    rng = np.random.default_rng(1)
    scales = [0.01, 3.0, 0.2]  # below the cap, above it, near it
    return [
        jax.tree.map(
            lambda p, s=scales[i % 3]: jnp.asarray(s * rng.normal(size=p.shape), jnp.float32),
            some_params(),
        )
        for i in range(count)
    ]


def rate_by_hand(config, step):
    """The learning rate of gradient step `step`, from 0."""
    if step < config.warmup_updates:
        return config.learning_rate * (step + 1) / config.warmup_updates
    done = step - config.warmup_updates
    part = min(done / (TOTAL - config.warmup_updates), 1.0)
    period = config.first_period  # T_i, and T_cur is what is left of `done`
    while done >= period:
        done, period = done - period, 2 * period
    shape = {
        "constant": 1.0,
        "linear": 1.0 - part,
        "cosine": 0.5 * (1.0 + np.cos(np.pi * part)),
        "sgdr": 0.5 * (1.0 + np.cos(np.pi * done / period)),
    }
    return config.learning_rate * shape[config.schedule]


def adamw_by_hand(config, params, gradients):
    params = {name: np.asarray(p, np.float64) for name, p in params.items()}
    first = {name: np.zeros(p.shape) for name, p in params.items()}
    second = {name: np.zeros(p.shape) for name, p in params.items()}
    for i, gradient in enumerate(gradients):
        gradient = {name: np.asarray(g, np.float64) for name, g in gradient.items()}
        norm = np.sqrt(sum((g**2).sum() for g in gradient.values()))
        cut = min(1.0, config.max_grad_norm / norm)
        for name, g in gradient.items():
            first[name] = config.b1 * first[name] + (1 - config.b1) * cut * g
            second[name] = config.b2 * second[name] + (1 - config.b2) * (cut * g) ** 2
            step = first[name] / (1 - config.b1 ** (i + 1))
            step = step / (np.sqrt(second[name] / (1 - config.b2 ** (i + 1))) + config.eps)
            if params[name].ndim > 1:
                step = step + config.weight_decay * params[name]
            params[name] = params[name] - rate_by_hand(config, i) * step
    return params


@functools.cache
def compiled(config):
    optimizer = make_optimizer(config, TOTAL)
    return optimizer.init, jax.jit(optimizer.update)


def run(config, params, gradients):
    init, update = compiled(config)
    state = init(params)
    for gradient in gradients:
        updates, state = update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_steps_equal_adamw_by_hand(schedule):
    config = scheduled(schedule)
    params, gradients = some_params(), some_gradients(10)
    got, state = run(config, params, gradients)
    expected = adamw_by_hand(config, params, gradients)
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-6)
    assert int(state.skipped) == 0


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_schedules_have_the_values_of_their_formula(schedule, warmup):
    config = dataclasses.replace(scheduled(schedule), warmup_updates=warmup)
    rate = learning_rate(config, TOTAL)
    assert 0.0 < float(rate(0)) <= 0.1 + 1e-8  # the first step moves already
    for step in range(TOTAL + 8):
        np.testing.assert_allclose(rate(step), rate_by_hand(config, step), rtol=1e-5, atol=1e-8)


def test_warm_restarts_come_after_periods_that_double():
    config = dataclasses.replace(CONFIG, schedule="sgdr", warmup_updates=7, first_period=1000)
    rate = jax.jit(learning_rate(config, TOTAL))
    for period in range(20):  # to half a thousand million steps: no boundary is rounded away
        begin = 7 + 1000 * (2**period - 1)
        middle, end = begin + 500 * 2**period, begin + 1000 * 2**period
        got = [float(rate(step)) for step in (begin, middle, end - 1, end)]
        assert got[::3] == pytest.approx([0.1, 0.1]) and got[1] == pytest.approx(0.05)
        assert got[2] == pytest.approx(0.1 * (np.pi / (2000 * 2**period)) ** 2, abs=3e-8)


def test_a_run_shorter_than_its_warm_up_does_not_fall_over():
    rate = learning_rate(dataclasses.replace(CONFIG, schedule="cosine", warmup_updates=50), 10)
    assert 0.0 < rate(9) < CONFIG.learning_rate


@pytest.mark.parametrize(
    ("poison", "where"), [(np.nan, "matrix"), (-np.inf, "scalar"), (1e30, "matrix")]
)
def test_a_gradient_that_is_not_finite_moves_nothing_and_is_counted(poison, where):
    # 1e30 is finite, but its square is not, and so its norm is not.
    params, gradients = some_params(), some_gradients(6)
    bad = dict(gradients[0])
    bad[where] = bad[where].at[(0,) * bad[where].ndim].set(poison)
    clean, clean_state = run(CONFIG, params, gradients)
    got, state = run(CONFIG, params, [*gradients[:3], bad, bad, *gradients[3:]])
    # Two steps later nothing remembers them: parameters, moments and the schedule's count.
    jax.tree.map(np.testing.assert_array_equal, got, clean)
    jax.tree.map(np.testing.assert_array_equal, state.inner, clean_state.inner)
    assert int(state.skipped) == 2 and int(clean_state.skipped) == 0


def test_a_skipped_update_moves_no_average_either():
    config = dataclasses.replace(CONFIG, ema_decay=0.9)
    params, gradients = some_params(), some_gradients(6)
    bad = jax.tree.map(lambda g: g.at[...].set(jnp.nan), gradients[0])
    _, clean_state = run(config, params, gradients)
    _, state = run(config, params, [*gradients[:3], bad, *gradients[3:]])
    jax.tree.map(np.testing.assert_array_equal, averaged(state), averaged(clean_state))
    # And what is averaged are the parameters, which the average leaves as they are.
    expected, seen = params, params
    for count in range(1, 7):
        seen, _ = run(config, params, gradients[:count])
        expected = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, expected, seen)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7),
        averaged(state),
        expected,
    )
    jax.tree.map(np.testing.assert_array_equal, seen, run(CONFIG, params, gradients)[0])


@pytest.mark.parametrize("agreed", [True, False])
def test_what_one_device_must_drop_all_drop(agreed, devices=2):
    agreed_norm = lambda tree: jnp.sqrt(jax.lax.psum(optax.tree.norm(tree) ** 2, DATA))  # noqa: E731
    guard = skip_not_finite(optax.trace(0.5), agreed_norm if agreed else optax.tree.norm)
    gradient = jnp.ones(8).at[5].set(jnp.nan)

    def step(gradient):
        updates, state = guard.update(gradient, guard.init(gradient))
        return updates, state.inner.trace, state.skipped[None]

    mesh, spec = make_mesh(devices), P(DATA)
    mapped = jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=(spec, spec, spec))
    if agreed:
        updates, moments, skipped = jax.jit(mapped)(gradient)
        assert not updates.any() and not moments.any()
        np.testing.assert_array_equal(skipped, np.ones(devices))
    else:  # what happens without: the devices part company
        updates, _, skipped = jax.jit(mapped)(gradient)
        assert updates.any() and skipped.sum() == 1


def test_wide_layers_learn_slower_and_a_sum_moves_as_far_as_in_the_narrow_one():
    def moved(width):
        """How far a sum over `width` inputs of size 1 moves in one step of Adam."""
        config = dataclasses.replace(CONFIG, base_width=16, warmup_updates=0, eps=1e-8)
        params = {"w": jnp.zeros((width, 1)), "b": jnp.zeros(3)}
        gradient = jax.tree.map(lambda p: jnp.full_like(p, 1e-3), params)
        after, _ = run(config, params, [gradient])
        return float(after["w"].sum()), float(after["b"][0])

    assert [moved(width)[0] for width in (16, 64)] == pytest.approx([-1.6] * 2, rel=1e-4)
    assert moved(8)[0] == pytest.approx(-0.8, rel=1e-4)  # narrower: never above the rate
    assert moved(64)[1] == pytest.approx(-0.1, rel=1e-4)  # vectors keep it
    taps = {"taps": jnp.ones((3, 64, 5))}
    scaled, _ = scale_by_width(16).update(taps, optax.EmptyState())
    np.testing.assert_array_equal(scaled["taps"], 0.25)


def test_an_unknown_schedule_is_refused():
    config = dataclasses.replace(CONFIG)
    object.__setattr__(config, "schedule", "sawtooth")
    with pytest.raises(ConfigError, match=r"'sawtooth'; there are constant, linear, cosine"):
        learning_rate(config, TOTAL)
