"""One reader and one writer for everything that is stored: dataclasses to JSON and TOML, and back.

`plain` turns a dataclass into the types of JSON and TOML; `convert` builds it again. Each value
must have its declared type, and a record must have all of its keys and no other: the file of a run
decides what an agent does with money, so nothing in it is guessed or ignored. A field declared as
`... = None` is left out of a record while it is None.

A declared type is a dataclass, a list, a tuple, a dict with text keys, a union with None, or a
plain type.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import tomllib
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from nca_trader.config.ranges import nearest
from nca_trader.errors import ConfigError, StateError

T = TypeVar("T")
RESTORE = "restore it from a copy"
NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
INTEGERS = range(-(2**63), 2**63)  # those of TOML and of every array
HALF = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")
SHOWN = 60  # characters of a wrong value that a message repeats
CHECKSUM, BLANK = "checksum", "0" * 64  # the blank is as long as a SHA-256 in hexadecimal


def loads(text: str | bytes, parse_int: Callable[[str], int] | None = None) -> Any:
    """Parse JSON.

    Raises:
      ValueError: `text` is not JSON, or not in UTF-8, or is nested too deeply for Python.
    """
    text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
    try:
        found = json.loads(text, parse_int=parse_int)
        if HALF.search(text):  # a pair is one character now, and a half can be written nowhere
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(content: str | bytes, source: str, remedy: str = RESTORE) -> Any:
    """Parse JSON that this package wrote.

    Args:
      content: the text, or its bytes in UTF-8.
      source: the file's name, for the message.
      remedy: what to do, for the message.

    Raises:
      StateError: `content` is not JSON, or is nested too deeply, or has a number that is too large.
    """
    try:
        text = content if isinstance(content, str) else content.decode()
        return loads(text, lambda digits: _narrow(int(digits)))
    except ValueError as error:
        raise StateError(f"{source}: not JSON ({_reason(error)}); {remedy}.") from None


def read_toml(text: str, source: str) -> dict[str, Any]:
    """Parse TOML that a user wrote.

    Raises:
      ConfigError: `text` is not TOML, or has deep nesting or huge numbers.
    """
    try:
        return _narrow(tomllib.loads(text))
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{source}: not valid TOML: {_reason(error)}; correct that line."
        ) from None


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    # Python's own limit; its message gives advice to programmers.
    return "an integer has more than 64 bits" if "int_max_str_digits" in str(error) else str(error)


def _narrow(value: Any) -> Any:
    """Return `value`; raise ValueError where it holds an integer of more than 64 bits."""
    if isinstance(value, int) and value not in INTEGERS:
        raise ValueError("an integer has more than 64 bits")
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            _narrow(inner)
    return value


def plain(value: Any, none: str | None = None) -> Any:
    """Return a value in the types of JSON: dataclasses as objects, tuples as lists.

    Args:
      value: a dataclass, or a mapping, a sequence or a plain value with dataclasses inside.
      none: what stands for None; where nothing does, a field whose default is None is left out.

    >>> import dataclasses
    >>> @dataclasses.dataclass
    ... class Point:
    ...     x: float
    ...     name: str | None = None
    >>> plain([Point(1.5), Point(2.0, "b")])
    [{'x': 1.5}, {'x': 2.0, 'name': 'b'}]
    """
    if dataclasses.is_dataclass(value):
        # Not `asdict`, which would copy arrays and go into what is left out.
        found = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        absent = {f.name for f in dataclasses.fields(value) if f.default is None and none is None}
        return {k: plain(v, none) for k, v in found.items() if not (v is None and k in absent)}
    if isinstance(value, Mapping):
        return {key: plain(inner, none) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner, none) for inner in value]
    return none if value is None else value


def finite(value: Any) -> Any:
    """Return dicts, lists and plain values with None for numbers that JSON does not have.

    >>> finite({"sharpe": float("nan"), "weights": (0.5, float("inf"))})
    {'sharpe': None, 'weights': [0.5, None]}
    """
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Mismatch(Exception):
    """A value of another type than declared, or a key that is unknown or missing.

    expected: in words. value: found. path: of the value. sentence: what is wrong with it.
    """

    def __init__(self, expected: str, value: Any, path: str = "", sentence: str = ""):
        super().__init__(expected)
        self.expected, self.value, self.path = expected, value, path
        at = f"{path} = " if path else ""
        self.sentence = sentence or f"{at}{show(value)} where {expected} is expected"


def convert(value: Any, kind: Any, none: str | None = None, path: str = "") -> Any:
    """Convert a parsed value to the declared type `kind`.

    Whole numbers pass for floats and lists for tuples.

    Args:
      value: in the types of JSON or TOML.
      kind: the declared type, see the module.
      none: what stands for None, which TOML does not have.
      path: of the value, for messages.

    Raises:
      Mismatch: the value, or one inside it, has another type; or a key is unknown or missing.
    """
    origin, of = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        # One type besides None: with two, a file could not say which it means.
        (inner,) = (k for k in of if k is not types.NoneType)
        if value == none and type(value) is type(none):
            return None
        try:
            return convert(value, inner, none, path)
        except Mismatch as wrong:
            if wrong.path != path or wrong.value is not value:  # of something inside of it
                raise
            word = "null" if none is None else f'"{none}"'
            raise Mismatch(f"{wrong.expected} or {word}", value, path) from None
    if origin in (tuple, list):
        if not isinstance(value, list):
            raise Mismatch("a list", value, path)
        if origin is tuple and ... not in of and len(value) != len(of):
            raise Mismatch(f"a list of {len(of)}", value, path)
        return origin(convert(v, of[0], none, f"{path}[{i}]") for i, v in enumerate(value))
    if kind in NAMES:
        # Many programs write 1.0 as 1.
        if kind is float and type(value) is int:
            return float(value)
        # Python's True is an int; a file's true is not a number.
        if isinstance(value, bool) != (kind is bool) or not isinstance(value, kind):
            raise Mismatch(NAMES[kind], value, path)
        return value
    if not isinstance(value, Mapping):
        raise Mismatch("an object", value, path)
    dot = f"{path}." if path else ""
    if origin is dict:
        return {key: convert(v, of[1], none, f"{dot}{key}") for key, v in value.items()}
    kinds, fields = typing.get_type_hints(kind), dataclasses.fields(kind)
    # Unknown keys before missing ones: a mistyped key is both, and the first has the hint.
    for key in value.keys() - kinds.keys():
        hint = nearest(key, kinds).strip()
        sentence = f"{f'{dot}{key}'!r} is not a known key{hint and '; ' + hint}"
        raise Mismatch("", None, f"{dot}{key}", sentence)
    for field in fields:
        # A field whose default is None is left out by `plain` too.
        if field.name not in value and field.default is not None:
            raise Mismatch("", None, f"{dot}{field.name}", f"has no {f'{dot}{field.name}'!r}")
    found = {key: convert(v, kinds[key], none, f"{dot}{key}") for key, v in value.items()}
    try:
        return kind(**found)
    except (ValueError, ConfigError) as error:  # of its `__post_init__`
        raise Mismatch("", None, path, str(error).rstrip(".").replace("\n", " ")) from None


def difference(there: Any, here: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """Return the first place where two parsed values differ: its path and both values.

    >>> difference({"a": [1, 2]}, {"a": [1, 3]})
    ('a[1]', 2, 3)
    """
    inner: list[tuple[str, Any, Any]] = []
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        dot = f"{name}." if name else ""
        inner = [(f"{dot}{key}", there.get(key), here.get(key)) for key in {**there, **here}]
    elif isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        pairs = enumerate(zip(there, here, strict=True))
        inner = [(f"{name}[{i}]", left, right) for i, (left, right) in pairs]
    for path, left, right in inner:
        if left != right:
            return difference(left, right, path)
    return None if there == here else (name, there, here)


def show(value: Any) -> str:
    """Return a wrong value as a message repeats it: JSON in one line, cut where it is long."""
    try:
        text = json.dumps(value, default=str)
    except (ValueError, RecursionError):  # an integer of Python's; a deep nest
        return "a value too large to show"
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def record(kind: type[T], value: Any, source: str, remedy: str = RESTORE) -> T:
    """Return parsed JSON as the declared type `kind`.

    Raises:
      StateError: a key is unknown or missing, or a value has another type.
    """
    try:
        return convert(value, kind)
    except Mismatch as wrong:
        raise StateError(f"{source}: {wrong.sentence}; {remedy}.") from None


def seal_record(value: Mapping[str, Any], indent: int | None = 2) -> str:
    """Return the JSON text of `value` with the SHA-256 of that text under "checksum".

    The digest is that of the whole text with 64 zeros in its own place. Without an `indent` the
    text is one line.
    """
    # NaN is refused: other readers of JSON do not know it, and it would not compare equal.
    text = json.dumps({**value, CHECKSUM: BLANK}, indent=indent, allow_nan=False) + "\n"
    return seal(text.encode(), CHECKSUM).decode()


def open_record(content: bytes, source: str, remedy: str = RESTORE) -> tuple[Any, bool]:
    """Parse the text that `seal_record` wrote.

    Returns:
      The value without its "checksum", and whether it had one.

    Raises:
      StateError: the text is not JSON, or not the text that was written.
    """
    value = read_json(content, source, remedy)
    if not isinstance(value, dict) or CHECKSUM not in value:
        return value, False  # of an older version, whose records had none
    # The bytes of the file and not the value written again: another indent is a change as well.
    if not is_whole(content, CHECKSUM, value.pop(CHECKSUM)):
        raise StateError(f"{source}: changed since it was written (SHA-256 differs); {remedy}.")
    return value, True


def seal(content: bytes, name: str) -> bytes:
    """Write the SHA-256 of a content over its `BLANK`, a field of this name in its JSON."""
    digest = hashlib.sha256(content).hexdigest()
    # Of the same length, so that the rest of the content stays where it is.
    return content.replace(_field(name, BLANK), _field(name, digest), 1)


def is_whole(content: bytes, name: str, digest: object) -> bool:
    """Whether a content is what `seal` gave this digest."""
    blank = content.replace(_field(name, digest), _field(name, BLANK), 1)
    return hashlib.sha256(blank).hexdigest() == digest


def _field(name: str, digest: object) -> bytes:
    return f'"{name}": "{digest}"'.encode()
