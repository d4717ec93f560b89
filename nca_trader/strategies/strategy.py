"""A strategy of your own: two functions that see one closed bar at a time.

A strategy is an online update like a feature. It receives a bar when the bar is closed, so it
cannot look ahead, and a backtest, a sweep, `leakcheck` and the paper loop run the same object.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Container, Iterable, Mapping
from numbers import Real
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import ArrayLike

from nca_trader.config import AccountConfig
from nca_trader.config.account import EXITS, CovarianceSizing, Sizing, refuse_delay
from nca_trader.config.ranges import describe, refuse, whole
from nca_trader.data.features import bars_to_forget
from nca_trader.envs.account.exits import Order
from nca_trader.envs.account.risk import (
    before_bars,
    before_covariance,
    correlations_of,
    is_target,
    size,
    sized_jointly,
)
from nca_trader.errors import ConfigError
from nca_trader.numerics import float64_on_cpu
from nca_trader.types import Bar, Bars, Tensor


class BlendPart(NamedTuple):
    """A part of a blend, see `agents.blend`.

    name: for messages and tables. share: of its targets in the sum. strategy: what decides, on an
    account of its own where it needs one. subject: what was given, a `Strategy` or a `Run`. run:
    the run, or None.
    """

    name: str
    share: Any
    strategy: Strategy
    subject: Any
    run: Any = None


@dataclasses.dataclass(frozen=True, eq=False)
class Strategy:
    """A strategy as two pure, traceable functions.

    Args:
      init: `(num_assets) -> state`, a pytree of arrays.
      act: `(state, bar) -> (state, target)`, or `(state, bar, portfolio) -> (state, target)`.
        `bar` is a `Bar` of `[A]` float64 arrays. `portfolio` is a `Portfolio`, the account at this
        close. `target` is `[A]` weights as fractions of equity, NaN for no order, or an `Order`,
        which can carry stops.
      name: shown in reports.
      order: "on_change" trades when a target changes, "rebalance" at each target that is given.
      parts: of a blend.
      lag: bars by which a blend orders after its parts, see `with_delay`.
      indicators: `(bars) -> {name: [N] or [N, A]}`, in units of the price, drawn on the price chart
        of a page, and nothing else.
      memory: the number of bars of each asset, the newest included, on which its target in force
        depends: with older bars it is the same. An average is forgotten where its older values
        weigh less than rounding does. 0 is an order that is given once and is the same at any bar.
        None is unknown, or all bars.

    Raises:
      ConfigError: `init` or `act` is not a function, or `act` takes other arguments.

    Example:
      >>> import jax.numpy as jnp
      >>> import nca_trader as nca
      >>> def act(previous, bar):
      ...     return bar.close, jnp.where(bar.close < previous, 1.0, 0.0)
      >>> dips = nca.Strategy(lambda num_assets: jnp.zeros(num_assets), act, "buy the dip")
      >>> bars = nca.sample_bars("sp500").select("SP500")[-250:]
      >>> nca.backtest(bars, dips.with_stop(0.02)).name
      'buy the dip, stop 0.02'
    """

    UNCOUNTED: ClassVar = ("memory",)  # by `identity`: it decides nothing

    init: Callable[[int], Any]
    act: Callable[..., tuple[Any, Any]]
    name: str = "strategy"
    order: str = "on_change"
    parts: tuple[BlendPart, ...] = ()
    lag: int = 0
    indicators: Callable[[Bars], Mapping[str, ArrayLike]] | None = None
    memory: int | None = None

    def __post_init__(self):
        for field, form in (("init", "(num_assets)"), ("act", "(state, bar)")):
            function = getattr(self, field)
            if not callable(function):
                raise ConfigError(
                    f"Strategy({field}=...) is {describe(function)}; give a function of {form}, "
                    "e.g. nca.Strategy(init, act, name='mine')."
                )
        if not _takes_one(self.init):
            raise ConfigError(
                "Strategy(init=...) cannot be called with the number of assets alone; write "
                "init(num_assets), or give its other arguments values."
            )
        if not isinstance(self.name, str):
            raise ConfigError(f"Strategy(name=...) is {describe(self.name)}; give a text.")
        if self.order not in ("on_change", "rebalance"):
            raise ConfigError(
                f"Strategy(order={self.order!r}): there are 'on_change' and 'rebalance'."
            )
        if arguments_needed(self.act) not in (2, 3):
            raise ConfigError(
                f"Strategy(act=...) takes {arguments_needed(self.act)} arguments; write act(state, "
                "bar) or act(state, bar, portfolio)."
            )
        if isinstance(self.memory, Array):  # of a sweep's parameter, which has no value yet
            object.__setattr__(self, "memory", None)
        refuse(f"Strategy: {problem}" for problem in whole(self, 0, "memory"))

    @property
    def sees_portfolio(self) -> bool:
        """Whether `act` takes the portfolio as well."""
        return arguments_needed(self.act) == 3

    @property
    def account(self) -> AccountConfig:
        """What an account is given that this strategy trades: its own order."""
        return AccountConfig(order=self.order)

    @property
    def runs(self) -> tuple[Any, ...]:
        """The runs among the parts of a blend, and among theirs."""
        own = ((part.run,) if part.run is not None else part.strategy.runs for part in self.parts)
        return tuple(itertools.chain(*own))

    @property
    def history(self) -> int:
        """Bars that a live session begins with at least; of a blend those of its parts."""
        parts = [part.strategy.history + self.lag for part in self.parts]
        return max([self.memory or 1, *parts])

    def decide(self, state: Any, bar: Bar, portfolio: Any) -> tuple[Any, Order]:
        """Call `act`; return the state and an `Order`, whose target has the shape of the bar."""
        seen = (portfolio,) if self.sees_portfolio else ()
        state, asked = self.act(state, bar, *seen)
        order = asked if isinstance(asked, Order) else Order(asked)
        # A scalar is the target of every asset, and a whole number or a float32 is as good.
        target = jnp.asarray(order.target).astype(bar.close.dtype)
        return state, order._replace(target=jnp.broadcast_to(target, bar.close.shape))

    def with_stop(self, fraction: Any) -> Strategy:
        """Leave a position that has lost `fraction` of its entry price, inside the bar.

        After it the asset stays flat until its target changes.
        """
        return self._with("stop", "stop_loss", fraction)

    def with_trailing_stop(self, fraction: Any) -> Strategy:
        """Leave a position that has lost `fraction` of its best price in earlier bars."""
        return self._with("trailing stop", "trailing_stop", fraction)

    def with_take_profit(self, fraction: Any) -> Strategy:
        """Leave a position that has gained `fraction` of its entry price."""
        return self._with("take profit", "take_profit", fraction)

    def with_level(self, name: str, fraction: Any) -> Strategy:
        """Add a level to orders that have none of their own.

        Args:
          name: "stop_loss", "take_profit" or "trailing_stop", see `nca.Order`.
          fraction: of a price.
        """
        return self._with(WORDS[name], name, fraction, over=False)

    def with_volatility(self, annual: Any, span: float = 60.0, cap: float = 1.0) -> Strategy:
        """Scale each target to a volatility: `size = min(cap, annual / volatility)`.

        The volatility is that of `envs.account.risk`, per year whatever the length of a bar. A
        target is 0 until `span` returns were seen.

        Args:
          annual: volatility of an asset held in full, e.g. 0.15.
          span: of the means, in bars; their weight is `2 / (span + 1)`.
          cap: the largest factor.

        Example:
          >>> import nca_trader as nca
          >>> nca.rules.momentum(50).with_volatility(0.15).name
          'momentum 50, volatility 0.15'
        """
        _refuse_fraction("with_volatility", annual)
        for name, value, least in (("span", span, 1.0), ("cap", cap, 0.0)):
            number = isinstance(value, Real) and not isinstance(value, bool)
            if not isinstance(value, Array) and not (number and least <= value < math.inf):
                raise ConfigError(f"with_volatility({name}={value!r}): give at least {least:g}.")
        # The floor prevents a division by 0; `cap` bounds the size.
        sizing = Sizing(annual, span, 1e-9, cap)
        waiting = until_sized(self, sizing)

        def init(num_assets: int) -> Any:
            return waiting.init(num_assets), before_bars(num_assets)

        def act(state: Any, bar: Bar, portfolio: Any) -> tuple[Any, Order]:
            inner, seen = state
            inner, order = waiting.decide(inner, bar, portfolio)
            seen, factor = size(seen, bar, sizing)
            return (inner, seen), order._replace(size=order.size * factor)

        more = None if isinstance(span, Array) else bars_to_forget(span)
        return self._around(init, act, f", volatility {_text(annual)}", more)

    def with_delay(self, bars: int) -> Strategy:
        """Order at each close what was decided `bars` bars before, with its stops and targets.

        Raises:
          ConfigError: `bars` is not a whole number of at least 0.
        """
        refuse_delay(bars)
        if bars == 0:
            return self

        def init(num_assets: int) -> Any:
            # Rows of the fields of an order, oldest first; a size of 1 without a target is none.
            row = jnp.full((len(Order._fields), num_assets), jnp.nan).at[1].set(1.0)
            return self.init(num_assets), jnp.broadcast_to(row, (bars, *row.shape))

        def act(state: Any, bar: Bar, portfolio: Any) -> tuple[Any, Order]:
            inner, queue = state
            inner, order = self.decide(inner, bar, portfolio)
            shape = bar.close.shape
            new = [jnp.broadcast_to(jnp.nan if x is None else x, shape) for x in order]
            # A field that no order has stays None, so that no levels are computed for it.
            fields = [None if x is None else queue[0, i] for i, x in enumerate(order)]
            then = Order._make(fields)
            queue = jnp.concatenate([queue[1:], jnp.stack(new)[None].astype(queue.dtype)])
            return (inner, queue), then

        delayed = self._around(init, act, f", delay {bars}", int(bars))
        return dataclasses.replace(delayed, lag=self.lag + bars)

    def _with(self, word: str, field: str, fraction: Any, over: bool = True) -> Strategy:
        """Return this strategy with one level in each of its orders, or where they have none."""
        _refuse_fraction(f"with_{word.replace(' ', '_')}", fraction, EXITS[field])

        def act(state: Any, bar: Bar, portfolio: Any) -> tuple[Any, Order]:
            state, order = self.decide(state, bar, portfolio)
            own = not over and getattr(order, field) is not None
            return state, order if own else order._replace(**{field: fraction})

        return self._around(self.init, act, f", {word} {_text(fraction)}")

    def _around(
        self, init: Callable, act: Callable, what: str = "", more: int | None = 0
    ) -> Strategy:
        """Return a strategy around this one; it sees the portfolio if this one does.

        Args:
          init: as of a `Strategy`.
          act: `(state, bar, portfolio) -> (state, order)`.
          what: is added to its name.
          more: bars that it is to remember as well; None means all.
        """
        # `sees_portfolio` counts the arguments of `act`, so a wrapper must have as many as the
        # strategy inside: an account without a book of entries is cheaper to simulate.
        taken = act if self.sees_portfolio else lambda state, bar: act(state, bar, None)
        memory = self.memory
        if more != 0:  # an order that is given once keeps its size, however old that is
            memory = memory + more if memory and more else None
        # Not of this class: a `decide` of its own is inside `act`, and would run once more.
        own = (self.name + what, self.order, self.parts, self.lag, self.indicators)
        return Strategy(init, taken, *own, memory=memory)


# Of levels, in names.
WORDS = {
    "stop_loss": "stop",
    "trailing_stop": "trailing stop",
    "take_profit": "take profit",
}


class Opened:
    """What opens a run for a use of its own; what takes a run takes this too.

    Attributes:
      run: that it opened.
    """

    run: Any


def run_in(subject: Any) -> Any:
    """Return the run of what opened one; else the subject as it is."""
    return subject.run if isinstance(subject, Opened) else subject


def longest_memory(memories: Iterable[int | None]) -> int | None:
    """Return the longest of several memories; None if one has no known end."""
    given = tuple(memories)
    known = [memory for memory in given if memory is not None]
    return max(known) if len(known) == len(given) else None


def until_sized(strategy: Strategy, scale: Sizing | None) -> Strategy:
    """Return a strategy whose last target of an asset is given again when the asset gets a size.

    A size is 0 until `scale.span` returns were seen, see `account.risk.size`, and so is what was
    ordered by then. A strategy that orders once would never hold it. With None, where sizes are
    fixed, the strategy is returned as it is.
    """
    if scale is None:
        return strategy
    span = scale.span

    def init(num_assets: int) -> Any:
        return strategy.init(num_assets), jnp.full(num_assets, jnp.nan), jnp.zeros(num_assets)

    def act(state: Any, bar: Bar, portfolio: Any) -> tuple[Any, Order]:
        inner, last, seen = state
        inner, order = strategy.decide(inner, bar, portfolio)
        last = jnp.where(jnp.isnan(order.target), last, order.target)
        # The first bar has no return.
        before, seen = seen - 1.0, seen + bar.present
        begins = (before < span) & (seen - 1.0 >= span)
        return (inner, last, seen), order._replace(target=jnp.where(begins, last, order.target))

    return strategy._around(init, act)


def weights_until_sized(
    targets: np.ndarray, present: np.ndarray, scale: Sizing | None
) -> np.ndarray:
    """Apply `until_sized` to known targets `[N, A]`; NaN places no order.

    Args:
      targets: ordered at each close.
      present: `[N, A]` whether an asset has the bar.
      scale: the sizes; None where they are fixed.
    """
    if scale is None:
        return targets
    returns = present.cumsum(0) - 1.0  # the first bar has none
    begins = (returns >= scale.span) & (returns - present < scale.span)
    last = np.where(np.isnan(targets), 0, np.arange(len(targets))[:, None])
    last = np.take_along_axis(targets, np.maximum.accumulate(last), 0)
    return np.where(begins, last, targets)


def _size_by_covariance(
    state: Any, bar: Bar, target: Tensor, size: Tensor | float, sizing: CovarianceSizing
) -> Any:
    """Return the state after a close, and targets `[A]` ordered there with their sizes."""
    seen, last = state
    last, before = jnp.where(jnp.isnan(target), last, target), seen.alone.count
    # An infinite weight is refused where it is ordered.
    endless = jnp.isinf(last)
    wanted = jnp.where(endless, 0.0, jnp.nan_to_num(last * size))
    held = is_target(wanted)
    seen, joint, _ = correlations_of(seen, bar, sizing, held)
    weight = sized_jointly(wanted, joint, sizing.alone.cap)
    factor = jnp.where(held, weight / jnp.where(held, wanted, 1.0), 0.0)
    # What the assets share changes with any order, so that all of them are ordered again. So they
    # are when an asset gets a size, see `until_sized`.
    begins = (before < sizing.alone.span) & (seen.alone.count >= sizing.alone.span)
    orders = ~jnp.isnan(target).all() | begins.any()
    sizes = jnp.where(endless, 1.0, size * factor)
    return (seen, last), jnp.where(orders, last, jnp.nan), sizes


def _before_sizes(num_assets: int) -> Any:
    return before_covariance(num_assets), np.full(num_assets, np.nan)


def sized_by_covariance(strategy: Strategy, sizing: CovarianceSizing | None) -> Strategy:
    """Return a strategy with sizes by covariance, which depend on all of its targets.

    An account is given these sizes, see `account.risk.sized_jointly`. With None the strategy is
    returned as it is.
    """
    if sizing is None:
        return strategy

    def init(num_assets: int) -> Any:
        return strategy.init(num_assets), _before_sizes(num_assets)

    def act(state: Any, bar: Bar, portfolio: Any) -> tuple[Any, Order]:
        inner, order = strategy.decide(state[0], bar, portfolio)
        # A target that is ordered again as it was opens nothing that a stop has closed.
        outer, target, sizes = _size_by_covariance(state[1], bar, order.target, order.size, sizing)
        return (inner, outer), order._replace(target=target, size=sizes)

    longest = max(sizing.span, sizing.alone.span)
    return strategy._around(init, act, more=bars_to_forget(longest))


def weights_by_covariance(bars: Bars, targets: np.ndarray, sizing: CovarianceSizing) -> np.ndarray:
    """Apply `sized_by_covariance` to known targets; return `[N, A]` weights, NaN for no order."""
    orders = orders_by_covariance(bars, Order(targets), sizing)
    return np.asarray(orders.target * orders.size)


def orders_by_covariance(bars: Bars, orders: Order, sizing: CovarianceSizing) -> Order:
    """Return known orders, whose target is `[N, A]`, as `sized_by_covariance` gives them."""
    size = np.broadcast_to(orders.size, orders.target.shape)
    with float64_on_cpu():
        begun = jax.tree.map(jnp.asarray, _before_sizes(bars.num_assets))
        found = _scan_by_covariance(begun, bars.as_bar(), (orders.target, size), sizing)
        target, sizes = (np.asarray(x) for x in found)
        return orders._replace(target=target, size=sizes)


@functools.partial(jax.jit, static_argnums=3)
def _scan_by_covariance(begun: Any, bars: Bar, orders: Any, sizing: CovarianceSizing) -> Any:
    def step(state: Any, xs: tuple[Bar, Any]) -> tuple[Any, Any]:
        bar, (target, size) = xs
        state, *sized = _size_by_covariance(state, bar, target, size, sizing)
        return state, sized

    return jax.lax.scan(step, begun, (bars, orders))[1]


# One object of each, so that what is compiled for it is found again.
sized_once = functools.lru_cache(maxsize=64)(until_sized)
covariance_once = functools.lru_cache(maxsize=64)(sized_by_covariance)


def arguments_needed(function: Callable[..., Any], given: Container[str] = ()) -> int:
    """Count the positional arguments that a call can't leave out; functions of bars have one.

    Args:
      function: anything callable.
      given: names of arguments that the call gives.
    """
    # Arguments that a partial binds are no longer needed, whatever the wrapped function takes.
    wrapped = not isinstance(function, functools.partial)
    try:
        parameters = inspect.signature(function, follow_wrapped=wrapped).parameters.items()
    except (TypeError, ValueError):  # some built-ins have no signature
        return 1
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(
        p.default is p.empty and p.kind in kinds and name not in given for name, p in parameters
    )


def _takes_one(function: Callable[..., Any]) -> bool:
    """Return whether a function can be called with one positional argument."""
    try:
        inspect.signature(function).bind(1)
    except TypeError:
        return False
    except ValueError:  # some built-ins have no signature
        pass
    return True


def _text(value: Any) -> str:
    """Write a parameter; a traced one has no value yet."""
    return f"{value:g}" if isinstance(value, Real | np.generic) else "..."


def _refuse_fraction(name: str, value: Any, most: float = 10.0) -> None:
    """Refuse a level that is not above 0 and below `most`; a traced one is not checked."""
    if isinstance(value, Array):
        return
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not (number and 0.0 < float(value) < most):
        raise ConfigError(
            f"{name}({value!r}): give a fraction above 0 and below {most:g}, e.g. 0.05 for five "
            "percent."
        )
