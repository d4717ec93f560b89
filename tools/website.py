"""Extends the site of mkdocs.yml by what stands outside of docs/: a hook, run by mkdocs.

The READMEs, the notebooks and every file that a page links to become pages or files of the site.
`tools/reference.py` writes the reference; the public names become the Python API. The navigation is
the lists of docs/index.md.
"""

from __future__ import annotations

import ast
import base64
import json
import pathlib
import posixpath
import re
import socket
from collections.abc import Iterator
from typing import Any

import reference

ROOT = pathlib.Path(__file__).resolve().parents[1]
LINK = re.compile(r"(\]\()([^)#\s]*)((?:#[^)\s]*)?\))")
# Code of a page, in which "](" is no link.
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.M | re.S)
# A list item of an index that begins with links: the navigation.
ITEM = re.compile(r"^- ((?:\[[^\]]+\]\([^)#]+\)(?:, )?)+)", re.M)
NAMED = re.compile(r"\[([^\]]+)\]\(([^)#]+)\)")
TITLES = {
    "data": "Bars and data",
    "envs": "Environment",
    "strategies": "Strategies",
    "agents": "Policies",
    "learner": "Training",
    "evaluate": "Backtests and evaluation",
    "paper": "Paper trading",
    "runs": "Runs and trials",
    "scale": "Planning",
    "parallel": "Devices",
    "config": "Settings",
    "types": "Types",
    "errors": "Errors",
}


def public() -> Iterator[tuple[str, str]]:
    """Yield the module and the name of everything public, from the imports of the package."""
    tree = ast.parse((ROOT / "nca_trader" / "__init__.py").read_text())
    block = next(n for n in tree.body if isinstance(n, ast.If))
    for node in block.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield node.module, alias.name


def api() -> dict[str, str]:
    """Return the pages of the API reference by their path: one per package."""
    groups: dict[str, list[str]] = {name: [] for name in TITLES}
    for module, name in public():
        whole = ROOT / module.replace(".", "/") / f"{name}.py"
        tree = ast.parse(whole.read_text()) if whole.exists() else ast.parse("")
        made = (n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef))
        members = [name for name in made if not name.startswith("_")]
        groups.setdefault(module.split(".")[1], []).append(
            f"::: {module}.{name}\n" + (f"    options: {{members: {members}}}\n" * bool(members))
        )
    return {
        f"api/{package}.md": f"# {TITLES.get(package, package)}\n\n" + "\n".join(entries)
        for package, entries in groups.items()
        if entries
    }


def notebook(path: pathlib.Path) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as a page, and its pictures by their names."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{path.stem}-{len(pictures)}.png"
                pictures[name] = base64.b64decode(data["image/png"])
                parts.append(f"![Picture {len(pictures)} of this notebook]({name})")
            else:
                text = output.get("text") or data.get("text/plain") or ()
                parts.append(f"```{{ .text .output .no-copy }}\n{''.join(text).rstrip()}\n```")
    return "\n\n".join(parts) + "\n", pictures


def place(target: pathlib.Path) -> str:
    """Return where a file or folder of the repository stands in the site."""
    path = target.relative_to(ROOT)
    if path.parts[0] == "docs":
        return posixpath.join(*path.parts[1:])
    if path.name == "README.md" and len(path.parts) == 2:
        return f"project/{path.parts[0]}.md"
    if path.suffix == ".md":
        return f"project/{path.stem.lower()}.md"
    if path.suffix == ".ipynb":
        return path.with_suffix(".md").as_posix()
    return f"files/{path.as_posix()}" + (".md" if target.is_dir() else "")


def links(page: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield what a page or a notebook links to within the repository."""
    text = notebook(page)[0] if page.suffix == ".ipynb" else page.read_text()
    for found in LINK.finditer(CODE.sub("", text)):
        target = (page.parent / found[2]).resolve()
        if "://" not in found[2] and found[2] and target.exists() and ROOT in target.parents:
            yield target


def outside() -> Iterator[pathlib.Path]:
    """Yield what stands outside of docs/ and a page leads to, each once."""
    seen, todo = set(), sorted((ROOT / "docs").rglob("*.md"))
    while todo:
        for target in links(todo.pop()):
            if target not in seen and ROOT / "docs" not in target.parents:
                seen.add(target)
                yield target
                todo += [target] if target.suffix in (".md", ".ipynb") else []


def relinked(text: str, source: pathlib.Path, here: str) -> str:
    """Return the text of a page with every link to a file turned to its place in the site."""

    def turned(found: re.Match[str]) -> str:
        target = (source.parent / found[2]).resolve()
        if "://" in found[2] or not found[2] or not target.exists() or ROOT not in target.parents:
            return found[0]
        return found[1] + posixpath.relpath(place(target), posixpath.dirname(here)) + found[3]

    code = CODE.findall(text)
    prose = (LINK.sub(turned, part) for part in CODE.split(text))
    return "".join(part for pair in zip(prose, [*code, ""], strict=True) for part in pair)


def navigation(index: pathlib.Path) -> list[dict[str, Any]]:
    """Return the navigation of an index: sections by heading, and below a page its own index."""
    parts = re.split(r"^## (.*)$", index.read_text(), flags=re.M)
    nav: list[dict[str, Any]] = []
    for title, text in [("", parts[0]), *zip(parts[1::2], parts[2::2], strict=True)]:
        entries: list[dict[str, Any]] = []
        for name, link in NAMED.findall(" ".join(ITEM.findall(text))):
            target = (index.parent / link).resolve()
            below = target.name == "index.md" and target != index
            own = [place(target), *navigation(target)] if below else place(target)
            shown = name.capitalize() if place(target).startswith("project/") else name
            entries.append({shown: own})
        nav += [{title: entries}] if title and entries else entries
    return nav


def llms() -> str:
    """Return llms.txt, by which a language model finds the pages: https://llmstxt.org."""
    index = ROOT / "docs" / "index.md"
    title, _, rest = index.read_text().partition("\n## ")
    about = " ".join(title.split("\n\n")[1].split())

    def turned(found: re.Match[str]) -> str:
        target = (index.parent / found[2]).resolve()
        return f"{found[1]}{target.relative_to(ROOT).as_posix()})"

    lists = LINK.sub(turned, f"## {rest}")
    code = CODE.findall((ROOT / "docs" / "tutorial.md").read_text())
    first = next(block for block in code if block.startswith("```sh"))
    text = "# nca_trader\n\n> Backtest, train and paper-trade with neural cellular automata in JAX."
    return f"{text} {about}\n\n{first}\n\n{lists}"


def on_startup(**_: Any) -> None:
    """Forbid the network: a build that tries to reach it fails."""

    def refuse(self: socket.socket, address: Any) -> None:
        raise RuntimeError(f"The site is built without a network; something asked for {address}.")

    socket.socket.connect = refuse  # type: ignore[method-assign]


def on_config(config: Any) -> Any:
    """Set the navigation."""
    index = ROOT / "docs" / "index.md"
    names = [{text.split("\n")[0][2:]: path} for path, text in api().items()]
    written = [{"Reference": "reference.md"}, {"Python API": names}]
    config.nav = [{"Home": "index.md"}, *navigation(index), *written]
    return config


SOURCES: dict[str, pathlib.Path] = {}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that do not stand in docs/."""
    from mkdocs.structure.files import File  # the tests of this file run without mkdocs

    made: dict[str, str | bytes] = {"reference.md": reference.page(), **api(), "llms.txt": llms()}
    for target in outside():
        if target.suffix == ".ipynb":
            text, pictures = notebook(target)
            made |= {f"{target.parent.name}/{name}": data for name, data in pictures.items()}
            made[place(target)] = text
        elif target.is_dir():
            shown = (p for p in sorted(target.iterdir()) if p.is_file())
            blocks = (f"## {p.name}\n\n````text\n{p.read_text()}````\n" for p in shown)
            made[place(target)] = f"# {target.relative_to(ROOT)}\n\n" + "\n".join(blocks)
        else:
            made[place(target)] = target.read_bytes()
        SOURCES[place(target)] = target
    for path, content in made.items():
        given = content.decode() if isinstance(content, bytes) and path.endswith(".md") else content
        files.append(File.generated(config, path, content=given))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn the links of a page."""
    here = page.file.src_uri
    return relinked(markdown, SOURCES.get(here, ROOT / "docs" / here), here)


if __name__ == "__main__":
    (ROOT / "llms.txt").write_text(llms())
