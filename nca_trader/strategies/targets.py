"""Targets of a backtest: weights, a function of bars or the scan of a `Strategy`, all validated."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from nca_trader.config import AccountConfig
from nca_trader.config.account import EXITS
from nca_trader.config.ranges import describe
from nca_trader.envs.account.exits import Order, open_book, portfolio
from nca_trader.envs.account.state import open_account
from nca_trader.errors import BarError, ConfigError, argument, out_of_memory, user_line
from nca_trader.numerics import (
    LEAST_BARS,
    MOST_ASSETS,
    as_one_kernel,
    float64_on_cpu,
    row_sums,
)
from nca_trader.strategies import rules
from nca_trader.strategies.strategy import Strategy, arguments_needed
from nca_trader.types import Bar, Bars, Tensor

LARGEST = 10.0  # a weight; a larger one is percent or units, and not a fraction of equity
ROUNDING = 1e-6  # of weights whose float32 sum is at the limit
ACCEPTED = (
    "give weights [N] or [N, A], NaN for no order; a Strategy, e.g. nca.rules.sma_cross(10, 30); "
    "a function of bars; or a Run, e.g. nca.Run('runs/mine')"
)
# Raised by code that needs the value of a traced array.
TRACED = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


def refuse_no_targets(targets: Any) -> None:
    """Refuse targets that are neither weights, a strategy nor a function of bars.

    Raises:
      ConfigError: the message lists the accepted types.
    """
    array = isinstance(targets, list | tuple) or hasattr(targets, "__array__")
    array = array and not hasattr(targets, "_fields")  # a NamedTuple, e.g. a Policy, is not a list
    if isinstance(targets, Strategy | Order) or (array and not isinstance(targets, Bars)):
        return
    hint = ""
    if inspect.isfunction(targets) or isinstance(targets, functools.partial):
        if arguments_needed(targets) == 1:
            return
        hint = "; a function of bars takes one argument without a default, a rule is called first"
    elif hasattr(targets, "predict"):
        hint = "; give nca_trader.envs.sb3.targets_of(model, env), the weights that it chooses"
    elif callable(targets):
        hint = "; pass what it returns: call it first"
    raise ConfigError(f"{argument('targets')} is {describe(targets)}{hint}; {ACCEPTED}.")


def needs_account(bars: Bars, subject: Any) -> bool:
    """Return whether a strategy sees its portfolio, or orders exits: its targets are not enough.

    No other subject does.

    Raises:
      ConfigError: its code raises, see `strategy_targets`.
    """
    # Asked first, as it refuses parts of a blend.
    known = isinstance(subject, Strategy)
    return known and (has_exits(bars, subject) or subject.sees_portfolio)


def has_exits(bars: Bars, strategy: Strategy) -> bool:
    """Return whether a strategy's orders have levels at which a position is left inside a bar.

    Raises:
      ConfigError: its code raises, see `strategy_targets`; the orders of a part of a blend have
        levels.
      BarError: a run in a blend does not trade these symbols.
    """
    for part in strategy.parts:
        if part.run is not None:
            part.run.refuse(bars)
        elif has_exits(bars, part.subject):
            raise ConfigError(
                f"{strategy.name}: the orders of part {part.name} carry stops or targets, which a "
                "blend cannot have; leave them out, or close the position in `act`."
            )
    with float64_on_cpu(), strategy_faults(bars, strategy):
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), bars.as_bar())
        shapes, structure = jax.tree.flatten(one)
        return _orders_exits(strategy, structure, tuple(shapes))


@functools.lru_cache(maxsize=64)
def _orders_exits(strategy: Strategy, structure: Any, shapes: tuple[Any, ...]) -> bool:
    """Trace the decision at a bar of these shapes; return whether its order has levels."""
    one = jax.tree.unflatten(structure, shapes)
    num_assets = one.close.shape[0]

    def ordered(bar: Bar) -> Any:
        book = open_book(num_assets, jnp.float64)
        flat = portfolio(open_account(jnp.zeros(num_assets)), book)
        return strategy.decide(strategy.init(num_assets), bar, flat)[1]

    return jax.eval_shape(ordered, one).has_exits


def strategy_targets(bars: Bars, strategy: Strategy) -> np.ndarray:
    """Scan the decisions of a strategy over all bars; return targets `[N, A]` float64.

    Raises:
      ConfigError: the strategy raises, or branches on a value that is known only when it runs. The
        message names the bar and the line of its code.
    """
    with float64_on_cpu(), strategy_faults(bars, strategy):
        # As numpy arrays: what the strategy does not read is then not copied.
        return np.asarray(scan_decisions(bars.as_bar(), strategy)[1], np.float64)


@functools.partial(jax.jit, static_argnums=1)
def scan_decisions(bar: Bar, strategy: Strategy) -> tuple[Any, Tensor]:
    """Scan a strategy that does not see its account; return its last state and targets `[N, A]`."""

    def step(state, bar_t):
        state, order = strategy.decide(state, bar_t, None)
        return state, order.target * order.size

    def scan(state, bar):
        return jax.lax.scan(step, state, bar)

    # The state is returned as well: otherwise the compiler drops what only the state needs, e.g. a
    # user's check that raises.
    state = jax.tree.map(jnp.asarray, strategy.init(bar.close.shape[1]))
    # Rules that ship are tested as one kernel, see `simulate`; other code is compiled as usual.
    num_bars, num_assets = bar.close.shape
    small = num_bars >= LEAST_BARS and num_assets <= MOST_ASSETS
    if strategy.act.__module__ == rules.__name__ and small and jax.tree.leaves(state):
        return as_one_kernel(scan)(state, bar)
    return scan(state, bar)


@contextlib.contextmanager
def strategy_faults(bars: Bars, strategy: Strategy) -> Iterator[None]:
    """Turn what a strategy's code raises inside the block into one line with its bar and line."""
    try:
        yield
    except Exception as error:
        if out_of_memory(error):
            raise  # the machine failed, and not the strategy
        raise ConfigError(_describe_fault(bars, strategy, error)) from error


def _describe_fault(bars: Bars, strategy: Strategy, error: Exception) -> str:
    """Describe in one line what a strategy's code did, where, and how to repair it."""
    name, line = f"strategy {strategy.name!r}", user_line(error)
    if isinstance(error, TRACED):
        name += _part_of(error)
        return (
            f"{name}: {line or 'its code'} branches on a value that is known only when the bars "
            "run; write jnp.where(condition, this, that) in place of `if`, and jnp in place of "
            "float(), bool() and numpy."
        )
    when = ""
    if line or isinstance(error, jax.errors.JaxRuntimeError):
        # Compiled code does not say at which bar it raised, so it runs again bar by bar as Python,
        # with the portfolio of an account that never traded.
        with jax.disable_jit():
            bar = jax.tree.map(jnp.asarray, bars.as_bar())
            account = open_account(jnp.zeros(bars.num_assets))
            flat = portfolio(account, open_book(bars.num_assets, jnp.float64))
            try:
                state = strategy.init(bars.num_assets)
                for row in range(len(bars)):
                    when = f" at bar {row} ({bars.index[row]})"
                    one = jax.tree.map(lambda x, row=row: x[row], bar)
                    state, _ = strategy.decide(state, one, flat)
                when = ""
            except Exception as raised:
                error = raised
        line = user_line(error) or line
    name += _part_of(error)
    lines = str(error).strip().splitlines() or ["no message"]
    # What a callback on the host raised is the end of the error that carries it.
    message = lines[-1 if isinstance(error, jax.errors.JaxRuntimeError) else 0]
    if message.endswith(":"):  # jax lists what differs in the next lines
        message = " ".join([message, *(x.strip() for x in lines[1:] if x.strip())][:2])
    what = f"{name}: raises {type(error).__name__}{when}, {line or 'in act'}: {message[:200]}"
    if not line:
        what += "; act returns (state, target), a state of the types and shapes that it received"
    return what.rstrip(".") + "; correct the strategy."


def _part_of(error: Exception) -> str:
    """Name the part of a blend whose code raised, and the part of that, see `agents.blend`."""
    notes = reversed(getattr(error, "__notes__", ()))
    return "".join(f", {note}" for note in notes if note.startswith("part "))


def as_targets(targets: Any, bars: Bars, largest: float = LARGEST) -> np.ndarray:
    """Convert weights to `[N, A]` float64, and refuse what does not fit the bars.

    Args:
      targets: `[N]` or `[N, A]` weights; NaN means no order.
      bars: of N rows and A assets.
      largest: the largest weight that is accepted, long or short.

    Raises:
      BarError: rows, columns or a shape that are not those of the bars; no order; a weight that is
        infinite, not a number, or too large.
    """
    if isinstance(targets, Order):
        raise BarError(
            "targets are an Order, which a backtest alone takes; return its target, and give its "
            "levels to the account, e.g. stop_loss=0.05."
        )
    if isinstance(targets, pd.DataFrame | pd.Series):
        refuse_other_axes(targets, bars)
    try:
        array = np.asarray(targets)
        if np.iscomplexobj(array):  # numpy would drop the imaginary part
            raise TypeError("complex")
        array = array.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise BarError(
            f"targets are not numbers ({error}); give weights, NaN for no order."
        ) from None
    if array.ndim == 1 and bars.num_assets == 1:
        array = array[:, None]
    expected = (len(bars), bars.num_assets)
    if array.shape != expected:
        one = "; for one asset of them, pass bars.select(SYMBOL)" if array.ndim == 1 else ""
        raise BarError(
            f"targets have shape {np.shape(targets)}, but the bars have [N, A] = {expected} "
            f"({', '.join(bars.symbols)}){one}."
        )
    if np.isinf(array).any():
        row = int(np.argwhere(np.isinf(array))[0, 0])
        raise BarError(f"targets row {row} is infinite; a weight is a finite fraction of equity.")
    if np.isnan(array).all():
        raise BarError("targets hold no order: all are NaN; give a number for each order.")
    if np.nanmax(np.abs(array)) > largest:
        row, asset = np.argwhere(np.abs(array) > largest)[0]
        raise BarError(
            f"targets row {row} is {array[row, asset]:g} of {bars.symbols[asset]}; a weight is a "
            "fraction of equity, neither percent nor units. Divide it, or give max_gross of at "
            "least that where so much leverage is meant."
        )
    return array


def as_orders(orders: Order, bars: Bars, largest: float = LARGEST) -> Order:
    """Convert weights with levels to `[N, A]` float64 each, and refuse what does not fit the bars.

    Args:
      orders: whose target is `[N]` or `[N, A]` weights, and whose levels are so too or one number.
      bars: of N rows and A assets.
      largest: as of `as_targets`.

    Raises:
      BarError: as `as_targets`; a level of another shape, or not above 0.
    """
    target = as_targets(orders.target, bars, largest)
    given = orders._asdict().items()
    levels = {name: _level(name, x, target, bars) for name, x in given if name != "target"}
    if (size := levels["size"]) is None:
        raise BarError("size of the Order is None; give a number, or one for each target.")
    if (np.isnan(size) & ~np.isnan(target)).any():
        raise BarError("size of the Order is NaN where its target is not; give a number there.")
    as_targets(target * size, bars, largest)
    return orders._replace(target=target, **levels)


def _level(name: str, given: Any, target: np.ndarray, bars: Bars) -> np.ndarray | None:
    """Return a field of an order as `[N, A]` float64; None where it is not given."""
    if given is None or (name == "size" and np.ndim(given) == 0 and given == 1.0):
        return given
    if isinstance(given, pd.DataFrame | pd.Series):
        refuse_other_axes(given, bars, name)
    try:
        x = np.asarray(given, np.float64)
    except (TypeError, ValueError):
        x = np.empty((0, 0))
    if x.ndim == 1:  # a number for each bar of one asset, or for each of several assets
        x = x[:, None] if bars.num_assets == 1 else x[None]
    fits = x.ndim == 2 and all(n in (1, m) for n, m in zip(x.shape, target.shape, strict=True))
    if x.ndim and not fits:
        shape = f" of shape {list(np.shape(given))}" if hasattr(given, "__array__") else ""
        raise BarError(
            f"{name} of the Order is {describe(given)}{shape}; give one number, one for each "
            f"asset, or {list(target.shape)} of them as its target, NaN for no level."
        )
    most, least = EXITS.get(name, math.inf), name == "size"
    wrong = ~np.isnan(x) & ~((x >= 0.0 if least else x > 0.0) & (x < most))
    if wrong.any():
        between = f"above 0 and below {most:g}" if name in EXITS else "above 0"
        raise BarError(f"{name} of the Order is {x[wrong][0]:g}; give numbers {between}.")
    return np.broadcast_to(x, target.shape).copy()


def refuse_other_axes(table: pd.DataFrame | pd.Series, bars: Bars, what: str = "targets") -> None:
    """Refuse a table whose columns or rows are not those of the bars.

    Raises:
      BarError: other symbols, or rows of other times.
    """
    # Columns that are numbered have no names to compare.
    if isinstance(table, pd.DataFrame) and not isinstance(table.columns, pd.RangeIndex):
        if tuple(table.columns) != bars.symbols:
            raise BarError(
                f"{what} have the columns {', '.join(map(str, table.columns))}, but the bars "
                f"are {', '.join(bars.symbols)}; give the columns in this order."
            )
    if len(table) == len(bars):
        _refuse_other_rows(table.index, bars)


def _refuse_other_rows(index: pd.Index, bars: Bars) -> None:
    """Refuse rows of other days: they fit by shape, and would be traded on the wrong bars."""
    if pd.api.types.is_numeric_dtype(index):
        if not index.is_monotonic_increasing:
            raise BarError(
                f"targets row {int(np.argmax(np.diff(index) < 0)) + 1} has a lower number than the "
                "row before it; sort the targets by time, or index them by bars.index."
            )
        return
    try:
        with warnings.catch_warnings(action="ignore"):  # that pandas guesses a format
            there = pd.DatetimeIndex(pd.to_datetime(index, utc=True)).as_unit("ns")
    except (TypeError, ValueError) as error:
        message = str(error).splitlines()[0].rstrip(".")
        raise BarError(
            f"targets have an index that is not of times ({message}); index them by bars.index."
        ) from None
    if (there != bars.index).any():
        row = int(np.argmax(there != bars.index))
        raise BarError(
            f"targets row {row} is of {index[row]}, but the bar there of {bars.index[row]}; "
            "reindex the targets by bars.index."
        )


class Cut(NamedTuple):
    """Counts of orders that were cut to what an account may hold, and of too small orders.

    Attributes:
      orders: bars with an order for more.
      largest: the largest sum of absolute weights that was ordered.
      small: orders of less than a lot or `min_notional`, or for which cash paid less; not sent.
    """

    orders: int
    largest: float
    small: int = 0


NO_CUT = Cut(0, 0.0)


def largest_weight(rules: AccountConfig) -> float:
    """Return the largest weight that is accepted, long or short."""
    # A cap above it means that so much leverage is wanted.
    return max(LARGEST, rules.max_gross) if rules.max_gross < math.inf else LARGEST


def cut_of(targets: np.ndarray, rules: AccountConfig) -> Cut:
    """Count the rows of `targets` `[N, A]` that order more than `rules` let an account hold.

    The limits are `max_gross` on the sum of absolute weights, `max_net` on the sum of weights, and
    a sum of weights of 1 where nothing may be borrowed.
    """
    if rules.borrow and min(rules.max_gross, rules.max_net) == math.inf:
        return NO_CUT
    asked = np.where(np.isnan(targets), 0.0, targets)  # NaN orders nothing
    gross, net = row_sums(np.abs(asked)), row_sums(asked)
    above = np.zeros(len(asked), bool)
    for size, limit in (
        (gross, rules.max_gross),
        (np.abs(net), rules.max_net),
        (net, math.inf if rules.borrow else 1.0),
    ):
        above |= size > limit + ROUNDING
    return Cut(int(above.sum()), float(gross[above].max(initial=0.0)))


def in_force(targets: np.ndarray, first: int) -> np.ndarray:
    """Return targets whose row `first` repeats the last order before it; a span starts there."""
    if first == 0:
        return targets
    held = pd.DataFrame(targets[: first + 1]).ffill().to_numpy()[-1]
    return np.vstack([targets[:first], held[None], targets[first + 1 :]])


def orders_in_force(orders: Order, first: int) -> Order:
    """Return orders `[N, A]` whose row `first` repeats the last order before it, see `in_force`."""
    if first == 0:
        return orders
    if not any(isinstance(x, np.ndarray) for x in orders[1:]):
        return orders._replace(target=in_force(np.asarray(orders.target), first))
    rows = np.arange(first + 1)[:, None]
    target = np.asarray(orders.target)[: first + 1]
    # The last row that orders, and the last at which the target became another one.
    ordered = np.maximum.accumulate(np.where(np.isnan(target), -1, rows), axis=0)
    before = np.vstack([np.full_like(ordered[:1], -1), ordered[:-1]])
    last = np.take_along_axis(target, np.maximum(before, 0), axis=0)
    changed = (ordered == rows) & ((before < 0) | (target != last))
    since = np.where(changed, rows, 0).max(axis=0)

    def repeated(name: str, x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            return x
        if name in ("target", "size"):
            now = np.take_along_axis(x, np.maximum(ordered[-1:], 0), axis=0)[0]
            now = np.where(ordered[-1] < 0, np.nan, now)
        else:  # a level ends with its target, and may move while that stays
            now = in_force(np.where(rows < since, np.nan, x[: first + 1]), first)[-1]
        return np.vstack([x[:first], now[None], x[first + 1 :]])

    return Order._make(repeated(name, x) for name, x in zip(orders._fields, orders, strict=True))


def late(targets: np.ndarray, delay: int) -> np.ndarray:
    """Return targets `[N, A]` that are ordered `delay` bars after they were decided."""
    if delay == 0:
        return targets
    none = np.full((min(delay, len(targets)), targets.shape[1]), np.nan)
    return np.concatenate([none, targets[:-delay]])


def call_function(bars: Bars, function: Callable[[Bars], Any]) -> Any:
    """Return the targets of a function of bars, one row per bar, as it gives them.

    Raises:
      ConfigError: the function raises, or returns no rows.
    """
    name = getattr(function, "__name__", type(function).__name__)
    try:
        found = function(bars)
    except (Exception, SystemExit) as error:  # a script's function may call `sys.exit`
        if isinstance(error, Exception) and out_of_memory(error):
            raise
        message = " ".join(str(error).split())[:200] or "no message"
        where = user_line(error) or "in its code"
        raise ConfigError(
            f"{name}: raises {type(error).__name__} on bars {bars.index[0]} to {bars.index[-1]}, "
            f"{where}: {message.rstrip('.')}; correct the function."
        ) from error
    rows = found.target if isinstance(found, Order) else found
    if rows is None or np.ndim(rows) == 0:
        raise ConfigError(
            f"{name}: returns {describe(rows)} for {len(bars)} bars; return one row of weights "
            "per bar, [N] or [N, A], NaN for no order."
        )
    return found
