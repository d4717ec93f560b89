"""Derivatives of what an account earns, against an adjoint and finite differences in numpy."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import random_bars, random_params
from scaled import scaled
from tiny import AGENT as TINY
from tiny import MLP

from nca_trader import ConfigError, Costs, EnvConfig, TradingEnv, make_policy, train
from nca_trader.learner import pathwise, rollout
from nca_trader.learner.pathwise import check_smooth
from nca_trader.learner.ppo import moments, setup_of

pytestmark = pytest.mark.usefixtures("quick_compile")

AGENT = dataclasses.replace(TINY, policy=MLP)
SEGMENTS, LENGTH, ENVS, SCALE = 2, 4, 2, 20.0
COST, QUADRATIC, RISK, SIZE = 0.003, 0.02, 0.05, 2.0
PNL = EnvConfig(
    features=("return_1",), reward="pnl", actions="weights", size=SIZE, fill="close",
    max_gross=None, borrow=True, quadratic_cost=QUADRATIC, risk_aversion=RISK,
    costs=Costs(commission=0.001, slippage=0.002),
)  # fmt: skip
LEARNER = dataclasses.replace(
    AGENT.learner,
    num_segments=SEGMENTS,
    segment_length=LENGTH,
    envs_per_segment=ENVS,
    logical_shards=1,
    advantages="pathwise",
)


def parts(config=PNL, discount=0.8, seed=0, **bars):
    """An environment, random parameters, and segments of accounts with random positions."""
    env = TradingEnv(random_bars(np.random.default_rng(1), 80, 1, **bars), config)
    policy = make_policy(AGENT, env.spec)
    params = random_params(policy, seed)
    keys = jax.random.split(jax.random.key(2), (SEGMENTS, ENVS))
    episode = jax.jit(jax.vmap(jax.vmap(env.begin)))(keys)
    index = jnp.array([40, 57], jnp.int32)
    segments = rollout.Segments(index, jnp.full(SEGMENTS, LENGTH, jnp.int32), None, episode)
    draw = rollout.Draw(jax.random.split(jax.random.key(1), SEGMENTS), episode)
    learner = dataclasses.replace(LEARNER, discount=discount)
    setup = setup_of(policy, dataclasses.replace(AGENT, learner=learner))
    market = scaled(env.market, setup, SCALE)
    collect = jax.jit(functools.partial(pathwise.collect, setup))
    after, batch, figures = collect(params, market, segments, draw)
    loss = jax.jit(lambda p: pathwise.loss(setup, p, market, batch).loss)
    return types.SimpleNamespace(**locals())


plain = functools.cache(lambda discount: parts(discount=discount))


class Hand:
    """The readout and the market's account of a position, in float64; scalars, no jax."""

    def __init__(self, part):
        span = rollout.Span(part.index, None)
        encode = rollout.encode_span
        cells = jax.jit(lambda p: encode(part.policy, p, part.env.market, span, LENGTH))
        self.cells = np.asarray(cells(part.params), np.float64)[:, :, 0]
        self.start = np.asarray(part.episode.account.ordered, np.float64)[..., 0]
        close = part.env.bars.close[:, 0]
        rows = np.asarray(part.index)[:, None] + np.arange(LENGTH)
        self.r = np.log(close[rows + 1] / close[rows])

    def position(self, head, s, t, before):
        seen = np.array([before / SIZE, before / SIZE, 0.0])
        hidden = self.cells[s, t] @ head["cell"] + seen @ head["account"] + head["bias"]
        return SIZE * np.tanh(np.tanh(hidden) @ head["logits"][:, 0])

    def pay(self, s, t, before, now):
        traded = now - before
        smooth = 0.5 * QUADRATIC * traded**2 + 0.5 * RISK * now**2
        return now * self.r[s, t] - COST * abs(traded) - smooth

    def loss(self, head):
        total = 0.0
        for s, e in np.ndindex(SEGMENTS, ENVS):
            held = self.start[s, e]
            for t in range(LENGTH):
                before, held = held, self.position(head, s, t, held)
                total += self.pay(s, t, before, held)
        return -SCALE * total / (SEGMENTS * LENGTH * ENVS)

    def slope(self, head, name, at, discount):
        """The adjoint of one segment and account after the other, by hand."""
        total, h = 0.0, 1e-6
        up, down = (head | {name: head[name].copy()} for _ in "ab")
        up[name][at] += h
        down[name][at] -= h
        for s, e in np.ndindex(SEGMENTS, ENVS):
            path = [self.start[s, e]]
            for t in range(LENGTH):
                path.append(self.position(head, s, t, path[-1]))
            later = 0.0  # what the position held before bar t + 1 is worth from there on
            for t in reversed(range(LENGTH)):
                before, now = path[t], path[t + 1]
                by_cost = -COST * np.sign(now - before) - QUADRATIC * (now - before)
                by_now = self.r[s, t] + by_cost - RISK * now + discount * later
                moved = self.position(up, s, t, before) - self.position(down, s, t, before)
                total += by_now * moved / (2 * h)
                follows = [self.position(head, s, t, before + x) for x in (h, -h)]
                later = -by_cost + by_now * (follows[0] - follows[1]) / (2 * h)
        return -SCALE * total / (SEGMENTS * LENGTH * ENVS)


def head_of(part):
    return {name: np.asarray(leaf, np.float64) for name, leaf in part.params["head"].items()}


AT = [
    ("logits", (2, 0)),
    ("account", (0, 3)),
    ("account", (1, 1)),
    ("cell", (1, 2)),
    ("bias", (0,)),
]


@pytest.mark.parametrize("discount", [0.8, 0.2, 1.0])
@pytest.mark.few(1)
def test_the_gradient_is_the_adjoint_written_by_hand(discount):
    part = plain(discount)
    hand, head = Hand(part), head_of(part)
    assert float(part.loss(part.params)) == pytest.approx(hand.loss(head), rel=1e-4)
    assert float(part.figures["reward"]) == pytest.approx(-hand.loss(head) / SCALE, rel=1e-4)
    got = jax.jit(jax.grad(part.loss))(part.params)["head"]
    for name, at in AT:
        want = hand.slope(head, name, at, discount)
        assert float(got[name][at]) == pytest.approx(want, rel=2e-3, abs=1e-6), name


@pytest.mark.slow
def test_the_pooled_sharpe_ratio_has_the_gradient_of_a_single_pass_in_float64():
    """Two devices hold a half of the returns each, and know the moments of all returns."""
    config = dataclasses.replace(PNL, reward="log_return", risk_aversion=0.0, quadratic_cost=0.0)
    with jax.enable_x64(True):
        part = parts(config, discount=1.0)
        learner = dataclasses.replace(part.setup.config, objective="sharpe")
        setup = part.setup._replace(config=learner)
        params = jax.tree.map(lambda x: x.astype(jnp.float64), part.params)
        halves = [jax.tree.map(lambda x, i=i: x[i : i + 1], part.batch) for i in range(SEGMENTS)]

        def returns(params, items):
            return pathwise.simulate(setup, params, part.market, items)[1]

        measured = [{"pooled": moments(returns(params, half))} for half in halves]
        of_all = jax.tree.map(lambda *x: jnp.stack(x), *measured)
        halves = [pathwise.pool(setup, half, dict(of_all))[0] for half in halves]

        def mean_loss(params):
            losses = [pathwise.loss(setup, params, part.market, half).loss for half in halves]
            return sum(losses) / len(losses)

        def ratio(params):
            all_of = jnp.concatenate([returns(params, half).ravel() for half in halves])
            return all_of.mean() / jnp.sqrt(((all_of - all_of.mean()) ** 2).mean())

        got, want = jax.grad(mean_loss)(params), jax.grad(ratio)(params)
        assert float(mean_loss(params)) == pytest.approx(-float(ratio(params)), rel=1e-9)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, -b, rtol=1e-6, atol=1e-9 * max(np.abs(b).max(), 1.0))
    assert max(np.abs(b).max() for b in jax.tree.leaves(want)) > 1e-2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_epochs": 2}, "num_epochs=2 and num_minibatches=1; set both to 1"),
        ({"advantages": "gae"}, "objective='sharpe' has no effect without advantages='pathwise'"),
        ({"objective": "sortino"}, "objective='sortino'"),
    ],
)
def test_the_pooled_ratio_is_refused_where_it_is_not_exact(changes, said):
    with pytest.raises(ConfigError, match=said):
        dataclasses.replace(LEARNER, **{"objective": "sharpe"} | changes)


def test_the_curriculum_scales_what_the_gradient_is_of():
    part = plain(0.8)
    scales = (jnp.float32(0.0), jnp.float32(1.0))
    draw = part.draw._replace(cost_scale=scales[0], volatility_scale=scales[1])
    _, free, _ = part.collect(part.params, part.market, part.segments, draw)
    hand, head = Hand(part), head_of(part)
    traded = costs = 0.0
    for s, e in np.ndindex(SEGMENTS, ENVS):
        held = hand.start[s, e]
        for t in range(LENGTH):
            before, held = held, hand.position(head, s, t, held)
            traded = abs(held - before)
            costs += COST * traded + 0.5 * QUADRATIC * traded**2
    saved = SCALE * costs / (SEGMENTS * LENGTH * ENVS)
    loss = jax.jit(lambda items: pathwise.loss(part.setup, part.params, part.market, items).loss)
    got = float(loss(free))
    assert got == pytest.approx(float(part.loss(part.params)) - saved, rel=1e-4)


def earned(config, at, monkeypatch):
    """What the accounts of two segments earn, a function of `[S, L, A]` raw actions, in float64."""

    def double(tree):
        leaf = lambda x: x.astype("f8") if jnp.issubdtype(x.dtype, jnp.floating) else x  # noqa: E731
        return jax.tree.map(leaf, tree)

    env = TradingEnv(random_bars(np.random.default_rng(1), 120, 2), config)
    policy = make_policy(AGENT, env.spec)
    # The actions themselves take the place of a network, which computes in float32.
    policy = policy._replace(
        act=lambda params, cells, seen: (
            jnp.broadcast_to(cells, (*seen.shape[:-1], 2)),
            jnp.zeros(seen.shape[:-2]),
        )
    )
    keys = jax.random.split(jax.random.key(2), (SEGMENTS, ENVS))
    episode = double(jax.jit(jax.vmap(jax.vmap(env.begin)))(keys))
    span = rollout.Span(jnp.array([80, 95], jnp.int32), None)
    starts = pathwise.Starts(span, episode, episode, None, None)
    learner = dataclasses.replace(LEARNER, discount=1.0)
    setup, market = (
        setup_of(policy, dataclasses.replace(AGENT, learner=learner)),
        double(env.market),
    )

    def total(cells):
        raw = jnp.stack([cells, jnp.zeros_like(cells)], -1)
        monkeypatch.setattr(pathwise, "encode_span", lambda *_: raw)
        return pathwise.simulate(setup, {}, market, starts)[1].sum()

    return jax.jit(total), jnp.asarray(at)


FREE = dict(max_gross=None, borrow=True)
ACCOUNTS = {
    "sized by volatility": dict(FREE, sizing="volatility", volatility_span=20, size_cap=2.0),
    "sized by covariance": dict(
        FREE,
        sizing="covariance",
        volatility_span=20,
        size_cap=2.0,
        shrinkage=0.3,
        correlation_span=20,
    ),
    "growth": dict(FREE),
    "growth, rebalanced at the close": dict(FREE, order="rebalance", fill="close"),
    "cut to the cash": dict(size=1.0, max_gross=1.2),
    "Sharpe ratio": dict(FREE, reward="differential_sharpe"),
    "mean and variance": dict(FREE, reward="mean_variance", risk_aversion=2.0),
}


@pytest.mark.parametrize("name", ACCOUNTS)
@pytest.mark.few(1)
def test_through_the_account_it_is_the_finite_difference_in_float64(name, monkeypatch):
    with jax.enable_x64(True):
        config = EnvConfig(
            features=("return_1",), actions="weights",
            costs=Costs(commission=0.002, slippage=0.001), **ACCOUNTS[name],
        )  # fmt: skip
        at = np.random.default_rng(0).normal(scale=0.4, size=(SEGMENTS, LENGTH, 2))
        total, at = earned(config, at, monkeypatch)
        got, at = np.asarray(jax.jit(jax.grad(total))(at)), np.asarray(at)
        assert got.dtype == np.float64
        for place in np.ndindex(at.shape):
            moved = np.zeros(at.shape)
            moved[place] = 1e-6
            want = (float(total(at + moved)) - float(total(at - moved))) / 2e-6
            assert got[place] == pytest.approx(want, rel=1e-5, abs=1e-8), place


@pytest.mark.slow
def test_training_ends_in_one_line_where_an_account_goes_bankrupt(tmp_path):
    config = EnvConfig(
        features=("return_1",), actions="weights", size=60.0, max_gross=None, borrow=True,
        costs=Costs(commission=0.001),
    )  # fmt: skip
    # Policies begin near no position, and bars that move by a third end accounts all the same.
    bars = random_bars(np.random.default_rng(1), 90, 1, spread=0.3)
    agent = dataclasses.replace(AGENT, learner=LEARNER)
    with pytest.raises(ConfigError, match="went bankrupt in update") as error:
        train(TradingEnv(bars, config), agent, tmp_path / "run", steps=4_000)
    assert "take 'gae'" in str(error.value) and "\n" not in str(error.value)
    for calm in ({"update": 3, "bankrupt": 0.0}, {"update": 3}):
        pathwise.refuse_bankrupt(calm)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(actions="direction"), "actions = 'direction' may jump"),
        (dict(capital=1e5, lot=1.0), "lot, min_notional or max_participation"),
        (dict(capital=1e5, costs=Costs(fixed_fee=1.0)), "costs.fixed_fee"),
        (dict(capital=1e5, costs=Costs(impact=0.1)), "costs.impact"),
        (dict(maintenance_margin=0.2), "maintenance_margin"),
        (dict(capital=1e5, tick=0.01), "tick rounds prices"),
        (dict(capital=1e5, min_notional=10.0), "lot, min_notional or max_participation"),
        (dict(dead_band=0.01), "dead_band leaves small orders out"),
        (dict(ruin_floor=0.2), "ruin_floor = 0.2 ends accounts"),
    ],
)
def test_what_jumps_is_refused(change, says):
    config = EnvConfig(**{"features": ("return_1",), "actions": "weights", **change})
    env = TradingEnv(random_bars(np.random.default_rng(1), 90, 1), config)
    with pytest.raises(ConfigError, match=says) as error:
        check_smooth(env)
    assert "take 'gae'" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("reward", ["drawdown", "log_return"])
@pytest.mark.heavy
def test_gradients_are_finite_where_accounts_go_bankrupt(reward):
    config = EnvConfig(
        features=("return_1",), reward=reward, actions="weights", size=40.0, max_gross=None,
        borrow=True, ruin_floor=0.5, costs=Costs(commission=0.001),
    )  # fmt: skip
    part = parts(config, missing=0.1)
    solvent = parts(dataclasses.replace(config, ruin_floor=1e-9), missing=0.1)
    assert float(part.figures["reward"]) != float(solvent.figures["reward"])  # some went bankrupt
    leaves = jax.tree.leaves(jax.grad(part.loss)(part.params))
    assert all(np.isfinite(leaf).all() for leaf in leaves)
    assert any(np.abs(leaf).max() > 0 for leaf in leaves)


@pytest.mark.heavy
def test_at_an_order_of_nothing_the_derivative_is_between_those_of_buying_and_selling(monkeypatch):
    """A kink: costs rise on either side."""
    with jax.enable_x64(True):
        at = np.random.default_rng(0).normal(scale=0.4, size=(SEGMENTS, LENGTH, 2))
        at[:, 3] = at[:, 2]
        config = dataclasses.replace(PNL, quadratic_cost=0.0, order="rebalance")
        total, at = earned(config, at, monkeypatch)
        got, h = np.asarray(jax.grad(total)(at)), 1e-6
        for asset in (0, 1):
            here, up, down = (
                float(total(at.at[0, 3:, asset].add(x).at[0, 4:, asset].set(at[0, 4:, asset])))
                for x in (0.0, h, -h)
            )
            right, left = (up - here) / h, (here - down) / h
            assert left - right > 1e-4, "no kink"
            assert right - 1e-6 <= got[0, 3, asset] <= left + 1e-6
