"""What is wrong with a machine, and how to fix it: pure functions of its `Facts`."""

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
READERS = {
    "JAX_": "this version of JAX", "XLA_PYTHON_CLIENT_": "this version of JAX",
    "NCA_TRADER_": "nca_trader",
}  # fmt: skip
SWITCHES = ("JAX_DISABLE_JIT", "JAX_DEBUG_NANS", "JAX_DEBUG_INFS", "JAX_ENABLE_X64")
TRUE, FALSE = {"1", "true", "on", "yes", "t", "y"}, {"0", "false", "off", "no", "f", "n"}
OLD_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # every version of JAX reads it
PREALLOCATED = 0.75  # of a GPU's memory, by JAX's default
ERROR, WARNING = "error", "warning"
AXES = ("data", "fsdp", "model")  # as in `nca_trader.parallel.mesh`, which would import JAX
Findings = Iterator[tuple[str, str, str]]  # level, what is wrong, remedy


class Finding(NamedTuple):
    """One thing that is wrong. level: "error" (it will fail) or "warning"; name: of the check."""

    level: str
    name: str
    what: str
    remedy: str


def examine(facts: Facts) -> list[Finding]:
    """Return all findings, errors first. A machine without faults has none."""
    found = [
        Finding(level, check.__name__, what, remedy)
        for check in CHECKS
        for level, what, remedy in check(facts)
    ]
    # The sort is stable: among errors and among warnings the order is that of `CHECKS`.
    return sorted(found, key=lambda finding: finding.level != ERROR)


def mesh_of(facts: Facts, wanted: MeshConfig | None = None) -> dict[str, int]:
    """Return the mesh to train on: an agent's own if it sets sizes, otherwise the table's.

    Args:
      facts: the machine, for its number and kind of devices.
      wanted: the table `[mesh]` of an agent.
    """
    if wanted is not None and (wanted.devices or wanted.data or wanted.fsdp * wanted.model > 1):
        return dict(zip(AXES, wanted.axes, strict=True))
    # Where JAX does not start, there are no kinds.
    devices = max(len(facts.kinds), 1)
    kind = KINDS.get(facts.kinds[0]) if facts.kinds else None
    chips = devices if kind is None else devices // CHIPS[kind].devices
    return dict(zip(AXES, mesh_axes(devices, chips), strict=True))


def mesh_words(axes: dict[str, int]) -> str:
    """Return the options of `nca-trader train` that create a mesh of these sizes."""
    inner = [f"--set mesh.{name}={axes[name]}" for name in AXES[1:] if axes[name] > 1]
    return " ".join([f"--devices {math.prod(axes.values())}", *inner])


# Each check below yields what it finds, under its own name.


def version(facts: Facts) -> Findings:
    """Find a jaxlib or a plugin of another version than jax."""
    given = facts.versions
    known = {name: tuple(map(int, re.findall(r"\d+", v)[:3])) for name, v in given.items()}
    plugins = [name for name in known if name.startswith("jax-cuda")]
    if "jaxlib" in known:
        jaxlib = f"with jaxlib {given['jaxlib']}"
        if "jax" in known and known["jax"][:2] != known["jaxlib"][:2]:
            remedy = "Install both of one version: pip install -U jax jaxlib"
            yield ERROR, f"jax {given['jax']} {jaxlib}", remedy
        for name in plugins:
            if known[name] != known["jaxlib"]:
                extra = name.removeprefix("jax-").partition("-")[0]
                remedy = f"Install both: pip install -U 'jax[{extra}]'"
                yield ERROR, f"{name} {given[name]} {jaxlib}", remedy


def xla_flags(facts: Facts) -> Findings:
    """Find flags that end the process, and words that are not flags."""
    for variable in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        for word in facts.environment.get(variable, "").split():
            if not word.startswith("--"):
                # XLA takes it for the name of a file with flags.
                what = f"{variable} holds {word!r}, which is not a flag"
                yield ERROR, what, f"Write --{word.lstrip('-')}"
            # Only libtpu knows them. The CPU's backend aborts on a flag that it does not know.
            elif variable == "XLA_FLAGS" and word.startswith("--xla_tpu_"):
                what = f"XLA_FLAGS holds {word}, which ends every process without a TPU"
                yield ERROR, what, "Put it into LIBTPU_INIT_ARGS"
    unknown = re.search(r"Unknown flags? in XLA_FLAGS: *(.*)", facts.probe_error)
    for word in unknown[1].split() if unknown else ():
        if not word.startswith("--xla_tpu_"):
            what = f"XLA_FLAGS holds {word}, which this version of XLA does not know"
            yield ERROR, what, "Remove it, or correct its name"


def environment(facts: Facts) -> Findings:
    """Find variables that nothing reads, and switches that are left on or not truth values."""
    known = {name.upper() for name in facts.options}
    for name in facts.environment:
        reader = next((who for prefix, who in READERS.items() if name.startswith(prefix)), "")
        if reader and known and name not in known:
            yield WARNING, f"{reader} does not read {name}", "Unset it, or correct its name"
    for name in SWITCHES:
        value = facts.environment.get(name, "0").lower()
        if value not in TRUE | FALSE:
            yield ERROR, f"{name}={value} is not a truth value", "Set it to 0 or 1, or unset it"
        elif value in TRUE:
            yield WARNING, f"{name} is on, for every program", "Unset it unless you debug"


def devices(facts: Facts) -> Findings:
    """Find that JAX does not start, for a reason that no other check names."""
    named = any(level == ERROR for check in (xla_flags, environment) for level, *_ in check(facts))
    if facts.platform or named or (facts.lock_held and facts.tpu_files):
        return
    if facts.probe_error == "timeout":
        remedy = "See whether another process holds the device; JAX_PLATFORMS=cpu goes without it"
        yield ERROR, "JAX waits for its devices without end", remedy
    else:
        platforms = facts.environment.get("JAX_PLATFORMS", "")
        remedy = "Unset JAX_PLATFORMS" if platforms else "JAX_PLATFORMS=cpu goes without it"
        yield ERROR, f"JAX does not start: {facts.probe_error}", remedy


def gpu(facts: Facts) -> Findings:
    """Find a GPU that JAX does not use, or that other processes use as well."""
    given = facts.environment
    visible, meant = given.get("CUDA_VISIBLE_DEVICES"), "JAX_PLATFORMS=cpu if that is meant"
    if facts.gpus and facts.platform == "cpu" and given.get("JAX_PLATFORMS") != "cpu":
        count = f"{len(facts.gpus)} GPU(s) ({facts.gpus[0]})"
        if visible in ("", "-1"):
            yield ERROR, f"CUDA_VISIBLE_DEVICES={visible} hides {count}", f"Unset it; {meant}"
        else:
            plugin = any(name.startswith("jax-cuda") for name in facts.versions)
            remedy = "Update the driver for the plugin" if plugin else "pip install 'jax[cuda13]'"
            yield ERROR, f"{count}, but JAX runs on the CPU", f"{remedy}; {meant}"
    # JAX takes its share when it starts, also if another process holds that memory already.
    others = sorted({pid for _, pid in facts.gpu_users if pid != facts.pid})
    preallocates = given.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true").lower()
    share = "XLA_CLIENT_MEM_FRACTION" if "XLA_CLIENT_MEM_FRACTION" in given else OLD_FRACTION
    part = given.get(share, "")
    valid = re.fullmatch(r"\d*\.?\d+", part) is not None and 0.0 < float(part) <= 1.0
    taken = float(part) if valid else PREALLOCATED
    # With half of the memory each, two processes fit.
    if others and preallocates not in FALSE and taken > 0.5:
        named = ", ".join(map(str, others))
        what = f"process {named} is on a GPU, and JAX takes {taken:.0%} of it at once"
        remedy = "End it, choose another by CUDA_VISIBLE_DEVICES, or set "
        remedy += "XLA_PYTHON_CLIENT_PREALLOCATE=false or XLA_PYTHON_CLIENT_MEM_FRACTION=.4"
        yield WARNING, what, remedy
    if preallocates not in TRUE | FALSE:
        what = f"XLA_PYTHON_CLIENT_PREALLOCATE={preallocates} is not a truth value"
        yield ERROR, what, "Set it to true or false, or unset it"
    if part and not valid:
        what = f"{share}={part} is not a part of the memory"
        yield ERROR, what, "Give a number above 0 up to 1, e.g. .9"


def tpu(facts: Facts) -> Findings:
    """Find a TPU that JAX does not use, or a lock that keeps it from libtpu."""
    given, level = facts.environment, ERROR if facts.tpu_files else WARNING
    if facts.tpu_files and facts.platform == "cpu" and given.get("JAX_PLATFORMS") != "cpu":
        remedy = "See LIBTPU_INIT_ARGS" if "libtpu" in facts.versions else "pip install 'jax[tpu]'"
        what = f"{len(facts.tpu_files)} TPU chip(s), but JAX runs on the CPU"
        yield ERROR, what, f"{remedy}; JAX_PLATFORMS=cpu if that is meant"
    # Only one process at a time may load libtpu.
    if facts.lock_held and given.get("ALLOW_MULTIPLE_LIBTPU_LOAD") != "1":
        remedy = "Wait for it or end it; to compile ahead of time, without a TPU, set "
        remedy += "ALLOW_MULTIPLE_LIBTPU_LOAD=1"
        yield level, "another process holds libtpu's lock, /tmp/libtpu_lockfile", remedy


def mesh(facts: Facts) -> Findings:
    """Find that the presets' groups of segments do not divide among the devices."""
    count, groups = len(facts.kinds), LearnerConfig().logical_shards
    if count and groups % count:
        what = f"{groups} groups of segments (learner.logical_shards) on {count} devices"
        remedy = f"Train with --set learner.logical_shards={count}, or on fewer --devices"
        yield WARNING, what, remedy


def cache(facts: Facts) -> Findings:
    """Find that programs are compiled again at every start, or that a disk is full."""
    if facts.cache_error:
        what = f"compiled programs cannot be kept in {facts.cache} ({facts.cache_error})"
        yield WARNING, what, "Set JAX_COMPILATION_CACHE_DIR to a folder of yours"
    elif not facts.cache:
        what = "compiled programs are not kept: every start compiles again"
        yield WARNING, what, "Unset NCA_TRADER_NO_CACHE"
    elif facts.environment.get("JAX_ENABLE_COMPILATION_CACHE", "1").lower() in FALSE:
        what = f"compiled programs are not kept in {facts.cache}: every start compiles again"
        yield WARNING, what, "Unset JAX_ENABLE_COMPILATION_CACHE"
    if facts.disk_free < 1 * GB:
        what = f"{facts.disk_free / GB:.1f} GB free on the disk of {facts.cache}"
        yield WARNING, what, "Free some, or empty the folder"


def memory(facts: Facts) -> Findings:
    """Find less free memory than training with sample bars takes, about 1 GB."""
    if facts.memory_free < 1 * GB:
        what = f"{facts.memory_free / GB:.1f} of {facts.memory / GB:.0f} GB of memory are free"
        yield WARNING, what, "End other processes, or give the container more"


def coordinator(facts: Facts) -> Findings:
    """Find that this host cannot reach process 0."""
    if facts.coordinator_error:
        remedy = "Start process 0 there, open the port to this host, or correct the address"
        yield ERROR, f"coordinator {facts.coordinator}: {facts.coordinator_error}", remedy


def data(facts: Facts) -> Findings:
    """Find that the bar file or the shards cannot be read."""
    if facts.data_error:
        remedy = f"See `{shlex.join(['nca-trader', 'data', 'check', facts.data, *facts.reading])}`"
        if facts.data_is_shards:
            remedy = "Write the shards again, or give their shards.json"
        yield ERROR, facts.data_error.partition("\n")[0].rstrip("."), remedy


CHECKS = (
    version, xla_flags, environment, devices, gpu, tpu, mesh, cache, memory, coordinator, data,
)  # fmt: skip
