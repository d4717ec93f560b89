"""Reads JSON and TOML of ours strictly: each value has its declared type, or one line says why not.

A declared type is a `TypedDict` or a dataclass (an unknown or missing key is refused), a list, a
tuple, a dict with text keys, a union with None, or a plain type.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tomllib
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from nca_trader.config.ranges import nearest
from nca_trader.errors import ConfigError, StateError

T = TypeVar("T")
RESTORE = "restore it from a copy"
NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
EXAMPLES = {int: "1, 2", float: "0.5, 1.0", str: '"one", "two"', bool: "true, false"}
INTEGERS = range(-(2**63), 2**63)  # those of TOML and of every array
SHOWN = 60  # characters of a wrong value that a message repeats
CHECKSUM, BLANK = "checksum", "0" * 64


def read_json(content: str | bytes, source: str, remedy: str = RESTORE) -> Any:
    """Parses JSON that this package wrote.

    Args:
      content: the text, or its bytes in UTF-8. source: the file's name. remedy: for the message.

    Raises:
      StateError: `content` is not JSON, or nobody would write it (deep nesting, huge numbers).
    """
    try:
        text = content if isinstance(content, str) else content.decode()
        return json.loads(text, parse_int=lambda digits: _narrow(int(digits)))
    except (ValueError, RecursionError) as error:
        raise StateError(f"{source}: not JSON ({_reason(error)}); {remedy}.") from None


def read_toml(text: str, source: str) -> dict[str, Any]:
    """Parses TOML that a user wrote.

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
    """Returns `value`; raises ValueError where it holds an integer of more than 64 bits."""
    if isinstance(value, int) and value not in INTEGERS:
        raise ValueError("an integer has more than 64 bits")
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            _narrow(inner)
    return value


class Mismatch(Exception):
    """A value of another type than declared, or a key that is unknown or missing.

    expected: in words. value: found. path: of the value. sentence: what is wrong with it.
    """

    def __init__(self, expected: str, value: Any, path: str = "", sentence: str = ""):
        super().__init__(expected)
        self.expected, self.value, self.path = expected, value, path
        at = f"{path} = " if path else ""
        self.sentence = sentence or f"{at}{shown(value)} where {expected} is expected"


def converted(value: Any, kind: Any, none: str | None = None, path: str = "") -> Any:
    """Converts a parsed value to the declared type `kind`.

    Whole numbers pass for floats and lists for tuples.

    Args:
      none: what stands for None, which TOML does not have. path: of the value, for messages.

    Raises:
      Mismatch: the value, or one inside it, has another type.
    """
    origin, of = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        (inner,) = (k for k in of if k is not types.NoneType)
        if value == none and type(value) is type(none):
            return None
        try:
            return converted(value, inner, none, path)
        except Mismatch as wrong:
            word = "null" if none is None else f'"{none}"'
            raise Mismatch(f"{wrong.expected} or {word}", wrong.value, wrong.path) from None
    if typing.is_typeddict(kind) or dataclasses.is_dataclass(kind):
        return _object(value, kind, none, path)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise Mismatch("an object", value, path)
        return {k: converted(v, of[1], none, _joined(path, k)) for k, v in value.items()}
    if origin in (tuple, list):
        return origin(_items(value, of[0], none, path))
    return _plain(value, kind, path)


def _items(value: Any, kind: Any, none: str | None, path: str) -> list[Any]:
    if not isinstance(value, list):
        example = f", e.g. [{EXAMPLES[kind]}]," if kind in EXAMPLES else ""
        raise Mismatch(f"a list{example}", value, path)
    if kind not in NAMES:
        return [converted(v, kind, none, f"{path}[{i}]") for i, v in enumerate(value)]
    try:
        return [_plain(v, kind, path) for v in value]
    except Mismatch as wrong:
        raise Mismatch(f"a list in which each is {wrong.expected}", value, path) from None


def _plain(value: Any, kind: Any, path: str) -> Any:
    if kind is float and type(value) is int:
        return float(value)
    if isinstance(value, bool) != (kind is bool) or not isinstance(value, kind):
        raise Mismatch(NAMES[kind], value, path)
    return value


def _object(value: Any, kind: Any, none: str | None, path: str) -> Any:
    """A dict of the `TypedDict` `kind`, or an instance of the dataclass `kind`."""
    if not isinstance(value, Mapping):
        raise Mismatch("an object", value, path)
    # `__required_keys__` is wrong where annotations are text.
    hints = typing.get_type_hints(kind, include_extras=True)
    optional = {k for k in hints if typing.get_origin(hints[k]) is typing.NotRequired}
    hints |= {k: typing.get_args(hints[k])[0] for k in optional}
    for key in value.keys() - hints.keys():
        at, hint = _joined(path, key), nearest(key, hints)
        raise Mismatch("", None, at, f"{at!r} is not a known key{hint and '; ' + hint.strip()}")
    for key in hints:
        if key not in optional and key not in value:
            at = _joined(path, key)
            raise Mismatch("", None, at, f"has no {at!r}")
    found = {k: converted(v, hints[k], none, _joined(path, k)) for k, v in value.items()}
    return found if typing.is_typeddict(kind) else kind(**found)


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def shown(value: Any) -> str:
    """A wrong value as a message repeats it: JSON in one line, cut where it is long."""
    try:
        text = json.dumps(value, default=str)
    except (ValueError, RecursionError):  # an integer of Python's; a deep nest
        return "a value too large to show"
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def record(kind: type[T], value: Any, source: str, remedy: str = RESTORE) -> T:
    """Returns parsed JSON as the declared type `kind`.

    Raises:
      StateError: a key is unknown or missing, or a value has another type.
    """
    try:
        return converted(value, kind)
    except Mismatch as wrong:
        raise StateError(f"{source}: {wrong.sentence}; {remedy}.") from None


def sealed(value: Mapping[str, Any]) -> str:
    """Returns the JSON text of `value` with the SHA-256 of that text under "checksum".

    The digest is that of the whole text with 64 zeros in its own place.
    """
    text = json.dumps({**value, CHECKSUM: BLANK}, indent=2, allow_nan=False) + "\n"
    return text.replace(_field(BLANK), _field(hashlib.sha256(text.encode()).hexdigest()))


def unsealed(content: bytes, source: str) -> tuple[Any, bool]:
    """Parses what `sealed` wrote; returns it without its "checksum", and whether it had one.

    Raises:
      StateError: the text is not JSON, or not the text that was written.
    """
    value = read_json(content, source)
    if not isinstance(value, dict) or CHECKSUM not in value:
        return value, False
    digest = str(value.pop(CHECKSUM))
    blank = content.replace(_field(digest).encode(), _field(BLANK).encode())
    if hashlib.sha256(blank).hexdigest() != digest:
        raise StateError(f"{source}: changed since it was written (SHA-256 differs); {RESTORE}.")
    return value, True


def _field(digest: str) -> str:
    return f'"{CHECKSUM}": "{digest}"'
