"""The page or picture of `prove`: fraction of the optimum against seconds of training."""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from nca_trader.evaluate.report import plots
from nca_trader.evaluate.report.figures import AGENT, BASELINES, DASHES, MUTED, PRINTED
from nca_trader.evaluate.report.render import render, write
from nca_trader.evaluate.wording import percent
from nca_trader.machine import make_directory
from nca_trader.optimum.board import about
from nca_trader.optimum.proof import Proof
from nca_trader.runs.folder import Lines

PROOF_HEADERS = ("market", "seed", "fraction", "error", "bar", "verdict", "steps", "seconds")


def write_proofs(path: str | os.PathLike[str], proofs: Sequence[Proof], agent: str) -> None:
    """Write the curves of `prove` to a picture or a page, or add its rows to a file.

    Args:
      path: ends in .html for a page with a table, in .jsonl for a row of JSON each, which are added
        to the file, or in what matplotlib writes, e.g. .png or .svg.
      proofs: of `nca.prove`.
      agent: its name.

    Raises:
      StateError: it cannot be written there.
    """
    path = Path(path)
    if path.suffix == ".jsonl":
        make_directory(path.parent)
        for proof in proofs:
            Lines(path).append(json.dumps({"name": agent} | proof.row() | about()))
        return
    if path.suffix != ".html":
        write(path, proofs_picture(proofs, path.suffix.removeprefix(".")))
        return

    def share(value: float | None) -> str:
        return "" if value is None or np.isnan(value) else percent(value)

    rows = []
    for p in proofs:
        cells = [p.seed, share(p.reached.fraction), share(p.reached.error), share(p.bar)]
        cells += [p.complaint or "ok", f"{p.curve[-1].steps:,}", f"{p.curve[-1].seconds:.1f}"]
        rows.append((p.market, [*cells, *map(share, p.without.values())]))
    ends = "; ".join(f"{p.market}, seed {p.seed}: {share(p.reached.fraction)}" for p in proofs)
    title = "Fraction of the optimum against seconds of training, one plot per market."
    text = render(
        "proofs.html",
        agent=agent,
        curves=plots.svg(
            lambda figure: draw_proofs(figure, proofs, {}), None, "prove", f"{title} {ends}"
        ),
        controls=list(dict.fromkeys(name for proof in proofs for name in proof.controls)),
        headers=[*PROOF_HEADERS, *proofs[0].without],
        rows=rows,
    )
    write(path, text)


def draw_proofs(figure: Figure, proofs: Sequence[Proof], colours: Mapping[str, str]) -> None:
    """Draw a small plot per market: a line per seed, and dashed lines for its controls."""
    markets = list(dict.fromkeys(proof.market for proof in proofs))
    across = min(3, len(markets))
    down = math.ceil(len(markets) / across)
    figure.set_size_inches(3.9 * across, 2.6 * down)
    for place, market in enumerate(markets):
        axes = figure.add_subplot(down, across, place + 1)
        axes.set_title(market, loc="left", fontsize=10)
        runs = [proof for proof in proofs if proof.market == market]
        # All proofs of a market share its controls.
        lines = [
            (curve, BASELINES[number], DASHES[number], 1.2)
            for number, curve in enumerate(runs[0].controls.values())
        ]
        lines += [(proof.curve, AGENT, "-", 1.6) for proof in runs]
        for curve, colour, dash, width in lines:
            x, y = [point.seconds for point in curve], [point.height for point in curve]
            axes.plot(x, y, color=colours.get(colour, colour), linestyle=dash, linewidth=width)
        axes.axhline(runs[0].goal, color=colours.get(MUTED, MUTED), linewidth=0.8)
        axes.set_ylabel("of the optimum" if runs[0].earns else "turnover per step")
        if runs[0].earns:
            axes.set_ylim(-0.05, 1.05)
        axes.set_xlim(left=0.0)
        axes.set_xlabel("seconds of training")


def proofs_picture(proofs: Sequence[Proof], kind: str) -> bytes:
    """Draw the curves of `prove` as a picture of this kind, e.g. "png" or "svg"."""
    out = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "prove", "axes.grid": True}):
        figure = Figure(layout="constrained")
        draw_proofs(figure, proofs, PRINTED)
        figure.savefig(out, format=kind, dpi=110)
    return out.getvalue()
