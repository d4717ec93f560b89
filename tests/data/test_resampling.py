"""Bars of a longer length: aggregated as pandas does, joined without a look ahead."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nca_trader.data.calendar import Sessions
from nca_trader.data.resampling import align, resample
from nca_trader.errors import BarError
from nca_trader.types import Bars

FIELDS = ("open", "high", "low", "close", "volume", "present", "half_spread", "dividend", "funding")
OFFICE = Sessions(
    zone="Europe/Berlin",
    weekly=tuple((day, "09:00", day, "17:30") for day in range(5)),
    half_days={"2024-04-02": "14:00"},
)


def market(seed=0, length=400, missing=0.2, start="2024-03-28 23:00", step="10min"):
    """Two assets, some of whose bars are missing, with every column."""
    rng = np.random.default_rng(seed)
    shape = (length, 2)
    present = rng.random(shape) >= missing
    present[0] = True
    close = 50.0 * np.exp(np.cumsum(rng.normal(0, 0.01, shape), axis=0))
    for t in range(1, length):
        close[t] = np.where(present[t], close[t], close[t - 1])
    open_ = np.where(present, close * np.exp(rng.normal(0, 0.01, shape)), close)
    wide = np.where(present, np.abs(rng.normal(0, 0.01, shape)), 0.0)
    return Bars(
        time=pd.date_range(start, periods=length, freq=step).to_numpy("datetime64[ns]"),
        symbols=("A", "B"),
        open=open_,
        high=np.maximum(open_, close) * (1 + wide),
        low=np.minimum(open_, close) * (1 - wide),
        close=close,
        volume=np.where(present, rng.integers(1, 9, shape), 0.0),
        present=present,
        half_spread=rng.uniform(0, 0.01, shape),
        dividend=np.where(rng.random(shape) < 0.02, 0.5, 0.0),
        funding=rng.normal(0, 1e-4, shape),
    )


def by_pandas(bars, a, rule):
    """One asset's longer bars by `DataFrame.resample`, of its present bars, labelled right."""
    frame = pd.DataFrame({name: getattr(bars, name)[:, a] for name in FIELDS}, bars.index)
    there = frame[frame["present"]].resample(rule, label="right", closed="left")
    out = there.agg({
        "open": "first", "high": "max", "low": "min", "close": "last", "volume": "sum",
        "half_spread": "mean",
    })  # fmt: skip
    whole = frame.resample(rule, label="right", closed="left")
    return out.join(whole[["dividend", "funding"]].sum(), how="outer")


@pytest.mark.parametrize("every", ["30min", "1h", "4h", "1d"])
def test_longer_bars_are_those_of_pandas(every):
    bars = market()
    longer = resample(bars, every)
    assert longer.note == f"Bars of {every}, stamped by their close."
    for a in range(2):
        want = by_pandas(bars, a, every.replace("d", "D")).reindex(longer.index)
        present = longer.present[:, a]
        np.testing.assert_array_equal(present, want["close"].notna())
        assert present.mean() > 0.9
        for name in ("open", "high", "low", "close", "volume"):
            np.testing.assert_array_equal(getattr(longer, name)[present, a], want[name][present])
        np.testing.assert_allclose(longer.half_spread[present, a], want["half_spread"][present])
        for name in ("dividend", "funding"):
            np.testing.assert_allclose(getattr(longer, name)[:, a], want[name], atol=1e-15)
    over = bars.time[-1] + np.timedelta64(10, "m")
    assert longer.time[-1] <= over < longer.time[-1] + pd.Timedelta(every.replace("d", "D"))


def test_bins_count_from_a_session_s_open_and_end_with_it():
    bars = market(length=1000, missing=0.0)  # over the change of the clock, and a half day
    longer = resample(bars, "2h", OFFICE)
    local = longer.index.tz_convert("Europe/Berlin")
    assert {f"{t:%H:%M}" for t in local if t.day != 2} == {"11:00", "13:00", "15:00", "17:00",
                                                          "17:30"}  # fmt: skip
    assert [f"{t:%H:%M}" for t in local if (t.month, t.day) == (4, 2)] == ["11:00", "13:00",
                                                                          "14:00"]  # fmt: skip
    assert (local.day_of_week < 5).all()
    row = int(np.argmax(longer.index == pd.Timestamp("2024-04-02 14:00", tz="Europe/Berlin")))
    inside = (bars.index < longer.index[row]) & (bars.index >= longer.index[row - 1])
    assert inside.sum() == 6
    np.testing.assert_array_equal(longer.high[row], bars.high[inside].max(axis=0))
    days = resample(bars, "1d", OFFICE)
    closes = [f"{t:%m-%d %H:%M}" for t in days.index.tz_convert("Europe/Berlin")]
    assert closes[:4] == ["03-29 17:30", "04-01 17:30", "04-02 14:00", "04-03 17:30"]


def test_a_missing_asset_carries_its_close():
    bars = market(missing=0.0, length=60)
    present = bars.present.copy()
    present[12:30, 1] = False
    close = bars.close.copy()
    close[12:30, 1] = close[11, 1]
    gone = dataclasses.replace(bars, present=present, close=close)
    longer = resample(gone, "1h")
    row = int(np.flatnonzero(~longer.present[:, 1])[0])
    assert longer.present[:, 0].all() and (~longer.present[:, 1]).sum() == 3
    for name in ("open", "high", "low", "close"):
        assert getattr(longer, name)[row, 1] == close[11, 1]


@settings(max_examples=12)
@given(
    seed=st.integers(0, 50),
    row=st.integers(0, 398),
    every=st.sampled_from(["20min", "1h", "1d"]),
    office=st.booleans(),
)
def test_what_a_bar_sees_of_longer_bars_holds_nothing_after_it(seed, row, every, office):
    bars = market(seed)
    sessions = OFFICE if office else None
    rng = np.random.default_rng(seed)
    later = np.arange(len(bars))[:, None] > row
    noise = rng.uniform(0.5, 2.0, bars.close.shape)
    changed = dataclasses.replace(bars, **{
        name: np.where(later, getattr(bars, name) * noise, getattr(bars, name))
        for name in FIELDS if name != "present"
    })  # fmt: skip

    def seen(some):
        try:
            longer = resample(some, every, sessions)
        except BarError as error:
            assert "no bar of" in str(error)
            return []
        rows = align(longer, some)[: row + 1]
        return [getattr(longer, name)[rows[rows >= 0]] for name in FIELDS]

    for other in (changed, bars[: row + 1] if row > 1 else changed):
        for one, two in zip(seen(bars), seen(other), strict=False):
            np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize(("every", "message"), [
    ("15min", "is not a multiple of the bars' own length"), ("5min", "is not a multiple"),
    ("7h", "must divide a day evenly"), ("1d", "no bar of 1d is over"),
])  # fmt: skip
def test_lengths_that_do_not_fit_are_refused(every, message):
    with pytest.raises(BarError, match=message):
        resample(market(length=3), every)
    with pytest.raises(BarError, match="give two bars or more"):
        resample(market(length=3)[:1], "1h")
