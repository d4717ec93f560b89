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
from collections.abc import Iterator

import numpy as np

from nca_trader.cloud import CloudPath, Place, cache_folder
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
