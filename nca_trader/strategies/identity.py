"""What decides a strategy's numbers: its code and the values in it, as one digest."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
import types
from collections.abc import Mapping
from typing import Any

import numpy as np

from nca_trader.config import AgentConfig
from nca_trader.config.modules import digest_of_imported
from nca_trader.config.records import plain


def digest_of(subject: Any) -> str:
    """Return a digest of a rule, a strategy or a function, the same in another process.

    Two subjects of one digest are computed by the same code from the same values: the file of each
    function counts with the own files that it imports, so that an edited rule is another rule, and
    so do default values, the arguments of a `functools.partial`, and what a function holds of the
    function that made it.

    Args:
      subject: a function, a `Strategy`, or an object that can be called.

    Example:
      >>> from nca_trader.strategies import rules
      >>> digest_of(rules.sma_cross(5, 20)) == digest_of(rules.sma_cross(5, 20))
      True
      >>> digest_of(rules.sma_cross(5, 20)) == digest_of(rules.sma_cross(5, 21))
      False
    """
    return hashlib.sha256(repr(_facts(subject, {})).encode()).hexdigest()


def identity(subject: Any) -> Any:
    """Describe a subject in the types of JSON, so that work is not resumed with another one."""
    if isinstance(subject, AgentConfig):
        return plain(subject)
    # A strategy has a name, a rule is a function, and a model may be any callable.
    name = getattr(subject, "name", None) or getattr(
        subject, "__qualname__", type(subject).__name__
    )
    return {"name": name, "sha256": digest_of(subject)}


def _facts(x: Any, seen: dict[int, tuple[int, Any]]) -> Any:
    """Return a value as nested tuples of texts; `seen` has the place of each object met before."""
    # `repr` of a float has all its digits, and tells 1 from 1.0 and True.
    if x is None or isinstance(x, bool | int | float | complex | str | bytes | range):
        return repr(x)
    within, uncounted = functools.partial(_facts, seen=seen), getattr(x, "UNCOUNTED", ())
    kind = f"{_recorded(type(x).__module__)}.{type(x).__qualname__}"
    if not isinstance(x, tuple):
        # Each object is visited once, because a function may refer to itself. It is kept, so that
        # no other object gets its id.
        if id(x) in seen:
            return kind, seen[id(x)][0]
        seen[id(x)] = len(seen), x
    # Code of installed packages counts by name alone: it is not a part of the strategy.
    if isinstance(x, type | types.ModuleType):
        return kind, x.__name__
    if isinstance(x, functools.partial):
        return kind, within(x.func), within(x.args), within(x.keywords)
    if isinstance(x, types.MethodType):
        return kind, within(x.__func__), within(x.__self__)
    if isinstance(x, types.FunctionType):
        held = [_content(cell) for cell in x.__closure__ or ()]
        values = (within(x.__defaults__), within(x.__kwdefaults__), within(held))
        return _recorded(x.__module__), x.__qualname__, _source(x), *values
    if isinstance(x, Mapping):
        return kind, tuple((repr(key), within(value)) for key, value in x.items())
    if isinstance(x, list | tuple):
        names = getattr(x, "_fields", range(len(x)))
        return kind, tuple(within(y) for n, y in zip(names, x, strict=True) if n not in uncounted)
    if isinstance(x, set | frozenset):
        # The order of a set differs from process to process.
        return kind, tuple(sorted(repr(within(value)) for value in x))
    if dataclasses.is_dataclass(x):
        names = (f.name for f in dataclasses.fields(x) if f.name not in uncounted)
        return kind, tuple((name, within(getattr(x, name))) for name in names)
    if hasattr(x, "__array__"):
        array = np.asarray(x)
        # An array of objects holds addresses, which differ from process to process.
        if array.dtype != object:
            return kind, array.dtype.str, array.shape, hashlib.sha256(array.tobytes()).hexdigest()
    # The address of an object is another one in the next process.
    fields = getattr(x, "__dict__", None)
    return kind, within(fields) if fields else re.sub(r" at 0x[0-9a-f]+", "", repr(x))


def _recorded(module: str | None) -> str | None:
    """Return the name that identities have of a module, whose room may have moved since 0.2.0."""
    # What `exec` defined may have no module.
    return module and re.sub(r"^nca_trader\.strategies\.", "nca_trader.agents.", module)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _source(function: types.FunctionType) -> str:
    """Return the digest of a function's code; of a prompt, which has no file, its compiled code."""
    found = digest_of_imported(function.__module__)
    if found is not None:
        return found
    code = function.__code__
    text = repr((code.co_code, code.co_names, re.sub(r" at 0x\w+", "", repr(code.co_consts))))
    return hashlib.sha256(text.encode()).hexdigest()
