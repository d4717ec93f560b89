"""What a learner saves while it trains: its agent, at planned steps or seconds.

The seconds are a clock's, of training alone: loading, compiling, saving and evaluating stop it.
"""

import os
import pathlib
import time
from collections.abc import Callable

PLANNED = (1 / 4, 1 / 2)  # of the steps; the last look is at their end
FIRST, FACTOR = 0.25, 1.25  # of a race: seconds of the first look, and from one to the next


def since_start() -> float:
    """Seconds since this process began, imports included (Linux)."""
    ticks = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")


class Looks:
    """The clock, and the looks that are due; `saved` is called with each one's path."""

    def __init__(self, out: str, steps: int, seconds: float, ending: str):
        """Plans looks at parts of `steps`, or of a race of `seconds`."""
        self.folder, self.ending, self.seconds = pathlib.Path(out), ending, seconds
        self.folder.mkdir(parents=True, exist_ok=True)
        self.due = [steps * part for part in PLANNED]
        if seconds:
            self.due = [FIRST]
            while self.due[-1] * FACTOR < seconds:
                self.due.append(self.due[-1] * FACTOR)
        self.spent, self.found = 0.0, []
        self.before = self.began = time.perf_counter()

    def start(self) -> None:
        """Starts the clock, after all that is not training."""
        self.before = since_start()
        self.began = time.perf_counter()

    def passed(self, at: float) -> bool:
        """Whether a look is due at this step, or in a race at this second; it is then done."""
        due = bool(self.due) and at >= self.due[0]
        self.due = [each for each in self.due if each > at]
        return due

    def look(self, steps: int, save: Callable[[str], None], end: bool = False) -> bool:
        """Saves where a look is due, and at the end; whether training goes on."""
        spent = self.spent + time.perf_counter() - self.began
        over = 0 < self.seconds < spent
        if not (self.passed(spent if self.seconds else steps) or end or over):
            return True
        self.spent = spent
        if not self.found or self.found[-1]["steps"] < steps:
            path = self.folder / f"{steps:09}{self.ending}"
            save(str(path))
            self.found.append({"steps": steps, "seconds": spent, "file": path.name})
        self.began = time.perf_counter()
        return not over
