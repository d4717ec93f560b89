"""The fold of a journal for people: one event in, sums and the newest rows out.

Summary, page and metrics read it; `paper.ledger` folds what a session holds and has ordered. Bodies
are read with care: a journal that was changed by hand, or that another version wrote, still has a
page.
"""

from __future__ import annotations

import math
from collections import ChainMap, Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from nca_trader.paper.journal import Event

NANOSECONDS = 1_000_000_000
DAY = 86_400  # seconds
GAPS = 256  # bars whose spacing tells when the next is due
NEWEST = 200  # orders and decisions that are kept
LATENCIES = 5000
RECENT = 250  # bars that the mean turnover is of, as in `paper.drift`
# Events that only change the state of an order, and that state.
STATES = {"order_sent": "sent", "order_ack": "accepted", "order_ambiguous": "ambiguous"}
# Fields of a bar in the journal.
OPEN, CLOSE = 0, 3


def number(value: Any) -> float:
    """Return a number of a journal's body; NaN where it holds something else.

    >>> number(0.5), number(None), number(True)
    (0.5, nan, nan)
    """
    # JSON's true is an int in Python, and would be shown as 1.
    usable = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if usable else math.nan


def numbers(value: Any) -> list[float]:
    """Return a list of numbers of a journal's body; [] where it holds something else."""
    return [number(item) for item in value] if isinstance(value, list) else []


class Order:
    """An order: what was sent, and what became of it."""

    def __init__(self, name: str, ts: int, body: dict[str, Any]):
        self.name, self.ts, self.body = name, ts, body
        self.state, self.reason = "intended", ""
        self.units = self.paid = self.slippage = 0.0

    @property
    def price(self) -> float:
        """Mean price paid per unit; NaN before a fill."""
        return self.paid / self.units if self.units else math.nan


class Paid(NamedTuple):
    """A fill as money. fee: commission."""

    symbol: str
    units: float
    price: float
    fee: float


class Tally:
    """The sums of a journal; `add` takes every event once, in order.

    Attributes:
      counts: events by kind. rejected, notices, risks: by their code.
      started: the body of `run_started`. symbols: the assets.
      times, equity, hold, drawdown: at each snapshot; times in seconds. `hold` buys every asset
        with the same money when the session first may, and never trades again, at no cost.
      traded: at each snapshot, money moved at the market's prices since the one before, as a
        fraction of the account. costs: commissions, and how much worse fills were than the price
        of the bar at which a backtest fills them; in money.
      snapshot, decision: the newest bodies. decisions: by time. orders: by client id.
      slippage: of each fill, as a fraction of the market's price; above 0 is a loss.
      turnover: notional traded since the snapshot before, as a fraction of equity; the last bars.
      drifts: the newest warning of each kind and feature, `(ts_event, body)`.
      watched: the newest body that says what the drift watch watches.
      latencies: seconds from a bar's close to its receipt. halts: halts and resumes.
      live: whether the session's clock is a real one. seq: of the newest event. bar_ts, seen:
        time of the newest bar, and of its receipt.
    """

    def __init__(self, events: Iterable[Event] = ()):
        self.counts: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        self.notices: Counter[str] = Counter()
        self.risks: Counter[str] = Counter()
        self.started: dict[str, Any] = {}
        self.symbols: list[str] = []
        self.times: list[float] = []
        self.equity: list[float] = []
        self.hold: list[float] = []
        self.drawdown: list[float] = []
        self.traded: list[float] = []
        self.snapshot: dict[str, Any] = {}
        self.decision: dict[str, Any] = {}
        self.decisions: dict[int, dict[str, Any]] = {}
        self.verdicts: dict[int, list[dict[str, Any]]] = {}
        self.orders: dict[str, Order] = {}
        self.slippage: list[float] = []
        self.turnover: deque[float] = deque(maxlen=RECENT)
        self.drifts: dict[tuple[str, str], tuple[int, dict[str, Any]]] = {}
        self.watched: dict[str, Any] = {}
        self.latencies: deque[float] = deque(maxlen=LATENCIES)
        self.halts: list[Event] = []
        self.recons: list[Event] = []
        self.flows: dict[str, float] = {}
        self.commission = self.costs = self._moved = self._amount = 0.0
        self._fills_at: Mapping[str, float] = {}
        self._waiting: list[Paid] = []  # fills of a venue whose bar has not come
        self._unpriced: list[tuple[Order, str, float, float]] = []  # fills before their bar's open
        self.live = self.stale = self.ended = self.stopped = False
        self.seq = 0
        self.bar_ts = self.seen = 0
        self.opens: dict[str, float] = {}
        self.closes: dict[str, float] = {}
        self.sent_at: deque[int] = deque(maxlen=NEWEST)
        self.missing = 0
        self._gaps: deque[int] = deque(maxlen=GAPS)
        self._bought: dict[str, float] | None = None
        self._peak = 0.0
        # Days are UTC, as those of the limit on a day's loss.
        self._day, self.day_start, self._before = -1, math.nan, math.nan
        self.add_all(events)

    def add_all(self, events: Iterable[Event]) -> None:
        """Take events in order."""
        for event in events:
            self.add(event)

    def add(self, event: Event) -> None:
        """Take one event."""
        self.seq = event.seq
        self.counts[event.kind] += 1
        # Only while it is the last event: a session that is continued writes more after it.
        self.ended = event.kind == "run_ended"
        self.stopped = self.ended and event.body.get("stopped", False)
        take = getattr(self, f"_on_{event.kind}", None)
        if take is not None:  # kinds of other versions are counted and no more
            take(event)

    @property
    def spacing(self) -> float:
        """Median seconds between bars; NaN before the second."""
        # The median, which one weekend among the gaps does not move.
        return float(sorted(self._gaps)[len(self._gaps) // 2]) if self._gaps else math.nan

    @property
    def patience(self) -> float:
        """Seconds after a bar's open when the next one is overdue; NaN before the second bar."""
        # Weekends and nights are among the gaps, so a market that is closed is not overdue.
        return max(self._gaps) + 2.0 * self.spacing if self._gaps else math.nan

    @property
    def halted(self) -> Event | None:
        """The halt in force, or None."""
        return self.halts[-1] if self.halts and self.halts[-1].kind == "halt" else None

    @property
    def rules(self) -> dict[str, Any]:
        """The account's rules."""
        found = self.started.get("rules")
        return found if isinstance(found, dict) else {}

    @property
    def at_close(self) -> bool:
        """Whether orders fill at the close that they saw, and not at the next open."""
        return self.rules.get("fill", "next_open") != "next_open"

    @property
    def turnover_sum(self) -> float:
        """The sum of `traded`, with what was traded since the last snapshot."""
        if not self.traded:
            return 0.0
        left = self._amount + sum(_cost(fill, self.closes)[1] for fill in self._waiting)
        return math.fsum(self.traded) + left / number(self.snapshot.get("value") or None)

    @property
    def costs_sum(self) -> float:
        """The `costs`, with those of fills whose bar has not come."""
        return self.costs + sum(_cost(fill, self.closes)[0] for fill in self._waiting)

    def _on_run_started(self, event: Event) -> None:
        self.started = event.body
        symbols = event.body.get("symbols")
        self.symbols = [str(s) for s in symbols] if isinstance(symbols, list) else []

    def _on_bar(self, event: Event) -> None:
        if self.bar_ts:
            self._gaps.append((event.ts_event - self.bar_ts) // NANOSECONDS)
        self.bar_ts, self.seen = event.ts_event, event.ts_recv
        # A replay's clock is the bar's own time.
        self.live = event.ts_recv != event.ts_event
        # Without this an asset that has no bar today would be filled at yesterday's open.
        self.opens, before = {}, dict(self.closes) if self._waiting else {}
        # The last close stands for the open of an asset without a bar.
        self._fills_at = ChainMap(self.opens, self.closes)
        for symbol, fields in event.body.items():
            prices = numbers(fields)
            if len(prices) > CLOSE:
                self.opens[symbol], self.closes[symbol] = prices[OPEN], prices[CLOSE]
            else:
                # An asset without a bar is null in the journal.
                self.missing += 1
        # What a venue filled at a close is in the journal before the next bar.
        for fill in self._waiting:
            self._pay(fill, before if self.at_close else self._fills_at)
        self._waiting = []
        # Their open is known only now that the bar has come.
        for order, symbol, units, price in self._unpriced:
            self._slip(order, units, price, self.opens.get(symbol, math.nan))
        self._unpriced = []
        if self._bought == {}:  # it waits for this bar's open
            self._bought = {s: self.opens.get(s, p) for s, p in self.closes.items()}
        spacing = self.spacing
        if self.live and math.isfinite(spacing):
            late = (event.ts_recv - event.ts_event) / NANOSECONDS - spacing
            # Bars of the warm-up come long after their close, and their delay says nothing.
            if late < spacing:
                self.latencies.append(late)
        self.stale = False

    def _on_bar_rejected(self, event: Event) -> None:
        self.rejected[str(event.body.get("reason", event.body.get("code", "no reason")))] += 1

    def _on_feed(self, event: Event) -> None:
        code = str(event.body.get("code", "no code"))
        self.notices[code] += 1
        # Any other notice, e.g. of a gap, leaves the feed as it was.
        self.stale = code == "stale" or (self.stale and code != "reconnected")

    def _on_decision(self, event: Event) -> None:
        self.decision = event.body
        self.decisions[event.ts_event] = event.body
        _keep_newest(self.decisions)

    def _on_risk(self, event: Event) -> None:
        code = str(event.body.get("code", "no code"))
        self.risks[code] += 1
        if code.startswith("drift-"):
            name = code, str(event.body.get("feature", ""))
            self.drifts.pop(name, None)  # the newest stands last
            self.drifts[name] = event.ts_event, event.body
            _keep_newest(self.drifts)
        # By time, since an order's row asks what the limits said at its decision.
        self.verdicts.setdefault(event.ts_event, []).append(event.body)
        _keep_newest(self.verdicts)

    def _on_watched(self, event: Event) -> None:
        self.watched = event.body

    def _on_order_intent(self, event: Event) -> None:
        name = str(event.body.get("client_id", event.key))
        self.orders[name] = Order(name, event.ts_event, event.body)
        self.sent_at.append(event.ts_recv)
        _keep_newest(self.orders)

    def _on_order_terminal(self, event: Event) -> None:
        order = self._order(event)
        reason = str(event.body.get("reason", event.body.get("status", "ended")))
        # A filled order is over: that a later one replaced it says nothing.
        if order is not None and not order.units:
            order.state, order.reason = reason, reason

    def _on_fill(self, event: Event) -> None:
        body = event.body
        units, price = number(body.get("units")), number(body.get("price"))
        # A body that was changed by hand must not make every later sum NaN.
        if not math.isfinite(units * price):
            return
        # Foreign fills are counted too: they move the account as much as its own.
        self._moved += abs(units * price)
        fee = number(body.get("commission"))
        fee = fee if math.isfinite(fee) else 0.0
        self.commission += fee
        symbol = str(body.get("symbol", ""))
        fill = Paid(symbol, units, price, fee)
        if "venue" in self.started:
            self._waiting.append(fill)
        else:
            self._pay(fill, self.closes if self.at_close else self._fills_at)
        order = self.orders.get(str(body.get("client_id", "")))
        if order is None:  # of a margin call or a delisting, or somebody else's
            return
        order.state = "filled"
        order.units, order.paid = order.units + units, order.paid + units * price
        # Orders fill at the open of the bar that reports it, or at the close that they saw.
        if self.at_close:
            self._slip(order, units, price, self.closes.get(symbol, math.nan))
        elif "venue" in self.started:  # the journal has the fill before the bar
            self._unpriced.append((order, symbol, units, price))
        else:
            market = self.opens if event.ts_event == self.bar_ts else self.closes
            self._slip(order, units, price, market.get(symbol, math.nan))

    def _slip(self, order: Order, units: float, price: float, market: float) -> None:
        """Note how much worse than the market's price a fill was."""
        # A buy above the market's price and a sale below it are both losses.
        order.slippage = math.copysign(1.0, units) * (price / market - 1.0) if market else math.nan
        if math.isfinite(order.slippage):
            self.slippage.append(order.slippage)

    def _pay(self, fill: Paid, market: Mapping[str, float]) -> None:
        paid, moved = _cost(fill, market)
        self.costs, self._amount = self.costs + paid, self._amount + moved

    def _on_cash(self, event: Event) -> None:
        paid = number(event.body.get("amount"))
        paid = paid if math.isfinite(paid) else 0.0
        kind = str(event.body.get("kind", "cash"))
        self.flows[kind] = self.flows.get(kind, 0.0) + paid

    def _on_snapshot(self, event: Event) -> None:
        equity = number(event.body.get("equity"))
        if not math.isfinite(equity):
            return
        if not self.equity:
            # The session decided at this close for the first time; its order fills at the open.
            self._bought = dict(self.closes) if self.at_close else {}
        self.snapshot = event.body
        # A value of 0 becomes None and so NaN: a bankrupt account has no turnover.
        worth = number(event.body.get("value") or None)
        self.turnover.append(self._moved / worth)
        self.traded.append(self._amount / worth)
        self._moved = self._amount = 0.0
        seconds = event.ts_event // NANOSECONDS
        if seconds // DAY != self._day:
            self._day = seconds // DAY
            # A day begins with the equity of the last bar before it, as for the session's own
            # limit.
            self.day_start = self._before if math.isfinite(self._before) else equity
        self._before = equity
        # The start counts as a peak, or an account that only lost would have none.
        self._peak = max(self._peak, equity, 1.0)
        self.times.append(seconds)
        self.equity.append(equity)
        self.hold.append(self._held())
        self.drawdown.append(equity / self._peak - 1.0)

    def _held(self) -> float:
        """Return what one unit of money is worth that was spread over all assets and left there."""
        if self._bought is None or not self._bought:
            return 1.0
        grown = [self.closes[s] / price for s, price in self._bought.items() if price > 0.0]
        return sum(grown) / len(grown) if grown else 1.0

    def _on_halt(self, event: Event) -> None:
        self.halts.append(event)

    _on_resume = _on_halt

    def _on_recon(self, event: Event) -> None:
        # The newest twenty, since a session at a venue writes more without end.
        self.recons = [*self.recons[-19:], event]

    def _order(self, event: Event) -> Order | None:
        return self.orders.get(str(event.body.get("client_id", event.key)))

    def _on_state(self, event: Event) -> None:
        order = self._order(event)
        if order is not None and not order.units:
            order.state = STATES[event.kind]
            order.reason = str(event.body.get("reason", ""))

    _on_order_sent = _on_order_ack = _on_order_ambiguous = _on_state


def _cost(fill: Paid, market: Mapping[str, float]) -> tuple[float, float]:
    """Return what a fill cost against the market's price, and the money that it moved."""
    price = market.get(fill.symbol, fill.price)
    return fill.fee + fill.units * (fill.price - price), abs(fill.units) * price


def _keep_newest(found: dict[Any, Any]) -> None:
    if len(found) > NEWEST:
        # Dictionaries keep the order of insertion, so the first key is the oldest.
        del found[next(iter(found))]
