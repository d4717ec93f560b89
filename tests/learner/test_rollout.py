"""Rollouts against the environment's own `step`, one account and one bar at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nca_trader.agents import heads
from nca_trader.envs.trading import EnvState, Episode
from nca_trader.learner.rollout import Segments, Span, encode_span

SEGMENTS, LENGTH, ACCOUNTS = 16, 8, 2


def keys(seed):
    return jax.random.split(jax.random.key(seed), SEGMENTS)


def replay(stage, env, segments, fresh, rollout):
    """What `TradingEnv.step` and the window form of the policy say of the same actions.

    Also the accounts as they stand at the end, `[S, E]`.
    """
    field, policy = stage.policy.receptive_field, stage.policy
    rows = np.asarray(segments.index)[:, None] + np.arange(LENGTH + 1)
    history = rows[..., None] - field + 1 + np.arange(field)
    x = env.features[history].reshape(-1, field, 2, 2)
    present = env.bars.present[history].reshape(-1, field, 2)
    cells = jax.jit(policy.encode)(stage.params, x, present)[:, -1].reshape(*rows.shape, 2, 4)
    shown = jax.jit(functools.partial(heads.account_features, policy.spec))

    def one(account, fresh, row, action):
        state = EnvState(jax.random.key(0), row, None, Episode(account), jnp.asarray(10**6))
        _, timestep = env.step(state, action)
        after, over = timestep.observation.account, timestep.discount == 0.0
        after = jax.tree.map(lambda a, b: jnp.where(over, a, b), fresh, after)
        return after, timestep.reward, timestep.discount

    step = jax.jit(jax.vmap(jax.vmap(one, in_axes=(0, 0, None, 0))))
    account, taken = segments.episode.account, []
    seen = [shown(account)]
    for t in range(LENGTH):
        account, *paid = step(account, fresh.account, rows[:, t], rollout.action[:, t])
        seen.append(shown(account))
        taken.append(paid)
    seen = np.stack(seen, axis=1)
    reward, discount = (np.stack(each, axis=1) for each in zip(*taken, strict=True))
    logits, value = jax.jit(policy.act)(stage.params, cells[:, :, None], seen)
    log_prob = heads.log_prob(logits[:, :-1], rollout.action)
    return seen, reward, discount, log_prob, value, account


# Prices six times as high carry the rounding of weights into cash and reward.
@pytest.mark.parametrize(("which", "rounding"), [("env", 1e-7), ("ruinous", 2e-6)])
@pytest.mark.few(1)
def test_a_rollout_is_what_the_environment_does_with_its_actions(stage, which, rounding):
    env = getattr(stage, which)
    segments, fresh = stage.begin(stage.empty_segments(), keys(1))
    after, rollout = stage.collect(env.market, segments, fresh, keys(2))
    seen, reward, discount, log_prob, value, account = replay(stage, env, segments, fresh, rollout)
    np.testing.assert_allclose(rollout.seen, seen[:, :-1], rtol=1e-5, atol=1e-6 + 2 * rounding)
    np.testing.assert_allclose(rollout.reward, reward, rtol=1e-5, atol=rounding)
    np.testing.assert_allclose(rollout.discount, 0.99 * discount, rtol=1e-6)
    np.testing.assert_allclose(rollout.log_prob, log_prob, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(rollout.value, value[:, :-1], rtol=1e-4, atol=1e-5)
    # The value of what followed the last step: the next bar, the account as it stands there.
    np.testing.assert_allclose(rollout.bootstrap, value[:, -1], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(after.episode.account.weight, account.weight, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(after.index, segments.index + LENGTH)
    np.testing.assert_array_equal(after.left, segments.left - LENGTH)
    bankrupt = np.asarray(rollout.discount) == 0.0
    if which == "env":
        assert not bankrupt.any()
    else:
        # Some accounts are bankrupt within the segment; what follows is a fresh account of theirs.
        assert 5 < bankrupt[:, :-1].sum() < bankrupt.size / 2
        s, t, e = np.argwhere(bankrupt[:, :-1])[0]
        first = jax.tree.map(lambda a: a[s, e], fresh)
        np.testing.assert_array_equal(
            rollout.seen[s, t + 1, e], heads.account_features(stage.policy.spec, first.account)
        )
        assert rollout.reward[s, t, e] < -0.9
        assert not np.asarray(after.episode.account.bankrupt).any()


def test_actions_are_drawn_from_the_policy_by_the_segments_own_key(stage):
    segments, fresh = stage.begin(stage.empty_segments(), keys(1))
    market = stage.env.market
    _, rollout = stage.collect(market, segments, fresh, keys(2))
    _, again = stage.collect(market, segments, fresh, keys(2))
    np.testing.assert_array_equal(rollout.action, again.action)
    changed = keys(2).at[3].set(jax.random.key(99))
    _, other = stage.collect(market, segments, fresh, changed)
    differs = np.asarray(rollout.action != other.action).any((1, 2, 3))
    assert differs.tolist() == [i == 3 for i in range(SEGMENTS)]


def test_segments_are_the_same_cells_encoded_together_or_in_parts(stage):
    index = stage.begin(stage.empty_segments(), keys(1))[0].index
    span = Span(index, None, jnp.arange(SEGMENTS, dtype=jnp.uint32))

    @functools.partial(jax.jit, static_argnums=0)
    def encode(parts):
        market = stage.env.market
        return encode_span(stage.policy, stage.params, market, span, LENGTH, parts)

    together = np.asarray(encode(1))
    assert len(np.unique(together[:, 0, 0, 0])) == len(np.unique(index)) > 8
    for parts in (2, SEGMENTS):
        np.testing.assert_allclose(encode(parts), together, rtol=1e-5, atol=1e-6)


def test_an_episode_goes_on_where_it_stood_and_then_begins_anew(stage):
    # Episodes of 16 bars are two segments of 8.
    market = stage.env.market
    first, fresh = stage.begin(stage.empty_segments(), keys(1))
    assert (first.left == 16).all()
    after, _ = stage.collect(market, first, fresh, keys(2))
    second, fresh = stage.begin(after, keys(3))
    fits = np.asarray(after.index) <= len(stage.env) - 1 - LENGTH
    assert 8 <= fits.sum() <= SEGMENTS
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a)[fits], np.asarray(b)[fits]),
        (after.index, after.left, after.episode),
        (second.index, second.left, second.episode),
    )
    after, rollout = stage.collect(market, second, fresh, keys(4))
    held = heads.account_features
    expected = jax.vmap(jax.vmap(lambda a: held(stage.policy.spec, a)))(second.episode.account)
    np.testing.assert_array_equal(rollout.seen[:, 0], expected)
    third, fresh = stage.begin(after, keys(5))
    assert (third.left[fits] == 16).all()
    assert (np.asarray(third.index != after.index))[fits].mean() > 0.8
    drawn = jax.tree.map(lambda a: np.asarray(a)[fits], (third.episode, fresh))
    jax.tree.map(np.testing.assert_array_equal, *drawn)


def test_segments_begin_anywhere_that_has_a_past_and_a_future(stage):
    first, last = stage.policy.first_decision, len(stage.env) - 1 - LENGTH
    assert first == 19 + stage.policy.receptive_field - 1
    segments = stage.empty_segments()
    starts = [stage.begin(segments, keys(s))[0].index for s in range(150)]
    assert set(np.concatenate(starts)) == set(range(first, last + 1))


def test_an_episode_is_over_where_the_data_are(stage):
    # Nine bars short of the end no segment fits, though the episode has decisions left.
    segments = stage.empty_segments()
    last = len(stage.env) - 1 - LENGTH
    index = jnp.where(jnp.arange(SEGMENTS) % 2, last + 1, last).astype(jnp.int32)
    segments = Segments(index, segments.left + LENGTH, None, segments.episode)
    begun, _ = stage.begin(segments, keys(6))
    assert (begun.index[::2] == last).all() and (begun.left[::2] == LENGTH).all()
    assert (begun.index <= last).all() and (begun.left[1::2] == 16).all()
