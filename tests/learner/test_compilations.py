"""What jax compiles is counted, and a learner that is compiled again is warned about."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import AGENT

from nca_trader.agents.policy import make_policy
from nca_trader.config import CurriculumConfig
from nca_trader.learner.learner import make_learner
from nca_trader.learner.programs import Compilations

SAID = "compiled again after its first update"


@jax.jit
def iterate(x):
    return 2.0 * x + 0.125


@jax.jit
def another(x):
    return 3.0 * x


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING)
    return lambda: [r.getMessage() for r in caplog.records if SAID in r.getMessage()]


def test_programs_are_counted_only_inside_and_once_each():
    sizes = [np.zeros(size, np.float32) for size in (101, 102)]
    with Compilations() as found:
        iterate(sizes[0])
        iterate(sizes[0])
        assert found.count == 1 and found.seconds > 0.0
    before = found.seconds
    iterate(sizes[1])
    assert found.count == 1 and found.seconds == before


def test_a_watched_program_that_is_compiled_after_the_first_update_is_warned_about(warnings):
    told = []
    with Compilations(["iterate"]) as found:
        for size in (3, 3, 4, 4, 5):
            iterate(np.zeros(size, np.float32))
            another(np.zeros(size, np.float32))  # is not watched
            told.append(found.again())
    assert told == [0, 0, 1, 1, 2]
    assert len(warnings()) == 2 and "(2 times so far)" in warnings()[1]


def test_several_sizes_that_are_tried_before_the_first_update_are_no_retrace(warnings):
    with Compilations(["iterate"]) as found:
        iterate(np.zeros(7, np.float32))
        iterate(np.zeros(8, np.float32))
        assert found.again() == found.again() == 0
    assert not warnings()


def test_a_weak_type_is_a_retrace(warnings):
    with Compilations(["iterate"]) as found:
        iterate(jnp.zeros(()))
        found.again()
        iterate(jnp.asarray(0.0, jnp.float32) * 1)
        assert found.again() == 0
        iterate(0.0)
        assert found.again() == 1 and len(warnings()) == 1


def test_programs_found_on_disk_are_counted(tmp_path):
    """One program compiled twice: the second time the first's file is there."""
    from jax.experimental.compilation_cache import compilation_cache

    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compilation_cache.reset_cache()
    try:
        with Compilations() as found:
            for _ in range(2):
                jax.jit(lambda x: x * 5.0 + 0.25)(np.zeros(11, np.float32))
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()
    assert (found.count, found.hits) == (2, 1)


@pytest.mark.heavy
def test_the_learners_own_program_is_the_one_that_is_watched(tiny):
    """Its name is what jax says when it compiles it: else a retrace of it would not be seen."""
    env = tiny.env
    learner = make_learner(env, make_policy(AGENT, env.spec), AGENT)
    state = learner.init(jax.random.key(0))
    with Compilations([learner.bounded.program.__name__]) as found:
        assert found.again() == 0
        learner.step(state)
        assert found.again() == 1


def test_a_run_of_another_length_finds_its_program_compiled(tiny):
    """Schedules and curricula end elsewhere, by numbers that the program is given."""
    texts, ends = [], []
    for steps in (1_000, 70_000):
        learner = dataclasses.replace(AGENT.learner, steps=steps)
        optimizer = dataclasses.replace(AGENT.optimizer, schedule="linear", warmup_updates=1)
        curriculum = CurriculumConfig(costs_from=0.5, costs_share=0.3)
        agent = dataclasses.replace(
            AGENT, learner=learner, optimizer=optimizer, curriculum=curriculum
        )
        made = make_learner(tiny.env, make_policy(agent, tiny.env.spec), agent)
        state = jax.eval_shape(made.init, jax.random.key(0))
        texts.append(made.bounded.program.lower(state, made.market, made.course).as_text())
        ends.append([float(x) for x in made.course])
    assert texts[0] == texts[1] and all(
        a < b for a, b in zip(ends[0][:2], ends[1][:2], strict=True)
    )
