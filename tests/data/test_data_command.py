"""`nca-trader data check`: exit codes, all problems, and a summary counted by hand."""

import ast
import io
import json
import re
import shlex

import pandas as pd
import pytest

from nca_trader.cli import main
from nca_trader.cli.options import READING
from nca_trader.config.reading import REPAIRS
from nca_trader.data.bars import read_bars
from nca_trader.errors import BarError

CLEAN = """time,symbol,open,high,low,close,volume
2021-03-01T14:30Z,A,10,11,9,10,5
2021-03-01T14:31Z,A,10,11,9,10,5
2021-03-01T14:32Z,A,10,11,9,10,5
2021-03-01T14:40Z,A,10,11,9,10,5
2021-03-01T14:31Z,B,20,21,19,20,5
2021-03-01T14:40Z,B,20,21,19,20,5
"""


@pytest.fixture
def check(tmp_path, capsys):
    def run(text, *options):
        path = tmp_path / "bars.csv"
        path.write_text(text)
        try:
            code = main(["data", "check", str(path), *options])
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return run


def test_a_clean_file_ends_with_0_and_a_summary(check):
    code, out, err = check(CLEAN, "--json", "--quiet")
    assert code == 0 and err == "" and "no problem" in out
    said = json.loads(out.splitlines()[-1])
    assert said["rows"] == 6 and said["times"] == 4 and said["symbols"] == ["A", "B"]
    assert said["first"] == "2021-03-01T14:30:00+00:00"
    assert said["last"] == "2021-03-01T14:40:00+00:00"
    assert said["step"] == "0 days 00:01:00" and said["gaps"] == 1
    assert said["longest_gap"] == "0 days 00:08:00"
    assert said["longest_gap_after"] == "2021-03-01T14:32:00+00:00"
    assert "the longest 0 days 00:08:00 after 2021-03-01T14:32:00+00:00" in out
    assert said["missing"] == 2 and said["missing_by_symbol"] == {"A": 0, "B": 2}
    code, out, _ = check(CLEAN, "--every", "1min", "--repair", "keep-gaps")
    assert code == 0 and "at 11 times" in out and "missing  16 bars" in out
    assert "of the others or within the file's trading hours" in out
    assert check(CLEAN, "--symbol", "B", "--json")[0] == 0


def test_a_faulty_file_ends_with_2_and_every_problem(check):
    faulty = CLEAN.replace("14:32Z,A,10,11", "14:31Z,A,10,inf").replace("19,20,5\n", "19,99,5\n", 1)
    code, out, err = check(faulty)
    assert code == 2 and out == "" and "3 problems" in err
    for said in ("D007 line 4: high = inf", "D011 line 6", "D021 line 4", "--repair drop-bad"):
        assert said in err
    code, out, _ = check(faulty, "--repair", "drop-bad,widen")
    assert code == 0 and "note     Repaired on reading: D007 by drop-bad (1 rows)" in out
    assert check(CLEAN, "--dates", "ymd")[0] == 2
    assert check(CLEAN.partition("\n")[2], "--columns", "time=1,symbol=2,close=6")[0] == 2


def test_a_file_of_one_bar_has_no_step(check):
    code, out, _ = check("\n".join(CLEAN.splitlines()[:2]), "--json")
    said = json.loads(out.splitlines()[-1])
    assert code == 0 and said["step"] is None and said["gaps"] == 0


def test_help_names_every_repair_and_option(check, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")  # no name is broken over two lines
    code, out, _ = check(CLEAN, "--help")
    assert code == 0
    assert all(repair in out for repair in REPAIRS) and all(
        f"--{name.replace('_', '-')}" in out for name in READING
    )


def test_spread_dividends_and_funding_are_shown(check):
    rows = CLEAN.splitlines()
    more = [f"{row},0.0002,{0.5 if i == 2 else 0},0.0001" for i, row in enumerate(rows[1:])]
    text = "\n".join([f"{rows[0]},half_spread,dividend,funding", *more])
    code, out, _ = check(text, "--json")
    said = json.loads(out.splitlines()[-1])
    assert code == 0 and said["dividends"] == 1
    assert said["half_spread_median"] == 0.0002 and said["funding_mean"] == pytest.approx(1e-4)
    assert "half of it 2 bp (median)" in out and "1 dividends in cash" in out
    assert "1 bp per bar (mean), longs pay" in out
    said = json.loads(check(CLEAN, "--json")[1].splitlines()[-1])
    assert said["dividends"] is None and said["half_spread_median"] is None


def test_a_remedy_pasted_back_into_the_shell_is_accepted(check):
    """D027's remedy holds a column's name with a space in it."""
    adjusted = "time,symbol,open,high,low,close,volume,Adj Close\n"
    adjusted += "2021-03-01,A,10,11,9,10,5,5\n2021-03-02,A,10,11,9,10,5,5\n"
    adjusted += "2021-03-03,A,10,11,9,10,5,10\n"
    code, _, err = check(adjusted)
    assert code == 2 and "D027" in err
    option = re.search(r"Pass (.*?), or pass", err)[1]
    code, out, err = check(adjusted, *shlex.split(option))
    assert code == 0 and "no problem" in out, err
    with pytest.raises(BarError) as caught:
        read_bars(pd.read_csv(io.StringIO(adjusted)))
    call = ast.parse(f"f({re.search(r'Pass (.*?), or pass', str(caught.value))[1]})", mode="eval")
    said = {word.arg: ast.literal_eval(word.value) for word in call.body.keywords}
    assert said == {"columns": "dividend=Adj Close/close"}
    assert len(read_bars(pd.read_csv(io.StringIO(adjusted)), **said)) == 3
