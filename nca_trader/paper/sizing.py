"""Turns target weights into orders in units, by what is held and the last closes."""

from __future__ import annotations

import decimal
from collections.abc import Mapping, Sequence

import numpy as np

from nca_trader.envs.account.state import ROUNDING
from nca_trader.paper.ledger import UNITS
from nca_trader.paper.venue import Books, Instrument, TargetOrder, Ticket, valued
from nca_trader.types import Costs


def tickets(
    orders: Sequence[TargetOrder],
    books: Books,
    close: np.ndarray,
    symbols: Sequence[str],
    instruments: Mapping[str, Instrument],
    costs: Costs,
    borrow: bool,
) -> tuple[list[Ticket], list[tuple[str, str]]]:
    """Turn target weights into tickets; pure.

    Args:
      orders: one for each symbol at most.
      books: what is held.
      close: `[A]` last closes.
      symbols: `A` names.
      instruments: by symbol: lots, the smallest order, whether it can be sold short.
      costs: what a fill is expected to cost.
      borrow: whether cash may go below 0. False cuts every buy by one factor.

    Returns:
      Tickets, sales first, and `(client_id, code)` of orders that cannot be sent.

    >>> here = Books(1000.0, np.array([0.0]))
    >>> order, stock = TargetOrder("a", "X", 0.5), {"X": Instrument("X", lot=1.0)}
    >>> tickets([order], here, np.array([70.0]), ["X"], stock, Costs(), borrow=False)
    ([Ticket(client_id='a', symbol='X', units=7.0, stop=None)], [])
    """
    worth = books.cash + float(valued(books.units, close).sum())
    wanted: list[tuple[TargetOrder, float, float]] = []
    refused = []
    for order in orders:
        i, instrument = list(symbols).index(order.symbol), instruments[order.symbol]
        price, held = float(close[i]), float(books.units[i])
        if not (np.isfinite(price) and price > 0.0 and worth > 0.0):
            refused.append((order.client_id, "no-price"))
            continue
        # By equity before any of these orders, as in a backtest.
        units = order.weight * worth / price - held
        if held + units < 0.0 and not instrument.shortable:
            refused.append((order.client_id, "not-shortable"))
            units = -max(held, 0.0)
        wanted.append((order, units, price))
    # An estimate: what a fill really costs is known when the venue says so.
    worse, f = costs.slippage + costs.half_spread, costs.commission
    # Sales come first and pay for the buys.
    sold = sum(-units * price for _, units, price in wanted if units < 0.0)
    bought = sum(units * price for _, units, price in wanted if units > 0.0)
    cash = max(books.cash + sold * (1.0 - worse) * (1.0 - f), 0.0)
    need = bought * (1.0 + worse) * (1.0 + f)
    cut = 1.0 if borrow or need <= cash else cash / need
    found = []
    for order, units, price in wanted:
        units = in_lots(units * cut if units > 0.0 else units, instruments[order.symbol].lot)
        # A shade less, since a venue's own rounding may be the other way.
        least = max(instruments[order.symbol].min_notional * (1.0 - ROUNDING), UNITS * worth)
        if (order.buy_only and units < 0.0) or abs(units) * price < least:
            refused.append((order.client_id, "too-small"))
        else:
            found.append(Ticket(order.client_id, order.symbol, units))
    return sorted(found, key=lambda ticket: ticket.units > 0.0), refused


def in_lots(units: float, lot: float) -> float:
    """Round towards zero to whole lots, without the digits that binary floats add."""
    if not lot:
        return units
    lots = int(np.floor(abs(units) / lot + ROUNDING))
    return float(np.sign(units)) * float(lots * decimal.Decimal(str(lot)))
