"""Mirrors of two backtesting engines in plain numpy, so that parity is held without the engines.

`tests/oracles` holds each mirror equal to its engine (`make test-oracles`, and CI);
`tests/evaluate/test_parity_with_mirrors.py` holds `nca.backtest` equal to the mirrors in every run.
They are written from what the engines document and from their results, with money and units, and
share no line with the package or with `ledger.py`. docs/concepts/parity.md says which settings and
why.
"""

import itertools

import numpy as np

from nca_trader.types import Costs

# Both engines have a smallest quantity, and the cash makes it small beside every order. vectorbt
# takes amounts of money or units below 1e-12 for zero; backtesting.py trades whole units only.
VECTORBT_CASH = 1e6
BACKTESTING_CASH = 1e14

FILLS, ORDERS = ("next_open", "close"), ("on_change", "rebalance")
KINDS = ("positions", "weights", "leveraged")
COSTS = tuple(
    Costs(commission=commission, slippage=slippage)
    for commission, slippage in itertools.product((0.0, 5e-4), (0.0, 2e-4))
)


def drawn_targets(rng, kind, shape):
    """Targets of a kind: {-1, 0, 1}, or uniform in (-1, 1) or (-1.5, 1.5)."""
    if kind == "positions":
        return rng.integers(-1, 2, shape).astype(float)
    return {"weights": 1.0, "leveraged": 1.5}[kind] * rng.uniform(-1, 1, shape)


def orders_of(targets, order):
    """What an engine without the rule is given: NaN where "on_change" orders nothing."""
    if order == "rebalance":
        return targets
    before = np.concatenate([np.zeros_like(targets[:1]), targets[:-1]])
    return np.where(targets == before, np.nan, targets)


def at_next_open(orders):
    """Orders one row later, in the bar whose open fills them."""
    return np.concatenate([np.full_like(orders[:1], np.nan), orders[:-1]])


def vectorbt_equity(price, close, orders, costs):
    """vectorbt's `from_orders` with "targetpercent", direction "both", one purse for all assets.

    Args:
      price, close, orders: `[N, A]` the price that fills in a row, the price that values its end,
        and target fractions of equity, NaN for none. costs: commission and slippage act.

    Returns:
      Equity `[N]` at each row's end as a fraction of the start's, and `[N]` bool, True where cash
      did not pay for a row's buys.
    """
    cash, units = VECTORBT_CASH, np.zeros(price.shape[1])
    equity, short_of_cash = np.empty(len(price)), np.zeros(len(price), bool)
    for t, row in enumerate(price):
        value = cash + units @ row
        change = np.nan_to_num(orders[t] * value / row - units) if value > 0 else 0.0 * row
        # call_seq="auto": by the order's value, so sells first, then the smaller buys.
        for i in np.argsort(change * row, kind="stable"):
            fill = row[i] * (1 + np.copysign(costs.slippage, change[i]))
            if change[i] > 0:
                most = cash / (fill * (1 + costs.commission))
                short_of_cash[t] |= most < change[i] * (1 - 1e-9)
                change[i] = min(change[i], most)
            paid = abs(change[i]) * fill * costs.commission
            cash = max(cash - change[i] * fill - paid, 0.0)
            units[i] += change[i]
        equity[t] = cash + units @ close[t]
    return equity / VECTORBT_CASH, short_of_cash


def backtesting_py_equity(
    open_, close, orders, trade_on_close, cash=BACKTESTING_CASH, commission=0.0, spread=0.0
):
    """backtesting.py with exclusive orders: each closes what is open, then opens its fraction.

    Args:
      open_, close: `[N]` prices. orders: `[N]` fractions of equity decided at a row's close, NaN
        for none. trade_on_close: fill at that close instead of the next open.
      cash: what the account begins with. commission: fraction of notional, at entry and exit.
      spread: fraction of price by which an entry is worse; an exit pays none.

    Returns:
      Equity `[N]` in money. Its first strategy call sees two bars, so row 0 orders nothing, and
      what the last row orders is never filled.
    """
    units, entry = 0, 0.0
    equity = np.full(len(close), float(cash))
    for t in range(2, len(close)):
        price = close[t - 1] if trade_on_close else open_[t]
        target = orders[t - 1]
        if not np.isnan(target):
            cash += units * (price - entry) - abs(units) * price * commission
            entry = price * (1 + np.copysign(spread, target))
            # The broker cuts to whole units, and never stakes quite everything.
            most = cash * min(abs(target), 1 - np.finfo(float).eps) / (entry + price * commission)
            units = int(np.copysign(np.floor(most), target))
            cash -= abs(units) * entry * commission
        equity[t] = cash + units * (close[t] - entry)
        assert equity[t] > 0, "the broker stops at ruin, which this mirror leaves out"
    return equity
