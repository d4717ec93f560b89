"""Two processes of four devices each learn as one device does, in float64."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from restarted import free_port
from two_hosts import CASES

QUICK = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def start(root, folder, devices, *peers):
    folder.mkdir(exist_ok=True)
    flag = f"--xla_force_host_platform_device_count={devices}"
    paths = os.pathsep.join([str(root), str(root / "tests")])
    return subprocess.Popen(
        [sys.executable, str(root / "tests" / "two_hosts.py"), str(folder), *peers],
        env={**os.environ, **QUICK, "PYTHONPATH": paths, "XLA_FLAGS": flag},
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def ends(root, tmp_path_factory):
    """Folders with the ends of all runs: on one device, and on two processes."""
    folder: pathlib.Path = tmp_path_factory.mktemp("ends")
    address = f"127.0.0.1:{free_port()}"
    groups = [
        [start(root, folder / "one", 1)],
        [start(root, folder / "two", 4, address, str(process)) for process in (0, 1)],
    ]
    for group in groups:
        for process in group:
            _, said = process.communicate(timeout=800)
            assert process.returncode == 0, said[-2000:]
    return folder / "one", folder / "two"


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_processes_learn_what_one_device_learns(ends, case):
    """Gradients, parameters, moments, accounts, keys and metrics after each of the updates."""
    expected, got = (dict(np.load(end / f"{case}.npz")) for end in ends)
    assert got.keys() == expected.keys()
    rows, expected_rows = (json.loads(str(end.pop("rows"))) for end in (got, expected))
    gradients = [name for name in got if "gradients" in name]
    assert case == "replay" or len(gradients) > 5
    wide = 0
    for name, value in expected.items():
        if value.dtype.kind == "f":
            apart = np.abs(got[name] - value).max() / max(np.abs(value).max(), 1e-3)
            assert apart < 1e-9, (name, apart)
            wide += value.dtype == np.float64
        else:
            np.testing.assert_array_equal(got[name], value, err_msg=name)
    assert wide > 10  # what float32 holds could not be as close
    for row, other in zip(rows, expected_rows, strict=True):
        assert row == pytest.approx(other, rel=1e-9, abs=1e-9)
