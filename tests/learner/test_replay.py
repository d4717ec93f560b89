"""The ring against a list, V-trace against its double sum, and a step with replay against none."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scaled import scaled

from nca_trader import (
    AgentConfig,
    ConfigError,
    TradingEnv,
    load_agent,
    make_learner,
    make_mesh,
)
from nca_trader.cli.train import replay_line
from nca_trader.config import LearnerConfig
from nca_trader.learner import sampled
from nca_trader.learner.ppo import vtrace
from nca_trader.learner.rollout import Begun, Draw

pytestmark = pytest.mark.usefixtures("quick_compile")


def item(number):
    return {"a": jnp.full(3, number, jnp.float32), "b": jnp.asarray(number, jnp.int32)}


@pytest.mark.parametrize("slots", [2, 3])
def test_the_ring_holds_the_newest_and_never_reads_what_is_written_next(slots):
    ring = sampled.init(item(0), slots)
    kept = collections.deque(maxlen=slots)
    draw = jax.jit(jax.vmap(sampled.sample, in_axes=(None, 0)))
    keys = jax.random.split(jax.random.key(0), 60)
    add = jax.jit(sampled.add)
    for number in range(1, 3 * slots + 2):  # three times around
        ring = add(ring, item(number))
        kept.append(number)
        readable = list(kept)[1:] if len(kept) == slots else list(kept)
        assert bool(sampled.can_sample(ring)) == bool(readable)
        assert sorted(int(n) for n in ring.data["b"] if n) == sorted(kept)
        seen = draw(ring, keys)
        assert set(np.asarray(seen["b"]).tolist()) == set(readable)
        np.testing.assert_array_equal(seen["a"][:, 0], seen["b"])
        # While the next is written, what was read stays as it was.
        assert int(ring.data["b"][ring.next]) not in set(np.asarray(seen["b"]).tolist())


def test_sampling_too_early_is_refused():
    ring = sampled.init(item(0), 2)
    assert not sampled.can_sample(ring) and not jax.jit(sampled.can_sample)(ring)
    with pytest.raises(ConfigError, match="ring is empty; add a rollout"):
        sampled.sample(ring, jax.random.key(0))
    with pytest.raises(ConfigError, match="give at least 2"):
        sampled.init(item(0), 1)
    with pytest.raises(ConfigError, match="replay_slots=1"):
        LearnerConfig(replay_slots=1)
    with pytest.raises(ConfigError, match="'group' has none"):
        LearnerConfig(replay_slots=2, advantages="group")
    with pytest.raises(ConfigError, match=r"give optimizer\.ema_decay"):
        AgentConfig(learner=LearnerConfig(replay_slots=2))


@pytest.fixture(scope="module")
def steps():
    """Twenty steps with every kind of boundary, values in sequence, and ratios around 1."""
    rng = np.random.default_rng(0)
    value = rng.normal(size=21)
    discount = np.where(rng.random(20) < 0.2, 0.0, 0.9)
    mixing = np.where(rng.random(20) < 0.2, 0.0, 0.8)
    return rng.normal(size=20), discount, value[:-1], value[1:], mixing, rng.normal(size=20)


def test_vtrace_is_the_double_sum(steps):
    r, discount, v_tm1, v_t, mixing, log_rho = steps
    rho = np.minimum(1.0, np.exp(log_rho))
    delta = rho * (r + discount * v_t - v_tm1)
    error = np.array(
        [
            sum(np.prod((discount * mixing * rho)[s:t]) * delta[t] for t in range(s, 20))
            for s in range(20)
        ]
    )
    later = np.append(error[1:], 0.0)
    advantage, target = jax.jit(vtrace)(*steps)
    np.testing.assert_allclose(target, v_tm1 + error, rtol=1e-5, atol=1e-5)
    expected = rho * (r + discount * (v_t + mixing * later) - v_tm1)
    np.testing.assert_allclose(advantage, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_fresh_rollout_out_of_the_ring_is_learnt_from_as_without_it(stage):
    config, params, setup = stage.agent.learner, stage.params, stage.setup
    market = scaled(stage.env.market, setup, 20.0)

    def both(segments, keys, average):
        segments, fresh = stage.begin(segments, keys)
        draw = Draw(keys, fresh)
        _, rollout = sampled.roll_out(setup, params, market, segments, draw)
        kept = sampled.store_rollout(rollout, Begun(segments.episode, fresh))
        ring = sampled.add(sampled.init(kept, 2), kept)
        old = sampled.sample(ring, jax.random.key(0))
        one = lambda tree: jax.tree.map(lambda leaf: leaf[None], tree)  # noqa: E731
        settle = lambda batch, found: sampled.normalize(setup, batch, one(found))[0]  # noqa: E731
        again = settle(*sampled.replay(setup, params, average, market, old, (None, None)))
        args = (setup, params, average, market, old)
        bootstrap = sampled.revalued(*args)[0].bootstrap
        fresh = settle(*sampled.collect(setup, params, market, segments, draw)[1:])
        return fresh, again, rollout, bootstrap

    alone = jax.jit(both)
    segments, keys = stage.empty_segments(), jax.random.split(jax.random.key(1), 16)
    fresh, again, rollout, bootstrap = alone(segments, keys, params)
    # A whole segment is read out at once here and bar by bar there: log-probabilities and values
    # of up to 6 differ by an ulp or two. Each step's error is then at most 2 of a value and 1 of a
    # ratio near 1; over eight steps it sums to at most (1 - d^8) / (1 - d) of that, d = gamma
    # lambda; and advantages are divided by their deviation.
    ulps = 1e-6
    close = lambda a, b, off: np.testing.assert_allclose(a, b, rtol=0, atol=off)  # noqa: E731
    jax.tree.map(lambda a, b: close(a, b, ulps), again[0], fresh[0])
    close(bootstrap, rollout.bootstrap, ulps)
    decay = config.discount * config.gae_lambda
    summed = 3 * ulps * (1 - decay**8) / (1 - decay)
    close(again[2], fresh[2], summed)
    close(again[1], fresh[1], summed / (fresh[2] - rollout.value).std())
    # The average bootstraps values and does nothing else.
    half = jax.tree.map(lambda leaf: 0.5 * leaf, params)
    other = alone(segments, keys, half)[1]
    jax.tree.map(np.testing.assert_array_equal, other[0], again[0])
    assert not np.allclose(other[2][..., -1, :], again[2][..., -1, :], atol=1e-3)


@pytest.mark.slow
def test_an_old_rollout_at_the_costs_of_its_day_is_what_was_collected_ruin_and_all(stage):
    env = stage.ruinous
    keys = jax.random.split(jax.random.key(1), 16)
    segments, fresh = stage.begin(stage.empty_segments(), keys)
    _, rollout = stage.collect(env.market, segments, fresh, keys)
    kept = sampled.store_rollout(rollout, Begun(segments.episode, fresh))
    args = (stage.params, stage.params, env.market, kept)
    again = jax.jit(lambda *args: sampled.revalued(stage.setup, *args)[0])(*args)
    for name in ("seen", "reward", "log_prob", "value", "bootstrap"):
        got, expected = getattr(again, name), getattr(rollout, name)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=5e-6, err_msg=name)
    np.testing.assert_array_equal(again.discount, rollout.discount)
    assert (np.asarray(rollout.discount) == 0.0).sum() > 5


@pytest.mark.parametrize("schedule", ["cosine", pytest.param("linear", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_the_rate_of_a_replayed_run_reaches_zero_with_its_last_gradient_step(stage, schedule):
    """An update without an old rollout takes 2 gradient steps here, each of the others 4."""
    updates, each, warmup = 5, 2, 3
    agent = dataclasses.replace(
        stage.agent,
        learner=dataclasses.replace(
            stage.agent.learner, replay_slots=2, num_epochs=1, steps=updates * 16 * 8 * 2
        ),
        optimizer=dataclasses.replace(
            stage.agent.optimizer, ema_decay=0.9, schedule=schedule, warmup_updates=warmup
        ),
    )
    learner = make_learner(stage.env, stage.policy, agent, make_mesh(1))
    state, rates, moved = learner.init(jax.random.key(0)), [], []
    for _ in range(updates):
        before = jax.device_get(state.params)
        state, metrics = learner.step(state)
        rates.append(float(metrics["lr"]))
        same = jax.tree.map(np.array_equal, jax.device_get(state.params), before)
        moved.append(not all(jax.tree.leaves(same)))
    taken = each * (2 * np.arange(1, updates + 1) - 1)  # gradient steps after each update
    part = np.maximum(taken - warmup, 0) / (taken[-1] - warmup)
    falling = 1 - part if schedule == "linear" else (1 + np.cos(np.pi * part)) / 2
    rising = np.minimum((taken + 1) / warmup, 1)
    peak = agent.optimizer.learning_rate
    np.testing.assert_allclose(rates, peak * rising * falling, rtol=1e-5, atol=1e-9)
    assert all(moved)


def test_ten_million_transitions_of_one_asset_fit_into_a_gigabyte(stage):
    agent = dataclasses.replace(
        stage.agent,
        learner=dataclasses.replace(stage.agent.learner, replay_slots=2),
        optimizer=dataclasses.replace(stage.agent.optimizer, ema_decay=0.9),
    )
    learner = make_learner(stage.env, stage.policy, agent, make_mesh(8))
    state = jax.eval_shape(learner.init, jax.random.key(0))
    one = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), state.replay.data)
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(one))
    assert sampled.transitions_per_gb(one) == 10**9 * 16 * 8 * 2 // held
    assert sampled.transitions_per_gb(one) >= 10_000_000  # of two assets, even
    assert sampled.describe_ring(state.replay).startswith("replay: 512 transitions in 0.01")


def test_one_asset_takes_8_bytes_a_transition_and_44_an_account_of_a_segment(stage):
    changes = ["learner.replay_slots=2", "optimizer.ema_decay=0.99", "learner.segment_length=16"]
    changes += ["policy.steps=1", "policy.dilations=[1]"]
    agent = load_agent("nano", changes)
    env = TradingEnv(stage.env.bars.select(stage.env.bars.symbols[0]), stage.env.config)
    # Of 16 steps of 4 accounts: 8 bytes each, the bar's index, and how each account began, twice.
    per_gb = 16 * 4 / (8 * 16 * 4 + 4 + 4 * 2 * 22) * 1e9
    assert replay_line(env, agent).endswith(f" {per_gb / 1e6:.3g} million per GB")
    assert per_gb > 90e6


def test_presets_keep_no_replay_unless_asked():
    plain = load_agent("nano")
    assert plain.learner.replay_slots == 0
    agent = load_agent("nano", ["learner.replay_slots=4", "optimizer.ema_decay=0.99"])
    assert agent.optimizer == dataclasses.replace(plain.optimizer, ema_decay=0.99)
