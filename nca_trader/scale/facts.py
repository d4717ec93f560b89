"""What a machine has, gathered once for `doctor`. Nothing here judges it."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from nca_trader.errors import BarError, ConfigError, StateError, StoreError
from nca_trader.machine import cores, memory, tpu_files

PACKAGES = (
    "nca_trader", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "pandas",
    "pyarrow", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm7-plugin",
)  # fmt: skip
PREFIXES = (
    "JAX_", "XLA_", "NCA_TRADER_", "LIBTPU_", "TPU_", "CUDA_VISIBLE", "TF_GPU_", "ALLOW_MUL",
)  # fmt: skip
LOCK = pathlib.Path("/tmp/libtpu_lockfile")
# What is read from the environment stands in quotes in the sources: no list of ours would be that
# of every version and plugin.
PROBE = r"""
import json, pathlib, re, sys, jax, jaxlib
roots = sys.argv[1:]
for name in {"jax", "jaxlib", "jax_plugins"} & sys.modules.keys():
    roots += sys.modules[name].__path__
names, pattern = {*jax.config.values}, r'''["']((?:JAX|XLA_PYTHON_CLIENT|NCA_TRADER)_\w+)["']'''
for file in (file for root in roots for file in pathlib.Path(root).rglob("*.py")):
    names.update(re.findall(pattern, file.read_text("utf-8", "replace")))
devices = jax.local_devices()
print(json.dumps({
    "platform": devices[0].platform,
    "kinds": [device.device_kind for device in devices],
    "device_memory": [(device.memory_stats() or {}).get("bytes_limit") for device in devices],
    "options": sorted(names),
}))
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts of a machine. The defaults are those of a clean machine without an accelerator.

    Attributes:
      versions: of the installed packages.
      environment: variables that JAX and XLA read.
      options: names in `jax.config`, and of variables that JAX, its plugins or this package read.
      platform: "cpu", "gpu" or "tpu", "" where JAX did not start.
      probe_error: why JAX did not start, "" if it did.
      kinds: of the local devices.
      device_memory: bytes that JAX may use of each device, None where unknown.
      cores: for this process.
      memory: bytes of the host or of its container. memory_free: those that are free.
      gpus: names that the driver reports.
      gpu_users: device number and process id of each process on a GPU.
      pid: of this process.
      tpu_files: device files of TPU chips.
      lock_held: whether a process holds libtpu's lock.
      cache: folder of compiled programs, "" for none. cache_error: why it cannot be written.
      cache_bytes: its size. disk_free: bytes that are free there.
      coordinator: address, "" for none. coordinator_error: why it cannot be reached.
      data: the bar file, or the shards, to read. reading: the options of `data check` that read
        it, as typed. data_error: why it cannot be read. data_rows: its bars. data_is_shards: which
        of the two it is.
    """

    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    options: tuple[str, ...] = ()
    platform: str = "cpu"
    probe_error: str = ""
    kinds: tuple[str, ...] = ("cpu",)
    device_memory: tuple[int | None, ...] = (None,)
    cores: int = 8
    memory: int = 32 << 30
    memory_free: int = 16 << 30
    gpus: tuple[str, ...] = ()
    gpu_users: tuple[tuple[int, int], ...] = ()
    pid: int = 0
    tpu_files: tuple[str, ...] = ()
    lock_held: bool = False
    cache: str = ""
    cache_error: str = ""
    cache_bytes: int = 0
    disk_free: int = 1 << 40
    coordinator: str = ""
    coordinator_error: str = ""
    data: str = ""
    reading: tuple[str, ...] = ()
    data_error: str = ""
    data_rows: int | None = None
    data_is_shards: bool = False


def gather(
    data: str = "",
    coordinator: str = "",
    reading: Mapping[str, Any] = MappingProxyType({}),
    timeout: float = 120.0,
) -> Facts:
    """Gather the facts of this machine.

    Args:
      data: a bar file or shards to read, "" for none.
      coordinator: HOST:PORT to reach. The default is that of the environment.
      reading: options of `read_bars` for `data`.
      timeout: seconds that JAX may take to find its devices.
    """
    environment = {n: v for n, v in sorted(os.environ.items()) if n.startswith(PREFIXES)}
    coordinator = coordinator or environment.get("JAX_COORDINATOR_ADDRESS", "")
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    # The driver is asked, and not JAX: a GPU that JAX does not see is a finding.
    gpus = _nvidia("--query-gpu=uuid,name")
    numbers = {uuid: number for number, (uuid, _) in enumerate(gpus)}
    users = _nvidia("--query-compute-apps=gpu_uuid,pid")
    lock_held = False
    with contextlib.suppress(OSError):  # no lock file, or a system without /proc
        inode = str(LOCK.stat().st_ino)
        # Read, not tried: taking the lock would keep libtpu from it for a moment.
        locks = pathlib.Path("/proc/locks").read_text().split()
        lock_held = any(word.rpartition(":")[2] == inode for word in locks)
    total, free = memory()
    facts = Facts(
        versions=versions,
        environment=environment,
        cores=cores(),
        memory=total,
        memory_free=free,
        gpus=tuple(name for _, name in gpus),
        gpu_users=tuple((numbers[uuid], int(pid)) for uuid, pid in users if uuid in numbers),
        pid=os.getpid(),
        tpu_files=tpu_files(),
        lock_held=lock_held,
        coordinator=coordinator,
        coordinator_error=_unreachable(coordinator) if coordinator else "",
        data=data,
        reading=tuple(f"--{name}={value}" for name, value in reading.items()),
    )
    found = _cache(environment.get("JAX_COMPILATION_CACHE_DIR", "")) | _probe(timeout)
    return dataclasses.replace(facts, **found, **(_data(data, reading) if data else {}))


def _probe(timeout: float) -> dict[str, Any]:
    """Start JAX in its own process, since a wrong flag aborts the process."""
    command = [sys.executable, "-P", "-c", PROBE, str(pathlib.Path(__file__).parents[1])]
    dead = {"platform": "", "kinds": (), "device_memory": ()}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return dead | {"probe_error": "timeout"}
    if done.returncode:
        # XLA's fatal line, else the exception's.
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        # The log marks a fatal line by an F, and puts "] " between its head and the message.
        fatal = [line.partition("] ")[2] for line in lines if line.startswith("F")]
        return dead | {"probe_error": (fatal or lines[-1:] or [f"exit code {done.returncode}"])[0]}
    # The last line: plugins may print while JAX starts.
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: tuple(v) if isinstance(v, list) else v for name, v in found.items()}


def _nvidia(query: str) -> list[list[str]]:
    """Return the rows of nvidia-smi's answer, two values each; none without a driver."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    # A machine without nvidia-smi has no GPU of this kind, which is not a fault.
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip().split(", ", 1) for line in done.stdout.splitlines() if ", " in line]


def _cache(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {"cache": folder}
    if not folder or "://" in folder:  # jax can keep programs in a store, which is not looked at
        return found
    path = pathlib.Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        found["cache_bytes"] = sum(f.stat().st_size for f in path.iterdir() if f.is_file())
        found["disk_free"] = shutil.disk_usage(path).free
        return found | ({} if os.access(path, os.W_OK) else {"cache_error": "not writable"})
    except OSError as failed:
        return {"cache": folder, "cache_error": failed.strerror or str(failed)}


def _unreachable(address: str) -> str:
    """Why a connection to HOST:PORT fails, "" if it does not."""
    host, _, port = address.rpartition(":")
    try:
        # An IPv6 address stands in brackets before its port.
        socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()
    # `int` of a port that is missing or not a number.
    except ValueError:
        return "no HOST:PORT"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _data(data: str, reading: Mapping[str, Any]) -> dict[str, Any]:
    # pandas and jax take seconds to import, which only `--data` needs.
    from nca_trader.data.bars import read_bars
    from nca_trader.data.shards import folder_of_shards, open_shards

    found: dict[str, Any] = {}
    try:
        folder = folder_of_shards(data)
        found["data_is_shards"] = folder is not None
        if folder is not None:
            return found | {"data_rows": open_shards(folder).rows}
        return found | {"data_rows": int(read_bars(data, **reading).present.sum())}
    except (BarError, ConfigError, StateError, StoreError) as error:
        return found | {"data_error": str(error)}
