"""The site in build/site, which `make site` has just built: complete, and from nowhere else."""

import html.parser
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import pytest
from conftest import ROOT

import nca_trader as nca

SITE = ROOT / "build" / "site"
pytest.importorskip("mkdocs", reason="`make site` builds the site and runs these")
if not SITE.exists():
    pytest.skip("there is no site; `make site` builds it", allow_module_level=True)


class Loads(html.parser.HTMLParser):
    """What a page loads by itself, the names of its anchors, and its pictures."""

    def __init__(self, text):
        super().__init__()
        self.loaded, self.names = [], set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.names |= {given["id"]} if "id" in given else set()
        if tag in ("script", "img", "iframe", "source"):
            self.loaded.append(given.get("src"))
        if tag == "link" and given.get("rel") in ("stylesheet", "icon", "preconnect", "preload"):
            self.loaded.append(given.get("href"))


@pytest.fixture(scope="module")
def pages():
    return {path: Loads(path.read_text()) for path in sorted(SITE.rglob("*.html"))}


def test_a_page_loads_only_files_of_the_site(pages):
    assert len(pages) > 80
    for path, page in pages.items():
        for target in filter(None, page.loaded):
            assert "//" not in target, f"{path.name} loads {target}"
            assert path.name == "404.html" or (path.parent / target.partition("?")[0]).exists()


def test_style_sheets_and_scripts_fetch_nothing_from_elsewhere():
    for path in [*SITE.rglob("*.css")]:
        assert not re.search(r"url\(\s*['\"]?(https?:)?//", path.read_text()), path.name


def test_the_build_refuses_the_network():
    lines = "import socket, website; website.on_startup(); "
    lines += "socket.create_connection(('127.0.0.1', 9), timeout=1)"
    done = subprocess.run(
        [sys.executable, "-c", lines], cwd=ROOT / "tools", capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert "RuntimeError: The site is built without a network" in done.stderr


def test_every_public_name_has_its_place_in_the_reference(pages):
    names = {name.rpartition(".")[2] for path, page in pages.items()
             if path.parent.name == "api" for name in page.names}  # fmt: skip
    assert {*nca.__all__} <= names


def test_the_reference_is_a_page_with_its_tables(pages):
    names = pages[SITE / "reference.html"].names
    assert {"keys-of-an-agent", "fault-codes-of-bar-files", "exit-codes"} <= names


def test_every_document_is_a_page(pages):
    for page in (ROOT / "docs").rglob("*.md"):
        assert SITE / page.relative_to(ROOT / "docs").with_suffix(".html") in pages


def test_every_notebook_is_a_page_with_its_pictures_and_says_nothing_of_this_machine(pages):
    made = sorted((ROOT / "notebooks").glob("*.ipynb"))
    assert len(made) >= 8
    here = {str(ROOT), tempfile.gettempdir(), str(pathlib.Path.home())} - {"/"}
    for path in made:
        text = path.read_text()
        assert not [folder for folder in here if f"{folder}/" in text], path.name
        assert SITE / "notebooks" / f"{path.stem}.html" in pages
        outputs = [o for cell in json.loads(text)["cells"] for o in cell.get("outputs", ())]
        assert any("image/png" in o.get("data", {}) for o in outputs), path.name
        assert not any(o["output_type"] == "error" for o in outputs), path.name


def test_a_notebook_has_the_cells_of_its_source():
    notebooks = pytest.importorskip("notebooks")
    for path in sorted((ROOT / "notebooks").glob("*.py")):
        kept = json.loads(path.with_suffix(".ipynb").read_text())["cells"]
        there = [(c["cell_type"], "".join(c["source"])) for c in kept]
        here = [(c.cell_type, c.source) for c in notebooks.source(path).cells]
        assert there == here, f"{path.name}: run `make notebooks NOTEBOOK_ARGS={path.stem}`"
