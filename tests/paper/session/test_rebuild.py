"""A journal repeats from its own bars, and the first event that does not is named."""

import dataclasses
import itertools

import numpy as np
import pytest
from drawn import random_bars
from livedesk import Room

import nca_trader as nca
from nca_trader.cli import main
from nca_trader.data.bars import write_bars
from nca_trader.errors import ConfigError, HaltError
from nca_trader.paper.feeds.feed import ReplayFeed
from nca_trader.paper.journal.journal import Journal, read_events, verify
from nca_trader.paper.session.halts import resume
from nca_trader.paper.session.rebuild import rebuild
from nca_trader.paper.session.subjects import subject_on
from nca_trader.paper.session.trade import open_session, paper_trade

RULE = nca.rules.sma_cross(3, 9)


@pytest.fixture(scope="module")
def traded(stage, tmp_path_factory):
    """A journal of a rule over bars with gaps, dividends and funding, and its bars."""
    folder = tmp_path_factory.mktemp("traded")
    bars = stage.bars(num_bars=90, missing=0.1)
    rng = np.random.default_rng(5)
    paid = np.where(rng.random(bars.close.shape) < 0.05, 0.3, 0.0) * bars.present
    bars = dataclasses.replace(bars, dividend=paid, funding=1e-4 * bars.present)
    write_bars(bars, folder / "bars.parquet")
    feed = f"replay:{folder}/bars.parquet"
    paper_trade(RULE, feed, folder / "paper.db", start="2020-01-20", costs=stage.costs)
    return folder


def test_a_replay_of_the_journals_own_bars_repeats_every_event(traded, stage):
    found = rebuild(traded / "paper.db", RULE, costs=stage.costs)
    assert found.difference == "" and found.bars == 90 and found.decisions > 60
    kinds = {event.kind for event in read_events(traded / "paper.db")}
    assert {"fill", "cash", "snapshot", "order_intent"} <= kinds
    assert "bit for bit" in found.sentence


def test_a_loss_counts_anew_after_bad_bars_that_a_person_forgave(stage, path):
    """6% are lost before three bad bars and 6% after them; the limit is 10% from a peak."""
    bars = random_bars(np.random.default_rng(0), 40, 1)
    close = np.repeat([100.0, 94.0, 88.4], [20, 10, 10])[:, None]
    bars = dataclasses.replace(bars, open=close, high=close, low=close, close=close)
    limits = nca.Limits(max_drawdown=0.1)
    rule, given = nca.rules.buy_and_hold(), nca.AccountConfig(costs=stage.costs, risk=limits)
    subject, _ = subject_on(rule, lambda tied: ReplayFeed(bars), 1e5, given)
    good = list(ReplayFeed(bars))
    bad = [bar._replace(open=-bar.open) for bar in good[25:28]]

    def trade():
        with Journal(path, lambda: 0) as journal:
            agent, feed = subject.agent, stage.Given([*good[:25], *bad, *good[28:]])
            return open_session(agent, feed, stage.exchange(agent), journal, 1e5).trade()

    with pytest.raises(HaltError, match="bad-bars"):
        trade()
    resume(path, "the vendor corrected it", 0)
    assert trade()["bars"] == 37
    found = rebuild(path, rule, costs=stage.costs, risk=limits)
    assert found.difference == "" and found.bars == 37


def rewritten(source, path, change, last=None):
    """A journal with a good chain and head, whose events up to `last` went through `change`."""
    now = 0
    with Journal(path, lambda: now, batch=True) as journal:
        for event in itertools.islice(read_events(source), last):
            now = event.ts_recv
            body = change(event) or event.body
            journal.record(event.run, event.kind, event.key, body, event.ts_event)


@pytest.mark.parametrize("kind", ["decision", "order_intent", "fill", "cash", "snapshot"])
def test_the_first_event_that_a_replay_does_not_repeat_is_named(traded, stage, path, kind):
    names = {"decision": "target", "order_intent": "weight", "fill": "price", "cash": "amount",
             "snapshot": "equity"}  # fmt: skip
    count, where = 0, ""

    def change(event):
        nonlocal count, where
        if event.kind == kind:
            count += 1
            if count == 3:
                where = f"seq {event.seq}, {kind} {event.key}: {names[kind]}"
                value = event.body[names[kind]]
                up = [np.nextafter(v, 9.0) for v in value] if isinstance(value, list) else 0
                return event.body | {names[kind]: up or float(np.nextafter(value, 1e9))}

    rewritten(traded / "paper.db", path, change)
    verify(path)
    found = rebuild(path, RULE, costs=stage.costs)
    assert found.difference.startswith(where)


def test_another_agent_or_account_is_refused(traded, stage):
    for rule, costs in ((nca.rules.buy_and_hold(), stage.costs), (RULE, nca.Costs())):
        with pytest.raises(
            ConfigError, match=f"{traded}/paper.db: is the journal of another session"
        ):
            rebuild(traded / "paper.db", rule, costs=costs)


def test_a_session_that_was_stopped_repeats_as_far_as_it_went(traded, stage, path):
    last = [e.seq for e in read_events(traded / "paper.db", "decision")][20]
    rewritten(traded / "paper.db", path, lambda event: None, last)
    found = rebuild(path, RULE, costs=stage.costs)
    assert (found.difference, found.decisions) == ("", 21)


def test_the_commands_say_what_was_found_and_exit_by_it(traded, stage, path, capsys):
    def said(*words):
        code = main(["journal", *map(str, words)])
        return code, capsys.readouterr()

    old = traded / "paper.db"
    assert said("verify", old)[0] == 0
    for words, says in (
        (("verify", old, "--strategy", "momentum"), "--strategy has no effect there"),
        (("replay", old), "--run or --strategy is needed"),
    ):
        code, out = said(*words)
        assert code == 2 and says in out.err and len(out.err.splitlines()) == 1
    costs = ["--commission", stage.costs.commission, "--slippage", stage.costs.slippage]
    rule = ["--strategy", "sma_cross", "--param", "fast=3", "--param", "slow=9"]
    code, out = said("replay", old, *rule, *costs)
    assert code == 0 and "bit for bit" in out.out
    last = max(event.seq for event in read_events(old, "snapshot"))
    rewritten(old, path, lambda e: e.body | {"equity": 1.0} if e.seq == last else None)
    code, out = said("replay", path, *rule, *costs)
    assert code == 1 and f"differs at seq {last}, snapshot" in out.err
    assert said("replay", old, *rule)[0] == 2


def test_the_decisions_of_a_live_session_follow_from_its_bars_and_books(stage, tmp_path, path):
    given = nca.AccountConfig(costs=stage.costs)
    bars = stage.bars(num_bars=60)
    subject, _ = subject_on(RULE, lambda tied: ReplayFeed(bars), 1e5, given)
    room = Room(stage, tmp_path / "live", subject.agent)
    for count in (7, 100):
        room.trade(count)
    found = rebuild(room.path, RULE, costs=stage.costs)
    assert (found.difference, found.bars, found.decisions) == ("", 50, 41)
    number = [event.seq for event in read_events(room.path, "decision")][20]

    def change(event):
        if event.seq == number:
            return event.body | {"target": [0.25, 0.25]}

    rewritten(room.path, path, change)
    assert f"seq {number}, decision" in rebuild(path, RULE, costs=stage.costs).difference
