"""Stops and targets inside a bar, and what a strategy sees of its own positions.

A `Book` remembers per asset where a position was entered and at which prices it is left. Levels are
checked against the bar's low and high, after what is pending has filled at its open. A level that
the open has passed is left at the open. After it the adverse prices count first, because a bar does
not say which came first: a long position is left at its stop where the low reaches it, and else at
its target where the high reaches that. A short position mirrors both.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from nca_trader.config import AccountConfig
from nca_trader.config.account import EXITS
from nca_trader.envs.account.effects import (
    LIQUIDATED,
    NONE,
    STOP_LOSS,
    TAKE_PROFIT,
    TRAILING_STOP,
    AccountFill,
    Effects,
)
from nca_trader.envs.account.intrabar import Intrabar
from nca_trader.envs.account.state import Account, BarReturns, equity
from nca_trader.envs.account.step import Reached, from_open, place, to_open
from nca_trader.types import Bar, Tensor

# A weight that a trade back to 0 leaves by rounding, in float32.
FLAT = 1e-6


class Order(NamedTuple):
    """What a strategy asks for at the close of a bar.

    A level belongs to its order: a target that changes replaces the levels, and has none where none
    is given. With an unchanged target a price moves the level, and NaN leaves it where it is.

    Attributes:
      target: `[A]` weights as fractions of equity; NaN for no order.
      size: `[A]` or one factor. The weight ordered is `target * size`; a change of size alone does
        not reopen a position that a stop has closed.
      stop_price: `[A]` price at which a losing position is left; NaN for none.
      limit_price: `[A]` price at which a winning position is left; NaN for none.
      stop_loss: fraction of the entry price that a position may lose; NaN for none.
      take_profit: fraction of the entry price at which a gain is taken; NaN for none.
      trailing_stop: fraction that a position may lose from the best price of earlier bars; NaN for
        none.

    Example:
      >>> import jax.numpy as jnp
      >>> import nca_trader as nca
      >>> order = nca.Order(jnp.ones(2) / 2, trailing_stop=0.05)  # long both, 5% below the best
      >>> order.has_exits
      True
    """

    target: Tensor
    size: Tensor | float = 1.0
    stop_price: Tensor | float | None = None
    limit_price: Tensor | float | None = None
    stop_loss: Tensor | float | None = None
    take_profit: Tensor | float | None = None
    trailing_stop: Tensor | float | None = None

    @property
    def has_exits(self) -> bool:
        """Whether any level is given; known when the strategy is traced."""
        return any(level is not None for level in self[2:])


class Portfolio(NamedTuple):
    """The account as a strategy sees it, at the close of a bar.

    Attributes:
      weight: `[A]` value held, as a signed fraction of equity.
      entry_price: `[A]` mean price of the position's entry, before costs; NaN where flat.
      bars_held: `[A]` int32, closes since the entry, 1 at the first; 0 where flat.
      best_price: `[A]` highest price since the entry of a long position, lowest of a short one; NaN
        where flat.
      equity: `[]` as a fraction of the start's.
      peak: `[]` the highest equity so far, at closes.
      trading: `[]` bool, whether the account trades yet; False at the bars before its start, which
        warm a strategy up.

    Example:
      A strategy that leaves the market for good after a drawdown of 20%:

      >>> import jax.numpy as jnp
      >>> import nca_trader as nca
      >>> def act(memory, bar, portfolio):
      ...     out = memory | (portfolio.equity < 0.8 * portfolio.peak)
      ...     return out, jnp.where(out, 0.0, jnp.ones(bar.close.shape) / 2)
      >>> strategy = nca.Strategy(lambda assets: jnp.zeros((), bool), act)
      >>> result = nca.backtest(nca.sample_bars("sp500"), strategy)
      >>> bool(result.metrics["max_drawdown"] < -0.2)
      True
    """

    weight: Array
    entry_price: Array
    bars_held: Array
    best_price: Array
    equity: Array
    peak: Array
    trading: ArrayLike = True


class Book(NamedTuple):
    """The memory behind a `Portfolio`; `[A]` each but for `peak`. Prices are NaN where flat.

    entry, best, held: as in `Portfolio`, `best` without the present bar. stop, limit: prices in
    force. loss, gain, trail: fractions in force. signal: the last target asked for. stopped: an
    exit closed the position, and the target has not changed since.
    """

    entry: Array
    best: Array
    held: Array
    stop: Array
    limit: Array
    loss: Array
    gain: Array
    trail: Array
    signal: Array
    stopped: Array
    peak: Array


def open_book(num_assets: int, dtype: DTypeLike) -> Book:
    """Return the book of a flat account with prices of `dtype`."""
    none = jnp.full(num_assets, jnp.nan, dtype)
    never = jnp.zeros(num_assets, bool)
    held = jnp.zeros(num_assets, jnp.int32)
    return Book(none, none, held, none, none, none, none, none, none, never, jnp.ones((), dtype))


def portfolio(account: Account, book: Book, trading: ArrayLike = True) -> Portfolio:
    """Return what a strategy sees at the close."""
    worth = equity(account)
    peak = jnp.maximum(book.peak, worth)
    return Portfolio(
        account.held, book.entry, book.held, book.best, worth, peak, jnp.asarray(trading)
    )


def on_bar(
    account: Account, book: Book, bar: Bar, legs: BarReturns, rules: AccountConfig
) -> tuple[Account, Book, Effects]:
    """Move the account from one close to the next, and leave positions whose level is reached.

    Args:
      account: at the close of the bar before.
      book: of the account.
      bar: prices, `[A]` fields.
      legs: of the same bar.
      rules: of the account.

    Returns:
      The account and the book at the close, and the effects of the bar.
    """
    now, effects = to_open(account, legs, rules)
    book = book_fill(book, now.held, effects.at_open, bar.open)
    level, reason = _reached(_with_levels(book, rules), now, bar)
    # Of prices: a quotient of equal ones may be off by its last bit, see `intrabar.of_each`.
    reached = Reached(level / bar.open - 1.0, level, reason, (reason != NONE) & (level == bar.open))
    account, effects = from_open(now, effects, legs, rules, reached)
    assert effects.inside is not None
    reason = effects.inside.reason
    by_level = (reason != NONE) & (reason != LIQUIDATED)
    return account, close_bar(book, account, bar, by_level), effects


def place_order(
    account: Account, book: Book, order: Order, bar: Bar, legs: BarReturns, rules: AccountConfig
) -> tuple[Account, Book, AccountFill | None, Array]:
    """Order what a strategy asks for, with this bar's close seen.

    Returns:
      The account and book with the order, what filled at this close, and `[A]` the weights ordered,
      NaN for none.
    """
    target, given = order.target, ~jnp.isnan(order.target)
    changed = given & (target != book.signal)
    # After an exit the asset stays flat until its target changes.
    stopped = book.stopped & ~changed
    weights = jnp.where(stopped, jnp.nan, target * order.size).astype(account.weight.dtype)
    book = book._replace(signal=jnp.where(given, target, book.signal), stopped=stopped)
    for name, level in zip(("stop", "limit", "loss", "gain", "trail"), order[2:], strict=True):
        if level is not None:
            old = getattr(book, name)
            level = jnp.broadcast_to(level, old.shape).astype(old.dtype)
            # The levels of the order before end with it.
            level = jnp.where(changed | ~jnp.isnan(level), level, old)
            book = book._replace(**{name: level})
    account, fill = place(account, weights, legs.at_close, rules)
    if fill is not None:
        book = book_fill(book, account.held, fill, bar.close)
    return account, book, fill, weights


def book_fill(book: Book, held: Array, fill: AccountFill | None, price: Tensor) -> Book:
    """Return the book after a fill.

    Args:
      book: before it.
      held: `[A]` what is held after it, as fractions of equity.
      fill: what was traded; None where positions can only have been closed.
      price: `[A]` at which it was.
    """
    whole, traded = held, jnp.zeros_like(held)
    if fill is not None:
        # A fraction of equity before the cost, like the traded notional.
        whole, traded = held * (1.0 - fill.cost.sum()), fill.traded
    whole, traded = whole.astype(price.dtype), traded.astype(price.dtype)
    side, flat = jnp.sign(whole), jnp.abs(held) < FLAT
    before = jnp.where(jnp.isnan(book.entry), 0.0, whole - traded)
    new = ~flat & (before * side <= FLAT)
    more = ~flat & ~new & (traded * side > 0.0)
    safe = jnp.where(flat, 1.0, whole)
    mean = (before * book.entry + traded * price) / safe
    entry = jnp.where(new, price, jnp.where(more, mean, book.entry))
    return book._replace(
        entry=jnp.where(flat, jnp.nan, entry),
        best=jnp.where(flat, jnp.nan, jnp.where(new, price, book.best)),
        held=jnp.where(flat | new, 0, book.held),
    )


def _with_levels(book: Book, rules: AccountConfig) -> Book:
    """Return a book with the account's levels where the order in force has none of its own."""
    for field, name in zip(("loss", "gain", "trail"), EXITS, strict=True):
        if (usual := getattr(rules, name)) < jnp.inf:
            own = getattr(book, field)
            book = book._replace(**{field: jnp.where(jnp.isnan(own), usual, own)})
    return book


def _reached(book: Book, now: Intrabar, bar: Bar) -> tuple[Array, Array]:
    """Return `[A]` the price at which each position leaves in this bar, and why.

    Prices are multiplied by the side, 1 or -1, so that a loss is downwards for shorts too.
    """
    side = jnp.where(jnp.abs(now.held) < FLAT, 0.0, jnp.sign(now.held)).astype(bar.open.dtype)
    can = bar.present & (side != 0.0)
    opened = side * bar.open
    worst = side * jnp.where(side > 0.0, bar.low, bar.high)
    best = side * jnp.where(side > 0.0, bar.high, bar.low)
    # `fmax` and `fmin` pass over NaN, a level that is not there.
    fixed = jnp.fmax(side * book.stop, side * book.entry * (1.0 - side * book.loss))
    trailing = side * book.best * (1.0 - side * book.trail)
    stop = jnp.fmax(fixed, trailing)
    limit = jnp.fmin(side * book.limit, side * book.entry * (1.0 + side * book.gain))
    # The open comes first: where it has passed the profit target, the position is closed before a
    # stop can be reached.
    passed = (opened >= limit) & ~(opened <= stop)
    stopped, taken = can & (worst <= stop) & ~passed, can & (best >= limit)
    price = jnp.where(
        stopped, jnp.minimum(opened, stop), jnp.where(taken, jnp.maximum(opened, limit), opened)
    )
    why = jnp.where(jnp.isnan(fixed) | (trailing > fixed), TRAILING_STOP, STOP_LOSS)
    reason = jnp.where(stopped, why, jnp.where(taken, TAKE_PROFIT, NONE)).astype(jnp.int8)
    return jnp.where(can, side * price, bar.open), reason


def close_bar(book: Book, account: Account, bar: Bar, left: Array) -> Book:
    """Close the bar: positions that were left are forgotten, the others are a bar older."""
    held = account.held
    flat = jnp.abs(held) < FLAT
    # Updated after this bar's levels were checked, because a trailing stop follows earlier bars
    # only.
    extreme = jnp.where(held > 0.0, jnp.fmax(book.best, bar.high), jnp.fmin(book.best, bar.low))
    return book._replace(
        entry=jnp.where(flat, jnp.nan, book.entry),
        best=jnp.where(flat, jnp.nan, jnp.where(bar.present, extreme, book.best)),
        held=jnp.where(flat, 0, book.held + 1),
        stopped=book.stopped | left,
        peak=jnp.maximum(book.peak, equity(account).astype(book.peak.dtype)),
    )
