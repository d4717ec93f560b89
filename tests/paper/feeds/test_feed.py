"""One closed bar at a time."""

import json
import re

import jax
import numpy as np
import pytest

from nca_trader.cli import main
from nca_trader.cli.paper import why_no_order
from nca_trader.config.reading import replayed_file
from nca_trader.data.bars import read_bars, write_bars
from nca_trader.errors import BarError, ConfigError
from nca_trader.paper.feeds.feed import ReplayFeed
from nca_trader.paper.journal.journal import read_events
from nca_trader.paper.session.trade import paper_trade
from nca_trader.strategies.rules import sma_cross


def test_a_replay_gives_every_bar_in_order_with_its_own_time_as_the_clock(stage):
    bars = stage.bars(missing=0.2)
    feed = ReplayFeed(bars)
    assert feed.now() == int(bars.time[0].astype(int))  # of a halt before the first bar
    row = -1
    for row, bar in enumerate(feed):
        assert feed.now() == bars.time[row].astype(int)
        np.testing.assert_array_equal(bar.time, [feed.now() // 10**9] * 2)
        for name in ("open", "high", "low", "close", "volume", "present"):
            np.testing.assert_array_equal(getattr(bar, name), getattr(bars, name)[row])
    assert row == len(feed) - 1 == 79


def test_later_bars_are_not_within_reach_of_a_bar(stage):
    """A view of the row would carry the whole table as its base."""
    bar = next(iter(ReplayFeed(stage.bars())))
    for field in jax.tree.leaves(bar):
        assert field.base is None
        field[:] = 0  # a copy: writing to it harms no one
    again = next(iter(ReplayFeed(stage.bars())))
    assert (again.close > 0).all()


def test_a_file_is_replayed_with_the_symbols_asked_for(stage, tmp_path):
    bars = stage.bars(symbols=("AAA", "BBB", "CCC"))
    write_bars(bars, tmp_path / "a bar file.parquet")
    feed = ReplayFeed(read_bars(tmp_path / "a bar file.parquet"), ("CCC", "AAA"))
    assert feed.symbols == ("CCC", "AAA")
    closes = np.array([bar.close for bar in feed])
    np.testing.assert_array_equal(closes, bars.close[:, [2, 0]])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("replay:", "give replay:FILE"),
        ("bars.csv", "give replay:FILE"),
        ("", "give replay:FILE"),
    ],
)
def test_what_is_no_feed_is_said_in_one_line(text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        replayed_file(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("broker", ["ccxt:binance", "ccxt"])
def test_an_exchange_gives_bars_and_takes_no_orders(broker, tmp_path):
    says = "ccxt gives bars and takes no orders; give simulated, .* module:name"
    with pytest.raises(ConfigError, match=says) as caught:
        paper_trade(sma_cross(2, 5), "ccxt:binance:BTC/USDT", tmp_path / "paper.db", broker)
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())


def test_the_simulated_exchange_takes_no_options(tmp_path):
    with pytest.raises(ConfigError, match='simulated:seed=7" is not a broker; give'):
        paper_trade(sma_cross(2, 5), "ccxt:binance:BTC/USDT", tmp_path / "paper.db",
                    "simulated:seed=7")  # fmt: skip


def test_a_missing_file_and_a_missing_symbol_are_bar_errors(stage, tmp_path):
    with pytest.raises(BarError, match=r"none\.csv"):
        paper_trade(sma_cross(2, 5), f"replay:{tmp_path}/none.csv", tmp_path / "paper.db")
    write_bars(stage.bars(), tmp_path / "bars.parquet")
    with pytest.raises(BarError, match="no symbol SPY"):
        ReplayFeed(read_bars(tmp_path / "bars.parquet"), ("SPY",))


TEXT = """time,open,high,low,close,volume
2021-03-01 09:32,10,11,9,10.5,5
2021-03-01 09:31,10,11,9,10.25,5
"""


def test_a_replay_takes_the_reading_options(path, tmp_path, capsys):
    (tmp_path / "bars.csv").write_text(TEXT)
    command = ["paper", "--strategy=sma_cross", f"--feed=replay:{tmp_path}/bars.csv"]
    command.append(f"--journal={path}")
    assert main(command) == 2 and "D015" in capsys.readouterr().err
    assert main([*command, "--timezone=America/New_York", "--repair=sort", "--symbol=X"]) == 0
    events = list(read_events(path, "bar"))
    assert [event.body["X"][3] for event in events] == [10.25, 10.5]
    assert events[0].ts_event == 1614609060 * 10**9  # 14:31 UTC


def test_a_session_that_ends_without_an_order_says_so_and_why(stage, tmp_path, capsys):
    write_bars(stage.bars(), tmp_path / "bars.csv")
    for rule, why in (
        ("always_flat", r"No order was sent: none of its \d+ decisions asks for a position\."),
        ("buy_and_hold", None),
    ):
        words = ["paper", "--strategy", rule, "--feed", f"replay:{tmp_path}/bars.csv"]
        assert main([*words, "--journal", str(tmp_path / f"{rule}.db"), "--json"]) == 0
        out = capsys.readouterr().out
        found = json.loads(out.splitlines()[-1])["no_orders"]
        assert (found is None) == (why is None) == ("No order was sent" not in out)
        assert why is None or re.search(why, out)
    counts = {"bars": 9, "orders": 0, "decisions": 0}
    assert "none of its 9 bars was decided at" in str(why_no_order(counts, ""))
    assert why_no_order(counts | {"bars": 0}, "") == "the feed gave no bar"
