"""One iteration: the same run on one, two and eight devices; nothing leaves the device; guards."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import probes
import pytest

from nca_trader import BarError, ConfigError, TradingEnv, make_learner, make_mesh, make_policy
from nca_trader.config import AgentConfig, LearnerConfig
from nca_trader.learner.ppo import reward_scale, setup_of

pytestmark = pytest.mark.usefixtures("quick_compile")

METRICS = {
    "loss", "policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction",
    "explained_variance", "grad_norm", "skipped", "kl_stopped", "lr", "micro_batches",
}  # fmt: skip


@functools.cache
def run(stage, devices=8):
    """States after each update, on the host, and metrics."""
    learner = stage.learner(devices)
    state = learner.init(jax.random.key(0))
    states, rows = [], []
    for _ in range(3):
        state, metrics = learner.step(state)
        states.append(jax.device_get(state._replace(key=jax.random.key_data(state.key))))
        rows.append({name: float(value) for name, value in metrics.items()})
    return states, rows


def test_a_step_takes_its_state_over_and_compiles_once(stage, caplog):
    run(stage)  # has compiled what there is to compile
    learner = stage.learner(8)
    state = learner.init(jax.random.key(3))
    with caplog.at_level("WARNING"), jax.log_compiles():
        for _ in range(3):
            before = state
            with jax.transfer_guard("disallow"):  # nothing comes from the host within a step
                state, _ = learner.step(state)
            arrays = (before.params, before.opt_state, before.segments)
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(arrays))
        assert "XLA compilation" not in caplog.text
        jax.jit(lambda x: x + 8)(state.update)  # what the log would have said
        assert "XLA compilation" in caplog.text


@pytest.mark.heavy
def test_an_iteration_calls_nothing_on_the_host(stage):
    learner = stage.learner(8)
    state = jax.eval_shape(learner.init, jax.random.key(0))
    assert "callback" not in jax.jit(learner.step).lower(state).as_text()

    def calls_back(x):
        jax.debug.print("{}", x)
        return x

    assert "callback" in jax.jit(calls_back).lower(1.0).as_text()


def test_metrics_are_those_of_the_contract(stage):
    states, rows = run(stage)
    for row in rows:
        assert set(row) >= METRICS and all(np.isfinite(value) for value in row.values())
        assert 0.0 <= row["clip_fraction"] <= 1.0 and row["approx_kl"] >= -1e-7
        assert 0.0 < row["entropy"] <= np.log(3) + 1e-6
        assert row["explained_variance"] <= 1.0 and row["skipped"] == 0
        assert 0.0 <= row["action_changes"] <= 1.0
    assert [int(state.update) for state in states] == [1, 2, 3]


def test_segments_begin_where_their_own_keys_say_whatever_the_device(stage):
    states, _ = run(stage)
    key = jax.random.fold_in(jax.random.wrap_key_data(states[0].key), 0)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.split(key, 4)[0], np.arange(16))
    begun, _ = stage.begin(stage.empty_segments(), keys)
    np.testing.assert_array_equal(states[0].segments.index, begun.index + 8)


def test_every_update_moves_every_parameter(stage):
    states, _ = run(stage)
    for before, after in itertools.pairwise(states):
        moved = jax.tree.map(lambda a, b: bool((a != b).any()), before.params, after.params)
        assert all(jax.tree.leaves(moved))


def test_the_first_metrics_are_those_of_an_untrained_agent(stage):
    first = run(stage)[1][0]
    assert first["explained_variance"] < 0.2
    assert abs(first["policy_loss"]) < 0.05  # advantages are centred, the ratio is near 1
    assert first["entropy"] > np.log(3) - 0.01


@pytest.mark.parametrize("short_by", [0, 1])
def test_bars_for_one_segment_are_enough_and_one_fewer_is_refused(stage, short_by):
    need = stage.policy.first_decision + 8 + 1
    env = TradingEnv(stage.env.bars[: need - short_by], stage.env.config)
    if short_by:
        with pytest.raises(BarError, match=rf"{need - 1} bars, but training needs {need}: .*give"):
            make_learner(env, stage.policy, stage.agent)
    else:
        make_learner(env, stage.policy, stage.agent)


def test_shapes_that_do_not_divide_are_refused(stage):
    with pytest.raises(ConfigError, match=r"logical_shards = 8 .* 3 devices .* is 9\.$"):
        make_learner(stage.env, stage.policy, stage.agent, make_mesh(3))
    config = dataclasses.replace(stage.env.config, episode_bars=21)
    env = TradingEnv(stage.env.bars, config)
    with pytest.raises(ConfigError, match=r"episode_bars = 21 is not a multiple .* take 24\.$"):
        make_learner(env, stage.policy, stage.agent)


def test_values_are_of_order_one_whatever_the_markets_spread(stage):
    # Independent rewards of deviation s sum, discounted, to s / sqrt(1 - gamma^2), and to no
    # more than a segment holds of them.
    bars = stage.env.bars
    log_return = np.diff(np.log(bars.close), axis=0, prepend=np.log(bars.open[:1]))
    spread = log_return.mean(1).std()
    learn = dataclasses.replace(stage.agent.learner, segment_length=8)
    for discount, horizon in ((0.5, 1 / 0.75), (0.9, 1 / 0.19), (0.99, 8), (1.0, 8)):
        agent = dataclasses.replace(
            stage.agent, learner=dataclasses.replace(learn, discount=discount)
        )
        scale = reward_scale(setup_of(stage.policy, agent), stage.env.market)
        assert scale == pytest.approx(1 / (spread * horizon**0.5), rel=1e-4)
    # A full position of a quarter of the size earns a quarter.
    config = dataclasses.replace(stage.env.config, size=stage.env.spec.bounds[1] / 4)
    small = TradingEnv(stage.env.bars, config)
    setup = setup_of(make_policy(agent, small.spec), agent)
    assert reward_scale(setup, small.market) == pytest.approx(4 * float(scale), rel=1e-4)


def test_steps_of_an_update_are_those_of_all_accounts(stage):
    assert stage.learner(8).steps_per_update == 16 * 8 * 2
    two = dataclasses.replace(stage.agent, num_seeds=2)
    policy = make_policy(two, stage.env.spec)
    assert make_learner(stage.env, policy, two).steps_per_update == 2 * 16 * 8 * 2


def test_prices_that_always_move_by_the_same_are_scaled_by_it():
    env = probes.make("rising").env()
    setup = setup_of(None, AgentConfig(learner=LearnerConfig(discount=0.9)))
    want = 1 / (np.log(1.01) * (1 / 0.19) ** 0.5)
    assert reward_scale(setup, env.market) == pytest.approx(want, rel=1e-2)
