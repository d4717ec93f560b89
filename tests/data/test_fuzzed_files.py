"""Mutated files of every kind: read, or refused in lines that print; no traceback, no crash."""

import json
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[1] / "support" / "fuzzed.py"


def check(seed, count):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), str(seed), str(count)],
        capture_output=True, text=True, timeout=count,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert done.returncode == 0, (done.returncode, lines[-1:], done.stderr[-1000:])
    found = json.loads(lines[-1])
    assert not found["bad"], json.dumps(found["bad"], indent=1)
    assert found["peak_mib"] < 1000, found


@pytest.mark.parametrize(("seed", "count"), [
    pytest.param(0, 150, marks=pytest.mark.heavy),
    *(pytest.param(seed, 1500, marks=pytest.mark.slow) for seed in range(1, 5)),
])  # fmt: skip
def test_mutated_files_are_read_or_refused_in_one_line(seed, count):
    check(seed, count)
