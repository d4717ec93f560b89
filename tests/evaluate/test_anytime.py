"""Return against K: the table is of the backtests that it names, and the plot is written."""

from benchmarks import anytime
from nca_trader.evaluate.backtest import backtest
from nca_trader.runs.manifest import Run


def test_each_row_is_the_backtest_with_so_many_steps(tiny, tmp_path, capsys):
    out = tmp_path / "k.png"
    anytime.main([f"--run={tiny.path}", f"--data={tiny.data}", "--most=3", f"--out={out}"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["K 1", "K 2", "K 3"]
    (row,) = anytime.table(tiny.path, tiny.bars, [3])
    expected = backtest(tiny.bars, Run(tiny.path, steps=3))
    assert row["total_return"] == expected.metrics["total_return"]
    assert row["receptive_field"] == 9 and not row["trained"]
    assert "True" not in lines[0] and out.stat().st_size > 1000
