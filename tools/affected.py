"""Lists the test files that a change against main affects, by the graph of imports.

Nearest first: a test that imports a changed file itself, then one that imports what imports it, and
so on, until `--seconds` are full. `make check` runs them.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
SOURCES = ("nca_trader", "benchmarks", "tools", "tests")
# Where pytest finds modules, see `pythonpath` in pyproject.toml.
PATHS = ("", "tests/", "tests/support/", "tools/")
# These read the sources themselves, so every change affects them.
ALWAYS = tuple(f"tests/test_{name}.py" for name in ("layers", "messages", "wordlist"))
# Seconds by test file, which tests/conftest.py writes; other files are taken for UNKNOWN.
DURATIONS = ".pytest_cache/v/nca_trader/seconds"
UNKNOWN = 4.0
OFFER = 2  # processes of `make check`
MODULE = re.compile(r"\b(?:nca_trader|benchmarks)(?:\.\w+)+\.?")


def changed(root: pathlib.Path, base: str) -> set[str]:
    """Return the files that differ from the common ancestor with `base`, new ones too."""

    def git(*words: str) -> list[str]:
        command = ["git", "-C", str(root), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()

    (ancestor,) = git("merge-base", base, "HEAD")
    new = git("ls-files", "--others", "--exclude-standard")
    return {*git("diff", "--name-only", "--no-renames", ancestor), *new}


def graph(root: pathlib.Path) -> dict[str, set[str]]:
    """Return the files that each Python file of the repository depends on."""
    files = {
        path.relative_to(root).as_posix()
        for folder in SOURCES
        for path in sorted((root / folder).rglob("*.py"))
    }
    trees = {file: ast.parse((root / file).read_text()) for file in sorted(files)}
    # For type checkers alone: a public name loads its module when it is first used.
    public = {
        alias.name: f"{node.module}.{alias.name}"
        for block in trees["nca_trader/__init__.py"].body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    found = {}
    for file, tree in trees.items():
        here = file.removesuffix(".py").removesuffix("/__init__").split("/")
        own = set(names(tree, here, public))
        own -= set(public.values()) if file == "nca_trader/__init__.py" else set()
        found[file] = {each for name in own for each in files_of(name, files)} - {file}
    for file in files:
        for folder in pathlib.PurePath(file).parents:  # fixtures come without an import
            if (conftest := f"{folder.as_posix()}/conftest.py") in files:
                found[file] |= found[conftest] | {conftest}
    return found


def names(tree: ast.AST, here: list[str], public: dict[str, str]) -> Iterator[str]:
    """Yield the dotted names of all modules and members that a file mentions in its code."""
    aliases = {"nca_trader"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
            aliases |= {a.asname or a.name for a in node.names if a.name == "nca_trader"}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(here[: -node.level]) if node.level else ""
            module = ".".join(filter(None, [base, node.module]))
            for alias in node.names:
                yield public.get(alias.name, "") if module == "nca_trader" else ""
                yield f"{module}.{alias.name}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # Programs of other processes, and targets of monkeypatch.
            yield from MODULE.findall(node.value)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in aliases and node.attr in public:
                yield public[node.attr]


def files_of(name: str, files: set[str]) -> set[str]:
    """Return the file of a module or of the module that a member is in.

    A name that ends in a dot is the beginning of one that is put together: a whole package.
    """
    path = name.replace(".", "/")
    if name.endswith("."):
        return {file for file in files if file.startswith(path) and "/" not in file[len(path) :]}
    for end in (path, path.rpartition("/")[0]):
        for there in (
            f"{folder}{end}{tail}" for folder in PATHS for tail in (".py", "/__init__.py")
        ):
            if end and there in files:
                return {there}
    return set()


def affected(edges: dict[str, set[str]], changes: set[str], texts: dict[str, str]) -> list[str]:
    """Return the test files that depend on `changes`, the nearest first.

    Args:
      edges: of `graph`.
      changes: changed files. One that is not Python affects the tests that name it.
      texts: the text of each test file.
    """
    distance = {file: 0 for file in changes}
    others = {pathlib.PurePath(file).name for file in changes if not file.endswith(".py")}
    for test, text in texts.items():
        if any(name in text for name in others):
            distance.setdefault(test, 1)
    layer = set(distance)
    while layer:
        far = 1 + max(distance[file] for file in layer)
        layer = {file for file, needed in edges.items() if needed & layer and file not in distance}
        distance |= dict.fromkeys(layer, far)
    nearest = sorted(
        (far, -max((likeness(file, test) for file in changes), default=0), test)
        for test, far in distance.items()
        if test in texts
    )
    always = [test for test in ALWAYS if changes and test in texts]
    return list(dict.fromkeys([*always, *(test for _, _, test in nearest)]))


def likeness(file: str, test: str) -> int:
    """Return how many of the folders above a test are those above a file, plus one for its name."""
    above, name = file.removesuffix(".py").split("/")[1:], test.rpartition("/")[2]
    pairs = zip(above, test.split("/")[1:], strict=False)
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return same + any(word in name for word in above)


def main(argv: list[str] | None = None) -> int:
    """Print the files on stdout, and what they leave out on stderr."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", default="main", help="the branch compared with (%(default)s)")
    parser.add_argument("--seconds", type=float, default=75.0, help="of tests, about (%(default)s)")
    args = parser.parse_args(argv)
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in tests}
    found = affected(graph(ROOT), changed(ROOT, args.base), texts)
    record = ROOT / DURATIONS
    seconds = json.loads(record.read_text()) if record.is_file() else {}
    chosen, spent = [], 0.0
    for test in found:
        takes = seconds.get(test, UNKNOWN) / OFFER
        if spent + takes <= args.seconds or test in ALWAYS:
            chosen.append(test)
            spent += takes
    if found:
        left = len(found) - len(chosen)
        more = f"; `make test` runs the other {left}, which are further away" if left else ""
        print(f"{len(chosen)} test files, about {spent:.0f} s{more}", file=sys.stderr)
    print("\n".join(chosen))
    return 0


if __name__ == "__main__":
    sys.exit(main())
