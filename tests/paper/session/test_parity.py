"""Backtest and paper agree; and whatever is made to differ in either is found."""

import dataclasses
import json
import os
import re
import subprocess
import sys

import jax
import numpy as np
import pandas as pd
import pytest
from rounding import ROUNDING
from untrained import untrained_run

from nca_trader.config import AgentConfig, EnvConfig, PolicyConfig
from nca_trader.data.bars import frame_of, read_bars, write_bars
from nca_trader.envs import load_env
from nca_trader.errors import RunError, StateError
from nca_trader.evaluate.backtest import backtest
from nca_trader.evaluate.simulate import legs_between, scan_targets
from nca_trader.numerics import float64_on_cpu
from nca_trader.paper.journal.journal import Journal, read_events
from nca_trader.paper.session import agents
from nca_trader.paper.session.parity import compare
from nca_trader.paper.session.rebuild import rebuild
from nca_trader.paper.session.trade import paper_trade
from nca_trader.runs.deciding import inputs_of
from nca_trader.types import Costs

START = "2020-06-01"


def make_run(path, bars, features=("return_1", "rsi", "bollinger"), base="none", **env):
    config = EnvConfig(features=features, costs=Costs(commission=5e-4, slippage=2e-4), **env)
    agent = AgentConfig(
        policy=PolicyConfig(channels=8, hidden=8, steps=2, dilations=(1, 2), base=base)
    )
    return untrained_run(path, bars, config, agent)


@pytest.fixture(scope="module")
def bars(stage):
    return stage.bars(num_bars=260, missing=0.03)


@pytest.fixture(scope="module")
def run(bars, tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "agent", bars)


@pytest.fixture(scope="module")
def files(bars, run, tmp_path_factory):
    """Bars on disk, the backtest's table in the run folder, and an honest journal."""
    folder = tmp_path_factory.mktemp("paper")
    write_bars(bars, folder / "bars.parquet")
    backtest(bars, run, start=START).save(run.path / "backtest.parquet")
    paper_trade(run.path, f"replay:{folder}/bars.parquet", folder / "paper.db", start=START)
    return folder


@pytest.fixture(scope="module")
def honest(run):
    return agents.run_agent(run, run.account)


@pytest.fixture
def table(run, files):
    """Lets a test write another backtest table; the honest one comes back afterwards."""
    path = run.path / "backtest.parquet"
    kept = path.read_bytes()
    yield path
    path.write_bytes(kept)


def test_an_agent_trades_on_paper_as_in_its_backtest(run, files):
    parity = compare(run.path, files / "paper.db")
    assert parity.ok, parity.sentence
    assert (parity.bars, parity.missing, parity.decisions_differ) == (108, 0, 0)
    assert parity.equity_off < 1e-14
    assert parity.ledger_off < 1e-12
    assert parity.logits_off < 1e-5
    assert parity.fills > 20
    assert "agree over 108 bars" in parity.sentence


@pytest.mark.parametrize(
    "env",
    [
        {
            "base": "half_and_half(lookback=30)",
            "actions": "weights",
            "fill": "close",
            "reward": "differential_sharpe",
        },
        {"order": "rebalance"},
        {"actions": "weights", "random_costs": (5.0, 10.0)},
        {"short": False},
        {"reward": "drawdown"},
        {
            "sizing": "volatility",
            "volatility_span": 20,
            "size_cap": 3.0,
            "max_gross": None,
            "borrow": True,
            "dead_band": 0.02,
        },
        {
            "actions": "weights",
            "sizing": "covariance",
            "volatility_span": 20,
            "correlation_span": 30,
            "size_cap": 3.0,
            "max_gross": None,
            "borrow": True,
        },
    ],
)
@pytest.mark.few(1)
def test_other_rules_agree_as_well(bars, tmp_path, env):
    if "sizing" in env and ROUNDING:
        pytest.skip("sizes round otherwise without optimisation; see tests/test_rounding.py")
    agree(bars, tmp_path, **env)


def agree(bars, folder, **run):
    """Backtest and trade all of the bars on paper; return how the two compare."""
    run = make_run(folder / "agent", bars, **run)
    write_bars(bars, folder / "bars.parquet")
    backtest(bars, run, start=str(bars.time[0])).save(run.path / "backtest.parquet")
    paper_trade(run.path, f"replay:{folder}/bars.parquet", folder / "paper.db")
    parity = compare(run.path, folder / "paper.db")
    assert parity.ok, parity.sentence
    assert parity.fills > 10
    return parity


RULES = [{}, {"fill": "close"}, {"order": "rebalance"}, {"reward": "drawdown"}]


def equities(path, bars):
    """Equity of paper and of backtests at its bars: of a run's agent, and of the targets it gave.

    A backtest of targets takes costs as arguments of its program; the third has them as constants,
    which they are on paper and in a run's backtest.
    """
    path.mkdir()
    write_bars(bars, path / "bars.parquet")
    for i, env in enumerate(RULES):
        run = make_run(path / f"agent{i}", bars, **env)
        result = backtest(bars, run, start=str(bars.time[0]))
        paper_trade(run.path, f"replay:{path}/bars.parquet", path / f"{i}.db")
        events = list(read_events(path / f"{i}.db", "snapshot"))
        paper = np.array([e.body["equity"] for e in events])
        at = np.isin(bars.time.astype(int), [e.ts_event for e in events])
        targets = result.targets.to_numpy()
        given = backtest(bars, targets, account=result.rules, look=False)
        with float64_on_cpu():
            legs = legs_between(bars, result.rules, 0, len(bars))
            scan = jax.jit(lambda *xs, r=result.rules: scan_targets.__wrapped__(*xs, r))
            constant = np.exp(np.asarray(scan(legs, targets).log_equity))
        yield paper, result.equity.to_numpy()[at], given.equity.to_numpy()[at], constant[at]


@pytest.mark.slow
def test_equity_on_paper_is_the_backtests_bit_for_bit_as_users_compile_it(tmp_path):
    """In a process of its own: the suite compiles without optimisation, which rounds otherwise."""
    code = (
        "import pathlib, sys; sys.path[:0] = ['tests', 'tests/support']\n"
        "sys.path[:0] = ['tests/paper/session', 'tests/paper']\n"
        "import numpy as np, conftest, test_parity\n"
        "bars = conftest.make_bars(num_bars=400, missing=0.03)\n"
        f"for found in test_parity.equities(pathlib.Path({str(tmp_path / 'x')!r}), bars):\n"
        "    paper, agent, given, constant = found\n"
        "    assert len(paper) > 300 and np.ptp(paper) > 0.01\n"
        "    print((paper != agent).sum(), (paper != constant).sum(), abs(paper / given - 1).max())"
    )
    flags = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=flags, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    for line in found.stdout.splitlines():
        agent, constant, given = line.split()
        assert (agent, constant) == ("0", "0") and float(given) < 1e-15
    assert len(found.stdout.splitlines()) == len(RULES)


def late(inputs):
    """The same inputs with features of the bar before."""

    def init(num_assets):
        return inputs.init(num_assets), np.zeros((num_assets, len(inputs.names)), np.float32)

    def update(state, bar):
        inner, row, base = inputs.update(state[0], bar)
        return (inner, row), state[1], base

    return inputs._replace(init=init, update=update)


@pytest.mark.parametrize("change", ["feature", "fill", "cost"])
@pytest.mark.few(2)
def test_a_change_in_paper_is_found(bars, run, files, stage, tmp_path, change, honest, monkeypatch):
    agent = honest
    if change == "feature":
        monkeypatch.setattr(agents, "inputs_of", lambda *of: late(inputs_of(*of)))
        agent = agents.run_agent(run, run.account)
    changes = {
        "feature": {},
        "fill": {"fill": "close"},
        "cost": {"costs": Costs(commission=5e-4, slippage=2.1e-4)},
    }[change]
    agent = agent._replace(rules=dataclasses.replace(agent.rules, **changes))
    start = int(pd.Timestamp(START, tz="UTC").timestamp())
    stage.replay(tmp_path / "paper.db", bars, agent, start=start)
    parity = compare(run.path, tmp_path / "paper.db")
    assert not parity.ok
    assert "DO NOT AGREE" in parity.sentence


@pytest.mark.parametrize(
    ("column", "row", "change"),
    [
        ("target:AAA", 40, lambda x: x + 0.5),
        ("target:BBB", 107, lambda x: float("nan")),
        ("equity", 0, lambda x: x * (1 + 1e-11)),
        ("equity", 60, lambda x: float("nan")),
        ("logits:AAA:0", 50, lambda x: x + 0.01),
        ("logits:BBB:1", 50, lambda x: float("nan")),
    ],
)
def test_one_changed_number_is_found(run, files, table, column, row, change):
    frame = pd.read_parquet(table)
    frame[column] = frame[column].astype("float64")
    frame.loc[row, column] = change(frame.loc[row, column])
    frame.to_parquet(table, index=False)
    parity = compare(run.path, files / "paper.db")
    assert not parity.ok
    if column.startswith("target"):
        assert parity.decisions_differ == 1
        assert str(frame.loc[row, "time"])[:10] in parity.first_difference


@pytest.mark.parametrize("rows", [slice(1, None), slice(None, -1)])
def test_a_bar_that_one_side_lacks_is_found(run, files, table, rows):
    pd.read_parquet(table).iloc[rows].to_parquet(table, index=False)
    parity = compare(run.path, files / "paper.db")
    assert parity.missing == 1 and not parity.ok


def test_the_ledger_is_of_the_fills_and_of_nothing_else(run, files, tmp_path):
    """One fill that is left out of a copy of the journal is money that does not add up."""
    events = list(read_events(files / "paper.db"))
    fills = [e.seq for e in events if e.kind == "fill"]
    with Journal(tmp_path / "copy.db", lambda: 0) as journal, journal.transaction():
        for event in events:
            body = json.loads(json.dumps(event.body))
            if event.seq != fills[5]:
                journal.record(event.run, event.kind, event.key, body, event.ts_event)
    parity = compare(run.path, tmp_path / "copy.db")
    assert parity.equity_off < 1e-14 and parity.decisions_differ == 0
    assert parity.ledger_off > 1e-4
    assert not parity.ok


def test_what_cannot_be_compared_is_said(run, files, table, tmp_path):
    with Journal(tmp_path / "empty.db", lambda: 0):
        pass
    with pytest.raises(StateError, match="no decision"):
        compare(run.path, tmp_path / "empty.db")
    frame = pd.read_parquet(table)
    frame.drop(columns=["target:BBB"]).to_parquet(table, index=False)
    with pytest.raises(RunError, match="target:BBB"):
        compare(run.path, files / "paper.db")
    table.unlink()
    with pytest.raises(RunError, match="run the backtest first"):
        compare(run.path, files / "paper.db")


def test_an_agent_that_never_trades_is_not_called_proof(run, files):
    quiet = compare(run.path, files / "paper.db")._replace(orders=0, fills=0)
    assert re.search(r"no fill and no cost was compared", quiet.sentence)


def command(*args):
    from nca_trader.cli import main

    try:
        return main([str(arg) for arg in args])
    except SystemExit as end:  # argparse refuses a value that is not in its range
        return end.code


def test_the_command_says_what_it_did_and_twice_is_once(run, files, tmp_path, capsys):
    args = (
        *("paper", "--run", run.path, "--feed", f"replay:{files}/bars.parquet"),
        *("--broker", "simulated", "--journal", tmp_path / "paper.db", "--start", START, "--json"),
    )
    assert command(*args) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert first["bars"] == 260 and first["orders"] > 20 and first["fills"] > 20
    table = pd.read_parquet(run.path / "backtest.parquet")
    assert first["equity"] == pytest.approx(table["equity"].iloc[-1], rel=1e-14)
    assert command(*args) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == first
    assert command("journal", "verify", tmp_path / "paper.db", "--json") == 0
    verified = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert verified == {"events": first["events"], "head": first["head"]}
    data = (tmp_path / "paper.db").read_bytes()
    (tmp_path / "paper.db").write_bytes(data.replace(b'"cash":', b'"cosh":', 1))
    assert command("journal", "verify", tmp_path / "paper.db") == 4
    assert "damaged at seq" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--feed": "alpaca:SPY"}, "--every is missing"),
        ({"--start": "2031-01-01"}, "before --start 2031-01-01"),
    ],
)
def test_bad_input_is_one_line_exit_2_and_nothing_written(
    run, files, tmp_path, monkeypatch, capsys, change, message
):
    monkeypatch.chdir(tmp_path)
    options = {
        "--run": run.path,
        "--feed": f"replay:{files}/bars.parquet",
        "--journal": "paper.db",
    } | change
    assert command("paper", *[x for pair in options.items() for x in pair]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1 and printed.out == ""
    assert not [*tmp_path.iterdir()]


@pytest.mark.heavy
@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.few(1)
def test_a_row_of_no_asset_is_seen_as_in_the_backtest_also_after_a_restart(stage, tmp_path, spread):
    """With `every` a file has rows at which nothing traded; only the backtest saw them once."""
    plain = stage.bars(num_bars=120, missing=0.1)
    frame = frame_of(plain)[plain.present.ravel()].drop(columns="present")
    if spread:
        frame["half_spread"] = 1e-4
    empty = np.arange(20, 119, 9)
    frame = frame[~frame["time"].isin(plain.index[empty])]
    frame.to_csv(tmp_path / "bars.csv", index=False)
    how = {"every": "1d", "repair": "keep-gaps"}
    bars = read_bars(tmp_path / "bars.csv", **how)
    np.testing.assert_array_equal(np.flatnonzero(~bars.present.any(axis=1)), empty)
    features = ("return_1", "cost_in_vol") if spread else ("return_1", "return_5")
    run = make_run(tmp_path / "runs" / "a", bars, features)
    backtest(bars, run).save(run.path / "backtest.parquet")
    feed, whole, parts = f"replay:{tmp_path}/bars.csv", tmp_path / "a.db", tmp_path / "b.db"
    paper_trade(run.path, feed, whole, reading=how)
    found = compare(run.path, whole)
    assert found.ok and found.bars == len(bars) - run.policy.first_decision
    for most in (empty[0] + 1, 30, 500):  # stops right after a row of no asset, and later
        left = iter(range(most))
        stop = lambda left=left: next(left, None) is None  # noqa: E731
        paper_trade(run.path, feed, parts, reading=how, stop=stop)
    for kind in ("bar", "decision", "fill"):
        first, second = ([e.body for e in read_events(x, kind)] for x in (whole, parts))
        assert first == second and first
    assert not rebuild(whole, run.path).difference


@pytest.mark.heavy
def test_features_of_a_panel_with_quotes_agree_as_well(stage, tmp_path):
    bars = stage.bars(num_bars=320, missing=0.03)
    quoted = np.random.default_rng(0).uniform(0, 1e-3, bars.close.shape)
    bars = dataclasses.replace(bars, half_spread=np.where(bars.present, quoted, np.nan))
    panel = load_env("panel_daily")
    parity = agree(bars, tmp_path, features=panel.features, actions=panel.actions)
    assert parity.logits_off < 1e-5
