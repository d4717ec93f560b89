"""Fills the templates of this folder, and writes pages whole.

A page needs nothing from elsewhere, and its Content-Security-Policy forbids it to ask: it can be
mailed, archived, printed, and opened from a disk. Scripts run by their hash alone, so text that
came from a file or a name cannot become one.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nca_trader.config.ranges import expect
from nca_trader.errors import ConfigError, argument
from nca_trader.evaluate import wording
from nca_trader.evaluate.evidence.verdict import copy_sentence
from nca_trader.machine import make_directory, write_atomically

FOLDER = Path(__file__).parent
LIBRARY = FOLDER / "lightweight_charts" / "lightweight-charts.standalone.production.js"


def script(path: Path) -> str:
    """Read a script of this package as it stands in a page."""
    text = path.read_text(encoding="utf-8").strip()
    # It would end the element early.
    assert "</script" not in text
    return text


def packed(data: Any) -> str:
    """Return data as compressed JSON in base64; `table.js` unpacks it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode(), 6)).decode()


def policy(scripts: Sequence[str]) -> str:
    """Return the Content-Security-Policy of a page with these inline scripts, and no others."""
    hashes = (
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for text in scripts
    )
    allowed = " ".join(hashes) or "'none'"
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def render(template: str, scripts: Sequence[str] = (), **shown: Any) -> str:
    """Fill a template of this folder, which escapes everything that is not markup.

    Args:
      template: its name.
      scripts: inline scripts of the page, as text.
      **shown: what the template names.
    """
    import jinja2  # 0.2 s, paid only by those who write a page

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        autoescape=True,  # names of files, runs and symbols are anybody's text
        undefined=jinja2.StrictUndefined,  # else a misspelt name is an empty cell
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # With these the templates write numbers and sentences.
    environment.globals |= {name: write for name, write in vars(wording).items() if callable(write)}
    environment.globals |= {"copy_sentence": copy_sentence, "packed": packed}
    environment.globals |= {"scripts": scripts, "policy": policy(scripts)}
    environment.filters["percent"] = wording.percent
    return environment.get_template(template).render(shown)


def write(path: Path, content: str | bytes) -> Path:
    """Write a file whole or not at all, and the folder where it is missing; return its path.

    Raises:
      StateError: it cannot be written there.
    """
    make_directory(path.parent)
    write_atomically(path, content)
    return path


def page_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a page.

    Raises:
      ConfigError: it is not a path, or has another suffix than .html.
    """
    expect("path", path, str | os.PathLike, "a path in .html")
    path = Path(path)
    if path.suffix != ".html":
        raise ConfigError(
            f"{argument('path', str(path))}: a page is written to .html; give such a name."
        )
    return path
