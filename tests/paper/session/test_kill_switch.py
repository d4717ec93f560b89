"""A halt is latched, whoever asked for it, and only `resume` lifts it."""

import dataclasses
import json
import os
import signal

import numpy as np
import pytest

import nca_trader as nca
from nca_trader.data.bars import write_bars
from nca_trader.errors import ConfigError, HaltError, StateError
from nca_trader.paper.feeds.feed import ReplayFeed
from nca_trader.paper.journal.halting import checked_reason, halt_file, read_halt, request_halt
from nca_trader.paper.journal.journal import Journal, read_events, verify
from nca_trader.paper.session.halts import KillSwitch, refuse_no_journal, resume
from nca_trader.paper.session.parity import summarise
from nca_trader.paper.session.trade import open_session
from nca_trader.paper.venues.exchange import Exchange


def opened(journal, stage, feed, agent=None):
    agent = agent or stage.agent()
    return open_session(agent, feed, stage.exchange(agent), journal, 1e5)


def halted_after(path, stage, bars, rows, act):
    """A session that gets `act(session)` after some bars, and halts at the next one."""
    agent = stage.agent()
    # Before the bar is given, and so between two bars.
    feed = stage.Given(ReplayFeed(bars), lambda row: act(session) if row == rows else None)
    with Journal(path, ReplayFeed(bars).now) as journal:
        session = opened(journal, stage, feed, agent)
        session.trade()


def kinds(path):
    return [e.kind for e in read_events(path)]


def by_file(session):
    request_halt(session._journal.path, "lunch\nbreak")


def by_signal(session):
    with session.switch.listening():
        os.kill(os.getpid(), signal.SIGUSR1)


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (by_file, {"by": "file", "reason": "lunch break"}),
        (by_signal, {"by": "signal", "reason": "SIGUSR1"}),
    ],
)
def test_a_request_halts_before_the_next_bar_and_stays(path, stage, tmp_path, act, said, digest):
    bars = stage.bars(missing=0.2)
    with pytest.raises(HaltError, match="asked") as caught:
        halted_after(path, stage, bars, 40, act)
    assert caught.value.exit_code == 3 and "nca-trader resume --journal" in str(caught.value)
    event = list(read_events(path))[-1]
    assert event.kind == "halt" and event.body == {"code": "asked", "detail": said}
    assert kinds(path).count("bar") == 40 and "run_ended" not in kinds(path)
    halt_file(path).unlink(missing_ok=True)  # to remove the file alone lifts nothing
    before = verify(path)
    with pytest.raises(HaltError, match="was halted at"):
        stage.replay(path, bars, stage.agent())
    assert verify(path) == before
    assert resume(path, "back", 5).seq == event.seq
    result = stage.replay(path, bars, stage.agent())
    lifted = next(read_events(path, "resume"))
    assert lifted.seq == event.seq + 1 and lifted.ts_recv == 5
    assert lifted.body["reason"] == "back" and lifted.body["halt"]["code"] == "asked"
    # But for these two events the journal is that of a session that nobody stopped.
    whole = stage.replay(tmp_path / "whole.db", bars, stage.agent())
    kept = [e[4:] for e in read_events(path) if e.kind not in ("halt", "resume")]
    assert kept == [e[4:] for e in read_events(tmp_path / "whole.db")]
    assert result["equity"] == whole["equity"]


def test_a_file_that_comes_while_a_bar_is_decided_stops_its_orders(path, stage):
    bars, agent = stage.bars(), stage.agent()
    sent = []

    class Counting(Exchange):
        def work(self, orders):
            sent.append({order.client_id for order in orders})
            return super().work(orders)

    class Late(Journal):
        def record(self, run, kind, key, body, ts_event):
            found = super().record(run, kind, key, body, ts_event)
            if kind == "order_intent":
                halt_file(path).write_text("now")
            return found

    feed = ReplayFeed(bars)
    with Late(path, feed.now) as journal, pytest.raises(HaltError):
        open_session(agent, feed, stage.exchange(agent, kind=Counting), journal, 1e5).trade()
    intents = {e.key for e in read_events(path, "order_intent")}
    assert intents and not any(intents & names for names in sent)
    assert kinds(path)[-1] == "halt"


def test_a_file_before_the_start_halts_before_the_first_bar(path, stage):
    halt_file(path).write_text("not today")
    with pytest.raises(HaltError, match="not today"):
        stage.replay(path, stage.bars(), stage.agent())
    (halt,) = read_events(path)
    # No bar has told a time yet: it is that of the first one, and not 1970.
    opened = stage.bars().time.astype("datetime64[ns]").astype(int).tolist()
    assert (halt.kind, halt.ts_event, halt.ts_recv) == ("halt", opened[0], opened[0])
    resume(path, "today", 0)
    assert not halt_file(path).exists()
    halted_after(path, stage, stage.bars()[:40], 40, by_file)  # it ends before
    halt_file(path).write_text("nor now")
    with pytest.raises(HaltError, match="nor now"):  # at a later start: where the journal ends
        stage.replay(path, stage.bars(), stage.agent())
    assert [e.ts_event for e in read_events(path, "halt")] == [opened[0], opened[39]]
    resume(path, "now", 0)
    assert stage.replay(path, stage.bars(), stage.agent())["bars"] == 80


def test_a_halt_of_a_batch_is_on_disk_before_anybody_hears_of_it(path, stage):
    """A replay commits in batches; a kill after the message must not take the halt back."""
    agent = stage.agent(risk=nca.Limits(max_drawdown=0.005))
    feed = ReplayFeed(stage.bars())
    with Journal(path, feed.now, batch=True) as journal:
        with pytest.raises(HaltError, match="max-drawdown"):
            opened(journal, stage, feed, agent).trade()
        assert kinds(path)[-1] == "halt"  # as another process reads it


def test_a_request_in_a_batch_is_on_disk_before_anybody_hears_of_it(path, stage):
    bars = ReplayFeed(stage.bars())
    feed = stage.Given(bars, lambda row: request_halt(path, "lunch") if row == 12 else None)
    with Journal(path, bars.now, batch=True) as journal:
        with pytest.raises(HaltError, match="lunch"):
            opened(journal, stage, feed).trade()
        assert kinds(path)[-1] == "halt"


def test_what_cannot_be_halted_or_resumed_is_said(path, stage):
    for call in (lambda: refuse_no_journal(path), lambda: resume(path, "x", 0)):
        with pytest.raises(ConfigError, match="no such journal"):
            call()
    stage.replay(path, stage.bars()[:20], stage.agent())
    with pytest.raises(ConfigError, match="is not halted"):
        resume(path, "x", 0)
    for call in (lambda: request_halt(path, " \n"), lambda: resume(path, "", 0)):
        with pytest.raises(ConfigError, match="is empty"):
            call()
    request_halt(path, "x")
    with Journal(path, lambda: 0), pytest.raises(StateError, match="is writing"):
        resume(path, "x", 0)
    assert halt_file(path).exists()  # a session that runs stays halted


def test_a_file_that_cannot_be_read_and_a_link_halt_as_well(path):
    halt_file(path).mkdir()
    assert "cannot be read" in KillSwitch(path).asked()["reason"]
    halt_file(path).rmdir()
    halt_file(path).symlink_to(path.with_name("nowhere"))
    assert "cannot be read" in KillSwitch(path).asked()["reason"]
    assert not request_halt(path, "x") and not path.with_name("nowhere").exists()
    path.with_name("nowhere").write_text("somebody's file")
    assert "somebody" not in KillSwitch(path).asked()["reason"]
    halt_file(path).unlink()
    os.mkfifo(halt_file(path))  # nobody writes to it, and the session does not wait for that
    assert KillSwitch(path).asked() == {"by": "file", "reason": ""}
    assert len(checked_reason("x" * 1000)) == 500


def test_of_two_requests_the_first_counts_whoever_asks(path, stage):
    assert request_halt(path, "too hot\x1b[2J") and not request_halt(path, "later")
    assert read_halt(path) == "too hot\\x1b[2J"
    assert [f.name for f in path.parent.iterdir()] == ["paper.db.halt"]
    assert halt_file(path).stat().st_mode & 0o777 == 0o600
    with pytest.raises(HaltError, match="too hot"):
        stage.replay(path, stage.bars(), stage.agent())
    resume(path, "cooler", 0)
    (lifted,) = read_events(path, "resume")
    assert lifted.body["asked"] == "too hot\\x1b[2J" and lifted.body["reason"] == "cooler"
    assert read_halt(path) is None and request_halt(path, "again")


def test_the_commands_halt_and_resume(stage, tmp_path, capsys):
    from nca_trader.cli import main

    write_bars(stage.bars(num_bars=150), tmp_path / "bars.csv")
    journal = tmp_path / "paper.db"
    paper = ["paper", "--strategy=momentum", f"--feed=replay:{tmp_path}/bars.csv",
             f"--journal={journal}", "--commission=1e-3", "--json"]  # fmt: skip
    assert main(["halt", f"--journal={journal}", "--reason=x"]) == 2
    assert main(paper) == 0
    printed = capsys.readouterr()
    assert "buy and hold" in printed.out and "nca-trader dashboard --journal" in printed.out
    result = json.loads(printed.out.splitlines()[-1])
    assert result["summary"]["bars"] == result["decisions"]
    assert result["summary"]["session"]["total_return"] == pytest.approx(result["equity"] - 1.0)
    assert main(["halt", f"--journal={journal}", "--reason=lunch"]) == 0
    assert main(["halt", f"--journal={journal}", "--reason=tea"]) == 0
    assert "for this reason: lunch" in capsys.readouterr().out
    assert main(paper) == 3 and main(paper) == 3
    assert main(["resume", f"--journal={journal}", "--reason=back", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"lifted": "asked"}
    assert main(paper) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["equity"] == result["equity"]


@pytest.mark.parametrize("fill", ["next_open", "close"])
def test_the_table_is_that_of_the_bars_and_fills(path, stage, fill):
    bars = stage.bars(missing=0.1)
    stage.replay(path, bars, stage.agent(fill=fill))
    found = summarise(path)
    begin = stage.first_decision
    if fill == "close":
        hold = (bars.close[-1] / bars.close[begin]).mean()
    else:  # an asset that is missing there is bought at its last close
        hold = (bars.close[-1] / bars.open[begin + 1]).mean()
    assert found.hold.total_return == pytest.approx(hold - 1.0, rel=1e-12)
    equity = np.array([e.body["equity"] for e in read_events(path, "snapshot")])
    returns = np.diff(equity, prepend=1.0) / np.concatenate([[1.0], equity[:-1]])
    sharpe = returns.mean() / returns.std(ddof=1) * np.sqrt(365.2425)
    assert found.session.sharpe == pytest.approx(sharpe, rel=1e-9)
    assert found.session.max_drawdown == pytest.approx(
        (equity / np.maximum.accumulate(np.maximum(equity, 1.0)) - 1.0).min()
    )
    fills = [e.body for e in read_events(path, "fill")]
    paid = sum(f["commission"] + abs(f["units"]) * f["price"] * (1 - 1 / (1 + s * 2e-4)) * s
               for f in fills for s in [np.sign(f["units"])])  # fmt: skip
    assert found.session.costs == pytest.approx(paid, rel=1e-9)
    assert (found.fills, found.rejected) == (len(fills), 0)
    assert "buy and hold" in str(found)


def test_a_session_of_minutes_has_no_figure_per_year(path, stage, tmp_path):
    bars = stage.bars(num_bars=60)
    first = bars.time[0]

    def summary(name, step):
        spaced = dataclasses.replace(bars, time=first + np.arange(60) * np.timedelta64(step))
        stage.replay(tmp_path / name, spaced, stage.agent())
        return summarise(tmp_path / name)

    short, long = summary("short", np.timedelta64(1, "s")), summary("long", np.timedelta64(1, "h"))
    for rows in zip((short.session, short.hold), (long.session, long.hold), strict=True):
        assert np.isnan([rows[0].sharpe, rows[0].turnover]).all()
        assert np.isfinite(rows[1]).all()
        assert rows[0].total_return == rows[1].total_return
    assert [line.split()[-2:] for line in str(short).splitlines()[2:5:2]] == [["-", "-"]] * 2


def test_a_journal_without_a_decision_has_no_table(path, stage):
    stage.replay(path, stage.bars()[:5], stage.agent())
    assert summarise(path) is None


@pytest.mark.heavy
def test_limits_are_options_of_both_commands(stage, tmp_path, capsys):
    from nca_trader.cli import main

    write_bars(stage.bars(num_bars=150, symbols=("AAA",)), tmp_path / "bars.csv")
    rule, limits = "--strategy=momentum", ["--limit=max_position=0.25", "--limit=max_order=0.1"]
    assert main(["backtest", rule, f"--data={tmp_path}/bars.csv", *limits,
                 f"--trials={tmp_path}", "--json"]) == 0  # fmt: skip
    printed = capsys.readouterr().out
    assert "LIMITED" in printed
    expected = json.loads(printed.splitlines()[-1])["total_return"]
    paper = ["paper", rule, f"--feed=replay:{tmp_path}/bars.csv"]
    assert main([*paper, f"--journal={tmp_path}/a.db", *limits, "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["equity"] - 1.0
    assert found == pytest.approx(expected, rel=1e-12)
    wrong = ["--limit=max_drawdwn=0.1", "--limit=max_order=NaN"]
    assert main([*paper, f"--journal={tmp_path}/b.db", *wrong]) == 2
    assert "did you mean 'max_drawdown'?" in capsys.readouterr().err
    wrong = ["--limit=max_drawdown=2", "--limit=max_order=NaN"]
    assert main([*paper, f"--journal={tmp_path}/b.db", *wrong]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2
    assert not (tmp_path / "b.db").exists()
