"""A blend: a strategy whose target is the weighted sum of the targets of its parts.

Each part decides as it would alone. One that needs an account, because it sees its portfolio or is
an agent, has an account of its own in the blend's state: it pays the part's costs, follows the
part's rules, and opens when the blend's account does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from nca_trader.config import AccountConfig
from nca_trader.config.account import DEFAULTS, EXITS, complete_account, gather_account
from nca_trader.config.ranges import describe, expect
from nca_trader.envs.account import exits
from nca_trader.envs.account.exits import Book, Order
from nca_trader.envs.account.risk import apply_size, before_sizes, update_size
from nca_trader.envs.account.state import (
    Account,
    BarReturns,
    next_legs,
    open_account,
)
from nca_trader.errors import BarError, ConfigError
from nca_trader.numerics import float64_on_cpu
from nca_trader.strategies.strategy import (
    BlendPart,
    Strategy,
    covariance_once,
    longest_memory,
    run_in,
    sized_once,
)
from nca_trader.strategies.targets import strategy_faults
from nca_trader.types import Bar, Bars, Costs

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,31}")


@runtime_checkable
class TradedRun(Protocol):
    """What a run has, as a part."""

    def refuse(self, bars: Bars) -> None:
        """Raise BarError where the bars are of symbols that it does not trade."""
        ...

    def as_strategy(self, given: AccountConfig) -> Strategy:
        """Return the strategy that decides as the agent does, on an account of its own."""
        ...


def blend(
    parts: Mapping[str, tuple[Any, Any]],
    costs: Costs | None = None,
    fill: str | None = None,
    order: str | None = None,
    name: str | None = None,
    *,
    account: AccountConfig | None = None,
    **settings: Any,
) -> Strategy:
    """Return the strategy whose target is `sum_k share_k target_k` over its parts.

    A part's target is the last one that it gave, and 0 before its first. Parts that want opposite
    positions of an asset cancel, and only the sum is traded.

    Args:
      parts: a `Strategy` or a `Run`, and its share, by name. Shares are any numbers; those that sum
        to 1 make a blend as large as its parts.
      costs: of the accounts of parts that need one; None are a run's own, and none for a strategy.
        What the blend itself pays is given to `nca.backtest`.
      fill: of these accounts, as in `nca.backtest`.
      order: when the blend trades; None is that of its parts.
      name: for reports.
      account: of these accounts, in one record; they are not delayed.
      **settings: other fields of `nca.AccountConfig` by name, in the place of the record.

    Returns:
      A `Strategy`, for backtests, sweeps, walk-forwards and paper trading.

    Raises:
      ConfigError: no part, a name or share that is not one, a part of another type, parts that
        order differently, or an account that no part has.

    Example:
      >>> import nca_trader as nca
      >>> rules = nca.rules.sma_cross(10, 30), nca.rules.momentum(50)
      >>> mix = nca.blend({"cross": (rules[0], 0.5), "trend": (rules[1], 0.5)})
      >>> bars = nca.sample_bars("sp500")[-500:].select("SP500")
      >>> result = nca.backtest(bars, mix)
      >>> list(result.parts)
      ['cross', 'trend']
    """
    expect("parts", parts, Mapping, "a dict of (strategy or run, share) by name")
    given = gather_account(account, {"costs": costs, "fill": fill, "order": order} | settings)
    for field in ("delay", *EXITS):
        if getattr(given, field) not in (None, DEFAULTS[field]):
            raise ConfigError(f"blend: {field} is of the whole; give it to nca.backtest.")
    if not parts:
        raise ConfigError("blend: there are no parts; give (strategy or run, share) by name.")
    # Checked also where no part has an account that uses it. Each part has its own order.
    order = given.order
    given = dataclasses.replace(given, order=None)
    complete_account(given)
    found = tuple(_part(key, part, given) for key, part in parts.items())
    unused = ", ".join(f"{field}={value!r}" for field, value in given.given.items())
    if unused and all(part.strategy is part.subject for part in found):
        raise ConfigError(
            f"blend: {unused} has no effect: no part has an account of its own; give it to "
            "nca.backtest."
        )
    orders = {part.name: part.strategy.order for part in found}
    if order is None and len(set(orders.values())) > 1:
        different = ", ".join(f"{name} {own}" for name, own in orders.items())
        raise ConfigError(f"blend: its parts order differently ({different}); give order.")
    strategies = [part.strategy for part in found]

    def init(num_assets: int) -> Blended:
        none = jnp.full((len(found), num_assets), jnp.nan)
        return Blended(tuple(s.init(num_assets) for s in strategies), none, none)

    def act(state: Blended, bar: Bar, portfolio: Any) -> tuple[Blended, Order]:
        states, asked = [], []
        for part, own in zip(found, state.states, strict=True):
            with _named(part.name):
                own, given = part.strategy.decide(own, bar, portfolio)
            states.append(own)
            asked.append(given.target * given.size)
        rows = jnp.stack(asked)
        last = jnp.where(jnp.isfinite(rows), rows, state.last)
        total = sum(part.share * jnp.nan_to_num(row) for part, row in zip(found, last, strict=True))
        # An agent that cannot decide orders an infinite weight, which must stay infinite in the
        # sum.
        total = jnp.where(jnp.isinf(rows).any(0), jnp.inf, total)
        target = jnp.where(jnp.isnan(rows).all(0), jnp.nan, total)
        return Blended(tuple(states), rows, last), Order(target)

    # `act` has only the arguments that a part needs: an account that no part sees is cheaper to
    # simulate.
    sees = any(strategy.sees_portfolio for strategy in strategies)
    taken = act if sees else lambda state, bar: act(state, bar, None)
    named = name or f"blend of {', '.join(orders)}"
    order = order or next(iter(orders.values()))
    memory = longest_memory(strategy.memory for strategy in strategies)
    return Strategy(init, taken, named, order, found, memory=memory)


def _part(name: Any, part: Any, given: AccountConfig) -> BlendPart:
    """Return one part, checked."""
    where = f"blend: part {name!r}"
    if not (isinstance(name, str) and NAME.fullmatch(name)):
        raise ConfigError(f"{where}: a name is of a-z, 0-9, . _ and -; give another.")
    if not (isinstance(part, tuple | list) and len(part) == 2):
        raise ConfigError(f"{where} is {describe(part)}; give (strategy or run, share).")
    subject, share = run_in(part[0]), part[1]
    number = isinstance(share, Real) and not isinstance(share, bool) and np.isfinite(float(share))
    # In a sweep a share is traced and has no value yet.
    if not (number or isinstance(share, Array)):
        raise ConfigError(f"{where}: its share is {describe(share)}; give a number, e.g. 0.5.")
    if isinstance(subject, Strategy):
        strategy = subject
        if subject.sees_portfolio and not subject.parts:  # a blend's parts have theirs already
            rules = complete_account(given, subject)
            strategy = covariance_once(sized_once(subject, rules.scale), rules.covariance)
            # Targets by covariance have their sizes already.
            strategy = alone(strategy, rules.unsized if rules.covariance else rules)
        return BlendPart(name, share, strategy, subject)
    if isinstance(subject, TradedRun):
        try:
            strategy = subject.as_strategy(given)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        return BlendPart(name, share, strategy, subject, subject)
    raise ConfigError(
        f"{where} is {describe(subject)}; give a Strategy, e.g. nca.rules.sma_cross(10, 30), or a "
        "Run."
    )


class Blended(NamedTuple):
    """The memory of a blend.

    states: of its parts. asked: `[P, A]` what each part ordered at this bar, NaN for nothing. last:
    `[P, A]` its last order.
    """

    states: tuple[Any, ...]
    asked: Array
    last: Array


def asked_of(state: Any) -> Array:
    """Return `[P, A]` what the parts of a blend ordered at this bar, also within wrappers of it."""
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, Blended))
    return next(leaf.asked for leaf in leaves if isinstance(leaf, Blended))


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Add the part's name to what its code raises."""
    try:
        yield
    except Exception as error:
        error.add_note(f"part {name}")
        raise


class Own(NamedTuple):
    """An account of a part's own, and what its next bar needs.

    close, missing: `[A]` last closes, and bars missing in a row. time: of the last bar. sizes: the
    memory of sizes. trading: whether the account has opened.
    """

    account: Account
    book: Book
    close: Array
    missing: Array
    time: Array
    sizes: Any
    trading: Array


def own_account(num_assets: int, rules: AccountConfig) -> Own:
    """Return the flat account of a part, before any bar."""
    zeros = jnp.zeros(num_assets, jnp.float64)
    return Own(
        account=open_account(zeros, rules),
        book=exits.open_book(num_assets, jnp.float64),
        close=jnp.full(num_assets, jnp.nan, jnp.float64),
        missing=jnp.zeros(num_assets, jnp.int64),
        time=jnp.zeros((), jnp.int64),
        sizes=jax.tree.map(jnp.asarray, before_sizes(num_assets, rules.sizes)),
        trading=jnp.zeros((), bool),
    )


def move_account(
    own: Own, bar: Bar, trading: Array, rules: AccountConfig
) -> tuple[Own, BarReturns]:
    """Move a part's account through a bar, where it trades; the account opens at the first close.

    Returns:
      The account at this close, and the bar's parts.
    """
    sizes, factor = own.sizes, None
    if rules.sizes is not None:
        sizes, factor = update_size(sizes, bar, rules.sizes)
    gone = ~bar.present & jnp.isfinite(own.close)
    missing = jnp.where(gone, own.missing + 1, 0)
    # Time before the first close earns no interest.
    seconds = jnp.where(own.trading, bar.time[0] - own.time, 0)
    legs = next_legs(own.close, bar, seconds, missing, rules, factor)
    account, book, *_ = exits.on_bar(own.account, own.book, bar, legs, rules)
    account, book = _where(trading, (account, book), (own.account, own.book))
    close = jnp.where(bar.present, bar.close, own.close)
    return Own(account, book, close, missing, bar.time[0], sizes, trading), legs


def order_on_account(
    own: Own, order: Order, bar: Bar, legs: BarReturns, rules: AccountConfig
) -> tuple[Own, Array]:
    """Order on a part's account, where it trades.

    Returns:
      The account, and `[A]` the weights that are in force by this order; NaN for none.
    """
    account, book, _, weights = exits.place_order(own.account, own.book, order, bar, legs, rules)
    # Taken from the account's orders, because a dead band may have held the target back.
    asked = jnp.where(jnp.isnan(weights) & ~account.bankrupt, jnp.nan, account.ordered)
    # Targets without an account yet: the order in force before the first bar is repeated there.
    before = apply_size(weights, legs.size, rules.size_cap)
    asked = jnp.where(own.trading, asked, before)
    # An infinite weight must not reach an account.
    asked = jnp.where(jnp.isinf(weights), weights, asked)
    account, book = _where(own.trading, (account, book), (own.account, own.book))
    return own._replace(account=account, book=book), asked


def alone(strategy: Strategy, rules: AccountConfig) -> Strategy:
    """Return a strategy that sees an account of its own in the place of the one that it is given.

    It decides as in a backtest with these rules that begins to trade at the same bar.
    """

    def init(num_assets: int) -> Any:
        never = jnp.full(num_assets, jnp.nan, jnp.float64)
        return strategy.init(num_assets), own_account(num_assets, rules), never

    def act(state: Any, bar: Bar, portfolio: Any) -> tuple[Any, Order]:
        inner, own, last = state
        opens = portfolio.trading & ~own.trading
        own, legs = move_account(own, bar, portfolio.trading, rules)
        seen = exits.portfolio(own.account, own.book, portfolio.trading)
        inner, order = strategy.decide(inner, bar, seen)
        none = jnp.isnan(order.target)
        target = jnp.where(none & opens, last, order.target)
        last = jnp.where(none, last, order.target)
        own, asked = order_on_account(own, order._replace(target=target), bar, legs, rules)
        return (inner, own, last), Order(asked)

    return Strategy(init, act, strategy.name, strategy.order, memory=strategy.memory)


def _where(condition: Array, this: Any, that: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), this, that)


def parts_of(bars: Bars, strategy: Strategy, first: int) -> np.ndarray:
    """Return `[N, P, A]` what each part of a blend orders, NaN for nothing; it trades from `first`.

    Raises:
      BarError: a part never orders, or orders what is not a number; it is named.
    """
    with float64_on_cpu(), strategy_faults(bars, strategy):
        trading = np.arange(len(bars)) >= first
        asked = np.asarray(_scan_parts(bars.as_bar(), trading, strategy))
    for part, rows in zip(strategy.parts, asked.swapaxes(0, 1), strict=True):
        if np.isinf(rows).any():
            row = int(np.argwhere(np.isinf(rows))[0, 0])
            raise BarError(
                f"{strategy.name}: part {part.name} decides what is not a number at "
                f"{bars.index[row]}; correct it, or leave it out."
            )
        if np.isnan(rows).all():
            raise BarError(
                f"{strategy.name}: part {part.name} orders nothing on these bars, all its targets "
                "are NaN; give it more bars, or leave it out."
            )
    return asked


@functools.partial(jax.jit, static_argnums=2)
def _scan_parts(bars: Bar, trading: Array, strategy: Strategy) -> Array:
    num_assets = bars.close.shape[1]
    book = exits.open_book(num_assets, jnp.float64)
    account = open_account(jnp.zeros(num_assets, jnp.float64))

    def step(state: Any, xs: tuple[Bar, Array]) -> tuple[Any, Array]:
        bar, now = xs
        state, _ = strategy.decide(state, bar, exits.portfolio(account, book, now))
        return state, asked_of(state)

    state = jax.tree.map(jnp.asarray, strategy.init(num_assets))
    return jax.lax.scan(step, state, (bars, trading))[1]
