"""The update at which training stops: chosen by bars that none trains on, and by no others."""

import dataclasses
import json
import math
import shutil

import jax
import numpy as np
import pytest
from drawn import random_bars

from nca_trader import AgentConfig, Costs, EnvConfig, Selector, TradingEnv, backtest, train
from nca_trader.cli import main
from nca_trader.cli.train import selection_line
from nca_trader.config import LearnerConfig, OptimizerConfig, PolicyConfig, SelectionConfig
from nca_trader.data.bars import write_bars
from nca_trader.errors import BarError, ConfigError, RunError, StateError
from nca_trader.evaluate.evidence.gate import gate
from nca_trader.runs.checkpoint import Checkpoints
from nca_trader.runs.folder import read_returns
from nca_trader.runs.manifest import Run, Selection
from nca_trader.strategies.baselines import baseline_rules

pytestmark = pytest.mark.usefixtures("quick_compile")
FROM, TO = "2020-08-01", "2020-11-01"
UPDATES, EVERY = 12, 2
PER_UPDATE = 8 * 16 * 2
ENV = EnvConfig(features=("return_1", "rsi"), costs=Costs(commission=5e-4, slippage=2e-4))
AGENT = AgentConfig(
    num_seeds=2,
    policy=PolicyConfig(kind="mlp", channels=4, hidden=0, window=1, head_hidden=4),
    learner=LearnerConfig(
        num_segments=8, segment_length=16, envs_per_segment=2, num_epochs=1, num_minibatches=1
    ),
    optimizer=OptimizerConfig(learning_rate=0.05),
    selection=SelectionConfig(scores=UPDATES // EVERY, patience=99),
)


@pytest.fixture(scope="module")
def bars():
    return random_bars(np.random.default_rng(5), 400, 2, missing=0.03)


@pytest.fixture(scope="module")
def env(bars):
    return TradingEnv(bars.between(None, FROM), ENV)


@pytest.fixture(scope="module")
def select(bars):
    return Selector(bars, FROM, TO)


def trained(env, path, select, agent=AGENT, **kwargs):
    return train(env, agent, path, steps=UPDATES * PER_UPDATE, select=select, **kwargs)


@pytest.fixture(scope="module")
def whole(env, select, tmp_path_factory):
    """A run that was never stopped, and the parameters after each scored update."""
    seen = {}

    class Watched(Selector):
        def returns(self, run, params, seed=None):
            if seed is None:
                seen[len(seen) * EVERY + EVERY] = params
            return super().returns(run, params, seed)

    watched = Watched(select.bars, FROM, TO)
    return trained(env, tmp_path_factory.mktemp("runs") / "whole", watched), seen


def ratio(returns, bars):
    return returns.mean() / returns.std(ddof=1) * math.sqrt(bars.bars_per_year)


def same(tree, other):
    return all(map(np.array_equal, jax.tree.leaves(tree), jax.tree.leaves(other)))


def test_the_run_acts_as_after_the_update_with_the_best_score(whole, bars):
    run, seen = whole
    scores = {row["update"]: row["selection"] for row in run.metrics() if "selection" in row}
    assert list(scores) == list(range(EVERY, UPDATES + 1, EVERY)) == list(seen)
    best = max(scores, key=scores.__getitem__)
    found = run.selection
    assert (found.update, found.scored, found.ended) == (best, len(scores), False)
    assert found.selected is None and found.score == scores[best]
    assert same(run.params(), seen[best]) and not same(
        run.params(), seen[EVERY if best > EVERY else UPDATES]
    )
    # A backtest of what was saved comes to the same, and so does a ratio computed by hand.
    again = backtest(bars, Run(run.path), start=FROM, stop=TO, look=False)
    equity = np.r_[1.0, again.equity.to_numpy()]
    assert found.score == pytest.approx(ratio(equity[1:] / equity[:-1] - 1.0, bars), rel=1e-6)
    for seed, score in enumerate(found.sharpe):
        alone = backtest(bars, Run(run.path, seed=seed), start=FROM, stop=TO, look=False)
        assert score == pytest.approx(alone.metrics["sharpe"], rel=1e-6)


def test_the_returns_of_every_score_stay_with_the_run(whole, bars):
    run, _ = whole
    table = read_returns(run)
    assert table.shape == (bars.row(TO) - bars.row(FROM), UPDATES // EVERY)
    for row in run.metrics():
        if "selection" in row:
            column = table[str(row["update"])].to_numpy()
            assert row["selection"] == pytest.approx(ratio(column, bars), rel=1e-9)


@pytest.mark.heavy
def test_selection_does_not_touch_training(whole, env, tmp_path):
    _, seen = whole
    plain = trained(env, tmp_path / "plain", None)
    assert plain.selection is None and same(plain.params(), seen[UPDATES])


@pytest.mark.heavy
def test_bars_after_the_span_decide_nothing(env, bars, select, tmp_path):
    later = np.arange(len(bars)) >= bars.row(TO)
    scaled = {
        name: np.where(later[:, None], 7.0, 1.0) * getattr(bars, name)
        for name in ("open", "high", "low", "close")
    }
    other = Selector(dataclasses.replace(bars, **scaled), FROM, TO)
    params = trained(env, tmp_path / "short", None).params()
    run = Run(tmp_path / "short")
    assert other.data.sha256 == select.data.sha256
    np.testing.assert_array_equal(other.returns(run, params), select.returns(run, params))
    # And the span itself decides: with other bars there the returns are others.
    inside = (np.arange(len(bars)) >= bars.row("2020-09-01"))[:, None]
    moved = {name: np.where(inside, 1.5, 1.0) * getattr(bars, name) for name in scaled}
    changed = Selector(dataclasses.replace(bars, **moved), FROM, TO).returns(run, params)
    assert not np.array_equal(changed, select.returns(run, params))


class Planned(Selector):
    """Scores that were planned, by number."""

    def __init__(self, select, scores):
        super().__init__(select.bars, FROM, TO)
        self.planned, self.given = list(scores), 0

    def returns(self, run, params, seed=None):
        if seed is not None:
            return np.full(3, 0.0)
        self.given += 1
        return np.full(3, self.planned[self.given - 1])

    def score(self, returns):
        return float(returns[0])


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("scores", "patience", "best", "end", "ended"),
    [
        ((1.0, 3.0, 2.0, 2.5, 4.0, 0.0), 2, 4, 8, True),
        ((1.0, 3.0, 2.0, 4.0, 3.0, 5.0), 2, 12, 12, False),
        # An agent that never trades scores as cash does, above one that loses.
        ((-1.0, math.nan, -2.0, -3.0, -4.0, -5.0), 3, 4, 10, True),
        ((2.0, 2.0, 2.0, 0.0, 0.0, 0.0), 9, 2, 12, False),
    ],
)
@pytest.mark.few(2)
def test_training_ends_when_no_better_score_came(
    env, select, tmp_path, scores, patience, best, end, ended
):
    selection = SelectionConfig(scores=UPDATES // EVERY, patience=patience)
    agent = dataclasses.replace(AGENT, selection=selection)
    planned = Planned(select, scores)
    run = trained(env, tmp_path / "run", planned, agent)
    assert run.metrics()[-1]["update"] == end
    assert (run.selection.update, run.selection.ended) == (best, ended)
    with Checkpoints(run.path / "selected") as kept:
        assert kept.newest()[0] == best
    # Asked for again, it has ended already.
    before = planned.given
    trained(env, tmp_path / "run", planned, agent)
    assert planned.given == before and run.metrics()[-1]["update"] == end


@pytest.mark.heavy
def test_stopped_anywhere_it_goes_on_as_if_it_had_not(whole, env, select, tmp_path):
    run, _ = whole
    path = tmp_path / "broken"

    class Killed(Selector):
        left = 2

        def returns(self, run, params, seed=None):
            # Killed between the scores of the seeds, when half of a score is written.
            if seed == 1 and self.left == 0:
                raise KeyboardInterrupt
            self.left -= seed is None
            return super().returns(run, params, seed)

    for left in (1, 2, 1):
        killed = Killed(select.bars, FROM, TO)
        killed.left = left
        try:
            trained(env, path, killed)
        except KeyboardInterrupt:
            continue
    again = trained(env, path, select)
    assert again.selection == run.selection
    assert read_returns(again).equals(read_returns(run))
    assert same(again.params(), run.params())


def test_other_bars_and_bars_that_trained_are_refused(whole, env, bars, select, tmp_path):
    run, _ = whole
    with pytest.raises(RunError, match=r"stops by a score on 2020-08-01"):
        trained(env, run.path, Selector(bars, FROM, "2020-10-01"))
    with pytest.raises(RunError, match=r"stops by a score on 2020-08-01"):
        trained(env, run.path, None)
    with pytest.raises(ConfigError, match=r"begins on 2020-07-31.*end on 2020-07-31"):
        trained(env, tmp_path / "a", Selector(bars, "2020-07-31", TO))
    assert not (tmp_path / "a").exists()
    with pytest.raises(BarError, match=r"no bar from 2020-11-01"):
        Selector(bars, TO, FROM)


@pytest.mark.heavy
def test_a_damaged_file_of_returns_is_one_line(env, select, tmp_path):
    run = trained(env, tmp_path / "run", select)
    (run.path / "selection.parquet").write_bytes(b"nonsense")
    with pytest.raises(StateError, match=r"selection.parquet: cannot be read"):
        trained(env, tmp_path / "run", select)


def test_a_backtest_begins_after_the_selection_span(whole, bars):
    run, _ = whole
    result = backtest(bars, run)
    assert result.equity.index[0] == bars.index[bars.row(TO)]
    assert result.in_sample == 0


@pytest.mark.heavy
def test_the_span_decides_what_trades(whole, bars, select, tmp_path):
    """The gate again, from the stored returns of every score and backtests of the rules."""
    run, _ = whole
    copy = shutil.copytree(run.path, tmp_path / "run")
    found = select.decide(Run(copy))
    agent = backtest(bars, Run(copy, force_agent=True), start=FROM, stop=TO, look=False)
    rules = baseline_rules(min(round(bars.bars_per_year), bars.row(FROM)))
    given = {"start": FROM, "stop": TO, "account": agent.rules}
    others = {name: backtest(bars, rule, **given).excess_returns for name, rule in rules.items()}
    every = {f"the mean agent after update {k}": v for k, v in read_returns(run).items()}
    want = gate(every, others, bars.bars_per_year)
    assert (found.baseline, found.agent) == (want.baseline, want.agent)
    assert found.bound == pytest.approx(want.bound, rel=1e-2)
    # The choice among all scores is in the bound.
    alone = gate({found.agent: every[found.agent]}, others, bars.bars_per_year)
    assert found.bound < alone.bound
    decided = Run(copy).deployment
    assert decided.sentence == found.sentence and "one-sided 95% bound" in found.sentence
    assert (decided.data.first, decided.data.last) == (select.data.first, select.data.last)
    assert not found.passed and Run(copy).replacement.name == decided.baseline
    traded = backtest(bars, Run(copy))
    assert decided.baseline in traded.name
    assert traded.equity.index[0] == bars.index[bars.row(TO)]


def test_a_single_score_is_not_called_a_choice():
    one = Selection(update=7, score=0.25, scored=1)
    said = "update 7: Sharpe ratio 0.25 of the mean agent on the selection span"
    assert selection_line(one, 3) == said
    assert "the best of 2" in selection_line(dataclasses.replace(one, scored=2), 3)


@pytest.mark.heavy
def test_the_command_trains_before_the_span_and_names_the_update(bars, tmp_path, capsys):
    write_bars(bars, tmp_path / "bars.parquet")
    agent = {"kind": "'mlp'", "channels": 4, "hidden": 0, "window": 1, "head_hidden": 4}
    learner = {
        "num_segments": 8,
        "segment_length": 16,
        "envs_per_segment": 2,
        "num_epochs": 1,
        "num_minibatches": 1,
    }
    text = "".join(
        f"[{name}]\n" + "".join(f"{key} = {value}\n" for key, value in table.items())
        for name, table in (("policy", agent), ("learner", learner), ("selection", {"scores": 3}))
    )
    (tmp_path / "agent.toml").write_text(text)
    words = ["train", "--env", "index_daily", "--agent", str(tmp_path / "agent.toml")]
    words += ["--data", str(tmp_path / "bars.parquet"), "--run", str(tmp_path / "run")]
    words += ["--steps", str(6 * PER_UPDATE), "--json"]
    assert main([*words, "--select", "2020-08-01"]) == 2
    assert "give two dates, FROM:TO" in capsys.readouterr().err
    assert main([*words, "--select", f"{FROM}:{TO}", "--until", "2020-09-01"]) == 2
    assert "train on bars before the selection span" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main([*words, "--select", f"{FROM}:{TO}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    run = Run(tmp_path / "run")
    assert run.manifest.data.last.startswith("2020-07-31")
    assert found["selected_update"] == run.selection.update and found["complete"]
    assert found["gate"]["deployed"] == run.deployment.baseline
    assert run.deployment.sentence in lines
    assert any(
        line.startswith(f"selected: update {run.selection.update}, the best of 3") for line in lines
    )
