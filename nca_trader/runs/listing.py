"""The runs of a project folder: listed, compared, and removed."""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any

import pandas as pd

from nca_trader.cloud import CloudPath, Place, place
from nca_trader.config.records import plain
from nca_trader.errors import ConfigError, NcaTraderError, RunError, StateError, system_errors
from nca_trader.machine import HeldError, run_file, take_lock
from nca_trader.runs.folder import LOCK
from nca_trader.runs.manifest import Run

COLUMNS = ("created", "symbols", "first", "last", "steps", "seeds", "selected", "sharpe", "fault")


def runs_in(folder: str | os.PathLike[str] | CloudPath) -> pd.DataFrame:
    """List the runs of a project folder, oldest first.

    Args:
      folder: the folder of the run folders, e.g. "runs".

    Returns:
      One row per run, by name: `created`; `symbols`, `first` and `last` bar that trained it;
      `steps` of training; `seeds`, how many agents; `selected` one and its `sharpe` on the
      selection span; `fault`, why the run cannot be read, "" where it can.

    Raises:
      ConfigError: there is no such folder.

    >>> import tempfile
    >>> runs_in(tempfile.mkdtemp()).empty
    True
    """
    root = place(folder, "folder")
    if not root.is_dir():
        raise ConfigError(f"{root}: there is no such folder; give the folder of the run folders.")
    rows = {}
    for path in sorted(root.iterdir(), key=lambda path: path.name):
        # A folder without it is none of ours, or a run that has not begun.
        if (path / "run.json").is_file():
            rows[path.name] = _row(path)
    table = pd.DataFrame.from_dict(rows, orient="index", columns=list(COLUMNS))
    table.index.name = "run"
    return table.sort_values("created", kind="stable")


def _row(path: Place) -> list[Any]:
    try:
        run = Run(path, allow_code=None)
        rows = run.metrics()
    except NcaTraderError as error:  # one damaged run must not hide the others
        return ["", "", "", "", 0, 0, None, None, str(error)]
    data, chosen = run.manifest.data, run.selection
    score = None
    if chosen is not None and chosen.sharpe is not None and chosen.selected is not None:
        score = chosen.sharpe[chosen.selected]
    return [
        getattr(run.manifest, "created", ""),
        ", ".join(data.symbols),
        data.first[:10],
        data.last[:10],
        rows[-1]["steps"] if rows else 0,
        run.agent_config.num_seeds,
        chosen and chosen.selected,
        score,
        "",
    ]


def compare_runs(paths: Sequence[str | os.PathLike[str] | CloudPath]) -> pd.DataFrame:
    """Compare runs: every setting in which they differ, their data, and what training reached.

    Nothing is evaluated, so no test span is used up.

    Args:
      paths: of at least two run folders.

    Returns:
      One row per setting or metric, one column per run. Settings are `env.KEY` and `agent.KEY`.

    Raises:
      ConfigError: fewer than two.
      RunError, StateError: see `Run`.
    """
    if len(paths) < 2:
        raise ConfigError("compare needs at least two runs; give their folders.")
    columns: dict[str, dict[str, Any]] = {}
    for path in paths:
        run = Run(path, allow_code=None)
        rows, data = run.metrics(), run.manifest.data
        last = rows[-1] if rows else {}
        settings: Any = {"env": plain(run.env_config), "agent": plain(run.agent_config)}
        columns[str(run.path)] = {
            **pd.json_normalize(settings).iloc[0],
            "seed": run.manifest.seed,
            "data": data.sha256[:12],
            "symbols": ", ".join(data.symbols),
            "first": data.first[:10],
            "last": data.last[:10],
            "commit": run.manifest.commit,
            **{f"last {k}": v for k, v in last.items() if isinstance(v, int | float)},
            "selection sharpe": run.selection and run.selection.sharpe,
        }
    table = pd.DataFrame(columns)
    # As texts: settings are lists and dicts too, which no set holds.
    differs = [len({str(value) for value in row}) > 1 for row in table.to_numpy()]
    return table[differs]


def remove_run(path: str | os.PathLike[str] | CloudPath) -> None:
    """Delete a run folder. Its entries in the trial log stay: what was tried was tried.

    Raises:
      RunError: it is not a run folder, or a process trains there.
      ConfigError: it is in an object store.
      StateError: it cannot be deleted.
    """
    folder = place(path)
    if isinstance(folder, CloudPath):
        raise ConfigError(f"{folder}: is in an object store; delete it with the store's own tools.")
    run_file(folder)
    # The tree behind a link may be somebody else's.
    if folder.is_symlink():
        raise RunError(f"{folder}: is a link; give the folder that it points to.")
    with system_errors(StateError, f"{folder}: cannot be deleted"):
        try:
            # Held until the folder is gone, so that no training begins in it meanwhile.
            descriptor = take_lock(pathlib.Path(folder) / LOCK)
        except HeldError as holder:
            raise RunError(f"{folder}: {holder} trains there; wait until it ends.") from None
        try:
            # Renamed first: a deletion that is interrupted leaves nothing that looks like a run.
            doomed = folder.with_name(f".{folder.name}.removed")
            folder.rename(doomed)
            shutil.rmtree(doomed)
        finally:
            os.close(descriptor)
