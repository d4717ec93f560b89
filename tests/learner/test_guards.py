"""Numbers that are not finite: the batch is dropped whole, and training goes on or goes back."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny as tiny_experiment
from untrained import leaves

from nca_trader import Run, StateError, make_mesh
from nca_trader.agents.policy import make_policy
from nca_trader.learner import learner as learners
from nca_trader.learner import sampled, update
from nca_trader.learner import train as training
from nca_trader.learner.optimizer import GuardState, make_optimizer, whole_or_nothing
from nca_trader.learner.rollout import roll_out
from nca_trader.parallel.mesh import DATA

pytestmark = pytest.mark.usefixtures("quick_compile")


def poisoning_optimizer(*args):
    """The real optimiser; the second gradient of the second update has one entry that is NaN."""
    real = make_optimizer(*args)

    def step(gradient, state, params):
        count = state.inner[1][0].count  # of Adam
        bad = (count == 4 + 1) & (state.skipped == 0)
        gradient["head"]["value_bias"] = jnp.where(bad, jnp.nan, gradient["head"]["value_bias"])
        return real.update(gradient, state, params)

    return type(real)(real.init, step)


def collect_with_nan(*args):
    """A rollout whose first reward on the first device is NaN where the market's feature is."""
    segments, rollout = roll_out(*args)
    poison = args[2].features[0, 0, 0] * (jax.lax.axis_index(DATA) == 0)  # a bar never seen
    reward = rollout.reward.at[0, 0, 0].add(0.0 * poison)
    return segments, rollout._replace(reward=reward)


def planted(market, where):
    """`market` with NaN in the first bar, or at every 24th: a third of the segments meet one."""
    rows = slice(0, 1) if where == "rewards" else slice(24, None, 24)
    return dataclasses.replace(market, features=market.features.at[rows].set(jnp.nan))


def step_in(learner, state, where=""):
    """One update in the learner's market with NaN planted there; "" for none."""
    market = planted(learner.market, where) if where else learner.market
    return learner.step(state, jax.device_put(market, learner.market.features.sharding))


def on_host(state):
    """A copy that a step cannot take over, with the key's data."""
    state = state._replace(key=jax.random.key_data(state.key))
    return jax.tree.map(lambda leaf: np.array(leaf, copy=True), state)


def learnt(state):
    """What a dropped batch must leave as it was."""
    return state.params, state.opt_state.inner


def on_device(state, like):
    state = state._replace(key=jax.random.wrap_key_data(state.key))
    return jax.device_put(state, jax.tree.map(lambda leaf: leaf.sharding, like))


def on_two_devices(stage):
    """A learner of as little as has all that a batch can spoil."""
    agent = dataclasses.replace(stage.agent, policy=tiny_experiment.MLP)
    policy = make_policy(agent, stage.env.spec)
    learner = learners.make_learner(stage.env, policy, agent, make_mesh(2))
    step_in(learner, learner.init(jax.random.key(1)))  # compiles
    return learner


@pytest.fixture(scope="module")
def poisoned(stage):
    """A learner whose second update meets a NaN in one gradient step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(update, "make_optimizer", poisoning_optimizer)
        patch.setattr(sampled, "roll_out", collect_with_nan)
        return on_two_devices(stage)


def dropped(learner, state, where=""):
    """The state after an update that must change nothing of what was learnt, and what it said."""
    before = on_host(state)
    state, metrics = step_in(learner, state, where)
    after = on_host(state)
    jax.tree.map(np.testing.assert_array_equal, learnt(after), learnt(before))
    assert int(after.update) == int(before.update) + 1
    assert (after.segments.index != before.segments.index).all()
    assert np.isfinite(float(metrics["param_norm"]))
    return state, int(metrics["skipped"])


@pytest.fixture(scope="module")
def idle(stage):
    """The learner that lives through each update's bars and makes no call to learn from them."""

    def left_out(lose, config, optimizer, params, opt_state, *rest):
        return params, opt_state, {}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(update, "learn", left_out)
        return on_two_devices(stage)


def goes_on(learner, idle, state, before, planted):
    """`state` ends where a run does that never tried to learn what was `planted` since `before`.

    Both meet the same bars: who saw NaN acted on it.
    """
    other = on_device(before, state)
    for where in planted:
        other, _ = step_in(idle, other, where)
    # The count tells of what was dropped, and so did the one that plants NaN in gradients.
    count = on_host(state).opt_state.skipped
    other = on_host(other)
    other = other._replace(opt_state=other.opt_state._replace(skipped=count))
    other, _ = step_in(learner, on_device(other, state))
    state, metrics = step_in(learner, state)
    assert int(metrics["skipped"]) == 0 and np.isfinite(float(metrics["loss"]))
    jax.tree.map(np.testing.assert_array_equal, on_host(state), on_host(other))
    moved = jax.tree.map(lambda a, b: (a != b).any(), on_host(state).params, before.params)
    assert all(jax.tree.leaves(moved))


# Of four gradient steps the second has NaN: the one before and those after are taken back. A reward
# of one device, or features, spoil all four of both.
@pytest.mark.parametrize("wrong", [{"": 1, "rewards": 4}, {"features": 4}])
def test_a_batch_with_nan_is_as_if_it_had_not_been(poisoned, idle, wrong):
    state, _ = step_in(poisoned, poisoned.init(jax.random.key(0)))
    before = on_host(state)
    for where, steps in wrong.items():
        state, skipped = dropped(poisoned, state, where)
        assert skipped == steps
    goes_on(poisoned, idle, state, before, wrong)


@pytest.mark.parametrize(
    ("where", "first"),
    [("rewards", "rewards are"), ("features", "values or"), ("", "a gradient is")],
)
def test_what_was_not_finite_is_told_also_while_jax_looks_for_nan(poisoned, where, first):
    state, market = poisoned.init(jax.random.key(0)), poisoned.market
    if where:
        market = jax.device_put(planted(market, where), market.features.sharding)
    else:  # it is the second update's gradient that has a NaN
        state, _ = poisoned.step(state)
    with jax.debug_nans(True), jax.debug_infs(True):
        _, metrics = poisoned.step(state, market)
    row = training.metrics_row(jax.device_get(metrics), 2, 1, 1.0)
    assert row["skipped"]
    assert training.dropped_line(row).startswith(f"update 2 dropped: {first}")


def test_an_iteration_is_taken_back_whole_or_stands():
    def made(value, skipped):
        return {"w": jnp.full(3, value)}, GuardState(
            jnp.asarray(skipped), {"m": jnp.full(2, value)}
        )

    for skipped, value in ((7, 2.0), (8, 1.0), (9, 1.0)):
        params, state = whole_or_nothing(made(1.0, 7), made(2.0, skipped))
        assert (params["w"] == value).all() and (state.inner["m"] == value).all()
        assert int(state.skipped) == skipped


class Failing:
    """A learner whose updates fail where `fails(update, tries)` says "params" or "batch"."""

    def __init__(self, learner, fails):
        self.learner, self.fails, self.tries, self.keys = learner, fails, {}, []

    def step(self, state, market):
        number = int(state.update) + 1
        self.tries[number] = self.tries.get(number, 0) + 1
        self.keys.append((number, jax.random.key_data(state.key).tolist()))
        how = self.fails(number, self.tries[number])
        if how == "batch":
            old = state
            state = state._replace(update=state.update + 1)
            metrics = jax.tree.map(jnp.zeros_like, jax.eval_shape(self.learner.step, old)[1])
            zeros = {name: jnp.zeros(()) for name in metrics}
            return state, zeros | {"skipped": jnp.ones(()), "loss": jnp.asarray(jnp.nan)}
        state, metrics = self.learner.step(state, market)
        if how == "params":
            params = jax.tree.map(lambda leaf: leaf * jnp.nan, state.params)
            state = state._replace(params=params)
            metrics = metrics | {"param_norm": jnp.asarray(jnp.nan)}
        return state, metrics


@pytest.fixture
def failing(tiny, tmp_path, monkeypatch):
    """`(fails, updates, stop, **checkpoint) -> (run, failing learner, reported rows)`."""
    learner = learners.make_learner(
        tiny.env, make_policy(tiny_experiment.AGENT, tiny.env.spec), tiny_experiment.AGENT
    )

    def start(fails, updates=8, stop=lambda rows: False, **checkpoint):
        wrapped, rows = Failing(learner, fails), []
        monkeypatch.setattr(
            training, "build_learner", lambda *_: learner._replace(step=wrapped.step)
        )
        config = dataclasses.replace(tiny_experiment.AGENT.checkpoint, **checkpoint)
        agent = dataclasses.replace(tiny_experiment.AGENT, checkpoint=config)
        try:
            training.train(
                tiny.env,
                agent,
                tmp_path / "run",
                steps=updates * tiny_experiment.STEPS_PER_UPDATE,
                report=rows.append,
                stop=lambda: stop(rows),
            )
        except StateError as error:
            return error, wrapped, rows
        return Run(tmp_path / "run"), wrapped, rows

    return start


@pytest.mark.heavy
def test_nan_in_parameters_goes_back_to_the_newest_checkpoint_with_another_key(failing, caplog):
    fails = lambda number, tries: "params" if number == 6 and tries <= 2 else ""  # noqa: E731
    run, learner, rows = failing(fails, every=2, max_rollbacks=2)
    assert [number for number, _ in learner.keys] == [1, 2, 3, 4, 5, 6, 5, 6, 5, 6, 7, 8]
    keys = [key for number, key in learner.keys if number == 6]
    assert keys[0] != keys[1] != keys[2] != keys[0]
    said = [record.message for record in caplog.records]
    back = "update 6 left parameters that are not finite; rolled back to checkpoint 4"
    assert len([line for line in said if back in line]) == 2
    found = run.metrics()
    assert [row["update"] for row in found] == list(range(1, 9))
    assert [row["rollbacks"] for row in found] == [0, 0, 0, 0, 2, 2, 2, 2]
    assert rows[-1] == found[-1]
    step, saved = leaves(run)
    params = [leaf for name, leaf in saved.items() if name.startswith(".params")]
    assert step == 8 and all(np.isfinite(leaf).all() for leaf in params)


@pytest.mark.heavy
def test_dropped_updates_are_logged_and_too_many_in_a_row_go_back(failing, caplog):
    fails = lambda number, tries: "batch" if 4 <= number <= 6 and tries == 1 else ""  # noqa: E731
    run, learner, _ = failing(fails, every=1, max_skips=3)
    assert [number for number, _ in learner.keys] == [1, 2, 3, 4, 5, 6, 4, 5, 6, 7, 8]
    said = "\n".join(record.message for record in caplog.records)
    assert all(f"update {number} dropped" in said for number in (4, 5, 6))
    assert "update 6 is the last of 3 in a row that were dropped" in said
    assert "rolled back to checkpoint 3" in said  # none is saved while updates are dropped
    assert [row["skipped"] for row in run.metrics()] == [0] * 8
    fewer, learner, _ = failing(
        lambda number, tries: "batch" if number in (9, 10, 12) else "", 13, every=1, max_skips=3
    )
    assert [number for number, _ in learner.keys] == [9, 10, 11, 12, 13]
    assert [row["skipped"] for row in fewer.metrics()][8:] == [1, 1, 0, 1, 0]
    assert fewer.metrics()[8]["loss"] is None


@pytest.mark.heavy
def test_it_gives_up_in_one_line_and_keeps_what_it_has(failing):
    fails = lambda number, tries: "params" if number == 6 else ""  # noqa: E731
    error, learner, _ = failing(fails, every=2, max_rollbacks=2)
    assert isinstance(error, StateError) and error.exit_code == 4
    message = str(error)
    assert "also after 2 rollbacks to checkpoint 4" in message and "\n" not in message
    assert [number for number, _ in learner.keys].count(6) == 3
    run = Run(message.split(": ")[0])
    assert leaves(run)[0] == 4
    assert [row["update"] for row in run.metrics()] == [1, 2, 3, 4]


@pytest.mark.heavy
def test_a_run_stopped_among_dropped_updates_counts_them_on(failing):
    fails = lambda number, tries: "batch" if number in (3, 4, 5) and tries == 1 else ""  # noqa: E731
    failing(fails, stop=lambda rows: len(rows) == 4, every=2, max_skips=3)
    run, learner, _ = failing(fails, every=2, max_skips=3)
    assert [number for number, _ in learner.keys] == [5, 5, 6, 7, 8]
    assert run.metrics()[-1]["rollbacks"] == 1
