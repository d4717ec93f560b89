"""One account: its state, the bars it is moved by, and the price and size of its fills.

The account is scale-free: its state is the log of its equity and the weight held in each asset.
All terms are fractions of equity at the current prices, so no initial cash is needed and the
reward is a difference of log-equity. Only lots, fixed fees, impact and similar rules need an
amount of money: `AccountConfig.capital`. The functions that move an account are in
`nca_trader.envs.account.step`.

Log-equity and weights are pairs of floats (`numerics.pair_add`): a held weight is a
multiplicative random walk, and in float32 alone it drifts by 2e-5 over 100,000 bars.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from nca_trader.config import AccountConfig
from nca_trader.config.account import PLAIN
from nca_trader.envs.account.costs import Trade, check_costs, own_rates
from nca_trader.envs.account.risk import open_guard, sizes
from nca_trader.errors import BarError, ConfigError
from nca_trader.numerics import arrays
from nca_trader.types import SECONDS_PER_YEAR, Bar, Bars, Tensor

# A tolerance in lots or ticks: in floats 0.3 / 0.1 is 2.9999999999999996, which counts as three
# lots.
ROUNDING = 1e-9


FILLED, WHOLE, REST = 0, 1, 2  # values of `Account.pending`


class Account(NamedTuple):
    """One account; batch it with `jax.vmap`.

    log_equity, log_equity_low: `[]` pair, log of equity as a fraction of the start's.
    weight, weight_low: `[A]` pair, value held as a signed fraction of equity; the rest is cash.
    ordered: `[A]` the last ordered target weights. `on_change` compares with these and not with
      the weights held, which drift.
    pending: `[A]` int8. FILLED; WHOLE, the order waits for its fill, in either direction; REST,
      cash cut a buy, and the remainder waits for cash. A rest never sells: it would turn
      `on_change` into rebalancing for any account that is fully invested.
    bankrupt: `[]` bool, equity fell to the floor; the account no longer trades.
    size: `[A]` factor on a target at the last close; () where sizes are fixed.
    memory: state of the reward, see `nca_trader.envs.rewards`; () for none.
    guard: what risk limits remember, see `account.risk`; () for none.
    base: `[A]` target of the policy's base rule at the last close; () without a base.
    """

    log_equity: Array
    log_equity_low: Array
    weight: Array
    weight_low: Array
    ordered: Array
    pending: Array
    bankrupt: Array
    size: Any = ()
    memory: Any = ()
    guard: Any = ()
    base: Any = ()

    @property
    def held(self) -> Array:
        """`[A]` value held in each asset, as a signed fraction of equity."""
        return self.weight + self.weight_low


def open_account(weight: ArrayLike, rules: AccountConfig = PLAIN) -> Account:
    """Open an account of equity 1 that already holds `weight` `[A]`, in the dtype of `weight`.

    Sizes that follow the market are 1 until its first bar; see `AccountConfig.sizing`.
    """
    weight = jnp.asarray(weight)
    zero = jnp.zeros((), weight.dtype)
    # What is held counts as ordered and filled: "on_change" does not trade to where it already is.
    pending = jnp.full(weight.shape, FILLED, jnp.int8)
    none = jnp.zeros_like(weight)
    size = () if rules.sizing == "fixed" else jnp.ones_like(weight)
    flat = Account(zero, zero, weight, none, weight, pending, jnp.zeros((), bool), size)
    if rules.risk is None:
        return flat
    return flat._replace(guard=open_guard(len(weight), rules.risk, weight.dtype))


def equity(account: Account) -> Array:
    """Return `[]` equity as a fraction of the start's."""
    return jnp.exp(account.log_equity) * (1.0 + account.log_equity_low)


def log_return(before: Account, after: Account) -> Array:
    """Return `[]` the log-return between two states of an account."""
    high = after.log_equity - before.log_equity
    # The low parts hold the digits that the high parts round away.
    return high + (after.log_equity_low - before.log_equity_low)


class Quote(NamedTuple):
    """What an order can fill at, `[A]` each: present, and price, volume, half_spread or None.

    size: of what is ordered here, see `risk.apply_size`. seconds, moved: as in `BarReturns`.
    """

    present: Tensor
    price: Any = None
    volume: Any = None
    half_spread: Tensor | None = None
    size: Any = None
    seconds: Tensor | None = None
    moved: Tensor | None = None


class BarReturns(NamedTuple):
    """One bar as an account sees it, `[A]` each (`[N, A]` for many bars): two returns and prices.

    overnight: the return open / previous close - 1. intraday: close / open - 1. present: the bar
    exists, so that orders can fill in it. Both returns of a missing bar are 0.

    The other fields are None unless a cost or rule needs them. half_spread: as in `Bars`. open,
    close: prices, with a capital, `Costs.own` or a margin; volume: units, with the first two.
    dividend: cash as a fraction of the previous close. funding: rate of this bar. years: `[]` since
    the previous bar. delisted: the asset is gone; `overnight` is then the loss on its last price.
    size: of targets ordered at this close, see `risk.apply_size`.
    seconds: `[]` since 1970 UTC, the bar's open; moved: the return from close to close. Both for
    limits of risk. low, high: returns from the open to the bar's extremes, for a margin call in it.
    base: target of the policy's base rule at this close, see `agents.base`.
    """

    overnight: Tensor
    intraday: Tensor
    present: Tensor
    half_spread: Tensor | None = None
    open: Tensor | None = None
    close: Tensor | None = None
    volume: Tensor | None = None
    dividend: Tensor | None = None
    funding: Tensor | None = None
    years: Tensor | None = None
    delisted: Tensor | None = None
    size: Any = None
    seconds: Tensor | None = None
    moved: Tensor | None = None
    low: Tensor | None = None
    high: Tensor | None = None
    base: Tensor | None = None

    @property
    def at_open(self) -> Quote:
        """What an order at this bar's open fills at."""
        return Quote(self.present, self.open, self.volume, self.half_spread)

    @property
    def at_close(self) -> Quote:
        """What an order at this bar's close fills at."""
        at = (self.present, self.close, self.volume, self.half_spread, self.size)
        return Quote(*at, self.seconds, self.moved)


def legs_of(bars: Bars, rules: AccountConfig = PLAIN) -> BarReturns:
    """Compute the overnight and intraday returns of all bars on the host, in float64.

    Args:
      bars: N bars of A assets.
      rules: of the account; they and their costs decide which fields are computed.

    Returns:
      `[N, A]` float64. The first bar has no previous close: its return starts at its own open.

    Raises:
      BarError: a rule or cost needs volume that the bars do not have.
      ConfigError: a factor on quotes that the bars do not have.
    """
    costs = rules.costs
    if rules.max_participation < math.inf or costs.impact:
        # NaN is a volume that was not reported. Any number in its place would size real orders.
        unknown = bars.present & ~np.isfinite(bars.volume)
        if unknown.any():
            row, column = np.argwhere(unknown)[0]
            raise BarError(
                f"{bars.source or 'bars'}: {bars.symbols[column]} has no volume at {bars.time[row]}"
                "; impact and max_participation need it, so give bars with volume or set both off."
            )
    if costs.quote_scale is not None and bars.half_spread is None:
        raise ConfigError(
            f"costs.quote_scale = {costs.quote_scale} has no effect, because "
            f"{bars.source or 'the bars'} quote no spread; leave it out, or give bid and ask."
        )
    size = None if rules.scale is None else sizes(bars, rules.scale)
    if not len(bars):
        none = np.zeros(bars.close.shape)
        return next_legs(bars.close, bars.as_bar(), 0.0, none, rules, size)
    seconds, missing = 0.0, np.zeros(1)  # for an account that does not need them
    if costs.carries:
        # The first bar takes 0 seconds since the bar before, because nothing was held.
        seconds = np.diff(bars.time, prepend=bars.time[:1]) / np.timedelta64(1, "s")
    # The first bar has its own open in place of the close before, so its overnight return is 0.
    previous = np.vstack([bars.open[:1], bars.close[:-1]])
    if rules.delist_after < math.inf:
        missing = bars_missing(bars.present)
    legs = next_legs(previous, bars.as_bar(), seconds, missing, rules, size)
    if costs.own:
        quoted = np.zeros(legs.overnight.shape) if legs.half_spread is None else legs.half_spread
        money = np.full(len(bars), rules.capital) if rules.capital else None
        check_costs(bars, costs, Trade(legs.overnight, legs.open, legs.volume, quoted, money))
    return legs


def bars_missing(present: np.ndarray) -> np.ndarray:
    """Count for each bar of `present` `[N, A]` the bars missing up to it; 0 before the first."""
    row = np.arange(len(present))[:, None]
    last = np.maximum.accumulate(np.where(present, row, -1), axis=0)
    return np.where(last >= 0, row - last, 0)


def next_legs(
    previous: Tensor,
    bar: Bar,
    seconds: ArrayLike,
    missing: Tensor,
    rules: AccountConfig,
    size: Any = None,
) -> BarReturns:
    """Compute the overnight and intraday returns of a bar, and what else an account needs of it.

    Args:
      previous: `[..., A]` the closes before, NaN before an asset's first bar.
      bar: the bar, fields `[..., A]`.
      seconds: `[...]` from the open of the previous bar to that of this one.
      missing: `[..., A]` number of consecutive missing bars up to this one, included.
      rules: of the account; amounts of money need prices and volume, delisting needs `delisted`,
        and holding charges need `years`.
      size: of targets at this close, see `risk.apply_size`; None for fixed ones.

    Returns:
      `[..., A]` arrays in float64, of numpy or of jax as those of `bar` are.
    """
    xp = arrays(bar.close)
    present = xp.asarray(bar.present)
    # Returns of a missing bar, and those without a close before (NaN), are 0: a position cannot
    # move on a price that does not exist.
    with np.errstate(invalid="ignore", divide="ignore"):
        overnight, intraday = bar.open / previous - 1.0, bar.close / bar.open - 1.0
        # What is traced is not known yet.
        both = overnight, intraday
        if xp is jnp or not (present.all() and all(np.isfinite(r).all() for r in both)):
            overnight, intraday = (xp.nan_to_num(xp.where(present, r, 0.0)) for r in both)
        dividend = None
        if bar.dividend is not None:
            dividend = xp.nan_to_num(xp.where(present, bar.dividend / previous, 0.0))
    delisted = None
    if rules.delist_after < math.inf:
        # Equal, not at least: an asset is closed once, in the bar that reaches the limit.
        delisted = missing == rules.delist_after
        # The bar is missing, so this return is the only one: the last price less the haircut.
        overnight = xp.where(delisted, -rules.delist_haircut, overnight)
    money = bool(rules.capital or rules.costs.own)
    priced, low, high = money, None, None
    if rules.maintenance_margin:
        priced = True
        with np.errstate(invalid="ignore", divide="ignore"):
            low, high = (
                xp.nan_to_num(xp.where(present, price / bar.open - 1.0, 0.0))
                for price in (bar.low, bar.high)
            )
    return BarReturns(
        overnight=overnight,
        intraday=intraday,
        present=present,
        # Without a quote in this bar, the configured half_spread is all that is known.
        half_spread=None if bar.half_spread is None else xp.nan_to_num(bar.half_spread),
        # A price of 1 where there is none yet: nothing fills there, and a NaN would spread through
        # sums.
        open=xp.where(xp.isfinite(bar.open), bar.open, 1.0) if priced else None,
        close=xp.where(xp.isfinite(bar.close), bar.close, 1.0) if priced else None,
        volume=xp.nan_to_num(bar.volume) if money else None,
        dividend=dividend,
        funding=None if bar.funding is None else xp.where(present, xp.nan_to_num(bar.funding), 0.0),
        years=xp.asarray(seconds / SECONDS_PER_YEAR) if rules.costs.carries else None,
        delisted=delisted,
        size=size,
        seconds=None if rules.risk is None else xp.asarray(bar.time)[..., 0],
        moved=None if rules.risk is None else (1.0 + overnight) * (1.0 + intraday) - 1.0,
        low=low,
        high=high,
    )


# The account calls the next three functions with jax, the simulated exchange with numpy. Each keeps
# its own positions and cash, but a fill's price and size have one formula.


def impact(coefficient: float, units: Tensor, volume: Tensor) -> Tensor:
    """Compute square-root impact as a fraction of price.

    `coefficient * sqrt(|units| / volume)`. More than the whole volume, and any trade in a bar
    without volume, counts as the whole of it.

    Args:
      coefficient: `Costs.impact`.
      units: `[A]` signed size of the trade.
      volume: `[A]` of the bar, in the same units.

    Source: the square-root law, e.g. Almgren et al., Direct Estimation of Equity Market Impact
    (2005); `coefficient` holds the daily volatility and its factor of about one.
    """
    xp = arrays(units)
    # Any trade over a volume of 0 is a share above 1, and no trade is 0 and not NaN.
    share = abs(units) / xp.maximum(volume, 1e-30)
    # Two selects, because the slope of a root is infinite at 0: its gradient would be NaN.
    some = share > 0.0
    return coefficient * xp.where(some, xp.sqrt(xp.where(some, xp.minimum(share, 1.0), 1.0)), 0.0)


def worsening(
    units: Tensor, quote: Quote, rules: AccountConfig, money: Tensor | None = None
) -> tuple[Tensor | float, Tensor | float, Tensor | float, tuple[Tensor | float, ...]]:
    """Compute how much worse than the bar's price a trade fills, as fractions of that price.

    Args:
      units: `[A]` signed size; without `money` a fraction of equity.
      quote: the bar's prices.
      rules: slippage, half_spread and impact of their costs apply, and `tick`, the smallest price
        step in money, rounded against the trader.
      money: `[]` equity before the trade; None without a capital.

    Returns:
      The total, `[A]` or one float, and the parts of it that are the spread and the impact. Last,
      what it is without `costs.own`, and each of these; () where there is none.
    """
    xp, costs, tick = arrays(units), rules.costs, rules.tick
    impacted = 0.0 if quote.volume is None else impact(costs.impact, units, quote.volume)
    spread = costs.half_spread
    if quote.half_spread is not None:
        scale = 1.0 if costs.quote_scale is None else costs.quote_scale
        spread = costs.half_spread + scale * quote.half_spread
    worse = costs.slippage + spread + impacted
    # Rounded last: a venue rounds the price of the fill, which has all other costs in it.
    if tick:
        side = xp.sign(units)
        ticks = quote.price * (1.0 + side * worse) / tick
        rounded = xp.where(side > 0, xp.ceil(ticks - ROUNDING), xp.floor(ticks + ROUNDING))
        rounded = xp.maximum(rounded, 0.0)
        # Without a trade there is no side to round to; the fraction stays as it was.
        worse = xp.where(side == 0, worse, side * (rounded * tick / quote.price - 1.0))
    # No price falls below zero, so a sale brings at least nothing. A plain float of at most 1 is
    # left alone: XLA would keep a selection of two equal constants.
    if not (isinstance(worse, float) and worse <= 1.0):
        worse = xp.where(units < 0.0, xp.minimum(worse, 1.0), worse)
    if not costs.own:
        return worse, spread, impacted, ()
    # Last: the ticks of a venue, and its least price of zero, don't apply to a cost of your own.
    quoted = xp.zeros_like(units) if quote.half_spread is None else quote.half_spread
    traded = units if money is None else units * quote.price / money
    own = own_rates(Trade(traded, quote.price, quote.volume, quoted, money), costs)
    return worse + sum(own[1:], own[0]), spread, impacted, (worse, *own)


def executable(units: Tensor, quote: Quote, rules: AccountConfig) -> tuple[Tensor, Tensor]:
    """Cut an order to what a venue executes.

    Args:
      units: `[A]` signed size.
      quote: the bar's price and volume.
      rules: `max_participation`, `lot` and `min_notional` apply, in this order.

    Returns:
      `[A]` units, and `[A]` bool: the volume was too small, so that the rest of the order waits.
    """
    xp = arrays(units)
    cut = units
    if rules.max_participation < math.inf:
        limit = rules.max_participation * quote.volume
        cut = xp.clip(units, -limit, limit)
    # Before lots and the minimum apply: what these take away never fills, so it does not wait.
    waits = abs(cut) < abs(units)
    if rules.lot:
        cut = xp.sign(cut) * xp.floor(abs(cut) / rules.lot + ROUNDING) * rules.lot
    if rules.min_notional:
        reached = abs(cut) * quote.price >= rules.min_notional * (1 - ROUNDING)
        cut = xp.where(reached, cut, 0.0)
    return cut, waits
