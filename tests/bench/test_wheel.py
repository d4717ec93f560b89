"""`nca-trader bench` finds the benchmarks in a wheel and in a checkout."""

import os
import subprocess
import sys
import zipfile

import pytest
from hatchling.builders.wheel import WheelBuilder

FOUND = """
import sys
from nca_trader.cli.bench import benchmark
print(*(benchmark(name).__file__ for name in ("env", "policy", "ppo")), sep="\\n")
"""
# The rows of the benchmarks are other tests' subject: here one stands for all.
RUN = """
import sys
from nca_trader.cli import bench, main
env = bench.benchmark("env")
env._index = lambda *_: {"name": "x", "steps_per_s": 2.0, "compile_s": 1.0, "ratio": None}
bench.benchmark("timing").SECONDS = 0.0
env._one_env = env._vector_env = env._index
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory, root):
    """A folder with the unpacked wheel, and nothing else of the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    (wheel,) = WheelBuilder(str(root)).build(directory=str(folder), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "installed")
    return folder / "installed"


def python(folder, program, *args):
    words = [sys.executable, "-c", program, *args]
    env = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(words, cwd=folder.parent, env=env, capture_output=True, text=True)


@pytest.mark.slow
def test_each_installation_has_its_own_benchmarks(installed, root, tmp_path):
    (tmp_path / "benchmarks").mkdir()  # a folder of that name where the user is
    for folder, where in ((installed, installed / "nca_trader"), (root, root)):
        done = python(folder, FOUND)
        names = [str(where / "benchmarks" / f"{name}.py") for name in ("env", "policy", "ppo")]
        assert done.stdout.splitlines() == names, done.stderr


@pytest.mark.slow
def test_a_wheel_measures_and_has_no_peers(installed):
    done = python(installed, RUN, "bench", "env", "--json")
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 4, done.stderr
    done = python(installed, RUN, "bench", "env", f"--peers={sys.executable}")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "nca-trader bench: --peers: a wheel has no peers; run it in a checkout.\n"
