"""Sleeves at a venue: net orders whose fills are shared, under rejects, partial fills and restarts.

The ledger of `test_sleeves` reads the journal's tables; the venues here share no code with it.
"""

import collections

import numpy as np
import pytest
from livedesk import Desk, Still, Tape
from sleeveledger import CAPITAL, Ledger, alternating, sleeve, told

import nca_trader as nca
from nca_trader.paper.journal import Journal, verify
from nca_trader.paper.live import LiveSession
from nca_trader.paper.risk import resume
from nca_trader.paper.sleeved import SleevedVenueHolder
from nca_trader.paper.subjects import Terms, agent_of, members_on

BEGIN = 12
COSTS = nca.Costs(commission=5e-4, slippage=2e-4)


@pytest.fixture(autouse=True)
def _quick(quick_disk):
    pass


class Room:
    """A live session of sleeves, or of one rule, that a test can start again and again."""

    def __init__(self, stage, folder, what, desk=None, num_bars=50, bars=None, **account):
        self.folder, self.what, self.account = folder, what, account
        self.bars = stage.bars(num_bars=num_bars) if bars is None else bars
        self.path, self.desk, self.clock = folder / "paper.db", desk or Desk(CAPITAL), Still()

    def trade(self, bars=10**6):
        tape = Tape(self.bars, self.folder / "tape", BEGIN)
        until = min(tape.place + bars, len(self.bars)) - 1
        last = self.bars.time[until].astype("datetime64[s]").astype(int)
        terms, holder = Terms(COSTS, None, self.account), None
        if isinstance(self.what, list):
            members, agent, _ = members_on(self.what, self.bars, CAPITAL, terms, False)
            holder = SleevedVenueHolder(agent, members)
        else:
            agent = agent_of(self.what, None, self.bars, CAPITAL, terms)
        with Journal(self.path, tape.now) as journal:
            session = LiveSession(
                agent, tape, self.desk, journal, CAPITAL, warmup=8, clock=self.clock, holder=holder
            )
            return session.trade(lambda: (session._state.last or 0) >= last)

    def of(self, kind):
        return [body for k, _, body, _ in told(self.path) if k == kind]


THREE = [
    sleeve("trend", 0.5, nca.rules.sma_cross(3, 10)),
    sleeve("steady", 0.3, alternating(0.4, -0.3)),
    sleeve("against", 0.2, alternating(-0.4, 0.4, every=3)),
]
BAD = ["reject", None, "mute", "lost", None, "busy", None, "reject", "mute"] * 9


def test_one_sleeve_at_a_venue_is_a_session_without_sleeves(stage, tmp_path):
    steady, results = alternating(0.4, -0.3), []
    for name, what in (("alone", steady), ("one", [sleeve("one", 1.0, steady)])):
        (tmp_path / name).mkdir()
        room = Room(stage, tmp_path / name, what, Desk(CAPITAL, BAD, share=0.6))
        room.trade(9)
        result = room.trade()
        found = {k: result[k] for k in ("orders", "fills", "decisions", "equity", "value")}
        sent = [(t.symbol, t.units) for t in room.desk.submitted]
        seen = [{k: v for k, v in b.items() if k != "sleeves"} for b in room.of("snapshot")]
        results.append((found, sent, seen, room.desk.cash, room.desk.units))
    assert results[0] == results[1]
    assert results[0][0]["fills"] > 10


@pytest.mark.parametrize("share", [1.0, 0.6], ids=["whole", "partial"])
def test_books_sum_under_rejects_partial_fills_and_restarts(stage, tmp_path, share):
    ends = []
    for name, restarts in (("whole", 0), ("cut", 6)):
        (tmp_path / name).mkdir()
        room = Room(stage, tmp_path / name, THREE, Desk(CAPITAL, BAD, share=share))
        for _ in range(restarts):
            room.trade(5)
        result = room.trade()
        ledger = Ledger(room.path)
        assert ledger.worst < 1e-9 and ledger.bars == result["decisions"]
        assert ledger.crossed
        assert {b["reason"] for b in room.of("order_terminal")} >= {"rejected", "filled"} - (
            {"filled"} if share < 1.0 else set()
        )
        # The venue's own books, which this package did not keep.
        assert ledger.cash == pytest.approx(room.desk.cash, rel=1e-12)
        assert ledger.units == pytest.approx(room.desk.units, rel=1e-12)
        verify(room.path)
        ends.append((result["equity"], [b["sleeves"] for b in room.of("snapshot")]))
    assert ends[0] == ends[1]


def test_each_symbol_has_one_order_for_all_sleeves(stage, tmp_path):
    room = Room(stage, tmp_path, THREE)
    room.trade()
    bars = collections.Counter((b["bar"], b["symbol"]) for b in room.of("order_intent"))
    assert max(bars.values()) == 1
    for body in room.of("order_intent"):
        assert sum(body["parts"].values()) == pytest.approx(body["units"], rel=1e-12)
        assert all(n * body["units"] >= 0.0 for n in body["parts"].values())


def test_two_opposite_sleeves_cross_at_the_next_open_and_send_nothing(stage, tmp_path):
    both = [
        sleeve("up", 0.5, alternating(0.4, 0.4)),
        sleeve("down", 0.5, alternating(-0.4, -0.4)),
    ]
    room = Room(stage, tmp_path, both)
    room.trade(2)
    room.trade()
    assert room.desk.submitted == [] and room.desk.cash == CAPITAL
    ledger = Ledger(room.path)
    assert ledger.worst < 1e-12 and len(ledger.crossed) == 2
    last = room.of("snapshot")[-1]["sleeves"]
    bars, row = room.bars, BEGIN - 1
    for name, side in (("up", 1.0), ("down", -1.0)):
        units = side * 0.4 * 5e4 / bars.close[row]  # sized at the close of the decision
        value = 5e4 + float((units * (bars.close[-1] - bars.open[row + 1])).sum())
        assert last[name]["value"] == pytest.approx(value, rel=1e-12)


def test_a_halted_sleeve_sells_its_own_and_survives_restarts(stage, tmp_path):
    import dataclasses

    bars = stage.bars(num_bars=60)
    fall = np.where(np.arange(60) < 25, 1.0, 0.98 ** (np.arange(60) - 24.0))[:, None]
    fields = {n: getattr(bars, n) * fall for n in ("open", "high", "low", "close")}
    bars = dataclasses.replace(bars, **fields)
    limits = nca.Limits(max_drawdown=0.1)
    both = [
        sleeve("long", 0.5, alternating(0.5, 0.3), limits=limits, on_halt="flatten"),
        sleeve("other", 0.5, alternating(0.3, -0.2)),
    ]
    ends = []
    for name, restarts in (("whole", 0), ("cut", 9)):
        (tmp_path / name).mkdir()
        room = Room(stage, tmp_path / name, both, bars=bars)
        for _ in range(restarts):
            room.trade(4)
        room.trade()
        ends.append([b["sleeves"] for b in room.of("snapshot")])
        assert Ledger(room.path).worst < 1e-9
    assert ends[0] == ends[1]
    halted = [b["long"]["halted"] for b in ends[0]]
    row = halted.index("max-drawdown")
    assert set(halted[row:]) == {"max-drawdown"}
    assert any(ends[0][row]["long"]["units"]) and not any(ends[0][row + 2]["long"]["units"])
    assert len({tuple(b["other"]["units"]) for b in ends[0][row:]}) > 3


def test_a_sleeve_that_a_person_resumes_trades_again_at_the_venue(stage, tmp_path):
    both = [
        sleeve("a", 0.5, alternating(0.5, 0.3), limits=nca.Limits(max_daily_loss=0.005)),
        sleeve("b", 0.5, alternating(0.3, -0.2)),
    ]
    room = Room(stage, tmp_path, both)
    room.trade(25)
    seen = [b["sleeves"]["a"]["halted"] for b in room.of("snapshot")]
    assert seen[-1] == "max-daily-loss"
    resume(room.path, "looked", room.bars.time[BEGIN + 25].astype(int), sleeve="a")
    room.trade(2)
    room.trade()
    after = [b["sleeves"]["a"]["halted"] for b in room.of("snapshot")][len(seen) :]
    assert after[0] is None
    assert Ledger(room.path).worst < 1e-9


def test_what_the_venue_held_before_is_shared(stage, tmp_path):
    """By the sleeves' shares, as cash is."""
    desk = Desk(CAPITAL)
    desk.units = {"AAA": 100.0}
    room = Room(stage, tmp_path, THREE, desk)
    room.trade(1)
    first = room.of("snapshot")[0]["sleeves"]
    assert first["trend"]["units"][0] == pytest.approx(50.0)
    assert first["against"]["cash"] == pytest.approx(0.2 * CAPITAL)
    room.trade()
    last = room.of("snapshot")[-1]
    for i in (0, 1):
        mine = sum(body["units"][i] for body in last["sleeves"].values())
        assert mine == pytest.approx(last["units"][i], rel=1e-12, abs=1e-9)
