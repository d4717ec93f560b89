"""The judge: one account as a bank keeps it, in cash and units, in numpy and float64.

It imports nothing of the package. It is written from docs/concepts (timing.md, costs.md,
account.md) and docs/guides/strategies.md, and keeps money and units where the package keeps
weights and a logarithm. `tests/evaluate/test_judge.py` holds every use of the account equal to it.
"""

import math
from typing import Any, NamedTuple

import numpy as np

YEAR = 365.2425 * 86_400  # seconds
NAN = float("nan")
COSTS = dict.fromkeys(
    (
        "commission", "slippage", "half_spread", "impact", "fixed_fee", "borrow_fee",
        "interest_lend", "interest_borrow", "funding", "liquidation_fee",
    ),
    0.0,
) | {"quote_scale": None}  # fmt: skip
RULES = dict(
    fill="next_open", order="on_change", max_gross=None, max_net=None, borrow=False, floor=1e-9,
    maintenance_margin=None, capital=None, lot=0.0, tick=0.0, min_notional=0.0,
    max_participation=None, delist_after=None, delist_haircut=0.0, dead_band=0.0,
)  # fmt: skip
LEVELS = ("stop_price", "limit_price", "stop_loss", "take_profit", "trailing_stop")
ITEMS = (
    "market", "dividends", "delisting", "commission", "fixed_fee", "slippage", "spread", "impact",
    "liquidation", "interest", "borrow_fee", "funding", "ruin",
)  # fmt: skip
ROUNDING = 1e-9  # of a lot or a tick
NO_MORE = 1e-6  # of equity: a buy that lacks less is filled


class Fill(NamedTuple):
    """What was traded: `at` is "before", "open", "inside", "close" or "after" a bar's row.

    cost: of the trade, as a fraction of the start's equity.
    """

    row: int
    asset: int
    at: str
    units: float
    price: float
    reason: str
    cost: float = 0.0


class Outcome(NamedTuple):
    """Equity `[N]` and weights `[N, A]` at each close, where equity went, and what was traded.

    seen: `[N]` equity that a decision sees, before it fills at the same close.
    went: `[N]` by item, as fractions of the start's equity. fills: delistings too. small: orders of
    which lots, the least notional and cash left nothing.
    """

    equity: np.ndarray
    seen: np.ndarray
    weights: np.ndarray
    went: dict[str, np.ndarray]
    fills: list[Fill]
    small: int


class Ledger:
    """Cash, units, and orders that wait."""

    def __init__(self, num_assets: int, num_bars: int, costs: dict, rules: dict):
        self.costs, self.rules = {**COSTS, **costs}, {**RULES, **rules}
        self.money = self.rules["capital"] is not None
        self.start = self.rules["capital"] if self.money else 1.0
        self.cash, self.units = float(self.start), np.zeros(num_assets)
        self.floor, self.bankrupt = self.rules["floor"] * self.start, False
        self.ordered = np.zeros(num_assets)
        self.waiting: list[str | None] = [None] * num_assets  # "whole", or "rest": buys alone
        self.asked, self.out = np.full(num_assets, NAN), np.zeros(num_assets, bool)
        self.entry, self.best = np.full((2, num_assets), NAN)
        self.level = {name: np.full(num_assets, NAN) for name in LEVELS}
        self.went = {item: np.zeros(num_bars) for item in ITEMS}
        self.fills: list[Fill] = []
        self.row, self.small = 0, 0

    def note(self, item: str, amount: float) -> None:
        self.went[item][self.row] += amount / self.start

    def equity(self, price: np.ndarray) -> float:
        return self.cash + sum(u * p for u, p in zip(self.units, price, strict=True) if u)

    def move(self, old: np.ndarray, new: np.ndarray, item: str = "market") -> None:
        """The price of what is held changes; `check` at the new one follows."""
        self.note(item, sum(u * (n - o) for u, o, n in zip(self.units, old, new, strict=True) if u))

    def check(self, price: np.ndarray, gone: np.ndarray | None = None) -> None:
        """An account at its floor, or below, is bankrupt: it owes nothing and trades no more."""
        if self.bankrupt or self.equity(price) > self.floor:
            return
        self.note("ruin", self.floor - self.equity(price))
        for i in np.flatnonzero(self.units):
            lost = gone is not None and gone[i]
            at, why = ("before", "delisted") if lost else ("after", "bankrupt")
            self.fills.append(Fill(self.row, i, at, -self.units[i], price[i], why))
        self.cash, self.bankrupt = self.floor, True
        self.units[:] = self.ordered[:] = 0.0
        self.entry[:] = NAN
        self.waiting = [None] * len(self.units)

    def order(self, target: np.ndarray, price: np.ndarray) -> None:
        """Order targets at a close; NaN orders nothing."""
        held = self.units * np.nan_to_num(price) / self.equity(price)
        for i, weight in enumerate(target):
            if self.bankrupt or np.isnan(weight):
                continue
            changes = self.rules["order"] == "on_change"
            moved = abs(weight - (self.ordered[i] if changes else held[i]))
            band = self.rules["dead_band"]
            new = (changes and moved > 0.0) or not changes
            if band and weight != 0.0:
                new = moved > band
            if new:
                self.waiting[i] = "whole"
            if new or not band:
                self.ordered[i] = weight

    def ask(self, target: np.ndarray, levels: dict[str, np.ndarray], price: np.ndarray) -> None:
        """Order with levels: they belong to their target, and an exit waits for another one."""
        given = ~np.isnan(target)
        changed = given & (target != self.asked)
        self.out &= ~changed
        self.asked = np.where(given, target, self.asked)
        for name, level in levels.items():
            kept = np.isnan(level) & ~changed
            self.level[name] = np.where(kept, self.level[name], level)
        self.order(np.where(self.out, NAN, target), price)

    def wanted(self) -> np.ndarray:
        """The ordered weights, scaled as a whole under both caps."""
        scale = 1.0
        for cap, size in (
            (self.rules["max_gross"], np.abs(self.ordered).sum()),
            (self.rules["max_net"], abs(self.ordered.sum())),
        ):
            if cap is not None and size > cap:
                scale = min(scale, cap / size)
        return self.ordered * scale

    def accepted(self, units: float, price: float, volume: float) -> float:
        """What a venue takes of an order for `units`."""
        size = abs(units)
        if self.rules["max_participation"] is not None:
            size = min(size, self.rules["max_participation"] * volume)
        if self.rules["lot"]:
            size = math.floor(size / self.rules["lot"] + ROUNDING) * self.rules["lot"]
        if size * price < self.rules["min_notional"] * (1.0 - ROUNDING):
            size = 0.0
        return math.copysign(size, units)

    def is_order(self, i: int, units: float, part: float) -> bool:
        """Whether it is one that nothing is left of; `part` of equity is what a unit is worth."""
        lot = self.rules["lot"]
        if not (lot or self.rules["min_notional"]) or abs(units) * part < 1e-14:
            return False
        opens = self.units[i] == 0.0 and self.ordered[i] != 0.0
        # Holders do not trade a part of a lot.
        return opens or not lot or abs(units) / lot + ROUNDING >= 1.0

    def terms(self, units: float, price: float, volume: float, quoted: float) -> tuple:
        """The price that is paid for a unit, and what of the difference is spread and impact."""
        scale = self.costs["quote_scale"]
        quoted = quoted if scale is None else scale * quoted
        spread, impact = price * (self.costs["half_spread"] + quoted), 0.0
        if self.money:
            share = min(abs(units) / volume, 1.0) if volume > 0.0 else float(units != 0.0)
            impact = price * self.costs["impact"] * math.sqrt(share)
        off = price * self.costs["slippage"] + spread + impact
        paid = price + off if units > 0.0 else max(price - off, 0.0)
        if self.rules["tick"]:
            ticks = paid / self.rules["tick"]
            whole = math.ceil(ticks - ROUNDING) if units > 0.0 else math.floor(ticks + ROUNDING)
            paid = whole * self.rules["tick"]
        return paid, spread, impact

    def book(self, i: int, units: float, price: float, terms: tuple, at: str, why: str) -> None:
        """Enter a trade that was priced and sized before."""
        if not units:
            return
        (paid, spread, impact), size = terms, abs(units)
        commission = self.costs["commission"] * size * paid
        fee = self.costs["fixed_fee"] if self.money else 0.0
        forced = self.costs["liquidation_fee"] * size * price if why == "liquidated" else 0.0
        self.cash -= units * paid + commission + fee + forced
        before, after = self.units[i], self.units[i] + units
        after = 0.0 if abs(after) <= ROUNDING * size else after  # what is left is rounding
        self.units[i] = after
        for item, amount in (
            ("commission", commission), ("fixed_fee", fee), ("liquidation", forced),
            ("spread", size * spread), ("impact", size * impact),
            ("slippage", size * (abs(paid - price) - spread - impact)),
        ):  # fmt: skip
            self.note(item, -amount)
        cost = (commission + fee + forced + size * abs(paid - price)) / self.start
        self.fills.append(Fill(self.row, i, at, units, price, why, cost))
        if after == 0.0:
            self.entry[i] = self.best[i] = NAN
        elif before * after <= 0.0:
            self.entry[i] = self.best[i] = price
        elif abs(after) > abs(before):
            self.entry[i] = (before * self.entry[i] + units * price) / after

    def close(self, i: int, price: float, here: tuple, at: str, why: str) -> None:
        """Close a whole position; neither lots nor volume stop it."""
        units = -self.units[i]
        self.book(i, units, price, self.terms(units, price, *(x[i] for x in here)), at, why)
        self.units[i] = 0.0

    def fill(self, price: np.ndarray, present: np.ndarray, here: tuple, at: str) -> None:
        """Trade what waits: sizes are of equity before any of it, sells first, buys cut alike."""
        if self.bankrupt:
            return
        equity, wanted = self.equity(price), self.wanted()
        trading = [i for i, state in enumerate(self.waiting) if state and present[i]]
        asked, size, terms, thin = {}, {}, {}, set()
        for i in trading:
            volume, quoted = (x[i] for x in here)
            want = wanted[i] * equity / price[i] - self.units[i]
            if self.waiting[i] == "rest":
                want = max(want, 0.0)
            most = self.rules["max_participation"]
            if most is not None and abs(want) > most * volume:
                thin.add(i)
            asked[i], size[i] = want, self.accepted(want, price[i], volume)
            # Of the whole order, also where cash then cuts it.
            terms[i] = self.terms(size[i], price[i], volume, quoted)
        f = self.costs["commission"]
        fee = self.costs["fixed_fee"] if self.money else 0.0
        cash = self.cash - fee * sum(units != 0.0 for units in size.values())
        cash += sum(-n * terms[i][0] * (1.0 - f) for i, n in size.items() if n < 0.0)
        bill = sum(n * terms[i][0] * (1.0 + f) for i, n in size.items() if n > 0.0)
        cash = max(cash, 0.0)
        share = 1.0 if self.rules["borrow"] or bill <= cash else cash / bill
        for i in sorted(trading, key=lambda i: size[i] > 0.0):
            units = size[i]
            if units > 0.0 and share < 1.0:
                asked[i] = share * units
                units = self.accepted(asked[i], price[i], here[0][i])
            if units == 0.0 and self.waiting[i] == "whole" and i not in thin:
                self.small += self.is_order(i, asked[i], price[i] / equity)
            self.book(i, units, price[i], terms[i], at, "target")
            if i in thin:
                continue  # it waits for volume, as it was
            lacks = size[i] - units
            more = self.accepted(lacks, price[i], here[0][i]) > 0.0
            self.waiting[i] = "rest" if more and lacks * price[i] > NO_MORE * equity else None

    def margin(self, price: np.ndarray, present: np.ndarray, here: tuple, at: str) -> None:
        """Where equity is too small for the gross position, all that can be closed is."""
        need = self.rules["maintenance_margin"]
        gross = sum(abs(u * p) for u, p in zip(self.units, price, strict=True) if u)
        if self.bankrupt or need is None or need * gross <= self.equity(price):
            return
        for i in np.flatnonzero((self.units != 0.0) & present):
            # Priced at equity before any of it, as all fills of a moment are.
            self.close(i, price[i], here, at, "liquidated")
        self.ordered[:] = 0.0
        self.waiting = [None] * len(self.units)

    def hold(self, price: np.ndarray, years: float, rate: np.ndarray) -> None:
        """What holding for `years` earns and costs; `rate` is the bars' own funding."""
        if self.bankrupt:
            return
        c, value = self.costs, np.where(self.units == 0.0, 0.0, self.units * price)
        interest = c["interest_lend"] * max(self.cash, 0.0)
        interest -= c["interest_borrow"] * max(-self.cash, 0.0)
        borrowing = c["borrow_fee"] * np.maximum(-value, 0.0).sum()
        funding = years * c["funding"] * value.sum() + (rate * value).sum()
        self.cash += years * (interest - borrowing) - funding
        self.note("interest", years * interest)
        self.note("borrow_fee", -years * borrowing)
        self.note("funding", -funding)

    def write_off(self, gone: np.ndarray, worth: np.ndarray) -> None:
        for i in np.flatnonzero(gone):
            if self.units[i]:
                self.fills.append(Fill(self.row, i, "before", -self.units[i], worth[i], "delisted"))
                self.cash += self.units[i] * worth[i]
            self.units[i] = self.ordered[i] = 0.0
            self.waiting[i], self.entry[i] = None, NAN

    def reached(self, i: int, bar: dict[str, np.ndarray]) -> tuple[float, str] | None:
        """The price at which a level closes position i in this bar, and which; None for none."""
        side = math.copysign(1.0, self.units[i])
        lv = {name: values[i] for name, values in self.level.items()}
        opened = side * bar["open"][i]
        worst, best = sorted(side * bar[x][i] for x in ("low", "high"))
        entry = side * self.entry[i]
        fixed = np.fmax(side * lv["stop_price"], entry - self.entry[i] * lv["stop_loss"])
        trailing = side * self.best[i] - self.best[i] * lv["trailing_stop"]
        gain = np.fmin(side * lv["limit_price"], entry + self.entry[i] * lv["take_profit"])
        stop = np.fmax(fixed, trailing)
        why = "stop" if fixed >= trailing or np.isnan(trailing) else "trailing stop"
        if opened >= gain and not opened <= stop:
            return side * opened, "take profit"  # the open is known to come first
        if worst <= stop:
            return side * min(opened, stop), why
        return (side * gain, "take profit") if best >= gain else None

    def called(self, bar: dict[str, np.ndarray], left: dict, here: tuple) -> tuple | None:
        """Prices at which a margin call comes inside the bar, and the exits before it.

        Positions go from the open to their adverse prices together, and a stop is filled where it
        is passed. Between two stops `free`, equity less its margin, is linear.
        """
        need, held = self.rules["maintenance_margin"], set(np.flatnonzero(self.units))
        if need is None or self.bankrupt:
            return None
        far = {i: bar["low" if self.units[i] > 0.0 else "high"][i] for i in held}
        opened, passed = bar["open"], {}
        for i, (price, why) in left.items():
            if price == opened[i]:
                passed[i] = 0.0
            elif why != "take profit":
                passed[i] = (price - opened[i]) / (far[i] - opened[i])

        def at(i: int, u: float) -> float:
            return opened[i] + u * (far[i] - opened[i])

        def free(u: float, gone: dict) -> float:
            worth = self.cash
            for i in held:
                price = left[i][0] if i in gone else at(i, u)
                worth += self.units[i] * price
                if i in gone:
                    paid, *_ = self.terms(-self.units[i], price, *(x[i] for x in here))
                    size = abs(self.units[i])
                    worth -= size * abs(paid - price) + self.costs["commission"] * size * paid
                    worth -= self.costs["fixed_fee"] if self.money else 0.0
                else:
                    worth -= need * abs(self.units[i] * price)
            return worth

        begin = 0.0
        for end in sorted({*passed.values(), 1.0}):
            gone = {i: u for i, u in passed.items() if u <= begin}
            first, last = free(begin, gone), free(end, gone)
            # At 0 the positions that leave at the open have left.
            if (end > begin or end == 1.0) and min(first, last) < 0.0:
                u = begin if first < 0.0 else begin + (end - begin) * first / (first - last)
                return {i: at(i, u) for i in held - set(gone)}, gone
            begin = end
        return None

    def inside(self, bar: dict[str, np.ndarray], present: np.ndarray, here: tuple) -> None:
        """From the open to the close, with the levels that are reached on the way."""
        left = {}
        if not self.bankrupt:
            held = np.flatnonzero((self.units != 0.0) & present)
            found = {i: self.reached(i, bar) for i in held}
            left = {i: exit_ for i, exit_ in found.items() if exit_}
        call = self.called(bar, left, here)
        if call:
            prices, gone = call
            left = {i: left[i] for i in gone}
            left |= {i: (price, "liquidated") for i, price in prices.items() if present[i]}
        to = bar["close"].copy()
        for i, (price, _) in left.items():
            to[i] = price
        self.move(bar["open"], to)
        self.check(to)
        if not self.bankrupt:
            for i, (price, why) in left.items():
                self.close(i, price, here, "inside", why)
                self.waiting[i], self.out[i] = None, self.out[i] or why != "liquidated"
            if call:
                self.ordered[:] = 0.0
                self.waiting = [None] * len(self.units)
        self.check(to)
        for i in np.flatnonzero((self.units != 0.0) & present):
            # For the bars after this one.
            far, name = (max, "high") if self.units[i] > 0.0 else (min, "low")
            self.best[i] = far(self.best[i], bar[name][i])


def run(bars: Any, targets: Any, costs: dict, rules: dict, levels: dict | None = None) -> Outcome:
    """Run an account over bars that orders `targets` `[N, A]` at each close.

    Args:
      bars: with the arrays of `nca.Bars` as attributes.
      targets: weights; NaN orders nothing.
      costs: those of `COSTS` that are not 0.
      rules: those of `RULES` that are another.
      levels: `[N, A]` of each of `LEVELS` that orders have; NaN for none.
    """
    shape = num_bars, num_assets = bars.close.shape
    book = Ledger(num_assets, num_bars, costs, rules)
    none, at_open = np.zeros(shape), book.rules["fill"] == "next_open"
    extra = {
        name: none if (x := getattr(bars, name, None)) is None else np.nan_to_num(x)
        for name in ("half_spread", "dividend", "funding")
    }
    seconds = bars.time.astype("datetime64[s]").astype(float)
    missing, listed = np.zeros(num_assets, int), np.zeros(num_assets, bool)
    equity, seen, weights, last = [], [], [], bars.open[0]
    for t in range(num_bars):
        book.row, present = t, bars.present[t]
        here = (np.nan_to_num(bars.volume[t]), extra["half_spread"][t])
        bar = {name: getattr(bars, name)[t] for name in ("open", "high", "low", "close")}
        listed |= present
        missing = np.where(present | ~listed, 0, missing + 1)
        gone = missing == (book.rules["delist_after"] or math.inf)
        years = (seconds[t] - seconds[t - 1]) / YEAR if t else 0.0
        # 1. The night, with its dividends.
        paid = float((book.units * np.where(present, extra["dividend"][t], 0.0)).sum())
        book.cash += paid
        book.note("dividends", paid)
        worth = np.where(gone, last * (1.0 - book.rules["delist_haircut"]), bar["open"])
        book.move(last, np.where(gone, worth, last), "delisting")
        book.move(last, np.where(gone, last, bar["open"]))
        book.check(worth, gone)
        # 2. to 5. Charges, delistings, a margin call, and what waits.
        if at_open:
            book.hold(worth, years, none[0])
            book.check(worth, gone)
        book.write_off(gone, worth)
        book.margin(bar["open"], present, here, "open")
        book.check(bar["open"])
        if at_open:
            book.fill(bar["open"], present, here, "open")
            book.check(bar["open"])
        # 6. The day. 7. and 8. Charges and a margin call at its close.
        book.inside(bar, present, here)
        since, rate = 0.0 if at_open else years, np.where(present, extra["funding"][t], 0.0)
        book.hold(bar["close"], since, rate)
        book.check(bar["close"])
        book.margin(bar["close"], present, here, "close")
        book.check(bar["close"])
        # 9. The decision.
        seen.append(book.equity(bar["close"]) / book.start)
        asked = {name: np.asarray(level)[t] for name, level in (levels or {}).items()}
        book.ask(np.asarray(targets)[t], asked, bar["close"])
        if not at_open:
            book.fill(bar["close"], present, here, "close")
            book.check(bar["close"])
        last = bar["close"]
        equity.append(book.equity(last))
        weights.append(np.where(book.units == 0.0, 0.0, book.units * last) / equity[-1])
    equity, seen, weights = np.array(equity) / book.start, np.array(seen), np.array(weights)
    return Outcome(equity, seen, weights, book.went, book.fills, book.small)


class Trip(NamedTuple):
    """A trade of one asset from flat to flat, or to the other side; exit is None while it is open.

    size: units entered, negative for a short. Prices are means over what entered and left. pnl: net
    of costs, as a fraction of the start's equity. most: the largest notional that a fill left.
    """

    asset: int
    entry: int
    exit: int | None
    size: float
    entry_price: float
    exit_price: float
    reason: str
    pnl: float
    most: float


def trips(fills: list[Fill], last: np.ndarray, start: float = 1.0) -> list[Trip]:
    """Put fills together to trades; what is still held counts at the prices `last`.

    A fill that changes sides costs both of its trades, in proportion to their units.
    """
    found, begun = [], {}

    def end(asset: int, row: int | None, reason: str) -> None:
        entry, size, paid, left, got, cost, most = begun.pop(asset)
        got += (size - left) * last[asset] if row is None else 0.0
        pnl = (got - paid) / start - cost
        trip = Trip(asset, entry, row, size, paid / size, got / size, reason, pnl, most / start)
        found.append(trip)

    for f in fills:
        units = f.units
        if f.asset in begun and begun[f.asset][1] * units < 0.0:
            entry, size, paid, left, got, cost, most = begun[f.asset]
            closing = -math.copysign(min(abs(units), abs(size - left)), size)
            cost += f.cost * closing / f.units
            left, got = left - closing, got - closing * f.price
            most = max(most, abs(size - left) * f.price)
            begun[f.asset] = (entry, size, paid, left, got, cost, most)
            units -= closing
            if abs(size - left) <= ROUNDING * abs(size):
                end(f.asset, f.row, f.reason)
                if abs(units) <= ROUNDING * abs(f.units):
                    continue
        if units:
            entry, size, paid, left, got, cost, most = begun.get(f.asset, (f.row, *[0.0] * 6))
            cost, size, paid = cost + f.cost * units / f.units, size + units, paid + units * f.price
            most = max(most, abs(size - left) * f.price)
            begun[f.asset] = (entry, size, paid, left, got, cost, most)
    for asset in list(begun):
        end(asset, None, "open")
    return sorted(found, key=lambda trip: (trip.entry, trip.asset))
