"""Progress for people: a bar on a terminal, plain lines in a pipe."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import SupportsFloat, TextIO

from tqdm import tqdm

LINE_EVERY = 5.0  # seconds between plain lines: a log should stay readable
DRAW_EVERY = 0.1  # seconds between redraws of a bar
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


def on_terminal(stream: TextIO) -> bool:
    """Return whether a line on this stream can be redrawn: a terminal, and not a dumb one."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


class _Bar(tqdm):
    monitor_interval = 0  # tqdm's watchdog thread would outlive the bar, and redraw at its end


class Progress:
    """Counts steps and shows how far, how fast and how long still; used in `with`.

    On a terminal one line with a bar is redrawn. Elsewhere (a pipe, a file, TERM=dumb) plain lines
    are written at most every five seconds, the first and the last always:
    `train   42%  1.2M of 2.9M steps  182k steps/s  0:14 left  reward 0.031`.

    Args:
      total_steps: the number of steps that is 100%.
      label: one word that names the job.
      unit: what is counted.
      stream: standard error if None.
      clock: seconds.
    """

    def __init__(
        self,
        total_steps: int,
        label: str,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        unit: str = "steps",
    ):
        self._unit = unit
        self._total, self._label, self._clock = total_steps, label, clock
        self._stream = stream if stream is not None else sys.stderr
        self._steps = self._skipped = 0
        self._began = clock()
        self._shown_at: float | None = None
        self._shown_steps = -1
        self._marks: deque[tuple[float, int]] = deque(maxlen=RATE_OVER)
        self._metrics: dict[str, SupportsFloat] = {}
        self._closed, self._bar = False, None
        if on_terminal(self._stream):
            # One column short of the terminal, since a full last column wraps on some. No colour
            # is used, so NO_COLOR needs nothing.
            self._columns = min(shutil.get_terminal_size((80, 24)).columns, WIDEST) - 1
            self._bar = _Bar(
                total=total_steps,
                file=self._stream,
                ncols=self._columns,
                nrows=24,  # on a terminal that reports no size, tqdm would draw nothing
                mininterval=0,
                bar_format=f"{label} {{percentage:3.0f}}% |{{bar}}| {{desc}}",
                leave=True,
            )

    def skip(self, steps: int) -> None:
        """Count `steps` that were done before; they do not enter the speed."""
        self._steps += steps
        self._skipped += steps

    def update(self, steps: int, **metrics: SupportsFloat) -> None:
        """Count `steps` more, and show the first three of `metrics`."""
        self._steps += steps
        # They become floats only when a line is due: a value that is still being computed on a
        # device must not be waited for at every update.
        self._metrics = metrics
        now = self._clock()
        self._marks.append((now, self._steps))
        wait = LINE_EVERY if self._bar is None else DRAW_EVERY
        if self._shown_at is None or now - self._shown_at >= wait:
            self._show(now)

    def close(self, refused: bool = False) -> None:
        """Show where the job ended, also if that is before its end.

        Args:
          refused: an error ended it. Before the first update nothing is shown then but the
            error.
        """
        if self._closed:
            return
        self._closed = True
        quiet = refused and not self._marks
        if not quiet and (self._shown_steps != self._steps or self._bar is not None):
            self._show(self._clock(), last=True)
        if self._bar is not None:
            self._bar.leave = not quiet
            self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(refused=kind is not None)

    def _show(self, now: float, last: bool = False) -> None:
        self._shown_at, self._shown_steps = now, self._steps
        last = last or self._steps >= self._total
        # The rate is that of the latest updates while under way, and of all at the end.
        then, steps = self._began, self._skipped
        if len(self._marks) > 1 and not last:
            then, steps = self._marks[0]
        rate = (self._steps - steps) / (now - then) if now > then else 0.0
        parts = [f"{human(self._steps)} of {human(self._total)} {self._unit}"]
        if last:
            parts += [f"{human(rate)} {self._unit}/s", f"in {duration(now - self._began)}"]
        elif len(self._marks) < 2:
            # The first update includes the compilation, and says nothing about the speed to come.
            parts.append(f"compiled in {duration(now - self._began)}")
        elif rate > 0:
            left = duration((self._total - self._steps) / rate)
            parts += [f"{human(rate)} {self._unit}/s", f"{left} left"]
        shown = list(self._metrics.items())[:3]
        parts += [f"{name} {float(value):.3g}" for name, value in shown]
        # On a terminal six columns stay for the bar itself. The last parts are left out first.
        width = (80 - 6 if self._bar is None else self._columns - 13) - len(self._label)
        while parts and sum(len(part) + 2 for part in parts) > width:
            parts.pop()
        if self._bar is None:
            percent = f"{int(100 * self._steps / self._total) if self._total else 100:3d}%"
            self._stream.write("  ".join([self._label, percent, *parts]) + "\n")
            self._stream.flush()
        else:
            self._bar.n = self._steps
            self._bar.desc = "  ".join(parts)
            self._bar.refresh()


class LiveProgress:
    """Shows how a live session does; used in `with`.

    On a terminal one line is redrawn, with the time until the next bar:
    `paper  512 bars  equity 1.0213  next bar in 0:42`. Elsewhere a plain line is written as a bar
    closes, at most every five seconds, the first and the last always.

    Args:
      label: one word that names the job.
      stream: standard error if None.
      clock: seconds.
    """

    def __init__(
        self,
        label: str,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._label, self._clock = label, clock
        self._stream = stream if stream is not None else sys.stderr
        self._drawn = on_terminal(self._stream)
        self._at, self._bars, self._shown, self._text = -math.inf, 0, -1, ""

    def update(self, bars: int, equity: float, left: float) -> None:
        """Take the number of bars so far, the equity and the seconds until the next bar.

        Args:
          bars: that were processed.
          equity: as a multiple of the start.
          left: seconds; below 0 while a bar is overdue, NaN where it is not known.
        """
        known = math.isfinite(left) and left > 0.0
        waits = f"next bar in {duration(left)}" if known else "waiting for the next bar"
        self._text = f"{self._label}  {bars:,} bars  equity {equity:.4f}  {waits}"
        self._bars, now = bars, self._clock()
        if self._drawn and now - self._at >= DRAW_EVERY:
            self._at = now
            columns = shutil.get_terminal_size((80, 24)).columns - 1
            self._stream.write("\r" + self._text[:columns].ljust(columns))
            self._stream.flush()
        elif not self._drawn and bars != self._shown and now - self._at >= LINE_EVERY:
            self._line(now)

    def __enter__(self) -> LiveProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._drawn and self._text:
            self._stream.write("\n")
        elif self._text and self._bars != self._shown:
            self._line(self._clock())
        self._stream.flush()

    def _line(self, now: float) -> None:
        self._at, self._shown = now, self._bars
        self._stream.write(self._text + "\n")
        self._stream.flush()


@contextlib.contextmanager
def stage(
    label: str, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[None]:
    """Print `label ...` when a stage without steps begins, and its seconds when it ends."""
    out, began = stream if stream is not None else sys.stderr, clock()
    out.write(f"{label} ... ")
    out.flush()
    ending = "stopped after "
    try:
        yield
        ending = ""
    finally:
        out.write(f"{ending}{clock() - began:.1f} s\n")
        out.flush()
