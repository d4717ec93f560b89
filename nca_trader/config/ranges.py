"""What a config's values may be. Each check gives sentences: the value, what is wrong, the remedy.

A config's `__post_init__` collects them and calls `refuse`, so that all faults show at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import re
from collections.abc import Iterable, Iterator
from numbers import Integral, Real
from types import SimpleNamespace
from typing import Any, TypeVar

from nca_trader.errors import ConfigError, argument

T = TypeVar("T")
# What ISO 8601 writes; 05/06/2006 is another day on each side of an ocean.
ISO = re.compile(
    r"\d{4}(-\d{2}(-\d{2}([T ]\d{2}(:?\d{2}(:?\d{2}([.,]\d+)?)?)?(Z|[+-]\d{2}(:?\d{2})?)?)?)?)?"
)

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
        nothing given the values `given`, and the setting that it needs.
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


def strict(cls: type[T]) -> type[T]:
    """Class decorator of a config: refuses what its constructor cannot take in one ConfigError.

    An unknown field names the nearest known one; a value in place of a nested config says which
    config it should be.
    """
    build = cls.__init__
    fields = {field.name: field for field in dataclasses.fields(cls)}  # pyright: ignore

    @functools.wraps(build)
    def init(self: Any, *args: Any, **values: Any) -> None:
        refuse(_unknown(cls.__name__, fields, args, values))
        build(self, **values)

    cls.__init__ = init
    return cls


def _unknown(name: str, fields: dict[str, Any], args: tuple, values: dict[str, Any]):
    if args:
        first = next(iter(fields))
        yield f"{name}({args[0]!r}): give each value with its name, e.g. {name}({first}=...)."
    own = {key: key for key in fields}
    nested = {key: field.default for key, field in fields.items()}
    nested = {key: config for key, config in nested.items() if dataclasses.is_dataclass(config)}
    below = {f.name: f"{key}.{f.name}" for key in nested for f in dataclasses.fields(nested[key])}
    for key, value in values.items():
        if key not in fields:
            close = difflib.get_close_matches(key.lower(), [*own, *below], n=1, cutoff=0.5)
            hint = f"did you mean '{(below | own)[close[0]]}'? " if close else ""
            yield f"{name} has no field {key}; {hint}There are {', '.join(fields)}."
        elif key in nested and not isinstance(value, type(nested[key])):
            yield f"{key} is {described(value)}; give {a(type(nested[key]).__name__)}."


def described(value: Any) -> str:
    """What was given, in a few words: `a function (my_rule)`, `the number 0.001`, `a DataFrame`."""
    if isinstance(value, str):
        return f"the text {value!r}"
    if isinstance(value, Real):
        return f"the number {value!r}"
    if callable(value) and hasattr(value, "__name__"):
        return f"a {'class' if isinstance(value, type) else 'function'} ({value.__name__})"
    kind = type(value)
    module = kind.__module__.partition(".")[0]
    known = module in ("builtins", "nca_trader", "numpy", "pandas")
    return a(kind.__name__) if known else f"{a(kind.__name__)} of {module}"


def a(name: str) -> str:
    """The name of a class with its article."""
    return f"an {name}" if name[0] in "AEIOaeio" else f"a {name}"


def expect(name: str, value: Any, kinds: Any, accepted: str, **others: Any) -> None:
    """Refuses an argument of another type than `kinds`.

    Args:
      name: of the argument. accepted: what may be given, for the message.
      others: the call's other arguments by name; one that would fit here was swapped with it.

    Raises:
      ConfigError: `value` is none of `kinds`.
    """
    if isinstance(value, kinds):
        return
    swapped = [
        other for other, given in others.items() if given is not None and isinstance(given, kinds)
    ]
    hint = f"; {name} and {swapped[0]} look swapped" if swapped else ""
    raise ConfigError(f"{argument(name)} is {described(value)}{hint}; give {accepted}.")


def moment(date: Any, name: str = "date") -> Any:
    """A date as a pandas Timestamp in UTC, which is also taken where it names no zone.

    Args:
      date: ISO 8601 text, e.g. "2013-01-02" or "2013-01-02T14:30Z"; or a datetime of the standard
        library, numpy or pandas. name: of the argument that it was given as.

    Raises:
      ConfigError: it is no date, or one whose day and month could be swapped.
    """
    import pandas as pd

    if isinstance(date, str) and not ISO.fullmatch(date.strip()):
        why = "is not a date"
        if re.fullmatch(r"\d{1,4}[/.-]\d{1,2}[/.-]\d{1,4}.*", date.strip()):
            why = "may mean two days"
        raise ConfigError(f"{argument(name, date)} {why}; give one such as 2013-01-02.")
    stamp: Any = pd.NaT
    if not isinstance(date, Real):  # a number is a count of what nobody said
        try:
            stamp = pd.Timestamp(date)
        except (TypeError, ValueError):
            stamp = pd.NaT
    if stamp is pd.NaT:
        raise ConfigError(f"{argument(name, date)} is not a date; give one such as 2013-01-02.")
    return stamp.tz_localize("UTC") if stamp.tz is None else stamp.tz_convert("UTC")
