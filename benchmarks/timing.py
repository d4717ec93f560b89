"""Times jitted programs and the programs of peers, one row of measurements for each."""

from __future__ import annotations

import contextlib
import json
import pathlib
import resource
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

import jax

from nca_trader.errors import ConfigError
from nca_trader.learner.programs import Compilations

SECONDS = 3.0  # for which a program is measured, ours and a peer's
ROUNDS = 5  # in which its calls are timed
FOLDER = pathlib.Path(__file__).resolve().parent


class Timing:
    """A jitted `carry -> carry`: its compilation, its first call, and later calls.

    Later calls are timed in rounds, so that a rival can be timed between them: the speed of a
    machine may move by a third within seconds.
    """

    def __init__(self, call: Callable[[Any], Any], carry: Any):
        self._call, self._carry = call, carry
        self._seconds: list[float] = []
        self._retraces = 0
        with Compilations() as compilations:
            self._first = self._timed()
        self._compile = compilations.seconds

    def _timed(self) -> float:
        began = time.perf_counter()
        self._carry = jax.block_until_ready(self._call(self._carry))
        return time.perf_counter() - began

    def rounds(self, between: Callable[[], Any] = lambda: None) -> None:
        """Calls for `SECONDS`, and at least `ROUNDS` times; runs `between` after each round."""
        for _ in range(ROUNDS):
            self.round()
            between()

    def round(self) -> None:
        """Calls for one round, at least once."""
        end = time.perf_counter() + SECONDS / ROUNDS
        with Compilations() as compilations:
            self._seconds.append(self._timed())
            while time.perf_counter() < end:
                self._seconds.append(self._timed())
        self._retraces += compilations.count

    def row(self, name: str, steps: int, **facts: Any) -> dict[str, Any]:
        """Returns what was measured so far; the rate is that of the median call.

        Args:
          name: the row's name.
          steps: environment steps, or decisions, of one call.
          **facts: keys that the row adds.
        """
        return {
            "name": name,
            "envs": None,
            "envs_per_segment": None,
            "steps_per_s": steps / statistics.median(self._seconds),
            "compile_s": self._compile,
            "first_call_s": self._first,
            "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "retraces": self._retraces,
            "peer": None,
            "ratio": None,
            "device": jax.devices()[0].device_kind,
        } | facts


def measure(
    name: str, call: Callable[[Any], Any], carry: Any, steps: int, **facts: Any
) -> dict[str, Any]:
    """Returns the row of a `Timing` after its rounds."""
    timing = Timing(call, carry)
    timing.rounds()
    return timing.row(name, steps, **facts)


def compared(row: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Adds a peer's name and rate, and the ratio of the rates, to `row`."""
    return row | {
        "peer": theirs["peer"],
        "peer_steps_per_s": theirs["steps_per_s"],
        "ratio": row["steps_per_s"] / theirs["steps_per_s"],
    }


class Peer:
    """A program of `benchmarks.peers`, which times itself in a process of its own.

    Args:
      python: the interpreter that runs it, see `make bench-peers`.
      module: its name.
      options: arguments of its `main`.
      turns: whether it waits for `round` before each slice that it times.

    Raises:
      ConfigError: the interpreter cannot run it.
    """

    def __init__(self, python: str, module: str, options: dict[str, Any], turns: bool = True):
        self._python, self._module = python, module
        words = [*_words(python, module, options), *(["--turns"] if turns else [])]
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        try:
            self._process = subprocess.Popen(words, cwd=FOLDER.parent, text=True, **pipes)
        except OSError as error:
            raise ConfigError(f"--peers {python}: cannot be run ({error.strerror}).") from None
        if turns:
            self._wait()  # until it has warmed up

    def round(self) -> None:
        """Waits while the peer times a slice."""
        stdin: Any = self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # it ended: stderr says why
            stdin.write("\n")
            stdin.flush()
        self._wait()

    def result(self) -> dict[str, Any]:
        """Returns the peer's row once it has ended."""
        out, err = self._process.communicate()
        if self._process.returncode:
            raise self._failed(err)
        row = json.loads(out.splitlines()[-1])
        return row | {"peer": f"{row['peer']} {row['version']}"}

    def _wait(self) -> None:
        stdout: Any = self._process.stdout
        if not stdout.readline():
            raise self._failed(self._process.communicate()[1])

    def _failed(self, err: str) -> Exception:
        last = (err.strip().splitlines() or ["no message"])[-1]
        return ConfigError(
            f"--peers {self._python}: {self._module} failed ({last}); run `make bench-peers`."
        )


def measured_by(python: str, module: str, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the row that a peer measures by itself; see `Peer`."""
    return Peer(python, module, options, turns=False).result()


def _words(python: str, module: str, options: dict[str, Any]) -> list[str]:
    given = {"seconds": SECONDS} | options
    return [python, "-m", f"benchmarks.peers.{module}", *(f"--{k}={v}" for k, v in given.items())]
