"""Your own code by name: the one place that imports what a config, an option or a run names.

A name is "module:member", "file.py:member" or an entry point of an installed package, in the group
"nca_trader.features", "nca_trader.rewards" and so on. Parentheses call what it names:
"mine:momentum(period=20)", with values as TOML writes them. A module is found where Python finds
it, and in the current folder.

A config holds the name and never the object, so another process can load a run.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import pathlib
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.machinery import PathFinder, SourceFileLoader
from typing import Any, NamedTuple, TypeVar

from nca_trader.config.modules import (
    PACKAGE,
    OwnFiles,
    files_of,
    locate,
    of_package,
    of_python,
    read_sources,
    root_of,
    write_sources,
)
from nca_trader.config.ranges import describe, nearest
from nca_trader.config.records import read_toml
from nca_trader.errors import ConfigError, user_line

T = TypeVar("T")
OWN = re.compile(
    r"(?P<module>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*|[^\n]+\.py):(?P<member>[A-Za-z_]\w*)"
    r"(?:\((?P<values>.*)\))?",
    re.DOTALL,
)
SHARE = r"[-+]?(?:[0-9]{1,9}/[1-9][0-9]{0,8}|(?:[0-9]{1,9}\.?[0-9]{0,20}|\.[0-9]{1,20}))"
TERM = re.compile(rf"\s*({SHARE})\s*\*\s*(.+?)\s*", re.DOTALL)
FRAME = re.compile(r"(\d+[A-Za-z]+):(.+)", re.DOTALL)
COMPARISONS = ("rank", "zscore")  # of a feature's values among assets
# Features that are not of your own code: a market's own state, and columns of your own.
RESERVED = ("state:", "column:")
# Objects that were given in Python, by the name that a config has of them. A script's own objects
# are found here, and the script isn't run again.
_given: dict[str, Any] = {}
# Modules that a signature alone admits.
_restricted: set[str] = set()
# What forgets the results of names, for an object that takes the name of another: a cell of a
# notebook that runs again. Without it the old code would go on, and nobody would see.
FORGET: list[Callable[[], None]] = []


class Name(NamedTuple):
    """The parts of a name of your own code.

    Attributes:
      module: dotted, or the path of a .py file.
      member: of the module.
      values: the text in parentheses; None without parentheses.
    """

    module: str
    member: str
    values: str | None = None


def parse_name(text: str) -> Name | None:
    """Return the parts of a name of your own code; None where `text` is not one.

    Example:
      >>> parse_name("mine:momentum(period=20)")
      Name(module='mine', member='momentum', values='period=20')
      >>> parse_name("rsi") is None
      True
    """
    found = OWN.fullmatch(text)
    if found is None or text.startswith(RESERVED):
        return None
    return Name(found["module"], found["member"], found["values"])


def split_frame(text: str) -> tuple[str, str]:
    """Return the time frame of a feature's name, "" without one, and the name of the feature alone.

    Example:
      >>> split_frame("1h:mine:momentum"), split_frame("rank:rsi")
      (('1h', 'mine:momentum'), ('', 'rsi'))
    """
    text = split_comparison(text)[1]
    found = FRAME.fullmatch(text)
    return ("", text) if found is None else (found[1], found[2])


def terms_of(text: str) -> list[tuple[str, str]]:
    """Return the share and the name of each rule of a sum of rules; of a rule alone ("", its name).

    Example:
      >>> terms_of("1/2 * equal_weight + 0.5 * momentum(lookback=50)")
      [('1/2', 'equal_weight'), ('0.5', 'momentum(lookback=50)')]
      >>> terms_of("momentum")
      [('', 'momentum')]
    """
    found = [TERM.fullmatch(part) for part in re.split(rf"\s*\+\s*(?={SHARE}\s*\*)", text)]
    terms = [(term[1], term[2]) for term in found if term]
    return terms if len(terms) == len(found) else [("", text)]


def split_comparison(text: str) -> tuple[str, str]:
    """Return how a feature's name compares assets, "" where it does not, and the rest.

    Example:
      >>> split_comparison("rank:1h:rsi"), split_comparison("rsi")
      (('rank', '1h:rsi'), ('', 'rsi'))
    """
    how, _, rest = text.partition(":")
    return (how, rest) if how in COMPARISONS and rest else ("", text)


@functools.cache
def installed_points(kind: str) -> dict[str, importlib.metadata.EntryPoint]:
    """Return the entry points of installed packages in the group "nca_trader.KIND", by name."""
    return {point.name: point for point in _points() if point.group == f"nca_trader.{kind}"}


def _points() -> list[importlib.metadata.EntryPoint]:
    """Return our entry points of installed packages; what lies in the current folder is not one."""
    points = importlib.metadata.entry_points()
    groups = [group for group in points.groups if group.startswith("nca_trader.")]
    here = os.getcwd()
    ours = (point for group in groups for point in points.select(group=group))
    return [
        x for x in ours if x.dist is None or os.path.realpath(str(x.dist.locate_file(""))) != here
    ]


def origin_of(kind: str, text: str) -> tuple[Name, str] | None:
    """Return what a name stands for, and the package that installed it ("" for your own code).

    Returns:
      None for a name that is neither your own code's nor an entry point's, e.g. a built-in one.
    """
    if (own := parse_name(text)) is not None:
        return own, ""
    bare, bracket, values = text.partition("(")
    point = installed_points(kind).get(bare)
    if point is None or (bracket and not values.endswith(")")):
        return None
    dist = point.dist
    package = "" if dist is None else f"{dist.name} {dist.version}"
    return Name(point.module, point.attr, values[:-1] if bracket else None), package


def is_source(text: str) -> bool:
    """Return whether `--data` names your own data source, and no file or URL."""
    return "//" not in text and not os.path.exists(text) and bool(origin_of("sources", text))


def check_known(config: Any, name: str, kind: str, builtin: Iterable[str]) -> Iterator[str]:
    """Check that each name of a field is built in, an entry point, or of your own code.

    Nothing is imported: whether your module exists is seen when it is used.
    """
    builtin, value = tuple(builtin), getattr(config, name)
    for text in value if isinstance(value, tuple | list) else (value,):
        if text in builtin or (isinstance(text, str) and origin_of(kind, text)):
            continue
        names = [*builtin, *installed_points(kind)]
        words = ", ".join(f"'{word}'" for word in names)
        words += ", or " if words else ""
        yield (
            f"{name}={text!r} is not known; {nearest(str(text), names)}It may be {words}"
            "'module:name' of your own."
        )


def load(kind: str, text: str) -> Any:
    """Import and return what a name of your own code, or an entry point, stands for.

    Raises:
      ConfigError: in one line, which module is missing, or where importing it fails.
    """
    if text in _given:
        return _given[text]
    found = origin_of(kind, text)
    if found is None:
        raise ConfigError(f"{text}: is not a name; give module:name or file.py:name.")
    (module, member, values), _ = found
    # An object that was given under its name may be called with values as well.
    bare = text if values is None else text.partition("(")[0]
    if bare in _given:
        value = _given[bare]
    else:
        if module == "__main__":
            raise ConfigError(
                f"{text}: was defined at a prompt or in a notebook, which another process cannot "
                "import; put it into a file."
            )
        home = module_of(module)
        if not hasattr(home, member):
            public = [name for name in vars(home) if not name.startswith("_")]
            hint = nearest(member, public)
            raise ConfigError(f"{text}: {module} has no {member!r}; {hint}check the name.")
        value = getattr(home, member)
        # `mine:system`, where mine.py has `from os import system`, is as little the user's own.
        if inspect.isroutine(value) or isinstance(value, type):
            _refuse_reexport(getattr(value, "__module__", None) or "", text)
    if values is not None and kind == "policies" and isinstance(value, type):
        # Of a policy the class is wanted: it is built for each environment, with these values.
        return functools.partial(value, **values_of(text, values))
    return value if values is None else call_named(value, text, values)


def call_named(value: Any, text: str, values: str = "", **more: Any) -> Any:
    """Call what a name stands for with the values in its parentheses, and with `more`.

    Raises:
      ConfigError: it cannot be called, or the call fails; see also `values_of`.
    """
    given = values_of(text, values)
    if not callable(value):
        raise ConfigError(f"{text}: {describe(value)} cannot be called; leave the values out.")
    with own_code(text):
        return value(**given, **more)


def values_of(text: str, values: str) -> dict[str, Any]:
    """Read the values in the parentheses of a name.

    Raises:
      ConfigError: they cannot be read, or are other than numbers, texts, truth values or lists of
        these.
    """
    try:
        given = read_toml(f"values = {{{values}}}", text)["values"]
    except ConfigError:
        raise ConfigError(f"{text}: write values as in {text.partition('(')[0]}(a=1).") from None
    for name, one in given.items():
        # As fields of a config: tables and dates are none.
        if not all(isinstance(x, bool | int | float | str) for x in _flat(one)):
            raise ConfigError(
                f"{text}: {name} is not a number, text, truth value or list; give one."
            )
    return given


def _flat(value: Any) -> list[Any]:
    return [x for one in value for x in _flat(one)] if isinstance(value, list) else [value]


@contextlib.contextmanager
def own_code(where: str) -> Iterator[None]:
    """Turn an error of the user's code inside the block into a `ConfigError` of one line.

    Args:
      where: what the code is called in the message.
    """
    try:
        yield
    except ConfigError as error:
        vars(error).pop("__notes__", None)  # jax's, of the frames that it has left out
        raise  # it says itself what is wrong
    except Exception as error:
        at = user_line(error)
        what = f"{type(error).__name__}{f' at {at}' if at else ''}"
        text = " ".join(str(error).split()) or "no message"
        # By name: this module is read without jax.
        if type(error).__name__.startswith("Tracer") or "truth value of an array" in text:
            raise ConfigError(
                f"{where}: {what}: reads a value that is known only when it runs; write "
                "jnp.where(condition, this, that) in place of `if`, and jnp in place of numpy."
            ) from None
        # Without a line of the user's the call itself failed; what its name calls, it calls itself.
        ours = not at and isinstance(error, TypeError) and "argument" in text and where[-1] != ")"
        remedy = f"let it take them{uncalled(own_code)}" if ours else "correct that"
        raise ConfigError(f"{where}: {what}: {text}; {remedy}.") from None


def uncalled(value: Any) -> str:
    """Return the remedy for a function or class that is named in place of what it returns."""
    return "; if it returns one, name its call, as in mine:make()" if callable(value) else ""


def module_of(module: str) -> types.ModuleType:
    """Import a module by its dotted name, or the file of a path; the code of it runs.

    A file finds its neighbours as `python FILE` would let it, and a module those of the current
    folder, as with `python -m`.

    Raises:
      ConfigError: there is none, or importing it fails.
    """
    file = _own_file(module)
    if not module.endswith(".py"):
        found = _imported(module, root_of(module, file), lambda: importlib.import_module(module))
        there = getattr(found, "__file__", None) or ""
        if os.path.isfile(there) and file.samefile(there):
            return found
        raise ConfigError(
            f"{module}: is {there or 'another module'}, and not {file}; rename the file, or write "
            f"{file}:name."
        )
    # A name of its own, so that the file cannot take the place of an installed module.
    loader = _FromSource(f"strategy_{file.stem}", str(file))
    spec = importlib.util.spec_from_file_location(loader.name, file, loader=loader)
    assert spec is not None
    found = importlib.util.module_from_spec(spec)

    def run() -> types.ModuleType:
        sys.modules[found.__name__] = found  # dataclasses look up their own module there
        loader.exec_module(found)
        return found

    return _imported(module, root_of(module, file), run)


def refuse_foreign(text: str, kind: str) -> None:
    """Refuse a name of code that is not the user's own; nothing is imported.

    Raises:
      ConfigError: its module is of Python itself, of this package, of an installed package without
        an entry point of "nca_trader.KIND", or in a run folder; or there is none.
    """
    origin = origin_of(kind, text)
    # `load` says itself that another process's prompt cannot be read.
    given = text in _given or text.partition("(")[0] in _given
    if not given and origin is not None and origin[0].module != "__main__":
        _own_file(origin[0].module)


def _refuse_python(module: str, text: str) -> None:
    top = module.partition(".")[0]
    if top not in sys.stdlib_module_names:
        return
    here, remedy = pathlib.Path(f"{top}.py"), "; name one of your own."
    if here.is_file():  # it would take the module's place for all of Python
        remedy = f", and not {here} in this folder; rename the file, or write {here}:name."
    what = "is" if text == module else f"is of {module},"
    raise ConfigError(f"{text}: {what} a module of Python itself{remedy}")


def _refuse_reexport(module: str, text: str) -> None:
    """Refuse a member that its module has only imported from Python or an installed package."""
    _refuse_python(module, text)
    file = getattr(sys.modules.get(module), "__file__", None)
    foreign = file is not None and of_package(pathlib.Path(file).resolve())
    if foreign and module.partition(".")[0] not in {"nca_trader", *_extending()}:
        raise ConfigError(f"{text}: is of {module}, an installed package; name code of your own.")


def _own_file(module: str) -> pathlib.Path:
    """Return the file of a module that may be the user's own.

    Raises:
      ConfigError: see `refuse_foreign`.
    """
    top = module.partition(".")[0]
    if not module.endswith(".py"):
        _refuse_python(module, module)
    file = locate(module)
    full = file.resolve()
    if of_python(full):
        raise ConfigError(f"{module}: is a module of Python itself; name one of your own.")
    if full.is_relative_to(PACKAGE):
        raise ConfigError(f"{module}: is of nca_trader; give the built-in name, or your own code.")
    if of_package(full) and top not in _extending():
        raise ConfigError(
            f"{module}: is of an installed package without an entry point for nca_trader; name a "
            "module of your own that imports what you need."
        )
    # A link in a run folder is inside it, wherever it leads.
    for folder in (*full.parents, *pathlib.Path(os.path.abspath(file)).parents):
        if (folder / "run.json").is_file() and (folder / "env.toml").is_file():
            raise ConfigError(
                f"{module}: is code inside the run folder {folder}, which is never run; read it, "
                "and move it to a folder of your own."
            )
    return file


@functools.cache
def _extending() -> set[str]:
    """Return the first names of the modules of entry points in the groups "nca_trader.KIND"."""
    return {point.module.partition(".")[0] for point in _points()}


class _FromSource(SourceFileLoader):
    """Loads a file of the user's own from its source: bytecode next to it may be of other code."""

    def get_code(self, fullname: str) -> types.CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


class _OwnFinder:
    """Finds own files in a folder, and loads them by `_FromSource`.

    A name of Python's own is never found there. While a module loads its folder comes first; later
    imports, inside of functions, find there what import statements name, after every other module.

    Args:
      module: the name by which it was asked for.
      folder: of the module.
      files: that it and what it imports name.
      closed: whether no other file of the folder may be imported, now or later.
    """

    def __init__(self, module: str, folder: str, files: set[pathlib.Path], closed: bool):
        self.module, self.loading = module, True
        self._folder, self._files, self._closed = folder, files, closed

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of an own file; None leaves the module to other finders."""
        spec = PathFinder.find_spec(name, [self._folder] if path is None else path, target)
        if spec is None or (path is None and name in sys.stdlib_module_names):
            return None
        # A folder of this name, which may pose as a package, comes after every module too.
        if path is None and not (self.loading and spec.origin):
            others = (x for x in sys.meta_path if not isinstance(x, _OwnFinder))
            if any(x.find_spec(name, None) for x in others):
                return None
        if not spec.origin:
            return spec if path is None else None
        file = pathlib.Path(spec.origin).resolve()
        if of_python(file) or of_package(file):
            return None
        if (self._closed or not self.loading) and file not in self._files:
            if self._closed and path is not None and file.is_relative_to(self._folder):
                raise ModuleNotFoundError(f"{file} was not signed", name=name)
            return None
        if isinstance(spec.loader, SourceFileLoader):
            spec.loader = _FromSource(name, spec.origin)
        return spec


def restrict_imports(names: Mapping[str, str]) -> None:
    """Let own code that a signature alone admits import no file but the signed ones.

    Args:
      names: the kind of each name. Those of installed packages are left out: the files of a package
        were installed, and not signed.
    """
    found = (origin_of(kind, text) for text, kind in names.items())
    _restricted.update(own[0].module for own in found if own is not None and not own[1])


def _imported(name: str, folder: str, run: Callable[[], types.ModuleType]) -> types.ModuleType:
    # The own folder comes first, as for the file that Python itself runs. No other folder: what the
    # module imports must not come from where a command happens to be given.
    path, folder, closed = [*sys.path], os.path.realpath(folder), name in _restricted
    if closed:
        sys.path[:] = [x for x in path if os.path.realpath(x) not in (os.getcwd(), folder)]
    files: set[pathlib.Path] = set()
    with contextlib.suppress(ConfigError):  # of a file that is not Python, as importing it says
        files = {pathlib.Path(folder, file).resolve() for file, _ in files_of(name)}
    finder: Any = _OwnFinder(name, folder, files, closed)
    sys.meta_path[:] = [finder, *(x for x in sys.meta_path if getattr(x, "module", "") != name)]
    try:
        return run()
    except ModuleNotFoundError as error:
        # A module that the file itself imports is missing: that is a fault inside of it.
        if error.name is None or (name != error.name and not name.startswith(f"{error.name}.")):
            raise _failed(name, error) from None
        raise ConfigError(
            f"{name}: no module named {error.name!r} here; install its package, or go to the "
            "folder that holds it."
        ) from None
    except SyntaxError as error:
        # Nothing of the file ran, so the traceback has no line of it; the error has.
        what = f"{error.msg} (SyntaxError); repair it."
        file = name if name.endswith(".py") else error.filename
        raise ConfigError(f"{file} line {error.lineno}: {what}") from None
    # A script may end with `sys.exit`.
    except (Exception, SystemExit) as error:
        raise _failed(name, error) from None
    finally:
        finder.loading = False
        if closed:
            sys.path[:] = path


def _failed(name: str, error: BaseException) -> ConfigError:
    what = f"{type(error).__name__} at {user_line(error)}"
    text = " ".join(str(error).split()) or "no message"
    more = " The signature covers what import statements name." if name in _restricted else ""
    return ConfigError(f"{name}: importing it raises {what}: {text}; repair that.{more}")


def name_of(value: Any, field: str) -> Any:
    """Return the name under which a config keeps an object of yours; a text stays as it is.

    Args:
      value: a function or a class, or an object that is a global of its module.
      field: of the config, for the message.

    Raises:
      ConfigError: it has no name by which another process could find it.

    Example:
      >>> import nca_trader as nca
      >>> name_of(nca.read_bars, "features")
      'nca_trader.data.bars:read_bars'
    """
    if isinstance(value, str):
        return value
    module, member = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
    if not isinstance(member, str) or vars(sys.modules.get(module, types)).get(member) is not value:
        module, member = _global(value)
    if not member:
        raise ConfigError(
            f"{field}: {describe(value)} has no name that another process can find; define it at "
            "the top of a module."
        )
    if module == "__main__":  # of a script, which another process finds by its file
        file = getattr(sys.modules[module], "__file__", None)
        module = module if file is None else os.path.relpath(file)
    name = f"{module}:{member}"
    if _given.setdefault(name, value) is not value:
        # Another object of the same name, e.g. of a cell that was run again: what was built from
        # the old one is void.
        _forget()
    _given[name] = value
    return name


def _forget() -> None:
    for forget in FORGET:
        forget()
    if (jax := sys.modules.get("jax")) is not None:  # this module is read without it
        jax.clear_caches()


def sources_of(names: Iterable[str]) -> OwnFiles:
    """Return the files of the names of your own code, for a worker that does not have them.

    Built-in names and those of installed packages are left out: they must be installed there.

    Raises:
      ConfigError: see `refuse_foreign`; or a file is not Python.
    """
    modules = {own.module for text in names if (own := parse_name(text)) is not None}
    modules.discard("__main__")  # `load` says there that a prompt cannot be read
    for module in modules:
        _own_file(module)
    return read_sources(sorted(modules))


def receive(sources: OwnFiles) -> None:
    """Load names of own code from the files that the caller of this worker sent."""
    if write_sources(sources):
        _forget()


def _global(value: Any) -> tuple[str, str]:
    """Return the module and the name of a global that is `value`; empty texts without one."""
    # A copy of the list: to look at a module may import another one.
    for name, module in list(sys.modules.items()):
        for member, found in list(getattr(module, "__dict__", {}).items()):
            if found is value and not name.startswith("nca_trader.") and member.isidentifier():
                return name, member
    return "", ""
