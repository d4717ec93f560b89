"""`nca-trader leakcheck`: exit codes, what it prints, and slips that it names in one line."""

import sys

import numpy as np
import pytest
from drawn import random_bars

from nca_trader.data.bars import write_bars

CODE = """
import numpy as np
import pandas as pd
from neighbour import WINDOW
from nca_trader import Bars, rules
from nca_trader.strategies.rules import Strategy

held = rules.momentum(3)
LEVEL = 1.0

def closes(bars: Bars):
    return pd.DataFrame(bars.close, bars.index, list(bars.symbols))

def honest(bars):
    return (closes(bars) > closes(bars).rolling(WINDOW).mean()) * 0.5

def centred(bars, window=5):
    return (closes(bars) > closes(bars).rolling(window, center=True).mean()) * 0.5

def at_open(bars):
    return np.sign(bars.close - bars.open)

def rule(lookback=4):
    return rules.momentum(lookback)

def broken_rule():
    return rules.momentum(-1)

def number():
    return 3

def two(bars, window):
    return bars.close

def needs_all(bars):
    return np.sign(bars.close - bars.close[100]) * (np.arange(len(bars))[:, None] >= 0)

def fails(bars):
    return bars.closes
"""

FAILS = CODE.splitlines().index("    return bars.closes") + 1


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A folder with bars.csv and code.py, which imports its neighbour."""
    write_bars(random_bars(np.random.default_rng(0), 120, 2), tmp_path / "bars.csv")
    (tmp_path / "code.py").write_text(CODE)
    (tmp_path / "neighbour.py").write_text("WINDOW = 5\n")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("neighbour", None)
    sys.modules.pop("leakcheck_code", None)


@pytest.fixture
def check(command, mine):
    def run(strategy, *options):
        return command("leakcheck", strategy, "--data=bars.csv", "--cases=30", *options)

    return run


@pytest.mark.parametrize(
    "strategy", ["sma_cross", "feature:return_1", "code.py:honest", "code.py:rule", "code.py:held"]
)
@pytest.mark.few(3)
def test_no_look_ahead_is_exit_0(check, strategy):
    before = list(sys.path)
    said = check(strategy, "--json", "--quiet")  # a slow machine shows progress
    assert said.code == 0 and said.err == "", said
    assert f"{strategy}: no look-ahead found in 30 cases" in said.out
    assert said.json["ok"] is True and said.json["cases"] == 30 and said.json["leaks"] == 0
    assert said.json["strategy"] == strategy and said.json["data"] == "bars.csv"
    assert sys.path == before


def test_look_ahead_is_exit_1_with_its_example_and_the_json(check):
    said = check("code.py:centred", "--json", "--seed=2")
    assert said.code == 1
    assert said.err.splitlines() == [
        "nca-trader leakcheck: code.py:centred: it looks ahead; see above, and use bars up to its "
        "own row only."
    ]
    assert "code.py:centred looks ahead through close (" in said.out
    assert "Changing close of S" in said.out and "  columns    close\n" in said.out
    found = said.json
    assert found["ok"] is False and found["columns"] == ["close"] and found["seed"] == 2
    assert found["example"]["row"] <= found["example"]["t"] < found["example"]["rows"][0]


def test_what_is_decided_at_the_open(check):
    assert check("code.py:at_open").code == 0
    assert check("code.py:at_open", "--decided=open").code == 1


def test_a_tolerance_is_told(check):
    said = check("code.py:honest", "--tolerance=1e-9")
    assert said.code == 0 and "tolerance  1e-09" in said.out
    assert check("code.py:centred", "--tolerance=2").code == 0


def test_what_needs_later_bars_is_exit_1(check):
    said = check("code.py:needs_all")
    assert said.code == 1 and "IndexError at code.py line" in said.out


def one_line(said, says):
    assert said.code == 2 and said.out == "", said
    assert len(said.err.splitlines()) == 1 and says in said.err, said.err
    assert said.err.startswith("nca-trader leakcheck: ")


@pytest.mark.parametrize(
    ("strategy", "says"),
    [
        ("sma_cros", "sma_cros: no such rule; did you mean 'sma_cross'? There are always_flat,"),
        ("feature:rsj", "unknown feature 'rsj'; did you mean 'rsi'?"),
        ("code.py:honset", "code.py: no 'honset' there; did you mean 'honest'? There are held,"),
        ("code.py", "code.py: which of its names? There are held, closes, honest, centred,"),
        ("code.py:LEVEL", "code.py:LEVEL: a float is not a strategy; name a function of bars"),
        ("code.py:Strategy", "code.py:Strategy: a type is not a strategy"),
        (
            "code.py:number",
            "code.py:number: takes no bars and returns the number 3; let it take bars",
        ),
        ("code.py:two", "code.py:two: lacks 2 arguments; a function of bars takes one"),
        ("code.py:broken_rule", "momentum: lookback=-1 is below its least value"),
        ("code.py:fails", f"AttributeError at code.py line {FAILS} (`return bars.closes`): 'Bars'"),
    ],
)
def test_a_strategy_that_cannot_be_had_is_one_line(check, strategy, says):
    one_line(check(strategy), says)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (
            "import nonsuch_package\n",
            "raises ModuleNotFoundError at bad.py line 1 (`import nonsuch_package`): No module",
        ),
        (
            "x = 1\ny = z\n",
            "importing it raises NameError at bad.py line 2 (`y = z`): name 'z' is not",
        ),
        ("def f(bars)\n    return 1\n", "bad.py line 1: expected ':' (SyntaxError); repair it."),
        (
            "import sys\nsys.exit(3)\n",
            "importing it raises SystemExit at bad.py line 2 (`sys.exit(3)`): 3",
        ),
        ("x = 1\n", "bad.py: no 'f' there; It defines no function."),
    ],
)
def test_a_file_that_cannot_be_imported_says_where(check, mine, code, says):
    (mine / "bad.py").write_text(code)
    one_line(check("bad.py:f"), says)


def test_too_few_bars_are_one_line(command, mine):
    write_bars(random_bars(np.random.default_rng(0), 12, 1), mine / "few.csv")
    one_line(command("leakcheck", "sma_cross", "--data=few.csv"), "12 bars are too few")
