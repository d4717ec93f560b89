"""Planted leaks are found, by name and with a true example; what sees the past alone is not."""

import dataclasses
import inspect

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from drawn import random_bars
from tiny import AGENT
from untrained import untrained_run

import nca_trader as nca
from nca_trader import BarError, ConfigError, Strategy, leakcheck, rules
from nca_trader.data.features import FEATURES, Feature
from nca_trader.evaluate.lookahead import outputs
from nca_trader.evaluate.lookahead.futures import (
    Cases,
    Future,
    changed,
    holed,
    longer,
    without,
)
from nca_trader.evaluate.lookahead.leakcheck import Search, as_subject
from nca_trader.evaluate.lookahead.outputs import explained, foresights, own_features
from nca_trader.types import EXTRAS, PRICES

BARS = dataclasses.replace(
    random_bars(np.random.default_rng(1), 160, 2),
    volume=np.exp(np.random.default_rng(2).normal(10, 1, (160, 2))),
)
SEEDS, FEW = (0, 1), 80  # cases enough to find each of these leaks


def closes(bars):
    return pd.DataFrame(bars.close, bars.index, list(bars.symbols))


def returns(bars):
    return closes(bars).pct_change()


# What leaks. Each is a mistake that people make.


def centred_window(bars):
    return (closes(bars) > closes(bars).rolling(5, center=True).mean()).astype(float)


def full_sample_normalisation(bars):
    return ((returns(bars) - returns(bars).mean()) / returns(bars).std()).clip(-1, 1)


def close_before_its_time(bars):
    return np.sign(closes(bars).shift(-1) - closes(bars))


def back_filled_warm_up(bars):
    return closes(bars).rolling(20).mean().bfill()


def global_rank(bars):
    return returns(bars).rank(pct=True)


def weeks_stamped_by_their_open(bars):
    weeks = closes(bars).resample("7D").last().reindex(bars.index, method="ffill")
    return np.sign(weeks - closes(bars))


def trend_fitted_to_all_bars(bars):
    rows = np.arange(len(bars))
    line = np.polynomial.Polynomial.fit(rows, bars.close[:, 0], 1)(rows)
    return np.where(bars.close[:, 0] < line, 1.0, 0.0)


def closed_before_the_last_bar(bars):
    return np.where(np.arange(len(bars)) < len(bars) - 3, 1.0, 0.0)


def volume_of_one_asset(bars):
    targets = np.zeros(bars.close.shape)
    targets[:-1, 1] = bars.volume[1:, 1] > bars.volume[:-1, 1]
    return targets


def another_assets_next_close(bars):
    targets = np.zeros(bars.close.shape)
    targets[:-1, 0] = bars.close[1:, 1] > bars.close[:-1, 1]
    return targets


def presence_of_the_next_bar(bars):
    return np.vstack([bars.present[1:], bars.present[-1:]]).astype(float)


LEAKS = {
    centred_window: ("close",),
    full_sample_normalisation: ("close",),
    close_before_its_time: ("close",),
    back_filled_warm_up: ("close",),
    global_rank: ("close",),
    weeks_stamped_by_their_open: ("close",),
    trend_fitted_to_all_bars: ("close",),
    closed_before_the_last_bar: ("length",),
    volume_of_one_asset: ("volume",),
    another_assets_next_close: ("close",),
    presence_of_the_next_bar: ("present",),
}


# What does not.


def expanding_z_score(bars):
    past = returns(bars).expanding(20)
    return ((returns(bars) - past.mean()) / past.std()).clip(-1, 1)


def crossing_of_ewm(bars):
    return np.sign(closes(bars) - closes(bars).ewm(span=20).mean())


def weeks_stamped_by_their_close(bars):
    """The last whole week before a bar's own."""
    weeks = closes(bars).resample("7D").last().shift(1).reindex(bars.index, method="ffill")
    return np.sign(weeks - closes(bars))


def range_and_volume(bars):
    return np.stack([(bars.high - bars.low) / bars.close, np.log1p(bars.volume)], axis=-1)


HONEST = (
    expanding_z_score,
    crossing_of_ewm,
    weeks_stamped_by_their_close,
    range_and_volume,
)


@pytest.mark.parametrize("leak", LEAKS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.few(6)
def test_a_planted_leak_is_found_with_its_column_and_a_true_example(leak, seed):
    report = leakcheck(leak, BARS, seed=seed, cases=FEW)
    assert not report.ok and report.leaks > 0, str(report)
    assert set(report.columns) <= set(LEAKS[leak]) and report.columns
    assert f"{leak.__name__} looks ahead through {report.columns[0]}" in str(report)
    example = report.example
    assert report.first_row <= example.row <= example.t
    if example.from_value is not None and "with holes" not in example.change:
        assert_true(leak, example)


def assert_true(leak, example):
    """Made again by hand from what the report says: the row before t does go there."""
    (name,), (symbol,), (row, last) = example.columns, example.assets, example.rows
    assert row == last > example.t
    column = BARS.symbols.index(symbol)
    array = getattr(BARS, name).copy()
    assert array[row, column] == example.from_value
    array[row, column] = example.to_value
    before, after = leak(BARS), leak(dataclasses.replace(BARS, **{name: array}))
    there = [np.asarray(x, float).reshape(len(BARS), -1)[example.row] for x in (before, after)]
    where = BARS.symbols.index(example.where) if example.where else 0
    assert [there[0][where], there[1][where]] == [example.before, example.after]


@pytest.mark.parametrize("subject", HONEST, ids=lambda f: f.__name__)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.few(4)
def test_what_sees_the_past_alone_is_silent(subject, seed):
    report = leakcheck(subject, BARS, seed=seed, cases=FEW)
    assert report.ok and report.leaks == report.raised == 0, str(report)
    assert report.example is None and report.columns == () and report.first_row is None
    assert report.reacted > FEW / 4 and f"no look-ahead found in {FEW} cases" in report.verdict


def test_the_example_is_the_smallest_one():
    example = leakcheck(close_before_its_time, BARS, cases=FEW).example
    assert example.rows == (example.t + 1, example.t + 1) and example.row == example.t
    assert example.columns == ("close",) and len(example.assets) == 1
    assert example.where == example.assets[0]
    example = leakcheck(another_assets_next_close, BARS, cases=FEW).example
    assert example.assets == ("S1",) and example.where == "S0"
    assert str(example).startswith(f"Changing close of S1 in row {example.t + 1} (2020-")
    far = leakcheck(lambda bars: bars.close - bars.close[-1], BARS, cases=FEW)
    assert far.example.rows == (159, 159) and far.columns == ("close",)


def close_of_a_bar_at_its_open(bars):
    return np.sign(bars.close - bars.open)


def close_before_and_this_open(bars):
    targets = np.zeros(bars.close.shape)
    targets[1:] = np.sign(bars.open[1:] - bars.close[:-1])
    return targets


def test_an_order_at_the_open_does_not_know_the_close():
    at_close = leakcheck(close_of_a_bar_at_its_open, BARS, cases=FEW)
    at_open = leakcheck(close_of_a_bar_at_its_open, BARS, decided="open", cases=FEW)
    assert at_close.ok and not at_open.ok
    assert at_open.columns == ("close",)
    assert at_open.example.row == at_open.example.t == at_open.example.rows[0]
    for name in ("high", "low", "volume"):
        report = leakcheck(
            lambda bars, name=name: getattr(bars, name), BARS, decided="open", cases=FEW
        )
        assert report.columns == (name,), report
    honest = leakcheck(close_before_and_this_open, BARS, decided="open", cases=FEW)
    assert honest.ok and honest.reacted > 20
    assert leakcheck(lambda bars: bars.present * 1.0, BARS, decided="open", cases=FEW).ok


# Short enough for the bars here, where the default decides nothing.
PERIODS = {
    "cross_sectional_momentum": {"lookback": 20},
    "time_series_momentum": {"lookback": 20},
    "tuned_sma": {"pairs": ((2, 5), (3, 9)), "every": 20},
    "forecaster": {"lags": 2},
    "breakout": {"lookback": 10, "leave": 5, "stop": 0.02},
    "volatility_hold": {"span": 20.0},
    "half_and_half": {"lookback": 20},
}
RULES = [
    build(**PERIODS.get(name, {}))
    for name, build in inspect.getmembers(rules, inspect.isfunction)
    if build.__module__ == rules.__name__ and not name.startswith("_")
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.few(2)
def test_every_rule_passes(rule):
    report = leakcheck(rule, BARS, cases=FEW)
    assert report.ok, str(report)
    constant = rule.name in ("always flat", "buy and hold", "equal weight", "random 0")
    assert (report.reacted == 0) == constant and ("shows nothing" in report.verdict) == constant


@pytest.mark.heavy
def test_every_feature_passes():
    """All in one, so that they are compiled once; the columns are `FEATURES` in order."""

    def init():
        return {name: feature.init() for name, feature in FEATURES.items()}

    def update(state, bar):
        both = {name: feature.update(state[name], bar) for name, feature in FEATURES.items()}
        return {k: v[0] for k, v in both.items()}, jnp.stack([v[1] for v in both.values()])

    report = leakcheck(Feature(init, update, 0), BARS, cases=FEW)
    assert report.ok and report.reacted > 40, str(report)


def test_a_feature_is_checked_by_its_name():
    report = leakcheck("return_1", BARS, cases=FEW)
    assert report.ok and report.subject == "feature return_1" and report.reacted > FEW / 4


def test_a_strategy_that_peeks_at_bars_it_holds_is_no_leak_but_shows_nothing():
    held = jnp.asarray(BARS.close)

    def update(row, bar):
        return row + 1, jnp.sign(held[jnp.minimum(row + 1, len(held) - 1)] - held[row])

    report = leakcheck(Strategy(lambda num_assets: jnp.zeros((), int), update, "peeks"), BARS)
    assert report.ok and report.reacted == 0
    assert "reads its data elsewhere, so this shows nothing" in str(report)


def test_a_feature_of_ones_own_is_checked_by_its_scan():
    own = Feature(lambda: np.zeros(()), lambda last, bar: (bar.close, bar.close - last), 1)
    report = leakcheck(own, BARS, cases=40, name="change")
    assert report.ok and report.reacted > 5 and report.subject == "change"


@pytest.mark.parametrize(("subject", "few"), [
    (closes, False), ("return_1", True), (FEATURES["return_1"], True), (rules.sma_cross(3, 9), True)
])  # fmt: skip
def test_what_is_compiled_for_each_length_is_tried_on_few(subject, few):
    search = Search(as_subject(subject)._replace(run=closes), 0.0, False)
    cases = search.begin(np.random.default_rng(0), BARS)
    lengths = {len(cases.draw(i).after) for i in range(FEW)}
    assert len(lengths) < 6 if few else len(lengths) > 10


def test_rounding_is_told_from_a_leak_by_the_tolerance():
    def transformed(bars):
        return np.fft.irfft(np.fft.rfft(bars.close[:, 0]), len(bars))

    assert len(BARS) % 2 == 0
    exact = leakcheck(transformed, BARS, cases=60)
    assert not exact.ok and 0 < exact.largest < 1e-9
    assert leakcheck(transformed, BARS, cases=60, tolerance=1e-9).ok
    report = leakcheck(full_sample_normalisation, BARS, cases=60, tolerance=1e-9)
    assert not report.ok and report.largest > 0.01 and "tolerance  1e-09" in str(report)


def test_a_number_that_turns_into_nan_is_a_change_whatever_the_tolerance():
    def gone(bars):
        return np.where(bars.close.max() > 2 * BARS.close.max(), np.nan, bars.close[:, 0])

    report = leakcheck(gone, BARS, tolerance=1.0, cases=FEW)
    assert not report.ok and np.isnan(report.example.after) and "to or from NaN" in str(report)


def test_a_subject_that_needs_later_bars_is_a_finding_and_not_a_crash():
    def needs_row_120(bars):
        if len(bars) <= 120:
            raise IndexError("no row 120")
        return closes(bars).rolling(5).mean()

    report = leakcheck(needs_row_120, BARS, cases=FEW)
    assert not report.ok and not report.leaks and report.raised > 0
    assert "needs later bars to answer for earlier ones" in report.verdict
    assert "IndexError at test_leakcheck.py line" in str(report) and "no row 120" in str(report)


def test_a_subject_that_refuses_too_short_a_history_is_honest():
    def needs_60(bars):
        if len(bars) < 60:
            raise ValueError("too short")
        return closes(bars).rolling(60).mean()

    report = leakcheck(needs_60, BARS, cases=FEW)
    assert report.ok and "refused too short a history" in str(report)


def test_a_subject_that_cannot_take_holes_is_tried_without():
    def whole(bars):
        if not bars.present.all():
            raise ValueError("a bar is missing")
        return closes(bars).rolling(5).mean()

    report = leakcheck(whole, BARS, cases=FEW)
    assert "not tried on bars with holes added: it raises ValueError" in str(report)
    assert report.reacted > FEW / 4 and report.leaks == 0


def noise(bars):
    return np.random.default_rng().normal(size=len(bars))


def writes(bars):
    bars.close[0] = 1.0
    return bars.close


def one_row_less(bars):
    return np.diff(bars.close, axis=0)


def words(bars):
    return ["long"] * len(bars)


def nothing(bars):
    pass


def other_times(bars):
    return closes(bars).shift(1, freq="D").iloc[:, 0]


def fails(bars):
    return bars.closing_price


@pytest.mark.parametrize(
    ("subject", "says"),
    [
        (noise, "noise: gives other values when it is called again with the same bars, so nothing"),
        (
            writes,
            r"writes: it writes into the bars at test_leakcheck.py line \d+ \(.*\); let it copy",
        ),
        (one_row_less, r"one_row_less: it gives shape \(159, 2\), not one row for each of 160"),
        (words, "words: it gives list, not numbers, one row per bar"),
        (nothing, r"nothing: it gives shape \(\), not one row for each"),
        (other_times, "its rows are not at the times of the bars; reindex by bars.index"),
        (
            fails,
            r"fails: it raises AttributeError at test_leakcheck.py line \d+ \(.*\): 'Bars' object",
        ),
        ("retrun_1", "did you mean 'return_1'"),
        (3, "3 can't be checked; give a function of bars, a Strategy"),
    ],
)
def test_what_cannot_be_checked_is_refused_in_one_line(subject, says):
    with pytest.raises(ConfigError, match=says) as refused:
        leakcheck(subject, BARS)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"cases": 0}, "cases = 0: try at least one"),
        ({"decided": "noon"}, "decided = 'noon' is unknown; there are 'close' and 'open'"),
        ({"tolerance": -1.0}, "tolerance = -1.0 is not a tolerance"),
        ({"tolerance": float("nan")}, "tolerance = nan is not a tolerance"),
    ],
)
def test_options_that_mean_nothing(options, says):
    with pytest.raises(ConfigError, match=says):
        leakcheck(crossing_of_ewm, BARS, **options)


def test_too_few_bars_are_refused():
    with pytest.raises(BarError, match="19 bars are too few to tell a past from a future"):
        leakcheck(crossing_of_ewm, BARS[:19])
    assert leakcheck(crossing_of_ewm, BARS[:20]).ok


def test_the_same_seed_is_the_same_report():
    first = leakcheck(global_rank, BARS, cases=25)
    assert first == leakcheck(global_rank, BARS, cases=25)
    assert first != leakcheck(global_rank, BARS, cases=25, seed=1)
    told = first.to_dict()
    assert told["ok"] is False and told["example"]["row"] == first.example.row
    assert told["verdict"] == first.verdict


FIELDS = (*PRICES, "volume", "present", *EXTRAS)


def full_bars():
    """Bars with holes, a late listing, and every column that there can be."""
    rng = np.random.default_rng(3)
    bars = holed(rng, BARS, 0.1)
    late = {name: getattr(bars, name).copy() for name in PRICES}
    for values in late.values():
        values[:10, 1] = np.nan
    present = bars.present.copy()
    present[:10, 1] = False
    extras = {name: rng.random((160, 2)) for name in ("half_spread", "dividend", "funding")}
    return dataclasses.replace(bars, present=present, **late, **extras)


@pytest.mark.parametrize("at_open", [False, True])
@pytest.mark.parametrize("kind", ["all", "order", *FIELDS])
def test_another_future_leaves_the_past_alone_and_keeps_the_conventions(kind, at_open):
    bars = full_bars()
    for t in (0, 5, 80, 157):
        rng = np.random.default_rng(t)
        future = Future.after(bars.close.shape, t, 0, at_open)
        other = changed(rng, bars, kind, future)
        differs = {
            name: getattr(other, name) != np.nan_to_num(getattr(bars, name), nan=-1.0)
            for name in bars.fields
        }
        differs = {k: v & ~np.isnan(getattr(bars, k)) for k, v in differs.items()}
        assert not any(d[:, 1].any() for d in differs.values())
        for name in bars.fields:
            known = t + 1 - (at_open and name not in ("open", "present", "dividend"))
            assert not differs[name][:known].any(), name
        after = t + 1
        there = other.present[after:]
        top = np.maximum(other.open, other.close)[after:]
        assert (other.high[after:] >= top)[there].all()
        missing = ~other.present & (np.arange(160) >= after)[:, None]
        missing[:, 1] = False
        rows, columns = np.nonzero(missing)
        np.testing.assert_array_equal(
            other.close[rows, columns], other.close[rows - 1, columns], err_msg=kind
        )
        assert (other.volume[rows, columns] == 0).all()
        if kind not in ("present", "open") and t < 157:
            assert any(d.any() for d in differs.values()), (kind, t)


def test_shorter_and_longer_bars_agree_where_they_should():
    bars, rng = full_bars(), np.random.default_rng(0)
    cut = without(bars, 100, 110)
    assert len(cut) == 150
    for name in ("time", *bars.fields):
        joined = np.r_[getattr(bars, name)[:100], getattr(bars, name)[110:]]
        np.testing.assert_array_equal(getattr(cut, name), joined)
        np.testing.assert_array_equal(
            getattr(longer(rng, bars, 9), name)[:160], getattr(bars, name)
        )
    more = longer(rng, bars, 9)
    assert len(more) == 169 and (np.diff(more.time) > np.timedelta64(0, "ns")).all()


def test_cases_reach_both_ends_every_column_and_every_asset():
    bars = full_bars()
    rng = np.random.default_rng(0)
    cases = Cases(rng, {False: bars, True: holed(rng, bars)}, bars.close, False, False)
    drawn = [cases.draw(i) for i in range(200)]
    rows = np.array([case.t for case in drawn])
    assert (rows < 10).sum() > 20 and (rows > 148).sum() > 20 and ((rows > 50) & (rows < 110)).any()
    lengths = [len(case.after) for case in drawn]
    assert min(lengths) < 20 and max(lengths) > 160 and lengths.count(160) > 100
    touched = set()
    for case in drawn:
        for name in bars.fields if case.same_length else ():
            a, b = getattr(case.before, name), getattr(case.after, name)
            same = (a == b) | (np.isnan(a) & np.isnan(b))
            touched |= {(name, i) for i in np.flatnonzero(~same.all(axis=0))}
            assert same[: case.t + 1].all()
    assert touched == {(name, i) for name in bars.fields for i in (0, 1)}


WALK = random_bars(np.random.default_rng(1), 700, 2, missing=0.02)


def later(price, bars):
    """The price one bar later, NaN in the last row."""
    return np.concatenate([getattr(bars, price)[1:], np.full((1, bars.num_assets), np.nan)])


def noise(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def with_column(values, bars=WALK):
    return dataclasses.replace(bars, columns={"x": values})


NEXT = later("close", WALK) / WALK.close - 1.0
OPENED = np.concatenate([later("open", WALK)[1:], np.full((1, 2), np.nan)]) / later("open", WALK)
KNOWING = {
    "next return": NEXT,
    "noisy next return": NEXT + np.nanstd(NEXT) * noise(NEXT.shape),
    "return from open to open": OPENED - 1.0,
    "of one asset": NEXT * [0.0, 1.0],
    "half of it missing": np.where(noise(NEXT.shape) > 0, NEXT, np.nan),
    "next close": later("close", WALK),
    "next close in another unit": 17.3 * later("close", WALK),
    "logarithm of the next close": np.log(later("close", WALK)),
    "sum of returns": np.cumsum(np.nan_to_num(NEXT), axis=0) - 0.4,
    "next high": later("high", WALK),
    "sign": np.sign(NEXT),
    "long tomorrow": (NEXT > 0.0) * 1.0,
}


@pytest.mark.parametrize("name", KNOWING)
def test_a_column_that_knows_the_next_bar_is_named(name):
    (said,) = foresights(with_column(KNOWING[name]))
    assert said.startswith("FORESIGHT: column:x") and "shift it one bar later" in said
    assert ("of S1 " in said) or name != "of one asset", said
    # The remedy that it names; a return that ends at the open after the next takes it twice.
    rows = 2 if "open to open" in name else 1
    shifted = np.concatenate([np.full((rows, 2), np.nan), KNOWING[name][:-rows]])
    assert foresights(with_column(shifted)) == []


def spikes():
    """One crash after one event, of an otherwise calm market: a coincidence."""
    bars = random_bars(np.random.default_rng(2), 700, 1, spread=0.001)
    fall = np.where(np.arange(700) > 400, 0.5, 1.0)[:, None]
    prices = {name: getattr(bars, name) * fall for name in PRICES}
    return with_column((np.arange(700) == 400)[:, None] * 1.0, dataclasses.replace(bars, **prices))


def bouncing():
    """Prices that bounce between bid and ask: a bar's own return explains a fifth of the next."""
    bars = random_bars(np.random.default_rng(3), 700, 1, spread=1e-4)
    shift = 1.0 + 0.01 * np.sign(noise((700, 1)))
    prices = {name: getattr(bars, name) * shift for name in PRICES}
    bars = dataclasses.replace(bars, **prices)
    return with_column(np.diff(np.log(bars.close), axis=0, prepend=np.nan), bars)


HONEST = {
    "this bar's return": lambda: with_column(np.roll(np.nan_to_num(NEXT), 1, axis=0)),
    "close": lambda: with_column(WALK.close),
    "the other asset": lambda: with_column(WALK.close[:, ::-1]),
    "random walk": lambda: with_column(noise(NEXT.shape).cumsum(axis=0)),
    "weak, as signals are": lambda: with_column(NEXT + 0.06 * noise(NEXT.shape)),
    "constant": lambda: with_column(np.ones(NEXT.shape)),
    "nothing": lambda: with_column(np.full(NEXT.shape, np.nan)),
    "few rows": lambda: with_column(NEXT[:3], WALK[:3]),
    "one crash": spikes,
    "bounce": bouncing,
}


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_column_is_not(name):
    assert foresights(HONEST[name]()) == []


@pytest.mark.few(1)
@pytest.mark.parametrize("market", ["sine", "ou_mid", "ar1_weak", "ring_hop3"])
def test_states_of_a_market_of_this_package_predict_and_may(market):
    config = nca.load_env(market)
    task = nca.TradingEnv(None, dataclasses.replace(config, market_bars=600)).task
    returns = np.concatenate([task.returns[1:], task.returns[-1:]])
    assert foresights(dataclasses.replace(task.bars, columns={"state": returns})) == []


def test_t_and_r2_are_those_of_statsmodels():
    own, x = noise((300, 2), 1), noise((300, 1), 2)
    y = 0.3 * own + 0.7 * x + noise((300, 2), 3) * np.abs(x)
    y[::7, 0], x[5] = np.nan, np.nan
    t, r2 = explained(y, x, own)
    for a in range(2):
        rows = np.isfinite(y[:, a]) & np.isfinite(x[:, 0])
        seen = sm.add_constant(np.column_stack([own[rows, a], x[rows, 0]]))
        full = sm.OLS(y[rows, a], seen).fit(cov_type="HC3")
        less = sm.OLS(y[rows, a], seen[:, :2]).fit()
        assert t[a] == pytest.approx(full.tvalues[2], rel=1e-9)
        assert r2[a] == pytest.approx(full.rsquared - less.rsquared, rel=1e-9)


def test_the_report_warns_of_a_column_and_of_what_code_reads_elsewhere():
    held = np.nan_to_num(NEXT)
    report = leakcheck(lambda bars: bars.columns["x"] > 0.0, with_column(NEXT), cases=10)
    assert report.ok and any("FORESIGHT: column:x explains" in note for note in report.notes)
    report = leakcheck(lambda bars: held[: len(bars)], WALK, cases=10, name="mine")
    (note,) = report.to_dict()["notes"]
    assert note.startswith("FORESIGHT: the output of mine explains") and note in str(report)
    assert leakcheck("return_1", WALK, cases=10).notes == ()


def test_a_backtest_warns_where_it_is_read_and_computes_nothing_without_columns(
    caplog, monkeypatch
):
    result = nca.backtest(with_column(NEXT), rules.buy_and_hold())
    (said,) = (caution for caution in result.cautions if "FORESIGHT" in caution)
    assert any(said in line for line in caplog.messages)
    assert "FORESIGHT: column:x explains the next return of S" in str(result).splitlines()[-1]
    monkeypatch.setattr(outputs, "explained", None)
    assert nca.backtest(WALK, rules.buy_and_hold()).cautions == ()


def test_own_features_are_tried_and_built_in_ones_are_not(tmp_path, monkeypatch):
    (tmp_path / "mine_ahead.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    np.save(tmp_path / "held.npy", np.nan_to_num(NEXT[:, 0]))
    monkeypatch.chdir(tmp_path)
    own = ("mine_ahead:reads", "1d:mine_ahead:reads")
    assert own_features(("rsi", "1d:rsi", "column:x", "mine_ahead:mean", *own)) == own
    config = nca.EnvConfig(features=("return_1", "mine_ahead:reads"))
    run = untrained_run(tmp_path / "runs" / "a", WALK, config, AGENT)
    (said,) = (c for c in nca.backtest(WALK, run).cautions if "FORESIGHT" in c)
    assert said.startswith("FORESIGHT: mine_ahead:reads explains the next return of S0")


def test_an_indicator_is_tried_on_a_few_bars_and_says_so():
    """Python is called for each bar of each case: 200 cases of 26,000 hours took ten minutes."""
    calls = []

    def over_mean(x):
        calls.append(len(x))
        return x[-1] / x.mean() - 1.0

    bars = random_bars(np.random.default_rng(0), 3000, 1)
    found = nca.leakcheck(nca.indicator(over_mean, "close", lookback=5), bars, cases=10)
    assert found.ok and found.reacted and found.bars.startswith("258 bars")
    assert "cases are of the last 258 bars" in found.notes[0] and len(calls) < 15 * 258


OWN = """
import jax.numpy as jnp
import numpy as np
import nca_trader as nca
from nca_trader.data.features import Feature

mean = nca.indicator(lambda x: x[-1] / x.mean() - 1.0, "close", lookback=20)


def reads():
    held = np.load("held.npy")

    def update(row, bar):
        return row + 1, jnp.asarray(held)[jnp.minimum(row, len(held) - 1)]

    return Feature(lambda: np.zeros((), np.int64), update, 0)
"""
