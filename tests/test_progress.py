"""Progress: plain lines in a pipe, one redrawn line on a terminal."""

import io
import itertools
import time

import pytest

from nca_trader.progress import (
    Progress,
    duration,
    human,
    in_pipes,
    quiet,
    say,
    track,
)


class Clock:
    """Time that moves when told."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def stream():
    """A pipe."""
    return io.StringIO()


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    return Terminal()


def run(stream, clock, updates=100, steps=10_000, seconds=0.5, first=8.0, **metrics):
    """A job whose first update compiles: it takes `first` seconds, the others `seconds`."""
    with Progress(updates * steps, "train", compiles=True, stream=stream, clock=clock) as shown:
        for update in range(updates):
            clock.now += seconds if update else first
            shown.update(steps, **metrics)


def test_a_pipe_gets_plain_lines_every_few_seconds_the_first_and_the_last(clock, stream):
    run(stream, clock, reward=0.03125, entropy=1.0)
    lines = stream.getvalue().splitlines()
    assert "\r" not in stream.getvalue() and "\x1b" not in stream.getvalue()
    # 99 updates of half a second after the first: one line each five seconds, and both ends.
    assert len(lines) == 1 + 9 + 1
    assert lines[0].startswith("train    1%  10.0k of 1.0M steps")
    # The rate leaves the compilation out: 10,000 steps each half second.
    # "entropy 1" would end in the 82nd column.
    wanted = "train   41%  410k of 1.0M steps  20.0k steps/s  0:30 left  reward 0.0312"
    assert lines[4] == wanted
    assert lines[-1].startswith("train  100%  1.0M of 1.0M steps  17.4k steps/s  in 0:58")


def test_no_line_is_wider_than_80_columns_and_metrics_go_first(clock):
    stream = io.StringIO()
    run(stream, clock, updates=2, a=1, b=2, c=3, d=4)
    assert "a 1  b 2  c 3" in stream.getvalue() and "d 4" not in stream.getvalue()  # three of them
    stream = io.StringIO()
    run(stream, clock, explained_variance=0.123456, approximate_kl=1e-9, a_long_name=-1.0)
    lines = stream.getvalue().splitlines()
    assert max(len(line) for line in lines) <= 80
    assert "compiled in" in lines[0] and "left" not in lines[0]
    assert all("steps/s" in line for line in lines[1:])


def test_a_metric_is_not_waited_for_unless_a_line_is_due(clock, stream):
    asked = []

    class OnDevice:
        def __float__(self):
            asked.append(clock.now)
            return 1.0

    run(stream, clock, updates=11, seconds=0.1, reward=OnDevice())
    assert len(asked) == len(stream.getvalue().splitlines()) == 2


def test_a_job_stopped_half_way_says_where_and_claims_no_more(clock, stream):
    with (
        pytest.raises(KeyboardInterrupt),
        Progress(1000, "train", stream=stream, clock=clock) as shown,
    ):
        for _ in range(5):
            clock.now += 1.0
            shown.update(100)
        raise KeyboardInterrupt
    last = stream.getvalue().splitlines()[-1]
    assert last.startswith("train   50%  500 of 1.0k steps") and "in 0:05" in last


def test_99_9_percent_is_not_100(clock, stream):
    with Progress(1000, "train", stream=stream, clock=clock) as shown:
        clock.now += 3.0
        shown.update(999)
    assert " 99%" in stream.getvalue() and "100%" not in stream.getvalue()


def test_a_job_without_steps_ends_and_closing_twice_is_closing_once(clock, stream):
    with Progress(0, "train", stream=stream, clock=clock) as shown:
        clock.now += 3.0
        shown.close()
        shown.close()
    assert stream.getvalue().count("\n") == 1 and "100%" in stream.getvalue()


def test_a_job_that_was_refused_before_it_began_leaves_the_error_alone(clock, stream, terminal):
    for out in (stream, terminal):
        with pytest.raises(ValueError), Progress(1000, "train", stream=out, clock=clock):
            raise ValueError("refused")
    assert stream.getvalue() == terminal.getvalue() == ""


def test_a_terminal_gets_one_line_that_is_drawn_over(clock, terminal):
    run(terminal, clock, reward=0.03125)
    # A program that calls the library keeps no line of it; a command does.
    assert terminal.getvalue().split("\r")[-2].strip() == "" and "\n" not in terminal.getvalue()
    terminal.truncate(0)
    terminal.seek(0)
    with in_pipes():
        run(terminal, clock, reward=0.03125)
    text = terminal.getvalue()
    assert text.count("\n") == 1 and text.endswith("\n")
    drawn = [line.strip("\n") for line in text.split("\r") if line.strip()]
    assert max(len(line) for line in drawn) <= 79
    assert drawn[0].startswith("train   0% |") or drawn[0].startswith("train   1% |")
    middle = next(line for line in drawn if line.startswith("train  41%"))
    assert middle.endswith("| 410k of 1.0M steps  20.0k steps/s  0:30 left  reward 0.0312")
    assert drawn[-1].startswith("train 100% |") and "in 0:58" in drawn[-1]


@pytest.mark.parametrize("columns", ["40", "60", "200"])
def test_a_drawn_line_fits_any_terminal(clock, terminal, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    run(terminal, clock, updates=20, reward=0.03125, entropy=1.0, kl=0.01)
    drawn = [line.strip("\n") for line in terminal.getvalue().split("\r")]
    assert max(len(line) for line in drawn) < int(columns)


def test_a_dumb_terminal_gets_plain_lines(clock, terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    run(terminal, clock, updates=5)
    assert "\r" not in terminal.getvalue() and terminal.getvalue().count("\n") >= 2


def test_a_step_of_unknown_length_ends_with_its_seconds(clock, stream):
    with Progress(None, "backtest", always=True, stream=stream, clock=clock):
        clock.now += 1.21
    assert stream.getvalue() == "backtest ... 1.2 s\n"
    with pytest.raises(ValueError, match="no"):
        with Progress(None, "page", always=True, stream=stream, clock=clock):
            clock.now += 1.0
            raise ValueError("no")
    assert stream.getvalue().endswith("page ... stopped after 1.0 s\n")


def test_a_step_of_under_two_seconds_shows_nothing(clock, terminal):
    for stream in (io.StringIO(), terminal):
        with Progress(10, "sweep", stream=stream, clock=clock) as shown:
            for _ in range(10):
                clock.now += 0.19
                shown.update()
        assert stream.getvalue() == ""


def test_lines_of_a_long_job_come_as_rarely_as_a_twentieth_of_its_time(clock, stream):
    with Progress(36_000, "train", stream=stream, clock=clock) as shown:
        for _ in range(36_000):
            clock.now += 1.0
            shown.update()
    # 20 of the first 100 seconds, then 20 for each factor of e; one line in 5 seconds were 7,200.
    assert 100 < len(stream.getvalue().splitlines()) < 160


def test_a_step_inside_another_moves_it_and_is_not_shown_itself(clock, stream):
    with Progress(4, "walk forward", "folds", stream=stream, clock=clock) as outer:
        for _ in range(4):
            with Progress(100, "train", stream=stream, clock=clock) as inner:
                for _ in range(100):
                    clock.now += 0.25
                    inner.update()
            outer.update()
    lines = stream.getvalue().splitlines()
    assert all(line.startswith("walk forward") for line in lines)
    # After 27 of 100 seconds a quarter of the second fold is done or less, and 1:13 is left.
    seen = [(line.split()[2], line.split()[-2]) for line in lines if "left" in line]
    for percent, left in seen:
        minutes, seconds = left.split(":")
        assert abs(100 - int(percent[:-1]) - (60 * int(minutes) + int(seconds))) <= 2, lines
    assert len(seen) > 10


def test_a_pipe_of_a_program_gets_nothing_and_quiet_silences_a_command(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("nca_trader.progress.time.monotonic", lambda: now[0])

    def job():
        for _ in track(range(3), "count", "numbers", ticks=False, clock=time.monotonic):
            now[0] += 3.0

    job()
    with in_pipes(), quiet():
        job()
    assert capsys.readouterr().err == ""
    with in_pipes():
        job()
        assert "count  33%" in capsys.readouterr().err.replace("   ", "  ")


def test_a_step_that_an_error_left_open_ends_with_the_command(clock, terminal):
    left = Progress(9, "read", "bytes", stream=terminal, clock=clock)
    with pytest.raises(ValueError), in_pipes():
        left.__enter__()  # as a generator does that a traceback keeps alive
        clock.now += 3.0
        left.update(4)
        raise ValueError
    assert terminal.getvalue().endswith("\n")
    with Progress(1, "next", stream=terminal, clock=clock) as shown:
        clock.now += 3.0
        shown.update()
    assert "next 100%" in terminal.getvalue()


def test_a_line_on_stdout_does_not_stand_in_the_bar(clock, terminal, capsys):
    with Progress(2, "tune", stream=terminal, clock=clock) as shown:
        clock.now += 3.0
        shown.update()
        say("trial 0: sharpe 0.1")
        wiped = terminal.getvalue().split("\r")[-2:]
        assert not "".join(wiped).strip() and capsys.readouterr().out == "trial 0: sharpe 0.1\n"


def test_counts_and_times_are_short_also_where_a_unit_ends():
    """More of both are in the docstrings."""
    numbers = (0, 999_949, 999_960, 182_400, 3.2e9)
    assert [human(n) for n in numbers] == ["0", "1000k", "1.0M", "182k", "3.2G"]
    assert [duration(s) for s in (14.2, 59.7)] == ["0:14", "1:00"]


def test_steps_done_before_are_progress_but_no_speed(clock, stream):
    with Progress(1000, "train", stream=stream, clock=clock) as bar:
        bar.skip(500)
        for _ in range(5):
            clock.now += 10.0
            bar.update(100)
    lines = stream.getvalue().splitlines()
    assert lines[0].split()[1] == "60%"
    assert "10 steps/s  in 0:50" in lines[-1]


def live(stream, clock, bars=30, period=60.0):
    """A live session that is asked ten times a second, for some bars of a minute."""
    last = -1
    with Progress(None, "paper", stream=stream, clock=clock) as shown:
        for tick in range(int(10 * period * bars)):
            bar, left = int(tick // (10 * period)), period - tick % (10 * period) / 10
            text = f"{500 + bar} bars  next bar in {duration(left)}"
            shown.note(text, news=bar != last)
            last, clock.now = bar, clock.now + 0.1


def test_a_live_session_in_a_pipe_writes_a_line_as_a_bar_closes(clock, stream):
    live(stream, clock)
    lines = stream.getvalue().splitlines()
    # The first bar closed before there was anything to show.
    assert lines[0] == "paper 501 bars  next bar in 1:00"
    # And its end, with the last.
    assert [int(line.split()[1]) for line in lines] == [*range(501, 530), 529]


def test_bars_of_a_second_do_not_fill_a_log_but_the_last_is_there(clock, stream):
    live(stream, clock, bars=33, period=1.0)
    shown = [int(line.split()[1]) for line in stream.getvalue().splitlines()]
    apart = [later - earlier for earlier, later in itertools.pairwise(shown[:-1])]
    assert shown[0] == 502 and shown[-1] == 532 and {*apart} <= {5, 6} and len(apart) >= 5


def test_a_live_session_on_a_terminal_counts_down_in_one_line(clock, terminal):
    with in_pipes():
        live(terminal, clock, bars=2, period=10.0)
    text = terminal.getvalue()
    assert text.count("\n") == 1 and text.endswith("\n")
    drawn = [line.strip() for line in text.split("\r")[1:]]
    assert "paper 500 bars  next bar in 0:04" in drawn
    assert "paper 501 bars  next bar in 0:10" in drawn
    assert all(len(line) <= 79 for line in text.rstrip("\n").split("\r"))
