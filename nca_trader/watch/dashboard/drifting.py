"""The table of what drifts: features, slippage and turnover, against training and backtest."""

from __future__ import annotations

from typing import Any

from nca_trader.errors import printable
from nca_trader.paper.tally import Tally, number
from nca_trader.watch.dashboard.parts import (
    cell,
    mean,
    moment,
    percent,
    points,
    short,
    table,
)

DRIFTS = {
    "drift-feature": "Feature",
    "drift-slippage": "Slippage",
    "drift-turnover": "Turnover",
    "drift-schema": "Feature schema",
}
# What the journal says is watched, by the code of its warning.
WATCHED = {
    "drift-feature": "features",
    "drift-slippage": "slippage",
    "drift-turnover": "turnover",
    "drift-schema": "schema",
}
DRIFT_ROWS = 8  # features of the table at most
DRIFT_FILLS = 50  # that the mean slippage is of, as in `paper.drift`


def drift_table(tally: Tally) -> dict[str, Any]:
    """Return what drifts: the present value where a journal tells it, and the newest warning."""
    # Read with care, as all bodies: a journal may come from another version.
    given = tally.started.get("costs")
    costs = given if isinstance(given, dict) else {}
    recent = tally.slippage[-DRIFT_FILLS:]
    # Both are fractions of the price that a fill is worse by.
    modelled = sum(number(costs.get(name, 0.0)) for name in ("slippage", "half_spread"))
    now = {
        "drift-slippage": f"{points(mean(recent))}, modelled {points(modelled)}",
        "drift-turnover": f"{percent(mean(list(tally.turnover)), 2)} a bar",
    }
    note = "A warning comes once as its limit is crossed, and again only after the value came back."
    return table(["Drift", "Now", "Last warning"], _rows(tally, now), note)


def _rows(tally: Tally, now: dict[str, str]) -> list[list[Any]]:
    """Return the rows; what is not watched says why."""
    rows = []
    for code, label in DRIFTS.items():
        # `Tally` moves a repeated warning to the end.
        newest = reversed(tally.drifts.items())
        found = [pair for name, pair in newest if name[0] == code]
        for ts, body in found[:DRIFT_ROWS]:
            name = f"{label} {printable(body.get('feature', ''))}".strip()
            said = f"{moment(ts)}: {_drifted(code, body)}"
            rows.append([name, now.get(code, ""), cell(said, "warn")])
        why = printable(tally.watched.get(WATCHED[code], ""))
        # A silent watch and an absent one look alike, so the row says which it is.
        if not found:
            said = f"not watched: {why}" if why else "no warning"
            rows.append([label, now.get(code, ""), cell(said, "idle")])
    return rows


def _drifted(code: str, body: dict[str, Any]) -> str:
    """Say a warning of the drift watch in words."""
    if code == "drift-feature":
        index, limit = number(body.get("psi")), number(body.get("limit"))
        return f"index {short(index)}, limit {short(limit)}"
    if code == "drift-slippage":
        error = points(number(body.get("error")))
        return f"{points(number(body.get('excess')))} above the model (standard error {error})"
    if code == "drift-turnover":
        return f"{percent(number(body.get('per_bar')), 2)} a bar, outside the backtest's range"
    return f"{body.get('here')} here, {body.get('there')} in training"
