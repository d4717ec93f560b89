"""Settings of a walk-forward and of a search that are checked before anything slow is imported."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple, cast

from nca_trader.config.agent import AgentConfig
from nca_trader.config.ranges import expect, moment, nearest
from nca_trader.config.records import loads
from nca_trader.config.toml import read_preset
from nca_trader.errors import ConfigError, argument

SCHEMES = ("rolling", "expanding")
# By which a train span may choose: a larger value is better.
METRICS = ("sharpe", "sortino", "calmar", "cagr", "total_return", "hit_rate", "max_drawdown")
LARGEST_GRID = 1_000_000  # combinations: more are a search for luck, and hours of work


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spans:
    """How bars are cut into folds, by numbers of bars or by dates.

    >>> Spans(train=1000, test=250, purge=5).dated
    False
    >>> Spans(train="2010", test=("2015", "2018"), scheme="expanding").dated
    True

    Attributes:
      train: bars of each train span, of the first one where it expands; or the date at which the
        first one begins.
      test: bars of each test span; or the dates at which test spans begin, e.g. `("2015", "2018")`.
        Each ends where the next begins, the last one at the last bar.
      purge: bars left out of the train span next to a test span, e.g. the horizon of a label, whose
        outcome lies in the test span.
      embargo: further bars that are left out, so that serial correlation has died down: there are
        `purge + embargo` bars between the train span and its test span.
      scheme: "rolling": each train span is as long as the first. "expanding": each begins where the
        first does.
    """

    train: int | str | None = None
    test: int | Sequence[str] | None = None
    purge: int = 0
    embargo: int = 0
    scheme: str = "rolling"

    @property
    def dated(self) -> bool:
        """Whether the test spans begin at dates."""
        return isinstance(self.test, Sequence) and not isinstance(self.test, str)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """How a walk-forward, or a search, trains its agents.

    Attributes:
      env: their environment, a config, a preset's name or a path.
      seeds: agents of each fold, whose mean order is traded, or of each trial, whose mean score
        counts. None is the agent's `num_seeds`, or 3 where that is 1; in a search 1.
      steps: environment steps of each agent; None is the agent's own.
      seed: of all random numbers; agent i of a fold or a trial trains with `seed + i`.
      warm_start: whether each fold's agents begin with the parameters of the fold before.
      deploy: a run that `WalkForward.deploy` will be asked about; refused before the first fold
        where it would be refused there.
      name: for reports; None is that of the preset, the file or the strategy.
      track: shows each trial, or each fold and the whole, elsewhere; see `nca.train`. Folds of
        strategies too.

    Example:
      >>> Training(env="index_daily", seeds=5, steps=500_000).seeds
      5
    """

    env: Any = None
    seeds: int | None = None
    steps: int | None = None
    seed: int = 0
    warm_start: bool = False
    deploy: Any = None
    name: str | None = None
    track: Any = None

    def __post_init__(self):
        if self.seeds is not None:
            _refuse_size("seeds", self.seeds, 1, "a whole number")

    def refuse(self, why: str, *names: str) -> None:
        """Refuse the fields `names` where they are given; `why` they have no effect."""
        for name in names:
            if getattr(self, name) not in (None, False, 0):
                raise ConfigError(f"{argument(name)}: {why}; leave it out.")


def check_spans(spans: Spans) -> None:
    """Validate spans by themselves, before the bars are known.

    Raises:
      ConfigError: a size that is not a whole number or out of range, dates that are not in order,
        an unknown scheme, a purge and embargo that leave nothing of the train span.
    """
    _refuse_unknown("scheme", spans.scheme, SCHEMES)
    for name in ("purge", "embargo"):
        _refuse_size(name, getattr(spans, name), 0)
    for name in ("train", "test"):
        if getattr(spans, name) is None:
            raise ConfigError(f"{argument(name)} is missing; give its number of bars.")
    train, test = cast(Any, spans.train), cast(Any, spans.test)
    if spans.dated:
        dates = [moment(date, "test") for date in test]
        if any(b <= a for a, b in itertools.pairwise(dates)):
            raise ConfigError(f"{argument('test')}: the dates are not in order; sort them.")
    else:
        _refuse_size("test", test, 1)
        if isinstance(train, str):
            raise ConfigError(
                f"{argument('train', train)} is a date; give {argument('test')} by dates too."
            )
    if isinstance(train, Real) or not spans.dated:
        _refuse_size("train", train, 1)
        gap = spans.purge + spans.embargo
        if gap >= train:
            raise ConfigError(
                f"{argument('purge')} {spans.purge} and {argument('embargo')} {spans.embargo} "
                f"leave nothing of a train span of {train} bars; give fewer, or a longer "
                "span."
            )


def check_metric(metric: str) -> None:
    """Refuse a metric by which nothing can be chosen."""
    _refuse_unknown("metric", metric, METRICS)


def _refuse_unknown(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(
            f"{argument(name, value)}: no such {name}; {nearest(value, known)}There are "
            f"{', '.join(known)}."
        )


def _refuse_size(name: str, value: Any, least: int, what: str = "a whole number of bars") -> None:
    expect(name, value, Integral, what)
    if isinstance(value, bool) or value < least:
        raise ConfigError(f"{argument(name, value)}: give a whole number of at least {least}.")


def _number(text: str, whole: str) -> int | float:
    for read in (int, float):
        with contextlib.suppress(ValueError):
            return read(text)
    raise ConfigError(f"{whole}: {text!r} is not a number; correct it.")


def _named(text: str, name: str, example: str, known: Mapping[str, Any]) -> tuple[str, str]:
    key, sign, values = text.partition("=")
    if not key.isidentifier() and not all(part.isidentifier() for part in key.split(".")):
        sign = ""
    if not sign or not values:
        raise ConfigError(f"{argument(name, text)}: write NAME=VALUES, e.g. {example}.")
    if key in known:
        raise ConfigError(f"{argument(name, text)}: {key} is given twice; give it once.")
    return key, values


def parse_grid(
    texts: Sequence[str], sampled: bool = False, name: str = "grid"
) -> dict[str, Sequence[Any]]:
    """Parse the values of parameters: "fast=5:35:5", without 35, or "fast=5,10,null".

    Args:
      texts: one for each parameter.
      sampled: whether START:STOP is a range to draw from, with both ends; else its step is 1.
      name: of the option.

    Raises:
      ConfigError: another form, a name that is given twice, or more than `LARGEST_GRID`
        combinations.

    Example:
      >>> parse_grid(["fast=5:20:5", "slow=50,100", "stop=null"])
      {'fast': range(5, 20, 5), 'slow': [50, 100], 'stop': [None]}
    """
    found: dict[str, Sequence[Any]] = {}
    for text in texts:
        key, values = _named(text, name, "fast=5:35:5 or fast=5,10,20", found)
        said = argument(name, text)
        if ":" not in values:
            found[key] = [value_of(part) for part in values.split(",")]
            continue
        ends = [_number(part, said) for part in values.split(":")]
        if sampled and len(ends) == 2:
            found[key] = tuple(ends)
            continue
        start, stop, step = (*ends, 1)[:3]
        if len(ends) > 3 or not step > 0 or not start < stop:
            raise ConfigError(
                f"{said}: give START:STOP or START:STOP:STEP with START < STOP and a STEP above 0."
            )
        if all(isinstance(end, int) for end in ends):
            found[key] = range(int(start), int(stop), int(step))
            continue
        # A little less, so that 0.1:0.3:0.1 has no third value by rounding.
        count = math.ceil((stop - start) / step - 1e-9)
        found[key] = [round(start + k * step, 12) for k in range(min(count, LARGEST_GRID + 1))]
    size = math.prod(len(values) for values in found.values())
    if size > LARGEST_GRID and not sampled:
        raise ConfigError(
            f"{argument(name)}: {size:,} combinations, more than {LARGEST_GRID:,}; give fewer "
            "values."
        )
    return found


def value_of(text: str) -> Any:
    """Return a number, a truth value, None for null, or the text itself."""
    for read in (loads, float):  # JSON has no ".5"
        with contextlib.suppress(ValueError):
            return read(text)
    return text


class Range(NamedTuple):
    """Values of one hyper-parameter of a search.

    Attributes:
      choices: to choose from; () for a range of numbers.
      low: the lower end of the range.
      high: the upper end; whole numbers where both ends are.
      log: whether the logarithm is uniform.
    """

    choices: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False


def parse_space(texts: Sequence[str]) -> dict[str, Range]:
    """Parse a space of hyper-parameters: "TABLE.KEY=LOW:HIGH", "...:log", or "TABLE.KEY=A,B,C".

    Raises:
      ConfigError: another form.

    Example:
      >>> parse_space(["learner.discount=0.9:0.99"])["learner.discount"].high
      0.99
    """
    found: dict[str, Range] = {}
    example = "optimizer.learning_rate=1e-5:1e-2:log or policy.channels=8,16,32"
    for text in texts:
        key, values = _named(text, "space", example, found)
        said = argument("space", text)
        ends = values.split(":")
        if len(ends) == 1:
            found[key] = Range(choices=tuple(value_of(part) for part in values.split(",")))
            continue
        if len(ends) > 3 or (len(ends) == 3 and ends[2] != "log"):
            raise ConfigError(f"{said}: write LOW:HIGH or LOW:HIGH:log, e.g. {example}.")
        low, high = _number(ends[0], said), _number(ends[1], said)
        log = len(ends) == 3
        if not low < high or (log and low <= 0):
            least = "0 < LOW < HIGH" if log else "LOW < HIGH"
            raise ConfigError(f"{said}: the ends must be {least}; correct them.")
        found[key] = Range(low=low, high=high, log=log)
    return found


def check_optuna() -> None:
    """Refuse where Optuna is not installed; it is imported later, as it is slow.

    Raises:
      ConfigError: with what to install.
    """
    if importlib.util.find_spec("optuna") is None:
        raise ConfigError("a search needs Optuna, which is not installed; pip install optuna.")


def check_space(agent: AgentConfig, space: Mapping[str, Range]) -> None:
    """Refuse a key that the agent does not have, and an end that it does not accept."""
    for key, values in space.items():
        for value in values.choices or (values.low, values.high):
            read_preset(AgentConfig, agent, "agents", [override(key, value)])


def override(key: str, value: Any) -> str:
    """Return the text that changes a key of an agent to a value."""
    return f"{key}={json.dumps(value) if isinstance(value, str | bool) else value}"
