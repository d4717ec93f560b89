"""Costs of the user's own: a hand ledger, the broker, a sweep, and what is refused."""

import dataclasses
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from drawn import random_bars
from untrained import untrained_run

import nca_trader as nca
from nca_trader import ConfigError, Costs, EnvConfig
from nca_trader.config import AgentConfig, PolicyConfig
from nca_trader.data.bars import write_bars
from nca_trader.envs.account.costs import Cost
from nca_trader.envs.account.state import legs_of
from nca_trader.envs.actions import ActionScheme
from nca_trader.learner import exact, pathwise
from nca_trader.paper.journal.journal import read_events
from nca_trader.paper.session.parity import compare
from nca_trader.paper.session.trade import paper_trade


def venue_fee(trade):
    """A tax on purchases, and a part that grows with the share of the volume that is traded."""
    tax = jnp.where(trade.traded > 0.0, 0.002, 0.0)
    return tax + 0.01 * jnp.abs(trade.units) / trade.volume + 0.1 * trade.half_spread


def maker(trade):
    return jnp.where(trade.traded < 0.0, -2e-4, 0.0)


rebate = Cost(maker, rebate=True)


def nothing(trade):
    return 0.0


def of_weight(trade):
    return 1e-3 * jnp.abs(trade.traded)


def of_root(trade):
    return 1e-3 * jnp.sqrt(jnp.abs(trade.traded))


def quarters_target(spec, action, ordered):
    return jnp.clip(ordered + 0.25 * spec.size * (action - 2), *spec.bounds)


quarters = ActionScheme(quarters_target, choices=5)
OWN = (venue_fee, rebate)
NAMES = [f"{__name__}:venue_fee", f"{__name__}:rebate"]


def quoted_bars(length=100, seed=0):
    rng = np.random.default_rng(seed)
    bars = random_bars(rng, length, 2)
    quotes = rng.uniform(0.0, 1e-3, bars.close.shape)
    return dataclasses.replace(
        bars, volume=rng.uniform(5e3, 2e4, bars.close.shape), half_spread=quotes
    )


def by_hand(bars, targets, commission, slippage, capital):
    """Cash and units at the next open, every bar an order; what each cost took."""
    cash, units, worth, paid = capital, np.zeros(2), [capital], np.zeros(2)
    for t in range(1, len(bars)):
        price = bars.open[t]
        equity = cash + units @ price
        trade = targets[t - 1] * equity / price - units
        fee = np.where(trade > 0, 0.002, 0.0) + 0.01 * abs(trade) / bars.volume[t]
        fee = fee + 0.1 * bars.half_spread[t]
        back = np.where(trade < 0, -2e-4, 0.0)
        worse = slippage + bars.half_spread[t] + fee + back
        sold, bought = np.maximum(-trade, 0.0), np.maximum(trade, 0.0)
        there = cash + (sold * price * (1 - worse)).sum() * (1 - commission)
        need = (bought * price * (1 + worse)).sum() * (1 + commission)
        trade = np.where(trade > 0, trade * min(1.0, max(there, 0.0) / max(need, 1e-300)), trade)
        fill = price * np.where(trade > 0, 1 + worse, 1 - worse)
        cash -= (trade * fill).sum() + commission * (abs(trade) * fill).sum()
        units = units + trade
        paid += [(abs(trade) * price * x).sum() for x in (fee, back)]
        worth.append(cash + units @ bars.close[t])
    return np.array(worth) / capital, paid / capital


@pytest.mark.parametrize("scale", [0.3, 1.3])  # below cash, and cut by cash
def test_own_costs_equal_a_hand_ledger_and_add_up(scale):
    bars = quoted_bars()
    targets = scale * np.random.default_rng(1).dirichlet([1.0, 1.0, 0.5], 100)[:, :2]
    costs = Costs(commission=5e-4, slippage=2e-4, own=OWN)
    assert costs.own == tuple(NAMES)
    result = nca.backtest(bars, targets, costs, order="rebalance", capital=1e5)
    worth, paid = by_hand(bars, targets, 5e-4, 2e-4, 1e5)
    np.testing.assert_allclose(result.equity, worth, rtol=1e-12)
    np.testing.assert_allclose(-result.costs.amount[NAMES], paid, rtol=1e-9)
    assert paid[0] > 0.0 > paid[1]
    assert result.costs.amount["total"] == pytest.approx(result.equity.iloc[-1] - 1.0, abs=1e-14)
    # The table of trades divides the same costs among the fills.
    items = [*NAMES, "commission", "slippage", "spread"]
    assert result.orders.cost.sum() == pytest.approx(-result.costs.amount[items].sum(), rel=1e-12)
    # Scaled as a whole, as a stress test and random costs do.
    twice = nca.backtest(bars, targets, costs.scaled(2.0), order="rebalance", capital=1e5)
    assert twice.costs.amount[NAMES[0]] / result.costs.amount[NAMES[0]] == pytest.approx(2, rel=0.1)


def test_training_pays_in_float32_what_a_backtest_pays_and_draws_the_factor():
    bars = quoted_bars()
    config = EnvConfig(
        features=("return_1",), actions="weights", costs=Costs(commission=5e-4, own=OWN),
        capital=1e5, random_start=False, random_costs=(2.0, 2.0), order="rebalance", short=False,
    )  # fmt: skip
    env = nca.TradingEnv(bars, config)
    length = len(bars) - 1 - env.spec.warmup
    actions = np.random.default_rng(2).uniform(0.0, 0.5, (length, 2)).astype(np.float32)
    state, _ = env.reset(jax.random.key(0))
    _, steps = jax.jit(lambda s, a: jax.lax.scan(env.step, s, a))(state, actions)
    targets = np.full(bars.close.shape, np.nan)
    targets[env.spec.warmup : -1] = actions
    more = {"commission": 1e-3, "own_scale": 2.0, "quote_scale": 2.0}
    costs = dataclasses.replace(config.costs, **more)
    result = nca.backtest(bars, targets, costs, order="rebalance", capital=1e5)
    account = steps.observation.account
    assert account.log_equity.dtype == jnp.float32
    np.testing.assert_allclose(
        np.asarray(account.log_equity), result.log_equity[env.spec.warmup + 1 :], atol=2e-6
    )


def test_no_own_cost_and_one_of_nothing_are_the_same_account_bit_for_bit():
    bars = quoted_bars()
    assert len(jax.tree.leaves(Costs())) == 10  # the program has no input more
    assert legs_of(bars).volume is None
    bare, zero = (
        nca.backtest(bars, nca.rules.momentum(5), Costs(commission=1e-3, slippage=1e-4, own=own))
        for own in (None, (nothing,))
    )
    np.testing.assert_array_equal(bare.log_equity, zero.log_equity)
    assert zero.costs.amount[f"{__name__}:nothing"] == 0.0
    assert list(bare.flows) == [name for name in zero.flows if ":" not in name]


@pytest.mark.heavy
def test_paper_pays_what_the_backtest_pays_with_own_costs_and_actions(tmp_path):
    bars = quoted_bars(140)
    config = EnvConfig(
        features=("return_1", "rsi"), actions=quarters, costs=Costs(commission=5e-4, own=OWN),
        capital=1e5,
    )  # fmt: skip
    agent = AgentConfig(policy=PolicyConfig(channels=8, hidden=8, steps=2, dilations=(1, 2)))
    run = untrained_run(tmp_path / "run", bars, config, agent)
    assert run.manifest.spec["choices"] == 5 and set(run.manifest.code) == {
        *NAMES, f"{__name__}:quarters"
    }  # fmt: skip
    result = nca.backtest(bars, run)
    targets = result.targets.dropna().to_numpy().ravel()
    assert len(set(targets)) > 3 and set(targets) <= {k / 8.0 for k in range(-4, 5)}
    result.save(run.path / "backtest.parquet")
    write_bars(bars, tmp_path / "bars.parquet")
    paper_trade(run.path, f"replay:{tmp_path}/bars.parquet", tmp_path / "paper.db", capital=1e5)
    parity = compare(run.path, tmp_path / "paper.db")
    assert parity.ok and parity.fills > 10, parity.sentence
    assert parity.equity_off == 0.0 and parity.ledger_off < 1e-12
    # A session's own costs belong to its journal, with the digest of their files.
    strategy = nca.rules.momentum(5)
    paper_trade(
        strategy,
        f"replay:{tmp_path}/bars.parquet",
        tmp_path / "own.db",
        costs=Costs(own=(nothing,)),
    )
    started = next(e for e in read_events(tmp_path / "own.db") if e.kind == "run_started")
    assert len(started.body["cost_code"][f"{__name__}:nothing"]["files"]) == 64


@pytest.mark.heavy
def test_estimators_refuse_the_own_costs_that_they_cannot_follow():
    bars = quoted_bars()

    def env(own, **more):
        more = {"actions": "weights", "ruin_floor": 1e-9, "order": "rebalance"} | more
        costs = Costs(own=(own,))
        return nca.TradingEnv(
            bars.select("S0"), EnvConfig(features=("return_1",), costs=costs, **more)
        )

    assert not [x for x in pathwise.obstacles(env(of_weight)) if "own" in x]
    assert "has no finite derivative" in " ".join(pathwise.obstacles(env(of_root)))
    assert "costs.own" in " ".join(exact.obstacles(env(of_weight, actions="direction")))
    assert "quarters' may order any" in " ".join(exact.obstacles(env(of_weight, actions=quarters)))
    with pytest.raises(ConfigError, match=r"reward='pnl' does not pay for costs\.own"):
        EnvConfig(reward="pnl", costs=Costs(own=(of_weight,)))


CODE = """
import jax, jax.numpy as jnp, numpy as np
import nca_trader as nca
from nca_trader.envs.actions import ActionScheme
TABLE = np.ones(500)
calls = []
def raises(trade): return trade.nope
def wide(trade): return jnp.ones(3)
def integer(trade): return 1
def words(trade): return "a"
def branch(trade): return 0.1 if trade.traded[0] > 0 else 0.0
def negative(trade): return jnp.where(trade.traded < 0, -1e-4, 0.0)
def missing(trade): return 0.0 * trade.volume / (0.0 * trade.volume)
def units(trade): return 1e-6 * jnp.abs(trade.units)
def future(trade): return 1e-6 * jnp.asarray(TABLE)[3]
def random(trade): return np.random.rand() * 1e-4
def called(trade):
    return jax.pure_callback(lambda x: 0.0 * np.asarray(x), trade.traded, trade.traded)
def counts(trade):
    calls.append(1)
    return 1e-4 * len(calls)
number = 3
def beyond(spec, action, ordered): return 1.0 * action
beyond_scheme = ActionScheme(beyond, choices=3)
def scalar(spec, action, ordered): return 0.0
scalar_scheme = ActionScheme(scalar)
one_choice = ActionScheme(scalar, choices=1)
no_range, no_end = ActionScheme(scalar, low=1.0, high=1.0), ActionScheme(scalar, high=jnp.inf)
nan_scheme = ActionScheme(lambda spec, action, ordered: jnp.log(action - 5.0))
"""


@pytest.fixture(scope="module")
def own_code(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_steps.py").write_text(textwrap.dedent(CODE))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", r"AttributeError at own_steps\.py line 7 .* has no attribute 'nope'; correct"),
        ("wide", r"returns float64\(3,\); return one fraction, or one per asset"),
        ("integer", r"returns the number 1; return one fraction"),
        ("words", "cost own_steps:words: "),
        ("branch", r"line 11 .*: reads a value that is known only when it runs; write jnp\.where"),
        (
            "negative",
            r"is -0\.0001 of a sale of 0\.001 of equity in S0 at .*; return at least 0, or",
        ),
        (
            "missing",
            "is nan of a purchase of 0.001 of equity in S0 at 2020-01-01.* a finite fraction",
        ),
        ("units", "money and units need capital"),
        ("future", "holds a table of 500 numbers for 100 bars, in which later bars may be"),
        ("random", "is another function at each call, so it keeps state or draws numbers"),
        ("counts", "is another function at each call"),
        ("called", "calls Python from inside the compiled program"),
        ("number", "is the number 3; give a function of a trade, or a Cost"),
        ("absent", "own_steps has no 'absent'; did you mean"),
    ],
)
def test_a_cost_that_cannot_be_trusted_is_refused_in_one_line(own_code, name, message):
    with pytest.raises(ConfigError, match=message) as refused:
        nca.backtest(quoted_bars(), nca.rules.momentum(5), Costs(own=(f"own_steps:{name}",)))
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "beyond_scheme",
            "action 1 after an order of -0.5 is the target 1, not in -0.5 to 0.5; use",
        ),
        ("scalar_scheme", r"return one weight per asset, float32\(2,\)"),
        ("one_choice", "choices=1; give 2 or more, or 0 for a number"),
        ("no_range", "low=1.0, high=1.0 isn't a range; give low below high"),
        ("no_end", "high=inf isn't a range; give low below high"),
        ("nan_scheme", "is the target nan, not in -0.5 to 0.5"),
        ("number", "is the number 3; give an ActionScheme"),
    ],
)
def test_an_action_scheme_that_cannot_be_trusted_is_refused_in_one_line(own_code, name, message):
    config = EnvConfig(features=("return_1",), actions=f"own_steps:{name}")
    with pytest.raises(ConfigError, match=message) as refused:
        nca.TradingEnv(quoted_bars(), config)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"own": ("fee",)}, r"costs\.own='fee' is not known; It may be 'module:name' of your own"),
        ({"own": ()}, r"costs\.own = \(\) names no cost"),
        ({"own": ("a:b", "a:b")}, "names a cost twice"),
        ({"own_scale": 2.0}, "has no effect without costs.own"),
        ({"quote_scale": "2"}, r"costs.quote_scale = '2' is not a number in \[0, inf\)"),
        ({"quote_scale": True}, "costs.quote_scale = True is not a number"),
        ({"own": (lambda trade: 0.0,)}, "has no name that another process can find"),
    ],
)
def test_costs_take_names_and_refuse_other_words(given, message):
    with pytest.raises(ConfigError, match=message):
        Costs(**given)


@pytest.mark.slow
def test_an_object_that_takes_the_name_of_another_takes_its_place():
    bars, before = quoted_bars(), globals()["nothing"]
    paid = []
    try:
        for rate in (1e-3, 2e-3):
            exec(f"def nothing(trade):\n    return {rate}\n", globals())
            result = nca.backtest(bars, nca.rules.momentum(5), Costs(own=(nothing,)))
            paid.append(result.costs.amount[f"{__name__}:nothing"])
    finally:
        globals()["nothing"] = before
        Costs(own=(before,))
    assert paid[1] < 1.9 * paid[0] < 0.0


def test_a_file_with_the_name_of_another_module_is_refused(own_code):
    (own_code / "statistics.py").write_text("def fee(trade):\n    return 0.0\n")
    with pytest.raises(
        ConfigError,
        match=r"^statistics: is a module of Python itself, and not statistics\.py in this fol",
    ):
        nca.backtest(quoted_bars(), nca.rules.momentum(5), Costs(own=("statistics:fee",)))
    named = Costs(own=("statistics.py:fee",))
    assert nca.backtest(quoted_bars(), nca.rules.momentum(5), named).equity.iloc[-1] > 0.0
    assert pd.isna(named.own_scale)


@pytest.mark.heavy
def test_a_sweep_pays_own_costs_as_a_backtest_does():
    bars, costs = quoted_bars(90), Costs(commission=1e-3, own=(of_weight,))
    table = nca.sweep(bars, nca.rules.sma_cross, {"fast": [3, 5], "slow": [10]}, costs=costs)
    for _, row in table.iterrows():
        one = nca.backtest(bars, nca.rules.sma_cross(int(row["fast"]), 10), costs)
        assert row["total_return"] == pytest.approx(one.metrics["total_return"], rel=1e-6)
    assert f"{__name__}:of_weight" in str(table.attrs)
