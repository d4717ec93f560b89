"""Bars, costs and the environment's outline."""

import dataclasses

import jax
import numpy as np
import pandas as pd
import pytest

from nca_trader.errors import BarError, NcaTraderError
from nca_trader.types import Bars, EnvSpec


def make_bars(num_bars=6, symbols=("one", "two"), freq="D", **changes):
    close = np.arange(1.0, 1.0 + num_bars * len(symbols)).reshape(num_bars, len(symbols))
    fields = {
        "time": pd.date_range("2020-01-01", periods=num_bars, freq=freq).to_numpy(),
        "symbols": symbols,
        "open": close - 0.5,
        "high": close + 1.0,
        "low": close - 0.75,
        "close": close,
        "volume": close * 100,
        "present": np.ones_like(close, dtype=bool),
        "source": "made.csv",
    }
    return Bars(**{**fields, **changes})


def test_bars_cannot_be_changed_by_anyone():
    mine = np.full((6, 2), 5.0)
    bars = make_bars(close=mine)
    mine[0, 0] = 99.0
    assert bars.close[0, 0] == 5.0
    with pytest.raises(ValueError, match="read-only"):
        bars.close[0, 0] = 1.0
    with pytest.raises(ValueError, match="read-only"):
        bars.time[0] = np.datetime64("1999-01-01")
    with pytest.raises(dataclasses.FrozenInstanceError):
        bars.source = "elsewhere"


def test_a_field_of_another_shape_is_named_with_the_file():
    with pytest.raises(BarError, match=r"made\.csv: volume has shape \(6, 1\).*\(6, 2\)"):
        make_bars(volume=np.ones((6, 1)))


@pytest.mark.parametrize("order", [[0, 1, 1, 3, 4, 5], [0, 1, 3, 2, 4, 5]])
def test_time_that_does_not_increase_names_the_first_row_at_fault(order):
    time = pd.date_range("2020-01-01", periods=6).to_numpy()[order]
    row = 2 if order[2] == 1 else 3
    with pytest.raises(BarError, match=rf"made\.csv: time at row {row} "):
        make_bars(time=time)


def test_a_slice_keeps_every_field_aligned():
    bars = make_bars()
    part = bars[2:5]
    assert len(part) == 3
    for row in range(3):
        assert part.time[row] == bars.time[row + 2]
        for name in ("open", "high", "low", "close", "volume"):
            np.testing.assert_array_equal(getattr(part, name)[row], getattr(bars, name)[row + 2])
    assert part.symbols == bars.symbols and part.source == "made.csv"


@pytest.mark.parametrize("rows", [3, slice(None, None, 2), slice(None, None, -1), [0, 1]])
def test_only_a_contiguous_slice_is_a_range_of_bars(rows):
    with pytest.raises(TypeError, match="contiguous slice"):
        make_bars()[rows]


def test_select_takes_columns_in_the_order_asked_for():
    bars = make_bars()
    swapped = bars.select("two", "one")
    assert swapped.symbols == ("two", "one")
    np.testing.assert_array_equal(swapped.close[:, 0], bars.close[:, 1])
    np.testing.assert_array_equal(swapped.volume[:, 1], bars.volume[:, 0])


def test_an_unknown_symbol_is_named_beside_those_there_are():
    with pytest.raises(BarError, match=r"made\.csv: no symbol three; there are one, two"):
        make_bars().select("one", "three")
    with pytest.raises(BarError, match="no symbol given"):
        make_bars().select()


def test_row_is_the_first_bar_at_or_after_a_date_in_any_zone():
    bars = make_bars()
    assert bars.row("2020-01-03") == 2
    assert bars.row("2020-01-03 00:00:01") == 3
    assert bars.row(pd.Timestamp("2020-01-03 01:00", tz="Europe/Paris")) == 2
    assert bars.row("2019-01-01") == 0
    assert bars.row("2021-01-01") == len(bars)


def test_between_holds_its_start_and_not_its_stop():
    bars = make_bars()
    part = bars.between("2020-01-02", "2020-01-04")
    assert [str(t)[:10] for t in part.time] == ["2020-01-02", "2020-01-03"]
    assert bars.between().digest() == bars.digest()


def test_the_digest_sees_every_value_and_nothing_else():
    bars = make_bars()
    digests = {bars.digest()}
    assert make_bars(source="other.csv", note="a note").digest() == bars.digest()
    for name in ("open", "high", "low", "close", "volume", "present"):
        array = getattr(bars, name).copy()
        array[3, 1] = not array[3, 1] if name == "present" else np.nextafter(array[3, 1], 1e9)
        digests.add(make_bars(**{name: array}).digest())
    digests.add(make_bars(symbols=("one", "too")).digest())
    digests.add(make_bars(freq="h").digest())
    assert len(digests) == 9


def test_bars_per_year_of_a_calendar_and_of_business_days():
    assert make_bars(1000).bars_per_year == pytest.approx(365.2425)
    assert make_bars(1000, freq="h").bars_per_year == pytest.approx(24 * 365.2425)
    assert make_bars(5218, freq="B").bars_per_year == pytest.approx(365.2425 * 5 / 7, rel=1e-3)
    assert np.isnan(make_bars(1).bars_per_year)


def test_as_bar_gives_seconds_and_arrays_of_all_assets():
    bar = make_bars().as_bar()
    assert all(np.shape(field) == (6, 2) for field in jax.tree.leaves(bar))
    assert bar.half_spread is None and bar.dividend is None and bar.funding is None
    assert bar.time[1, 0] == bar.time[1, 1] == pd.Timestamp("2020-01-02").timestamp()
    np.testing.assert_array_equal(bar.close, make_bars().close)


def test_optional_columns_travel_with_slices_selections_and_the_digest():
    extra = np.arange(12.0).reshape(6, 2) / 100
    bars = make_bars(dividend=extra)
    assert bars.fields[-1] == "dividend" and make_bars().dividend is None
    np.testing.assert_array_equal(bars[2:4].dividend, extra[2:4])
    np.testing.assert_array_equal(bars.select("two").dividend, extra[:, 1:])
    np.testing.assert_array_equal(bars.as_bar().dividend, extra)
    digests = {b.digest() for b in (make_bars(), bars, make_bars(funding=extra))}
    assert len(digests) == 3


def test_the_text_of_bars_says_how_many_of_what_and_when():
    assert "6 bars of one, two, 2020-01-01" in repr(make_bars())
    assert "empty" in repr(make_bars()[:0])


def test_the_specification_counts_what_it_lists():
    spec = EnvSpec(symbols=("a", "b"), features=("x", "y", "z"), targets=(0.0, 0.5), warmup=9)
    assert (spec.num_assets, spec.num_features, spec.num_actions) == (2, 3, 2)


def test_every_error_of_the_package_has_an_exit_code_of_its_kind():
    # Two are of a venue, in modules of their own.
    from nca_trader.paper import venue  # noqa: F401
    from nca_trader.paper.venues import net  # noqa: F401

    codes = {cls.__name__: cls.exit_code for cls in NcaTraderError.__subclasses__()}
    assert codes == {
        "BarError": 2,
        "ConfigError": 2,
        "RunError": 2,
        "StateError": 4,
        "StoreError": 1,
        "HaltError": 3,
        "CheckFailed": 1,
        "Unreachable": 1,
        "HostError": 2,
    }
