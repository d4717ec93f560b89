"""The cores and the memory that this process may use."""

from __future__ import annotations

import os
import pathlib
import resource
from collections.abc import Iterator
from typing import NamedTuple

ROOT = pathlib.Path("/")
# For each version of control groups: their folder, the files of the limit and of the usage, and the
# line of `memory.stat` with the part of the usage that is droppable page cache.
V1 = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("", "memory.max", "memory.current", "inactive_file")


class Memory(NamedTuple):
    """Total and free bytes."""

    total: int
    free: int


def cores() -> int:
    """Return the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):  # not everywhere
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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
