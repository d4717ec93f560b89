"""Progress for people: a bar on a terminal, plain lines in a pipe."""

from __future__ import annotations

import contextlib
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


class _Bar(tqdm):
    monitor_interval = 0  # tqdm's watchdog thread would outlive the bar and redraw behind our back


def human(number: float) -> str:
    """A count in three digits or so: 950, 48.2k, 1.2M, 2.9G."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        # 999,950 and above would print as 1000.0k.
        if number >= 0.99995 * size:
            scaled = number / size
            return f"{scaled:.0f}{unit}" if scaled >= 99.95 else f"{scaled:.1f}{unit}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """Seconds as people write them: 0:14, 12:05, 3:00:59."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def on_terminal(stream: TextIO) -> bool:
    """Whether a line on this stream can be drawn over: a terminal, and not a dumb one."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


class Progress:
    """Counts steps and shows how far, how fast and how long still. Made by `progress`."""

    def __init__(self, total_steps: int, label: str, stream: TextIO, clock: Callable[[], float]):
        self._total, self._label, self._stream, self._clock = total_steps, label, stream, clock
        self._steps = self._skipped = 0
        self._began = clock()
        self._shown_at: float | None = None
        self._shown_steps = -1
        self._marks: deque[tuple[float, int]] = deque(maxlen=RATE_OVER)
        self._bar = self._open_bar() if on_terminal(stream) else None
        self._metrics: dict[str, SupportsFloat] = {}
        self._closed = False

    def _open_bar(self) -> _Bar:
        # One column short of the terminal: a full last column wraps on some. No colour is used,
        # so NO_COLOR needs nothing.
        self._columns = min(shutil.get_terminal_size((80, 24)).columns, 100) - 1
        return _Bar(
            total=self._total,
            file=self._stream,
            ncols=self._columns,
            nrows=24,  # asked of a terminal that reports no size, tqdm would draw nothing
            mininterval=0,
            bar_format=f"{self._label} {{percentage:3.0f}}% |{{bar}}| {{desc}}",
            leave=True,
        )

    def skip(self, steps: int) -> None:
        """Count `steps` that were done before: they are progress, and say nothing of speed."""
        self._steps += steps
        self._skipped += steps

    def update(self, steps: int, **metrics: SupportsFloat) -> None:
        """Count `steps` more; show `metrics`, the first three of them.

        Metrics are turned into floats only when a line is due, so that a value still being
        computed on a device is not waited for at every update.
        """
        self._steps += steps
        self._metrics = metrics
        now = self._clock()
        self._marks.append((now, self._steps))
        wait = LINE_EVERY if self._bar is None else DRAW_EVERY
        if self._shown_at is None or now - self._shown_at >= wait:
            self._show(now)

    def close(self, refused: bool = False) -> None:
        """Show where it ended, also when that is before the end.

        Args:
          refused: an error ended it; before the first update there is then nothing to show, and
            the error's own line stands alone.
        """
        if self._closed:
            return
        self._closed = True
        if refused and not self._marks:
            if self._bar is not None:
                self._bar.leave = False
                self._bar.close()
            return
        if self._shown_steps != self._steps or self._bar is not None:
            self._show(self._clock(), last=True)
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(refused=kind is not None)

    def _rate(self, now: float, last: bool) -> float:
        """Steps a second: over the latest updates while under way, over everything at the end."""
        then, steps = self._began, self._skipped
        if len(self._marks) > 1 and not last:
            then, steps = self._marks[0]
        return (self._steps - steps) / (now - then) if now > then else 0.0

    def _show(self, now: float, last: bool = False) -> None:
        self._shown_at, self._shown_steps = now, self._steps
        last = last or self._steps >= self._total
        rate = self._rate(now, last)
        parts = [f"{human(self._steps)} of {human(self._total)} steps"]
        if last:
            parts += [f"{human(rate)} steps/s", f"in {duration(now - self._began)}"]
        elif len(self._marks) < 2:
            # The first update holds the compilation; it says nothing of the speed to come.
            parts.append(f"compiled in {duration(now - self._began)}")
        elif rate > 0:
            left = duration((self._total - self._steps) / rate)
            parts += [f"{human(rate)} steps/s", f"{left} left"]
        shown = list(self._metrics.items())[:3]
        parts += [f"{name} {float(value):.3g}" for name, value in shown]
        if self._bar is None:
            self._write_line(parts)
        else:
            self._draw(parts)

    def _write_line(self, parts: list[str]) -> None:
        percent = f"{int(100 * self._steps / self._total) if self._total else 100:3d}%"
        text = "  ".join([self._label, percent, *_fitting(parts, 80 - len(self._label) - 6)])
        self._stream.write(text + "\n")
        self._stream.flush()

    def _draw(self, parts: list[str]) -> None:
        assert self._bar is not None
        # Six columns stay for the bar itself; on a narrow terminal the last parts go first.
        width = self._columns - len(self._label) - 13
        self._bar.n = self._steps
        self._bar.desc = "  ".join(_fitting(parts, width))
        self._bar.refresh()


def _fitting(parts: list[str], width: int) -> list[str]:
    """As many of the parts, from the first, as fit the width with two spaces before each."""
    while parts and sum(len(part) + 2 for part in parts) > width:
        parts = parts[:-1]
    return parts


def progress(
    total_steps: int,
    label: str,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Progress:
    """Progress of a job of `total_steps` environment steps, for use in `with`.

    On a terminal one line with a bar is redrawn; elsewhere (a pipe, a file, TERM=dumb) plain lines
    come at most every five seconds, the first and the last always:
    `train   42%  1.2M of 2.9M steps  182k steps/s  0:14 left  reward 0.031`.

    Args:
      total_steps: what 100% is.
      label: one word that says what is under way.
      stream: standard error if None.
      clock: seconds, for tests.
    """
    return Progress(total_steps, label, stream if stream is not None else sys.stderr, clock)


class Stage:
    """How long a stage took. `seconds`: 0 until it has ended."""

    seconds: float = 0.0


@contextlib.contextmanager
def stage(
    label: str, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[Stage]:
    """Print `label ...` when a stage without steps begins, and its seconds when it ends."""
    out = stream if stream is not None else sys.stderr
    timed, began = Stage(), clock()
    out.write(f"{label} ... ")
    out.flush()
    ending = "stopped after "
    try:
        yield timed
        ending = ""
    finally:
        timed.seconds = clock() - began
        out.write(f"{ending}{timed.seconds:.1f} s\n")
        out.flush()
