"""The memory that a process may use, against files as Linux has them, and a limit of its own."""

import re
import subprocess
import sys
import tomllib

import pytest

import nca_trader
from nca_trader import ConfigError
from nca_trader.machine import SUPPORTED, Memory, memory, refuse_versions

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


def test_supported_versions_are_those_of_pyproject_and_others_are_refused(root):
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    least, most = SUPPORTED["Python"]
    assert project["requires-python"] == f">={least},<{most}"
    least, most = SUPPORTED["jax"]
    assert f"jax>={least},<{most}" in project["dependencies"]
    readme = (root / "README.md").read_text()
    readme = " ".join(readme.split())
    assert "Python 3.11 or 3.12" in readme and "jax 0.10.2 to 0.11" in readme
    for versions, line in {
        ("3.11.0", "0.10.2"): "",
        ("3.12.9", "0.11.9"): "",
        (
            "3.13.0",
            "0.11.2",
        ): "install Python 3.11 or later, before 3.13.",
        ("3.10.14", "0.11.2"): "Python 3.10.14 is not supported",
        (
            "3.11.7",
            "0.10.1",
        ): "install jax 0.10.2 or later, before 0.12.",
        ("3.11.7", "0.12.0"): "jax 0.12.0 is not supported",
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
