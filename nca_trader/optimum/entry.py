"""An agent from outside, for `nca-trader prove --agent`: what it is, and the process that plays it.

The process gets observations and nothing else, see `nca_trader.optimum.player`, and the paths are
drawn after it has loaded the agent.
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
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from nca_trader.config.extensions import parse_name, refuse_foreign
from nca_trader.config.modules import digest_of_files, locate
from nca_trader.config.records import Mismatch, converted, loads, plain
from nca_trader.config.toml import preset_names
from nca_trader.errors import ConfigError, argument, in_a_command
from nca_trader.optimum import player

LOADING, FIRST, EACH = 300.0, 300.0, 60.0  # seconds that an agent has to load, and to answer
LONGEST = 1 << 16  # bytes of a message that is not actions
GET_DUMPABLE, SET_DUMPABLE = 3, 4  # of prctl on Linux
BOTH_WAYS = 2  # of shutdown
PICKLED = {"sb3": (".zip",), "rejax": (".pkl", ".pickle")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Facts:
    """What a process may say of its entry, see `nca_trader.optimum.player`."""

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
      facts: what its process says of it.
    """

    name: str
    kind: str
    files: tuple[str, ...]
    member: str = ""
    digest: str = ""
    allow_code: bool = False
    python: str = sys.executable
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """Return what a row of `--json` says of it."""
        name = self.member or pathlib.Path(self.files[0]).name
        known = {"kind": self.kind, "name": name, "digest": self.digest} | self.facts
        kept = ("kind", "name", "library", "version", "digest", "greedy")
        return {name: known.get(name) for name in kept}


def entry_of(
    agent: Any, allow_code: bool = False, python: str | None = None
) -> OutsideAgent | None:
    """Return the agent from outside that `agent` names; None for a preset or a configuration.

    Raises:
      ConfigError: a file is missing, is not the user's own, or holds code that is not allowed.
    """
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
        whole = b"".join(pathlib.Path(file).read_bytes() for file in files)
        digest = hashlib.sha256(whole).hexdigest()
    python = sys.executable if python is None else python
    return OutsideAgent(
        name=name, kind=kind, files=tuple(files), member=member, digest=digest,
        allow_code=allow_code, python=python,
    )  # fmt: skip


class Playing:
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
        self._over, self._deadline, self.steps = threading.Event(), math.inf, 0
        self._link, theirs = multiprocessing.Pipe()
        command = [entry.python, player.__file__, str(theirs.fileno())]
        # The accelerator stays ours.
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONSAFEPATH": "1"}
        try:
            # A session of its own: Ctrl-C reaches us, and we end it with all that it started.
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
        threading.Thread(target=self._watch, daemon=True).start()
        try:
            asked = dataclasses.asdict(entry) | {
                "assets": assets, "observation": observation, "whole": bool(choices)
            }  # fmt: skip
            self.facts = self._facts(self._ask(json.dumps(asked).encode(), LOADING, LONGEST))
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

    def __enter__(self) -> Playing:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process and all that it started."""
        self._over.set()
        self._kill()
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
        limit = FIRST if self.steps == 1 else EACH
        answer = self._ask(head + observations.tobytes(), limit, max(size + 1, LONGEST))
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
            return plain(converted(loads(answer), _Facts))
        except (Mismatch, ValueError):
            raise self._fault("its process does not say what it loaded") from None

    def _ask(self, message: bytes, limit: float, longest: int) -> bytes:
        """Send a message and return the answer, at most `longest` bytes."""
        self._deadline = time.monotonic() + limit
        try:
            self._link.send_bytes(message)
            answer = self._link.recv_bytes(longest)
            self._deadline = math.inf  # between two answers the caller may compute for long
            return answer
        except (EOFError, OSError):
            late = time.monotonic() > self._deadline
            what = f"no answer in {limit:.0f} s" if late else "its process ended"
            raise self._fault(what) from None

    def _watch(self) -> None:
        # A thread, since reading and writing may both wait for a process that has stopped.
        while not self._over.wait(0.1):
            if time.monotonic() > self._deadline:
                self._kill()
                # A process that has left its group lives on, and must not be waited for.
                ctypes.CDLL(None).shutdown(self._link.fileno(), BOTH_WAYS)
                return

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

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
