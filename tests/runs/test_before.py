"""What version 0.2.0 stored goes on: sweeps, walk-forwards and journals are the ones they were.

`before.json` has what that version wrote of each call below, without versions of packages.
"""

import json
import pathlib

import pytest

import nca_trader as nca
from nca_trader.paper.journal.journal import read_events

BEFORE = json.loads(pathlib.Path(__file__).with_name("before.json").read_text())
COSTS = nca.Costs(commission=5e-4, slippage=2e-4, borrow_fee=0.01)
SWEEP = (nca.rules.sma_cross, {"fast": [5, 10], "slow": [20, 50]}, COSTS)
MONEY = {"capital": 1e5, "lot": 1.0, "risk": nca.Limits(max_position=0.4)}
SIZED = {"capital": 5e4, "lot": 1.0, "sizing": "volatility", "volatility_span": 20}
CROSS, TREND = nca.rules.sma_cross(5, 20), nca.rules.momentum(20)
LIMITS = nca.Limits(max_position=0.3, max_drawdown=0.5)
FOLDERS = {
    "sweep": lambda bars, folder: nca.sweep(
        bars, *SWEEP, resume=folder, trials=None, fill="close", max_gross=0.8
    ),
    "sweep2": lambda bars, folder: nca.sweep(
        bars, nca.rules.momentum, {"lookback": [5, 10, 20]}, resume=folder, trials=None, **MONEY
    ),
    "walk": lambda bars, folder: nca.walk_forward(
        bars, nca.rules.sma_cross, COSTS, grid={"fast": (5, 10), "slow": (20,)}, train=250,
        test=100, folder=folder, max_gross=0.8,
    ),
}  # fmt: skip
SESSIONS = {
    "sma": (CROSS, {"costs": COSTS, "max_gross": 0.8}),
    "hold": (nca.rules.buy_and_hold(), {"costs": nca.Costs(fixed_fee=1.0), **SIZED}),
    "risk": (TREND, {"fill": "close", "risk": LIMITS, "dead_band": 0.01}),
    "blend": (
        nca.blend({"a": (CROSS, 0.5), "b": (nca.rules.momentum(50), 0.5)}),
        {"costs": COSTS},
    ),
}


@pytest.fixture(scope="module")
def bars():
    return nca.sample_bars("sp500")[-600:]


def bare(value):
    """A value without versions of packages, which differ from machine to machine."""
    if not isinstance(value, dict):
        return value
    return {name: bare(inner) for name, inner in value.items() if name != "versions"}


@pytest.mark.heavy
@pytest.mark.few(1)
@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_the_one_that_the_version_before_began(bars, name, tmp_path):
    FOLDERS[name](bars, tmp_path / "folder")
    (file,) = (tmp_path / "folder").glob("*.json")
    found = json.loads(file.read_text())
    del found["checksum"]
    assert found == BEFORE["folders"][name]


@pytest.mark.parametrize("name", SESSIONS)
def test_a_session_is_the_one_that_the_version_before_began(bars, name, tmp_path):
    """Its body has the hash that client ids carry, so that all of it must be the same."""
    nca.write_bars(bars, tmp_path / "bars.parquet")
    rule, given = SESSIONS[name]
    feed, journal = f"replay:{tmp_path}/bars.parquet", tmp_path / "paper.db"
    nca.paper_trade(rule, feed, journal, stop=lambda: True, **given)
    body = next(read_events(journal, "run_started")).body
    assert bare(body) == BEFORE["journals"][name]
    assert body["versions"]["nca-trader"] == "0.2.0"
