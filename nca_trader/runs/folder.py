"""The folder of a run, into which one process trains at a time; text that grows by lines; versions.

The lock is `train.lock` in the folder, there while a process trains, with its pid, host and
command. The kernel releases it however the process ends. What it excludes:

local disk        every process of the machine, also in other containers that see the folder
NFS, Lustre       every host, where flock reaches the server: NFS by default (not with `nolock` or
                  `local_lock=flock`), Lustre with `flock`; of a host that was lost the server
                  keeps the lock until its lease ends, some 90 seconds with NFS 4
no locks at all   training is refused
gs://, s3://      the processes of one user on one machine, by a file in the cache folder: an
                  object store has no locks

Only training takes it. Checkpoints and JSON files appear whole, so readers need no lock.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib.metadata
import io
import os
import pathlib
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from nca_trader import __version__
from nca_trader.cloud import CloudPath, Place, Version, cache_folder, together
from nca_trader.config.records import (
    CHECKSUM,
    RESTORE,
    open_record,
    record,
)
from nca_trader.errors import RunError, StateError, logger, system_errors
from nca_trader.machine import (
    HeldError,
    make_directory,
    no_link,
    refuse_links_in,
    take_lock,
    write_atomically,
)
from nca_trader.parallel import hosts

RETURNS = "selection.parquet"  # on the selection span, a column for each number of updates
RUN, LOCK, SHARED = "run.json", "train.lock", ".shared-"
# What a row of metrics.jsonl holds in addition to numbers by name.
ROW = {
    "update": int,
    "steps": int,
    "seeds": dict[str, list[float | None]],
}
# Those that decide a result, for records.
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "pandas")
NAMED = 10  # damaged rows that warnings name one by one
log = logger(__name__)


def make_folder(path: Place, texts: Mapping[str, str]) -> None:
    """Make the folder of a new run; leave one that holds a run as it is.

    Args:
      path: the folder.
      texts: the new run's files before run.json, by name. A process that was killed while it made
        the same run may have left them there.

    Raises:
      RunError: it holds other files. StateError: it cannot be made.
    """
    if (path / RUN).exists():
        return
    # The lock and the word of `check_shared` come before the run; a write begins with a part.
    ours = {LOCK, *(f"{name}.part" for name in (RUN, *texts))}

    def left(file: Place) -> bool:
        if file.name in texts and file.is_file():
            return file.read_bytes() == texts[file.name].encode()
        return file.name in ours or file.name.startswith(SHARED)

    if path.exists() and not (path.is_dir() and all(map(left, path.iterdir()))):
        what = "is a file" if path.is_file() else "holds files of something else"
        raise RunError(f"{path}: {what}; choose another folder.")
    make_directory(path, 0o700)


@contextlib.contextmanager
def training_in(path: Place, texts: Mapping[str, str]) -> Iterator[None]:
    """Keep every other process from training into the folder `path` until the block ends.

    Of several processes the first one holds the lock. The folder is made, see `make_folder`.

    Raises:
      RunError: another process trains there, or the folder holds something else.
      StateError: the folder cannot be made or locked.
    """

    def lock() -> tuple[pathlib.Path, int]:
        if isinstance(path, CloudPath):
            folder = cache_folder() / "locks"
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            # A URL is not a file name, its hash is.
            file = folder / hashlib.sha256(str(path).encode()).hexdigest()[:16]
        else:
            make_folder(path, texts)
            refuse_links_in(path)
            file = path / LOCK
        try:
            with system_errors(StateError, f"{file}: cannot be locked", "choose another folder"):
                return file, take_lock(file)
        except HeldError as holder:
            raise RunError(
                f"{path}: {holder} trains there; wait until it ends, stop it, or choose another "
                "folder."
            ) from None

    held = hosts.on_first(lock)
    try:
        yield
    finally:
        if held is not None:
            file, descriptor = held
            # Deleted while it is locked: a process that has it open sees that it has no name.
            with contextlib.suppress(OSError):
                file.unlink()
            os.close(descriptor)


def check_shared(path: Place, timeout: float = 10.0) -> None:
    """Check that every process sees what the first one writes into the folder `path`.

    A collective: every process must call it.

    Args:
      path: the folder, made if it does not exist.
      timeout: seconds to wait for the file; a network file system may be late.

    Raises:
      RunError: some processes do not see it.
      StateError: it cannot be written.
    """
    # Random, so that it differs from what an earlier start or another machine left there.
    word = hosts.broadcast(np.frombuffer(os.urandom(8), np.uint8)).tobytes().hex()
    token = path / f"{SHARED}{word}"

    def write() -> None:
        make_directory(path, 0o700)
        write_atomically(token, word)

    hosts.on_first(write)
    deadline = time.monotonic() + timeout
    while not (seen := token.is_file()) and time.monotonic() < deadline:
        time.sleep(0.1)
    blind = np.flatnonzero(~hosts.all_gather(np.bool_(seen)))
    # `all_gather` was a barrier, so every process has looked.
    hosts.on_first(lambda: token.unlink(missing_ok=True))
    if blind.size:
        raise RunError(
            f"{path}: process {blind[0]} of {hosts.count()} does not see what process 0 writes "
            "there; give a folder on storage that all hosts share, by the same path."
        )


PART = 1 << 20  # bytes after which the next line begins another part
SECONDS = 10.0  # between two writes of a growing part


class Lines:
    """Text that grows by lines, in a file or a store. At most one process may write.

    A store cannot append, so the text is in numbered parts there; others see a line once it is
    flushed. Lines end with a line feed.
    """

    def __init__(self, path: Place, clock: Callable[[], float] = time.monotonic):
        """Read nothing yet; the text may not exist. clock: seconds."""
        self.path = path
        self._clock = clock
        self._known: dict[str, tuple[Version, bytes]] = {}
        # The part that grows (None before the first line), its number, how many of its bytes are in
        # the store, and since when.
        self._part: bytes | None = None
        self._number, self._stored, self._at = 0, 0, clock()

    def append(self, line: str) -> None:
        """Add one line, given without its end."""
        text = line.encode() + b"\n"
        if not isinstance(self.path, CloudPath):
            # Closed after each line, so that a reader sees it.
            with open(self.path, "ab", opener=no_link) as file:
                file.write(text)
            return
        if self._part is None:  # continue the last part of another process, or of a cut
            parts = list(self._parts(self.path).values())
            self._number, self._part = (len(parts) - 1, parts[-1]) if parts else (0, b"")
            self._stored = len(self._part)
        elif len(self._part) >= PART:
            self.flush()
            self._part, self._number, self._stored = b"", self._number + 1, 0
        self._part = (self._part or b"") + text
        if self._clock() - self._at >= SECONDS:
            self.flush()

    def flush(self) -> None:
        """Store every line that is not stored yet."""
        if self._part is not None and len(self._part) > self._stored:
            # The whole part: a store cannot append. `PART` bounds what is sent again.
            write_atomically(self.path / f"{self._number:06d}", self._part)
            self._stored, self._at = len(self._part), self._clock()

    def read(self, start: int = 0) -> bytes:
        """Return the text from byte `start` on, with lines appended here; b"" if there is none."""
        self.flush()
        if isinstance(self.path, CloudPath):
            return b"".join(self._parts(self.path).values())[start:]
        if not self.path.is_file():  # a pipe of that name would wait without end
            return b""
        with open(self.path, "rb") as file:
            file.seek(start)
            return file.read()

    def split(self) -> list[bytes]:
        """Return all lines with their ends; the last one may have none."""
        return _split(self.read())

    def modified(self) -> float | None:
        """Return when it was last stored, in seconds since 1970; None if it does not exist."""
        if isinstance(self.path, CloudPath):
            return max((part.modified for part in self.path.below().values()), default=None)
        try:
            return os.stat(self.path).st_mtime
        except FileNotFoundError:
            return None

    def cut(self, count: int) -> None:
        """Keep the first `count` lines and delete the rest."""
        lines = self.split()
        if isinstance(self.path, pathlib.Path):
            if len(lines) > count:
                write_atomically(self.path, b"".join(lines[:count]))
            return
        # From the end, so that a cut that is killed leaves a beginning of the text.
        for name, part in reversed(self._parts(self.path).items()):
            own = _split(part)
            first = len(lines) - len(own)
            lines = lines[:first]
            if first + len(own) <= count:
                break
            if first >= count:
                (self.path / name).unlink()
            else:
                write_atomically(self.path / name, b"".join(own[: count - first]))
        # `append` then reads the last part again.
        self._part = None

    def _parts(self, path: CloudPath) -> dict[str, bytes]:
        """Return every part by name, in order; fetch only those that are new or have grown."""
        versions = path.below()
        changed = [
            name
            for name, version in versions.items()
            if name not in self._known or self._known[name][0].tag != version.tag
        ]
        for name, (content, version) in zip(
            changed, together(lambda name: (path / name).read(), changed), strict=True
        ):
            self._known[name] = (version, content)
        self._known = {name: self._known[name] for name in versions}
        return {name: content for name, (_, content) in self._known.items()}


def _split(text: bytes) -> list[bytes]:
    # Not `splitlines`, to which a damaged byte may be another end.
    return io.BytesIO(text).readlines()


def read_rows(
    lines: Sequence[bytes],
    path: Place,
    *,
    first: int = 1,
    keys: Sequence[str] = (),
) -> list[dict[str, Any] | None]:
    """Parse lines of metrics.jsonl; a warning names each that is damaged.

    Args:
      lines: with their ends.
      path: of the file, for messages.
      first: the number of the first line.
      keys: that each must have.

    Returns:
      A row per line, without its checksum; None for a damaged one.

    Raises:
      StateError: the last line is damaged and has no end, as a crash leaves it.
    """
    rows: list[dict[str, Any] | None] = []
    faults = []
    for number, line in enumerate(lines, first):
        try:
            rows.append(_read_row(line, f"{path} line {number}", keys))
        except StateError as fault:
            if not line.endswith(b"\n"):
                raise
            rows.append(None)
            faults.append(fault)
    for fault in faults[:NAMED]:
        log.warning("%s The row is left out.", fault)
    if len(faults) > NAMED:
        log.warning("%s: %d more damaged rows are left out", path, len(faults) - NAMED)
    return rows


def _read_row(line: bytes, where: str, keys: Sequence[str]) -> dict[str, Any]:
    # The checksum covers the end, which may not be written yet.
    value, checked = open_record(line.removesuffix(b"\n") + b"\n", where)
    row = record(dict[str, Any], value, where)
    for name, number in row.items():
        if name in ROW or type(number) is not float:  # most are, and `record` takes its time
            record(dict[str, ROW.get(name, float | None)], {name: number}, where)
    wanted = keys if checked else [*keys, CHECKSUM]
    missing = [name for name in wanted if name not in row]
    if missing:
        raise StateError(f"{where}: has no {missing[0]!r}; {RESTORE}.")
    return row


def read_returns(run: Any) -> pd.DataFrame:
    """Return the mean agent's `[T, n]` returns on the selection span, a column for each score.

    Args:
      run: a `Run`.

    Raises:
      StateError: the file is damaged.
    """
    file = run.path / RETURNS
    if not file.is_file():
        return pd.DataFrame()
    try:
        found = read_table(file)
        return found[sorted(found.columns, key=int)]
    except ValueError as error:
        raise StateError(f"{file}: cannot be read ({error}); {RESTORE}.") from error


def read_table(path: Place) -> pd.DataFrame:
    """Return a table of numbers and times that this package wrote; columns of texts are left out.

    Raises:
      StateError: it is damaged, or unpacks to far more than its bytes.
    """
    from nca_trader.data.reading.files import read_numbers  # loads half of pyarrow

    try:
        return read_numbers(path.read_bytes()).to_pandas()
    except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
        raise StateError(f"{path}: cannot be read ({error}); {RESTORE}.") from error


def now() -> str:
    """Return the time as a manifest or the trial log has it: UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


# The version since which no decision and no number has changed: sweeps and journals that it began
# go on.
NUMBERS = "0.2.0"


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide a result."""
    found = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {"python": platform.python_version(), "nca-trader": __version__} | found


def commit() -> str:
    """Return the commit of the source tree, with "+dirty" if it was changed; or "unknown"."""
    here = pathlib.Path(__file__).resolve().parents[2]
    # An installed wheel has no repository, and `git -C` would find one of a folder above.
    if not (here / ".git").exists():
        return "unknown"

    def git(*args: str) -> str:
        command = ["git", "-C", str(here), *args]
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()

    try:
        head = git("rev-parse", "--short=12", "HEAD")
        return head + "+dirty" if head and git("status", "--porcelain") else head or "unknown"
    except (OSError, subprocess.SubprocessError):
        return "unknown"
