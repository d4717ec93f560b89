"""Pages with a price chart, pages of sweeps and folds: scripts, policy, numbers, escaping."""

import base64
import dataclasses
import hashlib
import html
import json
import re
import zlib

import numpy as np
import pandas as pd
import pytest
from drawn import random_bars
from markupsafe import Markup
from matplotlib.figure import Figure

import nca_trader as nca
from nca_trader.errors import ConfigError
from nca_trader.evaluate import figures
from nca_trader.evaluate.report import chart, page, plots, tables
from nca_trader.evaluate.report.contents import Section
from nca_trader.evaluate.report.render import LIBRARY

HOSTILE = "</script><script>alert(1)</script><b>&\"'"


@pytest.fixture(scope="module")
def result():
    bars = random_bars(np.random.default_rng(6), 300, 2, spread=0.01)
    bars = dataclasses.replace(bars, symbols=(HOSTILE, "B"))
    costs = nca.Costs(commission=1e-3)
    return nca.backtest(bars, nca.rules.momentum(5), costs, name=f"rule {HOSTILE}")


@pytest.fixture(scope="module")
def text(result, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "x.html"
    command = f"nca-trader backtest --data '{HOSTILE}'"
    with pytest.MonkeyPatch.context() as patch:  # plots take most of the time
        patch.setattr(plots, "svg", lambda *_: Markup("<svg></svg>"))
        return result.report(path, command=command).read_text(encoding="utf-8")


def unpacked(text):
    """The data of a page, as its script unpacks it."""
    (data,) = re.findall(r'<script type="text/plain" id="price-data">(.*?)</script>', text)
    return json.loads(zlib.decompress(base64.b64decode(data, validate=True)))


def scripts(text):
    return re.findall(r"<script>(.*?)</script>", text, re.DOTALL)


@pytest.mark.heavy
def test_only_the_scripts_of_this_package_may_run(text):
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="(.*?)"', text)
    policy = html.unescape(policy)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-inline" not in policy.split("style-src")[0] and "http" not in policy
    found = scripts(text)
    assert len(found) == 3 and found[0] == LIBRARY.read_text(encoding="utf-8").strip()
    for script in found:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert text.count("<script") == 4  # and the data, which is not run


@pytest.mark.heavy
def test_names_from_outside_stay_text_in_the_data_of_the_chart_too(text, result):
    assert unpacked(text)["assets"][0]["name"] == HOSTILE  # base64 has no "<"
    assert HOSTILE not in text.replace(html.escape(HOSTILE), "")


def test_the_page_asks_for_nothing_and_links_only_to_the_maker_of_the_chart(text):
    outside = text
    for script in scripts(text):
        outside = outside.replace(script, "")
    assert set(re.findall(r"https?://[^\s\"<]+", outside)) == {"https://www.tradingview.com/"}
    assert not re.search(r"<(img|link|iframe|object|embed|base)\b", outside)
    assert "Lightweight Charts™, Copyright © 2026 TradingView, Inc." in text
    folder = LIBRARY.parent
    assert "TradingView" in (folder / "NOTICE").read_text(encoding="utf-8")
    assert "Apache License" in (folder / "LICENSE").read_text(encoding="utf-8")


def test_the_page_has_its_sections(text):
    for title in ("Through time", "Trades", "More statistics", "Data and trading rules"):
        assert f"<h2>{title}</h2>" in text
    for words in ("Rolling Sharpe ratio", "Return of each month", "Exposure", "profit factor"):
        assert words in text
    assert not re.search(r">\s*nan\s*<", text, re.IGNORECASE)


def test_the_chart_has_the_bars_and_the_trades_of_the_result(result):
    data = chart.price_chart(result)
    bars, one = result.traded_bars, data["assets"][1]
    times = np.cumsum(data["times"])
    assert data["per_candle"] == 1 and one["name"] == "B" and not data["intraday"]
    np.testing.assert_allclose(one["close"], bars.close[:, 1], rtol=1e-6)
    assert times[3] == bars.time[3].astype("datetime64[s]").astype(int)
    assert len(data["entry"]) == len(result.trades) > 10
    for name, values in {
        "entry": [bars.index[row] for row in data["entry"]],
        "symbol": [data["symbols"][number] for number in data["symbol"]],
        "reason": [data["reasons"][number] for number in data["reason"]],
        "bars": data["bars"],
    }.items():
        assert values == result.trades[name].tolist(), name
    left = result.trades["exit"].fillna(bars.index[-1])
    assert [bars.index[row] for row in data["exit"]] == left.tolist()
    assert data["open"] == (result.trades["reason"] == "open").tolist() and any(data["open"])
    np.testing.assert_allclose(data["equity"]["equity"], result.equity, rtol=1e-4)
    held = data["equity"]["equity of buy and hold"]
    np.testing.assert_allclose(held, result.hold.equity, rtol=1e-4)
    assert data["side"] == np.sign(result.trades["size"]).tolist()
    for name in ("entry_price", "exit_price", "pnl", "return"):
        np.testing.assert_allclose(data[name], result.trades[name].astype(float), rtol=1e-4)
    json.dumps(data, allow_nan=False)


def test_indicators_of_a_rule_are_its_own_means_and_those_given_take_their_place(result):
    bars = result.bars
    crossed = nca.backtest(bars, nca.rules.sma_cross(3, 8), start=str(bars.index[50]))
    (one, two) = chart.price_chart(crossed)["assets"]
    means = pd.DataFrame(bars.close).rolling(8).mean()  # a second way
    np.testing.assert_allclose(two["indicators"]["slow SMA 8"], means[1][50:], rtol=1e-5)
    assert [*one["indicators"]] == ["fast SMA 3", "slow SMA 8"]
    given = {"level": np.arange(300.0)}
    found = chart.price_chart(crossed, given)["assets"][1]["indicators"]
    assert [*found] == ["level"] and found["level"][0] == 50.0
    with pytest.raises(ConfigError, match=r"indicator 'level' has shape \(299,\); give a value"):
        chart.price_chart(crossed, {"level": np.arange(299.0)})


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("rule", "name", "by_hand"),
    [
        (nca.rules.momentum(5), "close 5 bars before", lambda close, high, low: close.shift(5)),
        (
            nca.rules.breakout(7, 4),
            "high of 7",
            lambda close, high, low: high.rolling(7).max().shift(1),
        ),
        (
            nca.rules.breakout(7, 4),
            "low of 4",
            lambda close, high, low: low.rolling(4).min().shift(1),
        ),
        (
            nca.rules.mean_reversion(6, entry=2.0),
            "long below",
            lambda close, high, low: close.rolling(6).mean() - 2.0 * close.rolling(6).std(ddof=1),
        ),
    ],
)
def test_indicators_of_the_other_rules_are_those_by_hand(result, rule, name, by_hand):
    bars = result.bars
    wanted = by_hand(*(pd.DataFrame(x) for x in (bars.close, bars.high, bars.low)))
    np.testing.assert_allclose(rule.indicators(bars)[name], wanted, rtol=1e-9)


def test_drawdowns_are_those_that_a_walk_over_the_curve_finds():
    time = pd.date_range("2020-01-01", periods=500, tz="UTC")
    for seed in range(5):
        steps = np.random.default_rng(seed).normal(0, 0.01, 500)
        equity = pd.Series(np.exp(np.cumsum(steps)), time)
        found, high, begun = [], 1.0, None
        for row, value in enumerate(equity):
            if value >= high:
                if begun is not None:
                    found.append((*begun, time[row], row - begun[3]))
                high, begun = value, None
            elif begun is None:
                peak = max(row - 1, 0)
                begun = (value / high - 1, time[peak], time[row], peak)
            elif value / high - 1 < begun[0]:
                begun = (value / high - 1, begun[1], time[row], begun[3])
        if begun is not None:
            found.append((*begun, pd.NaT, 499 - begun[3]))
        deepest = sorted(found, key=lambda x: x[0])[: tables.DRAWDOWNS]
        table = tables.drawdown_periods(equity)
        assert len(table) == len(deepest) and table["depth"][0] == pytest.approx(deepest[0][0])
        for row, (_, peak, bottom, _, recovery, bars) in zip(
            table.itertuples(), deepest, strict=True
        ):
            assert (row.peak, row.bottom, row.bars) == (peak, bottom, bars)
            assert row.recovery is recovery or row.recovery == recovery
    assert tables.drawdown_periods(pd.Series([1.0, 1.1], time[:2])).empty


def test_profits_by_asset_are_sums_of_trades(result):
    rows = tables.by_asset(result)
    assert [row[0] for row in rows] == [HOSTILE, "B"]
    for name, (number, won, profit), shares in rows:
        own = result.trades[result.trades["symbol"] == name]
        assert number == str(len(own)) and profit == f"{own['pnl'].sum():.2%}"
        ended = own[own["reason"] != "open"]
        assert won == f"{(ended['pnl'] > 0).sum() / len(ended):.1%}"
        assert sum(shares.values()) == pytest.approx(1.0)


def test_folds_are_marked_where_they_begin():
    time = pd.date_range("2020-01-01", periods=400, tz="UTC")
    folds = pd.DataFrame({"test_start": time[[0, 200]], "sharpe": 1.0})
    starts = page.fold_starts(folds)
    assert starts == {"0": time[0], "1": time[200]}
    line = figures.Curve("a", pd.Series(np.linspace(1, 2, 400), time), "agent")
    drawn = plots.equity_plot([line], starts=starts)
    wide, narrow = drawn.split('<div class="narrow">')
    assert wide.count(">fold 0<") == wide.count(">fold 1<") == narrow.count(">0</text>") == 1
    assert page.fold_starts(None) == page.fold_starts(folds[["sharpe"]]) == {}


def test_a_long_history_is_joined_into_candles(result, monkeypatch):
    monkeypatch.setattr(chart, "CANDLES", 150)
    monkeypatch.setattr(chart, "TRADES", 3)
    seen = dataclasses.replace(result, in_sample=41)
    data = chart.price_chart(seen)
    bars, one = result.traded_bars, data["assets"][0]
    assert data["per_candle"] == 4 and len(one["close"]) == 75 and data["seen"] == 11
    assert one["open"][1] == pytest.approx(bars.open[4, 0], rel=1e-6)
    assert one["high"][1] == pytest.approx(bars.high[4:8, 0].max(), rel=1e-6)
    assert one["low"][1] == pytest.approx(bars.low[4:8, 0].min(), rel=1e-6)
    assert one["close"][-1] == pytest.approx(bars.close[-1, 0], rel=1e-6)
    assert len(data["entry"]) == 3 and data["trades_left_out"] == len(result.trades) - 3 > 10
    assert bars.index[data["entry"][-1]] == result.trades["entry"].iloc[-1]


def test_months_and_years_compound_to_the_whole():
    time = pd.date_range("2019-11-05", "2021-02-20", tz="UTC", freq="D")
    equity = pd.Series(np.cumprod(1 + np.random.default_rng(0).normal(0, 0.01, len(time))), time)
    years = tables.monthly_returns(equity)
    assert [*years.index] == [2019, 2020, 2021]
    total, months = years.pop("Year"), years.stack().dropna()
    assert len(months) == 2 + 12 + 2
    assert np.prod(months + 1) == pytest.approx(equity.iloc[-1])
    assert np.prod(total + 1) == pytest.approx(equity.iloc[-1])


def test_a_rolling_ratio_is_that_of_each_window():
    r = np.random.default_rng(1).normal(1e-3, 0.01, 80)
    r[30:60] = 0.0
    found = plots.rolling(r, 20, 252.0)
    ratio, volatility = found["sharpe"].to_numpy(), found["volatility"].to_numpy()
    for t in range(80):
        window = r[t - 19 : t + 1]
        if t >= 19:
            moved = window.std(ddof=1) * np.sqrt(252)
            assert volatility[t] == pytest.approx(moved, abs=1e-9)
        if t < 19 or window.std() == 0:
            assert np.isnan(ratio[t])
        else:
            assert ratio[t] == pytest.approx(window.mean() / window.std(ddof=1) * np.sqrt(252))


def test_a_long_line_keeps_its_extremes():
    values = pd.Series(np.random.default_rng(2).normal(0, 1, 50_000))
    values.iloc[31_234], values.iloc[777] = 99.0, -99.0
    kept = figures.thinned(values)
    assert len(kept) <= figures.POINTS and kept.index.is_monotonic_increasing
    assert (kept.max(), kept.min()) == (99.0, -99.0)
    assert kept.index[0] == 0 and kept.index[-1] == 49_999


def test_plots_over_time_name_what_is_in_sample(result):
    seen = result.equity.index[0], result.equity.index[99]
    drawn = plots.equity_plot([figures.Curve("a", result.equity, "agent")], "IN SAMPLE", seen)
    assert drawn.count(">in sample<") == 2 and f"Bars up to {seen[1].date()} are in sample" in drawn
    assert "in sample" not in plots.equity_plot([figures.Curve("a", result.equity, "agent")])
    assert "in sample" in plots.exposure_plot(result.exposure, seen)
    assert "in sample" in plots.rolling_plot({"a": result}, 252.0, seen)


@pytest.fixture
def table():
    fast, slow = (x.ravel() for x in np.meshgrid([5, 10, 15], [20, 40]))
    values = {"fast": fast, "slow": slow, "sharpe": [0.1, 0.4, 0.2, np.nan, 0.9, 0.3]}
    found = pd.DataFrame(values | {"total_return": 0.123, "trades": 7})
    found.attrs["verdict"] = f"Luck is not ruled out {HOSTILE}."
    return found


def test_the_page_of_a_sweep_has_its_verdict_its_map_and_its_best_rows(table, tmp_path):
    page = nca.report_sweep(table, tmp_path / "s.html", command="nca-trader sweep --grid 'a b'")
    text = page.read_text(encoding="utf-8")
    assert html.escape(HOSTILE) in text.replace("&#34;", "&quot;").replace("&#39;", "&#x27;")
    assert "<script" not in text and "script-src &#39;none&#39;" in text
    assert "Best 0.9 at fast = 10, slow = 40" in text and "sharpe by fast and slow" in text
    first = re.search(r"<tbody>.*?</tr>", text, re.DOTALL)[0]
    assert [c for c in re.findall(r"<td>(.*?)</td>", first)] == ["10", "40", "0.9", "12.3%", "7"]
    assert tables.parameters_of(table) == ["fast", "slow"]


def test_the_map_of_a_sweep_has_ticks_at_values_that_were_tried():
    fast, slow = (x.ravel() for x in np.meshgrid([5, 10, 15], range(20, 45)))
    figure = Figure()
    tables._map(pd.DataFrame({"fast": fast, "slow": slow, "sharpe": fast / slow}),
                "fast", "slow", "sharpe")(figure)  # fmt: skip
    axes = figure.axes[0]
    assert axes.get_xticks().tolist() == [5, 10, 15]
    assert axes.get_yticks().tolist() == list(range(20, 45, 3))


def test_the_page_of_a_walk_forward_has_a_row_per_fold(tmp_path):
    time = pd.to_datetime(["2020-01-01", "2021-01-01"], utc=True)
    values = {"test_start": time, "chosen": [{"fast": 5}, {"fast": HOSTILE}]}
    folds = pd.DataFrame(values | {"sharpe": [0.5, np.nan], "test_sha256": "ab" * 32})
    text = nca.report_folds(folds, tmp_path / "f.html", verdict="Not distinguishable.").read_text()
    cells = re.findall(r"<td>(.*?)</td>", text)
    assert cells[:4] == ["2020-01-01", "fast = 5", "0.5", "abababababab"] and cells[6] == "n/a"
    assert "Not distinguishable." in text and "<script" not in text


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda t, p: nca.report_sweep(t, p / "s.pdf"), r"\.html"),
        (lambda t, p: nca.report_sweep(t[["sharpe"]], p / "s.html"), "has parameters"),
        (lambda t, p: nca.report_sweep(t, p / "s.html", metric="nope"), "'nope'"),
        (lambda t, p: nca.report_sweep([1], p / "s.html"), "DataFrame"),
        (lambda t, p: nca.report_folds("x", p / "s.html"), "DataFrame"),
    ],
)
def test_what_is_not_a_sweep_or_a_page_is_refused(table, tmp_path, call, words):
    with pytest.raises(ConfigError, match=words):
        call(table, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_sweep_of_one_parameter_of_names_or_without_a_ratio_still_makes_a_page(
    table, tmp_path, monkeypatch
):
    monkeypatch.setattr(plots, "svg", lambda *_: Markup("<svg></svg>"))
    one = table[table["slow"] == 20].assign(slow=20)
    assert "Sharpe by fast" in nca.report_sweep(one, tmp_path / "1.html").read_text()
    named = table.assign(fast="a", slow="b")
    assert "<svg" not in nca.report_sweep(named, tmp_path / "2.html").read_text()
    never = table.assign(sharpe=np.nan)
    assert "<svg" not in nca.report_sweep(never, tmp_path / "3.html").read_text()


@pytest.mark.parametrize("verdict", ["", "Out of sample over 1 fold, it is no better than hold."])
@pytest.mark.few(1)
def test_the_page_of_a_result_takes_a_sweep_and_folds_whose_verdict_is_the_pages(
    result, table, tmp_path, monkeypatch, verdict
):
    monkeypatch.setattr(plots, "svg", lambda *_: Markup("<svg></svg>"))
    folds = pd.DataFrame({"sharpe": [0.5]})
    if verdict:
        folds.attrs["verdict"] = verdict
    page = nca.report(result.bars, result, tmp_path / "x.html", sweep=table, folds=folds)
    text = page.read_text(encoding="utf-8")
    assert "<h2>Sweep</h2>" in text and "<h2>Walk-forward</h2>" in text
    if verdict:
        assert text.count(verdict) == 1 and "the difference in mean return is" not in text
        assert text.index(verdict) < text.index("<h2>Walk-forward</h2>")
        return
    assert f"one of {len(table)} trials" in text and "how many were tried is not known" not in text


@pytest.mark.few(3)
@pytest.mark.parametrize("days", [7, 40, 400, 800, 1000, 1090, 1300, 9000])
def test_every_span_of_dates_has_ticks(days):
    """matplotlib warns, which fails a test, where no interval of dates fits the ticks."""
    index = pd.date_range("2017-01-02", periods=200, freq=f"{days * 24 * 60 // 200}min", tz="UTC")
    values = pd.Series(np.linspace(1.0, 1.1, 200), index)
    found = plots.equity_plot([figures.Curve("agent", values, "agent")])
    assert found.count("<svg") == 2


def test_a_section_is_printed_with_the_names_of_its_columns():
    rows = [("seed 0", ["0.84", "-0.04"]), ("mean of all", ["1", "2"])]
    section = Section(
        "Seeds", "One.", caption="Ratios", headers=["Seed", "Training", "Test"], rows=rows
    )
    assert str(section).splitlines() == [
        "Seeds",
        "One.",
        "Ratios",
        "  Seed         Training  Test",
        "  seed 0       0.84      -0.04",
        "  mean of all  1         2",
    ]
    assert str(Section("Seeds", facts=[("a", "b")])) == "Seeds\n  a: b"
