"""Bars through time: adjustment that knows no later event, gaps as missing bars, ticker re-use."""

import numpy as np
import pandas as pd
import pytest

from nca_trader.data.bars import read_bars, sample_bars, write_bars
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
    told = "Columns that are not used: Adj Close. 2 of 2 bars have open = high"
    assert read_bars(same).note.startswith(told)


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
    said = "D025 row 6: FB has no bar between 2020-01-11 and 2022-10-02: a ticker used again"
    assert said in str(caught.value)
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


RATIOS = [1.25, 4 / 3, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 10.0, 20.0, 1 / 2, 1 / 5, 1 / 10]


def clean_sets(shared):
    """Bars of five real markets as frames, adjusted, so that nothing in them is a split."""
    folder = shared / "data"
    options = {"columns": "split=split_factor,dividend=price_factor", "repair": "keep-jumps"}
    daily = read_bars(folder / "us_equity_daily.parquet", symbol="SPY", **options)
    hourly = read_bars(folder / "us_equity_hourly.parquet", "SPY", "America/New_York", **options)
    return {
        "minutes of bitcoin": read_bars(folder / "btcperp_minute_2022_01.parquet", timezone="UTC")[
            :20_000
        ],
        "hours of bitcoin": read_bars(folder / "btcusd_hourly_2018_2022.parquet", timezone="UTC")[
            :20_000
        ],
        "hours of the euro": read_bars(
            folder / "eurusd_hourly_quotes.parquet", timezone="UTC", repair="no-volume"
        )[:20_000],
        "days of a fund": daily,
        "hours of a fund": hourly[:20_000],
        "days of an index": sample_bars("sp500").select("NASDAQ"),
    }


@pytest.fixture(scope="module")
def clean(shared):
    return {name: frame_of(bars) for name, bars in clean_sets(shared).items()}


def frame_of(bars):
    columns = {name: getattr(bars, name)[:, 0] for name in (*PRICES, "volume")}
    return pd.DataFrame({"time": bars.index, **columns})


def split_at(frame, row, ratio):
    """`ratio` shares for one from `row` on."""
    out = frame.copy()
    out.loc[row:, list(PRICES)] /= ratio
    out.loc[row:, "volume"] *= ratio
    return out


def found(frame):
    """Rows that the refusal names first, and how many; None where the frame is read."""
    try:
        read_bars(frame)
    except BarError as error:
        return str(error)
    return None


def test_clean_bars_are_silent(clean):
    for name, frame in clean.items():
        assert found(frame) is None, name


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.few(3)
def test_a_split_is_found_wherever_it_is_planted(clean, ratio):
    rng = np.random.default_rng(int(100 * ratio))
    missed = []
    for name, frame in clean.items():
        for row in rng.integers(60, len(frame) - 60, 3):
            said = found(split_at(frame, row, ratio)) or ""
            if f"D026 row {row}: " not in said:
                missed.append((name, row, said))
    # A day on which the market itself moves by more than a few percent hides a small ratio.
    assert len(missed) <= (2 if ratio < 1.4 else 1), missed


def test_the_split_is_named(clean):
    frame = clean["days of a fund"]
    said = found(split_at(frame, 1000, 1.5))
    assert "as a split of 3 for 2 that is not adjusted" in said
    assert 'or adjust splits, e.g. split="asset:2001-12-26:3/2", or pass repair="keep' in said
    assert "as a split of 1 for 10" in found(split_at(frame, 1000, 0.1))


def test_a_crash_by_the_same_ratio_is_no_split(clean):
    """News moves the price within its bar as well, and multiplies the volume."""
    frame = split_at(clean["days of a fund"], 1000, 1.5)
    frame.loc[1000:, "volume"] /= 1.5
    frame.loc[1000, "volume"] *= 12.0
    frame.loc[1000, "low"] *= 0.93
    assert found(frame) is None


def test_the_splits_of_a_vendor_s_own_factors_are_all_found(shared):
    """Thirteen, from 5 for 4 to 1 for 20."""
    path = shared / "data" / "us_equity_daily.parquet"
    want = pd.read_parquet(path)
    ratio = want["split_factor"] / want["split_factor"].shift()
    splits = want[(want["symbol"] == want["symbol"].shift()) & ((ratio - 1).abs() > 0.01)]
    assert len(splits) == 13
    for row in splits.index:
        around = want.loc[row - 60 : row + 60]
        around = around[around["symbol"] == want["symbol"][row]]
        said = found(around.drop(columns=["split_factor", "price_factor", "adj_close"]))
        assert said is not None and str(around.index.get_loc(row)) in said, (row, said)
