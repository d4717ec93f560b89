"""Memory that does not suffice: one line with what to lower, and exit 2; never a traceback."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nca_trader.cli import main, train
from nca_trader.errors import ConfigError, out_of_memory
from nca_trader.machine import memory
from nca_trader.optimum.optima.synthetic import make

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


def test_a_market_that_no_memory_holds_is_refused_before_it_is_drawn(monkeypatch):
    module = sys.modules["nca_trader.markets.market"]  # the package has a function of that name
    monkeypatch.setattr(module, "memory", lambda: memory()._replace(free=12 * GB))
    words = r"num_bars=4000000000: .* take 400 GB, and 12\.9 GB are free; give"
    with pytest.raises(ConfigError, match=words):
        make("ou", num_bars=4_000_000_000)


@pytest.mark.heavy
def test_a_draw_that_fails_late_ends_in_one_line_and_not_the_process(tmp_path):
    """The check is off: XLA says what it could not allocate, where numpy's view would abort."""
    script = (
        "import resource, sys; from nca_trader.cli import main, train\n"
        "import jax; jax.devices()\n"
        "from nca_trader.optimum.optima.synthetic import make\n"
        "sys.modules['nca_trader.markets.market'].CELL_BYTES = 0\n"
        "train.run_train = lambda args: make('ou', num_bars=40_000_000)\n"
        "pages = int(open('/proc/self/statm').read().split()[0])\n"
        "limit = pages * resource.getpagesize() + (5 << 27)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit)); sys.exit(main())"
    )
    command = [sys.executable, "-c", script, "train", "--env=ou_mid", "--agent=nano", "--run=x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "nca-trader train: out of memory (" in done.stderr.splitlines()[-1]
