"""The constructor of a config: it refuses what is not a field, and keeps own objects by name."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
import typing
from typing import Any, TypeVar

from nca_trader.config.extensions import name_of
from nca_trader.config.ranges import a, defaults_of, describe, refuse
from nca_trader.config.records import Mismatch, convert

T = TypeVar("T")


def strict(cls: type[T]) -> type[T]:
    """Class decorator of a config: its constructor reports all unusable arguments in a ConfigError.

    An unknown field names the nearest known one; a value in place of a nested config says which
    config it should be.
    """
    build: Any = cls.__init__
    types_of = functools.cache(lambda: typing.get_type_hints(cls))
    fields = defaults_of(cls)
    nested = {key: value for key, value in fields.items() if dataclasses.is_dataclass(value)}
    # A field of a nested config is suggested by its whole path; own fields win.
    paths = {f.name: f"{key}.{f.name}" for key in nested for f in dataclasses.fields(nested[key])}
    paths |= {key: key for key in fields}

    # Around the generated constructor: Python's own TypeError names neither a remedy nor a second
    # mistake.
    @functools.wraps(build)
    def init(self: Any, *args: Any, **values: Any) -> None:
        name, problems = cls.__name__, []
        if args:
            example = f"{name}({next(iter(fields))}=...)"
            problems.append(f"{name}({args[0]!r}): give each value with its name, e.g. {example}.")
        for key, value in values.items():
            if key not in fields:
                close = difflib.get_close_matches(key.lower(), paths, n=1, cutoff=0.5)
                hint = f"did you mean '{paths[close[0]]}'? " if close else ""
                problems.append(f"{name} has no field {key}; {hint}There are {', '.join(fields)}.")
            elif key in nested and not isinstance(value, type(nested[key])):
                kind = a(type(nested[key]).__name__)
                problems.append(f"{key} is {describe(value)}; give {kind}.")
        refuse(problems)
        for key in getattr(cls, "OWN", {}):
            values = _by_name(values, key)
        # Numbers are checked by their ranges; a Python caller may give anything else as well.
        given = {k: x for k, x in values.items() if x is not None or fields[k] is not None}
        refuse(filter(None, (_of_type(key, x, types_of()[key]) for key, x in given.items())))
        build(self, **values)

    def refuse_subclass(own: type, **_: Any) -> None:
        refuse(
            f"{own.__name__}: is a subclass of {cls.__name__}, and files hold the fields of that "
            f"alone; write a function that returns {a(cls.__name__)}."
        )

    cls.__init__ = init
    cls.__init_subclass__ = classmethod(refuse_subclass)  # pyright: ignore[reportAttributeAccessIssue]
    return cls


def _of_type(key: str, value: Any, kind: Any) -> str:
    """Return what is wrong with the type of a text, a flag or a tuple; "" for a number."""
    if isinstance(kind, types.UnionType):  # with None
        kind = typing.get_args(kind)[0]
        if value is None:
            return ""
    if kind not in (str, bool) and typing.get_origin(kind) is not tuple:
        return ""
    several = isinstance(value, tuple | list)
    # Numbers of numpy, which is not imported here: commands answer before it is.
    bare = [
        x.item() if getattr(x, "shape", None) == () else x for x in (value if several else [value])
    ]
    try:
        convert(bare if several else bare[0], kind, path=key)
    except Mismatch as wrong:
        found = value if wrong.path == key else wrong.value
        return f"{wrong.path}={found!r} is {describe(found)}; give {wrong.expected}."
    return ""


def _by_name(values: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the values of a config with the names of the objects that a field was given."""
    value = values.get(key, "")
    several = type(value) in (tuple, list)  # a NamedTuple is an object
    if all(isinstance(one, str | None) for one in (value if several else [value])):
        return values
    named = tuple(name_of(one, key) for one in value) if several else name_of(value, key)
    return values | {key: named}
