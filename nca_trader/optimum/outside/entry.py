"""An agent from outside, for `nca-trader prove --agent`: what it is, and the process that plays it.

The process gets observations and nothing else, see `nca_trader.optimum.outside.player`, and the
paths are drawn after it has loaded the agent.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import hashlib
import json
import math
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from numbers import Real
from typing import Any

import numpy as np

from nca_trader.config.extensions import parse_name, refuse_foreign
from nca_trader.config.modules import digest_of_files, locate
from nca_trader.config.records import Mismatch, convert, loads, plain
from nca_trader.config.toml import preset_names
from nca_trader.errors import ConfigError, argument, in_a_command
from nca_trader.optimum.outside import player

SECONDS = 1800.0  # that an agent has on a market, loading included
LONGEST = 1 << 16  # bytes of a message that is not actions
GET_DUMPABLE, SET_DUMPABLE = 3, 4  # of prctl on Linux
BOTH_WAYS = 2  # of shutdown
PICKLED = {"sb3": (".zip",), "rejax": (".pkl", ".pickle")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Facts:
    """What a process may say of its entry, see `nca_trader.optimum.outside.player`."""

    memory: bool | None = None
    error: str | None = None
    digest: str | None = None
    library: str | None = None
    version: str | None = None
    name: str | None = None
    observation: int | None = None
    space: str | None = None
    features: list[str] | None = None
    greedy: bool | None = None
    steps: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutsideAgent:
    """An agent from outside.

    Attributes:
      name: as the user wrote it.
      kind: "function", "run", "sb3" or "rejax".
      files: that hold it.
      member: the name in its file, of a function.
      digest: SHA-256 of the files; of a run that of its parameters, once it is loaded.
      allow_code: whether code may run that its files hold.
      python: that plays it.
      seconds: that it has on a market, loading included.
      facts: what its process says of it.
    """

    name: str
    kind: str
    files: tuple[str, ...]
    member: str = ""
    digest: str = ""
    allow_code: bool = False
    python: str = sys.executable
    seconds: float = SECONDS
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """Return what a row of `--json` says of it."""
        name = self.member or pathlib.Path(self.files[0]).name
        known = {"kind": self.kind, "name": name, "digest": self.digest} | self.facts
        kept = ("kind", "name", "library", "version", "digest", "greedy")
        return {name: known.get(name) for name in kept}


def entry_of(
    agent: Any,
    allow_code: bool = False,
    python: str | None = None,
    seconds: float | None = None,
) -> OutsideAgent | None:
    """Return the agent from outside that `agent` names; None for a preset or a configuration.

    Raises:
      ConfigError: a file is missing, is not the user's own, or holds code that is not allowed; no
        time is given.
    """
    seconds = SECONDS if seconds is None else seconds
    if not isinstance(seconds, Real) or not 0 < seconds <= threading.TIMEOUT_MAX:
        raise ConfigError(f"{argument('agent_seconds', seconds)}: give a number above 0, e.g. 600.")
    if not isinstance(agent, str | os.PathLike):
        return None
    name = os.fspath(agent)
    first, *more = name.split(",")
    kind, member, files, digest = "", "", [first, *more], ""
    if name in preset_names("agents") or name.endswith(".toml"):
        return None
    if own := parse_name(name):
        refuse_foreign(name, "agents")
        if own.values is not None:
            raise ConfigError(f"{name}: takes no values in parentheses; give FILE.py:NAME.")
        kind, member, files = "function", own.member, [str(locate(own.module).resolve())]
        digest = digest_of_files(own.module)
    else:
        if first.endswith(".py"):
            raise ConfigError(f"{argument('agent', name)}: name a function of it, {name}:NAME.")
        kind = next((kind for kind, ends in PICKLED.items() if first.endswith(ends)), "")
        if not kind and not os.path.exists(name) and "://" not in name:
            return None
        kind, files = (kind, files) if kind else ("run", [name])
    if kind in PICKLED:
        for file in files:
            if not os.path.isfile(file):
                raise ConfigError(f"{argument('agent', name)}: no file {file}; check the path.")
        if not allow_code:
            remedy = argument("allow_code") + ("" if in_a_command() else "=True")
            raise ConfigError(
                f"{argument('agent', name)}: holds pickled objects, which run code when they are "
                f"loaded; where you trust it, give {remedy}."
            )
        whole = hashlib.sha256()
        for file in files:
            with open(file, "rb") as source:  # in parts: it may be large
                for part in iter(lambda: source.read(1 << 20), b""):
                    whole.update(part)
        digest = whole.hexdigest()
    python = sys.executable if python is None else python
    return OutsideAgent(
        name=name, kind=kind, files=tuple(files), member=member, digest=digest,
        allow_code=allow_code, python=python, seconds=seconds,
    )  # fmt: skip


class Playing(contextlib.AbstractContextManager["Playing"]):
    """The process of an entry on one market; a context manager that ends it.

    Attributes:
      facts: what it said of the entry.
    """

    def __init__(
        self, entry: OutsideAgent, market: str, assets: int, observation: int, choices: int
    ):
        """Start it and wait until the entry is loaded.

        Args:
          entry: to play.
          market: for messages.
          assets: A.
          observation: D.
          choices: of each asset's action; 0 asks for weights.

        Raises:
          ConfigError: it cannot be loaded.
        """
        self._where, self._choices, self._assets = f"{entry.name} on {market}", choices, assets
        self._seconds, self._late, self.steps = entry.seconds, False, 0
        self._link, theirs = multiprocessing.Pipe()
        command = [entry.python, player.__file__, str(theirs.fileno())]
        # The accelerator stays ours.
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONSAFEPATH": "1"}
        try:
            # A session of its own: Ctrl-C reaches us, and we end it with all that it started. On
            # Linux it is that of the player's supervisor.
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self._link.close()
            raise ConfigError(
                f"{argument('python', entry.python)}: cannot be started ({error.strerror}); give "
                "the program of a Python that has numpy."
            ) from None
        finally:
            theirs.close()
        # A thread, since reading and writing may both wait for a process that has stopped.
        self._timer = threading.Timer(entry.seconds, self._hang_up)
        self._timer.daemon = True
        self._timer.start()
        try:
            asked = dataclasses.asdict(entry) | {
                "assets": assets, "observation": observation, "whole": bool(choices),
                "in_a_command": in_a_command(),
            }  # fmt: skip
            self.facts = self._facts(self._ask(json.dumps(asked).encode(), LONGEST))
            if "error" in self.facts:
                raise self._fault(self.facts["error"])
            # The digest of all but runs is that of their files, and a function is of no library.
            self.facts = {"memory": False} | self.facts
            if entry.kind == "function":
                self.facts = {"memory": self.facts["memory"]}
            elif entry.kind != "run":
                self.facts.pop("digest", None)
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process and all that it started."""
        self._timer.cancel()
        self._timer.join()  # it must not close another file of the same number
        self._process.send_signal(signal.SIGCONT)  # to a supervisor that the agent has stopped
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(player.PATIENCE + 2)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._link.close()

    def act(self, observations: np.ndarray, forget: bool) -> np.ndarray:
        """Return the actions `[B, A]` int32, or float32 weights, for `[B, D]` observations.

        Args:
          observations: float32.
          forget: whether its memory begins.

        Raises:
          ConfigError: no answer in time, or one that is not actions of the market.
        """
        size = 4 * len(observations) * self._assets
        head = bytes([forget, 0, 0, 0])
        self.steps += 1
        answer = self._ask(head + observations.tobytes(), max(size + 1, LONGEST))
        if answer[:1] != b"A" or len(answer) != 1 + size:
            raise self._fault(answer[1:].decode(errors="replace"))
        dtype = np.int32 if self._choices else np.float32
        actions = np.frombuffer(answer, dtype, offset=1).reshape(-1, self._assets)
        if not self._choices:
            if np.isnan(actions).any():
                raise self._fault("returned NaN; return numbers")
        elif actions.min() < 0 or actions.max() >= self._choices:
            wrong = actions.max() if actions.min() >= 0 else actions.min()
            raise self._fault(f"returned {wrong}; return 0 to {self._choices - 1}")
        return actions

    def _facts(self, answer: bytes) -> dict[str, Any]:
        try:
            return plain(convert(loads(answer), _Facts))
        except (Mismatch, ValueError):
            raise self._fault("its process does not say what it loaded") from None

    def _ask(self, message: bytes, longest: int) -> bytes:
        """Send a message and return the answer, at most `longest` bytes."""
        try:
            self._link.send_bytes(message)
            return self._link.recv_bytes(longest)
        except (EOFError, OSError):
            more = argument("agent_seconds", math.ceil(2 * self._seconds))
            late = f"is not done after {self._seconds:g} s; give more time, e.g. {more}"
            raise self._fault(late if self._late else "its process ended") from None

    def _hang_up(self) -> None:
        # Who left its process group lives on, and must not be waited for.
        self._late = True
        ctypes.CDLL(None).shutdown(self._link.fileno(), BOTH_WAYS)

    def _fault(self, what: str) -> ConfigError:
        at = f", step {self.steps}" if self.steps else ""
        return ConfigError(f"{self._where}{at}: {what.rstrip('.')}.")


@contextlib.contextmanager
def unreadable() -> Iterator[None]:
    """Keep other processes of the user from reading this one's memory inside the block, on Linux.

    A process that may trace all others, e.g. of root, reads it all the same.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", lambda *_: 0)
    before = prctl(GET_DUMPABLE)
    prctl(SET_DUMPABLE, 0)
    try:
        yield
    finally:
        prctl(SET_DUMPABLE, before)
