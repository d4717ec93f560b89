"""Spans by date."""

import numpy as np
import pytest

from nca_trader.data.samples import sample_bars
from nca_trader.data.splits import split
from nca_trader.errors import BarError


def test_spans_part_the_bars_by_date_without_overlap_or_gap():
    bars = sample_bars("sp500")
    splits = split(bars, "2011-01-01", "2013-01-01")
    years = bars.index.year
    rows = np.arange(len(bars))
    for span, first, last in (
        (splits.train, 1999, 2010), (splits.select, 2011, 2012), (splits.test, 2013, 2018)
    ):  # fmt: skip
        np.testing.assert_array_equal(rows[span.rows], rows[(years >= first) & (years <= last)])
        assert len(span) == len(bars[span.rows])
    assert str(splits.select) == "select: 2011-01-03 to 2012-12-31 (502 bars)"
    assert split(bars, "2011-01-01", "2013-01-01", "2013-01-03").test.last - splits.test.first == 1


@pytest.mark.parametrize(
    ("dates", "name"),
    [
        (("1999-01-01", "2013-01-01"), "train"),
        (("2013-01-01", "2011-01-01"), "select"),
        (("2011-01-01", "2019-01-01"), "test"),
        (("2011-01-01", "2013-01-01", "2012-01-01"), "test"),
    ],
)
def test_an_empty_span_is_refused_by_name(dates, name):
    with pytest.raises(BarError, match=f"the {name} span until"):
        split(sample_bars("sp500"), *dates)
