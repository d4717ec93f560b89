"""`nca-trader sweep` shows what `nca.sweep` finds, and refuses a wrong grid at once."""

import json

import pandas as pd
import pytest

import nca_trader as nca
from nca_trader.cli import main

SMA = ["sweep", "--strategy", "sma_cross", "--symbol", "SP500", "--commission", "5e-4"]
GRID = ["--grid", "fast=5:15:5", "--grid", "slow=20,50"]


def test_the_command_is_the_function(tmp_path, capsys):
    out, folder = tmp_path / "table.csv", str(tmp_path / "runs")
    words = [*SMA, *GRID, "--out", str(out), "--trials", folder, "--json"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    found = json.loads(shown.splitlines()[-1])
    bars = nca.sample_bars("sp500").select("SP500")
    table = nca.sweep(
        bars,
        nca.rules.sma_cross,
        {"fast": [5, 10], "slow": [20, 50]},
        nca.Costs(commission=5e-4),
        trials=None,
    )
    assert [row["equity"] for row in found["rows"]] == table["equity"].tolist()
    assert found["verdict"] == table.attrs["verdict"] and found["verdict"] in shown
    assert found["search"]["trials"] == nca.trials(folder)["trials"].sum() == 4
    pd.testing.assert_frame_equal(pd.read_csv(out), table, check_dtype=False)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--grid", "fast"], "write NAME=VALUES"),
        (["--grid", "fast=5:35:1:2"], "give START:STOP or START:STOP:STEP"),
        (["--grid", "fast=5:5:1"], "with START < STOP"),
        (["--grid", "fast=1:9:1", "--grid", "fast=3"], "given twice"),
        (["--grid", "fats=1:9:1"], "did you mean 'fast'"),
        (["--grid", "fast=1:5000:1", "--grid", "slow=1:5000:1"], "24,990,001 combinations"),
    ],
)
def test_a_wrong_grid_is_one_line_and_exit_code_2(words, said, capsys):
    assert main([*SMA, *words]) == 2
    error = capsys.readouterr().err.strip()
    assert said in error and "\n" not in error
