"""What makes a session this one and no other: a journal belongs to one session."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from nca_trader.config.env import SIZES
from nca_trader.config.extensions import codes_of
from nca_trader.config.records import plain
from nca_trader.envs.account.state import Rules
from nca_trader.errors import ConfigError
from nca_trader.paper.core import Agent
from nca_trader.paper.journal import Journal, canonical

# Rules that earlier journals do not name. Where one is off it is left out of a session's identity,
# which stays that of those journals.
LATER = (*SIZES, "sizing", "dead_band")


def started_body(
    agent: Agent, capital: float, start: int | None, more: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the body of `run_started`, whose hash is the session's.

    Args:
      agent: what trades.
      capital: money at the start.
      start: seconds since 1970 UTC before which nothing is decided.
      more: what else makes a live session this one.
    """
    limits = agent.rules.risk
    own = codes_of(dict.fromkeys(agent.costs.own or (), "costs"))
    return {
        "symbols": list(agent.symbols),
        "first_decision": agent.first_decision,
        "costs": plain(agent.costs),
        "rules": {
            name: rule
            for name, rule in agent.rules._asdict().items()
            if name != "risk" and (name not in LATER or rule != Rules._field_defaults[name])
        },
        "capital": float(capital),
        "start": start,
        **({} if limits is None else {"limits": plain(limits)}),
        # Of costs given to the session; what a run names is checked with the run.
        **({} if own is None else {"cost_code": plain(own)}),
        **agent.identity,
        **more,
    }


def refuse_other_session(journal: Journal, started: Mapping[str, Any]) -> None:
    """Raise ConfigError where a journal is of another session than `started`; name what differs."""
    mine = json.loads(canonical(started))
    for event in journal.events("run_started"):
        there, here = _flat(event.body), _flat(mine)
        names = [n for n in sorted({*there, *here}) if there.get(n) != here.get(n)]
        # A sleeve of another name is one difference, and not as many as it has parts.
        sleeves = [set(body.get("sleeves", {})) for body in (event.body, mine)]
        common = tuple(f"sleeves.{name}." for name in sleeves[0] & sleeves[1])
        found = [
            f"{name} {there.get(name)} there, {here.get(name)} here"
            for name in names
            if not name.startswith("sleeves.") or name.startswith(common)
        ]
        if sleeves[0] != sleeves[1]:
            left, right = (", ".join(sorted(side)) or "none" for side in sleeves)
            found.append(f"sleeves {left} there, {right} here")
        differs = "; ".join(found)
        if differs:
            raise ConfigError(
                f"{journal.path}: is the journal of another session ({differs}); name another "
                "journal, or give that session's own options."
            )


def _flat(body: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by dotted names, so that a message has only those that differ."""
    found: dict[str, Any] = {}
    for name, value in body.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found
