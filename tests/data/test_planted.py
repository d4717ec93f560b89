"""Every check finds its fault wherever it is planted, and says nothing of clean files."""

import re

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import HEADER, PLANTS, market, text_of
from refused import refusal

from nca_trader.data.bars import read_bars
from nca_trader.types import PRICES


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("planted")


@pytest.mark.parametrize("name", PLANTS)
@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 10**6), where=st.floats(0.0, 1.0, exclude_max=True))
def test_a_planted_fault_is_found_in_its_line(folder, name, seed, where):
    code, plant, repair = PLANTS[name]
    clean = market(seed, length=24)
    # Not an asset's first row, which has none above it.
    row = 1 + int(where * (clean.length - 1)) + clean.length * (seed % 2)
    path = folder / "bars.csv"
    path.write_text(text_of(clean.cells))
    read_bars(path)  # silent
    cells = clean.cells.copy()
    line = plant(cells, row) + 2
    path.write_text(text_of(cells))
    said = refusal(read_bars, path)
    assert f"bars.csv: {code} line {line}" in said.replace("\n", " "), said
    assert "\n" not in said  # that fault, and no other
    assert repair is None or f'repair="{repair}"' in said
    if repair is not None:
        assert f"{code} by {repair}" in read_bars(path, repair=repair).note


@pytest.mark.parametrize("kind", ["frame", "parquet", "feather"])
def test_planted_rows_are_named_in_frames_and_binary_files(folder, kind):
    clean = market(3, length=30)
    frame = pd.DataFrame(clean.cells, columns=HEADER)
    frame["time"] = pd.to_datetime(frame["time"])
    frame[HEADER[2:]] = frame[HEADER[2:]].astype(float)
    frame.loc[41, "high"] = np.inf
    path = {"frame": frame}.get(kind, folder / f"bars.{kind}")
    if kind != "frame":
        getattr(frame, f"to_{kind}")(path)
    assert "D007 row 41: high = inf" in refusal(read_bars, path)
    frame.loc[41, "high"] = frame.loc[41, "close"] * 1.01
    frame.loc[41, "low"] = min(frame.loc[41, ["open", "close"]])
    if kind != "frame":
        getattr(frame, f"to_{kind}")(path)
    assert len(read_bars(path, repair="widen")) == 30


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    names=st.lists(st.sampled_from(sorted(PLANTS)), min_size=2, max_size=5, unique=True),
)
def test_several_faults_are_all_told_at_once(folder, seed, names):
    # Far apart, so that none hides another; those that change all rows below come alone.
    names = [n for n in names if n not in ("years between", "split", "reverse split")]
    clean = market(seed, length=60)
    cells, want = clean.cells.copy(), {}
    for i, name in enumerate(names):
        code, plant, _ = PLANTS[name]
        want.setdefault(code, []).append(plant(cells, 5 + 10 * i) + 2)
    path = folder / "several.csv"
    path.write_text(text_of(cells))
    if not names:
        read_bars(path)
        return
    if "D014" in want:  # without its zone, a clock that is put back shows an hour twice
        want.pop("D021", None)
    said = refusal(read_bars, path)
    assert set(re.findall(r"D\d{3}", said)) == want.keys(), said
    for code, lines in want.items():
        assert any(f"{code} line {line}" in said for line in lines), said


@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 10**6), where=st.floats(0.25, 0.75))
def test_columns_that_change_places_half_way_are_found(folder, seed, where):
    clean = market(seed, length=200, num_assets=1)
    row = int(where * clean.length)
    path = folder / "crossed.csv"
    for first, second, code in (("high", "low", "D010"), ("volume", "close", "D011")):
        cells = clean.cells.copy()
        i, j = HEADER.index(first), HEADER.index(second)
        cells[row:, [i, j]] = cells[row:, [j, i]]
        path.write_text(text_of(cells))
        said = refusal(read_bars, path)
        found = re.search(rf"{code} line (\d+)", said)
        assert found, (first, second, said)
        assert int(found[1]) == row + 2, (first, second, row, said)


@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 10**6), where=st.floats(0.0, 1.0, exclude_max=True))
def test_broken_lines_are_found(folder, seed, where):
    clean = market(seed, length=30)
    lines = text_of(clean.cells).splitlines()
    at = 1 + int(where * (len(lines) - 1))
    path = folder / "lines.csv"

    def planted(change):
        path.write_text("\n".join([*lines[:at], change(lines[at]), *lines[at + 1 :]]))
        return refusal(read_bars, path)

    assert f"D022 line {at + 1}: 10 fields" in planted(lambda line: f"{line},7")
    short = planted(lambda line: line.rpartition(",")[0])
    assert f"D022 line {at + 1}: fewer fields" in short and "\n" not in short
    middle = planted(lambda line: line.replace(line.split(",")[2] + ",", "", 1))
    assert f"D022 line {at + 1}: fewer fields" in middle
    footer = planted(lambda line: "Source: a vendor")
    assert f"D022 line {at + 1}: fewer fields" in footer and f"D013 line {at + 1}" in footer
    left = read_bars(path, repair="drop-bad,drop-nan")
    assert left.present.sum() == len(lines) - 2
    path.write_text("\n".join([lines[0].rpartition(",")[0], *lines[1:]]))
    assert f"D022 line 2 and {len(lines) - 2} more: 9 fields, more than the header's 8" in refusal(
        read_bars, path
    )
    path.write_text("\n".join(lines[1:]))
    assert "D023 line 1 holds values, not the columns' names" in refusal(read_bars, path)


def test_wild_but_true_markets_are_not_called_faulty(folder):
    path = folder / "wild.csv"
    for seed in range(2):
        path.write_text(text_of(market(seed, length=300, drift=0.05).cells))
        assert read_bars(path).note in ("", "Columns that are not used: value, interest.")
    # A market that often doubles is not refused for doubling.
    rng = np.random.default_rng(0)
    price = np.exp(np.cumsum(rng.normal(0, 0.7, 200)))
    frame = pd.DataFrame(dict.fromkeys(PRICES, price) | {"volume": 1.0})
    frame.index = pd.date_range("2020-01-01", periods=200, tz="UTC")
    assert len(read_bars(frame)) == 200
    # Bars of a year lie a year apart.
    frame.index = pd.date_range("1800-01-01", periods=200, freq="YS", tz="UTC")
    assert len(read_bars(frame)) == 200
