"""What a learner of another library saves while it trains: its agent, at planned numbers of steps.

The seconds are those of training: loading, compiling and saving stop the clock. They are the
processor's, so that other work does not count; in a race they are a clock's.
"""

import json
import pathlib
import time
from collections.abc import Callable

PLANNED = (1 / 8, 1 / 4, 1 / 2, 3 / 4)  # of the budget; the last is at its end


class Looks:
    """The clock, and the looks that are due; `saved` is called with each one's path."""

    def __init__(self, out: str, steps: int, seconds: float, ending: str):
        """Plans looks up to `steps`; more of them where `seconds` end the training."""
        self.folder, self.ending, self.seconds = pathlib.Path(out), ending, seconds
        self.folder.mkdir(parents=True, exist_ok=True)
        self.due = [int(steps * part) for part in PLANNED]
        if seconds:  # a race: about every fifth more
            self.due = [int(steps * 1.2**-k) for k in range(40, -1, -1)]
        self.clock = time.perf_counter if seconds else time.process_time
        self.spent, self.began, self.found = 0.0, self.clock(), []

    def start(self) -> None:
        """Starts the clock, after all that is not training."""
        self.began = self.clock()

    def look(self, steps: int, save: Callable[[str], None], end: bool = False) -> bool:
        """Saves where a look is due at `steps`, and at the end; whether training goes on."""
        if not end and (not self.due or steps < self.due[0]):
            return True
        self.spent += self.clock() - self.began
        while self.due and steps >= self.due[0]:
            self.due.pop(0)
        path = self.folder / f"{steps:09}{self.ending}"
        save(str(path))
        self.found.append({"steps": steps, "seconds": self.spent, "file": path.name})
        (self.folder / "looks.json").write_text(json.dumps(self.found))
        self.start()
        return not 0 < self.seconds < self.spent
