"""One bound for agents, micro-batches and replay: what is needed, and what would fit."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import random_bars
from tiny import AGENT, ENV, STEPS_PER_UPDATE

from nca_trader import ConfigError, TradingEnv, machine, make_learner, make_mesh, make_policy
from nca_trader.learner.programs import LESS, Bounded, Held, bytes_needed, memory_limit

ROWS = np.random.default_rng(0).normal(size=(64, 512)).astype("f4")
BUILT = []
NONE = Held()
held = jax.lax.optimization_barrier  # an intermediate that no compiler may fuse away


def build(micro_batches):
    """The norm of all rows' outer products, a piece of the rows at a time."""
    BUILT.append(micro_batches)

    def step(rows):
        weights = rows[:8].T

        def of_piece(piece):
            return held(jnp.sin(piece[:, :, None] * piece[:, None, :])) @ weights

        split = rows.reshape(micro_batches, -1, 512)
        return jax.lax.map(lambda piece: (of_piece(piece) ** 2).sum(), split).sum()

    return jax.jit(step)


def bounded(step, limit, larger=(), ring=NONE, build=build):
    return Bounded(step, step, build, larger, limit, ring, f"lower {LESS}")


@pytest.fixture(scope="module")
def needs():
    return {n: bytes_needed(build(n).lower(ROWS).compile()) for n in (1, 8)}


def test_what_fits_runs_and_says_what_it_needs(needs):
    whole = build(1)
    step = bounded(whole, needs[1])
    assert step.needed is None
    BUILT.clear()
    assert step(ROWS) == whole(ROWS) == step(ROWS)
    assert step.needed == needs[1] and BUILT == []


def test_what_does_not_fit_is_refused_with_the_micro_batches_that_would(needs):
    """The fewest of them, that were compiled and found to fit."""
    assert needs[1] > 2 * needs[8] > 0
    step, words = bounded(build(1), needs[8], (2, 4, 8, 16, 32, 64)), []
    BUILT.clear()
    for _ in range(2):
        with pytest.raises(ConfigError) as error:
            step(ROWS)
        words.append(str(error.value))
    assert words[0] == words[1] and "\n" not in words[0] and len(BUILT) == 2 * 3
    assert words[0] == (
        f"an update needs {needs[1] / 1e9:.3g} GB of {needs[8] / 1e9:.3g} GB; "
        f"learner.micro_batches = 8 would fit; raise learner.memory_gb, or lower {LESS}."
    )


def test_where_nothing_fits_it_is_refused_in_one_line():
    with pytest.raises(ConfigError, match=r"GB of 1e-06 GB; raise learner\.memory_gb") as error:
        bounded(build(32), 1000.0, (64,))(ROWS)
    assert "\n" not in str(error.value)


def test_a_replay_ring_that_leaves_no_room_is_refused_with_how_many_slots_would_fit(needs):
    with pytest.raises(ConfigError, match=r"replay_slots = 40: the ring takes 8e-06 GB, and"):
        bounded(build(64), 7999.0, ring=Held(40, 200.0))
    # Half of what is needed is the ring's ten slots; a quarter must go: half of the slots.
    ring, limit = Held(10, needs[1] / 20.0), needs[1] * 0.76
    with pytest.raises(
        ConfigError, match=r"the replay ring takes .* learner\.replay_slots = 5 would fit; raise"
    ):
        bounded(build(1), limit, ring=ring)(ROWS)
    assert Held().remedy(1e9) == "" == Held(4, 100.0).remedy(150.0)
    assert Held(4, 100.0).remedy(math.nan) == ""


def test_the_bound_of_an_agents_file_counts_its_replay_ring():
    """8 bytes a transition of one asset and 4 + 44 a segment, for each of four slots."""
    learner = dataclasses.replace(AGENT.learner, replay_slots=4, memory_gb=5e-6)
    optimizer = dataclasses.replace(AGENT.optimizer, ema_decay=0.9)
    agent = dataclasses.replace(AGENT, learner=learner, optimizer=optimizer)
    env = TradingEnv(random_bars(np.random.default_rng(0), 120, 1), ENV)
    held = 4 * (8 * STEPS_PER_UPDATE + 8 * (4 + 44))
    with pytest.raises(ConfigError, match=rf"replay_slots = 4: the ring takes {held / 1e9:.3g} GB"):
        make_learner(env, make_policy(agent, env.spec), agent)


def test_an_allocation_that_fails_is_refused_in_one_line():
    """A real one, of 2^47 bytes."""

    @jax.jit
    def step(number):
        wide = jax.lax.map(lambda i: jnp.full(2**22, i), jnp.arange(2.0**23))
        return number + wide[number.astype(int), 0]

    with pytest.raises(ConfigError, match=r"could not allocate it; raise learner\.m") as error:
        bounded(step, 1e18)(jnp.ones(()))
    assert "\n" not in str(error.value)


def test_a_compiler_that_gives_up_on_memory_is_asked_for_smaller_pieces():
    """As those of accelerators do, which do not say how much is needed."""

    class Refused:
        def lower(self, rows):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory")

    def of(pieces):
        return Refused() if pieces < 4 else build(pieces)

    for limit, has in ((1e18, r"1e\+09 GB"), (None, "a device has")):
        words = rf"needs more than {has}; learner\.micro_batches = 4 would fit"
        with pytest.raises(ConfigError, match=words):
            bounded(Refused(), limit, (2, 4, 8), Held(2, 1.0), of)(ROWS)
        with pytest.raises(ConfigError, match=f"needs more than {has}; raise"):
            bounded(Refused(), limit, (2,), Held(2, 1.0), of)(ROWS)


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
    agent = dataclasses.replace(AGENT, learner=whole, num_seeds=2)
    learner = make_learner(env, policy, agent, make_mesh(1))
    assert learner.bounded.limit == 1000 + market
    with pytest.raises(ConfigError, match=r"needs .* GB of .* GB; .* lower num_seeds,") as error:
        learner.step(learner.init(jax.random.key(0)))
    assert "\n" not in str(error.value)
    replaying = dataclasses.replace(
        AGENT,
        learner=dataclasses.replace(AGENT.learner, replay_slots=40),
        optimizer=dataclasses.replace(AGENT.optimizer, ema_decay=0.9),
    )
    with pytest.raises(ConfigError, match=r"replay_slots = 40: the ring takes .* a device has"):
        make_learner(env, policy, replaying, make_mesh(1))
