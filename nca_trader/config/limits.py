"""Risk limits of a session or a backtest, as data."""

from __future__ import annotations

import dataclasses

from nca_trader.config.ranges import between, refuse, strict, whole

MOST_ORDERS = 10_000  # per minute: each is remembered


@strict
@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What trading may never exceed, the same in a backtest and on paper; None sets no limit.

    Limits are on what is ordered: a position that the market moved above its limit is not cut. A
    target that is too large is cut. An order that is denied is not tried again by itself. A loss
    halts: orders are withdrawn and nothing is ordered any more; positions stay as they are.

    >>> Limits(max_drawdown=0.2).max_order is None
    True

    Attributes:
      max_position: of |weight| in one asset, as a fraction of equity.
      max_gross: of the sum of |weight|.
      max_order: of |target - weight held| of one order. It wins over `max_position` and
        `max_gross`: a position above them comes down in several orders.
      max_orders_per_minute: new orders in 60 s of bars' time. Those that make a position smaller
        come first.
      price_collar: no order in an asset whose close is further from the close before, as a
        fraction of it.
      max_daily_loss: halts where equity is lower, by more than this fraction, than at the last
        close of the day before, UTC.
      max_drawdown: halts where equity is lower, by more than this fraction, than its highest close.
    """

    max_position: float | None = None
    max_gross: float | None = None
    max_order: float | None = None
    max_orders_per_minute: int | None = None
    price_collar: float | None = None
    max_daily_loss: float | None = None
    max_drawdown: float | None = None

    def __post_init__(self):
        sizes = ("max_position", "max_gross", "max_order", "price_collar")
        refuse(
            between(self, "(0, inf)", *sizes),
            between(self, "(0, 1)", "max_daily_loss", "max_drawdown"),
            whole(self, 1, "max_orders_per_minute", most=MOST_ORDERS),
        )
