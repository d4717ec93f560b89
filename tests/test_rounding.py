"""What is promised to the bit, in a process that compiles as users do."""

import os
import subprocess
import sys

import pytest

# The tests that compare to `rounding.ROUNDING`.
PROMISED = {
    "tests/strategies/test_blend.py": "sum_of_its_parts",
    "tests/envs/test_sizing.py": "same_bits or orders_and_earns",
    "tests/paper/session/test_parity.py": "other_rules",
    "tests/paper/session/test_strategies.py": "as_it_would_be_alone",
}


@pytest.mark.slow
@pytest.mark.parametrize("file", PROMISED)
def test_two_programs_agree_to_the_bit_as_users_compile_them(file, root):
    own = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "", file, "-k", PROMISED[file]]
    done = subprocess.run(
        command, cwd=root, env=own | {"AS_USERS_COMPILE": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:]


def test_every_test_that_compares_to_the_bit_is_named_here(root):
    found = {
        path.relative_to(root).as_posix()
        for path in (root / "tests").glob("*/**/test_*.py")
        if "import ROUNDING" in path.read_text()
    }
    assert found == PROMISED.keys()
