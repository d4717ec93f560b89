"""A live session: decisions on the venue's books, restarts, stale bars, notices, halts."""

import contextlib
import dataclasses
import functools
import itertools
import math
import threading

import numpy as np
import pytest
from livedesk import BEGIN, SECOND, Desk, Room, Tape

import nca_trader as nca
from nca_trader.envs.account.risk import bars_of_size, sizes
from nca_trader.errors import ConfigError, HaltError
from nca_trader.paper.feeds.feed import Notice, Pump, ReplayFeed
from nca_trader.paper.journal.journal import read_events
from nca_trader.paper.journal.tally import Paper
from nca_trader.paper.session.agents import strategy_agent
from nca_trader.paper.session.halts import resume
from nca_trader.paper.venue import Answer, Outcome, Unreachable
from nca_trader.paper.venues.exchange import Exchange
from nca_trader.strategies.baselines import baseline_rules
from nca_trader.strategies.targets import strategy_targets
from nca_trader.watch.alerts import Rule


@pytest.fixture
def room(stage, tmp_path):
    return Room(stage, tmp_path)


def test_the_agent_sees_what_the_venue_holds(room, stage):
    """Each decision's account is worked out again from the desk's own fills."""
    seen = []

    def spy(window, present, account):
        seen.append((float(np.exp(account.log_equity)), np.array(account.held)))
        return stage.momentum(window, present, account)

    room.agent = stage.agent(decide=spy)
    result = room.trade()
    assert result["decisions"] == len(seen) == 41 and result["fills"] > 20
    cash, units = 1e5, np.zeros(2)
    fills = iter(room.desk.fills)
    fill = next(fills)
    for row, (equity, weight) in enumerate(seen, start=BEGIN - 1):
        closed = (room.bars.time[row].astype("datetime64[s]").astype(int) + 86_400) * SECOND
        while fill is not None and fill.ts < closed:  # ordered at an earlier close
            cash -= fill.units * fill.price + fill.commission
            units[room.bars.symbols.index(fill.symbol)] += fill.units
            fill = next(fills, None)
        value = cash + units @ room.bars.close[row]
        assert equity == pytest.approx(value / 1e5, rel=1e-12)
        np.testing.assert_allclose(weight, units * room.bars.close[row] / value, rtol=1e-12)


LONG = nca.rules.momentum(60)


def asked_of(room, begin):
    """The numbers of bars of its history that a session asks for."""
    tape, asked = Tape(room.bars, room.folder / "tape", begin), []
    give = tape.history
    tape.history = lambda count: (asked.append(count), give(count))[1]
    room.trade(tape=tape)
    return asked


@pytest.mark.parametrize(
    "strategy",
    [LONG.with_delay(5), nca.blend({"long": (LONG, 1.0), "none": (nca.rules.random(), 0.0)})],
)
@pytest.mark.few(1)
def test_a_strategy_gets_the_bars_that_it_remembers_of_each_asset(stage, tmp_path, strategy):
    """A third of the bars is missing, and its target is that on all bars from the first on."""
    room = Room(stage, tmp_path)
    bars = stage.bars(num_bars=180, missing=0.33)
    traded = np.arange(180)[:, None] >= 149  # a desk needs a price of each
    room.bars = dataclasses.replace(bars, present=bars.present | traded)
    room.agent = strategy_agent(strategy, room.bars, stage.agent().rules)
    asked = asked_of(room, 150)
    assert asked[0] == strategy.history < asked[-1] < 150
    found = [body["target"] for body in room.bodies("decision")]
    assert found == strategy_targets(room.bars, strategy)[149:].tolist()
    assert len({*map(tuple, found)}) > 1


def test_an_asset_without_more_bars_is_asked_for_once_more(stage, tmp_path):
    room = Room(stage, tmp_path)
    present = np.arange(300)[:, None] >= [0, 270]
    room.bars = dataclasses.replace(stage.bars(num_bars=300), present=present)
    room.agent = strategy_agent(LONG, room.bars, stage.agent().rules)
    assert asked_of(room, 290) == [61, 122]


def test_sizes_are_remembered_too(stage, tmp_path):
    room, rules = Room(stage, tmp_path), stage.agent().rules
    room.bars = stage.bars(num_bars=250)
    rules = dataclasses.replace(rules, sizing="volatility", volatility_span=10)
    room.agent = strategy_agent(nca.rules.momentum(5), room.bars, rules)
    asked = asked_of(room, 240)
    assert asked == [bars_of_size(rules)]
    # As a size is on all bars: older ones weigh less than rounding does.
    whole, part = (sizes(bars, rules.scale)[-1] for bars in (room.bars, room.bars[-asked[0] :]))
    np.testing.assert_allclose(part, whole, rtol=1e-14)
    assert not np.allclose(sizes(room.bars[-80:], rules.scale)[-1], whole, rtol=1e-10)


def test_bars_missed_while_away_teach_but_do_not_trade(room):
    room.trade(5)
    decided = room.kinds()["decision"]
    room.miss(10)
    room.trade(1)
    assert room.kinds()["bar"] == 10 + 5 + 10 + 1
    assert room.kinds()["decision"] == decided + 2  # the newest missed bar, and a live one
    times = [e.ts_event for e in read_events(room.path, "bar")]
    assert np.diff(times).tolist() == [86_400 * SECOND] * (len(times) - 1)


def test_books_are_compared_once_after_an_absence(stage, tmp_path):
    """Not at each of the bars that were missed: a venue limits how often it is asked."""
    rounds = []
    for missed in (0, 100):
        room = Room(stage, tmp_path / str(missed), num_bars=140)
        room.trade(5)
        room.miss(missed)
        room.desk.calls.clear()
        room.trade(1)
        assert room.kinds()["bar"] == 10 + 5 + missed + 1
        rounds.append(room.desk.calls.count("holdings"))
    # At the start, at the newest bar that was missed, and at the live one.
    assert rounds == [2, 3]


def test_what_filled_during_an_absence_is_booked(room):
    room.desk = Desk(script=["rests", "rests"])
    room.trade(5)
    waiting = [name for name, order in room.desk.orders.items() if order[2] == "working"]
    room.miss(20)
    for name in waiting:
        room.desk.execute(name, room.desk.orders[name][0].units)
    room.trade(2)
    assert waiting and {b["client_id"] for b in room.bodies("fill")} >= set(waiting)
    for symbol, units in room.desk.units.items():
        booked = [b["units"] for b in room.bodies("fill") if b["symbol"] == symbol]
        assert sum(booked) == pytest.approx(units, abs=1e-9)


@pytest.mark.parametrize("within", [2, 30])
def test_orders_that_no_answer_comes_to_are_events_and_halt_after_three_bars(
    stage, tmp_path, within
):
    """As with a 500 to every order; one that arrives in between starts the count again."""
    flips = itertools.cycle([0.5, -0.4])
    agent = stage.agent(
        symbols=("AAA",), decide=lambda *_: np.eye(3)[[2 if next(flips) > 0.0 else 0]]
    )
    room = Room(stage, tmp_path, agent)
    submit, bars = room.desk.submit, []

    def unheard(ticket):
        bars.append(ticket.client_id.split("-")[2])
        if len(set(bars)) == within:
            return submit(ticket)
        room.desk.submitted.append(ticket)
        return Answer(Outcome.AMBIGUOUS, "http-500")

    room.desk.submit = unheard
    with pytest.raises(HaltError, match="orders-unanswered"):
        room.trade()
    told = [b["in_a_row"] for b in room.bodies("risk") if b["code"] == "orders-unanswered"]
    assert told == ([1, 1, 2, 3] if within == 2 else [1, 2, 3])
    assert {b["reason"] for b in room.bodies("order_terminal")} <= {"never-arrived", "filled"}
    assert room.kinds()["halt"] == 1


FLAWS = {
    "read-only": lambda desk, ticket: Answer(Outcome.REJECTED, "http-401"),
    "no funds": lambda desk, ticket: Answer(Outcome.REJECTED, "no-funds", final=True),
    "429 without end": lambda desk, ticket: Answer(Outcome.BUSY, "rate-limit", math.inf),
    "429 for an hour": lambda desk, ticket: Answer(Outcome.BUSY, "rate-limit", 3600.0),
    "rejected later": lambda desk, ticket: rejected_later(desk, ticket),
}


def rejected_later(desk, ticket):
    desk.orders[ticket.client_id] = [ticket, 0.0, "rejected"]
    return Answer(Outcome.ACCEPTED)


def flipping(stage, tmp_path, desk=None):
    """A session that orders anew at each bar, as prices go up and down in turn."""

    def decide(window, present, account):
        return np.eye(3)[[2 if window[-1, 0, 0] > 0.0 else 0]]

    room = Room(stage, tmp_path, stage.agent(symbols=("AAA",), decide=decide), desk)
    close = np.where(np.arange(60) % 2, 101.0, 100.0)[:, None]
    room.bars = dataclasses.replace(
        room.bars, open=201.0 - close, close=close, high=close * 0 + 101.0, low=close * 0 + 100.0
    )
    return room


@pytest.mark.parametrize(("flaw", "restarts"), [*zip(FLAWS, itertools.cycle([True, False]))])
def test_orders_that_all_fail_are_events_and_halt_after_three_bars(stage, tmp_path, flaw, restarts):
    """Also where each bar has a process of its own; `resume` begins the count again."""
    room = flipping(stage, tmp_path)
    room.trade(2)
    submit, room.desk.submit = room.desk.submit, lambda ticket: FLAWS[flaw](room.desk, ticket)
    if flaw == "rejected later":  # the look-up would see it at once
        room.desk.working = lambda: []

    def failed_bars():
        return [b["in_a_row"] for b in room.bodies("risk") if b["code"] == "orders-refused"]

    for halts in (1, 2):
        bars = room.kinds()["bar"]
        with pytest.raises(HaltError, match=r"orders-refused \(orders 1, in_a_row 3"):
            for _ in range(5) if restarts else [0]:
                room.trade(1 if restarts else 10)
        assert failed_bars() == [1, 2, 3] * halts and room.kinds()["bar"] - bars in (3, 4)
        paper = Paper(room.path)
        paper.poll()
        rule = Rule(name="r", metric="paper_failed_bars", comparison=">=", threshold=3)
        assert rule.holds(paper.metrics(0.0)) and paper.why["paper_failed_bars"]
        resume(room.path, "asked the broker", room.tape().now())
        paper.poll()
        assert paper.metrics(0.0)["paper_failed_bars"] == 0.0
    room.desk.submit = submit
    assert room.trade()["fills"] > 20 and room.kinds()["halt"] == 2


def test_an_order_that_fails_next_to_one_that_fills_halts_nobody(stage, tmp_path):
    flips = itertools.cycle([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    room = Room(stage, tmp_path, stage.agent(decide=lambda *_: np.array([next(flips)] * 2)))
    submit = room.desk.submit
    room.desk.submit = lambda ticket: (
        Answer(Outcome.REJECTED, "http-403") if ticket.symbol == "BBB" else submit(ticket)
    )
    room.trade()
    rejected = [b for b in room.bodies("order_terminal") if b["reason"] == "rejected"]
    assert len(rejected) > 20 and room.kinds()["fill"] > 20 and not room.bodies("halt")
    assert not [b for b in room.bodies("risk") if b["code"] == "orders-refused"]


def test_fills_far_from_the_market_are_events_and_halt_after_three(room):
    execute, prices = room.desk.execute, iter([1.3, 1.0, 0.7, 1.3, 1.3])

    def far(name, units):
        price = room.desk.price[room.desk.orders[name][0].symbol]
        execute(name, units, price * next(prices))

    room.desk.execute = far
    with pytest.raises(HaltError, match="fills-far"):
        room.trade()
    told = [b for b in room.bodies("risk") if b["code"] == "fill-far"]
    assert len(told) == 4  # the second was good, and the count began again
    for body in told:
        low, high = body["market"]
        assert not 0.9 * low < body["price"] < 1.1 * high


def test_a_hole_in_history_is_said(room):
    """The feed gives at most five bars back, and twenty were missed."""
    room.trade(2)
    room.miss(20)
    short = room.tape()
    give = short.history
    short.history = lambda count: give(min(count, 5))
    room.trade(1, short)
    assert [b["code"] for b in room.bodies("feed")] == ["gap"]
    assert room.kinds()["bar"] == 10 + 2 + 5 + 1


def test_a_bar_that_comes_too_late_is_not_traded_on(stage, tmp_path):
    """When it comes the next one has closed as well."""
    room = Room(stage, tmp_path, late=86_401)
    result = room.trade()
    assert result["decisions"] == 0 and room.desk.submitted == []
    assert room.kinds()["bar"] == 50


def test_a_feed_from_the_future_is_refused(stage, tmp_path):
    room = Room(stage, tmp_path, late=-30)
    with pytest.raises(HaltError, match="bad-bars"):
        room.trade()
    assert {b["reason"] for b in room.bodies("bar_rejected")} == {"bar-unfinished"}
    # The newest bar that has closed is the one before.
    closed = room.bars.time[BEGIN - 2].astype(int)
    assert [e.ts_event for e in read_events(room.path, "decision")] == [closed]
    assert {b["bar"] for b in room.bodies("order_intent")} <= {closed // SECOND}


def test_notices_are_journalled(room):
    room.tape_options = {
        "notices": {
            25: [Notice("stale", "no bar for 2 days")],
            30: [Notice("stale", "a"), Notice("reconnected", "b")],
        }
    }
    room.trade()
    assert [b["code"] for b in room.bodies("feed")] == ["stale", "stale", "reconnected"]


@pytest.mark.parametrize("seconds", [31, -31])
def test_clocks_that_differ_halt(room, stage, seconds):
    class Skewed(Desk):
        quote = None

        def __getattribute__(self, name):
            if name == "quote":
                raise AttributeError(name)
            return super().__getattribute__(name)

        def now(self):
            return room.tape().now() + seconds * SECOND

    room.desk = Skewed()
    with pytest.raises(HaltError, match="clock-skew"):
        room.trade()
    assert room.desk.submitted == []
    room.path, late, seconds = room.folder / "later.db", seconds, 0
    room.agent = stage.agent(decide=lambda *_: np.array([[0.0, 1.0, 0.0]] * 2))  # orders nothing
    room.trade(5)
    resumed = room.desk.calls.count("holdings")

    def looked(inner=room.desk.holdings):  # the clocks part after some bars
        nonlocal seconds
        if room.desk.calls.count("holdings") > resumed + 3:
            seconds = late
        return inner()

    room.desk.holdings = looked
    with pytest.raises(HaltError, match="clock-skew"):
        room.trade()
    assert room.kinds()["bar"] < 25


def test_a_venue_that_is_away_for_a_bar_costs_a_bar_and_for_three_halts(room):
    room.trade(3)
    decided = room.kinds()["decision"]
    calls = itertools.count()

    def holdings(inner=room.desk.holdings):
        if next(calls) in (3, 4):
            raise Unreachable("timeout")
        return inner()

    room.desk.holdings = holdings
    room.trade(6)
    assert [b["code"] for b in room.bodies("risk")].count("venue-unreachable") == 2
    assert room.kinds()["decision"] == decided + 4

    away = [False, True, True, False, True, True, False]  # twice two bars, and not four in a row
    room.desk.holdings = lambda inner=room.desk.holdings: (
        never() if away and away.pop(0) else inner()
    )

    def never():
        raise Unreachable("timeout")

    room.trade(6)
    assert not away and not room.bodies("halt")

    start = room.desk.holdings
    count = itertools.count()
    room.desk.holdings = lambda: start() if next(count) < 1 else never()
    with pytest.raises(HaltError, match="venue-unreachable"):
        room.trade()


def test_a_venue_that_is_away_at_the_start_ends_the_command_and_a_later_one_goes_on(room):
    room.desk.down = 1
    with pytest.raises(Unreachable):
        room.trade()
    assert room.trade()["decisions"] == 41


def test_a_rejected_order_is_decided_again_and_one_cancelled_by_hand_is_not(stage, tmp_path):
    always = stage.agent(
        symbols=("AAA",), targets=(0.0, 0.5), decide=lambda w, p, a: np.array([[0.0, 1.0]])
    )
    for script, orders in ((["reject", "reject"], 3), (["rests"], 1)):
        room = Room(stage, tmp_path / script[0], always, Desk(script=script))
        room.trade(3)
        for order in room.desk.orders.values():
            order[2] = "cancelled" if order[2] == "working" else order[2]
        room.trade()
        assert len(room.desk.submitted) == orders
        reasons = [b["reason"] for b in room.bodies("order_terminal")]
        assert reasons == (["rejected", "rejected", "filled"] if orders == 3 else ["cancelled"])


@pytest.mark.parametrize("name", [*baseline_rules(20)][:-1])
@pytest.mark.few(1)
def test_a_target_is_owed_until_it_is_filled(stage, tmp_path, name):
    """Each deployable baseline that trades, where the first three orders are rejected or too old.

    Some order once and never again. In the end the account holds what it holds where nothing
    fails, but for the prices of three bars. Where no order of these bars was taken at all, a
    person lifts a halt in between.
    """
    ends = []
    for fault in ("", "reject", "busy"):
        folder = tmp_path / f"{fault}0"
        room = Room(stage, folder, num_bars=80)
        rule = baseline_rules(20)[name] if "SMA" not in name else nca.rules.sma_cross(3, 8)
        room.agent = strategy_agent(rule, room.bars, stage.agent().rules)
        submit = room.desk.submit
        room.desk.script = [fault] * 3
        room.desk.submit = lambda ticket, submit=submit: patient(submit(ticket))
        tape = functools.partial(Daily, room.bars, folder / "tape", BEGIN, clock=room.clock)
        with contextlib.suppress(HaltError):  # at three bars in a row nothing was taken
            room.trade(tape=tape())
        if room.bodies("halt"):
            resume(room.path, "the venue takes orders again", room.tape().now())
            room.trade(tape=tape())
        ends.append((room, np.array(room.bodies("snapshot")[-1]["weight"])))
    (clean, expected), *failures = ends
    for (failed, found), reason in zip(failures, ("rejected", "too-old"), strict=True):
        np.testing.assert_allclose(found, expected, atol=0.05)
        assert clean.desk.placed and failed.desk.placed
        assert reason in {body["reason"] for body in failed.bodies("order_terminal")}


class Daily(Tape):
    """A tape that moves the clock of waits on by a day before each bar."""

    def __init__(self, *args, clock, **more):
        super().__init__(*args, **more)
        self.clock = clock

    def __iter__(self):
        for item in super().__iter__():
            self.clock.waited += 86_400.0
            yield item


def patient(answer):
    """Busy for longer than an order may wait."""
    return answer._replace(retry_after=70.0) if answer.outcome is Outcome.BUSY else answer


def test_an_order_that_is_refused_for_good_is_an_event_and_not_sent_again(stage, tmp_path):
    room = Room(stage, tmp_path)
    room.agent = strategy_agent(nca.rules.buy_and_hold(), room.bars, stage.agent().rules)
    submit, refused = room.desk.submit, [True]

    def funds(ticket):
        if refused and refused.pop():
            return Answer(Outcome.REJECTED, "no-funds", final=True)
        return submit(ticket)

    room.desk.submit = funds
    room.trade()
    ends = [(b["reason"], b.get("code")) for b in room.bodies("order_terminal")]
    assert ends == [("refused", "no-funds"), ("filled", None)]


def test_a_file_is_seen_between_two_bars(room):
    """Not only at the next one, which may be a day away."""

    class Closed(type(room.tape())):
        def __iter__(self):
            room.path.with_name("paper.db.halt").write_text("now\n")
            over.wait(60.0)
            yield from ()

    over = threading.Event()
    with pytest.raises(HaltError, match="reason now"):
        room.trade(tape=Closed(room.bars, room.folder / "tape", BEGIN))
    over.set()


def test_a_journal_belongs_to_its_venue_and_agent(room, stage):
    room.trade(2)
    room.desk.name = "another"
    with pytest.raises(ConfigError, match="venue desk there, another here"):
        room.trade()


def test_two_journals_of_one_agent_do_not_share_ids(stage, tmp_path):
    ids = []
    for name in ("one", "two"):
        room = Room(stage, tmp_path / name)
        room.tape().path.write_text("20" if name == "one" else "22")
        room.trade(8)
        ids.append(set(room.desk.placed))
    assert ids[0] and ids[1] and not ids[0] & ids[1]


class Repeats(Tape):
    """After a reconnection it sends the last bars again, changed by `change(times sent)`."""

    def __init__(self, *args, count=20, change=lambda n, bar: bar, **more):
        super().__init__(*args, **more)
        self.count, self.change, self.sent = count, change, 0

    def __iter__(self):
        for item in super().__iter__():
            yield item
            if self.place in (40, 45):
                self.sent += 1
                for bar in ReplayFeed(self.bars[self.place - self.count : self.place]):
                    yield self.change(self.sent, bar)


def repeating(room, **more):
    return Repeats(room.bars, room.folder / "tape", BEGIN, **more)


def test_bars_that_come_again_after_a_reconnection_are_dropped(room, stage, tmp_path):
    plain = Room(stage, tmp_path / "plain")
    expected = plain.trade()
    room.trade(22, repeating(room))
    found = room.trade(tape=repeating(room))  # also those of an earlier process
    assert found["equity"] == expected["equity"] and found["bars"] == expected["bars"]
    assert not room.bodies("bar_rejected") and not room.bodies("feed") and not room.bodies("halt")


def test_a_bar_that_is_corrected_several_times_is_an_event_each_time_and_no_bad_bar(room):
    def corrected(sent, bar):
        return bar._replace(close=bar.close * (1.0 + 1e-5 * sent), high=bar.high * 1.01)

    result = room.trade(tape=repeating(room, count=5, change=corrected))
    assert result["rejected"] == 0 and not room.bodies("halt") and result["bars"] == 50
    told = room.bodies("feed")
    assert [body["code"] for body in told] == ["correction"] * 10
    close = float(room.bars.close[39, 0])
    assert f"{close!r}" in told[4]["detail"] and f"{close * 1.00001!r}" in told[4]["detail"]


def test_bars_that_a_feed_leaves_out_are_an_event(room):
    class Holes(Tape):
        def __iter__(self):
            for place, item in enumerate(super().__iter__()):
                if place not in (10, 20, 21):
                    yield item

    room.trade(tape=Holes(room.bars, room.folder / "tape", BEGIN))
    told = room.bodies("feed")
    assert [body["code"] for body in told] == ["gap", "gap"]
    day = (room.bars.time[BEGIN + 9].astype("datetime64[s]"), room.bars.time[BEGIN + 11])
    assert f"between {day[0]} and {day[1].astype('datetime64[s]')}" in told[0]["detail"]


def test_a_feed_that_knows_its_calendar_leaves_out_no_weekend(room):
    class Weekly(Tape):
        def __iter__(self):
            for place, item in enumerate(super().__iter__()):
                if place % 7 < 5:
                    yield item

        def due(self, opened):
            rest = (opened - first) // self.period % 7
            return opened + self.period * (2 if rest < 4 else 4)

    first = int(room.bars.time[BEGIN].astype("datetime64[s]").astype(int))
    room.trade(tape=Weekly(room.bars, room.folder / "tape", BEGIN))
    assert room.bodies("feed") == []


def test_a_feed_that_raises_ends_the_session_with_its_error(stage, tmp_path):
    class Broken(Tape):
        def __iter__(self):
            yield from itertools.islice(super().__iter__(), 3)
            raise ConfigError("the feed broke")

    room = Room(stage, tmp_path)
    room.tape = lambda: Broken(room.bars, room.folder / "tape", BEGIN)
    with pytest.raises(ConfigError, match="the feed broke"):
        room.trade()
    assert room.kinds()["bar"] == 13


def test_the_pump_asks_for_one_item_at_a_time():
    given = []

    def feed():
        for i in range(3):
            given.append(i)
            yield i

    pump = Pump(feed())
    assert given == []
    assert pump.get(5.0) == 0 and given == [0]
    assert pump.get(5.0) == 1 and pump.get(5.0) == 2
    assert pump.get(5.0) is Pump.END


def test_live_orders_in_units_earn_what_a_backtest_of_their_targets_does(stage, tmp_path):
    """Filled at the close that was seen, a target in units is the backtest's target weight.

    The backtest knows weights alone; the exchange keeps units and cash, and the session sizes
    orders from these.
    """
    agent = stage.agent(fill="close", targets=(-0.4, 0.0, 0.5))
    room = Room(stage, tmp_path, agent)
    room.bars = stage.bars(num_bars=80)
    books = tmp_path / "books"
    room.desk = Exchange(books, 1e5, agent.symbols, agent.rules)
    result = room.trade()
    assert result["fills"] > 20
    targets = stage.decided(room.path, room.bars)
    expected = nca.backtest(room.bars, targets, stage.costs, "close", "on_change", max_gross=1.0)
    assert result["value"] / 1e5 == pytest.approx(expected.equity.iloc[-1], rel=1e-9)
    # At every bar before, by the cash and units of the next snapshot, which the next bar moves.
    snapshots = room.bodies("snapshot")
    for row, (now, after) in enumerate(itertools.pairwise(snapshots), start=BEGIN - 1):
        value = after["cash"] + np.dot(after["units"], room.bars.close[row])
        assert value / 1e5 == pytest.approx(expected.equity.iloc[row], rel=1e-9)
        assert now["value"] >= value - 1e-6  # less what the orders of this close cost


@pytest.mark.parametrize("seconds", [86_400, 30])
def test_a_price_a_hundred_times_the_last_is_not_traded_on(room, seconds):
    """The desk would fill at that price; only the bar after it decides what it was.

    With bars of 30 s the decision at that bar would still be young enough to be sent.
    """
    spike, room.tape_options["period"] = 40, seconds
    time = room.bars.time[0] + np.arange(len(room.bars)) * np.timedelta64(seconds, "s")
    room.bars = dataclasses.replace(room.bars, time=time)
    close, high = room.bars.close.copy(), room.bars.high.copy()
    close[spike, 0] *= 100.0
    high[spike, 0] = close[spike, 0]
    room.bars = dataclasses.replace(room.bars, close=close, high=high)
    room.trade()
    (held,) = room.bodies("bar_rejected")
    assert held["reason"] == "D026" and held["held"]
    symbol = room.bars.symbols[0]
    said = [b for b in room.bodies("risk") if b["code"].startswith("bar-")]
    assert said == [{"code": "bar-not-confirmed", "symbols": [symbol]}]
    row = next(e for e in read_events(room.path, "bar") if _row(room.bars, e) == spike)
    assert row.body[symbol] is None and row.body[room.bars.symbols[1]] is not None
    assert spike not in {_row(room.bars, e) for e in read_events(room.path, "decision")}
    assert max(f.price for f in room.desk.fills if f.symbol == symbol) < 5 * close[0, 0]
    rows = [_row(room.bars, e) for e in read_events(room.path, "bar")]
    assert rows == list(range(rows[0], len(room.bars)))


@pytest.mark.parametrize("by", ["limit", "file", "file before the start"])
def test_a_halt_cancels_what_waits_at_the_venue(stage, tmp_path, by):
    """Or an order that waits for the next open would fill after it."""
    room = Room(stage, tmp_path, stage.agent(risk=nca.Limits(max_drawdown=0.01)))
    room.desk.script = [None] * 4 * (by == "limit") + ["rests"] * 99
    asks, threads = room.path.with_name("paper.db.halt"), []

    class Away(Desk):
        """The same desk behind a network: it gets no bars, and another thread asks it."""

        quote = property()

        def cancel(self, client_id):
            threads.append(threading.current_thread().name)
            return super().cancel(client_id)

    if by == "file":
        room.tape_options["notices"] = {23: Asks(asks)}
    elif by != "limit":
        room.trade(3)
        asks.write_text("now\n")
        room.desk.__class__ = Away
    with pytest.raises(HaltError, match="drawdown" if by == "limit" else "reason now"):
        room.trade()
    states = [order[2] for order in room.desk.orders.values()]
    assert "cancelled" in states and "working" not in states
    assert set(threads) == ({"venue"} if "start" in by else set())


class Asks:
    """No notices; but where a feed comes to them, somebody asks for a halt."""

    def __init__(self, file):
        self.file = file

    def __iter__(self):
        self.file.write_text("now\n")
        return iter(())


def test_a_target_whose_order_a_halt_cancelled_is_owed_after_resume(stage, tmp_path):
    room = Room(stage, tmp_path, desk=Desk(script=["rests", "rests"]))
    rule = nca.rules.buy_and_hold()
    room.agent = strategy_agent(rule, room.bars, stage.agent().rules)
    room.trade(1)
    room.path.with_name("paper.db.halt").write_text("now\n")
    with pytest.raises(HaltError, match="reason now"):
        room.trade()
    resume(room.path, "looked at it", room.tape().now())
    room.trade()
    ends = [body["reason"] for body in room.bodies("order_terminal")]
    assert ends == ["abandoned", "abandoned", "filled", "filled"]
    assert all(room.desk.units[symbol] > 0.0 for symbol in room.bars.symbols)


def test_a_fill_that_only_the_exchange_knows_counts_once_after_resume(stage, tmp_path):
    """It has the very time of the exchange's clock, at which its books are taken over."""
    agent = stage.agent(fill="close")
    room = Room(stage, tmp_path, agent)
    room.desk = Exchange(tmp_path / "books", 1e5, agent.symbols, agent.rules)
    submit = room.desk.submit

    def asks(ticket):
        room.path.with_name("paper.db.halt").write_text("now\n")
        return submit(ticket)

    room.desk.submit = asks
    with pytest.raises(HaltError, match="reason now"):
        room.trade()
    room.desk.submit = submit
    assert len(room.desk.activity(0).fills) == 1 and not room.bodies("fill")
    resume(room.path, "looked at it", room.tape().now())
    value = room.trade()["value"]
    assert room.bodies("recon")[-1]["fills"] == [room.desk.activity(0).fills[0].execution_id]
    cash, units = room.desk.position()
    assert value == pytest.approx(cash + units @ room.bars.close[-1], rel=1e-12)


def test_a_bar_at_which_a_venue_does_not_answer_twice_has_both_reasons(room):
    """Halted at a bar and resumed, the session comes to that bar again."""
    room.trade(3)
    holdings, answers = room.desk.holdings, [None, *["timeout"] * 3]

    def asked():
        if answers and (reason := answers.pop(0)):
            raise Unreachable(reason)
        return holdings()

    room.desk.holdings = asked
    with pytest.raises(HaltError, match="venue-unreachable"):
        room.trade()
    resume(room.path, "it answers", room.tape().now())
    answers[:] = [None, None, "http-500"]  # at the start and where the books are taken over
    room.trade()
    assert [b["reason"] for b in room.bodies("risk")] == ["timeout"] * 3 + ["http-500"]


def test_after_resume_unusable_decisions_are_counted_anew(stage, tmp_path):
    room = Room(stage, tmp_path)
    moves = np.diff(np.log(room.bars.close[:, 0])).astype(np.float32)
    bad = moves[[24, 25, 26, 27, 28]]  # the third halts; two more do not

    def decide(window, present, account):
        logits = stage.momentum(window, present, account)
        return logits * np.nan if np.isclose(bad, window[-1, 0, 0]).any() else logits

    room.agent = stage.agent(decide=decide)
    with pytest.raises(HaltError, match="policy-not-finite"):
        room.trade()
    resume(room.path, "looked at it", room.tape().now())
    assert room.trade()["bars"] == 50
    assert [b["code"] for b in room.bodies("risk")] == ["policy-not-finite"] * 5


@pytest.mark.parametrize("fill", ["close", "next_open"])
def test_a_margin_call_leaves_live_and_replay_with_the_same_positions(stage, tmp_path, fill):
    """The target that stood before the call is a new order after it, in both."""
    agent = stage.agent(
        targets=(0.0, 1.5), decide=lambda *_: np.array([[0.0, 1.0]] * 2), fill=fill,
        max_gross=3.0, borrow=True, maintenance_margin=0.25,
    )  # fmt: skip
    room = Room(stage, tmp_path, agent)
    bars, fall = room.bars, 35
    after = np.arange(len(bars))[:, None] >= fall
    open_ = np.where(after & (np.arange(len(bars))[:, None] > fall), 0.8, 1.0) * bars.open
    close = np.where(after, 0.8, 1.0) * bars.close
    high, low = np.maximum(open_, close) * 1.001, np.minimum(open_, close) * 0.999
    room.bars = dataclasses.replace(bars, open=open_, high=high, low=low, close=close)
    room.desk = Exchange(tmp_path / "books", 1e5, agent.symbols, agent.rules)
    live = room.trade()
    begin = int(bars.seconds[BEGIN - 1])
    replayed = stage.replay(tmp_path / "replay.db", room.bars, agent, start=begin)
    ids = [
        [(body["client_id"].split("-")[0], body["symbol"]) for body in bodies]
        for bodies in (
            room.bodies("fill"),
            [event.body for event in read_events(tmp_path / "replay.db", "fill")],
        )
    ]
    assert ids[0] == ids[1] and {name for name, _ in ids[0]} == {"nca", "margin"}
    # At the open an order in units is of another price than its weight.
    near = 1e-9 if fill == "close" else 1e-3
    assert live["value"] == pytest.approx(replayed["value"], rel=near)


def test_an_asset_that_is_paid_out_while_nobody_trades_halts_nobody(stage, tmp_path):
    agent = stage.agent(
        targets=(0.0, 0.4), decide=lambda *_: np.array([[0.0, 1.0]] * 2), delist_after=4
    )
    values = []
    for away in (0, 12):
        folder = tmp_path / str(away)
        room = Room(stage, folder, agent)
        gone = (np.arange(len(room.bars)) >= 30)[:, None] & np.array([True, False])
        fields = {
            name: np.where(gone, room.bars.close[29], getattr(room.bars, name))
            for name in ("open", "high", "low", "close")
        }
        volume = np.where(gone, 0.0, room.bars.volume)
        room.bars = dataclasses.replace(room.bars, present=~gone, volume=volume, **fields)
        room.desk = Exchange(folder / "books", 1e5, agent.symbols, agent.rules)
        room.trade(7)
        room.miss(away)
        values.append(room.trade()["value"])
        assert "delisted" in [body["client_id"] for body in room.bodies("fill")]
        assert "bars-missing" not in [body["code"] for body in room.bodies("halt")]
    assert values[0] == values[1]


@pytest.mark.parametrize("fill", ["close", "next_open"])
def test_income_and_spreads_of_a_live_session_are_those_of_a_hand_ledger(stage, tmp_path, fill):
    """Dividends, funding and half-spreads over two restarts, by plain sums of the fills."""
    agent = stage.agent(fill=fill, costs=nca.Costs(commission=1e-3))
    room = Room(stage, tmp_path, agent)
    bars, rng = room.bars, np.random.default_rng(1)
    dividend = np.where(rng.random(bars.close.shape) < 0.2, 0.7, 0.0)
    funding = 1e-4 * rng.standard_normal(bars.close.shape)
    more = {"half_spread": np.full(bars.close.shape, 3e-4), "dividend": dividend}
    room.bars = dataclasses.replace(bars, funding=funding, **more)
    room.desk = Exchange(tmp_path / "books", 1e5, agent.symbols, agent.rules)
    for count in (9, 7, 100):
        value = room.trade(count)["value"]
    fills = room.desk.activity(0).fills
    cash, units = 1e5, np.zeros(2)
    for row in range(BEGIN - 1, len(bars)):
        cash += units @ dividend[row]
        filled = [f for f in fills if f.ts == (int(bars.seconds[row]) + 86_400) * SECOND]
        if fill == "close":
            cash -= (funding[row] * units) @ bars.close[row]
        for each in filled:
            asset = bars.symbols.index(each.symbol)
            market = (bars.close if fill == "close" else bars.open)[row, asset]
            assert each.price == pytest.approx(market * (1 + np.sign(each.units) * 3e-4))
            cash -= each.units * each.price + abs(each.units) * each.price * 1e-3
            units[asset] += each.units
        if fill == "next_open":
            cash -= (funding[row] * units) @ bars.close[row]
    assert len(fills) > 20
    assert value == pytest.approx(cash + units @ bars.close[-1], rel=1e-12)


def _row(bars, event):
    return int(np.searchsorted(bars.time.astype("datetime64[ns]").astype(int), event.ts_event))


class Races(Desk):
    """Fills half of an order while it is being cancelled."""

    def cancel(self, client_id):
        ticket, filled, status = self.orders[client_id]
        if status == "working":
            self.execute(client_id, (ticket.units - filled) / 2.0)
        return super().cancel(client_id)


def test_what_fills_while_it_is_withdrawn_is_seen_at_the_next_bar_also_after_a_restart(
    stage, tmp_path
):
    def sees(window, present, account):
        return stage.momentum(window, present, account) + 1e-9 * np.asarray(account.held)[:, None]

    whole = Room(stage, tmp_path / "whole", stage.agent(decide=sees), Races(script=["rests"] * 99))
    parts = Room(stage, tmp_path / "parts", stage.agent(decide=sees), Races(script=["rests"] * 99))
    whole.trade()
    assert any(fill.units for fill in whole.desk.fills) and "cancel" in whole.desk.calls
    for bars in (9, 7, 100):
        parts.trade(bars)
    assert parts.bodies("decision") == whole.bodies("decision")
    assert parts.bodies("fill") == whole.bodies("fill")


def test_a_kill_between_a_decision_and_its_orders_leaves_the_target_owed(stage, tmp_path):
    """The decision is on disk, what it replaces is withdrawn, and nothing was ordered yet."""
    room = Room(stage, tmp_path, desk=Desk(script=["rests"] * 99))
    killed = []

    class Dies(Desk):
        def cancel(self, client_id):
            super().cancel(client_id)
            killed.append(client_id)
            raise KeyboardInterrupt

    room.desk.__class__ = Dies
    with pytest.raises(KeyboardInterrupt):
        room.trade()
    assert killed
    (symbol,) = {o[0].symbol for name, o in room.desk.orders.items() if name == killed[0]}
    wanted = room.bodies("decision")[-1]["target"][room.bars.symbols.index(symbol)]
    assert wanted is not None
    before = len(room.bodies("order_intent"))
    room.desk.__class__, room.desk.script = Desk, []
    room.trade(2)
    sent = room.bodies("order_intent")[before:]
    assert symbol in [body["symbol"] for body in sent]


@pytest.mark.heavy
def test_a_strategy_that_sees_its_portfolio_sees_the_same_after_a_restart(stage, tmp_path):
    def act(state, bar, portfolio):
        leave = portfolio.bars_held >= 4
        fell = (bar.close < portfolio.best_price * 0.99) & (portfolio.bars_held > 0)
        target = np.where(False, 0.0, 0.4)
        import jax.numpy as jnp

        return state, jnp.where(leave | fell, 0.0, target * jnp.ones_like(bar.close))

    strategy = nca.Strategy(lambda n: 0.0, act, "patient")
    results = []
    for name, stops in (("whole", 0), ("cut", 12)):
        room = Room(stage, tmp_path / name)
        room.agent = strategy_agent(strategy, room.bars, stage.agent().rules)
        for _ in range(stops):
            room.trade(3)
        room.trade()
        results.append([b["target"] for b in room.bodies("decision")])
        assert {t for row in results[-1] for t in row} == {0.0, 0.4}
    assert results[0] == results[1]
