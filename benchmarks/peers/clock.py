"""What the peers share: bars, the clock, and one JSON line on stdout.

A peer is a module with `main(envs, seconds, ...) -> dict`, run by the interpreter of .venv-peers
from the root of the checkout: `.venv-peers/bin/python -m benchmarks.peers.NAME --envs 4096`.
"""

import argparse
import inspect
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np

SLICES = 5  # the median of these counts: another program's burst spoils one, not the figure


def walk(length: int = 5031) -> dict[str, np.ndarray]:
    """Open, high, low, close and volume `[length]` of a random walk, the same for every peer."""
    rng = np.random.default_rng(0)
    close = 100.0 * np.exp(np.cumsum(rng.normal(0.0, 0.01, length)))
    open_ = np.concatenate([close[:1], close[:-1]])
    return {
        "open": open_,
        "high": np.maximum(open_, close) * 1.001,
        "low": np.minimum(open_, close) * 0.999,
        "close": close,
        "volume": np.full(length, 1e6),
    }


class Turns:
    """Lines of stdin at which a slice is timed, where --turns asks for them.

    So another program is timed between two slices: a machine's speed may move by a third within
    seconds.
    """

    def __init__(self) -> None:
        self.taken = False

    def wait(self) -> bool:
        """Whether another line came; at the end of stdin nothing waits any longer."""
        self.taken = self.taken and bool(sys.stdin.readline())
        return self.taken

    def say(self, word: object) -> None:
        """Answers the other program, if there is one."""
        if self.taken:
            print(json.dumps(word), flush=True)


TURNS = Turns()


def steps_per_second(call: Callable[[], Any], steps: int, seconds: float) -> float:
    """Median rate over slices of `seconds`; one call makes `steps` steps, the first is warm-up."""
    call()
    TURNS.say("ready")
    rates = []
    while TURNS.wait() or len(rates) < SLICES:
        began = now = time.perf_counter()
        calls = 0
        while now - began < seconds / SLICES:
            call()
            calls += 1
            now = time.perf_counter()
        rates.append(calls * steps / (now - began))
        TURNS.say(rates[-1])
    return statistics.median(rates)


def row(peer: str, package: str, envs: int, steps_per_s: float, **facts: Any) -> dict[str, Any]:
    """What a peer reports."""
    return {
        "peer": peer,
        "version": version(package),
        "envs": envs,
        "steps_per_s": steps_per_s,
        **facts,
    }


def run(main: Callable[..., dict[str, Any]]) -> None:
    """Calls `main` with an option for each of its arguments, and prints what it returns."""
    parser = argparse.ArgumentParser(description=inspect.getdoc(inspect.getmodule(main)))
    parser.add_argument("--turns", action="store_true", help="time a slice for each line of stdin")
    for name, argument in inspect.signature(main).parameters.items():
        parser.add_argument(f"--{name}", type=type(argument.default), default=argument.default)
    # A peer's own warnings are no concern of its rate, and one peer makes every warning an error.
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    options = vars(parser.parse_args())
    TURNS.taken = options.pop("turns")
    print(json.dumps(main(**options)), flush=True)
