"""The shares of one trade and of one payment, for any numbers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nca_trader.paper.sleeve_books import shared, split

UNITS = st.lists(
    st.floats(-1e6, 1e6).filter(lambda x: x == 0.0 or abs(x) > 1e-3), min_size=1, max_size=6
)


@given(wanted=UNITS, part=st.floats(0.0, 1.0))
def test_a_split_sums_to_the_fill_and_gives_nobody_more_than_he_wants(wanted, part):
    wanted = np.array(wanted)
    net = wanted.sum()
    scale = np.abs(wanted).sum() + 1.0
    crossed, venue = split(wanted, part * net)
    assert venue.sum() == pytest.approx(part * net, abs=1e-12 * scale)
    assert crossed.sum() == pytest.approx(0.0, abs=1e-12 * scale)
    whole = crossed + venue
    for got, want in zip(whole, wanted, strict=True):
        assert got * want >= -1e-9 * scale and abs(got) <= abs(want) + 1e-9 * scale
    # The smaller side is whole whatever the venue did.
    if abs(net) > 1e-9 * scale:
        small = wanted * net < 0.0
        np.testing.assert_allclose(whole[small], wanted[small], atol=1e-9 * scale)
    if part == 1.0:
        np.testing.assert_allclose(whole, wanted, atol=1e-9 * scale)


WEIGHTS = st.lists(st.just(0.0) | st.floats(1e-6, 1e6), min_size=1, max_size=6)


@given(amount=st.floats(-1e9, 1e9).filter(lambda x: abs(x) > 1e-6), weights=WEIGHTS)
def test_shares_sum_to_the_amount(amount, weights):
    parts = shared(amount, np.array(weights))
    assert parts.sum() == pytest.approx(amount, rel=1e-12, abs=1e-300)
    for part, weight in zip(parts, weights, strict=True):
        expected = amount * weight / sum(weights) if sum(weights) else amount / len(weights)
        assert part == pytest.approx(expected, rel=1e-9, abs=1e-9 * abs(amount))


def test_one_sleeve_has_all_of_it_to_the_last_bit():
    crossed, venue = split(np.array([0.0, 0.1 + 0.2, 0.0]), 0.1)
    assert venue.tolist() == [0.0, 0.1, 0.0] and crossed.tolist() == [0.0, 0.0, 0.0]
