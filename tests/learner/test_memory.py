"""One bound for agents, micro-batches and replay: by what the compiled program needs, and said."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import random_bars
from tiny import AGENT, ENV, STEPS_PER_UPDATE

from nca_trader import ConfigError, TradingEnv, machine, make_learner, make_mesh, make_policy
from nca_trader.learner import programs
from nca_trader.learner.population import agents_at_once, step_each
from nca_trader.learner.programs import (
    Fitting,
    Held,
    Sizes,
    bytes_needed,
    memory_limit,
    piece_counts,
    sizes_to_try,
)

ROWS = np.random.default_rng(0).normal(size=(64, 512)).astype("f4")
BUILT = []
held = jax.lax.optimization_barrier  # an intermediate that no compiler may fuse away


def build(sizes):
    """The norm of all rows' outer products, a piece of the rows at a time."""
    BUILT.append(sizes)

    def step(rows):
        weights = rows[:8].T

        def of_piece(piece):
            return held(jnp.sin(piece[:, :, None] * piece[:, None, :])) @ weights

        split = rows.reshape(sizes.micro_batches, -1, 512)
        return jax.lax.map(lambda piece: (of_piece(piece) ** 2).sum(), split).sum()

    return jax.jit(step)


def in_pieces(first, items=64):
    return sizes_to_try(1, first, items)


@pytest.fixture(scope="module")
def needs():
    return {n: bytes_needed(build(Sizes(1, n)).lower(ROWS).compile()) for n in (1, 8)}


def test_pieces_are_halved_again_and_again():
    assert piece_counts(1, 64) == [1, 2, 4, 8, 16, 32, 64]
    assert piece_counts(1, 12) == [1, 2, 4, 12]
    assert piece_counts(3, 9) == [3, 9]
    assert piece_counts(4, 4) == [4]


def test_fewer_agents_move_at_once_before_their_batches_are_cut():
    assert sizes_to_try(1, 1, 4) == [(1, 1), (1, 2), (1, 4)]
    assert sizes_to_try(5, 2, 4) == [(5, 2), (3, 2), (2, 2), (1, 2), (1, 4)]
    assert agents_at_once(6, make_mesh(1)) == 1  # on a CPU they take turns


def test_what_does_not_fit_is_done_in_smaller_pieces(needs, caplog):
    assert needs[1] > 2 * needs[8] > 0
    step = Fitting(build, in_pieces(1), needs[8])
    assert step.metrics == {}
    with caplog.at_level("WARNING"):
        got = step(ROWS)
    assert "1 agent at once, learner.micro_batches = 4: an update needs" in caplog.text
    assert "learner.micro_batches = 8, with the same result" in caplog.text
    assert step.sizes == (1, 8) and step.needed == needs[8]
    assert step.metrics == {"memory_gb": needs[8] / 1e9, "agents_at_once": 1}
    np.testing.assert_allclose(got, build(Sizes(1, 1))(ROWS), rtol=1e-5)
    BUILT.clear()
    step(ROWS)
    assert BUILT == []  # what was chosen stays


def test_agents_that_do_not_fit_together_take_turns_with_the_same_result():
    """Of five agents, each with an intermediate of a million numbers, two fit."""

    def one(agent, market):
        return held(jnp.sin(jnp.outer(agent, market))).sum(), agent + 1.0

    def chunked(sizes):
        return jax.jit(step_each(one, sizes.agents))

    agents = np.random.default_rng(1).normal(size=(5, 1000)).astype("f4")
    market = np.random.default_rng(2).normal(size=1000).astype("f4")
    two = bytes_needed(chunked(Sizes(2, 1)).lower(agents, market).compile())
    step = Fitting(chunked, sizes_to_try(5, 1, 4), two)
    got, after = step(agents, market)
    assert step.sizes == (2, 1)
    expected = [np.sin(np.outer(agent.astype("f8"), market)).sum() for agent in agents]
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-1)
    np.testing.assert_array_equal(after, agents + 1.0)


def test_where_nothing_fits_it_is_refused_in_one_line():
    with pytest.raises(ConfigError, match="micro-batch is one segment already; raise") as error:
        Fitting(build, in_pieces(32), 1000)(ROWS)
    assert "\n" not in str(error.value)


def test_a_replay_ring_that_leaves_no_room_is_refused_with_how_many_slots_would_fit(needs):
    with pytest.raises(ConfigError, match=r"replay_slots = 40: the ring takes 8e-06 GB, and"):
        Fitting(build, in_pieces(64), 7999.0, Held(40, 200.0))
    # Half of what is needed is the ring's ten slots; a quarter must go: half of the slots.
    ring, limit = Held(10, needs[1] / 20.0), needs[1] * 0.76
    with pytest.raises(
        ConfigError, match=r"the replay ring takes .* learner\.replay_slots = 5 would fit; raise"
    ):
        Fitting(build, [Sizes(1, 1)], limit, ring)(ROWS)
    assert Held().remedy(1e9) == "" == Held(4, 100.0).remedy(150.0)


def test_the_bound_of_an_agents_file_counts_its_replay_ring():
    """8 bytes a transition of one asset and 4 + 44 a segment, for each of four slots."""
    learner = dataclasses.replace(AGENT.learner, replay_slots=4, memory_gb=5e-6)
    optimizer = dataclasses.replace(AGENT.optimizer, ema_decay=0.9)
    agent = dataclasses.replace(AGENT, learner=learner, optimizer=optimizer)
    env = TradingEnv(random_bars(np.random.default_rng(0), 120, 1), ENV)
    held = 4 * (8 * STEPS_PER_UPDATE + 8 * (4 + 44))
    with pytest.raises(ConfigError, match=rf"replay_slots = 4: the ring takes {held / 1e9:.3g} GB"):
        make_learner(env, make_policy(agent, env.spec), agent)


def test_an_allocation_that_fails_is_tried_in_smaller_pieces(caplog):
    """A real one, of 2^47 bytes: what the step took over by then is given to the next."""

    def pieces(sizes):
        rows = 2**23 if sizes.micro_batches == 1 else 4

        def step(state, market):
            key, number = state
            wide = jax.lax.map(lambda i: jnp.full(rows // 2, i), jnp.arange(float(rows)))
            return (key, number + wide[number.astype(int), 0]), market + 1.0

        return jax.jit(step, donate_argnums=0)

    def begin():
        return jax.random.key(5), jnp.ones(())

    step = Fitting(pieces, in_pieces(1, 2), 1e18)
    with caplog.at_level("WARNING"):
        (key, number), _ = step(begin(), jnp.zeros(3))
    assert "learner.micro_batches = 1: allocation failed; trying 1 agent at once" in caplog.text
    assert float(number) == 2.0 and step.sizes == (1, 2)
    np.testing.assert_array_equal(jax.random.key_data(key), jax.random.key_data(begin()[0]))
    with pytest.raises(ConfigError, match="micro_batches = 1: allocation failed; lower learner"):
        Fitting(pieces, in_pieces(1, 1), 1e18)(begin(), jnp.zeros(3))


def test_a_cpu_is_bounded_by_the_free_memory_that_its_devices_share(monkeypatch):
    monkeypatch.setattr(machine, "memory", lambda: machine.Memory(10**12, 8 * 10**9))
    count = len(jax.local_devices())
    assert memory_limit(None, make_mesh(count)) == pytest.approx(8e9 / count)
    # What is there already is not free, and needs no more.
    assert memory_limit(None, make_mesh(1), 10**9) == pytest.approx(9e9)
    assert memory_limit(0.5, make_mesh(1)) == 5e8


@pytest.mark.slow
def test_what_a_cpu_cannot_hold_is_refused_before_it_is_allocated(monkeypatch):
    """In one line, from the learner's first step; with a ring, before there is one."""
    env = TradingEnv(random_bars(np.random.default_rng(0), 120, 1), ENV)
    market = sum(leaf.nbytes for leaf in jax.tree.leaves(env.market))
    policy = make_policy(AGENT, env.spec)
    monkeypatch.setattr(machine, "memory", lambda: machine.Memory(10**12, 1000))
    whole = dataclasses.replace(AGENT.learner, logical_shards=1, num_minibatches=8)
    agent = dataclasses.replace(AGENT, learner=whole)  # of which nothing smaller is tried
    learner = make_learner(env, policy, agent, make_mesh(1))
    assert learner.fitting.limit == 1000 + market
    with pytest.raises(ConfigError, match=r"needs .* GB of .* GB, and a micro-batch is") as error:
        learner.step(learner.init(jax.random.key(0)))
    assert "\n" not in str(error.value)
    replaying = dataclasses.replace(
        AGENT,
        learner=dataclasses.replace(AGENT.learner, replay_slots=40),
        optimizer=dataclasses.replace(AGENT.optimizer, ema_decay=0.9),
    )
    with pytest.raises(ConfigError, match=r"replay_slots = 40: the ring takes .* a device has"):
        make_learner(env, policy, replaying, make_mesh(1))


def test_no_copy_is_kept_of_what_would_not_fit_twice(monkeypatch):
    """A host that is the device has no second memory for what a step takes over."""
    kept = []
    monkeypatch.setattr(programs, "_spare", lambda leaf: kept.append(leaf.nbytes))
    step = jax.jit(lambda state: state + 1.0, donate_argnums=0)
    for limit, copies in ((15_000, []), (30_000, [8_000])):
        fitting = Fitting(lambda sizes: step, in_pieces(1, 2), limit)
        np.testing.assert_array_equal(fitting(jnp.zeros(2_000)), 1.0)
        assert 8_000 <= fitting.needed < 15_000 and kept == copies


@pytest.mark.heavy
def test_without_a_compiler_nothing_is_measured():
    step = Fitting(build, in_pieces(64), 1)
    with jax.disable_jit():
        got = step(ROWS)
    assert step.needed is None and np.isfinite(got)
    BUILT.clear()
    step = Fitting(build, in_pieces(2, 4), None)
    assert BUILT == [(1, 2)] and step.metrics == {}
