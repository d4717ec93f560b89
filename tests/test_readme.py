"""The README's commands and its Python example do what it says; so do commands of the documents."""

import ast
import itertools
import os
import re
import shlex
import subprocess
import sys

import pytest

import nca_trader
from nca_trader.cli import build_parser


@pytest.fixture(scope="module")
def readme(root):
    return (root / "README.md").read_text()


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def test_the_first_two_commands_are_the_demo_and_the_tests(readme):
    assert blocks(readme, "sh")[:2] == ["make demo\n", "make test\n"]


def pages_of(root):
    """Every page of the project: in its root, in docs/ and in the folders that a user edits."""
    return [*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("*/README.md")]


def anchors(page):
    """The fragments by which the headings of a page are linked to."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    heads = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", head).strip().lower().replace(" ", "-") for head in heads}


def commands(page):
    """Each command of nca-trader in the shell blocks of a page, as words without the program."""
    for block in blocks(page.read_text(), "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            # A command for another host stands in quotes, and `supervise` starts a second one.
            given = shlex.split(line, comments=True)
            nested = [shlex.split(word) if "nca-trader " in word else [word] for word in given]
            words = [word for part in nested for word in part]
            starts = [i for i, word in enumerate(words) if word.split("/")[-1] == "nca-trader"]
            for start, end in itertools.pairwise([*starts, len(words)]):
                yield words[start + 1 : end]


def test_the_makefile_has_every_command_named_in_the_documents(root):
    text = "".join(page.read_text() for page in pages_of(root))
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.M))
    named = set(re.findall(r"(?:`|^)make ([a-z-]+)", text, re.M))
    assert {"demo", "docs"} <= named <= targets


def test_every_file_and_heading_the_documents_link_to_is_there(root):
    for page in pages_of(root):
        for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            if "://" not in link:
                path, _, fragment = link.partition("#")
                target = page.parent / path if path else page
                assert target.exists(), f"{page.name}: {link}"
                assert not fragment or fragment in anchors(target), f"{page.name}: {link}"


def test_every_page_of_the_documents_is_linked_to_from_the_index(root):
    docs = root / "docs"
    listed = {(docs / link).resolve() for link in links(docs / "index.md")}
    notes = docs / "lab-notes"
    listed |= {(notes / link).resolve() for link in links(notes / "index.md")}
    assert {*docs.glob("**/*.md")} - {docs / "index.md"} <= listed


def test_the_readme_links_to_every_page_of_the_documents(root):
    linked = {(root / link).resolve() for link in links(root / "README.md")}
    assert {*root.glob("docs/**/*.md")} <= linked


def links(page):
    found = re.findall(r"\]\(([^)#]+)", page.read_text())
    return [link for link in found if "://" not in link]


def test_every_command_of_the_documents_is_one_that_exists(root):
    parser, count = build_parser(), 0
    for page in pages_of(root):
        for words in commands(page):
            try:
                parser.parse_args(words)
            except SystemExit as end:
                pytest.fail(f"{page.name}: nca-trader {shlex.join(words)}: exit {end.code}")
            count += 1
    assert count > 60


def test_every_python_example_of_the_documents_parses(root):
    for page in pages_of(root):
        for block in blocks(page.read_text(), "python"):
            ast.parse(block, page.name)


def test_the_changelog_opens_with_the_version_of_the_package(root):
    text = (root / "CHANGELOG.md").read_text()
    newest = re.search(r"^## \[?([\w.]+)", text, re.M)
    assert newest and newest[1] in ("Unreleased", nca_trader.__version__)


def test_the_python_example_runs(readme, tmp_path, root):
    (example,) = blocks(readme, "python")
    assert len([line for line in example.splitlines() if line.strip()]) <= 15
    short, count = re.subn(r"steps=[\d_]+", "steps=1", example)
    assert count == 1
    program = tmp_path / "example.py"
    program.write_text(short)
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=tmp_path,
        # What it computes is tested elsewhere; compiling it is most of this test.
        env={**os.environ, "PYTHONPATH": str(root), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    names = [line.split()[0] for line in done.stdout.splitlines() if line.strip()]
    assert names[-3:] == ["nano", "sma", "hold"]
