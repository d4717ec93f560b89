"""Figures that were right once: a change of one needs a sentence that says why it is right now.

`pytest tests/test_golden.py -m "" --rewrite-golden` writes tests/golden.json again. What is known
to be wrong is not in it: alpha, Calmar and tail ratios, the verdicts' own figures, annual figures
of odd calendars, margin calls inside a bar.
"""

import dataclasses
import functools
import json
import math

import gymnasium
import jax
import numpy as np
import pytest
from recording import recording_optimizer
from untrained import untrained_run

import nca_trader as nca
from nca_trader.cli.demo import job_of
from nca_trader.config import (
    AgentConfig,
    EnvConfig,
    LearnerConfig,
    MeshConfig,
    OptimizerConfig,
    PolicyConfig,
)
from nca_trader.envs.trading import TradingEnv
from nca_trader.learner import learner as learners
from nca_trader.learner import update
from nca_trader.paper.journal.journal import read_events
from nca_trader.strategies.baselines import baseline_rules

COSTS = nca.Costs(commission=5e-4, slippage=2e-4)
METRICS = (
    "total_return", "cagr", "annual_volatility", "sharpe", "sortino", "max_drawdown", "hit_rate",
    "skewness", "kurtosis", "exposure", "turnover", "trades", "win_rate", "profit_factor",
    "expectancy",
)  # fmt: skip
F64, F32 = 1e-9, 1e-6
# A network's float32 differs between processors and versions of the compiler, so what it learnt
# differs more, the longer it learnt.
LEARNT, TRAINED = 2e-4, 0.05


@pytest.fixture(scope="module")
def golden(root, pytestconfig):
    """`golden(name, figures, tolerance)` compares figures with the file's, or writes them."""
    path = root / "tests" / "golden.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    rewrite, written = pytestconfig.getoption("--rewrite-golden"), set()

    def check(name, figures, tolerance):
        figures = {key: _plain(value) for key, value in figures.items()}
        # Written by the first of those that share figures; the others are compared with it.
        if rewrite and name not in written:
            written.add(name)
            if name in known and figures == _near(known[name], tolerance):
                return  # as it was, whose last digits stay
            known[name] = figures
            path.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
        assert figures == _near(known[name], tolerance), name

    return check


def _plain(value):
    """Numbers and lists of them as JSON has them; NaN is None."""
    if isinstance(value, list | tuple | np.ndarray):
        return [_plain(x) for x in value]
    if isinstance(value, str | bool | int | np.integer):
        return value if isinstance(value, str) else int(value)
    return None if math.isnan(value) else float(value)


def _near(value, tolerance):
    """Counts and texts are equal, floats are near."""
    if isinstance(value, dict):
        return {key: _near(x, tolerance) for key, x in value.items()}
    if isinstance(value, list):
        return [_near(x, tolerance) for x in value]
    return pytest.approx(value, rel=tolerance, abs=tolerance) if type(value) is float else value


def index_bars():
    return nca.sample_bars("sp500")


@functools.cache
def made_bars():
    """Four assets whose bars carry quotes, dividends and funding; some bars are missing.

    Drawn here, so that no change of another test's market moves these figures.
    """
    rng = np.random.default_rng(20)
    length, assets = 400, 4
    step = 0.02 * rng.standard_normal((2, length, assets))
    close = 50.0 * np.exp(np.cumsum(step.sum(0), axis=0))
    open_ = close * np.exp(-step[1])
    present = rng.random((length, assets)) > 0.05
    present[0], present[:, 0] = True, True
    for t in range(1, length):
        close[t] = np.where(present[t], close[t], close[t - 1])
        open_[t] = np.where(present[t], open_[t], close[t])
    wide = np.where(present, np.exp(0.01 * rng.random((length, assets))), 1.0)
    return nca.Bars(
        time=np.datetime64("2020-01-01", "ns") + np.arange(length) * np.timedelta64(1, "D"),
        symbols=("A", "B", "C", "D"),
        open=open_,
        high=np.maximum(open_, close) * wide,
        low=np.minimum(open_, close) / wide,
        close=close,
        volume=np.where(present, rng.lognormal(8.0, 1.0, (length, assets)), 0.0),
        present=present,
        half_spread=1e-3 * rng.random((length, assets)),
        dividend=np.where(rng.random((length, assets)) < 0.02, 0.3, 0.0),
        funding=1e-4 * rng.standard_normal((length, assets)),
        source="drawn",
    )


def drawn_targets(bars, size):
    """`[N, A]` weights of either sign that change now and then."""
    rng = np.random.default_rng(21)
    targets = size * rng.uniform(-1.0, 1.0, bars.close.shape)
    return np.where(rng.random(bars.close.shape) < 0.3, targets, np.nan)


def account_figures(result, metrics=()):
    """Where equity went; of regular calendars also the metrics."""
    equity, rows = result.equity.to_numpy(), np.linspace(0, len(result.equity) - 1, 7).astype(int)
    flows = {f"flow {name}": x for name, x in result.flows.sum().items() if x}
    return flows | {
        "equity": equity[rows],
        "mean log-equity": np.log(equity).mean(),
        "turnover of all bars": result.turnover.sum(),
        "cost of all bars": result.cost.sum(),
        "held": result.weights.abs().sum().sum(),
        "bars with fills": result.num_fills,
        "orders": len(result.orders),
        "round trips": len(result.trades),
        "profit of trades": result.trades["pnl"].sum() if len(result.trades) else 0.0,
        **{name: result.metrics[name] for name in metrics},
    }


def stopped(strategy):
    return strategy.with_stop(0.03).with_trailing_stop(0.08)


BACKTESTS = {
    "one index, momentum at the close, rebalanced": lambda: nca.backtest(
        index_bars().select("NASDAQ"), nca.rules.momentum(50), COSTS, "close", "rebalance"
    ),
    "two indexes, stops": lambda: nca.backtest(
        index_bars(), stopped(nca.rules.mean_reversion(20, entry=1.5)), COSTS
    ),
    "four assets, venue limits": lambda: nca.backtest(
        made_bars(), drawn_targets(made_bars(), 0.4),
        nca.Costs(commission=5e-4, slippage=2e-4, impact=0.005, fixed_fee=1.0), capital=1e5,
        lot=1.0, min_notional=500.0, max_participation=0.2,
    ),
    "two indexes, crossing of means": lambda: nca.backtest(
        index_bars(), nca.rules.sma_cross(50, 200), COSTS
    ),
    "four assets, borrowed and short": lambda: nca.backtest(
        made_bars(), drawn_targets(made_bars(), 0.9),
        nca.Costs(commission=1e-3, interest_lend=0.02, interest_borrow=0.05, borrow_fee=0.03),
        "close", "on_change", borrow=True, max_gross=2.0, max_net=1.2,
    ),
}  # fmt: skip


@pytest.mark.few(3)
@pytest.mark.parametrize("name", BACKTESTS)
def test_backtests(golden, name):
    metrics = METRICS if "index" in name else ("total_return", "max_drawdown", "exposure")
    golden(name, account_figures(BACKTESTS[name](), metrics), F64)


@pytest.mark.heavy
def test_the_baselines_of_the_demo_s_table(golden):
    job = job_of(None)
    for name, rule in baseline_rules(252).items():
        result = nca.backtest(job.bars, rule, COSTS, start=job.select_until, max_gross=1.0)
        golden(f"demo, {name}", account_figures(result, METRICS), F64)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "precision", "tolerance"),
    [("crossing, f64", "f64", F64), ("crossing, f32", "f32", 1e-5), ("momentum", "f64", F64)],
)
def test_sweeps(golden, name, precision, tolerance):
    if name == "momentum":
        bars, rule, grid = index_bars(), nca.rules.momentum, {"lookback": (10, 50, 120, 250)}
        given = {"fill": "close", "order": "rebalance", "max_gross": 1.0}
    else:
        bars, rule, given = index_bars().select("SP500"), nca.rules.sma_cross, {}
        grid = {"fast": (5, 20, 60), "slow": (40, 100, 200)}
    table = nca.sweep(bars, rule, grid, COSTS, precision=precision, trials=None, **given)
    # Both precisions have the figures of one file: a float32 account is the float64 one, rounded.
    columns = (*table.attrs["parameters"], "equity", *METRICS)
    figures = {column: table[column].tolist() for column in columns}
    golden(f"sweep, {name.partition(',')[0]}", figures, tolerance)


@pytest.mark.heavy
def test_a_walk_forward(golden):
    bars, grid = index_bars().select("SP500"), {"fast": (5, 20, 60), "slow": (40, 100)}
    walk = nca.walk_forward(
        bars, nca.rules.sma_cross, COSTS, grid=grid, train=1000, test=500, purge=5
    )
    figures = account_figures(walk.result, METRICS)
    # The folds' spans are dates; what was chosen are numbers.
    numbers = walk.folds.select_dtypes("number").drop(columns="seconds")
    figures |= {f"fold {name}": column.tolist() for name, column in numbers.items()}
    for name in ("buy and hold", "always flat"):
        figures[f"{name}, equity"] = walk.baselines[name].equity.iloc[-1]
    golden("walk-forward", figures, F64)


@pytest.mark.heavy
def test_a_replay_on_paper(golden, tmp_path):
    bars = index_bars()[-700:]
    nca.write_bars(bars, tmp_path / "bars.parquet")
    feed, journal = f"replay:{tmp_path}/bars.parquet", tmp_path / "paper.db"
    found = nca.paper_trade(nca.rules.sma_cross(5, 20), feed, journal, costs=COSTS)
    events = list(read_events(journal))
    kinds = [event.kind for event in events]
    figures = {key: found[key] for key in ("bars", "orders", "fills", "equity", "value")}
    figures |= {f"events, {kind}": kinds.count(kind) for kind in ("decision", "bar", "halt")}
    golden("paper", figures, F64)


@pytest.mark.heavy
def test_an_agent_over_its_backtest(golden, tmp_path):
    """Its parameters are drawn, so that nothing learnt is in the figures but the network itself."""
    bars = made_bars()
    env = EnvConfig(features=("return_1", "rsi", "bollinger"), costs=COSTS, actions="weights")
    policy = PolicyConfig(channels=8, hidden=8, steps=2, dilations=(1, 2))
    run = untrained_run(tmp_path / "run", bars, env, AgentConfig(policy=policy))
    golden("untrained agent", account_figures(nca.backtest(bars, run, start="2020-03-01")), LEARNT)


def episode_of(env, action_of, every):
    """The figures of one episode of Gymnasium under fixed actions."""
    observation, info = env.reset(seed=5)
    assert env.observation_space.contains(observation)
    seen, rewards, equity, ended = [], [], [info["equity"]], False
    while not ended:
        action = np.asarray(action_of(len(rewards)), env.action_space.dtype)
        observation, reward, terminated, truncated, info = env.step(action)
        seen.append(sum(float(np.sum(x)) for x in jax.tree.leaves(observation)))
        rewards.append(reward)
        equity.append(info["equity"])
        ended = terminated or truncated
    env.close()
    return {
        "bars": len(rewards),
        "reward": math.fsum(rewards),
        "reward squared": float(np.square(rewards).sum()),
        "equity": equity[::every],
        "seen": seen[::every],
    }


@pytest.mark.heavy
@pytest.mark.few(1)
@pytest.mark.parametrize("market", ["ou_mid", "hidden", "garleanu_pedersen", "ring_hop3"])
def test_an_episode_of_a_frozen_market(golden, market):
    """A change here is another environment, of another version."""
    env = gymnasium.make(f"nca_trader/{market}-v1")
    box, shape = isinstance(env.action_space, gymnasium.spaces.Box), env.action_space.shape
    actions = np.random.default_rng(1).integers(0, 3, (1024, *shape))
    figures = episode_of(env, lambda step: actions[step] - 1.0 if box else actions[step], every=60)
    golden(f"frozen {market}", figures, 1e-6)


def test_an_episode_of_gymnasium(golden):
    config = EnvConfig(
        features=("return_1", "rsi"), costs=COSTS, actions="weights", episode_bars=100
    )
    env = gymnasium.make("nca_trader/Trading-v0", bars=made_bars(), config=config, window=8)
    figures = episode_of(env, lambda step: 0.2 * np.sin(np.arange(4) + step / 5.0), every=20)
    golden("gymnasium", figures, 1e-5)


ESTIMATORS = {"gae": "direction", "group": "direction", "exact": "direction", "pathwise": "weights"}
UPDATE = ("loss", "policy_loss", "value_loss", "entropy", "approx_kl", "grad_norm")


@pytest.mark.parametrize(
    ("estimator", "devices"),
    [
        ("gae", 1),
        pytest.param("gae", 8, marks=pytest.mark.slow),
        *(
            pytest.param(estimator, devices, marks=pytest.mark.slow)
            for estimator in ("group", "exact", "pathwise")
            for devices in (1, 8)
        ),
    ],
)
def test_the_first_update(golden, monkeypatch, estimator, devices):
    """One set of figures for both meshes, on which a run is the same."""
    monkeypatch.setattr(update, "make_optimizer", recording_optimizer)
    bars = made_bars()
    # Plain bars of every asset, which each estimator can learn from.
    none = dict.fromkeys(("half_spread", "dividend", "funding"))
    bars = dataclasses.replace(bars, present=np.ones_like(bars.present), **none)
    config = EnvConfig(
        features=("bollinger", "rsi"),
        costs=COSTS,
        reward="pnl" if estimator == "exact" else "log_return",
        actions=ESTIMATORS[estimator],
    )
    learner = LearnerConfig(
        advantages=estimator, num_segments=8, segment_length=16, envs_per_segment=4, num_epochs=1,
        num_minibatches=1,
    )  # fmt: skip
    agent = AgentConfig(
        policy=PolicyConfig(channels=4, hidden=8, steps=2, dilations=(1, 2), head_hidden=4),
        learner=learner,
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_updates=2),
    )
    env = TradingEnv(bars, config)
    policy = nca.make_policy(agent, env.spec)
    learner = learners.make_learner(env, policy, agent, nca.make_mesh(devices))
    state, metrics = learner.step(learner.init(jax.random.key(3)))
    (recorded,) = jax.device_get(
        [x for x in jax.tree.leaves(state.opt_state, is_leaf=_records) if _records(x)]
    )
    figures = {name: float(metrics[name]) for name in UPDATE if name in metrics}
    for path, leaf in jax.tree_util.tree_leaves_with_path(recorded.gradients):
        figures[f"gradient{jax.tree_util.keystr(path)}"] = float(np.linalg.norm(leaf))
    golden(f"first update, {estimator}", figures, LEARNT)


def _records(x):
    return hasattr(x, "gradients")


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("market", ["ou_mid", "hidden", "kelly"])
def test_what_an_agent_learns(golden, market, devices):
    """Too short to reach the optimum, so that the figure still says how fast it learns."""
    agent = dataclasses.replace(nca.load_agent("nano"), mesh=MeshConfig(devices=devices))
    proofs = nca.prove([market], agent, steps=400_000, seeds=(1, 2), controls=False)
    rows = [proof.row() for proof in proofs]
    names = ("fraction", "untrained", "turnover", "steps")
    golden(f"prove {market}", {name: [row[name] for row in rows] for name in names}, TRAINED)
