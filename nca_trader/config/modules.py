"""Finds the files of your own code, and imports nothing for it.

Own code is identified by `digest_of_files`, a SHA-256 of the file of a name and of the user's own
files that it imports: of a run, of a session and of stored work alike. `read_sources` reads these
files for a worker on another machine, and `write_sources` makes them the first that `locate` finds
there.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import hashlib
import importlib
import importlib.util
import os
import pathlib
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from typing import NamedTuple

from nca_trader.errors import ConfigError

PACKAGE = pathlib.Path(__file__).resolve().parents[1]
# Files of this package that decide as in version 0.2.0, by SHA-256 now and then: journals, sweeps
# and walk-forwards that began with it go on. A file that is edited again counts as another one.
# Only cross-sectional momentum has changed since, where an asset is delisted.
NOW = (
    "616da801b416cbe08d44d936b94549865cee29bf82b00ca1652df0c10b1bfc87",  # blend.py
    "1f49e6173133ca1ece33316fce96b50e2593e943a063606d698148ea229c74f8",  # rolling.py
    "b1573ddd476151a9a2047aa259785dfbecc76f578ccdda9decde969a8e26d9db",  # rules.py
    "1d79ad8f99a8cc34331c54360087656fba34ae2ecc9f8ef7923500ddeaa5c886",  # strategy.py
)
THEN = (
    "1b2a8e45216a837143a11287dfe3a6c157f2db928736f0c2ca0c4ce2d831dbac",
    "6a1809a80c9a8b61f45ba06354fae807dca233758d5edcc83cc0585f0821d30a",
    "80f38a3838d7d419adf882f43ff4058b721018c764836ce23006d7071a6b513a",
    "3ab918b394ad1ec778a221c8b985b744f138b9f53c6e2cdfdcc56e69f5f43d45",
)
DECIDES_AS: dict[str, str] = dict(zip(NOW, THEN, strict=True))


class OwnFiles(NamedTuple):
    """Own code as files, for a process that does not have them.

    Attributes:
      folders: for each folder in which Python finds modules, the content of each file by its path
        there.
      scripts: for the path of a .py file, as a config names it, its folder and its name there.
    """

    folders: dict[str, dict[str, bytes]]
    scripts: dict[str, tuple[str, str]]


@dataclasses.dataclass
class _Received:
    """What `write_sources` was given last, and where the files lie in this process."""

    sources: OwnFiles
    folders: Sequence[str]
    scripts: Mapping[str, pathlib.Path]
    place: tempfile.TemporaryDirectory[str] | None


_received = _Received(OwnFiles({}, {}), (), {}, None)


def locate(module: str, within: Sequence[str] = ()) -> pathlib.Path:
    """Return the file of a module, or of a path, without importing anything.

    Args:
      module: dotted, or the path of a .py file.
      within: the folders to look into; none are the current one and those of Python.

    Raises:
      ConfigError: there is none.
    """
    if module.endswith(".py"):
        file = _received.scripts.get(module, pathlib.Path(module))
        if not file.is_file():
            raise ConfigError(f"{module}: no such file; check the path.")
        return file
    folders = list(within) or [*_received.folders, os.getcwd(), *sys.path]
    name = ""
    for part in module.split("."):
        name = f"{name}.{part}".lstrip(".")
        try:
            spec = PathFinder.find_spec(name, folders)
        except (KeyError, ImportError):  # below a package without a file of its own
            spec = None
        # Of a finder of its own, as editable installs have.
        if spec is None and name == part and not within:
            with contextlib.suppress(ValueError):
                spec = importlib.util.find_spec(name)
        # A module that was imported is found here, though its file may be gone.
        if spec is None or (spec.origin and not os.path.exists(spec.origin)):
            raise ConfigError(
                f"no module named {name!r} here; install its package, or go to the folder that "
                "holds it."
            )
        folders = spec.submodule_search_locations or []
    if not spec.origin or not (spec.origin.endswith(".py") or within):
        raise ConfigError(f"{module} has no source in Python; name a module that has.")
    return pathlib.Path(spec.origin)


def root_of(module: str, file: pathlib.Path) -> str:
    """Return the folder in which Python finds the first name of a module, or of a file."""
    if module.endswith(".py"):
        return str(file.resolve().parent)
    return str(file.resolve().parents[module.count(".") + (file.name == "__init__.py")])


def of_package(file: pathlib.Path) -> bool:
    """Whether a file is of an installed package."""
    return not {"site-packages", "dist-packages"}.isdisjoint(file.parts)


def of_python(file: pathlib.Path) -> bool:
    """Whether a file is of Python itself."""
    library = pathlib.Path(os.__file__).resolve().parent
    return not of_package(file) and file.is_relative_to(library)


def digest_of_files(module: str) -> str:
    """Return the SHA-256 of a module's file and of the user's own files that it imports.

    The files of this package are left out, even where they lie in the same folder.

    Args:
      module: dotted, or the path of a .py file.

    Raises:
      ConfigError: there is no such module, or a file is not Python.
    """
    # Without names and folders: a project may move.
    found = (hashlib.sha256(content).hexdigest() for _, content in files_of(module))
    return hashlib.sha256(" ".join(sorted(found)).encode()).hexdigest()


def digest_of_imported(module: str) -> str | None:
    """Return the digest of the code of a module that is imported.

    Args:
      module: its name in `sys.modules`.

    Returns:
      `digest_of_files` of own code. Of this package the digest of the module's file alone, and ""
      of an installed package and of Python, whose versions are recorded. None where there is no
      file, as of a prompt or a notebook.
    """
    there = getattr(sys.modules.get(module), "__file__", None)
    if there is None or not there.endswith(".py") or not os.path.isfile(there):
        return None
    file = pathlib.Path(there).resolve()
    if file.is_relative_to(PACKAGE):
        found = hashlib.sha256(file.read_bytes()).hexdigest()
        return DECIDES_AS.get(found, found)
    if of_package(file) or of_python(file):
        return ""
    # The name of a script, or of a file that was loaded by its path, is not found by `locate`.
    with contextlib.suppress(ConfigError):
        if locate(module).resolve() == file:
            return digest_of_files(module)
    return digest_of_files(str(file))


def read_sources(modules: Iterable[str]) -> OwnFiles:
    """Read the files of modules and the user's own files that they import.

    Raises:
      ConfigError: as `digest_of_files`.
    """
    found = OwnFiles({}, {})
    for module in modules:
        file = locate(module)
        folder = root_of(module, file)
        if module.endswith(".py"):
            found.scripts[module] = folder, file.name
        found.folders.setdefault(folder, {}).update(files_of(module))
    return found


def write_sources(sources: OwnFiles) -> bool:
    """Write the files of another process, and make them the first that are found by their names.

    Returns:
      Whether they are other files than before. Then modules of these names are no longer imported.
    """
    global _received
    before = _received
    if sources == before.sources:
        return False
    place = tempfile.TemporaryDirectory(prefix="nca-trader-")
    where = {folder: pathlib.Path(place.name, str(i)) for i, folder in enumerate(sources.folders)}
    for folder, files in sources.folders.items():
        for name, content in files.items():
            (where[folder] / name).parent.mkdir(parents=True, exist_ok=True)
            (where[folder] / name).write_bytes(content)
    # A worker may have imported other code of a name, of an earlier call or of its own disk.
    for files in (*before.sources.folders.values(), *sources.folders.values()):
        names = {pathlib.PurePath(name).parts[0].partition(".")[0] for name in files}
        for module in [name for name in sys.modules if name.partition(".")[0] in names]:
            del sys.modules[module]
    scripts = {module: where[folder] / name for module, (folder, name) in sources.scripts.items()}
    _received = _Received(sources, [str(folder) for folder in where.values()], scripts, place)
    if before.place is not None:
        before.place.cleanup()
    # Code may import a neighbour only when it runs.
    kept = [folder for folder in sys.path if folder not in before.folders]
    sys.path[:] = [*_received.folders, *kept]
    importlib.invalidate_caches()
    return True


def files_of(module: str) -> Iterator[tuple[str, bytes]]:
    """Yield the path below its folder and the content of each own file that a module needs."""
    seen: set[pathlib.Path] = set()
    todo = [(module, locate(module))]
    while todo:
        name, file = todo.pop()
        if file in seen:
            continue
        seen.add(file)
        try:
            content = file.read_bytes()
            # A compiled file imports nothing that could be read here.
            tree = ast.parse(content, str(file)) if file.suffix == ".py" else ast.Module([], [])
        except (OSError, SyntaxError, ValueError) as error:
            raise ConfigError(f"{file}: cannot be read ({error}); repair it.") from None
        package = [] if name.endswith(".py") else name.split(".")
        package = package if file.name.startswith("__init__.") else package[:-1]
        yield "/".join([*package, file.name]), content
        todo += _parents(name)
        for node in ast.walk(tree):
            todo += _imports(node, file, name)


def _parents(module: str) -> Iterator[tuple[str, pathlib.Path]]:
    """Yield the packages that importing a dotted module runs first."""
    parts = [] if module.endswith(".py") else module.split(".")
    for count in range(1, len(parts)):
        with contextlib.suppress(ConfigError):  # without a file of its own
            yield ".".join(parts[:count]), locate(".".join(parts[:count]))


def _imports(node: ast.AST, file: pathlib.Path, module: str) -> Iterator[tuple[str, pathlib.Path]]:
    """Yield each module of the same folder or package that a statement imports."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:  # relative to the package that the file is in
            package = module.split(".")
            package = package if file.name == "__init__.py" else package[:-1]
            base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [base])])
        names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
    else:
        return
    for name in names:
        with contextlib.suppress(ConfigError):  # of another package, or no module
            yield name, _neighbour(name, file, module)


def _neighbour(name: str, file: pathlib.Path, module: str) -> pathlib.Path:
    """Return the file of a module that belongs to the same package, or is in the same folder."""
    top = name.partition(".")[0]
    if top == PACKAGE.name:  # in a checkout it lies next to own code
        raise ConfigError(f"{name}: is of this package.")
    if not module.endswith(".py") and top == module.partition(".")[0]:
        return locate(name)
    if top in sys.stdlib_module_names:
        raise ConfigError(f"{name}: is of Python.")
    return locate(name, [root_of(module, file)])
