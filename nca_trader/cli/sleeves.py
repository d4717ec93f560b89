"""`--sleeves FILE`: a TOML file with a table for each sleeve of an account."""

from __future__ import annotations

import pathlib
from typing import Any

from nca_trader.errors import ConfigError, argument

KEYS = ("share", "run", "strategy", "params", "symbols", "limits", "on_halt", "order", "seed")


def sleeve_tables(path: str) -> dict[str, dict[str, Any]]:
    """Return the tables of a file by the sleeves' names, checked as far as names and types go.

    Raises:
      ConfigError: every fault of the file.
    """
    from nca_trader.cli.checks import check_strategy
    from nca_trader.config.env import Limits
    from nca_trader.config.ranges import nearest
    from nca_trader.config.records import read_toml

    where = argument("sleeves", path)
    try:
        found = read_toml(pathlib.Path(path).read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigError(f"{where}: cannot be read ({reason}); check the path.") from None
    faults = [] if found else [f"{path}: names no sleeve; write [NAME] and share = 0.5 below it."]
    for name, table in found.items():
        if not isinstance(table, dict):
            faults.append(f"{path}: {name} is not a table; write [{name}] and its keys below.")
            continue
        faults += [
            f"{path}: [{name}] {key}: no such key; {nearest(key, KEYS)}There are {', '.join(KEYS)}."
            for key in table
            if key not in KEYS
        ]
        if ("run" in table) == ("strategy" in table):
            faults.append(f"{path}: [{name}] needs run or strategy, and one of them.")
        if "run" in table and "params" in table:
            faults.append(f"{path}: [{name}] params: is of a strategy; leave it out.")
        if "strategy" in table and "seed" in table:
            faults.append(f"{path}: [{name}] seed: is of a run; leave it out.")
        if type(table.get("share")) not in (int, float):
            faults.append(f"{path}: [{name}] share: give a fraction of the capital, e.g. 0.5.")
        kinds = {"run": str, "strategy": str, "params": dict, "symbols": list, "limits": dict}
        for key, kind in {**kinds, "seed": int, "order": str, "on_halt": str}.items():
            if key in table and type(table[key]) is not kind:
                faults.append(f"{path}: [{name}] {key}: give one of type {kind.__name__}.")
        try:
            if isinstance(table.get("limits"), dict):
                Limits(**table["limits"])
            if isinstance(table.get("strategy"), str):
                check_strategy(table["strategy"])
        except (ConfigError, TypeError) as error:
            faults.append(f"{path}: [{name}] {error}")
    if faults:
        raise ConfigError(*faults)
    return found


def sleeves_of(path: str) -> list[Any]:
    """Return the `Sleeve`s of a file.

    Raises:
      ConfigError: every fault of the file; a strategy that cannot be loaded.
    """
    from nca_trader.config.env import Limits
    from nca_trader.evaluate.subjects import subject_of
    from nca_trader.paper.sleeves import Sleeve

    sleeves = []
    for name, table in sleeve_tables(path).items():
        given = {k: table[k] for k in ("share", "on_halt", "order", "seed") if k in table}
        if "run" in table:
            given["run"] = table["run"]
        else:
            given["run"] = subject_of(table["strategy"], table.get("params", {}))
        if "symbols" in table:
            given["symbols"] = tuple(table["symbols"])
        if "limits" in table:
            given["limits"] = Limits(**table["limits"])
        try:
            sleeves.append(Sleeve(name=name, **given))
        except ConfigError as error:
            raise ConfigError(f"{path}: [{name}] {error}") from None
    return sleeves
