"""`python -m benchmarks stream`: what a row says, and that it trades as it says."""

import os

import numpy as np

from benchmarks import stream
from nca_trader.learner.programs import Compilations
from nca_trader.paper.journal.journal import read_events


def test_a_row_has_the_keys_of_every_benchmark_and_its_percentiles():
    with Compilations() as none:
        row = stream.row_of("x", np.arange(1, 101) * 1e-3, none, more=1)
    contract = "name envs envs_per_segment steps_per_s compile_s first_call_s peak_rss_mb retraces"
    assert set(contract.split()) | {"peer", "ratio", "device"} <= set(row)
    assert row["more"] == 1 and abs(row["steps_per_s"] - 1 / 50.5e-3) < 1e-9
    assert (round(row["p50_us"]), round(row["p99_us"])) == (50500, 99010)


def test_a_session_is_timed_from_the_bar_to_its_orders(stage, tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "WARM", 40)
    bars = stage.bars(120)
    split, wait = {}, os.fdatasync
    taken, sent = stream.session(stage.agent(), bars, tmp_path / "a.db", False, split=split)
    orders = {e.ts_event for e in read_events(tmp_path / "a.db", "order_intent")}
    timed = orders & set(bars.time[40:].astype(int).tolist())
    assert len(taken) == 80 and len(sent) == len(timed) > 10
    assert (sent > 0).all() and sent.max() < taken.max()
    # The parts of each order add up to its time, and none is counted twice.
    assert set(split) == {*stream.Split.PARTS, "rest"} and os.fdatasync is wait
    np.testing.assert_allclose(sum(map(np.array, split.values())), sent, rtol=1e-9)
    assert all(min(times) > 0.0 for times in split.values())
    stream.session(stream.quiet(stage.agent()), bars, tmp_path / "b.db", True)
    kinds = {e.kind for e in read_events(tmp_path / "b.db")}
    assert kinds == {"run_started", "watched", "bar", "decision", "snapshot"}


def test_a_live_session_is_timed_from_the_bar_to_its_first_order(stage, tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "WARM", 40)

    sent, answered = stream.live(stage.agent(), stage.bars(120), tmp_path)
    bars = {event.body["bar"] for event in read_events(tmp_path / "live.db", "order_intent")}
    assert len(sent) == len(answered) == len(bars) - stream.WARM_ORDERS > 5
    assert (0.0 < sent).all() and (sent < answered).all()
    assert {e.kind for e in read_events(tmp_path / "live.db")} >= {
        "order_sent",
        "order_ack",
        "fill",
    }
