"""A venue in memory that obeys a script of faults, a feed that keeps its place, a clock to advance.

The venue keeps its books by plain sums and shares no code with the package's exchange.
"""

import collections
import pathlib

import numpy as np

from nca_trader.paper.feeds.feed import ReplayFeed
from nca_trader.paper.journal.bars import bar_of, complete
from nca_trader.paper.journal.journal import Journal, read_events
from nca_trader.paper.session.router import OrderRouter
from nca_trader.paper.session.trade import open_session
from nca_trader.paper.venue import (
    Activity,
    Answer,
    Fill,
    Holdings,
    Instrument,
    OrderState,
    Outcome,
    Ticket,
    Unreachable,
)

SECOND = 1_000_000_000
RUN, BAR = "0123456789abcdef", 1_000_000  # of a `Table`: seconds of its bar's open
CLOSED = (BAR + 60) * SECOND
BEGIN = 20  # bars that are history when a session of `Room` starts


def bar_at(seconds, *rows):
    """A bar of open, high, low, close and volume of each asset; None where it is missing."""
    names = [str(number) for number in range(len(rows))]
    bar = bar_of(dict(zip(names, rows, strict=True)), tuple(names), seconds)
    return complete(bar, np.full(len(rows), np.nan))


class Still:
    """A clock that moves when somebody waits."""

    def __init__(self):
        self.waited, self.each = 0.0, []

    def now(self):
        return int(self.waited * SECOND)

    def monotonic(self):
        return self.waited

    def sleep(self, seconds):
        self.waited += seconds
        self.each.append(seconds)


class Desk:
    """Fills market orders at once, at the last close that it was told.

    script: what the next submissions meet, e.g. ["lost", "mute", "reject", "busy"]; None is well.
    """

    name, symbols = "desk", ("AAA", "BBB")

    def __init__(self, cash=1e5, script=(), share=1.0):
        self.cash, self.units, self.price = cash, {}, {}
        self.orders, self.fills, self.flows, self.foreign = {}, [], [], []
        self.script, self.share = list(script), share
        self.calls, self.submitted = [], []
        self.clock, self.down, self.cancelling = 0, 0, True
        self.late = []  # fills that are not listed yet
        self.listing = True

    def _ask(self, what):
        self.calls.append(what)
        if self.down:
            self.down -= 1
            raise Unreachable("timeout", "the desk does not answer")

    def quote(self, bar, now):
        there = zip(self.symbols, bar.close.tolist(), bar.present, strict=False)
        self.tell(now, {symbol: close for symbol, close, present in there if present})

    def tell(self, now, prices):
        self.clock = max(self.clock, now)
        self.price |= prices

    def instrument(self, symbol):
        return Instrument(symbol)

    def submit(self, ticket):
        self.calls.append("submit")
        self.submitted.append(ticket)
        fault = self.script.pop(0) if self.script else None
        if fault == "busy":
            return Answer(Outcome.BUSY, "rate-limit", 3.0)
        if fault == "lost":
            return Answer(Outcome.AMBIGUOUS, "timeout")
        if fault == "reject":
            return Answer(Outcome.REJECTED, "no-funds")
        if ticket.client_id in self.orders:
            return Answer(Outcome.REJECTED, "duplicate")
        self.orders[ticket.client_id] = [ticket, 0.0, "working"]
        if fault != "rests":
            self.execute(ticket.client_id, ticket.units * self.share)
        return Answer(Outcome.AMBIGUOUS, "timeout") if fault == "mute" else Answer(Outcome.ACCEPTED)

    def execute(self, name, units, price=None):
        order = self.orders[name]
        price = self.price[order[0].symbol] if price is None else price
        self.book(name, order[0].symbol, units, price)
        order[1] += units
        if abs(order[1] - order[0].units) < 1e-9:
            order[2] = "filled"

    def book(self, name, symbol, units, price):
        fill = Fill(
            name, f"x{len(self.fills) + len(self.late)}", symbol, units, price, 1.0, self.clock
        )
        (self.fills if self.listing else self.late).append(fill)
        self.cash -= units * price + 1.0
        self.units[symbol] = self.units.get(symbol, 0.0) + units

    def cancel(self, client_id):
        self.calls.append("cancel")
        if client_id not in self.orders:
            return Answer(Outcome.REJECTED, "unknown-order")
        if self.cancelling and self.orders[client_id][2] == "working":
            self.orders[client_id][2] = "cancelled"
        return Answer(Outcome.ACCEPTED)

    def look_up(self, client_id):
        self._ask("look_up")
        if client_id not in self.orders:
            return None
        ticket, filled, status = self.orders[client_id]
        return OrderState(client_id, ticket.symbol, ticket.units, filled, status, "v" + client_id)

    def working(self):
        self._ask("working")
        ours = [self.look_up(name) for name, order in self.orders.items() if order[2] == "working"]
        return ours + self.foreign

    def activity(self, since):
        self._ask("activity")
        return Activity([f for f in self.fills if f.ts >= since], list(self.flows))

    def holdings(self):
        self._ask("holdings")
        return Holdings(self.cash, dict(self.units))

    def now(self):
        return self.clock

    def close(self):
        pass

    @property
    def placed(self):
        """Client ids in the order of their first arrival, each once."""
        return list(self.orders)


class Tape:
    """A live feed of given bars that waits for nobody: the next bar closes when it is asked for.

    Its place is kept in a file, as time goes on while a session is dead.
    """

    def __init__(self, bars, path, begin, period=86_400, late=0, notices=None, bad=()):
        self.bad = set(bad)  # places at which a bar without a close comes before the good one
        self.bars, self.symbols, self.period, self.late = bars, bars.symbols, period, late
        self.path, self.notices = pathlib.Path(path), notices or {}
        if not self.path.exists():
            self.path.write_text(str(begin))

    @property
    def place(self):
        return int(self.path.read_text())

    def now(self):
        seconds = int(self.bars.time[self.place - 1].astype("datetime64[s]").astype(np.int64))
        return (seconds + self.period + self.late) * SECOND

    def history(self, count):
        return self.bars[max(self.place - count, 0) : self.place]

    def __iter__(self):
        while self.place < len(self.bars):
            yield from self.notices.get(self.place, ())
            part = self.path.with_suffix(".part")
            part.write_text(str(self.place + 1))
            part.replace(self.path)
            (bar,) = ReplayFeed(self.bars[self.place - 1 : self.place])
            if self.place in self.bad:
                yield bar._replace(close=np.full(len(bar.close), np.nan))
            yield bar

    def close(self):
        pass


class Telling(Tape):
    """A tape that tells a venue its time and each close, as the market would."""

    def __init__(self, *args, tell, **more):
        super().__init__(*args, **more)
        self.tell = tell
        self.tell_close()

    def tell_close(self):
        close = self.bars.close[self.place - 1].tolist()
        self.tell(self.now(), dict(zip(self.symbols, close, strict=True)))

    def __iter__(self):
        for item in super().__iter__():
            self.tell_close()
            yield item


class Table:
    """A router over a desk, at the close of one bar; `again()` is the next process."""

    def __init__(self, path, symbols, desk=None, **more):
        self.path, self.desk, self.clock, self.more = path, desk or Desk(), Still(), more
        self.symbols, self.journal = symbols, None
        prices = {symbol: 10.0 * (i + 1) for i, symbol in enumerate(symbols)}
        self.desk.tell(CLOSED, prices)
        self.again()

    def again(self):
        self.close()
        self.journal = Journal(self.path, lambda: 0)
        self.router = OrderRouter(
            self.desk, self.journal, RUN, self.symbols, self.newest_for, self.clock, **self.more
        )

    def newest_for(self, opened):
        """The bar after closes two minutes after this one opens."""
        return opened + 120.0 - self.now() / SECOND

    def now(self):
        return CLOSED + int(self.clock.waited * SECOND)

    def order(self, symbol="A", units=10.0, name=None, bar=BAR):
        name = name or f"nca-{RUN[:8]}-{bar}-{symbol}-0"
        with self.journal.transaction():
            self.router.intend(Ticket(name, symbol, units), bar, {}, CLOSED)
        return name

    def deliver(self, *args, **kwargs):
        self.router.start(CLOSED)
        name = self.order(*args, **kwargs)
        self.router.deliver(CLOSED)
        return name

    def kinds(self):
        self.journal.commit()
        return [e.kind for e in read_events(self.path) if e.kind.startswith("order")]

    def bodies(self, kind):
        self.journal.commit()
        return [e.body for e in read_events(self.path, kind)]

    def close(self):
        if self.journal:
            self.journal.close()


class Room:
    """A session over bars of `stage`, which a test can start again and again."""

    def __init__(self, stage, folder, agent=None, desk=None, num_bars=60, **tape):
        folder.mkdir(exist_ok=True)
        self.path, self.agent = folder / "paper.db", agent or stage.agent()
        self.bars = stage.bars(num_bars=num_bars, symbols=self.agent.symbols)
        self.folder = folder
        self.desk, self.tape_options = desk or Desk(), tape
        self.clock = Still()

    def tape(self):
        return Tape(self.bars, self.folder / "tape", BEGIN, **self.tape_options)

    def miss(self, bars):
        """Let bars close while no session is alive."""
        place = self.folder / "tape"
        place.write_text(str(int(place.read_text()) + bars))

    def trade(self, bars=10**6, tape=None, until=None):
        """Trade until the given number of bars has closed while the session was alive.

        until: of another feed than a tape the open of the last bar, in seconds.
        """
        tape, last = tape or self.tape(), until
        if last is None:
            row = min(tape.place + bars, len(self.bars)) - 1
            last = self.bars.time[row].astype("datetime64[s]").astype(int)
        with Journal(self.path, tape.now) as journal:
            session = open_session(
                self.agent, tape, self.desk, journal, 1e5, warmup=10, clock=self.clock
            )
            return session.trade(lambda: (session._state.last or 0) >= last)

    def bodies(self, kind):
        return [event.body for event in read_events(self.path, kind)]

    def kinds(self):
        return collections.Counter(event.kind for event in read_events(self.path))
