"""A plain ledger of cash and units in float64, and random bars: the second derivation.

It keeps money and shares, not weights, and shares no line with `nca_trader.envs.account.state`.
"""

import collections
import dataclasses
import math

import numpy as np

from nca_trader.envs.account.state import Rules
from nca_trader.types import Bars


def random_bars(rng, length, num_assets, missing=0.0, spread=0.01, unit="D"):
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
        time=np.datetime64("2020-01-01", "ns") + np.arange(length) * np.timedelta64(1, unit),
        symbols=tuple(f"S{i}" for i in range(num_assets)),
        open=open_,
        high=np.maximum(open_, close),
        low=np.minimum(open_, close),
        close=close,
        volume=np.where(present, 1e6, 0.0),
        present=present,
        source="random",
    )


def rich_bars(rng, length, num_assets, missing=0.1, spread=0.02):
    """Random bars with volume that varies, quotes, dividends, funding, and an asset that goes."""
    bars = random_bars(rng, length, num_assets, missing, spread)
    shape, present = bars.close.shape, bars.present.copy()
    fields = {name: getattr(bars, name).copy() for name in ("open", "high", "low", "close")}
    gone = length * 2 // 3
    present[gone:, -1] = False
    present[(~present).all(axis=1), 0] = True  # a bar of no asset at all is no bar
    for values in fields.values():
        values[gone:, -1] = fields["close"][gone - 1, -1]
    return dataclasses.replace(
        bars,
        **fields,
        present=present,
        volume=np.where(present, rng.lognormal(7.0, 1.5, shape) * (rng.random(shape) > 0.05), 0.0),
        half_spread=rng.uniform(0, 1e-3, shape),
        dividend=np.where(rng.random(shape) < 0.03, 0.5, 0.0),
        funding=rng.normal(0, 1e-4, shape),
    )


class Ledger:
    """Cash in money, units, and orders that wait: lines as a broker would write them.

    `went` says where money went, item by item; gains are positive.
    """

    def __init__(self, num_assets, costs, rules):
        self.start = 1.0 if rules.capital is None else rules.capital
        self.cash, self.units = self.start, np.zeros(num_assets)
        self.costs, self.rules = costs, rules
        self.ordered = np.zeros(num_assets)
        self.waiting = [None] * num_assets  # None, "whole", or "rest": buys only
        self.ruined = False
        self.went = collections.Counter()
        self.traded = 0

    def equity(self, price):
        return self.cash + float(self.units @ price)

    def check_ruin(self, price):
        if self.ruined or self.equity(price) <= self.rules.floor * self.start:
            self.went["ruin"] += self.rules.floor * self.start - self.equity(price)
            self.cash, self.units[:], self.ruined = self.rules.floor * self.start, 0.0, True
            self.ordered[:] = 0.0
            self.waiting = [None] * len(self.units)

    def move(self, old, new):
        """The price of what is held changes."""
        self.went["market"] += float(self.units @ (new - old))

    def order(self, target):
        if self.ruined:
            return
        for i, weight in enumerate(target):
            same = self.rules.order == "on_change" and weight == self.ordered[i]
            if not (np.isnan(weight) or same):
                self.ordered[i], self.waiting[i] = weight, "whole"

    def wanted(self):
        """The ordered weights, scaled as a whole under both caps."""
        scale = 1.0
        for cap, size in (
            (self.rules.max_gross, np.abs(self.ordered).sum()),
            (self.rules.max_net, abs(self.ordered.sum())),
        ):
            if cap is not None and size > cap:
                scale = min(scale, cap / size)
        return self.ordered * scale

    def accepted(self, units, price, volume):
        """What a venue takes of an order for `units`."""
        size, sign = abs(units), np.sign(units)
        if self.rules.max_participation is not None:
            size = min(size, self.rules.max_participation * volume)
        if self.rules.lot:
            size = math.floor(size / self.rules.lot + 1e-9) * self.rules.lot
        if size * price < self.rules.min_notional * (1 - 1e-9):
            size = 0.0
        return sign * size

    def fill_price(self, units, price, volume, quoted):
        """What a unit is paid, and what of the difference is spread and impact."""
        spread = price * (self.costs.half_spread + quoted)
        impact = 0.0
        if self.rules.capital is not None:
            share = min(abs(units) / volume, 1.0) if volume > 0 else float(units != 0)
            impact = price * self.costs.impact * math.sqrt(share)
        off = price * self.costs.slippage + spread + impact
        paid = price + off if units > 0 else max(price - off, 0.0)
        if self.rules.tick:
            ticks = paid / self.rules.tick
            whole = math.ceil(ticks - 1e-9) if units > 0 else math.floor(ticks + 1e-9)
            paid = max(whole, 0) * self.rules.tick
        return paid, spread, impact

    def book(self, i, units, price, paid, spread, impact, extra=0.0):
        """Enters a trade of asset i that was priced and sized before."""
        if not units:
            return
        self.traded += 1
        fee = self.costs.fixed_fee if self.rules.capital is not None else 0.0
        commission = self.costs.commission * abs(units) * paid
        liquidation = extra * abs(units) * price
        self.cash -= units * paid + commission + fee + liquidation
        self.units[i] += units
        self.went["commission"] -= commission
        self.went["fixed_fee"] -= fee
        self.went["spread"] -= abs(units) * spread
        self.went["impact"] -= abs(units) * impact
        self.went["slippage"] -= abs(units) * (abs(paid - price) - spread - impact)
        self.went["liquidation"] -= liquidation

    def fill(self, price, present, volume, quoted):
        """Trades what waits at `price`, sells first, all buys cut by one factor."""
        if self.ruined:
            return
        equity, wanted = self.equity(price), self.wanted()
        open_ = [i for i, state in enumerate(self.waiting) if state is not None and present[i]]
        size, terms, short_of_volume = {}, {}, set()
        for i in open_:
            want = wanted[i] * equity / price[i] - self.units[i]
            if self.waiting[i] == "rest":
                want = max(want, 0.0)
            if self.rules.max_participation is not None:
                if abs(want) > self.rules.max_participation * volume[i]:
                    short_of_volume.add(i)
            size[i] = self.accepted(want, price[i], volume[i])
            terms[i] = self.fill_price(size[i], price[i], volume[i], quoted[i])
        fee = self.costs.fixed_fee if self.rules.capital is not None else 0.0
        cash = self.cash - fee * sum(units != 0 for units in size.values())
        for i in open_:
            if size[i] < 0:
                cash -= size[i] * terms[i][0] * (1 - self.costs.commission)
        bill = sum(
            size[i] * terms[i][0] * (1 + self.costs.commission) for i in open_ if size[i] > 0
        )
        cash = max(cash, 0.0)
        share = 1.0 if self.rules.borrow or bill <= cash else cash / bill
        for i in sorted(open_, key=lambda i: size[i] > 0):
            units = size[i]
            if units > 0 and share < 1.0:
                units = self.accepted(share * units, price[i], volume[i])
            self.book(i, units, price[i], *terms[i])
            if i not in short_of_volume:
                left = self.accepted(max(size[i], 0.0) - max(units, 0.0), price[i], volume[i])
                lacks = (1.0 - share) * max(size[i], 0.0) * price[i] > 1e-6 * equity
                self.waiting[i] = "rest" if left > 0 and lacks else None

    def margin(self, price, present, volume, quoted):
        """A margin call closes everything that can be closed."""
        need = self.rules.maintenance_margin
        gross = float(np.abs(self.units * price).sum())
        if self.ruined or need is None or gross * need <= self.equity(price):
            return
        for i, units in enumerate(-self.units):
            if units and present[i]:
                terms = self.fill_price(units, price[i], volume[i], quoted[i])
                self.book(i, units, price[i], *terms, extra=self.costs.liquidation_fee)
        self.ordered[:] = 0.0
        self.waiting = [None] * len(self.units)

    def hold(self, price, years, rate):
        """What holding for `years` earns and costs, at this price."""
        if self.ruined:
            return
        value, c = self.units * price, self.costs
        interest = c.interest_lend * max(self.cash, 0.0) - c.interest_borrow * max(-self.cash, 0.0)
        borrowing = c.borrow_fee * sum(max(-v, 0.0) for v in value)
        funding = years * c.funding * value.sum() + float(rate @ value)
        self.cash += years * (interest - borrowing) - funding
        self.went["interest"] += years * interest
        self.went["borrow_fee"] -= years * borrowing
        self.went["funding"] -= funding

    def write_off(self, price, gone):
        """Pays out assets that are gone, at this price."""
        for i in np.flatnonzero(gone):
            self.cash += self.units[i] * price[i]
            self.units[i] = self.ordered[i] = 0.0
            self.waiting[i] = None


def run_ledger(bars, targets, costs, fill, order, max_gross=None):
    """Equity `[N]` and weights `[N, A]` at each close, capital 1 before the first bar."""
    return live(bars, targets, costs, Rules(fill=fill, order=order, max_gross=max_gross))[:2]


def live(bars, targets, costs, rules):
    """As `run_ledger`, for any rules; also the ledger at the end."""
    ledger = Ledger(bars.num_assets, costs, rules)
    none = np.zeros(bars.close.shape)
    quoted = none if bars.half_spread is None else bars.half_spread
    funding = none if bars.funding is None else bars.funding
    seconds = bars.time.astype("datetime64[s]").astype(float)
    missing = np.zeros(bars.num_assets, int)
    last = bars.open[0]
    equity, weights = [], []
    for t in range(len(bars)):
        here = (bars.present[t], bars.volume[t], quoted[t])
        missing = np.where(bars.present[t], 0, missing + 1)
        if bars.dividend is not None and t:
            paid = float(ledger.units @ np.where(bars.present[t], bars.dividend[t], 0.0))
            ledger.cash += paid
            ledger.went["dividends"] += paid
        gone = missing == rules.delist_after
        worth = np.where(gone, last * (1.0 - rules.delist_haircut), bars.open[t])
        ledger.went["delisting"] += float(ledger.units @ np.where(gone, worth - last, 0.0))
        ledger.move(last, np.where(gone, last, bars.open[t]))
        ledger.check_ruin(worth)
        years = (seconds[t] - seconds[t - 1]) / (365.2425 * 86400) if t else 0.0
        if rules.fill == "next_open":  # who held since the last open pays, and not who buys now
            ledger.hold(worth, years, np.zeros(bars.num_assets))
            ledger.check_ruin(worth)
        ledger.write_off(worth, gone)
        ledger.margin(bars.open[t], *here)
        ledger.check_ruin(bars.open[t])
        if rules.fill == "next_open":
            ledger.fill(bars.open[t], *here)
            ledger.check_ruin(bars.open[t])
        ledger.move(bars.open[t], bars.close[t])
        ledger.check_ruin(bars.close[t])
        since = years if rules.fill == "close" else 0.0
        ledger.hold(bars.close[t], since, np.where(bars.present[t], funding[t], 0.0))
        ledger.check_ruin(bars.close[t])
        ledger.margin(bars.close[t], *here)
        ledger.check_ruin(bars.close[t])
        ledger.order(targets[t])
        if rules.fill == "close":
            ledger.fill(bars.close[t], *here)
            ledger.check_ruin(bars.close[t])
        last = bars.close[t]
        equity.append(ledger.equity(bars.close[t]))
        weights.append(ledger.units * bars.close[t] / equity[-1])
    return np.array(equity) / ledger.start, np.array(weights), ledger
