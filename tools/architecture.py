"""Draws docs/architecture.svg: the packages of nca_trader and who imports whom, from the sources.

    python tools/architecture.py            # writes the picture
    python tools/architecture.py --check    # exits 1 where it is out of date

A package stands above all that it imports. An arrow is left out where a longer way says the same.
Modules at the top level are one box, "foundation".
"""

from __future__ import annotations

import argparse
import ast
import html
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "architecture.svg"
PACKAGE = "nca_trader"
BOX, TALL, GAP = (176, 44), 84, 24
COLUMNS = (130, 340, 550)  # of the packages of a row
ABOUT = {
    "cli": "one file per command",
    "watch": "alerts, metrics, dashboard",
    "scale": "plan, profiler, doctor",
    "paper": "feed, broker, journal",
    "optimum": "exact optima, prove",
    "evaluate": "backtest, statistics, report",
    "learner": "update, algorithms, train",
    "runs": "manifest, checkpoints, trackers",
    "parallel": "mesh, hosts, jobs",
    "agents": "NCA and other policies",
    "strategies": "rules, blends, targets",
    "envs": "account, environment",
    "markets": "generated markets",
    "data": "reading, calendar, features",
    "config": "schemas, TOML",
    "foundation": "errors, types, numerics",
}


def imported(path: Path) -> Iterator[str]:
    """Return the modules of the package that a file imports, at whatever depth."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(PACKAGE):
            if node.module == PACKAGE:
                yield from (alias.name for alias in node.names)
            else:
                yield node.module.split(".")[1]
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            yield from (name[1] for name in names if name[0] == PACKAGE and len(name) > 1)


def edges() -> dict[str, set[str]]:
    """Return what each package imports, other than itself."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT / PACKAGE).parts
        if len(parts) == 1 and parts[0].startswith("__"):
            continue
        here = parts[0] if parts[0] in ABOUT else "foundation"
        there = {name if name in ABOUT else "foundation" for name in imported(path)}
        found.setdefault(here, set()).update(there - {here})
    # Costs are part of the schemas, which the foundation's `types` therefore imports.
    found["foundation"] = set()
    return found


def depth(name: str, found: dict[str, set[str]]) -> int:
    """Package below this one, on the longest way down."""
    return max((depth(other, found) + 1 for other in found[name]), default=0)


def below(name: str, found: dict[str, set[str]]) -> set[str]:
    """All that a package imports, also through others."""
    return found[name].union(*(below(other, found) for other in found[name]))


def picture() -> str:
    """Return the SVG."""
    found = edges()
    rows: dict[int, list[str]] = {}
    for name in sorted(found):
        rows.setdefault(depth(name, found), []).append(name)
    top, place = max(rows), {}
    for level, names in rows.items():
        for x, name in zip(COLUMNS, names, strict=False):
            place[name] = (x, GAP + (top - level) * TALL)
    lines = []
    for name, others in found.items():
        direct = others - set().union(*(below(other, found) for other in others))
        for other in sorted(direct):
            (x, y), (u, v) = place[name], place[other]
            x += (u > x) * BOX[0] / 3  # past the boxes that stand below this one
            lines.append(f'<line x1="{x:.0f}" y1="{y + BOX[1]}" x2="{u:.0f}" y2="{v - 3}"/>')
    boxes = []
    for name, (x, y) in place.items():
        left = x - BOX[0] / 2
        boxes.append(
            f'<rect x="{left:.0f}" y="{y}" width="{BOX[0]}" height="{BOX[1]}" rx="6"/>'
            f'<text x="{x:.0f}" y="{y + 18}" class="name">{name}</text>'
            f'<text x="{x:.0f}" y="{y + 35}">{html.escape(ABOUT[name])}</text>'
        )
    wide, tall = COLUMNS[0] + COLUMNS[-1], GAP * 2 + top * TALL + BOX[1]
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {tall}" role="img"
  aria-label="Packages of nca_trader; an arrow points from a package to one that it imports">
<defs><marker id="to" markerWidth="8" markerHeight="8" refX="6" refY="3" orient="auto">
<path d="M0,0 L6,3 L0,6 z" fill="#667"/></marker></defs>
<rect width="{wide}" height="{tall}" fill="#fff"/>
<g stroke="#667" marker-end="url(#to)">
{chr(10).join(lines)}
</g>
<g fill="#eef3fa" stroke="#446" font-family="sans-serif" font-size="11" text-anchor="middle">
<style>text {{ fill: #223; stroke: none }} .name {{ font-weight: bold; font-size: 14px }}</style>
{chr(10).join(boxes)}
</g>
</svg>
"""


def main(argv: list[str] | None = None) -> int:
    """Write the picture, or check it; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare")
    if not parser.parse_args(argv).check:
        PICTURE.write_text(picture())
    elif not PICTURE.exists() or PICTURE.read_text() != picture():
        print(f"{PICTURE.name} is out of date; run `make docs`.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
