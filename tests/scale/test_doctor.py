"""Each check finds the fault that is planted, says its remedy, and is silent on clean machines."""

import dataclasses
import json
import pathlib
import re
import socket
import subprocess
import sys

import numpy as np
import pytest
from drawn import random_bars

from nca_trader.config import MeshConfig
from nca_trader.scale import facts as gathering
from nca_trader.scale.chips import mesh_axes, slice_of
from nca_trader.scale.doctor import READERS, examine, mesh_of, mesh_words
from nca_trader.scale.facts import Facts, gather

CPU = Facts(
    versions={"python": "3.11.7", "jax": "0.10.2", "jaxlib": "0.10.2"},
    options=(
        "jax_platforms",
        "jax_debug_nans",
        "jax_debug_infs",
        "jax_disable_jit",
        "jax_enable_x64",
        "jax_enable_compilation_cache",
        "XLA_PYTHON_CLIENT_PREALLOCATE",
        "XLA_PYTHON_CLIENT_MEM_FRACTION",
    ),
    environment={"JAX_PLATFORMS": "cpu"},
    cache="/home/me/.cache/nca_trader/jax",
    pid=7,
)
GPU = dataclasses.replace(
    CPU,
    environment={},
    versions=CPU.versions | {"jax-cuda13-plugin": "0.10.2"},
    platform="gpu",
    kinds=("H200",) * 2,
    device_memory=(100 << 30,) * 2,
    gpus=("H200",) * 2,
    gpu_users=((0, 7),),
)
TPU = dataclasses.replace(
    CPU,
    environment={"LIBTPU_INIT_ARGS": "--xla_tpu_x=1"},
    versions=CPU.versions | {"libtpu": "0.0.51"},
    platform="tpu",
    kinds=("TPU v5 lite",) * 8,
    device_memory=(16 << 30,) * 8,
    tpu_files=("/dev/accel0",),
)


@pytest.mark.parametrize("clean", [CPU, GPU, TPU], ids=["cpu", "gpu", "tpu"])
def test_a_clean_machine_has_no_finding(clean):
    assert examine(clean) == []


def pod(kind, devices):
    return dataclasses.replace(TPU, kinds=(kind,) * devices)


def test_the_mesh_has_every_device():
    assert mesh_of(TPU) == {"data": 8, "fsdp": 1, "model": 1}
    assert mesh_of(CPU) == {"data": 1, "fsdp": 1, "model": 1}
    assert mesh_words(mesh_of(TPU)) == "--devices 8"


@pytest.mark.parametrize(
    ("name", "kind"), [("v5e-256", "TPU v5 lite"), ("v5p-768", "TPU v5p"), ("tpu7x", "TPU7x")]
)
def test_the_mesh_of_a_slice_is_that_of_the_plan(name, kind):
    there = slice_of(name)
    assert tuple(mesh_of(pod(kind, there.devices)).values()) == mesh_axes(
        there.devices, there.chips
    )


def test_a_mesh_comes_with_the_words_that_make_it():
    assert mesh_words(mesh_of(pod("TPU v5 lite", 256))) == "--devices 256 --set mesh.fsdp=4"
    # 128 chips of two devices: below what is split.
    assert mesh_words(mesh_of(pod("TPU7x", 256))) == "--devices 256"


def test_the_mesh_of_an_agent_comes_first():
    assert mesh_of(TPU, MeshConfig(devices=8, fsdp=2, model=2)) == {
        "data": 2, "fsdp": 2, "model": 2,
    }  # fmt: skip
    assert mesh_of(TPU, MeshConfig()) == mesh_of(TPU)
    assert mesh_words(mesh_of(CPU, MeshConfig(model=2))) == "--devices 2 --set mesh.model=2"


DEAD = {"platform": "", "kinds": (), "device_memory": ()}
FAULTS = {
    "jaxlib of another": (
        CPU, {"versions": {"jax": "0.11.2", "jaxlib": "0.10.2"}}, "error", "version", "-U jax",
    ),
    "plugin of another": (
        GPU, {"versions": GPU.versions | {"jax-cuda13-plugin": "0.10.1"}}, "error", "version",
        "'jax[cuda13]'",
    ),
    "tpu flag without dashes": (
        TPU, {"environment": {"LIBTPU_INIT_ARGS": "xla_tpu_x=1"}}, "error", "xla_flags",
        "--xla_tpu_x=1",
    ),
    "flag without dashes": (
        CPU, {"environment": {"XLA_FLAGS": "xla_dump_to=x"}, **DEAD, "probe_error": "Could not"},
        "error", "xla_flags", "--xla_dump_to=x",
    ),
    "tpu flag": (
        CPU, {"environment": {"XLA_FLAGS": "--xla_tpu_y=1"}, **DEAD,
              "probe_error": "Unknown flags in XLA_FLAGS: --xla_tpu_y=1"},
        "error", "xla_flags", "LIBTPU_INIT_ARGS",
    ),
    "unknown flag": (
        CPU, {"environment": {"XLA_FLAGS": "--xla_foo=1"}, **DEAD,
              "probe_error": "Unknown flags in XLA_FLAGS: --xla_foo=1"},
        "error", "xla_flags", "Remove it",
    ),
    "unknown option": (
        CPU, {"environment": {"JAX_DEBUG_NANZ": "1"}}, "warning", "environment", "correct its name",
    ),
    "unknown although it looks known": (
        CPU, {"environment": {"JAX_NUM_PROCESSES": "2"}}, "warning", "environment", "Unset it",
    ),
    "unknown of ours": (
        CPU, {"environment": {"NCA_TRADER_CACHE": "1"}}, "warning", "environment", "Unset it",
    ),
    "unknown of the client": (
        GPU, {"environment": {"XLA_PYTHON_CLIENT_MEMORY_FRACTION": ".4"}}, "warning",
        "environment", "correct its name",
    ),
    "infs left on": (
        CPU, {"environment": {"JAX_DEBUG_INFS": "1"}}, "warning", "environment", "Unset it",
    ),
    "no truth": (
        CPU, {"environment": {"JAX_DEBUG_NANS": "maybe"}, **DEAD, "probe_error": "invalid"},
        "error", "environment", "0 or 1",
    ),
    "left on": (
        CPU, {"environment": {"JAX_DISABLE_JIT": "1"}}, "warning", "environment", "Unset it",
    ),
    "hangs": (CPU, {**DEAD, "probe_error": "timeout"}, "error", "devices", "another process"),
    "no such platform": (
        CPU, {"environment": {"JAX_PLATFORMS": "tpu"}, **DEAD, "probe_error": "Unable to"},
        "error", "devices", "Unset JAX_PLATFORMS",
    ),
    "gpu without a plugin": (
        GPU, {"versions": CPU.versions, "platform": "cpu"}, "error", "gpu", "jax[cuda13]",
    ),
    "hidden gpu": (
        GPU, {"platform": "cpu", "environment": {"CUDA_VISIBLE_DEVICES": ""}}, "error", "gpu",
        "Unset it",
    ),
    "preallocate maybe": (
        GPU, {"environment": {"XLA_PYTHON_CLIENT_PREALLOCATE": "maybe"}}, "error", "gpu",
        "true or false",
    ),
    "gpu with an old driver": (GPU, {"platform": "cpu"}, "error", "gpu", "Update the driver"),
    "tpu without libtpu": (
        TPU, {"versions": CPU.versions, "platform": "cpu"}, "error", "tpu", "jax[tpu]",
    ),
    "two on a gpu": (
        GPU, {"gpu_users": ((0, 7), (1, 99))}, "warning", "gpu", "PREALLOCATE=false",
    ),
    "two on a gpu, most of it for one": (
        GPU, {"gpu_users": ((0, 7), (1, 99)),
              "environment": {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".95"}},
        "warning", "gpu", "FRACTION=.4",
    ),
    "fraction": (
        GPU, {"environment": {"XLA_PYTHON_CLIENT_MEM_FRACTION": "75%"}}, "error", "gpu", "e.g. .9",
    ),
    "fraction by its new name": (
        GPU, {"environment": {"XLA_CLIENT_MEM_FRACTION": "75%"}}, "error", "gpu", "e.g. .9",
    ),
    "libtpu's lock": (
        TPU, {"lock_held": True, **DEAD, "probe_error": "in use"}, "error", "tpu", "MULTIPLE",
    ),
    "lock, compiling only": (CPU, {"lock_held": True}, "warning", "tpu", "MULTIPLE"),
    "six devices": (
        CPU, {"kinds": ("cpu",) * 6, "device_memory": (None,) * 6}, "warning", "mesh",
        "learner.logical_shards=6",
    ),
    "cache off": (
        CPU, {"environment": {"JAX_ENABLE_COMPILATION_CACHE": "false"}}, "warning", "cache",
        "Unset JAX_ENABLE_COMPILATION_CACHE",
    ),
    "no cache": (CPU, {"cache": ""}, "warning", "cache", "NCA_TRADER_NO_CACHE"),
    "cache of root": (
        CPU, {"cache_error": "Permission denied"}, "warning", "cache", "a folder of yours",
    ),
    "full disk": (CPU, {"disk_free": 10**8}, "warning", "cache", "Free some"),
    "little memory": (CPU, {"memory_free": 10**8}, "warning", "memory", "End other"),
    "coordinator": (
        CPU, {"coordinator": "a:1", "coordinator_error": "refused"}, "error", "coordinator", "port",
    ),
    "shards": (
        CPU, {"data": "x", "data_error": "x/shards.json: damaged.", "data_is_shards": True},
        "error", "data", "Write the shards again",
    ),
    "data": (
        CPU, {"data": "x.csv", "data_error": "x.csv: D001 no such file."}, "error", "data",
        "data check x.csv",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_the_one_finding_with_its_remedy(name):
    machine, planted, level, kind, remedy = FAULTS[name]
    (finding,) = examine(dataclasses.replace(machine, **planted))
    assert (finding.level, finding.name) == (level, kind)
    assert remedy in finding.remedy
    assert "\n" not in finding.what + finding.remedy


def test_errors_stand_before_warnings():
    ill = dataclasses.replace(CPU, cache="", data="x", data_error="x: D001 no such file.")
    assert [finding.level for finding in examine(ill)] == ["error", "warning"]


@pytest.fixture
def no_probe(monkeypatch):
    """JAX takes seconds to start."""
    monkeypatch.setattr(gathering, "_probe", lambda timeout: {"options": CPU.options})


def variables_of(package):
    """The variables that calls such as `os.environ.get("JAX_X")` and `int_env("JAX_X")` read."""
    call = re.compile(r"""(?:environ(?:\.\w+)?\s*[\[(]|env\()\s*["'](\w+)["']""")
    for file in pathlib.Path(package.__file__).parent.rglob("*.py"):
        yield from call.findall(file.read_text())


@pytest.mark.heavy
def test_no_variable_that_jax_or_this_package_reads_is_to_be_unset():
    import jax
    import jaxlib

    import nca_trader

    read = {*variables_of(jax), *variables_of(jaxlib), *variables_of(nca_trader)}
    ours = {name for name in read if name.startswith(tuple(READERS))}
    assert {"JAX_COORDINATOR_PORT", "JAX_LOCAL_DEVICE_IDS", "JAX_PLATFORM_NAME"} < ours
    assert {"XLA_PYTHON_CLIENT_ALLOCATOR"} < ours
    given = {
        **dict.fromkeys({*ours, "NCA_TRADER_KEYS", "NCA_TRADER_CCXT_URL"}, "0"),
        "JAX_COORDINATOR_PROT": "1",
        "NCA_TRADER_KEY": "1",
    }
    facts = dataclasses.replace(gather(), environment=given)
    unread = [finding.what for finding in examine(facts) if "does not read" in finding.what]
    assert unread == [
        "this version of JAX does not read JAX_COORDINATOR_PROT",
        "nca_trader does not read NCA_TRADER_KEY",
    ]


def test_the_coordinator_is_really_tried(no_probe):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert gather(coordinator=address).coordinator_error == ""
    assert "refused" in gather(coordinator=address).coordinator_error
    assert gather(coordinator="nowhere").coordinator_error == "no HOST:PORT"


def test_what_is_gathered_of_cache_and_data_is_so(no_probe, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "program").write_bytes(b"x" * 1000)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(cache))
    data = tmp_path / "bars.csv"
    data.write_text("time,close\n2020-01-01,5\n2020-01-02,6\n")
    found = gather(str(data), reading={"repair": "close-only,no-volume"})
    assert (found.cache_bytes, found.cache_error, found.data_rows) == (1000, "", 2)
    assert 0 < found.memory_free <= found.memory
    assert "D005" in gather(str(data)).data_error
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(data))  # no folder
    assert "exists" in gather().cache_error


def test_shards_are_data_as_well(no_probe, tmp_path):
    from nca_trader.data.shards import write_shards

    bars = random_bars(np.random.default_rng(0), 40, 1)
    write_shards([bars[:20], bars[20:]], tmp_path / "shards")
    found = gather(str(tmp_path / "shards"))
    assert (found.data_rows, found.data_error, found.data_is_shards) == (40, "", True)
    assert gather(str(tmp_path / "shards" / "shards.json")).data_rows == 40
    (tmp_path / "shards" / "shards.json").write_text("{")
    assert "shards.json" in gather(str(tmp_path / "shards")).data_error


def test_the_command_outlives_a_flag_that_aborts_every_process(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag=1")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    command = [sys.executable, "-m", "nca_trader", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 1
    found = json.loads(done.stdout.splitlines()[-1])
    assert not found["ok"]
    assert [f["name"] for f in found["findings"] if f["level"] == "error"] == ["xla_flags"]
    assert "--xla_no_such_flag=1" in found["findings"][0]["what"]
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) == 1
