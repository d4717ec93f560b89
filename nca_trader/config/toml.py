"""Configs as TOML files: presets and a user's own, with overrides.

A file may leave out keys, which then have their defaults; an unknown key is refused. All problems
of a file are reported in one error, one line each: file, key, what is wrong, remedy. Writing a
config and reading it back gives an equal config. `presets` and `start_project` give files to
start from.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import re
import typing
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from nca_trader.config.modules import PACKAGE
from nca_trader.config.ranges import a, effective, expect, nearest, refuse
from nca_trader.config.records import SHOWN, Mismatch, convert, plain, read_toml, show
from nca_trader.errors import ConfigError, argument

T = TypeVar("T")
# TOML has no null; a field that may be None is written and read as this word.
NONE = "none"


def preset_folder(folder: str) -> pathlib.Path:
    """Return the folder of the presets "envs" or "agents": in the wheel, or in the checkout."""
    # In the wheel the files are inside the package; a checkout has them at its root.
    shipped = PACKAGE / folder / "shipped"
    return shipped if shipped.is_dir() else PACKAGE.parent / folder


def preset_names(folder: str) -> tuple[str, ...]:
    """Return the names of the presets in `folder`, sorted."""
    return tuple(sorted(path.stem for path in preset_folder(folder).glob("*.toml")))


def read_preset(
    cls: type[T],
    name_or_path: T | str | os.PathLike[str],
    folder: str,
    overrides: Sequence[str] = (),
    name: str = "",
) -> T:
    """Read a config by the name of a preset or the path of a TOML file; a config passes as it is.

    Args:
      cls: a frozen dataclass, nested for tables; see `from_toml_text`.
      name_or_path: "nano", or a path: whatever ends in .toml or holds a folder separator.
      folder: "envs" or "agents", where names are looked up.
      overrides: "table.key=value" strings, which replace the file's values in turn.
      name: name of the caller's argument, for messages; "" is "env" or "agent".

    Raises:
      ConfigError: there is no such preset or file, or something in it is wrong.

    >>> from nca_trader.config import AgentConfig
    >>> read_preset(AgentConfig, "nano", "agents", ["policy.steps=3"]).policy.steps
    3
    """
    accepted = 'a list of texts, e.g. ["learner.num_epochs=2"]'
    expect("overrides", overrides, list | tuple, accepted)
    if isinstance(name_or_path, cls):
        if not overrides:
            return name_or_path
        # Through text, so that overrides of an object are read and refused like those of a file.
        return from_toml_text(cls, to_toml(name_or_path), cls.__name__, overrides)
    expect(
        name or folder.removesuffix("s"),
        name_or_path,
        str | os.PathLike,
        f"{a(cls.__name__)}, a preset's name ({', '.join(preset_names(folder))}), or the path of a "
        ".toml file",
    )
    text = os.fspath(typing.cast("str | os.PathLike[str]", name_or_path))
    if not isinstance(name_or_path, str) or text.endswith(".toml") or "/" in text:
        path, source = pathlib.Path(text), text
    else:
        known = preset_names(folder)
        if text not in known:
            raise ConfigError(
                f"{text!r} is not a preset in {folder}/; {nearest(text, known)}"
                f"Known: {', '.join(known)}; or give the path of a .toml file."
            )
        path, source = preset_folder(folder) / f"{text}.toml", f"{folder}/{text}.toml"
    others = f"give the path of a .toml file or a preset: {', '.join(preset_names(folder))}"
    content = _text_of(path, source, others)
    return from_toml_text(cls, content, source, overrides)


def from_toml_text(
    cls: type[T], text: str, source: str, overrides: Sequence[str] = (), stored: bool = False
) -> T:
    """Read a config from the text of a TOML file.

    Keys are the dataclass's fields and nested dataclasses are tables; what is left out has its
    default. Whole numbers do for floats, lists for tuples, "none" for None. The metadata of a field
    may name another `key`, and a function `read` of its value, which may raise `Mismatch`. A
    `secret` is not repeated by messages.

    Args:
      cls: the dataclass to build.
      text: the file's text.
      source: the file's name, for messages.
      overrides: "table.key=value" strings; value as in TOML, or a bare word.
      stored: of a run, whose version may not have refused settings without effect. They are left
        out.

    Raises:
      ConfigError: with one line for each thing that is wrong.
    """
    table = read_toml(text, source)
    reader = _Reader(source, cls, stored)
    # In turn, so that the last one of a key counts.
    for override in overrides:
        reader.override(table, override)
    config = reader.build(cls, table, ())
    if reader.problems:
        raise ConfigError(*reader.problems)
    return typing.cast(T, config)


def read_rows(cls: type[T], path: str | os.PathLike[str], name: str) -> list[T]:
    """Read the rows `[[name]]` of a TOML file; each has a `name` of its own.

    Args:
      cls: the dataclass of a row; see `from_toml_text`.
      path: of the file.
      name: of the rows' table.

    Raises:
      ConfigError: with one line for each thing that is wrong: file, row, what, remedy.
    """
    source = os.fspath(path)
    table = read_toml(_text_of(pathlib.Path(path), source, f"give a file of [[{name}]]"), source)
    rows = table.pop(name, [])
    refuse(f"{source}: {key!r} is not a known key; write rows of [[{name}]]." for key in table)
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{source}: holds no {name}; write rows of [[{name}]].")
    found, problems, names = [], [], []
    for number, row in enumerate(rows, 1):
        named = str(row.get("name", ""))
        where = f" ({named})" if named and named.isprintable() else ""
        reader = _Reader(f"{source}: {name} {number}{where}", cls)
        found.append(reader.build(cls, row, ()))
        if named and named in names:
            reader.report((), f"the name is another {name}'s; give it one of its own.")
        names.append(named)
        problems += reader.problems
    refuse(problems)
    return found


def _text_of(path: pathlib.Path, source: str, remedy: str) -> str:
    """Return the text of a user's file.

    Raises:
      ConfigError: it cannot be read, or is not text.
    """
    try:
        return path.read_text(encoding="utf-8-sig")  # some editors of Windows write a mark first
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source}: not UTF-8 text ({error}); save it as UTF-8.") from None
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read ({error.strerror}); {remedy}.") from None


def to_toml(config: Any) -> str:
    """Return a TOML text with every field of a config. Reading it gives an equal config."""
    return "\n".join(_lines(plain(config, NONE), ())) + "\n"


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    tables = {name: value for name, value in table.items() if isinstance(value, Mapping)}
    # Plain keys first: in TOML a key below a [table] belongs to that table.
    lines = [f"{name} = {literal(table[name])}" for name in table if name not in tables]
    for name, value in tables.items():
        below = (*path, name)
        lines += ["", f"[{'.'.join(below)}]", *_lines(value, below)]
    return lines


def literal(value: Any) -> str:
    """Return a value of `plain` as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for DEL, which TOML does not take raw.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    return repr(value)


class _Reader:
    """Builds one config and collects all problems, where `convert` stops at the first."""

    def __init__(self, source: str, cls: type, stored: bool = False):
        self.source, self.stored = source, stored
        # The keys of each table, to say where a key belongs that stands in the wrong one.
        self.tables = {
            name: [field.name for field in dataclasses.fields(kind)]
            for name, kind in typing.get_type_hints(cls).items()
            if dataclasses.is_dataclass(kind)
        }
        self.problems: list[str] = []
        self.overridden: set[tuple[str, ...]] = set()

    def report(self, path: tuple[str, ...], what: str) -> None:
        """Add a problem with the key at `path`, under the file or the option that gave it."""
        # A fault of an option is not one of the file, which may be a preset.
        whole = tuple(".".join(path).split("."))  # a key may come with its table's name
        given = any(option[: len(whole)] == whole for option in self.overridden)
        source = argument("overrides") if given else self.source
        table = f"[{'.'.join(path[:-1])}] " if len(path) > 1 else ""
        self.problems.append(f"{source}: {table}{what}")

    def override(self, table: dict[str, Any], text: str) -> None:
        """Set one "table.key=value" in the nested `table`."""
        dotted, equals, value = text.partition("=")
        text = text if len(text) <= 2 * SHOWN else text[: 2 * SHOWN] + "..."
        path = tuple(part.strip() for part in dotted.split("."))
        wrong = ""
        if not equals or not all(path):
            wrong = " is not of the form table.key=value."
        for depth, part in enumerate(path[:-1], start=1):
            table = table.setdefault(part, {}) if not wrong else {}
            if not isinstance(table, dict):
                wrong = f": {'.'.join(path[:depth])} is a value, not a table."
        # A bare word is a text: a shell takes away the quotes that TOML wants around it.
        try:
            parsed, bare = read_toml(f"value = {value}", "--set"), False
        except ConfigError:
            parsed, bare = {"value": value.strip()}, True
        # A line break in a value could add keys of its own, past the checks of this one.
        if len(parsed) != 1 or (bare and set(value) & set("[]{}\"'\n")):
            wrong = wrong or ": not a value as TOML writes it."
        if wrong:
            self.problems.append(f"{argument('overrides')}: {text!r}{wrong}")
            return
        table[path[-1]] = parsed["value"]
        self.overridden.add(path)

    def build(self, cls: type, table: Mapping[str, Any], path: tuple[str, ...]) -> Any:
        """Return the dataclass `cls` of `table`, or None if there are problems."""
        types_of = typing.get_type_hints(cls)
        fields = {f.metadata.get("key", f.name): f for f in dataclasses.fields(cls) if f.init}
        known = [*fields]
        before = len(self.problems)
        values: dict[str, Any] = {}
        doubtful: list[str] = []
        for key, value in table.items():
            now = getattr(cls, "RENAMED", {}).get(key)
            # With both in the file the old key is refused: which of the two is meant is not clear.
            if now is not None and now not in table:
                said = f"{self.source}: {key} is now called {now}; rename the key."
                warnings.warn(said, FutureWarning, stacklevel=2)
                key = now
            here = (*path, key)
            if key not in known:
                # A key in the wrong table is a usual mistake, so the message names the right one.
                homes = [f"'{name}.{key}'" for name, keys in self.tables.items() if key in keys]
                hint = f"did you mean {' or '.join(homes)}? " if homes else nearest(key, known)
                doubtful += [name for name in known if f"'{name}'" in hint]
                named = key if key.isprintable() else repr(key)
                self.report(here, f"{named} is not a known key; {hint}Known: {', '.join(known)}.")
                continue
            field = fields[key]
            if dataclasses.is_dataclass(types_of[field.name]):
                if isinstance(value, Mapping):
                    values[key] = self.build(types_of[key], value, here)
                else:
                    self.report(here, f"{key} = {show(value)} is not a table; write [{key}].")
            else:
                read = field.metadata.get("read")
                try:
                    values[field.name] = (
                        read(value) if read else convert(value, types_of[field.name], NONE, key)
                    )
                except Mismatch as wrong:
                    doubtful.append(key)
                    given = "..." if field.metadata.get("secret") else show(wrong.value)
                    at = wrong.path or key
                    self.report(here, f"{at} = {given} where {wrong.expected} is expected.")
        # A table with problems has no object, and its problems are recorded already.
        if any(
            value is None and dataclasses.is_dataclass(types_of[k]) for k, value in values.items()
        ):
            return None
        if self.stored and hasattr(cls, "idle"):
            values = effective(cls, values)
        try:
            config = cls(**values)
        except ConfigError as error:
            for line in str(error).splitlines():
                # A faulty key was left at its default, so what is said of it means nothing.
                if not any(re.search(rf"\b{name}\b", line) for name in doubtful):
                    self.report((*path, line.partition("=")[0]), line)
            return None
        return None if len(self.problems) > before else config


KINDS = {"envs": "environment", "agents": "agent"}

# What `start_project` writes next to two presets. The strategy is text: it imports the package.
START = pathlib.Path(__file__).with_name("start")
FILES = {
    "strategy.py": "strategy.py.txt",
    "broker.py": "broker.py.txt",
    "README.md": "README.md",
    "data/README.md": "data/README.md",
}


class Preset(NamedTuple):
    """A preset. kind: "environment" or "agent". about: the first sentence of its file."""

    name: str
    kind: str
    about: str
    path: pathlib.Path


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


def copy_preset(name: str, target: str | os.PathLike[str]) -> pathlib.Path:
    """Copy a preset's file to `target`: a new file, or a folder that exists.

    Returns:
      The path of the new file.

    Raises:
      ConfigError: there is no such preset, `target` exists, or it cannot be written.
    """
    path = pathlib.Path(target)
    source = preset(name).path
    path = path / source.name if path.is_dir() else path
    _write({path: source.read_text(encoding="utf-8")})
    return path


def start_project(folder: str | os.PathLike[str]) -> list[pathlib.Path]:
    """Write a project to start from: env.toml, agent.toml, strategy.py, broker.py and READMEs.

    Args:
      folder: made if it does not exist. Its other files are left alone.

    Returns:
      The files written.

    Raises:
      ConfigError: one of the files exists, in which case nothing is written, or cannot be written.

    Example:
      >>> import tempfile
      >>> sorted(path.name for path in start_project(tempfile.mkdtemp()))
      ['README.md', 'README.md', 'agent.toml', 'broker.py', 'env.toml', 'strategy.py']
    """
    root = pathlib.Path(folder)
    texts = {
        root / "env.toml": preset("index_daily").path.read_text(encoding="utf-8"),
        root / "agent.toml": preset("nano").path.read_text(encoding="utf-8"),
    }
    texts |= {root / to: (START / name).read_text(encoding="utf-8") for to, name in FILES.items()}
    _write(texts)
    return [*texts]


def _write(texts: dict[pathlib.Path, str]) -> None:
    """Write new files; where one exists, or one fails, none is left."""
    there = [str(path) for path in texts if os.path.lexists(path)]
    if there:
        raise ConfigError(f"{', '.join(there)}: exists; choose another place, or remove it.")
    written: list[pathlib.Path] = []
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            # "x" fails where the file exists: a check before could be out of date.
            with path.open("x", encoding="utf-8") as file:
                written.append(path)
                file.write(text)
    except OSError as error:
        for path in written:
            with contextlib.suppress(OSError):
                path.unlink()
        what = error.strerror or str(error)
        raise ConfigError(f"{path}: cannot be written ({what}); choose another place.") from None
