"""What the documents name exists: links, commands, options and keys. `test_pages` runs Python."""

import ast
import itertools
import re
import shlex
import tomllib

import pytest
from documents import blocks, pages

import nca_trader
from nca_trader.cli import build_parser
from nca_trader.config import AgentConfig, EnvConfig
from nca_trader.config.toml import from_toml_text


@pytest.fixture(scope="module")
def readme(root):
    return (root / "README.md").read_text()


def test_a_wheel_and_the_demo_come_first_then_the_commands_of_a_clone(readme):
    install, clone = blocks(readme, "sh")[:2]
    made, shown = install.splitlines()[1:]
    assert shown == "nca-trader demo"
    assert made.endswith("install dist/nca_trader-*.whl")
    assert install.startswith("pip wheel --no-deps --wheel-dir dist .")
    assert clone == "make demo\nmake test\n"


def anchors(page):
    """The fragments by which the headings of a page are linked to."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    heads = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", head).strip().lower().replace(" ", "-") for head in heads}


def commands(page):
    """Each command of nca-trader in the shell blocks of a page, as words without the program."""
    text = page.read_text()
    typed = [re.sub(r"^(?!\$ |  ).*$", "", b, flags=re.M) for b in blocks(text, "console")]
    for block in [*blocks(text, "sh"), *typed]:
        for line in block.replace("\\\n", " ").splitlines():
            # A command for another host stands in quotes.
            given = shlex.split(line, comments=True)
            nested = [shlex.split(word) if "nca-trader " in word else [word] for word in given]
            words = [word for part in nested for word in part]
            starts = [i for i, word in enumerate(words) if word.split("/")[-1] == "nca-trader"]
            for start, end in itertools.pairwise([*starts, len(words)]):
                yield words[start + 1 : end]


def test_the_makefile_has_every_command_named_in_the_documents(root):
    text = "".join(page.read_text() for page in pages())
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.M))
    named = set(re.findall(r"(?:`|^)make ([a-z-]+)", text, re.M))
    assert {"demo", "docs"} <= named <= targets


def test_every_file_and_heading_the_documents_link_to_is_there(root):
    for page in pages():
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


def test_the_map_of_the_readme_is_short_and_leads_to_the_index(readme):
    given = re.findall(r"\]\(([^)#]+)", readme.partition("## Where to go")[2])
    assert "docs/index.md" in given and len(given) - given.count("LICENSE") <= 12


def test_the_documentation_is_short(root, readme):
    notes = root / "docs" / "lab-notes"
    assert len(readme.split()) <= 700 and len([*notes.glob("*.md")]) <= 8
    words = [len(page.read_text().split()) for page in root.glob("docs/**/*.md")]
    assert sum(words) + len(readme.split()) <= 40_000


def test_every_picture_of_the_documents_is_in_the_gallery(root):
    docs = root / "docs"
    shown = {(docs / link).resolve() for link in links(docs / "gallery.md")}
    assert {*docs.rglob("*.png"), *docs.rglob("*.svg")} <= shown


def links(page):
    found = re.findall(r"\]\(([^)#]+)", page.read_text())
    return [link for link in found if "://" not in link]


def test_every_command_of_the_documents_is_one_that_exists(root):
    parser, count = build_parser(), 0
    for page in pages():
        for words in commands(page):
            if "..." in words:  # stands for options that the page showed before
                continue
            try:
                parser.parse_args(words)
            except SystemExit as end:
                pytest.fail(f"{page.name}: nca-trader {shlex.join(words)}: exit {end.code}")
            count += 1
    assert count > 60


def test_every_python_example_of_the_documents_parses(root):
    for page in pages():
        for block in blocks(page.read_text(), "python"):
            ast.parse(block, page.name)


def test_the_changelog_opens_with_the_version_of_the_package(root):
    text = (root / "CHANGELOG.md").read_text()
    newest = re.search(r"^## \[?([\w.]+)", text, re.M)
    assert newest and newest[1] == nca_trader.__version__


def test_every_toml_example_of_the_documents_is_read(root):
    for page in pages():
        for block in blocks(page.read_text(), "toml"):
            given = tomllib.loads(block)
            # Not those of alerts, of a package, and of files whose page says what else is in them.
            if not {"rule", "project"} & {*given} and not block.startswith("# "):
                of_agent = hasattr(AgentConfig(), next(iter(given)))
                from_toml_text(AgentConfig if of_agent else EnvConfig, block, page.name)


def test_the_readme_is_short_and_so_are_its_examples(readme):
    assert len(readme.splitlines()) <= 120
    strategy, agent = (
        [line for line in example.splitlines() if line.strip()]
        for example in blocks(readme, "python")
    )
    assert len(strategy) <= 15 and len(agent) <= 10


def test_the_glossary_is_sorted_and_has_the_standard_terms(root):
    rows = re.findall(r"^\| (.+?) \|", (root / "docs" / "glossary.md").read_text(), re.M)[1:]
    assert rows == sorted(rows, key=str.lower) and len(rows) == len({*rows}) > 50
    words = {word for row in rows for word in row.lower().split(", ")}
    wanted = {"account", "baseline", "commission", "deflated sharpe ratio", "embargo", "equity"}
    wanted |= {"fill", "fold", "policy head", "reward", "slippage", "trial log", "turnover"}
    assert wanted - words == set()
