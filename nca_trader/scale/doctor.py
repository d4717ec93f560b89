"""What is wrong with a machine, and how to mend it: pure functions of its `Facts`."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from nca_trader.config import LearnerConfig, MeshConfig
from nca_trader.scale.chips import CHIPS, KINDS, mesh_axes
from nca_trader.scale.facts import Facts

GB = 1e9
OLDEST = {"jax": (0, 10), "python": (3, 11)}
# Options of JAX's environment that are no values of its configuration.
OTHER_OPTIONS = {
    "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS", "JAX_LOCAL_DEVICE_IDS",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "JAX_PARTITION_INDEX", "JAX_SLICE_INDEX",
}  # fmt: skip
# What JAX reads of the variables that begin like these.
CLIENT_OPTIONS = {
    "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_ALLOCATOR", "XLA_PYTHON_CLIENT_ABORT_COLLECTIVES_ON_FAILURE",
    "XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT", "XLA_PYTHON_CLIENT_COLLECTIVE_MEM_SIZE_MB",
}  # fmt: skip
TRUE, FALSE = {"1", "true", "on", "yes", "t", "y"}, {"0", "false", "off", "no", "f", "n"}
TRUTHS = TRUE | FALSE
PREALLOCATED = 0.75  # of a GPU's memory, by JAX's default
ERROR, WARNING = "error", "warning"
AXES = ("data", "fsdp", "model")  # those of `nca_trader.parallel.mesh`, which would start JAX


class Finding(NamedTuple):
    """One thing that is wrong: `level` "error" (it will fail) or "warning", and its `remedy`."""

    level: str
    name: str
    what: str
    remedy: str


def examine(facts: Facts) -> list[Finding]:
    """All findings, errors first; none for a machine that is well."""
    found = [finding for check in CHECKS for finding in check(facts)]
    return sorted(found, key=lambda finding: finding.level != ERROR)


def mesh_of(facts: Facts, wanted: MeshConfig | None = None) -> dict[str, int]:
    """The mesh to train on: an agent's own where it says its sizes, else that of `mesh_axes`.

    Args:
      wanted: the table `[mesh]` of an agent; None is one that says nothing.
    """
    if wanted is not None and (wanted.devices or wanted.data or wanted.fsdp * wanted.model > 1):
        return dict(zip(AXES, wanted.axes, strict=True))
    devices = max(len(facts.kinds), 1)
    kind = KINDS.get(facts.kinds[0]) if facts.kinds else None
    chips = devices if kind is None else devices // CHIPS[kind].devices
    return dict(zip(AXES, mesh_axes(devices, chips), strict=True))


def mesh_words(axes: dict[str, int]) -> str:
    """The options of `nca-trader train` that make a mesh of these sizes."""
    inner = [f"--set mesh.{name}={axes[name]}" for name in AXES[1:] if axes[name] > 1]
    return " ".join([f"--devices {math.prod(axes.values())}", *inner])


def versions(facts: Facts) -> Iterator[Finding]:
    """Too old ones, and a jaxlib that isn't jax's."""
    known = {name: _numbers(text) for name, text in facts.versions.items()}
    for name, least in OLDEST.items():
        if name in known and known[name] < least:
            wanted = ".".join(map(str, least))
            what = f"{name} {facts.versions[name]} is older than {wanted}"
            yield Finding(ERROR, "version", what, f"Install {name} {wanted} or newer")
    if "jax" in known and "jaxlib" in known and known["jax"][:2] != known["jaxlib"][:2]:
        what = f"jax {facts.versions['jax']} with jaxlib {facts.versions['jaxlib']}"
        yield Finding(ERROR, "version", what, "Install both of one version: pip install -U jax")
    plugins = [name for name in known if name.startswith("jax-cuda")]
    for name in plugins:
        if "jaxlib" in known and known[name] != known["jaxlib"]:
            what = f"{name} {facts.versions[name]} with jaxlib {facts.versions['jaxlib']}"
            extra = name.removeprefix("jax-").partition("-")[0]
            yield Finding(ERROR, "version", what, f"Install both: pip install -U 'jax[{extra}]'")
    if len(plugins) > 1:
        what = f"{' and '.join(plugins)} are both installed, and JAX takes either"
        yield Finding(WARNING, "version", what, f"pip uninstall {plugins[0]}")


def xla_flags(facts: Facts) -> Iterator[Finding]:
    """Flags that end the process: of a TPU, without dashes, or unknown to this XLA."""
    words = facts.environment.get("XLA_FLAGS", "").split()
    for word in words:
        if not word.startswith("--"):
            what = f"XLA_FLAGS holds {word!r}, which XLA takes as the name of a file"
            yield Finding(ERROR, "xla_flags", what, f"Write --{word.lstrip('-')}")
        elif word.startswith("--xla_tpu_"):
            what = f"XLA_FLAGS holds {word}, which ends every process that has no TPU"
            yield Finding(ERROR, "xla_flags", what, "Put it into LIBTPU_INIT_ARGS")
    for name, values in _given(words).items():
        if len(values) > 1:
            what = f"XLA_FLAGS holds {name} with {' and '.join(values)}; the last one counts"
            yield Finding(WARNING, "xla_flags", what, "Remove all but one")
    if "--xla_dump_to" in _given(words):
        what = "XLA_FLAGS holds --xla_dump_to: every program is written there, which fills a disk"
        yield Finding(WARNING, "xla_flags", what, "Remove it unless you are after a fault")
    unknown = re.search(r"Unknown flags? in XLA_FLAGS: *(.*)", facts.probe_error)
    for word in unknown[1].split() if unknown else ():
        if not word.startswith("--xla_tpu_"):
            what = f"XLA_FLAGS holds {word}, which this version of XLA doesn't know"
            yield Finding(ERROR, "xla_flags", what, "Remove it, or correct its name")
    for word in facts.environment.get("LIBTPU_INIT_ARGS", "").split():
        if not word.startswith("--"):
            what = f"LIBTPU_INIT_ARGS holds {word!r}, which is no flag"
            yield Finding(ERROR, "xla_flags", what, f"Write --{word.lstrip('-')}")


def _given(words: list[str]) -> dict[str, list[str]]:
    """The values that each flag is given, in order, each once."""
    given: dict[str, list[str]] = {}
    for word in words:
        name, _, value = word.partition("=")
        if value not in given.setdefault(name, []):
            given[name].append(value)
    return given


def environment(facts: Facts) -> Iterator[Finding]:
    """Variables of JAX that it doesn't know, or whose value is no truth value."""
    known = {name.upper() for name in facts.options} | OTHER_OPTIONS
    for name in facts.environment:
        if name.startswith("JAX_") and facts.options and name not in known:
            what = f"{name} is no option of this version of JAX, and does nothing"
            yield Finding(WARNING, "environment", what, "Unset it, or correct its name")
        if name.startswith("NCA_TRADER_") and name != "NCA_TRADER_NO_CACHE":
            what = f"{name} is nothing that nca_trader reads"
            yield Finding(WARNING, "environment", what, "Unset it, or correct its name")
        if name.startswith("XLA_PYTHON_CLIENT_") and name not in CLIENT_OPTIONS:
            what = f"{name} is nothing that JAX reads"
            yield Finding(WARNING, "environment", what, "Unset it, or correct its name")
    for name in ("JAX_DISABLE_JIT", "JAX_DEBUG_NANS", "JAX_DEBUG_INFS", "JAX_ENABLE_X64"):
        value = facts.environment.get(name, "0").lower()
        if value not in TRUTHS:
            what = f"{name}={value} is no truth value"
            yield Finding(ERROR, "environment", what, "Set it to 0 or 1, or unset it")
        elif value in TRUE:
            what = f"{name} is on, for every program"
            yield Finding(WARNING, "environment", what, "Unset it unless you are after a fault")


def started(facts: Facts) -> Iterator[Finding]:
    """JAX that finds no device, for another reason than those that have a name of their own."""
    named = any(f.level == ERROR for check in (xla_flags, environment) for f in check(facts))
    if facts.platform or named or (facts.lock_held and facts.tpu_files):
        return
    if facts.probe_error == "timeout":
        remedy = "See whether another process holds the device; JAX_PLATFORMS=cpu goes without it"
        yield Finding(ERROR, "devices", "JAX waits for its devices without end", remedy)
    else:
        platforms = facts.environment.get("JAX_PLATFORMS", "")
        remedy = "Unset JAX_PLATFORMS" if platforms else "JAX_PLATFORMS=cpu goes without it"
        yield Finding(ERROR, "devices", f"JAX doesn't start: {facts.probe_error}", remedy)


def accelerators(facts: Facts) -> Iterator[Finding]:
    """A GPU or a TPU that JAX doesn't use, as its plugin isn't installed."""
    if facts.platform != "cpu" or facts.environment.get("JAX_PLATFORMS") == "cpu":
        return
    visible = facts.environment.get("CUDA_VISIBLE_DEVICES")
    if facts.gpus and visible in ("", "-1"):
        what = f"CUDA_VISIBLE_DEVICES={visible} hides {len(facts.gpus)} GPU(s) ({facts.gpus[0]})"
        yield Finding(ERROR, "gpu", what, "Unset it; JAX_PLATFORMS=cpu if that is meant")
    elif facts.gpus:
        what = f"{len(facts.gpus)} GPU(s) ({facts.gpus[0]}), but JAX runs on the CPU"
        plugin = any(name.startswith("jax-cuda") for name in facts.versions)
        remedy = "Update the driver for the plugin" if plugin else "pip install 'jax[cuda13]'"
        yield Finding(ERROR, "gpu", what, f"{remedy}; JAX_PLATFORMS=cpu if that is meant")
    if facts.tpu_files:
        what = f"{len(facts.tpu_files)} TPU chip(s), but JAX runs on the CPU"
        remedy = "See LIBTPU_INIT_ARGS" if "libtpu" in facts.versions else "pip install 'jax[tpu]'"
        yield Finding(ERROR, "tpu", what, f"{remedy}; JAX_PLATFORMS=cpu if that is meant")


def gpu_sharing(facts: Facts) -> Iterator[Finding]:
    """Other processes on a GPU of which JAX takes most at its start, unless told otherwise."""
    others = sorted({pid for _, pid in facts.gpu_users if pid != facts.pid})
    preallocates = facts.environment.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true").lower()
    part = facts.environment.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "")
    valid = _is_number(part) and 0.0 < float(part) <= 1.0
    taken = float(part) if valid else PREALLOCATED
    if others and preallocates not in FALSE and taken > 0.5:
        named = ", ".join(map(str, others))
        what = f"process {named} is on a GPU, and JAX takes {taken:.0%} of it at once"
        remedy = "End it, choose another by CUDA_VISIBLE_DEVICES, or set "
        remedy += "XLA_PYTHON_CLIENT_PREALLOCATE=false or XLA_PYTHON_CLIENT_MEM_FRACTION=.4"
        yield Finding(WARNING, "gpu", what, remedy)
    if preallocates not in TRUTHS:
        what = f"XLA_PYTHON_CLIENT_PREALLOCATE={preallocates} is no truth value"
        yield Finding(ERROR, "gpu", what, "Set it to true or false, or unset it")
    if facts.environment.get("XLA_PYTHON_CLIENT_ALLOCATOR") == "platform":
        what = "XLA_PYTHON_CLIENT_ALLOCATOR=platform asks the driver for each array, which is slow"
        yield Finding(WARNING, "gpu", what, "Unset it unless memory is what you are after")
    if part and not valid:
        what = f"XLA_PYTHON_CLIENT_MEM_FRACTION={part} is no part of the memory"
        yield Finding(ERROR, "gpu", what, "Give a number above 0 up to 1, e.g. .9")


def tpu_lock(facts: Facts) -> Iterator[Finding]:
    """One process at a time may load libtpu."""
    if facts.lock_held and facts.environment.get("ALLOW_MULTIPLE_LIBTPU_LOAD") != "1":
        what = "another process holds libtpu's lock, /tmp/libtpu_lockfile"
        remedy = "Wait for it or end it; to compile ahead of time, without a TPU, set "
        level = ERROR if facts.tpu_files else WARNING
        yield Finding(level, "tpu", what, f"{remedy}ALLOW_MULTIPLE_LIBTPU_LOAD=1")
    elif facts.lock_foreign:
        what = "libtpu's lock, /tmp/libtpu_lockfile, is another user's, and no process holds it"
        level = ERROR if facts.tpu_files else WARNING
        yield Finding(level, "tpu", what, "Have its owner remove it: rm /tmp/libtpu_lockfile")


def mesh(facts: Facts) -> Iterator[Finding]:
    """Devices over which the presets' groups of segments don't divide."""
    devices, groups = len(facts.kinds), LearnerConfig().logical_shards
    if devices and groups % devices:
        what = f"{groups} groups of segments (learner.logical_shards) on {devices} devices"
        remedy = f"Train with --set learner.logical_shards={devices}, or on fewer --devices"
        yield Finding(WARNING, "mesh", what, remedy)


def compile_cache(facts: Facts) -> Iterator[Finding]:
    """Programs that are compiled again at every start, or a disk that fills."""
    if facts.cache_error:
        what = f"compiled programs can't be kept in {facts.cache} ({facts.cache_error})"
        yield Finding(WARNING, "cache", what, "Set JAX_COMPILATION_CACHE_DIR to a folder of yours")
    elif not facts.cache:
        what = "compiled programs are not kept: every start compiles again"
        yield Finding(WARNING, "cache", what, "Unset NCA_TRADER_NO_CACHE")
    elif facts.environment.get("JAX_ENABLE_COMPILATION_CACHE", "1").lower() in FALSE:
        what = f"compiled programs are not kept in {facts.cache}: every start compiles again"
        yield Finding(WARNING, "cache", what, "Unset JAX_ENABLE_COMPILATION_CACHE")
    if facts.disk_free < 1 * GB:
        what = f"{facts.disk_free / GB:.1f} GB free on the disk of {facts.cache}"
        yield Finding(WARNING, "cache", what, "Free some, or empty the folder")


def host_memory(facts: Facts) -> Iterator[Finding]:
    """Little of it: a training process with sample bars takes about 1 GB."""
    if facts.memory_free < 1 * GB:
        what = f"{facts.memory_free / GB:.1f} of {facts.memory / GB:.0f} GB of memory are free"
        yield Finding(WARNING, "memory", what, "End other processes, or give the container more")


def coordinator(facts: Facts) -> Iterator[Finding]:
    """The process that the others of several hosts meet at."""
    if facts.coordinator_error:
        what = f"coordinator {facts.coordinator}: {facts.coordinator_error}"
        remedy = "Start process 0 there, open the port to this host, or correct the address"
        yield Finding(ERROR, "coordinator", what, remedy)
    if facts.coordinator and facts.proxies:
        what = f"{', '.join(facts.proxies)} may lead the hosts' own connections to a proxy"
        remedy = f"Put {facts.coordinator.rpartition(':')[0]} into no_proxy, or unset them"
        yield Finding(WARNING, "coordinator", what, remedy)


def data(facts: Facts) -> Iterator[Finding]:
    """The bar file that was asked for."""
    if facts.data_error:
        what = facts.data_error.partition("\n")[0].rstrip(".")
        shards = facts.data_is_shards
        remedy = f"See `{shlex.join(['nca-trader', 'data', 'check', facts.data, *facts.reading])}`"
        remedy = "Write the shards again, or give their shards.json" if shards else remedy
        yield Finding(ERROR, "data", what, remedy)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:3]))


def _is_number(text: str) -> bool:
    return re.fullmatch(r"\d*\.?\d+", text) is not None


CHECKS = (
    versions, xla_flags, environment, started, accelerators, gpu_sharing, tpu_lock, mesh,
    compile_cache, host_memory, coordinator, data,
)  # fmt: skip
