"""The folder of a walk-forward: its settings, and one file per fold, each written whole.

walkforward.json    what is walked: bars, folds, subject, grid, costs; sealed with its SHA-256
fold-000.npz        what fold 0 found and decided, see `Fitted`
checked             once a fold was checked: the leak that was found, or nothing

A call with the same settings takes the folds that are there and computes the others.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from nca_trader.config.records import plain, read_json
from nca_trader.errors import StateError
from nca_trader.evaluate.walkforward.refit import Fitted, Refit
from nca_trader.runs.consent import codes_of, own_names
from nca_trader.runs.parts import WorkFolder
from nca_trader.strategies.identity import identity

FILE, CHECKED = "walkforward.json", "checked"


def settings(refit: Refit, more: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides the numbers of a walk-forward."""
    account, agent = refit.account, refit.env is not None
    named = dict.fromkeys(account.costs.own or (), "costs")
    if refit.env is not None:
        named |= own_names(refit.env, refit.subject)
    return {
        "bars": refit.bars.digest(),
        "symbols": list(refit.bars.symbols),
        "folds": [plain(fold) for fold in refit.folds],
        # How many seeds act is in `more`.
        "subject": identity(refit.subject) | ({"num_seeds": 1} if agent else {}),
        # As texts: values may be of types that JSON does not have.
        "grid": {name: [str(value) for value in values] for name, values in refit.grid.items()},
        "metric": refit.metric,
        "costs": plain(account.costs),
        # A limit that is off is one only where an environment has it on.
        "limits": {n: x for n, x in account.stored.items() if agent or x is not None},
        "env": refit.env and plain(refit.env),
        "steps": refit.steps,
        # Of own features, costs and so on, which the configs above only name.
        "code": plain(codes_of(named) or {}),
        **more,
    }


def arrays_of(fitted: Fitted) -> dict[str, Any]:
    """Return one fold as arrays by name."""
    facts = {
        field.name: getattr(fitted, field.name)
        for field in dataclasses.fields(fitted)
        if field.name not in ("targets", "leaves")
    }
    arrays: dict[str, Any] = {"targets": fitted.targets, "facts": np.array(json.dumps(facts))}
    for seed, leaves in enumerate(fitted.leaves):
        arrays |= {f"seed {seed} {name}": leaf for name, leaf in leaves.items()}
    return arrays


def read_fold(parts: WorkFolder, number: int) -> Fitted | None:
    """Read one fold; None where it is not there yet.

    Raises:
      StateError: its file is damaged.
    """
    found = parts.read(number)
    if found is None:
        return None
    try:
        targets, text = found.pop("targets"), str(found.pop("facts"))
        leaves: list[dict[str, np.ndarray]] = []
        for key, leaf in found.items():
            # Split at the first two spaces only: a parameter's own name may contain spaces.
            _, seed, name = key.split(" ", 2)
            if not 0 <= int(seed) < len(found):  # the seeds are numbered from 0
                raise ValueError(f"{key!r} is of no seed")
            while len(leaves) <= int(seed):
                leaves.append({})
            leaves[int(seed)][name] = leaf
        facts = read_json(text, f"fold {number}")
        return Fitted(targets=targets, leaves=tuple(leaves), **facts)
    except (ValueError, KeyError, TypeError, StateError) as error:
        raise parts.damaged(number, error) from None
