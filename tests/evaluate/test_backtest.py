"""A backtest of anything, beside a ledger of cash and units, and without a look ahead."""

import dataclasses
import shutil

import ledger
import numpy as np
import pandas as pd
import pytest
from drawn import random_bars
from tiny import AGENT, ENV
from untrained import untrained_run

import nca_trader as nca
from nca_trader.errors import BarError, ConfigError, StateError
from nca_trader.evaluate import simulate as module
from nca_trader.evaluate.backtest import backtest
from nca_trader.runs import trials
from nca_trader.runs.manifest import Run, seen_rows
from nca_trader.runs.trials import data_record
from nca_trader.strategies import rules
from nca_trader.strategies.targets import strategy_targets
from nca_trader.types import Costs

COSTS = Costs(commission=1e-3, slippage=5e-4)
TRAINED = 150  # rows that the run says it trained on, of 240
FIRST = "1990-01-01"  # before every bar
RULES = {
    "buy_and_hold": rules.buy_and_hold,
    "always_flat": rules.always_flat,
    "sma_cross": lambda: rules.sma_cross(3, 8),
    "momentum": lambda: rules.momentum(5),
}


@pytest.fixture(scope="module")
def bars():
    return random_bars(np.random.default_rng(5), 240, 2, missing=0.03)


def make_run(path, bars, env=ENV):
    return untrained_run(path, bars[:TRAINED], env, AGENT)


@pytest.fixture(scope="module")
def run(bars, tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "random", bars)


def random_targets(num_bars, num_assets, seed=0, cap=0.5):
    """Targets that change now and then, with rows of no order between."""
    rng = np.random.default_rng(seed)
    targets = cap * rng.choice([-1.0, 0.0, 0.5, 1.0], (num_bars, num_assets))
    targets[rng.random((num_bars, num_assets)) < 0.4] = np.nan
    return targets


def assert_same(one, other):
    pd.testing.assert_frame_equal(one.to_frame(), other.to_frame(), check_exact=True)


# What goes in


def test_one_asset_takes_a_column_or_a_row_of_targets(bars):
    one = bars.select("S1")
    targets = random_targets(len(one), 1)
    wide, narrow = backtest(one, targets), backtest(one, targets[:, 0])
    assert_same(wide, narrow)
    assert_same(wide, backtest(one, pd.Series(targets[:, 0], one.index)))
    assert wide.turnover.sum() > 1


def test_a_frame_with_columns_in_another_order_is_refused(bars):
    frame = pd.DataFrame(random_targets(len(bars), 2), bars.index, ["S1", "S0"])
    with pytest.raises(BarError, match=r"columns S1, S0, but the bars are S0, S1"):
        backtest(bars, frame)


@pytest.mark.parametrize("shape", [(239, 2), (240,), (240, 3), (2, 240), ()])
def test_targets_of_another_shape_are_refused(bars, shape):
    with pytest.raises(BarError, match=r"have \[N, A\] = \(240, 2\) \(S0, S1\)"):
        backtest(bars, np.zeros(shape))


@pytest.mark.parametrize(
    ("value", "says"),
    [(np.inf, "row 7 is infinite"), (-np.inf, "row 7 is infinite"), ("long", "are not numbers")],
)
def test_targets_that_are_no_weights_are_refused(bars, value, says):
    targets = np.zeros((240, 2), object)
    targets[7, 1] = value
    with pytest.raises(BarError, match=says):
        backtest(bars, targets)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"fill": "vwap"}, ConfigError, r"fill='vwap' is not known; It may be 'next_open', 'clo"),
        ({"order": "daily"}, ConfigError, r"order='daily' is not known; It may be 'on_change',"),
        (
            {"lots": 1.0},
            ConfigError,
            r"unknown limit 'lots'; did you mean 'lot'\? There are costs, fill,",
        ),
        ({"lot": 1.0}, ConfigError, r"capital=None, but lot need money; give capital, e.g. 100000"),
        ({"max_participation": 2.0, "capital": 1.0}, ConfigError, r"max_participation=2.0 is outs"),
        ({"start": "2021-01-01"}, BarError, r"no bar from 2021-01-01 to the last; there are bars"),
        ({"stop": "2020-01-01"}, BarError, r"no bar from the first to 2020-01-01"),
        ({"start": "2020-03-01", "stop": "2020-02-01"}, BarError, r"no bar from 2020-03-01 to"),
        (
            {"start": "yesterweek"},
            ConfigError,
            'start="yesterweek" is not a date; give one',
        ),
        ({"stop": ""}, ConfigError, 'stop="" is not a date'),
        ({"max_gross": 0.0}, ConfigError, r"max_gross=0.0 is outside its range; give a number"),
    ],
)
def test_options_that_mean_nothing_are_refused_in_one_line(bars, options, error, says):
    with pytest.raises(error, match=says) as info:
        backtest(bars, np.zeros((240, 2)), **options)
    assert "\n" not in str(info.value)


def test_no_bars_at_all_are_refused(bars):
    with pytest.raises(BarError, match="empty"):
        backtest(bars[:0], np.zeros((0, 2)))


# What comes out


def test_the_result_has_an_entry_for_each_bar(bars):
    result = backtest(bars, random_targets(len(bars), 2), COSTS, name="mine")
    for series in (result.equity, result.turnover, result.cost, result.targets, result.weights):
        assert (np.asarray(series.index) == np.asarray(bars.index)).all()
    assert result.equity.iloc[0] == 1.0 and result.name == "mine" and result.logits is None
    assert (result.charged, result.fill, result.order) == (COSTS, "next_open", "rebalance")
    np.testing.assert_array_equal(np.exp(result.log_equity), result.equity)


@pytest.mark.few(2)
@pytest.mark.parametrize("fill", ["next_open", "close"])
@pytest.mark.parametrize("order", ["on_change", "rebalance"])
def test_a_part_of_the_bars_is_an_account_that_begins_there_flat(bars, fill, order):
    targets = random_targets(len(bars), 2)
    first, last = 60, 180
    result = backtest(
        bars,
        targets,
        COSTS,
        fill,
        order,
        start=str(bars.time[first]),
        stop=str(bars.time[last]),
    )
    inside = targets[first:last].copy()
    # What was last ordered before the part began is ordered at its first bar.
    inside[0] = [column[~np.isnan(column)][-1] for column in targets[: first + 1].T]
    costs, rules = dataclasses.asdict(COSTS), {"fill": fill, "order": order}
    account = ledger.run(bars[first:last], inside, costs, rules)
    assert len(result.equity) == last - first and result.turnover.sum() > 5
    np.testing.assert_allclose(result.equity, account.equity, rtol=1e-11)
    np.testing.assert_allclose(result.weights, account.weights, rtol=0, atol=1e-11)
    np.testing.assert_array_equal(result.targets, inside)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_its_targets(bars, name):
    strategy = RULES[name]()
    result = backtest(bars, strategy, COSTS)
    assert_same(result, backtest(bars, strategy_targets(bars, strategy), COSTS, order="on_change"))
    assert result.name == strategy.name
    if name != "always_flat":
        assert result.turnover.sum() > 0.5


@pytest.mark.heavy
@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_what_is_saved_reads_back_bit_for_bit(bars, run, tmp_path, suffix):
    result = backtest(bars, run, start=FIRST)
    path = result.save(tmp_path / f"result.{suffix}")
    read = {"parquet": pd.read_parquet, "csv": pd.read_csv}[suffix](path)
    expected = result.to_frame()
    if suffix == "csv":  # text has no types
        read["time"] = pd.to_datetime(read["time"])
        read = read.astype(expected.dtypes.to_dict())
    pd.testing.assert_frame_equal(read, expected, check_exact=True)
    assert [f"logits:S1:{i}" in read for i in range(4)] == [True, True, True, False]
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_result_that_cannot_be_saved_leaves_nothing(bars, tmp_path):
    result = backtest(bars, np.zeros((240, 2)))
    (tmp_path / "file").touch()
    with pytest.raises(StateError, match=r"file: cannot be made"):
        result.save(tmp_path / "file" / "r.parquet")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# A trained run


def test_a_run_takes_its_own_costs_and_rules(bars, run):
    result = backtest(bars, run, start=FIRST)
    assert result.charged == ENV.costs and result.name == "random"
    assert (result.fill, result.order) == (ENV.fill, ENV.order)
    cheap = backtest(bars, run, Costs(), "close", "rebalance", start=FIRST)
    assert (cheap.charged, cheap.fill, cheap.order) == (Costs(), "close", "rebalance")
    assert cheap.cost.sum() == 0.0 < result.cost.sum()


def test_an_agent_trained_at_higher_costs_is_judged_at_the_true_ones(bars, run, tmp_path):
    env = dataclasses.replace(ENV, random_costs=(5.0, 10.0))
    other = make_run(tmp_path / "random", bars, env)
    assert other.env_config.random_costs == (5.0, 10.0)
    result = backtest(bars, other, start=FIRST)
    assert result.charged == ENV.costs and result.cost.sum() > 0.0
    assert_same(result, backtest(bars, run, start=FIRST))


def test_a_run_decides_nothing_before_its_features_and_receptive_field_are_full(bars, run):
    result, first = backtest(bars, run, start=FIRST), run.policy.first_decision
    assert first == run.spec.warmup + run.policy.receptive_field - 1 == 66
    before, after = result.targets.iloc[:first], result.targets.iloc[first:]
    assert before.isna().all(axis=None) and after.notna().all(axis=None)
    assert np.isnan(result.logits[:first]).all() and np.isfinite(result.logits[first:]).all()
    assert (result.weights.iloc[:first] == 0).all(axis=None)
    assert (result.equity.iloc[:first] == 1.0).all()


def test_the_targets_of_a_run_are_its_most_probable_actions(bars, run):
    result, first = backtest(bars, run, start=FIRST), run.policy.first_decision
    best = np.asarray(run.spec.targets)[result.logits[first:].argmax(-1)]
    np.testing.assert_array_equal(result.targets[first:], best)
    assert all(result.targets[symbol].nunique() > 1 for symbol in bars.symbols)
    limits = {"order": "on_change", "max_gross": ENV.max_gross}
    again = backtest(bars, result.targets, result.charged, **limits)
    # Another program, so another order of sums: equal but for the last bit.
    np.testing.assert_allclose(again.log_equity, result.log_equity, rtol=0, atol=1e-14)


@pytest.mark.few(1)
@pytest.mark.parametrize("chunk", [1, 64])
def test_bars_encoded_in_pieces_decide_as_bars_encoded_at_once(bars, run, monkeypatch, chunk):
    whole = backtest(bars, run, start=FIRST)
    monkeypatch.setattr(module, "CHUNK", chunk)
    pieces = backtest(bars, run, start=FIRST)
    np.testing.assert_array_equal(pieces.targets, whole.targets)
    np.testing.assert_array_equal(pieces.log_equity, whole.log_equity)
    np.testing.assert_allclose(pieces.logits, whole.logits, atol=1e-5)


def test_a_run_starts_after_the_bars_that_it_saw_and_each_look_is_counted(
    bars, run, tmp_path, caplog
):
    mine = Run(shutil.copytree(run.path, tmp_path / "runs" / "mine"))
    result = backtest(bars, mine)
    late = backtest(bars, mine, start=str(bars.time[TRAINED]))
    np.testing.assert_array_equal(result.log_equity, late.log_equity)
    assert result.equity.index[0] == bars.index[TRAINED]
    assert (result.in_sample, result.evaluations, late.evaluations) == (0, 1, 2)
    said = f"random starts on {bars.index[TRAINED].date()}, after the bars that it was trained"
    assert [said in line for line in caplog.messages] == [True]  # not where it was asked for
    # One bar less, or one symbol renamed in the file's digest alone, is the same test span.
    assert backtest(bars[:-1], mine).evaluations == 3
    entry = trials.entries(mine.root)[-1]
    assert (entry.kind, entry.run, entry.seed) == ("test", "random", 0)
    assert (entry.first, entry.last) == (str(bars.time[TRAINED]), str(bars.time[-2]))
    # What selects among agents is no test span; bars that were seen are no look.
    assert backtest(bars, mine, look=False).evaluations is None
    assert backtest(bars[:TRAINED], mine).evaluations is None
    assert trials.count(mine.root, "test") == 3


def test_a_run_over_nothing_but_bars_that_it_saw_starts_at_the_first(bars, run):
    with pytest.raises(BarError, match=r"no bar from .* to "):
        backtest(bars, run, stop=str(bars.time[TRAINED]))
    result = backtest(bars[:TRAINED], run)
    assert len(result.equity) == result.in_sample == TRAINED and result.evaluations is None


def test_bars_that_selected_the_seed_count_as_seen(bars, run, tmp_path):
    mine = Run(shutil.copytree(run.path, tmp_path / "selected"))
    mine.write_json("selection.json", {"selected": 0, "data": data_record(bars[TRAINED:200])})
    assert seen_rows(bars, Run(mine.path)) == 200


def test_fewer_bars_than_the_receptive_field_are_refused(bars, run):
    with pytest.raises(BarError, match=r"66 bars, but the agent decides from bar 67 on"):
        backtest(bars[:66], run)
    assert backtest(bars[:67], run, start=FIRST).targets.iloc[-1].notna().all()


# No look ahead


def test_a_strategy_counts_once_for_the_same_targets_on_the_same_bars(tmp_path):
    bars = nca.sample_bars("sp500").select("SP500")[-300:]
    several = [rules.sma_cross(5, 20), rules.sma_cross(5, 30), rules.sma_cross(5, 20)]
    found = [nca.backtest(bars, rule, trials=tmp_path) for rule in several]
    assert [result.tried for result in found] == [1, 2, 2]
    assert "2 trials on this market so far" in str(found[1])
    # Other costs and reruns are no other strategy, and a sweep adds what is new in it.
    assert nca.backtest(bars, several[0], nca.Costs(commission=1e-3), trials=tmp_path).tried == 2
    found[1].stress(delays=(0,), capitals=())
    nca.sweep(bars, rules.sma_cross, {"fast": [5], "slow": [20, 40, 60]}, trials=tmp_path)
    assert nca.backtest(bars, several[1], trials=tmp_path).tried == 4
    assert nca.backtest(bars, several[1]).tried is None


@pytest.mark.heavy
def test_a_run_says_how_many_of_its_bars_it_has_seen(bars, run):
    def in_sample(start, stop=None):
        return backtest(bars, run, start=str(bars.time[start]), stop=stop).in_sample

    assert seen_rows(bars, run) == TRAINED
    assert in_sample(0) == TRAINED
    assert in_sample(TRAINED - 1) == 1
    assert in_sample(TRAINED) == 0
    assert in_sample(100, str(bars.time[120])) == 20
    assert backtest(bars, np.zeros((240, 2))).in_sample is None
