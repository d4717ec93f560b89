"""`check_policy` passes every kind, and finds what is planted into a policy."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import random_params

from nca_trader.agents.check import CHECKS, check_policy
from nca_trader.agents.policy import make_policy
from nca_trader.config import AgentConfig, PolicyConfig
from nca_trader.config.ranges import switch
from nca_trader.envs.check import name_of
from nca_trader.errors import CheckFailed
from nca_trader.types import EnvSpec

SPEC = EnvSpec(
    symbols=("A", "B"),
    features=("rsi", "macd"),
    targets=(-0.3, 0.0, 0.3),
    warmup=0,
    nearest=((1,), (0,)),
)
TINY = PolicyConfig(channels=4, hidden=6, steps=1, dilations=(2,), head_hidden=5)
KINDS = {
    "nca": TINY,
    "nca with neighbours": dataclasses.replace(TINY, neighbours="nearest", fire_rate=0.5),
    "mlp": switch(TINY, kind="mlp", window=4),
    "no history": switch(TINY, kind="mlp", window=1),
    "gru": switch(TINY, kind="gru", window=3),
}
COUNT = itertools.count()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.few(1)
def test_every_kind_keeps_every_promise(kind):
    report = check_policy(make_policy(AgentConfig(policy=KINDS[kind]), SPEC))
    assert report.passed, str(report)
    assert len(report.checks) == 12 and not any(check.skipped for check in report.checks)


@functools.cache
def honest():
    return make_policy(AgentConfig(policy=TINY), SPEC)


def encodes(change):
    """The policy with `change(encode, params, x, present)` in place of its `encode`."""
    return honest()._replace(encode=functools.partial(change, honest().encode))


def streams(change):
    """The policy with `change(stream, params, state, x, present)` in place of its `stream`."""
    return honest()._replace(stream=functools.partial(change, honest().stream))


def of_absolute_time(encode, params, x, present):
    rows = jnp.arange(x.shape[1], dtype=jnp.float32).reshape(1, -1, 1, 1)
    return encode(params, x, present) + 0.01 * rows


def cuts_its_halo_off_before_it_looks(encode, params, x, present, halo=0):
    return encode(params, x[:, halo:], present[:, halo:])


def counts(encode, params, x, present):
    return encode(params, x, present) + 1e-3 * next(COUNT)


def in_halves(encode, params, x, present):
    return encode(params, x, present).astype(jnp.float16)


def grows(stream, params, state, x, present):
    after, cells = stream(params, state, x, present)
    return (jnp.concatenate([after[0], after[0][:, -1:]], axis=1), *after[1:]), cells


def rounds_its_state(stream, params, state, x, present):
    after, cells = stream(params, state, x, present)
    return jax.tree.map(lambda rows: rows.astype(jnp.bfloat16), after), cells


def drops_its_newest_row(stream, params, state, x, present):
    after, cells = stream(params, state, x, present)
    return (state[0], *after[1:]), cells


def integers(params):
    return jax.tree.map(lambda leaf: jnp.round(leaf).astype(jnp.int32), params)


WINDOW = "a window gives the cells of the lattice"
STREAM = "a stream gives the cells of the lattice"
FAULTS = {
    "sees a bar ahead": (
        encodes(lambda f, p, x, m: f(p, jnp.roll(x, -1, 1), m)),
        {"later bars change no earlier cell", WINDOW},
    ),
    "knows the time": (encodes(of_absolute_time), {WINDOW}),
    "sees further than it says": (honest()._replace(receptive_field=4), {WINDOW}),
    "sees no halo": (encodes(cuts_its_halo_off_before_it_looks), {"a halo is only seen"}),
    "takes each bar for present": (
        encodes(lambda f, p, x, m: f(p, x, jnp.ones_like(m))),
        {"a missing bar shows no features"},
    ),
    "sees nothing": (
        encodes(lambda f, p, x, m: f(p, 0.0 * x, jnp.ones_like(m))),
        {"later bars change no earlier cell"},
    ),
    "is of the batch": (
        encodes(lambda f, p, x, m: f(p, x - x.mean(0, keepdims=True), m)),
        {"the rows of a batch do not meet"},
    ),
    "counts its calls": (encodes(counts), {"the same call gives the same result"}),
    "rounds its cells": (encodes(in_halves), {"shapes and types are as documented"}),
    "has a state that grows": (
        streams(grows),
        {"a stream keeps its shapes and types", "nothing is traced twice"},
    ),
    "has a state that is rounded": (
        streams(rounds_its_state),
        {"a stream keeps its shapes and types"},
    ),
    "forgets": (streams(drops_its_newest_row), {STREAM}),
    "ignores the key": (
        honest()._replace(init=lambda key: honest().init(jax.random.key(0))),
        {"a key decides the parameters"},
    ),
    "has whole numbers for parameters": (
        honest()._replace(init=lambda key: integers(honest().init(key))),
        {"parameters are plain dicts of float32"},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault):
    planted, expected = FAULTS[fault]
    report = check_policy(planted, only=expected)
    assert set(report.faults) == expected, str(report)
    with pytest.raises(CheckFailed):
        report.raise_if_failed()


def test_every_check_finds_something():
    found = set().union(*(expected for _, expected in FAULTS.values()))
    assert found == {name_of(check) for check in CHECKS}


def test_a_policy_that_breaks_has_failed():
    def broken(params, x, present):
        raise ValueError("no such bar")

    only = {"the same call gives the same result"}
    report = check_policy(honest()._replace(encode=broken), only=only)
    assert [check.fault for check in report.checks] == ["ValueError: no such bar"]


@pytest.mark.parametrize(("kind", "changes"), [("mlp", {}), ("mlp", {"hidden": 0}), ("gru", {})])
def test_a_cell_is_of_its_window_bar_by_bar(kind, changes):
    """Numpy, in float64, one window at a time."""
    config = dataclasses.replace(KINDS[kind], **changes)
    policy = make_policy(AgentConfig(policy=config), SPEC)
    params, rng = random_params(policy, 2, 1.0), np.random.default_rng(3)
    x = rng.normal(0, 4, (1, 9, 2, 2)).astype(np.float32)
    present = rng.random((1, 9, 2)) > 0.2
    cells = jax.jit(policy.encode)(params, x, present)
    p = {name: np.asarray(value, np.float64) for name, value in params[kind].items()}
    sigmoid = lambda v: 1.0 / (1.0 + np.exp(-v))  # noqa: E731
    for t, a in np.ndindex(9, 2):
        z = [
            np.append(np.clip(x[0, s, a], -5, 5) * present[0, s, a], present[0, s, a])
            if s >= 0
            else None
            for s in range(t + 1 - config.window, t + 1)
        ]
        if kind == "mlp":
            newest_first = [np.zeros(3) if bar is None else bar for bar in reversed(z)]
            hidden = np.tanh(np.concatenate(newest_first) @ p["window"] + p["hidden_bias"])
            expected = np.tanh(hidden @ p["cell"] + p["cell_bias"]) if config.hidden else hidden
        else:
            expected = np.zeros(4)
            for bar in (bar for bar in z if bar is not None):
                r, u, n = np.split(bar @ p["inputs"] + p["bias"], 3)
                sr, su, sn = np.split(expected @ p["recurrent"], 3)
                keep = sigmoid(u + su)
                expected = (1 - keep) * np.tanh(n + sigmoid(r + sr) * sn) + keep * expected
        np.testing.assert_allclose(cells[0, t, a], expected, rtol=1e-4, atol=1e-5)
