"""Whether your own code is still the code that a run was trained with.

The fingerprint of a name is a SHA-256 of its definition and of everything in its own files that the
definition uses. Comments, docstrings, layout and definitions that it does not use are left out.
Nothing is imported.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import os
import pathlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.machinery import PathFinder
from typing import Any

from nca_trader.config.extensions import origin_of
from nca_trader.errors import ConfigError, RunError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Code:
    """What a run records of a name of your own code.

    Attributes:
      kind: the group of its entry points, e.g. "features".
      sha256: the fingerprint; "" where there is no source, as of a prompt.
      package: that installed it, with its version; "" for your own module or file.
    """

    kind: str
    sha256: str
    package: str = ""


def codes_of(named: Mapping[str, str]) -> dict[str, Code] | None:
    """Return what a run records of the names that are not built in; None where all are.

    Args:
      named: the kind of each name that a config holds.

    Raises:
      ConfigError: a module is missing.
    """
    found = {}
    for text, kind in named.items():
        if (origin := origin_of(kind, text)) is not None:
            (module, member, _), package = origin
            sha256 = "" if module == "__main__" else fingerprint(module, member)
            found[text] = Code(kind=kind, sha256=sha256, package=package)
    return found or None


def refuse_changed(codes: Mapping[str, Code] | None, where: str, folder: str = "") -> None:
    """Refuse a run whose own code is missing or is no longer the same.

    Args:
      codes: that it recorded.
      where: the run, for messages.
      folder: of the run: code in it is never run, as it came with the run.

    Raises:
      RunError: in one line, which module is missing or was changed.
    """
    for text, code in (codes or {}).items():
        origin = origin_of(code.kind, text)
        if origin is None:
            raise RunError(
                f"{where}: {text} is of the package {code.package}, which is not installed; "
                "install it."
            )
        (module, member, _), _ = origin
        if module == "__main__":
            continue  # `load` finds it in the process that defined it, and else refuses it
        try:
            file = locate(module)
            now = fingerprint(module, member)
        except ConfigError as error:
            raise RunError(f"{where}: {text}: {error}") from None
        if folder and pathlib.Path(folder).resolve() in file.resolve().parents:
            raise RunError(
                f"{where}: {text} is code inside the run folder, which is never run; read it, and "
                "move it to a folder of your own."
            )
        if now != code.sha256:
            raise RunError(
                f"{where}: {text} was changed in {file} after the run was made, so it is other "
                "code than the agent was trained with; restore it, or train again."
            )


def locate(module: str) -> pathlib.Path:
    """Return the source file of a module, or of a path, without importing anything.

    Raises:
      ConfigError: there is none.
    """
    if module.endswith(".py"):
        if not os.path.isfile(module):
            raise ConfigError(f"{module}: no such file; check the path.")
        return pathlib.Path(module)
    folders: Any = [os.getcwd(), *sys.path]
    name = ""
    for part in module.split("."):
        name = f"{name}.{part}".lstrip(".")
        spec = PathFinder.find_spec(name, folders)
        if spec is None:
            raise ConfigError(
                f"no module named {name!r} here; install its package, or go to the folder that "
                "holds it."
            )
        folders = spec.submodule_search_locations or []
    if not spec.origin or not spec.origin.endswith(".py"):
        raise ConfigError(f"{module} has no source in Python; name a module that has.")
    return pathlib.Path(spec.origin)


def fingerprint(module: str, member: str) -> str:
    """Return the SHA-256 of a definition and of what it uses in its own files.

    Args:
      module: dotted, or the path of a .py file.
      member: a name at the top of it.

    Raises:
      ConfigError: there is no such module.
    """
    taken = dict(_used(locate(module), member, module, set()))
    text = "\n".join(repr(_plain(taken[place])) for place in sorted(taken))
    return hashlib.sha256(text.encode()).hexdigest()


def _used(
    file: pathlib.Path, member: str | None, module: str, seen: set[tuple[str, str | None]]
) -> Iterator[tuple[tuple[str, int], ast.stmt]]:
    """Yield the place and the syntax of each statement that `member` uses; None is the file."""
    if (str(file), member) in seen:
        return
    seen.add((str(file), member))
    body = _parsed(file)
    bound: dict[str, list[int]] = {}
    for number, node in enumerate(body):
        for name in _bound(node):
            bound.setdefault(name, []).append(number)
    # What binds no name may still change what others do, e.g. `table.update(...)`.
    loose = [number for number, node in enumerate(body) if _acts(node)]
    wanted, found = [member, *loose] if member else list(range(len(body))), set()
    while wanted:
        one = wanted.pop()
        for number in [one] if isinstance(one, int) else bound.get(str(one), []):
            if number not in found:
                found.add(number)
                names = (x.id for x in ast.walk(body[number]) if isinstance(x, ast.Name))
                wanted += [name for name in names if name in bound]
    for number in found:
        yield (str(file), number), body[number]
        for other, name in _imports(body[number], file, module):
            yield from _used(other[1], name, other[0], seen)


@functools.lru_cache(maxsize=64)
def _parse(text: str, name: str) -> list[ast.stmt]:
    try:
        return ast.parse(text).body
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{name}: {error}; repair it.") from None


def _parsed(file: pathlib.Path) -> list[ast.stmt]:
    try:
        return _parse(file.read_text(encoding="utf-8-sig"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read ({error}); check the file.") from None


def _bound(node: ast.AST) -> Iterable[str]:
    """Return the names that a statement outside of functions binds."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    names: set[str] = set()
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            names.update(_bound(child))
        else:
            found = (x for x in ast.walk(child) if isinstance(x, ast.Name))
            names.update(x.id for x in found if isinstance(x.ctx, ast.Store))
    return names


def _acts(node: ast.stmt) -> bool:
    """Return whether a statement does something without binding a name: not a docstring or main."""
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, ast.Constant)
    main = isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
    return not main and not _bound(node)


def _imports(
    node: ast.stmt, file: pathlib.Path, module: str
) -> Iterator[tuple[tuple[str, pathlib.Path], str | None]]:
    """Yield each module of the same folder or package that a statement imports, and the name."""
    if isinstance(node, ast.Import):
        targets = [(alias.name, None) for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:  # relative to the package that the file is in
            package = module.split(".")
            package = package if file.name == "__init__.py" else package[:-1]
            base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [base])])
        targets = [(base, alias.name) for alias in node.names]
    else:
        return
    for name, member in targets:
        # Of other packages the version is recorded, and their code is not read.
        for dotted, wanted in ((f"{name}.{member}", None), (name, member)):
            try:
                other = _neighbour(dotted, file, module)
            except ConfigError:
                continue
            yield (dotted, other), None if wanted == "*" else wanted
            break


def _neighbour(name: str, file: pathlib.Path, module: str) -> pathlib.Path:
    """Return the file of a module that belongs to the same package, or is in the same folder."""
    top = name.partition(".")[0]
    folder, package = file.parent, module.partition(".")[0]
    if not module.endswith(".py") and top == package:
        return locate(name)
    path = folder.joinpath(*name.split(".")).with_suffix(".py")
    if not path.is_file() or top in sys.stdlib_module_names:
        raise ConfigError(f"{name}: is of another package.")
    return path


def _plain(node: Any) -> Any:
    """Return syntax as nested tuples, without places, comments and docstrings.

    Empty fields are left out, as versions of Python differ in which there are.
    """
    if isinstance(node, list):
        return [_plain(x) for x in node]
    if not isinstance(node, ast.AST):
        return node
    fields = dict(ast.iter_fields(node))
    body = fields.get("body")
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and body:
        first = body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            fields["body"] = body[1:]
    kept = [(k, _plain(v)) for k, v in fields.items() if v not in (None, []) and k != "kind"]
    return type(node).__name__, kept
