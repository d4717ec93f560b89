"""Every example in a docstring runs and prints what it says."""

import doctest
import importlib

import pytest
from conftest import ROOT

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def modules():
    """The names of the package's modules whose text has an example."""
    for path in sorted((ROOT / "nca_trader").rglob("*.py")):
        if ">>> " in path.read_text(encoding="utf-8"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("name", [*modules()])
def test_the_examples_of_a_module_print_what_they_say(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # an example that writes a file leaves nothing in the checkout
    module = importlib.import_module(name)
    said = []
    runner = doctest.DocTestRunner(optionflags=FLAGS, verbose=False)
    for test in doctest.DocTestFinder(exclude_empty=True).find(module, name):
        runner.run(test, out=said.append)
    assert runner.failures == 0, "".join(said)
    assert runner.tries > 0, f"{name} has an example that doctest does not find"
