"""The folder of a walk-forward: its settings, and one file per fold, each written whole.

walkforward.json    what is walked: bars, folds, subject, grid, costs; sealed with its SHA-256
fold-000.npz        what fold 0 found and decided, see `Fitted`
checked             once a fold was checked: the leak that was found, or nothing

A call with the same settings takes the folds that are there and computes the others.
"""

from __future__ import annotations

import dataclasses
import io
import json
import pathlib
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from nca_trader.config import AgentConfig
from nca_trader.config.records import RESTORE, plain, read_json
from nca_trader.errors import StateError
from nca_trader.evaluate.identity import digest_of
from nca_trader.evaluate.walkforward.refit import Fitted, Setup
from nca_trader.machine import write_atomically

FILE = "walkforward.json"
CHECKED = "checked"


def identity(subject: Any) -> Any:
    """Describe a subject, so that a folder is not resumed with another one."""
    if isinstance(subject, AgentConfig):
        return plain(subject)
    # A strategy has a name, a rule is a function, and a model may be any callable.
    name = getattr(subject, "name", None) or getattr(
        subject, "__qualname__", type(subject).__name__
    )
    return {"name": name, "sha256": digest_of(subject)}


def settings(setup: Setup, more: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides the numbers of a walk-forward, in the types of JSON."""
    known = {
        "bars": setup.bars.digest(),
        "symbols": list(setup.bars.symbols),
        "folds": [plain(fold) for fold in setup.folds],
        "subject": identity(setup.subject),
        # As texts: values may be of types that JSON does not have.
        "grid": {name: [str(value) for value in values] for name, values in setup.grid.items()},
        "metric": setup.metric,
        "costs": plain(setup.costs),
        "limits": dict(setup.limits),
        "env": setup.env and plain(setup.env),
        "steps": setup.steps,
        **more,
    }
    # As the file will give them back: tuples as lists.
    return json.loads(json.dumps(known, default=str))


def file_of(folder: pathlib.Path, number: int) -> pathlib.Path:
    """Return the path of a fold's file."""
    return folder / f"fold-{number:03}.npz"


def write_fold(folder: pathlib.Path, number: int, fitted: Fitted) -> None:
    """Write one fold, whole or not at all.

    Raises:
      StateError: it cannot be written.
    """
    facts = {
        field.name: getattr(fitted, field.name)
        for field in dataclasses.fields(fitted)
        if field.name not in ("targets", "leaves")
    }
    arrays: dict[str, Any] = {"targets": fitted.targets, "facts": np.array(json.dumps(facts))}
    for seed, leaves in enumerate(fitted.leaves):
        arrays |= {f"seed {seed} {name}": leaf for name, leaf in leaves.items()}
    # In memory first, since a file that is written piece by piece could be cut off.
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    write_atomically(file_of(folder, number), buffer.getvalue())


def read_fold(folder: pathlib.Path, number: int) -> Fitted | None:
    """Read one fold; None where it is not there yet.

    Raises:
      StateError: its file is damaged.
    """
    file = file_of(folder, number)
    if not file.exists():
        return None
    try:
        # A zip file has a checksum of each array.
        with np.load(io.BytesIO(file.read_bytes()), allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in arrays.files}
        targets, text = found.pop("targets"), str(found.pop("facts"))
        leaves: list[dict[str, np.ndarray]] = []
        for key, leaf in found.items():
            # At most twice: a parameter's own name may hold spaces.
            _, seed, name = key.split(" ", 2)
            if not 0 <= int(seed) < len(found):  # the seeds are numbered from 0
                raise ValueError(f"{key!r} is of no seed")
            while len(leaves) <= int(seed):
                leaves.append({})
            leaves[int(seed)][name] = leaf
        return Fitted(targets=targets, leaves=tuple(leaves), **read_json(text, str(file)))
    except (zipfile.BadZipFile, ValueError, KeyError, TypeError, EOFError, OSError) as error:
        what = " ".join(str(error).split()) or type(error).__name__
        raise StateError(f"{file}: not a fold ({what}); {RESTORE}, or delete it.") from None
