"""The memory that a process may use, against files as Linux has them, and a limit of its own."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import tomllib
from unittest import mock

import pytest

import nca_trader
from nca_trader import ConfigError
from nca_trader.machine import (
    CHOSEN,
    SUPPORTED,
    Memory,
    avoid_tpu,
    memory,
    refuse_versions,
)

MEMINFO = "MemTotal:       1000 kB\nMemFree:  5 kB\nMemAvailable:    600 kB\nHugePages_Total:   0\n"


def written(root, files):
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V1 = "sys/fs/cgroup/memory"
V2 = "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("files", "total", "free"),
    [
        ({}, 1000 * 1024, 600 * 1024),
        (  # the second version: files that can be dropped are free
            {
                "proc/self/cgroup": "0::/a.slice/b\n",
                f"{V2}/a.slice/b/memory.max": "500000\n",
                f"{V2}/a.slice/b/memory.current": "400000\n",
                f"{V2}/a.slice/b/memory.stat": "anon 1\ninactive_file 50000\n",
            },
            500_000,
            150_000,
        ),
        (  # a limit above, none at the group itself
            {
                "proc/self/cgroup": "0::/a.slice/b\n",
                f"{V2}/a.slice/b/memory.max": "max\n",
                f"{V2}/a.slice/b/memory.current": "400000\n",
                f"{V2}/a.slice/memory.max": "300000\n",
                f"{V2}/a.slice/memory.current": "400000\n",
            },
            300_000,
            0,
        ),
        (  # the first version, in a container: the path is the host's
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n0::/\n",
                f"{V1}/memory.limit_in_bytes": "200000\n",
                f"{V1}/memory.usage_in_bytes": "70000\n",
                f"{V1}/memory.stat": "inactive_file 3\ntotal_inactive_file 20000\n",
            },
            200_000,
            150_000,
        ),
        (  # the first version, without a limit
            {
                "proc/self/cgroup": "4:memory:/\n",
                f"{V1}/memory.limit_in_bytes": "9223372036854771712\n",
                f"{V1}/memory.usage_in_bytes": "70000\n",
            },
            1000 * 1024,
            600 * 1024,
        ),
    ],
)
def test_the_smallest_limit_of_machine_and_groups_counts(tmp_path, files, total, free):
    assert memory(written(tmp_path, files)) == Memory(total, free)


def test_a_limit_of_the_process_counts_less_what_it_uses():
    script = (
        "import resource; from nca_trader.machine import memory\n"
        "resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30)); print(*memory())"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    total, free = map(int, said.stdout.split())
    assert total <= 4 << 30 and 0 < free < total


def test_this_machine_has_memory():
    total, free = memory()
    assert 0 < free <= total < 1 << 50


ACCELERATOR = {"vendor": "0x1ae0\n", "class": "0x120000\n"}
NETWORK_CARD = {"vendor": "0x1ae0\n", "class": "0x020000\n"}


@pytest.mark.parametrize(
    ("machine", "given", "kept"),
    [
        ({}, {}, True),
        (NETWORK_CARD, {}, True),  # of a virtual machine of the same vendor
        (ACCELERATOR, {}, False),
        ({"device": True}, {}, False),
        ({}, {"JAX_PLATFORMS": ""}, True),
        ({}, {"JAX_PLATFORMS": "tpu,cpu"}, False),
        ({}, {"JAX_FORCE_TPU_INIT": "1"}, False),
        ({}, {"TPU_WORKER_HOSTNAMES": "localhost"}, False),
        ({}, {"TPU_LIBRARY_PATH": "own.so"}, False),
        ({}, {"TPU_LIBRARY_PATH": "libtpu.so"}, True),  # which importing libtpu has set
        ({}, {"TPU_SKIP_MDS_QUERY": "1"}, True),  # which importing jax has set
        ({"uninstalled": True}, {}, False),
    ],
)
def test_jax_is_kept_from_libtpu_where_there_is_no_tpu(tmp_path, monkeypatch, machine, given, kept):
    for name in ("TPU_LIBRARY_PATH", *CHOSEN):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TPU_LIBRARY_PATH", "")  # so that it is gone after the test
    monkeypatch.delenv("TPU_LIBRARY_PATH")
    for name, value in given.items():
        monkeypatch.setenv(name, str(tmp_path / value) if name == "TPU_LIBRARY_PATH" else value)
    before = os.environ.get("TPU_LIBRARY_PATH")
    installed = None if machine.get("uninstalled") else mock.Mock(origin=str(tmp_path / "x.py"))
    monkeypatch.setattr(importlib.util, "find_spec", {"libtpu": installed}.get)
    files = {"dev/accel0": ""} if "device" in machine else {}
    if "vendor" in machine:
        files |= {f"sys/bus/pci/devices/0/{name}": text for name, text in machine.items()}
    avoid_tpu(written(tmp_path, files))
    after = os.environ.get("TPU_LIBRARY_PATH")
    assert (after != before) == kept
    assert not kept or (after and pathlib.Path(after).is_file())


def test_supported_versions_are_those_of_pyproject_and_others_are_refused(root):
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    least, most = SUPPORTED["Python"]
    assert project["requires-python"] == f">={least},<{most}"
    least, most = SUPPORTED["jax"]
    assert f"jax>={least},<{most}" in project["dependencies"]
    readme = " ".join((root / "README.md").read_text().split())
    assert "Python 3.11 to 3.13" in readme and "jax 0.10.2 to 0.12" in readme
    for versions, line in {
        ("3.11.0", "0.10.2"): "",
        ("3.13.9", "0.12.9"): "",
        ("3.14.0", "0.11.2"): "install Python 3.11 or later, before 3.14.",
        ("3.10.14", "0.11.2"): "Python 3.10.14 is not supported",
        ("3.11.7", "0.10.1"): "install jax 0.10.2 or later, before 0.13.",
        ("3.11.7", "0.13.0"): "jax 0.13.0 is not supported",
    }.items():
        found = dict(zip(SUPPORTED, versions, strict=True))
        if not line:
            refuse_versions(found)
            continue
        with pytest.raises(ConfigError, match=re.escape(line)):
            refuse_versions(found)


def test_the_citation_is_of_this_version(root):
    text = (root / "CITATION.cff").read_text()
    fields = dict(re.findall(r'^([\w-]+): "?([^"\n]+)"?$', text, re.MULTILINE))
    assert fields["cff-version"] == "1.2.0" and fields["version"] == nca_trader.__version__
    assert fields["license"] == "Apache-2.0" and fields["title"] == "nca_trader"
