"""Columns under names that nobody knows: read, asked about, or named as not used.

Files are drawn, and the judge is pandas on the drawn frame.
"""

import re

import numpy as np
import pandas as pd
import pytest
from refused import refusal

import nca_trader as nca
from nca_trader.data.bars import read_bars

NAMES = ["code", "Sec Id", "paper", "gvkey", "Wertpapier", "series"]
KINDS = {
    "text": ["SAP", "ALV", "BAS"],
    "numbers": [1690, 6066, 12141],
    "small numbers": [1, 2, 3],
    "zeros": ["000001", "600001", "300750"],
    "categories": ["a", "b", "c"],
}


def walk(rng, days, level, start="2022-01-03", volatility=0.01):
    """Daily bars whose opens move from the closes before."""
    close = level * np.exp(np.cumsum(rng.normal(0, volatility, days)))
    opens = np.append(level, close[:-1]) * np.exp(rng.normal(0, volatility / 4, days))
    time = pd.bdate_range(start, periods=days)
    prices = {"open": opens, "high": np.maximum(opens, close), "low": np.minimum(opens, close)}
    return pd.DataFrame({"time": time, **prices, "close": close, "volume": 1000.0})


def asked(said, name):
    """The answers that a message prints, as the `columns` of a call."""
    assert name in said, said
    return [text.replace("\\", "") for text in re.findall(r'columns="([^"]*)"', said)]


LAYOUTS = ("one after the other", "anew", "side by side", "listed later")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.few(8)
def test_a_column_that_names_the_assets_is_asked_about(kind, layout, tmp_path):
    rng = np.random.default_rng([LAYOUTS.index(layout), [*KINDS].index(kind)])
    for count in (2, 3):
        name = NAMES[int(rng.integers(len(NAMES)))]
        starts = {"one after the other": ["2020-01-06", "2020-06-01", "2021-01-04"]}
        starts |= {"listed later": ["2020-01-06", "2020-03-02", "2020-04-01"]}
        begin = starts.get(layout, ["2020-01-06"] * 3)
        levels = rng.permutation([50.0, 61.0, 3000.0])
        parts = [walk(rng, 60, levels[i], begin[i]) for i in range(count)]
        parts = [part.assign(**{name: KINDS[kind][i]}) for i, part in enumerate(parts)]
        frame = pd.concat(parts)
        if layout in ("side by side", "listed later"):
            frame = frame.sort_values("time", kind="stable")
        frame.to_csv(tmp_path / "bars.csv", index=False)
        said = refusal(read_bars, tmp_path / "bars.csv")
        assert "keep-first" not in said and "--repair sort" not in said
        yes, no = asked(said, name)
        assert (yes, no) == (f"symbol={name}", "symbol=-")
        bars = read_bars(tmp_path / "bars.csv", columns=yes)
        assert set(bars.symbols) == {str(value) for value in KINDS[kind][:count]}
        for part in parts:
            own = bars.select(str(part[name].iloc[0]))
            close = own.close[own.present[:, 0], 0]
            np.testing.assert_array_equal(close, part["close"])
        again = (
            refusal(read_bars, tmp_path / "bars.csv", columns=no) if layout != LAYOUTS[0] else ""
        )
        assert name not in again


@pytest.mark.parametrize(
    ("move", "jump", "asked"),
    [(0.01, 0.06, True), (0.01, 0.04, False), (1e-4, 0.011, True), (1e-4, 0.009, False)],
)
def test_a_number_may_name_assets_where_the_price_jumps_with_it(move, jump, asked):
    t = np.arange(60)
    close = 100.0 * np.exp(np.cumsum(np.where(t == 30, jump, move * (-1.0) ** t)))
    frame = walk(np.random.default_rng(0), 60, 100.0).assign(code=np.where(t < 30, 1690, 6066))
    frame = frame.assign(**dict.fromkeys(("open", "high", "low", "close"), close))
    assert ("D037" in refusal(read_bars, frame)) if asked else "code" in read_bars(frame).note


@pytest.mark.parametrize(
    ("codes", "again", "asked"),
    [("b" * 38, 4, True), ("b" * 38, 5, False), ("bb", 0, True), ("bc", 0, False)],
)
def test_a_name_of_assets_is_told_from_rows_that_are_there_twice(codes, again, asked):
    first, second = (walk(np.random.default_rng(i), 38, 100.0).assign(code="a") for i in (0, 1))
    rows = pd.concat([first, second[: len(codes)].assign(code=list(codes))])
    frame = pd.concat([rows, rows[:again]]).sort_values("time", kind="stable")
    assert ("D037" in refusal(read_bars, frame)) == asked


DAYS = 500


def others(rng):
    """Columns of one asset that are no symbol, no price and no payment."""
    time = pd.bdate_range("2019-06-03", periods=DAYS)
    t = np.arange(DAYS)
    return {
        "session": rng.choice(["pre", "regular"], DAYS),
        "currency": "EUR",
        "news": rng.poisson(0.05, DAYS),
        "signal": rng.integers(0, 2, DAYS),
        "late_signal": (t > 300).astype(int),
        "side": rng.integers(-1, 2, DAYS),
        "year": time.year,
        "month": time.month_name(),
        "quarter": [f"{x.year}Q{x.quarter}" for x in time],
        "weekday": time.day_name(),
        "bull": t > 200,
        "day": time.floor("D"),
        "half": [f"{x.year} H{1 + (x.month > 6)}" for x in time],
        "iso": time.isocalendar().week.to_numpy(),
        "row": t,
        "shares_outstanding": 1_000_000 + 5_000 * (t // 63),
        "comment": np.where(t == 250, "halted", ""),
        "rate": 0.01 + 0.0025 * (t // 120),
        "trades": rng.integers(100, 10_000, DAYS),
        "vwap": 100 + rng.normal(0, 1, DAYS),
        "rating": np.where(t < 200, 3.5, 4.0),
    }


@pytest.mark.parametrize("name", others(np.random.default_rng(0)))
@pytest.mark.few(11)
def test_what_is_none_of_these_reads_as_before_and_is_named(name, tmp_path):
    rng = np.random.default_rng(0)
    frame = walk(rng, DAYS, 100.0, "2019-06-03")
    frame.assign(**{name: others(rng)[name]}).to_csv(tmp_path / "bars.csv", index=False)
    bars = read_bars(tmp_path / "bars.csv")
    assert bars.note == f"Columns that are not used: {name}."
    np.testing.assert_array_equal(bars.close[:, 0], frame["close"])


def paying(rng, days=250, events=6, split=None, adjusted=False):
    """Bars whose price falls by what they pay; the adjusted close, the payments and the ratios."""
    frame = walk(rng, days, 100.0)
    paid, ratio = np.zeros(days), np.ones(days)
    at = np.sort(rng.choice(np.arange(20, days - 20), events, replace=False))
    factor = np.ones(days)
    if split is None:
        share = rng.uniform(0.01, 0.04, events)
        for row, part in zip(at, share, strict=True):
            paid[row] = part * frame["close"][row - 1] * factor[row - 1]
            factor[row:] *= 1.0 - part
    else:
        ratio[at[0]] = split
        factor[at[0] :] /= split
    raw = frame.copy()
    for field in ("open", "high", "low", "close"):
        raw[field] *= factor
    return (frame if adjusted else raw), frame["close"] * factor[-1], paid, ratio


@pytest.mark.parametrize(
    "name",
    ["closeadj", "Adj. Close", "Adj Close", "adj-close", "ADJCLOSE", "CloseAdj.", "Total Return"],
)
@pytest.mark.few(3)
def test_an_adjusted_close_is_asked_about_under_any_name(name, tmp_path):
    for seed in range(2):
        frame, close, _, _ = paying(np.random.default_rng(seed))
        frame.assign(**{name: close.round(4)}).to_csv(tmp_path / "bars.csv", index=False)
        said = refusal(read_bars, tmp_path / "bars.csv")
        assert "D027" in said
        (answer,) = asked(said, name)
        bars = read_bars(tmp_path / "bars.csv", columns=answer)
        earned = np.log(bars.close[-1, 0] / bars.close[0, 0])
        assert earned == pytest.approx(np.log(close.iloc[-1] / close.iloc[0]), abs=1e-4)
        # The other answer takes the prices as they stand.
        bars = read_bars(tmp_path / "bars.csv", repair="unadjusted")
        np.testing.assert_array_equal(bars.close[:, 0], frame["close"])


def test_of_several_columns_that_adjust_one_remedy_applies_each_thing_once(tmp_path):
    frame, close, paid, _ = paying(np.random.default_rng(1))
    several = {"Ex-Dividend": paid, "Adj. Open": close, "Adj. Close": close, "total": close}
    frame.assign(**several).to_csv(tmp_path / "bars.csv", index=False)
    said = refusal(read_bars, tmp_path / "bars.csv")
    (answer,) = asked(said, "Adj. Close")
    assert answer == "dividend=Adj. Close/close,cash_dividend=-"
    bars = read_bars(tmp_path / "bars.csv", columns=answer)
    earned = bars.close[-1, 0] / bars.close[0, 0]
    assert earned == pytest.approx(close.iloc[-1] / close.iloc[0])


@pytest.mark.parametrize("name", ["Ex-Dividend", "payout", "Div Cash", "Ausschuettung"])
@pytest.mark.few(2)
def test_a_payment_is_received_or_asked_about(name, tmp_path):
    for seed in range(2):
        frame, _, paid, _ = paying(np.random.default_rng(seed))
        frame.assign(**{name: paid}).to_csv(tmp_path / "bars.csv", index=False)
        try:
            bars = read_bars(tmp_path / "bars.csv")
        except nca.BarError as error:
            (answer,) = asked(str(error), name)
            bars = read_bars(tmp_path / "bars.csv", columns=answer)
        np.testing.assert_allclose(bars.dividend[:, 0], paid)
        # A share that is held is worth its price and what it paid.
        held = nca.backtest(bars, nca.rules.buy_and_hold(), fill="close").equity.iloc[-1]
        assert held == pytest.approx((bars.close[-1, 0] + paid.sum()) / bars.close[0, 0])
        # Prices that are adjusted do not fall, and nobody is asked.
        whole, _, paid, _ = paying(np.random.default_rng(seed), adjusted=True)
        whole.assign(payout=paid).to_csv(tmp_path / "bars.csv", index=False)
        assert "payout" in read_bars(tmp_path / "bars.csv").note


@pytest.mark.parametrize("name", ["split_ratio", "Split Ratio", "Stock Dividend", "bonus"])
@pytest.mark.parametrize("split", [1.05, 1.5, 2.0, 7.0, 0.1])
@pytest.mark.few(7)
def test_a_ratio_of_shares_is_asked_about(name, split, tmp_path):
    frame, close, _, ratio = paying(np.random.default_rng(3), split=split)
    rests = {"ones": ratio, "zeros": np.where(ratio == 1.0, 0.0, ratio), "upside down": 1 / ratio}
    for column in (*rests.values(), np.cumprod(ratio)):
        frame.assign(**{name: column}).to_csv(tmp_path / "bars.csv", index=False)
        said = refusal(read_bars, tmp_path / "bars.csv")
        answer = next(text for text in asked(said, name) if name in text)
        bars = read_bars(tmp_path / "bars.csv", columns=answer)
        earned = bars.close[-1, 0] / bars.close[0, 0]
        assert earned == pytest.approx(close.iloc[-1] / close.iloc[0])


def test_a_close_before_adjustments_next_to_an_adjusted_one_is_only_named(tmp_path):
    frame, *_ = paying(np.random.default_rng(0), adjusted=True, split=4.0)
    raw, *_ = paying(np.random.default_rng(0), split=4.0)
    frame.assign(closeunadj=raw["close"]).to_csv(tmp_path / "bars.csv", index=False)
    assert read_bars(tmp_path / "bars.csv").note == "Columns that are not used: closeunadj."


@pytest.mark.parametrize("words", [("1", "0"), ("True", "False"), ("true", "false"), (True, False)])
@pytest.mark.parametrize("assets", [1, 3])
@pytest.mark.few(4)
def test_the_candle_that_is_not_over_is_left_out(words, assets, tmp_path):
    yes, no = words
    parts = [walk(np.random.default_rng(i), 30, 100.0) for i in range(assets)]
    parts = [
        part.assign(symbol=f"S{i}", final=[yes] * 29 + [no if i != 1 else yes])
        for i, part in enumerate(parts)
    ]
    frame = pd.concat(parts).sort_values("time", kind="stable")
    frame.to_csv(tmp_path / "bars.csv", index=False)
    for source in (tmp_path / "bars.csv", frame):
        bars = read_bars(source)
        assert bars.present.sum() == 30 * assets - (assets - (assets > 1))
        assert "not over by the column final" in bars.note and "not used" not in bars.note
    # Over everywhere, or not over somewhere else: a signal.
    for column in ([yes] * 30, [yes] * 10 + [no] + [yes] * 19):
        parts[0].assign(final=column).to_csv(tmp_path / "bars.csv", index=False)
        assert read_bars(tmp_path / "bars.csv").present.sum() == 30


ABOVE = {
    "padded": "Interval,,,,,\nDaily,,,,,\n,,,,,\n",
    "bare": "Prices of a terminal\nInterval: daily\n\n",
    "with values": "Report,7,2024-01-02,a,b,c\nfrom,2024-01-02,to,2024-01-05,x,\n",
}


@pytest.mark.parametrize("above", ABOVE)
@pytest.mark.parametrize("names", ["Exchange Date", "Date", "Datum"])
@pytest.mark.few(4)
def test_lines_above_the_header(above, names, tmp_path):
    rows = "02-Jan-2023,10,11,9,10,5\n03-Jan-2023,10,11,9,10.5,5\n"
    header = f"{names},Open,High,Low,Close,Volume\n"
    (tmp_path / "bars.csv").write_text(ABOVE[above] + header + rows)
    line = ABOVE[above].count("\n") + 1
    for options in ({"columns": f"time={names}"}, {"columns": f"time={names}", "header": line}):
        assert read_bars(tmp_path / "bars.csv", **options).close[:, 0].tolist() == [10.0, 10.5]
    with pytest.raises(nca.BarError, match="header=99"):
        read_bars(tmp_path / "bars.csv", header=99)


def test_the_line_of_a_header_is_refused_where_there_is_none(tmp_path):
    frame = walk(np.random.default_rng(0), 5, 10.0)
    frame.to_parquet(tmp_path / "bars.parquet")
    for source in (frame, tmp_path / "bars.parquet", "sample:sp500"):
        assert "header" in refusal(read_bars, source, header=2)
    for wrong in (0, -1, "4", 1.5):
        with pytest.raises(nca.NcaTraderError, match="header"):
            read_bars(frame, header=wrong)


def test_prices_by_their_other_names(tmp_path):
    text = "{0}Date,Open{1},High{1},Low{1},Close{1},{2}\n2022-01-03,10,11,9,10,2346\n"
    for end, volume in ((" Price", "Volume"), ("_price", "Total Volume"), (" price", "Volume")):
        (tmp_path / "bars.csv").write_text(text.format("", end, volume))
        bars = read_bars(tmp_path / "bars.csv")
        assert bars.symbols == ("bars",) and bars.volume[0, 0] == 2346 and bars.note == ""


def test_of_two_names_the_plain_one_counts():
    frame = walk(np.random.default_rng(0), 5, 10.0)
    second = {"close_price": 1.5, "total_volume": 2.5, "trade_date": "2020-01-01"}
    for columns in (frame.assign(**second), frame.assign(**second)[[*second, *frame]]):
        bars = read_bars(columns)
        np.testing.assert_array_equal(bars.close[:, 0], frame["close"])
        assert (bars.volume == 1000.0).all() and all(name in bars.note for name in second)


def test_a_negative_close_of_crsp_is_read_by_its_remedy(tmp_path):
    frame = walk(np.random.default_rng(0), 40, 20.0)
    frame["close"] = frame["close"].where(np.arange(40) % 7 != 3, -frame["close"])
    named = {"time": "date", "close": "PRC", "open": "OPENPRC", "high": "ASKHI", "low": "BIDLO"}
    frame.rename(columns=named | {"volume": "VOL"}).to_csv(tmp_path / "bars.csv", index=False)
    said = refusal(read_bars, tmp_path / "bars.csv")
    assert "D008" in said and 'repair="absolute"' in said
    bars = read_bars(tmp_path / "bars.csv", repair="absolute")
    np.testing.assert_array_equal(bars.close[:, 0], frame["close"].abs())
    assert bars.note.startswith("6 negative closes were taken as their sizes.")
    # A price that falls below 0, as oil did, is no such mark.
    frame["close"] = np.linspace(20.0, -20.0, 40)
    frame.to_csv(tmp_path / "bars.csv", index=False)
    assert "absolute" not in refusal(read_bars, tmp_path / "bars.csv")


@pytest.mark.parametrize("freq", ["M", "W", "D", "h"])
def test_a_period_begins_at_its_bar_s_open(freq):
    periods = pd.period_range("2020-01-01", periods=5, freq=freq)
    frame = walk(np.random.default_rng(0), 5, 10.0).drop(columns="time")
    for source in (frame.set_axis(periods), frame.assign(date=periods)):
        bars = read_bars(source, timezone="UTC")
        assert (bars.time == periods.start_time.to_numpy()).all()


def test_exchanges_of_one_symbol_are_no_duplicates(tmp_path):
    parts = [walk(np.random.default_rng(i), 30, 100.0 + i) for i in range(2)]
    frame = pd.concat([part.assign(symbol="BTC", exchange=f"X{i}") for i, part in enumerate(parts)])
    frame.to_csv(tmp_path / "bars.csv", index=False)
    said = refusal(read_bars, tmp_path / "bars.csv")
    assert "exchange" in said and "keep-first" not in said and "one column" in said


def test_assets_that_no_column_names_are_not_dropped(tmp_path):
    parts = [walk(np.random.default_rng(i), 30, 100.0 * (1 + i)) for i in range(2)]
    pd.concat(parts).sort_values("time", kind="stable").to_csv(tmp_path / "bars.csv", index=False)
    said = refusal(read_bars, tmp_path / "bars.csv")
    assert "D021" in said and "keep-first" not in said and "names the asset" in said


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("value", [1.5, 2, "a", True, np.nan, 0, -1])
@pytest.mark.few(7)
def test_a_file_of_few_rows_is_read_without_a_warning(rows, value):
    frame = walk(np.random.default_rng(0), rows, 10.0).assign(spare=[value] * rows)
    assert "spare" in read_bars(frame).note
    each = pd.concat([frame.assign(symbol=symbol) for symbol in "AB"])
    assert "spare" in read_bars(each).note


def test_columns_of_a_wide_table_and_of_nested_values_are_named(tmp_path):
    frame = walk(np.random.default_rng(0), 5, 10.0)
    wide = frame[["time"]].assign(A_close=frame["close"], B_close=frame["close"], spare=1.0)
    told = read_bars(wide, repair="close-only,no-volume").note
    assert "Columns that are not used: spare." in told
    frame.assign(book=[[1.0, 2.0]] * 5).to_parquet(tmp_path / "bars.parquet")
    assert read_bars(tmp_path / "bars.parquet").note == "Columns that are not used: book."
    many = frame.assign(**{f"x{i}": 1.5 for i in range(40)})
    assert read_bars(many).note.endswith("x11 and 28 more.")
