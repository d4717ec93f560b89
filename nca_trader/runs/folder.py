"""The folder of a run: made, seen by all processes, and trained into by one process at a time.

The lock is `train.lock` in the folder, there while a process trains, with its pid, host and
command. The kernel releases it however the process ends. What it covers:

local disk        every process of the machine, also in other containers that see the folder
NFS, Lustre       every host, where flock reaches the server: NFS by default (not with `nolock` or
                  `local_lock=flock`), Lustre with `flock`; of a host that was lost the server
                  keeps the lock until its lease ends, some 90 seconds with NFS 4
no locks at all   training is refused
gs://, s3://      the processes of one user on one machine, by a file in the cache folder: an
                  object store has no locks

Only training takes it. Checkpoints and JSON files are whole or not there, so readers need none.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import time
from collections.abc import Callable, Iterator

import numpy as np

from nca_trader.cloud import CloudPath, Place, Version, cache_folder, together
from nca_trader.disk import HeldError, take_lock, write_atomically
from nca_trader.errors import RunError, StateError
from nca_trader.parallel import hosts

LOCK = "train.lock"


def make_folder(path: Place) -> None:
    """Makes the folder of a new run; one with a run in it is left as it is.

    Raises:
      RunError: it holds files of something else. StateError: it cannot be made.
    """
    if (path / "run.json").exists():
        return
    if path.exists():
        if not path.is_dir() or any(file.name != LOCK for file in path.iterdir()):
            raise RunError(f"{path}: holds files of something else; choose another folder.")
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise _not_made(path, error) from None


@contextlib.contextmanager
def training_in(path: Place) -> Iterator[None]:
    """Keeps every other process from training into the folder `path` until the block ends.

    Of several processes the first one holds the lock. The folder is made.

    Raises:
      RunError: another process trains there, or the folder holds something else.
      StateError: the folder cannot be made or locked.
    """
    held = hosts.on_first(lambda: _locked(path))
    try:
        yield
    finally:
        if held is not None:
            file, descriptor = held
            # Deleted while it is locked: who opened it before then sees that it has no name.
            with contextlib.suppress(OSError):
                file.unlink()
            os.close(descriptor)


def _locked(path: Place) -> tuple[pathlib.Path, int]:
    """The lock file and its descriptor."""
    if isinstance(path, CloudPath):
        folder = cache_folder() / "locks"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = folder / hashlib.sha256(str(path).encode()).hexdigest()[:16]
    else:
        make_folder(path)
        file = path / LOCK
    try:
        return file, take_lock(file)
    except HeldError as holder:
        raise RunError(
            f"{path}: {holder} trains there; wait until it ends, stop it, or choose another folder."
        ) from None
    except OSError as error:
        raise StateError(
            f"{file}: cannot be locked ({error.strerror}); choose another folder."
        ) from None


def check_shared(path: Place, patience: float = 10.0) -> None:
    """Lets every process look for what the first one writes into the folder `path`.

    Args:
      path: made if it is not there. patience: seconds to look; a network file system may be late.

    Raises:
      RunError: some do not see it. StateError: it cannot be written.
    """
    # Random, so that what an earlier start or another machine left there is not taken for it.
    word = hosts.of_first(np.frombuffer(os.urandom(8), np.uint8)).tobytes().hex()
    token = path / f".shared-{word}"

    def write() -> None:
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise _not_made(path, error) from None
        write_atomically(token, word)

    hosts.on_first(write)
    deadline = time.monotonic() + patience
    while not (seen := token.is_file()) and time.monotonic() < deadline:
        time.sleep(0.1)
    blind = np.flatnonzero(~hosts.of_each(np.bool_(seen)))
    hosts.on_first(lambda: token.unlink(missing_ok=True))
    if blind.size:
        raise RunError(
            f"{path}: process {blind[0]} of {hosts.count()} does not see what process 0 writes "
            "there; give a folder on storage that all hosts share, by the same path."
        )


def _not_made(path: Place, error: OSError) -> StateError:
    return StateError(f"{path}: cannot be made ({error.strerror}); choose another folder.")


PART = 1 << 20  # bytes from which on the next line begins another part
SECONDS = 10.0  # between two writes of what came in between


class Lines:
    """The lines of a text at a place; one process at most may write.

    Lines end with a line feed. In a store they are there for others once they are flushed.
    """

    def __init__(self, path: Place, clock: Callable[[], float] = time.monotonic):
        """Reads nothing yet; the text need not be there. clock: seconds."""
        self.path = path
        self._clock = clock
        self._known: dict[str, tuple[Version, bytes]] = {}
        # The part that is being written, None before the first line, and when it was stored.
        self._part: bytes | None = None
        self._number, self._stored, self._at = 0, 0, clock()

    def append(self, line: str) -> None:
        """Adds one line, given without its end."""
        text = line.encode() + b"\n"
        if isinstance(self.path, pathlib.Path):
            with open(self.path, "ab") as file:
                file.write(text)
            return
        if self._part is None:
            self._load()
        elif len(self._part) >= PART:
            self.flush()
            self._part, self._number, self._stored = b"", self._number + 1, 0
        self._part = (self._part or b"") + text
        if self._clock() - self._at >= SECONDS:
            self.flush()

    def flush(self) -> None:
        """Returns once every line is stored."""
        if self._part is not None and len(self._part) > self._stored:
            write_atomically(self.path / _name(self._number), self._part)
            self._stored, self._at = len(self._part), self._clock()

    def read(self) -> bytes:
        """The whole text, with what was appended here; b"" where it is not there."""
        self.flush()
        if isinstance(self.path, CloudPath):
            return b"".join(self._parts(self.path).values())
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            return b""

    def modified(self) -> float | None:
        """When it was last stored, in seconds since 1970; None where it is not there."""
        if isinstance(self.path, CloudPath):
            return max((part.modified for part in self.path.below().values()), default=None)
        try:
            return os.stat(self.path).st_mtime
        except FileNotFoundError:
            return None

    def cut(self, count: int) -> None:
        """Leaves the first `count` lines."""
        lines = self.read().splitlines(keepends=True)
        if isinstance(self.path, pathlib.Path):
            if len(lines) > count:
                write_atomically(self.path, b"".join(lines[:count]))
            return
        # From the end, so that what is left is a beginning wherever this is stopped.
        for name, part in reversed(self._parts(self.path).items()):
            own = part.splitlines(keepends=True)
            first = len(lines) - len(own)
            lines = lines[:first]
            if first + len(own) <= count:
                break
            if first >= count:
                (self.path / name).unlink()
            else:
                write_atomically(self.path / name, b"".join(own[: count - first]))
        self._part = None

    def _load(self) -> None:
        """Takes up the last part where another process, or a cut, left it."""
        parts = list(self._parts(self.path).values()) if isinstance(self.path, CloudPath) else []
        self._number, self._part = (len(parts) - 1, parts[-1]) if parts else (0, b"")
        self._stored = len(self._part)

    def _parts(self, path: CloudPath) -> dict[str, bytes]:
        """Every part by name, in order; only those are fetched that are new or have grown."""
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


def _name(number: int) -> str:
    return f"{number:06d}"
