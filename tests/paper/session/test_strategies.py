"""A strategy and a function of bars trade on paper what their backtest says."""

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from drawn import patient
from rounding import ROUNDING

import nca_trader as nca
from nca_trader.data.bars import write_bars
from nca_trader.errors import ConfigError, HaltError
from nca_trader.paper.journal.journal import read_events, verify
from nca_trader.paper.session.trade import paper_trade

COSTS = nca.Costs(commission=5e-4, slippage=2e-4)


@pytest.fixture(scope="module")
def bars(stage):
    return stage.bars(num_bars=150, missing=0.1, seed=4)


@pytest.fixture(scope="module")
def file(bars, tmp_path_factory):
    path = tmp_path_factory.mktemp("bars") / "bars.parquet"
    write_bars(bars, path)
    return path


def crossing(bars):
    """A function of bars in pandas: no order before its mean exists."""
    close = pd.DataFrame(bars.close)
    mean = close.rolling(8).mean()
    return np.where(mean.isna(), np.nan, np.where(close > mean, 0.5, -0.3))


MIX = {
    "trend": (nca.rules.sma_cross(3, 9), 0.5),
    "patient": (patient(4), 0.4),
    "sized": (nca.rules.momentum(5).with_volatility(0.1, span=10.0), -0.3),
}
SUBJECTS = {
    "rule": nca.rules.sma_cross(3, 9),
    "scaled": nca.rules.momentum(5).with_volatility(0.1, span=10.0),
    "portfolio": patient(4),
    "blend": nca.blend(MIX, costs=COSTS),
    "function": crossing,
}


@pytest.mark.parametrize(
    ("fill", "order"),
    [("next_open", None), ("close", None), ("next_open", "on_change"), ("close", "rebalance")],
)
@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.few(2)
def test_paper_orders_and_earns_what_the_backtest_does(name, fill, order, bars, file, tmp_path):
    """The broker's own books are compared with the account at every bar, and halt at 1e-9."""
    subject, start = SUBJECTS[name], "2020-01-31"
    path = tmp_path / "paper.db"
    made = paper_trade(
        subject, f"replay:{file}", path, start=start, costs=COSTS, fill=fill, order=order
    )
    expected = nca.backtest(bars, subject, COSTS, fill or "next_open", order, start=start)
    assert made["fills"] > 10 and made["decisions"] == 120
    decided = [event.body for event in read_events(path, "decision")]
    targets = [[np.nan if x is None else x for x in body["target"]] for body in decided]
    np.testing.assert_array_equal(targets, expected.targets)
    keys = {"target", "parts"} if name == "blend" else {"target"}
    assert all(body.keys() == keys for body in decided)
    equity = [event.body["equity"] for event in read_events(path, "snapshot")]
    np.testing.assert_allclose(equity, expected.equity, rtol=1e-14)


@pytest.mark.heavy
@pytest.mark.parametrize("start", [None, "2020-01-31"])
def test_each_part_of_a_blend_is_journalled_as_it_would_be_alone(start, bars, file, tmp_path):
    paper_trade(SUBJECTS["blend"], f"replay:{file}", tmp_path / "all.db", start=start, costs=COSTS)
    mine = [event.body["parts"] for event in read_events(tmp_path / "all.db", "decision")]
    for name, (part, _) in MIX.items():
        path = tmp_path / f"{name}.db"
        paper_trade(part, f"replay:{file}", path, start=start, costs=COSTS)
        own = [event.body["target"] for event in read_events(path, "decision")]
        # At the start a rule alone repeats the order in force; in a blend it is in the sum already.
        begin = 0 if start is None else 1
        found = np.array([body[name] for body in mine][begin:], float)
        np.testing.assert_allclose(found, np.array(own[begin:], float), rtol=ROUNDING)
    again = paper_trade(SUBJECTS["blend"], f"replay:{file}", tmp_path / "all.db", start=start,
                        costs=COSTS)  # fmt: skip
    assert again["events"] == verify(tmp_path / "all.db").seq
    other = nca.blend(MIX | {"trend": (MIX["trend"][0], 0.6)}, costs=COSTS)
    with pytest.raises(ConfigError, match=r"parts\.trend\.share 0\.5 there, 0\.6 here"):
        paper_trade(other, f"replay:{file}", tmp_path / "all.db", start=start, costs=COSTS)


def test_a_part_that_cannot_decide_is_named_and_halts_after_three(file, tmp_path):
    def act(count, bar):
        return count + 1, jnp.where(count > 20, jnp.inf, jnp.full(2, 0.2))

    broken = nca.Strategy(lambda num_assets: jnp.zeros((), int), act, "broken")
    mix, path = nca.blend({"good": MIX["trend"], "broken": (broken, 0.5)}), tmp_path / "paper.db"
    with pytest.raises(HaltError, match="policy-not-finite"):
        paper_trade(mix, f"replay:{file}", path)
    risks = [event.body for event in read_events(path, "risk")]
    assert risks == 3 * [{"code": "policy-not-finite", "parts": ["broken"]}]


def test_a_session_of_a_strategy_resumes_where_it_stopped(file, tmp_path, digest):
    subject, journals = SUBJECTS["portfolio"], [tmp_path / "whole.db", tmp_path / "cut.db"]
    bars = iter(range(60))
    stopped = paper_trade(
        subject, f"replay:{file}", journals[1], stop=lambda: next(bars, None) is None
    )
    assert stopped["bars"] == 61
    whole = paper_trade(subject, f"replay:{file}", journals[0])
    again = paper_trade(subject, f"replay:{file}", journals[1])
    assert verify(journals[1]).seq > stopped["events"]
    assert again["equity"] == whole["equity"] and again["fills"] == whole["fills"]
    # Another strategy, and another cost, are another session.
    for other, costs in ((patient(5), None), (subject, COSTS)):
        with pytest.raises(ConfigError, match="journal of another session"):
            paper_trade(other, f"replay:{file}", journals[0], costs=costs)


def test_a_session_does_not_go_on_with_another_parameter(file, tmp_path):
    paper_trade(nca.rules.sma_cross(3, 9), f"replay:{file}", tmp_path / "paper.db")
    with pytest.raises(ConfigError, match=r"journal of another session.*strategy SMA cross"):
        paper_trade(nca.rules.sma_cross(3, 10), f"replay:{file}", tmp_path / "paper.db")


def refused(subject, file, tmp_path, match, **more):
    with pytest.raises(ConfigError, match=match):
        paper_trade(subject, f"replay:{file}", tmp_path / "paper.db", **more)


def test_stops_are_refused_before_a_journal_is_made(file, tmp_path):
    stopped = nca.rules.sma_cross(3, 9).with_stop(0.05)
    refused(stopped, file, tmp_path, "orders carry stops or targets, which no broker")
    assert not (tmp_path / "paper.db").exists()


def test_a_function_whose_past_changes_is_refused_with_the_bar(file, tmp_path):
    def hindsight(bars):
        return np.where(np.roll(bars.close, -1, axis=0) > bars.close, 0.5, 0.0)

    refused(hindsight, file, tmp_path, r"hindsight: its target at 2020-.* changed when the bar of")


def test_a_function_that_lacks_bars_says_so_and_trades_from_a_later_start(file, tmp_path):
    def needs(bars):
        first = bars.close[9]  # fails before there are ten bars
        return np.where(bars.close > first, 0.4, 0.0)

    refused(needs, file, tmp_path, r"needs: .*called on the 1 bars up to 2020-01-01.*give start")
    made = paper_trade(needs, f"replay:{file}", tmp_path / "late.db", start="2020-01-15")
    assert made["decisions"] == 136


@pytest.mark.parametrize(
    ("subject", "match"),
    [
        (nca.rules.sma_cross, r"is a function \(sma_cross\); a function of bars takes one"),
        (
            3.0,
            "run is the number 3.0; give a path, what nca.load opened, a Strategy or a",
        ),
        (lambda bars: np.full((3, 2), 0.1), r"shape \(3, 2\)"),
    ],
)
def test_what_is_no_strategy_is_refused_in_one_line(subject, match, file, tmp_path):
    with pytest.raises(nca.errors.NcaTraderError, match=match) as caught:
        paper_trade(subject, f"replay:{file}", tmp_path / "paper.db")
    assert "\n" not in str(caught.value)


def test_infinite_targets_are_not_traded_and_halt(file, tmp_path):
    never = nca.Strategy(lambda n: jnp.zeros(n), lambda state, bar: (state, bar.close / 0.0))
    with pytest.raises(nca.errors.HaltError, match="policy-not-finite"):
        paper_trade(never, f"replay:{file}", tmp_path / "paper.db")
