"""The sample bars, and that they pass the checks of any file."""

import subprocess
import sys

import numpy as np
import pytest
from arch.data import nasdaq, sp500

from nca_trader.data.bars import sample_bars, validate
from nca_trader.errors import BarError


def test_the_sample_is_the_source_and_clean():
    bars = sample_bars("sp500")
    validate(bars)
    assert bars.symbols == ("SP500", "NASDAQ") and len(bars) == 5031 and bars.present.all()
    assert str(bars.time[0]) == "1999-01-04T00:00:00.000000000"
    assert str(bars.index[-1]) == "2018-12-31 00:00:00+00:00"
    for column, frame in enumerate((sp500.load(), nasdaq.load())):
        assert (frame["Adj Close"] == frame["Close"]).all()
        for name in ("Open", "High", "Low", "Close", "Volume"):
            np.testing.assert_array_equal(getattr(bars, name.lower())[:, column], frame[name])
    assert "not tradable" in bars.note and "dividends" in bars.note


def test_the_note_on_stale_opens_holds():
    bars = sample_bars("sp500")
    same = bars.open[1:] == bars.close[:-1]
    early = bars.index.year[1:] < 2006
    assert same[early, 0].mean() > 0.95 and same[:, 1].mean() < 0.01
    assert same[bars.index.year[1:] >= 2014, 0].mean() < 0.01


def test_an_unknown_sample_is_refused_with_the_known_ones():
    with pytest.raises(BarError, match="no sample bars 'spy'; there are sp500"):
        sample_bars("spy")


def test_sample_bars_and_a_rule_need_neither_arch_nor_scipys_statistics():
    """They take two seconds to import, which is most of a first backtest."""
    code = (
        "import sys, nca_trader as nca\n"
        "nca.backtest(nca.sample_bars('sp500')[:100], nca.rules.momentum(5)).metrics\n"
        "print({'arch', 'scipy.stats', 'matplotlib'} & set(sys.modules))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "set()"
