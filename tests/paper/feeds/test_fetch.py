"""Downloads of history: a cache that resumes, grows, and never holds bars of two scales."""

import importlib
import json
import logging
import os
import sys

import numpy as np
import pytest
from fake_alpaca import FakeAlpaca
from fake_exchange import FakeExchange

import nca_trader as nca
from nca_trader.cli import main
from nca_trader.errors import BarError, ConfigError
from nca_trader.paper.feeds import fetch as fetching
from nca_trader.paper.feeds.venue_feed import Grid, Row
from nca_trader.paper.venue import Unreachable

DAY = 86_400
START = 1_735_689_600  # 2025-01-01
rng = np.random.default_rng(5)
STEPS = np.exp(0.001 * rng.standard_normal((20_000, 2)).cumsum(axis=0)).tolist()


class Clock:
    def __init__(self, now):
        self.time, self.waits = now, []
        self.sleep = self.waits.append

    def now(self):
        return int(self.time * 1e9)


class Source:
    """A random walk of two symbols; `broken` calls fail first, `crash` ends the process.

    split: from this time on, the venue divides all earlier prices of B by 4.
    """

    symbols, step, delay, settle = ("A", "B"), 60, 1.0, 10.0

    def __init__(self, broken=0, crash=None, split=None):
        self.broken, self.crash, self.split, self.calls = [None] * broken, crash, split, []
        self.opened = 0

    def __call__(self):
        self.opened += 1
        return self

    def fetch(self, start, stop):
        self.calls.append((start, stop, *self.symbols))
        if self.crash is not None and len(self.calls) > self.crash:
            raise KeyboardInterrupt
        if self.broken:
            self.broken.pop()
            raise Unreachable("http-429")
        rows = []
        for symbol in self.symbols:
            i = "AB".index(symbol)
            for t in range(-(-start // 60) * 60, stop - 59, 60):
                p = 100.0 * STEPS[(t - START) // 60][i]
                p /= 4.0 if self.split and symbol == "B" and t < self.split else 1.0
                rows.append(Row(symbol, t, p, p * 1.001, p / 1.001, p * 1.0005, 1.0 + t % 7))
        return rows

    def close(self):
        pass


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch, tmp_path):
    monkeypatch.setattr(fetching, "CHUNK", 1440)  # a day
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


NOW = START + 4 * DAY + 1800


def download(folder, source, stop=None, now=NOW, start=START, grid=3600, **options):
    about = {"venue": "test", "every": "1h"}
    return fetching.download(
        ("A", "B"), Grid(grid), source, start, stop, folder, about, clock=Clock(now),
        **options,
    )  # fmt: skip


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.jsonl")}


def test_an_interrupted_download_ends_as_one_that_was_not(tmp_path):
    whole, source = tmp_path / "whole", Source()
    bars = download(whole, source, stop=NOW)
    assert len(source.calls) == 10 and source.opened == 1
    for crash in (6, 2, 1):
        with pytest.raises(KeyboardInterrupt):
            download(tmp_path / "cut", Source(crash=crash), stop=NOW)
        for path in (tmp_path / "cut").glob("*.new"):
            with open(path, "ab") as file:
                file.write(b'["A", 17')  # a torn line
    last = Source()
    again = download(tmp_path / "cut", last, stop=NOW)
    assert again.digest() == bars.digest()
    assert len(last.calls) == 1  # what had come was not asked for again
    assert contents(tmp_path / "cut") == contents(whole)
    assert not [*(tmp_path / "cut").glob("*.new")]


def test_a_span_in_the_cache_asks_nobody(tmp_path):
    download(tmp_path, Source(), stop=START + 3 * DAY)
    unopened = Source(broken=99)
    part = download(tmp_path, unopened, START + 2 * DAY, start=START + DAY)
    assert unopened.opened == 0 and len(part) == 24
    assert part.digest() == download(tmp_path / "b", Source(), START + 2 * DAY, start=START + DAY
                                     ).digest()  # fmt: skip
    with pytest.raises(Unreachable, match=r"http-429: .* until stop=.2025-01-04."):
        download(tmp_path, Source(broken=99))


def test_new_bars_are_added_and_old_ones_are_not_asked_for_again(tmp_path):
    download(tmp_path, Source(), stop=START + 2 * DAY)
    source = Source()
    bars = download(tmp_path, source)
    # All but the last five minutes of each symbol are not asked for again.
    assert {call[0] for call in source.calls} == {
        START + day * DAY - 300 for day in (2, 3, 4)
    }  # fmt: skip
    assert bars.digest() == download(tmp_path / "whole", Source()).digest()
    # A bar that was open at the end of a download is in the next one.
    early = download(tmp_path / "early", Source(), stop=START + 1830, now=START + 1830, grid=60)
    assert len(early) == 30
    later = download(tmp_path / "early", Source(), stop=START + 3600, grid=60)
    assert len(later) == 60 and later.present.all()


def test_an_earlier_start_downloads_the_whole_again(tmp_path):
    download(tmp_path, Source(), start=START + DAY)
    bars = download(tmp_path, Source())
    assert bars.digest() == download(tmp_path / "whole", Source()).digest()


@pytest.mark.parametrize("crash", [None, 6])
def test_bars_of_two_scales_are_never_joined(tmp_path, caplog, crash):
    """After a split the venue's past is another one; also where a download of it breaks off."""
    old = download(tmp_path, Source(), stop=START + 2 * DAY)
    split = {"split": START + 2 * DAY + 7200}
    if crash is not None:
        with pytest.raises(KeyboardInterrupt):
            download(tmp_path, Source(crash=crash, **split))
        # What is there is what was there before, or complete.
        part = download(tmp_path, Source(broken=99), stop=START + 2 * DAY)
        assert part.digest() == old.digest()
    with caplog.at_level(logging.WARNING):
        bars = download(tmp_path, Source(**split))
    assert bars.digest() == download(tmp_path / "whole", Source(**split)).digest()
    said = {r.message for r in caplog.records}
    assert len(said) == 1 and "B: the past was rewritten (open of 2025-01-02 was" in said.pop()


def test_a_corrected_volume_is_not_another_past(tmp_path, caplog):
    class Corrected(Source):
        def fetch(self, start, stop):
            return [row._replace(volume=1.0) for row in super().fetch(start, stop)]

    download(tmp_path, Source(), stop=START + 2 * DAY)
    download(tmp_path, Corrected())
    assert not caplog.records


def test_what_a_venue_no_longer_has_stays_in_the_cache(tmp_path):
    class Delisted(Source):
        def fetch(self, start, stop):
            return []

    bars = download(tmp_path, Source(), stop=START + 2 * DAY)
    with pytest.raises(Unreachable, match="A: none of the bars that it had is there any longer"):
        download(tmp_path, Delisted())
    assert download(tmp_path, Delisted(), stop=START + 2 * DAY).digest() == bars.digest()


def test_a_file_that_is_damaged_is_downloaded_again(tmp_path):
    bars = download(tmp_path, Source())
    for path in tmp_path.glob("*.jsonl"):
        path.write_bytes(b"[1, 2]\n\x00" + path.read_bytes()[9:])
    assert download(tmp_path, Source()).digest() == bars.digest()


def test_no_bar_is_unfinished(tmp_path):
    bars = download(tmp_path, Source())
    assert len(bars) == 96 and str(bars.time[-1]) == "2025-01-04T23:00:00.000000000"
    minutes = Source().fetch(START, START + 3600)
    first = [row for row in minutes if row.symbol == "B"]
    assert bars.open[0, 1] == first[0].open and bars.close[0, 1] == first[-1].close
    assert bars.high[0, 1] == max(row.high for row in first)
    assert bars.volume[0, 1] == sum(row.volume for row in first)


def test_a_venue_that_is_busy_is_asked_again_and_then_the_rest_is_kept(tmp_path, monkeypatch):
    about, clock = {"venue": "test", "every": "1h"}, Clock(START + 2 * DAY)
    args = (("A", "B"), Grid(3600), Source(broken=3), START, START + DAY, tmp_path, about)
    fetching.download(*args, clock=clock)
    waits = clock.waits
    assert len(waits) == 3 and waits == sorted(waits) and min(waits) >= 1.0 and max(waits) <= 60.0
    with pytest.raises(Unreachable, match="the same command resumes where this one stopped"):
        download(tmp_path / "other", Source(broken=99))
    assert [path.suffix for path in (tmp_path / "other").iterdir()].count(".jsonl") == 0


def test_a_venue_that_does_not_open_is_named(tmp_path):
    def opened():
        raise Unreachable("connection")

    with pytest.raises(Unreachable, match=r"connection: test did not answer .* try the same"):
        download(tmp_path, opened)


def test_a_chunk_is_on_disk_before_the_next_is_asked_for(tmp_path, monkeypatch):
    steps, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (steps.append("disk"), fsync(file)))

    class Noted(Source):
        def fetch(self, start, stop):
            steps.append("ask")
            return super().fetch(start, stop)

    download(tmp_path, Noted())
    assert steps == ["disk", *["ask", "disk"] * 5] * 2


def test_an_empty_span_is_refused_and_a_symbol_without_bars_is_named(tmp_path):
    class Unknown(Source):
        def fetch(self, start, stop):
            return [row for row in super().fetch(start, stop) if row.symbol == "A"]

    with pytest.raises(ConfigError, match="is not before"):
        download(tmp_path, Source(), stop=START)
    with pytest.raises(BarError, match="test: no bar of B in that span: unknown, delisted or"):
        download(tmp_path, Unknown())
    assert [path.name[0] for path in tmp_path.glob("*.jsonl")] == ["A"]


def test_the_command_downloads_days_from_alpaca(tmp_path, monkeypatch, capsys, keys):
    out = tmp_path / "spy.parquet"
    words = ["data", "fetch", "alpaca", "SPY", "--from", "2025-01-02", "--to", "2025-02-01",
             "--bar", "1d", "--out", str(out)]  # fmt: skip
    with FakeAlpaca() as fake:
        monkeypatch.setenv("APCA_API_DATA_URL", fake.url)
        days = [START + i * DAY for i in range(1, 45) if (i + 2) % 7 < 5]
        fake.days = {"SPY": {t + 5 * 3600: (100.0 + t % 9, 120.0, 90.0, 105.0, 7.0) for t in days}}
        assert main([*words, "--json"]) == 0
        printed = capsys.readouterr()
        assert json.loads(printed.out.splitlines()[-1])["rows"] == 22
        bars = nca.read_bars(out)
        assert str(bars.time[0])[:10] == "2025-01-02" and str(bars.time[-1])[:10] == "2025-01-31"
        assert bars.symbols == ("SPY",) and "CANARY" not in printed.out + printed.err
    # The host is gone, and what it said is kept.
    same = nca.fetch_bars("alpaca:SPY", "2025-01-02", "2025-02-01")
    assert same.digest() == bars.digest()
    assert main([*words[:-1], str(tmp_path / "spy.csv"), "--cache", str(tmp_path / "cache" /
                 "nca_trader" / "bars")]) == 0  # fmt: skip
    assert nca.read_bars(tmp_path / "spy.csv").digest() == bars.digest()
    capsys.readouterr()
    assert main([*words[:-1], str(tmp_path / "spy.xlsx")]) == 2
    assert main(["data", "fetch", "alpaca", "SPY"]) == 2
    assert main(["data", "check", str(out), "--bar", "1d"]) == 2
    assert main(["data", "fetch", "nowhere", *words[3:]]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 4
    assert "give --from, --bar, --out as well" in said[1]
    assert "yahoo, alpaca or ccxt:EXCHANGE" in said[3]


def test_the_command_downloads_candles_of_an_exchange(tmp_path, monkeypatch):
    out = tmp_path / "btc.csv"
    words = ["--from", "2025-01-01", "--to", "2025-01-04", "--bar", "1h", "--out", str(out)]
    with FakeExchange(clock=lambda: START + 3 * DAY + 100.0) as fake:
        monkeypatch.setenv("NCA_TRADER_CCXT_URL", fake.url)
        bars = {1000 * (START + 3600 * i): (50.0, 51.0, 49.0, 50.5, 2.0) for i in range(73)}
        fake.klines["BTCUSDT"] = bars
        assert main(["data", "fetch", "ccxt:binance", "BTC/USDT", *words]) == 0
    read = nca.read_bars(out)
    assert len(read) == 72 and read.symbols == ("BTC/USDT",)
    # The host is gone, and what it said is kept.
    same = nca.fetch_bars("ccxt:binance:BTC/USDT", "2025-01-01", "2025-01-04", "1h")
    assert same.digest() == read.digest() and same.source == "ccxt:binance:BTC/USDT"


@pytest.mark.parametrize(
    ("package", "module", "named"),
    [("alpaca", "feeds.alpaca_feed", "alpaca-py"), ("alpaca", "venues.alpaca", "alpaca-py"),
     ("ccxt", "feeds.ccxt_feed", "ccxt"), ("yfinance", "feeds.yahoo", "yfinance")],
)  # fmt: skip
def test_a_missing_extra_is_named_in_one_line(monkeypatch, package, module, named):
    for name in list(sys.modules):
        ours = name.startswith("nca_trader.paper.") and module.partition(".")[2][:4] in name
        if ours or name.partition(".")[0] == package:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"pip install {named}\.") as caught:
        importlib.import_module(f"nca_trader.paper.{module}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", [".jsonl", ".lock", ".new"])
def test_no_file_of_the_cache_is_written_through_a_link(tmp_path, suffix):
    kept, target = tmp_path / "kept", tmp_path / "mine.txt"
    download(kept, Source(), stop=START + DAY)
    target.write_text("mine")
    for file in kept.glob("*.jsonl"):
        file.with_suffix(suffix).unlink(missing_ok=True)
        file.with_suffix(suffix).symlink_to(target)
    with pytest.raises(ConfigError, match="is a link"):
        download(kept, Source())
    assert target.read_text() == "mine"
