"""What `nca-trader prove --out` writes: fraction of the optimum against seconds, by market."""

from __future__ import annotations

import importlib.resources
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from nca_trader.errors import StateError
from nca_trader.evaluate.prove.trials import MOST_TURNOVER, Point, Proof
from nca_trader.evaluate.report.html import Html, join, section, table, tag
from nca_trader.evaluate.report.plots import AGENT, BASELINES, DASHES, MUTED, SETTINGS, svg

PRINTED = {AGENT: "#1f5fa8", MUTED: "#555555"} | dict(
    zip(BASELINES, ("#c25e00", "#2e7d32", "#7b3fa0", "#777777"), strict=True)
)


def write(path: str, proofs: Sequence[Proof], agent: str) -> None:
    """Writes the curves, or the page of them with the table.

    Raises:
      StateError: it cannot be written there.
    """
    out = pathlib.Path(path)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.suffix == ".html":
            out.write_text(page(proofs, agent), encoding="utf-8")
        else:
            with matplotlib.rc_context({"svg.hashsalt": "prove", "axes.grid": True}):
                draw(proofs, PRINTED).savefig(out, dpi=110)
    except OSError as error:
        raise StateError(
            f"{path}: cannot be written ({error.strerror or error}); choose another folder."
        ) from error


def draw(proofs: Sequence[Proof], colours: dict[str, str] | None = None) -> Figure:
    """A small plot a market: a line a seed, dashed lines for its controls."""
    markets = list(dict.fromkeys(proof.market for proof in proofs))
    across = min(3, len(markets))
    down = math.ceil(len(markets) / across)
    figure = Figure(figsize=(3.9 * across, 2.6 * down), layout="constrained")
    pick = (colours or {}).get
    for place, market in enumerate(markets):
        axes = figure.add_subplot(down, across, place + 1)
        axes.set_title(market, loc="left", fontsize=10)
        of_market = [proof for proof in proofs if proof.market == market]
        for number, curve in enumerate(of_market[0].controls.values()):
            colour = BASELINES[number]
            x, y = _line(curve)
            axes.plot(x, y, color=pick(colour, colour), linestyle=DASHES[number], linewidth=1.2)
        for proof in of_market:
            x, y = _line(proof.curve)
            axes.plot(x, y, color=pick(AGENT, AGENT), linewidth=1.6)
            nothing = np.isnan(proof.reached.fraction)
            level = MOST_TURNOVER if nothing else proof.bar
            axes.axhline(level, color=pick(MUTED, MUTED), linewidth=0.8)
            axes.set_ylabel("turnover a step" if nothing else "of the optimum")
            if not nothing:
                axes.set_ylim(-0.05, 1.05)
        axes.set_xlim(left=0.0)
        axes.set_xlabel("seconds of training")
    return figure


def _line(curve: Sequence[Point]) -> tuple[list[float], list[float]]:
    """Seconds, and the fraction reached by then; turnover where there is nothing to earn."""
    reached = [point.reached for point in curve]
    height = [r.turnover if np.isnan(r.fraction) else r.fraction for r in reached]
    return [point.seconds for point in curve], height


def page(proofs: Sequence[Proof], agent: str) -> str:
    """The document: curves, and a table of what was reached."""
    with matplotlib.rc_context(SETTINGS):
        figure = draw(proofs)
    controls = list(dict.fromkeys(name for proof in proofs for name in proof.controls))
    without = list(proofs[0].without)
    told = "Fraction of the optimum against seconds of training, one plot a market. " + "; ".join(
        f"{p.market}, seed {p.seed}: {_percent(p.reached.fraction)}" for p in proofs
    )
    notes = f"Solid: {agent}, a line a seed. Horizontal: the bar."
    if controls:
        notes += f" Dashed, one short run each: {', '.join(controls)}."
    headers = ["market", "seed", "fraction", "error", "bar", "verdict", "steps", "seconds"]
    rows = [
        [
            p.market, p.seed, _percent(p.reached.fraction), _percent(p.reached.error),
            _percent(p.bar), "ok" if p.passed else p.complaint, f"{p.curve[-1].steps:,}",
            f"{p.curve[-1].seconds:.1f}",
            *("" if x is None else _percent(x) for x in p.without.values()),
        ]
        for p in proofs
    ]  # fmt: skip
    body = tag(
        "main",
        tag("h1", f"{agent}: how much of a known optimum it reaches"),
        section("Curves", svg(figure, "prove", told), tag("p", notes)),
        section("Table", table("Reached on a fresh path", headers + without, rows)),
    )
    style = (
        importlib.resources.files("nca_trader.evaluate.report").joinpath("report.css").read_text()
    )
    head = [Html('<meta charset="utf-8">'), tag("title", "prove"), tag("style", Html(style))]
    document = tag("html", tag("head", join(head)), tag("body", body), lang="en")
    return f"<!DOCTYPE html>\n{document}\n"


def _percent(value: Any) -> str:
    return "" if np.isnan(value) else f"{value:z.1%}"
