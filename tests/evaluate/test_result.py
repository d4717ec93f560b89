"""What a backtest returns: trades that add up, tables, the printed summary, plots and pages."""

import math
import re

import numpy as np
import pandas as pd
import pytest
from drawn import random_bars

import nca_trader as nca
from nca_trader.errors import ConfigError
from nca_trader.evaluate import metrics

BARS = random_bars(np.random.default_rng(4), 120, 1)
MOMENTUM = nca.rules.momentum(5)
HOLDING = ["dividends", "interest", "borrow_fee", "funding", "ruin"]


def adds_up(result):
    held = float(result.flows[HOLDING].to_numpy().sum())
    total = result.trades["pnl"].sum() + held
    assert total == pytest.approx(result.equity.iloc[-1] - 1.0, abs=1e-10)
    assert result.orders["cost"].sum() == pytest.approx(result.trades["cost"].sum(), abs=1e-12)


def test_a_strategy_without_an_order_has_no_trades_and_prints():
    flat = nca.backtest(BARS, nca.rules.always_flat(), nca.Costs(interest_lend=0.05))
    assert flat.trades.empty and flat.orders.empty and flat.metrics["trades"] == 0
    assert np.isnan(flat.metrics["sharpe"]) and flat.metrics["interest"] > 0
    text = str(flat)
    assert len(text.splitlines()) == 20 and "NO FILLS" in text and "nan" not in text
    adds_up(flat)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("targets", "account", "says"),
    [
        (np.zeros(20), {}, "no weight other than 0 was ordered"),
        (np.full(20, -1e-12), {}, "largest weight ordered is 1e-12, which counts as rounding"),
        (np.where(np.arange(20) < 19, np.nan, 1.0), {}, "only the last bar orders"),
        (np.full(20, 0.5), {"capital": 1.0, "lot": 1.0}, "every order is too small"),
        (np.full(20, 0.5), {"capital": 1.0, "min_notional": 5.0}, "every order is too small"),
        (
            np.full(20, 0.5),
            {"capital": 1e9, "lot": 1.0, "max_participation": 1e-12},
            "max_participation=1e-12 of the volume leaves no order",
        ),
    ],
)
def test_no_fills_says_why(targets, account, says):
    bars = random_bars(np.random.default_rng(0), 20, 1)
    result = nca.backtest(bars, targets, **account)
    assert result.num_fills == 0 and result.cautions[0].startswith("NO FILLS")
    assert says in result.cautions[0]


def test_the_sharpe_ratio_is_of_returns_above_the_interest_on_cash():
    bars = random_bars(np.random.default_rng(2), 300, 1, spread=0.01)
    half = np.full(300, 0.5)
    plain = nca.backtest(bars, half)
    paid = nca.backtest(bars, half, nca.Costs(interest_lend=0.10))
    assert paid.metrics["total_return"] > plain.metrics["total_return"] + 0.03
    assert paid.metrics["sharpe"] == pytest.approx(plain.metrics["sharpe"], rel=0.02)
    raw = metrics.sharpe(metrics.simple_returns(plain.equity), bars.bars_per_year)
    assert plain.metrics["sharpe"] == raw
    assert paid.metrics["interest"] == pytest.approx(paid.costs.loc["interest", "amount"])


def test_the_summary_has_twenty_lines_and_the_benchmark_beside_it():
    bars = nca.sample_bars("sp500").select("SP500")[-700:]
    result = nca.backtest(bars, nca.rules.sma_cross(10, 30), nca.Costs(commission=5e-4))
    lines = str(result).splitlines()
    assert len(lines) == 20 and max(map(len, lines)) <= 120
    # Bought at the second open, with all cash and the commission.
    growth = bars.close[-1, 0] / (bars.open[1, 0] * (1.0 + 5e-4)) - 1.0
    assert re.search(rf"total return +\S+ +{growth:.1%}", str(result))
    assert f"trades {len(result.trades)}," in str(result)
    assert "fills at the next open, on_change" in lines[1]
    weights = nca.backtest(bars, np.ones(700), fill="close")
    assert "fills at the close, rebalance" in str(weights).splitlines()[1]
    html = result._repr_html_()
    assert "<table>" in html and "<svg" in html and "buy and hold" in html


def test_plots_shade_and_name_what_is_in_sample():
    import dataclasses

    result = nca.backtest(BARS, MOMENTUM)

    def named(figure):
        texts = figure.axes[0].get_legend().get_texts()
        return [text.get_text() for text in texts]

    assert named(result.plot()) == ["momentum 5", "buy and hold"]
    seen = dataclasses.replace(result, in_sample=50).plot()
    assert named(seen)[-1] == "in sample"
    for axes in seen.axes:  # equity, drawdown, exposure
        assert any(patch.get_alpha() == 0.2 for patch in axes.patches)


def test_results_side_by_side():
    first, second = (nca.backtest(BARS, nca.rules.momentum(n)) for n in (5, 9))
    both = nca.compare([first, second])
    assert both.table.index.tolist() == ["momentum 5", "momentum 9"]
    assert both.table.loc["momentum 9", "sharpe"] == second.metrics["sharpe"]
    assert "momentum 5" in str(both) and len(both.plot().axes) == 2
    assert "momentum 9" in both._repr_html_()
    with pytest.raises(ConfigError, match="more than once"):
        nca.compare([first, first])
    with pytest.raises(ConfigError, match="at least one"):
        nca.compare([])
    with pytest.raises(ConfigError, match="results"):
        nca.compare([first, "x"])


def test_metrics_keep_their_names_and_come_with_those_of_trades_and_the_benchmark():
    found = nca.backtest(BARS, MOMENTUM).metrics
    assert {
        "bars", "total_return", "cagr", "annual_volatility", "sharpe", "sortino", "max_drawdown",
        "calmar", "hit_rate", "skewness", "kurtosis", "exposure", "turnover", "omega", "tail_ratio",
        "value_at_risk", "expected_shortfall", "max_drawdown_duration", "ulcer_index", "alpha",
        "alpha_error", "beta", "beta_error", "information_ratio", "information_ratio_error",
        "win_rate", "profit_factor", "expectancy", "sqn", "average_trade", "trade_duration",
        "capacity", "interest", "trades",
    } <= set(found)  # fmt: skip
    assert all(isinstance(value, float) for value in found.values())
    assert not any(np.isinf(value) for value in found.values())


@pytest.mark.heavy
def test_a_function_that_was_not_checked_is_marked_on_the_page(tmp_path):

    def tomorrow(bars):
        return np.sign(np.append(np.diff(bars.close[:, 0]), 0.0))

    marked = nca.backtest(BARS, tomorrow, check=False)
    assert "UNCHECKED" in str(marked)
    assert "UNCHECKED" in marked.report(tmp_path / "x.html").read_text(encoding="utf-8")

    def yesterday(bars):
        return np.sign(np.append(0.0, np.diff(bars.close[:, 0])))

    assert "UNCHECKED" not in str(nca.backtest(BARS, yesterday))


def test_a_result_keeps_what_it_computed():
    result = nca.backtest(BARS, MOMENTUM)
    assert result.trades is result.trades and isinstance(result.trades, pd.DataFrame)


def test_a_week_has_no_growth_of_a_year():
    bars = random_bars(np.random.default_rng(4), 9, 1)
    result = nca.backtest(bars, nca.rules.buy_and_hold(), fill="close")
    found = result.metrics["sharpe"]
    # Lo (2002) for independent Gaussian returns, per bar and then times sqrt(P).
    per_bar = found / math.sqrt(bars.bars_per_year)
    error = math.sqrt((1.0 + per_bar**2 / 2.0) / 9.0 * bars.bars_per_year)
    for text in (str(result), result._repr_html_(), str(nca.compare([result]))):
        assert f"{found:.2f} (se {error:.2f})" in text
        assert re.search(r"CAGR\D+n/a", text) and re.search(r"Calmar ratio\D+n/a", text)
    year = random_bars(np.random.default_rng(4), 400, 1)
    assert not re.search(r"CAGR\D+n/a", str(nca.backtest(year, nca.rules.buy_and_hold())))


def test_a_winner_that_is_still_open_is_counted_next_to_the_win_rate():
    result = nca.backtest(BARS, nca.rules.buy_and_hold())
    assert "trades 1, 1 open, win rate of the ended n/a" in str(result)


@pytest.mark.heavy
def test_who_was_charged_nothing_reads_it_and_what_costs_would_leave(tmp_path):
    free = nca.backtest(BARS, MOMENTUM)
    paid = nca.backtest(BARS, MOMENTUM, nca.Costs(commission=5e-4, slippage=2e-4))
    left = f"total return {paid.metrics['total_return']:.1%}"
    for text in (str(free), free._repr_html_(), free.report(tmp_path / "a.html").read_text()):
        assert "NOTHING CHARGED: at 5 bp commission and 2 bp slippage" in text and left in text
        assert "pays the same costs" not in text
    charged = paid.report(tmp_path / "b.html").read_text()
    assert "NOTHING CHARGED" not in charged and "pays the same costs" in charged
    assert (
        f"costs of trading {-paid.costs.loc[['commission', 'slippage'], 'amount'].sum():.2%}"
        in str(paid)
    )
