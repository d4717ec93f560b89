"""The ledger of trials: every agent trained and every look at a test span, counted for ever.

The more agents were tried, the better the best of them looks by luck alone; a report that does
not say how many were tried cannot be believed.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from typing import Any

from nca_trader.cloud import CloudPath, Place, together
from nca_trader.disk import write_atomically
from nca_trader.errors import StateError

FILE = "trials.jsonl"


def record(root: Place, entry: dict[str, Any]) -> None:
    """Appends one entry to the ledger in `root`; it is on disk when this returns.

    In a store each entry is an object of its own: runs may end there at the same time, and
    nothing can be locked or appended to.

    Args:
      root: the folder that holds the run folders.
      entry: `kind` "train" (with `trials`, the number of agents) or "test"; `run`; `data`, the
        SHA-256 of the bars.

    Raises:
      StateError: the ledger cannot be written.
    """
    line = json.dumps(entry, sort_keys=True) + "\n"
    if isinstance(root, CloudPath):
        # By time, so that they are read in order; random, so that no two have one name.
        write_atomically(root / FILE / f"{time.time_ns():020d}-{os.urandom(4).hex()}", line)
        return
    try:
        root.mkdir(parents=True, exist_ok=True)
        with open(root / FILE, "a", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StateError(
            f"{root / FILE}: the ledger of trials cannot be written ({error.strerror}); mend "
            "that, then try again."
        ) from None


def entries(root: Place) -> list[dict[str, Any]]:
    """All entries of the ledger in `root`, oldest first.

    Raises:
      StateError: a line is damaged; names it.
    """
    path = root / FILE
    if isinstance(path, CloudPath):
        text = "".join(together(CloudPath.read_text, path.iterdir()))
    else:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
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


def count(root: Place, kind: str, data: str | None = None) -> int:
    """Agents trained (`kind` "train") or looks at a test span ("test"), on `data` or on any."""
    return sum(
        entry.get("trials", 1)
        for entry in entries(root)
        if entry["kind"] == kind and data in (None, entry["data"])
    )
