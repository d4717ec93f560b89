"""Splits that are not adjusted are found where they are planted, and clean bars stay silent."""

import numpy as np
import pandas as pd
import pytest

from nca_trader.data.bars import read_bars
from nca_trader.data.samples import sample_bars
from nca_trader.errors import BarError
from nca_trader.types import PRICES

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
    assert 'or adjust splits, e.g. columns="split=COLUMN", or pass repair="keep-jumps"' in said
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
