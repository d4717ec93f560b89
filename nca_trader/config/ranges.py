"""Checks of configs and of arguments.

A check of a config yields a sentence per problem: the value, what is wrong, the remedy. The
config's `__post_init__` passes them to `refuse`, so that all problems are reported at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from numbers import Integral, Real
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from nca_trader.errors import ConfigError, argument

T = TypeVar("T")
# ISO 8601 alone: 05/06/2006 is the sixth of May or the fifth of June, depending on the country.
ISO = re.compile(
    r"\d{4}(-\d{2}(-\d{2}([T ]\d{2}(:?\d{2}(:?\d{2}([.,]\d+)?)?)?(Z|[+-]\d{2}(:?\d{2})?)?)?)?)?"
)


def refuse(*problems: str | Iterable[str]) -> None:
    """Raise one ConfigError with one line per problem, if there is any."""
    lines = [line for some in problems for line in ([some] if isinstance(some, str) else some)]
    if lines:
        raise ConfigError(*lines)


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `"did you mean 'x'? "` with the known name closest to `word`; "" if none is close."""
    # Keys and names of presets are lower case.
    close = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'? " if close else ""


def whole(config: Any, least: int, *names: str, most: int | None = None) -> Iterator[str]:
    """Check that the fields are whole numbers from `least` to `most`; None where declared."""
    for name, value in _given(config, names):
        # Python's True is an Integral too. Numpy's integers pass.
        if isinstance(value, bool) or not isinstance(value, Integral):
            yield f"{name}={value!r} is not a whole number; give one of at least {least}."
        elif value < least:
            yield f"{name}={value} is below its least value; give at least {least}."
        elif most is not None and int(value) > most:
            yield f"{name}={value} is above its largest value; give at most {most:,}."


def between(config: Any, interval: str, *names: str) -> Iterator[str]:
    """Check that the fields are numbers in `interval`, e.g. "[0, 1)"; None where declared.

    "inf" is an end and never a value.
    """
    for name, value in _given(config, names):
        number = float(value) if isinstance(value, Real) and type(value) is not bool else math.nan
        if not within(number, interval):
            yield f"{name}={value!r} is outside its range; give a number in {interval}."


def within(number: float, interval: str) -> bool:
    """Whether a number is in an interval, e.g. "[0, 1)"; NaN is in none."""
    low, high = (float(end) for end in interval[1:-1].split(","))
    above = number > low or (interval[0] == "[" and number == low)
    return above and (number < high or (interval[-1] == "]" and number == high))


def _given(config: Any, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yield the fields that set something: not None where declared, nor what `OFF` names."""
    off = getattr(config, "OFF", {})
    for name in names:
        value = getattr(config, name)
        # Annotations are text here, since the modules of configs postpone them.
        may = getattr(type(config), name, 0) is None  # its default
        unset = value is None and (may or "None" in str(type(config).__annotations__[name]))
        if not unset and (name not in off or value != off[name]):
            yield name, value


def one_of(config: Any, name: str, allowed: Iterable[str]) -> Iterator[str]:
    """Check that the field is one of the allowed words."""
    allowed = tuple(allowed)
    value = getattr(config, name)
    if value not in allowed:
        words = ", ".join(f"'{word}'" for word in allowed)
        yield f"{name}={value!r} is not known; {nearest(str(value), allowed)}It may be {words}."


def multiple(name: str, value: int, of_name: str, of: int) -> Iterator[str]:
    """Check that `value` is a multiple of `of`."""
    if value % of:
        near = max(of, round(value / of) * of)  # never 0, which is a multiple of everything
        yield f"{name}={value} is not a multiple of {of_name}={of}; the nearest that is: {near}."


def divides(name: str, value: int, of_name: str, of: int) -> Iterator[str]:
    """Check that `value` divides `of`."""
    if of % value:
        # In pairs, and not all of a huge number, which a file may hold.
        low = (d for d in range(1, min(math.isqrt(of), 1 << 16) + 1) if of % d == 0)
        divisors = sorted(each for d in low for each in (d, of // d))
        near = min(divisors, key=lambda d: abs(d - value))
        yield f"{name}={value} does not divide {of_name}={of}; the nearest that does is {near}."


def without_effect(
    config: Any, given: Mapping[str, Any] | None = None, defaults: Mapping[str, Any] | None = None
) -> Iterator[str]:
    """Check that fields without effect are at their defaults.

    Args:
      config: a dataclass with `idle(given)`, which yields the name of each field that changes
        nothing given the values `given`, also as table.field, and the setting that it needs.
      given: the values that are checked, by name; None are all.
      defaults: None are those of the class.
    """
    for name, needs in config.idle(config):
        table, _, key = name.rpartition(".")
        part = getattr(config, table) if table else config
        default = (defaults_of(type(part)) if defaults is None else defaults)[key]
        value = getattr(part, key) if given is None else given.get(key, default)
        if value != default:
            yield (
                f"{name}={value!r} has no effect without {needs}; leave it out (its default is "
                f"{default!r}), or give {needs}."
            )


def effective(cls: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a config without those that have no effect, see `without_effect`."""
    defaults = defaults_of(cls)
    kept = dict(given)
    for name, _ in cls.idle(SimpleNamespace(**defaults | given)):
        table, _, key = name.rpartition(".")
        if table in kept:
            default = defaults_of(type(kept[table]))[key]
            kept[table] = dataclasses.replace(kept[table], **{key: default})
        kept.pop(name, None)
    return kept


def switch(config: T, **changes: Any) -> T:
    """Return a copy of a config with `changes`; fields that they switch off get their defaults."""
    given = {name: getattr(config, name) for name in defaults_of(type(config))}
    return type(config)(**effective(type(config), given | changes) | changes)


def defaults_of(cls: Any) -> dict[str, Any]:
    """Return the default of each field of a dataclass, by name."""
    return {field.name: field.default for field in dataclasses.fields(cls)}


def describe(value: Any) -> str:
    """Describe a value in a few words: `the number 0.001`, `a function (my_rule)`."""
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
    """Return the name of a class with its article."""
    return f"an {name}" if name[0] in "AEIOaeio" else f"a {name}"


def expect(name: str, value: Any, kinds: Any, accepted: str, **others: Any) -> None:
    """Check the type of an argument.

    Args:
      name: of the argument.
      value: that was given.
      kinds: a class, a union of classes or a tuple of them, as `isinstance` takes.
      accepted: what may be given, for the message.
      others: the call's other arguments by name. The message suggests that `value` was swapped
        with the first of them that has the right type.

    Raises:
      ConfigError: `value` is none of `kinds`.
    """
    if isinstance(value, kinds):
        return
    swapped = [
        other for other, given in others.items() if given is not None and isinstance(given, kinds)
    ]
    hint = f"; {name} and {swapped[0]} look swapped" if swapped else ""
    raise ConfigError(f"{argument(name)} is {describe(value)}{hint}; give {accepted}.")


def take_settings(name: str, cls: type[T], whole: T | None, given: dict[str, Any]) -> T:
    """Return settings that a caller gives as one object, or by the names of its fields.

    Args:
      name: of the argument that takes the object.
      cls: a dataclass.
      whole: the object; None where it is not given.
      given: keyword arguments; the fields of `cls` are taken out.

    Raises:
      ConfigError: `whole` is another object, or both are given.
    """
    fields = dataclasses.fields(cast(Any, cls))
    own = {f.name: given.pop(f.name) for f in fields if f.name in given}
    if whole is None:
        return cls(**own)
    expect(name, whole, cls, f"nca.{cls.__name__}(...)")
    if own:
        raise ConfigError(
            f"{argument(name)} is given, and {', '.join(own)} as well; give one of the two."
        )
    return whole


def moment(date: Any, name: str = "date") -> Any:
    """Return a date as a pandas Timestamp in UTC; a date without a zone is read as UTC.

    Args:
      date: ISO 8601 text, e.g. "2013-01-02" or "2013-01-02T14:30Z"; or a datetime of the standard
        library, numpy or pandas.
      name: of the argument, for the message.

    Raises:
      ConfigError: it is not a date, or its day and month could be swapped.
    """
    import pandas as pd  # slow to import

    # pandas would also read "05/06/2006", as the sixth of May, and a lone time as today's.
    if isinstance(date, str) and not ISO.fullmatch(date.strip()):
        why = "is not a date"
        if re.fullmatch(r"\d{1,4}[/.-]\d{1,2}[/.-]\d{1,4}.*", date.strip()):
            why = "may mean two days"
        raise ConfigError(f"{argument(name, date)} {why}; give one such as 2013-01-02.")
    stamp: Any = pd.NaT
    # pandas would read a number as nanoseconds since 1970. A date was meant.
    if not isinstance(date, Real):
        with contextlib.suppress(TypeError, ValueError):
            stamp = pd.Timestamp(date)
    if stamp is pd.NaT:
        raise ConfigError(f"{argument(name, date)} is not a date; give one such as 2013-01-02.")
    return stamp.tz_localize("UTC") if stamp.tz is None else stamp.tz_convert("UTC")
