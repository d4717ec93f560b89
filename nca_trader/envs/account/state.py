"""One account, scale-free: the log of its equity and the weight held in each asset.

All terms are fractions of equity at the prices of the moment, so no initial cash is needed and
reward is a difference of log-equity. Only lots, fixed fees, impact and the like need to know how
much money that is: `Rules.capital`. What moves an account is in `nca_trader.envs.account.step`.

Log-equity and weights are pairs of floats (`numerics.pair_add`): a held weight is a
multiplicative random walk, and in float32 alone it drifts by 2e-5 over 100,000 bars.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from nca_trader.config import EnvConfig
from nca_trader.errors import BarError
from nca_trader.numerics import arrays
from nca_trader.types import SECONDS_PER_YEAR, Bar, Bars, Costs, Tensor

ROUNDING = 1e-9  # of a lot or a tick: what the last bits of a quotient may miss


class Rules(NamedTuple):
    """Static under jit; each field as in `EnvConfig`.

    fill: "next_open" or "close". order: "on_change" or "rebalance".
    max_gross, max_net: caps on sum |target| and |sum target|, the whole target is scaled to them;
      None is no cap.
    borrow: False cuts all buys by one factor where cash does not pay for them.
    floor: equity at or below which the account is ruined, as a fraction of the start's.
    maintenance_margin: equity below this fraction of the gross position closes every position;
      None is no margin call.
    capital: money that an equity of 1 stands for; None where no size in money matters.
    lot: units are whole multiples of it, 0 trades any fraction. tick: prices of fills are whole
      multiples of it, rounded against the trader. min_notional: money below which no order is
      sent. max_participation: share of a bar's volume that a fill may take.
    delist_after: bars missing in a row after which an asset is taken for gone; None is never.
    delist_haircut: fraction of its last price that is lost then.
    """

    fill: str = "next_open"
    order: str = "on_change"
    max_gross: float | None = None
    max_net: float | None = None
    borrow: bool = False
    floor: float = 1e-9
    maintenance_margin: float | None = None
    capital: float | None = None
    lot: float = 0.0
    tick: float = 0.0
    min_notional: float = 0.0
    max_participation: float | None = None
    delist_after: int | None = None
    delist_haircut: float = 0.0

    @property
    def sized(self) -> bool:
        """Whether a venue refuses or cuts some sizes."""
        return bool(self.lot or self.min_notional or self.max_participation is not None)


def rules_of(config: EnvConfig) -> Rules:
    """The account's rules in the environment that `config` makes."""
    names = (name for name in Rules._fields if name != "floor")
    return Rules(floor=config.ruin_floor, **{name: getattr(config, name) for name in names})


FILLED, WHOLE, REST = 0, 1, 2


class Account(NamedTuple):
    """One account; batch it with `jax.vmap`.

    log_equity, log_equity_low: `[]` pair, log of equity as a fraction of the start's.
    weight, weight_low: `[A]` pair, value held as a signed fraction of equity; the rest is cash.
    ordered: `[A]` the last ordered target weights. `on_change` compares with these and not with
      the weights held, which drift.
    pending: `[A]` int8. FILLED; WHOLE, the order waits for its fill, in either direction; REST,
      cash cut a buy, and what is left of it waits for cash. A rest never sells: it would turn
      `on_change` into rebalancing for any account that is fully invested.
    ruined: `[]` bool, equity fell to the floor; nothing trades any more.
    memory: what the reward remembers, see `nca_trader.envs.rewards`; () for nothing.
    """

    log_equity: Array
    log_equity_low: Array
    weight: Array
    weight_low: Array
    ordered: Array
    pending: Array
    ruined: Array
    memory: Any = ()

    @property
    def held(self) -> Array:
        """`[A]` value held in each asset, as a signed fraction of equity."""
        return self.weight + self.weight_low


class Flows(NamedTuple):
    """Where equity went: `[]` each, in units of the start's equity; gains are positive.

    market: what prices did to the weights held. dividends: paid and received. delisting: the
    haircut of positions that were closed because their asset is gone. commission, fixed_fee,
    slippage (ticks included), spread, impact: of trades. liquidation: the fee of forced ones.
    interest, borrow_fee, funding: of holding. ruin: what was forgiven below the floor.
    """

    market: Tensor
    dividends: Tensor
    delisting: Tensor
    commission: Tensor
    fixed_fee: Tensor
    slippage: Tensor
    spread: Tensor
    impact: Tensor
    liquidation: Tensor
    interest: Tensor
    borrow_fee: Tensor
    funding: Tensor
    ruin: Tensor


class Fill(NamedTuple):
    """What a bar or an order did.

    traded: `[A]` signed notional at the bar's price, as a fraction of equity before it.
    cost: `[]` what trading cost, likewise. flows: everything, in units of the start's equity.
    """

    traded: Array
    cost: Array
    flows: Flows


def open_account(weight: ArrayLike) -> Account:
    """An account of equity 1 that already holds `weight` `[A]`, in the dtype of `weight`."""
    weight = jnp.asarray(weight)
    zero = jnp.zeros((), weight.dtype)
    pending = jnp.full(weight.shape, FILLED, jnp.int8)
    none = jnp.zeros_like(weight)
    return Account(zero, zero, weight, none, weight, pending, jnp.zeros((), bool))


def equity(account: Account) -> Array:
    """`[]` equity as a fraction of the start's."""
    return jnp.exp(account.log_equity) * (1.0 + account.log_equity_low)


def log_return(before: Account, after: Account) -> Array:
    """`[]` log-return between two states of an account: the low parts keep its digits."""
    high = after.log_equity - before.log_equity
    return high + (after.log_equity_low - before.log_equity_low)


class Quote(NamedTuple):
    """What an order can fill at, `[A]` each: present, and price, volume, half_spread or None."""

    present: Tensor
    price: Tensor | None = None
    volume: Tensor | None = None
    half_spread: Tensor | None = None


class Legs(NamedTuple):
    """A bar as an account lives through it, `[A]` each (or `[N, A]` for many bars).

    gap: open / previous close - 1. body: close / open - 1. present: the bar exists, so that
    orders can fill in it. A missing bar has both returns 0.

    The rest is None where nothing asks for it. half_spread: as in `Bars`. open, close: prices,
    volume: units, where `Rules.capital` is given. dividend: cash as a fraction of the previous
    close. funding: rate of this bar. years: `[]` since the bar before. delisted: the asset is
    gone; then `gap` is what its last price loses.
    """

    gap: Tensor
    body: Tensor
    present: Tensor
    half_spread: Tensor | None = None
    open: Tensor | None = None
    close: Tensor | None = None
    volume: Tensor | None = None
    dividend: Tensor | None = None
    funding: Tensor | None = None
    years: Tensor | None = None
    delisted: Tensor | None = None

    def at_cost(self, factor: Tensor | float) -> Legs:
        """The bar with `factor` times its quoted spread, as `Costs.scaled` has the other costs."""
        if self.half_spread is None:
            return self
        return self._replace(half_spread=factor * self.half_spread)

    @property
    def at_open(self) -> Quote:
        """What fills at this bar's open."""
        return Quote(self.present, self.open, self.volume, self.half_spread)

    @property
    def at_close(self) -> Quote:
        """What fills at this bar's close."""
        return Quote(self.present, self.close, self.volume, self.half_spread)


def legs_of(bars: Bars, costs: Costs = Costs(), rules: Rules = Rules()) -> Legs:
    """The legs of all bars, `[N, A]` float64; the first has no close before it, and a gap of 0.

    Raises:
      BarError: a rule or cost asks for volume that the bars do not have.
    """
    if rules.max_participation is not None or costs.impact:
        unknown = bars.present & ~np.isfinite(bars.volume)
        if unknown.any():
            row, column = np.argwhere(unknown)[0]
            raise BarError(
                f"{bars.source or 'bars'}: {bars.symbols[column]} has no volume at {bars.time[row]}"
                "; impact and max_participation need it, so give bars with volume or set both off."
            )
    if not len(bars):
        return next_legs(bars.close, bars.as_bar(), 0.0, np.zeros(bars.close.shape), costs, rules)
    seconds = np.diff(bars.time, prepend=bars.time[:1]) / np.timedelta64(1, "s")
    previous = np.vstack([bars.open[:1], bars.close[:-1]])
    missing = missing_in_a_row(bars.present)
    return next_legs(previous, bars.as_bar(), seconds, missing, costs, rules)


def missing_in_a_row(present: np.ndarray) -> np.ndarray:
    """`[N, A]` bars missing up to this one since the last that was there; 0 before the first."""
    row = np.arange(len(present))[:, None]
    last = np.maximum.accumulate(np.where(present, row, -1), axis=0)
    return np.where(last >= 0, row - last, 0)


def next_legs(
    previous: np.ndarray,
    bar: Bar,
    seconds: np.ndarray | float,
    missing: np.ndarray,
    costs: Costs,
    rules: Rules,
) -> Legs:
    """The legs of a bar, `[..., A]`, after `previous` closes; numpy, float64.

    Args:
      previous: closes before, NaN before an asset's first bar. seconds: `[...]` since the bar
        before. missing: bars missing in a row, this one included.
    """
    present = np.asarray(bar.present)
    with np.errstate(invalid="ignore", divide="ignore"):
        gap = np.nan_to_num(np.where(present, bar.open / previous - 1.0, 0.0))
        body = np.nan_to_num(np.where(present, bar.close / bar.open - 1.0, 0.0))
        dividend = None
        if bar.dividend is not None:
            dividend = np.nan_to_num(np.where(present, bar.dividend / previous, 0.0))
    delisted = None
    if rules.delist_after is not None:
        delisted = missing == rules.delist_after
        gap = np.where(delisted, -rules.delist_haircut, gap)
    money = rules.capital is not None
    return Legs(
        gap=gap,
        body=body,
        present=present,
        half_spread=None if bar.half_spread is None else np.nan_to_num(bar.half_spread),
        # 1 where there is no price yet: nothing fills there, and no NaN may come near a sum.
        open=np.where(np.isfinite(bar.open), bar.open, 1.0) if money else None,
        close=np.where(np.isfinite(bar.close), bar.close, 1.0) if money else None,
        volume=np.nan_to_num(bar.volume) if money else None,
        dividend=dividend,
        funding=None if bar.funding is None else np.where(present, np.nan_to_num(bar.funding), 0.0),
        years=np.asarray(seconds / SECONDS_PER_YEAR) if costs.carries else None,
        delisted=delisted,
    )


def impact(coefficient: float, units: Tensor, volume: Tensor) -> Tensor:
    """Square-root impact, `coefficient * sqrt(|units| / volume)`, as a fraction of price.

    More than the whole volume, and any trade in a bar without volume, counts as the whole of it.
    Source: the square-root law, e.g. Almgren et al., Direct Estimation of Equity Market Impact
    (2005); `coefficient` holds the daily volatility and its factor of about one.
    """
    xp = arrays(units)
    share = abs(units) / xp.maximum(volume, 1e-30)
    some = share > 0.0  # the slope of a root is infinite at 0
    return coefficient * xp.where(some, xp.sqrt(xp.where(some, xp.minimum(share, 1.0), 1.0)), 0.0)


def worsening(
    costs: Costs, half_spread: Tensor | None, impacted: Tensor | float
) -> tuple[Tensor | float, Tensor | float]:
    """By which fraction of the bar's price a fill is worse, and what of it is the spread."""
    spread = costs.half_spread if half_spread is None else costs.half_spread + half_spread
    return costs.slippage + spread + impacted, spread


def on_tick(price: Tensor, worse: Tensor | float, side: Tensor, tick: float) -> Tensor:
    """The worsening `worse` after the fill's price is rounded to a tick, against the trader.

    Args:
      price: `[A]` of the bar. worse: fraction of it. side: `[A]` sign of the trade.
      tick: smallest step of the price, in money.
    """
    xp = arrays(price)
    ticks = price * (1.0 + side * worse) / tick
    rounded = xp.where(side > 0, xp.ceil(ticks - ROUNDING), xp.floor(ticks + ROUNDING))
    rounded = xp.maximum(rounded, 0.0)
    return xp.where(side == 0, worse, side * (rounded * tick / price - 1.0))


def whole_lots(units: Tensor, lot: float) -> Tensor:
    """Units rounded towards zero to a multiple of `lot`; 0 is no rounding."""
    if not lot:
        return units
    xp = arrays(units)
    return xp.sign(units) * xp.floor(abs(units) / lot + ROUNDING) * lot


def worth_sending(units: Tensor, price: Tensor, min_notional: float) -> Tensor:
    """`units` where their value reaches `min_notional` in money; else 0: no order is sent."""
    if not min_notional:
        return units
    return arrays(units).where(abs(units) * price >= min_notional * (1 - ROUNDING), units, 0.0)


def within_volume(units: Tensor, volume: Tensor, max_participation: float | None) -> Tensor:
    """`units` cut to a share of the bar's volume; the rest of the order waits."""
    if max_participation is None:
        return units
    limit = max_participation * volume
    return arrays(units).clip(units, -limit, limit)


def interest(weight_sum: Tensor, costs: Costs, years: Tensor | float) -> Tensor:
    """Interest earned less interest owed on cash `1 - weight_sum`, as a fraction of equity."""
    xp = arrays(weight_sum)
    cash = 1.0 - weight_sum
    earned = costs.interest_lend * xp.maximum(cash, 0.0)
    return years * (earned - costs.interest_borrow * xp.maximum(-cash, 0.0))


def borrow_fee(weight: Tensor, costs: Costs, years: Tensor | float) -> Tensor:
    """The fee on what is sold short, `[A]` weights, as a fraction of equity; not below 0."""
    return years * costs.borrow_fee * arrays(weight).maximum(-weight, 0.0).sum()


def funding(
    weight: Tensor, costs: Costs, years: Tensor | float, rate: Tensor | None = None
) -> Tensor:
    """What longs pay and shorts receive, `[A]` weights, as a fraction of equity.

    Args:
      rate: `[A]` of this bar, as a fraction of the position's value, beside `costs.funding`.
    """
    paid = years * costs.funding * weight.sum()
    return paid if rate is None else paid + (rate * weight).sum()


def margin_called(weight: Tensor, maintenance_margin: float) -> Tensor:
    """Whether equity has fallen below `maintenance_margin` of the gross position, `[A]` weights."""
    return abs(weight).sum() * maintenance_margin > 1.0
