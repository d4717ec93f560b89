"""docs/architecture.md names functions that exist, and its table every package of the picture."""

import functools
import importlib
import re

import architecture
import pytest

ROOT = architecture.ROOT
PAGE = (ROOT / "docs" / "architecture.md").read_text()
NAMES = sorted(set(re.findall(r"`(nca_trader(?:\.\w+)+)`", PAGE)))


def found(name):
    """The module, or what a module or a class holds under that name."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            at = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            at = getattr(at, part)
        return at
    raise AssertionError(name)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_on_the_page_exists(name):
    assert found(name) is not None


def test_a_name_that_does_not_exist_is_noticed():
    with pytest.raises(AttributeError):
        found("nca_trader.learner.update.downdate")


def test_the_table_names_every_package():
    rows = set(re.findall(r"^\| `(\w+)` \|", PAGE, re.M))
    assert rows | {"foundation"} == set(architecture.ABOUT)


def test_the_picture_is_up_to_date_and_names_every_package(monkeypatch):
    monkeypatch.setattr(architecture, "edges", functools.cache(architecture.edges))
    assert architecture.main(["--check"]) == 0, "run `make docs`"
    parts = {path.parent.name for path in (ROOT / "nca_trader").glob("*/__init__.py")}
    assert parts | {"foundation"} == set(architecture.edges()) == set(architecture.ABOUT)
    picture = architecture.PICTURE.read_text()
    assert all(f">{name}<" in picture for name in parts)
