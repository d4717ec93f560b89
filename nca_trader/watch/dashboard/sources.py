"""The sessions and runs that a dashboard shows: found, followed, and halted.

A name in a URL is looked up among them; no path is ever made of it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pathlib
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from nca_trader.cloud import local
from nca_trader.config.records import read_json
from nca_trader.errors import ConfigError, NcaTraderError, RunError, StateError, printable
from nca_trader.paper.halting import read_halt, request_halt
from nca_trader.paper.journal import read_events, verify
from nca_trader.runs.folder import LOCK
from nca_trader.watch.dashboard.book import Book
from nca_trader.watch.dashboard.session import Vitals, session_view
from nca_trader.watch.dashboard.training import training_view
from nca_trader.watch.metrics import Rows

JOURNALS = (".sqlite", ".sqlite3", ".db")
EXPORTED = ".nca"
MOST = 200  # sources
FRESH = 0.5  # seconds that a view is shown again before its files are read again
SCAN_EVERY = 10.0  # seconds between two looks into the root
VERIFY_EVERY = 60.0  # seconds, and at least this many times what a verification takes:
VERIFY_SHARE = 20.0
log = logging.getLogger("nca_trader.watch")


class Source:
    """A session or a run. `view` is for one thread at a time of many.

    Attributes:
      name: in URLs. label: for people. kind: "paper" or "training". path: of its file or folder.
    """

    kind = ""

    def __init__(self, path: pathlib.Path, label: str):
        self.path, self.label, self.name = path, label, ""
        self._lock = threading.Lock()
        self._views: dict[str, tuple[float, dict[str, Any]]] = {}

    def view(self, asset: str = "") -> dict[str, Any]:
        """Return the view model, read again if the last one is old."""
        with self._lock:
            at, found = self._views.get(asset, (-math.inf, {}))
            if time.monotonic() - at > FRESH:
                found = self._look(asset)
                # The asset is a client's word, so the cache needs an end.
                if asset not in self._views and len(self._views) >= MOST:
                    self._views.clear()
                self._views[asset] = time.monotonic(), found
            return found

    def _look(self, asset: str) -> dict[str, Any]:
        raise NotImplementedError


class RunSource(Source):
    """A training run."""

    kind = "training"

    def __init__(self, path: pathlib.Path, label: str):
        super().__init__(path, label)
        self._follower = Rows(path / "metrics.jsonl")
        self._rows: list[dict[str, Any]] = []
        self._restarts = 0

    def _look(self, asset: str) -> dict[str, Any]:
        new = self._follower.poll()
        # The file began again, by a run that was rolled back: its old rows are void.
        if self._follower.restarts != self._restarts:
            self._rows, self._restarts = [], self._follower.restarts
        self._rows += new
        about, fault = {}, ""
        # A run writes run.json once it has compiled; until then the folder is there without it.
        with contextlib.suppress(FileNotFoundError):
            try:
                about = read_json(
                    (self.path / "run.json").read_bytes(), str(self.path / "run.json")
                )
            except (NcaTraderError, OSError) as error:
                fault = str(error)
        written = self._follower.written()
        vitals = Vitals(
            str(self.path),
            time.time(),
            math.nan if written is None else written,
            holder_of(self.path / LOCK),
            fault=fault,
        )
        return training_view(self._rows, about if isinstance(about, dict) else {}, vitals)


class JournalSource(Source):
    """A paper session.

    Args:
      path: its journal.
      label: for people.
      runs: `() ->` the run folders and exported files that may be the agent's.
      pool: threads for what takes longer than a page may wait.
    """

    kind = "paper"

    def __init__(
        self,
        path: pathlib.Path,
        label: str,
        runs: Callable[[], Sequence[pathlib.Path]],
        pool: ThreadPoolExecutor,
    ):
        super().__init__(path, label)
        self._runs, self._pool = runs, pool
        self._begin()
        self._seeing = threading.Lock()

    def _begin(self) -> None:
        self._book, self._inode = Book(keeps_bars=True), 0
        self._checked, self._damage = "", ""
        self._check: Future[None] | None = None
        self._next_check, self._written, self._verified = 0.0, 0.0, (-1, 0.0)
        self._sights: list[Any] = []  # of the agent, or of each sleeve whose run is there
        self._sight_note, self._sight_job = "", None
        self._bars: list[Any] = []
        self._seen: dict[str, dict[str, Any]] = {}

    def _look(self, asset: str) -> dict[str, Any]:
        fault, written = "", math.nan
        try:
            status = os.stat(self.path)
            if self._inode not in (0, status.st_ino):  # another journal by the same name
                self._begin()
            self._inode = status.st_ino
            self._book.add_all(list(read_events(self.path, after=self._book.seq)))
            written = self._written = _written(self.path)
        except FileNotFoundError:
            fault = f"{self.path}: there is no such journal yet"
        except (NcaTraderError, sqlite3.Error, OSError, ValueError) as error:
            fault = str(error)
        # After reading, so that what is new is known to be worth a walk.
        self._verify_sometimes()
        vitals = Vitals(
            path=str(self.path),
            now=time.time(),
            written=written,
            holder=holder_of(sibling(self.path, ".lock")),
            halt=read_halt(self.path),
            fault=printable(self._damage or fault),
            checked=self._checked,
        )
        return session_view(self._book, vitals, self._look_at_sight(asset))

    def _verify_sometimes(self) -> None:
        """Walk the hash chain in another thread, if there is something new and it is time."""
        running = self._check is not None and not self._check.done()
        if running or time.monotonic() < self._next_check or not self._inode:
            return
        if (self._book.seq, self._written) == self._verified:
            return
        self._check = self._pool.submit(self._verify, self._book)

    def _verify(self, book: Book) -> None:
        began, version = time.monotonic(), (book.seq, self._written)
        found, damage = "", ""
        try:
            found = f"holds up to event {verify(self.path).seq:,}"
        except StateError as error:
            damage = str(error)
        except (NcaTraderError, sqlite3.Error, OSError) as error:  # e.g. moved away meanwhile
            found = f"not checked this time ({printable(error)})"
        # A journal that was exchanged meanwhile has another book, which this finding is not
        # about.
        if book is self._book:
            self._checked, self._damage, self._verified = found, damage, version
        spent = time.monotonic() - began
        # A walk of a long journal takes seconds; this keeps it to a twentieth of a core.
        self._next_check = time.monotonic() + max(VERIFY_EVERY, VERIFY_SHARE * spent)

    def _look_at_sight(self, asset: str) -> dict[str, Any] | None:
        """Return the heat maps as far as they are computed; a thread goes on with new bars."""
        book = self._book
        self._bars += book.bars
        book.bars = []
        if not self._runs() or not book.started:
            return None
        idle = self._sight_job is None or self._sight_job.done()
        if idle and self._bars and self._sight_note == "":
            bars, self._bars = self._bars, []
            self._sight_job = self._pool.submit(self._see, book, bars)
        # A thread that computes keeps the maps of before on the page.
        if self._sights and self._seeing.acquire(blocking=False):
            try:
                views = [sight.view(book, asset) for sight in self._sights]
                maps = [each for view in views for each in view["maps"]]
                self._seen[asset] = views[0] | {"maps": maps}
            finally:
                self._seeing.release()
        waiting = {"maps": [], "assets": [], "asset": "", "note": "Being computed from the bars."}
        if self._sight_note:
            waiting["note"] = self._sight_note
        return self._seen.get(asset, waiting)

    def _see(self, book: Book, bars: list[Any]) -> None:
        with self._seeing:
            try:
                self._sights = self._sights or self._open_sights(book)
                for sight in self._sights:
                    sight.add(bars)
            except NcaTraderError as error:
                self._sight_note = printable(error)
            except Exception as error:  # the page must not fail for a picture on it
                log.warning("%s: heat maps are left out (%r)", self.path, error)
                self._sight_note = f"Not computed: {printable(error)}"

    def _open_sights(self, book: Book) -> list[Any]:
        # Here, because it imports jax, which a dashboard without a session does not need.
        from nca_trader.watch.dashboard.sight import Sight

        sleeves, found, refused = book.started.get("sleeves"), [], []
        traders = sleeves if isinstance(sleeves, dict) else {"": book.started}
        for sleeve, trader in traders.items():
            # The run of that name first: to open the others would compile them.
            for path in sorted(self._runs(), key=lambda path: path.name != trader.get("agent")):
                try:
                    found.append(Sight(path, book.started, sleeve))
                    break
                except NcaTraderError as error:
                    refused.append(str(error))
        if not found:
            none = "None of the runs is this session's."
            raise RunError(refused[0] if len(refused) == 1 else none)
        return found

    def halt(self, reason: str) -> bool:
        """Ask the session to stop; True if this call did, False if it was asked before.

        Raises:
          StateError: the file cannot be written.
        """
        done = request_halt(self.path, f"{reason.strip() or 'no reason given'} (dashboard)")
        with self._lock:
            self._views.clear()
        return done


def sibling(path: pathlib.Path, suffix: str) -> pathlib.Path:
    """Return the file of a journal with that suffix, e.g. ".halt"."""
    return path.with_name(path.name + suffix)


def _written(path: pathlib.Path) -> float:
    times = [os.stat(path).st_mtime]
    with contextlib.suppress(OSError):
        # SQLite writes there first, and to the journal itself only now and then.
        times.append(os.stat(sibling(path, "-wal")).st_mtime)
    return max(times)


def holder_of(lock: pathlib.Path) -> str:
    """Return which process holds a lock file, e.g. "process 812"; "" if none does.

    The lock is looked at and not tried: to try it would keep a session from starting just then.
    """
    try:
        inode = os.stat(lock, follow_symlinks=False).st_ino
        listed = pathlib.Path("/proc/locks").read_text()
    except OSError:
        return ""
    for line in listed.splitlines():
        fields = line.split()
        if len(fields) >= 6 and fields[1] == "FLOCK" and fields[5].endswith(f":{inode}"):
            return f"process {fields[4]}"
    return ""


class Sources:
    """All that a dashboard shows, by name.

    Args:
      runs: run folders and exported files. journals: journals, which need not exist yet.
      root: a folder whose runs and journals are shown too, also those that come later; the other
        paths must then be inside.

    Raises:
      ConfigError: a path is outside the root or a link; there is no such run or folder.
    """

    def __init__(
        self,
        runs: Sequence[str] = (),
        journals: Sequence[str] = (),
        root: str | None = None,
    ):
        self._pool = ThreadPoolExecutor(2, "dashboard")
        self._lock = threading.Lock()
        self._found: dict[str, Source] = {}
        self._paths: set[pathlib.Path] = set()
        self._exported: list[pathlib.Path] = []  # they have no page of their own
        self._root = None if root is None else local(root, "a dashboard").absolute()
        self._scanned = -math.inf
        if self._root is not None and not self._root.is_dir():
            raise ConfigError(f"{root}: there is no such folder; give the folder of the runs.")
        for run in runs:
            path = self._checked(run)
            if path.is_file():
                self._exported.append(path)
            elif not path.is_dir():
                raise RunError(
                    f"{run}: no such folder or file; give the folder of a training run, or an "
                    "exported file."
                )
            else:
                self._add(path, path.name, "training")
        for journal in journals:
            path = self._checked(journal)
            if not path.parent.is_dir():
                raise ConfigError(f"{path.parent}: there is no such folder for the journal.")
            self._add(path, path.name, "paper")

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def all(self) -> list[Source]:
        """Return every source: sessions first, each kind by label."""
        with self._lock:
            if self._root is not None and time.monotonic() - self._scanned > SCAN_EVERY:
                self._scan(self._root)
                self._scanned = time.monotonic()
            found = list(self._found.values())
        return sorted(found, key=lambda source: (source.kind, source.label))

    def get(self, name: str) -> Source | None:
        """Return the source of a name, or None."""
        if name not in self._found:
            self.all()  # an address that was kept, before anyone looked at the list
        return self._found.get(name)

    def _checked(self, text: str) -> pathlib.Path:
        path = local(text, "a dashboard").absolute()
        if path.is_symlink():
            raise ConfigError(f"{text}: is a link; give the path that it points to.")
        if self._root is not None and not path.resolve().is_relative_to(self._root.resolve()):
            raise ConfigError(f"{text}: is outside the root {self._root}; give a path inside it.")
        return path

    def _scan(self, root: pathlib.Path) -> None:
        """Add the runs and journals of a folder and of its folders; links are passed over."""
        folders = [root, *self._plain(root, folders=True)]
        for folder in folders:
            if (folder / "run.json").is_file():
                self._add(folder, folder.name, "training")
            for path in self._plain(folder, folders=False):
                if path.suffix == EXPORTED and path not in self._exported:
                    self._exported.append(path)
                if path.suffix in JOURNALS and _is_journal(path):
                    own = folder == root
                    self._add(path, path.name if own else f"{folder.name}/{path.name}", "paper")

    def _plain(self, folder: pathlib.Path, folders: bool) -> list[pathlib.Path]:
        try:
            with os.scandir(folder) as entries:
                # Links are left out: one could lead out of the root.
                kept = [
                    entry.name
                    for entry in entries
                    if (entry.is_dir if folders else entry.is_file)(follow_symlinks=False)
                    and not entry.name.startswith(".")
                ]
        except OSError:
            return []
        return [folder / name for name in sorted(kept)]

    def _add(self, path: pathlib.Path, label: str, kind: str) -> None:
        if path in self._paths or len(self._found) >= MOST:
            return
        label = printable(label)
        if kind == "training":
            source: Source = RunSource(path, label)
        else:
            source = JournalSource(path, label, self._runs, self._pool)
        # A name in a URL has few characters, whatever folders are called.
        base = re.sub(r"[^a-z0-9._-]+", "-", label.lower()).strip("-._")[:48] or kind
        name, number = base, 2
        while name in self._found:
            name, number = f"{base}-{number}", number + 1
        source.name = name
        self._paths.add(path)
        self._found[name] = source

    def _runs(self) -> list[pathlib.Path]:
        found = list(self._found.values())
        return [*(x.path for x in found if x.kind == "training"), *self._exported]


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
