"""What bars mean for an account: returns of a bar's two legs, and what can be traded where.

Computed on the host in float64, where the digits of a price are. What no cost or rule asks for
is None, and costs nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nca_trader.envs.account.state import Rules
from nca_trader.errors import BarError
from nca_trader.types import SECONDS_PER_YEAR, Bar, Bars, Costs, Tensor


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
