"""Dividends next to prices that are adjusted for them are not paid again."""

import numpy as np
import pandas as pd
import pytest

from nca_trader.data.bars import read_bars
from nca_trader.errors import BarError


def history(seed, adjusted, quarters=12, share=0.01, noise=0.01, name="Dividends"):
    """Daily bars with a dividend each quarter: a walk of total returns, and what a vendor gives."""
    rng = np.random.default_rng(seed)
    size = 63 * quarters + 20
    nights, days = rng.normal(0, noise / 2, size), rng.normal(0, noise, size)
    total = 100.0 * np.exp(np.cumsum(nights + days))
    ex = np.arange(63, size, 63)
    paid = np.zeros(size)
    kept = np.ones(size)  # what is left of the price after the dividends so far
    for row in ex:
        kept[row:] *= 1.0 - share
    opens, close = total * np.exp(-days), total.copy()
    if not adjusted:
        opens, close = opens * kept, close * kept
        paid[ex] = share * close[ex - 1]
    else:
        paid[ex] = share * close[ex - 1]  # as adjusted as the prices are
    high, low = np.maximum(opens, close), np.minimum(opens, close)
    time = pd.bdate_range("2015-01-01", periods=size, tz="UTC")
    bars = {"Date": time, "Open": opens, "High": high, "Low": low, "Close": close, "Volume": 1e6}
    return pd.DataFrame(bars | {name: paid, "Stock Splits": 0.0})


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["Dividends", "dividend_amount"])
def test_prices_show_on_ex_dates_whether_they_are_adjusted(seed, name):
    traded = read_bars(history(seed, adjusted=False, name=name))
    unused = "Columns that are not used: Stock Splits."
    assert (traded.dividend > 0).sum() == 12 and traded.note == unused
    adjusted = read_bars(history(seed, adjusted=True, name=name))
    assert adjusted.dividend is None
    told = "Prices are adjusted for dividends: on 12 ex-dates they do not drop."
    assert adjusted.note == f"{unused} {told}"


def test_the_smallest_case_by_hand(tmp_path):
    """A close of 100 100 98 98 98 with 2 paid on the third day earns its holder nothing."""
    rows = [f"2024-01-0{d} 00:00:00-05:00,98,98,98,98,1000,{2 * (d == 4)},0" for d in range(2, 7)]
    path = tmp_path / "KO.csv"
    header = "Date,Open,High,Low,Close,Volume,Dividends,Stock Splits"
    path.write_text("\n".join([header, *rows]) + "\n")
    assert read_bars(path).dividend is None  # as yfinance writes it
    traded = [row.replace(",98,98,98,98", ",100,100,100,100") for row in rows[:2]] + rows[2:]
    path.write_text("\n".join([header, *traded]) + "\n")
    bars = read_bars(path)
    np.testing.assert_array_equal(bars.dividend[:, 0], [0, 0, 2, 0, 0])
    held = (bars.close[1:] + bars.dividend[1:]) / bars.close[:-1]
    np.testing.assert_array_equal(held, 1.0)


def test_few_dividends_are_asked_about_and_an_option_answers():
    unclear = history(1, adjusted=True, quarters=2, share=0.001)
    with pytest.raises(BarError, match=r"D036 2 ex-dates do not show") as caught:
        read_bars(unclear)
    said = str(caught.value)
    assert 'columns="cash_dividend=-"' in said and 'columns="cash_dividend=COLUMN"' in said
    assert read_bars(unclear, columns="cash_dividend=-").dividend is None
    paid = read_bars(unclear, columns="cash_dividend=Dividends").dividend
    assert (paid > 0).sum() == 2
    own = unclear.rename(columns={"Dividends": "dividend"})
    assert (read_bars(own).dividend > 0).sum() == 2
    assert read_bars(unclear.assign(Dividends=0.0)).dividend is not None


@pytest.mark.heavy
def test_wrong_answers_are_rare_where_dividends_are_small():
    """Half a percent a quarter for ten years: at most one of a hundred files is read wrongly."""
    wrong = asked = 0
    for seed in range(100):
        for adjusted in (False, True):
            try:
                found = read_bars(history(seed, adjusted, 40, 0.005)).dividend is None
            except BarError as error:
                assert "D036" in str(error)
                asked += 1
            else:
                wrong += found != adjusted
    assert wrong <= 2 and asked < 40, (wrong, asked)
