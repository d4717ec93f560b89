"""A sweep equals a loop of backtests, survives an interruption, and does not call luck a skill."""

import functools
import json
import logging
import os
import threading

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from drawn import bars_of

import nca_trader as nca
from nca_trader.evaluate.combinations import combinations_of, member_of
from nca_trader.evaluate.evidence.verdict import neighbours
from nca_trader.evaluate.sweep import parts as module
from nca_trader.evaluate.sweep import sweep as sweep_module
from nca_trader.strategies import rolling

COSTS = nca.Costs(commission=5e-4, slippage=2e-4)
SMA = {"fast": [3, 8, 20], "slow": [25, 60]}
FEW = {"fast": [3, 8], "slow": [25]}


def made(num_bars=400, assets=1, seed=0, missing=0.0, drift=0.0):
    """Random bars with overnight gaps, highs and lows."""
    rng = np.random.default_rng(seed)
    close = 100 * np.exp((drift + 0.01 * rng.standard_normal((num_bars, assets))).cumsum(0))
    before = np.vstack([close[:1], close[:-1]])
    open_ = before * np.exp(0.004 * rng.standard_normal(close.shape))
    high = np.maximum(open_, close) * np.exp(np.abs(0.005 * rng.standard_normal(close.shape)))
    low = np.minimum(open_, close) * np.exp(-np.abs(0.005 * rng.standard_normal(close.shape)))
    present = rng.random(close.shape) >= missing
    present[0] = True
    for t in range(1, num_bars):  # a missing bar carries the last close
        for values in (open_, high, low, close):
            values[t] = np.where(present[t], values[t], close[t - 1])
    more = {"symbols": tuple("ABC"[:assets]), "high": high, "low": low, "present": present}
    return bars_of(close, open_, "2010-01-01", **more)


def stopped(fast=5, loss=0.05):
    """A user's rule with a feature of its own and a stop."""
    quick, slow = rolling.ew_mean(fast), rolling.past(10)

    def init(num_assets):
        return quick.init(num_assets), slow.init(num_assets)

    def act(state, bar):
        a, mean = quick.update(state[0], bar.close, bar.present)
        b, before = slow.update(state[1], bar.close, bar.present)
        # Long, flat and short, so that trades change sides.
        return (a, b), jnp.sign(mean - before) * jnp.where(jnp.isnan(before), 0.0, 0.8)

    mine = nca.Strategy(init, act, "mine")
    return mine if loss is None else mine.with_stop(loss)


def wary(limit=0.1):
    """A rule that sees its account: it halves its position below a drawdown."""

    def act(state, bar, portfolio):
        deep = portfolio.equity < (1.0 - limit) * portfolio.peak
        share = jnp.where(deep, 0.25, 0.5) / bar.close.shape[0]
        return state, jnp.full_like(bar.close, 1.0) * share

    return nca.Strategy(lambda num_assets: (), act, "wary", "rebalance")


CASES = {
    "sma": (nca.rules.sma_cross, FEW, 1, {}),
    "close": (nca.rules.sma_cross, FEW, 1, {"fill": "close"}),
    "assets": (nca.rules.momentum, {"lookback": [5, 30]}, 3, {"max_gross": 0.9}),
    "stop": (stopped, {"fast": [3, 9], "loss": [0.02, 0.05]}, 1, {}),
    "stop close": (stopped, {"fast": [3, 9], "loss": [0.02]}, 3, {"fill": "close"}),
    "account": (wary, {"limit": [0.01, 0.2]}, 3, {}),
    "rebalance": (nca.rules.sma_cross, FEW, 1, {"order": "rebalance"}),
}


def refuse_other_metrics(table, rule, bars, costs, precision, **options):
    """Every column of metrics is the metric of the combination's own backtest."""
    tight = {"f32": 1e-5, "f64": 1e-9}[precision]
    parameters = table.attrs["parameters"]
    assert set(table.columns) == {*parameters, "equity", *sweep_module.METRICS, *module.TAILS}
    for _, row in table.iterrows():
        values = {p: row[p] for p in parameters}
        whole = {p: int(v) if float(v).is_integer() else v for p, v in values.items()}
        result = nca.backtest(bars, rule(**whole), costs, **options)
        assert row["equity"] == pytest.approx(result.equity.iloc[-1], rel=tight)
        for key in (*sweep_module.METRICS, *module.TAILS):
            expected = pytest.approx(result.metrics[key], rel=tight, abs=tight, nan_ok=True)
            assert row[key] == expected, key


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("precision", ["f32", "f64"])
@pytest.mark.few(1)
def test_a_sweep_equals_a_loop_of_backtests(name, precision, monkeypatch):
    rule, grid, assets, options = CASES[name]
    bars = made(assets=assets, missing=0.1 if name == "assets" else 0.0)
    monkeypatch.setattr(module, "RETURNS_BYTES", 16 * len(bars))  # programs of one combination
    table = nca.sweep(
        bars, rule, grid, COSTS, precision=precision, trials=None, tails=True, **options
    )
    refuse_other_metrics(table, rule, bars, COSTS, precision, **options)


def test_a_grid_without_numbers_is_its_backtests():
    def named(kind):
        return nca.rules.momentum({"quick": 5, "slow": 30}[kind])

    bars = made(100)
    table = nca.sweep(bars, named, {"kind": ["quick", "slow"]}, COSTS, trials=None, tails=True)
    for row, kind in enumerate(("quick", "slow")):
        equity = nca.backtest(bars, named(kind), COSTS).equity.iloc[-1]
        assert table["equity"].iloc[row] == pytest.approx(equity, rel=1e-6)


@pytest.mark.heavy
def test_a_rule_that_looks_back_further_than_its_grid_says_is_its_backtest():
    def wider(slow):
        return nca.rules.sma_cross(2, 3 * slow + 1)

    bars = made(200)
    table = nca.sweep(bars, wider, {"slow": [5, 20]}, COSTS, trials=None)
    for row, slow in enumerate((5, 20)):
        equity = nca.backtest(bars, wider(slow), COSTS).equity.iloc[-1]
        assert table["equity"].iloc[row] == pytest.approx(equity, rel=1e-6)


def test_the_neighbours_of_the_best_are_those_of_the_grid():
    values = [(a, b, c) for a in (1, 2, 5) for b in (0.1, 0.2, 0.3) for c in ("x", "y")]
    table = pd.DataFrame(values, columns=["a", "b", "c"])
    at = table.index[(table["a"] == 2) & (table["b"] == 0.1) & (table["c"] == "x")][0]
    near = table.iloc[neighbours(table, ["a", "b", "c"], at)]
    expected = {(1, 0.1), (1, 0.2), (2, 0.2), (5, 0.1), (5, 0.2)}
    assert set(zip(near["a"], near["b"], strict=True)) == expected and set(near["c"]) == {"x"}
    # Of a random sample, whose points have no neighbours on a grid, the nearest by rank.
    drawn = pd.DataFrame(np.random.default_rng(0).random((50, 2)), columns=["a", "b"])
    assert len(neighbours(drawn, ["a", "b"], 7)) >= 3
    assert len(neighbours(table[:1], ["a", "b", "c"], 0)) == 0


@pytest.fixture(scope="module")
def table():
    return nca.sweep(made(300), nca.rules.sma_cross, SMA, COSTS, trials=None)


def test_a_lonely_peak_is_named(table):
    search, grid = table.attrs["search"], table.set_index(["fast", "slow"])["sharpe"]
    best = grid.idxmax()
    near = [
        grid[f, s]
        for i, f in enumerate(SMA["fast"])
        for s in SMA["slow"]
        if abs(i - SMA["fast"].index(best[0])) <= 1 and (f, s) != best
    ]
    assert search["neighbours"] == len(near)
    assert search["neighbours_mean"] == pytest.approx(np.mean(near))
    assert search["neighbours_worst"] == min(near)
    assert f"{min(near):.2f} at worst" in table.attrs["verdict"]


def test_workers_change_no_number_and_a_cluster_takes_no_program(table, monkeypatch):
    bars, pools = made(300), []
    pool = module.concurrent.futures.ThreadPoolExecutor
    monkeypatch.setattr(
        module.concurrent.futures, "ThreadPoolExecutor", lambda n: pools.append(n) or pool(n)
    )
    again = nca.sweep(bars, nca.rules.sma_cross, SMA, COSTS, trials=None, workers="3")
    np.testing.assert_array_equal(table.to_numpy(), again.to_numpy())
    assert pools == [3]
    for workers, says in (("tcp://desk:1", "one program on this machine"), (0, "of at least 1")):
        with pytest.raises(nca.ConfigError, match=says):
            nca.sweep(bars, nca.rules.sma_cross, SMA, COSTS, trials=None, workers=workers)


def test_an_interrupted_sweep_resumes_and_its_numbers_do_not_depend_on_the_width_of_programs(
    tmp_path, monkeypatch
):
    bars, grid = made(300), {"fast": range(2, 12), "slow": range(20, 40, 5)}
    whole = nca.sweep(bars, nca.rules.sma_cross, grid, COSTS, trials=None)
    monkeypatch.setattr(module, "WIDEST", 8)
    written = []

    def broken(self, number, outcome):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(number)
        return keep(self, number, outcome)

    keep = module.WorkFolder.write
    monkeypatch.setattr(module.WorkFolder, "write", broken)
    with pytest.raises(KeyboardInterrupt):
        nca.sweep(bars, nca.rules.sma_cross, grid, COSTS, trials=None, resume=tmp_path)
    assert len(list(tmp_path.glob("part-*.npz"))) == 2
    again = []
    monkeypatch.setattr(
        module.WorkFolder, "write", lambda self, n, o: (again.append(n), keep(self, n, o))
    )
    table = nca.sweep(bars, nca.rules.sma_cross, grid, COSTS, trials=None, resume=tmp_path)
    np.testing.assert_array_equal(whole.to_numpy(), table.to_numpy())
    assert not set(again) & set(written) and len(again) + 2 == 5
    with pytest.raises(nca.RunError, match="a sweep of something else: "):
        nca.sweep(bars, nca.rules.sma_cross, SMA, COSTS, trials=None, resume=tmp_path)


CALLS = []


def above(bars, n=5, scale=1.0):
    """A function of bars, which a sweep loops."""
    CALLS.append(n)
    close = pd.Series(bars.close[:, 0])
    return scale * (close > close.rolling(int(n)).mean()).to_numpy(np.float64)


def test_a_rule_with_other_values_inside_is_another_sweep(tmp_path):
    bars, grid = made(200), {"n": [5, 10]}
    half = functools.partial(above, scale=0.5)
    table = nca.sweep(bars, half, grid, trials=None, resume=tmp_path)
    again = nca.sweep(bars, functools.partial(above, scale=0.5), grid, trials=None, resume=tmp_path)
    pd.testing.assert_frame_equal(again, table, check_exact=True)
    for other in (functools.partial(above, scale=0.6), above):
        with pytest.raises(nca.RunError, match="a sweep of something else: "):
            nca.sweep(bars, other, grid, trials=None, resume=tmp_path)


def numpy_rule(bars, lookback=10):
    """A function of bars that jax cannot trace."""
    close = bars.close[:, 0]
    before = np.r_[np.full(int(lookback), np.inf), close[: -int(lookback)]]
    return np.where(close > before, 1.0, 0.0)


def test_a_function_of_bars_is_looped_and_says_so(caplog):
    bars = made(300)
    table = nca.sweep(bars, numpy_rule, {"lookback": [5, 9]}, COSTS, order="on_change", trials=None)
    assert "runs once per combination" in caplog.text
    same = nca.sweep(bars, nca.rules.momentum, {"lookback": [5, 9]}, COSTS, trials=None)
    # One verdict of a rule, however it is given.
    ours, theirs = (t.attrs["search"] for t in (table, same))
    assert ours.pop("combination") == theirs.pop("combination")
    assert ours == pytest.approx(theirs, rel=1e-4)
    np.testing.assert_allclose(table["equity"], same["equity"], rtol=1e-6)
    assert table.attrs["verdict"]


def test_a_rule_that_branches_on_a_parameter_is_looped(caplog):
    def rule(lookback=5):
        return nca.rules.momentum(lookback + 1 if lookback > 5 else lookback)

    table = nca.sweep(made(200), rule, {"lookback": [5, 9]}, COSTS, trials=None)
    assert "one by one" in caplog.text and len(table) == 2


OWN = """
import os
import numpy as np

def own(bars, length=5):
    (FOLDER / f"{os.getpid()}").touch()
    mean = np.convolve(bars.close[:, 0], np.ones(length) / length)[: len(bars)]
    return (bars.close[:, 0] > mean).astype(float)[:, None]
"""


@pytest.mark.parametrize(
    "held",
    [
        pytest.param(False, marks=pytest.mark.slow, id="file"),
        pytest.param(True, id="what cannot be sent"),
    ],
)
def test_a_function_of_a_file_is_looped_over_processes(held, monkeypatch, caplog, tmp_path):
    file, pids = tmp_path / "own.py", tmp_path / "pids"
    pids.mkdir()
    file.write_text(f"import pathlib\nFOLDER = pathlib.Path({str(pids)!r})\n" + OWN)
    rule = member_of(f"{file}:own")
    expected = nca.sweep(made(60), rule, {"length": range(2, 6)}, COSTS, trials=None)
    assert "one by one in this process" in caplog.text
    here = {path.name for path in pids.iterdir()}
    monkeypatch.setattr(sweep_module, "LOOP_SECONDS", 0.0)
    monkeypatch.setattr(sweep_module, "cores", lambda: 2)
    if held:
        rule.lock = threading.Lock()
    caplog.clear()
    found = nca.sweep(made(60), rule, {"length": range(2, 6)}, COSTS, trials=None)
    pd.testing.assert_frame_equal(found, expected)
    assert here == {str(os.getpid())}
    where = "in this process" if held else "by 2 workers"
    assert f"4 combinations are backtested one by one {where}" in caplog.text
    assert (len(list(pids.iterdir())) > 1) == (not held)


def test_a_page_says_what_its_figures_are_of(table, tmp_path):
    text = nca.report_sweep(table, tmp_path / "x.html").read_text()
    assert "A: 300 bars, 2010-01-01 to 2010-10-27; commission 0.0005, slippage 0.0002." in text
    assert "In sample: the best combination was chosen on these bars." in text


def test_refused_combinations_are_left_out(caplog):
    caplog.set_level(logging.WARNING)
    grid = {"fast": [10, 30], "slow": [20, 40]}
    table = nca.sweep(made(200), nca.rules.sma_cross, grid, COSTS, trials=None)
    assert len(table) == 3 and "1 combinations are left out" in caplog.text


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        ({}, "grid is empty"),
        ({"fast": []}, "'fast' has no values"),
        ({"fast": range(1, 4000), "slow": range(1, 4000)}, "15,992,001 combinations"),
        ({"fats": [1]}, "has no parameter 'fats'; did you mean 'fast'?"),
        ({"fast": [2.5], "slow": [20]}, "fast=2.5 is not a whole number"),
        ({"fast": [2.5, 3], "slow": [20, 30]}, "fast = 2.5"),
        ({"fast": 5}, "give its values"),
        ({"fast": [50], "slow": [20]}, "refuses every combination"),
    ],
)
def test_a_wrong_grid_is_refused_in_one_line(grid, said):
    with pytest.raises(nca.ConfigError) as raised:
        nca.sweep(made(50), nca.rules.sma_cross, grid, COSTS, trials=None)
    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_percent_is_refused():
    def rule(size=100.0):
        return nca.Strategy(lambda n: (), lambda s, bar: (s, size * jnp.ones_like(bar.close)))

    with pytest.raises(nca.BarError, match="orders a weight of 50"):
        nca.sweep(made(50), rule, {"size": [0.5, 50.0]}, COSTS, trials=None)


@pytest.mark.parametrize("method", ["sobol", "halton", "latin", "random"])
def test_samples_cover_a_space(method):
    space = {"fast": (2, 40), "slow": (50, 200), "stop": (0.01, 0.2), "side": ["long", "both"]}

    def rule(fast, slow, stop, side):
        """Never called."""

    found = combinations_of(rule, space, sample=200, method=method, seed=1)
    fast = np.array([one["fast"] for one in found])
    stop = np.array([one["stop"] for one in found])
    assert 190 <= len(found) <= 200 and fast.dtype == np.int64
    assert fast.min() >= 2 and fast.max() <= 40 and 0.01 <= stop.min() < stop.max() <= 0.2
    # The thirds of each range have their share.
    assert np.histogram(stop, 3, (0.01, 0.2))[0].min() > 45
    assert {one["side"] for one in found} == {"long", "both"}


WIDE = {"lookback": range(1, 41)}


@pytest.mark.heavy
def test_a_trial_is_what_was_ordered_whatever_its_name_code_or_costs(tmp_path):
    bars = made(300)

    def renamed(quick, long):
        """The same orders from other code."""
        inner = nca.rules.sma_cross(quick, long)
        return nca.Strategy(inner.init, inner.act, "renamed", inner.order)

    def edited(fast, slow):
        return nca.rules.sma_cross(fast, slow + 1)

    edited.__name__ = "sma_cross"
    names = {"quick": SMA["fast"], "long": SMA["slow"]}
    for rule, grid, costs, expected in (
        (nca.rules.sma_cross, SMA, COSTS, 6),
        (nca.rules.sma_cross, SMA, None, 6),  # other costs
        (renamed, names, COSTS, 6),
        (edited, SMA, COSTS, 12),
    ):
        table = nca.sweep(bars, rule, grid, costs, trials=tmp_path)
        assert table.attrs["search"]["trials"] == expected
    # A backtest of a combination is no other trial, nor is the array of its targets.
    one = nca.backtest(bars, nca.rules.sma_cross(3, 25), trials=tmp_path)
    assert one.tried == 12
    assert nca.backtest(bars, one.targets, trials=tmp_path, name="an array").tried == 12
    assert nca.backtest(made(300, seed=5), one.targets, trials=tmp_path).tried == 13


@pytest.mark.heavy
def test_the_search_is_a_plain_dictionary_and_the_verdict_two_findings(table):
    search = table.attrs["search"]
    assert json.loads(json.dumps(search)) == search
    assert {"deflated_sharpe", "pbo", "spa_cash", "spa_hold", "trials"} <= search.keys()
    assert table.attrs["verdict"].count(" Edge: ") == table.attrs["verdict"].count(" Choice: ") == 1
    # Too few bars for a split: what cannot be known counts as luck.
    short = nca.sweep(made(40)[:31], nca.rules.momentum, {"lookback": [2, 3]}, trials=None)
    assert np.isnan(short.attrs["search"]["pbo"])
    assert "which of them is the best may be luck" in short.attrs["verdict"]
    alone = nca.sweep(made(300), nca.rules.momentum, {"lookback": [5]}, trials=None)
    assert "Choice" not in alone.attrs["verdict"]


@pytest.mark.heavy
def test_an_edge_that_all_combinations_share_is_an_edge_and_no_choice():
    """The other way about, too: what PBO says of the choice changes nothing about the edge."""
    bars = made(1500, seed=3)
    close = bars.close * np.exp(0.0012 * np.arange(1500))[:, None]
    bars = bars_of(close, start="2010-01-01")

    def sized(size):
        inner = nca.rules.buy_and_hold()

        def act(state, bar):
            state, order = inner.decide(state, bar, None)
            return state, order.target * size

        return nca.Strategy(inner.init, act, "held")

    found = nca.sweep(bars, sized, {"size": [0.2, 0.4, 0.6, 0.8]}, trials=None).attrs
    assert "better than cash, but not shown to be better than buy and hold" in found["verdict"]
    assert "which of them is the best may be luck" in found["verdict"]


def planted(seed, edge, num_bars=2500):
    """Bars whose returns follow the sign of the last ten bars' return."""
    rng = np.random.default_rng(seed)
    close, r = [100.0] * 11, 0.0
    for _ in range(num_bars):
        r = edge * np.sign(close[-1] - close[-11]) + 0.01 * rng.standard_normal()
        close.append(close[-1] * np.exp(r))
    return bars_of(close, start="2000-01-01")


def findings(draw, seeds):
    """How many verdicts find an edge over cash, one over buy and hold, and a choice."""
    found = np.zeros(3, int)
    for seed in seeds:
        said = nca.sweep(
            draw(seed), nca.rules.time_series_momentum, WIDE, fill="close", trials=None
        ).attrs["verdict"]
        found += ["better than cash" in said, "than cash and than" in said, "more than" in said]
    return found


@pytest.mark.heavy
def test_shuffled_bars_are_not_called_skill():
    # At 5%, three or more of twelve have a probability of 2%.
    assert (findings(lambda seed: made(900, seed=seed), range(12)) <= 2).all()


@pytest.mark.slow
def test_the_verdict_is_false_in_at_most_five_of_a_hundred_and_finds_what_was_planted():
    """The figures of docs/guides/sweep.md."""
    assert (findings(lambda seed: planted(seed, 0.0, 2000), range(100)) <= 5).all()
    weak, strong = (
        findings(lambda seed, edge=edge: planted(seed, edge, 2000), range(100))
        for edge in (0.001, 0.0015)
    )
    assert (weak >= [80, 53, 10]).all() and (strong >= [97, 88, 64]).all()


@pytest.mark.heavy
def test_a_planted_edge_is_found():
    table = nca.sweep(
        planted(0, 0.0015), nca.rules.time_series_momentum, WIDE, fill="close", trials=None
    )
    assert "better than cash and than buy and hold" in table.attrs["verdict"]
    assert "which of them is the best is more than luck" in table.attrs["verdict"]
    assert 6 <= table.attrs["search"]["combination"]["lookback"] <= 16


@pytest.mark.heavy
def test_a_loop_that_was_interrupted_resumes(tmp_path, monkeypatch):
    bars, grid = made(200), {"n": range(3, 30)}
    whole = nca.sweep(bars, above, grid, COSTS, trials=None)
    kept = module.WorkFolder.write

    def broken(self, number, arrays):
        if number == 3:
            raise KeyboardInterrupt
        kept(self, number, arrays)

    monkeypatch.setattr(module.WorkFolder, "write", broken)
    with pytest.raises(KeyboardInterrupt):
        nca.sweep(bars, above, grid, COSTS, trials=None, resume=tmp_path)
    monkeypatch.undo()
    written = len(list(tmp_path.glob("part-*.npz")))
    # A machine of more cores cuts other parts, and keeps to those that are there.
    monkeypatch.setattr("nca_trader.evaluate.sweep.sweep.cores", lambda: 1)
    CALLS.clear()
    again = nca.sweep(bars, above, grid, COSTS, trials=None, resume=tmp_path)
    pd.testing.assert_frame_equal(again, whole, check_exact=True)
    width = json.loads((tmp_path / "sweep.json").read_text())["width"]
    assert written == 3 and set(CALLS) == {3, *range(4 + 3 * width, 30)}


@pytest.mark.heavy
@pytest.mark.parametrize("precision", ["f32", "f64"])
@pytest.mark.few(1)
def test_a_sweep_counts_what_a_backtest_of_each_combination_counts(precision, tmp_path):
    """With continuous targets, with stops, and where a function of bars runs in a loop."""
    bars = made(300)

    def numpy_rule(bars, lookback=5):
        return np.asarray(nca.backtest(bars, nca.rules.momentum(lookback)).targets)

    for rule, grid in (
        (nca.rules.volatility_hold, {"annual": [0.1, 0.15, 0.2]}),
        (nca.rules.breakout, {"lookback": [10, 20], "stop": [None, 0.02]}),
        (nca.rules.momentum, {"lookback": [3, 5, 9]}),
    ):
        table = nca.sweep(bars, rule, grid, COSTS, precision=precision, trials=tmp_path)
        number = table.attrs["search"]["trials"]
        for one in table[list(grid)].to_dict("records"):
            values = {k: None if v is None or v != v else v for k, v in one.items()}
            values = {k: int(v) if k == "lookback" else v for k, v in values.items()}
            assert nca.backtest(bars, rule(**values), COSTS, trials=tmp_path).tried == number
    table = nca.sweep(bars, numpy_rule, {"lookback": [3, 5, 9]}, trials=tmp_path)
    assert table.attrs["search"]["trials"] == number


CROSS = {"fast": range(4, 36, 4), "slow": range(40, 140, 10)}


@pytest.mark.heavy
@pytest.mark.parametrize("draws", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_a_zoom_into_the_winner_does_not_raise_the_deflated_ratio(draws, tmp_path):
    changes = []
    for seed in range(draws):
        bars, folder = made(900, seed=100 + seed), tmp_path / str(seed)
        first = nca.sweep(bars, nca.rules.sma_cross, CROSS, trials=folder).attrs["search"]
        near = {k: range(v - 2, v + 3) for k, v in first["combination"].items()}
        second = nca.sweep(bars, nca.rules.sma_cross, near, trials=folder).attrs["search"]
        assert first["trials"] < second["trials"] <= first["trials"] + 24
        assert second["trials_variance"] >= first["trials_variance"]
        changes.append(second["deflated_sharpe"] - first["deflated_sharpe"])
    assert np.median(changes) <= 0.0
