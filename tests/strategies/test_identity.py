"""A digest is of the code and the values of a strategy, and of no address."""

import functools
import subprocess
import sys

import numpy as np
import pytest

import nca_trader as nca
from nca_trader.config.modules import digest_of_imported, read_sources
from nca_trader.evaluate.combinations import member_of
from nca_trader.strategies.identity import digest_of

MADE = """
import functools
import numpy as np
import pytest
import nca_trader as nca
from nca_trader.strategies.identity import digest_of
RULES = [
    nca.rules.sma_cross(5, 20),
    nca.rules.breakout(20, stop=0.05),
    nca.rules.sma_cross,
    functools.partial(nca.rules.sma_cross, slow=50),
]
"""


@pytest.mark.heavy
def test_a_digest_is_the_same_in_another_process(root):
    code = MADE + "print([digest_of(rule) for rule in RULES])"
    there = [
        subprocess.run(
            [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    ]
    assert there[0] == there[1] and len(set(eval(there[0]))) == 4


def made(value):
    def inner(x):
        return x + value

    def outer(x=0, *, more=(1, 2)):
        return inner(x)

    return outer


class Model:
    def __init__(self, weights):
        self.weights, self.again = weights, self  # holds itself

    def decide(self, bars):
        return self.weights


def test_every_value_that_a_function_holds_counts():
    different = [
        made(1), made(2), made("1"), made(np.zeros(3)), made(np.zeros(4)), made(np.ones(3)),
        made([1, 2]), made({"a": 1}), made({"a": 2}), made(made(1)), made(None),
        functools.partial(made(1), 2), functools.partial(made(1), 3),
        functools.partial(made(1), more=2), Model(np.zeros(2)).decide, Model(np.ones(2)).decide,
        nca.rules.sma_cross(5, 20).with_stop(0.1), nca.rules.sma_cross(5, 20).with_stop(0.2),
    ]  # fmt: skip
    digests = [digest_of(x) for x in different]
    assert len(set(digests)) == len(digests)
    assert digest_of(made([1, {"a": np.ones(2)}])) == digest_of(made([1, {"a": np.ones(2)}]))
    assert digest_of(Model(np.ones(2)).decide) == digest_of(Model(np.ones(2)).decide)


MINE = "from near import helper\n\n\ndef rule(bars):\n    return helper()\n"
NEAR = "def helper():\n    return 1.0\n"


def test_an_edited_file_is_another_rule_and_so_is_one_that_it_imports(tmp_path):
    files = [
        (MINE, NEAR), (MINE, NEAR), (MINE, NEAR.replace("1.0", "2.0")), (MINE, f"# new\n{NEAR}"),
        (MINE.replace("helper()", "2.0 * helper()"), NEAR),
    ]  # fmt: skip
    found = []
    for mine, near in files:
        (folder := tmp_path / str(len(found))).mkdir()
        (folder / "mine.py").write_text(mine)
        (folder / "near.py").write_text(near)
        sys.modules.pop("near", None)
        found.append(digest_of(member_of(f"{folder / 'mine.py'}:rule")))
    sys.modules.pop("near", None)
    # A folder may move; each other change of a file is other code.
    assert found[0] == found[1] and len(set(found)) == 4


def test_a_rule_of_a_package_is_known_by_the_files_of_the_package(tmp_path, monkeypatch):
    (tmp_path / "id_pack").mkdir()
    (tmp_path / "id_pack/__init__.py").write_text("")
    (tmp_path / "id_pack/rules.py").write_text(MINE.replace("near", ".near"))
    near = tmp_path / "id_pack/near.py"
    near.write_text(NEAR)
    monkeypatch.chdir(tmp_path)
    rule = member_of("id_pack.rules:rule")
    first = digest_of(rule)
    near.write_text(NEAR.replace("1.0", "2.0"))
    assert digest_of(rule) != first
    near.write_text(NEAR)
    assert digest_of(rule) == first
    # What is installed is left out: its version is recorded elsewhere.
    assert digest_of_imported("numpy") == digest_of_imported("json") == ""
    assert digest_of_imported("builtins") is None


def test_own_code_in_a_checkout_does_not_hold_the_package_too(tmp_path, root, monkeypatch):
    """Its version is recorded; a worker that got its files would replace what it runs on."""
    (tmp_path / "nca_trader").symlink_to(root / "nca_trader")
    (tmp_path / "mine.py").write_text("import nca_trader\nfrom nca_trader import data\n" + MINE)
    (tmp_path / "near.py").write_text(NEAR)
    monkeypatch.chdir(tmp_path)
    for module in ("mine", str(tmp_path / "mine.py")):
        (files,) = read_sources([module]).folders.values()
        assert files.keys() == {"mine.py", "near.py"}


def test_a_function_without_a_module_has_a_digest_of_its_code():
    made = [{}, {}, {}]
    for names, code in zip(made, ["bars.close", "bars.close", "bars.open"], strict=True):
        exec(f"def rule(bars):\n    return {code}\n", names)
        names["rule"].__module__ = None
    first, same, other = (digest_of(names["rule"]) for names in made)
    assert first == same != other
