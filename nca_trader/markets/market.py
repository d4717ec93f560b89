"""Synthetic markets: how they are drawn, and what they pay."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from nca_trader.config import EnvConfig
from nca_trader.config.extensions import call_named, installed_points, load, origin_of
from nca_trader.config.ranges import between, describe, nearest, one_of, refuse, whole
from nca_trader.config.records import SHOWN, read_toml
from nca_trader.errors import ConfigError
from nca_trader.machine import memory
from nca_trader.numerics import float64_on_cpu
from nca_trader.types import Bars, Costs, Tensor

SOURCE, SEED = "synthetic ", ", seed "  # of bars: which draw they are
PRICE = 100.0  # before the first bar, where the market sets no other
CELL_BYTES = 100  # at least, of one bar of one asset while a draw is made (measured: 136 to 174)
BAR = np.timedelta64(60, "s")
BEGINNING = np.datetime64("2000-01-01", "ns")

# Every market that can be had by name; `builder` adds each one.
MARKETS: dict[str, Callable[..., SyntheticMarket]] = {}

Policy = Callable[[Tensor, Tensor], Tensor]
Pay = Callable[[Tensor, Tensor, Tensor], Tensor]


Density = Callable[[np.ndarray, np.ndarray], np.ndarray]
Mean = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Chain:
    """The problem of a market whose state is one of n, see `nca_trader.optimum.optima.switching`.

    Attributes:
      chain: `[n, n]` probabilities of the next state.
      mean: `[n]` of the next return.
      cost: of turnover, at least 0.
      cuts: `[n - 1]` numbers between the states, ascending.
    """

    chain: np.ndarray
    mean: np.ndarray
    cost: float
    cuts: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Coupled:
    """The problem of assets that share a limit, see `nca_trader.optimum.optima.coupled`.

    Each state variable is -1 or 1, each asset short, flat or long. States and positions are in the
    order of binary and ternary numbers.

    Attributes:
      chain: `[n, n]` probabilities of the next state.
      pay: `[n, P, P]` expected, in a state, from the position held to the next one.
      held: `[P, A]` positions, scaled to the limit.
    """

    chain: np.ndarray
    pay: np.ndarray
    held: np.ndarray


class MarkovProcess(NamedTuple):
    """The problem of a market whose state is a function of a number x.

    Attributes:
      density: `density(y, x)`, the density of the next y at x; broadcasts.
      mean: `mean(x)`, the next return's mean.
      low: lower end of a range that x leaves with negligible probability.
      high: upper end of that range.
      width: of a panel: at most 1.5 standard deviations of the next x.
      cost: of turnover, at least 0.
      state: `state(x)`, monotone.
    """

    density: Density
    mean: Mean
    low: float
    high: float
    width: float
    cost: float
    state: Mean = np.asarray


class Path(NamedTuple):
    """One path of a market, in JAX's default float type.

    Attributes:
      states: `[N, S]` what is known at each bar's close; S may be 0.
      returns: `[N, A]` log or simple returns, from the close before each bar to its own.
      start: `[A]` log of the price before the first bar, relative to `PRICE`.
    """

    states: Array
    returns: Array
    start: Array


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SyntheticMarket:
    """A market of `A` assets; its functions are pure and jittable.

    The convention everywhere: at the close of bar t an agent sees the state, sets its position
    `a_t`, a weight in each asset, and earns `pay(a_{t-1}, a_t, r_{t+1})`. For most markets that
    is `sum_i a_i r_i - c sum_i |a_i - a_{t-1,i}|`, c being `costs.commission`.

    Attributes:
      reward: "log" or "simple": the kind of return r that `pay` takes.
      generate: `generate(key, num_bars) -> Path`; compiled once per `num_bars`.
      name: a key of `MARKETS`, or of a market of your own.
      parameters: all of them, with defaults filled in.
      pay: `pay(previous [..., A], position [..., A], r [..., A]) -> [...]`.
      score: maps the mean of `pay` to the unit of `optimum`; for most markets the identity.
      num_assets: A.
      state_names: S names.
      moments: long-run mean and deviation of each state variable, S numbers each.
      bounds: of each asset's position, which may be inf.
      costs: the cost of turnover in an environment.
      problem: what remains to be solved for the optimum, see `optimum.optima`; None where it
        is a formula, or not known.
      optimum: the best long-run average reward per step, or None where it is not known.
      optimal_policy: `optimal_policy(state [..., S], position [..., A]) -> [..., A]` attains it,
        for numpy and jax arrays; `position` is the one held.
      expected_return: `expected_return(state [..., S]) -> [..., A]`, E[r of the next bar]. Where
        `pay` is linear in r, paying it instead of r takes the noise out of an evaluation.
      volume: `volume(state [..., S]) -> [..., A]` of the bar at whose close the state is known.
        Bars show a state by it that prices do not show. None is a volume of 1.
      environment: fields of the `EnvConfig` in which an agent earns what the market pays. Its
        `max_gross` binds positions, see `held`.
      score_reward: maps the mean reward of that environment to the unit of `optimum`.
      details: other parts of the solution, e.g. the cuts of a threshold rule.
    """

    reward: str
    generate: Callable[[Array, int], Path]
    pay: Pay
    name: str = "own"
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    score: Callable[[float], float] = float
    num_assets: int = 1
    state_names: tuple[str, ...] = ()
    moments: tuple[Sequence[float], Sequence[float]] = ((), ())
    bounds: tuple[float, float] = (-1.0, 1.0)
    costs: Costs = Costs()
    problem: Chain | Coupled | MarkovProcess | None = None
    optimum: float | None = None
    optimal_policy: Policy | None = None
    expected_return: Callable[[Tensor], Tensor] | None = None
    volume: Callable[[Tensor], Tensor] | None = None
    environment: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    score_reward: Callable[[float], float] = float
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def config(self) -> EnvConfig:
        """The environment that pays what the market pays, apart from the noise of a finite draw.

        Positions are held at constant size, or as `environment` says. Orders fill at the close,
        which is the next bar's open; cash does not bind.
        """
        low, high = self.bounds
        # JSON's numbers and texts are TOML's too, and `market_of` reads them as TOML.
        given = (f"{name}={json.dumps(value)}" for name, value in self.parameters.items())
        fields: dict[str, Any] = {
            # Where there is a state, an agent sees it in place of features.
            "features": () if self.state_names else ("return_1",),
            "fill": "close",
            "reward": "pnl",
            "pnl_returns": self.reward,
            "short": low < 0.0,
            "size": high,
            # Neither leverage, cash nor bankruptcy binds, as in the solution.
            "max_gross": None,
            "borrow": True,
            "costs": self.costs,
            "ruin_floor": 1e-300,
            "market": f"{self.name}({', '.join(given)})",
        }
        fields |= self.environment
        if fields["reward"] != "pnl":
            # The config refuses a field that has no effect.
            del fields["pnl_returns"]
        return EnvConfig(**fields)

    def held(self, position: np.ndarray) -> np.ndarray:
        """Return positions `[..., A]` as an account scales them down to the market's limit."""
        return within(self.environment.get("max_gross"), position)

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.parameters.items())
        known = "" if self.optimum is None else f"; optimum={self.optimum}"
        return f"{type(self).__name__}({self.name}: {given}{known})"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Task(SyntheticMarket):
    """A market and one draw of it.

    Attributes:
      bars: `N` bars of one minute; `open` is the close before, so both fills agree.
      states: `[N, S]` float64, as in `Path`.
      returns: `[N, A]` float64, as in `Path`.
      seed: of the draw.
    """

    bars: Bars
    states: np.ndarray
    returns: np.ndarray
    seed: int

    @property
    def config(self) -> EnvConfig:
        """The environment of exactly these bars."""
        return dataclasses.replace(super().config, market_bars=len(self.bars))

    @property
    def signal_names(self) -> tuple[str, ...]:
        """Names of the columns of `signals`."""
        return ("own_return",) if self._a_state_each else self.state_names

    @functools.cached_property
    def signals(self) -> np.ndarray:
        """`[N, A, S]` the state as an agent sees it, approximately standardised.

        Where each asset has a state of its own, it sees that alone. Mean and deviation are those
        of the market and not of a draw: the same state is the same number on every path.
        """
        # Moments of the draw would tell a bar about later ones.
        mean, deviation = (np.asarray(moment, np.float64) for moment in self.moments)
        standard = (self.states - mean) / deviation
        if self._a_state_each:
            return standard[:, :, None]
        return np.repeat(standard[:, None, :], self.num_assets, axis=1)

    @property
    def _a_state_each(self) -> bool:
        return self.num_assets > 1 and len(self.state_names) == self.num_assets

    def rewards(self, positions: np.ndarray) -> np.ndarray:
        """Compute what positions earn on the next bar.

        Args:
          positions: `[N, A]`, set at each close; flat before the first.

        Returns:
          `[N - 1]` rewards.

        Raises:
          ConfigError: the positions have another shape.

        Example:
          >>> import numpy as np
          >>> task = task_of(EnvConfig(market="ou", market_bars=4))
          >>> task.rewards(np.zeros((4, 1)))
          array([0., 0., 0.])
        """
        if positions.shape != self.returns.shape:
            raise ConfigError(
                f"positions have shape {positions.shape} where [N, A] = {self.returns.shape} is "
                "expected; give one position per bar and asset."
            )
        positions = self.held(positions)
        # The last position earns on a bar that was not drawn, so it is left out.
        previous = np.concatenate([np.zeros_like(positions[:1]), positions[:-2]])
        return np.asarray(self.pay(previous, positions[:-1], self.returns[1:]))


class PriceOutOfRange(ConfigError):
    """A drawn price leaves the range of a float; a path of fewer bars may not."""


def draw(market: SyntheticMarket, num_bars: int, seed: int) -> Task:
    """Draw `num_bars` bars of a market, in float64.

    Raises:
      PriceOutOfRange: the prices leave the range of a float. ConfigError: too few bars are asked
        for, or more than memory holds.
    """
    check({"num_bars": num_bars, "seed": seed}, {"num_bars": 2, "seed": 0})
    # A process that is killed for memory leaves no message, so this is checked first.
    need, free = CELL_BYTES * num_bars * market.num_assets, memory().free
    if need > free:
        raise ConfigError(
            f"num_bars={num_bars}: bars of {market.num_assets} assets take {need / 1e9:.3g} GB, "
            f"and {free / 1e9:.3g} GB are free; give fewer (market_bars of an environment)."
        )
    # A GPU takes 20 us for each bar of a recursion: 90 s for a path of four million, a CPU 6. And a
    # seed draws the same path on every machine.
    with float64_on_cpu():
        # A failed allocation raises here; numpy's view of it would end the process.
        path = jax.block_until_ready(market.generate(jax.random.key(seed), num_bars))
        states, returns, start = (np.asarray(part, np.float64) for part in path)
    # Field by field: `asdict` would copy functions and nested records.
    given = {
        field.name: getattr(market, field.name) for field in dataclasses.fields(SyntheticMarket)
    }
    bars = bars_of(market, states, returns, start, seed)
    return Task(**given, bars=bars, states=states, returns=returns, seed=seed)


def bars_of(
    market: SyntheticMarket, states: np.ndarray, returns: np.ndarray, start: np.ndarray, seed: int
) -> Bars:
    """Return bars with returns `[N, A]`, each from the close before straight to its own."""
    if market.reward == "simple":
        if not (returns > -1.0).all():
            raise ConfigError(
                f"{market!r}: a return of {returns.min():.3g} takes the price to zero or below; "
                "give a smaller sigma."
            )
        returns = np.log1p(returns)
    # Summed in logs and exponentiated once, so that errors do not multiply.
    level = np.cumsum(np.concatenate([np.log(PRICE) + start[None, :], returns]), axis=0)
    # `not <` refuses NaN as well.
    if not np.abs(level).max() < 690.0:  # exp(709) is the largest float64
        raise PriceOutOfRange(
            f"{market!r}: after {len(returns):,} bars the price is exp({level[-1].min():.0f}), "
            "more than a float holds; give fewer bars or smaller moves."
        )
    price = np.exp(level)
    before, after = price[:-1], price[1:]
    length, width = returns.shape
    shown = np.ones((length, width)) if market.volume is None else market.volume(states)
    return Bars(
        time=BEGINNING + np.arange(length) * BAR,
        symbols=tuple(f"{market.name.upper()}{i if width > 1 else ''}" for i in range(width)),
        open=before,
        high=np.maximum(before, after),
        low=np.minimum(before, after),
        close=after,
        volume=np.asarray(shown),
        present=np.ones((length, width), bool),
        source=f"{SOURCE}{market.name}{SEED}{seed}",
        note=f"A synthetic market: {market.name}.",
    )


def seed_of(source: str) -> int:
    """Return the seed of the draw whose bars have this `source`.

    Raises:
      ConfigError: the bars are not from a synthetic market.
    """
    seed = source.rpartition(SEED)[2]
    if not (source.startswith(SOURCE) and seed.isdecimal()):
        raise ConfigError(f"{source!r} names no draw of a synthetic market; give a bar file.")
    return int(seed)


def builder(
    **ranges: str | int | tuple[str, ...],
) -> Callable[[Callable[..., SyntheticMarket]], Callable[..., SyntheticMarket]]:
    """Decorate a function of parameters that returns a market.

    The market has the function's name and all its parameters, its generator is compiled, and
    parameters out of range are refused. `MARKETS` holds it by that name.

    Args:
      **ranges: by parameter an interval such as "[0, 1)", the least value of a whole number, or
        the words that are allowed.
    """

    def decorate(build: Callable[..., SyntheticMarket]) -> Callable[..., SyntheticMarket]:
        # One problem, solved once, and one generator, compiled once, for equal parameters.
        @functools.lru_cache(maxsize=16, typed=True)
        def build_once(**given: Any) -> SyntheticMarket:
            made = build(**given)
            # The number of bars is a shape, so each one is compiled once.
            return dataclasses.replace(made, generate=jax.jit(made.generate, static_argnums=1))

        @functools.wraps(build)
        def checked(**given: Any) -> SyntheticMarket:
            bound = inspect.signature(build).bind(**given)
            # With defaults, so that the `market` of an environment names every parameter.
            bound.apply_defaults()
            check(bound.arguments, ranges)
            made = build_once(**bound.arguments)
            return dataclasses.replace(made, name=build.__name__, parameters=bound.arguments)

        MARKETS[build.__name__] = checked
        return checked

    return decorate


def check(given: Mapping[str, Any], ranges: Mapping[str, str | int | tuple[str, ...]]) -> None:
    """Refuse parameters out of range; see `builder` for `ranges`."""
    values = SimpleNamespace(**given)

    def problems() -> Iterator[str]:
        for name, allowed in ranges.items():
            if isinstance(allowed, tuple):
                yield from one_of(values, name, allowed)
            elif isinstance(allowed, int):
                yield from whole(values, allowed, name, most=2**63 - 1)
            else:
                yield from between(values, allowed, name)

    refuse(problems())


def recur(step: Callable[[Any, Any], Any], first: Any, noise: Any) -> Any:
    """Return the states x_t = step(x_{t-1}, noise_t), from x before the first."""

    def both(x: Any, shock: Any) -> tuple[Any, Any]:
        x = step(x, shock)
        return x, x

    return jax.lax.scan(both, first, noise)[1]


def autoregression(key: Array, num_bars: int, phi: float, sigma: float) -> tuple[Array, Array]:
    """Draw `[]` x before the first bar, stationary, and `[N]` x[t] = phi x[t-1] + sigma eps."""
    first_key, key = jax.random.split(key)
    first = sigma / math.sqrt(1 - phi**2) * jax.random.normal(first_key)
    noise = sigma * jax.random.normal(key, (num_bars,))
    return first, recur(lambda x, shock: phi * x + shock, first, noise)


def within(gross: float | None, position: np.ndarray) -> np.ndarray:
    """Return positions `[..., A]`, each vector scaled down to a sum of sizes of `gross`."""
    if gross is None:
        return position
    return position / np.maximum(abs(position).sum(-1, keepdims=True) / gross, 1.0)


def linear_pay(cost: float) -> Pay:
    """Return the pay `sum_i a_i r_i - c sum_i |a_i - a_prev_i|`."""

    def pay(previous: Tensor, position: Tensor, r: Tensor) -> Tensor:
        turnover = abs(position - previous)
        return (position * r).sum(axis=-1) - cost * turnover.sum(axis=-1)

    return pay


def market(name: str, **parameters: Any) -> SyntheticMarket:
    """Return the market called `name`, see `nca_trader.optimum.optima.synthetic.market`."""
    if name not in MARKETS:
        names = [*MARKETS, *installed_points("markets")]
        raise ConfigError(
            f"no synthetic market '{name}'; {nearest(str(name), names)}There are "
            f"{', '.join(names)}, and module:name of your own."
        )
    known = inspect.signature(MARKETS[name]).parameters
    for unknown in parameters.keys() - known.keys():
        raise ConfigError(
            f"the market '{name}' has no parameter '{unknown}'; {nearest(unknown, known)}It has "
            f"{', '.join(known)}."
        )
    return MARKETS[name](**parameters)


def task_of(config: EnvConfig, seed: int = 0, market: SyntheticMarket | None = None) -> Task:
    """Draw `config.market_bars` bars of the market that `config.market` names.

    Args:
      config: of the environment.
      seed: of the draw.
      market: that it names, where the caller has it; made here without.

    Raises:
      ConfigError: see `market_of`; or the market has no such path.
    """
    return _own_task(config, seed) or draw(market or market_of(config), config.market_bars, seed)


def _own_task(config: EnvConfig, seed: int) -> Task | None:
    """Draw a market of your own; None where the config names another one."""
    text, num_bars = config.market, config.market_bars
    bare = text.partition("(")[0].strip()
    if bare in MARKETS or (origin := origin_of("markets", text)) is None:
        return None
    if (values := origin[0].values) is not None:
        bare = text.removesuffix(f"({values})")  # the path of a file may have brackets as well
    task = function = load("markets", bare)
    if callable(function):
        task = call_named(function, text, values or "", num_bars=num_bars, seed=seed)
    if not (callable(function) and isinstance(task, Task)):
        raise ConfigError(
            f"{text}: {'returned' if callable(function) else 'is'} {describe(task)}; give a "
            "function of num_bars and seed that returns a Task, e.g. that of nca.synthetic.make."
        )
    size, count = (num_bars, task.num_assets), len(task.state_names)
    arrays = (task.bars.close, task.returns, task.states, *task.moments)
    found = tuple(map(np.shape, arrays))
    if found != (shapes := (size, size, (num_bars, count), (count,), (count,))):
        raise ConfigError(
            f"{text}: its bars, returns, states and moments are of shapes {found}; return "
            f"{shapes}, with num_assets=A of a SyntheticMarket of A assets."
        )
    given = read_toml(f"values = {{{values or ''}}}", text)["values"]
    # The source is what a run records of the draw, and by which the same one is made again.
    bars = dataclasses.replace(task.bars, source=f"{SOURCE}{text}{SEED}{seed}")
    return dataclasses.replace(task, name=bare, parameters=given, bars=bars, seed=seed)


def market_of(config: EnvConfig) -> SyntheticMarket:
    """Return the market that `config.market` names, e.g. "ou(phi=0.95, cost=0.005)".

    Of a market of your own it is a draw.

    Raises:
      ConfigError: no name, or an unknown one; a parameter is unknown or out of range.
    """
    if own := _own_task(config, 0):
        return own
    given = config.market
    if not given:
        raise ConfigError("no bars, and the environment names no market; give a bar file.")
    match = re.fullmatch(r"\s*(\w+)\s*(?:\((.*)\))?\s*", given, re.DOTALL)
    try:
        if match is None:
            raise ConfigError
        # The inside of a TOML inline table, so that values are written as everywhere in a config.
        parameters = read_toml(f"market = {{{match[2] or ''}}}", "market")["market"]
    except ConfigError:
        # A mistyped file may hold a page of text, and a message is one line.
        text = given if len(given) <= 2 * SHOWN else given[: 2 * SHOWN] + "..."
        raise ConfigError(
            f"market = {text!r} is not a market; write a name and its parameters, e.g. "
            "'ou(phi=0.95, cost=0.005)'."
        ) from None
    return market(match[1], **parameters)
