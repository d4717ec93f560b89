"""The page or picture of `prove`: fraction of the optimum against seconds of training."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nca_trader.evaluate.report import figures, plots
from nca_trader.evaluate.report.render import render, write
from nca_trader.evaluate.verdict import percent

if TYPE_CHECKING:
    from nca_trader.evaluate.prove import Proof

PROOF_HEADERS = ("market", "seed", "fraction", "error", "bar", "verdict", "steps", "seconds")


def write_proofs(path: str | os.PathLike[str], proofs: Sequence[Proof], agent: str) -> None:
    """Write the curves of `prove` to a picture, or to a page with their table.

    Args:
      path: ends in .html for the page, or in what matplotlib writes, e.g. .png or .svg.
      proofs: of `nca.prove`.
      agent: its name.

    Raises:
      StateError: it cannot be written there.
    """
    path = Path(path)
    if path.suffix != ".html":
        write(path, figures.proofs_picture(proofs, path.suffix.removeprefix(".")))
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
            lambda figure: figures.draw_proofs(figure, proofs, {}), None, "prove", f"{title} {ends}"
        ),
        controls=list(dict.fromkeys(name for proof in proofs for name in proof.controls)),
        headers=[*PROOF_HEADERS, *proofs[0].without],
        rows=rows,
    )
    write(path, text.encode())
