"""What trades in the place of an agent that was not shown to be better."""

import dataclasses
import json

import numpy as np
import pytest
from drawn import random_bars
from untrained import untrained_run

import nca_trader as nca
from nca_trader import backtest
from nca_trader.config.records import plain
from nca_trader.data.bars import write_bars
from nca_trader.errors import StateError
from nca_trader.evaluate.evidence.deploy import decide_deployment, deployable
from nca_trader.paper.session.trade import paper_trade
from nca_trader.runs.manifest import Deployment, Run
from nca_trader.strategies.baselines import MATCHED, baseline_rules

SENTENCE = "No agent was shown to be better; deployed: momentum."


@pytest.fixture
def deployed(tiny, tmp_path):
    """A copy of a run in whose place a baseline trades, and the name of that."""
    copy = tiny.copy(tmp_path / "t")
    name = list(baseline_rules(20))[2]
    decided = Deployment(baseline=name, year=20, sentence=SENTENCE, data=tiny.run.manifest.data)
    Run(copy.path).write_json("deployment.json", decided)
    return copy, name


@pytest.mark.heavy
def test_the_baseline_trades_at_the_costs_and_limits_of_the_run(deployed, tiny, tmp_path):
    copy, name = deployed
    start = str(tiny.bars.index[205].date())
    result = backtest(tiny.bars, Run(copy.path), start=start)
    account = Run(copy.path).env_config.account
    direct = backtest(tiny.bars, baseline_rules(20)[name], account=account, start=start)
    assert result.equity.equals(direct.equity) and name in result.name
    assert "Out of sample." in str(result) and "chosen by the user" not in str(result)
    page = result.report(tmp_path / "page.html").read_text()
    assert SENTENCE in page and SENTENCE in result.note
    early = backtest(tiny.bars, Run(copy.path), start=str(tiny.bars.index[20].date()))
    assert "IN SAMPLE" in str(early)
    forced = backtest(tiny.bars, Run(copy.path, force_agent=True), start=start)
    page = forced.report(tmp_path / "page.html").read_text()
    assert SENTENCE in page and "not deployed" in page
    agent = backtest(tiny.bars, tiny.run, start=start, look=False)
    assert forced.equity.equals(agent.equity) and not forced.equity.equals(result.equity)


@pytest.mark.heavy
def test_paper_trades_it_too_and_says_so(deployed, tiny, tmp_path):
    copy, _ = deployed
    start = str(tiny.bars.index[205].date())
    write_bars(tiny.bars, tmp_path / "bars.csv")
    feed = f"replay:{tmp_path / 'bars.csv'}"
    result = backtest(tiny.bars, Run(copy.path), start=start)
    said = paper_trade(copy.path, feed, tmp_path / "a", start=start)
    assert said["agent"] == SENTENCE
    assert said["equity"] == pytest.approx(result.equity.iloc[-1], rel=1e-12)
    forced = paper_trade(copy.path, feed, tmp_path / "b", start=start, force_agent=True)
    agent = backtest(tiny.bars, tiny.run, start=start, look=False)
    assert forced["equity"] == pytest.approx(agent.equity.iloc[-1], rel=1e-12)


@pytest.mark.heavy
def test_a_control_is_never_deployed(tmp_path):
    """The exposure-matched hold knows the span that is judged."""
    bars = random_bars(np.random.default_rng(2), 150, 1)
    result = nca.backtest(bars, np.sign(np.sin(np.arange(150.0))), start=str(bars.index[50]))
    held = deployable(result, bars, str(bars.index[50]))
    assert MATCHED in held and MATCHED not in baseline_rules(20)
    run = untrained_run(tmp_path / "run", bars, nca.load_env("index_daily"), nca.load_agent("nano"))
    start = str(bars.index[50])
    found = decide_deployment(run, result, {"agent": result.excess_returns}, bars, start)
    assert found.baseline != MATCHED and found.deployed in (found.agent, *baseline_rules(50))


def test_where_the_agent_is_deployed_it_trades(deployed):
    copy, _ = deployed
    run = Run(copy.path)
    found = plain(run.deployment) | {"baseline": ""}
    run.write_json("deployment.json", found)
    assert run.replacement is None


def test_a_changed_or_unknown_deployment_is_refused(deployed):
    copy, _ = deployed
    run = Run(copy.path)
    run.write_json("deployment.json", plain(run.deployment) | {"baseline": "magic"})
    with pytest.raises(StateError, match="'magic' is not one of buy and hold"):
        _ = run.replacement
    file = copy.path / "deployment.json"
    file.write_text(file.read_text().replace("magic", "buy and hold"))
    with pytest.raises(StateError, match="deployment"):
        backtest(copy.bars, run)
    assert json.loads(file.read_text())["year"] == 20


def test_an_agent_that_is_not_deployed_is_exported_only_by_force(deployed, tmp_path):
    from nca_trader.cli import main

    copy, _ = deployed
    out = tmp_path / "agent.nca"
    given = ["export", "--run", str(copy.path), "--out", str(out), "--data", str(copy.data)]
    assert main(given) == 2 and not out.exists()
    assert main([*given, "--force-agent", "--min-agreement", "0"]) == 0 and out.exists()


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["buy and hold", "equal weight"])
def test_a_hold_in_an_account_that_sizes_by_volatility_buys(tmp_path, name):
    bars = random_bars(np.random.default_rng(2), 300, 2)
    env = dataclasses.replace(nca.load_env("panel_daily"), volatility_span=20)
    assert env.sizing == "volatility"
    run = untrained_run(tmp_path / "run", bars, env, nca.load_agent("nano"))
    decided = Deployment(baseline=name, year=20, sentence=SENTENCE, data=run.manifest.data)
    run.write_json("deployment.json", decided)
    write_bars(bars, tmp_path / "bars.csv")
    done = paper_trade(run.path, f"replay:{tmp_path / 'bars.csv'}", tmp_path / "paper")
    assert done["orders"] >= 2 and done["equity"] != 1.0
    result = nca.backtest(bars, Run(run.path), start=str(bars.index[0]))
    assert done["equity"] == pytest.approx(result.equity.iloc[-1], rel=1e-12)
