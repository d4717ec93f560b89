"""Policies that tilt on a base rule, against the rule's own account and a formula in numpy."""

import dataclasses
import inspect

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import random_bars
from tiny import AGENT, ENV
from untrained import untrained_run

import nca_trader as nca
from nca_trader import ConfigError
from nca_trader.agents.base import RULES, base_of, env_on_base, strategy_named
from nca_trader.agents.policy import make_policy, stack
from nca_trader.config import PolicyConfig
from nca_trader.data.feature_sets import feature_set
from nca_trader.paper.session import trade as session
from nca_trader.paper.session.agents import run_agent
from nca_trader.runs.exported import Coding, compact, read_run, write_exported
from nca_trader.strategies import rules

BASE = "half_and_half(lookback=20)"
RANKS = "cross_sectional_momentum(lookback=20, weights='ranks')"
SUM = f"1/3 * equal_weight + 0.5 * time_series_momentum(lookback=20) + 0.25 * {RANKS}"
WEIGHTS = dataclasses.replace(ENV, actions="weights", max_gross=None, borrow=True)


def agent_on(base=BASE, seeds=1, **policy):
    given = dataclasses.replace(AGENT.policy, base=base, **policy)
    return dataclasses.replace(AGENT, policy=given, num_seeds=seeds)


@pytest.fixture(scope="module")
def bars():
    return random_bars(np.random.default_rng(4), 260, 3, missing=0.1)


def first_parameters(env, agent):
    policy = make_policy(agent, env.spec)
    keys = jax.random.split(jax.random.key(0), agent.num_seeds)
    each = [jax.tree.map(np.asarray, policy.init(key)) for key in keys]
    return stack(each) if agent.num_seeds > 1 else each[0]


@pytest.mark.parametrize(
    ("base", "seeds", "changes"),
    [
        ("time_series_momentum(lookback=20)", 1, {"short": False, "dead_band": 0.05}),
        (BASE, 3, {"order": "rebalance"}),
        (SUM, 1, {"sizing": "volatility", "size_cap": 2.0, "volatility_span": 10}),
        (SUM, 1, {"sizing": "covariance", "size_cap": 2.0, "volatility_span": 10}),
        (BASE, 3, {"fill": "close", "dead_band": 0.05}),
        # It orders once, and as a base its target stands: with sizes that move, it trades.
        ("buy_and_hold", 1, {"sizing": "volatility", "size_cap": 3.0, "volatility_span": 10}),
    ],
)
@pytest.mark.few(1)
def test_an_agent_that_has_not_learnt_trades_as_its_base(bars, tmp_path, base, seeds, changes):
    """The rule of the run, which a gate compares with, and which trades in the agent's place."""
    agent, env = agent_on(base, seeds), dataclasses.replace(WEIGHTS, **changes)
    params = first_parameters(nca.TradingEnv(bars, env), agent)
    run = untrained_run(tmp_path / "run", bars[:200], env, agent, params)
    own = nca.backtest(bars, run, look=False)
    given = {"account": own.rules, "start": str(own.equity.index[0])}
    alone = nca.backtest(bars, run.base, **given)
    assert own.num_fills > 0 and own.equity.equals(alone.equity)
    assert run.base.name == strategy_named(base).name
    assert own.orders.equals(alone.orders)
    assert (np.asarray(own.targets) >= 0.0).all() or env.short


@pytest.mark.heavy
@pytest.mark.parametrize("ensemble", ["mean", "agreement"])
@pytest.mark.parametrize("short", [True, False])
def test_a_target_is_the_base_and_a_bounded_tilt(bars, tmp_path, ensemble, short):
    agent = dataclasses.replace(agent_on(seeds=2, tilt_limit=0.7), ensemble=ensemble)
    env = dataclasses.replace(WEIGHTS, short=short)
    run = untrained_run(tmp_path / "run", bars[:200], env, agent)
    result = nca.backtest(bars, run, look=False)
    base = np.asarray(nca.backtest(bars, strategy_named(BASE)).targets)[200:]
    base = base if short else np.maximum(base, 0.0)
    # Two logits for each agent, the first the mean before squashing.
    tilts = np.tanh(np.asarray(result.logits, np.float64)[..., ::2])
    tilt = tilts.mean(-1)
    if ensemble == "agreement":
        tilt = tilt * tilt**2 / (tilts**2).mean(-1)
    size = 1.0 / 3.0
    high, low = np.maximum(base, size), np.minimum(base, -size) if short else 0.0
    expected = np.clip(base + 0.7 * size * tilt, low, high)
    np.testing.assert_allclose(result.targets, expected, atol=1e-7)
    assert np.abs(np.asarray(result.targets) - base).max() > 0.01
    # A base beyond the bounds, as of few listed assets, is not cut, and no tilt goes further.
    if short:
        wide = base_of(dataclasses.replace(run.spec, targets=(-0.1, 0.0, 0.1)))
        assert (np.abs(wide.column(bars)) > 0.1).any()


@pytest.mark.heavy
def test_backtest_stream_and_file_of_a_tilted_agent_agree(bars, tmp_path):
    run = untrained_run(tmp_path / "run", bars[:200], WEIGHTS, agent_on(seeds=2))
    own = nca.backtest(bars, run, look=False)
    streamed = nca.backtest(bars, nca.blend({"agent": (run, 1.0)}), look=False)
    np.testing.assert_allclose(streamed.targets, own.targets, atol=1e-6)
    weights = compact(run, run.params(), Coding(bits=16), *[np.zeros((0,))] * 2)
    write_exported(tmp_path / "agent.nca", run, weights)
    exported = nca.backtest(bars, read_run(tmp_path / "agent.nca"), look=False)
    np.testing.assert_allclose(exported.targets, own.targets, atol=1e-3)
    # Other symbols have a base of their own.
    other = random_bars(np.random.default_rng(9), 260, 5)
    assert nca.backtest(other, run, look=False).num_fills > 10


def test_a_step_orders_the_base_and_prices_the_tilt(bars):
    plain = nca.TradingEnv(bars, dataclasses.replace(WEIGHTS, order="rebalance"))
    env = nca.with_base(plain, BASE, tilt_limit=0.5, tilt_penalty=0.01)
    column = base_of(env.spec).column(bars)
    np.testing.assert_array_equal(env.market.legs.base, column.astype(np.float32))
    state, _ = env.reset(jax.random.key(1))
    row = int(state.index)
    np.testing.assert_array_equal(state.episode.account.base, column[row].astype("f4"))
    tilt = np.array([0.0, 0.5, -1.0], np.float32)
    after, timestep = env.step(state, jnp.asarray(tilt))
    target = column[row] + 0.5 / 3.0 * tilt
    target = np.clip(target, np.minimum(column[row], -1 / 3), np.maximum(column[row], 1 / 3))
    same = state._replace(episode=state.episode._replace(
        account=state.episode.account._replace(base=())
    ))  # fmt: skip
    moved, other = plain.step(same, jnp.asarray(target, jnp.float32))
    np.testing.assert_allclose(after.episode.account.held, moved.episode.account.held, atol=1e-6)
    price = 0.01 / 3.0 * (0.25 + 1.0)
    np.testing.assert_allclose(timestep.reward, other.reward - price, atol=1e-6)


def test_gymnasium_tilts_and_shows_the_base(bars):
    env = nca.with_base(nca.TradingEnv(bars, WEIGHTS), BASE)
    column = base_of(env.spec).column(bars).astype("f4")
    one = gymnasium.make("nca_trader/Trading-v0", env=env)
    many = gymnasium.make_vec("nca_trader/Trading-v0", num_envs=2, env=env)
    assert one.action_space.low.tolist() == [-1.0] * 3
    seen, info = one.reset(seed=3, options={"start": 60})
    for _ in range(5):
        np.testing.assert_array_equal(seen[-3:], column[info["row"]])
        before = column[info["row"]]
        seen, _, _, _, info = one.step(np.zeros(3, np.float32))
    # An order of the base is in the account, as long as it was not cut.
    account = seen[-(3 * 3 + 1) :]
    np.testing.assert_allclose(account[3:6], before, atol=1e-6)
    assert many.reset(seed=3)[0].shape == (2, len(seen))


def test_a_live_session_begins_with_the_bars_that_its_base_remembers(bars, tmp_path):
    run = untrained_run(tmp_path / "run", bars[:200], WEIGHTS, agent_on("sma_cross(slow=1500)"))
    assert run.history == run_agent(run, WEIGHTS.account).history == 1500
    assert run.as_strategy(nca.AccountConfig()).memory == 1500
    plain = untrained_run(tmp_path / "plain", bars[:200], WEIGHTS, AGENT)
    features = feature_set(WEIGHTS.features).memory
    assert plain.history == features + plain.policy.receptive_field - 1
    assert plain.history > plain.policy.first_decision + 1


@pytest.mark.parametrize(
    ("base", "said"),
    [
        ("mean_reversion", "train on a rule that does, e.g. half_and_half, or replay a file"),
        ("tests.agents.test_base:OWN", r"state how many as nca.Strategy\(..., memory=BARS\)"),
        ("tests.agents.test_base:SHORT", None),
    ],
)
def test_a_base_without_an_end_of_its_memory_is_refused_live(
    bars, tmp_path, monkeypatch, base, said
):
    class Feed:
        symbols, period = bars.symbols, 86_400
        history = staticmethod(lambda count: bars[-count:])

        def now(self):
            raise NotImplementedError("it was not refused")

    monkeypatch.setattr(session, "open_feed", lambda text, every: Feed())
    run = untrained_run(tmp_path / "run", bars[:200], WEIGHTS, agent_on(base))
    refused = pytest.raises(ConfigError, match=said) if said else pytest.raises(NotImplementedError)
    for strategy in (run.path, nca.blend({"one": (run, 1.0)})):
        with refused:
            nca.paper_trade(strategy, "ccxt:x:A", tmp_path / "live.db", reading={"every": "1d"})
    if base != "mean_reversion":
        return
    # A file holds all bars.
    nca.write_bars(bars[:120], tmp_path / "bars.csv")
    found = nca.paper_trade(run.path, f"replay:{tmp_path}/bars.csv", tmp_path / "paper.db")
    assert found["decisions"] > 50


def test_rules_are_named_as_they_are():
    public = {
        name
        for name, rule in inspect.getmembers(rules, inspect.isfunction)
        if rule.__module__ == rules.__name__ and not name.startswith("_")
    }
    assert public == set(RULES)


REFUSED = [
    (PolicyConfig, {"base": "half_and_hafl"}, "did you mean 'half_and_half'"),
    (PolicyConfig, {"base": "0.5 * momentum + 0.5 * half_and_hafl"}, "mean 'half_and_half'"),
    (PolicyConfig, {"base": "0.5 * momentum + 0.5 * none"}, "base='none' is not known"),
    (PolicyConfig, {"base": "0.5 * momentum + equal_weight"}, r"momentum . equal_weight"),
    (PolicyConfig, {"base": "0.5 * momentum - 1/2 * equal_weight"}, "write a sum as '0.5 . RULE"),
    (strategy_named, {"name": "11 * momentum + 1/2 * equal_weight"}, "11 is above 10"),
    (strategy_named, {"name": f"0.5 * momentum + 0.5 * {RANKS[:-1]}"}, "write values as in cross_"),
    (PolicyConfig, {"tilt_limit": 0.2}, "tilt_limit=0.2 has no effect without base=a rule"),
    (PolicyConfig, {"base": BASE, "tilt_limit": 0.0}, "tilt_limit=0.0"),
    (strategy_named, {"name": "half_and_half(lookback=0)"}, "lookback=0"),
    (strategy_named, {"name": "half_and_half(lookback=5"}, "write values as in half_and_half(look"),
    (strategy_named, {"name": "half_and_half(period=3)"}, "unexpected keyword argument 'period'"),
    (strategy_named, {"name": "tests.support.planted:NOTHING"}, "tests.support.planted"),
]


@pytest.mark.parametrize(("function", "given", "said"), REFUSED)
def test_a_base_that_is_none_is_refused(function, given, said):
    with pytest.raises(ConfigError, match=r".*".join(map(str, [said.replace("(", r"\(")]))):
        function(**given)


@pytest.mark.parametrize("actions", ["direction", "orders"])
def test_a_base_needs_weights(bars, actions):
    env = nca.TradingEnv(bars, dataclasses.replace(ENV, actions=actions))
    with pytest.raises(ConfigError, match=f"base = .* actions = '{actions}'; set actions"):
        nca.with_base(env, BASE)
    learner = dataclasses.replace(AGENT.learner, advantages="exact")
    exact = dataclasses.replace(agent_on(), learner=learner)
    weights = nca.TradingEnv(bars, WEIGHTS)
    with pytest.raises(ConfigError, match=r"'exact' .*base = 'half_and_half"):
        nca.make_learner(weights, make_policy(exact, weights.spec), exact)


def looking(state, bar, portfolio):
    return state, portfolio.weight


def stopping(state, bar):
    return state, nca.Order(jnp.full(bar.close.shape, 0.1), stop_loss=0.9 * bar.close)


LOOKS = nca.Strategy(lambda num_assets: (), looking, "looks")
STOPS = nca.Strategy(lambda num_assets: (), stopping, "stops")
OWN = nca.Strategy(lambda num_assets: (), lambda state, bar: (state, 0.2), "a fifth")
SHORT = dataclasses.replace(OWN, memory=1)
STOPPED = nca.blend({"a": (rules.momentum(20).with_stop(0.1), 1.0)})
MIX = nca.blend({"a": (rules.momentum(20), 0.5), "b": (rules.momentum(30), 0.5)})


def test_a_strategy_of_ones_own_is_a_base(bars, tmp_path):
    env = nca.TradingEnv(bars, WEIGHTS)
    tilted = nca.with_base(env, OWN)
    assert tilted.spec.base == "agents.test_base:OWN" or tilted.spec.base.endswith(":OWN")
    np.testing.assert_allclose(tilted.market.legs.base, 0.2, rtol=1e-6)
    assert env_on_base(tilted, PolicyConfig(base=OWN)) is tilted
    for strategy, said in ((LOOKS, "sees its account"), (STOPS, "carry stops")):
        with pytest.raises(ConfigError, match=said):
            nca.with_base(env, strategy)
    # The agent of an environment with tilts has the same base.
    with pytest.raises(ConfigError, match=r"are tilts of .*OWN"):
        make_policy(AGENT, tilted.spec)


def test_a_base_may_be_a_sum_of_rules(bars):
    def of(base):
        return base_of(nca.with_base(nca.TradingEnv(bars, WEIGHTS), base).spec)

    parts = "equal_weight", "time_series_momentum(lookback=20)", RANKS
    columns, found = [of(part).column(bars) for part in parts], of(SUM)
    wanted = sum(share * x for share, x in zip((1 / 3, 0.5, 0.25), columns, strict=True))
    np.testing.assert_allclose(found.column(bars), wanted, rtol=1e-12, atol=1e-15)
    assert found.strategy.memory == 21 and (found.column(bars) < 0).any()
    named = of("0.5 * momentum(lookback=20) + 0.5 * momentum(lookback=30)").column(bars)
    np.testing.assert_array_equal(of(MIX).column(bars), named)
    for exits in ("1 * breakout", "1/2 * momentum + .5 * breakout", STOPPED):
        with pytest.raises(ConfigError, match="carry stops or targets, which a blend cannot"):
            of(exits)


def test_a_base_may_be_in_a_file(bars, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import nca_trader as nca\n"
        "def fifth(share=0.2):\n"
        "    return nca.Strategy(lambda n: (), lambda state, bar: (state, share), 'mine')\n"
    )
    agent = agent_on(base="mine.py:fifth(share=0.25)")
    run = untrained_run(tmp_path / "run", bars[:200], WEIGHTS, agent)
    assert run.base.name == "mine"
    np.testing.assert_array_equal(base_of(run.spec).column(bars), 0.25)
    agent = agent_on(base="0.5 * mine.py:fifth + 0.5 * mine.py:fifth(share=0.4)")
    run = untrained_run(tmp_path / "sum", bars[:200], WEIGHTS, agent)
    assert set(run.manifest.code) == {"mine.py:fifth", "mine.py:fifth(share=0.4)"}
    np.testing.assert_allclose(base_of(run.spec).column(bars), 0.3)


@pytest.mark.heavy
@pytest.mark.parametrize("advantages", ["gae", "pathwise"])
@pytest.mark.few(1)
def test_learning_moves_the_tilt_from_exactly_nothing(bars, tmp_path, advantages):
    agent = agent_on()
    learner = dataclasses.replace(agent.learner, advantages=advantages)
    env = nca.TradingEnv(bars, WEIGHTS)
    policy = make_policy(agent, env.spec)
    assert not np.any(policy.init(jax.random.key(0))["head"]["logits"])
    run = nca.train(env, dataclasses.replace(agent, learner=learner), tmp_path / "run")
    assert np.any(run.params()["head"]["logits"]) and run.spec.base == BASE
    assert np.isfinite(run.metrics()[-1]["loss"])
