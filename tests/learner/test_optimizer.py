"""The optimiser against AdamW written by hand in float64, and its guard."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from nca_trader import ConfigError
from nca_trader.learner.optimizer import learning_rate, make_optimizer
from nca_trader.presets import OptimizerConfig

CONFIG = OptimizerConfig(
    learning_rate=0.1, warmup_updates=3, eps=0.3, weight_decay=0.05, max_grad_norm=0.5
)
TOTAL = 12


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
        return config.learning_rate * step / config.warmup_updates
    part = min((step - config.warmup_updates) / (TOTAL - config.warmup_updates), 1.0)
    shape = {"constant": 1.0, "linear": 1.0 - part, "cosine": 0.5 * (1.0 + np.cos(np.pi * part))}
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


def run(config, params, gradients, total=TOTAL):
    optimizer = make_optimizer(config, total)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for gradient in gradients:
        updates, state = update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_steps_equal_adamw_by_hand(schedule):
    config = dataclasses.replace(CONFIG, schedule=schedule)
    params, gradients = some_params(), some_gradients(10)
    got, state = run(config, params, gradients)
    expected = adamw_by_hand(config, params, gradients)
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-6)
    assert int(state.skipped) == 0


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_schedules_have_the_values_of_their_formula(schedule, warmup):
    config = dataclasses.replace(CONFIG, schedule=schedule, warmup_updates=warmup)
    rate = learning_rate(config, TOTAL)
    for step in range(TOTAL + 1):
        np.testing.assert_allclose(rate(step), rate_by_hand(config, step), rtol=1e-5, atol=1e-8)
    at_end = {"constant": config.learning_rate, "linear": 0.0, "cosine": 0.0}[schedule]
    for step in (TOTAL, TOTAL + 5):
        np.testing.assert_allclose(rate(step), at_end, rtol=1e-6, atol=1e-8)


def test_a_run_shorter_than_its_warm_up_does_not_fall_over():
    rate = learning_rate(dataclasses.replace(CONFIG, schedule="cosine", warmup_updates=50), 10)
    assert 0.0 < rate(9) < CONFIG.learning_rate


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e30])
@pytest.mark.parametrize("where", ["matrix", "scalar"])
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


def test_an_unknown_schedule_is_refused():
    config = dataclasses.replace(CONFIG)
    object.__setattr__(config, "schedule", "sawtooth")
    with pytest.raises(ConfigError, match=r"'sawtooth'; there are constant, linear, cosine"):
        learning_rate(config, TOTAL)
