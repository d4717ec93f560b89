import json
import signal
from typing import NamedTuple

import pytest

from nca_trader.cli import main


class Said(NamedTuple):
    """What a command said, and the code that it ended with."""

    code: int
    out: str
    err: str

    @property
    def json(self):
        """The last line of stdout, as a strict reader of JSON has it."""

        def refuse(constant):
            raise ValueError(f"{constant} is not JSON")

        return json.loads(self.out.splitlines()[-1], parse_constant=refuse)


@pytest.fixture
def command(capsys, tmp_path, monkeypatch):
    """Runs `nca-trader` in this process, with what a shell would give it, in its own folder."""
    monkeypatch.chdir(tmp_path)

    def run(*args):
        capsys.readouterr()
        try:
            code = main([str(arg) for arg in args])
        except SystemExit as exit:  # argparse's way
            code = exit.code
        return Said(code, *capsys.readouterr())

    return run


@pytest.fixture
def own(tiny, tmp_path):
    """A tiny run that a test may change, and its files."""
    return tiny.copy(tmp_path / "own")


@pytest.fixture
def heard():
    """Ctrl-C raises, also where what started the tests ignores it, e.g. a shell's background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
