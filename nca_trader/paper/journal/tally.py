"""The fold of a journal: one event in; orders, cash and units, sums and the newest rows out.

Summary, parity, page and metrics read it; `Paper` follows a journal that grows. A session reads the
ledger in it alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sqlite3
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from nca_trader.errors import printable
from nca_trader.paper.clock import NANOSECONDS
from nca_trader.paper.journal.chain import (
    as_state_error,
    connect_reader,
    events_of,
    has_tables,
    writer_of,
)
from nca_trader.paper.journal.journal import Event
from nca_trader.paper.journal.ledger import Ledger, Sent
from nca_trader.paper.venue import Fill

DAY = 86_400  # seconds
GAPS = 256  # bars whose spacing tells when the next is due
NEWEST = 200  # orders and decisions that are shown
LATENCIES = 5000
RECENT = 250  # bars that the mean turnover is of, as in `paper.drift`
# What reading a body raises that has another shape than a session writes.
SHAPES = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
WORDS = {"intent": "intended", "working": "accepted"}  # for people, of an order's states
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


def finite(value: Any) -> float:
    """Return a number of a journal's body.

    Raises:
      ValueError: it is none, or is not finite.
    """
    found = number(value)
    if not math.isfinite(found):
        raise ValueError(f"{value!r} is not a finite number")
    return found


@dataclasses.dataclass
class OrderLine:
    """An order for people. ts: of its decision. body: of its intent. order: what became of it.

    slippage: of its last fill, as a fraction of the market's price. ambiguous: why the venue's
    answer left it open whether it has the order.
    """

    ts: int
    body: Mapping[str, Any]
    order: Sent
    slippage: float = math.nan
    ambiguous: str = ""

    @property
    def state(self) -> str:
        """The state in a word; of an order that ended without a fill the reason."""
        if self.order.filled:  # it is over: that a later one replaced it says nothing
            return "filled"
        state = self.order.state
        return self.order.reason if state == "done" else WORDS.get(state, state)

    @property
    def why(self) -> str:
        """What else is known of the state."""
        return self.ambiguous if self.state == "ambiguous" else ""


class Tally(Ledger):
    """A ledger, and the sums of a journal; `add` takes every event once, in order.

    A body that cannot be read is left out, and its event counted in `unread`: what else the journal
    says, such as a halt, is still shown and alerted.

    Args:
      events: of the journal.

    Attributes:
      counts: events by kind. unread: those left out. rejected, notices, risks: by their code.
      started: the body of `run_started`. symbols: the assets.
      times, equity, hold, drawdown: at each snapshot; times in seconds. `hold` buys every asset
        with the same money when the session first may, and never trades again, at no cost.
      traded: at each snapshot, money moved at the market's prices since the one before, as a
        fraction of the account. costs: commissions, and how much worse fills were than the price
        of the bar at which a backtest fills them; in money.
      snapshot, decision: the newest bodies. decisions: by time. lines: the newest orders,
        by client id.
      slippage: of each fill, as a fraction of the market's price; above 0 is a loss.
      drifts: the newest warning of each kind and feature, `(ts_event, body)`.
      watched: the newest body that says what the drift watch watches.
      latencies: seconds from a bar's close to its receipt. halts: halts and resumes.
      live: whether the session's clock is a real one. seq: of the newest event. bar_ts, seen:
        time of the newest bar, and of its receipt.
    """

    def __init__(self, events: Iterable[Event] = ()):
        super().__init__()
        self.unread = 0
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
        self.lines: dict[str, OrderLine] = {}
        self.slippage: list[float] = []
        self.drifts: dict[tuple[str, str], tuple[int, dict[str, Any]]] = {}
        self.watched: dict[str, Any] = {}
        self.latencies: deque[float] = deque(maxlen=LATENCIES)
        self.halts: list[Event] = []
        self.recons: list[Event] = []
        self.flows: dict[str, float] = {}
        self.commission = self.costs = self._amount = 0.0
        self._waiting: list[Fill] = []  # fills of a venue whose bar has not come
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
        # Kinds of other versions are counted and no more.
        take = getattr(self, f"_on_{event.kind}", lambda _: None)
        # What the books cannot read of an event does not hide the rest of it.
        booked = _is_read(self.apply, event.kind, event.key, event.body)
        self.unread += not (_is_read(take, event) and booked)

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
    def totals(self) -> tuple[float, float]:
        """The `costs` and the sum of `traded`, with those of fills whose bar has not come."""
        left = [_cost(fill, self.closes.get(fill.symbol, math.nan)) for fill in self._waiting]
        costs = self.costs + sum(paid for paid, _ in left)
        if not self.traded:
            return costs, 0.0
        amount = self._amount + sum(moved for _, moved in left)
        worth = number(self.snapshot.get("value") or None)
        return costs, math.fsum(self.traded) + amount / worth

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
        self.opens = {}
        for symbol, fields in event.body.items():
            if not symbol:  # columns of your own
                continue
            prices = numbers(fields)
            if len(prices) > CLOSE:
                self.opens[symbol], self.closes[symbol] = prices[OPEN], prices[CLOSE]
            else:
                # An asset without a bar is null in the journal.
                self.missing += 1
        # Their open is known only now that the bar has come.
        for fill in self._waiting:
            self._price(fill)
        self._waiting = []
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
        name = event.body.get("client_id", event.key)
        self.lines[name] = OrderLine(event.ts_event, event.body, self.open[name])
        self.sent_at.append(event.ts_recv)
        _keep_newest(self.lines)

    def _on_order_ambiguous(self, event: Event) -> None:
        if (line := self.lines.get(event.key.partition("#")[0])) is not None:
            line.ambiguous = str(event.body.get("reason", ""))

    def _on_fill(self, event: Event) -> None:
        fill = Fill(**event.body)
        self.commission += fill.commission
        # Orders fill at the open of the bar that reports it, or at the close that they saw. A venue
        # reports a fill at an open before the bar.
        if "venue" in self.started and not self.at_close:
            self._waiting.append(fill)
        else:
            self._price(fill)

    def _price(self, fill: Fill) -> None:
        """Note what a fill cost, and how much worse than the market's price it was."""
        # The last close stands for the open of an asset without a bar.
        price = self.closes.get(fill.symbol, math.nan)
        price = price if self.at_close else self.opens.get(fill.symbol, price)
        # Foreign fills count too: they move the account as much as its own.
        paid, moved = _cost(fill, price)
        self.costs, self._amount = self.costs + paid, self._amount + moved
        line = self.lines.get(fill.client_id)
        if line is None:  # of a margin call or a delisting, or somebody else's
            return
        # A buy above the market's price and a sale below it are both losses.
        line.slippage = math.copysign(1.0, fill.units) * (fill.price / (price or math.nan) - 1.0)
        if math.isfinite(line.slippage):
            self.slippage.append(line.slippage)

    def _on_cash(self, event: Event) -> None:
        kind = str(event.body.get("kind", "cash"))
        self.flows[kind] = self.flows.get(kind, 0.0) + event.body["amount"]

    def _on_snapshot(self, event: Event) -> None:
        equity = finite(event.body["equity"])
        if not self.equity:
            # The session decided at this close for the first time; its order fills at the open.
            self._bought = dict(self.closes) if self.at_close else {}
        self.snapshot = event.body
        # A value of 0 becomes None and so NaN: a bankrupt account has no turnover.
        worth = number(event.body.get("value") or None)
        self.traded.append(self._amount / worth)
        self._amount = 0.0
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


class Paper:
    """A paper session by its journal, which grows; each poll reads only what is new.

    Attributes:
      path: of the journal, which need not exist yet.
      tally: of its events up to the last poll. A journal that replaces another has a tally of its
        own, and so has one that is made again.
    """

    def __init__(self, path: Path):
        self.path, self.tally = path, Tally()
        self._hash: bytes | None = None  # of the last event that was read

    def poll(self) -> None:
        """Read what is new.

        Raises:
          StateError, ConfigError: it is not a journal, or cannot be read, e.g. as it is being made.
        """
        if not self.path.is_file():
            self._follow(None)
            return
        with contextlib.closing(connect_reader(self.path)) as db, as_state_error(self.path):
            self._follow(db if has_tables(self.path, db) else None)

    def _follow(self, db: sqlite3.Connection | None) -> None:
        """Take the events of a journal; None has none."""
        if db is not None:
            db.execute("BEGIN")  # one view for all that is read
        tally = self.tally
        # An inode says nothing: a file that is made in the place of another may get the same.
        if tally.seq and self._hash != _hash_at(db, tally.seq):
            tally = Tally()
        # All events or none: a damaged one among them must not leave half a tally.
        tally.add_all([] if db is None else list(events_of(db, after=tally.seq)))
        self.tally, self._hash = tally, _hash_at(db, tally.seq)

    def metrics(self, now: float) -> dict[str, float]:
        """Return the metrics at `now`, in seconds since 1970; {} before the first bar.

        paper_equity is a multiple of the capital, paper_drawdown the part that it is below its
        peak, paper_feed_age_seconds the time since the newest bar, paper_running 1 while a process
        writes the journal, paper_halted 1 while it is halted, paper_failed_bars the newest bars in
        a row whose orders all failed, 3 at most.
        """
        tally = self.tally
        if not tally.counts["bar"]:
            return {}
        found = {"paper_events": float(tally.seq)}
        found |= {f"paper_{k}s": float(tally.counts[k]) for k in ("bar", "fill") if tally.counts[k]}
        if tally.equity:
            found |= {"paper_equity": tally.equity[-1], "paper_drawdown": abs(tally.drawdown[-1])}
        found["paper_failed_bars"] = float(len(tally.failed))
        if tally.halts:
            found["paper_halted"] = float(tally.halted is not None)
        age = now - tally.seen / NANOSECONDS
        running = float(bool(writer_of(self.path)))
        return found | {"paper_feed_age_seconds": age, "paper_running": running}

    @property
    def why(self) -> dict[str, str]:
        """The reasons for values, by metric."""
        halts, reasons = self.tally.halts, {o.reason for bar in self.tally.failed for o in bar}
        found = {"paper_failed_bars": ", ".join(sorted(reasons))}
        return found | ({"paper_halted": reason_of(halts[-1].body)} if halts else {})


def _hash_at(db: sqlite3.Connection | None, seq: int) -> bytes | None:
    rows = db.execute("SELECT hash FROM event WHERE seq = ?", (seq,)) if db else ()
    return next((row[0] for row in rows), None)


def reason_of(body: Mapping[str, Any]) -> str:
    """Return the reason of a halt, a resume or a limit in words, with its numbers.

    >>> reason_of({"code": "max-drawdown", "detail": {"loss": 0.123456}})
    'max-drawdown, loss 0.1235'
    """
    parts = [str(body[k]) for k in ("code", "limit", "reason") if body.get(k)]
    detail = body.get("detail") or ()
    if isinstance(detail, Mapping):
        for name, value in detail.items():
            parts.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
    elif detail:
        parts.append(str(detail))
    return printable(", ".join(parts)) or "no reason given"


def _cost(fill: Fill, price: float) -> tuple[float, float]:
    """Return what a fill cost against the market's price, and the money that it moved."""
    price = fill.price if math.isnan(price) else price
    return fill.commission + fill.units * (fill.price - price), abs(fill.units) * price


def _is_read(take: Callable[..., object], *event: Any) -> bool:
    """Hand an event over; return whether it could be read."""
    try:
        take(*event)
    except SHAPES:
        return False
    return True


def _keep_newest(found: dict[Any, Any]) -> None:
    if len(found) > NEWEST:
        # Dictionaries keep the order of insertion, so the first key is the oldest.
        del found[next(iter(found))]
