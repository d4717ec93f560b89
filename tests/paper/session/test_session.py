"""The loop: it trades what a backtest would, journals first, and halts rather than guess."""

import itertools
from dataclasses import replace

import jax
import numpy as np
import pytest

from nca_trader.errors import ConfigError, HaltError, StateError
from nca_trader.evaluate.backtest import backtest
from nca_trader.paper.feeds.feed import ReplayFeed
from nca_trader.paper.journal.journal import Journal, read_events, verify
from nca_trader.paper.session.core import Core, programs
from nca_trader.paper.session.trade import open_session
from nca_trader.paper.venues.exchange import Exchange


def bodies(path, kind):
    return [event.body for event in read_events(path, kind)]


@pytest.mark.parametrize(
    ("fill", "order", "targets", "missing"),
    [
        ("next_open", "on_change", (-0.8, 0.0, 0.9), 0.0),  # gross is capped, cash binds
        ("next_open", "rebalance", (-0.4, 0.0, 0.5), 0.3),
        ("close", "rebalance", (-0.5, 0.0, 0.5), 0.0),
        ("close", "on_change", (0.0, 0.5, 1.0), 0.3),
    ],
)
def test_a_session_ends_with_the_equity_of_a_backtest_of_its_targets(
    path, stage, fill, order, targets, missing
):
    """The session halts if the broker's own books differ by 1e-9 at any bar, so it checks both."""
    bars = stage.bars(missing=missing)
    agent = stage.agent(targets=targets, fill=fill, order=order)
    result = stage.replay(path, bars, agent)
    assert result["fills"] > 20
    expected = backtest(
        bars, stage.decided(path, bars), stage.costs, fill, order, max_gross=1.0
    ).equity.to_numpy()[stage.first_decision :]
    snapshots = np.array([body["equity"] for body in bodies(path, "snapshot")])
    np.testing.assert_allclose(snapshots, expected, rtol=2e-15)
    assert result["equity"] == snapshots[-1]
    assert result["value"] == pytest.approx(1e5 * snapshots[-1], rel=1e-12)


def test_one_asset_fully_invested_sends_one_order_for_one_change(path, stage):
    bars = stage.bars(symbols=("AAA",), seed=3)
    agent = stage.agent(
        symbols=("AAA",), targets=(0.0, 1.0), decide=lambda w, p, a: np.array([[0.0, 1.0]])
    )
    result = stage.replay(path, bars, agent)
    assert (result["orders"], result["fills"]) == (1, 1)
    growth = bars.close[-1, 0] / bars.open[stage.first_decision + 1, 0]
    assert result["equity"] == pytest.approx(growth / (1.0002 * 1.0005), rel=1e-12)


def test_the_order_of_events_is_bar_decision_intent_and_then_the_fill_of_the_next_bar(path, stage):
    stage.replay(path, stage.bars(), stage.agent())
    events = list(read_events(path))
    seen = {}
    for event in events:
        if event.kind in ("decision", "order_intent", "snapshot"):
            assert seen.get("bar") == event.ts_event  # no decision without its bar before it
        seen[event.kind] = event.ts_event
    intents = {e.body["client_id"]: e for e in events if e.kind == "order_intent"}
    acks = {e.key: e.seq for e in events if e.kind == "order_ack"}
    assert set(acks) == set(intents)
    for fill in (e for e in events if e.kind == "fill"):
        intent = intents[fill.body["client_id"]]
        assert intent.seq < acks[intent.body["client_id"]] < fill.seq
        assert fill.ts_event > intent.ts_event


def test_nothing_is_ordered_before_start_nor_before_the_window_is_full(path, stage, tmp_path):
    bars = stage.bars()
    stage.replay(path, bars, stage.agent())
    times = [e.ts_event for e in read_events(path, "decision")]
    assert times[0] == bars.time[stage.first_decision].astype(int)
    later = tmp_path / "later.db"
    start = int(bars.time[50].astype("datetime64[s]").astype(int))
    result = stage.replay(later, bars, stage.agent(), start=start)
    assert result["decisions"] == 30
    assert next(e.ts_event for e in read_events(later, "decision")) == start * 1_000_000_000
    # The features saw the bars before: the decisions at later bars are the same.
    both = dict(zip(times, bodies(path, "decision"), strict=True))
    for event in read_events(later, "decision"):
        assert event.body["logits"] == both[event.ts_event]["logits"]


def test_the_same_command_twice_adds_nothing(path, stage):
    bars, agent = stage.bars(missing=0.2), stage.agent()
    first = stage.replay(path, bars, agent)
    before = path.read_bytes()
    assert stage.replay(path, bars, agent) == first
    assert path.read_bytes() == before
    assert verify(path).hash == first["head"]


@pytest.mark.parametrize("cut", [1, 79])
def test_a_session_goes_on_where_an_earlier_one_stopped(path, stage, cut, tmp_path, digest):
    """Stopped in the middle, not at the end of its feed: there is no run_ended yet."""
    bars, agent = stage.bars(missing=0.2), stage.agent()
    feed = ReplayFeed(bars)
    with Journal(path, feed.now) as journal:
        session = open_session(agent, feed, stage.exchange(agent), journal, 1e5)
        for bar in itertools.islice(feed, cut):
            session.on_bar(bar)
    result = stage.replay(path, bars, agent)
    whole = stage.replay(tmp_path / "whole.db", bars, agent)
    assert result == whole  # the head's hash among it
    assert digest(path) == digest(tmp_path / "whole.db")


def test_more_bars_go_on_from_a_finished_session(path, stage):
    bars, agent = stage.bars(), stage.agent()
    stage.replay(path, bars[:60], agent)
    result = stage.replay(path, bars, agent)
    assert result["bars"] == 80
    assert len(bodies(path, "bar")) == 80
    assert result["orders"] == len(bodies(path, "order_intent"))


@pytest.mark.parametrize("row", [0, 60])
def test_bars_that_changed_since_are_a_divergence(path, stage, row):
    bars, agent = stage.bars(), stage.agent()
    stage.replay(path, bars, agent)
    high = bars.high.copy()
    high[row, 0] += 0.01
    before = verify(path)
    with pytest.raises(StateError, match=r"diverged at seq \d+, bar .*AAA\[1\]"):
        stage.replay(path, replace(bars, high=high), agent)
    assert verify(path) == before


def test_an_agent_that_decides_otherwise_is_a_divergence(path, stage):
    bars = stage.bars()
    stage.replay(path, bars, stage.agent())
    other = stage.agent(decide=lambda w, p, a: stage.momentum(w, p, a) * 1.001)
    with pytest.raises(StateError, match=r"diverged at seq \d+, decision"):
        stage.replay(path, bars, other)


def test_another_session_does_not_write_into_this_journal(path, stage):
    bars = stage.bars()
    stage.replay(path, bars, stage.agent())
    before = verify(path)
    with pytest.raises(
        ConfigError, match=r"another session \(capital 100000\.0 there, 5\.0 here\)"
    ):
        stage.replay(path, bars, stage.agent(), capital=5.0)
    with pytest.raises(ConfigError, match="costs"):
        stage.replay(path, bars, stage.agent(costs=type(stage.costs)()))
    assert verify(path) == before


def paying_more(exchange):
    """The exchange, which takes one part in a million more from the fifth execution on."""
    book, count = exchange._book, itertools.count(1)

    def wrong(index, units, price, *rest):
        return book(index, units, price * (1 + 1e-6 * (next(count) >= 5)), *rest)

    exchange._book = wrong
    return exchange


def test_books_that_differ_halt_and_stay_halted(path, stage):
    bars, agent = stage.bars(), stage.agent()
    with pytest.raises(HaltError, match="books-differ"):
        stage.replay(path, bars, agent, venue=paying_more(stage.exchange(agent)))
    verify(path)
    events = list(read_events(path))
    assert [e.kind for e in events[-2:]] == ["snapshot", "halt"]
    assert len([e for e in events if e.kind == "fill"]) in (5, 6)
    with pytest.raises(HaltError, match="was halted at"):
        stage.replay(path, bars, agent)
    assert list(read_events(path)) == events


class Forgets(Exchange):
    """Loses every tenth order, as a venue can."""

    count = 0

    def work(self, orders):
        self.count += bool(orders)
        return super().work(orders if self.count % 10 else [])


def test_a_lost_order_halts(path, stage):
    agent = stage.agent()
    with pytest.raises(HaltError, match="books-differ"):
        stage.replay(path, stage.bars(), agent, venue=stage.exchange(agent, kind=Forgets))


def failing(stage, rows, value):
    """Momentum, but `value` in a logit at some rows, counted in decisions."""
    calls = itertools.count()

    def decide(window, present, account):
        logits = stage.momentum(window, present, account)
        if next(calls) in rows:
            logits[0, 0] = value
        return logits

    return decide


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_policy_that_is_not_finite_holds_what_it_has(path, stage, value):
    agent = stage.agent(decide=failing(stage, {10, 11, 20}, value))
    result = stage.replay(path, stage.bars(), agent)
    assert result["decisions"] == 73
    assert [b["code"] for b in bodies(path, "risk")] == ["policy-not-finite"] * 3
    held = [b for b in bodies(path, "decision") if b["target"][0] is None]
    assert len(held) == 3
    times = {e.ts_event for e in read_events(path, "risk")}
    assert not times & {e.ts_event for e in read_events(path, "order_intent")}


def test_three_failures_of_the_policy_in_a_row_halt(path, stage):
    agent = stage.agent(decide=failing(stage, {10, 11, 12}, np.nan))
    with pytest.raises(HaltError, match="policy-not-finite"):
        stage.replay(path, stage.bars(), agent)
    assert len(bodies(path, "decision")) == 13
    verify(path)


def test_a_logit_of_the_wrong_shape_is_not_acted_upon(path, stage):
    agent = stage.agent(decide=lambda w, p, a: np.zeros((1, 3)))
    with pytest.raises(HaltError, match="policy-not-finite"):
        stage.replay(path, stage.bars(), agent)


def test_ruin_halts(path, stage):
    bars = stage.bars(symbols=("AAA",))
    close = bars.close.copy()
    close[60:] *= 4.0
    bars = replace(bars, open=close, high=close, low=close, close=close)
    agent = stage.agent(
        symbols=("AAA",), targets=(0.0, -0.9), decide=lambda w, p, a: np.array([[0.0, 1.0]])
    )
    with pytest.raises(HaltError, match="ruined"):
        stage.replay(path, bars, agent)
    assert len(bodies(path, "bar")) == 61


def send(path, stage, bars):
    """A session fed with bars of the test's own making."""
    agent, feed = stage.agent(), stage.Given(bars)
    with Journal(path, lambda: 0) as journal:
        return open_session(agent, feed, stage.exchange(agent), journal, 1e5).trade()


def test_a_rejected_bar_is_journalled_and_decides_nothing(path, stage, tmp_path):
    good = list(ReplayFeed(stage.bars()))
    bad = good[40]._replace(close=np.array([np.nan, 100.0]))
    result = send(path, stage, [*good[:41], good[40], bad, good[39], *good[41:]])
    assert result["rejected"] == 2  # the very same bar again is no fault
    assert [b["reason"] for b in bodies(path, "bar_rejected")] == ["D021", "D020"]
    clean = send(tmp_path / "clean.db", stage, good)
    assert (clean["equity"], clean["orders"]) == (result["equity"], result["orders"])


def test_three_bad_bars_in_a_row_halt(path, stage):
    good = list(ReplayFeed(stage.bars()))
    bad = [bar._replace(open=-bar.open) for bar in good[40:43]]
    with pytest.raises(HaltError, match="bad-bars"):
        send(path, stage, [*good[:40], *bad])
    assert [b["reason"] for b in bodies(path, "bar_rejected")] == ["D008"] * 3
    verify(path)


def stepped(core, state, bar):
    legs = core.legs(state, bar)
    return core.step(state, bar, legs, core.modelled(state, bar, legs))


def test_the_step_is_pure(stage):
    """The same state and bar twice give the same outcome, and leave the state as it was."""
    core, state = Core(stage.agent(), "0123456789abcdef"), None
    state = core.begin()
    for bar in list(ReplayFeed(stage.bars()))[:40]:
        before = [np.array(leaf) for leaf in jax.tree.leaves((state.memory, state.account))]
        first, outcome = stepped(core, state, bar)
        second, again = stepped(core, state, bar)
        assert repr(outcome) == repr(again)
        for one, two in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
            np.testing.assert_array_equal(one, two)
        after = jax.tree.leaves((state.memory, state.account))
        for one, two in zip(before, after, strict=True):
            np.testing.assert_array_equal(one, two)
        state = first


def test_memory_does_not_grow_with_the_bars(stage):
    core = Core(stage.agent(), "0123456789abcdef")
    state, sizes = core.begin(), []
    for bar in ReplayFeed(stage.bars()):
        state, _ = stepped(core, state, bar)
        sizes.append(sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(state[2:6])))
    assert len(set(sizes[stage.first_decision :])) == 1


def test_nothing_is_compiled_after_the_first_decisions(path, stage):
    bars, agent = stage.bars(), stage.agent()
    core = Core(agent, "0123456789abcdef")
    state = core.begin()
    compiled = []
    for bar in ReplayFeed(bars):
        state, _ = stepped(core, state, bar)
        compiled.append(sum(each._cache_size() for each in programs(agent.rules)))
    assert compiled[stage.first_decision + 2] == compiled[-1] > 0


def test_deferred_warm_up_bars_are_all_in_the_journal(path, stage):
    bars = stage.bars(num_bars=300)
    start = int(bars.time[280].astype("datetime64[s]").astype(int))
    result = stage.replay(path, bars, stage.agent(), start=start)
    assert (len(bodies(path, "bar")), result["decisions"]) == (300, 20)
    assert verify(path).hash == result["head"]


def test_the_broker_hears_nothing_that_is_not_on_disk(path, stage):
    """At each call the journal file, read by another connection, has every intent sent."""
    agent = stage.agent()

    class Watching(Exchange):
        seen = 0

        def work(self, orders):
            known = {e.key for e in read_events(path, "order_intent")}
            assert {order.client_id for order in orders} <= known
            self.seen += len(orders)
            return super().work(orders)

    venue = stage.exchange(agent, kind=Watching)
    stage.replay(path, stage.bars(), agent, venue=venue)
    assert venue.seen > 20


def test_a_session_that_was_stopped_at_the_last_bar_ends_there_too(path, stage):
    bars, agent = stage.bars(), stage.agent()
    feed, last = ReplayFeed(bars), int(bars.seconds[-1])
    with Journal(path, feed.now) as journal:
        session = open_session(agent, feed, stage.exchange(agent), journal, 1e5)
        session.trade(lambda: feed.now() == last * 10**9)
    stage.replay(path, bars, agent)
    assert [body.get("stopped") for body in bodies(path, "run_ended")] == [True, None]


def test_a_full_disk_stops_before_the_order_and_goes_on_when_there_is_space(
    path, stage, tmp_path, digest
):
    bars, agent = stage.bars(), stage.agent()
    feed = ReplayFeed(bars)
    with pytest.raises(StateError, match="full"), Journal(path, feed.now) as journal:
        journal._db.execute("PRAGMA max_page_count = 12")
        open_session(agent, feed, stage.exchange(agent), journal, 1e5).trade()
    verify(path)
    assert 0 < len(bodies(path, "bar")) < 80
    stage.replay(path, bars, agent)
    stage.replay(tmp_path / "whole.db", bars, agent)
    assert digest(path) == digest(tmp_path / "whole.db")


def test_bars_of_before_1970_are_traded_as_later_ones(path, stage, tmp_path):
    early, late = stage.bars(start="1950-01-01"), stage.bars(start="1990-01-01")
    found = stage.replay(path, early, stage.agent())
    later = stage.replay(tmp_path / "later.db", late, stage.agent())
    assert (found["equity"], found["fills"]) == (later["equity"], later["fills"])
    for journal, bars in ((path, early), (tmp_path / "later.db", late)):
        fills = list(read_events(journal, "fill"))
        assert all(event.ts_event == event.body["ts"] for event in fills)
        assert fills[0].ts_event >= bars.time[0].astype("datetime64[ns]").astype(int)
