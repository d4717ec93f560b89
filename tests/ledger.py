"""A plain ledger of cash and units in float64, and random bars: the second derivation.

It keeps money and shares, not weights, and shares no line with `nca_trader.envs.account`.
"""

import numpy as np

from nca_trader.types import Bars


def random_bars(rng, length, num_assets, missing=0.0, spread=0.01):
    """Bars of a random walk whose opens gap and whose bars are missing at a given rate."""
    shape = (length, num_assets)
    gap, body = rng.normal(0, spread, (2, *shape))
    gap[0] = 0.0
    close = 100.0 * np.exp(np.cumsum(gap + body, axis=0))
    open_ = close / np.exp(body)
    present = rng.random(shape) >= missing
    present[0] = True
    for t in range(1, length):  # a missing bar carries the last close
        open_[t] = np.where(present[t], open_[t], close[t - 1])
        close[t] = np.where(present[t], close[t], close[t - 1])
    return Bars(
        time=np.datetime64("2020-01-01", "ns") + np.arange(length) * np.timedelta64(1, "D"),
        symbols=tuple(f"S{i}" for i in range(num_assets)),
        open=open_,
        high=np.maximum(open_, close),
        low=np.minimum(open_, close),
        close=close,
        volume=np.where(present, 1e6, 0.0),
        present=present,
        source="random",
    )


class Ledger:
    """Cash, units, and orders that wait: lines as a broker would write them."""

    def __init__(self, num_assets, costs, max_gross=None, floor=1e-9):
        self.cash, self.units = 1.0, np.zeros(num_assets)
        self.costs, self.max_gross, self.floor = costs, max_gross, floor
        self.ordered = np.zeros(num_assets)
        self.waiting = [None] * num_assets  # None, "whole", or "rest": buys only
        self.ruined = False

    def equity(self, price):
        return self.cash + float(self.units @ price)

    def check_ruin(self, price):
        if self.ruined or self.equity(price) <= self.floor:
            self.cash, self.units[:], self.ruined = self.floor, 0.0, True
            self.ordered[:] = 0.0
            self.waiting = [None] * len(self.units)

    def order(self, target, rule):
        if self.ruined:
            return
        for i, weight in enumerate(target):
            if np.isnan(weight) or (rule == "on_change" and weight == self.ordered[i]):
                continue
            self.ordered[i], self.waiting[i] = weight, "whole"

    def fill(self, price, present):
        """Trades what waits at `price`, sells first, all buys cut by one factor."""
        s, f = self.costs.slippage, self.costs.commission
        equity = self.equity(price)
        wanted = self.ordered.copy()
        gross = np.abs(wanted).sum()
        if self.max_gross is not None and gross > self.max_gross:
            wanted *= self.max_gross / gross
        change = np.zeros_like(wanted)
        for i, state in enumerate(self.waiting):
            if state is None or not present[i] or self.ruined:
                continue
            change[i] = wanted[i] * equity / price[i] - self.units[i]
            if state == "rest":
                change[i] = max(change[i], 0.0)
        for i in np.flatnonzero(change < 0):
            self.cash += -change[i] * price[i] * (1 - s) * (1 - f)
        bill = sum(change[i] * price[i] * (1 + s) * (1 + f) for i in np.flatnonzero(change > 0))
        share = 1.0 if bill <= max(self.cash, 0.0) else max(self.cash, 0.0) / bill
        self.cash -= share * bill
        for i, state in enumerate(self.waiting):
            if state is None or not present[i] or self.ruined:
                continue
            cut = change[i] > 0 and share < 1.0 - 1e-6
            self.units[i] += change[i] * (share if change[i] > 0 else 1.0)
            self.waiting[i] = "rest" if cut else None


def run_ledger(bars, targets, costs, fill, order, max_gross=None):
    """Equity `[N]` and weights `[N, A]` at each close, capital 1 before the first bar."""
    ledger = Ledger(bars.num_assets, costs, max_gross)
    equity, weights = [], []
    for t in range(len(bars)):
        ledger.check_ruin(bars.open[t])
        if fill == "next_open":
            ledger.fill(bars.open[t], bars.present[t])
            ledger.check_ruin(bars.open[t])
        ledger.check_ruin(bars.close[t])
        ledger.order(targets[t], order)
        if fill == "close":
            ledger.fill(bars.close[t], bars.present[t])
            ledger.check_ruin(bars.close[t])
        equity.append(ledger.equity(bars.close[t]))
        weights.append(ledger.units * bars.close[t] / equity[-1])
    return np.array(equity), np.array(weights)
