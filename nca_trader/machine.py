"""What this machine gives a process: disk (atomic writes, locks), cores, memory, and a thread."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import itertools
import multiprocessing
import os
import pathlib
import platform
import queue
import resource
import secrets
import shlex
import shutil
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, NamedTuple, TypeVar

from nca_trader.cloud import CloudPath, Place
from nca_trader.errors import ConfigError, RunError, StateError, printable, system_errors

T = TypeVar("T")
SCRATCH = "nca-trader."
PROGRAMS = "NCA_TRADER_PROGRAMS"  # the folder of traced programs, set by the command line
# A file may unpack to so many bytes, or to so many times its own.
LARGE, PACKED = 1 << 28, 64
# For processes of Python that do not import from the current folder: one with somebody's bars may
# hold a file that is named as a module of Python.
SAFE = {"PYTHONSAFEPATH": "1"}
CHOSEN = ("JAX_PLATFORMS", "JAX_FORCE_TPU_INIT", "TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES")
WAITING = 1000  # items that may wait for a slow worker
# Versions that the tests run with: from, and before. pyproject.toml has the same.
SUPPORTED = {"Python": ("3.11", "3.14"), "jax": ("0.10.2", "0.13")}


@functools.cache
def check_versions() -> None:
    """Refuse a version of Python or jax that this package does not support.

    pip does so too, but not for a checkout, nor where jax was changed later.

    Raises:
      ConfigError: with the versions that are supported.
    """
    from importlib.metadata import PackageNotFoundError, version

    found = {"Python": ".".join(map(str, sys.version_info[:3]))}
    try:
        found["jax"] = version("jax")
    except PackageNotFoundError:
        least, most = SUPPORTED["jax"]
        raise ConfigError(f"jax is not installed; pip install 'jax>={least},<{most}'.") from None
    refuse_versions(found)


def refuse_versions(found: Mapping[str, str]) -> None:
    """Refuse versions outside of `SUPPORTED`.

    Raises:
      ConfigError: one line for each.

    Example:
      >>> refuse_versions({"Python": "3.11.7", "jax": "0.11.2"})
    """
    lines = []
    for name, (least, most) in SUPPORTED.items():
        if not _parts(least) <= _parts(found[name]) < _parts(most):
            lines.append(
                f"{name} {found[name]} is not supported; install {name} {least} or later, before "
                f"{most}."
            )
    if lines:
        raise ConfigError(*lines)


def _parts(version: str) -> list[int]:
    # Up to the first part that is not a number: 0.11.2.dev1 counts as 0.11.2.
    parts = itertools.takewhile(str.isdigit, version.split("."))
    return [int(part) for part in parts]


def make_directory(path: Place, mode: int = 0o777) -> None:
    """Make a folder and those above it, where they are not there.

    Raises:
      StateError: it cannot be made.
    """
    with system_errors(StateError, f"{path}: cannot be made", "choose another folder"):
        path.mkdir(parents=True, exist_ok=True, mode=mode)


def write_atomically(path: Place, content: str | bytes) -> None:
    """Write `content`, a text as UTF-8, so that no reader and no crash sees half of it.

    Raises:
      StateError: it cannot be written. Nothing of it is left then.
      ConfigError, StoreError: of a store, see `CloudPath`.
    """
    content = content.encode() if isinstance(content, str) else content
    if isinstance(path, CloudPath):
        path.put(content)
        return
    # In the same folder: a rename is atomic within one file system only.
    part = path.with_name(path.name + ".part")
    try:
        # One that a killed process left, or a link.
        part.unlink(missing_ok=True)
        with open(part, "xb", opener=no_link) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # before the rename, or a power cut could leave an empty file
        os.replace(part, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise StateError(
            f"{path}: cannot be written ({error.strerror}); fix that, then try again."
        ) from None


def no_link(path: str, flags: int) -> int:
    """Open a file to write, as `open(..., opener=no_link)`; a link could lead to another file.

    Raises:
      OSError: the last part of the path is a link.
    """
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def refuse_links_in(folder: Place | None) -> None:
    """Refuse a folder of ours that holds a link out of it: what lies behind is not ours to change.

    Raises:
      RunError: it holds one, at any depth. Links inside a folder `wandb`, which its library makes,
        pass.
    """
    if not isinstance(folder, pathlib.Path):
        return
    for top, folders, files in os.walk(folder):
        paths = (pathlib.Path(top, name) for name in sorted((*folders, *files)))
        for path in filter(pathlib.Path.is_symlink, paths):
            # Not `resolve`, which fails at a link to itself.
            if not pathlib.Path(os.path.realpath(path)).is_relative_to(folder.resolve()):
                raise RunError(
                    f"{path}: is a link to {printable(os.readlink(path))}; nothing is written or "
                    "deleted through links, so put the file or folder itself there."
                )
        folders[:] = [name for name in folders if name != "wandb"]


def refuse_link(path: pathlib.Path, *suffixes: str) -> None:
    """Refuse a path that is a link, and its siblings with `suffixes`: what is written would be far.

    Raises:
      ConfigError: one is a link, whether its target is there or not.
    """
    for file in (path.with_name(path.name + suffix) for suffix in ("", *suffixes)):
        if file.is_symlink():
            raise ConfigError(f"{file}: is a link; remove it, or give the path that it points to.")


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """Set variables for the processes that are started inside the block."""
    before = {name: os.environ[name] for name in values if name in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)
        os.environ.update(before)


@contextlib.contextmanager
def killed_after() -> Iterator[None]:
    """Kill the processes that `multiprocessing` started inside the block: Python waits for them."""
    before = multiprocessing.active_children()
    try:
        yield
    finally:
        for process in multiprocessing.active_children():
            if process not in before:
                process.kill()
                process.join()


def write_once(path: pathlib.Path, content: str) -> bool:
    """Write `content` where no file is yet, for its owner alone, so that no reader sees half of it.

    Returns:
      False where something has the name already, also a link; it stays as it is.

    Raises:
      OSError: it cannot be written. Nothing of it is left then.
    """
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(content.encode())
            file.flush()
            os.fsync(file.fileno())
        os.link(part, path)  # unlike a rename, never over another one
    except FileExistsError:
        return False
    finally:
        os.unlink(part)
    return True


def read_private(path: str | os.PathLike[str], what: str) -> str:
    """Return the text of a small file that its owner alone may read.

    Args:
      path: the file.
      what: the file holds, for the message.

    Raises:
      ConfigError: others may read it.
      OSError: it cannot be read.
    """
    with open(path, encoding="utf-8") as file:
        # Of the open file: the name could point to another one by the next line.
        status = os.fstat(file.fileno())
        if stat.S_IMODE(status.st_mode) & 0o077 or status.st_uid != os.getuid():
            raise ConfigError(f"{path}: others may read {what}; run chmod 600 on it.")
        return file.read(100_000)


def refuse_packed(size: int, packed: int) -> None:
    """Refuse a small file that would take much memory.

    Args:
      size: bytes of memory.
      packed: bytes of the file.

    Raises:
      ValueError: in words, what unpacks to what.
    """
    if size > max(LARGE, PACKED * packed):
        raise ValueError(f"{packed:,} bytes unpack to {size:,}")


def run_file(folder: Place) -> Place:
    """Return the path of a run folder's `run.json`.

    Raises:
      RunError: the file does not exist.
    """
    file = folder / "run.json"
    if not file.is_file():
        raise RunError(
            f"{folder}: not a run folder (it has no run.json); give one that `nca-trader train` "
            "made."
        )
    return file


def sha256_of(path: pathlib.Path) -> str:
    """Return the SHA-256 of a file's bytes, hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class HeldError(Exception):
    """Another process holds a lock. The text names it: pid, host and command."""


def locked(descriptor: int, shared: bool = False) -> bool:
    """Lock an open file, for this process alone or with others; return whether that could be done.

    Raises:
      OSError: its file system has no locks.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def take_lock(path: pathlib.Path) -> int:
    """Lock a file, made if it is missing, and write into it who holds the lock.

    The kernel releases the lock when the returned descriptor is closed or the process ends. The
    lock belongs to the file and not to its name. A program that the process starts does not
    inherit it.

    Returns:
      A descriptor that holds the lock.

    Raises:
      HeldError: another process, or another descriptor of this one, holds it.
      OSError: the file cannot be opened, or its file system has no locks.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if not locked(descriptor):
                holder = os.pread(descriptor, 2000, 0).decode(errors="replace").strip()
                raise HeldError(holder or "another process")
            # Between the opening and the lock its holder may have deleted it: then a new one.
            if os.fstat(descriptor).st_nlink:
                program = pathlib.Path(sys.argv[0]).name
                program = "nca-trader" if program == "__main__.py" else program
                command = shlex.join([program, *sys.argv[1:]])[:900]
                text = f"process {os.getpid()} on {socket.gethostname()} ({command})\n".encode()
                # Written first and cut then: a reader never finds the file empty.
                os.pwrite(descriptor, text, 0)
                os.ftruncate(descriptor, len(text))
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


@contextlib.contextmanager
def scratch() -> Iterator[pathlib.Path]:
    """Make a temporary folder that is deleted at the end.

    The next call deletes the folder of a process that was killed. A folder is locked while its
    process lives, whichever container that is in.
    """
    for left in pathlib.Path(tempfile.gettempdir()).glob(f"{SCRATCH}*"):
        with contextlib.suppress(OSError), _opened(left) as descriptor:
            if locked(descriptor):
                shutil.rmtree(left, ignore_errors=True)
    with contextlib.ExitStack() as stack:
        while True:
            folder = pathlib.Path(tempfile.mkdtemp(prefix=SCRATCH))
            with contextlib.suppress(OSError):  # no locks: no other process deletes it
                descriptor = stack.enter_context(_opened(folder))
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            # Another process may have taken it for a left one before it was locked.
            if folder.is_dir():
                break
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        yield folder


@contextlib.contextmanager
def _opened(folder: pathlib.Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


ROOT = pathlib.Path("/")
# For each version of control groups: their folder, the files of the limit and of the usage, and the
# line of `memory.stat` with the part of the usage that is droppable page cache.
V1 = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("", "memory.max", "memory.current", "inactive_file")


def tpu_files(root: pathlib.Path = ROOT) -> tuple[str, ...]:
    """Return the device files, or else the PCI addresses, of the TPU chips of this machine."""
    # VFIO serves other devices too: only Google's vendor number makes it a TPU.
    found = [str(path) for path in (root / "dev").glob("accel[0-9]*")]
    for vendor in (root / "sys/bus/pci/devices").glob("*/vendor"):
        kind = vendor.with_name("class")
        if vendor.read_text().strip() == "0x1ae0" and kind.read_text().startswith("0x12"):
            found.append(vendor.parent.name)
    return tuple(sorted(found))


def avoid_tpu(root: pathlib.Path = ROOT) -> None:
    """Keep jax from libtpu where there is no TPU: it would print five lines about what it misses.

    The TPU compiler needs libtpu without a TPU. A platform, a TPU or another library that the
    environment names is used as before.
    """
    found = importlib.util.find_spec("libtpu")
    if found is None or found.origin is None or any(map(os.environ.get, CHOSEN)) or tpu_files(root):
        return
    # Importing libtpu sets its own path, which the processes of a program inherit.
    own = str(pathlib.Path(found.origin).with_name("libtpu.so"))
    if os.environ.get("TPU_LIBRARY_PATH", own) == own:
        # Where jax cannot load the library of a platform, it takes the next in silence.
        os.environ["TPU_LIBRARY_PATH"] = __file__


class Memory(NamedTuple):
    """Total and free bytes."""

    total: int
    free: int


def cores() -> int:
    """Return the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):  # not everywhere
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor() -> str:
    """Return a digest of this machine's kind of processor: its model and its instructions."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    kind = {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    return hashlib.sha256(repr((platform.machine(), sorted(kind))).encode()).hexdigest()[:12]


@functools.cache
def keep_freed_memory() -> None:
    """Let glibc keep up to 62 MB of freed memory for this process; once, and cheaply.

    It gives more than a threshold back to the system, and then asks for it again page by page,
    which takes a fifth of a backtest of 100,000 bars. The threshold is twice the largest block that
    was mapped and freed, and starts at 256 kB. Other allocators ignore this.
    """
    import numpy as np  # here, because commands that only lock and write start without it

    np.empty(31 << 20, np.uint8)  # below 32 MB, above which glibc does not learn; never touched


def memory(root: pathlib.Path = ROOT) -> Memory:
    """Return the memory of the machine, or of the tightest limit on this process.

    Args:
      root: the folder of /proc and /sys.
    """
    known = _numbers(root / "proc/meminfo")
    if {"MemTotal:", "MemAvailable:"} <= set(known):
        bounds = [Memory(known["MemTotal:"] << 10, known["MemAvailable:"] << 10)]
    else:  # not Linux: free memory is not reported everywhere
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        bounds = [Memory(total, total)]
    bounds += _groups(root)
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    pages = _numbers(root / "proc/self/statm")
    if limit != resource.RLIM_INFINITY and pages:
        # The first number of statm is the address space in use, in pages.
        bounds.append(Memory(limit, limit - int(next(iter(pages))) * os.sysconf("SC_PAGE_SIZE")))
    return Memory(min(b.total for b in bounds), max(min(b.free for b in bounds), 0))


def _groups(root: pathlib.Path) -> Iterator[Memory]:
    """Yield the limits of this process's control group and of its parents."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number != "0" and "memory" not in controllers.split(","):
            continue
        folder, limit, used, files = V2 if number == "0" else V1
        top = root / "sys/fs/cgroup" / folder
        inner = top / path.lstrip("/")
        # In a container the path may be the host's, which does not exist here. The top does.
        for group in (inner, *inner.parents):
            bound, taken = _numbers(group / limit), _numbers(group / used)
            if bound and taken:
                (total,), (now,) = bound.values(), taken.values()
                yield Memory(total, total - now + _numbers(group / "memory.stat").get(files, 0))
            if group == top:
                break


def _numbers(file: pathlib.Path) -> dict[str, int]:
    """Read the number of each line, keyed by the word before it, or by itself if alone."""
    try:
        words = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {w[0]: int(w[1] if len(w) > 1 else w[0]) for w in words if w and w[-1] != "max"}


class Worker(Generic[T]):
    """A thread for what may be slow or fail, so that it neither delays nor ends the caller.

    Args:
      name: of the thread.
      take: called in the thread with each item, in order.
      lost: called with each item that `take` did not get or failed with, and with the reason.
    """

    def __init__(self, name: str, take: Callable[[T], object], lost: Callable[[T, object], object]):
        self._take, self._lost = take, lost
        # Bounded: a worker that hangs for days must not fill the memory. None is the end.
        self._waiting: queue.Queue[tuple[T] | None] = queue.Queue(WAITING)
        # A daemon: a worker that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, item: T) -> None:
        """Hand an item over. Never blocks; an item that does not fit is lost."""
        try:
            self._waiting.put_nowait((item,))
        except queue.Full:
            self._lost(item, "too slow")

    def close(self, seconds: float) -> bool:
        """Wait at most `seconds` for what was handed over; return whether all is done."""
        end = time.monotonic() + seconds
        try:
            self._waiting.put(None, timeout=seconds)
        except queue.Full:
            return False
        self._thread.join(max(end - time.monotonic(), 0.0))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            try:
                self._take(*item)
            except BaseException as error:  # a user's function may raise anything, SystemExit too
                self._lost(*item, error)
