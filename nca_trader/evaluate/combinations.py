"""A rule and its parameters: what they build, and their combinations in a grid or a sample."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sized
from numbers import Integral, Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nca_trader.agents.base import RULES
from nca_trader.config.account import EXITS, PLAIN
from nca_trader.config.extensions import load, module_of, origin_of
from nca_trader.config.ranges import describe, nearest
from nca_trader.config.spans import LARGEST_GRID
from nca_trader.data.features import Feature, refuse_unknown
from nca_trader.envs.account.costs import SIZES, Trade, own_rates
from nca_trader.envs.account.exits import Order
from nca_trader.envs.account.state import legs_of
from nca_trader.errors import BarError, ConfigError, user_line
from nca_trader.numerics import float64_on_cpu
from nca_trader.runs.manifest import seen_rows
from nca_trader.strategies.strategy import Strategy, arguments_needed
from nca_trader.types import Bars, Costs

SAMPLES = ("sobol", "halton", "latin", "random")
Combination = dict[str, Any]


def takes_bars(rule: Callable[..., Any], given: Container[str]) -> bool:
    """Return whether `rule`, with the parameters `given`, is a function of bars.

    Else it is a rule that returns a `Strategy`: parameters with a value are its options.
    """
    return arguments_needed(rule, given) == 1


class RuleWithLevels:
    """A rule or a function of bars whose parameters may be levels of the account as well.

    An order's own level comes first, as before that of an account.
    """

    def __init__(self, rule: Callable[..., Any], levels: tuple[str, ...]):
        """Take the rule, and the levels that are parameters."""
        functools.update_wrapper(self, rule)
        self.rule, self.levels = rule, levels

    @property
    def __signature__(self) -> inspect.Signature:
        """The rule's parameters, and the levels."""
        kind = inspect.Parameter.KEYWORD_ONLY
        own = [inspect.Parameter(name, kind, default=None) for name in self.levels]
        return inspect.Signature([*inspect.signature(self.rule).parameters.values(), *own])

    def __call__(self, *args: Any, **params: Any) -> Any:
        """Return the rule's strategy, or the function's orders, with the levels that are given."""
        given = {name: x for name in self.levels if (x := params.pop(name, None)) is not None}
        found = self.rule(*args, **params)
        if isinstance(found, Strategy):
            for name, fraction in given.items():
                found = found.with_level(name, fraction)
            return found
        orders = found if isinstance(found, Order) else Order(found)
        return orders._replace(**{n: x for n, x in given.items() if getattr(orders, n) is None})


# One object for equal ones, by which what is compiled for it is found again.
_with_levels = functools.lru_cache(maxsize=64)(RuleWithLevels)


def with_levels_of(rule: Any, grid: Iterable[str]) -> Any:
    """Return a rule that takes the account's levels in a grid as parameters, too."""
    if not callable(rule) or isinstance(rule, Strategy):
        return rule
    try:
        known = inspect.signature(rule).parameters
    except (TypeError, ValueError):  # some built-ins have no signature
        return rule
    # What a rule takes itself, e.g. as **options, is its own.
    any_name = any(p.kind is p.VAR_KEYWORD for p in known.values())
    levels = tuple(name for name in grid if name in EXITS and name not in known)
    if any_name or not levels:
        return rule
    try:
        return _with_levels(rule, levels)
    except TypeError:  # it cannot be hashed
        return RuleWithLevels(rule, levels)


def check_parameters(name: str, rule: Callable[..., Any], given: Iterable[str]) -> None:
    """Refuse parameters that a rule or a function of bars does not have.

    Raises:
      ConfigError: one that it does not have.
    """
    parameters = inspect.signature(rule).parameters
    # A rule with **options has parameters that its signature does not name.
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    # The bars are given by who runs the function.
    known = [parameter for parameter in parameters if parameter != "bars"]
    for parameter in given:
        if parameter not in known:
            has = f"It has {', '.join(known)}." if known else "It has none."
            raise ConfigError(
                f"{name}: has no parameter {parameter!r}; {nearest(parameter, known)}{has}"
            )


def refuse_seen(bars: Bars, strategy: Any, first: int, remedy: str) -> None:
    """Refuse to judge a blend on bars that trained or selected a run among its parts.

    Args:
      bars: of the judged span and before.
      strategy: what is judged.
      first: row of the first judged bar.
      remedy: the end of the message, in which `{row}` and `{date}` are of the first unseen bar.

    Raises:
      BarError: a judged bar was seen.
    """
    runs = strategy.runs if isinstance(strategy, Strategy) else ()
    seen = max((seen_rows(bars, run) for run in runs), default=0)
    if seen <= first:
        return
    after = "none is left" if seen >= len(bars) else remedy.format(row=seen, date=bars.index[seen])
    raise BarError(
        f"{strategy.name}: its runs were trained or selected on bars until {bars.index[seen - 1]}, "
        f"and would be judged on bars from {bars.index[first]}; {after}."
    )


def combinations_of(
    rule: Callable[..., Any],
    grid: Mapping[str, Iterable[Any]],
    sample: int | None = None,
    method: str = "sobol",
    seed: int = 0,
) -> list[Combination]:
    """Return the combinations of a grid, or `sample` of them.

    Args:
      rule: whose parameters the grid names.
      grid: values by name. With `sample` an entry may be a tuple `(low, high)` as well, a range
        that is drawn from: of whole numbers where both ends are, else of numbers.
      sample: how many to draw; None takes the whole grid.
      method: of drawing: "sobol" or "halton" (low discrepancy), "latin" (hypercube) or "random".
      seed: of the draw.

    Raises:
      ConfigError: no combination, or more than `LARGEST_GRID`; a parameter that the rule does not
        have; a rule that is not a function; an unknown method.

    Example:
      >>> from nca_trader.strategies.rules import sma_cross
      >>> combinations_of(sma_cross, {"fast": [5, 10], "slow": [20]})
      [{'fast': 5, 'slow': 20}, {'fast': 10, 'slow': 20}]
      >>> len(combinations_of(sma_cross, {"fast": (2, 50), "slow": (60, 200)}, sample=64))
      64
    """
    if not callable(rule):
        raise ConfigError(
            f"rule is {describe(rule)}; give a function of its parameters, e.g. "
            "nca.rules.sma_cross, without calling it."
        )
    if not isinstance(grid, Mapping):
        raise ConfigError(
            f"grid is {describe(grid)}; give values by parameter, e.g. {{'fast': range(5, 35)}}."
        )
    check_parameters(getattr(rule, "__name__", "the rule"), rule, grid)
    if sample is not None and (not isinstance(sample, Integral) or not 1 <= sample <= LARGEST_GRID):
        raise ConfigError(
            f"sample = {sample!r}; give a number of combinations from 1 to {LARGEST_GRID:,}."
        )
    if sample is None and grid:
        for parameter, values in grid.items():
            _refuse_no_values(parameter, values)
        # Counted before any list is made: a grid may have more combinations than memory.
        grid = {p: v if isinstance(v, Sized) else list(v) for p, v in grid.items()}
        lengths = {p: len(v) for p, v in grid.items()}
        size = math.prod(lengths.values())
        if size == 0:
            empty = next(p for p, length in lengths.items() if not length)
            raise ConfigError(
                f"grid: {empty!r} has no values, so there is no combination; give some."
            )
        if size > LARGEST_GRID:
            raise ConfigError(
                f"grid: {size:,} combinations ({' x '.join(f'{n:,}' for n in lengths.values())}), "
                f"more than {LARGEST_GRID:,}; take fewer values, or sample=1000 of them."
            )
        lists = [[_plain(x) for x in values] for values in grid.values()]
        return [dict(zip(grid, chosen, strict=True)) for chosen in itertools.product(*lists)]
    if not grid:
        raise ConfigError("grid is empty; give values by parameter, e.g. {'fast': range(5, 35)}.")
    return _sampled(grid, int(sample or 0), method, seed)


def _sampled(
    grid: Mapping[str, Iterable[Any]], sample: int, method: str, seed: int
) -> list[Combination]:
    if method not in SAMPLES:
        raise ConfigError(f"method {method!r}: there are {', '.join(SAMPLES)}.")
    # Imported here because it costs half a second.
    from scipy.stats import qmc

    engines = {"sobol": qmc.Sobol, "halton": qmc.Halton, "latin": qmc.LatinHypercube}
    if method == "random":
        points = np.random.default_rng(seed).random((sample, len(grid)))
    elif method == "sobol":
        # Balanced only in powers of two; the first of such a set are taken.
        exponent = max(0, (sample - 1).bit_length())
        points = qmc.Sobol(len(grid), rng=seed).random_base2(exponent)[:sample]
    else:
        points = engines[method](len(grid), rng=seed).random(sample)
    columns = [_drawn(p, v, points[:, k]) for k, (p, v) in enumerate(grid.items())]
    found = [dict(zip(grid, row, strict=True)) for row in zip(*columns, strict=True)]
    # Whole numbers are drawn more than once; a repeated trial would be no trial.
    return list({tuple(map(repr, one.values())): one for one in found}.values())


def _drawn(parameter: str, values: Any, points: np.ndarray) -> list[Any]:
    """Return a value of the entry for each point in [0, 1)."""
    _refuse_no_values(parameter, values)
    # A pair is a range, as a sample of two values would be no sample.
    if isinstance(values, tuple) and len(values) == 2 and all(_is_number(x) for x in values):
        low, high = values
        if not low < high:
            raise ConfigError(f"grid: {parameter!r} ranges from {low} to {high}; give low < high.")
        if all(isinstance(x, Integral) for x in values):
            # The upper end belongs to a range of whole numbers.
            return [int(x) for x in np.floor(low + points * (high + 1 - low))]
        return [float(x) for x in low + points * (high - low)]
    listed = [_plain(x) for x in values]
    if not listed:
        raise ConfigError(f"grid: {parameter!r} has no values, so there is no combination.")
    return [listed[int(k)] for k in np.floor(points * len(listed))]


def _refuse_no_values(parameter: str, values: Any) -> None:
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise ConfigError(
            f"grid: {parameter!r} is {describe(values)}; give its values, e.g. range(5, 35) or "
            "[0.5, 1.0]."
        )


def _plain(value: Any) -> Any:
    """Return a Python number for one of numpy."""
    return value.item() if isinstance(value, np.generic) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def traced_parameters(combinations: list[Combination]) -> list[str]:
    """Return the parameters whose values are all numbers; others (None, texts) stay as they are."""
    return [p for p in combinations[0] if all(_is_number(one[p]) for one in combinations)]


def valid(
    rule: Callable[..., Any], combinations: list[Combination]
) -> tuple[list[Combination], int, str]:
    """Build the rule for every combination, and leave out those that it refuses, e.g. fast >= slow.

    Returns:
      The others, the number left out, and the first refusal.

    Raises:
      ConfigError: a value that is not a whole number is refused wherever it occurs, so that the
        fault is the value's; or every combination is refused.
    """
    kept, refused, first = [], [], ""
    for one in combinations:
        try:
            rule(**one)
        except ConfigError as error:
            refused.append(one)
            first = first or str(error)
            continue
        kept.append(one)
    if not kept:
        raise ConfigError(f"grid: the rule refuses every combination; the first: {first}")
    for one in refused:
        for parameter, value in one.items():
            broken = isinstance(value, float) and not value.is_integer()
            if broken and all(other[parameter] != value for other in kept):
                try:
                    rule(**one)
                except ConfigError as error:
                    raise ConfigError(
                        f"grid: {parameter} = {value:g} is refused: {error}"
                    ) from None
    return kept, len(refused), first


def subject_of(name: str, params: Mapping[str, Any] | None = None) -> Any:
    """Return the strategy, function of bars or feature that a command names.

    Args:
      name: a rule, "feature:NAME", "cost:NAME", or "FILE.py:NAME"; the file is imported, so its
        code runs.
      params: of a rule, of a function that returns a strategy, or of a function of bars.

    Returns:
      A `Strategy`, a `Feature`, the name of a feature, or a function that takes bars alone.

    Raises:
      ConfigError: there is no such rule, file or name; a parameter that it does not have; a member
        that is not a strategy.
    """
    if name.startswith("feature:"):
        refuse_unknown((name.removeprefix("feature:"),))
        return name.removeprefix("feature:")
    if name.startswith("cost:"):
        return functools.partial(cost_rates, name.removeprefix("cost:"))
    if name.startswith(("reward:", "actions:")):
        raise ConfigError(f"{name}: is one step, and no function of bars; nca.check_env judges it.")
    return make_subject(member_of(name), params or {}, name)


def cost_rates(name: str, bars: Bars) -> np.ndarray:
    """Return `[N, S, A]` the rates of your own cost for trades of S sizes at each bar's open."""
    costs, money = Costs(own=(name,)), 1e6
    rules = dataclasses.replace(PLAIN, costs=costs, capital=money)
    legs = legs_of(bars, rules)  # refuses what is not a cost
    sizes = np.array([*SIZES, *(-size for size in SIZES)])
    quoted = np.zeros(legs.overnight.shape) if legs.half_spread is None else legs.half_spread
    price, volume = jnp.asarray(legs.open), jnp.asarray(legs.volume)

    def rates(size: Any, price: Any, volume: Any, quoted: Any) -> Any:
        traded = jnp.full(price.shape, size)
        return own_rates(Trade(traded, price, volume, quoted, jnp.asarray(money)), costs)[0]

    with float64_on_cpu():
        of_sizes = jax.vmap(rates, in_axes=(0, None, None, None))
        found = jax.vmap(of_sizes, in_axes=(None, 0, 0, 0))(sizes, price, volume, quoted)
    # No trade fills in a bar that is missing.
    return np.where(np.asarray(legs.present)[:, None], np.asarray(found), np.nan)


def member_of(name: str) -> Any:
    """Return the rule, or the member of the user's file, that `name` stands for, as it is.

    Raises:
      ConfigError: there is no such rule, file or member.
    """
    if name in RULES:
        return RULES[name]
    file, _, member = name.rpartition(":")
    if name.endswith(".py"):
        file, member = name, ""
    if not file.endswith(".py"):
        if origin_of("strategies", name) is None:
            raise ConfigError(
                f"{name}: no such rule; {nearest(name, RULES)}There are {', '.join(RULES)}; "
                "FILE.py:NAME or module:name is your own."
            )
        return load("strategies", name)
    module = module_of(file)
    if member in vars(module):
        return getattr(module, member)
    subjects = [
        key
        for key, value in vars(module).items()
        if isinstance(value, Strategy | Feature)
        # Functions that the file imports are left out.
        or (inspect.isfunction(value) and value.__module__ == module.__name__)
    ]
    what = f"no {member!r} there; {nearest(member, subjects)}" if member else "which of its names? "
    there = f"There are {', '.join(subjects)}." if subjects else "It defines no function."
    raise ConfigError(f"{file}: {what}{there} Write {file}:NAME.")


def make_subject(member: Any, params: Mapping[str, Any], where: str = "") -> Any:
    """Return what backtests take of a member: a strategy, a feature, or a function of bars.

    A function whose parameters all have values is called, and returns a strategy or a feature; one
    that lacks a single argument takes bars.

    Args:
      member: of `member_of`, or the user's own rule.
      params: values of parameters, by name.
      where: its name, for messages; "" takes its own.

    Raises:
      ConfigError: see `subject_of`.
    """
    where = where or getattr(member, "__name__", "the rule")
    if isinstance(member, Strategy | Feature):
        if params:
            raise ConfigError(
                f"{where}: is a {type(member).__name__} and takes no parameters; name the function "
                "that returns it."
            )
        return member
    # A class can be called too, but returns an object of its own.
    if not callable(member) or isinstance(member, type):
        raise ConfigError(
            f"{where}: a {type(member).__name__} is not a strategy; name a function of bars, a "
            "Strategy or a Feature."
        )
    check_parameters(where, member, params)
    function = functools.partial(member, **params)
    needed = arguments_needed(function)
    if needed == 1:
        # Its name and file stay those of the function, by which results and trials know it.
        return functools.update_wrapper(function, member)
    if needed:
        raise ConfigError(
            f"{where}: lacks {needed} arguments; a function of bars takes one, so give the others "
            "as parameters, or defaults."
        )
    try:
        strategy = function()
    except ConfigError:
        raise  # a rule says itself what is wrong
    except (Exception, SystemExit) as error:
        what = f"{type(error).__name__} at {user_line(error)}: {' '.join(str(error).split())}"
        raise ConfigError(f"{where}: it can't be built ({what}); repair that.") from None
    if not isinstance(strategy, Strategy | Feature):
        raise ConfigError(
            f"{where}: takes no bars and returns {describe(strategy)}; let it take bars, or "
            "return a Strategy or a Feature."
        )
    return strategy
