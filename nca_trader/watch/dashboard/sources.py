"""The paper sessions that a dashboard shows: found, followed, and halted.

A name in a URL is looked up among them; no path is ever made of it.
"""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
import re
import sqlite3
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from nca_trader.cloud import local
from nca_trader.errors import ConfigError, NcaTraderError, StateError, printable
from nca_trader.machine import refuse_link
from nca_trader.paper.journal.chain import sibling, writer_of
from nca_trader.paper.journal.halting import read_halt, request_halt
from nca_trader.paper.journal.journal import read_events, verify
from nca_trader.paper.journal.tally import Paper, Tally
from nca_trader.watch.dashboard.session import Vitals, session_view

JOURNALS = (".sqlite", ".sqlite3", ".db")
MOST = 200  # sessions
FRESH = 0.5  # seconds that a view is shown again before its files are read again
SCAN_EVERY = 10.0  # seconds between two looks into the root
VERIFY_EVERY = 60.0  # seconds, and at least this many times what a verification takes:
VERIFY_SHARE = 20.0


class FollowedSession:
    """A paper session. `view` is for one thread at a time of many.

    Args:
      path: its journal.
      label: for people.
      pool: threads for what takes longer than a page may wait.

    Attributes:
      name: in URLs. label: for people. path: of the journal.
    """

    def __init__(self, path: pathlib.Path, label: str, pool: ThreadPoolExecutor):
        self.path, self.label, self.name = path, label, ""
        self._pool, self._lock = pool, threading.Lock()
        self._at, self._view = -math.inf, dict[str, Any]()
        self._paper = Paper(path)
        self._begin()

    def _begin(self) -> None:
        """Forget what was found of another journal in this one's place."""
        self._checked, self._damage = "", ""
        self._check: Future[None] | None = None
        self._next_check, self._written, self._verified = 0.0, 0.0, (-1, 0.0)

    def view(self) -> dict[str, Any]:
        """Return the view model, read again if the last one is old."""
        with self._lock:
            if time.monotonic() - self._at > FRESH:
                self._view = self._look()
                self._at = time.monotonic()
            return self._view

    def _look(self) -> dict[str, Any]:
        fault, written, before = "", math.nan, self._paper.tally
        try:
            self._paper.poll()
            if self._paper.tally is not before:
                self._begin()
            with contextlib.suppress(FileNotFoundError):  # not made yet, or moved away
                written = self._written = _written(self.path)
        except (NcaTraderError, sqlite3.Error, OSError, ValueError) as error:
            fault = str(error)
        # After reading, so that what is new is known to be worth a walk.
        self._verify_sometimes()
        vitals = Vitals(
            path=str(self.path),
            now=time.time(),
            written=written,
            holder=writer_of(self.path),
            halt=read_halt(self.path),
            fault=printable(self._damage or fault),
            checked=self._checked,
        )
        return session_view(self._paper.tally, vitals)

    def _verify_sometimes(self) -> None:
        """Walk the hash chain in another thread, if there is something new and it is time."""
        tally = self._paper.tally
        running = self._check is not None and not self._check.done()
        if running or time.monotonic() < self._next_check or not tally.seq:
            return
        if (tally.seq, self._written) != self._verified:
            self._check = self._pool.submit(self._verify, tally)

    def _verify(self, tally: Tally) -> None:
        began, version = time.monotonic(), (tally.seq, self._written)
        found, damage = "", ""
        try:
            found = f"holds up to event {verify(self.path).seq:,}"
        except StateError as error:
            damage = str(error)
        except (NcaTraderError, sqlite3.Error, OSError) as error:  # e.g. moved away meanwhile
            found = f"not checked this time ({printable(error)})"
        # A journal that was exchanged meanwhile has another tally, which this is not about.
        if tally is self._paper.tally:
            self._checked, self._damage, self._verified = found, damage, version
        spent = time.monotonic() - began
        # A walk of a long journal takes seconds; this keeps it to a twentieth of a core.
        self._next_check = time.monotonic() + max(VERIFY_EVERY, VERIFY_SHARE * spent)

    def halt(self, reason: str) -> bool:
        """Ask the session to stop; True if this call did, False if it was asked before.

        Raises:
          StateError: the file cannot be written.
        """
        done = request_halt(self.path, f"{reason.strip() or 'no reason given'} (dashboard)")
        self._at = -math.inf
        return done


def _written(path: pathlib.Path) -> float:
    times = [os.stat(path).st_mtime]
    with contextlib.suppress(OSError):
        # SQLite writes there first, and to the journal itself only now and then.
        times.append(os.stat(sibling(path, "-wal")).st_mtime)
    return max(times)


class FollowedSessions:
    """All sessions that a dashboard shows, by name.

    Args:
      journals: their journals, which need not exist yet.
      root: a folder whose journals, and those of its folders, are shown too, also those that come
        later; the other paths must then be inside.

    Raises:
      ConfigError: a path is outside the root or a link; there is no such folder.
    """

    def __init__(self, journals: Sequence[str] = (), root: str | None = None):
        self._pool = ThreadPoolExecutor(2, "dashboard")
        self._lock = threading.Lock()
        self._found: dict[str, FollowedSession] = {}
        self._paths: set[pathlib.Path] = set()
        self._root = None if root is None else local(root, "a dashboard").absolute()
        self._scanned = -math.inf
        if self._root is not None and not self._root.is_dir():
            raise ConfigError(f"{root}: there is no such folder; give the folder of the journals.")
        for journal in journals:
            path = self._checked(journal)
            self._add(path, path.name)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def all(self) -> list[FollowedSession]:
        """Return every session, by label."""
        with self._lock:
            if self._root is not None and time.monotonic() - self._scanned > SCAN_EVERY:
                self._scan(self._root)
                self._scanned = time.monotonic()
            found = list(self._found.values())
        return sorted(found, key=lambda source: source.label)

    def get(self, name: str) -> FollowedSession | None:
        """Return the session of a name, or None."""
        if name not in self._found:
            self.all()  # an address that was kept, before anyone looked at the list
        return self._found.get(name)

    def _checked(self, text: str) -> pathlib.Path:
        path = local(text, "a dashboard").absolute()
        refuse_link(path)
        if self._root is not None and not path.resolve().is_relative_to(self._root.resolve()):
            raise ConfigError(f"{text}: is outside the root {self._root}; give a path inside it.")
        return path

    def _scan(self, root: pathlib.Path) -> None:
        """Add the journals of a folder and of its folders."""
        for folder in [root, *filter(pathlib.Path.is_dir, _inside(root))]:
            for path in _inside(folder):
                if path.suffix in JOURNALS and path.is_file() and _is_journal(path):
                    self._add(path, path.name if folder == root else f"{folder.name}/{path.name}")

    def _add(self, path: pathlib.Path, label: str) -> None:
        if path in self._paths or len(self._found) >= MOST:
            return
        source = FollowedSession(path, printable(label), self._pool)
        # A name in a URL has few characters, whatever folders are called.
        base = re.sub(r"[^a-z0-9._-]+", "-", source.label.lower()).strip("-._")[:48] or "session"
        name, number = base, 2
        while name in self._found:
            name, number = f"{base}-{number}", number + 1
        source.name = name
        self._paths.add(path)
        self._found[name] = source


def _inside(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return what is in a folder, but for links, as a link could lead out of the root."""
    try:
        found = sorted(folder.iterdir())
    except OSError:
        return []
    return [path for path in found if not (path.is_symlink() or path.name.startswith("."))]


def _is_journal(path: pathlib.Path) -> bool:
    """Return whether a file is one that a page can say something about, damaged or not."""
    # Only sessions write this file, so a damaged journal is recognised by it.
    if sibling(path, ".head").exists():
        return True
    try:
        next(read_events(path), None)
    except (NcaTraderError, sqlite3.Error, OSError):
        return False
    return True
