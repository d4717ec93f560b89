"""What trading and holding cost: a config, and in `nca_trader.types` a pytree."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from numbers import Real
from typing import Any

from nca_trader.config.ranges import refuse, strict


@strict
@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """What trading and holding cost; a pytree, so that a compiled backtest takes any costs.

    A fill's price is worse than the bar's by slippage + half_spread + the bars' own half_spread +
    impact. Rates per year are charged for the time that positions were held, before they change: at
    each open where orders fill at the next open, at each close where they fill at the close.

    Attributes:
      commission: fraction of traded notional, e.g. 5e-4 for 5 bp.
      slippage: fraction of price by which a fill is worse than the bar's price, e.g. 2e-4.
      half_spread: half the bid-ask spread as a fraction of price, in addition to
        what the bars quote.
      impact: square-root impact: the price worsens by `impact * sqrt(units / volume of the bar)`,
        a fraction of price; needs `capital`.
      fixed_fee: money a fill, whatever its size; needs `capital`.
      borrow_fee: per year, fraction of the value that is sold short.
      interest_lend, interest_borrow: per year, on cash that is held, and on cash that is owed.
      funding: per year, fraction of the position's value that a long pays and a short receives.
      liquidation_fee: fraction of notional that a forced liquidation pays on top.
    """

    commission: float = 0.0
    slippage: float = 0.0
    half_spread: float = 0.0
    impact: float = 0.0
    fixed_fee: float = 0.0
    borrow_fee: float = 0.0
    interest_lend: float = 0.0
    interest_borrow: float = 0.0
    funding: float = 0.0
    liquidation_fee: float = 0.0

    def __post_init__(self):
        refuse(self._problems())

    def _problems(self) -> Iterator[str]:
        for field in dataclasses.fields(self):
            name, given = f"costs.{field.name}", getattr(self, field.name)
            if given is None or isinstance(given, str | list | tuple | dict):
                yield f"{name} = {given!r} is not a number; give one, e.g. 5e-4."
            if not isinstance(given, Real):
                continue  # under a trace the fields are arrays, of values that were checked before
            value = float(given)
            if field.name in FRACTIONS:
                if not 0.0 <= value < 1.0:
                    yield f"{name} = {value} is not a fraction in [0, 1); 5 bp is 5e-4."
                elif value >= IMPLAUSIBLE.get(field.name, 1.0):
                    yield (
                        f"{name} = {value} is {value:.0%} of what is traded; give a fraction and "
                        f"not percent: {value}% is {value / 100:g}."
                    )
            elif field.name in AMOUNTS:
                if not 0.0 <= value < float("inf"):
                    yield f"{name} = {value} is not a number in [0, inf)."
            elif not abs(value) < (most := IMPLAUSIBLE.get(field.name, 10.0)):
                yield (
                    f"{name} = {value} is not a rate per year within {most:g}; give a fraction and "
                    "not percent: 3% per year is 0.03."
                )

    @property
    def carries(self) -> bool:
        """Whether holding costs or earns anything at a rate per year."""
        rates = (self.borrow_fee, self.interest_lend, self.interest_borrow, self.funding)
        return any(rate != 0.0 for rate in rates)

    def scaled(self, factor: Any) -> Costs:
        """What trading and borrowing cost, times `factor`; interest earned and funding stay."""
        names = (field.name for field in dataclasses.fields(self))
        kept = ("interest_lend", "funding")
        return dataclasses.replace(
            self, **{name: factor * getattr(self, name) for name in names if name not in kept}
        )


# From here on it is percent that was written for a fraction: no venue charges a tenth.
IMPLAUSIBLE = {"commission": 0.1, "slippage": 0.1, "interest_lend": 2.0, "interest_borrow": 2.0}
FRACTIONS = ("commission", "slippage", "half_spread", "liquidation_fee")
AMOUNTS = ("impact", "fixed_fee")
