"""Runs the notebooks: the sources are notebooks/*.py, and what they show is kept in .ipynb files.

python tools/notebooks.py                     # run all, and write what they show
python tools/notebooks.py quickstart          # one
python tools/notebooks.py --check --jobs 2    # run all, two at a time; write none
python tools/notebooks.py --check --due       # run those whose turn it is, see .ci/turn
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.util
import os
import pathlib
import re
import sys
import tempfile
import time
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDER = ROOT / "notebooks"
LIMIT = 600.0  # seconds of one cell: against a hang, not a bound on speed
# What a notebook imports beyond the package's own dependencies.
NEEDS = {"sb3_ppo": "stable_baselines3", "devices": "libtpu"}
TURNS = 4  # merges until each notebook has run


def source(path: pathlib.Path) -> Any:
    """Return a notebook without outputs from its source; equal sources give equal bytes."""
    made = jupytext.read(path)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    made.metadata = nbformat.from_dict({"kernelspec": kernel})
    for number, cell in enumerate(made.cells):
        cell.id = f"cell-{number}"
        cell.metadata = nbformat.from_dict({})
    return made


def run(path: pathlib.Path) -> Any:
    """Return a notebook with what its cells show, run in an empty folder."""
    made = source(path)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(made, timeout=LIMIT, resources={"metadata": {"path": folder}})
        client.extra_arguments = ["--log-level=ERROR"]
        client.execute()
        for cell in made.cells:
            if cell.cell_type == "code":
                cell.metadata = nbformat.from_dict({})
                cell.outputs = [o for o in map(clean, cell.outputs) if o]
    return made


def clean(output: Any) -> Any:
    """Return an output without logs, HTML and paths of this machine; None if nothing is left."""
    if output.output_type == "stream":
        output.text = re.sub(r"(/tmp|/private|/var|/home|/work)/\S*/", "", output.text)
        return output if output.name == "stdout" and output.text.strip() else None
    if "data" in output:
        kept = ("image/png", "text/plain")
        output.data = nbformat.from_dict({k: v for k, v in output.data.items() if k in kept})
        if "image/png" in output.data:
            output.data.pop("text/plain", None)
    output.metadata = nbformat.from_dict({})
    return output


def chosen(names: list[str], due: bool = False) -> list[pathlib.Path]:
    """Return the sources to run: those of the names, or all; `due`: whose turn it is."""
    paths = sorted(FOLDER.glob("*.py"))
    if unknown := set(names) - {path.stem for path in paths}:
        raise SystemExit(f"no notebook {', '.join(sorted(unknown))}; there are "
                         f"{', '.join(path.stem for path in paths)}.")  # fmt: skip
    paths = [path for path in paths if not names or path.stem in names]
    turn = int((ROOT / ".ci/turn").read_text())
    return paths[turn % TURNS :: TURNS] if due else paths


def main(words: list[str] | None = None) -> int:
    """Run the notebooks; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a notebook; all if none")
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="run N at a time")
    parser.add_argument("--due", action="store_true", help="run those whose turn it is")
    args = parser.parse_args(words)

    def timed(path: pathlib.Path) -> None:
        needed = NEEDS.get(path.stem)
        if needed and importlib.util.find_spec(needed) is None:
            print(f"{path.stem}: skipped, because {needed} is not installed", flush=True)
            return
        began = time.perf_counter()
        made = run(path)
        print(f"{path.stem}: {time.perf_counter() - began:.0f} s", flush=True)
        if not args.check:
            nbformat.write(made, path.with_suffix(".ipynb"))

    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}
    os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(timed, chosen(args.names, args.due)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
