"""What a machine has, gathered once for `doctor`; nothing here judges it."""

from __future__ import annotations

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

from nca_trader.machine import cores, memory

PACKAGES = (
    "nca_trader", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "pandas",
    "pyarrow", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm7-plugin",
)  # fmt: skip
PREFIXES = (
    "JAX_",
    "XLA_",
    "NCA_TRADER_",
    "LIBTPU_",
    "TPU_",
    "CUDA_VISIBLE",
    "TF_GPU_",
    "ALLOW_MUL",
)
LOCK = pathlib.Path("/tmp/libtpu_lockfile")
PROBE = """
import json, jax
devices = jax.local_devices()
print(json.dumps({
    "platform": devices[0].platform,
    "kinds": [device.device_kind for device in devices],
    "memory": [(device.memory_stats() or {}).get("bytes_limit") for device in devices],
    "options": sorted(jax.config.values),
}))
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """What was found; the defaults are those of a clean machine without an accelerator.

    Attributes:
      versions: of the installed packages. environment: variables that JAX and XLA read.
      options: names of JAX's own, as in `jax.config`. platform: "cpu", "gpu" or "tpu", "" where
        JAX did not start, of which `probe_error` is then the reason.
      kinds: of the local devices. device_memory: bytes JAX may use of each, None where unknown.
      cores: for this process. memory: bytes of the host or of its container, memory_free: of them.
      gpus: names that the driver tells. gpu_users: device number and process id of those on them.
      pid: our own. tpu_files: device files of TPU chips. lock_held: whether a process holds
        libtpu's lock; lock_foreign: whether its file is another user's, so that we can't take it.
      proxies: names of the variables that lead connections to a proxy, and past no_proxy.
      cache: folder of compiled programs, "" for none; cache_error: why it can't be written;
        cache_bytes: its size; disk_free: bytes free there.
      coordinator: address, "" for none; coordinator_error: why it can't be reached.
      data: the bar file, or shards, asked for; reading: options of `data check` that read it, as
        they are typed; data_error: why they can't be read; data_rows:
        their bars; data_is_shards: which of the two.
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
    lock_foreign: bool = False
    proxies: tuple[str, ...] = ()
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
    """The facts of this machine; JAX starts in a process of its own, as a wrong flag aborts it.

    Args:
      data: a bar file to read, with the options `reading` of `read_bars`.
      coordinator: HOST:PORT to reach; default that of the environment.
      timeout: seconds that JAX may take to find its devices.
    """
    environment = {n: v for n, v in sorted(os.environ.items()) if n.startswith(PREFIXES)}
    coordinator = coordinator or environment.get("JAX_COORDINATOR_ADDRESS", "")
    total, free = memory()
    facts = Facts(
        versions=_versions(),
        environment=environment,
        cores=cores(),
        memory=total,
        memory_free=free,
        gpus=tuple(_nvidia("--query-gpu=name")),
        gpu_users=_gpu_users(),
        pid=os.getpid(),
        tpu_files=_tpu_files(),
        lock_held=_lock_held(),
        lock_foreign=LOCK.exists() and not os.access(LOCK, os.W_OK),
        proxies=_proxies(coordinator),
        coordinator=coordinator,
        coordinator_error=_unreachable(coordinator) if coordinator else "",
        data=data,
        reading=tuple(f"--{name}={value}" for name, value in reading.items()),
    )
    facts = dataclasses.replace(facts, **_cache(environment.get("JAX_COMPILATION_CACHE_DIR", "")))
    return dataclasses.replace(facts, **_probe(timeout), **_read(data, reading))


def _versions() -> dict[str, str]:
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _probe(timeout: float) -> dict[str, Any]:
    command = [sys.executable, "-c", PROBE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return {"platform": "", "kinds": (), "device_memory": (), "probe_error": "timeout"}
    if done.returncode:
        # XLA's fatal line, else the exception's.
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        fatal = [line.partition("] ")[2] for line in lines if line.startswith("F")]
        error = (fatal or lines[-1:] or [f"exit code {done.returncode}"])[0]
        return {"platform": "", "kinds": (), "device_memory": (), "probe_error": error}
    found = json.loads(done.stdout.splitlines()[-1])
    return {
        "platform": found["platform"],
        "kinds": tuple(found["kinds"]),
        "device_memory": tuple(found["memory"]),
        "options": tuple(found["options"]),
    }


def _nvidia(query: str) -> list[str]:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def _gpu_users() -> tuple[tuple[int, int], ...]:
    names = _nvidia("--query-gpu=uuid")
    rows = [line.split(", ") for line in _nvidia("--query-compute-apps=gpu_uuid,pid")]
    return tuple((names.index(uuid), int(pid)) for uuid, pid in rows if uuid in names)


def _tpu_files() -> tuple[str, ...]:
    # VFIO serves other devices too: only Google's vendor number makes it a TPU.
    found = [str(path) for path in pathlib.Path("/dev").glob("accel[0-9]*")]
    for vendor in pathlib.Path("/sys/bus/pci/devices").glob("*/vendor"):
        kind = vendor.with_name("class")
        if vendor.read_text().strip() == "0x1ae0" and kind.read_text().startswith("0x12"):
            found.append(vendor.parent.name)
    return tuple(sorted(found))


def _lock_held() -> bool:
    try:
        inode = str(LOCK.stat().st_ino)
        locks = pathlib.Path("/proc/locks").read_text().split()
    except OSError:
        return False
    return any(word.rpartition(":")[2] == inode for word in locks)


def _cache(folder: str) -> dict[str, Any]:
    if not folder or "://" in folder:
        return {"cache": folder}
    path = pathlib.Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        error = "" if os.access(path, os.W_OK) else "not writable"
        size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
        free = shutil.disk_usage(path).free
    except OSError as failed:
        return {"cache": folder, "cache_error": failed.strerror or str(failed)}
    return {"cache": folder, "cache_error": error, "cache_bytes": size, "disk_free": free}


def _proxies(coordinator: str) -> tuple[str, ...]:
    """Variables of a proxy that a coordinator's address isn't excepted from."""
    host = coordinator.rpartition(":")[0].strip("[]")
    excepted = os.environ.get("no_proxy", os.environ.get("NO_PROXY", ""))
    ends = [part.strip().lstrip("*.") for part in excepted.split(",") if part.strip()]
    if not host or host in ("localhost", "127.0.0.1") or "*" in excepted.split(","):
        return ()
    if any(host == end or host.endswith("." + end) for end in ends):
        return ()
    names = ("grpc_proxy", "https_proxy", "http_proxy", "HTTPS_PROXY", "HTTP_PROXY")
    return tuple(name for name in names if os.environ.get(name))


def _unreachable(address: str, timeout: float = 5.0) -> str:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout).close()
    except ValueError:
        return "no HOST:PORT"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _read(data: str, reading: Mapping[str, Any]) -> dict[str, Any]:
    from nca_trader.data.bars import read_bars
    from nca_trader.data.shards import folder_of_shards, open_shards
    from nca_trader.errors import BarError, ConfigError, StateError, StoreError

    if not data:
        return {}
    found: dict[str, Any] = {}
    try:
        folder = folder_of_shards(data)
        found["data_is_shards"] = folder is not None
        if folder is not None:
            return found | {"data_rows": open_shards(folder).rows}
        return found | {"data_rows": int(read_bars(data, **reading).present.sum())}
    except (BarError, ConfigError, StateError, StoreError) as error:
        return found | {"data_error": str(error)}
