"""The presets that ship with the package, and a project folder to start from."""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path
from typing import NamedTuple

from nca_trader.config.ranges import nearest
from nca_trader.config.toml import preset_folder, preset_names
from nca_trader.errors import ConfigError

KINDS = {"envs": "environment", "agents": "agent"}

# What `start_project` writes next to two presets. The strategy is text: it imports the package.
START = Path(__file__).with_name("start")
FILES = {
    "strategy.py": "strategy.py.txt",
    "README.md": "README.md",
    "data/README.md": "data/README.md",
}


class Preset(NamedTuple):
    """A preset. kind: "environment" or "agent". about: the first sentence of its file."""

    name: str
    kind: str
    about: str
    path: Path


def presets() -> list[Preset]:
    """Return the presets that ship with the package: environments, then agents, by name.

    Example:
      >>> [preset.name for preset in presets() if preset.kind == "agent"][:3]
      ['base', 'gru', 'large']
    """
    found = []
    for folder, kind in KINDS.items():
        for name in preset_names(folder):
            path = preset_folder(folder) / f"{name}.toml"
            lines = path.read_text(encoding="utf-8").splitlines()
            comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
            about = " ".join(line.removeprefix("#").strip() for line in comment)
            found.append(Preset(name, kind, about.partition(". ")[0].removesuffix("."), path))
    return found


def preset(name: str) -> Preset:
    """Return a preset by its name.

    Raises:
      ConfigError: there is no such preset.
    """
    known = {found.name: found for found in presets()}
    if name not in known:
        raise ConfigError(
            f"{name!r} is not a preset; {nearest(name, known)}`nca-trader presets list` shows all."
        )
    return known[name]


def copy_preset(name: str, target: str | os.PathLike[str]) -> Path:
    """Copy a preset's file to `target`: a new file, or a folder that exists.

    Returns:
      The path of the new file.

    Raises:
      ConfigError: there is no such preset, `target` exists, or it cannot be written.
    """
    path = Path(target)
    source = preset(name).path
    path = path / source.name if path.is_dir() else path
    _write({path: source.read_text(encoding="utf-8")})
    return path


def start_project(folder: str | os.PathLike[str]) -> list[Path]:
    """Write a project to start from: env.toml, agent.toml, strategy.py, README.md, data/README.md.

    Args:
      folder: made if it does not exist. Its other files are left alone.

    Returns:
      The files written.

    Raises:
      ConfigError: one of the files exists, in which case nothing is written, or cannot be written.

    Example:
      >>> import tempfile
      >>> sorted(path.name for path in start_project(tempfile.mkdtemp()))
      ['README.md', 'README.md', 'agent.toml', 'env.toml', 'strategy.py']
    """
    root = Path(folder)
    texts = {
        root / "env.toml": preset("index_daily").path.read_text(encoding="utf-8"),
        root / "agent.toml": preset("nano").path.read_text(encoding="utf-8"),
    }
    texts |= {root / to: (START / name).read_text(encoding="utf-8") for to, name in FILES.items()}
    _write(texts)
    return [*texts]


def _write(texts: dict[Path, str]) -> None:
    """Write new files; where one exists, or one fails, none is left."""
    there = [str(path) for path in texts if os.path.lexists(path)]
    if there:
        raise ConfigError(f"{', '.join(there)}: exists; choose another place, or remove it.")
    written: list[Path] = []
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as file:
                written.append(path)
                file.write(text)
    except OSError as error:
        for path in written:
            with contextlib.suppress(OSError):
                path.unlink()
        what = error.strerror or str(error)
        raise ConfigError(f"{path}: cannot be written ({what}); choose another place.") from None
