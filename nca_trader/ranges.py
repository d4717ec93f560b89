"""What a config's values may be. Each check gives sentences: the value, what is wrong, the remedy.

A config's `__post_init__` collects them and calls `refuse`, so that all faults show at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Iterator
from numbers import Integral, Real
from types import SimpleNamespace
from typing import Any, TypeVar

from nca_trader.errors import ConfigError

T = TypeVar("T")


def refuse(*problems: Iterable[str]) -> None:
    """Raises one ConfigError, a line a problem, if there is any."""
    lines = [line for some in problems for line in some]
    if lines:
        raise ConfigError(*lines)


def nearest(word: str, known: Iterable[str]) -> str:
    """`"did you mean 'x'? "` with the known name closest to `word`, or "" if none is close."""
    close = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'? " if close else ""


def whole(config: Any, least: int, *names: str, most: int | None = None) -> Iterator[str]:
    """The fields must be whole numbers from `least` to `most`."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, Integral):
            yield f"{name}={value!r} is not a whole number; give one of at least {least}."
        elif value < least:
            yield f"{name}={value} is below its least value; give at least {least}."
        elif most is not None and int(value) > most:
            yield f"{name}={value} is above its largest value; give at most {most:,}."


def between(config: Any, interval: str, *names: str) -> Iterator[str]:
    """The fields must be numbers in `interval`, e.g. "[0, 1)"; "inf" is an end, not a value."""
    low, high = (float(end) for end in interval[1:-1].split(","))
    for name in names:
        value = getattr(config, name)
        number = float(value) if isinstance(value, Real) and type(value) is not bool else math.nan
        above = number > low or (interval[0] == "[" and number == low)
        below = number < high or (interval[-1] == "]" and number == high)
        if not (above and below):
            yield f"{name}={value!r} is outside its range; give a number in {interval}."


def one_of(config: Any, name: str, allowed: Iterable[str]) -> Iterator[str]:
    """The field must be one of the allowed words."""
    allowed = tuple(allowed)
    value = getattr(config, name)
    if value not in allowed:
        words = ", ".join(f"'{word}'" for word in allowed)
        yield f"{name}={value!r} is not known; {nearest(str(value), allowed)}It may be {words}."


def multiple(name: str, value: int, of_name: str, of: int) -> Iterator[str]:
    """`value` must be a multiple of `of`."""
    if value % of:
        near = max(of, round(value / of) * of)
        yield f"{name}={value} is not a multiple of {of_name}={of}; the nearest that is: {near}."


def divides(name: str, value: int, of_name: str, of: int) -> Iterator[str]:
    """`value` must divide `of`."""
    if of % value:
        divisors = [d for d in range(1, of + 1) if of % d == 0]
        near = min(divisors, key=lambda d: abs(d - value))
        yield f"{name}={value} does not divide {of_name}={of}; the nearest that does is {near}."


def without_effect(config: Any) -> Iterator[str]:
    """Fields that the others switch off must be left at their defaults.

    Args:
      config: a dataclass with `idle(given)`, which yields the name of each field that changes
        nothing beside the values `given`, and the setting that it needs.
    """
    defaults = defaults_of(type(config))
    for name, needs in config.idle(config):
        if (value := getattr(config, name)) != defaults[name]:
            yield (
                f"{name}={value!r} has no effect without {needs}; leave it out (its default is "
                f"{defaults[name]!r}), or give {needs}."
            )


def switched(config: T, **changes: Any) -> T:
    """A copy of a config with `changes`, in which what they switch off is at its default."""
    fields: Any = config
    given = {field.name: getattr(config, field.name) for field in dataclasses.fields(fields)}
    return dataclasses.replace(fields, **at_rest(type(config), given | changes) | changes)


def at_rest(cls: Any, values: dict[str, Any]) -> dict[str, Any]:
    """The defaults of what `values`, and the defaults of all others, leave without effect."""
    defaults = defaults_of(cls)
    given = SimpleNamespace(**{**defaults, **values})
    return {name: defaults[name] for name, _ in cls.idle(given)}


def defaults_of(cls: Any) -> dict[str, Any]:
    """The default of each field of a dataclass, by name."""
    return {field.name: field.default for field in dataclasses.fields(cls)}
