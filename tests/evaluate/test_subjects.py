"""Strategies by name: rules, and members of a user's own file, from Python and the command."""

import functools
import inspect

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from drawn import random_bars

import nca_trader as nca
from nca_trader import BarError, ConfigError, backtest, rules
from nca_trader.cli.options import params_of
from nca_trader.config.agent import RULES as NAMES
from nca_trader.config.spans import parse_grid
from nca_trader.evaluate.combinations import RULES, member_of, subject_of

BARS = random_bars(np.random.default_rng(0), 120, 1)
FILE = """
import jax.numpy as jnp
import nca_trader as nca
from numpy import mean

def cross(bars, fast=3, slow=8):
    import pandas as pd
    close = pd.DataFrame(bars.close)
    quick, steady = close.rolling(fast).mean(), close.rolling(slow).mean()
    return (quick > steady).astype(float).to_numpy()

def half(weight=0.5):
    return nca.Strategy(lambda n: (), lambda s, bar: (s, weight + 0 * bar.close), "half")

ready = half(0.25)
number = 3
def needs(bars, other):
    return 0.0 * bars.close + other
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my.py"
    path.write_text(FILE)
    return path


def test_the_command_knows_every_rule_before_jax_is_imported():
    assert tuple(RULES) == NAMES


def test_a_function_of_bars_from_a_file_is_the_rule_it_copies(file):
    found = subject_of(f"{file}:cross", {"slow": 9})
    result = backtest(BARS, found)
    assert result.name == "cross" and result.order == "rebalance"
    same = backtest(BARS, rules.sma_cross(3, 9), order="rebalance")
    np.testing.assert_array_equal(result.targets, same.targets)
    assert result.num_fills > 5


def test_a_function_of_bars_takes_a_parameter_without_a_default(file):
    found = subject_of(f"{file}:needs", {"other": 0.25})
    assert (backtest(BARS, found).targets == 0.25).to_numpy().all()


def test_a_rule_of_a_file_takes_parameters(file):
    assert backtest(BARS, subject_of(f"{file}:half", {"weight": 0.75})).targets.iloc[0, 0] == 0.75
    assert subject_of(f"{file}:ready").name == "half"
    assert subject_of("sma_cross", {"fast": 4}).name == "SMA cross 4/30"


@pytest.mark.parametrize(
    ("name", "params", "said"),
    [
        ("my.py:halv", {}, "did you mean 'half'"),
        ("my.py:half", {"wait": 1}, "no parameter 'wait'"),
        ("my.py:number", {}, "a int is not a strategy"),
        ("my.py:needs", {}, "lacks 2 arguments"),
        ("my.py:ready", {"weight": 1}, "takes no parameters"),
        ("sma_cros", {}, "did you mean 'sma_cross'"),
        ("sma_cross", {"fast": 30, "slow": 10}, "is not below slow"),
        ("sma_cross", {"fast": 2.5}, "fast"),
    ],
)
def test_a_wrong_name_or_parameter_is_one_line(file, name, params, said, monkeypatch):
    monkeypatch.chdir(file.parent)
    with pytest.raises(ConfigError, match=said) as error:
        subject_of(name, params)
    assert "\n" not in str(error.value)


def test_the_function_itself_is_what_a_sweep_takes(file):
    assert inspect.isfunction(member_of(f"{file}:half")) and member_of("momentum") is rules.momentum


def test_parameters_are_numbers_or_texts():
    class args:
        param = ("fast=10", "stop=0.05", "on=true", "kind=ema")

    assert params_of(args) == {"fast": 10, "stop": 0.05, "on": True, "kind": "ema"}
    # One value is read as the same value of a grid is.
    args.param = (*args.param, "band=.5", "off=null")
    grid = {name: values[0] for name, values in parse_grid(args.param).items()}
    assert params_of(args) == grid
    assert (grid["band"], grid["off"]) == (0.5, None)
    for wrong in ("fast", "=3", "a b=3"):
        args.param = (wrong,)
        with pytest.raises(ConfigError, match="NAME=VALUE"):
            params_of(args)


def past(bars):
    """Long after a rise; the first row has no bar before it."""
    change = np.diff(bars.close, axis=0, prepend=np.nan)
    return np.where(change > 0.0, 1.0, 0.0)


def rare(bars):
    """One order, at bar 40, by a look at bar 42."""
    weights = np.zeros(bars.close.shape)
    weights[40] = 1.0 if len(bars) > 42 and bars.close[42] != bars.close[40] else 0.0
    return weights


LEAKS = {
    "the next bar": lambda bars: np.roll(np.sign(np.diff(bars.close, axis=0, append=0)), 0, axis=0),
    "the whole history's mean": lambda bars: 1.0 * (bars.close > bars.close.mean()),
    "the length": lambda bars: np.linspace(0.0, 1.0, len(bars)),
    "a warm-up filled backwards": lambda bars: (
        1.0 * (pd.DataFrame(bars.close).rolling(20).mean().bfill().to_numpy() > bars.close)
    ),
    "one rare order": rare,
    "a centred window": lambda bars: (
        1.0 * (pd.DataFrame(bars.close).rolling(5, center=True).mean().to_numpy() > bars.close)
    ),
}


@pytest.mark.parametrize("leak", LEAKS, ids=lambda name: name.replace(" ", "-"))
def test_a_function_that_looks_ahead_is_refused_with_the_bar(leak):
    with pytest.raises(ConfigError, match=r"looks ahead: its target at bar \d+ \(20"):
        backtest(BARS, LEAKS[leak])
    assert backtest(BARS, LEAKS[leak], check=False).num_fills > 0


def test_an_honest_function_passes_and_is_called_on_three_shorter_histories():
    lengths = []

    def counted(bars):
        lengths.append(len(bars))
        return past(bars)

    stop = str(BARS.index[90].date())
    assert backtest(BARS, counted, stop=stop).num_fills > 5
    # It never sees the bars after the span.
    assert lengths[0] == 90 and len(lengths) == 4
    ends = np.flatnonzero(np.diff(past(BARS[:90])[:, 0], prepend=0.0) > 0.0) + 1
    assert lengths[1] == ends[0] and lengths[2] in ends and lengths[3] == 89


def test_a_function_of_chance_is_not_said_to_look_ahead():
    rng = np.random.default_rng(0)

    def tossed(bars):
        return rng.integers(0, 2, len(bars)).astype(float)

    with pytest.raises(ConfigError, match="called again with the same bars"):
        backtest(BARS, tossed)


@pytest.mark.parametrize(
    ("returned", "named"),
    [(None, "a NoneType"), (0.5, "the number 0.5"), ("buy", "the text 'buy'")],
)
def test_a_function_that_returns_no_row_per_bar_is_refused(returned, named):
    def rule(bars):
        return returned

    with pytest.raises(ConfigError, match=f"rule: returns {named} for 30 bars; return one row"):
        nca.backtest(nca.sample_bars("sp500").select("SP500")[-30:], rule)


def test_a_function_may_refuse_a_history_that_is_too_short():
    def patient(bars):
        if len(bars) < 50:
            raise ValueError("too short")
        return np.where(np.arange(len(bars))[:, None] < 50, 0.0, past(bars))

    assert backtest(BARS, patient).num_fills > 5

    def needs_all(bars):
        if len(bars) < len(BARS):
            raise ValueError("give me everything")
        return past(bars)

    with pytest.raises(ConfigError, match="give me everything"):
        backtest(BARS, needs_all)


def test_partial_functions_and_frames_are_targets():
    scaled = functools.partial(lambda bars, weight: weight * past(bars), weight=0.5)
    frame = pd.DataFrame(0.5 * past(BARS), BARS.index, list(BARS.symbols))
    np.testing.assert_array_equal(backtest(BARS, scaled).equity, backtest(BARS, frame).equity)


def test_a_strategy_may_answer_with_whole_numbers():
    steady = nca.Strategy(lambda n: (), lambda s, bar: (s, jnp.ones(1, jnp.int32)))
    assert backtest(BARS, steady).num_fills == 1


def test_the_name_of_a_pandas_series_is_not_the_strategys():
    weights = pd.Series(past(BARS)[:, 0], BARS.index, name=5)
    assert backtest(BARS, weights).name == "targets"


SIX = BARS[:6]
FRAME = pd.DataFrame(1.0, SIX.index, list(SIX.symbols))


@pytest.mark.parametrize(
    ("index", "said"),
    [
        (SIX.index[::-1], "row 0 is of"),
        (SIX.index[::-1].strftime("%Y-%m-%d"), "row 0 is of"),
        (pd.Index(SIX.index[::-1].date, dtype=object), "row 0 is of"),
        (SIX.index[::-1].tz_convert("Asia/Tokyo"), "row 0 is of"),
        ([5, 4, 3, 2, 1, 0], "row 1 has a lower number"),
        (list("abcdef"), "an index that is not of times"),
    ],
    ids=["times", "texts", "dates", "zone", "numbers", "letters"],
)
def test_weights_of_other_rows_are_refused(index, said):
    with pytest.raises(BarError, match=said):
        backtest(SIX, FRAME.set_axis(index))


@pytest.mark.parametrize(
    "index",
    [
        SIX.index.tz_convert("Asia/Tokyo"),
        SIX.index.tz_localize(None),
        SIX.index.strftime("%Y-%m-%d"),
        SIX.index.as_unit("s"),
        range(10, 16),
        pd.Index([t if i % 2 else t.tz_convert("Asia/Tokyo") for i, t in enumerate(SIX.index)]),
    ],
    ids=["zone", "naive", "texts", "seconds", "numbers", "two zones"],
)
def test_weights_of_the_same_rows_are_taken(index):
    assert backtest(SIX, FRAME.set_axis(index)).num_fills == 1


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: backtest(SIX, np.ones(6) + 1j), r"not numbers \(complex\)"),
        (lambda: backtest(SIX, np.ones(6), name=5), "name is the number 5; give a text"),
        (lambda: nca.Strategy(lambda: 0, lambda state, bar: (state, 1.0)), "write init.num_assets"),
        (lambda: rules.momentum(5).with_volatility(0.1, span=-1), "span=-1.: give at least 1"),
        (lambda: rules.momentum(5).with_volatility(0.1, cap="x"), "cap='x'.: give at least 0"),
        (lambda: nca.compare(3), "results is the number 3; give a sequence"),
        (
            lambda: backtest(SIX, nca.Strategy(lambda n: 0, lambda state, bar: (bar.close, 1.0))),
            "they differ: The input carry state has type",
        ),
    ],
)
def test_a_wrong_argument_is_one_line_with_the_remedy(call, said):
    with pytest.raises(nca.NcaTraderError, match=said) as raised:
        call()
    assert "\n" not in str(raised.value)


def test_a_strategy_that_leaves_python_is_one_line(tmp_path):
    file = tmp_path / "leaves.py"
    file.write_text(
        "import sys\ndef built():\n    sys.exit(3)\ndef called(bars):\n    sys.exit(3)\n"
    )
    with pytest.raises(ConfigError, match=r"can't be built \(SystemExit at leaves.py line 3"):
        subject_of(f"{file}:built")
    with pytest.raises(ConfigError, match=r"called: raises SystemExit on bars .*leaves.py line 5"):
        backtest(BARS, subject_of(f"{file}:called"))
