"""What pages import, and tests import or replace, is there; also where it is off by default."""

import ast
import contextlib
import functools
import importlib
import re

import pytest

OURS = ("nca_trader", "benchmarks")
# Modules that need what only some environments have.
ELSEWHERE = ("nca_trader.envs.sb3", "nca_trader.optimum.gymnax")


def named(tree):
    """The line and the dotted name of everything of ours that a file imports or replaces."""
    modules, nodes = {}, [*ast.walk(tree)]
    for node in nodes:
        if isinstance(node, ast.Import):
            modules |= {each.asname: each.name for each in node.names if each.asname}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for each in node.names:
                name = f"{node.module}.{each.name}"
                modules[each.asname or each.name] = name
                yield node.lineno, name
    for node in nodes:
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "setattr" and node.args:
            given = [x.value if isinstance(x, ast.Constant) else None for x in node.args[:2]]
            new = any(each.arg == "raising" for each in node.keywords)
            if isinstance(given[0], str):
                yield node.lineno, given[0]
            elif isinstance(node.args[0], ast.Name) and isinstance(given[1], str) and not new:
                yield node.lineno, f"{modules.get(node.args[0].id, '')}.{given[1]}"


@functools.cache
def is_there(name):
    """Whether a dotted name is a module's or a class's."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            # A field of a class without a default is none of its attributes.
            if part in getattr(found, "__annotations__", {}):
                return True
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def test_what_tests_import_or_replace_is_there(root):
    missing = []
    for path in sorted((root / "tests").rglob("*.py")):
        for line, name in named(ast.parse(path.read_text())):
            if name.startswith(OURS) and not name.startswith(ELSEWHERE) and not is_there(name):
                missing.append(f"{path.relative_to(root)}:{line}: {name}")
    assert not missing


def test_what_pages_import_is_there(root):
    missing = []
    for path in (root / "README.md", *sorted((root / "docs").rglob("*.md"))):
        # Of a function that a page shows without a body nothing is imported.
        for block in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL):
            with contextlib.suppress(SyntaxError):
                for _, name in named(ast.parse(block)):
                    if name.startswith(OURS) and not name.startswith(ELSEWHERE):
                        missing += [f"{path.name}: {name}"] * (not is_there(name))
    assert not missing


@pytest.mark.parametrize(
    "line",
    [
        "def test():\n    from nca_trader.learner.train import make_policy",
        "from nca_trader.learner import train\ndef test(m): m.setattr(train, 'make_policy', 1)",
        "def test(m):\n    m.setattr('nca_trader.learner.train.make_policy', 1)",
    ],
)
def test_what_is_not_there_is_seen(line):
    assert [name for _, name in named(ast.parse(line)) if not is_there(name)]
