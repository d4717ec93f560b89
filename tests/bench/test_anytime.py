"""Return against K: the table is of the backtests that it names, and the plot is written."""

import pytest

from benchmarks import anytime
from nca_trader.evaluate.backtest import backtest
from nca_trader.runs.manifest import Run


@pytest.mark.slow
def test_each_row_is_the_backtest_with_so_many_steps(tiny, tmp_path, capsys):
    out = tmp_path / "k.png"
    anytime.main([f"--run={tiny.path}", f"--data={tiny.data}", "--most=2", f"--out={out}"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[:2] for line in lines] == [
        ["K 1", "trained 0"],
        ["K 2", "trained 1"],
    ]
    (row,) = anytime.table(tiny.path, tiny.bars, [1])
    expected = backtest(tiny.bars, Run(tiny.path, steps=1))
    assert row["total_return"] == expected.metrics["total_return"]
    assert row["receptive_field"] == 3 and out.stat().st_size > 1000
