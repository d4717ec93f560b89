"""One run is the same run on every mesh: one device, data, fsdp, model, and all three at once."""

import dataclasses
import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import random_bars
from recording import distance, recording_optimizer

from nca_trader import AgentConfig, Costs, EnvConfig, TradingEnv, make_mesh
from nca_trader.agents import policy as agents_policy
from nca_trader.agents.base import spec_on_base
from nca_trader.agents.policy import _make_policy
from nca_trader.config import (
    LearnerConfig,
    MeshConfig,
    OptimizerConfig,
    PolicyConfig,
    PopulationConfig,
    PrecisionConfig,
)
from nca_trader.config.ranges import switch
from nca_trader.learner import exact, rollout, update
from nca_trader.learner import learner as learners
from nca_trader.runs.checkpoint import flatten, unflatten
from nca_trader.scale.hlo import read_module, runs

pytestmark = pytest.mark.usefixtures("quick_compile")

AGENT = AgentConfig(
    policy=PolicyConfig(channels=4, hidden=8, steps=2, dilations=(1, 2), head_hidden=4),
    learner=LearnerConfig(
        num_segments=8,
        segment_length=4,
        envs_per_segment=2,
        num_epochs=2,
        num_minibatches=1,
    ),
    # A clip that bites, and rates that go by what a layer sums over.
    optimizer=OptimizerConfig(
        learning_rate=1e-2, warmup_updates=2, max_grad_norm=0.05, base_width=2
    ),
)
# Each below what its first gradient measures.
CLIPS = {"gae": 0.05, "group": 0.05, "exact": 5e-3, "pathwise": 1e-4}
ACTIONS = {"pathwise": "weights"} | dict.fromkeys(("gae", "group", "exact"), "direction")
ONE = (1, 1, 1)
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-")
MESHES = [(8, 1, 1), (4, 2, 1), (2, 2, 2)]


@functools.cache
def environment(reward, actions="direction", cap=1.0):
    # Orders do not fill in missing bars, which is nothing that "pnl" pays.
    missing = 0.0 if reward == "pnl" else 0.05
    bars = random_bars(np.random.default_rng(0), 60, 2, missing=missing)
    costs = Costs(commission=5e-4, slippage=2e-4)
    config = EnvConfig(
        features=("bollinger", "rsi"), costs=costs, reward=reward, actions=actions, max_gross=cap
    )
    return TradingEnv(bars, config)


class Products(NamedTuple):
    """A precision that no agent may ask for: products of float64."""

    matmul: str
    compute: str = "float32"


# What a run may have beside a kind of policy and an estimator, as tables of an agent.
BASE = {  # several cycles of dilations, as the preset has; a ring of assets, steps computed twice
    "policy": {"channels": 8, "hidden": 16, "steps": 5, "neighbours": "ring", "remat": "step"}
}
REPLAY = {"learner": {"replay_slots": 2}, "optimizer": {"ema_decay": 0.9}}
SEVERAL = {"num_seeds": 2, "population": PopulationConfig(learning_rate=(1e-3, 1e-2))}
BF16 = {"precision": PrecisionConfig(matmul="bfloat16", compute="bfloat16")}
SHARPE = {
    "policy": {"base": "half_and_half(lookback=5)", "tilt_penalty": 1e-3},
    "learner": {"objective": "sharpe", "num_epochs": 1},
}
EXTRAS = {
    "": {}, "base": BASE, "replay": REPLAY, "several": SEVERAL, "bf16": BF16, "sharpe": SHARPE,
    "capped": {},
}  # fmt: skip


def agent_with(kind="nca", estimator="gae", extra="", **mesh):
    given = dict(EXTRAS[extra])
    policy = {"kind": kind} | ({} if kind == "nca" else {"window": 3}) | given.pop("policy", {})
    learn = {"advantages": estimator} | given.pop("learner", {})
    optimizer = {"max_grad_norm": CLIPS[estimator]} | given.pop("optimizer", {})
    return dataclasses.replace(
        AGENT,
        policy=switch(AGENT.policy, **policy),
        learner=switch(AGENT.learner, **learn),
        optimizer=dataclasses.replace(AGENT.optimizer, **optimizer),
        mesh=MeshConfig(**mesh),
        **given,
    )


def learner_on(axes, kind="nca", estimator="gae", extra="", **mesh):
    """A learner whose optimiser also sums the gradients, which plain SGD would follow."""
    agent = agent_with(kind, estimator, extra, **mesh)
    reward = "pnl" if estimator == "exact" else "log_return"
    env = environment(reward, ACTIONS[estimator], 0.7 if extra == "capped" else 1.0)
    with pytest.MonkeyPatch.context() as patch:
        # Replay looks for the average, and several agents for a rate, where the real one has it.
        if extra not in ("replay", "several"):
            patch.setattr(update, "make_optimizer", recording_optimizer)
        # In float64 products are of float64 as well: a rounding of operands, no two meshes share.
        precision = Products("float64") if jax.config.jax_enable_x64 else agent.precision
        policy = _make_policy(agent.policy, precision, spec_on_base(env.spec, agent.policy))
        return learners.make_learner(env, policy, agent, make_mesh(*axes))


def on_host(state):
    return jax.device_get(state._replace(key=jax.random.key_data(state.key)))


def stepped(learner, updates):
    """The state after so many updates, where it is, and each update's metrics."""
    state, rows = settled(learner, learner.init(jax.random.key(0))), []
    for _ in range(updates):
        state, metrics = learner.step(state)
        rows.append(dict(each_of(metrics)))
    return state, rows


def settled(learner, state):
    """`state` in the types that a step leaves it in: several processes compile for one set of them.

    In float64 a new account is wider than one whose bars, of float32, have moved it. Parameters are
    drawn in float32 and learn in float64 there: their rounding, no two meshes share.
    """
    if jax.config.jax_enable_x64:
        learnt = jax.tree.map(as_wide, (state.params, state.opt_state))
        state = state._replace(params=learnt[0], opt_state=learnt[1])
    like = jax.eval_shape(learner.step, state)[0]
    return jax.tree.map(lambda x, y: x if x.dtype == y.dtype else x.astype(y.dtype), state, like)


def as_wide(x):
    return x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x


def each_of(metrics):
    """Each figure by its name; where there are several agents, each one's."""
    for name, value in metrics.items():
        for number, one in enumerate(np.ravel(value)):
            yield (f"{name} {number}" if number else name), float(one)


def features_as_wide_as_the_account(spec, account):
    """`account_features` without the rounding to float32, which no two meshes may share."""
    cash = 1.0 - (account.weight + account.weight_low).sum(axis=-1, keepdims=True)
    held = (account.weight + account.weight_low) / spec.size
    if spec.constant_size:
        held, cash = account.ordered / spec.size, 0.0
    base = [] if spec.base == "none" else [account.base / spec.size]
    ordered, cash = account.ordered / spec.size, jnp.broadcast_to(cash, held.shape)
    return jnp.stack([held, ordered, cash, *base], axis=-1)


def stepped_in_float64(axes, kind="nca", estimator="gae", extra="", updates=2):
    """The state after so many updates in float64, where it is, and each update's metrics."""
    with jax.enable_x64(True), pytest.MonkeyPatch.context() as patch:
        for module in (rollout, exact, agents_policy):
            patch.setattr(module, "account_features", features_as_wide_as_the_account)
        return stepped(learner_on(axes, kind, estimator, extra), updates)


@functools.cache
def run(axes, kind="nca", estimator="gae", extra="", updates=2):
    """The same, on the host."""
    state, rows = stepped_in_float64(axes, kind, estimator, extra, updates)
    return on_host(state), rows


def furthest(got, want):
    """The largest difference of two entries of a leaf, relative to the largest entry of it."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    apart = [np.abs(a - b).max() / max(np.abs(b).max(), 1e-3) for a, b in pairs]
    return max(apart)


def same(got, want, estimator="gae"):
    """Two runs in float64 agree to 1e-9: gradients, parameters, moments, accounts, metrics."""
    (state, rows), (expected, expected_rows) = got, want
    learnt, wanted = (state.opt_state, state.params), (expected.opt_state, expected.params)
    apart = furthest(learnt, wanted)
    assert apart < 1e-9
    for a, b in zip(
        jax.tree.leaves(state.segments), jax.tree.leaves(expected.segments), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
    for row, other in zip(rows, expected_rows, strict=True):
        assert row == pytest.approx(other, rel=1e-9, abs=1e-9)
    # The clip bites.
    assert rows[0]["grad_norm"] > CLIPS[estimator] and rows[0]["skipped"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("axes", [*MESHES, (1, 1, 2)])  # the last shares a layer's width alone
def test_a_run_is_the_same_on_every_mesh_in_float64(axes):
    same(run(axes), run(ONE))


@pytest.mark.slow
@pytest.mark.parametrize("axes", MESHES)
@pytest.mark.parametrize(
    ("kind", "estimator", "extra"),
    [
        ("nca", "group", ""),
        ("nca", "exact", ""),
        ("nca", "pathwise", ""),
        *itertools.product(("mlp", "gru"), ("gae", "group", "exact"), ("",)),
        ("nca", "gae", "base"),
        ("nca", "gae", "several"),
        ("nca", "exact", "capped"),
        ("nca", "pathwise", "sharpe"),
    ],
)
def test_so_it_is_with_every_policy_and_estimator_and_what_is_beside(kind, estimator, extra, axes):
    same(run(axes, kind, estimator, extra), run(ONE, kind, estimator, extra), estimator)


@pytest.mark.slow
@pytest.mark.parametrize("axes", MESHES)
def test_so_it_is_with_replay(axes):
    """Three updates: from the second on a slot can be read."""
    args = {"extra": "replay", "updates": 3}
    got, want = run(axes, **args), run(ONE, **args)
    same(got, want)
    for a, b in zip(jax.tree.leaves(got[0].replay), jax.tree.leaves(want[0].replay), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
    # And the ring was learnt from: without it parameters end elsewhere.
    assert distance(got[0].params, run(ONE, updates=3)[0].params) > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "whole", "leaf"), [((8, 1, 1), 2.0**-12, 2.0**-8), ((2, 2, 2), 2.0**-8, 2.0**-6)]
)
def test_of_bfloat16_products_a_mesh_rounds_as_one_device_does(axes, whole, leaf):
    """The gradients of an update agree, all of them and each by itself.

    A sum is split over devices, and what a device has of it is rounded to bfloat16 where an
    operand is: over the data in the gradients of weights, over the model in what a layer gives as
    well. More would be sums of bfloat16, whose error grows with the number of their terms.
    (Measured: 4e-5 in all and 0.0024 of a leaf over the data, 0.0021 and 0.0099 over all three;
    bfloat16 on one device is 0.0031 and 0.0071 from float32: so far over the data would be a mesh
    that forgot bfloat16.) Each leaf by itself, since three of twelve make up nearly all of the
    norm: a sum over fsdp that is missing in the least is 1.2 of that leaf, but 0.006 of all.
    """
    kinds = ("nca", "gae", "bf16")
    got, _ = stepped(learner_on(axes, *kinds), 1)
    want, _ = stepped(learner_on(ONE, *kinds), 1)
    got, want = (on_host(state).opt_state.inner.gradients for state in (got, want))
    assert 0.0 < distance(got, want) < whole
    assert max(jax.tree.leaves(jax.tree.map(distance, got, want))) < leaf


@pytest.fixture
def without_quick_compile(quick_compile):
    """The compiler as it is used: what it joins, it joins."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="module")
def whole():
    """One update in float32 on (2, 2, 2): the state where it lies, and metrics."""
    return stepped(learner_on((2, 2, 2)), 1)


@pytest.mark.parametrize(
    "axes",
    [(2, 2, 2), *(pytest.param(axes, marks=pytest.mark.slow) for axes in MESHES[:2])],
)
def test_the_first_step_in_float32_is_that_of_one_device(whole, axes):
    state, rows = whole if axes == (2, 2, 2) else stepped(learner_on(axes), 1)
    expected, expected_rows = stepped(learner_on(ONE), 1)
    state, expected = on_host(state), on_host(expected)
    assert furthest(state.opt_state.inner.gradients, expected.opt_state.inner.gradients) < 1e-6
    # Relative to the norm: Adam's first step of a weight is the sign of its gradient, whatever its
    # size, so that a single weight whose gradient is all rounding moves anywhere.
    assert distance(state.params, expected.params) < 1e-6
    assert rows[0] == pytest.approx(expected_rows[0], rel=1e-6, abs=1e-6)


def test_batch_parameters_and_moments_really_are_in_parts(whole):
    state, _ = whole
    for leaf in jax.tree.leaves(state.segments):
        shards = leaf.addressable_shards
        assert {s.data.shape for s in shards} == {(8 // 4, *leaf.shape[1:])}
        assert len({str(s.index) for s in shards}) == 4  # twice each: model shares a batch
    starts = [tuple(np.asarray(s.data)) for s in state.segments.index.addressable_shards]
    assert len(set(starts)) == 4  # no part lives through another's segments
    adam = state.opt_state.inner.inner.inner[1][0]
    for tree in (state.params, adam.mu, adam.nu):
        taps = tree["nca"]["taps"]
        assert taps.sharding.shard_shape(taps.shape) == (taps.shape[0] // 2, taps.shape[1] // 2)
        assert len({str(s.index) for s in taps.addressable_shards}) == 4
        bias = tree["nca"]["hidden_bias"]
        assert bias.sharding.shard_shape(bias.shape) == (4,)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["gae", "group", "exact", "pathwise"])
def test_a_deterministic_run_ends_in_the_same_bits_on_1_2_4_and_8_devices(estimator):
    ends = []
    for devices in (1, 2, 4, 8):
        learner = learner_on(
            (devices, 1, 1), estimator=estimator, devices=devices, deterministic=True
        )
        state, rows = stepped(learner, 3)
        ends.append((on_host(state), rows))
    for end in ends[1:]:
        jax.tree.map(np.testing.assert_array_equal, end, ends[0])


@pytest.mark.slow
def test_a_checkpoint_goes_from_any_mesh_to_any_other_bit_for_bit():
    meshes = [(8, 1, 1), (2, 2, 2), (4, 1, 1), ONE, (1, 2, 4)]
    learners = {axes: learner_on(axes) for axes in meshes}
    state, _ = stepped(learners[meshes[0]], 1)
    want = flatten(state)
    for axes in meshes[1:]:
        learner = learners[axes]
        state = unflatten(learner.init(jax.random.key(1)), flatten(state))
        got = flatten(state)
        assert set(got) == set(want)
        for name, leaf in want.items():
            np.testing.assert_array_equal(got[name], leaf)
        like = jax.tree.map(lambda leaf: leaf.sharding, learner.init(jax.random.key(1)))
        assert jax.tree.map(lambda leaf: leaf.sharding, state) == like


@pytest.mark.slow
def test_of_a_data_parallel_update_gradients_and_statistics_cross_devices_and_nothing_else(
    without_quick_compile,
):
    learner = learner_on((8, 1, 1))
    state = jax.eval_shape(learner.init, jax.random.key(0))
    program = learner.bounded.program
    text = program.lower(state, learner.market, learner.course).compile().as_text()
    crossing = [
        (run.instruction.opcode, run.times, len(run.instruction.shapes))
        for run in runs(read_module(text))
        if run.instruction.opcode.startswith(KINDS)
    ]  # fmt: skip
    # One a minibatch for gradients, KL and metrics; one an update for the statistics. Each of one
    # array: devices of a CPU meet for every array of a collective by itself.
    assert sorted(crossing) == [("all-reduce", 1, 1), ("all-reduce", 2, 1)]
