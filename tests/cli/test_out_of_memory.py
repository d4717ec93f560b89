"""Memory that does not suffice: one line with what to lower, and exit 2; never a traceback."""

import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nca_trader.cli import main, train
from nca_trader.errors import out_of_memory

GB = 1 << 30


def of_numpy():
    np.empty((1 << 46,))


def of_xla():
    jax.block_until_ready(jax.jit(lambda: jnp.ones(1 << 46, jnp.float32))() + 1.0)


def of_the_system():
    raise OSError(12, "Cannot allocate memory")


@pytest.mark.parametrize("allocate", [of_numpy, of_xla, of_the_system])
def test_an_allocation_that_fails_is_one_line(monkeypatch, capsys, allocate):
    monkeypatch.setattr(train, "run_train", lambda args: allocate())
    assert main(["train", "--env=ou_mid", "--agent=nano", "--run=x"]) == 2
    said = capsys.readouterr()
    assert (said.out, len(said.err.splitlines())) == ("", 1)
    assert said.err.startswith("nca-trader train: out of memory (")
    assert "; lower learner.num_segments, " in said.err and said.err.endswith("fewer bars.\n")


def test_other_errors_are_not_taken_for_it():
    assert not any(map(out_of_memory, (ValueError("RESOURCE_EXHAUSTED"), OSError(2, "no file"))))


@pytest.mark.slow
def test_a_market_that_no_memory_holds_is_refused_before_it_is_drawn(tmp_path):
    """Four thousand million bars in an address space of 12 GB, nearly all of it free."""
    options = ["--env=ou_mid", "--agent=nano", "--set=env.market_bars=4000000000"]
    script = (
        "import resource, sys; from nca_trader.cli import main\n"
        f"resource.setrlimit(resource.RLIMIT_AS, ({12 * GB}, {12 * GB})); sys.exit(main())"
    )
    command = [sys.executable, "-c", script, "train", *options, f"--run={tmp_path / 'run'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    (line,) = done.stderr.splitlines()
    (free,) = re.findall(r"num_bars=4000000000: .* take 400 GB, and (\S+) GB are free; give", line)
    assert 1.0 < float(free) < 12 * GB / 1e9
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_draw_that_fails_late_ends_in_one_line_and_not_the_process(tmp_path):
    """The check is off: XLA says what it could not allocate, where numpy's view would abort."""
    options = ["--env=ou_mid", "--agent=nano", "--set=env.market_bars=40000000"]
    script = (
        "import resource, sys; from nca_trader.cli import main\n"
        "import importlib, jax; jax.devices()\n"
        "importlib.import_module('nca_trader.markets.market').CELL_BYTES = 0\n"
        "pages = int(open('/proc/self/statm').read().split()[0])\n"
        "limit = pages * resource.getpagesize() + (5 << 27)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit)); sys.exit(main())"
    )
    command = [sys.executable, "-c", script, "train", *options, f"--run={tmp_path / 'run'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "nca-trader train: out of memory (" in done.stderr.splitlines()[-1]
