"""The view of a training run: a pure function of the rows of metrics.jsonl and of vital signs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from nca_trader.progress import human
from nca_trader.watch.dashboard.parts import (
    ago,
    cell,
    chart,
    number,
    numbers,
    percent,
    short,
    table,
    tile,
)
from nca_trader.watch.dashboard.session import Vitals

SEEDS = 8  # lines of a chart
STALLED = 20.0  # times the usual time between two rows, and at least a minute
CHARTS = {
    "reward": "Return per step, the reward",
    "approx_kl": "Approximate KL per update",
    "entropy": "Entropy",
    "clip_fraction": "Share of ratios clipped",
    "explained_variance": "Explained variance of the value",
    "grad_norm": "Gradient norm",
    "steps_per_s": "Steps per second",
    "skipped": "Updates skipped so far",
}


def training_view(
    rows: Sequence[dict[str, Any]], about: dict[str, Any], vitals: Vitals
) -> dict[str, Any]:
    """Return the view model of a run.

    Args:
      rows: of metrics.jsonl, one per update.
      about: the contents of run.json; {} where there is none yet.
      vitals: of its folder and its process.
    """
    last = rows[-1] if rows else {}
    updates = [number(row.get("update")) for row in rows]
    # Cumulative: a single skipped update would hardly show among thousands.
    skipped = _sums(rows, "skipped")
    charts = {}
    for name, label in CHARTS.items():
        lines = [(f"seed {i}", y, "last") for i, y in enumerate(_seeds(rows, name))]
        mean = skipped if name == "skipped" else [number(row.get(name)) for row in rows]
        if name == "skipped" or len(lines) < 2:
            lines = [(label, mean, "last")]
        else:
            lines.append(("mean", mean, "last"))
        # `pathwise` has no ratios to clip: a chart without a value is left out.
        if any(math.isfinite(v) for _, y, _ in lines for v in y):
            share = name in ("clip_fraction", "explained_variance")
            charts[name] = {"label": label, **chart(updates, lines, time=False, percent=share)}
    reward = number(last.get("reward"))
    return {
        "kind": "training",
        "path": vitals.path,
        "state": run_state(rows, vitals),
        "tiles": [
            tile(
                "update",
                "Update",
                short(number(last.get("update"))),
                f"{human(_or_zero(last.get('steps')))} environment steps",
            ),
            tile("speed", "Steps per second", human(_or_zero(last.get("steps_per_s"))), ""),
            tile("reward", "Reward", short(reward), "per step, of the last update"),
            tile(
                "kl",
                "Approximate KL",
                short(number(last.get("approx_kl"))),
                f"{percent(number(last.get('clip_fraction')))} of ratios clipped",
            ),
            tile(
                "value",
                "Explained variance",
                percent(number(last.get("explained_variance"))),
                "of the returns, by the value",
            ),
            tile(
                "skipped",
                "Updates skipped",
                f"{skipped[-1]:g}" if skipped else "0",
                "not finite, and dropped",
                "warn" if skipped and skipped[-1] else "good",
            ),
        ],
        "charts": charts,
        "tables": {"about": _about(about), "metrics": _metrics(last)},
    }


def run_state(rows: Sequence[dict[str, Any]], vitals: Vitals) -> dict[str, str]:
    """Return the state of a run in a word, its tone, and a sentence with the evidence."""
    age = max(vitals.now - vitals.written, 0.0)
    written = f"last row {ago(age)} ago" if math.isfinite(age) else "no row yet"
    word, tone, sentence = "Training", "good", f"{written}; {vitals.holder}"
    before, last = [{}, {}, *rows][-2:]
    # How long the last update took, by its own count of steps and its rate.
    steps = number(last.get("steps")) - _or_zero(before.get("steps"))
    seconds = steps / number(last.get("steps_per_s"))
    if vitals.fault:
        word, tone, sentence = "Damaged", "bad", vitals.fault
    elif rows and any(rows[-1].get(name, 0.0) is None for name in ("reward", "loss")):
        word, tone, sentence = "Not finite", "bad", f"the last update's loss or reward; {written}"
    elif not vitals.holder:
        word, tone, sentence = "Not training", "idle", f"no process trains there; {written}"
    elif rows and age > max(STALLED * (seconds if math.isfinite(seconds) else 0.0), 60.0):
        word, tone, sentence = "Stalled", "warn", f"{written}; {vitals.holder}"
    return {"word": word, "tone": tone, "sentence": sentence}


def _or_zero(value: Any) -> float:
    found = number(value)
    return found if math.isfinite(found) else 0.0


def _seeds(rows: Sequence[dict[str, Any]], name: str) -> list[list[float]]:
    """Return one line per seed; [] for a run of one."""
    found = [numbers(_dict(row.get("seeds")).get(name)) for row in rows]
    count = min(max(map(len, found), default=0), SEEDS)
    return [[row[i] if i < len(row) else math.nan for row in found] for i in range(count)]


def _sums(rows: Sequence[dict[str, Any]], name: str) -> list[float]:
    sums, total = [], 0.0
    for row in rows:
        each = numbers(_dict(row.get("seeds")).get(name)) or [_or_zero(row.get(name))]
        total += sum(x for x in each if math.isfinite(x))
        sums.append(total)
    return sums


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _about(about: dict[str, Any]) -> dict[str, Any]:
    data, spec = _dict(about.get("data")), _dict(about.get("spec"))
    symbols = [str(s) for s in data.get("symbols", []) or []]
    named = ", ".join(symbols[:6]) + (f" and {len(symbols) - 6} more" if len(symbols) > 6 else "")
    features = spec.get("features")
    facts = {
        "Symbols": named,
        "Bars": f"{str(data.get('first', ''))[:10]} to {str(data.get('last', ''))[:10]}"
        if data
        else "",
        "Features": ", ".join(map(str, features)) if isinstance(features, list) else "",
        "Actions": str(spec.get("actions", "")),
        "Begun": str(about.get("created", ""))[:19].replace("T", " "),
        "Command": str(about.get("command", "")),
    }
    return table(["The run", ""], [[k, v] for k, v in facts.items() if v], empty="No run.json yet.")


def _metrics(last: dict[str, Any]) -> dict[str, Any]:
    rows = [
        [name, cell("not finite", "bad") if value is None else short(number(value))]
        for name, value in sorted(last.items())
        if value is None or isinstance(value, int | float)
    ]
    return table(["Last row", ""], rows, empty="No row yet.")
