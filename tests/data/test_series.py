"""Bars through time: adjustment that knows no later event, gaps as missing bars, ticker re-use."""

import numpy as np
import pandas as pd
import pytest

from nca_trader.data.bars import read_bars, write_bars
from nca_trader.errors import BarError
from nca_trader.types import PRICES


def flat_frame(time, price=10.0, **columns):
    close = np.broadcast_to(price, len(time))
    return pd.DataFrame({"time": time, **dict.fromkeys(PRICES, close), "volume": 100.0, **columns})


DAYS = pd.date_range("2020-01-06", periods=6, tz="UTC")


def test_a_split_and_a_dividend_by_hand():
    # 2 for 1 before the third bar; a dividend of 4 paid at a price of 40 before the fifth.
    frame = flat_frame(
        DAYS,
        np.array([100.0, 100, 50, 50, 45, 45]),
        split=[0.5, 0.5, 1, 1, 1, 1],
        dividend=[0.9, 0.9, 0.9, 0.9, 1, 1],
    )
    bars = read_bars(frame, columns={"split": "split", "dividend": "dividend"})
    for name in PRICES:
        np.testing.assert_allclose(getattr(bars, name)[:, 0], 100.0, rtol=1e-15)
    # Two shares now are one of then; the dividend changes no share.
    np.testing.assert_array_equal(bars.volume[:, 0], [100, 100, 50, 50, 50, 50])
    assert "Prices adjusted by split and dividend" in bars.note
    only = read_bars(frame, columns="dividend=dividend", repair="keep-jumps")
    np.testing.assert_array_equal(only.volume[:, 0], 100.0)


def test_a_later_event_changes_no_earlier_bar():
    rng = np.random.default_rng(1)
    price = np.exp(np.cumsum(rng.normal(0, 0.01, 200))) * 50
    time = pd.date_range("2020-01-01", periods=200, tz="UTC")
    # Dyadic factors, so that the ratio of two of them is exact.
    factor = np.where(np.arange(200) < 80, 0.5, 1.0)
    whole = flat_frame(time, price, f=factor)
    options = {"columns": "split=f", "repair": "keep-jumps"}
    known = read_bars(whole[:150], **options)
    for later in (0.25, 4.0):  # a split at bar 150 rescales every factor before it
        rescaled = whole.assign(f=np.where(np.arange(200) < 150, factor * later, 1.0))
        assert read_bars(rescaled, **options)[:150].digest() == known.digest()


def test_quotients_are_factors_and_unused_ones_are_told(tmp_path):
    close = np.array([100.0, 101, 50, 51, 52, 53])
    frame = flat_frame(DAYS, close, **{"Adj Close": close * [0.5, 0.5, 1, 1, 1, 1]})
    with pytest.raises(BarError) as caught:
        read_bars(frame)
    assert "D027 row 2: Adj Close = 50 adjusts the prices" in str(caught.value)
    assert 'columns="dividend=Adj Close/close", or pass repair="unadjusted"' in str(caught.value)
    bars = read_bars(frame, columns="dividend=Adj Close/close")
    np.testing.assert_allclose(bars.close[:, 0], [100, 101, 100, 102, 104, 106], rtol=1e-15)
    by = read_bars(frame.assign(Adj=[2, 2, 1, 1, 1, 1]), columns="split=1/Adj")
    np.testing.assert_array_equal(by.close[:, 0], [100, 101, 100, 102, 104, 106])
    as_is = read_bars(frame, repair="unadjusted,keep-jumps")
    np.testing.assert_array_equal(as_is.close[:, 0], close)
    same = frame.assign(**{"Adj Close": close})[:2]
    assert read_bars(same).note.startswith("2 of 2 bars have open = high")


@pytest.mark.parametrize(("value", "repair"), [
    (np.nan, "drop-nan"), (0.0, "drop-bad"), (-1.0, "drop-bad"), (np.inf, "drop-bad"),
])  # fmt: skip
def test_a_factor_that_is_none_is_refused(value, repair):
    frame = flat_frame(DAYS, f=1.0)
    frame.loc[3, "f"] = value
    with pytest.raises(BarError, match=rf"D030 row 3: split factor = {value}.*repair=\"{repair}\""):
        read_bars(frame, columns="split=f")
    assert len(read_bars(frame, columns="split=f", repair=repair)) == 5


def test_each_span_of_a_ticker_is_adjusted_from_its_own_first_bar():
    time = DAYS.append(DAYS + pd.Timedelta(1000, "D"))
    frame = flat_frame(time, np.repeat([10.0, 300.0], 6), symbol="FB", f=np.repeat([0.1, 1.0], 6))
    with pytest.raises(BarError) as caught:
        read_bars(frame, columns="split=f")
    assert (
        "D025 row 6: FB has bars from 2020-01-06 to 2020-01-11 and again from 2022-10-02 to "
        in (str(caught.value))
    )
    bars = read_bars(frame, columns="split=f", repair="part-reuse")
    assert bars.symbols == ("FB", "FB-2022")
    assert list(bars.close[[0, 6]].ravel())[::3] == [10.0, 300.0]
    one = read_bars(frame, columns="split=f", repair="keep-gaps")
    assert one.close[0, 0] == 10.0 and one.close[6, 0] == 3000.0
    # Three spans, and another symbol between that is not concerned.
    more = pd.concat([
        frame.drop(columns="f"),
        flat_frame(time + pd.Timedelta(2000, "D"), symbol="FB")[:6],
        flat_frame(time, symbol="X")[:6],
    ])  # fmt: skip
    assert read_bars(more, repair="part-reuse").symbols == ("FB", "FB-2022", "FB-2025", "X")


def test_parted_bars_come_back_from_a_file_without_a_repair(tmp_path):
    time = DAYS.append(DAYS + pd.Timedelta(1000, "D"))
    frame = pd.concat([flat_frame(time, symbol="FB"), flat_frame(time, 20.0, symbol="X")])
    bars = read_bars(frame, repair="part-reuse")
    write_bars(bars, tmp_path / "bars.parquet")
    assert read_bars(tmp_path / "bars.parquet").digest() == bars.digest()


def session(day, last="15:30"):
    """Half hours of a New York session, by the clock there."""
    zone = "America/New_York"
    return pd.date_range(f"{day} 09:30", f"{day} {last}", freq="30min", tz=zone)


def test_half_days_holidays_and_gaps_are_missing_bars_and_nights_are_none():
    days = pd.bdate_range("2020-02-03", "2020-04-30")  # over the change of the clock
    half, holiday = days[20], days[31]
    times = [session(f"{d:%Y-%m-%d}", "12:30" if d == half else "15:30") for d in days]
    whole = pd.DatetimeIndex([t.tz_convert("UTC") for day in times for t in day])
    gap = whole[100]
    local = whole.tz_convert("America/New_York")
    kept = whole[(whole != gap) & (local.strftime("%Y-%m-%d") != f"{holiday:%Y-%m-%d}")]
    bars = read_bars(flat_frame(kept), timezone="America/New_York", every="30min")
    want = [t.tz_convert("UTC") for d in days for t in session(f"{d:%Y-%m-%d}")]
    assert list(bars.index) == want
    missing = bars.index[~bars.present[:, 0]].tz_convert("America/New_York")
    half_day = [t for t in session(f"{half:%Y-%m-%d}") if t.hour >= 13]
    expected = {gap, *half_day, *session(f"{holiday:%Y-%m-%d}")}
    assert set(missing) == expected and len(missing) == len(expected)
    assert (bars.volume[~bars.present] == 0).all() and (bars.close == 10.0).all()
    assert read_bars(flat_frame(kept), timezone="America/New_York").present.all()


def test_a_market_that_never_closes_has_every_time(tmp_path):
    time = pd.date_range("2020-01-01 00:07", periods=3000, freq="1min", tz="UTC")
    rng = np.random.default_rng(0)
    keep = rng.random(3000) < 0.8
    keep[[0, -1]] = True
    bars = read_bars(flat_frame(time[keep]), every="1min")
    assert len(bars) == 3000
    np.testing.assert_array_equal(bars.present[:, 0], keep)


@pytest.mark.parametrize("every", ["7h", "2d", "-1min", "soon", "0min"])
def test_a_length_that_is_no_part_of_a_day_is_refused(every):
    with pytest.raises(BarError, match="must divide a day evenly"):
        read_bars(flat_frame(DAYS), every=every)
