"""What the dashboard says of journals that are small enough to compute by hand."""

import json
import math
import time

import pytest

from nca_trader.paper.journal.journal import Event, Journal, read_events
from nca_trader.paper.journal.tally import Tally
from nca_trader.watch.dashboard.session import Vitals, session_view

DAY = 86_400 * 10**9
RUN = "0123456789abcdef"
STARTED = {
    "symbols": ["X", "Y"], "capital": 1000.0, "actions": "direction", "targets": [-0.5, 0.0, 0.5],
    "costs": {"slippage": 0.001}, "rules": {"fill": "next_open", "max_gross": 1.0},
    "limits": {"max_drawdown": 0.25, "max_daily_loss": None},
}  # fmt: skip


def bar(x, y=None):
    """Open and close of X and, where it has a bar, of Y."""
    made = {"X": [x[0], max(x), min(x), x[1], 5.0]}
    return made | {"Y": None if y is None else [y[0], max(y), min(y), y[1], 5.0]}


def snapshot(equity, weights, cash):
    return {
        "equity": equity, "weight": weights, "cash": cash, "units": [2.0, 0.0],
        "value": 1000.0 * equity,
    }  # fmt: skip


# Decided at the close of day 2, filled at the open of day 3, a quarter of a percent worse.
STORY = [
    ("run_started", "", STARTED, 1),
    ("bar", "1", bar((90.0, 95.0), (10.0, 10.0)), 1),
    ("bar", "2", bar((95.0, 100.0), (10.0, 10.0)), 2),
    ("decision", "2", {"target": [0.5, 0.0],
                       "logits": [[0.0, 0.0, math.log(2.0)], [0.0, math.log(6.0), 0.0]],
                       "action": [2, 1]}, 2),
    ("risk", "2:X", {"code": "max_order", "symbol": "X", "detail": {"to": 0.4}}, 2),
    ("order_intent", "a", {"client_id": "a", "symbol": "X", "weight": 0.4}, 2),
    ("snapshot", "2", snapshot(1.0, [0.0, 0.0], 1000.0), 2),
    ("order_ack", "a", {}, 2),
    ("bar", "3", bar((200.0, 240.0), (20.0, 10.0)), 3),
    ("fill", "a@3", {"client_id": "a", "execution_id": "a@3", "symbol": "X", "units": 2.0,
                     "price": 200.5, "commission": 0.5, "ts": 3 * DAY}, 3),
    ("decision", "3", {"target": [None, None], "logits": [[0.0] * 3] * 2, "action": [0, 0]}, 3),
    ("snapshot", "3", snapshot(1.08, [0.5, 0.0], 599.0), 3),
    ("bar_rejected", "3:x", {"reason": "duplicate-time", "bar": {}}, 3),
    ("bar", "4", bar((240.0, 150.0)), 4),
    ("decision", "4", {"target": [None, None], "logits": [[0.0] * 3] * 2, "action": [0, 0]}, 4),
    ("snapshot", "4", snapshot(0.81, [0.37, 0.0], 599.0), 4),
]  # fmt: skip


def told(story, path, late=0):
    """The book of a story, by way of a real journal."""
    now = [0]
    with Journal(path, lambda: now[0]) as journal:
        for kind, key, body, day in story:
            now[0] = day * DAY + late
            journal.record(RUN, kind, key, body, day * DAY)
    book = Tally()
    book.add_all(read_events(path))
    return book


def texts(view, key):
    return [[cell["text"] for cell in row] for row in view["tables"][key]["rows"]]


def tile(view, key):
    found = next(tile for tile in view["tiles"] if tile["key"] == key)
    return found["value"], found["note"]


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    return told(STORY, tmp_path_factory.mktemp("told") / "j.sqlite")


def test_equity_buy_and_hold_and_drawdown_are_those_of_a_hand_count(book):
    # Half the money bought X at 200 and half Y at 20, at the open after the first decision.
    assert book.hold == pytest.approx([1.0, (240 / 200 + 10 / 20) / 2, (150 / 200 + 10 / 20) / 2])
    assert book.equity == [1.0, 1.08, 0.81]
    assert book.drawdown == pytest.approx([0.0, 0.0, -0.25])
    view = session_view(book, Vitals("j", now=0.0))
    assert tile(view, "return") == ("-19.00%", "buy and hold -37.50%")
    assert tile(view, "drawdown") == ("25.00%", "largest 25.00%")
    assert view["charts"]["equity"]["lines"][1]["y"][-1] == 0.625


def test_an_order_says_why_it_was_sent_and_what_it_cost(book):
    view = session_view(book, Vitals("j", now=0.0))
    (row,) = texts(view, "orders")
    # p = 2 / (1 + 1 + 2); the fill is 0.5 of 200 above the open.
    assert row[1:] == [
        "X", "to +40.00%", "long 50%, p 0.50; limit: max_order, to 0.4", "filled", "buy 2",
        "200.5", "25.0 bp",
    ]  # fmt: skip
    assert "modelled 10.0 bp" in view["tables"]["orders"]["note"]
    assert tile(view, "trading")[1].endswith("fees 0.50")


def test_probabilities_are_the_softmax_of_the_logits(book):
    early = Tally()
    for kind, key, body, day in STORY[:4]:
        early.add(Event(1, RUN, day * DAY, day * DAY, kind, key, body))
    view = session_view(early, Vitals("j", now=0.0))
    assert view["tables"]["why"]["headers"][2:] == ["short 50%", "flat", "long 50%"]
    assert texts(view, "why") == [
        ["X", "+50.0%", "25%", "25%", "50%"], ["Y", "0.0%", "12%", "75%", "12%"]
    ]  # fmt: skip


def test_gauges_compare_limits_with_present_values(book):
    gauges = {row[0]: row[1:] for row in texts(session_view(book, Vitals("j", 0.0)), "gauges")}
    assert gauges["Gross position"] == ["37.0%", "100.0%"]
    assert gauges["Below its peak"] == ["25.0%", "25.0%"]
    assert gauges["Loss today"] == ["25.0%", "no limit"]
    row = session_view(book, Vitals("j", 0.0))["tables"]["gauges"]["rows"][-1]
    assert row[1]["tone"] == "bad" and row[1]["bar"] == 1.0


def test_quality_counts_what_was_rejected_and_missing(book):
    rows = dict(texts(session_view(book, Vitals("j", 0.0)), "quality"))
    assert (rows["Bars used"], rows["Bars rejected"], rows["· duplicate-time"]) == ("4", "1", "1")
    assert rows["Assets without a bar"] == "1"


def test_drift_has_the_newest_warning_of_each_kind_and_the_values_of_now(tmp_path):
    warned = [
        ("drift-feature", {"feature": "rsi", "psi": 0.31, "limit": 0.25}, 3),
        ("drift-feature", {"feature": "rsi", "psi": 0.62, "limit": 0.25}, 5),
        ("drift-slippage", {"excess": 0.0015, "error": 0.0002, "fills": 50}, 4),
    ]
    more = [("risk", f"{day}:{code}", {"code": code, **body}, day) for code, body, day in warned]
    view = session_view(told([*STORY, *more], tmp_path / "j.sqlite"), Vitals("j", 0.0))
    assert texts(view, "drift") == [
        ["Feature rsi", "", "1970-01-06: index 0.62, limit 0.25"],
        # 2 bought at 200, of 1,080, and nothing at the two other snapshots.
        ["Slippage", "25.0 bp, modelled 10.0 bp",
         "1970-01-05: 15.0 bp above the model (standard error 2.0 bp)"],
        ["Turnover", f"{100 * 400 / 1080 / 3:.2f}% a bar", "no warning"],
        ["Feature schema", "", "no warning"],
    ]  # fmt: skip
    tones = [row[2]["tone"] for row in view["tables"]["drift"]["rows"]]
    assert tones == ["warn", "warn", "idle", "idle"]


def test_a_fill_that_the_journal_has_before_its_bar_is_compared_with_that_bars_open(tmp_path):
    """A live session learns of a fill when it looks, at the close of the bar."""
    live = [(kind, key, body | {"venue": "desk"} if kind == "run_started" else body, day)
            for kind, key, body, day in STORY]  # fmt: skip
    fill = next(i for i, row in enumerate(live) if row[0] == "fill")
    live[fill - 1], live[fill] = live[fill], live[fill - 1]
    view = session_view(told(live, tmp_path / "j.sqlite"), Vitals("j", 0.0))
    (row,) = texts(view, "orders")
    assert row[4:] == ["filled", "buy 2", "200.5", "25.0 bp"]


def test_latency_is_from_the_close_and_only_of_a_live_session(book, tmp_path):
    assert session_view(book, Vitals("j", 0.0))["tables"]["latency"]["rows"] == []
    live = told(STORY, tmp_path / "live.sqlite", late=DAY + 20_000_000)
    assert list(live.latencies) == pytest.approx([0.02] * 3)
    view = session_view(live, Vitals("j", 0.0))
    assert "median 20 ms" in view["tables"]["latency"]["note"]
    assert texts(view, "latency")[1] == ["to 30 ms", "3"]


@pytest.mark.parametrize(
    ("more", "vitals", "word"),
    [
        ([], {"holder": "process 7"}, "Running"),
        ([], {}, "Gone"),
        (None, {}, "Waiting"),
        ([("run_ended", "4", {}, 4)], {}, "Ended"),
        ([("run_ended", "4", {"stopped": True}, 4)], {}, "Stopped"),
        ([], {"holder": "process 7", "halt": "too hot (dashboard)"}, "Halt requested"),
        ([("halt", "h", {"code": "file", "detail": {}}, 4)], {}, "Halted"),
        ([("halt", "h", {"code": "file"}, 4), ("resume", "r", {"reason": "fixed"}, 4)],
         {"holder": "process 7"}, "Running"),
        ([("feed", "f", {"code": "stale"}, 4)], {"holder": "process 7"}, "Stale"),
        ([("feed", "f", {"code": "stale"}, 4), ("feed", "g", {"code": "reconnected"}, 4)],
         {"holder": "process 7"}, "Running"),
        ([], {"holder": "process 7", "fault": "damaged at seq 3"}, "Damaged"),
    ],
)  # fmt: skip
def test_the_state_is_one_word(more, vitals, word):
    book = Tally()
    story = [] if more is None else [*STORY, *more]
    for seq, (kind, key, body, day) in enumerate(story, 1):
        book.add(Event(seq, RUN, day * DAY, day * DAY, kind, key, body))
    view = session_view(book, Vitals("/x/my j", now=0.0, **vitals))
    assert view["state"]["word"] == word
    halted = word in ("Halted", "Halt requested")
    assert view["halt"]["on"] == halted
    assert ("resume --journal '/x/my j' --reason" in view["halt"]["command"]) == halted


def test_a_live_bar_that_is_overdue_makes_the_session_stale(tmp_path):
    live = told(STORY, tmp_path / "live.sqlite", late=DAY)
    for days, word in ((6.9, "Running"), (7.1, "Stale")):
        view = session_view(live, Vitals("j", days * 86_400, holder="process 7"))
        assert view["state"]["word"] == word


def test_a_body_that_cannot_be_read_is_left_out_and_counted(tmp_path):
    fill = next(body for kind, _, body, _ in STORY if kind == "fill")
    wrong = [("fill", "b@4", {**fill, "units": "two"}, 4), ("snapshot", "5", {"equity": None}, 5)]
    book = told([*STORY, *wrong], tmp_path / "j.sqlite")
    assert (book.unread, book.equity, book.units) == (2, [1.0, 1.08, 0.81], {"X": 2.0})
    assert book.cash == pytest.approx(1000.0 - 2.0 * 200.5 - 0.5)
    rows = dict(texts(session_view(book, Vitals("j", 0.0)), "quality"))
    assert rows["Events not readable"] == "2"


def test_bodies_of_any_shape_have_a_view():
    book = Tally()
    shapes = [{}, {"target": "x", "logits": 3, "equity": "y", "weight": None, "units": [[]]}]
    kinds = {kind for kind, *_ in STORY} | {"halt", "resume", "cash", "recon", "feed", "newer"}
    for seq, (kind, body) in enumerate((k, b) for k in sorted(kinds) for b in shapes):
        book.add(Event(seq, RUN, 2**62, 2**62, kind, str(seq), body))
    json.dumps(session_view(book, Vitals("j", 0.0)))


def test_ten_thousand_events_make_a_view_at_once():
    book = Tally()
    began = time.process_time()
    for seq in range(10_000):
        kind, key, body, _ = STORY[1 + seq % 7]
        book.add(Event(seq, RUN, seq * DAY, seq * DAY, kind, f"{key}-{seq}", body))
    text = json.dumps(session_view(book, Vitals("j", 0.0)))
    # Thirty times what it takes: a view that reads all events for each row takes minutes.
    assert time.process_time() - began < 10.0
    assert len(text) < 200_000


def test_what_the_books_cannot_read_of_an_event_does_not_hide_the_rest(tmp_path):
    started = {"symbols": ["X"], "rules": {}}  # without the capital that the books begin with
    book = told([("run_started", "", started, 0)], tmp_path / "j.sqlite")
    assert (book.unread, book.symbols) == (1, ["X"])
