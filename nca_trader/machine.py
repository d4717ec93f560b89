"""The cores and the memory that this process may use."""

from __future__ import annotations

import os
import pathlib
import resource
from collections.abc import Iterator
from typing import NamedTuple

ROOT = pathlib.Path("/")
# By version of control groups: where they are, the limit, what is used, and in `memory.stat` how
# much of that is files that can be dropped.
V1 = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("", "memory.max", "memory.current", "inactive_file")


class Memory(NamedTuple):
    """Bytes in all, and those that are free."""

    total: int
    free: int


def cores() -> int:
    """Cores of this machine that this process may run on."""
    if hasattr(os, "sched_getaffinity"):  # not everywhere
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory(root: pathlib.Path = ROOT) -> Memory:
    """The memory of the machine, or of the smallest limit that this process is under.

    Args:
      root: where /proc and /sys are.
    """
    bounds = [*_machine(root), *_groups(root), *_address_space(root)]
    return Memory(min(b.total for b in bounds), max(min(b.free for b in bounds), 0))


def _machine(root: pathlib.Path) -> Iterator[Memory]:
    known = _numbers(root / "proc/meminfo")
    if {"MemTotal:", "MemAvailable:"} <= set(known):
        yield Memory(known["MemTotal:"] << 10, known["MemAvailable:"] << 10)
    else:  # no Linux: what is free is not said everywhere
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        yield Memory(total, total)


def _groups(root: pathlib.Path) -> Iterator[Memory]:
    """The limits of this process's control group and of those above it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # no Linux
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number != "0" and "memory" not in controllers.split(","):
            continue
        folder, limit, used, files = V2 if number == "0" else V1
        top = root / "sys/fs/cgroup" / folder
        inner = top / path.lstrip("/")
        # In a container the path may be the host's, which is not there; the top is.
        for group in (inner, *inner.parents):
            bound, taken = _numbers(group / limit), _numbers(group / used)
            if bound and taken:
                (total,), (now,) = bound.values(), taken.values()
                yield Memory(total, total - now + _numbers(group / "memory.stat").get(files, 0))
            if group == top:
                break


def _address_space(root: pathlib.Path) -> Iterator[Memory]:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    pages = _numbers(root / "proc/self/statm")
    if limit != resource.RLIM_INFINITY and pages:
        yield Memory(limit, limit - int(next(iter(pages))) * os.sysconf("SC_PAGE_SIZE"))


def _numbers(file: pathlib.Path) -> dict[str, int]:
    """The number of each line by the word before it, or by itself where it stands alone."""
    try:
        words = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {w[0]: int(w[1] if len(w) > 1 else w[0]) for w in words if w and w[-1] != "max"}
