"""Files that are whole or not there, known by their SHA-256; locks; folders that are not kept."""

import contextlib
import fcntl
import hashlib
import os
import pathlib
import shlex
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator

from nca_trader.cloud import CloudPath, Place
from nca_trader.errors import RunError, StateError


def write_atomically(path: Place, content: str | bytes) -> None:
    """Writes `content`, a text as UTF-8, so that a reader, or a crash, never sees half of it.

    Raises:
      StateError: it can't be written; then nothing of it is left. Of a store see `CloudPath`.
    """
    content = content.encode() if isinstance(content, str) else content
    if isinstance(path, CloudPath):
        path.put(content)
        return
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise StateError(
            f"{path}: cannot be written ({error.strerror}); mend that, then try again."
        ) from None


def run_file(folder: Place) -> Place:
    """Returns the path of a run folder's `run.json`.

    Raises:
      RunError: there is none.
    """
    file = folder / "run.json"
    if not file.is_file():
        raise RunError(
            f"{folder}: not a run folder (it has no run.json); give one that `nca-trader train` "
            "made."
        )
    return file


def sha256_of(path: pathlib.Path) -> str:
    """SHA-256 of the bytes of a file, hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class HeldError(Exception):
    """Another process holds a lock; the text names it: pid, host and command."""


def take_lock(path: pathlib.Path) -> int:
    """Locks the file `path`, made if it is missing, and writes into it who holds it.

    The kernel releases the lock when the returned descriptor is closed or the process ends, in
    whatever way. The lock is on the file and not on its name: a program that the process starts
    does not inherit it.

    Raises:
      HeldError: another process holds it, or another descriptor of this one.
      OSError: the file cannot be opened, or its file system has no locks.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:  # else its holder deleted it before it was locked
                text = _own_name().encode()
                os.pwrite(descriptor, text, 0)
                os.ftruncate(descriptor, len(text))
                return descriptor
        except BlockingIOError:
            holder = os.pread(descriptor, 2000, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise HeldError(holder or "another process") from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _own_name() -> str:
    program = pathlib.Path(sys.argv[0]).name
    words = ["nca-trader" if program == "__main__.py" else program, *sys.argv[1:]]
    command = shlex.join(words)[:900]
    return f"process {os.getpid()} on {socket.gethostname()} ({command})\n"


SCRATCH = "nca-trader-"


@contextlib.contextmanager
def scratch() -> Iterator[pathlib.Path]:
    """A temporary folder, gone at the end; where the process was killed, the next call deletes it.

    The file beside it is locked while its process lives, whichever container that is in.
    """
    for left in pathlib.Path(tempfile.gettempdir()).glob(f"{SCRATCH}*.lock"):
        with contextlib.suppress(OSError), open(left, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _delete(left)
    with _locked() as lock:
        try:
            folder = lock.with_suffix("")
            folder.mkdir(mode=0o700)
            yield folder
        finally:
            _delete(lock)


@contextlib.contextmanager
def _locked() -> Iterator[pathlib.Path]:
    while True:
        descriptor, name = tempfile.mkstemp(".lock", SCRATCH)
        try:
            with contextlib.suppress(OSError):  # not every file system has locks: nor its cleaners
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:  # else another took it for left, before it was locked
                yield pathlib.Path(name)
                return
        finally:
            os.close(descriptor)


def _delete(lock: pathlib.Path) -> None:
    shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
    lock.unlink(missing_ok=True)
