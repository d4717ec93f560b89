"""The search of hyper-parameters: counted, resumed, and independent of the number of workers."""

import dataclasses

import numpy as np
import pytest
from drawn import random_bars
from tiny import AGENT, ENV

import nca_trader as nca
from nca_trader.cli import main
from nca_trader.config.spans import Range, parse_grid, parse_space
from nca_trader.errors import ConfigError, RunError
from nca_trader.evaluate import tune as searching

pytest.importorskip("optuna")
SPACE = {
    "optimizer.learning_rate": Range(low=1e-4, high=1e-2, log=True),
    "learner.num_epochs": Range(choices=(1, 2)),
}


@pytest.fixture(scope="module")
def bars():
    return random_bars(np.random.default_rng(6), 200, 1)


@pytest.fixture
def scored(monkeypatch):
    """Scores that need no training: the best learning rate is 1e-3."""
    calls = []

    def score(setup, overrides, seed):
        calls.append((overrides, seed))
        values = dict(text.split("=") for text in overrides)
        distance = np.log10(float(values["optimizer.learning_rate"])) + 3.0
        return float("nan") if distance > 0.9 else 1.0 - distance**2 + 0.01 * seed

    monkeypatch.setattr(searching, "_score", score)
    return calls


def searched(bars, folder, **more):
    return nca.tune(bars, AGENT, SPACE, folder, **({"env": ENV, "trials": 12, "seeds": 2} | more))


def test_a_search_finds_the_best_and_counts_every_trial(bars, tmp_path, scored):
    found = searched(bars, tmp_path / "runs" / "t")
    assert len(found.trials) == 12 and len(scored) == 24
    best = found.trials["score"].idxmax()
    assert found.score == found.trials["score"].max() > 0.9
    assert found.best.optimizer.learning_rate == found.trials["optimizer.learning_rate"][best]
    assert nca.load_agent(found.path) == found.best
    # Each agent is one trial of the log that deflated statistics read.
    log = nca.trials(tmp_path / "runs")
    assert found.count == 24 == log["trials"].sum() and set(log["kind"]) == {"train"}
    assert found.by_luck > 1.0


def test_a_search_that_was_stopped_proposes_what_an_unbroken_one_would(bars, tmp_path, scored):
    whole = searched(bars, tmp_path / "a" / "t")

    def stop(number, score):
        if number == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        searched(bars, tmp_path / "b" / "t", done=stop)
    again = searched(bars, tmp_path / "b" / "t")
    values = list(SPACE)
    first, second = whole.trials[values].iloc[:8], again.trials[values].iloc[:4]
    assert (first.iloc[:4].to_numpy() == second.to_numpy()).all()
    assert len(again.trials) == 12
    with pytest.raises(RunError, match="a search of something else: seeds was 2 there"):
        searched(bars, tmp_path / "b" / "t", seeds=1)


def test_wrong_searches_are_one_line(bars, tmp_path):
    for more, said in (
        ({"trials": 0}, "trials=0: give a whole number"),
        ({"selection": 1.0}, "selection=1.0: give a share"),
        ({"metric": "sharp"}, "did you mean 'sharpe'"),
        ({"workers": "x"}, "give a number of processes"),
    ):
        with pytest.raises(ConfigError, match=said):
            searched(bars, tmp_path / "t", **more)
    assert not (tmp_path / "t").exists()


def test_a_grid_and_a_space_are_parsed():
    found = parse_grid(["a=1:7:2", "b=0.1,0.2", "c=5:8", "d=0.1:0.3:0.1", "e=null,x"])
    expected = {"a": [1, 3, 5], "b": [0.1, 0.2], "c": [5, 6, 7], "d": [0.1, 0.2], "e": [None, "x"]}
    assert {key: list(values) for key, values in found.items()} == expected
    # To draw from, a range keeps both ends.
    assert parse_grid(["c=5:8"], sampled=True) == {"c": (5, 8)}
    space = parse_space(["x.y=1:9", "x.z=1e-3:1:log", "p.kind=mlp,gru"])
    assert space["x.y"] == Range(low=1, high=9) and isinstance(space["x.y"].low, int)
    assert space["x.z"] == Range(low=1e-3, high=1, log=True)
    assert space["p.kind"].choices == ("mlp", "gru")


@pytest.mark.heavy
def test_a_search_scores_at_true_costs_what_was_trained_at_higher_ones(bars, tmp_path, monkeypatch):
    charged = nca.Costs(commission=2e-3)
    env = dataclasses.replace(ENV, costs=charged, random_costs=(8.0, 8.0))
    seen, backtest = [], searching.backtest

    def noted(*args, **more):
        seen.append(backtest(*args, **more))
        return seen[-1]

    monkeypatch.setattr(searching, "backtest", noted)
    space = {"learner.num_epochs": Range(choices=(1, 2))}
    found = nca.tune(bars, AGENT, space, tmp_path / "t", env=env, trials=1, seeds=1, steps=128)
    (result,) = seen
    # The same orders of an account that knows nothing of runs, at each of the two costs.
    rules = {"order": env.order, "fill": env.fill, "max_gross": env.max_gross}
    start = str(result.equity.index[0])
    true, inflated = (
        nca.backtest(bars.between(start, None), result.targets, costs, **rules).metrics["sharpe"]
        for costs in (charged, charged.scaled(8.0))
    )
    assert found.score == pytest.approx(true, rel=1e-9) and abs(true - inflated) > 0.1


@pytest.mark.heavy
def test_work_that_was_stopped_is_not_resumed_with_other_own_code(
    bars, tmp_path, scored, monkeypatch
):
    """A config names own code, so that its text stays when the file changes."""
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "stored_fee.py"
    mine.write_text("def fee(trade):\n    return 0.0 * trade.price\n")
    costs = nca.Costs(own=("stored_fee:fee",))
    env = dataclasses.replace(ENV, costs=costs)
    rule, grid = nca.rules.sma_cross, {"fast": [2, 5], "slow": [10]}
    kept = {
        "search": lambda: searched(bars, tmp_path / "a/t", trials=2, env=env),
        "sweep": lambda: nca.sweep(bars, rule, grid, costs, resume=tmp_path / "s", trials=None),
        "walk-forward": lambda: nca.walk_forward(
            bars, rule, costs, grid=grid, train=100, test=50, folder=tmp_path / "w", check=False
        ),
    }
    for work in kept.values():
        work()
        work()
    mine.write_text("def fee(trade):\n    return 0.0 * trade.price  # another file\n")
    for what, work in kept.items():
        with pytest.raises(RunError, match=f"a {what} of something else: code.stored_fee:fee"):
            work()


@pytest.mark.heavy
def test_the_commands_tune_and_walkforward_run(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tiny.folder)
    words = f"--env env.toml --agent agent.toml --data bars.csv --folder {tmp_path}/t --json"
    space = "--space optimizer.learning_rate=1e-4:1e-3:log"
    assert main(f"tune {words} {space} --trials 1 --until 2020-07-19".split()) == 0
    assert '"count": 1' in capsys.readouterr().out.splitlines()[-1]
    walk = (
        "walkforward --data bars.csv --strategy momentum --grid lookback=3,9 --train 120 --test 60"
    )
    page = tmp_path / "walk.html"
    assert main([*walk.split(), "--json", "--out", str(page)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith('{"folds": [{') and '"verdict": "Out of sample over 2 folds' in last
    assert "--grid lookback=3,9" in page.read_text() and "Folds, one row each" in page.read_text()
