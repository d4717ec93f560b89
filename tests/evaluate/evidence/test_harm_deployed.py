"""What trades of an agent that tilts a base rule: itself where it does no harm, else its base."""

import dataclasses

import jax
import numpy as np
import pytest
from drawn import bars_of
from untrained import untrained_run

import nca_trader as nca
from nca_trader.data.bars import write_bars
from nca_trader.errors import RunError
from nca_trader.evaluate.evidence.deploy import decide_deployment, deployable
from nca_trader.paper.session.trade import paper_trade
from nca_trader.runs.manifest import Run

BASE = "time_series_momentum(lookback=5)"  # often short in a market that rises
ENV = nca.EnvConfig(actions="weights", episode_bars=20, costs=nca.Costs(commission=2e-4))


def rising(seed, years=6, sharpe=3.0):
    """Daily bars of one asset that rises, so that more of it is better."""
    moves = np.random.default_rng(seed).standard_normal(252 * years)
    close = 100.0 * np.exp(0.01 * (moves + sharpe / np.sqrt(252)).cumsum())
    return bars_of(close, np.append(100.0, close[:-1])[:, None], source="rising")


def tilting(path, bars, tilt, base=BASE):
    """A run whose agent always tilts by so much."""
    agent = nca.load_agent("nano")
    policy = dataclasses.replace(agent.policy, base=base)
    agent = dataclasses.replace(agent, policy=policy, num_seeds=1)
    zero = jax.tree.map(
        np.asarray, nca.make_policy(agent, nca.TradingEnv(bars, ENV).spec).init(jax.random.key(0))
    )

    def planted(where, leaf):
        name = jax.tree_util.keystr(where)
        if "'bias'" in name:
            return np.full_like(leaf, 10.0)  # tanh(10) is 1 in float32
        if "'logits'" in name:
            return np.full_like(leaf, tilt / len(leaf))
        return leaf

    params = zero if tilt == 0.0 else jax.tree_util.tree_map_with_path(planted, zero)
    return untrained_run(path, bars, ENV, agent, params=params)


def decided(run, bars):
    start = str(bars.index[252])
    result = nca.backtest(bars, Run(run.path, force_agent=True), start=start, look=False)
    found = decide_deployment(run, result, {"agent": result.excess_returns}, bars, start)
    return result, found, Run(run.path)


@pytest.mark.heavy
def test_an_untrained_agent_is_its_base_and_may_trade(tmp_path):
    bars = rising(1, years=3)
    run = tilting(tmp_path / "run", bars, 0.0)
    result, found, run = decided(run, bars)
    assert found.harm.differences == found.harm.bounds == (0.0, 0.0)
    assert found.harm.base == run.base.name
    assert not found.passed and found.trades and run.replacement is None
    assert run.deployment.baseline == "" and run.deployment.sentence == found.sentence
    assert found.sentence.startswith("No harm shown, no gain shown: the Sharpe ratio of agent was")
    assert "; deployed: agent. Sharpe ratio less that of its base +0.00" in found.sentence
    base = nca.backtest(bars, run.base, account=ENV.account, start=str(bars.index[252]))
    assert base.equity.equals(result.equity)
    traded = nca.backtest(bars, run, start=str(bars.index[252]))
    assert traded.equity.equals(result.equity)
    assert found.sentence in traded.report(tmp_path / "page.html").read_text()


def test_gate_and_page_compare_the_base_with_cash_and_both_with_hold(tmp_path):
    """Numbers of an independent bootstrap of the same returns."""
    bars = rising(2, years=4)
    run = tilting(tmp_path / "run", bars, 0.5)
    result, found, run = decided(run, bars)
    known = deployable(result, bars, str(bars.index[252]))
    base, hold = known[run.base.name], known["buy and hold"]
    words = (
        found.sentence.split("Sharpe ratios with 95% intervals: ")[1].split(". ")[0].split("], ")
    )
    pairs = ((result, base), (base, None), (result, hold), (base, hold))
    names = "agent less its base", "its base less cash", "agent less hold", "its base less hold"
    rng, num = np.random.default_rng(5), len(result.equity)
    for name, text, (one, two) in zip(names, words, pairs, strict=True):
        given, low, high = map(
            float, text.removeprefix(name).strip("]").replace("[", ",").split(",")
        )
        series = [x.excess_returns for x in (one, two) if x]
        rows = rng.integers(num, size=(2000, num))  # a walk: no block is needed
        ratios = [np.sqrt(252) * x[rows].mean(1) / x[rows].std(1, ddof=1) for x in series]
        wanted = np.quantile(ratios[0] - (ratios[1] if two else 0.0), [0.025, 0.975])
        apart = one.metrics["sharpe"] - (two.metrics["sharpe"] if two else 0.0)
        assert given == pytest.approx(apart, abs=0.006)
        # Positions last, so the blocks of the gate's own bootstrap make it a little wider.
        np.testing.assert_allclose([low, high], wanted, atol=0.03 + 0.3 * np.ptp(wanted))
    page = nca.backtest(bars, Run(run.path, force_agent=True), start=str(bars.index[252]))
    assert found.harm.on_base in page.report(tmp_path / "page.html").read_text()


@pytest.mark.heavy
def test_in_the_place_of_an_agent_that_harms_its_base_trades(tmp_path):
    """It always holds half a position less than its base, in a market that rises."""
    bars = rising(2)
    run = tilting(tmp_path / "run", bars, -1.0)
    result, found, run = decided(run, bars)
    assert found.harm.differences[0] < -0.5 and not found.trades
    assert found.deployed == run.deployment.baseline == run.base.name == run.replacement.name
    assert found.sentence.startswith("No gain shown, and harm not excluded")
    start = str(bars.index[252])
    traded = nca.backtest(bars, run, start=start)
    base = deployable(result, bars, start)[run.base.name]
    assert traded.equity.equals(base.equity) and run.base.name in traded.name
    assert found.sentence in traded.note
    write_bars(bars, tmp_path / "bars.csv")
    said = paper_trade(run.path, f"replay:{tmp_path / 'bars.csv'}", tmp_path / "paper", start=start)
    assert said["agent"] == found.sentence
    assert said["equity"] == pytest.approx(traded.equity.iloc[-1], rel=1e-12)


@pytest.mark.heavy
def test_an_agent_without_a_base_is_asked_one_question(tmp_path):
    bars = rising(4, years=3)
    run = untrained_run(tmp_path / "run", bars, ENV, nca.load_agent("nano"))
    _, found, run = decided(run, bars)
    assert found.harm is None and found.trades == found.passed
    assert found.deployed in (found.agent, found.baseline)


def test_a_base_of_own_code_is_not_loaded_where_none_may_be(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("import nca_trader as nca\nRULE = nca.rules.momentum(5)\n")
    monkeypatch.chdir(tmp_path)
    run = tilting(tmp_path / "run", rising(5, years=2), 0.0, "mine.py:RULE")
    assert Run(run.path).base.name == "momentum 5"
    with pytest.raises(RunError, match=r"own code mine\.py:RULE, which is not loaded here"):
        _ = Run(run.path, allow_code=None).base


@pytest.mark.heavy
def test_an_agent_that_gains_on_its_base_trades(tmp_path):
    bars = rising(3)
    run = tilting(tmp_path / "run", bars, 1.0)
    _, found, run = decided(run, bars)
    assert found.harm.gained and found.trades and run.replacement is None
    assert found.sentence.startswith("Gain shown: agent was shown to be better than")
    # By hand: the same series at twice the costs, whose difference is what is said.
    start = str(bars.index[252])
    twice = nca.Costs(commission=4e-4)
    account = dataclasses.replace(ENV.account, costs=twice)
    ours, theirs = (
        nca.backtest(bars, each, account=account, start=start, look=False)
        for each in (Run(run.path, force_agent=True), run.base)
    )
    apart = ours.metrics["sharpe"] - theirs.metrics["sharpe"]
    assert found.harm.differences[1] == pytest.approx(apart, rel=1e-9)
