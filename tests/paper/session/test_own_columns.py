"""Columns of one's own in a paper session: as in the backtest, and over a restart."""

import dataclasses

import numpy as np
import pytest
from drawn import random_bars
from tiny import AGENT
from untrained import untrained_run

import nca_trader as nca
from nca_trader.config import EnvConfig
from nca_trader.data.bars import frame_of
from nca_trader.errors import ConfigError
from nca_trader.paper.journal.bars import bar_body, bar_of
from nca_trader.paper.journal.journal import read_events
from nca_trader.paper.session import trade as session
from nca_trader.paper.session.parity import compare
from nca_trader.types import fields_of


@pytest.fixture
def bars():
    plain = random_bars(np.random.default_rng(3), 220, 2)
    present = np.random.default_rng(4).random((220, 2)) >= 0.1
    present[:, 0] |= ~present[:, 1]  # a bar of no asset at all is not a bar
    plain = nca.read_bars(frame_of(plain)[present.ravel()])
    drawn = np.random.default_rng(5).normal(size=(220, 2)).cumsum(axis=0)
    drawn[:7] = np.nan
    return dataclasses.replace(plain, columns={"score": drawn})


@pytest.fixture
def run(bars, tmp_path):
    config = EnvConfig(features=("return_1", "column:score", "column:score:raw"))
    return untrained_run(tmp_path / "runs" / "a", bars, config, AGENT)


def decisions(journal):
    return [event.body for event in read_events(journal, "decision")]


@pytest.mark.heavy
def test_a_replay_is_the_backtest_also_after_a_restart(bars, run, tmp_path):
    nca.write_bars(bars, tmp_path / "bars.parquet")
    nca.backtest(bars, run).save(run.path / "backtest.parquet")
    feed, whole, parted = f"replay:{tmp_path}/bars.parquet", tmp_path / "a.db", tmp_path / "b.db"
    nca.paper_trade(run.path, feed, whole)
    assert compare(run.path, whole).ok
    for most in (90, 40, 1000):
        left = iter(range(most))
        nca.paper_trade(run.path, feed, parted, stop=lambda left=left: next(left, None) is None)
    assert decisions(parted) == decisions(whole) and len(decisions(whole)) > 100


def test_a_bar_of_a_journal_has_its_columns(bars):
    for bar in bars[5:12].each():
        body = bar_body(bar, bars.symbols)
        again = fields_of(bar_of(body, bars.symbols, int(bar.time[0])))
        there = bar.present
        for name, x in fields_of(bar).items():
            each = slice(None) if name in ("time", "present", "column:score") else there
            np.testing.assert_array_equal(again[name][each], x[each])


def test_a_feed_without_the_column_is_refused_at_the_start(bars, run, tmp_path, monkeypatch):
    class Feed:
        symbols, period = bars.symbols, 86_400

        def __init__(self, past):
            self.past = past

        def history(self, count):
            return self.past[-count:]

        def now(self):
            raise NotImplementedError("it was not refused")

    plain = dataclasses.replace(bars, columns={})
    nca.write_bars(plain, tmp_path / "plain.csv")
    with pytest.raises(ConfigError, match=r"replay:.* has no column 'score'; there are none"):
        nca.paper_trade(run.path, f"replay:{tmp_path}/plain.csv", tmp_path / "a.db")
    monkeypatch.setattr(session, "open_feed", lambda text, every: Feed(plain))
    with pytest.raises(ConfigError, match=r"ccxt:x:A.* has no column 'score'") as caught:
        nca.paper_trade(run.path, "ccxt:x:A,B", tmp_path / "a.db", reading={"every": "1d"})
    assert "\n" not in str(caught.value) and not (tmp_path / "a.db").exists()
    # A feed of one's own whose bars have it goes on.
    monkeypatch.setattr(session, "open_feed", lambda text, every: Feed(bars))
    with pytest.raises(NotImplementedError):
        nca.paper_trade(run.path, "ccxt:x:A,B", tmp_path / "a.db", reading={"every": "1d"})
