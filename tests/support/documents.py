"""The pages of the documentation, and the code in them."""

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]


def blocks(text: str, language: str) -> list[str]:
    """The code of the blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def pages() -> list[pathlib.Path]:
    """Every page of the project: in its root, in docs/ and in the folders that a user edits."""
    return [*ROOT.glob("*.md"), *sorted(ROOT.glob("docs/**/*.md")), *ROOT.glob("*/README.md")]


def with_python() -> list[str]:
    """The names of the pages that have blocks of Python, below the root."""
    return [str(p.relative_to(ROOT)) for p in pages() if blocks(p.read_text(), "python")]
