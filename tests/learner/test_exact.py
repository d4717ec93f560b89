"""Exact advantages against every sequence of actions in numpy, samples, and the true gradient."""

import dataclasses
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import random_bars, random_params
from scaled import scaled
from tiny import AGENT as TINY
from tiny import ENV, MLP

from nca_trader import ConfigError, Costs, TradingEnv, make_policy
from nca_trader.agents.heads import account_features
from nca_trader.envs.trading import EnvState, Episode
from nca_trader.learner import exact, rollout, sampled
from nca_trader.learner.exact import enumerate_segments, read_states, reopened
from nca_trader.learner.ppo import setup_of

pytestmark = pytest.mark.usefixtures("quick_compile")

AGENT = dataclasses.replace(TINY, policy=MLP)
SEGMENTS, LENGTH, COST, SCALE = 2, 4, 0.02, 30.0
# What advantages are multiplied by: noise that adds up over so many steps, at gamma and at
# gamma lambda, but over no more than a segment has.
UNIT = SCALE * (min(1 / (1 - 0.9**2), 4) / min(1 / (1 - 0.855**2), 4)) ** 0.5
PNL = dataclasses.replace(
    ENV, reward="pnl", episode_bars=None, costs=Costs(commission=0.012, slippage=0.008)
)
LEARNER = dataclasses.replace(
    AGENT.learner,
    num_segments=SEGMENTS,
    segment_length=LENGTH,
    envs_per_segment=2,
    logical_shards=1,
    num_minibatches=1,
    advantages="exact",
    discount=0.9,
)


def parts(config, assets, learner=LEARNER):
    """An environment, a policy with random parameters, and segments at rows 40 and 57."""
    bars = random_bars(np.random.default_rng(1), 80, assets)
    env = TradingEnv(bars, config)
    policy = make_policy(AGENT, env.spec)
    params = random_params(policy)
    keys = jax.random.split(jax.random.key(0), (SEGMENTS, learner.envs_per_segment))
    index = jnp.array([40, 57], jnp.int32)
    left = jnp.full(SEGMENTS, LENGTH, jnp.int32)
    segments = rollout.Segments(index, left, None, jax.jit(jax.vmap(jax.vmap(env.begin)))(keys))
    draw = rollout.Draw(jax.random.split(jax.random.key(1), SEGMENTS), segments.episode)
    setup = agent_setup(policy, learner)
    env.market = scaled(env.market, setup, SCALE)
    return types.SimpleNamespace(**locals())


def agent_setup(policy, learner):
    return setup_of(policy, dataclasses.replace(AGENT, learner=learner))


def on_one_device(function):
    """`function`, compiled, where the data axis has one device."""
    mapped = jax.vmap(lambda args: function(*args), axis_name="data")

    def call(*args):
        out = mapped(jax.tree.map(lambda a: a[None], args))
        return jax.tree.map(lambda a: a[0], out)

    return jax.jit(call)


def gathered(part, learner=LEARNER):
    """The loss `(params, batch) -> Loss`, and what is collected."""
    setup = agent_setup(part.policy, learner)
    market = scaled(part.env.market, setup, SCALE)
    run = on_one_device(lambda *args: exact.collect(setup, args[0], market, *args[1:]))

    def loss(params, batch):
        return exact.loss(setup, params, market, batch)

    return loss, run(part.params, part.segments, part.draw)


def states(part):
    """Log-probabilities and rewards `[S, L, A, P, n]` of all states."""
    span = rollout.Span(part.segments.index, None)
    seen, reward = enumerate_segments(part.env.market, span, LENGTH, part.draw)
    cells = rollout.encode_span(part.policy, part.params, part.env.market, span, LENGTH)
    return read_states(part.policy, part.params, cells, seen), reward


@pytest.fixture(scope="module")
def two():
    """Two assets, actions that move the position a step."""
    part = parts(dataclasses.replace(PNL, actions="orders"), 2)
    part.loss, (part.after, part.batch, part.metrics) = gathered(part)
    part.log_prob, part.reward = jax.jit(lambda: states(part))()
    return part


def leads(env, p, a):
    """Where action a at position p leads."""
    last = len(env.spec.targets) - 1
    return a if env.config.actions == "direction" else min(max(p + a - 1, 0), last)


def pay(part, s, t, asset, p, a):
    """What the step pays, by hand from prices."""
    env, row = part.env, int(part.segments.index[s]) + t
    before, after = (env.spec.targets[q] for q in (p, leads(env, p, a)))
    close, filled_at = env.bars.close[:, asset], env.bars.open[row + 1, asset]
    held, got = np.log(filled_at / close[row]), np.log(close[row + 1] / filled_at)
    return before * held + after * got - COST * abs(after - before)


def test_rewards_are_those_of_the_prices(two):
    for s, t, i, p, a in np.ndindex(two.reward.shape):
        np.testing.assert_allclose(
            two.reward[s, t, i, p, a], pay(two, s, t, i, p, a), rtol=1e-3, atol=1e-6
        )


def test_values_and_occupancies_equal_a_sum_over_all_sequences_of_actions(two):
    pi = np.exp(np.asarray(two.log_prob, np.float64))
    start = np.asarray(two.segments.episode.account.ordered)
    positions = np.asarray(two.env.spec.targets, np.float32)
    for s, i in itertools.product(range(SEGMENTS), range(2)):
        at_first = [np.argmin(abs(positions - x)) for x in start[s, :, i]]
        occupancy = np.zeros((LENGTH, 3))
        for first in at_first:
            for actions in itertools.product(range(3), repeat=LENGTH):
                p, chance = first, 1 / len(at_first)
                for t, a in enumerate(actions):
                    occupancy[t, p] += chance * 3.0 ** (t - LENGTH + 1) / 3  # later ones repeat it
                    chance *= pi[s, t, i, p, a]
                    p = leads(two.env, p, a)
        np.testing.assert_allclose(two.batch.occupancy[s, :, i], occupancy, rtol=1e-4, atol=1e-6)
        for t, p in itertools.product(range(LENGTH), range(3)):
            worth_of = np.zeros(3)  # of each first action, whatever follows
            for actions in itertools.product(range(3), repeat=LENGTH - t):
                here, chance, worth = p, 1.0, 0.0
                for k, a in enumerate(actions):
                    chance *= pi[s, t + k, i, here, a] if k else 1.0
                    worth += 0.9**k * pay(two, s, t + k, i, here, a)
                    here = leads(two.env, here, a)
                worth_of[actions[0]] += chance * worth
            mean = pi[s, t, i, p] @ worth_of
            np.testing.assert_allclose(
                two.batch.advantage[s, t, i, p], UNIT * (worth_of - mean), rtol=2e-3, atol=2e-4
            )


@pytest.mark.parametrize(
    ("assets", "changes"),
    [
        # A move depends on the position, and the cap on a sum with signs.
        (2, {"max_net": 0.7, "actions": "orders"}),
        (2, {"max_gross": 0.6}),
        (1, {}),
    ],
)
@pytest.mark.few(1)
def test_the_gradient_is_that_of_the_expected_return(assets, changes):
    """Of all sequences of joint actions, also where a cap ties the assets to each other."""
    part = parts(dataclasses.replace(PNL, **changes), assets)
    env, targets = part.env, np.asarray(part.env.spec.targets)
    assert exact.coupled(env.market.dynamics) == (assets > 1)
    undiscounted = dataclasses.replace(LEARNER, discount=1.0, entropy_coef=0.0)
    loss, (_, batch, metrics) = gathered(part, undiscounted)
    got = jax.jit(jax.grad(lambda p: loss(p, batch).loss))(part.params)
    joint = np.array(list(itertools.product(range(3), repeat=assets)))  # [J, A]
    actions = np.array(list(itertools.product(joint, repeat=LENGTH)))  # [J^L, L, A]
    before = [np.broadcast_to(joint[:, None], (len(joint), len(actions), assets))]
    for t in range(LENGTH):
        last, each = before[-1], actions[None, :, t]
        step = each if env.config.actions == "direction" else np.clip(last + each - 1, 0, 2)
        before.append(np.broadcast_to(step, last.shape))
    position = np.stack(before, axis=2)  # [J, J^L, L + 1, A]

    def cut(weight):
        over = np.abs(weight).sum(-1) / (env.config.max_gross or np.inf)
        over = np.maximum(over, np.abs(weight.sum(-1)) / (env.config.max_net or np.inf))
        return weight / np.maximum(over, 1.0)[..., None]

    weight = cut(targets[position])
    row = np.asarray(part.segments.index)[:, None] + np.arange(LENGTH)  # [S, L]
    held = np.log(env.bars.open[row + 1] / env.bars.close[row])
    gain = np.log(env.bars.close[row + 1] / env.bars.open[row + 1])  # [S, L, A]
    old, new = weight[:, :, :-1], weight[:, :, 1:]
    worth = np.einsum("jkla,sla->sjk", old, held) + np.einsum("jkla,sla->sjk", new, gain)
    worth -= COST * np.abs(new - old).sum((2, 3))
    at = (np.arange(LENGTH)[:, None], np.arange(assets)[None], position[:, :, :-1], actions[None])
    start = np.asarray(batch.occupancy)[:, 0]  # [S, A, P]
    begins = np.prod([start[:, i, joint[:, i]] for i in range(assets)], axis=0)

    def expected_return(params):
        log_prob, _ = states(types.SimpleNamespace(**vars(part) | {"params": params}))
        chance = [jnp.exp(log_prob[s][at].sum((2, 3))) for s in range(SEGMENTS)]
        return (begins[..., None] * jnp.stack(chance) * worth).sum()

    total, want = jax.jit(jax.value_and_grad(expected_return))(part.params)
    assert metrics["reward"] == pytest.approx(float(total) / (SEGMENTS * LENGTH), rel=1e-4)
    unit = -SCALE * (4 / min(1 / (1 - 0.95**2), 4)) ** 0.5 / (SEGMENTS * LENGTH)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, leaf), expected in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        name = jax.tree_util.keystr(path)
        assert np.abs(leaf).max() > 0 or "value" in name, name  # values are not learnt here
        expected = unit * np.asarray(expected, np.float64)
        atol = 2e-4 * np.abs(expected).max()
        np.testing.assert_allclose(leaf, expected, rtol=1e-4, atol=atol, err_msg=name)


def test_accounts_go_on_from_positions_drawn_by_their_occupancy(two):
    chances = jnp.array([[[0.2, 0.5, 0.3], [0.0, 0.9, 0.1]]] * SEGMENTS)
    wide = jax.tree.map(
        lambda a: jnp.broadcast_to(a[:, :1], (a.shape[0], 4000, *a.shape[2:])),
        two.segments.episode,
    )
    reopen = jax.jit(lambda *given: reopened(two.env.spec, *given))
    episode = reopen(wide, chances, two.draw.keys)
    ordered = np.asarray(episode.account.ordered)
    np.testing.assert_array_equal(ordered, episode.account.weight)
    for i, p in itertools.product(range(2), range(3)):
        share = (ordered[..., i] == np.float32(two.env.spec.targets[p])).mean()
        assert share == pytest.approx(float(chances[0, i, p]), abs=0.03)
    np.testing.assert_array_equal(two.after.index, two.segments.index + LENGTH)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"actions": "weights"}, "actions = 'weights' may order any weight"),
        ({"reward": "drawdown"}, "reward = 'drawdown' remembers the past"),
        ({"random_costs": (0.5, 2.0)}, "random_costs differ by account"),
        (
            {"reward": "log_return", "maintenance_margin": 0.2},
            "maintenance_margin closes positions",
        ),
        ({"reward": "log_return", "delist_after": 3}, "delist_after closes positions"),
        ({"reward": "log_return"}, "log-returns of several assets do not add up.*on_change"),
        ({"reward": "log_return", "order": "rebalance"}, "costs.commission, costs.slippage let"),
        (
            {"reward": "log_return", "max_gross": 0.3},
            r"weights of 1 in all are cut \(set max_gross",
        ),
    ],
)
def test_accounts_of_infinitely_many_states_are_refused_in_one_line(changes, says):
    env = TradingEnv(
        random_bars(np.random.default_rng(1), 80, 2), dataclasses.replace(PNL, **changes)
    )
    with pytest.raises(ConfigError, match=says) as error:
        exact.check_finite(env)
    assert "\n" not in str(error.value) and "take 'gae'" in str(error.value)


def test_a_cap_may_couple_as_many_assets_as_can_be_enumerated():
    def check(assets, max_gross=0.6, **changes):
        bars = random_bars(np.random.default_rng(1), 80, assets)
        config = dataclasses.replace(PNL, max_gross=max_gross, **changes)
        exact.check_finite(TradingEnv(bars, config))

    check(4)
    check(6, short=False)
    with pytest.raises(ConfigError, match="are cut, and have 59,049 moves together"):
        check(5)
    check(5, max_gross=1.0)  # the remedy


@pytest.mark.heavy
def test_hidden_features_are_not_seen_and_their_bars_earn_what_they_earned():
    whole = parts(PNL, 2)
    part = parts(dataclasses.replace(PNL, feature_dropout=0.3), 2)
    part.segments = part.segments._replace(drop=jnp.array([7, 8], jnp.uint32))
    _, (_, batch, metrics) = gathered(part)
    _, (_, seeing, _) = gathered(whole)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((batch, metrics)))
    assert all(np.abs(batch.log_prob - seeing.log_prob)[s].max() > 1e-3 for s in range(SEGMENTS))

    def rewards(part, drop):
        span = rollout.Span(part.segments.index, drop)
        return enumerate_segments(part.env.market, span, LENGTH, part.draw)[1]

    dropping = jax.jit(lambda: rewards(part, part.segments.drop))()
    np.testing.assert_array_equal(dropping, jax.jit(lambda: rewards(whole, None))())


@pytest.fixture(scope="module")
def one():
    """One asset that can be short, flat or long."""
    return parts(PNL, 1)


@pytest.mark.heavy
def test_expected_loss_is_the_mean_of_sampled_ones(one):
    """The environment's own accounts visit states and take actions as the recursion says."""
    many = dataclasses.replace(LEARNER, envs_per_segment=4000)
    part = parts(PNL, 1, many)
    _, drawn = jax.jit(
        lambda draw: rollout.roll_out(part.setup, part.params, part.env.market, part.segments, draw)
    )(part.draw)
    loss, (_, batch, metrics) = gathered(part, many)
    rng = np.random.default_rng(5)
    moved = jax.tree.map(lambda p: p + 0.15 * rng.normal(size=p.shape).astype("f4"), part.params)
    expected = jax.jit(loss)(moved, batch)
    assert 0.05 < expected.clip_fraction < 0.95
    # The sampled loss, account by account, with the exact advantage of its state and action.
    position = np.abs(np.asarray(drawn.seen)[..., 0, 1, None] - np.array([-1.0, 0.0, 1.0])).argmin(
        -1
    )
    s, t, _ = np.indices(position.shape)
    action = np.asarray(drawn.action)[..., 0]
    advantage = np.asarray(batch.advantage)[s, t, 0, position, action]

    @jax.jit
    def each(rollout_, advantage):
        def of_account(seen, action, log_prob, value, advantage):
            alone = rollout_._replace(
                seen=seen[:, :, None], action=action[:, :, None], log_prob=log_prob[:, :, None],
                value=value[:, :, None],
            )  # fmt: skip
            items = (alone, advantage[:, :, None], None)
            return sampled.loss(part.setup, moved, part.env.market, items)

        fields = (rollout_.seen, rollout_.action, rollout_.log_prob, rollout_.value)
        return jax.vmap(of_account, in_axes=2)(*fields, advantage)

    losses = each(drawn, advantage)
    for name, values in losses._asdict().items():
        values = np.asarray(values, np.float64)
        error = values.std() / np.sqrt(len(values))
        assert abs(values.mean() - float(getattr(expected, name))) <= 4 * error, name
    rewards = np.asarray(drawn.reward, np.float64).mean((0, 1))
    error = rewards.std() / np.sqrt(len(rewards))
    assert abs(rewards.mean() - float(metrics["reward"])) < 4 * error
    # And an action's advantage is what accounts earned more from there on, on the mean.
    to_go = np.zeros(many.envs_per_segment)
    for back in reversed(range(LENGTH)):
        to_go = UNIT * np.asarray(drawn.reward, np.float64)[0, back] + 0.9 * to_go
        for p in range(3):
            here = position[0, back] == p
            took = [to_go[here & (action[0, back] == a)] for a in range(3)]
            error = np.hypot(*(x.std() / np.sqrt(len(x)) for x in (took[2], took[0])))
            exact_gap = batch.advantage[0, back, 0, p, 2] - batch.advantage[0, back, 0, p, 0]
            assert abs(took[2].mean() - took[0].mean() - float(exact_gap)) < 4 * error + 1e-4


def test_rebalancing_without_costs_is_finite_too():
    config = dataclasses.replace(
        ENV, order="rebalance", costs=Costs(), episode_bars=None, reward="log_return"
    )
    part = parts(config, 1)
    seen, reward = jax.jit(
        lambda: enumerate_segments(
            part.env.market, rollout.Span(part.segments.index, None), LENGTH, part.draw
        )
    )()
    step = jax.jit(part.env.step)
    rng = np.random.default_rng(2)
    for s in range(SEGMENTS):
        account = jax.tree.map(lambda a, s=s: a[s, 0], part.segments.episode.account)
        p = int(np.argmin(abs(np.array(part.env.spec.targets) - float(account.ordered[0]))))
        row = part.segments.index[s]
        for t in range(LENGTH):
            np.testing.assert_allclose(
                seen[s, t, 0, p], account_features(part.env.spec, account), rtol=1e-5, atol=1e-6
            )
            a = int(rng.integers(3))
            state = EnvState(jax.random.key(0), row + t, None, Episode(account), jnp.asarray(10**6))
            _, timestep = step(state, jnp.array([a]))
            np.testing.assert_allclose(reward[s, t, 0, p, a], timestep.reward, rtol=1e-4, atol=1e-6)
            account, p = timestep.observation.account, a
