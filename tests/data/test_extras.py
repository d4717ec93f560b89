"""Spreads, dividends in cash and funding: read from what files call them, refused where wrong."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
from refused import refusal

from nca_trader.data.bars import read_bars, validate, write_bars
from nca_trader.errors import BarError
from nca_trader.types import EXTRAS, PRICES

DAYS = pd.date_range("2024-01-02", periods=5, tz="UTC")


def frame_of(price=10.0, symbol="X", **columns):
    close = np.broadcast_to(price, len(DAYS)).astype(float)
    core = {"time": DAYS, "symbol": symbol, **dict.fromkeys(PRICES, close), "volume": 7.0}
    return pd.DataFrame(core | columns)


BID, ASK = np.array([9.9, 9.8, 10.0, 9.0, 9.5]), np.array([10.1, 10.2, 10.0, 11.0, 10.5])


@pytest.mark.parametrize(("columns", "options"), [
    ({"bid": BID, "ask": ASK}, {}),
    ({"Bid_Close": BID, "Ask Close": ASK, "bid_open": 3.0}, {}),
    ({"b": BID, "a": ASK}, {"columns": "bid=b,ask=a"}),
    ({"half_spread": (ASK - BID) / (ASK + BID)}, {}),
    ({"s": ASK - BID}, {"columns": "spread=s"}),  # the mid price is the close here
])  # fmt: skip
def test_half_a_spread_is_read_from_quotes(columns, options):
    bars = read_bars(frame_of(**columns), **options)
    assert bars.fields[6:] == ("half_spread",)
    np.testing.assert_allclose(bars.half_spread[:, 0], [0.01, 0.02, 0.0, 0.1, 0.05], atol=1e-15)


def test_a_spread_of_unknown_unit_is_not_taken_and_a_column_can_be_left_out():
    assert read_bars(frame_of(spread=12)).half_spread is None  # points, pips or money
    assert read_bars(frame_of(bid=BID)).half_spread is None
    assert read_bars(frame_of(bid=BID, ask=ASK), columns="ask=-").half_spread is None
    kept = read_bars(frame_of(dividend=0.1), columns={"cash_dividend": "-"})
    assert kept.dividend is None


def test_dividends_and_funding_are_read_and_empty_cells_are_none():
    paid = [np.nan, 0.5, np.nan, 0.0, 0.25]
    bars = read_bars(frame_of(Dividend=paid, funding_rate=[1e-4, np.nan, -1e-4, 0, 0]))
    np.testing.assert_array_equal(bars.dividend[:, 0], [0, 0.5, 0, 0, 0.25])
    np.testing.assert_array_equal(bars.funding[:, 0], [1e-4, 0, -1e-4, 0, 0])
    assert bars.digest() != read_bars(frame_of(Dividend=paid)).digest()
    assert "half_spread" not in bars.fields


def test_a_dividend_is_split_as_its_price_is():
    # 2 for 1 before the third day; 1 a share then is 2 a share of the first day.
    bars = read_bars(
        frame_of(
            np.array([100.0, 100, 50, 50, 50]), dividend=[3, 0, 1, 0, 0], f=[0.5, 0.5, 1, 1, 1]
        ),
        columns="split=f",
    )
    np.testing.assert_array_equal(bars.close[:, 0], 100.0)
    np.testing.assert_array_equal(bars.dividend[:, 0], [3, 0, 2, 0, 0])


def test_dividends_in_the_prices_and_in_cash_are_refused():
    frame = frame_of(Dividends=0.0, f=1.0)
    said = refusal(read_bars, frame, columns="dividend=f")
    assert "D032 dividends are given twice, as a factor of the prices and as cash" in said
    assert 'columns="cash_dividend=-"' in said
    assert read_bars(frame, columns="dividend=f,cash_dividend=-").dividend is None
    assert read_bars(frame).dividend is not None
    # The same column as a factor is no cash.
    assert read_bars(frame_of(dividend=1.0), columns="dividend=dividend").dividend is None


@pytest.mark.parametrize(("columns", "row", "name", "value", "want", "repair"), [
    ({"bid": BID, "ask": ASK}, 3, "bid", 11.5, "D031 row 3: crossed quotes: bid 11.5 above ask 11",
     "drop-bad"),
    ({"bid": BID, "ask": ASK}, 2, "ask", np.nan, "D006 row 2: ask = nan", "drop-nan"),
    ({"bid": BID, "ask": ASK}, 2, "ask", np.inf, "D007 row 2: ask = inf", "drop-bad"),
    ({"bid": BID, "ask": ASK}, 4, "bid", 0.0, "D008 row 4: bid = 0.0", "drop-bad"),
    ({"half_spread": 0.01}, 1, "half_spread", -0.01, "D012 row 1: half_spread = -0.01", "drop-bad"),
    ({"half_spread": 0.01}, 1, "half_spread", 1.0, "D033 row 1: half_spread = 1.0 is not",
     "drop-bad"),
    ({"half_spread": 0.01}, 0, "half_spread", np.nan, "D006 row 0: half_spread = nan", "drop-nan"),
    ({"dividend": 0.1}, 4, "dividend", -0.1, "D012 row 4: cash_dividend = -0.1", "drop-bad"),
    ({"dividend": 0.1}, 4, "dividend", np.inf, "D007 row 4: cash_dividend = inf", "drop-bad"),
    ({"dividend": "0.1"}, 2, "dividend", "x", "D009 row 2: cash_dividend = x is not a number",
     "drop-bad"),
    ({"funding": 1e-4}, 3, "funding", -1.5, "D033 row 3: funding = -1.5 is not a fraction",
     "drop-bad"),
    ({"funding": 1e-4}, 3, "funding", -np.inf, "D007 row 3: funding = -inf", "drop-bad"),
])  # fmt: skip
def test_a_planted_fault_is_found_in_its_row(columns, row, name, value, want, repair):
    frame = frame_of(**columns)
    read_bars(frame)  # silent
    frame.loc[row, name] = value
    said = refusal(read_bars, frame)
    assert said.startswith(f"DataFrame: {want}") and "\n" not in said, said
    assert f'repair="{repair}"' in said
    assert len(read_bars(frame, repair=repair)) == 4


@pytest.mark.parametrize("suffix", ["parquet", "feather", "csv", "csv.gz"])
def test_extras_of_several_assets_come_back_equal_from_a_file(tmp_path, suffix):
    one = frame_of(half_spread=0.01, dividend=[0, 0, 1 / 3, 0, 0], funding=1e-4 / 3)
    two = frame_of(20.0, "Y", half_spread=0.02, dividend=0.0, funding=-1e-4).drop(index=[0, 3])
    bars = read_bars(pd.concat([one, two]))
    np.testing.assert_array_equal(bars.half_spread[:, 1], [0, 0.02, 0.02, 0, 0.02])
    assert bars.dividend[2, 0] == 1 / 3 and bars.funding[3, 1] == 0.0
    write_bars(bars, tmp_path / f"bars.{suffix}")
    back = read_bars(tmp_path / f"bars.{suffix}")
    assert back.fields == bars.fields and back.digest() == bars.digest()
    for name in EXTRAS:
        some = dataclasses.replace(bars, **{other: None for other in EXTRAS if other != name})
        write_bars(some, tmp_path / f"some.{suffix}")
        assert read_bars(tmp_path / f"some.{suffix}").digest() == some.digest()


def test_extras_side_by_side_are_those_of_the_long_file():
    one, two = frame_of(dividend=[0, 0, 1.5, 0, 0]), frame_of(20.0, "Y", dividend=0.25)
    for each in (one, two):
        each["bid"], each["ask"] = each["close"] * 0.99, each["close"] * 1.01
    names = (*PRICES, "volume", "dividend", "bid", "ask")
    wide = pd.DataFrame({"time": DAYS})
    for frame in (one, two):
        for name in names:
            wide[f"{frame['symbol'][0]}_{name}"] = frame[name]
    bars = read_bars(pd.concat([one, two]))
    assert bars.fields[6:] == ("half_spread", "dividend")
    assert read_bars(wide).digest() == bars.digest()
    levels = wide.set_index("time")
    levels.columns = pd.MultiIndex.from_tuples([c.split("_") for c in levels.columns])
    assert read_bars(levels).digest() == bars.digest()
    # What is paid on a day without a bar is not lost in silence.
    wide.loc[2, [f"X_{name}" for name in names if name != "dividend"]] = np.nan
    assert "D006 row 2, X: close = nan" in refusal(read_bars, wide)


def test_extras_in_memory_are_checked_alike():
    bars = read_bars(frame_of(half_spread=0.01, dividend=0.1))
    validate(bars)
    for name, value, code in (
        ("half_spread", 2.0, "D033"), ("dividend", -1.0, "D012"), ("dividend", np.nan, "D006")
    ):  # fmt: skip
        array = getattr(bars, name).copy()
        array[3] = value
        with pytest.raises(BarError, match=f"{code} row 3, X"):
            validate(dataclasses.replace(bars, **{name: array}))


def test_the_quotes_of_a_real_file_are_its_spread(shared):
    path = shared / "data" / "eurusd_hourly_quotes.parquet"
    bars, want = read_bars(path, timezone="UTC", repair="no-volume"), pd.read_parquet(path)
    mid = (want["ask_close"] + want["bid_close"]) / 2
    np.testing.assert_allclose(bars.half_spread[:, 0], want["spread_close"] / 2 / mid, rtol=1e-9)


def test_prices_at_or_below_zero_name_back_adjusted_futures_and_their_remedy():
    frame = frame_of(np.array([4.0, 2.0, 1.0, -0.5, -1.0]))
    said = refusal(read_bars, frame, repair="keep-jumps")
    assert "D008 row 3 and 1 more: close = -0.5" in said
    assert "adjust a back-adjusted future by ratios instead of differences" in said
    assert "or add an offset to all its prices" in said
    shifted = frame.assign(**{name: frame[name] + 100.0 for name in PRICES})
    np.testing.assert_array_equal(np.diff(read_bars(shifted).close[:, 0]), [-2, -1, -1.5, -0.5])
