"""Finds phrases of tools/wordlist.toml in the files that it names; exits with 1 if it finds any."""

from __future__ import annotations

import io
import pathlib
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterable, Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
LIST = tomllib.loads(pathlib.Path(__file__).with_suffix(".toml").read_text())
# What is code on a page: blocks, spans, and the addresses of links and pictures.
CODE = re.compile(r"^```.*?^```|`[^`]*`|\]\([^)]*\)|<https?://[^>]*>", re.M | re.S)
PROSE = {"COMMENT", "STRING", "FSTRING_MIDDLE"}  # tokens of Python


def files(patterns: Iterable[str], root: pathlib.Path = ROOT) -> list[pathlib.Path]:
    """Return the files that the patterns name, less those of patterns that start with "!"."""
    found: set[pathlib.Path] = set()
    for pattern in patterns:
        named = set(root.glob(pattern.removeprefix("!")))
        found = found - named if pattern.startswith("!") else found | named
    return sorted(found)


def prose(path: pathlib.Path) -> str:
    """Return the prose of a page or of a Python file, each line where it was."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        lines = [""] * (text.count("\n") + 2)
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if tokenize.tok_name[token.type] in PROSE:
                for row, line in enumerate(token.string.splitlines(), token.start[0] - 1):
                    lines[row] += f"{line} "
        text = "\n".join(lines)
    return CODE.sub(blank, text)


def blank(found: re.Match[str]) -> str:
    """Return a match as white space with the same line breaks."""
    return re.sub(r"\S", " ", found[0])


def matches(phrase: str, text: str) -> Iterator[re.Match[str]]:
    """Yield where a phrase occurs in a text, as whole words."""
    words = r"\s+".join(map(re.escape, phrase.split()))
    return re.finditer(rf"(?<![\w-]){words}(?![\w-])", text, re.I)


def offences(text: str) -> list[tuple[int, str, str]]:
    """Return line, phrase and the words to use, for every listed phrase in a text."""
    for term in LIST["allowed"]:
        for found in matches(term, text):
            text = text[: found.start()] + blank(found) + text[found.end() :]
    return sorted(
        (text.count("\n", 0, found.start()) + 1, phrase, plain)
        for phrase, plain in LIST["phrases"].items()
        for found in matches(phrase, text)
    )


def problems() -> list[str]:
    """Return a line for every listed phrase in the files."""
    return [
        f'{path.relative_to(ROOT)}:{line}: "{phrase}"; write: {plain}'
        for path in files(LIST["files"])
        for line, phrase, plain in offences(prose(path))
    ]


if __name__ == "__main__":
    print("\n".join(lines := problems()), file=sys.stderr)
    sys.exit(bool(lines))
