"""Walk-forward: spans, one account over stitched decisions, leaks, resuming, and the verdict."""

import functools
import json
import re
import shutil

import drawn
import jax.numpy as jnp
import numpy as np
import pytest

import nca_trader as nca
from nca_trader.cli import main
from nca_trader.config.spans import Spans, Training
from nca_trader.errors import BarError, CheckFailed, ConfigError, RunError, StateError
from nca_trader.evaluate.walkforward import refit, walk
from nca_trader.evaluate.walkforward.folds import make_folds
from nca_trader.evaluate.walkforward.outcome import switching


def bars_of(returns):
    """Daily bars of one asset with these simple returns; each opens at the last close."""
    close = 100.0 * np.cumprod(1.0 + returns)[:, None]
    before = np.concatenate([[[100.0]], close[:-1]])
    return drawn.bars_of(close, before, "2000-01-01", symbols=("X",))


@pytest.fixture(autouse=True)
def one_baseline(monkeypatch):
    """Judges by the cheapest baseline; a test of all of them undoes it."""
    rules = {"buy and hold": nca.rules.buy_and_hold()}
    monkeypatch.setattr(walk, "baseline_rules", lambda *given: dict(rules))


@pytest.fixture(scope="module")
def persistent():
    """Returns of 1 % whose sign is that of the bar before with probability .7, mean 0."""
    rng = np.random.default_rng(5)
    returns = 0.01 * np.cumprod(np.where(rng.random(900) < 0.7, 1.0, -1.0))
    return bars_of(returns - returns.mean())


def follow(bars, side=1):
    """Holds `side` times the sign of the last return; the grid finds the side."""
    close = bars.close[:, 0]
    return side * np.sign(np.diff(close, prepend=close[0]))


SIDES = {"side": (-1, 1)}
SPANS = {"train": 200, "test": 100}


def walked(bars, subject=follow, **more):
    return nca.walk_forward(bars, subject, **(SPANS | {"grid": SIDES} | more))


@pytest.mark.parametrize(
    ("spans", "train", "test"),
    [
        (Spans(train=40, test=20), [(10, 50), (30, 70), (50, 90)], [(50, 70), (70, 90), (90, 110)]),
        (
            Spans(train=40, test=20, purge=3, embargo=2),
            [(10, 45), (30, 65), (50, 85)],
            [(50, 70), (70, 90), (90, 110)],
        ),
        # The first bar is of 2000-01-01: row 31 is of the first of February, row 60 of March.
        (
            Spans(train=20, test=("2000-02-01", "2000-03"), purge=2),
            [(11, 29), (40, 58)],
            [(31, 60), (60, 110)],
        ),
        (
            Spans(train="2000-01-11", test=("2000-02", "2000-03"), embargo=1, scheme="expanding"),
            [(10, 30), (10, 59)],
            [(31, 60), (60, 110)],
        ),
        (Spans(train="2000-01-11", test=("2000-03",)), [(10, 60)], [(60, 110)]),
    ],
)
def test_spans_are_those_of_a_hand_count(spans, train, test):
    folds = make_folds(bars_of(np.zeros(110)), spans)
    assert [fold.train for fold in folds] == train
    assert [fold.test for fold in folds] == test


@pytest.mark.heavy
def test_the_command_takes_spans_by_bars_and_by_dates(tmp_path, capsys):
    words = "walkforward --strategy half_and_half --symbol SP500 --json --stop 2003-01-01"
    dated = "--train 1999-06-01 --test 2001-01-01,2002-01-01"
    for spans in ("--train 250 --test 250", dated):
        assert main([*words.split(), *spans.split(), f"--trials={tmp_path}"]) == 0
    folds = json.loads(capsys.readouterr().out.splitlines()[-1])["folds"]
    assert [fold["test_start"][:10] for fold in folds] == ["2001-01-02", "2002-01-02"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"train": 850}, "900 bars are room for 0 folds"),
        ({"train": 750}, "900 bars are room for 1 folds of train 750 and test 100"),
        ({"train": None}, "train is missing; give its number of bars"),
        ({"test": 0}, "test=0: give a whole number of at least 1"),
        ({"test": 1.5}, "give a whole number of bars"),
        ({"purge": 200}, "purge 200 and embargo 0 leave nothing of a train span of 200"),
        ({"purge": -1}, "purge=-1: give a whole number of at least 0"),
        ({"scheme": "roling"}, "no such scheme; did you mean 'rolling'"),
        ({"workers": "many"}, "give a number of processes"),
        ({"grid": {"side": range(1_600_000)}}, "1,600,000 combinations"),
        ({"grid": {"sides": (1,)}}, "has no parameter 'sides'; did you mean 'side'"),
        ({"subject": nca.rules.buy_and_hold()}, "a Strategy has no parameters to refit"),
        ({"subject": 7, "grid": None}, "subject is a int; give a Strategy, a rule"),
        ({"subject": "nano", "grid": None}, "env is missing; an agent needs"),
        ({"env": "index_daily"}, "env: is of an agent"),
        ({"warm_start": True}, "warm_start: is of an agent"),
        ({"metric": "sharp"}, "metric=\"sharp\": no such metric; did you mean 'sharpe'"),
        ({"subject": "nano", "env": "index_daily", "grid": None, "seeds": 0}, "seeds=0: give"),
        ({"train": "2000-02"}, 'train="2000-02" is a date; give test by dates too'),
        ({"test": ("2001", "2000-07")}, "test: the dates are not in order"),
        ({"test": ("2001", "2004")}, "2002-06-18: test needs dates that each have bars before"),
        ({"train": 500, "test": ("2001", "2002")}, "train=500 leaves no train span before the"),
        ({"trian": 9}, "unknown setting 'trian'; did you mean 'train'? There are train, test,"),
        ({"seeds": 3}, "seeds: is of an agent, not of a strategy"),
        ({"spans": Spans(train=9, test=9)}, "spans is given, and train, test as well; give one"),
        ({"training": 3}, "training is the number 3; give nca.Training(...)"),
        ({"lot": 1.0}, "lot need money; give capital"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_one_line(persistent, given, said):
    with pytest.raises((ConfigError, BarError)) as caught:
        walked(persistent, **given)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_planted_signal_is_found_and_beats_every_constant_weight(persistent, monkeypatch):
    monkeypatch.undo()
    done = walked(persistent, purge=2)
    assert list(done.folds["side"]) == [1] * 7 and "earned more than" in done.verdict
    assert done.interval.low > 0 and done.metrics["sharpe"] > 3
    trend = "time-series momentum 200"  # a year is longer than the bars before the first test
    assert set(done.baselines) == {
        "buy and hold", "hold, volatility 0.15", trend, f"half equal weight, half {trend}",
        "SMA cross 50/200", "always flat", "best constant weight", "exposure-matched hold",
    }  # fmt: skip
    assert done.gate.passed and done.gate.deployed == done.result.name
    # By hand: what it earned a year more than the constant weight did.
    ours, theirs = (
        np.diff(r.equity.to_numpy(), prepend=1.0) / np.r_[1.0, r.equity.to_numpy()[:-1]]
        for r in (done.result, done.baselines["best constant weight"])
    )
    found = float(re.search(r"in hindsight, is (-?[0-9.]+)% per year", done.verdict)[1])
    assert found == pytest.approx(
        100.0 * (ours - theirs).mean() * persistent.bars_per_year, abs=0.051
    )
    held = done.baselines["exposure-matched hold"].targets.to_numpy()
    np.testing.assert_allclose(held[0], done.result.weights.mean())
    # Every result is of the same bars, costs and fills.
    for result in done.baselines.values():
        assert result.equity.index.equals(done.result.equity.index)
        assert result.charged == done.result.charged and result.rules.fill == done.result.rules.fill
    assert len(done.result.equity) == 700 and "earned more" in repr(done)
    row = done.folds.loc[1]
    assert (row["train_bars"], row["test_bars"], row["tried"]) == (198, 100, 2)
    assert row["train_sha256"] == persistent[100 + 100 - 100 : 298].digest()
    assert row["test_sha256"] == persistent[300:400].digest()


def test_one_account_fills_what_the_folds_decided(persistent):
    """A ledger by hand: targets that flip at the edges of folds pay costs there, and only there."""
    calls = []

    def fit(train):
        calls.append(len(calls))
        weight = 0.5 if len(calls) % 2 else -0.25  # fold by fold
        return lambda bars: np.full(len(bars), weight)

    costs = nca.Costs(commission=1e-3)
    done = walked(
        persistent, fit, grid=None, costs=costs, fill="close", order="on_change", check=False
    )
    close = persistent.close[:, 0]
    equity, units, cash, found = 1.0, 0.0, 1.0, []
    for row in range(200, 900):
        fold = (row - 200) // 100
        equity = cash + units * close[row]
        target = 0.5 if fold % 2 == 0 else -0.25
        if (row - 200) % 100 == 0:  # on change: it trades at the first bar of each fold alone
            # Costs are paid from equity, and the weight is of equity before them.
            traded = target * equity - units * close[row]
            units += traded / close[row]
            cash -= traded + 1e-3 * abs(traded)
            equity = cash + units * close[row]
        found.append(equity)
    np.testing.assert_allclose(done.result.equity, found, rtol=1e-9)
    assert int((done.result.turnover > 0).sum()) == 7


def test_a_position_of_equal_target_is_carried_without_a_trade(persistent):
    costs = nca.Costs(commission=1e-3)
    done = walked(persistent, nca.rules.buy_and_hold(), grid=None, costs=costs)
    np.testing.assert_array_equal(done.result.equity, done.baselines["buy and hold"].equity)
    assert done.result.num_fills == 1


def stopped(weight=0.5):
    """A constant weight, which a stop closes until the weight changes."""

    def act(state, bar):
        return state, jnp.full_like(bar.close, weight)

    return nca.Strategy(lambda num_assets: (), act, "held").with_stop(0.015)


@pytest.mark.heavy
def test_a_strategy_with_a_stop_keeps_its_account_from_fold_to_fold(persistent):
    """Every fold chooses the same weight, so that one strategy over all test spans is the same."""
    costs = nca.Costs(commission=1e-3)
    grid = {"weight": (0.5, 0.6)}
    done = walked(persistent, stopped, grid=grid, costs=costs, metric="max_drawdown")
    assert set(done.folds["weight"]) == {0.5}
    start = str(persistent.index[200])
    alone = nca.backtest(persistent, stopped(0.5), costs, start=start)
    np.testing.assert_allclose(done.result.equity, alone.equity, rtol=1e-12)
    assert (done.result.weights.to_numpy() == 0.0).sum() > 100  # the stop closed it


def test_a_strategy_with_a_stop_switches_at_the_edge_of_a_fold(persistent):
    weights = iter([0.25, 0.75] * 4)
    parts = [(200 + 100 * i, stopped(next(weights))) for i in range(7)]
    result = nca.backtest(persistent, switching(parts), start=str(persistent.index[200]))
    ordered = result.targets.to_numpy()[:, 0]
    np.testing.assert_array_equal(ordered[::100], [0.25, 0.75] * 3 + [0.25])
    # A target that changes opens again what a stop has closed.
    assert all(result.weights.to_numpy()[100 * i + 1, 0] > 0 for i in range(7))


def remembers():
    seen = []

    def fit(train):
        seen.append(train.close.mean())
        level = np.mean(seen)
        return lambda bars: np.where(bars.close[:, 0] > level, 1.0, 0.0)

    return fit


def peeks(bars):
    return np.where(bars.close[:, 0] > bars.close.mean(), 1.0, 0.0)


@pytest.mark.parametrize(
    ("subject", "said"),
    [
        (
            remembers(),
            "fold 0 leaks: its fit depends on bars outside of the train span, or on what",
        ),
        (peeks, "leaks: its decisions depend on later bars"),
    ],
)
def test_a_leak_of_the_subject_is_caught(persistent, subject, said):
    with pytest.raises(CheckFailed, match=said):
        walked(persistent, subject, grid=None)


def held(weight):
    def act(state, bar):
        return state, jnp.full_like(bar.close, weight)

    return nca.Strategy(lambda num_assets: (), act, "held")


def scaled(bars, scale):
    return scale * follow(bars)


@pytest.mark.heavy
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("subject", "other"),
    [
        (held(1.0), held(0.25)),
        (functools.partial(scaled, scale=1.0), functools.partial(scaled, scale=0.25)),
    ],
)
def test_a_subject_with_other_values_inside_is_another_walk(persistent, subject, other, tmp_path):
    walked(persistent, subject, grid=None, folder=tmp_path / "walk")
    with pytest.raises(RunError, match="a walk-forward of something else"):
        walked(persistent, other, grid=None, folder=tmp_path / "walk")
    # In a folder of the same name it is another trial.
    shutil.rmtree(tmp_path / "walk")
    again = walked(persistent, other, grid=None, folder=tmp_path / "walk")
    assert "has 2 trials on" in again.verdict
    assert again.result.targets.abs().to_numpy().max() == 0.25


@pytest.mark.heavy
def test_a_walk_without_a_folder_is_counted_where_its_caller_says(persistent, tmp_path):
    log = tmp_path / "project"
    assert "No trial log counts" in walked(persistent, grid=None, subject=follow).verdict
    for scale, number in ((1.0, 1), (1.0, 1), (0.5, 2)):  # the same walk again is not another trial
        again = walked(persistent, functools.partial(scaled, scale=scale), grid=None, trials=log)
        assert f"The trial log of project has {number} trial" in again.verdict
    # A folder elsewhere keeps the folds; the count stays with the project.
    walked(persistent, grid=None, folder=tmp_path / "other" / "walk", trials=log)
    # What it orders is what the first did, under another name.
    assert (nca.trials(log)["kind"] == "train").sum() == 2
    assert not (tmp_path / "other" / "trials.jsonl").exists()


def test_a_leak_is_found_again_by_the_call_that_resumes(persistent, tmp_path):
    folder = tmp_path / "walk"
    for _ in range(2):  # the second time every fold is there
        with pytest.raises(CheckFailed, match="leaks"):
            walked(persistent, peeks, grid=None, folder=folder)
    # A kill between the last fold and its check is no way around it either.
    (folder / "checked").unlink()
    with pytest.raises(CheckFailed, match="leaks: its decisions depend on later bars"):
        walked(persistent, peeks, grid=None, folder=folder)


@pytest.mark.few(1)
@pytest.mark.parametrize("more", [1, 40])
def test_a_leak_planted_between_the_folds_is_caught(persistent, monkeypatch, more):
    """A fit that gets `more` bars than its train span, the first of them the test span's."""
    real = refit.fit

    def leaking(setup, bars, span):
        return real(setup, bars, (span[0], span[1] + more))

    def level(train):
        mean = train.close[-60:].mean()
        return lambda bars: np.where(bars.close[:, 0] > mean, 1.0, 0.0)

    walked(persistent, level, grid=None)
    monkeypatch.setattr(refit, "fit", leaking)
    with pytest.raises(CheckFailed, match="fold 0 leaks: its fit depends on bars outside"):
        walked(persistent, level, grid=None)


def test_a_walk_that_was_stopped_resumes_fold_by_fold(persistent, tmp_path):
    whole = walked(persistent)
    folder, computed = tmp_path / "runs" / "walk", []

    def stop(number, fitted):
        computed.append(number)
        if len(computed) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        walked(persistent, folder=folder, done=stop)
    assert computed == [0, 1, 2]
    again = walked(persistent, folder=folder, done=lambda number, fitted: computed.append(number))
    assert computed == [0, 1, 2, 3, 4, 5, 6]
    np.testing.assert_array_equal(again.result.equity, whole.result.equity)
    assert again.folds.drop(columns="seconds").equals(whole.folds.drop(columns="seconds"))
    # The walk is one trial and one evaluation, however often it was begun.
    assert list(nca.trials(tmp_path / "runs")["kind"]) == ["train", "test"]
    assert "has 1 trial on" in again.verdict
    for changed in (
        {"grid": {"side": (-1, 1, 2)}},
        {"purge": 1},
        {"costs": nca.Costs(commission=1e-3)},
    ):
        with pytest.raises(RunError, match="a walk-forward of something else"):
            walked(persistent, folder=folder, **changed)
    file = folder / "fold-002.npz"
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(StateError, match=r"fold-002\.npz: not a fold"):
        walked(persistent, folder=folder)


def test_the_best_constant_weight_is_the_best(persistent):
    rng = np.random.default_rng(1)
    bars = bars_of(rng.normal(0.002, 0.02, 900))
    done = walked(bars, train=400, test=250)
    weight = done.baselines["best constant weight"].targets.iloc[0, 0]
    returns = np.diff(bars.close[:, 0]) / bars.close[:-1, 0]
    growth = {w: np.log1p(w * returns).sum() for w in np.linspace(-1, 1, 21)}
    assert weight == pytest.approx(max(growth, key=growth.get))
    # A strategy that is never short is compared with weights that are not.
    falling = bars_of(rng.normal(-0.01, 0.01, 900))
    long_only = walked(falling, nca.rules.buy_and_hold(), grid=None, train=400, test=250)
    assert long_only.baselines["best constant weight"].targets.iloc[0, 0] == 0.0


@pytest.mark.heavy
def test_spans_and_training_may_be_given_as_objects(persistent):
    given = nca.walk_forward(
        persistent, follow, spans=Spans(purge=2, **SPANS), grid=SIDES, training=Training(name="x")
    )
    named = walked(persistent, purge=2)
    folds = [x.folds.drop(columns="seconds") for x in (given, named)]
    assert folds[0].equals(folds[1]) and given.result.equity.equals(named.result.equity)
    assert (given.result.name, named.result.name) == ("x", "follow")


@pytest.mark.heavy
def test_processes_give_the_bits_of_one(persistent):
    spans = {"train": 400, "test": 250, "check": False}
    alone, two = (walked(persistent, workers=n, **spans) for n in (None, 2))
    np.testing.assert_array_equal(alone.result.equity, two.result.equity)
    assert alone.verdict == two.verdict


def shuffled(returns, seed):
    rng = np.random.default_rng(seed)
    return bars_of(rng.permutation(returns - returns.mean()))


def cross(bars, fast=5):
    """Long while a mean of `fast` closes is above one of 30: the grid finds what is not there."""
    import pandas as pd

    close = pd.Series(bars.close[:, 0])
    quick, slow = close.rolling(fast).mean(), close.rolling(30).mean()
    return np.where(slow.isna(), 0.0, (quick > slow).astype(float))


def verdicts(returns, seeds):
    spans = {"grid": {"fast": (3, 5, 10, 20)}, "train": 500, "test": 250, "check": False}
    return [nca.walk_forward(shuffled(returns, seed), cross, **spans) for seed in seeds]


@pytest.fixture(scope="module")
def index_returns():
    close = nca.sample_bars("sp500").close[-2500:, 0]
    return np.diff(close) / close[:-1]


@pytest.mark.heavy
def test_noise_is_not_distinguishable(index_returns):
    assert all("not distinguishable" in w.verdict for w in verdicts(index_returns, (0,)))


@pytest.mark.heavy
def test_noise_is_not_distinguishable_on_nine_of_ten_series(index_returns):
    """A selection of the hundred of benchmarks/results/walkforward-noise.json."""
    found = sum("not distinguishable" in w.verdict for w in verdicts(index_returns, range(20)))
    assert found >= 18


@pytest.mark.heavy
def test_several_assets_and_missing_bars():
    bars = drawn.random_bars(np.random.default_rng(2), 400, 2)

    def held(bars, weight=0.1):
        return np.full(bars.close.shape, weight)

    done = nca.walk_forward(bars, held, grid={"weight": (0.1, 0.4)}, train=150, test=100)
    assert done.result.targets.shape == (200, 2) and set(done.folds["weight"]) <= {0.1, 0.4}
