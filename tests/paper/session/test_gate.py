"""The gate: a bar file's own checks, and a price that is far from the last waits for the next."""

import itertools

import numpy as np
import pandas as pd
import pytest

from nca_trader.data.bars import read_bars
from nca_trader.errors import BarError
from nca_trader.paper.feeds.feed import NANOSECONDS, ReplayFeed
from nca_trader.paper.journal.bars import bar_body
from nca_trader.paper.session import gate as gates
from nca_trader.paper.session.gate import Gate

SYMBOLS = ("AAA", "BBB")
DAY = 86_400


@pytest.fixture(scope="module")
def bars(stage):
    return list(ReplayFeed(stage.bars()))


def changed(bar, **fields):
    return bar._replace(**{name: np.array(value) for name, value in fields.items()})


def scaled(bar, times, asset=0):
    """The bar with all prices of one asset multiplied."""
    factor = np.where(np.arange(2) == asset, times, 1.0)
    return bar._replace(**{n: getattr(bar, n) * factor for n in ("open", "high", "low", "close")})


def passed(gate, bars):
    """What the gate lets through, and the codes of what it does not."""
    out, codes = [], []
    for bar in bars:
        found, refusal = gate.admit(bar)
        out += found
        codes += [(refusal.code, refusal.held)] if refusal else []
    return out, codes


FAULTS = [
    ({"close": [np.nan, 100.0]}, "D006"),
    ({"open": [np.inf, 100.0]}, "D007"),
    ({"low": [0.0, 1.0]}, "D008"),
    ({"open": [-100.0, 100.0]}, "D008"),
    ({"high": [1.0, 1000.0]}, "D010"),
    ({"low": [1000.0, 1.0]}, "D010"),
    ({"volume": [-1.0, 0.0]}, "D012"),
    ({"volume": [np.inf, 0.0]}, "D007"),
]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({}, None),
        *FAULTS,
        ({"volume": [np.nan, 0.0]}, None),
        ({"present": [False, False]}, None),
        ({"present": [False, True], "close": [np.nan, None]}, None),
        ({"time": [DAY, DAY + 1]}, "bar-times"),
        ({"half_spread": [1.0, 0.0]}, "D033"),
        ({"dividend": [-1.0, 0.0]}, "D012"),
        ({"funding": [0.0, -1.5]}, "D033"),
    ],
)
def test_the_gate_names_what_is_wrong(bars, fields, code):
    bar = bars[1]
    if fields.get("close") and fields["close"][1] is None:
        fields = fields | {"close": [np.nan, bar.close[1]]}
    _, refusal = Gate(SYMBOLS).admit(changed(bar, **fields))
    assert (refusal and refusal.code) == code


def test_of_a_live_feed_a_bar_of_no_asset_is_refused(bars):
    _, refusal = Gate(SYMBOLS, live=True).admit(changed(bars[1], present=[False, False]))
    assert refusal.code == "bar-empty"


@pytest.mark.parametrize(("fields", "code"), FAULTS)
def test_a_file_with_the_same_fault_is_refused_with_the_same_code(bars, fields, code, tmp_path):
    bar = changed(bars[1], **fields)
    rows = {n: [getattr(b, n)[0] for b in (bars[0], bar)] for n in
            ("open", "high", "low", "close", "volume")}  # fmt: skip
    frame = pd.DataFrame({"time": ["2020-01-01", "2020-01-02"], **rows})
    frame.to_csv(tmp_path / "bars.csv", index=False)
    with pytest.raises(BarError, match=code):
        read_bars(tmp_path / "bars.csv")


def test_an_adjusted_price_that_rounds_below_its_low_passes_as_in_a_file(bars):
    bar = bars[1]
    low = np.minimum(bar.open, bar.close) * (1.0 + 1e-12)
    assert Gate(SYMBOLS).admit(bar._replace(low=low))[1] is None


def test_the_same_bar_again_is_dropped_and_another_of_its_time_is_refused(bars):
    out, codes = passed(Gate(SYMBOLS), [bars[0], bars[1], bars[1], scaled(bars[1], 1.01), bars[0]])
    assert len(out) == 2 and codes == [("D021", False), ("D020", False)]


def test_a_live_bar_that_passed_is_dropped_at_any_age_and_a_corrected_one_is_no_bad_bar(bars):
    """In a row they would halt a session; a version that was told is not told again."""
    journal = {}
    gate = Gate(SYMBOLS, live=True, passed=journal.get)
    for bar in bars[:6]:
        ((taken,), _) = gate.admit(bar)
        journal[int(bar.time[0])] = bar_body(taken.bar, SYMBOLS)
    assert [gate.admit(bar) for bar in bars[:6]] == [([], None)] * 6
    for factor in (1.01, 1.02):
        out, refusal = gate.admit(scaled(bars[2], factor))
        assert (out, refusal.code, refusal.bad) == ([], "correction", False)
        assert SYMBOLS[0] in refusal.say and gate.admit(scaled(bars[2], factor)) == ([], None)
    del journal[int(bars[3].time[0])]  # one that never passed
    assert gate.admit(bars[3])[1].code == "D020" and gate.in_a_row == 0
    assert len(gate.admit(bars[6])[0]) == 1


@pytest.mark.parametrize(
    ("early", "code"), [(0, None), (1, None), (10, "bar-unfinished"), (DAY + 10, "bar-future")]
)
def test_a_bar_that_is_not_closed_is_not_used(bars, early, code):
    closes = int(bars[0].time[0]) + DAY
    gate = Gate(SYMBOLS, live=True, seconds=DAY, clock=lambda: (closes - early) * NANOSECONDS)
    _, refusal = gate.admit(bars[0])
    assert (refusal and refusal.code) == code


def is_confirmed(passed):
    (said,) = passed.risks
    return {"bar-confirmed": True, "bar-not-confirmed": False}[said["code"]]


def test_a_spike_waits_and_is_taken_out_where_the_next_bar_does_not_confirm_it(bars):
    gate = Gate(SYMBOLS, live=True)
    passed(gate, bars[:60])
    found, refusal = gate.admit(scaled(bars[60], 100.0))
    assert found == [] and refusal.held and refusal.code == "D026" and gate.in_a_row == 1
    assert "AAA" in refusal.say and "times the last close" in refusal.say
    (held, now), refusal = gate.admit(bars[61])
    assert refusal is None and gate.in_a_row == 0
    assert held.late and not is_confirmed(held) and not now.late
    # The other asset of that bar is as it came; the far one is missing, at its last close.
    assert held.bar.present.tolist() == [False, True] and held.bar.volume[0] == 0.0
    for name in ("open", "high", "low", "close"):
        np.testing.assert_array_equal(
            getattr(held.bar, name), [bars[59].close[0], getattr(bars[60], name)[1]]
        )
    assert now.bar is bars[61]


@pytest.mark.parametrize("times", [100.0, 0.01, 2.5])
def test_a_jump_that_the_next_bar_confirms_is_released_as_it_came(bars, times):
    gate = Gate(SYMBOLS, live=True)
    jumped = [scaled(bar, times) for bar in bars[60:]]
    out, codes = passed(gate, [*bars[:60], *jumped])
    assert codes == [("D026", True)]
    assert [each.bar for each in out] == [*bars[:60], *jumped]
    assert [i for i, each in enumerate(out) if each.late] == [60] and is_confirmed(out[60])


@pytest.mark.parametrize(("next_open", "confirmed"), [(1.3, False), (1.6, True)])
def test_a_next_bar_between_both_prices_confirms_the_nearer_one(bars, next_open, confirmed):
    """It is far from neither, as a fall by a third of twice the price shows."""
    out, codes = passed(Gate(SYMBOLS, live=True), [
        *bars[:60], scaled(bars[60], 2.0), *[scaled(bar, next_open) for bar in bars[61:63]],
    ])  # fmt: skip
    assert codes == [("D026", True)] and is_confirmed(out[60]) == confirmed


def test_a_fill_is_far_beyond_five_percent_or_ten_usual_moves(bars):
    fresh, moved, bar = Gate(SYMBOLS), Gate(SYMBOLS, live=True), bars[60]
    passed(moved, bars[:60])
    closes = [each.close[0] for each in bars[:60]]
    usual = np.median(np.abs(np.diff(np.log(closes))))
    assert 10 * usual > 0.05
    for gate, last, far in ((fresh, bar.close[0], 0.05), (moved, closes[-1], 10 * usual)):
        low, high = min(bar.low[0], last), max(bar.high[0], last)
        for part, outside in ((0.99, False), (1.01, True)):
            for price in (high * np.exp(part * far), low / np.exp(part * far)):
                assert gate.is_outside(0, price, bar) == outside


def test_what_an_asset_pays_goes_with_its_bar(bars):
    paying = [bar._replace(dividend=np.array([0.5, 0.25])) for bar in bars]
    out, _ = passed(Gate(SYMBOLS, live=True), [*paying[:60], scaled(paying[60], 100.0), paying[61]])
    assert out[60].late and out[60].bar.dividend.tolist() == [0.0, 0.25]


def test_an_open_that_alone_is_far_is_never_confirmed(bars):
    gate = Gate(SYMBOLS, live=True)
    spike = bars[60]._replace(open=bars[60].open * [100.0, 1.0], high=bars[60].high * [100.0, 1.0])
    out, codes = passed(gate, [*bars[:60], spike, *bars[61:]])
    assert codes == [("D026", True)]
    assert not is_confirmed(out[60]) and out[60].bar.present.tolist() == [False, True]


def test_three_far_bars_in_a_row_are_counted(bars):
    gate = Gate(SYMBOLS, live=True)
    passed(gate, bars[:60])
    counted = []
    for bar, times in zip(bars[60:63], (100.0, 1e4, 1e-3), strict=True):
        assert gate.admit(scaled(bar, times))[1].held
        counted.append(gate.in_a_row)
    assert counted == [1, 2, 3]


def test_a_bar_of_one_asset_that_is_not_confirmed_is_dropped(stage):
    bars = list(ReplayFeed(stage.bars(symbols=("AAA",))))
    wild = bars[60]._replace(**{n: getattr(bars[60], n) * 100 for n in
                                ("open", "high", "low", "close")})  # fmt: skip
    out, _ = passed(Gate(("AAA",), live=True), [*bars[:60], wild, *bars[61:]])
    assert [each.bar for each in out] == [*bars[:60], *bars[61:]]


def test_a_wild_asset_may_move_further_than_a_calm_one(stage, bars):
    """25 times the median move, as in a file: 3 times the price is usual for this asset."""
    rng = np.random.default_rng(0)
    close = 100.0 * np.exp(np.cumsum(0.3 * rng.standard_normal((80, 1)), axis=0))
    wild = [
        bars[i]._replace(time=bars[i].time[:1], present=np.array([True]), volume=np.ones(1),
                         **{n: close[i] for n in ("open", "high", "low", "close")})
        for i in range(80)
    ]  # fmt: skip
    _, codes = passed(Gate(("AAA",), live=True), wild)
    assert codes == []
    assert np.abs(np.diff(np.log(close[:, 0]))).max() > np.log(1.8)


def test_a_file_has_been_checked_for_jumps_already(bars):
    out, codes = passed(Gate(SYMBOLS), [*bars[:60], scaled(bars[60], 100.0), *bars[61:]])
    assert len(out) == 80 and codes == [] and not any(each.late for each in out)


def test_the_same_bars_give_the_same_verdicts_and_a_learnt_history_too(bars):
    stream = [*bars[:60], scaled(bars[60], 100.0), *bars[61:70], scaled(bars[70], 0.01), *bars[71:]]
    whole, learnt = Gate(SYMBOLS, live=True), Gate(SYMBOLS, live=True)
    one, _ = passed(whole, stream)
    for each in one[:65]:
        learnt.learn(each.bar)
    two, codes = passed(learnt, stream[65:])
    assert list(map(repr, one[65:])) == list(map(repr, two)) and codes == [("D026", True)]


@pytest.mark.heavy
def test_what_the_quick_comparison_passes_the_whole_check_passes_too(bars, monkeypatch):
    """Every row of odd numbers gets the verdict that it gets without the comparison."""
    numbers = (np.nan, np.inf, -1.0, 0.0, 99.0, 100.0)
    rows = list(itertools.product(numbers, repeat=5))

    def verdicts():
        found = []
        for row in rows:
            fields = dict(zip(("open", "high", "low", "close", "volume"), row, strict=True))
            bar = bars[0]._replace(**{name: np.full(2, x) for name, x in fields.items()})
            refusal = Gate(("AAA", "BBB")).admit(bar)[1]
            found.append(None if refusal is None else refusal.code)
        return found

    quick = verdicts()
    monkeypatch.setattr(gates, "_is_plain", lambda bar: False)
    assert quick == verdicts()
    assert 0 < quick.count(None) < len(rows) / 10
