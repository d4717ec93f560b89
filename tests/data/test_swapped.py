"""Columns that changed places for a while are found where the prices prove it."""

import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import HEADER, market, text_of

from nca_trader.data.bars import read_bars
from nca_trader.data.reading import forensic
from nca_trader.errors import BarError

SHORTEST = 16  # bars, where opens go on from closes: docs/lab-notes/bar-files.md


def said_of(path, cells, **options):
    path.write_text(text_of(cells))
    try:
        read_bars(path, **options)
    except BarError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("swapped") / "bars.csv"


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    length=st.integers(SHORTEST, 60),
    where=st.floats(0.0, 1.0),
)
def test_a_swapped_stretch_of_opens_and_closes_is_found_at_any_place(path, seed, length, where):
    cells = market(seed, length=200, num_assets=1).cells
    assert not said_of(path, cells)
    first = int(where * (200 - length))
    i, j = HEADER.index("open"), HEADER.index("close")
    cells[first : first + length, [i, j]] = cells[first : first + length, [j, i]]
    said = said_of(path, cells)
    found = said.partition("D029 line ")[2].split(" ")
    assert abs(int(found[0]) - (first + 2)) <= 2, said
    assert abs(int(found[2]) + 1 - length) <= 4, said
    assert not said_of(path, cells, repair="keep-jumps")


PAIRS = [
    pair
    for pair in itertools.combinations(["open", "high", "low", "close", "volume"], 2)
    if pair != ("open", "close")
]


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("small", [False, True])
def test_any_other_pair_is_found_in_a_single_bar(path, pair, small):
    clean = market(4, length=30, num_assets=1).cells
    if small:  # volume in thousands: below the price
        at = HEADER.index("volume")
        clean[:, at] = [f"{float(x) / 1000.0:.6f}" for x in clean[:, at]]
    i, j = (HEADER.index(name) for name in pair)
    for row in (0, 13, 29):
        cells = clean.copy()
        cells[row, [i, j]] = cells[row, [j, i]]
        said = said_of(path, cells)
        assert re.search(rf"D0(10|11|28) line {row + 2}: ", said), said
        assert not said_of(path, clean)


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), length=st.integers(1, 60), where=st.floats(0.0, 1.0))
def test_assets_that_change_places_are_found_in_a_single_bar(path, seed, length, where):
    cells = market(seed, length=100, drift=0.003).cells
    first = 1 + int(where * (98 - length))
    a, b = np.arange(first, first + length), np.arange(first, first + length) + 100
    cells[np.ix_([*a, *b], range(2, len(HEADER)))] = cells[np.ix_([*b, *a], range(2, len(HEADER)))]
    said = said_of(path, cells)
    # Each asset goes to the other's price and comes back.
    assert f"D029 line {first + 2} and 3 more: A continues the price of another" in said, said
    # One alone that jumps there and back is no exchange.
    cells = market(seed, length=100, drift=0.003).cells
    columns = range(2, 6)
    cells[np.ix_(a, columns)] = [
        [f"{float(x) * 1.5:.6f}" for x in row] for row in cells[np.ix_(a, columns)]
    ]
    assert "D029" not in said_of(path, cells)


def evidence_by_hand(opens, closes, first, last):
    """Of swapping the bars `first` to `last` back, summed over all moves between bars."""
    o, c = np.log(opens), np.log(closes)
    body = np.abs(c - o)
    least = np.minimum(np.abs(o[1:] - c[:-1]), np.abs(c[1:] - o[:-1]))
    body = body[body > 0]
    typical = max(np.median(least), np.quantile(body, 0.05), 0.05 * np.median(body))
    back_o, back_c = o.copy(), c.copy()
    part = slice(first, last + 1)
    back_o[part], back_c[part] = c[part], o[part]
    ways = ((o, c), (back_o, back_c))
    total = [np.log1p(np.abs(a[1:] - b[:-1]) / typical).sum() for a, b in ways]
    return total[0] - total[1]


def series(opens, closes):
    """Bars of one asset at one time after the other."""
    times = np.arange(len(opens)).astype("datetime64[m]").astype("datetime64[ns]")
    code = np.zeros(len(opens), int)
    return forensic.Series(code, times, opens, opens, closes, closes, np.ones(len(opens)))


@pytest.mark.parametrize("seed", range(4))
def test_the_best_stretch_is_the_best_of_all_pairs_of_ends(seed):
    cells = market(seed, length=40, num_assets=1).cells
    opens, closes = (cells[:, HEADER.index(n)].astype(float) for n in ("open", "close"))
    begin, end = [(0, 9), (12, 20), (31, 40), (0, 40)][seed]
    opens[begin:end], closes[begin:end] = closes[begin:end].copy(), opens[begin:end].copy()
    pairs = itertools.combinations_with_replacement(range(40), 2)
    want = max((evidence_by_hand(opens, closes, i, j), i, j) for i, j in pairs)
    bars = series(opens, closes)
    found = forensic.best_stretch(bars, bars.inside, 0, 40)
    assert found == pytest.approx(want)
    assert abs(found[1] - begin) <= 1 and abs(found[2] - (end - 1)) <= 1


def test_a_stretch_over_several_blocks_is_one(monkeypatch):
    cells = market(7, length=400, num_assets=1).cells
    opens, closes = (cells[:, HEADER.index(n)].astype(float) for n in ("open", "close"))
    opens[90:260], closes[90:260] = closes[90:260].copy(), opens[90:260].copy()
    for block in (1 << 16, 50, 37):
        monkeypatch.setattr(forensic, "BLOCK", block)
        found = forensic.open_close_swapped(series(opens, closes))
        assert found.tolist() == list(range(90, 260))


def test_a_stretch_is_found_in_rows_that_are_not_in_order(path):
    cells = market(7, length=100, num_assets=1).cells
    i, j = HEADER.index("open"), HEADER.index("close")
    cells[30:70, [i, j]] = cells[30:70, [j, i]]
    found = said_of(path, cells[::-1], repair="sort").partition("D029 line ")[2].split(" ")
    assert abs(int(found[0]) - 32) <= 2 and abs(int(found[2]) - 39) <= 2, found
