"""Every example in a docstring runs and prints what it says."""

import doctest
import importlib
import inspect
import re

import pytest
from conftest import ROOT

import nca_trader as nca

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


# An example that calls one of these takes seconds, as it compiles; other tests call them too.
DEAR = (
    "backtest scan train TradingEnv sweep walk_forward paper_trade leakcheck check_\\w+ report_\\w+"
)
DEAR = re.compile(rf"^ *(?:>>>|\.\.\.) .*\b({DEAR.replace(' ', '|')})\(", re.M)


def modules():
    """The names of the package's modules whose text has an example."""
    for path in sorted((ROOT / "nca_trader").rglob("*.py")):
        if ">>> " in (text := path.read_text(encoding="utf-8")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            yield pytest.param(name, marks=[pytest.mark.heavy] * bool(DEAR.search(text)))


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


# Shown by what returns or raises them: the example of `NcaTraderError` is that of every error.
ERRORS = {name for name in nca.__all__ if name.endswith("Error")} | {"CheckFailed"}
ELSEWHERE = {"Comparison"} | ERRORS - {"NcaTraderError"}


@pytest.mark.parametrize("name", sorted({*nca.__all__} - ELSEWHERE))
def test_a_public_name_has_an_example_and_describes_each_argument(name):
    thing = getattr(nca, name)
    if inspect.ismodule(thing):
        return
    text = inspect.getdoc(thing) or ""
    assert ">>> " in text, f"nca.{name} has no example"
    if inspect.isfunction(thing):
        arguments = inspect.signature(thing).parameters
        missing = [argument for argument in arguments if f"{argument}:" not in text]
        assert not missing, f"nca.{name} does not describe {missing}"
        nothing = inspect.signature(thing).return_annotation in (None, "None")
        assert nothing or "Returns:" in text or text.startswith("Return "), f"nca.{name}"
