"""Metrics next to backtesting.py, vectorbt and quantstats, on the same equity and the same fills.

Where a definition differs, the difference is made good in the test, so that the numbers must agree.
docs/guides/results.md names each of these differences.
"""

import importlib.util
import math
import warnings

import numpy as np
import pandas as pd
import pytest
from drawn import random_bars

import nca_trader as nca
from nca_trader.evaluate.trades import OPEN

for _name in ("backtesting", "vectorbt", "quantstats"):
    if importlib.util.find_spec(_name) is None:
        pytest.skip(
            f"{_name} is not installed here; `make test-oracles` installs it and runs these",
            allow_module_level=True,
        )

pytestmark = pytest.mark.filterwarnings("ignore")
DAYS = 700
COST = 1e-3


@pytest.fixture(scope="module")
def result():
    """Long, short and flat, one position at a time, on daily bars of every day of the week."""
    rng = np.random.default_rng(11)
    bars = random_bars(rng, DAYS, 1, spread=0.012)
    targets = np.repeat(rng.choice([-1.0, 0.0, 1.0], DAYS // 7), 7)[:, None] * 0.9
    return nca.backtest(bars, targets, nca.Costs(commission=COST), order="on_change", borrow=True)


@pytest.fixture(scope="module")
def closed(result):
    return result.trades[result.trades["reason"] != OPEN]


def test_quantstats_has_the_same_ratios_of_returns(result):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import quantstats.stats as qs
    ours, year = result.metrics, result.bars_per_year
    r = pd.Series(result.returns, result.equity.index.tz_localize(None))
    same = {"periods": year}
    assert ours["sharpe"] == pytest.approx(qs.sharpe(r, **same))
    assert ours["sortino"] == pytest.approx(qs.sortino(r, **same))
    assert ours["cagr"] == pytest.approx(qs.cagr(r, **same))
    assert ours["annual_volatility"] == pytest.approx(qs.volatility(r, **same))
    assert ours["calmar"] == pytest.approx(qs.calmar(r, **same))
    assert ours["omega"] == pytest.approx(qs.omega(r, **same))
    assert ours["tail_ratio"] == pytest.approx(qs.tail_ratio(r))
    assert ours["max_drawdown"] == pytest.approx(qs.max_drawdown(r))
    # What rounding leaves of a bar in cash is a bar without a return here.
    assert ours["hit_rate"] == pytest.approx(qs.win_rate(r.where(r.abs() > 1e-15, 0.0)))
    shortfall = qs.conditional_value_at_risk(r, method="historical")
    assert ours["expected_shortfall"] == pytest.approx(shortfall)
    held = pd.Series(nca_benchmark(result), r.index)
    greeks = qs.greeks(r, held, periods=year, prepare_returns=False)
    assert ours["beta"] == pytest.approx(greeks["beta"])
    assert ours["alpha"] == pytest.approx(greeks["alpha"])
    ratio = qs.information_ratio(r, held, prepare_returns=False) * math.sqrt(year)
    assert ours["information_ratio"] == pytest.approx(ratio)
    # Differences: VaR by a Gaussian, moments with pandas' corrections, one bar fewer in the ulcer.
    gaussian = r.mean() - 1.6448536269514722 * r.std()
    assert qs.value_at_risk(r) == pytest.approx(gaussian)
    assert ours["value_at_risk"] != pytest.approx(gaussian, rel=0.02)
    n = len(r)
    moment = ours["skewness"] * math.sqrt(n * (n - 1)) / (n - 2)
    assert qs.skew(r) == pytest.approx(moment)
    excess = ((n + 1) * (ours["kurtosis"] - 3.0) + 6.0) * (n - 1) / ((n - 2) * (n - 3))
    assert qs.kurtosis(r) == pytest.approx(excess)
    assert qs.ulcer_index(r) == pytest.approx(ours["ulcer_index"] * math.sqrt(n / (n - 1)))


def nca_benchmark(result):
    return result.benchmark.to_numpy() / np.concatenate([[1.0], result.benchmark[:-1]]) - 1.0


def test_vectorbt_has_the_same_ratios_of_returns(result):
    from vectorbt.returns import nb

    ours, year, r = result.metrics, result.bars_per_year, result.returns
    held = nca_benchmark(result)
    assert ours["sharpe"] == pytest.approx(nb.sharpe_ratio_1d_nb(r, year))
    assert ours["sortino"] == pytest.approx(nb.sortino_ratio_1d_nb(r.copy(), year))
    assert ours["cagr"] == pytest.approx(nb.annualized_return_1d_nb(r, year))
    assert ours["annual_volatility"] == pytest.approx(nb.annualized_volatility_1d_nb(r, year))
    assert ours["calmar"] == pytest.approx(nb.calmar_ratio_1d_nb(r, year))
    assert ours["omega"] == pytest.approx(nb.omega_ratio_1d_nb(r, year))
    assert ours["max_drawdown"] == pytest.approx(nb.max_drawdown_1d_nb(r))
    assert ours["ulcer_index"] == pytest.approx(nb.ulcer_index_1d_nb(r))
    assert ours["tail_ratio"] == pytest.approx(nb.tail_ratio_1d_nb(r))
    assert ours["value_at_risk"] == pytest.approx(nb.value_at_risk_1d_nb(r))
    assert ours["beta"] == pytest.approx(nb.beta_1d_nb(r, held))
    # Differences: alpha compounds, the information ratio is per bar, CVaR counts its bars.
    alpha = (1.0 + ours["alpha"] / year) ** year - 1.0
    assert nb.alpha_1d_nb(r, held, year) == pytest.approx(alpha)
    ratio = nb.information_ratio_1d_nb(r, held) * math.sqrt(year)
    assert ours["information_ratio"] == pytest.approx(ratio)
    lowest = np.sort(r)[: int((len(r) - 1) * 0.05) + 1]
    assert nb.cond_value_at_risk_1d_nb(r) == pytest.approx(lowest.mean())
    assert ours["expected_shortfall"] == pytest.approx(lowest.mean())


def test_vectorbt_has_the_same_round_trips_from_the_same_fills(result, closed):
    import vectorbt as vbt

    bars = result.traded_bars
    size, price = np.zeros(DAYS), bars.open[:, 0].copy()
    row = bars.index.searchsorted(result.orders["time"])
    side = np.where(result.orders["side"] == "buy", 1.0, -1.0)
    size[row] = result.orders["size"].to_numpy() * side
    portfolio = vbt.Portfolio.from_orders(
        pd.Series(bars.close[:, 0]), size=size, price=price, fees=COST, init_cash=1.0, freq="1D"
    )
    theirs = portfolio.positions
    table = theirs.records[theirs.records["status"] == 1]
    assert len(table) == len(closed) > 30
    np.testing.assert_allclose(table["pnl"], closed["pnl"], rtol=1e-8)
    np.testing.assert_allclose(table["return"], closed["return"], rtol=1e-8)
    np.testing.assert_allclose(table["entry_price"], closed["entry_price"], rtol=1e-10)
    np.testing.assert_allclose(table["exit_price"], closed["exit_price"], rtol=1e-10)
    ended = theirs.closed
    ours = result.metrics
    assert ours["win_rate"] == pytest.approx(ended.win_rate())
    assert ours["profit_factor"] == pytest.approx(ended.profit_factor())
    assert ours["expectancy"] == pytest.approx(ended.expectancy())
    assert ours["sqn"] == pytest.approx(ended.sqn())


def test_backtesting_py_has_the_same_numbers_by_its_own_definitions(result, closed):
    from backtesting._stats import compute_stats

    bars, ours = result.traded_bars, result.metrics
    index = bars.index.tz_localize(None)
    at = {end: index.searchsorted(closed[end].dt.tz_localize(None)) for end in ("entry", "exit")}
    trades = pd.DataFrame(
        {
            "EntryBar": at["entry"],
            "ExitBar": at["exit"],
            "PnL": closed["pnl"].to_numpy(),
            "ReturnPct": closed["return"].to_numpy(),
            "EntryTime": index[at["entry"]],
            "ExitTime": index[at["exit"]],
        }
    )
    trades["Duration"] = trades["ExitTime"] - trades["EntryTime"]
    # Its curve begins with the capital, and has one entry per bar.
    equity = result.equity.to_numpy()
    frame = pd.DataFrame({"Close": bars.close[:, 0]}, index)

    class Nothing:
        _indicators = ()

    theirs = compute_stats(trades, equity, frame, Nothing())
    r = equity[1:] / equity[:-1] - 1.0
    mean = np.exp(np.log1p(r).mean()) - 1.0
    annual = (1.0 + mean) ** 365 - 1.0
    assert theirs["Return (Ann.) [%]"] / 100 == pytest.approx(annual)
    variance = r.var(ddof=1)
    deviation = math.sqrt((variance + (1 + mean) ** 2) ** 365 - (1 + mean) ** (2 * 365))
    assert theirs["Volatility (Ann.) [%]"] / 100 == pytest.approx(deviation)
    # Sharpe, Sortino and Calmar have the geometric annual return above the line.
    assert theirs["Sharpe Ratio"] == pytest.approx(annual / deviation)
    assert theirs["Sharpe Ratio"] != pytest.approx(ours["sharpe"], rel=0.01)
    downside = math.sqrt(np.mean(np.minimum(r, 0.0) ** 2) * 365)
    assert theirs["Sortino Ratio"] == pytest.approx(annual / downside)
    assert theirs["Max. Drawdown [%]"] / 100 == pytest.approx(ours["max_drawdown"])
    assert theirs["Calmar Ratio"] == pytest.approx(annual / -ours["max_drawdown"])
    # In days, where a bar is a day; here in bars.
    assert theirs["Max. Drawdown Duration"].days == ours["max_drawdown_duration"]
    log_r, log_b = np.log1p(r), np.diff(np.log(bars.close[:, 0]))
    assert theirs["Beta"] == pytest.approx(np.cov(log_r, log_b)[0, 1] / log_b.var(ddof=1))
    assert theirs["Win Rate [%]"] / 100 == pytest.approx(ours["win_rate"])
    assert theirs["SQN"] == pytest.approx(ours["sqn"])
    assert theirs["Best Trade [%]"] / 100 == pytest.approx(ours["best_trade"])
    assert theirs["Worst Trade [%]"] / 100 == pytest.approx(ours["worst_trade"])
    gained = closed["return"].clip(lower=0.0).sum() / -closed["return"].clip(upper=0.0).sum()
    assert theirs["Profit Factor"] == pytest.approx(gained)
    # Its expectancy is the average trade here; its average trade is a geometric mean.
    assert theirs["Expectancy [%]"] / 100 == pytest.approx(ours["average_trade"])
    geometric = np.exp(np.log1p(closed["return"]).mean()) - 1.0
    assert theirs["Avg. Trade [%]"] / 100 == pytest.approx(geometric)
    assert theirs["Avg. Trade Duration"].days == math.ceil(ours["trade_duration"])
