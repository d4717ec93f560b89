"""Progress of long steps, on standard error: a line that is redrawn, or plain lines now and then.

A step that ends within two seconds shows nothing. On a terminal a longer one redraws one line, with
the time left. Elsewhere (a pipe, a file, TERM=dumb) a command writes plain lines: the last always,
others at least five seconds apart, and in long jobs as far apart as a twentieth of the time so far.
A program that calls the library writes none there. `quiet` silences all.

One step is shown at a time. A step inside another moves the outer one, so that a walk-forward
advances while a fold trains.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, SupportsFloat, TextIO, TypeVar

from tqdm import tqdm

T = TypeVar("T")
QUIET = 2.0  # seconds before a step is shown
LINE_EVERY = 5.0  # seconds between plain lines: a log should stay readable
LINE_SHARE = 0.05  # of the time so far that is between plain lines, where that is longer
DRAW_EVERY = 0.1  # seconds between redraws of a bar
TICK = 1.0  # seconds between redraws of a step that has no news
RATE_OVER = 16  # updates that the rate is averaged over
WIDEST = 100  # columns


def human(number: float) -> str:
    """Format a count in about three digits.

    Example:
      >>> [human(n) for n in (950, 48_240, 1.2e6)]
      ['950', '48.2k', '1.2M']
    """
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        # 999,950 and above would print as 1000.0k.
        if number >= 0.99995 * size:
            scaled = number / size
            return f"{scaled:.0f}{unit}" if scaled >= 99.95 else f"{scaled:.1f}{unit}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """Format seconds as minutes and hours.

    Example:
      >>> [duration(s) for s in (14, 725, 10_859)]
      ['0:14', '12:05', '3:00:59']
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class _Shown:
    """What this process shows: one standard error, so one for all threads."""

    where = "terminal"  # or "pipes", which are lines in pipes too, or "nowhere"
    steps: ClassVar[list[Progress]] = []
    lock = threading.RLock()


@contextlib.contextmanager
def _showing(where: str) -> Iterator[None]:
    before, _Shown.where = _Shown.where, where
    try:
        yield
    finally:
        _Shown.where = before


@contextlib.contextmanager
def in_pipes() -> Iterator[None]:
    """Write plain lines where there is no terminal, as a command does, while the block runs."""
    with _showing("pipes"):
        try:
            yield
        finally:
            # An error may keep a generator alive, and with it a step that was inside.
            for step in [*_Shown.steps]:
                step.close(refused=True)


def quiet() -> contextlib.AbstractContextManager[None]:
    """Show no progress while the block runs.

    Example:
      >>> with quiet(), Progress(2, "count") as shown:
      ...     shown.update()
    """
    return _showing("nowhere")


def say(text: str) -> None:
    """Print a line on standard output, above the line of a step that is under way."""
    with _Shown.lock:
        for step in _Shown.steps:
            step.wipe()
        print(text, flush=True)


class _Bar(tqdm):
    monitor_interval = 0  # tqdm's watchdog thread would outlive the bar, and redraw at its end


class Progress:
    """Counts the units of a step, and shows how far, how fast and how long still; used in `with`.

    `train   42%  1.2M of 2.9M steps  182k steps/s  0:14 left  reward 0.031`

    Args:
      total: the number of units that is 100%; None where it is not known.
      label: a few words that name the step.
      unit: what is counted, in the plural.
      compiles: whether the first update contains a compilation, which is not counted as speed.
      always: whether its last line is written however short it was.
      ticks: whether the line is redrawn without news; False while something is being timed.
      stream: standard error if None.
      clock: seconds; another one than the default does not tick.
    """

    def __init__(
        self,
        total: float | None,
        label: str,
        unit: str = "steps",
        *,
        compiles: bool = False,
        always: bool = False,
        ticks: bool = True,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._total, self._label, self._unit, self._compiles = total, label, unit, compiles
        self._clock, self._stream = clock, sys.stderr if stream is None else stream
        self._ticks, self._always = ticks and clock is time.monotonic, always
        self._steps = self._skipped = self._inside = 0.0
        self._began = clock()
        self._at: float | None = None  # when it was shown
        self._marks: deque[tuple[float, float]] = deque(maxlen=RATE_OVER)
        self._metrics: dict[str, SupportsFloat] = {}
        self._note = ""
        self._child: Progress | None = None
        self._outer: Progress | None = None
        self._closed, self._mine, self._thread = False, False, 0
        self._bar: _Bar | None = None
        self._ended = threading.Event()
        # Whether a line can be redrawn: on a terminal, and not on a dumb one.
        self._terminal = self._stream.isatty() and os.environ.get("TERM") != "dumb"

    def skip(self, steps: float) -> None:
        """Count `steps` that were done before; they do not enter the speed."""
        self._steps += steps
        self._skipped += steps

    def update(self, steps: float = 1, **metrics: SupportsFloat) -> None:
        """Count `steps` more, and show the first three of `metrics`."""
        with _Shown.lock:
            self._steps += steps
            self._inside = 0.0
            # They become floats only when a line is due: a value that is still being computed on a
            # device must not be waited for at every update.
            self._metrics = metrics
            self._marks.append((self._clock(), self._steps))
            self._news()

    def note(self, text: str, news: bool) -> None:
        """Show a text in place of a count; in a pipe only where it is `news`."""
        with _Shown.lock:
            self._note = text
            if self._terminal or news:
                self._news()

    def wipe(self) -> None:
        """Remove the line from a terminal; it is drawn again when there is news."""
        if self._bar is not None:
            self._bar.clear()

    def close(self, refused: bool = False) -> None:
        """Show where the step ended, also if that is before its end.

        Args:
          refused: an error ended it. Before the first update nothing is shown then but the
            error.
        """
        with _Shown.lock:
            if self._closed:
                return
            self._closed = True
            self._ended.set()
            if self in _Shown.steps:
                _Shown.steps.remove(self)
            if self._outer is not None:
                self._outer._child = None
            silent = refused and not self._marks and not self._always
            due = self._always or self._at is not None or self._waited(QUIET)
            if due and self._mine and not silent:
                self._show(self._clock(), "stopped after " if refused else "in ")
            if self._bar is not None:
                # What a program of the user's calls in a loop leaves no line for each call.
                self._bar.leave = not silent and _Shown.where == "pipes"
                self._bar.close()

    def __enter__(self) -> Progress:
        with _Shown.lock:
            self._thread = threading.get_ident()
            outer = _Shown.steps[-1] if _Shown.steps else None
            inside = outer is not None and outer._thread == self._thread
            allowed = self._terminal or _Shown.where == "pipes" or self._clock is not time.monotonic
            self._mine = outer is None and allowed and _Shown.where != "nowhere"
            if outer is None or inside:  # a step of another thread is not part of the one shown
                _Shown.steps.append(self)
            if outer is not None and inside:
                self._outer, outer._child = outer, self
        if self._mine and self._ticks:
            threading.Thread(target=self._tick, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(refused=kind is not None)

    def _tick(self) -> None:
        wait = QUIET
        while not self._ended.wait(wait):
            wait = TICK
            with _Shown.lock:
                if not self._closed:
                    self._news(waiting=True)

    def _waited(self, seconds: float, since: float | None = None) -> bool:
        return self._clock() - (self._began if since is None else since) >= seconds

    def _news(self, waiting: bool = False) -> None:
        """Show it if that is due, and tell the step around this one."""
        if self._outer is not None:
            self._outer._moved(self._share)
        if not self._mine or not self._waited(QUIET):
            return
        if self._terminal:
            due = self._at is None or self._waited(DRAW_EVERY, self._at)
        else:
            share = 0.0 if self._note else LINE_SHARE  # updates of such a step are rare anyway
            apart = max(LINE_EVERY, share * (self._clock() - self._began))
            # The first line comes with the first update, or after the time between two lines.
            since = self._at if self._at is not None else self._began if waiting else -math.inf
            due = self._waited(apart, since)
        if due:
            self._show(self._clock())

    @property
    def _share(self) -> float:
        """How much of it is done, from 0 to 1."""
        if not self._total:
            return float(self._total == 0)
        return min((self._steps + self._inside) / self._total, 1.0)

    def _moved(self, share: float) -> None:
        """Take how much is done of a step inside of this one's current unit."""
        self._inside = max(self._inside, min(share, 1.0))
        self._news()

    def _rate(self, now: float, last: bool) -> tuple[float, float]:
        """Return units per second, of the latest updates or of all at the end, and when seen."""
        then, steps = self._began, self._skipped
        done, at = self._steps + self._inside, now
        if not last and not self._inside and self._marks:
            at, done = self._marks[-1]
            if len(self._marks) > 1:
                then, steps = self._marks[0]
        return ((done - steps) / (at - then) if at > then else 0.0), at

    def _text(self, now: float, ended: str) -> list[str]:
        """Return the parts of the line behind its label."""
        passed, child = duration(now - self._began), self._child
        if self._note:
            return [self._note]
        if self._total is None:
            if ended:
                return [f"... {ended.removeprefix('in ')}{now - self._began:.1f} s"]
            return [passed] if child is None else [child._label, *child._text(now, "")]
        parts = [f"{human(self._steps)} of {human(self._total)} {self._unit}"]
        rate, at = self._rate(now, bool(ended))
        fast = [f"{human(rate)} {self._unit}/s"] if rate >= 1.0 else []
        if ended:
            parts += [*fast, f"in {passed}"]
        elif self._compiles and len(self._marks) < 2:
            # The first update includes the compilation, and says nothing about the speed to come.
            parts.append(f"compil{'ed in' if self._marks else 'ing'} {passed}")
        elif rate > 0:
            left = (self._total - self._steps - self._inside) / rate - (now - at)
            parts += [*fast, f"{duration(max(left, 0.0))} left"]
        else:
            parts.append(passed)
        shown = list(self._metrics.items())[:3]
        return [*parts, *(f"{name} {float(value):.3g}" for name, value in shown)]

    def _show(self, now: float, ended: str = "") -> None:
        self._at = now
        if self._total is not None and self._steps >= self._total:
            ended = ended or "in "
        parts, known = self._text(now, ended), self._total is not None
        # One column short of the terminal, since a full last column wraps on some. No colour is
        # used, so NO_COLOR needs nothing.
        columns = min(shutil.get_terminal_size((80, 24)).columns, WIDEST) - 1
        # On a terminal six columns stay for the bar itself. The last parts are left out first.
        width = (columns - 13 if self._terminal else 80 - 6) - len(self._label)
        while len(parts) > 1 and sum(len(part) + 2 for part in parts) > width:
            parts.pop()
        text = "  ".join(parts)[: max(width, 0) if self._terminal else None]
        if not self._terminal:
            share = f" {int(100 * self._share):3d}% " if known else ""
            self._stream.write(" ".join(filter(None, (self._label, share, text))) + "\n")
            self._stream.flush()
            return
        if self._bar is None:
            self._bar = _Bar(
                total=self._total,
                file=self._stream,
                ncols=columns,
                nrows=24,  # on a terminal that reports no size, tqdm would draw nothing
                mininterval=0,
                bar_format=f"{self._label} {'{percentage:3.0f}% |{bar}| ' * known}{{desc}}",
                desc=text,
                leave=True,
            )
        self._bar.n = min(self._steps + self._inside, self._total or math.inf)
        self._bar.desc = text
        self._bar.refresh()


def track(units: Sequence[T], label: str, unit: str, **options: Any) -> Iterator[T]:
    """Yield each of `units`, and show how many are done; see `Progress`.

    Example:
      >>> sum(track(range(4), "add", "numbers"))
      6
    """
    with Progress(len(units), label, unit, **options) as shown:
        for each in units:
            yield each
            shown.update()
