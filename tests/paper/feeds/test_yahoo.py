"""Yahoo's history: splits and dividends once, its days and hours, and what it refuses."""

import datetime
import logging
import time

import numpy as np
import pytest
from fake_yahoo import FakeYahoo, Listing, days_from

import nca_trader as nca
from nca_trader.cli import main
from nca_trader.errors import BarError, ConfigError
from nca_trader.paper.feeds import fetch, yahoo
from nca_trader.paper.venue import Unreachable

DAYS = days_from("2020-08-17", 20)  # Apple's split was on 2020-08-31
SPLIT, EARLY, LATE = DAYS[10], DAYS[4], DAYS[15]
rng = np.random.default_rng(3)


@pytest.fixture(scope="module")
def traded():
    """A share as it traded: 4 for 1 on a day, and a dividend before and one after it."""
    close = 400.0 * np.exp(0.01 * rng.standard_normal(len(DAYS)).cumsum())
    close[10:] /= 4.0
    close[4:10] -= 3.28
    bars = {
        day: (c * 0.99, c * 1.02, c * 0.97, c, 1000.0) for day, c in zip(DAYS, close, strict=True)
    }
    return Listing(bars, splits={SPLIT: 4.0}, dividends={EARLY: 3.28, LATE: 0.82})


def test_total_return_is_that_of_shares_in_a_drawer(monkeypatch, tmp_path, traded):
    """The ledger counts shares as they traded: four for one, and cash on each ex-date."""
    FakeYahoo(monkeypatch, tmp_path, AAPL=traded)
    bars = nca.fetch_bars("yahoo:AAPL", start="2020-08-01", stop="2020-12-01")
    assert [str(t)[:10] for t in bars.time] == [*map(str, DAYS)]
    shares = 1.0 / traded.bars[DAYS[1]][0]  # decided at the first close, bought at the open
    cash, worth = 0.0, []
    for day in DAYS[1:]:
        shares *= traded.splits.get(day, 1.0)
        # Bought on DAYS[1], so that both dividends are received.
        cash += shares * traded.dividends.get(day, 0.0)
        worth.append(shares * traded.bars[day][3] + cash)
    free = nca.Costs(commission=0.0, slippage=0.0)
    result = nca.backtest(bars, nca.rules.buy_and_hold(), costs=free)
    np.testing.assert_allclose(result.equity[-len(worth) :], worth, rtol=1e-6)
    # Adjusted for dividends as well, its price would give the same return without the cash.
    adjusted = traded.chart("AAPL", {"interval": "1d"}, DAYS[-1])["chart"]["result"][0]
    (adjusted,) = adjusted["indicators"]["adjclose"]
    reinvested = adjusted["adjclose"][-1] / adjusted["adjclose"][1]
    ours = worth[-1] / worth[0]
    assert ours == pytest.approx(reinvested, abs=0.001)
    assert abs(bars.close[-1, 0] / bars.close[1, 0] - reinvested) > 0.01


def test_a_split_to_come_rewrites_the_past_which_is_said(monkeypatch, tmp_path, traded, caplog):
    fake = FakeYahoo(monkeypatch, tmp_path, AAPL=traded)
    fake.known = DAYS[8]
    before = nca.fetch_bars("yahoo:AAPL", "2020-08-01", str(DAYS[8]))
    assert before.close[0, 0] == pytest.approx(traded.bars[DAYS[0]][3])
    fake.known = DAYS[-1]
    with caplog.at_level(logging.WARNING):
        after = nca.fetch_bars("yahoo:AAPL", "2020-08-01", "2020-12-01")
    (record,) = caplog.records
    assert "AAPL: the past was rewritten" in record.message and "\n" not in record.message
    np.testing.assert_allclose(after.close[:8], before.close / 4.0, rtol=1e-9)
    np.testing.assert_allclose(after.volume[:8], before.volume * 4.0)
    assert after.dividend[4, 0] == pytest.approx(0.82)
    fresh = nca.fetch_bars("yahoo:AAPL", "2020-08-01", "2020-12-01", cache=tmp_path / "b")
    assert fresh.digest() == after.digest()
    # A later dividend changes no price that is not adjusted for it.
    caplog.clear()
    fake.known = LATE - datetime.timedelta(days=1)
    nca.fetch_bars("yahoo:AAPL", "2020-08-01", str(fake.known), cache=tmp_path / "c")
    fake.known = DAYS[-1]
    nca.fetch_bars("yahoo:AAPL", "2020-08-01", "2020-12-01", cache=tmp_path / "c")
    assert not caplog.records


def test_days_have_the_dates_of_their_exchanges_and_holidays_are_missing_bars(
    monkeypatch, tmp_path
):
    def listing(days, **place):
        return Listing({day: (9.0, 11.0, 8.0, 10.0, 1.0) for day in days}, **place)

    tokyo = {"zone": "Asia/Tokyo", "opens": datetime.time(9)}
    open_days = [*DAYS[:2], *DAYS[3:5]]
    listings = {"SPY": listing(DAYS[:5]), "N225": listing(open_days, **tokyo)}
    FakeYahoo(monkeypatch, tmp_path, **listings, NEW=listing(DAYS[3:5]))
    bars = nca.fetch_bars("yahoo:SPY,N225,NEW", "2020-08-01", "2020-09-30")
    assert [str(t) for t in bars.time] == [f"{day}T00:00:00.000000000" for day in DAYS[:5]]
    assert bars.present.tolist() == [[True, i != 2, i > 2] for i in range(5)]
    assert bars.dividend is None and np.isnan(bars.close[0, 2])


def test_hours_are_utc_over_a_change_of_the_clock(monkeypatch, tmp_path):
    # New York's clock changed on Sunday 2026-11-01.
    hours = [
        datetime.datetime.combine(day, datetime.time(9, 30)) + datetime.timedelta(hours=h)
        for day in days_from("2026-10-30", 2) for h in range(7)
    ]  # fmt: skip
    bars = {h: (9.0, 11.0, 8.0, 10.0 + 0.01 * i, 1.0) for i, h in enumerate(hours)}
    ex = hours[7].date()
    fake = FakeYahoo(monkeypatch, tmp_path, SPY=Listing(bars, dividends={ex: 0.5}))
    monkeypatch.setattr(time, "time", lambda: 1_793_800_000.0)  # 2026-11-04
    got = nca.fetch_bars("yahoo:SPY", "2026-10-20", "2026-11-04", "1h")
    opens = [str(t)[11:16] for t in got.time]
    assert opens == [f"{h}:30" for h in range(13, 20)] + [f"{h}:30" for h in range(14, 21)]
    assert got.dividend[7, 0] == 0.5 and got.dividend.sum() == 0.5
    asked = [call[1] for call in fake.calls]
    assert min(asked) == 1_792_454_400  # 2026-10-20, midnight UTC
    with pytest.raises(ConfigError, match="Yahoo has bars of 1h for the last 730 days; give a"):
        nca.fetch_bars("yahoo:SPY", "2020-01-01", every="1h")
    with pytest.raises(ConfigError, match="Yahoo has bars of 5m for the last 60 days"):
        nca.fetch_bars("yahoo:SPY", "2026-01-01", every="5min")
    with pytest.raises(ConfigError, match=r"bars of 4h: Yahoo has 1m, .*use resample"):
        nca.fetch_bars("yahoo:SPY", "2026-10-20", every="4h")


def test_what_is_no_symbol_or_does_not_answer_is_one_line(monkeypatch, tmp_path, traded, capsys):
    fake = FakeYahoo(monkeypatch, tmp_path, AAPL=traded)
    words = ["data", "fetch", "yahoo", "AAPL,NOPE", "--from", "2020-08-01", "--to", "2020-12-01",
             "--bar", "1d", "--out", str(tmp_path / "x.csv")]  # fmt: skip
    assert main(words) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "yahoo: no bar of NOPE in that span: unknown, delisted or not listed yet" in said
    assert main([w.removesuffix(",NOPE") for w in words]) == 0
    assert "income   2 dividends in cash" in capsys.readouterr().out
    monkeypatch.setattr(fetch, "pause_after", lambda failures, jitter: 0.0)
    fake.broken = OSError("no route")
    assert len(nca.fetch_bars("yahoo:AAPL", "2020-08-01", "2020-12-01")) == len(DAYS)
    with pytest.raises(Unreachable, match="no-answer: yahoo: AAPL: OSError; the same command"):
        nca.fetch_bars("yahoo:AAPL", "2020-07-01", "2020-12-01")
    fake.broken = yahoo.YFRateLimitError()
    with pytest.raises(Unreachable, match="rate-limit"):
        nca.fetch_bars("yahoo:MSFT", "2020-08-01", "2020-12-01")
    assert not (tmp_path / "cache/nca_trader/bars/yahoo/MSFT-1d.jsonl").exists()


def test_a_fault_of_the_venue_is_refused_as_a_files_is(monkeypatch, tmp_path, traded):
    bars = {**traded.bars, DAYS[3]: (10.0, 5.0, 20.0, 15.0, 1.0)}
    FakeYahoo(monkeypatch, tmp_path, BAD=Listing(bars, splits={SPLIT: 4.0}))
    with pytest.raises(BarError, match="yahoo:BAD: D0") as caught:
        nca.fetch_bars("yahoo:BAD", "2020-08-01", "2020-12-01")
    assert 'repair="' in str(caught.value)
