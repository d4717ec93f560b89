"""Downloads of history: the same bytes after an interruption, and no bar that is not over."""

import importlib
import json
import os
import sys

import numpy as np
import pytest
from fake_alpaca import FakeAlpaca
from fake_exchange import FakeExchange

import nca_trader as nca
from nca_trader.cli import main
from nca_trader.errors import BarError, ConfigError
from nca_trader.paper import fetch as fetching
from nca_trader.paper.fetch import fetch_bars
from nca_trader.paper.venue import Unreachable
from nca_trader.paper.venue_feed import Grid, Row

DAY = 86_400
START = 1_735_689_600  # 2025-01-01
rng = np.random.default_rng(5)
STEPS = np.exp(0.001 * rng.standard_normal((20_000, 2)).cumsum(axis=0)).tolist()


class Clock:
    def __init__(self, now):
        self.time = now

    def now(self):
        return int(self.time * 1e9)


class Source:
    """A random walk of two symbols; `broken` calls fail first, `crash` ends the process."""

    symbols, step, delay, settle = ("A", "B"), 60, 1.0, 10.0

    def __init__(self, broken=0, crash=None):
        self.broken, self.crash, self.calls = broken, crash, []

    def fetch(self, start, stop):
        self.calls.append((start, stop))
        if self.crash is not None and len(self.calls) > self.crash:
            raise KeyboardInterrupt
        if self.broken:
            self.broken -= 1
            raise Unreachable("http-429")
        rows = []
        for i, symbol in enumerate(self.symbols):
            for t in range(-(-start // 60) * 60, stop - 59, 60):
                p = 100.0 * STEPS[(t - START) // 60][i]
                rows.append(Row(symbol, t, p, p * 1.001, p / 1.001, p * 1.0005, 1.0 + t % 7))
        return rows

    def close(self):
        pass


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(fetching, "CHUNK", 2 * 1440)  # a day of both symbols


def download(path, source, stop=None, now=START + 4 * DAY + 1800, **options):
    about = {"venue": "test", "symbols": ["A", "B"], "every": "1h"}
    return fetch_bars(
        source, Grid(3600), START, stop, path, about, clock=Clock(now), sleep=lambda _: None,
        **options,
    )  # fmt: skip


@pytest.mark.parametrize("suffix", [".parquet", ".feather", ".csv"])
def test_an_interrupted_download_ends_with_the_same_bytes(tmp_path, suffix):
    whole, cut = tmp_path / f"whole{suffix}", tmp_path / f"cut{suffix}"
    source = Source()
    download(whole, source)
    for crash in (2, 1, 0):
        with pytest.raises(KeyboardInterrupt):
            download(cut, Source(crash=crash), now=START + 4 * DAY + 1800 + 3600 * (2 - crash))
        assert not cut.exists()
        with open(tmp_path / f"cut{suffix}.partial", "ab") as file:
            file.write(b'["A", 17')  # a torn line
    last = Source()
    download(cut, last, now=START + 9 * DAY)
    assert cut.read_bytes() == whole.read_bytes()
    assert len(last.calls) == len(source.calls) - 3  # what had come was not asked for again
    assert [p.name for p in tmp_path.iterdir() if "partial" in p.name or p.name[0] == "."] == []


def test_read_bars_accepts_the_file_and_no_bar_is_unfinished(tmp_path):
    path = tmp_path / "bars.parquet"
    path.write_text("an older file")
    bars = download(path, Source())
    read = nca.read_bars(path)
    assert read.digest() == bars.digest()
    assert len(read) == 96 and str(read.time[-1]) == "2025-01-04T23:00:00.000000000"
    minutes = Source().fetch(START, START + 3600)
    first = [row for row in minutes if row.symbol == "B"]
    assert read.open[0, 1] == first[0].open and read.close[0, 1] == first[-1].close
    assert read.high[0, 1] == max(row.high for row in first)
    assert read.volume[0, 1] == sum(row.volume for row in first)


def test_a_venue_that_is_busy_is_asked_again_and_then_the_rest_is_kept(tmp_path):
    path, waits = tmp_path / "bars.csv", []
    source = Source(broken=3)
    about = {"venue": "test", "symbols": ["A", "B"], "every": "1h"}
    args = (Grid(3600), START, START + DAY, path, about)
    fetch_bars(source, *args, clock=Clock(START + 2 * DAY), sleep=waits.append)
    assert len(waits) == 3 and waits == sorted(waits) and min(waits) >= 1.0 and max(waits) <= 60.0
    with pytest.raises(Unreachable, match="the same command resumes where this one stopped"):
        download(tmp_path / "other.csv", Source(broken=99))
    assert (tmp_path / "other.csv.partial").exists() and not (tmp_path / "other.csv").exists()


def test_a_chunk_is_on_disk_before_the_next_is_asked_for(tmp_path, monkeypatch):
    steps, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (steps.append("disk"), fsync(file)))

    class Noted(Source):
        def fetch(self, start, stop):
            steps.append("ask")
            return super().fetch(start, stop)

    download(tmp_path / "bars.csv", Noted())
    assert steps == ["disk", *["ask", "disk"] * 5]


def test_a_partial_file_of_another_download_is_refused(tmp_path):
    path = tmp_path / "bars.csv"
    with pytest.raises(KeyboardInterrupt):
        download(path, Source(crash=1))
    with pytest.raises(ConfigError, match="another download; remove it"):
        download(path, Source(), stop=START + DAY)
    with pytest.raises(ConfigError, match="is not before"):
        download(tmp_path / "b.csv", Source(), stop=START)


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
        assert main([*words[:-1], str(tmp_path / "spy.xlsx")]) == 2
        assert main(["data", "fetch", "alpaca", "SPY"]) == 2
        assert main(["data", "check", str(out), "--bar", "1d"]) == 2
        assert main(["data", "fetch", "nowhere", *words[3:]]) == 2
        said = capsys.readouterr().err.splitlines()
        assert len(said) == 4
        assert "give --from, --bar, --out as well" in said[1]
        assert "alpaca or ccxt:EXCHANGE" in said[3]


def test_the_command_downloads_candles_of_an_exchange(tmp_path, monkeypatch):
    out = tmp_path / "btc.csv"
    with FakeExchange(clock=lambda: START + 3 * DAY + 100.0) as fake:
        monkeypatch.setenv("NCA_TRADER_CCXT_URL", fake.url)
        bars = {1000 * (START + 3600 * i): (50.0, 51.0, 49.0, 50.5, 2.0) for i in range(73)}
        fake.klines["BTCUSDT"] = bars
        assert main(["data", "fetch", "ccxt:binance", "BTC/USDT", "--from", "2025-01-01",
                     "--to", "2025-01-04", "--bar", "1h", "--out", str(out)]) == 0  # fmt: skip
    read = nca.read_bars(out)
    assert len(read) == 72 and read.symbols == ("BTC/USDT",)


def test_a_span_without_bars_is_said(tmp_path):
    class Empty(Source):
        def fetch(self, start, stop):
            return []

    with pytest.raises(BarError, match="no bar in that span"):
        download(tmp_path / "none.csv", Empty())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("package", "module", "named"),
    [("alpaca", "alpaca_feed", "alpaca-py"), ("alpaca", "alpaca", "alpaca-py"),
     ("ccxt", "ccxt_feed", "ccxt")],
)  # fmt: skip
def test_a_missing_extra_is_named_in_one_line(monkeypatch, package, module, named):
    for name in list(sys.modules):
        ours = name.startswith(("nca_trader.paper.alpaca", "nca_trader.paper.ccxt"))
        if ours or name.partition(".")[0] == package:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"pip install {named}\.") as caught:
        importlib.import_module(f"nca_trader.paper.{module}")
    assert "\n" not in str(caught.value)
