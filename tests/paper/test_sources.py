"""What decides must come out the same tomorrow: no wall clock, no chance, no pickle in paper/."""

import ast
import pathlib

import pytest
from sources import tree_of

import nca_trader.paper

FOLDER = pathlib.Path(nca_trader.paper.__file__).parent
# Files that are the clock or talk to a venue; the seeds of their jitter are given.
ADAPTERS = {"clock.py", "venue_feed.py", "alpaca_feed.py", "fetch.py", "yahoo.py"}
BANNED = {
    "time", "datetime", "random", "secrets", "uuid", "pickle", "marshal", "shelve", "yaml",
    "urandom", "default_rng", "now_ns", "utcnow", "today", "eval", "exec", "getrandom",
    "Timestamp.now", "Timestamp.utcnow",
}  # fmt: skip


def names(source: str) -> set[str]:
    """Modules imported, attributes read, and plain names called in `source`."""
    found = set()
    for node in ast.walk(tree_of(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.module or "").split(".")[0], *(alias.name for alias in node.names)}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            # `np.random`, `pd.Timestamp.now`: but `bar.time` is a field of ours.
            if node.value.id in ("np", "numpy", "jax", "os", "pd", "Timestamp"):
                found.add(node.attr)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
            found.add(f"{node.value.attr}.{node.attr}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found.add(node.func.id)
    return found


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.py")), ids=lambda path: path.name)
def test_no_clock_and_no_chance(path):
    if path.name not in ADAPTERS:
        assert not names(path.read_text()) & BANNED


@pytest.mark.parametrize(
    "line",
    [
        "import time",
        "from datetime import datetime",
        "import numpy as np; np.random.normal()",
        "from uuid import uuid4",
        "import os; os.urandom(8)",
        "import pandas as pd; pd.Timestamp.now()",
        "eval('1')",
        "import pickle",
    ],
)
def test_the_reader_of_sources_would_see_it(line):
    assert names(line) & BANNED
