"""The README's commands and its Python example do what it says."""

import os
import re
import subprocess
import sys

import pytest

import nca_trader


@pytest.fixture(scope="module")
def readme(root):
    return (root / "README.md").read_text()


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def test_the_first_two_commands_are_the_demo_and_the_tests(readme):
    assert blocks(readme, "sh")[:2] == ["make demo\n", "make test\n"]


def test_the_makefile_has_every_command_named_in_the_documents(root, readme):
    text = readme + (root / "CONTRIBUTING.md").read_text()
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.M))
    assert set(re.findall(r"\bmake ([a-z-]+)", text)) <= targets


def test_every_file_the_documents_link_to_is_there(root):
    for page in (*root.glob("*.md"), *root.glob("docs/**/*.md")):
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert "://" in link or (page.parent / link).exists(), f"{page.name}: {link}"


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
