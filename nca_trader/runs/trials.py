"""The ledger of trials: every agent trained and every look at a test span, counted for ever.

The more agents were tried, the better the best of them looks by luck alone; a report that does
not say how many were tried cannot be believed.
"""

from __future__ import annotations

import fcntl
import json
import os
import pathlib
from typing import Any

from nca_trader.errors import StateError

FILE = "trials.jsonl"


def record(root: pathlib.Path, entry: dict[str, Any]) -> None:
    """Appends one entry to the ledger in `root`; it is on disk when this returns.

    Args:
      root: the folder that holds the run folders.
      entry: `kind` "train" (with `trials`, the number of agents) or "test"; `run`; `data`, the
        SHA-256 of the bars.

    Raises:
      StateError: the ledger cannot be written.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        with open(root / FILE, "a", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(json.dumps(entry, sort_keys=True) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StateError(
            f"{root / FILE}: the ledger of trials cannot be written ({error.strerror}); mend "
            "that, then try again."
        ) from None


def entries(root: pathlib.Path) -> list[dict[str, Any]]:
    """All entries of the ledger in `root`, oldest first.

    Raises:
      StateError: a line is damaged; names it.
    """
    path = root / FILE
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            entry = json.loads(line)
            if not {"kind", "run", "data"} <= set(entry):
                raise ValueError("not an entry")
            found.append(entry)
        except (ValueError, TypeError):
            raise StateError(
                f"{path} line {number}: not an entry; the count of trials can't be trusted. "
                "Restore the file from a copy, or move it away to begin a new count."
            ) from None
    return found


def count(root: pathlib.Path, kind: str, data: str | None = None) -> int:
    """Agents trained (`kind` "train") or looks at a test span ("test"), on `data` or on any."""
    return sum(
        entry.get("trials", 1)
        for entry in entries(root)
        if entry["kind"] == kind and data in (None, entry["data"])
    )
